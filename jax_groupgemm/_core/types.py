"""Types of public arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from jax.typing import ArrayLike

#: A kernel by name, or the plain JAX program.
Implementation = Literal["reference", "cpu", "sm80", "sm89", "sm90", "sm100"]
#: What an activation is called; those of the second line are gated.
Activation = Literal[
    "silu", "gelu", "gelu_erf", "relu", "relu2", "tanh",
    "swiglu", "geglu", "reglu", "swiglu_oai",
]  # fmt: skip
#: How tokens travel to experts of other devices.
Transport = Literal["gather", "all_to_all"]
#: Formats of quantized weights.
Mode = Literal["affine", "mxfp4", "mxfp8", "nvfp4", "fp8"]
#: How a quantized weight lies in memory.
LayoutName = Literal["linear", "sm90", "grouped", "swizzled"]
#: Sizes, indices and bounds: an array, or numbers that become one.
Integers = ArrayLike | Sequence[int] | Sequence[Sequence[int]]
#: Libraries whose quantized checkpoints are read: those whose layers are all quantized, and all.
QuantizedFormat = Literal[
    "mlx", "awq", "gptq", "compressed-tensors", "modelopt", "gpt-oss", "fp8"
]  # fmt: skip
CheckpointFormat = Literal[QuantizedFormat, "gguf"]
