"""Speed-ups and a roofline, as SVG files that are the same in every run."""

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator

from .summary import ours, summary

STYLE: Any = {
    "svg.hashsalt": "jax_groupgemm",  # of identifiers, otherwise random
    "svg.fonttype": "none",
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
}
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#222222")
MARKERS = "os^Dvx+*"
# As readers know them who have not seen the benchmark.
PRODUCTS = {
    "forward": "product",
    "dgrad": "gradient of rows",
    "wgrad": "gradient of weights",
    "fp8 fprop": "product",
    "fp8 dgrad": "gradient of rows",
    "fp8 wgrad": "gradient of weights",
    "fp8_linear": "layer with both gradients",
}
PEERS = {
    "quack": "QuACK",
    "lax": "jax.lax.ragged_dot",
    "mosaic": "JAX's Pallas kernel",
    "ours[bfloat16]": "ours, bfloat16",
}


def save(figure, path: Path) -> None:
    # Readers' fonts may be wider than those that matplotlib measures.
    tight = {"bbox_inches": "tight", "pad_inches": 0.25}
    figure.savefig(path, **tight, metadata={"Date": None, "Creator": None})
    plt.close(figure)
    # matplotlib ends some lines with a space
    text = "\n".join(line.rstrip() for line in path.read_text().splitlines())
    path.write_text(text + "\n")


def _ratios(axes, series: list[tuple[Any, list[Any]]], labels: list[str]) -> None:
    """Times beside ours: a row for each label, and in it a point (ratio, row) of each named series
    that has one."""
    for i, (name, at) in enumerate(series):
        axes.scatter(*zip(*at, strict=True), s=24, color=COLOURS[i % len(COLOURS)],
                     marker=MARKERS[i % len(MARKERS)], label=name)  # fmt: skip
    axes.axvline(1, color="black", linewidth=0.8)
    _times(axes)
    axes.set_yticks(range(len(labels)), labels)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.grid(color="#dddddd", linewidth=0.6)


def _times(axes) -> None:
    """Ticks at powers of two, and between them where there are few."""
    low, high = axes.get_xlim()
    axes.set_xscale("log", base=2)
    if high < 4 * low:
        axes.xaxis.set_major_locator(LogLocator(base=2, subs=(1, 1.5)))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}x")


def speedup(records: list[dict], path: Path) -> None:
    """How many times as long as ours each peer takes, case by case; MLX's published times too."""
    bars = []
    for r in records:
        mine = r["us"][ours(r)]
        others = {name: us / mine for name, us in r["us"].items() if name != ours(r)}
        if r.get("mlx_us") and "cut" in r["case"]:
            others["MLX, published"] = r["mlx_us"] / mine
        if others:
            bars.append((f"{r['op']} {r['case']}", others))
    if not bars:
        return
    peers = list(dict.fromkeys(name for _, others in bars for name in others))
    colours = dict(zip(peers, COLOURS * len(peers), strict=False))
    with matplotlib.rc_context(STYLE):
        rows = sum(len(others) + 1 for _, others in bars)
        figure, axes = plt.subplots(figsize=(7, 0.6 + 0.11 * rows))
        place, ticks = 0.0, []
        for label, others in bars:
            at = place + np.arange(len(others))
            length = np.array(list(others.values())) - 1
            axes.barh(at, length, 0.85, left=1, color=[colours[p] for p in others])
            ticks.append((float(at.mean()), label))
            place += len(others) + 1
        axes.axvline(1, color="black", linewidth=0.8)
        _times(axes)
        axes.set_yticks([at for at, _ in ticks], [label for _, label in ticks])
        axes.tick_params(axis="y", length=0, labelsize=7)
        axes.set_ylim(place - 0.5, -1)
        axes.grid(axis="x", color="#dddddd", linewidth=0.6)
        axes.set_xlabel("time of the peer / ours")
        handles = [Patch(color=colours[p]) for p in peers]
        axes.legend(handles, peers, frameon=True)
        save(figure, path)


def _place(row: dict) -> tuple[int, int]:
    """Where a row of means stands: by operation, then by rows per group."""
    if row["op"] not in PRODUCTS:
        return len(PRODUCTS), 0
    first = re.search(r"\d+", row["regime"])
    return [*PRODUCTS].index(row["op"]), int(first[0]) if first else 0


def _label(row: dict) -> str:
    op, regime = PRODUCTS.get(row["op"], row["op"]), row["regime"]
    if row["op"] not in PRODUCTS or not regime:
        return f"{op} {regime}".strip()
    rows, skewed, _ = regime.partition(" skewed")
    return f"{op}, {rows} rows per group" + (", skewed" if skewed else "")


def means(records: list[dict], path: Path, also: Collection[str] = ()) -> None:
    """How many times as long other libraries take: geometric means, by rows per group. ``also``:
    arms of ours that are shown like them."""
    rows = []
    shown = lambda name: name in also or not name.startswith("ours")
    for row in summary(records):
        others = {name: p for name, p in row["peers"].items() if shown(name)}
        if others:
            rows.append(row | {"peers": others})
    if not rows:
        return
    rows.sort(key=_place)
    peers = list(dict.fromkeys(name for row in rows for name in row["peers"]))
    with matplotlib.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(6.5, 1 + 0.24 * len(rows)), layout="constrained")
        series = [
            (PEERS.get(peer, peer), [
                (row["peers"][peer]["ratio"], y) for y, row in enumerate(rows)
                if peer in row["peers"]
            ])
            for peer in peers
        ]  # fmt: skip
        _ratios(axes, series, [_label(row) for row in rows])
        other, mine = ("other", "ours in FP8") if also else ("other library", "ours")
        axes.set_xlabel(f"time of the {other} / {mine} (right of the line: {mine} is faster)")
        figure.legend(loc="outside lower center", ncols=4, frameon=False)
        save(figure, path)


def _range(values: list[float], digits: str) -> str:
    """The least and the largest of sorted values."""
    return "-".join(dict.fromkeys(f"{value:{digits}}" for value in (values[0], values[-1])))


def roofline(records: list[dict], path: Path, together: bool = False) -> None:
    """Achieved TFLOP/s against FLOP per byte of the floor, under the ceilings of each run;
    ``together``: one label names those of all runs, and none stands on the axis."""
    records = [r for r in records if r["tflops"]]
    if not records:
        return
    with matplotlib.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(6, 3.8))
        x = [r["tflops"] / r["tbytes"] for r in records]
        span = np.array([min(x) / 1.5, max(x) * 1.5])
        ceilings = dict.fromkeys((r["C"], r["B"]) for r in records)
        for c, b in ceilings:
            ridge = np.array([span[0], c / b, max(span[1], c / b)])
            roof = np.minimum(ridge * b, c)
            axes.plot(ridge, roof, color="black", linewidth=0.8)
            if not together:
                axes.text(ridge[-1], c, f"{c:.0f} TFLOP/s", ha="right", va="bottom", fontsize=7)
        if together:
            cs, bs = map(sorted, zip(*ceilings, strict=True))
            above = f"{_range(cs, '.0f')} TFLOP/s"
            axes.text(max(span[1], cs[-1] / bs[0]), cs[-1], above, ha="right", va="bottom",
                      fontsize=7)  # fmt: skip
            below = f"   {_range(bs, '.2f')} TB/s"
            axes.text(span[0], span[0] * bs[0], below, va="center", fontsize=7)
        else:
            b = records[0]["B"]
            axes.text(span[0] * 1.5, span[0] * 1.5 * b, f"{b:.2f} TB/s  ", ha="right", fontsize=7)
        ops = list(dict.fromkeys(r["op"] for r in records))
        for i, op in enumerate(ops):
            marker = MARKERS[i % len(MARKERS)]
            colour = COLOURS[(i + i // len(MARKERS)) % len(COLOURS)]
            points = [(r["tflops"] / r["tbytes"], r["tflops"]) for r in records if r["op"] == op]
            axes.scatter(*zip(*points, strict=True), s=12, color=colour, marker=marker, label=op)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("FLOP per byte (each operand read once, the result written once)")
        axes.set_ylabel("TFLOP/s")
        axes.grid(color="#eeeeee", linewidth=0.6)
        axes.legend(fontsize=7, frameon=False)
        save(figure, path)


def layers(records: list[dict], path: Path) -> None:
    """Whole layers: each arm's share of a dense product's rate, by shape, in both directions."""
    records = [r for r in records if r.get("of_C") and r["right"]]
    if not records:
        return
    directions = list(dict.fromkeys(r["direction"] for r in records))
    shapes = list(dict.fromkeys(r["shape"] for r in records))
    arms = list(dict.fromkeys(r["arm"] for r in records))
    by = {(r["direction"], r["shape"], r["arm"]): r["of_C"] for r in records}
    with matplotlib.rc_context(STYLE):
        height = 0.8 + 0.12 * len(shapes) * (len(arms) + 1)
        figure, panels = plt.subplots(
            1, len(directions), figsize=(7, height), sharey=True, squeeze=False,
            layout="constrained",
        )  # fmt: skip
        for axes, direction in zip(panels[0], directions, strict=True):
            for i, arm in enumerate(arms):
                length = [100 * by.get((direction, shape, arm), np.nan) for shape in shapes]
                at = np.arange(len(shapes)) * (len(arms) + 1) + i
                axes.barh(at, length, 0.85, color=COLOURS[i % len(COLOURS)],
                          label=arm if axes is panels[0][0] else None)  # fmt: skip
            middle = np.arange(len(shapes)) * (len(arms) + 1) + (len(arms) - 1) / 2
            axes.set_yticks(middle, shapes)
            axes.tick_params(axis="y", length=0, labelsize=7)
            axes.set_ylim(len(shapes) * (len(arms) + 1) - 1, -1)
            axes.grid(axis="x", color="#dddddd", linewidth=0.6)
            axes.set_title(direction, fontsize=8)
            axes.set_xlabel("% of a large dense product's rate")
        figure.legend(loc="outside lower center", ncols=4, frameon=False)
        save(figure, path)


def matrix(records: list[dict], path: Path) -> None:
    """The times of ``benchmarks.matrix``: formats and layouts by dtypes and directions. Colours say
    how many times as long a cell takes as the format's fastest product of bfloat16 x."""
    rows = list(dict.fromkeys(r["rows"] for r in records))
    names = list(dict.fromkeys((r["format"], r["layout"]) for r in records if r["us"]))
    columns = list(dict.fromkeys((r["dtype"], r["direction"]) for r in records))
    us = {
        (r["rows"], (r["format"], r["layout"]), (r["dtype"], r["direction"])): r["us"]
        for r in records
    }
    best = {
        (count, name): min(
            us[count, line, ("bfloat16", "forward")]
            for line in names
            if line[0] == name and us.get((count, line, ("bfloat16", "forward")))
        )
        for count in rows
        for name in dict.fromkeys(name for name, _ in names)
    }
    with plt.rc_context(STYLE):
        size = 4.4 * len(rows), 0.21 * len(names) + 1
        figure, panels = plt.subplots(1, len(rows), figsize=size)
        for axes, count in zip(np.atleast_1d(panels), rows, strict=True):
            cells = np.array([[us.get((count, n, c)) or np.nan for c in columns] for n in names])
            ratios = cells / np.array([[best[count, name]] for name, _ in names])
            axes.imshow(np.log2(ratios), cmap="YlOrRd", vmin=0, vmax=4, aspect="auto")
            for (i, j), value in np.ndenumerate(cells):
                if np.isfinite(value):
                    dark = ratios[i, j] > 6
                    axes.text(j, i, f"{value:.0f}", ha="center", va="center", fontsize=7,
                              color="white" if dark else "black")  # fmt: skip
            axes.set_xticks(range(len(columns)), [f"{d}\n{w}" for d, w in columns], fontsize=7)
            first = axes is np.atleast_1d(panels)[0]
            layouts = {"linear": "stored", "sm90": "prepacked"}
            labels = [f"{name}, {layouts[layout]}" for name, layout in names] if first else []
            axes.set_yticks(range(len(names)), labels or [""] * len(names), fontsize=7)
            axes.tick_params(length=0)
            axes.set_title(f"{count} rows, us", fontsize=8)
        figure.tight_layout()
        save(figure, path)


def scaling(panels: dict[str, dict], measured: dict[str, list], path: Path) -> None:
    """A panel, by its title, has arms, and an arm points: GPUs, and percent of one GPU alone. Two
    panels a row; ``measured`` are points of some."""
    with matplotlib.rc_context(STYLE):
        figure, axes = plt.subplots(
            len(panels) // 2, 2, figsize=(7, 2.4 * len(panels) // 2), sharex=True, sharey=True,
            squeeze=False, layout="constrained",
        )  # fmt: skip
        for of, (title, arms) in zip(axes.flat, panels.items(), strict=True):
            for i, (name, points) in enumerate(arms.items()):
                of.plot(*zip(*points, strict=True), color=COLOURS[i], marker=MARKERS[i],
                        markersize=3, linewidth=1, label=name)  # fmt: skip
            if title in measured:
                of.scatter(*zip(*measured[title], strict=True), s=40, facecolors="none",
                           edgecolors="black", zorder=3, label="measured")  # fmt: skip
            of.set_title(title, fontsize=8)
            of.grid(color="#dddddd", linewidth=0.6)
        gpus = sorted({n for arms in panels.values() for of in arms.values() for n, _ in of})
        axes[0, 0].set_xscale("log", base=2)
        axes[0, 0].set_xticks(gpus, [str(n) for n in gpus])
        axes[0, 0].set_ylim(0, 110)
        for of in axes[-1]:
            of.set_xlabel("GPUs")
        for of in axes[:, 0]:
            of.set_ylabel("% of one GPU alone")
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3,
                      frameon=False)  # fmt: skip
        save(figure, path)


def cpu(records: list[dict], path: Path) -> None:
    """``benchmarks.cpu_quantized``: each arm's time over ours, by rows and operation."""
    titles = {"grouped_qmm": "product", "dx": "gradient of rows", "gather_qmm": "gather_qmm"}
    arms = list(dict.fromkeys(name for r in records for name in r["ms"] if name != "ours"))
    if not arms:
        return
    several = len({(r["format"], r["dtype"]) for r in records}) > 1

    def label(r: dict) -> str:
        what = f", {r['format']}, {r['dtype']} x" if several else ""
        return f"{titles[r['op']]}, {r['rows']} rows{what}"

    with matplotlib.rc_context(STYLE):
        height = 1 + 0.26 * len(records)
        figure, axes = plt.subplots(figsize=(6.5, height), layout="constrained")
        series = [
            (arm, [
                (r["ms"][arm] / r["ms"]["ours"], y) for y, r in enumerate(records) if arm in r["ms"]
            ])
            for arm in arms
        ]  # fmt: skip
        _ratios(axes, series, [label(r) for r in records])
        axes.set_xlabel("time / ours (right of the line: ours is faster)")
        figure.legend(loc="outside lower center", ncols=3, frameon=False)
        save(figure, path)
