"""The tokenizer that the metadata of a GGUF file describes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)

from .errors import Refused

CONTROL, USER_DEFINED = 3, 4  # of token_type
LONGEST = 256  # characters of a token that is made of two others
MOST = 2**23  # characters of all tokens together: more than any vocabulary has
_ENDS = r"'s|'t|'re|'ve|'m|'ll|'d"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_GPT2 = rf"{_ENDS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
_QWEN2 = rf"(?i:{_ENDS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_LLAMA3 = rf"(?i:{_ENDS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT4O, _TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{ends}|"
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{ends}|\p{{N}}{digits}|{_SLASHES}"
    for ends, digits in ((rf"(?i:{_ENDS})?", "{1,3}"), ("", ""))
)
#: What a text is split by, one after the other, before it is encoded; by tokenizer.ggml.pre.
SPLITS = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,), "olmo": (_GPT2,), "qwen2": (_QWEN2,), "deepseek-r1-qwen": (_QWEN2,),
    "llama-bpe": (_LLAMA3,), "llama3": (_LLAMA3,), "llama-v3": (_LLAMA3,), "dbrx": (_LLAMA3,),
    "smaug-bpe": (_LLAMA3,), "gpt-4o": (_GPT4O,), "tekken": (_TEKKEN,), "glm4": (_LLAMA3,),
    "chatglm-bpe": (_LLAMA3,), "minimax-m2": (_GPT4O,), "refact": (r"\p{N}", _GPT2),
}  # fmt: skip
#: Of these, words that are tokens are not merged, and texts have a first token if nothing is said.
WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "tekken")


def read(metadata: Mapping[str, Any]) -> Tokenizer:
    """Raises :class:`Refused`."""
    said = _Said(metadata)
    kind, tokens = said("model", str), said("tokens", list)
    if kind not in ("gpt2", "llama"):
        raise Refused(f"tokenizer.ggml.model is {kind!r}, expected 'gpt2' or 'llama'")
    if tokens is None or not all(isinstance(token, str) for token in tokens):
        raise Refused("tokenizer.ggml.tokens is no list of tokens")
    if sum(map(len, tokens)) > MOST:
        raise Refused(f"tokenizer.ggml.tokens has more than {MOST} characters")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        twice = next(token for i, token in enumerate(tokens) if vocabulary[token] != i)
        raise Refused(f"tokenizer.ggml.tokens: {twice[:100]!r} appears twice")
    try:
        types = said("token_type", np.ndarray, np.ones(len(tokens), int)).tolist()
        if len(types) != len(tokens):
            count = f"{len(types)} types of {len(tokens)} tokens"
            raise Refused(f"tokenizer.ggml.token_type has {count}")
        out = (_gpt2 if kind == "gpt2" else _llama)(said, vocabulary)
        out.add_tokens([
            AddedToken(token, special=number == CONTROL, normalized=False)
            for token, number in zip(tokens, map(int, types), strict=True)
            if number in (CONTROL, USER_DEFINED) and token
        ])  # fmt: skip
    except Refused:
        raise
    except Exception as error:  # the library raises nothing narrower
        raise Refused(f"tokenizer.ggml: no tokenizer of this vocabulary: {error}") from error
    return out


def begin(metadata: Mapping[str, Any]) -> int | None:
    """The token that is put before every text."""
    said = _Said(metadata)
    usual = said("model", str) == "llama" or said("pre", str) in WHOLE_WORDS
    token, added = said("bos_token_id", int), said("add_bos_token", bool, usual)
    return token if added else None


def value(metadata: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """One of the values. Raises :class:`Refused`."""
    try:
        return metadata.get(key, default)
    except ValueError as error:
        raise Refused(str(error)) from error


class _Said:
    """Values of the tokenizer; one of another type is refused."""

    def __init__(self, metadata: Mapping[str, Any]):
        self.metadata = metadata

    def __call__(self, key: str, kind: type, default: Any = None) -> Any:
        name = f"tokenizer.ggml.{key}"
        found = value(self.metadata, name)
        if found is None:
            return default
        if type(found) is not kind or (kind is int and found < 0):
            text = repr(found)[:100] if isinstance(found, (str, int, float)) else "a list"
            raise Refused(f"{name} is {text}, expected {_KINDS[kind]}")
        return found


_KINDS = {str: "a text", int: "a number from 0 on", bool: "a bool", list: "a list of texts",
          np.ndarray: "a list of numbers"}  # fmt: skip


def _gpt2(said: _Said, vocabulary: dict[str, int]) -> Tokenizer:
    """Byte pairs, in the order in which they are merged."""
    merges, pre = said("merges", list, []), said("pre", str, "default")
    if pre not in SPLITS:
        known = ", ".join(map(repr, SPLITS))
        raise Refused(f"tokenizer.ggml.pre is {pre!r}, expected one of {known}")
    if not all(isinstance(merge, str) for merge in merges):
        raise Refused("tokenizer.ggml.merges is no list of pairs of tokens")
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    odd = next((merge for merge, pair in zip(merges, pairs, strict=True) if len(pair) != 2), None)
    if odd is not None:
        raise Refused(f"tokenizer.ggml.merges: {odd[:100]!r} is no pair of tokens")
    out = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=pre in WHOLE_WORDS))
    if _QWEN2 in SPLITS[pre]:  # as these models were trained; llama.cpp does not
        out.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(split), "isolated") for split in SPLITS[pre]]
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    out.pre_tokenizer = pre_tokenizers.Sequence([*splits, by_bytes])
    out.decoder = decoders.ByteLevel()
    return out


def _llama(said: _Said, vocabulary: dict[str, int]) -> Tokenizer:
    """SentencePiece's byte pairs: of two tokens that stand side by side, those are merged whose
    whole has the largest score."""
    scores = said("scores", np.ndarray, ())
    if len(scores) != len(vocabulary):
        count = f"{len(scores)} scores of {len(vocabulary)} tokens"
        raise Refused(f"tokenizer.ggml.scores has {count}")
    merges = []
    for (token, _), score in zip(vocabulary.items(), scores, strict=True):
        if len(token) > LONGEST:
            continue
        for i in range(1, len(token)):
            left, right = token[:i], token[i:]
            if left in vocabulary and right in vocabulary:
                merges.append((-float(score), vocabulary[left], vocabulary[right], left, right))
    merges.sort()
    tokens, of = {left + right for *_, left, right in merges}, {score for score, *_ in merges}
    if len(tokens) > 2 * len(of):  # converters without sentencepiece's file write -1000 for all
        raise Refused(
            f"tokenizer.ggml.scores has {len(of)} different scores for {len(tokens)} tokens: which "
            "are merged first is not known"
        )
    unknown, names = said("unknown_token_id", int), list(vocabulary)
    unknown = names[unknown] if unknown is not None and unknown < len(names) else None
    pairs = [(left, right) for *_, left, right in merges]
    out = Tokenizer(models.BPE(
        vocabulary, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True,
    ))  # fmt: skip
    prefix = said("add_space_prefix", bool, True)
    parts = [normalizers.Prepend("▁")] if prefix else []
    out.normalizer = normalizers.Sequence([*parts, normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    out.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    return out
