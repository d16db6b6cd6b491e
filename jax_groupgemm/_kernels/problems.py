"""Problems: what is known of a call before it runs, as ``choose`` sees it."""

from __future__ import annotations

import dataclasses

#: Dtypes that kernels know, and those of two bytes.
FLOATS = ("float32", "bfloat16", "float16")
HALVES = ("bfloat16", "float16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """Facts about a call that are known before it runs.

    Attributes:
      op: the name of the operation in ``KERNELS``.
      platform: what the computation is lowered for, "cpu", "cuda" or another.
      implementation: the kernel that the user named, or None.
      dtypes: names of the dtypes of operands that a kernel must know.
      out_dtype: name of the result's.
      empty: whether an operand has no elements.
      mode: of quantized weights.
      calls: the custom calls that take this mode; None for all.
    """

    op: str
    platform: str
    implementation: str | None = None
    dtypes: tuple[str, ...] = ()
    out_dtype: str = "float32"
    empty: bool = False
    mode: str = ""
    calls: frozenset[str] | None = None

    @property
    def named(self) -> bool:
        return self.implementation is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fused(Problem):
    """A product with options.

    Attributes:
      activation: of its sums, or None; ``gated``: it takes two halves of N.
      rounds: the activation is of rounded sums.
      preactivation: likewise, or those are a result, too.
      bias: whether there is one.
      more_options: a row scale or an existing result, or a bias beside lists of rows.
      option_dtypes: of the bias and the row scale.
    """

    activation: str | None = None
    gated: bool = False
    rounds: bool = False
    preactivation: bool = False
    bias: bool = False
    more_options: bool = False
    option_dtypes: tuple[str, ...] = ()

    @property
    def has_options(self) -> bool:
        return self.activation is not None or bool(self.option_dtypes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mm(Fused):
    """``(rows, k) x (groups, k, n)``; ``segments`` of rows, ``elements`` of both operands."""

    rows: int
    groups: int
    k: int
    n: int
    segments: int
    elements: int = 0
    operand_dtype: str  # what both operands are converted to
    in_order: bool = True  # the segments' rows in the result are ascending and disjoint
    transpose_x: bool = False
    transpose_w: bool = False
    transpose_out: bool = False
    tf32: bool = False
    lists: bool = False  # rows are named by index
    x_list_alone: bool = False  # only those of x, and their copy is what runs elsewhere
    y_list: bool = False  # those of the result are
    existing_dtype: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lora(Problem):
    """``lora_mm`` of ``rows``: each meets one of ``pairs`` of factors, (rank, k) and (n, rank). The
    dtypes are those of x, of both factors and of an existing result."""

    rows: int
    pairs: int
    rank: int
    k: int
    n: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wgrad(Problem):
    """``groups`` of ``(a, rows) x (rows, b)``."""

    rows: int
    groups: int
    a: int
    b: int
    kind: str
    segments: int
    elements: int = 0
    operand_dtype: str
    own_weight: bool = True  # segment s is matrix s of the result
    x_list: bool = False  # rows of x, or of y, are named by index
    y_list: bool = False
    whole: bool = False  # segments may not be cut into parts
    longest: int = 0  # rows that a matrix may be a sum over
    transpose_x: bool = False
    transpose_y: bool = False
    tf32: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qmm(Fused):
    """``(rows, k) x (groups, n, k)``, quantized; ``all_groups`` share the rows.

    ``rows_x`` are those of x. The metadata has so many ``segments``, which are ``sizes``, or not;
    with an ``offset`` only some of them have a weight.
    """

    rows: int
    rows_x: int
    segments: int
    sizes: bool = True
    offset: bool = False
    groups: int
    all_groups: int
    k: int
    n: int
    bits: int
    group_size: int = 128  # codes that share a scale
    layout: str
    bfloat16_scales: bool  # bfloat16 holds its scales
    float16_scales: bool = False
    exact_in_bfloat16: bool = False  # ... and its values
    scalable: bool = False  # scales may multiply sums: ffi/quantized/device/scaled_weights_sm90.cuh
    tf32: bool = False
    lines: bool = True  # kernels read lines of its codes
    packable: bool  # a kernel packs the weight
    in_order: bool = True
    transpose_w: bool = True

    @property
    def in_groups(self) -> bool:
        """Whether scales are of groups of K, so that parts of K are weights, too."""
        return self.calls is None or "jgg_qmm" in self.calls

    @property
    def as_stored(self) -> bool:
        """Whether a kernel reads its codes as they are stored."""
        return self.in_groups or ("jgg_qmm_fp8" in (self.calls or ()) and self.lines)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows(Problem):
    """``activation_backward`` of each of some rows; the activation has so many ``columns``."""

    columns: int
    activation: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversion(Problem):
    """``quantize``, ``dequantize``, ``prepack`` or ``nvfp4_quantize``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fp8Conversion(Conversion):
    """``fp8_quantize`` of ``(rows, columns)``, all matrices' rows together, whose ``block`` lies
    along columns, or along rows: then ``along`` is the length of the result's lines, else 0. Blocks
    may lie along ``both``. Or ``fp8_dequantize`` of what is stored. Or with a block of None
    ``fp8_cast``, whose scales are known, and may be powers of two, and ``fp8_largest``."""

    rows: int
    columns: int
    along: int = 0
    both: bool = False
    power_of_two: bool = True
    block: tuple[int, int] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fp8Activation(Rows):
    """``fp8_activation`` or ``fp8_activation_backward`` of a gated activation's ``columns``; or
    ``fp8_activation_cast`` or ``fp8_activation_cast_backward``, of so many ``rows``."""

    rows: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moe(Problem):
    """``route``, ``dispatch``, ``combine`` or ``combine_backward`` of ``pairs`` of token and
    expert, or ``few_tokens`` or ``some_tokens``, the whole layer; rows of ``d``. The first dtype is
    that of rows."""

    pairs: int
    experts: int = 1
    d: int = 0
    codes: bool = False  # rows are of eight bits, which are copied; then there are no dtypes
    choices: int = 1  # experts of a token
    packed: bool = False  # weights are prepacked
    dense: bool = False  # ... are arrays, whose dtypes stand behind that of rows
    f: int = 0  # columns between the products
    matrix: int = 0  # elements of an expert's down projection, D * F
    formats: tuple[tuple[str, int], ...] = ()  # of weights: modes and group sizes
    activation: str | None = None
    gated: bool = True  # ... is
    biased: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopK(Problem):
    """``top_k``: the choice of k of ``experts``, in ``groups``, for each token; the dtype is that
    of logits."""

    experts: int
    k: int
    groups: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Router(TopK):
    """``router``: the same choice of logits that are a product of x (``tokens``, ``d``) and a
    weight; the dtypes are those of both."""

    tokens: int
    d: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nvfp4(Problem):
    """A product of two NVFP4 operands; ``inner`` is what multiplies them once they are decoded."""

    k: int
    n: int
    inner: Qmm | Wgrad
    linear: bool = True  # both operands are stored in layout "linear"
    row_scales: bool = False  # x has a global scale that is not part of the result's factor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fp8(Fused):
    """A product of two operands in mode "fp8": ``groups`` of ``rows`` in all, in ``segments``, K
    contracted, or of weight gradients (N, K), rows contracted. Blocks are those of x and of the
    other operand, None for a whole matrix; ``dtypes`` is empty, because ``elements`` has those of
    codes."""

    rows: int
    segments: int
    groups: int
    k: int
    n: int
    elements: tuple[str, str]
    blocks: tuple[tuple[int, int] | None, tuple[int, int] | None]
    transpose_w: bool = True
