"""Codes of rows along both axes, of one read: where they are made, what is lowered to one call, and
on a GPU what it makes, byte for byte."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from fp8_quantize_cases import LINES_BOTH, edges
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from lowered_calls import text_of
from meshes import mesh_of, needs_two_devices

import jax_groupgemm as jgg
from jax_groupgemm._fp8 import blocks, convert

TARGET = LINES_BOTH
SIZES = np.array([0, 130, 1, 0, 128, -4, 3], np.int32)
INSIDE = 262  # rows of groups


def lines(x, sizes=SIZES):
    return convert.quantized_lines(x, jnp.asarray(sizes))


def one_by_one(x, sizes=SIZES):
    of = functools.partial(
        convert.quantized, "", x, block=blocks.LINE, group_sizes=jnp.asarray(sizes)
    )
    return of(axis=-1), of(axis=-2)


def same(got, want):
    got, want = jax.device_get((got, want))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


def rows_of(rng, dtype, shape, inside=INSIDE):
    x = edges(rng, dtype, shape)
    x[inside:] = np.nan
    return jnp.asarray(x)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_composition(rng, dtype):
    x = rows_of(rng, dtype, (272, 200))
    same(jax.jit(lines)(x), jax.jit(one_by_one)(x))


@needs_two_devices
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", [P("d"), P(None, "d")])
def test_sharded(rng, spec, kind):
    """The numbers are ordinary: where XLA adds up what devices have, subnormals and signs of zeros
    are lost."""
    x = jnp.asarray(oracle.random(rng, (272, 192)))
    want = jax.jit(one_by_one)(x)
    mesh = mesh_of((2,), ("d",), kind)
    with jax.set_mesh(mesh):
        got = jax.jit(lines)(jax.device_put(x, NamedSharding(mesh, spec)))
    same(got, want)


def test_batch(rng):
    xs = jnp.stack([rows_of(rng, "float32", (272, 64)) for _ in range(2)])
    sizes = jnp.stack([SIZES, SIZES])
    got = jax.jit(jax.vmap(lines))(xs, sizes)
    for i in range(2):
        same(jax.tree.map(lambda a, i=i: a[i], got), one_by_one(xs[i]))


# ---- where it is taken ----


def test_call():
    text = text_of(lines, jnp.zeros((272, 208), jnp.bfloat16))
    (line,) = [line for line in text.splitlines() if "@jgg_fp8_quantize(" in line]
    assert TARGET in line
    operands, results = line.rsplit(" : (", 1)[1].split(" -> ")
    assert operands == "tensor<1x272x208xbf16>, tensor<7xi32>, tensor<0xui32>, tensor<0xi32>)"
    assert results == (
        "(tensor<1x272x208xf8E4M3FN>, tensor<1x272x2xf32>, tensor<1x208x1152xf8E4M3FN>, "
        "tensor<1x208x9xf32>, tensor<34xi32>)"
    )


def test_not_taken():
    """Elsewhere, of nothing, in a batch, of a width that is no multiple of sixteen, of another
    dtype, and where XLA cuts arrays."""
    x = jnp.zeros((48, 64), jnp.bfloat16)
    taken = lambda f, x, **more: TARGET in text_of(f, x, **more)
    assert taken(lines, x)
    assert not taken(lines, x, platform="cpu")
    assert not taken(lines, x[:0])
    assert not taken(lines, x[:, :24])
    assert not taken(lines, x.astype("float32"))
    assert not taken(lines, x.astype("float16"))
    assert not taken(jax.vmap(lines), x[None])
    mesh = jax.make_mesh((2,), ("d",), devices=jax.local_devices()[:2])
    assert not taken(lines, jax.device_put(x, NamedSharding(mesh, P("d"))))


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["plain", "checkpoint"])
def test_one_of_both(which, wrap):
    """What nobody reads is not made."""
    f = wrap(lambda x: (lines(x)[which].weight.astype(x.dtype) * x.sum()).sum())
    text = text_of(jax.value_and_grad(f), jnp.zeros((48, 64), jnp.bfloat16))
    assert TARGET not in text
    assert "@jgg_fp8_quantize(" in text


def test_an_unread_pair_is_nothing():
    f = jax.checkpoint(lambda x: (lines(x), x.sum())[1])
    assert "jgg_fp8" not in text_of(jax.value_and_grad(f), jnp.zeros((48, 64), jnp.bfloat16))


X, W = jax.ShapeDtypeStruct((256, 128), "bfloat16"), jax.ShapeDtypeStruct((2, 64, 128), "bfloat16")


def counts(recipe, of=(0, 1), key=None) -> int:
    """How often rows are quantized both ways at once."""
    sizes = jnp.array([100, 150])
    f = lambda x, w: jgg.fp8_grouped_linear(x, w, sizes, recipe=recipe, key=key)
    loss = lambda x, w: jnp.sin(f(x, w).astype("float32")).sum()
    return text_of(jax.value_and_grad(loss, of), X, W).count(TARGET)


def test_a_step():
    """x and dy are each read once. Where a gradient is left out or rounded at random, or a product
    is not in eight bits, each axis is quantized alone."""
    both = jgg.FP8Recipe()
    assert counts(both) == 2
    assert counts(both, of=(0,)) == 0
    assert counts(both, of=(1,)) == 1
    assert counts(both, key=jax.random.key(3)) == 1
    assert counts(jgg.FP8Recipe(wgrad="bfloat16")) == 0
    assert counts(jgg.FP8Recipe(dgrad="bfloat16")) == 1
    assert counts(jgg.FP8Recipe(forward="bfloat16")) == 1
    assert counts(jgg.FP8Recipe(gradient_format="e5m2")) == 1
    assert counts(jgg.FP8Recipe(activation_block=(1, 64))) == 0


def test_second_order(rng, monkeypatch):
    """The derivative in dy, whose codes were made for both gradients, uses dy itself."""
    shapes = (20, 144), (3, 32, 144), (20, 32)
    x, w, ct = (jnp.asarray(oracle.random(rng, s, "bfloat16")) for s in shapes)

    def step(x, w, ct):
        f = lambda x, w: jgg.fp8_grouped_linear(x, w, jnp.array([9, 0, 8]))
        norm = lambda ct: sum((g.astype("float32") ** 2).sum() for g in jax.vjp(f, x, w)[1](ct))
        return jax.grad(norm)(ct)

    assert TARGET in text_of(step, x, w, ct)
    got = np.asarray(jax.jit(step)(x, w, ct))
    monkeypatch.setattr(convert, "quantized_lines", one_by_one)
    jax.clear_caches()
    want = np.asarray(jax.jit(lambda *args: step(*args))(x, w, ct))
    jax.clear_caches()
    assert np.abs(want.astype(np.float32)).max() > 0
    np.testing.assert_array_equal(got.view("u1"), want.view("u1"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("key", [None, jax.random.key(3)], ids=["nearest", "random"])
def test_gradients(rng, dtype, key, monkeypatch):
    """Those of arrays that are quantized one by one, bit for bit."""
    given = [oracle.random(rng, s, dtype) for s in ((20, 136), (3, 24, 136), (20, 24))]
    x, w, ct = map(jnp.asarray, given)
    step = lambda x, w, ct: jax.vjp(
        lambda x, w: jgg.fp8_grouped_linear(x, w, jnp.array([9, 0, 8]), key=key), x, w
    )[1](ct)
    got = jax.jit(step)(x, w, ct)
    monkeypatch.setattr(convert, "quantized_lines", one_by_one)
    jax.clear_caches()
    want = jax.jit(lambda *args: step(*args))(x, w, ct)
    jax.clear_caches()
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(a).view("u1"), np.asarray(b).view("u1"))


# ---- on a GPU ----


SHAPES = {"whole": (384, 256), "cut": (272, 208), "odd": (265, 80), "small": (300, 16)}


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_bytes(rng, shape):
    x = rows_of(rng, "bfloat16", shape)
    assert TARGET in text_of(lines, x)
    got = jax.jit(lines)(x)
    same(got, jax.jit(one_by_one)(x))
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        same(got, jax.jit(one_by_one)(jax.device_get(x)))


@pytest.mark.gpu
def test_bytes_of_many_groups(rng):
    """More than a thread block finds at once, most of them small, and rows of no group."""
    sizes = rng.integers(0, 12, 3000).astype(np.int32)
    x = jnp.asarray(oracle.random(rng, (int(sizes.sum()) + 777, 272), "bfloat16"))
    got = jax.jit(lambda x: lines(x, sizes))(x)
    same(got, jax.jit(lambda x: one_by_one(x, sizes))(x))


@pytest.mark.gpu
def test_bytes_of_any_bits(rng):
    """Every pair of a bfloat16 and a scale is about as likely as any other."""
    bits = rng.integers(0, 2**16, (4096, 1024)).astype(np.uint16)
    exponents = rng.integers(0, 240, (32, 1, 8, 1)) + rng.integers(0, 15, (32, 128, 8, 128))
    bits = bits & 0x807F | (exponents.reshape(bits.shape) << 7).astype(np.uint16)
    sizes, x = np.array([1000, 0, 3000, 96]), jnp.asarray(bits.view(jnp.bfloat16))
    got = jax.jit(lambda x: lines(x, sizes))(x)
    same(got, jax.jit(lambda x: one_by_one(x, sizes))(x))


@pytest.mark.gpu
def test_what_nobody_reads_is_no_nan(rng):
    """Residuals of a program are checked as a whole."""
    x, w = (jnp.asarray(oracle.random(rng, s, "bfloat16")) for s in ((700, 256), (3, 128, 256)))
    f = jax.jit(lambda x, w: jgg.fp8_grouped_linear(x, w, jnp.array([130, 0, 9])))
    with jax.debug_nans(True):
        out, back = jax.vjp(f, x, w)
        assert all(jnp.isfinite(g).all() for g in back(out))
