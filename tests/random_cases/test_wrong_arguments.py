"""Every argument of every operation replaced by what it cannot be: an error of ours that names
both, and never one from inside.

``--fuzz N`` tries N of them for each operation, otherwise a few daily and all weekly.
"""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jax_groupgemm as jgg

pytestmark = pytest.mark.filterwarnings("ignore:jgg.prepack")  # it returns Q as it is
X, W, S = jnp.ones((16, 64)), jnp.ones((3, 64, 8)), jnp.array([4, 0, 9])
Q = oracle.random_quantized(np.random.default_rng(0), (3, 8, 64), "affine")
INDEX, WEIGHT = jnp.zeros((16, 2), jnp.int32), jnp.ones((16, 2))
NAMED = {"preferred_element_type": None, "implementation": None}
OPTIONS = {"bias": jnp.ones((3, 8)), "activation": None, "row_scale": jnp.ones(16)}


def calls():
    """Arguments that are right, by operation."""
    routing = jgg.route(INDEX, 3)
    along_k, along_t = jgg.nvfp4_quantize(X), jgg.nvfp4_quantize(X, axis=0, group_sizes=S)
    nvfp4_w = jgg.nvfp4_quantize(jnp.ones((3, 8, 64)))
    fp8, fp8_t = jgg.fp8_quantize(X), jgg.fp8_quantize(X, axis=0, group_sizes=S)
    fp8_w = jgg.quantize(jnp.ones((3, 8, 64)), mode="fp8")
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
            "group_offset": None,
        },
        "grouped_qmm": {
            "x": X, "w": Q, "group_sizes": S, "group_offset": None, "transpose_w": True, **OPTIONS,
            **NAMED,
        },
        "gather_qmm": {
            "x": X[:, None], "w": Q, "lhs_indices": S, "rhs_indices": S, "transpose_w": True,
            "sorted_indices": False, **NAMED,
        },
        "quantized_matmul": {"x": X, "w": Q[0], "transpose_w": True, **NAMED},
        "quantize": {
            "w": jnp.ones((3, 64)), "mode": "affine", "bits": None, "group_size": None,
            "global_scale": None, "contract": -1,
        },
        "dequantize": {"q": Q, "dtype": None},
        "prepack": {"w": Q, "scales_dtype": None},
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
            "x": X, "axis": -1, "group_sizes": None, "scale_format": "float32",
            "stochastic_rounding_key": None, "format": "e4m3",
        },
        "fp8_grouped_mm": {
            "x": fp8, "w": fp8_w, "group_sizes": S, "group_offset": None, **OPTIONS, **NAMED,
        },
        "fp8_grouped_wgrad": {
            "x": fp8_t, "dy": fp8_t, "group_sizes": S, "existing_out": jnp.ones((3, 64, 64)),
            "implementation": None,
        },
        "fp8_grouped_linear": {
            "x": X, "w": jnp.ones((3, 8, 64)), "group_sizes": S, "bias": None,
            "recipe": jgg.FP8Recipe(), "key": None, "quantized": None,
        },
        "route": {
            "expert_index": INDEX, "num_experts": 3, "expert_offset": None, "max_rows": None,
        },
        "dispatch": {"x": X, "routing": routing},
        "combine": {"rows": jnp.ones((32, 4)), "routing": routing, "expert_weight": WEIGHT},
        "moe_mlp": {
            "x": X, "up": W, "down": jnp.ones((3, 4, 64)), "expert_index": INDEX,
            "expert_weight": WEIGHT, "activation": "swiglu", "up_bias": None, "down_bias": None,
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
OPERATIONS = list(calls())


def pytest_generate_tests(metafunc):
    if "count" not in metafunc.fixturenames:
        return
    count = metafunc.config.getoption("--fuzz")
    weekly = metafunc.config.getoption("--weekly")
    metafunc.parametrize("op", OPERATIONS)
    metafunc.parametrize("count", [(10000 if weekly else 6) if count is None else count])


def test_wrong_arguments(op, count, rng):
    arguments, refused = calls()[op], 0
    pairs = [(name, what) for name in arguments for what in JUNK]
    for i in rng.permutation(len(pairs))[:count]:
        name, what = pairs[i]
        if name == "activation" and op == "moe_mlp" and what == "of the host":
            continue  # numpy compares it with a name, element by element
        if arguments[name] is False and what == "True":
            continue
        given = {**arguments, name: JUNK[what]}
        try:
            with jax.numpy_dtype_promotion("standard"):
                jax.eval_shape(lambda given=given: getattr(jgg, op)(**given))
        except (TypeError, ValueError) as error:
            message, start = str(error), f"jgg.{op}: "
            assert message.startswith(start), (name, what, message)
            assert name in message, (name, what, message)
            assert len(message) < 700, (name, what, message)
            assert ".." not in message.replace("...", ""), message
            assert ". because" not in message, message
            refused += 1
    assert refused >= min(count, len(pairs)) // 4


@pytest.mark.parametrize("op", OPERATIONS)
def test_right_arguments(op):
    with jax.numpy_dtype_promotion("standard"):
        jax.eval_shape(lambda: getattr(jgg, op)(**calls()[op]))
