"""Every transformation of FP8 products and of training, against one example at a time.

Training has a quantizer that compiles at once: what the real one does to numbers is
test_fp8_quantize's.
"""

import dataclasses
import functools

import fp8_oracle
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import mesh_of, needs_two_devices

import jax_groupgemm as jgg
from jax_groupgemm._quantized import fp8, fp8_convert, padding

pytestmark = pytest.mark.default_device

G = 4
KEYS = jax.random.split(jax.random.key(5))
# Less work for the compiler.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def crude(x, group_sizes, seed, *, block, axis, scale_format, element):
    """In place of fp8_quantize's arithmetic: scales of a block's largest number, and codes that are
    the elements themselves, or random."""
    del scale_format
    x, positions = x.astype(jnp.float32), None
    if group_sizes is not None and axis == -1:
        x = jnp.where(padding.covered(group_sizes, x.shape[0])[:, None], x, jnp.float32(0))
    elif group_sizes is not None:
        positions, source = padding.padding(group_sizes, x.shape[0], fp8.GROUPED)
        x = padding.take_rows(x, source)
    x = x.swapaxes(-1, -2) if axis == -2 else x
    if seed is not None:
        x = x * jax.random.uniform(jax.random.wrap_key_data(seed), x.shape)
    bits = jax.lax.bitcast_convert_type(jnp.abs(x), jnp.uint32)
    amax = jax.lax.bitcast_convert_type(fp8.largest_of_blocks(bits, block), jnp.float32)
    codes = (x / jnp.maximum(jnp.abs(x).max(initial=0), 1e-9) * 4).astype(
        fp8.ELEMENTS[element].dtype
    )
    return codes, amax / 4, positions


@pytest.fixture
def quick():
    jax.clear_caches()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fp8_convert, "_quantize", crude)
        yield
    jax.clear_caches()


@pytest.fixture
def examples(rng):
    """Two of each: x, w, bias, the cotangent, sizes and key."""
    a = [oracle.random(rng, (2, *s)) for s in ((20, 24), (G, 40, 24), (G, 40), (20, 40))]
    return *a, jnp.array([[9, 0, 3, 5], [0, 20, 0, 0]], jnp.int32), KEYS


def step(x, w, bias, ct, sizes, key):
    f = lambda x, w, bias: jgg.fp8_grouped_linear(x, w, sizes, bias=bias, key=key)
    out, vjp = jax.vjp(f, x, w, bias)
    return out, *vjp(ct)


one = jit(step)


def pick(args, i):
    return [a[i] for a in args]


def assert_trees_close(got, want, tolerance=1e-5):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        oracle.assert_close(g, w, tolerance=tolerance)


VMAP = [
    (0, 0, 0, 0, 0, 0), (0, None, None, 0, None, None), (None, 0, 0, None, None, 0),
    (None, None, None, None, 0, None),
]  # fmt: skip


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("axes", VMAP)
@pytest.mark.one_in(4)
def test_vmap_of_vjp(examples, axes):
    args = [a if d == 0 else a[0] for a, d in zip(examples, axes, strict=True)]
    got = jit(jax.vmap(step, axes))(*args)
    singles = [
        one(*(a[i] if d == 0 else a[0] for a, d in zip(examples, axes, strict=True)))
        for i in range(2)
    ]
    assert_trees_close(got, jax.tree.map(lambda *v: jnp.stack(v), *singles))


@pytest.mark.weekly
def test_checkpoint_in_scan(rng):
    w, x = oracle.random(rng, (2, G, 16, 16)), oracle.random(rng, (20, 16))
    sizes = jnp.array([9, 0, 8, 1])

    def layer(x, w_key):
        return jnp.tanh(jgg.fp8_grouped_linear(x, w_key[0], sizes, key=w_key[1])), None

    def loss(x, w, body):
        return jax.lax.scan(body, x, (w, KEYS))[0].sum()

    def unrolled(x, w):
        for i in range(2):
            x, _ = layer(x, (w[i], KEYS[i]))
        return x.sum()

    got = jit(jax.grad(functools.partial(loss, body=jax.checkpoint(layer)), (0, 1)))(x, w)
    assert_trees_close(got, jit(jax.grad(unrolled, (0, 1)))(x, w))


def test_export(examples):
    """An operation whose operands are Quantized, with their blocks."""
    x, w, _, _, sizes, _ = pick(examples, 0)
    args = jgg.fp8_quantize(x), jgg.quantize(w, mode="fp8"), sizes
    f = jit(jgg.fp8_grouped_mm)
    exported = jax.export.export(
        f, platforms=["cpu", "cuda"], disabled_checks=jgg.EXPORT_DISABLED_CHECKS
    )(*args)
    loaded = jax.export.deserialize(exported.serialize())
    np.testing.assert_array_equal(loaded.call(*args), f(*args))


@pytest.mark.parametrize("axes", [(0, 0, 0), (0, None, None), (None, 0, 0)])
@pytest.mark.one_in(3)
def test_vmap_of_products(rng, axes):
    x = jgg.fp8_quantize(oracle.random(rng, (2, 20, 136)))
    w = jgg.quantize(oracle.random(rng, (2, G, 40, 136)), mode="fp8")
    sizes = jnp.array([[9, 0, 3, 5], [0, 20, 0, 0]])
    args = [a if d == 0 else jax.tree.map(lambda v: v[0], a)
            for a, d in zip((x, w, sizes), axes, strict=True)]  # fmt: skip
    got = jit(jax.vmap(jgg.fp8_grouped_mm, axes))(*args)
    for i in range(2):
        xi, wi, si = (
            jax.tree.map(lambda v, i=i: v[i], a) if d == 0 else a
            for a, d in zip(args, axes, strict=True)
        )
        want = oracle.grouped_mm(fp8_oracle.values(xi), fp8_oracle.values(wi), si, transpose_w=True)
        oracle.assert_close(got[i], want)


# ---- several devices -----------------------------------------------------------------------------


def check_sharded(f, args, specs, kind, out_specs, tolerance):
    want = f(*args)
    mesh = mesh_of((2,), ("d",), kind)
    put = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
    with jax.set_mesh(mesh):
        placed = [
            jax.tree.map(lambda leaf, spec=spec: put(leaf, P(*spec[: leaf.ndim])), a)
            for a, spec in zip(args, specs, strict=True)
        ]
        got = f(*placed)
    assert_trees_close(got, want, tolerance)
    for value, spec in zip(jax.tree.leaves(got), out_specs, strict=False):
        assert value.sharding.is_equivalent_to(NamedSharding(mesh, spec), value.ndim)


# Specs of x, of w and bias, and of the result.
SHARDED = {
    "T": (P("d"), P(), P("d")),
    "N": (P(), P(None, "d"), P(None, "d")),
    "K": (P(None, "d"), P(None, None, "d"), P()),
    "G": (P(), P("d"), P()),
}
KINDS = (AxisType.Auto, AxisType.Explicit)


@needs_two_devices
@pytest.mark.parametrize("name", SHARDED)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.one_in(6)
def test_qmm_sharded(rng, kind, name):
    """In whole blocks; values and gradients of x and scales."""
    x_spec, w_spec, out_spec = SHARDED[name]
    x, q = oracle.random(rng, (20, 256)), jgg.quantize(
        oracle.random(rng, (G, 512, 256)), mode="fp8", block=(128, 64)
    )  # fmt: skip

    @jit
    def f(x, q, sizes):
        def loss(x, scales):
            w = dataclasses.replace(q, scales=scales)
            out = jgg.grouped_qmm(x, w, sizes)
            return jnp.sin(out).sum(), out

        grads, out = jax.grad(loss, (0, 1), has_aux=True)(x, q.scales)
        return out, *grads

    args = x, q, jnp.array([9, 0, 3, 6])
    check_sharded(f, args, (x_spec, w_spec, P()), kind, (out_spec, x_spec, w_spec), 1e-5)


@needs_two_devices
@pytest.mark.parametrize("block", [(128, 128), None, (1, 200)])
@pytest.mark.one_in(3)
def test_blocks_that_are_cut(rng, block):
    """N and K that blocks do not divide are divided among devices all the same."""
    x, w = oracle.random(rng, (20, 200)), oracle.random(rng, (G, 200, 200))
    q = jgg.quantize(w, mode="fp8", block=block, contract=-1)
    args = x, q.weight, q.scales, jnp.array([9, 0, 3, 6])

    @jit
    def f(x, weight, scales, sizes):
        q = jgg.Quantized(weight, scales, mode="fp8", bits=8, group_size=None, block=block)  # pyright: ignore
        return jgg.grouped_qmm(x, q, sizes)

    for spec, x_spec, out in ((P(None, "d"), P(), P(None, "d")), (P(None, None, "d"), P(None, "d"),
                                                                 P())):  # fmt: skip
        check_sharded(f, args, (x_spec, spec, P(), P()), AxisType.Auto, (out,), 1e-5)


@needs_two_devices
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", SHARDED)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.one_in(6)
def test_linear_sharded(rng, kind, name):
    x_spec, w_spec, out_spec = SHARDED[name]
    a = [oracle.random(rng, s) for s in ((20, 256), (G, 256, 256), (G, 256), (20, 256))]
    args = *a, jnp.array([9, 0, 3, 6]), KEYS[0]
    specs = x_spec, w_spec, P(*w_spec[:2]), out_spec, P(), P()
    outs = (out_spec, *specs[:3]) if kind == AxisType.Explicit else (out_spec,)
    check_sharded(one, args, specs, kind, outs, 1e-5)


@needs_two_devices
@pytest.mark.usefixtures("quick")
def test_shard_map(examples):
    """Each device has rows and sizes of its own; gradients of what is replicated are summed, with
    check_vma."""
    x, w, bias, ct, sizes, keys = examples
    mapped = jax.shard_map(
        lambda x, w, b, s, k: jgg.fp8_grouped_linear(x, w, s[0], bias=b, key=k),
        mesh=mesh_of((2,), ("d",), AxisType.Auto),
        in_specs=(P("d"), P(), P(), P("d"), P()), out_specs=P("d"), check_vma=True,
    )  # fmt: skip
    rows = lambda a: a.reshape(-1, a.shape[-1])

    def f(x, w, bias, ct):
        out, vjp = jax.vjp(lambda x, w, b: mapped(x, w, b, sizes, keys[0]), x, w, bias)
        return out, *vjp(ct)

    got = jit(f)(rows(x), w[0], bias[0], rows(ct))
    a, b = (one(x[i], w[0], bias[0], ct[i], sizes[i], keys[0]) for i in range(2))
    joined = [jnp.concatenate(pair) for pair in zip(a[:2], b[:2], strict=True)]
    summed = [p + q for p, q in zip(a[2:], b[2:], strict=True)]
    assert_trees_close(got, (*joined, *summed))


@needs_two_devices
@pytest.mark.parametrize("spec", [P(None, "d"), P("d")])
@pytest.mark.one_in(2)
def test_quantize_sharded(rng, spec):
    """As x is, where blocks stay whole."""
    mesh = mesh_of((2,), ("d",), AxisType.Explicit)
    x = oracle.random(rng, (20, 256))
    want = jgg.fp8_quantize(x)
    with jax.set_mesh(mesh):
        q = jax.jit(jgg.fp8_quantize)(jax.device_put(x, NamedSharding(mesh, spec)))
        values = jax.jit(jgg.dequantize)(q)
    for got, leaf in zip(jax.tree.leaves(q), jax.tree.leaves(want), strict=True):
        assert got.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
        np.testing.assert_array_equal(got, leaf)
    np.testing.assert_array_equal(values, jgg.dequantize(want))


@pytest.mark.parametrize("transpose_w", [True, False])
@pytest.mark.one_in(2)
def test_experts_are_not_dequantized_as_a_whole(transpose_w):
    g, n = 4, 2048
    codes = jnp.ones((g, n, n), jnp.float8_e4m3fn)
    q = jgg.Quantized(codes, jnp.ones((g, 16, 16)), mode="fp8", bits=8, group_size=None,  # pyright: ignore
                      block=(128, 128))  # fmt: skip
    x = jnp.ones((16, n), jnp.bfloat16)
    sizes = np.array([3, 4, 0, 9])
    loss = lambda x, q: (jgg.grouped_qmm(x, q, sizes, transpose_w=transpose_w) ** 2).sum()
    compiled = jax.jit(jax.value_and_grad(loss)).lower(x, q).compile()
    # Less than one expert in float32, and than a copy of all codes.
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * n * n


# ---- what it costs, and nothing to do ------------------------------------------------------------


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("empty", ["rows", "columns", "groups", "contracted"])
@pytest.mark.one_in(4)
def test_nothing_to_multiply(empty):
    t, g, n, k = (0 if empty == e else size for e, size in
                  (("rows", 5), ("groups", 2), ("columns", 3), ("contracted", 7)))  # fmt: skip
    f = lambda x, w: jgg.fp8_grouped_linear(x, w, jnp.full(g, 2))

    @jit
    def run(x, w):
        out, vjp = jax.vjp(f, x, w)
        return out, *vjp(out)

    got = run(jnp.ones((t, k)), jnp.ones((g, n, k)))
    assert [a.shape for a in got] == [(t, n), (t, k), (g, n, k)]
    assert not any(np.asarray(a).any() for a in got)


def test_cost(examples):
    """Three products of the rows in groups; those of the weight gradient are padded to 128."""
    x, w, _, _, sizes, _ = pick(examples, 0)
    sizes = np.asarray(sizes)
    flops = 2 * 40 * 24  # of a row
    cost = jgg.cost.fp8_grouped_linear(x, w, sizes)
    assert cost.flops == 17 * flops
    loss = lambda x, w: jgg.fp8_grouped_linear(x, w, sizes).sum()
    assert jgg.cost.of(jax.grad(loss, (0, 1)), x, w).flops == (17 + 3 * 128) * flops
    q, qw = jgg.fp8_quantize(x), jgg.quantize(w, mode="fp8")
    alone = jgg.cost.fp8_grouped_mm(q, qw, sizes)
    read = 17 * 24 + 17 * 4 + 3 * (40 * 24 + 4) + sizes.nbytes + 20 * 40 * 2
    assert (alone.flops, alone.bytes_accessed) == (17 * flops, read)
