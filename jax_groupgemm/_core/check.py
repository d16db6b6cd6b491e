"""Argument checks. Every message names the op, the argument, what was given, what was expected
(with axis letters), and what to do."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._kernels import choose
from . import dtypes
from .dtypes import promoted
from .segments import MAX_ROWS


def array(op: str, name: str, value) -> jax.Array:
    try:
        value = jnp.asarray(value)
    except (TypeError, ValueError, OverflowError) as error:
        what = type(value).__name__
        if isinstance(value, (list, tuple)):
            what += " of parts that differ in shape, are not numbers or are too large"
        elif hasattr(value, "dtype"):
            what += f" of dtype {value.dtype}, {_instead(value.dtype)}"
        raise TypeError(f"jgg.{op}: {name} must be an array, got {what}") from error
    if not all(isinstance(size, int) for size in value.shape):
        raise ValueError(
            f"jgg.{op}: {name} has shape {value.shape}, expected sizes that are numbers: a "
            "function is exported for shapes that are known. Pad rows to the most there are; sizes "
            "are data"
        )
    return value


def _instead(dtype) -> str:
    """Advice about a numpy dtype that JAX does not have."""
    if isinstance(dtype, np.dtype) and not dtype.isnative:
        return "in another byte order. Convert it: a.astype(a.dtype.newbyteorder('='))"
    return "which JAX does not have. Convert it to numbers"


def shape(op: str, name: str, value, expected: Sequence, letters: str, why: str = "") -> None:
    """``expected`` holds a size, or None where any will do, per axis of ``letters``. A ``why`` that
    begins with "because" is why sizes are expected, any other is why there are so many axes."""
    letters = f"({letters})" if "," in letters or len(letters) > 1 else f"({letters},)"
    of_sizes = why.startswith("because")
    if why:
        why = f" {why}" if of_sizes else f": {why}"
    if value.ndim != len(expected):
        axes = "1 axis" if len(expected) == 1 else f"{len(expected)} axes"
        if of_sizes:  # which it can only say of sizes that are all known
            why = "" if None in expected else f" = {tuple(expected)}{why}"
        raise ValueError(
            f"jgg.{op}: {name} has shape {value.shape}, expected {axes} {letters}{why}"
        )
    if any(e is not None and e != got for e, got in zip(expected, value.shape, strict=True)):
        sizes = tuple(got if e is None else e for e, got in zip(expected, value.shape, strict=True))
        raise ValueError(
            f"jgg.{op}: {name} has shape {value.shape}, expected {letters} = {sizes}{why}"
        )


def dtype(op: str, name: str, given, allowed: Sequence[str], why: str = "") -> None:
    if given.name not in allowed:
        raise TypeError(f"jgg.{op}: {name} must be {either(allowed)}{why}, got dtype {given.name}")


def either(names: Sequence[str]) -> str:
    return ", ".join(names[:-1]) + " or " + names[-1] if len(names) > 1 else names[0]


def describe(value) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    return repr(value)


def integers(op: str, name: str, value) -> jax.Array:
    """Sizes, indices or bounds. JAX wraps the host's 64-bit numbers around where x64 is off; they
    are clamped, which changes nothing that they mean."""
    known = (int, np.integer, np.ndarray)
    host = None
    if not isinstance(value, jax.Array) and all(
        isinstance(v, known) for v in jax.tree.leaves(value)
    ):
        with contextlib.suppress(ValueError):  # of parts that differ in shape
            host = np.asarray(value)
    if host is not None and host.dtype != object:
        if isinstance(value, (list, tuple)) and host.size == 0:
            host = host.astype(np.int32)
        if host.dtype.kind in "iu" and host.dtype.itemsize == 8 and not jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
            low = 0 if host.dtype.kind == "u" else -(2**31)
            host = np.clip(host, low, 2**31 - 1).astype(np.int32)
        value = host
    value = array(op, name, value)
    if not jnp.issubdtype(value.dtype, jnp.integer):
        raise TypeError(f"jgg.{op}: {name} must hold integers, got dtype {value.dtype.name}")
    return value


def numeric(op: str, name: str, value) -> None:
    if not jnp.issubdtype(value.dtype, jnp.number):
        raise TypeError(f"jgg.{op}: {name} must hold numbers, got dtype {value.dtype.name}")


def multiplied(*operands) -> list[jax.Array]:
    """Operands as kernels and XLA take them (``dtypes.multiplied``)."""
    return [a.astype(dtypes.multiplied(a.dtype)) for a in operands]


def holds(op: str, name: str, value, dtype) -> None:
    """Whether ``value``, which is added to or multiplied with ``dtype``, fits in it."""
    kinds = (jnp.integer, jnp.floating, jnp.complexfloating)
    kind = lambda dtype: next((i for i, k in enumerate(kinds) if jnp.issubdtype(dtype, k)), 0)
    if kind(value.dtype) > kind(dtype):
        raise TypeError(
            f"jgg.{op}: {name} has dtype {value.dtype.name}, which the result, "
            f"{jnp.dtype(dtype).name}, cannot hold"
        )


def rows(op: str, name: str, count: int, what: str = "rows") -> None:
    if count > MAX_ROWS:
        raise ValueError(
            f"jgg.{op}: {name} has {count} {what}; row indices are int32, at most {MAX_ROWS}"
        )


def group_sizes(
    op: str, value, groups: int | None = None, why: str = "", letter: str = "G"
) -> jax.Array:
    value = integers(op, "group_sizes", value)
    shape(op, "group_sizes", value, (groups,), letter, why)
    return value


def flag(op: str, name: str, value) -> None:
    if not isinstance(value, (bool, np.bool_)) and not (type(value) is int and value in (0, 1)):
        raise TypeError(f"jgg.{op}: {name} must be True or False, got {describe(value)}")


def key(op: str, value) -> None:
    """One key of ``jax.random``."""
    try:
        jax.eval_shape(jax.random.split, value)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(
            f"jgg.{op}: key must be one key of jax.random, got {describe(value)}"
        ) from error


def count(op: str, name: str, value) -> None:
    """A size that is static."""
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise TypeError(f"jgg.{op}: {name} must be an int, got {describe(value)}")
    if value < 0:
        raise ValueError(f"jgg.{op}: {name}={value} is negative")
    if value > MAX_ROWS:
        raise ValueError(f"jgg.{op}: {name}={value} is more than {MAX_ROWS}")


def number(op: str, name: str, value) -> float:
    """A finite number that is static."""
    known = (int, float, np.integer, np.floating, np.ndarray, jax.Array)
    with contextlib.suppress(TypeError, ValueError, OverflowError):  # of several, traced, complex
        if isinstance(value, known) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    raise TypeError(f"jgg.{op}: {name} must be a finite number, got {describe(value)}")


def scalar(op: str, name: str, value) -> jax.Array:
    """A real number, which may be traced."""
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        out = jnp.asarray(value)
        real = jnp.issubdtype(out.dtype, jnp.floating) or jnp.issubdtype(out.dtype, jnp.integer)
        if real and not out.shape:
            return out
    raise TypeError(f"jgg.{op}: {name} must be a number, got {describe(value)}")


def of_dtype(op: str, name: str, value):
    """The dtype that a user names."""
    try:
        if not isinstance(value, (jax.Array, np.ndarray)):
            return jnp.dtype(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise TypeError(f"jgg.{op}: {name}={describe(value)} is not a dtype")


def implementation(op: str, name: str | None, *others: str) -> None:
    """One of the kernels'; ``others`` are names that an operation has besides."""
    if name is not None and not (isinstance(name, str) and name in choose.IMPLEMENTATIONS):
        known = ", ".join(repr(n) for n in (*choose.IMPLEMENTATIONS, *others))
        raise ValueError(f"jgg.{op}: implementation={describe(name)} is not one of None, {known}")


def _promoted_dtype(op: str, operands: Mapping[str, Any]):
    """By the user's rules; of floats of 8 bits and others, for which JAX has none, by ours."""
    try:
        return jnp.dtype(jnp.result_type(*operands.values()))
    except ValueError as error:
        strict = jax.config.jax_numpy_dtype_promotion == "strict"  # pyright: ignore[reportAttributeAccessIssue]
        dtypes = [a.dtype for a in operands.values()]
        with contextlib.suppress(ValueError):
            if not strict:
                return promoted(*dtypes)
        what = " and ".join(f"{name} of dtype {a.dtype.name}" for name, a in operands.items())
        why = " where jax_numpy_dtype_promotion is 'strict'" if strict else ""
        raise TypeError(
            f"jgg.{op}: {what} have no common dtype{why}. Convert one of them"
        ) from error


def result_dtype(op: str, preferred, common=None, **operands):
    """``preferred_element_type``, or ``common``; by default the operands' promoted dtype, or
    bfloat16 where that has 8 bits or fewer."""
    if common is None:
        common = dtypes.default_result(_promoted_dtype(op, operands))
    if preferred is None:
        return _with_zero(op, common)
    preferred = of_dtype(op, "preferred_element_type", preferred)
    preferred = _with_zero(op, jnp.dtype(jax.dtypes.canonicalize_dtype(preferred)))
    if jnp.issubdtype(common, jnp.inexact) and not jnp.issubdtype(preferred, jnp.inexact):
        raise TypeError(
            f"jgg.{op}: preferred_element_type={preferred.name} cannot hold a product of "
            f"{common.name} operands"
        )
    if jnp.issubdtype(common, jnp.complexfloating) and not jnp.issubdtype(
        preferred, jnp.complexfloating
    ):
        raise TypeError(
            f"jgg.{op}: preferred_element_type={preferred.name} would drop the imaginary part of "
            f"{common.name} operands"
        )
    return preferred


def _with_zero(op: str, dtype):
    if dtype.name == "float8_e8m0fnu":
        raise TypeError(
            f"jgg.{op}: a result of dtype float8_e8m0fnu has no zeros for rows of no group. Pass "
            "preferred_element_type=jnp.bfloat16"
        )
    return dtype


# Settings that ask for TensorFloat-32. JAX calls the same setting by each of these names.
_TF32 = {"high", "tensorfloat32", "bfloat16_3x", "fastest", "bfloat16"}
_FLOAT32 = {"default", "highest", "float32"}
# Algorithms, by name: they are taken for the least precision that is asked for.
_TF32_PRESETS = ("TF32_TF32_F32", "BF16_BF16_F32", "BF16_BF16_BF16")
_FLOAT32_PRESETS = (
    "DEFAULT", "F32_F32_F32", "TF32_TF32_F32_X3", "BF16_BF16_F32_X3", "BF16_BF16_F32_X6",
    "BF16_BF16_F32_X9", "F16_F16_F32", "F16_F16_F16", "ANY_F8_ANY_F8_F32", "ANY_F8_ANY_F8_ANY",
    "ANY_F8_ANY_F8_F32_FAST_ACCUM", "ANY_F8_ANY_F8_ANY_FAST_ACCUM",
)  # fmt: skip


def precision(op: str, value, *operands) -> jax.lax.Precision:
    """HIGHEST (true float32) or HIGH (tensorfloat-32 where the device has it). Of one for each
    operand, the more precise."""
    if value is None:
        value = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
        if value is None:
            return jax.lax.Precision.HIGHEST
    if isinstance(value, (tuple, list)) and len(value) == 2:
        each = {precision(op, one, *operands) for one in value}
        return each.pop() if len(each) == 1 else jax.lax.Precision.HIGHEST
    if isinstance(value, jax.lax.Precision):
        high = value == jax.lax.Precision.HIGH
        return jax.lax.Precision.HIGH if high else jax.lax.Precision.HIGHEST
    if isinstance(value, jax.lax.DotAlgorithmPreset):
        value = value.name
    if isinstance(value, str):
        if value.lower() in _TF32 or value in _TF32_PRESETS:
            return jax.lax.Precision.HIGH
        if value.lower() in _FLOAT32 or value in _FLOAT32_PRESETS:
            return jax.lax.Precision.HIGHEST
        if value in jax.lax.DotAlgorithmPreset.__members__:
            _preset(op, value, operands)
            return jax.lax.Precision.HIGHEST
    raise ValueError(
        f"jgg.{op}: precision={value!r} is not a jax.lax.Precision, its name, or 'tensorfloat32'"
    )


def _preset(op: str, name: str, operands) -> None:
    """Raises where sums are less precise than this algorithm's."""
    if name == "F64_F64_F64" and jnp.float64 in [a.dtype for a in operands]:
        return
    done = ", ".join([*_FLOAT32_PRESETS[:6], *_TF32_PRESETS])
    of = f" for {' and '.join(a.dtype.name for a in operands)}" if operands else ""
    wide = ". Convert operands to float64" if operands and name == "F64_F64_F64" else ""
    raise ValueError(
        f"jgg.{op}: precision={name} is not done{of}; algorithms that are done, at least as "
        f"exactly: {done}{wide}"
    )


def two_sizes(value) -> tuple[int, int] | None:
    """None where it is not two positive numbers."""
    if isinstance(value, (tuple, list)) and len(value) == 2:
        whole = [isinstance(n, (int, np.integer)) and not isinstance(n, bool) for n in value]
        if all(whole) and min(value) > 0:
            return int(value[0]), int(value[1])
    return None
