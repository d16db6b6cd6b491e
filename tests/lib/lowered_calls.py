"""What a quantizer of grouped rows is lowered to: its custom call's operands and attributes."""

import re

import jax


def lowered(function, x, *operands, platform="cuda", **kwargs) -> str:
    """The program's text; ``operands`` are group_sizes and a key, or None."""

    def quantize(x, *operands):
        names = ("group_sizes", "stochastic_rounding_key")
        given = {n: o for n, o in zip(names, operands, strict=False) if o is not None}
        return function(x, **given, **kwargs)

    return jax.jit(quantize).trace(x, *operands).lower(lowering_platforms=(platform,)).as_text()


def call(target: str, text: str) -> tuple[list[str], list[str], str]:
    """Types of its operands and results, and its attributes; there is one."""
    (line,) = [line for line in text.splitlines() if f"@{target}(" in line]
    operands, results = line.rsplit(" : (", 1)[1].split(" -> ")
    types = (re.findall(r"tensor<([^>]*)>", part) for part in (operands, results))
    attributes = re.search(r"mhlo.backend_config = \{([^}]*)\}", line)
    assert attributes is not None
    return *types, attributes[1]
