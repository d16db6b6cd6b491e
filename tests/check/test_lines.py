"""Every line's own arithmetic: CPU kernels are right by its oracle, and XLA's programs where there
are none. Which kernels a GPU's lines reach is what their programs are lowered to."""

import dataclasses

import jax
import numpy as np
import pytest

from jax_groupgemm._check import child, clock, device, lines, narrow, products, quantized
from jax_groupgemm._kernels import extension, kernel, proven

CPU = device.Device("cpu", "CPU", 0, None, ())
LINES = {line.key: line for line in lines.lines(CPU)}
# One of each name, and each dtype somewhere.
NAMES: dict[str, list[str]] = {}
for _line in LINES.values():
    NAMES.setdefault(_line.name, []).append(_line.key)
ONCE = {name: keys[i % len(keys)] for i, (name, keys) in enumerate(NAMES.items())}


def silent(event, **fields):
    """Nobody reads what is reported."""


@pytest.fixture(autouse=True)
def without_kernels_too(monkeypatch):
    """Programs that call no kernel run, too."""
    of = child._lowered
    monkeypatch.setattr(child, "_lowered", lambda trial: (of(trial)[0], ["any"]))


@pytest.mark.parametrize("key", ONCE.values())
@pytest.mark.one_in(3)
def test_a_line_is_right(key):
    found = child._checked(LINES[key], CPU, True, silent)
    assert found["problem"] is None
    assert found["cases"] > 1


@pytest.mark.weekly
@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("key", LINES)
def test_every_line_is_right(key, quick):
    """In all shapes."""
    assert child._checked(LINES[key], CPU, quick, silent)["problem"] is None


@pytest.mark.parametrize("name", ["moe_mlp", "dispatch, combine", "router.choose", "route"])
def test_what_is_wrong_is_seen(name, monkeypatch):
    """One number of the first result is off by one, as a planted fault makes it."""
    key = ONCE[name]
    monkeypatch.setenv(child.PLANT, f"{key}: wrong")
    found = child._checked(LINES[key], CPU, True, silent)
    assert found["problem"] is not None


def reached(monkeypatch, capability: int, of=lines.lines, quick: bool = True):
    """The kernels that a GPU's lines call, and those that it has."""
    jax.clear_caches()  # of what another GPU's lines are lowered to
    codes = ("80", "89", "90a", "100a", "80-virtual")
    monkeypatch.setattr(extension, "BUILD", extension.Build(cuda="13.0", architectures=codes))
    monkeypatch.setattr(extension, "live_capabilities", lambda: (capability,))
    has = device._kernels("cuda", (capability,))
    gpu = dataclasses.replace(CPU, platform="cuda", capability=capability, kernels=has)
    found = set()
    with proven.trusted():
        for line in of(gpu):
            for trial in line.trials(np.random.default_rng(0), quick):
                with kernel.watched() as plans:
                    traced = jax.jit(trial.function).trace(*trial.runs[0].operands)
                    text = traced.lower(lowering_platforms=("cuda",)).as_text()
                found |= {proven.key(p.kernel) for p in plans if f"@{p.target}(" in text}
    return found, set(has)


GATED = (
    "mm", "wgrad", "nvfp4_grouped_mm", "nvfp4_grouped_wgrad", "fp8_grouped_mm_sm100",
    "fp8_grouped_wgrad_sm100",
)  # fmt: skip


@pytest.mark.parametrize(
    ("capability", "name", "calls"),
    [(100, "sm100", GATED), (89, "sm89", ("fp8_grouped_mm_sm89", "fp8_grouped_wgrad_sm89"))],
)
def test_what_is_gated_is_reached(monkeypatch, capability, name, calls):
    """Or nobody could switch it on."""
    of = narrow.lines() if name == "sm89" else [*narrow.lines(), *products.lines()]
    found, has = reached(monkeypatch, capability, lambda gpu: of)
    gated = {key for key in has if key.rpartition(" ")[2] in proven.UNRUN}
    assert gated == {f"jgg_{call} {name}" for call in calls}
    assert gated <= found


def test_hoppers_lines_need_no_kernel_that_only_tests_name(monkeypatch):
    _, has = reached(monkeypatch, 90, lambda gpu: [])
    assert "jgg_fp8_grouped_mm sm90" in has
    assert not {key for key in has if key.endswith("sm89")}


@pytest.mark.parametrize(("capability", "name"), [(80, None), (90, "sm80")])
def test_the_generic_kernel_of_prepacked_weights_is_reached(monkeypatch, capability, name):
    found, _ = reached(monkeypatch, capability, lambda gpu: quantized.packed_lines(name)[:1])
    assert "jgg_qmm_packed sm80" in found


@pytest.mark.weekly
@pytest.mark.parametrize(("capability", "most"), [(80, 4), (90, 0)])
def test_every_kernel_is_reached(monkeypatch, capability, most):
    """Only Hopper has FP8 products, whose layers have four kernels beside them."""
    found, has = reached(monkeypatch, capability, quick=False)
    rest = {key for key in has - found if "prepack" not in key}  # whose layout is Hopper's
    assert len(rest) <= most, rest


def test_operands_are_the_same_in_every_process():
    """So that a table can be compared with another machine's."""
    line = LINES["grouped_mm, float32"]
    both = [
        next(line.trials(np.random.default_rng(list(line.key.encode())), True)).runs[0].operands
        for _ in range(2)
    ]
    for one, other in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_array_equal(one, other)


def test_floors():
    """Bytes bound the first, products the others."""
    assert clock.floor_us("NVIDIA H200", 1e6, 4.8e6, "bfloat16", False) == pytest.approx(1)
    assert clock.floor_us("NVIDIA H200", 989e6, 1, "bfloat16", False) == pytest.approx(1)
    assert clock.floor_us("NVIDIA H200", 1979e6, 1, "bfloat16", True) == pytest.approx(1)
    assert clock.floor_us("NVIDIA A10", 31.2e6, 1, "float32", False) == pytest.approx(1)
    assert clock.floor_us("NVIDIA A10", 1e6, 1, "bfloat16", True) is None
    assert clock.floor_us("a GPU of tomorrow", 1, 1, "bfloat16", False) is None


@pytest.mark.gpu
def test_a_gpu_is_described():
    found = device.here()
    assert found.platform == "cuda"
    assert found.capability in extension.live_capabilities()
    assert found.place is not None
    assert "jgg_mm sm80" in found.kernels
