"""The compiled handlers: loading, version check, choice of implementation, FFI calls.

This is the only file that talks to ``jax.ffi`` and to the extension module. Importing it touches
no device and starts no backend.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import importlib.util
import math
import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import _nvfp4_layouts as layouts
from . import _reference, _segments, _split, _tuned

#: Custom calls, and the platforms that there is a handler for.
TARGETS: dict[str, tuple[str, ...]] = {
    "jgg_mm": ("cpu", "cuda"),
    "jgg_wgrad": ("cpu", "cuda"),
    "jgg_nvfp4_grouped_mm": ("cuda",),
    "jgg_nvfp4_grouped_wgrad": ("cuda",),
}
# Those that "sm100" has kernels for; it has no others, and no other kernel has these.
_SM100_TARGETS = ("jgg_nvfp4_grouped_mm", "jgg_nvfp4_grouped_wgrad")
# CUDA handlers that are not offered before the GPU tests have run on them: until then everything
# quantized but NVFP4 products runs its reference.
UNTRIED = ("jgg_qmm", "jgg_qmm_packed", "jgg_nvfp4_quantize", "jgg_quantize", "jgg_dequantize")

# Likewise whether float32 operands are split for Hopper where "sm90" is not named.
SPLITS = False
# Likewise whether "sm90" gathers and scatters rows by list itself where it is not named.
GATHERS = False

#: Pass as ``disabled_checks`` to ``jax.export.export``: our custom calls are stable by name.
EXPORT_DISABLED_CHECKS = [jax.export.DisabledSafetyCheck.custom_call(name) for name in TARGETS]

#: Every name that ``implementation=`` takes, in order of preference.
IMPLEMENTATIONS = ("sm100", "sm90", "sm80", "cpu", "reference")

# Kernels, and the platform that each runs on. On CUDA the handler takes the first that can do the
# call, unless one is named; what "sm90" cannot do (lines that are not a multiple of 16 bytes,
# segments out of order, transposed results) runs on "sm80".
PLATFORMS = {"sm100": "cuda", "sm90": "cuda", "sm80": "cuda", "cpu": "cpu"}
# The one compute capability whose instructions a kernel is made of.
_CAPABILITY = {"sm100": 100, "sm90": 90}

_KERNEL_DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Build:
    """What the extension module was built with, and whether its handlers are registered."""

    cuda: str | None = None  # toolkit version, None without CUDA handlers
    architectures: tuple[str, ...] = ()
    cutlass: str | None = None
    ffi_api: tuple[int, int] | None = None
    runtime_ffi_api: tuple[int, int] | None = None
    problem: str | None = None  # why no handler is registered

    @property
    def registered(self) -> tuple[str, ...]:
        """The platforms whose handlers are registered."""
        if self.problem is not None:
            return ()
        return ("cpu",) if self.cuda is None else ("cpu", "cuda")


def _runtime_ffi_api() -> tuple[int, int] | None:
    """The XLA FFI API version of the installed jaxlib, from the header that it ships."""
    header = Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h"
    try:
        text = header.read_text()
    except OSError:
        return None
    found = re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", text)
    version = {name: int(number) for name, number in found}
    return (version["MAJOR"], version["MINOR"]) if len(version) == 2 else None


def _incompatible(built: tuple[int, int], runtime: tuple[int, int] | None) -> str | None:
    """Why a handler of one FFI API version must not be registered with a runtime of another.

    XLA takes handlers of its own version or an older one. A handler that it refuses would keep
    the whole backend from starting, so it must not even be offered.
    """
    jaxlib = importlib.metadata.version("jaxlib")
    needed = f"jax_groupgemm's handlers need XLA FFI API {built[0]}.{built[1]} (jaxlib >= 0.11.0)"
    if runtime is None:
        return f"{needed}; the FFI API version of jaxlib {jaxlib} is unknown"
    if runtime[0] != built[0] or runtime[1] < built[1]:
        return f"{needed}; the installed jaxlib {jaxlib} has {runtime[0]}.{runtime[1]}"
    return None


def _extension() -> Any:
    """The extension module: beside this file, or, in a source checkout, the installed one."""
    name = f"{__package__}._ffi"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        try:
            files = importlib.metadata.files("jax_groupgemm") or []
        except importlib.metadata.PackageNotFoundError:
            files = []
        found = next((f for f in files if f.match("jax_groupgemm/_ffi.*.so")), None)
        if found is None:
            raise
        spec = importlib.util.spec_from_file_location(name, found.locate())
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[name] = module
        return module


def load() -> Build:
    """Import the extension and register its handlers."""
    try:
        _ffi = _extension()
    except ImportError as error:
        problem = f"the extension module cannot be imported ({error})"
        warnings.warn(f"jax_groupgemm: {problem}; using the reference lowering", stacklevel=2)
        return Build(problem=problem)
    info: dict[str, Any] = _ffi.build_info()
    build = Build(
        cuda=info["cuda"],
        architectures=tuple(info["architectures"]),
        cutlass=info["cutlass"],
        ffi_api=tuple(info["ffi_api"]),
        runtime_ffi_api=_runtime_ffi_api(),
    )
    assert build.ffi_api is not None
    problem = _incompatible(build.ffi_api, build.runtime_ffi_api)
    if problem:
        warnings.warn(
            f"jax_groupgemm: {problem}. Using the reference lowering; upgrade jax and jaxlib.",
            stacklevel=2,
        )
        return dataclasses.replace(build, problem=problem)
    for platform, handlers in _ffi.registrations().items():
        for name, handler in handlers.items():
            jax.ffi.register_ffi_target(name, handler, platform=platform)
    return build


BUILD = load()


def unsupported(implementation: str, dtypes, out_dtype) -> str | None:
    """Why an implementation cannot run a product of these dtypes; None where it can."""
    if implementation == "reference":
        return None
    for role, dtype in [*(("operand", d) for d in dtypes), ("result", out_dtype)]:
        if jnp.dtype(dtype).name not in _KERNEL_DTYPES:
            return f"{role} dtype {jnp.dtype(dtype).name} is not one of {', '.join(_KERNEL_DTYPES)}"
    return None


def missing(implementation: str, target: str) -> str | None:
    """Why an implementation has no kernel for a custom call."""
    platform = PLATFORMS[implementation]
    if platform not in TARGETS.get(target, ()):
        return f"there is no {target} for {platform}"
    if (implementation == "sm100") != (target in _SM100_TARGETS):
        return f"there is no {target} for {implementation}"
    return None


def unavailable(implementation: str, capabilities: Sequence[int] = ()) -> str | None:
    """Why this process cannot run a kernel, on CUDA devices of these compute capabilities."""
    if BUILD.problem is not None:
        return BUILD.problem
    if PLATFORMS[implementation] not in BUILD.registered:
        return "this build has no CUDA kernels"
    for capability in capabilities:
        needed = _CAPABILITY.get(implementation, capability)
        if capability != needed:
            return (
                f"it needs compute capability {needed / 10:.1f}, this GPU has {capability / 10:.1f}"
            )
        if not any(_has_code(arch, capability) for arch in BUILD.architectures):
            return (
                f"this build has code for {', '.join(BUILD.architectures)}, "
                f"not for compute capability {capability / 10:.1f}"
            )
    return None


def _has_code(architecture: str, capability: int) -> bool:
    number = int(re.sub(r"\D", "", architecture))
    if architecture.endswith("-virtual"):  # PTX: compiled by the driver, for anything newer
        return capability >= number
    if "a" in architecture:  # architecture-specific code runs there only
        return capability == number
    return capability // 10 == number // 10 and capability >= number


def chosen(
    platform: str, operands, implementation: str | None, out_dtype, target: str = "jgg_mm"
) -> str:
    """The implementation that a computation lowered for a platform takes.

    ``operands`` are those whose dtype a kernel of ``target`` must know.
    Raises ValueError where one was named that cannot run. A process without a GPU lowers for
    somebody else's, whose build is taken to be complete.
    """
    if implementation == "reference":
        return implementation
    kernels = [name for name, where in PLATFORMS.items() if where == platform]
    kernel = implementation or (kernels[-1] if kernels else None)  # the last needs least
    if implementation is not None and implementation not in kernels:
        where = PLATFORMS[implementation]
        reason = f"it runs on {where}, but this computation is lowered for another platform"
    elif kernel is None:
        return "reference"
    else:
        reason = missing(kernel, target)
        reason = reason or unsupported(kernel, [a.dtype for a in operands], out_dtype)
        if reason is None and platform == "cpu":
            reason = unavailable(kernel)
        elif reason is None and (capabilities := live_capabilities()):
            reason = unavailable(kernel, capabilities)
            if reason is not None and implementation is None:
                _warn_once(
                    "jax_groupgemm runs its reference lowering on this GPU, which is slow: "
                    f"{reason}. Install with JGG_CUDA=ON, or see python -m jax_groupgemm.info"
                )
        if reason is None:
            return implementation or platform
    if implementation is not None:
        raise ValueError(
            f"jgg: implementation={implementation!r} cannot run: {reason}. "
            "Use implementation=None, or 'reference'."
        )
    return "reference"


def takes_sm100(platform: str, implementation: str | None, target: str) -> bool:
    """Whether a computation lowered for a platform takes "sm100", which has this custom call alone.

    As :func:`chosen`, but unless it is named only where every GPU of this process can run it.
    """
    if implementation == "sm100":
        return chosen(platform, (), implementation, jnp.float32, target) == "sm100"
    if implementation is not None or platform != "cuda" or missing("sm100", target):
        return False
    capabilities = live_capabilities()
    return bool(capabilities) and unavailable("sm100", capabilities) is None


def may_take_lists(x, w, implementation, transpose_w=False) -> bool:
    """Whether "sm90" may be what runs ``mm`` with lists of rows, of operands of these shapes."""
    k, n = x.shape[-1], w.shape[1 if transpose_w else 2]
    return (
        (implementation == "sm90" or (implementation is None and GATHERS))
        and x.dtype == w.dtype
        and x.dtype in (jnp.bfloat16, jnp.float16)
        and 0 not in (*x.shape, *w.shape)
        and k % 8 == 0  # lines of whole 16 bytes
        and (n % 8 == 0 or transpose_w)
    )


def takes_lists(platform: str, x, w, out_dtype, implementation, transpose_w=False) -> bool:
    """Whether it is what runs it in a computation lowered for a platform: where it is named, or
    where every GPU of this process can. No other kernel takes lists of rows."""
    if not may_take_lists(x, w, implementation, transpose_w):
        return False
    if implementation is not None:
        return chosen(platform, (x, w), implementation, out_dtype) == "sm90"
    capabilities = live_capabilities()
    return (
        platform == "cuda"
        and bool(capabilities)
        and unavailable("sm90", capabilities) is None
        and unsupported("sm90", (), out_dtype) is None
    )


def live_capabilities() -> tuple[int, ...]:
    """Compute capabilities of this process's CUDA devices, as 80, 90, ...; empty without one."""
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:
        return ()
    return tuple(sorted({round(10 * float(d.compute_capability)) for d in devices}))


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=2)


# ---- calls -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """What a kernel of ``mm`` does to its float32 sums ``y`` before it rounds them::

        existing_out + row_scale * activation(y + bias[weight])

    Operands are (G, N), (T,) and the result's shape; None leaves a step out.
    """

    bias: Any = None
    activation: str | None = None
    row_scale: Any = None
    existing_out: Any = None


def mm(implementation, x, w, *meta, form, rows, out_dtype, transpose_x, transpose_w,
       transpose_out, precision, epilogue: Epilogue | None = None, x_rows=None,
       y_rows=None):  # fmt: skip
    """Custom call ``jgg_mm``: x, w, metadata[, options] -> out.

    With lists of rows, int32 (T,), row t of x is its row ``x_rows[t]`` (zeros where it has none),
    and row t of the result its row ``y_rows[t]``, a permutation.
    """
    n = w.shape[1 if transpose_w else 2]
    lists = [rows for rows in (x_rows, y_rows) if rows is not None]
    rows_x = x.shape[1 if transpose_x else 0] if x_rows is None else x_rows.shape[0]
    flags: dict[str, Any] = {
        "transpose_x": transpose_x,
        "transpose_w": transpose_w,
        "transpose_out": transpose_out,
    }
    if implementation == "cpu":
        assert epilogue is None
        assert not lists
        table = _segments.decode(form, meta, rows_x, rows, w.shape[0])
        shape = (n, rows) if transpose_out else (rows, n)
        return _call("jgg_mm", x, w, [table], shape, out_dtype, flags | {"ordered": form.ordered_y})
    epilogue = epilogue or Epilogue()
    flags |= _metadata_flags(implementation, form, meta, precision) | {
        "in_order": form.ordered_y,
        "bias": epilogue.bias is not None,
        "activation": epilogue.activation or "",
        "row_scale": epilogue.row_scale is not None,
        "existing_out": epilogue.existing_out is not None,
        "x_rows": x_rows is not None,
        "y_rows": y_rows is not None,
    }
    rest = [*_segments.narrow(form, meta, rows_x, w.shape[0]), *lists]
    options = (epilogue.bias, epilogue.row_scale, epilogue.existing_out)
    rest += [value for value in options if value is not None]
    gated = epilogue.activation in ("swiglu", "geglu")
    columns = n // 2 if gated else n
    shape = (columns, rows) if transpose_out else (rows, columns)
    mean_rows = rows / max(rest[0].shape[0], 1)
    tile = 0 if lists else _tuned.mm(x, w, mean_rows, out_dtype, transpose_w, gated)
    planes = _planes(
        implementation, x, w, precision,
        runs=form.ordered_y and not (transpose_x or transpose_out or gated)
        and (transpose_w or n % 8 == 0),
        pays=rows >= 64 * rest[0].shape[0] and min(w.shape[1:]) >= 64,
    )  # fmt: skip
    if planes > 1:
        x = _split.planes(x, planes, 64, -1)
        w = _split.planes(w, planes, 64, -1 if transpose_w else -2)
    flags |= {"planes": planes, "tile": tile}
    # The result takes the place of existing_out: XLA copies it first where it is needed later.
    aliases = None if epilogue.existing_out is None else {1 + len(rest): 0}
    return _call("jgg_mm", x, w, rest, shape, out_dtype, flags, aliases)


def wgrad(implementation, x, y, *meta, form, groups, out_dtype, transpose_x, transpose_y,
          precision):  # fmt: skip
    """Custom call ``jgg_wgrad``: x, y, metadata[, group_offset] -> out."""
    shape = (groups, x.shape[0 if transpose_x else 1], y.shape[0 if transpose_y else 1])
    rows = x.shape[1 if transpose_x else 0], y.shape[1 if transpose_y else 0]
    flags: dict[str, Any] = {"transpose_x": transpose_x, "transpose_y": transpose_y}
    if implementation == "cpu":
        rest = [_segments.decode(form, meta, *rows, groups)]
    else:
        rest = _segments.narrow(form, meta, rows[0], groups)
        flags |= _metadata_flags(implementation, form, meta, precision) | {
            "own_weight": form.own_weight
        }
        mean_rows = rows[0] / max(rest[0].shape[0], 1)
        tile = _tuned.wgrad(x, y, mean_rows, out_dtype, shape, transpose_x, transpose_y)
        contiguous = transpose_x and transpose_y  # along the contracted axis, both
        a, b = shape[1:]
        planes = _planes(
            implementation, x, y, precision,
            runs=form.own_weight and not (contiguous and form.kind == "segments")
            and (transpose_x or a % 8 == 0) and (transpose_y or b % 8 == 0),
            pays=a * b >= 64 * (a + b),
        )  # fmt: skip
        if planes > 1:
            x = _split.planes(x, planes, 8, -1 if transpose_x else None)
            y = _split.planes(y, planes, 8, -1 if transpose_y else None)
        flags |= {"planes": planes, "tile": tile}
    return _call("jgg_wgrad", x, y, rest, shape, out_dtype, flags)


def _planes(implementation, a, b, precision, *, runs: bool, pays: bool) -> int:
    """The bfloat16 planes in which a CUDA kernel takes each operand; 1: as they are.

    ``runs`` where there is a kernel for them, ``pays`` where making them is worth it.
    """
    if _reference.promoted(a.dtype, b.dtype) != jnp.float32 or not runs:
        return 1
    capabilities = live_capabilities()
    if implementation != "sm90":
        hopper = bool(capabilities) and all(capability == 90 for capability in capabilities)
        if implementation == "sm80" or not (SPLITS and hopper and pays):
            return 1
    if capabilities and "90a" not in BUILD.architectures:
        return 1
    return 2 if precision == jax.lax.Precision.HIGH else 3


def qmm(implementation, x, q, meta, *, form, rows, out_dtype, transpose_w, precision,
        epilogue: Epilogue | None = None):  # fmt: skip
    """Custom call ``jgg_qmm``: x, weight, scales, metadata[, biases][, global_scale]
    [, group_offset][, bias][, row_scale] -> out; ``jgg_qmm_packed`` for a prepacked weight."""
    groups, n = q.shape[0], q.shape[1 if transpose_w else 2]
    epilogue = epilogue or Epilogue()
    assert epilogue.existing_out is None
    columns = n // 2 if epilogue.activation in ("swiglu", "geglu") else n
    metadata, *offset = _segments.narrow(form, meta, x.shape[0], groups)
    if 0 in (rows, columns, *x.shape, *q.weight.shape, *metadata.shape):
        return jnp.zeros((rows, columns), out_dtype)
    flags = _metadata_flags(implementation, form, meta, precision) | {
        "mode": q.mode,
        "global_scale": q.global_scale is not None,
        "bias": epilogue.bias is not None,
        "activation": epilogue.activation or "",
        "row_scale": epilogue.row_scale is not None,
    }
    if q.layout == "linear":
        target = "jgg_qmm"
        flags |= {
            "transpose_w": transpose_w,
            "layout": q.layout,
            "bits": q.bits,
            "group_size": q.group_size,
            "biases": q.biases is not None,
            "in_order": form.ordered_y,
        }
    else:
        target = "jgg_qmm_packed"
        flags = {name: flag for name, flag in flags.items() if name not in ("tf32", "kernel")}
    options = (q.biases, q.global_scale, *offset, epilogue.bias, epilogue.row_scale)
    given = [value for value in options if value is not None]
    call = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct((rows, columns), out_dtype))
    return call(x, q.weight, q.scales, metadata, *given, **_attributes(flags))


def nvfp4_grouped_mm(x, w, group_sizes, alpha, *, out_dtype):
    """Custom call ``jgg_nvfp4_grouped_mm``: x, its scales, w, its scales, sizes, alpha -> out,
    workspace."""
    (rows, k), (groups, n, _) = x.shape, w.shape
    sizes, *_ = _segments.narrow(_segments.SIZES, (group_sizes,), rows, groups)
    columns, scale_rows = _up(k // 16, 4), layouts.padded_rows(rows, groups, layouts.SWIZZLED)
    workspace = _nvfp4_workspace(groups, scale_rows * columns, groups * _up(n, 128) * columns)
    out = jax.ShapeDtypeStruct((rows, n), out_dtype)
    call = jax.ffi.ffi_call("jgg_nvfp4_grouped_mm", (out, workspace))
    return call(x.weight, x.scales, w.weight, w.scales, sizes, alpha)[0]


def nvfp4_grouped_wgrad(x, dy, group_sizes, alpha, beta=None, existing_out=None):
    """Custom call ``jgg_nvfp4_grouped_wgrad``: x, its scales, dy, its scales, sizes, alpha
    [, beta, existing_out] -> out, workspace."""
    (k, padded), (n, _), (rows,) = x.shape, dy.shape, x.positions.shape
    (groups,) = group_sizes.shape
    sizes, *_ = _segments.narrow(_segments.SIZES, (group_sizes,), rows, groups)
    workspace = _nvfp4_workspace(groups, _up(n, 128) * padded // 16, _up(k, 128) * padded // 16)
    out = jax.ShapeDtypeStruct((groups, n, k), jnp.float32)
    existing = () if existing_out is None else (beta, existing_out)
    call = jax.ffi.ffi_call(
        "jgg_nvfp4_grouped_wgrad",
        (out, workspace),
        input_output_aliases={7: 0} if existing else None,
    )
    operands = (x.weight, x.scales, dy.weight, dy.scales, sizes, alpha, *existing)
    return call(*operands, **_attributes({"tokens": rows}))[0]


def nvfp4_quantize(x, group_sizes, seed, *, axis, scale_2d, hadamard):
    """Custom call ``jgg_nvfp4_quantize``: x (M, R, C), sizes, seed -> weight, scales, global_scale,
    workspace. Sizes and seed may be empty."""
    *lead, rows, columns = (1, *x.shape)[-max(x.ndim, 2) :]
    matrices = math.prod(lead)
    lines, along = (rows, columns) if axis == -1 else (columns, rows)
    sizes, words = jnp.zeros((0,), jnp.int32), 3 * matrices
    if group_sizes is not None:
        (groups,) = group_sizes.shape
        sizes, *_ = _segments.narrow(_segments.SIZES, (group_sizes,), rows, groups)
        words += 2 * (groups + 1)
        if axis == -2:
            along = layouts.padded_rows(rows, groups, layouts.GROUPED)
    results = (
        jax.ShapeDtypeStruct((matrices, lines, along // 8), jnp.uint32),
        jax.ShapeDtypeStruct((matrices, lines, along // 16), jnp.uint8),
        jax.ShapeDtypeStruct((matrices,), jnp.float32),
        jax.ShapeDtypeStruct((words,), jnp.uint32),
    )
    call = jax.ffi.ffi_call("jgg_nvfp4_quantize", results)
    flags = {"along_rows": axis == -2, "scale_2d": scale_2d, "hadamard": hadamard}
    seed = jnp.zeros((0,), jnp.uint32) if seed is None else seed
    operands = x.reshape(matrices, rows, columns), sizes, seed
    weight, scales, global_scale, _ = call(*operands, **_attributes(flags))
    lead = x.shape[:-2] if x.ndim == 1 else (*x.shape[:-2], lines)
    weight, scales = (a.reshape(*lead, a.shape[-1]) for a in (weight, scales))
    return weight, scales, global_scale.reshape(x.shape[:-2])


def quantize(w, global_scale, *, mode, bits, group_size):
    """Custom call ``jgg_quantize``: w (R, K)[, global_scale (L,)] -> weight, scales[, biases]."""
    *lead, k = w.shape
    rows = math.prod(lead)
    scales = jax.ShapeDtypeStruct(
        (rows, k // group_size), w.dtype if mode == "affine" else jnp.uint8
    )
    results = jax.ShapeDtypeStruct((rows, k * bits // 32), jnp.uint32), scales
    results += (scales,) if mode == "affine" else ()
    flags = {"mode": mode, "bits": bits, "group_size": group_size}
    flags |= {"global_scale": global_scale is not None}
    more = [] if global_scale is None else [global_scale.reshape(-1)]
    call = jax.ffi.ffi_call("jgg_quantize", results)
    out = call(w.reshape(rows, k), *more, **_attributes(flags))
    return tuple(a.reshape(*lead, a.shape[1]) for a in out)


def dequantize(weight, scales, biases, global_scale, *, mode, bits, group_size, dtype):
    """Custom call ``jgg_dequantize``: weight, scales[, biases], all (R, ...)[, global_scale (L,)]
    -> w."""
    *lead, words = weight.shape
    rows, k = math.prod(lead), words * 32 // bits
    operands = [a.reshape(rows, a.shape[-1]) for a in (weight, scales, biases) if a is not None]
    if global_scale is not None:
        operands.append(global_scale.reshape(-1))
    flags = {"mode": mode, "bits": bits, "group_size": group_size}
    flags |= {"biases": biases is not None, "global_scale": global_scale is not None}
    call = jax.ffi.ffi_call("jgg_dequantize", jax.ShapeDtypeStruct((rows, k), dtype))
    return call(*operands, **_attributes(flags)).reshape(*lead, k)


def _nvfp4_workspace(groups: int, *scales: int):
    """As ffi/nvfp4/layout.h has it: arrays of shapes, addresses, strides and layouts, two prefix
    sums, tensor maps for 160 multiprocessors, and swizzled scales."""
    arrays = [groups * size for size in (12, *[8] * 8, 20, 20)]
    parts = [*arrays, *[4 * (groups + 1)] * 2, 160 * 6 * 128, *scales]
    return jax.ShapeDtypeStruct((256 + sum(_up(part, 256) for part in parts),), jnp.uint8)


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _metadata_flags(kernel, form, meta, precision) -> dict[str, Any]:
    return {
        "tf32": precision == jax.lax.Precision.HIGH,
        "kernel": kernel if kernel in PLATFORMS else "",
        "kind": form.kind,
        "swapped": form.swapped,
        "group_offset": len(meta) == 2,
    }


def _call(target, a, b, rest, shape, out_dtype, flags: dict[str, Any], aliases=None):
    if 0 in (*shape, *a.shape, *b.shape, *rest[0].shape):
        return jnp.zeros(shape, out_dtype) if aliases is None else rest[-1]
    dtype = _reference.promoted(a.dtype, b.dtype)
    out = jax.ShapeDtypeStruct(shape, out_dtype)
    call = jax.ffi.ffi_call(target, out, input_output_aliases=aliases)
    return call(a.astype(dtype), b.astype(dtype), *rest, **_attributes(flags))


def _attributes(flags: dict[str, Any]) -> dict[str, Any]:
    """Attributes are hashed by value: one type per attribute, always."""
    types = {bool: np.bool_, int: np.int32, str: str}
    return {name: types[type(value)](value) for name, value in flags.items()}
