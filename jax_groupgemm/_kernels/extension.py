"""The compiled handlers: loading them, what they were built for, and the GPUs of this process.

This is the only file that talks to the extension module. Importing it touches no device and starts
no backend.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

#: Custom calls, and the platforms that there is a handler for.
TARGETS: dict[str, tuple[str, ...]] = {
    "jgg_mm": ("cpu", "cuda"),
    "jgg_wgrad": ("cpu", "cuda"),
    "jgg_planes": ("cuda",),
    "jgg_activation_backward": ("cuda",),
    "jgg_lora_mm": ("cuda",),
    "jgg_lora_wgrad": ("cuda",),
    "jgg_qmm": ("cpu", "cuda"),
    "jgg_qmm_fp8": ("cpu", "cuda"),
    "jgg_qmm_packed": ("cuda",),
    "jgg_quantize": ("cpu", "cuda"),
    "jgg_dequantize": ("cpu", "cuda"),
    "jgg_prepack": ("cuda",),
    "jgg_prepack_fp8": ("cuda",),
    "jgg_nvfp4_quantize": ("cuda",),
    "jgg_fp8_quantize": ("cuda",),
    "jgg_fp8_cast": ("cuda",),
    "jgg_fp8_dequantize": ("cuda",),
    "jgg_fp8_activation": ("cuda",),
    "jgg_fp8_activation_backward": ("cuda",),
    "jgg_fp8_activation_cast": ("cuda",),
    "jgg_fp8_activation_cast_backward": ("cuda",),
    "jgg_nvfp4_grouped_mm": ("cuda",),
    "jgg_nvfp4_grouped_wgrad": ("cuda",),
    "jgg_fp8_grouped_mm": ("cuda",),
    "jgg_fp8_grouped_wgrad": ("cuda",),
    "jgg_fp8_grouped_mm_sm89": ("cuda",),
    "jgg_fp8_grouped_wgrad_sm89": ("cuda",),
    "jgg_fp8_grouped_mm_sm100": ("cuda",),
    "jgg_fp8_grouped_wgrad_sm100": ("cuda",),
    "jgg_moe_top_k": ("cuda",),
    "jgg_moe_router": ("cuda",),
    "jgg_moe_route": ("cuda",),
    "jgg_moe_dispatch": ("cuda",),
    "jgg_moe_combine": ("cuda",),
    "jgg_moe_combine_backward": ("cuda",),
    "jgg_moe_down_backward": ("cuda",),
    "jgg_moe_few_tokens": ("cuda",),
    "jgg_moe_few_dense": ("cuda",),
    "jgg_moe_some_tokens": ("cuda",),
    "jgg_moe_some_dense": ("cuda",),
}

#: A product where XLA divides its operands among devices (``_core/partitioner.py``).
DIVIDED = "jgg_product"


def version(package: str) -> str | None:
    """The version of an installed package; None where its metadata is missing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


#: This package's. A copy of the files alone, without metadata, has none.
VERSION = version("jax_groupgemm") or "0+unknown"

#: Pass as ``disabled_checks`` to ``jax.export.export``: our custom calls are stable by name.
EXPORT_DISABLED_CHECKS = [
    jax.export.DisabledSafetyCheck.custom_call(name) for name in (*TARGETS, DIVIDED)
]


@dataclasses.dataclass(frozen=True)
class Build:
    """Versions that the extension module was built with; whether its handlers are registered."""

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
    except (OSError, ValueError):
        return None
    found = re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", text)
    version = {name: int(number) for name, number in found}
    return (version["MAJOR"], version["MINOR"]) if len(version) == 2 else None


def _incompatible(built: tuple[int, int], runtime: tuple[int, int] | None) -> str | None:
    """Why a handler of one FFI API version must not be registered with a runtime of another.

    XLA takes handlers of its own version or an older one. A handler that it refuses would keep
    the whole backend from starting, so it must not even be offered.
    """
    jaxlib = version("jaxlib")
    needed = f"jax_groupgemm's handlers need XLA FFI API {built[0]}.{built[1]} (jaxlib >= 0.11.0)"
    if runtime is None:
        return f"{needed}; the FFI API version of jaxlib {jaxlib} is unknown"
    if runtime[0] != built[0] or runtime[1] < built[1]:
        return f"{needed}; the installed jaxlib {jaxlib} has {runtime[0]}.{runtime[1]}"
    return None


def _extension() -> Any:
    """The extension module: beside this file, or, in a source checkout, the installed one."""
    name = "jax_groupgemm._ffi"
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


def rules() -> Any:
    """The handlers' rules about static shapes: functions that say why a kernel cannot take a call
    (ffi/rules.cc). There are none where ``BUILD.problem`` is not None."""
    return _extension()


def load() -> Build:
    """Import the extension and register its handlers. It never raises: without handlers there is
    the reference, and ``Build.problem`` says why."""
    build = Build()
    try:
        _ffi = _extension()
        build = _described(_ffi.build_info())
        problem = _incompatible(build.ffi_api or (0, 0), build.runtime_ffi_api)
        if problem is None:
            for platform, handlers in _ffi.registrations().items():
                for name, handler in handlers.items():
                    jax.ffi.register_ffi_target(name, handler, platform=platform)
            return build
        says = f"{problem}. Using the reference lowering; upgrade jax and jaxlib."
    except ImportError as error:
        problem = f"the extension module cannot be imported ({error})"
        says = f"{problem}; using the reference lowering"
    except Exception as error:
        problem = f"the extension module is not of this version ({error!r})"
        says = f"{problem}; using the reference lowering. Install the package again."
    _say(f"jax_groupgemm: {says}")
    return dataclasses.replace(build, problem=problem)


def _described(info: dict[str, Any]) -> Build:
    return Build(
        cuda=info["cuda"],
        architectures=tuple(info["architectures"]),
        cutlass=info["cutlass"],
        ffi_api=tuple(info["ffi_api"]),
        runtime_ffi_api=_runtime_ffi_api(),
    )


def _say(message: str) -> None:
    """A warning; on stderr where warnings are errors, which would stop the import."""
    try:
        warnings.warn(message, stacklevel=3)
    except Warning:
        print(message, file=sys.stderr)


BUILD = load()

# The compute capabilities that a kernel is for: it is made of their instructions, and a build must
# have code for them. No other architecture's will do. Hopper is among those of "sm89" for tests.
_CAPABILITIES = {"sm100": (100,), "sm90": (90,), "sm89": (89, 90, 120, 121)}
_CODE = {100: "100a", 90: "90a", 89: "89", 120: "120", 121: "120"}


def unavailable(implementation: str, capabilities: Sequence[int] = ()) -> str | None:
    """Why this process cannot run a kernel, on CUDA devices of these compute capabilities."""
    if BUILD.problem is not None:
        return BUILD.problem
    if ("cpu" if implementation == "cpu" else "cuda") not in BUILD.registered:
        return "this build has no CUDA kernels"
    for capability in capabilities:
        needed = _CAPABILITIES.get(implementation)
        if needed is not None and capability not in needed:
            names = [f"{c / 10:.1f}" for c in needed]
            listed = " or ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)
            return f"it needs compute capability {listed}, this GPU has {capability / 10:.1f}"
        has = ", ".join(BUILD.architectures)
        own = _CODE[capability] if needed is not None else None
        if own is not None and own not in BUILD.architectures:
            return f"this build has code for {has}, not for {own}"
        if not any(_has_code(arch, capability) for arch in BUILD.architectures):
            return (
                f"this build has code for {has}, not for compute capability {capability / 10:.1f}"
            )
    return None


def _has_code(architecture: str, capability: int) -> bool:
    number = int(re.sub(r"\D", "", architecture))
    if architecture.endswith("-virtual"):  # PTX: compiled by the driver, for anything newer
        return capability >= number
    if "a" in architecture:  # architecture-specific code runs there only
        return capability == number
    return capability // 10 == number // 10 and capability >= number


def devices(backend: str | None = None) -> tuple[list[Any], str | None]:
    """This process's devices; or none, and why. JAX asserts that it has some, which it has not
    where ``JAX_PLATFORMS`` names a plugin that is not installed."""
    try:
        return jax.local_devices(backend=backend), None
    except (RuntimeError, AssertionError) as error:
        lines = str(error).strip().splitlines()
        platforms = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
        return [], lines[0] if lines else f"no backend of JAX_PLATFORMS={platforms} is installed"


def live_capabilities() -> tuple[int, ...]:
    """Compute capabilities of this process's CUDA devices, as 80, 90, ...; empty without one."""
    found, _ = devices("cuda")
    if found and (capability := pretended().get("capability")):
        return (capability,)
    return tuple(sorted({round(10 * float(d.compute_capability)) for d in found}))


#: KiB of shared memory that a block may have, by compute capability; others as the smallest.
_SHARED_MEMORY = {80: 163, 87: 163, 90: 227, 100: 227, 103: 227}
_LEAST_SHARED_MEMORY = 99


def lacks_shared_memory(needed: int) -> str | None:
    """That a CUDA device of this process has too little for a block that needs so many bytes."""
    for capability in live_capabilities():
        has = 2**10 * _SHARED_MEMORY.get(capability, _LEAST_SHARED_MEMORY)
        has = min(has, pretended().get("shared_memory", has))
        if has < needed:
            return (
                f"it needs {needed >> 10} KiB of shared memory in a block, this GPU has {has >> 10}"
            )
    return None


def pretended() -> dict[str, int]:
    """The GPU as ``JGG_PRETEND_GPU`` has it: ``capability``, ``processors`` and
    ``shared_memory`` (bytes of a block). Tests of other GPUs' choices set it; ``ffi/common/arch.h``
    reads it, too."""
    listed = os.environ.get("JGG_PRETEND_GPU", "")
    return {name: int(value) for name, value in (x.split("=") for x in listed.split(",") if x)}
