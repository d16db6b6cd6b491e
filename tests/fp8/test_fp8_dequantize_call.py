"""The custom call of ``dequantize`` in mode "fp8": where it is taken, what it is given, and on a
GPU what it makes, byte for byte."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from fp8_quantize_cases import any_codes
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_groupgemm as jgg
from jax_groupgemm._fp8 import convert

TARGET = "jgg_fp8_dequantize"
LINE, TILE = (1, 128), (128, 128)


def text_of(q, dtype="bfloat16", platform="cuda") -> str:
    run = lambda q: jgg.dequantize(q, dtype)
    return jax.jit(run).trace(q).lower(lowering_platforms=(platform,)).as_text()


def zeros(*shape, block=LINE, element="float8_e4m3fn"):
    make = lambda: jgg.fp8_quantize(jnp.zeros(shape), block=block)
    q = jax.jit(make)()
    return convert.made(q.weight.astype(element), q.scales, block=block)


@pytest.mark.parametrize(
    ("shape", "block", "seen", "scales"),
    [
        ((2, 3, 48, 200), TILE, "6x48x200", "6x1x2"),
        ((48, 200), LINE, "1x48x200", "1x48x2"),
        ((200,), LINE, "1x1x200", "1x1x2"),
    ],
)
def test_call(shape, block, seen, scales):
    text = text_of(zeros(*shape, block=block, element="float8_e5m2"), "float16")
    (line,) = [line for line in text.splitlines() if f"@{TARGET}(" in line]
    operands, result = line.rsplit(" : (", 1)[1].split(" -> ")
    assert re.findall(r"tensor<([^>]*)>", operands) == [f"{seen}xf8E5M2", f"{scales}xf32"]
    assert re.findall(r"tensor<([^>]*)>", result) == [f"{seen}xf16"]
    assert f"square = {str(block == TILE).lower()}" in line


def test_grouped_rows():
    """The kernel decodes padded rows, as they are stored; the groups' own are taken afterwards."""
    make = lambda: jgg.fp8_quantize(jnp.ones((100, 40)), axis=0, group_sizes=jnp.array([40, 60]))
    assert TARGET in text_of(jax.jit(make)())


def test_not_taken():
    """Elsewhere, of nothing, of other blocks and shapes, and where XLA cuts arrays."""
    q = zeros(48, 64)
    assert TARGET in text_of(q)
    assert TARGET not in text_of(q, platform="cpu")
    assert TARGET not in text_of(zeros(0, 64))
    assert TARGET not in text_of(zeros(48, 60))
    for block in (None, (1, 64), (64, 128)):
        assert TARGET not in text_of(zeros(48, 64, block=block))
    mesh = jax.make_mesh((2,), ("x",), devices=jax.local_devices()[:2])
    sharding = NamedSharding(mesh, P("x"))
    assert TARGET not in text_of(jax.tree.map(lambda a: jax.device_put(a, sharding), q))


def test_batches():
    """Matrices are one call, whichever axes vmap adds."""
    many = jgg.fp8_quantize(jnp.zeros((3, 2, 48, 64)))
    batch = jax.jit(jax.vmap(jax.vmap(jgg.dequantize)))
    text = batch.trace(many).lower(lowering_platforms=("cuda",)).as_text()
    (line,) = [line for line in text.splitlines() if f"@{TARGET}(" in line]
    assert "tensor<6x48x64xf8E4M3FN>" in line


# ---- on a GPU ----


def same_as_cpu(q, dtype):
    assert TARGET in text_of(q, dtype)
    run = lambda q: jgg.dequantize(q, dtype)
    got = np.asarray(jax.jit(run)(q))
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        want = np.asarray(jax.jit(run)(jax.device_get(q)))
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("block", [LINE, TILE])
@pytest.mark.parametrize("element", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_bytes(rng, dtype, element, block):
    for shape in ((256, 384), (3, 144, 264), (2, 2, 17, 8), (1, 400, 1000)):
        codes, scales = any_codes(rng, jnp.dtype(element), shape, block)
        q = convert.made(jnp.asarray(codes), jnp.asarray(scales), block=block)
        same_as_cpu(q, dtype)


@pytest.mark.gpu
def test_bytes_of_groups(rng):
    x, sizes = jnp.asarray(oracle.random(rng, (700, 200))), jnp.array([0, 300, 1, 0, 399])
    q = jax.jit(functools.partial(jgg.fp8_quantize, axis=0))(x, group_sizes=sizes)
    same_as_cpu(q, "float32")


@pytest.mark.gpu
def test_one_axis(rng):
    same_as_cpu(jgg.fp8_quantize(jnp.asarray(oracle.random(rng, (4096,)))), "bfloat16")
