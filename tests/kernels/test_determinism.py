"""Products of the Hopper kernel give the same bytes in every run: one after the other, beside
others on a second stream, and replayed from a command buffer while sizes change."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from device_runs import (
    WHOLE_STREAMS,
    assert_on_sm90,
    assert_overlap,
    compiled_with_streams,
    kernel_runs,
    needs_hopper,
    on_stream,
    profile_on_two_streams,
    run,
)
from jax import lax
from replays import CAPTURED, EAGER, refill
from test_grouped_mm import epilogue_oracle
from test_quantize_call import calls
from thunks import custom_calls

import jax_groupgemm as jgg
from jax_groupgemm._kernels import tuned

RUNS = 50
ROWS, GROUPS, WIDTH = 16_384, 96, 264
LONG = 2**16  # K of a product of few tiles, beside which others find room
TOKENS = 80
GATED = 240  # columns of a gated product: both halves begin at whole 16 bytes
TF32 = "forward, tensorfloat32"


@functools.cache
def problem():
    """Operands, and two sets of metadata."""
    rng = np.random.default_rng(0)
    rows, weights = (ROWS, WIDTH), (GROUPS, WIDTH, WIDTH)
    shapes = [rows, weights, rows, rows[::-1], (64, LONG), (2, LONG, 64), (TOKENS, 3, WIDTH)]
    shapes += [(GROUPS, WIDTH), (ROWS,)]
    halves = [oracle.host_random(rng, shape, "bfloat16") for shape in shapes]
    singles = [oracle.host_random(rng, shape, "float32") for shape in (rows, weights, rows)]

    def metadata():
        starts, lengths = rng.integers(0, ROWS, 40), rng.integers(-50, 1200, 40)
        return tuple(
            jnp.asarray(values, jnp.int32)
            for values in (
                oracle.random_sizes(rng, GROUPS, ROWS),
                np.stack([starts, starts + lengths], 1),
                np.sort(rng.integers(0, ROWS, (2, 2))) + [0, 2000],
                rng.integers(1, 32, 2),
                rng.integers(-1, TOKENS + 1, 500),
                rng.integers(-1, GROUPS + 1, 500),
            )
        )

    return jax.device_put((*halves, *singles)), (metadata(), metadata())


def products(operands, metadata) -> dict[str, jax.Array]:
    """One of every kind."""
    x, w, dy, a, long_x, long_w, tokens, bias, scale, x32, w32, dy32 = operands
    sizes, spans, long_spans, long_sizes, lhs, rhs = metadata
    sm90 = {"implementation": "sm90"}
    grouped = lambda x, w: jgg.grouped_mm(x, w, sizes, **sm90)
    forward, vjp = jax.vjp(grouped, x, w)
    dgrad, wgrad = vjp(dy)
    forward32, vjp32 = jax.vjp(functools.partial(grouped, x32), w32)
    epilogue = {"row_scale": scale, **sm90}
    gated = {"activation": "swiglu", "bias": bias[:, :GATED], "existing_out": dy[:, : GATED // 2]}
    return {
        "forward": forward,
        "dgrad": dgrad,
        "wgrad": wgrad,
        "segmented": jgg.segmented_mm(a, dy, spans, **sm90),
        "in parts": jgg.segmented_mm(x, dy, long_spans, transpose_a=True, **sm90),
        "long": jgg.grouped_mm(long_x, long_w, long_sizes, **sm90),
        "gathered": jgg.gather_mm(tokens, w, lhs, rhs, **sm90),
        "epilogue": jgg.grouped_mm(
            x, w, sizes, activation="gelu", bias=bias, existing_out=dy, **epilogue
        ),
        "gated epilogue": jgg.grouped_mm(x, w[..., :GATED], sizes, **gated, **epilogue),
        "forward, float32": forward32,
        "wgrad, float32": vjp32(dy32)[0],
        TF32: jgg.grouped_mm(x32, w32, sizes, precision="tensorfloat32", **sm90),
    }


COUNT, IN_PLANES = 12, 3


def expected(operands, metadata) -> dict[str, np.ndarray]:
    x, w, dy, a, long_x, long_w, tokens, bias, scale, x32, w32, dy32 = map(oracle.f64, operands)
    sizes, spans, long_spans, long_sizes, lhs, rhs = metadata
    dgrad, wgrad = oracle.grouped_mm_grads(x, w, sizes, dy)
    return {
        "forward": oracle.grouped_mm(x, w, sizes),
        "dgrad": dgrad,
        "wgrad": wgrad,
        "segmented": oracle.segmented_mm(a, dy, spans),
        "in parts": oracle.segmented_mm(x.T, dy, long_spans),
        "long": oracle.grouped_mm(long_x, long_w, long_sizes),
        "gathered": oracle.gather_mm(tokens, w, lhs, rhs),
        "epilogue": epilogue_oracle(x, w, sizes, bias, "gelu", scale, dy),
        "gated epilogue": epilogue_oracle(
            x, w[..., :GATED], sizes, bias[:, :GATED], "swiglu", scale, dy[:, : GATED // 2]
        ),
        "forward, float32": oracle.grouped_mm(x32, w32, sizes),
        "wgrad, float32": oracle.grouped_mm_grads(x32, w32, sizes, dy32)[1],
        TF32: oracle.grouped_mm(x32, w32, sizes),
    }


def bits(a, width=None):
    return lax.bitcast_convert_type(a, f"uint{width or 8 * a.dtype.itemsize}")


@jax.jit
def differences(got, want):
    """How many elements of every result differ in any bit."""
    return jax.tree.map(lambda g, w: (bits(g) != bits(w)).sum(), got, want)


def assert_same_bytes(got, want) -> None:
    found = jax.device_get(differences(got, want))
    assert not any(jax.tree.leaves(found)), found


def lowered(**platforms):
    """With tiles of 256 rows, whatever the rule."""
    operands, sets = problem()
    with tuned.forced(256):
        return jax.jit(products).trace(operands, sets[0]).lower(**platforms)


@functools.cache
def eager():
    return lowered().compile(compiler_options=EAGER)


def test_what_the_kernel_is_asked_for():
    """One weight gradient in tiles of 256 rows, one in parts, float32 in planes, rows by list, two
    products with an epilogue."""
    found = calls(lowered(lowering_platforms=("cuda",)).as_text())
    assert len(found) == COUNT + IN_PLANES
    wgrads = {results[0]: flags for name, _, results, flags in found if name == "jgg_wgrad"}
    matrix = f"{WIDTH}x{WIDTH}"
    assert wgrads.keys() == {
        f"{GROUPS}x{matrix}xbf16", f"40x{matrix}xbf16", f"14x{matrix}xf32", f"{GROUPS}x{matrix}xf32"
    }  # fmt: skip
    assert "tile = 256" in wgrads[f"{GROUPS}x{matrix}xbf16"]
    assert "planes = 3" in wgrads[f"{GROUPS}x{matrix}xf32"]
    mms = [flags for name, *_, flags in found if name == "jgg_mm"]
    assert len(mms) == 8
    kinds = ("planes = 3", "planes = 2", "x_rows = true", "transpose_w = true")
    epilogues = ('activation = "gelu"', 'activation = "swiglu"')
    for flag in (*kinds, *epilogues):
        assert sum(flag in flags for flags in mms) == 1
    for flag in ("bias = true", "row_scale = true", "existing_out = true"):
        assert sum(flag in flags for flags in mms) == 2


def hopper(test):
    return pytest.mark.gpu(needs_hopper(test))


@hopper
def test_one_after_the_other():
    """All of them in the Hopper kernel, and right."""
    operands, sets = problem()
    firsts = []
    for metadata in sets:
        first, kernels = run(eager(), operands, metadata)
        assert_on_sm90(kernels, COUNT)
        for name, want in expected(operands, metadata).items():
            tolerance = 5e-5 if name == TF32 else {"float32": 2e-6}.get(first[name].dtype.name)
            oracle.assert_close(first[name], want, tolerance=tolerance)
        for _ in range(RUNS):
            assert_same_bytes(eager()(operands, metadata), first)
        firsts.append(first)
    assert all(jax.device_get(differences(*firsts)).values())


@hopper
def test_replays(tmp_path):
    """Captured once, and run with two sets of sizes in turns, which are at one place."""
    operands, sets = problem()
    wants = [eager()(operands, metadata) for metadata in sets]
    dump = {"xla_dump_to": str(tmp_path)}
    captured = lowered().compile(compiler_options=CAPTURED | dump)
    inside, outside = custom_calls(tmp_path, "jit_products")
    assert len(inside) >= COUNT + IN_PLANES
    assert not outside
    held = jax.tree.map(jnp.copy, sets[0])
    for i in range(RUNS):
        held = refill(held, sets[i % 2])
        assert_same_bytes(captured(operands, held), wants[i % 2])


def flat(operands, metadata):
    """All bits in one array."""
    results = products(operands, metadata)
    if not WHOLE_STREAMS:  # a constant offset, and dy in place
        del results["gathered"], results["epilogue"]
    return jnp.concatenate([bits(a, 16).reshape(-1) for a in results.values()])


def two_streams(profile):
    operands, sets = problem()
    first, second = on_stream(1, flat), on_stream(2, flat)

    @jax.jit
    def beside(operands, a, b):
        return first(operands, a), second(operands, b)

    with tuned.forced(256):
        wants = tuple(jax.jit(flat)(operands, metadata) for metadata in sets)
        both = compiled_with_streams(beside, operands, *sets)
    for _ in range(RUNS):
        assert_same_bytes(both(operands, *sets), wants)
    with jax.profiler.trace(profile):
        for _ in range(3):
            jax.block_until_ready(both(operands, *sets))


TWO_STREAMS = """
import sys
sys.path[:] = sys.argv[1].split(':')
import test_determinism
test_determinism.two_streams(sys.argv[2])
"""


@hopper
def test_beside_others_on_a_second_stream(tmp_path):
    planes = profile_on_two_streams(tmp_path, TWO_STREAMS, "beside", 1)
    runs = kernel_runs(planes, "Sm90Kernel")
    count = COUNT if WHOLE_STREAMS else COUNT - 2
    assert len(runs) == 3 * 2 * count == len(kernel_runs(planes, "GemmSm"))
    assert_overlap(runs)
