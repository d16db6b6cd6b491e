"""Random damage to a ``Quantized``: an error that names the argument, or, where what is left is a
weight after all, its values. ``--fuzz N`` tries N of them for each operation."""

import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from random_calls import FORMATS, pick

import jax_groupgemm as jgg

pytestmark = pytest.mark.filterwarnings("ignore:jgg.prepack")  # it returns weights as they are
X, SIZES = jnp.ones((4, 128)), jnp.array([1, 3])
FORGED = object()  # a field that is absent, as of another version's pickle
OPERATIONS = {
    "dequantize": ("q", jgg.dequantize),
    "grouped_qmm": ("w", lambda q: jgg.grouped_qmm(X, q, SIZES)),
    "gather_qmm": ("w", lambda q: jgg.gather_qmm(X[:2, None], q)),
    "quantized_matmul": ("w", lambda q: jgg.quantized_matmul(X[None], q)),
    "prepack": ("w", jgg.prepack),
    "moe_mlp": (
        "up", lambda q: jgg.moe_mlp(X, q, DOWN, INDEX, jnp.ones((4, 2)), activation="relu"),
    ),
    "nvfp4_grouped_mm": ("w", lambda q: jgg.nvfp4_grouped_mm(rows(), q, SIZES)),
}  # fmt: skip
SHAPES = {"moe_mlp": (2, 128, 128)}  # where it is not (2, 8, 128)
DOWN = oracle.random_quantized(np.random.default_rng(0), (2, 128, 128), "affine")
INDEX = jnp.array([[0, 1]] * 4)
rows = functools.cache(lambda: oracle.zeros_of(jgg.nvfp4_quantize, X))
FIELDS = ("weight", "scales", "biases", "global_scale", "positions", "mode", "bits", "group_size",
          "axis", "layout")  # fmt: skip
STATIC = {
    "mode": ["affine", "mxfp4", "mxfp8", "nvfp4", "int4", "", 4, None, ["affine"]],
    "bits": [2, 3, 4, 5, 6, 8, 0, -4, 7, "4", 4.5, None, [4]],
    "group_size": [16, 32, 64, 128, 0, -1, 48, "64", None, [64]],
    "axis": [-1, -2, 0, 1, None, "x", [1]],
    "layout": ["linear", "sm90", "grouped", "swizzled", "", None, 1],
}
OTHERS = ["junk", 3.5, {"a": 1}, [1, [2]], object, float("nan"), True, -1]


def pytest_generate_tests(metafunc):
    count = metafunc.config.getoption("--fuzz")
    weekly = metafunc.config.getoption("--weekly")
    metafunc.parametrize("count", [(300 if weekly else 8) if count is None else count])
    metafunc.parametrize("op", OPERATIONS)


def damaged(rng, leaf):
    """An array of another shape or dtype, or none."""
    if leaf is None:
        shapes = [(), (2,), (2, 8, 2), (2, 8, 128), (0,)]
        return jnp.ones(pick(rng, shapes), pick(rng, ["float32", "uint8", "int32", "bfloat16"]))
    kind = int(rng.integers(8))
    if kind == 0:
        return None
    if kind == 1:
        return pick(rng, OTHERS)
    if kind == 2:
        names = ["float32", "bfloat16", "float16", "uint8", "int8", "int32", "uint32", "bool",
                 "complex64", "uint16"]  # fmt: skip
        return leaf.astype(pick(rng, names))
    if kind == 3:
        return leaf[..., : leaf.shape[-1] - 1] if leaf.ndim else leaf[None]
    if kind == 4:
        return leaf[:1] if leaf.ndim else leaf[None, None]
    if kind == 5:
        return leaf[None]
    if kind == 6:
        return jnp.concatenate([leaf, leaf], -1) if leaf.ndim else jnp.ones((3, 3))
    return leaf.reshape(-1)


def forge(rng, q):
    state = {name: getattr(q, name) for name in FIELDS}
    for name in rng.choice(FIELDS, int(rng.integers(1, 3)), replace=False):
        if rng.integers(8) == 0:
            state[name] = FORGED
        elif name in STATIC:
            state[name] = pick(rng, STATIC[name])
        else:
            state[name] = damaged(rng, state[name])
    forged = object.__new__(jgg.Quantized)
    forged.__dict__.update({k: v for k, v in state.items() if v is not FORGED})
    return forged, state


def is_weight(state) -> bool:
    """Whether the documentation says that it stands for (2, N, K) in layout "linear"."""
    state = {**state, **{name: default for name, default in (
        ("biases", None), ("global_scale", None), ("positions", None), ("axis", -1),
        ("layout", "linear"),
    ) if state[name] is FORGED}}  # fmt: skip
    if FORGED in [v for v in state.values() if not hasattr(v, "shape")]:
        return False
    mode, bits, group = state["mode"], state["bits"], state["group_size"]
    if not isinstance(mode, str) or (mode, bits, group) not in FORMATS:
        return False
    if state["layout"] != "linear" or state["positions"] is not None or state["axis"] != -1:
        return False
    weight, scales, biases = state["weight"], state["scales"], state["biases"]
    if not hasattr(weight, "shape") or weight.dtype != jnp.uint32 or weight.ndim != 3:
        return False
    k, rest = divmod(weight.shape[-1] * 32, bits)
    if rest or k % group or not hasattr(scales, "shape"):
        return False
    allowed = ("float32", "bfloat16", "float16") if mode == "affine" else ("uint8",)
    if scales.dtype.name not in allowed or scales.shape != (*weight.shape[:-1], k // group):
        return False
    if mode != "affine":
        if biases is not None:
            return False
    elif not hasattr(biases, "shape") or (biases.shape, biases.dtype) != (
        scales.shape,
        scales.dtype,
    ):
        return False
    scale = state["global_scale"]
    if scale is None:
        return True
    if mode != "nvfp4":
        return False
    if not hasattr(scale, "shape"):
        return isinstance(scale, (int, float))
    return (
        scale.dtype == jnp.float32 and scale.shape == weight.shape[: scale.ndim] and scale.ndim < 3
    )


def test_forged_weights(op, count):
    rng = np.random.default_rng([count, zlib.crc32(op.encode())])
    argument, call = OPERATIONS[op]
    refused = 0
    for _ in range(count):
        mode, bits, group = pick(rng, FORMATS)
        if op == "nvfp4_grouped_mm":
            mode, bits, group = "nvfp4", 4, 16
        scale = None
        if mode == "nvfp4" and rng.integers(2):
            scale = jnp.asarray(rng.uniform(0.5, 2, pick(rng, [(), (2,)])), jnp.float32)
        shape = SHAPES.get(op, (2, 8, 128))
        q, state = forge(rng, oracle.random_quantized(rng, shape, mode, bits, group, scale=scale))
        try:
            out = jax.tree.leaves(call(q))
        except (TypeError, ValueError) as error:
            message = str(error)
            assert message.startswith(f"jgg.{op}: "), (state, message)
            named = [f"{op}: {argument}", *(f"{name}=" for name in STATIC)]
            assert any(name in message for name in named), (state, message)
            refused += 1
            continue
        assert is_weight(state) or state["axis"] == -2, state
        assert out
        if op == "dequantize" and state["axis"] in (-1, FORGED):
            scale = state["global_scale"]
            plain = jgg.Quantized(
                *(state[name] for name in ("weight", "scales")),
                None if state["biases"] is FORGED else state["biases"],
                mode=state["mode"], bits=state["bits"], group_size=state["group_size"],
            )  # fmt: skip
            want = oracle.dequantize(plain)
            if scale is not None and scale is not FORGED:
                scale = oracle.f64(scale)
                want = want * scale.reshape(scale.shape + (1,) * (3 - scale.ndim))
            assert out[0].shape == want.shape
            assert oracle.error(out[0], np.nan_to_num(want, nan=0)) < 1e-2 or np.isnan(want).any()
    assert refused
    assert count < 100 or refused < count  # some damage does none
