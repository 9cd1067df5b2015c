"""Reports of plans, as plain text and as Markdown.

A report starts with the answer: step time, optimality, throughput, bottleneck and memory. Then come tables with a row
for each stage (layers and devices, times, memory), the alternatives, and details of schedule and search. Adjacent
stages with nearly equal figures share a row. This module formats only. All numbers come from `hpgo.planning.plans`.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections import Counter
from functools import lru_cache, partial
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

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
"""Default width of prose, in columns."""
CAUTION = "caution"
"""Name of the facts that `cautions` returns, in `summary`."""
_MIN_SPREAD = 0.01
"""Spread of measured times below which a report does not mention it."""
_MIN_RANGES = 4
"""Number of equal device ranges from which on only the first two and the last are written."""
_SCHEDULES = {
    "1f1b": "1F1B",
    "eager_1f1b": "eager 1F1B",
    "gpipe": "GPipe",
    "zb_h1": "ZB-H1",
    "zb_h2": "ZB-H2",
    "zb": "greedy zero-bubble",
    "1f1b_overlap": "1F1B with combined forward and backward passes",
    "interleaved": "interleaved 1F1B",
    "interleaved_overlap": "interleaved 1F1B with combined forward and backward passes",
    "looped_bfs": "looped breadth-first",
    "hanayo": "Hanayo",
    "interleaved_zb": "interleaved zero-bubble",
    "zb_v": "ZB-V",
    "v_half": "V-Half",
    "v_min": "V-Min",
    "dualpipe_v": "DualPipeV",
}
# A number and its unit must not be wrapped apart: this space becomes a no-break space until the text is wrapped.
_BEFORE_UNIT = re.compile(r"(?<=[0-9]) (?=(%|×|[munkMGT]?[sB])\b|[%×])")
_COMBINED = (
    "{}: a combined forward and backward pass is assumed to take as long as both, because a profile has no combined"
    " times; `hpgo simulate --plan … --overlapped-times …` runs with times that you measured"
)
_FEW_DEVICES = 32
"""Cluster size up to which node-aligned placements may use one partly filled node more, as in docs/planner.md."""
_PROVEN = 5e-7
"""Largest optimality gap that is only floating-point rounding."""


class ReportTable(NamedTuple):
    """A table of a report."""

    title: str
    columns: list[str]
    rows: list[tuple[object, ...]]


def table(
    plan: Plan,
    style: Callable[[str, str], str] = lambda _role, text: text,
    *,
    stored_step_s: float | None = None,
    width: int = WIDTH,
    next_steps: Sequence[str] = (),
) -> str:
    """Return the report of a plan as plain text.

    Args:
        plan: what is reported.
        style: returns a colored text for its role (`headline`, `title`, `columns`, `fact` or `alarm`) and the text.
        stored_step_s: step time in the file of the plan, if the plan was read and evaluated again.
        width: columns at which prose is wrapped. Tables may be wider.
        next_steps: commands to suggest in the last lines.

    >>> import hpgo
    >>> plan = hpgo.plan(hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a"), global_batch_size=64)
    >>> print(table(plan).splitlines()[2])
    Step time   837 ms for 64 samples (simulated, not measured)
    """
    lines = [style("headline", line) for line in textwrap.wrap(headline(plan), width)]
    lines += [style("alarm", line) for text in cautions(plan) for line in textwrap.wrap(printable(text), width)]
    lines += ["", *_named_lines(answer(plan), style, width, alarm="" if plan.fits else "Memory")]
    for title, columns, rows in sections(plan):
        # Names of columns may take several lines, so the rows start after the lines that are not rows.
        drawn = plain(columns, rows, width)
        head = len(drawn) - len(rows)
        lines += ["", *(style("title", line) for line in textwrap.wrap(title, width))]
        lines += [*(style("columns", line) for line in drawn[:head]), *drawn[head:]]
    if plan.alternatives:
        lines += ["", style("title", "Alternatives"), *_named_lines(alternatives(plan), style, width)]
    if facts := details(plan, stored_step_s):
        lines += ["", style("title", "Details"), *_named_lines(facts, style, width)]
    if next_steps:
        lines.append("")
    for at, command in enumerate(next_steps):
        start = "      " if at else "Next: "
        lines += textwrap.wrap(
            command, width, initial_indent=start, subsequent_indent="      ", break_long_words=False,
            break_on_hyphens=False,
        )  # fmt: skip
    return "\n".join(lines).replace("\u00a0", " ")


def _named_lines(
    facts: Sequence[tuple[str, str]], style: Callable[[str, str], str], width: int, alarm: str = ""
) -> list[str]:
    """Return wrapped lines of named facts, with their texts aligned; the fact named `alarm` has the role `alarm`."""
    lines: list[str] = []
    indent = max(len(name) for name, _ in facts) + 2
    for name, fact in facts:
        kept = _BEFORE_UNIT.sub("\u00a0", printable(fact))
        first, *others = textwrap.wrap(
            kept, width, initial_indent=f"{name:{indent}}", subsequent_indent=" " * indent, break_on_hyphens=False
        )
        lines += [style("alarm" if name == alarm else "fact", name) + first[len(name) :], *others]
    return lines


def markdown(plan: Plan, *, stored_step_s: float | None = None) -> str:
    """Return the report of a plan as Markdown; `stored_step_s` is that of `table`."""
    lines = [f"## {headline(plan)}", "", *(line for text in cautions(plan) for line in (f"**{printable(text)}**", ""))]
    lines += _bullets(answer(plan))
    for title, columns, rows in sections(plan):
        lines += ["", f"**{title}**", "", *markdown_table(columns, rows)]
    if plan.alternatives:
        lines += ["", "**Alternatives**", "", *_bullets(alternatives(plan))]
    if facts := details(plan, stored_step_s):
        lines += ["", "**Details**", "", *_bullets(facts)]
    return "\n".join(lines)


def _bullets(facts: Sequence[tuple[str, str]]) -> list[str]:
    return [f"- **{name}**: {printable(fact)}" for name, fact in facts]


def headline(plan: Plan) -> str:
    """Return one line with model, cluster and batch, and a remark if the plan does not fit in memory."""
    return printable(
        f"{plan.profile} on {plan.cluster} ({pluralize(plan.cluster_devices, 'device')}), global batch"
        f" {plan.global_batch_size}" + ("" if plan.fits else ": does not fit in memory")
    )


def cautions(plan: Plan) -> list[str]:
    """Return the notes that reports print before everything else: that the order of plans is not reliable."""
    return [f"{note[0].upper()}{note[1:]}" for note in plan.notes if note.startswith(VARY)]


def _recomputed(plan: Plan) -> str:
    """Return where activations are recomputed, in the words of a report."""
    if plan.recompute != "auto":
        return "recomputed" if plan.recompute else "kept"
    rows = [(at, stage.recompute) for at, stage in enumerate(plan.stages)]
    runs = [[at for at, _ in run] for again, run in groupby(rows, key=lambda row: row[1]) if again]
    where = ", ".join(str(ranged(run[0], run[-1])) for run in runs)
    return f"recomputed in stage{'s' if sum(map(len, runs)) > 1 else ''} {where}, kept in the others"


def answer(plan: Plan) -> list[tuple[str, str]]:
    """Return the facts that a report starts with: step time, optimality, schedule, bottleneck, memory."""
    idle = plan.cluster_devices - plan.devices
    used = f"{plan.devices} of {plan.cluster_devices}" if idle else str(plan.devices)
    gpus = 1 if plan.assumptions is None else plan.assumptions.gpus_per_device
    virtual = f", {plan.virtual_stages_per_rank} virtual stages per device" if plan.virtual_stages_per_rank > 1 else ""
    schedule = (
        f"{_SCHEDULES.get(plan.schedule, plan.schedule)}{virtual}, {pluralize(plan.micro_batches, 'micro-batch')} of"
        f" {pluralize(plan.pipeline_micro_batch_size, 'sample')} over all replicas of a stage,"
        f" activations {_recomputed(plan)}"
    )
    devices = f"{used} device{'s' if plan.cluster_devices > 1 else ''}{f' of {gpus} GPUs' if gpus > 1 else ''}"
    return [
        (
            "Step time",
            f"{_seconds(plan.step_s)} for {pluralize(plan.global_batch_size, 'sample')} (simulated, not measured)",
        ),
        ("Optimality", proof(plan)),
        (
            "Throughput",
            f"{plan.samples_per_s:.4g} samples/s on {devices}, {plan.speed_up:.4g}× one device with enough memory",
        ),
        ("Schedule", schedule),
        ("Bottleneck", plan.limit),
        ("Suggestion", bottleneck.advice(plan.stages, plan.micro_batches, plan.step_s, idle=idle)),
        ("Bubble", f"devices do not compute for {100 * plan.bubble:.1f} % of the step"),
        ("Memory", _fullest(plan)),
    ]


def alternatives(plan: Plan) -> list[tuple[str, str]]:
    """Return the plans that users compare first, by name, with step time and reason."""
    return [(other.name, _instead(plan, other)) for other in plan.alternatives]


def details(plan: Plan, stored_step_s: float | None = None) -> list[tuple[str, str]]:
    """Return the facts behind the answer: optimizer, search and notes; `stored_step_s` is that of `table`."""
    return [
        *([] if plan.assumptions is None else [("Optimizer", _optimizer(plan.assumptions.memory, plan.stages))]),
        *([("Search space", search_space(plan))] if plan.lower_bound_s is not None else []),
        *([("Framework", restriction(plan))] if plan.restriction is not None else []),
        *([] if plan.memory_preference is None else [("Tolerance", _preferred(plan, plan.memory_preference))]),
        *([("Profile", measured)] if (measured := _measured(plan)) else []),
        *([("Merged rows", merged)] if (merged := _merged(plan)) else []),
        *(("Tied weights", _shared(plan, weight)) for weight in plan.split_tied_weights),
        *([("Data loading", _loading(plan))] if plan.loading_s else []),
        *([] if stored_step_s is None else [("Stored step", _stored(plan, stored_step_s))]),
        *_without(plan),
        *([("Combined", _COMBINED.format(", ".join(names)))] if (names := _combined(plan)) else []),
        *(("Note", note) for note in plan.notes if not note.startswith(VARY)),
    ]


def summary(plan: Plan, stored_step_s: float | None = None) -> list[tuple[str, str]]:
    """Return all named facts of a report in their order; `stored_step_s` is that of `table`."""
    warnings = [(CAUTION, text) for text in cautions(plan)]
    others = [(f"Alternative: {name}", text) for name, text in alternatives(plan)]
    return [*warnings, *answer(plan), *others, *details(plan, stored_step_s)]


def sections(plan: Plan) -> list[ReportTable]:
    """Return the tables: layers and devices of stages, times, memory, and compared schedules if there are any."""
    several = plan.virtual_stages_per_rank > 1
    # Devices of a group run several stages, so their number repeats; the group tells which stages share them.
    who = ("group", "devices") if several else ("devices", "replicas")
    return [
        ReportTable(
            "Stages (samples: per replica and micro-batch; in flight: micro-batches)",
            ["stage", "layers", "count", *who, "samples", "in flight"],
            [_who(plan, run) for run in alike(range(len(plan.stages)), partial(_shape_of, plan))],
        ),
        ReportTable(
            "Time per micro-batch, and per step for the gradient all-reduce",
            ["stage", "forward", "backward", "send", "gradient all-reduce", "exposed all-reduce"],
            [
                (numbers(run), *("-" if longest is None else _seconds(longest) for longest in _longest(plan, run)))
                for run in alike(range(len(plan.stages)), partial(_times, plan))
            ],
        ),
        ReportTable(
            "Peak memory per device",
            [
                "group" if several else "stage", "weights", "grads", "optimizer", "activations", "buffers",
                "total", "limit", "free",
            ],
            [_held(plan.groups, run) for run in alike(range(len(plan.groups)), partial(_kept, plan))],
        ),
        *([_compared(plan)] if plan.schedules else []),
    ]  # fmt: skip


def _shape_of(plan: Plan, index: int) -> tuple[float, ...]:
    """Return the figures of a stage that must be nearly equal for adjacent stages to share a row."""
    stage = plan.stages[index]
    # With virtual stages, devices of the first group follow the last group, so a range of devices would be wrong.
    group = index // len(plan.groups) if plan.virtual_stages_per_rank > 1 else 0
    return (
        len(stage.layers),
        stage.replicas,
        stage.samples_per_replica,
        min(stage.samples_by_replica, default=plan.pipeline_micro_batch_size // stage.replicas),
        group,
    )


def _times(plan: Plan, index: int) -> tuple[float | None, ...]:
    """Return the times of a stage in seconds, with None where nothing is sent or reduced."""
    stage = plan.stages[index]
    # A stage with one replica has no gradients to reduce, and shows dashes instead of zeros.
    alone = stage.replicas == 1
    return (
        stage.forward_s,
        stage.backward_s,
        None if _keeps_its_output(plan, index) else stage.transfer_s,
        None if alone else stage.grad_reduce_s,
        None if alone else stage.exposed_grad_reduce_s,
    )


def _longest(plan: Plan, run: range) -> tuple[float | None, ...]:
    """Return the times of the slowest stage of a row, compared column by column from the left."""
    # Nearly equal stages differ by 2 % at most, so it hardly matters which column decides.
    return max((_times(plan, index) for index in run), key=lambda times: [time or 0.0 for time in times])


def _kept(plan: Plan, index: int) -> tuple[float, ...]:
    """Return the memory of a group that does not depend on its position in the pipeline, in bytes."""
    group = plan.groups[index]
    # Activations depend on the position in the pipeline, so they must not prevent a shared row.
    memory = group.memory
    return memory.weights_bytes, memory.gradients_bytes, memory.optimizer_bytes, group.capacity_bytes


def _who(plan: Plan, run: range) -> tuple[object, ...]:
    """Return a row of the first table, for one stage or for several that are nearly equal."""
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
        *(
            (ranged(min(groups), max(groups)), devices)
            if plan.virtual_stages_per_rank > 1
            else (devices, f"{first.replicas}{each}")
        ),
        _samples(plan.pipeline_micro_batch_size, first),
        ranged(first.max_in_flight, last.max_in_flight),
    )


def _held(groups: Sequence[DeviceGroup], run: range) -> tuple[object, ...]:
    """Return a row of the memory table: the fullest group of a row, because the first ones keep most activations."""
    # The first groups keep activations of most micro-batches.
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
    """Return the share of memory that is free; a shortfall that rounds to 0 % keeps one digit, to stay visible."""
    if group.capacity_bytes <= 0:
        return "none"
    percent = 100 * group.free_bytes / group.capacity_bytes
    return f"{percent:.1g} %" if -0.5 <= percent < 0 else f"{percent:.0f} %"


def _keeps_its_output(plan: Plan, stage: int) -> bool:
    """Return whether the output of a stage stays on its devices, so that nothing is sent."""
    return stage == len(plan.stages) - 1 or plan.stages[stage].devices == plan.stages[stage + 1].devices


def _compared(plan: Plan) -> ReportTable:
    """Return the table of schedules that `schedule="auto"` compared."""
    columns = ["schedule", "step time", "difference", "peak memory", "stages", "micro-batch", ""]
    return ReportTable(
        "Schedules",
        columns,
        [
            (
                choice.name,
                "-" if choice.step_s is None else _seconds(choice.step_s),
                "-"
                if choice.step_s is None or not plan.step_s
                else f"{100 * (choice.step_s / plan.step_s - 1):+.1f} %",
                "-" if choice.peak_bytes is None else _bytes(choice.peak_bytes),
                f"{choice.stages}, {choice.virtual_stages_per_rank} per device"
                if choice.virtual_stages_per_rank > 1
                else choice.stages or "-",
                choice.pipeline_micro_batch_size or "-",
                f"over by {_bytes(choice.shortfall_bytes)}" if choice.shortfall_bytes else "",
            )
            for choice in plan.schedules
        ],
    )


def _without(plan: Plan) -> list[tuple[str, str]]:
    """Return the reasons for schedules without a step time; those that lack memory have theirs in the table."""
    names: dict[str, list[str]] = {}
    for choice in plan.schedules:
        if choice.step_s is None and not choice.shortfall_bytes:
            # Schedules often fail for the same reason, so they share one line.
            names.setdefault(choice.reason, []).append(choice.name)
    return [("No step time", f"{', '.join(same)}: {why}") for why, same in names.items()]


def _combined(plan: Plan) -> list[str]:
    """Return the schedules with a step time in the report that run a forward and a backward pass as one."""
    shown = [plan.schedule, *(choice.name for choice in plan.schedules if choice.step_s is not None)]
    return [name for name in ("1f1b_overlap", "interleaved_overlap", "dualpipe_v") if name in shown]


def _merged(plan: Plan) -> str:
    """Return which stages share a row of the tables; empty if none do."""
    runs = [run for run in alike(range(len(plan.stages)), partial(_shape_of, plan)) if len(run) > 1]
    stages = [plan.stages[run.start] for run in runs]
    texts = [
        f"stages {numbers(run)}: {pluralize(len(stage.layers), 'layer')} × {stage.replicas}"
        for run, stage in zip(runs, stages, strict=True)
    ]
    return f"{', '.join(texts)}; a row has the longest times and the largest memory" if texts else ""


def _measured(plan: Plan) -> str:
    """Return where and how the profile was measured, and a warning if its times vary by more than the gap."""
    profile = None if plan.assumptions is None else plan.assumptions.profile
    # A plan that was saved without its profile has only a digest of it.
    if not isinstance(profile, Profile):
        return ""
    where = " on ".join(filter(None, [profile.dtype and f"in {profile.dtype}", profile.device]))
    versions = [" ".join(pair) for pair in profile.versions]
    facts = ", ".join(filter(None, [where, profile.machine, *versions, profile.date]))
    known = f"measured {facts}" if where else facts
    spread = profile.spread or 0.0
    if plan.optimality_gap is None or spread < _MIN_SPREAD or spread <= plan.optimality_gap or cautions(plan):
        return known
    doubt = f"times differ by {times(spread)}, more than the gap: plans as close as that may be as fast"
    return f"{known}; {doubt}" if known else doubt


def proof(plan: Plan) -> str:
    """Return how certain it is that no plan has a shorter step."""
    stopped = "" if plan.finished else "; the search was stopped, and more time may improve plan and bound"
    # If the bound for all cuts meets the step, the weaker statements below are not needed.
    if plan.searched_cuts_bound_s is not None and not (
        plan.optimality_gap is not None and plan.optimality_gap <= _PROVEN
    ):
        return _proof_of_some_cuts(plan, plan.searched_cuts_bound_s) + stopped
    if plan.node_aligned_bound_s is not None and not (
        plan.optimality_gap is not None and plan.optimality_gap <= _PROVEN
    ):
        return _node_aligned_proof(plan, plan.node_aligned_bound_s) + stopped
    if plan.lower_bound_s is None or plan.optimality_gap is None:
        if plan.simulated:
            cuts = f"best of {plan.simulated:,} cuts that were" if plan.simulated > 1 else "one cut that was"
            return f"unknown: the {cuts} simulated under this schedule{stopped}"
        return "unknown: a given plan was evaluated, and no other plan was searched"
    if plan.optimality_gap <= _PROVEN:
        return f"proven optimal{whose(plan)}: no plan of the search space has a shorter step"
    return (
        f"{above(plan.optimality_gap)}{whose(plan)}: no plan of the search space takes less than"
        f" {_seconds(plan.lower_bound_s)}{stopped}"
    )


def _proof_of_some_cuts(plan: Plan, searched_s: float) -> str:
    """Return the optimality of a plan if only some cuts were searched: first among all cuts, then among these."""
    if not plan.lower_bound_s or plan.optimality_gap is None:
        known = "unknown for plans with other cuts"
    else:
        known = (
            f"{above(plan.optimality_gap)}{whose(plan)}: no plan takes less than {_seconds(plan.lower_bound_s)},"
            " regardless of its cuts"
        )
    # A bound of 0 is no information, which an infinite gap stands for.
    gap = max(0.0, plan.step_s / searched_s - 1) if searched_s else math.inf
    if math.isinf(gap):
        return known
    if gap <= _PROVEN:
        return f"{known}; no plan with the searched cuts is shorter"
    return f"{known}; no plan with the searched cuts takes less than {_seconds(searched_s)}"


def _node_aligned_proof(plan: Plan, node_aligned_bound_s: float) -> str:
    """Return the optimality of a plan if all node-aligned placements were searched and a bound holds for all others."""
    min_s = plan.lower_bound_s
    gap = max(0.0, plan.step_s / node_aligned_bound_s - 1) if node_aligned_bound_s else math.inf
    # A plan that is not node-aligned can be better than all that are. Then the bound on node-aligned plans does not
    # bound it.
    is_outside = gap <= _PROVEN and not _is_node_aligned(plan)
    if not min_s or plan.optimality_gap is None:
        if is_outside:
            return f"no node-aligned placement is better{whose(plan)}; unknown for other placements"
        known = "optimal" if gap <= _PROVEN else "not proven optimal" if math.isinf(gap) else above(gap)
        return f"{known} among node-aligned placements{whose(plan)}; unknown for other placements"
    of_all = f"{above(plan.optimality_gap)} of all placements"
    if is_outside:
        known = f"{of_all}, and no node-aligned one is better{whose(plan)}"
    elif gap <= _PROVEN:
        known = f"optimal among node-aligned placements{whose(plan)}, {of_all}"
    elif plan.optimality_gap - gap <= _PROVEN:
        known = f"{of_all}{whose(plan)}"
    else:
        known = f"{of_all} ({percent(gap)} among node-aligned ones){whose(plan)}"
    return f"{known}: no plan of the search space takes less than {_seconds(min_s)}"


def _is_node_aligned(plan: Plan) -> bool:
    """Return whether the stages, from the last to the first, are placed as docs/planner.md defines node-aligned."""
    if not plan.nodes:
        return True  # Files without `nodes` are older than the search through other placements.
    is_small = plan.cluster_devices <= _FEW_DEVICES
    node_of = [node for node, count in enumerate(plan.nodes) for _ in range(count)]
    free = list(plan.nodes)
    # The search builds plans from the last stage to the first, so the definition follows this order.
    for stage in reversed(plan.stages):
        taken = Counter(node_of[device] for device in stage.devices)
        # Nodes that another stage begins and this one fills, and nodes that this one leaves partly free.
        completed = partial_nodes = 0
        for node, count in taken.items():
            completed += count == free[node] < plan.nodes[node]
            partial_nodes += count < free[node]
            free[node] -= count
        if len(taken) > 1 and max(completed, partial_nodes) > is_small:
            return False
        if sum(0 < left < count for left, count in zip(free, plan.nodes, strict=True)) > 1 + is_small:
            return False
    return True


def whose(plan: Plan) -> str:
    """Return which plans a bound is about: plans of the schedule, and of the framework if there is one."""
    words = f" for {_SCHEDULES.get(plan.schedule, plan.schedule)}"
    return words + (f" among plans that {plan.restriction.label} runs" if plan.restriction is not None else "")


def restriction(plan: Plan) -> str:
    """Return how much longer the step is because a framework must run the plan; empty without a framework."""
    if plan.restriction is None:
        return ""
    label = plan.restriction.label
    known = plan.restriction.costs(plan.step_s)
    free_s, stages = plan.restriction.unrestricted_step_s, plan.restriction.unrestricted_stages
    if known is None or free_s is None or stages is None:
        if plan.lower_bound_s is None:
            why = "no bound is known for its schedule"
        elif plan.schedule in SCHEDULES:
            why = "the search had no time left"
        else:
            why = "not all plans of its schedule were tried"
        return f"{label}; not compared with plans for any framework: {why}"
    minimum, maximum = known
    if maximum <= _PROVEN:
        return f"{label}; no plan for another framework has a shorter step"
    share = percent(maximum) if maximum - minimum <= _PROVEN else f"at most {percent(maximum)}"
    return (
        f"{label}; its limits make the step {share} longer than the best plan without them; the best one found has"
        f" {pluralize(stages, 'stage')} and takes {_seconds(free_s)}"
    )


def search_space(plan: Plan) -> str:
    """Return which plans were compared, and how many."""
    if plan.virtual_stages_per_rank > 1:
        return _improved(plan)
    # The planner words `cuts`; these phrases mark cuts that were thinned out, not an order of the layers.
    thinned = "stay with a neighbour" in plan.cuts or "in about equal steps" in plan.cuts
    some = "some cuts" if thinned and "one order" not in plan.cuts else "cuts of one order of the layers"
    cuts = "every cut between layers" if plan.cuts == "all" else f"{some} ({plan.cuts})"
    if plan.restriction is not None:
        cuts = plan.restriction.space if plan.cuts == "all" else f"{cuts}; {plan.restriction.space}"
    # Frameworks start ranks in the order of devices. Other placements don't keep it, so they are not tried for one.
    patterns = ", others by pattern" if plan.restriction is None else ""
    placements = (
        "every placement on the nodes"
        if plan.placements == "all"
        else f"node-aligned placements only (few partly used nodes){patterns}"
    )
    if plan.cuts != "all" or plan.placements != "all":
        placements += "; the bound holds for all"
    effort = (
        f"; {plan.explored_labels:,} partial and {plan.simulated:,} complete plans evaluated"
        if plan.explored_labels
        else ""
    )
    return f"{cuts}; {placements}{effort}"


def _improved(plan: Plan) -> str:
    """Return how a plan with virtual stages was found, and which plans its bound is about."""
    cuts = "" if plan.cuts == "all" else f" along one order of the layers ({plan.cuts})"
    limits = "" if plan.restriction is None else f"; {plan.restriction.space}"
    return (
        f"balanced cuts for many sizes, improved by moving borders{cuts} and devices, {plan.simulated:,} plans"
        f" simulated: better plans may exist; the bound holds for all{limits}"
    )


def device_ranges(devices: Iterable[int]) -> str:
    """Return device numbers as ranges; of four or more equal ranges on different nodes only the first two and the last.

    >>> device_ranges([0, 1, 2, 3, 8, 9, 12])
    '0–3,8–9,12'
    >>> device_ranges([0, 1, 8, 9, 16, 17, 24, 25, 31])
    '0–1,8–9…24–25,31'
    """
    # Consecutive numbers have a constant difference to their index, which is the key of a run.
    by_run = groupby(enumerate(sorted(devices)), key=lambda pair: pair[1] - pair[0])
    runs = [[device for _, device in run] for _, run in by_run]
    texts = [f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    shown: list[str] = []
    while runs:
        same = 1
        # Equal ranges at equal distances are the same devices on several nodes.
        while same < len(runs) and runs[same] == [device + same * (runs[1][0] - runs[0][0]) for device in runs[0]]:
            same += 1
        count = same if same >= _MIN_RANGES else 1
        shown.append(texts[0] if count == 1 else f"{texts[0]},{texts[1]}…{texts[count - 1]}")
        runs, texts = runs[count:], texts[count:]
    return ",".join(shown)


def layer_range(plan: Plan, stage: Stage) -> str:
    """Return the names of the first and the last layer of a stage."""
    return _ends(plan, stage.layers[0], stage.layers[-1], alone=len(stage.layers) == 1)


def _ends(plan: Plan, first: str, last: str, *, alone: bool) -> str:
    short = _short_names(tuple((stage.layers[0], stage.layers[-1]) for stage in plan.stages))
    return short[first] if alone else f"{short[first]} … {short[last]}"


# Each row of a report asks for all names, and shortening compares each name with each other.
@lru_cache(maxsize=16)
def _short_names(ends: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """Return a short unique name for the first and the last layer of each stage."""
    return short_names(name for pair in ends for name in pair)


def shape(plan: Plan) -> str:
    """Return the layers and replicas of each stage in a few characters, with equal adjacent stages counted.

    >>> import hpgo
    >>> shape(hpgo.plan(hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a"), global_batch_size=64))
    '32×8 21×8'
    """
    stages = [f"{len(stage.layers)}×{stage.replicas}" for stage in plan.stages]
    runs = [(text, len(list(run))) for text, run in groupby(stages)]
    shown = [text if count == 1 else f"{count}·({text})" for text, count in runs]
    return " ".join(shown) if len(shown) <= 4 else f"{len(stages)} stages"


def sweep(plans: Sequence[Plan]) -> ReportTable:
    """Return a table that compares plans of one model for several batch sizes or cluster sizes."""
    # A sweep over device counts names the whole cluster, not its first part.
    largest = max(plans, key=lambda plan: plan.cluster_devices)
    title = f"{largest.profile} on {largest.cluster}"
    sizes = [plan.global_batch_size for plan in plans]
    devices = [plan.cluster_devices for plan in plans]
    given: dict[str, Sequence[object]] = {}
    if len(set(sizes)) > 1:
        given["batch"] = sizes
    else:
        title += f", global batch {sizes[0]}"
    if len(set(devices)) > 1:
        given["devices"] = devices
    columns = ["stages", "micro-batch", "step time", "samples/s", "speed-up", "bubble", "gap", "free"]
    answers = [
        (
            shape(plan),
            plan.pipeline_micro_batch_size,
            _seconds(plan.step_s),
            f"{plan.samples_per_s:.4g}",
            f"{plan.speed_up:.4g}",
            f"{100 * plan.bubble:.1f} %",
            "-"
            if plan.optimality_gap is None or math.isinf(plan.optimality_gap)
            else f"{100 * plan.optimality_gap:.1f} %",
            _free(min(plan.groups, key=lambda group: group.free_bytes / group.capacity_bytes)),
        )
        for plan in plans
    ]
    rows = [(*known, *answer) for *known, answer in zip(*given.values(), answers, strict=True)]
    title += "; stages as layers × devices"
    if any(plan.searched_cuts_bound_s is not None for plan in plans):
        title += "; only some cuts were searched, gaps are over all cuts"
    return ReportTable(title, [*given, *columns], rows)


def _instead(plan: Plan, other: Alternative) -> str:
    """Return the step time of an alternative, its difference from that of `plan`, and the reason."""
    if other.step_s is None:
        if not other.shortfall_bytes:
            return other.reason
        return f"{pluralize(other.stages, 'stage')}: {other.reason}"
    if other.reason == "is this plan":
        return other.reason
    # Models without times have steps of 0, which must not divide.
    ratio = other.step_s / plan.step_s if plan.step_s else math.inf if other.step_s else 1.0
    if abs(ratio - 1) <= 1e-9:
        longer = "as long"
    elif math.isinf(ratio):
        longer = "longer"
    elif ratio < 1:  # A plan that was preferred for its memory may have alternatives with a shorter step.
        longer = f"{percent(1 - ratio)} shorter"
    else:
        longer = f"{ratio:.1f}× as long" if ratio >= 2 else f"{percent(ratio - 1)} longer"
    each = " of 1 device" if other.name == "pipeline parallelism only" else ""
    stages = f"{other.stages} stages{each}, " if other.stages > 1 else ""
    return f"{_seconds(other.step_s)}, {longer} ({stages}micro-batch {other.pipeline_micro_batch_size}): {other.reason}"


def _stored(plan: Plan, stored_step_s: float) -> str:
    if stored_step_s == plan.step_s:
        return f"{_seconds(stored_step_s)} in the file, unchanged by the new evaluation"
    percent = f" ({100 * (plan.step_s / stored_step_s - 1):+.3g} %)" if stored_step_s else ""
    return (
        f"{stored_step_s!r} s in the file, but {plan.step_s!r} s by the new evaluation{percent}: the file was changed,"
        " or another version of hpgo made it"
    )


def _loading(plan: Plan) -> str:
    return (
        f"{format_seconds(plan.loading_s)} for each profiled batch, not part of the step: data loaders work ahead of it"
    )


def _shared(plan: Plan, weight: TiedWeight) -> str:
    """Return which stages hold a copy of a weight that layers share."""
    stages = [str(at) for at, stage in enumerate(plan.stages) if not {*stage.layers}.isdisjoint(weight.layers)]
    layers = " and ".join(f"`{layer}`" for layer in weight.layers)
    return (
        f"{layers} share {_bytes(weight.parameter_bytes)} of weights: stages {', '.join(stages)} hold a copy each, and"
        " reduce its gradients together"
    )


def _preferred(plan: Plan, than: MemoryPreference) -> str:
    """Return the difference in step time and memory to the plan with the shortest step."""
    longer = plan.step_s / than.step_s - 1 if than.step_s else 0.0
    # The plan with the shortest step can itself have the smallest memory.
    held = max(group.memory.total_bytes for group in plan.groups)
    share = f"{100 * than.tolerance:.3g} %"
    minimum = f"the smallest memory found within {share} of the shortest step found, {_seconds(than.step_s)}"
    if held >= than.peak_bytes:
        return f"{minimum}: that plan itself"
    instead = f"{_bytes(held)} instead of {_bytes(than.peak_bytes)} on the fullest device"
    return f"{minimum}: {'as long' if longer <= 1e-9 else f'{percent(longer)} longer'}, {instead}"


def _optimizer(memory: MemoryModel, stages: Sequence[Stage]) -> str:
    """Return the memory of gradients and optimizer state for each byte of weights.

    >>> from hpgo import MemoryModel
    >>> print(_optimizer(MemoryModel(shard_optimizer=True), ()))
    adam-fp32: 1 byte of gradients and 2 of state per byte of weights (4 + 4 + 8 per parameter), sharded over replicas
    """
    name = memory.optimizer
    gradients, state = memory.gradients_per_weight, memory.optimizer_per_weight
    kept = f"{gradients:g} byte{'' if gradients == 1 else 's'} of gradients and {state:g} of state per byte of weights"
    known = "" if name is None else f" ({OPTIMIZERS[name].bytes_text} per parameter)"
    sharded = ", sharded over replicas" if memory.shard_optimizer else ""
    if memory.zero_stage == "auto":
        runs = [list(run) for _, run in groupby(enumerate(stages), key=lambda row: row[1].zero_stage)]
        of_runs = [f"{run[0][1].zero_stage} in {ranged(run[0][0], run[-1][0])}" for run in runs]
        sharded += f" (ZeRO, by stage of the pipeline: {', '.join(of_runs)})"
    elif memory.zero_stage >= 2:
        sharded += f" (ZeRO stage {memory.zero_stage})"
    return f"{'' if name is None else f'{name}: '}{kept}{known}{sharded}"


def _fullest(plan: Plan) -> str:
    """Return the memory of the fullest device, or how much it lacks."""
    # The group with the least free memory decides whether the plan fits.
    group = min(plan.groups, key=lambda group: group.free_bytes)
    total, where = _bytes(group.memory.total_bytes), f"each device of stage {group.stages[0]}"
    limit = _bytes(group.capacity_bytes)
    if plan.fits:
        return f"{total} of {limit} on {where}, which has the least free memory ({_free(group)})"
    return f"does not fit: {where} needs {total}, but has {limit}: over by {_bytes(-group.free_bytes)}"


def _samples(micro_batch: int, stage: Stage) -> str:
    smallest = min(stage.samples_by_replica, default=micro_batch // stage.replicas)
    return (
        str(stage.samples_per_replica)
        if smallest == stage.samples_per_replica
        else f"{smallest}–{stage.samples_per_replica}"
    )


def _seconds(seconds: float) -> str:
    return format_seconds(float(f"{seconds:.3g}"))


def _bytes(size: float) -> str:
    return format_bytes(float(f"{size:.3g}"))
