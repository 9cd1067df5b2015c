"""A loss trains as in plain PyTorch under every plan, or the run says before its first step that it doesn't."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import warnings
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hpgo

torch = pytest.importorskip("torch", reason="needs torch: pip install torch")

from refusals import refused  # noqa: E402
from torch import nn  # noqa: E402 -- needs torch
from torch.nn import functional  # noqa: E402

from hpgo.runtime import Pipeline, Workload  # noqa: E402
from hpgo.runtime.profiling import measure  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BATCH, WORDS, LENGTH, CLASSES = 8, 11, 6, 5
CPU = torch.device("cpu")
CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 3.0, 0.5, 2.0], dtype=torch.float64)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def whole(maximum: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(maximum, shape, generator=torch.Generator().manual_seed(seed))


TOKENS = whole(WORDS, BATCH, LENGTH + 1)
NEXT = TOKENS[:, 1:].contiguous()
PADDED = NEXT.clone()
for at in range(BATCH):
    PADDED[at, LENGTH - at % 5 :] = -100


def tokens_loss(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


def shifting_loss(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """As in Hugging Face's causal language models."""
    return tokens_loss(scores, functional.pad(labels, (0, 1), value=-100)[:, 1:])


def contrastive(outputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    near = functional.normalize(outputs, dim=-1)
    return functional.cross_entropy(near @ near.T / 0.1, torch.arange(len(near)))


def counted(targets: torch.Tensor) -> torch.Tensor:
    return (targets != -100).sum(1)


class Text(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Embedding(WORDS, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, WORDS))


class Classifier(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, CLASSES))


# Model, inputs, targets, loss, weight.
CASES: dict[str, tuple[type[nn.Module], torch.Tensor, torch.Tensor, Any, Any]] = {
    "mean": (Classifier, random(BATCH, 4), random(BATCH, CLASSES, seed=1), functional.mse_loss, None),
    "sum": (Classifier, random(BATCH, 4), random(BATCH, CLASSES, seed=1), nn.MSELoss(reduction="sum"), None),
    "sum of classes": (Classifier, random(BATCH, 4), whole(CLASSES, BATCH), nn.CrossEntropyLoss(reduction="sum"), None),
    "sum of a share": (Classifier, random(BATCH, 4), random(BATCH, CLASSES, seed=1),
                       lambda outputs, targets: ((outputs - targets) ** 2).sum() / BATCH, None),
    "classes": (Classifier, random(BATCH, 4), whole(CLASSES, BATCH), functional.cross_entropy, None),
    "weighted classes": (Classifier, random(BATCH, 4), whole(CLASSES, BATCH), nn.CrossEntropyLoss(CLASS_WEIGHTS), None),
    "weighted classes, said": (Classifier, random(BATCH, 4), whole(CLASSES, BATCH), nn.CrossEntropyLoss(CLASS_WEIGHTS),
                               lambda targets: CLASS_WEIGHTS[targets]),
    "tokens": (Text, TOKENS[:, :-1], NEXT, tokens_loss, None),
    "padded": (Text, TOKENS[:, :-1], PADDED, tokens_loss, None),
    "padded, said": (Text, TOKENS[:, :-1], PADDED, tokens_loss, counted),
    "padded, said wrongly": (Text, TOKENS[:, :-1], PADDED, tokens_loss, lambda targets: torch.ones(len(targets))),
    "padded, summed": (Text, TOKENS[:, :-1], PADDED,
                       lambda scores, targets: functional.cross_entropy(
                           scores.flatten(0, 1), targets.flatten(), reduction="sum"), None),
    "labels that are shifted": (Text, TOKENS[:, :-1], TOKENS[:, :-1], shifting_loss, None),
    "contrastive": (Classifier, random(BATCH, 4), random(BATCH, CLASSES, seed=1), contrastive, None),
    "of the batch's statistics": (Classifier, random(BATCH, 4), random(BATCH, CLASSES, seed=1),
                                  lambda outputs, _: (outputs.std(0) - 1).square().mean(), None),
    "root": (Classifier, random(BATCH, 4), random(BATCH, CLASSES, seed=1),
             lambda outputs, targets: functional.mse_loss(outputs, targets).sqrt(), None),
}  # fmt: skip
MIXING = {"contrastive", "of the batch's statistics", "root"}
REFUSED = {"weighted classes", "padded", "padded, said wrongly"}
SUMS = {"sum", "sum of classes", "sum of a share", "padded, summed"}


def made(case: str, *, like: tuple[torch.Tensor, torch.Tensor] | None = None) -> tuple[Workload, nn.Module]:
    """A workload with the case's data as its example, or data like it, and its model."""
    model, inputs, targets, loss, weight = CASES[case]
    torch.manual_seed(0)
    layers = model().double()
    example = (inputs, targets) if like is None else like
    return Workload(layers, *example, copy.deepcopy(loss), weight=weight), copy.deepcopy(layers)


def plain(model: nn.Module, case: str, steps: int) -> list[float]:
    """Losses of plain PyTorch with the whole batch."""
    _, inputs, targets, loss, _ = CASES[case]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(steps):
        found = loss(model(inputs), targets)
        optimizer.zero_grad()
        found.backward()
        optimizer.step()
        losses.append(float(found.detach()))
    return losses


def pipeline(workload: Workload, micro_batch: int, tell: Callable[[str], None] | None = None) -> Pipeline:
    schedule = hpgo.schedule("1f1b", ranks=1, micro_batches=BATCH // micro_batch)
    program = hpgo.program(
        schedule, [(workload.layers, [0])], pipeline_micro_batch_size=micro_batch, global_batch_size=BATCH
    )  # fmt: skip
    return Pipeline(program, workload, optimizer=lambda weights: torch.optim.SGD(weights, lr=0.05), tell=tell)


@pytest.mark.parametrize("micro_batch", [1, 2, 4, 8])
@pytest.mark.parametrize("case", CASES)
def test_every_plan_trains_as_plain_pytorch_or_says_before_that_it_does_not(case: str, micro_batch: int) -> None:
    workload, model = made(case)
    _, inputs, targets, *_ = CASES[case]
    if case in REFUSED and (micro_batch < BATCH):
        with refused(hpgo.errors.ArgumentError, "mismatch"):
            pipeline(workload, micro_batch)
        return
    told: list[str] = []
    with pipeline(workload, micro_batch, told.append) as run:
        assert bool(told) == (case in SUMS or (case in MIXING and micro_batch < BATCH))
        if case in MIXING and micro_batch < BATCH:
            assert f"here {micro_batch} of a global batch of 8" in told[0]
            return
        losses = [run.step(inputs, targets) for _ in range(3)]
        weights = [weight.detach() for part in run.parts.values() for weight in part.parameters()]
    assert losses == pytest.approx(plain(model, case, 3), rel=1e-12)
    for found, wanted in zip(weights, model.parameters(), strict=True):
        torch.testing.assert_close(found, wanted.detach(), rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
@pytest.mark.parametrize(("case", "example"), [("padded", "tokens"), ("weighted classes", "classes")])
def test_targets_that_count_differently_are_refused_also_where_only_the_data_has_them(
    case: str, example: str, micro_batch: int
) -> None:
    _, inputs, targets, *_ = CASES[case]
    alike = torch.zeros_like(CASES[example][2])
    workload, _ = made(case, like=(inputs, alike))
    with pipeline(workload, micro_batch) as run:
        before = [weight.detach().clone() for part in run.parts.values() for weight in part.parameters()]
        with refused(hpgo.errors.ArgumentError, "mismatch") as raised:
            run.step(inputs, targets)
        after = [weight.detach() for part in run.parts.values() for weight in part.parameters()]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert ("(targets != -100).sum(1)" if case == "padded" else "weight=lambda targets") in raised.value.hint


def test_a_sum_is_told_as_a_warning_unless_somebody_takes_it() -> None:
    with pytest.warns(RuntimeWarning, match="the sum over samples") as caught, pipeline(made("sum")[0], 2):
        pass
    assert caught[0].filename == __file__


def test_a_sum_with_weights_is_refused() -> None:
    model, inputs, targets, loss, _ = CASES["padded, summed"]
    workload = Workload(model(), inputs, targets, loss, weight=counted)
    with refused(hpgo.errors.ArgumentError, "invalid_argument", "weight") as raised:
        pipeline(workload, 2)
    assert "leave `weight` out" in raised.value.hint


def test_a_loss_that_holds_tensors_follows_the_outputs_to_their_device() -> None:
    """The device `meta` stands for a GPU."""
    workload, _ = made("weighted classes")
    workload.loss_of(random(BATCH, CLASSES), whole(CLASSES, BATCH))
    meta = torch.device("meta")
    workload.loss_of(random(BATCH, CLASSES).to(meta), whole(CLASSES, BATCH).to(meta))
    assert workload.loss.weight.device == meta


def test_parts_of_a_batch_add_up_without_a_pipeline_too() -> None:
    for case in SUMS - {"padded, summed"}:
        workload, model = made(case)
        _, inputs, targets, loss, _ = CASES[case]
        outputs = model(inputs)
        parts = [workload.loss_of(outputs[at : at + 2], targets[at : at + 2]) for at in range(0, BATCH, 2)]
        assert float(sum(parts).detach()) == pytest.approx(float(loss(outputs, targets).detach()), rel=1e-12)


def kind(loss: Any, outputs: torch.Tensor, targets: torch.Tensor, weight: Any = None) -> str:
    workload = Workload([nn.Identity()], outputs, targets, loss, weight=weight)
    return workload.reduction(workload.outputs(None), CPU).kind


_EACH: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "squares": lambda outputs, targets: (outputs - targets).square().flatten(1).mean(1),
    "distance": lambda outputs, targets: (outputs - targets).abs().flatten(1).sum(1),
    "hinge": lambda outputs, targets: (1 - outputs * targets.sign()).relu().flatten(1).mean(1),
    "entropy": lambda outputs, targets: functional.cross_entropy(outputs, targets.softmax(1), reduction="none"),
}


@given(
    each=st.sampled_from(sorted(_EACH)),
    rows=st.integers(1, 9),
    width=st.integers(2, 6),
    factor=st.floats(0.01, 100),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_means_and_sums_of_what_each_sample_costs_are_told_apart(
    each: str, rows: int, width: int, factor: float, dtype: torch.dtype, seed: int
) -> None:
    outputs, targets = random(rows, width, seed=seed).to(dtype), random(rows, width, seed=seed + 1).to(dtype)
    assert kind(lambda *given: factor * _EACH[each](*given).mean(), outputs, targets) == "mean"
    assert kind(lambda *given: factor * _EACH[each](*given).sum(), outputs, targets) == "sum"


@given(each=st.sampled_from(["squares", "distance"]), rows=st.integers(2, 9), seed=st.integers(0, 99))
def test_means_by_the_targets_are_weighted_and_hold_with_that_weight(each: str, rows: int, seed: int) -> None:
    targets = random(rows, 3, seed=seed)
    targets *= torch.arange(1.0, rows + 1, dtype=torch.float64)[:, None]  # no two rows count the same

    def weight(given: torch.Tensor) -> torch.Tensor:
        return given.abs().sum(1)

    def loss(outputs: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        return (_EACH[each](outputs, given) * weight(given)).sum() / weight(given).sum()

    assert kind(loss, random(rows, 3), targets) == "weighted"
    assert kind(loss, random(rows, 3), targets, weight) == "mean"
    assert kind(loss, random(rows, 3), targets, lambda given: 1 / weight(given)) == "weighted"


@pytest.mark.parametrize(
    ("loss", "outputs", "targets", "wanted"),
    [
        (nn.BCELoss(), torch.rand(4, 1), torch.ones(4, 1), "mean"),
        (nn.BCELoss(reduction="sum"), torch.rand(4, 1), torch.ones(4, 1), "sum"),
        (nn.NLLLoss(), torch.rand(4, 3), torch.tensor([0, 1, 2, 0]), "mean"),
        (lambda one, other: functional.mse_loss(one.bfloat16(), other.bfloat16()), torch.rand(4, 9), torch.rand(4, 9),
         "mean"),
        (lambda one, other: functional.mse_loss(functional.dropout(one), other), torch.rand(4, 9), torch.rand(4, 9),
         "unknown"),
        (lambda one, _: (one * 0).sum(), torch.rand(4, 9), torch.rand(4, 9), "unknown"),
        (lambda _, __: 1 / 0, torch.rand(4, 9), torch.rand(4, 9), "unknown"),
        (tokens_loss, torch.rand(4, 6, 11), torch.full((4, 6), -100), "unknown"),
    ],
)  # fmt: skip
def test_losses_of_other_kinds(loss: Any, outputs: torch.Tensor, targets: torch.Tensor, wanted: str) -> None:
    assert kind(loss, outputs, targets) == wanted


def test_what_is_not_known_is_told_once_the_first_batch_does_not_show_it_either() -> None:
    inputs, targets = CASES["padded, said"][1:3]
    nothing = torch.full_like(targets, -100)
    told: list[str] = []
    with pipeline(Workload(Text(), inputs, nothing, tokens_loss, weight=counted), 2, told.append) as run:
        run.step(inputs, targets)
    assert told == []

    def drawing(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(functional.dropout(outputs), targets)

    _, inputs, targets, *_ = CASES["mean"]
    with pipeline(Workload(Classifier(), inputs.float(), targets.float(), drawing), 2, told.append) as run:
        assert told == []
        run.step(inputs.float(), targets.float())
    assert len(told) == 1
    assert "is unknown: on random outputs it returns another number each time" in told[0]


class Counting(nn.Module):
    """A loss with a state, which draws random numbers that change nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        torch.rand(())
        return functional.mse_loss(outputs, targets)


def test_looking_at_a_loss_leaves_its_state_and_random_numbers_as_they_are() -> None:
    loss = Counting()
    workload = Workload([nn.Linear(4, 4)], random(4, 4).float(), random(4, 4).float(), loss)
    outputs = workload.outputs(None)
    before = torch.get_rng_state()
    assert workload.reduction(outputs, CPU).kind == "mean"
    assert torch.equal(torch.get_rng_state(), before)
    assert not loss.calls


def told(loss: Any, inputs: torch.Tensor, targets: torch.Tensor, *, example: torch.Tensor | None = None) -> list[str]:
    """Remarks on training with these tokens in the first batch."""
    like = torch.zeros_like(inputs) if example is None else example
    sentences: list[str] = []
    with pipeline(Workload(Text(), like, like, loss), 8, sentences.append) as run:
        run.step(inputs, targets)
    return sentences


def test_tokens_that_are_their_own_targets_are_told() -> None:
    tokens = TOKENS[:, :-1].contiguous()
    half = torch.where(whole(2, BATCH, LENGTH) == 0, tokens, -100)
    for targets in tokens, half:
        (said,) = told(tokens_loss, tokens, targets)
        assert "learns to repeat the token that it reads" in said
        assert "`tokens[1:]`" in said
    (said,) = told(shifting_loss, tokens, NEXT)
    assert "the loss shifts them once more" in said


def test_tokens_whose_targets_are_others_are_not() -> None:
    tokens = TOKENS[:, :-1].contiguous()
    ended = NEXT.clone()
    ended[:, -1] = -100
    masked = tokens.clone()
    masked[:, ::2] = WORDS - 1  # what the model reads at places that it shall fill in
    wanted = torch.where(masked == tokens, -100, tokens)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert told(tokens_loss, tokens, NEXT) == []
        assert told(tokens_loss, tokens, ended) == []
        assert told(shifting_loss, tokens, tokens) == []
        assert told(tokens_loss, masked, wanted) == []
        assert told(tokens_loss, torch.zeros_like(tokens), torch.zeros_like(tokens)) == []


def test_a_language_model_by_name_is_not_trained_to_repeat() -> None:
    workload = Workload.read(f"gpt:layers=1,hidden=8,heads=2,vocabulary={WORDS},length={LENGTH}")
    tokens = TOKENS[:, :-1].contiguous()
    with pipeline(workload, 2) as run, refused(hpgo.errors.ArgumentError, "invalid_argument", "0", "Hugging", "Face"):
        run.step(tokens, tokens)


def test_a_sum_is_that_of_one_device_where_replicas_share_rows_unevenly(tmp_path: Path) -> None:
    (tmp_path / "summed.py").write_text(
        "import torch\nfrom torch import nn\nfrom hpgo.runtime import Workload\n"
        "def build():\n"
        "    torch.manual_seed(0)\n"
        "    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()\n"
        "    inputs, targets = torch.randn(6, 4).double(), torch.randn(6, 2).double()\n"
        "    return Workload(model, inputs, targets, nn.MSELoss(reduction='sum'))\n"
    )
    program = hpgo.program(
        hpgo.schedule("1f1b", ranks=1, micro_batches=2), [(["0", "1", "2"], [0, 1])],
        pipeline_micro_batch_size=3, global_batch_size=6,
    )  # fmt: skip
    assert [len(rows) for rows in program.stages[0].rows] == [2, 1]
    program.save(tmp_path / "program.json")
    words = ["--workload", "summed:build", "--steps", "3", "--json", "--optimizer", "sgd:lr=0.02"]
    done = subprocess.run(
        [sys.executable, "-m", "hpgo", "run", "program.json", *words], cwd=tmp_path, text=True, timeout=300,
        capture_output=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.stderr.count("warning: the loss is the sum over samples") == 1
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    inputs, targets = torch.randn(6, 4).double(), torch.randn(6, 2).double()
    optimizer, wanted = torch.optim.SGD(model.parameters(), lr=0.02), []
    for _ in range(3):
        loss = functional.mse_loss(model(inputs), targets, reduction="sum")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        wanted.append(float(loss.detach()))
    assert json.loads(done.stdout)["losses"] == pytest.approx(wanted, rel=1e-12)


def test_a_profile_says_what_runs_will_say_of_the_loss() -> None:
    notes = {case: measure(made(case)[0], seconds=0).notes for case in ("mean", "sum", "padded", "root")}
    assert not any("the loss" in note for note in notes["mean"])
    assert any("the loss is the sum over samples" in note for note in notes["sum"])
    assert any("not the mean over samples" in note and "(targets != -100)" in note for note in notes["padded"])
    assert any("depends on which samples" in note for note in notes["root"])
