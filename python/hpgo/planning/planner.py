"""The three ways to a plan: `plan` searches, `evaluate` prices a plan that you give, `exhaustive` tries everything."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Unpack

from hpgo.base.checks import check_int, check_list, check_progress, device_number, number
from hpgo.base.messages import as_whole, safe_repr
from hpgo.errors import ArgumentError, TimeLimitError
from hpgo.machine.cluster import MOST_DEVICES
from hpgo.planning.laws import checked
from hpgo.planning.memory_preference import min_memory, with_leaner
from hpgo.planning.problem import NO_LIMIT, SCHEDULES, PlanningProblem
from hpgo.planning.schedule_search import best_of_all, best_of_one, check_schedule
from hpgo.planning.search import evaluated, plan_of, search, with_alternatives

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Sequence

    from hpgo.machine.cluster import Cluster
    from hpgo.model.profile import Profile
    from hpgo.planning.plans import Plan
    from hpgo.planning.problem import PlanOptions
    from hpgo.programs.frameworks import TrainingFramework


def plan(
    profile: Profile | str | os.PathLike[str],
    cluster: Cluster | str | os.PathLike[str],
    *,
    global_batch_size: int,
    framework: TrainingFramework | None = None,
    max_stages: int | None = None,
    tolerance: float | None = None,
    time_limit_s: float | None = None,
    progress: Callable[[float, float], object] | None = None,
    **options: Unpack[PlanOptions],
) -> Plan:
    """The plan with the shortest simulated step, with a proven bound on how much shorter any other could be.

    Args:
        profile: what each layer costs: a `hpgo.Profile`, or the name of a built-in model or of a file.
        cluster: what is connected to what: a `hpgo.Cluster`, or the name of a known one, as `h100:16`, or of a file.
        global_batch_size: samples in a step, over all devices and micro-batches.
        framework: search only what it runs, under its own schedule: `megatron`, `torchtitan`, `deepspeed` or
            `torch`, with a version as in `torchtitan@0.2` or the latest. `Plan.restriction` says what that costs.
        max_stages: stages at most.
        tolerance: take the plan with the least memory on its fullest device among those whose step is at most this
            share longer than the shortest one found: 0.005 is 0.5 %. `Plan.memory_preference` has the step and memory
            of that one; bound and gap are still those of the shortest step. It takes a few searches more.
        time_limit_s: return the best plan found so far after this many seconds, with its gap. Ctrl-C does the same.
        progress: called about ten times a second with the best step so far, infinite before there is one, and
            the lower bound, 0 where there is none, as under `auto`.
        options: any of these.

    Options, with their defaults:
        schedule="eager_1f1b": `1f1b`, `eager_1f1b` or `gpipe`; `zb_h1`, `zb_h2`, `zb`, `1f1b_overlap` or
            `sequential`, which are simulated on cuts that the search finds, without a bound; `interleaved`,
            `interleaved_overlap`, `looped_bfs`, `hanayo`, `interleaved_zb`, `zb_v`, `v_half`, `v_min` or `dualpipe_v`,
            which run several stages on each device (`Plan.chunks`) and have a search and a bound of their own; or
            `auto`, which takes the one with the shortest step, and says in `Plan.schedules` what each would give.
        micro_batch_size=None: samples that enter the pipeline at once; None tries every divisor of the batch that
            makes at most 65,536 micro-batches.
        min_micro_batch_size=None: the smallest share of a micro-batch that a device may get, in samples; None is the
            smallest batch size that the profile was measured with, below which it can't be trusted.
        recompute=False: keep activations (False), recompute them in the backward pass (True), or whichever is better
            ("auto").
        even_split=False: give replicas of a stage as many samples each (True), or let shares differ by one sample
            (False); the largest share counts.
        overlap=True: let gradient synchronisation start before the backward pass has ended, layer by layer.
        memory=None: what a device holds besides activations: a `hpgo.MemoryModel`, or the name of one, as `adam-bf16`;
            None is Adam.
        include_data_loading=False: count the time of layers that load data (`Profile.loading`) as part of the step; else a
            loader is taken to work ahead.

    Raises ArgumentError, ProfileError or ClusterError for input that makes no sense; InfeasibleError if no plan fits
    the devices' memory, with the stage and device that lack it, how much, and what would help; TimeLimitError if the
    time limit, and KeyboardInterrupt if Ctrl-C, came before there was any plan.

    Method: docs/planner.md; after DAPPLE (Fan et al., PPoPP 2021) for stages, warm-up windows and uneven replication.

    >>> import hpgo
    >>> best = hpgo.plan("bert-48", "dapple-a", global_batch_size=64)
    >>> [(len(stage.layers), stage.replicas) for stage in best.stages], round(best.gap, 9)
    ([(32, 8), (21, 8)], 0.0)
    """
    started_s = time.monotonic()  # reading a question of a hundred thousand layers takes a second
    question = PlanningProblem.of(profile, cluster, global_batch_size=global_batch_size, **options)
    if max_stages is not None:
        question = replace(question, max_stages=check_int("max_stages", max_stages, most=NO_LIMIT - 1))
    if time_limit_s is not None:
        time_limit_s = number(
            "time_limit_s", time_limit_s, above=0, infinite=True, hint="give a positive number of seconds"
        )
    if tolerance is not None:
        tolerance = number(
            "tolerance", tolerance, most=1, hint="give a share of the step from 0 to 1: 0.005 is half a percent"
        )
    check_progress(progress)
    until_s = None if time_limit_s is None else started_s + time_limit_s

    def solve(question: PlanningProblem) -> Plan:
        left_s = None if until_s is None else max(1e-3, until_s - time.monotonic())
        try:
            return _best(question, tolerance, left_s, progress)
        except TimeLimitError as error:  # of a search that had a part of the time
            raise TimeLimitError(f"{time_limit_s:g} s passed before there was any plan", error.hint) from None

    if framework is None:
        return checked(solve(question))
    from hpgo.planning.framework_restriction import restricted, solved, with_restriction
    from hpgo.programs.frameworks import framework as find_framework

    row = find_framework(framework)
    asked = restricted(question, row, schedule=options.get("schedule"))
    best = solved(asked, row, solve)
    return checked(with_restriction(best, asked, row, question, until_s=until_s))


def _best(
    question: PlanningProblem,
    tolerance: float | None,
    time_limit_s: float | None,
    progress: Callable[[float, float], object] | None,
) -> Plan:
    """What the planner answers to a checked question, under any schedule."""
    if question.schedule in SCHEDULES:
        started_s = time.monotonic()
        best = search(question, time_limit_s, progress)
        if tolerance is not None:
            left_s = None if time_limit_s is None else time_limit_s - (time.monotonic() - started_s)
            best = min_memory(question, best, float(tolerance), left_s)
        return with_leaner(question, with_alternatives(question, best))
    if tolerance is not None:
        raise ArgumentError(
            f"`tolerance` is not for schedule {question.schedule!r}",
            f"choose one of {', '.join(SCHEDULES)}; `auto` lists the memory of every schedule",
            code="conflict",
        )
    check_schedule(question.schedule)
    solve = best_of_all if question.schedule == "auto" else best_of_one
    return solve(question, time_limit_s=time_limit_s, progress=progress)


def evaluate(
    profile: Profile | str | os.PathLike[str],
    cluster: Cluster | str | os.PathLike[str],
    stages: Sequence[tuple[Iterable[str] | int, Sequence[int]]],
    *,
    global_batch_size: int,
    **options: Unpack[PlanOptions],
) -> Plan:
    """Prices a plan that you give, as `plan` would: the same model, the same report, no search.

    Args:
        profile: what each layer costs, as for `plan`.
        cluster: what is connected to what, as for `plan`.
        stages: for each stage its layers and its devices. Layers are ids, or a number of layers: the next so many in
            the profile's order. Schedules with several stages on a device name the same devices for each of these.
        global_batch_size: samples in a step.
        options: those of `plan`. Without `micro_batch_size` the best one is taken.

    A plan that doesn't fit memory is priced all the same: see `Plan.fits` and `Stage.headroom_bytes`. Under
    `eager_1f1b` each stage runs ahead as far as memory allows, or less where simulation says that this is faster.

    Raises ArgumentError for layers or devices that are unknown, missing or used twice.

    >>> import hpgo
    >>> profile, cluster = hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a")
    >>> plan = hpgo.evaluate(profile, cluster, [(26, range(8)), (27, range(8, 16))], global_batch_size=64)
    >>> plan.gap is None, plan.step_s > hpgo.plan(profile, cluster, global_batch_size=64).step_s
    (True, True)
    """
    question = PlanningProblem.of(profile, cluster, global_batch_size=global_batch_size, **options)
    rows = rows_of(question.profile, stages)
    check_schedule(question.schedule)
    if question.schedule == "auto":
        raise ArgumentError(
            "can't price a plan for schedule 'auto'", "it chooses a schedule for `plan`", code="unsupported"
        )
    return checked(evaluated(question, rows))


def exhaustive(
    profile: Profile | str | os.PathLike[str],
    cluster: Cluster | str | os.PathLike[str],
    *,
    global_batch_size: int,
    **options: Unpack[PlanOptions],
) -> Plan:
    """The best of all plans, each of them simulated: at most 12 layers in a row on 8 devices. Arguments as for `plan`.

    Raises ArgumentError if the question is larger than that; InfeasibleError if no plan fits.

    >>> import hpgo
    >>> profile = hpgo.Profile.chain("toy", batch_size=1, forward_s=[1.0, 2.0, 1.0], backward_s=[2.0, 4.0, 2.0],
    ...                              activation_bytes=[1e6] * 3, parameter_bytes=[1e6] * 3)
    >>> cluster = hpgo.Cluster.of(nodes=2, devices_per_node=1, intra_gbit_s=100, inter_gbit_s=10)
    >>> hpgo.exhaustive(profile, cluster, global_batch_size=4).step_s.__round__(2)
    24.0
    """
    question = PlanningProblem.of(profile, cluster, global_batch_size=global_batch_size, **options)
    if question.schedule not in SCHEDULES:
        raise ArgumentError(
            f"can't try all plans for schedule {question.schedule!r}",
            f"choose one of {', '.join(SCHEDULES)}",
            code="unsupported",
        )
    found, plans = question.session.exhaustive(question)
    best = plan_of(question, found)
    return checked(replace(best, lower_bound_s=best.step_s, simulated=plans))


def rows_of(
    profile: Profile, stages: Sequence[tuple[Iterable[str] | int, Sequence[int]]]
) -> list[tuple[list[int], list[int]]]:
    """Layers of each stage, by their place in the profile, and its devices. Raises ArgumentError for what is none."""
    index_of = {layer.id: index for index, layer in enumerate(profile.layers)}
    rows: list[tuple[list[int], list[int]]] = []
    taken = 0
    for at, stage in enumerate(check_list("stages", stages, most=len(profile.layers))):
        if not isinstance(stage, tuple | list) or len(stage) != 2:
            raise ArgumentError(f"stage {at} is {safe_repr(stage)}", "give each stage its layers and its devices")
        layers, devices = stage[0], check_list(f"the devices of stage {at}", stage[1], most=MOST_DEVICES)
        if as_whole(layers) is not None:
            layers = check_int(f"the number of layers of stage {at}", layers)
            if taken + layers > len(profile.layers):
                raise ArgumentError(
                    f"stages name {taken + layers} layers, but profile `{profile.name}` has {len(profile.layers)}",
                    "give each stage a smaller number of layers",
                )
            indices = list(range(taken, taken + layers))
        else:
            indices = []
            for layer in check_list(f"the layers of stage {at}", layers, most=len(profile.layers)):
                if not isinstance(layer, str) or layer not in index_of:
                    raise ArgumentError(
                        f"profile `{profile.name}` has no layer {safe_repr(layer)}",
                        "stages name layer ids",
                        code="unknown_name",
                    )
                indices.append(index_of[layer])
        taken += len(indices)
        rows.append((indices, [device_number(at, device) for device in devices]))
    return rows
