"""FP8 of operands that are divided among devices, Auto and Explicit: what is lowered for a GPU, and
values where a CPU is divided as a GPU is."""

import functools
import json
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from fp8_shardings import KINDS, SHARDED, assert_trees_close
from jax.interpreters import mlir
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import mesh_of, needs_two_devices

import jax_groupgemm as jgg
from jax_groupgemm._core import composed, partition, partitioner, segments
from jax_groupgemm._core.products import Mm

pytestmark = needs_two_devices
RECIPES = {
    "block": jgg.FP8Recipe(),
    "tensor": jgg.FP8Recipe(scaling="tensor"),
    "delayed": jgg.FP8Recipe(scaling="delayed", accumulate="fast"),
}
T, G, N, K = 64, 4, 512, 256
SIZES = np.array([20, 0, 13, 25], np.int32)  # the last rows have no group
CALLS = {
    "block": {"jgg_fp8_quantize", "jgg_fp8_grouped_mm", "jgg_fp8_grouped_wgrad"},
    "tensor": {"jgg_fp8_largest", "jgg_fp8_cast", "jgg_fp8_grouped_mm", "jgg_fp8_grouped_wgrad"},
}
CALLS["delayed"] = CALLS["tensor"]
# Less work for the compiler.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


# ---- what is lowered for a GPU -----------------------------------------------------------------


def struct(mesh, shape, *spec, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def on_every_device(mesh, tree):
    return jax.tree.map(lambda a: struct(mesh, a.shape, dtype=a.dtype), tree)


def cuda_text(f, *args) -> str:
    fresh = lambda *args: f(*args)
    return jax.jit(fresh).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def divided(text: str) -> list[tuple[bytes, list, list]]:
    """Calls that XLA divides: configuration, and types of operands and results."""
    found = []
    for line in text.splitlines():
        if "custom_call @jgg_product(" in line:
            config = re.search(r'backend_config = "((?:[^"\\]|\\.)*)"', line)
            assert config is not None
            types = line.rsplit(" : (", 1)[1].split(" -> ")
            found.append((config[1].replace(r"\22", '"').encode(), *map(types_of, types)))
    return found


DTYPES = {
    "bf16": "bfloat16", "f32": "float32", "i32": "int32", "ui32": "uint32",
    "f8E4M3FN": "float8_e4m3fn", "f8E5M2": "float8_e5m2", "i1": "bool",
}  # fmt: skip


def types_of(text: str) -> list[jax.ShapeDtypeStruct]:
    words = [of.split("x") for of in re.findall(r"tensor<([^>]*)>", text)]
    return [jax.ShapeDtypeStruct([*map(int, of[:-1])], DTYPES[of[-1]]) for of in words]


def names(text: str) -> Counter:
    return Counter(json.loads(config)["name"] for config, *_ in divided(text))


def linear(recipe):
    def step(x, w, sizes, ct, state):
        f = lambda x, w, s: jgg.fp8_grouped_linear(x, w, sizes, recipe=recipe, state=s)
        out, pull = jax.vjp(f, x, w, state)
        return out, *pull(ct)

    return step


def linear_types(mesh, name: str, scaling: str):
    x, w, out = SHARDED[name]
    state = jax.eval_shape(jgg.FP8State.new) if scaling == "delayed" else None
    return (
        struct(mesh, (T, K), *x), struct(mesh, (G, N, K), *w),
        struct(mesh, (G,), dtype="int32"), struct(mesh, (T, N), *out), on_every_device(mesh, state),
    )  # fmt: skip


@pytest.mark.parametrize("scaling", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("hopper")
def test_linear_is_kernels(scaling, kind):
    """Under Auto sharding XLA divides their calls; on an Explicit mesh, casts, and each device has
    calls of products."""
    mesh = mesh_of((2,), ("d",), kind)
    with jax.set_mesh(mesh):
        text = cuda_text(linear(RECIPES[scaling]), *linear_types(mesh, "N", scaling))
    products = Counter(re.findall(r"custom_call @(jgg_fp8_\w+)\(", text))
    found, wanted = names(text), {"jgg_fp8_grouped_mm": 2, "jgg_fp8_grouped_wgrad": 1}
    if kind == AxisType.Explicit:
        assert products == wanted
        assert set(found) == CALLS[scaling] - set(wanted)
    else:
        assert not products
        assert set(found) == CALLS[scaling]
        assert {name: found[name] for name in wanted} == wanted


@pytest.mark.parametrize(
    ("n", "k", "block", "words"),
    [
        (384, 256, (128, 128), ("tk", "tk", "gnk", "gnk", ".", "tn")),
        (200, 256, (128, 128), ("tk", "tk", "g.k", "g.k", ".", "t.")),  # the last block is cut
        (384, 200, (128, 128), ("t.", "t.", "gn.", "gn.", ".", "tn")),
        (128, 128, (128, 128), ("tk", "t.", "gnk", "g..", ".", "tn")),  # one block is that of parts
        (200, 200, None, ("tk", "", "gnk", "g..", ".", "tn")),
    ],
)
@pytest.mark.usefixtures("hopper")
def test_which_axes_may_be_divided(n, k, block, words):
    """Those of whole blocks."""
    of_x = {"block": None} if block is None else {}
    quantized = lambda shape, **options: jax.eval_shape(
        functools.partial(jgg.fp8_quantize, **options), jax.ShapeDtypeStruct(shape, "bfloat16")
    )
    x, w = quantized((T, k), **of_x), quantized((G, n, k), block=block)
    mesh = mesh_of((2,), ("d",), AxisType.Auto)
    with jax.set_mesh(mesh):
        types = *on_every_device(mesh, (x, w)), struct(mesh, (G,), dtype="int32")
        ((config, *_),) = divided(cuda_text(jgg.fp8_grouped_mm, *types))
    call, _ = partitioner._read(config)
    assert (*call.product.words, *call.product.results) == words


MOE = {"tokens": 64, "d": 256, "f": 512, "e": 4, "k": 2}
MOE_SPECS = {
    "T": (P("d"), P(), P()),
    "F": (P(), P(None, None, "d"), P(None, "d")),
    "E": (P(), P("d"), P("d")),
}


def moe(recipe):
    def step(x, up, down, index, weight, ct, state):
        run = lambda x, up, down, weight, state: jgg.moe_mlp(
            x, up, down, index, weight, recipe=recipe, state=state
        )
        out, pull = jax.vjp(run, x, up, down, weight, state)
        return out, *pull(ct)

    return step


@pytest.mark.parametrize(("scaling", "name"), [("block", "F"), ("delayed", "T")])
@pytest.mark.usefixtures("hopper")
def test_layer_is_kernels_under_auto(scaling, name):
    """All products and all casts; the rest is XLA's."""
    mesh, (tokens, d, f, e, k) = mesh_of((2,), ("d",), AxisType.Auto), MOE.values()
    of_x, of_up, of_down = MOE_SPECS[name]
    state = (jax.eval_shape(jgg.FP8State.new),) * 2 if scaling == "delayed" else None
    types = (
        struct(mesh, (tokens, d), *of_x), struct(mesh, (e, d, 2 * f), *of_up),
        struct(mesh, (e, f, d), *of_down), struct(mesh, (tokens, k), *of_x, dtype="int32"),
        struct(mesh, (tokens, k), *of_x, dtype="float32"), struct(mesh, (tokens, d), *of_x),
        on_every_device(mesh, state),
    )  # fmt: skip
    with jax.set_mesh(mesh):
        text = cuda_text(moe(RECIPES[scaling]), *types)
    found = names(text)
    assert set(found) == CALLS[scaling]
    assert (found["jgg_fp8_grouped_mm"], found["jgg_fp8_grouped_wgrad"]) == (4, 2)
    assert set(re.findall(r"custom_call @(jgg_\w+)\(", text)) == {"jgg_product"}


@pytest.mark.parametrize("scaling", ["block", "tensor"])
@pytest.mark.usefixtures("hopper")
def test_what_a_device_runs(scaling):
    """XLA asks for it: kernels, of half of the rows, that add up or compare what they found."""
    mesh = mesh_of((2,), ("d",), AxisType.Auto)
    with jax.set_mesh(mesh):
        text = cuda_text(linear(RECIPES[scaling]), *linear_types(mesh, "T", scaling))
    ran = {}
    for config, *types in divided(text):
        call, _ = partitioner._read(config)
        program = of_a_device(config, call.product, *types)
        targets = re.findall(r"custom_call @(jgg_\w+)\(", program)
        assert len(targets) == 1, call.name
        ran.setdefault(call.name, program)
        # A cast of no codes finds the largest number.
        assert targets[0] == call.name.replace("largest", "cast")
    assert set(ran) == CALLS[scaling]
    assert f"tensor<{T // 2}x{K}xf8E4M3FN>" in ran["jgg_fp8_grouped_mm"]
    if scaling == "tensor":
        assert "stablehlo.maximum" in ran["jgg_fp8_largest"]
        assert "all_reduce" in ran["jgg_fp8_largest"]


def of_a_device(config: bytes, parts, operands, results) -> str:
    """The program where two devices have parts of rows."""
    import jaxlib.xla_client as xc

    shapes, outs = (
        [xc.Shape.array_shape(np.dtype(of.dtype), of.shape) for of in types]
        for types in (operands, results)
    )

    def sharding(word):
        tiles = [2 if letter in "tr" else 1 for letter in word]
        return xc.HloSharding.iota_tile(tiles) if 2 in tiles else xc.HloSharding.replicate()

    of_operands, of_results = ([*map(sharding, words)] for words in (parts.words, parts.results))
    out, of_out = outs[0], of_results[0]
    if len(outs) > 1:
        out = xc.Shape.tuple_shape(outs)
        of_out = xc.HloSharding.tuple_sharding(out, of_results)
    module, *_ = partitioner._partition(shapes, of_operands, out, of_out, config)
    with mlir.make_ir_context():
        return str(mlir.ir.Module.parse(module))


# ---- values, where a CPU's operations are divided as a GPU's ------------------------------------


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Definitions are divided where kernels would be."""
    monkeypatch.setattr(composed.Composed, "_has_call", lambda *_: True)


def place(mesh, tree, spec):
    return jax.tree.map(lambda a: jax.device_put(a, NamedSharding(mesh, P(*spec[: a.ndim]))), tree)


QUANTIZE = {
    "rows": ({}, P("d"), (T, K), True),
    "columns": ({}, P(None, "d"), (T, K), False),
    "along rows": ({"axis": 0}, P(None, "d"), (T, K), True),
    "experts": ({"block": (128, 128)}, P("d"), (G, N, K), False),
    "tiles": ({"block": (128, 128)}, P(None, "d"), (G, N, K), False),
    "matrices": ({"block": None, "scale_format": "e8m0"}, P(None, "d"), (G, N, K), False),
    "one scale": ({"block": None}, P("d"), (T, K), True),
    "cut blocks": ({}, P(None, "d"), (T, 192), True),
    "at random": ({"stochastic_rounding_key": jax.random.key(3)}, P("d"), (T, K), True),
}


@pytest.mark.parametrize("name", QUANTIZE)
@pytest.mark.one_in(2)
@pytest.mark.usefixtures("as_on_a_gpu")
def test_quantize(rng, name):
    """The same bits as on one device. Only what is rounded at random is left to XLA."""
    options, spec, shape, grouped = QUANTIZE[name]
    x = oracle.random(rng, shape).at[..., 0, 0].set(50)
    more = {"group_sizes": jnp.asarray(SIZES)} if grouped else {}
    f = jit(functools.partial(jgg.fp8_quantize, **options))
    want = f(x, **more)
    mesh = mesh_of((2,), ("d",), AxisType.Auto)
    run = jit(lambda x, **more: jgg.fp8_quantize(x, **options, **more))
    with jax.set_mesh(mesh):
        given = place(mesh, x, spec), place(mesh, more, ())
        assert ("jgg_product" in run.lower(given[0], **given[1]).as_text()) == (name != "at random")
        got = run(given[0], **given[1])
    for one, other in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize(
    ("scaling", "kind", "name"),
    [
        ("block", AxisType.Auto, "K"), ("delayed", AxisType.Auto, "T"),
        ("delayed", AxisType.Explicit, "T"),
        *(
            pytest.param(scaling, kind, name, marks=pytest.mark.weekly)
            for scaling in ("block", "tensor") for kind in KINDS for name in ("T", "N", "G")
        ),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("as_on_a_gpu")
def test_linear(rng, scaling, kind, name):
    """Results, gradients and, to the bit, what states see are those of one device."""
    of_x, of_w, of_out = SHARDED[name]
    x, w, ct = (oracle.random(rng, shape) for shape in ((T, K), (G, N, K), (T, N)))
    x, ct = x.at[0, 0].set(99), ct.at[0, 0].set(77)  # the largest numbers are on one device
    state = jgg.FP8State.new() if scaling == "delayed" else None
    args = x, w, jnp.asarray(SIZES), ct, state
    want = jit(linear(RECIPES[scaling]))(*args)
    mesh = mesh_of((2,), ("d",), kind)
    with jax.set_mesh(mesh):
        specs = of_x, of_w, P(), of_out, P()
        placed = [place(mesh, a, spec) for a, spec in zip(args, specs, strict=True)]
        program = jit(linear(RECIPES[scaling])).lower(*placed)
        assert names(program.as_text())
        compiled = program.compile()
        got = compiled(*placed)
    assert_trees_close(got[:3], want[:3])
    for one, other in zip(*map(jax.tree.leaves, (got[3], want[3])), strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.sharding.is_fully_replicated
    if jax.default_backend() == "cpu" and (scaling, name) == ("delayed", "T"):
        # dy is known here before the result is: XLA makes one operation of all maxima.
        sums = re.findall(r"= (.*?) all-reduce\(", compiled.as_text() or "")
        assert len([of for of in sums if "u32" in of]) == 1


@pytest.mark.parametrize(
    ("scaling", "name"),
    [
        ("delayed", "F"),
        *(
            pytest.param(scaling, name, marks=pytest.mark.weekly)
            for scaling, name in (("block", "F"), ("block", "E"), ("delayed", "T"))
        ),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("as_on_a_gpu")
def test_layer_under_auto(rng, scaling, name):
    """The layer's values are those of one device, and so is what states see."""
    tokens, d, f, e, k = MOE.values()
    of_x, of_up, of_down = MOE_SPECS[name]
    x, ct = oracle.random(rng, (tokens, d)), oracle.random(rng, (tokens, d))
    up, down = oracle.random(rng, (e, d, 2 * f)) / 16, oracle.random(rng, (e, f, d)) / 20
    index = jnp.asarray(rng.integers(-1, e, (tokens, k)), jnp.int32)
    weight = jnp.asarray(rng.random((tokens, k)), "float32")
    state = (jgg.FP8State.new(),) * 2 if scaling == "delayed" else None
    args = x, up, down, index, weight, ct, state
    want = jit(moe(RECIPES[scaling]))(*args)
    mesh = mesh_of((2,), ("d",), AxisType.Auto)
    specs = of_x, of_up, of_down, of_x, of_x, of_x, P()
    with jax.set_mesh(mesh):
        placed = [place(mesh, a, spec) for a, spec in zip(args, specs, strict=True)]
        program = jit(moe(RECIPES[scaling])).lower(*placed)
        assert names(program.as_text())["jgg_fp8_grouped_mm"] == 4
        got = program.compile()(*placed)
    assert_trees_close(got[:5], want[:5])
    for one, other in zip(*map(jax.tree.leaves, (got[5:], want[5:])), strict=True):
        np.testing.assert_array_equal(one, other)


# ---- rows of other devices' weights -------------------------------------------------------------


def test_rows_of_others_are_zeros_before_they_are_added():
    """Also where nobody reads rows of no group."""
    product = Mm(rows=T, out_dtype="float32", clears_rest=False)
    operands = (
        jnp.zeros((T, K)), jnp.zeros((G, K, N)), segments.sizes(jnp.asarray(SIZES))
    )  # fmt: skip
    leaves, tree = jax.tree.flatten(operands)
    call, seen = partition.Call("mm", tree, product), []

    def run(x, w, metadata, product):
        del metadata, w
        seen.append(product)
        return jnp.zeros((x.shape[0], N))

    for spec, clears in ((P("d"), True), (P(None, None, "d"), False)):
        shapes = [a.shape for a in leaves[:2]]
        plan = partition.plan_by(
            call, partition.Named({"d": 2}), [P(), spec, P()], [*shapes, (T, N)], leaves
        )
        parts = [jnp.zeros((T, K)), jnp.zeros((G // 2, K, N)), leaves[2]]
        jax.make_jaxpr(functools.partial(plan.per_device, run), axis_env=[("d", 2)])(*parts)
        assert seen.pop().clears_rest == clears
