"""The device, as a child process finds it: the parent never starts a backend."""

from __future__ import annotations

import dataclasses
from typing import Any

from .._kernels import choose, extension, proven


@dataclasses.dataclass(frozen=True)
class Device:
    """A device.

    Attributes:
      platform: "cpu" or "cuda".
      kind: as JAX names it.
      capability: 80, 90, ...; 0 of a CPU.
      place: what a proof here is for; None where there is none to give.
      kernels: keys of the kernels that this build has for it.
      problem: why there is nothing to check.
    """

    platform: str
    kind: str
    capability: int
    place: proven.Place | None
    kernels: tuple[str, ...]
    problem: str | None = None

    def encoded(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"place": self.place and list(self.place)}

    @classmethod
    def of(cls, given: dict[str, Any]) -> Device:
        place = given["place"] and proven.Place(*given["place"])
        return cls(**given | {"place": place, "kernels": tuple(given["kernels"])})


def here() -> Device:
    """This process's first device. It starts a backend."""
    gpus, _ = extension.devices("cuda")
    problem = extension.BUILD.problem
    if not gpus:
        return Device("cpu", "CPU", 0, None, _kernels("cpu", ()), problem)
    capability = round(10 * float(gpus[0].compute_capability))
    problem = problem or extension.unavailable("sm80", (capability,))
    kernels = _kernels("cuda", (capability,))
    return Device("cuda", gpus[0].device_kind, capability, proven.place(), kernels, problem)


def _kernels(platform: str, capabilities: tuple[int, ...]) -> tuple[str, ...]:
    found = {
        proven.key(kernel): None
        for kernels in choose.KERNELS.values()
        for kernel in kernels
        if kernel.platform == platform
        and extension.unavailable(kernel.name, capabilities) is None
        and not proven.for_tests(kernel.name, capabilities)
    }
    return tuple(found)
