"""Asynchronous checkpoints: a second thread writes them, so that steps only wait for the copy of tensors."""

from __future__ import annotations

import json
import os
import shutil
import threading
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hpgo.base.checks import check_int
from hpgo.base.documents import make_folder
from hpgo.base.files import as_path, refused
from hpgo.base.messages import shorten
from hpgo.errors import HpgoError, RunError
from hpgo.runtime.checkpoint import (
    FORMAT,
    INDEX,
    VERSION,
    RankState,
    gather_all,
    gather_at,
    index_checksum,
    merge_param_groups,
    whole_ones,
)
from hpgo.runtime.progress import HERE, SAVE
from hpgo.runtime.rendezvous import LOST, first_line, together, translate_errors
from hpgo.runtime.tensor_files import checksum, write

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Saver:
    """Writer of one run's checkpoints in a folder. A step waits only for the copy of tensors, not for the disk."""

    def __init__(
        self, folder: str | os.PathLike[str], steps: int, *, keep: int, tell: Callable[[str], None] | None
    ) -> None:
        """Create a saver on every rank.

        Raises RunError if the folder can't be created, or holds later steps of another run.
        """
        self.folder = as_path(folder, RunError)
        self._keep = check_int("keep", keep, minimum=1)
        self._tell = _warn if tell is None else tell
        self._rank = dist.get_rank()
        self._running: threading.Thread | None = None
        self._failure: str | None = None
        self._lost: Exception | None = None
        self._rounds = 0  # collectives that the second thread has completed
        self._done: int | None = None
        """Last step that was saved, or that the folder already has."""
        answer: Any = None
        # Rank 0 looks into the folder for all ranks, so that all of them come to the same decision.
        if self._rank == 0:
            try:
                answer = self._look(steps)
            except HpgoError as error:
                answer = error.message, error.hint
        answer = gather_at("the look at the folder of checkpoints", answer)[0]
        if isinstance(answer, tuple):
            raise RunError(*answer)
        self._done = answer
        with together("the look at the folder of checkpoints"):
            self._group = dist.new_group(backend="gloo")  # separate, since collectives of two threads must not mix

    def _look(self, steps: int) -> int | None:
        make_folder(self.folder)
        there, _ = whole_ones(self.folder)
        newest = there[-1].steps if there else None
        if newest is not None and newest > steps:
            raise RunError(
                f"`{self.folder}` holds step {newest} of another run, but this run has done {steps}",
                "resume from it, or name an empty folder",
                code="mismatch",
            )
        return newest

    def save(self, steps: int, loader: dict[str, int] | None, state: RankState) -> None:
        """Start a save of this step unless it is saved already. Wait for a save that still runs."""
        self.finish()
        if steps == self._done:
            return
        facts = {"steps": steps, "loader": loader, **state.facts(), **state.model_facts()}
        failure = None
        content: tuple[dict[str, torch.Tensor], dict[str, Any]] = {}, {}
        # Copy now, because the next step changes the tensors. An error is passed to the thread, so that all ranks learn
        # of it.
        try:
            content = state.collect()
        except (HpgoError, RuntimeError, MemoryError) as error:
            failure = first_line(error)
        self._running = threading.Thread(target=self._save, args=(steps, facts, *content, failure), daemon=True)
        self._running.start()

    def news(self) -> None:
        """Report a failed save on rank 0, if a save has ended since the last call."""
        if self._running is not None and not self._running.is_alive():
            self.finish()

    def finish(self) -> None:
        """Wait for a save that still runs, and report its failure."""
        if self._running is not None:
            with HERE.waiting(SAVE):
                self._running.join()
            self._running = None
        if self._lost is not None:
            lost, self._lost = self._lost, None
            with translate_errors("the ranks don't come together to save", LOST):
                raise lost
        failure, self._failure = self._failure, None
        if failure is not None and self._rank == 0:
            self._tell(failure)

    def close(self) -> None:
        """Destroy the process group of the second thread."""
        dist.destroy_process_group(self._group)

    def _save(
        self,
        steps: int,
        facts: dict[str, Any],
        tensors: dict[str, torch.Tensor],
        values: dict[str, Any],
        failure: str | None,
    ) -> None:
        """Save in the second thread. All ranks do this together, since each phase waits for all ranks."""
        self._rounds += 1
        HERE.saves, HERE.save = f"it saves step {steps}", (self._rounds, False)
        try:
            failure = self._save_together(steps, facts, tensors, values, failure)
        except Exception as error:  # noqa: BLE001 -- another rank was lost, which the main thread reports
            self._lost = error
            return
        finally:
            HERE.saves, HERE.save = "", None
        if failure is None:
            self._done = steps
        else:
            rest = f"; the last good one is of step {self._done}" if self._done is not None else ""
            self._failure = f"no checkpoint of step {steps} was written, and the run goes on: {failure}{rest}"

    def _save_together(
        self,
        steps: int,
        facts: dict[str, Any],
        tensors: dict[str, torch.Tensor],
        values: dict[str, Any],
        failure: str | None,
    ) -> str | None:
        """Write this rank's file and, on rank 0, the index. Return the same failure on all ranks, or None."""
        # Write to a temporary folder. A checkpoint becomes visible only by the rename in `_commit`.
        beside = self.folder / f".step-{steps}.tmp"
        if self._rank == 0 and failure is None:
            failure = _failure_of(lambda: self._prepare(beside))
        failure = self._first(failure)
        name, size_bytes = f"rank-{self._rank}.safetensors", 0
        checksums: dict[str, int] = {}
        if failure is None:
            if tensors:

                def write_mine() -> None:
                    nonlocal size_bytes
                    # Before the file is written, so that they show damage on the way to the disk, too.
                    checksums.update({key: checksum(tensor) for key, tensor in tensors.items()})
                    size_bytes = write(beside / name, tensors)

                failure = _failure_of(write_mine)
            failure = self._first(failure)
        if failure is None:
            optimizer = facts["optimizer"], facts["param_groups"]
            everyone = self._everyones((name, size_bytes, checksums, values, optimizer))
            if self._rank == 0:
                failure = _failure_of(lambda: self._commit(beside, facts, everyone))
            failure = self._first(failure)
        # Remove the partial files, since the reason of the failure may be a full disk.
        if failure is not None and self._rank == 0:
            shutil.rmtree(beside, ignore_errors=True)
        return failure

    def _first(self, failure: str | None) -> str | None:
        """Return the failure of the first rank that has one, or None."""
        failures = enumerate(self._everyones(failure))
        return next((f"rank {rank}: {one}" for rank, one in failures if one is not None), None)

    def _everyones(self, mine: Any) -> list[Any]:
        """Gather a value of each rank of this save."""
        HERE.save = self._rounds, True
        found = gather_all(mine, self._group)
        self._rounds += 1
        HERE.save = self._rounds, False
        return found

    def _prepare(self, beside: Path) -> None:
        """Delete the remains of interrupted saves, and create the folder to write to."""
        for left in self.folder.glob(".step-*.tmp"):
            shutil.rmtree(left, ignore_errors=True)
        make_folder(beside)

    def _commit(self, beside: Path, facts: dict[str, Any], everyone: list[Any]) -> None:
        """Write the index, rename the folder to its final name, and delete the oldest checkpoints."""
        files: dict[str, int] = {}
        places: dict[str, str] = {}
        values: dict[str, Any] = {}
        checksums: dict[str, int] = {}
        facts["param_groups"] = merge_param_groups([groups for *_, (_, groups) in everyone])
        for name, size_bytes, keys, its_values, (optimizer, _) in everyone:
            if not keys:
                continue
            files[name] = size_bytes
            # Each rank has written its file. If rank 0 can't see it, the folder is not shared between nodes.
            if not (beside / name).is_file():
                raise RunError(f"rank 0 doesn't see `{beside / name}`", "name a folder that all nodes share")
            for key in (*keys, *its_values):
                if key in places or key in values:
                    raise RunError(f"two tensors are called `{shorten(key)}`", "rename a layer", code="duplicate")
                if key in its_values:
                    values[key] = its_values[key]
                else:
                    places[key] = name
            checksums |= keys
            facts["optimizer"] = facts["optimizer"] or optimizer
        index = {"format": FORMAT, "version": VERSION, **facts, "files": files, "values": values, "tensors": places}
        index["checksums"] = checksums
        index["checksum"] = index_checksum(index)
        path = self.folder / beside.name[1:].removesuffix(".tmp")
        try:
            # Flush file and folder to the disk before the rename. After a crash, the final name then never stands for
            # an incomplete checkpoint.
            with (beside / INDEX).open("wb") as file:
                file.write(json.dumps(index, indent=1).encode())
                file.flush()
                os.fsync(file.fileno())
            _to_disk(beside)
            if path.exists():  # damaged, since complete checkpoints are not saved again
                shutil.rmtree(path)
            beside.rename(path)
            _to_disk(self.folder)
        except OSError as failure:
            raise refused("write", path, failure, RunError, "delete files there, or name another folder") from None
        for old in whole_ones(self.folder)[0][: -self._keep]:
            gone = (
                self.folder / f".{old.path.name}.tmp"
            )  # rename first, so that a partly deleted checkpoint is never found
            shutil.rmtree(old.path.rename(gone), ignore_errors=True)


def _to_disk(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _failure_of(work: Callable[[], None]) -> str | None:
    """Run `work`, and return its failure as text, or None."""
    try:
        work()
    except (HpgoError, OSError) as error:
        return first_line(error)
    except BaseException as error:  # noqa: BLE001 -- any failure must reach the other ranks, which wait for it
        return f"{type(error).__name__}: {first_line(error)}"
    return None


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=4)
