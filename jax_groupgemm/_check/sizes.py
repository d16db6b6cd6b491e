"""Group sizes and shapes of the problems."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

# Tails of every tile, lines of whole 16 bytes and others, few rows and many.
#: T, G, K, N, and whether w is ``(G, N, K)``.
SHAPES = (
    (70, 4, 64, 96, False), (33, 3, 40, 24, True), (130, 5, 128, 64, True),
    (300, 8, 256, 320, False), (1000, 4, 512, 256, True), (513, 6, 72, 136, False),
    (9, 16, 192, 128, False), (257, 2, 1032, 264, True), (1104, 2, 1024, 512, False),
    (99, 4, 33, 17, False), (65, 3, 515, 220, True),
)  # fmt: skip
QUICK_SHAPES = SHAPES[:3]
NAN = "NaN"
_QUICK = ("uneven", "tail", "too many", NAN)


def variants(
    rng: np.random.Generator, rows: int, groups: int, quick: bool
) -> Iterator[tuple[str, np.ndarray]]:
    """Names and sizes. With those called NaN, a row behind the last group holds NaN, and so does
    what belongs to the first group and to an empty one."""
    share = rng.random(groups) + 0.05
    uneven = np.floor(share / share.sum() * rows).astype(np.int32)
    uneven[-1] += rows - uneven.sum()
    empty = np.where(np.arange(groups) % 2 == 0, uneven, 0)
    tail = uneven * 2 // 3
    tail[0] = max(tail[0], 1)
    one = np.zeros(groups, np.int32)
    one[groups // 2] = rows
    too_many = np.full(groups, rows // 2 + 3, np.int32)
    too_many[0] = -5
    nan = tail.copy()
    nan[1] = 0
    found = {
        "uneven": uneven,
        "even": np.full(groups, rows // groups, np.int32),
        "empty groups": empty,
        "one group": one,
        "tail": tail,
        "nothing": np.zeros(groups, np.int32),
        "too many": too_many,
        NAN: nan,
    }
    for name, sizes in found.items():
        if not quick or name in _QUICK:
            yield name, sizes.astype(np.int32)


def with_nan(x: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Rows of groups, where the first row of the first group is NaN, and every row of none."""
    x = x.copy()
    x[: min(max(int(sizes[0]), 0), 1)] = np.nan
    x[max(int(sizes.sum()), 0) :] = np.nan
    return x


def empty_nan(w: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Matrices, where those of empty groups are NaN."""
    w = w.copy()
    w[np.asarray(sizes) <= 0] = np.nan
    return w
