"""llama.cpp's library, as far as measurements and comparisons need it.

The library is that of ``xllamacpp``, from pip, or the one that ``JGG_LIBLLAMA`` names: a
libllama.so with its ggml libraries beside it. Its structs grow from version to version, so here
they are bytes: llama.cpp fills them with its defaults, and what is changed is asked back.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

POINTER, INT, UINT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_uint32
LOG = ctypes.CFUNCTYPE(None, INT, ctypes.c_char_p, POINTER)


class Bytes(ctypes.Structure):
    """A struct that is passed by value, of at most so many bytes."""

    _fields_ = (("words", ctypes.c_uint64 * 64),)

    def number(self, at: int, value: int) -> None:
        ctypes.memmove(ctypes.addressof(self) + at, ctypes.byref(UINT(value)), 4)


FUNCTIONS = {
    "llama_backend_init": (None,),
    "llama_model_default_params": (Bytes,),
    "llama_model_load_from_file": (POINTER, ctypes.c_char_p, Bytes),
    "llama_model_free": (None, POINTER),
    "llama_model_get_vocab": (POINTER, POINTER),
    "llama_model_chat_template": (ctypes.c_char_p, POINTER, ctypes.c_char_p),
    "llama_context_default_params": (Bytes,),
    "llama_init_from_model": (POINTER, POINTER, Bytes),
    "llama_free": (None, POINTER),
    "llama_n_ctx": (UINT, POINTER),
    "llama_n_batch": (UINT, POINTER),
    "llama_set_n_threads": (None, POINTER, INT, INT),
    "llama_batch_get_one": (Bytes, POINTER, INT),
    "llama_decode": (INT, POINTER, Bytes),
    "llama_get_logits_ith": (ctypes.POINTER(ctypes.c_float), POINTER, INT),
    "llama_vocab_n_tokens": (INT, POINTER),
    "llama_tokenize": (
        INT, POINTER, ctypes.c_char_p, INT, ctypes.POINTER(INT), INT, ctypes.c_bool, ctypes.c_bool,
    ),
    "llama_print_system_info": (ctypes.c_char_p,),
}  # fmt: skip
FILE_TYPES = {"Q8_0": 7, "Q2_K": 10, "Q4_K_M": 15, "Q5_K_M": 17, "Q6_K": 18}  # of llama_ftype


class Library:
    def __init__(self, path: str | None = None):
        path = path or os.environ.get("JGG_LIBLLAMA")
        if path is None:
            path = str(importlib.import_module("xllamacpp.xllamacpp").__file__)
        self.path = path
        self.calls = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        for name, (result, *arguments) in FUNCTIONS.items():
            function = getattr(self.calls, name)
            function.restype, function.argtypes = result, arguments
        self._quiet = LOG(lambda *_: None)
        self.calls.llama_log_set(self._quiet, None)
        self._load_backends()
        self.calls.llama_backend_init()

    def _load_backends(self) -> None:
        """Load the file for this CPU, where a library has one for each kind."""
        beside = Path(self.path).parent
        for name in beside.glob("libggml.*so*"):
            load = ctypes.CDLL(str(name), mode=ctypes.RTLD_GLOBAL).ggml_backend_load_all_from_path
            load.restype, load.argtypes = None, [ctypes.c_char_p]
            load(str(beside).encode())

    def system(self) -> str:
        """The instructions that it uses."""
        return self.calls.llama_print_system_info().decode()

    def quantize(self, path: Path, out: Path, kind: str) -> None:
        """A file in another type, as llama-quantize makes it. ``xllamacpp`` lacks this."""
        default = self.calls.llama_model_quantize_default_params
        default.restype, default.argtypes = Bytes, []
        params = default()
        params.number(0, 1)  # threads
        params.number(4, FILE_TYPES[kind])
        names = str(path).encode(), str(out).encode()
        if self.calls.llama_model_quantize(*names, ctypes.byref(params)):
            raise RuntimeError(f"llama.cpp does not quantize {path}")


class Model:
    """A file that llama.cpp has loaded, and what it remembers of one text."""

    def __init__(self, library: Library, path: Path, room: int, threads: int, batch: int = 512):
        self.calls = calls = library.calls
        params = calls.llama_model_default_params()
        self.model = calls.llama_model_load_from_file(str(path).encode(), params)
        if not self.model:
            raise RuntimeError(f"llama.cpp does not load {path}")
        self.vocab = calls.llama_model_get_vocab(self.model)
        self.size, self.room, self.threads, self.batch = self._size(), room, threads, batch
        self.context = None
        self.clear()

    def _size(self) -> int:
        return self.calls.llama_vocab_n_tokens(self.vocab)

    def clear(self) -> None:
        """Forget the text."""
        if self.context:
            self.calls.llama_free(self.context)
        params = self.calls.llama_context_default_params()
        params.number(0, self.room)
        params.number(4, self.batch)
        self.context = self.calls.llama_init_from_model(self.model, params)
        if not self.context or self.calls.llama_n_batch(self.context) != min(self.batch, self.room):
            raise RuntimeError("llama.cpp has other parameters than were asked for")
        self.calls.llama_set_n_threads(self.context, self.threads, self.threads)

    def close(self) -> None:
        self.calls.llama_free(self.context)
        self.calls.llama_model_free(self.model)

    def read(self, tokens: Sequence[int]) -> np.ndarray:
        """Logits after the last of these tokens, which follow those before."""
        for start in range(0, len(tokens), self.batch):
            part = np.asarray(tokens[start : start + self.batch], np.int32)
            batch = self.calls.llama_batch_get_one(part.ctypes.data, len(part))
            if self.calls.llama_decode(self.context, batch):
                raise RuntimeError("llama.cpp does not decode")
        found = self.calls.llama_get_logits_ith(self.context, -1)
        return np.ctypeslib.as_array(found, (self.size,)).copy()

    def each(self, tokens: Sequence[int]) -> np.ndarray:
        """Logits after each of these tokens."""
        return np.stack([self.read([token]) for token in tokens])

    def generate(self, prompt: Sequence[int], count: int) -> Iterator[int]:
        """The likeliest tokens after a prompt."""
        tokens = prompt
        for _ in range(count):
            tokens = [int(self.read(tokens).argmax())]
            yield tokens[0]

    def tokenize(self, text: str, begin: bool = True) -> list[int]:
        raw = text.encode()
        out = (INT * (len(raw) + 16))()
        count = self.calls.llama_tokenize(self.vocab, raw, len(raw), out, len(out), begin, True)
        if count < 0:
            raise RuntimeError(f"llama.cpp has {-count} tokens for {len(raw)} bytes")
        return list(out[:count])
