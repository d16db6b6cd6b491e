"""How the package is laid out: imports between families run one way, and there is no circle."""

import ast
from pathlib import Path

import pytest

import jax_groupgemm

PACKAGE = Path(jax_groupgemm.__file__).parent
# Each family imports from those before it. Files beside the folders come last.
FAMILIES = (
    "_kernels", "_core", "_grouped", "_quantized", "_nvfp4", "_fp8", "_formats", "_moe",
    "checkpoints", "router", "nnx", "integrations", "tune", "cost", "info", "checkpoint_policies",
    "_check", "check", "__init__",
)  # fmt: skip
# ``cost`` and ``info`` list operations, so they import none.
ONLY = {
    "cost": {"_core"},
    "info": {"_kernels"},
    "router": {"_core", "_moe"},
    "check": {"_check"},
}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports_of(name: str) -> set[str]:
    """The modules of this package that a module imports, anywhere in it."""
    path, found = FILES[name], set()
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    package = [] if name == "__init__" else package
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        base = package[: len(package) - node.level + 1]
        base += node.module.split(".") if node.module else []
        for alias in node.names:
            module = ".".join([*base, alias.name])
            found.add(module if module in FILES else ".".join(base))
    return found - {name, ""}


IMPORTS = {name: imports_of(name) for name in FILES}


def test_every_file_has_a_family():
    assert {name.split(".")[0] for name in FILES} == set(FAMILIES)
    assert len(FILES) > 40
    assert any(IMPORTS.values())


@pytest.mark.parametrize("name", FILES)
def test_imports_run_one_way(name):
    level = {family: i for i, family in enumerate(FAMILIES)}
    family = name.split(".")[0]
    for other in IMPORTS[name]:
        its = other.split(".")[0]
        assert level[its] <= level[family], f"{name} imports {other}"
        assert its in ONLY.get(family, {its}), f"{name} imports {other}"


def test_no_circle():
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path, name])
        if name in done or name not in FILES:
            return
        for other in IMPORTS[name]:
            visit(other, (*path, name))
        done.add(name)

    for name in FILES:
        visit(name, ())
    assert done == set(FILES)


ROOT = Path(__file__).parents[2]
SOURCES = [
    path
    for folder in ("benchmarks", "examples", "ffi", "tests", "tools")
    for path in sorted(ROOT.joinpath(folder).rglob("*.*"))
    if path.suffix in (".py", ".h", ".cc", ".cu", ".cuh")
]


@pytest.mark.parametrize("folder", [PACKAGE, ROOT], ids=["package", "others"])
def test_no_file_is_two_rooms(folder):
    lines = {
        path: len(path.read_text().splitlines())
        for path in (SOURCES if folder is ROOT else FILES.values())
    }
    assert len(lines) > 50
    assert {path: n for path, n in lines.items() if n > 500} == {}


def test_modules_import_their_package_by_dots():
    """The tests above read no other imports."""
    for name, path in FILES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            assert not [n for n in names if n.split(".")[0] == "jax_groupgemm"], name
