"""Formats whose codes are a bit stream along K, and whose groups of K share a scale.

    weight (..., K*bits/32), scales[, biases] (..., K/group_size)  <->  w (..., K)

``quantize`` and ``dequantize`` here define, bit for bit, what kernels return.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from .._core import conversion, dtypes, partition
from .._core import float_bits as fb
from .._core.float_bits import u32
from .._kernels import problems
from . import call, codes
from .array import Quantized
from .format import FORMATS, Format, PackedFormat
from .reference import Parts

CONVERSIONS = frozenset({"jgg_quantize", "jgg_dequantize"})


class InGroups(Format):
    """A format in groups of ``group_size`` along K; :meth:`encode` and :meth:`decode` define it."""

    @abc.abstractmethod
    def encode(self, groups, global_scale, bits: int) -> tuple:
        """uint32 codes, scales[, biases] of ``(..., groups, group_size)``."""

    @abc.abstractmethod
    def decode(self, code, scales, biases, global_scale, dtype) -> jax.Array:
        """Values of codes ``(..., groups, chunks, count)``; scales and biases ``(..., groups)``."""

    def dequantized_dtype(self, q: Quantized) -> Any:
        return jnp.bfloat16 if q.global_scale is None else jnp.float32

    def check_operand(self, op: str, w, contract: int, bits: int, group_size: int, block) -> None:
        unit = self.codes_together(bits, group_size)
        if w.ndim >= -contract and w.shape[contract] % unit == 0:
            return
        letters = "(..., K)" if contract == -1 else "(..., K, N)"
        other = 2 if contract == -1 else 1
        hint, whole = "", "" if unit == group_size else f", and of {unit} for whole words"
        if w.ndim >= 2 and w.shape[-other] % unit == 0:
            hint = f". Pass contract=-{other} if K is axis {-other}"
        raise ValueError(
            f"jgg.{op}: w has shape {w.shape}, expected {letters} with K a multiple of "
            f"group_size={group_size}{whole}{hint}"
        )

    def quantized(self, op: str, w, contract: int, global_scale, bits: int, group_size: int,
                  block) -> Quantized:  # fmt: skip
        static: dict[str, Any] = {"mode": self.name, "bits": bits, "group_size": group_size}
        run: Callable = functools.partial(_quantize, **static, contract=contract)
        mesh = partition.explicit_mesh([w] if global_scale is None else [w, global_scale])
        if mesh is not None:  # leaves are sharded as w is, where groups are not cut
            lead = partition.entries_of(w)
            last = lead.pop(contract)
            parts = math.prod(mesh.shape[name] for name in last)
            last = (
                () if w.shape[contract] // self.codes_together(bits, group_size) % parts else last
            )
            spec = NamedSharding(mesh, P(*(entry or None for entry in (*lead, last))))
            run = jax.sharding.auto_axes(run, axes=mesh.explicit_axes, out_sharding=spec)
        weight, scales, biases = run(lax.stop_gradient(w), lax.stop_gradient(global_scale))
        return Quantized(weight, scales, biases, global_scale, **static)

    def values(self, q: Quantized, dtype, implementation: str | None) -> jax.Array:
        return (dequantize if implementation == "reference" else _DEQUANTIZE)(
            q.weight, q.scales, q.biases, q.global_scale,
            mode=q.mode, bits=q.bits, group_size=q.group_size, dtype=dtype,
        )  # fmt: skip

    def parts(self, q: Quantized, dtype, k: int, n: int, transpose_w: bool) -> Any:
        return _Parts(q, dtype, k, n, transpose_w)

    def scale_cotangents(self, q: Quantized, dw) -> dict[str, jax.Array]:
        grads = {}
        if ad.is_undefined_primal(q.scales) or ad.is_undefined_primal(q.biases):
            code = codes.codes_in_groups(q.weight, q.bits, q.group_size)
            in_groups = dw.reshape(code.shape)
            if ad.is_undefined_primal(q.scales):
                ds = (in_groups * code.astype(jnp.float32)).sum((-2, -1))
                grads["scales"] = ds.astype(q.scales.aval.dtype)
            if ad.is_undefined_primal(q.biases):
                grads["biases"] = in_groups.sum((-2, -1)).astype(q.biases.aval.dtype)
        return grads


class PackedInGroups(InGroups, PackedFormat):
    """The same with layout "sm90"; :meth:`packed` and :meth:`of_codes_and_words` define it."""

    def prepack_call(
        self, weight, scales, biases, *, block=None, metadata=None, rows=0, **static
    ) -> tuple[jax.Array, ...]:
        return call.prepack(weight, scales, biases, mode=self.name, **static)

    def codes_and_words(self, q: Quantized) -> tuple[jax.Array, jax.Array]:
        return self.packed(codes.codes_in_groups(q.weight, q.bits, q.group_size), q)

    def unpacked(self, w: Quantized, code, scales, biases=None) -> Quantized:
        """``w`` in layout "linear", of these codes ``(..., K)`` and scales."""
        weight = codes.pack(code, w.bits)
        return dataclasses.replace(w, weight=weight, scales=scales, biases=biases, layout="linear")

    @abc.abstractmethod
    def packed(self, code, q: Quantized) -> tuple[jax.Array, jax.Array]:
        """Codes ``(..., groups, chunks, count)`` as kernels take them, and the scales' words."""

    def packed_scales(self, group_size: int, k_tiles: int) -> tuple[int, int]:
        return k_tiles, 64


# ---- the definition ----------------------------------------------------------------------------


def quantize(w, global_scale, *, mode: str, bits: int, group_size: int) -> tuple:
    """The leaves of w ``(..., K)``: weight, scales[, biases]."""
    groups = codes.blocks(w, group_size)
    code, scales, *biases = _kind(mode).encode(groups, global_scale, bits)
    code = lax.optimization_barrier(code)  # else XLA computes them once for every bit field
    return codes.pack(codes.flat(code), bits), scales, *biases


def dequantize(*leaves, **static):
    """w ``(..., K)``; takes what :func:`values_in_groups` takes."""
    return codes.flatten_groups(values_in_groups(*leaves, **static))


def values_in_groups(weight, scales, biases, global_scale, *, mode: str, bits: int, group_size: int,
                     dtype):  # fmt: skip
    """The values of leaves, ``(..., groups, chunks, count)``."""
    code = codes.codes_in_groups(weight, bits, group_size)
    return _kind(mode).decode(code, scales, biases, global_scale, dtype)


def _kind(mode: str) -> InGroups:
    kind = FORMATS[mode]
    assert isinstance(kind, InGroups)
    return kind


def divide(a, b):
    """Correctly rounded float32 quotient."""
    a, b = jnp.broadcast_arrays(a, b)
    return fb.value(fb.divide(fb.bits(a), fb.bits(b)))


@functools.partial(jax.jit, static_argnames=("mode", "bits", "group_size", "contract"))
def _quantize(w, global_scale, *, mode: str, bits: int, group_size: int, contract: int):
    """``(weight, scales, biases)``."""
    run = _QUANTIZE if contract == -1 else _QUANTIZE_ACROSS
    weight, scales, *biases = run(w, global_scale, mode=mode, bits=bits, group_size=group_size)
    return weight, scales, biases[0] if biases else None


def quantize_across(w, global_scale, **static) -> tuple:
    """The leaves of ``w (..., K, N)`` with its last two axes exchanged."""
    return _QUANTIZE(w.swapaxes(-1, -2), global_scale, **static)


def problem(*_, mode: str, **__):
    """What kernels see of a conversion: see ``conversion.composed``."""
    return functools.partial(problems.Conversion, mode=mode, calls=FORMATS[mode].calls)


_QUANTIZE, _QUANTIZE_ACROSS, _DEQUANTIZE = (
    conversion.composed(name, definition, of_leaves, problem, conversion.in_batch)
    for name, definition, of_leaves in (
        ("quantize", quantize, call.quantize),
        ("quantize_across", quantize_across, call.quantize_across),
        ("dequantize", dequantize, call.dequantize),
    )
)


# ---- what dequantizes a weight within a product ------------------------------------------------


class _Parts(Parts):
    """Of a large weight whose format has no biases, values are looked up."""

    def __init__(self, q: Quantized, dtype, k: int, n: int, transpose_w: bool):
        unit = FORMATS[q.mode].codes_together(q.bits, q.group_size)
        super().__init__(q, dtype, k, n, transpose_w, block=1 if transpose_w else unit)
        self.table = None
        if q.biases is None and k * n > 4 * 256 << q.bits:
            self.table = dtypes.storage(_value_table(q, dtype))

    def values(self, weight, first):
        q, groups = self.q, self.block // self.q.group_size
        part = dataclasses.replace(
            q,
            weight=self.cut(q.weight, weight, first, self.block * q.bits // 32),
            scales=self.cut(q.scales, weight, first, groups),
            biases=None if q.biases is None else self.cut(q.biases, weight, first, groups),
            global_scale=None,
        )
        if self.table is None:
            found = dtypes.storage(
                values_in_groups(
                    part.weight, part.scales, part.biases, None,
                    mode=part.mode, bits=part.bits, group_size=part.group_size, dtype=self.dtype,
                )
            )  # fmt: skip
        else:
            code = codes.codes_in_groups(part.weight, part.bits, part.group_size)
            index = u32(part.scales)[..., None, None] << u32(part.bits) | code
            found = self.table.at[index].get(mode="promise_in_bounds")
        return dtypes.load(codes.flatten_groups(found), self.dtype)


def _value_table(q: Quantized, dtype):
    """Every value of a mode without biases: of code c under scale byte b at ``b << bits | c``."""
    count = 1 << q.bits
    columns = max(count, q.group_size)
    code = jnp.broadcast_to(lax.iota(jnp.uint32, columns) % u32(count), (256, columns))
    scales = lax.broadcasted_iota(jnp.uint8, (256, columns // q.group_size), 0)
    found = dequantize(
        codes.pack(code, q.bits), scales, None, None,
        mode=q.mode, bits=q.bits, group_size=q.group_size, dtype=dtype,
    )  # fmt: skip
    return found[:, :count].reshape(-1)
