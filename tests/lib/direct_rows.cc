// ffi/quantized/device/direct_rows.cuh on the host, for test_direct_rows.py.
#include "cuda_on_host.h"
//
#include "quantized/device/direct_rows.cuh"

// The block of each of `rows` rows: first, loaded, inside and weight.
extern "C" void direct_rows(const int32_t* sizes, int count, const int32_t* offset, int groups,
                            int rows, int32_t* found) {
  jgg::Metadata metadata{};
  metadata.kind = jgg::MetadataKind::kSizes;
  metadata.data = sizes;
  metadata.count = count;
  metadata.offset = offset;
  for (int row = 0; row < rows; ++row) {
    Run(1, 32, [&] {
      const auto block = jgg::device::FindDirectRows(metadata, groups, rows, row);
      const int32_t all[] = {block.first, block.loaded, block.inside, block.weight};
      // Every lane finds the same, or lane 0's would not be there.
      if (threadIdx.x == 0) std::memcpy(found + 4 * row, all, sizeof(all));
      __syncwarp();
      if (std::memcmp(found + 4 * row, all, sizeof(all)) != 0) std::abort();
    });
  }
}
