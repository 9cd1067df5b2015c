"""Planning problem behind the page of a plan, and the plan that an address derives from it."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpgo.base.messages import shorten
from hpgo.errors import ArgumentError, HpgoError
from hpgo.hardware.cluster import Cluster
from hpgo.model.builtin import MODELS
from hpgo.model.formats import read_profile
from hpgo.page.planned.regroup import regrouped
from hpgo.planning.files import known_source
from hpgo.planning.planner import evaluate
from hpgo.planning.plans import Plan
from hpgo.planning.problem import MemoryModel

if TYPE_CHECKING:
    from hpgo.model.profile import Profile
    from hpgo.page.planned.address import PlanAddress
    from hpgo.page.planned.jobs import File
    from hpgo.page.planned.regroup import Stages


@dataclass(frozen=True, slots=True)
class Origin:
    """A planning problem, and the plan of its file if it has one."""

    profile: Profile
    cluster: Cluster
    batch: int
    settings: dict[str, Any]
    """Arguments of `hpgo.plan`, without those that the page changes."""
    plan: Plan | None = None

    @property
    def places(self) -> dict[str, int]:
        """Index in the profile of each layer, by its id."""
        return {layer.id: at for at, layer in enumerate(self.profile.layers)}


def read(file: File) -> Plan | Profile | Cluster:
    """Return the content of a file. Raises HpgoError, with the title of the file, if it is of another kind."""
    if file.kind == "plan":
        return _plan(file)
    # Readers of profiles use the name of the file: its ending, and batch sizes in it.
    with tempfile.TemporaryDirectory(prefix="hpgo-") as folder:
        path = Path(folder) / (Path(file.title).name or "file")
        path.write_bytes(file.body)
        try:
            return read_profile(path) if file.kind == "profile" else Cluster.read(path)
        except HpgoError as error:
            raise error.reworded(error.message.replace(f"{folder}/", "")) from None


@lru_cache(maxsize=4)
def _plan(file: File) -> Plan:
    return Plan.from_json(file.body.decode("utf-8", "replace"), source=f"`{shorten(file.title)}`")


@lru_cache(maxsize=4)
def origin(question: tuple[object, ...], files: tuple[tuple[str, File], ...]) -> Origin:
    """Return the planning problem of `PlanAddress.question`, with the `files` that it names.

    Raises HpgoError for unknown models and clusters. Results are cached, because each change of a plan needs them.
    """
    plan, model, cluster, batch, devices, optimizer, shard, reserve_bytes = question
    held = dict(files)
    if plan:
        found = read(held[str(plan)])
        assert isinstance(found, Plan)  # noqa: S101 -- checked when it was loaded
        # The file sets the problem. The address may change only batch and devices.
        own = _of_plan(found)
        if batch is None and devices is None:
            return own
        part = own.cluster if devices is None else own.cluster.first(int(str(devices)))
        return replace(own, cluster=part, batch=own.batch if batch is None else int(str(batch)), plan=None)
    layers = read(held[str(model)]) if model in held else _built_in(str(model))
    whole = read(held[str(cluster)]) if cluster in held else Cluster.preset(str(cluster))
    assert isinstance(whole, Cluster)  # noqa: S101 -- checked when it was loaded
    name: Any = str(optimizer) if optimizer else "adam-fp32"
    memory = MemoryModel.preset(
        name,
        shard_optimizer=bool(shard),
        reserved_bytes=float(str(reserve_bytes)),
    )
    part = whole if devices is None else whole.first(int(str(devices)))
    return Origin(layers, part, int(str(batch)), {"memory": memory})  # type: ignore[arg-type]


def _built_in(name: str) -> Profile:
    if name not in MODELS:
        # A name in an address must never read a file of this machine, so `read_profile` gets built-in names only.
        from hpgo.base.messages import did_you_mean

        raise ArgumentError(
            f"there is no built-in model `{shorten(name)}`, and no loaded profile of this name",
            did_you_mean(name, MODELS),
            code="unknown_name",
        )
    return read_profile(name)


def question_of(plan: Plan) -> Origin | None:
    """Return the planning problem of a plan, or None if its file does not contain it."""
    try:
        return _of_plan(plan)
    except ArgumentError:
        return None


def _of_plan(plan: Plan) -> Origin:
    assumed = plan.assumed
    settings = {
        "memory": assumed.memory,
        "even_split": assumed.even_split,
        "overlap": assumed.overlap,
        "overlap_p2p_comm": assumed.overlap_p2p_comm,
        "shares_by_speed": assumed.shares_by_speed,
        "min_samples_per_replica": assumed.min_samples_per_replica,
        "include_data_loading": assumed.include_data_loading,
    }
    profile = known_source("profile", plan.profile, assumed.profile, None)
    cluster = known_source("cluster", plan.cluster, assumed.cluster, None)
    return Origin(profile, cluster, plan.global_batch_size, settings, plan)


def asked_plan(asked: PlanAddress, found: Origin) -> Plan:
    """Return the plan of an address: that of a file, or one with the changes in the address, evaluated again.

    Raises ArgumentError for stages that can't run.
    """
    plan = found.plan
    if plan is not None and not asked.is_changed:
        return plan
    ids = [layer.id for layer in found.profile.layers]
    if asked.stages:
        stages: Stages = [
            ([_layer(ids, at, place) for place in layers], list(devices))
            for at, (layers, devices) in enumerate(asked.stages)
        ]
    elif plan is not None:
        stages = [(list(stage.layers), list(stage.devices)) for stage in plan.stages]
    else:
        raise ArgumentError("the address has no stages", "search for a plan, or add `stages=…`")
    kept = (
        {}
        if plan is None
        else {
            "schedule": plan.schedule,
            "pipeline_micro_batch_size": plan.pipeline_micro_batch_size,
            "recompute": plan.recompute,
        }
    )
    if asked.regroup and asked.schedule not in {"", "auto"}:
        # The number of micro-batches is needed to build some schedules.
        size = asked.micro_batch or (plan.pipeline_micro_batch_size if plan else 1)
        times_s = {layer.id: layer.forward_s[0] + layer.backward_s[0] for layer in found.profile.layers}
        stages = regrouped(stages, asked.schedule, max(1, found.batch // size), times_s)
    changed = evaluate(
        found.profile,
        found.cluster,
        stages,
        global_batch_size=found.batch,
        **(found.settings | kept | _given(asked)),
    )
    return changed if plan is None else replace(changed, notes=plan.notes)


def _given(asked: PlanAddress) -> dict[str, Any]:
    """Return the arguments of `hpgo.plan` that an address changes."""
    given = {
        "schedule": asked.schedule or None,
        "pipeline_micro_batch_size": asked.micro_batch,
        "recompute": asked.recompute,
    }
    return {name: value for name, value in given.items() if value is not None}


def searched(asked: PlanAddress, found: Origin) -> dict[str, Any]:
    """Return the arguments of `hpgo.plan` to search for the best plan of an address, regardless of its stages."""
    plan = found.plan
    # Stages and micro-batch size stay out, because the search chooses them.
    kept: dict[str, Any] = {} if plan is None else {"schedule": plan.schedule, "recompute": plan.recompute}
    if plan is not None and plan.restriction is not None:
        version = plan.restriction.version
        kept["framework"] = plan.restriction.framework + (f"@{version}" if version else "")
    return found.settings | kept | _given(asked)


def _layer(ids: list[str], stage: int, place: int) -> str:
    if place >= len(ids):
        raise ArgumentError(
            f"stage {stage} has layer {place}, but the last layer of the profile is {len(ids) - 1}",
            "number layers from 0",
        )
    return ids[place]
