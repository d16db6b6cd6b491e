"""The custom call of ``fp8_quantize``: where it is taken, what it is given, and on a GPU what it
makes, byte for byte."""

import functools

import jax
import jax.numpy as jnp
import lowered_calls
import numpy as np
import oracle
import pytest
from fp8_quantize_cases import KEY, LINES_BOTH, SQUARES_BOTH, edges
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_groupgemm as jgg

TARGET = "jgg_fp8_quantize"
TILE = (128, 128)


def lowered(x, *operands, function=jgg.fp8_quantize, **kwargs) -> str:
    return lowered_calls.lowered(function, x, *operands, **kwargs)


call = functools.partial(lowered_calls.call, TARGET)


def test_rows():
    operands, results, attributes = call(lowered(jnp.zeros((48, 200), jnp.bfloat16)))
    assert operands == ["1x48x200xbf16", "0xi32", "0xui32", "0xi32"]
    assert results == ["1x48x200xf8E4M3FN", "1x48x2xf32", "0xi32"]
    assert attributes == (
        "along_columns = true, along_rows = false, power_of_two = false, square = false"
    )


def test_squares_transposed():
    x = jnp.zeros((2, 3, 48, 200), jnp.float16)
    text = lowered(x, None, KEY, axis=-2, block=TILE, format="e5m2", scale_format="e8m0")
    operands, results, attributes = call(text)
    assert operands == ["6x48x200xf16", "0xi32", "2xui32", "0xi32"]
    assert results == ["6x200x48xf8E5M2", "6x2x1xf32", "0xi32"]
    assert (
        attributes == "along_columns = false, along_rows = true, power_of_two = true, square = true"
    )


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint8])
def test_groups(dtype):
    x, sizes = jnp.zeros((100, 40)), jnp.zeros((4,), dtype)
    operands, results, _ = call(lowered(x, sizes, axis=0))
    padded = (100 + 127 * 4) // 128 * 128
    assert operands == ["1x100x40xf32", "4xi32", "0xui32", "0xi32"]
    words = 2 * 5 + 2 * padded // 128
    assert results == [f"1x40x{padded}xf8E4M3FN", f"1x40x{padded // 128}xf32", f"{words}xi32"]
    _, results, _ = call(lowered(x, sizes))
    assert results == ["1x100x40xf8E4M3FN", "1x100x1xf32", "10xi32"]
    operands, results, _ = call(lowered(x, sizes, block=TILE))
    assert operands == ["1x100x40xf32", "0xi32", "0xui32", "0xi32"]
    assert results == ["1x100x40xf8E4M3FN", "1x1x1xf32", "0xi32"]


def test_a_step_of_the_linear_layer():
    """Every array that a step quantizes is quantized by a kernel, x and w both ways at once."""
    x, w = jnp.zeros((256, 128), jnp.bfloat16), jnp.zeros((2, 64, 128), jnp.bfloat16)
    f = lambda x, w: jgg.fp8_grouped_linear(x, w, jnp.array([100, 156]), key=KEY)

    def step(x, w):
        out, vjp = jax.vjp(f, x, w)
        return vjp(out)

    text = lowered(x, w, function=lambda x, group_sizes: step(x, group_sizes))
    assert text.count(f"@{TARGET}(") == 4  # dy twice, at random
    assert text.count(LINES_BOTH) == 1
    assert text.count(SQUARES_BOTH) == 1


def test_not_taken():
    """Elsewhere, of nothing, in a batch, of other blocks and shapes, and as one call where XLA cuts
    arrays."""
    x = jnp.zeros((48, 64))
    assert TARGET in lowered(x)
    assert TARGET in lowered(x[0])
    assert TARGET not in lowered(x, platform="cpu")
    assert TARGET not in lowered(x[:0])
    assert TARGET not in lowered(x, jnp.zeros((0,), jnp.int32))
    assert TARGET not in lowered(x, function=jax.vmap(functools.partial(jgg.fp8_quantize)))
    for block in (None, (1, 64), (64, 128)):
        assert TARGET not in lowered(x, block=block)
    assert TARGET not in lowered(x[:, :60])
    assert TARGET not in lowered(x[:40], axis=-2)
    assert TARGET in lowered(x[:40], jnp.array([40]), axis=-2)
    mesh = jax.make_mesh((2,), ("x",), devices=jax.local_devices()[:2])
    text = lowered(jax.device_put(x, NamedSharding(mesh, P("x"))))
    assert f"@{TARGET}(" not in text  # but each device's call
    assert "@jgg_product(" in text


# ---- on a GPU ----

OPTIONS = {
    "plain": {},
    "e8m0": {"scale_format": "e8m0"},
    "e5m2": {"format": "e5m2"},
    "stochastic": {"stochastic_rounding_key": KEY},
    "all": {"scale_format": "e8m0", "format": "e5m2", "stochastic_rounding_key": KEY},
}


def same_as_cpu(x, *, taken=True, **options):
    x = jnp.asarray(x)
    assert (TARGET in lowered(x, **options)) == taken
    f = functools.partial(jgg.fp8_quantize, **options)
    got = jax.device_get(jax.jit(f)(x))
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        want = jax.device_get(jax.jit(f)(jax.device_get(x)))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("block", [(1, 128), TILE])
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_bytes(rng, dtype, options, axis, block):
    for shape in ((272, 256), (3, 48, 72), (400, 200), (2, 2, 144, 392)):
        x = edges(rng, dtype, shape)
        same_as_cpu(x, axis=axis, block=block, **OPTIONS[options])


@pytest.mark.gpu
def test_bytes_of_columns(rng):
    """K = 1 to 400: those that are no multiple of 8 are composed."""
    for k in (*range(1, 20), *range(100, 160, 3), *range(240, 401, 8), 399):
        x = edges(rng, "bfloat16", (64, k))
        same_as_cpu(x, taken=k % 8 == 0)
        same_as_cpu(x, axis=-2, taken=k % 8 == 0)


SIZES = {
    "balanced": [128] * 6,
    "holes": [0, 300, 0, 0, 400, 68],
    "none": [0] * 6,
    "ones": [1] * 40,
    "one": [0, 0, 768],
    "odd": [1, 127, 128, 129, 255, 64],
    "tail": [100, 0, 3, 65],
    "over": [500, 100, 300, 5],
    "negative": [-5, 40, -1, 700],
}


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    ("columns", "dtype"), [(128, "bfloat16"), (200, "float32"), (8, "float16")]
)
def test_bytes_of_groups(rng, sizes, options, columns, dtype):
    x = edges(rng, dtype, (768, columns))
    x[np.maximum(SIZES[sizes], 0).sum() :] = np.nan  # takes no part
    groups = np.array(SIZES[sizes], np.int32)
    same_as_cpu(x, axis=0, group_sizes=groups, **OPTIONS[options])
    same_as_cpu(x, group_sizes=groups, **OPTIONS[options])
    same_as_cpu(x, group_sizes=groups, block=TILE, **OPTIONS[options])


@pytest.mark.gpu
def test_bytes_of_many_groups(rng):
    x = np.asarray(oracle.random(rng, (5000, 40)))
    same_as_cpu(x, axis=0, group_sizes=rng.integers(0, 9, 1000))
    same_as_cpu(x, axis=0, group_sizes=np.array([-5, 2**31 - 1, 7, 2**31 - 1]))
    same_as_cpu(x, group_sizes=rng.integers(0, 9, 1000))


@pytest.mark.gpu
@pytest.mark.parametrize("block", [(1, 128), TILE])
def test_bytes_of_many_matrices(rng, block):
    """More than a grid has along y, so that thread blocks take several."""
    x = np.asarray(oracle.random(rng, (70000, 16, 16)).astype(jnp.bfloat16))
    same_as_cpu(x, axis=-2, block=block)
    same_as_cpu(x, block=block)


@pytest.mark.gpu
def test_bytes_of_any_bits(rng):
    """Every pair of a bfloat16 and a scale is about as likely as any other."""
    bits = rng.integers(0, 2**16, (2048, 1024)).astype(np.uint16)
    exponents = rng.integers(0, 240, (2048, 8, 1)) + rng.integers(0, 15, (2048, 8, 128))
    bits = bits & 0x807F | (exponents.reshape(bits.shape) << 7).astype(np.uint16)
    x = bits.view(jnp.bfloat16)
    for options in OPTIONS.values():
        same_as_cpu(x, **options)
        same_as_cpu(x, axis=-2, **options)


@pytest.mark.gpu
def test_one_axis(rng):
    same_as_cpu(np.asarray(oracle.random(rng, (4096,))))
    same_as_cpu(np.asarray(oracle.random(rng, (200,))))
