"""Text to tokens and back, as tokenizer.json says."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from . import gguf, gguf_tokens
from .config import read_json
from .errors import Refused, is_gguf


def read(folder: Path, vocabulary: int) -> Tokenizer:
    """The tokenizer of a model with so many tokens. Raises :class:`Refused`."""
    is_file = is_gguf(folder)
    tokenizer = gguf_tokens.read(gguf.opened(folder).metadata) if is_file else _of_folder(folder)
    added = tokenizer.get_added_tokens_decoder()
    ids = [*tokenizer.get_vocab(with_added_tokens=False).values()]
    ids += [i for i, token in added.items() if token.special]  # others need a row where they occur
    check(tokenizer, ids, vocabulary)
    return tokenizer


def _of_folder(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise Refused("there is no tokenizer.json")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise Refused(f"tokenizer.json is truncated, or no tokenizer: {error}") from error


def check(tokenizer: Tokenizer, tokens: Iterable[int], vocabulary: int) -> None:
    """Refuse tokens that the model has no row for: a look-up takes another one for them."""
    if (most := max(tokens, default=0)) >= vocabulary:
        raise Refused(
            f"tokenizer.json: token {tokenizer.id_to_token(most)!r} is number {most}, but "
            f"config.json says vocab_size {vocabulary}"
        )


def begin(folder: Path, tokenizer: Tokenizer) -> int | None:
    """The token that tokenizer_config.json, or metadata, puts before every text."""
    if is_gguf(folder):
        return gguf_tokens.begin(gguf.opened(folder).metadata)
    path = folder / "tokenizer_config.json"
    said = read_json(path) if path.exists() else {}
    token = said.get("bos_token")
    token = token.get("content") if isinstance(token, dict) else token
    if not said.get("add_bos_token") or not isinstance(token, str):
        return None
    return tokenizer.token_to_id(token)


def encode(tokenizer: Tokenizer, text: str, begin: int | None = None) -> list[int]:
    """The tokens of a text, after the one that begins every text, if there is one."""
    tokens = tokenizer.encode(text).ids
    if begin is not None and tokens[:1] != [begin]:
        tokens.insert(0, begin)
    if not tokens:
        raise Refused("--prompt has no token")
    return tokens


def streamed(tokenizer: Tokenizer, tokens: Iterable[int]) -> Iterator[str]:
    """Text as soon as it is certain: a letter may be several tokens. What is no letter after the
    last token comes as U+FFFD."""
    stream, seen, length = DecodeStream(skip_special_tokens=True), [], 0
    for token in tokens:
        seen.append(token)
        text = stream.step(tokenizer, token)
        if text:
            length += len(text)
            yield text
    rest = tokenizer.decode(seen)[length:]
    if rest:
        yield rest
