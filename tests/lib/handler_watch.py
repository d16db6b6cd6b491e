"""Counts calls of FFI handlers, and their calls of the CUDA API: see handler_watch.cc.

Watched are handlers that are registered after :meth:`Watch.handlers`. Importing the package
registers its own, so this file does not import it, and :func:`watched` starts a process.
"""

import contextlib
import ctypes
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

COMPILER = shutil.which("c++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
CALLS = ""  # in the place of a function's name: calls of the handler itself

Address = ctypes.c_void_p


WATCHED = """
import importlib, json, sys
sys.path[:] = sys.argv[1].split(':')
import handler_watch
watch = handler_watch.Watch()
watch.handlers(sys.argv[2])
print(json.dumps(getattr(importlib.import_module(sys.argv[3]), sys.argv[4])(watch)))
"""


def watched(platform: str, function: Callable[["Watch"], Any]) -> Any:
    """``function(watch)`` in a process that watches the package's handlers of a platform."""
    names = function.__module__, function.__name__
    command = [sys.executable, "-c", WATCHED, ":".join(sys.path), platform, *names]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def build() -> ctypes.CDLL:
    assert COMPILER is not None
    source = Path(__file__).with_suffix(".cc")
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    with tempfile.TemporaryDirectory() as folder:  # once loaded, the file is not needed
        path = Path(folder) / "handler_watch.so"
        subprocess.run([COMPILER, *flags, str(source), "-o", str(path)], check=True)
        return ctypes.CDLL(str(path))


class Watch:
    def __init__(self):
        self._library = library = build()
        library.Wrap.restype, library.Wrap.argtypes = Address, (ctypes.c_char_p, Address)
        library.Subscribe.argtypes = (Address, Address)
        library.Stop.restype = ctypes.c_char_p

    def wrap(self, name: str, handler: Address) -> int:
        """The address of a handler that does what ``handler`` does."""
        wrapper = self._library.Wrap(name.encode(), handler)
        if wrapper is None:
            raise RuntimeError("too many handlers: raise kMost in handler_watch.cc")
        return wrapper

    def handlers(self, platform: str) -> None:
        """Watch every handler of a platform that is registered from now on."""
        register, watched = jax.ffi.register_ffi_target, platform

        def register_wrapped(name, handler, platform="cpu", **options):
            if platform == watched:
                handler = jax.ffi.pycapsule(Address(self.wrap(name, _address(handler))))
            register(name, handler, platform=platform, **options)

        jax.ffi.register_ffi_target = register_wrapped

    def subscribe(self, cupti: Any = None) -> None:
        """To all calls of the CUDA API in this process."""
        cupti = cuda_library("libcupti") if cupti is None else cupti
        functions = (cupti.cuptiSubscribe, cupti.cuptiEnableDomain)
        error = self._library.Subscribe(*(ctypes.cast(f, Address) for f in functions))
        if error:
            raise RuntimeError(f"CUPTI does not subscribe: CUptiResult {error}")

    @contextlib.contextmanager
    def recorded(self) -> Iterator[dict[str, dict[str, int]]]:
        """Of each handler that runs inside: how often, and how often it calls which functions.

        Filled in at the end.
        """
        found: dict[str, dict[str, int]] = {}
        self._library.Start()
        try:
            yield found
        finally:
            for line in self._library.Stop().decode().splitlines():
                handler, function, calls = line.split("\t")
                found.setdefault(handler, {})[function] = int(calls)


def _address(capsule) -> Address:
    api = ctypes.pythonapi
    api.PyCapsule_GetName.restype, api.PyCapsule_GetName.argtypes = Address, (ctypes.py_object,)
    api.PyCapsule_GetPointer.restype = Address
    api.PyCapsule_GetPointer.argtypes = (ctypes.py_object, Address)
    return Address(api.PyCapsule_GetPointer(capsule, api.PyCapsule_GetName(capsule)))


def cuda_library(name: str) -> ctypes.CDLL:
    """The one that is loaded already, or of the packages nvidia-*, or of a toolkit."""
    spec = importlib.util.find_spec("nvidia")
    packages = [] if spec is None else spec.submodule_search_locations or []
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    folders = [folder for package in packages for folder in Path(package).glob("*/lib")]
    folders += [toolkit / "lib64", toolkit / "extras/CUPTI/lib64"]
    for file in (f"{name}.so.{major}" for major in (13, 12)):
        for path in (file, *(folder / file for folder in folders)):
            with contextlib.suppress(OSError):
                return ctypes.CDLL(str(path))
    raise RuntimeError(f"there is no {name} of CUDA 13 or 12 in {', '.join(map(str, folders))}")
