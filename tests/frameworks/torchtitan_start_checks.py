"""Small public models whose job folders start with torchtitan's own `torchtitan.train`, on CPUs.

For each model, torchtitan parses the folder's configuration, builds the model, and trains the five steps of the smoke
run on processes with gloo. Each process is a fork of this one, so that torchtitan is imported once.
"""

from __future__ import annotations

import math
import os
import re
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import titan_on_cpu
import torch
from forks import together
from results import Start, start_each
from small_models import MODELS, SmallModel
from titan_gpt_oss import check_logits
from torchtitan import train
from torchtitan.config import ConfigManager

from hpgo.export.targets import find
from hpgo.llm.frameworks import framework_support

if TYPE_CHECKING:
    from pathlib import Path

CPU = ("--compile.no_enable",)
RELEASE = version("torchtitan")
RATE = "LEARNING_RATE = 3e-4"


def started(model: SmallModel, at: Path) -> Start:
    """Parse, build and train one model. Raises AssertionError with the end of a log."""
    transformer = model.read(at)
    lacking = framework_support("torchtitan")[1].lacking(transformer)
    if lacking is not None:
        assert not model.torchtitan, f"{model.name} is refused: {lacking.why}"
        return Start(model.name, "torchtitan", RELEASE, refused=lacking.why.partition(",")[0])
    plan = model.plan(at, "torchtitan")
    folder = at / model.name
    words = ["--module", "job_config", *model.write(plan, find("torchtitan"), folder), *CPU]
    if framework_support("torchtitan")[1].by_backend(transformer):
        # Its embeddings have a standard deviation of 1, which five steps of the usual rate hardly change.
        job = folder / "job_config.py"
        text = job.read_text(encoding="utf-8")
        assert RATE in text
        job.write_text(text.replace(RATE, "LEARNING_RATE = 3e-3"), encoding="utf-8")
    (found,) = together(1, read, model.config, words, folder)
    compared, parameters = found
    assert parameters == transformer.parameters, (parameters, transformer.parameters)
    log = folder / "smoke.log"
    together(plan.estimate.gpus, _train, words, folder, logs={-1: log})
    text = re.sub(r"\x1b\[[0-9;]*m", "", log.read_text(encoding="utf-8"))
    losses = [float(loss) for loss in re.findall(r"step: +\d+ +loss: +(\S+)", text)]
    assert len(losses) == 5, text[-2000:]
    assert losses[-1] < losses[0], losses
    named, gpus = plan.estimate.parallelism.named(), plan.estimate.gpus
    return Start(model.name, "torchtitan", RELEASE, named, gpus, compared, parameters, losses)


def read(config: dict[str, Any], words: list[str], folder: Path) -> tuple[int, int]:
    """Return the number of values of `config.json` that torchtitan's model has, which is all, and its parameters."""
    model = configuration(words, folder).model_spec.model
    if not hasattr(model, "layers"):
        return read_backend(config, model)
    if "num_experts_per_tok" in config:
        return read_sparse(config, model)
    block = model.layers[0]
    heads = config["num_attention_heads"]
    rope = block.attention.rope
    found = {
        "num_hidden_layers": len(model.layers),
        "hidden_size": model.dim,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.enable_weight_tying,
        "num_attention_heads": block.attention.n_heads,
        "num_key_value_heads": block.attention.n_kv_heads,
        "head_dim": block.attention.head_dim,
        "intermediate_size": block.feed_forward.w1.out_features,
        "rms_norm_eps": block.attention_norm.eps,
        "rope_theta": rope.theta,
    }
    wanted = {name: config[name] for name in found if name in config} | {
        "head_dim": config.get("head_dim", config["hidden_size"] // heads)
    }
    assert found == wanted, f"found and wanted: {found} {wanted}"
    assert all(one.ffn_norm.eps == model.norm.eps == config["rms_norm_eps"] for one in model.layers)
    assert (block.attention.qk_norm is not None) == config["model_type"].startswith("qwen3")
    with torch.device("meta"):
        built = model.build()
    compared = len(found) + 3 + check_scaling(config.get("rope_scaling"), rope)
    return compared, sum(parameter.numel() for parameter in built.parameters())


def read_backend(config: dict[str, Any], model: Any) -> tuple[int, int]:
    """Return the same for a model of transformers, whose configuration has the names of `config.json`."""
    names = set(config) & set(vars(model)) - {"initializer_range", "max_position_embeddings", "max_window_layers"}
    # The backend sets these itself, or no layer uses them.
    names -= {"sliding_window", "layer_types", "rope_theta"}
    found = {name: getattr(model, name) for name in names}
    wanted = {name: config[name] for name in names}
    assert found == wanted, f"found and wanted: {found} {wanted}"
    theta = config["rope_theta"]
    assert model.rope_parameters["rope_theta"] == theta, (model.rope_parameters, theta)
    assert "hidden_size" in names
    with torch.device("meta"):
        built = model.build()
    return len(found) + 1, sum(parameter.numel() for parameter in built.parameters())


def read_sparse(config: dict[str, Any], model: Any) -> tuple[int, int]:
    """Return the same for a model with experts."""
    last = model.layers[-1]
    attention, moe = last.attention, last.moe
    router, inner = moe.router, moe.routed_experts.inner_experts
    names = {
        "num_hidden_layers": len(model.layers),
        "hidden_size": model.dim,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.enable_weight_tying,
        "num_attention_heads": attention.n_heads,
        "num_experts_per_tok": router.top_k,
        "rms_norm_eps": last.attention_norm.eps,
        "rope_theta": attention.rope.theta,
    }
    names |= dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), router.num_experts)
    if "moe_intermediate_size" in config:
        names["moe_intermediate_size"] = inner.hidden_dim
    else:
        names["intermediate_size"] = inner.hidden_dim
    if "kv_lora_rank" in config:
        latent = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        names |= {name: getattr(attention, name) for name in latent}
        names["q_lora_rank"] = attention.q_lora_rank or None
        names["intermediate_size"] = model.layers[0].feed_forward.w1.out_features
        names["first_k_dense_replace"] = sum(layer.moe is None for layer in model.layers)
        names |= {"scoring_func": router.score_func, "routed_scaling_factor": router.route_scale}
        shared = config["n_shared_experts"] * config["moe_intermediate_size"]
        assert moe.shared_experts.w1.out_features == shared
    else:
        names["num_key_value_heads"] = attention.n_kv_heads
    if config["model_type"] == "gpt_oss":
        windows = [layer.attention.sliding_window_size for layer in model.layers]
        assert windows == [config["sliding_window"], None] * (len(windows) // 2), windows
        names |= {"swiglu_limit": inner.swiglu_limit, "head_dim": attention.head_dim}
    if "norm_topk_prob" in config:
        names["norm_topk_prob"] = router.route_norm
    found = {name: value for name, value in names.items() if name in config}
    wanted = {name: config[name] for name in found}
    assert found == wanted, f"found and wanted: {found} {wanted}"
    assert (moe.load_balance_coeff is not None) == (config.get("topk_method") == "noaux_tc")
    if (scaling := config.get("rope_scaling")) is not None:
        assert (attention.rope.scaling, attention.rope.rope_factor) == ("yarn", scaling["factor"])
        assert config["model_type"] == "gpt_oss" or attention.mscale == scaling["mscale"]
    with torch.device("meta"):
        built = model.build()
    if config["model_type"] == "gpt_oss":
        check_logits(config, model)
    return len(found), sum(parameter.numel() for parameter in built.parameters())


def check_scaling(scaling: dict[str, Any] | None, rope: Any) -> int:
    """Return the number of values of RoPE's scaling that were compared."""
    if scaling is None:
        assert rope.scaling == "none"
        return 1
    assert rope.scaling == "llama"
    names = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    found = [rope.scaling_factor, *(getattr(rope, name) for name in names)]
    wanted = [scaling["factor"], *(scaling[name] for name in names)]
    assert all(math.isclose(a, b) for a, b in zip(found, wanted, strict=True)), (found, wanted)
    return 1 + len(found)


def configuration(words: list[str], folder: Path) -> Any:
    """Return what torchtitan's own parser makes of the words in the job folder."""
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    config = ConfigManager().parse_args(words)
    config.model_spec.model.update_from_config(config=config)
    return config


def _train(words: list[str], folder: Path) -> None:
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    sys.argv = ["train.py", *words]
    step = train.Trainer.train_step

    def checked(trainer: Any, *given: Any) -> Any:
        for part in trainer.model_parts:
            if hasattr(part, "rotary_emb"):
                check_frequencies(part)
        return step(trainer, *given)

    train.Trainer.train_step = checked
    train.main()


def check_frequencies(model: Any) -> None:
    """Raise AssertionError unless RoPE of a model of transformers has the frequencies of its configuration."""
    config = model.model.config
    width = config.hidden_size // config.num_attention_heads
    wanted = config.rope_parameters["rope_theta"] ** -(torch.arange(0, width, 2) / width)
    torch.testing.assert_close(model.rotary_emb.inv_freq.cpu(), wanted)


if __name__ == "__main__":
    titan_on_cpu.plain_attention()
    start_each(MODELS, started)
