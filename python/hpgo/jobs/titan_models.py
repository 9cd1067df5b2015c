"""Code that builds a model which torchtitan 0.3's registry does not have, from the SHAPE of the exported module.

Source: `models/common/config_utils.py`, and `__init__.py` of `models/deepseek_v3` and `models/gpt_oss` of torchtitan
0.3.0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpgo.base.quoting import filled, in_python
from hpgo.export.titan_sparse import is_sparse
from hpgo.llm.titan_shape import titan_package

if TYPE_CHECKING:
    from hpgo.model.transformer import Transformer

_BASE = '''\
def base():
    """Return the configuration of a model of this SHAPE. Its trainer is that of torchtitan's Llama 3 8B."""
    config = llama3_8b()
    words, dim = SHAPE["vocab_size"], SHAPE["dim"]
    weights = {"weight": partial(nn.init.normal_, std=__STD__)}
    tied = {"weight": skip_param_init}  # the LM head initializes the weight that both share
    model = __MODEL__.Config(
        dim=dim,
        vocab_size=words,
        enable_weight_tying=SHAPE["tied"],
        tok_embeddings=Embedding.Config(
            num_embeddings=words, embedding_dim=dim, param_init=tied if SHAPE["tied"] else weights
        ),
        norm=norm(dim),
        lm_head=Linear.Config(in_features=dim, out_features=words, param_init=weights),
        layers=[layer(at, dim, weights) for at in range(SHAPE["layers"])],
    )
    config.model_spec = replace(model_registry("__FLAVOR__"), flavor="planned", model=model)
    config.loss = ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=words))
    return config


__LAYER__


def norm(width):
    """Return a norm over this number of values."""
    return RMSNorm.Config(normalized_shape=width, param_init={"weight": nn.init.ones_})
'''
_LAYER = '''\
def layer(at, dim, weights):
    """Return a new block, because torchtitan changes the configuration of each."""
    return __BLOCK__.Config(
        attention_norm=norm(dim),
        ffn_norm=norm(dim),
        attention=attention(__AT__dim, weights),
        __NETWORKS__
    )
'''
_GROUPED = '''\
def attention(dim, weights):
    """Return the attention of a block."""
    held = __HELD__
    head_dim = held["head_dim"]
    return make_gqa_config(
        dim=dim,
        n_heads=held["n_heads"],
        n_kv_heads=held["n_kv_heads"],
        head_dim=head_dim,
        wqkv_param_init=weights,
        wo_param_init=weights,
        inner_attention=get_attention_config("flex"),
        rope=__ROPE__.Config(dim=head_dim, max_seq_len=__LENGTH__),
        fuse_qkv=True,
        qk_norm=norm(head_dim) if held["qk_norm"] else None,
    )
'''
_LATENT = '''\
def attention(dim, weights):
    """Return the attention of a block, whose keys and values come from a latent vector."""
    held = SHAPE["attention"]
    return make_mla_attention_config(
        layer_id=0,
        dim=dim,
        **held,
        attn_backend="flex",
        linear_init=weights,
        norm_init={"weight": nn.init.ones_},
        depth_init=lambda layer_id: weights,
        rope=__ROPE__.Config(dim=held["qk_rope_head_dim"], max_seq_len=__LENGTH__),
    )
'''
_SINKS = '''\
def attention(at, dim, weights):
    """Return the attention of block `at`, with sinks. Its window is that of the SHAPE."""
    held = SHAPE["attention"]
    heads, keys, head_dim = held["n_heads"], held["n_kv_heads"], held["head_dim"]
    biased = {"bias": True, "param_init": weights | {"bias": nn.init.zeros_}}
    return Attention.Config(
        **held,
        dim=dim,
        sliding_window_size=SHAPE["windows"][at],
        qkv_linear=FusedQKVLinear.Config(
            **held,
            wqkv=Linear.Config(in_features=dim, out_features=(heads + 2 * keys) * head_dim, **biased),
        ),
        wo=ScaledBiasRowwiseLinear.Config(in_features=heads * head_dim, out_features=dim, **biased),
        inner_attention=get_attention_config("flex"),
        rope=__ROPE__.Config(dim=head_dim, max_seq_len=__LENGTH__),
        param_init={"sinks": weights["weight"]},
    )
'''
_NETWORK = '''\
def network(dim, width, weights):
    """Return a dense feed-forward network."""
    return make_ffn_config(dim=dim, hidden_dim=width, w1_param_init=weights, w2w3_param_init=weights)
'''
_EXPERTS = '''\
def experts(dim, weights):
    """Return experts with their router. PyTorch exchanges the tokens."""
    held = SHAPE["experts"]
    sizes = {"dim": dim, "num_experts": held["num_experts"], "top_k": held["top_k"]}
    routing = ("score_func", "route_norm", "route_scale", "num_expert_groups", "num_limited_groups")
    router = {**sizes, **{name: held[name] for name in routing}}
    return __MADE__
'''
_MADE = """make_moe_config(
        num_experts=held["num_experts"],
        router=make_router_config(**router, gate_param_init=weights),
        routed_experts=make_routed_experts_config(
            **sizes,
            hidden_dim=held["hidden_dim"],
            param_init=dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), weights["weight"]),
            comm_backend="standard",
        ),
        shared_experts=network(dim, held["shared"], weights) if held["shared"] else None,
    )"""
_MADE_BIASED = """GptOssMoE.Config(
        num_experts=held["num_experts"],
        router=make_router_config(**router, gate_param_init=weights | {"bias": nn.init.zeros_}, bias=True),
        routed_experts=RoutedExperts.Config(
            inner_experts=GptOssGroupedExperts.Config(
                dim=dim,
                num_experts=held["num_experts"],
                hidden_dim=held["hidden_dim"],
                swiglu_limit=held["swiglu_limit"],
                param_init=dict.fromkeys(("mlp1_weight_EGD", "mlp2_weight_EDF"), weights["weight"])
                | dict.fromkeys(("mlp1_bias_EG", "mlp2_bias_ED"), nn.init.zeros_),
            ),
            token_dispatcher=make_token_dispatcher_config(
                num_experts=held["num_experts"], top_k=held["top_k"], comm_backend="standard"
            ),
        ),
    )"""
_NETWORKS = {
    "dense": 'feed_forward=network(dim, SHAPE["ffn"], weights),',
    "sparse": """\
feed_forward=network(dim, SHAPE["ffn"], weights) if at in SHAPE["dense_layers"] else None,
        moe=None if at in SHAPE["dense_layers"] else experts(dim, weights),""",
    "biased": "moe=experts(dim, weights),",
}
"""Arguments of a block: a dense network; experts, or a dense network in some layers; or experts with biases."""

_OF_TRANSFORMERS = '''\
def base():
    """Return the configuration of torchtitan's backend for models of transformers, with the model of config.json."""
    config = transformers_modeling_backend_full()
    config.hf_model = str(Path(__file__).resolve().with_name("config.json"))
    config.loss = ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=SHAPE["vocab_size"]))
    return config
'''


_GPT_OSS_MODULES = {
    "torchtitan.models.common.attention": ["FusedQKVLinear"],
    "torchtitan.models.common.linear": ["ScaledBiasRowwiseLinear"],
    "torchtitan.models.common.moe": ["RoutedExperts"],
    "torchtitan.models.gpt_oss.moe": ["GptOssGroupedExperts", "GptOssMoE"],
}
"""Modules with the further classes of GPT-OSS."""
_PARTS = {
    "llama3": ("8B", "ComplexRoPE", ["Llama3TransformerBlock", "Llama3Model"]),
    "qwen3": ("8B", "CosSinRoPE", ["Qwen3TransformerBlock", "Qwen3Model"]),
    "deepseek_v3": ("16B", "ComplexRoPE", ["DeepSeekV3TransformerBlock", "DeepSeekV3Model"]),
    "gpt_oss": ("20b", "CosSinRoPE", ["GptOssTransformerBlock", "GptOssModel", "Attention"]),
}
"""A flavor of each package of torchtitan 0.3, its RoPE, and the classes of its blocks, of its model, and others.

All forms of RoPE rotate the same angles. Each package's own is the one that its checkpoints of Hugging Face convert to.
"""


def new_model(model: Transformer) -> tuple[str, dict[str, list[str]]]:
    """Return the function that builds a model which torchtitan's registry does not have, and its imports."""
    package = titan_package(model, sparse=True)
    flavor, rope, classes = _PARTS[package]
    sparse, latent, biased = is_sparse(model), package == "deepseek_v3", package == "gpt_oss"
    flavor = "30B-A3B" if model.experts and package == "qwen3" else flavor
    std = in_python(0.02 if model.arithmetic is None else model.arithmetic.init_std)
    held = {"HELD": 'SHAPE["attention"]' if sparse else "SHAPE", "ROPE": rope}
    held["LENGTH"] = in_python(max(model.longest, 1 << 17))
    networks = _NETWORKS["biased" if biased else "sparse" if sparse else "dense"]
    functions = [
        filled(_LAYER, {"BLOCK": classes[0], "AT": "at, " * biased, "NETWORKS": networks}),
        filled(_SINKS if biased else _LATENT if latent else _GROUPED, held),
        *([] if biased else [_NETWORK]),
        *([filled(_EXPERTS, {"MADE": _MADE_BIASED if biased else _MADE})] if sparse else []),
    ]
    layer = "\n\n".join(functions).rstrip()
    text = filled(_BASE, {"STD": std, "MODEL": classes[1], "FLAVOR": flavor, "LAYER": layer})
    if biased:
        makers = ["get_attention_config", "make_router_config", "make_token_dispatcher_config"]
    else:
        makers = ["make_ffn_config", *([] if latent else ["get_attention_config", "make_gqa_config"])]
        makers += ["make_moe_config", "make_routed_experts_config", "make_router_config"] if sparse else []
    imports = {
        "dataclasses": ["replace"],
        "functools": ["partial"],
        "planned": ["SHAPE"],
        "torch": ["nn"],
        "torchtitan.components.loss": ["ChunkedLossWrapper", "CrossEntropyLoss"],
        "torchtitan.models.common": [rope, "Embedding", "Linear", "RMSNorm"],
        "torchtitan.models.common.config_utils": makers,
        "torchtitan.models.common.param_init": ["skip_param_init"],
        f"torchtitan.models.{package}": ["model_registry", *(["make_mla_attention_config"] if latent else [])],
        f"torchtitan.models.{package}.model": classes,
        "torchtitan.models.llama3.config_registry": ["llama3_8b"],
        **(_GPT_OSS_MODULES if biased else {}),
    }
    return text, imports


def of_transformers() -> tuple[str, dict[str, list[str]]]:
    """Return the function that has transformers build the model of the job's `config.json`, and its imports."""
    backend = "torchtitan.experiments.transformers_modeling_backend"
    return _OF_TRANSFORMERS, {
        "pathlib": ["Path"],
        "torchtitan.components.loss": ["ChunkedLossWrapper", "CrossEntropyLoss"],
        f"{backend}.config_registry": ["transformers_modeling_backend_full"],
    }
