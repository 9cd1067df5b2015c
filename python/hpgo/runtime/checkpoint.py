"""Checkpoints: what a run has learnt, under names that no plan is part of, so that any other plan goes on from it.

A checkpoint is a folder `step-N`: files of tensors, each written by one rank, and `checkpoint.json`, which says which
file has what. It is written as `.step-N.tmp` and takes its name when all of it is on the disk.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hpgo.base.documents import read_text
from hpgo.base.files import MOST_BYTES_OF_RUNS, as_path, refused
from hpgo.base.messages import shorten
from hpgo.errors import HpgoError, RunError
from hpgo.runtime.rendezvous import together
from hpgo.runtime.tensor_files import TensorFile

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from hpgo.programs.program import Program
    from hpgo.runtime.stage_module import StageModule
    from hpgo.runtime.train.gradients import Weight
    from hpgo.runtime.train.optimizer import ShardedOptimizer
    from hpgo.runtime.workload import Workload


INDEX = "checkpoint.json"
FORMAT, VERSION = "hpgo.checkpoint", 1
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
        facts = json.loads(read_text(path / INDEX, RunError, most=MOST_BYTES_OF_RUNS))
        if facts["format"] != FORMAT or facts["version"] != VERSION or f"step-{facts['steps']}" != path.name:
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
    everyone = gather_at("the search for a checkpoint", (mine, not found and torn))
    first, damaged = everyone[0]
    if damaged:
        raise RunError(
            f"`{damaged[-1]}` is damaged or of another version, and there is no other one",
            "name another folder",
            code="damaged_file",
        )
    for rank, (steps, _) in enumerate(everyone):
        if steps != first:
            seen = "no checkpoint" if steps is None else f"step {steps}"
            raise RunError(
                f"the newest in `{path}` is step {first} on rank 0, and {seen} on rank {rank}",
                "put the folder on a disk that all machines share",
            )
    return found[-1] if found else None


def gather_all(mine: Any, group: Any) -> list[Any]:
    """What each rank says."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def gather_at(words: str, mine: Any) -> list[Any]:
    """What each rank says, asked where all of them come together."""
    with together(words):
        return gather_all(mine, None)


class RankState:
    """What a rank holds of the model and its optimizer, and how it is called in checkpoints."""

    def __init__(
        self,
        program: Program,
        workload: Workload,
        *,
        parts: Mapping[int, StageModule],
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
                    raise RunError(f"`{path}` lacks `{shorten(key)}`", _ANOTHER, code="missing")
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
            raise RunError(f"`{path}` holds the layers of another workload", _ANOTHER, code="mismatch")
        for what, words in (("seed", "seed"), ("global_batch_size", "global batch"), ("optimizer", "optimizer")):
            if saved[what] != mine[what] and mine[what] is not None:  # who infers has none, idle ranks no optimizer
                raise RunError(
                    f"`{path}` was saved with the {words} {saved[what]}, and this run has {mine[what]}",
                    _ANOTHER,
                    code="mismatch",
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
            code="mismatch",
        )
    if file.shape(key) != tuple(tensor.shape):
        raise RunError(
            f"`{path}` holds `{shorten(key)}` of shape {file.shape(key)}, and this run has {tuple(tensor.shape)}",
            _ANOTHER,
            code="mismatch",
        )


def load(source: Checkpoint, state: RankState) -> None:
    """Loads on all ranks; if one can't, all raise what it raised."""
    failure = None
    try:
        state.load(source)
    except HpgoError as error:
        failure = error.message, error.hint
    for rank, said in enumerate(gather_at("the loading of a checkpoint", failure)):
        if said is not None:
            raise RunError(f"rank {rank}: {said[0]}", said[1])
