"""The examples run, on small settings, and do what they say."""

import dataclasses
import functools
import importlib
import json
import shutil
import signal
import sys
import time
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import two_processes
from jax.sharding import AxisType
from meshes import mesh_of

import jax_groupgemm as jgg

EXAMPLES = Path(__file__).parents[1] / "examples"

TINY = [
    *("--steps", "20", "--eval-every", "10", "--batch", "4", "--context", "16", "--layers", "1"),
    *("--width", "32", "--experts", "4", "--expert-width", "32", "--lr", "1e-2"),
]


def load(name):
    """The example as a module, which finds those beside it as it would if it were run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        return importlib.import_module(name)


@pytest.fixture(scope="module")
def train_moe():
    for name in ("flax", "matplotlib", "optax", "orbax.checkpoint", "tqdm"):
        pytest.importorskip(name)
    return load("train_moe")


@pytest.fixture(scope="module")
def quantized_moe(train_moe):
    return load("quantized_moe")


@pytest.fixture(scope="module")
def untrained(train_moe, text, tmp_path_factory):
    """A folder with the checkpoint of initial weights, of widths that every format takes."""
    out = tmp_path_factory.mktemp("untrained")
    args = train_moe.parse([*TINY, *text, "--width", "64", "--expert-width", "64"])
    config = train_moe.settings(train_moe.Config, args)
    tokens = train_moe.texts.read(args.text, config.context)
    checkpoints = train_moe.run_folder.Checkpoints(out / "checkpoints")
    about = dataclasses.asdict(config) | {"text_crc32": zlib.crc32(tokens.tobytes())}
    checkpoints.begin(about, resume=False)
    checkpoints.save(1, train_moe.Trainer(config).state, {})
    return out


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Small enough to be evaluated quickly, with more to learn than pairs of bytes."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"{i} squared is {i * i}.\n" for i in range(400)))
    return ["--text", str(path)]


@pytest.fixture(scope="module")
def finished(train_moe, text, tmp_path_factory):
    """The folder and the results of one uninterrupted run."""
    out = tmp_path_factory.mktemp("run")
    return out, train_moe.main([*TINY, *text, "--out", str(out)])


def every_expert_on_every_token(x, router, up, down, top_k=2):
    """The quickstart's layer without any grouping: all experts run, most results count 0."""
    probabilities = jax.nn.softmax(x @ router)
    kept = probabilities >= jnp.sort(probabilities, axis=1)[:, -top_k, None]
    gate, value = jnp.split(jnp.einsum("td,edf->tef", x, up), 2, axis=-1)
    y = jnp.einsum("tef,efd->ted", jax.nn.silu(gate) * value, down)
    return jnp.einsum("te,ted->td", jnp.where(kept, probabilities, 0.0), y)


def test_quickstart(capsys):
    module = load("quickstart")
    loss = lambda args: (every_expert_on_every_token(*args) ** 2).mean()
    want_loss, want_grads = jax.value_and_grad(loss)(module.args)
    np.testing.assert_allclose(module.loss, want_loss, rtol=1e-4)
    for got, want in zip(module.grads, want_grads, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4 * float(jnp.abs(want).max()))
    assert "(8, 128, 64)" in capsys.readouterr().out


@pytest.mark.weekly
def test_lora_bank(capsys):
    pytest.importorskip("optax")
    results = load("lora_bank").main(["--steps", "150"])
    assert results["losses"][-1] < 1e-3 * results["losses"][0]
    assert results["after"] < 0.1 * results["before"]
    assert "agrees with numpy" in capsys.readouterr().out


@pytest.mark.slow
def test_train_moe_learns_and_writes_its_files(finished):
    out, results = finished
    losses = results["history"]["training"]
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 1
    assert [step for step, _ in results["history"]["held_out"]] == [10, 20]
    assert results["held_out"] == results["history"]["held_out"][-1][1] < losses[0] - 1
    assert 0 < results["bigram"] < 8
    assert len(results["sample"]) > 100
    assert json.loads((out / "metrics.json").read_text())["history"]["training"] == losses
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["10", "20"]


@pytest.mark.slow
def test_train_moe_resumes_as_if_never_interrupted(train_moe, text, finished, tmp_path):
    out, results = finished
    shutil.copytree(out / "checkpoints" / "10", tmp_path / "checkpoints" / "10")
    resumed = train_moe.main([*TINY, *text, "--out", str(tmp_path), "--resume"])
    assert resumed["history"]["training"] == results["history"]["training"]
    assert [*map(tuple, resumed["history"]["held_out"])] == results["history"]["held_out"]
    assert resumed["sample"] == results["sample"]


@pytest.mark.slow
def test_train_moe_goes_on_on_two_devices(train_moe, text, finished, tmp_path):
    """From a checkpoint of one device, which reads what two devices write."""
    out, results = finished
    shutil.copytree(out / "checkpoints" / "10", tmp_path / "checkpoints" / "10")
    options = ["--out", str(tmp_path), "--resume", "--devices", "2"]
    resumed = train_moe.main([*TINY, *text, *options])
    losses = resumed["history"]["training"]
    np.testing.assert_allclose(losses, results["history"]["training"], rtol=1e-4)
    assert losses[:10] == results["history"]["training"][:10]
    args = train_moe.parse([*TINY, *text])
    shapes = jax.eval_shape(train_moe.Trainer(train_moe.settings(train_moe.Config, args)).new_state)
    states = [train_moe.run_folder.finished(of).state(shapes) for of in (tmp_path, out)]
    for one, other in zip(*map(jax.tree.leaves, states), strict=True):
        assert one.devices() == {jax.devices()[0]}
        np.testing.assert_allclose(one, other, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("data", [2, pytest.param(1, marks=pytest.mark.weekly)])
def test_tokens_that_eight_devices_do_not_divide(data):
    """13 of them: the layer adds three that meet no expert, and takes them away again."""
    several_devices = load("several_devices")
    tokens, experts, k = 13, 8, 3
    keys = jax.random.split(jax.random.key(0), 6)
    x, ct = (jax.random.normal(key, (tokens, 12)) for key in keys[:2])
    up = jax.random.normal(keys[2], (experts, 12, 28)) / 4
    down = jax.random.normal(keys[3], (experts, 14, 12)) / 4
    index = jax.random.randint(keys[4], (tokens, k), 0, experts)
    weight = jax.random.uniform(keys[5], (tokens, k))
    mesh = mesh_of((data, 8 // data), ("data", "expert"), AxisType.Auto)

    @functools.partial(jax.jit, static_argnums=0)
    def pulled(layer, x, up, down, weight):
        y, pull = jax.vjp(lambda x, up, down, w: layer(x, up, down, index, w), x, up, down, weight)
        return y, pull(ct)

    got = pulled(several_devices.across(jgg.moe_mlp, mesh), x, up, down, weight)
    want = pulled(jgg.moe_mlp, x, up, down, weight)
    assert got[0].shape == (tokens, 12)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.weekly
@pytest.mark.parametrize("precision", ["float32", "nvfp4"])
def test_train_moe_on_groups_of_devices(train_moe, text, tmp_path, precision):
    """Two groups that each have all experts, on two devices."""
    base = [*TINY, *text, "--precision", precision, "--out"]
    one = train_moe.main([*base, str(tmp_path / "one")])["history"]["training"]
    options = ["--devices", "4", "--data", "2"]
    four = train_moe.main([*base, str(tmp_path / "four"), *options])["history"]["training"]
    tolerance = {"rtol": 1e-4} if precision == "float32" else {"atol": 0.3}
    np.testing.assert_allclose(four, one, **tolerance)


def in_two_processes(*options):
    """Runs of two devices each, one for each process."""
    two = ["--devices", "4", "--processes", "2", "--coordinator", two_processes.free_address()]
    run = [sys.executable, EXAMPLES / "train_moe.py", *options, *two, "--process-id"]
    return two_processes.started(lambda i: [*run, i])


@pytest.mark.slow
def test_train_moe_in_two_processes(text, finished, tmp_path):
    """Two devices each: the losses are those of one process on one. The first process writes."""
    with in_two_processes(*TINY, *text, "--out", tmp_path) as processes:
        said = two_processes.finished(processes, timeout=400)
    assert "parameters on 4 x cpu" in said[0]
    assert "held out" not in said[1]
    two = json.loads((tmp_path / "metrics.json").read_text())
    losses = [of["history"]["training"] for of in (two, finished[1])]
    assert len(losses[0]) == 20
    np.testing.assert_allclose(*losses, rtol=1e-4)


@pytest.fixture(scope="module")
def longer(text):
    """Options of a run that goes on for seconds after its first checkpoint."""
    return [*TINY, *text, "--steps", "60", "--lr", "1e-3"]


@pytest.fixture(scope="module")
def uninterrupted(train_moe, longer, tmp_path_factory):
    """Losses of that run, on one device."""
    out = str(tmp_path_factory.mktemp("uninterrupted"))
    return train_moe.main([*longer, "--out", out])["history"]["training"]


@pytest.mark.slow
@pytest.mark.weekly
@pytest.mark.parametrize("killed", [0, 1])
def test_train_moe_ends_with_a_killed_process(train_moe, longer, uninterrupted, tmp_path, killed):
    """The other one says why within a minute, whichever it is: the first is the coordinator. Both
    together, or one process alone, then go on from the last checkpoint."""
    out = tmp_path / "two"
    saved = lambda: [int(p.name) for p in (out / "checkpoints").glob("*") if p.name.isdigit()]
    with in_two_processes(*longer, "--out", out) as processes:
        began = time.monotonic()
        while not saved():
            assert all(process.poll() is None for process in processes)
            assert time.monotonic() - began < 400
            time.sleep(0.05)
        processes[killed].kill()
        other = processes[1 - killed]
        said = other.communicate(timeout=60)[0]
    assert processes[killed].wait() == -signal.SIGKILL
    assert other.returncode != 0
    assert "another task died" in said, said[-4000:]
    assert 10 <= max(saved()) < 60
    shutil.copytree(out, tmp_path / "one")
    with in_two_processes(*longer, "--out", out, "--resume") as processes:
        two_processes.finished(processes, timeout=400)
    two = json.loads((out / "metrics.json").read_text())
    alone = ["--out", str(tmp_path / "one"), "--resume", "--devices", "2"]
    for results in (two, train_moe.main([*longer, *alone])):
        np.testing.assert_allclose(results["history"]["training"], uninterrupted, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.weekly
@pytest.mark.parametrize("precision", ["nvfp4", "fp8", "fp8-tensor", "fp8-delayed"])
def test_train_moe_in_few_bits(train_moe, text, finished, tmp_path, precision):
    """Learns like float32, with an error that is the precision's."""
    out, results = finished
    options = ["--precision", precision, "--out", str(tmp_path), "--beside", str(out)]
    ours = train_moe.main([*TINY, *text, *options])
    losses, want = ours["history"]["training"], results["history"]["training"]
    assert losses[-1] < losses[0] - 1
    assert 1e-3 < abs(losses[-1] - want[-1]) < 0.3
    assert json.loads((tmp_path / "metrics.json").read_text())["precision"] == precision
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.weekly
def test_train_moe_compares(train_moe, text, capsys):
    results = train_moe.main([*TINY, *text, "--compare"])
    assert results["ratio"] > 0
    assert results["difference"] < 1e-3
    assert f"ratio {results['ratio']:.2f}" in capsys.readouterr().out


@pytest.mark.slow
def test_train_moe_does_not_mix_runs(train_moe, text, finished):
    out = ["--out", str(finished[0])]
    with pytest.raises(SystemExit, match="pass --resume to go on"):
        train_moe.main([*TINY, *text, *out])
    with pytest.raises(SystemExit, match=r"lr was 0\.01, is 0\.02"):
        train_moe.main([*TINY, *text, *out, "--resume", "--lr", "0.02"])
    with pytest.raises(SystemExit, match="text_crc32 was"):
        train_moe.main([*TINY, *out, "--resume"])


@pytest.mark.parametrize("damaged", ["about", "state"])
def test_a_checkpoint_that_is_truncated(train_moe, tmp_path, damaged):
    folder = tmp_path / "checkpoints"
    checkpoints = train_moe.run_folder.Checkpoints(folder)
    checkpoints.begin({"seed": 0}, resume=False)
    for step in (1, 2):
        checkpoints.save(step, {"w": jnp.arange(1000.0)}, {"training": []})
    for path in (folder / "2" / damaged).rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    def resumed():
        again = train_moe.run_folder.Checkpoints(folder)
        again.begin({"seed": 0}, resume=True)
        return again.state({"w": jax.ShapeDtypeStruct((1000,), jnp.float32)})["w"]

    with pytest.raises(SystemExit) as error:
        resumed()
    assert error.value.code == (
        f"{folder / '2'} cannot be read: delete that folder to go on from the checkpoint before "
        "it, if there is one"
    )
    shutil.rmtree(folder / "2")  # as it says
    np.testing.assert_array_equal(resumed(), np.arange(1000))


def test_train_moe_rejects_what_cannot_work(train_moe, tmp_path, capsys):
    short = tmp_path / "short.txt"
    short.write_text("too short")
    with pytest.raises(SystemExit, match=r"short\.txt has 9 bytes.*at least 180"):
        train_moe.main([*TINY, "--text", str(short)])
    with pytest.raises(SystemExit, match="there is no file"):
        train_moe.main(["--text", str(tmp_path / "absent.txt")])
    with pytest.raises(SystemExit, match="there is no checkpoint"):
        train_moe.main([*TINY, "--out", str(tmp_path), "--resume"])
    for arguments, message in (
        (["--width", "40"], "not a multiple of 32"),
        (["--top-k", "9"], "more than --experts 8"),
        (["--steps", "0"], "not positive"),
        (["--devices", "3"], "do not divide --experts 8"),
        (["--devices", "4", "--data", "3"], "--devices 4 in 3 groups (--data)"),
        (["--devices", "4", "--batch", "6"], "--batch 6 is no multiple of --devices 4"),
        (["--devices", "4", "--processes", "3"], "no multiple of --processes 3"),
        (["--devices", "4", "--processes", "2"], "--processes and --coordinator go together"),
        (["--process-id", "1"], "--process-id 1 is none of 1 processes"),
        (["--devices", "2", "--compare"], "--compare is of one device"),
    ):
        with pytest.raises(SystemExit):
            train_moe.main(arguments)
        assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.weekly
@pytest.mark.parametrize("mode", ["affine4", "nvfp4"])
def test_quantized_moe_measures_the_model_of_dequantized_weights(
    train_moe, quantized_moe, text, untrained, mode, capsys
):
    results = quantized_moe.main(["--run", str(untrained), *text, "--modes", mode])
    assert list(results) == ["float32", "bfloat16", mode]
    assert json.loads((untrained / "quantized.json").read_text()) == results
    assert f"{mode} writes" in capsys.readouterr().out
    assert len(results[mode]["sample"]) > 100
    count = 4 * (64 * 128 + 64 * 64)
    scales = {"affine4": 2 * 4 * count // 64, "nvfp4": count // 16 + 2 * 4 * 4}
    assert results["float32"]["expert_bytes"] == 4 * count
    assert results["bfloat16"]["expert_bytes"] == 2 * count
    assert 0 < abs(results["bfloat16"]["held_out"] - results["float32"]["held_out"]) < 0.05
    assert results[mode]["expert_bytes"] == count // 2 + scales[mode]

    config, params, _, held_out = quantized_moe.load(untrained, text[1], None)
    dequantized = quantized_moe.map_experts(
        lambda _, w: jgg.dequantize(quantized_moe.quantize(w, mode)).swapaxes(1, 2), params
    )
    want = train_moe.Trainer(config).bits_per_byte(dequantized, held_out)
    np.testing.assert_allclose(results[mode]["held_out"], want, rtol=1e-5)
    assert 1e-4 < abs(results[mode]["held_out"] - results["float32"]["held_out"]) < 0.2


def test_quantized_moe_needs_the_trained_model_and_its_text(quantized_moe, untrained, tmp_path):
    with pytest.raises(SystemExit, match=r"python examples/train_moe\.py --out"):
        quantized_moe.main(["--run", str(tmp_path / "absent")])
    with pytest.raises(SystemExit, match="was not trained on"):
        quantized_moe.main(["--run", str(untrained)])


@pytest.mark.slow
@pytest.mark.weekly
def test_qlora_moe_trains_adapters_only(train_moe, quantized_moe, untrained, tmp_path, capsys):
    example = load("qlora_moe")
    path, out = tmp_path / "text.txt", tmp_path / "out"
    path.write_text("".join(f"{i} cubed is {i**3}.\n" for i in range(400)))
    arguments = ["--run", str(untrained), "--out", str(out), "--text", str(path)]
    results = example.main([*arguments, "--steps", "30", "--lr", "2e-2", "--rank", "4"])
    assert f"-> {results['after']:.3f} bits per byte" in capsys.readouterr().out
    assert results["after"] < results["before"] - 1
    assert results["trained_parameters"] == 4 * 4 * (64 + 128 + 64 + 64)

    # At first the adapters are nothing: the model is the quantized one.
    config, params, _ = quantized_moe.trained(untrained)
    frozen = quantized_moe.map_experts(lambda _, w: quantized_moe.quantize(w, "nvfp4"), params)
    _, held_out = train_moe.texts.split(train_moe.texts.read(str(path), config.context))
    bits_per_byte = train_moe.Trainer(config, quantized_moe.layer).bits_per_byte
    np.testing.assert_allclose(results["before"], bits_per_byte(frozen, held_out), rtol=1e-5)

    # Afterwards all of them are something, the first product's by way of the second's x.
    adapters = example.ocp.StandardCheckpointer().restore(out / "adapters")
    assert sorted(adapters) == ["blocks.0.moe.w_down", "blocks.0.moe.w_up"]
    for adapter in adapters.values():
        assert float(np.abs(adapter["up"]).max()) > 0.01
