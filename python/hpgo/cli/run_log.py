"""Log of a run: JSON lines and TensorBoard scalars of steps and validations, and a summary at the end."""

from __future__ import annotations

import time
from contextlib import ExitStack
from statistics import median_low
from typing import TYPE_CHECKING, Any

from hpgo.cli.losses import lines_to
from hpgo.errors import ArgumentError

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from hpgo.runtime.train.work import StepWork


class RunLog:
    """Log of rank 0. It does nothing without a file and a folder."""

    def __init__(self, file: str | None, folder: str | None, *, work: StepWork | None, ranks: int, done: int) -> None:
        """Open the log of a run that has `done` steps before.

        Args:
            file: file to which lines of JSON are appended, or None.
            folder: folder of TensorBoard's event files, or None.
            work: work of a step. It may be None if both are.
            ranks: number of ranks.
            done: number of steps that were run before.

        Raises ArgumentError if the file can't be opened, or if TensorBoard is not installed.
        """
        self._opened = ExitStack()
        self._add = None if file is None else self._opened.enter_context(lines_to(file))
        self._board = None if folder is None else _writer(folder, done)
        if self._board is not None:
            self._opened.callback(self._board.close)
        self._work, self._ranks = work, ranks
        self._steps_s: list[float] = []
        self._last: dict[str, Any] = {}
        self._validation: dict[str, Any] | None = None

    def step(
        self, step: int, loss: float, step_s: float, learning_rate: float | None, batch_fraction: float = 1.0
    ) -> None:
        """Add a step, counted from 1, on this fraction of a global batch."""
        self._steps_s.append(step_s)
        rates = self._rates(step_s, batch_fraction)
        self._last = {"step": step, "loss": loss, "learning_rate": learning_rate, **rates}
        self._write("step", "train", self._last)

    def validation(self, found: dict[str, Any]) -> None:
        """Add an evaluation: its `step`, the loss and the metrics."""
        self._validation = found
        self._write("validation", "validation", found)

    def finish(self, peak_memory_bytes: tuple[float, ...] | None) -> None:
        """Add the summary of the run. Its time is the median of all steps but the first."""
        if not self._steps_s:
            return
        memory = None if peak_memory_bytes is None else [int(one) for one in peak_memory_bytes]
        if self._board is not None:
            for rank, size_bytes in enumerate(memory or ()):
                self._board.add_scalar(f"peak_memory_bytes/rank-{rank}", size_bytes, self._last["step"])
        if self._add is not None:
            rates = self._rates(median_low(self._steps_s[1:] or self._steps_s))
            validation = {"validation": self._validation}
            self._add(
                {"event": "summary", **self._last, **rates, "peak_memory_bytes": memory, **validation}
                | {"ended_s": time.time()}
            )

    def _rates(self, step_s: float, batch_fraction: float = 1.0) -> dict[str, Any]:
        work = self._work
        if work is None:
            return {"step_s": step_s}
        whole_s = step_s / batch_fraction  # time of a whole batch at the rate of this step
        return {
            "step_s": step_s,
            "samples_per_s": work.samples / whole_s,
            "tokens_per_s": None if work.tokens is None else work.tokens / whole_s,
            "mfu": work.mfu(whole_s),
            "ranks": self._ranks,
        }

    def _write(self, event: str, group: str, values: dict[str, Any]) -> None:
        if self._add is not None:
            self._add({"event": event, **values, "ended_s": time.time()})
        if self._board is not None:
            for name, value in values.items():
                if name not in {"step", "ranks"} and value is not None:
                    self._board.add_scalar(f"{group}/{name}", value, values["step"])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._opened.close()


def _writer(folder: str, done: int) -> Any:
    """Return TensorBoard's writer. Scalars of later steps from an earlier run are hidden."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ArgumentError(
            f"`--tensorboard` needs the package tensorboard, which can't be imported: {error}",
            "`pip install tensorboard`, or use `--log run.jsonl`",
            code="missing_package",
        ) from error
    return SummaryWriter(folder, purge_step=done + 1)
