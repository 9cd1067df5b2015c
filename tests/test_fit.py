"""What fine-tuning fits: limits against direct estimates, the order of the list, and published memory."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import fine_tuning
import pytest
from click.testing import CliRunner
from refusals import refused

import hpgo
from hpgo.cli.main import group
from hpgo.errors import ArgumentError
from hpgo.llm.fit import METHODS, FineTuning, fewest_gpus, fit_llm, largest_models, methods_of, staircase
from hpgo.model.transformer_presets import TRANSFORMERS
from hpgo.show import fit_report

ARGUMENTS: dict[str, dict[str, Any]] = {
    "recompute": {"recompute": "full"},
    "fused CE": {"fused_cross_entropy": True},
    "8-bit Adam": {"optimizer": "adam8bit"},
    "paged Adam": {"optimizer": "paged_adam8bit"},
    "CPU Adam": {"optimizer_offload_fraction": 1.0},
    "no fp32": {"main_params_dtype": "none"},
}
CASES = [("llama-3-8b", "l40s:1", 1), ("gpt-2", "rtx4090:1", 1), ("qwen3-30b-a3b", "h100:1", 8)]


@cache
def ways(model: str, cluster: str, devices: int) -> tuple[FineTuning, ...]:
    return fit_llm(model, cluster, devices=devices, seq_length=1024).ways


def fits(one: FineTuning, cluster: str, *, seq_length: int = 1024, micro_batch_size: int = 1) -> bool:
    """Estimate a way again, from its words alone."""
    asked: dict[str, Any] = {"fused_cross_entropy": False, "zero_stage": 3 if one.estimate.gpus > 1 else 0}
    method, _, rank = one.method.partition(":")
    asked |= {"lora_rank": int(rank)} if rank else {}
    asked |= {"base_weights_dtype": "nf4"} if method == "qlora" else {}
    for setting in one.settings:
        asked |= ARGUMENTS[setting]
    gpus = one.estimate.gpus
    return hpgo.estimate_llm(
        one.estimate.model, cluster, devices=gpus, seq_length=seq_length, micro_batch_size=micro_batch_size,
        global_batch_size=gpus * micro_batch_size, **asked,
    ).fits  # fmt: skip


@pytest.mark.parametrize(("model", "cluster", "devices"), CASES)
def test_the_limits_are_the_largest_that_fit(model: str, cluster: str, devices: int) -> None:
    longest = TRANSFORMERS[model].longest
    for one in ways(model, cluster, devices):
        assert fits(one, cluster) == one.estimate.fits
        sequence, batch = one.max_seq_length, one.max_micro_batch_size
        assert (batch > 0) == one.estimate.fits
        assert not sequence or fits(one, cluster, seq_length=sequence)
        assert not batch or fits(one, cluster, micro_batch_size=batch)
        assert not fits(one, cluster, micro_batch_size=batch + 1)
        # gpt-2 has learned positions, which end before its memory does.
        if model == "gpt-2":
            assert sequence in {0, longest}
        else:
            assert not fits(one, cluster, seq_length=sequence + 256)


@pytest.mark.parametrize(("model", "cluster", "devices"), CASES)
def test_the_fastest_that_fit_come_first_and_the_nearest_of_the_others_follow(
    model: str, cluster: str, devices: int
) -> None:
    found = ways(model, cluster, devices)
    short = [one.estimate.shortfall_bytes for one in found]
    assert short == sorted(short)
    times_s = [one.estimate.step_s for one in found if one.estimate.fits]
    assert times_s
    assert times_s == sorted(times_s)
    assert len({one.name for one in found}) == len(found)
    assert {one.method.partition(":")[0] for one in found} == set(METHODS)


def test_what_the_report_leaves_out_is_beaten_by_what_it_has() -> None:
    found = ways(*CASES[0])
    kept = staircase(found)
    for one in found:
        better = [
            other
            for other in kept
            if other.method == one.method
            and other.estimate.step_s <= one.estimate.step_s
            and other.estimate.fullest.peak_bytes <= one.estimate.fullest.peak_bytes
        ]
        assert better
    assert {"full", "lora:16", "qlora:16"} <= {one.name for one in kept}


def test_fewer_gpus_do_not_fit() -> None:
    one = fewest_gpus("llama-3-70b", "h100:1", method="full")
    assert one is not None
    assert one.estimate.fits
    half = fit_llm("llama-3-70b", "h100:1", devices=one.estimate.gpus // 2, methods=["full"])
    assert not any(way.estimate.fits for way in half.ways)
    assert fewest_gpus("llama-3.1-405b", "rtx4090:1", method="full", most=4) is None


@pytest.mark.parametrize("method", METHODS)
def test_no_larger_model_fits(method: str) -> None:
    (one,) = largest_models("l40s:1", methods=[method])
    assert one.estimate.fits
    size = TRANSFORMERS[one.estimate.model].parameters
    for name, model in TRANSFORMERS.items():
        if model.parameters > size:
            assert not any(way.estimate.fits for way in fit_llm(name, "l40s:1", methods=[method]).ways)


def test_words_that_are_no_methods_are_refused() -> None:
    assert methods_of(["lora:8", "full"]) == [("lora", 8), ("full", 0)]
    for word in ("full:8", "lora:", "lora:0", "lora:x", "dora", ""):
        with refused(ArgumentError, "invalid_argument", word):
            methods_of([word])


def test_published_memory_is_within_the_error_that_the_page_states() -> None:
    errors = [one.estimated_bytes() / one.peak_bytes - 1 for one in fine_tuning.PUBLISHED]
    assert min(errors) > -0.1
    assert max(errors) < 0.28
    page = (Path(__file__).parent.parent / "docs/fit.md").read_text(encoding="utf-8")
    assert fine_tuning.table() in page


@pytest.mark.parametrize("words", [["llama-3-8b", "-c", "l40s"], ["llama-3.1-405b", "-c", "l40s"], ["-c", "h20"]])
def test_reports_have_80_columns(words: list[str]) -> None:
    done = CliRunner().invoke(group, ["llm", "fit", *words])
    assert done.exit_code == 0, done.output
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_json_has_all_ways() -> None:
    done = CliRunner().invoke(group, ["llm", "fit", "llama-3-8b", "-c", "l40s:1", "--seq-length", "1024", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == json.loads(json.dumps(fit_report.document(ways(*CASES[0]))))
