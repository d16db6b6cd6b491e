"""What jax_groupgemm.info says of NVFP4 operations and conversions."""

import pytest

from jax_groupgemm import info
from jax_groupgemm._kernels import choose, extension

PRODUCTS = ("nvfp4_grouped_mm", "nvfp4_grouped_wgrad")
CONVERSIONS = ("quantize", "dequantize", "nvfp4_quantize", "prepack")


def ops_of(monkeypatch, capability: int | None) -> dict:
    """On a machine with such a GPU and code for it, or without one."""
    build = extension.Build(cuda="13.0", architectures=("80", "90a", "100a"))
    monkeypatch.setattr(extension, "BUILD", build)
    monkeypatch.setattr(extension, "live_capabilities", lambda: (capability,) if capability else ())
    return info.collect()["ops"]


def runs(ops, names) -> dict[str, set[str]]:
    return {name: {answer["runs"] for answer in ops[name].values()} for name in names}


@pytest.mark.parametrize(
    ("capability", "mm", "wgrad", "conversion"),
    [
        (80, "sm80", "sm80", "sm80"), (90, "sm90", "sm90", "sm80"), (100, "sm100", "sm100", "sm80"),
        (None, "reference", "cpu", "reference"),
    ],
)  # fmt: skip
def test_what_runs(monkeypatch, capability, mm, wgrad, conversion):
    ops = ops_of(monkeypatch, capability)
    assert runs(ops, PRODUCTS) == dict(zip(PRODUCTS, ({mm}, {wgrad}), strict=True))
    assert runs(ops, CONVERSIONS) == {name: {conversion} for name in CONVERSIONS}
    for name in (*PRODUCTS, *CONVERSIONS):
        for answer in ops[name].values():
            assert {answer["runs"], *answer["others"]} == set(choose.IMPLEMENTATIONS)
            assert all(answer["others"].values())


def test_how(monkeypatch):
    how = lambda op: next(iter(ops[op].values()))["how"]
    ops = ops_of(monkeypatch, 90)
    decoded = "composed: x is decoded to bfloat16, then jgg_qmm"
    assert how("nvfp4_grouped_mm") == decoded
    assert how("nvfp4_grouped_wgrad") == "composed: both are decoded to bfloat16, then jgg_wgrad"
    assert how("nvfp4_quantize") is None
    others = ops["nvfp4_grouped_mm"]["bfloat16"]["others"]
    assert others["sm100"] == "it needs compute capability 10.0, this GPU has 9.0"
    ops = ops_of(monkeypatch, 100)
    assert how("nvfp4_grouped_mm") == (
        "jgg_nvfp4_grouped_mm where K % 32 == 0 and N % 8 == 0 (but N % 4 of float32 and float16), "
        f"on one device; otherwise {decoded}"
    )


def test_text(monkeypatch):
    ops_of(monkeypatch, 90)
    lines = info._text(info.collect()).splitlines()
    for name in (*PRODUCTS, *CONVERSIONS):
        assert any(line.startswith(f"  {name} ") for line in lines)
    line = next(line for line in lines if "nvfp4_grouped_wgrad" in line)
    assert "sm90       float32; composed: both are decoded to bfloat16, then jgg_wgrad" in line
