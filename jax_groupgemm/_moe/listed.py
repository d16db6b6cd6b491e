"""What the experts do with tokens that are named by list: Hopper's kernels, and those of CPUs,
gather their rows beside the products. Elsewhere, and where rows are few, the rows are copied first.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from .._core import costs, dtypes
from .._core.composed import Composed
from .._core.products import Wgrad
from .._grouped import call, fused
from .._grouped.activation_backward import scaled_activation_backward
from .._kernels import lists
from .permute import dispatched
from .products import Options, Products
from .routing import Routing


def tokens(routing: Routing) -> jax.Array:
    """The token of each row, -1 where it has none."""
    k = routing.place.shape[1]
    return jnp.where(routing.order >= 0, routing.order // k, -1).astype(jnp.int32)


def up(x, w, bias, routing: Routing, options: Options):
    """The up product's activation, and ``h``, what it is of."""
    return _UP(x, w, bias, routing, options=options)


def up_alone(x, w, bias, routing: Routing, options: Options):
    """The up product's activation."""
    return _UP_ALONE(x, w, bias, routing, options=options)


def _up_composed(x, w, bias, routing, *, options: Options):
    return Products(routing, options).up(dispatched(x, routing, clears_rest=False), w, bias)


def _up_alone_composed(x, w, bias, routing, *, options: Options):
    return Products(routing, options).up_alone(dispatched(x, routing, clears_rest=False), w, bias)


def _up_call(platform, x, w, bias, routing, *, options: Options, preactivation: bool = True):
    if not isinstance(w, jax.Array):
        return None
    products = Products(routing, options)
    epilogue = products.up_epilogue(bias)
    if platform == "cpu":
        return _up_on_cpu(x, w, routing, epilogue, options, preactivation)
    choice = _listed_mm(platform, x, w, products, options.product(_rows(routing)), epilogue)
    if choice is None:
        return None
    return call.mm(
        choice, x, w, products.metadata, products.product, epilogue, x_rows=tokens(routing),
        preactivation=preactivation,
    )  # fmt: skip


def _up_on_cpu(x, w, routing: Routing, epilogue, options: Options, preactivation: bool):
    """The product takes tokens by list, and XLA has the epilogue; None where it does not."""
    products = Products(routing, options)
    choice = _listed_mm("cpu", x, w, products, products.product)
    if choice is None:
        return None
    run = lambda product: call.mm(choice, x, w, products.metadata, product, x_rows=tokens(routing))
    a, h = fused.MM.activated(run, products.metadata, epilogue, products.product)
    return (a, h) if preactivation else a


def _rows(routing: Routing) -> int:
    return routing.order.shape[0]


def _listed_mm(platform, x, w, products: Products, product, epilogue=call.NO_EPILOGUE):
    problem = call.mm_problem(
        platform, x, w, products.metadata, product, epilogue, lists=True, x_list_alone=True
    )
    return lists.mm(problem)


def down_backward(ct, h, w, row_weight, routing: Routing, options: Options):
    """As :func:`scaled_activation_backward`, of the cotangent of the rows that the down product
    multiplies; ``ct``, (T, N), is the tokens' cotangent."""
    scale = row_weight.astype(dtypes.accumulator_dtype(h.dtype))
    return _DOWN(ct, h, w, scale, routing, options=options)


def _down_composed(ct, h, w, scale, routing, *, options: Options):
    d = rows_cotangent(ct, w, routing, options)
    live_rows = routing.group_sizes.sum(dtype=jnp.int32)
    return scaled_activation_backward(h, d, scale, options.activation, live_rows)


def _down_call(platform, ct, h, w, scale, routing, *, options: Options):
    products, product = Products(routing, options), _back(options).product(_rows(routing))
    if options.activation != "swiglu" or not isinstance(w, jax.Array) or h.dtype != ct.dtype:
        return None
    if platform == "cpu" or _listed_mm(platform, ct, w, products, product) is None:
        return None
    rows, columns = h.shape[0], h.shape[1] // 2
    flags = {
        "metadata": call.metadata_flags(products.metadata),
        "mm": call.mm_flags(products.metadata, product),
    }
    like = lambda *shape: jax.ShapeDtypeStruct(shape, h.dtype)
    sums = jax.ShapeDtypeStruct((-(-columns // 16), rows), jnp.float32)
    run = jax.ffi.ffi_call(
        "jgg_moe_down_backward", [like(rows, columns), like(rows, 2 * columns), sums],
        input_output_aliases={4: 1},  # dh takes the place of h, tile by tile
    )  # fmt: skip
    (sizes,) = products.metadata.narrow(rows, w.shape[0])
    a, dh, sums = run(ct, w, sizes, tokens(routing), h, scale, **call.attributes(flags))
    return dh, a, sums.sum(0)


def _back(options: Options) -> Options:
    return dataclasses.replace(options, transpose_w=not options.transpose_w)


def rows_cotangent(ct, w, routing: Routing, options: Options):
    """The cotangent of the rows that ``w`` multiplies; ``ct``, (T, N), is the tokens'."""
    return _ROWS(ct, w, routing, options=options)


def _rows_composed(ct, w, routing, *, options: Options):
    return Products(routing, options).rows_cotangent(w, dispatched(ct, routing, clears_rest=False))


def _rows_call(platform, ct, w, routing, *, options: Options):
    products = Products(routing, options)
    product = _back(options).product(_rows(routing))
    choice = None
    if isinstance(w, jax.Array):
        choice = _listed_mm(platform, ct, w, products, product)
    if choice is None:
        return None
    return call.mm(choice, ct, w, products.metadata, product, x_rows=tokens(routing))


def weight_cotangent(w, tokens_, rows, routing: Routing, options: Options, *, first: bool):
    """The cotangent of w, a product of ``rows`` and the tokens' rows. If ``first``, w multiplies
    the tokens' rows; otherwise these are the cotangents of what w gives."""
    return _WEIGHT(w, tokens_, rows, routing, options=options, first=first)


def _weight_composed(w, x, rows, routing, *, options: Options, first: bool):
    of_tokens = dispatched(x, routing, clears_rest=False)
    pair = (of_tokens, rows) if first else (rows, of_tokens)
    return Products(routing, options).weight_cotangent(w, *pair)


def _weight_call(platform, w, x, rows, routing, *, options: Options, first: bool):
    if not isinstance(w, jax.Array):
        return None
    x_list = first != options.transpose_w
    pair = (x, rows) if x_list else (rows, x)
    metadata = Products(routing, options).metadata
    product = Wgrad(
        groups=w.shape[0], out_dtype=w.dtype, precision=options.precision,
        implementation=options.implementation,
    )  # fmt: skip
    problem = call.wgrad_problem(
        platform, *pair, metadata, product, x_list=x_list, y_list=not x_list
    )
    choice = lists.wgrad(problem)
    if choice is None:
        return None
    name = "x_rows" if x_list else "y_rows"
    return call.wgrad(choice, *pair, metadata, product, **{name: tokens(routing)})


_UP = Composed("jgg_experts_up", _up_composed, _up_call, cost=costs.conversion)
_UP_ALONE = Composed(
    "jgg_experts_up_alone", _up_alone_composed, functools.partial(_up_call, preactivation=False),
    cost=costs.conversion,
)  # fmt: skip
_ROWS = Composed("jgg_experts_rows", _rows_composed, _rows_call, cost=costs.conversion)
_DOWN = Composed("jgg_experts_down", _down_composed, _down_call, cost=costs.conversion)
_WEIGHT = Composed("jgg_experts_weight", _weight_composed, _weight_call, cost=costs.conversion)
