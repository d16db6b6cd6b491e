"""``python -m jax_groupgemm.check``: every kernel of this machine against float64."""
