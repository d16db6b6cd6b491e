"""Why a kernel does not take a call: the sentence of each reason, and what runs instead."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest
from lowered_calls import text_of as cuda_text

import jax_groupgemm as jgg
from jax_groupgemm._kernels import choose, dense, extension, lists, problems

MM = problems.Mm(
    op="mm", platform="cuda", dtypes=("bfloat16",) * 2, out_dtype="bfloat16",
    operand_dtype="bfloat16", rows=4096, groups=8, k=256, n=512, segments=8, elements=2**20,
)  # fmt: skip
FLOATS = "float32, bfloat16, float16"
FUSES = [
    ({}, None),
    ({"activation": "swiglu", "gated": True, "option_dtypes": ("float32",)}, None),
    ({"lists": True, "x_list_alone": True}, None),
    ({"lists": True, "dtypes": ("float32",) * 2}, "operands must be bfloat16 or float16 alike"),
    ({"lists": True, "empty": True}, "an operand is empty"),
    ({"empty": True}, "an operand is empty"),
    ({"activation": "of_tomorrow"}, "it has no activation 'of_tomorrow'"),
    ({"option_dtypes": ("float32", "int8")}, f"option dtype int8 is not one of {FLOATS}"),
    ({"k": 2**18}, f"sums over K={2**18} are made in parts"),
    ({"existing_dtype": "float32"}, "existing_out is float32, the result bfloat16"),
    (
        {"preactivation": True, "gated": True, "activation": "swiglu", "k": 252},
        "needs K % 8 == 0, got K=252",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "why"), FUSES)
def test_what_is_fused(hopper, changed, why):
    problem = dataclasses.replace(MM, **changed)
    assert dense.mm_fuses(problem) == why
    plan = choose.fused(problem)
    assert (plan is None) == (why is not None)
    assert plan is None or plan.kernel.name == "sm90"


BY_LIST = dataclasses.replace(MM, lists=True, x_list_alone=True)
DOWN = dataclasses.replace(BY_LIST, op="down_backward", activation="swiglu")


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, None),
        ({"activation": "geglu"}, "needs activation 'swiglu', got 'geglu'"),
        ({"out_dtype": "float16"}, "h and the cotangent differ in dtype"),
        ({"empty": True}, "an operand is empty"),
    ],
)
def test_down_backward(hopper, changed, why):
    problem = dataclasses.replace(DOWN, **changed)
    assert lists.down_backward_fuses(problem) == why
    assert (choose.by_list(problem) is None) == (why is not None)


@pytest.mark.parametrize("problem", [BY_LIST, DOWN], ids=["mm", "down_backward"])
def test_a_name_does_not_decide_whether_tokens_come_by_list(hopper, problem):
    of = lambda **changed: choose.by_list(dataclasses.replace(problem, **changed))
    for name in (None, "sm90"):
        assert of(implementation=name) is not None
        assert of(implementation=name, n=1008) is None
    assert of(implementation="sm80") is None
    assert of(implementation="reference") is None


def array(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


def gathered(a, b, lhs, rhs):
    return jgg.gather_mm(a, b, lhs, rhs)


def test_lists_without_an_extension(monkeypatch):
    """Nothing is asked of a module that is not there."""
    monkeypatch.setattr(extension, "BUILD", extension.Build(problem="it cannot be imported"))
    monkeypatch.setattr(extension, "rules", lambda: pytest.fail("asked"))
    args = array(9, 1, 16), array(4, 16, 24), *[array(5, dtype="int32")] * 2
    assert "custom_call @jgg" not in cuda_text(gathered, *args)


def test_lists_of_nothing(hopper):
    args = array(9, 1, 0), array(4, 0, 24), *[array(5, dtype="int32")] * 2
    assert "custom_call @jgg" not in cuda_text(gathered, *args)


@pytest.mark.parametrize(("architecture", "planes"), [("90a", 3), ("90", 1)])
def test_planes_need_their_architecture(hopper, monkeypatch, architecture, planes):
    """The generic kernel takes float32 as it is on a Hopper GPU that has no code of its own."""
    build = extension.Build(cuda="13.0", architectures=("80", architecture))
    monkeypatch.setattr(extension, "BUILD", build)
    args = array(8192, 1024, dtype="float32"), array(4, 1024, 1024, dtype="float32")
    text = cuda_text(lambda x, w: jgg.grouped_mm(x, w, jnp.full(4, 2048)), *args)
    assert re.findall(r"planes = (\d) : i32, rows", text) == [str(planes)]


# ---- quantized weights ---------------------------------------------------------------------------


def quantized(*shape, **options):
    return jax.eval_shape(functools.partial(jgg.quantize, contract=-1, **options), array(*shape))


def qmm_calls(function, *args) -> list[tuple[str, list[str]]]:
    found = re.findall(r"custom_call @jgg_(qmm\w*)\(.*? : \((.*?)\) ->", cuda_text(function, *args))
    return [(name, re.findall(r"tensor<(.*?)>", types)) for name, types in found]


SIZES = array(2, dtype="int32")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_repacked_weights_and_other_rows(hopper, dtype):
    """float16 rows beside bfloat16 scales are two bfloat16 rows each."""
    packed = jax.eval_shape(jgg.prepack, quantized(2, 64, 128))
    assert packed.layout == "sm90"
    ((name, types),) = qmm_calls(jgg.grouped_qmm, array(6, 128, dtype=dtype), packed, SIZES)
    assert name == "qmm_packed"
    assert types[0] == ("6x128xbf16" if dtype == "bfloat16" else "12x128xbf16")


@pytest.mark.parametrize("transpose_w", [True, False])
def test_long_sums_are_of_parts(transpose_w):
    """K is cut in whole groups; parts are added up in float32, and a global scale is of each."""
    k, n = 6 * 11008, 64
    q = quantized(2, *((n, k) if transpose_w else (k, n)), mode="nvfp4", global_scale=jnp.ones(2))
    f = functools.partial(jgg.grouped_qmm, transpose_w=transpose_w)
    found = qmm_calls(f, array(6, k, dtype="float16"), q, SIZES)
    sizes = [11264, 10752, 11264, 10752, 11264, 10752]  # 2**14 or less, in whole 512
    assert sum(sizes) == k
    stored = lambda k, each: f"2x{n}x{k // each}" if transpose_w else f"2x{k}x{n // each}"
    assert found == [
        ("qmm", [f"6x{size}xf16", f"{stored(size, 8)}xui32", f"{stored(size, 16)}xui8", "2xi32",
                 "2xf32"])
        for size in sizes
    ]  # fmt: skip
    text = cuda_text(f, array(6, k, dtype="float16"), q, SIZES)
    assert len(re.findall(rf"stablehlo.add .* : tensor<6x{n}xf32>", text)) == 5


NVFP4 = {
    "as stored": ({}, True),
    "prepacked": ({"prepacked": True}, False),
    "a scale for each row": ({"rows": True}, False),
}


@pytest.mark.parametrize("name", NVFP4)
def test_nvfp4_on_hopper(hopper, name):
    """x is decoded to the kernel's order of columns, or by itself, and then another product's."""
    given, ordered = NVFP4[name]

    def nvfp4(*shape):
        words, scales = (
            array(*shape, 128 // n, dtype=d) for n, d in ((8, "uint32"), (16, "uint8"))
        )
        return jgg.Quantized(words, scales, None, mode="nvfp4", bits=4, group_size=16)  # pyright: ignore

    x, w = nvfp4(6), nvfp4(2, 64)
    if "prepacked" in given:
        w = jax.eval_shape(jgg.prepack, w)
    if "rows" in given:
        x = dataclasses.replace(x, global_scale=array(6, dtype="float32"))
    text = cuda_text(jgg.nvfp4_grouped_mm, x, w, SIZES)
    (call,) = [line for line in text.splitlines() if "custom_call @jgg_qmm" in line]
    decoded = re.findall(r"custom_call @jgg_dequantize\(.*[{ ]ordered = (\w+)", text)
    assert decoded == [str(ordered).lower()]
    assert ("@jgg_qmm_packed" in call) == ("prepacked" in given)
