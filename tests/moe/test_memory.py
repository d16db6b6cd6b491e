"""What the layer keeps between forward and backward, and what it makes room for."""

import functools

import jax
import jax.numpy as jnp
import pytest

import jax_groupgemm as jgg

T, D, F, E, K = 40, 96, 80, 4, 3
R = T * K


def operands(tokens=T, d=D, f=F, experts=E, k=K, dtype="bfloat16"):
    """x, up, down, expert_index, expert_weight and the cotangent of the result."""
    shape = jax.ShapeDtypeStruct
    return (
        shape((tokens, d), dtype), shape((experts, d, 2 * f), dtype), shape((experts, f, d), dtype),
        shape((tokens, k), "int32"), shape((tokens, k), "float32"), shape((tokens, d), dtype),
    )  # fmt: skip


def room(step, args) -> int:
    """Bytes of the compiled program's temporaries."""
    return jax.jit(step).lower(*args).compile().memory_analysis().temp_size_in_bytes


def kept(**options) -> list[jax.ShapeDtypeStruct]:
    """Arrays that reverse mode holds between its two passes."""
    x, up, down, index, weight, _ = operands()

    def pull(x, up, down, index, weight):
        layer = lambda x, up, down, weight: jgg.moe_mlp(x, up, down, index, weight, **options)
        return jax.vjp(layer, x, up, down, weight)[1]

    return jax.tree.leaves(jax.eval_shape(pull, x, up, down, index, weight))


@pytest.mark.parametrize("recipe", [None, jgg.FP8Recipe()])
@pytest.mark.parametrize("activation", ["swiglu", "swiglu_oai", "geglu"])
def test_h_is_all_of_r_rows(recipe, activation):
    """No copy of tokens, no activation, no row of the result, nothing in float32."""
    leaves = kept(recipe=recipe, activation=activation)
    rows = [a for a in leaves if R in a.shape and a.ndim > 1]
    assert [(a.shape, a.dtype) for a in rows] == [((R, 2 * F), jnp.bfloat16)]
    of_weights = [a for a in leaves if a.shape[:1] == (E,) and a.ndim > 1]
    of_pairs = [a for a in leaves if a.shape == (T, K)]
    tokens = [a for a in leaves if a.shape == (T, D)]
    assert len(tokens) == 1
    size = lambda arrays: sum(a.size * a.dtype.itemsize for a in arrays)
    rest = size(leaves) - size(rows) - size(of_weights) - size(tokens)
    assert size(of_pairs) > 0
    assert rest <= 16 * R + 4 * (E + 2)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("activation", "halves"), [("swiglu", 2), ("gelu", 1)])
def test_room_on_cpu(activation, halves, biased):
    """h, dh, the activation and its cotangent, the rows of y or of dx, and eight numbers of each
    pair. In float32, as XLA makes float32 copies of bfloat16. The composition of public operations
    takes more. Biases take the rows of the result's cotangent, and h without its bias."""
    tokens, d, f, experts, k = 512, 128, 96, 8, 4
    x, _, *others = operands(tokens, d, f, experts, k, "float32")
    up = jax.ShapeDtypeStruct((experts, d, halves * f), "float32")

    def training(implementation, x, up, down, index, weight, ct):
        def layer(x, up, down, weight):
            options = {"activation": activation, "implementation": implementation}
            if biased:
                of = lambda w: jnp.ones((experts, w.shape[2]))
                options |= {"up_bias": of(up), "down_bias": of(down)}
            return jgg.moe_mlp(x, up, down, index, weight, **options)

        out, pull = jax.vjp(layer, x, up, down, weight)
        return pull(out * ct)  # backward follows forward

    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        taken, composed = (
            room(functools.partial(training, name), (x, up, *others)) for name in (None, "composed")
        )
    most = 4 * tokens * k * (2 * halves * f + 2 * f + d + 8 + biased * (d + halves * f))
    assert taken <= most < composed


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [None, jgg.FP8Recipe()])
def test_room_for_both_passes(recipe):
    """h, the activation and the rows of dx, or less; dh takes the place of h, but not its codes."""
    tokens, d, f, experts, k = 8192, 2048, 768, 16, 8

    def both(x, up, down, index, weight, ct):
        layer = lambda x, up, down, weight: jgg.moe_mlp(x, up, down, index, weight, recipe=recipe)
        out, pull = jax.vjp(layer, x, up, down, weight)
        return out, pull(ct)

    fp8 = recipe is not None
    codes = 2 * 3 * experts * d * f if fp8 else 0  # of weights, also transposed
    taken = room(both, operands(tokens, d, f, experts, k))
    assert taken <= 2 * tokens * k * (2 * f + (2 * f if fp8 else 0) + f + d) + codes + 2**24
