"""Runs of plans train as one process would that runs the same micro-batches."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import socket
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import warm_ranks

import hpgo

torch = pytest.importorskip("torch", reason="needs torch: pip install torch")

import runtime_models  # noqa: E402 -- it needs torch
import runtime_ranks  # noqa: E402
from refusals import refused  # noqa: E402

from hpgo.runtime import Loader, Pipeline, Workload  # noqa: E402
from hpgo.runtime.loader import collated  # noqa: E402
from hpgo.runtime.passes import running  # noqa: E402
from hpgo.runtime.train.evaluation import whole_data  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parent.parent
ORDERS = [family.name for family in hpgo.schedules() if family.trains and family.synchronization == "flush"]
TWO_CHAINS = ("dualpipe", "chimera")
CHUNKED = ("interleaved", "interleaved_overlap", "looped_bfs", "hanayo", "interleaved_zb")


def put(
    name: str,
    groups: list[list[int]],
    *,
    share: int = 0,
    world: int = 4,
    micro_batches: int = 0,
    workload: str = "chain",
    **how: Any,
) -> dict[str, Any]:
    """A case: the layers of a workload on groups of devices, each of which runs as many stages as the schedule says."""
    of = Workload.read(f"runtime_models:{workload}")
    ranks = len(groups)
    schedule = hpgo.schedule(
        name,
        ranks=ranks,
        micro_batches=micro_batches or 2 * ranks,
        virtual_stages_per_rank=2 if name in CHUNKED else None,
    )
    length, layers = schedule.stages_per_pipeline, of.layers
    chance: random.Random | None = how.pop("cuts", None)
    ends = [
        [len(layers) * stage // length for stage in range(length + 1)]
        if chance is None
        else [0, *sorted(chance.sample(range(1, len(layers)), length - 1)), len(layers)]
        for _ in schedule.micro_batches
    ]
    size = share or max(map(len, groups))
    program = hpgo.program(
        schedule,
        [
            (layers[slice(*ends[stage // length][stage % length :][:2])], groups[schedule.rank_of_stage[stage]])
            for stage in range(schedule.stages)
        ],
        pipeline_micro_batch_size=size,
        global_batch_size=size * schedule.total_micro_batches,
        nodes=(world,),
        recompute=how.pop("recompute", False),
        shard_optimizer=how.pop("shard_optimizer", False),
        samples_by_replica=how.pop("samples_by_replica", ()),
    )
    return {"program": json.loads(program.to_json()), "workload": f"runtime_models:{workload}", **how}


def one_process(case: dict[str, Any]) -> tuple[list[float], dict[tuple[str, str], Any], dict[tuple[str, str], Any]]:
    """Losses, gradients of the last step and weights and statistics after it, of micro-batches one after the other."""
    program = hpgo.Program.from_json(json.dumps(case["program"]))
    workload = Workload.read(case["workload"])
    (part,) = workload.parts([workload.layers], dtype=torch.float64)
    named = {(layer, name): tensor for layer, tensors in part.by_layer().items() for name, tensor in tensors.items()}
    parameters = list(part.parameters())
    make = runtime_ranks.optimizer(case)
    optimizer = make(parameters) if make else None
    losses, size = [], program.pipeline_micro_batch_size
    for step in range(case.get("steps", 1)):
        inputs, targets = runtime_models.batch(workload, program.global_batch_size, step)
        total = float(workload.weight_of(targets).sum())
        part.zero_grad()
        losses.append(0.0)
        for begin in range(0, program.global_batch_size, size):
            rows = slice(begin, begin + size)
            with running(step=step, samples=range(begin, begin + size)):
                loss = workload.loss_of(part(inputs[rows], rows=size), targets[rows]) / total
            loss.backward()
            losses[-1] += float(loss.detach())
        if case.get("clip_norm"):
            torch.nn.utils.clip_grad_norm_(parameters, case["clip_norm"])
        if optimizer:
            optimizer.step()
    return losses, {name: tensor.grad for name, tensor in named.items()}, {n: t.detach() for n, t in named.items()}


def check(world: int, cases: list[dict[str, Any]], folder: Path, seconds: int = 200) -> None:
    """Runs the cases on `world` processes, and holds each rank's numbers to one process's."""
    (folder / "cases.json").write_text(json.dumps(cases))
    done = warm_ranks.ran("runtime_ranks.py", world, folder, timeout=seconds)
    assert done.returncode == 0, done.stderr[-3000:]
    for number, case in enumerate(cases):
        losses, gradients, weights = one_process(case)
        largest = max(float(gradient.abs().max()) for gradient in gradients.values() if gradient is not None)
        found: Counter[tuple[str, str]] = Counter()
        for rank in range(world):
            said = (case["workload"], case["program"]["schedule"]["name"], number, rank)
            rank_losses, mine = torch.load(folder / f"{number}.{rank}.pt", weights_only=True)
            assert rank_losses == pytest.approx(losses, rel=1e-11), said
            for layer, name, gradient, weight in mine:
                found[layer, name] += 1
                expected = gradients[layer, name]
                assert (gradient is None) == (expected is None), (*said, layer, name)
                if case.get("steps", 1) == 1 and expected is not None:
                    bound = 1e-12 * (float(expected.abs().max()) + largest)
                    assert float((gradient - expected).abs().max()) <= bound, (*said, layer, name)
                wanted = weights[layer, name]
                assert bool(((weight - wanted).abs() <= 1e-9 * wanted.abs().clamp(min=1)).all()), (*said, layer, name)
        assert set(found) == set(gradients), case["workload"]


# --- One process's gradients ------------------------------------------------------------------------------------------

GROUPS = {
    "1:1": [[0], [1]],
    "3:1": [[0, 1, 2], [3]],
    "1:3": [[2], [0, 1, 3]],
    "2:2": [[0, 1], [2, 3]],
}


def test_any_replicas_and_uneven_rows_give_one_processs_gradients(tmp_path: Path) -> None:
    cases = [put("1f1b", groups, share=share) for groups in GROUPS.values() for share in (0, 5)]
    cases += [
        put("1f1b", [[0, 1], [3]]),  # an idle rank
        put("gpipe", [[3, 1], [0, 2]], share=3),
        put("1f1b", [[0], [1, 2], [3]], share=4),
        put("1f1b", [[2, 0, 1, 3]], micro_batches=3),  # data parallelism
        put("1f1b", [[0, 1], [2, 3]], share=5, recompute=True),
        put("1f1b", [[0, 1], [2], [3]], share=4, recompute=[True, False, True]),
        put("zb_h1", [[0], [1], [2]], steps=2, adamw=True, workload="dropping", recompute=[False, True, False]),
        put("1f1b", [[0, 1, 2], [3]], share=4, steps=5, adamw=True),
        put("1f1b", [[0, 1, 2], [3]], share=4, steps=5, adamw=True, shard_optimizer=True),
        put("1f1b", [[0, 1], [2, 3]], steps=5, adamw=True, clip_norm=0.1),
        put("1f1b", [[0], [1, 2], [3]], share=3, workload="skips"),
        put("gpipe", [[0], [1], [2], [3]], workload="skips", recompute=True),
        put("1f1b", [[0, 1], [2], [3]], share=3, workload="shared"),
        put("gpipe", [[0], [1, 2, 3]], share=5, workload="shared"),
        put("1f1b", [[0, 1], [2], [3]], share=3, workload="tied"),
        put("1f1b", [[0], [1]], steps=5, adamw=True, clip_norm=0.1, workload="tied"),
        put("zb_v", [[0, 2], [1]], steps=5, adamw=True, clip_norm=0.1, workload="tied", shard_optimizer=True),
        put("1f1b", [[0, 1], [2, 3]], share=3, workload="weighted"),
        # Samples by the speed of replicas.
        put("1f1b", [[0, 1], [2, 3]], share=6, samples_by_replica=[[1, 5], [4, 2]]),
        put("gpipe", [[0], [1, 2, 3]], share=7, samples_by_replica=[(), (1, 4, 2)], workload="weighted"),
        put("1f1b", [[0, 1], [2]], share=3, workload="dropping", recompute=True),
        put("interleaved", [[0, 1], [2]], share=3, workload="dropping"),
    ]
    check(4, cases, tmp_path)


def test_frozen_weights_stay_and_the_others_get_one_processs_gradients(tmp_path: Path) -> None:
    cases = [
        put("1f1b", [[0, 1], [2], [3]], share=3, steps=3, adamw=True, clip_norm=0.1, shard_optimizer=True),
        put("gpipe", [[0, 1], [2, 3]], share=5, steps=3, adamw=True, recompute=True),
        put("zb_v", [[0, 2], [1]], share=3, steps=3, adamw=True),
        put("dualpipe", [[0, 1], [2, 3]], steps=3, adamw=True),
        put("zb_h1", [[0], [1], [2], [3]], steps=3, adamw=True) | {"backend": "torch"},
    ]
    check(4, [case | {"workload": "runtime_models:adapted"} for case in cases], tmp_path)


def test_dicts_between_stages_give_one_processs_gradients(tmp_path: Path) -> None:
    cases = [
        put("1f1b", [[0, 1], [2], [3]], share=3, workload="passing"),
        put("zb_v", [[0, 2], [1]], share=3, workload="passing"),
        put("gpipe", [[0], [1], [2], [3]], workload="passing", recompute=True),
        put("1f1b", [[0, 1], [2, 3]], share=5, workload="passing") | {"backend": "torch"},
    ]
    check(4, cases, tmp_path)


@pytest.mark.parametrize(
    "groups", [pytest.param([[0, 1], [2]], marks=pytest.mark.slow), [[0], [1], [2], [3]]], ids=["replicas", "chain"]
)
def test_every_order_gives_one_processs_gradients(groups: list[list[int]], tmp_path: Path) -> None:
    """In every run, the test above has replicas in two orders, and random plans have them in any order."""
    check(4, [put(name, groups, share=2) for name in ORDERS], tmp_path)


def test_sixteen_processes_give_one_processs_gradients(tmp_path: Path) -> None:
    groups = [
        [[*range(15)], [15]],
        [[*range(8)], [*range(8, 16)]],
        [[0, 1, 2], [3, 4], [5]],
    ]
    check(
        16,
        [put("1f1b", each, share=share, world=16) for each, share in zip(groups, (16, 11, 7), strict=True)],
        tmp_path,
    )


def test_batch_normalisation_over_replicas_gives_one_processs_gradients_and_statistics(tmp_path: Path) -> None:
    cases = [
        put("1f1b", groups, share=5, workload="normed", recompute=recompute)
        for groups in (GROUPS["2:2"], GROUPS["3:1"])
        for recompute in (False, True)
    ]
    cases += [
        put("zb_v", [[0, 2], [1, 3]], share=3, workload="normed", steps=3, adamw=True),
        put("gpipe", [[3, 1, 2], [0]], share=4, workload="normed", steps=3, adamw=True, recompute=True),
        put("interleaved", [[0, 1], [2, 3]], share=4, workload="normed", recompute=True) | {"backend": "torch"},
        put("zb_h1", [[0, 1], [2, 3]], share=4, workload="normed", steps=2) | {"backend": "torch"},
    ]
    check(4, cases, tmp_path)


def test_torchs_pipelining_gives_one_processs_gradients_in_our_orders(tmp_path: Path) -> None:
    groups = [[[0], [1]], [[0, 3], [1, 2]], [[2, 0], [3, 1]]]
    cases = [
        put(name, groups[at % 3], share=2 + at % 3, recompute=at % 2 == 1)
        for at, name in enumerate(one for one in ORDERS if one not in TWO_CHAINS)
    ]
    cases += [
        put("zb_h1", [[0, 1], [2, 3]], share=5, workload="skips"),
        put("zb_v", [[2], [1]], steps=5, adamw=True, clip_norm=0.1, workload="tied"),
        put("1f1b", [[0, 1], [2, 3]], steps=5, adamw=True, shard_optimizer=True, workload="dropping", recompute=True),
        put("interleaved_zb", [[0], [1]], share=3, workload="shared"),
        put("gpipe", [[0], [2], [1], [3]], share=3, steps=2, adamw=True, workload="weighted"),
        put("1f1b", [[2, 0, 1, 3]], micro_batches=3),
    ]
    check(4, [case | {"backend": "torch"} for case in cases], tmp_path)


def at_random(seed: int) -> dict[str, Any]:
    """A case on up to four devices: any order, cuts, replicas and rows, any of the models, with what plans ask for."""
    chance = random.Random(seed)
    name = chance.choice(ORDERS)
    ranks = chance.choice([2, 4]) if name in TWO_CHAINS else chance.randint(1, 3)
    world = 4
    devices = chance.sample(range(world), world)
    ends = [0, *sorted(chance.sample(range(1, world), ranks - 1)), chance.randint(ranks, world)]
    ends = [*ends[:-1], max(ends[-2] + 1, ends[-1])]
    groups = [devices[begin:end] for begin, end in pairwise(ends)]
    workload = chance.choice(["chain", "skips", "tied", "shared", "weighted", "dropping"])
    case = put(
        name,
        groups,
        share=chance.randint(max(map(len, groups)), 6),
        micro_batches=ranks * chance.choice([2, 4] if name in {*TWO_CHAINS, "dualpipe_v"} else [1, 2, 3]),
        workload=workload,
        cuts=chance,
        recompute=chance.random() < 0.3,
        shard_optimizer=chance.random() < 0.3,
        clip_norm=chance.choice([None, 0.05]),
    )
    return case | chance.choice([{}, {"steps": 2, "adamw": True}])


@pytest.mark.parametrize(
    "seeds", [range(25), pytest.param(range(100, 400), marks=pytest.mark.slow)], ids=["a few", "three hundred"]
)
def test_random_plans_give_one_processs_gradients(seeds: range, tmp_path: Path) -> None:
    check(4, [at_random(seed) for seed in seeds], tmp_path, seconds=1200)


# --- Batches ----------------------------------------------------------------------------------------------------------


class Recorded:
    """A data set that remembers what was read."""

    def __init__(self, length: int) -> None:
        self.length, self.read = length, list[int]()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, at: int) -> tuple[Any, int]:
        self.read.append(at)
        return torch.tensor([float(at)]), at


def test_ranks_read_their_own_samples_of_one_order_and_together_all() -> None:
    whole = Loader(Recorded(23), global_batch_size=8, samples=[range(8)], seed=3)
    mine = Loader(data := Recorded(23), global_batch_size=8, samples=[range(1, 3), range(5, 7)], seed=3)
    idle = Loader(unread := Recorded(23), global_batch_size=8, samples=[], seed=3)
    assert [len(whole), whole.dropped] == [2, 7]
    for (inputs, targets), (some, same), _ in zip(whole, mine, idle, strict=True):
        for begin, end in ((1, 3), (5, 7), (6, 7)):
            assert torch.equal(some.rows(begin, end)[0], inputs.rows(begin, end)[0])
            assert torch.equal(same.rows(begin, end)[0], targets.rows(begin, end)[0])
    assert data.read == [at for batch in (0, 8) for at in whole_order(3, 0, batch, [1, 2, 5, 6])]
    assert unread.read == []


def whole_order(seed: int, epoch: int, begin: int, places: list[int]) -> list[int]:
    """What a loader of its own says is read at these places of the batch that begins at `begin`."""
    loader = Loader(Recorded(23), global_batch_size=8, samples=[range(8)], seed=seed)
    loader.epoch = epoch
    return [loader.order()[begin + place] for place in places]


def test_a_loader_goes_on_where_another_stopped() -> None:
    def batches(loader: Loader, count: int) -> list[list[int]]:
        found: list[list[int]] = []
        while len(found) < count:
            for _, targets in loader:
                found.append(targets.rows(0, 4)[0].tolist())
                if len(found) == count:
                    break
        return found

    def fresh() -> Loader:
        return Loader(Recorded(22), global_batch_size=4, samples=[range(4)], seed=1)

    wanted = batches(fresh(), 12)
    first = fresh()
    begun = batches(first, 7)
    second = fresh()
    second.load_state_dict(first.state_dict())
    assert begun + batches(second, 5) == wanted
    first_epoch, second_epoch = ([at for batch in wanted[begin : begin + 5] for at in batch] for begin in (0, 5))
    assert sorted(first_epoch) != sorted(second_epoch), "each epoch leaves out others"
    assert len(set(first_epoch)) == 20


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dataset": 3}, ("invalid_argument", "3")),
        ({"dataset": Recorded(3)}, ("invalid_argument", "3", "4")),
        ({"seed": -1}, ("invalid_argument", "-1")),
        ({"workers": 0.5}, ("invalid_argument", "0.5")),
    ],
)
def test_loaders_refuse_what_is_no_data(change: dict[str, Any], words: tuple[str, ...]) -> None:
    given = {"dataset": Recorded(9), "global_batch_size": 4, "samples": [range(4)]} | change
    with refused(hpgo.errors.ArgumentError, *words):
        Loader(**given)


def test_samples_that_make_no_batch_are_refused() -> None:
    for samples, words in (
        ([1, 2, 3, 4], "a sample of the data set is 1"),
        ([(torch.zeros(at), 0) for at in range(4)], "don't make a batch"),
        ([("a", 0)] * 4, "has a value that is no number"),
    ):
        with pytest.raises(hpgo.errors.ArgumentError, match=words):
            next(iter(Loader(samples, global_batch_size=4, samples=[range(4)])))


class EndsAt(Recorded):
    """Its sample 17 raises StopIteration, as `next` of a reader at its end does."""

    def __getitem__(self, at: int) -> tuple[Any, int]:
        if at == 17:
            raise StopIteration
        return super().__getitem__(at)


class TogetherEndsAt(EndsAt):
    def __getitems__(self, indices: list[int]) -> list[tuple[Any, int]]:
        return [self[at] for at in indices]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [EndsAt, TogetherEndsAt])
def test_a_sample_that_raises_stop_iteration_is_an_error_and_no_end(kind: type[EndsAt], workers: int) -> None:
    loader = Loader(kind(24), global_batch_size=4, samples=[range(4)], shuffle=False, workers=workers)
    batches = iter(loader)
    assert [next(batches)[1].rows(0, 4)[0].tolist()[0] for _ in range(4)] == [0, 4, 8, 12]
    with pytest.raises(hpgo.errors.ArgumentError, match=r"24 samples.*17.* raises StopIteration"):
        next(batches)


def test_validation_data_and_profiles_do_not_end_at_stop_iteration() -> None:
    batches = whole_data(EndsAt(24), global_batch_size=8, samples=[range(8)], workers=0, collate=collated)
    assert [inputs.count for inputs, _ in (next(batches), next(batches))] == [8, 8]
    with refused(hpgo.errors.ArgumentError, "user_code", "17"):
        next(batches)
    with refused(hpgo.errors.ArgumentError, "user_code", "17"):
        hpgo.runtime.profile("runtime_models:chain", data=EndsAt(24), batch_sizes=[24], seconds=0)


def test_an_epoch_with_fewer_batches_than_its_length_is_an_error() -> None:
    def collate(samples: Sequence[Any]) -> Any:
        if samples[0][1] == 8:
            raise StopIteration
        return collated(samples)

    batches = iter(Loader(Recorded(16), global_batch_size=4, samples=[range(4)], shuffle=False, collate=collate))
    assert len([next(batches), next(batches)]) == 2
    with refused(hpgo.errors.ArgumentError, "user_code", "2", "4"):
        next(batches)


# --- One process ------------------------------------------------------------------------------------------------------


def alone(name: str = "1f1b", **how: Any) -> hpgo.Program:
    """The chain on one device."""
    case = put(name, [[0]], share=2, world=1, micro_batches=2, **how)
    return hpgo.Program.from_json(json.dumps(case["program"]))


def test_the_loss_has_the_type_that_torchs_pipelining_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch 2.11 refuses outputs of another type; later versions take them as they are."""
    from torch.distributed.pipelining.stage import PipelineStage

    told: list[Any] = []
    plain = PipelineStage.__init__

    def init(self: Any, *given: Any, output_args: Any, **how: Any) -> None:
        told.extend(one.dtype for one in output_args)
        plain(self, *given, output_args=output_args, **how)

    monkeypatch.setattr(PipelineStage, "__init__", init)
    for dtype in (torch.float32, torch.float64):
        told.clear()
        with Pipeline(alone(), "runtime_models:chain", backend="torch", dtype=dtype) as pipeline:
            losses: list[torch.Tensor] = []
            pipeline.engine._modules[0].register_forward_hook(lambda *seen, to=losses: to.append(seen[-1]))
            pipeline.step(*pipeline.example())
            assert {one.dtype for one in losses} == set(told)


def test_a_run_says_what_is_wrong_with_its_plan_and_options() -> None:
    for change, words in (
        ({"plan": 3}, "the plan is 3"),
        ({"plan": "absent.json"}, "file not found: `absent.json`"),
        ({"plan": alone("forward_only")}, "only forward passes"),
        ({"plan": alone("pipedream")}, "synchronization `asynchronous`"),
        ({"plan": dataclasses.replace(alone(), gpus_per_device=2)}, "is 2 GPUs"),
        ({"workload": "mlp:layers=3,width=4"}, "layer 1 is `0`, but the workload has no such layer"),
        ({"workload": 7}, "workload is 7"),
        ({"clip_norm": 0.0}, "clip_norm is 0"),
        ({"autocast": torch.float16}, "autocast is torch.float16"),
        ({"optimizer": lambda _: "none"}, "the optimizer is `none`"),
        ({"optimizer": "sgd:lr=0.1"}, "optimizer is `sgd:lr=0.1`"),
        ({"dtype": "float64"}, "dtype is `float64`"),
        ({"dtype": torch.int64}, "dtype is torch.int64"),
        ({"timeout_s": "long"}, "timeout_s is `long`"),
        ({"backend": "gloo"}, "there is no back-end `gloo`"),
        ({"device": "moon"}, "the device can't be used"),
        *([] if torch.cuda.is_available() else [({"device": "cuda"}, "the device can't be used: torch finds no GPU")]),
    ):
        with pytest.raises(hpgo.errors.HpgoError, match=words) as caught:
            Pipeline(**{"plan": alone(), "workload": "runtime_models:chain"} | change)
        # There is nothing to type where no file nearby has a like name.
        assert caught.value.hint or "file not found" in caught.value.message


def on(name: str, *stages: tuple[list[int], list[range]]) -> hpgo.Program:
    """The chain on these devices, with these rows of three."""
    schedule = hpgo.schedule(name, ranks=2, micro_batches=4, virtual_stages_per_rank=2 if name in CHUNKED else None)
    of = Workload.read("runtime_models:chain").layers
    cut = [of[len(of) * at // len(stages) : len(of) * (at + 1) // len(stages)] for at in range(len(stages))]
    layers = [
        cut[at] if name not in TWO_CHAINS else of[4 * (at % 2) : 4 * (at % 2) + 4] for at in range(schedule.stages)
    ]
    program = hpgo.program(
        schedule, list(zip(layers, [devices for devices, _ in stages], strict=True)),
        pipeline_micro_batch_size=3, global_batch_size=12,
    )  # fmt: skip
    rows = [tuple(those) or stage.rows for stage, (_, those) in zip(program.stages, stages, strict=True)]
    return dataclasses.replace(
        program,
        stages=tuple(dataclasses.replace(one, rows=those) for one, those in zip(program.stages, rows, strict=True)),
    )


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (on("dualpipe", ([0], []), ([1], []), ([1], []), ([0], [])), ("unsupported", "dualpipe")),
        (on("1f1b", ([0, 1, 2], []), ([3], [])), ("unsupported", "1", "0", "3")),
        (
            on("1f1b", ([0, 1], []), ([2, 3], [range(1), range(1, 3)])),
            ("unsupported", "1", "0"),
        ),
        (
            on("interleaved", ([0, 1], []), ([2, 3], []), ([1, 0], []), ([2, 3], [])),
            ("invalid_argument", "interleaved", "0", "2", "1"),
        ),
    ],
)
def test_what_torchs_pipelining_cannot_run_is_refused_with_the_way_out(
    program: hpgo.Program, words: tuple[str, ...]
) -> None:
    with refused(hpgo.errors.ArgumentError, *words) as caught:
        Pipeline(program, "runtime_models:chain", backend="torch")
    assert str(caught.value.hint).startswith("leave out `backend` to use hpgo's engine")


def test_a_step_says_what_is_wrong_with_its_batch_and_where_a_layer_raised() -> None:
    good = torch.zeros(4, runtime_models.WIDTH)
    with Pipeline(alone(), "runtime_models:chain") as pipeline:
        for inputs, words in ((good[:3], "inputs have 3 rows, but a step takes 4"), (3, "inputs are 3")):
            with pytest.raises(hpgo.errors.ArgumentError, match=words):
                pipeline.step(inputs, good)
        assert pipeline.step(good, good) == pipeline.step(good, good)
        assert len(pipeline.engine.clock_ns) == 2 * len(pipeline.mine.actions)
        assert pipeline.engine.clock_ns == sorted(pipeline.engine.clock_ns)
        action = "the forward pass of micro-batch 0 through stage 0"
        where = f"rank 0 of stage 0 on {socket.gethostname()}, step 2, {action}: `input:0` has the shape"
        with pytest.raises(hpgo.errors.ArgumentError, match=where):
            pipeline.step(good[:, :2], good)
        with refused(hpgo.errors.RunError, "wrong_state"):
            pipeline.step(good, good)


def test_timelines_are_of_the_last_hundred_steps() -> None:
    rows = torch.zeros(4, runtime_models.WIDTH)
    with Pipeline(alone(), "runtime_models:chain") as pipeline:
        for ask in (pipeline.timeline, pipeline.usual_step):
            with refused(hpgo.errors.ArgumentError, "wrong_state"):
                ask()
        found = []
        for _ in range(102):
            pipeline.step(rows, rows)
            found.append(pipeline.timeline())
        spans_s = [timeline.makespan_s for timeline in found]
        assert pipeline.timeline(2).measures == found[2].measures
        usual_s = spans_s[pipeline.usual_step()]
        # The median of 99 steps. Two steps may take equally long, to the nanosecond.
        assert sum(span_s < usual_s for span_s in spans_s[3:]) < 50 <= sum(span_s <= usual_s for span_s in spans_s[3:])
        for step in (1, 102):
            with refused(hpgo.errors.ArgumentError, "wrong_state", step, 2, 101):
                pipeline.timeline(step)
        with refused(hpgo.errors.ArgumentError, "invalid_argument", "last", name="step"):
            pipeline.timeline("last")
    with refused(hpgo.errors.RunError, "run_failed", "ValueError", "Default", "init_process_group"):
        pipeline.timeline()


def test_a_plan_for_more_ranks_than_there_are_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    case = put("1f1b", [[0], [1]], world=2)
    program = hpgo.Program.from_json(json.dumps(case["program"]))
    with refused(hpgo.errors.RunError, "run_failed", "2"):
        Pipeline(program, "runtime_models:chain")
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with refused(hpgo.errors.RunError, "wrong_state", "2", "3"):
        Pipeline(program, "runtime_models:chain")
    monkeypatch.setenv("RANK", "3")
    with refused(hpgo.errors.RunError, "run_failed", "3", "3", "RANK", "WORLD_SIZE"):
        Pipeline(program, "runtime_models:chain")


def test_autocast_computes_in_bfloat16_and_keeps_weights() -> None:
    batch = runtime_models.batch(Workload.read("runtime_models:chain"), 4, 0)
    losses = []
    for autocast in (None, torch.bfloat16):
        with Pipeline(alone(), "runtime_models:chain", dtype=torch.float32, autocast=autocast) as pipeline:
            losses.append(pipeline.step(*batch))
            assert {weight.copies[0].dtype for weight in pipeline.weights} == {torch.float32}
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


def test_the_page_s_example_trains(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/runtime.md").read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    script = "\n".join(blocks)
    subprocess.run([sys.executable, "-W", "error", "-c", script], cwd=tmp_path, timeout=120, check=True)
