"""The group `hpgo llm`: help of one screen, what a config describes, and names that lead to it."""

from __future__ import annotations

import inspect
import json
import re
import shlex
import textwrap
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import hpgo
from hpgo.cli.llm import COMMANDS, estimate
from hpgo.cli.llm.show import pattern_text
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
    assert "--no-flash-attention" in brief
    assert "which store the scores" not in " ".join(brief.split())
    assert "which store the scores" in " ".join(full.split())


def test_a_group_without_a_command_shows_its_help() -> None:
    assert shown("llm") == shown("llm", "--help")


@pytest.mark.parametrize("name", ["gpt-2", "llama-3-8b", "mixtral-8x7b", "gemma-3-1b", "deepseek-v3"])
def test_show_adds_up_to_the_parameters_of_the_model(name: str) -> None:
    found = json.loads(shown("llm", "show", name, "--json"))
    model = TRANSFORMERS[name]
    assert found["parameters"] == model.parameters == sum(found["parameters_by_part"].values())
    assert len(found["pattern"]) == model.layers
    assert {kind: found["pattern"].count(kind) for kind in found["blocks"]} == {
        kind: one["number"] for kind, one in found["blocks"].items()
    }
    layers = sum(found["blocks"][kind]["parameters"] for kind in found["pattern"])
    ends = found["parameters_by_part"]["embedding"] + found["parameters_by_part"]["head"] + model.norm_parameters
    assert layers + ends == model.parameters


def test_show_counts_the_operations_that_an_estimate_counts() -> None:
    per_token = json.loads(shown("llm", "show", "llama-3-8b", "--seq-length", "8192", "--json"))["model_flop_per_token"]
    one = hpgo.estimate_llm("llama-3-8b", "h100:1", global_batch_size=8, seq_length=8192, tp=2)
    assert per_token == pytest.approx(one.model_flop / (8 * 8192))


def test_show_prints_blocks_that_differ() -> None:
    text = shown("llm", "show", "deepseek-v3")
    assert text.startswith("deepseek-v3: 671.03 billion parameters, 37.55 billion active per token\n")
    assert "61: 3 A, 58 B" in text
    assert [line.split()[:2] for line in text.splitlines() if "latent attention" in line] == [["A", "3"], ["B", "58"]]


@given(st.lists(st.sampled_from("ABC"), min_size=1, max_size=30), st.integers(1, 4))
def test_patterns_in_words_have_every_block(names: list[str], times: int) -> None:
    """The text, read back, is the pattern: runs and repetitions multiply out."""
    text = pattern_text(names * times)
    spelled = re.sub(r"(\d+) ([A-C])", lambda found: ", ".join([found[2]] * int(found[1])), text)
    spelled = re.sub(r"(\d+) × \(([^)]*)\)", lambda found: ", ".join([found[2]] * int(found[1])), spelled)
    assert spelled.split(", ") == names * times


def test_sequences_longer_than_the_positions_of_a_model_are_refused() -> None:
    job = ["-c", "h100:1", "-b", "8"]
    for words in (["show", "gpt-2"], ["estimate", "gpt-2-xl", *job], ["plan", "gpt-2-xl", *job]):
        refused = CliRunner().invoke(group, ["llm", *words, "--seq-length", "8192"]).exception
        assert isinstance(refused, hpgo.errors.ArgumentError)
        assert f"is 8192, but `{words[1]}` has positions for 1024 tokens" in refused.message
        assert refused.hint == "use `--seq-length 1024`"


def test_a_note_says_that_rope_was_not_stated_for_such_long_sequences() -> None:
    said = "note: llama-3-8b states at most 8,192 tokens per sequence, not 16,384"
    for command in ("estimate", "plan"):
        for length, is_said in ((8192, False), (16384, True)):
            words = ["llm", command, "llama-3-8b", "-c", "h100:1", "-b", "8", "--seq-length", str(length)]
            assert (said in CliRunner().invoke(group, words).stderr) == is_said


def test_options_of_an_estimate_have_the_names_of_its_arguments() -> None:
    """As docs/llm.md states. The others are about the command line, or describe the model, the cluster or the batch."""
    names = {max(param.opts, key=len).removeprefix("--").removeprefix("no-") for param in estimate.command.params}
    options = {name.replace("-", "_") for name in names}
    arguments = set(inspect.signature(hpgo.estimate_llm).parameters)
    images = {"images_per_sample", "patches_per_image", "freeze_tower"}
    assert options - arguments == images | {"json", "model", "nic", "output", "tokens_per_batch"}
    assert arguments - options == {"transformer"}


def test_the_page_names_options_that_exist() -> None:
    page = (Path(__file__).parent.parent / "docs/llm.md").read_text(encoding="utf-8")
    table = page.split("Some have names of other programs:", 1)[1].split("\n\n", 2)[1]
    options = {word for param in estimate.command.params for word in param.opts}
    named = {word for row in table.splitlines() for word in re.findall(r"`(--[\w-]+)", row.split("|")[1])}
    assert len(named) > 7
    assert named <= options


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


STACK = "hpgo_stack: 1\nname: flash-3\ntitle: FlashAttention-3 on Hopper\nattention: 0.6\n"
PROBLEM = ("llama-3-8b", "-c", "h100:1", "-b", "32", "--seq-length", "8192")


def step_of(report: str) -> str:
    """Return the step time of a report, with its range."""
    found = re.search(r"^Step time +(.*?;)", report, re.MULTILINE | re.DOTALL)
    assert found is not None, report
    return " ".join(found[1].split())


def next_of(report: str, command: str) -> list[str]:
    """Return the words of the next command that starts with `command`."""
    (line,) = [line for line in report.splitlines() if line.startswith(f"  hpgo {command}")]
    return shlex.split(line)[1:]


@pytest.mark.parametrize("kind", ["stack", "platform", "node"])
def test_the_next_commands_give_the_same_estimate(tmp_path, monkeypatch, run, kind: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("flash 3.yaml").write_text(STACK, encoding="utf-8")
    if kind == "platform":
        one = hpgo.estimate_llm("llama-3-8b", "h100:1", global_batch_size=32, seq_length=8192, stack="flash 3.yaml")
        step = hpgo.MeasuredStep.of("llama-3-8b", hpgo.Cluster.preset("h100:1"), one, 5.0, stack="flash 3.yaml")
        hpgo.fit_platform([step]).platform.save("p.yaml")
    node = str(Path(__file__).parents[1] / "research" / "h100-node.yaml")
    given = {"stack": ["--stack", "flash 3.yaml"], "platform": ["--platform", "p.yaml"], "node": ["--platform", node]}
    planned = shown("llm", "plan", *PROBLEM, *given[kind], "-o", "plan.json")
    explained = shown(*next_of(planned, "llm explain"))
    assert step_of(planned) == step_of(explained)
    compared = shown(*next_of(explained, "llm explain"))
    assert given[kind] == next_of(explained, "llm explain")[-2:]
    chosen = re.search(r"^total +(\S+ \S+)", compared, re.MULTILINE)
    assert chosen is not None
    assert step_of(planned).startswith(chosen[1])
    again = next_of(shown("llm", "estimate", *PROBLEM, *given[kind], "--framework", "megatron"), "llm plan")
    assert step_of(shown(*again)) == step_of(planned)


def test_a_search_after_an_estimate_has_its_stack() -> None:
    for words, stack in (
        ((), "default"),
        (("--framework", "nemo"), "te-hopper"),
        (("--framework", "torchtitan"), "torchtitan"),
    ):
        report = shown("llm", "estimate", *PROBLEM, *words)
        assert f"Stack        {stack}: " in report
        assert f"Stack        {stack}: " in shown(*next_of(report, "llm plan"))
    assert "Next:" not in shown("llm", "estimate", *PROBLEM, "--nic", "200"), "a search takes no rate of NICs"


def test_reports_have_the_title_of_a_stack_file_and_explain_asks_for_the_file(tmp_path, monkeypatch, run) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(STACK, encoding="utf-8")
    words = ("--stack", "mine.yaml")
    for report in (
        shown("llm", "estimate", *PROBLEM, *words), shown("llm", "plan", *PROBLEM, *words, "-o", "plan.json"),
        shown("llm", "explain", "plan.json", *words),
    ):  # fmt: skip
        assert "Stack        flash-3: FlashAttention-3 on Hopper" in report
    failed = run("llm", "explain", "plan.json", code=1)
    assert "the stack of the plan is `flash-3`, but no built-in stack has this name" in failed.stderr
    assert "--stack FILE" in failed.stderr


@pytest.mark.parametrize(
    ("words", "warns"),
    [
        (("--recompute", "selective", "--recompute-modules", "core_attn"), True),
        (("--recompute", "selective"), True),
        (("--recompute", "selective", "--recompute-modules", "mlp"), False),
        (("--recompute", "selective", "--no-flash-attention"), False),
        (("--recompute", "selective", "--recompute-modules", "core_attn", "--precision", "fp8"), False),
    ],
)
def test_recomputation_that_frees_nothing_is_warned_of(words: tuple[str, ...], warns: bool) -> None:
    done = CliRunner().invoke(group, ["llm", "estimate", *PROBLEM, *words])
    assert done.exit_code == 0
    assert ("recomputing core attention frees no memory" in " ".join(done.stderr.split())) == warns


@pytest.mark.parametrize(
    ("seq_length", "fits", "may_run"), [(15360, True, False), (17408, False, True), (20480, False, False)]
)
def test_a_configuration_that_fits_only_what_the_card_reports_may_run(
    seq_length: int, fits: bool, may_run: bool
) -> None:
    """Presets of these cards leave the mean error of memory unused."""
    words = ("llama-3-8b", "-c", "h100:1", "-b", "32", "--seq-length", str(seq_length), "--tp", "2")
    done = CliRunner().invoke(group, ["llm", "estimate", *words])
    assert done.exit_code == 0
    assert ("it does not fit" in done.stderr) != fits
    said = "it may still run: `H100-80GB` reports 85.02 GB, of which plans leave 5.02 GB unused"
    assert (said in " ".join(done.stderr.split())) == may_run
