"""The compiled kernels: loading them, and which one runs."""
