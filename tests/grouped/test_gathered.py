"""Products of rows by index: what is lowered where, and the composition, against float64 numpy."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_groupgemm as jgg
from jax_groupgemm._core import segments
from jax_groupgemm._core.products import Mm
from jax_groupgemm._grouped import fused
from jax_groupgemm._grouped.call import Epilogue
from jax_groupgemm._kernels import choose, dense, extension

pytestmark = pytest.mark.default_device

A, G, K, N = 9, 4, 16, 24
LHS = np.array([0, 8, 8, -1, 9, 3, 5, 2**31 - 1, 1, 8], np.int32)
RHS = np.array([3, 0, 0, 1, 3, -2, 4, 0, 1, 3], np.int32)


@pytest.mark.parametrize("count", [1, 9, choose.COMPARE_UP_TO, choose.COMPARE_UP_TO + 1])
def test_order(rng, count):
    """Few numbers are put in order by comparing, many by sorting: with the same result."""
    values = rng.integers(-1, 7, count).astype(np.int32)
    order = np.argsort(values, kind="stable")
    got, place = jax.jit(fused.order)(values)
    np.testing.assert_array_equal(got, order)
    assert (place is None) == (count > choose.COMPARE_UP_TO)
    if place is not None:
        np.testing.assert_array_equal(place, np.argsort(order))
    np.testing.assert_array_equal(jax.jit(fused.inverse)(order), np.argsort(order))


def operands(rng, m=1, dtype="bfloat16"):
    return oracle.random(rng, (A, m, K), dtype), oracle.random(rng, (G, K, N), dtype)


def cuda_call(f, *args) -> tuple[str, list[str]]:
    """The module, and the types of the operands of its one product."""
    text = jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    (call,) = re.findall(r"custom_call @jgg_mm.* : \((.*?)\) -> ", text)
    return text, re.findall(r"tensor<(.*?)>", call)


# ---- lowering --------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_indices_reach_the_kernel_where_it_is_named(rng, dtype, m):
    """Neither x nor the result is permuted: the only gathers and sorts are of indices."""
    a, b = operands(rng, m, dtype)
    kind = "bf16" if dtype == "bfloat16" else "f16"
    x, w, lists = f"{A * m}x{K}x{kind}", f"{G}x{K}x{N}x{kind}", f"{len(RHS) * m}xi32"
    f = lambda a, b, i, j, **o: jgg.gather_mm(a, b, i, j, implementation="sm90", **o)
    text, given = cuda_call(f, a, b, LHS, RHS)
    assert given == [x, w, f"{G + 1}xi32", "i32", lists, lists]
    assert "x_rows = true, y_rows = true" in text
    assert not re.findall(r"stablehlo.gather.*x[b]?f16>", text)
    text, given = cuda_call(
        functools.partial(f, sorted_indices=True), a, b, LHS, np.sort(RHS)
    )  # fmt: skip
    assert given == [x, w, f"{G + 1}xi32", "i32", lists]
    assert "x_rows = true, y_rows = false" in text
    assert "stablehlo.sort" not in text
    assert not re.findall(r"stablehlo.gather.*x[b]?f16>", text)


@pytest.mark.parametrize("capabilities", [(90,), (80,), (80, 90), ()])
def test_the_default_needs_hopper_alone(rng, monkeypatch, capabilities):
    monkeypatch.setattr(
        extension, "BUILD", extension.Build(cuda="13.0", architectures=("80", "90a"))
    )
    monkeypatch.setattr(extension, "live_capabilities", lambda: capabilities)
    text, _ = cuda_call(lambda a, b: jgg.gather_mm(a, b, LHS, RHS), *operands(rng))
    assert ("x_rows = true" in text) == (capabilities == (90,))


def test_many_rows_are_composed_where_it_is_not_named(rng, monkeypatch):
    monkeypatch.setattr(dense, "_LISTS_UP_TO_ROWS", 2)
    monkeypatch.setattr(
        extension, "BUILD", extension.Build(cuda="13.0", architectures=("80", "90a"))
    )
    monkeypatch.setattr(extension, "live_capabilities", lambda: (90,))
    f = lambda rhs, **o: lambda a, b: jgg.gather_mm(a, b, LHS[: len(rhs)], rhs, **o)
    few, many = RHS[: 2 * G], RHS[: 2 * G + 1]
    text, given = cuda_call(f(many), *operands(rng))
    assert "x_rows = false, y_rows = false" in text
    assert given[0] == f"{len(many)}x{K}xbf16"
    for text in (f(few), f(many, implementation="sm90")):
        assert "x_rows = true" in cuda_call(text, *operands(rng))[0]


@pytest.mark.parametrize("case", ["float32", "K", "N", "tall", "sm80"])
def test_what_the_kernel_cannot_do_is_composed(rng, case):
    k, n = 12 if case == "K" else K, 20 if case == "N" else N
    dtype = "float32" if case == "float32" else "bfloat16"
    a = oracle.random(rng, (A, 40 if case == "tall" else 1, k), dtype)
    b = oracle.random(rng, (G, k, n), dtype)
    kernel = "sm80" if case == "sm80" else "sm90"
    text, _ = cuda_call(lambda a, b: jgg.gather_mm(a, b, LHS, RHS, implementation=kernel), a, b)
    assert "x_rows = false, y_rows = false" in text
    with pytest.raises(ValueError, match=f"{kernel!r} cannot run: it runs on cuda, but this"):
        jax.jit(
            lambda a, b: jgg.gather_mm(a, b, LHS, RHS, implementation=kernel)
        ).trace(a, b).lower(lowering_platforms=("cpu",))  # fmt: skip


def test_derivatives_and_batches_are_composed(rng):
    a, b = operands(rng)
    f = lambda a, b: jgg.gather_mm(a, b, LHS, RHS, implementation="sm90")
    for g, args in (
        (jax.grad(lambda a, b: f(a, b).sum().astype("float32"), (0, 1)), (a, b)),
        (jax.vmap(f, (0, None)), (a[None], b)),
    ):
        text = jax.jit(g).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
        assert "custom_call @jgg_" in text
        assert "x_rows = true" not in text


# ---- the composition -------------------------------------------------------------------------


@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("ordered", [False, True])
def test_values(rng, m, ordered):
    """Indices repeat, and are out of range; rows that none names are NaN."""
    a, b = operands(rng, m)
    a = a.at[np.setdiff1d(np.arange(A), LHS)].set(jnp.nan)
    rhs = np.sort(RHS) if ordered else RHS
    out = jgg.gather_mm(a, b, LHS, rhs, sorted_indices=ordered)
    clean = jnp.where(jnp.isnan(a), 0, a)
    oracle.assert_close(out, oracle.gather_mm(clean, b, LHS, rhs))
    np.testing.assert_array_equal(
        out, jgg.gather_mm(a, b, LHS, rhs, sorted_indices=ordered, implementation="reference")
    )


def test_a_missing_row_of_an_infinite_matrix_is_zeros(rng):
    a, b = operands(rng)
    out = jgg.gather_mm(a, jnp.full_like(b, jnp.inf), LHS, RHS)
    missing = (LHS < 0) | (LHS >= A) | (RHS < 0) | (RHS >= G)
    assert not np.asarray(out)[missing].any()
    assert not np.isfinite(np.asarray(out)[~missing]).any()


@pytest.mark.parametrize("transpose_w", [False, True])
def test_the_primitive_scatters(rng, transpose_w):
    """Rows of no group are zeros where their index puts them."""
    x, w = oracle.random(rng, (A, 2, K), "bfloat16"), oracle.random(rng, (G, K, N), "bfloat16")
    sizes, index = np.array([4, 99, 0, 6, 2, -7], np.int32), np.array([3, 0, 3, -1, 8, 9], np.int32)
    to = np.array([2, 5, 0, 1, 4, 3], np.int32)
    rows = np.where(
        ((index >= 0) & (index < A))[:, None, None], oracle.f64(x)[np.clip(index, 0, A - 1)], 0
    )
    want = np.zeros((6, 2, N))
    want[to] = oracle.grouped_mm(rows.reshape(12, K), w, sizes, offset=1).reshape(6, 2, N)
    for y_index in (to, None):
        out = fused.MM(
            x, w.swapaxes(1, 2) if transpose_w else w, segments.sizes(sizes, jnp.int32(1)),
            Mm(rows=12, out_dtype="float32", transpose_w=transpose_w),
            lists=fused.Lists(jnp.asarray(index), y_index),
        )  # fmt: skip
        oracle.assert_close(out, want if y_index is not None else want[to])


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("activation", [None, "silu", "swiglu"])
@np.errstate(all="ignore")
def test_lists_and_options_are_one_product(rng, m, activation):
    """Bias by group, scale by the row of the product, the existing result by the row it goes to; a
    row that x has not meets no matrix, and has the other options."""
    x, w = operands(rng, m, "float32")
    w = w.at[2].set(jnp.inf)
    sizes = np.array([2 * m, m, 2 * m, 0], np.int32)
    index, to = np.array([3, 8, -1, 5, A, 0], np.int32), np.array([2, 5, 0, 1, 4, 3], np.int32)
    bias, scale = oracle.random(rng, (G, N)), oracle.random(rng, (6 * m,))
    columns = N // 2 if activation == "swiglu" else N
    old = oracle.random(rng, (6, m, columns))
    there = ((index >= 0) & (index < A)).repeat(m)
    rows = oracle.f64(x)[np.clip(index, 0, A - 1)].reshape(6 * m, K)
    y = np.zeros((6 * m, N))
    for g, (start, end) in enumerate(oracle.bounds(sizes, 6 * m)):
        part = np.arange(start, end)
        y[part[there[part]]] = rows[part[there[part]]] @ oracle.f64(w)[g]
        y[part] += oracle.f64(bias)[g]
    silu = lambda a: a / (1 + np.exp(-a))
    if activation == "silu":
        y = silu(y)
    elif activation == "swiglu":
        y = silu(y[:, :columns]) * y[:, columns:]
    y *= oracle.f64(scale)[:, None] * (np.arange(6 * m) < sizes.sum())[:, None]
    want = oracle.f64(old).copy()
    want[to] += y.reshape(6, m, columns)
    got = fused.MM(
        x, w, segments.sizes(jnp.asarray(sizes)), Mm(rows=6 * m, out_dtype="float32"),
        Epilogue(bias, activation, scale, old), fused.Lists(jnp.asarray(index), jnp.asarray(to)),
    )  # fmt: skip
    finite = np.isfinite(want)
    assert not finite.all()
    np.testing.assert_array_equal(np.isfinite(np.asarray(got)), finite)
    oracle.assert_close(jnp.where(finite, got, 0), np.where(finite, want, 0))


@pytest.mark.slow
def test_gradients_and_batches(rng):
    a, b = operands(rng)
    f = lambda a, b, i: jgg.gather_mm(a, b, LHS, i)
    plain = lambda a, b, i: jgg.gather_mm(a, b, LHS, i, implementation="reference")
    loss = lambda f, a, b: jnp.sin(f(a, b, RHS).astype("float32")).sum()
    for got, want in zip(
        jax.jit(jax.grad(functools.partial(loss, f), (0, 1)))(a, b),
        jax.jit(jax.grad(functools.partial(loss, plain), (0, 1)))(a, b),
        strict=True,
    ):
        oracle.assert_close(got, want)
    batch = np.stack([RHS, RHS[::-1], RHS * 0])
    got = jax.jit(jax.vmap(f, (None, None, 0)))(a, b, batch)
    for one, i in zip(got, batch, strict=True):
        oracle.assert_close(one, oracle.gather_mm(a, b, LHS, i))
    axes = (0, None, 0)
    stacked = jnp.stack([a, a + 1, -a])
    grad = lambda f: jax.grad(lambda a, b, i: f(a, b, i).sum().astype("float32"))
    got, single = jax.jit(jax.vmap(grad(f), axes))(stacked, b, batch), jax.jit(grad(plain))
    for one, x, i in zip(got, stacked, batch, strict=True):
        oracle.assert_close(one, single(x, b, i))


@pytest.mark.parametrize("kind", ["auto", "explicit", "manual"])
def test_sharded_columns(rng, kind):
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    a, b = operands(rng)
    f = lambda a, b: jgg.gather_mm(a, b, LHS, RHS)
    want = oracle.gather_mm(a, b, LHS, RHS)
    axis_type = AxisType.Explicit if kind == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((2,), ("d",), axis_types=(axis_type,))
    columns = P(None, None, "d")
    with jax.set_mesh(mesh):
        placed = (
            jax.device_put(a, NamedSharding(mesh, P())),
            jax.device_put(b, NamedSharding(mesh, columns)),
        )
        if kind == "manual":
            f = jax.shard_map(f, in_specs=(P(), columns), out_specs=columns)
        out = jax.jit(f)(*placed)
    oracle.assert_close(out, want)
    assert out.sharding.spec[2] == "d"


def test_cost(rng, monkeypatch):
    a, b = operands(rng)
    cost = jgg.cost.gather_mm(a, b, LHS, RHS)
    monkeypatch.setattr(fused.MM, "takes_lists", lambda *_: False)
    jax.clear_caches()
    composed = jgg.cost.gather_mm(a, b, LHS, RHS)
    assert cost.flops == composed.flops > 0
    lists = 4 * 2 * len(RHS)
    assert cost.bytes_accessed == composed.bytes_accessed + lists


def test_what_exists_is_flattened_for_the_kernel(rng):
    """It is in blocks of rows, as the result; the kernel takes rows, and adds to them in place."""
    x, w = oracle.random(rng, (A, 2, K), "bfloat16"), oracle.random(rng, (G, K, N), "bfloat16")
    old = oracle.random(rng, (6, 2, N), "bfloat16")
    index = jnp.arange(6)
    product = Mm(rows=12, out_dtype="bfloat16", implementation="sm90")
    f = lambda x, w, old: fused.MM(
        x, w, segments.sizes(np.full(G, 3)), product, Epilogue(existing_out=old),
        fused.Lists(index, index),
    )  # fmt: skip
    text, given = cuda_call(f, x, w, old)
    assert given[-1] == f"12x{N}xbf16"
    assert "output_operand_alias" in text
    assert text.count(f"tensor<12x{N}xbf16>) -> tensor<6x2x{N}xbf16>") == 1


def test_one_index_is_sorted(rng):
    a, b = operands(rng)
    out = jgg.gather_mm(a, b, LHS[:1], RHS[:1], sorted_indices=True)
    np.testing.assert_array_equal(out, jgg.gather_mm(a, b, LHS[:1], RHS[:1]))
