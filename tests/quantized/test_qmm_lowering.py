"""What products with quantized weights become: custom calls, exports, memory, cost."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from lowered_calls import text_of as cuda_text
from qmm_problems import SIZES, problem

import jax_groupgemm as jgg
from jax_groupgemm._kernels import choose
from jax_groupgemm._quantized import ordered


def test_lowering_without_a_kernel(monkeypatch):
    x, _, _, q = problem("nvfp4")
    with monkeypatch.context() as patch:
        patch.setitem(choose.KERNELS, "qmm", ())
        assert "custom_call @jgg" not in cuda_text(lambda x, q: jgg.grouped_qmm(x, q, SIZES), x, q)
        reason = "'sm80' cannot run: there is no kernel jgg_qmm for cuda"
        with pytest.raises(ValueError, match=reason):
            cuda_text(lambda x: jgg.grouped_qmm(x, q, SIZES, implementation="sm80"), x)
        cpu = jax.jit(lambda x: jgg.grouped_qmm(x, q, SIZES, implementation="cpu")).trace(x)
        reason = "'cpu' cannot run: there is no kernel jgg_qmm for cpu"
        with pytest.raises(ValueError, match=reason):
            cpu.lower(lowering_platforms=("cpu",))


@pytest.mark.parametrize("shape", [(3, 5, 128), (3, 128, 256)])
@pytest.mark.parametrize("mode", ["affine", "mxfp4", "nvfp4"])
def test_the_reference_has_no_custom_call(mode, shape):
    """Forward and for every gradient, of weights that are small and that are large."""
    scale = jnp.ones(3) if mode == "nvfp4" else None
    q = jax.eval_shape(
        lambda: jgg.quantize(jnp.ones(shape), mode=mode, global_scale=scale, contract=-1)
    )
    f = lambda x, q: jgg.grouped_qmm(x, q, SIZES, implementation="reference").sum()
    grad = jax.value_and_grad(f, (0, 1), allow_int=True)
    assert "custom_call @jgg" not in cuda_text(grad, jnp.ones((20, shape[2])), q)


def test_cuda_lowering_is_one_custom_call(rng):
    """Operands in order, metadata as it is, options fused."""
    q = oracle.random_quantized(rng, (3, 6, 64), "nvfp4", scale=jnp.ones(3))
    x, sizes, bias, row_scale = jnp.ones((16, 64)), jnp.ones(5, "int32"), jnp.ones((3, 6)), None

    def f(x, q, sizes, offset, bias, row_scale):
        return jgg.grouped_qmm(
            x, q, sizes, group_offset=offset, bias=bias, activation="swiglu", row_scale=row_scale
        )

    row_scale = jnp.ones(16, "bfloat16")
    text = cuda_text(f, x, q, sizes, jnp.int32(1), bias, row_scale)
    (line,) = re.findall(r"custom_call @jgg_qmm.*", text)
    assert set(re.findall(r"stablehlo\.(\w+)", text)) <= {"custom_call", "reshape", "constant"}
    assert re.findall(r"tensor<(\w+)>", line)[-9:] == [
        "16x64xf32", "3x6x8xui32", "3x6x4xui8", "5xi32", "3xf32", "i32", "3x6xf32", "16xbf16",
        "16x3xf32",
    ]  # fmt: skip
    for attribute in ('mode = "nvfp4"', "bits = 4 : i32", "group_size = 16 : i32",
                      'layout = "linear"', "global_scale = true", "transpose_w = true",
                      'activation = "swiglu"', "tf32 = false", 'kind = "sizes"'):  # fmt: skip
        assert attribute in line, attribute
    with jax.default_matmul_precision("tensorfloat32"):
        assert "tf32 = true" in cuda_text(lambda x, q: jgg.quantized_matmul(x[:3], q), x, q)
    grad = cuda_text(
        jax.grad(lambda x, q: jnp.sin(jgg.grouped_qmm(x, q, SIZES)).sum(), allow_int=True), x, q
    )
    assert re.findall(r"custom_call @(jgg_\w+)", grad) == ["jgg_qmm"] * 2
    assert len(re.findall("transpose_w = false", grad)) == 1


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("k", [32, 128, 160, 384])
@pytest.mark.one_in(5)
def test_columns_in_order(rng, bits, k):
    """As ffi/quantized/gemm_sm90.h says which columns of 128 follow each other."""
    x = rng.standard_normal((3, k)).astype(np.float32)
    d, whole = {2: 8, 4: 4, 8: 2}.get(bits, 16), np.zeros((3, -(-k // 128) * 128), np.float32)
    whole[:, :k] = x
    order = [
        128 * block + 32 * j + 2 * d * a + d * e + b
        for block in range(whole.shape[1] // 128)
        for a in range(16 // d)
        for b in range(d)
        for j in range(4)
        for e in range(2)
    ]
    np.testing.assert_array_equal(ordered.ordered(jnp.asarray(x), bits), whole[:, order])


def test_columns_are_in_order_for_hopper(rng):
    """Where "sm90" is named; not for what it has no kernel for."""

    def planned(x, q, implementation="sm90", **options):
        f = lambda x, q: jgg.grouped_qmm(x, q, SIZES, implementation=implementation, **options)
        (found,) = re.findall(r"custom_call @jgg_qmm\(.*planned = (\w+)", cuda_text(f, x, q))
        return found == "true"

    def weight(k, bits=4, dtype="bfloat16", mode="affine"):
        return oracle.random_quantized(rng, (3, 64, k), mode, bits, 32, dtype)

    x = jnp.ones((16, 160), "bfloat16")
    for bits in (2, 3, 4, 5, 6, 8):
        assert planned(jnp.ones((16, 384), "bfloat16"), weight(384, bits))
        # Lines of whole 16 bytes.
        assert planned(x, weight(160, bits)) == (bits in (4, 8))
    for q in (weight(160, mode="mxfp4"), weight(160, 8, mode="mxfp8")):
        assert planned(x, q)
    assert not planned(x, weight(160), implementation="sm80")
    assert not planned(x, weight(160), implementation=None)  # of a GPU that is not known
    # Scales of another dtype multiply sums.
    assert planned(x.astype("float16"), weight(160))
    assert planned(x, weight(160, dtype="float16"))
    assert planned(x.astype("float16"), weight(160, dtype="float16"))
    along_n = functools.partial(planned, jnp.ones((16, 64), "bfloat16"), transpose_w=False)
    assert along_n(weight(160))
    assert not along_n(weight(96, 2))


def test_export_round_trip():
    """For two platforms, with a Quantized argument and a gradient."""
    x, _, _, q = problem("affine")
    f = jax.jit(jgg.grouped_qmm)
    exported = jax.export.export(
        f, platforms=["cpu", "cuda"], disabled_checks=jgg.EXPORT_DISABLED_CHECKS
    )(x, q, SIZES)
    assert "@jgg_qmm(" in exported.mlir_module()
    loaded = jax.export.deserialize(exported.serialize(vjp_order=1)).call
    out, dx = loaded(x, q, SIZES), jax.grad(lambda x: jnp.sin(loaded(x, q, SIZES)).sum())(x)
    oracle.assert_close(out, oracle.grouped_qmm(x, q, SIZES))
    w = oracle.dequantize(q).swapaxes(1, 2)
    oracle.assert_close(dx, oracle.grouped_mm_grads(x, w, SIZES, np.cos(oracle.f64(out)))[0])


@pytest.mark.parametrize("mode", ["affine", "nvfp4"])
def test_experts_are_not_dequantized_as_a_whole(rng, mode):
    """Forward and for x's gradient, temporaries are a fraction of one expert."""
    g, n, k = 4, 2048, 2048
    q = oracle.random_quantized(rng, (g, n, k), mode)
    x = jnp.ones((16, k), jnp.bfloat16)
    loss = lambda x, q: (jgg.grouped_qmm(x, q, jnp.array([3, 4, 0, 9])) ** 2).sum()
    compiled = jax.jit(jax.grad(loss, allow_int=True)).lower(x, q).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * n * k * 2
    sizes = [int(np.prod(v.aval.shape)) for v in results(jax.make_jaxpr(loss)(x, q).jaxpr)]
    assert max(sizes) < g * n * k // 32 * 33  # words, at most


def results(jaxpr):
    for eqn in jaxpr.eqns:
        yield from eqn.outvars
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from results(inner)


def test_cost():
    """Packed weights and scales of the experts that meet a row are read."""
    shape = lambda *s, dtype="float32": jax.ShapeDtypeStruct(s, dtype)
    q = jgg.Quantized(
        shape(3, 6, 16, dtype="uint32"), shape(3, 6, 2, dtype="bfloat16"),
        shape(3, 6, 2, dtype="bfloat16"), mode="affine", bits=4, group_size=64,
    )  # fmt: skip
    x, sizes = shape(16, 128, dtype="bfloat16"), np.array([4, 0, 9])
    expert = 6 * 128 // 2 + 2 * 2 * 6 * 2
    want = jgg.cost.Cost(2 * 13 * 6 * 128, 2 * (13 * 128 + 16 * 6) + 2 * expert + 3 * 4)
    assert jgg.cost.grouped_qmm(x, q, sizes) == want
    biased = jgg.cost.grouped_qmm(x, q, sizes, bias=shape(3, 6))
    assert biased.flops == want.flops + 2 * 13 * 6
    one = jax.tree.map(lambda a: shape(*a.shape[1:], dtype=a.dtype), q)
    assert jgg.cost.quantized_matmul(x, one).flops == 2 * 16 * 6 * 128
    assert jgg.cost.gather_qmm(x, q, None, np.array([2, 0, 9])).flops == 2 * 2 * 16 * 6 * 128
    scaled = jgg.Quantized(
        shape(3, 6, 16, dtype="uint32"), shape(3, 6, 8, dtype="uint8"), None, shape(),
        mode="nvfp4", bits=4, group_size=16,
    )  # fmt: skip
    read = 2 * (6 * 64 + 6 * 8) + 4
    cost = jgg.cost.grouped_qmm(x, scaled, sizes)
    assert cost.bytes_accessed == 2 * (13 * 128 + 16 * 6) + read + 3 * 4


@pytest.mark.parametrize("options", [{}, {"activation": "swiglu"}, {"bias": jnp.ones((3, 128))}],
                         ids=["column scales", "activation", "bias"])  # fmt: skip
def test_gradients_of_epilogues_are_half_precision_products(options):
    """As of grouped_mm: a float32 cotangent would take the generic kernel's float32 products."""
    x = jnp.ones((16, 64), jnp.bfloat16)
    columns = None if options else jnp.ones((3, 128))
    q = jgg.quantize(jnp.ones((3, 128, 64), jnp.bfloat16), mode="nvfp4", global_scale=None)
    q = dataclasses.replace(q, global_scale=columns)
    loss = lambda x: jnp.sin(jgg.grouped_qmm(x, q, SIZES, **options)).sum()
    text = cuda_text(jax.grad(loss), x)
    calls = re.findall(r"custom_call @jgg_qmm\w*\(.*?\) .*?: \(tensor<[\dx]*x(\w+)>", text)
    assert len(calls) == 2
    assert set(calls) == {"bf16"}
