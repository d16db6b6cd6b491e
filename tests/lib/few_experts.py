"""A few tokens' experts in numpy, for the tests of their kernels on the host."""

import numpy as np
import oracle


def wanted(x, up, down, index, weight, *, gated=True, offset=0, biases=(None, None)):
    """Activations (T * k, F), 7 where there are none, and the result, of up (E, D, 2F) and down
    (E, F, D): in float64, but for the two roundings to x's dtype."""
    rounded = lambda a: a.astype(x.dtype).astype(np.float64)
    (tokens, k), (experts, f, d) = index.shape, down.shape
    a, out = np.full((tokens * k, f), 7.0), np.zeros((tokens, d))
    for t, j in np.ndindex(tokens, k):
        e = int(index[t, j]) - offset
        if not 0 <= e < experts:
            continue
        h = oracle.f64(x[t]) @ oracle.f64(up[e]) + (0 if biases[0] is None else biases[0][e])
        gate, value = np.split(rounded(h), 2) if gated else (rounded(h), None)
        act = gate / (1 + np.exp(-gate)) * value if gated else np.maximum(gate, 0)
        a[t * k + j] = rounded(act)
        y = a[t * k + j] @ oracle.f64(down[e]) + (0 if biases[1] is None else biases[1][e])
        out[t] += weight[t, j] * y
    return a, out


def check(got, want):
    for g, w in zip(got, want, strict=True):
        g = oracle.f64(g)
        # An activation may be rounded the other way where sums differ.
        assert np.linalg.norm(g - w) <= 1e-3 * np.linalg.norm(w)
        assert ((w == 7) == (g == 7)).all()
