"""The layer of ``moe_mlp`` in float64 numpy, pair by pair, with all of its gradients."""

import math

import numpy as np
from oracle import f64


def silu(a):
    return a / (1 + np.exp(-a))


def gelu(a):
    return 0.5 * a * (1 + np.tanh(np.sqrt(2 / np.pi) * (a + 0.044715 * a**3)))


def relu(a):
    return a * (a.real > 0)


def gelu_erf(a):
    """Its imaginary part is that of the derivative, at a step that is tiny."""
    erf = np.array([math.erf(v / math.sqrt(2)) for v in a.real.flat]).reshape(a.shape)
    slope = 0.5 * (1 + erf) + a.real * np.exp(-(a.real**2) / 2) / np.sqrt(2 * np.pi)
    return (
        0.5 * a.real * (1 + erf) + 1j * a.imag * slope
        if np.iscomplexobj(a)
        else 0.5 * a * (1 + erf)
    )


def swiglu_oai(gate, up):
    gate = np.where(gate.real > 7, 7, gate)
    up = np.where(abs(up.real) > 7, 7 * np.sign(up.real), up)
    return (up + 1) * gate / (1 + np.exp(-1.702 * gate))


ACTIVATIONS = {
    "silu": silu, "gelu": gelu, "gelu_erf": gelu_erf, "relu": relu, "relu2": lambda a: relu(a) ** 2,
    "tanh": np.tanh,
}  # fmt: skip
GATED = {
    "swiglu": lambda g, u: silu(g) * u,
    "geglu": lambda g, u: gelu(g) * u,
    "reglu": lambda g, u: relu(g) * u,
    "swiglu_oai": swiglu_oai,
}
#: Their derivatives jump.
KINKED = {"relu", "relu2", "reglu", "swiglu_oai"}
#: As error messages list them.
NAMES = ", ".join(map(repr, (*ACTIVATIONS, *GATED)))


def activate(y, activation):
    """``y`` (..., N) after its activation, or none."""
    if activation in GATED:
        return GATED[activation](*np.split(y, 2, axis=-1))
    return y if activation is None else ACTIVATIONS[activation](y)


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
            a = activate(h, activation)
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
                of, (gate, value) = GATED[activation], np.split(h, 2)
                dgate = derivative(lambda g, v=value, of=of: of(g, v), gate)
                dvalue = derivative(lambda v, g=gate, of=of: of(g, v), value)
                dh = np.concatenate([dgate * da, dvalue * da])
            else:
                dh = derivative(ACTIVATIONS[activation], h) * da
            db_up[e] += dh
            dup[e] += np.outer(x[t], dh)
            dx[t] += up[e] @ dh
    return y if ct is None else (y, grads)
