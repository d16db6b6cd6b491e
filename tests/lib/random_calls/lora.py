"""Random calls of products of low rank."""

import numpy as np

import jax_groupgemm as jgg

from .call import Call, fixed_dtype, floats, floats_of, num, pick, size, sometimes


def lora_mm(rng) -> Call:
    t, k, n, r = size(rng), size(rng), size(rng), size(rng, 12)
    adapters, experts = int(rng.integers(1, 5)), sometimes(rng, int(rng.integers(1, 4)))
    dtype = pick(rng, floats())
    others = {"row_scale": (t,), "existing_out": (t, n)}
    names = [name for name in others if rng.integers(2)]
    batch = (adapters,) if experts is None else (adapters, experts)
    casts = fixed_dtype(rng), fixed_dtype(rng)
    scale = pick(rng, [1.0, 0.5, -2])
    hint = bool(rng.integers(2))

    def run(p, m):
        x, a, b, *rest = p
        options = dict(zip(names, rest, strict=True))
        return jgg.lora_mm(x, a, b, *m, scale=scale, sorted_rows=hint, **options)

    def pairs(m):
        expert = np.zeros(t, int) if experts is None else np.asarray(m[1], np.int64)
        adapter = np.asarray(m[0], np.int64)
        there = (adapter >= 0) & (adapter < adapters) & (expert >= 0) & (expert < (experts or 1))
        return np.where(there, adapter * (experts or 1) + expert, -1)

    def want(p, m):
        x, a, b, *rest = (num(v) for v in p)
        options = dict(zip(names, rest, strict=True))
        a, b = a.reshape(-1, r, k), b.reshape(-1, n, r)
        out = np.array(options.get("existing_out", np.zeros((t, n))))
        for row, pair in enumerate(pairs(m)):
            if pair >= 0:
                factor = scale * options["row_scale"][row] if "row_scale" in names else scale
                out[row] += factor * (b[pair] @ (a[pair] @ x[row]))
        return out

    def draw(alone):
        low = pick(rng, [0, -2])
        most = batch if low == 0 else [count + 2 for count in batch]
        m = [c(rng.integers(low, high, t)) for c, high in zip(casts, most, strict=False)]
        shapes = [(t, k), (*batch, r, k), (*batch, n, r), *(others[name] for name in names)]
        p = floats_of(
            rng, shapes, [dtype] * len(shapes), [1, k**-0.5, r**-0.5, 1, 1][: len(shapes)]
        )
        if alone and rng.integers(2):
            pair = pairs(m)
            p[0][pair < 0] = np.nan
            unused = np.setdiff1d(np.arange(np.prod(batch)), pair)
            p[1].reshape(-1, r, k)[unused] = np.nan
            p[2].reshape(-1, n, r)[unused] = np.nan
            if "row_scale" in names:
                p[3][pair < 0] = np.nan
        return p, m

    of = "A" if experts is None else "AE"
    words = {"row_scale": "T", "existing_out": "TN"}
    return Call(
        f"lora_mm {dtype} {batch} r={r} {names} {scale}", run, want, draw, k * r, dtype,
        tolerance=3.0, letters=["TK", f"{of}RK", f"{of}NR", *(words[name] for name in names)],
    )  # fmt: skip
