"""Batches of other lengths than the example's, last partial batches and lists of several inputs equal plain PyTorch."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import warm_ranks

torch = pytest.importorskip("torch", reason="needs torch: pip install torch")

from refusals import refused  # noqa: E402 -- after torch, without which nothing here runs
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.nn.utils.rnn import pack_sequence  # noqa: E402
from varying_ranks import BATCH, CASES, LENGTHS, SAMPLES, WIDTH, batch, data, layers, sgd, tokens_loss, workload  # noqa: E402

import hpgo  # noqa: E402
from hpgo.runtime import Pipeline, Workload  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path


def called(modules: list[nn.Module], inputs: Any) -> torch.Tensor:
    first, *others = modules
    if isinstance(inputs, dict):
        found = first(**inputs)
    else:
        found = first(*inputs) if isinstance(inputs, tuple) else first(inputs)
    for one in others:
        found = one(found)
    return found


def stacked(samples: list[Any]) -> tuple[Any, torch.Tensor]:
    inputs = [one for one, _ in samples]
    targets = torch.stack([one for _, one in samples])
    if isinstance(inputs[0], dict):
        joined: Any = {
            name: None if inputs[0][name] is None else torch.stack([one[name] for one in inputs]) for name in inputs[0]
        }
    elif isinstance(inputs[0], tuple):
        joined = tuple(map(torch.stack, zip(*inputs, strict=True)))
    else:
        joined = torch.stack(inputs)
    return joined, targets


def by_hand(case: str) -> list[float]:
    """Losses of the same steps in plain PyTorch, and that of the evaluation."""
    modules = layers(case)
    optimizer = sgd(nn.ModuleList(modules).parameters())
    samples = data(case)
    parts = [stacked(samples[at : at + BATCH]) for at in range(0, SAMPLES, BATCH)]
    losses = []
    for inputs, targets in [*(batch(case, length, at) for at, length in enumerate(LENGTHS)), *parts]:
        loss = tokens_loss(called(modules, inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        found = [(tokens_loss(called(modules, inputs), targets), targets) for inputs, targets in parts]
    # Texts count equally whatever their length, unless the weight counts their tokens.
    weights = [float((targets != -100).sum()) if case == "weighted" else len(targets) for _, targets in found]
    total = sum(float(loss) * weight for (loss, _), weight in zip(found, weights, strict=True))
    return [*losses, total / sum(weights)]


def test_lengths_and_last_batches_equal_plain_pytorch(tmp_path: Path) -> None:
    done = warm_ranks.ran("varying_ranks.py", 3, tmp_path, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    first, *others = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    assert all(other == first for other in others)
    for case in CASES:
        assert first[case] == pytest.approx(by_hand(case), rel=1e-12), case


def alone(work: Workload, batch_size: int = BATCH) -> Pipeline:
    program = hpgo.program(
        hpgo.schedule("1f1b", ranks=1, micro_batches=batch_size // 2),
        [(work.layers, [0])],
        pipeline_micro_batch_size=2,
        global_batch_size=batch_size,
    )
    return Pipeline(program, work, optimizer=sgd, tell=lambda _: None)


def test_many_lengths_keep_few_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpgo.runtime.dynamic_shapes._MAX_ENGINES", 2)
    lengths = [7, 4, 9, 5, 7, 4]
    with alone(workload("plain")) as pipeline:
        losses = [pipeline.step(*batch("plain", length, at)) for at, length in enumerate(lengths)]
        assert pipeline._engines is not None
        assert len(pipeline._engines._known) == 2
    with alone(workload("plain")) as pipeline:
        monkeypatch.setattr("hpgo.runtime.dynamic_shapes._MAX_ENGINES", 128)
        assert losses == [pipeline.step(*batch("plain", length, at)) for at, length in enumerate(lengths)]


def test_other_shapes_are_refused_with_the_option_that_takes_them() -> None:
    with (
        alone(workload("plain", dynamic_shapes=False)) as pipeline,
        refused(hpgo.errors.ArgumentError, "invalid_argument", "input:0", "(2, 4)", "(2, 7)") as caught,
    ):
        pipeline.step(*batch("plain", 4, 0))
    assert "dynamic_shapes=True" in caught.value.hint


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.linear(given)


class Constant(nn.Module):
    """A layer that returns the length as a number, which no stage sends."""

    def forward(self, given: torch.Tensor) -> tuple[torch.Tensor, int]:
        return given, given.shape[1]


class Read(nn.Module):
    def forward(self, given: tuple[torch.Tensor, int]) -> torch.Tensor:
        return given[0] * given[1]


def test_models_that_can_not_take_other_shapes_are_refused() -> None:
    zeros = torch.zeros(2, 3, WIDTH)
    with refused(hpgo.errors.ArgumentError, "unsupported", "Whole", "exported") as caught:
        Workload(Whole(), zeros, zeros, functional.mse_loss, dynamic_shapes=True)
    assert "list of modules" in caught.value.hint
    numbers = Workload([Whole(), Constant(), Read()], zeros, zeros, functional.mse_loss, dynamic_shapes=True)
    other = torch.zeros(BATCH, 4, WIDTH)
    with alone(numbers) as pipeline, refused(hpgo.errors.ArgumentError, "user_code", "layer `1`", "(4, 6)"):
        pipeline.step(other, other)
    with refused(hpgo.errors.ArgumentError, "unsupported", "dynamic_shapes") as caught:
        Pipeline(pipeline.program, numbers, backend="torch")
    with alone(numbers) as pipeline, refused(hpgo.errors.ArgumentError, "invalid_argument", "input:0", "dimensions"):
        pipeline.step(torch.zeros(BATCH, WIDTH), torch.zeros(BATCH, WIDTH))


@pytest.mark.parametrize("kind", ["packed", "nested"])
def test_ragged_inputs_are_refused_with_the_padded_form(kind: str) -> None:
    texts = [torch.zeros(5, WIDTH), torch.zeros(3, WIDTH)]
    ragged = pack_sequence(texts) if kind == "packed" else torch.nested.nested_tensor(texts, layout=torch.jagged)
    for inputs in (ragged, {"texts": ragged}):
        with refused(hpgo.errors.ArgumentError, "unsupported", "example_inputs") as caught:
            Workload([nn.GRU(WIDTH, WIDTH)], inputs, torch.zeros(2, 5, WIDTH), functional.mse_loss)
        assert ("pack_padded_sequence(" if kind == "packed" else "to_padded_tensor(") in caught.value.hint


class OwnLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.linear(given).square().mean()


def test_last_batches_that_would_count_more_samples_are_refused() -> None:
    zeros = torch.zeros(2, WIDTH)
    normed = Workload([nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)], zeros, zeros, functional.mse_loss)
    for work, word in ((normed, "normalization"), (Workload(OwnLoss(), zeros), "all samples")):
        samples = [torch.zeros(WIDTH)] * 11 if work is not normed else [(torch.zeros(WIDTH),) * 2] * 11
        with alone(work) as pipeline:
            assert len(pipeline.loader(samples)) == 1
            with refused(hpgo.errors.ArgumentError, "unsupported", word) as caught:
                pipeline.loader(samples, drop_last=False)
            assert "drop_last=False" in caught.value.hint
    # An evaluation would count them, too. Its normalization has fixed statistics.
    with alone(Workload(OwnLoss(), zeros)) as pipeline:
        with refused(hpgo.errors.ArgumentError, "unsupported", "last 3", "8"):
            pipeline.evaluate([torch.zeros(WIDTH)] * 11)
        assert pipeline.evaluate([torch.ones(WIDTH)] * 16)["loss"] > 0


def test_metrics_get_the_containers_of_the_example() -> None:
    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, given: torch.Tensor) -> dict[str, Any]:
            return {"scores": self.linear(given), "cache": None}

    def error(outputs: dict[str, Any], targets: dict[str, torch.Tensor]) -> torch.Tensor:
        return (outputs["scores"] - targets["wanted"]).abs().sum(1)

    def loss(outputs: dict[str, Any], targets: dict[str, torch.Tensor]) -> torch.Tensor:
        return functional.mse_loss(outputs["scores"], targets["wanted"])

    torch.manual_seed(0)
    model = Scores()
    inputs, targets = torch.randn(11, WIDTH), torch.randn(11, WIDTH)
    work = Workload(model, inputs[:2], {"wanted": targets[:2]}, loss)
    samples = [(inputs[at], {"wanted": targets[at]}) for at in range(11)]
    with alone(work) as pipeline, torch.no_grad():
        found = pipeline.evaluate(samples, metrics={"error": error})
        outputs = model(inputs)
    wanted = {"wanted": targets}
    expected = {"loss": float(loss(outputs, wanted)), "error": float(error(outputs, wanted).mean())}
    assert found == pytest.approx(expected, rel=1e-6)


def test_a_loader_continues_behind_a_partial_batch() -> None:
    samples = data("plain")[:BATCH] + data("plain")[:3]
    with alone(workload("plain")) as pipeline:
        loader = pipeline.loader(samples, drop_last=False)
        assert (len(loader), loader.dropped) == (2, 0)
        counts = [inputs.count for inputs, _ in loader]
        assert counts == [BATCH, 3]
        assert loader.state_dict()["position"] == 2
        again = pipeline.loader(samples, drop_last=False)
        again.load_state_dict(loader.state_dict())
        assert [int(one[0].count) for one in again] == counts
        assert again.epoch == 1
        few = pipeline.loader(samples[:3], drop_last=False)
        assert [inputs.count for inputs, _ in few] == [3]
