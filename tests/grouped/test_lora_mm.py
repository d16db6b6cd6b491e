"""lora_mm: a product of low rank for each row, against float64 numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jax_groupgemm as jgg
from jax_groupgemm._kernels import lora

ADAPTERS, EXPERTS, R, K, N = 3, 2, 4, 12, 10
ADAPTER = np.array([2, 0, -1, 1, 1, 0, 3, 2**31 - 1, 2, 1, 0], np.int32)
EXPERT = np.array([1, 0, 1, 1, 1, 0, 0, 1, -1, 2, 1], np.int32)
ROWS = len(ADAPTER)


def wanted(x, a, b, adapter, expert=None, *, scale=1.0, row_scale=None, existing_out=None):
    x, a, b = (oracle.f64(v) for v in (x, a, b))
    if expert is None:
        a, b, expert = a[:, None], b[:, None], np.zeros(len(adapter), int)
    n = b.shape[2]
    out = np.zeros((len(x), n)) if existing_out is None else oracle.f64(existing_out).copy()
    for t, (i, e) in enumerate(zip(adapter, expert, strict=True)):
        if 0 <= i < a.shape[0] and 0 <= e < a.shape[1]:
            factor = scale * (1 if row_scale is None else oracle.f64(row_scale)[t])
            out[t] += factor * (b[i, e] @ (a[i, e] @ x[t]))
    return out


def operands(rng, dtype="float32", rows=ROWS, batch=(ADAPTERS, EXPERTS)):
    of = lambda *shape: oracle.random(rng, shape, dtype)
    return of(rows, K), of(*batch, R, K), of(*batch, N, R)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values(rng, implementation, dtype):
    x, a, b = operands(rng, dtype)
    run = functools.partial(jgg.lora_mm, implementation=implementation)
    out = run(x, a[:, 0], b[:, 0], ADAPTER)
    assert out.dtype == dtype
    oracle.assert_close(out, wanted(x, a[:, 0], b[:, 0], ADAPTER))
    assert not np.asarray(out)[[2, 6, 7]].any()
    more = {
        "row_scale": oracle.random(rng, (ROWS,)), "scale": 0.5,
        "existing_out": oracle.random(rng, (ROWS, N), dtype),
    }  # fmt: skip
    oracle.assert_close(
        run(x, a, b, ADAPTER, EXPERT, **more, sorted_rows=True),
        wanted(x, a, b, ADAPTER, EXPERT, **more),
    )


def test_rows_of_no_pair_hold_anything(rng):
    """And so do factors that no row names, and scales of such rows; nothing reaches a gradient."""
    x, a, b = operands(rng)
    none = [2, 6, 7, 8, 9]
    x = x.at[jnp.array(none)].set(jnp.nan)
    a, b = a.at[0, 1].set(jnp.inf), b.at[2, 0].set(jnp.nan)
    adapter = np.where(np.arange(ROWS) == 10, 1, ADAPTER)
    scales = jnp.ones((ROWS,)).at[jnp.array(none)].set(jnp.nan)
    f = lambda x, a, b, s: jgg.lora_mm(x, a, b, adapter, EXPERT, row_scale=s)
    out, vjp = jax.vjp(f, x, a, b, scales)
    assert np.isfinite(out).all()
    for grad in vjp(jnp.ones_like(out)):
        assert np.isfinite(grad).all()
    assert not np.asarray(vjp(jnp.ones_like(out))[0])[none].any()


def test_gradients(rng):
    x, a, b = operands(rng)
    scales, old = oracle.random(rng, (ROWS,)), oracle.random(rng, (ROWS, N))

    def f(x, a, b, scales, old):
        more = {"row_scale": scales, "existing_out": old, "scale": 0.5}
        return jgg.lora_mm(x, a, b, ADAPTER, EXPERT, **more)

    check_grads(f, (x, a, b, scales, old), order=1, rtol=2e-2)
    check_grads(lambda *v: f(*v, scales, old), (x, a, b), order=2, modes=["rev"], rtol=2e-2)
    ct = oracle.random(rng, (ROWS, N))
    dx, da, db = jax.vjp(lambda *v: f(*v, scales, old), x, a, b)[1](ct)
    assert (np.asarray(da) != 0).any((2, 3)).tolist() == [
        [True, True],
        [False, True],
        [False, True],
    ]
    want = wanted(ct, b.swapaxes(2, 3), a.swapaxes(2, 3), ADAPTER, EXPERT, scale=0.5,
                  row_scale=scales)  # fmt: skip
    oracle.assert_close(dx, want)
    assert db.shape == b.shape


def test_gradients_of_bfloat16(rng):
    """Factors in float32 are rounded to x's dtype."""
    x, a, b = operands(rng)
    f = lambda x, a, b: jgg.lora_mm(x, a, b, ADAPTER, EXPERT).astype("float32").sum()
    wants = jax.grad(f, (0, 1, 2))(x, a, b)
    for got, want in zip(jax.grad(f, (0, 1, 2))(x.astype("bfloat16"), a, b), wants, strict=True):
        assert np.linalg.norm(oracle.f64(got) - want) <= 0.02 * np.linalg.norm(want)


def test_vmap(rng):
    """Over each operand alone, and over all; and the gradient of a batch."""
    every = operands(rng), operands(rng)
    x, a, b = (jnp.stack(pair) for pair in zip(*every, strict=True))
    adapters = np.stack([ADAPTER, ADAPTER[::-1]])
    f = lambda x, a, b, i: jgg.lora_mm(x, a, b, i, EXPERT)
    for axes in ((0, 0, 0, 0), (0, None, None, None), (None, 0, None, 0), (None, None, 0, None)):
        of = [v if axis == 0 else v[0] for v, axis in zip((x, a, b, adapters), axes, strict=True)]
        take = lambda i, of=of, axes=axes: [
            v if axis is None else v[i] for v, axis in zip(of, axes, strict=True)
        ]
        out = jax.jit(jax.vmap(f, axes))(*of)
        for i in range(2):
            oracle.assert_close(out[i], wanted(*take(i), EXPERT))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    ("x", "a", "b"),
    [
        (P("d"), P(), P()),
        (P(), P(None, "d"), P(None, "d")),
        (P(None, "d"), P(None, None, None, "d"), P()),
        (P(), P(), P(None, None, "d")),
    ],
)
def test_sharded(rng, kind, x, a, b):
    """Rows, experts, K and N over two devices."""
    values = operands(rng, rows=ROWS + 1)
    adapter, expert = np.append(ADAPTER, 0), np.append(EXPERT, 0)
    mesh = jax.make_mesh((2,), ("d",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        put = [
            jax.device_put(v, NamedSharding(mesh, spec))
            for v, spec in zip(values, (x, a, b), strict=True)
        ]
        f = lambda *v: jgg.lora_mm(*v, adapter, expert)
        out = jax.jit(f)(*put)
        grads = jax.jit(jax.grad(lambda *v: (f(*v) ** 2).sum(), (0, 1, 2)))(*put)
    oracle.assert_close(out, wanted(*values, adapter, expert))
    wants = jax.grad(lambda *v: (f(*v) ** 2).sum(), (0, 1, 2))(*values)
    for got, want in zip(grads, wants, strict=True):
        oracle.assert_close(got, want, k=ROWS)


@pytest.mark.parametrize("empty", ["rows", "adapters", "rank", "K", "N"])
def test_empty(empty):
    t, g, r, k, n = (0 if name == empty else 4 for name in ("rows", "adapters", "rank", "K", "N"))
    x, a, b = jnp.ones((t, k)), jnp.ones((g, r, k)), jnp.ones((g, n, r))
    index = np.zeros(t, np.int32)
    assert jgg.lora_mm(x, a, b, index).shape == (t, n)
    assert not np.asarray(jgg.lora_mm(x, a, b, index)).any()
    kept = jgg.lora_mm(x, a, b, index, existing_out=jnp.ones((t, n)))
    assert np.asarray(kept == 1).all()


def test_errors():
    x, a, b, i = jnp.ones((5, 8)), jnp.ones((3, 4, 8)), jnp.ones((3, 6, 4)), np.zeros(5, int)
    with pytest.raises(
        ValueError, match=r"a has shape \(3, 4, 8\), expected 4 axes \(A, E, R, K\)"
    ):
        jgg.lora_mm(x, a, b, i, i)
    with pytest.raises(
        ValueError, match=r"b has shape .*, expected \(A, N, R\) = \(3, 4, 4\) because"
    ):
        jgg.lora_mm(x, a, b.swapaxes(1, 2), i)
    with pytest.raises(ValueError, match=r"adapter has shape \(4,\), expected \(T,\) = \(5,\)"):
        jgg.lora_mm(x, a, b, i[1:])
    with pytest.raises(TypeError, match=r"x must be float32, .*, got dtype int32"):
        jgg.lora_mm(x.astype(int), a, b, i)


# ---- lowering ----------------------------------------------------------------------------------


def half_operands(rows, dtype="bfloat16", r=16, k=64, n=32):
    of = lambda *shape: jax.ShapeDtypeStruct(shape, dtype)
    index = jax.ShapeDtypeStruct((rows,), "int32")
    return of(rows, k), of(4, 3, r, k), of(4, 3, n, r), index, index


def calls(f, *args, **options) -> int:
    traced = jax.jit(functools.partial(f, **options)).trace(*args)
    return traced.lower(lowering_platforms=("cuda",)).as_text().count("@jgg_lora_mm(")


def test_a_call_of_few_rows_is_one_kernel(hopper):
    """Rows of 16 bits; not float32, ranks that it has not, or many rows of a pair."""
    del hopper
    named = lambda *of, **more: calls(jgg.lora_mm, *half_operands(*of), **more)
    assert named(40) == 1
    assert named(40, "float16", 64)
    assert named(40, implementation="sm80")
    assert not named(40, "float32")
    assert not named(40, "bfloat16", 24)
    assert not named(40, "bfloat16", 16, 64, 36)
    assert not named(12 * lora.MOST_ROWS + 1)
    assert not named(40, implementation="sm90")
    x, a, b, i, e = half_operands(40)
    out = jax.ShapeDtypeStruct((40, 32), "bfloat16")
    f = lambda x, a, b, i, e, s, o: jgg.lora_mm(x, a, b, i, e, row_scale=s, existing_out=o)
    assert calls(f, x, a, b, i, e, jax.ShapeDtypeStruct((40,), "float32"), out)


def test_gradients_are_three_kernels(hopper):
    """The gradient of x is one more call, those of the factors another one, or two weight gradients
    where no kernel takes them. A scale that moves has the composition's."""
    del hopper
    scale = jax.ShapeDtypeStruct((40,), "float32")

    def loss(x, a, b, i, e, s=None, implementation=None):
        out = jgg.lora_mm(x, a, b, i, e, row_scale=s, implementation=implementation)
        return out.astype("float32").sum()

    def found(operands, **options):
        run = functools.partial(loss, **options)
        grad = jax.jit(jax.grad(run, (0, 1, 2))).trace(*operands)
        text = grad.lower(lowering_platforms=("cuda",)).as_text()
        return [text.count(f"@jgg_{op}(") for op in ("lora_mm", "lora_wgrad", "wgrad", "mm")]

    operands = half_operands(40)
    assert calls(jax.grad(loss, 5), *operands, scale) == 0
    assert found((*operands, scale)) == found(operands, implementation="sm80") == [2, 1, 0, 0]
    assert found(half_operands(40, r=24))[1:3] == [0, 2]
    assert found(half_operands(12 * lora.MOST_ROWS + 1))[1:3] == [0, 2]
    assert found(operands, implementation="sm90")[1:3] == [0, 2]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("rank", [8, 16, 32, 64])
def test_kernel(rng, dtype, rank):
    """Few rows as they come, many sorted, in runs of one row and of more than a block has."""
    for rows, k, n, adapters, experts in (
        (1, 2048, 1536, 2, 3), (70, 328, 296, 5, 30), (700, 2048, 1536, 3, 20),
        (5000, 512, 264, 20, 40),
    ):  # fmt: skip
        of = lambda *shape: oracle.random(rng, shape, dtype)
        x, a, b = of(rows, k), of(adapters, experts, rank, k), of(adapters, experts, n, rank)
        adapter = rng.integers(-1, adapters + 1, rows)
        adapter[rows // 3 : rows // 2] = 1
        expert = np.sort(rng.integers(0, experts, rows))
        for more in (
            {},
            {"sorted_rows": True, "scale": 0.25, "existing_out": of(rows, n),
             "row_scale": oracle.random(rng, (rows,))},
        ):  # fmt: skip
            f = functools.partial(jgg.lora_mm, **more)
            got = jax.jit(functools.partial(f, implementation="sm80"))(x, a, b, adapter, expert)
            cpu = jax.tree.map(
                lambda v: v.astype("float32"), (x, a, b, more.pop("existing_out", None))
            )
            base = {k: v for k, v in more.items() if k != "sorted_rows"}
            want = jgg.lora_mm(*cpu[:3], adapter, expert, existing_out=cpu[3], **base)
            assert got.dtype == dtype
            bits = {"bfloat16": 8, "float16": 11}[dtype]
            worst = np.abs(oracle.f64(got) - oracle.f64(want)).max()
            assert worst <= 2.0**-bits * 4 * np.abs(want).max()
            none = (adapter < 0) | (adapter >= adapters)
            if cpu[3] is None:
                assert not np.asarray(got)[none].any()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "rank"), [("float16", 8), ("bfloat16", 16), ("float16", 32), ("bfloat16", 64)]
)
@pytest.mark.parametrize("rows", [70, 5000])
def test_gradients_of_the_kernel(rng, dtype, rank, rows):
    """Beside those of float32, of x, both factors and what is added to."""
    k, n, adapters, experts = 328, 264, 5, 40
    of = lambda *shape: oracle.random(rng, shape, dtype)
    x, a, b = of(rows, k), of(adapters, experts, rank, k), of(adapters, experts, n, rank)
    old = of(rows, n)
    adapter, expert = rng.integers(-1, adapters, rows), rng.integers(0, experts, rows)

    def loss(x, a, b, old):
        out = jgg.lora_mm(x, a, b, adapter, expert, scale=0.5, existing_out=old)
        return (out.astype("float32") ** 2).sum() / 64  # in float16's range

    run = jax.jit(jax.grad(loss, (0, 1, 2, 3)))
    assert "jgg_lora_wgrad" in run.lower(x, a, b, old).as_text()
    gots = run(x, a, b, old)
    wants = jax.grad(loss, (0, 1, 2, 3))(*(v.astype("float32") for v in (x, a, b, old)))
    for got, want in zip(gots, wants, strict=True):
        assert got.dtype == dtype
        want = oracle.f64(want)
        assert np.linalg.norm(oracle.f64(got) - want) <= 0.01 * np.linalg.norm(want)
