"""Random calls of every operation, each with its meaning in float64 numpy.

A :class:`Call` has operands that are differentiated, operands that are data, and a function of both
in numpy that knows nothing of the package. ``tests/random_cases`` tries it under transformations
(``transforms``, and ``sharded`` among devices), which ``compare`` results.
"""

from . import fp8, grouped, lora, moe, nvfp4, quantized, ragged
from .call import Call, pick
from .quantized import FORMATS

CALLS = {
    f.__name__: f
    for f in (
        grouped.grouped_mm, grouped.segmented_mm, grouped.gather_mm, lora.lora_mm,
        grouped.ragged_dot, ragged.ragged_dot_general, quantized.grouped_qmm, quantized.gather_qmm,
        quantized.quantized_matmul, quantized.quantize, quantized.dequantize, nvfp4.nvfp4_quantize,
        nvfp4.nvfp4_grouped_mm, nvfp4.nvfp4_grouped_wgrad, nvfp4.nvfp4_grouped_linear,
        fp8.fp8_quantize, fp8.fp8_grouped_mm, fp8.fp8_grouped_wgrad, fp8.fp8_grouped_linear,
        moe.route, moe.dispatch_and_combine, moe.moe_mlp,
    )
}  # fmt: skip

__all__ = ["CALLS", "FORMATS", "Call", "pick"]
