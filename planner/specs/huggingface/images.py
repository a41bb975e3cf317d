"""A Hugging Face config.json of a model that reads images: its text, its vision tower and the projector between them.

The parts and their formulas stand in types.yaml, under `towers` and `projectors`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from planner.specs.huggingface.config import MOST, Config
from planner.specs.huggingface.formulas import Scope
from planner.specs.huggingface.table import defaults, row, table

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """The parts of a config.json that a projector's formula reads: the outer keys, the tower's and the text model's."""

    outer: Config
    tower: Config
    text: Config

    def add_vision(self) -> None:
        """Add the tower to the model document of the text.

        Raises:
            InputError: a required key is missing, or its value fits no field of ours.
        """
        name = str(self.outer.values["model_type"])
        row(str(self.tower.values["model_type"]), "towers").translate(self.tower)
        self.tower.put("name", "vision", "model_type")
        scope = Scope(
            config=self.outer,
            parts={"outer": self.outer, "tower": self.tower, "text": self.text},
            letters=self._letters(),
        )
        patches = self.tower.ours("max_sequence_length") - self.tower.ours("patches.class_tokens")
        params, tokens = scope.number(table()["projectors"][name]), tokens_of(self.outer, self.tower, patches)
        for part in (self.outer, self.tower, self.text):
            part.raise_if_missing()
        self.text.adopt("vision.encoder", self.tower)
        self.text.put("vision.projector_params", params, "vision_config")
        self.text.put("vision.tokens_per_image", tokens, "vision_config")
        self.text.notes.append(
            "one image in each sequence is assumed, a part of the tokens that are asked for; vision.images_per_sequence"
        )

    def _letters(self) -> dict[str, Callable[[], int]]:
        """The letters in the formulas of projectors."""
        outer, tower = self.outer, self.tower
        return {
            "h": lambda: tower.ours("hidden_size"),
            "t": lambda: self.text.ours("hidden_size"),
            "m": lambda: tower.ours("hidden_size") * tower.count("spatial_merge_size", 2) ** 2,
            "q": lambda: tower.ours("hidden_size") * _inverse(outer, "downsample_ratio", 0.5) ** 2,
            "o": lambda: tower.count("out_hidden_size"),
            "r": self._layers_read,
        }

    def _layers_read(self) -> int:
        """Number of tower layers whose outputs the projector reads together."""
        read = self.outer.counts("vision_feature_layer", -2, least=-MOST, alone=True)  # -1 is the last layer
        return len(self.outer.counts("vision_feature_layers", *read, least=-MOST, alone=True))


def tokens_of(outer: Config, tower: Config, patches: int) -> int:
    """Tokens of an image in the sequence: the number in the file, or the patches by the patches per token."""
    for key in table()["image_tokens"]:
        if outer.get(key) is not None:
            return outer.size(key, 1)
    if outer.get("perceiver_config") is not None:
        return outer.part("perceiver_config").size("resampler_n_latents", 64)
    side = max(tower.count("spatial_merge_size"), outer.count("spatial_merge_size"), 1)
    side *= max(1, tower.count("pooling_kernel_size"))
    side *= outer.size("scale_factor", 1) * outer.size("downsample_factor", 1)
    side *= _inverse(outer, "downsample_ratio", 1) * _inverse(tower, "pixel_shuffle_ratio", 1)
    return max(1, patches // side**2)


def _inverse(config: Config, key: str, default: float) -> int:
    """1 / the number of a key, a whole number."""
    return max(1, round(1 / max(1e-9, config.number(key, default))))


def join_of(outer: dict[str, Any], shown: str, text: str) -> Join | None:
    """The parts of the file of a model that reads images; None if no row reads its tower."""
    name = str(outer.get("model_type"))
    known = defaults().get(f"outer:{name}", {"keys": {}, "tower": "", "text": ""})
    tower = outer["vision_config"]
    kind = tower.get("model_type")
    kind = str(known["tower"] if kind in (None, name) else kind)
    if name not in table()["projectors"] or kind not in table()["towers"]:
        return None
    whole = {**known["keys"], **outer}
    inner, inside = outer.get("text_config"), True
    if isinstance(inner, dict):
        sizes = defaults().get(f"nested:{inner.get('model_type', known['text'])}", {})
    else:
        inner = {key: value for key, value in outer.items() if key != "model_type" and not key.endswith("_config")}
        sizes, inside = {"model_type": name} if name in table()["types"] else {}, False
    inner = {"model_type": known["text"] or f"{name}_text", **sizes, **inner}
    if (tied := table()["ties"].get(name, whole.get("tie_word_embeddings"))) is not None:
        inner["tie_word_embeddings"] = tied
    of_class = defaults().get(f"tower:{kind}", {"keys": {}})["keys"]
    config = Config(name=shown, text=text, values=tower, inside=("vision_config",))
    return Join(
        outer=Config(name=shown, text=text, values=whole),
        tower=replace(config, values={**of_class, **tower, "model_type": kind}),
        text=Config(name=shown, text=text, values=inner, inside=("text_config",) * inside),
    )
