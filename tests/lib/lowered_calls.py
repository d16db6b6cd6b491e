"""Custom calls that functions are lowered to: their operands and attributes."""

import functools
import re

import jax

from jax_groupgemm._kernels import extension, proven


def text_of(function, *args, platform="cuda", **kwargs) -> str:
    """The program's text, traced anew."""
    traced = jax.jit(functools.partial(function, **kwargs)).trace(*args)
    return traced.lower(lowering_platforms=(platform,)).as_text()


def types(line: str) -> tuple[list[str], list[str]]:
    """The types of a call's operands and results."""
    operands, results = line.rsplit(" : (", 1)[1].split(" -> ")
    return re.findall(r"tensor<([^>]*)>", operands), re.findall(r"tensor<([^>]*)>", results)


def pretend_gpus(monkeypatch, capabilities, architectures, proved=None) -> None:
    """The process seems to have such GPUs, and a build for these architectures. ``proved``: the
    kernels that have been checked on them."""
    build = extension.Build(cuda="13.0", architectures=architectures)
    monkeypatch.setattr(extension, "BUILD", build)
    monkeypatch.setattr(extension, "live_capabilities", lambda: capabilities)
    if proved is not None:
        monkeypatch.setattr(proven, "proven", lambda: frozenset(proved))


def lowered(function, x, *operands, platform="cuda", **kwargs) -> str:
    """The program of a quantizer of grouped rows; ``operands``: group_sizes and a key, or None."""

    def quantize(x, *operands):
        names = ("group_sizes", "stochastic_rounding_key")
        given = {n: o for n, o in zip(names, operands, strict=False) if o is not None}
        return function(x, **given, **kwargs)

    return text_of(quantize, x, *operands, platform=platform)


def call(target: str, text: str) -> tuple[list[str], list[str], str]:
    """Types of its operands and results, and its attributes; there is one."""
    (line,) = [line for line in text.splitlines() if f"@{target}(" in line]
    attributes = re.search(r"mhlo.backend_config = \{([^}]*)\}", line)
    assert attributes is not None
    return *types(line), attributes[1]
