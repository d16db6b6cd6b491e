"""The plan of a call: made once from static shapes, carried by the call, checked by the handler."""

import ctypes
import re

import host_program
import jax
import jax.numpy as jnp
import pytest

import jax_groupgemm as jgg
from jax_groupgemm._kernels import choose, extension, problems

needs_extension = pytest.mark.skipif(
    extension.BUILD.problem is not None, reason="the extension module cannot be imported"
)


@pytest.fixture(scope="module")
def program():
    program = host_program.build("plans")
    program.plans.restype = ctypes.c_int64
    for name in ("problem", "of_mm", "of_qmm", "of_blocks", "of_scaled"):
        getattr(program, name).restype = ctypes.c_char_p
    return program


@host_program.needs_compiler
def test_handlers_have_a_kernel_for_every_plan(program):
    assert program.plans() == 4 * 25 * 25 * (128 + 4 + 32 * 10 + 8 * 7 + 6 * 4)
    assert program.problem() == b""


H200, A100, A10 = (132, 227 << 10), (108, 163 << 10), (72, 99 << 10)
MEDIUM, SQUARE, WIDE = range(3)


@host_program.needs_compiler
@pytest.mark.parametrize(
    ("mm", "rows", "n", "k", "matrices", "segments", "tiles"),
    [
        (True, 8192, 8192, 8192, 1, 1, (WIDE, WIDE, WIDE)),
        (True, 32768, 1536, 2048, 1, 128, (WIDE, WIDE, WIDE)),
        # Few rows a segment; and few tiles. Where a multiprocessor has no room for two blocks of
        # the other tiles, Wide's is best.
        (True, 2560, 1536, 2048, 1, 128, (MEDIUM, MEDIUM, WIDE)),
        (True, 512, 512, 2048, 1, 1, (MEDIUM, MEDIUM, MEDIUM)),
        # More segments than a block of Wide reads at a time, many times over.
        (True, 400_000, 1536, 2048, 1, 2000, (SQUARE, SQUARE, SQUARE)),
        (True, 400_000, 1536, 2048, 1, 5000, (MEDIUM, MEDIUM, MEDIUM)),
        # Short sums of wgrad: one block stores while the other multiplies, where there are two.
        (False, 2048, 1536, 4, 128, 128, (SQUARE, SQUARE, WIDE)),
        (False, 2048, 1536, 256, 128, 128, (SQUARE, SQUARE, WIDE)),
        (False, 8192, 8192, 8192, 1, 1, (WIDE, WIDE, WIDE)),
        (False, 0, 64, 64, 1, 1, (MEDIUM, MEDIUM, MEDIUM)),
    ],
)
def test_tiles_of_the_generic_kernel(program, mm, rows, n, k, matrices, segments, tiles):
    numbers = [ctypes.c_int64(i) for i in (rows, n, k, matrices, segments)]
    assert tuple(program.tile_sm80(mm, *numbers, *gpu) for gpu in (H200, A100, A10)) == tiles


ORDER, LIST, OPERAND = range(3)


@host_program.needs_compiler
@pytest.mark.parametrize(
    ("plan", "why"),
    [
        ((ORDER, 288, 0, 0, 0, 1), None),
        ((ORDER, 48, 0, 0, 0, 1), "no kernel follows the plan: rows 'in order', tile 48"),
        ((ORDER, 0, 0, 0, 0, 1), "no kernel follows the plan: rows 'in order', tile 0"),
        ((ORDER, 64, 0, 1, 0, 1), "no kernel follows the plan: rows 'in order', tile 64"),
        ((ORDER, 256, 0, 1, 0, 1), "no kernel follows the plan: rows 'in order', tile 256"),
        ((ORDER, 128, 1, 0, 0, 3), None),
        ((ORDER, 64, 1, 0, 0, 3), "no kernel follows the plan: rows 'in order', tile 64, in pairs"),
        ((LIST, 256, 0, 0, 1, 1), None),
        ((LIST, 256, 0, 1, 1, 1), "no kernel follows the plan: rows 'by list', tile 256"),
        ((OPERAND, 128, 0, 0, 1, 1), None),
        (
            (OPERAND, 256, 0, 0, 1, 1),
            "no kernel follows the plan: rows 'operand by list', tile 256",
        ),
        ((OPERAND, 128, 0, 1, 1, 1), "a gated activation of sums that are not rounded"),
        ((LIST, 128, 0, 0, 0, 1), "the plan and the operands differ in lists"),
        ((ORDER, 128, 0, 0, 1, 1), "the plan and the operands differ in lists"),
    ],
)
def test_a_plan_that_no_kernel_follows(program, plan, why):
    assert program.of_mm(*plan).decode() == (why or "")


TILES, WARPS, DIRECT = range(3)


@host_program.needs_compiler
@pytest.mark.parametrize(
    ("plan", "why"),
    [
        ((TILES, 32, 1, 0, 0, 1, 0, 1), None),
        ((WARPS, 32, 2, 0, 0, 1, 0, 1), None),
        (
            (WARPS, 32, 2, 0, 1, 1, 0, 1),
            "no kernel follows the plan: way 'warps', tile 32, parts 2",
        ),
        (
            (WARPS, 64, 1, 0, 0, 1, 0, 1),
            "no kernel follows the plan: way 'warps', tile 64, parts 1",
        ),
        (
            (TILES, 128, 2, 0, 0, 1, 0, 1),
            "no kernel follows the plan: way 'tiles', tile 128, parts 2",
        ),
        ((TILES, 96, 1, 0, 1, 0, 0, 1), None),
        (
            (TILES, 96, 1, 0, 0, 0, 0, 1),
            "no kernel follows the plan: way 'tiles', tile 96, parts 1",
        ),
        ((DIRECT, 16, 1, 1, 0, 1, 0, 1), None),
        (
            (DIRECT, 16, 1, 0, 0, 1, 0, 4),
            "no kernel follows the plan: way 'direct', tile 16, parts 1",
        ),
        ((DIRECT, 8, 1, 0, 0, 1, 0, 4), None),
        ((DIRECT, 8, 1, 0, 0, 0, 0, 1), "a plan without tiles needs layout 'sm90'"),
        ((WARPS, 16, 1, 0, 0, 1, 1, 1), None),
        ((TILES, 192, 1, 0, 0, 1, 1, 1), None),
        (
            (TILES, 64, 1, 0, 0, 1, 1, 1),
            "no kernel follows the plan: way 'tiles', tile 64, parts 1",
        ),
        (
            (WARPS, 16, 2, 0, 0, 1, 1, 1),
            "no kernel follows the plan: way 'warps', tile 16, parts 2",
        ),
        (
            (DIRECT, 8, 1, 0, 0, 1, 1, 1),
            "no kernel follows the plan: way 'direct', tile 8, parts 1",
        ),
        (
            (WARPS, 16, 1, 0, 1, 1, 1, 1),
            "a gated activation of a weight that is quantized along N",
        ),
        ((WARPS, 16, 1, 0, 0, 0, 1, 1), None),
        (
            (DIRECT, 8, 1, 0, 0, 0, 1, 1),
            "no kernel follows the plan: way 'direct', tile 8, parts 1",
        ),
    ],
)
def test_a_plan_of_quantized_weights_that_no_kernel_follows(program, plan, why):
    *numbers, segments = plan
    assert program.of_qmm(*numbers, ctypes.c_int64(segments)).decode() == (why or "")


@host_program.needs_compiler
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("tile", [64, 96, 128, 192])
def test_plans_of_blocks_as_stored(program, tile, half):
    """Scales multiply sums, which need registers: tiles are smaller."""
    why = f"no kernel follows the plan: way 'tiles', tile {tile}, parts 1"
    found = program.of_blocks(tile, False, False, half).decode()
    assert found == ("" if tile in (64, 128) else why)
    gated = program.of_blocks(tile, True, False, half).decode()
    assert gated == ("" if tile == 64 else why)
    along_n = program.of_blocks(tile, False, True, half).decode()
    assert along_n == ("" if tile == 192 else why)


AFFINE, FP8, MXFP8 = (host_program.mode_number(mode) for mode in ("affine", "fp8", "mxfp8"))


@host_program.needs_compiler
@pytest.mark.parametrize("mode", [AFFINE, FP8])
@pytest.mark.parametrize(
    ("tile", "planes", "transposed", "half", "has"),
    [
        (32, 1, 0, 0, True), (64, 1, 0, 0, True), (64, 3, 0, 0, True), (64, 2, 0, 0, False),
        (2, 1, 0, 0, False), (8, 1, 0, 0, False), (8, 1, 1, 0, True), (8, 3, 1, 0, False),
        (16, 1, 1, 0, False), (128, 3, 1, 0, True), (128, 1, 1, 0, False), (64, 3, 1, 0, False),
        (128, 3, 1, 1, False), (128, 3, 0, 0, False),
    ],
)  # fmt: skip
def test_plans_of_weights_that_are_not_rounded(program, mode, tile, planes, transposed, half, has):
    why = f"no kernel follows the plan: way 'scaled', tile {tile}, parts 1"
    found = program.of_scaled(mode, tile, planes, bool(transposed), bool(half), True).decode()
    assert found == ("" if has else why)
    refused = program.of_scaled(MXFP8, tile, planes, bool(transposed), bool(half), True).decode()
    assert refused == "scales are no floats"
    # Lines have kernels for few rows: of 16 bits, of float32, and where they lie along N.
    lines = mode == AFFINE and (tile, planes, transposed, half) in ((8, 1, 0, 0), (2, 1, 0, 0))
    lines |= (tile, planes, transposed, half) == (8, 1, 1, 0)
    found = program.of_scaled(mode, tile, planes, bool(transposed), bool(half), False).decode()
    assert found == ("" if lines else why)


def array(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


def plans(function, *args) -> list[dict[str, str]]:
    """Of the custom calls that a function is lowered to, by name."""
    fresh = lambda *args: function(*args)
    text = jax.jit(fresh).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    found = re.findall(r"\bplan = \{([^}]*)\}", text)
    return [dict(re.findall(r'(\w+) = "?([^",]*?)"?(?: : i32)?(?:,|$)', plan)) for plan in found]


@needs_extension
@pytest.mark.parametrize(
    ("rows", "tile"), [(8 * 16, 32), (8 * 40, 64), (8 * 96, 128), (8 * 150, 256), (8 * 260, 288)]
)
def test_a_call_carries_its_plan(hopper, rows, tile):
    args = array(rows, 512), array(8, 512, 1024)
    (plan,) = plans(lambda x, w: jgg.grouped_mm(x, w, jnp.full(8, rows // 8)), *args)
    assert (plan["rows"], plan["tile"], plan["kernel"]) == ("in order", str(tile), "")


@needs_extension
@pytest.mark.parametrize(("m", "tile"), [(8, 64), (16, 64), (24, 64)])
def test_one_row_is_not_transposed(hopper, m, tile):
    """It lies as one column does, and the handler cannot tell them apart."""
    args = array(m, 1), array(1, 64)
    (plan,) = plans(lambda a, b: jgg.segmented_mm(a, b, jnp.array([[0, 1]])), *args)
    assert (plan["tile"], plan["kernel"]) == (str(tile), "")


@needs_extension
def test_it_is_made_once(hopper, monkeypatch):
    """However many rules a lowering asks, the extension module plans a product once."""
    calls, rules = [], extension.rules()

    class Counted:
        def __getattr__(self, name):
            if name.startswith("plan_"):
                calls.append(name)
            return getattr(rules, name)

    monkeypatch.setattr(extension, "rules", Counted)
    args = array(4096, 512), array(8, 512, 1024)
    assert len(plans(lambda x, w: jgg.grouped_mm(x, w, jnp.full(8, 512)), *args)) == 1
    assert calls == ["plan_mm_sm90"]
    calls.clear()
    index, weight = jnp.zeros((4096, 2), int), array(4096, 2)
    layer = lambda x, up, down, weight: jgg.moe_mlp(x, up, down, index, weight)
    args = array(4096, 512), array(8, 512, 1024), array(8, 512, 512), weight
    assert len(plans(layer, *args)) == 2
    assert calls == ["plan_mm_sm90"] * 2


@needs_extension
@pytest.mark.parametrize(
    ("lists", "rows"),
    [
        ({}, "in order"),
        ({"lists": True}, "operand by list"),
        ({"lists": True, "y_list": True}, "by list"),
        ({"lists": True, "bias": True}, "by list"),
        ({"lists": True, "segments": 64}, "by list"),
    ],
)
def test_how_rows_are_found(hopper, lists, rows):
    """Many rows of x come by list on a kernel of their own, if nothing else does."""
    problem = problems.Mm(
        op="mm", platform="cuda", dtypes=("bfloat16",) * 2, out_dtype="bfloat16",
        operand_dtype="bfloat16", k=512, n=512, rows=4096, groups=64,
        **({"segments": 8} | lists),
    )  # fmt: skip
    plan = choose.fused(problem)
    assert plan is not None
    assert plan.config["rows"] == rows


@needs_extension
def test_a_call_by_list_carries_its_plan(hopper):
    index = jnp.arange(64) % 7
    args = array(9, 1, 512), array(128, 512, 512)
    (plan,) = plans(lambda a, b: jgg.gather_mm(a, b, index, index), *args)
    assert (plan["rows"], plan["tile"]) == ("by list", "32")


@needs_extension
def test_quantized_weights_carry_theirs(hopper):
    w = jax.eval_shape(lambda w: jgg.quantize(w, mode="nvfp4"), array(8, 1024, 512))
    for rows, way, tile in ((8, "warps", "32"), (8 * 100, "tiles", "128")):
        sizes = jnp.full(8, rows // 8)
        (plan,) = plans(lambda x, w, s=sizes: jgg.grouped_qmm(x, w, s), array(rows, 512), w)
        assert (plan["way"], plan["tile"]) == (way, tile)


@needs_extension
@pytest.mark.parametrize("packed", [False, True])
def test_float32_cotangents_carry_theirs(hopper, packed):
    """... where scales are floats: few rows come as they are, others in three planes."""
    w = jax.eval_shape(lambda w: jgg.quantize(w, mode="affine"), array(8, 1024, 512))
    w = jax.eval_shape(jgg.prepack, w) if packed else w
    for rows, tile, planes in ((8, "8", "1"), (8 * 8, "8", "1"), (8 * 9, "128", "3")):
        sizes = jnp.full(8, rows // 8)
        f = lambda x, w, s=sizes: jgg.grouped_qmm(x, w, s, transpose_w=False)
        (plan,) = plans(f, array(rows, 1024, dtype="float32"), w)
        assert (plan["way"], plan["tile"], plan["planes"]) == ("scaled", tile, planes)


@needs_extension
@pytest.mark.parametrize(("dtype", "tile"), [("float32", "2"), ("bfloat16", "8")])
def test_rows_beside_float32_scales_carry_theirs(hopper, dtype, tile):
    """Weights as they are stored take float32 rows as they are, too."""
    w = jax.eval_shape(lambda w: jgg.quantize(w), array(8, 1024, 512, dtype="float32"))
    f = lambda x, w: jgg.grouped_qmm(x, w, jnp.full(8, 8))
    (plan,) = plans(f, array(64, 512, dtype=dtype), w)
    assert (plan["way"], plan["tile"], plan["planes"]) == ("scaled", tile, "1")


@needs_extension
@pytest.mark.parametrize(("rows", "tile"), [(8, "32"), (30, "64"), (100, "128"), (500, "128")])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_beside_blocks_carry_theirs(hopper, dtype, rows, tile):
    make = lambda w: jgg.quantize(w, mode="fp8", block=(128, 128), contract=-1)
    w, x = jax.eval_shape(make, array(8, 1024, 512)), array(8 * rows, 512, dtype=dtype)
    (plan,) = plans(lambda x, w: jgg.grouped_qmm(x, w, jnp.full(8, rows)), x, w)
    assert plan["tile"] == tile
    f = lambda x, w: jgg.grouped_qmm(x, w, jnp.full(8, rows), activation="swiglu")
    (plan,) = plans(f, x, w)
    assert plan["tile"] == ("32" if rows == 8 else "64")
