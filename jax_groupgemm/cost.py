"""What this package's calls cost: ``jgg.cost.of(function, *arguments)`` in FLOPs and bytes.

XLA's cost analysis cannot see into a custom call (it counts -1 for each). Add what is counted here
to what it says of the rest. Where there is no kernel, and with ``implementation="reference"``, XLA
sees the operations that a call stands for.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import Jaxpr, Literal, jaxprs_in_params
from jax.interpreters import partial_eval

from . import (
    _epilogue,
    _gathered,
    _nvfp4_grouped_mm,
    _nvfp4_grouped_wgrad,
    _nvfp4_quantize,
    _prepack,
    _primitives,
    _qmm,
    _quantized,
    _segments,
)
from ._gather_mm import gather_mm as _gather_mm
from ._gather_qmm import gather_qmm as _gather_qmm
from ._grouped_mm import grouped_mm as _grouped_mm
from ._grouped_qmm import grouped_qmm as _grouped_qmm
from ._nvfp4_grouped_linear import nvfp4_grouped_linear as _nvfp4_grouped_linear
from ._nvfp4_layouts import padded_sizes as _padded_sizes
from ._quantized_matmul import quantized_matmul as _quantized_matmul
from ._ragged_dot import ragged_dot as _ragged_dot
from ._ragged_dot import ragged_dot_general as _ragged_dot_general
from ._segmented_mm import segmented_mm as _segmented_mm


@dataclasses.dataclass(frozen=True)
class Cost:
    """The least that products and conversions take, whatever computes them.

    Attributes:
      flops: ``2 * rows * K * N`` per product (2 per multiply-add), where ``rows`` are those that
        meet a matrix; a bias counts as a product with K = 1. Activations, scales and additions
        are not counted, and conversions (quantize, dequantize, prepack) have none.
      bytes_accessed: per product, each operand read once, as it is stored, and the result written
        once. Read are the rows that meet a matrix, the matrices that meet a row, metadata, bias,
        scales and an existing result; written is all of the result, its zeros too. Per conversion,
        all of its operands and results, once.
    """

    flops: int = 0
    bytes_accessed: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes_accessed + other.bytes_accessed)

    def __mul__(self, times: int) -> Cost:
        return Cost(self.flops * times, self.bytes_accessed * times)


def of(function: Callable, *args, **kwargs) -> Cost:
    """The cost of this package's calls in ``function(*args, **kwargs)``, which does not run.

    Gradients are functions like others: ``of(jax.grad(loss), params)``. Only this package's
    products and conversions count, not other operations such as ``dot_general`` (which
    ``ragged_dot_general`` is where its ragged axis is a batch axis), and not what is always left
    to XLA: transposing, ``positions`` and swizzled scales. Sharded, it is the sum over all devices.

    Args:
      function: anything that JAX can trace.
      *args, **kwargs: its arguments; arrays, at any depth, may be :class:`jax.ShapeDtypeStruct`.

    Group sizes, segments and indices are taken at their value where it follows from integers: of
    concrete arrays among the arguments, and constants. Elsewhere (they depend on other arguments,
    are ``ShapeDtypeStruct``, or lie in a loop, a branch or a ``shard_map``) shapes decide: every
    row is in one group or segment, and every matrix is read, as far as there are rows.

    The body of a ``scan`` counts for each iteration, that of a ``while_loop`` once, the most
    expensive branch of a ``cond``, and what ``shard_map`` maps for each device.

    Returns:
      The :class:`Cost`. What XLA removes because no result needs it does not count.

    Raises:
      What ``function`` raises where it is traced with these arguments.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    kinds = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, kinds)]

    def traced(*arrays):
        given = list(leaves)
        for i, array in zip(places, arrays, strict=True):
            given[i] = array
        args, kwargs = tree.unflatten(given)
        return function(*args, **kwargs)

    arrays = [leaves[i] for i in places]
    jaxpr = jax.make_jaxpr(traced)(*arrays)
    # Without what no result needs, as XLA will run it.
    jaxpr, _ = partial_eval.dce_jaxpr(jaxpr, True, instantiate=True)
    return _walk(jaxpr, [_given(a) for a in arrays])[0]


#: The operations, with their own arguments: ``jgg.cost.grouped_mm(x, w, group_sizes, ...)``.
grouped_mm = functools.partial(of, _grouped_mm)
segmented_mm = functools.partial(of, _segmented_mm)
gather_mm = functools.partial(of, _gather_mm)
ragged_dot = functools.partial(of, _ragged_dot)
ragged_dot_general = functools.partial(of, _ragged_dot_general)
quantized_matmul = functools.partial(of, _quantized_matmul)
gather_qmm = functools.partial(of, _gather_qmm)
grouped_qmm = functools.partial(of, _grouped_qmm)
nvfp4_grouped_mm = functools.partial(of, _nvfp4_grouped_mm.nvfp4_grouped_mm)
nvfp4_grouped_wgrad = functools.partial(of, _nvfp4_grouped_wgrad.nvfp4_grouped_wgrad)
nvfp4_grouped_linear = functools.partial(of, _nvfp4_grouped_linear)
quantize = functools.partial(of, _quantized.quantize)
dequantize = functools.partial(of, _quantized.dequantize)
prepack = functools.partial(of, _prepack.prepack)
nvfp4_quantize = functools.partial(of, _nvfp4_quantize.nvfp4_quantize)


# ---- jaxprs ----------------------------------------------------------------------------------

# How to compute a value, or None where it is not known.
_Value = Callable[[], Any] | None

# What calls its one jaxpr with its own operands, and what cannot be run from its parameters.
_CALLS = ("jit", "closed_call", "custom_jvp_call", "custom_vjp_call", "remat2")
_OPAQUE = ("core_call", "shard_map")


def _given(array) -> _Value:
    """The value of an argument or constant: of concrete integers only."""
    if isinstance(array, (Tracer, jax.ShapeDtypeStruct)):
        return None
    return (lambda: jnp.asarray(array)) if jnp.issubdtype(array.dtype, jnp.integer) else None


def _walk(jaxpr: Jaxpr, given: Sequence[_Value] | None) -> tuple[Cost, list[_Value]]:
    """The cost of a jaxpr and the values of its results; with None no value in it is known."""
    known: dict[Any, _Value] = {}
    if given is not None:
        known.update(zip(jaxpr.constvars, map(_given, jaxpr.consts), strict=True))
        known.update(zip(jaxpr.invars, given, strict=True))

    def read(atom) -> _Value:
        if given is None:
            return None
        return (lambda: atom.val) if isinstance(atom, Literal) else known.get(atom)

    total = Cost()
    for eqn in jaxpr.eqns:
        values = [read(atom) for atom in eqn.invars]
        if eqn.primitive in _COSTS:
            total += _COSTS[eqn.primitive](eqn, values)
            continue
        inner, name = list(jaxprs_in_params(eqn.params)), eqn.primitive.name
        if name in _CALLS and given is not None:
            cost, results = _walk(inner[0], values)
        else:
            cost, results = _inner_cost(name, eqn.params, inner), []
            if None not in values and not eqn.effects and not (given is None or name in _OPAQUE):
                results = _results(eqn, values)
        total += cost
        known.update(zip(eqn.outvars, results, strict=False))
    return total, [read(atom) for atom in jaxpr.outvars]


def _inner_cost(name: str, params, inner: Sequence[Jaxpr]) -> Cost:
    costs = [_walk(jaxpr, None)[0] for jaxpr in inner]
    if name == "cond" and costs:
        flops, bytes_accessed = zip(*map(dataclasses.astuple, costs), strict=True)
        return Cost(max(flops), max(bytes_accessed))
    total = sum(costs, Cost())
    if name == "scan":
        return total * params["length"]
    if name == "shard_map":
        return total * math.prod(params["mesh"].shape[a] for a in params["newly_manual_axes"])
    return total


def _results(eqn, values: Sequence[Any]) -> list[_Value]:
    @functools.cache
    def run():
        out = eqn.primitive.bind(*(value() for value in values), **eqn.params)
        return out if eqn.primitive.multiple_results else [out]

    return [lambda i=i: run()[i] for i in range(len(eqn.outvars))]


# ---- products and conversions ----------------------------------------------------------------


def _mm(eqn, values: Sequence[_Value]) -> Cost:
    x, w, *meta = (atom.aval for atom in eqn.invars)
    return _mm_cost(x, w, meta, values[2:], eqn.outvars[0].aval, **eqn.params)[0]


def _epilogue_mm(eqn, values: Sequence[_Value]) -> Cost:
    (x, w, meta, bias, row_scale, existing_out), meta_values, static = _operands(eqn, values)
    cost, rows, weights = _mm_cost(
        x, w, meta, meta_values, eqn.outvars[0].aval, form=_segments.SIZES, rows=x.shape[0],
        transpose_x=False, transpose_w=static["transpose_w"],
    )  # fmt: skip
    return cost + _bias_cost(bias, rows, weights) + Cost(0, _bytes((row_scale, existing_out)))


def _gathered_mm(eqn, values: Sequence[_Value]) -> Cost:
    (x, w, meta, *indices), meta_values, static = _operands(eqn, values)
    pairs, m, n = eqn.outvars[0].aval.shape
    rows = jax.ShapeDtypeStruct((pairs * m, x.shape[2]), x.dtype)
    out = jax.ShapeDtypeStruct((pairs * m, n), static["out_dtype"])
    cost, *_ = _mm_cost(
        rows, w, meta, meta_values, out, form=_segments.SIZES, rows=pairs * m, transpose_x=False,
        transpose_w=static["transpose_w"],
    )  # fmt: skip
    return cost + Cost(0, _bytes(indices))


def _nvfp4_mm(eqn, values: Sequence[_Value]) -> Cost:
    (x, w, sizes, scale, bias), value, _ = _operands(eqn, values)
    cost, rows, weights = _mm_cost(
        x, w, [sizes], [value], eqn.outvars[0].aval, form=_segments.SIZES, rows=x.shape[0],
        transpose_x=False, transpose_w=True,
    )  # fmt: skip
    return cost + _bias_cost(bias, rows, weights) + Cost(0, _bytes(scale))


def _nvfp4_wgrad(eqn, values: Sequence[_Value]) -> Cost:
    """Rows are those of the operands, padded group by group."""
    (x, dy, sizes, *rest), value, _ = _operands(eqn, values)
    (k, stored), (n, _), (rows,) = x.shape, dy.shape, x.positions.shape
    padded = None if value is None else lambda: _padded_sizes(value(), rows)
    count, read, *_ = _counts(_segments.SIZES, [padded], stored, stored, sizes.shape[0])
    packed = _bytes((x.weight, x.scales, dy.weight, dy.scales)) // max(stored, 1) * read
    return Cost(2 * count * k * n, packed + _bytes((sizes, rest, eqn.outvars[0].aval)))


def _conversion(eqn, values: Sequence[_Value]) -> Cost:
    del values
    return Cost(0, _bytes([atom.aval for atom in (*eqn.invars, *eqn.outvars)]))


def _operands(eqn, values: Sequence[_Value]):
    """Of a composed product: its operands, the values of its metadata, its static parameters."""
    tree = eqn.params["tree"]
    metadata = tree.unflatten(values)[2]
    return tree.unflatten([a.aval for a in eqn.invars]), metadata, dict(eqn.params["static"])


def _qmm_cost(eqn, values: Sequence[_Value]) -> Cost:
    x, q, meta = _qmm.split(eqn.params["tree"], [atom.aval for atom in eqn.invars])
    values = values[len(values) - len(meta) :]
    out = eqn.outvars[0].aval
    return _mm_cost(x, q, meta, values, out, transpose_x=False, **eqn.params)[0]


def _mm_cost(x, w, meta, values, out, *, form, rows, transpose_x, transpose_w, **_):
    """The cost, the rows that meet a matrix, and the matrices that meet a row."""
    rows_x, k = x.shape[::-1] if transpose_x else x.shape
    groups, n = w.shape[0], w.shape[1 if transpose_w else 2]
    count, in_x, _, weights = _counts(form, values, rows_x, rows, groups)
    # Of a quantized weight, every leaf; one global scale belongs to all.
    leaves = jax.tree.leaves(w)
    read = _bytes(x) // max(rows_x, 1) * in_x
    read += sum(_bytes(a) // max(groups, 1) * weights if a.ndim else _bytes(a) for a in leaves)
    return Cost(2 * count * k * n, read + _bytes((meta, out))), count, weights


def _bias_cost(bias, rows: int, weights: int) -> Cost:
    if bias is None:
        return Cost()
    n = bias.shape[1]
    return Cost(2 * rows * n, weights * n * bias.dtype.itemsize)


def _wgrad(eqn, values: Sequence[_Value]) -> Cost:
    x, y, *meta = (atom.aval for atom in eqn.invars)
    params, out = eqn.params, eqn.outvars[0].aval
    groups, a, b = out.shape
    rows_x = x.shape[1 if params["transpose_x"] else 0]
    rows_y = y.shape[1 if params["transpose_y"] else 0]
    count, in_x, in_y, _ = _counts(params["form"], values[2:], rows_x, rows_y, groups)
    read = in_x * a * x.dtype.itemsize + in_y * b * y.dtype.itemsize
    return Cost(2 * count * a * b, read + _bytes((meta, out)))


def _bytes(avals) -> int:
    """Of all leaves of a tree."""
    return sum(aval.size * aval.dtype.itemsize for aval in jax.tree.leaves(avals))


def _counts(form, values: Sequence[Any], rows_x: int, rows_y: int, groups: int):
    """Pairs of rows that meet; the different rows of x, rows of y and weights among them."""
    if None in values:
        once = [rows for rows, ordered in ((rows_x, form.ordered_x), (rows_y, form.ordered_y))
                if ordered]  # fmt: skip
        count = min(once, default=max(rows_x, rows_y))
        return count, *(min(count, size) for size in (rows_x, rows_y, groups))
    with jax.ensure_compile_time_eval():
        meta = [value() for value in values]
        table = np.asarray(_segments.decode(form, meta, rows_x, rows_y, groups), np.int64)
    x_start, y_start, length, weight = table[table[:, _segments.LENGTH] > 0].T
    rows = int(length.sum()), _covered(x_start, length), _covered(y_start, length)
    return *rows, len(np.unique(weight))


def _covered(start: np.ndarray, length: np.ndarray) -> int:
    """How many rows lie in any segment."""
    order = np.argsort(start)
    start, end = start[order], (start + length)[order]
    before = np.maximum.accumulate(np.concatenate([[0], end]))[:-1]
    return int(np.maximum(end - np.maximum(start, before), 0).sum())


# Every primitive of the package that may be one call.
_COSTS = {
    **dict.fromkeys((_primitives.INNER["mm"], _primitives.OUTER["mm"]), _mm),
    **dict.fromkeys((_primitives.INNER["wgrad"], _primitives.OUTER["wgrad"]), _wgrad),
    **dict.fromkeys((_primitives.INNER["qmm"], _primitives.OUTER["qmm"]), _qmm_cost),
    _epilogue.MM.primitive: _epilogue_mm,
    _gathered.MM.primitive: _gathered_mm,
    _nvfp4_grouped_mm._MM.primitive: _nvfp4_mm,
    _nvfp4_grouped_wgrad._WGRAD.primitive: _nvfp4_wgrad,
    _quantized._QUANTIZE.primitive: _conversion,
    _quantized._DEQUANTIZE.primitive: _conversion,
    _prepack._PREPACK.primitive: _conversion,
    _nvfp4_quantize._QUANTIZE.primitive: _conversion,
}
