"""What a kernel needs, as tables say it, is what it asks for: a call breaks each clause."""

import dataclasses
import re

import pytest

from jax_groupgemm._kernels import choose, extension, problems, samples

pytestmark = [
    pytest.mark.usefixtures("hopper"),
    pytest.mark.skipif(
        extension.BUILD.problem is not None, reason="the extension module cannot be imported"
    ),
]
BF16, F32 = "bfloat16", "float32"


def sample(op: str, dtype: str = BF16) -> problems.Problem:
    return samples.SAMPLES[op].make("cuda", dtype)


MM, WGRAD, QMM = sample("grouped_mm"), sample("segmented_mm"), sample("grouped_qmm")
PACKED = dataclasses.replace(QMM, layout="sm90")
NVFP4 = sample("nvfp4_grouped_mm", F32)
NVFP4_LINEAR = dataclasses.replace(
    NVFP4, inner=dataclasses.replace(NVFP4.inner, mode="nvfp4", dtypes=(BF16,), k=2048)
)
NVFP4_WGRAD = sample("nvfp4_grouped_wgrad", F32)
FP8, FP8_WGRAD = sample("fp8_grouped_mm"), sample("fp8_grouped_wgrad", F32)
QUANTIZE = sample("fp8_quantize")
ALONG = dataclasses.replace(QUANTIZE, along=4096)
BOTH = dataclasses.replace(ALONG, both=True, dtypes=(BF16,))
DEQUANTIZE = dataclasses.replace(QUANTIZE, op="fp8_dequantize")
CAST = dataclasses.replace(QUANTIZE, op="fp8_cast", block=None)
LARGEST = dataclasses.replace(CAST, op="fp8_largest")
ACTIVATION = problems.Fp8Activation(
    op="fp8_activation", platform="cuda", dtypes=(BF16,), columns=1024, activation="swiglu"
)
BACKWARD = dataclasses.replace(ACTIVATION, op="fp8_activation_backward")
ACTIVATION_CAST, BACKWARD_CAST = (
    dataclasses.replace(ACTIVATION, op=f"fp8_activation_cast{of}", rows=4096)
    for of in ("", "_backward")
)
FP8_FAST, FP8_WGRAD_FAST = (dataclasses.replace(of, blocks=(None, None)) for of in (FP8, FP8_WGRAD))
LOW_RANK = dataclasses.replace(sample("lora_mm"), op="lora_wgrad", dtypes=(BF16,) * 4)
ROWS = dataclasses.replace(ACTIVATION, op="activation_backward", dtypes=(BF16, BF16))
DOWN = dataclasses.replace(
    MM, op="down_backward", lists=True, x_list_alone=True, activation="swiglu", n=512
)
FEW = problems.Moe(
    op="few_tokens", platform="cuda", dtypes=(BF16,), pairs=32, experts=64, d=2048, choices=8,
    packed=True, matrix=2**20,
)  # fmt: skip
FEW_DENSE = dataclasses.replace(FEW, packed=False, dense=True, dtypes=(BF16,) * 3, f=768)
SOME = dataclasses.replace(FEW, op="some_tokens", pairs=512, f=768)
SOME_DENSE = dataclasses.replace(FEW_DENSE, op="some_tokens", pairs=512)
TOP_K = problems.TopK(op="top_k", platform="cuda", dtypes=(F32,), experts=64, k=8)
ROUTER = problems.Router(
    op="router", platform="cuda", dtypes=(BF16, F32), experts=64, k=8, tokens=8, d=2048
)
MOE = {op: sample(op) for op in ("route", "dispatch", "combine")}
MOE["combine_backward"] = dataclasses.replace(MOE["combine"], op="combine_backward")
CONVERSIONS = {op: sample(op) for op in ("quantize", "dequantize", "nvfp4_quantize", "prepack")}
QMM_FP8 = dataclasses.replace(
    QMM, mode="fp8", bits=8, calls=frozenset({"jgg_qmm_fp8"}), packable=False
)
PREPACK_FP8 = dataclasses.replace(
    CONVERSIONS["prepack"], mode="fp8", calls=frozenset({"jgg_prepack_fp8"})
)
LONG = dict.fromkeys(("k", "n"), 2048)

# (custom call, a call that the kernel takes, {clause of `needs`: fields that break it}).
NEEDS = [
    ("jgg_mm sm100", MM, {
        "bfloat16, float16": {"dtypes": (F32,) * 2},
        "a result of that dtype or float32": {"out_dtype": "float16"},
        "K % 8 == 0": {"k": 2052},
        "N % 8 == 0": {"n": 2052},
        "x as it is stored": {"transpose_x": True},
        "no options": {"activation": "silu"},
    }),
    ("jgg_mm sm90", MM, {
        "bfloat16, float16": {"dtypes": ("float64",) * 2, "operand_dtype": "float64"},
        "float32 in bfloat16 planes": {
            "dtypes": (F32,) * 2, "operand_dtype": F32, "out_dtype": F32, "rows": 8,
        },
    }),
    ("jgg_mm cpu", dataclasses.replace(MM, platform="cpu"), {
        "float32, bfloat16, float16": {"dtypes": ("float64",) * 2},
    }),
    ("jgg_wgrad sm100", WGRAD, {
        "bfloat16, float16": {"dtypes": (F32,) * 2},
        "a result of that dtype or float32": {"out_dtype": "float16"},
        "A % 8 == 0": {"a": 2052},
        "B % 8 == 0": {"b": 2052},
        "x and y as they are stored": {"transpose_y": True},
    }),
    ("jgg_wgrad sm90", WGRAD, {
        "bfloat16, float16": {"dtypes": ("float64",) * 2},
        "float32 in bfloat16 planes": {
            "dtypes": (F32,) * 2, "operand_dtype": F32, "out_dtype": F32, "rows": 8,
        },
    }),
    ("jgg_wgrad cpu", dataclasses.replace(WGRAD, platform="cpu"), {
        "float32, bfloat16, float16": {"dtypes": ("float64",) * 2},
    }),
    ("jgg_qmm_packed sm90", PACKED, {
        "prepacked weights, or many rows, or transpose_w=False and options": {
            "layout": "linear", "rows": 64,
        },
    }),
    ("jgg_qmm sm90", QMM, {
        "weights as stored": {"layout": "sm90"},
        "affine groups of 32 or more": {"group_size": 16},
        "K * bits % 128 == 0 with transpose_w": {"k": 2056},
        "else N * bits": {"transpose_w": False, "n": 2056},
        "and no options": {"transpose_w": False, "activation": "silu"},
    }),
    ("jgg_qmm_fp8 sm90", QMM_FP8, {
        "mode fp8": {"mode": "nvfp4", "calls": frozenset()},
        "codes e4m3 in blocks of whole 128 columns": {"lines": False},
        "K % 16 == 0 with transpose_w": {"k": 2056},
        "else N % 16 == 0": {"transpose_w": False, "n": 2056},
        "and no options": {"transpose_w": False, "activation": "silu"},
    }),
    ("jgg_qmm_packed sm80", PACKED, {
        "prepacked weights": {"layout": "linear"},
        "codes of 4 bits": {"bits": 8},
        "affine groups of 32 or more": {"group_size": 16},
        "16-bit x, or float32 beside nvfp4 and mxfp4": {"dtypes": (F32,)},
        "affine scales of its dtype": {"bfloat16_scales": False},
        "transpose_w=True": {"transpose_w": False},
        "segments in order": {"in_order": False},
        "N % 128 == 0 with a gated activation": {"n": 2112, "activation": "swiglu", "gated": True},
    }),
    ("jgg_qmm sm80", QMM, {"no mode fp8": {"mode": "fp8", "calls": frozenset()}}),
    ("jgg_qmm cpu", dataclasses.replace(QMM, platform="cpu"), {
        "float32, bfloat16, float16": {"dtypes": ("float64",)},
        "no mode fp8": {"mode": "fp8", "calls": frozenset()},
    }),
    ("jgg_qmm_fp8 cpu", dataclasses.replace(QMM_FP8, platform="cpu"), {
        "float32, bfloat16, float16": {"dtypes": ("float64",)},
        "mode fp8": {"mode": "nvfp4", "calls": frozenset()},
        "codes e4m3 in blocks of whole 128 columns": {"lines": False},
    }),
    ("jgg_nvfp4_grouped_mm sm100", NVFP4, {
        "K % 32 == 0": {"k": 2064},
        "N % 8 == 0 (N % 4 with float32 and float16)": {"n": 2050},
    }),
    ("jgg_qmm sm90 nvfp4_grouped_mm", NVFP4_LINEAR, {
        "K % 128 == 0": {"k": 2080},
        "w as stored": {"linear": False},
    }),
    ("jgg_nvfp4_grouped_wgrad sm100", NVFP4_WGRAD, {"K % 4 == 0": {"k": 2050}}),
    ("jgg_wgrad sm90 nvfp4_grouped_wgrad", NVFP4_WGRAD, {
        "groups that are not cut into parts": {
            "inner": dataclasses.replace(NVFP4_WGRAD.inner, kind="spans", groups=1, a=128, b=128)
        },
    }),
    ("jgg_fp8_grouped_mm_sm100 sm100", FP8, {
        "e4m3": {"elements": ("e5m2", "e4m3")},
        "blocks of 128 along K and of 128 x 128": {"blocks": ((1, 128), (1, 128))},
    }),
    ("jgg_fp8_grouped_wgrad_sm100 sm100", FP8_WGRAD, {
        "e4m3": {"elements": ("e4m3", "e5m2")},
        "blocks of 128 rows": {"blocks": ((1, 128), (128, 128))},
    }),
    ("jgg_fp8_grouped_mm_sm89 sm89", FP8, {
        "e4m3": {"elements": ("e4m3", "e5m2")},
        "x also e5m2": {"elements": ("e3m4", "e4m3")},
        "blocks of 128 along K and of 128 x 128": {"blocks": ((1, 128), (1, 128))},
    }),
    ("jgg_fp8_grouped_wgrad_sm89 sm89", FP8_WGRAD, {
        "e4m3": {"elements": ("e5m2", "e4m3")},
        "dy also e5m2": {"elements": ("e4m3", "e3m4")},
        "blocks of 128 rows": {"blocks": ((1, 128), (128, 128))},
    }),
    ("jgg_fp8_grouped_mm sm90", FP8, {
        "e4m3": {"elements": ("e5m2", "e4m3")},
        "blocks of 128 along K and of 128 x 128": {"blocks": ((1, 128), (1, 128))},
    }),
    ("jgg_fp8_grouped_wgrad sm90", FP8_WGRAD, {
        "e4m3": {"elements": ("e4m3", "e5m2")},
        "blocks of 128 rows": {"blocks": ((1, 128), (128, 128))},
    }),
    ("jgg_fp8_grouped_mm sm90", FP8_FAST, {
        "or a scale for each matrix, fast": {"blocks": (None, (128, 128))},
        "x also e5m2": {"elements": ("e4m3", "e5m2")},
    }),
    ("jgg_fp8_grouped_wgrad sm90", FP8_WGRAD_FAST, {
        "or a scale for each matrix, fast": {"blocks": (None, (1, 128))},
        "one also e5m2": {"elements": ("e5m2", "e5m2")},
    }),
    ("jgg_moe_down_backward sm90", DOWN, {
        "bfloat16, float16": {"dtypes": (F32,) * 2, "operand_dtype": F32, "out_dtype": F32},
        "SwiGLU": {"activation": "geglu"},
        "few columns": {"n": 2048},
    }),
    ("jgg_moe_few_tokens sm90", FEW, {
        "bfloat16": {"dtypes": (F32,)},
        "prepacked weights": {"packed": False},
        "up to 64 pairs of token and expert, 8 of a token": {"pairs": 65},
        "pairs * D * F up to 2^27": {"matrix": 2**23},
        "D and F up to 12288": {"d": 12352},
        "more with less than 8 tokens and k": {"d": 49216, "choices": 2, "pairs": 2},
    }),
    ("jgg_moe_some_tokens sm90", SOME, {
        "bfloat16": {"dtypes": (F32,)},
        "prepacked weights": {"packed": False},
        "a gated activation": {"gated": False},
        "no biases": {"biased": True},
        "up to 1024 pairs of token and expert": {"pairs": 1025, "experts": 128},
        "32 of a token": {"choices": 33},
        "up to 1024 experts": {"experts": 1025},
        "few rows of each": {"experts": 16},
    }),
    ("jgg_moe_some_dense sm90", SOME_DENSE, {
        "bfloat16, float16": {"dtypes": (F32,) * 3},
        "weights that are arrays": {"dense": False},
        "a gated activation": {"gated": False},
        "no biases": {"biased": True},
        "up to 1024 pairs of token and expert": {"pairs": 1025, "experts": 128},
        "32 of a token": {"choices": 33},
        "D % 8 == 0": {"d": 2052},
        "F % 8 == 0": {"f": 772},
        "up to 1024 experts": {"experts": 1025},
        "few rows of each": {"experts": 16},
    }),
    ("jgg_moe_few_dense sm80", FEW_DENSE, {
        "bfloat16, float16": {"dtypes": (F32,) * 3},
        "weights that are arrays": {"dense": False},
        "up to 64 pairs of token and expert": {"pairs": 65},
        "8 of a token": {"choices": 9},
        "pairs * D * F up to 3 * 2^25": {"matrix": 2**22},
        "D % 8 == 0": {"d": 2052},
        "F % 8 == 0": {"f": 772},
        "D and F up to 6144": {"f": 6152},
        "more with less than 8 tokens and k": {"d": 49160, "pairs": 8},
    }),
    ("jgg_lora_mm sm80", sample("lora_mm"), {
        "bfloat16, float16": {"dtypes": (F32,) * 3},
        "rank 8, 16, 32 or 64": {"rank": 24},
        "K % 8 == 0": {"k": 2052},
        "N % 8 == 0": {"n": 2052},
        "up to 256 rows of a pair": {"rows": 2**18 + 1},
    }),
    ("jgg_lora_wgrad sm80", LOW_RANK, {
        "bfloat16, float16": {"dtypes": (F32,) * 4},
        "rank 8, 16, 32 or 64": {"rank": 24},
        "K % 8 == 0": {"k": 2052},
        "N % 8 == 0": {"n": 2052},
        "up to 256 rows of a pair": {"rows": 2**18 + 1},
    }),
    ("jgg_fp8_quantize sm80", QUANTIZE, {
        "blocks of 128 or 128 x 128": {"block": (1, 64)},
        "C % 8 == 0": {"columns": 2052},
    }),
    ("jgg_fp8_quantize sm80", ALONG, {"along R without groups R % 16 == 0": {"along": 4104}}),
    ("jgg_fp8_quantize sm80", BOTH, {
        "along both axes C % 16 == 0": {"columns": 2056},
        "blocks of 128 then need bfloat16 and groups": {"dtypes": (F32,)},
    }),
    ("jgg_fp8_cast sm80", CAST, {
        "C % 16 == 0": {"columns": 2056},
        "along R without groups R % 16 == 0": {"along": 4104},
        "float32 x with powers of two": {"dtypes": (F32,), "power_of_two": False},
    }),
    ("jgg_fp8_cast sm80", LARGEST, {"C % 16 == 0": {"columns": 2056}}),
    ("jgg_fp8_activation_cast sm80", ACTIVATION_CAST, {
        "bfloat16": {"dtypes": (F32,)},
        "a gated activation": {"activation": "silu"},
        "F % 8 == 0": {"columns": 1028},
        "R * F below 2^34": {"rows": 2**24},
    }),
    ("jgg_fp8_activation_cast_backward sm80", BACKWARD_CAST, {
        "bfloat16": {"dtypes": (F32,)},
        "a gated activation": {"activation": "silu"},
        "F % 128 == 0": {"columns": 1032},
        "R * F below 2^34": {"rows": 2**24},
    }),
    ("jgg_fp8_activation sm80", ACTIVATION, {
        "bfloat16": {"dtypes": (F32,)},
        "a gated activation": {"activation": "silu"},
        "F % 8 == 0": {"columns": 1028},
    }),
    ("jgg_fp8_activation_backward sm80", BACKWARD, {
        "bfloat16": {"dtypes": (F32,)},
        "a gated activation": {"activation": "silu"},
        "F % 128 == 0": {"columns": 1032},
    }),
    ("jgg_fp8_dequantize sm80", DEQUANTIZE, {
        "blocks of 128 or 128 x 128": {"block": (1, 64)},
        "C % 8 == 0": {"columns": 2052},
        "fewer than 2^33 codes": {"rows": 2**22, "columns": 2048},
    }),
    ("jgg_activation_backward sm80", ROWS, {
        "bfloat16, float16": {"dtypes": (F32,) * 2},
        "columns % 8 == 0": {"columns": 1028},
    }),
    ("jgg_moe_top_k sm80", TOP_K, {
        "1 to 1024 experts in up to 32 groups, k up to 32": {"experts": 1025},
    }),
    ("jgg_moe_router sm90", ROUTER, {
        "float32 or bfloat16 w": {"dtypes": (BF16, "float16")},
        " of up to 2 MiB": {"d": 16384},
        "D % 8 == 0": {"d": 2052},
        "E % 4 == 0": {"experts": 66},
        "up to 8 tokens": {"tokens": 9},
        " 512 experts": {"experts": 516, "d": 64},
    }),
    ("jgg_moe_route sm80", MOE["route"], {"1 to 1024 experts": {"experts": 1025}}),
    *[
        (f"jgg_moe_{op} sm80", MOE[op], {
            "rows of whole 16 bytes: D % 8 == 0 (D % 4 with float32, D % 16 with codes)":
                {"d": 2052},
        }) for op in ("dispatch", "combine", "combine_backward")
    ],
    *[(f"jgg_{op} sm80", CONVERSIONS[op], {}) for op in ("quantize", "dequantize")],
    *[
        (f"jgg_{op} cpu", dataclasses.replace(CONVERSIONS[op], platform="cpu"), {})
        for op in ("quantize", "dequantize")
    ],
    ("jgg_nvfp4_quantize sm80", CONVERSIONS["nvfp4_quantize"], {}),
    ("jgg_prepack sm80", CONVERSIONS["prepack"], {
        "no mxfp8, no fp8": {"mode": "fp8", "calls": frozenset({"jgg_prepack_fp8"})},
    }),
    ("jgg_prepack_fp8 sm80", PREPACK_FP8, {
        "mode fp8": {"mode": "affine", "calls": frozenset({"jgg_prepack"})},
    }),
]  # fmt: skip


def kernel_of(call: str, problem) -> choose.Kernel:
    target, name, *_ = call.split()
    (kernel,) = [
        k for k in choose.KERNELS[problem.op]
        if (k.target, k.name) == (target, name) and not k.only_named
    ]  # fmt: skip
    return kernel


def refuses(kernel, problem) -> bool:
    """Whether this kernel does not run a call, or does so slowly."""
    if choose.unsupported(problem) or choose.cannot(kernel, problem) or kernel.fuses(problem):
        return True
    by_list = problem.op == "down_backward"
    lists_pay = not by_list or kernel.lists_pay(problem, kernel.config(problem))
    return not (kernel.pays(problem) and lists_pay)


@pytest.mark.parametrize(("call", "problem", "clauses"), NEEDS, ids=[call for call, *_ in NEEDS])
def test_a_kernel_asks_for_what_its_table_says(monkeypatch, call, problem, clauses):
    kernel = kernel_of(call, problem)
    if kernel.name == "sm89":  # which Hopper runs where it is named
        monkeypatch.setattr(extension, "live_capabilities", lambda: (89,))
    assert not refuses(kernel, problem)
    for clause, broken in clauses.items():
        assert clause in kernel.needs
        assert refuses(kernel, dataclasses.replace(problem, **broken)), clause


def test_every_clause_is_tried():
    told = {}
    for call, problem, clauses in NEEDS:
        kernel = kernel_of(call, problem)
        told.setdefault((problem.op, kernel.target, kernel.name), []).extend(clauses)
    for op, kernels in choose.KERNELS.items():
        for kernel in kernels:
            left = kernel.needs
            for clause in sorted(told.get((op, kernel.target, kernel.name), ()), key=len)[::-1]:
                left = left.replace(clause, "")
            assert not re.search(r"\w", left), (op, kernel.target, left)
