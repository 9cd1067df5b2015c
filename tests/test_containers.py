"""Inputs, targets and outputs in containers: models and losses get what they get without pipelines, at every cut."""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install torch")

import cut_models  # noqa: E402 -- after torch, without which nothing here runs
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from refusals import refused  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import hpgo  # noqa: E402
from hpgo.runtime import Pipeline, Workload  # noqa: E402
from hpgo.runtime.trees import Tree  # noqa: E402

BATCH, WIDTH, CLASSES = 6, 8, 3


@dataclass
class Scores:
    """What a model returns as a dataclass."""

    logits: torch.Tensor
    hidden: tuple[torch.Tensor, None]
    kind: str = "scores"


class Named(NamedTuple):
    logits: torch.Tensor
    value: torch.Tensor


class Net(nn.Module):
    """Four blocks and two heads, whose results `give` puts into a container."""

    def __init__(self, give: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.classes, self.value, self.give = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, 1), give

    def forward(self, given: torch.Tensor) -> Any:
        for block in self.blocks:
            given = torch.tanh(block(given))
        return self.give(self.classes(given), self.value(given).squeeze(-1))


def joined(logits: torch.Tensor, value: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits, targets) + 0.1 * value.pow(2).mean()


OUTPUTS: dict[str, tuple[Any, Any]] = {
    "dict": (lambda a, b: {"logits": a, "value": b}, lambda o, t: joined(o["logits"], o["value"], t)),
    "ordered": (lambda a, b: OrderedDict(b=b, a=a), lambda o, t: joined(o["a"], o["b"], t)),
    "dataclass": (lambda a, b: Scores(a, (b, None)), lambda o, t: joined(o.logits, o.hidden[0], t)),
    "named": (Named, lambda o, t: joined(o.logits, o.value, t)),
    "nested": (lambda a, b: [{"x": (a, None)}, 7, b], lambda o, t: joined(o[0]["x"][0], o[2], t) + 0 * o[1]),
    "one": (lambda a, b: (a,), functional.cross_entropy),
}


def data() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(BATCH, WIDTH).double(), torch.randint(CLASSES, (BATCH,))


def gradients(model: nn.Module, loss: torch.Tensor) -> list[float]:
    model.zero_grad()
    loss.backward()
    return sorted(float(one.grad.norm()) for one in model.parameters() if one.grad is not None)


def check_every_cut(work: Workload, model: nn.Module, loss: torch.Tensor) -> None:
    """Holds the loss and the gradients of random cuts and micro-batches to those of the model."""
    expected = gradients(model, loss)
    chance = random.Random(1)
    for shares in ([6], [1, 5], [2, 1, 3]):
        parts = work.parts(cut_models.random_stages(work, chance), dtype=torch.float64)
        found_loss, found = cut_models.step(work, parts, shares)
        assert float(found_loss) / BATCH == pytest.approx(float(loss.detach()), rel=1e-10)
        assert sorted(float(one.norm()) / BATCH for one in found.values()) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("kind", OUTPUTS)
def test_losses_get_the_containers_that_the_model_returns(kind: str) -> None:
    give, loss = OUTPUTS[kind]
    torch.manual_seed(0)
    model = Net(give).double()
    inputs, targets = data()
    output = model(inputs)
    expected = loss(output[0] if kind == "one" else output, targets)
    check_every_cut(Workload(model, inputs, targets, loss), model, expected)


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.numbers = nn.Embedding(9, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, numbers: torch.Tensor, scale: Any = None, *, ids: torch.Tensor, mode: str = "a") -> Any:
        value = self.numbers(numbers) + self.words(ids).mean(1)
        value = value if mode == "a" else -value
        for block in self.blocks:
            value = torch.tanh(block(value))
        return {"out": value if scale is None else value * scale}


def loss_of_dict(outputs: Any, targets: Any) -> torch.Tensor:
    return functional.mse_loss(outputs["out"], targets["wanted"]["of"])


def keywords() -> tuple[Keywords, dict[str, Any], dict[str, Any]]:
    torch.manual_seed(0)
    model = Keywords().double()
    numbers, wanted = torch.randn(BATCH, WIDTH).double(), torch.randn(BATCH, WIDTH).double()
    inputs = {"ids": torch.randint(9, (BATCH, 4)), "numbers": numbers, "scale": None, "mode": "b"}
    return model, inputs, {"wanted": {"of": wanted}, "note": "of the example"}


def test_inputs_by_name_and_targets_in_dicts() -> None:
    model, inputs, targets = keywords()
    work = Workload(model, inputs, targets, loss_of_dict)
    assert [tuple(one.shape) for one in work.example_inputs] == [(BATCH, 4), (BATCH, WIDTH)]
    check_every_cut(work, model, loss_of_dict(model(**inputs), targets))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def trained(work: Workload, *batch: Any) -> list[float]:
    """Losses of three steps in micro-batches of two, by hand over a whole batch."""
    program = hpgo.program(
        hpgo.schedule("1f1b", ranks=1, micro_batches=BATCH // 2),
        [(work.layers, [0])],
        pipeline_micro_batch_size=2,
        global_batch_size=BATCH,
    )
    with Pipeline(program, work, optimizer=sgd, dtype=torch.float64, tell=lambda _: None) as pipeline:
        if len(batch) == 1 and isinstance(batch[0], list):
            (given,) = pipeline.loader(batch[0], shuffle=False)
            return [pipeline.step(*given) for _ in range(3)]
        return [pipeline.step(*batch) for _ in range(3)]


def by_hand(model: nn.Module, run: Any) -> list[float]:
    optimizer, losses = sgd(model.parameters()), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = run(model)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def test_batches_and_data_sets_have_the_containers_of_the_example() -> None:
    _, inputs, targets = keywords()
    expected = by_hand(keywords()[0], lambda model: loss_of_dict(model(**inputs), targets))
    mixed = dict(reversed(inputs.items()))  # keys have no order
    work = Workload(keywords()[0], inputs, targets, loss_of_dict)
    assert trained(work, mixed, targets) == pytest.approx(expected, rel=1e-10)
    samples = [
        (
            {**inputs, "ids": inputs["ids"][at].tolist(), "numbers": inputs["numbers"][at]},
            {**targets, "wanted": {"of": targets["wanted"]["of"][at]}},
        )
        for at in range(BATCH)
    ]
    assert trained(work, samples) == pytest.approx(expected, rel=1e-10)
    for wrong in ({"ids": inputs["ids"]}, {**inputs, "mode": "a"}, {**inputs, "scale": inputs["numbers"]}):
        with refused(hpgo.errors.ArgumentError, "invalid_argument", "inputs", "example"):
            trained(work, wrong, targets)


class OwnLoss(nn.Module):
    """A model that computes its loss, the Hugging Face way."""

    def __init__(self, give: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head, self.give = nn.Linear(WIDTH, CLASSES), give

    def forward(self, numbers: torch.Tensor, labels: torch.Tensor) -> Any:
        for block in self.blocks:
            numbers = torch.tanh(block(numbers))
        logits = self.head(numbers)
        return self.give(functional.cross_entropy(logits, labels), logits)


OWN: dict[str, tuple[Any, Any]] = {
    "alone": (lambda loss, logits: loss, lambda result: result),
    "first": (lambda loss, logits: (loss, logits), lambda result: result[0]),
    "second": (lambda loss, logits: (logits, loss), lambda result: result[1]),
    "named": (lambda loss, logits: {"logits": logits, "loss": loss}, lambda result: result["loss"]),
}


@pytest.mark.parametrize("kind", OWN)
def test_a_model_may_return_its_own_loss(kind: str) -> None:
    give, read = OWN[kind]
    torch.manual_seed(0)
    model, (numbers, labels) = OwnLoss(give).double(), data()
    inputs = {"numbers": numbers, "labels": labels}
    work = Workload(model, inputs)
    check_every_cut(work, model, read(model(**inputs)))
    expected = by_hand(model, lambda model: read(model(**inputs)))
    torch.manual_seed(0)
    work = Workload(OwnLoss(give).double(), inputs)
    assert trained(work, inputs) == pytest.approx(expected, rel=1e-10)
    samples = [{"labels": int(labels[at]), "numbers": numbers[at]} for at in range(BATCH)]
    assert trained(work, samples) == pytest.approx(expected, rel=1e-10)
    # No stage holds all samples, so none ends between the loss and what reads it.
    *_, last = work.layers
    assert "loss" in last or "cross_entropy" in last


def test_a_hugging_face_model_is_trained_as_it_stands() -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install transformers")

    def made() -> Any:
        torch.manual_seed(0)
        config = transformers.BertConfig(
            vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        return transformers.BertForSequenceClassification(config).double()

    inputs = {"input_ids": torch.randint(32, (BATCH, 7)), "labels": torch.randint(2, (BATCH,))}
    model = made()
    work = Workload(made(), inputs).by("block")
    expected = gradients(model, loss := model(**inputs).loss)
    for stages in ([work.layers[:2], work.layers[2:]], [[one] for one in work.layers]):
        found_loss, found = cut_models.step(work, work.parts(stages, dtype=torch.float64), [2, 4])
        assert float(found_loss) / BATCH == pytest.approx(float(loss.detach()), rel=1e-9)
        assert sorted(float(one.norm()) / BATCH for one in found.values()) == pytest.approx(expected, rel=1e-7)


class Passing(nn.Module):
    """A layer of a list that passes a dict, and None in it."""

    def __init__(self, *, is_last: bool = False) -> None:
        super().__init__()
        self.linear, self.is_last = nn.Linear(WIDTH, WIDTH), is_last

    def forward(self, given: Any) -> Any:
        held = {"x": given, "mask": None, "skips": []} if isinstance(given, torch.Tensor) else given
        made = torch.tanh(self.linear(held["x"]))
        if self.is_last:
            return Scores(made, (held["skips"][0], None))
        return {"x": made, "mask": held["mask"], "skips": [*held["skips"], made]}


def test_layers_of_a_list_pass_containers() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(Passing(), Passing(), Passing(), Passing(is_last=True)).double()
    inputs, targets = torch.randn(BATCH, WIDTH).double(), torch.randn(BATCH, WIDTH).double()

    def loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(outputs.logits + outputs.hidden[0], targets)

    work = Workload(layers, inputs, targets, loss)
    check_every_cut(work, layers, loss(layers(inputs), targets))
    (first, _) = work.parts([work.layers[:2], work.layers[2:]])
    assert [value.name for value in first.gives] == ["1:0", "1:1", "1:2"]
    assert hpgo.runtime.profile(work, seconds=0, batch_sizes=[2]).layers[1].activation_bytes


class Together(nn.Module):
    """The first layer of a list that takes several inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, one: torch.Tensor, other: torch.Tensor, *, scale: Any = None) -> torch.Tensor:
        return self.linear(one) - (other if scale is None else scale * other)


@pytest.mark.parametrize("by_name", [False, True])
def test_the_first_of_a_list_takes_all_inputs(by_name: bool) -> None:
    torch.manual_seed(0)
    layers = [Together().double(), nn.Tanh(), nn.Linear(WIDTH, WIDTH).double()]
    one, other, targets = (torch.randn(BATCH, WIDTH).double() for _ in range(3))
    first = layers[0](one, other, scale=3 if by_name else None)
    inputs = {"other": other, "one": one, "scale": 3} if by_name else (one, other)
    work = Workload(layers, inputs, targets, functional.mse_loss)
    model = nn.ModuleList(layers)
    check_every_cut(work, model, functional.mse_loss(layers[2](layers[1](first)), targets))
    assert set(work.weight_names().all) == {*model.state_dict()}


LEAVES = st.none() | st.integers(-9, 9) | st.text(max_size=2) | st.builds(lambda: torch.zeros(2, 1))
NESTED = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.builds(Scores, inner, inner)
    ),
    max_leaves=12,
)


@given(NESTED)
def test_any_nesting_comes_back_from_its_tensors(nested: Any) -> None:
    tree, tensors = Tree.of(nested)
    assert tree.count == len(tensors)
    other = tree.build([torch.ones(3) for _ in tensors])
    again, ones = Tree.of(other)
    assert again == tree
    assert all(bool(one.all()) for one in ones)
    assert all(one is two for one, two in zip(tree.flatten("it", other), ones, strict=True))
