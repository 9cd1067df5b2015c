"""The group `hpgo llm`: help of one screen, what a config describes, and names that lead to it."""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from pathlib import Path

import pytest
from click.testing import CliRunner

import hpgo
from hpgo.cli.llm import COMMANDS, estimate
from hpgo.cli.main import group
from hpgo.model.transformer_presets import TRANSFORMERS

SCREEN = range(20, 41)
"""Lines of help that fit on one screen."""


def shown(*words: str) -> str:
    done = CliRunner().invoke(group, list(words))
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize("command", [*COMMANDS, ""])
def test_help_fits_on_one_screen(command: str) -> None:
    assert len(shown("llm", *command.split(), "--help").splitlines()) in SCREEN


def test_help_names_rare_options_and_the_command_help_explains_them() -> None:
    brief, full = shown("llm", "estimate", "--help"), shown("help", "llm", "estimate")
    assert "--no-flash-attention," in brief
    assert "which store the scores" not in " ".join(brief.split())
    assert "which store the scores" in " ".join(full.split())


def test_a_group_without_a_command_shows_its_help() -> None:
    assert shown("llm") == shown("llm", "--help")


@pytest.mark.parametrize("name", ["gpt-2", "llama-3-8b", "mixtral-8x7b", "gemma-3-1b", "deepseek-v3"])
def test_show_adds_up_to_the_parameters_of_the_model(name: str) -> None:
    found = json.loads(shown("llm", "show", name, "--json"))
    model = TRANSFORMERS[name]
    assert found["parameters"] == model.parameters == sum(found["parameters_by_part"].values())
    assert [one["blocks"][0] for one in found["blocks"]] == [0, *(one["blocks"][1] for one in found["blocks"][:-1])]
    assert found["blocks"][-1]["blocks"][1] == model.layers
    layers = sum((one["blocks"][1] - one["blocks"][0]) * one["parameters"] for one in found["blocks"])
    ends = found["parameters_by_part"]["embedding"] + found["parameters_by_part"]["head"] + model.norm_parameters
    assert layers + ends == model.parameters


def test_show_counts_the_operations_that_an_estimate_counts() -> None:
    per_token = json.loads(shown("llm", "show", "llama-3-8b", "--seq-length", "8192", "--json"))["model_flop_per_token"]
    one = hpgo.estimate_llm("llama-3-8b", "h100:1", global_batch_size=8, seq_length=8192, tp=2)
    assert per_token == pytest.approx(one.model_flop / (8 * 8192))


def test_show_prints_blocks_that_differ() -> None:
    text = shown("llm", "show", "deepseek-v3")
    assert text.startswith("deepseek-v3: 671.03 billion parameters, 37.55 billion active per token\n")
    assert [line.split()[0] for line in text.splitlines() if "latent attention" in line] == ["0–2", "3–60"]


def test_sequences_longer_than_the_positions_of_a_model_are_refused() -> None:
    refused = CliRunner().invoke(group, ["llm", "show", "gpt-2", "--seq-length", "2048"]).exception
    assert isinstance(refused, hpgo.errors.ArgumentError)
    assert refused.hint == "use --seq-length 1024"


def test_the_pages_table_names_the_options_and_arguments_of_an_estimate() -> None:
    page = (Path(__file__).parent.parent / "docs/llm.md").read_text(encoding="utf-8")
    table = page.split("| option | argument | |\n", 1)[1].split("\n\n", 1)[0].splitlines()[1:]
    command = estimate.command
    options = {word for param in command.params for word in param.opts}
    arguments = set(inspect.signature(hpgo.estimate_llm).parameters)
    for row in table:
        _, option, argument, *_ = row.split("|")
        assert set(re.findall(r"`(--[\w-]+)`", option)) <= options, row
        assert set(re.findall(r"`(\w+)`", argument)) <= arguments, row
    assert len(table) > 15


def test_the_step_that_the_help_of_calibrate_shows_is_read(tmp_path: Path) -> None:
    text = (
        shown("llm", "calibrate", "--help")
        .split("A table of one step, with `seconds` or a `log`:\n", 1)[1]
        .split("\n\n", 1)[0]
    )
    (tmp_path / "steps.yaml").write_text(textwrap.dedent(text), encoding="utf-8")
    assert "1 measured step" in shown("llm", "calibrate", str(tmp_path / "steps.yaml"))


def test_pictures_and_plans_are_told_apart_by_their_endings(tmp_path: Path) -> None:
    question = ["llama-3-8b", "-c", "h100:1", "-b", "8", "--seq-length", "4096", "--fix", "tp=2", "--top", "1"]
    files = [tmp_path / name for name in ("llm-plan.json", "llm-plan.svg")]
    shown("llm", "plan", *question, *(word for file in files for word in ("-o", str(file))))
    assert hpgo.LlmPlan.read(files[0]).estimate.parallelism.tp == 2
    assert files[1].read_text(encoding="utf-8").lstrip().startswith("<svg")
