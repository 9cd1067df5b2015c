"""Recorder of a rank's last steps, from which all ranks assemble timelines."""

from __future__ import annotations

from array import array
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.distributed as dist

from hpgo.base.checks import check_int
from hpgo.errors import ArgumentError
from hpgo.runtime.measured import Record, timeline_of
from hpgo.runtime.progress import HERE
from hpgo.runtime.rendezvous import LOST, translate_errors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpgo.programs.program import Program
    from hpgo.runtime.clocks import RankClock
    from hpgo.timing.timeline import Timeline

_REMEMBERED = 100
"""Number of steps that are kept."""
_NOT_GATHERED = ("the recorded steps can't be gathered", "call it on every rank, while all of them run")


class Recorder:
    """Recorder of one rank. All ranks create theirs together."""

    def __init__(self, program: Program, clock: RankClock, *, scale: float = 1.0) -> None:
        """Compare clocks with the other ranks. Times of timelines are the recorded ones divided by `scale`."""
        self._program, self._clock, self._scale = program, clock, scale
        self._steps: deque[tuple[int, array[int], int | None, Program]] = deque(maxlen=_REMEMBERED)
        with translate_errors("not all ranks reached the comparison of clocks", LOST):
            clock.compare()

    def add(self, step: int, stamps_ns: Sequence[int], peak_bytes: int | None, program: Program | None = None) -> None:
        """Keep a step: start and end of each action, then the step's start, the end of its reductions, and its end.

        `program` is the program of this step, if it was another one.
        """
        # An array of integers takes 8 bytes per stamp, a list of Python integers about 40.
        self._steps.append((step, array("q", stamps_ns), peak_bytes, program or self._program))

    def timeline(self, step: int) -> Timeline:
        """Return the timeline of a step as the ranks ran it.

        All ranks must call it, and each gets the whole timeline.

        Raises ArgumentError for a step that is not recorded, and RunError if another rank is lost.
        """
        known = {number: (ns, peak_bytes, program) for number, ns, peak_bytes, program in self._steps}
        if not known or check_int("step", step, minimum=0) not in known:
            has = f"steps {min(known)} to {max(known)} are" if known else "no step is"
            raise ArgumentError(
                f"step {step} is not recorded: {has}",
                f"ask for one of the last {_REMEMBERED} steps, after it was run",
                code="wrong_state",
            )
        ns, peak_bytes, program = known[step]
        everyone: list[Any] = [None] * self._program.world_size
        with translate_errors(*_NOT_GATHERED):
            # A second comparison now, so that the drift of the clocks since the start can be interpolated.
            self._clock.compare()
            *actions_ns, begin_ns, summed_ns, end_ns = (self._clock.by_rank_0(one) / self._scale for one in ns)
            mine = Record(np.array(actions_ns, np.float64).reshape(-1, 2), begin_ns, summed_ns, end_ns, peak_bytes)
            with HERE.meets("the gathering of recorded steps"):
                dist.all_gather_object(everyone, mine)
        return timeline_of(program, everyone)

    def usual_step(self) -> int:
        """Return the step of median length on rank 0, of those kept without the first. All ranks must call it.

        Raises ArgumentError before the first step, and RunError if another rank is lost.
        """
        later = sorted((ns[-1] - ns[-3], step) for step, ns, _, _ in list(self._steps)[1:] or self._steps)
        if not later:
            raise ArgumentError("no step has been run", "run a step first", code="wrong_state")
        # Rank 0 chooses for all: the median step may differ between ranks, but a timeline needs the same one.
        chosen = [later[(len(later) - 1) // 2][1]]
        with translate_errors(*_NOT_GATHERED), HERE.meets("the choice of a step"):
            dist.broadcast_object_list(chosen, src=0)
        return chosen[0]
