"""Text to token ids: plain bytes, or a `tokenizer.json` through the tokenizers library."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from planner.errors import EnvironmentProblem, InputError

if TYPE_CHECKING:
    from pathlib import Path

BYTE_VALUES = 256
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|endofsentence|>", "[EOS]")
"""End-of-text tokens of the common families, for a tokenizer.json without tokenizer_config.json."""


class Tokenizer(Protocol):
    """Turns documents into ids.

    dtype: type of the ids.
    end: id that ends each document.
    digest: hash of everything that determines the ids.
    """

    dtype: np.dtype[Any]
    end: int
    digest: bytes

    def encode(self, documents: list[bytes]) -> np.ndarray[Any, Any]:
        """Ids of UTF-8 documents in order, each followed by the end-of-document token."""
        ...

    def check(self, vocab_size: int) -> None:
        """Raise InputError if the ids do not fit a vocabulary."""
        ...


class ByteTokenizer:
    """Each byte is its own id. A document ends with id 256, or with a newline if the vocabulary has only bytes."""

    def __init__(self, vocab_size: int) -> None:
        only_bytes = vocab_size <= BYTE_VALUES
        self.dtype = np.dtype(np.uint8 if only_bytes else np.uint16)
        self.end = ord("\n") if only_bytes else BYTE_VALUES
        self.digest = f"bytes {self.end}".encode()

    def encode(self, documents: list[bytes]) -> np.ndarray[Any, Any]:
        """See `Tokenizer`."""
        end = np.array([self.end], self.dtype)
        parts = [(np.frombuffer(each, np.uint8).astype(self.dtype), end) for each in documents]
        return np.concatenate([array for pair in parts for array in pair])

    def check(self, vocab_size: int) -> None:
        """See `Tokenizer`."""
        if vocab_size < BYTE_VALUES:
            raise InputError(
                f"vocab_size {vocab_size} is too small for bytes",
                hint=f"use a vocabulary of at least {BYTE_VALUES}, --tokenizer, or .npy files of token ids",
            )


class FileTokenizer:
    """The tokenizer of a `tokenizer.json`."""

    def __init__(self, path: Path) -> None:
        import tokenizers

        self._path = path
        self.digest = hashlib.sha256(path.read_bytes()).digest()
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001 # the library raises plain Exception
            raise InputError(f"{path} is no tokenizer: {error}") from None
        self.size = self._tokenizer.get_vocab_size()
        self.dtype = np.dtype(np.uint16 if self.size <= 1 << 16 else np.uint32)
        self.end = self._end_token()

    def _end_token(self) -> int:
        config = self._path.with_name("tokenizer_config.json")
        named = json.loads(config.read_text(encoding="utf-8")).get("eos_token") if config.exists() else None
        named = named.get("content") if isinstance(named, dict) else named
        for name in (named, *END_TOKENS):
            if name is not None and (number := self._tokenizer.token_to_id(name)) is not None:
                return int(number)
        raise InputError(
            f"{self._path} names no token for the end of a text",
            hint="keep its tokenizer_config.json, with `eos_token`, beside it",
        )

    def encode(self, documents: list[bytes]) -> np.ndarray[Any, Any]:
        """See `Tokenizer`."""
        texts = [each.decode("utf-8", "replace") for each in documents]
        encoded = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        return np.concatenate([np.array([*each.ids, self.end], self.dtype) for each in encoded])

    def check(self, vocab_size: int) -> None:
        """See `Tokenizer`."""
        if self.size > vocab_size:
            raise InputError(
                f"the tokenizer has {self.size} tokens, and the model's vocab_size is {vocab_size}",
                hint="plan again with --set model.vocab_size=..., or take the model's own tokenizer",
            )


def read_tokenizer(path: Path) -> FileTokenizer:
    """Read a `tokenizer.json`, given as the file or as its folder.

    Raises:
        EnvironmentProblem: the file cannot be read, or the tokenizers library is missing.
        InputError: the file is no tokenizer, or has no end-of-text token.
    """
    path = path / "tokenizer.json" if path.is_dir() else path
    try:
        return FileTokenizer(path)
    except OSError as error:
        raise EnvironmentProblem(f"cannot read {path}: {error.strerror}") from None
    except ImportError:
        raise EnvironmentProblem(
            f"{path} needs the tokenizers library", hint="pip install 'parallel-planner[data]'"
        ) from None
