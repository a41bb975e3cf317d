"""Sources of tokens: text, JSONL, Parquet, Hugging Face data sets and token files, each as one token array.

Documents are concatenated, with an end-of-document token after each. Sources without tokens are tokenized once; the
result is kept in the run's folder and memory-mapped. If several ranks ask at the same time, the others wait for the
first.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from planner.data_files import HUGGING_FACE, data_files
from planner.errors import EnvironmentProblem, InputError
from planner.trainer.token_cache import cached
from planner.trainer.tokenizer import BYTE_VALUES, ByteTokenizer, Tokenizer, read_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

DOCUMENTS_AT_ONCE = 1000


class Tokens(Protocol):
    """A 1-D array of token ids; a slice reads only its own part."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: Any) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """One entry of `--data`; without entries, the source code of Python's standard library."""

    name: str

    @property
    def is_hub(self) -> bool:
        return self.name.startswith(HUGGING_FACE)

    @property
    def holds_tokens(self) -> bool:
        return self.name.endswith(".npy") and not self.is_hub

    @property
    def is_text(self) -> bool:
        return bool(self.name) and not self.is_hub and Path(self.name).suffix not in (".npy", ".jsonl", ".parquet")

    @property
    def title(self) -> str:
        """The source's name in messages."""
        return self.name or "the sources of Python's standard library"

    def documents(self) -> Iterator[bytes]:
        """The documents of this source, as UTF-8."""
        path = Path(self.name)
        if not self.name:
            return (file.read_bytes() for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
        if self.is_hub:
            return _data_set(self.name.removeprefix(HUGGING_FACE))
        if path.suffix == ".jsonl":
            return _jsonl(path)
        return _parquet(path) if path.suffix == ".parquet" else iter((path.read_bytes(),))


def open_sources(
    names: tuple[str, ...], *, tokenizer: Path | None, vocab_size: int, cache: Path | None
) -> list[Tokens]:
    """The tokens of every source.

    names: `.npy` files of token ids (uint16 or uint32), `.jsonl` and `.parquet` files with a column `text`,
    `hf:NAME[:SPLIT[:COLUMN]]` for a data set of the Hugging Face hub, and any other file as one text.
    tokenizer: a `tokenizer.json` or its folder; without it a token is a byte.
    cache: folder for the tokens of texts; None means in memory only.

    Raises:
        EnvironmentProblem: a file cannot be read, or a library is missing.
        InputError: a file is of an unknown kind, or the tokenizer does not fit the vocabulary.
    """
    sources = [_Source(name=name) for name in names or ("",)]
    reader: Tokenizer = ByteTokenizer(vocab_size)
    if not all(source.holds_tokens for source in sources):
        reader = read_tokenizer(tokenizer) if tokenizer else reader
        reader.check(vocab_size)
    opened = []
    for source in sources:
        with _told(source.title):
            opened.append(_token_file(Path(source.name)) if source.holds_tokens else _read(source, reader, cache))
    return opened


def end_of_document(names: tuple[str, ...], tokenizer: Path | None, vocab_size: int) -> int:
    """The token that ends each document.

    Raises:
        EnvironmentProblem: the tokenizer cannot be read.
        InputError: the data do not separate documents.
    """
    if tokenizer is not None:
        return read_tokenizer(tokenizer).end
    if any(_Source(name=name).holds_tokens for name in names):
        raise InputError(
            "--document-mask: token files do not say which token ends a document",
            hint="give the tokenizer that made them with --tokenizer",
        )
    if vocab_size <= BYTE_VALUES:
        raise InputError(
            f"--document-mask: all {vocab_size} tokens are bytes, and none is left for the end of a document",
            hint=f"plan with --set model.vocab_size={BYTE_VALUES + 1} or more, or give a --tokenizer",
        )
    return ByteTokenizer(vocab_size).end


def fingerprint(names: tuple[str, ...], tokenizer: Path | None, folder: Path | None = None) -> str:
    """A hash of the files' sizes and content, but not of their names; a resumed run compares the hash.

    folder: the run's, whose record of its data files spares reading them again. Raises as `open_sources` does.
    """
    total = hashlib.sha256()
    for name in names:
        with _told(name):
            files = [(each.num_bytes, each.sha256) for each in data_files([name], folder)]
            total.update(repr(files or name).encode())
    if tokenizer is not None:
        total.update(b"tokenizer" + read_tokenizer(tokenizer).digest)
    return total.hexdigest()


@contextlib.contextmanager
def _told(name: str) -> Iterator[None]:
    """Turn errors of reading a source into a message with the source's name."""
    try:
        yield
    except OSError as error:
        raise EnvironmentProblem(f"cannot read {name}: {error.strerror or error}") from None
    except ImportError as error:
        library = (error.name or "").partition(".")[0]
        raise EnvironmentProblem(
            f"{name} needs {library}, which is not installed", hint="pip install 'parallel-planner[data]'"
        ) from None
    except ValueError as error:
        raise InputError(f"{name}: {error}") from None


def _token_file(path: Path) -> Tokens:
    tokens: np.ndarray[Any, Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    if tokens.ndim != 1 or tokens.dtype not in (np.uint16, np.uint32):
        raise ValueError(f"holds {tokens.dtype} of shape {tokens.shape}; token files are 1-D uint16 or uint32")
    return tokens


def _read(source: _Source, tokenizer: Tokenizer, cache: Path | None) -> Tokens:
    width = tokenizer.dtype
    if isinstance(tokenizer, ByteTokenizer) and source.is_text:
        return np.memmap(source.name, dtype=np.uint8, mode="r")  # its bytes are its tokens already
    if cache is None:
        return np.concatenate([np.zeros(0, width), *_encoded(source, tokenizer)])
    names = (source.name,) if source.name else ()
    key = hashlib.sha256(fingerprint(names, None, cache.parent).encode() + tokenizer.digest)
    path = cache / f"{key.hexdigest()[:32]}.{width.name}"
    return cached(path, width, lambda: _encoded(source, tokenizer), source=source.title)


def _encoded(source: _Source, tokenizer: Tokenizer) -> Iterator[np.ndarray[Any, Any]]:
    """Tokens of all documents, each followed by an end-of-document token; raises as `open_sources` does."""
    with _told(source.title):
        documents = source.documents()
        while batch := list(itertools.islice(documents, DOCUMENTS_AT_ONCE)):
            yield tokenizer.encode(batch)


def _jsonl(path: Path) -> Iterator[bytes]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            record = json.loads(line)
            if not isinstance(record, dict) or not isinstance(record.get("text"), str):
                raise ValueError(f"line {number} has no text under the key `text`")  # noqa: TRY004 # the data, not a type
            yield record["text"].encode()


def _parquet(path: Path) -> Iterator[bytes]:
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        if "text" not in file.schema_arrow.names:
            raise ValueError(f"has no column `text`, but {', '.join(file.schema_arrow.names)}")
        for batch in file.iter_batches(columns=["text"]):
            yield from _texts(batch.column(0).to_pylist())


def _data_set(name: str) -> Iterator[bytes]:
    """A data set of the Hugging Face hub or of its cache, with its split (or `train`) and its column (or `text`)."""
    import datasets

    hub_name, split, column = [*name.split(":"), "", ""][:3]
    rows = datasets.load_dataset(hub_name, split=split or "train")
    if (column or "text") not in rows.column_names:
        raise ValueError(f"has no column `{column or 'text'}`, but {', '.join(rows.column_names)}")
    return _texts(row[column or "text"] for row in rows)


def _texts(values: Iterable[Any]) -> Iterator[bytes]:
    for value in values:
        if not isinstance(value, str):
            raise ValueError(f"holds {type(value).__name__} where text belongs")  # noqa: TRY004 # the data, not a type
        yield value.encode()
