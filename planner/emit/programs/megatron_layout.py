"""Megatron-Core's options that split the layers into pipeline chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from planner.errors import InputError
from planner.layout import balanced_chunks
from planner.specs.pipeline_letters import LETTERS_KEY, pieces_of_letters

if TYPE_CHECKING:
    from planner.emit.target import Given


def chunks_of(given: Given, num_layers: int) -> tuple[int, tuple[int, ...] | None, tuple[int, ...]]:
    """The chunks per stage, the layers of each chunk if given or uneven, and the chunk of each MTP layer if given.

    All spellings are read: letters; chunks per stage or layers per virtual stage; separate sizes of the first and last
    stage; and embedding and loss counted as layers. Source: Megatron-LM, training/arguments.py, core/transformer/
    transformer_block.py, get_num_layers_to_build.
    """
    stages = max(given.whole("pipeline_model_parallel_size", 1), 1)
    for key in (*_FIRST, *_LAST, *_CHUNKS, *_ENDS, _OF_CHUNK):
        given.get(key)  # one spelling is enough; the keys of other spellings are marked as read
    if LETTERS_KEY in given:
        return _of_letters(given, stages)
    sizes = [given.whole(key) for key in _FIRST], [given.whole(key) for key in _LAST]
    first, last = (next(filter(None, each), 0) for each in sizes)
    ends = [int(given.flag(key)) for key in _ENDS]
    interleave = next(filter(None, (given.whole(key) for key in _CHUNKS)), 1)
    if (of_chunk := given.whole(_OF_CHUNK)) and stages > 1:
        of_stage, rest = divmod(num_layers + sum(ends), stages)
        if rest or of_stage % of_chunk:
            held = f"{num_layers} layers" + (f" and {sum(ends)} ends" if any(ends) else "")
            message = f"{held} on {stages} stages do not divide into chunks of {of_chunk} layers"
            raise InputError(message, where=_OF_CHUNK, hint="Megatron-LM refuses this, too")
        interleave = max(of_stage // of_chunk, 1)
    if stages == 1:
        return 1, None, ()
    each, rest = divmod(num_layers + sum(ends), stages * interleave)
    if rest and not (first or last or given.values.get("deepspeed")):
        raise InputError(
            f"{num_layers} layers and {sum(ends)} ends do not divide into {stages * interleave} chunks",
            where="pipeline_model_parallel_size",
            hint="Megatron-LM refuses this, too",
        )
    if any(ends):
        counts = [each] * (stages * interleave)
        counts[0] -= ends[0]
        counts[-1] -= ends[1]
        return interleave, tuple(counts), ()
    if first or last:
        others = stages - bool(first) - bool(last)
        middle, rest = divmod(num_layers - first - last, others or 1)
        if rest or middle < 0 or (not others and first + last != num_layers):
            raise InputError(f"{num_layers} layers do not divide into these stages", where=_FIRST[0])
        per_stage = (*([first] if first else []), *(middle,) * others, *([last] if last else []))
        return interleave, balanced_chunks(per_stage, interleave), ()
    return interleave, None, ()


_FIRST: Final = ("decoder_first_pipeline_num_layers", "num_layers_in_first_pipeline_stage")
_LAST: Final = ("decoder_last_pipeline_num_layers", "num_layers_in_last_pipeline_stage")


def _of_letters(given: Given, stages: int) -> tuple[int, tuple[int, ...] | None, tuple[int, ...]]:
    layers, mtp = pieces_of_letters(given.text(LETTERS_KEY))
    interleave, rest = divmod(len(layers), stages)
    if rest:
        raise InputError(f"{len(layers)} chunks on {stages} stages", where=LETTERS_KEY)
    ends = {0, len(layers) - 1, *mtp}
    if any(not count and chunk not in ends for chunk, count in enumerate(layers)):
        given.doubt(LETTERS_KEY, "a chunk with neither a layer nor an end has no price", "layout.layers_per_stage")
        return interleave, None, mtp
    return interleave, layers, mtp


_ENDS: Final = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
_OF_CHUNK: Final = "num_layers_per_virtual_pipeline_stage"
_CHUNKS: Final = ("num_virtual_stages_per_pipeline_rank", "virtual_pipeline_model_parallel_size")
