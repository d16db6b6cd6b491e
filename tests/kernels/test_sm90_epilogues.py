"""Epilogues and results of other dtypes, in the Hopper kernel."""

import functools
import itertools

import jax
import jax.numpy as jnp
import moe_oracle
import numpy as np
import oracle
import pytest
from device_runs import (
    assert_on_sm90,
    needs_hopper,
    run,
)
from test_grouped_mm import epilogue_oracle
from test_sm90 import SUMS, ragged_k

import jax_groupgemm as jgg

pytestmark = [
    pytest.mark.gpu,
    needs_hopper,
]


@pytest.mark.parametrize("given", [(), ("bias",), ("bias", "row_scale"), ("existing_out",)])
@pytest.mark.parametrize("activation", [None, "silu", "swiglu", "geglu"])
@pytest.mark.parametrize("mean", [12, 200])
def test_epilogue(rng, activation, mean, given):
    """A kernel may go another way without an existing result, or without a scale."""
    sizes = np.append(rng.integers(0, 2 * mean, 7), 0)
    t, k, n = int(sizes.sum()) + 5, 72, 272
    x, w = oracle.random(rng, (t, k), "bfloat16"), oracle.random(rng, (8, k, n), "bfloat16") / 8
    columns = n // 2 if activation in moe_oracle.GATED else n
    options = {
        "bias": oracle.random(rng, (8, n), "bfloat16"),
        "row_scale": oracle.random(rng, (t,)),
        "existing_out": oracle.random(rng, (t, columns)),
    }
    options = {name: options[name] for name in given}
    got, want = (
        jax.jit(
            lambda x, w, s, o, i=i: jgg.grouped_mm(
                x, w, s, activation=activation, preferred_element_type="float32",
                implementation=i, **o,
            )
        )(x, w, jnp.asarray(sizes, jnp.int32), options)
        for i in ("sm90", "reference")
    )  # fmt: skip
    oracle.assert_close(got, want, tolerance=SUMS)


OPTIONS = ("bias", "row_scale", "existing_out")


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("bfloat16", None), ("float16", None), ("float32", 2e-6)]
)
def test_every_epilogue(rng, dtype, tolerance):
    """Every activation with all options, in the operands' dtype, and every option alone, in
    float32; either layout of w, few rows and many. Of planes there is no gated activation."""
    activations = [None, *moe_oracle.ACTIVATIONS]
    activations += [] if dtype == "float32" else moe_oracle.GATED
    cases = [(activation, OPTIONS, dtype) for activation in activations]
    cases += [(activation, OPTIONS[:2], dtype) for activation in activations]
    cases += [(None, (option,), "float32") for option in OPTIONS]
    functions, operands, wants = [], [], []
    many = 700 if dtype == "float32" else 200
    for mean in (12, many):
        sizes = np.append(rng.integers(0, 2 * mean, 7), 0).astype(np.int32)
        t, k, n = int(sizes.sum()) + 5, 72, 272
        x, w = oracle.host_random(rng, (t, k), dtype), oracle.host_random(rng, (8, k, n), dtype)
        w = w / w.dtype.type(8)
        for transpose_w, (activation, given, result) in itertools.product((False, True), cases):
            shape = (t, n // 2 if activation in moe_oracle.GATED else n)
            every = {
                "bias": oracle.host_random(rng, (8, n), dtype),
                "row_scale": oracle.host_random(rng, (t,), "float32"),
                "existing_out": oracle.host_random(rng, shape, result),
            }
            options = {name: every[name] for name in given}
            nothing = {"bias": np.zeros((8, n)), "row_scale": np.ones(t), "existing_out": 0}
            bias, scale, old = (nothing | options).values()
            wants.append(epilogue_oracle(x, w, sizes, bias, activation, scale, old))
            functions.append(functools.partial(
                jgg.grouped_mm, transpose_w=transpose_w, activation=activation,
                preferred_element_type=result, implementation="sm90",
            ))  # fmt: skip
            stored = w.swapaxes(1, 2) if transpose_w else w
            operands.append(((x, stored, sizes), options))
    f = lambda operands: [
        f(*args, **options) for f, (args, options) in zip(functions, operands, strict=True)
    ]
    out, kernels = run(jax.jit(f), operands)
    assert_on_sm90(kernels, len(wants))
    for got, want, (_, options) in zip(out, wants, operands, strict=True):
        wide = got.dtype == "float32" and dtype != "float32"
        oracle.assert_close(got, want, tolerance=SUMS if wide else tolerance)
        tail = options.get("existing_out", np.zeros(got.shape))[-5:]
        np.testing.assert_array_equal(oracle.f64(got)[-5:], oracle.f64(tail))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_float16_results(rng, dtype):
    """Of other operands, from tiles of every size, of rows and along k."""
    same = {"preferred_element_type": "float16", "implementation": "sm90"}
    problems, wants = [], []
    for mean in (8, 30, 90, 150, 260):
        sizes = rng.multinomial(9 * mean, [0, *np.ones(8) / 8])
        x, w = (
            oracle.host_random(rng, shape, dtype) for shape in ((9 * mean + 5, 72), (9, 72, 264))
        )
        problems.append((x, w, sizes))
        wants.append(oracle.grouped_mm(x, w, sizes))
    sizes = ragged_k(rng)
    ends = np.cumsum(sizes)
    spans = np.stack([ends - sizes, ends], 1).astype(np.int32)
    rows = -(-int(ends[-1]) // 8) * 8
    a, b = oracle.host_random(rng, (rows, 136), dtype), oracle.host_random(rng, (rows, 200), dtype)

    def f(problems, a, b, spans):
        return [jgg.grouped_mm(*problem, **same) for problem in problems] + [
            jgg.segmented_mm(a, b, part, transpose_a=True, **same) for part in (spans[:9], spans)
        ]

    out, kernels = run(jax.jit(f), problems, a, b, spans)
    assert_on_sm90(kernels, len(out))
    sums = oracle.segmented_mm(a.T, b, spans)
    for got, want in zip(out, [*wants, sums[:9], sums], strict=True):
        assert got.dtype == "float16"
        oracle.assert_close(got, want)
