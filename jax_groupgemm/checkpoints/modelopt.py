"""NVIDIA Model Optimizer's NVFP4 layers, stacked experts, and FP8 layers.

https://github.com/NVIDIA/Model-Optimizer: modelopt/torch/export/unified_export_hf.py
(``_export_quantized_weight``: experts of Llama 4 and gpt-oss are stored ``(G, K/2, N)``, as their
modules have K and N; others ``(G, N, K/2)``), modelopt/torch/export/quant_utils.py (``quant_algo``,
``exclude_modules``, ``quantized_layers``).
"""

from __future__ import annotations

import numpy as np

from . import fp8, nvfp4
from .layer import Format, Kind, Layer, Read, one

FP8 = {"FP8": "tensor", "FP8_PER_CHANNEL_PER_TOKEN": "channel"}  # and what has a scale each
ALGORITHMS = ("NVFP4", "W4A16_NVFP4", *FP8)


def _own(t: Layer) -> Layer:
    """With what config says of this layer."""
    for key in ("exclude_modules", "ignore"):  # of layers, or of the modules that they are in
        t.refuse(key, t.fnmatch)
    if t.option("quant_algo", (*ALGORITHMS, "MIXED_PRECISION")) == "MIXED_PRECISION":
        layers = t.parts("quantized_layers")
        name = next((name for name in t.and_outer() if name in layers), None)
        if name is None:
            raise t.error("config says it is not quantized: quantized_layers do not name it")
        t = t._replace(config=t.mapping(f"quantized_layers[{name!r}]", layers[name]))
        t.option("quant_algo", ALGORITHMS)
    if t.option("quant_algo") not in FP8:
        t.option("group_size", (16,))
    return t


def _choose(t: Layer, kinds) -> tuple[Layer, Kind]:
    t = _own(t)
    said = t.option("quant_algo")
    if said is None:
        return one(t, kinds)
    own = [kind for kind in kinds if (kind.read is _fp8) == (said in FP8 and not t.stacked)]
    return one(t, own)


def _linear(t: Layer) -> Read:
    return nvfp4.read(t, ".weight", ".weight_scale_2", t.scalar(".weight_scale_2"))


def _fp8(t: Layer) -> Read:
    return fp8.of_rows_or_all(t, ".weight_scale", FP8.get(t.option("quant_algo") or ""))


def _stacked(t: Layer) -> Read:
    """Rows as they are stored; of gpt-oss, whose gate and up take turns, gate's and then up's."""
    scale_leaf = "_weight_scale"
    weight = t.get("", ("uint8",), "N, K/2", (None, None, None))
    g, a, b = weight.shape
    scales = t.get(scale_leaf, ("float8_e4m3fn",), "N, K/16", (g, None, None))
    # The axis that is packed is that of which the scales have an eighth.
    if scales.shape == (g, a // 8, b) and a % 8 == 0:
        weight, scales = weight.swapaxes(1, 2), scales.swapaxes(1, 2)
    elif scales.shape != (g, a, b // 8) or b % 8:
        raise t.error(
            f"{scale_leaf} has shape {scales.shape}, expected (G, N, K/16) = {(g, a, b // 8)} of "
            f"(G, N, K/2) = {weight.shape}, or (G, K/16, N) = {(g, a // 8, b)} of (G, K/2, N)"
        )
    n = weight.shape[1]
    t.check_shape((g, n, 2 * weight.shape[2]))
    leaf = "_weight_scale_2"
    scale = t.array(leaf, ("float32",))
    scale = scale[..., 0] if scale.shape in ((g, 1, 1), (g, 2, 1)) else scale
    halves = scale.shape == (g, 2) and n % 2 == 0
    if scale.shape in ((1,), (g, 1)):
        scale = scale.reshape(() if scale.shape == (1,) else g)
    if scale.shape not in ((), (g,)) and not halves:
        raise t.error(f"{leaf} has shape {scale.shape}, expected one number, or (G,) or (G, 2)")
    scale = nvfp4.multiplier(t, leaf, scale)
    if halves:  # of gate's rows, and of up's
        scale = np.repeat(scale, n // 2, axis=1)
    gate_up = t.prefix.rpartition(".")[2] == "gate_up_proj"
    if gate_up and t.model.get("model_type") == "gpt_oss":
        if n % 2 or halves:
            raise t.error(f"has {n} rows and a {leaf} {scale.shape}, not gate and up by turns")
        weight, scales = (np.concatenate([x[:, ::2], x[:, 1::2]], 1) for x in (weight, scales))
    return nvfp4.leaves(t, weight, scales, scale_leaf, scale)


FORMAT = Format(
    kinds=(
        Kind(
            "NVFP4",
            (".weight", ".weight_scale", ".weight_scale_2"),
            (".input_scale", ".k_scale", ".v_scale", ".bias"),
            _linear,
        ),
        Kind(
            "NVFP4 experts, stacked",
            ("", "_weight_scale", "_weight_scale_2"),
            ("_input_scale", "_bias"),
            _stacked,
            stacked=(True,),
        ),
        Kind(
            "FP8",
            (".weight", ".weight_scale"),
            (".input_scale", ".k_scale", ".v_scale", ".bias"),
            _fp8,
            dtype=(".weight", fp8.CODES),
        ),
    ),
    methods=("modelopt", "modelopt_fp4"),
    choose=_choose,
)
