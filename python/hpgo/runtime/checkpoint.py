"""Checkpoints: the state of a run under names that do not depend on the plan, so that any other plan can resume it.

A checkpoint is a folder `step-N`. It holds files of tensors, each written by one rank, and `checkpoint.json`, which
maps each tensor to its file. It is written as `.step-N.tmp` and gets its final name once everything is on the disk.
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
from hpgo.base.files import MAX_BYTES_OF_RUNS, as_path, refused
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
    """A complete checkpoint on the disk."""

    path: Path
    facts: dict[str, Any]
    """Content of `checkpoint.json`."""

    @property
    def steps(self) -> int:
        """Number of steps done before the checkpoint was written."""
        return int(self.facts["steps"])


def whole_ones(folder: Path) -> tuple[list[Checkpoint], list[Path]]:
    """Return the complete checkpoints in a folder, oldest first, and the paths of incomplete ones."""
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
    """Return the content of a checkpoint's index, or None unless all the files that it lists have their full size."""
    try:
        facts = json.loads(read_text(path / INDEX, RunError, maximum=MAX_BYTES_OF_RUNS))
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
    """Return the newest complete checkpoint, the same on all ranks, or None if there is none yet.

    All ranks must call it.

    Raises RunError if all checkpoints are damaged, or if a rank sees another newest checkpoint than rank 0.
    """
    path = as_path(folder, RunError)
    try:
        found, torn = whole_ones(path)
    except OSError as failure:
        raise refused("read", path, failure, RunError, "name a folder that can be read") from None
    # A shared file system may show files to ranks at different times. Ranks that resumed from different steps would
    # train a mixed model without an error, so compare first.
    mine = found[-1].steps if found else None
    everyone = gather_at("the search for a checkpoint", (mine, not found and torn))
    first, damaged = everyone[0]
    if damaged:
        raise RunError(
            f"`{damaged[-1]}` is damaged or has another version, and the folder has no other checkpoint",
            "name another folder",
            code="damaged_file",
        )
    for rank, (steps, _) in enumerate(everyone):
        if steps != first:
            seen = "no checkpoint" if steps is None else f"step {steps}"
            raise RunError(
                f"the newest checkpoint in `{path}` is step {first} on rank 0, but {seen} on rank {rank}",
                "put the folder on a disk that all nodes share",
            )
    return found[-1] if found else None


def gather_all(value: Any, group: Any) -> list[Any]:
    """Return the objects of all ranks, in the order of ranks."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value, group=group)
    return everyone


def gather_at(words: str, value: Any) -> list[Any]:
    """Return the objects of all ranks, as a collective step that progress reports call `words`."""
    with together(words):
        return gather_all(value, None)


class RankState:
    """State of the model and the optimizer on one rank, with its names in checkpoints."""

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
        """Name the tensors of this rank.

        Without a `seed`, as for inference, `load` reads only what layers hold, from any run.
        """
        self._program, self._parts, self._layers, self._seed = program, parts, workload.layers, seed
        self._stepped = [] if stepper is None else stepper.stepped
        self._optimizer = None if stepper is None else stepper.optimizer
        self._rank = dist.get_rank()
        # The replicas of a stage hold the same layers. Assign the layers to them in rotation, so that each writes some.
        writers = {layer: one.ranks[at % len(one.ranks)] for one in program.sums for at, layer in enumerate(one.layers)}
        self._written = {layer for layer, rank in writers.items() if rank == self._rank}
        order = {layer: at for at, layer in enumerate(workload.layers)}
        # A tied weight is one tensor under several names. Save its optimizer state once, under its first layer's name.
        tied = {
            name: min(names, key=lambda one: (order[one[0]], one[1]))
            for names in workload.tied_weights
            for name in names
        }
        self._names = {id(weight): tied.get(weight.name, weight.name) for weight in weights}
        self._plan = hashlib.sha256(program.to_json().encode()).hexdigest()

    def facts(self) -> dict[str, Any]:
        """Return the properties of the run that a checkpoint stores and that a resumed run is compared with."""
        return {
            "plan": self._plan,
            "seed": self._seed,
            "global_batch_size": None if self._seed is None else self._program.global_batch_size,
            "optimizer": None if self._optimizer is None else type(self._optimizer).__name__,
            "layers": list(self._layers),
        }

    def collect(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return CPU copies of the tensors that this rank writes, and the optimizer state that is no tensor.

        Raises RunError if the optimizer keeps state that a checkpoint can't hold.
        """
        tensors: dict[str, torch.Tensor] = {}
        values: dict[str, Any] = {}
        for part in self._parts.values():
            for layer, named in part.by_layer().items():
                if layer in self._written:
                    for name, tensor in named.items():
                        tensors.setdefault(f"layer.{layer}.{name}", _copy(tensor))
        state = {} if self._optimizer is None else self._optimizer.state
        for weight in self._stepped:
            # With a sharded optimizer only this rank has the state of the weight, so it writes it. Otherwise the
            # replica that writes the layer does.
            alone = self._program.shard_optimizer and len(weight.ranks) > 1
            layer, name = self._names[id(weight)]
            if not alone and layer not in self._written:
                continue
            for key, value in state.get(weight.copies[0], {}).items():
                if not isinstance(key, str) or "." in key:
                    raise RunError(
                        f"the optimizer keeps `{key}`, but names in a checkpoint are text without dots", _ANOTHER
                    )
                if isinstance(value, torch.Tensor):
                    tensors[f"opt.{layer}.{name}.{key}"] = _copy(value)
                elif value is None or isinstance(value, bool | int | float | str):
                    values[f"opt.{layer}.{name}.{key}"] = value
                else:
                    raise RunError(
                        f"the optimizer keeps `{key}` of type {type(value).__name__}, but checkpoints hold"
                        " tensors, numbers and text",
                        "use an optimizer that keeps tensors, numbers and text",
                    )
        if self._parts:
            tensors[f"rng.{self._rank}"] = torch.get_rng_state()
            if torch.cuda.is_initialized():
                tensors[f"rng.{self._rank}.cuda"] = torch.cuda.get_rng_state()
        return tensors, values

    def load(self, source: Checkpoint) -> None:
        """Load the saved state that this rank holds. Raises RunError, before any change, if it does not fit."""
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
            # Read and check everything before the first copy, so that a checkpoint that does not fit leaves the state
            # unchanged.
            states = self._states(facts, file_of)
            for key, tensor in wanted:
                tensor.detach().copy_(file_of(key).read(key))
            if self._optimizer is not None:
                self._optimizer.state.update(states)
            key = f"rng.{self._rank}"
            # Under another plan, each rank runs other passes, so the saved generator states have no meaning there.
            if facts["plan"] == self._plan and key in facts["tensors"]:
                torch.set_rng_state(file_of(key).read(key))
                if torch.cuda.is_initialized() and f"{key}.cuda" in facts["tensors"]:
                    torch.cuda.set_rng_state(file_of(f"{key}.cuda").read(f"{key}.cuda"))

    def _check_facts(self, source: Checkpoint) -> None:
        saved, mine, path = source.facts, self.facts(), source.path
        if saved["layers"] != mine["layers"]:
            raise RunError(f"`{path}` holds the layers of another workload", _ANOTHER, code="mismatch")
        for what, words in (("seed", "seed"), ("global_batch_size", "global batch"), ("optimizer", "optimizer")):
            # None means that this rank does not use it: inference has no seed or batch, idle ranks have no optimizer.
            if saved[what] != mine[what] and mine[what] is not None:
                raise RunError(
                    f"`{path}` was saved with the {words} {saved[what]}, but this run has {mine[what]}",
                    _ANOTHER,
                    code="mismatch",
                )

    def _states(
        self, facts: dict[str, Any], file_of: Callable[[str], TensorFile]
    ) -> dict[torch.nn.Parameter, dict[str, Any]]:
        """Return the saved optimizer state of each parameter that this rank updates.

        Tensors are on the device that the optimizer expects.
        """
        if self._optimizer is None:
            return {}
        keys: dict[str, list[str]] = {}
        for key in (*facts["tensors"], *facts["values"]):
            keys.setdefault(key.rpartition(".")[0], []).append(key)
        # Torch's optimizers keep the `step` count on the CPU, unless they are capturable or fused. On the wrong device,
        # the next step would fail.
        stays = {
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
    """Raise RunError unless a saved tensor has the type and shape of `tensor`.

    Torch's `copy_` would convert types silently.
    """
    if file.dtype(key) != tensor.dtype:
        raise RunError(
            f"`{path}` holds `{shorten(key)}` in {file.dtype(key)}, but this run has it in {tensor.dtype}",
            "resume with the `dtype` of the run that saved it",
            code="mismatch",
        )
    if file.shape(key) != tuple(tensor.shape):
        raise RunError(
            f"`{path}` holds `{shorten(key)}` of shape {file.shape(key)}, but this run has {tuple(tensor.shape)}",
            _ANOTHER,
            code="mismatch",
        )


def load(source: Checkpoint, state: RankState) -> None:
    """Load a checkpoint on all ranks. If one rank fails, all raise RunError with its message."""
    failure = None
    try:
        state.load(source)
    except HpgoError as error:
        failure = error.message, error.hint
    for rank, failed in enumerate(gather_at("the loading of a checkpoint", failure)):
        if failed is not None:
            raise RunError(f"rank {rank}: {failed[0]}", failed[1])
