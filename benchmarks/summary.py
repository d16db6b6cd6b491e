"""What records of benchmarks.gpu say together: geometric means, and cases that a peer wins."""

import math
from collections.abc import Iterable

LIMIT = 0.95  # of the best peer's speed


def geomean(values: Iterable[float]) -> float:
    values = list(values)
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def best_peer(record: dict) -> str | None:
    """The fastest arm that is not ours."""
    peers = {name: us for name, us in record["us"].items() if not name.startswith("ours")}
    return min(peers, key=lambda name: peers[name]) if peers else None


def ours(record: dict) -> str | None:
    """The first of our arms, which is the one compared."""
    return next((name for name in record["us"] if name.startswith("ours")), None)


def is_slow(record: dict) -> bool:
    """Below LIMIT of the best peer's speed, in the same run."""
    mine, peer = ours(record), best_peer(record)
    if mine is None or peer is None:
        return False
    return record["us"][peer] < LIMIT * record["us"][mine]


def summary(records: list[dict]) -> list[dict]:
    """Geometric means per op and regime: share of the floor, and speed-up over each peer."""
    found: dict[tuple[str, str], list[dict]] = {}
    for record in records:
        if ours(record) is not None:
            found.setdefault((record["op"], record.get("regime", "")), []).append(record)
    rows = []
    for (op, regime), members in found.items():
        peers = dict.fromkeys(p for r in members for p in r["us"] if p != ours(r))
        ratios = {}
        for peer in peers:
            values = [r["us"][peer] / r["us"][ours(r)] for r in members if peer in r["us"]]
            ratios[peer] = {"ratio": geomean(values), "worst": min(values), "cases": len(values)}
        share = geomean(r["floor_us"] / r["us"][ours(r)] for r in members)
        rows.append(
            {"op": op, "regime": regime, "cases": len(members), "share": share, "peers": ratios}
        )
    return rows


def line(record: dict) -> str:
    mine, us = ours(record), record["us"]
    text = f"{record['op']:18} {record['case']:44}"
    if mine is None:
        text += f" {'failed':>9}"
        compared = 0.0
    else:
        compared = us[mine]
        text += (
            f" {compared:9.1f} us {record['floor_share']:5.0%} {record['tflops']:6.1f} TFLOP/s "
            f"{record['tbytes']:5.2f} TB/s  error {record['error']:.1e} "
        )
    for name, value in us.items():
        if name != mine:
            text += f" {name} {value:.1f}" + (f" ({value / compared:.2f}x)" if compared else "")
    if chained := record.get("in_situ_us"):
        text += "  in situ" + "".join(f" {name} {value:.1f}" for name, value in chained.items())
    if record.get("mlx_us"):
        text += f" MLX {record['mlx_us']}" + (
            f" ({record['mlx_us'] / compared:.2f}x)" if compared else ""
        )
    if is_slow(record):
        text += f"  SLOWER than {best_peer(record)}"
    return text + "".join(f"\n{'':21}{name}: {why}" for name, why in record["notes"].items())


def totals(records: list[dict]) -> str:
    """Geometric means by op and regime, then the cases that a peer wins."""
    text = f"\n{'op':18} {'rows/group':14} cases  of floor  peer / ours (worst; cases)\n"
    for row in summary(records):
        peers = "".join(
            f"  {name} {r['ratio']:.2f}x ({r['worst']:.2f}; {r['cases']})"
            for name, r in row["peers"].items()
        )
        text += f"{row['op']:18} {row['regime']:14} {row['cases']:5} {row['share']:8.0%}{peers}\n"
    slow = [r for r in records if is_slow(r)]
    compared = sum(ours(r) is not None and best_peer(r) is not None for r in records)
    text += (
        f"\n{len(slow)} of {compared} cases with a peer below {LIMIT} of the best peer's speed\n"
    )
    for r in slow:
        peer, mine = best_peer(r), ours(r)
        text += f"  {r['op']} {r['case']}: {r['us'][peer] / r['us'][mine]:.2f}x of {peer}\n"
    return text
