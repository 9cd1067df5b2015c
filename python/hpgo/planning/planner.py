"""The functions that return plans: `plan` searches, `evaluate` takes given stages, `exhaustive` tries all plans."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Unpack

from hpgo.base.checks import check_int, check_list, check_progress, device_number, number
from hpgo.base.messages import as_whole, safe_repr
from hpgo.errors import ArgumentError, TimeLimitError
from hpgo.hardware.cluster import MAX_DEVICES
from hpgo.planning.laws import checked
from hpgo.planning.memory_preference import min_memory, with_leaner
from hpgo.planning.problem import NO_LIMIT, SCHEDULES, PlanningProblem
from hpgo.planning.schedule_search import best_of_all, best_of_one, check_schedule
from hpgo.planning.search import evaluated, plan_of, search, with_alternatives

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Sequence

    from hpgo.hardware.cluster import Cluster
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
    """Return the plan with the shortest simulated step, and a proven bound on how much shorter any other can be.

    Args:
        profile: layer times and sizes: a `hpgo.Profile`, or the name of a built-in model or of a file.
        cluster: devices and links: a `hpgo.Cluster`, or the name of a built-in one, such as `h100:16`, or of a file.
        global_batch_size: samples per training step, over all devices and micro-batches.
        framework: search only plans that this framework can run, under its default schedule: `megatron`, `torchtitan`,
            `deepspeed` or `torch`, with a version as in `torchtitan@0.2`, or the latest. `Plan.restriction` compares
            the result with unrestricted plans.
        max_stages: maximum number of stages.
        tolerance: return the plan with the smallest peak memory among those whose step is at most this share longer
            than the shortest one found: 0.005 is 0.5 %. `Plan.memory_preference` has the step and memory of the plan
            with the shortest step. Bound and gap are about the shortest step. It takes a few more searches.
        time_limit_s: return the best plan so far, with its gap, after this many seconds. Ctrl-C does the same.
        progress: called about ten times per second with the best step so far (infinite before the first plan) and
            the lower bound (0 if there is none, as under `auto`).
        options: any of the options below.

    Options, with their defaults:
        schedule="eager_1f1b": `1f1b`, `eager_1f1b` or `gpipe`; `zb_h1`, `zb_h2`, `zb`, `1f1b_overlap` or
            `sequential`, which are simulated on cuts that the search finds; `interleaved`,
            `interleaved_overlap`, `looped_bfs`, `hanayo`, `interleaved_zb`, `zb_v`, `v_half`, `v_min` or `dualpipe_v`,
            which have virtual stages (`Plan.virtual_stages_per_rank`) and a separate search and bound; or `auto`, which
            compares all in `Plan.schedules` and returns the one with the shortest step.
        pipeline_micro_batch_size=None: samples per micro-batch over all replicas of a stage; None tries all divisors of
            the batch that make at most 65,536 micro-batches.
        min_samples_per_replica=None: minimum samples of a replica per micro-batch; None is the smallest batch size of
            the profile, because times below it are not reliable.
        recompute=False: keep activations (False), recompute them in the backward pass (True), or take the better of
            both for each stage ("auto").
        even_split=False: give all replicas of a stage the same number of samples (True), or allow a difference of
            one sample (False). The largest number sets the time.
        shares_by_speed=False: also try plans whose replicas of different speed get samples by their speed, so that
            the slowest replica takes less time; only under `1f1b`, `eager_1f1b` and `gpipe`.
        overlap=True: reduce gradients layer by layer during the backward pass.
        overlap_p2p_comm=True: compute while transfers between stages are on the links. If False, each pass of a stage
            also takes the transfers of its input and output; only under `1f1b`, `eager_1f1b` and `gpipe`.
        memory=None: memory besides activations: a `hpgo.MemoryModel`, or the name of one, such as `adam-bf16`; None
            is Adam.
        include_data_loading=False: include the time of layers that load data (`Profile.loading`) in the step; otherwise
            data loaders work ahead.

    Raises ArgumentError, ProfileError or ClusterError for invalid input. Raises InfeasibleError if no plan fits in
    memory, with the stage and device that lack memory and changes that would help. Raises TimeLimitError if the time
    limit, and KeyboardInterrupt if Ctrl-C, came before there was any plan.

    Method: docs/planner.md; after DAPPLE (Fan et al., PPoPP 2021) for stages, warm-up depths and uneven replication.

    >>> import hpgo
    >>> best = hpgo.plan("bert-48", "dapple-a", global_batch_size=64)
    >>> [(len(stage.layers), stage.replicas) for stage in best.stages], round(best.optimality_gap, 9)
    ([(32, 8), (21, 8)], 0.0)
    """
    # The time limit includes the checks below: reading a problem of a hundred thousand layers takes a second.
    started_s = time.monotonic()
    question = PlanningProblem.of(profile, cluster, global_batch_size=global_batch_size, **options)
    if max_stages is not None:
        question = replace(question, max_stages=check_int("max_stages", max_stages, maximum=NO_LIMIT - 1))
    if time_limit_s is not None:
        time_limit_s = number(
            "time_limit_s", time_limit_s, above=0, infinite=True, hint="give a positive number of seconds"
        )
    if tolerance is not None:
        tolerance = number(
            "tolerance", tolerance, maximum=1, hint="give a share of the step from 0 to 1: 0.005 is 0.5 %"
        )
    check_progress(progress)
    until_s = None if time_limit_s is None else started_s + time_limit_s

    def solve(question: PlanningProblem) -> Plan:
        # A restricted search may call this several times. Each call gets only the remaining time.
        left_s = None if until_s is None else max(1e-3, until_s - time.monotonic())
        try:
            return _best(question, tolerance, left_s, progress)
        except TimeLimitError as error:  # It has the remaining time of this search, not the limit of the caller.
            raise TimeLimitError(f"{time_limit_s:g} s passed before there was any plan", error.hint) from None

    if framework is None:
        return checked(solve(question))
    if question.shares_by_speed:
        raise ArgumentError(
            f"{framework} gives all replicas of a stage the same number of samples, so it can't run shares by speed",
            "leave out `shares_by_speed`, or run the plan with `hpgo run`",
            code="unsupported",
        )
    # Most plans have no framework, so these modules are imported only here.
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
    """Return the best plan of a checked problem, under any schedule."""
    if question.shares_by_speed and tolerance is not None:
        raise ArgumentError(
            "`tolerance` is not supported for shares by speed", "leave out `tolerance`", code="conflict"
        )
    if question.schedule in SCHEDULES:
        started_s = time.monotonic()
        best = search(question, time_limit_s, progress)
        if tolerance is not None:
            # The search for a smaller plan gets the time that the first search left.
            left_s = None if time_limit_s is None else time_limit_s - (time.monotonic() - started_s)
            best = min_memory(question, best, float(tolerance), left_s)
        # The search for alternatives, and its bounds, are about even shares.
        even = replace(question, shares_by_speed=False)
        best = with_alternatives(even, best)
        return best if best.assumed.shares_by_speed else with_leaner(even, best)
    if tolerance is not None:
        raise ArgumentError(
            f"`tolerance` is not supported for schedule {question.schedule!r}",
            f"choose one of {', '.join(SCHEDULES)}; `auto` lists the memory of every schedule",
            code="conflict",
        )
    # Check the name late: schedules of the native search need no lookup in the table of families.
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
    """Estimate the step time of given stages with the cost model of `plan`, without a search.

    Args:
        profile: layer times and sizes, as for `plan`.
        cluster: devices and links, as for `plan`.
        stages: layers and devices of each stage. Layers are ids, or a number of layers, which are the next ones in
            the order of the profile. For schedules with virtual stages, stages on the same devices name these again.
        global_batch_size: samples per training step.
        options: the options of `plan`. Without `pipeline_micro_batch_size`, the best one is chosen.

    Plans that do not fit in memory are evaluated, too: see `Plan.fits` and `Stage.free_bytes`. Under `eager_1f1b`,
    each stage runs ahead as far as memory allows, or less if that is faster in the simulation.

    Raises ArgumentError for layers or devices that are unknown, missing or used twice.

    >>> import hpgo
    >>> profile, cluster = hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a")
    >>> plan = hpgo.evaluate(profile, cluster, [(26, range(8)), (27, range(8, 16))], global_batch_size=64)
    >>> plan.optimality_gap is None, plan.step_s > hpgo.plan(profile, cluster, global_batch_size=64).step_s
    (True, True)
    """
    question = PlanningProblem.of(profile, cluster, global_batch_size=global_batch_size, **options)
    rows = rows_of(question.profile, stages)
    check_schedule(question.schedule)
    if question.schedule == "auto":
        raise ArgumentError(
            "can't evaluate given stages under schedule 'auto'", "use `schedule='eager_1f1b'`", code="unsupported"
        )
    return checked(evaluated(question, rows))


def exhaustive(
    profile: Profile | str | os.PathLike[str],
    cluster: Cluster | str | os.PathLike[str],
    *,
    global_batch_size: int,
    **options: Unpack[PlanOptions],
) -> Plan:
    """Return the best of all plans after simulating each of them, for at most 12 layers in a row on 8 devices.

    The arguments are like for `plan`. Raises ArgumentError for larger problems, InfeasibleError if no plan fits.

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
            f"exhaustive search does not support schedule {question.schedule!r}",
            f"choose one of {', '.join(SCHEDULES)}",
            code="unsupported",
        )
    # Every plan is simulated, so the best one is optimal and its step is the bound.
    found, plans = question.session.exhaustive(question)
    best = plan_of(question, found)
    return checked(replace(best, lower_bound_s=best.step_s, simulated=plans))


def rows_of(
    profile: Profile, stages: Sequence[tuple[Iterable[str] | int, Sequence[int]]]
) -> list[tuple[list[int], list[int]]]:
    """Return the layers of each stage, as indices into the profile, and its devices.

    Raises ArgumentError for unknown layers and invalid devices.
    """
    index_of = {layer.id: index for index, layer in enumerate(profile.layers)}
    rows: list[tuple[list[int], list[int]]] = []
    taken = 0
    for at, stage in enumerate(check_list("stages", stages, maximum=len(profile.layers))):
        if not isinstance(stage, tuple | list) or len(stage) != 2:
            raise ArgumentError(f"stage {at} is {safe_repr(stage)}", "give each stage its layers and its devices")
        layers, devices = stage[0], check_list(f"the devices of stage {at}", stage[1], maximum=MAX_DEVICES)
        # A number means the next layers in order, so that users need not list ids.
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
            for layer in check_list(f"the layers of stage {at}", layers, maximum=len(profile.layers)):
                if not isinstance(layer, str) or layer not in index_of:
                    raise ArgumentError(
                        f"profile `{profile.name}` has no layer {safe_repr(layer)}",
                        "give ids of layers, or a number of layers",
                        code="unknown_name",
                    )
                indices.append(index_of[layer])
        taken += len(indices)
        rows.append((indices, [device_number(at, device) for device in devices]))
    return rows
