"""Documents that are packed into one sequence and masked from each other train as if each were alone."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
# ruff: noqa: E402 # what follows imports torch

from planner.errors import InputError
from planner.trainer import attention
from planner.trainer.attention import attend, document_mask, positions_of
from planner.trainer.context_parallel import held_positions
from planner.trainer.data import document_starts, open_corpus
from planner.trainer.model import Transformer, initial_value

END, LENGTH = 256, 32


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> list[str]:
    """Documents of 1 to 60 bytes: some sequences hold several, and some documents several sequences."""
    draw = random.Random(3)
    texts = ["".join(draw.choices("abcdefgh ", k=draw.randint(1, 60))) for _ in range(200)]
    path = tmp_path_factory.mktemp("data") / "documents.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return [str(path)]


def with_end_token(plan):
    """256 of its 264 tokens are bytes, and one token ends a document."""
    return replace(plan, model=plan.model.model_copy(update={"vocab_size": 264}))


def random_model(spec) -> Transformer:
    """A model in double precision, with values for which attention matters."""
    model = Transformer(spec)
    for name, parameter in model.named_parameters():
        parameter.data = initial_value(name, parameter.shape, spec, seed=1) * 5
    return model.double()


def test_a_document_starts_behind_the_end_of_the_one_before():
    row = [1, END, END, 2, 3, END, 4, END]
    assert document_starts(torch.tensor([row, [5] * 8]), END).tolist() == [[0, 0, 2, 3, 3, 3, 6, 6], [0] * 8]


@pytest.mark.parametrize("name", ["llama", "gpt", "gemma", "mla", "falcon"])
def test_packed_documents_have_the_logits_of_each_alone(name, make_plan):
    """Rotary and learned positions, windows, latent attention, and heads that share keys."""
    spec = with_end_token(make_plan("dp=1", name)).model
    model = random_model(spec)
    draw = torch.Generator().manual_seed(0)
    parts = [torch.randint(0, END, (1, length), generator=draw) for length in (4, 1, 13, 14)]
    for part in parts[:-1]:
        part[0, -1] = END
    packed = torch.cat(parts, dim=1)
    apart = torch.cat([model(part) for part in parts], dim=1)
    found = model(packed, starts_BT=document_starts(packed, END))
    torch.testing.assert_close(found, apart, atol=1e-4, rtol=1e-4)  # angles are single precision
    assert float((model(packed) - apart).detach().abs().max()) > 1e-1  # without masks they do see each other


def test_a_document_that_fills_the_sequence_is_not_changed(make_plan):
    spec = with_end_token(make_plan("dp=1", "gemma")).model
    model = random_model(spec)
    tokens = torch.randint(0, END, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(tokens, starts_BT=document_starts(tokens, END)), model(tokens), atol=1e-9, rtol=0)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("rank", [None, 0, 1])
@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("heads", [4, 2])
def test_the_kernel_of_gpus_sees_what_the_dense_mask_shows(rank, window, heads, monkeypatch):
    """Flex attention as plain operators, without its backward pass, which torch implements for GPUs only."""
    monkeypatch.setattr(attention, "_compiled", lambda function: function)
    held = positions_of(LENGTH) if rank is None else held_positions(LENGTH, 2, rank)
    starts = document_starts(torch.randint(0, 6, (2, LENGTH), generator=torch.Generator().manual_seed(1)), 5)
    draw = torch.Generator().manual_seed(0)
    rows = sum(map(len, held))
    query = torch.randn(2, 4, rows, 8, generator=draw)
    key, value = (torch.randn(2, heads, LENGTH, size, generator=draw) for size in (8, 6))
    dense, blocks = (document_mask(starts, held, window, blocks=each) for each in (False, True))
    assert not dense.all()
    found = attend(query, key, value, held, window, blocks)
    torch.testing.assert_close(found, attend(query, key, value, held, window, dense))


LAYOUTS = [
    ("gpt", "dp=1,mbs=4"),
    ("llama", "pp=2,mbs=2"),
    ("gemma", "cp=2,mbs=4"),
]
MORE_LAYOUTS = [
    ("llama", "tp=2,pp=2,mbs=2"),
    ("llama", "dp=2,zero=3,mbs=2,recompute=full"),
    ("gpt", "cp=2,tp=2,pp=2,mbs=2,recompute=full"),
    ("tied-llama", "pp=2,mbs=2,schedule=zbv,recompute=full"),
    ("gemma", "pp=2,mbs=1,schedule=dualpipev"),
    ("llama", "pp=2,mbs=2,interleave=2"),
    ("llama", "pp=2,mbs=2,layers_per_stage=0/4"),
]


@pytest.mark.parametrize(
    ("model", "layout"), [*LAYOUTS, *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE_LAYOUTS)]
)
def test_a_layout_trains_documents_as_if_each_were_alone(model, layout, data, run_job, make_plan):
    options = {"steps": 3, "data": data, "document_mask": True}
    wanted = run_job("reference", with_end_token(make_plan("dp=1", model)), **options)
    found = run_job("steps", with_end_token(make_plan(layout, model)), **options)
    unmasked = run_job("steps", with_end_token(make_plan("dp=1,mbs=8", model)), **options | {"document_mask": False})
    for (loss, norm), (alone, norm_alone) in zip(found, wanted, strict=True):
        assert loss == pytest.approx(alone, abs=1e-4)
        assert norm == pytest.approx(norm_alone, rel=1e-3)
    # the mask changes the loss by several times what the layouts may differ by
    assert max(abs(loss - alone) for (loss, _), (alone, _) in zip(unmasked, wanted, strict=True)) > 5e-4


def open_with_masks(names, vocab_size):
    return open_corpus(tuple(names), sequence_length=8, vocab_size=vocab_size, seed=0, document_mask=True)


def test_documents_that_cannot_be_told_apart_are_refused(data, tmp_path):
    assert open_with_masks(data, 257).document_end == END
    with pytest.raises(InputError, match="none is left for the end of a document"):
        open_with_masks(data, 256)
    with pytest.raises(InputError, match="do not say which token ends a document"):
        open_with_masks([str(tmp_path / "tokens.npy")], 1000)


def test_a_run_does_not_go_on_with_another_mask(data):
    plain = open_corpus(tuple(data), sequence_length=8, vocab_size=257, seed=0)
    assert plain.fingerprint != open_with_masks(data, 257).fingerprint
