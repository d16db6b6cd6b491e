"""Every transformation of the FP8 training operation, against one example at a time.

With a quantizer that compiles at once: what the real one does to numbers is test_fp8_quantize's.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from fp8_shardings import CLOSE, KINDS, SHARDED, assert_trees_close, check_sharded
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import mapped_linear, mesh_of, needs_two_devices

import jax_groupgemm as jgg
from jax_groupgemm._fp8 import blocks, convert
from jax_groupgemm._quantized import padding

pytestmark = pytest.mark.default_device

# One shape for all, two blocks each way, so that few programs are compiled.
T, G, N, K = 20, 4, 256, 256
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
        positions, source = padding.padding(group_sizes, x.shape[0], blocks.GROUPED)
        x = padding.take_rows(x, source)
    x = x.swapaxes(-1, -2) if axis == -2 else x
    if seed is not None:
        x = x * jax.random.uniform(jax.random.wrap_key_data(seed), x.shape)
    bits = jax.lax.bitcast_convert_type(jnp.abs(x), jnp.uint32)
    amax = jax.lax.bitcast_convert_type(blocks.largest_of_blocks(bits, block), jnp.float32)
    codes = (x / jnp.maximum(jnp.abs(x).max(initial=0), 1e-9) * 4).astype(
        blocks.ELEMENTS[element].dtype
    )
    return codes, amax / 4, positions


def both_of_crude(op, x, *, block, axis):
    """Weights are quantized both ways by the same."""
    q = convert.quantized(op, x, block=block, axis=axis)
    q = dataclasses.replace(q, axis=-1)
    return q, convert.exchanged(q)


def lines_of_crude(x, group_sizes):
    """And so are rows, along either axis."""
    of = functools.partial(convert.quantized, "", x, block=blocks.LINE, group_sizes=group_sizes)
    return of(axis=-1), of(axis=-2)


@pytest.fixture(scope="module", autouse=True)
def quick():
    jax.clear_caches()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convert, "_quantize", crude)
        patch.setattr(convert, "quantized_both", both_of_crude)
        patch.setattr(convert, "quantized_lines", lines_of_crude)
        yield
    jax.clear_caches()


@pytest.fixture
def examples(rng):
    """Two of each: x, w, bias, the cotangent, sizes and key."""
    a = [oracle.random(rng, (2, *s)) for s in ((T, K), (G, N, K), (G, N), (T, N))]
    return *a, jnp.array([[9, 0, 3, 5], [0, 20, 0, 0]], jnp.int32), KEYS


def step(x, w, bias, ct, sizes, key):
    f = lambda x, w, bias: jgg.fp8_grouped_linear(x, w, sizes, bias=bias, key=key)
    out, vjp = jax.vjp(f, x, w, bias)
    return out, *vjp(ct)


one = jit(step)


def pick(args, i):
    return [a[i] for a in args]


VMAP = [
    (0, 0, 0, 0, 0, 0), (0, None, None, 0, None, None), (None, 0, 0, None, None, 0),
    (None, None, None, None, 0, None),
]  # fmt: skip


@pytest.mark.parametrize("axes", VMAP)
@pytest.mark.one_in(8)
def test_vmap_of_vjp(examples, axes):
    args = [a if d == 0 else a[0] for a, d in zip(examples, axes, strict=True)]
    got = jit(jax.vmap(step, axes))(*args)
    singles = [
        one(*(a[i] if d == 0 else a[0] for a, d in zip(examples, axes, strict=True)))
        for i in range(2)
    ]
    assert_trees_close(got, jax.tree.map(lambda *v: jnp.stack(v), *singles))


def second(x, w, ct, sizes, back, of_w):
    """Of dx the derivatives in ct and w, and of dw that in ct, which x is kept in codes for."""
    layer = lambda x, w: jgg.fp8_grouped_linear(x, w, sizes)
    dx = lambda ct, w: jax.vjp(lambda x: layer(x, w), x)[1](ct)[0]
    dw = lambda ct: jax.vjp(lambda w: layer(x, w), w)[1](ct)[0]
    return *jax.vjp(dx, ct, w)[1](back), *jax.vjp(dw, ct)[1](of_w)


def second_orders(rng):
    shapes = (T, K), (G, N, K), (T, N), (T, K), (G, N, K)
    x, w, ct, back, of_w = (oracle.random(rng, s) for s in shapes)
    return x, w, ct, jnp.array([9, 0, 3, 6], jnp.int32), back, of_w


@pytest.mark.weekly
def test_higher_orders(rng):
    """They are products of the same kinds, of operands that are quantized anew."""
    args = second_orders(rng)

    @jit
    def products(x, w, ct, sizes, back, of_w):
        layer = lambda x, w: jgg.fp8_grouped_linear(x, w, sizes)
        along_t = functools.partial(jgg.fp8_quantize, axis=0, group_sizes=sizes)
        sums = jgg.fp8_grouped_wgrad(along_t(back), along_t(ct), sizes)
        return layer(back, w), sums, layer(jgg.dequantize(along_t(x)), of_w)

    assert_trees_close(jit(second)(*args), products(*args))


SECOND_SPECS = P(None, "d"), P(None, None, "d"), P(), P(), P(None, "d"), P(None, None, "d")
SECOND_OUTS = P(), P(None, None, "d"), P()


@needs_two_devices
def test_types_of_higher_orders(rng):
    """Over an Explicit mesh derivatives are sharded as what they are of."""
    args, mesh = second_orders(rng), mesh_of((2,), ("d",), AxisType.Explicit)
    types = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, P(*spec[: a.ndim])))
        for a, spec in zip(args, SECOND_SPECS, strict=True)
    ]
    with jax.set_mesh(mesh):
        found = jax.eval_shape(second, *types)
    for out, of, spec in zip(found, (args[2], args[1], args[2]), SECOND_OUTS, strict=True):
        assert out.shape == of.shape
        want = NamedSharding(mesh.abstract_mesh, spec)
        assert out.sharding.is_equivalent_to(want, out.ndim)


@needs_two_devices
@pytest.mark.weekly
def test_higher_orders_sharded(rng):
    args = second_orders(rng)
    check_sharded(jit(second), args, SECOND_SPECS, AxisType.Explicit, SECOND_OUTS, CLOSE)


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


@needs_two_devices
@pytest.mark.parametrize("name", SHARDED)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.one_in(8)
def test_linear_sharded(rng, kind, name):
    x_spec, w_spec, out_spec = SHARDED[name]
    a = [oracle.random(rng, s) for s in ((T, K), (G, N, K), (G, N), (T, N))]
    args = *a, jnp.array([9, 0, 3, 6], jnp.int32), KEYS[0]
    specs = x_spec, w_spec, P(*w_spec[:2]), out_spec, P(), P()
    outs = (out_spec, *specs[:3]) if kind == AxisType.Explicit else (out_spec,)
    check_sharded(one, args, specs, kind, outs, CLOSE)


@needs_two_devices
@pytest.mark.parametrize("name", ["N", "K"])
@pytest.mark.parametrize(("n", "k"), [(384, 192), pytest.param(128, 384, marks=pytest.mark.weekly)])
def test_blocks_that_parts_cut(rng, name, n, k):
    """Three blocks, or one, on two devices: smaller ones have the same scales."""
    x_spec, w_spec, out_spec = SHARDED[name]
    a = [oracle.random(rng, s) for s in ((T, k), (2, n, k), (2, n), (T, n))]
    args = *a, jnp.array([9, 7], jnp.int32), None
    specs = x_spec, w_spec, P(*w_spec[:2]), out_spec, P(), P()
    outs = (out_spec, *specs[:3])
    check_sharded(one, args, specs, AxisType.Explicit, outs, CLOSE)


@needs_two_devices
def test_shard_map(examples):
    mesh = mesh_of((2,), ("d",), AxisType.Auto)
    assert_trees_close(*mapped_linear(jgg.fp8_grouped_linear, mesh, examples, one, jit))


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
