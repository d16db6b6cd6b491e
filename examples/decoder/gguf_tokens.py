"""The tokenizer that the metadata of a GGUF file describes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
    "smaug-bpe": (_LLAMA3,), "gpt-4o": (_GPT4O,), "tekken": (_TEKKEN,),
}  # fmt: skip
#: Of these, words that are tokens are not merged, and texts have a first token if nothing is said.
WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "tekken")


def read(metadata: Mapping[str, Any]) -> Tokenizer:
    """Raises :class:`Refused`."""
    said = lambda key, default=None: value(metadata, f"tokenizer.ggml.{key}", default)
    kind, tokens = said("model"), said("tokens")
    if kind not in ("gpt2", "llama"):
        raise Refused(f"tokenizer.ggml.model is {kind!r}, expected 'gpt2' or 'llama'")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise Refused("tokenizer.ggml.tokens is no list of tokens")
    if sum(map(len, tokens)) > MOST:
        raise Refused(f"tokenizer.ggml.tokens has more than {MOST} characters")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        twice = next(token for i, token in enumerate(tokens) if vocabulary[token] != i)
        raise Refused(f"tokenizer.ggml.tokens: {twice[:100]!r} appears twice")
    try:
        types = list(said("token_type", [1] * len(tokens)))
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
    said = lambda key, default=None: value(metadata, f"tokenizer.ggml.{key}", default)
    usual = said("model") == "llama" or said("pre") in WHOLE_WORDS
    token, added = said("bos_token_id"), said("add_bos_token", usual)
    return token if added and isinstance(token, int) else None


def value(metadata: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """One of the values. Raises :class:`Refused`."""
    try:
        return metadata.get(key, default)
    except ValueError as error:
        raise Refused(str(error)) from error


def _gpt2(said: Any, vocabulary: dict[str, int]) -> Tokenizer:
    """Byte pairs, in the order in which they are merged."""
    merges, pre = said("merges", []), said("pre", "default")
    if pre not in SPLITS:
        known = ", ".join(map(repr, SPLITS))
        raise Refused(f"tokenizer.ggml.pre is {pre!r}, expected one of {known}")
    if not isinstance(merges, list) or not all(isinstance(merge, str) for merge in merges):
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


def _llama(said: Any, vocabulary: dict[str, int]) -> Tokenizer:
    """SentencePiece's byte pairs: of two tokens that stand side by side, those are merged whose
    whole has the largest score."""
    scores = said("scores", ())
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
    unknown = said("unknown_token_id")
    names = list(vocabulary)
    unknown = names[unknown] if isinstance(unknown, int) and 0 <= unknown < len(names) else None
    pairs = [(left, right) for *_, left, right in merges]
    out = Tokenizer(models.BPE(
        vocabulary, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True,
    ))  # fmt: skip
    prefix = said("add_space_prefix", True)
    parts = [normalizers.Prepend("▁")] if prefix else []
    out.normalizer = normalizers.Sequence([*parts, normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    out.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    return out
