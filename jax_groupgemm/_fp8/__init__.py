"""FP8: quantizing rows and weights in blocks, products of two such operands, training."""
