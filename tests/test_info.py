"""What jax_groupgemm.info says: which kernel runs each operation here, and what to do next."""

import pytest

from jax_groupgemm import info
from jax_groupgemm._core.operations import OPERATIONS
from jax_groupgemm._kernels import choose, extension, samples

CONVERSIONS = ("quantize", "dequantize", "nvfp4_quantize", "fp8_quantize", "prepack")


def collect(monkeypatch, capability: int | None, cuda: str | None = "13.0") -> dict:
    """On a machine with such a GPU and code for it, or without one."""
    build = extension.Build(cuda=cuda, architectures=("80", "90a", "100a") if cuda else ())
    monkeypatch.setattr(extension, "BUILD", build)
    monkeypatch.setattr(extension, "live_capabilities", lambda: (capability,) if capability else ())
    data = info.collect()
    if capability:
        gpu = {"platform": "gpu", "kind": "a GPU", "compute_capability": str(capability / 10)}
        data["devices"] = {"found": [gpu], "problem": None}
    return data


@pytest.mark.parametrize(
    ("capability", "product", "quantized", "nvfp4", "conversion"),
    [
        (80, "sm80", "sm80", "composed", "sm80"), (90, "sm90", "sm90", "sm90", "sm80"),
        (100, "sm80", "sm80", "composed", "sm80"), (None, "cpu", "cpu", "composed", "reference"),
    ],
)  # fmt: skip
def test_what_runs(monkeypatch, capability, product, quantized, nvfp4, conversion):
    ops = collect(monkeypatch, capability)["ops"]
    want = {
        "grouped_mm": product, "segmented_mm": product, "grouped_qmm": quantized,
        "nvfp4_grouped_mm": nvfp4, **dict.fromkeys(CONVERSIONS, conversion),
        **dict.fromkeys(("quantize", "dequantize"), conversion if capability else "cpu"),
    }  # fmt: skip
    assert {op: ops[op]["bfloat16"]["runs"] for op in want} == want
    assert ops["nvfp4_grouped_wgrad"]["float32"]["runs"] == nvfp4
    for answers in ops.values():
        for answer in answers.values():
            assert {answer["runs"], *answer["others"]} >= set(choose.PLATFORMS)
            assert all(answer["others"].values())


def test_every_operation_has_a_line(monkeypatch):
    assert set(samples.SAMPLES) == set(OPERATIONS)
    text = info._text(collect(monkeypatch, 90))
    for op in (*OPERATIONS, *samples.PRODUCTS):
        (line,) = [line for line in text.splitlines() if line.startswith(f"  {op}  ")]
        assert set(line.removeprefix(f"  {op}").split()) <= {
            "sm90",
            "sm80",
            "reference",
            "composed",
        }
    assert len(text) < 3000
    assert "  reference: a tiled XLA program" in text.splitlines()
    assert any(line.startswith("  composed: ") for line in text.splitlines())


@pytest.mark.parametrize("dtype", choose.FLOATS)
def test_gradients_of_quantized_weights(monkeypatch, dtype):
    (line,) = [
        line for line in info._text(collect(monkeypatch, 90)).splitlines()
        if line.startswith("  grouped_qmm, dx  ")
    ]  # fmt: skip
    assert line.split()[2 + choose.FLOATS.index(dtype)] == "sm90"


@pytest.mark.parametrize(("capability", "name"), [(90, "sm90"), (80, "sm80")])
def test_prepacked_weights(monkeypatch, capability, name):
    found = collect(monkeypatch, capability)["ops"]["grouped_qmm, prepacked"]
    assert (found["bfloat16"]["runs"], found["bfloat16"]["call"]) == (name, "jgg_qmm_packed")
    other = "jgg_qmm_packed" if capability == 90 else "jgg_qmm"  # which takes float32 x
    assert (found["float32"]["runs"], found["float32"]["call"]) == (name, other)


def test_next_steps(monkeypatch):
    steps = lambda *a, **k: info._next_steps(collect(monkeypatch, *a, **k))
    assert steps(90) == []
    (step,) = steps(90, cuda=None)
    assert step.startswith("Install with JGG_CUDA=ON")
    (step,) = steps(None)
    assert 'pip install "jax[cuda13]"' in step
    (step,) = steps(75)
    assert step.startswith("This build does not serve this GPU: this build has code for 80, 90a")


def test_reasons(monkeypatch):
    ops = collect(monkeypatch, 90)["ops"]
    others = ops["nvfp4_grouped_mm"]["bfloat16"]["others"]
    assert others["sm100"] == "it needs compute capability 10.0, this GPU has 9.0"
    assert others["sm80"] == "there is no kernel jgg_nvfp4_grouped_mm for sm80"
    assert others["cpu"] == "there is no kernel jgg_nvfp4_grouped_mm for cpu"
    assert ops["grouped_mm"]["float32"]["others"]["sm80"].startswith("only on request")


def test_what_is_too_old_or_missing(monkeypatch):
    monkeypatch.setitem(info.FLOOR, "jax", "99.1.0")
    monkeypatch.setitem(info.FLOOR, "jaxlib", "99.0.0")
    data = collect(monkeypatch, 90)
    assert info._next_steps(data) == [
        "pip install --upgrade jax jaxlib (needs jax >= 99.1.0, jaxlib >= 99.0.0)."
    ]
    assert info._text(data).count("TOO OLD OR MISSING") == 2


def test_no_device_and_no_kernels(monkeypatch):
    data = collect(monkeypatch, None, cuda=None)
    data["devices"] = {"found": [], "problem": "no backend"}
    assert info._next_steps(data) == ["JAX found no device: no backend."]
    assert "  none: no backend" in info._text(data).splitlines()
