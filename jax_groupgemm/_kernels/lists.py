"""Whether tokens are gathered beside a product, or their rows are copied first."""

from __future__ import annotations

from . import choose, extension
from .problems import HALVES, Mm, Wgrad

# A product takes longer when it gathers its rows: mm an eighth, and weight gradients a third. A
# copy of the rows takes as long whatever they are multiplied by. So lists pay where each row is
# multiplied by no more columns than these. Backward, both products of the rows have to take the
# list, or the copy is made anyway; docs/lab has what was measured (H100).
MOST_COLUMNS_FORWARD = 2048
MOST_COLUMNS_BACK = 1000


def mm(p: Mm) -> choose.Choice | None:
    """The kernel for products of which x comes by list, of many rows; None for a copy of the rows
    that are named."""
    choice = choose.fused(p)
    if choice is not None and choice.kernel.name == "cpu":
        return choice  # which packs its operands anyway
    takes = choice is not None and choice.kernel.name == "sm90" and _pays(p.n, p.gated)
    takes = takes and extension.rules().lists_many_rows_sm90(
        rows=p.rows // max(p.segments, 1), k=p.k, n=p.n, gated=p.gated,
        preactivation=p.preactivation,
    )  # fmt: skip
    return choice if takes and _hopper() else None


def wgrad(p: Wgrad) -> choose.Choice | None:
    """The same of weight gradients, of which one operand comes by list."""
    choice = choose.choose(p)
    if choice is not None and choice.kernel.name == "cpu":
        return choice
    if choice is None or choice.kernel.name != "sm90":
        return None
    if choice.config["parts"] > 1 or choice.config["ranges"] > 1:
        return None
    columns = p.b if p.x_list else p.a  # that multiply a row that is gathered
    takes = p.operand_dtype in HALVES and min(p.a, p.b) > 128
    takes = takes and p.rows > 64 * p.groups and _pays(columns)
    return choice if takes and _hopper() else None


def _pays(columns: int, forward: bool = False) -> bool:
    return columns <= (MOST_COLUMNS_FORWARD if forward else MOST_COLUMNS_BACK)


def _hopper() -> bool:
    """Whether every device is one, or none is there: the call is lowered for another machine."""
    return set(extension.live_capabilities()) in ({90}, set())
