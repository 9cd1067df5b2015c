"""The settings of Megatron-LM and torchtitan for a model's arithmetic, and what has no setting.

Time and memory do not depend on these values, but the results do. A framework that has no setting for a value would
train another model, so the search and the exports refuse it. Each field of `Arithmetic` has a row for each framework.

Source: `megatron/training/arguments.py` of Megatron-LM 0.16.1 to 0.19, and what its `TransformerConfig` does with it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import groupby
from math import isclose
from typing import TYPE_CHECKING

from hpgo.base.messages import join_words
from hpgo.model.arithmetic import Arithmetic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from hpgo.model.arithmetic import RopeScaling
    from hpgo.model.transformer import Transformer

Setting = int | float | str | bool
Row = dict[str, Setting] | str
"""Settings by name, or a description of the value that has no setting, in words that follow "has no setting for"."""

_TANH = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
"""Names of GELU's approximation by tanh, which Megatron-LM's fused kernel computes."""
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_ORIGINAL = "original_max_position_embeddings"
_YARN = {_ORIGINAL: 4096, "beta_fast": 32.0, "beta_slow": 1.0}
"""Constants of Megatron-LM's RoPE scaling that no option changes."""


_SCAN_EPSILON = 1e-5
"""Epsilon of the norm after a Mamba 2 scan, which `megatron/core/ssm/mamba_mixer.py` sets."""


@dataclass(frozen=True, slots=True)
class ArithmeticSettings:
    """A model's arithmetic as settings of a framework, and the values without a setting."""

    settings: Mapping[str, Setting]
    missing: tuple[str, ...]
    """A description of each value that has no setting."""


def stated(table: Mapping[str, Callable[[Transformer, Arithmetic], Row]], model: Transformer) -> ArithmeticSettings:
    """Return a model's arithmetic as settings of `table`; nothing if the arithmetic is not known.

    >>> from hpgo.model.transformer_presets import TRANSFORMERS
    >>> stated(MEGATRON, TRANSFORMERS["llama-3-8b"]).settings["rotary-base"]
    500000
    >>> stated(MEGATRON, TRANSFORMERS["gemma-2-9b"]).missing[0]
    'the activation gelu_pytorch_tanh in a gated feed-forward network'
    """
    if (arithmetic := model.arithmetic) is None or not table:
        return ArithmeticSettings({}, ())
    # Index by the fields of `Arithmetic`: a new field without a row in some table then fails loudly.
    rows = [table[field.name](model, arithmetic) for field in fields(Arithmetic)]
    settings = {name: value for one in rows if not isinstance(one, str) for name, value in one.items()}
    return ArithmeticSettings(settings, tuple(one for one in rows if isinstance(one, str)))


def _only(name: str, plain: object, words: str) -> Callable[[Transformer, Arithmetic], Row]:
    """Return a row that accepts only the value `plain` of a field, and describes any other value by `words`."""

    def row(_: Transformer, arithmetic: Arithmetic) -> Row:
        value = getattr(arithmetic, name)
        return {} if value == plain else words.format(value)

    return row


def _activation(model: Transformer, arithmetic: Arithmetic) -> Row:
    name = arithmetic.activation
    if model.gated:
        # Megatron-LM has no option for the other gated activations, such as GEGLU.
        if name in {"silu", "swish"}:
            return {"swiglu": True}
        if name == "quick_gelu":
            return {"swiglu": False, "quick-geglu": True}
        return f"the activation {name} in a gated feed-forward network"
    # The default fuses the bias with GELU by tanh. Without that fusion PyTorch's exact GELU is computed.
    if name in _TANH and model.ffn_bias:
        return {}
    if name == "gelu":
        return {"no-bias-gelu-fusion": True}
    if name == "relu2":
        # The fused kernel, which is on by default in models with biases, has no squared ReLU.
        return {"squared-relu": True, "no-bias-gelu-fusion": model.ffn_bias}
    return f"the activation {name}"


def _epsilon(model: Transformer, arithmetic: Arithmetic) -> Row:
    epsilon = arithmetic.norm_epsilon
    if _scans(model) and not isclose(epsilon, _SCAN_EPSILON):
        return f"an epsilon {epsilon:g} of the norms of scans (it has {_SCAN_EPSILON:g})"
    return {"norm-epsilon": epsilon}


def _clamp(model: Transformer, arithmetic: Arithmetic) -> Row:
    clamp = arithmetic.glu_clamp if model.gated else None
    return {} if clamp is None else {"activation-func-clamp-value": clamp}


def _offset(model: Transformer, arithmetic: Arithmetic) -> Row:
    offset = arithmetic.glu_offset if model.gated else 0
    if not offset:
        return {}
    # `TransformerConfig` accepts the offset with its fused kernel for this activation only.
    return {"glu-linear-offset": offset} if arithmetic.activation == "quick_gelu" else f"an offset ({offset}) of SwiGLU"


def _theta(_: Transformer, arithmetic: Arithmetic) -> Row:
    theta = arithmetic.rope_theta
    if theta is None:
        return {}
    # `--rotary-base` is parsed as an integer.
    return {"rotary-base": int(theta)} if theta == int(theta) else f"the RoPE theta {theta}, a fraction"


def _interleaved(model: Transformer, arithmetic: Arithmetic) -> Row:
    if model.latent is not None:
        return {} if arithmetic.rope_interleaved else "latent attention without interleaved RoPE"
    return {"rotary-interleaved": True, "no-rope-fusion": True} if arithmetic.rope_interleaved else {}


def _no_rope(model: Transformer, arithmetic: Arithmetic) -> Row:
    left_out = set(arithmetic.no_rope_layers)
    if not left_out:
        return {}
    if model.latent is not None or _scans(model):
        return f"layers without positions {'beside scans' if _scans(model) else 'of latent attention'}"
    return {"no-rope-freq": layers_text(at in left_out for at in range(model.layers))}


def _scans(model: Transformer) -> bool:
    """Return whether the model has Mamba 2 scans, so that `pretrain_mamba.py` builds it."""
    return any(one.rule == "ssd" for block in model.blocks for one in block.scans)


def layers_text(layers: Iterable[bool]) -> str:
    """Return which layers are of a kind, as a Python expression that Megatron-LM evaluates.

    >>> layers_text([False] * 3 + [True] * 58)
    '[0]*3+[1]*58'
    """
    return "+".join(f"[{int(one)}]*{len(list(held))}" for one, held in groupby(layers))


def _fraction(model: Transformer, arithmetic: Arithmetic) -> Row:
    if model.latent is not None:
        return {} if arithmetic.rotary_fraction == 1 else "a rotary fraction in latent attention"
    return {} if arithmetic.rope_theta is None else {"rotary-percent": arithmetic.rotary_fraction}


def _scaling(model: Transformer, arithmetic: Arithmetic) -> Row:
    scaling = arithmetic.rope_scaling
    if scaling is None:
        # The fused kernel for latent attention computes YaRN only, so plain RoPE has to turn it off.
        return {} if model.latent is None else {"rope-type": "rope", "no-rope-fusion": True}
    kind, words = scaling.rope_type, f"the RoPE scaling {scaling.rope_type}"
    if _scans(model):
        return f"{words} beside scans"  # `mamba_builders.py` passes on no scaling
    if kind == "yarn" and model.latent is None:
        return _yarn(scaling)
    for name, value in {"llama3": _LLAMA3, "yarn": _YARN}.get(kind, {}).items():
        if getattr(scaling, name) not in {None, value}:
            return f"{words} with {name} {getattr(scaling, name)} (it has {value})"
    if scaling.factor is None or scaling.attention_factor is not None:
        return f"{words} with an attention factor" if scaling.factor is not None else f"{words} without a factor"
    if kind == "llama3" and model.latent is None:
        return {"use-rope-scaling": True, "rope-scaling-factor": scaling.factor}
    if kind == "linear" and model.latent is None and scaling.factor == int(scaling.factor):
        return {"rotary-seq-len-interpolation-factor": int(scaling.factor)}
    if kind == "yarn" and model.latent is not None and scaling.truncate is not False:
        settings: dict[str, Setting] = {"rope-type": "yarn", "rotary-scaling-factor": scaling.factor}
        for name, own in (("mscale", scaling.mscale), ("mscale-all-dim", scaling.mscale_all_dim)):
            settings |= {} if own is None else {name: own}
        return settings
    return words


def _yarn(scaling: RopeScaling) -> Row:
    """Return the options of YaRN for attention without latent vectors, which Megatron-LM has from 0.19 on."""
    if scaling.factor is None or scaling.attention_factor is not None:
        return "YaRN with an attention factor" if scaling.factor is not None else "YaRN without a factor"
    settings: dict[str, Setting] = {
        "position-embedding-type": "yarn",
        "rotary-scaling-factor": scaling.factor,
        "yarn-original-max-position-embeddings": scaling.original_max_position_embeddings or _YARN[_ORIGINAL],
        "yarn-beta-fast": scaling.beta_fast or _YARN["beta_fast"],
        "yarn-beta-slow": scaling.beta_slow or _YARN["beta_slow"],
    }
    if scaling.truncate is False:
        settings["no-yarn-correction-range-round-to-int"] = True
    # Without both of them, the factor of queries and keys is 0.1 ln(factor) + 1, as with these values.
    if scaling.mscale is None or scaling.mscale_all_dim is None:
        return settings | {"mscale": 1.0, "mscale-all-dim": 0.0}
    return settings | {"mscale": scaling.mscale, "mscale-all-dim": scaling.mscale_all_dim}


def _scale(model: Transformer, arithmetic: Arithmetic) -> Row:
    scale = arithmetic.attention_scale
    # Configuration files round the usual scale, 1/√d, so compare with a tolerance.
    plain = scale is None or isclose(scale, model.head_dim**-0.5, rel_tol=1e-6)
    return {} if plain else f"the attention scale {scale:.6g}"


def _attention_dropout(_: Transformer, arithmetic: Arithmetic) -> Row:
    return {"attention-dropout": arithmetic.attention_dropout}


def _hidden_dropout(_: Transformer, arithmetic: Arithmetic) -> Row:
    return {"hidden-dropout": arithmetic.hidden_dropout}


def _embedding_dropout(_: Transformer, arithmetic: Arithmetic) -> Row:
    # `--hidden-dropout` sets the dropout of embeddings, too.
    share = arithmetic.embedding_dropout
    return {} if share == arithmetic.hidden_dropout else f"an embedding dropout of {share} unlike the hidden dropout"


def _router_score(model: Transformer, arithmetic: Arithmetic) -> Row:
    # Reference implementations compute the softmax over experts in fp32, regardless of the layers' precision.
    return {"moe-router-score-function": arithmetic.router_score, "moe-router-dtype": "fp32"} if model.experts else {}


def _router_normalizes(model: Transformer, arithmetic: Arithmetic) -> Row:
    if not model.experts:
        return {}
    if arithmetic.router_score == "softmax":
        # A softmax over the chosen experts is the one over all, divided by the sum of the chosen.
        if arithmetic.router_normalizes and model.experts_per_token == 1:
            return "a normalized score of a single expert"
        return {"moe-router-pre-softmax": not arithmetic.router_normalizes}
    if not arithmetic.router_normalizes and model.experts_per_token > 1:
        return "sigmoid scores of experts that are not normalized"
    if arithmetic.router_normalizes and model.experts_per_token == 1:
        return "a normalized score of a single expert"
    return {}


def _router_scale(model: Transformer, arithmetic: Arithmetic) -> Row:
    scale = arithmetic.router_scale
    return {"moe-router-topk-scaling-factor": scale} if model.experts and scale != 1 else {}


def _router_bias(model: Transformer, arithmetic: Arithmetic) -> Row:
    if not (model.experts and arithmetic.router_bias):
        return {}
    if arithmetic.router_score != "sigmoid":
        return "a bias of each expert with softmax scores"
    return {"moe-router-enable-expert-bias": True}


def _router_group_top(model: Transformer, arithmetic: Arithmetic) -> Row:
    if not model.experts or model.expert_groups == 1:
        return {}
    # Megatron-LM scores a group by its best topk / groups-per-token experts and has no option for another number.
    built_in = model.experts_per_token // model.groups_per_token
    if arithmetic.router_group_top == built_in:
        return {}
    return f"groups of experts scored by their best {arithmetic.router_group_top} (it takes {built_in})"


def _router_aux_loss(model: Transformer, arithmetic: Arithmetic) -> Row:
    if not model.experts:
        return {}
    if not arithmetic.router_aux_loss:
        return {"moe-router-load-balancing-type": "none"}
    kind = "seq_aux_loss" if arithmetic.router_aux_loss_per_sequence else "aux_loss"
    return {"moe-router-load-balancing-type": kind, "moe-aux-loss-coeff": arithmetic.router_aux_loss}


def _other(_: Transformer, arithmetic: Arithmetic) -> Row:
    return join_words(arithmetic.other) if arithmetic.other else {}


def _nothing(_: Transformer, __: Arithmetic) -> Row:
    return {}


MEGATRON: Mapping[str, Callable[[Transformer, Arithmetic], Row]] = {
    "activation": _activation,
    "glu_clamp": _clamp,
    "glu_offset": _offset,
    "norm_epsilon": _epsilon,
    "norm_adds_one": lambda _, arithmetic: {"apply-layernorm-1p": arithmetic.norm_adds_one},
    "rope_theta": _theta,
    "rope_local_theta": _only("rope_local_theta", None, "another RoPE theta ({}) in layers with a window"),
    "rotary_fraction": _fraction,
    "no_rope_layers": _no_rope,
    "rope_interleaved": _interleaved,
    "rope_scaling": _scaling,
    "parallel_residual": _only("parallel_residual", False, "attention and feed-forward network in parallel"),
    "attention_scale": _scale,
    "attention_scale_by_layer": _only("attention_scale_by_layer", False, "scores divided by the layer's number"),
    "attention_logit_softcap": _only("attention_logit_softcap", None, "a softcap ({}) of attention scores"),
    "final_logit_softcap": _only("final_logit_softcap", None, "a softcap ({}) of logits"),
    "embedding_scale": _only("embedding_scale", 1.0, "embeddings that are multiplied by {:.4g}"),
    "attention_dropout": _attention_dropout,
    "hidden_dropout": _hidden_dropout,
    "embedding_dropout": _embedding_dropout,
    "router_score": _router_score,
    "router_normalizes": _router_normalizes,
    "router_scale": _router_scale,
    "router_bias": _router_bias,
    "router_group_top": _router_group_top,
    "router_aux_loss": _router_aux_loss,
    "router_aux_loss_per_sequence": _nothing,  # set together with its coefficient, in `_router_aux_loss`
    "router_jitter": _only("router_jitter", 0.0, "a jitter ({}) of the inputs of experts"),
    "init_std": lambda _, arithmetic: {"init-method-std": arithmetic.init_std},
    "other": _other,
}  # fmt: skip


def _titan_activation(model: Transformer, arithmetic: Arithmetic) -> Row:
    known = {"quick_gelu"} if _has_sinks(model) else {"silu", "swish"}
    return {} if arithmetic.activation in known else f"the activation {arithmetic.activation}"


def _titan_clamp(model: Transformer, arithmetic: Arithmetic) -> Row:
    clamp = arithmetic.glu_clamp
    if _has_sinks(model):
        return "feed-forward networks without a clamp" if clamp is None else {"swiglu_limit": clamp}
    return {} if clamp is None else f"a clamp ({clamp:g}) of SwiGLU"


def _titan_offset(model: Transformer, arithmetic: Arithmetic) -> Row:
    built_in = 1.0 if _has_sinks(model) else 0.0
    offset = arithmetic.glu_offset
    return {} if offset == built_in else f"an offset ({offset:g}) of SwiGLU (it has {built_in:g})"


def _has_sinks(model: Transformer) -> bool:
    """Return whether attention has sinks, so that torchtitan's package `gpt_oss` builds the model."""
    return any(one.sinks for block in model.blocks for one in block.attention)


def _titan_theta(_: Transformer, arithmetic: Arithmetic) -> Row:
    return {} if arithmetic.rope_theta is None else {"theta": arithmetic.rope_theta}


def _titan_scaling(_: Transformer, arithmetic: Arithmetic) -> Row:
    scaling = arithmetic.rope_scaling
    if scaling is None:
        return {"scaling": "none"}
    if scaling.rope_type != "llama3" or scaling.attention_factor is not None:
        return f"the RoPE scaling {scaling.rope_type}"
    settings: dict[str, Setting] = {"scaling": "llama"}
    names = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    for name, value in (("scaling_factor", scaling.factor), *((name, getattr(scaling, name)) for name in names)):
        settings |= {} if value is None else {name: value}
    return settings


def _titan_any_scaling(model: Transformer, arithmetic: Arithmetic) -> Row:
    scaling = arithmetic.rope_scaling
    if _has_sinks(model):
        return _titan_sinks_scaling(scaling)
    if model.latent is None or scaling is None or scaling.rope_type != "yarn":
        return _titan_scaling(model, arithmetic)
    if scaling.mscale is None or scaling.mscale != scaling.mscale_all_dim:
        return f"YaRN with mscale {scaling.mscale} and mscale_all_dim {scaling.mscale_all_dim}, unless they are equal"
    found = _titan_yarn(scaling)
    return found if isinstance(found, str) else found | {"mscale": scaling.mscale}


def _titan_sinks_scaling(scaling: RopeScaling | None) -> Row:
    if scaling is None:
        return {"scaling": "none"}
    if scaling.rope_type != "yarn":
        # Such models rotate by cosines and sines, which raise NotImplementedError with Llama's scaling.
        return f"the RoPE scaling {scaling.rope_type} beside attention sinks"
    if scaling.mscale and scaling.mscale_all_dim:
        # The scores are multiplied by (0.1 ln(factor) + 1)², as transformers does unless both are given.
        return f"YaRN with mscale {scaling.mscale} and mscale_all_dim {scaling.mscale_all_dim} beside attention sinks"
    return _titan_yarn(scaling)


def _titan_yarn(scaling: RopeScaling) -> Row:
    if scaling.factor is None or scaling.attention_factor is not None:
        return "YaRN with an attention factor" if scaling.factor is not None else "YaRN without a factor"
    return {
        "scaling": "yarn",
        "rope_factor": scaling.factor,
        "original_seq_len": scaling.original_max_position_embeddings or _YARN[_ORIGINAL],
        "beta_fast": scaling.beta_fast or _YARN["beta_fast"],
        "beta_slow": scaling.beta_slow or _YARN["beta_slow"],
        "truncate": scaling.truncate is not False,
    }


def _titan_group_top(model: Transformer, arithmetic: Arithmetic) -> Row:
    top = arithmetic.router_group_top
    plain = not model.experts or model.expert_groups == 1 or top == _TITAN_GROUP_TOP
    return {} if plain else f"groups of experts scored by their best {top} (it takes {_TITAN_GROUP_TOP})"


def _of_router(name: str, field: str) -> Callable[[Transformer, Arithmetic], Row]:
    """Return a row with the setting `name` of a router, which only models with experts have."""
    return lambda model, arithmetic: {name: getattr(arithmetic, field)} if model.experts else {}


_TITAN_GROUP_TOP = 2
TORCHTITAN: Mapping[str, Callable[[Transformer, Arithmetic], Row]] = {
    **{name: row for name, row in MEGATRON.items() if name in {
        "rope_local_theta", "parallel_residual", "attention_scale", "attention_scale_by_layer",
        "attention_logit_softcap", "final_logit_softcap", "embedding_scale", "router_jitter", "other",
    }},
    "activation": _titan_activation,
    "norm_epsilon": lambda _, arithmetic: {"eps": arithmetic.norm_epsilon},
    "norm_adds_one": _only("norm_adds_one", False, "norms that add 1 to their weights"),
    "rope_theta": _titan_theta,
    "glu_clamp": _titan_clamp,
    "glu_offset": _titan_offset,
    "rotary_fraction": _only("rotary_fraction", 1.0, "a rotary fraction of {}"),
    "no_rope_layers": _only("no_rope_layers", (), "layers without positions"),
    "rope_interleaved": _nothing,  # only permutes the rows of the query and key matrices, so training is equivalent
    "rope_scaling": _titan_any_scaling,
    "attention_dropout": _only("attention_dropout", 0.0, "dropout ({})"),
    "hidden_dropout": _only("hidden_dropout", 0.0, "dropout ({})"),
    "embedding_dropout": _only("embedding_dropout", 0.0, "dropout ({})"),
    "router_score": _of_router("score_func", "router_score"),
    "router_normalizes": _of_router("route_norm", "router_normalizes"),
    "router_scale": _of_router("route_scale", "router_scale"),
    "router_bias": _of_router("balances", "router_bias"),
    "router_group_top": _titan_group_top,
    "router_aux_loss": _nothing,  # it adds none, which a comment in the exported file notes
    "router_aux_loss_per_sequence": _nothing,
    "init_std": _nothing,  # its models fix their own initialization, and a comment in the exported file notes that
}  # fmt: skip
"""Settings of the norms, of RoPE and of routers in torchtitan 0.3.0 (`models/common/rope.py`, `moe.py`, and
`models/llama3/__init__.py`). `balances` stands for biases of experts that balance them."""
TABLES: Mapping[str, Mapping[str, Callable[[Transformer, Arithmetic], Row]]] = {
    "megatron": MEGATRON, "titan": TORCHTITAN,
}  # fmt: skip
"""The tables of settings, by `FrameworkSupport.shape`."""
