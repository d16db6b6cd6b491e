"""The lines of the table on a machine."""

from __future__ import annotations

from . import conversions, layer, narrow, products, quantized
from .device import Device
from .line import Line


def lines(device: Device) -> list[Line]:
    """All of them, in the table's order. Where nothing has a kernel, the line is left out once its
    program is lowered."""
    packs = device.capability == 90
    # Where a GPU has kernels of its own, the generic ones run what those cannot.
    own = any(not key.endswith(" sm80") for key in device.kernels)
    generic = "sm80" if device.platform == "cuda" and own else None
    found = [
        *products.lines(),
        *(products.lines(generic) if generic else ()),
        *quantized.lines(packs),
        *(quantized.lines(False, generic) if generic else ()),
        *(quantized.packed_lines("sm80" if packs else None) if device.platform == "cuda" else ()),
        *narrow.lines(),
        *conversions.lines(packs),
        *layer.lines(packs),
    ]
    names = list(dict.fromkeys(line.name for line in found))
    return sorted(found, key=lambda line: names.index(line.name))


def selected(device: Device, only: list[str]) -> list[Line]:
    """Those that ``only`` names, whole or in part: a part counts where it is nobody's whole."""
    found = lines(device)
    whole = {name for line in found for name in (line.key, line.name)}

    def is_of(line: Line, name: str) -> bool:
        return name in (line.key, line.name) if name in whole else name in line.key

    return [line for line in found if any(is_of(line, name) for name in only)] if only else found
