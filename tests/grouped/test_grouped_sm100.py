"""Where mm and wgrad take Blackwell's kernels, and what their custom calls are given. Nothing here
runs them; test_groups_sm100.py tries what they read."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from lowered_calls import pretend_gpus
from lowered_calls import text_of as lowered

import jax_groupgemm as jgg
from jax_groupgemm._kernels import choose, extension

SIZES = np.array([5, 0, 9, 64], np.int32)
T, K, N, G = 100, 64, 48, 4
CALL = r"custom_call @(jgg_\w+)"
KEYS = {"jgg_mm sm100", "jgg_wgrad sm100"}
HALVES = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
LAYOUTS = pytest.mark.parametrize("transpose_w", [False, True])
SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


def operands(dtype="bfloat16", *, k=K, n=N, transpose_w=False):
    x, w = jnp.zeros((T, k), dtype), jnp.zeros((G, n, k) if transpose_w else (G, k, n), dtype)
    return x, w


def mm(x, w, sizes=SIZES, **kwargs):
    return jgg.grouped_mm(x, w, sizes, **kwargs)


def gradients(x, w, **kwargs):
    out, back = jax.vjp(functools.partial(mm, **kwargs), x, w)
    return out, *back(jnp.ones_like(out))


def calls(text: str) -> list[tuple[str, str, list[str], list[str]]]:
    """(target, kernel of the plan, types of operands, types of results) of every product."""
    found = []
    for line in text.splitlines():
        target, name = re.search(CALL, line), re.search(r'kernel = "(\w*)"', line)
        if target is None or name is None:
            continue
        types = [re.findall(r"tensor<([^>]*)>", p) for p in line.rsplit(" : (", 1)[1].split(" -> ")]
        found.append((target[1], name[1], *types))
    return found


def kernels(text: str) -> list[tuple[str, str]]:
    return [found[:2] for found in calls(text)]


def live(monkeypatch, *capabilities, proved=KEYS):
    pretend_gpus(monkeypatch, capabilities, ("80", "90a", "100a", "80-virtual"), proved)


def workspace(count: int = G) -> str:
    return f"{extension.rules().sm100_workspace(weights=G, count=count)}xui8"


@HALVES
@LAYOUTS
def test_a_product_and_its_gradients_are_one_call_each(dtype, transpose_w):
    x, w = operands(dtype, transpose_w=transpose_w)
    text = lowered(gradients, x, w, implementation="sm100", transpose_w=transpose_w)
    short = SHORT[dtype]
    rows, columns = f"{T}x{K}x{short}", f"{T}x{N}x{short}"
    weight = "x".join(map(str, w.shape)) + f"x{short}"
    assert calls(text) == [
        ("jgg_mm", "sm100", [rows, weight, f"{G}xi32"], [columns, workspace()]),
        ("jgg_wgrad", "sm100", [*((columns, rows) if transpose_w else (rows, columns)), f"{G}xi32"],
         [weight, workspace()]),
        ("jgg_mm", "sm100", [columns, weight, f"{G}xi32"], [rows, workspace()]),
    ]  # fmt: skip
    # dx has the other layout of w.
    assert re.findall(r"transpose_w = (\w+)", text) == [
        str(v).lower() for v in (transpose_w, not transpose_w)
    ]


@HALVES
def test_results_may_be_float32(dtype):
    x, w = operands(dtype)
    text = lowered(mm, x, w, implementation="sm100", preferred_element_type="float32")
    assert [results[0] for *_, results in calls(text)] == [f"{T}x{N}xf32"]
    wgrad = functools.partial(jgg.segmented_mm, transpose_a=True, implementation="sm100")
    spans = np.array([(0, 5), (5, 5), (9, 80), (80, 100)])
    text = lowered(
        lambda a, b: wgrad(a, b, spans, preferred_element_type="float32"),
        x, jnp.zeros((T, N), dtype),
    )  # fmt: skip
    assert calls(text) == [
        ("jgg_wgrad", "sm100", [f"{T}x{K}x{SHORT[dtype]}", f"{T}x{N}x{SHORT[dtype]}", f"{G}x2xi32"],
         [f"{G}x{K}x{N}xf32", workspace()])
    ]  # fmt: skip


def test_some_of_the_groups():
    x, w = operands()
    sizes = np.ones(9, np.int32)
    f = lambda x, w, first: mm(x, w, sizes, group_offset=first, implementation="sm100")
    ((*_, given, results),) = calls(lowered(f, x, w, jnp.int32(3)))
    assert given[2:] == ["9xi32", "i32"]
    assert results[1] == workspace(9)


def test_a_proven_blackwell_gpu_takes_it(monkeypatch):
    live(monkeypatch, 100)
    text = lowered(gradients, *operands())
    assert kernels(text) == [("jgg_mm", "sm100"), ("jgg_wgrad", "sm100"), ("jgg_mm", "sm100")]
    assert "sm100" not in lowered(gradients, *operands(), platform="cpu")
    assert kernels(lowered(gradients, *operands(), implementation="reference")) == []


@pytest.mark.parametrize("proved", [(), ("jgg_mm sm100",), ("jgg_wgrad sm100",)])
def test_each_kernel_needs_its_own_proof(monkeypatch, proved):
    """Until then it is the generic kernel, which the name does not change."""
    live(monkeypatch, 100, proved=proved)
    found = kernels(lowered(gradients, *operands()))
    assert [target for target, _ in found] == ["jgg_mm", "jgg_wgrad", "jgg_mm"]
    for target, name in found:
        assert name == ("sm100" if f"{target} sm100" in proved else "")
    for product in (mm, gradients):
        if "jgg_mm sm100" not in proved:
            with pytest.raises(
                ValueError, match="'sm100' cannot run: it is not yet proven on this"
            ):
                lowered(product, *operands(), implementation="sm100")


@pytest.mark.parametrize("capabilities", [(), (90,), (90, 100), (103,), (120,)])
def test_no_other_gpu_takes_it(monkeypatch, capabilities):
    live(monkeypatch, *capabilities)
    monkeypatch.setattr(choose, "_warn_once", lambda message: None)
    assert "sm100" not in {name for _, name in kernels(lowered(gradients, *operands()))}
    if capabilities:
        other = next(c for c in capabilities if c != 100) / 10
        reason = f"it needs compute capability 10.0, this GPU has {other}"
        with pytest.raises(ValueError, match=f"'sm100' cannot run: {reason}"):
            lowered(mm, *operands(), implementation="sm100")


REFUSED = [
    ({"k": 68}, {}, "needs K % 8 == 0, got K=68"),
    ({"n": 44}, {}, "needs N % 8 == 0, got N=44"),
    ({"n": 44, "transpose_w": True}, {"transpose_w": True}, "needs N % 8 == 0, got N=44"),
    ({"dtype": "float32"}, {}, "operands must be bfloat16 or float16 alike"),
]


@pytest.mark.parametrize(("of", "kwargs", "reason"), REFUSED)
def test_what_it_cannot_take_runs_elsewhere(monkeypatch, of, kwargs, reason):
    with pytest.raises(ValueError, match=re.escape(f"'sm100' cannot run: {reason}. Use ")):
        lowered(mm, *operands(**of), implementation="sm100", **kwargs)
    live(monkeypatch, 100)
    assert kernels(lowered(mm, *operands(**of), **kwargs)) == [("jgg_mm", "")]


def test_gradients_that_it_cannot_take_run_elsewhere(monkeypatch):
    """Of a transposed product: both operands of dw are transposed, too."""
    live(monkeypatch, 100)
    f = lambda a, b: jgg.segmented_mm(a, b, np.array([(0, 50), (50, T)]))
    a, b = jnp.zeros((K, T), "bfloat16"), jnp.zeros((T, N), "bfloat16")
    assert kernels(lowered(f, a, b)) == [("jgg_wgrad", "")]
    swapped = np.array([(50, T), (0, 50)])  # in any order, for an mm
    back = lambda a, b: jax.vjp(lambda a: jgg.segmented_mm(a, b, swapped, transpose_a=True), a)[1](
        jnp.zeros((2, K, N), "bfloat16")
    )
    assert ("jgg_mm", "") in kernels(lowered(back, a.T, b))


@pytest.mark.parametrize(
    "options", [{"bias": (G, N)}, {"activation": "silu"}, {"row_scale": (T,)},
                {"existing_out": (T, N)}, {"bias": (G, N), "activation": "swiglu"}],
)  # fmt: skip
@pytest.mark.parametrize("named", [False, True])
def test_options_are_composed(monkeypatch, options, named):
    """XLA does them to float32 sums. A bias is a product with K = 1, of another kernel."""
    live(monkeypatch, 100)
    given = {
        name: jnp.zeros(v, "bfloat16") if isinstance(v, tuple) else v for name, v in options.items()
    }
    arrays = {name: v for name, v in given.items() if not isinstance(v, str)}
    static = {name: v for name, v in given.items() if isinstance(v, str)}
    static |= {"implementation": "sm100"} if named else {}
    f = lambda x, w, arrays: mm(x, w, **arrays, **static)
    found = calls(lowered(f, *operands(), arrays))
    ours = [results[0] for _, name, _, results in found if name == "sm100"]
    assert ours == [f"{T}x{N}xf32"]
    assert len(found) == 1 + ("bias" in options)


def test_a_gradient_with_options_is_composed(monkeypatch):
    live(monkeypatch, 100)
    x, w = operands()
    bias = jnp.zeros((G, N), "bfloat16")

    def loss(x, w, bias):
        return mm(x, w, bias=bias, activation="silu", implementation="sm100").sum(dtype="float32")

    found = kernels(lowered(jax.grad(loss, (0, 1, 2)), x, w, bias))
    assert found.count(("jgg_mm", "sm100")) == 2
    assert found.count(("jgg_wgrad", "sm100")) == 1


def test_lists_of_rows_are_copied(monkeypatch):
    live(monkeypatch, 100)
    x, w = jnp.zeros((T, 1, K), "bfloat16"), operands()[1]
    index = np.arange(T, dtype=np.int32) % G
    f = lambda x, w: jgg.gather_mm(x, w, rhs_indices=index)
    ((target, name, given, _),) = calls(lowered(f, x, w))
    assert (target, name) == ("jgg_mm", "sm100")
    assert given[0] == f"{T}x{K}xbf16"


def test_long_sums_are_parts(monkeypatch):
    live(monkeypatch, 100)
    x = jax.ShapeDtypeStruct((8, 2**17 + 512), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((1, 2**17 + 512, 8), jnp.bfloat16)
    found = calls(lowered(lambda x, w: mm(x, w, np.array([8])), x, w))
    assert len(found) > 1
    assert {(name, results[0]) for _, name, _, results in found} == {("sm100", "8x8xf32")}


def test_few_matrices_of_many_rows_are_cut(monkeypatch):
    live(monkeypatch, 100)
    x = jax.ShapeDtypeStruct((2**15, 128), jnp.bfloat16)
    f = lambda x, y: jgg.segmented_mm(x, y, np.array([(0, 2**15)]), transpose_a=True)
    ((target, name, given, results),) = calls(lowered(f, x, x))
    assert (target, name) == ("jgg_wgrad", "sm100")
    parts = results[0].split("x")[0]
    assert int(parts) >= 4
    assert given[2] == f"{parts}x2xi32"
    assert results[0] == f"{parts}x128x128xf32"


def test_nothing_to_compute_calls_nothing(monkeypatch):
    live(monkeypatch, 100)
    x, w = operands()
    assert kernels(lowered(mm, x[:0], w)) == []
    assert "sm100" not in str(kernels(lowered(mm, x, w[:0], SIZES[:0])))


def test_a_call_on_each_device_of_shard_map():
    x, w = operands()
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("d")
    f = jax.shard_map(
        lambda x, w, s: mm(x, w, s, implementation="sm100"),
        mesh=mesh, in_specs=(jax.sharding.PartitionSpec(), spec, spec), out_specs=spec,
    )  # fmt: skip
    ((_, name, given, _),) = calls(lowered(f, x, w, jnp.asarray(SIZES)))
    assert name == "sm100"
    assert given[1:] == [f"{G // 2}x{K}x{N}xbf16", f"{G // 2}xi32"]


def test_what_a_mixture_of_experts_takes(monkeypatch, rng):
    """Both products of a layer, forward and back. Tokens are copied, activations are XLA's."""
    live(monkeypatch, 100)
    experts, d, f = 4, 64, 128
    shapes = (256, d), (experts, d, 2 * f), (experts, f, d)
    x, up, down = (oracle.random(rng, shape).astype("bfloat16") for shape in shapes)
    weight, index = jax.lax.top_k(oracle.random(rng, (256, experts)), 2)

    def loss(x, up, down):
        return jgg.moe_mlp(x, up, down, index, weight, activation="swiglu").sum(dtype="float32")

    found = kernels(lowered(jax.grad(loss, (0, 1, 2)), x, up, down))
    assert found.count(("jgg_mm", "sm100")) == 3  # nobody needs the value
    assert found.count(("jgg_wgrad", "sm100")) == 2
    assert {name for target, name in found if target in ("jgg_mm", "jgg_wgrad")} == {"sm100"}


@pytest.mark.gpu
def test_the_handlers_refuse_another_gpu(monkeypatch):
    if 100 in extension.live_capabilities():
        pytest.skip("needs a GPU that is not Blackwell")
    monkeypatch.setattr(choose, "choose", lambda p: choose.configured(choose.KERNELS[p.op][0], p))
    x, w = operands()
    wgrad = lambda x, y: jgg.segmented_mm(x, y, np.array([(0, 50), (50, T)]), transpose_a=True)
    for function, args in ((mm, (x, w)), (wgrad, (x, jnp.zeros((T, N), "bfloat16")))):
        with pytest.raises(
            jax.errors.JaxRuntimeError, match=r"needs compute capability 10\.0, got"
        ):
            jax.jit(function)(*args).block_until_ready()
