"""What ran on a GPU: kernels of a call, and runs on two streams."""

import itertools
import os
import re
import subprocess
import sys

import jax
import pytest
from jax.experimental.compute_on import compute_on
from jaxlib.mlir import ir

from jax_groupgemm._kernels import extension
from jax_groupgemm.tune import timing

needs_hopper = pytest.mark.skipif(
    90 not in extension.live_capabilities(), reason="needs a Hopper GPU"
)
ATTRIBUTES = "mhlo.frontend_attributes"
# XLA of jax 0.12 leaves out passes where a part is on a stream of its own. Names of constants that
# custom calls take keep their dots, which ptxas refuses. Barriers stay, and are refused later. All
# streams share one copy of an operand that they write in place.
WHOLE_STREAMS = jax.__version_info__ < (0, 12)
OF_STREAMS = ("_xla_stream_annotation", "inlineable")


def run(f, *args):
    """What f, which is compiled or jitted, returns, and the kernels that run in a call of it."""
    jax.block_until_ready(f(*args))
    with timing.kernels() as found:
        out = jax.block_until_ready(f(*args))
    return out, [name for name, _ in found]


def names(f, *args) -> set[str]:
    """The kernels that run in a call of f."""
    return set(run(jax.jit(f), *args)[1])


def assert_on_sm90(kernels, count: int) -> None:
    """So many products ran, all of them in Hopper kernels."""
    ran = [name for name in kernels if "GemmSm" in name]
    assert len(ran) == count, kernels
    assert all("Sm90Kernel" in name for name in ran), ran


def on_stream(index: int, f):
    where = jax.memory.Space.Device
    return compute_on(f, compute_type=f"gpu_stream:{index}", out_memory_spaces=where)


def compiled_with_streams(jitted, *args):
    """Of a function with parts on streams of their own. JAX says of everything within a part that
    it is on the stream, and XLA (of jaxlib 0.11.2) fails where that is a call, as of most functions
    of jnp; here only the part as a whole says it."""
    lowered = jitted.lower(*args)

    def visit(op):
        part = op.name == "func.call" and str(op.attributes["callee"]).startswith("@compute_on")
        if not part and ATTRIBUTES in op.attributes:
            kept = {a.name: a.attr for a in op.attributes[ATTRIBUTES] if a.name not in OF_STREAMS}
            del op.attributes[ATTRIBUTES]
            if kept:
                op.attributes[ATTRIBUTES] = ir.DictAttr.get(kept)
        return ir.WalkResult.ADVANCE

    module = lowered.compiler_ir()
    with module.context:
        module.operation.walk(visit)
    return lowered.compile()


def profile_on_two_streams(tmp_path, program: str, jitted: str, count: int):
    """The profile that a program writes, in a process of its own, as streams are XLA's flags. It is
    given where Python looks for modules, and the folder of the profile; so many compilations of
    ``jitted`` have both streams."""
    flags = f"--xla_dump_to={tmp_path} --xla_gpu_experimental_stream_annotation=true"
    flags += " --xla_gpu_enable_command_buffer="
    profile = tmp_path / "profile"
    command = [sys.executable, "-c", program, ":".join(sys.path), str(profile)]
    subprocess.run(command, env=os.environ | {"XLA_FLAGS": flags}, check=True)
    dumps = list(tmp_path.glob(f"*jit_{jitted}*gpu_after_optimizations.txt"))
    assert len(dumps) == count
    for dump in dumps:
        streams = set(re.findall(r'"?_xla_stream_annotation"?="(\d)"', dump.read_text()))
        assert streams == {"1", "2"}
    (file,) = profile.rglob("*.xplane.pb")
    return list(jax.profiler.ProfileData.from_file(str(file)).planes)


def kernel_runs(planes, kernel: str) -> list[tuple[str, float, float]]:
    """Stream, start and end (ns) of a kernel's runs in a profile of one GPU."""
    return [
        (line.name, event.start_ns, event.end_ns)
        for plane in planes
        if plane.name.startswith("/device:GPU:")
        for line in plane.lines
        if line.name.startswith("Stream #")
        for event in line.events
        if kernel in event.name
    ]


def assert_overlap(runs) -> None:
    """Some two of them were under way at the same time, on different streams."""
    pairs = itertools.combinations(runs, 2)
    assert any(a[0] != b[0] and a[1] < b[2] and b[1] < a[2] for a, b in pairs), (
        f"no two of these runs on two streams overlap: {sorted(runs)}"
    )
