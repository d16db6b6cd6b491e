"""examples/generate.py: what it says of memory is what its programs take."""

import dataclasses
import re

import decoder_folders
import jax
import pytest
from decoder_runs import example, generator, refused

import jax_groupgemm as jgg

ROOM, CHUNK = 64, 16


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (9994, "9.99 kB"),
        (9996, "10.0 kB"),
        (99_960, "100 kB"),
        (999_400, "999 kB"),
        (999_600, "1.00 MB"),
        (61_250_000_000, "61.2 GB"),
        (1.4e15, "1400 TB"),
        (float("inf"), "an unknown amount"),
    ],
)
def test_amounts_have_a_unit_that_fits(generate, nbytes, text):
    assert example("decoder.memory").amount(nbytes) == text


def both(generate, folder, **kwargs):
    """Generators of a folder's shapes and of its weights, and the model."""
    loading = generate.loading
    about = generate.config.read(folder)
    options = loading.Options(**({"dtype": "float32", "tokens": ROOM} | kwargs))
    weights = loading.weights_of(folder, about, options)
    with jax.numpy_dtype_promotion("standard"):
        shapes, layer = loading.shapes(about, weights, options)
        assert all(isinstance(a, jax.ShapeDtypeStruct) for a in jax.tree.leaves(nnx_state(shapes)))
        announced = generator(shapes, ROOM, CHUNK)
        model = loading.placed(about, weights, options)
        run = generator(model, ROOM, CHUNK)
    need = need_of(about, weights.headers, options).compiled(announced.use, layer)
    return announced, run, model, need


def need_of(*args):
    return example("decoder.memory").Need.of(*args)


def nnx_state(model):
    return example("flax.nnx").split(model)[1]


CASES = {
    "plain": ("mixtral", {}),
    "bfloat16": ("gpt_oss", {"dtype": "bfloat16"}),
    "quantized": ("qwen3_moe", {"quantize": "nvfp4"}),
    "stored": ("qwen3_moe_fp8", {}),
    "two kinds of layers": ("deepseek_v3", {}),
    "devices": ("gpt_oss", {"devices": 2}),
    "quantized on devices": ("qwen3_moe", {"quantize": "affine4", "devices": 2}),
    "unrolled": ("mixtral", {"unrolled": True}),
    "three products": ("mixtral", {"joined": False}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.one_in(2)
def test_what_is_announced_is_what_runs(case, generate):
    name, options = CASES[case]
    announced, run, model, need = both(generate, decoder_folders.FIXTURES / name, **options)
    assert announced.use == run.use
    # Nothing of it is of this package: what is on the first device, and what XLA says.
    on_first = lambda tree: sum(
        shard.data.nbytes
        for a in jax.tree.leaves(tree)
        for shard in a.addressable_shards
        if shard.device == jax.devices()[0]
    )
    assert need.experts + need.others == run.use.weights == on_first(run.params)
    assert need.cache == on_first(run.new_cache())
    peaks = []
    for program in (run.read, run.write):
        of = program.memory_analysis()
        peaks.append(of.argument_size_in_bytes + of.output_size_in_bytes + of.temp_size_in_bytes)
        peaks[-1] -= of.alias_size_in_bytes
        assert of.alias_size_in_bytes >= need.cache  # a step writes into it
    assert sum(run.use) == pytest.approx(max(peaks), rel=1e-3)
    assert need.total == run.use.weights + max(need.cache + need.temporaries, need.layer)
    # The programs of shapes are those that run.
    before = announced.read, announced.write
    announced.fill(model)
    assert (announced.read, announced.write) == before
    prompt = [*range(20)]
    assert [*announced(prompt, 8)] == [*run(prompt, 8)]


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.one_in(2)
def test_the_layout_of_hopper_is_announced(generate, tiny, monkeypatch, devices):
    """As on such a GPU; a CPU puts the codes back in order."""
    original = generate.loading.Placing.__init__

    def packs(self, *args):
        original(self, *args)
        self.packs = True

    monkeypatch.setattr(generate.loading.Placing, "__init__", packs)
    options = {"dtype": "bfloat16", "quantize": "nvfp4", "devices": devices}
    announced, run, model, _ = both(generate, tiny, **options)
    assert model.stacks[0].layers.mlp.up.get_value().layout == "sm90"
    assert announced.use == run.use
    before = announced.read
    announced.fill(model)
    assert announced.read is before
    assert len([*announced(range(5), 4)]) == 4


def test_a_model_of_another_structure_is_compiled_again(generate, tiny):
    announced, run, model, _ = both(generate, tiny)
    want = [*run(range(5), 8)]
    other, _, _, _ = both(generate, tiny, joined=False)
    before = other.read
    other.fill(model)
    assert other.read is not before
    assert other.use == announced.use
    assert [*other(range(5), 8)] == want


def test_a_layer_that_is_loaded_counts(generate):
    memory = example("decoder.memory")
    need = memory.Need(6e9, 2e9, 0, 3e9, False)
    small, large = (need.compiled(memory.Use(8 * 10**9, 10**9, 5 * 10**8), n) for n in (1e9, 2e9))
    assert (small.total, large.total) == (9.5e9, 10e9)
    parts = "1.00 GB of cache and 500 MB of temporaries"
    assert small.announced(10e9) == f"needs 9.50 GB of 10.0 GB: 8.00 GB of weights, {parts}"
    assert large.announced(10e9) == (
        "needs 10.0 GB of 10.0 GB: 8.00 GB of weights and, while they are loaded, 2.00 GB of a "
        f"layer; then {parts}"
    )
    assert large.fits(10e9)
    assert not large.fits(9.9e9)
    large.check(10e9, 1)


# ---- what does not fit


def test_files_alone_can_say_so(generate, tiny, monkeypatch):
    monkeypatch.setattr(example("decoder.ready"), "Generator", None)  # nothing is compiled
    assert re.fullmatch(
        r"786 kB of experts, 169 kB of other weights and 16\.4 kB of cache do not fit into the "
        r"400 kB that the device has free; experts would fit with --quantize mxfp4 \(104 kB\) or "
        r"nvfp4 \(111 kB\).*",
        refused(generate, tiny, "--memory", "0.0004"),
    )
    text = refused(generate, tiny, "--memory", "0.00001")
    assert "no format of experts makes them fit: use more --devices, or fewer --tokens" in text
    text = refused(generate, tiny, "--devices", "3")
    assert text == "8 experts cannot be divided among 3 devices"
    text = refused(generate, tiny, "--devices", "2", "--memory", "0.0004")
    assert "393 kB of experts" in text
    assert "that a device has free" in text


def test_temporaries_can_be_too_many(generate, tiny, monkeypatch, capsys):
    """The weights and the cache would fit. Nothing is loaded."""
    monkeypatch.setattr(generate.loading, "placed", None)
    text = refused(generate, tiny, "--memory", "0.0013", "--chunk", "512")
    assert re.fullmatch(
        r"786 kB of experts, 169 kB of other weights, 262 kB of cache and \S+ [kM]B of temporaries "
        r"do not fit into the 1\.30 MB that the device has free; .+",
        text,
    )
    assert "needs" not in capsys.readouterr().out


def test_a_copy_of_a_layer_can_be_too_large(generate, tiny, monkeypatch):
    """A model is refused that would run but does not fit while it is loaded."""
    monkeypatch.setattr(generate.loading, "placed", None)
    assert re.fullmatch(
        r"786 kB of experts, 169 kB of other weights and 445 kB of a layer while it is loaded do "
        r"not fit into the 1\.25 MB that the device has free; experts would fit with --quantize .+",
        refused(generate, tiny, "--memory", "0.00125"),
    )


def test_memory_that_was_free_can_be_gone(generate, tiny, monkeypatch):
    def fails(*_):
        raise jax.errors.JaxRuntimeError(text)

    monkeypatch.setattr(generate.loading, "placed", fails)
    text = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes."
    assert refused(generate, tiny) == (
        "the device ran out of memory, which others use too, or which is in pieces: use "
        "--quantize, more --devices or fewer --tokens"
    )
    text = "INTERNAL: another error"
    with pytest.raises(jax.errors.JaxRuntimeError, match="another error"):
        generate.main([str(tiny)])


def test_what_a_checkpoint_needs_is_counted(generate, tiny):
    about = generate.config.read(tiny)
    loading = generate.loading
    options = loading.Options("bfloat16", tokens=100)
    said = loading.headers(jgg.checkpoints.open(tiny))
    need = need_of(about, said, options)
    numbers = 2 * 8 * 3 * 64 * 64
    assert need.experts == 2 * numbers
    assert need.cache == 2 * 2 * 2 * 16 * 100 * 2
    quantized = need_of(about, said, dataclasses.replace(options, quantize="nvfp4"))
    assert quantized.experts == numbers * 4.5 / 8
    assert quantized.others == need.others
