"""The kernel of a router's choice (ffi/moe/device/top_k.cuh), run on the host lane by lane, against
the definition."""

import ctypes

import host_program
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from host_memory import GUARD, aligned, copied
from host_program import pointer

from jax_groupgemm import router

pytestmark = host_program.needs_compiler

OPTIONS = {
    "softmax of the chosen": {},
    "softmax": {"renormalize": False, "scale": 1.5},
    "sigmoid": {"scores": "sigmoid", "renormalize": False},
    "shares of sigmoids, bias": {"scores": "sigmoid", "bias": True, "scale": 2.5},
    "softmax of the chosen, bias": {"bias": True},
    "groups": {"renormalize": False, "groups": 4, "top_groups": 2},
    "groups, bias": {"scores": "sigmoid", "bias": True, "groups": 4, "top_groups": 3},
}


class TopKArgs(ctypes.Structure):
    _fields_ = [
        *[(n, ctypes.c_void_p) for n in ("logits", "bias", "expert", "weight")],
        *[(n, ctypes.c_int32) for n in ("tokens", "experts", "k", "groups", "top_groups")],
        ("scale", ctypes.c_float),
        *[(n, ctypes.c_bool) for n in ("bfloat16", "sigmoid", "renormalize")],
    ]  # fmt: skip


@pytest.fixture(scope="module")
def kernel():
    return host_program.build_kernels("top_k_kernel").top_k_kernel


def run(kernel, logits, k, *, scores="softmax", bias=None, renormalize=True, scale=1.0, groups=1,
        top_groups=None):  # fmt: skip
    tokens, experts = logits.shape
    expert, weight = (aligned(4 * tokens * k, GUARD) for _ in range(2))
    arrays = copied(logits), None if bias is None else copied(bias), expert, weight
    args = TopKArgs(
        *(pointer(array) for array in arrays), tokens, experts, k, groups,
        groups if top_groups is None else top_groups, scale, logits.dtype == ml_dtypes.bfloat16,
        scores == "sigmoid", renormalize,
    )  # fmt: skip
    items = next(n for n in (1, 2, 4, 8, 16, 32) if 32 * n >= experts)
    kernel(ctypes.byref(args), items)
    assert all((memory[-GUARD:] == 0xAB).all() for memory in (expert, weight))
    values = lambda memory, dtype: memory[:-GUARD].view(dtype).reshape(tokens, k)
    return values(expert, np.int32), values(weight, np.float32)


def compare(kernel, logits, k, **options):
    expert, weight = run(kernel, logits, k, **options)
    want = router.choose(jnp.asarray(logits), k, **options)
    np.testing.assert_array_equal(expert, want.expert)
    np.testing.assert_allclose(weight, want.weight, rtol=2e-6, atol=2e-38)  # XLA has no subnormals


@pytest.mark.parametrize("experts", [4, 32, 60, 128, 256])
@pytest.mark.parametrize("name", OPTIONS)
def test_choices(rng, kernel, name, experts):
    options = dict(OPTIONS[name])
    if options.pop("bias", False):
        options["bias"] = rng.normal(size=experts).astype(np.float32)
    logits = rng.normal(size=(6, experts)).astype(np.float32)
    compare(kernel, logits, min(experts // 2, 8), **options)


@pytest.mark.parametrize(("experts", "k"), [(1, 1), (500, 32), (1024, 3), (33, 1)])
def test_sizes(rng, kernel, experts, k):
    compare(kernel, rng.normal(size=(5, experts)).astype(np.float32), k)


def test_equal_scores_and_bfloat16(rng, kernel):
    """The first expert of equal ones, in any lane; infinities, and both zeros."""
    logits = rng.integers(-2, 3, (4, 96)).astype(np.float32)
    compare(kernel, logits, 20)
    compare(kernel, logits.astype(ml_dtypes.bfloat16), 20)
    compare(kernel, -logits[:2] * 0, 20)
    logits[2, 40] = -np.inf
    logits[:, 7] = -np.inf
    compare(kernel, logits, 31, groups=4, top_groups=2, renormalize=False)
    compare(kernel, np.full((1, 40), -np.inf, np.float32), 3, scores="sigmoid")


def test_nan_stays_in_its_token(rng, kernel):
    logits = rng.normal(size=(3, 40)).astype(np.float32)
    logits[1, 33] = np.nan
    expert, weight = run(kernel, logits, 4)
    want, _ = run(kernel, logits[::2], 4)
    np.testing.assert_array_equal(expert[::2], want)
    assert expert[1, 0] == 33
    assert np.isnan(weight[1]).all()
    assert np.isfinite(weight[::2]).all()


SPECIAL = np.array(
    [np.nan, -np.nan, np.inf, -np.inf, 0, -0.0, -38, -87, -95, -200, 1, 20, 30], "f4"
)


@pytest.mark.parametrize("name", OPTIONS)
def test_special_values(rng, kernel, name):
    """NaN of both signs, infinities, zeros of both signs, and scores that underflow."""
    options = dict(OPTIONS[name])
    if options.pop("bias", False):
        options["bias"] = rng.normal(size=40).astype(np.float32)
        options["bias"][[3, 17]] = -np.inf
    finite = SPECIAL[3:]
    logits = np.concatenate([rng.choice(SPECIAL, (16, 40)), rng.choice(finite, (12, 40))])
    logits[:4], logits[4:8, 2:] = -np.inf, -np.inf
    logits[8:12], logits[12:16, 1:] = -100, -60
    compare(kernel, logits, 7, **options)
