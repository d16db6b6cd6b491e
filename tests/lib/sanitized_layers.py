"""Parts of sanitize.py: layers of experts, FP8 products, adapters, and products of few rows."""

import functools
import itertools

import jax
import jax.numpy as jnp
import oracle

import jax_groupgemm as jgg


def layer(rng, tokens, d, f, **options):
    """A layer behind its router and all gradients, with an expert of no rows and rows of none."""
    x, ct = (oracle.random(rng, (tokens, d), "bfloat16") for _ in range(2))
    up, down = (oracle.random(rng, (5, *s), "bfloat16") for s in ((d, 2 * f), (f, d)))
    logits = oracle.random(rng, (tokens, 4), "bfloat16")
    exists = jnp.asarray(rng.random(tokens) < 0.9)

    @jax.jit
    def step(x, up, down, logits):
        def run(x, up, down, logits):
            choice = jgg.router.choose(logits, 2, where=exists)
            return jgg.moe_mlp(x, up, down, choice.expert, choice.weight, **options)

        out, pull = jax.vjp(run, x, up, down, logits)
        return out, pull(ct)

    jax.block_until_ready(step(x, up, down, logits))


def experts(rng):
    """Rows of tokens by list, and copied; many, and fewer than lists are for."""
    for tokens, d, f in ((700, 512, 256), (700, 1536, 1280), (40, 512, 256)):
        layer(rng, tokens, d, f)


def router(rng):
    """Choices of every size of a warp's part, NaN among the scores, and gradients."""
    options = (
        {},
        {"scores": "sigmoid"},
        {"renormalize": False},
        {"scores": "sigmoid", "groups": 4, "top_groups": 2},
    )
    for tokens, experts in ((1, 8), (7, 60), (130, 256), (64, 1000)):
        logits = oracle.random(rng, (tokens, experts), "bfloat16").at[0, 3].set(jnp.nan)
        for biased, option in itertools.product((False, True), options):
            bias = oracle.random(rng, (experts,), "float32") if biased else None
            choose = functools.partial(jgg.router.choose, top_k=4, bias=bias, **option)
            loss = lambda logits, choose=choose: choose(logits).weight.sum()
            jax.block_until_ready(jax.jit(choose)(logits))
            jax.block_until_ready(jax.jit(jax.grad(loss))(logits))


def few_tokens_router(rng):
    """Either way that w is stored, dtypes, d that leaves blocks nothing, one and several tokens of
    a cluster."""
    for tokens, d, experts in ((1, 8, 8), (5, 1000, 60), (21, 2048, 128), (128, 328, 512)):
        for x_dtype, w_dtype in (("bfloat16", "float32"), ("float32", "bfloat16")):
            x = oracle.random(rng, (tokens, d), x_dtype).at[0, 3].set(jnp.nan)
            w, bias = oracle.random(rng, (d, experts), w_dtype), oracle.random(rng, (experts,))
            for transpose_w in (False, True):
                f = functools.partial(
                    jgg.router.choose_for, top_k=4, transpose_w=transpose_w, logit_bias=bias
                )
                jax.block_until_ready(jax.jit(f)(x, w.T if transpose_w else w))


def fp8_experts(rng):
    for key in (None, jax.random.key(1)):
        layer(rng, 200, 512, 256, recipe=jgg.FP8Recipe(), key=key)


def fp8_rows(rng):
    """Rows as the instruction's M; tiles and columns that are cut, an expert of no rows."""
    for n in (320, 96):
        w = jgg.fp8_quantize(oracle.random(rng, (3, n, 384), "bfloat16"), block=(128, 128))
        x = jgg.fp8_quantize(oracle.random(rng, (1500, 384), "bfloat16"))
        jax.block_until_ready(jax.jit(jgg.fp8_grouped_mm)(x, w, jnp.array([777, 0, 690])))


def few_tokens(rng):
    """A layer of few tokens, and products of few rows in all: every decoder, experts elsewhere."""
    for mode, bits, group in (
        ("nvfp4", 4, 16),
        ("mxfp4", 4, 32),
        ("mxfp8", 8, 32),
        ("fp8", 8, 128),
        ("affine", 5, 64),
    ):
        d, f = (384, 256) if mode == "fp8" else (320, 192)
        random = lambda *shape, q=(mode, bits, group): jgg.prepack(
            oracle.random_quantized(rng, shape, *q, "bfloat16")
        )
        up, down = random(5, 2 * f, d), random(5, d, f)
        x = oracle.random(rng, (6, d), "bfloat16")
        index = jnp.asarray(rng.integers(-1, 6, (6, 4)), jnp.int32)
        weight = jnp.asarray(rng.random((6, 4)), "float32")
        for twice in (False, True):  # of more than 32 pairs: other kernels
            of = [jnp.concatenate([a, a]) if twice else a for a in (x, index, weight)]
            jax.block_until_ready(jax.jit(jgg.moe_mlp)(of[0], up, down, *of[1:]))
        jax.block_until_ready(jax.jit(jgg.grouped_qmm)(x, up, jnp.array([1, 0, 3, 0, 1])))
        rows, matrix = oracle.random(rng, (60, d), "bfloat16"), random(2048, d)
        for few in (20, 60):  # 60: in pairs of columns
            jax.block_until_ready(jax.jit(jgg.quantized_matmul)(rows[:few], matrix))
        gated = functools.partial(jgg.grouped_qmm, activation="swiglu")
        jax.block_until_ready(jax.jit(gated)(rows, random(1, 2 * f, d), jnp.array([57])))


def some_tokens(rng):
    """A layer of some tokens, whose rows are sorted first: both kinds of weights, experts
    elsewhere."""
    x, index = oracle.random(rng, (37, 320), "bfloat16"), rng.integers(-1, 21, (37, 4))
    index, weight = jnp.asarray(index, jnp.int32), jnp.asarray(rng.random((37, 4)), "float32")
    shapes = (20, 384, 320), (20, 320, 192)
    arrays = [oracle.random(rng, shape, "bfloat16") for shape in shapes]
    f = jax.jit(functools.partial(jgg.moe_mlp, transpose_w=True))
    jax.block_until_ready(f(x, *arrays, index, weight))
    packed = [jgg.prepack(jgg.quantize(w, mode="nvfp4")) for w in arrays]
    jax.block_until_ready(jax.jit(jgg.moe_mlp)(x, *packed, index, weight))
    # Both products in one kernel.
    x, index = oracle.random(rng, (37, 1152), "bfloat16"), rng.integers(-1, 121, (37, 4))
    index = jnp.asarray(index, jnp.int32)
    arrays = [
        oracle.random(rng, shape, "bfloat16") for shape in ((120, 1152, 1152), (120, 1152, 576))
    ]
    jax.block_until_ready(f(x, *arrays, index, weight))
    packed = [jgg.prepack(jgg.quantize(w, mode="nvfp4")) for w in arrays]
    jax.block_until_ready(jax.jit(jgg.moe_mlp)(x, *packed, index, weight))


def few_dense(rng):
    """A layer of few tokens with 16-bit weights, whose columns and k are no whole steps: blocks of
    16 and of 64 columns, weights stored either way, experts elsewhere."""
    for dtype, transpose_w in (("bfloat16", False), ("bfloat16", True), ("float16", False)):
        for tokens, k, d in ((1, 8, 328), (7, 5, 328), (64, 1, 1096)):
            of = lambda *shape, dtype=dtype: oracle.random(rng, shape, dtype)
            up, down = of(70, d, 208), of(70, 104, d)
            if transpose_w:
                up, down = up.swapaxes(1, 2), down.swapaxes(1, 2)
            index = jnp.asarray(rng.integers(-1, 71, (tokens, k)), jnp.int32)
            weight = jnp.asarray(rng.random((tokens, k)), "float32")
            f = functools.partial(jgg.moe_mlp, transpose_w=transpose_w)
            jax.block_until_ready(jax.jit(f)(of(tokens, d), up, down, index, weight))


def fp8_tensors(rng):
    """A scale for each tensor: casts along both axes, and layers with every kind of sums."""
    for dtype in ("bfloat16", "float16", "float32"):
        for shape in ((304, 200), (3, 70, 256)):
            x = oracle.random(rng, shape, dtype)
            for axis in (-1, -2):
                f = functools.partial(jgg.fp8_quantize, block=None, axis=axis)
                jax.block_until_ready(jax.jit(f)(x))
    e5m2 = {"accumulate": "fast", "gradient_format": "e5m2"}
    for options in ({"accumulate": "fast"}, {"accumulate": "exact"}, e5m2):
        layer(rng, 300, 256, 128, recipe=jgg.FP8Recipe(scaling="tensor", **options))
    states = jgg.FP8State.new(), jgg.FP8State.new()
    recipe = jgg.FP8Recipe(scaling="delayed", accumulate="fast")
    layer(rng, 300, 256, 128, recipe=recipe, state=states)


def packed_sm80(rng):
    """Prepacked weights on the kernel of every GPU: tiles of 8, 64 and 128 rows, gates."""
    for (mode, group), dtype in itertools.product(
        (("nvfp4", 16), ("mxfp4", 32), ("affine", 32), ("affine", 128)),
        ("bfloat16", "float16", "float32"),
    ):
        if dtype == "float32" and mode == "affine":
            continue
        for sizes in ([1, 0, 7, 9, 25], [1, 65, 0, 130, 333], [1, 700, 0, 128, 391]):
            q = oracle.random_quantized(rng, (5, 384, 384), mode, 4, group, dtype)
            x, given = oracle.random(rng, (sum(sizes) + 3, 384), dtype), jnp.array(sizes)
            f = functools.partial(jgg.grouped_qmm, implementation="sm80")
            gated = functools.partial(f, activation="swiglu")
            jax.block_until_ready((jax.jit(f)(x, jgg.prepack(q), given),
                                   jax.jit(gated)(x, jgg.prepack(q), given)))  # fmt: skip


def lora(rng):
    """Rows as they come and sorted, ranks and lines that are no whole steps, rows of no pair; and
    all gradients."""
    for dtype, rank in (("bfloat16", 8), ("float16", 16), ("bfloat16", 32), ("float16", 64)):
        for rows, k, n in ((37, 328, 296), (2500, 72, 40)):
            of = lambda *shape, dtype=dtype: oracle.random(rng, shape, dtype)
            adapter, expert = (
                jnp.asarray(rng.integers(-1, most, rows), jnp.int32) for most in (4, 31)
            )
            x, a, b, old = of(rows, k), of(3, 30, rank, k), of(3, 30, n, rank), of(rows, n)

            def step(x, a, b, old, adapter=adapter, expert=expert):
                f = lambda *v: jgg.lora_mm(*v[:3], adapter, expert, existing_out=v[3])
                out, vjp = jax.vjp(f, x, a, b, old)
                return vjp(out)

            jax.block_until_ready(jax.jit(step)(x, a, b, old))


def fp8_weights(rng):
    """As they are stored: matrices without rows are not packed, and not read."""
    w = oracle.random_quantized(rng, (3, 192, 640), "fp8")
    for sizes in ([1, 0, 3], [0, 40, 24], [300, 0, 297]):
        x, given = oracle.random(rng, (sum(sizes) + 3, 640), "bfloat16"), jnp.array(sizes)
        jax.block_until_ready(jax.jit(jgg.grouped_qmm)(x, w, given))


def adapters(rng):
    """Beside prepacked weights, with gradients: tiles of 128 and 192 rows, ranks of one step of an
    instruction and of several, an odd number of tiles, groups of several tiles and of none."""
    for (mode, bits, group), rank, sizes in (
        (("nvfp4", 4, 16), 8, [0, 200, 193, 33]),
        (("affine", 4, 64), 40, [1, 385, 130, 60]),
        (("fp8", 8, 128), 64, [64, 0, 129, 100]),
    ):
        q = oracle.random_quantized(rng, (4, 320, 384), mode, bits, group, "bfloat16")
        x = oracle.random(rng, (sum(sizes) + 3, 384), "bfloat16")
        down, up = (
            oracle.random(rng, (4, *shape), "bfloat16") / 8 for shape in ((384, rank), (rank, 320))
        )

        @jax.jit
        def step(x, w, down, up, sizes):
            f = lambda x, *a: jgg.grouped_qmm(x, w, sizes, adapter=a)
            out, pull = jax.vjp(f, x, down, up)
            return out, pull(out)

        w = jgg.dequantize(q, "bfloat16").swapaxes(1, 2)
        out, _ = jax.block_until_ready(step(x, jgg.prepack(q), down, up, jnp.array(sizes)))
        low = oracle.grouped_mm(x, down, sizes)
        want = oracle.grouped_mm(x, w, sizes) + oracle.grouped_mm(low, up, sizes)
        oracle.assert_close(out, want, tolerance=1e-2)
