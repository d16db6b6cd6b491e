"""Kernels that nobody has run on a kind of GPU, and the proof that switches them on there.

Generic kernels, "sm80" and "cpu", are on wherever there is code for them: their instructions mean
the same on every GPU since Ampere. So are kernels for one kind of GPU that this project runs before
a release, today those for Hopper. The others, ``UNRUN``, are off, named or not, until
``python -m jax_groupgemm.check`` has passed on the GPU of this process, or that is one of those on
which this project has run them, too. It writes a file into the
user's cache: ``<kind>.json`` in ``$XDG_CACHE_HOME/jax_groupgemm``; the environment variable
``JGG_PROVEN`` names another folder. The file says which kernels passed, and with which GPU, driver,
package and CUDA. Where one of those is another, the proof counts no more. A process without a GPU
lowers for somebody else's, and takes no such kernel unless it is named.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import datetime
import functools
import json
import os
import re
import stat
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from . import extension
from .kernel import Kernel
from .tuned import CALLS, file_name

FORMAT = 1
VARIABLE = "JGG_PROVEN"
COMMAND = "python -m jax_groupgemm.check"
REASON = f"it is not yet proven on this GPU: run {COMMAND}"
#: Implementations that this project has not run on the GPUs that they are for, and the compute
#: capabilities of others on which it has run them: there they run where they are named.
UNRUN: dict[str, tuple[int, ...]] = {"sm100": (), "sm89": (90,)}

_LONGEST = 2**20  # bytes of a proof that is read
_NVIDIA = Path("/proc/driver/nvidia/version")


class Place(NamedTuple):
    """The things that a proof is for; each must be as it was."""

    gpu: str
    compute_capability: str
    driver: str
    jax_groupgemm: str
    calls: int
    cuda: str


_CHANGES = {
    "gpu": "GPU", "compute_capability": "compute capability", "driver": "driver",
    "jax_groupgemm": "jax_groupgemm", "calls": "calls", "cuda": "CUDA",
}  # fmt: skip


def key(kernel: Kernel) -> str:
    """A kernel in a proof."""
    return f"{kernel.target} {kernel.name}"


def against(kernel: Kernel) -> str | None:
    """Why a kernel that this GPU can run must not run on it yet."""
    if _waits(kernel.name) and not _trusted.get() and key(kernel) not in proven():
        return REASON
    return None


def for_tests(name: str, capabilities: Sequence[int]) -> bool:
    """Whether all of these GPUs are among those for which an implementation is not."""
    return len(capabilities) > 0 and set(UNRUN.get(name, ())).issuperset(capabilities)


def _waits(name: str) -> bool:
    """Whether an implementation waits for a proof on a GPU of this process."""
    return name in UNRUN and not for_tests(name, extension.live_capabilities())


_trusted: contextvars.ContextVar[bool] = contextvars.ContextVar("jgg_trusted", default=False)


@contextlib.contextmanager
def trusted() -> Iterator[None]:
    """Every kernel counts as proven: for what proves them."""
    token = _trusted.set(True)
    try:
        yield
    finally:
        _trusted.reset(token)


def proven() -> frozenset[str]:
    """The kernels that passed here; none where no kernel of this GPU needs a proof, or there is
    none, or one that does not count, which is one warning."""
    capabilities = extension.live_capabilities()
    waiting = [name for name in UNRUN if _waits(name)]
    if not capabilities or all(extension.unavailable(name, capabilities) for name in waiting):
        return frozenset()
    where = place()
    return frozenset() if where is None else _proven(path(where.gpu), where)


@functools.cache
def _proven(path: Path, where: Place) -> frozenset[str]:
    kernels, why = found(path, where)
    if why is not None:
        warnings.warn(
            f"jax_groupgemm ignores the proof {path}: {why}. Kernels that need one stay off until "
            f"{COMMAND} has passed again",
            stacklevel=2,
        )
    return kernels


def found(path: Path, where: Place) -> tuple[frozenset[str], str | None]:
    """The kernels of a proof, and why it does not count; neither where there is none."""
    try:
        place, kernels = read(path)
    except FileNotFoundError:
        return frozenset(), None
    except (OSError, ValueError) as error:
        return frozenset(), str(error)
    why = changed(place, where)
    return (frozenset(), why) if why else (kernels, None)


def changed(proof: Place, here: Place) -> str | None:
    """The first thing that is another than when a proof was made."""
    for name, was, now in zip(Place._fields, proof, here, strict=True):
        if was != now:
            return f"it is for {_CHANGES[name]} {was}, here is {now}"
    return None


# ---- this GPU ----------------------------------------------------------------------------------


def place() -> Place | None:
    """The place of proofs made here; None without a GPU, with several kinds, or an unknown
    driver."""
    found, _ = extension.devices("cuda")
    kinds = {(d.device_kind, str(d.compute_capability)) for d in found}
    if len(kinds) != 1 or (version := driver()) is None:
        return None
    cuda = str(extension.BUILD.cuda)
    return Place(*kinds.pop(), version, extension.VERSION, CALLS, cuda)


@functools.cache
def driver() -> str | None:
    """The version of NVIDIA's driver, as nvidia-smi prints it."""
    try:
        found = re.search(r"\b(\d{3,}\.\d+(\.\d+)?)\b", _NVIDIA.read_text())
        if found:
            return found[1]
    except (OSError, ValueError):
        pass
    try:  # where there is no such file, as under Windows
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        text = ctypes.create_string_buffer(80)
        if nvml.nvmlInit_v2() == 0 and nvml.nvmlSystemGetDriverVersion(text, 80) == 0:
            return text.value.decode()
    except (OSError, AttributeError, ValueError):
        pass
    return None


# ---- the file ----------------------------------------------------------------------------------


def folder() -> Path:
    """Where proofs are."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(caches)) / "jax_groupgemm" / "proven"


def path(kind: str) -> Path:
    return folder() / file_name(kind)


def read(path: Path) -> tuple[Place, frozenset[str]]:
    """The place that a proof is for, and its kernels. ValueError where it is none, or others
    may have made it."""
    # Whatever else there is under that name may have no end.
    about = path.stat()
    if not stat.S_ISREG(about.st_mode):
        raise ValueError("it is not a file")
    if about.st_uid not in (0, os.geteuid()):
        raise ValueError("it belongs to another user")
    if about.st_mode & stat.S_IWOTH:
        raise ValueError("every user may write it")
    if about.st_size > _LONGEST:
        raise ValueError(f"it has {about.st_size} bytes")
    try:
        document = json.loads(path.read_bytes()[:_LONGEST])
        if document["format"] != FORMAT:
            raise ValueError(f"its format is {document['format']!r}, expected {FORMAT}")
        values = [document[name] for name in Place._fields]
        kernels = document["kernels"]
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"it is not a proof ({error!r})") from error
    for name, value in zip(Place._fields, values, strict=True):
        if type(value) is not (int if name == "calls" else str):
            raise ValueError(f"it is not a proof ({name} is {str(value)[:40]!r})")
    if not isinstance(kernels, list) or not all(isinstance(k, str) for k in kernels):
        raise ValueError("it is not a proof (kernels are no list of names)")
    return Place(*values), frozenset(kernels)


def write(where: Place, kernels: Iterable[str], about: Mapping[str, Any]) -> Path:
    """The proof of this place, in place of what was there; ``about`` says how it was made."""
    document = {
        "format": FORMAT,
        **where._asdict(),
        "date": datetime.date.today().isoformat(),
        "kernels": sorted(kernels),
        **about,
    }
    target = path(where.gpu)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(f".{os.getpid()}.partial")  # whoever reads never finds half of it
    partial.write_text(json.dumps(document, indent=1) + "\n")
    partial.chmod(0o644)
    partial.replace(target)
    return target
