"""Jobs of the plan page that a worker process runs: evaluate, draw, write and search."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from hpgo.errors import HpgoError
from hpgo.page.planned.address import asked_of
from hpgo.page.planned.facts import best_so_far, facts
from hpgo.page.planned.origin import asked_plan, origin, question_of, read, searched
from hpgo.page.settings import Settings, one_step, size_of
from hpgo.planning.plans import Plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpgo.page.planned.address import PlanAddress
    from hpgo.page.planned.jobs import PlanJob
    from hpgo.page.planned.origin import Origin


def answer(job: PlanJob, tell: Callable[[dict[str, Any]], object]) -> bytes:
    """Run a job and return the response body. Raises HpgoError for invalid requests. A search reports progress.

    If `tell` raises KeyboardInterrupt, the search ends with its best plan so far.
    """
    if job.wanted == "look":
        read(job.files[0][1])
        return b""
    asked = asked_of(job.items)
    if job.wanted == "search":
        return _json(_search(asked, job, tell))
    plan, found = _plan(asked, job)
    if job.wanted == "facts.json":
        return _json(facts(plan, found))
    if job.wanted == "plan.json":
        return f"{plan.to_json()}\n".encode()
    return _drawn(plan, asked, job.wanted)


def _plan(asked: PlanAddress, job: PlanJob) -> tuple[Plan, Origin | None]:
    """Return the plan of an address, and its planning problem, or None if its file does not contain one."""
    if asked.plan and not asked.is_changed:
        plan = read(dict(job.files)[asked.plan])
        assert isinstance(plan, Plan)  # noqa: S101 -- checked when it was loaded
        return plan, question_of(plan)
    found = origin(asked.question, job.files)
    return asked_plan(asked, found), found


def _drawn(plan: Plan, asked: PlanAddress, wanted: str) -> bytes:
    from hpgo.draw import render

    size_of(Settings(), one_step(plan))
    if wanted == "timeline.html":
        return render(plan.timeline(), ".html", memory=True)
    return render(plan.timeline(), ".svg", width_px=asked.width_px, linked=True)


def _search(asked: PlanAddress, job: PlanJob, tell: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    from hpgo.planning.planner import plan

    found = origin(asked.question, job.files)
    try:
        best = plan(
            found.profile,
            found.cluster,
            global_batch_size=found.batch,
            time_limit_s=job.time_limit_s,
            progress=lambda best_s, bound_s: tell(best_so_far(best_s, bound_s)),
            **searched(asked, found),
        )
    except KeyboardInterrupt:
        raise HpgoError("the search was stopped before there was a plan", "search again, for longer") from None
    return facts(best, found)


def _json(record: dict[str, Any]) -> bytes:
    return json.dumps(record, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
