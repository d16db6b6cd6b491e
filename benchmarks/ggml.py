"""llama.cpp's products alone, by ctypes: ggml's functions in the libraries of llama_cpp.Library."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np

from . import llama_cpp

POINTER, SIZE, LONG, INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64, ctypes.c_int32
TYPES = {"Q4_0": 2, "Q8_0": 8, "MXFP4": 39}  # of ggml_type
F32, I32 = 0, 26


class InitParams(ctypes.Structure):
    _fields_ = (("size", SIZE), ("memory", POINTER), ("no_alloc", ctypes.c_bool))


FUNCTIONS = {
    "ggml_init": (POINTER, InitParams),
    "ggml_free": (None, POINTER),
    "ggml_new_tensor_2d": (POINTER, POINTER, INT, LONG, LONG),
    "ggml_new_tensor_3d": (POINTER, POINTER, INT, LONG, LONG, LONG),
    "ggml_mul_mat": (POINTER, POINTER, POINTER, POINTER),
    "ggml_mul_mat_id": (POINTER, POINTER, POINTER, POINTER, POINTER),
    "ggml_new_graph": (POINTER, POINTER),
    "ggml_build_forward_expand": (None, POINTER, POINTER),
    "ggml_backend_dev_by_type": (POINTER, INT),
    "ggml_backend_dev_init": (POINTER, POINTER, ctypes.c_char_p),
    "ggml_backend_dev_backend_reg": (POINTER, POINTER),
    "ggml_backend_dev_buffer_type": (POINTER, POINTER),
    "ggml_backend_dev_supports_op": (ctypes.c_bool, POINTER, POINTER),
    "ggml_backend_reg_get_proc_address": (POINTER, POINTER, ctypes.c_char_p),
    "ggml_backend_buft_alloc_buffer": (POINTER, POINTER, SIZE),
    "ggml_backend_buft_get_alloc_size": (SIZE, POINTER, POINTER),
    "ggml_backend_buft_name": (ctypes.c_char_p, POINTER),
    "ggml_backend_buffer_get_base": (POINTER, POINTER),
    "ggml_backend_buffer_set_usage": (None, POINTER, INT),
    "ggml_backend_buffer_free": (None, POINTER),
    "ggml_backend_tensor_alloc": (INT, POINTER, POINTER, POINTER),
    "ggml_backend_tensor_set": (None, POINTER, POINTER, SIZE, SIZE),
    "ggml_backend_tensor_get": (None, POINTER, POINTER, SIZE, SIZE),
    "ggml_backend_alloc_ctx_tensors": (POINTER, POINTER, POINTER),
    "ggml_backend_graph_compute": (INT, POINTER, POINTER),
    "ggml_backend_free": (None, POINTER),
}


@functools.cache
def library() -> Any:
    loaded = llama_cpp.Library()
    calls: Any = loaded.calls
    calls.owner = loaded  # it has a callback
    for name, (result, *arguments) in FUNCTIONS.items():
        function = getattr(calls, name)
        function.restype, function.argtypes = result, arguments
    return calls


def blocks(kind: str, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The bytes of a weight (G, N, K): a scale, then 32 codes."""
    *lead, k = codes.shape
    codes = codes.reshape(*lead, k // 32, 32)
    if kind == "Q8_0":
        scale, codes = scales.astype(np.float16), codes ^ 128  # int8
    else:
        scale = scales if kind == "MXFP4" else scales.astype(np.float16)
        codes = codes[..., :16] | codes[..., 16:] << 4
    scale = scale[..., None].view(np.uint8)
    return np.ascontiguousarray(np.concatenate([scale, codes], axis=-1))


class Product:
    """x (rows, K) by weights (G, N, K); ``experts`` are the rows'. Weights are where llama.cpp puts
    them: in the first kind of memory that can multiply them, which may repack them."""

    def __init__(self, calls, kind, raw, shape, experts, threads: int, together: bool):
        self.calls, self.rows = calls, len(experts)
        groups, self.n, k = shape
        self.device = calls.ggml_backend_dev_by_type(0)
        self.backend = calls.ggml_backend_dev_init(self.device, None)
        self.registry = calls.ggml_backend_dev_backend_reg(self.device)
        set_threads = self._function(b"ggml_backend_set_n_threads", None, POINTER, INT)
        set_threads(self.backend, threads)
        params = InitParams(1 << 20, None, True)
        self.weights, self.context = calls.ggml_init(params), calls.ggml_init(params)
        tensor_2d, tensor_3d = calls.ggml_new_tensor_2d, calls.ggml_new_tensor_3d
        self.inputs, outputs, ids = [], [], None
        if together:
            w = [tensor_3d(self.weights, TYPES[kind], k, self.n, groups)]
            self.inputs = [tensor_3d(self.context, F32, k, 1, self.rows)]
            ids = tensor_2d(self.context, I32, 1, self.rows)
            outputs = [calls.ggml_mul_mat_id(self.context, w[0], self.inputs[0], ids)]
        else:
            each = self.rows // groups
            w = [tensor_2d(self.weights, TYPES[kind], k, self.n) for _ in range(groups)]
            for part in range(groups):
                x = tensor_2d(self.context, F32, k, each)
                self.inputs.append(x)
                outputs.append(calls.ggml_mul_mat(self.context, w[experts[part * each]], x))
        self.outputs = outputs
        self.graph = calls.ggml_new_graph(self.context)
        for out in outputs:
            calls.ggml_build_forward_expand(self.graph, out)
        self.memory = self._place(w, outputs[0])
        for tensor, part in zip(w, raw.reshape(len(w), -1), strict=True):
            calls.ggml_backend_tensor_set(tensor, part.ctypes.data, 0, part.nbytes)
        self.buffer = calls.ggml_backend_alloc_ctx_tensors(self.context, self.backend)
        if ids is not None:
            numbers = np.ascontiguousarray(experts, np.int32)
            calls.ggml_backend_tensor_set(ids, numbers.ctypes.data, 0, numbers.nbytes)

    def _function(self, name: bytes, result, *arguments):
        address = self.calls.ggml_backend_reg_get_proc_address(self.registry, name)
        return ctypes.CFUNCTYPE(result, *arguments)(address)

    def _place(self, tensors, op) -> list[Any]:
        """Memory for the weights; ``op`` says which kinds can multiply them."""
        calls = self.calls
        extra = self._function(
            b"ggml_backend_dev_get_extra_bufts", ctypes.POINTER(POINTER), POINTER
        )(self.device)
        kinds = []
        while extra and extra[len(kinds)]:
            kinds.append(extra[len(kinds)])
        kinds.append(calls.ggml_backend_dev_buffer_type(self.device))
        for kind in kinds:
            probe = calls.ggml_backend_buft_alloc_buffer(kind, 0)
            for tensor in tensors:
                _set_buffer(tensor, probe)
            takes = calls.ggml_backend_dev_supports_op(self.device, op)
            for tensor in tensors:
                _set_buffer(tensor, None)
            calls.ggml_backend_buffer_free(probe)
            if not takes:
                continue
            self.kind = calls.ggml_backend_buft_name(kind).decode()
            buffers = []
            for tensor in tensors:
                size = calls.ggml_backend_buft_get_alloc_size(kind, tensor)
                buffers.append(calls.ggml_backend_buft_alloc_buffer(kind, size))
                calls.ggml_backend_buffer_set_usage(buffers[-1], 1)  # weights
                base = calls.ggml_backend_buffer_get_base(buffers[-1])
                calls.ggml_backend_tensor_alloc(buffers[-1], tensor, base)
            return buffers
        raise RuntimeError("llama.cpp has no memory that can multiply these weights")

    def set(self, x: np.ndarray) -> None:
        for tensor, part in zip(self.inputs, np.split(x, len(self.inputs)), strict=True):
            part = np.ascontiguousarray(part, np.float32)
            self.calls.ggml_backend_tensor_set(tensor, part.ctypes.data, 0, part.nbytes)

    def run(self) -> None:
        if self.calls.ggml_backend_graph_compute(self.backend, self.graph):
            raise RuntimeError("llama.cpp does not compute")

    def result(self) -> np.ndarray:
        out = np.zeros((self.rows, self.n), np.float32)
        for tensor, part in zip(self.outputs, np.split(out, len(self.outputs)), strict=True):
            self.calls.ggml_backend_tensor_get(tensor, part.ctypes.data, 0, part.nbytes)
        return out

    def close(self) -> None:
        for buffer in (*self.memory, self.buffer):
            self.calls.ggml_backend_buffer_free(buffer)
        self.calls.ggml_backend_free(self.backend)
        self.calls.ggml_free(self.weights)
        self.calls.ggml_free(self.context)


def _set_buffer(tensor: int, buffer: int | None) -> None:
    """A tensor begins with its type, then its buffer. No function of ggml sets that alone."""
    POINTER.from_address(tensor + 8).value = buffer
