"""float16 and float32 x on Hopper's kernels of bfloat16: a row becomes rows that sum to it."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jax_groupgemm as jgg
from jax_groupgemm._core import segments
from jax_groupgemm._core.products import Mm
from jax_groupgemm._kernels import choose, dense, samples
from jax_groupgemm._quantized import call, reference

EXACT = [("nvfp4", 4, {}), ("mxfp4", 4, {}), ("mxfp8", 8, {})]
SIZES = np.array([5, 0, 9, 2])


def array(*shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype)


def quantized(mode, block=None, n=128, k=256):
    w = array(4, n, k, dtype="float32")
    return jax.eval_shape(lambda w: jgg.quantize(w, mode=mode, block=block), w)


def calls(f, *args) -> list[tuple[str, str, str]]:
    """Target, type of x and rows of x of each product that is lowered for CUDA."""
    fresh = lambda *args: f(*args)
    text = jax.jit(fresh).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    return re.findall(r"@(jgg_qmm\w*)\(.*?: \(tensor<(\d+)x\d+x(\w+)>", text)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("dtype", "planes"), [("bfloat16", 1), ("float16", 1), ("float32", 3)])
@pytest.mark.parametrize(("mode", "bits", "more"), EXACT)
@pytest.mark.parametrize("packed", [False, True])
def test_exact_modes_run_on_hopper(mode, bits, more, dtype, planes, packed):
    w = quantized(mode, **more)
    if packed:
        w = jax.eval_shape(jgg.prepack, w)
    x = array(20, 256, dtype=dtype)
    found = calls(lambda x, w: jgg.grouped_qmm(x, w, jnp.asarray(SIZES)), x, w)
    target = "jgg_qmm_packed" if packed else "jgg_qmm"
    assert found == [(target, str(20 * planes), "f16" if dtype == "float16" else "bf16")]


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_many_rows_beside_stored_weights(dtype):
    found = calls(lambda x, w: jgg.grouped_qmm(x, w, jnp.asarray(SIZES)),
                  array(2048, 256, dtype=dtype), quantized("nvfp4"))  # fmt: skip
    of = {"float16": ("2048", "f16"), "float32": ("6144", "bf16")}[dtype]
    assert found == [("jgg_qmm", *of)]


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("x", "scales", "rows", "more", "in_call"),
    [
        ("float32", "float32", 16, {}, "f32"),
        ("float32", "bfloat16", 16, {"group_size": 128}, "f32"),
        ("float32", "float32", 32, {}, "f32"),
        ("float32", "float32", 36, {}, None),  # it is packed
        ("float32", "float32", 16, {"group_size": 16}, None),
        ("float16", "float32", 32, {}, "f32"),
        ("float16", "float32", 36, {}, None),
        ("bfloat16", "float32", 32, {}, "bf16"),
        ("bfloat16", "bfloat16", 32, {}, "bf16"),
    ],
)
def test_stored_scales_multiply_sums_of_few_rows(x, scales, rows, more, in_call):
    """The kernel splits float32 rows, and sums them; sums of bfloat16 rows are an operand."""
    w = array(4, 128, 256, dtype=scales)
    q = jax.eval_shape(lambda w: jgg.quantize(w, contract=-1, **more), w)
    f = lambda x, q: jgg.grouped_qmm(x, q, jnp.asarray(SIZES))
    text = jax.jit(f).trace(array(rows, 256, dtype=x), q).lower(lowering_platforms=("cuda",))
    ((target, found, type_in_call),) = calls(f, array(rows, 256, dtype=x), q)
    if in_call is None:
        assert target == "jgg_qmm_packed"
        return
    assert (target, found, type_in_call) == ("jgg_qmm", str(rows), in_call)
    text, rounded = text.as_text(), (x, scales) == ("bfloat16", "bfloat16")
    assert ('way = "scaled"' in text) == (not rounded)
    assert (f"tensor<2x{rows}x4xf32>" in text) == (in_call == "bf16" and not rounded)


@pytest.mark.usefixtures("hopper")
def test_scales_that_multiply_sums_have_no_options():
    w = array(4, 128, 256, dtype="float32")
    q = jax.eval_shape(lambda w: jgg.quantize(w, contract=-1), w)
    f = lambda x, q: jgg.grouped_qmm(x, q, jnp.asarray(SIZES), activation="silu")
    text = (
        jax.jit(f)
        .trace(array(20, 256, dtype="bfloat16"), q)
        .lower(lowering_platforms=("cuda",))
        .as_text()
    )
    (call,) = re.findall(r"custom_call @jgg_qmm\(.*", text)
    assert 'way = "scaled"' in call
    assert "silu" not in call


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("scales", "group", "k", "rows", "transpose_w", "target"),
    [
        ("float16", 64, 256, 20, True, "jgg_qmm"),
        ("float16", 32, 256, 4 * 1023, True, "jgg_qmm"),
        ("float16", 64, 256, 4 * 1024, True, "jgg_qmm_packed"),
        ("float16", 16, 256, 20, True, "jgg_qmm"),  # by the generic kernel
        ("bfloat16", 64, 256, 200, True, "jgg_qmm_packed"),
        ("float16", 64, 128, 20, False, "jgg_qmm"),
    ],
)
def test_float16_rows_beside_stored_affine_weights(scales, group, k, rows, transpose_w, target):
    w = array(4, 128, 256, dtype=scales)
    q = jax.eval_shape(lambda w: jgg.quantize(w, group_size=group, contract=-1), w)
    f = lambda x, q: jgg.grouped_qmm(x, q, jnp.asarray(SIZES), transpose_w=transpose_w)
    x = array(rows, k, dtype="float16")
    ((found, _, x_type),) = calls(f, x, q)
    assert (found, x_type) == (target, "f16" if scales == "float16" else "bf16")
    text = jax.jit(f).trace(x, q).lower(lowering_platforms=("cuda",)).as_text()
    planned = target == "jgg_qmm" and group > 16
    assert ("planned = true" in text) == planned


@pytest.mark.usefixtures("hopper")
def test_options_are_done_to_the_sums():
    x, w = array(20, 256, dtype="float32"), quantized("nvfp4")
    f = functools.partial(jgg.grouped_qmm, activation="swiglu")
    found = calls(lambda x, w: f(x, w, jnp.asarray(SIZES)), x, w)
    assert found == [("jgg_qmm", "60", "bf16")]


def by_reference(plan, x, q, metadata, product, epilogue=None, **_):
    """The reference takes the place of the custom call of a bfloat16 product."""
    assert x.dtype == jnp.bfloat16
    return reference.qmm(x, q, metadata, product)


FORMS = {
    "sizes": lambda: segments.sizes(jnp.asarray(SIZES)),
    "too large": lambda: segments.sizes(jnp.asarray([5, 0, 2**31 - 1, 3])),
    "bytes": lambda: segments.sizes(jnp.asarray([5, 0, 100, 2], "int8")),
    "offset": lambda: segments.sizes(jnp.asarray([3, 5, 0, 9, 2, 1]), jnp.int32(1)),
    "segments": lambda: segments.Metadata(
        segments.Form("segments", ordered_x=True, ordered_y=True),
        segments.sizes(jnp.asarray(SIZES)).decode(20, 20, 4),
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("dtype", "planes"), [("float16", 2), ("float32", 3)])
@pytest.mark.parametrize(("mode", "bits", "more"), EXACT)
def test_values(monkeypatch, rng, mode, bits, more, dtype, planes, form):
    """Sums of the parts' products are those of x; rows of no group are zeros."""
    q = jgg.quantize(jnp.asarray(rng.normal(size=(4, 128, 256)), "float32"), mode=mode, **more)
    x = jnp.asarray(rng.normal(size=(20, 256)) * 10.0 ** rng.integers(-3, 3, (20, 1)), dtype)
    metadata = FORMS[form]()
    product = Mm(rows=20, out_dtype=jnp.dtype("float32"), transpose_w=True)
    want = reference.qmm(x.astype("float32"), q, metadata, product)
    split = call._in_planes
    monkeypatch.setattr(call, "qmm", by_reference)
    plan = choose.Plan(choose.KERNELS["qmm"][1], None, {"planes": planes})
    got = split(planes, plan, x, q, metadata, product)
    oracle.assert_close(got, want, tolerance=2e-6)


@pytest.mark.parametrize(
    ("dtype", "tf32", "planes"),
    [("bfloat16", False, 1), ("float16", False, 2), ("float32", False, 3), ("float32", True, 2)],
)
def test_how_many_parts(dtype, tf32, planes):
    problem = samples.SAMPLES["grouped_qmm"].make("cuda", dtype)
    # float16 beside float16 scales is multiplied as it is, as is that beside bytes.
    assert dense.qmm_planes(problem) == (3 if dtype == "float32" else 1)
    other = dataclasses.replace(problem, float16_scales=False, tf32=tf32)
    assert dense.qmm_planes(other) == planes
    assert dense.qmm_planes(dataclasses.replace(other, transpose_w=False)) == planes
    exact = dataclasses.replace(other, scalable=False, exact_in_bfloat16=True)
    assert dense.qmm_planes(exact) == planes
    assert dense.qmm_planes(dataclasses.replace(exact, rows=2**30)) == (planes == 1)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("mode", "scales"), [("affine", "bfloat16"), ("fp8", "float32")])
def test_scales_multiply_sums(mode, scales):
    """bfloat16 does not hold the weight's values. A stored affine weight takes few rows as they
    are. Planes of few rows are rows of a prepacked one; those of more rows lie beside each other,
    and the call packs. Blocks as they are stored always multiply sums."""
    w = array(4, 128, 256, dtype=scales if mode == "affine" else "float32")
    stored = jax.eval_shape(lambda w: jgg.quantize(w, mode=mode), w)
    f = lambda x, q: jgg.grouped_qmm(x, q, jnp.asarray(SIZES))
    if mode == "fp8":
        assert calls(f, array(200, 256, dtype="float32"), stored) == [
            ("jgg_qmm_fp8", "600", "bf16")
        ]
    packed = jax.eval_shape(jgg.prepack, stored)
    for q in (stored, packed) if mode == "affine" else (packed,):
        target = "jgg_qmm" if q is stored else "jgg_qmm_packed"
        few = ("20", "f32") if q is stored else ("60", "bf16")
        assert calls(f, array(20, 256, dtype="float32"), q) == [(target, *few)]
        many = array(200, 256, dtype="float32"), q
        assert calls(f, *many) == [("jgg_qmm_packed", "200", "bf16")]
        text = jax.jit(f).trace(*many).lower(lowering_platforms=("cuda",)).as_text()
        assert 'way = "scaled"' in text
        assert "planes = 3 : i32" in text
        assert ("tensor<2x200x4xf32>" in text) == (mode == "affine")


@pytest.mark.parametrize("k", [256, 320])
def test_planes_beside_each_other(rng, k):
    q = jgg.quantize(jnp.asarray(rng.normal(size=(4, 128, k)), "bfloat16"), mode="affine")
    x = jnp.asarray(rng.normal(size=(5, k)), "float32")
    along_n, none = call._planes_beside(3, x, q, transpose_w=False)
    assert none is None
    whole, none = call._planes_beside(1, x.astype("bfloat16"), q, transpose_w=False)
    assert none is None
    assert whole.dtype == jnp.float32
    parts, sums = call._planes_beside(3, x, q, transpose_w=True)
    assert (parts == along_n).all()
    assert parts.dtype == jnp.bfloat16
    assert (parts.astype("float32").reshape(5, 3, k).sum(1) == x).all()
    assert sums.shape == (-(-k // 128), 5, 4)
    want = np.zeros((5, sums.shape[0] * 4))
    want[:, : k // 32] = oracle.f64(x).reshape(5, -1, 32).sum(-1)
    oracle.assert_close(sums.transpose(1, 0, 2).reshape(5, -1), want, tolerance=2e-6)
