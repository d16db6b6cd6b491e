"""Products with quantized weights, quantize and dequantize: operands, our arms, checks.

Weights are drawn as they are stored, so that nothing larger is ever made: random codes, and scales
within a factor of 2 to 8 of each other. Affine ones are symmetric (bias = -scale * 2**(bits - 1),
and no code 0 of 4 bits), because that is the integer format that other libraries are fast at.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_groupgemm as jgg

from . import timing
from .products import columns_error, matrix_error, ours_name, some_groups, worst_of_groups
from .quantized_shapes import Convert, Format, Gather, Qmm

Case = Qmm | Gather | Convert


@functools.partial(jax.jit, static_argnames=("form", "shape"))
def _draw(seed, form: Format, shape: tuple[int, int, int]) -> jgg.Quantized:
    groups, n, k = shape
    count = (n, k // form.group_size)
    if form.mode == "fp8":
        return _draw_fp8(seed, shape)

    def one(key):
        first, second = jax.random.split(key)
        weight = jax.random.bits(first, (n, k * form.bits // 32), "uint32")
        if form.mode == "affine":
            if form.bits == 4:
                any_bit = weight | weight >> 1 | weight >> 2 | weight >> 3
                weight |= (~any_bit & jnp.uint32(0x11111111)) << 3
            scales = jnp.exp2(jax.random.uniform(second, count, minval=-4, maxval=-3))
            scales = scales.astype("bfloat16")
            return weight, scales, scales * -(2.0 ** (form.bits - 1))
        if form.mode == "mxfp8":  # exponents 12 and 14: no NaN
            weight = weight & jnp.uint32(0xF7F7F7F7) | jnp.uint32(0x60606060)
        low, spread = (0x28, 16) if form.mode == "nvfp4" else (124, 4)  # E4M3, E8M0
        scales = low + jax.random.randint(second, count, 0, spread)
        return weight, scales.astype("uint8"), None

    leaves = lax.map(one, jax.random.split(jax.random.key(seed), groups))
    static = {"mode": form.mode, "bits": form.bits, "group_size": form.group_size}
    return jgg.Quantized(*leaves, **static)


def _draw_fp8(seed, shape: tuple[int, int, int]) -> jgg.Quantized:
    """Codes with exponents 4, 6, 12 and 14, so none is NaN; scales of 128 x 128."""
    block = (128, 128)

    def one(key):
        first, second = jax.random.split(key)
        codes = jax.random.bits(first, shape[1:], "uint8") & 0xF7 | 0x20
        scales = jnp.exp2(jax.random.uniform(second, [-(-n // 128) for n in shape[1:]]) - 8)
        return lax.bitcast_convert_type(codes, "float8_e4m3fn"), scales

    weight, scales = lax.map(one, jax.random.split(jax.random.key(seed), shape[0]))
    return jgg.Quantized(weight, scales, mode="fp8", bits=8, group_size=128, block=block)


@functools.partial(jax.jit, static_argnames="f")
def each(f, weights):
    """``f`` of one matrix after the other, so that its intermediate results stay small."""
    return lax.map(f, weights)


def to_bfloat16(w: jgg.Quantized) -> jax.Array:
    return jgg.dequantize(w, "bfloat16")


class Weights:
    """Quantized experts, and what arms make of them, once for all cases that share them."""

    def __init__(self, form: Format, groups: int, n: int, k: int, dtype="bfloat16"):
        """Affine scales have this dtype."""
        self.format, self.shape = form, (groups, n, k)
        w = jax.block_until_ready(_draw(1, form, self.shape))
        if form.mode == "affine":
            w = dataclasses.replace(w, scales=w.scales.astype(dtype), biases=w.biases.astype(dtype))
        self.linear = w
        self.peers: dict[str, Any] = {}

    @functools.cached_property
    def packed(self) -> jgg.Quantized:
        with warnings.catch_warnings(action="ignore"):  # what has no layout is timed as it is
            one = jax.eval_shape(jgg.prepack, jax.tree.map(lambda leaf: leaf[0], self.linear))
        if one.layout == "linear":
            return self.linear
        return jax.block_until_ready(each(jgg.prepack, self.linear))

    @functools.cached_property
    def dequantized(self) -> jax.Array:
        return jax.block_until_ready(each(to_bfloat16, self.linear))


@dataclass
class Operands:
    """x of a product, or what is converted; rows of each group, or the matrix of each product."""

    x: Any
    route: Any
    weights: Any
    global_scale: Any = None  # of quantize


def operands(case: Case) -> Operands:
    if isinstance(case, Convert) and case.op == "quantize":
        timing.forget()
        x = timing.random(0, (case.groups, case.n, case.k), case.dtype)
        scale = whole_range(x) if case.global_scale else None
        return Operands(x, None, None, scale)
    key = case.format, case.groups, case.n, case.k
    weights = timing.kept(key, lambda: Weights(*key))
    if isinstance(case, Convert):
        scale = jnp.linspace(0.1, 3, case.groups) if case.global_scale else None
        return Operands(dataclasses.replace(weights.linear, global_scale=scale), None, weights)
    if isinstance(case, Gather):
        return Operands(timing.random(0, (case.pairs, 1, case.k)), case.indices(), weights)
    return Operands(timing.random(0, (case.rows, case.k)), case.sizes(), weights)


@jax.jit
def whole_range(x) -> jax.Array:
    """The global scale of each matrix that uses all of nvfp4's range."""
    return jnp.max(jnp.abs(x), axis=(1, 2)).astype("float32") / 2688


def arms(case: Case, v: Operands, args) -> dict[str, Callable]:
    """Arms of a product with prepacked weights, and with those as they are, if that differs.
    The kernel of "sm80" reads weights only as they are: that is ``ours[sm80, linear]``."""
    if isinstance(case, Convert):
        return {"ours": functools.partial(convert_arm, case, v)}
    w = v.weights
    layouts = {None: w.packed} | ({} if w.packed is w.linear else {"linear": w.linear})
    return {
        ours_name(i, layout): functools.partial(product_arm, case, v, weights, i)
        for i in args.implementation
        for layout, weights in ({"linear": w.linear} if i == "sm80" else layouts).items()
    }


def convert_arm(case: Convert, v: Operands) -> timing.JaxArm:
    if case.op == "dequantize":
        f = functools.partial(jgg.dequantize, dtype=case.dtype)
        return timing.JaxArm(f, (v.x,), case.cold)
    form = case.format
    options = {"mode": form.mode, "bits": form.bits, "group_size": form.group_size}
    f = lambda w, scale: jgg.quantize(w, **options, global_scale=scale)
    return timing.JaxArm(f, (v.x, v.global_scale), case.cold)


def product_arm(case: Qmm | Gather, v: Operands, w, implementation) -> timing.JaxArm:
    route = jnp.asarray(v.route)
    if isinstance(case, Gather):
        f = lambda x, w, i: jgg.gather_qmm(x, w, rhs_indices=i, implementation=implementation)
    else:
        f = lambda x, w, sizes: jgg.grouped_qmm(x, w, sizes, implementation=implementation)
    return timing.JaxArm(f, (v.x, w, route), case.cold)


@jax.jit
def matrix(w: jgg.Quantized, g) -> jax.Array:
    """Float32 (N, K) of expert g."""
    one = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, g, keepdims=False), w)
    return jgg.dequantize(one, "float32")


def checker_of_codes(v: Any, turned: Callable[[jax.Array], jax.Array]) -> Callable[[Any], float]:
    """The checker of products of two operands of codes, where w is multiplied as ``turned``."""
    values = jax.jit(functools.partial(jgg.dequantize, dtype="float32"))
    a = values(v.a)
    if v.wgrad:
        b = values(v.b)
        one = lambda out, g, *rows: columns_error(out, b, a, *rows, g)
    else:
        one = lambda out, g, *rows: matrix_error(out, a, turned(matrix(v.b, g)), *rows)
    return worst_of_groups(one, v.sizes)


def relative_error(got, want) -> float:
    got, want = (np.asarray(value, np.float32).astype(np.float64) for value in (got, want))
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def checker(case: Case, v: Operands) -> Callable[[Any], float]:
    """A function from a result to its relative error: of some matrices, against float32."""
    if isinstance(case, Convert):
        some = sorted({0, case.groups // 2, case.groups - 1})
        wants = [_converted(case, v, g) for g in some]
        of = (lambda out, g: matrix(out, g)) if case.op == "quantize" else (lambda out, g: out[g])
        errors = lambda out: [
            relative_error(of(out, g), w) for g, w in zip(some, wants, strict=True)
        ]
    elif isinstance(case, Gather):
        some = sorted({0, case.pairs // 2, case.pairs - 1})
        errors = lambda out: [_pair_error(out, v, i) for i in some]
    else:
        errors = lambda out: [_rows_error(out, v, g) for g in some_groups(v.route)]
    return lambda out: float(np.max(errors(out)))  # NaN is the largest


def _rows_error(out, v: Operands, g: int) -> float:
    ends = np.cumsum(v.route).astype(np.int32)
    weight = matrix(v.weights.linear, g).T
    return float(matrix_error(out, v.x, weight, ends[g] - v.route[g], ends[g]))


def _pair_error(out, v: Operands, i: int) -> float:
    weight = matrix(v.weights.linear, int(v.route[i]))
    want = jnp.matmul(v.x[i].astype("float32"), weight.T, precision="highest")
    return relative_error(out[i], want)


def _converted(case: Convert, v: Operands, g: int) -> np.ndarray:
    """Matrix g as the CPU, which computes the same bits, gives it."""
    with jax.default_device(jax.devices("cpu")[0]):
        if case.op == "dequantize":
            one = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf[g])), v.x)
        else:
            form = case.format
            options = {"mode": form.mode, "bits": form.bits, "group_size": form.group_size}
            if v.global_scale is not None:
                options["global_scale"] = jnp.asarray(np.asarray(v.global_scale[g]))
            one = jgg.quantize(jnp.asarray(np.asarray(v.x[g])), **options)
        return np.asarray(jgg.dequantize(one, "float32"))
