"""Other implementations of a case, as arms of benchmarks.timing.

Each takes a case and its operands and raises, with a reason, where it cannot run it. Torch's
tensors are the JAX arrays themselves.
"""

import functools
import importlib
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .mlx import MlxArm, from_mlx, mlx, to_mlx
from .shapes import Case, Segmented
from .timing import JaxArm, TorchArm, torch

MLX_TF32 = os.environ.get("MLX_ENABLE_TF32", "1") != "0"  # its default
MOSAIC = "jax.experimental.pallas.ops.gpu."


class Unsupported(Exception):
    pass


@dataclass
class Operands:
    """x and weights of a grouped case, the two factors otherwise; rows of each group.

    ``last``: the weights' last axis is contracted.
    """

    a: jax.Array
    b: jax.Array
    sizes: np.ndarray
    last: bool = False


def ragged_k(case: Case) -> bool:
    return isinstance(case, Segmented) or case.op == "wgrad"


def k_first(case: Case) -> bool:
    """The first factor of a product over ragged K lies (K, M) in memory."""
    return not isinstance(case, Segmented) or case.transpose_a


def only_half(case: Case) -> None:
    if case.kind not in ("bfloat16", "float16"):
        raise Unsupported("half precision only")


def torch_arm(case: Case, v: Operands) -> TorchArm:
    """torch._grouped_mm."""
    if case.kind != "bfloat16":
        raise Unsupported("its kernel is for bfloat16")
    if isinstance(case, Segmented) and not case.transpose_a and case.unit == 1:
        raise Unsupported("needs segments that begin at multiples of 16 bytes")
    a, b, ends = *tensors(v), tensor(np.cumsum(v.sizes))
    left = a.t() if ragged_k(case) and k_first(case) else a
    right = b.transpose(-2, -1) if v.last else b
    return TorchArm(lambda: torch()._grouped_mm(left, right, offs=ends), case.cold)


def loop_arm(case: Case, v: Operands) -> TorchArm:
    """One torch.mm per segment, sizes known on the host, in one CUDA graph."""
    if not isinstance(case, Segmented):
        raise Unsupported("segmented only")
    a, b = tensors(v)
    left = a.t() if case.transpose_a else a
    out = torch().empty((case.count, case.m, case.n), dtype=a.dtype, device="cuda")
    bounds = case.bounds().tolist()
    spans = list(itertools.pairwise(bounds))
    torch().backends.cuda.matmul.allow_tf32 = case.kind == "tf32"

    def f():
        for result, (i, j) in zip(out, spans, strict=True):
            torch().mm(left[:, i:j], b[i:j], out=result)
        return out

    return TorchArm(f, case.cold)


def quack_arm(case: Case, v: Operands) -> TorchArm:
    """QuACK, at the fastest of its default configuration and a few others."""
    only_half(case)
    if ragged_k(case) and not k_first(case):
        raise Unsupported("needs the first factor as (K, M)")
    quack = importlib.import_module("quack.gemm_interface")
    config = importlib.import_module("quack.gemm_config").GemmConfig
    a, b, ends = *tensors(v), tensor(np.concatenate([[0], np.cumsum(v.sizes)]))
    if ragged_k(case):
        left, right, cut = a.t(), b, {"cu_seqlens_k": ends}
        shape = (len(v.sizes), a.shape[1], b.shape[1])
    else:
        left, right, cut = a, b.mT if v.last else b, {"cu_seqlens_m": ends}
        shape = (a.shape[0], right.shape[-1])
    out = torch().empty(shape, dtype=a.dtype, device="cuda")

    def f(chosen):
        quack.gemm_tuned.fn(left, right, out, config=chosen, **cut)
        return out

    fixed = functools.partial(config, is_dynamic_persistent=False)
    candidates = [
        None,
        fixed(tile_m=128, tile_n=192, pingpong=True, cluster_m=1, cluster_n=2),
        fixed(tile_m=128, tile_n=128, pingpong=True, cluster_m=1, cluster_n=2),
        fixed(tile_m=128, tile_n=256, pingpong=False, cluster_m=2, cluster_n=1),
        fixed(tile_m=256, tile_n=128, pingpong=False, cluster_m=2, cluster_n=1),
    ]
    best, best_us, first_error = None, float("inf"), None
    for chosen in candidates:
        try:
            arm = TorchArm(functools.partial(f, chosen), case.cold)
            us = min(arm.time(3))
        except Exception as error:
            first_error = first_error or error
            continue
        if us < best_us:
            best, best_us, arm = arm, us, best
        if arm is not None:
            arm.close()
    if best is None:
        raise first_error or RuntimeError("no configuration")
    return best


def lax_arm(case: Case, v: Operands) -> JaxArm:
    """jax.lax.ragged_dot and ragged_dot_general, as XLA compiles them by default."""
    if len(v.sizes) * v.a.size > 2**33:
        gigabytes = len(v.sizes) * v.a.size * v.a.dtype.itemsize / 2**30
        raise Unsupported(f"copies the first factor per group, {gigabytes:.0f} GiB")
    sizes, precision = jnp.asarray(v.sizes), getattr(case, "precision", None)
    if ragged_k(case):
        axis = 0 if k_first(case) else 1
        numbers = lax.RaggedDotDimensionNumbers((([axis], [0]), ([], [])), [axis], [])
    elif v.last:
        numbers = lax.RaggedDotDimensionNumbers((([1], [2]), ([], [])), [0], [0])
    else:
        numbers = lax.RaggedDotDimensionNumbers((([1], [1]), ([], [])), [0], [0])
    f = lambda a, b, s: lax.ragged_dot_general(a, b, s, numbers, precision=precision)
    return JaxArm(f, (v.a, v.b, sizes), case.cold)


def mosaic_arm(case: Case, v: Operands) -> JaxArm:
    """Pallas Mosaic's ragged_dot_mgpu and transposed_ragged_dot_mgpu, in jax."""
    only_half(case)
    if ragged_k(case) and not k_first(case):
        raise Unsupported("needs the first factor as (K, M)")
    block: dict[str, Any] = {"block_m": 128, "block_k": 64, "max_concurrent_steps": 4}
    if ragged_k(case):
        module = importlib.import_module(MOSAIC + "transposed_ragged_dot_mgpu")
        m, n = v.a.shape[1], v.b.shape[1]
        block |= {"block_m": 128 if m % 128 == 0 else 64, "block_n": 192 if n % 192 == 0 else 128}
        block["grid_block_n"] = 1
        f = lambda a, b, s: module.transposed_ragged_dot(a, b, group_sizes=s, **block)
    else:
        module = importlib.import_module(MOSAIC + "ragged_dot_mgpu")
        block |= {"block_n": 192, "grid_block_n": 1, "transpose_rhs": v.last}
        f = lambda a, b, s: module.ragged_dot(a, b, group_sizes=s, **block)
    return JaxArm(f, (v.a, v.b, jnp.asarray(v.sizes)), case.cold)


def mlx_arm(case: Case, v: Operands) -> MlxArm:
    if not isinstance(case, Segmented):
        raise Unsupported("segmented only")
    if case.kind in ("float32", "tf32") and (case.kind == "tf32") != MLX_TF32:
        raise Unsupported(f"the environment variable MLX_ENABLE_TF32 is {int(MLX_TF32)}")
    a, b = to_mlx(v.a), to_mlx(v.b)
    bounds = case.bounds()
    spans = to_mlx(np.stack([bounds[:-1], bounds[1:]], 1).astype(np.uint32))
    left = a.T if case.transpose_a else a
    return MlxArm(lambda: mlx().segmented_mm(left, b, spans), from_mlx, case.cold)


def tensors(v: Operands) -> tuple:
    from_dlpack = torch().utils.dlpack.from_dlpack
    return from_dlpack(v.a), from_dlpack(v.b)


def tensor(values: np.ndarray):
    return torch().tensor(values, dtype=torch().int32, device="cuda")


PEERS = {
    "torch": torch_arm,
    "quack": quack_arm,
    "lax": lax_arm,
    "mosaic": mosaic_arm,
    "loop": loop_arm,
    "mlx": mlx_arm,
}


def complete(case: Case) -> tuple[str, ...]:
    """Peers without which a record of such cases is partial."""
    return () if case.op == "scan" else ("torch", "quack", "lax", "mosaic")


def peer_arms(case: Case, v: Operands, args) -> dict[str, Callable]:
    """Functions that make an arm, by name."""
    if case.op == "scan":
        return {}
    names = [name for name in args.peers if name in PEERS]
    if not isinstance(case, Segmented):
        names = [name for name in names if name not in ("loop", "mlx")]
    return {n: functools.partial(PEERS[n], case, v) for n in names}
