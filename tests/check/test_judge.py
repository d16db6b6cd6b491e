"""The judge of results: a number that is off, NaN where there should be none, other shapes."""

import dataclasses

import numpy as np
import oracle as other
import pytest

import jax_groupgemm as jgg
from jax_groupgemm._check import narrow, oracle, sizes
from jax_groupgemm._check.line import Want, judge
from jax_groupgemm._check.oracle import Sums


def want(value, allowed=0.1):
    return Want(np.asarray(value, np.float64), allowed)


def test_right_and_wrong():
    got = [np.float32([1, 2, 3])]
    assert judge(got, [[want([1, 2.05, 3])]]).problem is None
    verdict = judge(got, [[want([1, 2.2, 3])]])
    assert verdict.problem == "result 0 at [1] is 2, expected 2.2, right within 1.0e-01"
    assert verdict.share == pytest.approx(2)
    verdict = judge(got, [[want([0, 2, 4])]])
    assert verdict.problem is not None
    assert verdict.problem.endswith("and 1 more of 3 are wrong")


@pytest.mark.parametrize(
    ("got", "value"), [(np.nan, 1), (1, np.nan), (np.inf, 1), (np.inf, -np.inf), (np.inf, np.nan)]
)
def test_what_is_not_finite_is_no_right_number(got, value):
    assert judge([np.float32([got])], [[want([value], 1e9)]]).problem is not None


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_may_be_expected(value):
    assert judge([np.float32([value])], [[want([value])]]).problem is None


def test_shapes_and_counts():
    assert judge([np.zeros(2)], [[want([0, 0, 0])]]).problem is not None
    assert judge([], [[want([0])]]).problem == "0 results, expected 1"
    assert judge([np.zeros((0, 3))], [[want(np.zeros((0, 3)))]]).problem is None


def test_whole_numbers_are_the_same_or_wrong():
    got = [np.int32([1, 2])]
    assert judge(got, [[Want(np.int32([1, 2]))]]).problem is None
    assert judge(got, [[Want(np.int32([1, 3]))]]).problem is not None


def test_the_best_alternative_counts():
    got = [np.float32([1])]
    assert judge(got, [[want([9])], [want([1])]]).problem is None
    assert judge(got, [[want([9])], [want([3])]]).problem is not None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_one_product_less_is_seen(rng, dtype):
    """A sum over 64 that misses one term, and one whose term is of another row."""
    x, w = oracle.normal(rng, (16, 64), dtype), oracle.normal(rng, (2, 64, 8), dtype)
    right = oracle.grouped_mm(x, w, [10, 6])
    expected = [[right.want(dtype, 64)]]
    as_result = lambda a: [a.astype(oracle.DTYPES[dtype])]
    assert judge(as_result(right.value), expected).problem is None
    x[3, 5] = 0
    assert judge(as_result(oracle.grouped_mm(x, w, [10, 6]).value), expected).problem is not None
    assert judge(as_result(oracle.grouped_mm(x, w, [9, 7]).value), expected).problem is not None


def test_tensorfloat32_is_seen(rng):
    x, w = oracle.normal(rng, (64, 256), "float32"), oracle.normal(rng, (1, 256, 64), "float32")
    cut = lambda a: (a.view(np.uint32) & ~np.uint32(0x1FFF)).view(np.float32)
    want = oracle.grouped_mm(x, w, [64]).want("float32", 256)
    assert judge([oracle.grouped_mm(cut(x), cut(w), [64]).value], [[want]]).problem is not None


def test_oracles_agree(rng):
    """Those of tests were written apart from these."""
    x, w = oracle.normal(rng, (20, 8), "float32"), oracle.normal(rng, (3, 8, 4), "float32")
    s = np.array([5, -1, 30])
    np.testing.assert_allclose(oracle.grouped_mm(x, w, s).value, other.grouped_mm(x, w, s))
    segments = np.array([[0, 3], [5, 2], [-4, 90]])
    np.testing.assert_allclose(
        oracle.segmented_mm(x.T, x, segments).value, other.segmented_mm(x.T, x, segments)
    )


@pytest.mark.parametrize("mode", ["nvfp4", "fp8"])
def test_operands_in_groups(rng, mode):
    """They are padded as quantizers pad, and stand for their rows."""
    rows, s = 70, np.array([20, 0, 33, -1, 7], np.int32)
    q = narrow.along_rows(rng, mode, 48, s, rows)
    quantizer = jgg.nvfp4_quantize if mode == "nvfp4" else jgg.fp8_quantize
    like = quantizer(np.ones((rows, 48), np.float32), axis=0, group_sizes=s)
    assert (q.weight.shape, q.scales.shape) == (like.weight.shape, like.scales.shape)
    np.testing.assert_array_equal(q.positions, like.positions)
    got = narrow._rows(q)
    np.testing.assert_allclose(got, other.f64(jgg.dequantize(q)), rtol=1e-6)
    assert not got[60:].any()


def test_variants(rng):
    found = dict(sizes.variants(rng, 100, 6, quick=False))
    assert found["uneven"].sum() == found["one group"].sum() == 100
    assert found["too many"].clip(0).sum() > 100
    assert 0 < found["tail"].sum() < 100
    assert not found["nothing"].any()
    assert found[sizes.NAN][1] == 0
    spoiled = sizes.with_nan(np.ones((100, 2), np.float32), found[sizes.NAN])
    assert np.isnan(spoiled[found[sizes.NAN].sum() :]).all()
    assert np.isnan(spoiled[0]).all()
    assert not np.isnan(spoiled[1]).any()


def test_sums_with_nothing():
    empty = Sums.of(np.zeros((0, 3)), np.zeros((3, 2))).want("float32", 3)
    assert judge([np.zeros((0, 2), np.float32)], [[empty]]).problem is None


def test_a_run_of_an_operand_that_nobody_may_change(rng):
    x = np.ones((4, 2), np.float32)
    sizes.with_nan(x, np.array([1, 1]))
    w = np.ones((2, 2, 2), np.float32)
    sizes.empty_nan(w, np.array([1, 0]))
    assert x.all()
    assert w.all()
    q = narrow.fp8_rows(rng, 4, 128)
    assert dataclasses.replace(q).weight is q.weight
