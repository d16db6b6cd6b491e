"""A ``Call``, and what draws of all operations are made of: sizes, dtypes, metadata, NaN."""

import contextlib
import dataclasses
from collections.abc import Callable

import fuzz
import jax
import jax.numpy as jnp
import moe_oracle
import numpy as np

HALVES = ["bfloat16", "float16"]
FLOATS = ["float32", *HALVES]
FLOAT8 = ["float8_e4m3fn", "float8_e5m2"]
#: They have no zero, have no arithmetic, or are as large as a gradient may be.
NO_GRADIENT = ["float8_e8m0fnu", "float4_e2m1fn", "float8_e4m3b11fnuz", "float8_e3m4"]
INTEGERS = ["int8", "int8", "uint8", "int16", "int32", "uint32", "int4", "uint4"]
GATED = list(moe_oracle.GATED)
ACTIVATIONS = [*moe_oracle.ACTIVATIONS, *GATED]
KINKED = moe_oracle.KINKED


@dataclasses.dataclass
class Call:
    """One operation with one set of shapes.

    Attributes:
      name: of the operation, and what is special.
      run: ``run(floats, data)``, of the package.
      want: the same in float64 numpy, of whatever is in ``floats``, rounded or not. Complex numbers
        are complex128, integers int64 that wrap around.
      draw: ``draw(alone)`` gives floats and data; ``alone``: where no other data meets these
        floats, so that what they hold for nobody may be NaN.
      k: the longest sum.
      dtype: of the result; None where want is not in numbers of one dtype, but compared as it is.
      tolerance: of the result, in units of the dtype's own.
      tied: data that belong together, so that a batch maps all of them or none.
      transforms: whether it is differentiated and mapped, only mapped, or neither.
      letters: of the axes of floats and data, one word for each: axes of one letter are sharded
        alike, "." and an axis behind the word's end never. None where nothing may be sharded.
      units: of letters, how many parts their axes are cut into at most.
    """

    name: str
    run: Callable
    want: Callable
    draw: Callable
    k: int = 1
    dtype: str | None = None
    tolerance: float = 1.0
    transforms: str = "all"
    smooth: bool = True
    tied: bool = False
    letters: list[str] | None = None
    units: dict[str, int] = dataclasses.field(default_factory=dict)


def pick(rng, options):
    return options[int(rng.integers(len(options)))]


def size(rng, most: int = 40) -> int:
    return int(pick(rng, [1, 2, 3, 5, 8, 16, 17, 24, 32, 33, 40, 64, 65][: 3 + most // 4]))


def sometimes(rng, value, one_in: int = 2):
    return value if rng.integers(one_in) == 0 else None


def x64() -> bool:
    return jax.config.jax_enable_x64


def floats() -> list[str]:
    """Dtypes of operands of all products of arrays."""
    return [*FLOATS, *["float64"] * (2 * x64())]


def fixed_dtype(rng):
    """Integers of one dtype in all draws, clipped to it."""
    wide = ["int64", "uint64"] if x64() else []
    dtype = np.dtype(pick(rng, ["int32"] * 3 + ["int16", "int8", "uint8", "uint32", *wide]))
    info = np.iinfo(dtype)
    return lambda values: np.clip(values, info.min, info.max).astype(dtype)


# ---- dtypes of products ------------------------------------------------------------------------


@dataclasses.dataclass
class Operands:
    """Dtypes of the two operands of a product, what is asked for its result, and what that is."""

    left: str
    right: str
    out: str | None
    result: str

    @property
    def are_floats(self) -> bool:
        """Whether the product is differentiated, in both."""
        return is_inexact(self.left) and self.left not in NO_GRADIENT

    @property
    def has_options(self) -> bool:
        """Whether an activation is defined, which it is of real numbers."""
        return jnp.issubdtype(self.result, jnp.floating)

    def __str__(self) -> str:
        return f"{self.left} {self.right} {self.out}"


def is_inexact(dtype) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def some_operands(rng, of_jax: bool = False) -> Operands:
    """Mostly floats alike. ``of_jax``: the result's dtype is that of JAX's own products."""
    kind = int(rng.integers(12))
    left = right = pick(rng, floats())
    out = pick(rng, [None, None, *floats()])
    if kind == 0:
        right = pick(rng, floats())
    elif kind == 1:
        left = right = pick(rng, ["complex64", *["complex128"] * x64()])
        if rng.integers(2):  # the other one is real
            left, right = rng.permutation([left, "float32"]).tolist()
        out = pick(rng, [None, "complex64"])
    elif kind == 2:
        left = right = pick(rng, INTEGERS + ["int64"] * x64() + ["bool"] * of_jax)
        outs = [None, None, "int32", "float32", *["int64"] * x64()]
        out = pick(rng, outs) if left != "bool" else None
    elif kind == 3:
        left, right = pick(rng, FLOAT8), pick(rng, [None, None, *FLOAT8, "bfloat16"])
        right = right or left
        out = pick(rng, [None, "float32", "bfloat16"])
    elif kind == 4:
        left = right = pick(rng, NO_GRADIENT)
        out = pick(rng, ["float32", "bfloat16"])
    return Operands(left, right, out, out or result_dtype(left, right, of_jax))


def result_dtype(left: str, right: str, of_jax: bool) -> str:
    """By default: JAX's promotion, where floats of 8 bits are bfloat16; or what JAX's own product
    has, if it has one."""
    if of_jax:
        one = [jax.ShapeDtypeStruct((1,), jnp.dtype(dtype)) for dtype in (left, right)]
        with contextlib.suppress(TypeError):
            return jax.eval_shape(jax.lax.dot, *one).dtype.name
    wide = lambda dtype: "bfloat16" if dtype in (*FLOAT8, *NO_GRADIENT) else dtype
    return jnp.promote_types(wide(left), wide(right)).name


def num(a) -> np.ndarray:
    """What numpy computes with: float64, complex128, or int64, which is as good as any integers
    that wrap around."""
    a = np.asarray(a)
    if a.dtype.kind == "c":
        return a.astype(np.complex128)
    if a.dtype.kind == "b" or jnp.issubdtype(a.dtype, jnp.integer):
        return a.astype(np.int64)
    return a.astype(np.float64)


def wrapped(values: np.ndarray, dtype) -> np.ndarray:
    """int64 as integers of ``dtype`` hold them, in int64 again; bool is whether any was added."""
    if jnp.dtype(dtype).kind == "b":
        return (values != 0).astype(np.int64)
    info = jnp.iinfo(dtype)
    with np.errstate(over="ignore"):
        kept = values & np.int64(-1 if info.bits == 64 else (1 << info.bits) - 1)
        sign = info.min < 0 and info.bits < 64
        return kept - ((kept >> (info.bits - 1)) << info.bits if sign else 0)


def numbers(rng, shape, dtype, scale: float = 1.0, small: bool = False) -> np.ndarray:
    """Random ones of any dtype; ``small`` integers, whose sums are exact in float32."""
    dtype = jnp.dtype(dtype)
    if dtype.kind == "b":
        return rng.random(shape) < 0.3
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        low, high = max(info.min, -8 if small else -(2**62)), min(info.max, 8 if small else 2**62)
        return np.asarray(rng.integers(int(low), int(high) + 1, shape)).astype(dtype)
    values = np.asarray(rng.standard_normal(shape) * scale)
    if dtype.kind == "c":
        values = values + 1j * rng.standard_normal(shape) * scale
        return np.asarray(values).astype(dtype)
    if dtype.name == "float8_e8m0fnu":
        values = abs(values)
    return values.astype(dtype) if dtype == np.float64 else values.astype(np.float32).astype(dtype)


def floats_of(rng, shapes, dtypes, scales=None, small: bool = False) -> list[np.ndarray]:
    scales = scales or [1.0] * len(shapes)
    return [numbers(rng, s, d, c, small) for s, d, c in zip(shapes, dtypes, scales, strict=True)]


def with_operands(rng, of: Operands, shapes, draw_data, poison=None, scales=None):
    """``draw`` of a product: its operands, which are floats or data, and what is poisoned of them,
    by ``poison(a, b, data)``. Behind them come data."""
    small = is_inexact(of.result)

    def draw(alone):
        data = draw_data()
        a, b = floats_of(rng, shapes, (of.left, of.right), scales, small)
        if alone and poison is not None and rng.integers(2):
            a, b = poison(a, b, data)
        return ([a, b], data) if of.are_floats else ([], [a, b, *data])

    return draw


def as_drawn(of: Operands, function):
    """``function(operands, data)`` for floats and data as ``with_operands`` draws them."""
    if of.are_floats:
        return function
    return lambda p, m: function([*m[:2], *p], m[2:])


# ---- metadata ----------------------------------------------------------------------------------


def group_data(rng, g, t):
    """Draws of sizes and an offset, or none."""
    total, offset = fuzz.some_offset(rng, g)
    cast = fixed_dtype(rng)

    def draw():
        sizes = cast(fuzz.some_sizes(rng, total, t))
        if offset is None:
            return [sizes]
        return [sizes, np.int32(rng.integers(-4, g + 6))]

    return draw, offset is not None


def index_data(rng, count, matrices, lead, batch):
    """Draws of two lists of indices, of shapes that broadcast, one of which may be missing."""
    missing, promised = pick(rng, ["", "", "", "lhs", "rhs"]), rng.integers(3) == 0
    pairs = int(rng.integers(0, 14))
    shapes = {
        "": pick(rng, [((pairs,), (pairs,)), ((3, 1), (2,)), ((), (4,)), ((2, 3), (2, 3))]),
        "lhs": (lead, pick(rng, [lead, (2, *lead)])),
        "rhs": (pick(rng, [batch, (2, *batch)]), batch),
    }[missing]
    casts = fixed_dtype(rng), fixed_dtype(rng)

    def draw():
        out = []
        for name, shape, most, cast in zip(
            ("lhs", "rhs"), shapes, (count, matrices), casts, strict=True
        ):
            if name == missing:
                continue
            low = pick(rng, [0, -1, -3])
            index = rng.integers(low, most + (2 if low else 0), shape)
            if name == "rhs" and promised:
                index = np.sort(index, axis=None).reshape(shape)
            out.append(cast(np.asarray(index)))
        return out

    def both(m):
        m = list(m)
        return (None if missing == "lhs" else m.pop(0)), (None if missing == "rhs" else m.pop(0))

    return draw, both, promised


# ---- NaN ---------------------------------------------------------------------------------------


def has_nan(dtype) -> bool:
    return is_inexact(dtype) and jnp.dtype(dtype).name != "float4_e2m1fn"


def poison_rows(x, ranges):
    """NaN in rows of no group."""
    x = np.array(x)
    covered = np.zeros(len(x), bool)
    for start, end in ranges:
        covered[start:end] = True
    if has_nan(x.dtype):
        x[~covered] = np.nan
    return x


def poison_groups(w, ranges):
    """NaN in matrices without rows."""
    w = np.array(w)
    if has_nan(w.dtype):
        w[[end <= start for start, end in ranges]] = np.nan
    return w
