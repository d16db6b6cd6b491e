"""The custom calls of ``quantize`` and ``dequantize``: where they are taken, what they are given,
and on a GPU what they make, byte for byte."""

import functools
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_quantized import AFFINE, DTYPES, FP, bits_of
from thunks import custom_calls

import jax_groupgemm as jgg
from jax_groupgemm._kernels import choose

TARGETS = ("jgg_quantize", "jgg_dequantize")


def lowered(function, *operands, platform="cuda") -> str:
    return jax.jit(function).trace(*operands).lower(lowering_platforms=(platform,)).as_text()


def calls(text: str) -> list[tuple[str, list[str], list[str], str]]:
    """Of each: its target, types of its operands and results, and its attributes."""
    found = []
    for line in text.splitlines():
        if name := re.search(r"custom_call @(jgg_\w+)\(", line):
            operands, results = line.rsplit(" : (", 1)[1].split(" -> ")
            types = (re.findall(r"tensor<([^>]*)>", part) for part in (operands, results))
            # Some of them are dictionaries.
            attributes = re.search(r"mhlo.backend_config = \{((?:[^{}]|\{[^{}]*\})*)\}", line)
            assert attributes is not None
            found.append((name[1], *types, attributes[1]))
    return found


def make(shape, mode, dtype="float32", global_scale=None):
    scale = None if global_scale is None else jnp.ones(global_scale)
    return jax.eval_shape(
        functools.partial(jgg.quantize, mode=mode, global_scale=scale, contract=-1),
        jnp.zeros(shape, dtype),
    )


def test_affine():
    w = jnp.zeros((2, 6, 128), jnp.bfloat16)
    (call,) = calls(lowered(lambda w: jgg.quantize(w, bits=3), w))
    results = ["12x12xui32", "12x2xbf16", "12x2xbf16"]
    static = (
        "quantized = {{biases = true, bits = {} : i32, global_scale = false, "
        'group_size = 64 : i32, layout = "linear", mode = "affine"}}'
    ).format
    assert call == ("jgg_quantize", ["12x128xbf16"], results, static(3))
    q = make((2, 6, 128), "affine", "bfloat16")
    (call,) = calls(lowered(lambda q: jgg.dequantize(q, "float32"), q))
    operands = ["12x16xui32", "12x2xbf16", "12x2xbf16"]
    attributes = f"ordered = false, {static(4)}"
    assert call == ("jgg_dequantize", operands, ["12x128xf32"], attributes)


@pytest.mark.parametrize("shape", [None, (), (2,), (2, 6)])
def test_global_scale(shape):
    w = jnp.zeros((2, 6, 64), jnp.float16)
    scale = None if shape is None else jnp.ones(shape)
    (call,) = calls(lowered(lambda w, s: jgg.quantize(w, mode="nvfp4", global_scale=s), w, scale))
    size = [] if shape is None else [f"{int(np.prod(shape))}xf32"]
    assert call[1:3] == (["12x64xf16", *size], ["12x8xui32", "12x4xui8"])
    assert f"global_scale = {str(shape is not None).lower()}" in call[3]
    (call,) = calls(lowered(jgg.dequantize, make(w.shape, "nvfp4", global_scale=shape)))
    assert call[1:3] == (["12x8xui32", "12x4xui8", *size], [f"12x64x{'f32' if size else 'bf16'}"])


@pytest.mark.parametrize("scale_axis", [None, 0, 1])
def test_batch(rng, scale_axis):
    """One call of one array more, or of the same."""
    w = oracle.random(rng, (3, 5, 64))
    scale = jnp.ones({None: (), 0: (5,), 1: (3, 5)}[scale_axis])
    f = functools.partial(jgg.quantize, mode="nvfp4", contract=-1)
    g = jax.vmap(lambda w, s: f(w, global_scale=s), (1, scale_axis))
    ((_, operands, results, _),) = calls(lowered(g, w, scale))
    size = "1" if scale_axis is None else "5" if scale_axis == 0 else "15"
    assert operands == ["15x64xf32", f"{size}xf32"]
    assert results == ["15x8xui32", "15x4xui8"]
    back = lambda q: jax.vmap(jax.vmap(jgg.dequantize))(q)
    q = jax.eval_shape(jax.vmap(lambda w: jgg.quantize(w, mode="mxfp8")), w)
    ((_, operands, results, _),) = calls(lowered(back, q))
    assert (operands, results) == (["15x16xui32", "15x2xui8"], ["15x64xbf16"])


def test_other_layouts():
    """A prepacked weight is put in order first; stored exchanged, values are exchanged last."""
    q = jgg.prepack(jgg.quantize(jnp.ones((64, 64), jnp.bfloat16), contract=-1))
    assert q.layout == "sm90"
    assert [c[0] for c in calls(lowered(jgg.dequantize, q))] == ["jgg_dequantize"]
    q = jgg.nvfp4_quantize(jnp.ones((32, 20)), axis=0)
    ((_, _, results, _),) = calls(lowered(jgg.dequantize, q))
    assert results == ["20x32xf32"]


def two_devices(kind):
    return jax.make_mesh((2,), ("x",), axis_types=(kind,), devices=jax.local_devices()[:2])


def test_not_taken():
    """Elsewhere, of nothing, and where XLA cuts arrays."""
    w = jnp.zeros((48, 64))
    assert not calls(lowered(functools.partial(jgg.quantize, contract=-1), w, platform="tpu"))
    assert not calls(lowered(functools.partial(jgg.quantize, contract=-1), w[:0]))
    assert not calls(lowered(functools.partial(jgg.quantize, contract=-1), w[:, :0]))
    for kind in (AxisType.Auto, AxisType.Explicit):
        sharded = jax.device_put(w, NamedSharding(two_devices(kind), P("x")))
        assert not calls(lowered(functools.partial(jgg.quantize, contract=-1), sharded))


def test_sharded(rng):
    """Inside shard_map a device quantizes its own; where axes are Explicit, results are sharded."""
    w = oracle.random(rng, (4, 64))
    mesh = two_devices(AxisType.Auto)
    round_trip = lambda w: jgg.dequantize(jgg.quantize(w, mode="mxfp4"))
    mapped = jax.shard_map(round_trip, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    found = calls(lowered(mapped, w))
    assert [c[0] for c in found] == list(TARGETS)
    assert found[0][1] == ["2x64xf32"]
    want = np.asarray(round_trip(w))
    np.testing.assert_array_equal(jax.jit(mapped)(w), want)
    explicit = NamedSharding(two_devices(AxisType.Explicit), P("x"))
    out = jax.jit(round_trip)(jax.device_put(w, explicit))
    assert jax.typeof(out).sharding.spec == P("x", None)
    np.testing.assert_array_equal(out, want)


def test_export(rng):
    w = oracle.random(rng, (4, 64))
    f = jax.jit(lambda w: jgg.dequantize(jgg.quantize(w)))
    exported = jax.export.export(
        f, platforms=["cpu", "cuda"], disabled_checks=jgg.EXPORT_DISABLED_CHECKS
    )(w)
    assert all(name in exported.mlir_module() for name in TARGETS)
    loaded = jax.export.deserialize(exported.serialize())
    np.testing.assert_array_equal(loaded.call(w), f(w))


@pytest.mark.weekly
def test_elsewhere_as_defined(rng, monkeypatch):
    """The primitive means its definition: on this platform, batched, and differentiated."""
    w = oracle.random(rng, (3, 4, 128))
    scale = jnp.array([0.5, 2, 0.1], jnp.float32)
    ct = oracle.random(rng, (3, 4, 128))

    def results(w, scale, ct):
        q = jgg.quantize(w, bits=5)
        batched = jax.vmap(lambda w, s: jgg.quantize(w, mode="nvfp4", global_scale=s))(w, scale)
        value = lambda leaves, q: jgg.dequantize(
            jgg.Quantized(q.weight, *leaves, mode=q.mode, bits=q.bits, group_size=q.group_size)
        )
        loss = lambda leaves, q: (value(leaves, q) * ct).sum()
        affine = q.scales, q.biases, None
        two_level = batched.scales, None, scale
        grads = (
            jax.grad(loss, allow_int=True)(affine, q),
            jax.grad(jax.checkpoint(loss), allow_int=True)(two_level, batched)[2],
            jax.jvp(lambda s: value((q.scales, s, None), q), (q.biases,), (q.scales,))[1],
            jax.grad(
                lambda s: (
                    jgg.quantize(w, mode="nvfp4", global_scale=s).scales.astype("float32").sum()
                )
            )(jnp.float32(1)),
            jax.grad(lambda w: jgg.dequantize(jgg.quantize(w)).sum())(w),
        )
        return q, batched, jgg.dequantize(q), jgg.dequantize(batched), grads

    got = jax.jit(results)(w, scale, ct)
    round_trip = lambda w: jgg.dequantize(jgg.quantize(w))
    with monkeypatch.context() as patch:
        for target in TARGETS:
            patch.setitem(choose.KERNELS, target.removeprefix("jgg_"), ())
        jax.clear_caches()  # lowered with the calls
        assert not calls(lowered(round_trip, w))
        want = jax.jit(results)(w, scale, ct)
    jax.clear_caches()
    assert len(calls(lowered(round_trip, w))) == 2
    oracle.assert_leaves_equal(got, want)


# ---- on a GPU --------------------------------------------------------------------------------


def on_cpu(function, *args, **kwargs):
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        return jax.device_get(function(*jax.device_get(args), **jax.device_get(kwargs)))


def same_bytes(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert g.dtype == w.dtype
        np.testing.assert_array_equal(bits_of(g), bits_of(w))


def same_as_cpu(w, to=DTYPES, **options):
    w, options = jnp.asarray(w), {**options, "contract": -1}
    assert len(calls(lowered(functools.partial(jgg.quantize, **options), w))) == 1
    q = jgg.quantize(w, **options)
    same_bytes(jax.device_get(q), on_cpu(jgg.quantize, w, **options))
    for dtype in to:
        same_bytes(jax.device_get(jgg.dequantize(q, dtype)), on_cpu(jgg.dequantize, q, dtype=dtype))


@pytest.fixture
def arrays(request, rng):
    """Of every kind: see test_quantize_host. Rows of one group, and of an odd number of them."""
    from test_quantize_host import inputs

    def arrays(dtype, group):
        """``group``: codes that nothing cuts apart."""
        w = inputs(rng, dtype)
        return w, w[:, :group], w[:37, : 7 * group]

    return arrays


@pytest.mark.gpu
@pytest.mark.parametrize(("bits", "group", "dtype"), AFFINE)
def test_affine_bytes(arrays, bits, group, dtype):
    for w in arrays(dtype, max(group, 32) if bits % 2 else group):
        # A CPU takes subnormal scales and biases for zeros when it dequantizes.
        w = np.where(abs(w.astype(np.float32)) < 2.0**-90, w.dtype.type(0), w)
        same_as_cpu(w, bits=bits, group_size=group)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", FP)
@pytest.mark.parametrize("dtype", DTYPES)
def test_fp_bytes(arrays, mode, dtype):
    for w in arrays(dtype, FP[mode][1]):
        same_as_cpu(w, mode=mode)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_global_scale_bytes(arrays, dtype):
    for w in arrays(dtype, 16):
        amax = abs(w.astype(np.float32)).max(-1)
        rows = np.where(np.isfinite(amax), amax, 1).astype(np.float32) / np.float32(2688)
        rows[:8] = -0.37, 3e-40, 0, np.inf, np.nan, 1e38, 1, 2.0**-9
        for scale in (rows, rows[20], rows[2:3][0]):
            same_as_cpu(w, mode="nvfp4", global_scale=np.asarray(scale))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["affine", *FP])
def test_any_number_of_groups(rng, mode):
    """Tails of units, warps and blocks."""
    group = 32 if mode == "affine" else FP[mode][1]
    for groups in (1, 2, 3, 31, 33, 64, 65, 127, 255, 257, 511, 513, 4095):
        w = oracle.random(rng, (groups * group,), "bfloat16")
        same_as_cpu(w, mode=mode, group_size=group, to=["bfloat16", "float32"])
    w = oracle.random(rng, (33 * group,))
    for bits in (2, 3, 5, 6, 8) if mode == "affine" else ():
        for dtype in ("float32", "float16"):
            same_as_cpu(w.astype(dtype), bits=bits, group_size=group, to=["float16"])


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["affine", "nvfp4"])
def test_over_four_gib_and_two_launches(rng, mode):
    """More than 2^32 elements, so that the kernel is launched twice; more than 65535 rows."""
    rows, k = 65_601, 65_536
    scale = jnp.asarray(rng.random(rows) + 0.5, jnp.float32)
    base = oracle.random(rng, (k,), "bfloat16")
    w = jax.jit(lambda b, s: b * s[:, None].astype(jnp.bfloat16))(base, scale)
    assert w.size > 2**32
    per_row = scale / 2688 if mode == "nvfp4" else None
    q = jax.jit(functools.partial(jgg.quantize, mode=mode))(w, global_scale=per_row)
    out = jax.jit(jgg.dequantize, static_argnums=1)(q, "bfloat16")
    for start in (0, 65_534, rows - 3):
        part = slice(start, start + 3)
        cut = lambda a, part=part: None if a is None else a[part]
        got = jax.device_get(jax.tree.map(cut, (q, out[:, :4096])))
        want = on_cpu(jgg.quantize, w[part], mode=mode, global_scale=cut(per_row))
        same_bytes(got[0], want)
        same_bytes(got[1], on_cpu(jgg.dequantize, want, dtype="bfloat16")[:, :4096])


@pytest.mark.gpu
def test_same_bytes_every_time(rng):
    w = oracle.random(rng, (300, 4096), "bfloat16")
    scale = jnp.float32(0.002)
    f = jax.jit(
        lambda w: [
            jgg.quantize(w, bits=3),
            jgg.quantize(w, mode="mxfp8"),
            jgg.dequantize(jgg.quantize(w, mode="nvfp4", global_scale=scale)),
        ]
    )
    first = jax.device_get(f(w))
    for _ in range(50):
        same_bytes(jax.device_get(f(w)), first)


def chain(w, scale):
    """Four custom calls that depend on each other."""
    w = jgg.dequantize(jgg.quantize(w, mode="nvfp4", global_scale=scale), jnp.bfloat16)
    return jgg.dequantize(jgg.quantize(jnp.tanh(w), bits=6, group_size=32))


@pytest.mark.gpu
def test_command_buffer_replay(rng):
    """One executable, captured once, replayed with values that it has not seen."""
    ws = [oracle.random(rng, (33, 96), "bfloat16") * 2**i for i in range(4)]
    options = {"xla_gpu_graph_min_graph_size": 1}
    scale = jnp.float32(0.01)
    compiled = jax.jit(chain).lower(ws[0], scale).compile(compiler_options=options)
    alone = [chain(w, scale) for w in ws]
    for _ in range(3):
        for w, want in zip(ws, alone, strict=True):
            same_bytes(compiled(w, scale), want)


CAPTURED = """
import sys
import jax, jax.numpy as jnp
sys.path[:] = sys.argv[1].split(':')
import test_quantize_call
w = jnp.ones((33, 96), jnp.bfloat16)
jax.block_until_ready(jax.jit(test_quantize_call.chain)(w, jnp.float32(0.01)))
"""


@pytest.mark.gpu
def test_custom_calls_are_captured(tmp_path):
    flags = f"--xla_dump_to={tmp_path} --xla_gpu_graph_min_graph_size=1"
    command = [sys.executable, "-c", CAPTURED, ":".join(sys.path)]
    subprocess.run(command, env=os.environ | {"XLA_FLAGS": flags}, check=True)
    inside, outside = custom_calls(tmp_path, "jit_chain")
    assert len(inside) == 4
    assert not outside


@pytest.mark.gpu
def test_errors_of_a_handler_reach_python():
    static = {"mode": "affine", "bits": np.int32(4), "group_size": np.int32(64)}
    static |= {"layout": "linear", "biases": np.bool_(True), "global_scale": np.bool_(False)}
    results = (
        jax.ShapeDtypeStruct((4, 9), jnp.uint32),
        *[jax.ShapeDtypeStruct((4, 1), jnp.float32)] * 2,
    )
    call = jax.ffi.ffi_call("jgg_quantize", results)
    message = r"jgg.quantize: weight has shape \(4, 9\), expected \(R, K\*bits/32\) = \(4, 8\)"
    with pytest.raises((RuntimeError, ValueError), match=message):
        jax.block_until_ready(jax.jit(lambda: call(jnp.ones((4, 64)), quantized=static))())
