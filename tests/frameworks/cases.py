"""Random plans for frameworks, and what each must become. A plan that breaks a framework's rules must be refused.

The rules are those of docs/export.md, written down a second time: the exporters' own table is not read here.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import hpgo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ONE_CHAIN = (
    "sequential", "gpipe", "1f1b", "eager_1f1b", "1f1b_overlap", "interleaved", "interleaved_overlap", "looped_bfs",
    "hanayo", "zb_h1", "zb_h2", "zb", "interleaved_zb", "zb_v", "v_half", "v_min", "dualpipe_v",
)  # fmt: skip
"""Schedules that end with a flush and hold one copy of the model: what an order file can say."""
OPTIMIZERS = ("adam-fp32", "adam-bf16", "adam-bf16-fp32-gradients", "sgd", "sgd-momentum")
"""What memory may be priced for."""
_BY_PLAN = ("1f1b", "eager_1f1b", "gpipe", "zb_h1", "zb_h2", "1f1b_overlap", "sequential")


@dataclass(frozen=True)
class Case:
    """A plan or a program, and what it says in words that frameworks share."""

    given: hpgo.Plan | hpgo.Program
    schedule: str
    blocks: int
    """Of the model."""
    counts: tuple[int, ...]
    """Blocks of each stage."""
    layers: tuple[tuple[str, ...], ...]
    """Of each stage."""
    rank_of_stage: tuple[int, ...]
    replicas: tuple[int, ...]
    """Of each stage."""
    pipeline_micro_batch_size: int
    micro_batches: int
    recompute: bool
    shard: bool
    """Whether replicas share the optimizer's state."""
    gpus: int
    """Of each device, which share each layer."""
    planned: hpgo.Schedule
    optimizer: str = ""
    """The one that memory is priced for; empty for a program, which has no price."""
    group: int | None = None
    """Micro-batches that take turns on the stages of a rank, where that is not as many as there are ranks."""
    odd: frozenset[str] = field(default_factory=frozenset)
    """What frameworks don't take: a stage ends `inside` a block, there are `two rows` of blocks or `no blocks`, their
    `ends` cost more than they do, `memory` is too small, stages make `waves`."""

    @property
    def ranks(self) -> int:
        """Of the pipeline."""
        return self.planned.ranks

    @property
    def share(self) -> int:
        """Samples of a micro-batch on each replica, where all have as many."""
        return self.pipeline_micro_batch_size // self.replicas[0]

    @property
    def grid(self) -> list[tuple[int, int, int]]:
        """Rank of the pipeline, replica and GPU of each rank of the framework."""
        return [(r, d, t) for r in range(self.ranks) for d in range(self.replicas[0]) for t in range(self.gpus)]

    def held(self, rank: int) -> list[int]:
        """Stages of a rank of the framework."""
        return [stage for stage, at in enumerate(self.rank_of_stage) if at == self.grid[rank][0]]

    @property
    def global_batch_size(self) -> int:
        """Samples of a step."""
        return self.pipeline_micro_batch_size * self.micro_batches

    @property
    def zero_stage(self) -> int:
        """Stage of ZeRO."""
        return int(self.shard and max(self.replicas) > 1)

    @property
    def bits(self) -> tuple[int, int] | None:
        """Bits of weights and of gradients; None for a program."""
        if not self.optimizer:
            return None
        return (16 if "bf16" in self.optimizer else 32), (16 if self.optimizer.endswith("bf16") else 32)

    @property
    def parts(self) -> list[list[int]]:
        """Numbers of the blocks of each stage."""
        ends = [0, *accumulate(self.counts)]
        return [list(range(begin, end)) for begin, end in pairwise(ends)]


def cases(
    number: int, schedules: tuple[str, ...], seed: int = 1, *, optimizers: tuple[str, ...] = OPTIMIZERS
) -> Iterator[Case]:
    """So many, most of them with one of `schedules` and one of `optimizers`; about a third are odd in some way."""
    chance = random.Random(seed)
    for _ in range(number):
        some = schedules if chance.random() < 0.85 else ONE_CHAIN
        name = chance.choice(some)
        optimizer = chance.choice(optimizers if chance.random() < 0.9 else OPTIMIZERS)
        is_plan = name in _BY_PLAN and chance.random() < 0.8
        yield _plan(chance, name, optimizer) if is_plan else _program(chance, name)


def refused_by(
    case: Case, *, schedules: tuple[str, ...], whole_models: bool, optimizers: tuple[str, ...] = OPTIMIZERS
) -> list[str]:
    """Why a framework that runs `schedules` with `optimizers` must refuse the case; none if it must not.

    One of `whole_models` builds the model itself: it counts blocks, and splits layers over several GPUs.
    """
    reasons = []
    if case.optimizer and case.optimizer not in optimizers:
        reasons.append("optimizer")
    if case.schedule not in schedules:
        reasons.append("schedule")
    if len(set(case.replicas)) > 1:
        reasons.append("unequal replicas")
    elif case.pipeline_micro_batch_size % case.replicas[0]:
        reasons.append("unequal shares")
    if "memory" in case.odd:
        reasons.append("memory")
    if case.gpus > 1 and not whole_models:
        reasons.append("several GPUs a device")
    if whole_models:
        reasons += sorted(case.odd & {"inside", "two rows", "no blocks", "ends"})
    return reasons


def outcome(given: hpgo.Plan | hpgo.Program, target: str, reasons: list[str]) -> dict[str, str] | None:
    """Files of `hpgo.export`; None if it refuses and there are reasons.

    Raises AssertionError if it refuses without a reason, or does not refuse with one.
    """
    refused = None
    try:
        files = hpgo.export.files(given, target)
    except (hpgo.errors.ArgumentError, hpgo.errors.InfeasibleError) as error:
        refused = error
    if refused is None:
        assert not reasons, f"{target} exports what it can't run: {reasons}"
        return files
    assert reasons, f"{target} refuses what it can run: {refused}"
    assert str(refused), "a refusal says why"
    assert refused.hint, "and the way out"
    return None


def check_places(case: Case, files: dict[str, str]) -> None:
    """Asserts that ranks are sent to the plan's devices, by a file where these are not simply in order."""
    of_rank = {rank: case.given.stages[stage].devices for stage, rank in enumerate(case.rank_of_stage)}
    devices = [of_rank[rank][replica] for rank, replica, gpu in case.grid if gpu == 0]
    assert ("ranks.csv" in files) == (devices != list(range(sum(case.given.nodes))))
    if "ranks.csv" in files:
        rows = [
            f"{at},0,{of_rank[rank][replica] * case.gpus + gpu}" for at, (rank, replica, gpu) in enumerate(case.grid)
        ]
        assert files["ranks.csv"].splitlines()[1:] == rows


def tally(each: Iterator[Case], check: Callable[[Case], bool]) -> str:
    """How many cases `check` found the same, and how many it found refused, in words."""
    same = refused = 0
    for case in each:
        if check(case):
            same += 1
        else:
            refused += 1
    assert same > refused, "most cases are meant to be ones that frameworks run"
    return f"{same} of {same + refused} the same, {refused} refused"


def _model(chance: random.Random, odd: set[str]) -> tuple[list[str], list[list[str]], list[str]]:
    """Ids of what comes before, of each block, and of what comes after."""
    before = ["embed"] if chance.random() < 0.7 else ["tokens", "positions"]
    after = ["head"] if chance.random() < 0.7 else ["norm", "head"]
    count = chance.randint(1, 12)
    if chance.random() < 0.05:
        odd.add("no blocks")
        return before, [[f"layer{chr(97 + number)}"] for number in range(count)], after
    parts = ["attention", "mlp"] if chance.random() < 0.25 else []
    blocks = [[f"layers.{at}.{part}" for part in parts] or [f"layers.{at}"] for at in range(count)]
    if count > 2 and chance.random() < 0.06:
        odd.add("two rows")
        blocks[0] = ["dense.0"]
    return before, blocks, after


def _plan(chance: random.Random, schedule: str, optimizer: str) -> Case:
    odd: set[str] = set()
    before, blocks, after = _model(chance, odd)
    ids = [*before, *(layer for block in blocks for layer in block), *after]
    ends = [len(before), *accumulate((len(block) for block in blocks), initial=len(before))][1:]
    depth = chance.randint(1, min(5, len(blocks)))
    cuts = sorted(chance.sample(ends[1:-1] or [ends[0]], min(depth - 1, len(ends[1:-1]) or 1))) if depth > 1 else []
    if len(ids) > depth and chance.random() < 0.06:
        # A cut anywhere: mostly inside what frameworks keep together.
        cuts = sorted(chance.sample(range(1, len(ids)), max(1, depth - 1)))
        if set(cuts) - {len(before), *ends}:
            odd.add("inside")
    bounds = [0, *cuts, len(ids)]
    each = chance.randint(1, 4)
    replicas = [each] * (len(bounds) - 1)
    if len(replicas) > 1 and chance.random() < 0.08:
        replicas[chance.randrange(len(replicas))] += 1
    share, micro_batches = chance.randint(1, 3), chance.randint(1, 8)
    pipeline_micro_batch_size = max(share * each + (chance.random() < 0.06), *replicas)
    devices = list(range(sum(replicas) + (chance.random() < 0.2)))
    if chance.random() < 0.3:
        chance.shuffle(devices)
    firsts = [0, *accumulate(replicas)]
    recompute = chance.random() < 0.4 and schedule in {"1f1b", "eager_1f1b", "gpipe"}
    shard = chance.random() < 0.4
    if chance.random() < 0.04:
        odd.add("ends")
    if chance.random() < 0.06:
        odd.add("memory")
    gpus = 2 if chance.random() < 0.15 else 1
    plan = hpgo.evaluate(
        _profile(chance, ids, {*before, *after}, 100 if "ends" in odd else 0.1, gpus),
        hpgo.Cluster.of(nodes=1, devices_per_node=len(devices), intra_gbit_s=100, gpus_per_device=gpus,
                        memory=1e3 if "memory" in odd else 1e15),
        [(ids[begin:end], devices[first : first + count])
         for (begin, end), first, count in zip(pairwise(bounds), firsts, replicas, strict=False)],
        global_batch_size=pipeline_micro_batch_size * micro_batches,
        pipeline_micro_batch_size=pipeline_micro_batch_size,
        min_samples_per_replica=1,
        schedule=schedule,
        recompute=recompute,
        overlap=chance.random() < 0.5,
        memory=hpgo.MemoryModel.preset(optimizer, shard_optimizer=shard),
    )  # fmt: skip
    last = {block[-1] for block in blocks}
    layers = tuple(tuple(ids[begin:end]) for begin, end in pairwise(bounds))
    planned = plan.to_schedule()
    return Case(
        given=plan,
        schedule=schedule,
        blocks=len(blocks),
        counts=tuple(len(last & set(of)) for of in layers),
        layers=layers,
        rank_of_stage=planned.rank_of_stage,
        replicas=tuple(replicas),
        pipeline_micro_batch_size=pipeline_micro_batch_size,
        micro_batches=micro_batches,
        recompute=recompute,
        shard=shard,
        gpus=gpus,
        planned=planned,
        optimizer=optimizer,
        odd=frozenset(odd),
    )


def _program(chance: random.Random, name: str) -> Case:
    """Orders of any schedule with stages of one's own; a device may hold several."""
    odd: set[str] = set()
    ranks = chance.randint(2, 4)
    micro_batches = 2 * ranks + ranks * chance.randint(0, 1)
    options = {}
    if name == "interleaved" and chance.random() < 0.2:
        options["group_size"] = micro_batches
    if name == "hanayo" and chance.random() < 0.5:
        options["virtual_stages_per_rank"] = 4
        odd.add("waves")
    planned = hpgo.schedule(name, ranks=ranks, micro_batches=micro_batches, **options)
    counts = [chance.randint(1, 3) for _ in range(planned.stages)]
    ends = list(accumulate(counts))
    layers = [[f"layers.{at}" for at in range(end - count, end)] for end, count in zip(ends, counts, strict=True)]
    layers[0].insert(0, "embed")
    layers[-1].append("head")
    replicas, share = chance.randint(1, 3), chance.randint(1, 3)
    recompute, shard = chance.random() < 0.3, chance.random() < 0.4
    gpus = 2 if chance.random() < 0.15 else 1
    program = hpgo.program(
        planned,
        [
            (of, range(rank * replicas, (rank + 1) * replicas))
            for of, rank in zip(layers, planned.rank_of_stage, strict=True)
        ],
        pipeline_micro_batch_size=share * replicas,
        global_batch_size=share * replicas * micro_batches,
        recompute=recompute,
        shard_optimizer=shard,
        gpus_per_device=gpus,
    )
    return Case(
        given=program,
        schedule=name,
        blocks=sum(counts),
        counts=tuple(counts),
        layers=tuple(map(tuple, layers)),
        rank_of_stage=planned.rank_of_stage,
        replicas=(replicas,) * planned.stages,
        pipeline_micro_batch_size=share * replicas,
        micro_batches=micro_batches,
        recompute=recompute,
        shard=shard,
        gpus=gpus,
        planned=planned,
        group=options.get("group_size"),
        odd=frozenset(odd),
    )


def _profile(chance: random.Random, ids: list[str], outside: set[str], of_a_block: float, gpus: int) -> hpgo.Profile:
    """A chain; each layer outside the blocks takes `of_a_block` of what a layer in them takes."""

    def seconds(layer: str, maximum: float) -> tuple[float, ...]:
        return (maximum * chance.uniform(0.5, 1) * (of_a_block if layer in outside else 1),)

    return hpgo.Profile(
        "toy",
        (1,),
        tuple(
            hpgo.Layer(layer, layer, seconds(layer, 1e-3), seconds(layer, 2e-3), (1e6,), 4e6, (2e6,)) for layer in ids
        ),
        tuple(pairwise(ids)),
        gpus_per_device=gpus,
    )
