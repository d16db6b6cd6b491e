"""The kernels' C++ with the host's compiler: a program of this folder as a library of ctypes."""

import ctypes
import fcntl
import functools
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_groupgemm as jgg
from jax_groupgemm._quantized.codes import pack

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which("c++")
# Not optimized: compiling takes longer than running.
FLAGS = ("-O0", "-ffp-contract=off", "-shared", "-fPIC")
FLAGS += ("-Wall", "-Werror", "-Wno-unknown-pragmas")  # CUDA's unroll
# By tests/kernels/test_host_kernels.py: "address" or "thread".
SANITIZER = os.environ.get("JGG_TESTS_SANITIZER")
SANITIZED = (f"-fsanitize={SANITIZER}", "-O1", "-g") if SANITIZER else ()
# A program's number of a mode or dtype is the place in these.
MODES = ("affine", "mxfp4", "mxfp8", "nvfp4", "fp8")
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}

needs_compiler = pytest.mark.skipif(
    COMPILER is None or not (ROOT / "ffi").exists(), reason="needs a C++ compiler and the sources"
)


@functools.cache
def build(name: str, *options: str, standard: str = "c++17") -> ctypes.CDLL:
    """tests/lib/``name``.cc, once in a run of pytest: whichever process asks first compiles it."""
    assert COMPILER is not None
    file = "".join([name, *options]).replace("/", "_") + ".so"
    path = Path(os.environ["JGG_TESTS_FOLDER"]) / file  # conftest.py
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            compile_to(path, name, f"-std={standard}", *options)
    return ctypes.CDLL(str(path))


def compile_to(path: Path, name: str, *options: str) -> None:
    unfinished = path.with_suffix(".part")
    paths = [f"tests/lib/{name}.cc", "-I", "ffi", "-o", str(unfinished)]
    command = [COMPILER, *FLAGS, *options, *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    unfinished.rename(path)


def build_kernels(name: str, *options: str) -> ctypes.CDLL:
    """A program with cuda_on_host.h, which needs the barriers of C++20."""
    command = [COMPILER, "-std=c++20", "-E", "-include", "barrier", "-xc++", "-"]
    if subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True).returncode != 0:
        pytest.skip("needs a C++20 library")
    return build(name, "-pthread", *options, *SANITIZED, standard="c++20")


def cutlass_headers() -> list[str] | None:
    """Folders of the headers of CUTLASS and CUDA, where there are some."""
    cutlass = importlib.util.find_spec("cutlass_library")
    homes = [Path("/usr/local/cuda/include")]
    nvidia = importlib.util.find_spec("nvidia")
    homes += [
        Path(p) / "cu13/include" for p in (nvidia and nvidia.submodule_search_locations) or ()
    ]
    cuda = next((h for h in homes if (h / "cccl/cuda/std/utility").exists()), None)
    if cutlass is None or cuda is None:
        return None
    (package,) = cutlass.submodule_search_locations or ()
    paths = [Path(package) / "source/include", cuda, cuda / "cccl"]
    return [option for path in paths for option in ("-isystem", str(path))]


def mode_number(mode: str) -> int:
    return MODES.index(mode)


def dtype_number(dtype) -> int:
    return list(DTYPES).index(np.dtype(dtype).name)


def pointer(array: np.ndarray | None) -> ctypes.c_void_p | None:
    """To the data of an array; null without one."""
    if array is None:
        return None
    out = ctypes.c_void_p(array.ctypes.data)
    out.array = array  # keep it alive
    return out


def affine_parameters(rng, dtype, count: int) -> np.ndarray:
    """(2, count): scales and biases. The first half as weights have them, the others any bits."""
    word = {2: np.uint16, 4: np.uint32}[dtype.itemsize]
    any_bits = rng.integers(0, 2 ** (8 * dtype.itemsize), (2, count), np.uint64).astype(word)
    both = any_bits.view(dtype)
    scales, biases = both[:, : count // 2]
    scales[:] = (rng.normal(size=count // 2) / 64).astype(dtype)
    steps = rng.integers(-20, 20, count // 2)
    biases[:] = (scales.astype(np.float32) * steps).astype(dtype)
    return both


def every_code_and_scale(rng, mode: str) -> jgg.Quantized:
    """(256, 2, 256): row n has scale byte n, and first every code, then those but for NaN."""
    bits, group = (8, 32) if mode == "mxfp8" else (4, 16 if mode == "nvfp4" else 32)
    codes = np.arange(256, dtype=np.uint32) % 2**bits
    codes = np.stack([codes, np.where(codes & 0x7F == 0x7F, 0, codes)])
    codes = np.broadcast_to(codes, (256, 2, 256))
    scales = np.empty((256, 2, 256 // group), np.uint8)
    scales[:] = np.arange(256, dtype=np.uint8)[:, None, None]
    if mode == "nvfp4":  # two for 32 codes
        scales[..., 1::2] = rng.integers(0, 256, scales[..., 1::2].shape)
    packed = np.asarray(pack(jnp.asarray(codes), bits))
    return jgg.Quantized(packed, scales, mode=mode, bits=bits, group_size=group)
