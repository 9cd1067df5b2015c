"""The ways of a grid, in families: those that part the model's matrices, the sequences and the batch alike.

A family knows a bound that holds for all of its ways, and bounds for each of them that cost little (`way_bounds`), so
that few are looked at one by one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial
from heapq import heapify, heappop
from itertools import product
from typing import TYPE_CHECKING

from hpgo.base.divisors import divisors
from hpgo.base.errors import ArgumentError
from hpgo.llm.bounds import ALL, NONE, SLACK, Candidate, GroupBounds
from hpgo.llm.estimate import max_memory_bytes
from hpgo.llm.layer_split import LayerSplits
from hpgo.llm.parallelism import MOST_ZERO, check_degrees
from hpgo.llm.step_time import LayerCosts, PipelineStages, kinds_of, transfer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from hpgo.llm.layer_context import LayerContext
    from hpgo.llm.parallelism import ParallelismConfig, PipelineSchedule
    from hpgo.llm.search_space import SearchSpace


@dataclass(frozen=True)
class ConfigGroup:
    """Ways that differ in how layers lie on ranks, in what replicas share, and in what is computed anew."""

    rows: LayerCosts
    pipeline: int
    data: int
    micro_batches: int
    cuts: LayerSplits
    zeros: tuple[int, ...]
    recomputed: tuple[bool, ...]
    """Whether all layers are computed anew or none, or either."""
    some: bool
    """Whether it may be some of each stage."""

    @cached_property
    def bound_s(self) -> float:
        """None has a lower bound: some rank has at least its share of all that there is to compute."""
        all_s = self.rows.model_s[all(self.recomputed)]
        return self.micro_batches * all_s / self.pipeline * (1 - 3 * SLACK)

    @cached_property
    def least_s(self) -> float:
        """Nor lower than this, which costs a little more to know."""
        return self.bound_s if self.pipeline == 1 else float(self._bounds.steps_s.min())

    @property
    def common(self) -> ParallelismConfig:
        """What all of them have at least, as a way that nobody runs."""
        shape, passes = self.rows.context.config, self.cuts.schedule
        return shape if passes == "1f1b" else replace(shape, pp=self.pipeline, vpp=2, pp_schedule=passes)

    @property
    def count(self) -> int:
        """How many they are."""
        cuts = self.cuts
        return len(self.zeros) * (len(cuts.found) * len(self.recomputed) + (cuts.some if self.some else 0))

    def candidates(self, room_bytes: float) -> list[Candidate]:
        """Ways that may fit in so much, the least bound first."""
        return self._bounds.candidates(room_bytes, self.recomputed, some=self.some)

    def leanest(self) -> list[tuple[float, Candidate]]:
        """Ways with nothing computed anew, or everything, and what their fullest GPU holds at least."""
        held = self._bounds.max_memory_bytes
        return sorted(
            (float(held[cut, zero, int(recomputed)]), Candidate(0.0, cut, zero, ALL if recomputed else NONE))
            for cut, zero, recomputed in product(range(len(held)), range(len(self.zeros)), self.recomputed)
        )

    def stages(self, one: Candidate) -> PipelineStages:
        """A way, none of whose layers are computed anew if it is not all."""
        cut = self.cuts.found[one.cut]
        config = replace(
            self._way(cut.chunks, self.zeros[one.zero]),
            first_rank_layers=cut.first_rank_layers,
            last_rank_layers=cut.last_rank_layers,
            recompute="full" if one.recomputed == ALL else "none",
        )
        return PipelineStages(replace(self.rows.context, config=config), self.micro_batches, self.rows)

    def _way(self, chunks: int, zero: int) -> ParallelismConfig:
        return replace(
            self.rows.context.config, pp=self.pipeline, vpp=chunks, pp_schedule=self.cuts.schedule,
            dp=self.data, zero_stage=zero, recompute="none",
        )  # fmt: skip

    @cached_property
    def _bounds(self) -> GroupBounds:
        context, chunks = self.rows.context, self.cuts.found[0].chunks
        edge_s = sum(transfer(context, data=self.data)) if self.pipeline > 1 else 0.0
        sites = tuple(replace(context, config=self._way(chunks, zero)) for zero in self.zeros)
        return GroupBounds(self.rows, self.cuts, self.micro_batches, edge_s, sites)


def config_groups(context: LayerContext, global_batch_size: int, space: SearchSpace) -> Iterator[ConfigGroup]:
    """The grid that `hpgo.plan_llm` describes, for the model, the GPUs and the precision of a context."""
    model, gpus, rules, takes = context.model, context.gpus, space.rules, space.takes
    contexts = [1 << power for power in range(gpus.count.bit_length())]
    # Attention as one kernel keeps no scores, so that there is nothing selective about it.
    recomputed = [kind == "full" for kind in ("none", "full") if kind in rules.recompute and takes("recompute", kind)]
    some = rules.recompute_num_layers and len(recomputed) > 1
    # Models with experts have stages that are laid out one by one.
    cuts_of = partial(LayerSplits.of, kinds_of(model), uneven=rules.uneven_ends, laid_out=bool(model.experts))
    known_cuts: dict[tuple[int, PipelineSchedule, tuple[int, ...]], LayerSplits] = {}
    for tp, cp in product(divisors(gpus.machine), contexts):
        if not (takes("tp", tp) and takes("cp", cp)):
            continue
        shape = replace(context.config, tp=tp, sequence_parallel=tp > 1, cp=cp)
        if gpus.count % shape.model_parallel_size or not _divides(shape, context):
            continue
        rows: dict[tuple[int, int, bool, bool], LayerCosts] = {}
        without: dict[tuple[int, bool, bool], LayerCosts] = {}
        for pipeline in divisors(gpus.count // shape.model_parallel_size):
            data = gpus.count // shape.model_parallel_size // pipeline
            if global_batch_size % data or not (takes("pp", pipeline) and takes("dp", data)):
                continue
            if pipeline > 1 and model.tied and not rules.ties_piped:
                continue
            most_chunks = (model.layers + 2) // pipeline if pipeline > 1 else 1
            chunks = [count for count in range(1, most_chunks + 1) if takes("vpp", count)]
            experts = [each for each in divisors(model.experts or 1) if gpus.count // pipeline % each == 0]
            sizes = [size for size in divisors(global_batch_size // data) if takes("micro_batch_size", size)]
            runs = [
                name for name in rules.pp_schedules if takes("pp_schedule", name) and (pipeline > 1 or name == "1f1b")
            ]
            for expert, schedule in product([each for each in experts if takes("ep", each)], runs):
                splits = schedule != "1f1b"
                chunked = 2 if splits else 1
                placed = rules.as_run(
                    replace(shape, ep=expert, pp=pipeline, dp=data, vpp=chunked, pp_schedule=schedule)
                )
                # No launcher computes layers anew once beside split backward passes.
                again = [recomputed for recomputed in recomputed if not (recomputed and splits)]
                for size in sizes:
                    micro_batches = global_batch_size // data // size
                    fitting = tuple(_fitting(chunks, schedule, whole_rounds=micro_batches % pipeline == 0))
                    if (pipeline, schedule, fitting) not in known_cuts:
                        known_cuts[pipeline, schedule, fitting] = cuts_of(pipeline, fitting, schedule)
                    found = known_cuts[pipeline, schedule, fitting]
                    if not (found.found and again):
                        continue
                    known = rules.zero_stages_of(placed, micro_batches=micro_batches, experts=bool(model.experts))
                    zeros = [zero for zero in known if takes("zero_stage", zero)]
                    part = partial(ConfigGroup, pipeline=pipeline, data=data, micro_batches=micro_batches, cuts=found)
                    if alike := tuple(zero for zero in zeros if zero < MOST_ZERO):
                        same = expert, size, placed.overlap_dp_comm, placed.fused_elementwise
                        if same not in rows:
                            config = replace(
                                shape,
                                ep=expert,
                                micro_batch_size=size,
                                overlap_dp_comm=placed.overlap_dp_comm,
                                fused_elementwise=placed.fused_elementwise,
                            )
                            rows[same] = LayerCosts.of(replace(context, config=config), without.get(same[1:]))
                            without.setdefault(same[1:], rows[same])
                        yield part(rows[same], zeros=alike, recomputed=tuple(again), some=some and not splits)
                    # Where weights are gathered, a layer takes longer, and how much depends on more.
                    for recomputed in again if MOST_ZERO in zeros else ():
                        config = replace(
                            placed,
                            micro_batch_size=size,
                            zero_stage=MOST_ZERO,
                            recompute="full" if recomputed else "none",
                        )
                        own = LayerCosts.of(replace(context, config=config))
                        yield part(own, zeros=(MOST_ZERO,), recomputed=(recomputed,), some=False)


def _fitting(chunks: Iterable[int], schedule: PipelineSchedule, *, whole_rounds: bool) -> Iterator[int]:
    """How many stages a rank may have of `chunks`, where micro-batches make whole rounds of as many as ranks or not."""
    for count in chunks:
        if schedule == "zb_v":
            fits = count == 2
        elif schedule == "interleaved_zb":
            fits = count > 1 and whole_rounds
        else:
            fits = count == 1 or whole_rounds
        if fits:
            yield count


def leanest(found: Iterable[ConfigGroup]) -> PipelineStages | None:
    """The way whose fullest GPU holds least; None where there is none."""
    waiting = [(family.leanest()[0][0], at, family) for at, family in enumerate(found)]
    heapify(waiting)
    best: tuple[float, PipelineStages] | None = None
    while waiting:
        least_bytes, _, family = heappop(waiting)
        if best is not None and least_bytes >= best[0]:
            break
        for held_bytes, one in family.leanest():
            if best is not None and held_bytes >= best[0]:
                break
            stages = family.stages(one)
            needed = max_memory_bytes(stages)
            if best is None or needed < best[0]:
                best = needed, stages
    return None if best is None else best[1]


def fewest_anew(none: PipelineStages, room_bytes: float, least: int) -> PipelineStages | None:
    """The way with as few layers of each stage computed anew as fit, from `least` on; None if it takes all, or more."""
    context = none.context
    assert context.config.zero_stage < MOST_ZERO, "its rows would be others"  # noqa: S101
    # One by one: the largest of those that are computed anew has room of its own, so that one more may need more.
    for layers in range(least, max(none.counts)):
        config = replace(context.config, recompute="full", recompute_num_layers=layers)
        stages = PipelineStages(replace(context, config=config), none.micro_batches, none.rows)
        if max_memory_bytes(stages) <= room_bytes:
            return stages
    return None


def _divides(config: ParallelismConfig, context: LayerContext) -> bool:
    try:
        check_degrees(context.model, config, seq_length=context.seq_length)
    except ArgumentError:
        return False
    return True
