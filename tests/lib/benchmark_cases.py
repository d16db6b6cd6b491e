"""Checks of a list of a benchmark's cases."""


def check_lists(cases, op: str) -> None:
    """``cases(op, level)``: a longer list has all of a shorter one, and no label stands twice."""
    quick, default, full = (cases(op, level) for level in ("quick", "default", "full"))
    assert 0 < len(quick) <= len(default) <= len(full)
    assert set(quick) <= set(default) <= set(full)
    for listed in (quick, default, full):
        assert len({(c.op, c.label) for c in listed}) == len(listed)
        assert all(c.bytes > 0 for c in listed)
