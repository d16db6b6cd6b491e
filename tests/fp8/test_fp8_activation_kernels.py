"""The CUDA kernels of FP8's activations, run on the host thread by thread: the scales and codes of
what they quantize, against the definition."""

import ctypes

import fp8_oracle
import host_program
import jax
import jax.numpy as jnp
import ml_dtypes
import moe_oracle
import numpy as np
import pytest
from fp8_quantize_cases import KEY, edges, sums
from host_memory import aligned, copied, guarded

import jax_groupgemm as jgg
from jax_groupgemm._quantized import padding

pytestmark = host_program.needs_compiler

BF16, F32 = ml_dtypes.bfloat16, np.float32
SIZES = np.array([0, 130, 1, 0, 3, -4, 12], np.int32)
R, F, LIVE = 160, 256, 146
ALONG = padding.padded_rows(R, len(SIZES), fp8_oracle.GROUPED)
RESULTS = ("forward", "by_rows", "by_columns", "activated")
VALUES = {"activation": F, "dh": 2 * F, "scaled": F}


class Operands(ctypes.Structure):
    _fields_ = [
        *[(n, ctypes.c_void_p) for n in ("h", "d", "row_scale", "sizes")],
        *[(n, ctypes.c_void_p) for n in ("row_seed", "column_seed")],
        *[(f"{n}_{of}", ctypes.c_void_p) for n in RESULTS for of in ("codes", "scales")],
        *[(n, ctypes.c_void_p) for n in ("sums", *VALUES)],
        *[(n, ctypes.c_int64) for n in ("rows", "columns", "along", "groups")],
    ]  # fmt: skip


@pytest.fixture(scope="module")
def kernels():
    return host_program.build_kernels("fp8_activation_kernels", "-Itests/lib/stand_in")


def operands(rng, kind):
    """h, d and scales of rows; rows of no group are NaN."""
    h, d = rng.standard_normal((R, 2 * F)), rng.standard_normal((R, F))
    scale = rng.standard_normal(R).astype(F32)
    if kind == "edges":
        d = edges(rng, "bfloat16", (1, R, F))[0].astype(F32)
        h[:, 5] = h[:, F + 9] = h[11] = 0
        h[132, 30], h[133, F + 40], h[140] = np.inf, np.nan, -1e30
        scale[[3, 131, 134, 135]] = 0, 2.0**-120, np.nan, -(2.0**60)
    elif kind == "tiny":  # scales of blocks that are small, or the least there is
        d *= 2.0 ** rng.integers(-140, -110, (R, 1))
    elif kind == "huge":
        d *= 2.0 ** rng.integers(100, 126, (R, 1))
    with np.errstate(over="ignore"):
        h, d = h.astype(F32).astype(BF16), d.astype(F32).astype(BF16)
    h[LIVE:] = d[LIVE:] = scale[LIVE:] = np.nan
    return h, d, scale


def definition(x, axis, random):
    """Codes and scales of values (R, C); of lines along rows, those of padded groups."""
    if random:
        q = jgg.fp8_quantize(
            jnp.asarray(x), axis=axis, group_sizes=jnp.asarray(SIZES), stochastic_rounding_key=KEY
        )
        return np.asarray(q.weight), np.asarray(q.scales)
    if axis == -2:
        x = fp8_oracle.padded(x, SIZES)[0].T
    return fp8_oracle.quantize(x, (1, 128))


def cases():
    for i, activation in enumerate(moe_oracle.GATED):
        for j, kind in enumerate(("plain", "edges", "tiny", "huge")):
            yield activation, kind, (i + j) % 2 == 1
            if i == 0:
                yield activation, kind, (i + j) % 2 == 0


@pytest.mark.parametrize(("activation", "kind", "random"), [*cases()])
@pytest.mark.one_in(4)
def test_kernels(rng, kernels, activation, kind, random):
    h, d, row_scale = operands(rng, kind)
    given = [copied(a) for a in (h, d, row_scale)]
    seed = np.asarray(jax.random.bits(KEY, (2,), "uint32"))
    shapes = [(R, F), (R, 2 * F), (2 * F, ALONG), (F, ALONG)]
    results = [
        memory for m, n in shapes for memory in (aligned(m * n, 64), aligned(m * n // 32, 64))
    ]
    values = {name: np.empty((R, n), BF16) for name, n in VALUES.items()}
    memory = aligned(4 * R * F // 128, 64)
    o = Operands(
        *[a.ctypes.data for a in given], SIZES.ctypes.data,
        *[seed.ctypes.data if random else None] * 2,
        *[a.ctypes.data for a in results], memory.ctypes.data,
        *[a.ctypes.data for a in values.values()], R, F, ALONG, len(SIZES),
    )  # fmt: skip
    assert kernels.activation_kernels(ctypes.byref(o), activation.encode())
    padded = (-(-np.maximum(SIZES, 0) // 128) * 128).sum()
    with np.errstate(invalid="ignore", over="ignore"):
        wanted = [
            definition(values["activation"], -1, False), definition(values["dh"], -1, random),
            definition(values["dh"], -2, random), definition(values["scaled"], -2, False),
        ]  # fmt: skip
        want_sums = sums(d, values["activation"])
    for i, both in enumerate(wanted):
        for got, want, unit in zip(results[2 * i : 2 * i + 2], both, (1, 128), strict=True):
            want = want.copy()
            if i < 2:
                want[LIVE:].view(np.uint8)[:] = 0xAB
            else:
                want.view(np.uint8)[:, padded // unit * want.itemsize :] = 0xAB
            if i == 0:  # some rows of no group are written
                got = got[: want[:LIVE].nbytes]
                want = want[:LIVE]
            guarded(got, want.reshape(-1).view(np.uint8))
    want_sums.T[LIVE:].view(np.uint8)[:] = 0xAB
    got_sums = memory[: want_sums.nbytes].view(F32).reshape(want_sums.shape)
    np.testing.assert_array_equal(got_sums, want_sums)
