"""Public models at a small size: the structure and the arithmetic of each `config.json`, with few and narrow layers.

Counts (layers, heads, experts) and widths are ours. All other values are those of the published configuration.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import hpgo
from hpgo.jobs.parts import parts_of

if TYPE_CHECKING:
    from pathlib import Path

    from hpgo.export.targets import Target

SEQ_LENGTH = 64
GPUS = hpgo.Cluster.preset("h100:1")


@dataclass(frozen=True)
class SmallModel:
    """A model by its `config.json`, and the configurations that frameworks train it with."""

    name: str
    config: dict[str, Any]
    megatron: dict[str, Any] = field(default_factory=dict)
    """Arguments of `estimate_llm` for Megatron-LM; empty if it is refused there."""
    torchtitan: dict[str, Any] = field(default_factory=dict)
    deepspeed: dict[str, Any] = field(default_factory=dict)

    def read(self, folder: Path) -> hpgo.Transformer:
        """Return the transformer that hpgo reads from the file."""
        path = folder / f"{self.name}.json"
        path.write_text(json.dumps(self.config), encoding="utf-8")
        return hpgo.Transformer.read(path)

    def plan(self, folder: Path, framework: str, **changes: int) -> hpgo.LlmPlan:
        """Return the plan that `framework` trains, with `changes` of its options."""
        model = self.read(folder)
        options = {"zero_stage": 0, **getattr(self, framework), **changes}
        estimate = hpgo.estimate_llm(model, GPUS, seq_length=SEQ_LENGTH, **options)
        return hpgo.LlmPlan.of(estimate, model, GPUS)

    def write(self, plan: hpgo.LlmPlan, target: Target, folder: Path) -> list[str]:
        """Write a job folder's files of the framework, and return the words of its smoke run."""
        parts = parts_of(plan, target)
        folder.mkdir(exist_ok=True)
        for file in parts.files:
            (folder / file.name).write_text(file.text, encoding="utf-8")
        texts = [file.text for file in parts.files if file.name in parts.arguments]
        return [word for text in (*texts, parts.smoke) for word in shlex.split(text, comments=True)]


_LLAMA = {
    "model_type": "llama", "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 224, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "initializer_range": 0.02, "attention_bias": False,
    "attention_dropout": 0.0, "mlp_bias": False, "tie_word_embeddings": False,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192},
}  # fmt: skip
_QWEN3 = {
    "model_type": "qwen3", "hidden_act": "silu", "hidden_size": 64, "head_dim": 16, "intermediate_size": 192,
    "num_hidden_layers": 5, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 512,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "rope_scaling": None,
    "initializer_range": 0.02, "attention_bias": False, "attention_dropout": 0.0, "tie_word_embeddings": False,
    "use_sliding_window": False, "sliding_window": None, "max_window_layers": 5,
}  # fmt: skip
_DEEPSEEK = {
    "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 192, "moe_intermediate_size": 32,
    "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "vocab_size": 512, "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6, "rope_theta": 10000, "initializer_range": 0.02, "attention_bias": False,
    "attention_dropout": 0.0, "aux_loss_alpha": 0.001, "seq_aux": True, "moe_layer_freq": 1,
    "tie_word_embeddings": False,
}  # fmt: skip
_YARN = {
    "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip

_QWEN3_NEXT = {
    "hidden_act": "silu", "hidden_size": 64, "head_dim": 16, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 262144, "rms_norm_eps": 1e-6,
    "rope_theta": 10000000, "rope_scaling": None, "partial_rotary_factor": 0.25, "initializer_range": 0.02,
    "attention_bias": False, "attention_dropout": 0.0, "tie_word_embeddings": False, "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}  # fmt: skip
_NEMOTRON_H = {
    "model_type": "nemotron_h", "mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "hidden_size": 64,
    "head_dim": 16, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 512,
    "max_position_embeddings": 8192, "layer_norm_epsilon": 1e-5, "initializer_range": 0.02, "attention_bias": False,
    "attention_dropout": 0.0, "hidden_dropout": 0.0, "mlp_bias": False, "use_bias": False, "use_conv_bias": True,
    "tie_word_embeddings": False, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 4,
    "conv_kernel": 4, "chunk_size": 16,
}  # fmt: skip

MODELS = (
    SmallModel(
        "llama-3.1-8b",
        _LLAMA,
        megatron={"devices": 4, "tp": 2, "pp": 2, "vpp": 2, "sequence_parallel": True, "global_batch_size": 4},
        torchtitan={"devices": 2, "pp": 2, "global_batch_size": 4},
        deepspeed={
            "framework": "deepspeed", "devices": 4, "tp": 2, "zero_stage": 3, "micro_batch_size": 8,
            "global_batch_size": 16,
        },
    ),
    SmallModel(
        "mistral-7b",
        {
            "model_type": "mistral", "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 224,
            "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 500,
            "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "sliding_window": 32,
            "initializer_range": 0.02, "attention_dropout": 0.0, "tie_word_embeddings": False,
        },
        megatron={"devices": 2, "zero_stage": 1, "global_batch_size": 4, "micro_batch_size": 2},
        deepspeed={
            "framework": "deepspeed", "devices": 4, "tp": 2, "zero_stage": 1, "micro_batch_size": 8,
            "global_batch_size": 32,
        },
    ),
    SmallModel(
        "qwen2.5-7b",
        {
            "model_type": "qwen2", "hidden_act": "silu", "hidden_size": 56, "intermediate_size": 296,
            "num_hidden_layers": 4, "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 512,
            "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
            "initializer_range": 0.02, "attention_dropout": 0.0, "tie_word_embeddings": False,
            "use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 4,
        },
        megatron={"devices": 4, "tp": 2, "zero_stage": 1, "recompute": "selective", "global_batch_size": 4},
        torchtitan={"devices": 2, "pp": 2, "global_batch_size": 16},
        deepspeed={"devices": 2, "zero_stage": 2, "micro_batch_size": 8, "global_batch_size": 16},
    ),
    SmallModel(
        "qwen3-8b",
        _QWEN3,
        megatron={
            "devices": 2, "pp": 2, "first_rank_layers": 3, "last_rank_layers": 2, "recompute": "full",
            "global_batch_size": 4,
        },
        torchtitan={"devices": 2, "zero_stage": 3, "recompute": "full", "global_batch_size": 4},
        deepspeed={"devices": 2, "zero_stage": 3, "recompute": "full", "micro_batch_size": 8, "global_batch_size": 16},
    ),
    SmallModel(
        "phi-4",  # with its matrices apart, as in the published conversions to Llama's keys
        {
            "model_type": "llama", "hidden_act": "silu", "hidden_size": 80, "intermediate_size": 280,
            "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 512,
            "max_position_embeddings": 16384, "rms_norm_eps": 1e-5, "rope_theta": 250000, "rope_scaling": None,
            "initializer_range": 0.02, "attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False,
            "tie_word_embeddings": False,
        },
        megatron={"devices": 2, "pp": 2, "global_batch_size": 4},
        torchtitan={"devices": 2, "pp": 2, "global_batch_size": 4},
        deepspeed={"devices": 2, "pp": 2, "micro_batch_size": 8, "global_batch_size": 16},
    ),
    SmallModel(
        "gpt2-xl",
        {
            "model_type": "gpt2", "activation_function": "gelu_new", "n_embd": 100, "n_head": 5, "n_layer": 4,
            "n_positions": 128, "n_ctx": 128, "vocab_size": 257, "layer_norm_epsilon": 1e-5,
            "initializer_range": 0.02, "attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1,
        },
        megatron={"devices": 2, "pp": 2, "global_batch_size": 4},
        deepspeed={"devices": 2, "zero_stage": 2, "micro_batch_size": 8, "global_batch_size": 16},
    ),
    SmallModel(
        "pythia-6.9b",
        {
            "model_type": "gpt_neox", "hidden_act": "gelu", "hidden_size": 64, "intermediate_size": 256,
            "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 512, "max_position_embeddings": 2048,
            "layer_norm_eps": 1e-5, "rotary_pct": 0.25, "rotary_emb_base": 10000, "use_parallel_residual": True,
            "initializer_range": 0.02, "attention_bias": True, "attention_dropout": 0.0, "hidden_dropout": 0.0,
            "tie_word_embeddings": False,
        },
        deepspeed={"devices": 2, "zero_stage": 1, "micro_batch_size": 8, "global_batch_size": 16},
    ),
    SmallModel(
        "redpajama-3b",
        {
            "model_type": "gpt_neox", "hidden_act": "gelu", "hidden_size": 64, "intermediate_size": 256,
            "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 512, "max_position_embeddings": 2048,
            "layer_norm_eps": 1e-5, "rotary_pct": 0.5, "rotary_emb_base": 10000, "use_parallel_residual": False,
            "initializer_range": 0.02, "attention_bias": True, "attention_dropout": 0.0, "hidden_dropout": 0.0,
            "tie_word_embeddings": False,
        },
        megatron={"devices": 2, "tp": 2, "sequence_parallel": False, "global_batch_size": 4},
        deepspeed={"devices": 2, "zero_stage": 2, "micro_batch_size": 8, "global_batch_size": 16},
    ),
    SmallModel(
        "gemma-7b",
        {
            "model_type": "gemma", "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 48, "head_dim": 16, "intermediate_size": 384, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 512, "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "initializer_range": 0.02, "attention_bias": False,
            "attention_dropout": 0.0,
        },
        deepspeed={"devices": 2, "zero_stage": 3, "micro_batch_size": 8, "global_batch_size": 16},
    ),
    SmallModel(
        "mixtral-8x7b",
        {
            "model_type": "mixtral", "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 112,
            "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 512,
            "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "sliding_window": None,
            "initializer_range": 0.02, "attention_dropout": 0.0, "tie_word_embeddings": False,
            "num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02,
            "output_router_logits": False,
        },
        megatron={"devices": 2, "ep": 2, "zero_stage": 1, "global_batch_size": 4},
        torchtitan={"devices": 2, "ep": 2, "zero_stage": 3, "global_batch_size": 4},
        deepspeed={"devices": 2, "zero_stage": 2, "micro_batch_size": 8, "global_batch_size": 16},
    ),
    SmallModel(
        "qwen3-30b-a3b",
        _QWEN3 | {
            "model_type": "qwen3_moe", "num_hidden_layers": 4, "max_window_layers": 4, "num_experts": 16,
            "num_experts_per_tok": 4, "moe_intermediate_size": 32, "norm_topk_prob": True, "decoder_sparse_step": 1,
            "mlp_only_layers": [], "router_aux_loss_coef": 0.001, "output_router_logits": False,
        },
        megatron={"devices": 4, "ep": 2, "pp": 2, "vpp": 2, "zero_stage": 1, "global_batch_size": 8},
        torchtitan={
            "devices": 4, "tp": 2, "sequence_parallel": True, "ep": 2, "zero_stage": 3, "global_batch_size": 4,
        },
        deepspeed={"devices": 2, "zero_stage": 3, "micro_batch_size": 8, "global_batch_size": 16},
    ),
    SmallModel(
        "deepseek-v2-lite",
        _DEEPSEEK | {
            "model_type": "deepseek_v2", "num_hidden_layers": 4, "q_lora_rank": None, "n_routed_experts": 8,
            "n_shared_experts": 2, "num_experts_per_tok": 3, "n_group": 1, "topk_group": 1, "topk_method": "greedy",
            "first_k_dense_replace": 1, "norm_topk_prob": False, "scoring_func": "softmax",
            "routed_scaling_factor": 1.0, "rope_scaling": _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        },
        megatron={"devices": 4, "ep": 2, "pp": 2, "zero_stage": 1, "global_batch_size": 4},
        torchtitan={"devices": 2, "pp": 2, "global_batch_size": 4},
        deepspeed={"devices": 2, "zero_stage": 1, "micro_batch_size": 8, "global_batch_size": 16},
    ),
    SmallModel(
        "deepseek-v3",
        _DEEPSEEK | {
            "model_type": "deepseek_v3", "num_hidden_layers": 5, "q_lora_rank": 24, "n_routed_experts": 16,
            "n_shared_experts": 1, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "topk_method": "noaux_tc",
            "first_k_dense_replace": 2, "norm_topk_prob": True, "scoring_func": "sigmoid",
            "routed_scaling_factor": 2.5, "rope_scaling": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
            "num_nextn_predict_layers": 1,
        },
        megatron={"devices": 4, "ep": 2, "pp": 2, "zero_stage": 1, "global_batch_size": 4},
    ),
    SmallModel(
        "kimi-k2",  # without its YaRN, for whose `beta_fast` Megatron-LM has no argument
        _DEEPSEEK | {
            "model_type": "deepseek_v3", "num_hidden_layers": 4, "q_lora_rank": 24, "n_routed_experts": 12,
            "n_shared_experts": 1, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc",
            "first_k_dense_replace": 1, "norm_topk_prob": True, "scoring_func": "sigmoid",
            "routed_scaling_factor": 2.827, "rope_theta": 50000.0, "max_position_embeddings": 131072,
            "rope_scaling": None,
            "num_nextn_predict_layers": 0,
        },
        megatron={"devices": 2, "ep": 2, "zero_stage": 1, "global_batch_size": 4},
        torchtitan={"devices": 2, "ep": 2, "zero_stage": 2, "global_batch_size": 2},
        deepspeed={"devices": 2, "zero_stage": 2, "micro_batch_size": 8, "global_batch_size": 16},
    ),
    SmallModel(
        "gpt-oss-20b",
        {
            "model_type": "gpt_oss", "hidden_act": "silu", "hidden_size": 64, "head_dim": 16, "intermediate_size": 32,
            "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 512,
            "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 150000, "sliding_window": 16,
            "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096,
                             "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
            "initializer_range": 0.02, "attention_bias": True, "attention_dropout": 0.0, "tie_word_embeddings": False,
            "num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.9,
            "output_router_logits": False, "swiglu_limit": 7.0,
        },
        megatron={"devices": 4, "ep": 2, "pp": 2, "zero_stage": 1, "global_batch_size": 4},
        torchtitan={
            "devices": 4, "tp": 2, "ep": 2, "sequence_parallel": True, "zero_stage": 3, "global_batch_size": 4,
        },
    ),
    SmallModel(
        "glm-4.5-air",
        {
            "model_type": "glm4_moe", "hidden_act": "silu", "hidden_size": 64, "head_dim": 16,
            "intermediate_size": 192, "moe_intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 8,
            "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
            "rope_theta": 1000000, "rope_scaling": None, "partial_rotary_factor": 0.5, "initializer_range": 0.02,
            "attention_bias": True, "attention_dropout": 0.0, "use_qk_norm": False, "tie_word_embeddings": False,
            "n_routed_experts": 12, "n_shared_experts": 1, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1,
            "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
            "num_nextn_predict_layers": 1,
        },
        megatron={"devices": 4, "ep": 2, "pp": 2, "zero_stage": 1, "global_batch_size": 4},
    ),
    SmallModel(
        "glm-4.5",  # with norms of queries and keys, and without its layer of multi-token prediction
        {
            "model_type": "glm4_moe", "hidden_act": "silu", "hidden_size": 64, "head_dim": 16,
            "intermediate_size": 192, "moe_intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 8,
            "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
            "rope_theta": 1000000, "rope_scaling": None, "partial_rotary_factor": 0.5, "initializer_range": 0.02,
            "attention_bias": True, "attention_dropout": 0.0, "use_qk_norm": True, "tie_word_embeddings": False,
            "n_routed_experts": 12, "n_shared_experts": 1, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1,
            "first_k_dense_replace": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
            "num_nextn_predict_layers": 0,
        },
        megatron={"devices": 2, "ep": 2, "zero_stage": 1, "global_batch_size": 4},
        deepspeed={"devices": 2, "zero_stage": 1, "micro_batch_size": 8, "global_batch_size": 16},
    ),
    SmallModel(
        "seed-oss-36b",  # without its dropout, because Megatron-LM's option is that of embeddings, too
        {
            "model_type": "seed_oss", "hidden_act": "silu", "hidden_size": 64, "head_dim": 16,
            "intermediate_size": 224, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
            "vocab_size": 512, "max_position_embeddings": 524288, "rms_norm_eps": 1e-6, "rope_theta": 10000000.0,
            "rope_scaling": {"rope_type": "default"}, "initializer_range": 0.02, "attention_bias": True,
            "attention_out_bias": False, "attention_dropout": 0.0, "residual_dropout": 0.0, "mlp_bias": False,
            "tie_word_embeddings": False,
        },
        megatron={"devices": 4, "tp": 2, "pp": 2, "global_batch_size": 4},
        deepspeed={"devices": 2, "zero_stage": 3, "micro_batch_size": 8, "global_batch_size": 16},
    ),
    SmallModel(
        "smollm3-3b",
        {
            "model_type": "smollm3", "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 224,
            "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 512,
            "max_position_embeddings": 65536, "rms_norm_eps": 1e-6, "rope_theta": 5000000.0, "rope_scaling": None,
            "initializer_range": 0.02, "attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False,
            "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 2, "use_sliding_window": False,
            "sliding_window": None, "tie_word_embeddings": True,
        },
        megatron={"devices": 2, "pp": 2, "vpp": 2, "global_batch_size": 4},
        deepspeed={"devices": 2, "zero_stage": 2, "micro_batch_size": 8, "global_batch_size": 16},
    ),
    SmallModel(
        "ernie-4.5-0.3b",
        {
            "model_type": "ernie4_5", "hidden_act": "silu", "hidden_size": 64, "head_dim": 16,
            "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
            "vocab_size": 512, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
            "rope_scaling": None, "initializer_range": 0.02, "use_bias": False, "tie_word_embeddings": True,
        },
        megatron={"devices": 2, "tp": 2, "global_batch_size": 4},
        torchtitan={"devices": 2, "zero_stage": 3, "global_batch_size": 4},
        deepspeed={
            "framework": "deepspeed", "devices": 2, "tp": 2, "zero_stage": 0, "micro_batch_size": 8,
            "global_batch_size": 8,
        },
    ),
    SmallModel(
        "phi-3-mini-4k",
        {
            "model_type": "phi3", "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 192,
            "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 512,
            "max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0, "rope_scaling": None, "sliding_window": 32, "initializer_range": 0.02,
            "attention_bias": False, "attention_dropout": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
            "tie_word_embeddings": False, "pad_token_id": 0,
        },
        megatron={"devices": 2, "zero_stage": 1, "global_batch_size": 4},
        deepspeed={"devices": 2, "zero_stage": 2, "micro_batch_size": 8, "global_batch_size": 16},
    ),
    SmallModel(
        "starcoder2-7b",
        {
            "model_type": "starcoder2", "hidden_act": "gelu_pytorch_tanh", "hidden_size": 72,
            "intermediate_size": 288, "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2,
            "vocab_size": 512, "max_position_embeddings": 16384, "norm_epsilon": 1e-5, "rope_theta": 1000000,
            "sliding_window": 32, "initializer_range": 0.018042, "attention_dropout": 0.1, "residual_dropout": 0.1,
            "embedding_dropout": 0.1, "use_bias": True, "tie_word_embeddings": False,
        },
        megatron={"devices": 2, "pp": 2, "global_batch_size": 4},
        deepspeed={"devices": 2, "zero_stage": 1, "micro_batch_size": 8, "global_batch_size": 16},
    ),
    SmallModel(
        "qwen3-next-80b-a3b",
        _QWEN3_NEXT | {
            "model_type": "qwen3_next", "intermediate_size": 192, "num_experts": 12, "num_experts_per_tok": 4,
            "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "norm_topk_prob": True,
            "decoder_sparse_step": 1, "mlp_only_layers": [], "router_aux_loss_coef": 0.001,
            "output_router_logits": False,
        },
        megatron={"devices": 2, "ep": 2, "zero_stage": 1, "global_batch_size": 4},
        deepspeed={"devices": 2, "zero_stage": 2, "micro_batch_size": 8, "global_batch_size": 16},
    ),
    SmallModel(
        "qwen3.5-27b",  # the decoder, without its encoder of images
        _QWEN3_NEXT | {"model_type": "qwen3_5_text", "intermediate_size": 192},
        megatron={"devices": 2, "tp": 2, "sequence_parallel": False, "global_batch_size": 4},
        deepspeed={"devices": 2, "zero_stage": 1, "micro_batch_size": 8, "global_batch_size": 16},
    ),
    SmallModel(
        "nemotron-h-8b",
        _NEMOTRON_H | {"hybrid_override_pattern": "M-M*-M-M", "intermediate_size": 208},
        megatron={"devices": 2, "pp": 2, "global_batch_size": 4},
        deepspeed={"devices": 2, "zero_stage": 2, "micro_batch_size": 8, "global_batch_size": 16},
    ),
    SmallModel(
        "nemotron-3-nano",
        _NEMOTRON_H | {
            "hybrid_override_pattern": "MEM*EME", "intermediate_size": 32, "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 64, "n_routed_experts": 12, "n_shared_experts": 1,
            "num_experts_per_tok": 3, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
        },
        megatron={"devices": 2, "ep": 2, "zero_stage": 1, "global_batch_size": 4},
        deepspeed={"devices": 2, "zero_stage": 1, "micro_batch_size": 8, "global_batch_size": 16},
    ),
    SmallModel(
        "olmoe-1b-7b",
        {
            "model_type": "olmoe", "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 32,
            "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 512,
            "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "rope_scaling": None,
            "initializer_range": 0.02, "attention_bias": False, "attention_dropout": 0.0, "clip_qkv": None,
            "tie_word_embeddings": False, "num_experts": 12, "num_experts_per_tok": 4, "norm_topk_prob": False,
            "router_aux_loss_coef": 0.01, "output_router_logits": False,
        },
        deepspeed={"devices": 2, "zero_stage": 2, "micro_batch_size": 8, "global_batch_size": 16},
    ),
    SmallModel(
        "olmo-2-7b",
        {
            "model_type": "olmo2", "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 176,
            "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 512,
            "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 500000, "rope_scaling": None,
            "initializer_range": 0.02, "attention_bias": False, "attention_dropout": 0.0,
            "tie_word_embeddings": False,
        },
        torchtitan={"devices": 2, "zero_stage": 3, "recompute": "full", "global_batch_size": 4},
        deepspeed={"devices": 2, "zero_stage": 1, "micro_batch_size": 8, "global_batch_size": 16},
    ),
    SmallModel(
        "olmo-7b",
        {
            "model_type": "olmo", "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 176,
            "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 512,
            "max_position_embeddings": 2048, "rope_theta": 10000.0, "rope_scaling": None, "clip_qkv": None,
            "initializer_range": 0.02, "attention_bias": False, "attention_dropout": 0.0,
            "tie_word_embeddings": False,
        },
        torchtitan={"devices": 4, "pp": 2, "vpp": 2, "zero_stage": 2, "global_batch_size": 32},
        deepspeed={"devices": 2, "zero_stage": 2, "micro_batch_size": 8, "global_batch_size": 16},
    ),
    SmallModel(
        "minimax-m2",
        {
            "model_type": "minimax_m2", "hidden_act": "silu", "hidden_size": 64, "head_dim": 16,
            "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
            "vocab_size": 512, "max_position_embeddings": 196608, "rms_norm_eps": 1e-6, "rope_theta": 5000000,
            "initializer_range": 0.02, "attention_dropout": 0.0, "tie_word_embeddings": False,
            "num_local_experts": 12, "num_experts_per_tok": 4, "router_aux_loss_coef": 0.001,
            "output_router_logits": False, "router_jitter_noise": 0.0,
        },
        deepspeed={"devices": 2, "zero_stage": 1, "micro_batch_size": 8, "global_batch_size": 16},
    ),
    SmallModel(
        "granite-3.1-8b",
        {
            "model_type": "granite", "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 192,
            "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 512,
            "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 10000000.0, "rope_scaling": None,
            "initializer_range": 0.02, "attention_bias": False, "attention_dropout": 0.1, "mlp_bias": False,
            "embedding_multiplier": 12.0, "attention_multiplier": 0.0078125, "residual_multiplier": 0.22,
            "logits_scaling": 16.0, "tie_word_embeddings": True,
        },
        deepspeed={"devices": 2, "zero_stage": 3, "micro_batch_size": 8, "global_batch_size": 16},
    ),
)  # fmt: skip
