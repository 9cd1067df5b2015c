"""The values of a transformer that change its results, but neither time nor memory.

Two models of equal shape take the same time and memory even if their rotary base, norm epsilon or router score differ.
They are different models, so an export has to state these values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hpgo.base.messages import did_you_mean, shorten
from hpgo.base.validated import check_fields
from hpgo.errors import ArgumentError

RouterScore = Literal["softmax", "sigmoid"]
ACTIVATIONS = (
    "gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh", "gelu_pytorch_tanh",
    "hardswish", "laplace", "leaky_relu", "linear", "mish", "quick_gelu", "relu", "relu2", "relu6", "sigmoid", "silu",
    "sqrtsoftplus", "swish", "tanh",
)  # fmt: skip
"""Activation functions of transformers, without `prelu` and `xielu`, which have parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Scaling of rotary position embeddings (RoPE) to longer sequences; the fields have Hugging Face's names.

    None in a field means that the model's configuration does not state it. Raises ArgumentError for a factor that is
    not positive.

    >>> RopeScaling(rope_type="yarn", factor=40, original_max_position_embeddings=4096).mscale_all_dim is None
    True
    """

    rope_type: str
    """Rule of the scaling: linear, dynamic, yarn, longrope, llama3, proportional or mrope."""
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    """Maximum sequence length in tokens of the training before the scaling."""
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    """Factor of the rotated queries and keys. None: it follows from `factor`, `mscale` and `mscale_all_dim`."""
    mscale: float | None = None
    mscale_all_dim: float | None = None
    """YaRN's m in latent attention: scores are multiplied by (0.1 × m × ln(factor) + 1)². None: they are not."""
    truncate: bool | None = None
    """Whether YaRN rounds the limits of its ramp to whole dimensions. None means True."""
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None
    mrope_section: tuple[int, ...] | None = None
    """Number of frequencies that encode time, height and width, in models of images."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("factor", "original_max_position_embeddings"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise ArgumentError(f"{name} of the RoPE scaling is {value}, but it must be positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """The values of a transformer that change its results, but neither time nor memory of a step.

    Defaults are the values of a plain Llama. Raises ArgumentError for values outside their range, such as a negative
    epsilon.

    >>> Arithmetic(activation="silu", norm_epsilon=1e-5, rope_theta=500_000).router_score
    'softmax'
    """

    activation: str
    """Activation function of the feed-forward networks by Hugging Face's name: silu, gelu, gelu_pytorch_tanh, …"""
    glu_clamp: float | None = None
    """Limit of the two factors of gated feed-forward networks (GPT-OSS). None: they are not clamped.

    The factor with the activation has this maximum, the other one also the negative minimum.
    """
    glu_offset: float = 0.0
    """Addend of the factor of gated feed-forward networks that has no activation (GPT-OSS)."""
    norm_epsilon: float
    norm_adds_one: bool = False
    """Whether norms multiply by 1 + weight, and weights start at 0 (Gemma)."""
    rope_theta: float | None = None
    """Base of the rotary frequencies. None: positions are learned."""
    rope_local_theta: float | None = None
    """Base of the rotary frequencies in layers with a sliding window, where `rope_scaling` does not apply.

    None: layers with a window use `rope_theta`, too.
    """
    rotary_fraction: float = 1.0
    """Share of each head's dimensions that is rotated."""
    no_rope_layers: tuple[int, ...] = ()
    """Indices of the layers whose attention rotates nothing, counted from 0, in a model with a `rope_theta`."""
    rope_interleaved: bool = False
    """Whether neighboring dimensions are rotated together, instead of dimension *i* and *i* + half (DeepSeek)."""
    rope_scaling: RopeScaling | None = None
    parallel_residual: bool = False
    """Whether attention and feed-forward network both read the layer's input (GPT-NeoX)."""
    attention_scale: float | None = None
    """Factor of the scores before the softmax. None means 1 / sqrt(head_dim)."""
    attention_scale_by_layer: bool = False
    """Whether scores of layer *i*, counted from 0, are also divided by *i* + 1 (an option of GPT-2)."""
    attention_logit_softcap: float | None = None
    """Cap of the attention scores, which become cap × tanh(score / cap). None: scores are not capped."""
    final_logit_softcap: float | None = None
    """Cap of the LM head's logits, which become cap × tanh(logit / cap). None: logits are not capped."""
    embedding_scale: float = 1.0
    """Factor of token embeddings, which is sqrt(hidden) in Gemma."""
    attention_dropout: float = 0.0
    """Fraction of attention weights that dropout sets to 0 in training."""
    hidden_dropout: float = 0.0
    """Fraction of the outputs of attention and feed-forward networks that dropout sets to 0 in training."""
    embedding_dropout: float = 0.0
    router_score: RouterScore = "softmax"
    """Function that turns the router's logits over all experts into a token's scores."""
    router_normalizes: bool = False
    """Whether the scores of the chosen experts are divided by their sum."""
    router_scale: float = 1.0
    """Factor of the chosen experts' scores, after `router_normalizes`."""
    router_bias: bool = False
    """Whether experts are chosen by score plus a bias per expert, but weighted by the score alone (DeepSeek-V3)."""
    router_group_top: int = 1
    """Number of best scores in a group of experts whose sum is the group's score, if tokens choose groups first."""
    router_aux_loss: float = 0.0
    """Coefficient of the load-balancing loss."""
    router_aux_loss_per_sequence: bool = False
    """Whether the load-balancing loss is computed per sequence instead of per micro-batch."""
    router_jitter: float = 0.0
    """Jitter j of the experts' inputs, which training multiplies by a random number from 1 − j to 1 + j."""
    init_std: float = 0.02
    """Standard deviation of the initial weights."""
    other: tuple[str, ...] = ()
    """Descriptions of values that have no field here, such as multipliers of residuals. No export can state them."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.activation not in ACTIVATIONS:
            raise ArgumentError(
                f"there is no activation function `{shorten(self.activation)}`",
                did_you_mean(self.activation, ACTIVATIONS),
                code="unknown_name",
            )
        for name in (
            "norm_epsilon", "rope_theta", "rope_local_theta", "rotary_fraction", "attention_scale", "glu_clamp",
            "attention_logit_softcap", "final_logit_softcap", "embedding_scale", "router_scale", "router_group_top",
        ):  # fmt: skip
            if (value := getattr(self, name)) is not None and value <= 0:
                raise ArgumentError(f"{name} is {value}, but it must be positive")
        shares = ("attention_dropout", "hidden_dropout", "embedding_dropout", "router_jitter", "rotary_fraction")
        for name in (*shares, "router_aux_loss", "init_std"):
            value = getattr(self, name)
            if value < 0 or (name in shares and value > 1):
                limit = "from 0 to 1" if name in shares else "at least 0"
                raise ArgumentError(f"{name} is {value}, but it must be {limit}")
        if self.rope_theta is None and (self.rope_scaling or self.rope_local_theta):
            raise ArgumentError("rope_scaling and rope_local_theta need a rope_theta", "give rope_theta")
