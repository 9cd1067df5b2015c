"""Plan files in JSON: write version 3; read also version 2, with older keys, and version 1, without assumptions.

Values that a plan shares with its alternatives are in the file once. Profile and cluster are embedded in their own file
formats, or replaced by the SHA-256 of the values that step times depend on.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from hpgo import _core
from hpgo.base.checks import check_is, check_text
from hpgo.base.documents import Section, as_kind, hinted, json_text, kind_of_document, parse, record
from hpgo.base.messages import safe_repr
from hpgo.errors import ArgumentError
from hpgo.hardware.cluster import Cluster
from hpgo.model.formats import native
from hpgo.model.profile import Profile
from hpgo.planning.laws import check_file
from hpgo.planning.plans import Alternative, Assumptions, Digest, Plan, ScheduleChoice
from hpgo.planning.problem import ZeroStage
from hpgo.programs.stages import recompute_by_stage

if TYPE_CHECKING:
    from hpgo.programs.stages import Stage

    _Source = TypeVar("_Source", Profile, Cluster)

LLM_PLAN_FORMAT = "hpgo.llm_plan"
"""Value of the key `format` in files of `hpgo.LlmPlan`."""
_VERSION = 3
_RENAMED_IN_3 = {
    "chunks": "virtual_stages_per_rank", "compact_bound_s": "node_aligned_bound_s",
    "count_loading": "include_data_loading", "crossings": "boundary_tensors",
    "equal_shares": "even_split", "free_lower_bound_s": "unrestricted_lower_bound_s",
    "free_stages": "unrestricted_stages",
    "free_step_s": "unrestricted_step_s", "in_flight": "max_in_flight", "kept_bytes": "saved_activation_bytes",
    "labels": "explored_labels", "launcher": "framework", "machines": "nodes",
    "micro_batch_size": "pipeline_micro_batch_size", "missing_bytes": "shortfall_bytes",
    "parted": "split_tied_weights", "share": "samples_per_replica", "smallest_share": "min_samples_per_replica",
    "stopped": "stop_reason", "sync_s": "grad_reduce_s", "sync_tail_s": "exposed_grad_reduce_s",
    "tie": "memory_preference", "why": "reason", "within": "tolerance",
}  # fmt: skip
"""Keys of versions 1 and 2, at any depth but within profiles and clusters, and their names from version 3 on."""
_STOP_REASONS_IN_3 = {"deadline": "time_limit", "effort": "work_limit"}
"""Values of `stopped` in versions 1 and 2, and what they are called in `stop_reason`."""
_COMPARED = ("alternatives", "schedules")
_SHARED = (
    "profile", "cluster", "global_batch_size", "cluster_devices", "nodes", "loading_s", "assumptions", "made_with",
    "restriction", *_COMPARED,
)  # fmt: skip
"""Fields that alternatives take from the plan in the file, or leave at their defaults."""
_SINCE_2 = {
    "stop_reason", "saved_activation_bytes", "recomputed_bytes", "notes", "memory_preference", "node_aligned_bound_s",
    "virtual_stages_per_rank", "input_gradient_s", "weight_gradient_s", "split_tied_weights", "searched_cuts_bound_s",
    "recompute", "exposed_transfer_s", "overlap_p2p_comm", "samples_by_replica", "shares_by_speed",
    "exposed_forward_comm_s", "exposed_backward_comm_s", "zero_stage",
}  # fmt: skip
"""Keys that files of versions 2 and 3 may lack, at any depth: both grew."""
_SINCE_1 = {*_SINCE_2, "nodes", "boundary_tensors", "actions", "assumptions", "made_with", "plan", "restriction"}
"""Keys that files of version 1 may lack, at any depth."""
_DIGITS = set("0123456789abcdef")

_Row = TypeVar("_Row", Alternative, ScheduleChoice)


def written(plan: Plan, *, embed: bool) -> str:
    """Return the JSON of a plan, with digests of profile and cluster unless they are embedded."""
    keys = {
        "format": "hpgo.plan",
        "version": _VERSION,
        "made_with": plan.made_with,
        **_facts(plan, (*_COMPARED, "assumptions", "made_with")),
        "finished": plan.finished,
        "alternatives": [_row(row) for row in plan.alternatives],
        "schedules": [_row(row) for row in plan.schedules],
        "assumptions": None if plan.assumptions is None else _assumptions(plan.assumptions, embed=embed),
    }
    return json_text(keys)


def read(text: str, source: str) -> Plan:
    """Return the plan in `text`. Raises ArgumentError with the name `source` for invalid text."""
    with hinted("make it again with `hpgo plan`"):
        check_text("the source of a plan", source)
        if not isinstance(text, str) or not text.lstrip().startswith("{"):
            raise ArgumentError(f"{source} is not a plan", "save plans with `-o plan.json`", code="wrong_kind_of_file")
        document = _recomputing_by_stage(parse(text, source, ArgumentError))
        top = Section(document, source, ArgumentError)
        form = top.get("format", None)
        if form == LLM_PLAN_FORMAT:
            raise ArgumentError(
                f"{source} is an LLM plan, which has no profile",
                f"export it to a framework: `hpgo export {source} --to megatron`",
                code="wrong_kind_of_file",
            )
        if form != "hpgo.plan":
            kind = kind_of_document(document)
            message = f"{source} is {kind}, not a plan" if kind else f"{source} is not a plan"
            raise ArgumentError(message, "save plans with `-o plan.json`")
        version = top.get("version", None)
        if isinstance(version, bool) or version not in (1, 2, _VERSION):
            raise ArgumentError(f"{source} is a plan of version {safe_repr(version)}, not 1, 2 or {_VERSION}")
        if version != _VERSION:
            # Old keys are renamed first, so that the rest of the reader knows only one version.
            top = Section(_with_names_of_3(document), source, ArgumentError)
            # Keys that nothing reads are reported as unknown, so mark these two as read.
            for key in ("format", "version"):
                top.get(key)
        alternatives = top.rows("alternatives")
        schedules = top.rows("schedules") if "schedules" in top else None  # Added within version 1.
        known: dict[str, object] = {"alternatives": (), "schedules": ()}
        if version != 1:
            known["assumptions"] = _read_assumptions(top)
        optional = _SINCE_1 if version == 1 else _SINCE_2
        # Alternatives take shared fields from the plan, so they are read after it.
        plan = _read_plan(top, known, optional)
        plan = replace(
            plan,
            alternatives=_read_rows(Alternative, alternatives, plan, optional),
            schedules=_read_rows(ScheduleChoice, schedules, plan, optional),
        )
        check_file(plan, source)
        return plan


def _recomputing_by_stage(document: Any) -> Any:
    """Return a document whose plan, and those that it was compared with, have the key `recompute` in each stage."""
    document = recompute_by_stage(document)
    for key in _COMPARED:
        if isinstance(document, dict) and isinstance(rows := document.get(key), list):
            document = document | {key: [_row_by_stage(row) for row in rows]}
    return document


def _row_by_stage(row: Any) -> Any:
    return row | {"plan": recompute_by_stage(row["plan"])} if isinstance(row, dict) and "plan" in row else row


def _with_names_of_3(document: Any) -> Any:
    """Return a document of version 1 or 2 with the keys of version 3."""
    # Aliases in YAML can make a small text a huge document, so values that appear often are renamed once.
    renamed: dict[int, Any] = {}

    def of(value: Any) -> Any:
        if not isinstance(value, dict | list):
            return value
        if id(value) not in renamed:
            renamed[id(value)] = [of(item) for item in value] if isinstance(value, list) else keys_of(value)
        return renamed[id(value)]

    def keys_of(value: dict[str, Any]) -> dict[str, Any]:
        found = {
            _RENAMED_IN_3.get(key, key): item if key in {"profile", "cluster"} else of(item)
            for key, item in value.items()
        }
        if isinstance(reason := found.get("stop_reason"), str):
            found["stop_reason"] = _STOP_REASONS_IN_3.get(reason, reason)
        if found.get("name") == "straight pipeline":
            found["name"] = "pipeline parallelism only"
        return found

    return of(document)


def digest_of(source: Profile | Cluster) -> Digest:
    """Return the SHA-256 of the values that step times depend on: sorted keys of the file, with numbers as floats.

    Keys about the origin of the values are left out.
    """
    if isinstance(source, Profile):
        stripped = replace(source, layers=tuple(replace(layer, spread=None) for layer in source.layers))
        keys = native.document(stripped)
    else:
        keys = source.document()
    kept = {key: value for key, value in keys.items() if key not in native.UNPRICED}
    # Sorted keys and floats make the digest independent of the order and the number format in a file.
    text = json.dumps(_as_floats(kept), sort_keys=True, separators=(",", ":"))
    return Digest(hashlib.sha256(text.encode()).hexdigest())


def known_source(kind: str, name: str, saved: _Source | Digest, given: _Source | None) -> _Source:
    """Return the profile or cluster of a plan: `saved` in its file, or `given` by the caller.

    Raises ArgumentError if the plan has only a digest and none is given, or if another one is given.
    """
    kinds = {"profile": (Profile, "hpgo.read_profile"), "cluster": (Cluster, "hpgo.Cluster.read")}
    check_is(kind, given, kinds[kind][0], f"read one with `{kinds[kind][1]}`", or_none=True)
    if given is None:
        if isinstance(saved, Digest):
            raise ArgumentError(
                f"the plan was saved without its {kind} `{name}`",
                f"give the {kind} that it was made with: `--{kind} FILE`, or `{kind}=` in Python",
                code="mismatch",
            )
        return saved
    expected = saved if isinstance(saved, Digest) else digest_of(saved)
    # Digests also compare a given profile with an embedded one, whose names may differ.
    if digest_of(given) != expected:
        raise ArgumentError(
            f"the plan was made with another {kind}: `{given.name}` has SHA-256 {digest_of(given).sha256[:12]}…, and"
            f" `{name}` has {expected.sha256[:12]}…",
            f"give the {kind} that it was made with, or evaluate its stages with this one: `hpgo evaluate PROFILE"
            " --stages …`",
            code="mismatch",
        )
    return given


def _as_floats(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_floats(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_floats(item) for item in value]
    return float(value) if isinstance(value, int) else value


def _facts(record: object, left_out: tuple[str, ...]) -> dict[str, object]:
    """Return the fields of a dataclass as values for JSON."""
    own = (field.name for field in fields(record) if field.init and field.name not in left_out)  # type: ignore[arg-type]
    values = {name: getattr(record, name) for name in own}
    return {name: _plain(value) for name, value in values.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    # Other values are records, such as stages and memory.
    return value if isinstance(value, str | int | float | None) else asdict(value)


def _row(row: Alternative | ScheduleChoice) -> dict[str, object]:
    own = row.plan
    return _facts(row, ("plan",)) | {"plan": None if own is None else _facts(own, _SHARED) | {"finished": own.finished}}


def _assumptions(assumptions: Assumptions, *, embed: bool) -> dict[str, object]:
    def kept(source: Profile | Cluster | Digest) -> dict[str, object]:
        if isinstance(source, Digest) or not embed:
            return asdict(source if isinstance(source, Digest) else digest_of(source))
        return native.document(source) if isinstance(source, Profile) else source.document()

    sources = {"profile": kept(assumptions.profile), "cluster": kept(assumptions.cluster)}
    return _facts(assumptions, tuple(sources)) | sources


def _read_assumptions(top: Section) -> Assumptions | None:
    if top.get("assumptions") is None:
        return None
    section = top.within("assumptions")
    known: dict[str, object] = {}
    for key in ("profile", "cluster"):
        kept = section.within(key)
        with as_kind(ArgumentError):
            if "sha256" in kept:
                known[key] = record(Digest, kept)
            elif key == "profile":
                known[key] = native.of_document(section.get(key), name="", file=kept.where)
            else:
                known[key] = Cluster.from_document(section.get(key), file=kept.where)
    assumptions = record(Assumptions, section, optional=_SINCE_2, known=known)
    if assumptions.memory.zero_stage not in get_args(ZeroStage):
        section.fail(f"`zero_stage` is {safe_repr(assumptions.memory.zero_stage)}, but must be 0, 1, 2, 3 or auto")
    for source in (assumptions.profile, assumptions.cluster):
        if isinstance(source, Digest) and not (len(source.sha256) == 64 and set(source.sha256) <= _DIGITS):
            section.fail(f"`sha256` is {safe_repr(source.sha256)}, but it must have 64 hexadecimal digits")
    return assumptions


def _read_rows(kind: type[_Row], rows: Section | None, plan: Plan, optional: set[str]) -> tuple[_Row, ...]:
    """Return the alternatives of `plan`, or the schedules that it was compared with."""
    read: list[_Row] = []
    if rows is None:
        return ()
    for row in rows:
        section = rows.within(row)
        own = None
        if ("plan" in section or "plan" not in optional) and section.get("plan") is not None:
            own = _read_plan(section.within("plan"), {key: getattr(plan, key) for key in _SHARED}, optional)
        read.append(record(kind, section, known={"plan": own}))
    return tuple(read)


def _with_saved_activation_bytes(stage: Stage) -> Stage:
    """Return `stage` with saved activations per micro-batch, which files may give only as a sum."""
    return replace(stage, memory=replace(stage.memory, saved_activation_bytes=stage.saved_activation_bytes))


def _in_layer_order(plan: Plan, profile: Profile) -> Plan:
    """Return `plan` with the layers of each stage in the order that the planner evaluates, as files may differ."""
    # Sums of layer times depend on their order in the last digits, and step times must not.
    place = {profile.layers[index].id: at for at, index in enumerate(_core.layer_order(profile))}
    stages = (replace(stage, layers=tuple(sorted(stage.layers, key=place.__getitem__))) for stage in plan.stages)
    return replace(plan, stages=tuple(stages))


def _read_plan(section: Section, known: dict[str, object], optional: set[str]) -> Plan:
    finished = section.flag("finished")
    plan = record(Plan, section, optional=optional, known=known)
    plan = replace(plan, stages=tuple(_with_saved_activation_bytes(stage) for stage in plan.stages))
    if plan.assumptions is not None and isinstance(plan.assumptions.profile, Profile):
        # A plan with unknown layers would fail later with a less clear error.
        ids = {layer.id for layer in plan.assumptions.profile.layers}
        for number, stage in enumerate(plan.stages):
            if not ids.issuperset(stage.layers):
                absent = next(layer for layer in stage.layers if layer not in ids)
                section.fail(f"stage {number} has layer {safe_repr(absent)}, which the profile of the plan lacks")
        profile = plan.assumptions.profile
        plan = _in_layer_order(plan, profile if plan.assumptions.include_data_loading else profile.without_loading())
    # The bound of older files holds only for what was searched: compact placements, or a part of all cuts.
    if plan.placements == "compact" and "node_aligned_bound_s" not in section:
        plan = replace(plan, lower_bound_s=None, node_aligned_bound_s=plan.lower_bound_s)
    if plan.cuts != "all" and plan.virtual_stages_per_rank == 1 and "searched_cuts_bound_s" not in section:
        plan = replace(plan, lower_bound_s=None, searched_cuts_bound_s=plan.lower_bound_s)
    if plan.finished != finished:
        if plan.stop_reason is not None:
            section.fail("`finished` and `stop_reason` contradict each other", code="conflict")
        plan = replace(plan, stop_reason="time_limit")  # Ctrl-C, perhaps: older files don't tell them apart
    return plan
