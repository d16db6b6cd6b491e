"""``moe_mlp``: a mixture of experts, whose experts are two products with an activation between."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.lax import PrecisionLike
from jax.typing import ArrayLike, DTypeLike

from .._core import check, dtypes
from .._core.operations import INLINE, operation_of_its_own_gradient
from .._core.primitive import vary_alike
from .._core.types import Activation, Implementation, Integers, Transport
from .._fp8.grouped_linear import FP8Recipe, fp8_grouped_linear, of_columns
from .._fp8.grouped_mm import along_last
from .._grouped.activation_backward import rounded_activation
from .._grouped.activations import GATED_ACTIVATIONS, check_name
from .._grouped.grouped_mm import grouped_mm
from .._nvfp4.grouped_linear import NVFP4Recipe, nvfp4_grouped_linear
from .._quantized import array, trilinear
from .._quantized import product as quantized_product
from .._quantized.array import Quantized
from .._quantized.format import FLOATS
from .._quantized.grouped_qmm import grouped_qmm
from . import expert_parallel, fp8_experts, sharding
from .experts import Options, experts, summed
from .fp8_experts import Fp8Options
from .permute import dispatched
from .routing import first_expert, route
from .transport import collect, send


@operation_of_its_own_gradient
def moe_mlp(
    x: ArrayLike,
    up: ArrayLike | Quantized,
    down: ArrayLike | Quantized,
    expert_index: Integers,
    expert_weight: ArrayLike,
    *,
    activation: Activation = "swiglu",
    up_bias: ArrayLike | None = None,
    down_bias: ArrayLike | None = None,
    transpose_w: bool | None = None,
    expert_offset: ArrayLike | None = None,
    axis_name: Hashable | None = None,
    transport: Transport | None = None,
    max_rows: int | None = None,
    recipe: NVFP4Recipe | FP8Recipe | None = None,
    quantized: tuple[Quantized, Quantized] | None = None,
    key: jax.Array | None = None,
    precision: PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    implementation: Implementation | Literal["composed"] | None = None,
) -> jax.Array:
    """``y[t] = sum_j weight[t, j] * (act(x[t] @ up[e] + up_bias[e]) @ down[e] + down_bias[e])``,
    where ``e = expert_index[t, j]``; **pairs of token and expert are grouped** by expert.

    A pair whose index is not one of the experts' does not exist: it adds nothing, has no gradient
    and reads nothing. So padding tokens, dropped tokens and a variable number of experts for each
    token need no other argument. No token is dropped, and nothing is padded.

    ``h = x @ up + up_bias`` and the activation, which is made of the rounded h, have the operands'
    dtype. Sums are float32; those over j are in the order of j and are rounded once.

    Args:
      x: ``(..., D)``, a token each.
      up: ``(E, D, 2F)`` for a gated activation, gate and up as the halves of the last axis, or
        ``(E, D, F)``; with ``transpose_w=True`` ``(E, 2F, D)`` or ``(E, F, D)``. An array, or a
        :class:`Quantized` of any format. An array may have gate and up as an axis of its own,
        ``(E, D, 2, F)`` or ``(E, 2, F, D)``, and F may be sharded then without an exchange.
      down: ``(E, F, D)``, likewise.
      expert_index: integers ``(..., k)``.
      expert_weight: ``(..., k)``, floats of any dtype; the result's does not depend on it.
      activation: as in :func:`grouped_mm`.
      up_bias: ``(E, 2F)``, which may be ``(E, 2, F)``, or ``(E, F)``.
      down_bias: ``(E, D)``.
      transpose_w: None stands for False where up is an array, and True where it is quantized.
      expert_offset: integer of shape ``()`` or ``(1,)``, may be traced. ``up`` and ``down`` then
        hold experts ``[expert_offset, expert_offset + E)`` of a longer list.
      axis_name: of the mesh axis, or a tuple of axes, that a ``jax.shard_map`` around this call
        maps. Each device along it holds E experts, those of the first device first, and tokens of
        its own: ``expert_index`` counts the experts of all devices, everything else is this
        device's. There is no ``expert_offset`` then.
      transport: how tokens travel to experts of other devices, see below; None chooses. Sums have
        the same order with either, but XLA may contract multiply-adds of one of them, as it
        does on CPUs: results then differ by float32 roundings. It means nothing where tokens need
        not travel.
      max_rows: rows to make room for, where fewer pairs than ``T * k`` are here. If there are more
        pairs than that, the whole result is NaN, and so are the gradients of tokens and experts
        whose pairs have rows, but zero where an activation's slope is (an inactive relu, a clipped
        swiglu_oai); ``route(...).overflow`` says how many pairs have none. Where
        tokens are sharded it is of each device, and the result of that device; where they travel,
        of all devices that they travel between.
      recipe: products in NVFP4 or FP8, forward and backward, as :func:`nvfp4_grouped_linear` and
        :func:`fp8_grouped_linear` have them.
      quantized: with an :class:`FP8Recipe`, up and down in mode ``"fp8"``, ``(E, 2F, D)`` and
        ``(E, D, F)``, made once per step for several calls: ``quantize(up, mode="fp8",
        contract=-2)``, or ``contract=-1`` with ``transpose_w=True``. Then up and down have the
        gradients, and only a product that the recipe does in bfloat16 reads them.
      key: for the stochastic rounding of a recipe.
      precision: as in :func:`grouped_mm`.
      preferred_element_type: dtype of the result; by default the promoted dtype of x and up, or
        bfloat16 where that has 8 bits or fewer.
      implementation: of the products, as in :func:`grouped_mm`, where there is no recipe; or
        ``"composed"``: the layer is made of other public operations, each with its own backward
        pass and kernels.

    Returns:
      ``(..., D)``.

    Raises:
      ValueError: shapes do not fit, or a name is unknown, or ``implementation`` cannot run.
      TypeError: ``expert_index`` are not integers, or dtypes cannot be multiplied.

    Differentiable to any order in every floating operand, ``expert_weight`` included. With a recipe
    it has reverse mode only, and the gradient of up or down may have no derivative in x
    (:func:`nvfp4_grouped_linear` and :func:`fp8_grouped_linear` say where). No derivative scatters
    rows. The backward pass keeps x, h and the routing; with a recipe codes as well, and with an
    :class:`NVFP4Recipe`, or an :class:`FP8Recipe` and biases, the rows that are summed up. Policies
    of ``jax.checkpoint`` know h as ``"moe_h"``. Under ``vmap`` a batch that shares its experts is
    more tokens of one layer, but with a recipe, ``axis_name`` or fewer ``max_rows``. Under Explicit
    sharding tokens, F and E may be sharded. Under Auto sharding values are right, but the layer
    sees no sharding: XLA moves a row for each pair and sends no token to its experts, so use
    Explicit sharding, or where the rest of the model is under Auto sharding ``jax.shard_map``
    around this layer alone.

    **Experts on several devices**: with ``axis_name``, or where one mesh axis explicitly shards
    tokens and E, tokens travel and weights do not. Of N devices with T tokens each,

    - ``"gather"`` brings every token to every device, with its indices and weights, in one
      all-gather each. One all-to-all brings N partial sums of each token back.
    - ``"all_to_all"`` brings a token once to each device that has one of its experts, and as many
      partial sums back. Each pair of devices exchanges a fixed number of tokens in a round, and
      there are as many rounds as the fullest pair needs: no token is dropped.

    ``"gather"`` is chosen where a token is expected to meet more than half of the devices,
    ``1 - (1 - 1 / N) ** k`` of them if many experts are on each, and where "all_to_all" would spare
    a device fewer than 8192 tokens. Tokens, and backward their gradients, travel in their own
    dtype. Partial sums are float32 on a device, travel in the promoted dtype of x and up, and are
    added in float32 in the order of devices: one rounding more for each device that a token meets.
    The backward pass sends tokens again and keeps h, with room for ``N * T * k`` rows, or
    ``max_rows``. The gradient of ``expert_weight`` equals that on one device.

    **Sharded in other ways**, partial results are added in float32, and gradients travel in their
    own dtype. D, k and tiles of prepacked weights are not cut. Scales and random numbers of a
    recipe are each device's own.

    **With an** :class:`FP8Recipe` values are those of :func:`dispatch`, :func:`fp8_grouped_linear`
    twice and :func:`combine`. The backward pass quantizes a token's cotangent as it comes, and
    multiplies by ``expert_weight`` together with the activation's derivative. With biases, or
    ``implementation="composed"``, gradients are those of the parts. With ``dispatch="fp8"`` and
    experts on several devices, x and the result's cotangent are what their codes stand for; that
    rounding has derivative 1.
    """
    op = "moe_mlp"
    layer = _Layer.checked(
        op, x, up, down, activation, up_bias, down_bias, transpose_w, recipe, quantized
    )
    index = check.integers(op, "expert_index", expert_index)
    weight = check.array(op, "expert_weight", expert_weight)
    x = check.array(op, "x", x)
    lead = x.shape[:-1]
    if index.ndim != x.ndim or index.shape[:-1] != lead:
        letters = "..., k"
        raise ValueError(
            f"jgg.{op}: expert_index has shape {index.shape}, expected ({letters}) = "
            f"{(*lead, 'k')} because x is {x.shape}"
        )
    why = f"because expert_index is {index.shape}"
    check.shape(op, "expert_weight", weight, index.shape, "..., k", why)
    if not jnp.issubdtype(weight.dtype, jnp.floating):
        raise TypeError(f"jgg.{op}: expert_weight must hold floats, got {weight.dtype.name}")
    if isinstance(implementation, str) and implementation == "composed":
        layer, implementation = dataclasses.replace(layer, composed=True), None
    check.implementation(op, implementation, "composed")
    if recipe is not None and implementation is not None:
        raise ValueError(
            f"jgg.{op}: implementation={implementation!r} names a kernel, and a recipe chooses its "
            "own. Leave it out, or use implementation='composed'."
        )
    check.precision(op, precision, x)
    dtype = check.result_dtype(op, preferred_element_type, layer.dtype)
    if max_rows is not None:
        check.count(op, "max_rows", max_rows)
    axis = expert_parallel.checked_axis(op, axis_name, transport, expert_offset)
    if expert_offset is not None:
        expert_offset = first_expert(op, expert_offset)
    if key is not None:
        check.key(op, key)
    run = functools.partial(_one_device, layer, dtype, max_rows, precision, implementation)
    operands = {
        "x": x, "expert_index": index, "expert_weight": weight, "up": layer.up, "down": layer.down,
        "up_bias": layer.up_bias, "down_bias": layer.down_bias, "up_codes": layer.codes[0],
        "down_codes": layer.codes[1], "expert_offset": expert_offset, "key": key,
    }  # fmt: skip
    mesh = sharding.mesh_of(operands)
    if mesh is None:
        return run(operands, axis, None)
    return sharding.explicit(
        run, mesh, operands, axis, gated=layer.parts == 2, transpose_w=layer.transpose_w,
        transport=transport,
    )  # fmt: skip


def _one_device(layer, dtype, max_rows, precision, implementation, operands, axis, total):
    """The layer of one device's operands. Experts are on several devices along ``axis``; ``total``
    sums results of several devices, where they are parts."""
    index, offset, key = (operands[n] for n in ("expert_index", "expert_offset", "key"))
    # Whatever is made of them: sums over devices are then of their gradients, not of R rows.
    names = ("x", "expert_weight", "up", "down", "up_bias", "down_bias")
    floats, tree = jax.tree.flatten([operands[name] for name in names])
    tokens, k = math.prod(index.shape[:-1]), index.shape[-1]
    experts_here = jax.tree.leaves(operands["down"])[0].shape[0]
    come = expert_parallel.arrive(index.reshape(tokens, k), offset, experts_here, axis, max_rows)
    floats = vary_alike(*floats, come.index)[:-1]
    x, weight, *weights = tree.unflatten(floats)
    layer = layer.of(*weights, (operands["up_codes"], operands["down_codes"]))
    lead, plan = x.shape[:-1], come.plan
    routing = route(come.index, layer.experts, expert_offset=come.expert_offset, max_rows=max_rows)
    wide = dtype if total is None else dtypes.accumulator_dtype(dtype)
    x, weight = x.reshape(tokens, x.shape[-1]), weight.reshape(tokens, k)
    in_fp8 = int(isinstance(layer.recipe, FP8Recipe) and layer.recipe.dispatch == "fp8")
    if layer.is_fp8_operation:
        x, weight = send(plan, x, weight, in_fp8=in_fp8)
        sums = layer.in_fp8(x, routing, weight, key, wide if plan is None else layer.dtype)
        (out,) = collect(plan, sums, out_dtypes=(wide,), in_fp8=in_fp8)
    elif layer.is_one_operation:
        pairs = come.index, come.expert_offset
        out = layer.as_one(x, routing, pairs, weight, plan, wide, precision, implementation)
    else:
        x, weight = send(plan, x, weight, in_fp8=in_fp8)
        rows = dispatched(x, routing)
        y = layer(rows, routing.group_sizes, key, precision, implementation)
        out = summed(y, routing, weight, plan, wire=y.dtype, dtype=wide, in_fp8=in_fp8)
    if max_rows is not None:
        # A product and not a selection, so that the gradients are NaN too.
        out = out * _one_if_none(expert_parallel.overflow(routing, plan, axis), dtype=wide)
    if total is not None:
        out = total(out).astype(dtype)
    return out.reshape(*lead, out.shape[-1])


@functools.partial(jax.jit, static_argnames="dtype", inline=INLINE)  # its numbers are no transfers
def _one_if_none(missing, dtype):
    return dtypes.one_or_nan(missing <= 0).astype(dtype)


@dataclasses.dataclass(frozen=True)
class _Layer:
    """The experts: what multiplies sorted rows."""

    experts: int
    up: Any
    down: Any
    up_bias: Any
    down_bias: Any
    activation: str
    dtype: Any
    transpose_w: bool
    recipe: NVFP4Recipe | FP8Recipe | None
    codes: tuple[Quantized | None, Quantized | None]  # of up and down, where they are given
    composed: bool = False  # of other public operations, with their own backward passes

    @classmethod
    def checked(cls, op, x, up, down, activation, up_bias, down_bias, transpose_w, recipe, codes):
        x = check.array(op, "x", x)
        if x.ndim < 1:
            raise ValueError(f"jgg.{op}: x has shape {x.shape}, expected (..., D)")
        quantized = isinstance(up, Quantized)
        if quantized != isinstance(down, Quantized):
            raise TypeError(f"jgg.{op}: up and down must both be a jgg.Quantized, or neither")
        transpose_w = quantized if transpose_w is None else transpose_w
        check.flag(op, "transpose_w", transpose_w)
        of = array.checked if quantized else check.array
        up, down = of(op, "up", up), of(op, "down", down)
        if not isinstance(recipe, NVFP4Recipe | FP8Recipe | None):
            what, known = type(recipe).__name__, "a jgg.NVFP4Recipe, a jgg.FP8Recipe or None"
            raise TypeError(f"jgg.{op}: recipe must be {known}, got {what}")
        if recipe is not None and quantized:
            raise ValueError(f"jgg.{op}: recipe quantizes weights that are arrays")
        check_name(op, activation)
        parts = 2 if activation in GATED_ACTIVATIONS else 1
        d = x.shape[-1]
        names = {False: ("E, D, 2F", "E, F, D"), True: ("E, 2F, D", "E, D, F")}[transpose_w]
        remedy = f"Pass transpose_w={not transpose_w} if they are stored the other way."
        axis_d, axis_f = (2, 1) if transpose_w else (1, 2)
        expected: list[int | None] = [None, None, None]
        expected[axis_d] = d
        why = f"because x is {x.shape}. {remedy}"
        flat = _with_flat_columns(op, "up", up, axis_f) if parts == 2 else up
        check.shape(
            op, "up", flat, expected, names[0] if parts == 2 else names[0].replace("2", ""), why
        )
        f, rest = divmod(flat.shape[axis_f], parts)
        if rest:
            raise ValueError(
                f"jgg.{op}: up has shape {up.shape}, but activation={activation!r} takes gate and "
                "up as two halves"
            )
        shape = (up.shape[0], d, f) if transpose_w else (up.shape[0], f, d)
        check.shape(op, "down", down, shape, names[1], f"because up is {up.shape}. {remedy}")
        if quantized:
            for name, w, k in (("up", up, d), ("down", down, f)):
                rows = jax.ShapeDtypeStruct((1, k), x.dtype)
                quantized_product.fitting(op, name, rows, w, transpose_w, None, rank=3)
        up_bias = _bias(op, "up_bias", up_bias, up, f * parts, parts == 2)
        down_bias = _bias(op, "down_bias", down_bias, up, d)
        dtype = _dtype(op, x, up, down, recipe)
        for name, bias in (("up_bias", up_bias), ("down_bias", down_bias)):
            if bias is not None:
                check.holds(op, name, bias, dtype)
                if recipe is not None:
                    check.dtype(op, name, bias.dtype, FLOATS, " where there is a recipe")
        return cls(
            up.shape[0], up, down, up_bias, down_bias, activation, jnp.dtype(dtype), transpose_w,
            recipe, _codes(op, codes, recipe, (up.shape[0], f * parts, d), (up.shape[0], d, f)),
        )  # fmt: skip

    @property
    def parts(self) -> int:
        """Columns of up for each of h's activation."""
        return 2 if self.activation in GATED_ACTIVATIONS else 1

    def of(self, up, down, up_bias, down_bias, codes) -> _Layer:
        """The same of a device's part of the weights, with gate and up in one axis."""
        if not isinstance(up, Quantized) and up.ndim == 4:
            e, a, b, c = up.shape
            up = up.reshape((e, a * b, c) if self.transpose_w else (e, a, b * c))
        if up_bias is not None:
            up_bias = up_bias.reshape(up_bias.shape[0], math.prod(up_bias.shape[1:]))
        return dataclasses.replace(
            self, experts=down.shape[0], up=up, down=down, up_bias=up_bias, down_bias=down_bias,
            codes=codes,
        )  # fmt: skip

    @property
    def is_one_operation(self) -> bool:
        """Whether all of it is ``experts``: recipes and unusual dtypes are other operations."""
        weights = () if isinstance(self.up, Quantized) else (self.up, self.down)
        dtypes_ = {self.dtype.name, *(w.dtype.name for w in weights)}
        return (
            not self.composed
            and self.recipe is None
            and dtypes_ <= {"float64", "float32", "bfloat16", "float16"}
        )

    @property
    def is_fp8_operation(self) -> bool:
        """Whether all of it is ``fp8_experts``."""
        biases = self.up_bias, self.down_bias
        return not self.composed and isinstance(self.recipe, FP8Recipe) and biases == (None, None)

    def in_fp8(self, x, routing, weight, key, out_dtype):
        assert isinstance(self.recipe, FP8Recipe)
        options = Fp8Options(
            self.activation, self.dtype, jnp.dtype(out_dtype), self.transpose_w, self.recipe
        )
        up, down = (w.astype(self.dtype) for w in (self.up, self.down))
        key = key if self.recipe.stochastic_rounding else None
        return fp8_experts.experts(x, up, down, self.codes, routing, weight, key, options)

    def as_one(self, x, routing, pairs, weight, plan, out_dtype, precision, implementation):
        op, up, down = "moe_mlp", self.up, self.down
        operands = ()
        if isinstance(up, Quantized):
            of = lambda w: quantized_product.checked(
                op, jax.ShapeDtypeStruct((1, w.shape[2 if self.transpose_w else 1]), self.dtype), w,
                self.transpose_w, self.dtype, rank=3,
            )[0]  # fmt: skip
            up, down = of(up), of(down)
        else:
            operands = (x, up, down)
        options = Options(
            self.activation, self.dtype, jnp.dtype(out_dtype), self.transpose_w,
            check.precision(op, precision, *operands), implementation,
        )  # fmt: skip
        biases = self.up_bias, self.down_bias
        return experts(x, up, down, *biases, routing, pairs, weight, plan, options)

    def __call__(self, rows, sizes, key, precision, implementation):
        run = functools.partial(self._product, sizes, precision, implementation)
        keys = trilinear.split(key)
        h = run(rows.astype(self.dtype), self.up, self.codes[0], self.up_bias, keys[0])
        h = checkpoint_name(h, "moe_h")
        a = rounded_activation(h, self.activation)
        return run(a, self.down, self.codes[1], self.down_bias, keys[1])

    def _product(self, sizes, precision, implementation, rows, w, codes, bias, key):
        same: dict[str, Any] = {"bias": bias, "preferred_element_type": self.dtype}
        if self.recipe is not None:
            w = w.astype(self.dtype)
            options: dict[str, Any] = {"bias": bias, "key": key, "recipe": self.recipe}
            if not isinstance(self.recipe, FP8Recipe):
                w = w if self.transpose_w else w.swapaxes(1, 2)
                return nvfp4_grouped_linear(rows, w, sizes, **options)
            linear: Callable = fp8_grouped_linear if self.transpose_w else of_columns
            return linear(rows, w, sizes, quantized=codes, **options)
        product: Callable = grouped_qmm if isinstance(w, Quantized) else grouped_mm
        if product is grouped_mm:
            same["precision"] = precision
        with jax.numpy_dtype_promotion("standard"):  # dtypes have been accepted
            return product(
                rows, w, sizes, transpose_w=self.transpose_w, implementation=implementation, **same
            )


def _dtype(op: str, x, up, down, recipe):
    """The operands' common dtype: of rows that are multiplied, and of h."""
    if isinstance(up, Quantized):
        return x.dtype
    for name, value in (("x", x), ("up", up), ("down", down)):
        check.numeric(op, name, value)
    try:
        dtype, _ = dtypes.promoted(x.dtype, up.dtype), dtypes.promoted(x.dtype, down.dtype)
    except ValueError as error:
        what = f"x of dtype {x.dtype.name}, up of {up.dtype.name} and down of {down.dtype.name}"
        raise TypeError(f"jgg.{op}: {what} have no common dtype. Convert them") from error
    dtype = dtypes.default_result(dtype)
    floating = jnp.issubdtype(dtype, jnp.floating)
    allowed = ("bfloat16", "float32") if recipe is not None else (dtype.name,) if floating else ()
    if dtype.name not in allowed:
        want = "bfloat16 or float32 where there is a recipe" if recipe is not None else "floats"
        raise TypeError(
            f"jgg.{op}: x and up must be {want}, got {x.dtype.name} and {up.dtype.name}"
        )
    check.holds(op, "down", down, dtype)
    return dtype


def _codes(op: str, codes, recipe, *shapes) -> tuple[Quantized | None, Quantized | None]:
    if codes is None:
        return None, None
    if not isinstance(recipe, FP8Recipe):
        raise ValueError(f"jgg.{op}: quantized are FP8 codes of up and down, for a jgg.FP8Recipe")
    if not isinstance(codes, tuple | list) or len(codes) != 2:
        raise TypeError(f"jgg.{op}: quantized must be two jgg.Quantized, of up and down")
    checked = []
    for name, q, shape in zip(("up", "down"), codes, shapes, strict=True):
        q = along_last(op, f"quantized {name}", q, "E, N, K")
        if tuple(q.shape) != shape:
            raise ValueError(
                f"jgg.{op}: quantized {name} has shape {q.shape}, expected {shape}: what products "
                "sum over comes last"
            )
        checked.append(q)
    return tuple(checked)


def _bias(op: str, name: str, bias, up, n: int, gated: bool = False):
    if bias is None:
        return None
    bias = check.array(op, name, bias)
    flat = _with_flat_columns(op, name, bias, 1) if gated and bias.ndim == 3 else bias
    check.shape(op, name, flat, (up.shape[0], n), "E, N", f"because up is {up.shape}")
    return bias


def _with_flat_columns(op: str, name: str, a, axis: int):
    """The type of ``a`` with gate and up in one axis, where it has two for them."""
    if isinstance(a, Quantized) or a.ndim != (4 if name == "up" else 3):
        return a
    if a.shape[axis] != 2:
        raise ValueError(f"jgg.{op}: {name} has shape {a.shape}, expected 2 in axis {axis}")
    shape = (*a.shape[:axis], 2 * a.shape[axis + 1], *a.shape[axis + 2 :])
    return jax.ShapeDtypeStruct(shape, a.dtype)
