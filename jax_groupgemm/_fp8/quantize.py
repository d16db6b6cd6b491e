"""``fp8_quantize``: arrays in FP8 with a float32 scale per block."""

from __future__ import annotations

from typing import Literal

import jax
from jax.typing import ArrayLike

from .._core import check
from .._core.operations import operation
from .._core.types import Integers
from .._quantized import array, padding
from .._quantized.array import Quantized
from .._quantized.format import FLOATS
from .._quantized.operands import blocked_axis, seed_of
from . import blocks, convert

SCALE_FORMATS = ("float32", "e8m0")


@operation
def fp8_quantize(
    x: ArrayLike,
    *,
    block: tuple[int, int] | None = blocks.LINE,
    axis: int = -1,
    group_sizes: Integers | None = None,
    scale_format: Literal["float32", "e8m0"] = "float32",
    stochastic_rounding_key: jax.Array | None = None,
    format: Literal["e4m3", "e5m2"] = "e4m3",
) -> Quantized:
    """``x ≈ code * scale``, one scale per ``block``; **blocks run along ``axis``; T may be
    grouped**.

    In float32, every operation rounded to nearest even, with ``amax`` of the block's magnitudes::

        scale = max(amax / 448, 2**-126), or 1 where amax is 0
        code  = e4m3(x / scale)

    Roundings saturate, at 448. With e5m2 the 448 are 57344, the largest of its numbers.

    Args:
      x: float32, bfloat16 or float16, ``(T, K)``, ``(G, N, K)`` or any ``(..., R, C)``.
      block: ``(along the other axis, along axis)``, as ``(1, 128)`` of rows that are multiplied, or
        ``(128, 128)`` of weights. ``(1, K)`` is one scale for each row, None one for each matrix.
        The last block of an axis may be cut.
      axis: the last one, or the one before it. Then the result is stored transposed, as it is
        multiplied: its leaves are those of ``(..., C, R)``, and its ``axis`` is -2.
      group_sizes: integers ``(G,)``, of x ``(T, K)``: the rows of each group. Rows past their sum
        become zeros. With ``axis=0`` no block spans two groups: each is padded with zeros to a
        multiple of 128 rows, and the result has layout ``"grouped"``. It needs block ``(1, 128)``.
      scale_format: ``"float32"``, or ``"e8m0"``: ``amax / 448`` is rounded up to a power of two,
        which is kept as float32.
      stochastic_rounding_key: a key of ``jax.random``. Then code is one of the two neighbours of
        ``x / scale`` with probabilities that make it right in expectation.
      format: of codes: ``"e4m3"`` (float8_e4m3fn), or ``"e5m2"`` (float8_e5m2), which
        has a bit less of precision and more range, as gradients may want.

    Returns:
      A :class:`Quantized` in mode ``"fp8"``.

    Raises:
      ValueError: x has too few axes, or options do not go together.
      TypeError: x is not floating, group_sizes are not integers, or the key is none.

    A non-finite element makes the scale of its own block NaN, and so its values; no other. The same
    bits on every backend. Not differentiable: gradients are zero.

    Examples:
      >>> q = jgg.fp8_quantize(jnp.linspace(0, 1, 512).reshape(2, 256))  # a scale for 128 elements
      >>> q.weight.shape, q.scales.shape
      ((2, 256), (2, 2))
    """
    op = "fp8_quantize"
    x = check.array(op, "x", x)
    check.dtype(op, "x", x.dtype, FLOATS)
    axis = blocked_axis(op, x, axis)
    _, _, block = array.static(op, "fp8", 8, None, block)
    for name, value, known in (
        ("scale_format", scale_format, SCALE_FORMATS),
        ("format", format, tuple(blocks.ELEMENTS)),
    ):
        if not isinstance(value, str) or value not in known:
            said = " or ".join(map(repr, known))
            raise ValueError(f"jgg.{op}: {name}={check.describe(value)}, expected {said}")
    if x.ndim < 2 and (block is None or block[0] > 1):
        raise ValueError(f"jgg.{op}: block={block} needs two axes, and x has shape {x.shape}")
    if group_sizes is not None:
        check.shape(op, "x", x, (None, None), "T, K", "group_sizes are of its rows")
        group_sizes = check.group_sizes(op, group_sizes)
        check.rows(op, "x", x.shape[0])
        if axis == -2:
            if block != blocks.LINE:
                raise ValueError(
                    f"jgg.{op}: axis=0 with group_sizes has block {blocks.LINE}, got {block}: "
                    "groups are padded to whole blocks"
                )
            count = padding.padded_rows(x.shape[0], group_sizes.shape[0], blocks.GROUPED)
            check.rows(op, "x, padded,", count)
    seed = None if stochastic_rounding_key is None else seed_of(op, stochastic_rounding_key)
    return convert.quantized(
        op, x, block=block, axis=axis, group_sizes=group_sizes, seed=seed,
        scale_format=scale_format, element=format,
    )  # fmt: skip
