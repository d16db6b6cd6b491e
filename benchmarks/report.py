"""The tables of docs/performance.md, from a record of benchmarks.gpu.

python -m benchmarks.report benchmarks/results/h200/sm80.json
"""

import json
import sys
from pathlib import Path


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def grouped(records) -> str:
    rows = []
    for r in records:
        torch = r["us"].get("torch")
        rows.append(
            [
                f"{r['op']} {r['case']}", f"{r['us']['ours']:.0f}", f"{r['floor_us']:.0f}",
                f"{r['floor_share']:.0%}", f"{r['tflops']:.0f}", f"{r['tbytes']:.2f}",
                f"{torch / r['us']['ours']:.2f}x" if torch else "",
            ]
        )  # fmt: skip
    header = ["case", "us", "floor", "of floor", "TFLOP/s", "TB/s", "torch / ours"]
    return table(header, rows)


def segmented(records) -> str:
    """One line per shape: times, with MLX's published ones, and errors."""
    cases = list(dict.fromkeys(r["case"] for r in records))
    kinds = list(dict.fromkeys(r["op"].removeprefix("segmented ") for r in records))
    by = {(r["case"], r["op"].removeprefix("segmented ")): r for r in records}
    rows = []
    for case in cases:
        row = [case]
        for kind in kinds:
            r = by[case, kind]
            mlx = f" ({r['mlx_us']:g})" if r.get("mlx_us") else ""
            row.append(f"{r['us']['ours']:.1f}{mlx}")
        rows.append(row)
    errors = [
        [case, *(f"{by[case, kind]['error']:.1e}" for kind in kinds)]
        for case in cases
        if "cut" not in case
    ]
    return table(["us", *kinds], rows) + "\n\n" + table(["relative error", *kinds], errors)


def main(path: str) -> None:
    record = json.loads(Path(path).read_text())
    print(
        f"{record['gpu']}, jax {record['jax']}, commit {record['commit']}, {record['date']}: "
        f"C = {record['C_tflops']:.0f} TFLOP/s, B = {record['B_tbytes']:.2f} TB/s.\n"
    )
    rest = [r for r in record["records"] if not r["op"].startswith("segmented")]
    print(grouped(rest), end="\n\n")
    print(segmented([r for r in record["records"] if r["op"].startswith("segmented")]))


if __name__ == "__main__":
    main(sys.argv[1])
