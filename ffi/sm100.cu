// Everything that is compiled for Blackwell alone. It is one translation unit: CUTLASS's headers
// take longer to read than all of these kernels to compile.
#include "fp8/gemm_sm100.cu"
#include "fp8/prepare_sm100.cu"
#include "grouped_mm/gemm_sm100.cu"
#include "grouped_mm/prepare_sm100.cu"
#include "nvfp4/gemm_sm100.cu"
#include "nvfp4/prepare_sm100.cu"
