"""``python -m jax_groupgemm.check``: every kernel of this machine against float64."""

from ._check.command import main

if __name__ == "__main__":
    raise SystemExit(main())
