"""MLX's CUDA kernels as arms of benchmarks.timing. MLX is imported when an arm is made."""

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import timing


class MlxArm:
    """The kernels of ``f()``, helpers included (CUPTI): their mean, since the order in which CUPTI
    tells of several streams is not known."""

    def __init__(self, f, result, cold: bool):
        self.f: Any = f
        self.to_jax, self.cold = result, cold
        self.run()

    def run(self) -> Any:
        mx = mlx()
        out = self.f()
        mx.eval(out)
        mx.synchronize()
        return out

    def result(self) -> Any:
        return self.to_jax(self.run())

    def time(self, n: int) -> list[float]:
        return [timing.mean_us(self.run, n, self.cold)] * n

    def close(self) -> None:
        self.f = None


@functools.cache
def mlx():
    return importlib.import_module("mlx.core")


def to_mlx(a):
    """Through the host; bfloat16 as its bits."""
    a = np.asarray(a)
    if a.dtype == jnp.bfloat16:
        return mlx().array(a.view(np.uint16)).view(mlx().bfloat16)
    return mlx().array(a)


def from_mlx(a) -> jax.Array:
    if a.dtype == mlx().bfloat16:
        return jnp.asarray(np.array(a.view(mlx().uint16)).view(jnp.bfloat16))
    return jnp.asarray(np.array(a))
