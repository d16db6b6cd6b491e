"""No operation brings anything to the device, or back, that its user did not: forward, gradients
and batches, also outside of any program."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_groupgemm as jgg

RNG = np.random.default_rng(0)


def floats(*shape):
    return jnp.asarray(RNG.standard_normal(shape, np.float32))


SIZES, INDEX, SORTED = jnp.array([3, 4]), jnp.array([1, 0, 0, 1]), jnp.array([0, 0, 1, 1])
SEGMENTS, KEY = jnp.array([[0, 3], [2, 8]]), jax.random.key(0)
X, W = floats(8, 64), floats(2, 64, 32)
NUMBERS = jax.lax.RaggedDotDimensionNumbers((([1, 2], [1, 2]), ([0], [0])), [2], [])
NAMES = (
    "grouped_mm", "options", "segmented_mm", "gather_mm", "sorted", "lora_mm", "ragged_dot",
    "ragged_dot_general", "grouped_qmm", "gather_qmm", "quantized_matmul", "dequantize", "quantize",
    "prepack", "nvfp4_quantize", "nvfp4_grouped_mm", "nvfp4_grouped_wgrad", "nvfp4_grouped_linear",
    "fp8_grouped_linear", "moe_mlp", "max_rows", "nvfp4_experts", "fp8_experts",
)  # fmt: skip
# Before 0.12 JAX's own derivative of a slice and its like brings a zero to the device.
NOT_BEFORE_0_12 = (
    "options", "gather_mm", "sorted", "lora_mm", "gather_qmm", "quantized_matmul",
    "nvfp4_grouped_mm", "nvfp4_grouped_linear", "moe_mlp", "max_rows", "nvfp4_experts",
    "fp8_experts",
)  # fmt: skip


@functools.cache
def along_t():
    return jgg.nvfp4_quantize(floats(8, 64), axis=0, group_sizes=SIZES)


@functools.cache
def cases():
    """A function and its operands by name: made when a test runs, not when tests are listed."""
    quantized = jgg.quantize(floats(2, 48, 64))
    pairs, experts = jnp.array([[0, 1], [1, -1], [1, 0], [0, 0]]), (X[:4], W, floats(2, 16, 64))
    layer = lambda **more: (
        lambda x, up, down, weight, bias: jgg.moe_mlp(
            x, up, down, pairs, weight, down_bias=bias, **more
        )
    )
    experts = *experts, floats(4, 2), floats(2, 64)
    nvfp4 = jgg.nvfp4_quantize(floats(8, 64)), jgg.nvfp4_quantize(floats(2, 32, 64))
    return {
        "grouped_mm": (lambda x, w: jgg.grouped_mm(x, w, SIZES), X, W),
        "options": (
            lambda x, w, b, s, o: jgg.grouped_mm(
                x, w, SIZES, bias=b, activation="swiglu", row_scale=s, existing_out=o
            ), X, W, floats(2, 32), floats(8), floats(8, 16),
        ),
        "segmented_mm": (lambda a, b: jgg.segmented_mm(a, b, SEGMENTS), floats(3, 8), floats(8, 4)),
        "gather_mm": (lambda x, w: jgg.gather_mm(x, w, INDEX, INDEX), X[:, None], W),
        "sorted": (
            lambda x, w: jgg.gather_mm(x, w, INDEX, SORTED, sorted_indices=True), X[:, None], W
        ),
        "lora_mm": (
            lambda x, a, b, s: jgg.lora_mm(x, a, b, INDEX, row_scale=s), floats(4, 64),
            floats(2, 8, 64), floats(2, 32, 8), floats(4),
        ),
        "ragged_dot": (lambda x, w: jgg.ragged_dot(x, w, SIZES), X, W),
        "ragged_dot_general": (
            lambda x, y: jgg.ragged_dot_general(x, y, SIZES, NUMBERS), floats(2, 3, 4, 5),
            floats(2, 3, 4, 6),
        ),
        "grouped_qmm": (lambda x, q: jgg.grouped_qmm(x, q, SIZES, activation="silu"), X, quantized),
        "gather_qmm": (lambda x, q: jgg.gather_qmm(x, q, INDEX, INDEX), X[:, None], quantized),
        "quantized_matmul": (jgg.quantized_matmul, X, quantized[0]),
        "dequantize": (jgg.dequantize, quantized),
        "quantize": (lambda w: jgg.quantize(w).scales, floats(2, 48, 64)),
        "prepack": (lambda q: jgg.dequantize(jgg.prepack(q)), jgg.quantize(
            floats(2, 64, 64).astype("bfloat16"), contract=-1
        )),
        "nvfp4_quantize": (lambda x: jgg.nvfp4_quantize(x, group_sizes=SIZES).global_scale, X),
        "nvfp4_grouped_mm": (lambda x, w: jgg.nvfp4_grouped_mm(x, w, SIZES), *nvfp4),
        "nvfp4_grouped_wgrad": (
            lambda x, a: jgg.nvfp4_grouped_wgrad(x, x, SIZES, alpha=a), along_t(), floats(2)
        ),
        "nvfp4_grouped_linear": (
            lambda x, w, b: jgg.nvfp4_grouped_linear(x, w, SIZES, bias=b, key=KEY), floats(8, 24),
            floats(2, 20, 24), floats(2, 20),
        ),
        "fp8_grouped_linear": (
            lambda x, w, b: jgg.fp8_grouped_linear(x, w, SIZES, bias=b, key=KEY), floats(8, 24),
            floats(2, 20, 24), floats(2, 20),
        ),
        "moe_mlp": (layer(), *experts),
        "max_rows": (layer(max_rows=7), *experts),
        "nvfp4_experts": (layer(recipe=jgg.NVFP4Recipe(), key=KEY), *experts),
        "fp8_experts": (layer(recipe=jgg.FP8Recipe(), key=KEY, max_rows=7), *experts),
    }  # fmt: skip


def differentiated(f, args):
    """The value and the transpose of ones, in every leaf that is floating."""
    leaves, tree = jax.tree.flatten(args)
    moving = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating)]

    def of_moving(*values):
        given = dict(zip(moving, values, strict=True))
        return f(*tree.unflatten([given.get(i, leaf) for i, leaf in enumerate(leaves)]))

    return of_moving, [leaves[i] for i in moving]


@pytest.mark.parametrize("name", NAMES)
def test_no_transfers(name):
    assert tuple(cases()) == NAMES
    f, *args = cases()[name]
    f, values = differentiated(f, args)
    ones = jnp.ones_like(f(*values))
    older = jax.__version_info__ < (0, 12) and name in NOT_BEFORE_0_12
    if older or name in ("quantize", "nvfp4_quantize", "prepack"):
        # A gradient that is zero is made by JAX, with a transfer.
        with jax.transfer_guard("disallow"):
            assert f(*values).shape == ones.shape
        return
    with jax.transfer_guard("disallow"):
        out, vjp = jax.vjp(f, *values)
        grads = vjp(ones)
    assert out.shape == ones.shape
    assert [g.shape for g in grads] == [v.shape for v in values]


def test_no_transfers_of_tangents():
    layer, *values = cases()["max_rows"]
    with jax.transfer_guard("disallow"):
        y, dy = jax.jvp(layer, values, values)
    assert y.shape == dy.shape == (4, 64)


def test_no_transfers_of_a_batch():
    batch = jnp.stack([X, X])
    f = jax.vmap(lambda x: jgg.grouped_mm(x, W, SIZES, activation="silu"))
    g = jax.vmap(lambda x: jgg.gather_mm(x[:, None], W, INDEX, INDEX))
    with jax.transfer_guard("disallow"):
        assert f(batch).shape == (2, 8, 32)
        assert g(batch).shape == (2, 4, 1, 32)


def test_numbers_are_no_programs():
    """Each list and each number of Python would be a program of its own."""
    from jax_groupgemm._core import operations

    before = operations._program.cache_info().currsize
    for size in range(3):
        jgg.grouped_mm(X, W, [size, 1])
        jgg.grouped_mm(X, W, np.array([size, 1]))
        jgg.grouped_mm(X, W, SIZES, group_offset=size)
        jgg.nvfp4_grouped_wgrad(along_t(), along_t(), SIZES, alpha=float(size))
    assert operations._program.cache_info().currsize == before
