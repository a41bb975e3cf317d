"""Files of other programs, modelled on public examples and issues: settings are retyped as facts, no script is copied.

`layout` is written by hand from the source's statements and is the oracle; the same holds for `open_keys`, which are
switched on and have no price.

outcome: whether the source's run succeeded or ran out of memory on the machines of `cluster`, if the source says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import dedent
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
    training: str = ""  # settings that it must say, by hand too
    files: tuple[tuple[str, str], ...] = ()  # further files of the run, name and text
    ignore: tuple[str, ...] = ()  # methods that have no price, so that only the rest is read


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


_ZERO_3 = '{"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3, "overlap_comm": true}}'
_ON_HOST = '"offload_optimizer": {"device": "cpu", "pin_memory": true}, "offload_param": {"device": "cpu"}'
_LAUNCHED = (("zero3.yaml", "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 3\nnum_processes: 8\n"),)
"""An Accelerate file for recipes that say nothing of sharding."""

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
        open_keys=_MOE_KEYS,
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
        open_keys=_MOE_KEYS,
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
        open_keys=("algorithm.adv_estimator",),  # advantages of a critic, unless the text says another
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
        layout="tp=2,pp=1,cp=1,ep=1,etp=1,zero=1,mbs=4,recompute=none,offload=none",
        open_keys=("algorithm.adv_estimator",),  # advantages of a critic, unless the text says another
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
        # the last but one of its chunks has neither a layer nor an end: layers are split evenly, the verdict is unknown
        layout="tp=2,pp=16,cp=1,ep=64,etp=1,zero=1,mbs=1,interleave=2,sp=1,recompute=none",
        open_keys=("pipeline_model_parallel_layout", "no_rope_fusion"),
    ),
    Foreign(
        source="NVIDIA-NeMo/Megatron-Bridge 067f987d, docs/recipe-usage.md",
        text="""
        uv run python -m torch.distributed.run --nproc_per_node=8 pretrain_cli_overrides.py --recipe \\
          llama3_8b_pretrain_config model.tensor_model_parallel_size=4 train.train_iters=100000
        """,
        cluster="dgx-h100",
        batch=128,
        layout="tp=4,pp=1,cp=2,zero=1,recompute=none",  # the rest is the recipe's, llama/h100/llama3.py
        open_keys=("recompute",),
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
        files=(("ds_z3_config.json", _ZERO_3),),
        outcome="out of memory",
    ),
    Foreign(
        source="hiyouga/LlamaFactory#5977, ds_z3_offload_config.json",
        text=_factory_8b("ds_z3_offload_config.json"),
        batch=16,
        cluster="rtx3090-box",
        gpus=8,
        layout="zero=3,mbs=1,recompute=full,offload=params+states,tp=1",
        files=(("ds_z3_offload_config.json", '{"zero_optimization": {"stage": 3, ' + _ON_HOST + "}}"),),
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
        outcome="ran",
    ),
    Foreign(
        source="axolotl-ai-cloud/axolotl, examples/llama-3/fft-8b-liger-fsdp.yaml",
        text=dedent("""
        base_model: NousResearch/Meta-Llama-3.1-8B
        plugins:
          - axolotl.integrations.liger.LigerPlugin
        liger_rope: true
        liger_rms_norm: true
        liger_glu_activation: true
        liger_fused_linear_cross_entropy: true
        sequence_len: 4096
        sample_packing: true
        pad_to_sequence_len: true
        gradient_accumulation_steps: 4
        micro_batch_size: 2
        num_epochs: 1
        optimizer: adamw_torch_fused
        lr_scheduler: cosine
        learning_rate: 2e-5
        bf16: auto
        tf32: false
        gradient_checkpointing: true
        attention: flash
        warmup_steps: 100
        weight_decay: 0.0
        fsdp:
          - full_shard
          - auto_wrap
        fsdp_config:
          fsdp_limit_all_gathers: true
          fsdp_offload_params: true
          fsdp_use_orig_params: false
          fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
          fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
          fsdp_sharding_strategy: FULL_SHARD
          fsdp_backward_prefetch: BACKWARD_PRE
        """),
        cluster="dgx-a100",
        layout="zero=3,mbs=2,recompute=full,offload=optimizer,tp=1,cp=1",
        gpus=8,
        batch=64,
        training="precision=bf16,loss=fused-linear,attention=flash,optimizer=adamw",
    ),
    Foreign(
        source="axolotl-ai-cloud/axolotl, examples/llama-3/3b-fp8-fsdp2.yaml",
        text=dedent("""
        base_model: meta-llama/Llama-3.2-3B
        load_in_4bit: false
        liger_rope: true
        liger_rms_norm: true
        liger_glu_activation: true
        liger_layer_norm: true
        liger_fused_linear_cross_entropy: true
        sample_packing: true
        pad_to_sequence_len: true
        sequence_len: 512
        flex_attention: true
        flex_attn_compile_kwargs:
          dynamic: false
          mode: max-autotune-no-cudagraphs
        torch_compile: true
        gradient_accumulation_steps: 1
        micro_batch_size: 16
        optimizer: adamw_torch_fused
        cosine_min_lr_ratio: 1.0
        learning_rate: 2e-5
        fp8: true
        fp8_enable_fsdp_float8_all_gather: true
        warmup_steps: 10
        fsdp_config:
          fsdp_version: 2
          fsdp_offload_params: false
          fsdp_sharding_strategy: FULL_SHARD
          fsdp_reshard_after_forward: true
          fsdp_activation_checkpointing: true
        """),
        cluster="dgx-h100",
        layout="zero=3,mbs=16,recompute=full,offload=none,tp=1",
        gpus=8,
        batch=128,
        training="precision=bf16,loss=fused-linear",
        open_keys=(
            "fp8",
            "liger_layer_norm",
            "flex_attn_compile_kwargs.mode",
            "torch_compile",
            "fp8_enable_fsdp_float8_all_gather",
        ),
    ),
    Foreign(
        source="axolotl-ai-cloud/axolotl, examples/llama-3/lora-8b.yml",
        text=dedent("""
        base_model: NousResearch/Meta-Llama-3-8B
        model_type: LlamaForCausalLM
        load_in_8bit: true
        load_in_4bit: false
        sequence_len: 4096
        sample_packing: true
        adapter: lora
        lora_r: 32
        lora_alpha: 16
        lora_dropout: 0.05
        lora_target_linear: true
        lora_modules_to_save:
          - embed_tokens
          - lm_head
        gradient_accumulation_steps: 4
        micro_batch_size: 2
        optimizer: adamw_bnb_8bit
        learning_rate: 0.0002
        bf16: auto
        gradient_checkpointing: true
        flash_attention: true
        warmup_ratio: 0.1
        """),
        cluster="dgx-a100",
        layout="zero=0,mbs=2,recompute=full,offload=none",
        gpus=1,
        batch=8,
        training="precision=bf16,optimizer=adamw-8bit,lora_rank=32",
        open_keys=("engine", "zero", "lora_modules_to_save", "load_in_8bit"),
        ignore=("load_in_8bit",),
    ),
    Foreign(
        source="huggingface/alignment-handbook, recipes/zephyr-7b-beta/sft/config_full.yaml",
        text=dedent("""
        model_name_or_path: mistralai/Mistral-7B-v0.1
        torch_dtype: bfloat16
        attn_implementation: flash_attention_2
        bf16: true
        gradient_accumulation_steps: 1
        gradient_checkpointing: true
        learning_rate: 2.0e-05
        per_device_train_batch_size: 16
        max_seq_length: 2048
        max_steps: -1
        seed: 42
        warmup_ratio: 0.1
        lr_scheduler_type: cosine
        gradient_checkpointing_kwargs:
          use_reentrant: False
        chat_template: "{% x %}"
        dataset_mixture:
          datasets:
            - id: a
          test_split_size: 1000
          seed: 0
        """),
        cluster="dgx-a100",
        layout="zero=3,mbs=16,recompute=full,offload=none",
        files=_LAUNCHED,
        gpus=8,
        batch=128,
        training="precision=bf16,sequence_length=2048,seed=42",
    ),
    Foreign(
        source="huggingface/alignment-handbook, recipes/zephyr-141b-A35b/orpo/config_full.yaml",
        text=dedent("""
        model_name_or_path: mistral-community/Mixtral-8x22B-v0.1
        torch_dtype: bfloat16
        attn_implementation: flash_attention_2
        bf16: true
        gradient_accumulation_steps: 1
        gradient_checkpointing: true
        learning_rate: 5.0e-6
        per_device_train_batch_size: 1
        max_length: 2048
        beta: 0.05
        max_prompt_length: 1792
        optim: adamw_bnb_8bit
        warmup_steps: 100
        lr_scheduler_type: inverse_sqrt
        """),
        cluster="dgx-h100",
        layout="zero=3,mbs=1,recompute=full,offload=none",
        files=_LAUNCHED,
        gpus=32,
        batch=32,
        training="optimizer=adamw-8bit,warmup_steps=100",
        open_keys=("launch.method", "max_prompt_length"),
        ignore=("launch.method",),
    ),
    Foreign(
        source="huggingface/alignment-handbook, recipes/accelerate_configs/deepspeed_zero3.yaml",
        text=dedent("""
        compute_environment: LOCAL_MACHINE
        deepspeed_config:
          deepspeed_multinode_launcher: standard
          offload_optimizer_device: cpu
          offload_param_device: cpu
          zero3_init_flag: true
          zero3_save_16bit_model: true
          zero_stage: 3
        distributed_type: DEEPSPEED
        downcast_bf16: 'no'
        mixed_precision: bf16
        num_machines: 1
        num_processes: 1
        """),
        cluster="dgx-a100",
        layout="zero=3,offload=params+states,recompute=none,tp=1",
        gpus=8,
        batch=8,
        model="mistral-7b",
        training="precision=bf16",
    ),
    Foreign(
        source="volcengine/verl, examples/grpo_trainer/run_qwen3moe-30b_megatron.sh",
        text="""
 HF_MODEL_PATH=Qwen/Qwen3-30B-A3B
 python3 -m verl.trainer.main_ppo --config-path=config --config-name='ppo_megatron_trainer.yaml' \\
   algorithm.adv_estimator=grpo data.train_batch_size=64 data.max_prompt_length=1024 data.max_response_length=2048 \\
   actor_rollout_ref.model.path=$HF_MODEL_PATH actor_rollout_ref.actor.optim.lr=1e-6 \\
   actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \\
   actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2 \\
   actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4 \\
   actor_rollout_ref.actor.megatron.expert_model_parallel_size=4 \\
   actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.entropy_coeff=0 \\
   actor_rollout_ref.model.enable_gradient_checkpointing=True actor_rollout_ref.rollout.n=5 \\
   actor_rollout_ref.rollout.tensor_model_parallel_size=4 actor_rollout_ref.ref.megatron.tensor_model_parallel_size=4 \\
   trainer.n_gpus_per_node=8 trainer.nnodes=4 trainer.logger=['console','wandb'] $@
        """,
        cluster="dgx-h100",
        layout="tp=4,pp=2,cp=1,ep=4,etp=4,zero=1,mbs=4,recompute=none",
        training="sequence_length=3072,global_batch_size=320,objective=grpo,reference=resident",
        open_keys=("actor_rollout_ref.model.enable_gradient_checkpointing",),
    ),
    Foreign(
        source="volcengine/verl, examples/grpo_trainer/run_qwen2-7b_math.sh",
        text="""
 gsm8k=$HOME/data/gsm8k/train.parquet
 train_files="['$gsm8k', '$gsm8k']"
 python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files="$train_files" \\
   data.train_batch_size=1024 data.max_prompt_length=1024 data.max_response_length=1024 \\
   actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct actor_rollout_ref.actor.optim.lr=1e-6 \\
   actor_rollout_ref.model.use_remove_padding=True actor_rollout_ref.actor.ppo_mini_batch_size=256 \\
   actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 actor_rollout_ref.model.enable_gradient_checkpointing=True \\
   actor_rollout_ref.actor.fsdp_config.param_offload=False \\
   actor_rollout_ref.actor.fsdp_config.optimizer_offload=False actor_rollout_ref.rollout.n=5 \\
   actor_rollout_ref.ref.fsdp_config.param_offload=True trainer.n_gpus_per_node=8 trainer.nnodes=1 $@
        """,
        cluster="dgx-h100",
        layout="tp=1,zero=3,mbs=16,recompute=full,offload=none",
        model="qwen2.5-7b",
        training="sequence_length=2048,global_batch_size=1280",
    ),
    Foreign(
        source="hiyouga/LLaMA-Factory, examples/accelerate/fsdp_config_offload.yaml",
        text=dedent("""
        compute_environment: LOCAL_MACHINE
        distributed_type: FSDP
        downcast_bf16: 'no'
        fsdp_config:
          fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
          fsdp_backward_prefetch: BACKWARD_PRE
          fsdp_offload_params: true
          fsdp_sharding_strategy: FULL_SHARD
          fsdp_use_orig_params: true
        mixed_precision: bf16
        num_machines: 1
        num_processes: 2
        """),
        cluster="dgx-a100",
        layout="zero=3,offload=optimizer,recompute=none,tp=1,cp=1",
        model="llama3-8b",
        batch=2,
        training="precision=bf16",
    ),
    Foreign(
        source="hiyouga/LLaMA-Factory, examples/extras/fsdp_qlora/llama3_lora_sft.yaml",
        text=dedent("""
        model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
        quantization_bit: 4
        stage: sft
        do_train: true
        finetuning_type: lora
        lora_target: q_proj,v_proj
        ddp_timeout: 180000000
        cutoff_len: 1024
        per_device_train_batch_size: 1
        gradient_accumulation_steps: 8
        learning_rate: 1.0e-4
        lr_scheduler_type: cosine
        warmup_ratio: 0.1
        fp16: true
        val_size: 0.1
        """),
        cluster="dgx-a100",
        layout="zero=0,mbs=1,recompute=full,offload=none",
        gpus=2,
        batch=16,
        training="precision=fp16,lora_rank=8,frozen_weights=nf4,lora_targets=[query;value]",
        open_keys=("engine", "zero"),
    ),
    Foreign(
        source="hiyouga/LLaMA-Factory, examples/extras/muon/qwen2_full_sft.yaml",
        text=dedent("""
        model_name_or_path: Qwen/Qwen2-1.5B-Instruct
        trust_remote_code: true
        stage: sft
        finetuning_type: full
        use_muon: true
        cutoff_len: 2048
        per_device_train_batch_size: 1
        gradient_accumulation_steps: 8
        learning_rate: 1.0e-5
        bf16: true
        save_only_model: false
        """),
        cluster="dgx-a100",
        layout="zero=0,mbs=1,recompute=full,offload=none",
        gpus=1,
        batch=8,
        model="qwen2.5-1.5b",
        training="precision=bf16,optimizer=muon",
        open_keys=("engine", "zero"),
    ),
    Foreign(
        source="bigscience-workshop/bigscience, train/tr11-176B-ml/tr11-176B-ml.slurm",
        text="""
 GPUS_PER_NODE=8
 NNODES=48
 TP_SIZE=4
 PP_SIZE=12
 MICRO_BATCH_SIZE=2  # was less
 GLOBAL_BATCH_SIZE=2048
 OPT=" --optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --lr 6e-5 --min-lr 6e-6 \\
   --lr-decay-style cosine --lr-decay-samples 200_000_000 --lr-warmup-samples 183_105 \\
  --clip-grad 1.0 --weight-decay 1e-1 "
 GPT=" --pp-partition-method 'type:transformer|embedding' --num-layers 70 --hidden-size 14336 \\
  --num-attention-heads 112 \\
   --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size $MICRO_BATCH_SIZE \\
   --rampup-batch-size 192 16 9_765_625 --global-batch-size $GLOBAL_BATCH_SIZE --train-samples 220_000_000 \\
   --tokenizer-type PretrainedFromHF --init-method-std 0.0048 --embed-layernorm --bf16 --seed 42 \\
   --position-embedding-type alibi --checkpoint-activations --pad-vocab-size-to 250880 $OPT "
 DS=" --deepspeed --deepspeed_config x.json --zero-stage 0 --deepspeed-activation-checkpointing "
 export LAUNCHER="python -u -m torch.distributed.run --nproc_per_node $GPUS_PER_NODE --nnodes $NNODES --max_restarts 0"
 export CMD=" `pwd`/pretrain_gpt.py --tensor-model-parallel-size $TP_SIZE \\
  --pipeline-model-parallel-size $PP_SIZE $GPT \\
   --data-impl mmap --distributed-backend nccl $DS "
 srun --wait=60 bash -c "$LAUNCHER --node_rank \\$SLURM_PROCID $CMD" 2>&1 | tee -a log
        """,
        cluster="dgx-a100",
        layout="tp=4,pp=12,cp=1,zero=1,mbs=2,sp=0,interleave=1,recompute=full,offload=none,layers_per_stage=5/6/6/6/6/6/6/6/6/6/6/5",
        model="bloom-176b",
        outcome="ran",
        training="precision=bf16,dropout=0.1,global_batch_size=2048",
        open_keys=("rampup_batch_size", "embed_layernorm"),
    ),
    Foreign(
        source="microsoft/Megatron-DeepSpeed, examples_deepspeed/pretrain_llama2_distributed.sh",
        text="""
 TP=2
 PP=2
 ZERO_STAGE=0
 NNODES=1
 MBS=4
 activation_checkpoint="false"
 cat <<EOT > ds.json
 { "train_batch_size": 32, "zero_optimization": {"stage": $ZERO_STAGE} }
 EOT
 ds_args=""
 ds_args=" --deepspeed ${ds_args}"
 ds_args=" --deepspeed_config=ds.json ${ds_args}"
 ds_args=" --zero-stage=$ZERO_STAGE ${ds_args}"
 if [ "${activation_checkpoint}" = "true" ]; then
   ds_args="--deepspeed-activation-checkpointing ${ds_args}"
   ds_args="--recompute-granularity full --recompute-method uniform ${ds_args}"
 fi
 DIST="--nproc_per_node 8 --nnodes $NNODES"
 torchrun $DIST pretrain_gpt.py --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP --num-layers 24 \\
   --hidden-size 2048 --ffn-hidden-size 5504 --num-attention-heads 16 --micro-batch-size $MBS --global-batch-size 32 \\
   --seq-length 2048 --max-position-embeddings 2048 --train-iters 250000 --lr 3e-4 --min-lr 3e-5 --weight-decay 0.1 \\
   --clip-grad 1 --lr-warmup-iters 2000 --optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --bf16 \\
   --no-query-key-layer-scaling --attention-dropout 0 --hidden-dropout 0 --use-rotary-position-embeddings \\
   --untie-embeddings-and-output-weights --swiglu --normalization rmsnorm --disable-bias-linear \\
   --num-key-value-heads 4 $ds_args
        """,
        cluster="dgx-a100",
        layout="tp=2,pp=2,cp=1,zero=1,mbs=4,sp=0,recompute=none",
        settings=("model.vocab_size=32000",),
        training="precision=bf16,dropout=0.0,steps=250000",
    ),
    Foreign(
        source="modelscope/ms-swift, examples/train/deepspeed/train_zero3.sh",
        text="""
 nproc_per_node=2
 CUDA_VISIBLE_DEVICES=0,1 \\
 NPROC_PER_NODE=$nproc_per_node \\
 swift sft --model Qwen/Qwen2-7B-Instruct --train_type lora --dataset x --num_train_epochs 1 \\
   --per_device_train_batch_size 1 --lora_rank 8 --lora_alpha 32 --learning_rate 1e-4 \\
   --gradient_accumulation_steps $(expr 16 / $nproc_per_node) --deepspeed default-zero3
        """,
        cluster="dgx-a100",
        layout="zero=3,mbs=1,recompute=full,offload=none",
        gpus=2,
        batch=16,
        model="qwen2.5-7b",
        training="precision=bf16,lora_rank=8",
    ),
    Foreign(
        source="modelscope/ms-swift, examples/train/full/qwen2_5_32b.sh",
        text="""
 NPROC_PER_NODE=8 \\
 swift sft --model Qwen/Qwen2.5-32B --train_type full --dataset x --torch_dtype bfloat16 --max_steps 2000 \\
   --streaming true --per_device_train_batch_size 1 --learning_rate 1e-5 --gradient_accumulation_steps 2 \\
   --packing true --max_length 8192 --warmup_ratio 0.05 --deepspeed zero3 --use_liger_kernel true \\
   --attn_impl flash_attn
        """,
        cluster="dgx-a100",
        layout="zero=3,mbs=1,recompute=full,offload=none",
        outcome="ran",
        training="precision=bf16,loss=fused-linear,sequence_length=8192,global_batch_size=16",
    ),
    Foreign(
        source="pytorch/torchtitan, configs/llama3_70b-8xb200-8k.toml",
        text=dedent("""
        [model]
        name = "llama3"
        flavor = "70B"
        converters = []
        [training]
        local_batch_size = 6
        seq_len = 8192
        max_norm = 1.0
        steps = 1000
        dtype = "bfloat16"
        mixed_precision_reduce = "bfloat16"
        [parallelism]
        data_parallel_replicate_degree = 1
        data_parallel_shard_degree = 8
        tensor_parallel_degree = 1
        pipeline_parallel_degree = 1
        context_parallel_degree = 1
        [activation_checkpoint]
        mode = "full"
        selective_ac_option = "op"
        [optimizer]
        name = "AdamW"
        lr = 3e-4
        eps = 1e-8
        implementation = "fused"
        early_step_in_backward = true
        [compile]
        enable = true
        components = ["model", "loss"]
        [lr_scheduler]
        warmup_steps = 200
        """),
        cluster="dgx-b200",
        layout="tp=1,pp=1,cp=1,ep=1,zero=3,hsdp=1,mbs=6,recompute=full,offload=none",
        gpus=8,
        batch=48,
        training="memory_recipe=pure-bf16,precision=bf16",
        open_keys=("optimizer.early_step_in_backward", "training.mixed_precision_reduce", "compile.enable"),
    ),
    Foreign(
        source="pytorch/torchtitan, qwen3_30b_a3b_memory_test.toml",
        text=dedent("""
        [model]
        name = "qwen3"
        flavor = "30B-A3B"
        [optimizer]
        name = "AdamW"
        lr = 8e-4
        eps = 1e-8
        state_dtype = "bfloat16"
        [lr_scheduler]
        warmup_steps = 2
        [training]
        local_batch_size = 1
        seq_len = 2048
        max_norm = 1.0
        steps = 3
        enable_cpu_offload = true
        aggressive_memory_mode = "maximum"
        [parallelism]
        data_parallel_shard_degree = -1
        fsdp_reshard_after_forward = "default"
        tensor_parallel_degree = 1
        enable_async_tensor_parallel = false
        expert_parallel_degree = 8
        expert_tensor_parallel_degree = 1
        [activation_checkpoint]
        mode = "full"
        selective_ac_option = "op"
        [compile]
        enable = true
        components = ["loss"]
        """),
        cluster="dgx-h100",
        layout="tp=1,pp=1,cp=1,ep=8,etp=1,zero=3,hsdp=1,mbs=1,recompute=full,offload=optimizer",
        gpus=8,
        batch=8,
        training="precision=bf16,steps=3",
        open_keys=("optimizer.state_dtype", "training.aggressive_memory_mode", "compile.enable"),
    ),
    Foreign(
        source="pytorch/torchtitan, torchtitan/models/deepseek_v3/train_configs/deepseek_v3_671b.toml",
        text=dedent("""
        [model]
        name = "deepseek_v3"
        flavor = "671B"
        [optimizer]
        name = "AdamW"
        lr = 2.2e-4
        eps = 1e-8
        [lr_scheduler]
        warmup_steps = 2_000
        decay_ratio = 0.8
        decay_type = "cosine"
        min_lr_factor = 0.1
        [training]
        local_batch_size = 4
        seq_len = 4096
        steps = 10_000
        [parallelism]
        data_parallel_shard_degree = -1
        pipeline_parallel_degree = 1
        pipeline_parallel_schedule = "Interleaved1F1B"
        expert_parallel_degree = 1
        [activation_checkpoint]
        mode = "selective"
        selective_ac_option = 'op'
        [compile]
        enable=true
        components = ["loss"]
        [quantize.dense.float8]
        enable_fsdp_float8_all_gather = false
        [quantize.moe.float8]
        fqns = ["experts"]
        """),
        cluster="dgx-h100",
        layout="tp=1,pp=1,ep=1,zero=3,hsdp=1,mbs=4,recompute=selective,offload=none",
        gpus=256,
        batch=1024,
        model="deepseek-v3",
        training="precision=bf16,warmup_steps=2000",
        open_keys=("compile.enable",),
    ),
    Foreign(
        source="huggingface/trl, examples/accelerate_configs/context_parallel_2gpu.yaml",
        text=dedent("""
        compute_environment: LOCAL_MACHINE
        distributed_type: FSDP
        fsdp_config:
          fsdp_activation_checkpointing: false
          fsdp_offload_params: false
          fsdp_reshard_after_forward: true
          fsdp_state_dict_type: FULL_STATE_DICT
          fsdp_version: 2
        mixed_precision: bf16
        num_machines: 1
        num_processes: 2
        parallelism_config:
          parallelism_config_dp_replicate_size: 1
          parallelism_config_dp_shard_size: 1
          parallelism_config_tp_size: 1
          parallelism_config_cp_size: 2
        """),
        cluster="dgx-h100",
        layout="zero=3,cp=2,tp=1,hsdp=1,recompute=none,offload=none",
        model="llama3-8b",
        batch=1,
        training="precision=bf16",
    ),
    Foreign(
        source="lm-sys/FastChat, scripts/train_vicuna_13b.sh",
        text="""
 torchrun --nproc_per_node=8 --master_port=20001 fastchat/train/train_mem.py \\
   --model_name_or_path ~/model_weights/llama-13b --bf16 True --num_train_epochs 3 --per_device_train_batch_size 1 \\
   --gradient_accumulation_steps 4 --learning_rate 2e-5 --weight_decay 0. --warmup_ratio 0.05 \\
   --lr_scheduler_type "cosine" --fsdp "full_shard auto_wrap" \\
   --fsdp_transformer_layer_cls_to_wrap 'LlamaDecoderLayer' --tf32 True --model_max_length 2048 \\
   --gradient_checkpointing True --lazy_preprocess True
        """,
        cluster="dgx-a100",
        layout="zero=3,mbs=1,recompute=full,offload=none,tp=1",
        model="llama2-13b",
        training="precision=bf16,global_batch_size=32,sequence_length=2048",
        open_keys=("lazy_preprocess",),
    ),
    Foreign(
        source="huggingface/open-r1, recipes/Qwen2.5-1.5B-Instruct/sft/config_demo.yaml",
        text=dedent("""
        model_name_or_path: Qwen/Qwen2.5-1.5B-Instruct
        torch_dtype: bfloat16
        attn_implementation: flash_attention_2
        dataset_configs:
        - all
        bf16: true
        eval_strategy: 'no'
        gradient_accumulation_steps: 1
        gradient_checkpointing: true
        gradient_checkpointing_kwargs:
          use_reentrant: false
        learning_rate: 1.0e-05
        lr_scheduler_type: cosine_with_min_lr
        lr_scheduler_kwargs:
          min_lr_rate: 0.1
        packing: true
        max_seq_length: 32768
        max_steps: -1
        num_train_epochs: 15
        per_device_train_batch_size: 2
        seed: 42
        use_liger: true
        warmup_ratio: 0.05
        """),
        cluster="dgx-h100",
        layout="zero=3,mbs=2,recompute=full,offload=none",
        files=_LAUNCHED,
        gpus=8,
        batch=16,
        training="precision=bf16,loss=fused-linear,sequence_length=32768,seed=42",
    ),
)
