"""Two processes of one ``jax.distributed`` program, on this machine's CPU."""

import contextlib
import os
import socket
import subprocess
from collections.abc import Callable, Iterator


def free_address() -> str:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{server.getsockname()[1]}"


@contextlib.contextmanager
def started(command: Callable[[int], list], *paths) -> Iterator[list[subprocess.Popen]]:
    """``command(0)`` and ``command(1)``, which find modules in ``paths``; none of them outlives
    the block."""
    python_path = [*map(str, paths), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(python_path), "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        processes = []
        for i in range(2):
            process = subprocess.Popen(
                list(map(str, command(i))), env=env, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
            stack.enter_context(process)
            stack.callback(process.kill)
            processes.append(process)
        yield processes


def finished(processes: list[subprocess.Popen], timeout: float) -> list[str]:
    """What they said. Both have to end well."""
    said = [process.communicate(timeout=timeout)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)[-4000:]
    return said
