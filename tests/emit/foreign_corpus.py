"""Command lines of the Megatron family after public examples and issues: settings retyped as facts, scripts not copied.

`layout` is written by hand from what the source says, and is the oracle; so are `open_keys`, the keys without a price.
outcome: whether the run of the source ran or ran out of memory, where it says so, on the machines of `cluster`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    source: str
    text: str
    cluster: str
    layout: str
    gpus: int = 0  # where the command does not say it
    model: str | None = None
    open_keys: tuple[str, ...] = ()
    outcome: Literal["ran", "out of memory", "not said"] = "not said"
    settings: tuple[str, ...] = ()
    batch: int | None = None


_MLM = "NVIDIA/Megatron-LM d98e8a64"
_SWIFT = "modelscope/ms-swift 3602360a"
_VERL = "verl-project/verl"
_MOE = "--moe_grouped_gemm true --moe_permute_fusion true --moe_shared_expert_overlap true --moe_aux_loss_coeff 1e-3 "
_FULL = "--recompute_granularity full --recompute_method uniform --recompute_num_layers 1 "
_TUNE = "--packing true --finetune true --lr 1e-5 --min_lr 1e-6 --lr_warmup_fraction 0.05 --sequence_parallel true "
_MOE_KEYS = ("moe_permute_fusion", "moe_shared_expert_overlap")


def _swift(options: str, *, ranks: int = 8, hosts: int = 1) -> str:
    return f"NNODES={hosts} NPROC_PER_NODE={ranks} \\\nmegatron sft --dataset x {_TUNE}{options}"


def _titan_16b(batch: int, experts: int) -> str:
    return f"""
[model]
name = "deepseek_v3"
flavor = "16B"
[optimizer]
name = "AdamW"
lr = 2.2e-4
[lr_scheduler]
decay_ratio = 0.8
decay_type = "cosine"
min_lr_factor = 0.1
[training]
local_batch_size = {batch}
seq_len = 4096
max_norm = 1.0
steps = 1000
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
fsdp_reshard_after_forward = "default"
tensor_parallel_degree = 1
pipeline_parallel_schedule = "Interleaved1F1B"
expert_parallel_degree = {experts}
expert_tensor_parallel_degree = 1
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
[compile]
enable = true
components = ["loss"]
"""


_TITAN = "pytorch/torchtitan#1789, train_configs/deepseek_v3_16b.toml"


def _factory_8b(settings: str) -> str:
    return f"""
model_name_or_path: /data/llm/Meta-Llama-3-8B-Instruct
stage: sft
finetuning_type: full
deepspeed: examples/deepspeed/{settings}
cutoff_len: 1024
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
learning_rate: 1.0e-5
lr_scheduler_type: cosine
fp16: true
"""


CORPUS = (
    Foreign(
        source=f"{_MLM}, examples/gpt3/train_gpt3_175b_distributed.sh",
        text="""
        GPUS_PER_NODE=8
        MODEL=(--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048
               --max-position-embeddings 2048 --attention-backend auto)
        TRAIN=(--micro-batch-size 1 --global-batch-size 1536 --train-iters 500000 --weight-decay 0.1 --adam-beta1 0.9
               --adam-beta2 0.95 --init-method-std 0.006 --clip-grad 1.0 --fp16 --lr 6.0e-5 --lr-decay-style cosine
               --min-lr 6.0e-6 --lr-warmup-fraction .001 --lr-decay-iters 430000)
        PARALLEL=(
            --tensor-model-parallel-size 8 # one host
            --pipeline-model-parallel-size 16
        )
        torchrun --nproc_per_node $GPUS_PER_NODE --nnodes 16 pretrain_gpt.py ${MODEL[@]} ${TRAIN[@]} ${PARALLEL[@]} \\
            --data-path "$3" --vocab-file $4 --merge-file $5 --split 949,50,1 --log-interval 100
        """,
        cluster="dgx-a100",
        layout="tp=8,pp=16,cp=1,zero=0,hsdp=1,mbs=1,interleave=1,sp=0,recompute=none,offload=none,ep=1,etp=1",
    ),
    Foreign(
        source=f"{_MLM}, examples/mixtral/train_mixtral_8x7b_distributed.sh",
        text="""
        MODEL_ARGS=(--disable-bias-linear --seq-length 4096 --max-position-embeddings 32768 --num-layers 32
          --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --init-method-std 0.01
          --attention-dropout 0.0 --hidden-dropout 0.0 --normalization RMSNorm --position-embedding-type rope --swiglu
          --untie-embeddings-and-output-weights --group-query-attention --num-query-groups 8 --rotary-base 1000000)
        MOE_ARGS=(--num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss
          --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall)
        torchrun --nnodes=4 --nproc_per_node=8 pretrain_gpt.py "${MODEL_ARGS[@]}" "${MOE_ARGS[@]}" \\
          --tokenizer-type Llama2Tokenizer --micro-batch-size 1 --global-batch-size 256 --lr 1e-4 --bf16 \\
          --tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 --expert-model-parallel-size 8 \\
          --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \\
          --no-masked-softmax-fusion
        """,
        cluster="dgx-h100",
        layout="tp=1,pp=4,cp=1,zero=1,mbs=1,interleave=1,sp=0,recompute=none,ep=8,etp=1",
        open_keys=("no_masked_softmax_fusion",),
    ),
    Foreign(
        source=f"{_MLM}, examples/llama/train_llama3_8b_h100_fp8.sh",
        text="""
        TP_SIZE=1; CP_SIZE=1; PP_SIZE=1
        MICRO_BATCH_SIZE=${MBS:-1}
        DTYPE="fp8"
        DTYPE_ARGS=()
        if [[ "$DTYPE" == "fp8" ]]; then
            DTYPE_ARGS+=("--fp8-format hybrid" "--fp8-param-gather")
        fi
        torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py --use-mcore-models --num-layers 32 --hidden-size 4096 \\
          --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention --num-query-groups 8 \\
          --kv-channels 128 --seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope \\
          --rotary-base 1000000 --attention-dropout 0.0 --hidden-dropout 0.0 --swiglu --apply-layernorm-1p \\
          --untie-embeddings-and-output-weights --disable-bias-linear --micro-batch-size $MICRO_BATCH_SIZE \\
          --global-batch-size 128 --bf16 --grad-reduce-in-bf16 --cross-entropy-loss-fusion --lr 0.00015 \\
          ${DTYPE_ARGS[@]} --tensor-model-parallel-size $TP_SIZE --context-parallel-size $CP_SIZE --sequence-parallel \\
          --pipeline-model-parallel-size ${PP_SIZE} --use-distributed-optimizer --overlap-grad-reduce \\
          --overlap-param-gather --mock-data --tokenizer-type NullTokenizer --vocab-size 128256
        """,
        cluster="dgx-h100",
        layout="tp=1,pp=1,cp=1,zero=1,mbs=1,interleave=1,sp=0,recompute=none,ep=1,etp=1",
        open_keys=("cross_entropy_loss_fusion",),
    ),
    Foreign(
        source=f"{_MLM}, examples/megatron_fsdp/train_llama3_8b_fsdp_h100_fp8.sh",
        text="""
        torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 \\
          --num-attention-heads 32 --group-query-attention --num-query-groups 8 --seq-length 8192 --swiglu --bf16 \\
          --max-position-embeddings 8192 --position-embedding-type rope --disable-bias-linear --attention-dropout 0 \\
          --hidden-dropout 0 --untie-embeddings-and-output-weights --micro-batch-size 1 --global-batch-size 128 \\
          --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --no-gradient-accumulation-fusion \\
          --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ckpt-format fsdp_dtensor \\
          --fsdp-double-buffer --tensor-model-parallel-size 1 --mock-data
        """,
        cluster="dgx-h100",
        layout="tp=1,pp=1,cp=1,zero=3,mbs=1,sp=0,recompute=none,ep=1,etp=1",
        open_keys=("fsdp_double_buffer",),
        settings=("model.vocab_size=128256",),
    ),
    Foreign(
        source="NVIDIA/Megatron-LM#1445",  # it names the first and last stages, and not how many there are
        text="""
        --num-layers 60 --hidden-size 5120 --ffn-hidden-size 12288 --num-attention-heads 128 --seq-length 4096
        --max-position-embeddings 4096 --multi-latent-attention --kv-lora-rank 512 --q-lora-rank 1536
        --moe-ffn-hidden-size 1536 --moe-router-topk 6 --num-experts 160 --decoder-first-pipeline-num-layers 2
        --decoder-last-pipeline-num-layers 2 --pipeline-model-parallel-size 9 --moe-shared-expert-intermediate-size 3072
        --moe-layer-freq ([0]*1+[1]*59) --expert-model-parallel-size 8 --moe-grouped-gemm --qk-head-dim 128
        --qk-pos-emb-head-dim 64 --v-head-dim 128 --micro-batch-size 1 --no-rope-fusion --disable-bias-linear --bf16
        --tensor-model-parallel-size 1 --position-embedding-type rope --normalization RMSNorm --swiglu
        """.replace("([0]*1+[1]*59)", "'([0]*1+[1]*59)'"),
        cluster="dgx-h100",
        gpus=144,
        batch=512,
        layout="tp=1,pp=9,zero=0,mbs=1,recompute=none,ep=8,etp=1,layers_per_stage=2/8/8/8/8/8/8/8/2",
        settings=("model.vocab_size=102400",),
        open_keys=("no_rope_fusion",),
    ),
    Foreign(
        source="NVIDIA/Megatron-LM#2280",  # 94 layers on 32 chunks: embedding and loss count as layers
        text="""
        export MEGATRON_PATH=.
        TP=${TP:-2}; EP=${EP:-32}; PP=${PP:-8}; VPP=${VPP:-4}
        MBS=${MBS:-1}
        GBS=${GBS:-2048}
        export WORLD_SIZE=256
        python $MEGATRON_PATH/pretrain_gpt.py --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP \\
          --expert-model-parallel-size $EP --num-virtual-stages-per-pipeline-rank $VPP --context-parallel-size 1 \\
          --expert-tensor-parallel-size 1 --use-distributed-optimizer --sequence-parallel --use-flash-attn \\
          --micro-batch-size $MBS --global-batch-size $GBS --seq-length 4096 --bf16 \\
          --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split \\
          --attention-dropout 0.0 --hidden-dropout 0.0
        """,
        cluster="dgx-h100",
        gpus=256,
        model="qwen3-235b-a22b",
        layout="tp=2,pp=8,cp=1,zero=1,mbs=1,interleave=4,sp=1,recompute=none,ep=32,etp=1,"
        "layers_per_stage=2/" + "3/" * 30 + "2",
    ),
    Foreign(
        source=f"{_SWIFT}, examples/megatron/dense/72b_offload.sh",
        text=_swift(
            "--model Qwen/Qwen2.5-72B-Instruct --tensor_model_parallel_size 8 --micro_batch_size 1 "
            f"--global_batch_size 16 {_FULL}--max_length 8192 --optimizer_cpu_offload true "
            "--use_precision_aware_optimizer true --optimizer_offload_fraction 1 --attention_backend flash"
        ),
        cluster="dgx-a100",
        layout="tp=8,pp=1,zero=1,mbs=1,sp=1,recompute=full,offload=optimizer,etp=1",
        outcome="ran",
    ),
    Foreign(
        source=f"{_SWIFT}, examples/megatron/dense/qwen3_32b.sh",
        text=_swift(
            f"--model Qwen/Qwen3-32B --tensor_model_parallel_size 8 --micro_batch_size 1 --global_batch_size 16 {_FULL}"
            "--max_length 8192 --cross_entropy_loss_fusion true"
        ),
        cluster="dgx-a100",
        layout="tp=8,pp=1,zero=1,mbs=1,sp=1,recompute=full,offload=none",
        open_keys=("cross_entropy_loss_fusion",),
        outcome="ran",
    ),
    Foreign(
        source=f"{_SWIFT}, examples/megatron/moe/deepseek_v3.sh",
        text=_swift(
            "--model moonshotai/Moonlight-16B-A3B-Instruct --pipeline_model_parallel_size 2 "
            f"--decoder_last_pipeline_num_layers 13 --expert_model_parallel_size 4 {_MOE}{_FULL}--micro_batch_size 1 "
            "--global_batch_size 16 --max_length 8192"
        ),
        cluster="dgx-a100",
        layout="tp=1,pp=2,zero=1,mbs=1,sp=0,recompute=full,ep=4,etp=1,layers_per_stage=14/13",
        open_keys=_MOE_KEYS,
        outcome="ran",
    ),
    Foreign(
        source=f"{_SWIFT}, examples/megatron/moe/qwen3_moe.sh",
        text=_swift(
            f"--model Qwen/Qwen3-30B-A3B-Base --pipeline_model_parallel_size 2 --expert_model_parallel_size 8 {_MOE}"
            f"{_FULL}--micro_batch_size 1 --global_batch_size 16 --max_length 8192",
            hosts=2,
        ),
        cluster="dgx-a100",
        layout="tp=1,pp=2,zero=1,mbs=1,recompute=full,ep=8,etp=1,layers_per_stage=24/24",
        open_keys=_MOE_KEYS,
        outcome="ran",
    ),
    Foreign(
        source=f"{_SWIFT}, examples/megatron/moe/qwen3_moe_offload.sh",
        text=_swift(
            f"--model Qwen/Qwen3-30B-A3B-Base --expert_model_parallel_size 4 {_MOE}{_FULL}--micro_batch_size 1 "
            "--global_batch_size 16 --max_length 8192 --optimizer_cpu_offload true "
            "--use_precision_aware_optimizer true --optimizer_offload_fraction 1",
            ranks=4,
        ),
        cluster="dgx-a100",
        layout="tp=1,pp=1,zero=1,mbs=1,recompute=full,ep=4,etp=1,offload=optimizer",
        open_keys=_MOE_KEYS,
        outcome="ran",
    ),
    Foreign(
        source=f"{_SWIFT}, examples/megatron/long_text.sh",
        text=_swift(
            f"--model Qwen/Qwen2.5-7B --tensor_model_parallel_size 4 --micro_batch_size 1 --global_batch_size 8 {_FULL}"
            "--train_iters 1000 --max_length 32768",
            ranks=4,
        ),
        cluster="dgx-a100",
        layout="tp=4,pp=1,zero=1,mbs=1,sp=1,recompute=full",
        outcome="ran",
    ),
    Foreign(
        source=f"{_SWIFT}, examples/megatron/multi-node/node1.sh",
        text=_swift(
            "--model Qwen/Qwen2.5-14B --tensor_model_parallel_size 4 --micro_batch_size 1 --global_batch_size 16 "
            "--recompute_granularity selective --max_length 8192",
            ranks=4,
            hosts=2,
        ),
        cluster="dgx-a100",
        layout="tp=4,pp=1,zero=1,mbs=1,sp=1,recompute=selective",
        outcome="ran",
    ),
    Foreign(
        source=f"{_SWIFT}, examples/megatron/mcore_bridge/full/moe.sh",
        text=_swift(
            "--model Qwen/Qwen3-30B-A3B-Instruct-2507 --tensor_model_parallel_size 4 --pipeline_model_parallel_size 2 "
            f"--decoder_first_pipeline_num_layers 25 --expert_model_parallel_size 4 {_MOE}{_FULL}--micro_batch_size 1 "
            "--global_batch_size 4 --max_length 8192 --moe_expert_capacity_factor 2"
        ),
        cluster="dgx-a100",
        layout="tp=4,pp=2,zero=1,mbs=1,sp=1,recompute=full,ep=4,etp=1,layers_per_stage=25/23",
        open_keys=(*_MOE_KEYS, "moe_expert_capacity_factor"),
        outcome="ran",
    ),
    Foreign(
        source=f"{_SWIFT}, examples/megatron/lora/moe.sh",
        text=_swift(
            "--model Qwen/Qwen3-30B-A3B --tuner_type lora --lora_rank 8 --lora_alpha 32 --target_modules all-linear "
            f"--expert_model_parallel_size 2 {_MOE}{_FULL}"
            "--micro_batch_size 8 --global_batch_size 16 --max_length 2048",
            ranks=2,
        ),
        cluster="dgx-a100",
        layout="tp=1,pp=1,zero=1,mbs=8,recompute=full,ep=2,etp=1",
        open_keys=("target_modules", *_MOE_KEYS),
        outcome="ran",
    ),
    Foreign(
        source=f"{_SWIFT}, examples/megatron/lora/qwen3_235b.sh",
        text=_swift(
            "--model Qwen/Qwen3-235B-A22B-Instruct-2507 --tuner_type lora --lora_rank 8 --target_modules all-linear "
            "--tensor_model_parallel_size 4 --expert_tensor_parallel_size 1 --expert_model_parallel_size 8 "
            f"{_MOE}{_FULL}--micro_batch_size 8 --global_batch_size 16 --max_length 2048"
        ),
        cluster="dgx-a100",
        layout="tp=4,pp=1,zero=1,mbs=8,sp=1,recompute=full,ep=8,etp=1",
        open_keys=("target_modules", *_MOE_KEYS),
        outcome="ran",
    ),
    Foreign(
        source="modelscope/ms-swift#6558",
        text=_swift(
            "--tensor_model_parallel_size 4 --pipeline_model_parallel_size 2 --expert_model_parallel_size 8 "
            f"--expert_tensor_parallel_size 1 --micro_batch_size 1 --global_batch_size 16 {_MOE}{_FULL}"
            "--max_length 1024 --moe_expert_capacity_factor 1",
            hosts=8,
        ),
        cluster="dgx-a100",
        model="qwen3-235b-a22b",
        layout="tp=4,pp=2,zero=1,mbs=1,sp=1,recompute=full,ep=8,etp=1",
        open_keys=(*_MOE_KEYS, "moe_expert_capacity_factor"),
        outcome="out of memory",
    ),
    Foreign(
        source=f"{_VERL}, examples/grpo_trainer/run_deepseek_v3_671b_megatron.sh",
        text="""
        tp=8; pp=12; ep=8; etp=1
        LAST=6
        python3 -m verl.trainer.main_ppo data.max_prompt_length=2048 data.max_response_length=8192 \\
          data.train_batch_size=96 actor_rollout_ref.model.path=deepseek-ai/DeepSeek-V3 \\
          actor_rollout_ref.actor.strategy=megatron actor_rollout_ref.actor.ppo_mini_batch_size=32 \\
          actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 actor_rollout_ref.rollout.n=8 \\
          actor_rollout_ref.actor.megatron.tensor_model_parallel_size=${tp} \\
          actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=$pp \\
          actor_rollout_ref.actor.megatron.expert_model_parallel_size=$ep \\
          actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=$etp \\
          actor_rollout_ref.actor.megatron.param_offload=True \\
          +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full \\
          +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_method=uniform \\
          +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_num_layers=1 \\
          trainer.nnodes=12 trainer.n_gpus_per_node=8 $@
        """,
        cluster="dgx-h100",
        layout="tp=8,pp=12,cp=1,ep=8,etp=1,zero=1,mbs=1,recompute=full",
        open_keys=("actor_rollout_ref.actor.megatron.param_offload",),
    ),
    Foreign(
        source="verl-project/verl#7519",
        text="""
        python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer.yaml data.train_batch_size=64 \\
          data.max_prompt_length=1024 data.max_response_length=2048 actor_rollout_ref.model.path=/models/Qwen3-8B \\
          actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \\
          actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \\
          actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=1 actor_rollout_ref.rollout.n=8 \\
          actor_rollout_ref.actor.megatron.param_offload=False trainer.n_gpus_per_node=4
        """,
        cluster="dgx-b200",
        layout="tp=2,pp=1,cp=1,ep=1,etp=1,zero=1,mbs=4,recompute=none",
    ),
    Foreign(
        source="NVIDIA/Megatron-LM#2254",
        text="""
        TP=${TP:-2}
        PP=${PP:-16}
        EP=${EP:-64}
        CP=${CP:-1}
        ETP=${ETP:-1}
        PP_LAYOUT="Et*3|(tt|)*29|L"
        python $MEGATRON_PATH/pretrain_gpt.py --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP \\
          --expert-model-parallel-size $EP --context-parallel-size $CP --expert-tensor-parallel-size $ETP \\
          --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --sequence-parallel \\
          --disable-bias-linear --micro-batch-size ${MBS:-1} --global-batch-size ${GBS:-8192} --no-rope-fusion \\
          --seq-length 4096 --num-layers 61 --pipeline-model-parallel-layout "$PP_LAYOUT" --mock-data --bf16
        """,
        cluster="dgx-h100",
        gpus=1024,
        model="deepseek-v3",
        # two of its 32 chunks have no layer; here they borrow one each, and the key is listed
        layout="tp=2,pp=16,cp=1,ep=64,etp=1,zero=1,mbs=1,interleave=2,sp=1,recompute=none,"
        "layers_per_stage=3/" + "2/" * 27 + "1/1/1/1",
        open_keys=("no_rope_fusion", "pipeline_model_parallel_layout"),
    ),
    Foreign(
        source="NVIDIA-NeMo/Megatron-Bridge 067f987d, docs/recipe-usage.md",
        text="""
        uv run python -m torch.distributed.run --nproc_per_node=8 pretrain_cli_overrides.py --recipe \\
          llama3_8b_pretrain_config model.tensor_model_parallel_size=4 train.train_iters=100000
        """,
        cluster="dgx-h100",
        batch=128,
        layout="tp=4,pp=1,cp=1,zero=1,sp=0,recompute=none",
    ),
    Foreign(
        source=f"{_TITAN} of September 2025",
        text=_titan_16b(8, 8),
        batch=64,
        cluster="dgx-h100",
        gpus=8,
        layout="tp=1,pp=1,cp=1,ep=8,etp=1,zero=3,hsdp=1,mbs=8,sp=0,recompute=selective,offload=none",
        open_keys=("compile.enable",),
        outcome="out of memory",
    ),
    Foreign(
        source=f"{_TITAN} of release 0.2.2, pull request 1792",
        text=_titan_16b(4, 8),
        batch=32,
        cluster="dgx-h100",
        gpus=8,
        layout="tp=1,pp=1,cp=1,ep=8,etp=1,zero=3,hsdp=1,mbs=4,sp=0,recompute=selective,offload=none",
        open_keys=("compile.enable",),
        outcome="ran",
    ),
    Foreign(
        source=f"{_TITAN}, with one expert group",
        text=_titan_16b(8, 1),
        batch=64,
        cluster="dgx-h100",
        gpus=8,
        layout="tp=1,pp=1,cp=1,ep=1,etp=1,zero=3,hsdp=1,mbs=8,sp=0,recompute=selective,offload=none",
        open_keys=("compile.enable",),
        outcome="ran",
    ),
    Foreign(
        source="hiyouga/LlamaFactory#5977, ds_z3_config.json",
        text=_factory_8b("ds_z3_config.json"),
        batch=16,
        cluster="rtx3090-box",
        gpus=8,
        layout="zero=3,mbs=1,recompute=full,offload=none,tp=1",
        outcome="out of memory",
    ),
    Foreign(
        source="hiyouga/LlamaFactory#5977, ds_z3_offload_config.json",
        text=_factory_8b("ds_z3_offload_config.json"),
        batch=16,
        cluster="rtx3090-box",
        gpus=8,
        layout="zero=3,mbs=1,recompute=full,offload=optimizer,tp=1",
        outcome="ran",
    ),
    Foreign(
        source="tatsu-lab/stanford_alpaca#32",  # of LLaMA 7B at the 512 tokens of its train.py
        text="""
        torchrun --nproc_per_node=8 train.py --model_name_or_path converted_llama_7B --fp16 True \\
          --per_device_train_batch_size 1 --per_device_eval_batch_size 1 --gradient_accumulation_steps 4 \\
          --evaluation_strategy "no" --save_strategy "steps" --save_steps 2000 --save_total_limit 5 \\
          --learning_rate 2e-5 --weight_decay 0. --warmup_ratio 0.03 --lr_scheduler_type "cosine" \\
          --fsdp "full_shard auto_wrap" --fsdp_transformer_layer_cls_to_wrap 'LlamaDecoderLayer' \\
          --model_max_length 512
        """,
        cluster="p4d",
        model="llama2-7b",
        layout="zero=3,mbs=1,recompute=none,offload=none,tp=1",
        open_keys=("fsdp_transformer_layer_cls_to_wrap",),
        outcome="ran",
    ),
)
