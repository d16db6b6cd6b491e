"""What a release consists of: version, addresses, licenses, and what tools/release.py judges."""

import importlib.util
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "tools/release.py"
WORKFLOWS = ROOT / ".github/workflows"

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="needs the sources")


@pytest.fixture(scope="module")
def release():
    spec = importlib.util.spec_from_file_location("release", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pyproject():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def project(pyproject):
    return pyproject["project"]


def citation(key: str) -> str:
    (value,) = re.findall(rf"^{key}: (.*)$", (ROOT / "CITATION.cff").read_text(), re.M)
    return value


def test_one_version(project, release):
    assert project["version"] == release.version() == version("jax_groupgemm")
    assert citation("version") == project["version"]
    literal = re.compile(rf"(?<![\d.]){re.escape(project['version'])}(?![\d.])")
    sources = [ROOT / "CMakeLists.txt"]
    for folder, ending in ("jax_groupgemm", "py"), ("ffi", "*"), ("tools", "py"):
        sources += [path for path in (ROOT / folder).rglob(f"*.{ending}") if path.is_file()]
    assert len(sources) > 100
    repeated = [path for path in sources if literal.search(path.read_text(errors="ignore"))]
    assert not repeated


def test_addresses(project):
    urls = project["urls"]
    assert set(urls) == {"Homepage", "Documentation", "Repository", "Issues", "Changelog"}
    assert citation("repository-code") == urls["Repository"]
    for key in ("Issues", "Changelog"):
        assert urls[key].startswith(urls["Repository"] + "/")


def test_licenses(project):
    assert citation("license") == project["license"]
    for name in project["license-files"]:
        assert (ROOT / name).read_text().strip()
    third = (ROOT / "LICENSE-third-party.txt").read_text()
    for name in ("nanobind", "robin-map", "CUTLASS", "CUDA runtime", "libstdc++"):
        assert re.search(rf"^(The )?{re.escape(name)}, ", third, re.M), name


def test_a_tag_is_the_version_and_in_the_changelog(project, release, tmp_path, monkeypatch):
    for name in ("pyproject.toml", "CITATION.cff"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    monkeypatch.setattr(release, "ROOT", tmp_path)
    changes = tmp_path / "CHANGELOG.md"
    number = project["version"]
    changes.write_text(f"## Unreleased\n\n- {number}\n")
    assert release.identity_problems(None, None) == []
    missing = f"CHANGELOG.md has no heading for {number}"
    assert release.identity_problems(f"v{number}", None) == [missing]
    changes.write_text(f"## {number} (2030-01-02)\n")
    assert release.identity_problems(f"v{number}", None) == []
    assert release.identity_problems("v99.0", None) == [
        f"the tag is v99.0, the version {number}",
    ]
    changed = (tmp_path / "CITATION.cff").read_text().replace(f"version: {number}", "version: 99.0")
    (tmp_path / "CITATION.cff").write_text(changed)
    (problem,) = release.identity_problems(None, None)
    assert problem == f"CITATION.cff has version ['99.0'], pyproject.toml {number}"


def test_a_release_comes_from_the_repository_that_it_names(project, release):
    repository = project["urls"]["Repository"].removeprefix("https://github.com/")
    assert release.identity_problems(None, repository) == []
    (problem,) = release.identity_problems(None, "someone/fork")
    assert problem.startswith("this repository is someone/fork, but pyproject.toml names https://")


def test_sdist_is_what_is_tracked_but_for_files_of_development(release):
    tracked = {"LICENSE", "ffi/module.cc", ".github/workflows/ci.yml", ".gitignore"}
    assert release.sdist_problems({"LICENSE", "ffi/module.cc", "PKG-INFO"}, tracked) == []
    assert release.sdist_problems({"LICENSE", "PKG-INFO", "runs/a", ".gitignore"}, tracked) == [
        ".gitignore is not tracked or not wanted",
        "runs/a is not tracked or not wanted",
        "ffi/module.cc is missing",
    ]


def test_symbols_without_a_version_are_told(release):
    table = """
Symbol table '.dynsym' contains 6 entries:
   Num:    Value          Size Type    Bind   Vis      Ndx Name
     0: 0000000000000000     0 NOTYPE  LOCAL  DEFAULT  UND
     1: 0000000000000000     0 FUNC    GLOBAL DEFAULT  UND memcpy@GLIBC_2.14 (2)
     2: 0000000000000000     0 FUNC    GLOBAL DEFAULT  UND PyErr_Clear
     3: 0000000000000000     0 NOTYPE  WEAK   DEFAULT  UND _ITM_RU1
     4: 0000000000000000     0 NOTYPE  GLOBAL DEFAULT  UND {name}
     5: 000000000003d6fa    58 FUNC    GLOBAL DEFAULT   14 PyInit__ffi
"""
    assert release.symbol_problems(table.format(name="_Py_Dealloc")) == []
    assert release.symbol_problems(table.format(name="_dl_find_object")) == [
        "_dl_find_object is undefined and has no version"
    ]


def test_a_wheel_is_built_as_the_sources_say(release):
    series, architectures = release.cuda_build()
    assert re.fullmatch(r"\d+\.\d+", series)
    assert {"80", "90a", "100a", "80-virtual"} <= set(architectures)
    build = {"cuda": f"{series}.88", "architectures": architectures, "problem": None}
    assert release.build_problems(build, cuda=True) == []
    assert release.build_problems(build, cuda=False) == ["it has CUDA kernels"]
    without = {"cuda": None, "architectures": [], "problem": None}
    assert release.build_problems(without, cuda=False) == []
    assert release.build_problems(without | {"problem": "no file"}, cuda=False) == ["no file"]
    other = build | {"cuda": "99.0.1", "architectures": ["80"]}
    assert release.build_problems(other, cuda=True) == [
        f"its CUDA is 99.0.1, not {series}",
        f"it is for ['80'], not {architectures}",
    ]
    sample = build | {"cuda": f"{series}.88 (some kernels)"}  # JGG_SAMPLE
    assert release.build_problems(sample, cuda=True) == [
        f"its CUDA is {series}.88 (some kernels), not {series}"
    ]


@pytest.mark.parametrize(
    ("arguments", "program"),
    [
        ("-O3 -c a.cc -o a.o", "compiler"),
        ("-print-file-name=libstdc++.a", "compiler"),
        ("a.o -o a.out", "compiler"),
        ("-fPIC -shared -Wl,-s -o _ffi.abi3.so a.o", "linker cc -target x86_64-linux-gnu.2.28"),
    ],
)
def test_only_shared_objects_are_linked_for_the_old_glibc(release, tmp_path, arguments, program):
    script = tmp_path / "g++"
    parts = ("definitions", "exports", "crtbegin", "crtend", "libstdcxx", "libgcc", "libgcc_s")
    script.write_text(
        release.COMPILER_SCRIPT.format(
            cxx="echo compiler", zig="echo linker", glibc="2.28", **{part: part for part in parts}
        )
    )
    done = subprocess.run(
        ["sh", script, *arguments.split()], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(program)
    assert arguments in done.stdout


@pytest.mark.skipif(not WORKFLOWS.exists(), reason="needs a checkout")
def test_workflows_run_the_oldest_supported_jax(pyproject):
    (oldest,) = [r for r in pyproject["build-system"]["requires"] if r.startswith("jaxlib==")]
    for name in ("ci.yml", "weekly.yml"):
        pins = re.findall(r"\bjaxlib==[\d.]+", (WORKFLOWS / name).read_text())
        assert set(pins) == {oldest}, name


@pytest.mark.parametrize(
    ("kernel", "spilled", "passes"),
    [("_Zany", 0, True), ("_Zany", 4, False), ("_Z9Fp8MmSm90E12Fp8StoreSm90IfE", 36, True),
     ("_Z9Fp8MmSm90E12Fp8StoreSm90IfE", 216, False),
     ("_Z16Fp8RowsFirstSm90E12Fp8StoreSm90IDv_E", 48, True),
     ("_Z9Fp8MmSm90E12Fp8StoreSm90IDv_E", 48, False)],
)  # fmt: skip
def test_spills_are_found(tmp_path, kernel, spilled, passes):
    log = tmp_path / "build.log"
    log.write_text(
        f"ptxas info    : Compiling entry function '{kernel}' for 'sm_90a'\n"
        f"    0 bytes stack frame, {spilled} bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 168 registers, used 1 barriers\n"
    )
    command = [sys.executable, ROOT / "tools/check_resources.py", log]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode == 0) == passes, done.stderr
    if passes:
        assert f"; {int(spilled > 0)} of those" in done.stdout
