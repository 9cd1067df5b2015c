"""Base of the training and inference pipelines: a rank joins the others, builds its stages, and leaves."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hpgo.base.checks import check_flag, check_int, check_is
from hpgo.errors import HpgoError, RunError
from hpgo.programs.schedule import KINDS
from hpgo.runtime import guards
from hpgo.runtime.checkpoint import latest, load
from hpgo.runtime.clocks import RankClock, Stamps
from hpgo.runtime.devices import check_types, device_of_rank
from hpgo.runtime.failure_detection import Limits, LostRankError
from hpgo.runtime.heap import keep_freed
from hpgo.runtime.passes import MAX_SEED
from hpgo.runtime.preemption import Preempted
from hpgo.runtime.progress import HERE
from hpgo.runtime.recorder import Recorder
from hpgo.runtime.rendezvous import LOST, agree, check_place, first_line, is_of_others
from hpgo.runtime.runnable import with_layers
from hpgo.runtime.session import NeighbourGroups, RankSession
from hpgo.runtime.workload import Workload

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager
    from types import TracebackType
    from typing import Self

    from hpgo.runtime.checkpoint import Checkpoint, RankState
    from hpgo.runtime.messages import PassedTensor
    from hpgo.runtime.runnable import Runnable
    from hpgo.runtime.stage_module import StageModule
    from hpgo.timing.timeline import Timeline


@dataclass(frozen=True, slots=True)
class RankOptions:
    """Options of a rank for training and inference. All ranks have the same."""

    seed: int
    dtype: torch.dtype | None
    autocast: torch.dtype | None
    device: torch.device
    limits: Limits
    find_nan: bool
    shared_memory: bool

    @classmethod
    def from_arguments(
        cls,
        *,
        seed: int,
        dtype: torch.dtype | None,
        autocast: torch.dtype | None,
        device: torch.device | str | None,
        timeout_s: float,
        silence_s: float,
        grace_s: float,
        find_nan: bool,
        shared_memory: bool,
    ) -> RankOptions:
        """Check the arguments of `Pipeline` and `InferencePipeline` and find the device. Raise ArgumentError."""
        found = device_of_rank(device)
        seed = check_int("seed", seed, minimum=0, maximum=MAX_SEED)
        limits = Limits(timeout_s, silence_s, grace_s)
        check_types(dtype, autocast)
        check_flag("find_nan", find_nan)
        check_flag("shared_memory", shared_memory)
        return cls(seed, dtype, autocast, found, limits, find_nan, shared_memory)

    def cast(self) -> AbstractContextManager[Any]:
        """Return the autocast context in which layers compute; a null context without autocast."""
        return nullcontext() if self.autocast is None else torch.autocast(self.device.type, dtype=self.autocast)


class RankPipeline(ABC):
    """Stages of one rank, and its session among the other ranks.

    A subclass returns in `_kind` and `_facts` what ranks must agree on, and builds its stages in `_build`.
    """

    _state: RankState
    parts: dict[int, StageModule]
    """Layers that this rank holds, by stage."""

    def __init__(self, runnable: Runnable, workload: Workload | str, options: RankOptions) -> None:
        self.program, self.device, self._options = runnable.program, options.device, options
        self._failed = False
        self.preempted = False
        """Whether SIGTERM has asked a rank to end; the same on all ranks."""
        if self.device.type == "cpu":
            keep_freed()
        # Before joining: a wrong number of ranks would otherwise only show as a timeout.
        check_place(self.program)
        self._session = RankSession(options.limits)
        try:
            self._session.join(self.program, self.device)
            self._read(runnable, workload)
            self._agree()
            self._stamps = Stamps(self.device)
            self._build(runnable)
            self._recorder = Recorder(self.program, RankClock(self.device))
            self.steps = 0
            """Number of steps done, or of streams for inference."""
            self._notice = guards.notice()
            if self._notice is not None:
                self._notice.has_steps = True
            HERE.does("the time before the first step")
        # The other ranks may wait for this one already, so tell them that it ends.
        except BaseException as error:
            self._fail(error)
            self.close()
            raise

    def _read(self, runnable: Runnable, workload: Workload | str) -> None:
        """Read the workload, and name the layers of a plan that only counts them."""
        read = Workload.read(workload, seed=self._options.seed) if isinstance(workload, str) else workload
        check_is("workload", read, Workload, "give a Workload, or a name such as `gpt:layers=2`")
        if not runnable.names_layers:
            # A plan of `hpgo partition` only counts layers. The number shows which unit of layers it means.
            read = read.counting(int(self.program.stages[-1].layers[-1]))
            self.program = with_layers(self.program, read.layers)
        self.mine = self.program.for_rank(dist.get_rank())
        chain = self.program.stages[: self.program.schedule.stages_per_pipeline]
        self.workload = read.holding([layer for stage in chain for layer in stage.layers])

    def _agree(self) -> None:
        options, workload = self._options, self.workload
        agree(
            {
                "kind of run": self._kind(),
                # A hash, because a plan of many ranks is long and every rank sends its facts to all others.
                "plan": hashlib.sha256(self.program.to_json().encode()).hexdigest()[:12],
                "workload": hashlib.sha256(repr((workload.layers, workload.tied_weights)).encode()).hexdigest()[:12],
                "kind of device": self.device.type,
                "seed": str(options.seed),
                "find_nan": str(options.find_nan),
                "use of shared memory": str(options.shared_memory),
                "dtype": f"{options.dtype}, autocast {options.autocast}",
                **self._facts(),
            }
        )

    @abstractmethod
    def _kind(self) -> str:
        """Return what the ranks do, which differs between the subclasses."""

    def _facts(self) -> dict[str, str]:
        """Return the subclass's own options that ranks must agree on."""
        return {}

    @abstractmethod
    def _build(self, runnable: Runnable) -> None:
        """Build the stages of this rank; the ranks have agreed on what they run."""

    def _stage_modules(self, held: set[int], *, chains: int | None = None) -> list[StageModule]:
        """Return the modules of all stages of the first `chains` chains, or of all; only `held` ones take memory."""
        program, length = self.program, self.program.schedule.stages_per_pipeline
        # Only schedules with W passes split backward passes. All others keep torch's own layers.
        splits = any(KINDS[kind] == "W" for kind in set(program.schedule.actions[:, 0].tolist()))
        found: list[StageModule] = []
        for begin in range(0, length * chains if chains else len(program.stages), length):
            layers = [stage.layers for stage in program.stages[begin : begin + length]]
            # Of stages on other ranks, only the shapes at their cuts are needed.
            only = {stage - begin for stage in held if begin <= stage < begin + length}
            found += self.workload.parts(
                layers, dtype=self._options.dtype, seed=self._options.seed, only=only, split_backward=splits
            )
        return found

    def _neighbour_groups(self, cuts: Sequence[Sequence[PassedTensor]]) -> NeighbourGroups:
        """Return what carries the tensors that cross `cuts`."""
        options = self._options
        groups = NeighbourGroups(
            self.device, options.limits.patience_s, shared_memory=options.shared_memory and any(cuts)
        )
        self._session.hold(groups)
        return groups

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return self.mine.rank

    def timeline(self, step: int | None = None) -> Timeline:
        """Return the last step as the ranks ran it, or one of the last 100 by its number from 0.

        All ranks must call it.

        Rows are ranks. All times are by the clock of rank 0, corrected for the offsets of other nodes' clocks. Raises
        ArgumentError for a step that is not recorded, and RunError if another rank is lost.
        """
        return self._recorder.timeline(self.steps - 1 if step is None else step)

    def usual_step(self) -> int:
        """Return the step of median length on rank 0, of the last 100 without the first of them.

        All ranks must call it.

        Raises ArgumentError before the first step, and RunError if another rank is lost.
        """
        return self._recorder.usual_step()

    def _load(self, folder: str | os.PathLike[str]) -> Checkpoint | None:
        """Load the newest checkpoint in `folder`. Return None if there is none."""
        found = latest(folder)
        if found is not None:
            load(found, self._state)
        return found

    def _check_whole(self) -> None:
        """Raise Preempted if the run was asked to end, and RunError if it has failed."""
        if self.preempted:
            raise Preempted
        if self._failed:
            raise RunError(
                "a step of this run has failed, so its state is incomplete",
                f"create another {type(self).__name__}",
                code="wrong_state",
            )

    def close(self) -> None:
        """Leave the other ranks."""
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if value is not None and not isinstance(value, Preempted):
            self._fail(value)
        self.close()

    def _fail(self, error: BaseException) -> None:
        """Report an error to the other ranks. They may be gone, so nothing more is saved with them."""
        self._failed = True
        guards.charge(error)
        if self._session.guards and not isinstance(error, SystemExit):
            # Python prints the error when this process ends by it. Claim the report, so that no other rank repeats it.
            guards.is_first_to_tell()


@contextmanager
def naming_rank(hint: str) -> Iterator[None]:
    """Add the rank and its action to errors within this context. `hint` is for errors that are not hpgo's."""
    try:
        yield
    except HpgoError as failure:
        raise failure.reworded(f"{HERE}: {failure.message}") from failure
    except Exception as failure:
        message = f"{HERE}: {type(failure).__name__}: {first_line(failure)}"
        if is_of_others(failure):
            raise guards.lost() or LostRankError(message, LOST) from failure
        raise RunError(message, hint) from failure
