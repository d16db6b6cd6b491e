"""Training in NVFP4: two-level scales, and products of two quantized operands."""
