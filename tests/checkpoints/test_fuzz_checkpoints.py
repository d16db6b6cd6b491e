"""Random damage to files, layers, configs and pickled weights: errors of one form, or right values.

The first seed runs daily, the others weekly; ``pytest tests/checkpoints/test_fuzz_checkpoints.py
--fuzz N`` runs N cases of each test.
"""

import copy
import json
import pickle
import struct
import time

import jax
import numpy as np
import pytest
from checkpoint_writers import (
    BF16,
    E4M3,
    F16,
    F32,
    K,
    N,
    integers,
    named,
    nvfp4,
    pairs,
    save,
    write_awq,
    write_gptq,
    write_int_quantized,
    write_mlx,
    write_pack_quantized,
)
from gguf_writers import ARRAY, HALVES, STRING, TYPES, U8, U32, random_blocks
from gguf_writers import field as value
from gguf_writers import save as save_gguf

import jax_groupgemm as jgg

ck = jgg.checkpoints
PER_TEST = 200
SECONDS = 20  # of one case: far more than any takes
JUNK = [
    None, True, False, 0, -1, 1, 3, 4, 8, 2**31, 2**63, 2**70, 10**300, 1.5, -0.0, float("nan"),
    float("inf"), "", "a", "l", "gptq", "re:", "re:(", "*", "x" * 5000, [], [None], ["l"], ["re:("],
    {}, {"l": None}, {"l": {}}, {"": {"": []}}, [[[[]]]], {"weights": {"num_bits": 10**300}},
]  # fmt: skip
SIZES = [0, 1, 2, 3, 4, 7, 8, 2**31, 2**32, 2**62, 2**63, 2**64, 2**70, -1, 10**50, 1.0, True, None]


def pytest_generate_tests(metafunc):
    count = metafunc.config.getoption("--fuzz")
    tests = 10 if count is None else -(-count // PER_TEST)
    marks = [pytest.mark.weekly] if count is None else []
    metafunc.parametrize("seed", [pytest.param(s, marks=marks if s else []) for s in range(tests)])


def pick(rng, options):
    return options[rng.integers(len(options))]


def outcome(call, errors, start="jgg."):
    """What a call returns, or None where it raises one of these errors, as it should be."""
    before = time.perf_counter()
    try:
        return call()
    except errors as error:
        text = error.args[0] if isinstance(error, KeyError) else str(error)
        assert text.startswith(start), repr(error)  # noqa: PT017
        assert len(text) < 6000
        return None
    finally:
        assert time.perf_counter() - before < SECONDS


def scrambled(rng, value, depth=0):
    """A JSON value with one part of it changed."""
    if isinstance(value, dict) and value and rng.integers(6):
        out, key = dict(value), pick(rng, [*value])
        match rng.integers(5):
            case 0:
                del out[key]
            case 1:
                out[pick(rng, ["", "l", "\0", "..", "x" * 300, "shape", key + "x"])] = out.pop(key)
            case _:
                out[key] = scrambled(rng, value[key], depth + 1)
        return out
    if isinstance(value, list) and value and rng.integers(4):
        out, at = list(value), int(rng.integers(len(value)))
        out[at] = scrambled(rng, value[at], depth + 1)
        return out * int(rng.integers(1, 3))
    if isinstance(value, int) and rng.integers(3):
        return pick(rng, SIZES)
    return copy.deepcopy(pick(rng, JUNK))


# Files.


def bytes_changed(rng, data: bytes, end: int) -> bytes:
    out = bytearray(data)
    for _ in range(rng.integers(1, 5)):
        at = int(rng.integers(min(end, len(out)) or 1))
        match rng.integers(5):
            case 0:
                out[at : at + 1] = bytes([rng.integers(256)])
            case 1:
                out[at:at] = pick(rng, [b'"', b"[", b"{", b"9" * 50, b"0" * 5000, b"\xff", b"\0"])
            case 2:
                del out[at : at + int(rng.integers(1, 9))]
            case 3:
                del out[int(rng.integers(len(out) + 1)) :]
            case 4:
                out += bytes(int(rng.integers(1, 9)))
    return bytes(out)


def read_all(path):
    """Every tensor that may be read; those that may not say why."""
    tensors, total = ck.open(path), 0
    for name in tensors:
        x = outcome(lambda name=name: tensors[name], (ValueError,))
        total += 0 if x is None else x.nbytes
    return total


def test_files(seed, tmp_path, at_once):
    rng = np.random.default_rng([seed, 41])
    tensors = {
        "a": np.arange(6, dtype=F32), "b": np.ones((2, 3), BF16), "c": np.array(3),
        "d": np.ones((0, 2), E4M3), "": np.zeros(3, np.uint8),
    }  # fmt: skip
    good = save(tmp_path / "good", tensors).read_bytes()
    end = 8 + struct.unpack("<Q", good[:8])[0]
    header, data = json.loads(good[8:end]), good[end:]
    path, read = tmp_path / "m.safetensors", 0
    where = tmp_path / "n.safetensors.index.json"
    index = {"metadata": {"total_size": 9}, "weight_map": dict.fromkeys(tensors, path.name)}
    for case in range(PER_TEST):
        source, content, about = path, good, json.dumps(index).encode()
        match case % 4:
            case 0:
                content = bytes_changed(rng, good, end)
            case 1:
                text = json.dumps(scrambled(rng, scrambled(rng, header))).encode()
                content = struct.pack("<Q", len(text)) + text + data
            case 2:
                source, about = where, json.dumps(scrambled(rng, index)).encode()
            case 3:
                source, about = tmp_path, bytes_changed(rng, about, len(about))
        path.write_bytes(content)
        where.write_bytes(about)
        total = outcome(lambda s=source: read_all(s), (ValueError, OSError), f"{PREFIX}{tmp_path}")
        assert (total or 0) <= len(content)
        read += total is not None
    assert 0 < read < PER_TEST // 2


PREFIX = "jgg.checkpoints.open: "


# Numbers of GGUF: counts, lengths, types and offsets.
WORDS = [*range(16), 31, 32, 33, 40, 255, 256, 2**16, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1]


def test_gguf_files(seed, tmp_path, at_once):
    """Headers of one file and of the parts of another; what opens, is read."""
    rng = np.random.default_rng([seed, 45])
    tensors = {f"{kind}.weight": (kind, random_blocks(rng, kind, 2, max(256, TYPES[kind][1])))
               for kind in HALVES}  # fmt: skip
    tensors |= {"e.weight": ("Q6_K", random_blocks(rng, "Q6_K", 2, 2, 256)), "a": np.ones(3, F32)}
    about = [
        value("general.alignment", U32, 32), value("t", ARRAY, (STRING, ["a", "bc", ""])),
        value("n", ARRAY, (ARRAY, [(U8, [1, 2]), (STRING, ["x"])])), value("s", STRING, "text"),
    ]  # fmt: skip
    part = lambda no: [value(f"split.{k}", U32, v) for k, v in (("no", no), ("count", 2))]
    one, two = tmp_path / "m.gguf", [tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2)]
    good = save_gguf(one, tensors, about).read_bytes()
    save_gguf(two[1], {"b": np.ones(3, F32)}, part(1))
    split = save_gguf(two[0], {"a": np.ones(3, F32)}, part(0) + about).read_bytes()
    read = 0
    for case in range(PER_TEST):
        path, content = (one, good) if case % 4 else (two[0], split)
        end = len(content) if path != one else content.rindex(b"e.weight") + 60
        if case % 3:
            content = bytes_changed(rng, content, end)
        else:
            content = bytearray(content)
            for _ in range(rng.integers(1, 3)):
                bits, at = pick(rng, [32, 64]), int(rng.integers(4, end - 8))
                content[at : at + bits // 8] = (pick(rng, WORDS) % 2**bits).to_bytes(
                    bits // 8, "little"
                )
        path.write_bytes(content)
        opened = outcome(lambda p=path: ck.open(p), (ValueError, OSError), f"{PREFIX}{tmp_path}")
        if opened is None:
            continue
        read += 1
        for key in opened.metadata:
            outcome(lambda k=key, t=opened: t.metadata[k], (ValueError,), PREFIX)
        for name in opened:
            header = opened.header(name)
            assert header.nbytes <= len(content)
            calls = (ck.linear, ck.experts)
            for call in calls if name.endswith(".weight") else ():
                w = outcome(
                    lambda c=call, n=name, t=opened: c(t, n.removesuffix(".weight"), format="gguf"),
                    (ValueError, TypeError), "jgg.checkpoints.",
                )  # fmt: skip
                assert w is None or w.shape == header.shape
    assert 0 < read < PER_TEST


def test_files_that_change(seed, tmp_path):
    """Between open and access, and during: the bytes that were opened, or an error."""
    rng = np.random.default_rng([seed, 42])
    path = tmp_path / "m.safetensors"
    for case in range(PER_TEST // 20):
        value = float(case)
        make = lambda v: {"a": np.full(int(rng.integers(1, 5000)), v), "b": np.full(7, v)}
        save(path, make(value))
        tensors = ck.open(path)
        change = rng.integers(4)
        if change == 1:
            with path.open("r+b") as f:
                f.truncate(int(rng.integers(path.stat().st_size)))
        elif change == 2:
            save(tmp_path / "new", make(value + 1)).rename(path)
        elif change == 3:
            path.write_bytes(bytes_changed(rng, path.read_bytes(), 10**9))
        for name in "ab":
            x = outcome(lambda n=name, t=tensors: t[n], (ValueError, OSError), PREFIX)
            assert (x is not None) == (change == 0)
            assert x is None or np.all(x == value)


# Layers.


def layers(rng):
    """Formats, tensors of "l", and a config that fits."""
    q4, z4, s4, _ = integers(rng, 4, 2, F16)
    q8, z8, s8, _ = integers(rng, 8, 2, BF16)
    group = {"targets": ["Linear"], "weights": {
        "num_bits": 8, "type": "int", "group_size": 128, "strategy": "group", "symmetric": False,
        "actorder": None}}  # fmt: skip
    packed = {"quant_method": "compressed-tensors", "config_groups": {"g": group}, "ignore": ["x"]}
    g_idx = np.arange(K, dtype=np.int32) // 128
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": False, "desc_act": False,
            "dynamic": {"+:z": {"bits": 8}}, "checkpoint_format": "gptq_v2"}  # fmt: skip
    auto = {"quant_method": "auto-round", "packing_format": "auto_round", "bits": 4,
            "group_size": 128, "extra_config": {"z": {"bits": 8}}}  # fmt: skip
    mxfp4 = {"weight_packed": pairs(q4), "weight_scale": q8[:, : K // 32].astype(np.uint8)}
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True,
           "version": "gemm", "modules_to_not_convert": ["x"]}  # fmt: skip
    modelopt = {"quant_algo": "MIXED_PRECISION", "exclude_modules": ["x*"],
                "quantized_layers": {"l": {"quant_algo": "NVFP4", "group_size": 16}}}  # fmt: skip
    mlx = {"bits": 4, "group_size": 128, "mode": "affine", "l": {"bits": 4, "group_size": 128}}
    return [
        ("mlx", write_mlx(q4, 4, s4, s4), mlx),
        ("awq", write_awq(q4, z4, s4), awq),
        ("gptq", write_gptq(q4, z4, s4, 4, v2=True, g_idx=g_idx), gptq),
        ("gptq", write_gptq(q4, z4, s4, 4, v2=True), auto),
        ("compressed-tensors", write_pack_quantized(q8, z8, s8, 8, g_idx),
         packed | {"format": "pack-quantized"}),
        ("compressed-tensors", write_int_quantized(q8, z8, s8, 8),
         packed | {"format": "int-quantized"}),
        ("compressed-tensors", mxfp4, {"format": "mxfp4-pack-quantized"}),
        ("compressed-tensors", nvfp4(rng, "compressed-tensors", 2.0)[0],
         {"format": "nvfp4-pack-quantized"}),
        ("modelopt", nvfp4(rng, "modelopt", 0.5)[0], modelopt),
    ]  # fmt: skip


def tensors_changed(rng, tensors):
    out, name = dict(tensors), pick(rng, [*tensors])
    x = np.asarray(out[name])
    match rng.integers(7):
        case 0:
            del out[name]
        case 1:
            with np.errstate(all="ignore"):
                out[name] = x.astype(pick(rng, [np.int8, np.uint8, np.int32, np.uint32, F16, F32]))
        case 2:
            out[name] = x[..., : int(rng.integers(x.shape[-1] + 1))] if x.ndim else x[None]
        case 3:
            out[name] = x[: int(rng.integers(len(x) + 1))] if x.ndim else np.empty(0, x.dtype)
        case 4:
            out[name] = x.T if x.ndim > 1 else x.reshape(1, -1)
        case 5:
            raw = bytearray(np.ascontiguousarray(x).tobytes())
            for at in rng.integers(len(raw), size=3):
                raw[at] = pick(rng, [0, 255, 128, 127, int(rng.integers(256))])
            out[name] = np.frombuffer(bytes(raw), x.dtype).reshape(x.shape)
        case 6:
            out[pick(rng, ["l.x", "l", "l.weight", "l.g_idx", "l.SCB", "l.weight_scale_inv"])] = x
    return out


def test_layers(seed):
    rng = np.random.default_rng([seed, 43])
    formats, read = layers(rng), 0
    for _ in range(PER_TEST):
        format, leaves, config = pick(rng, formats)
        tensors = named("l", leaves)
        if rng.integers(2):
            tensors = tensors_changed(rng, tensors)
        else:
            config = scrambled(rng, {"quantization_config": config, "text_config": {"x": [3]}})
        calls = [lambda f, t, c: ck.linear(t, "l", format=f, config=c)]
        if format == "gptq" or "weight_shape" in leaves:
            calls.append(lambda f, t, c: ck.act_order(t, "l", format=f, config=c)[0])
        call = pick(rng, calls)
        q = outcome(
            lambda c=call, a=(format, tensors, config): c(*a),
            (ValueError, TypeError), "jgg.checkpoints.",
        )  # fmt: skip
        if q is not None:  # its leaves fit each other
            assert len(q.shape) == 2
            assert q.shape[0] in (N, *range(N)) or q.shape[0] <= K
            assert jax.eval_shape(jgg.dequantize, q).shape == q.shape
            read += 1
    assert 0 < read < PER_TEST


# Weights that another process pickled.


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")  # of JAX, for a leaf of 2**31
def test_pickled_weights(seed):
    rng = np.random.default_rng([seed, 44])
    x = np.ones((4, 64), F32)
    calls = [
        jgg.dequantize, jax.tree.leaves, repr, lambda q: q.shape, lambda q: q.nbytes,
        lambda q: jgg.quantized_matmul(x, q), lambda q: jgg.prepack(q, strict=True),
    ]  # fmt: skip
    weights = [jgg.quantize(x, mode=mode) for mode in ("affine", "mxfp4", "nvfp4")]
    for _ in range(PER_TEST // 4):
        call = pick(rng, calls)
        looks = call in calls[1:5]  # at its parts: what is absent is named, what is there is taken
        forged = object.__new__(jgg.Quantized)
        state = dict(pick(rng, weights).__dict__)
        for field in rng.choice([*state], rng.integers(1, 3), replace=False):
            if looks or rng.integers(2):
                del state[field]
            else:
                state[field] = copy.deepcopy(pick(rng, JUNK))
        forged.__dict__.update(state)
        q = pickle.loads(pickle.dumps(forged))
        errors = (AttributeError,) if looks else (ValueError, TypeError)
        outcome(lambda c=call, q=q: c(q), errors, "jgg.")
