"""GGUF files: what is read back, parts of a model, metadata, and malformed headers."""

import struct
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from gguf_writers import (
    ARRAY,
    BOOL,
    F32,
    I32,
    STRING,
    TYPES,
    U8,
    U16,
    U32,
    U64,
    entry,
    field,
    file,
    random_blocks,
    save,
    text,
)

import jax_groupgemm as jgg

ck = jgg.checkpoints
PREFIX = "jgg.checkpoints.open: "
READ = (
    "Types that are read: F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, "
    "Q6_K, MXFP4, NVFP4"
)


def raised(call, kind=ValueError) -> str:
    with pytest.raises(kind) as error:
        call()
    return error.value.args[0]


def refused(path: Path, content: bytes, **options) -> str:
    path.write_bytes(content)
    said = raised(lambda: ck.open(path, **options))
    assert said.startswith(f"{PREFIX}{path}: "), said
    assert len(said) < 1500
    return said.removeprefix(f"{PREFIX}{path}: ")


@pytest.mark.parametrize(
    ("name", "version", "align"),
    [("m.gguf", 3, 32), ("M.GGUF", 2, 1), ("sha256-0123", 3, 4096), ("sha256-0123", 2, 32)],
)
def test_open(rng, tmp_path, name, version, align):
    raw = random_blocks(rng, "Q4_K", 2, 3, 512)
    want = {
        "f32": rng.standard_normal((4, 6)).astype(np.float32), "f16": np.ones(3, np.float16),
        "bf16": np.ones((2, 3, 4, 5), jnp.bfloat16), "i32": np.arange(5, dtype=np.int32),
        "empty": np.ones((0, 3), np.float32), "scalar": np.array(1.5, np.float32),
    }  # fmt: skip
    metadata = [field("general.alignment", U32, align)]
    path = save(tmp_path / name, {**want, "q": ("Q4_K", raw)}, metadata, align=align,
                version=version)  # fmt: skip
    tensors = ck.open(str(path))
    assert list(tensors) == sorted([*want, "q"])
    for key, x in want.items():
        got = tensors[key]
        assert (got.dtype, got.shape, got.tobytes()) == (x.dtype, x.shape, x.tobytes())
        assert not got.flags.writeable
        assert tensors.header(key) == ck.Header(x.dtype.name, x.shape, x.nbytes)
    assert tensors.header("q") == ck.Header("Q4_K", (2, 3, 512), raw.nbytes)
    blocks = tensors["q"]
    assert isinstance(blocks, ck.Blocks)
    assert (blocks.type, blocks.shape) == ("Q4_K", (2, 3, 512))
    np.testing.assert_array_equal(blocks.rows(1, 5), raw.reshape(6, -1)[1:5])
    assert repr(blocks) == "Blocks(Q4_K, shape=(2, 3, 512))"
    assert repr(tensors) == f"<{len(tensors)} tensors in 1 GGUF files>"
    assert raised(lambda: np.asarray(blocks), TypeError) == (
        "it has blocks of Q4_K, which jgg.checkpoints.linear(tensors, prefix, format='gguf') reads"
    )
    assert raised(lambda: tensors["nothing"], KeyError) == f"{PREFIX}no tensor 'nothing'"


def test_metadata(tmp_path):
    values = {
        "u8": (U8, 200), "i32": (I32, -5), "f32": (F32, 0.5), "yes": (BOOL, 1), "u64": (U64, 2**63),
        "text": (STRING, "é\0x"), "numbers": (ARRAY, (I32, [1, -2])), "none": (ARRAY, (U8, [])),
        "bools": (ARRAY, (BOOL, [0, 1])), "texts": (ARRAY, (STRING, ["a", "", "▁b"])),
        "deep": (ARRAY, (ARRAY, [(I32, [1]), (ARRAY, [(STRING, ["x"])])])),
        "bad": (STRING, b"\xff"), "worse": (ARRAY, (STRING, ["a", b"b\xc3"])), "odd": (BOOL, 2),
        "": (U8, 0),
    }  # fmt: skip
    path = save(tmp_path / "m.gguf", {}, [field(key, *v) for key, v in values.items()])
    tensors = ck.open(path)
    about = tensors.metadata
    assert list(about) == list(values)
    assert len(about) == len(values)
    assert "text" in about
    assert repr(about) == "<15 values of metadata>"
    got = [about[key] for key in ("u8", "i32", "f32", "yes", "u64", "text", "texts", "")]
    assert got == [200, -5, 0.5, True, 2**63, "é\0x", ["a", "", "▁b"], 0]
    assert about["yes"] is True
    for key, want in (("numbers", np.int32([1, -2])), ("none", np.uint8([])),
                      ("bools", np.array([False, True]))):  # fmt: skip
        assert about[key].dtype == want.dtype
        np.testing.assert_array_equal(about[key], want)
    assert (about["deep"][0].tolist(), about["deep"][1]) == ([1], [["x"]])
    where = f"{PREFIX}{path}: metadata"
    assert raised(lambda: about["bad"]) == f"{where} 'bad': byte 0 of a string is not UTF-8"
    assert raised(lambda: about["worse"]) == f"{where} 'worse': byte 1 of a string is not UTF-8"
    assert raised(lambda: about["odd"]) == f"{where} 'odd': 2 is not a bool, 0 or 1"
    assert raised(lambda: about["x"], KeyError) == f"{PREFIX}no metadata 'x'"


# Parts.


def parts(folder: Path, rng, count=3, **changed) -> list[Path]:
    """Files of a split model, as llama-gguf-split writes them."""
    out = []
    for i in range(count):
        about = {"split.no": (U16, i), "split.count": (U16, count),
                 "split.tensors.count": (I32, 2 * count)}  # fmt: skip
        about |= changed.get(f"part{i}", {})
        metadata = [field(key, *v) for key, v in about.items() if v]
        metadata += [field("general.name", STRING, "whole")] * (i == 0)
        tensors = {f"t{i}": np.full((2, 3), i, np.float32), f"q{i}.weight":
                   ("Q8_0", random_blocks(rng, "Q8_0", 4, 64))}  # fmt: skip
        name = changed.get("name", "m-{:05}-of-{:05}.gguf").format(i + 1, count)
        out.append(save(folder / name, tensors, metadata))
    return out


def test_parts(rng, tmp_path):
    files = parts(tmp_path, rng)
    for path in files:
        tensors = ck.open(path)
        assert list(tensors) == [f"q{i}.weight" for i in range(3)] + ["t0", "t1", "t2"]
        assert tensors.metadata["general.name"] == "whole"
        assert repr(tensors) == "<6 tensors in 3 GGUF files>"
        assert all(np.all(tensors[f"t{i}"] == i) for i in range(3))
        assert ck.linear(tensors, "q2", format="gguf").shape == (4, 64)


def test_parts_that_do_not_fit(rng, tmp_path):
    def said(path, kind=ValueError):
        return raised(lambda: ck.open(path), kind).removeprefix(f"{PREFIX}{tmp_path}/")

    files = parts(tmp_path, rng)
    moved = files[1].rename(tmp_path / "other.gguf")
    assert said(files[2], FileNotFoundError) == (
        "m-00003-of-00003.gguf: m-00002-of-00003.gguf is missing, part 2 of 3"
    )
    assert said(moved) == (
        "other.gguf: part 2 of 3 of a model: name it ...-00002-of-00003.gguf, beside the others"
    )
    files[0].rename(files[1])
    files[2].rename(files[0])
    moved.rename(files[2])
    assert said(files[2]) == (
        "m-00001-of-00003.gguf: metadata says split.no=2, split.count=3, expected 0 and 3"
    )
    parts(tmp_path, rng, part1={"split.count": None, "split.no": None})
    assert said(files[0]) == (
        "m-00002-of-00003.gguf: metadata says split.no=0, split.count=1, expected 1 and 3"
    )
    assert said(files[1]) == (
        "m-00002-of-00003.gguf: its name says one of 3 parts, its metadata does not"
    )
    parts(tmp_path, rng, part0={"split.count": (U16, 4)})
    assert said(files[0]) == (
        "m-00001-of-00003.gguf: its name says 3 parts, its metadata split.count=4"
    )
    parts(tmp_path, rng, part0={"split.count": (STRING, "3")})
    assert said(files[0]) == (
        "m-00001-of-00003.gguf: metadata says split.count='3', expected a number"
    )
    parts(tmp_path, rng, part0={"split.tensors.count": (I32, 7)})
    assert said(files[1]) == (
        "m-00002-of-00003.gguf: metadata says split.tensors.count=7, but the 3 parts have 6 tensors"
    )
    parts(tmp_path, rng)
    other = {"t0": np.ones(3, np.float32)}
    save(files[1], other, [field("split.no", U16, 1), field("split.count", U16, 3)])
    assert said(files[0]) == (
        "m-00001-of-00003.gguf: tensor 't0' is in m-00001-of-00003.gguf and m-00002-of-00003.gguf"
    )


def test_a_folder_of_gguf_files(rng, tmp_path):
    save(tmp_path / "m.gguf", {})
    assert raised(lambda: ck.open(tmp_path), FileNotFoundError) == (
        f"{PREFIX}{tmp_path}: no .safetensors files, but m.gguf: pass the path of a GGUF file"
    )


# Headers.

A = entry("a", [4], 0, 0)
DATA = bytes(16)
HUGE = 2**63


def head(tensors: int, values: int, rest=b"", version=3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, values) + rest


def nested(depth: int) -> bytes:
    return text("k") + struct.pack("<I", ARRAY) + struct.pack("<IQ", ARRAY, 1) * depth


HEADERS = {
    "empty": (b"", "not a GGUF file: it begins with b''"),
    "another": (b"PK\3\4" + bytes(20), "not a GGUF file: it begins with b'PK\\x03\\x04\\x00\\x00"
                "\\x00\\x00'"),
    "older": (b"tjgg" + bytes(20), "a file of ggml before GGUF, which llama.cpp no longer reads "
              "either"),
    "short": (b"GGUF\3\0\0\0", "malformed GGUF: the number of tensors ends at byte 16, the file at "
              "8"),
    "version 1": (head(0, 0, version=1), "GGUF version 1 is not read, expected 2 or 3"),
    "version 4": (head(0, 0, version=4), "GGUF version 4 is not read, expected 2 or 3"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "a big-endian GGUF file, which is not "
                   "read"),
    "many tensors": (head(HUGE, 0), f"malformed GGUF: {HUGE} tensors, in a file of 24 bytes"),
    "many values": (head(0, HUGE), f"malformed GGUF: {HUGE} values of metadata, in a file of 24 "
                    "bytes"),
    "too many values": (head(0, 2**16 + 1, bytes(2**20)), "65537 values of metadata, more than "
                        "65536"),
    "too many tensors": (head(2**18 + 1, 0, bytes(2**23)), "262145 tensors, more than 262144"),
    "long key": (head(0, 1, struct.pack("<Q", HUGE) + bytes(9)), "malformed GGUF: the name of "
                 f"value 0 of metadata ends at byte {32 + HUGE}, the file at 41"),
    "key": (file([field(b"\xff", U8, 1)], []), "malformed GGUF: the name of value 0 of metadata is "
            "not UTF-8"),
    "same keys": (file([field("k", U8, 1)] * 2, []), "metadata 'k' appears twice"),
    "kind": (file([text("k") + struct.pack("<IQ", 13, 0)], []), "malformed GGUF: metadata 'k' has "
             "values of the unknown type 13"),
    "kinds": (file([text("k") + struct.pack("<IIQ", ARRAY, 77, 0)], []), "malformed GGUF: metadata "
              "'k' has values of the unknown type 77"),
    "long string": (file([text("k") + struct.pack("<IQ", STRING, HUGE)], []), "malformed GGUF: "
                    f"metadata 'k' ends at byte {HUGE + 45}, the file at 64"),
    "long array": (file([text("k") + struct.pack("<IIQ", ARRAY, U64, HUGE)], []), "malformed GGUF: "
                   f"metadata 'k' ends at byte {8 * HUGE + 49}, the file at 64"),
    "strings": (file([text("k") + struct.pack("<IIQ", ARRAY, STRING, HUGE)], []), "malformed GGUF: "
                f"{HUGE} strings of metadata 'k', in a file of 64 bytes"),
    "many strings": (head(0, 1, text("k") + struct.pack("<IIQ", ARRAY, STRING, 2**22 + 1)
                          + bytes(2**26)), "4194305 strings of metadata 'k', more than 4194304"),
    "arrays": (file([text("k") + struct.pack("<IIQ", ARRAY, ARRAY, HUGE)], []), "malformed GGUF: "
               f"{HUGE} arrays of metadata 'k', in a file of 64 bytes"),
    "many arrays": (head(0, 1, text("k") + struct.pack("<IIQ", ARRAY, ARRAY, 2**18 + 1)
                         + bytes(2**22)), "262145 arrays of metadata 'k', more than 262144"),
    "arrays in arrays": (head(0, 1, text("k") + struct.pack("<IIQ", ARRAY, ARRAY, 2**17)
                              + 2**17 * (struct.pack("<IQ", ARRAY, 2)
                                         + 2 * struct.pack("<IQ", U8, 0))), "262146 arrays in "
                         "arrays, more than 262144"),
    "deep": (head(0, 1, nested(50)), "metadata 'k': arrays are nested more than 4 deep"),
    "alignment 0": (file([field("general.alignment", U32, 0)], []), "general.alignment is 0, "
                    "expected a power of two"),
    "alignment 24": (file([field("general.alignment", U32, 24)], []), "general.alignment is 24, "
                     "expected a power of two"),
    "alignment": (file([field("general.alignment", STRING, "32")], []), "general.alignment is "
                  "'32', expected a power of two"),
    "large alignment": (file([field("general.alignment", U32, 2**31)], [A], DATA), "truncated: "
                        f"tensor 'a' ends at byte {2**31 + 16}, the file at 112"),
    "name": (file([], [entry(b"\xff", [4], 0, 0)], DATA), "malformed GGUF: the name of tensor 0 is "
             "not UTF-8"),
    "same names": (file([], [A, entry("a", [4], 0, 32)], bytes(48)), "tensor 'a' appears twice"),
    "five axes": (file([], [entry("a", [1] * 5, 0, 0)], DATA), "tensor 'a' has 5 axes, more "
                  "than 4"),
    "many axes": (head(1, 0, text("a") + struct.pack("<I", 2**32 - 1) + bytes(40)), "tensor 'a' "
                  "has 4294967295 axes, more than 4"),
    "overflow": (file([], [entry("a", [2**32, 2**32], 0, 0)], DATA), "tensor 'a': shape "
                 "(4294967296, 4294967296) is too large"),
    "empty and large": (file([], [entry("a", [2**62, 2**62, 0], 0, 0)], DATA), "tensor 'a': shape "
                        f"(0, {2**62}, {2**62}) is too large"),
    "cut rows": (file([], [entry("a", [100, 2], 12, 0)], bytes(999)), "tensor 'a': shape (2, 100) "
                 "of Q4_K, whose rows are multiples of 256"),
    "offset": (file([], [entry("a", [4], 0, 8)], bytes(99)), "tensor 'a': offset 8 is not a "
               "multiple of 32"),
    "large offset": (file([], [entry("a", [4], 0, 2**64 - 32)], DATA), "truncated: tensor 'a' ends "
                     f"at byte {2**64 + 48}, the file at 80"),
    "truncated": (file([], [A], DATA[:-1]), "truncated: tensor 'a' ends at byte 80, the "
                  "file at 79"),
    "overlap": (file([], [entry("b", [20], 0, 0), entry("a", [4], 0, 64)], bytes(99)), "tensor 'a' "
                "overlaps tensor 'b'"),
    "a part": (head(1, 0, text("a")), "malformed GGUF: 1 tensors, in a file of 33 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADERS)
def test_headers(tmp_path, name, at_once):
    content, message = HEADERS[name]
    assert refused(tmp_path / "m.gguf", content) == message


def test_every_beginning_of_a_file(tmp_path, at_once):
    """Whatever is cut off, that is what is said."""
    metadata = [field("k", ARRAY, (STRING, ["a", "b"])), field("general.name", STRING, "x")]
    whole = save(tmp_path / "w.gguf", {"a": np.ones(4, np.float32)}, metadata).read_bytes()
    assert len(ck.open(tmp_path / "w.gguf")) == 1
    for end in range(len(whole)):
        said = refused(tmp_path / "m.gguf", whole[:end])
        assert said.startswith(("malformed GGUF: ", "not a GGUF file: ", "truncated: ")), said


def test_limit_of_a_header(tmp_path):
    content = file([field("k", STRING, "x" * 500)], [A], DATA)
    assert refused(tmp_path / "m.gguf", content, max_header_bytes=400) == (
        "a header of more than 400 bytes, which is the limit: open(..., max_header_bytes=) sets "
        "another"
    )
    assert list(ck.open(tmp_path / "m.gguf", max_header_bytes=700)) == ["a"]


def test_a_pointer(tmp_path):
    said = refused(tmp_path / "m.gguf", b"version https://git-lfs.github.com/spec/v1\noid x\n")
    assert said.startswith("a Git LFS pointer, not the file that it stands for.")


def test_a_file_that_changes(rng, tmp_path):
    path = save(tmp_path / "m.gguf", {"a.weight": ("Q8_0", random_blocks(rng, "Q8_0", 4, 64))})
    tensors = ck.open(path)
    held = tensors["a.weight"]
    path.write_bytes(path.read_bytes()[:-1])
    for call in (lambda: held.rows(0, 1), lambda: ck.linear(tensors, "a", format="gguf")):
        assert "the file has changed from" in raised(call)


# Layers.


def opened(tmp_path, **tensors):
    named = {name.replace("_", ".", 1): x for name, x in tensors.items()}
    return ck.open(save(tmp_path / "m.gguf", named))


@pytest.mark.parametrize("kind", ["IQ4_NL", "IQ4_XS", "TQ2_0"])
def test_types_that_are_not_read(rng, tmp_path, kind):
    raw = rng.integers(0, 256, (2, TYPES[kind][2]), np.uint8)
    tensors = opened(tmp_path, l_weight=(kind, raw))
    assert tensors.header("l.weight").nbytes == raw.nbytes
    assert raised(lambda: ck.linear(tensors, "l", format="gguf")) == (
        f"jgg.checkpoints.linear: l: .weight is '{kind}', which is not read. {READ}"
    )


@pytest.mark.parametrize(("number", "name"), [(99, "type 99"), (31, "Q4_0_4_4"), (4, "Q4_2")])
def test_types_that_are_not_known(tmp_path, number, name):
    path = tmp_path / "m.gguf"
    path.write_bytes(file([], [entry("l.weight", [64, 2], number, 0), A], DATA))
    tensors = ck.open(path)
    assert tensors.header("l.weight") == ck.Header(name, (2, 64), 0)
    assert tensors["a"].shape == (4,)
    assert raised(lambda: ck.linear(tensors, "l", format="gguf")) == (
        f"jgg.checkpoints.linear: l: .weight is '{name}', which is not read. {READ}"
    )


def test_errors_of_layers(rng, tmp_path):
    blocks = lambda kind, *shape: (kind, random_blocks(rng, kind, *shape))
    bad = {kind: blocks(kind, 2, 256) for kind in ("Q4_0", "Q6_K", "MXFP4", "NVFP4")}
    bad["Q4_0"][1][1, :2] = np.uint8([0, 0x7C])
    bad["Q6_K"][1][1, 208:] = np.uint8([1, 0xFE])
    bad["MXFP4"][1][1, 17] = 0xFF
    bad["NVFP4"][1][1, 3] = 0x80
    large = blocks("Q8_0", 2, 64)
    large[1][1, 34:36] = np.float16([600]).view(np.uint8)
    tensors = opened(
        tmp_path, e_weight=blocks("Q4_K", 3, 4, 256), f_weight=blocks("Q4_K", 2, 4, 256),
        l_weight=blocks("Q4_K", 4, 256), m_weight=blocks("Q6_K", 4, 256),
        i_weight=np.ones((2, 3), np.int32), n_weight=np.ones(3, np.float32),
        z_weight=np.ones((0, 32), np.float32), s_weight=blocks("Q4_K", 4, 256),
        s_scale=np.ones(1, np.float32), p_weight=blocks("NVFP4", 4, 64),
        p_scale=np.ones(3, np.float32), x_weight=blocks("Q4_K", 4, 256),
        x_other=np.ones(1, np.float32), large_weight=large,
        **{f"{kind.replace('_', '')}_weight": x for kind, x in bad.items()},
    )  # fmt: skip

    def said(prefix, what="linear", **options):
        call = lambda: getattr(ck, what)(tensors, prefix, format="gguf", **options)
        return raised(call).removeprefix(f"jgg.checkpoints.{what}: ")

    stacks = "it stacks experts, use jgg.checkpoints.experts(tensors, prefix)"
    assert said("none") == "none: no tensor 'none.weight', which format 'gguf' needs"
    assert said("e") == f"e: .weight has shape (3, 4, 256), expected (N, K): {stacks}"
    assert said("n") == "n: .weight has shape (3,), expected (N, K)"
    assert said("l", "experts") == "l: .weight has shape (4, 256), expected (G, N, K)"
    assert said("z") == "z: .weight of shape (0, 32) is empty"
    assert said("i") == f"i: .weight is 'int32', which is not read. {READ}"
    assert said("s") == "s: has .scale, which is read beside NVFP4, and its .weight is Q4_K"
    assert said("p") == "p: .scale has shape (3,), expected one number"
    assert said("x") == "x: tensor 'x.other' is not known to format 'gguf'"
    assert said("Q40") == "Q40: .weight is Q4_0 with scales that are not finite"
    assert said("Q6K") == "Q6K: .weight is Q6_K with scales that are not finite"
    assert said("MXFP4") == "MXFP4: .weight is MXFP4 with scales of 255, which are not numbers"
    assert said("NVFP4") == "NVFP4: .weight is NVFP4 with negative scales"
    assert said("large") == (
        "large: .weight is Q8_0 with scales too large for float16: pass scales_dtype=jnp.float32"
    )
    assert ck.linear(tensors, "large", format="gguf", scales_dtype=jnp.float32).shape == (2, 64)
    assert said("l", shape=(4, 512)).startswith("l: has shape (4, 256), expected shape=(4, 512)")
    assert said("l", scales_dtype=jnp.int8) == (
        "scales_dtype=int8 is not one of None, float32, bfloat16, float16"
    )
    assert said([["e", "f"]], "experts") == "e has 3 experts, but f has 2"
    assert "they are no one weight, read them one by one" in said(["l", "m"])
    assert said([["e", "e"]], "experts", shape=(3, 9, 256)).startswith("e and e have 8 rows")
    assert said(["l", "m"], "experts").endswith("they are no one weight, read them one by one")
    assert raised(
        lambda: ck.linear(dict(tensors), "l", format="awq")
    ).endswith("needs: its tensors are those of 'gguf'")  # fmt: skip
    copied = ck.linear(dict(tensors), "l", format="gguf")
    np.testing.assert_array_equal(copied.weight, ck.linear(tensors, "l", format="gguf").weight)
    assert raised(
        lambda: ck.linear({"l.weight": tensors["l.weight"], "l.scales": 1, "l.biases": 1}, "l",
                          format="mlx", config={"bits": 4, "group_size": 32}), TypeError,
    ).startswith("jgg.checkpoints.linear: l.weight must be an array, got Blocks")  # fmt: skip
