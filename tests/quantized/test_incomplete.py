"""A ``Quantized`` without some of its parts: one sentence, from whatever operation meets it."""

import dataclasses
import pickle

import jax
import jax.numpy as jnp
import pytest

import jax_groupgemm as jgg

SIZES = jnp.array([2, 2])
WHY = (
    "it was unpickled from another version, made without its constructor, or lost leaves in a tree"
)
NEEDED = ("weight", "scales", "mode", "bits", "group_size")


def x():
    return jnp.ones((4, 64), jnp.bfloat16)


OPERATIONS = {
    "dequantize": ("q", jgg.dequantize),
    "prepack": ("w", jgg.prepack),
    "grouped_qmm": ("w", lambda q: jgg.grouped_qmm(x(), q, SIZES)),
    "gather_qmm": ("w", lambda q: jgg.gather_qmm(x()[:2, None], q)),
    "quantized_matmul": ("w", lambda q: jgg.quantized_matmul(x(), q)),
    "nvfp4_grouped_mm": ("x", lambda q: jgg.nvfp4_grouped_mm(q, q, SIZES)),
    "nvfp4_grouped_wgrad": ("x", lambda q: jgg.nvfp4_grouped_wgrad(q, q, SIZES)),
}


def whole():
    return jgg.quantize(jnp.ones((2, 64, 64), jnp.bfloat16), contract=-1)


def without(q, *names):
    """As another version's pickle would leave it."""
    out = object.__new__(jgg.Quantized)
    out.__dict__.update({k: v for k, v in q.__dict__.items() if k not in names})
    return pickle.loads(pickle.dumps(out))


def changed(q, **values):
    out = without(q)
    out.__dict__.update(values)
    return out


def refused(call, q, error=ValueError) -> str:
    with pytest.raises(error) as caught:
        call(q)
    return str(caught.value)


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(name):
    argument, call = OPERATIONS[name]
    start = f"jgg.{name}: {argument} is a Quantized without"
    for field in NEEDED:
        assert refused(call, without(whole(), field)) == f"{start} {field}: {WHY}"
        assert refused(call, changed(whole(), **{field: None})) == f"{start} {field}: {WHY}"
    assert refused(call, without(whole(), "bits", "mode")) == f"{start} mode, bits: {WHY}"
    for field in ("weight", "scales"):
        lost = dataclasses.replace(whole(), **{field: None})
        assert refused(call, lost) == f"{start} {field}: {WHY}"
    for field, value, said in (
        ("mode", "int4", "mode='int4' is not one of 'affine', "),
        ("bits", 7, "bits=7, expected 2 or 3 or 4 or 5 or 6 or 8 in mode 'affine'"),
        ("group_size", "64", "group_size='64', expected 16 or 32 or 64 or 128 in mode 'affine'"),
        ("axis", 3, "axis=3 is not -1 or -2"),
        ("layout", "sm70", "layout='sm70' is not one of "),
    ):
        assert refused(call, changed(whole(), **{field: value})).startswith(f"jgg.{name}: {said}")


def test_optional_parts_have_defaults():
    """What versions before had no field for."""
    q = without(whole(), "axis", "layout", "positions", "global_scale")
    assert jnp.array_equal(jgg.dequantize(q), jgg.dequantize(whole()))


@pytest.mark.parametrize("name", NEEDED)
def test_elsewhere(name):
    """Where JAX takes it apart before an operation could look at it, and where it is printed."""
    q = without(whole(), name)
    for call in (jax.jit(jgg.dequantize), jax.tree.leaves, lambda q: q.nbytes, lambda q: q[0]):
        assert (
            refused(call, q, AttributeError) == f"jgg.Quantized: a Quantized without {name}: {WHY}"
        )
    assert repr(q) == f"Quantized(without {name})"
    assert not hasattr(q, name)
    assert not hasattr(jgg.Quantized, name)


def test_shape_of_lost_weight():
    lost = dataclasses.replace(whole(), weight=None)
    said = f"jgg.Quantized: a Quantized without weight: {WHY}"
    assert refused(lambda q: q.shape, lost, AttributeError) == said
    assert "without weight" in refused(jax.jit(jgg.dequantize), lost)
