"""The tuner without a GPU: its lists, its loop on a made-up device, the table it writes."""

import re
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_runs import needs_hopper

import jax_groupgemm as jgg
from jax_groupgemm._kernels import extension, tuned
from jax_groupgemm.tune import cases as tune_cases
from jax_groupgemm.tune import command as tune
from jax_groupgemm.tune import timing
from jax_groupgemm.tune.cases import Case, Layer

LAYER = Layer("", 4, 32, 48, 2, gated=True)
TOKENS = dict.fromkeys(tune_cases.OPS, (32,))


class FakeGpu:
    """Lowers for CUDA without running; ``us(op, tile, measurement)`` are its times."""

    kind = "Fake GPU"

    def __init__(self, us, wrong=()):
        self.us, self.wrong, self.lowered, self.measured = us, wrong, [], 0

    def compiled(self, f, args):
        text = jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
        (op,), (tile,) = (re.findall(pattern, text) for pattern in (r"@jgg_(\w+)", r"tile = (\d+)"))
        self.lowered.append((op, int(tile)))
        self.measured = 0
        out = jax.eval_shape(f, *args)
        value = 2 if int(tile) in self.wrong else 1
        return lambda *args: jnp.full(out.shape, value, out.dtype)

    def times(self, runs, repetitions):
        op, _ = self.lowered[-1]
        self.measured += 1
        for run in runs.values():
            run()
        return {tile: [self.us(op, tile, self.measured)] * repetitions for tile in runs}


def cases(layer=LAYER, tokens=TOKENS):
    return list(tune_cases.cases([layer], tokens, ["bfloat16"]))


def run(gpu, path, todo=None, minutes=None):
    return tune.run(cases() if todo is None else todo, gpu, path, 3, minutes)


@pytest.fixture(autouse=True)
def without_a_gpu(request, monkeypatch):
    """Nothing depends on this machine's GPU, but for the tests that need one."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(extension, "live_capabilities", lambda: ())


@pytest.fixture
def live(monkeypatch):
    """Products are lowered as if on the made-up device, with this table."""

    def use(path):
        monkeypatch.setattr(tuned, "device_kind", lambda: FakeGpu.kind)
        monkeypatch.setenv("JGG_TUNED", str(path))
        tuned._entries.cache_clear()

    yield use
    tuned._entries.cache_clear()


def test_from_measurement_to_the_lowered_call(tmp_path, live, capsys):
    fastest = {"mm": 128, "wgrad": 64}
    gpu = FakeGpu(lambda op, tile, _: 5.0 if tile == fastest[op] else 10.0)
    path = tmp_path / "table.json"
    assert run(gpu, path) == 0
    assert gpu.lowered == [
        # The first is the rule's.
        *(("mm", tile) for tile in (32, 32, 64, 128, 256, 288)),  # forward
        *(("mm", tile) for tile in (32, 32, 128)),  # gated
        *(("mm", tile) for tile in (32, 32, 64, 128, 256, 288)),  # dgrad
        *(("wgrad", tile) for tile in (64, 64, 128, 256)),
    ]
    text = capsys.readouterr().out
    assert "G4 K32 N48 R64 " in text
    assert "rule     10.0  32: 10.0 (1.00)  64: 10.0 (1.00)  128: 5.0 (0.50)" in text
    assert "-> 128" in text
    assert "4 of 4 products have a tile that is at least 3% faster" in text
    table = tuned.read(path)
    assert table["device"] == "Fake GPU"
    assert [r["products"] for r in table["runs"]] == [4]
    assert table["runs"][0]["jax"] == jax.__version__
    assert set(table["entries"].values()) == {tuned.Entry(128, 5, 10), tuned.Entry(64, 5, 10)}

    # The table is keyed as ordinary code asks.
    live(path)
    x, w = jnp.ones((64, 32), "bfloat16"), jnp.ones((4, 32, 48), "bfloat16")
    sizes = jnp.full(4, 16)

    def lowered(f):
        text = jax.jit(f).trace(x, w).lower(lowering_platforms=("cuda",)).as_text()
        return sorted(map(int, re.findall(r"\btile = (\d+)", text)))

    loss = lambda x, w: jnp.sin(jgg.grouped_mm(x, w, sizes)).sum()
    assert lowered(jax.grad(loss, (0, 1))) == [64, 128, 128]
    assert lowered(lambda x, w: jgg.grouped_mm(x, w, sizes, activation="swiglu")) == [128]


def test_weights_stored_the_other_way(tmp_path):
    gpu = FakeGpu(lambda op, tile, _: 10.0 - (tile == 64))
    assert run(gpu, tmp_path / "t.json", cases(Layer("", 4, 32, 48, 2, transpose_w=True))) == 0
    found = tuned.read(tmp_path / "t.json")["entries"]
    key = lambda op, k, n, transposed: (op, "bfloat16", 4, k, n, transposed, False, 16)
    assert set(found) == {
        key("mm", 32, 48, "w"), key("mm", 48, 32, ""), key("wgrad", 48, 32, "")
    }  # fmt: skip


def test_small_gains_and_lucky_ones_are_no_entries(tmp_path):
    path = tmp_path / "table.json"
    forward = cases(tokens={"forward": [32]})[:1]
    for us in (
        lambda op, tile, _: 10.0,
        lambda op, tile, _: 9.8 if tile == 64 else 10.0,
        lambda op, tile, measurement: 9.0 if tile == 64 and measurement == 1 else 10.0,
    ):
        assert run(FakeGpu(us), path, forward) == 0
        assert tuned.read(path)["entries"] == {}
    second = FakeGpu(lambda op, tile, measurement: 10.0 - measurement * (tile == 64))
    assert run(second, path, forward) == 0
    (entry,) = tuned.read(path)["entries"].values()
    assert entry == tuned.Entry(64, 8.0, 10.0)  # as measured for it alone


def test_tiles_with_another_result_are_no_entries(tmp_path, capsys):
    gpu = FakeGpu(lambda op, tile, _: 5.0 if tile == 64 else 10.0, wrong=(64,))
    path = tmp_path / "table.json"
    assert run(gpu, path, cases(tokens={"forward": [32]})[:1]) == 1
    assert "64: WRONG" in capsys.readouterr().out
    assert tuned.read(path)["entries"] == {}


@pytest.mark.parametrize("shape", [(40, 24), (3, 40, 24)])
def test_comparison(rng, shape):
    values = rng.standard_normal(shape)
    want = jnp.asarray(values, "bfloat16")
    sums = jnp.asarray(values.astype(np.float32) * (1 + 2.0**-22), "bfloat16")
    ulp = jnp.asarray(np.asarray(want, np.float32) * (1 + 2.0**-8), "bfloat16")
    assert tune._same(want, want)
    assert tune._same(sums, want)
    assert tune._same(ulp, want)
    assert not tune._same(want.at[..., 3, 5].add(0.1), want)
    assert not tune._same(want.at[..., 3, 5].set(jnp.nan), want)
    assert not tune._same(want.at[..., -1, :].set(0), want)


def test_a_failing_product_is_not_fatal(tmp_path, capsys):
    class Broken(FakeGpu):
        def times(self, runs, repetitions):
            if self.lowered[-1][0] == "wgrad":
                raise RuntimeError("out of memory\nand more")
            return super().times(runs, repetitions)

    path = tmp_path / "table.json"
    assert run(Broken(lambda op, tile, _: 10.0), path) == 1
    assert "failed: RuntimeError: out of memory\n" in capsys.readouterr().out
    assert tuned.read(path)["runs"][0]["products"] == 3


def test_a_second_run_adds_to_the_table(tmp_path):
    path = tmp_path / "table.json"
    forward, other = cases(tokens={"forward": [32]})[:1], cases(tokens={"dgrad": [32]})
    fast = FakeGpu(lambda op, tile, _: 5.0 if tile == 64 else 10.0)
    slow = FakeGpu(lambda op, tile, _: 10.0)
    run(fast, path, forward)
    run(fast, path, other)
    assert len(tuned.read(path)["entries"]) == 2
    run(slow, path, forward)  # measured again, and the rule's is the fastest now
    table = tuned.read(path)
    assert [(p.k, p.n) for p in table["entries"]] == [(48, 32)]
    assert len(table["runs"]) == 3
    slow.kind = "Another GPU"
    with pytest.raises(SystemExit, match="was measured on Fake GPU, this GPU is Another GPU"):
        run(slow, path, forward)
    path.write_text("{")
    with pytest.raises(SystemExit, match=r"cannot add to .*table\.json: Expecting"):
        run(fast, path, forward)


def test_time_limit(tmp_path, capsys):
    path = tmp_path / "table.json"
    assert run(FakeGpu(lambda op, tile, _: 10.0), path, minutes=0.0) == 0
    text = capsys.readouterr().out
    assert "0 minutes are over: 4 products are not measured" in text
    assert not path.exists()


def test_calls_in_turns(monkeypatch):
    """Times go to the run that they are of; what happens before the first mark has no name."""
    monkeypatch.setattr(timing, "scratch", lambda: None)
    monkeypatch.setattr(timing, "mark_names", lambda: {"mark"})
    now, ran = [], []
    monkeypatch.setattr(timing, "mark", lambda _: now.append(("mark", 9.0)))

    class Cupti:
        def _cupti_init(self):
            now.clear()

        def _cupti_get_timings(self, finalize):
            return now

    monkeypatch.setattr(timing, "extension", Cupti)

    def runner(tile):
        def run():
            ran.append(tile)
            now.extend([("a", tile / 1000), ("b", len(ran) / 1000)])

        return run

    times = timing.in_turns({tile: runner(tile) for tile in (32, 64)}, 2)
    assert ran == [32, 64] * 3
    assert times == {32: [35.0, 37.0], 64: [68.0, 70.0]}


@pytest.fixture
def profiler(monkeypatch):
    """JAX's profiler with CUPTI's bindings made up: ``ran`` are the kernels that they saw."""
    bindings = types.SimpleNamespace(
        ran=[], _cupti_init=lambda: None, _cupti_get_timings=lambda finalize: bindings.ran
    )
    module = types.SimpleNamespace(mosaic_gpu_lib=types.SimpleNamespace(_mosaic_gpu_ext=bindings))
    monkeypatch.setitem(sys.modules, "jax.experimental.mosaic.gpu.profiler", module)
    return module


def test_the_bindings_of_cupti(profiler):
    bindings = profiler.mosaic_gpu_lib._mosaic_gpu_ext
    assert timing.extension() is bindings
    profiler.mosaic_gpu_lib = None
    with pytest.raises(RuntimeError, match="this jaxlib has no CUPTI bindings"):
        timing.extension()


def test_names_of_marks(profiler, monkeypatch):
    """Of both marks, the one that clears the cache and the small one; nothing else may run."""
    bindings, sizes = profiler.mosaic_gpu_lib._mosaic_gpu_ext, []
    monkeypatch.setattr(timing, "SCRATCH", 16)
    monkeypatch.setattr(timing, "mark", lambda values: sizes.append(values.size))
    names = timing.mark_names.__wrapped__
    timing.scratch.cache_clear()
    try:
        bindings.ran = [("tan_large", 0.1), ("tan_small", 0.01)]
        assert names() == {"tan_large", "tan_small"}
        assert sizes == [16, 8] * 2  # compiled, then seen
        bindings.ran = [*bindings.ran, ("other", 1.0)]
        with pytest.raises(RuntimeError, match="CUPTI saw 3 kernels of 2"):
            names()
    finally:
        timing.scratch.cache_clear()


def test_lists():
    args = tune.arguments([])
    full = tune.selected(args)
    assert len(set(full)) == len(full) == 420
    assert args.tokens["wgrad"] == (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
    quick = tune.arguments(["--quick"])
    assert set(tune.selected(quick)) < set(full)
    assert quick.minutes is not None
    seconds = sum(case.seconds(quick.repetitions) for case in tune.selected(quick))
    assert seconds < 60 * quick.minutes
    for model, (groups, hidden, inter, top_k) in tune_cases.MODELS.items():
        shapes = {(c.layer.k, c.layer.n) for c in full if c.layer.name.startswith(model)}
        assert shapes == {(hidden, 2 * inter), (inter, hidden)}
        for case in (c for c in full if c.layer.name.startswith(model)):
            mean = case.rows / groups
            assert tuned.nearest_power_of_two(mean) == mean  # nothing is rounded away
            assert case.sizes().sum() == case.rows
            assert case.rows % top_k == 0
    some = tune.selected(tune.arguments(["--models", "Qwen3", "--ops", "wgrad", "--tokens", "64"]))
    assert [(c.op, c.rows) for c in some] == [("wgrad", 512)] * 4
    own = tune.arguments(["--shapes", "4,32,48", "8,16,24,2", "--gated", "--tokens", "64"])
    layers = {c.layer for c in tune.selected(own)}
    assert layers == {Layer("", 4, 32, 48, 1, True), Layer("", 8, 16, 24, 2, True)}


@pytest.mark.parametrize("shape", ["4,32", "4,32,0", "4,32,8,1,1", "a,b,c"])
def test_shapes_that_are_none(shape, capsys):
    with pytest.raises(SystemExit):
        tune.arguments(["--shapes", shape])
    assert f"'{shape}' is not G,K,N[,TOP_K], whole numbers from 1 on" in capsys.readouterr().err


def test_dry_run(capsys):
    assert tune.main(["--dry-run", "--shapes", "4,32,48", "--tokens", "64", "--ops", "wgrad"]) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"wgrad   G4 K32 N48 R64 +64, 128, 256", first)
    assert re.fullmatch(r"1 products, roughly 0\.\d minutes on an H200 \(an estimate\)", last)
    with pytest.raises(SystemExit, match="no such model; there are Mixtral-8x7B, Qwen3"):
        tune.main(["--dry-run", "--models", "nobody"])


BUILDS = [
    ((), extension.Build(), "it needs a Hopper GPU, and jax sees only ["),
    ((80,), extension.Build(cuda="13.0", architectures=("80",)),
     "it needs compute capability 9.0, this GPU has 8.0"),
    ((90,), extension.Build(), "this build has no CUDA kernels"),
    ((90,), extension.Build(cuda="13.0", architectures=("80", "100a", "80-virtual")),
     "this build has code for 80, 100a, 80-virtual, not for 90a"),
]  # fmt: skip


@pytest.mark.parametrize(("capabilities", "build", "why"), BUILDS)
def test_why_it_cannot_run(monkeypatch, capabilities, build, why):
    monkeypatch.setattr(extension, "live_capabilities", lambda: capabilities)
    monkeypatch.setattr(extension, "BUILD", build)
    with pytest.raises(SystemExit, match=re.escape(f"tune cannot run: {why}")):
        tune.main(["--quick"])


@pytest.fixture
def hopper(monkeypatch, profiler):
    """A machine that can measure."""
    gpu = types.SimpleNamespace(device_kind="NVIDIA Made Up")
    monkeypatch.setattr(extension, "devices", lambda backend=None: ([gpu], None))
    monkeypatch.setattr(extension, "live_capabilities", lambda: (90,))
    build = extension.Build(cuda="13.0", architectures=("90a",))
    monkeypatch.setattr(extension, "BUILD", build)


@pytest.mark.parametrize("wrong", [(), (128,)])
def test_command(monkeypatch, hopper, tmp_path, wrong):
    """Its table is named after the device; a product that failed is a status."""
    fake = FakeGpu(lambda op, tile, _: 5.0 if tile == 256 else 10.0, wrong)
    monkeypatch.setattr(tune.Gpu, "compiled", lambda self, f, args: fake.compiled(f, args))
    monkeypatch.setattr(timing, "in_turns", fake.times)
    monkeypatch.chdir(tmp_path)
    only = ["--shapes", "4,32,48", "--tokens", "64", "--ops", "wgrad"]
    assert tune.main(only) == len(wrong)
    table = tuned.read(tmp_path / "nvidia-made-up.json")
    assert table["device"] == "NVIDIA Made Up"
    assert [entry.tile for entry in table["entries"].values()] == [256]


def test_programs_are_compiled_for_the_device(hopper):
    assert tune.Gpu().compiled(lambda x: x + 1, [jnp.ones(())])(jnp.ones(())) == 2


def test_without_cupti(monkeypatch):
    def missing():
        raise RuntimeError("this jaxlib has no CUPTI bindings")

    monkeypatch.setattr(extension, "live_capabilities", lambda: (90,))
    monkeypatch.setattr(extension, "BUILD", extension.Build(cuda="13.0", architectures=("90a",)))
    monkeypatch.setattr(timing, "extension", missing)
    assert tune.problem() == "this jaxlib has no CUPTI bindings"


@pytest.mark.skipif(bool(extension.live_capabilities()), reason="a GPU may run it")
def test_command_without_a_gpu():
    done = subprocess.run(
        [sys.executable, "-m", "jax_groupgemm.tune", "--quick"], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "python -m jax_groupgemm.tune cannot run: it needs a Hopper GPU, and jax sees only [Cpu"
    )
    assert "Traceback" not in done.stderr


def test_tiles():
    tiles = lambda op, gated=False: Case(op, LAYER, 64, "bfloat16", gated).tiles
    assert tiles("forward") == tiles("dgrad") == (32, 64, 128, 256, 288)
    assert tiles("forward", gated=True) == (32, 128)
    assert tiles("wgrad") == (64, 128, 256)


@pytest.mark.gpu
@needs_hopper
def test_measures_on_a_gpu(tmp_path, capsys):
    path = tmp_path / "table.json"
    shape = ["--shapes", "8,256,512", "--gated", "--tokens", "64", "2048", "--repetitions", "3"]
    assert tune.main([*shape, "--out", str(path)]) == 0
    assert " of 8 products have a tile" in capsys.readouterr().out
    assert tuned.read(path)["runs"][0]["products"] == 8
