"""``grouped_qmm``: every group of rows times its own quantized matrix."""

from __future__ import annotations

import jax
from jax.typing import ArrayLike, DTypeLike

from .._core import check
from .._core.operations import operation
from .._core.products import Caller, Mm
from .._core.types import Activation, Implementation, Integers
from .._grouped.grouped_mm import epilogue, metadata
from . import adapter as adapters
from . import product as quantized_product
from .array import Quantized


@operation
def grouped_qmm(
    x: ArrayLike,
    w: Quantized,
    group_sizes: Integers,
    *,
    group_offset: ArrayLike | None = None,
    transpose_w: bool = True,
    bias: ArrayLike | None = None,
    activation: Activation | None = None,
    row_scale: ArrayLike | None = None,
    adapter: tuple[ArrayLike, ArrayLike] | None = None,
    preferred_element_type: DTypeLike | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """``out[t] = x[t] @ w[group(t)].T``; **T (rows) is grouped**, and w is quantized.

    :func:`grouped_mm` with a :class:`Quantized` weight, which is never dequantized as a whole::

        out = row_scale * activation(x @ w + (x @ adapter[0]) @ adapter[1] + bias)

    The operation dequantizes the weight exactly and rounds it once to x's dtype. It sums products
    in float32, and multiplies the sums by a ``global_scale``. It does not round a weight in mode
    ``"fp8"``: scales multiply float32 sums, and the result is within 2e-4 of the exact one before
    it is rounded. But Hopper's kernels, for bfloat16 and float16 x, round such a weight to x's
    dtype, and its scales to 16 bits. Rows of no group are exact zeros and get zero gradient.

    Args:
      x: ``(T, K)``, float32, bfloat16 or float16. float32 products follow
        ``jax.default_matmul_precision`` and are true float32 where that is unset.
      w: ``(G, N, K)``, quantized along K; with ``transpose_w=False`` ``(G, K, N)``, quantized
        along N. A ``global_scale`` is a scalar or ``(G,)``, or ``(G, N)`` as of fused layers (not
        with ``transpose_w=False``), which is not fused with the product.
      group_sizes, group_offset: as in :func:`grouped_mm`.
      bias: ``(G, N)``, added to the rows of its group.
      activation: as in :func:`grouped_mm`; gated forms have ``N/2`` columns.
      row_scale: ``(T,)``.
      adapter: a pair of low rank r beside each matrix, as LoRA has it: ``(G, K, r)`` and
        ``(G, r, N)``, rounded to x's dtype. Beside a prepacked weight and many rows (more than 52
        per group on Hopper, r a multiple of 8 up to 64) it adds little to the product's time,
        and as little in the gradient of x. There one sum is rounded, elsewhere both products are.
      preferred_element_type: float32, bfloat16 or float16; by default the dtype of x.
      implementation: ``None`` for the best one, ``"reference"``, or a kernel's name.

    Returns:
      ``(T, N)``, or ``(T, N/2)`` with a gated activation.

    Raises:
      ValueError: shapes do not fit, or a name is unknown, or ``implementation`` cannot run.
      TypeError: w is not a :class:`Quantized`, or a dtype is none of these.

    Differentiable to any order in x, bias, row_scale, adapter, in affine scales and biases
    (``dbias`` is the sum of dW over a quantization group, ``dscale`` the sum of ``dW * code``), in
    fp8 scales (``dscale`` over a block) and in the global scale. With a prepacked weight, only the
    global scale has a gradient. Closed under ``vmap``. Shards like :func:`grouped_mm`, in whole
    quantization groups.

    Examples:
      >>> w = jax.random.normal(jax.random.key(0), (2, 64, 128))
      >>> q = jgg.quantize(w, bits=4, group_size=64, contract=-1)
      >>> jgg.grouped_qmm(jnp.ones((5, 128)), q, jnp.array([2, 3])).shape
      (5, 64)
    """
    op = "grouped_qmm"
    x = check.array(op, "x", x)
    check.shape(op, "x", x, (None, None), "T, K")
    w, dtype = quantized_product.checked(op, x, w, transpose_w, preferred_element_type, rank=3)
    groups = metadata(op, group_sizes, group_offset, w)
    check.rows(op, "x", x.shape[0])
    check.implementation(op, implementation)
    product = Mm(
        rows=x.shape[0], transpose_w=transpose_w, out_dtype=dtype,
        precision=check.precision(op, None), implementation=implementation,
        caller=Caller(op, ("x", "w")),
    )  # fmt: skip
    options = epilogue(op, product, x, w, bias, activation, row_scale)
    if adapter is not None:
        factors = adapters.checked(op, adapter, x, product, w)
        run = lambda p: adapters.product(x, w, groups, factors, p)
        if options.nothing:
            return run(product)
        return quantized_product.FUSED.with_options(run, groups, w, options, product)
    whole = quantized_product.fusible(w)
    return quantized_product.FUSED(x, w, groups, product, options, fused=whole)
