// The kernel of prepack of mode "fp8" on the host, for test_prepack_fp8_kernel.py.
#include "cuda_on_host.h"
//
#include "quantized/prepack_fp8_sm80.cuh"

using namespace jgg;

static void Launch(const PrepackFp8Args& args) {
  readable.clear();
  readable.emplace_back(static_cast<const char*>(args.weight), args.groups * args.n * args.k);
  readable.emplace_back(reinterpret_cast<const char*>(args.scales),
                        4 * args.groups * args.scale_rows * args.scale_columns);
  LaunchPrepackFp8(args, [](unsigned blocks, const device::PrepackFp8Params& p) {
    Run(blocks, device::kPrepackFp8Threads, [&] { device::PrepackFp8Kernel(p); });
    return 0;
  });
}

// kind: -1 for all matrices, or a MetadataKind, of `count`.
extern "C" void prepack_fp8_kernel(const long (&shape)[3], const long (&scales_shape)[2],
                                   const long (&block)[2], void* weight, void* scales, int kind,
                                   int* data, long count, int* offset, void* out,
                                   void* out_scales) {
  PrepackFp8Args args{};
  args.weight = weight, args.scales = static_cast<const float*>(scales);
  args.out = out, args.out_scales = out_scales;
  args.groups = shape[0], args.n = shape[1], args.k = shape[2];
  args.scale_rows = scales_shape[0], args.scale_columns = scales_shape[1];
  args.block_rows = block[0], args.block_columns = block[1];
  args.some = kind >= 0;
  if (args.some) args.metadata = {static_cast<MetadataKind>(kind), data, offset, count};
  Launch(args);
}

extern "C" void scale_words(long count, const float* scales, const bool* nan, uint32_t* words) {
  for (long i = 0; i < count; ++i) words[i] = device::Fp8ScaleWord(scales[i], nan[i]);
}
