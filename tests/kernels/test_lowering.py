"""What is lowered where: custom calls for CUDA from any process, else the reference; export."""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from lowered_calls import text_of as cuda_text

import jax_groupgemm as jgg
from jax_groupgemm._grouped import planes
from jax_groupgemm._kernels import choose, extension, problems, proven

SIZES = np.array([4, 0, 9], np.int32)


def operands(dtype="float32"):
    return jnp.ones((16, 8), dtype), jnp.ones((3, 8, 4), dtype)


def cuda_calls(function, *args) -> list[str]:
    text = jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    return re.findall(r"custom_call @(jgg_\w+)", text)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_cuda_lowering_is_one_custom_call(dtype):
    x, w = operands(dtype)
    assert cuda_calls(lambda x, w: jgg.grouped_mm(x, w, SIZES), x, w) == ["jgg_mm"]
    spans = np.array([[0, 3], [2, 8]])
    assert cuda_calls(lambda x: jgg.segmented_mm(x, x.T, spans), x) == ["jgg_wgrad"]
    grad = jax.grad(lambda x, w: jnp.sin(jgg.grouped_mm(x, w, SIZES)).sum(), (0, 1))
    assert sorted(cuda_calls(grad, x, w)) == ["jgg_mm", "jgg_mm", "jgg_wgrad"]


def test_metadata_reaches_cuda_as_it_is():
    """Sizes and spans are decoded by the kernel: beside the call nothing is left to compute."""
    x, w = operands()
    sizes, spans = jnp.asarray(SIZES), jnp.zeros((5, 2), jnp.int32)
    for text in (
        cuda_text(jgg.grouped_mm, x, w, sizes),
        cuda_text(
            lambda x, w, s, o: jgg.grouped_mm(x, w, s, group_offset=o), x, w, sizes, jnp.int32(1)
        ),
        cuda_text(lambda x, s: jgg.segmented_mm(x, x, s, transpose_a=True), x, spans),
    ):
        operations = set(re.findall(r"stablehlo\.(\w+)", text))
        assert operations <= {"custom_call", "reshape", "constant"}, operations


def test_epilogue_is_fused_for_cuda():
    x, w = operands()
    bias, scale, old = jnp.ones((3, 4)), jnp.ones((16,)), jnp.ones((16, 2))

    def f(x, w, bias, scale, old, **options):
        return jgg.grouped_mm(
            x, w, SIZES, bias=bias, row_scale=scale, existing_out=old, activation="swiglu",
            **options,
        )  # fmt: skip

    args = (x, w, bias, scale, old)
    text = cuda_text(f, *args)
    assert re.findall(r"custom_call @(jgg_\w+)", text) == ["jgg_mm"]
    assert 'activation = "swiglu"' in text
    assert "output_operand_alias<" in text  # existing_out is accumulated in place
    assert not re.findall(r"stablehlo\.(multiply|add|logistic)", text)
    # Differentiated, it is composed: the derivative needs what comes before the activation.
    grad = cuda_text(jax.grad(lambda *v: f(*v).sum()), *args)
    assert 'activation = "swiglu"' not in grad
    # A result that cannot be accumulated in place, and dtypes that no kernel takes, are composed.
    with jax.numpy_dtype_promotion("standard"):
        half = cuda_text(functools.partial(f, preferred_element_type=jnp.bfloat16), *args)
    assert 'activation = "swiglu"' not in half
    # Without anything to contract there is no product, but the bias remains.
    empty = cuda_text(f, x[:, :0], w[:, :0], bias, scale, old)
    assert re.findall(r"custom_call @(jgg_\w+)", empty) == ["jgg_mm"]  # of the bias
    assert 'activation = "swiglu"' not in empty


OPTIONS = [
    {"activation": "silu"},
    {"activation": "swiglu"},
    {"bias"},
    {"row_scale"},
    {"existing_out"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_of_epilogues_are_half_precision_products(dtype, options):
    """Sums stay float32 up to the result, but what flows back to a product is rounded as if there
    were no epilogue: no operand of any product is float32."""
    x, w = operands(dtype)
    columns = 2 if options == {"activation": "swiglu"} else 4
    given = {"bias": (3, columns), "row_scale": (16,), "existing_out": (16, columns)}
    arrays = [jnp.ones(given[name], dtype) for name in options if name in given]
    static = options if isinstance(options, dict) else {}

    def loss(x, w, *arrays):
        named = dict(zip(options, arrays, strict=True)) if arrays else static
        return jnp.sin(jgg.grouped_mm(x, w, SIZES, **named)).sum()

    text = cuda_text(jax.grad(loss, tuple(range(2 + len(arrays)))), x, w, *arrays)
    calls = re.findall(r"custom_call @jgg_\w+\(.*?\) .*?: \((.*?)\) ->", text)
    assert len(calls) >= 3  # forward and two gradients
    short = {"bfloat16": "bf16", "float16": "f16"}[dtype]
    for types in calls:
        assert re.findall(r"x([a-z]\w+)>", types)[:2] == [short, short], types


def test_gated_products_of_split_operands():
    """No kernel does both; the split counts for more."""
    x, w = jnp.ones((16, 8)), jnp.ones((3, 8, 16))
    f = functools.partial(jgg.grouped_mm, activation="swiglu", implementation="sm90")
    text = cuda_text(lambda x, w: f(x, w, SIZES), x, w)
    assert re.findall(r"custom_call @(jgg_\w+)", text) == ["jgg_planes", "jgg_mm"]
    assert "planes = 3" in text
    assert 'activation = ""' in text
    half = cuda_text(lambda x, w: f(x, w, SIZES), x.astype("bfloat16"), w.astype("bfloat16"))
    assert 'activation = "swiglu"' in half


def test_transposed_operands_are_not_copied_for_cuda():
    """transpose_* reach the handler as attributes: no transpose is lowered, forward or backward."""
    x, w = jnp.ones((16, 8)), jnp.ones((3, 4, 8))
    a, b, spans = jnp.ones((8, 16)), jnp.ones((4, 16)), np.array([[0, 3], [2, 8]])
    cases = [
        (lambda x, w: jgg.grouped_mm(x, w, SIZES, transpose_w=True), (x, w)),
        (lambda a, b: jgg.segmented_mm(a, b, spans, transpose_b=True), (a, b)),
    ]
    for f, args in cases:
        for g in (f, jax.grad(lambda *v, f=f: jnp.sin(f(*v)).sum(), (0, 1))):
            text = jax.jit(g).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
            wide = re.findall(r"stablehlo.transpose.*tensor<[\dx]*xf32>", text)
            assert not wide, wide


def test_cpu_lowering_is_one_custom_call():
    x, w = operands()
    f = lambda x, w, **kwargs: jgg.grouped_mm(x, w, SIZES, **kwargs)
    text = jax.jit(f).trace(x, w).lower(lowering_platforms=("cpu",)).as_text()
    assert re.findall(r"custom_call @(jgg_\w+)", text) == ["jgg_mm"]
    reference = functools.partial(f, implementation="reference")
    text = jax.jit(reference).trace(x, w).lower(lowering_platforms=("cpu",)).as_text()
    assert "jgg_" not in re.sub(r"loc\(.*", "", text)
    text = jax.jit(f).trace(x, w).lower(lowering_platforms=("tpu",)).as_text()
    assert "custom_call @jgg" not in text
    with pytest.raises(ValueError, match=r"'cpu' cannot run: it runs on cpu, but this"):
        jax.jit(functools.partial(f, implementation="cpu")).trace(x, w).lower(
            lowering_platforms=("cuda",)
        )


def test_dtypes_without_a_kernel_take_the_reference():
    x, w = operands("int32")
    assert cuda_calls(lambda x, w: jgg.grouped_mm(x, w, SIZES), x, w) == []
    with jax.enable_x64(True):
        x, w = operands("float64")
        assert cuda_calls(lambda x, w: jgg.grouped_mm(x, w, SIZES), x, w) == []


def test_implementation_reference_has_no_custom_call():
    x, w = operands()
    f = lambda x, w: jgg.grouped_mm(x, w, SIZES, implementation="reference")
    assert cuda_calls(f, x, w) == []
    assert cuda_calls(jax.grad(lambda x, w: f(x, w).sum(), (0, 1)), x, w) == []


def test_named_kernel_on_another_platform_says_why():
    x, w = operands()
    lower = (
        jax.jit(lambda x, w: jgg.grouped_mm(x, w, SIZES, implementation="sm80")).trace(x, w).lower
    )
    with pytest.raises(ValueError, match=r"'sm80' cannot run: it runs on cuda, but this"):
        lower(lowering_platforms=("cpu",))


def test_named_kernel_with_an_unsupported_dtype_says_why():
    x, w = operands("int32")
    f = lambda x, w: jgg.grouped_mm(x, w, SIZES, implementation="sm80")
    with pytest.raises(ValueError, match=r"operand dtype int32 is not one of float32, bfloat16"):
        cuda_calls(f, x, w)


def test_live_gpu_without_kernels_warns_once(monkeypatch):
    monkeypatch.setattr(extension, "BUILD", extension.Build())
    monkeypatch.setattr(extension, "live_capabilities", lambda: (90,))
    choose._warn_once.cache_clear()
    x, w = operands()
    with pytest.warns(UserWarning, match="reference lowering on this GPU.*no CUDA kernels"):
        assert cuda_calls(lambda x, w: jgg.grouped_mm(x, w, SIZES), x, w) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cuda_calls(lambda x, w: jgg.grouped_mm(x + 1, w, SIZES), x, w) == []
    with pytest.raises(ValueError, match="'sm80' cannot run: this build has no CUDA kernels"):
        cuda_calls(lambda x, w: jgg.grouped_mm(x, w, SIZES, implementation="sm80"), x, w)


@pytest.mark.parametrize(
    ("architectures", "capability", "runs"),
    [
        (("80", "90a"), 80, True), (("80", "90a"), 89, True), (("80", "90a"), 90, True),
        (("80", "90a"), 75, False), (("80", "90a"), 100, False), (("80", "90a"), 120, False),
        (("80", "80-virtual"), 120, True), (("90a", "100a"), 103, False),
    ],
)  # fmt: skip
def test_devices_that_the_build_has_no_code_for(monkeypatch, architectures, capability, runs):
    monkeypatch.setattr(
        extension, "BUILD", extension.Build(cuda="13.0", architectures=architectures)
    )
    problem = extension.unavailable("sm80", (capability,))
    assert (problem is None) == runs
    if problem:
        assert f"not for compute capability {capability / 10:.1f}" in problem


@pytest.mark.parametrize(
    ("kernel", "capability", "code"), [("sm90", 90, "90a"), ("sm100", 100, "100a")]
)
def test_kernels_for_one_architecture_need_its_code(monkeypatch, rng, kernel, capability, code):
    """PTX for all newer devices, which every build has, is not enough."""
    half = {"platform": "cuda", "dtypes": ("bfloat16",) * 2, "out_dtype": "bfloat16"}
    shape = {"rows": 64, "groups": 4, "k": 64, "n": 64}
    lists = problems.Mm(
        op="mm", **half, **shape, segments=4, operand_dtype="bfloat16", lists=True
    )  # fmt: skip
    inner = problems.Qmm(
        op="qmm", **half, **shape, rows_x=64, segments=4, all_groups=4, mode="nvfp4", bits=4,
        layout="linear", bfloat16_scales=True, packable=True,
    )  # fmt: skip
    nvfp4 = problems.Nvfp4(op="nvfp4_grouped_mm", platform="cuda", k=64, n=64, inner=inner)
    monkeypatch.setattr(extension, "live_capabilities", lambda: (capability,))
    for architectures in (("80", "80-virtual"), ("80", code, "80-virtual")):
        monkeypatch.setattr(
            extension, "BUILD", extension.Build(cuda="13.0", architectures=architectures)
        )
        has = code in architectures
        why = None if has else f"this build has code for 80, 80-virtual, not for {code}"
        assert extension.unavailable(kernel, (capability,)) == why
        assert extension.unavailable("sm80", (capability,)) is None
        found = choose.fused(lists)
        assert (found is not None) == (has and kernel == "sm90")
        with proven.trusted():
            found = choose.fused(nvfp4)
        assert (found is not None and found.kernel.name == "sm100") == (has and kernel == "sm100")


@pytest.mark.parametrize("with_gradient", [False, True])
def test_export_for_cpu_and_cuda(rng, with_gradient):
    x, w = oracle.random(rng, (16, 8)), oracle.random(rng, (3, 8, 4))
    f = jax.jit(jgg.grouped_mm)
    sizes = jnp.asarray(SIZES)
    with pytest.raises(ValueError, match="jgg_mm"):
        jax.export.export(f, platforms=["cpu", "cuda"])(x, w, sizes)
    exported = jax.export.export(
        f, platforms=["cpu", "cuda"], disabled_checks=jgg.EXPORT_DISABLED_CHECKS
    )(x, w, sizes)
    loaded = jax.export.deserialize(exported.serialize(vjp_order=int(with_gradient)))
    oracle.assert_close(loaded.call(x, w, sizes), oracle.grouped_mm(x, w, sizes))
    if with_gradient:
        ct = oracle.random(rng, (16, 4))
        dx, dw = jax.vjp(lambda x, w: loaded.call(x, w, sizes), x, w)[1](ct)
        for got, want in zip((dx, dw), oracle.grouped_mm_grads(x, w, sizes, ct), strict=True):
            oracle.assert_close(got, want)


def test_export_of_every_op(rng):
    a, b = oracle.random(rng, (6, 20)), oracle.random(rng, (20, 4))
    spans, index = jnp.array([[0, 9], [5, 20]]), jnp.array([0, 2, 1])
    x, w = oracle.random(rng, (3, 1, 8)), oracle.random(rng, (3, 8, 4))
    for f, args in [
        (jgg.segmented_mm, (a, b, spans)),
        (lambda x, w, i: jgg.gather_mm(x, w, None, i), (x, w, index)),
        (jgg.ragged_dot, (x[:, 0], w, index)),
    ]:
        exported = jax.export.export(
            jax.jit(f), platforms=["cpu", "cuda"], disabled_checks=jgg.EXPORT_DISABLED_CHECKS
        )(*args)
        loaded = jax.export.deserialize(exported.serialize())
        oracle.assert_close(loaded.call(*args), f(*args))


def test_export_with_several_devices(rng):
    """No Python callback ends up in an exported module."""
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    w_sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, None, "d"))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    x, w, sizes = oracle.random(rng, (16, 8)), oracle.random(rng, (3, 8, 4)), jnp.asarray(SIZES)
    f = jax.jit(jgg.grouped_mm, in_shardings=(everywhere, w_sharding, everywhere))
    exported = jax.export.export(f, disabled_checks=jgg.EXPORT_DISABLED_CHECKS)(x, w, sizes)
    loaded = jax.export.deserialize(exported.serialize())
    args = (
        jax.device_put(x, everywhere),
        jax.device_put(w, w_sharding),
        jax.device_put(sizes, everywhere),
    )  # fmt: skip
    oracle.assert_close(jax.jit(loaded.call)(*args), oracle.grouped_mm(x, w, sizes))


def test_float32_is_split_for_hopper(rng):
    """Into bfloat16 planes, by name; their padding is that of tensor copies."""
    x, w = jnp.ones((70, 40)), jnp.ones((3, 40, 24))

    def text(**options):
        f = lambda x, w: jgg.grouped_mm(x, w, SIZES, **options)
        return cuda_text(f, x, w)

    split = text(implementation="sm90")
    assert "planes = 3 : i32" in split
    assert "tensor<70x3x64xbf16>, tensor<3x64x3x24xbf16>" in split
    assert "planes = 2 : i32" in text(implementation="sm90", precision="tensorfloat32")
    assert "planes = 1 : i32" in text(implementation="sm80")
    assert "planes = 3 : i32" in text(implementation="sm90", activation="swiglu")
    odd = jnp.ones((3, 40, 20))
    assert "planes = 1 : i32" in cuda_text(
        lambda x: jgg.grouped_mm(x, odd, SIZES, implementation="sm90"), x
    )
    sums = cuda_text(
        lambda x: jgg.segmented_mm(x.T, x, SIZES.reshape(-1, 1) + np.arange(2),
                                   implementation="sm90"), x,
    )  # fmt: skip
    assert "tensor<40x3x72xbf16>, tensor<70x3x40xbf16>" in sums


@pytest.mark.parametrize(
    ("rows", "groups", "size", "parts"),
    [
        (65536, 1, 100, 128),  # as many as are 512 rows long
        (65536, 2, 256, 16),  # a tile of 128 x 128 for each processor
        (65536, 40, 128, 1),  # 3 would fit
        (4096, 4, 128, 1),  # 2 of 512 rows
        (2048, 16, 256, 1),
    ],
)
def test_few_and_small_weight_gradients_are_cut(rng, rows, groups, size, parts):
    """In parts that are float32, added up in order, and that the kernel sees as matrices."""
    a, b = jnp.zeros((size, rows), "bfloat16"), jnp.zeros((rows, size), "bfloat16")
    spans = jnp.tile(jnp.array([[0, rows]]), (groups, 1))
    text = cuda_text(jgg.segmented_mm, a, b, spans)
    dtype = "f32" if parts > 1 else "bf16"
    assert f"-> tensor<{groups * parts}x{size}x{size}x{dtype}>" in text
    assert text.count("@jgg_wgrad") == 1


@pytest.mark.parametrize("count", [2, 3])
def test_planes(rng, count):
    """Three planes are exact in float32, two hold 16 bits; an Inf meets no zero, and one sign."""
    a = np.concatenate([
        oracle.random(rng, (2000,)) * np.exp2(rng.integers(-100, 100, 2000)),
        [0, -0.0, np.finfo(np.float32).max, np.finfo(np.float32).tiny, 1 + 2**-23, -1 + 2**-24],
    ]).astype(np.float32)  # fmt: skip
    got = np.asarray(planes.as_planes(jnp.asarray(a)[None], count, 8, -1)).astype(np.float64)
    assert got.shape == (1, count, 2008)
    error = np.abs(got[0].sum(0)[: len(a)] - a)
    assert (error <= np.abs(a) * 2.0 ** (-58 if count == 3 else -15)).all()
    assert not got[0, :, len(a) :].any()
    large = np.abs(a) > 2.0**-59
    assert (got[0, :, : len(a)] * np.sign(a) > 0)[:, large].all()
    bad = np.array([np.inf, -np.inf, 0], np.float32)
    bad.view(np.uint32)[2] = 0x7F800001  # NaN in the lower half alone
    got = np.asarray(planes.as_planes(jnp.asarray(bad), count)).astype(np.float64)
    np.testing.assert_array_equal(got, [[np.inf, -np.inf, np.nan]] * count)
