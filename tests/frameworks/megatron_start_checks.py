"""Small public models whose job folders start with Megatron-LM's own `pretrain_gpt.py`, on CPUs.

`run.py` runs this file once per release, with the release's sources first on the path. For each model of
`small_models.py`, the release parses the arguments, builds the model, and trains the five steps of the folder's smoke
run. Each process is a fork of this one, so that Megatron-LM is imported once.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import os
import re
import runpy
import sys
from typing import TYPE_CHECKING, Any

import cpu_as_cuda
import kernels_on_cpu

cpu_as_cuda.pretend()
kernels_on_cpu.pretend()

# Training imports these late. Each fork would do it again, for seconds.
import megatron.core.datasets.utils
import megatron.core.tokenizers.text
import megatron.training
import megatron.training.inprocess_restart
import pretrain_gpt
import pretrain_mamba
import torch
import torch.distributed
from forks import together
from gpt_builders import gpt_builder
from mamba_builders import mamba_builder
from megatron.core import parallel_state, tensor_parallel
from megatron.core.activations import squared_relu
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.package_info import __shortversion__ as release
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.training.arguments import core_transformer_config_from_args, parse_args, validate_args
from megatron.training.global_vars import set_args
from results import Start, start_each
from small_models import MODELS, SmallModel

from hpgo.export.llm_for_megatron import releases_of
from hpgo.export.targets import find
from hpgo.llm.frameworks import framework_support

if TYPE_CHECKING:
    from pathlib import Path

CPU = (
    "--transformer-impl", "local", "--no-persist-layer-norm", "--no-gradient-accumulation-fusion", "--no-rope-fusion",
    "--no-masked-softmax-fusion", "--use-cpu-initialization", "--distributed-backend", "gloo", "--num-workers", "0",
    "--lr", "1e-3",
)  # fmt: skip
"""What a CPU needs beside the folder's words: no kernels of Transformer Engine or Apex, gloo, and a learning rate with
which five steps are enough for the loss of a small model to fall."""
NOT_ON_CPU = {
    "--sequence-parallel": 0, "--moe-grouped-gemm": 0, "--tp-comm-overlap": 0, "--tp-comm-bootstrap-backend": 1,
}  # fmt: skip
"""Arguments left out to build and to train, with their number of values: only Transformer Engine has these. The parser
reads them."""
DEGREES = {
    "--tensor-model-parallel-size": 1, "--pipeline-model-parallel-size": 1, "--pipeline-model-parallel-layout": 1,
    "--expert-model-parallel-size": 1, "--context-parallel-size": 1,
}  # fmt: skip
"""Arguments left out to build the whole model in one process."""


def started(model: SmallModel, folder: Path) -> Start:
    """Parse, build and train one model. Raises AssertionError with the end of a log."""
    transformer = model.read(folder)
    lacking = framework_support("megatron")[1].lacking(transformer)
    if lacking is not None:
        assert not model.megatron, f"{model.name} is refused: {lacking.why}"
        return Start(model.name, "megatron", release, refused=lacking.why.partition(",")[0])
    plan = model.plan(folder, "megatron")
    minors = releases_of(plan, find("megatron"))
    if release.rpartition(".")[0] not in minors:
        return Start(model.name, "megatron", release, refused=f"needs {' or '.join(minors)}")
    words = [*model.write(plan, find("megatron"), folder / model.name), *CPU]
    ranks = plan.estimate.gpus
    (compared,) = together(1, read, model.config, words, ranks)
    whole = [word.replace("|", "") if "|" in word else word for word in without(words, NOT_ON_CPU | DEGREES)]
    (parameters,) = together(1, built, model.config, whole)
    counted = transformer.parameters + transformer.further_parameters
    assert parameters == counted, f"Megatron-LM builds {parameters} parameters, hpgo counts {counted}"
    losses = trained(ranks, without(words, NOT_ON_CPU), folder / f"{model.name}.log")
    return Start(
        model.name, "megatron", release, plan.estimate.parallelism.named(), ranks, compared, parameters, losses
    )


def without(words: list[str], left_out: dict[str, int]) -> list[str]:
    """Return the words without some arguments and their values.

    >>> without(["--lr", "1", "--bf16", "--seed", "2"], {"--lr": 1, "--bf16": 0})
    ['--seed', '2']
    """
    kept, skip = [], 0
    for word in words:
        if word in left_out:
            skip = 1 + left_out[word]
        if skip:
            skip -= 1
        else:
            kept.append(word)
    return kept


# Reading and building


def read(config: dict[str, Any], words: list[str], ranks: int) -> int:
    """Return the number of values of `config.json` that Megatron-LM understands as they are meant, which is all."""
    os.environ["WORLD_SIZE"] = str(ranks)
    sys.argv = ["pretrain_gpt.py", *words]
    arguments = validate_args(parse_args())
    found = vars(arguments) | vars(core_transformer_config_from_args(arguments))
    wanted = meant(config, arguments.seq_length)
    wrong = {name: (found.get(name), value) for name, value in wanted.items() if not equal(found.get(name), value)}
    assert not wrong, f"found and wanted: {wrong}"
    return len(wanted)


def equal(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, float):
        return found is not None and math.isclose(found, wanted, rel_tol=1e-9)
    return bool(found == wanted)


def meant(config: dict[str, Any], seq_length: int) -> dict[str, Any]:
    """Return the values that Megatron-LM must have for a `config.json`, by the names of its configuration.

    They are derived from Hugging Face's keys here, without hpgo.
    """
    kind = config["model_type"]
    heads = config.get("num_attention_heads", config.get("n_head"))
    hidden = config.get("hidden_size", config.get("n_embd"))
    learned, latent = kind == "gpt2", "kv_lora_rank" in config
    rotates = not learned and kind != "nemotron_h"
    kv_heads = heads if latent else config.get("num_key_value_heads", heads)
    activation = next(
        config[name] for name in ("mlp_hidden_act", "hidden_act", "activation_function") if name in config
    )
    epsilon = next(config[name] for name in EPSILONS if name in config)
    pattern = config.get("hybrid_override_pattern")
    wanted = {
        "num_layers": len(pattern) if pattern else config.get("num_hidden_layers", config.get("n_layer")),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": kv_heads,
        "ffn_hidden_size": config.get("intermediate_size", 4 * hidden),
        "gated_linear_unit": activation == "silu",
        "activation_func": ACTIVATIONS[kind] if kind in ACTIVATIONS else ACTIVATIONS[activation],
        "normalization": "LayerNorm" if kind in LAYER_NORM else "RMSNorm",
        "layernorm_epsilon": epsilon,
        "layernorm_zero_centered_gamma": kind in ZERO_CENTERED,
        "add_bias_linear": kind in BIASED,
        "add_qkv_bias": kind in {"qwen2", "glm4_moe", "seed_oss"} | BIASED,
        "qk_layernorm": kind.startswith("qwen3") or latent or config.get("use_qk_norm", False),
        "attention_output_gate": kind in ZERO_CENTERED,
        "softmax_type": "learnable" if kind == "gpt_oss" else "vanilla",
        "activation_func_clamp_value": config.get("swiglu_limit"),
        "glu_linear_offset": 1.0 if kind == "gpt_oss" else 0.0,
        "init_method_std": config["initializer_range"],
        "attention_dropout": config.get("attn_pdrop", config.get("attention_dropout", 0.0)),
        "hidden_dropout": next((config[name] for name in DROPOUTS if name in config), 0.0),
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", learned),
        "vocab_size": config["vocab_size"] - 1,  # NullTokenizer adds a word
        "max_position_embeddings": config["n_positions"] if learned else seq_length,
        "mtp_num_layers": config.get("num_nextn_predict_layers") or None,
        **windows(config),
        **scans(config),
    }
    if activation.startswith("gelu"):
        # The kernel fused with the bias computes the approximation by tanh, PyTorch's default the exact function.
        wanted["bias_activation_fusion"] = activation != "gelu"
    if not latent:
        wanted["kv_channels"] = config.get("head_dim", hidden // heads)
    if rotates:
        wanted |= positions(config, latent=latent)
    else:
        wanted["position_embedding_type"] = "learned_absolute" if learned else "none"
    if latent:
        wanted |= {
            "multi_latent_attention": True, "q_lora_rank": config["q_lora_rank"],
            "kv_lora_rank": config["kv_lora_rank"], "qk_head_dim": config["qk_nope_head_dim"],
            "qk_pos_emb_head_dim": config["qk_rope_head_dim"], "v_head_dim": config["v_head_dim"],
        }  # fmt: skip
    return wanted | router(config)


ACTIVATION_KEYS = ("mlp_hidden_act", "hidden_act", "activation_function")
EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
DROPOUTS = ("resid_pdrop", "residual_dropout", "hidden_dropout")
LAYER_NORM = {"gpt2", "gpt_neox", "starcoder2"}
BIASED = LAYER_NORM | {"gpt_oss"}
ZERO_CENTERED = {"qwen3_next", "qwen3_5_text"}
ACTIVATIONS = {
    "silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu, "gelu_new": torch.nn.functional.gelu,
    "gelu_pytorch_tanh": torch.nn.functional.gelu, "relu2": squared_relu, "gpt_oss": quick_gelu,
}  # fmt: skip
"""Functions by Hugging Face's name, or by type where the model's code does not use the name."""


def windows(config: dict[str, Any]) -> dict[str, Any]:
    """Return the tokens to the left and right of a token that attention sees, and the layers that have this window."""
    size = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    found = {"window_size": None if size is None else (size - 1, 0)}
    # The first of each two layers of GPT-OSS has a window.
    some = [1, 0] * (config["num_hidden_layers"] // 2) if config["model_type"] == "gpt_oss" else None
    return found | {"window_attn_skip_freq": some}


def scans(config: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes of a gated delta net, or of Mamba 2 scans and the pattern of layers."""
    if config["model_type"] in ZERO_CENTERED:
        every = config["full_attention_interval"]
        names = ("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads",
                 "linear_num_value_heads")  # fmt: skip
        return {name: config[name] for name in names} | {
            "experimental_attention_variant": "gated_delta_net",
            "linear_attention_freq": [int((at + 1) % every != 0) for at in range(config["num_hidden_layers"])],
        }
    if "hybrid_override_pattern" not in config:
        return {"hybrid_layer_pattern": None}
    names = {"mamba_state_dim": "ssm_state_size", "mamba_num_groups": "n_groups"}
    same = ("mamba_num_heads", "mamba_head_dim")
    return {name: config[key] for name, key in names.items()} | {name: config[name] for name in same}


def positions(config: dict[str, Any], *, latent: bool) -> dict[str, Any]:
    """Return RoPE's base, share of each head, layers without it, and scaling."""
    wanted: dict[str, Any] = {"rotary_base": config.get("rope_theta", config.get("rotary_emb_base"))}
    scaling = config.get("rope_scaling")
    scaling = None if scaling is None or scaling.get("rope_type") == "default" else scaling
    if not latent:
        kind = None if scaling is None else scaling["rope_type"]
        wanted |= {
            "position_embedding_type": "yarn" if kind == "yarn" else "rope",
            "rotary_percent": config.get("rotary_pct", config.get("partial_rotary_factor", 1.0)),
            "rotary_interleaved": config["model_type"] == "ernie4_5",
            "use_rope_scaling": kind == "llama3",
            "no_rope_freq": [1 - one for one in config["no_rope_layers"]] if "no_rope_layers" in config else None,
        }
        wanted |= {"rope_scaling_factor": scaling["factor"]} if scaling is not None and kind == "llama3" else {}
        if scaling is not None and kind == "yarn":
            names = ("original_max_position_embeddings", "beta_fast", "beta_slow")
            wanted |= {f"yarn_{name}": scaling[name] for name in names}
            wanted |= {
                "yarn_rotary_scaling_factor": scaling["factor"], "yarn_mscale": 1.0, "yarn_mscale_all_dim": 0.0,
                "yarn_correction_range_round_to_int": scaling["truncate"],
            }  # fmt: skip
        return wanted
    wanted |= {"position_embedding_type": "rope", "rope_type": "yarn" if scaling else "rope"}
    if scaling:
        wanted["rotary_scaling_factor"] = float(scaling["factor"])
        for name in ("mscale", "mscale_all_dim", "original_max_position_embeddings", "beta_fast", "beta_slow"):
            wanted[name] = scaling[name]
    return wanted


def router(config: dict[str, Any]) -> dict[str, Any]:
    """Return the experts, the function that chooses them, and the loss that balances them."""
    names = [name for name in ("num_local_experts", "num_experts", "n_routed_experts") if name in config]
    if not names:
        return {"num_moe_experts": None}
    kind = config["model_type"]
    sigmoid = kind in {"glm4_moe", "nemotron_h"} or config.get("scoring_func") == "sigmoid"
    width = config.get("moe_intermediate_size", config["intermediate_size"])
    shared = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
    dense = config.get("first_k_dense_replace", 0)
    grouped = config.get("n_group", 1) > 1
    loss = config.get("router_aux_loss_coef", config.get("aux_loss_alpha", 0.0))
    balancing = "seq_aux_loss" if config.get("seq_aux") else "aux_loss" if loss else "none"
    wanted = {
        "num_moe_experts": config[names[0]],
        "moe_router_topk": config["num_experts_per_tok"],
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": next(
            (config[name] for name in shared if name in config), width * config.get("n_shared_experts", 0) or None
        ),
        "moe_shared_expert_gate": kind == "qwen3_next",
        "moe_layer_freq": [0] * dense + [1] * (config["num_hidden_layers"] - dense) if dense else 1,
        "moe_router_score_function": "sigmoid" if sigmoid else "softmax",
        "moe_router_topk_scaling_factor": config.get("routed_scaling_factor", 1.0),
        "moe_router_enable_expert_bias": sigmoid,
        "moe_router_num_groups": config["n_group"] if grouped else None,
        "moe_router_group_topk": config["topk_group"] if grouped else None,
        "moe_router_load_balancing_type": balancing,
        "moe_aux_loss_coeff": loss,
        "moe_router_dtype": "fp32",
    }
    if wanted["moe_router_topk_scaling_factor"] == 1.0:
        wanted["moe_router_topk_scaling_factor"] = None
    if not sigmoid:
        # Mixtral and GPT-OSS always divide by the sum of the chosen scores.
        wanted["moe_router_pre_softmax"] = not config.get("norm_topk_prob", kind in {"mixtral", "gpt_oss"})
    return wanted


def built(config: dict[str, Any], words: list[str]) -> int:
    """Return the number of parameters of the model that Megatron-LM builds, without rows that pad the vocabulary."""
    sys.argv = ["pretrain_gpt.py", *words]
    arguments = validate_args(parse_args())
    divisor = arguments.make_vocab_size_divisible_by
    arguments.padded_vocab_size = math.ceil(config["vocab_size"] / divisor) * divisor
    set_args(arguments)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    build = gpt_builder if arguments.hybrid_layer_pattern is None else mamba_builder
    model = build(arguments, pre_process=True, post_process=True)
    check_frequencies(config, model)
    matrices = 1 + arguments.untie_embeddings_and_output_weights
    padding = (arguments.padded_vocab_size - config["vocab_size"]) * arguments.hidden_size * matrices
    return sum(parameter.numel() for parameter in model.parameters()) - padding


def check_frequencies(config: dict[str, Any], model: Any) -> None:
    """Assert that the built model rotates by the frequencies of `config.json`."""
    theta = config.get("rope_theta", config.get("rotary_emb_base"))
    if theta is None or "kv_lora_rank" in config:
        return  # no rotation, or compared as settings
    head = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    width = int(head * config.get("rotary_pct", config.get("partial_rotary_factor", 1.0)))
    wanted = [theta ** (-at / width) for at in range(0, width, 2)]
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") == "yarn":
        return  # compared as settings: the frequencies are mixed in each pass
    if scaling.get("rope_type") == "llama3":
        wanted = [scaled(one, scaling) for one in wanted]
    found = model.rotary_pos_emb.inv_freq.tolist()
    assert len(found) == len(wanted)
    assert all(math.isclose(a, b, rel_tol=1e-5) for a, b in zip(found, wanted, strict=True)), (found, wanted)


def scaled(frequency: float, scaling: dict[str, Any]) -> float:
    """Return a frequency of Llama 3.1's scaling: divided if it is low, kept if it is high, mixed between the two."""
    turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    share = min(1.0, max(0.0, (turns - low) / (high - low)))
    return share * frequency + (1 - share) * frequency / scaling["factor"]


# Training


def trained(ranks: int, words: list[str], log: Path) -> list[float]:
    """Return the losses of five steps of `pretrain_gpt.py`, which fall. The last rank prints them to `log`."""
    together(ranks, run_script, words, logs={-1: log})
    text = log.read_text(encoding="utf-8")
    losses = [float(loss) for loss in re.findall(r"lm loss: (\S+)", text)]
    assert len(losses) == 5, text[-2000:]
    assert losses[-1] < losses[0], losses
    return losses


def run_script(words: list[str]) -> None:
    """Run `pretrain_gpt.py`, or `pretrain_mamba.py` for a pattern of layers, with the words."""
    script = pretrain_mamba if "--hybrid-layer-pattern" in words else pretrain_gpt
    sys.argv = [f"{script.__name__}.py", *words]
    # The script is found beside its sources and runs unchanged.
    runpy.run_path(script.__file__, run_name="__main__")


def prepare() -> None:
    """Replace what the sources of a release lack here."""
    _take_compiled_helpers()
    kernels_on_cpu.take_local_layers()
    cpu_as_cuda.widen_attention(DotProductAttention)


def _take_compiled_helpers() -> None:
    """Use the data helpers that the wheel of Megatron Core brings compiled, instead of compiling these sources'."""
    megatron.core.datasets.utils.compile_helpers = lambda: None
    files = importlib.metadata.files("megatron-core") or ()
    (path,) = (file.locate() for file in files if file.name.startswith("helpers_cpp"))
    spec = importlib.util.spec_from_file_location("megatron.core.datasets.helpers_cpp", os.fspath(path))
    assert spec is not None
    assert spec.loader is not None
    sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[spec.name])


if __name__ == "__main__":
    prepare()
    start_each(MODELS, started)
