"""Quantized weights, their formats and layouts, and products with them."""
