"""JSON files that may hold anything: what is read, and what is refused."""

import json
import os
import time
from pathlib import Path

import pytest

import jax_groupgemm as jgg

read_json = jgg.checkpoints.read_json
DEEP = 100_000


def message(path, error: type[Exception] = ValueError, **limits) -> str:
    """What is said of a file, behind the function's name and the path."""
    start = time.perf_counter()
    with pytest.raises(error) as caught:
        read_json(path, **limits)
    assert time.perf_counter() - start < 2
    text, where = str(caught.value), f"jgg.checkpoints.read_json: {path}: "
    assert text.startswith(where)
    assert len(text) < 1500
    return text.removeprefix(where)


def test_what_is_read(tmp_path, monkeypatch):
    values = {
        "a": [1, -2.5, "ü", None, True, {"b": {}}], "": 2**64 - 1, "c": -(2**63), "d": 1e308,
        "e": 5e-324,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values), encoding="utf-8")
    monkeypatch.setenv("HOME", str(tmp_path))
    for source in (path, str(path), "~/config.json"):
        assert read_json(source) == values
    link = tmp_path / "link.json"
    link.symlink_to(path)
    assert read_json(link, max_bytes=path.stat().st_size) == values


CONTENTS = {
    b"": "malformed JSON: Expecting value: line 1 column 1 (char 0)",
    b'{"a": 1': "malformed JSON: Expecting ',' delimiter: line 1 column 8 (char 7)",
    b"{} {}": "malformed JSON: Extra data: line 1 column 4 (char 3)",
    b"[1]": "malformed JSON: not an object",
    b"Infinity": "malformed JSON: not an object",
    b'{"a": "\xff"}': "malformed JSON: byte 7 is not UTF-8",
    b"\xef\xbb\xbf{}": "malformed JSON: it begins with a byte order mark, save it without one",
    b'{"b": [{"a": 1, "a": 1}]}': "malformed JSON: 'a' appears twice",
    b'{"a": {"b": [0.0, Infinity]}}':
        "a.b[1] is Infinity, expected a finite number of at most 64 bits",
    b'{"a": -Infinity}': "a is -Infinity, expected a finite number of at most 64 bits",
    b'{"a": [[NaN]]}': "a[0][0] is NaN, expected a finite number of at most 64 bits",
    b'{"a": 1e999}': "a is 1e999, expected a finite number of at most 64 bits",
    b'{"a": 18446744073709551616}':
        "a is 18446744073709551616, expected a finite number of at most 64 bits",
    b'{"a": -9223372036854775809}':
        "a is -9223372036854775809, expected a finite number of at most 64 bits",
    b'{"a": %s}' % (b"9" * 1_000_000):
        f"a is {'9' * 200}... (1000000 characters), expected a finite number of at most 64 bits",
    b'{"a": 0.%s}' % (b"1" * 998):
        f"a is 0.{'1' * 198}... (1000 characters), expected a finite number of at most 64 bits",
    b"version https://git-lfs.github.com/spec/v1\n":
        "a Git LFS pointer, not the file that it stands for. Fetch that: git lfs install && git "
        "lfs pull, in the repository that it is in",
}  # fmt: skip


@pytest.mark.parametrize("content", CONTENTS, ids=range(len(CONTENTS)))
def test_contents(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    assert message(path) == CONTENTS[content]


NESTED = {
    "lists": (b"[", b"]", b"1"),
    "objects": (b'{"a":', b"}", b"1"),
    "both": (b'[{"a":', b"}]", b"1"),
}


@pytest.mark.parametrize("kind", NESTED)
def test_depth(tmp_path, kind):
    begin, end, inner = NESTED[kind]
    path, each = tmp_path / "config.json", 1 + (kind == "both")

    def write(count, close=True):
        path.write_bytes(b'{"x":' + begin * count + inner + (end * count + b"}") * close)

    write(99 // each)
    assert repr(read_json(path)).count("{") + repr(read_json(path)).count("[") >= 99
    for count, close in (
        (100 // each, True),
        (500, True),
        (5000, True),
        (DEEP, True),
        (DEEP, False),
    ):
        write(count, close)
        if (count, kind) != (50, "both"):
            said = message(path)
            assert said == "malformed JSON: nested more than 100 deep"


def test_long_names(tmp_path):
    """Messages are short, and the memory of a file's names is that of the file."""
    path, name = tmp_path / "config.json", "x" * 1_000_000
    path.write_text(json.dumps({name: {name: [[]] * 100_000 + [float("inf")]}}))
    assert message(path).endswith("is Infinity, expected a finite number of at most 64 bits")
    path.write_text(f'{{"{name}": 1, "{name}": 2}}')
    assert message(path).endswith("... (1000002 characters) appears twice")


def test_no_regular_file(tmp_path):
    pipe = tmp_path / "config.json"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path, Path("/dev/zero")):
        assert message(path) == "not a regular file"
    assert message(tmp_path / "a.json", FileNotFoundError) == "No such file or directory"
    with pytest.raises(OSError, match=r"characters\): File name too long$"):
        read_json(tmp_path / ("a" * 300))


def test_size(tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(b"{}" + b" " * 8)
    said = "a file of 10 bytes: the limit is 9, read_json(..., max_bytes=) sets another"
    assert message(path, max_bytes=9) == said
    assert read_json(path, max_bytes=10) == {}
    with path.open("r+b") as f:  # sparse
        f.truncate(2**40)
    said = f"a file of {2**40} bytes: the limit is {2**24}, read_json(..., max_bytes=) sets another"
    assert message(path) == said


def test_arguments(tmp_path):
    for limit in (-1, True, 1.0, "1"):
        with pytest.raises(ValueError, match=r"^jgg") as error:
            read_json(tmp_path, max_bytes=limit)  # pyright: ignore
        text = f"jgg.checkpoints.read_json: max_bytes={limit!r} is not a number of bytes"
        assert str(error.value) == text
    with pytest.raises(TypeError) as error:
        read_json(3)  # pyright: ignore
    assert str(error.value) == "jgg.checkpoints.read_json: path must be a path, got int"
