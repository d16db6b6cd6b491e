"""``python -m jax_groupgemm.tune``: measure which tile of the Hopper kernel is fastest."""
