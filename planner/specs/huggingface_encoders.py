"""Rules for the descendants of BERT and BART: heads, tables of embeddings, decoders without their encoder.

The source of all rules is the code in transformers 5.23: configuration_*.py and modeling_*.py of each type.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from planner.specs.huggingface_config import Config


def head_by_architecture(*, transform: bool = True, pooled: bool = False) -> Callable[[Config], None]:
    """A language model's head if `architectures` names one, otherwise a pooler.

    transform: a square matrix and a norm precede the head.
    pooled: the pooler exists in addition to the head (BigBird).
    """

    def rule(config: Config) -> None:
        names = config.get("architectures", [])
        name = str(names[0]) if isinstance(names, list) and names else ""
        if not any(part in name for part in ("LM", "CausalLM", "Decoder", "PreTraining")):
            config.notes.append("counted as the base model with its pooler, without a head for a task")
            return
        hidden = config.filled("hidden_size")
        config.put("output_head", True, "architectures")
        config.put("head_bias", True, "architectures")
        config.put("pooler", pooled or "PreTraining" in name, "architectures")
        own = hidden * hidden + 3 * hidden if transform else 0
        if not config.flag("tie_word_embeddings", True):
            config.put("tied_embeddings", False, "tie_word_embeddings")
            own += config.filled("vocab_size")  # the model has the bias twice, in the head and beside it
        config.put("output_matrix_params", own, "architectures")

    return rule


def narrow_embeddings(*, to: str = "", out: str = "", reads: int = 0) -> Callable[[Config], None]:
    """Embeddings of another width: one matrix projects them to the model's width, a second one back for the head.

    to, out: the config keys that give the width of the embedding, and the width that the head reads.
    reads: the width that the head reads if the key `out` is missing.
    """

    def rule(config: Config) -> None:
        h, width = config.filled("hidden_size"), config.count(to)
        wide = config.count(out, reads) if out else width
        config.put("embedding_size", width, to)
        config.put("head_input_size", wide, out or to)
        if width != h or out:
            config.put("input_matrix_params", (width + 1) * h, to)
        config.put("output_head", True, "model_type")
        config.put("head_bias", True, "model_type")
        config.put("pooler", False, "model_type")
        config.put("output_matrix_params", (h + 3) * wide, out or to)
        tied = not out and config.flag("tie_word_embeddings", True)
        config.put("tied_embeddings", tied, "tie_word_embeddings")

    return rule


def roformer(config: Config) -> None:
    """Sinusoidal positions of a head's size, stored as a parameter."""
    rows, heads = config.filled("max_sequence_length"), max(1, config.filled("num_heads"))
    config.put("table_params", rows * (config.filled("hidden_size") // heads), "max_position_embeddings")
    config.put("position", "rope", "model_type")
    if (size := config.count("embedding_size")) not in (0, config.filled("hidden_size")):
        config.refuse("embedding_size", f"embeddings of {size}, not as wide as the model, are not supported")
    config.get("rotary_value")


def xmod(config: Config) -> None:
    """One adapter per layer and language; a token passes through one of a layer's adapters."""
    hidden = config.filled("hidden_size")
    languages = max(1, len(config.entries("languages")))
    middle = int(hidden // config.number("adapter_reduction_factor", 2))
    norms = 2 * hidden if config.flag("adapter_layer_norm") else 0
    config.add("layer_matrix_params", languages * 2 * hidden * middle)
    config.add("layer_vector_params", languages * (hidden + middle) + norms)
    config.read.update(("adapter_reuse_layer_norm", "ln_before_adapter", "pre_norm"))
    if config.flag("pre_norm"):
        config.put("final_norm", True, "pre_norm")


def roc_bert(config: Config) -> None:
    """Embeddings of pronunciation and shape; a matrix joins them with the word's embedding."""
    hidden = config.filled("hidden_size")
    widths, tables = hidden, 0
    for name in ("pronunciation", "shape"):
        if config.flag(f"enable_{name}", True):
            width = config.count(f"{name}_embed_dim")
            tables += config.count(f"{name}_vocab_size") * width
            widths += width
    config.put("table_params", tables, "shape_vocab_size")
    if config.flag("concat_input", True):
        config.put("input_matrix_params", hidden * widths + hidden, "concat_input")


def ernie(config: Config) -> None:
    """Embeddings of tasks."""
    if config.flag("use_task_id"):
        rows = config.count("task_type_vocab_size")
        config.put("table_params", rows * config.filled("hidden_size"), "task_type_vocab_size")
    config.get("task_type_vocab_size")


def bart(
    *, extra: int = 0, embedding_norm: bool = True, final_norm: bool = False, biases: bool = True, tied: bool = True
) -> Callable[[Config], None]:
    """The decoder alone; each of its layers attends to an encoder that is not part of the model.

    extra: rows in the table of positions in addition to the rows that the file states.
    """

    def rule(config: Config) -> None:
        config.put("extra_positions", extra, "model_type")
        config.put("embedding_norm", embedding_norm, "model_type")
        config.put("final_norm", final_norm, "model_type")
        config.put("attention_bias", biases, "model_type")
        if not tied:
            config.put("tied_embeddings", False, "model_type")
        for key in list(config.values):
            if key.startswith(("encoder_", "num_encoder_")) or key in ("num_hidden_layers", "decoder_layerdrop"):
                config.get(key)
        config.notes.append("counted as the decoder alone, with attention to an encoder that is no part of the model")

    return rule


def whisper(config: Config) -> None:
    """Whisper: attention's projections have biases, except the projection to keys."""
    hidden = config.filled("hidden_size")
    config.put("attention_bias", False, "model_type")
    config.put("layer_vector_params", 3 * hidden, "model_type")
    config.read.update(
        (
            "max_source_positions",
            "num_mel_bins",
            "classifier_proj_size",
            "median_filter_width",
            "apply_spec_augment",
        )
    )


def learned_positions(config: Config) -> None:
    """TrOCR: positions are learned or sinusoidal, and the embedding has a norm or not."""
    if not config.flag("use_learned_position_embeddings", True):
        config.put("position", "none", "use_learned_position_embeddings")
    config.put("embedding_norm", config.flag("layernorm_embedding", True), "layernorm_embedding")


def big_bird_bias(config: Config) -> None:
    """BigBird: a config key says whether the projections to queries, keys and values have biases."""
    if not config.flag("use_bias", True):
        config.put("attention_bias", False, "use_bias")
        config.add("layer_vector_params", config.filled("hidden_size"))
    config.read.update(("block_size", "attention_type", "num_random_blocks"))


def bigbird_pegasus_bias(config: Config) -> None:
    """BigBird-Pegasus: a config key says whether attention has biases."""
    config.put("attention_bias", config.flag("use_bias"), "use_bias")


def prompts(config: Config) -> None:
    """MVP's prompts, which most files turn off."""
    if config.flag("use_prompt"):
        config.refuse("use_prompt", "prompts of MVP are a block that is not supported")
