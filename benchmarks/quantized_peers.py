"""Other implementations of products with quantized weights, as arms of benchmarks.timing.

dequantize  jgg.dequantize of all experts, then jgg.grouped_mm, in one program
torch       jgg.dequantize of all experts, then torch._grouped_mm: the sum of both times
loop        one jgg.quantized_matmul per expert, its rows known on the host, in one program
humming     Humming's grouped product, at the configuration that its heuristics choose
mlx         MLX's CUDA kernels

Each raises, with a reason, where it cannot run a case. All read the same codes and scales.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_groupgemm as jgg

from .mlx import MlxArm, from_mlx, mlx, to_mlx
from .peers import Unsupported, tensor
from .quantized import Case, Operands, Weights, to_bfloat16
from .quantized_shapes import Convert, Gather, Qmm
from .timing import JaxArm, SumArm, TorchArm, torch


def dequantize_arm(case: Qmm, v: Operands) -> JaxArm:
    f = lambda x, w, s: jgg.grouped_mm(x, to_bfloat16(w), s, transpose_w=True)
    return JaxArm(f, (v.x, v.weights.linear, jnp.asarray(v.route)), case.cold)


def torch_arm(case: Qmm, v: Operands) -> SumArm:
    x, w = tensor_of(v.x), tensor_of(v.weights.dequantized).transpose(-2, -1)
    ends = tensor(np.cumsum(v.route))
    return SumArm(
        JaxArm(to_bfloat16, (v.weights.linear,), case.cold),
        TorchArm(lambda: torch()._grouped_mm(x, w, offs=ends), case.cold),
    )


def loop_arm(case: Gather, v: Operands) -> JaxArm:
    rows = [np.flatnonzero(v.route == g) for g in np.unique(v.route)]
    place = np.argsort(np.concatenate(rows))
    matrices = [
        jax.tree.map(lambda leaf, g=g: leaf[g], v.weights.linear) for g in np.unique(v.route)
    ]

    def f(x, matrices):
        products = zip(rows, matrices, strict=True)
        parts = [jgg.quantized_matmul(x[i, 0], w) for i, w in products]
        return jnp.concatenate(parts)[place, None]

    return JaxArm(f, (v.x, matrices), case.cold)


# ---- Humming ---------------------------------------------------------------------------------

# Elements whose codes Humming spreads to 32 bits each while it puts weights in its own order.
CHUNK = 2**28


def humming_arm(case: Qmm, v: Operands) -> TorchArm:
    if case.format.mode == "fp8":
        raise Unsupported("its blocks of 128 x 128 are not timed here")
    run = importlib.import_module("humming.forward").humming_forward
    tune = importlib.import_module("humming.tune").get_heuristics_config
    if "humming" not in v.weights.peers:
        v.weights.peers["humming"] = humming_weights(v.weights)
    config, tensors = v.weights.peers["humming"]
    kind = "grouped_contiguous"
    options = {
        "compute_config": {"gemm_type": kind},
        "tuning_config": tune(config, shape_m=len(v.x), gemm_type=kind),
        "expert_layout": tensor(np.concatenate([[0], np.cumsum(v.route)])),
        "locks": torch().zeros(2048, dtype=torch().int32, device="cuda"),
    }
    x = tensor_of(v.x)
    out = torch().empty((len(v.x), config.shape_n), dtype=x.dtype, device="cuda")

    def f():
        run(config, inputs=x, outputs=out, **tensors, **options)
        return out

    return TorchArm(f, case.cold)


def humming_weights(weights: Weights) -> tuple[Any, dict[str, Any]]:
    """Humming's configuration of a layer, and the weights in its order."""
    dtypes, schema = (importlib.import_module(f"humming.{m}") for m in ("dtypes", "schema"))
    transform = importlib.import_module("humming.transform")
    groups, n, k = weights.shape
    form, bfloat16 = weights.format, torch().bfloat16
    element, scale, scale_type = {
        "affine": (f"uint{form.bits}", None, bfloat16),
        "mxfp4": ("float4e2m1", "float8e8m0", torch().float8_e8m0fnu),
        "mxfp8": ("float8e4m3", "float8e8m0", torch().float8_e8m0fnu),
        "nvfp4": ("float4e2m1", "float8e4m3", torch().float8_e4m3fn),
    }[form.mode]
    asked = schema.HummingWeightSchema(
        b_dtype=element, bs_dtype=scale, weight_scale_group_size=form.group_size
    )
    codes = tensor_of(weights.linear.weight).view(torch().int32)
    scales = tensor_of(weights.linear.scales).view(scale_type)
    rows = schema.HummingInputSchema(a_dtype=dtypes.bfloat16)
    layer = functools.partial(
        transform.prepare_layer_config, n, k, input_schema=rows, torch_dtype=bfloat16
    )
    parts, chosen = [], asked
    step = max(1, CHUNK // (n * k))
    for some in (slice(i, i + step) for i in range(0, groups, step)):
        part = {"weight": codes[some].contiguous(), "weight_scale": scales[some].contiguous()}
        chosen, part = asked.convert_symmetric_integer_weight(part)
        config = layer(chosen, num_experts=len(part["weight"]))
        parts.append(transform.transform_humming_tensors(config, part))
    tensors = {name: joined([part[name] for part in parts]) for name in parts[0]}
    return layer(chosen, num_experts=groups), tensors


def joined(parts: list):
    """As bytes: of some dtypes torch.cat has no kernel."""
    as_bytes = [part.contiguous().view(torch().uint8) for part in parts]
    return torch().cat(as_bytes).view(parts[0].dtype)


# ---- MLX -------------------------------------------------------------------------------------

MLX_BYTES = 2**31  # of weights: they pass through the host


def mlx_lacks(case: Case) -> str | None:
    """Why MLX does not run a case."""
    if case.format.bytes(case.groups * case.n * case.k) > MLX_BYTES:
        return "its weights would pass through the host"
    if isinstance(case, Convert) and case.global_scale:
        return "no global scale per matrix"
    return None


def mlx_arm(case: Case, v: Operands) -> MlxArm:
    if why := mlx_lacks(case):
        raise Unsupported(why)
    mx, form = mlx(), case.format
    static = {"group_size": form.group_size, "bits": form.bits, "mode": form.mode}
    if isinstance(case, Convert) and case.op == "quantize":
        w = to_mlx(v.x)
        pack = lambda leaves: jgg.Quantized(*map(from_mlx, leaves), **static)
        return MlxArm(lambda: mx.quantize(w, **static), pack, case.cold)
    if "mlx" not in v.weights.peers:
        w = v.weights.linear
        leaves = (w.weight, w.scales) if w.biases is None else (w.weight, w.scales, w.biases)
        v.weights.peers["mlx"] = [to_mlx(leaf) for leaf in leaves]
    leaves = v.weights.peers["mlx"]
    if isinstance(case, Convert):
        f = lambda: mx.dequantize(*leaves, dtype=getattr(mx, case.dtype), **static)
        return MlxArm(f, from_mlx, case.cold)
    route = np.repeat(np.arange(case.groups), v.route) if isinstance(case, Qmm) else v.route
    options = static | {
        "rhs_indices": to_mlx(route.astype(np.uint32)), "sorted_indices": isinstance(case, Qmm)
    }  # fmt: skip
    x = to_mlx(v.x)
    x = x[:, None] if isinstance(case, Qmm) else x
    shape = (len(v.x), case.n) if isinstance(case, Qmm) else (len(v.x), 1, case.n)
    f = lambda: mx.gather_qmm(x, *leaves, **options).reshape(shape)
    return MlxArm(f, from_mlx, case.cold)


def tensor_of(a: jax.Array):
    return torch().utils.dlpack.from_dlpack(a)


PEERS = {
    "dequantize": dequantize_arm,
    "torch": torch_arm,
    "humming": humming_arm,
    "mlx": mlx_arm,
    "loop": loop_arm,
}
KNOWN = {
    Qmm: ("dequantize", "torch", "humming", "mlx"),
    Gather: ("loop", "mlx"),
    Convert: ("mlx",),
}


def complete(case: Case) -> tuple[str, ...]:
    """Peers without which a record of such cases is partial."""
    if isinstance(case, Qmm):
        return ("dequantize", "torch", "humming")
    return tuple(name for name in KNOWN[type(case)] if name != "mlx" or mlx_lacks(case) is None)


def peer_arms(case: Case, v: Operands, args) -> dict[str, Callable]:
    names = [name for name in args.peers if name in KNOWN[type(case)]]
    return {name: functools.partial(PEERS[name], case, v) for name in names}
