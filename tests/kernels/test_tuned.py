"""Tables of measured tiles: what a product looks up, what reaches the custom call, bad tables."""

import importlib.metadata
import json
import os
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_runs import needs_hopper

import jax_groupgemm as jgg
from jax_groupgemm import info
from jax_groupgemm._kernels import tuned

KIND = "Fast GPU/2"
SHAPE = {"groups": 4, "k": 32, "n": 48}


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Write a table of these entries for the one kind of device that there seems to be."""
    path = tmp_path / "table.json"
    monkeypatch.setattr(tuned, "device_kind", lambda: KIND)
    monkeypatch.setenv("JGG_TUNED", str(path))
    tuned._entries.cache_clear()

    def write(*fields, device=KIND):
        base = {"op": "mm", "dtype": "bfloat16", "transposed": "", "gated": False}
        found = {}
        for given in fields:
            both = base | SHAPE | given
            product = tuned.Product(**{name: both[name] for name in tuned.Product._fields})
            found[product] = tuned.Entry(both["tile"], 9.0, 10.0)
        tuned.write(path, device, [], found)
        return path

    yield write
    tuned._entries.cache_clear()


def tiles(f, *args) -> list[int]:
    """Of every call that is lowered for CUDA, in order."""
    fresh = lambda *args: f(*args)  # what was lowered once stays as it is
    text = jax.jit(fresh).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    return [int(tile) for tile in re.findall(r"\btile = (\d+) : i32", text)]


def product(rows, dtype="bfloat16", groups=4, **options):
    """Tiles of a product of so many rows."""
    shape = (groups, 48, 32) if options.get("transpose_w") else (groups, 32, 48)
    x, w, sizes = jnp.ones((rows, 32), dtype), jnp.ones(shape, dtype), jnp.zeros(groups, int)
    return tiles(lambda x, w, s: jgg.grouped_mm(x, w, s, **options), x, w, sizes)


def rule(*args, **options) -> list[int]:
    """The tile without a table."""
    with tuned.forced(0):
        return product(*args, **options)


def test_nearest_power_of_two():
    values = [1, 2, 3, 5, 6, 1000, 90, 91, 0.25, 1 / 3, 0.4]
    want = [1, 2, 4, 4, 8, 1024, 64, 128, 0.25, 0.25, 0.5]
    assert [tuned.nearest_power_of_two(value) for value in values] == want


def test_an_entry_reaches_the_custom_call(table):
    table({"rows": 16, "tile": 256})
    assert product(64) == [256]
    assert product(48) == [256]  # 12 rows per group
    assert product(88) == [256]  # 22
    for rows in (40, 92, 4, 1024):  # nearest to other powers of two: nothing is extrapolated
        assert product(rows) == rule(rows)
    assert product(80, groups=5) == rule(80, groups=5)
    assert product(64, "float16") == rule(64, "float16")
    assert product(64, "float32") == rule(64, "float32")
    assert product(64, transpose_w=True) == rule(64, transpose_w=True)
    assert product(64, activation="swiglu") == rule(64, activation="swiglu")
    assert product(64, activation="silu") == [256]
    assert product(64, preferred_element_type="float32") == rule(
        64, preferred_element_type="float32"
    )


def test_every_part_of_the_key(table):
    table(
        {"rows": 0.5, "tile": 32},
        {"rows": 16, "tile": 64, "transposed": "w"},
        {"rows": 16, "tile": 128, "gated": True},
        {"rows": 16, "tile": 288, "dtype": "float16"},
    )
    assert product(2) == [32]
    assert product(64, transpose_w=True) == [64]
    assert product(64, activation="geglu") == [128]
    assert product(64, "float16") == [288]
    assert product(64) == rule(64)


def test_gradients_look_up_their_own_products(table):
    back = {"k": 48, "n": 32, "transposed": "w"}
    table(
        {"rows": 16, "tile": 64},
        {"rows": 16, "tile": 128, **back},
        {"rows": 16, "tile": 256, "op": "wgrad"},
    )
    x, w, sizes = (
        jnp.ones((64, 32), "bfloat16"),
        jnp.ones((4, 32, 48), "bfloat16"),
        jnp.zeros(4, int),
    )
    loss = lambda x, w, s: jnp.sin(jgg.grouped_mm(x, w, s)).sum()
    assert sorted(tiles(jax.grad(loss, (0, 1)), x, w, sizes)) == [64, 128, 256]
    # Segments of 16 rows on average, operands in segmented_mm's own layouts.
    spans = jnp.zeros((4, 2), int)
    segmented = lambda a, b, s: jgg.segmented_mm(a, b, s, transpose_a=True)
    assert tiles(segmented, x, jnp.ones((64, 48), "bfloat16"), spans) == [256]
    assert tiles(jgg.segmented_mm, x.T, jnp.ones((64, 48), "bfloat16"), spans) == [64]
    table({"rows": 16, "tile": 32, "op": "wgrad", "transposed": "x"})
    tuned._entries.cache_clear()
    assert tiles(jgg.segmented_mm, x.T, jnp.ones((64, 48), "bfloat16"), spans) == [32]


def test_part_of_the_groups(table):
    """The average is over all groups, the weights are those at hand."""
    table({"rows": 16, "tile": 256})
    x, w = jnp.ones((128, 32), "bfloat16"), jnp.ones((4, 32, 48), "bfloat16")
    f = lambda x, w, s, o: jgg.grouped_mm(x, w, s, group_offset=o)
    assert tiles(f, x, w, jnp.zeros(8, int), jnp.int32(2)) == [256]


def test_without_a_table(monkeypatch):
    """No device, no table, no entry: the rule, and not a word."""
    monkeypatch.delenv("JGG_TUNED", raising=False)
    assert product(64) == rule(64)
    monkeypatch.setattr(tuned, "device_kind", lambda: KIND)
    assert tuned.path(KIND) is None
    assert product(64) == rule(64)
    monkeypatch.setenv("JGG_TUNED", "")
    assert product(64) == rule(64)


def test_nothing_is_read_for_other_dtypes(table, monkeypatch):
    table()
    monkeypatch.setattr(tuned, "device_kind", lambda: pytest.fail("asked for the device"))
    assert product(64, "float32") == rule(64, "float32")


def test_the_packaged_table(table, tmp_path, monkeypatch):
    path = table({"rows": 16, "tile": 256})
    monkeypatch.delenv("JGG_TUNED")
    monkeypatch.setattr(tuned, "_PACKAGED", tmp_path)
    assert tuned.file_name(KIND) == "fast-gpu-2.json"
    assert tuned.file_name("NVIDIA H200") == "nvidia-h200.json"
    assert product(64) == rule(64)
    path.rename(tmp_path / "fast-gpu-2.json")
    assert product(64) == [256]


BAD = {
    "nonsense": ("{", "Expecting property name"),
    "list": ("[]", "it is not a table of tiles"),
    "format": ('{"format": 2}', "its format is 2, expected 1"),
    "entries": ('{"format": 1, "device": "d", "runs": [], "entries": [{}]}', "KeyError('op')"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_corrupt_table_is_one_warning(table, name):
    path = table()
    text, why = BAD[name]
    path.write_text(text)
    want = f"cannot use the table of tiles {path}: .*{re.escape(why)}.*Using the kernels' own rule"
    with pytest.warns(UserWarning, match=want):
        assert product(64) == rule(64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert product(64) == rule(64)


def test_other_tables_that_cannot_be_used(table, monkeypatch):
    path = table({"rows": 16, "tile": 48})
    with pytest.warns(UserWarning, match="tile 48 is not one of 32, 64, 128, 256, 288"):
        assert product(64) == rule(64)
    table({"rows": 16, "tile": 64}, device="Slow GPU")
    tuned._entries.cache_clear()
    with pytest.warns(UserWarning, match="measured on Slow GPU, this GPU is Fast GPU/2"):
        assert product(64) == rule(64)
    monkeypatch.setenv("JGG_TUNED", str(path) + ".absent")
    with pytest.warns(UserWarning, match="No such file"):
        assert product(64) == rule(64)


def test_devices_of_several_kinds(monkeypatch):
    class Device:
        def __init__(self, kind):
            self.device_kind = kind

    monkeypatch.setattr(jax, "local_devices", lambda backend: [Device("a"), Device("a")])
    assert tuned.device_kind() == "a"
    monkeypatch.setattr(jax, "local_devices", lambda backend: [Device("a"), Device("b")])
    assert tuned.device_kind() is None


def test_written_tables_are_read_back(tmp_path):
    products = [
        tuned.Product("wgrad", "bfloat16", 4, 32, 48, "xy", False, 0.25),
        tuned.Product("mm", "float16", 4, 32, 48, "w", True, 128),
    ]
    found = {p: tuned.Entry(tile, 1.5, 2.25) for p, tile in zip(products, (64, 32), strict=True)}
    path = tmp_path / "new" / "table.json"
    tuned.write(path, KIND, [{"date": "2026-01-01"}], found)
    table = {"device": KIND, "runs": [{"date": "2026-01-01"}], "entries": found}
    assert tuned.read(path) == table
    assert [e["op"] for e in json.loads(path.read_text())["entries"]] == ["mm", "wgrad"]
    assert [p.name for p in path.parent.iterdir()] == ["table.json"]
    tuned.write(path, KIND, [], {})
    assert tuned.read(path)["entries"] == {}


def test_forced(table):
    table({"rows": 16, "tile": 256})
    with tuned.forced(64) as seen:
        assert product(64) == [64]
    assert seen == [tuned.Product("mm", "bfloat16", 4, 32, 48, "", False, 16)]
    with tuned.forced(0):  # the rule's, whatever the table says
        assert product(64) == [32]
    assert product(64) == [256]


def test_info_names_the_table(table):
    path = table({"rows": 16, "tile": 256})
    found = info.collect()
    assert found["tiles"] == {"table": str(path), "products": 1, "problem": None}
    assert f"Measured tiles\n  {path}: 1 products" in info._text(found)
    path.write_text("{")
    tuned._entries.cache_clear()
    assert f"cannot use the table of tiles {path}: Expecting" in info._text(info.collect())


def test_packaged_tables_are_valid():
    for path in sorted(tuned._PACKAGED.glob("*")):
        table = tuned.read(path)
        assert path.name == tuned.file_name(table["device"])
        for entry in table["entries"].values():
            assert entry.us <= 0.97 * entry.rule_us


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("mean", [20, 300])
def test_every_tile_gives_the_same(rng, mean):
    sizes = np.append(rng.integers(0, 2 * mean, 7), 0)
    rows = int(sizes.sum()) + 5
    x, y, w = (
        jnp.asarray(rng.standard_normal(shape), "bfloat16")
        for shape in ((rows, 72), (rows, 272), (8, 72, 272))
    )
    forms = {
        "mm": lambda x, y, w: jgg.grouped_mm(x, w, sizes, preferred_element_type="float32"),
        "gated": lambda x, y, w: jgg.grouped_mm(x, w, sizes, activation="swiglu"),
        "wgrad": lambda x, y, w: jax.vjp(lambda w: jgg.grouped_mm(x, w, sizes), w)[1](y)[0],
    }
    for name, f in forms.items():
        results = []
        for tile in (0, *tuned.tiles("mm")):
            with tuned.forced(tile):
                results.append(np.asarray(jax.jit(lambda *v, f=f: f(*v))(x, y, w), np.float32))
        for got in results[1:]:
            np.testing.assert_allclose(got, results[0], rtol=1e-2, atol=1e-3, err_msg=name)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: path.write_text("[" * 10**5), "it is not a table of tiles"),
        (os.mkfifo, "it is not a file"),
        (lambda path: path.mkdir(), "it is not a file"),
    ],
)
def test_what_is_no_table(table, tmp_path, monkeypatch, make, says):
    """None of them raises, or hangs, in the user's lowering."""
    path = tmp_path / "other.json"
    make(path)
    monkeypatch.setenv("JGG_TUNED", str(path))
    with pytest.warns(UserWarning, match=f"cannot use the table of tiles .*: {says}"):
        assert product(64) == rule(64)


def test_a_fingerprint_without_metadata(monkeypatch):
    """Files that run without having been installed have one, too: another than a version's."""
    digest = tuned._fingerprint.__wrapped__
    installed = digest(None, None, ())

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert digest(None, None, ()) == digest(None, None, ()) != installed
