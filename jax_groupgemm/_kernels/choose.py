"""Which kernel runs."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Sequence

import jax.numpy as jnp

from . import extension

# Those that "sm100" has kernels for; it has no others, and no other kernel has these.
_SM100_TARGETS = ("jgg_nvfp4_grouped_mm", "jgg_nvfp4_grouped_wgrad")

#: Every name that ``implementation=`` takes, in order of preference.
IMPLEMENTATIONS = ("sm100", "sm90", "sm80", "cpu", "reference")

# Kernels, and the platform that each runs on. On CUDA the handler takes the first that can do the
# call, unless one is named; what "sm90" cannot do (lines that are not a multiple of 16 bytes,
# segments out of order, transposed results) runs on "sm80".
PLATFORMS = {"sm100": "cuda", "sm90": "cuda", "sm80": "cuda", "cpu": "cpu"}
# The one compute capability whose instructions a kernel is made of.
_CAPABILITY = {"sm100": 100, "sm90": 90}
# And the code that a build must have for it: no other architecture's will do.
_CODE = {"sm100": "100a", "sm90": "90a"}

_KERNEL_DTYPES = ("float32", "bfloat16", "float16")


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
    if platform not in extension.TARGETS.get(target, ()):
        return f"there is no {target} for {platform}"
    if (implementation == "sm100") != (target in _SM100_TARGETS):
        return f"there is no {target} for {implementation}"
    return None


def unavailable(implementation: str, capabilities: Sequence[int] = ()) -> str | None:
    """Why this process cannot run a kernel, on CUDA devices of these compute capabilities."""
    if extension.BUILD.problem is not None:
        return extension.BUILD.problem
    if PLATFORMS[implementation] not in extension.BUILD.registered:
        return "this build has no CUDA kernels"
    for capability in capabilities:
        needed = _CAPABILITY.get(implementation, capability)
        if capability != needed:
            return (
                f"it needs compute capability {needed / 10:.1f}, this GPU has {capability / 10:.1f}"
            )
        has = ", ".join(extension.BUILD.architectures)
        own = _CODE.get(implementation)
        if own is not None and own not in extension.BUILD.architectures:
            return f"this build has code for {has}, not for {own}"
        if not any(_has_code(arch, capability) for arch in extension.BUILD.architectures):
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
        elif reason is None and (capabilities := extension.live_capabilities()):
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
    capabilities = extension.live_capabilities()
    return bool(capabilities) and unavailable("sm100", capabilities) is None


def takes_sm90(platform: str, implementation: str | None) -> bool:
    """Whether what a computation lowered for a platform takes is known to be "sm90": where it is
    named, or where every GPU of this process can run it."""
    if platform != "cuda" or implementation not in (None, "sm90"):
        return False
    capabilities = extension.live_capabilities()
    named = implementation is not None
    return named or (bool(capabilities) and unavailable("sm90", capabilities) is None)


def may_take_lists(x, w, implementation, transpose_w=False) -> bool:
    """Whether "sm90" may be what runs ``mm`` with lists of rows, of operands of these shapes."""
    k, n = x.shape[-1], w.shape[1 if transpose_w else 2]
    return (
        implementation in ("sm90", None)
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
    return takes_sm90(platform, None) and unsupported("sm90", (), out_dtype) is None


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=2)
