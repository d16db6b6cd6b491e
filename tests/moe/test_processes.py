"""``moe_mlp`` over four devices of two processes (``jax.distributed``, gloo), and of one."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import expert_parallel as ep
import numpy as np

LIB = Path(__file__).parents[1] / "lib"


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def test_two_processes_agree_with_one(tmp_path):
    address = f"127.0.0.1:{free_port()}"
    path = os.pathsep.join([str(LIB), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | {
        "PYTHONPATH": path, "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
    }  # fmt: skip
    files = [tmp_path / f"{i}.npz" for i in range(2)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-P", str(LIB / "process_of_two.py"), address, str(i), str(file)],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for i, file in enumerate(files)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=180)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)[-4000:]
    parts = [np.load(file) for file in files]
    args, index, ct = ep.problem_of_processes()
    want, wanted = ep.one_device()(args, index, ct)
    for transport, names in (("gather", {"y": want, **wanted}), ("all_to_all", {"y": want})):
        for name, of in names.items():
            got = np.concatenate([part[f"{transport} {name}"] for part in parts])
            np.testing.assert_allclose(got, of, rtol=1e-5, atol=1e-5)
