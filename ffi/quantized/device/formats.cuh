// The decoders of every format, as quantized/formats.h lists them.
#pragma once

#include "quantized/device/formats/affine.cuh"
#include "quantized/device/formats/fp8.cuh"
#include "quantized/device/formats/mxfp4.cuh"
#include "quantized/device/formats/mxfp8.cuh"
#include "quantized/device/formats/nvfp4.cuh"
