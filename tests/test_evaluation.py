"""Evaluation between steps equals that of the whole model in plain PyTorch. Learning rates follow their schedule."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import warm_ranks

import hpgo

torch = pytest.importorskip("torch", reason="needs torch: pip install torch")

import evaluation_ranks  # noqa: E402 -- it needs torch
from refusals import refused  # noqa: E402
from test_runtime import alone, put  # noqa: E402

from hpgo.runtime import Pipeline, Workload, read_weights  # noqa: E402
from hpgo.runtime.passes import running  # noqa: E402
from hpgo.runtime.train.learning_rates import schedule_of  # noqa: E402

ROOT = Path(__file__).parent.parent


def whole(workload: Workload, state: dict[str, Any], samples: int) -> dict[str, float]:
    """The loss and the metrics of a model with these weights, on all samples at once."""
    (part,) = workload.parts([workload.layers], dtype=torch.float64)
    for layer, named in part.by_layer().items():
        for name, tensor in named.items():
            tensor.detach().copy_(state[f"{layer}.{name}"])
    inputs, targets = map(torch.stack, zip(*evaluation_ranks.data(workload, samples), strict=True))
    with torch.no_grad(), running(step=0, samples=range(samples)):
        (outputs,) = part.eval()(inputs, rows=samples)
        found = {"loss": float(workload.loss(outputs, targets))}
        errors = evaluation_ranks.error(outputs, targets)
        found["error"] = float(errors.mean())
        found["relative"] = float(errors.sum() / targets.abs().sum())
    return found


CASES: list[dict[str, Any]] = [
    put("1f1b", [[0, 1, 2], [3]], share=4, micro_batches=4, workload="dropping", shard_optimizer=True),
    put("1f1b", [[0, 1], [2, 3]], share=2, micro_batches=4, workload="normed"),
    put("1f1b", [[0, 1], [2, 3]], share=2, micro_batches=4, workload="skips", recompute=True),
    put("zb_v", [[0, 2], [1]], share=4, micro_batches=4, workload="chain"),
    put("interleaved", [[0], [1, 3]], share=4, micro_batches=4, workload="chain"),
    put("dualpipe", [[0, 1], [2, 3]], share=2, micro_batches=8, workload="chain"),
    put("dualpipe_v", [[0], [1]], share=2, micro_batches=4, workload="chain"),
    {**put("1f1b", [[0, 1], [2, 3]], share=2, micro_batches=4, workload="chain"), "backend": "torch"},
]


@pytest.mark.parametrize("samples", [1, 37])
def test_an_evaluation_equals_the_whole_models_under_any_plan(samples: int, tmp_path: Path) -> None:
    (tmp_path / "cases.json").write_text(json.dumps([{**case, "samples": samples} for case in CASES]))
    done = warm_ranks.ran("evaluation_ranks.py", 4, tmp_path, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    first, *others = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    assert all(other == first for other in others)
    for at, (case, rows) in enumerate(zip(CASES, first, strict=True)):
        state = read_weights(tmp_path / f"saved-{at}")
        expected = whole(Workload.read(case["workload"]), state, samples)
        assert rows[-1][1] == pytest.approx(expected, rel=1e-12), case["workload"]
        assert rows[0][1] != rows[1][1]


def test_an_evaluation_changes_no_later_step() -> None:
    """Neither dropout, nor statistics, nor the order of the data, nor random numbers of the data set's function."""
    losses = []
    for evaluates in (False, True):
        with Pipeline(alone(workload="normed"), "runtime_models:normed", optimizer=_sgd) as pipeline:
            data = evaluation_ranks.data(pipeline.workload, 40)
            data = [(one.float(), other.float()) for one, other in data]
            losses.append([])
            for batch in pipeline.loader(data):
                losses[-1].append(pipeline.step(*batch))
                if evaluates:
                    pipeline.evaluate(data[:5], metrics={"error": lambda outputs, _: outputs.flatten(1).sum(1)})
    assert losses[0] == losses[1]
    assert len(losses[0]) > 2


def _sgd(parameters: list[Any]) -> Any:
    return torch.optim.SGD(parameters, lr=0.5)


@pytest.mark.parametrize(
    ("data", "metrics", "error", "words"),
    [
        ([], None, hpgo.errors.ArgumentError, ("sample",)),
        (3, None, hpgo.errors.ArgumentError, ("3",)),
        (..., {"loss": len}, hpgo.errors.ArgumentError, ("loss",)),
        (..., [len], hpgo.errors.ArgumentError, ("metrics",)),
        (..., {"a": lambda *_: torch.ones(7)}, hpgo.errors.ArgumentError, ("`a`", "(7,)")),
        (..., {"a": lambda *_: 1 / 0}, hpgo.errors.RunError, ("ZeroDivisionError",)),
        (..., {"a": lambda out, _: (out.flatten(1)[:, 0], torch.zeros(len(out)))}, hpgo.errors.ArgumentError, ("`a`",)),
    ],
)
def test_what_can_not_be_evaluated_is_refused(data: Any, metrics: Any, error: Any, words: tuple[str, ...]) -> None:
    with Pipeline(alone(), "runtime_models:chain", dtype=torch.float64) as pipeline:
        given = evaluation_ranks.data(pipeline.workload, 3) if data is ... else data
        with pytest.raises(error) as caught:
            pipeline.evaluate(given, metrics=metrics)
        assert all(word in caught.value.message for word in words), caught.value.message
        assert caught.value.hint


def test_learning_rates_follow_the_step_and_survive_a_resume(tmp_path: Path) -> None:
    factor = schedule_of("cosine:warmup=2,min=0.1", 6)

    def run(begin: int, end: int) -> tuple[list[float], list[float]]:
        losses, rates = [], []
        with Pipeline(alone(), "runtime_models:chain", optimizer=_sgd, lr_schedule=factor) as pipeline:
            assert pipeline.resume(tmp_path) is bool(begin)
            for _ in range(begin, end):
                losses.append(pipeline.step(*pipeline.example()))
                rates.append(pipeline.optimizer.param_groups[0]["lr"])
            pipeline.checkpoint(tmp_path)
        return losses, rates

    _, rates = run(0, 3)
    later, more = run(3, 6)
    middle = [0.1 + 0.9 * (1 + math.cos(math.pi * done / 4)) / 2 for done in range(4)]
    assert rates + more == pytest.approx([0.25, 0.5, *(0.5 * one for one in middle)])
    # Plain PyTorch with its own scheduler and the same factor.
    with Pipeline(alone(), "runtime_models:chain", optimizer=_sgd) as pipeline:
        scheduler = torch.optim.lr_scheduler.LambdaLR(pipeline.optimizer, factor)
        losses = []
        for _ in range(6):
            losses.append(pipeline.step(*pipeline.example()))
            scheduler.step()
    assert losses[3:] == later


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("cosin", "unknown_name"),
        ("cosine:warm=3", "unknown_name"),
        ("cosine:warmup=x", "unknown_name"),
        ("cosine:warmup=1.5", "invalid_argument"),
        ("linear:min=2", "invalid_argument"),
    ],
)
def test_unknown_schedules_are_refused(text: str, code: str) -> None:
    with refused(hpgo.errors.ArgumentError, code):
        schedule_of(text, 10)


@pytest.mark.parametrize("factor", [math.nan, -1.0, "a", None])
def test_a_factor_that_is_no_number_is_refused(factor: Any) -> None:
    with (
        Pipeline(alone(), "runtime_models:chain", optimizer=_sgd, lr_schedule=lambda _: factor) as pipeline,
        refused(hpgo.errors.ArgumentError, "user_code"),
    ):
        pipeline.step(*pipeline.example())


def test_the_ported_script_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/train.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    exec(compile(code, "train.md", "exec"), {"__name__": "ported"})
    said = capfd.readouterr().out
    losses = [float(one) for one in re.findall(r"test loss ([0-9.]+)", said)]
    assert losses[-1] < losses[0]
