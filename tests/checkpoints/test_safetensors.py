"""Safetensors files: what is read back, what stays on disk, and malformed ones."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoint_writers import (
    BF16,
    E4M3,
    F16,
    F32,
    F64,
    K,
    check,
    entry,
    integers,
    named,
    nvfp4,
    raw,
    same,
    save,
    write_awq,
    write_gptq,
    write_mlx,
)

import jax_groupgemm as jgg

ck = jgg.checkpoints


def test_open(rng, tmp_path):
    kinds = [np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32, np.uint64, np.int64]
    kinds += [F16, BF16, F32, F64, np.complex64, E4M3, ml_dtypes.float8_e5m2]
    want = {np.dtype(kind).name: rng.integers(0, 100, (3, 5)).astype(kind) for kind in kinds}
    want |= {
        "e8m0": np.array([0, 127, 254], np.uint8).view(ml_dtypes.float8_e8m0fnu),
        "bool": np.array([True, False]),
        "empty": np.empty((3, 0, 2), np.int16),
        "scalar": np.array(-1.5, F32),
    }
    names = sorted(want)
    parts = [{n: want[n] for n in reversed(names[i::2])} for i in (0, 1)]
    one, many, index = tmp_path / "one.safetensors", tmp_path / "many", tmp_path / "indexed"
    save(one, want)
    for folder in (many, index):
        folder.mkdir()
        for i, part in enumerate(parts):
            save(folder / f"m-{i}.safetensors", part, align=8)
    where = {n: f"m-{i}.safetensors" for i, part in enumerate(parts) for n in part}
    path = index / "m.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    save(index / "other.safetensors", {"other": np.ones(3)})  # not in the index: not read
    for source in (one, str(one), many, index, path):
        tensors = ck.open(source)
        assert list(tensors) == names
        assert len(tensors) == len(names)
        assert "nothing" not in tensors
        for name, x in want.items():
            got = tensors[name]
            assert type(got) is np.ndarray
            assert (got.dtype, got.shape, got.tobytes()) == (x.dtype, x.shape, x.tobytes())
    assert repr(ck.open(many)) == f"<{len(names)} tensors in 2 safetensors files>"
    with pytest.raises(KeyError):
        tensors["nothing"]


@pytest.mark.parametrize("align", [1, 8])
def test_weights_of_a_file(rng, tmp_path, align):
    q, z, s, value = integers(rng, 4, K // 64)
    tensors = named("gptq", write_gptq(q, z, s, 4, v2=False)) | named("awq", write_awq(q, z, s))
    tensors |= named("mlx", write_mlx(q, 4, s.astype(F32), (-z * s.astype(F32)).astype(F32)))
    leaves, fp4 = nvfp4(rng, "modelopt", 0.01)
    tensors |= named("modelopt", leaves)
    path = save(tmp_path / "m.safetensors", {"odd": np.ones(align, np.int8)} | tensors, align=align)
    config = {"bits": 4, "group_size": 64}
    opened = ck.open(path)
    assert all(x.flags.aligned and not x.flags.writeable for x in opened.values())
    for format in ("gptq", "awq", "mlx", "modelopt"):
        w = ck.linear(opened, format, format=format, config=config | {"group_size": 16}
                      if format == "modelopt" else config)  # fmt: skip
        check(w, fp4 if format == "modelopt" else value)
        on_device = jax.device_put(w)
        jax.tree.map(same, on_device, w)
    jaxes = {name: jnp.asarray(x) for name, x in opened.items()}
    check(ck.linear(jaxes, "modelopt", format="modelopt"), fp4)


def test_beside_one_larger_than_memory(tmp_path):
    """Beside a tensor of 64 GiB, in a sparse file, another is read; nothing is mapped or open."""
    path, size = tmp_path / "huge.safetensors", 2**36
    big = {"dtype": "U8", "shape": [2**18, 2**18], "data_offsets": [0, size]}
    last = {"dtype": "I32", "shape": [2], "data_offsets": [size, size + 8]}
    header = json.dumps({"big": big, "last": last}).encode()
    with path.open("wb") as f:
        f.write(struct.pack("<Q", len(header)) + header)
        f.seek(size, 1)
        f.write(struct.pack("<ii", 5, -7))
    tensors = ck.open(path)
    held = tensors["last"]
    np.testing.assert_array_equal(held, [5, -7])
    assert not opened_here(path)


def opened_here(path) -> list[str]:
    """Where this process has a file mapped or open."""
    maps, descriptors = Path("/proc/self/maps"), Path("/proc/self/fd")
    if not maps.exists():
        return []
    found = [line for line in maps.read_text().splitlines() if path.name in line]
    return found + [d.name for d in descriptors.iterdir() if d.resolve() == path.resolve()]


LAYERS = """
import re, sys
from jax_groupgemm import checkpoints as ck
status = lambda: open("/proc/self/status").read()
peak = lambda: 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", status())[1])
tensors, before = ck.open(sys.argv[1]), peak()
for layer in sys.argv[2:]:
    w = ck.experts(tensors, [f"{layer}.{i}" for i in range(4)], format="modelopt")
    assert w.shape == (4, 8192, 8192) and not w.weight.any() and w.global_scale[3] == 0.5
    del w
print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_layers_of_a_file_larger_than_memory(tmp_path):
    """Of 72 GiB, memory holds the four experts of a layer and the tensors of one."""
    path, size, n = tmp_path / "huge.safetensors", 8192, 512
    leaves = {
        "weight": ("U8", [size, size // 2], size * size // 2),
        "weight_scale": ("F8_E4M3", [size, size // 16], size * size // 16),
        "weight_scale_2": ("F32", [], 4),
    }
    one = sum(length for *_, length in leaves.values())
    header, end = {}, 0
    for layer in range(n):
        for i in range(4):
            for leaf, (dtype, shape, length) in leaves.items():
                offsets = [end, end + length]
                end += length
                header[f"{layer}.{i}.{leaf}"] = {
                    "dtype": dtype, "shape": shape, "data_offsets": offsets
                }  # fmt: skip
    text = json.dumps(header).encode()
    with path.open("wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for expert in range(1, 4 * n + 1):
            f.seek(8 + len(text) + expert * one - 4)
            f.write(struct.pack("<f", 0.5))
    assert path.stat().st_size > 72 * 2**30
    command = [sys.executable, "-c", LAYERS, str(path), "0", str(n // 2), str(n - 1)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert 4 * one < int(done.stdout) < 5.5 * one


MALFORMED = [
    ({"a": entry(0, 9)}, "truncated: tensors end at byte 77, the file at 76"),
    ({"a": entry(0, 7)}, "bytes past the last tensor: tensors end at byte 75, the file at 76"),
    ({"a": entry(0, 6), "b": entry(4, 8)}, "tensor 'b' at bytes 4 to 8 overlaps another"),
    ({"b": entry(0, 2), "a": entry(4, 8)}, "tensor 'a' at bytes 4 to 8 follows a gap"),
    (
        {"a": entry(0, 8, [3], "I16")},
        "tensor 'a': data_offsets [0, 8], but I16 of shape [3] takes 6 bytes",
    ),
    ({"a": entry(8, 0, [8])}, "tensor 'a': data_offsets [8, 0], but U8 of shape [8] takes 8 bytes"),
    ({"a": entry(0, 8, [-8])}, "tensor 'a': shape [-8] is not a list of sizes"),
    ({"a": entry(0, 8, [True, 8])}, "tensor 'a': shape [True, 8] is not a list of sizes"),
    ({"a": entry(0, 8, 8)}, "tensor 'a': shape 8 is not a list of sizes"),
    ({"a": entry(0, 8, dtype=[])}, "tensor 'a': dtype [] is not one of BOOL, U8, "),
    ({"a": 3}, "tensor 'a': expected dtype, shape and data_offsets, got 3"),
    (b'{"a": 1, "a": 2}', "malformed JSON: 'a' appears twice"),
    (b"[]", "malformed JSON: not an object"),
    (b"{", "malformed JSON: Expecting property name"),
    (b"\xff", "malformed JSON: byte 0 is not UTF-8"),
    (b"[" * 100_000, "malformed JSON: "),
]


@pytest.mark.parametrize(("header", "message"), MALFORMED)
def test_malformed_file(tmp_path, header, message):
    path = raw(tmp_path / "m.safetensors", header, bytes(8))
    with pytest.raises(ValueError, match=r"^jgg\.checkpoints\.open: ") as error:
        ck.open(path)
    assert str(error.value).startswith(f"jgg.checkpoints.open: {path}: {message}")


@pytest.mark.parametrize("size", [0, 7, 8, 100])
def test_no_safetensors_file(tmp_path, size):
    path = tmp_path / "m.safetensors"
    path.write_bytes(b"\x80" * size)
    with pytest.raises(ValueError, match=f"not a safetensors file: a header of .* in {size}"):
        ck.open(path)


def sizes(opened):
    """The bytes of each tensor, but of those whose dtype is not known."""
    for name in opened:
        try:
            yield opened[name].nbytes
        except ValueError as error:
            assert "is not one of BOOL, U8, " in str(error)  # noqa: PT017


def test_malformed_at_random(rng, tmp_path):
    """Whatever the bytes are: a ValueError, or tensors inside the file."""
    tensors = {"a": np.arange(6, dtype=F32), "b": np.ones((2, 3), BF16), "c": np.array(3)}
    good = save(tmp_path / "good.safetensors", tensors).read_bytes()
    end = 8 + struct.unpack("<Q", good[:8])[0]
    path, refused, taken = tmp_path / "m.safetensors", 0, 0
    for _ in range(300):
        data = bytearray(good)
        for _ in range(rng.integers(1, 4)):
            at = rng.integers(0, end)
            new = rng.choice(list(b'0123456789[]{}":,-eE abIFU\x00\xff'))
            match rng.integers(3):
                case 0:
                    data[at] = new
                case 1:
                    data.insert(at, new)
                case 2:
                    del data[at]
        path.write_bytes(data)
        try:
            opened = ck.open(path)
        except ValueError as error:
            refused += str(error).startswith(f"jgg.checkpoints.open: {path}: ")
        else:
            taken += sum(sizes(opened)) < len(data)
    assert refused + taken == 300
    assert refused > 200
