"""Named transformers with the shapes and values that their publishers state."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import Any

from hpgo.model.arithmetic import Arithmetic, RopeScaling
from hpgo.model.blocks import Latent
from hpgo.model.transformer import Transformer


def _shape(  # noqa: PLR0917 -- a row of a table
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, **more: Any
) -> Transformer:
    return Transformer(
        layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn, vocab=vocab,
        **{"head_dim": hidden // heads, **more},
    )  # fmt: skip


def _gpt(layers: int, hidden: int, heads: int, vocab: int, **more: Any) -> Transformer:
    """Return a transformer of GPT-2's type: biases everywhere, LayerNorm, learned positions and a tied LM head."""
    plain = {"gated": False, "attention_bias": "all", "ffn_bias": True, "centred_norms": True, "tied": True}
    return _shape(layers, hidden, heads, heads, 4 * hidden, vocab, **{**plain, **more})


def _every_second(layers: int) -> tuple[int, ...]:
    return tuple(range(0, layers, 2))


def _all_but_every_sixth(layers: int) -> tuple[int, ...]:
    return tuple(at for at in range(layers) if (at + 1) % 6)


def _silu(theta: float, *, epsilon: float = 1e-6, **more: Any) -> Arithmetic:
    """Return the arithmetic of Llama and its descendants."""
    return Arithmetic(activation="silu", norm_epsilon=epsilon, rope_theta=theta, **more)


def _gemma(hidden: int, theta: float = 1e4, **more: Any) -> Arithmetic:
    return Arithmetic(
        activation="gelu_pytorch_tanh", norm_epsilon=1e-6, norm_adds_one=True, rope_theta=theta,
        embedding_scale=sqrt(hidden), **more,
    )  # fmt: skip


def _yarn(mscale: float) -> RopeScaling:
    return RopeScaling(
        rope_type="yarn", factor=40, original_max_position_embeddings=4096, beta_fast=32, beta_slow=1, mscale=mscale,
        mscale_all_dim=mscale,
    )  # fmt: skip


def _deepseek(mscale: float, **router: Any) -> Arithmetic:
    return _silu(
        1e4, rope_interleaved=True, rope_scaling=_yarn(mscale), router_aux_loss=0.001,
        router_aux_loss_per_sequence=True, **router,
    )  # fmt: skip


# These are the values of the published configurations.
_GPT2 = Arithmetic(
    activation="gelu_new", norm_epsilon=1e-5, attention_dropout=0.1, hidden_dropout=0.1, embedding_dropout=0.1
)
_NEOX = Arithmetic(
    activation="gelu_fast", norm_epsilon=1e-5, rope_theta=1e4, rotary_fraction=0.25, parallel_residual=True
)
_LLAMA_2, _LLAMA_3 = _silu(1e4, epsilon=1e-5), _silu(5e5, epsilon=1e-5)
_LLAMA_31 = replace(
    _LLAMA_3,
    rope_scaling=RopeScaling(
        rope_type="llama3", factor=8, original_max_position_embeddings=8192, low_freq_factor=1, high_freq_factor=4
    ),
)
_MIXTRAL = _silu(1e6, epsilon=1e-5, router_normalizes=True)
_QWEN = _silu(1e6)
_QWEN_EXPERTS = replace(_QWEN, router_normalizes=True, router_aux_loss=0.001)
_SOFTCAPS = {"attention_logit_softcap": 50.0, "final_logit_softcap": 30.0}
_BY_SIGMOID = {
    "router_score": "sigmoid", "router_bias": True, "router_normalizes": True, "router_scale": 2.5,
    "router_group_top": 2,
}  # fmt: skip

_ARITHMETIC: dict[str, Arithmetic] = {
    # GPT-3 is missing: its paper does not state dropout, and no configuration was published.
    "gpt-2": _GPT2, "gpt-2-xl": _GPT2, "gpt-neox-20b": _NEOX,
    "llama-2-7b": _LLAMA_2, "llama-2-13b": _LLAMA_2, "llama-2-70b": _LLAMA_2,
    "llama-3-8b": _LLAMA_3, "llama-3-70b": _LLAMA_3, "llama-3.1-405b": _LLAMA_31,
    "mistral-7b": _silu(1e4, epsilon=1e-5),
    "mixtral-8x7b": replace(_MIXTRAL, router_aux_loss=0.02),
    "mixtral-8x22b": replace(_MIXTRAL, router_aux_loss=0.001),
    "qwen2-7b": _QWEN, "qwen2.5-72b": _silu(1e6, epsilon=1e-5), "qwen3-8b": _QWEN, "qwen3-32b": _QWEN,
    "qwen3-30b-a3b": _QWEN_EXPERTS, "qwen3-235b-a22b": _QWEN_EXPERTS,
    "gemma-7b": _gemma(3072),
    "gemma-2-9b": _gemma(3584, **_SOFTCAPS),
    "gemma-2-27b": _gemma(4608, attention_scale=144**-0.5, **_SOFTCAPS),
    "gemma-3-1b": _gemma(1152, 1e6, rope_local_theta=1e4),
    "deepseek-v2-lite": _deepseek(0.707),
    "deepseek-v2": _deepseek(0.707, router_scale=16.0),
    "deepseek-v3": _deepseek(1.0, **_BY_SIGMOID),
}  # fmt: skip

_LATENT = Latent(kv_rank=512, rope_dim=64, value_dim=128, q_rank=1536)

_SHAPES: dict[str, Transformer] = {
    # Radford et al. 2019, and Brown et al. 2020 (arXiv 2005.14165, table 2.1)
    "gpt-2": _gpt(12, 768, 12, 50257, positions=1024, longest=1024),
    "gpt-2-xl": _gpt(48, 1600, 25, 50257, positions=1024, longest=1024),
    "gpt-3-175b": _gpt(96, 12288, 96, 50257, positions=2048, longest=2048),
    # Black et al. 2022 (arXiv 2204.06745)
    "gpt-neox-20b": _gpt(44, 6144, 64, 50432, tied=False, longest=2048),
    # Touvron et al. 2023 (arXiv 2307.09288)
    "llama-2-7b": _shape(32, 4096, 32, 32, 11008, 32000, longest=4096),
    "llama-2-13b": _shape(40, 5120, 40, 40, 13824, 32000, longest=4096),
    "llama-2-70b": _shape(80, 8192, 64, 8, 28672, 32000, longest=4096),
    # Llama team 2024 (arXiv 2407.21783, table 3)
    "llama-3-8b": _shape(32, 4096, 32, 8, 14336, 128256, longest=8192),
    "llama-3-70b": _shape(80, 8192, 64, 8, 28672, 128256, longest=8192),
    "llama-3.1-405b": _shape(126, 16384, 128, 8, 53248, 128256, longest=131072),
    # Jiang et al. 2023 and 2024 (arXiv 2310.06825, 2401.04088), and the configuration of Mixtral 8x22B
    "mistral-7b": _shape(32, 4096, 32, 8, 14336, 32000, window=4096, window_layers=tuple(range(32)), longest=32768),
    "mixtral-8x7b": _shape(
        32, 4096, 32, 8, 0, 32000, experts=8, experts_per_token=2, expert_ffn=14336, longest=32768
    ),
    "mixtral-8x22b": _shape(
        56, 6144, 48, 8, 0, 32768, experts=8, experts_per_token=2, expert_ffn=16384, longest=65536
    ),
    # Qwen team 2024 and 2025 (arXiv 2407.10671, 2412.15115, 2505.09388)
    "qwen2-7b": _shape(28, 3584, 28, 4, 18944, 152064, attention_bias="qkv", longest=131072),
    "qwen2.5-72b": _shape(80, 8192, 64, 8, 29568, 152064, attention_bias="qkv", longest=131072),
    "qwen3-8b": _shape(36, 4096, 32, 8, 12288, 151936, head_dim=128, head_norms=True, longest=40960),
    "qwen3-32b": _shape(64, 5120, 64, 8, 25600, 151936, head_dim=128, head_norms=True, longest=40960),
    "qwen3-30b-a3b": _shape(
        48, 2048, 32, 4, 0, 151936, head_dim=128, head_norms=True, experts=128, experts_per_token=8, expert_ffn=768,
        longest=40960,
    ),
    "qwen3-235b-a22b": _shape(
        94, 4096, 64, 4, 0, 151936, head_dim=128, head_norms=True, experts=128, experts_per_token=8, expert_ffn=1536,
        longest=40960,
    ),
    # Gemma team 2024 and 2025 (arXiv 2403.08295, 2408.00118, 2503.19786)
    "gemma-7b": _shape(28, 3072, 16, 16, 24576, 256000, head_dim=256, tied=True, longest=8192),
    "gemma-2-9b": _shape(
        42, 3584, 16, 8, 14336, 256000, head_dim=256, tied=True, norms_per_layer=4, window=4096,
        window_layers=_every_second(42), longest=8192,
    ),
    "gemma-2-27b": _shape(
        46, 4608, 32, 16, 36864, 256000, head_dim=128, tied=True, norms_per_layer=4, window=4096,
        window_layers=_every_second(46), longest=8192,
    ),
    "gemma-3-1b": _shape(
        26, 1152, 4, 1, 6912, 262144, head_dim=256, tied=True, norms_per_layer=4, head_norms=True, window=512,
        window_layers=_all_but_every_sixth(26), longest=32768,
    ),
    # DeepSeek-AI 2024 (arXiv 2405.04434, 2412.19437), without the layers that predict further tokens
    "deepseek-v2-lite": _shape(
        27, 2048, 16, 16, 10944, 102400, head_dim=192, latent=replace(_LATENT, q_rank=None), experts=64,
        experts_per_token=6, expert_ffn=1408, shared_ffn=2816, dense_layers=(0,), longest=163840,
    ),
    "deepseek-v2": _shape(
        60, 5120, 128, 128, 12288, 102400, head_dim=192, latent=_LATENT, experts=160, experts_per_token=6,
        expert_ffn=1536, shared_ffn=3072, expert_groups=8, groups_per_token=3, dense_layers=(0,), longest=163840,
    ),
    "deepseek-v3": _shape(
        61, 7168, 128, 128, 18432, 129280, head_dim=192, latent=_LATENT, experts=256, experts_per_token=8,
        expert_ffn=2048, shared_ffn=2048, expert_groups=8, groups_per_token=4, dense_layers=(0, 1, 2), longest=163840,
    ),
}  # fmt: skip

TRANSFORMERS: dict[str, Transformer] = {
    name: replace(shape, name=name, arithmetic=_ARITHMETIC.get(name)) for name, shape in _SHAPES.items()
}
"""All named transformers by name."""
