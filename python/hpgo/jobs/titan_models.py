"""Code that builds a model which torchtitan 0.3's registry does not have, from the SHAPE of the exported module.

Source: `models/common/config_utils.py` and `models/deepseek_v3/__init__.py` of torchtitan 0.3.0.
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
_DENSE = '''\
def layer(at, dim, weights):
    """Return a new block, because torchtitan changes the configuration of each."""
    head_dim = SHAPE["head_dim"]
    return __BLOCK__.Config(
        attention_norm=norm(dim),
        ffn_norm=norm(dim),
        attention=make_gqa_config(
            dim=dim,
            n_heads=SHAPE["n_heads"],
            n_kv_heads=SHAPE["n_kv_heads"],
            head_dim=head_dim,
            wqkv_param_init=weights,
            wo_param_init=weights,
            inner_attention=get_attention_config("flex"),
            rope=__ROPE__.Config(dim=head_dim, max_seq_len=__LENGTH__),
            fuse_qkv=True,
            qk_norm=norm(head_dim) if SHAPE["qk_norm"] else None,
        ),
        feed_forward=make_ffn_config(
            dim=dim, hidden_dim=SHAPE["ffn"], w1_param_init=weights, w2w3_param_init=weights
        ),
    )
'''
_SPARSE = '''\
def layer(at, dim, weights):
    """Return a new block, because torchtitan changes the configuration of each."""
    dense = at in SHAPE["dense_layers"]
    return __BLOCK__.Config(
        attention_norm=norm(dim),
        ffn_norm=norm(dim),
        attention=attention(dim, weights),
        feed_forward=network(dim, SHAPE["ffn"], weights) if dense else None,
        moe=None if dense else experts(dim, weights),
    )


__ATTENTION__


def network(dim, width, weights):
    """Return a dense feed-forward network."""
    return make_ffn_config(dim=dim, hidden_dim=width, w1_param_init=weights, w2w3_param_init=weights)


def experts(dim, weights):
    """Return experts with their router. PyTorch exchanges the tokens."""
    held = SHAPE["experts"]
    sizes = {"dim": dim, "num_experts": held["num_experts"], "top_k": held["top_k"]}
    routing = ("score_func", "route_norm", "route_scale", "num_expert_groups", "num_limited_groups")
    return make_moe_config(
        num_experts=held["num_experts"],
        router=make_router_config(
            **sizes, gate_param_init=weights, **{name: held[name] for name in routing}
        ),
        routed_experts=make_routed_experts_config(
            **sizes,
            hidden_dim=held["hidden_dim"],
            param_init=dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), weights["weight"]),
            comm_backend="standard",
        ),
        shared_experts=network(dim, held["shared"], weights) if held["shared"] else None,
    )
'''
_GROUPED = '''\
def attention(dim, weights):
    """Return the attention of a block."""
    held = SHAPE["attention"]
    head_dim = held["head_dim"]
    return make_gqa_config(
        dim=dim,
        n_heads=held["n_heads"],
        n_kv_heads=held["n_kv_heads"],
        head_dim=head_dim,
        wqkv_param_init=weights,
        wo_param_init=weights,
        inner_attention=get_attention_config("flex"),
        rope=CosSinRoPE.Config(dim=head_dim, max_seq_len=__LENGTH__),
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
        rope=ComplexRoPE.Config(dim=held["qk_rope_head_dim"], max_seq_len=__LENGTH__),
    )
'''

_OF_TRANSFORMERS = '''\
def base():
    """Return the configuration of torchtitan's backend for models of transformers, with the model of config.json."""
    config = transformers_modeling_backend_full()
    config.hf_model = str(Path(__file__).resolve().with_name("config.json"))
    config.loss = ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=SHAPE["vocab_size"]))
    return config
'''


_PARTS = {
    "llama3": ("8B", "Llama3TransformerBlock", "Llama3Model"),
    "qwen3": ("8B", "Qwen3TransformerBlock", "Qwen3Model"),
    "deepseek_v3": ("16B", "DeepSeekV3TransformerBlock", "DeepSeekV3Model"),
}
"""A flavor of each package of torchtitan 0.3, and the classes of its blocks and of its model."""


def new_model(model: Transformer) -> tuple[str, dict[str, list[str]]]:
    """Return the function that builds a model which torchtitan's registry does not have, and its imports."""
    package = titan_package(model, sparse=True)
    sparse, flavor, block, decoder = is_sparse(model), *_PARTS[package]
    flavor = "30B-A3B" if model.experts and package == "qwen3" else flavor
    # All forms rotate the same angles. Each package's own is the one that its checkpoints of Hugging Face convert to.
    rope = "CosSinRoPE" if package == "qwen3" else "ComplexRoPE"
    std = 0.02 if model.arithmetic is None else model.arithmetic.init_std
    length = in_python(max(model.longest, 1 << 17))
    attention = filled(_LATENT if package == "deepseek_v3" else _GROUPED, {"LENGTH": length}) if sparse else ""
    own = {"ATTENTION": attention.rstrip()} if sparse else {"ROPE": rope, "LENGTH": length}
    layer = filled(_SPARSE if sparse else _DENSE, {"BLOCK": block, **own}).rstrip()
    text = filled(_BASE, {"STD": in_python(std), "MODEL": decoder, "FLAVOR": flavor, "LAYER": layer})
    latent = ["make_mla_attention_config"] if package == "deepseek_v3" else []
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
        f"torchtitan.models.{package}": ["model_registry", *latent],
        f"torchtitan.models.{package}.model": [block, decoder],
        "torchtitan.models.llama3.config_registry": ["llama3_8b"],
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
