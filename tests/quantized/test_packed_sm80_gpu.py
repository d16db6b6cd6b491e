"""Prepacked weights of four bits on the kernel of every GPU, ``implementation="sm80"``."""

import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from device_runs import run

import jax_groupgemm as jgg

pytestmark = pytest.mark.gpu
FORMATS = [("nvfp4", 16), ("mxfp4", 32), ("affine", 32), ("affine", 64), ("affine", 128)]
# Rows of segments, of tiles of 8, 64 and 128 rows: full ones, one more, none. Where all tiles of 8
# rows run at a time, more rows have such tiles, too.
SIZES = {
    "few": (1, 0, 7, 8, 9, 2, 17, 0, 3, 16, 25),
    "low": (1, 15, 0, 16, 17, 64, 65, 33, 130, 95, 4, 600, 330),
    "wide": (1, 1500, 0, 127, 128, 1291, 700),
}
FEW, MANY = "PackedFewRowsSm80Kernel", "PackedSm80Kernel"


def weight(rng, mode, group, groups, n, k, dtype, scale_shape=None):
    scale = None
    if mode == "nvfp4":
        scale = jnp.asarray(rng.uniform(0.5, 2, scale_shape or (groups,)), "float32")
    return oracle.random_quantized(rng, (groups, n, k), mode, 4, group, dtype, scale)


def qmm(x, q, sizes, **options):
    return jgg.grouped_qmm(x, q, sizes, implementation="sm80", **options)


def ran(kernels) -> dict[str, int]:
    return {of: sum(of in name for name in kernels) for of in (FEW, MANY)}


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("mode", "group"), FORMATS)
def test_values(rng, mode, group, dtype, sizes):
    """Plain, gated, and rounded to x's dtype; rows of no segment are zeros."""
    few, sizes = sizes == "few", np.array(SIZES[sizes])
    n, k = 384, 9 * (128 if group == 128 else 64)
    q = weight(rng, mode, group, len(sizes), n, k, dtype)
    x = oracle.random(rng, (sizes.sum() + 3, k), dtype)

    def products(x, w):
        f = lambda **more: qmm(x, w, jnp.asarray(sizes), **more)
        wide = {"preferred_element_type": "float32"}
        return f(**wide), f(**wide, activation="swiglu"), f()

    (out, gated, rounded), kernels = run(jax.jit(products), x, jgg.prepack(q))
    assert ran(kernels) == ({FEW: 3, MANY: 0} if few else {FEW: 0, MANY: 3})
    want = oracle.grouped_qmm(x[:-3], q, sizes)
    gate, value = np.split(want, 2, axis=1)
    near = 4e-6 if mode == "affine" else None
    oracle.assert_close(out[:-3], want, k=k, tolerance=near)
    oracle.assert_close(rounded[:-3], want, k=k)
    oracle.assert_close(gated[:-3], gate / (1 + np.exp(-gate)) * value, tolerance=1e-5)
    assert not np.asarray(out)[-3:].any()
    assert not np.asarray(rounded)[-3:].any()


@pytest.mark.parametrize(("mode", "group"), FORMATS[:2])
@pytest.mark.parametrize("sizes", ["few", "low"])
def test_float32_rows(rng, mode, group, sizes):
    """In three bfloat16 parts, and an activation by XLA."""
    sizes = np.array(SIZES[sizes])
    q = weight(rng, mode, group, len(sizes), 128, 192, "float32")
    x = oracle.random(rng, (sizes.sum() + 3, 192), "float32")
    f = lambda x, q: qmm(x, q, jnp.asarray(sizes), activation="relu")
    out, kernels = run(jax.jit(f), x, jgg.prepack(q))
    assert sum(ran(kernels).values()) == 1
    want = np.maximum(oracle.grouped_qmm(x[:-3], q, sizes), 0)
    oracle.assert_close(out[:-3], want, k=192)
    assert not np.asarray(out)[-3:].any()


@pytest.mark.parametrize("sizes", ["few", "low"])
def test_options(rng, sizes):
    sizes = np.array(SIZES[sizes])
    q = weight(rng, "affine", 64, len(sizes), 192, 320, "bfloat16")
    x = oracle.random(rng, (sizes.sum(), 320), "bfloat16")
    bias, scale = oracle.random(rng, (len(sizes), 192), "bfloat16"), oracle.random(rng, len(x))
    f = lambda x, q, bias, scale: qmm(
        x, q, jnp.asarray(sizes), bias=bias, activation="silu", row_scale=scale,
        preferred_element_type="float32",
    )  # fmt: skip
    out, kernels = run(jax.jit(f), x, jgg.prepack(q), bias, scale)
    assert sum(ran(kernels).values()) == 1
    want = oracle.grouped_qmm(x, q, sizes) + np.repeat(oracle.f64(bias), sizes, axis=0)
    want = want / (1 + np.exp(-want)) * oracle.f64(scale)[:, None]
    oracle.assert_close(out, want, tolerance=1e-5)


@pytest.mark.parametrize("rows", [6, 300])
def test_one_matrix_and_a_scale_of_each_column(rng, rows):
    q = weight(rng, "nvfp4", 16, 1, 320, 192, "bfloat16", (1, 320))
    x = oracle.random(rng, (rows, 192), "bfloat16")
    out = jax.jit(lambda x, q: qmm(x, q, jnp.array([rows])))(x, jgg.prepack(q))
    oracle.assert_close(out, oracle.grouped_qmm(x, q, [rows]), k=192)


def test_groups_of_other_devices(rng):
    """An offset: rows of groups that are not here are zeros."""
    q = weight(rng, "mxfp4", 32, 3, 128, 256, "bfloat16")
    sizes = np.array([5, 90, 0, 31, 12], np.int32)
    x = oracle.random(rng, (sizes.sum(), 256), "bfloat16")
    f = lambda x, q: qmm(x, q, jnp.asarray(sizes), group_offset=jnp.array([1]))
    out = jax.jit(f)(x, jgg.prepack(q))
    want = oracle.grouped_qmm(x[5:126], q, sizes[1:4])
    oracle.assert_close(out[5:126], want, k=256)
    assert not np.asarray(out[:5]).any()
    assert not np.asarray(out[126:]).any()


def test_gradients_and_other_weights_are_unpacked(rng):
    """Gradients of x, float32 x beside affine weights, eight bits."""
    sizes = np.array([9, 40, 3])
    q = weight(rng, "affine", 64, 3, 128, 192, "bfloat16")
    x = oracle.random(rng, (52, 192), "bfloat16")
    ct = oracle.random(rng, (52, 128), "bfloat16")
    f = lambda x, q: qmm(x, q, jnp.asarray(sizes))
    dx, kernels = run(jax.jit(lambda x, q, ct: jax.vjp(lambda x: f(x, q), x)[1](ct)[0]),
                      x, jgg.prepack(q), ct)  # fmt: skip
    assert not any(ran(kernels).values())
    w = oracle.f64(jgg.dequantize(q, "bfloat16"))
    ends = np.cumsum(sizes)
    parts = [
        oracle.f64(ct[e - s : e]) @ w[g] for g, (s, e) in enumerate(zip(sizes, ends, strict=True))
    ]
    oracle.assert_close(dx, np.concatenate(parts), k=128)
    out, kernels = run(jax.jit(f), x.astype(jnp.float32), jgg.prepack(q))
    assert not any(ran(kernels).values())
    want = [oracle.f64(x[e - s : e]) @ oracle.f64(jgg.dequantize(q, "float32"))[g].T
            for g, (s, e) in enumerate(zip(sizes, ends, strict=True))]  # fmt: skip
    oracle.assert_close(out, np.concatenate(want), k=192)
    eight = oracle.random_quantized(rng, (3, 128, 192), "affine", 8, 64, "bfloat16")
    out, kernels = run(jax.jit(f), x, jgg.prepack(eight))
    assert not any(ran(kernels).values())
    oracle.assert_close(out, oracle.grouped_qmm(x, eight, sizes), k=192)


# On this GPU as if it were another one: nobody names a kernel there, and a module that a process
# without a GPU lowers has a plan for Hopper.
PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from jax import export
import jax_groupgemm as jgg
w = jnp.full((3, 128, 128), 6, jnp.bfloat16)  # nvfp4 holds it
q = jgg.prepack(jgg.quantize(w, mode="nvfp4", contract=-1))
x, s = jnp.ones((40, 128), jnp.bfloat16), jnp.array([9, 0, 31])
f = jax.jit(lambda x, q, s: jgg.grouped_qmm(x, q, s))
assert (np.asarray(f(x, q, s), np.float32) == 768).all()
print(*(line for line in f.lower(x, q, s).as_text().splitlines() if "@jgg" in line))
"""


@pytest.mark.parametrize("gpu", ["capability=80,processors=108", "capability=89,processors=128,"
                                 "shared_memory=101376"])  # fmt: skip
def test_other_gpus(gpu):
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=os.environ | {"JGG_PRETEND_GPU": gpu},
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    assert re.search(r'@jgg_qmm_packed\(.*way = "generic"', ran.stdout)


def test_a_plan_for_hopper_on_another_gpu(tmp_path, rng):
    """A process without a GPU lowers prepacked weights for Hopper; the handler runs the kernel of
    every GPU where it meets another one."""
    q = jgg.prepack(weight(rng, "nvfp4", 16, 3, 128, 192, "bfloat16"))
    x, s = oracle.random(rng, (40, 192), "bfloat16"), jnp.array([9, 0, 31])
    want = np.asarray(jax.jit(lambda *o: qmm(*o))(x, q, s), np.float32)
    np.savez(tmp_path / "arrays.npz", x=np.asarray(x, np.float32), s=np.asarray(s), want=want,
             weight=np.asarray(q.weight), scales=np.asarray(q.scales),
             global_scale=np.asarray(q.global_scale))  # fmt: skip
    lower, load = (text.replace("FOLDER", str(tmp_path)) for text in (LOWER, LOAD))
    for text, platform, gpu in ((lower, "cpu", ""), (load, "cuda", "capability=86")):
        environment = os.environ | {"JAX_PLATFORMS": platform, "JGG_PRETEND_GPU": gpu}
        subprocess.run([sys.executable, "-c", text], env=environment, timeout=300, check=True)


_OPERANDS = """
import jax, jax.numpy as jnp, numpy as np
from jax import export
import jax_groupgemm as jgg
a = np.load("FOLDER/arrays.npz")
q = jgg.Quantized(a["weight"], a["scales"], global_scale=a["global_scale"], mode="nvfp4", bits=4,
                  group_size=16, layout="sm90")
operands = jnp.asarray(a["x"], jnp.bfloat16), q, jnp.asarray(a["s"])
"""
LOWER = (
    _OPERANDS
    + """
f = jax.jit(lambda x, q, s: jgg.grouped_qmm(x, q, s))
module = export.export(f, platforms=["cuda"], disabled_checks=[
    export.DisabledSafetyCheck.custom_call("jgg_qmm_packed")])(*operands)
assert '@jgg_qmm_packed(' in module.mlir_module() and 'way = "generic"' not in module.mlir_module()
open("FOLDER/module", "wb").write(module.serialize())
"""
)
LOAD = (
    _OPERANDS
    + """
out = export.deserialize(bytearray(open("FOLDER/module", "rb").read())).call(*operands)
np.testing.assert_array_equal(np.asarray(out, np.float32), a["want"])
"""
)
