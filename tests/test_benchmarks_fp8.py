"""The benchmark of FP8 without a GPU: its lists, floors, arms and checks."""

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from benchmark_cases import check_lists

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))  # last: an installed jax_groupgemm comes first

from benchmarks import fp8, gpu, report, timing  # noqa: E402
from benchmarks import fp8_shapes as shapes  # noqa: E402
from benchmarks.fp8_shapes import Product, Quantize  # noqa: E402

ARGS = SimpleNamespace(peers=[], implementation=[None], repetitions=2, turns=2, in_situ=False)


@pytest.fixture(autouse=True)
def _fake_times(monkeypatch):
    monkeypatch.setattr(timing.JaxArm, "time", lambda self, n: [2.0] * n)
    timing.forget()


@pytest.mark.parametrize("op", shapes.OPS)
def test_lists(op):
    check_lists(gpu.cases, op)


def test_products_of_the_list():
    """DeepGEMM's shapes, and the models' from decode to training."""
    found = gpu.cases("fp8")
    deep = {(c.groups, c.rows // c.groups, c.n, c.k) for c in found if c.name == "DeepGEMM"}
    assert deep == set(shapes.PUBLISHED) | {(*g, *w) for g in shapes.GROUPS for w in shapes.WIDTHS}
    assert {c.regime for c in found} == {"<= 32", "64-512", ">= 1024"}
    assert {c.op for c in found} == {"fp8 fprop", "fp8 dgrad", "fp8 wgrad"}
    for case in found:
        assert case.sizes().sum() == case.rows
    assert any((c.sizes() % 128).any() for c in found if c.name == "DeepGEMM")


def test_floors():
    case = Product("fprop", "", 4, 256, 128, 384)
    lines = 256 * 128 + 4 * 256
    assert case.bytes == lines + 4 * (128 * 384 + 3 * 4) + 2 * 256 * 384
    assert case.flops == 2 * 256 * 128 * 384
    wgrad = dataclasses.replace(case, direction="wgrad")
    assert wgrad.bytes == 256 * 512 + 4 * 256 * 4 + 4 * 4 * 128 * 384
    assert Quantize("rows", 3, 256, 128).bytes == 256 * 128 * 3 + 4 * 256
    assert Quantize("weights", 3, 128, 256).bytes == 3 * (128 * 256 * 3 + 4 * 2)


@pytest.mark.parametrize("direction", shapes.DIRECTIONS)
@pytest.mark.one_in(3)
def test_products_run_and_are_checked(direction, monkeypatch):
    monkeypatch.setitem(shapes.PUBLISHED, (3, 20, 160, 128), 7.0)
    case = Product(direction, "small", 3, 60, 128, 160)
    record = gpu.run_case(case, ARGS, 1e12, 1e12)
    assert record.get("published_tflops") == (7.0 if direction == "fprop" else None)
    assert record["notes"] == {}
    assert list(record["us"]) == ["ours", "ours[casts]", "ours[bfloat16]"]
    assert max(record["errors"].values()) <= case.tolerance
    json.dumps(record)
    v = fp8.operands(case)
    error, arm = fp8.checker(case, v), fp8.arms(case, v, ARGS)["ours"]()
    assert error(arm.result() * 1.1) > case.tolerance


def test_published_figures_are_in_the_table():
    """Beside ours, and only where a record has one."""
    record = {
        "op": "fp8 fprop", "case": "small", "us": {"ours": 2.0}, "floor_us": 1.0,
        "floor_share": 0.5, "tflops": 3.0, "tbytes": 4.0,
    }  # fmt: skip
    header, _, one, other = report.grouped([record | {"published_tflops": 7.0}, record]).split("\n")
    assert header.split(" | ")[4:6] == ["TFLOP/s", "published (DeepGEMM, H800)"]
    assert one == "| fp8 fprop small | 2 | 1 | 50% | 3 | 7 | 4.00 |"
    assert other == "| fp8 fprop small | 2 | 1 | 50% | 3 |  | 4.00 |"
    assert "published" not in report.grouped([record])


@pytest.mark.parametrize("what", ["rows grouped", "along T stochastic", "weights transposed"])
@pytest.mark.one_in(3)
def test_quantize_runs_and_is_checked(what):
    case = Quantize(what, 3, 96, 256)
    v = fp8.operands(case)
    (arm,) = fp8.arms(case, v, ARGS).values()
    out = arm().result()
    error = fp8.checker(case, v)
    assert error(out) == 0
    first = (0,) * out.scales.ndim
    assert error(dataclasses.replace(out, scales=out.scales.at[first].mul(2))) > 0
    assert error(jax.tree.map(np.zeros_like, out)) > 0.5
