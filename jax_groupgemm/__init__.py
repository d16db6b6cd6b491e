"""Grouped matrix products for JAX: segmented, gathered, ragged; on any backend, fast on CUDA."""

from . import _formats as _formats
from . import checkpoint_policies as checkpoint_policies
from . import checkpoints as checkpoints
from . import cost as cost
from . import router as router
from ._fp8.grouped_linear import fp8_grouped_linear as fp8_grouped_linear
from ._fp8.grouped_mm import fp8_grouped_mm as fp8_grouped_mm
from ._fp8.grouped_wgrad import fp8_grouped_wgrad as fp8_grouped_wgrad
from ._fp8.quantize import fp8_quantize as fp8_quantize
from ._fp8.recipe import FP8Recipe as FP8Recipe
from ._fp8.state import FP8State as FP8State
from ._grouped.check_sizes import check_sizes as check_sizes
from ._grouped.gather_mm import gather_mm as gather_mm
from ._grouped.grouped_mm import grouped_mm as grouped_mm
from ._grouped.lora_mm import lora_mm as lora_mm
from ._grouped.ragged_dot import ragged_dot as ragged_dot
from ._grouped.ragged_dot import ragged_dot_general as ragged_dot_general
from ._grouped.replace import replace_ragged_dot as replace_ragged_dot
from ._grouped.segmented_mm import segmented_mm as segmented_mm
from ._kernels.extension import EXPORT_DISABLED_CHECKS as EXPORT_DISABLED_CHECKS
from ._kernels.extension import VERSION as __version__
from ._moe.moe_mlp import moe_mlp as moe_mlp
from ._moe.permute import combine as combine
from ._moe.permute import dispatch as dispatch
from ._moe.routing import Routing as Routing
from ._moe.routing import route as route
from ._nvfp4.grouped_linear import NVFP4Recipe as NVFP4Recipe
from ._nvfp4.grouped_linear import nvfp4_grouped_linear as nvfp4_grouped_linear
from ._nvfp4.grouped_mm import nvfp4_grouped_mm as nvfp4_grouped_mm
from ._nvfp4.grouped_wgrad import nvfp4_grouped_wgrad as nvfp4_grouped_wgrad
from ._nvfp4.quantize import nvfp4_quantize as nvfp4_quantize
from ._quantized.array import Quantized as Quantized
from ._quantized.convert import dequantize as dequantize
from ._quantized.convert import quantize as quantize
from ._quantized.gather_qmm import gather_qmm as gather_qmm
from ._quantized.grouped_qmm import grouped_qmm as grouped_qmm
from ._quantized.prepack import prepack as prepack
from ._quantized.quantized_matmul import quantized_matmul as quantized_matmul

__all__ = [
    "EXPORT_DISABLED_CHECKS",
    "FP8Recipe",
    "FP8State",
    "NVFP4Recipe",
    "Quantized",
    "Routing",
    "__version__",
    "check_sizes",
    "checkpoint_policies",
    "checkpoints",
    "combine",
    "cost",
    "dequantize",
    "dispatch",
    "fp8_grouped_linear",
    "fp8_grouped_mm",
    "fp8_grouped_wgrad",
    "fp8_quantize",
    "gather_mm",
    "gather_qmm",
    "grouped_mm",
    "grouped_qmm",
    "lora_mm",
    "moe_mlp",
    "nvfp4_grouped_linear",
    "nvfp4_grouped_mm",
    "nvfp4_grouped_wgrad",
    "nvfp4_quantize",
    "prepack",
    "quantize",
    "quantized_matmul",
    "ragged_dot",
    "ragged_dot_general",
    "replace_ragged_dot",
    "route",
    "router",
    "segmented_mm",
]
