"""Every operation with random shapes, dtypes, layouts, metadata and options, under random
transformations and divided among devices, against float64 in numpy.

A program is compiled once and tried with several draws; one in four has 64-bit numbers.
``--fuzz N`` compiles N of each kind, otherwise one for each operation runs daily and the rest
weekly. A failure names its seed: ``JGG_CASE=operation:seed pytest
tests/random_cases/test_every_operation.py`` runs it alone.
"""

import os
import zlib

import jax
import numpy as np
import pytest
import random_calls
from random_calls import sharded, transforms

CASES = 10  # programs of one test
WEEKLY = 60  # programs of each operation
SLOW = ("nvfp4_grouped_linear", "nvfp4_quantize", "fp8_grouped_linear", "fp8_quantize")
DAILY_SHARDED = ("grouped_mm", "ragged_dot_general", "gather_mm")


def pytest_generate_tests(metafunc):
    if "first" not in metafunc.fixturenames:
        return
    named = os.environ.get("JGG_CASE")
    if named:
        name, _, seed = named.partition(":")
        metafunc.parametrize(("name", "first", "count"), [(name, int(seed), 1)])
        return
    total = metafunc.config.getoption("--fuzz")
    per_operation = WEEKLY if total is None else -(-total // len(random_calls.CALLS))
    weekly = [] if total is not None else [pytest.mark.weekly]
    cases = [
        pytest.param(name, first, min(CASES, per_operation - first), marks=weekly)
        for name in random_calls.CALLS
        for first in range(1 if total is None else 0, per_operation, CASES)
    ]
    if total is None:  # one program daily, but where it takes seconds to compile
        of_devices = "sharded" in metafunc.function.__name__
        daily = DAILY_SHARDED if of_devices else set(random_calls.CALLS) - set(SLOW)
        cases += [
            pytest.param(name, 0, 1, marks=[] if name in daily else weekly)
            for name in random_calls.CALLS
        ]
    metafunc.parametrize(("name", "first", "count"), cases)


def test_random_cases(name, first, count):
    assert all(each_case(name, first, count, transforms.one_case))


def test_random_sharded_cases(name, first, count):
    if len(jax.devices()) < sharded.DEVICES:
        pytest.skip("needs eight devices")
    done = each_case(name, first, count, sharded.one_case, may=sharded.may_be_sharded)
    assert count < CASES or set(done) != {"refused"}


def each_case(name, first, count, how, may=lambda call: True) -> list[str]:
    """What was done with the programs of these seeds."""
    done = []
    for seed in range(first, first + count):
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        call = None
        wide = jax.config.jax_enable_x64 or rng.integers(4) == 0
        try:
            with jax.numpy_dtype_promotion("standard"), jax.enable_x64(wide):
                call = random_calls.CALLS[name](rng)
                done.append(how(rng, call) if may(call) else "nothing to do")
        except Exception as error:
            bits = " in 64 bits" if wide else ""
            error.add_note(f"JGG_CASE={name}:{seed}  ({'' if call is None else call.name}){bits}")
            raise
    return done
