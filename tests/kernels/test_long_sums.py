"""Sums over many k, or rows, on a GPU, of positive numbers: an error of one sign is not lost in a
random one.

docs/semantics.md states the bounds that are tested here.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jax_groupgemm as jgg
from jax_groupgemm._core import segments
from jax_groupgemm._core.products import Wgrad
from jax_groupgemm._core.segments import SPANS, Form, Metadata
from jax_groupgemm._grouped import call, primitives
from jax_groupgemm._kernels import choose, dense, extension, lists

SIZES = np.array([5, 11], np.int32)
#: Relative errors: what tensor cores cut off in 2**14 k, and what FMA rounds in 2**16.
TENSOR_CORES, FMA = 1.2e-4, 1.2e-5
#: For each term: of 16 in an instruction, or 8 of TensorFloat-32, whose operands are rounded, too.
TERM, TERM_TF32, ROUNDED = 7.5e-9, 1.5e-8, 2.0**-10
HALF = {"bfloat16": 2**-8, "float16": 2**-11}


def problem(rng, k, dtype, n=16):
    x = jnp.asarray(np.abs(rng.standard_normal((16, k))), dtype)
    return x, jnp.asarray(rng.random((2, k, n)), dtype)


def calls(f, *args) -> int:
    return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text().count("@jgg_")


@pytest.mark.parametrize(
    ("k", "dtype", "out", "count"),
    [
        (2**14, "bfloat16", "float32", 1), (2**14 + 512, "bfloat16", "float32", 2),
        (2**17, "bfloat16", "bfloat16", 1), (2**15, "float16", "float16", 1),
        (2**16, "float32", "float32", 1), (2**18, "float32", "float32", 4),
    ],
)  # fmt: skip
def test_parts(k, dtype, out, count):
    """Products of models' K are one call. Longer ones are as many as their dtype needs."""
    x, w = jax.ShapeDtypeStruct((16, k), dtype), jax.ShapeDtypeStruct((2, k, 16), dtype)
    f = lambda x, w: jgg.grouped_mm(x, w, SIZES, preferred_element_type=out, implementation="sm80")
    assert calls(f, x, w) == count


def relative(got, want) -> float:
    return float(np.max(np.abs(oracle.f64(got) - want) / want))


@pytest.mark.gpu
@pytest.mark.parametrize("k", [7168, 2**14, 2**17, 2**20])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kernel", ["sm80", "sm90"])
def test_mm(rng, kernel, dtype, k):
    if kernel == "sm90" and 90 not in extension.live_capabilities():
        pytest.skip("needs a Hopper GPU")
    x, w = problem(rng, k, dtype)
    want = oracle.grouped_mm(x, w, SIZES)
    bound = TENSOR_CORES if dtype != "float32" else FMA
    got = jgg.grouped_mm(x, w, SIZES, preferred_element_type="float32", implementation=kernel)
    assert relative(got, want) <= bound
    if dtype == "bfloat16":
        got = jgg.grouped_mm(x, w, SIZES, implementation=kernel)
        assert relative(got, want) <= HALF[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("k", [7168, 2**14, 3 * 2**14])
@pytest.mark.parametrize("mode", ["nvfp4", "affine"])
def test_quantized(rng, mode, k):
    x, w = problem(rng, k, "bfloat16", 64)
    q = jgg.quantize(w.swapaxes(1, 2), mode=mode)
    want = oracle.grouped_mm(x, jgg.dequantize(q, dtype="bfloat16").swapaxes(1, 2), SIZES)
    for weight in (q, jgg.prepack(q)):
        got = jgg.grouped_qmm(x, weight, SIZES, preferred_element_type="float32")
        assert relative(got, want) <= TENSOR_CORES


@pytest.mark.gpu
@pytest.mark.parametrize("k", [7168, 2**14, 2**17])
def test_mm_of_tensorfloat32(rng, k):
    x, w = problem(rng, k, "float32")
    got = jgg.grouped_mm(x, w, SIZES, precision="tensorfloat32", implementation="sm80")
    assert relative(got, oracle.grouped_mm(x, w, SIZES)) <= 2 * TENSOR_CORES + ROUNDED


# ---- over rows ---------------------------------------------------------------------------------


def wgrad(x, dy, kernel, **options):
    whole = jnp.array([[0, x.shape[0]]])
    return jgg.segmented_mm(
        x, dy, whole, transpose_a=True, preferred_element_type="float32", implementation=kernel,
        **options,
    )[0]  # fmt: skip


@pytest.mark.parametrize(("columns", "parts"), [(16, True), (768, False)])
def test_rows_in_parts(columns, parts):
    """Of few small results, so that all processors have some; the others are one sum."""
    x = jax.ShapeDtypeStruct((2**17, columns), "bfloat16")
    text = jax.jit(lambda x, dy: wgrad(x, dy, "sm80")).trace(x, x).lower(
        lowering_platforms=("cuda",)
    ).as_text()  # fmt: skip
    (call,) = [line for line in text.splitlines() if "@jgg_wgrad" in line]
    assert (f"-> tensor<1x{columns}x{columns}xf32>" not in call) == parts


def positive_rows(rng, rows, columns, dtype):
    """Sixteen different columns, again and again: so is the result."""
    x, dy = np.abs(rng.standard_normal((rows, 16))), rng.random((rows, 16))
    x, dy = (jnp.asarray(a, dtype) for a in (x, dy))
    want = oracle.f64(x).T @ oracle.f64(dy)
    times = columns // 16
    return jnp.tile(x, (1, times)), jnp.tile(dy, (1, times)), np.tile(want, (times, times))


def bound(kernel, dtype, tf32, rows) -> float:
    if tf32:
        return TERM_TF32 * rows + ROUNDED
    if dtype != "float32":
        return TERM * rows
    return FMA if kernel == "sm90" else max(FMA, 3e-10 * rows)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [16, 768])
@pytest.mark.parametrize("rows", [2**11, 2**14, 2**17])
@pytest.mark.parametrize(
    ("dtype", "tf32"),
    [("bfloat16", False), ("float16", False), ("float32", False), ("float32", True)],
)
@pytest.mark.parametrize("kernel", ["sm80", "sm90"])
def test_wgrad(rng, kernel, dtype, tf32, rows, columns):
    if kernel == "sm90" and (tf32 or 90 not in extension.live_capabilities()):
        pytest.skip("needs a Hopper GPU, whose kernel has planes instead of TensorFloat-32")
    x, dy, want = positive_rows(rng, rows, columns, dtype)
    got = wgrad(x, dy, kernel, precision="tensorfloat32" if tf32 else "highest")
    assert relative(got, want) <= bound(kernel, dtype, tf32, rows)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kernel", ["sm80", "sm90"])
def test_longest_wgrad(rng, kernel, dtype):
    """The gradient of a group of 2**20 rows."""
    if kernel == "sm90" and 90 not in extension.live_capabilities():
        pytest.skip("needs a Hopper GPU")
    x, dy, want = positive_rows(rng, 2**20, 16, dtype)
    w, sizes = jnp.zeros((1, 16, 16), dtype), jnp.array([2**20])
    f = lambda w: jgg.grouped_mm(
        x, w, sizes, preferred_element_type="float32", implementation=kernel
    )
    dw = jax.vjp(f, w)[1](dy.astype("float32"))[0]
    rounded = HALF.get(dtype, 0)
    assert relative(dw[0], want) <= bound(kernel, dtype, False, 2**20) + rounded


# ---- over ranges of rows -----------------------------------------------------------------------


def gradient(x, dy, sizes, *, kernel="sm90", offset=None, out="float32", groups=None):
    """That of a grouped product's weights, in the dtype asked for."""
    product = Wgrad(groups=groups or len(sizes), out_dtype=out, implementation=kernel)
    return primitives.wgrad(x, dy, segments.sizes(sizes, offset), product)


def lowered(f, *shapes) -> str:
    args = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def wgrad_calls(text: str) -> list[str]:
    return [line for line in text.splitlines() if "@jgg_wgrad" in line]


@pytest.mark.parametrize(("rows", "count"), [(2**20, 1), (2**20 + 8, 2), (3 * 2**20 + 8, 4)])
@pytest.mark.parametrize("kernel", ["sm80", "sm90"])
@pytest.mark.parametrize("out", ["float32", "bfloat16"])
def test_ranges(out, kernel, rows, count):
    """Each is a call of the whole operands. Hopper's kernel adds to the sum so far, in place."""
    f = lambda x, dy: jgg.segmented_mm(
        x, dy, jnp.array([[0, 5], [5, rows]]), transpose_a=True, preferred_element_type=out,
        implementation=kernel,
    )  # fmt: skip
    text = lowered(f, *[((rows, 1024), "bfloat16")] * 2)
    calls = wgrad_calls(text)
    assert len(calls) == count
    assert all(line.count(f"tensor<{rows}x1024xbf16>") == 2 for line in calls)
    operands = [re.search(r"custom_call @jgg_wgrad\((%arg0, %arg1)", line) for line in calls]
    assert all(operands), "the operands are the arguments, no copy of them"
    aliased = ["output_operand_alias<" in line for line in calls]
    assert aliased == [kernel == "sm90" and i > 0 for i in range(count)]
    added = len(re.findall(r"stablehlo.add %\d+, %\d+ : tensor<2x1024x1024xf32>", text))
    assert added == (count - 1 if kernel == "sm80" else 0)
    wide = out == "float32" or count > 1
    assert all(f"-> tensor<2x1024x1024x{'f32' if wide else 'bf16'}>" in line for line in calls)


@pytest.mark.parametrize("offset", [None, 1])
def test_ranges_of_planes(offset):
    """float32 operands are split once."""
    rows = 2**21
    groups = 2 if offset is None else 4
    f = lambda x, dy, sizes: gradient(x, dy, sizes, offset=offset, groups=2)
    text = lowered(f, *[((rows, 1024), "float32")] * 2, ((groups,), "int32"))
    calls = wgrad_calls(text)
    assert text.count("@jgg_planes") == 1
    assert [f"tensor<{rows}x3x1024xbf16>" in line for line in calls] == [True, True]
    assert ["output_operand_alias<" in line for line in calls] == [False, True]


def test_ranges_of_few_small_results_are_one_call():
    """They are in parts anyway, and each range has its own."""
    rows = 2**21
    text = lowered(lambda x, dy: wgrad(x, dy, "sm90"), *[((rows, 128), "bfloat16")] * 2)
    (one,) = wgrad_calls(text)
    assert f"-> tensor<{2 * 132}x128x128xf32>" in one


def test_ranges_of_batches():
    """The rows of a batch are those of one operand, and count together."""
    f = jax.vmap(lambda x, dy, sizes: gradient(x, dy, sizes, kernel="sm80", out="bfloat16"))
    rows = lambda t: [((4, t, 512), "bfloat16")] * 2 + [((4, 9), "int32")]
    assert len(wgrad_calls(lowered(f, *rows(2**18)))) == 1
    assert len(wgrad_calls(lowered(f, *rows(2**19)))) == 2


def test_ranges_of_a_quantized_operand():
    """NVFP4 on Hopper is the same kernel; a bfloat16 result is made of float32 sums, too."""
    rows, sizes = 2**20 + 64, jnp.zeros((40,), "int32")
    f = lambda a, b: jgg.nvfp4_grouped_wgrad(
        *(jgg.nvfp4_quantize(v, axis=0, group_sizes=sizes) for v in (a, b)), sizes,
        implementation="sm90",
    )  # fmt: skip
    text = lowered(f, *[((rows, 128), "float32")] * 2)
    calls = wgrad_calls(text)
    assert ["output_operand_alias<" in line for line in calls] == [False, True]
    assert all("scale = true" in line for line in calls)


def in_numpy(x, y, table, groups) -> np.ndarray:
    x, y = oracle.f64(x), oracle.f64(y)
    out = np.zeros((groups, x.shape[1], y.shape[1]))
    for i, j, length, weight in np.asarray(table):
        out[weight] += x[i : i + length].T @ y[j : j + length]
    return out


class Call:
    """In the place of one custom call: what the handler promises."""

    def __init__(self, monkeypatch):
        self.tables = []
        monkeypatch.setattr(call, "_wgrad_call", self)

    def __call__(self, plan, x, y, metadata, product, *, shape, rows, scale=None,
                 existing_out=None, **lists):  # fmt: skip
        assert product.out_shape(x, y) == shape
        assert all(value is None for value in lists.values())
        assert plan.kernel.name == "sm90" or (scale is None and existing_out is None)
        table = metadata.decode(*product.rows(x, y), shape[0])
        self.tables.append(np.asarray(table))
        out = jnp.asarray(in_numpy(x, y, table, shape[0]), product.out_dtype)
        live = np.zeros(shape[0], bool)
        live[self.tables[-1][self.tables[-1][:, segments.LENGTH] > 0, segments.WEIGHT]] = True
        live = jnp.asarray(live)[:, None, None]
        if scale is not None:
            out = out * scale[:, None, None]
        if existing_out is not None:
            assert out.dtype == existing_out.dtype
            out = jnp.where(live, out + existing_out, existing_out)
        return out


def batch_of_shared_rows() -> Metadata:
    """Two problems whose rows of x are the same; those of y come one after the other."""
    x_start = np.array([0, 300, 300, 0, 100, 700], np.int32)
    y_start = np.array([0, 300, 300, 1000, 1100, 1700], np.int32)
    length = np.array([300, 0, 700, 100, 600, 299], np.int32)
    weights = np.arange(6, dtype=np.int32)
    form = Form("segments", ordered_y=True, own_weight=True, aligned=False)
    return Metadata(form, jnp.asarray(np.stack([x_start, y_start, length, weights], 1)))


def several_of_a_weight() -> Metadata:
    """As (y_start, x_start): rows in no order, and five segments of three weights."""
    columns = [500, 0, 1500, 900, 20], [0, 500, 400, 1100, 1900], [400, 500, 90, 600, 77]
    table = np.stack([*columns, [2, 0, 2, 0, 2]], 1)
    form = Form("segments", aligned=False, swapped=True)
    return Metadata(form, jnp.asarray(table, "int32"))


OVERLAPPING = [[900, 999], [0, 1000], [7, 7], [5, 2**30]]
FORMS = {
    "sizes": (1000, 1000, 5, segments.sizes(jnp.array([3, 0, 250, 500, 2**30]))),
    "offset": (1000, 1000, 4, segments.sizes(jnp.array([100, 300, 0, 590]), jnp.array(1))),
    "spans": (1000, 1000, 4, Metadata(SPANS, jnp.array(OVERLAPPING))),
    "shared": (1000, 2000, 6, batch_of_shared_rows()),
    "several": (2000, 2000, 3, several_of_a_weight()),
}


@pytest.mark.parametrize(
    ("form", "kernel", "out"),
    [*((form, "sm80", "float32") for form in FORMS), ("sizes", "sm90", "bfloat16"),
     ("offset", "sm90", "float32"), ("shared", "sm90", "float32")],
)  # fmt: skip
def test_values_of_ranges(rng, monkeypatch, form, kernel, out):
    """All rows of every segment are in one range or another, whatever the metadata is."""
    monkeypatch.setattr(dense, "_LONGEST_SEGMENT", 192)
    rows_x, rows_y, groups, metadata = FORMS[form]
    x = oracle.random(rng, (rows_x, 24), "bfloat16")
    y = oracle.random(rng, (rows_y, 16), "bfloat16")
    product = Wgrad(groups=groups, out_dtype=out, implementation=kernel)
    problem = call.wgrad_problem("cuda", x, y, metadata, product)
    calls = Call(monkeypatch)
    got = call.wgrad(choose.choose(problem), x, y, metadata, product)
    table = np.asarray(metadata.decode(rows_x, rows_y, groups))
    assert got.dtype == out
    oracle.assert_close(got, in_numpy(x, y, table, groups))
    empty = np.setdiff1d(np.arange(groups), table[table[:, segments.LENGTH] > 0, segments.WEIGHT])
    assert not np.asarray(got, "float32")[empty].any()
    assert len(calls.tables) == dense.wgrad_ranges(problem) > 1
    for part in calls.tables:
        terms = np.bincount(part[:, segments.WEIGHT], part[:, segments.LENGTH])
        assert terms.max() <= 192


def test_values_of_ranges_in_parts(rng, monkeypatch):
    monkeypatch.setattr(dense, "_LONGEST_SEGMENT", 2**11)
    x, y = oracle.random(rng, (5000, 24), "bfloat16"), oracle.random(rng, (5000, 16), "bfloat16")
    product = Wgrad(groups=2, out_dtype="bfloat16", implementation="sm90")
    metadata = segments.sizes(jnp.array([4000, 900]))
    plan = choose.choose(call.wgrad_problem("cuda", x, y, metadata, product))
    calls = Call(monkeypatch)
    got = call.wgrad(plan, x, y, metadata, product)
    oracle.assert_close(got, in_numpy(x, y, metadata.decode(5000, 5000, 2), 2))
    (table,) = calls.tables
    assert len(table) == 2 * plan.config["ranges"] * plan.config["parts"] == 2 * 3 * 4
    assert table[:, segments.LENGTH].max() <= 2**11 // 4


def test_options_of_ranges(rng, monkeypatch):
    """A scale is of each range, and what the result is added to of the first. Neither meets a
    matrix that has no rows there."""
    monkeypatch.setattr(dense, "_LONGEST_SEGMENT", 192)
    x, y = oracle.random(rng, (1000, 24), "bfloat16"), oracle.random(rng, (1000, 16), "bfloat16")
    product = Wgrad(groups=4, out_dtype="float32", implementation="sm90")
    metadata = segments.sizes(jnp.array([10, 0, 700, 20]))
    plan = choose.choose(call.wgrad_problem("cuda", x, y, metadata, product))
    scale, old = jnp.array([2.0, 3.0, 0.5, jnp.inf]), oracle.random(rng, (4, 24, 16))
    calls = Call(monkeypatch)
    got = call.wgrad(plan, x, y, metadata, product, scale=scale, existing_out=old)
    sums = in_numpy(x, y, metadata.decode(1000, 1000, 4), 4)[:3]
    oracle.assert_close(got[:3], sums * np.asarray(scale)[:3, None, None] + old[:3])
    np.testing.assert_array_equal(got[1], old[1])
    assert np.isinf(np.asarray(got[3])).all()
    assert len(calls.tables) == 6


def test_lists_of_many_rows_are_copied(monkeypatch):
    """The kernel that takes rows by list has a result of their dtype, and adds nothing."""
    monkeypatch.setattr(lists, "MOST_COLUMNS_BACK", 1024)
    rows = jax.ShapeDtypeStruct((2**20 + 8, 1024), "bfloat16")
    product = Wgrad(groups=4, out_dtype="bfloat16")
    metadata = segments.sizes(jnp.zeros((4,), "int32"))
    problem = lambda y: call.wgrad_problem("cuda", rows, y, metadata, product, x_list=True)
    fewer = jax.ShapeDtypeStruct((2**20, 1024), "bfloat16")
    product = product.replace(implementation="sm90")
    assert choose.by_list(problem(fewer)) is not None
    assert choose.by_list(problem(rows)) is None


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["sizes", "offset", "spans", "batch"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("kernel", ["sm80", "sm90"])
def test_wgrad_of_ranges(rng, monkeypatch, kernel, dtype, form):
    """A sum of 2**14 positive products errs by twice the bound if one call makes it."""
    if kernel == "sm90" and 90 not in extension.live_capabilities():
        pytest.skip("needs a Hopper GPU")
    monkeypatch.setattr(dense, "_LONGEST_SEGMENT", 2**12)
    rows, columns = 2**14, 768
    x, dy, _ = positive_rows(rng, rows, columns, dtype)
    spans = np.array([[0, 37], [37, 37], [37, rows - 5]])
    sizes = jnp.asarray(spans[:, 1] - spans[:, 0])
    if form == "spans":
        spans = np.array([[5, rows], [9, 9], [700, 7000]])
        got = jgg.segmented_mm(
            x, dy, jnp.asarray(spans), transpose_a=True, preferred_element_type="float32",
            implementation=kernel, precision="highest",
        )  # fmt: skip
    elif form == "batch":
        batched = lambda v: v.reshape(2, rows // 2, columns)
        spans = np.array([[0, 37], [37, 37], [37, 8000]])
        f = lambda x, dy: gradient(x, dy, jnp.asarray(spans[:, 1] - spans[:, 0]), kernel=kernel)
        got = jax.vmap(f)(batched(x), batched(dy)).reshape(6, columns, columns)
        spans = np.concatenate([spans, spans + rows // 2])
    else:
        offset = 0 if form == "offset" else None
        got = gradient(x, dy, sizes, kernel=kernel, offset=offset)
    for one, (begin, end) in zip(np.asarray(got), spans, strict=True):
        want = oracle.f64(x[begin:end, :16]).T @ oracle.f64(dy[begin:end, :16])
        if begin == end:
            assert not one.any()
        else:
            again = np.tile(want, (columns // 16, columns // 16))
            assert relative(one, again) <= bound(kernel, dtype, False, 2**12) + 2e-7


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["sm80", "sm90"])
def test_more_than_the_longest_sum(rng, kernel):
    if kernel == "sm90" and 90 not in extension.live_capabilities():
        pytest.skip("needs a Hopper GPU")
    rows = 2**21 + 8
    x, dy, want = positive_rows(rng, rows, 768, "bfloat16")
    assert relative(wgrad(x, dy, kernel), want) <= TERM * 2**20


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [2**11, 2**15])
@pytest.mark.parametrize("kernel", ["sm80", "sm90"])
def test_nvfp4_wgrad(rng, kernel, rows):
    if kernel == "sm90" and 90 not in extension.live_capabilities():
        pytest.skip("needs a Hopper GPU")
    sizes = jnp.array([rows])
    of = [jnp.asarray(np.abs(rng.standard_normal((rows, 64))), "float32") for _ in range(2)]
    x, dy = (jgg.nvfp4_quantize(a, axis=0, group_sizes=sizes) for a in of)
    want = oracle.f64(jgg.dequantize(dy)).T @ oracle.f64(jgg.dequantize(x))
    got = jgg.nvfp4_grouped_wgrad(x, dy, sizes, implementation=kernel)
    # The factor of the sums, and each value that dequantize rounds, to float32.
    assert relative(got[0], want) <= TERM * rows + 1e-6
