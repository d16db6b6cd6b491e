"""AutoRound's configs: which library's layout its layers have, and what each layer's bits are.

https://github.com/intel/auto-round: auto_round/inference/backend.py (``GPTQ_FORMAT``, which stores
z - 1, and ``GPTQ_FORMAT_NO_ZP``, which stores z), auto_round/inference/convert_model.py (other
spellings; ``extra_config``, layers by name and then by regular expression).
"""

from __future__ import annotations

import re

from .layer import Layer

METHODS = ("auto-round", "intel/auto-round")
#: Layouts by ``packing_format``.
GPTQ = {
    "auto_round:auto_gptq": "gptq",
    "auto_round:gptq": "gptq",
    "auto_round": "gptq_v2",
    "auto_round:gptqmodel": "gptq_v2",
}
AWQ = {"auto_round:auto_awq": "gemm", "auto_round:awq": "gemm"}
COMPRESSED = {"auto_round:llm_compressor": "llm_compressor"}


def settled(t: Layer, layouts: dict[str, str]) -> tuple[Layer, str | None]:
    """The layer with what its config says of it, and its layout; as it is, and None, where the
    config is not AutoRound's."""
    if t.option("quant_method") not in METHODS:
        return t, None
    packing = t.option("packing_format", tuple(layouts))
    if packing is None:
        known = " or ".join(map(repr, layouts))
        raise t.error(f"config says no packing_format, expected {known}")
    extra = t.parts("extra_config")
    name = t.own(extra)
    if name is None:
        by_pattern = lambda entry: extra[entry] and t.match("extra_config", entry, find=re.search)
        name = next(filter(by_pattern, extra), None)
    if name is not None:
        override = t.mapping(f"extra_config[{name!r}]", extra[name])
        t = t._replace(config={**t.config, **override})
    bits = t.option("bits")
    if isinstance(bits, (int, float)) and bits >= 16:
        raise t.error(f"config says it is not quantized: bits={bits}")
    return t, layouts[packing]
