"""Data: every kind of source gives the same tokens, and samples depend only on their number."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

torch = pytest.importorskip("torch")
# ruff: noqa: E402 # what follows imports torch

from planner.errors import EnvironmentProblem, InputError
from planner.trainer import sources, token_cache
from planner.trainer.data import open_corpus
from planner.trainer.sources import fingerprint, open_sources

TEXTS = ["the quick brown fox", "jumps over", "", "the lazy dog \u00e9"]


def corpus(tmp_path, tokens, *, length=4, seed=3, vocab=256, name="data.npy"):
    path = tmp_path / name
    np.save(path, tokens)
    return open_corpus((str(path),), sequence_length=length, vocab_size=vocab, seed=seed)


@pytest.mark.parametrize("num_windows", [1, 2, 7, 12, 30])
def test_an_epoch_visits_every_window_once(num_windows, tmp_path):
    data = corpus(tmp_path, np.arange(num_windows * 4 + 1, dtype=np.uint16))
    for epoch in range(3):
        inputs, targets = data.batch(epoch * num_windows, num_windows)
        assert sorted(inputs[:, 0].tolist()) == list(range(0, num_windows * 4, 4))
        assert (targets == inputs + 1).all()


def test_epochs_and_seeds_differ_in_order(tmp_path):
    tokens = np.arange(401, dtype=np.uint16)
    data = corpus(tmp_path, tokens, vocab=500)
    first, second = data.batch(0, 100)[0], data.batch(100, 100)[0]
    assert not torch.equal(first, second)
    assert not torch.equal(first, corpus(tmp_path, tokens, vocab=500, seed=4).batch(0, 100)[0])


def test_a_batch_does_not_depend_on_how_it_is_cut(tmp_path):
    data = corpus(tmp_path, np.arange(401, dtype=np.uint32), vocab=500)
    whole = data.batch(96, 8)[0]
    assert torch.equal(whole, torch.cat([data.batch(96 + 2 * i, 2)[0] for i in range(4)]))


def test_text_and_jsonl_are_bytes(tmp_path):
    text, lines = tmp_path / "a.txt", tmp_path / "b.jsonl"
    text.write_bytes(b"0123456789")
    lines.write_text("".join(json.dumps({"text": part}) + "\n" for part in ("abc", "de")))
    data = open_corpus((str(text), str(lines)), sequence_length=5, vocab_size=256, seed=0)
    inputs = data.batch(0, 2)[0]
    assert data.num_windows == 2
    assert {bytes(row.tolist()) for row in inputs} == {b"01234", b"abc\nd"}


def test_the_default_corpus_is_python_source():
    data = open_corpus((), sequence_length=1000, vocab_size=256, seed=0)
    assert data.num_windows > 1000
    assert b"self" in bytes(data.batch(0, 20)[0].flatten().tolist())


def test_bad_data_is_told_apart(tmp_path):
    with pytest.raises(EnvironmentProblem, match="cannot read"):
        open_corpus((str(tmp_path / "none.txt"),), sequence_length=4, vocab_size=256, seed=0)
    with pytest.raises(InputError, match="1-D uint16 or uint32"):
        corpus(tmp_path, np.zeros(9))
    with pytest.raises(InputError, match="hold 3 tokens"):
        corpus(tmp_path, np.zeros(3, dtype=np.uint16))
    with pytest.raises(InputError, match="token id 400"):
        corpus(tmp_path, np.full(9, 400, dtype=np.uint16)).batch(0, 1)
    (tmp_path / "c.jsonl").write_text('{"content": "x"}\n')
    with pytest.raises(InputError, match="line 1 has no text"):
        open_corpus((str(tmp_path / "c.jsonl"),), sequence_length=4, vocab_size=256, seed=0)
    with pytest.raises(InputError, match="too small for bytes"):
        open_corpus((), sequence_length=4, vocab_size=100, seed=0)


# --- kinds of sources ---------------------------------------------------------------------------------------------


def write_jsonl(path: Path, key: str = "text") -> str:
    path.write_text("".join(json.dumps({key: text}) + "\n\n" for text in TEXTS))
    return str(path)


def write_parquet(path: Path, key: str = "text") -> str:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({key: TEXTS, "other": range(len(TEXTS))}), path, row_group_size=2)
    return str(path)


@pytest.fixture
def tokenizer(tmp_path) -> Path:
    """A word tokenizer as its library writes it; token 1 ends a text."""
    tokenizers = pytest.importorskip("tokenizers")
    words = ["[UNK]", "</s>", *sorted({word for text in TEXTS for word in text.split()})]
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
@pytest.mark.parametrize("cached", [False, True])
def test_documents_are_packed_with_their_ends_marked(write, cached, tmp_path):
    name, cache = write(tmp_path / f"data.{write.__name__[6:]}"), tmp_path / "tokens" if cached else None
    bytes_only, wide = (
        open_sources((name,), tokenizer=None, vocab_size=size, cache=cache)[0][:].tolist() for size in (256, 257)
    )
    assert bytes(bytes_only) == "".join(f"{text}\n" for text in TEXTS).encode()
    assert wide == [value for text in TEXTS for value in (*text.encode(), 256)]


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_a_tokenizer_gives_the_ids_of_its_library(write, tokenizer, tmp_path):
    import tokenizers

    name = write(tmp_path / f"data.{write.__name__[6:]}")
    made = tokenizers.Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    wanted = [number for text in TEXTS for number in (*made.encode(text).ids, 1)]
    for path in (tokenizer, tokenizer / "tokenizer.json"):
        found = open_sources((name,), tokenizer=path, vocab_size=50, cache=tmp_path / "tokens")[0]
        assert found[:].tolist() == wanted


def test_the_end_of_a_text_is_what_the_tokenizers_configuration_says(tokenizer, tmp_path):
    (tokenizer / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "fox"}}))
    found = open_sources((write_jsonl(tmp_path / "a.jsonl"),), tokenizer=tokenizer, vocab_size=50, cache=None)[0]
    tokens = json.loads((tokenizer / "tokenizer.json").read_text())["model"]["vocab"]
    assert found[-1] == tokens["fox"]


def test_tokens_are_made_once(tmp_path, monkeypatch):
    names, cache = (write_jsonl(tmp_path / "a.jsonl"),), tmp_path / "tokens"
    first = open_sources(names, tokenizer=None, vocab_size=300, cache=cache)[0][:].tolist()
    monkeypatch.setattr(sources, "_encoded", None)
    assert open_sources(names, tokenizer=None, vocab_size=300, cache=cache)[0][:].tolist() == first
    write_jsonl(tmp_path / "a.jsonl", key="texts")
    with pytest.raises(TypeError):  # other content is not taken for the same
        open_sources(names, tokenizer=None, vocab_size=300, cache=cache)


def test_ranks_that_start_together_see_whole_tokens(tmp_path):
    """All ranks ask at the same time; one writes and the others wait."""
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": "x" * 1000}) + "\n" for _ in range(3000)))
    program = (
        "import sys; from pathlib import Path; from planner.trainer.sources import open_sources\n"
        f"print(len(open_sources(({str(path)!r},), tokenizer=None, vocab_size=300, cache=Path({str(tmp_path)!r}))[0]))"
    )
    ranks = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert {rank.communicate(timeout=60)[0].strip() for rank in ranks} == {str(3000 * 1001)}
    assert [path.suffix for path in tmp_path.glob("*.uint16")] == [".uint16"]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def lose_the_record(path: Path) -> None:
    path.with_name(f"{path.name}.json").unlink()


def garble_the_record(path: Path) -> None:
    path.with_name(f"{path.name}.json").write_text("[1, 2]")


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (flip, "its bytes are not those that were written"),
        (cut, r"it has \d+ bytes of \d+"),
        (lambda path: path.write_bytes(b""), "it has 0 bytes of"),
        (lose_the_record, "is missing or unreadable"),
        (garble_the_record, "is missing or unreadable"),
    ],
)
def test_a_damaged_token_file_is_made_again(damage, why, tmp_path, capsys):
    name, cache = write_jsonl(tmp_path / "a.jsonl"), tmp_path / "tokens"

    def tokens() -> list[int]:
        return open_sources((name,), tokenizer=None, vocab_size=300, cache=cache)[0][:].tolist()

    wanted = [value for text in TEXTS for value in (*text.encode(), 256)]
    assert tokens() == wanted
    (path,) = cache.glob("*.uint16")
    damage(path)
    assert tokens() == wanted
    message = capsys.readouterr().err
    assert re.search(f"token cache {path} is damaged: .*{why}.*; making it again from {name}\n", message)
    assert tokens() == wanted
    assert capsys.readouterr().err == ""
    assert not list(cache.glob("*.tmp"))


def test_a_damaged_token_file_whose_text_is_gone_stops_the_run(tmp_path, monkeypatch):
    """A data set of the hub is identified by its name, so the hub is not asked as long as the file is intact."""
    offline, cache = ConnectionError("the hub does not answer"), tmp_path / "tokens"
    monkeypatch.setattr(sources, "_data_set", lambda _: (text.encode() for text in TEXTS))
    open_sources(("hf:set",), tokenizer=None, vocab_size=300, cache=cache)
    monkeypatch.setattr(sources, "_data_set", Mock(side_effect=offline))
    assert len(open_sources(("hf:set",), tokenizer=None, vocab_size=300, cache=cache)[0]) == len("".join(TEXTS)) + 5
    (path,) = cache.glob("*.uint16")
    flip(path)
    for _ in range(2):  # what is damaged is not taken for whole the second time
        with pytest.raises(EnvironmentProblem) as problem:
            open_sources(("hf:set",), tokenizer=None, vocab_size=300, cache=cache)
        assert f"token cache {path} is damaged" in str(problem.value)
        assert "the hub does not answer" in str(problem.value)
        assert f"copy {path.name} and {path.name}.json" in str(problem.value)


def test_a_token_file_is_compared_once_in_a_start(tmp_path, monkeypatch):
    """The bytes that are read are counted: the whole file once, by the first of the ranks."""
    name, cache = write_jsonl(tmp_path / "a.jsonl"), tmp_path / "tokens"
    summed = Mock(side_effect=token_cache.zlib.crc32)
    monkeypatch.setattr(token_cache.zlib, "crc32", summed)

    def sums_of(start: str, *, ranks: int) -> int:
        summed.reset_mock()
        monkeypatch.setenv(token_cache.START_VARIABLE, start)
        for _ in range(ranks):
            open_sources((name,), tokenizer=None, vocab_size=300, cache=cache)
        return summed.call_count

    assert sums_of("first", ranks=3) == 1  # of what is written
    assert sums_of("second", ranks=3) == 1
    assert sums_of("", ranks=3) == 3  # nobody says that these belong together
    flip(next(cache.glob("*.uint16")))
    assert sums_of("third", ranks=3) == 2  # of what is found, and of what is written


def test_a_token_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    events = []
    real_sync, real_replace = os.fsync, Path.replace

    def fsync(descriptor: int) -> None:
        events.append(("sync", Path(f"/proc/self/fd/{descriptor}").readlink().name))
        real_sync(descriptor)

    def replace(path: Path, target: Path) -> Path:
        events.append(("name", path.name))
        return real_replace(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    open_sources((write_jsonl(tmp_path / "a.jsonl"),), tokenizer=None, vocab_size=300, cache=tmp_path / "tokens")
    drafts = [name for what, name in events if what == "name"]
    assert len(drafts) == 2
    assert all(events.index(("sync", name)) < events.index(("name", name)) for name in drafts)
    assert events[-1] == ("sync", "tokens")


def test_a_disk_that_is_full_is_told_with_the_file_that_it_has_no_room_for(tmp_path):
    """A limit on the size of files replaces the full disk."""
    name, cache = write_jsonl(tmp_path / "a.jsonl"), tmp_path / "tokens"
    program = (
        "import resource, signal, sys; from pathlib import Path; from planner.trainer.sources import open_sources\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (40, 40))\n"
        f"open_sources(({name!r},), tokenizer=None, vocab_size=300, cache=Path({str(cache)!r}))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert re.search(rf"EnvironmentProblem: cannot write {cache}/\w+.uint16: File too large", result.stderr)
    assert not [path for path in cache.iterdir() if path.name != ".lock"]


def test_a_data_set_of_the_hub_is_read_by_name(tmp_path, monkeypatch):
    pytest.importorskip("datasets", reason="datasets is not installed")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    (tmp_path / "set").mkdir()
    write_parquet(tmp_path / "set" / "train.parquet", "body")
    name = f"hf:{tmp_path / 'set'}:train:body"
    found = open_sources((name,), tokenizer=None, vocab_size=256, cache=tmp_path / "tokens")[0]
    assert bytes(found[:].tolist()) == "".join(f"{text}\n" for text in TEXTS).encode()
    with pytest.raises(InputError, match="no column `text`, but body, other"):
        open_sources((name.removesuffix(":body"),), tokenizer=None, vocab_size=256, cache=None)


def test_a_library_that_is_missing_is_told(monkeypatch, tmp_path):
    name = write_parquet(tmp_path / "a.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(EnvironmentProblem, match=r"needs pyarrow.*\n.*parallel-planner\[data\]"):
        open_sources((name,), tokenizer=None, vocab_size=256, cache=None)


def test_a_tokenizer_that_cannot_be_used_is_told(tokenizer, tmp_path):
    name = write_jsonl(tmp_path / "a.jsonl")
    with pytest.raises(InputError, match="vocab_size is 5"):
        open_sources((name,), tokenizer=tokenizer, vocab_size=5, cache=None)
    with pytest.raises(EnvironmentProblem, match="cannot read"):
        open_sources((name,), tokenizer=tmp_path / "none.json", vocab_size=50, cache=None)
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(InputError, match="is no tokenizer"):
        open_sources((name,), tokenizer=tmp_path / "bad.json", vocab_size=50, cache=None)
    (tokenizer / "tokenizer.json").write_text((tokenizer / "tokenizer.json").read_text().replace("</s>", "<stop>"))
    with pytest.raises(InputError, match="names no token for the end"):
        open_sources((name,), tokenizer=tokenizer, vocab_size=50, cache=None)


def test_a_column_that_is_missing_is_told(tmp_path):
    for name in (write_jsonl(tmp_path / "a.jsonl", "body"), write_parquet(tmp_path / "a.parquet", "body")):
        with pytest.raises(InputError, match="text"):
            open_sources((name,), tokenizer=None, vocab_size=256, cache=None)


# --- what is held out, and what a run remembers ---------------------------------------------------------------------


@pytest.mark.parametrize("num_windows", [4, 7, 20, 41])
@pytest.mark.parametrize("share", [0.5, 0.25, 0.1])
def test_training_and_validation_share_the_windows(num_windows, share, tmp_path):
    np.save(tmp_path / "data.npy", np.arange(num_windows * 4 + 1, dtype=np.uint16))
    names = (str(tmp_path / "data.npy"),)
    data = open_corpus(names, sequence_length=4, vocab_size=256, seed=3, validation=share)
    seen = data.batch(0, data.num_windows)[0][:, 0].tolist()
    if data.num_held_out:
        held_out, targets = data.held_out_batch(0, data.num_held_out)
        assert (targets == held_out + 1).all()
        seen += held_out[:, 0].tolist()
    assert sorted(seen) == list(range(0, num_windows * 4, 4))
    assert abs(data.num_held_out - share * num_windows) < 1


def test_a_fingerprint_is_of_the_content(tmp_path):
    a, b = tmp_path / "a.txt", tmp_path / "b.txt"
    content = bytearray(1_000_000)
    a.write_bytes(content)
    b.write_bytes(content)
    same = fingerprint((str(a),), None)
    assert fingerprint((str(b),), None) == same
    assert fingerprint((str(a), str(b)), None) != same
    for change in (0, 999_999):
        content[change] ^= 1
        b.write_bytes(content)
        assert fingerprint((str(b),), None) != same
        content[change] ^= 1
    b.write_bytes(content[:-1])
    assert fingerprint((str(b),), None) != same
