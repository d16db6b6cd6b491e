"""Where NVFP4 products take the Blackwell kernel, and what its custom calls are given. Nothing here
runs it."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from lowered_calls import pretend_gpus, types
from lowered_calls import text_of as lowered

import jax_groupgemm as jgg
from jax_groupgemm._kernels import choose, extension, proven
from jax_groupgemm._nvfp4 import call as nvfp4_call

SIZES = np.array([5, 0, 9, 64], np.int32)
T, N, K, G = 100, 48, 96, 4
CALL = r"custom_call @(jgg_\w+)"


def x_and_w(rng, k=K, n=N):
    x, w = oracle.random(rng, (T, k)), oracle.random(rng, (G, n, k))
    return jgg.nvfp4_quantize(x), jgg.nvfp4_quantize(w)


def dy_and_x(rng, n=N, k=K):
    along_t = functools.partial(jgg.nvfp4_quantize, axis=0, group_sizes=SIZES)
    return along_t(oracle.random(rng, (T, n))), along_t(oracle.random(rng, (T, k)))


def mm(x, w, sizes=SIZES, **kwargs):
    return jgg.nvfp4_grouped_mm(x, w, sizes, **kwargs)


def wgrad(dy, x, *, existing_out=None, **kwargs):
    return jgg.nvfp4_grouped_wgrad(x, dy, SIZES, existing_out=existing_out, **kwargs)


OPS = ("mm", "wgrad")


def live(monkeypatch, *capabilities):
    pretend_gpus(monkeypatch, capabilities, ("80", "100a"))


def signature(text: str, target: str) -> tuple[list[str], list[str]]:
    """Types of a custom call's operands and results."""
    return types(next(line for line in text.splitlines() if f"@{target}(" in line))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_mm_is_one_custom_call(rng, dtype):
    text = lowered(mm, *x_and_w(rng), implementation="sm100", preferred_element_type=dtype)
    assert re.findall(CALL, text) == ["jgg_nvfp4_grouped_mm"]
    operands, (out, workspace) = signature(text, "jgg_nvfp4_grouped_mm")
    assert operands == [
        f"{T}x{K // 8}xui32", f"{T}x{K // 16}xui8", f"{G}x{N}x{K // 8}xui32",
        f"{G}x{N}x{K // 16}xui8", f"{G}xi32", f"{G}xf32",
    ]  # fmt: skip
    assert out == f"{T}x{N}x{'bf16' if dtype == 'bfloat16' else 'f32'}"
    # Tiles of 128 rows and 64 of k: at most 4 of x, in groups of 100 rows, and one of each w.
    scales = 2 * (4 * 2 * 512)
    groups = [12 * G, *[8 * G] * 8, *[20 * G] * 2, *[4 * (G + 1)] * 2]
    assert workspace == f"{256 + 256 * len(groups) + 160 * 768 + scales}xui8"


@pytest.mark.parametrize("beta", [None, 0.5, np.array([1, 0, 2, 0.5])])
@pytest.mark.one_in(2)
def test_wgrad_is_one_custom_call(rng, beta):
    dy, x = dy_and_x(rng)
    old = oracle.random(rng, (G, N, K))
    text = lowered(wgrad, dy, x, implementation="sm100")
    assert re.findall(CALL, text) == ["jgg_nvfp4_grouped_wgrad"]
    padded = x.shape[1]
    assert padded % 64 == 0
    assert padded >= T
    operands, (out, workspace) = signature(text, "jgg_nvfp4_grouped_wgrad")
    assert operands == [
        f"{K}x{padded // 8}xui32", f"{K}x{padded // 16}xui8", f"{N}x{padded // 8}xui32",
        f"{N}x{padded // 16}xui8", f"{G}xi32", f"{G}xf32",
    ]  # fmt: skip
    assert out == f"{G}x{N}x{K}xf32"
    scales = 2 * 128 * padded // 16
    assert workspace == f"{256 + 256 * 13 + 160 * 768 + scales}xui8"
    assert f"tokens = {T} : i32" in text
    assert "output_operand_aliases" not in text
    accumulate = lambda dy, x, old: wgrad(
        dy, x, existing_out=old, beta=beta, implementation="sm100"
    )
    text = lowered(accumulate, dy, x, old)
    operands, _ = signature(text, "jgg_nvfp4_grouped_wgrad")
    assert operands[6:] == [f"{G}xf32", f"{G}x{N}x{K}xf32"]
    assert "operand_index = 7" in text


def test_a_bias_or_a_scale_per_row_is_added_to_float32(rng):
    x, w = x_and_w(rng)
    rows = jgg.Quantized(
        x.weight, x.scales, global_scale=jnp.ones(T), mode="nvfp4", bits=4, group_size=16
    )
    bias = oracle.random(rng, (G, N))
    for args, kwargs in (
        ((x, w), {"bias": bias}), ((rows, w), {}), ((rows, w), {"bias": bias}),
        ((x, w), {"preferred_element_type": "float16"}),
    ):  # fmt: skip
        text = lowered(mm, *args, implementation="sm100", **kwargs)
        assert re.findall(CALL, text) == ["jgg_nvfp4_grouped_mm"]
        assert signature(text, "jgg_nvfp4_grouped_mm")[1][0] == f"{T}x{N}xf32"


def blackwell(problem):
    """The choice on a GPU that this machine does not have."""
    return choose.configured(choose.KERNELS[problem.op][0], problem)


def pretend(*_, out_dtype):
    """A kernel whose every sum is 2, of rows in groups."""
    rows = jnp.arange(T)[:, None] < SIZES.sum()
    return jnp.where(rows, jnp.ones((T, N), out_dtype) * 2, 0)


def test_bias_and_scale_per_row_meet_their_rows(rng, monkeypatch):
    """What surrounds the custom call, by running something else in its place."""
    monkeypatch.setattr(choose, "fused", blackwell)
    monkeypatch.setattr(nvfp4_call, "nvfp4_grouped_mm", pretend)
    x, w = x_and_w(rng)
    scale = np.arange(T).astype(np.float32)
    scale[-1] = np.nan  # a row of no group
    rows = jgg.Quantized(
        x.weight, x.scales, global_scale=jnp.asarray(scale), mode="nvfp4", bits=4, group_size=16
    )
    bias = oracle.random(rng, (G, N))
    f = functools.partial(mm, bias=bias, preferred_element_type="float32")
    got = jax.jit(f)(rows, w)
    want = np.zeros((T, N))
    for g, (start, end) in enumerate(oracle.bounds(SIZES, T)):
        want[start:end] = 2 * scale[start:end, None] + oracle.f64(bias)[g]
    oracle.assert_close(got, want)
    assert not np.asarray(got)[SIZES.sum() :].any()


@pytest.mark.parametrize("capabilities", [(), (90,), (90, 100), (103,), (120,)])
def test_no_other_gpu_takes_it(rng, monkeypatch, capabilities):
    live(monkeypatch, *capabilities)
    choose._warn_once.cache_clear()
    monkeypatch.setattr(choose, "_warn_once", lambda message: None)
    for function, args in ((mm, x_and_w(rng)), (wgrad, dy_and_x(rng))):
        assert "nvfp4" not in " ".join(re.findall(CALL, lowered(function, *args)))
        if capabilities:
            other = next(c for c in capabilities if c != 100) / 10
            reason = f"it needs compute capability 10.0, this GPU has {other}"
            with pytest.raises(ValueError, match=f"'sm100' cannot run: {reason}"):
                lowered(function, *args, implementation="sm100")


def test_a_blackwell_gpu_takes_it(rng, monkeypatch):
    """Once it is proven there: tests/check/test_proven.py."""
    live(monkeypatch, 100)
    monkeypatch.setattr(proven, "proven", lambda: {f"jgg_nvfp4_grouped_{op} sm100" for op in OPS})
    for function, args, call in (
        (mm, x_and_w(rng), "jgg_nvfp4_grouped_mm"),
        (wgrad, dy_and_x(rng), "jgg_nvfp4_grouped_wgrad"),
    ):
        assert re.findall(CALL, lowered(function, *args)) == [call]
        assert "@jgg_nvfp4" not in lowered(function, *args, platform="cpu")
        assert re.findall(CALL, lowered(function, *args, implementation="reference")) == []
    # A shape it cannot take is composed.
    text = lowered(mm, *x_and_w(rng, k=48))
    assert "nvfp4" not in " ".join(re.findall(CALL, text))


def test_quantized_weights_have_no_such_kernel(monkeypatch):
    x, w = jnp.ones((8, 64), jnp.bfloat16), jgg.quantize(jnp.ones((2, 16, 64), jnp.bfloat16))
    f = lambda x, w, name: jgg.grouped_qmm(x, w, np.array([3, 4]), implementation=name)
    with pytest.raises(
        ValueError, match="'sm100' cannot run: there is no kernel jgg_qmm for sm100"
    ):
        lowered(f, x, w, name="sm100")
    live(monkeypatch, 100)
    assert re.findall(CALL, lowered(f, x, w, name=None)) == ["jgg_qmm"]


@pytest.mark.parametrize(
    ("function", "operands", "reason"),
    [
        (mm, functools.partial(x_and_w, k=48), "needs K % 32 == 0, got K=48"),
        (mm, functools.partial(x_and_w, n=12), "needs N % 8 == 0, got N=12"),
        (wgrad, functools.partial(dy_and_x, k=10), "needs K % 4 == 0, got K=10"),
    ],
)
def test_named_for_a_shape_that_it_cannot_take(rng, function, operands, reason):
    """In the words of ffi/nvfp4/layout.h, see test_nvfp4_layout.py."""
    with pytest.raises(ValueError, match=re.escape(f"'sm100' cannot run: {reason}. Use ")):
        lowered(function, *operands(rng), implementation="sm100")
    with pytest.raises(ValueError, match="'sm100' cannot run: it runs on cuda, but this"):
        lowered(function, *operands(rng), implementation="sm100", platform="cpu")


def test_float32_rows_may_be_narrower(rng):
    text = lowered(
        mm, *x_and_w(rng, n=12), implementation="sm100", preferred_element_type="float32"
    )
    assert re.findall(CALL, text) == ["jgg_nvfp4_grouped_mm"]


def test_nothing_to_compute_calls_nothing():
    x = jgg.nvfp4_quantize(jnp.ones((0, K)))
    w = jgg.nvfp4_quantize(jnp.ones((G, N, K)))
    assert re.findall(CALL, lowered(mm, x, w, implementation="sm100")) == []


def test_derivatives_are_of_the_composition(rng):
    x, w = x_and_w(rng)
    alpha = jnp.asarray([1.0, 2, 3, 4])

    def loss(alpha, implementation):
        return jnp.sin(mm(x, w, alpha=alpha, implementation=implementation)).sum(dtype="float32")

    named = jax.value_and_grad(functools.partial(loss, implementation="sm100"))
    calls = re.findall(CALL, lowered(named, alpha))
    assert calls.count("jgg_nvfp4_grouped_mm") == 1
    assert len(calls) > 1
    # On the CPU both are the composition, whichever primitive they come from.
    grads = [jax.grad(loss)(alpha, name) for name in (None, "reference")]
    np.testing.assert_array_equal(*grads)


def test_batches_are_composed(rng):
    x, w = x_and_w(rng)
    alphas = oracle.random(rng, (3, G))
    f = lambda alpha, name: mm(x, w, alpha=alpha, implementation=name)
    batched = lambda alphas, name: jax.vmap(functools.partial(f, name=name))(alphas)
    assert "nvfp4" not in " ".join(re.findall(CALL, lowered(batched, alphas, name="sm100")))
    got, want = batched(alphas, None), jnp.stack([f(alpha, "reference") for alpha in alphas])
    oracle.assert_close(got, oracle.f64(want))


def test_sharded_operands_are_composed_or_refused(rng):
    x, w = x_and_w(rng)
    for kind in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit):
        mesh = jax.make_mesh((2,), ("d",), axis_types=(kind,))
        whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        x, w = jax.device_put(x, whole), jax.device_put(w, whole)
        with jax.set_mesh(mesh):
            text = lowered(mm, x, w)
            assert "nvfp4" not in " ".join(re.findall(CALL, text))
            with pytest.raises(ValueError, match="'sm100' cannot run: its operands are sharded"):
                lowered(mm, x, w, implementation="sm100")


def test_each_device_of_shard_map_calls_it(rng):
    x, w = x_and_w(rng)
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("d")
    f = jax.shard_map(
        lambda x, w, s: mm(x, w, s, implementation="sm100"),
        mesh=mesh, in_specs=(jax.sharding.PartitionSpec(), spec, spec), out_specs=spec,
    )  # fmt: skip
    text = lowered(f, x, w, jnp.asarray(SIZES))
    assert re.findall(CALL, text) == ["jgg_nvfp4_grouped_mm"]
    assert signature(text, "jgg_nvfp4_grouped_mm")[0][4] == f"{G // 2}xi32"


@pytest.mark.gpu
def test_the_handlers_refuse_another_gpu(rng, monkeypatch):
    if 100 in extension.live_capabilities():
        pytest.skip("needs a GPU that is not Blackwell")
    monkeypatch.setattr(choose, "fused", blackwell)
    dy, x = dy_and_x(rng)
    old = oracle.random(rng, (G, N, K))
    accumulate = lambda dy, x, old: wgrad(dy, x, existing_out=old)
    for function, args in ((mm, x_and_w(rng)), (wgrad, (dy, x)), (accumulate, (dy, x, old))):
        with pytest.raises(
            jax.errors.JaxRuntimeError, match=r"needs compute capability 10\.0, got"
        ):
            jax.jit(function)(*args).block_until_ready()
