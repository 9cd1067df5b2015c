"""Plans for people: text, and Markdown.

A report is a headline, three tables with a row for each stage (who runs what, what it takes, what it holds), where
stages alike share one, and a summary of named facts. `hpgo.planning.plans` computes; this module only says it.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections import Counter
from functools import lru_cache, partial
from itertools import groupby
from typing import TYPE_CHECKING

from hpgo.base.messages import above, percent, pluralize, printable, short_names, times
from hpgo.base.tables import markdown as markdown_table
from hpgo.base.tables import plain
from hpgo.base.units import format_bytes, format_seconds
from hpgo.model.profile import Profile
from hpgo.planning import bottleneck
from hpgo.planning.notes import VARY
from hpgo.planning.problem import SCHEDULES
from hpgo.programs.optimizers import OPTIMIZERS
from hpgo.show.folding import alike, numbers, ranged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from hpgo.model.profile import TiedWeight
    from hpgo.planning.plans import Alternative, MemoryPreference, Plan
    from hpgo.planning.problem import MemoryModel
    from hpgo.programs.stages import DeviceGroup, Stage

WIDTH = 80
CAUTION = "caution"
"""Name of the facts that `cautions` returns, in `summary`."""
_SEEN = 0.01  # of a spread; times that differ less are taken at their word
_ALIKE = 4  # groups of devices from which on only some are named
_SCHEDULES = {
    "1f1b": "1F1B",
    "eager_1f1b": "eager 1F1B",
    "gpipe": "GPipe",
    "zb_h1": "ZB-H1",
    "zb_h2": "ZB-H2",
    "zb": "greedy zero-bubble",
    "1f1b_overlap": "1F1B with pairs run as one",
    "interleaved": "interleaved 1F1B",
    "interleaved_overlap": "interleaved 1F1B with pairs run as one",
    "looped_bfs": "looped breadth-first",
    "hanayo": "Hanayo",
    "interleaved_zb": "interleaved zero-bubble",
    "zb_v": "ZB-V",
    "v_half": "V-Half",
    "v_min": "V-Min",
    "dualpipe_v": "DualPipeV",
}
_MEASURE = re.compile(r"(?<=[0-9]) (?=(%|×|[munkMGT]?[sB])\b|[%×])")
_PAIR = (
    "{}: a forward and a backward at once are taken to last F + B, as no profile tells what that saves;"
    " `hpgo simulate --plan … --overlapped-times …` runs what you measured"
)
_FEW_DEVICES = 32  # up to so many, compact placements are less strict
_PROVEN = 5e-7  # a gap that is nothing but rounding


def table(
    plan: Plan,
    style: Callable[[str, str], str] = lambda _role, text: text,
    *,
    stored_step_s: float | None = None,
    width: int = WIDTH,
) -> str:
    """A plan as plain text: prose is at most `width` columns wide, tables are as wide as they must.

    `style` may colour a text by its role: `headline`, `columns`, `fact` (its name) or `alarm`. `stored_step_s` is the
    step that the plan's file names, where it was priced anew.

    >>> import hpgo
    >>> plan = hpgo.plan(hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a"), global_batch_size=64)
    >>> print(table(plan).splitlines()[0])
    bert-48 on dapple-a: a step of 64 samples takes 837 ms
    """
    lines = [style("headline", line) for line in textwrap.wrap(headline(plan), width)]
    lines += [style("alarm", line) for said in cautions(plan) for line in textwrap.wrap(printable(said), width)] + [""]
    for columns, rows in sections(plan):
        drawn = plain(columns, rows, width)
        head = len(drawn) - len(rows)
        lines += [*(style("columns", line) for line in drawn[:head]), *drawn[head:], ""]
    facts = [fact for fact in summary(plan, stored_step_s) if fact[0] != CAUTION]
    indent = max(len(name) for name, _ in facts) + 2
    for name, fact in facts:
        kept = _MEASURE.sub("\u00a0", printable(fact))  # where a line must not end
        first, *others = textwrap.wrap(
            kept, width, initial_indent=f"{name:{indent}}", subsequent_indent=" " * indent, break_on_hyphens=False
        )
        lines += [style("alarm" if name == "memory" else "fact", name) + first[len(name) :], *others]
    return "\n".join(lines).replace("\u00a0", " ")


def markdown(plan: Plan, *, stored_step_s: float | None = None) -> str:
    """A plan as Markdown, to paste into a proposal or an issue; `stored_step_s` as in `table`."""
    lines = [f"## {headline(plan)}", "", *(text for said in cautions(plan) for text in (f"**{printable(said)}**", ""))]
    for columns, rows in sections(plan):
        lines += [*markdown_table(columns, rows), ""]
    facts = [fact for fact in summary(plan, stored_step_s) if fact[0] != CAUTION]
    return "\n".join([*lines, *(f"- **{name}**: {printable(fact)}" for name, fact in facts)])


def headline(plan: Plan) -> str:
    """The answer in one line."""
    return printable(
        f"{plan.profile} on {plan.cluster}: a step of {pluralize(plan.global_batch_size, 'sample')} takes"
        f" {_seconds(plan.step_s)}" + ("" if plan.fits else ", if it had the memory")
    )


def cautions(plan: Plan) -> list[str]:
    """Return the notes that reports print before everything else: that the order of plans is not reliable."""
    return [f"{note[0].upper()}{note[1:]}" for note in plan.notes if note.startswith(VARY)]


def sections(plan: Plan) -> list[tuple[list[str], list[tuple[object, ...]]]]:
    """Columns and rows of the tables: who runs what, what a micro-batch takes, what a device holds, other schedules."""
    several = plan.chunks > 1
    who = ("group", "devices") if several else ("devices", "replicas")  # of a group devices say how many there are
    return [
        (
            ["stage", "layers", "count", *who, "samples", "in flight"],
            [_who(plan, run) for run in alike(range(len(plan.stages)), partial(_shape_of, plan))],
        ),
        (
            ["stage", "forward", "backward", "send on", "sync gradients", "sync after last backward"],
            [
                (numbers(run), *("-" if longest is None else _seconds(longest) for longest in _longest(plan, run)))
                for run in alike(range(len(plan.stages)), partial(_times, plan))
            ],
        ),
        (
            [
                "group" if several else "stage", "weights", "gradients", "optimizer", "activations", "buffers",
                "total", "of", "free",
            ],
            [_held(plan.groups, run) for run in alike(range(len(plan.groups)), partial(_kept, plan))],
        ),
        *([_compared(plan)] if plan.schedules else []),
    ]  # fmt: skip


def _shape_of(plan: Plan, index: int) -> tuple[float, ...]:
    stage = plan.stages[index]
    # Devices of a group come again after the last one's, so that there is no range of them.
    group = index // len(plan.groups) if plan.chunks > 1 else 0
    return len(stage.layers), stage.replicas, stage.samples_per_replica, plan.micro_batch_size // stage.replicas, group


def _times(plan: Plan, index: int) -> tuple[float | None, ...]:
    """Of one micro-batch; None where nothing is sent or summed."""
    stage = plan.stages[index]
    alone = stage.replicas == 1
    return (
        stage.forward_s,
        stage.backward_s,
        None if _keeps_its_output(plan, index) else stage.transfer_s,
        None if alone else stage.grad_reduce_s,
        None if alone else stage.exposed_grad_reduce_s,
    )


def _longest(plan: Plan, run: range) -> tuple[float | None, ...]:
    """Of stages alike each time that is the longest."""
    return max((_times(plan, index) for index in run), key=lambda times: [time or 0.0 for time in times])


def _kept(plan: Plan, index: int) -> tuple[float, ...]:
    """What does not depend on where in the pipeline a group is."""
    group = plan.groups[index]
    memory = group.memory
    return memory.weights_bytes, memory.gradients_bytes, memory.optimizer_bytes, group.capacity_bytes


def _who(plan: Plan, run: range) -> tuple[object, ...]:
    """Who runs what: of one stage, or of several alike."""
    stages = [plan.stages[index] for index in run]
    first, last = stages[0], stages[-1]
    group_of = {stage: number for number, group in enumerate(plan.groups) for stage in group.stages}
    groups = [group_of[index] for index in run]
    devices = device_ranges(device for stage in stages for device in stage.devices)
    each = " each" if len(run) > 1 else ""
    return (
        numbers(run),
        _ends(plan, first.layers[0], last.layers[-1], alone=len(run) == len(first.layers) == 1),
        f"{len(first.layers)}{each}",
        *((ranged(min(groups), max(groups)), devices) if plan.chunks > 1 else (devices, f"{first.replicas}{each}")),
        _samples(plan.micro_batch_size, first),
        ranged(first.max_in_flight, last.max_in_flight),
    )


def _held(groups: Sequence[DeviceGroup], run: range) -> tuple[object, ...]:
    """What a device of a group holds: of several alike the fullest one's, for the first holds most activations."""
    group = max((groups[index] for index in run), key=lambda group: group.memory.total_bytes)
    memory = group.memory
    sizes = (
        memory.weights_bytes,
        memory.gradients_bytes,
        memory.optimizer_bytes,
        memory.activations_bytes,
        memory.buffers_bytes,
        memory.total_bytes,
        group.capacity_bytes,
    )
    return (numbers(run), *map(_bytes, sizes), _free(group))


def _free(group: DeviceGroup) -> str:
    """Return the share of memory that stays free; one digit of a lack that rounds to nothing, which it is not."""
    if group.capacity_bytes <= 0:
        return "none"
    percent = 100 * group.headroom_bytes / group.capacity_bytes
    return f"{percent:.1g} %" if -0.5 <= percent < 0 else f"{percent:.0f} %"


def _keeps_its_output(plan: Plan, stage: int) -> bool:
    """Whether what a stage gives to the next one leaves its devices nowhere."""
    return stage == len(plan.stages) - 1 or plan.stages[stage].devices == plan.stages[stage + 1].devices


def _compared(plan: Plan) -> tuple[list[str], list[tuple[object, ...]]]:
    """What each schedule would give."""
    return ["schedule", "step", "to this", "fullest device", "stages", "micro-batch", ""], [
        (
            choice.name,
            "-" if choice.step_s is None else _seconds(choice.step_s),
            "-" if choice.step_s is None or not plan.step_s else f"{100 * (choice.step_s / plan.step_s - 1):+.1f} %",
            "-" if choice.peak_bytes is None else _bytes(choice.peak_bytes),
            f"{choice.stages}, {choice.chunks} a device" if choice.chunks > 1 else choice.stages or "-",
            choice.micro_batch_size or "-",
            f"lacks {_bytes(choice.shortfall_bytes)}" if choice.shortfall_bytes else "",
        )
        for choice in plan.schedules
    ]


def _without(plan: Plan) -> list[tuple[str, str]]:
    """Why schedules have no step, those with the same reason together; memory that they lack is in their table."""
    names: dict[str, list[str]] = {}
    for choice in plan.schedules:
        if choice.step_s is None and not choice.shortfall_bytes:
            names.setdefault(choice.reason, []).append(choice.name)
    return [("no step", f"{', '.join(those)}: {why}") for why, those in names.items()]


def _pairs(plan: Plan) -> list[str]:
    """Schedules whose steps are shown and that run forwards and backwards as one."""
    shown = [plan.schedule, *(choice.name for choice in plan.schedules if choice.step_s is not None)]
    return [name for name in ("1f1b_overlap", "interleaved_overlap", "dualpipe_v") if name in shown]


def summary(plan: Plan, stored_step_s: float | None = None) -> list[tuple[str, str]]:
    """Named facts about the whole plan; `stored_step_s` as in `table`."""
    count = plan.micro_batches
    several = f", {plan.chunks} stages on each device" if plan.chunks > 1 else ""
    schedule = (
        f"{_SCHEDULES.get(plan.schedule, plan.schedule)}{several}, {pluralize(count, 'micro-batch')} of"
        f" {pluralize(plan.micro_batch_size, 'sample')}, shared by a stage's replicas,"
        f" activations {'recomputed' if plan.recompute else 'kept'}"
    )
    idle = plan.cluster_devices - plan.devices
    used = f"{plan.devices} of {plan.cluster_devices}" if idle else str(plan.devices)
    gpus = 1 if plan.assumptions is None else plan.assumptions.gpus_per_device
    groups = f" of {gpus} GPUs" if gpus > 1 else ""
    throughput = (
        f"{plan.samples_per_s:.4g} samples/s on {used} device{'s' if plan.cluster_devices > 1 else ''}{groups},"
        f" {plan.speed_up:.4g} × one device with memory enough"
    )
    return [
        *((CAUTION, said) for said in cautions(plan)),
        *([("alike", folded)] if (folded := _folded(plan)) else []),
        ("schedule", schedule),
        ("throughput", throughput),
        ("bubble", f"devices don't compute for {100 * plan.bubble:.1f} % of the step"),
        *([] if plan.assumptions is None else [("optimizer", _optimizer(plan.assumptions.memory))]),
        *([] if plan.fits else [("memory", _shortage(plan))]),
        *([("left out", _loading(plan))] if plan.loading_s else []),
        *([] if stored_step_s is None else [("stored step", _stored(plan, stored_step_s))]),
        *([] if plan.memory_preference is None else [("tolerance", _preferred(plan, plan.memory_preference))]),
        *(("shared", _shared(plan, weight)) for weight in plan.split_tied_weights),
        ("proof", proof(plan)),
        *([("measured", measured)] if (measured := _measured(plan)) else []),
        *([("search space", search_space(plan))] if plan.lower_bound_s is not None else []),
        *([(f"--framework {plan.restriction.framework}", restriction(plan))] if plan.restriction is not None else []),
        *_without(plan),
        *([("run as one", _PAIR.format(", ".join(pairs)))] if (pairs := _pairs(plan)) else []),
        ("limited by", plan.limit),
        ("would help", bottleneck.advice(plan.stages, count, plan.step_s, idle=idle)),
        *((f"or {other.name}", _instead(plan, other)) for other in plan.alternatives),
        *(("note", note) for note in plan.notes if not note.startswith(VARY)),
    ]


def _folded(plan: Plan) -> str:
    """Which stages share rows, in words; empty if none do."""
    runs = [run for run in alike(range(len(plan.stages)), partial(_shape_of, plan)) if len(run) > 1]
    stages = [plan.stages[run.start] for run in runs]
    said = [
        f"stages {numbers(run)}: {pluralize(len(stage.layers), 'layer')} × {stage.replicas}"
        for run, stage in zip(runs, stages, strict=True)
    ]
    return f"{', '.join(said)}; times are the longest, memory that of the fullest" if said else ""


def _measured(plan: Plan) -> str:
    """Where the profile's times come from, and whether they tell plans apart as finely as the proof; may be empty."""
    profile = None if plan.assumptions is None else plan.assumptions.profile
    if not isinstance(profile, Profile):
        return ""
    where = " on ".join(filter(None, [profile.dtype and f"in {profile.dtype}", profile.device]))
    versions = [" ".join(pair) for pair in profile.versions]
    said = ", ".join(filter(None, [where, profile.machine, *versions, profile.date]))
    spread = profile.spread or 0.0
    if plan.gap is None or spread < _SEEN or spread <= plan.gap or cautions(plan):
        return said
    doubt = f"times differ by {times(spread)}, more than the gap: plans as close as that may be as fast"
    return f"{said}; {doubt}" if said else doubt


def proof(plan: Plan) -> str:
    """How sure it is that no plan is better, in words."""
    stopped = "" if plan.finished else "; the search was stopped, more time may tell more"
    if plan.searched_cuts_bound_s is not None and not (plan.gap is not None and plan.gap <= _PROVEN):
        return _proof_of_some_cuts(plan, plan.searched_cuts_bound_s) + stopped
    if plan.node_aligned_bound_s is not None and not (plan.gap is not None and plan.gap <= _PROVEN):
        return _compact_proof(plan, plan.node_aligned_bound_s) + stopped
    if plan.lower_bound_s is None or plan.gap is None:
        if plan.simulated:
            cuts = f"best of {plan.simulated:,} cuts that were" if plan.simulated > 1 else "one cut that was"
            return f"none: the {cuts} simulated under this schedule{stopped}"
        return "none: this is the price of a given plan, nothing was searched"
    if plan.gap <= _PROVEN:
        return f"proven optimal{whose(plan)}: no plan of the search space has a shorter step"
    return (
        f"{above(plan.gap)}{whose(plan)}: no plan of the search space takes less than"
        f" {_seconds(plan.lower_bound_s)}{stopped}"
    )


def _proof_of_some_cuts(plan: Plan, searched_s: float) -> str:
    """Return what is known of a plan where only some cuts were searched: first of all cuts, then of these."""
    if not plan.lower_bound_s or plan.gap is None:
        known = "nothing is known of plans with other cuts"
    else:
        known = (
            f"{above(plan.gap)}{whose(plan)}: no plan takes less than {_seconds(plan.lower_bound_s)}, whatever its cuts"
        )
    gap = max(0.0, plan.step_s / searched_s - 1) if searched_s else math.inf
    if math.isinf(gap):
        return known
    if gap <= _PROVEN:
        return f"{known}; none with the cuts that were searched is shorter"
    return f"{known}; with the cuts that were searched none takes less than {_seconds(searched_s)}"


def _compact_proof(plan: Plan, node_aligned_bound_s: float) -> str:
    """What is known of a plan where only compact placements could be looked through, and a bound is on all."""
    min_s = plan.lower_bound_s
    gap = max(0.0, plan.step_s / node_aligned_bound_s - 1) if node_aligned_bound_s else math.inf
    if not min_s or plan.gap is None:
        if gap <= _PROVEN and not _is_compact(plan):
            return f"no compact placement is better{whose(plan)}; nothing is known of others"
        known = "optimal" if gap <= _PROVEN else "not proven optimal" if math.isinf(gap) else above(gap)
        return f"{known} among compact placements{whose(plan)}; nothing is known of others"
    of_all = f"{above(plan.gap)} of all placements"
    if gap <= _PROVEN and not _is_compact(plan):
        known = f"{of_all}, and no compact one is better{whose(plan)}"
    elif gap <= _PROVEN:
        known = f"optimal among compact placements{whose(plan)}, {of_all}"
    elif plan.gap - gap <= _PROVEN:
        known = f"{of_all}{whose(plan)}"
    else:
        known = f"{of_all} ({percent(gap)} among compact ones){whose(plan)}"
    return f"{known}: no plan of the search space takes less than {_seconds(min_s)}"


def _is_compact(plan: Plan) -> bool:
    """Whether its stages, from the last one to the first, lie as docs/planner.md says of compact ones."""
    if not plan.nodes:
        return True  # an old file, of when there were no others
    is_small = plan.cluster_devices <= _FEW_DEVICES
    machine_of = [machine for machine, count in enumerate(plan.nodes) for _ in range(count)]
    free = list(plan.nodes)
    for stage in reversed(plan.stages):
        taken = Counter(machine_of[device] for device in stage.devices)
        begins = ends = 0  # in machines that it takes the rest of, or a part of
        for machine, count in taken.items():
            begins += count == free[machine] < plan.nodes[machine]
            ends += count < free[machine]
            free[machine] -= count
        if len(taken) > 1 and max(begins, ends) > is_small:
            return False
        if sum(0 < left < count for left, count in zip(free, plan.nodes, strict=True)) > 1 + is_small:
            return False
    return True


def whose(plan: Plan) -> str:
    """Whose plans a bound is about, where several schedules were compared or one framework is to run the plan."""
    words = f" for {_SCHEDULES.get(plan.schedule, plan.schedule)}" if plan.schedules or plan.chunks > 1 else ""
    return words + (f" among plans that {plan.restriction.label} runs" if plan.restriction is not None else "")


def restriction(plan: Plan) -> str:
    """What it costs that a framework must run the plan, in words; empty if none must."""
    if plan.restriction is None:
        return ""
    known = plan.restriction.costs(plan.step_s)
    free_s, stages = plan.restriction.unrestricted_step_s, plan.restriction.unrestricted_stages
    if known is None or free_s is None or stages is None:
        if plan.lower_bound_s is None:
            why = "no bound is known for its schedule"
        elif plan.schedule in SCHEDULES:
            why = "the search had no time left"
        else:
            why = "not all plans of its schedule were tried"
        return f"not compared with the best plan that anybody could run: {why}"
    least, most = known
    if most <= _PROVEN:
        return "costs nothing: no plan that anybody could run has a shorter step"
    share = percent(most) if most - least <= _PROVEN else f"at most {percent(most)}"
    return (
        f"costs {share} against the best plan that anybody could run; the best one found has"
        f" {pluralize(stages, 'stage')} and takes {_seconds(free_s)}"
    )


def search_space(plan: Plan) -> str:
    """Which plans were compared, in words."""
    if plan.chunks > 1:
        return _improved(plan)
    thinned = "stay with a neighbour" in plan.cuts or "in about equal steps" in plan.cuts
    some = "some cuts" if thinned and "one order" not in plan.cuts else "cuts of one order of the layers"
    cuts = "every cut between layers" if plan.cuts == "all" else f"{some} ({plan.cuts})"
    if plan.restriction is not None:
        cuts = plan.restriction.space if plan.cuts == "all" else f"{cuts}; {plan.restriction.space}"
    # Frameworks start ranks in the order of devices, which other placements don't keep.
    patterns = ", others by pattern" if plan.restriction is None else ""
    placements = (
        "every placement on the machines"
        if plan.placements == "all"
        else f"compact placements only (few partly used machines){patterns}"
    )
    if plan.cuts != "all" or plan.placements != "all":
        placements += "; the bound holds for all"
    effort = (
        f"{plan.explored_labels:,} partial plans, {plan.simulated:,} whole ones simulated"
        if plan.explored_labels
        else ""
    )
    return f"{cuts}; {placements}" + (f"; {effort}" if effort else "")


def _improved(plan: Plan) -> str:
    """How a plan with several stages a device was found, and what its bound is about."""
    cuts = "" if plan.cuts == "all" else f" along one order of the layers ({plan.cuts})"
    whose = "" if plan.restriction is None else f"; {plan.restriction.space}"
    return (
        f"balanced cuts for many sizes, improved by moving borders{cuts} and devices, {plan.simulated:,} plans"
        f" simulated: there may be better ones; the bound holds for all{whose}"
    )


def device_ranges(devices: Iterable[int]) -> str:
    """Device numbers as ranges; the same ones on four machines or more by the first two and the last.

    >>> device_ranges([0, 1, 2, 3, 8, 9, 12])
    '0–3,8–9,12'
    >>> device_ranges([0, 1, 8, 9, 16, 17, 24, 25, 31])
    '0–1,8–9…24–25,31'
    """
    by_run = groupby(enumerate(sorted(devices)), key=lambda pair: pair[1] - pair[0])
    runs = [[device for _, device in run] for _, run in by_run]
    texts = [f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    said: list[str] = []
    while runs:
        same = 1
        while same < len(runs) and runs[same] == [device + same * (runs[1][0] - runs[0][0]) for device in runs[0]]:
            same += 1
        count = same if same >= _ALIKE else 1
        said.append(texts[0] if count == 1 else f"{texts[0]},{texts[1]}…{texts[count - 1]}")
        runs, texts = runs[count:], texts[count:]
    return ",".join(said)


def layer_range(plan: Plan, stage: Stage) -> str:
    """First and last layer."""
    return _ends(plan, stage.layers[0], stage.layers[-1], alone=len(stage.layers) == 1)


def _ends(plan: Plan, first: str, last: str, *, alone: bool) -> str:
    short = _short_names(tuple((stage.layers[0], stage.layers[-1]) for stage in plan.stages))
    return short[first] if alone else f"{short[first]} … {short[last]}"


@lru_cache(maxsize=16)
def _short_names(ends: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """Of the first and the last layers of a plan's stages."""
    return short_names(name for pair in ends for name in pair)


def shape(plan: Plan) -> str:
    """A plan in a few characters: layers and replicas of each stage, equal neighbours counted.

    >>> import hpgo
    >>> shape(hpgo.plan(hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a"), global_batch_size=64))
    '32×8 21×8'
    """
    stages = [f"{len(stage.layers)}×{stage.replicas}" for stage in plan.stages]
    runs = [(text, len(list(run))) for text, run in groupby(stages)]
    shown = [text if count == 1 else f"{count}·({text})" for text, count in runs]
    return " ".join(shown) if len(shown) <= 4 else f"{len(stages)} stages"


def sweep(plans: Sequence[Plan]) -> tuple[str, list[str], list[tuple[object, ...]]]:
    """Title, columns and rows of a table that compares plans of one model for several batch or cluster sizes."""
    largest = max(plans, key=lambda plan: plan.cluster_devices)
    title = f"{largest.profile} on {largest.cluster}"
    sizes = [plan.global_batch_size for plan in plans]
    devices = [plan.cluster_devices for plan in plans]
    asked: dict[str, Sequence[object]] = {}
    if len(set(sizes)) > 1:
        asked["batch"] = sizes
    else:
        title += f", {pluralize(sizes[0], 'sample')} a step"
    if len(set(devices)) > 1:
        asked["devices"] = devices
    columns = ["stages", "micro-batch", "step", "samples/s", "speed-up", "bubble", "gap", "free"]
    answers = [
        (
            shape(plan),
            plan.micro_batch_size,
            _seconds(plan.step_s),
            f"{plan.samples_per_s:.4g}",
            f"{plan.speed_up:.4g}",
            f"{100 * plan.bubble:.1f} %",
            "-" if plan.gap is None or math.isinf(plan.gap) else f"{100 * plan.gap:.1f} %",
            _free(min(plan.groups, key=lambda group: group.headroom_bytes / group.capacity_bytes)),
        )
        for plan in plans
    ]
    rows = [(*known, *answer) for *known, answer in zip(*asked.values(), answers, strict=True)]
    title += "; stages as layers × devices"
    if any(plan.searched_cuts_bound_s is not None for plan in plans):
        title += "; only some cuts were searched, gaps are over all cuts"
    return title, [*asked, *columns], rows


def _instead(plan: Plan, other: Alternative) -> str:
    if other.step_s is None:
        if not other.shortfall_bytes:
            return other.reason
        return f"{pluralize(other.stages, 'stage')}: {other.reason}"
    if other.reason == "is this plan":
        return other.reason
    ratio = other.step_s / plan.step_s if plan.step_s else math.inf if other.step_s else 1.0
    if abs(ratio - 1) <= 1e-9:
        longer = "as long"
    elif math.isinf(ratio):
        longer = "longer"
    elif ratio < 1:  # of a plan that was preferred for its memory
        longer = f"{percent(1 - ratio)} shorter"
    else:
        longer = f"{ratio:.1f} × as long" if ratio >= 2 else f"{percent(ratio - 1)} longer"
    stages = f"{other.stages} stages, " if other.stages > 1 else ""
    return f"{_seconds(other.step_s)}, {longer} ({stages}micro-batch {other.micro_batch_size}): {other.reason}"


def _stored(plan: Plan, stored_step_s: float) -> str:
    if stored_step_s == plan.step_s:
        return f"{_seconds(stored_step_s)}, and the same when priced anew"
    percent = f" ({100 * (plan.step_s / stored_step_s - 1):+.3g} %)" if stored_step_s else ""
    return (
        f"{stored_step_s!r} s, but {plan.step_s!r} s when priced anew{percent}: the file was changed, or another"
        " version of hpgo made it"
    )


def _loading(plan: Plan) -> str:
    return f"loading data, {format_seconds(plan.loading_s)} for each profiled batch: loaders work ahead of the step"


def _shared(plan: Plan, weight: TiedWeight) -> str:
    """Who holds a copy of a weight that layers share."""
    stages = [str(at) for at, stage in enumerate(plan.stages) if not {*stage.layers}.isdisjoint(weight.layers)]
    layers = " and ".join(f"`{layer}`" for layer in weight.layers)
    return (
        f"{layers} share {_bytes(weight.parameter_bytes)} of weights: stages {', '.join(stages)} hold a copy, and sum"
        " its gradients together"
    )


def _preferred(plan: Plan, than: MemoryPreference) -> str:
    """What a plan was preferred to, and by how much it is longer."""
    longer = plan.step_s / than.step_s - 1 if than.step_s else 0.0
    held = max(group.memory.total_bytes for group in plan.groups)
    share = f"{100 * than.tolerance:.3g} %"
    least = f"the least memory found within {share} of the shortest step found, {_seconds(than.step_s)}"
    if held >= than.peak_bytes:
        return f"{least}: that plan itself"
    instead = f"{_bytes(held)} instead of {_bytes(than.peak_bytes)} on the fullest device"
    return f"{least}: {'as long' if longer <= 1e-9 else f'{percent(longer)} longer'}, {instead}"


def _optimizer(memory: MemoryModel) -> str:
    """What is kept beside weights and activations.

    >>> from hpgo import MemoryModel
    >>> print(_optimizer(MemoryModel(shard_optimizer=True)))
    adam-fp32: for each byte of weights 1 of gradients and 2 of state (4 + 4 + 8 a parameter), which replicas share
    """
    name = memory.optimizer
    kept = (
        f"for each byte of weights {memory.gradients_per_weight:g} of gradients and {memory.optimizer_per_weight:g} of"
        " state"
    )
    known = "" if name is None else f" ({OPTIMIZERS[name].bytes_text} a parameter)"
    return (
        ("" if name is None else f"{name}: ")
        + kept
        + known
        + (", which replicas share" if memory.shard_optimizer else "")
    )


def _shortage(plan: Plan) -> str:
    group = min(plan.groups, key=lambda group: group.headroom_bytes)
    return f"does not fit: each device of stage {group.stages[0]} lacks {_bytes(-group.headroom_bytes)}"


def _samples(micro_batch: int, stage: Stage) -> str:
    smallest = micro_batch // stage.replicas
    return (
        str(stage.samples_per_replica)
        if smallest == stage.samples_per_replica
        else f"{smallest}–{stage.samples_per_replica}"
    )


def _seconds(seconds: float) -> str:
    return format_seconds(float(f"{seconds:.3g}"))


def _bytes(size: float) -> str:
    return format_bytes(float(f"{size:.3g}"))
