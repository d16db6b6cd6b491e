"""What FP8's products are lowered to for CUDA: the custom call, its operands, and where there is
none. The machine seems to have one Hopper GPU."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from fp8_quantize_cases import SQUARES_BOTH
from lowered_calls import text_of as cuda_text

import jax_groupgemm as jgg
from jax_groupgemm._fp8 import call
from jax_groupgemm._fp8.grouped_linear import of_columns
from jax_groupgemm._fp8.grouped_wgrad import grouped_wgrad
from jax_groupgemm._kernels import extension

pytestmark = pytest.mark.usefixtures("hopper")
T, G, N, K = 150, 3, 144, 256
LINE, TILE = (1, 128), (128, 128)


def array(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def fp8(*shape, block, dtype="float8_e4m3fn"):
    of_matrix = (-(-n // size) for n, size in zip(shape[-2:], block, strict=True))
    scales = array(*shape[:-2], *of_matrix)
    return jgg.Quantized(
        array(*shape, dtype=dtype), scales, mode="fp8", bits=8, group_size=None, block=block
    )  # pyright: ignore


def along_t(columns: int, dtype="float8_e4m3fn", block=LINE):
    """As ``fp8_quantize(x, axis=0, group_sizes=SIZES)`` stores (T, columns)."""
    return dataclasses.replace(
        fp8(columns, 512, block=block, dtype=dtype), axis=-2, layout="grouped",
        positions=array(T, dtype="int32"),
    )  # fmt: skip


X, W, SIZES = fp8(T, K, block=LINE), fp8(G, N, K, block=TILE), array(G, dtype="int32")
# What the kernel reads: codes and scales of x and of w.
OPERANDS = [f"{T}x{K}xf8E4M3FN", f"{T}x2xf32", f"{G}x{N}x{K}xf8E4M3FN", f"{G}x2x2xf32"]
# Those of lines of dy and x, block by block; dy's 64 lines by 64, in the order of threads.
LINES = [f"{N}x512xf8E4M3FN", "4x240xf32", f"{K}x512xf8E4M3FN", f"4x{K}xf32", f"{G}xi32"]


def calls(text: str) -> list[tuple[str, list[str], str]]:
    """Of each product its target, and the types of its operands and of its result."""
    found = []
    for line in text.splitlines():
        if name := re.search(r"custom_call @jgg_(\w*(?:mm|wgrad))\(", line):
            operands, result = line.rsplit(" : (", 1)[1].split(" -> ")
            types = re.findall(r"tensor<([^>]*)>", operands)
            found.append((name[1], types, re.findall(r"tensor<([^>]*)>", result)[0]))
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_grouped_mm_is_one_call(dtype):
    """Operands and sizes reach the kernel as they are."""
    f = functools.partial(jgg.fp8_grouped_mm, preferred_element_type=dtype)
    short = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}[dtype]
    text = cuda_text(f, X, W, SIZES)
    assert calls(text) == [("fp8_grouped_mm", [*OPERANDS, f"{G}xi32"], f"{T}x{N}x{short}")]
    assert set(re.findall(r"stablehlo\.(\w+)", text)) == {"custom_call"}
    assert "group_offset = false" in text


def test_some_of_the_groups():
    f = lambda x, w, sizes, offset: jgg.fp8_grouped_mm(x, w, sizes, group_offset=offset)
    text = cuda_text(f, X, W, array(5, dtype="int32"), array(dtype="int32"))
    assert calls(text) == [("fp8_grouped_mm", [*OPERANDS, "5xi32", "i32"], f"{T}x{N}xbf16")]
    assert "group_offset = true" in text


@pytest.mark.parametrize(
    ("option", "more"),
    [("activation", []), ("row_scale", []), ("bias", [("mm", [f"{T}x1xf32"], f"{T}x{N}xf32")])],
)
def test_options_are_of_float32_sums(option, more):
    """The kernel rounds nothing that an option is done to; a bias is itself a grouped product."""
    value = {"bias": array(G, N), "row_scale": array(T)}.get(option)
    static = {"activation": "silu"} if value is None else {}
    f = lambda x, w, s, v: jgg.fp8_grouped_mm(x, w, s, **static or {option: v})
    product, *rest = calls(cuda_text(f, X, W, SIZES, value))
    assert product == ("fp8_grouped_mm", [*OPERANDS, f"{G}xi32"], f"{T}x{N}xf32")
    assert [(name, types[:1], out) for name, types, out in rest] == more


@pytest.mark.parametrize("existing", [False, True])
def test_grouped_wgrad_is_one_call(existing):
    """dy comes first; the result takes the place of what it is added to."""
    f = lambda x, dy, s, old: jgg.fp8_grouped_wgrad(x, dy, s, existing_out=old)
    out = f"{G}x{N}x{K}xf32"
    old = array(G, N, K) if existing else None
    text = cuda_text(f, along_t(K), along_t(N), SIZES, old)
    assert calls(text) == [("fp8_grouped_wgrad", LINES + [out] * existing, out)]
    assert f"existing_out = {str(existing).lower()}" in text
    assert ("operand_index = 5" in text) == existing


def test_scales_as_threads_read_them(rng):
    """64 lines are shared out to four lanes. Lane q has 20 floats: lines 2 q and 2 q + 1 of each 8,
    and four that nothing reads."""
    scales = rng.random((130, 3), np.float32)
    staged = np.asarray(call._staged(jnp.asarray(scales)))
    line = np.arange(130)
    place = line // 64 * 80 + line % 8 // 2 * 20 + line % 64 // 8 * 2 + line % 2
    assert staged.shape == (3, 240)
    assert (staged[:, place] == scales.T).all()
    assert (np.delete(staged, place, axis=1) == 0).all()
    assert call._staged(jnp.zeros((130, 0))).shape == (0, 240)  # no rows


def training(x, w, ct, sizes, recipe=jgg.FP8Recipe()):  # noqa: B008
    f = lambda x, w: jgg.fp8_grouped_linear(x, w, sizes, recipe=recipe)
    out, vjp = jax.vjp(f, x, w)
    return out, *vjp(ct)


def half(*shape):
    return array(*shape, dtype="bfloat16")


def test_training():
    """One call each for the result, dx and dw. dx takes the codes of w transposed."""
    found = calls(cuda_text(training, half(T, K), half(G, N, K), half(T, N), SIZES))
    dx = [f"{T}x{N}xf8E4M3FN", f"{T}x2xf32", f"{G}x{K}x{N}xf8E4M3FN", f"{G}x2x2xf32", f"{G}xi32"]
    assert sorted(found) == sorted([
        ("fp8_grouped_mm", [*OPERANDS, f"{G}xi32"], f"{T}x{N}xbf16"),
        ("fp8_grouped_mm", dx, f"{T}x{K}xbf16"),
        ("fp8_grouped_wgrad", LINES, f"{G}x{N}x{K}xbf16"),
    ])  # fmt: skip


def test_training_of_columns():
    """Of w (G, K, N) nothing is transposed but its codes for dx."""

    def f(x, w, ct, sizes):
        layer = lambda x, w: of_columns(x, w, sizes, bias=None, recipe=jgg.FP8Recipe(), key=None)
        return jax.vjp(layer, x, w)[1](ct)

    text = cuda_text(f, half(T, K), half(G, K, N), half(T, N), SIZES)
    lines = [LINES[2], "4x320xf32", LINES[0], f"4x{N}xf32", LINES[4]]
    assert ("fp8_grouped_wgrad", lines, f"{G}x{K}x{N}xbf16") in calls(text)
    quantized = [line for line in text.splitlines() if SQUARES_BOTH in line]
    assert any(f"tensor<{G}x{K}x{N}xbf16>" in line for line in quantized)
    assert not any(f"tensor<{G}x{N}x{K}xbf16>" in line for line in quantized)


def test_derivatives_of_gradients():
    """Of dx they are a result and a weight gradient; of dw, which has x in codes, a result of those
    decoded and of the cotangent quantized as a weight."""
    layer = lambda x, w: jgg.fp8_grouped_linear(x, w, jnp.ones(G, int))

    def of_dx(x, w, ct, back):
        dx = lambda ct, w: jax.vjp(lambda x: layer(x, w), x)[1](ct)[0]
        return jax.vjp(dx, ct, w)[1](back)

    def of_dw(x, w, ct, back):
        dw = lambda ct: jax.vjp(lambda w: layer(x, w), w)[1](ct)[0]
        return jax.vjp(dw, ct)[1](back)

    args = half(T, K), half(G, N, K), half(T, N)
    result = ("fp8_grouped_mm", [*OPERANDS, f"{G}xi32"], f"{T}x{N}xbf16")
    found = calls(cuda_text(of_dx, *args, half(T, K)))
    assert result in found
    assert ("fp8_grouped_wgrad", LINES, f"{G}x{N}x{K}xbf16") in found
    assert calls(cuda_text(of_dw, *args, half(G, N, K)))[-1] == result


TENSOR = jgg.FP8Recipe(scaling="tensor", accumulate="exact")


def test_training_with_a_scale_for_each_tensor():
    """The same kernels get the same operands: a tensor's scale is that of each block."""
    step = functools.partial(training, recipe=TENSOR)
    text = cuda_text(step, half(T, K), half(G, N, K), half(T, N), SIZES)
    dx = [f"{T}x{N}xf8E4M3FN", f"{T}x2xf32", f"{G}x{K}x{N}xf8E4M3FN", f"{G}x2x2xf32", f"{G}xi32"]
    assert sorted(calls(text)) == sorted([
        ("fp8_grouped_mm", [*OPERANDS, f"{G}xi32"], f"{T}x{N}xbf16"),
        ("fp8_grouped_mm", dx, f"{T}x{K}xbf16"),
        ("fp8_grouped_wgrad", LINES, f"{G}x{N}x{K}xbf16"),
    ])  # fmt: skip
    assert "jgg_fp8_quantize" not in text


def test_a_scale_for_each_tensor_without_fp8_kernels():
    """Gradients in e5m2, and a batch, are products of codes in bfloat16."""
    recipe = dataclasses.replace(TENSOR, gradient_format="e5m2")
    operands = half(T, K), half(G, N, K), half(T, N)
    found = calls(cuda_text(functools.partial(training, recipe=recipe), *operands, SIZES))
    assert [name for name, *_ in found].count("fp8_grouped_mm") == 1
    rows, weight = f"{T}x{N}xbf16", f"{G}x{N}x{K}xbf16"
    assert ("mm", [rows, weight, f"{G}xi32", f"{T}xf32"], f"{T}x{K}xbf16") in found
    lines = [f"{N}x512xbf16", f"{K}x512xbf16"]
    assert ("wgrad", [*lines, f"{G}xi32"], f"{G}x{N}x{K}xf32") in found
    batch = [half(2, *a.shape) for a in operands]
    step = jax.vmap(functools.partial(training, recipe=TENSOR))
    names = {name for name, *_ in calls(cuda_text(step, *batch, array(2, G, dtype="int32")))}
    assert names == {"mm", "wgrad"}


@pytest.mark.parametrize("names", [("forward", "dgrad"), ("wgrad",)])
def test_products_of_a_recipe_in_bfloat16(names):
    """The products that a recipe names have bfloat16 operands; the others are as before."""
    recipe = jgg.FP8Recipe(**dict.fromkeys(names, "bfloat16"))  # pyright: ignore
    step = functools.partial(training, recipe=recipe)
    found = calls(cuda_text(step, half(T, K), half(G, N, K), half(T, N), SIZES))
    rows, weight, ct = f"{T}x{K}xbf16", f"{G}x{N}x{K}xbf16", f"{T}x{N}xbf16"
    exact = {
        "forward": ("mm", [rows, weight, f"{G}xi32"], ct),
        "dgrad": ("mm", [ct, weight, f"{G}xi32"], rows),
        "wgrad": ("wgrad", [ct, rows, f"{G}xi32"], weight),
    }
    kernels = {"forward": "fp8_grouped_mm", "dgrad": "fp8_grouped_mm", "wgrad": "fp8_grouped_wgrad"}
    others = sorted(kernel for name, kernel in kernels.items() if name not in names)
    assert sorted(call[0] for call in found if call[0].startswith("fp8")) == others
    assert sorted(call for call in found if not call[0].startswith("fp8")) == sorted(
        exact[name] for name in names
    )


def test_constant_codes_with_bfloat16_products():
    """w stays codes in the forward product; dx has them as numbers of dy's dtype."""
    recipe = jgg.FP8Recipe(forward="bfloat16", dgrad="bfloat16")

    def step(x, q, ct, sizes):
        f = lambda x: jgg.fp8_grouped_linear(x, q, sizes, recipe=recipe)
        out, vjp = jax.vjp(f, x)
        return out, *vjp(ct)

    found = calls(cuda_text(step, half(T, K), W, half(T, N), SIZES))
    weight = f"{G}x{N}x{K}xbf16"
    assert found == [("mm", [f"{T}x{N}xbf16", weight, f"{G}xi32"], f"{T}x{K}xbf16")]


# ---- where there is none -------------------------------------------------------------------------


MM_REASONS = [
    (X, fp8(G, N, K, block=TILE, dtype="float8_e5m2"), "needs codes of e4m3"),
    (fp8(T, K, block=LINE, dtype="float8_e5m2"), W, "needs codes of e4m3"),
    (X, fp8(G, N, K, block=LINE), "needs blocks of (1, 128) and (128, 128)"),
    (fp8(T, K, block=(1, 64)), W, "needs blocks of (1, 128) and (128, 128)"),
    (fp8(0, K, block=LINE), W, "an operand is empty"),
]


@pytest.mark.parametrize(("x", "w", "why"), MM_REASONS)
def test_why_no_kernel_multiplies(x, w, why):
    named = functools.partial(jgg.fp8_grouped_mm, implementation="sm90")
    with pytest.raises(ValueError, match=re.escape(f"'sm90' cannot run: {why}. Use")):
        cuda_text(named, x, w, SIZES)


WGRAD_REASONS = [
    (along_t(K, "float8_e5m2"), along_t(N), "needs codes of e4m3"),
    (along_t(K), along_t(0), "an operand is empty"),
]


@pytest.mark.parametrize(("x", "dy", "why"), WGRAD_REASONS)
def test_why_no_kernel_sums(x, dy, why):
    named = functools.partial(jgg.fp8_grouped_wgrad, implementation="sm90")
    with pytest.raises(ValueError, match=re.escape(f"'sm90' cannot run: {why}. Use")):
        cuda_text(named, x, dy, SIZES)


def test_without_a_kernel():
    """Where none is named it is composed."""
    w = fp8(G, N, K, block=LINE)
    assert calls(cuda_text(jgg.fp8_grouped_mm, X, w, SIZES)) == []
    wide = along_t(K, "float8_e5m2")
    assert calls(cuda_text(jgg.fp8_grouped_wgrad, wide, along_t(N), SIZES))[0][0] == "wgrad"


def test_what_is_added_to_is_float32():
    f = lambda x, dy, s, old: grouped_wgrad(x, dy, s, dtype=jnp.bfloat16, existing_out=old)
    text = cuda_text(f, along_t(K), along_t(N), SIZES, array(G, N, K))
    assert [call[0] for call in calls(text)] == ["wgrad"]


@pytest.mark.parametrize("capabilities", [(80,), (80, 90)])
def test_other_machines(monkeypatch, capabilities):
    """Every GPU has to be a Hopper GPU."""
    monkeypatch.setattr(extension, "live_capabilities", lambda: capabilities)
    assert calls(cuda_text(jgg.fp8_grouped_mm, X, W, SIZES)) == []
    named = functools.partial(jgg.fp8_grouped_mm, implementation="sm90")
    with pytest.raises(ValueError, match=r"'sm90' cannot run: it needs compute capability 9\.0"):
        cuda_text(named, X, W, SIZES)


def test_a_process_without_a_gpu(monkeypatch):
    """It lowers for somebody else's: only where the kernel is named."""
    monkeypatch.setattr(extension, "live_capabilities", lambda: ())
    assert calls(cuda_text(jgg.fp8_grouped_mm, X, W, SIZES)) == []
    named = functools.partial(jgg.fp8_grouped_mm, implementation="sm90")
    assert [call[0] for call in calls(cuda_text(named, X, W, SIZES))] == ["fp8_grouped_mm"]


def test_blocks_that_are_cut():
    """The last of N and K has a scale all the same."""
    x, w = fp8(T, 272, block=LINE), fp8(G, 8, 272, block=TILE)
    ((_, types, _),) = calls(cuda_text(jgg.fp8_grouped_mm, x, w, SIZES))
    assert [types[1], types[3]] == [f"{T}x3xf32", f"{G}x1x3xf32"]


@pytest.mark.parametrize(("n", "k", "pads"), [(20, 200, True), (144, 272, False)])
def test_lines_of_any_length(n, k, pads):
    """Codes are padded to whole 16 bytes, and columns of the result to 8; scales are not."""
    x, w = fp8(T, k, block=LINE), fp8(G, n, k, block=TILE)
    text = cuda_text(jgg.fp8_grouped_mm, x, w, SIZES)
    wide, lines, blocks = k + -k % 16, n + -n % 8, (-(-n // 128), -(-k // 128))
    operands = [
        f"{T}x{wide}xf8E4M3FN", f"{T}x{blocks[1]}xf32", f"{G}x{lines}x{wide}xf8E4M3FN",
        f"{G}x{blocks[0]}x{blocks[1]}xf32", f"{G}xi32",
    ]  # fmt: skip
    assert calls(text) == [("fp8_grouped_mm", operands, f"{T}x{lines}xbf16")]
    assert ("stablehlo.pad" in text) == ("stablehlo.slice" in text) == pads
    assert jax.eval_shape(jgg.fp8_grouped_mm, x, w, SIZES).shape == (T, n)


@pytest.mark.parametrize("existing", [False, True])
def test_lines_of_sums_of_any_length(existing):
    """Those of x, its scales, the result and what it is added to."""
    old = array(G, N, 20) if existing else None
    f = lambda x, dy, s, old: jgg.fp8_grouped_wgrad(x, dy, s, existing_out=old)
    text = cuda_text(f, along_t(20), along_t(N), SIZES, old)
    out = f"{G}x{N}x24xf32"
    operands = [*LINES[:2], "24x512xf8E4M3FN", "4x24xf32", LINES[4]]
    assert calls(text) == [("fp8_grouped_wgrad", operands + [out] * existing, out)]
    assert re.search(rf"slice .* -> tensor<{G}x{N}x20xf32>", text)


def test_training_of_any_lengths():
    """dx and dw too have lengths that are padded."""
    found = calls(cuda_text(training, half(T, 200), half(G, 20, 200), half(T, 20), SIZES))
    assert sorted((name, types[0], types[2], out) for name, types, out in found) == sorted([
        ("fp8_grouped_mm", f"{T}x208xf8E4M3FN", f"{G}x24x208xf8E4M3FN", f"{T}x24xbf16"),
        ("fp8_grouped_mm", f"{T}x32xf8E4M3FN", f"{G}x200x32xf8E4M3FN", f"{T}x200xbf16"),
        ("fp8_grouped_wgrad", "20x512xf8E4M3FN", "200x512xf8E4M3FN", f"{G}x20x200xbf16"),
    ])  # fmt: skip


def test_export(rng):
    """One module for both platforms; its derivatives are exported with it."""
    shapes = (T, K), (G, N, K), (G, N), (T, N)
    x, w, bias, ct = (oracle.random(rng, s, "bfloat16") for s in shapes)
    sizes = jnp.array([40, 0, 90])
    layer = jax.jit(lambda x, w, bias: jgg.fp8_grouped_linear(x, w, sizes, bias=bias))
    exported = jax.export.export(
        layer, platforms=["cpu", "cuda"], disabled_checks=jgg.EXPORT_DISABLED_CHECKS
    )(x, w, bias)
    derivatives = exported.vjp()
    for module, names in ((exported, FORWARD), (derivatives, BACKWARD)):
        assert set(re.findall(r"@(jgg_fp8_\w+)\(", module.mlir_module())) == names

    def run(f, *args):
        out, pull = jax.vjp(f, *args)
        return out, *pull(ct)

    loaded = jax.export.deserialize(exported.serialize(vjp_order=1)).call
    quick = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    got, want = (quick(functools.partial(run, f))(x, w, bias) for f in (loaded, layer))
    for one, other in zip(got, want, strict=True):
        assert one.dtype == jnp.bfloat16
        oracle.assert_close(one, other)


FORWARD = {"jgg_fp8_quantize", "jgg_fp8_grouped_mm"}
BACKWARD = {*FORWARD, "jgg_fp8_grouped_wgrad"}
