"""Describe a model of the transformers library as our model document: `python -m planner.trainer.describe CONFIG`.

The library's module is built on the meta device, without memory for its parameters. Shapes and names of the parameters
tell what they are. What is recognised becomes fields of its own: attention, latent attention, feed-forward blocks,
experts, norms, the ends. Other matrices are products with every token all the same, and other vectors and tables are
held: `layer_matrix_params`, `layer_vector_params`, `table_params`. Notes name them.

Only classes of the library are built. Code that comes with a checkpoint is never run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

os.environ["HF_HUB_OFFLINE"] = "1"  # before the library is imported, which reads them then
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto as auto

from planner.errors import ExitCode, InputError, PlannerError
from planner.specs.huggingface.config import Config
from planner.specs.huggingface.images import tokens_of
from planner.specs.yaml import shipped_yaml

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_SAID: Final[Any] = shipped_yaml(Path(__file__).with_suffix(".yaml")).plain
"""Names of keys and of matrices."""
_STATES: Final = re.compile("linear|mamba|conv|recurrent|ssm")
"""Names of layers that mix tokens otherwise than by attention."""
_GATES: Final = re.compile("gate_up|gate_proj|up_gate|input_linear|w3")
"""Names of the first matrices of experts with a gate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A parameter of a layer: `count` matrices of inputs and outputs, or a vector, whose inputs are 0."""

    name: str
    inputs: int
    outputs: int
    count: int
    of_norm: bool

    @property
    def size(self) -> int:
        """Number of parameters."""
        return max(1, self.inputs) * self.outputs * self.count

    @property
    def shape(self) -> tuple[int, int]:
        """Inputs and outputs."""
        return self.inputs, self.outputs


@dataclass(slots=True, kw_only=True)
class _Layer:
    """The parameters of one layer that are not recognised yet.

    found: fields of the model document.
    experts: fields of `moe`.
    """

    left: list[Tensor]
    found: dict[str, Any] = field(default_factory=lambda: dict(_SAID["no_block"]))
    experts: dict[str, Any] = field(default_factory=dict)

    def take(self, tensors: Sequence[Tensor]) -> int:
        """Take out tensors that a field describes, and return how many parameters they have."""
        self.left = [each for each in self.left if each not in tensors]
        return sum(each.size for each in tensors)

    def matrices(self, pattern: str = "") -> list[Tensor]:
        """The matrices that are left whose names match."""
        return [each for each in self.left if each.inputs and re.search(pattern, each.name)]

    @property
    def key(self) -> str:
        """Equal for layers of one kind."""
        return json.dumps([self.found, self.experts], sort_keys=True)


def described(values: Mapping[str, Any]) -> dict[str, Any]:
    """The model document of a config.json as JSON data, the module's number of parameters, and notes.

    Raises:
        InputError: the library has no such type or builds no module of it, or our fields cannot hold what it builds.
    """
    module, config = _built(values)
    text, parts = config.get_text_config(decoder=True), {}
    for part in ("vision_config", "audio_config"):
        if (found := _part_of(module, config, part))[0]:
            parts[part] = found
    body = _part_of(module, config, "text_config")[0] if text is not config and parts else ""
    stack = Stack(module, text, body, [name for name, _ in parts.values()])
    is_encoder = "Masked" in type(module).__name__
    document = {"name": "model", "architecture": "llama", **stack.document(), **stack.ends_of_text(is_encoder)}
    between, notes = stack.rest(document), stack.all_notes()
    if "vision_config" in parts:
        tower = Stack(parts["vision_config"][1], config.vision_config, "", [])
        document["vision"] = tower.as_tower(config) | {"projector_params": between}
        notes += [f"of the tower: {note}" for note in tower.all_notes()]
        between = 0
    if "audio_config" in parts:
        held = sum(each.numel() for each in parts["audio_config"][1].parameters())
        between += held
        notes.append(f"the tower for sound ({held:,} parameters) is held, and its seconds are not priced")
    document["table_params"] = document.get("table_params", 0) + between
    return {"document": document, "num_params": sum(each.numel() for each in module.parameters()), "notes": notes}


def _built(values: Mapping[str, Any]) -> tuple[nn.Module, Any]:
    """The library's module, without memory for its parameters, and its configuration."""
    name = values.get("model_type")
    if not isinstance(name, str) or name not in transformers.CONFIG_MAPPING:
        hint = "a later version may have it; code of a checkpoint is never run"
        raise InputError(f"transformers {transformers.__version__} has no model_type `{name}`", hint=hint)
    try:
        kept = {key: value for key, value in values.items() if key not in _SAID["left_out"].split()}
        config = transformers.CONFIG_MAPPING[name].from_dict(kept)
        kind = _class_of(values, config)
        if isinstance(config.get_text_config(), kind.config_class):
            config = config.get_text_config()
        config._attn_implementation = "eager"  # noqa: SLF001 - other kernels ask for a GPU
        with torch.device("meta"):
            module = kind(config)
        module.tie_weights()
    except Exception as error:
        words = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        raise InputError(f"transformers builds no module of this file: {words}") from error
    return module, config


def _class_of(values: Mapping[str, Any], config: Any) -> Any:
    """The class that `architectures` names, or else the one for images and text, for text, or without a head."""
    names = values.get("architectures")
    named = getattr(transformers, str(names[0]), None) if isinstance(names, list) and names else None
    if isinstance(named, type) and issubclass(named, transformers.PreTrainedModel):
        return named
    every = (auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, auto.MODEL_FOR_CAUSAL_LM_MAPPING, auto.MODEL_MAPPING)
    kind = next(each[type(config)] for each in every if type(config) in each)
    return kind[0] if isinstance(kind, list | tuple) else kind


def _part_of(module: nn.Module, config: Any, part: str) -> tuple[str, Any]:
    """Name and module of the part that a nested configuration describes; an empty name if there is none."""
    own = getattr(config, part, None)
    inside = ((name, each) for name, each in module.named_modules() if name and own is not None)
    return next((found for found in inside if type(getattr(found[1], "config", None)) is type(own)), ("", None))


class Stack:
    """Layers with their ends: a model of text, or a tower.

    body: name of the part of the module that the layers are in.
    without: names of parts that do not belong to it.
    """

    def __init__(self, module: nn.Module, config: Any, body: str, without: Sequence[str]) -> None:
        self.module, self.body, self.values = module, body, config.to_dict()
        self.hidden = self._size("hidden")
        names = {name: each for name, each in module.named_modules() if not any(_is_in(name, of) for of in without)}
        lists = [name for name, each in names.items() if isinstance(each, nn.ModuleList) and _is_in(name, body)]
        outermost = [each for each in lists if not any(_is_in(each, other) for other in lists if other != each)]
        sizes = {name: sum(each.numel() for each in names[name].parameters()) for name in outermost}
        stacks = [name for name in outermost if sizes[name] > max(sizes.values()) / 100]
        if not stacks or not self.hidden:
            raise InputError("a model without a list of layers, or without their width in its configuration")
        self.notes = [f"taken as one stack, run once: {', '.join(stacks)}"] if len(stacks) > 1 else []
        self.unknown: set[str] = set()
        self._look_at(names.values())
        layers = [layer for stack in stacks for layer in names[stack]]
        held = {id(value) for layer in layers for value in layer.parameters()}
        self.ends = [
            (name, value)
            for name, value in module.named_parameters()
            if id(value) not in held and not any(_is_in(name, of) for of in without)
        ]
        self.layers = list(self._split(layers))
        self.gated = Counter(map(self._is_gated, self.layers)).most_common(1)[0][0]
        self.norm_parts = 1 + any(each.name.endswith("bias") for each in self._norms(self.layers[0]))
        for each in self.layers:
            self._read(each)

    def _look_at(self, modules: Any) -> None:
        """What kind of module each parameter belongs to."""
        self.of_norms, self.of_matrices, self.of_tables, self.turned = set[int](), set[int](), set[int](), set[int]()
        for module in modules:
            found = {id(value) for value in module.parameters(recurse=False)}
            if "norm" in type(module).__name__.lower():
                self.of_norms |= found
            elif isinstance(module, nn.Embedding):
                self.of_tables |= found
            elif type(module).__name__ == "Conv1D":  # of the library: (inputs, outputs)
                self.turned |= found
            if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d) or found <= self.turned:
                self.of_matrices |= {id(value) for value in module.parameters(recurse=False) if value.dim() > 1}

    def _size(self, name: str) -> int:
        """The first positive number that the configuration has under a key of this size, or in a list there; or 0."""
        for key in _SAID["sizes"].get(name, name).split():
            value = self.values.get(key)
            value = value[0] if isinstance(value, list) and value else value
            if isinstance(value, int) and value > 0:
                return int(value)
        return 0

    def _split(self, layers: Sequence[nn.Module]) -> Iterator[_Layer]:
        """The layers; what several of them share is a layer of its own, used as often."""
        uses = Counter(id(value) for layer in layers for value in layer.parameters())
        kinds = self.values.get("layer_types") or []
        for layer, kind in zip(layers, [*map(str, kinds), *[""] * len(layers)], strict=False):
            named = list(layer.named_parameters())
            for number in sorted({uses[id(value)] for _, value in named}):
                part = _Layer(left=[self._tensor(*each) for each in named if uses[id(each[1])] == number])
                part.found |= {"shared_by": number, "attends": not _STATES.search(kind)}
                local = "sliding" in kind or (not kinds and self.values.get("use_sliding_window", True))
                part.found["sliding_window"] = self._size("sliding_window") if local else 0
                yield part

    def _tensor(self, name: str, value: torch.Tensor) -> Tensor:
        """A parameter of a layer; three dimensions are those of experts, or else of a convolution."""
        shape, count = list(value.shape), 1
        if len(shape) > 2 and shape[0] == self._size("experts"):
            count = shape.pop(0)
        rows, columns = shape[0] if shape else 1, math.prod(shape[1:]) if len(shape) > 1 else 0
        if id(value) in self.turned and columns:
            rows, columns = columns, rows
        if id(value) in self.of_tables:
            rows, columns = value.numel(), 0
        return Tensor(name=name, inputs=columns, outputs=rows, count=count, of_norm=id(value) in self.of_norms)

    def _is_gated(self, layer: _Layer) -> bool:
        """Whether experts, or else the feed-forward block, have three matrices."""
        if experts := [each for each in layer.matrices() if each.count > 1]:
            return any(_GATES.search(each.name) for each in experts)
        blocks = layer.matrices(r"mlp|ffn|feed_forward|fc|dense|expert|moe|intermediate") or layer.matrices()
        return bool(_block(blocks, self.hidden, gated=True))

    def _read(self, layer: _Layer) -> None:
        """Recognise the blocks of a layer; the rest is matrices and vectors."""
        attends = layer.found["attends"]
        layer.found["attends"] = False
        self._experts(layer)
        if attends and not self._latent(layer):
            self._attention(layer)
        if not layer.experts and (block := _block(layer.matrices(), self.hidden, gated=self.gated)):
            layer.found["ffn_hidden_size"] = block[-1].inputs
            layer.take(block)
        norms = self._norms(layer)
        weights = [each for each in norms if each.name.endswith("weight")]
        biases = [each for each in norms if each.name.endswith("bias")]
        pairs = min(6, len(weights), len(biases) if self.norm_parts == 2 else 6)
        layer.take([*weights[:pairs], *biases[: pairs * (self.norm_parts - 1)]])
        self.unknown |= {re.sub(r"\d+", "N", each.name) for each in layer.matrices()}
        layer.found |= {"norms_per_layer": pairs, "layer_matrix_params": layer.take(layer.matrices())}
        layer.found["layer_vector_params"] = layer.take(layer.left)

    def _norms(self, layer: _Layer) -> list[Tensor]:
        """Weights and biases of the norms of the stream, not of queries and keys."""
        wide = (each for each in layer.left if each.of_norm and each.shape == (0, self.hidden))
        return [each for each in wide if not re.search(r"\b[qk]_|query|key", each.name)]

    def _attention(self, layer: _Layer) -> None:
        """Grouped attention: matrices of queries, keys and values, or a joint one, and of the output."""
        named: dict[str, Tensor] = {}
        for each in layer.matrices(r"(?i)att|quer|q_|k_|v_|o_|out_lin|qkv"):
            word = each.name.replace(".linear.weight", "").removesuffix(".weight").rpartition(".")[2]
            part = next((part for part, words in _SAID["matrices"].items() if word in words.split()), "")
            if part and not re.search("cross|encoder_attn|mlp|indexer", each.name):
                named.setdefault(part, each)
        h, heads, out = self.hidden, self._size("heads"), named.get("output")
        size = self._size("head_size") or h // max(1, heads)
        for a in (heads, out.inputs // max(1, size) if out else 0):
            if not out or not a or out.inputs % a:
                continue
            values = out.inputs // a
            query, key, fused = named.get("query"), named.get("key"), named.get("fused")
            gated = bool(query and key and query.outputs == 2 * out.inputs)
            wanted: dict[str, tuple[int, int]] = {"output": (a * values, h)}
            if query:
                d = query.outputs // a // (1 + gated)
                g = key.outputs // max(1, d) if key else self._size("key_value_heads")
                wanted |= {"query": (h, a * d * (1 + gated)), "key": (h, g * d), "value": (h, g * values)}
                wanted = {part: shape for part, shape in wanted.items() if part in named}
            elif fused:
                d, g = values, (fused.outputs // values - a) // 2
                wanted |= {"fused": (h, (a + 2 * g) * d)}
            else:
                return
            taken = {part: named[part] for part in wanted}
            if g < 1 or a % g or {part: each.shape for part, each in taken.items()} != wanted:
                continue
            layer.take(list(taken.values()))
            layer.found |= {"attends": True, "num_heads": a, "num_kv_heads": g, "head_size": d}
            layer.found |= {"attention_gate": "element"} if gated else {}
            layer.found["value_head_size"] = values if values != d else 0
            layer.found |= {"shares_keys": not key and not fused, "keys_are_values": bool(key) and "value" not in named}
            return

    def _latent(self, layer: _Layer) -> bool:
        """Latent attention, by the names of DeepSeek; whether the layer has it."""
        q, kv, nope, rope, value = (
            self._size(key)
            for key in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        )
        a, h = self._size("heads"), self.hidden
        wanted = {"kv_a_proj_with_mqa": (h, kv + rope), "kv_b_proj": (kv, a * (nope + value)), "o_proj": (a * value, h)}
        queries = a * (nope + rope)
        wanted |= {"q_a_proj": (h, q), "q_b_proj": (q, queries)} if q else {"q_proj": (h, queries)}
        named = {each.name.split(".")[-2]: each for each in layer.matrices(r"attn\.\w+\.weight$")}
        norms = [each for each in layer.left if re.search(r"_a_layernorm\.weight$", each.name)]
        same = all(name in named and named[name].shape == shape for name, shape in wanted.items())
        if not kv or not same or sum(each.size for each in norms) != q + kv:
            return False
        layer.take([*(named[name] for name in wanted), *norms])
        sizes = {"nope_head_size": nope, "rope_head_size": rope, "value_head_size": value}
        layer.found |= {"attends": True, "num_heads": a, "num_kv_heads": a, "head_size": nope + rope}
        layer.found["mla"] = {"q_lora_rank": q, "kv_lora_rank": kv, **sizes}
        return True

    def _experts(self, layer: _Layer) -> None:
        """Routed and shared experts, their router, and biases of each expert."""
        h, total, groups = self.hidden, self._size("experts"), dict[str, list[Tensor]]()
        for each in layer.matrices():
            if total and (each.count == total or re.search(r"(?<!shared_)experts\.\d+\.", each.name)):
                name = re.split(r"experts\.\d", each.name.removesuffix(".weight"))[0]
                groups.setdefault(name.rpartition(".")[0], []).append(each)
        routed = max(groups.values(), key=lambda group: sum(each.size for each in group), default=[])
        matrices = 3 if self.gated else 2
        router = [each for each in layer.matrices("gate|rout") if each.shape == (h, total)][:1]
        width, rest = divmod(sum(each.size for each in routed), max(1, total * matrices * h))
        if not routed or rest or not router:
            return
        layer.take([*routed, *router])
        chosen = max(1, self._size("chosen_experts"))
        layer.experts = {"num_experts": total, "ffn_hidden_size": width, "experts_per_token": chosen}
        layer.found["ffn_hidden_size"] = width
        biases = [each for each in layer.left if re.search(r"(?<!shared_)experts\..*bias", each.name)]
        if sum(each.size for each in biases) == total * ((matrices - 1) * width + h):
            layer.take(biases)
            layer.experts["expert_bias"] = True
        if shared := _block(layer.matrices("shared"), h, gated=self.gated):
            layer.take(shared)
            layer.experts["shared_ffn_hidden_size"] = shared[-1].inputs

    def document(self) -> dict[str, Any]:
        """The fields of the model document that are about layers.

        Raises:
            InputError: layers with different experts.
        """
        kinds, of_key = Counter(each.key for each in self.layers), {each.key: each for each in self.layers}
        experts = {json.dumps(each.experts): each.experts for each in self.layers if each.experts}
        if len(experts) > 1:
            raise InputError("layers with experts of different shapes are not expressible")
        first = max(kinds, key=lambda key: (bool(of_key[key].experts), of_key[key].found["attends"], kinds[key]))
        plain, others = of_key[first].found, []
        for key, number in kinds.items():
            own = {name: value for name, value in of_key[key].found.items() if value != plain[name]}
            if own.get("mla", plain) is None:
                own = {**own, "latent": False}
                del own["mla"]
            own |= {"experts": False} if experts and not of_key[key].experts else {}
            others += [{"num_layers": number, **own}] if key != first else []
        return {
            "num_layers": len(self.layers), "hidden_size": self.hidden, "attention_bias": False, "mlp_bias": False,
            "norm": "layernorm" if self.norm_parts == 2 else "rmsnorm", "activation": ("gelu", "swiglu")[self.gated],
            "max_sequence_length": self._size("length") or 2048, "global_every": 0 if plain["sliding_window"] else 1,
            "moe": next(iter(experts.values()), None), "layers": others, **plain,
        }  # fmt: skip

    def ends_of_text(self, is_encoder: bool) -> dict[str, Any]:
        """Embedding, head and the last norm.

        Raises:
            InputError: there is no table of embeddings, or it is smaller than the head.
        """
        try:
            embedding, head = (getattr(self.module, f"get_{part}_embeddings")() for part in ("input", "output"))
        except NotImplementedError as error:
            raise InputError(f"the library does not say where the embeddings are: {error}") from error
        weight = getattr(embedding, "weight", None)
        matrix, bias = (getattr(head, name, None) for name in ("weight", "bias"))
        if weight is None or (matrix is not None and matrix.shape[0] > weight.shape[0]):
            raise InputError("a head that is larger than the table of embeddings, or no such table, is not expressible")
        rows, width = weight.shape
        words, wide = weight.shape if matrix is None else matrix.shape
        rotary = self.values.get("rope_parameters") or self.values.get("rope_theta")
        own: dict[str, Any] = {"vocab_size": words, "position": "rope" if rotary else "none"}
        own |= {"tied_embeddings": matrix is None or matrix is weight, "output_head": matrix is not None}
        own |= {"embedding_size": width if width != self.hidden else 0, "head_input_size": wide if wide != width else 0}
        own["kind"] = "encoder" if is_encoder or matrix is None else "decoder"
        own["table_params"] = (rows - words) * width
        own["head_bias"] = bias is not None and bias.numel() == words
        taken = [weight, *([] if matrix is None else [matrix]), *([bias] if own["head_bias"] else [])]
        return own | self._last_norm(taken)

    def _last_norm(self, taken: Sequence[torch.Tensor]) -> dict[str, Any]:
        """Whether a norm follows the layers; it and what was `taken` are no longer ends."""
        norms = [
            (name.rpartition(".")[2], value)
            for name, value in self.ends
            if id(value) in self.of_norms and value.shape == (self.hidden,) and _is_in(name, self.body)
        ][-self.norm_parts :]
        has_norm = [name for name, _ in norms] == ["weight", "bias"][: self.norm_parts]
        known = {id(value) for value in (*taken, *(value for _, value in norms if has_norm))}
        self.ends = [(name, value) for name, value in self.ends if id(value) not in known]
        return {"final_norm": has_norm}

    def rest(self, document: dict[str, Any]) -> int:
        """Add the ends that no field describes to the document; return the parameters outside of the body."""
        inside = [value for name, value in self.ends if _is_in(name, self.body)]
        for value in inside:
            key = "output_matrix_params" if id(value) in self.of_matrices else "table_params"
            document[key] = document.get(key, 0) + value.numel()
        return sum(value.numel() for _, value in self.ends) - sum(value.numel() for value in inside)

    def all_notes(self) -> list[str]:
        """What is not as in the module, and names of matrices that no field describes."""
        names = sorted(self.unknown)
        listed = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
        words = f"priced as products with every token, without what happens between tokens: {listed}"
        return [*self.notes, *([words] if names else [])]

    def as_tower(self, config: Any) -> dict[str, Any]:
        """The tower as `vision` of a model document.

        Raises:
            InputError: no matrix reads the pixels of a patch.
        """
        outer, tower = (Config(name="", text="", values=each) for each in (config.to_dict(), self.values))
        patch = tower.counts("patch_size", 0, alone=True)[0]
        reads = (value for _, value in self.ends if value.dim() > 1 and value.shape[0] == self.hidden and patch)
        first = next((value for value in reads if value.numel() % (self.hidden * patch**2) == 0), None)
        if first is None:
            raise InputError("a tower without patches of `patch_size` pixels is not expressible")
        side = max(1, (tower.counts("image_size", 0, alone=True)[0] or 448) // patch)
        frames = first.shape[2] if first.dim() == 5 else 1
        own = {
            **self.document(), "name": "vision", "architecture": "vit", "kind": "encoder", "vocab_size": 1,
            "output_head": False, "position": "none", "max_sequence_length": side**2, **self._last_norm([first]),
            "patches": {"image_size": side * patch, "patch_size": patch, "num_frames": frames, "class_tokens": 0,
                        "num_channels": first.numel() // (self.hidden * patch**2 * frames), "bias": False},
        }  # fmt: skip
        self.rest(own)
        return {"encoder": own, "tokens_per_image": tokens_of(outer, tower, side**2)}


def _block(matrices: Sequence[Tensor], hidden: int, *, gated: bool) -> Sequence[Tensor]:
    """The matrices of the widest feed-forward block, the last one last; empty if there is none."""
    single = [each for each in matrices if each.count == 1]
    for down in sorted((each for each in single if each.outputs == hidden), key=lambda each: -each.inputs):
        ups = [each for each in single if each is not down and each.shape == (hidden, down.inputs)]
        joint = [each for each in single if each.shape == (hidden, 2 * down.inputs)]
        if found := (ups[:2] if len(ups) > 1 else joint[:1]) if gated else ups[:1]:
            return [*found, down]
    return []


def _is_in(name: str, part: str) -> bool:
    """Whether a module is a part or inside of it; everything is in the part without a name."""
    return not part or f"{name}.".startswith(f"{part}.")


def main(arguments: Sequence[str] | None = None) -> ExitCode:
    """The program: print document, number of parameters and notes, or the mistake, as JSON."""
    parser = argparse.ArgumentParser(prog="planner.trainer.describe", allow_abbrev=False)
    parser.add_argument("path", type=Path)
    try:
        found = described(json.loads(parser.parse_args(arguments).path.read_text(encoding="utf-8")))
    except PlannerError as error:
        found = {"error": error.mistakes[0].message, "hint": error.mistakes[0].hint}
    sys.stdout.write(json.dumps(found) + "\n")
    return ExitCode.BAD_INPUT if "error" in found else ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
