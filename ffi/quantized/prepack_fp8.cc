// CUDA handler of prepack of mode "fp8": bind, check, launch.

#include "common/arch.h"
#include "common/buffer.h"
#include "common/check.h"
#include "common/cuda_error.h"
#include "grouped_mm/metadata_bind.h"
#include "handlers.h"
#include "quantized/attributes.h"
#include "quantized/prepack_fp8_sm80.h"

namespace jgg {
namespace ffi = xla::ffi;

static constexpr const char* kOp = "prepack_fp8";

// The groups that have rows; without a kind, all of them.
static ffi::Error BindGroupsWithRows(const MetadataAttrs& attrs, ffi::RemainingArgs rest,
                                     PrepackFp8Args* args) {
  Operands operands(kOp, rest);
  args->some = !attrs.kind.empty();
  if (args->some) {
    const auto metadata = operands.Take("metadata");
    if (!metadata) return metadata.error();
    JGG_RETURN_IF_ERROR(BindMetadata(kOp, attrs, *metadata, &args->metadata));
    if (attrs.group_offset) JGG_RETURN_IF_ERROR(BindGroupOffset(kOp, &operands, &args->metadata));
  }
  return operands.End();
}

static ffi::Error PrepackFp8(cudaStream_t stream, ffi::AnyBuffer weight, ffi::AnyBuffer scales,
                             ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> out,
                             ffi::Result<ffi::AnyBuffer> out_scales, BlockAttrs block,
                             MetadataAttrs metadata) {
  JGG_RETURN_IF_ERROR(CheckDtype(kOp, "weight", weight, ffi::F8E4M3FN, "float8_e4m3fn"));
  JGG_RETURN_IF_ERROR(CheckShape(kOp, "weight", "(G, N, K)", weight, {-1, -1, -1}));
  const auto shape = weight.dimensions();
  PrepackFp8Args args{};
  args.groups = shape[0], args.n = shape[1], args.k = shape[2];
  args.block_rows = block.rows, args.block_columns = block.columns;
  JGG_RETURN_IF_ERROR(CheckSmall(kOp, {args.groups, args.n, args.k}, 0));
  if (args.n % 64 != 0 || args.k % 128 != 0) {
    return InvalidArgument(kOp, "weight has shape ", ShapeText(weight),
                           ", expected N % 64 == 0 and K % 128 == 0");
  }
  if (block.rows < 1 || block.columns < 1 || (block.columns % 128 != 0 && block.columns < args.k)) {
    return InvalidArgument(kOp, "a block of ", block.rows, " x ", block.columns,
                           " has no whole 128 columns or all");
  }
  args.scale_rows = (args.n + block.rows - 1) / block.rows;
  args.scale_columns = (args.k + block.columns - 1) / block.columns;
  JGG_RETURN_IF_ERROR(CheckDtype(kOp, "scales", scales, ffi::F32, "float32"));
  JGG_RETURN_IF_ERROR(CheckShape(kOp, "scales", "(G, blocks along N, blocks along K)", scales,
                                 {args.groups, args.scale_rows, args.scale_columns}));
  const int64_t row_tiles = args.n / 64;
  JGG_RETURN_IF_ERROR(CheckShape(kOp, "the packed weight", "(G, N/64, K/64, 1024)", *out,
                                 {args.groups, row_tiles, args.k / 64, 1024}));
  JGG_RETURN_IF_ERROR(CheckShape(kOp, "the packed scales", "(G, N/64, K/128, 64)", *out_scales,
                                 {args.groups, row_tiles, args.k / 128, 64}));
  for (const auto& buffer : {*out, *out_scales}) {
    JGG_RETURN_IF_ERROR(CheckDtype(kOp, "a result", buffer, ffi::U32, "uint32"));
  }
  JGG_RETURN_IF_ERROR(BindGroupsWithRows(metadata, rest, &args));
  args.weight = weight.untyped_data();
  args.scales = static_cast<const float*>(scales.untyped_data());
  args.out = out->untyped_data();
  args.out_scales = out_scales->untyped_data();
  if (auto reason = prepack_fp8_sm80_unsupported(args, ComputeCapability())) {
    return Unimplemented(kOp, *reason);
  }
  return FromCuda(kOp, prepack_fp8_sm80(stream, args));
}

XLA_FFI_DEFINE_HANDLER(kPrepackFp8, PrepackFp8,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // weight
                           .Arg<ffi::AnyBuffer>()  // scales
                           .RemainingArgs()        // metadata, group_offset
                           .Ret<ffi::AnyBuffer>()  // packed weight
                           .Ret<ffi::AnyBuffer>()  // packed scales
                           .Attr<BlockAttrs>("block")
                           .Attr<MetadataAttrs>("metadata"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Error* JggPrepackFp8(XLA_FFI_CallFrame* call_frame) { return kPrepackFp8(call_frame); }

}  // namespace jgg
