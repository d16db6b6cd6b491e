"""The list of formats: a module each. ``Quantized.mode`` takes their names, in this order."""

from ._fp8.format import Fp8
from ._quantized.affine import Affine
from ._quantized.format import register
from ._quantized.mxfp4 import Mxfp4
from ._quantized.mxfp8 import Mxfp8
from ._quantized.nvfp4 import Nvfp4

for _format in (Affine(), Mxfp4(), Mxfp8(), Nvfp4(), Fp8()):
    register(_format)
