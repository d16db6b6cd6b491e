"""The CPU kernel of quantize against its definition, bit for bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from test_quantize_host import around_thresholds, inputs
from test_quantized import AFFINE, DTYPES, FP, bits_of

import jax_groupgemm as jgg
from jax_groupgemm._kernels import extension
from jax_groupgemm._quantized import in_groups

pytestmark = [
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="a kernel of CPUs"),
    pytest.mark.skipif(extension.BUILD.problem is not None, reason="needs the extension module"),
]
F32 = np.float32
DEFINITION = jax.jit(in_groups.quantize, static_argnames=("mode", "bits", "group_size"))


def assert_same(w, mode="affine", bits=None, group=None, global_scale=None, contract=-1):
    """The call's bits are those of the XLA program that defines them."""
    w = jnp.asarray(w)
    run = functools.partial(jgg.quantize, mode=mode, bits=bits, group_size=group, contract=contract)
    call = jax.jit(lambda w, s: run(w, global_scale=s))
    text = call.lower(w, global_scale).as_text()
    assert "jgg_quantize" in text
    assert "transpose" not in text  # the kernel reads either axis
    q = call(w, global_scale)
    stored = w if contract == -1 else w.swapaxes(-1, -2)
    want = DEFINITION(stored, global_scale, mode=mode, bits=q.bits, group_size=q.group_size)
    got = [leaf for leaf in (q.weight, q.scales, q.biases) if leaf is not None]
    for name, g, e in zip(("weight", "scales", "biases"), got, want, strict=False):
        assert g.dtype == e.dtype
        np.testing.assert_array_equal(bits_of(g), bits_of(e), err_msg=name)


@pytest.mark.parametrize(("bits", "group", "dtype"), AFFINE)
@pytest.mark.one_in(5)
def test_affine(rng, bits, group, dtype):
    assert_same(inputs(rng, dtype), bits=bits, group=group)


@pytest.mark.parametrize("mode", FP)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.one_in(3)
def test_fp(rng, mode, dtype):
    assert_same(inputs(rng, dtype), mode)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nvfp4_global_scale(rng, dtype):
    w = inputs(rng, dtype)
    amax = abs(w.astype(F32)).max(axis=-1)
    rows = np.where(np.isfinite(amax), amax, 1).astype(F32) / F32(2688)
    rows[-12:] = -0.37, 3e-40, 0, np.inf, np.nan, -np.inf, 1e38, -3e38, 1, 0.5, 2**-9, F32(1e-30)
    assert_same(w, "nvfp4", global_scale=jnp.asarray(rows))
    for one in (rows[20], rows[-12], rows[-11]):
        assert_same(w, "nvfp4", global_scale=jnp.asarray(one))


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.one_in(3)
def test_ties(rng, bits, dtype):
    """Quotients that are whole numbers and a half, and float32 neighbours of those."""
    top, group = 2**bits - 1, 32
    low = -rng.random((64, 1)) - 0.5
    step = rng.random((64, 1)) / 8 + 1e-3
    w = (low + (rng.integers(0, top, (64, 1024)) + 0.5) * step).astype(F32)
    w[:, ::group], w[:, 1::group] = low.astype(F32), (low + top * step).astype(F32)
    w = (w.view(np.int32) + rng.integers(-2, 3, w.shape, np.int32)).view(F32)
    assert_same(jnp.asarray(w, dtype), bits=bits, group=group)
    halves = rng.integers(0, 2 * top + 1, (16, 256)) / 2 - top  # exact steps of 1
    halves[:, ::group], halves[:, 1::group] = -top, 0
    assert_same(jnp.asarray(halves, dtype), bits=bits, group=group)


@pytest.mark.parametrize("scale", [None, 1.0, 0.37, -1 / 2688])
def test_around_thresholds(rng, scale):
    w = around_thresholds(rng, 512, 1 if scale is None else abs(scale))
    assert_same(w, "nvfp4", global_scale=None if scale is None else jnp.float32(scale))
    assert_same(w, "mxfp4")
    assert_same(w, "mxfp8")


# One piece that the kernel puts in order at a time, less, and more along both axes.
@pytest.mark.parametrize("shape", [(2, 96, 20), (1, 512, 32), (3, 160, 1), (64, 33), (1056, 69)])
@pytest.mark.parametrize("mode", ["affine", *FP])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.one_in(4)
def test_contract(rng, shape, mode, dtype):
    """Stored with its last two axes exchanged."""
    group = 32 if mode == "affine" else None
    w = np.array(oracle.random(rng, shape, dtype))
    w[..., 17, -1] = np.nan
    w[..., 40, 0] *= 1e-30
    assert_same(w, mode, group=group, contract=-2)


@pytest.mark.parametrize("scales", [(), (2,), (2, 37)])
def test_contract_with_global_scales(rng, scales):
    w = oracle.random(rng, (2, 544, 37))
    factor = jnp.asarray(rng.random(scales) + 0.01, jnp.float32)
    assert_same(w, "nvfp4", global_scale=factor, contract=-2)


def test_contract_in_a_batch(rng):
    w = oracle.random(rng, (64, 3, 20))
    run = functools.partial(jgg.quantize, mode="mxfp4", contract=-2)
    got = jax.jit(jax.vmap(run, in_axes=1))(w)
    want = jax.vmap(functools.partial(jgg.quantize, mode="mxfp4"))(w.transpose(1, 2, 0))
    np.testing.assert_array_equal(got.weight, want.weight)
    np.testing.assert_array_equal(got.scales, want.scales)


@pytest.mark.parametrize("mode", ["affine", *FP])
@pytest.mark.parametrize("groups", [1, 3, 8, 15, 17, 129, 513, 2049])
@pytest.mark.one_in(4)
def test_any_number_of_groups(rng, mode, groups):
    """Tails of vectors and of tasks; global scales that tasks end at."""
    group = 32 if mode == "affine" else FP[mode][1]
    w = oracle.random(rng, (3, groups * group))
    assert_same(w, mode, group=group)
    if mode == "nvfp4":
        assert_same(w, mode, group=group, global_scale=jnp.array([0.01, 0.5, 3e-4], jnp.float32))


def test_not_finite(rng):
    """Its own group and no other: an odd group is encoded by itself."""
    w = rng.standard_normal((4, 640)).astype(F32)
    for at, bad in ((5, np.nan), (100, np.inf), (333, -np.inf), (334, np.inf), (600, 3e38)):
        w[at % 4, at] = bad
    w[0, 601] = -3e38
    for mode, group in (("affine", 64), ("mxfp4", 32), ("mxfp8", 32), ("nvfp4", 16)):
        for dtype in DTYPES:
            assert_same(jnp.asarray(w).astype(dtype), mode, group=group)
        values = np.asarray(jgg.dequantize(jgg.quantize(w, mode=mode, group_size=group)))
        bad = ~np.isfinite(w.reshape(4, -1, group)).all(-1)
        assert not np.isfinite(values.reshape(4, -1, group).astype(F32))[bad].any()


def test_subnormal_numbers(rng):
    """XLA's threads take them for zeros; small floats of theirs are not."""
    w = (rng.standard_normal((8, 256)) * 1e-39).astype(F32)
    for mode in FP:
        assert_same(w, mode)
    assert np.any(np.asarray(jgg.quantize(w, mode="mxfp8").weight) & 0x7F7F7F7F)
    assert_same(w, "nvfp4", global_scale=jnp.float32(1e-38))


def test_under_transformations(rng):
    """vmap, jit within a program, gradients of zero."""
    w = oracle.random(rng, (3, 4, 128))
    scale = jnp.array([0.5, 2, 0.1], jnp.float32)
    batched = jax.vmap(lambda w, s: jgg.quantize(w, mode="nvfp4", global_scale=s, contract=-1))
    for got, want in zip(
        jax.tree.leaves(batched(w, scale)),
        DEFINITION(w, scale, mode="nvfp4", bits=4, group_size=16), strict=False,
    ):  # fmt: skip
        np.testing.assert_array_equal(bits_of(got), bits_of(want))
    loss = lambda w: jgg.dequantize(jgg.quantize(w, contract=-1)).sum()
    np.testing.assert_array_equal(jax.grad(loss)(w), np.zeros(w.shape))


def test_errors_of_the_handler():
    static = {"mode": "affine", "bits": np.int32(4), "group_size": np.int32(64)}
    static |= {"layout": "linear", "biases": np.bool_(True), "global_scale": np.bool_(False)}
    words = lambda n: jax.ShapeDtypeStruct((4, n), jnp.uint32)
    scales = [jax.ShapeDtypeStruct((4, 1), jnp.float32)] * 2

    def message(results, static, dtype="float32"):
        call = jax.ffi.ffi_call("jgg_quantize", results)
        with pytest.raises((RuntimeError, ValueError)) as caught:
            jax.block_until_ready(
                jax.jit(lambda: call(jnp.ones((4, 64), dtype), quantized=static))()
            )
        return str(caught.value)

    want = "jgg.quantize: weight has shape (4, 9), expected (R, K*bits/32) = (4, 8)"
    assert want in message((words(9), *scales), static)
    assert "jgg.quantize: has 2 results, expected 3" in message((words(8), scales[0]), static)
    said = message((words(8), *scales), static, "bfloat16")
    assert "jgg.quantize: scales and w must have one dtype" in said
