// The Hopper kernel of qmm with weights in layout "linear", of every mode.
#pragma once

#include <cuda_runtime_api.h>

#include <optional>
#include <string>

#include "quantized/plan.h"
#include "quantized/qmm.h"

namespace jgg {

std::optional<std::string> qmm_sm90_unsupported(const QmmArgs& args, int compute_capability);
cudaError_t qmm_sm90(cudaStream_t stream, const QmmArgs& args, const rules::QmmPlanSm90& plan);

}  // namespace jgg
