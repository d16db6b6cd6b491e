"""Gated activations with one scale: what the experts of a mixture quantize between their two
products. ``activation.py`` has those in blocks.

h is ``(R, 2F)``, the gate first, of rows in groups. Rows of no group may hold anything, and so may
what is made of them.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from .._core import conversion
from .._grouped.activation_backward import rounded_activation, scaled_activation_backward
from .._kernels import choose, problems
from .._quantized import padding
from . import blocks, cast, convert, tensors
from .conversion_calls import groups_of


def quantized_activation(h, group_sizes, activation: str, *, ages=None, history: int = 1):
    """``(q, seen)``: the rounded ``activation(h)``, with its own scale or that of a state's
    ``ages``, as ``tensors.quantized`` has them; and what that state sees."""

    def largest(wanted):
        (found,) = _ACTIVATION(h, None, _asked(group_sizes, wanted), activation=activation)
        return found

    scale = tensors.scale_of(largest, ages, history, "e4m3")
    codes, found = _ACTIVATION(h, scale, group_sizes, activation=activation)
    return convert.made(codes, scale, block=None), tensors.counted(found)


def quantized_backward(h, d, row_scale, group_sizes, activation: str, element: str, *, seed=None,
                       ages=(None, None), history: int = 1):  # fmt: skip
    """The results of :func:`scaled_activation_backward`, each with its own scale, or that of a
    state's ``ages``: dh's and the activation's. With a ``seed`` dh is rounded at random.

    Returns:
      ``row_scale * dh`` in ``element``; the same along grouped rows; ``row_scale * activation(h)``
      along rows; float32 sums over columns of ``d * activation(h)``, ``(R,)``; and what a state
      sees of dh.
    """
    if seed is not None:
        return _at_random(
            h, d, row_scale, group_sizes, activation, element, seed, ages=ages, history=history
        )
    run = functools.partial(_BACKWARD, h, d.astype(h.dtype), row_scale.astype(jnp.float32))
    static = {"activation": activation, "element": element}

    @functools.cache  # one call finds both
    def largest(some: bool):
        wanted = None if not some else jnp.stack([_unknown(of, history) for of in ages]).any()
        (found,) = run(None, _asked(group_sizes, wanted), **static)
        return found

    some = any(of is not None for of in ages)
    of_dh, of_a = (
        tensors.scale_of(lambda _, i=i: largest(some)[i], of_ages, history, of)
        for i, (of_ages, of) in enumerate(zip(ages, (element, "e4m3"), strict=True))
    )
    scales = jnp.stack([of_dh, of_a])
    codes, turned, activated, sums, found = run(scales, group_sizes, **static)
    positions = padding.padding(group_sizes, h.shape[0], blocks.GROUPED).positions
    lines = functools.partial(convert.made, positions=positions, block=None, axis=-2)
    by_rows = convert.made(codes, of_dh, block=None)
    return by_rows, lines(turned, of_dh), lines(activated, of_a), sums, tensors.counted(found[0])


def _unknown(ages, history: int):
    return True if ages is None else tensors.known_range(ages, history) < 0


def _asked(group_sizes, wanted):
    """Sizes of no rows where nobody wants the result."""
    return group_sizes if wanted is None else jnp.where(wanted, group_sizes, 0)


def _at_random(h, d, row_scale, group_sizes, activation: str, element: str, seed, *, ages,
               history: int):  # fmt: skip
    live = group_sizes.sum(dtype="int32")
    dh, a, sums = scaled_activation_backward(h, d, row_scale, activation, live)
    cast_lines = functools.partial(tensors.quantized_lines, history=history)
    rows, lines, seen = cast_lines(dh, group_sizes, seed=seed, element=element, ages=ages[0])
    return rows, lines, cast_lines(a, group_sizes, ages=ages[1])[1], sums, seen


def takes(platform: str, h, activation: str) -> bool:
    """Whether kernels make both."""
    return all(
        choose.choose(_problem(h, activation)(op=op, platform=platform, empty=0 in h.shape))
        for op in ("fp8_activation_cast", "fp8_activation_cast_backward")
    )


def _activation(h, scale, group_sizes, *, activation: str):
    a = rounded_activation(h, activation)
    if scale is None:
        return (cast.largest(a, group_sizes),)
    return cast.codes(a, scale, group_sizes=group_sizes, measures=True)


def _backward(h, d, row_scale, scales, group_sizes, *, activation: str, element: str):
    live = group_sizes.sum(dtype="int32")
    dh, a, sums = scaled_activation_backward(h, d, row_scale, activation, live)
    if scales is None:
        return (jnp.stack([cast.largest(v, group_sizes) for v in (dh, a)]),)
    same = {"group_sizes": group_sizes, "measures": True}
    *codes, of_dh = cast.codes(dh, scales[0], axes=(-1, -2), element=element, **same)
    activated, of_a = cast.codes(a, scales[1], axes=(-2,), **same)
    return *codes, activated, sums, jnp.stack([of_dh, of_a])


_U32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.uint32)


def _activation_call(h, scale, group_sizes, *, activation: str):
    """Custom call ``jgg_fp8_activation_cast``: h, scale or none, sizes -> codes where there is a
    scale, largest magnitudes of each thread block, workspace."""
    rows, columns = h.shape[0], h.shape[1] // 2
    sizes, _, workspace = groups_of(group_sizes, rows, along_rows=False)
    made = [] if scale is None else [jax.ShapeDtypeStruct((rows, columns), jnp.float8_e4m3fn)]
    results = [*made, _U32((_parts(rows, columns, 6), 2)), workspace]
    call = jax.ffi.ffi_call("jgg_fp8_activation_cast", results)
    *codes, largest, _ = call(h, _scales(scale, 1), sizes, activation=activation)
    return *codes, largest.max(0)


def _backward_call(h, d, row_scale, scales, group_sizes, *, activation: str, element: str):
    """Custom call ``jgg_fp8_activation_cast_backward``: h, d, row_scale, scales or none, sizes ->
    codes of three and sums of 128 columns each where there are scales, largest magnitudes of each
    thread block, workspace."""
    rows, columns = h.shape[0], h.shape[1] // 2
    sizes, along, workspace = groups_of(group_sizes, rows, along_rows=scales is not None)
    made, parts = [], _parts(rows, columns, 4)
    if scales is not None:
        parts = along // 128 * (columns // 128)
        of_dh = blocks.ELEMENTS[element].dtype
        made = [
            jax.ShapeDtypeStruct((rows, 2 * columns), of_dh),
            jax.ShapeDtypeStruct((2 * columns, along), of_dh),
            jax.ShapeDtypeStruct((columns, along), jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct((columns // 128, rows), jnp.float32),
        ]
    results = [*made, _U32((parts, 2, 2)), workspace]
    call = jax.ffi.ffi_call("jgg_fp8_activation_cast_backward", results)
    operands = h, d, row_scale, _scales(scales, 2), sizes
    *found, largest, _ = call(*operands, activation=activation)
    if not found:
        return (largest.max(0),)
    *codes, sums = found
    return *codes, sums.sum(0), largest.max(0)


def _parts(rows: int, columns: int, each: int) -> int:
    """As many thread blocks as run at a time, so many ``each`` multiprocessor of an H200 has, or
    fewer where each has little to read."""
    return max(1, min(rows * columns >> 13, 132 * each))


def _scales(scales, count: int):
    return jnp.zeros((0,), jnp.float32) if scales is None else scales.reshape(count)


def _problem(h, activation: str):
    return functools.partial(
        problems.Fp8Activation, dtypes=(h.dtype.name,), columns=h.shape[1] // 2,
        rows=h.shape[0], activation=activation,
    )  # fmt: skip


_ACTIVATION = conversion.composed(
    "fp8_activation_cast", _activation, _activation_call,
    lambda h, *_, activation: _problem(h, activation), each=True,
)  # fmt: skip
_BACKWARD = conversion.composed(
    "fp8_activation_cast_backward", _backward, _backward_call,
    lambda h, *_, activation, element: _problem(h, activation), each=True,
)  # fmt: skip
