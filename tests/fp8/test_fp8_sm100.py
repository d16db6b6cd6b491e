"""Where FP8's products take Blackwell's kernels, and what their custom calls are given. Nothing
here runs them: a program in their place multiplies what they are given."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from fp8_calls import CALL, SIZES, G, K, N, T, mm, signature, wgrad, x_and_dy, x_and_w
from lowered_calls import pretend_gpus
from lowered_calls import text_of as lowered

import jax_groupgemm as jgg
from jax_groupgemm._fp8 import call
from jax_groupgemm._fp8 import grouped_mm as of_mm
from jax_groupgemm._fp8 import grouped_wgrad as of_wgrad
from jax_groupgemm._kernels import choose, extension

KEYS = ("jgg_fp8_grouped_mm_sm100 sm100", "jgg_fp8_grouped_wgrad_sm100 sm100")


def live(monkeypatch, *capabilities, proved=KEYS):
    pretend_gpus(monkeypatch, capabilities, ("80", "90a", "100a", "80-virtual"), proved)


def workspace() -> str:
    return f"{extension.rules().sm100_workspace(weights=G, count=G, scaled=True)}xui8"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_mm_is_one_call(rng, dtype):
    """Lines are padded to whole 16 bytes; float16 is rounded from float32."""
    text = lowered(mm, *x_and_w(rng), implementation="sm100", preferred_element_type=dtype)
    target, operands, (out, bytes_) = signature(text)
    assert target == "jgg_fp8_grouped_mm_sm100"
    assert operands == [
        f"{T}x208xf8E4M3FN", f"{T}x2xf32", f"{G}x144x208xf8E4M3FN", f"{G}x2x2xf32", f"{G}xi32"
    ]  # fmt: skip
    assert out == f"{T}x144x{'bf16' if dtype == 'bfloat16' else 'f32'}"
    assert bytes_ == workspace()


@pytest.mark.parametrize("existing", [False, True])
def test_wgrad_is_one_call(rng, existing):
    x, dy = x_and_dy(rng)
    old = [oracle.random(rng, (G, N, K))] if existing else []
    text = lowered(wgrad, x, dy, *old, implementation="sm100")
    target, operands, (out, bytes_) = signature(text)
    assert target == "jgg_fp8_grouped_wgrad_sm100"
    padded = x.weight.shape[1]
    assert padded % 128 == 0
    blocks = padded // 128
    assert operands == [
        f"{N}x{padded}xf8E4M3FN", f"{N}x{blocks}xf32", f"{K}x{padded}xf8E4M3FN",
        f"{K}x{blocks}xf32", f"{G}xi32", *[f"{G}x{N}x{K}xf32"] * existing,
    ]  # fmt: skip
    assert (out, bytes_) == (f"{G}x{N}x{K}xf32", workspace())
    assert ("operand_index = 5" in text) == existing


# ---- what the calls mean -----------------------------------------------------------------------


def decoded(codes, scales, block):
    values = np.asarray(codes).astype(np.float64)
    for axis, size in zip((-2, -1), block, strict=True):
        scales = np.repeat(scales, size, axis=axis)
    return values * np.asarray(scales)[..., : values.shape[-2], : values.shape[-1]]


def product(target, results, existing_out, *operands):
    """What a kernel makes of a call's operands, by ffi/fp8/gemm_sm100.h."""
    a, a_scales, b, b_scales, sizes, *rest = (np.asarray(value) for value in operands)
    bounds = oracle.bounds(sizes, a.shape[0 if "mm" in target else 1])
    out = np.zeros(results[0].shape)
    if "mm" in target:
        x, w = decoded(a, a_scales, (1, 128)), decoded(b, b_scales, (128, 128))
        for g, (start, end) in enumerate(bounds):
            out[start:end] = x[start:end] @ w[g].T
        return out.astype(results[0].dtype)
    dy, x = decoded(a, a_scales, (1, 128)), decoded(b, b_scales, (1, 128))
    if existing_out:
        out += rest[0]
    for g, (start, end) in enumerate(bounds):
        assert start % 128 == 0
        assert end % 128 == 0
        out[g] += dy[:, start:end] @ x[:, start:end].T
    return out.astype(results[0].dtype)


def pretend(monkeypatch):
    """A GPU that this machine does not have, with a program in the kernels' place."""

    def ffi_call(target, results, input_output_aliases=None):
        def call(*operands, existing_out=False, **_):
            run = functools.partial(product, target, results, bool(existing_out))
            return jax.pure_callback(run, results[0], *operands), None

        return call

    monkeypatch.setattr(call.jax.ffi, "ffi_call", ffi_call)
    first = lambda problem: choose.configured(choose.KERNELS[problem.op][0], problem)
    for module in (of_mm, of_wgrad):
        monkeypatch.setattr(module.choose, "fused", first)


@pytest.mark.parametrize(("k", "n"), [(K, N), (256, 128), (130, 8)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_mm_of_what_it_is_given(rng, monkeypatch, k, n, dtype):
    x, w = x_and_w(rng, k, n)
    want = mm(x, w, preferred_element_type="float32", implementation="reference")
    pretend(monkeypatch)
    got = jax.jit(functools.partial(mm, preferred_element_type=dtype))(x, w)
    assert got.shape == (T, n)
    oracle.assert_close(got, oracle.f64(want), k=k)


@pytest.mark.parametrize(("k", "n"), [(K, N), (256, 128), (130, 7)])
@pytest.mark.parametrize("existing", [False, True])
def test_wgrad_of_what_it_is_given(rng, monkeypatch, k, n, existing):
    x, dy = x_and_dy(rng, k, n)
    old = [oracle.random(rng, (G, n, k))] if existing else []
    want = wgrad(x, dy, *old, implementation="reference")
    pretend(monkeypatch)
    got = jax.jit(wgrad)(x, dy, *old)
    oracle.assert_close(got, oracle.f64(want), k=T, tolerance=1e-5)
    if existing:
        np.testing.assert_array_equal(got[1], old[0][1])


# ---- which calls ---------------------------------------------------------------------------------


def test_a_proven_blackwell_gpu_takes_it(rng, monkeypatch):
    cases = (mm, x_and_w(rng)), (wgrad, x_and_dy(rng))
    for proved in (KEYS, KEYS[:1], KEYS[1:], ()):
        live(monkeypatch, 100, proved=proved)
        for (function, operands), key in zip(cases, KEYS, strict=True):
            found = re.findall(CALL, lowered(function, *operands))
            assert found == ([key.split()[0]] if key in proved else [])
            if key not in proved:
                with pytest.raises(ValueError, match="'sm100' cannot run: it is not yet proven"):
                    lowered(function, *operands, implementation="sm100")


def test_training_takes_it(monkeypatch):
    live(monkeypatch, 100)
    half = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    def training(x, w, ct):
        out, back = jax.vjp(lambda x, w: jgg.fp8_grouped_linear(x, w, SIZES), x, w)
        return out, *back(ct)

    text = lowered(training, half(T, 256), half(G, 128, 256), half(T, 128))
    assert sorted(re.findall(CALL, text)) == [
        "jgg_fp8_grouped_mm_sm100", "jgg_fp8_grouped_mm_sm100", "jgg_fp8_grouped_wgrad_sm100"
    ]  # fmt: skip


@pytest.mark.parametrize("capabilities", [(), (90,), (90, 100), (103,), (120,)])
def test_no_other_gpu_takes_it(rng, monkeypatch, capabilities):
    x_w, x_dy = x_and_w(rng), x_and_dy(rng)
    live(monkeypatch, *capabilities)
    monkeypatch.setattr(choose, "_warn_once", lambda message: None)
    for function, args in ((mm, x_w), (wgrad, x_dy)):
        assert "sm100" not in " ".join(re.findall(CALL, lowered(function, *args)))
        if capabilities:
            with pytest.raises(
                ValueError, match=r"'sm100' cannot run: it needs compute capability"
            ):
                lowered(function, *args, implementation="sm100")


def test_options_are_of_float32_sums(rng):
    """A bias is a grouped product of its own, of another kernel."""
    bias = oracle.random(rng, (G, N))
    text = lowered(mm, *x_and_w(rng), bias=bias, activation="silu", implementation="sm100")
    assert signature(text)[2][0] == f"{T}x144xf32"
    assert re.findall(r"custom_call @jgg_(\w+)", text).count("mm") == 1


def test_batches_and_scales_are_composed(rng):
    """In terms of products that are not named."""
    x, w = x_and_w(rng)
    scaled = lambda scale: dataclasses.replace(x, scales=x.scales * scale)
    f = lambda scale, name: mm(
        scaled(scale), w, preferred_element_type="float32", implementation=name
    ).sum()
    scales = jnp.asarray([1.0, 2.0])
    for name in ("sm100", "reference"):
        text = lowered(lambda s, name=name: jax.vmap(lambda s: f(s, name))(s), scales)
        assert "fp8_grouped_mm_sm100" not in text
    grad = jax.grad(lambda s: f(s, "sm100"))
    assert re.findall(CALL, lowered(jax.value_and_grad(lambda s: f(s, "sm100")), scales[0])) == [
        "jgg_fp8_grouped_mm_sm100"
    ]
    assert lowered(grad, scales[0])


@pytest.mark.gpu
def test_the_handlers_refuse_another_gpu(rng, monkeypatch):
    if 100 in extension.live_capabilities():
        pytest.skip("needs a GPU that is not Blackwell")
    x, dy = x_and_dy(rng)
    old = oracle.random(rng, (G, N, K))
    cases = (mm, x_and_w(rng)), (wgrad, (x, dy)), (wgrad, (x, dy, old))
    first = lambda problem: choose.configured(choose.KERNELS[problem.op][0], problem)
    for module in (of_mm, of_wgrad):
        monkeypatch.setattr(module.choose, "fused", first)
    for function, args in cases:
        with pytest.raises(
            jax.errors.JaxRuntimeError, match=r"needs compute capability 10\.0, got"
        ):
            jax.jit(function)(*args).block_until_ready()
