"""Products with quantized weights for tests: small ones, and the kernels that take them."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jax_groupgemm as jgg
from jax_groupgemm import _call

SIZES = np.array([9, 0, 8], np.int32)
# What is differentiated beside x.
CASES = {
    "affine": ("affine", 3, 32, ("scales", "biases")),
    "affine N": ("affine", 4, 64, ("scales", "biases")),
    "nvfp4": ("nvfp4", 4, 16, ("global_scale",)),
    "nvfp4 scalar N": ("nvfp4", 4, 16, ("global_scale",)),
}


def needs(kernel: str) -> str:
    """The kernel, where the device has it."""
    if kernel == "sm90" and 90 not in _call.live_capabilities():
        pytest.skip("needs a Hopper GPU")
    return kernel


@functools.cache
def problem(name):
    """x, the differentiable leaves, and f of them, of sizes and of the packed weight."""
    rng, lead = np.random.default_rng(list(name.encode())), (3,)
    mode, bits, group, leaves = CASES[name]
    transpose_w = "N" not in name
    scale = None
    if mode == "nvfp4":
        scale = jnp.asarray(rng.uniform(0.5, 2, () if "scalar" in name else lead), jnp.float32)
    q = oracle.random_quantized(rng, (*lead, 5, 128), mode, bits, group, scale=scale)
    x = oracle.random(rng, (20, 128 if transpose_w else 5)) / 4

    def f(x, p, sizes=SIZES, weight=q.weight, product=None):
        w = dataclasses.replace(q, weight=weight, **p)
        return (product or jgg.grouped_qmm)(x, w, sizes, transpose_w=transpose_w)

    return x, {leaf: getattr(q, leaf) for leaf in leaves}, f, q
