"""Codes of a thread as the words of layout "sm90": ``ffi/quantized/device`` takes them apart."""

from __future__ import annotations

import jax.numpy as jnp

from .._core.float_bits import u32


def _pieces(bits: int) -> list[int]:
    """How many words of a thread lie together: a load of 16, 8 or 4 bytes each."""
    return [4] * (bits // 4) + [size for size in (2, 1) if bits & size]


def in_pieces(words):
    """(..., 128 threads, bits) as (..., 128 * bits)."""
    lead, first, out = words.shape[:-2], 0, []
    for size in _pieces(words.shape[-1]):
        out.append(words[..., first : first + size].reshape(*lead, -1))
        first += size
    return jnp.concatenate(out, axis=-1)


def from_pieces(words, bits: int):
    lead, first, out = words.shape[:-1], 0, []
    for size in _pieces(bits):
        out.append(words[..., first : first + 128 * size].reshape(*lead, 128, size))
        first += 128 * size
    return jnp.concatenate(out, axis=-1)


def _fields(bits: int, pair: int) -> list[tuple[int, int, int, int]]:
    """Where the affine codes of a thread's pair are, the first in the words' lower halves and the
    second in the upper: (a field's first bit, its bits, word, place). Seven bits are what a number
    of bfloat16 takes from a word as they are, so that is how far parts of a code may be apart."""
    if bits in (3, 5):  # a bit is left over of each word: the last pair
        each = 16 // bits
        if pair == 15:
            return [(i, 1, i, 15) for i in range(bits)]
        return [(0, bits, pair // each, bits * (pair % each))]
    if bits == 6:  # of 8 pairs in 3 words: two in each, two in what is left over
        word, pair = 3 * (pair // 8), pair % 8
        if pair < 6:
            return [(0, 6, word + pair // 2, 6 * (pair % 2))]
        first = pair == 6
        return [(0, 4, word if first else word + 2, 12), (4, 2, word + 1, 14 if first else 12)]
    if bits == 8:  # the last bits lie apart
        return [(0, 7, pair // 2, 7 * (pair % 2)), (7, 1, pair // 2, 14 + pair % 2)]
    each = 16 // bits
    return [(0, bits, pair // each, bits * (pair % each))]


def interleave(codes, bits: int):
    """(..., 16 pairs, 2) integer codes as (..., bits) words."""
    words = [u32(0)] * bits
    for pair in range(16):
        both = codes[..., pair, 0] | codes[..., pair, 1] << 16
        for bit, size, word, place in _fields(bits, pair):
            field = both >> bit & u32(0x10001 * ((1 << size) - 1))
            words[word] = words[word] | field << place
    return jnp.stack(words, axis=-1)


def separate(words, bits: int):
    """The inverse."""
    codes = []
    for pair in range(16):
        both = u32(0)
        for bit, size, word, place in _fields(bits, pair):
            field = words[..., word] >> place & u32(0x10001 * ((1 << size) - 1))
            both = both | field << bit
        codes += [both & u32(0xFFFF), both >> 16]
    return jnp.stack(codes, axis=-1)


def interleave_e2m1(codes):
    """(..., 16 pairs, 2) codes as (..., 4) words of four pairs: so that the sign and the other bits
    come to lie where bfloat16 has them."""
    pairs = ((codes & u32(7)) << 6) | ((codes & u32(8)) << 12)
    pairs = pairs[..., 0] | pairs[..., 1] << 16
    a, b, c, d = (pairs[..., i::4] for i in range(4))
    return a | b >> 6 | c >> 12 | c << 20 | (d & u32(0x80C080C0)) >> 2 | (d & u32(0x01000100)) << 6


def separate_e2m1(words):
    """The inverse: as a kernel does it, with few operations."""
    both = u32(0x81C081C0)
    last = words << 2 & u32(0x80C080C0) | words >> 6 & u32(0x01000100)
    pairs = [words & both, words << 6 & both, (words << 12 | words >> 20) & both, last]
    halves = [p >> (16 * e) for p in pairs for e in range(2)]
    codes = [(h >> 6 & u32(7)) | (h >> 12 & u32(8)) for h in halves]
    return jnp.stack(codes, axis=-1)


# Masks of e4m3 in a half of a word: the sign and the other bits where bfloat16 has them; the sign
# and the next four bits of two words' third pair; and its last three.
_E4M3, _HIGH, _LAST = 0x87F087F0, 0x87808780, 0x00700070


def interleave_e4m3(codes):
    """(..., 16 pairs, 2) codes as (..., 8) words, two of four pairs. The first two pairs are as
    bfloat16 has them, the others in what is left of both words."""
    pairs = ((codes & u32(0x7F)) << 4) | ((codes & u32(0x80)) << 8)
    pairs = pairs[..., 0] | pairs[..., 1] << 16
    a, b, c, d = (pairs[..., i::4] for i in range(4))
    high = lambda pair: _rotate(pair & u32(_HIGH), 4)
    last = lambda pair: (pair & u32(_LAST)) >> 4
    words = jnp.stack([a | high(c) | last(d), b | high(d) | last(c)], axis=-1)
    return words.reshape(*words.shape[:-2], 8)


def separate_e4m3(words):
    """The inverse: as a kernel does it, with few operations."""
    first, second = words[..., ::2], words[..., 1::2]
    rest = lambda a, b: (_rotate(a, 28) & u32(_HIGH)) | (_rotate(b, 4) & u32(_LAST))
    pairs = [first & u32(_E4M3), second & u32(_E4M3), rest(first, second), rest(second, first)]
    halves = jnp.stack([p >> (16 * e) & u32(0xFFFF) for p in pairs for e in range(2)], axis=-1)
    return (halves >> 4 & u32(0x7F)) | (halves >> 8 & u32(0x80))


def _rotate(words, left: int):
    return words << left | words >> (32 - left)


def words_of(parts, bits: int):
    """Numbers of 8 or 16 bits, the first lowest, as words."""
    count = 32 // bits
    parts = parts.reshape(*parts.shape[:-1], -1, count)
    return sum(parts[..., i] << (bits * i) for i in range(1, count)) | parts[..., 0]


def parts_of(words, bits: int):
    """The inverse."""
    parts = [words >> (bits * i) & u32((1 << bits) - 1) for i in range(32 // bits)]
    return jnp.stack(parts, axis=-1).reshape(*words.shape[:-1], -1)
