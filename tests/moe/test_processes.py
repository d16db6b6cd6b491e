"""``moe_mlp`` over four devices of two processes (``jax.distributed``, gloo), and of one."""

import sys
from pathlib import Path

import expert_parallel as ep
import numpy as np
import two_processes

LIB = Path(__file__).parents[1] / "lib"


def test_two_processes_agree_with_one(tmp_path):
    address = two_processes.free_address()
    files = [tmp_path / f"{i}.npz" for i in range(2)]
    command = lambda i: [
        sys.executable, "-P", LIB / "process_of_two.py", address, i, files[i]
    ]  # fmt: skip
    with two_processes.started(command, LIB) as processes:
        two_processes.finished(processes, timeout=180)
    parts = [np.load(file) for file in files]
    args, index, ct = ep.problem_of_processes()
    want, wanted = ep.one_device()(args, index, ct)
    for transport, names in (("gather", {"y": want, **wanted}), ("all_to_all", {"y": want})):
        for name, of in names.items():
            got = np.concatenate([part[f"{transport} {name}"] for part in parts])
            np.testing.assert_allclose(got, of, rtol=1e-5, atol=1e-5)
