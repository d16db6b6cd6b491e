"""The layer of ``moe_mlp`` in float64 numpy, pair by pair, with all of its gradients."""

import numpy as np
from oracle import f64


def silu(a):
    return a / (1 + np.exp(-a))


def gelu(a):
    return 0.5 * a * (1 + np.tanh(np.sqrt(2 / np.pi) * (a + 0.044715 * a**3)))


def relu(a):
    return a * (a.real > 0)


ACTIVATIONS = {"silu": silu, "gelu": gelu, "relu": relu, "tanh": np.tanh}
GATED = {"swiglu": silu, "geglu": gelu}


def derivative(function, a):
    """Exact to rounding: the step is imaginary."""
    return function(a + 1e-30j).imag / 1e-30


def moe_mlp(x, up, down, index, weight, ct=None, *, activation="swiglu", up_bias=None,
            down_bias=None, offset=0):  # fmt: skip
    """y, and with ``ct`` the gradients of x, up, down, weight, up_bias and down_bias.

    up is (E, D, F or 2F), down (E, F, D).
    """
    x, up, down, weight = map(f64, (x, up, down, weight))
    experts = len(up)
    b_up = np.zeros((experts, up.shape[2])) if up_bias is None else f64(up_bias)
    b_down = np.zeros((experts, down.shape[2])) if down_bias is None else f64(down_bias)
    y = np.zeros((len(x), down.shape[2]))
    grads = [np.zeros_like(a) for a in (x, up, down, weight, b_up, b_down)]
    dx, dup, ddown, dweight, db_up, db_down = grads
    for t, row in enumerate(np.asarray(index)):
        for j, expert in enumerate(row):
            e = int(expert) - offset
            if not 0 <= e < experts:
                continue
            h = x[t] @ up[e] + b_up[e]
            if activation in GATED:
                gate, value = np.split(h, 2)
                a = GATED[activation](gate) * value
            else:
                a = ACTIVATIONS[activation](h)
            out = a @ down[e] + b_down[e]
            y[t] += weight[t, j] * out
            if ct is None:
                continue
            dweight[t, j] = ct[t] @ out
            dout = weight[t, j] * f64(ct)[t]
            db_down[e] += dout
            ddown[e] += np.outer(a, dout)
            da = down[e] @ dout
            if activation in GATED:
                of = GATED[activation]
                dh = np.concatenate([derivative(of, gate) * value * da, of(gate) * da])
            else:
                dh = derivative(ACTIVATIONS[activation], h) * da
            db_up[e] += dh
            dup[e] += np.outer(x[t], dh)
            dx[t] += up[e] @ dh
    return y if ct is None else (y, grads)
