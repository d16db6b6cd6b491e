#include "moe/route_sm80.h"

#include "moe/device/route.cuh"

namespace jgg {

cudaError_t route_sm80(cudaStream_t stream, const RouteArgs& args) {
  using namespace device;
  if (args.blocks == 1) {
    RoutePlace<true><<<1, kRouteThreads, 0, stream>>>(args);
    return cudaGetLastError();
  }
  const auto blocks = static_cast<unsigned>(args.blocks);
  RouteCount<<<blocks, kRouteThreads, 0, stream>>>(args);
  if (cudaError_t error = cudaGetLastError()) return error;
  const int scans = (args.experts + kRouteWarps - 1) / kRouteWarps;
  RouteScan<<<static_cast<unsigned>(scans), kRouteThreads, 0, stream>>>(args);
  if (cudaError_t error = cudaGetLastError()) return error;
  RoutePlace<false><<<blocks, kRouteThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace jgg
