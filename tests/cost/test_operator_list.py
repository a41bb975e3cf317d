"""One list says what a layer is: a field of the model moves every count that it should, and shards add up to the whole.

Trained parameters are compared with PEFT's, kept tensors of feed-forward blocks with those of torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest

from planner.cost.activations import activation_terms, kept_share
from planner.cost.adapters import adapter_params, adapter_params_on_device, matrices_of
from planner.cost.layers import layer_seconds
from planner.cost.mixers import mixer_shape
from planner.cost.operators import layer_of
from planner.cost.optimizers import layer_matrices
from planner.cost.parameters import layer_matmul_params, layer_params, layer_params_on_device
from planner.cost.transfers import expert_transfers
from planner.layout_text import parse_layout
from planner.specs.blocks import LatentAttention, MixtureOfExperts, SparseAttention
from planner.specs.by_name import load_model
from planner.specs.huggingface import config_from_text
from planner.specs.model import ModelSpec
from planner.specs.recipe import Projection
from planner.specs.recompute import policy_code
from planner.specs.training import TrainingSpec
from planner.specs.validate import validate

CONFIGS = json.loads((Path(__file__).parents[1] / "published" / "huggingface_types.json").read_text())["causal"]

# --- every field moves every count -------------------------------------------------------------------------------

MODELS = {
    "mixtral": ("mixtral-8x7b", True),
    "latent": ("deepseek-v3", True),
    "hybrid": ("nemotron3-nano-30b-a3b", False),
    "dense": ("llama3-8b", False),
    "gpt": ("gpt3-175b", False),
    "sparse": ("deepseek-v3.2", True),
}
EVERY = {"parameters", "parameters of a rank", "FLOPs", "seconds", "kept bytes", "matrices", "adapters"}
HELD = {"parameters", "parameters of a rank"}
FIELDS = {  # model, field, value, and the counts that stay
    ("mixtral", "moe.num_experts", 16): set(),
    ("mixtral", "moe.experts_per_token", 4): {"parameters", "parameters of a rank", "matrices", "adapters"},
    ("mixtral", "moe.ffn_hidden_size", 1024): set(),
    ("mixtral", "moe.shared_ffn_hidden_size", 4096): set(),
    ("mixtral", "moe.latent_size", 1024): set(),
    ("mixtral", "moe.shared_gate", True): {"kept bytes"},  # one element for each token is not counted
    ("mixtral", "moe.router_bias", True): EVERY - {"parameters", "parameters of a rank"},
    ("mixtral", "moe.expert_bias", True): EVERY - {"parameters", "parameters of a rank", "seconds"},
    ("mixtral", "activation", "gelu"): set(),
    ("mixtral", "value_head_size", 64): set(),
    ("mixtral", "attention_gate", "element"): set(),
    ("mixtral", "attention_sinks", True): EVERY - {"parameters", "parameters of a rank"},
    ("mixtral", "qk_norm", "head"): {"FLOPs", "matrices", "adapters"},
    ("mixtral", "norms_per_layer", 4): {"FLOPs", "matrices", "adapters"},
    ("mixtral", "layer_matrix_params", 2**22): {"adapters"},
    ("latent", "mla.q_lora_rank", 512): set(),
    ("latent", "mla.kv_lora_rank", 256): set(),
    ("latent", "mla.value_head_size", 64): set(),
    ("latent", "moe.shared_ffn_hidden_size", 4096): set(),
    ("latent", "mla.rope_head_size", 128): set(),
    ("latent", "mla.nope_head_size", 64): set(),
    ("latent", "moe.vector_params", 4096): EVERY - HELD,
    ("latent", "moe.idle_params", 4096): EVERY - HELD,
    ("latent", "moe.imbalance", 1.5): EVERY - {"seconds", "kept bytes"},
    ("hybrid", "hidden_size", 4096): set(),
    ("dense", "hidden_size", 8192): set(),
    ("dense", "num_heads", 64): set(),
    ("dense", "num_kv_heads", 16): set(),
    ("dense", "head_size", 64): set(),
    ("dense", "ffn_hidden_size", 16384): set(),
    ("dense", "norm", "layernorm"): EVERY - HELD,  # one kernel each, of as many bytes
    ("dense", "wide_norms", True): EVERY,  # it counts where a norm is several operators: tests/cost/test_memory.py
    ("dense", "position", "learned"): EVERY - {"seconds"},
    ("dense", "kind", "encoder"): EVERY - {"seconds"},
    ("dense", "attends", False): set(),
    ("dense", "attention_bias", True): EVERY - HELD,
    ("dense", "mlp_bias", True): EVERY - HELD,
    ("dense", "qkv_bias", True): EVERY - HELD,
    ("dense", "layer_vector_params", 4096): EVERY - HELD,
    ("dense", "parallel_attention", True): EVERY - {"seconds", "kept bytes"},
    ("dense", "keys_are_values", True): {"kept bytes"},  # rotated keys are kept beside the values
    ("dense", "shares_keys", True): set(),
    ("dense", "shared_by", 2): {"FLOPs", "seconds", "kept bytes", "matrices"},
    ("dense", "cross_attention", True): set(),
    ("gpt", "norm_bias", False): EVERY - HELD,
    ("sparse", "sparse.num_heads", 32): set(),
    ("sparse", "sparse.head_size", 64): set(),
    ("sparse", "sparse.top_k", 1024): EVERY - {"seconds"},
    ("sparse", "sparse.shared", True): set(),
}
OF_NO_LAYER = {  # what the model is called, how often its layers occur, its ends, and the tower beside it
    *("name", "architecture", "num_layers", "num_encoder_layers", "layers", "mtp_layers", "sliding_window"),
    *("global_every", "vocab_size", "max_sequence_length", "tied_embeddings", "embedding_size", "head_input_size"),
    *("head_bias", "table_params", "input_matrix_params", "output_matrix_params", "embedding_norm", "final_norm"),
    *("output_head", "extra_positions", "relative_buckets", "num_token_types", "pooler", "patches", "vision"),
    *("rope_theta", "rope_scaling", "norm_epsilon", "head_outputs", "caps_logits"),
    *("moe.num_dense_layers", "moe.layer_frequency", "moe.num_groups", "moe.groups_per_token"),
    "mixer",  # tests/specs compares its kinds with the library's own counts
}


def counts(job, *, experts):
    free = job.cluster.device.efficiency.model_copy(update={"layer_floor": 0.0, "launch": 0.0})
    device = job.cluster.device.model_copy(update={"efficiency": free})
    job = type(job)(
        model=job.model,
        cluster=job.cluster.model_copy(update={"device": device}),
        training=job.training,
        engine=job.engine,
    )
    layout = parse_layout("tp=2,ep=4", num_layers=job.model.num_layers, num_devices=64)
    passes = layer_seconds(job, layout, experts=experts).passes
    lean = job.training.model_copy(update={"lora_rank": 8, "lora_targets": ("all-linear", "expert_up")})
    terms = activation_terms(job, layout, experts=experts)
    return {
        "parameters": layer_params(job.model, experts=experts),
        "parameters of a rank": float(layer_params_on_device(job.model, layout, experts=experts).total),
        "FLOPs": layer_matmul_params(job.model, experts=experts),
        "seconds": float(passes.forward + passes.backward),
        "kept bytes": sum(float(term.num_bytes) for term in terms),
        "matrices": sorted(sum(layer_matrices(job.model, experts=experts), ())),
        "adapters": adapter_params(job.model, lean),
    }


@pytest.mark.parametrize(("name", "field", "value"), FIELDS)
def test_a_field_moves_every_count_that_it_should(make_job, name, field, value):
    model, experts = MODELS[name]
    before, after = (
        counts(make_job(model, settings=each), experts=experts)
        for each in ((), (f"model.{field}={str(value).lower()}",))
    )
    unmoved = {count for count, each in after.items() if each == before[count]}
    assert unmoved == FIELDS[name, field, value]


def test_each_tensor_of_attention_has_its_own_width(make_job):
    """By hand: 32 heads of queries and 8 of keys have 128 elements, values and outputs 64; 2 bytes for each."""
    job = make_job("llama3-8b", settings=("model.value_head_size=64",))
    layout = parse_layout("tp=1", num_layers=job.model.num_layers, num_devices=64)
    kept = {term.name: float(term.num_bytes) for term in activation_terms(job, layout)}
    assert kept["queries, keys and values"] == 2048 * 2 * (32 * 128 + 8 * 128 + 8 * 64)
    assert kept["attention output"] == 2048 * 2 * 32 * 64


def test_every_field_of_the_model_is_in_the_table():
    parts = {"moe": MixtureOfExperts, "mla": LatentAttention, "sparse": SparseAttention}
    of_parts = {f"{part}.{name}" for part, document in parts.items() for name in document.model_fields}
    assert of_parts | (ModelSpec.model_fields.keys() - parts) == OF_NO_LAYER | {field for _, field, _ in FIELDS}


# --- shards ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama3-8b", "mixtral-8x7b", "deepseek-v3", "t5-large", "falcon-h1-34b"])
@pytest.mark.parametrize("text", ["tp=2", "tp=4,ep=8", "tp=2,ep=4,etp=2"])
def test_shards_of_products_add_up(make_job, name, text):
    """Ranks hold a tp-th of each cut product, and the whole of the others; an adapter is cut on one side."""
    job = make_job(name, settings=("training.lora_rank=8", "training.lora_targets=[all-linear, expert_up]"))
    layout = parse_layout(text, num_layers=job.model.num_layers, num_devices=64)
    experts = job.model.moe is not None
    for product in layer_of(job.model, experts=experts).products:
        inputs, outputs = product.sides(layout)
        ranks = {"whole": 1}.get(product.cut, layout.etp if product.count else layout.tp)
        assert inputs * outputs * ranks == product.inputs * product.width
    held = adapter_params_on_device(job, layout, experts=experts)
    one = adapter_params_on_device(
        job, parse_layout("tp=1", num_layers=job.model.num_layers, num_devices=64), experts=experts
    )
    assert one.common / layout.tp < held.common < one.common
    assert one.experts / (layout.ep * layout.etp) <= held.experts <= one.experts / layout.ep


def test_a_mixer_is_cut_as_megatrons():
    """Megatron-LM, core/ssm/mamba_mixer.py: ranks hold outputs of in_proj and inputs of out_proj."""
    products = layer_of(load_model("nemotron-nano-9b-v2"), experts=False).products
    cuts = {name: each.cut for each in products for name in each.outputs}
    assert (cuts["in_proj"], cuts["out_proj"]) == ("columns", "rows")


def test_tokens_of_experts_are_those_that_are_sent(make_job):
    job = make_job("deepseek-v3")
    layout = parse_layout("tp=1,ep=8", num_layers=61, num_devices=64)
    sent = expert_transfers(job, layout)[0].num_bytes
    inputs = {term.name: term.num_bytes for term in activation_terms(job, layout, experts=True)}["expert inputs"]
    assert inputs == pytest.approx(sent)


# --- adapters ----------------------------------------------------------------------------------------------------

PLAIN = ("query", "key", "value", "output")
LATENT = ("query", "query_down", "query_up", "key_value_down", "key_value_up", "output")
EXPERTS = ("expert_up", "expert_down")
DELTA = ("in_proj", "x_proj", "dt_proj", "out_proj")
# PEFT 0.19.1, transformers 5.23, torch's meta device: LoraConfig(r=8, target_modules=..., target_parameters=[experts]),
# parameters with requires_grad of the default configuration of each type
PEFT = [
    ("llama", ("all-linear",), 19_988_480),
    ("qwen2_moe", ("all-linear",), 7_962_816),
    ("gpt_oss", ("all-linear",), 5_971_968),
    ("gpt_oss", (*PLAIN, *EXPERTS), 536_813_568),
    ("nemotron_h", ("all-linear",), 1_090_688),
    ("jamba", ("all-linear",), 19_061_760),
    ("jamba", DELTA, 11_131_904),
    ("kimi_linear", ("all-linear",), 10_551_552),
    ("lfm2", ("all-linear",), 12_517_376),
    ("mixtral", PLAIN, 6_815_744),
    ("mixtral", (*PLAIN, *EXPERTS), 111_673_344),
    ("qwen3_moe", (*PLAIN, *EXPERTS), 159_744_000),
    ("glm4_moe", (*PLAIN, *EXPERTS), 581_373_440),
    ("deepseek_v2", LATENT, 8_929_280),
    ("deepseek_v3", LATENT, 48_503_296),
    ("deepseek_v3", (*LATENT, *EXPERTS), 2_481_199_616),
]


@pytest.mark.parametrize(("kind", "targets", "trained"), PEFT)
def test_adapters_train_as_many_parameters_as_pefts(kind, targets, trained):
    model = validate(ModelSpec, config_from_text(json.dumps(CONFIGS[kind]["config"]), "config.json").tree)
    training = TrainingSpec.model_construct(lora_rank=8, lora_targets=targets)
    assert adapter_params(model, training) == trained


@pytest.mark.parametrize("kind", sorted({kind for kind, _, _ in PEFT} | {"mamba2", "falcon_h1", "rwkv", "minimax"}))
def test_every_matrix_of_a_layer_has_a_name_that_lora_targets_accepts(kind):
    model = validate(ModelSpec, config_from_text(json.dumps(CONFIGS[kind]["config"]), "config.json").tree)
    assert set(matrices_of(model)) <= {*get_args(Projection)}


# --- kept tensors of feed-forward blocks -------------------------------------------------------------------------

torch = pytest.importorskip("torch")


def saved_bytes(module, x, *, checkpointed=False):
    """Bytes of the distinct tensors that torch keeps for the backward pass, without weights."""
    known, kept = {each.untyped_storage().data_ptr() for each in module.parameters()}, {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        if checkpointed:
            torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False)
        else:
            module(x)
    return sum(kept.values())


class Gated(torch.nn.Module):
    def __init__(self, hidden, inner):
        super().__init__()
        self.gate, self.up = (torch.nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(inner, hidden, bias=False)

    def forward(self, x):
        return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


class Plain(torch.nn.Sequential):
    def __init__(self, hidden, inner):
        up, down = torch.nn.Linear(hidden, inner, bias=False), torch.nn.Linear(inner, hidden, bias=False)
        super().__init__(up, torch.nn.GELU(), down)


@pytest.mark.parametrize(("policy", "frozen"), [("none", False), ("none", True), ("mlp", False)])
@pytest.mark.parametrize(("activation", "block"), [("swiglu", Gated), ("gelu", Plain)])
def test_kept_tensors_of_a_feed_forward_block_are_torchs(make_job, activation, block, policy, frozen):
    """Three sequences of 32 tokens; frozen weights keep no inputs of products."""
    settings = [f"model.activation={activation}", "model.hidden_size=64", "model.ffn_hidden_size=96"]
    settings += ["model.num_heads=4", "model.num_kv_heads=2", "model.head_size=16"]
    if frozen:
        settings += ["training.lora_rank=1", "training.lora_targets=[query]"]
    job = make_job(
        "llama3-8b", gpus=8, batch=24, sequence=32, engine="torch", precision="bf16", settings=tuple(settings)
    )
    layout = parse_layout("dp=8,mbs=3", num_layers=32, num_devices=8)
    terms = [
        term for term in activation_terms(job, layout) if term.name in ("feed-forward input", "feed-forward inner")
    ]
    code = policy_code(policy)
    ours = sum(float(term.num_bytes) * kept_share(job, term, code) for term in terms)
    module = block(64, 96).bfloat16().requires_grad_(not frozen)
    x = torch.rand(3, 32, 64, dtype=torch.bfloat16, requires_grad=True)
    assert ours == saved_bytes(module, x, checkpointed=policy == "mlp")


def test_a_delta_net_keeps_every_output_between_its_modules():
    """Outputs of all projections but the last, of the convolution, of the core and of its norm; those of heads too."""
    of_library = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    config = of_library.Qwen3NextConfig()
    with torch.device("meta"):
        module = of_library.Qwen3NextGatedDeltaNet(config, 0)
    outputs = [each.out_features for name, each in module.named_children() if name.startswith("in_proj")]
    values = config.linear_num_value_heads * config.linear_value_head_dim
    kinds = [kind for _, kind in load_model("qwen3-next-80b-a3b").kinds() if kind.mixer]
    assert [mixer_shape(kind).kept for kind in kinds] == [sum(outputs) + module.conv1d.out_channels + 2 * values]


def test_the_core_of_a_delta_net_computes_chunks_of_64_tokens():
    """Yang et al. (2024), section 3.3, by hand: 32 heads of 128 x 128 states, scores of 64 tokens and sums of them."""
    [kind] = [kind for _, kind in load_model("qwen3-next-80b-a3b").kinds() if kind.mixer]
    assert mixer_shape(kind).core_flops == 32 * (2 * 64 * (128 + 128) + 2 * 2 * 128 * 128)


class Counted:
    """A number that counts the operations on such numbers."""

    num = 0

    def counted(self, _other):
        Counted.num += 1
        return self

    __add__ = __mul__ = __truediv__ = counted


def test_the_core_of_rwkv_computes_its_recurrence_once_for_each_channel():
    """Peng et al. (2023), the time-mixing block as an RNN cell, counted as it runs; exponentials are no FLOPs."""
    above = below = decay = bonus = key = value = Counted()
    now = bonus + key
    _ = (above + now * value) / (below + now)
    _ = decay * above + key * value
    _ = decay * below + key
    model = validate(ModelSpec, config_from_text(json.dumps(CONFIGS["rwkv"]["config"]), "config.json").tree)
    assert mixer_shape(model).core_flops == Counted.num * 4096
