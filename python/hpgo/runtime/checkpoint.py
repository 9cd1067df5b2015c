"""Checkpoints: what a run has learnt, under names that no plan is part of, so that any other plan goes on from it.

A checkpoint is a folder `step-N`: files of tensors, each written by one rank, and `checkpoint.json`, which says which
file has what. It is written as `.step-N.tmp` and takes its name when all of it is on the disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hpgo.base.checks import whole
from hpgo.base.documents import make_folder, read_text
from hpgo.base.errors import HpgoError, RunError
from hpgo.base.files import MOST_BYTES_OF_RUNS, as_path, refused
from hpgo.base.wording import shorten
from hpgo.runtime.meeting import LOST, first_line, together, told
from hpgo.runtime.progress import HERE, SAVE
from hpgo.runtime.tensor_files import TensorFile, write

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from hpgo.programs.program import Program
    from hpgo.runtime.parts import Part
    from hpgo.runtime.train.gradients import Weight
    from hpgo.runtime.train.optimizer import ShardedOptimizer
    from hpgo.runtime.workload import Workload

_INDEX = "checkpoint.json"
_FORMAT, _VERSION = "hpgo.checkpoint", 1
_KEYS = {"steps", "loader", "plan", "seed", "global_batch_size", "optimizer", "layers", "files", "values", "tensors"}
_ANOTHER = "resume with the workload and the options of the run that saved it"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One that is whole."""

    path: Path
    facts: dict[str, Any]
    """What `checkpoint.json` says."""

    @property
    def steps(self) -> int:
        """Steps that had been done."""
        return int(self.facts["steps"])


def whole_ones(folder: Path) -> tuple[list[Checkpoint], list[Path]]:
    """The checkpoints in a folder, the oldest first, and those that look like one but lack something."""
    found: list[Checkpoint] = []
    torn: list[Path] = []
    for path in folder.glob("step-*") if folder.is_dir() else ():
        if path.name[5:].isdecimal():
            facts = _facts(path)
            if facts is None:
                torn.append(path)
            else:
                found.append(Checkpoint(path, facts))
    return sorted(found, key=lambda one: one.steps), sorted(torn)


def _facts(path: Path) -> dict[str, Any] | None:
    """What the index of a checkpoint says, if all that it names is there."""
    try:
        facts = json.loads(read_text(path / _INDEX, RunError, most=MOST_BYTES_OF_RUNS))
        if facts["format"] != _FORMAT or facts["version"] != _VERSION or f"step-{facts['steps']}" != path.name:
            return None
        if type(facts["steps"]) is not int or not facts.keys() >= _KEYS:
            return None
        if any((path / name).stat().st_size != size_bytes for name, size_bytes in facts["files"].items()):
            return None
    except (HpgoError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return dict(facts)


def latest(folder: str | os.PathLike[str]) -> Checkpoint | None:
    """The newest whole checkpoint, the same for all ranks, all of which must ask; None if there is none yet.

    Raises RunError if there are only damaged ones, or another rank doesn't see what rank 0 sees.
    """
    path = as_path(folder, RunError)
    try:
        found, torn = whole_ones(path)
    except OSError as failure:
        raise refused("read", path, failure, RunError, "name a folder that can be read") from None
    mine = found[-1].steps if found else None
    everyone = _meet("the search for a checkpoint", (mine, not found and torn))
    first, damaged = everyone[0]
    if damaged:
        raise RunError(
            f"`{damaged[-1]}` is damaged or of another version, and there is no other one", "name another folder"
        )
    for rank, (steps, _) in enumerate(everyone):
        if steps != first:
            seen = "no checkpoint" if steps is None else f"step {steps}"
            raise RunError(
                f"the newest in `{path}` is step {first} on rank 0, and {seen} on rank {rank}",
                "put the folder on a disk that all machines share",
            )
    return found[-1] if found else None


def _all(mine: Any, group: Any) -> list[Any]:
    """What each rank says."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def _meet(words: str, mine: Any) -> list[Any]:
    """What each rank says, asked where all of them come together."""
    with together(words):
        return _all(mine, None)


class Holdings:
    """What a rank holds of the model and its optimizer, and how it is called in checkpoints."""

    def __init__(
        self,
        program: Program,
        workload: Workload,
        *,
        parts: Mapping[int, Part],
        weights: list[Weight],
        stepper: ShardedOptimizer | None,
        seed: int | None,
    ) -> None:
        """Without a `seed`, only what layers hold is taken over, whatever run has saved it."""
        self._program, self._parts, self._layers, self._seed = program, parts, workload.layers, seed
        self._stepped = [] if stepper is None else stepper.stepped
        self._optimizer = None if stepper is None else stepper.optimizer
        self._rank = dist.get_rank()
        # Replicas write in turns, so that each has a share of the work.
        writers = {layer: one.ranks[at % len(one.ranks)] for one in program.sums for at, layer in enumerate(one.layers)}
        self._written = {layer for layer, rank in writers.items() if rank == self._rank}
        order = {layer: at for at, layer in enumerate(workload.layers)}
        tied = {name: min(names, key=lambda one: (order[one[0]], one[1])) for names in workload.ties for name in names}
        self._names = {id(weight): tied.get(weight.name, weight.name) for weight in weights}
        self._plan = hashlib.sha256(program.to_json().encode()).hexdigest()

    def facts(self) -> dict[str, Any]:
        """What the run that goes on is compared with."""
        return {
            "plan": self._plan,
            "seed": self._seed,
            "global_batch_size": None if self._seed is None else self._program.global_batch_size,
            "optimizer": None if self._optimizer is None else type(self._optimizer).__name__,
            "layers": list(self._layers),
        }

    def collect(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Copies of what this rank is to write, on the CPU, and what of it are no tensors."""
        tensors: dict[str, torch.Tensor] = {}
        values: dict[str, Any] = {}
        for part in self._parts.values():
            for layer, named in part.by_layer().items():
                if layer in self._written:
                    for name, tensor in named.items():
                        tensors.setdefault(f"layer.{layer}.{name}", _copy(tensor))
        state = {} if self._optimizer is None else self._optimizer.state
        for weight in self._stepped:
            alone = self._program.shard_optimizer and len(weight.ranks) > 1  # then nobody else steps it
            layer, name = self._names[id(weight)]
            if not alone and layer not in self._written:
                continue
            for key, value in state.get(weight.copies[0], {}).items():
                if not isinstance(key, str) or "." in key:
                    raise RunError(f"the optimizer keeps `{key}`, which a checkpoint has no name for", _ANOTHER)
                if isinstance(value, torch.Tensor):
                    tensors[f"opt.{layer}.{name}.{key}"] = _copy(value)
                elif value is None or isinstance(value, bool | int | float | str):
                    values[f"opt.{layer}.{name}.{key}"] = value
                else:
                    raise RunError(
                        f"the optimizer keeps `{key}`, of type {type(value).__name__}",
                        "checkpoints hold tensors, numbers and text: use an optimizer that keeps these",
                    )
        if self._parts:
            tensors[f"rng.{self._rank}"] = torch.get_rng_state()
            if torch.cuda.is_initialized():
                tensors[f"rng.{self._rank}.cuda"] = torch.cuda.get_rng_state()
        return tensors, values

    def load(self, source: Checkpoint) -> None:
        """Takes over what this rank holds, as it was saved. Raises RunError if that doesn't fit, with nothing taken."""
        facts, path = source.facts, source.path
        self._check_facts(source)
        with ExitStack() as opened:
            files: dict[str, TensorFile] = {}

            def file_of(key: str) -> TensorFile:
                name = facts["tensors"].get(key)
                if name is None:
                    raise RunError(f"`{path}` lacks `{shorten(key)}`", _ANOTHER)
                if name not in files:
                    files[name] = opened.enter_context(TensorFile(path / name))
                return files[name]

            wanted = [
                (f"layer.{layer}.{name}", tensor)
                for part in self._parts.values()
                for layer, named in part.by_layer().items()
                for name, tensor in named.items()
            ]
            for key, tensor in wanted:
                _check_kind(path, key, file_of(key), tensor)
            states = self._states(facts, file_of)
            for key, tensor in wanted:
                tensor.detach().copy_(file_of(key).read(key))
            if self._optimizer is not None:
                self._optimizer.state.update(states)
            key = f"rng.{self._rank}"
            if facts["plan"] == self._plan and key in facts["tensors"]:  # other plans run other passes on each rank
                torch.set_rng_state(file_of(key).read(key))
                if torch.cuda.is_initialized() and f"{key}.cuda" in facts["tensors"]:
                    torch.cuda.set_rng_state(file_of(f"{key}.cuda").read(f"{key}.cuda"))

    def _check_facts(self, source: Checkpoint) -> None:
        saved, mine, path = source.facts, self.facts(), source.path
        if saved["layers"] != mine["layers"]:
            raise RunError(f"`{path}` holds the layers of another workload", _ANOTHER)
        for what, words in (("seed", "seed"), ("global_batch_size", "global batch"), ("optimizer", "optimizer")):
            if saved[what] != mine[what] and mine[what] is not None:  # who infers has none, idle ranks no optimizer
                raise RunError(
                    f"`{path}` was saved with the {words} {saved[what]}, and this run has {mine[what]}", _ANOTHER
                )

    def _states(
        self, facts: dict[str, Any], file_of: Callable[[str], TensorFile]
    ) -> dict[torch.nn.Parameter, dict[str, Any]]:
        """The optimizer's state of each parameter that this rank steps, where the optimizer keeps it."""
        if self._optimizer is None:
            return {}
        keys: dict[str, list[str]] = {}
        for key in (*facts["tensors"], *facts["values"]):
            keys.setdefault(key.rpartition(".")[0], []).append(key)
        stays = {  # counts of steps stay on the CPU unless the optimizer counts on the device
            id(copy): not (group.get("capturable") or group.get("fused"))
            for group in self._optimizer.param_groups
            for copy in group["params"]
        }
        found: dict[torch.nn.Parameter, dict[str, Any]] = {}
        for weight in self._stepped:
            layer, name = self._names[id(weight)]
            for copy in weight.copies:
                state: dict[str, Any] = {}
                for key in keys.get(f"opt.{layer}.{name}", ()):
                    short = key.rpartition(".")[2]
                    if key in facts["values"]:
                        state[short] = facts["values"][key]
                        continue
                    tensor = file_of(key).read(key)
                    state[short] = tensor if short == "step" and stays[id(copy)] else tensor.to(copy.device)
                if state:
                    found[copy] = state
        return found


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _check_kind(path: Path, key: str, file: TensorFile, tensor: torch.Tensor) -> None:
    """Torch would convert types without a word."""
    if file.dtype(key) != tensor.dtype:
        raise RunError(
            f"`{path}` holds `{shorten(key)}` in {file.dtype(key)}, and this run has it in {tensor.dtype}",
            "resume with the `dtype` of the run that saved it",
        )
    if file.shape(key) != tuple(tensor.shape):
        raise RunError(
            f"`{path}` holds `{shorten(key)}` of shape {file.shape(key)}, and this run has {tuple(tensor.shape)}",
            _ANOTHER,
        )


def load(source: Checkpoint, holdings: Holdings) -> None:
    """Loads on all ranks; if one can't, all raise what it raised."""
    failure = None
    try:
        holdings.load(source)
    except HpgoError as error:
        failure = error.message, error.hint
    for rank, said in enumerate(_meet("the loading of a checkpoint", failure)):
        if said is not None:
            raise RunError(f"rank {rank}: {said[0]}", said[1])


class Saver:
    """Saves checkpoints of one run in a folder, beside the steps: only the copy is made while a step waits."""

    def __init__(
        self, folder: str | os.PathLike[str], steps: int, *, keep: int, tell: Callable[[str], None] | None
    ) -> None:
        """Every rank makes one. Raises RunError if the folder can't be made, or holds the steps of another run."""
        self.folder = as_path(folder, RunError)
        self._keep = whole("keep", keep, least=1)
        self._tell = _warn if tell is None else tell
        self._rank = dist.get_rank()
        self._running: threading.Thread | None = None
        self._failure: str | None = None
        self._lost: Exception | None = None
        self._rounds = 0  # of the other thread with those of the other ranks
        self._done: int | None = None
        """The last step that was saved, or that the folder has already."""
        answer: Any = None
        if self._rank == 0:
            try:
                answer = self._look(steps)
            except HpgoError as error:
                answer = error.message, error.hint
        answer = _meet("the look at the folder of checkpoints", answer)[0]
        if isinstance(answer, tuple):
            raise RunError(*answer)
        self._done = answer
        with together("the look at the folder of checkpoints"):
            self._group = dist.new_group(backend="gloo")  # of its own, for another thread

    def _look(self, steps: int) -> int | None:
        make_folder(self.folder)
        there, _ = whole_ones(self.folder)
        newest = there[-1].steps if there else None
        if newest is not None and newest > steps:
            raise RunError(
                f"`{self.folder}` holds step {newest} of another run, and this one has done {steps}",
                "resume from it, or name an empty folder",
            )
        return newest

    def save(self, steps: int, loader: dict[str, int] | None, holdings: Holdings) -> None:
        """Begins to save, if this step is not saved; waits before for a save that still runs."""
        self.finish()
        if steps == self._done:
            return
        facts = {"steps": steps, "loader": loader, **holdings.facts()}
        failure = None
        content: tuple[dict[str, torch.Tensor], dict[str, Any]] = {}, {}
        try:
            content = holdings.collect()
        except (HpgoError, RuntimeError, MemoryError) as error:
            failure = first_line(error)
        self._running = threading.Thread(target=self._save, args=(steps, facts, *content, failure), daemon=True)
        self._running.start()

    def news(self) -> None:
        """Tells on rank 0 of a save that has failed, if one has by now."""
        if self._running is not None and not self._running.is_alive():
            self.finish()

    def finish(self) -> None:
        """Waits for a save that still runs."""
        if self._running is not None:
            with HERE.waiting(SAVE):
                self._running.join()
            self._running = None
        if self._lost is not None:
            lost, self._lost = self._lost, None
            with told("the ranks don't come together to save", LOST):
                raise lost
        failure, self._failure = self._failure, None
        if failure is not None and self._rank == 0:
            self._tell(failure)

    def close(self) -> None:
        """Gives the group back."""
        dist.destroy_process_group(self._group)

    def _save(
        self,
        steps: int,
        facts: dict[str, Any],
        tensors: dict[str, torch.Tensor],
        values: dict[str, Any],
        failure: str | None,
    ) -> None:
        """In the other thread, on all ranks at once: each step of it waits for all ranks."""
        self._rounds += 1
        HERE.saves, HERE.save = f"it saves step {steps}", (self._rounds, False)
        try:
            failure = self._save_together(steps, facts, tensors, values, failure)
        except Exception as error:  # noqa: BLE001 -- another rank was lost: the main thread says so
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
        """What went wrong, the same on all ranks; None if all is on the disk."""
        beside = self.folder / f".step-{steps}.tmp"
        if self._rank == 0 and failure is None:
            failure = _said(lambda: self._make_room(beside))
        failure = self._first(failure)
        name, size_bytes = f"rank-{self._rank}.safetensors", 0
        if failure is None:
            if tensors:

                def write_mine() -> None:
                    nonlocal size_bytes
                    size_bytes = write(beside / name, tensors)

                failure = _said(write_mine)
            failure = self._first(failure)
        if failure is None:
            everyone = self._everyones((name, size_bytes, list(tensors), values, facts["optimizer"]))
            if self._rank == 0:
                failure = _said(lambda: self._commit(beside, facts, everyone))
            failure = self._first(failure)
        if failure is not None and self._rank == 0:
            shutil.rmtree(beside, ignore_errors=True)
        return failure

    def _first(self, failure: str | None) -> str | None:
        """What went wrong on the first rank on which something did."""
        said = enumerate(self._everyones(failure))
        return next((f"rank {rank}: {one}" for rank, one in said if one is not None), None)

    def _everyones(self, mine: Any) -> list[Any]:
        """What each rank says in its save."""
        HERE.save = self._rounds, True
        found = _all(mine, self._group)
        self._rounds += 1
        HERE.save = self._rounds, False
        return found

    def _make_room(self, beside: Path) -> None:
        """Removes what saves that were broken off have left, and makes the folder to write to."""
        for left in self.folder.glob(".step-*.tmp"):
            shutil.rmtree(left, ignore_errors=True)
        make_folder(beside)

    def _commit(self, beside: Path, facts: dict[str, Any], everyone: list[Any]) -> None:
        """Writes the index, gives the folder its name, and removes the oldest ones."""
        files: dict[str, int] = {}
        places: dict[str, str] = {}
        values: dict[str, Any] = {}
        for name, size_bytes, keys, its_values, optimizer in everyone:
            if not keys:
                continue
            files[name] = size_bytes
            if not (beside / name).is_file():
                raise RunError(f"rank 0 doesn't see `{beside / name}`", "name a folder that all machines share")
            for key in (*keys, *its_values):
                if key in places or key in values:
                    raise RunError(f"two tensors are called `{shorten(key)}`", "rename a layer")
                if key in its_values:
                    values[key] = its_values[key]
                else:
                    places[key] = name
            facts["optimizer"] = facts["optimizer"] or optimizer
        index = {"format": _FORMAT, "version": _VERSION, **facts, "files": files, "values": values, "tensors": places}
        path = self.folder / beside.name[1:].removesuffix(".tmp")
        try:
            with (beside / _INDEX).open("wb") as file:
                file.write(json.dumps(index, indent=1).encode())
                file.flush()
                os.fsync(file.fileno())
            _to_disk(beside)
            if path.exists():  # a damaged one: whole ones are not saved again
                shutil.rmtree(path)
            beside.rename(path)
            _to_disk(self.folder)
        except OSError as failure:
            raise refused("write", path, failure, RunError, "make room, or name another folder") from None
        for old in whole_ones(self.folder)[0][: -self._keep]:
            gone = self.folder / f".{old.path.name}.tmp"  # in one step, so that no half of it is found
            shutil.rmtree(old.path.rename(gone), ignore_errors=True)


def _to_disk(folder: Path) -> None:
    """The names in a folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _said(work: Callable[[], None]) -> str | None:
    """What went wrong in `work`, in words."""
    try:
        work()
    except (HpgoError, OSError) as error:
        return first_line(error)
    except BaseException as error:  # noqa: BLE001 -- whatever it is, the other ranks wait to hear of it
        return f"{type(error).__name__}: {first_line(error)}"
    return None


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=4)
