"""Values within error messages, which stay short whatever a file or a config holds."""

from __future__ import annotations

LIMIT = 200  # characters


def brief(value) -> str:
    """``repr(value)``, or its beginning and how long it is."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an int of more digits than Python prints, a deep dict
        text = f"<{type(value).__name__}>"
    return cut(text)


def cut(text: str, limit: int = LIMIT) -> str:
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"
