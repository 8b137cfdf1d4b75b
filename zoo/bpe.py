"""Byte-pair encodings: learnt from text by the package tokenizers, and cached in the user's cache.

Sennrich et al., "Neural Machine Translation of Rare Words with Subword Units" (ACL 2016), with one vocabulary for both
languages. Differs: the start of a word is marked (U+2581), not its inner pieces (@@), so that decoding restores the
text exactly, spaces included.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from pipebench.zoo.late import optional
from pipebench.zoo.places import cache_folder, write_whole
from pipebench.zoo.text import NUM_SPECIAL, SPECIAL_TOKENS, UNK

_PARALLELISM = "TOKENIZERS_PARALLELISM"  # environment variable of the package tokenizers


class BytePairEncoding:
    """A learnt encoding: text to token ids and back."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @property
    def num_tokens(self) -> int:
        """Number of tokens, the special ones included."""
        return int(self._tokenizer.get_vocab_size())

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text's tokens, without begin and end."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens; special ones and ids past the last token are left out."""
        return str(self._tokenizer.decode([i for i in ids if NUM_SPECIAL <= i < self.num_tokens]))

    def serialised(self) -> str:
        """Return the encoding as JSON; equal encodings give equal texts."""
        return str(self._tokenizer.to_str())


def learn(texts: Sequence[str], num_tokens: int) -> BytePairEncoding:
    """Learn an encoding. The same texts in the same order give the same encoding on every machine.

    Args:
        texts: sentences to learn from.
        num_tokens: most tokens of the encoding, the special ones included.

    Raises:
        ImportError: the package tokenizers is missing.
        ValueError: the texts have more different characters than there are tokens.
    """
    tokenizers = _tokenizers()
    alphabet = sorted({char for text in texts for char in text if char != " "})
    least = NUM_SPECIAL + 1 + len(alphabet)  # 1: the mark of a word's start
    if least > num_tokens:
        raise ValueError(f"the text has {len(alphabet)} different characters: allowed are {least} or more tokens")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=SPECIAL_TOKENS[UNK]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=num_tokens, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=alphabet, show_progress=False
    )
    with _one_thread():
        tokenizer.train_from_iterator(texts, trainer)
    return BytePairEncoding(tokenizer)


def learnt(texts: Sequence[str], num_tokens: int) -> BytePairEncoding:
    """Return the result of `learn`, from the user's cache if it is there and undamaged.

    The cache is keyed by the texts, the version of tokenizers and the settings. An unwritable cache is no error.
    """
    path = cache_folder("bpe") / f"{_key(texts, num_tokens)}.json"
    known = _read(path)
    if known is not None:
        return known
    found = learn(texts, num_tokens)
    with contextlib.suppress(OSError):
        write_whole(path, _sealed(found.serialised()))
    return found


def undo_marks(text: str) -> str:
    """Return text with pieces of words as subword-nmt writes them, all but the last ending in @@, as whole words."""
    return f"{text} ".replace("@@ ", "").rstrip(" ")


def _tokenizers() -> Any:
    with optional("byte-pair encoding", "tokenizers"):
        import tokenizers
    return tokenizers


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Make tokenizers use one thread; after using its thread pool, it would warn in every process forked later."""
    before = os.environ.get(_PARALLELISM)
    os.environ[_PARALLELISM] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_PARALLELISM]
        else:
            os.environ[_PARALLELISM] = before


def _key(texts: Sequence[str], num_tokens: int) -> str:
    settings = json.dumps([_tokenizers().__version__, num_tokens, list(SPECIAL_TOKENS)])
    return hashlib.sha256("\n".join([settings, *texts]).encode()).hexdigest()[:32]


def _sealed(content: str) -> bytes:
    """Return the content after a line with its hash, by which `_read` recognises a damaged file."""
    body = content.encode()
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def _read(path: Path) -> BytePairEncoding | None:
    try:
        seal, _, body = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    if seal != hashlib.sha256(body).hexdigest().encode():
        return None
    return _parsed(body.decode())


@lru_cache(maxsize=8)
def _parsed(serialised: str) -> BytePairEncoding:
    return BytePairEncoding(_tokenizers().Tokenizer.from_str(serialised))
