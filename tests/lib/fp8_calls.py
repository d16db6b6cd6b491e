"""Small products of FP8 operands, and the custom calls that they are lowered to."""

import functools
import re

import numpy as np
import oracle
from lowered_calls import types

import jax_groupgemm as jgg

SIZES = np.array([5, 0, 130, 64], np.int32)
T, K, N, G = 210, 200, 140, 4
CALL = r"custom_call @(jgg_fp8_grouped\w+)"


def x_and_w(rng, k=K, n=N):
    x, w = oracle.random(rng, (T, k)), oracle.random(rng, (G, n, k))
    return jgg.fp8_quantize(x), jgg.fp8_quantize(w, block=(128, 128))


def x_and_dy(rng, k=K, n=N):
    along_t = functools.partial(jgg.fp8_quantize, axis=0, group_sizes=SIZES)
    return along_t(oracle.random(rng, (T, k))), along_t(oracle.random(rng, (T, n)))


def mm(x, w, sizes=SIZES, **kwargs):
    return jgg.fp8_grouped_mm(x, w, sizes, **kwargs)


def wgrad(x, dy, existing_out=None, **kwargs):
    return jgg.fp8_grouped_wgrad(x, dy, SIZES, existing_out=existing_out, **kwargs)


def calls(text: str) -> list[str]:
    return re.findall(CALL, text)


def signature(text: str) -> tuple[str, list[str], list[str]]:
    """The one call of the kernel, and types of its operands and results."""
    (line,) = [line for line in text.splitlines() if re.search(CALL, line)]
    return calls(line)[0], *types(line)
