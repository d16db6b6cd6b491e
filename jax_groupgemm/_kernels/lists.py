"""When tokens are gathered beside a product: elsewhere their rows are copied first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import dense, extension
from .problems import HALVES, Mm, Wgrad

# A product takes longer when it gathers its rows: mm an eighth, and weight gradients a third. A
# copy of the rows takes as long whatever they are multiplied by. So lists pay where each row is
# multiplied by no more columns than these. Backward, both products of the rows have to take the
# list, or the copy is made anyway; docs/lab has what was measured (H100).
MOST_COLUMNS_FORWARD = 2048
MOST_COLUMNS_BACK = 1000


def mm_pays(p: Mm, plan: Mapping[str, Any]) -> bool:
    """Of products of which x comes by list, of many rows. A gated one, which is a forward one, may
    have more columns."""
    most = MOST_COLUMNS_FORWARD if p.gated else MOST_COLUMNS_BACK
    return p.n <= most and plan["rows"] == "operand by list"


def wgrad_pays(p: Wgrad, plan: Mapping[str, Any]) -> bool:
    """Of weight gradients, of which one operand comes by list, and which are not cut."""
    if plan["parts"] > 1 or plan["ranges"] > 1:
        return False
    columns = p.b if p.x_list else p.a  # that multiply a row that is gathered
    takes = p.operand_dtype in HALVES and min(p.a, p.b) > 128
    return takes and p.rows > 64 * p.groups and columns <= MOST_COLUMNS_BACK


def cpu_packs(p: Mm | Wgrad, plan: Mapping[str, Any]) -> bool:
    """Kernels of CPUs pack their operands anyway."""
    del p, plan
    return True


def down_backward_fuses(p: Mm) -> str | None:
    """Why the activation's derivative is not made beside the product that gives its cotangent."""
    if p.activation != (needed := extension.rules().BACKWARD_ACTIVATION):
        return f"needs activation {needed!r}, got {p.activation!r}"
    if p.out_dtype != p.dtypes[0]:
        return "h and the cotangent differ in dtype"
    return dense.mm_fuses(p)
