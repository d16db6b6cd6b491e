"""Adapters of low rank beside quantized weights: values, gradients, transformations, calls."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import mesh_of, needs_two_devices
from test_qmm_lowering import cuda_text

import jax_groupgemm as jgg

pytestmark = pytest.mark.default_device

SIZES = np.array([9, 0, 8, 2], np.int32)
ROWS, K, N, RANK = 21, 128, 64, 8  # two rows are of no group


def problem(rng, mode="nvfp4", transpose_w=True, dtype="float32", adapter_dtype=None):
    """x, the weight, and the adapter."""
    scale = jnp.asarray(rng.uniform(0.5, 2, 4), "float32") if mode == "nvfp4" else None
    shape = (4, N, K) if transpose_w else (4, K, N)
    bits, group = {"nvfp4": (4, 16), "affine": (4, 64)}[mode]
    q = oracle.random_quantized(rng, shape, mode, bits, group, dtype, scale)
    x = oracle.random(rng, (ROWS, K), dtype)
    factors = (
        oracle.random(rng, shape, adapter_dtype or dtype) / 8
        for shape in ((4, K, RANK), (4, RANK, N))
    )
    return x, q, tuple(factors)


def expected(x, q, adapter, transpose_w=True):
    """In float64."""
    out = np.zeros((ROWS, N))
    out[: SIZES.sum()] = oracle.grouped_qmm(x[: SIZES.sum()], q, SIZES, transpose_w=transpose_w)
    x, a, b = map(oracle.f64, (x, *adapter))
    begin = 0
    for g, rows in enumerate(SIZES):
        out[begin : begin + rows] += x[begin : begin + rows] @ a[g] @ b[g]
        begin += rows
    return out


def composed(x, q, adapter, sizes=SIZES, transpose_w=True, **options):
    """As users would write it."""
    down, up = adapter
    low = jgg.grouped_mm(jgg.grouped_mm(x, down, sizes), up, sizes)
    return jgg.grouped_qmm(x, q, sizes, transpose_w=transpose_w, **options) + low


def adapted(x, q, adapter, sizes=SIZES, **options):
    return jgg.grouped_qmm(x, q, sizes, adapter=adapter, **options)


@pytest.mark.parametrize("transpose_w", [True, False])
@pytest.mark.parametrize("mode", ["nvfp4", "affine"])
def test_values(rng, mode, transpose_w):
    x, q, adapter = problem(rng, mode, transpose_w)
    out = adapted(x, q, adapter, transpose_w=transpose_w)
    oracle.assert_close(out, expected(x, q, adapter, transpose_w), k=K)
    assert not np.asarray(out)[SIZES.sum() :].any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_values_of_16_bits(rng, dtype):
    """Factors of another dtype are rounded to that of x."""
    x, q, adapter = problem(rng, "nvfp4", True, dtype, "float32")
    out = adapted(x, q, adapter)
    assert out.dtype == dtype
    rounded = tuple(a.astype(dtype) for a in adapter)
    oracle.assert_close(out, expected(x, q, rounded), tolerance=2e-2)


def test_options(rng):
    """They are done to the sum."""
    x, q, adapter = problem(rng)
    bias, scale = oracle.random(rng, (4, N)), oracle.random(rng, (ROWS,))
    out = adapted(x, q, adapter, bias=bias, activation="gelu", row_scale=scale)
    covered = np.repeat(np.arange(4), SIZES)
    want = expected(x, q, adapter)[: SIZES.sum()] + oracle.f64(bias)[covered]
    want = oracle.f64(jax.nn.gelu(jnp.asarray(want, "float32")))
    want *= oracle.f64(scale)[: SIZES.sum(), None]
    oracle.assert_close(out[: SIZES.sum()], want, tolerance=1e-4)
    assert not np.asarray(out)[SIZES.sum() :].any()


def test_an_offset(rng):
    """Rows whose groups are elsewhere are zeros."""
    x, q, adapter = problem(rng)
    some = jax.tree.map(lambda a: a[1:3], q)
    out = adapted(x, some, tuple(a[1:3] for a in adapter), group_offset=1)
    want = expected(x, q, adapter)
    want[:9], want[17:] = 0, 0
    oracle.assert_close(out, want, k=K)


def loss(f, x, q, adapter):
    return jnp.sin(f(x, q, adapter)).sum()


@pytest.mark.parametrize("mode", ["nvfp4", "affine"])
def test_gradients(rng, mode):
    """Those of x, of the factors, and of the weight's scales."""
    x, q, adapter = problem(rng, mode)
    names = ("global_scale",) if mode == "nvfp4" else ("scales", "biases")

    def of(f):
        def run(x, adapter, leaves):
            return loss(f, x, dataclasses.replace(q, **leaves), adapter)

        return jax.jit(jax.grad(run, (0, 1, 2)))

    args = x, adapter, {name: getattr(q, name) for name in names}
    jax.tree.map(
        lambda got, want: oracle.assert_close(got, oracle.f64(want), tolerance=1e-4),
        of(adapted)(*args), of(composed)(*args),
    )  # fmt: skip


def test_gradients_have_the_dtype_of_factors(rng):
    """Sums of bfloat16 rows come in float32 where the factor is float32."""
    x, q, adapter = problem(rng, "nvfp4", True, "bfloat16", "float32")
    down, up = jax.grad(lambda a: loss(adapted, x, q, a))(adapter)
    assert down.dtype == up.dtype == "float32"
    assert (np.asarray(up) != np.asarray(up.astype("bfloat16"), "float32")).any()


@pytest.mark.parametrize("options", [{}, {"bias": 0.5, "activation": "gelu"}])
def test_second_derivatives_and_forward_mode(rng, options):
    x, q, adapter = problem(rng)
    if options:
        options = options | {"bias": jnp.full((4, N), options["bias"])}
    plain = lambda x, a: expected_by_jax(x, q, a, options)
    ours = lambda x, a: adapted(x, q, a, **options)
    sines = lambda f: lambda x: jnp.sin(f(x)).sum()

    def second(f):
        return jax.grad(sines(jax.grad(sines(lambda x: f(x, adapter)))))(x)

    def forward(f):
        return jax.jvp(lambda a: f(x, a), (adapter,), (adapter,))[1]

    for of in (second, forward):
        oracle.assert_close(of(ours), oracle.f64(of(plain)), tolerance=1e-4)


def expected_by_jax(x, q, adapter, options):
    w = jgg.dequantize(dataclasses.replace(q, global_scale=None), "float32").swapaxes(1, 2)
    lora = jnp.matmul(*adapter, precision="highest")
    full = w * q.global_scale[:, None, None] + lora
    return jgg.grouped_mm(x, full, SIZES, **options)


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)])
def test_batches(rng, axes):
    x, q, adapter = problem(rng)
    xs = jnp.stack([x, -x]) if axes[0] == 0 else x
    many = tuple(jnp.stack([a, 2 * a]) for a in adapter) if axes[1] == 0 else adapter
    f = lambda x, a: adapted(x, q, a)
    got = jax.vmap(f, axes)(xs, many)
    want = [
        f(xs[i] if axes[0] == 0 else x, tuple(a[i] for a in many) if axes[1] == 0 else adapter)
        for i in range(2)
    ]
    oracle.assert_close(got, oracle.f64(jnp.stack(want)), k=K)


def test_remat(rng):
    x, q, adapter = problem(rng)
    f = lambda x, a: loss(adapted, x, q, a)
    got = jax.grad(jax.checkpoint(f), (0, 1))(x, adapter)
    want = jax.grad(f, (0, 1))(x, adapter)
    jax.tree.map(lambda a, b: oracle.assert_close(a, oracle.f64(b), tolerance=1e-6), got, want)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    ("x_spec", "w_spec", "down_spec", "up_spec"),
    [
        (P("d"), P(), P(), P()),
        (P(), P(None, "d"), P(), P(None, None, "d")),
        (P(None, "d"), P(None, None, "d"), P(None, "d"), P()),
    ],
    ids=["T", "N", "K"],
)
@needs_two_devices
def test_shards(rng, kind, x_spec, w_spec, down_spec, up_spec):
    """Values, and gradients that are sharded as their operands."""
    x, q, adapter = problem(rng, "affine")
    x = jnp.concatenate([x, x[:3]])
    step = jax.jit(jax.value_and_grad(functools.partial(loss, adapted), (0, 2), allow_int=True))
    want = step(x, q, adapter)
    mesh = mesh_of((2,), ("d",), kind)
    put = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
    factors = put(adapter[0], down_spec), put(adapter[1], up_spec)
    args = put(x, x_spec), jax.tree.map(lambda leaf: put(leaf, w_spec), q), factors
    with jax.set_mesh(mesh):
        got = step(*args)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        oracle.assert_close(g, oracle.f64(w), tolerance=1e-5)
    if kind == AxisType.Explicit:
        for g, given in zip(jax.tree.leaves(got[1]), (args[0], *factors), strict=True):
            assert g.sharding.is_equivalent_to(given.sharding, g.ndim)


def test_errors(rng):
    x, q, (down, up) = problem(rng)
    with pytest.raises(TypeError, match=r"adapter must be two arrays, \(G, K, r\) and"):
        adapted(x, q, down)
    with pytest.raises(ValueError, match=r"adapter\[0\] has shape \(4, 64, 8\), expected"):
        adapted(x, q, (down[:, :64], up))
    with pytest.raises(ValueError, match=r"adapter\[1\] has shape \(4, 4, 64\), expected"):
        adapted(x, q, (down, up[:, :4]))
    with pytest.raises(TypeError, match=r"adapter\[1\] must be"):
        adapted(x, q, (down, up.astype("int32")))


def test_cost(rng):
    """Three products; the result is written once."""
    x, q, adapter = problem(rng)
    sizes = np.array([9, 0, 8, 4], np.int32)
    found = jgg.cost.of(jgg.grouped_qmm, x, q, sizes, adapter=adapter)
    base = jgg.cost.grouped_qmm(x, q, sizes)
    assert found.flops == base.flops + 2 * ROWS * RANK * (K + N)
    low = jgg.cost.grouped_mm(x, adapter[0], sizes)
    rows, up = ROWS * RANK * 4, 3 * RANK * N * 4  # one group has no rows
    assert found.bytes_accessed == base.bytes_accessed + low.bytes_accessed + rows + up


# ---- calls ---------------------------------------------------------------------------------------


def many_rows(dtype="bfloat16", rank=16, rows=1024):
    q = jax.eval_shape(
        lambda w: jgg.prepack(jgg.quantize(w, mode="nvfp4", global_scale=jnp.ones(4))),
        jax.ShapeDtypeStruct((4, 192, 256), "bfloat16"),
    )
    shapes = (rows, 256), (4, 256, rank), (4, rank, 192)
    x, down, up = (jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
    return x, q, (down, up)


def calls(text: str) -> list[tuple[str, bool]]:
    """Names of custom calls, and whether they add an adapter's product."""
    found = re.findall(r"custom_call @(jgg_\w+)\(.*", text)
    lines = [line for line in text.splitlines() if "custom_call @jgg_" in line]
    return [(name, "adapter = true" in line) for name, line in zip(found, lines, strict=True)]


def test_one_call_adds_both():
    sizes = jnp.full(4, 256, "int32")
    f = lambda x, q, adapter: jgg.grouped_qmm(x, q, sizes, adapter=adapter)
    found = calls(cuda_text(f, *many_rows()))
    assert found == [("jgg_mm", False), ("jgg_qmm_packed", True)]


def test_gradients_are_calls_that_add_both():
    """The rows of the first factor are made, and of the cotangent four calls make all gradients."""
    sizes = jnp.full(4, 256, "int32")

    def f(x, q, adapter):
        return jgg.grouped_qmm(x, q, sizes, adapter=adapter).astype("float32").sum()

    found = calls(cuda_text(jax.grad(f, (0, 2), allow_int=True), *many_rows()))
    assert sorted(found) == [
        ("jgg_mm", False), ("jgg_mm", False), ("jgg_qmm_packed", True),
        ("jgg_wgrad", False), ("jgg_wgrad", False),
    ]  # fmt: skip


@pytest.mark.parametrize("given", [{"rank": 12}, {"rank": 72}, {"rows": 200}, {"dtype": "float32"}])
def test_what_no_kernel_adds(given):
    """Ranks, few rows, and float32 rows are composed."""
    x, q, adapter = many_rows(**given)
    f = lambda x, q, adapter: jgg.grouped_qmm(x, q, jnp.full(4, 256, "int32"), adapter=adapter)
    found = calls(cuda_text(f, x, q, adapter))
    assert not any(added for _, added in found)
    assert [name for name, _ in found].count("jgg_mm") == 2
