"""FP8 products on Hopper's tensor cores, against float64 products of what operands stand for."""

import functools

import fp8_oracle
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from oracle import error

import jax_groupgemm as jgg

pytestmark = pytest.mark.gpu

CONTRACT = 2e-4  # of quantized normal data
POSITIVE = 1.5e-3
CODES = 3e-4  # of codes that are all equally likely: most of a sum is in few of its products
SIZES = {
    "around tiles": [128, 129, 127, 0, 255, 256, 257, 384, 1],
    "few of some": [0, 1, 7, 8, 9, 0, 64, 65, 1500],
    "all in one": [0, 0, 2001, 0],
    "many": [130 + 7 * i % 100 for i in range(20)],
}
CASES = pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)


def random_fp8(seed, shape, block, **more):
    """Any codes, and scales that differ; none of them NaN."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, shape).astype(np.uint8)
    codes = np.where(codes & 0x7C == 0x7C, codes & 0x83, codes)
    blocks = [*shape[:-2], *(-(-n // size) for n, size in zip(shape[-2:], block, strict=True))]
    scales = jnp.asarray(rng.uniform(0.5, 2, blocks) / 100, jnp.float32)
    codes = jax.lax.bitcast_convert_type(jnp.asarray(codes), jnp.float8_e4m3fn)
    return jgg.Quantized(codes, scales, mode="fp8", bits=8, group_size=None, block=block, **more)  # pyright: ignore


def run_kernel(f, target, *args):
    call = jax.jit(f)
    assert target in call.lower(*args).as_text()
    out = call(*args)
    for _ in range(3):
        assert (np.asarray(call(*args)) == np.asarray(out)).all()
    return out


@CASES
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("n", "k"), [(256, 128), (577, 1040), (8, 17), (1001, 511), (2048, 144)])
def test_grouped_mm(sizes, n, k, dtype):
    rows, groups = sum(sizes) + 33, len(sizes)
    x, w = random_fp8(1, (rows, k), (1, 128)), random_fp8(2, (groups, n, k), (128, 128))
    f = functools.partial(jgg.fp8_grouped_mm, preferred_element_type=dtype)
    got = run_kernel(f, "jgg_fp8_grouped_mm", x, w, jnp.asarray(sizes))
    values = fp8_oracle.values(x), fp8_oracle.values(w)
    want = oracle.grouped_mm(*values, sizes, transpose_w=True)
    rounding = {"float32": 0, "bfloat16": 2**-9, "float16": 2**-12}[dtype]
    assert error(got, want) <= CODES + rounding
    assert not np.asarray(got)[sum(sizes) :].any()


@pytest.mark.parametrize("k", [128, 2048, 7168, 16384])
def test_contract(k):
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), "bfloat16")
    x = jgg.fp8_quantize(draw(512, k))
    w = jgg.fp8_quantize(draw(2, 256, k), block=(128, 128))
    f = functools.partial(jgg.fp8_grouped_mm, preferred_element_type="float32")
    got = run_kernel(f, "jgg_fp8_grouped_mm", x, w, jnp.asarray([200, 312]))
    values = fp8_oracle.values(x), fp8_oracle.values(w)
    assert error(got, oracle.grouped_mm(*values, [200, 312], transpose_w=True)) <= CONTRACT


def test_promotion_matters():
    """Tensor cores cut each addition off at about 14 bits, which sums of positive numbers feel:
    the more, the longer they are. Promoted every 128 k, they are as good at any length."""
    errors = []
    for k in (256, 16384):
        x, w = random_fp8(3, (256, k), (1, 128)), random_fp8(4, (1, 256, k), (128, 128))
        x, w = magnitudes(x), magnitudes(w)
        f = functools.partial(jgg.fp8_grouped_mm, preferred_element_type="float32")
        got = run_kernel(f, "jgg_fp8_grouped_mm", x, w, jnp.asarray([256]))
        values = fp8_oracle.values(x), fp8_oracle.values(w)
        errors.append(error(got, oracle.grouped_mm(*values, [256], transpose_w=True)))
    assert max(errors) <= POSITIVE
    assert errors[1] <= 1.2 * errors[0]


def magnitudes(q):
    """The same with magnitudes of codes."""
    codes = jax.lax.bitcast_convert_type(q.weight, jnp.uint8) & 0x7F
    codes = jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
    return jgg.Quantized(codes, q.scales, mode="fp8", bits=8, group_size=None, block=q.block)  # pyright: ignore


def test_nan_stays_in_its_rows():
    sizes = SIZES["around tiles"]
    x = random_fp8(1, (sum(sizes), 512), (1, 128))
    w = random_fp8(2, (len(sizes), 256, 512), (128, 128))
    f = jax.jit(jgg.fp8_grouped_mm)
    want = np.asarray(f(x, w, jnp.asarray(sizes)))
    bad = jgg.Quantized(
        x.weight, x.scales.at[300, 1].set(jnp.nan), mode="fp8", bits=8, group_size=None,
        block=x.block,
    )  # fmt: skip  # pyright: ignore
    got = np.asarray(f(bad, w, jnp.asarray(sizes)))
    others = np.arange(len(got)) != 300
    assert (got[others] == want[others]).all()
    assert np.isnan(np.float32(got[300])).all()


@CASES
@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize(("n", "k"), [(128, 256), (577, 1041), (24, 8), (1000, 512)])
def test_grouped_wgrad(sizes, n, k, existing):
    rng = np.random.default_rng(0)
    rows, group_sizes = sum(sizes) + 33, jnp.asarray(sizes)
    draw = lambda c: jnp.asarray(rng.normal(size=(rows, c)), "bfloat16")
    quantize = functools.partial(jgg.fp8_quantize, axis=0, group_sizes=group_sizes)
    x, dy = quantize(draw(k)), quantize(draw(n))
    old = jnp.asarray(rng.normal(size=(len(sizes), n, k)), jnp.float32) if existing else None
    f = lambda x, dy, old: jgg.fp8_grouped_wgrad(x, dy, group_sizes, existing_out=old)
    got = run_kernel(f, "jgg_fp8_grouped_wgrad", x, dy, old)
    values = [np.float64(jgg.dequantize(q, jnp.float32)) for q in (dy, x)]
    want = np.zeros((len(sizes), n, k))
    for g, (first, last) in enumerate(oracle.bounds(sizes, rows)):
        want[g] = values[0][first:last].T @ values[1][first:last]
    if existing:
        want = want + np.float64(old)
    assert error(got, want) <= CONTRACT
    empty = np.asarray(sizes) == 0
    expected = np.zeros_like(got) if old is None else np.asarray(old)
    assert (np.asarray(got)[empty] == expected[empty]).all()


def test_training():
    """All three products are kernels, and gradients are those of the composition."""
    rng = np.random.default_rng(0)
    sizes = jnp.asarray([300, 0, 213, 511])
    x = jnp.asarray(rng.normal(size=(1024, 384)), "bfloat16")
    w = jnp.asarray(rng.normal(size=(4, 256, 384)) / 20, "bfloat16")

    def loss(x, w):
        return (jgg.fp8_grouped_linear(x, w, sizes).astype("float32") ** 2).sum()

    step = jax.jit(jax.value_and_grad(loss, (0, 1)))
    text = step.lower(x, w).as_text()
    assert text.count("custom_call @jgg_fp8_grouped_mm") == 2
    assert text.count("custom_call @jgg_fp8_grouped_wgrad") == 1
    value, grads = step(x, w)
    exact = jax.jit(
        jax.value_and_grad(
            lambda x, w: (
                jgg.grouped_mm(x, w, sizes, transpose_w=True).astype("float32") ** 2
            ).sum(),
            (0, 1),
        )
    )(x, w)
    assert abs(value - exact[0]) <= 2e-2 * exact[0]
    for one, other in zip(grads, exact[1], strict=True):
        assert error(one, other) <= 6e-2
