"""The tables beside the records, and the plots of docs/plots, from records of benchmarks.gpu.

python -m benchmarks.report RECORD [MORE ...] [--tables FILE] [--plots docs/plots]

Prints the tables, a case that several records have from the last; with --tables writes them to a
file, whose first line is the command that made it. With --plots draws speedup.svg, means.svg and
roofline.svg there (needs matplotlib); those of quantized cases end in _quantized.svg, those of
products in FP8 in _fp8.svg.
"""

from pathlib import Path

from .options import new_parser
from .records import runs
from .summary import LIMIT, best_peer, is_slow, ours, summary

# Families of cases, by the first word of an op; others are "grouped".
FAMILIES = {
    "segmented": "segmented",
    "qmm": "products",
    "gather_qmm": "products",
    "quantize": "conversions",
    "dequantize": "conversions",
    "nvfp4_quantize": "conversions",
    "fp8_quantize": "conversions",
    "nvfp4": "nvfp4",
    "fp8": "fp8",
    "fp8_linear": "fp8",
}
QUANTIZED = ("products", "conversions", "nvfp4")
# Families that are drawn together, by the end of their files' names.
PLOTS = {"": ("grouped", "segmented"), "_quantized": QUANTIZED, "_fp8": ("fp8",)}


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def peers(records) -> list[str]:
    """Every arm that is not the one compared, in order of appearance."""
    return list(dict.fromkeys(name for r in records for name in r["us"] if name != ours(r)))


def ratio(record, peer: str) -> str:
    """How many times as long the peer takes (in parentheses in situ); bold where clearly less."""
    if peer not in record["us"]:
        return ""
    times = lambda us: us[peer] / us[ours(record)]
    text = lambda value: f"**{value:.2f}x**" if value < LIMIT else f"{value:.2f}x"
    chained = record.get("in_situ_us", {})
    more = f" ({text(times(chained))})" if {peer, ours(record)} <= set(chained) else ""
    return text(times(record["us"])) + more


def in_situ(record, decimals: int) -> str:
    """Microseconds of ours in a chain of calls."""
    us = record.get("in_situ_us", {}).get(ours(record))
    return "" if us is None else f"{us:.{decimals}f}"


def elsewhere(record) -> str:
    """TFLOP/s that another library has published of the case, on another card."""
    tflops = record.get("published_tflops")
    return "" if tflops is None else f"{tflops:.0f}"


def grouped(records, decimals: int = 0) -> str:
    others, chained = peers(records), any("in_situ_us" in r for r in records)
    published = any("published_tflops" in r for r in records)
    rows = [
        [
            f"{r['op']} {r['case']}", f"{r['us'][ours(r)]:.{decimals}f}",
            *([in_situ(r, decimals)] if chained else []),
            f"{r['floor_us']:.{decimals}f}", f"{r['floor_share']:.0%}",
            f"{r['tflops']:.0f}" if r["tflops"] else "",
            *([elsewhere(r)] if published else []),
            f"{r['tbytes']:.2f}",
            *(ratio(r, peer) for peer in others),
        ]
        for r in records
    ]  # fmt: skip
    header = ["case", "us", *(["in situ"] if chained else []), "floor", "of floor"]
    header += ["TFLOP/s", *(["published (DeepGEMM, H800)"] if published else []), "TB/s"]
    return table([*header, *(f"{peer} / ours" for peer in others)], rows)


def segmented(records) -> str:
    """One line per shape: times, with MLX's published ones, errors, and ratios to peers."""
    cases = list(dict.fromkeys(r["case"] for r in records))
    kinds = list(dict.fromkeys(r["op"].removeprefix("segmented ") for r in records))
    by = {(r["case"], r["op"].removeprefix("segmented ")): r for r in records}

    def cell(case: str, kind: str, text) -> str:
        return text(by[case, kind]) if (case, kind) in by else ""

    def us(r) -> str:
        return f"{r['us'][ours(r)]:.1f}" + (f" ({r['mlx_us']:g})" if r.get("mlx_us") else "")

    times = [[case, *(cell(case, kind, us) for kind in kinds)] for case in cases]
    errors = [
        [case, *(cell(case, kind, lambda r: f"{r['error']:.1e}") for kind in kinds)]
        for case in cases
        if "cut" not in case
    ]
    text = table(["us", *kinds], times) + "\n\n" + table(["relative error", *kinds], errors)
    if any("in_situ_us" in r for r in records):
        rows = [[case, *(cell(case, k, lambda r: in_situ(r, 1)) for k in kinds)] for case in cases]
        text += "\n\n" + table(["us in situ", *kinds], rows)
    if others := peers(records):
        rows = [
            [f"{kind} {case}", *(ratio(by[case, kind], peer) for peer in others)]
            for kind in kinds
            for case in cases
            if (case, kind) in by and len(by[case, kind]["us"]) > 1
        ]
        text += "\n\n" + table(["segmented", *(f"{peer} / ours" for peer in others)], rows)
    return text


def means(records) -> str:
    """Geometric means, and how many cases a peer wins."""
    rows = summary(records)
    others = list(dict.fromkeys(peer for row in rows for peer in row["peers"]))
    body = [
        [
            f"{row['op']} {row['regime']}".strip(), str(row["cases"]), f"{row['share']:.0%}",
            *(f"{row['peers'][p]['ratio']:.2f}x" if p in row["peers"] else "" for p in others),
        ]
        for row in rows
    ]  # fmt: skip
    text = table(
        ["op, rows per group", "cases", "of floor", *(f"{peer} / ours" for peer in others)], body
    )
    if compared := sum(best_peer(r) is not None for r in records):
        slow = sum(map(is_slow, records))
        count = f"{slow} of {compared} cases with a peer"
        text += f"\n\n{count} run below {LIMIT} of the best peer's speed."
    return text


def family(record) -> str:
    return FAMILIES.get(record["op"].split()[0], "grouped")


def tables(records) -> list[str]:
    """One of each family of cases that was run, and after each an empty line."""
    out = []
    for name in dict.fromkeys(["grouped", *FAMILIES.values()]):
        if some := [r for r in records if family(r) == name]:
            decimals = 1 if name in QUANTIZED else 0
            out += [segmented(some) if name == "segmented" else grouped(some, decimals), ""]
    return out


def load(paths) -> tuple[list[dict], list[dict]]:
    """The records' headers, and all cases that we ran, each with its run's ceilings. Where records
    have a case in common, the last one's counts."""
    heads, cases = [], {}
    for head in (dict(run) for path in paths for run in runs(path)):
        for r in head.pop("records"):
            if ours(r) is not None:
                kind = "fp8" if family(r) == "fp8" else r["op"].removeprefix("segmented ")
                known = head.get("ceilings_tflops", {})
                c = known.get(kind, head["C_tflops"])
                cases[r["op"], r["case"]] = r | {"C": c, "B": head["B_tbytes"]}
        heads.append(head)
    return heads, list(cases.values())


def text(heads, records) -> str:
    """The machines, the tables and the means."""
    lines = []
    for head in heads:
        c8 = "fp8" in head.get("command", "") and head.get("ceilings_tflops", {}).get("fp8")
        fp8 = f", {c8:.0f} in FP8" if c8 else ""
        partial = f" Partial: without {', '.join(head['missing'])}." if head.get("missing") else ""
        lines.append(
            f"{head['gpu']}, jax {head['jax']}, commit {head['commit']}, {head['date']}: "
            f"C = {head['C_tflops']:.0f} TFLOP/s{fp8}, B = {head['B_tbytes']:.2f} TB/s.{partial}"
        )
    return "\n".join([*lines, "", *tables(records), means(records)])


def show(heads, records) -> None:
    print(text(heads, records))


def draw(records, folder: Path) -> None:
    from . import plots

    folder.mkdir(parents=True, exist_ok=True)
    for end, names in PLOTS.items():
        fp8 = end == "_fp8"  # of which our own bfloat16 is the peer
        if shown := [r for r in records if family(r) in names]:
            plots.speedup(shown, folder / f"speedup{end}.svg")
            also = ("ours[bfloat16]",) if fp8 else ()
            plots.means(shown, folder / f"means{end}.svg", also)
            plots.roofline(shown, folder / f"roofline{end}.svg", together=fp8)


def main(argv=None) -> None:
    parser = new_parser("report", __doc__)
    parser.add_argument("records", nargs="+", type=Path)
    parser.add_argument("--tables", type=Path, metavar="FILE")
    parser.add_argument("--plots", type=Path, metavar="FOLDER")
    args = parser.parse_args(argv)
    heads, records = load(args.records)
    show(heads, records)
    if args.tables:
        names = " ".join(path.as_posix() for path in [*args.records, Path("--tables"), args.tables])
        made_by = f"<!-- python -m benchmarks.report {names} -->"
        args.tables.write_text(f"{made_by}\n\n{text(heads, records)}\n")
    if args.plots:
        draw(records, args.plots)


if __name__ == "__main__":
    main()
