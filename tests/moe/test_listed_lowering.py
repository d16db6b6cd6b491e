"""What the experts are lowered to for a machine with a Hopper GPU: where tokens come by list, and
where their rows are copied first."""

import re

import jax
import jax.numpy as jnp
import pytest
from test_moe_lowering import array, cuda_text, names

import jax_groupgemm as jgg
from jax_groupgemm._kernels import extension

pytestmark = pytest.mark.usefixtures("hopper")

# 300 rows of each expert.
T, K, E, D, F = 400, 3, 4, 192, 256
ROWS = T * K


def layer(*, t=T, d=D, f=F, dtype="bfloat16", transpose_w=False, activation="swiglu"):
    """A layer, and the types of x, up, down, index and weight."""
    stored = lambda a, b: array(E, *((b, a) if transpose_w else (a, b)), dtype=dtype)
    run = lambda x, up, down, index, weight: jgg.moe_mlp(
        x, up, down, index, weight, transpose_w=transpose_w, activation=activation
    )
    index, weight = array(t, K, dtype="int32"), array(t, K, dtype="float32")
    return run, (array(t, d, dtype=dtype), stored(d, 2 * f), stored(f, d), index, weight)


def gradient(run):
    """Of everything but the index."""
    loss = lambda *args: jnp.sin(run(*args).astype("float32")).sum()
    return jax.grad(loss, (0, 1, 2, 4), allow_int=True)


def products(text: str) -> list[tuple[str, list[str]]]:
    """Of each product its target, with the operand that comes by list, and its operands' types."""
    found = []
    for line in text.splitlines():
        if name := re.search(r"custom_call @jgg_(\w*mm|wgrad|moe_down_backward)\(", line):
            lists = re.findall(r"([xy])_rows = true", line)
            operands, _ = line.rsplit(" : (", 1)[1].split(" -> ")
            types = re.findall(r"tensor<([^>]*)>", operands)
            found.append((" ".join([name[1], *lists]), types))
    return found


def kinds(run, args) -> list[str]:
    """Of the gradient: two products forward, and backward what gives the activation's cotangent,
    those of both weights, and that of rows."""
    return [name for name, _ in products(cuda_text(gradient(run), *args))]


def test_forward():
    """The first product takes the tokens and their list: no row is copied."""
    run, args = layer()
    assert names(run, *args) == ["jgg_moe_route", "jgg_mm", "jgg_mm", "jgg_moe_combine"]
    text = cuda_text(run, *args)
    (up, types), (down, _) = products(text)
    assert (up, down) == ("mm x", "mm")
    assert types == [f"{T}x{D}xbf16", f"{E}x{D}x{2 * F}xbf16", f"{E}xi32", f"{ROWS}xi32"]
    assert " preactivation = true" not in text


@pytest.mark.parametrize("transpose_w", [False, True])
def test_backward(transpose_w):
    """x and the cotangent, both of tokens, come by list; so the only rows are the kernels' own."""
    run, args = layer(transpose_w=transpose_w)
    text = cuda_text(gradient(run), *args)
    found = products(text)
    x, rows, a, dh = (
        f"{n}x{columns}xbf16" for n, columns in ((T, D), (ROWS, D), (ROWS, F), (ROWS, 2 * F))
    )
    index, sizes = f"{ROWS}xi32", f"{E}xi32"
    assert [name for name, _ in found] == [
        "mm x", "mm", "moe_down_backward", *[f"wgrad {c}" for c in ("xy" if transpose_w else "yx")],
        "mm",
    ]  # fmt: skip
    assert text.count(" preactivation = true") == 1
    down = f"{E}x{D}x{F}xbf16" if transpose_w else f"{E}x{F}x{D}xbf16"
    assert found[2][1] == [x, down, sizes, index, dh, f"{ROWS}xf32"]
    first, second = ([x, a], [dh, x]) if transpose_w else ([a, x], [x, dh])
    assert [types for _, types in found[3:5]] == [[*first, sizes, index], [*second, sizes, index]]
    assert found[5][1][0] == dh
    assert "jgg_moe_dispatch" not in text
    assert all(rows not in types for _, types in found)
    # Sums of 16 columns each, of a weight's cotangent.
    assert f"tensor<{F // 16}x{ROWS}xf32>" in text


def test_backward_of_another_activation():
    """There is no kernel for its derivative; the cotangent's rows come out of a product by list."""
    run, args = layer(activation="geglu")
    assert kinds(run, args) == ["mm x", "mm", "mm x", "wgrad y", "wgrad x", "mm"]


LISTED = ["mm x", "mm", "moe_down_backward", "wgrad y", "wgrad x", "mm"]
COPIED = ["mm", "mm", "mm", "wgrad", "wgrad", "mm"]
WHERE_NOT = {
    "float32": ({"dtype": "float32"}, COPIED),
    "few rows": ({"t": 120}, ["mm", "mm", "mm", "wgrad y", "wgrad x", "mm"]),
    # Both products of a row have to be narrow enough for a list to pay.
    "many columns": ({"f": 1032}, COPIED),
    "many columns backward": ({"f": 1008}, ["mm x", *COPIED[1:]]),
    "many columns of up": ({"f": 520}, [*LISTED[:3], "wgrad y", "wgrad", "mm"]),
    "one tile of tokens": ({"d": 120}, [*LISTED[:3], "wgrad", "wgrad", "mm"]),
}  # fmt: skip


@pytest.mark.parametrize("name", WHERE_NOT)
def test_where_rows_are_copied(name):
    options, want = WHERE_NOT[name]
    run, args = layer(**options)
    assert kinds(run, args) == want


@pytest.mark.parametrize("capabilities", [(80,), (80, 90)])
def test_other_machines(monkeypatch, capabilities):
    """Every GPU has to be a Hopper GPU."""
    monkeypatch.setattr(extension, "live_capabilities", lambda: capabilities)
    assert kinds(*layer()) == COPIED


def test_quantized_weights():
    """Their products take rows, forward and backward, and so do those of scales' gradients."""
    quantize = lambda *shape: jax.eval_shape(
        lambda w: jgg.quantize(w, contract=-1), array(E, *shape)
    )
    run, (x, _, _, index, weight) = layer(transpose_w=True)
    args = x, quantize(2 * F, D), quantize(D, F), index, weight
    found = kinds(run, args)
    assert set(found) == {"qmm", "wgrad"}
    assert found.count("wgrad") == 2
    assert names(run, *args)[1] == "jgg_moe_dispatch"
