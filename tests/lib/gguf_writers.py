"""GGUF files, byte by byte, so that anything may be wrong with them."""

import struct

import numpy as np

U8, U16, U32, I32, F32, BOOL, STRING, ARRAY, U64 = 0, 2, 4, 5, 6, 7, 8, 9, 10
FORMS = {U8: "<B", U16: "<H", U32: "<I", I32: "<i", F32: "<f", BOOL: "<B", U64: "<Q"}
#: Of a type: its number, and the elements and bytes of a block.
TYPES = {
    "F32": (0, 1, 4), "F16": (1, 1, 2), "BF16": (30, 1, 2), "F64": (28, 1, 8), "I8": (24, 1, 1),
    "I32": (26, 1, 4), "Q4_0": (2, 32, 18), "Q4_1": (3, 32, 20), "Q5_0": (6, 32, 22),
    "Q5_1": (7, 32, 24), "Q8_0": (8, 32, 34), "Q2_K": (10, 256, 84), "Q3_K": (11, 256, 110),
    "Q4_K": (12, 256, 144), "Q5_K": (13, 256, 176), "Q6_K": (14, 256, 210),
    "IQ4_NL": (20, 32, 18), "IQ4_XS": (23, 256, 136), "TQ2_0": (35, 256, 66),
    "MXFP4": (39, 32, 17), "NVFP4": (40, 64, 36),
}  # fmt: skip
#: Of types of codes: where blocks have float16 numbers.
HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82),
    "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "MXFP4": (), "NVFP4": (),
    "IQ4_NL": (0,),
}  # fmt: skip


def text(value) -> bytes:
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(kind: int, v) -> bytes:
    """A value of metadata; of arrays, ``(inner kind, values)``."""
    if kind == STRING:
        return text(v)
    if kind == ARRAY:
        inner, items = v
        return struct.pack("<IQ", inner, len(items)) + b"".join(value(inner, x) for x in items)
    return struct.pack(FORMS[kind], v)


def entry(name, dims, kind: int, offset: int) -> bytes:
    """A tensor's entry; dims from the innermost."""
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def file(metadata: list[bytes], entries: list[bytes], data=b"", *, align=32, version=3) -> bytes:
    """Of values, each ``text(key) + kind + value``, entries and the tensors' bytes."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(entries), len(metadata))
    head += b"".join(metadata) + b"".join(entries)
    return head + bytes(-len(head) % align) + data


def field(key, kind: int, v) -> bytes:
    return text(key) + struct.pack("<I", kind) + value(kind, v)


def random_blocks(rng, kind: str, *shape: int) -> np.ndarray:
    """uint8 ``(..., bytes of a row)``: any bits, with finite scales."""
    _, elements, nbytes = TYPES[kind]
    *lead, k = shape
    out = rng.integers(0, 256, (*lead, k // elements, nbytes), np.uint8)
    for at in HALVES[kind]:
        half = (rng.standard_normal((*lead, k // elements)) / 100).astype(np.float16)
        out[..., at : at + 2] = half[..., None].view(np.uint8)
    if kind == "MXFP4":
        out[..., 0] = rng.integers(0, 255, out[..., 0].shape)
    if kind == "NVFP4":
        out[..., :4] &= 0x7F
    return out.reshape(*lead, -1)


def save(path, tensors: dict, metadata: list[bytes] = (), **options):
    """A file of arrays, and of ``(type, bytes)``."""
    align, names = options.get("align", 32), {"float32": "F32", "float16": "F16",
                                             "bfloat16": "BF16", "int32": "I32"}  # fmt: skip
    entries, data = [], b""
    for name, x in tensors.items():
        kind, x = x if isinstance(x, tuple) else (names[x.dtype.name], x)
        number, elements, nbytes = TYPES[kind]
        rows = np.asarray(x, order="C")
        raw = rows.reshape(-1).view(np.uint8)
        shape = list(rows.shape)
        if rows.dtype == np.uint8 and elements > 1:
            shape[-1] = shape[-1] // nbytes * elements
        data += bytes(-len(data) % align)
        entries.append(entry(name, shape[::-1], number, len(data)))
        data += raw.tobytes()
    path.write_bytes(file(list(metadata), entries, data, **options))
    return path
