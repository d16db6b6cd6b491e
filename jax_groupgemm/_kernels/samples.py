"""A call of each public operation, for tables of what runs and why the rest does not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from . import choose
from .problems import Conversion, Fp8, Fp8Conversion, Mm, Moe, Nvfp4, Problem, Qmm, Wgrad


@dataclasses.dataclass(frozen=True)
class Sample:
    """A call of an operation that has no awkward shape, for tables of what runs.

    ``otherwise`` names what runs without a kernel: the reference, or a composition of others.
    """

    make: Callable[[str, str], Problem]
    dtypes: tuple[str, ...] = choose.FLOATS
    otherwise: str = "reference"

    def plan(self, platform: str, dtype: str) -> choose.Plan | None:
        problem = self.make(platform, dtype)
        return (choose.fused if isinstance(problem, (Fp8, Nvfp4)) else choose.choose)(problem)

    def others(self, platform: str, dtype: str) -> dict[str, str]:
        """Why each implementation that does not run the call does not."""
        problem, plan = self.make(platform, dtype), self.plan(platform, dtype)
        runs = None if plan is None else plan.kernel.name
        return {
            name: _reasons(problem, name) or f"only on request, implementation={name!r}"
            for name in choose.IMPLEMENTATIONS[:-1]
            if name != runs
        }


def _sample_mm(platform: str, dtype: str) -> Mm:
    return Mm(
        op="mm", platform=platform, dtypes=(dtype, dtype), out_dtype=dtype, operand_dtype=dtype,
        rows=4096, groups=8, k=2048, n=2048, segments=8, elements=2**25,
    )  # fmt: skip


def _sample_wgrad(platform: str, dtype: str) -> Wgrad:
    return Wgrad(
        op="wgrad", platform=platform, dtypes=(dtype, dtype), out_dtype=dtype, operand_dtype=dtype,
        rows=4096, groups=8, a=2048, b=2048, kind="sizes", segments=8, elements=2**24,
    )  # fmt: skip


def _sample_qmm(platform: str, dtype: str) -> Qmm:
    return Qmm(
        op="qmm", platform=platform, dtypes=(dtype,), out_dtype=dtype, rows=4096, rows_x=4096,
        segments=8, groups=8, all_groups=8, k=2048, n=2048, mode="affine", bits=4, layout="linear",
        bfloat16_scales=dtype != "float16", float16_scales=dtype == "float16", scalable=True,
        packable=True,
    )  # fmt: skip


def _sample_qmm_dx(platform: str, dtype: str) -> Qmm:
    return dataclasses.replace(_sample_qmm(platform, dtype), transpose_w=False)


def _sample_qmm_packed(platform: str, dtype: str) -> Qmm:
    return dataclasses.replace(_sample_qmm(platform, dtype), layout="sm90")


def _sample_nvfp4(op: str, inner: Callable[[str, str], Any]) -> Callable[[str, str], Nvfp4]:
    def make(platform: str, dtype: str) -> Nvfp4:
        decoded = dataclasses.replace(inner(platform, "bfloat16"), out_dtype=dtype)
        return Nvfp4(op=op, platform=platform, out_dtype=dtype, k=2048, n=2048, inner=decoded)

    return make


def _sample_fp8(op: str) -> Callable[[str, str], Fp8]:
    return lambda platform, dtype: Fp8(
        op=op, platform=platform, out_dtype=dtype, rows=4096, segments=8, groups=8, k=2048, n=2048,
        elements=("e4m3", "e4m3"),
        blocks=((1, 128), (128, 128) if op == "fp8_grouped_mm" else (1, 128)),
    )  # fmt: skip


def _sample_conversion(op: str) -> Callable[[str, str], Conversion]:
    return lambda platform, dtype: Conversion(
        op=op, platform=platform, mode="affine", calls=frozenset({f"jgg_{op}"})
    )


def _sample_fp8_conversion(op: str) -> Callable[[str, str], Fp8Conversion]:
    return lambda platform, dtype: Fp8Conversion(
        op=op, platform=platform, mode="fp8", rows=4096, columns=2048, along=0, block=(1, 128)
    )


def _sample_moe(op: str) -> Callable[[str, str], Moe]:
    return lambda platform, dtype: Moe(
        op=op, platform=platform, dtypes=(dtype,), out_dtype=dtype, pairs=2**15, experts=64, d=2048
    )


_NVFP4_MM = _sample_nvfp4("nvfp4_grouped_mm", _sample_qmm)
#: Every public operation, by a call of it.
SAMPLES: dict[str, Sample] = {
    **dict.fromkeys(
        ("grouped_mm", "gather_mm", "ragged_dot", "ragged_dot_general"),
        Sample(_sample_mm, (*choose.FLOATS, "float64")),
    ),
    "segmented_mm": Sample(_sample_wgrad, (*choose.FLOATS, "float64")),
    **dict.fromkeys(("grouped_qmm", "gather_qmm", "quantized_matmul"), Sample(_sample_qmm)),
    "nvfp4_grouped_mm": Sample(_NVFP4_MM, otherwise="composed"),
    "nvfp4_grouped_wgrad": Sample(
        _sample_nvfp4("nvfp4_grouped_wgrad", _sample_wgrad), ("float32",), "composed"
    ),
    "nvfp4_grouped_linear": Sample(_NVFP4_MM, ("float32", "bfloat16"), "composed"),
    "fp8_grouped_mm": Sample(_sample_fp8("fp8_grouped_mm"), otherwise="composed"),
    "fp8_grouped_wgrad": Sample(_sample_fp8("fp8_grouped_wgrad"), ("float32",), "composed"),
    "fp8_grouped_linear": Sample(
        _sample_fp8("fp8_grouped_mm"), ("float32", "bfloat16"), "composed"
    ),
    "moe_mlp": Sample(_sample_mm, (*choose.FLOATS, "float64"), "composed"),
    **{
        op: Sample(_sample_moe(op), otherwise="composed") for op in ("route", "dispatch", "combine")
    },
    **{
        op: Sample(_sample_conversion(op))
        for op in ("quantize", "dequantize", "prepack", "nvfp4_quantize")
    },
    "fp8_quantize": Sample(_sample_fp8_conversion("fp8_quantize")),
}

#: Products that kernels of their own run: gradients of x, and those of prepacked weights.
PRODUCTS: dict[str, Sample] = {
    "grouped_qmm, dx": Sample(_sample_qmm_dx),
    "grouped_qmm, prepacked": Sample(_sample_qmm_packed),
}


def _reasons(problem: Problem, name: str) -> str | None:
    kernels = [k for k in choose.KERNELS[problem.op] if k.name == name and not k.only_named]
    why = [_reason(kernel, problem) for kernel in kernels] or [choose.missing(name, problem.op)]
    return None if None in why else why[0]


def _reason(kernel: choose.Kernel, problem: Problem) -> str | None:
    fused = isinstance(problem, (Fp8, Nvfp4))
    return choose.against(kernel, problem) or (kernel.fuses(problem) if fused else None)


def table() -> str:
    """The kernels of every custom call, best first, as Markdown."""
    lines = ["| call | kernel | custom call | needs |", "|---|---|---|---|"]
    for op, kernels in choose.KERNELS.items():
        for place, kernel in enumerate(kernels):
            if not kernel.only_named:
                needs = kernel.needs or ("anything else" if place else "nothing")
                lines.append(f"| `{op}` | {kernel.name} | `{kernel.target}` | {needs} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
