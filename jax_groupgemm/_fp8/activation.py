"""Gated activations beside FP8's quantizer: what the experts of a mixture quantize between their
two products, without an array of it in h's dtype.

h is ``(R, 2F)``, the gate first, of rows in groups.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from .._core import conversion
from .._grouped.activation_backward import rounded_activation, scaled_activation_backward
from .._kernels import choose, problems
from .._quantized import padding
from .._quantized.array import Quantized
from . import blocks, convert
from .conversion_calls import codes_of, groups_of


def quantized_activation(h, group_sizes, activation: str) -> Quantized:
    """``fp8_quantize(activation(h), group_sizes=group_sizes)`` of the rounded activation."""
    codes, scales = _ACTIVATION(h, group_sizes, activation=activation)
    return convert.made(codes, scales)


def quantized_backward(h, d, row_scale, group_sizes, seeds, activation: str):
    """What :func:`scaled_activation_backward` gives, quantized.

    Args:
      seeds: of dh along columns and along rows, uint32 ``(2,)`` each; or two times None.

    Returns:
      ``row_scale * dh``; the same in blocks along grouped rows; ``row_scale * activation(h)`` in
      blocks along rows; and float32 sums over columns of ``d * activation(h)``, ``(R,)``.
    """
    *rows, by_columns, scales, of_a, scales_of_a, sums = _BACKWARD(
        h, d.astype(h.dtype), row_scale.astype(jnp.float32), group_sizes, *seeds,
        activation=activation,
    )  # fmt: skip
    positions = padding.padding(group_sizes, h.shape[0], blocks.GROUPED).positions
    columns = functools.partial(convert.made, positions=positions, axis=-2)
    return convert.made(*rows), columns(by_columns, scales), columns(of_a, scales_of_a), sums


def takes(platform: str, h, activation: str) -> bool:
    """Whether kernels make both."""
    return all(
        choose.choose(
            _problem(h, activation=activation)(op=op, platform=platform, empty=0 in h.shape)
        )
        for op in ("fp8_activation", "fp8_activation_backward")
    )


_lines = functools.partial(
    convert.definition, block=blocks.LINE, scale_format="float32", element="e4m3"
)


def _activation(h, group_sizes, *, activation: str):
    return _lines(rounded_activation(h, activation), group_sizes, None, axis=-1)


def _backward(h, d, row_scale, group_sizes, row_seed, column_seed, *, activation: str):
    dh, a, sums = scaled_activation_backward(h, d, row_scale, activation)
    return (
        *_lines(dh, group_sizes, row_seed, axis=-1),
        *_lines(dh, group_sizes, column_seed, axis=-2),
        *_lines(a, group_sizes, None, axis=-2),
        sums,
    )


def _activation_call(h, group_sizes, *, activation: str):
    """Custom call ``jgg_fp8_activation``: h, sizes -> codes, scales, workspace."""
    rows, columns = h.shape
    sizes, _, workspace = groups_of(group_sizes, rows, along_rows=False)
    results = (*codes_of(rows, columns // 2), workspace)
    call = jax.ffi.ffi_call("jgg_fp8_activation", results)
    return tuple(call(h, sizes, activation=activation)[:2])


def _backward_call(h, d, row_scale, group_sizes, row_seed, column_seed, *, activation: str):
    """Custom call ``jgg_fp8_activation_backward``: h, d, row_scale, sizes, two seeds -> codes and
    scales of three, sums of 128 columns each, workspace. Seeds may be empty."""
    rows, columns = h.shape[0], h.shape[1] // 2
    sizes, along, workspace = groups_of(group_sizes, rows, along_rows=True)
    sums = jax.ShapeDtypeStruct((columns // 128, rows), jnp.float32)
    shapes = (rows, 2 * columns), (2 * columns, along), (columns, along)
    results = *(of for shape in shapes for of in codes_of(*shape)), sums, workspace
    none = jnp.zeros((0,), jnp.uint32)
    seeds = [none if seed is None else seed for seed in (row_seed, column_seed)]
    call = jax.ffi.ffi_call("jgg_fp8_activation_backward", results)
    *codes, sums, _ = call(h, d, row_scale, sizes, *seeds, activation=activation)
    return (*codes, sums.sum(0))


def _problem(h, *_, activation: str):
    return functools.partial(
        problems.Fp8Activation, dtypes=(h.dtype.name,), columns=h.shape[1] // 2,
        activation=activation,
    )  # fmt: skip


_ACTIVATION = conversion.composed(
    "fp8_activation", _activation, _activation_call, _problem, each=True
)
_BACKWARD = conversion.composed(
    "fp8_activation_backward", _backward, _backward_call, _problem, each=True
)
