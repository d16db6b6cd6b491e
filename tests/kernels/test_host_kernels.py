"""CUDA kernels that tests run on the host, again under sanitizers: reads outside of operands, and
lanes that read what others write without meeting them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import host_program
import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [host_program.needs_compiler, pytest.mark.weekly]
FILES = [
    "grouped/test_lora_kernel", "grouped/test_lora_wgrad_kernel",
    "fp8/test_fp8_activation_kernels", "fp8/test_fp8_quantize_kernels",
    "fp8/test_fp8_sm89_kernel",
    "moe/test_few_dense_kernel", "moe/test_few_tokens_kernel", "moe/test_moe_kernels",
    "moe/test_router_kernel", "moe/test_top_k_kernel",
    "nvfp4/test_nvfp4_quantize_kernels", "quantized/test_direct_kernel",
    "quantized/test_direct_rows", "quantized/test_packed_kernel", "quantized/test_prepack_host",
    "quantized/test_prepack_fp8_kernel", "quantized/test_quantize_kernels",
]  # fmt: skip
RACE = """
import ctypes, os, sys
sys.path.insert(0, "tests/lib")
import host_program
kernel = host_program.build_kernels("racing_kernel").racing_kernel
numbers = (ctypes.c_int * 64)(*range(64))
kernel(numbers, (ctypes.c_int * 64)(), {meet})
"""


def library(name: str) -> str:
    command = [host_program.COMPILER, f"-print-file-name=lib{name}.so"]
    path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(path).is_absolute():
        pytest.skip(f"the compiler has no lib{name}")
    return path


def fixed_addresses() -> list[str]:
    """Where addresses are random, ThreadSanitizer fails now and then to find room for its own."""
    command = ["setarch", "-R"]
    works = shutil.which("setarch") and subprocess.run([*command, "true"]).returncode == 0
    return command if works else []


def run(tmp_path, sanitizer: str, *arguments: str) -> str:
    """Runs a Python program. Returns the sanitizer's findings, an empty text if there are none."""
    log = tmp_path / "found"
    short = {"address": "asan", "thread": "tsan"}[sanitizer]
    # Python and JAX were not compiled for it, so both libraries come first.
    environment = os.environ | {
        "LD_PRELOAD": f"{library(short)} {library('stdc++')}",
        "JGG_TESTS_SANITIZER": sanitizer,
        "JGG_TESTS_FOLDER": str(tmp_path),
        "JAX_PLATFORMS": "cpu",
        "ASAN_OPTIONS": f"detect_leaks=0:verify_asan_link_order=0:log_path={log}",
        "TSAN_OPTIONS": f"ignore_noninstrumented_modules=1:log_path={log}",
    }
    environment.pop("PYTEST_XDIST_WORKER", None)
    done = subprocess.run(
        [*fixed_addresses(), sys.executable, *arguments], env=environment, cwd=ROOT,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = "".join(path.read_text() for path in tmp_path.glob("found*"))
    assert found or done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return found


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_kernels(tmp_path, sanitizer, file):
    options = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"tests/{file}.py")
    assert run(tmp_path, sanitizer, *options) == ""


def test_a_race_is_found(tmp_path):
    """Two warps, with and without their barrier."""
    assert run(tmp_path, "thread", "-c", RACE.format(meet=1)) == ""
    assert "data race" in run(tmp_path, "thread", "-c", RACE.format(meet=0))
