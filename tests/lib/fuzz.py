"""What random cases share: sizes, options, the error measure, the driver.

A case is ``case(rng, dtype, out_dtype, precision, tf32)``: one compiled program, which it tries
with ``PATTERNS`` groupings. ``pytest --fuzz N`` runs N groupings of each of tests/*/test_fuzz*.py.
"""

import jax
import numpy as np
import oracle
import pytest

PER_TEST = 50  # cases of one test
PATTERNS = 5  # groupings that one compiled program is tried with


def parametrize(metafunc, default: int, daily: int = 1) -> None:
    """``seed`` and ``where`` of as many tests as ``--fuzz`` cases take. Without it all but the
    ``daily`` first are weekly."""
    count = metafunc.config.getoption("--fuzz")
    tests = -(-(default if count is None else count) // PER_TEST)
    marks = [] if count is not None else [pytest.mark.weekly]
    seeds = [pytest.param(seed, marks=marks if seed >= daily else []) for seed in range(tests)]
    metafunc.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
    metafunc.parametrize("seed", seeds)


def run(cases, seed: int, where: str) -> None:
    rng = np.random.default_rng([seed, 20])
    with jax.default_device(jax.local_devices(backend=where)[0]):
        for _ in range(PER_TEST // PATTERNS):
            case = cases[rng.integers(len(cases))]
            dtype = str(rng.choice(["float32", "bfloat16", "float16"]))
            out_dtype = rng.choice([None, None, "float32", "bfloat16", "float16"])
            tf32 = dtype == "float32" and where == "cuda" and bool(rng.integers(2))
            state = rng.bit_generator.state
            try:
                with jax.numpy_dtype_promotion("standard"):
                    case(rng, dtype, out_dtype, "tensorfloat32" if tf32 else None, tf32)
            except Exception as error:
                error.add_note(f"{case.__name__} {dtype} {out_dtype} {tf32=} {state}")
                raise


def dimension(rng) -> int:
    """Often small or next to a multiple of what kernels like."""
    kind = rng.integers(7)
    if kind == 0:
        return int(rng.integers(1, 20))
    if kind == 1:
        return int(rng.integers(1, 200))
    if kind < 5:  # lines of whole 16 bytes, without which TMA is out
        return 8 * int(rng.integers(1, 60))
    return max(
        1, int(rng.choice([16, 32, 64, 128, 256]) * rng.integers(1, 3) + rng.integers(-2, 3))
    )


def some_sizes(rng, groups: int, rows: int) -> np.ndarray:
    kind = rng.integers(6)
    if kind == 0:
        return np.zeros(groups, np.int32)
    if kind == 1:  # everything in one group, perhaps more than there is
        sizes = np.zeros(groups, np.int32)
        sizes[rng.integers(groups)] = rows + rng.integers(0, 3)
        return sizes
    if kind == 2:  # negative and excessive sizes
        return rng.integers(-rows, rows + 1, groups).astype(np.int32)
    if kind == 3:
        return rng.multinomial(rows, np.full(groups, 1 / groups)).astype(np.int32)
    return oracle.random_sizes(rng, groups, rows, empty=rng.random())


def some_offset(rng, groups: int) -> tuple[int, int | None]:
    """How many group sizes there are, and the offset of these groups among them."""
    if rng.integers(3):
        return groups, None
    return groups + int(rng.integers(0, 6)), int(rng.integers(-4, groups + 6))


def perhaps(rng, shape, dtype):
    return oracle.random(rng, shape, dtype) if rng.integers(2) else None


def epilogue(y, ranges, bias=None, activation=None, row_scale=None, existing=None) -> np.ndarray:
    """``existing + row_scale * activation(y + bias)``; ``ranges`` are the rows of bias's groups."""
    y = y.copy()
    if bias is not None:
        for rows, b in zip(ranges, oracle.f64(bias), strict=True):
            y[slice(*rows)] += b
    with np.errstate(over="ignore"):
        if activation == "silu":
            y = y / (1 + np.exp(-y))
        elif activation == "swiglu":
            gate, up = np.split(y, 2, axis=1)
            y = gate / (1 + np.exp(-gate)) * up
        elif activation == "relu":
            y = np.maximum(y, 0)
    if row_scale is not None:
        y = y * oracle.f64(row_scale)[:, None]
    return y if existing is None else y + oracle.f64(existing)


def check(got, want, k, tf32, operands=1.0, more=0.0):
    """Few sums, or one, may happen to cancel: errors are measured against what sums of k products
    of random ``operands`` usually are, where that is more. ``more`` than roundings is allowed."""
    assert got.shape == want.shape
    usual = operands * np.sqrt(np.count_nonzero(want) * k)
    allowed = oracle.TOLERANCE[got.dtype.name] * max(1.0, (k / 512) ** 0.5) + (2e-3 if tf32 else 0)
    allowed += more
    error = np.linalg.norm(oracle.f64(got) - want) / max(np.linalg.norm(want), usual, 1e-30)
    assert error <= allowed, (error, allowed)
