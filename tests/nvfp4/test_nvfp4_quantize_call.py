"""The custom call of ``nvfp4_quantize``: where it is taken, what it is given, and on a GPU what it
makes, byte for byte."""

import functools

import jax
import jax.numpy as jnp
import lowered_calls
import numpy as np
import oracle
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from nvfp4_quantize_cases import KEY, SIZES, K, T, tensors

import jax_groupgemm as jgg
from jax_groupgemm._kernels import choose

TARGET = "jgg_nvfp4_quantize"


def lowered(x, *operands, function=jgg.nvfp4_quantize, **kwargs) -> str:
    return lowered_calls.lowered(function, x, *operands, **kwargs)


call = functools.partial(lowered_calls.call, TARGET)


def test_one_matrix():
    text = lowered(jnp.zeros((48, 64), jnp.bfloat16), hadamard=True)
    operands, results, attributes = call(text)
    assert operands == ["1x48x64xbf16", "0xi32", "0xui32"]
    assert results == ["1x48x8xui32", "1x48x4xui8", "1xf32", "3xui32"]
    assert attributes == "along_rows = false, hadamard = true, scale_2d = false"


def test_matrices_transposed():
    x = jnp.zeros((2, 3, 48, 40), jnp.float16)
    operands, results, attributes = call(lowered(x, None, KEY, axis=-2, scale_2d=True))
    assert operands == ["6x48x40xf16", "0xi32", "2xui32"]
    assert results == ["6x40x6xui32", "6x40x3xui8", "6xf32", "18xui32"]
    assert attributes == "along_rows = true, hadamard = false, scale_2d = true"


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint8])
def test_groups(dtype):
    x, sizes = jnp.zeros((100, 30)), jnp.zeros((4,), dtype)
    operands, results, _ = call(lowered(x, sizes, axis=0))
    padded = (100 + 63 * 4) // 64 * 64
    assert operands == ["1x100x30xf32", "4xi32", "0xui32"]
    assert results == [
        f"1x30x{padded // 8}xui32", f"1x30x{padded // 16}xui8", "1xf32", f"{3 + 2 * 5}xui32",
    ]  # fmt: skip
    assert TARGET in lowered(jnp.zeros((100, 32)), sizes, layout="swizzled")


def test_not_taken():
    """Elsewhere, of nothing, in a batch, and where XLA cuts arrays."""
    x = jnp.zeros((48, 64))
    assert TARGET not in lowered(x, platform="cpu")
    assert TARGET not in lowered(x[:0])
    assert TARGET not in lowered(x, jnp.zeros((0,), jnp.int32))
    assert TARGET not in lowered(x, function=jax.vmap(functools.partial(jgg.nvfp4_quantize)))
    mesh = jax.make_mesh((2,), ("x",), devices=jax.local_devices()[:2])
    sharded = jax.device_put(x, NamedSharding(mesh, P("x")))
    assert TARGET not in lowered(sharded)


@pytest.mark.weekly
def test_elsewhere_as_defined(rng, monkeypatch):
    """The primitive means its definition: on this platform, batched, and under grad."""
    x = oracle.random(rng, (3, 48, 64))
    whole = functools.partial(
        jgg.nvfp4_quantize, axis=-2, hadamard=True, stochastic_rounding_key=KEY
    )
    square = functools.partial(jgg.nvfp4_quantize, scale_2d=True)
    got, batched = jax.jit(lambda x: (whole(x), jax.vmap(square)(x)))(x)
    grad = jax.jit(jax.grad(lambda x: jgg.dequantize(jgg.nvfp4_quantize(x)).sum()))(x[0])
    np.testing.assert_array_equal(grad, np.zeros_like(x[0]))
    with monkeypatch.context() as patch:
        patch.setitem(choose.KERNELS, "nvfp4_quantize", ())
        jax.clear_caches()  # lowered with the call
        assert TARGET not in lowered(x, axis=-2)
        want, want_batched = jax.jit(lambda x: (whole(x), square(x)))(x)
    jax.clear_caches()
    assert TARGET in lowered(x, axis=-2)
    oracle.assert_leaves_equal(got, want)
    oracle.assert_leaves_equal(batched, want_batched)


# ---- on a GPU ----

OPTIONS = {
    "plain": {},
    "scale_2d": {"scale_2d": True},
    "hadamard": {"hadamard": True},
    "stochastic": {"stochastic_rounding_key": KEY},
    "stochastic_2d": {"scale_2d": True, "stochastic_rounding_key": KEY},
    "both": {"hadamard": True, "stochastic_rounding_key": KEY},
    "swizzled": {"layout": "swizzled"},
}


def same_as_cpu(x, **options):
    assert TARGET in lowered(jnp.asarray(x), **options)
    got = jax.device_get(jgg.nvfp4_quantize(x, **options))
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        want = jgg.nvfp4_quantize(x, **options)
    oracle.assert_leaves_equal(got, jax.device_get(want))


@pytest.mark.gpu
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_bytes(rng, dtype, options, axis):
    for x in tensors(rng, dtype):
        same_as_cpu(x, axis=axis, **OPTIONS[options])


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    "shape", [(16, 16), (208, 1), (32, 81), (3, 2, 560, 95), (1024, 1030), (320, 264)]
)
def test_bytes_of_shapes(rng, shape, options):
    """Odd columns, tails of tiles, many matrices; along the last axis those exchanged."""
    x = oracle.random(rng, shape).astype(jnp.bfloat16)
    same_as_cpu(x, axis=-2, **OPTIONS[options])
    same_as_cpu(x.swapaxes(-1, -2), axis=-1, **OPTIONS[options])


@pytest.mark.gpu
@pytest.mark.parametrize("options", ["plain", "hadamard"])
def test_bytes_of_many_matrices(rng, options):
    """More than a grid has along y, so that thread blocks take several."""
    x = oracle.random(rng, (70000, 16, 16)).astype(jnp.bfloat16)
    same_as_cpu(x, axis=-2, **OPTIONS[options])


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("options", ["plain", "hadamard", "stochastic", "both"])
@pytest.mark.parametrize(("columns", "dtype"), [(K, "bfloat16"), (96, "float32"), (33, "float16")])
def test_bytes_of_groups(rng, sizes, options, columns, dtype):
    x = np.array(oracle.random(rng, (T, columns)))
    x[sum(SIZES[sizes]) :] *= 1e3  # takes no part
    x = jnp.asarray(x, dtype)
    groups = np.array(SIZES[sizes], np.int32)
    same_as_cpu(x, axis=0, group_sizes=groups, **OPTIONS[options])
    if columns % 16 == 0:
        same_as_cpu(x, group_sizes=groups, **OPTIONS[options])
        same_as_cpu(x, group_sizes=groups, layout="swizzled", **OPTIONS[options])


@pytest.mark.gpu
def test_bytes_of_many_groups(rng):
    x = oracle.random(rng, (5000, 40))
    same_as_cpu(x, axis=0, group_sizes=rng.integers(0, 9, 1000))
    same_as_cpu(x, axis=0, group_sizes=np.array([-5, 2**31 - 1, 7, 2**31 - 1]))


@pytest.mark.gpu
def test_one_axis(rng):
    same_as_cpu(oracle.random(rng, (4096,)))
