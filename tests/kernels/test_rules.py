"""Rules about static shapes, as the extension module has them: which kernel can take a call."""

import pytest

from jax_groupgemm._kernels import extension

pytestmark = pytest.mark.skipif(
    extension.BUILD.problem is not None, reason="the extension module cannot be imported"
)


@pytest.fixture(scope="module")
def rules():
    return extension._extension()


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ({"k": 40, "n": 24}, None),
        ({"k": 41, "n": 24}, "needs K % 8 == 0, got K=41"),
        ({"k": 40, "n": 25}, "needs N % 8 == 0, got N=25"),
        ({"k": 40, "n": 25, "transpose_w": True}, None),
        ({"k": 40, "n": 1}, None),  # contiguous along K, too
        ({"k": 40, "n": 24, "gated": True}, "needs N % 16 == 0, got N=24"),
        ({"k": 40, "n": 32, "gated": True}, None),
        ({"k": 40, "n": 24, "gated": True, "transpose_w": True}, None),
        ({"k": 40, "n": 24, "in_order": False}, "segments may overlap or come in any order"),
        ({"k": 40, "n": 24, "transpose_x": True}, "x is transposed"),
        ({"k": 40, "n": 24, "transpose_out": True}, "the result is transposed"),
        ({"k": 40, "n": 24, "planes": 3}, "needs K % 64 == 0, got K=40"),
        ({"k": 64, "n": 25, "planes": 3}, "needs N % 8 == 0, got N=25"),
        ({"k": 64, "n": 1, "planes": 3}, "needs N % 8 == 0, got N=1"),
        ({"k": 64, "n": 25, "planes": 3, "transpose_w": True}, None),
        ({"k": 64, "n": 24, "planes": 3, "by_list": True}, "rows by list of split operands"),
    ],
)
def test_mm(rules, call, reason):
    assert rules.mm_sm90_problem(**call) == reason


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ({}, None),
        ({"a": 12}, "needs A % 8 == 0, got A=12"),
        ({"b": 12}, "needs B % 8 == 0, got B=12"),
        ({"a": 12, "transpose_x": True}, None),
        ({"rows_x": 9, "transpose_x": True}, "needs T % 8 == 0, got T=9"),
        ({"rows_y": 9, "transpose_y": True}, "needs T % 8 == 0, got T=9"),
        ({"rows_x": 9, "rows_y": 9}, None),
        ({"own_weight": False}, "weights may have several segments"),
        ({"segments": True, "transpose_x": True}, None),
    ],
)
def test_wgrad(rules, call, reason):
    shape = {"rows_x": 16, "rows_y": 16, "a": 8, "b": 16}
    assert rules.wgrad_sm90_problem(**(shape | call)) == reason


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ({}, None),
        ({"k": 41}, "needs K % 8 == 0, got K=41"),
        ({"n": 28}, "needs N % 8 == 0, got N=28"),
        ({"in_order": False}, "segments may overlap or come in any order"),
        ({"transpose_x": True}, "x is transposed"),
        ({"transpose_out": True}, "the result is transposed"),
    ],
)
def test_mm_on_blackwell(rules, call, reason):
    assert rules.mm_sm100_problem(**({"k": 40, "n": 24} | call)) == reason


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ({}, None),
        ({"a": 12}, "needs A % 8 == 0, got A=12"),
        ({"b": 12}, "needs B % 8 == 0, got B=12"),
        ({"transpose_x": True}, "an operand is transposed"),
        ({"transpose_y": True}, "an operand is transposed"),
        ({"own_weight": False}, "weights may have several segments"),
    ],
)
def test_wgrad_on_blackwell(rules, call, reason):
    assert rules.wgrad_sm100_problem(**({"a": 8, "b": 16} | call)) == reason
    with pytest.raises(ValueError, match="longer than"):
        rules.sm100_workspace(weights=2**31, count=1)


def test_wgrad_of_segments_along_both_lines(rules):
    shape = {"rows_x": 16, "rows_y": 16, "a": 8, "b": 16}
    contiguous = {"transpose_x": True, "transpose_y": True}
    assert rules.wgrad_sm90_problem(**shape, **contiguous) is None
    reason = rules.wgrad_sm90_problem(**shape, **contiguous, segments=True)
    assert reason is not None
    assert reason.startswith("both operands are contiguous along k")


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_qmm(rules, bits):
    """Lines of codes are whole 16 bytes."""
    for k in (32, 64, 96, 128, 160, 192, 384):
        for transpose_w in (True, False):
            reason = rules.qmm_sm90_problem(line=k, bits=bits, transpose_w=transpose_w)
            assert (reason is None) == (k * bits % 128 == 0)
    problem = lambda **facts: rules.qmm_sm90_problem(line=128, bits=bits, **facts)
    along_n = problem(transpose_w=False, has_options=True)
    assert along_n == "w is quantized along N, which has no options"
    assert problem(has_options=True) is None
    neither = "x is not bfloat16, or float16 beside float16 scales"
    assert problem(bfloat16_x=False) == neither
    half = {"half": True, "bfloat16_x": False, "bfloat16_scales": False}
    assert problem(**half, has_options=True) is None
    assert problem(**half, transpose_w=False) is None
    assert problem(**half, transpose_w=False, has_options=True) == along_n
    scaled = {"scaled": True, "bfloat16_scales": False}
    assert problem(**scaled) is None
    assert problem(**scaled, has_options=True) == "scales multiply sums, which has no options"


def test_packed_weights_on_every_gpu(rules):
    def problem(mode="affine", **facts):
        call = {"bits": 4, "group_size": 64, "n": 192, "gated": False}
        return rules.qmm_packed_sm80_problem(mode=mode, **(call | facts))

    assert problem() is None
    assert problem("nvfp4", group_size=16) is None
    assert problem("mxfp4", group_size=32) is None
    for bits in (2, 3, 5, 6, 8):
        assert problem(bits=bits) == f"reads prepacked codes of 4 bits, got bits={bits}"
    assert problem("mxfp8", bits=8) == "reads prepacked codes of 4 bits, got bits=8"
    assert problem(group_size=16) == "has no groups of 16 codes in mode 'affine'"
    assert problem(gated=True).startswith("needs N / 2 % 64 == 0")
    assert problem(gated=True, n=256) is None
    with pytest.raises(ValueError, match="mode 'mxfp5' is not one of"):
        problem("mxfp5")


def test_nvfp4(rules):
    assert rules.nvfp4_mm_sm100_problem(k=64, n=8, out_bytes=2) is None
    assert rules.nvfp4_mm_sm100_problem(k=48, n=8, out_bytes=2) == "needs K % 32 == 0, got K=48"
    assert rules.nvfp4_mm_sm100_problem(k=64, n=12, out_bytes=2) == "needs N % 8 == 0, got N=12"
    assert rules.nvfp4_mm_sm100_problem(k=64, n=12, out_bytes=4) is None
    assert rules.nvfp4_wgrad_sm100_problem(k=6) == "needs K % 4 == 0, got K=6"
    assert rules.nvfp4_wgrad_sm100_problem(k=8) is None
    with pytest.raises(ValueError, match="longer than"):
        rules.nvfp4_wgrad_sm100_problem(k=2**31)


def workspace(groups: int, *scales: int) -> int:
    """Arrays of shapes, addresses, strides and layouts, two prefix sums, tensor maps for 160
    multiprocessors, and swizzled scales, each at a multiple of 256."""
    parts = [groups * size for size in (12, *[8] * 8, 20, 20)]
    parts += [4 * (groups + 1)] * 2 + [160 * 6 * 128, *scales]
    return 256 + sum(-(-part // 256) * 256 for part in parts)


@pytest.mark.parametrize("tokens", [1, 127, 128, 1000])
@pytest.mark.parametrize("groups", [1, 3, 200])
@pytest.mark.parametrize(("n", "k"), [(8, 32), (130, 96), (4096, 7168)])
def test_workspaces(rules, tokens, groups, n, k):
    up = lambda size, unit: -(-size // unit) * unit
    rows = (tokens + min(groups, tokens) * 127) // 128 * 128
    columns = up(k // 16, 4)
    want = workspace(groups, rows * columns, groups * up(n, 128) * columns)
    assert rules.nvfp4_mm_workspace(tokens=tokens, groups=groups, n=n, k=k) == want
    padded = up(tokens, 64)
    want = workspace(groups, up(n, 128) * padded // 16, up(k, 128) * padded // 16)
    assert rules.nvfp4_wgrad_workspace(padded_tokens=padded, groups=groups, n=n, k=k) == want


def test_packed_scales(rules):
    shape = lambda mode, group_size: rules.packed_scales(
        mode=mode, group_size=group_size, k_tiles=6
    )
    assert [shape("affine", size) for size in (16, 32, 64, 128)] == [
        (6, 256), (6, 128), (6, 64), (3, 64)
    ]  # fmt: skip
    assert [shape("mxfp4", 32), shape("mxfp8", 32), shape("nvfp4", 16)] == [
        (6, 32),
        (6, 64),
        (6, 64),
    ]
    assert shape("fp8", 128) == (3, 64)
    with pytest.raises(ValueError, match="mode 'fp3' is not one of"):
        shape("fp3", 32)
