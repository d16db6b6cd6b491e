"""A small set of cases for compute-sanitizer, through the kernels:

compute-sanitizer --tool memcheck python tests/sanitize.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import oracle

import jax_groupgemm as jgg


def main():
    rng = np.random.default_rng(0)
    for dtype in ("float32", "bfloat16", "float16"):
        for t, k, n, sizes in (
            (129, 33, 65, [0, 1, 127]),
            (64, 16, 64, [64, 0, 0]),
            (7, 1, 1, [9]),
        ):
            x, w = oracle.random(rng, (t, k), dtype), oracle.random(rng, (len(sizes), k, n), dtype)
            f = lambda x, w, s=sizes: jgg.grouped_mm(x, w, jnp.array(s))
            out, vjp = jax.vjp(f, x, w)
            oracle.assert_close(out, oracle.grouped_mm(x, w, sizes))
            jax.block_until_ready(vjp(out))
        a = oracle.random(rng, (37, 100), dtype)
        segments = jnp.array([[0, 40], [30, 71], [99, 100], [50, 20], [-3, 200]])
        out, vjp = jax.vjp(lambda a, s=segments: jgg.segmented_mm(a, a.T, s), a)
        oracle.assert_close(out, oracle.segmented_mm(a, a.T, segments))
        jax.block_until_ready(vjp(out))
    print("sanitize: all cases right")


if __name__ == "__main__":
    main()
