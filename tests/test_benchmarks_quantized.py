"""The benchmark of quantized products without a GPU: its lists, floors, weights and arms."""

import dataclasses
import functools
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from benchmark_cases import check_lists

import jax_groupgemm as jgg

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))  # last: an installed jax_groupgemm comes first

from benchmarks import (  # noqa: E402
    gpu,
    nvfp4,
    nvfp4_quantize,
    quantized,
    quantized_peers,
    report,
    summary,
    timing,
)
from benchmarks import quantized_shapes as shapes  # noqa: E402
from benchmarks.quantized_shapes import (  # noqa: E402
    FORMATS,
    Convert,
    Gather,
    Nvfp4,
    Nvfp4Quantize,
    Qmm,
)

# No device times here: any time will do, and nothing is compared with another.
ARGS = SimpleNamespace(
    level="default", peers=["dequantize", "loop"], implementation=[None], repetitions=2, turns=2,
    in_situ=False,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _fake_times(monkeypatch):
    monkeypatch.setattr(timing.JaxArm, "time", lambda self, n: [2.0] * n)
    timing.forget()


@pytest.mark.parametrize("op", shapes.OPS)
def test_lists(op):
    check_lists(shapes.cases, op)


def test_every_model_format_and_number_of_tokens_is_listed():
    full = shapes.cases("qmm", "full")
    assert {c.model for c in full} == {f"{m} {p}" for m in shapes.MODELS for p in ("up", "down")}
    assert {c.format.name for c in full} == set(FORMATS)
    assert {c.tokens for c in full} == set(shapes.TOKENS)
    assert all(c.k % c.format.group_size == 0 for c in full)
    assert {c.regime for c in full} == {"decode", "decode, small", "prefill"}
    # Weights are made once for cases that follow each other.
    weights = [(c.format, c.groups, c.n, c.k) for c in full]
    runs = [w for w, before in zip(weights, [None, *weights], strict=False) if w != before]
    assert len(runs) == len(set(runs))


def test_default_lists():
    """Every width in decode, of quantize every format, balanced NVFP4 beside imbalanced."""
    decode = {c.format.name for c in shapes.cases("qmm") if "decode" in c.regime}
    assert decode == set(FORMATS)
    convert = {
        op: {
            (c.format.name, c.global_scale, c.dtype) for c in shapes.cases("quantize") if c.op == op
        }
        for op in ("quantize", "dequantize")
    }
    bfloat16 = {(name, False, "bfloat16") for name in FORMATS if name != "fp8"}
    bfloat16 |= {("nvfp4", True, "bfloat16")}
    assert convert["dequantize"] == bfloat16
    assert convert["quantize"] >= bfloat16 | {
        (name, scaled, dtype)
        for name, scaled in (
            ("nvfp4", False), ("nvfp4", True), ("mxfp4", False), ("mxfp8", False),
            ("affine4", False),
        )
        for dtype in ("float32", "float16")
    }  # fmt: skip
    quick = {c.format.name for c in shapes.cases("quantize", "quick")}
    assert quick == {"nvfp4", "affine4", "affine4 g128", "mxfp8"}
    products = shapes.cases("nvfp4")
    assert [c.regime for c in products[:6]] == ["balanced"] * 3 + ["imbalanced"] * 3
    assert {c.regime for c in products} == {"balanced", "imbalanced", "decode"}
    of_weights = [c.is_weights for c in shapes.cases("nvfp4_quantize")]
    assert (of_weights.count(True), of_weights.count(False)) == (2, 6)
    assert {len(c.shape) for c in shapes.cases("nvfp4_quantize", "quick")} == {2, 3}


def test_arguments():
    args = gpu.arguments(["--ops", "qmm", "quantize", "--cases", "mxfp4", "--peers", "all"])
    assert {c.op for c in gpu.selected(args)} == {"qmm mxfp4", "quantize", "dequantize"}
    assert {"humming", "mlx", "dequantize", "torch"} <= set(args.peers)


@pytest.mark.parametrize("skew", [False, True])
def test_every_token_goes_to_different_experts(skew):
    one = Qmm(FORMATS["nvfp4"], "", 8, 64, 64, 1, 2, skew)
    assert sorted(one.sizes()) == [0] * 6 + [1, 1]
    many = Qmm(FORMATS["nvfp4"], "", 8, 64, 64, 500, 2, skew).sizes()
    assert many.dtype == np.int32
    assert many.sum() == 1000
    assert many.max() <= 500
    assert (many.max() > 300) == skew


def test_floors():
    k, n = 128, 64
    case = Qmm(FORMATS["affine4"], "", 8, k, n, 1, 2)
    weight = n * k // 2 + n * (k // 64) * 4
    assert case.bytes == 2 * 2 * (k + n) + 2 * weight  # two of the eight matrices
    assert case.flops == 2 * 2 * k * n
    assert FORMATS["nvfp4"].bytes(256) == 128 + 16
    assert FORMATS["mxfp8"].bytes(256) == 256 + 8
    assert FORMATS["affine3"].bytes(256) == 96 + 16
    gather = Gather(n, k, 4, 9)
    active = len(set(gather.indices().tolist()))
    assert gather.bytes == 2 * 9 * (k + n) + active * weight
    convert = Convert("quantize", FORMATS["mxfp4"], 2, n, k)
    assert convert.bytes == 2 * n * k * 2 + n * k + 2 * n * k // 32
    scaled = Convert("quantize", FORMATS["nvfp4"], 2, n, k, "float32", global_scale=True)
    assert scaled.bytes == 2 * n * k * 4 + 2 * n * k * 9 // 16 + 2 * 4
    own = Convert("quantize", FORMATS["affine4"], 2, n, k, "float32")
    assert own.bytes == 2 * n * k * 4 + n * k + 2 * n * (k // 64) * 8
    rows = Nvfp4Quantize("rows", 3, 256, k)
    assert rows.bytes == 256 * k * 2 + 256 * k * 9 // 16
    both = Nvfp4Quantize("rows + columns grouped hadamard", 3, 256, k)  # x is read once
    assert both.bytes == rows.bytes + (256 + 3 * 63) // 64 * 64 * k * 9 // 16
    assert Nvfp4Quantize("weights 2D", 3, n, k).bytes == 3 * n * k * 41 // 16
    fprop, dgrad, wgrad = (Nvfp4(d, 4, 128, k, n, True) for d in ("fprop", "dgrad", "wgrad"))
    packed = lambda elements: elements // 2 + elements // 16
    assert fprop.bytes == packed(128 * k + 4 * n * k) + 2 * 128 * n
    assert dgrad.bytes == packed(128 * n + 4 * n * k) + 2 * 128 * k
    assert wgrad.bytes == packed(128 * (k + n)) + 4 * 4 * n * k


def test_sizes_of_nvfp4():
    for case in shapes.cases("nvfp4"):
        sizes, mean = case.sizes(), case.tokens // case.groups
        assert sizes.dtype == np.int32
        assert sizes.sum() == case.tokens
        if case.decode:
            assert set(sizes) == set(range(1, 17))
        elif case.balanced:
            assert set(sizes) == {mean}
        else:
            assert (sizes % 2 == 1).all()
            assert 0.2 * mean < sizes.min() < 0.3 * mean
            assert 1.7 * mean < sizes.max() < 1.8 * mean


@pytest.mark.parametrize("name", ["affine4", "mxfp4", "affine3", "nvfp4", "mxfp8"])
@pytest.mark.one_in(3)
def test_drawn_weights(name):
    form = FORMATS[name]
    weights = quantized.Weights(form, 3, 128, 128)
    assert (weights.linear.mode, weights.linear.bits) == (form.mode, form.bits)
    stored = sum(leaf.nbytes for leaf in jax.tree.leaves(weights.linear))
    assert stored == form.bytes(3 * 128 * 128)
    values = np.asarray(jgg.dequantize(weights.linear, "float32"))
    assert np.isfinite(values).all()
    assert 0 < np.abs(values).std() < np.abs(values).max()
    assert len({m.tobytes() for m in values}) == 3
    np.testing.assert_array_equal(jgg.dequantize(weights.packed, "float32"), values)
    np.testing.assert_array_equal(quantized.matrix(weights.linear, 1), values[1])
    assert (weights.linear.layout, weights.packed.layout) == ("linear", "sm90")
    # Humming's integers: (code - half) * scale, and no code 0 of 4 bits.
    if form.mode == "affine":
        half = 2 ** (form.bits - 1)
        scales, biases = (np.asarray(v, np.float32) for v in jax.tree.leaves(weights.linear)[1:])
        np.testing.assert_array_equal(biases, -half * scales)
    if (form.mode, form.bits) == ("affine", 4):
        words = np.asarray(weights.linear.weight)
        assert all((words >> shift & 15).all() for shift in range(0, 32, 4))


SMALL = [
    *(Qmm(FORMATS[f], "", 4, 128, 192, 9, 2) for f in ("nvfp4", "affine4 g128", "mxfp8")),
    Qmm(FORMATS["mxfp4"], "", 8, 128, 96, 1, 2, skew=True),  # N that is not packed
    Gather(64, 128, 2, 4),
    *(Convert(op, FORMATS[f], 3, 16, 128) for op, f in (
        ("quantize", "nvfp4"), ("dequantize", "nvfp4"), ("quantize", "affine3"),
        ("dequantize", "affine3"),
    )),
    Convert("quantize", FORMATS["nvfp4"], 3, 16, 128, "float32", global_scale=True),
    Convert("dequantize", FORMATS["nvfp4"], 3, 16, 128, "float16", global_scale=True),
]  # fmt: skip


@pytest.mark.parametrize("case", SMALL, ids=lambda c: f"{c.op} {c.label}")
@pytest.mark.one_in(4)
def test_cases_run_and_are_checked(case):
    record = gpu.run_case(case, ARGS, 1e12, 1e12)
    assert record["notes"] == {}
    packed = ["ours", "ours[linear]"]
    stays = isinstance(case, Qmm) and case.n % 64
    arms = {
        "qmm": [*(packed[:1] if stays else packed), "dequantize"],
        "gather_qmm": [*packed, "loop"],
    }.get(case.op.split()[0], ["ours"])
    assert list(record["us"]) == arms
    assert max(record["errors"].values()) <= case.tolerance
    assert record["floor_us"] > 0
    json.dumps(record)
    assert "of floor" in summary.totals([record])


def test_arms_of_sm80_have_weights_as_they_are():
    args = SimpleNamespace(**vars(ARGS) | {"implementation": [None, "sm80"]})
    names = quantized.arms(SMALL[0], quantized.operands(SMALL[0]), args)
    assert list(names) == ["ours", "ours[linear]", "ours[sm80, linear]"]


QUANTIZED = [
    Nvfp4Quantize("rows stochastic", 3, 96, 64),
    Nvfp4Quantize("rows + columns grouped hadamard", 3, 1999, 32),
    Nvfp4Quantize("columns grouped hadamard stochastic", 3, 1999, 32),
    Nvfp4Quantize("weights 2D columns", 3, 32, 64),
]


@pytest.mark.parametrize("case", QUANTIZED, ids=lambda c: c.what)
@pytest.mark.one_in(4)
def test_nvfp4_quantize_runs_and_is_checked(case, monkeypatch):
    """And what is only nearly right is noticed: in a part that is compared, or that is not."""
    monkeypatch.setattr(nvfp4_quantize, "LINES", {-1: 16, -2: 4})
    monkeypatch.setattr(nvfp4_quantize, "NORM", 0.25)  # lines are short
    v = nvfp4_quantize.operands(case)
    assert sum(case.sizes()) == case.n
    assert v.x.shape == case.shape
    (arm,) = nvfp4_quantize.arms(case, v, ARGS).values()
    error, out = nvfp4_quantize.checker(case, v), arm().result()
    assert error(out) == 0
    q, *others = out
    assert q.global_scale.shape == ((3,) if case.is_weights else ())
    in_middle = tuple(size // 2 for size in q.weight.shape[:-1])
    bit = dataclasses.replace(q, weight=q.weight.at[(0,) * len(in_middle)].add(1 << 24))
    assert 0 < error([bit, *others]) < 0.1
    missing = dataclasses.replace(q, scales=q.scales.at[in_middle].set(0))
    assert error([missing, *others]) == 1
    scale = dataclasses.replace(q, global_scale=jnp.nextafter(q.global_scale, jnp.float32(9)))
    assert 0 < error([scale, *others]) <= 1
    unwritten = jax.tree.map(lambda leaf: timing.poison(leaf), out)
    assert error(unwritten) == 1


def test_nvfp4_quantize_is_reported():
    record = gpu.run_case(Nvfp4Quantize("rows", 3, 96, 512), ARGS, 1e12, 1e12)
    assert record["notes"] == {}
    assert (record["op"], record["case"]) == ("nvfp4_quantize", "rows G3 T96 K512")
    assert record["error"] == 0
    records = [record | {"C": 1.0, "B": 1.0}]
    assert "| nvfp4_quantize rows G3 T96 K512 | 2.0 |" in report.tables(records)[0]


def test_complete():
    """Every peer that a case could have, but MLX where it has no such operation."""
    gathered, converted = (
        Gather(8, 8, 4, 2),
        functools.partial(Convert, "quantize", FORMATS["nvfp4"]),
    )
    assert quantized_peers.complete(gathered) == ("loop", "mlx")
    assert quantized_peers.complete(dataclasses.replace(gathered, groups=2**26)) == ("loop",)
    assert quantized_peers.complete(converted(4, 64, 64)) == ("mlx",)
    assert quantized_peers.complete(converted(4, 64, 64, global_scale=True)) == ()


def test_main_writes_records(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(timing, "ceilings", lambda kinds: (dict.fromkeys(kinds, 1e12), 1e12))
    monkeypatch.setattr(shapes, "cases", lambda op, *_: [SMALL[2], SMALL[8]])
    monkeypatch.setattr(gpu, "unavailable", lambda p: None if p == "dequantize" else "not here")
    paths = [tmp_path / "gpu" / name for name in ("record.json", "record.csv")]
    options = ["--ops", "qmm", "--json", str(paths[0]), "--csv", str(paths[1])]
    assert gpu.main([*options, "--repetitions", "2"]) == 0
    out = capsys.readouterr().out
    assert "without humming: not here" in out
    assert "quack" not in out  # which no case could run
    record = json.loads(paths[0].read_text())
    assert record["missing"] == ["torch", "humming", "mlx"]
    assert [(r["op"], list(r["us"])) for r in record["records"]] == [
        ("qmm mxfp8", ["ours", "ours[linear]", "dequantize"]),
        ("dequantize", ["ours"]),
    ]
    lines = paths[1].read_text().splitlines()
    assert len(lines) == 5
    assert lines[1].startswith("qmm mxfp8,G4 K128 N192 R18,")
    report.main([str(paths[0])])


def test_one_command_draws_too(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(timing, "ceilings", lambda kinds: (dict.fromkeys(kinds, 1e12), 1e12))
    monkeypatch.setattr(shapes, "cases", lambda op, *_: [SMALL[2]])
    monkeypatch.setattr(gpu, "unavailable", lambda p: None)
    options = ["--ops", "qmm", "--peers", "dequantize", "--repetitions", "2", "--turns", "1"]
    assert gpu.main([*options, "--plots", str(tmp_path / "plots")]) == 0
    names = ["record.csv", "record.json"]
    names = ["means_quantized.svg", *names, "roofline_quantized.svg", "speedup_quantized.svg"]
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == names
    out = capsys.readouterr().out
    assert "| qmm mxfp8 G4 K128 N192 R18 | 2.0 |" in out
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        gpu.arguments(["--plots", "here"])
    assert "--plots needs matplotlib" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.weekly
def test_nvfp4_decode_has_prepacked_weights():
    case = Nvfp4("fprop", 16, 136, 128, 64, balanced=False, decode=True)
    alone = SimpleNamespace(**vars(ARGS) | {"peers": []})
    record = gpu.run_case(case, alone, 1e12, 1e12)
    assert record["notes"] == {}
    assert list(record["us"]) == ["ours", "ours[linear]", "ours[qmm]", "ours[bfloat16]"]
    v = nvfp4.operands(case)
    made = {name: make().args[1] for name, make in nvfp4.arms(case, v, alone).items()}
    assert (made["ours"].layout, made["ours[linear]"].layout) == ("sm90", "linear")


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["fprop", "dgrad", "wgrad"])
@pytest.mark.one_in(3)
def test_nvfp4_runs_and_is_checked(direction):
    case = Nvfp4(direction, 4, 128, 96, 64, balanced=False)
    record = gpu.run_case(case, ARGS, 1e12, 1e12)
    assert record["notes"] == {}
    dense = ["ours[bfloat16]", "dequantize"]
    arms = ["ours", *dense] if direction == "wgrad" else ["ours", "ours[qmm]", *dense]
    assert [name for name in record["us"] if name != "ours[prepacked]"] == arms
    assert max(record["errors"].values()) <= case.tolerance


@pytest.mark.parametrize("case", [SMALL[2], SMALL[4], SMALL[5]], ids=lambda c: c.op)
@pytest.mark.one_in(2)
def test_wrong_results_are_noticed(case, monkeypatch):
    """Of another matrix, another row, or other codes."""
    result = timing.JaxArm.result
    roll = lambda leaf: jnp.roll(leaf, 1, axis=0)
    monkeypatch.setattr(timing.JaxArm, "result", lambda self: jax.tree.map(roll, result(self)))
    alone = SimpleNamespace(**vars(ARGS) | {"peers": []})
    record = gpu.run_case(case, alone, 1e12, 1e12)
    assert record["notes"]["ours"].startswith("WRONG: relative error ")
    assert all(error > 0.1 for error in record["errors"].values())


def test_sum_arm():
    class Fixed:
        def __init__(self, *times):
            self.times, self.open = times, True

        def time(self, n):
            return list(self.times[:n])

        def result(self):
            return self.times[0]

        def close(self):
            self.open = False

    arms = Fixed(1.0, 2.0), Fixed(10.0, 20.0)
    both = timing.SumArm(*arms)
    assert both.time(2) == [11.0, 22.0]
    assert both.result() == 10.0
    both.close()
    assert not any(arm.open for arm in arms)


def test_means_count_kernels_in_any_order(monkeypatch):
    kernels = [("a", 1.0), ("mark", 9.0), ("b", 2.0), ("a", 3.0), ("mark", 9.0), ("b", 4.0)]
    monkeypatch.setattr(timing, "scratch", lambda cold: jnp.zeros(8))
    monkeypatch.setattr(timing, "mark_names", lambda: {"mark"})

    class Found(list):
        __enter__ = lambda self: self
        __exit__ = lambda self, *_: None

    monkeypatch.setattr(timing, "kernels", lambda: Found(kernels))
    assert timing.mean_us(lambda: None, 2, True) == 5000.0


def test_peers_know_their_cases():
    ask = SimpleNamespace(peers=list(quantized_peers.PEERS))
    for case in (SMALL[0], Gather(64, 128, 3, 4), SMALL[8]):
        asked = quantized_peers.peer_arms(case, None, ask)
        assert set(asked) == set(quantized_peers.KNOWN[type(case)])
    assert not quantized_peers.peer_arms(SMALL[0], None, SimpleNamespace(peers=["quack", "lax"]))


RECORDS = [
    {
        "op": op, "case": case, "regime": regime, "us": us, "floor_us": 5.0, "flops": flops,
        "floor_share": 5.0 / us["ours"], "tflops": flops / us["ours"] / 1e6, "tbytes": 2.0,
        "error": 1e-3, "notes": {},
    }
    for op, case, regime, us, flops in (
        ("qmm nvfp4", "a", "decode", {"ours": 10.0, "ours[linear]": 12.0, "humming": 9.0}, 2e9),
        ("quantize", "nvfp4", "", {"ours": 10.0}, 0),
    )
]  # fmt: skip


def test_report_of_quantized_cases(tmp_path, capsys):
    head = {
        "date": "2026-01-01", "commit": "abc", "gpu": "GPU", "jax": "0.11", "missing": ["mlx"],
        "C_tflops": 800.0, "B_tbytes": 4.0, "records": RECORDS,
    }  # fmt: skip
    path = tmp_path / "record.json"
    path.write_text(json.dumps(head))
    report.main([str(path)])
    text = capsys.readouterr().out
    assert "Partial: without mlx." in text
    assert "| qmm nvfp4 a | 10.0 | 5.0 | 50% | 200 | 2.00 | 1.20x | **0.90x** |" in text
    assert "| quantize nvfp4 | 10.0 | 5.0 | 50% |  | 2.00 |\n" in text
    assert "| qmm nvfp4 decode | 1 | 50% | 1.20x | 0.90x |" in text
    assert text.endswith("\n\n1 of 1 cases with a peer run below 0.95 of the best peer's speed.\n")


def test_plots_of_quantized_cases(tmp_path):
    pytest.importorskip("matplotlib")
    head = {"gpu": "GPU", "jax": "0.11", "commit": "abc", "date": "2026-01-01", "records": RECORDS}
    path = tmp_path / "record.json"
    path.write_text(json.dumps(head | {"C_tflops": 800.0, "B_tbytes": 4.0}))
    report.main([str(path), "--plots", str(tmp_path)])
    for name in ("speedup_quantized.svg", "roofline_quantized.svg"):
        assert "<svg" in (tmp_path / name).read_text()
    assert not (tmp_path / "speedup.svg").exists()
