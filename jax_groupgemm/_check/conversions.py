"""``quantize``, ``dequantize``, ``prepack`` and the quantizers of FP8 and NVFP4.

Quantizers make the same bytes on every backend, so what a GPU makes is compared with what XLA's
program makes on the CPU. Values of codes are compared with float64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._fp8.quantize import fp8_quantize
from .._nvfp4.quantize import nvfp4_quantize
from .._quantized.convert import dequantize, quantize
from .._quantized.prepack import prepack
from . import oracle, sizes
from .line import Line, Run, Trial, Want
from .oracle import ROUNDING, normal
from .products import FLOATS
from .quantized import MODES, random

# Bits and group sizes of mode "affine".
_BLOCKS = {"mxfp4": (1, 32), "mxfp8": (1, 32), "nvfp4": (1, 16), "fp8": (128, 128)}
_AFFINE = ((4, 64), (2, 32), (3, 128), (8, 64), (5, 32), (6, 64), (4, 16))


def lines(packs: bool) -> list[Line]:
    found = []
    for dtype in FLOATS:
        found += [
            Line("quantize", dtype, _bound(_quantize, dtype)),
            Line("dequantize", dtype, _bound(_dequantize, dtype, False)),
            Line("fp8_quantize", dtype, _bound(_fp8, dtype)),
            Line("nvfp4_quantize", dtype, _bound(_nvfp4, dtype)),
        ]
        if packs:
            found.append(Line("dequantize prepack", dtype, _bound(_dequantize, dtype, True)))
    return found


def _bound(function, *given):
    return lambda rng, quick: function(*given, rng, quick)


class _OnCpu:
    """The result of the same call on the CPU, bit for bit. It is compiled once, without XLA's
    optimizations."""

    def __init__(self, function: Callable[..., Any]):
        self._function, self._compiled = function, None

    def __call__(self, *operands) -> list[list[Want]]:
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            if self._compiled is None:
                lowered = jax.jit(self._function).lower(*operands)
                self._compiled = lowered.compile({"xla_backend_optimization_level": 0})
            leaves = jax.device_get(jax.tree.leaves(self._compiled(*operands)))
        return [[Want(_bits(leaf)) for leaf in leaves]]


def _bits(a) -> np.ndarray:
    """Floats of one byte as bytes; others as they are."""
    a = np.asarray(a)
    return a.view(np.uint8) if a.dtype.itemsize == 1 else a if a.dtype.kind in "iu" else _wide(a)


def _wide(a: np.ndarray) -> np.ndarray:
    return a.astype(np.float64)


def _values(rng, shape, dtype, nan: bool) -> dict[str, np.ndarray]:
    """Ordinary, far from one another in size, with zeros and NaN."""
    w = normal(rng, shape, dtype)
    spread = (w.astype(np.float32) * np.exp2(rng.integers(-6, 7, shape))).astype(w.dtype)
    holes = w.copy()
    holes[..., 0, :] = 0
    if nan:
        holes.reshape(-1, shape[-1])[1, ::40] = np.nan
    return {"ordinary": w, "far apart": spread, "zeros and NaN" if nan else "zeros": holes}


def _same_on_cpu(label: str, function, dtype, rng, shape, nan: bool = True) -> Trial:
    wants = _OnCpu(function)
    runs = [
        Run(name, (w,), functools.partial(wants, w))
        for name, w in _values(rng, shape, dtype, nan).items()
    ]
    return Trial(label, _as_bits(function), runs)


def _as_bits(function):
    def call(*operands):
        return [
            jax.lax.bitcast_convert_type(leaf, np.uint8) if leaf.dtype.itemsize == 1 else leaf
            for leaf in jax.tree.leaves(function(*operands))
        ]

    return call


def _quantize(dtype, rng, quick) -> Iterator[Trial]:
    shape, quick = (3, 70, 256), quick or dtype != "bfloat16"
    for mode in MODES:
        for bits, group_size in _AFFINE[: 2 if quick else None] if mode == "affine" else [(0, 0)]:
            options = {"bits": bits, "group_size": group_size} if mode == "affine" else {}
            function = functools.partial(quantize, mode=mode, contract=-1, **options)
            label = f"{mode} {bits} bits in groups of {group_size}" if options else mode
            # Only which values are NaN is the same everywhere, not their codes.
            yield _same_on_cpu(label, function, dtype, rng, shape, nan=False)
            block = _BLOCKS.get(mode, (1, group_size))
            yield _isolated(f"{label}, NaN", function, dtype, rng, block)


def _isolated(label: str, function, dtype, rng, block: tuple[int, int]) -> Trial:
    """NaN fills its own block, and nothing else."""
    w = normal(rng, (2, 128, 256), dtype)
    w[0, 5, 70], w[1, 127, ::150] = np.nan, np.nan
    (rows, columns), lost = block, np.isnan(w.astype(np.float32))
    lost = lost.reshape(2, 128 // rows, rows, 256 // columns, columns).any((2, 4))
    want = [[Want((~lost).repeat(rows, 1).repeat(columns, 2).astype(np.uint8))]]
    finite = lambda w: jnp.isfinite(dequantize(function(w), np.float32)).astype(np.uint8)
    return Trial(label, finite, [Run("finite numbers", (w,), lambda: want)])


def _fp8(dtype, rng, quick) -> Iterator[Trial]:
    for block in ((1, 128), (128, 128)):
        function = functools.partial(fp8_quantize, block=block)
        yield _same_on_cpu(f"blocks {block}", function, dtype, rng, (300, 256))
    for axis in (-1, -2):
        function = functools.partial(fp8_quantize, block=None, axis=axis, scale_format="e8m0")
        yield _same_on_cpu(f"one scale, axis {axis}", function, dtype, rng, (304, 256))
    yield from _grouped(fp8_quantize, dtype, rng, quick, {})


def _nvfp4(dtype, rng, quick) -> Iterator[Trial]:
    quick = quick or dtype != "bfloat16"
    for options in ({}, {"scale_2d": True}, {"hadamard": True})[: 1 if quick else None]:
        function = functools.partial(nvfp4_quantize, **options)
        yield _same_on_cpu(" ".join(options) or "rows", function, dtype, rng, (96, 256))
    yield from _grouped(nvfp4_quantize, dtype, rng, quick, {} if quick else {"hadamard": True})


def _grouped(quantizer, dtype, rng, quick, options) -> Iterator[Trial]:
    rows, groups, columns = 200, 5, 128
    for axis in (0, -1):
        here = options if axis == 0 else {}
        function = lambda x, s, axis=axis, here=here: quantizer(x, axis=axis, group_sizes=s, **here)
        x, runs, wants = normal(rng, (rows, columns), dtype), [], _OnCpu(function)
        for name, s in sizes.variants(rng, rows, groups, quick):
            given = x if name != sizes.NAN else sizes.with_nan(x, s)
            runs.append(Run(name, (given, s), functools.partial(wants, given, s)))
        yield Trial(f"axis {axis} in groups", _as_bits(function), runs)


def _dequantize(dtype, packed, rng, quick) -> Iterator[Trial]:
    for mode in MODES:
        for bits, group_size in _AFFINE[: 2 if quick else None] if mode == "affine" else [(4, 64)]:
            q = random(rng, (2, 192, 256), mode, bits, group_size, dtype)
            value = oracle.decoded(q)
            allowed = 1.02 * ROUNDING[dtype] * np.abs(value) + 1e-7 * np.abs(value).max()
            want = Want(value, allowed, np.abs(value).max())

            def function(q, packed=packed):
                return dequantize(prepack(q) if packed else q, dtype)

            label = f"{mode} {bits} bits in groups of {group_size}" if mode == "affine" else mode
            yield Trial(label, function, [Run("random", (q,), lambda want=want: [[want]])])
