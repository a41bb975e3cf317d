"""The training document: values that are the same for every layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import Field, ValidationInfo, WithJsonSchema, field_validator

from planner.specs.batch import BATCH_PATTERN, COUNT_PATTERN
from planner.specs.cluster import Precision
from planner.specs.document import InputDocument, Seconds, Usd, UsdPerHour
from planner.specs.objective import OBJECTIVES, Objective, ObjectiveName, Reference
from planner.specs.recipe import ADAM_RECIPES, CudaGraphs, FrozenWeights, Loss, MemoryRecipe, Optimizer, Projection
from planner.units import parse_count

if TYPE_CHECKING:
    from collections.abc import Iterator

_MOST_SEQUENCES = 100_000_000
_BATCH_SCHEMA = {
    "anyOf": [
        {"type": "integer", "minimum": 1, "maximum": _MOST_SEQUENCES},
        {"type": "string", "pattern": BATCH_PATTERN},
    ],
    "description": "sequences per optimizer step; 512..2048 or 4M tokens leaves a choice",
}
_TOKENS_SCHEMA = {
    "anyOf": [
        {"type": "number", "exclusiveMinimum": 0},
        {"type": "string", "pattern": rf"^\s*{COUNT_PATTERN}\s*(tokens)?$"},
    ],
    "description": "token budget of the whole run, as in 300B or 1.5e12",
}


UNKNOWN_WEIGHTS: Final = "MODEL_PATH"
"""The weights of a training that starts from a checkpoint which only the user knows; a placeholder in files."""
OF_MEGATRON: Final = "megatron:"
"""What stands before the folder of weights in Megatron-LM's form."""
OF_THE_RUN: Final = (
    *("weights", "learning_rate", "schedule", "min_learning_rate_ratio", "warmup_steps", "warmup_ratio", "steps"),
    *("epochs", "weight_decay", "gradient_clip", "adam_beta1", "adam_beta2", "adam_epsilon", "seed"),
)
"""Fields that decide what is learned and change neither the bytes nor the seconds of a step."""
NEVER_CLIPS: Final = 1e9
"""The gradient_clip of files whose 0 turns clipping off."""


class TrainingSpec(InputDocument):
    """The workload of one optimizer step, and the length of the run.

    objective: what is learned: next tokens; preferences between two answers (dpo, orpo, reward, value-head) or single
    ratings (kto); or answers that the model generates itself (grpo), of whose steps only the training is priced.
    global_batch_size: samples per optimizer step: sequences, or pairs of a chosen and a rejected sequence.
    reference: where the weights of the reference model are: `resident` on the devices; `policy`: they are the frozen
    weights of the policy, without its adapters; `host` during a training step; `none`: no step reads them, as with
    log-probabilities from before the training. `objective` is the objective's own, `policy` if adapters are trained.
    forward_passes: forward passes without gradients of each sequence, by policy and reference together; by default
    those of the objective and its reference.
    rollout_memory: share of a device's memory that the engine for generated answers keeps during a training step; 0 if
    it sleeps.
    optimizer: AdamW keeps two moments per weight (adamw-8bit in 8 bits), SGD its momentum, Adafactor sums of rows and
    columns of each matrix; Muon keeps one momentum for matrices and uses AdamW for the other weights.
    memory_recipe: bytes per parameter; `engine` means the bytes that the engine really keeps.
    loss: `engine` is the engine's default; `whole` computes all logits of a microbatch, operator by operator; `fused`
    uses one kernel, which writes the gradient over the logits; `chunked` computes output head and loss for loss_chunks
    parts of the tokens, one after the other; `fused-linear` does the same in one kernel, which chooses the parts
    (Liger).
    mean_sample_tokens: mean length of the samples that are packed into a sequence and attend only to themselves; 0 for
    one sample a sequence.
    mlp_tiles: parts of the sequence that a feed-forward block computes one after the other; the backward pass computes
    each part again (DeepSpeed, TiledMLP).
    cuda_graphs: operators that one host launch starts: `layers` for a layer without its routed experts; `step` for both
    passes.
    expert_overlap: the forward pass of a microbatch runs beside the backward pass of the previous one, and each hides
    the other's expert exchanges (Megatron-LM, --overlap-moe-expert-parallel-comm).
    dropout: probability; with 0 no masks are stored.
    lora_rank: rank of the trained adapters beside the matrices in lora_targets, with all other weights frozen; 0 trains
    every weight.
    lora_dropout: probability of dropout at the input of each adapter; with 0 adapters share their input.
    frozen_weights: storage of frozen weights: 16 bits, or 4 bits inside the layers (nf4 with double quantisation).
    weights: the Hugging Face model that the training starts from, as a name or a folder; `megatron:FOLDER` for a
    checkpoint of Megatron-LM, `MODEL_PATH` for weights that only the user knows; without it training starts at random.
    schedule: the learning rate after the warm-up: cosine, linear, constant, or another program's own name.
    warmup_ratio: warm-up as a share of all steps, if warmup_steps is 0.
    epochs: passes over the data; if given, they end the run in place of `steps`.
    """

    sequence_length: int = Field(ge=1, le=100_000_000)
    objective: ObjectiveName = "next-token"
    reference: Reference | Literal["objective"] = "objective"
    forward_passes: int | None = Field(default=None, ge=0, le=100)
    rollout_memory: float = Field(default=0.0, ge=0, lt=1)
    global_batch_size: Annotated[int, WithJsonSchema(_BATCH_SCHEMA)] = Field(ge=1, le=_MOST_SEQUENCES)
    precision: Precision = "bf16"
    optimizer: Optimizer = "adamw"
    memory_recipe: MemoryRecipe = "engine"
    attention: Literal["flash", "unfused"] = "flash"
    loss: Loss | Literal["engine"] = "engine"
    loss_chunks: int = Field(default=8, ge=1, le=65_536)
    mean_sample_tokens: int = Field(default=0, ge=0, le=100_000_000)
    mlp_tiles: int = Field(default=1, ge=1, le=65_536)
    cuda_graphs: CudaGraphs = "none"
    expert_overlap: bool = False
    dropout: float = Field(default=0.0, ge=0, lt=1)
    lora_rank: int = Field(default=0, ge=0, le=65_536)
    lora_targets: tuple[Projection, ...] = Field(default=("query", "value"), min_length=1)
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    frozen_weights: FrozenWeights = "16-bit"
    tokens: Annotated[float, WithJsonSchema(_TOKENS_SCHEMA)] | None = Field(default=None, gt=0)
    deadline: Seconds | None = Field(
        default=None, gt=0, description="how long the whole run may take, for example 30 d"
    )
    budget: Usd | None = Field(default=None, description="how much the whole run may cost, for example 2 MUSD")
    failures: bool = Field(default=False, description="whether the length of the run counts failures and checkpoints")
    checkpoint_interval: Seconds | None = Field(
        default=None, gt=0, description="training time between two checkpoints; without this key the best interval"
    )
    asynchronous_checkpoints: bool = Field(default=False, description="checkpoints are written while training goes on")
    price: UsdPerHour | None = Field(
        default=None, description="for each device, as in 2.50 USD/h per device; in place of the cluster's"
    )
    weights: str | None = Field(default=None, min_length=1, max_length=4096)
    learning_rate: float = Field(default=3e-4, gt=0)
    schedule: str = Field(default="cosine", pattern=r"^[A-Za-z0-9_-]{1,60}$")
    min_learning_rate_ratio: float = Field(default=0.1, ge=0, le=1)
    warmup_steps: int = Field(default=10, ge=0)
    warmup_ratio: float = Field(default=0.0, ge=0, lt=1)
    steps: int = Field(default=100, ge=1, description="number of optimizer steps of `planner launch`")
    epochs: float | None = Field(default=None, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    gradient_clip: float = Field(default=1.0, gt=0)
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    adam_beta2: float = Field(default=0.95, ge=0, lt=1)
    adam_epsilon: float = Field(default=1e-8, gt=0)
    seed: int = Field(default=1234, ge=0)

    @property
    def method(self) -> Objective:
        """What the objective computes and keeps."""
        return OBJECTIVES[self.objective]

    @property
    def reference_at(self) -> Reference:
        """Where the weights of the reference model are."""
        own = "policy" if self.method.reference == "resident" and self.lora_rank else self.method.reference
        return own if self.reference == "objective" else self.reference

    @property
    def ungraded_passes(self) -> int:
        """Forward passes without gradients of each sequence."""
        own = self.method.policy_passes + self.method.reference_passes * (self.reference_at != "none")
        return own if self.forward_passes is None else self.forward_passes

    @property
    def step_tokens(self) -> int:
        """Tokens of an optimizer step."""
        return self.global_batch_size * self.method.sequences * self.sequence_length

    @property
    def attended_tokens(self) -> int:
        """Length of a sample with as many pairs of query and key per token as the packed samples have on average.

        Lengths l are assumed to be spread like waiting times, so E[l^2] = 2 E[l]^2, and a token sees E[l] earlier ones.
        """
        packed = 2 * self.mean_sample_tokens or self.sequence_length
        return min(packed, self.sequence_length)

    @field_validator("tokens", "learning_rate", mode="before")
    @classmethod
    def _accept_counts(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, str) and info.field_name == "tokens":
            return parse_count(value.strip().removesuffix("tokens"))
        return float(value) if type(value) is int else value

    def _mistakes(self) -> Iterator[str]:
        if self.memory_recipe in ADAM_RECIPES and self.optimizer != "adamw":
            yield (
                f"memory_recipe: {self.memory_recipe} counts the states of adamw, and optimizer is {self.optimizer}; "
                "take memory_recipe engine"
            )
        if not self.lora_rank and self.frozen_weights != "16-bit":
            yield f"frozen_weights: {self.frozen_weights} is of frozen weights; give lora_rank"
        if self.lora_rank and self.precision == "fp32":
            yield (
                f"lora_rank: frozen weights compute in 16 bits or fewer, and precision is {self.precision}; take bf16"
            )
        if self.frozen_weights != "16-bit" and self.precision == "fp8":
            yield f"frozen_weights: {self.frozen_weights} computes in 16 bits, and precision is fp8; take bf16"
        if self.memory_recipe != "engine" and self.precision == "fp32":
            yield (
                f"memory_recipe: {self.memory_recipe} is of 16-bit weights, and precision is fp32; "
                "take memory_recipe engine"
            )
