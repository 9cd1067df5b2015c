"""Workloads: what runs, whatever the cuts, is the model, with its ids, sizes, weights and draws."""

from __future__ import annotations

import doctest
import importlib
import itertools
import pkgutil
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hpgo

torch = pytest.importorskip("torch", reason="needs torch: pip install torch")

import cut_models  # noqa: E402 -- needs torch
from refusals import refused  # noqa: E402
from torch import nn  # noqa: E402

import hpgo.runtime  # noqa: E402
from hpgo.model.builtin import MODELS as PROFILES  # noqa: E402
from hpgo.runtime.models import MODELS  # noqa: E402
from hpgo.runtime.module_equality import equivalence_key  # noqa: E402
from hpgo.runtime.passes import running  # noqa: E402

SMALL = {
    "amoebanet": "amoebanet:cells=3,width=16,classes=5,image=64",
    "bert": "bert:layers=3,hidden=8,heads=2,vocabulary=20,positions=8,length=6",
    "gnmt": "gnmt:layers=8,hidden=4,vocabulary=12,source=5,target=4",
    "mlp": "mlp:width=8,layers=6",
    "gpt": "gpt:layers=3,hidden=8,heads=2,vocabulary=16,length=5,dropout=0.1",
    "gpt, untied": "gpt:layers=2,hidden=8,heads=2,vocabulary=16,length=5,tied=false",
    "resnet-50": "resnet-50:width=4,classes=5,image=64",
    "vgg-16": "vgg-16:width=2,linear=8,classes=5,image=32",
    "vgg-19": "vgg-19:width=2,linear=8,classes=5,image=32",
    "vgg-19, flat": "vgg-19:flat,width=2,linear=8,classes=5,image=32",
    "vit": "vit:layers=3,hidden=8,heads=2,image=16,patch=4,classes=5,dropout=0.1",
    "vit, distilled, in quarters": "vit:layers=2,hidden=8,heads=2,image=16,patch=4,classes=5,distilled,quarters",
    "bert, in quarters": "bert:layers=2,hidden=8,heads=2,vocabulary=20,positions=8,length=6,quarters",
    "xlnet": "xlnet:layers=4,hidden=8,heads=2,vocabulary=20,length=5",
}
MIXES_SAMPLES = {"amoebanet", "resnet-50"}
"""By batch normalisation, so that losses follow from the micro-batches."""
PUBLISHED = {
    "amoebanet-36": 933e6, "bert-48": 640e6, "deit-small": 22e6, "gnmt-16": 291e6, "resnet-50": 25.56e6,
    "vgg-19": 137 * 2**20, "vit-base": 86.6e6, "vit-large": 304.3e6,
}  # fmt: skip
"""Parameters (Fan et al., 2021; He et al., 2016; Dosovitskiy et al., 2021; Touvron et al., 2021). VGG-19's are counted
in units of 2^20 there."""


@pytest.mark.parametrize("name", SMALL)
def test_every_cut_gives_the_whole_models_loss_and_gradients(name: str) -> None:
    workload, chance = hpgo.runtime.Workload.read(SMALL[name]), random.Random(name)

    def whole(shares: list[int]) -> tuple[torch.Tensor, dict[tuple[str, str], torch.Tensor]]:
        parts = workload.parts([workload.layers], dtype=torch.float64, seed=3)
        return cut_models.step(workload, parts, shares, cut_graph=False)

    loss, gradients = whole([8])
    for shares in [8], [3, 5], [1, 2, 5]:
        if name in MIXES_SAMPLES:
            loss, gradients = whole(shares)
        parts = workload.parts(cut_models.random_stages(workload, chance), dtype=torch.float64, seed=3)
        found_loss, found = cut_models.step(workload, parts, shares)
        assert float(found_loss) == pytest.approx(float(loss), rel=1e-12)
        cut_models.check_close(found, gradients)


class Bent(nn.Module):
    """A linear layer and a function of its choice; `inplace` on what it is given."""

    def __init__(self, bend: object, *, inplace: bool = False) -> None:
        super().__init__()
        self.linear, self.bend, self.inplace = nn.Linear(4, 4), bend, inplace

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        made = self.bend(self.linear(given.add_(1) if self.inplace else given))
        assert isinstance(made, torch.Tensor)
        return made


def bent() -> hpgo.runtime.Workload:
    """Layers whose settings differ in what is no plain value, change what they are given, and hand it on as it is."""
    layers = [
        Bent(torch.tanh), Bent(torch.tanh), Bent(torch.tanh, inplace=True), Bent(torch.tanh, inplace=True),
        Bent(torch.Tensor.detach), nn.Identity(), nn.Identity(), Bent(torch.tanh), Bent(torch.Tensor.double),
        nn.Linear(4, 1, dtype=torch.float64),
    ]  # fmt: skip
    return hpgo.runtime.Workload(layers, torch.zeros(2, 4), torch.zeros(2, 1), nn.functional.mse_loss)


@pytest.mark.parametrize("name", [*SMALL, "bent"])
def test_layers_alike_are_seen_to_make_what_each_would_by_itself(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = hpgo.runtime.Workload.read(SMALL[name]) if name in SMALL else bent()
    seen = workload.look(None)
    monkeypatch.setattr("hpgo.runtime.cuts.equivalence_key", lambda _: None)
    made = hpgo.runtime.Workload.read(SMALL[name]) if name in SMALL else bent()
    assert seen == made.look(None)


def test_modules_that_call_their_weights_otherwise_are_not_alike() -> None:
    one, other = nn.Module(), nn.Module()
    one.scale, other.shift = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    assert equivalence_key(one) != equivalence_key(other)
    other.scale, other.shift = other.shift, None
    assert equivalence_key(one) == equivalence_key(other)


@pytest.mark.parametrize("name", sorted(PROFILES.keys() & MODELS.keys()))
def test_published_models_have_the_layers_and_edges_of_their_profiles(name: str) -> None:
    workload, profile = hpgo.runtime.Workload.read(name), hpgo.read_profile(name)
    assert workload.layers == tuple(layer.id for layer in profile.layers)
    assert set(workload.edges) <= set(profile.edges)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_published_parameters(name: str) -> None:
    workload = hpgo.runtime.Workload.read(name)
    assert count(workload) == pytest.approx(PUBLISHED[name], rel=0.005)


def count(workload: hpgo.runtime.Workload) -> int:
    """Parameters, tied ones once."""
    sizes = {
        (layer, name): torch.Size(shape).numel()
        for layer, shapes in workload.parameters.items()
        for name, shape in shapes.items()
    }
    return sum(sizes.values()) - sum(sizes[holder] for holders in workload.tied_weights for holder in holders[1:])


def test_flat_vgg_19_has_a_layer_for_each_operation() -> None:
    workload = hpgo.runtime.Workload.read("vgg-19:flat")
    assert len(workload.layers) == 44
    assert count(workload) == count(hpgo.runtime.Workload.read("vgg-19"))


@pytest.mark.parametrize("name", ["vit", "bert"])
def test_quarters_compute_what_their_blocks_do(name: str) -> None:
    """With the block's weights, the four parts of each make the same numbers."""
    text = SMALL[name].replace(",dropout=0.1", "") + ",dropout=0"
    by_block = hpgo.runtime.Workload.read(text)
    by_quarter = by_block.by("quarter")
    assert len(by_quarter.layers) == 4 * 3
    assert count(by_quarter) == count(by_block)
    assert by_block.holding(by_quarter.layers).layers == by_quarter.layers
    (whole,) = by_block.parts([by_block.layers])
    quarters = by_quarter.parts([[layer] for layer in by_quarter.layers])
    held = {f"{layer}.{key}": tensor for layer, named in whole.by_layer().items() for key, tensor in named.items()}
    last = by_block.layers[-1]
    with torch.no_grad():
        for part in quarters:
            for layer, named in part.by_layer().items():
                for key, tensor in named.items():
                    kind, _, rest = key.partition(".")
                    of = {"block": layer.partition(".")[0], "before": "patches" if name == "vit" else "embedding"}
                    tensor.copy_(held.pop(f"{of.get(kind, last)}.{rest}"))
    assert not held
    given = dict(zip(("input:0",), by_block.example_inputs, strict=True))
    with running(step=0, samples=range(8)), torch.no_grad():
        (wanted,) = whole(*by_block.example_inputs, rows=8)
        for part in quarters:
            made = part(*(given[value.name] for value in part.takes), rows=8)
            given |= dict(zip((value.name for value in part.gives), made, strict=True))
    torch.testing.assert_close(made[0], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("text", ["gpt:layers=2", "resnet-50"])
def test_models_without_such_blocks_have_no_quarters(text: str) -> None:
    with pytest.raises(hpgo.errors.ArgumentError, match="have no quarters") as raised:
        hpgo.runtime.Workload.read(text).by("quarter")
    assert "vit-base" in raised.value.hint


@pytest.mark.parametrize("name", SMALL)
def test_small_models_train(name: str) -> None:
    still = "" if name in MIXES_SAMPLES or name == "mlp" else ",dropout=0"
    workload = hpgo.runtime.Workload.read(
        SMALL[name].replace("width=2,linear=8", "width=8,linear=32").replace(",dropout=0.1", "") + still
    )
    (part,) = workload.parts([workload.layers])
    optimizer = torch.optim.Adam(part.parameters(), lr=1e-3 if "vgg" in name else 1e-2)
    losses = []
    for number in range(15):
        optimizer.zero_grad()
        losses.append(float(cut_models.step(workload, [part], [8], number=number)[0]))
        optimizer.step()
    assert min(losses[-3:]) < 0.95 * losses[0], losses


def test_first_weights_follow_from_the_seed_and_not_from_the_cuts() -> None:
    workload = hpgo.runtime.Workload.read(SMALL["gpt"])
    (whole,) = workload.parts([workload.layers], dtype=torch.float64, seed=5)
    last = workload.parts([workload.layers[:-1], workload.layers[-1:]], dtype=torch.float64, seed=5, only={1})[1]
    other = workload.parts([workload.layers], dtype=torch.float64, seed=6)[0]
    single = workload.parts([workload.layers], seed=5)[0]
    for name, tensor in last.by_layer()["head"].items():
        assert torch.equal(tensor, whole.by_layer()["head"][name])
        assert torch.equal(tensor, single.by_layer()["head"][name].double())  # drawn, then cast
    assert not torch.equal(whole.by_layer()["block-1"]["attend.weight"], other.by_layer()["block-1"]["attend.weight"])
    held = whole.by_layer()
    assert held["head"]["linear.weight"] is held["embedding"]["tokens.weight"]


def test_stages_of_others_take_no_memory() -> None:
    workload = hpgo.runtime.Workload.read("gpt:layers=96,hidden=12288,heads=96")  # 175 billion parameters
    parts = workload.parts([workload.layers[:50], workload.layers[50:]], only=())
    assert all(tensor.is_meta for part in parts for tensor in part.parameters())
    assert parts[0].gives == parts[1].takes
    assert parts[0].gives[0].shape_of(4) == (4, 128, 12288)


def test_a_list_of_modules_is_run_with_its_own_weights_which_stay_as_they_are() -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), shared, nn.Tanh(), shared, nn.Linear(4, 2))
    inputs, targets = torch.randn(5, 4), torch.randn(5, 2)
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    nn.functional.mse_loss(model(inputs), targets).backward()
    workload = hpgo.runtime.Workload(model, inputs, targets, nn.functional.mse_loss)
    assert workload.tied_weights == ((("2", "weight"), ("4", "weight")), (("2", "bias"), ("4", "bias")))
    for stages in (["0"], ["1", "2"], ["3", "4", "5"]), (["0", "1", "2", "3", "4"], ["5"]), [list("012345")]:
        parts = workload.parts(stages)
        _, gradients = cut_models.step(workload, parts, [5])
        wanted = {(layer, name): getattr(model[int(layer)], name).grad * 5 for layer, name in gradients}
        cut_models.check_close(gradients, wanted, within=1e-6)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.named_parameters())


class Skips(nn.Module):
    """Two tensors, of which the first has its samples in dimension 1."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(given).transpose(0, 1), given * 2


class Joins(nn.Module):
    def forward(self, pair: tuple[torch.Tensor, torch.Tensor], table: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (pair[0].transpose(0, 1) + pair[1] @ table).masked_fill(mask, 0)


class Table(nn.Module):
    """A parameter that all samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        return self.weight * 2


class Padding(nn.Module):
    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return given > 1


def branching() -> hpgo.runtime.Workload:
    network = hpgo.runtime.Network().add("mask", Padding, "input:1", everywhere=True)
    network.add("first", lambda: nn.Linear(4, 4), "input:0").add("skips", Skips, "first").add("table", Table, "first")
    network.add("second", lambda: nn.Linear(4, 4), "skips:1").add("joins", Joins, "skips", "table", "mask")
    network.add("sum", Sum, "second", "joins", "first").add("last", lambda: nn.Linear(4, 2), "sum")
    network.tie(("first", "weight"), ("second", "weight"))
    inputs = torch.randn(6, 3, 4), torch.randn(6, 3, 4)
    return hpgo.runtime.Workload(network.end("last", "joins"), inputs, torch.randn(6, 3, 2), _two)


class Sum(nn.Module):
    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        return torch.stack(given).sum(0)


def _two(outputs: tuple[torch.Tensor, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(outputs[0], targets) + outputs[1].square().mean()


def test_skips_several_tensors_masks_and_shared_values_cross_cuts() -> None:
    workload, chance = branching(), random.Random(0)
    whole = workload.parts([workload.layers], dtype=torch.float64)
    loss, gradients = cut_models.step(workload, whole, [6], cut_graph=False)
    for _ in range(20):
        stages = cut_models.random_stages(workload, chance)
        parts = workload.parts(stages, dtype=torch.float64)
        for before, behind in itertools.pairwise(parts):
            assert before.gives == tuple(value for value in behind.takes if not value.is_input)
        found_loss, found = cut_models.step(workload, parts, chance.choice([[6], [1, 5], [2, 2, 2]]))
        assert float(found_loss) == pytest.approx(float(loss), rel=1e-12)
        cut_models.check_close(found, gradients)
    parts = workload.parts([["mask", "first", "skips", "table"], ["second"], ["joins", "sum", "last"]])
    crossing = {value.name: (value.by_row, value.shape) for value in parts[1].gives}
    assert crossing["table"] == (False, (4, 4))
    assert crossing["skips:0"] == (True, (3, 4))  # rows first, wherever the layer has them
    assert "mask" not in crossing


def test_each_sample_counts_by_its_weight_however_a_batch_is_parted() -> None:
    workload = hpgo.runtime.Workload.read(SMALL["gpt"].replace(",dropout=0.1", ""))
    targets = workload.example_targets[0]
    targets[0, 1:] = -100
    targets[3] = -100
    assert workload.weight_of(targets).tolist() == [1, 5, 5, 0, 5, 5, 5, 5]
    (part,) = workload.parts([workload.layers], dtype=torch.float64)
    (scores,) = part(*workload.example_inputs, rows=8)
    mean = nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())
    for shares in [8], [3, 1, 4], [1] * 8:
        loss, _ = cut_models.step(workload, [part], shares)
        assert float(loss) / 31 == pytest.approx(float(mean.detach()), rel=1e-12)


def test_dropout_draws_the_same_under_every_cut_and_share_and_anew_in_each_step() -> None:
    torch.manual_seed(0)
    inputs = torch.ones(6, 4, 3, 3)
    layers = [nn.Dropout(0.3), nn.Dropout2d(0.5), nn.Sequential(nn.Identity(), nn.Dropout(0.2))]
    workload = hpgo.runtime.Workload(layers, inputs, torch.zeros(6, 4, 3, 3), nn.functional.mse_loss)

    def drawn(step: int, shares: list[int], stages: list[list[str]], seed: int = 0) -> torch.Tensor:
        parts, begin, made = workload.parts(stages, seed=seed), 0, []
        for rows in shares:
            value = inputs[begin : begin + rows]
            with running(step=step, samples=range(begin, begin + rows)):
                for part in parts:
                    (value,) = part(value, rows=rows)
            made.append(value)
            begin += rows
        return torch.cat(made)

    once = drawn(0, [6], [["0", "1", "2"]])
    assert torch.equal(once, drawn(0, [1, 2, 3], [["0"], ["1", "2"]]))
    assert torch.equal(once, drawn(0, [4, 2], [["0", "1"], ["2"]]))
    assert not torch.equal(once, drawn(1, [6], [["0", "1", "2"]]))
    assert not torch.equal(once, drawn(0, [6], [["0", "1", "2"]], seed=1))
    assert not torch.equal(once[0], once[1])
    assert sorted(set(once.flatten().tolist())) == pytest.approx([0, 1 / 0.7 / 0.5 / 0.8])
    channels = drawn(0, [6], [["0", "1", "2"]]).flatten(2)
    assert 0.2 < float((channels != 0).float().mean()) < 0.4  # 0.28
    assert (channels == 0).all(2).any()


def test_dropout_at_random_places_keeps_what_its_rate_says() -> None:
    """The share kept of 90,000 draws is within five standard deviations."""
    workload = hpgo.runtime.Workload([nn.Dropout(0.1)], torch.ones(9, 10_000), torch.zeros(9, 1), _two)
    (part,) = workload.parts([["0"]])
    with running(step=7, samples=range(9)):
        (made,) = part(*workload.example_inputs, rows=9)
    assert float((made != 0).double().mean()) == pytest.approx(0.9, abs=5 * (0.09 / 90_000) ** 0.5)
    part.eval()
    assert torch.equal(part(*workload.example_inputs, rows=9)[0], workload.example_inputs[0])


class Calls(nn.Module):
    """Runs a function as a layer."""

    def __init__(self, function: object) -> None:
        super().__init__()
        self.function = function

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.function(given)  # type: ignore[operator,no-any-return]


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.1, batch_first=True, add_zero_attn=True)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.attention(given, given, given)[0]  # type: ignore[no-any-return]


functional = nn.functional


@pytest.mark.parametrize(
    ("layer", "message", "hint"),
    [
        (Attends(), ("unsupported", "MultiheadAttention"), "attn_implementation='eager'"),
        (nn.LSTM(4, 4, 2, dropout=0.1), ("unsupported", "LSTM"), "set its dropout to 0"),
        (
            Calls(lambda x: functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1)),
            ("unsupported", "0"),
            "an nn.Dropout module on its weights",
        ),
        (Calls(lambda x: functional.dropout(x, 0.1)), ("unsupported", "dropout"), "make an nn.Dropout"),
        (nn.AlphaDropout(0.1), ("unsupported", "AlphaDropout"), "use nn.Dropout"),
        (Calls(lambda x: x if x.sum() > 0 else -x), ("user_code", "2"), "branch on no number"),
        (Calls(lambda x: [x.sum(), {1}]), ("user_code", "set"), "tensors, numbers"),
        (Calls(lambda x: [None]), ("user_code", "no tensor"), "return a tensor"),
        (Calls(lambda x: (x, len(x))), ("user_code", "2", "3"), "depends on the batch"),
        (nn.Linear(5, 5), ("user_code", "2", "RuntimeError"), "take what the one before returns"),
    ],
)
def test_layers_that_would_depend_on_the_plan_or_cannot_run_are_refused(
    layer: nn.Module, message: tuple[str, ...], hint: str
) -> None:
    workload = hpgo.runtime.Workload([layer], torch.zeros(3, 2, 4), torch.zeros(3), _two)
    with refused(hpgo.errors.ArgumentError, *message) as raised:
        workload.parts([["0"]])
    assert hint in raised.value.hint


def test_cuts_where_no_row_can_be_sent_are_refused() -> None:
    layers = [nn.Linear(4, 4), nn.Flatten(0, 1), nn.Linear(4, 4), nn.Unflatten(0, (-1, 3))]
    workload = hpgo.runtime.Workload(layers, torch.zeros(2, 3, 4), torch.zeros(2), _two)
    workload.parts([["0"], ["1", "2", "3"]])
    with refused(hpgo.errors.ArgumentError, "unsupported", "1"):
        workload.parts([["0", "1"], ["2", "3"]])
    network = hpgo.runtime.Network().add("a", lambda: nn.Linear(4, 4), "input:0")
    network.add("b", lambda: nn.ReLU(inplace=True), "a").add("c", Sum, "a", "b")
    workload = hpgo.runtime.Workload(network, torch.zeros(2, 4), torch.zeros(2), _two)
    with refused(hpgo.errors.ArgumentError, "invalid_argument", "b", "a", "c"):
        workload.parts([["a", "b", "c"]])


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([["linear-1", "conv"], ["linear-2"]], ("invalid_argument", "conv", "linear-2", "2")),
        ([["linear-1"], ["linear-2"], ["linear-3"]], ("invalid_argument", "linear-3", "3", "2")),
        ([["linear-1"], []], ("invalid_argument", "linear-2")),
        ([["linear-1"], ["linear-2", "linear-1"]], ("duplicate", "linear-1")),
        (3, ("invalid_argument", "stages", "3")),
        ([["linear-2"], ["linear-1"]], ("invalid_argument", "linear-2", "linear-1", "0", "1")),
    ],
)
def test_plans_of_other_models_are_refused_with_the_first_difference(stages: object, message: tuple[str, ...]) -> None:
    with refused(hpgo.errors.ArgumentError, *message):
        hpgo.runtime.Workload.read("mlp:layers=2,width=2").parts(stages)  # type: ignore[arg-type]  # some are none


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("vgg19", ("unknown_name", "vgg19"), "did you mean `vgg-19`?"),
        ("", ("unknown_name",), "names one of yours"),
        ("mlp:layers=99999999", ("invalid_argument", "layers", "99999999"), "from 1 to 16384"),
        (f"mlp:layers={'9' * 5000}", ("invalid_argument", "layers", "9"), "from 1 to 16384"),
        ("gpt:layer=2", ("unknown_name", "layer"), "did you mean `layers`?"),
        ("gpt:layers=two", ("invalid_argument", "layers", "two"), "whole number from 1; its default is 12"),
        ("gpt:dropout=1", ("invalid_argument", "dropout", "1"), "0 to below 1"),
        ("vgg-19:flat=7", ("invalid_argument", "flat", "7"), "write it alone"),
        ("gpt:hidden=10,heads=3", ("invalid_argument", "10", "3"), "set hidden to 9"),
        (
            "absent_module:build",
            ("user_code", "absent_module:build", "absent_module", "ModuleNotFoundError"),
            "built in are",
        ),
        ("mine:absent", ("user_code", "mine:absent"), "a function of that module"),
        ("mine:raises", ("invalid_argument", "ZeroDivisionError"), "takes no arguments"),
        (
            "mine:large",
            ("invalid_argument", "mine:large", "RuntimeError", "0"),
            "create large layers within `torch.device('meta')`",
        ),
        ("mine:returns", ("user_code", "7"), "return a hpgo.runtime.Workload"),
    ],
)
def test_names_that_mean_no_workload_are_refused(
    text: str, message: tuple[str, ...], hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n\n"
        "def raises(): 1 / 0\n\n"
        "def large(): return torch.nn.Linear(2**22, 2**22)\n\n"
        "def returns(): return 7\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    with refused(hpgo.errors.ArgumentError, *message) as raised:
        hpgo.runtime.Workload.read(text)
    assert hint in raised.value.hint


def test_a_function_of_ones_own_makes_a_workload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text(
        "import hpgo.runtime, torch\n\n"
        "def build():\n"
        "    layers = [torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)]\n"
        "    return hpgo.runtime.Workload(layers, torch.zeros(2, 3), torch.zeros(2, 1), torch.nn.functional.mse_loss)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    one, same, other = (hpgo.runtime.Workload.read("own:build", seed=seed) for seed in (1, 1, 2))
    assert one.layers == ("0", "1")
    weights = [workload.parts([["0", "1"]])[0].by_layer()["0"]["weight"] for workload in (one, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_modules_on_meta_begin_by_their_own_reset() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    workload = hpgo.runtime.Workload(model, torch.zeros(2, 4), torch.zeros(2, 4), functional.mse_loss)
    first, second = (workload.parts([["0"], ["1"]], seed=seed)[0].by_layer()["0"]["weight"] for seed in (0, 1))
    assert 0 < float(first.detach().abs().max()) <= 0.5
    assert not torch.equal(first, second)
    with torch.device("meta"):
        model = nn.Sequential(Table())
    workload = hpgo.runtime.Workload(model, torch.zeros(2, 4), torch.zeros(2, 4), functional.mse_loss)
    with refused(hpgo.errors.ArgumentError, "invalid_argument", "Table"):
        workload.parts([["0"]])


def test_the_page_s_examples_run(tmp_path: Path) -> None:
    page = Path(__file__).parent.parent / "docs/workloads.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    wanted = re.findall(r"print\(.*\)  # (.*)", "\n".join(blocks))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(blocks)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    assert len(wanted) == 4
    assert [line for line in printed if line in wanted] == wanted


def test_wrong_shapes_are_named() -> None:
    workload = hpgo.runtime.Workload.read("mlp:layers=2,width=4")
    (part,) = workload.parts([workload.layers])
    with refused(hpgo.errors.ArgumentError, "invalid_argument", "input:0", "3", "5", "4"):
        part(torch.zeros(3, 5), rows=3)
    with refused(hpgo.errors.ArgumentError, "invalid_argument", "0", "1"):
        part(rows=3)


def test_without_torch_the_runtime_says_how_to_install_it() -> None:
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "import hpgo.runtime\n"
        "try:\n    hpgo.runtime.Workload\n"
        "except hpgo.errors.HpgoError as error:\n    print(error.message, '|', error.hint)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert "needs torch" in done.stdout
    assert "pip install torch" in done.stdout


@pytest.mark.parametrize(
    "name", sorted(found.name for found in pkgutil.walk_packages(hpgo.runtime.__path__, "hpgo.runtime."))
)
def test_examples_in_docstrings_of_the_runtime_hold(name: str) -> None:
    module = importlib.import_module(name)
    assert doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE).failed == 0
