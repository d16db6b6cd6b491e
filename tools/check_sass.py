"""Reads the machine code of a built module, or wheel: kernels written for an architecture must hold
its tensor-core instructions. Where an architecture's guards are off a kernel compiles all the same,
to nothing, and there may be no GPU to notice."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from itertools import compress
from pathlib import Path

# By architecture: part of its kernels' names; then, of those whose names hold a pattern, the first
# that fits, what all of them hold.
EXPECTED = {
    "sm_90a": (
        "Sm90",
        {
            # Whose warps multiply by themselves: see kWarps.
            "(QuantizedGemm|ScaledLines|UpAndDown)Sm90Config.*ByWarpsSm90|TransposedRows16Sm90|"
            "TransposedScaled(Rows|Lines)8Sm90|DirectGemmSm90Kernel|"
            "(Few|Some)(Grouped)?(Up|Down)Sm90Kernel": ("HMMA",),
            "RouterSm90Kernel": ("FFMA",),  # in float32
            "FewSumSm90Kernel": ("FADD", "ACQBULK"),  # behind the kernel whose terms it adds
            "Fp8GemmSm90Kernel": ("QGMMA",),
            "": ("HGMMA",),
        },
    ),
    # Block-scaled products of 4-bit floats, and scales on their way to tensor memory; products of
    # 8- and of 16-bit floats.
    "sm_100a": (
        "Sm100",
        {"BlockScaled": ("UTCOMMA", "UTCCP"), "Blockwise": ("UTCQMMA",), "": ("UTCHMMA",)},
    ),
}
# Likewise where a sample (JGG_SAMPLE of CMakeLists.txt) has no code for that architecture. What
# makes FP8 codes rounds to nearest by one instruction; of a few tokens' experts the first kernel
# lets the second begin, which waits for it.
UNLESS_SAMPLE = {
    **{
        (architecture, "3fp86device"): {
            "(Rows|Columns|Squares)Kernel.*ElementE0ELb0E|BothKernel|ActivationBackward": (
                r"F2FP\.SATFINITE\.E4M3",
            ),
            "CastKernel.*ElementE0E|ActivatedKernel": (r"F2FP\.SATFINITE\.E4M3",),
            "CastKernel.*ElementE1E": (r"F2FP\.SATFINITE\.E5M2",),
        }
        for architecture in ("sm_89", "sm_90a", "sm_120")
    },
    **{
        (architecture, "Fp8GemmSm89Kernel"): {"": ("QMMA", "LDSM", "LDGSTS")}
        for architecture in ("sm_89", "sm_120")
    },
    **{
        (architecture, name): {"": ("HMMA", "LDSM", "LDGSTS")}
        for architecture in ("sm_86", "sm_90a", "sm_120")
        for name in ("PackedSm80Kernel", "PackedFewRowsSm80Kernel")
    },
    ("sm_86", "GemmSm80Kernel"): {"TensorOps": ("HMMA",)},
    ("sm_120", "GemmSm80Kernel"): {"TensorOps": ("HMMA",)},
    ("sm_90a", "LoraSm80Kernel"): {"": ("HMMA",)},
    ("sm_90a", "LoraWgradSm80Kernel"): {"": ("HMMA", "LDSM", "LDGSTS")},
    ("sm_90a", "FewDense"): {"UpSm80": ("HMMA", "PREEXIT"), "DownSm80": ("HMMA", "ACQBULK")},
}


def tools() -> Path:
    """Where cuobjdump is, and nvdisasm which it runs."""
    found = shutil.which("cuobjdump")
    if found:
        return Path(found).parent
    spec = find_spec("nvidia")
    for directory in (spec and spec.submodule_search_locations) or ():
        path = Path(directory) / "cu13/bin"
        if (path / "cuobjdump").exists():
            return path
    raise SystemExit("cuobjdump is missing: install nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm")


def run(directory: Path, *arguments) -> str:
    environment = os.environ | {"PATH": f"{tools()}:{os.environ['PATH']}"}
    command = [tools() / "cuobjdump", *arguments]
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"cuobjdump: {done.stderr}")
    return done.stdout


def kernels(directory: Path, module: Path, architecture: str, name: str) -> list[str]:
    """The code of each kernel with this in its name; other files are not even disassembled."""
    run(directory, "-xelf", f"{architecture}.cubin", module)
    code = []
    for cubin in sorted(directory.glob(f"*{architecture}.cubin")):
        if name.encode() in cubin.read_bytes():
            functions = run(directory, "-sass", cubin).split("Function : ")[1:]
            code += [f for f in functions if name in f.splitlines()[0]]
    return code


def main(path: str) -> None:
    module = Path(path).absolute()
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        if module.suffix == ".whl":
            with zipfile.ZipFile(module) as wheel:
                extension = next(n for n in wheel.namelist() if re.search(r"/_ffi\..*so$", n))
                module = Path(wheel.extract(extension, directory))
        for architecture, (name, patterns) in EXPECTED.items():
            code = kernels(directory, module, architecture, name)
            if not code:
                raise SystemExit(f"{architecture}: no kernel has {name} in its name")
            for pattern, instructions in patterns.items():
                fits = [bool(re.search(pattern, c.splitlines()[0])) for c in code]
                check(architecture, pattern, list(compress(code, fits)), instructions)
                code = [c for c, fit in zip(code, fits, strict=True) if not fit]
        for (architecture, name), patterns in UNLESS_SAMPLE.items():
            code = kernels(directory, module, architecture, name)
            for pattern, instructions in patterns.items():
                if fitting := [c for c in code if re.search(pattern, c.splitlines()[0])]:
                    check(architecture, pattern, fitting, instructions)


def check(architecture: str, pattern: str, code: list[str], instructions: tuple[str, ...]) -> None:
    if not code:
        raise SystemExit(f"{architecture}: no kernel's name fits {pattern!r}")
    for instruction in instructions:
        without = [c.splitlines()[0] for c in code if not re.search(rf"\b{instruction}", c)]
        if without:
            raise SystemExit(
                f"{architecture}: {len(without)} of {len(code)} kernels without "
                f"{instruction}: {without[0]}"
            )
    print(f"{architecture}: {len(code)} kernels with {' and '.join(instructions)}")


if __name__ == "__main__":
    main(sys.argv[1])
