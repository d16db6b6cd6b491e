"""How a folder that cannot be read is refused."""

from __future__ import annotations


class Refused(Exception):
    """One sentence about what is wrong with a checkpoint, and what would be right."""
