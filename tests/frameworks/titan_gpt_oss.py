"""Comparison of torchtitan's GPT-OSS with that of transformers: the same weights must give the same logits."""

from __future__ import annotations

from typing import Any

import torch
from torchtitan.models.common.moe import GroupedExperts
from transformers import GptOssConfig, GptOssForCausalLM

TOKENS = 48
"""Tokens of each of two sequences: more than the window, so that it matters."""
_LAST = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}
_NAMES = {
    "attention.wo": "self_attn.o_proj",
    "attention.qkv_linear.wq": "self_attn.q_proj",
    "attention.qkv_linear.wk": "self_attn.k_proj",
    "attention.qkv_linear.wv": "self_attn.v_proj",
    "attention.sinks": "self_attn.sinks",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "moe.router.gate": "mlp.router",
    "moe.routed_experts.inner_experts.mlp1_weight_EGD": "mlp.experts.gate_up_proj",
    "moe.routed_experts.inner_experts.mlp1_bias_EG": "mlp.experts.gate_up_proj_bias",
    "moe.routed_experts.inner_experts.mlp2_weight_EDF": "mlp.experts.down_proj",
    "moe.routed_experts.inner_experts.mlp2_bias_ED": "mlp.experts.down_proj_bias",
}
"""Names of the parts of a layer in both models."""


def check_logits(config: dict[str, Any], model: Any) -> None:
    """Raise AssertionError unless the configuration of a model of torchtitan computes what `config.json` describes."""
    torch.manual_seed(0)
    named = {name: value for name, value in config.items() if name != "model_type"}
    wanted = GptOssForCausalLM(GptOssConfig(**named, attn_implementation="eager")).float()
    found = model.build().float()
    held = dict(wanted.named_parameters())
    with torch.no_grad():
        for value in held.values():  # large enough that sinks, clamps and routers matter
            value.normal_(std=0.3)
    found.load_state_dict({name: _of(name, held) for name in found.state_dict()})
    GroupedExperts._grouped_mm = exact
    words = torch.randint(config["vocab_size"], (2, TOKENS))
    positions = torch.arange(TOKENS).expand(2, TOKENS)
    rounded, torch.Tensor.bfloat16 = torch.Tensor.bfloat16, lambda value: value  # experts of torchtitan round
    try:
        with torch.no_grad():
            logits = found(words, positions=positions, attention_masks=found.get_attention_masks(positions))
            torch.testing.assert_close(logits, wanted(words).logits, rtol=1e-5, atol=1e-5)
    finally:
        torch.Tensor.bfloat16 = rounded


def _of(name: str, held: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the value of a parameter of torchtitan's model."""
    if name in _LAST:
        return held[_LAST[name]]
    _, layer, part = name.split(".", 2)
    inner, _, kind = part.rpartition(".")
    known = f"{_NAMES[inner]}.{kind}" if inner in _NAMES else _NAMES[part]
    value = held[f"model.layers.{layer}.{known}"]
    return value.transpose(1, 2) if part.endswith(("_EGD", "_EDF")) else value


def exact(_: Any, *, A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:  # noqa: N803
    """`GroupedExperts._grouped_mm` in 32 bits."""
    ends = offs.tolist()
    each = [A[begin:end] @ B_t[at] for at, (begin, end) in enumerate(zip([0, *ends], ends, strict=False))]
    return torch.cat([*each, A.new_zeros(len(A) - ends[-1], B_t.shape[-1])])
