"""The time that is left for looking at several plans in turn."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hpgo import _core
from hpgo.base.errors import DeadlineError, HpgoError
from hpgo.planning.search import plan_of, search

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpgo.planning.plans import Plan
    from hpgo.planning.question import Question


@dataclass(slots=True)
class Clock:
    """When to stop trying."""

    end_s: float
    stopped: str | None = None
    """As `Plan.stopped`."""

    @classmethod
    def of(cls, deadline_s: float | None) -> Clock:
        """One that stops so many seconds from now, or never."""
        return cls(float("inf") if deadline_s is None else time.monotonic() + deadline_s)

    def search(self, question: Question, progress: Callable[[float, float], object] | None) -> Plan:
        """The planner's search, in half of the time left; if Ctrl-C ended it, nothing more is to be tried.

        Where that is too short for any plan, it is one that is found at a glance, in all that is left, without a bound.
        """
        allowed_s = None if self.end_s == float("inf") else max(1e-3, (self.end_s - time.monotonic()) / 2)
        try:
            plan = search(question, allowed_s, progress)
        except DeadlineError:
            glanced = self.glance(question)
            if glanced is None:
                raise
            return replace(glanced, stopped="deadline")
        if plan.stopped == "interrupt":
            self.stopped = plan.stopped
        return plan

    def glance(self, question: Question) -> Plan | None:
        """What the planner finds at a glance, if anything; the same on every machine unless time runs out."""
        try:
            return plan_of(question, _core.quick_plan(question, self.left_s()))
        except HpgoError:  # none fits, or none was found in time
            return None

    def left_s(self) -> float | None:
        """Seconds until it is time to stop; None if it never is."""
        return None if self.end_s == float("inf") else max(1e-3, self.end_s - time.monotonic())

    def over(self) -> bool:
        """Whether to stop; `stopped` then says why."""
        if self.stopped is None and time.monotonic() >= self.end_s:
            self.stopped = "deadline"
        return self.stopped is not None
