"""Every argument of every operation replaced by what it cannot be, or by an array of another dtype:
an error of ours that names both, and never one from inside.

``--fuzz N`` tries N of them for each operation, otherwise a few daily and all weekly.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jax_groupgemm as jgg
from jax_groupgemm._core import operations as registry

pytestmark = pytest.mark.filterwarnings("ignore:jgg.prepack")  # it returns Q as it is
X, W, S = jnp.ones((16, 64)), jnp.ones((3, 64, 8)), jnp.array([4, 0, 9])
Q = oracle.random_quantized(np.random.default_rng(0), (3, 8, 64), "affine")
INDEX, WEIGHT = jnp.zeros((16, 2), jnp.int32), jnp.ones((16, 2))
NAMED = {"preferred_element_type": None, "implementation": None}
NUMBERS = jax.lax.RaggedDotDimensionNumbers((([1], [1]), ([], [])), [0], [0])
OPTIONS = {"bias": jnp.ones((3, 8)), "activation": None, "row_scale": jnp.ones(16)}


@functools.cache
def calls():
    """Arguments that are right, by operation. Only their shapes and dtypes are looked at."""
    of, experts = oracle.zeros_of, jnp.ones((3, 8, 64))
    routing = of(jgg.route, INDEX, 3)
    along_k, along_t = of(jgg.nvfp4_quantize, X), of(jgg.nvfp4_quantize, X, axis=0, group_sizes=S)
    nvfp4_w = of(jgg.nvfp4_quantize, experts)
    fp8, fp8_t = of(jgg.fp8_quantize, X), of(jgg.fp8_quantize, X, axis=0, group_sizes=S)
    fp8_w = of(jgg.quantize, experts, mode="fp8")
    return {
        "grouped_mm": {
            "x": X, "w": W, "group_sizes": S, "group_offset": None, "transpose_w": False, **OPTIONS,
            "existing_out": jnp.ones((16, 8)), "precision": None, **NAMED,
        },
        "segmented_mm": {
            "a": X.T[:5], "b": W[0, :16], "segments": jnp.array([[0, 3]]), "transpose_a": False,
            "transpose_b": False, "precision": None, **NAMED,
        },
        "gather_mm": {
            "a": X[:, None], "b": W, "lhs_indices": S, "rhs_indices": S, "sorted_indices": False,
            "precision": None, **NAMED,
        },
        "ragged_dot": {
            "lhs": X, "rhs": W, "group_sizes": S, "precision": None, "preferred_element_type": None,
            "group_offset": None, "out_sharding": None,
        },
        "ragged_dot_general": {
            "lhs": X, "rhs": W, "group_sizes": S, "ragged_dot_dimension_numbers": NUMBERS,
            "precision": None, "preferred_element_type": None, "group_offset": None,
            "out_sharding": None,
        },
        "grouped_qmm": {
            "x": X, "w": Q, "group_sizes": S, "group_offset": None, "transpose_w": True, **OPTIONS,
            "adapter": None, **NAMED,
        },
        "gather_qmm": {
            "x": X[:, None], "w": Q, "lhs_indices": S, "rhs_indices": S, "transpose_w": True,
            "sorted_indices": False, **NAMED,
        },
        "quantized_matmul": {"x": X, "w": Q[0], "transpose_w": True, **NAMED},
        "quantize": {
            "w": jnp.ones((3, 64)), "mode": "affine", "bits": None, "group_size": None,
            "global_scale": None, "contract": -1, "block": None,
        },
        "dequantize": {"q": Q, "dtype": None},
        "prepack": {"w": Q, "scales_dtype": None, "strict": False},
        "nvfp4_quantize": {
            "x": X, "axis": -1, "group_sizes": None, "scale_2d": False,
            "stochastic_rounding_key": None, "hadamard": False, "layout": "linear",
        },
        "nvfp4_grouped_mm": {
            "x": along_k, "w": nvfp4_w, "group_sizes": S, "alpha": None, "bias": None, **NAMED,
        },
        "nvfp4_grouped_wgrad": {
            "x": along_t, "dy": along_t, "group_sizes": S, "alpha": None, "beta": None,
            "existing_out": jnp.ones((3, 64, 64)), "implementation": None,
        },
        "nvfp4_grouped_linear": {
            "x": X, "w": jnp.ones((3, 8, 64)), "group_sizes": S, "bias": None,
            "recipe": jgg.NVFP4Recipe(), "key": None,
        },
        "fp8_quantize": {
            "x": X, "block": (1, 128), "axis": -1, "group_sizes": None, "scale_format": "float32",
            "stochastic_rounding_key": None, "format": "e4m3",
        },
        "fp8_grouped_mm": {
            "x": fp8, "w": fp8_w, "group_sizes": S, "group_offset": None, **OPTIONS,
            "preferred_element_type": None, "accumulate": "fast", "implementation": None,
        },
        "fp8_grouped_wgrad": {
            "x": fp8_t, "dy": fp8_t, "group_sizes": S, "existing_out": jnp.ones((3, 64, 64)),
            "accumulate": "exact", "implementation": None,
        },
        "fp8_grouped_linear": {
            "x": X, "w": jnp.ones((3, 8, 64)), "group_sizes": S, "bias": None,
            "recipe": jgg.FP8Recipe(), "key": None, "quantized": None, "state": None,
        },
        "route": {
            "expert_index": INDEX, "num_experts": 3, "expert_offset": None, "max_rows": None,
        },
        "dispatch": {"x": X, "routing": routing},
        "combine": {"rows": jnp.ones((32, 4)), "routing": routing, "expert_weight": WEIGHT},
        "moe_mlp": {
            "x": X, "up": W, "down": jnp.ones((3, 4, 64)), "expert_index": INDEX,
            "expert_weight": WEIGHT, "activation": "swiglu", "up_bias": None, "down_bias": None,
            "transpose_w": None, "expert_offset": None, "axis_name": None, "transport": None,
            "max_rows": None, "recipe": None, "quantized": None, "key": None, "state": None,
            "precision": None, **NAMED,
        },
    }  # fmt: skip


JUNK = {
    "None": None, "a name": "junk", "a dict": {"a": 1}, "three axes": jnp.ones((2, 2, 2)),
    "a scalar": jnp.float32(1), "integers": jnp.ones((16, 64), jnp.int32),
    "complex": jnp.ones((16, 64), jnp.complex64), "bools": jnp.ones((16, 64), bool), "1.5": 1.5,
    "a list": [1, 2], "names": ["a"], "a Quantized": Q, "nothing": jnp.ones((0,)),
    "of the host": np.ones((16, 64)), "a function": len, "2**70": 2**70, "-1": -1, "True": True,
    "a type": int, "nan": float("nan"),
}  # fmt: skip
DTYPES = ["float16", "complex64", "bool", "int32", "uint8", "float8_e4m3fn", "float8_e8m0fnu",
          "float4_e2m1fn", "int4"]  # fmt: skip
OFFSET = {"group_offset": jnp.int32(0)}
MORE = {
    "grouped_mm": OFFSET, "ragged_dot": OFFSET, "ragged_dot_general": OFFSET, "grouped_qmm": OFFSET,
    "nvfp4_grouped_mm": {"alpha": jnp.ones(3), "bias": jnp.ones((3, 8))},
    "nvfp4_grouped_wgrad": {"alpha": jnp.ones(3), "beta": jnp.ones(3)},
    "nvfp4_grouped_linear": {"bias": jnp.ones((3, 8))},
    "moe_mlp": {
        "up_bias": jnp.ones((3, 8)), "down_bias": jnp.ones((3, 64)), "expert_offset": jnp.int32(0),
    },
}  # fmt: skip
OPERATIONS = list(registry.OPERATIONS)


def pytest_generate_tests(metafunc):
    if "count" not in metafunc.fixturenames:
        return
    count = metafunc.config.getoption("--fuzz")
    weekly = metafunc.config.getoption("--weekly")
    metafunc.parametrize("op", OPERATIONS)
    daily = 2 if "dtypes" in metafunc.function.__name__ else 6
    metafunc.parametrize("count", [(10000 if weekly else daily) if count is None else count])


def test_wrong_arguments(op, count, rng):
    arguments = calls()[op]
    pairs = [
        (name, what)
        for name, right in arguments.items()
        for what in JUNK
        if not (right is False and what == "True")
    ]
    refused = 0
    for i in rng.permutation(len(pairs))[:count]:
        name, what = pairs[i]
        refused += is_refused(op, {**arguments, name: JUNK[what]}, name, what)
    assert refused >= min(count, len(pairs)) // 4


def is_refused(op, given, name, what, promotion="standard") -> bool:
    """Whether there is an error, which is ours and names the argument."""
    try:
        with jax.numpy_dtype_promotion(promotion):
            jax.eval_shape(lambda: getattr(jgg, op)(**given))
    except (TypeError, ValueError) as error:
        message, start = str(error), f"jgg.{op}: "
        assert message.startswith(start), (name, what, message)
        assert name in message, (name, what, message)
        assert len(message) < 700, (name, what, message)
        assert ".." not in message.replace("...", ""), message
        assert ". because" not in message, message
        return True
    return False


def dtypes_of(op):
    """The calls whose arrays get other dtypes: with everything that may be an array."""
    arguments = calls()[op]
    more = {name: a for name, a in MORE.get(op, {}).items() if name in arguments}
    yield {**arguments, **more}
    if op == "moe_mlp":
        yield {**arguments, **more, "recipe": jgg.NVFP4Recipe()}
        yield {**arguments, **more, "implementation": "composed"}


def test_other_dtypes(op, count, rng):
    """An array of another dtype is an operand, or an error of ours, however JAX promotes dtypes."""
    cases = [
        (given, name, dtype, promotion)
        for given in dtypes_of(op)
        for name, a in given.items()
        if isinstance(a, jax.Array)
        for dtype in DTYPES
        for promotion in ("standard", "strict")
    ]
    for i in rng.permutation(len(cases))[:count]:
        given, name, dtype, promotion = cases[i]
        other = {**given, name: given[name].astype(dtype)}
        is_refused(op, other, name, (dtype, promotion), promotion)


@pytest.mark.parametrize("op", registry.OPERATIONS)
def test_every_argument_is_tried(op):
    assert list(calls()[op]) == list(inspect.signature(registry.OPERATIONS[op]).parameters)


@pytest.mark.parametrize("op", OPERATIONS)
def test_right_arguments(op):
    given = calls()[op]  # made outside of a trace, since they are kept
    with jax.numpy_dtype_promotion("standard"):
        jax.eval_shape(lambda: getattr(jgg, op)(**given))
