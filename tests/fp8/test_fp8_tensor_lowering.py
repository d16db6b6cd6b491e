"""FP8 with one scale for a tensor, lowered for CUDA: casts, products, the layer. The machine seems
to have one Hopper GPU."""

import dataclasses
import functools
import re
from collections import Counter

import jax
import pytest
from lowered_calls import text_of as cuda_text

import jax_groupgemm as jgg
from jax_groupgemm._fp8 import tensors

pytestmark = pytest.mark.usefixtures("hopper")
T, G, N, K, P = 150, 3, 144, 256, 512
RECIPES = {
    "tensor": jgg.FP8Recipe(scaling="tensor"),
    "fast": jgg.FP8Recipe(scaling="tensor", accumulate="fast"),
    "e5m2": jgg.FP8Recipe(scaling="tensor", gradient_format="e5m2", accumulate="fast"),
    "delayed": jgg.FP8Recipe(scaling="delayed", accumulate="fast"),
}


def array(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


SIZES = array(G, dtype="int32")


def matrices(*shape, dtype="float8_e4m3fn"):
    return jgg.Quantized(
        array(*shape, dtype=dtype), array(*shape[:-2]), mode="fp8", bits=8, group_size=None,
        block=None,
    )  # pyright: ignore  # fmt: skip


def lines(columns: int, dtype="float8_e4m3fn"):
    """Grouped rows (T, columns), stored transposed and padded."""
    return dataclasses.replace(
        matrices(columns, P, dtype=dtype), axis=-2, layout="grouped",
        positions=array(T, dtype="int32"),
    )  # fmt: skip


def calls(text: str) -> list[tuple[str, list[str], list[str], str]]:
    """Each call's target, the types of operands and results, and attributes."""
    found = []
    for line in text.splitlines():
        if name := re.search(r"custom_call @jgg_(\w*)\(", line):
            types = line.rsplit(" : (", 1)[1].split(" -> ")
            operands, results = (re.findall(r"tensor<([^>]*)>", part) for part in types)
            attributes = re.search(r"mhlo.backend_config = \{(.*?)\}, ", line)
            found.append((name[1], operands, results, attributes[1] if attributes else ""))
    return found


@pytest.mark.parametrize(("dtype", "of"), [("bfloat16", "f8E4M3FN"), ("float32", "f8E5M2")])
def test_quantize(dtype, of):
    """One pass finds the largest number, another one casts; a float32 x has scales that are powers
    of two, or no kernel."""
    e5m2 = {"format": "e5m2", "scale_format": "e8m0"} if dtype == "float32" else {}
    quantize = functools.partial(jgg.fp8_quantize, block=None, **e5m2)
    x = array(G, 160, K, dtype=dtype)
    largest, cast = calls(cuda_text(quantize, x))
    assert largest[0] == cast[0] == "fp8_cast"
    assert largest[2][0].endswith("x2xui32")
    assert "largest = true" in largest[3]
    assert cast[1][1] == f"{G}xf32"
    assert cast[2] == [f"{G}x160x{K}x{of}", "0xi32"]
    (turned,) = calls(cuda_text(functools.partial(quantize, axis=-2), x))[1:]
    assert turned[2][0] == f"{G}x{K}x160x{of}"
    assert "along_rows = true" in turned[3]
    if dtype == "float32":
        plain = functools.partial(jgg.fp8_quantize, block=None)
        assert [name for name, *_ in calls(cuda_text(plain, x))] == ["fp8_cast"]
    else:
        assert not calls(cuda_text(quantize, array(G, 160, 36, dtype=dtype)))


def test_lines_come_of_one_read():
    """Codes of rows and along rows, and the largest number where a state asks."""
    x, ages = array(T, K, dtype="bfloat16"), array(256)
    run = lambda x, sizes, ages: tensors.quantized_lines(x, sizes, ages=ages, history=4)
    largest, cast = calls(cuda_text(run, x, SIZES, ages))
    assert largest[1][-1] == "1xi32"  # whether anyone asks for it
    tiles = P // 128 * K // 128
    assert cast[2][:3] == [f"1x{T}x{K}xf8E4M3FN", f"1x{K}x{P}xf8E4M3FN", f"1x{tiles}x2xui32"]


@pytest.mark.parametrize("accumulate", ["fast", "exact"])
@pytest.mark.parametrize(("element", "of"), [("e4m3fn", "E4M3FN"), ("e5m2", "E5M2")])
def test_products(accumulate, element, of):
    """Fast ones have two scales, exact ones those of blocks. Exact ones of e5m2 have no kernel."""
    x = matrices(T, K, dtype=f"float8_{element}")
    f = functools.partial(jgg.fp8_grouped_mm, accumulate=accumulate)
    g = functools.partial(jgg.fp8_grouped_wgrad, accumulate=accumulate)
    found = calls(cuda_text(f, x, matrices(G, N, K), SIZES))
    wgrads = [
        calls(cuda_text(g, *pair, SIZES))
        for pair in (
            (lines(K), lines(N, f"float8_{element}")),
            (lines(K, f"float8_{element}"), lines(N)),
        )
    ]
    if accumulate == "exact" and element == "e5m2":
        assert "fp8_grouped_mm" not in {name for name, *_ in found}
        return
    ((name, operands, results, attributes),) = found
    fast = accumulate == "fast"
    assert name == "fp8_grouped_mm"
    assert f"fast = {str(fast).lower()}" in attributes
    scales = ["1xf32", f"{G}xf32"] if fast else [f"{T}x2xf32", f"{G}x2x2xf32"]
    assert operands[:4] == [f"{T}x{K}xf8{of}", scales[0], f"{G}x{N}x{K}xf8E4M3FN", scales[1]]
    assert results == [f"{T}x{N}xbf16"]
    for ((name, operands, _, attributes),) in wgrads:
        assert name == "fp8_grouped_wgrad"
        assert f"fast = {str(fast).lower()}" in attributes
        assert (operands[1] == operands[3] == "1xf32") == fast


def test_float16_results_and_names():
    """A fast kernel makes float32; kernels of other names are not fast."""
    x, w = matrices(T, K), matrices(G, N, K)
    half = functools.partial(
        jgg.fp8_grouped_mm, accumulate="fast", preferred_element_type="float16"
    )
    ((_, _, results, _),) = calls(cuda_text(half, x, w, SIZES))
    assert results == [f"{T}x{N}xf32"]
    named = functools.partial(jgg.fp8_grouped_mm, accumulate="fast", implementation="sm89")
    ((name, *_),) = calls(cuda_text(named, x, w, SIZES))
    assert name == "fp8_grouped_mm_sm89"


@pytest.mark.parametrize("name", RECIPES)
def test_linear(name):
    """x, dy and w are read once for their scales and once for both orders of their codes."""
    recipe = RECIPES[name]
    state = jax.eval_shape(jgg.FP8State.new) if name == "delayed" else None

    def step(x, w, sizes, dy, state):
        run = functools.partial(jgg.fp8_grouped_linear, group_sizes=sizes, recipe=recipe)
        if state is None:
            out, pull = jax.vjp(lambda x, w: run(x, w), x, w)
        else:
            out, pull = jax.vjp(lambda x, w, state: run(x, w, state=state), x, w, state)
        return out, pull(dy)

    of = functools.partial(array, dtype="bfloat16")
    found = calls(cuda_text(step, of(T, K), of(G, N, K), SIZES, of(T, N), state))
    assert Counter(name for name, *_ in found) == {
        "fp8_cast": 6, "fp8_grouped_mm": 2, "fp8_grouped_wgrad": 1
    }  # fmt: skip
    casts = [(operands, results, how) for name, operands, results, how in found if "cast" in name]
    both = [how for _, _, how in casts if "along_columns = true, along_rows = true" in how]
    assert len(both) == 3
    assert sum("largest = true" in how for how in both) == (2 if name == "delayed" else 0)
    fast = ["fast = true" in how for name, *_, how in found if "fast" in how]
    assert fast == ([True, False, False] if name == "tensor" else [True] * 3)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("transpose_w", [False, True])
def test_layer(name, transpose_w):
    """Every pass is kernels: tokens are cast before they are copied, the activation as it is
    made."""
    tokens, d, f, e, k = 64, 256, 128, 4, 2
    of = functools.partial(array, dtype="bfloat16")
    up, down = (of(e, 2 * f, d), of(e, d, f)) if transpose_w else (of(e, d, 2 * f), of(e, f, d))

    states = (jax.eval_shape(jgg.FP8State.new),) * 2 if name == "delayed" else None

    def step(x, up, down, index, weight, ct, states):
        run = lambda x, up, down, weight, states: jgg.moe_mlp(
            x, up, down, index, weight, recipe=RECIPES[name], transpose_w=transpose_w, state=states
        )
        out, pull = jax.vjp(run, x, up, down, weight, states)
        return out, pull(ct)

    index = array(tokens, k, dtype="int32")
    operands = of(tokens, d), up, down, index, array(tokens, k), of(tokens, d), states
    text = cuda_text(step, *operands)
    found = calls(text)
    count = Counter(name for name, *_ in found)
    assert count["fp8_activation_cast"] == count["fp8_activation_cast_backward"] == 2
    assert count["fp8_grouped_mm"] == 4
    assert count["fp8_grouped_wgrad"] == 2
    assert not {name for name in count if "quantize" in name or name in ("mm", "wgrad")}
    # Only the cotangent of the activation is stored with F columns.
    results = [of for _, _, results, _ in found for of in results]
    assert results.count(f"{tokens * k}x{f}xbf16") == 1
    dispatched = [of for name, _, results, _ in found if name == "moe_dispatch" for of in results]
    assert all("f8" in of or "ui8" in of for of in dispatched)
    # Weight gradients transpose the codes of tokens by list, those of x and of the cotangent. No
    # program of XLA gathers rows in their place: none has D columns.
    listed = [
        (operands, how) for name, operands, *_, how in found
        if name == "fp8_cast" and operands[3] == f"{tokens * k}xi32"
    ]  # fmt: skip
    format = "5M2" if name == "e5m2" else "4M3FN"
    rows = sorted(operands[0] for operands, _ in listed)
    assert rows == [f"1x{tokens}x{d}xf8E4M3FN", f"1x{tokens}x{d}xf8E{format}"]
    assert all("along_columns = false, along_rows = true" in how for _, how in listed)
    gathered = re.findall(r"stablehlo.gather.* -> tensor<([^>]*)>", text)
    assert gathered
    assert not [shape for shape in gathered if f"x{d}x" in shape]


@pytest.mark.parametrize("name", ["block", "delayed"])
def test_a_batch_of_layers_is_calls_of_each(name):
    """One after the other, where one fills a GPU. Where it does not, the batch is one program."""
    batch, d, f, e, k = 3, 256, 128, 4, 2
    recipe = RECIPES.get(name, jgg.FP8Recipe())
    states = (jax.eval_shape(jgg.FP8State.new),) * 2 if name == "delayed" else None

    def step(x, up, down, index, weight, ct, states):
        run = lambda x, up, down, weight, states: jgg.moe_mlp(
            x, up, down, index, weight, recipe=recipe, state=states
        )
        out, pull = jax.vjp(run, x, up, down, weight, states)
        return out, pull(ct)

    def kernels(tokens):
        of = lambda *shape, dtype="bfloat16": array(batch, *shape, dtype=dtype)
        operands = (
            of(tokens, d), array(e, d, 2 * f, dtype="bfloat16"), of(e, f, d),
            of(tokens, k, dtype="int32"), of(tokens, k, dtype="float32"), of(tokens, d), states,
        )  # fmt: skip
        axes = (0, None, 0, 0, 0, 0, None)
        text = cuda_text(jax.vmap(step, axes), *operands)
        return Counter(name for name, *_ in calls(text)), text

    few, _ = kernels(64)
    assert "fp8_grouped_mm" not in few
    many, text = kernels(4096)
    assert many["fp8_grouped_mm"] == 4
    assert many["fp8_grouped_wgrad"] == 2
    assert not {name for name in many if name in ("mm", "wgrad", "qmm_fp8")}
    assert "stablehlo.while" in text


def test_a_batch_of_matrices_is_one_call():
    """Of casts whose rows have no groups."""
    x = array(2, G, 160, K, dtype="bfloat16")
    largest, codes = calls(cuda_text(jax.vmap(tensors.quantized_both), x))
    assert largest[0] == codes[0] == "fp8_cast"
    assert codes[1][1] == f"{2 * G}xf32"
    assert codes[2][:2] == [f"{2 * G}x160x{K}xf8E4M3FN", f"{2 * G}x{K}x160xf8E4M3FN"]
    squares = functools.partial(jgg.fp8_quantize, block=(128, 128))
    ((name, _, results, _),) = calls(cuda_text(jax.vmap(squares), x))
    assert name == "fp8_quantize"
    assert results[0] == f"{2 * G}x160x{K}xf8E4M3FN"
