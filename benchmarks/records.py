"""Records of measurements: a file holds one run, or several runs of one table.

python -m benchmarks.records OLD.json NEW.json --json OUT.json

A run is a header (GPU, date, commit, versions) and ``records``, its rows. The command writes one
file of the runs of several, oldest first, without the rows that a later run has measured again. It
copies headers and rows as they are.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import time
from pathlib import Path
from typing import Any

from .options import new_parser


def command_output(*command: str) -> str:
    try:
        return subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL).strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str:
    import jax_groupgemm

    return command_output("git", "describe", "--always", "--dirty") or jax_groupgemm.__version__


def run_header(args, packages) -> dict[str, Any]:
    """How headers of runs on GPUs begin."""
    import jax

    driver = command_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "date": time.strftime("%Y-%m-%d"), "commit": args.commit or commit(),
        "gpu": jax.devices()[0].device_kind, "driver": driver.split("\n")[0],
        "jax": jax.__version__, "versions": {name: version(name) for name in packages},
    }  # fmt: skip


def write_record(path: Path | None, record) -> None:
    """Nothing without a path."""
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n")


def runs(path: Path) -> list[dict]:
    """The runs of a file, oldest first."""
    found = json.loads(Path(path).read_text())
    return found.get("runs", [found])


def rows(paths) -> list[dict]:
    """The rows of all runs of several files."""
    return [row for path in paths for run in runs(path) for row in run["records"]]


def case(run: dict, row: dict) -> str:
    """The case that a row measures. Two rows of one case have equal strings."""
    names = (
        "op", "case", "model", "format", "batch", "part", "shape", "direction", "arm", "devices",
        "tokens", "way",
    )  # fmt: skip
    return json.dumps([run.get("xla_flags"), *(row.get(name) for name in names)])


def merged(of: list[dict]) -> list[dict]:
    """Runs without the rows that a later one has, and without runs that have no row left."""
    later, out = set(), []
    for run in reversed(of):
        kept = [row for row in run["records"] if case(run, row) not in later]
        later |= {case(run, row) for row in run["records"]}
        if kept:
            out.append(run | {"records": kept})
    return out[::-1]


def main(argv=None) -> None:
    parser = new_parser("records", __doc__)
    parser.add_argument("records", nargs="+", type=Path)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    args = parser.parse_args(argv)
    every = merged([run for path in args.records for run in runs(path)])
    write_record(args.json, {"runs": every})


if __name__ == "__main__":
    main()
