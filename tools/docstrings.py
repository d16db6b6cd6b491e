"""Docstrings for mkdocstrings: what they have of reStructuredText becomes Markdown.

An extension of griffe, named in mkdocs.yml. Roles become links, ``::`` an indented block, and
simple tables Markdown's.
"""

import re

from griffe import Docstring, Extension

_ROLE = re.compile(r":(?:func|class|data):`~?([\w.]+)`")
_RULE = re.compile(r"=+(?: +=+)+\s*$")


# Names of public modules, as their docstrings have them.
_MODULES = {
    "checkpoints": ("open", "linear", "experts", "act_order", "read_json"),
    "cost": ("of", "Cost"),
    "nnx": ("BalanceBias", "MoE"),
    "router": (
        "Choice",
        "Report",
        "balance_loss",
        "choose",
        "choose_for",
        "load",
        "report",
        "shifted_bias",
        "z_loss",
    ),
}
_HOMES = {name: f"{module}." for module, names in _MODULES.items() for name in names}


def _link(match: re.Match) -> str:
    name = match[1]
    if name.startswith("jax."):
        return f"`{name}`"
    return f"[`{name}`][jax_groupgemm.{_HOMES.get(name, '')}{name}]"


def _cells(line: str, rule: str) -> list[str]:
    """A line's columns, which begin where those of the rule do; the last one is open."""
    begins = [m.start() for m in re.finditer(r"=+", rule)]
    ends = [*begins[1:], None]
    return [line[a:b].strip().replace("|", r"\|") for a, b in zip(begins, ends, strict=True)]


def _table(rule: str, lines: list[str]) -> list[str]:
    """Markdown rows of a table: its header, a rule, its body; rows without a first cell go on."""
    rows: list[list[str]] = []
    for line in lines:
        if _RULE.match(line.strip()):
            continue
        cells = _cells(line, rule)
        if rows and not cells[0]:
            rows[-1] = [f"{a} {b}".strip() for a, b in zip(rows[-1], cells, strict=True)]
        else:
            rows.append(cells)
    text = ["| " + " | ".join(row) + " |" for row in rows]
    return [text[0], "|" + "---|" * len(rows[0]), *text[1:]]


def to_markdown(text: str) -> str:
    lines, out, i = text.splitlines(), [], 0
    while i < len(lines):
        if _RULE.match(lines[i].strip()):
            # A table has three rules: above and below its header, and at its end.
            rules = [j for j in range(i, len(lines)) if _RULE.match(lines[j].strip())][:3]
            if len(rules) == 3:
                indent = len(lines[i]) - len(lines[i].lstrip())
                body = [line[indent:] for line in lines[i : rules[2] + 1]]
                out += [" " * indent + row for row in _table(body[0], body[1:])]
                i = rules[2] + 1
                continue
        out.append(re.sub(r"::$", ":", lines[i]))
        i += 1
    return _ROLE.sub(_link, "\n".join(out))


class Markdown(Extension):
    def on_instance(self, *, obj, **kwargs) -> None:
        if isinstance(obj.docstring, Docstring):
            obj.docstring.value = to_markdown(obj.docstring.value)
