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
    generic = "sm80" if device.capability in (90, 100) else None
    return [
        *products.lines(),
        *(products.lines(generic) if generic else ()),
        *quantized.lines(packs),
        *(quantized.lines(False, generic) if generic else ()),
        *narrow.lines(),
        *conversions.lines(packs),
        *layer.lines(packs),
    ]


def selected(device: Device, only: list[str]) -> list[Line]:
    """Those whose name holds one of ``only``."""
    found = lines(device)
    return [line for line in found if any(name in line.key for name in only)] if only else found
