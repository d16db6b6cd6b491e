"""Measure which tile of the Hopper kernel is fastest, and write a table of those for later calls.

python -m jax_groupgemm.tune [--quick] [--models NAME ...] [--shapes G,K,N[,TOP_K] ...] [--out FILE]

Needs a Hopper GPU. Every product of the list runs with every tile there is for it: random operands,
uniform routing, a cold L2 cache, device times (CUPTI), the tiles in turns, medians. All tiles must
give the same result, up to the rounding of sums in float32. A tile gets an entry where it takes at
most 0.97 of the time with the tile of the kernel's own rule, in two measurements; the second is the
one recorded. Entries of an existing FILE stay unless they were measured again.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._kernels import extension, tuned
from . import timing
from .cases import MODELS, OPS, QUICK, TOKENS, Case, Layer, Operands, cases, model_layers

PROGRAM = "python -m jax_groupgemm.tune"
RULE = 0  # what the kernel's rule takes
GAIN = 0.97
QUICK_MINUTES = 2.5


class Gpu:
    """The device, as far as measuring needs it."""

    def __init__(self):
        self.kind = extension.devices("cuda")[0][0].device_kind

    def compiled(self, f, args):
        return jax.jit(f).lower(*args).compile()

    def times(self, runs, repetitions: int) -> dict[int, list[float]]:
        return timing.in_turns(runs, repetitions)


def problem() -> str | None:
    """Why nothing can be measured here."""
    capabilities = extension.live_capabilities()
    if not capabilities:
        found, why = extension.devices()
        return f"it needs a Hopper GPU, and jax sees {f'only {found}' if found else f'none: {why}'}"
    if why := extension.unavailable("sm90", capabilities):
        return why
    try:
        timing.extension()
    except (ImportError, RuntimeError) as error:
        return str(error)
    return None


@jax.jit
def _same(got, want):
    """Whether two results differ by less than sums in float32 may, once they are rounded."""

    def same(pair):
        a, b = (v.astype(jnp.float32) for v in pair)
        size = jnp.sqrt(jnp.mean(b * b))
        rounding = float(jnp.finfo(got.dtype).eps) * jnp.maximum(jnp.abs(a), jnp.abs(b))
        return jnp.all(jnp.abs(a - b) <= rounding + 1e-3 * size)

    # Matrix by matrix: there may be more than 2^31 elements.
    return jnp.all(lax.map(same, (got, want))) if got.ndim == 3 else same((got, want))


@dataclasses.dataclass(frozen=True)
class Result:
    product: tuned.Product
    us: dict[int, float]  # by tile, and RULE
    wrong: tuple[int, ...]  # tiles whose result was another
    entry: tuned.Entry | None


def measure(case: Case, gpu, args, repetitions: int) -> Result:
    runs, products = {}, set()
    for tile in (RULE, *case.tiles):
        with tuned.forced(tile) as seen:
            compiled = gpu.compiled(case.function(), args)
        runs[tile] = lambda compiled=compiled: compiled(*args)
        products.update(seen)
    (product,) = products  # one call, that a table can name
    want = runs[RULE]()
    wrong = tuple(tile for tile in case.tiles if not _same(runs[tile](), want))
    del want
    for tile in wrong:
        del runs[tile]
    us = _medians(gpu.times(runs, repetitions))
    best = min(us, key=lambda tile: us[tile])
    entry = None
    if us[best] <= GAIN * us[RULE]:  # the least of several: measured again, for it alone
        again = _medians(gpu.times({tile: runs[tile] for tile in (RULE, best)}, repetitions))
        if again[best] <= GAIN * again[RULE]:
            entry = tuned.Entry(best, round(again[best], 2), round(again[RULE], 2))
    return Result(product, us, wrong, entry)


def _medians(times: dict[int, list[float]]) -> dict[int, float]:
    return {tile: statistics.median(values) for tile, values in times.items()}


def line(case: Case, result: Result) -> str:
    rule = result.us[RULE]
    cells = [f"rule {rule:8.1f}"]
    for tile in case.tiles:
        us = result.us.get(tile)
        cells.append(f"{tile}: {us:.1f} ({us / rule:.2f})" if us else f"{tile}: WRONG")
    if result.entry is not None:
        cells.append(f"-> {result.entry.tile}")
    return f"{case.label:52} " + "  ".join(cells)


# ---- command line ----------------------------------------------------------------------------


def layer(text: str) -> Layer:
    """``G,K,N[,TOP_K]``"""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) not in (3, 4) or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not G,K,N[,TOP_K], whole numbers from 1 on")
    groups, k, n, top_k = [*numbers, 1][:4]
    return Layer("", groups, k, n, top_k)


def arguments(argv=None) -> argparse.Namespace:
    about, *_ = (__doc__ or "").split("\n\n")
    parser = argparse.ArgumentParser(prog=PROGRAM, description=about)
    add = parser.add_argument
    add("--shapes", nargs="+", type=layer, default=[], metavar="G,K,N[,TOP_K]",
        help="weights instead of the models', and rows per token (1)")  # fmt: skip
    add("--gated", action="store_true", help="the shapes' forward products also with swiglu")
    add("--transpose-w", action="store_true", help="the shapes' weights are (G, N, K)")
    add("--models", nargs="+", default=[""], metavar="NAME",
        help=f"only those whose name holds one of these: {', '.join(MODELS)}")  # fmt: skip
    add("--ops", nargs="+", default=list(OPS), choices=OPS)
    add("--tokens", nargs="+", type=int, help="default: powers of two from 8 to 16384")
    add("--dtypes", nargs="+", default=["bfloat16"], choices=["bfloat16", "float16"])
    add("--quick", action="store_true",
        help=f"three numbers of tokens, 5 repetitions, --minutes {QUICK_MINUTES}")  # fmt: skip
    add("--repetitions", type=int)
    add("--minutes", type=float, help="after so many begin no further product")
    add("--out", type=Path, help="by default named after the device, in this directory")
    add("--dry-run", action="store_true", help="print the products, and about how long they take")
    args = parser.parse_args(argv)
    tokens = QUICK if args.quick else dict.fromkeys(OPS, TOKENS)
    args.tokens = {op: args.tokens or tokens[op] for op in args.ops}
    args.repetitions = args.repetitions or (5 if args.quick else 15)
    args.minutes = args.minutes or (QUICK_MINUTES if args.quick else None)
    return args


def selected(args) -> list[Case]:
    if args.shapes:
        layers = [
            dataclasses.replace(v, gated=args.gated, transpose_w=args.transpose_w)
            for v in args.shapes
        ]
    else:
        names = [name for name in MODELS if any(part in name for part in args.models)]
        layers = [projection for name in names for projection in model_layers(name)]
    return list(cases(layers, args.tokens, args.dtypes))


def table_of(path: Path, kind: str) -> dict[str, Any]:
    """The table that a run adds to."""
    if not path.exists():
        return {"device": kind, "runs": [], "entries": {}}
    try:
        table = tuned.read(path)
    except ValueError as error:
        raise SystemExit(f"{PROGRAM} cannot add to {path}: {error}") from error
    if table["device"] != kind:
        raise SystemExit(
            f"{PROGRAM} cannot add to {path}: it was measured on {table['device']}, this GPU is "
            f"{kind}"
        )
    return table


def provenance(repetitions: int, products: int) -> dict[str, Any]:
    packages = ("jax_groupgemm", "jax", "jaxlib")
    return {
        "date": datetime.date.today().isoformat(),
        **{package: extension.version(package) for package in packages},
        "cuda": extension.BUILD.cuda,
        "repetitions": repetitions,
        "products": products,
    }


def run(todo: list[Case], gpu, out: Path, repetitions: int, minutes: float | None) -> int:
    """Measure, print, and write the table after every product. The number of those that failed."""
    table, operands, begun = table_of(out, gpu.kind), Operands(), time.monotonic()
    measured = found = failed = 0
    print(f"{gpu.kind}: microseconds by tile, and their share of the time with the rule's tile")
    for i, case in enumerate(todo):
        if minutes is not None and time.monotonic() - begun > 60 * minutes:
            print(f"{minutes:g} minutes are over: {len(todo) - i} products are not measured")
            break
        try:
            result = measure(case, gpu, operands.of(case), repetitions)
        except Exception as error:  # operands that do not fit, say
            print(f"{case.label:52} failed: {_first_line(error)}", flush=True)
            failed += 1
            continue
        print(line(case, result), flush=True)
        measured += 1
        failed += bool(result.wrong)
        found += result.entry is not None
        table["entries"].pop(result.product, None)
        if result.entry is not None:
            table["entries"][result.product] = result.entry
        runs = [*table["runs"], provenance(repetitions, measured)]
        tuned.write(out, gpu.kind, runs, table["entries"])
    took = (time.monotonic() - begun) / 60
    print(
        f"{found} of {measured} products have a tile that is at least {1 - GAIN:.0%} faster; "
        f"{took:.1f} minutes. {tuned.VARIABLE}={out} uses the table."
    )
    return failed


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:160]


def main(argv=None) -> int:
    args = arguments(argv)
    todo = selected(args)
    if not todo:
        raise SystemExit(f"{PROGRAM}: no such model; there are {', '.join(MODELS)}")
    if args.dry_run:
        for case in todo:
            print(f"{case.label:52} {', '.join(map(str, case.tiles))}")
        minutes = sum(case.seconds(args.repetitions) for case in todo) / 60
        print(f"{len(todo)} products, roughly {minutes:.1f} minutes on an H200 (an estimate)")
        return 0
    if why := problem():
        raise SystemExit(f"{PROGRAM} cannot run: {why}")
    gpu = Gpu()
    out = args.out or Path(tuned.file_name(gpu.kind))
    return 1 if run(todo, gpu, out, args.repetitions, args.minutes) else 0
