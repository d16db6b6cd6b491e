"""The CPU handlers: long sums, forged tables, and a program that calls them without XLA: random
cases, allocations that fail and bodies that throw, also under sanitizers."""

import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jax_groupgemm as jgg

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which("c++")
# The last ones are compiled for each instruction set, with a name for it.
LEVELS = {
    "ffi/cpu/gemm": "JGG_GEMM=GemmV{}",
    "ffi/cpu/lines": "JGG_LINES=kLinesV{}",
    "ffi/cpu/encode": "JGG_ENCODE=EncodeV{}",
}
SOURCES = ["tests/lib/cpu_handlers", "ffi/grouped_mm/mm_cpu", "ffi/grouped_mm/wgrad_cpu"]
SOURCES += ["ffi/quantized/qmm_cpu", "ffi/quantized/quantize_cpu", "ffi/cpu/select", *LEVELS]
DTYPES = ("float32", "bfloat16", "float16")


@pytest.fixture(autouse=True)
def on_cpu():
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        yield


# ---- without XLA -----------------------------------------------------------------------------


def build_program(folder: Path, *options: str) -> Path:
    """tests/lib/cpu_handlers.cc with the handlers; each file is compiled by its own process."""
    headers = jax.ffi.include_dir()
    flags = ["-std=c++17", "-pthread", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", *options]
    # XLA asks for unused parameters; the program replaces operator new by malloc. Functions that
    # take vectors are called in their own file.
    flags += ["-Wno-psabi", "-Wno-unused-parameter", "-Wno-mismatched-new-delete", "-I", "ffi"]

    def compile_one(source: str, name: str, *more: str) -> str:
        out = str(folder / f"{name}.o")
        command = [COMPILER, *flags, *more, "-isystem", headers, "-c", f"{source}.cc", "-o", out]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        return out

    with ThreadPoolExecutor(2) as threads:
        jobs = [threads.submit(compile_one, source, Path(source).name) for source in SOURCES]
        if "-DJGG_X86_LEVELS" in options:
            for level in (3, 4):
                for source, name in LEVELS.items():
                    more = [f"-D{name.format(level)}", f"-march=x86-64-v{level}"]
                    # It makes minutes of seconds.
                    more += ["-fno-sanitize=undefined"] if source == "ffi/cpu/lines" else []
                    object_name = f"{Path(source).name}_v{level}"
                    jobs.append(threads.submit(compile_one, source, object_name, *more))
        objects = [job.result() for job in jobs]
    program = folder / "cpu_handlers"
    link = [COMPILER, "-pthread", *options, *objects, "-o", str(program)]
    done = subprocess.run(link, capture_output=True, text=True, check=False)
    if done.returncode != 0 and any("-fsanitize" in option for option in options):
        pytest.skip(f"the compiler has no sanitizer: {done.stderr[-200:]}")
    assert done.returncode == 0, done.stderr
    return program


def levels() -> list[str]:
    """Options that make every kernel this kind of processor has."""
    command = [COMPILER, "-march=x86-64-v4", "-xc++", "-E", "/dev/null"]
    known = subprocess.run(command, capture_output=True, check=False).returncode == 0
    return ["-DJGG_X86_LEVELS"] if known else []


@pytest.mark.skipif(
    COMPILER is None or not (ROOT / "ffi").exists(), reason="needs a C++ compiler and the sources"
)
@pytest.mark.parametrize(
    ("options", "cases"),
    [
        pytest.param(("-O0",), 60, id="as it is"),
        pytest.param(
            ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
            2000, id="address", marks=pytest.mark.weekly,
        ),
        pytest.param(
            ("-O1", "-g", "-fsanitize=thread"), 1000, id="thread", marks=pytest.mark.weekly
        ),
    ],
)  # fmt: skip
def test_program(tmp_path, options, cases):
    if "-O0" not in options:
        options = (*options, *levels())
    program = build_program(tmp_path, *options)
    done = subprocess.run([program, "0", str(cases)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"{cases} cases, 0 problems\n"), done.stderr


# ---- long sums -------------------------------------------------------------------------------


def long_mm(a, b, out_dtype):
    rows = jnp.array([a.shape[0]])
    return jgg.grouped_mm(a, b[None], rows, preferred_element_type=out_dtype, implementation="cpu")


def long_wgrad(a, b, out_dtype):
    whole = jnp.array([[0, a.shape[1]]])
    return jgg.segmented_mm(a, b, whole, preferred_element_type=out_dtype, implementation="cpu")[0]


PRODUCTS = [pytest.param(long_mm, id="mm"), pytest.param(long_wgrad, id="wgrad")]


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.one_in(9)
def test_equal_addends(product, dtype, out_dtype):
    """A float32 sum of so many stops half-way."""
    k = 2**25
    a, b = jnp.full((1, k), 2.0**-14, dtype), jnp.ones((k, 1), dtype)
    assert product(a, b, out_dtype).astype(float) == 2.0**11


def test_bias_gradient():
    rows = 2**25
    x, w, b = jnp.zeros((rows, 1)), jnp.zeros((1, 1, 1)), jnp.zeros((1, 1))
    loss = lambda b: jgg.grouped_mm(x, w, jnp.array([rows]), bias=b, implementation="cpu").sum()
    assert jax.grad(loss)(b) == rows


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize(
    "k", [512, 2**14, 2**17, *(pytest.param(2**i, marks=pytest.mark.weekly) for i in (20, 26))]
)
@pytest.mark.parametrize("data", ["uniform", "half-normal"])
@pytest.mark.one_in(3)
def test_positive_data(rng, product, k, data):
    """The largest error is that of a few roundings, whatever K is."""
    m = 8 if k < 2**22 else 1
    draw = rng.random if data == "uniform" else lambda *of: np.abs(rng.standard_normal(*of))
    a, b = draw((m, k), np.float32), draw((k, m), np.float32)
    want = oracle.f64(a) @ oracle.f64(b)
    got = oracle.f64(product(a, b, None))
    assert np.max(np.abs(got / want - 1)) <= 1e-6


# ---- tables ----------------------------------------------------------------------------------


def call(target, name, out_shape, a, b, table, **flags):
    out = jax.ShapeDtypeStruct(out_shape, jnp.float32)
    rows = dict.fromkeys(("x_rows", "y_rows"), np.bool_(False))
    flags = {name: {key: np.bool_(value) for key, value in flags.items()}, "rows": rows}
    return jax.ffi.ffi_call(target, out)(a, b, jnp.asarray(table, jnp.int32), **flags)


def call_mm(x, w, table, rows, *, in_order=False):
    flags = dict.fromkeys(("transpose_x", "transpose_w", "transpose_out", "clears_rest"), False)
    shape = (rows, w.shape[2])
    return call("jgg_mm", "mm", shape, x, w, table, in_order=in_order, **flags)


def call_wgrad(x, y, table, groups):
    shape = (groups, x.shape[1], y.shape[1])
    return call("jgg_wgrad", "wgrad", shape, x, y, table, transpose_x=False, transpose_y=False)


LEAST, MOST = -(2**31), 2**31 - 1


@pytest.mark.parametrize(
    ("segment", "what"),
    [
        ((-1, 0, 1, 0), "[-1, 0) of x, which has 5"),
        ((5, 0, 1, 0), "[5, 6) of x, which has 5"),
        ((0, 0, 6, 0), "[0, 6) of x, which has 5"),
        ((LEAST, 0, 1, 0), f"[{LEAST}, {LEAST + 1}) of x, which has 5"),
        ((MOST, 0, MOST, 0), f"[{MOST}, {2 * MOST}) of x, which has 5"),
        ((0, -1, 1, 0), "[-1, 0) of y, which has 4"),
        ((0, 3, 2, 0), "[3, 5) of y, which has 4"),
        ((0, MOST, 1, 0), f"[{MOST}, {MOST + 1}) of y, which has 4"),
    ],
)
def test_forged_table(segment, what):
    """An error that names the segment; nothing is read or written outside."""
    table = np.array([(0, 0, 2, 1), segment])
    x, y, w = jnp.ones((5, 3)), jnp.ones((4, 2)), jnp.ones((2, 3, 2))
    for in_order in (False, True):
        with pytest.raises(jax.errors.JaxRuntimeError) as caught:
            jax.block_until_ready(call_mm(x, w, table, 4, in_order=in_order))
        assert f"jgg.mm: segment 1 is rows {what}" in str(caught.value)
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.block_until_ready(call_wgrad(x, y, table, 2))
    assert f"jgg.wgrad: segment 1 is rows {what}" in str(caught.value)


def test_segments_that_do_not_count():
    """Without a weight of theirs or without rows: wherever they are."""
    table = [(0, 0, 2, 1), (99, -9, 3, 2), (-9, 99, 3, -1), (99, 99, 0, 0), (99, 99, -5, 1)]
    x, y, w = jnp.ones((5, 3)), jnp.ones((4, 2)), jnp.ones((2, 3, 2))
    np.testing.assert_array_equal(call_mm(x, w, table, 4), [[3, 3], [3, 3], [0, 0], [0, 0]])
    want = np.zeros((2, 3, 2))
    want[1] = 2
    np.testing.assert_array_equal(call_wgrad(x, y, table, 2), want)


def test_broken_promise_of_order(rng):
    """Rows that meet are added up, also where the call says that they do not."""
    table = [(0, 2, 2, 1), (1, 0, 3, 0), (0, 2, 2, 1)]
    x, w = oracle.random(rng, (5, 3)), oracle.random(rng, (2, 3, 2))
    first, second = call_mm(x, w, table, 4), call_mm(x, w, table, 4, in_order=True)
    np.testing.assert_array_equal(first, second)
    want = np.zeros((4, 2))
    for x_start, y_start, length, weight in table:
        rows = oracle.f64(x)[x_start : x_start + length]
        want[y_start : y_start + length] += rows @ oracle.f64(w)[weight]
    oracle.assert_close(first, want)


@pytest.mark.parametrize("shape", [(4, 3, 0), (0, 3, 2), (4, 0, 2), (0, 0, 0)])
def test_empty_axes(shape):
    rows, k, n = shape
    table = [(0, 0, rows, 0), (0, 0, rows, 0)]
    out = call_mm(jnp.ones((rows, k)), jnp.ones((1, k, n)), table, rows)
    np.testing.assert_array_equal(out, np.full((rows, n), 2 * k))
    out = call_wgrad(jnp.ones((rows, k)), jnp.ones((rows, n)), table, 1)
    np.testing.assert_array_equal(out, np.full((1, k, n), 2 * rows))


def test_many_segments_of_one_row():
    """Their sum is no worse than that of as many k."""
    count = 2**17
    x = jnp.ones((count, 1)).at[0].set(2.0**30)
    index = np.arange(count)
    zero = np.zeros_like(index)
    want = 2.0**30 + count - 1
    table = np.stack([index, zero, zero + 1, zero], axis=1)
    assert abs(call_mm(x, jnp.ones((1, 1, 1)), table, 1)[0, 0].item() / want - 1) <= 2.0**-16
    table = np.stack([index, index, zero + 1, zero], axis=1)
    assert abs(call_wgrad(x, jnp.ones_like(x), table, 1).item() / want - 1) <= 2.0**-16


def test_empty_groups_cost_little():
    """Three million took 8.7 s, each of which cleared a tile of its own."""
    groups = 3 * 2**20
    x, w, sizes = jnp.ones((8, 1)), jnp.ones((groups, 1, 1)), jnp.zeros(groups, jnp.int32)
    loss = lambda x, w, sizes: jgg.grouped_mm(x, w, sizes, implementation="cpu").sum()
    run = jax.jit(jax.grad(loss, (0, 1))).lower(x, w, sizes).compile()
    start = time.perf_counter()
    grads = jax.block_until_ready(run(x, w, sizes))
    assert time.perf_counter() - start < 4
    assert not any(np.any(g) for g in grads)
