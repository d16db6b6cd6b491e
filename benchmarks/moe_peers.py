"""Layers of torch that benchmarks.moe times: torch's own grouped product, and SonicMoE.

Torch's tensors are the JAX arrays themselves. Each call is one CUDA graph where it can be captured;
else it is launched eagerly between two events.
"""

import functools
import importlib
import time
import traceback
from typing import Any

import jax
import jax.numpy as jnp

from .timing import TorchArm, _torch_scratch, torch

# The configurations of QuACK that SonicMoE's products are tuned over here: rows and columns of a
# tile, and whether two warpgroups take turns. Trying all of them takes many minutes for each shape.
TILES = (
    (256, 128, False),
    (128, 256, False),
    (256, 192, False),
    (128, 192, True),
    (128, 128, True),
)
TUNED = ("gemm_tuned", "gemm_gated_tuned", "gemm_dgated_tuned")
GIB = 2**30


class LayerArm:
    """``f()`` returns a tuple of tensors."""

    def __init__(self, f: Any, cold: bool, convert=None):
        self.f: Any = f
        self.cold = cold
        self.convert = convert or (lambda parts: parts)
        self.graph: Any = None
        self.temporaries = _temporaries(f)
        try:
            self.graph = _Graph(f, cold)
        except Exception:
            traceback.print_exc()
            print("not captured; launched eagerly", flush=True)
            torch().cuda.synchronize()

    @property
    def how(self) -> str:
        return "eager" if self.graph is None else "CUDA graph"

    def time(self, n: int) -> list[float]:
        if self.graph is not None:
            return self.graph.time(n)
        self.f()
        return [self._eager() for _ in range(n)]

    def _eager(self) -> float:
        begin, end = (torch().cuda.Event(enable_timing=True) for _ in range(2))
        if self.cold:
            source, target = _torch_scratch()
            torch().add(source, 1.0, out=target)
        begin.record()
        self.f()
        end.record()
        torch().cuda.synchronize()
        return 1e3 * begin.elapsed_time(end)

    def wall(self, n: int) -> float:
        """Milliseconds of one of n calls in a row, from outside, launched eagerly."""
        self.f()
        torch().cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(n):
            self.f()
        torch().cuda.synchronize()
        return 1e3 * (time.perf_counter() - begin) / n

    def result(self) -> tuple[jax.Array, ...]:
        if self.graph is not None:
            return self.graph.result()
        return arrays(self.f())

    def close(self) -> None:
        if self.graph is not None:
            self.graph.close()
        self.f = self.graph = None
        torch().cuda.empty_cache()


class _Graph(TorchArm):
    def result(self) -> Any:
        """Of a replay into tensors full of NaN."""
        for tensor in self.out:
            tensor.fill_(float("nan"))
        self._replay()
        return arrays(self.out)


def arrays(tensors) -> tuple[jax.Array, ...]:
    out = tuple(jnp.from_dlpack(t.contiguous()) for t in tensors)
    torch().cuda.synchronize()
    return out


def _temporaries(f) -> float:
    """GiB that a call needs at its peak, besides its operands and results."""
    cuda = torch().cuda
    out = f()  # compiles and tunes
    del out
    cuda.synchronize()
    cuda.empty_cache()
    cuda.reset_peak_memory_stats()
    before = cuda.memory_allocated()
    out = f()
    cuda.synchronize()
    peak = cuda.max_memory_allocated() - before
    return (peak - sum(t.numel() * t.element_size() for t in out)) / GIB


def _leaves(arrays_) -> list:
    tensors = [torch().utils.dlpack.from_dlpack(a) for a in arrays_]
    torch().cuda.synchronize()
    return tensors


def _calls(layer, leaves, dy, back: bool):
    """``f()``: the layer's result, and with ``back`` the leaves' gradients."""
    if not back:

        def forward():
            with torch().no_grad():
                return (layer(*leaves),)

        return forward
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]

    def both():
        y = layer(*leaves)
        return (y.detach(), *torch().autograd.grad(y, leaves, dy))

    return both


def torch_layer(x, router, up, down, k: int):
    """As people write it: sort, ``_grouped_mm``, and rows added by index."""
    t = torch()
    value, expert = (x @ router).topk(k, dim=-1)
    weight = value.float().softmax(-1)
    by_expert, order = expert.flatten().sort(stable=True)
    experts = t.arange(router.shape[1], device=x.device)
    ends = t.searchsorted(by_expert, experts, right=True, out_int32=True)
    token = order // k
    h = t._grouped_mm(x.index_select(0, token), up, offs=ends)
    gate, value = h.chunk(2, dim=-1)
    rows = t._grouped_mm(t.nn.functional.silu(gate) * value, down, offs=ends)
    rows = rows * weight.flatten().index_select(0, order)[:, None].to(rows.dtype)
    return t.zeros_like(x).index_add(0, token, rows)


def torch_arm(data, k: int, back: bool, cold: bool = True) -> LayerArm:
    *leaves, dy = _leaves(data)
    layer = functools.partial(torch_layer, k=k)
    return LayerArm(_calls(layer, leaves, dy, back), cold)


@functools.cache
def few_tiles() -> None:
    """QuACK tunes over TILES alone."""
    interface = importlib.import_module("quack.gemm_interface")
    config = importlib.import_module("quack.gemm_config").GemmConfig
    choice = importlib.import_module("quack.autotuner").AutotuneConfig
    choices = [
        choice(
            config=config(
                tile_m=m, tile_n=n, pingpong=pingpong, cluster_m=2, cluster_n=1, swap_ab=False,
                device_capacity=9, is_dynamic_persistent=False, use_tma_gather=False,
            )
        )
        for m, n, pingpong in TILES
    ]  # fmt: skip
    for name in TUNED:
        getattr(interface, name).configs = choices


def interleaved_halves(up):
    """(E, D, 2F), gate and up as halves, to SonicMoE's (E, 2F, D), in turns."""
    gate, value = up.chunk(2, dim=-1)
    return torch().stack([gate, value], -1).flatten(-2).transpose(1, 2).contiguous()


def from_sonic(parts: dict) -> dict:
    """Gradients as ours lie, of some experts."""
    out = dict(parts)
    if "up" in parts:
        both = parts["up"].swapaxes(1, 2)
        out["up"] = jnp.concatenate([both[..., ::2], both[..., 1::2]], -1)
        out["down"] = parts["down"].swapaxes(1, 2)
        out["router"] = parts["router"].T
    return out


def sonic_arm(data, k: int, back: bool, cold: bool = True) -> LayerArm:
    few_tiles()
    functional = importlib.import_module("sonicmoe.functional")
    x, router, up, down, dy = _leaves(data)
    leaves = [
        x, router.t().contiguous(), interleaved_halves(up), down.transpose(1, 2).contiguous()
    ]  # fmt: skip
    stream = torch().cuda.current_stream().cuda_stream

    def layer(x, router, up, down, inference=False):
        out, _, _ = functional.moe_TC_softmax_topk_layer(
            x, router, up.permute(1, 2, 0), None, down.permute(1, 2, 0), None, k, stream, "swiglu",
            inference,
        )  # fmt: skip
        return out

    if back:
        return LayerArm(_calls(layer, leaves, dy, True), cold, from_sonic)
    try:  # without a gradient its mode of inference, which stores no pre-activation
        inference = functools.partial(layer, inference=True)
        return LayerArm(_calls(inference, leaves, dy, False), cold, from_sonic)
    except Exception:
        traceback.print_exc()
        print("SonicMoE's mode of inference failed; without it", flush=True)
        return LayerArm(_calls(layer, leaves, dy, False), cold, from_sonic)


PEERS = {"torch": torch_arm, "sonicmoe": sonic_arm}
NEEDS = {"sonicmoe": "sonicmoe.functional"}


def unavailable(name: str) -> str | None:
    """Why this peer cannot run at all."""
    try:
        torch()
        if name in NEEDS:
            importlib.import_module(NEEDS[name])
        elif not hasattr(torch(), "_grouped_mm"):
            return "this torch has no _grouped_mm"
    except BaseException as why:  # extensions of another build raise what they like
        if isinstance(why, KeyboardInterrupt):
            raise
        return f"{type(why).__name__}: {why}".splitlines()[0][:160]
    return None
