"""Options and values of frameworks lead to hpgo's own, and refused settings to what was tried and runs."""

from __future__ import annotations

from typing import Any

import click
import pytest

import hpgo
from hpgo.cli.framework_options import _OPTIONS, _VALUES, own_value
from hpgo.cli.llm.estimate import command

PARAMS = {name: param for param in command.params for name in param.opts}


def accepts(words: list[str]) -> bool:
    """Whether the command has the options, and their choices have the values."""
    for option, *values in (part.split() for part in " ".join(words).replace("--", "\n--").strip().split("\n")):
        kind = PARAMS[option].type
        if values and isinstance(kind, click.Choice) and values[0] not in kind.choices:
            return False
    return True


def test_each_option_of_a_framework_leads_to_an_option_of_the_command() -> None:
    assert not {name.replace("_", "-") for name in _OPTIONS} & {name.lstrip("-") for name in PARAMS}
    assert all(accepts([words]) for words in _OPTIONS.values())


def test_each_value_of_a_framework_leads_to_a_value_of_the_option() -> None:
    for option, values in _VALUES.items():
        assert all(accepts([own_value(option, value)]) for value in values)
        assert not values.keys() & set(PARAMS[option].type.choices)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--optimizer-cpu-offload"], "use `--optimizer-offload-fraction 1`"),
        (["--optimizer", "paged_adamw_8bit"], "use `--optimizer paged_adam8bit`"),
    ],
)
def test_a_name_of_a_framework_is_refused_with_the_own_name(run, words: list[str], hint: str) -> None:
    done = run("llm", "estimate", "llama-3-8b", "-c", "h100:1", "-b", 32, "--seq-length", 8192, *words, code=2)
    assert f"hint: {hint}\n" in done.stderr


def test_a_matrix_of_transformers_is_refused_with_the_gemm_that_has_it() -> None:
    given = {"global_batch_size": 64, "seq_length": 4096, "lora_rank": 8}
    with pytest.raises(hpgo.errors.ArgumentError, match="no adapted module `v_proj`") as caught:
        hpgo.estimate_llm("llama-3-8b", "h100:1", **given, lora_target_modules=["linear_proj", "v_proj"])
    assert caught.value.hint == "use linear_qkv"


@pytest.mark.parametrize(
    ("name", "asked", "hint"),
    [
        ("llama-3-8b", {"framework": "torchtitan", "lora_rank": 16, "base_weights_dtype": "nf4"},
         "leave base_weights_dtype out, or use `--framework deepspeed`"),
        ("llama-3-8b", {"framework": "megatron", "packed_length": 2048, "micro_batch_size": 2},
         "leave micro_batch_size out, or use `--framework torchtitan` or `--framework deepspeed`"),
        ("llama-3-8b", {"framework": "torchtitan", "pp": 2, "vpp": 8, "micro_batch_group_size": 4},
         "leave micro_batch_group_size out, or use `--framework megatron` or `--framework megatron-bridge`"),
        ("mixtral-8x7b", {"framework": "megatron", "overlap_ep_comm": True, "ep": 4, "pp": 2},
         "leave overlap_ep_comm out"),
    ],
)  # fmt: skip
def test_a_setting_that_a_framework_does_not_run_is_refused_with_one_that_it_runs(
    name: str, asked: dict[str, Any], hint: str
) -> None:
    given = {"global_batch_size": 64, "seq_length": 4096}
    with pytest.raises(hpgo.errors.ArgumentError) as caught:
        hpgo.estimate_llm(name, "h100:1", **given, **asked)
    assert caught.value.hint == hint
    left = hint.split()[1]
    hpgo.estimate_llm(name, "h100:1", **given, **{key: value for key, value in asked.items() if key != left})
