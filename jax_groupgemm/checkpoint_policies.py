"""What ``jax.checkpoint`` keeps for the backward pass: policies that know this package's products.

JAX's ``dots_saveable`` knows JAX's own products only: with it, and without a policy, the backward
pass computes every product of this package once more. Combine policies with
``jax.checkpoint_policies.save_from_both_policies``.
"""

from __future__ import annotations

from typing import Any

from ._kernels import rows

__all__ = ["grouped_products_saveable"]

# All of our primitives but these are products.
_CONVERSIONS = {f"jgg_{op}" for op in (*rows.CONVERSIONS, "activation", "send", "collect")}


def grouped_products_saveable(prim: Any, *_: Any, **params: Any) -> bool:
    """Keep the results of this package's products, and compute everything else once more.

    For ``jax.checkpoint(f, policy=jgg.checkpoint_policies.grouped_products_saveable)``. The policy
    keeps a product before its bias, activation and row scale (then as float32), because the
    backward pass starts from there. Quantizing does not count as a product.

    Args:
      prim: a primitive of JAX.
      params: its parameters.

    Returns:
      Whether its result is kept.

    Examples:
      >>> x, w, sizes = jnp.ones((4, 8)), jnp.ones((2, 8, 8)), jnp.array([3, 1])
      >>> layer = jax.checkpoint(
      ...     lambda w: jnp.sin(jgg.grouped_mm(x, w, sizes)).sum(),
      ...     policy=jgg.checkpoint_policies.grouped_products_saveable,
      ... )
      >>> jax.grad(layer)(w).shape
      (2, 8, 8)
    """
    if prim.name == "name":  # of what hides its products
        return params["name"].startswith("jgg_")
    return prim.name.startswith("jgg_") and prim.name not in _CONVERSIONS


def __dir__() -> list[str]:
    return sorted(__all__)
