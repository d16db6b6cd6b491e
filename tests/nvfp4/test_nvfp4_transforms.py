"""Every transformation of the NVFP4 training operation, against one example at a time.

With a quantizer that compiles at once: what the real one does to numbers is test_nvfp4_quantize's.
"""

import functools

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import oracle
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_groupgemm as jgg
from jax_groupgemm._nvfp4 import layouts, quantize
from jax_groupgemm._quantized.codes import pack

pytestmark = pytest.mark.default_device

G = 3


def crude(x, group_sizes, seed, *, axis, scale_2d, hadamard, layout):
    """In place of nvfp4_quantize's arithmetic, which takes seconds to compile: one scale, and codes
    that are evenly spaced, or random."""
    del scale_2d, hadamard, layout
    x, padding, rows = x.astype(jnp.float32), None, x.shape[0]
    if group_sizes is not None and axis == -1:
        x = jnp.where(layouts.covered(group_sizes, rows)[:, None], x, jnp.float32(0))
    elif group_sizes is not None:
        padding = layouts.padding(group_sizes, rows, layouts.GROUPED)
        x = layouts.take_rows(x, padding.source)
    x = x.swapaxes(-1, -2) if axis == -2 else x
    if seed is not None:
        x = x * jax.random.uniform(jax.random.wrap_key_data(seed), x.shape)
    amax = jnp.abs(x).max((-2, -1), initial=0)
    magnitude = jnp.round(jnp.abs(x) / jnp.maximum(amax, 1e-9)[..., None, None] * 7)
    codes = magnitude.astype(jnp.uint32) | (x < 0).astype(jnp.uint32) << 3
    scales = jnp.full((*x.shape[:-1], x.shape[-1] // 16), 0x38, jnp.uint8)
    return pack(codes, 4), scales, amax / 6, padding and padding.positions


@pytest.fixture(scope="module", autouse=True)
def quick():
    jax.clear_caches()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantize, "_quantize", crude)
        yield
    jax.clear_caches()


# Less work for the compiler.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


KEYS = jax.random.split(jax.random.key(5))


@pytest.fixture
def examples(rng):
    """Two of each: x, w, bias, the cotangent, sizes and key."""
    a = [oracle.random(rng, (2, *s)) for s in ((20, 24), (G, 40, 24), (G, 40), (20, 40))]
    return *a, jnp.array([[9, 0, 8], [0, 20, 0]], jnp.int32), KEYS


def step(x, w, bias, ct, sizes, key, **options):
    """As :func:`run`, with sizes and key that are traced."""
    f = lambda x, w, bias: jgg.nvfp4_grouped_linear(x, w, sizes, bias=bias, key=key, **options)
    out, vjp = jax.vjp(f, x, w, bias)
    return out, *vjp(ct)


one = jit(step)


def second(x, w, bias, ct, sizes, key):
    """The derivatives of dx and of dw: of the latter in x too, which is kept."""
    recipe = jgg.NVFP4Recipe(high_precision=("wgrad",))

    def dx(ct, w):
        f = lambda x: jgg.nvfp4_grouped_linear(x, w, sizes, bias=bias, key=key)
        return jax.vjp(f, x)[1](ct)[0]

    def dw(ct, x):
        f = lambda w: jgg.nvfp4_grouped_linear(x, w, sizes, bias=bias, key=key, recipe=recipe)
        return jax.vjp(f, w)[1](ct)[0]

    return *jax.vjp(dx, ct, w)[1](x), *jax.vjp(dw, ct, x)[1](w)


def pick(args, i):
    return [a[i] for a in args]


assert_trees_close = functools.partial(oracle.assert_trees_close, tolerance=1e-5)


VMAP = [
    (0, None, None, 0, None, None), (None, 0, 0, None, None, 0), (None, None, None, None, 0, None),
    (0, 0, 0, 0, 0, 0),
]  # fmt: skip


@pytest.mark.parametrize("axes", VMAP)
@pytest.mark.parametrize("of", [second, step])
@pytest.mark.one_in(24)
def test_vmap_of_vjp(examples, axes, of):
    args = [a if d == 0 else a[0] for a, d in zip(examples, axes, strict=True)]
    got = jit(jax.vmap(of, axes))(*args)
    singles = [
        jit(of)(*(a[i] if d == 0 else a[0] for a, d in zip(examples, axes, strict=True)))
        for i in range(2)
    ]
    assert_trees_close(got, jax.tree.map(lambda *v: jnp.stack(v), *singles))


def test_vjp_of_vmap(examples):
    """Shared weights collect the gradients of the batch."""
    x, w, bias, ct, sizes, keys = examples
    batched = jax.vmap(lambda x, w, b, s, k: jgg.nvfp4_grouped_linear(x, w, s, bias=b, key=k),
                       (0, None, None, 0, 0))  # fmt: skip
    f = lambda x, w, bias: batched(x, w, bias, sizes, keys)
    got = jit(lambda *a: jax.vjp(f, *a)[1](ct))(x, w[0], bias[0])
    (_, *first), (_, *second) = (
        one(x[i], w[0], bias[0], ct[i], sizes[i], keys[i]) for i in range(2)
    )
    want = jnp.stack([first[0], second[0]]), first[1] + second[1], first[2] + second[2]
    assert_trees_close(got, want)


@pytest.mark.weekly
def test_checkpoint_in_scan(rng):
    w, x = oracle.random(rng, (2, G, 16, 16)), oracle.random(rng, (20, 16))
    sizes = jnp.array([9, 0, 8])

    def layer(x, w_key):
        w, key = w_key
        return jnp.tanh(jgg.nvfp4_grouped_linear(x, w, sizes, key=key)), None

    def loss(x, w, body):
        return jax.lax.scan(body, x, (w, KEYS))[0].sum()

    def unrolled(x, w):
        for i in range(2):
            x, _ = layer(x, (w[i], KEYS[i]))
        return x.sum()

    saved = jax.checkpoint(layer)
    got = jit(jax.grad(functools.partial(loss, body=saved), (0, 1)))(x, w)
    want = jit(jax.grad(unrolled, (0, 1)))(x, w)
    assert_trees_close(got, want)


@functools.cache
def mesh_of(kind) -> jax.sharding.Mesh:
    return meshes.mesh_of((2,), ("d",), kind)


def check_shard_map(examples, single):
    mesh = mesh_of(AxisType.Auto)
    assert_trees_close(*meshes.mapped_linear(jgg.nvfp4_grouped_linear, mesh, examples, single, jit))


def test_shard_map(examples):
    check_shard_map(examples, one)


def test_second_order_in_shard_map(examples):
    x, w, bias, ct, sizes, keys = examples
    w, bias, key = w[0], bias[0], keys[0]
    mine = lambda x, w, b, ct, s, k: second(x, w, b, ct, s[0], k)
    mapped = jax.shard_map(
        lambda *a: tuple(v[None] for v in mine(*a)),
        mesh=mesh_of(AxisType.Auto), in_specs=(P("d"), P(), P(), P("d"), P("d"), P()),
        out_specs=P("d"), check_vma=True,
    )  # fmt: skip
    rows = lambda a: a.reshape(-1, a.shape[-1])
    got = jit(mapped)(rows(x), w, bias, rows(ct), sizes, key)
    singles = [jit(second)(x[i], w, bias, ct[i], sizes[i], key) for i in range(2)]
    want = [jnp.stack(pair) for pair in zip(*singles, strict=True)]
    want[1] = jnp.broadcast_to(want[1].sum(0), want[1].shape)  # of w, which is replicated
    assert_trees_close(got, tuple(want))


# Specs of x, of w and bias, and of the result.
SHARDED = {
    "T": (P("d"), P(), P("d")),
    "N": (P(), P(None, "d"), P(None, "d")),
    "K": (P(None, "d"), P(None, None, "d"), P()),
    "G": (P(), P("d"), P()),
    "K of x": (P(None, "d"), P(), P()),
}


@pytest.mark.parametrize(
    ("kind", "name"),
    [(AxisType.Auto, "T"), (AxisType.Auto, "N"), *((AxisType.Explicit, name) for name in SHARDED)],
)
@pytest.mark.one_in(8)
def test_sharded(rng, kind, name):
    x_spec, w_spec, out_spec = SHARDED[name]
    a = [oracle.random(rng, s) for s in ((20, 32), (4, 32, 32), (4, 32), (20, 32))]
    args = *a, jnp.array([9, 0, 3, 6]), KEYS[0]
    want = one(*args)
    specs = x_spec, w_spec, P(*w_spec[:2]), out_spec, P(), P()
    with jax.set_mesh(mesh_of(kind)):
        put = lambda a, spec: jax.device_put(a, NamedSharding(mesh_of(kind), spec))
        got = one(*map(put, args, specs))
    assert_trees_close(got, want)
    assert got[0].sharding.is_equivalent_to(NamedSharding(mesh_of(kind), out_spec), 2)
    if kind == AxisType.Explicit:
        for grad, spec in zip(got[1:], specs, strict=False):
            assert grad.sharding.is_equivalent_to(NamedSharding(mesh_of(kind), spec), grad.ndim)


CLASHES = {
    ("T", "G"): "w shards G over ('d',), but x shards T over it",
    ("T", "N"): "w shards N over ('d',), but x shards T over it",
    ("K of x", "N"): "w shards N over ('d',), but x shards K over it",
}


@pytest.mark.parametrize(("of_x", "of_w"), CLASHES)
def test_one_mesh_axis_divides_one_axis(rng, of_x, of_w):
    """Under Explicit sharding; Auto sharding gathers."""
    x, w = oracle.random(rng, (20, 32)), oracle.random(rng, (4, 32, 32))
    sizes = jnp.array([9, 0, 3, 6])
    quantized = lambda x, w, sizes: jgg.nvfp4_grouped_mm(
        jgg.nvfp4_quantize(x), jgg.nvfp4_quantize(w), sizes
    )
    with jax.set_mesh(mesh_of(AxisType.Explicit)):
        put = lambda a, spec: jax.device_put(a, NamedSharding(mesh_of(AxisType.Explicit), spec))
        x, w = put(x, SHARDED[of_x][0]), put(w, SHARDED[of_w][1])
        instead = "use jax.sharding.reshard first"
        if (of_x, of_w) == ("T", "G"):
            instead = (
                "jgg.moe_mlp with a recipe is the layer for that. Its tokens and experts may share "
                "a mesh axis, and tokens travel to their experts. With jax.sharding.reshard every "
                "device gets all rows, or all groups"
            )
        for name, f in (
            ("nvfp4_grouped_linear", jgg.nvfp4_grouped_linear), ("nvfp4_grouped_mm", quantized)
        ):  # fmt: skip
            oracle.assert_raises(
                lambda f=f: jit(f)(x, w, sizes), ValueError,
                f"jgg.{name}: {CLASHES[of_x, of_w]}. Under Explicit sharding nothing is gathered "
                f"silently: {instead}",
            )  # fmt: skip


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("name", SHARDED)
@pytest.mark.one_in(10)
def test_second_order_sharded(rng, kind, name):
    x_spec, w_spec, out_spec = SHARDED[name]
    a = [oracle.random(rng, s) for s in ((20, 32), (4, 32, 32), (4, 32), (20, 32))]
    args = *a, jnp.array([9, 0, 3, 6]), KEYS[0]
    specs = x_spec, w_spec, P(*w_spec[:2]), out_spec, P(), P()
    with jax.set_mesh(mesh_of(kind)):
        put = lambda a, spec: jax.device_put(a, NamedSharding(mesh_of(kind), spec))
        got = jit(second)(*map(put, args, specs))
    assert_trees_close(got, jit(second)(*args))


def test_types_of_second_order(rng):
    """Over an Explicit mesh, also where dw has x in four bits."""
    mesh = mesh_of(AxisType.Explicit)
    at = lambda spec, *shape: jax.ShapeDtypeStruct(
        shape, "float32", sharding=NamedSharding(mesh, spec)
    )

    def of_dw(x, w, ct):
        f = lambda w: jgg.nvfp4_grouped_linear(x, w, jnp.array([9, 0, 3, 6]))
        return jax.vjp(lambda ct: jax.vjp(f, w)[1](ct)[0], ct)[1](w)[0]

    with jax.set_mesh(mesh):
        out = jax.eval_shape(
            of_dw, at(P(None, "d"), 20, 32), at(P(None, None, "d"), 4, 48, 32), at(P(), 20, 48)
        )
    assert out.shape == (20, 48)
    assert out.sharding.is_fully_replicated


def test_export(examples):
    args = pick(examples, 0)
    exported = jax.export.export(
        jit(step), platforms=["cpu", "cuda"], disabled_checks=jgg.EXPORT_DISABLED_CHECKS
    )(*args)
    loaded = jax.export.deserialize(exported.serialize()).call
    assert_trees_close(loaded(*args), one(*args))


HIGH = ("fprop", "dgrad", "wgrad")
TYPES = [
    pytest.param("bfloat16", "float32", (), marks=pytest.mark.weekly),
    ("bfloat16", "float32", HIGH), ("float32", "bfloat16", HIGH),
]  # fmt: skip


@pytest.mark.parametrize(("x_type", "w_type", "high"), TYPES)
def test_dtypes(examples, x_type, w_type, high):
    """Results and gradients have their operands' dtypes, and are near float64 where they may be."""
    x, w, bias, ct, sizes, key = pick(examples, 0)
    args = x.astype(x_type), w.astype(w_type), bias.astype("float16"), ct.astype(x_type)
    recipe = jgg.NVFP4Recipe(high_precision=high)
    got = jit(functools.partial(step, recipe=recipe))(*args, sizes, key)
    assert [a.dtype for a in got] == [x_type, x_type, w_type, "float16"]
    if high:
        x, w, bias, ct = map(oracle.f64, (*args[:1], args[1].astype(x_type), *args[2:]))
        dx, dw = oracle.grouped_mm_grads(x, w.swapaxes(1, 2), sizes, ct)
        oracle.assert_close(got[1], dx)
        oracle.assert_close(got[2], dw.swapaxes(1, 2))


@pytest.mark.parametrize("empty", ["rows", "columns", "groups", "contracted"])
@pytest.mark.one_in(2)
def test_nothing_to_multiply(empty):
    t, g, n, k = (0 if empty == e else size for e, size in
                  (("rows", 5), ("groups", 2), ("columns", 3), ("contracted", 7)))  # fmt: skip
    f = lambda x, w: jgg.nvfp4_grouped_linear(x, w, jnp.full(g, 2))
    out, vjp = jax.vjp(f, jnp.ones((t, k)), jnp.ones((g, n, k)))
    assert out.shape == (t, n)
    assert [a.shape for a in vjp(out)] == [(t, k), (g, n, k)]
    assert not any(np.asarray(a).any() for a in (out, *vjp(out)))


def test_cost(examples):
    """Three products of the rows in groups; those of the weight gradient are padded to 64."""
    x, w, _, _, sizes, _ = pick(examples, 0)
    loss = lambda x, w: jgg.nvfp4_grouped_linear(x, w, np.asarray(sizes)).sum()
    flops = 2 * 48 * 32  # of a row: N and K are padded to 16
    assert jgg.cost.nvfp4_grouped_linear(x, w, np.asarray(sizes)).flops == 17 * flops
    assert (
        jgg.cost.of(jax.grad(loss, (0, 1)), x, w).flops == (17 + 128) * flops
    )  # the forward product is not needed
