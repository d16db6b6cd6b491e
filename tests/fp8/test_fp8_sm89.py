"""FP8's products by mma.sync ("sm89"): which calls take it, what these give it, and on a GPU its
values. On a Hopper GPU it runs where it is named."""

import dataclasses
import functools
import re

import fp8_oracle
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from fp8_calls import SIZES, G, K, N, T, calls, mm, signature, wgrad, x_and_dy, x_and_w
from lowered_calls import pretend_gpus
from lowered_calls import text_of as lowered

import jax_groupgemm as jgg
from jax_groupgemm._kernels import choose, extension, proven

KEYS = ("jgg_fp8_grouped_mm_sm89 sm89", "jgg_fp8_grouped_wgrad_sm89 sm89")
ADA = ("80", "86", "89", "90a", "100a", "120", "80-virtual")


def as_e5m2(q):
    """The same numbers, rounded to codes of e5m2."""
    return dataclasses.replace(q, weight=q.weight.astype(jnp.float8_e5m2))


def live(monkeypatch, *capabilities, proved=KEYS, architectures=ADA):
    pretend_gpus(monkeypatch, capabilities, architectures, proved)
    monkeypatch.setattr(choose, "_warn_once", lambda message: None)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_mm_is_one_call(rng, dtype):
    """Lines are padded to whole 16 bytes."""
    x, w = x_and_w(rng)
    for codes, code in ((x, "f8E4M3FN"), (as_e5m2(x), "f8E5M2")):
        text = lowered(mm, codes, w, implementation="sm89", preferred_element_type=dtype)
        target, operands, results = signature(text)
        assert target == "jgg_fp8_grouped_mm_sm89"
        assert operands == [
            f"{T}x208x{code}", f"{T}x2xf32", f"{G}x144x208xf8E4M3FN", f"{G}x2x2xf32", f"{G}xi32"
        ]  # fmt: skip
        short = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}[dtype]
        assert results == [f"{T}x144x{short}"]


@pytest.mark.parametrize("existing", [False, True])
def test_wgrad_is_one_call(rng, existing):
    """Scales come as they are stored."""
    x, dy = x_and_dy(rng)
    old = [oracle.random(rng, (G, N, K))] if existing else []
    text = lowered(wgrad, x, dy, *old, implementation="sm89")
    target, operands, results = signature(text)
    assert target == "jgg_fp8_grouped_wgrad_sm89"
    padded = x.weight.shape[1]
    blocks = padded // 128
    assert operands == [
        f"{N}x{padded}xf8E4M3FN", f"{N}x{blocks}xf32", f"{K}x{padded}xf8E4M3FN",
        f"{K}x{blocks}xf32", f"{G}xi32", *[f"{G}x{N}x{K}xf32"] * existing,
    ]  # fmt: skip
    assert results == [f"{G}x{N}x{K}xf32"]
    assert ("operand_index = 5" in text) == existing


@pytest.mark.parametrize("capability", [89, 120, 121])
def test_a_gpu_takes_it_where_it_is_proven(rng, monkeypatch, capability):
    cases = (mm, x_and_w(rng)), (wgrad, x_and_dy(rng))
    for proved in (KEYS, KEYS[:1], ()):
        live(monkeypatch, capability, proved=proved)
        for (function, operands), key in zip(cases, KEYS, strict=True):
            found = calls(lowered(function, *operands))
            assert found == ([key.split()[0]] if key in proved else [])
            if key not in proved:
                with pytest.raises(ValueError, match="'sm89' cannot run: it is not yet proven"):
                    lowered(function, *operands, implementation="sm89")


def test_hopper_takes_it_where_it_is_named(rng, monkeypatch):
    """And needs no proof; unnamed, its own kernels run, or none."""
    live(monkeypatch, 90, proved=())
    x, w = x_and_w(rng)
    assert calls(lowered(mm, x, w)) == ["jgg_fp8_grouped_mm"]
    assert calls(lowered(mm, as_e5m2(x), w)) == []
    for codes in (x, as_e5m2(x)):
        assert calls(lowered(mm, codes, w, implementation="sm89")) == ["jgg_fp8_grouped_mm_sm89"]
    x, dy = x_and_dy(rng)
    assert calls(lowered(wgrad, x, dy)) == ["jgg_fp8_grouped_wgrad"]
    assert calls(lowered(wgrad, x, dy, implementation="sm89")) == ["jgg_fp8_grouped_wgrad_sm89"]


@pytest.mark.parametrize("capability", [80, 86, 100, 103])
def test_no_other_gpu_takes_it(rng, monkeypatch, capability):
    live(monkeypatch, capability)
    x, w = x_and_w(rng)
    assert "jgg_fp8_grouped_mm_sm89" not in calls(lowered(mm, x, w))
    words = (
        "it needs compute capability 8.9, 9.0, 12.0 or 12.1, "
        f"this GPU has {capability / 10:.1f}"
    )  # fmt: skip
    with pytest.raises(ValueError, match=re.escape(words)):
        lowered(mm, x, w, implementation="sm89")


@pytest.mark.parametrize(("capability", "code"), [(89, "89"), (90, "90a"), (121, "120")])
def test_a_build_needs_code_for_it(rng, monkeypatch, capability, code):
    """That of 8.0, or of 8.6, is not enough."""
    for architectures in (("80", "86", "80-virtual"), ("80", "86", code, "80-virtual")):
        live(monkeypatch, capability, architectures=architectures)
        why = extension.unavailable("sm89", (capability,))
        assert (why is None) == (code in architectures)
        if why:
            assert why == f"this build has code for 80, 86, 80-virtual, not for {code}"


def test_training_takes_it(monkeypatch):
    """Gradients of e5m2, too."""
    live(monkeypatch, 89)
    half = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    for gradient in ("e4m3", "e5m2"):
        recipe = jgg.FP8Recipe(gradient_format=gradient)

        def training(x, w, ct, recipe=recipe):
            linear = lambda x, w: jgg.fp8_grouped_linear(x, w, SIZES, recipe=recipe)
            out, back = jax.vjp(linear, x, w)
            return out, *back(ct)

        text = lowered(training, half(T, 256), half(G, 128, 256), half(T, 128))
        assert sorted(calls(text)) == [
            "jgg_fp8_grouped_mm_sm89", "jgg_fp8_grouped_mm_sm89", "jgg_fp8_grouped_wgrad_sm89"
        ]  # fmt: skip


# ---- on a GPU ------------------------------------------------------------------------------------


def needs_a_gpu_for_it():
    if why := extension.unavailable("sm89", extension.live_capabilities()):
        pytest.skip(why)


CASES = {
    "around tiles": [128, 129, 127, 0, 255, 256, 257, 384, 1],
    "few of some": [0, 1, 7, 8, 9, 0, 64, 65, 1500],
    "many": [i * 37 % 23 for i in range(300)],
}
# Of normal numbers: half of what is promised, because sums are of 64 codes.
MOST = 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", CASES.values(), ids=CASES)
@pytest.mark.parametrize(("n", "k"), [(577, 1040), (8, 17), (256, 128)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("e5m2", [False, True])
def test_mm_on_a_gpu(rng, sizes, n, k, dtype, e5m2):
    needs_a_gpu_for_it()
    rows = sum(sizes) + 33
    x = jgg.fp8_quantize(oracle.random(rng, (rows, k)))
    x = as_e5m2(x) if e5m2 else x
    w = jgg.fp8_quantize(oracle.random(rng, (len(sizes), n, k)), block=(128, 128))
    f = jax.jit(functools.partial(mm, implementation="sm89", preferred_element_type=dtype))
    with proven.trusted():
        got = np.asarray(f(x, w, jnp.asarray(sizes)))
    values = fp8_oracle.values(x), fp8_oracle.values(w)
    want = oracle.grouped_mm(*values, sizes, transpose_w=True)
    rounding = {"float32": 0, "bfloat16": 2**-9, "float16": 2**-12}[dtype]
    error = np.linalg.norm(got.astype(np.float64) - want) / np.linalg.norm(want)
    assert error <= MOST + rounding
    assert not got[sum(sizes) :].any()
    for _ in range(3):
        assert np.asarray(f(x, w, jnp.asarray(sizes))).tobytes() == got.tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", CASES.values(), ids=CASES)
@pytest.mark.parametrize(("n", "k"), [(136, 265), (8, 17)])
@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("e5m2", [False, True])
def test_wgrad_on_a_gpu(rng, sizes, n, k, existing, e5m2):
    needs_a_gpu_for_it()
    rows, sizes = sum(sizes), np.asarray(sizes, np.int32)
    along_t = functools.partial(jgg.fp8_quantize, axis=0, group_sizes=sizes)
    x, dy = along_t(oracle.random(rng, (rows, k))), along_t(oracle.random(rng, (rows, n)))
    dy = as_e5m2(dy) if e5m2 else dy
    old = oracle.random(rng, (len(sizes), n, k)) if existing else None
    run = lambda name: jgg.fp8_grouped_wgrad(x, dy, sizes, existing_out=old, implementation=name)
    with proven.trusted():
        got = np.asarray(run("sm89"))
    want = oracle.f64(run("reference"))
    assert np.linalg.norm(got - want) <= MOST * np.linalg.norm(want)
    np.testing.assert_array_equal(got[sizes == 0], want[sizes == 0].astype(np.float32))
