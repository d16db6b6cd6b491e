"""Files that are not what they should be, or change: errors of one form, never other bytes."""

import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from checkpoint_writers import F32, entry, raw, save

import jax_groupgemm as jgg

ck = jgg.checkpoints
PREFIX = "jgg.checkpoints.open: "
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976698672\n"


def raised(call, error=ValueError, limit=1500) -> str:
    """What a call says, behind the prefix and the path."""
    with pytest.raises(error) as caught:
        call()
    text = str(caught.value) if error is not KeyError else caught.value.args[0]
    assert text.startswith(PREFIX)
    assert len(text) < limit
    return text.removeprefix(PREFIX)


def index(folder, where):
    path = folder / "m.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": where}))
    return path


# An index and its files.


def test_index_wins(tmp_path):
    """It names a part of a file's tensors, and one of two tensors of the same name."""
    one, two = {"a": np.arange(2.0), "b": np.ones(2)}, {"b": np.zeros(3), "c": np.ones(1)}
    save(tmp_path / "1.safetensors", one)
    save(tmp_path / "2.safetensors", two)
    path = index(tmp_path, {"a": "1.safetensors", "b": "2.safetensors"})
    for source in (tmp_path, path):
        tensors = ck.open(source)
        assert [*tensors] == ["a", "b"]
        np.testing.assert_array_equal(tensors["a"], one["a"])
        np.testing.assert_array_equal(tensors["b"], two["b"])
    path.unlink()
    said = (
        "tensor 'b' is in 1.safetensors and 2.safetensors, and no index says which counts: open "
        "one of them"
    )
    assert raised(lambda: ck.open(tmp_path)) == f"{tmp_path}: {said}"


def test_index_and_files_disagree(tmp_path):
    save(tmp_path / "1.safetensors", {"a": np.ones(2), "b": np.ones(2)})
    one = "1.safetensors"

    def message(where, error=ValueError):
        path = index(tmp_path, where)
        return raised(lambda: ck.open(path), error).removeprefix(f"{path}: ")

    assert message({"a": one, "c": one}) == f"tensor 'c' is not in {one}"
    assert message({"a": one, "b": "2.safetensors", "c": "2.safetensors"}, FileNotFoundError) == (
        "file '2.safetensors' is missing, which the index names for 2 tensors, 'b' among them"
    )
    for name in ("../1.safetensors", "", ".", "..", "a\0b", "/etc/passwd"):
        assert message({"a": name}) == f"file {name!r} is not beside the index"
    assert message({"a": 3}) == "no 'weight_map' from tensor names to files"
    assert message(["a"]) == "no 'weight_map' from tensor names to files"
    assert "File name too long" in message({"a": "x" * 300}, OSError)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert raised(lambda: ck.open(empty), FileNotFoundError) == f"{empty}: no .safetensors files"
    other = tmp_path / "n.safetensors.index.json"
    other.write_text("{}")
    assert raised(lambda: ck.open(tmp_path)) == (
        f"{tmp_path}: several indices, m.safetensors.index.json and n.safetensors.index.json: pass "
        "the path of the one to open"
    )
    index(tmp_path, {"a": one}).write_bytes(b"[]" * 60)
    other.unlink()
    said = "an index of 120 bytes: the limit is 100, open(..., max_header_bytes=) sets another"
    assert raised(lambda: ck.open(tmp_path, max_header_bytes=100)).endswith(said)


def test_two_formats_of_a_model(tmp_path):
    """Hugging Face's files are opened, and not Mistral's beside them."""
    hub, mistral = {"model.norm": np.zeros(2)}, {"norm": np.ones(2)}
    for name, tensors in (("model", hub), ("consolidated", mistral)):
        save(tmp_path / f"{name}.safetensors", tensors)
    assert [*ck.open(tmp_path)] == ["model.norm"]
    for name, tensors in (("consolidated", mistral), ("model", hub)):
        (tmp_path / f"{name}.safetensors").rename(tmp_path / f"{name}-1.safetensors")
        assert len(ck.open(tmp_path)) == 2  # other names, of parts
        where = json.dumps({"weight_map": dict.fromkeys(tensors, f"{name}-1.safetensors")})
        (tmp_path / f"{name}.safetensors.index.json").write_text(where)
        assert [*ck.open(tmp_path)] == [*tensors]
        assert [*ck.open(tmp_path / f"{name}.safetensors.index.json")] == [*tensors]
        (tmp_path / f"{name}.safetensors.index.json").rename(tmp_path / f"{name}.json")
    for name in ("consolidated", "model"):
        (tmp_path / f"{name}.json").rename(tmp_path / f"{name}.safetensors.index.json")
    tensors = ck.open(tmp_path)
    assert [*tensors] == ["model.norm"]
    assert tensors.header("model.norm") == ck.Header("float64", (2,), 16)
    index(tmp_path, {"model.norm": "model-1.safetensors"})  # a third
    assert [*ck.open(tmp_path)] == ["model.norm"]
    assert [*ck.open(tmp_path / "consolidated.safetensors.index.json")] == ["norm"]


# Files that are something else.


def test_no_safetensors_file(tmp_path):
    pointer = tmp_path / "p.safetensors"
    pointer.write_bytes(POINTER)
    assert raised(lambda: ck.open(pointer)) == (
        f"{pointer}: a Git LFS pointer, not the file that it stands for. Fetch that: git lfs "
        "install && git lfs pull, in the repository that it is in"
    )
    where = tmp_path / "m.safetensors.index.json"
    where.write_bytes(POINTER)
    assert "a Git LFS pointer" in raised(lambda: ck.open(where))
    pipe = tmp_path / "pipe.safetensors"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero"), tmp_path / "f.json"):
        if path.suffix == ".json":
            path.mkdir()
        assert raised(lambda path=path: ck.open(path)) == f"{path}: not a regular file"
    gone = tmp_path / "gone.safetensors"
    assert raised(lambda: ck.open(gone), FileNotFoundError) == f"{gone}: No such file or directory"
    assert "null byte" in raised(lambda: ck.open("a\0b"))
    assert raised(lambda: ck.open(3), TypeError) == "path must be a path, got int"  # pyright: ignore
    assert "no-such-user" in raised(lambda: ck.open("~no-such-user/m.safetensors"))
    assert raised(lambda: ck.open("x", max_header_bytes=-1)) == (
        "max_header_bytes=-1 is not a number of bytes"
    )


def test_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    save(tmp_path / "m.safetensors", {"a": np.arange(3)})
    for path in ("~/m.safetensors", Path("~/m.safetensors"), "~"):
        np.testing.assert_array_equal(ck.open(path)["a"], [0, 1, 2])


def test_links_are_followed(tmp_path):
    """As in Hugging Face's cache, whose files are links to blobs in another folder."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    for folder in (blobs, snapshot):
        folder.mkdir()
    save(blobs / "0123", {"a": np.arange(3)})
    (snapshot / "m.safetensors").symlink_to("../blobs/0123")
    np.testing.assert_array_equal(ck.open(snapshot)["a"], [0, 1, 2])


# Headers.


def test_max_header_bytes(tmp_path):
    path = raw(tmp_path / "m.safetensors", {"a": entry(0, 4)}, bytes(4))
    length = path.stat().st_size - 12
    said = f"a header of {length} bytes: the limit is 40, open(..., max_header_bytes=) sets another"
    assert raised(lambda: ck.open(path, max_header_bytes=40)) == f"{path}: {said}"
    assert ck.open(path, max_header_bytes=length)["a"].shape == (4,)
    with path.open("wb") as f:  # sparse
        f.write(struct.pack("<Q", 100_000_001))
        f.truncate(100_000_100)
    assert "a header of 100000001 bytes: the limit is 100000000" in raised(lambda: ck.open(path))


def test_unknown_dtype(tmp_path):
    """It does not keep others from being read."""
    header = {"a": entry(0, 3, [6], "F4"), "b": entry(3, 7)}
    tensors = ck.open(raw(tmp_path / "m.safetensors", header, bytes(range(7))))
    np.testing.assert_array_equal(tensors["b"], [3, 4, 5, 6])
    assert "tensor 'a': dtype 'F4' is not one of BOOL, U8" in raised(lambda: tensors["a"])
    assert raised(lambda: tensors["c"], KeyError) == "no tensor 'c'"
    bad = raw(tmp_path / "n.safetensors", {"a": entry(3, 0, [6], "F4")}, bytes(3))
    assert "data_offsets [3, 0] are not a beginning and an end" in raised(lambda: ck.open(bad))


SHAPES = [
    ([1] * 65, 1, "has 65 axes, more than 64"),
    ([0, 2**62, 2**62], 0, "is too large"),
    ([0, 2**70], 0, "a.shape[1] is 1180591620717411303424, expected a finite number of at most"),
    ([2**33, 2**33, 0], 0, "is too large"),
    ([2**60], 0, "data_offsets [0, 0], but F64 of shape"),
]


@pytest.mark.parametrize(("shape", "count", "message"), SHAPES)
def test_impossible_shapes(tmp_path, shape, count, message):
    header = {"a": entry(0, 8 * count, shape, "F64")}
    path = raw(tmp_path / "m.safetensors", header, bytes(8 * count))
    if shape == [2**60]:  # 2**63 bytes
        message = "is too large"
    assert message in raised(lambda: ck.open(path))


def test_largest_rank(tmp_path):
    path = raw(tmp_path / "m.safetensors", {"a": entry(0, 8, [1] * 64, "F64")}, bytes(8))
    assert ck.open(path)["a"].shape == (1,) * 64


def digits(count, length):
    number = "9" * length
    return f'{{"a":{{"dtype":"U8","shape":[{",".join([number] * count)}]}}}}'.encode()


LONG = "x" * 1_000_000
HOSTILE = {
    "numbers": digits(250, 4000),
    "more numbers": digits(4000, 1000),
    "one number": digits(1, 1_000_000),
    "fractions": b'{"a":[%s]}' % b",".join([b"0." + b"1" * 4000] * 250),
    "sizes": json.dumps({"a": entry(0, 0, [2**62] * 100_000)}).encode(),
    "a long dtype": json.dumps({"a": entry(0, 8, dtype=LONG)}).encode(),
    "a long name": json.dumps({LONG: 3}).encode(),
    "names": json.dumps({f"{LONG[:200]}{i}": 3 for i in range(5000)}).encode(),
    "a name twice": f'{{"{LONG}":1,"{LONG}":2}}'.encode(),
    "a long entry": json.dumps({"a": [LONG]}).encode(),
    "more keys": json.dumps({"a": {str(i): i for i in range(100_000)}}).encode(),
    "no characters": b"\xff" * 1_000_000,
    "depth": b'{"a":' * 200_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers(tmp_path, name):
    """Work is linear in their bytes, and messages are short."""
    path = raw(tmp_path / "m.safetensors", HOSTILE[name], bytes(8))
    start = time.perf_counter()
    opening = lambda: [*ck.open(path).values()]
    raised(opening)
    assert time.perf_counter() - start < 2  # they took from 7 seconds to minutes


def test_many_tensors(tmp_path):
    """100,000 of them, of which three are read."""
    header = {f"layers.{i}": entry(i, i + 1) for i in range(100_000)}
    path = raw(tmp_path / "m.safetensors", header, bytes(i % 251 for i in range(100_000)))
    start = time.perf_counter()
    tensors = ck.open(path)
    assert [int(tensors[f"layers.{i}"][0]) for i in (0, 252, 99_999)] == [0, 1, 99_999 % 251]
    assert time.perf_counter() - start < 10


# Files that change after they were opened.


def values(n, start=0.0):
    return {"a": np.arange(start, start + n).astype(F32), "b": np.full(5, start)}


def test_truncated(tmp_path):
    path = save(tmp_path / "m.safetensors", values(100_000))
    tensors = ck.open(path)
    held = tensors["a"]
    size = path.stat().st_size
    os.truncate(path, size - 200_000)
    np.testing.assert_array_equal(held, np.arange(100_000))  # its own memory
    for name in "ab":
        assert raised(lambda name=name: tensors[name]) == (
            f"{path}: the file has changed from {size} to {size - 200_000} bytes since it was "
            "opened: open it again"
        )


@pytest.mark.parametrize("how", ["renamed", "written", "touched", "back in time"])
def test_replaced(tmp_path, how):
    """By one of the same size, at once."""
    path = save(tmp_path / "m.safetensors", values(10))
    tensors = ck.open(path)
    np.testing.assert_array_equal(tensors["a"], np.arange(10))
    other = save(tmp_path / "other", values(10, 7))
    if how == "renamed":
        other.rename(path)
    elif how == "touched":
        path.touch()
    else:
        status = path.stat()
        path.write_bytes(other.read_bytes())
        if how == "back in time":
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    for name in "ab":
        assert raised(lambda name=name: tensors[name]) == (
            f"{path}: the file has changed since it was opened: open it again"
        )
    start = 0 if how == "touched" else 7
    np.testing.assert_array_equal(ck.open(path)["a"], np.arange(start, start + 10))


def test_what_ends_while_it_is_read(tmp_path, monkeypatch):
    path = save(tmp_path / "m.safetensors", values(10))
    tensors, begin = ck.open(path), path.stat().st_size - 10 * 4 - 5 * 8
    read = os.preadv
    monkeypatch.setattr(
        os, "preadv",
        lambda file, views, at: read(file, [views[0][:12]], at) if at == begin else 0,
    )  # fmt: skip
    message = raised(lambda: tensors["a"])
    assert message == f"{path}: tensor 'a': the file ends at byte {begin + 12}"


def test_more_than_memory(tmp_path, monkeypatch):
    tensors = ck.open(path := save(tmp_path / "m.safetensors", values(10)))

    def empty(shape, dtype):
        raise MemoryError

    monkeypatch.setattr(np, "empty", empty)
    message = raised(lambda: tensors["a"], MemoryError)
    assert message == f"{path}: tensor 'a': no memory for F32 of shape (10,)"


def test_types_are_not_read(tmp_path, monkeypatch):
    header = {"a": entry(0, 8, [2], "F32"), "b": entry(8, 12, [4], "F6_OF_TOMORROW")}
    tensors = ck.open(raw(tmp_path / "m.safetensors", header, bytes(12)))
    monkeypatch.setattr(os, "preadv", lambda *_: pytest.fail("read"))
    assert tensors.header("a") == ck.Header("float32", (2,), 8)
    assert tensors.header("b") == ck.Header("F6_OF_TOMORROW", (4,), 4)
    assert raised(lambda: tensors.header("c"), KeyError) == "no tensor 'c'"


def test_deleted(tmp_path):
    path = save(tmp_path / "m.safetensors", values(10))
    tensors = ck.open(path)
    path.unlink()
    assert "No such file or directory" in raised(lambda: tensors["a"], FileNotFoundError)
    os.mkfifo(path)
    assert raised(lambda: tensors["a"]) == f"{path}: not a regular file"


MANY = """
import resource, sys
from jax_groupgemm import checkpoints as ck
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
tensors = ck.open(sys.argv[1])
held = [tensors[name] for name in tensors for _ in range(20)]
assert len(held) == 2000 and all(x.size == 3 for x in held)
"""


def test_descriptors(tmp_path):
    """2000 tensors of 100 files are held with less than 64 descriptors."""
    for i in range(100):
        save(tmp_path / f"{i}.safetensors", {f"x{i}": np.arange(3)})
    done = subprocess.run([sys.executable, "-c", MANY, str(tmp_path)], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
