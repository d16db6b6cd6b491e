"""What the documentation keeps to: short, true to the records, without dead ends."""

import re
import shlex
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))  # last: an installed jax_groupgemm comes first

from benchmarks import report  # noqa: E402

DOCS, RESULTS = ROOT / "docs", ROOT / "benchmarks/results"
PAGES = sorted(DOCS.rglob("*.md"))
OTHERS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
USERS = [page for page in PAGES if page.relative_to(DOCS).parts[0] not in ("internals", "lab")]
CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
TARGET = re.compile(r"\]\((?!https?:)([^)#]*)(?:#[^)]*)?\)")


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def prose(page: Path) -> list[str]:
    """Its lines without code, tables and where links lead."""
    text = re.sub(r"\]\([^)]*\)", "]", CODE.sub("", page.read_text()))
    return [line for line in text.splitlines() if not line.startswith("|")]


@pytest.mark.parametrize("page", [*OTHERS, *PAGES], ids=named)
def test_lines_are_short(page):
    text = CODE.sub("", page.read_text())
    long = [line for line in text.splitlines() if len(line) > 120 and not line.startswith("|")]
    assert not long


@pytest.mark.parametrize("page", [*OTHERS, *PAGES], ids=named)
def test_a_row_of_a_table_is_a_line(page):
    text = CODE.sub("", page.read_text())
    assert [
        r for r in text.splitlines() if r.startswith("|") and not r.rstrip().endswith("|")
    ] == []


@pytest.mark.parametrize("page", [*OTHERS, *PAGES], ids=named)
def test_links_lead_somewhere(page):
    for target in filter(None, TARGET.findall(CODE.sub("", page.read_text()))):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", sorted(DOCS.rglob("index.md")), ids=named)
def test_an_index_links_to_every_page_beside_it(page):
    """That of the site also links to the guides."""
    folders = [page.parent, DOCS / "guides"] if page.parent == DOCS else [page.parent]
    beside = {p for folder in folders for p in folder.glob("*.md")} - {page}
    assert {named(p) for p in beside} <= {
        named((page.parent / target).resolve())
        for target in filter(None, TARGET.findall(page.read_text()))
    }


@pytest.mark.parametrize("page", [ROOT / "README.md", *USERS], ids=named)
def test_users_read_no_commits(page):
    words = re.findall(r"\b[0-9a-f]{7,40}\b", page.read_text())
    assert not [word for word in words if re.search(r"\d", word) and re.search(r"[a-f]", word)]


@pytest.mark.parametrize("page", [ROOT / "README.md", *USERS], ids=named)
def test_quantizing_says_which_axis(page):
    """A reader copies an example, and the next weight is square."""
    calls = re.findall(r"jgg\.quantize\((?:[^()]|\([^()]*\))*\)", page.read_text())
    assert [call for call in calls if "contract=" not in call] == []


def test_the_guide_has_every_file_of_the_decoder():
    text = (ROOT / "docs/guides/generate.md").read_text()
    names = {path.name for path in (ROOT / "examples/decoder").glob("*.py")} - {"__init__.py"}
    assert {name for name in names if f"`{name}`" not in text} == set()


def test_docstrings_link_as_the_reference_does():
    """tools/docstrings.py puts the package's name in front of what a role names."""
    sources = sorted((ROOT / "jax_groupgemm").rglob("*.py"))
    named_twice = [path for path in sources if ":`jax_groupgemm." in path.read_text()]
    assert len(sources) > 50
    assert named_twice == []


def test_readme_is_short():
    words = re.findall(r"[A-Za-z0-9_]\S*", "\n".join(prose(ROOT / "README.md")))
    assert len(words) <= 600
    text = CODE.sub("", (ROOT / "README.md").read_text())
    numbers = re.findall(r"(?<![\w.])\d[\d.,]*", re.sub(r"\]\([^)]*\)", "]", text))
    assert len(numbers) <= 40


def tables():
    return sorted(RESULTS.glob("*/*.md"))


@pytest.mark.parametrize("path", tables(), ids=named)
def test_tables_are_what_their_command_makes(path, tmp_path, capsys):
    """The first line of a file of tables is the command that wrote it: the same bytes again."""
    first, rest = path.read_text().split("\n", 1)
    program, *arguments = shlex.split(first.removeprefix("<!-- ").removesuffix(" -->"))
    assert (program, *arguments[:2]) == ("python", "-m", "benchmarks.report")
    assert arguments[-2:] == ["--tables", named(path)]
    records = [str(ROOT / name) for name in arguments[2:-2]]
    report.main([*records, "--tables", str(tmp_path / "tables.md")])
    assert (tmp_path / "tables.md").read_text().split("\n", 1)[1] == rest
    assert rest == f"\n{capsys.readouterr().out}"


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def test_means_on_the_performance_page_are_those_of_the_records():
    """Row for row, as many columns as the page shows."""
    generated = {}
    for path in tables():
        for line in path.read_text().splitlines():
            if line.startswith("|"):
                generated.setdefault(cells(line)[0], []).append(cells(line))
    compared = 0
    for line in (DOCS / "performance.md").read_text().splitlines():
        if re.match(r"\| (forward|dgrad|wgrad|qmm) ", line):
            row = cells(line)
            assert row in [known[: len(row)] for known in generated[row[0]]], line
            compared += 1
    assert compared > 15
