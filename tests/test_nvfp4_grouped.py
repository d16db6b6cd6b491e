"""Products of two NVFP4 operands against numpy: values, gradients, transformations, errors."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import GPU_KERNELS
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_qmm import needs

import jax_groupgemm as jgg
from jax_groupgemm import _call

T, G, N, K = 1024, 8, 24, 48
# Balanced, imbalanced, most in few, nothing, everything in one, odd ones, a tail, too many rows.
SIZES = {
    "balanced": [128] * 8,
    "imbalanced": [64 * (i % 3 + 1) for i in range(8)],
    "three": [256, 128, 384, 0, 0, 0, 0, 0],
    "nothing": [0] * 8,
    "one": [0, 0, 0, 1024, 0, 0, 0, 0],
    "odd": [1, 15, 17, 127, 0, 0, 63, 65],
    "too many": [900, -5, 100, 300, 7, 0, 2, 1],
}


def random(rng, *shape, scale=None):
    return oracle.random_quantized(rng, shape, "nvfp4", scale=scale)


def positive(rng, *shape):
    return jnp.asarray(rng.uniform(0.5, 2, shape), jnp.float32)


def padded(sizes, rows, unit=64):
    """The padded row of each row, -1 in the tail, and how many padded rows there can be."""
    positions, start = np.full(rows, -1, np.int32), 0
    for first, last in oracle.bounds(sizes, rows):
        positions[first:last] = start + np.arange(last - first)
        start += -(-(last - first) // unit) * unit
    return positions, (rows + (unit - 1) * min(len(sizes), rows)) // unit * unit


def along_t(rng, columns, sizes, rows=T, scale=None):
    """Random codes in layout "grouped": zeros are padded."""
    positions, length = padded(sizes, rows)
    q = random(rng, columns, length)
    code = oracle.codes(q)
    code[:, np.setdiff1d(np.arange(length), positions)] = 0
    nibbles = code.astype(np.uint8)
    weight = (nibbles[:, ::2] | nibbles[:, 1::2] << 4).view(np.uint32)
    return dataclasses.replace(
        q, weight=jnp.asarray(weight), global_scale=scale, positions=jnp.asarray(positions),
        axis=-2, layout="grouped",
    )  # fmt: skip


def rows_of(q: jgg.Quantized) -> np.ndarray:
    """Values of a grouped operand, ``(T, columns)``; rows of no group are zeros."""
    stored = dataclasses.replace(q, axis=-1, layout="linear", positions=None)
    values, positions = oracle.dequantize(stored).T, np.asarray(q.positions)
    scale = 1.0 if q.global_scale is None else oracle.f64(q.global_scale)
    return np.where(positions[:, None] >= 0, values[positions], 0) * scale


def wgrad_oracle(x, dy, sizes):
    x, dy = rows_of(x), rows_of(dy)
    parts = [dy[first:last].T @ x[first:last] for first, last in oracle.bounds(sizes, len(x))]
    return np.stack(parts)


# ---- nvfp4_grouped_mm ------------------------------------------------------------------------


def mm_oracle(x, w, sizes, alpha=None, bias=None):
    wide = lambda v, *shape: np.broadcast_to(1.0 if v is None else oracle.f64(v), shape)
    rows = oracle.dequantize(x) * wide(x.global_scale, len(x.scales))[:, None]
    groups = len(w.scales)
    scale = wide(w.global_scale, groups) * wide(alpha, groups)
    out = oracle.grouped_mm(rows, oracle.dequantize(w) * scale[:, None, None], sizes,
                            transpose_w=True)  # fmt: skip
    for g, (first, last) in enumerate(oracle.bounds(sizes, len(rows))):
        out[first:last] += 0 if bias is None else oracle.f64(bias)[g]
    return out


@pytest.fixture(params=["reference", *GPU_KERNELS])
def kernel(request) -> str:
    return needs(request.param)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mm(rng, kernel, dtype):
    x, w = random(rng, T, K, scale=positive(rng)), random(rng, G, N, K, scale=positive(rng, G))
    alpha, bias = positive(rng, G), oracle.random(rng, (G, N), "bfloat16")
    f = functools.partial(
        jgg.nvfp4_grouped_mm, alpha=alpha, bias=bias, preferred_element_type=dtype,
        implementation=kernel,
    )  # fmt: skip
    f = jax.jit(f)
    for name, sizes in SIZES.items():
        out = f(x, w, np.array(sizes, np.int16))
        assert out.dtype == dtype
        oracle.assert_close(out, mm_oracle(x, w, sizes, alpha, bias)), name
        assert not np.asarray(out)[max(last for _, last in oracle.bounds(sizes, T)) :].any()


def test_mm_of_three_groups(rng):
    x, w = random(rng, 768, K), random(rng, 3, N, K)
    for sizes in ([256] * 3, [256, 128, 384]):
        out = jax.jit(jgg.nvfp4_grouped_mm)(x, w, np.array(sizes))
        assert out.dtype == "bfloat16"
        oracle.assert_close(out, mm_oracle(x, w, sizes))


SCALES = [(None, None), (None, (3,)), ((), ()), ((40,), None), ((40,), (3,))]


@pytest.mark.parametrize(("x_shape", "w_shape"), SCALES)
@pytest.mark.parametrize("bias", [False, True])
def test_mm_scales(rng, x_shape, w_shape, bias):
    """Absent ones are 1; alpha may be a number; rows may have their own."""
    scale = lambda shape: None if shape is None else positive(rng, *shape)
    x, w = random(rng, 40, 32, scale=scale(x_shape)), random(rng, 3, 8, 32, scale=scale(w_shape))
    bias = oracle.random(rng, (3, 8)) if bias else None
    sizes = np.array([7, 0, 20], np.uint8)
    f = functools.partial(jgg.nvfp4_grouped_mm, bias=bias, preferred_element_type="float32")
    for alpha in (None, 2):
        want = mm_oracle(x, w, sizes, alpha, bias)
        oracle.assert_close(f(x, w, sizes, alpha=alpha), want)
        assert not want[27:].any()


@pytest.mark.parametrize("layout", ["sm90", "swizzled"])
def test_mm_layouts(rng, layout):
    """Scales of x, or all of w, may be in the order that a kernel reads; the bits are the same."""
    x, w = random(rng, 150, 64, scale=positive(rng)), random(rng, 3, 64, 64)
    sizes = jnp.array([70, 0, 40])
    want = jgg.nvfp4_grouped_mm(x, w, sizes)
    if layout == "sm90":
        w = jgg.prepack(w)
        assert w.layout == "sm90"
    else:
        scales = np.zeros((2, 1, 512), np.uint8)
        for r, s in np.ndindex(150, 4):
            scales[r // 128, 0, r % 32 * 16 + r % 128 // 32 * 4 + s] = x.scales[r, s]
        x = dataclasses.replace(x, scales=jnp.asarray(scales), layout="swizzled")
    np.testing.assert_array_equal(jgg.nvfp4_grouped_mm(x, w, sizes), want)


def test_mm_of_the_transposed_copy(rng):
    """What is stored for axis -2 is the weight of the gradient's product."""
    w = oracle.random(rng, (3, 32, 40))
    q = jgg.nvfp4_quantize(w, axis=-2)
    dy, sizes = random(rng, 40, 32), jnp.array([7, 0, 20])
    stored = dataclasses.replace(q, axis=-1)
    out = jgg.nvfp4_grouped_mm(dy, stored, sizes, preferred_element_type="float32")
    scale = oracle.f64(q.global_scale)[:, None, None]
    want = oracle.grouped_mm(oracle.dequantize(dy), oracle.dequantize(stored) * scale, sizes,
                             transpose_w=True)  # fmt: skip
    oracle.assert_close(out, want)
    assert 0.03 < oracle.error(out, oracle.grouped_mm(oracle.dequantize(dy), w, sizes)) < 0.2


def test_dead_blocks_and_nan(rng):
    """A scale of 0 makes codes of +-6 zeros; NaN stays in its row of x, of w, and in its group."""
    x, w = random(rng, 40, 32, scale=positive(rng)), random(rng, 3, 8, 32, scale=positive(rng, 3))
    scales, codes = np.array(x.scales), np.array(x.weight)
    scales[3, 1], codes[3, 2:] = 0, 0xF7F7F7F7
    scales[5, 0] = scales[35, 1] = 0x7F
    x = dataclasses.replace(x, scales=jnp.asarray(scales), weight=jnp.asarray(codes))
    scales = np.array(w.scales)
    scales[2, 4, 0] = scales[1] = 0x7F
    w = dataclasses.replace(w, scales=jnp.asarray(scales))
    sizes = jnp.array([7, 0, 20])
    alpha = jnp.array([1, np.nan, 1], jnp.float32)
    out = np.asarray(
        jgg.nvfp4_grouped_mm(x, w, sizes, alpha=alpha, preferred_element_type="float32")
    )
    bad = np.zeros((40, 8), bool)
    bad[5] = bad[7:27, 4] = True
    np.testing.assert_array_equal(np.isnan(out), bad)
    oracle.assert_close(out[3:5], mm_oracle(x, w, sizes)[3:5])
    assert not out[27:].any()


def test_mm_gradients(rng):
    """Of alpha, bias and global scales, as their definitions say; integers get float0."""
    x, w = random(rng, 40, 32, scale=positive(rng)), random(rng, 3, 8, 32, scale=positive(rng, 3))
    alpha, bias, sizes = positive(rng, 3), oracle.random(rng, (3, 8)), jnp.array([7, 0, 20])
    ct = oracle.random(rng, (40, 8))

    def f(x, w, alpha, bias, sizes):
        return jgg.nvfp4_grouped_mm(
            x, w, sizes, alpha=alpha, bias=bias, preferred_element_type="float32"
        )

    dx, dw, dalpha, dbias, dsizes = jax.jit(lambda *a: jax.vjp(f, *a)[1](ct))(
        x, w, alpha, bias, sizes
    )
    terms = mm_oracle(x, w, sizes) * oracle.f64(ct)
    sums = np.stack([terms[first:last].sum() for first, last in oracle.bounds(sizes, 40)])
    oracle.assert_close(dalpha, sums, tolerance=1e-5)
    oracle.assert_close(
        dw.global_scale, sums * oracle.f64(alpha) / oracle.f64(w.global_scale), tolerance=1e-5
    )
    want = (sums * oracle.f64(alpha)).sum() / oracle.f64(x.global_scale)
    oracle.assert_close(dx.global_scale, want, tolerance=1e-5)
    rows = [oracle.f64(ct)[first:last].sum(0) for first, last in oracle.bounds(sizes, 40)]
    oracle.assert_close(dbias, np.stack(rows))
    for leaf in (dx.weight, dx.scales, dw.weight, dw.scales, dsizes):
        assert leaf.dtype == jax.dtypes.float0


# ---- nvfp4_grouped_wgrad ---------------------------------------------------------------------


def test_wgrad(rng, implementation):
    f = jax.jit(functools.partial(jgg.nvfp4_grouped_wgrad, implementation=implementation))
    for sizes in SIZES.values():
        x = along_t(rng, K, sizes, scale=positive(rng))
        dy = along_t(rng, N, sizes, scale=positive(rng))
        out = f(x, dy, np.array(sizes, np.int16))
        assert out.dtype == "float32"
        oracle.assert_close(out, wgrad_oracle(x, dy, sizes))
        empty = [first == last for first, last in oracle.bounds(sizes, T)]
        assert not np.asarray(out)[empty].any()


def test_wgrad_of_three_groups(rng):
    for sizes in ([256] * 3, [256, 128, 384]):
        x, dy = along_t(rng, K, sizes, 768), along_t(rng, N, sizes, 768)
        out = jax.jit(jgg.nvfp4_grouped_wgrad)(x, dy, np.array(sizes))
        oracle.assert_close(out, wgrad_oracle(x, dy, sizes))


ODD = [20, 0, 33, -1, 7]
ROWS = 70


def wgrad_problem(rng):
    x = along_t(rng, 8, ODD, ROWS, positive(rng))
    dy = along_t(rng, 6, ODD, ROWS, positive(rng))
    return x, dy, oracle.random(rng, (5, 6, 8))


ALPHA = np.array([1, np.inf, 3, np.nan, 0.5], np.float32)
BETA = np.array([1, 1, 0, -2, 0.5], np.float32)


@pytest.mark.parametrize(("alpha", "beta"), [(None, None), (2, BETA), (ALPHA, 3), (ALPHA, None)])
def test_wgrad_scales_and_accumulates(rng, alpha, beta):
    """Empty groups keep what there was, -0 and NaN too; with beta 0 NaN does not count."""
    x, dy, old = wgrad_problem(rng)
    sizes = jnp.array(ODD)
    wide = lambda v: np.broadcast_to(1.0 if v is None else v, 5)[:, None, None].astype(float)
    with np.errstate(invalid="ignore"):
        product = np.where(wide(ODD) > 0, wgrad_oracle(x, dy, ODD) * wide(alpha), 0)
    np.testing.assert_array_equal(
        np.isfinite(jgg.nvfp4_grouped_wgrad(x, dy, sizes, alpha=alpha)), True
    )
    want = product + wide(beta) * oracle.f64(old)
    if isinstance(beta, np.ndarray):
        old = old.at[2, 1].set(np.nan)
    old = old.at[1, 0].set(-0.0).at[1, 1].set(np.nan)
    got = jax.jit(jgg.nvfp4_grouped_wgrad)(x, dy, sizes, alpha=alpha, beta=beta, existing_out=old)
    got, old = np.asarray(got), np.asarray(old)
    if beta is None:
        np.testing.assert_array_equal(got[1].view(np.int32), old[1].view(np.int32))
    assert np.isnan(got[1, 1]).all()
    assert np.signbit(got[1, 0]).all()
    live = [0, 2, 3, 4]
    oracle.assert_close(got[live], want[live])


def test_wgrad_in_place(rng):
    x, dy, old = wgrad_problem(rng)
    f = jax.jit(
        lambda old, x, dy: jgg.nvfp4_grouped_wgrad(x, dy, jnp.array(ODD), existing_out=old),
        donate_argnums=0,
    )
    text = f.lower(old, x, dy).compile().as_text()
    assert re.search(r"input_output_alias=\{ \{\}: \(0, ", text), text[:300]
    want = oracle.f64(old) + wgrad_oracle(x, dy, ODD)
    oracle.assert_close(f(old, x, dy), want)
    assert old.is_deleted()


def test_wgrad_of_other_sizes_is_nan(rng):
    """Sizes that operands were not padded for give no plausible numbers."""
    x, dy, _ = wgrad_problem(rng)
    other = along_t(rng, 6, [19, 0, 34, 0, 7], ROWS)
    f = jax.jit(jgg.nvfp4_grouped_wgrad)
    assert np.isfinite(f(x, dy, jnp.array(ODD))).all()
    for args in ((x, other, jnp.array(ODD)), (x, dy, jnp.array([19, 0, 34, 0, 7]))):
        out = np.asarray(f(*args))
        np.testing.assert_array_equal(np.isnan(out).any((1, 2)), [True, False, True, False, True])


def test_wgrad_nan_stays_in_its_group(rng):
    """A block's NaN scale: in the columns of its group, and nowhere from padding."""
    x, dy, _ = wgrad_problem(rng)
    scales = np.array(x.scales)
    scales[3, 4] = 0x7F  # rows 64 to 79: the first of group 2
    scales[5, -1] = 0x7F  # past every group
    x = dataclasses.replace(x, scales=jnp.asarray(scales))
    bad = np.zeros((5, 6, 8), bool)
    bad[2, :, 3] = True
    np.testing.assert_array_equal(np.isnan(jgg.nvfp4_grouped_wgrad(x, dy, jnp.array(ODD))), bad)


def test_wgrad_of_what_is_quantized(rng):
    """Of nvfp4_quantize's operands: near the exact product, whatever garbage the tail holds."""
    x, dy = oracle.random(rng, (ROWS, 8)), oracle.random(rng, (ROWS, 8))
    sizes = jnp.array(ODD)

    def f(x, dy):
        q = functools.partial(
            jgg.nvfp4_quantize, axis=0, group_sizes=sizes, hadamard=True
        )  # fmt: skip
        return jgg.nvfp4_grouped_wgrad(q(x), q(dy), sizes)

    out = f(x, dy)
    parts = [oracle.f64(dy)[a:b].T @ oracle.f64(x)[a:b] for a, b in oracle.bounds(ODD, ROWS)]
    assert 0.05 < oracle.error(out, np.stack(parts)) < 0.2
    assert not np.asarray(out)[[1, 3]].any()
    np.testing.assert_array_equal(f(x.at[60:].set(np.nan), dy.at[60:].set(np.inf)), out)
    assert not np.asarray(f(jnp.zeros_like(x), dy)).any()


def test_wgrad_gradients(rng):
    x, dy, old = wgrad_problem(rng)
    alpha, beta, ct = positive(rng, 5), positive(rng, 5), oracle.random(rng, (5, 6, 8))

    def f(x, dy, alpha, beta, old, sizes):
        return jgg.nvfp4_grouped_wgrad(x, dy, sizes, alpha=alpha, beta=beta, existing_out=old)

    dx, ddy, dalpha, dbeta, dold, dsizes = jax.jit(lambda *a: jax.vjp(f, *a)[1](ct))(
        x, dy, alpha, beta, old, jnp.array(ODD)
    )
    sums = (wgrad_oracle(x, dy, ODD) * oracle.f64(ct)).sum((1, 2))
    oracle.assert_close(dalpha, sums, tolerance=1e-5)
    for grad, q in ((dx, x), (ddy, dy)):
        want = (sums * oracle.f64(alpha)).sum() / oracle.f64(q.global_scale)
        oracle.assert_close(grad.global_scale, want, tolerance=1e-5)
        for leaf in (grad.weight, grad.scales, grad.positions, dsizes):
            assert leaf.dtype == jax.dtypes.float0
    oracle.assert_close(dbeta, (oracle.f64(old) * oracle.f64(ct)).sum((1, 2)), tolerance=1e-5)
    oracle.assert_close(dold, oracle.f64(ct) * oracle.f64(beta)[:, None, None])


# ---- transformations -------------------------------------------------------------------------

FEW = np.array([[9, 0, 8], [0, 20, 0]], np.int32)


def mm_case(rng):
    x = [random(rng, 20, 32, scale=positive(rng)) for _ in FEW]
    w = [random(rng, 3, 16, 32, scale=positive(rng, 3)) for _ in FEW]
    alpha = [positive(rng, 3) for _ in FEW]
    f = lambda x, w, sizes, alpha: jgg.nvfp4_grouped_mm(
        x, w, sizes, alpha=alpha, preferred_element_type="float32"
    )
    return f, (x, w, list(FEW), alpha)


def wgrad_case(rng):
    """Operands of all examples are padded for the sizes of theirs."""
    x, dy = ([along_t(rng, n, s, 20, positive(rng)) for s in FEW] for n in (8, 16))
    alpha = [positive(rng, 3) for _ in FEW]
    f = lambda x, dy, sizes, alpha: jgg.nvfp4_grouped_wgrad(x, dy, sizes, alpha=alpha)
    return f, (x, dy, list(FEW), alpha)


stack = functools.partial(jax.tree.map, lambda *leaves: jnp.stack(leaves))
MM_AXES = [(0, None, None, None), (None, 0, 0, None), (0, 0, 0, 0)]
VMAP = [
    *((mm_case, axes) for axes in MM_AXES), (wgrad_case, (0, 0, 0, None)),
    (wgrad_case, (None, None, None, 0)),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(VMAP)))
def test_vmap_of_value_and_grad(rng, case):
    make, axes = VMAP[case]
    f, examples = make(rng)
    grad = jax.value_and_grad(lambda *a: jnp.sin(f(*a)).sum(), 3)
    args = [stack(*both) if d == 0 else both[0] for both, d in zip(examples, axes, strict=True)]
    got = jax.jit(jax.vmap(grad, axes))(*args)
    one = jax.jit(grad)
    want = stack(
        *(one(*(both[i] if d == 0 else both[0] for both, d in zip(examples, axes, strict=True)))
          for i in range(2))
    )  # fmt: skip
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        oracle.assert_close(g, w, tolerance=1e-5)


@functools.cache
def mesh_of(kind) -> jax.sharding.Mesh:
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    return jax.make_mesh((2,), ("d",), axis_types=(kind,), devices=jax.devices()[:2])


def put(kind, tree, *spec):
    """Leaves on the mesh, sharded along their first axes as ``spec`` says."""
    mesh = mesh_of(kind)
    return jax.tree.map(lambda a: jax.device_put(a, NamedSharding(mesh, P(*spec[: a.ndim]))), tree)


def collectives(compiled) -> list[str]:
    names = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    return sorted(re.findall(rf" ({names})(?:-start)?\(", compiled.as_text()))


# Specs of x and w and of the result; how many all-reduces.
SHARDED = {
    "T": (("d",), (), P("d"), 0),
    "N": ((), (None, "d"), P(None, "d"), 0),
    "K": ((None, "d"), (None, None, "d"), P(), 1),
    "G": ((), ("d",), P(), 1),
}


@pytest.mark.parametrize("name", SHARDED)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_mm_sharded(rng, kind, name):
    x_spec, w_spec, out_spec, all_reduces = SHARDED[name]
    x, w = random(rng, 20, 64, scale=positive(rng)), random(rng, 4, 16, 64, scale=positive(rng, 4))
    sizes, alpha = jnp.array([9, 0, 3, 6]), positive(rng, 4)
    f = jax.jit(
        lambda x, w, sizes, alpha: jgg.nvfp4_grouped_mm(
            x, w, sizes, alpha=alpha, preferred_element_type="float32"
        )
    )
    args = put(kind, x, *x_spec), put(kind, w, *w_spec), put(kind, sizes), put(kind, alpha)
    with jax.set_mesh(mesh_of(kind)):
        compiled = f.lower(*args).compile()
        out = f(*args)
    assert collectives(compiled) == ["all-reduce"] * all_reduces
    oracle.assert_close(out, mm_oracle(x, w, sizes, alpha))
    assert out.sharding.is_equivalent_to(NamedSharding(mesh_of(kind), out_spec), 2)


@pytest.mark.parametrize("name", ["N", "K"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_wgrad_sharded(rng, kind, name):
    """Columns of either operand: no communication."""
    x, dy, old = wgrad_problem(rng)
    place = lambda q, *spec: dataclasses.replace(
        put(kind, q, *spec), positions=put(kind, q.positions)
    )
    spec = (None, "d") if name == "N" else (None, None, "d")
    args = (
        place(x, *("d",) * (name == "K")), place(dy, *("d",) * (name == "N")),
        put(kind, jnp.array(ODD)), put(kind, old, *spec),
    )  # fmt: skip
    f = jax.jit(lambda x, dy, s, old: jgg.nvfp4_grouped_wgrad(x, dy, s, existing_out=old))
    with jax.set_mesh(mesh_of(kind)):
        assert collectives(f.lower(*args).compile()) == []
        out = f(*args)
    oracle.assert_close(out, wgrad_oracle(x, dy, ODD) + oracle.f64(old))
    assert out.sharding.is_equivalent_to(NamedSharding(mesh_of(kind), P(*spec)), 3)


def test_shard_map(rng):
    """Each device has rows and sizes of its own; with check_vma."""
    _, (x, dy, sizes, _) = wgrad_case(rng)
    f, (rows, w, _, _) = mm_case(rng)
    row = stack(*rows)

    def both(row, w, x, dy, sizes):
        mine = lambda q: jax.tree.map(lambda a: a[0], q)
        out = f(mine(row), w, sizes[0], None)
        return out, jax.lax.psum(jgg.nvfp4_grouped_wgrad(mine(x), mine(dy), sizes[0]), "d")

    mapped = jax.shard_map(
        both, mesh=mesh_of(AxisType.Auto), in_specs=(P("d"), P(), P("d"), P("d"), P("d")),
        out_specs=(P("d"), P()), check_vma=True,
    )  # fmt: skip
    out, dw = jax.jit(mapped)(row, w[0], stack(*x), stack(*dy), jnp.stack(sizes))
    wants = [mm_oracle(rows[i], w[0], sizes[i]) for i in range(2)]
    oracle.assert_close(out, np.concatenate(wants))
    oracle.assert_close(dw, sum(wgrad_oracle(x[i], dy[i], sizes[i]) for i in range(2)))


def test_export(rng):
    x, dy, old = wgrad_problem(rng)
    row, w, sizes = random(rng, 20, 32), random(rng, 5, 8, 32), jnp.array(ODD)

    def f(row, w, x, dy, old, sizes):
        wgrad = jgg.nvfp4_grouped_wgrad(x, dy, sizes, existing_out=old)
        return jgg.nvfp4_grouped_mm(row, w, sizes), wgrad

    exported = jax.export.export(
        jax.jit(f), platforms=["cpu", "cuda"], disabled_checks=jgg.EXPORT_DISABLED_CHECKS
    )(row, w, x, dy, old, sizes)
    out, dw = jax.export.deserialize(exported.serialize()).call(row, w, x, dy, old, sizes)
    oracle.assert_close(out, mm_oracle(row, w, ODD))
    oracle.assert_close(dw, wgrad_oracle(x, dy, ODD) + oracle.f64(old))


def test_cost(rng):
    x, dy, _ = wgrad_problem(rng)
    # Rows in groups; the gradient's rows are those of the padded operands.
    assert jgg.cost.nvfp4_grouped_wgrad(x, dy, np.array(ODD)).flops == 2 * (64 * 3) * 6 * 8
    row, w = random(rng, 20, 32), random(rng, 3, 8, 32)
    assert jgg.cost.nvfp4_grouped_mm(row, w, FEW[0]).flops == 2 * 17 * 8 * 32


# ---- errors ----------------------------------------------------------------------------------


def like(*shape, mode="nvfp4", group=16, **static):
    *lead, k = shape
    return jgg.Quantized(
        jnp.zeros((*lead, k // 8), "uint32"), jnp.ones((*lead, k // group), "uint8"),
        mode=mode, bits=4, group_size=group, **static,
    )  # fmt: skip


def like_grouped(columns, rows=20, groups=3):
    q = like(columns, 64 * ((rows + 63 * groups) // 64), axis=-2, layout="grouped")
    return dataclasses.replace(q, positions=jnp.zeros(rows, jnp.int32))


X, W, S = like(20, 32), like(3, 8, 32), jnp.array([9, 0, 8])
A, B, OLD = like_grouped(8), like_grouped(6), jnp.ones((3, 6, 8))

ERRORS = [
    (
        lambda: jgg.nvfp4_grouped_mm(jnp.ones((20, 32)), W, S), TypeError,  # pyright: ignore
        "jgg.nvfp4_grouped_mm: x must be a jgg.Quantized, got ArrayImpl",
    ),
    (
        lambda: jgg.nvfp4_grouped_mm(like(20, 32, mode="mxfp4", group=32), W, S), ValueError,
        "jgg.nvfp4_grouped_mm: x has mode 'mxfp4', expected 'nvfp4'",
    ),
    (
        lambda: jgg.nvfp4_grouped_mm(X, like(3, 8, 32, axis=-2), S), ValueError,
        "jgg.nvfp4_grouped_mm: w has axis=-2, expected -1: blocks along K, the contracted axis of "
        "(G, N, K). dataclasses.replace(w, axis=-1) is what it stores, (3, 8, 32)",
    ),
    (
        lambda: jgg.nvfp4_grouped_mm(A, W, S), ValueError,
        "jgg.nvfp4_grouped_mm: x has axis=-2, expected -1: blocks along K, the contracted axis of "
        "(T, K)",
    ),
    (
        lambda: jgg.nvfp4_grouped_mm(W, W, S), ValueError,
        "jgg.nvfp4_grouped_mm: x has shape (3, 8, 32), expected 2 axes (T, K)",
    ),
    (
        lambda: jgg.nvfp4_grouped_mm(X, like(3, 8, 64), S), ValueError,
        "jgg.nvfp4_grouped_mm: w has shape (3, 8, 64), expected (G, N, K) = (3, 8, 32) because x "
        "is (20, 32)",
    ),
    (
        lambda: jgg.nvfp4_grouped_mm(X, W, S[:2]), ValueError,
        "jgg.nvfp4_grouped_mm: group_sizes has shape (2,), expected (G,) = (3,) because w is "
        "(3, 8, 32)",
    ),
    (
        lambda: jgg.nvfp4_grouped_mm(X, W, jnp.ones(3)), TypeError,
        "jgg.nvfp4_grouped_mm: group_sizes must hold integers, got dtype float32",
    ),
    (
        lambda: jgg.nvfp4_grouped_mm(X, W, S, alpha=jnp.ones(2)), ValueError,
        "jgg.nvfp4_grouped_mm: alpha has shape (2,), expected () or (G,) = (3,) because w is "
        "(3, 8, 32)",
    ),
    (
        lambda: jgg.nvfp4_grouped_mm(X, W, S, alpha=1j), TypeError,
        "jgg.nvfp4_grouped_mm: alpha must hold real numbers, got dtype complex64",
    ),
    (
        lambda: jgg.nvfp4_grouped_mm(X, W, S, bias=jnp.ones((3, 7))), ValueError,
        "jgg.nvfp4_grouped_mm: bias has shape (3, 7), expected (G, N) = (3, 8) because w is "
        "(3, 8, 32)",
    ),
    (
        lambda: jgg.nvfp4_grouped_mm(
            X, dataclasses.replace(W, global_scale=jnp.ones((3, 8))), S
        ),
        ValueError,
        "jgg.nvfp4_grouped_mm: w.global_scale has shape (3, 8), expected () or (G,) = (3,) because "
        "w is (3, 8, 32)",
    ),
    (
        lambda: jgg.nvfp4_grouped_mm(X, W, S, preferred_element_type="float64"), TypeError,
        "jgg.nvfp4_grouped_mm: preferred_element_type must be float32, bfloat16 or float16, got "
        "dtype float64",
    ),
    (
        lambda: jgg.nvfp4_grouped_mm(X, W, S, implementation="triton"), ValueError,
        "jgg.nvfp4_grouped_mm: implementation='triton' is not one of None, "
        + ", ".join(map(repr, _call.IMPLEMENTATIONS)),
    ),
    (
        lambda: jgg.nvfp4_grouped_wgrad(like(8, 192), B, S), ValueError,
        "jgg.nvfp4_grouped_wgrad: x has layout 'linear', expected 'grouped': "
        "nvfp4_quantize(x, axis=0, group_sizes=group_sizes)",
    ),
    (
        lambda: jgg.nvfp4_grouped_wgrad(A, like(6, 192, mode="mxfp4", group=32), S), ValueError,
        "jgg.nvfp4_grouped_wgrad: dy has mode 'mxfp4', expected 'nvfp4'",
    ),
    (
        lambda: jgg.nvfp4_grouped_wgrad(A, like_grouped(6, 21), S), ValueError,
        "jgg.nvfp4_grouped_wgrad: dy has 21 rows, expected T = 20 as x",
    ),
    (
        lambda: jgg.nvfp4_grouped_wgrad(A, B, jnp.array([4, 0])), ValueError,
        "jgg.nvfp4_grouped_wgrad: x is stored as (8, 192), expected (8, 128) because it has 20 "
        "rows and group_sizes is (2,)",
    ),
    (
        lambda: jgg.nvfp4_grouped_wgrad(
            A, dataclasses.replace(B, global_scale=jnp.ones(6)), S
        ),
        ValueError, "jgg.nvfp4_grouped_wgrad: dy.global_scale has shape (6,), expected ()",
    ),
    (
        lambda: jgg.nvfp4_grouped_wgrad(A, B, S, beta=0), ValueError,
        "jgg.nvfp4_grouped_wgrad: beta needs existing_out, which it multiplies",
    ),
    (
        lambda: jgg.nvfp4_grouped_wgrad(A, B, S, beta=jnp.ones(2), existing_out=OLD), ValueError,
        "jgg.nvfp4_grouped_wgrad: beta has shape (2,), expected () or (G,) = (3,) because "
        "group_sizes is (3,)",
    ),
    (
        lambda: jgg.nvfp4_grouped_wgrad(A, B, S, existing_out=OLD[:2]), ValueError,
        "jgg.nvfp4_grouped_wgrad: existing_out has shape (2, 6, 8), expected (G, N, K) = (3, 6, 8) "
        "the result's shape",
    ),
    (
        lambda: jgg.nvfp4_grouped_wgrad(A, B, S, existing_out=OLD.astype("bfloat16")), TypeError,
        "jgg.nvfp4_grouped_wgrad: existing_out must be float32, got dtype bfloat16",
    ),
    (
        lambda: jgg.nvfp4_grouped_wgrad(A, B, S, implementation="triton"), ValueError,
        "jgg.nvfp4_grouped_wgrad: implementation='triton' is not one of None, "
        + ", ".join(map(repr, _call.IMPLEMENTATIONS)),
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(ERRORS)))
def test_errors(case):
    call, kind, message = ERRORS[case]
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == message
