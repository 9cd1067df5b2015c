"""Checkpoints: the state of a run under names that do not depend on the plan, so that any other plan can resume it.

A checkpoint is a folder `step-N`. It holds files of tensors, each written by one rank, and `checkpoint.json`, which
maps each tensor to its file. It is written as `.step-N.tmp` and gets its final name once everything is on the disk.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hpgo.base.documents import read_text
from hpgo.base.files import MAX_BYTES_OF_RUNS, as_path, refused
from hpgo.base.messages import safe_repr, shorten
from hpgo.errors import HpgoError, RunError
from hpgo.runtime.rendezvous import together
from hpgo.runtime.tensor_files import TensorFile

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from hpgo.programs.program import Program
    from hpgo.runtime.optimizer_files import OptimizerFiles
    from hpgo.runtime.stage_module import StageModule
    from hpgo.runtime.train.gradients import Weight
    from hpgo.runtime.train.optimizer import ShardedOptimizer
    from hpgo.runtime.weight_names import WeightNames
    from hpgo.runtime.workload import Workload


INDEX = "checkpoint.json"
FORMAT, VERSION = "hpgo.checkpoint", 1
_KEYS = {"steps", "loader", "plan", "seed", "global_batch_size", "optimizer", "layers", "files", "values", "tensors"}
_OTHER = "model."
"""Prefix in checkpoints of the names of tensors that no layer trains."""
_RATES = {"lr", "initial_lr"}
"""Options of an optimizer that learning-rate schedules set."""
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

    def expected(self, key: str) -> int | None:
        """Return the checksum with which a tensor was saved; None in checkpoints of earlier versions."""
        found: int | None = self.facts.get("checksums", {}).get(key)
        return found


def whole_ones(folder: Path) -> tuple[list[Checkpoint], list[RunError]]:
    """Return the complete checkpoints in a folder, oldest first, and what is wrong with incomplete ones."""
    found: list[Checkpoint] = []
    torn: list[tuple[Path, RunError]] = []
    for path in folder.glob("step-*") if folder.is_dir() else ():
        if path.name[5:].isdecimal():
            try:
                found.append(read_checkpoint(path))
            except RunError as error:
                torn.append((path, error))
    return sorted(found, key=lambda one: one.steps), [error for _, error in sorted(torn, key=lambda one: one[0])]


def read_checkpoint(path: Path) -> Checkpoint:
    """Return the checkpoint in the folder `path`, without reading its tensors.

    Raises RunError, naming file and field, if its index is damaged, or if one of the files that it lists is missing or
    doesn't have its full size.
    """
    file = path / INDEX
    try:
        facts = json.loads(read_text(file, RunError, maximum=MAX_BYTES_OF_RUNS))
    except HpgoError as error:
        raise _damaged(error.message) from None
    except (ValueError, RecursionError) as error:
        raise _damaged(f"`{file}` is no JSON: {shorten(str(error))}") from None
    if not isinstance(facts, dict):
        raise _damaged(f"`{file}` is no JSON object")
    if missing := [key for key in ("format", "version", *sorted(_KEYS)) if key not in facts]:
        raise _damaged(f"`{file}` lacks `{missing[0]}`")
    steps = facts["steps"]
    for key, is_right, rule in (
        ("format", facts["format"] == FORMAT, f"must be `{FORMAT}`"),
        ("version", facts["version"] == VERSION, f"this version of hpgo reads {VERSION}"),
        ("steps", type(steps) is int and steps >= 0, "must be a number of steps"),
        ("steps", f"step-{steps}" == path.name, f"the folder is `{path.name}`"),
        *((key, isinstance(facts[key], dict), "must be an object") for key in ("files", "values", "tensors")),
        ("checksums", _are_checksums(facts.get("checksums", {})), "must map names to numbers"),
        ("layers", isinstance(facts["layers"], list), "must be a list"),
    ):
        if not is_right:
            raise _damaged(f"`{key}` of `{file}` is {shorten(safe_repr(facts[key]))}, but {rule}")
    for key, name in facts["tensors"].items():
        if not isinstance(name, str) or name not in facts["files"]:
            raise _damaged(
                f"`tensors.{shorten(key)}` of `{file}` is {shorten(safe_repr(name))}, but `files` has no such file"
            )
    for name, size_bytes in facts["files"].items():
        try:
            found_bytes = (path / name).stat().st_size
        except (OSError, ValueError):
            raise _damaged(f"`{file}` lists `{shorten(name)}`, which is missing") from None
        if found_bytes != size_bytes:
            raise _damaged(
                f"`{path / name}` has {found_bytes} bytes, but `files` of `{INDEX}` states {safe_repr(size_bytes)}"
            )
    # Checkpoints of earlier versions have no checksum.
    if "checksum" in facts and facts["checksum"] != index_checksum(facts):
        raise _damaged(f"`{file}` is damaged: `checksum` doesn't fit its other fields")
    return Checkpoint(path, facts)


def index_checksum(facts: Mapping[str, Any]) -> int:
    """Return the checksum of the fields of an index, without the field that holds it.

    >>> index_checksum({"steps": 3, "checksum": 0}) == index_checksum({"steps": 3})
    True
    """
    rest = {key: value for key, value in facts.items() if key != "checksum"}
    return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


def _are_checksums(value: object) -> bool:
    return isinstance(value, dict) and all(type(one) is int for one in value.values())


def _damaged(message: str) -> RunError:
    return RunError(message, "use another checkpoint", code="damaged_file")


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
    everyone = gather_at("the search for a checkpoint", (mine, not found and [error.message for error in torn]))
    first, damaged = everyone[0]
    if damaged:
        raise RunError(
            f"{damaged[-1]}, and the folder has no other checkpoint", "name another folder", code="damaged_file"
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
        dtype: torch.dtype | None,
    ) -> None:
        """Name the tensors of this rank, whose weights have the type `dtype`, or the workload's if it is None.

        Without a `seed`, as for inference, `load` reads only what layers hold, from any run.
        """
        self._workload, self._dtype = workload, dtype
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

    @cached_property
    def names(self) -> WeightNames:
        """Names of the tensors in the model."""
        return self._workload.weight_names(self._dtype)

    @cached_property
    def others(self) -> dict[str, torch.Tensor]:
        """Tensors of the model that no layer trains, by their names in the model. Rank 0 saves them."""
        # Weights on the meta device have no values until a layer uses them.
        return {name: tensor.detach() for name, tensor in self.names.others.items() if not tensor.is_meta}

    def facts(self) -> dict[str, Any]:
        """Return the properties of the run that a checkpoint stores and that a resumed run is compared with."""
        return {
            "plan": self._plan,
            "seed": self._seed,
            "global_batch_size": None if self._seed is None else self._program.global_batch_size,
            "optimizer": None if self._optimizer is None else type(self._optimizer).__name__,
            "param_groups": self._param_groups(),
            "layers": list(self._layers),
        }

    def _param_groups(self) -> list[dict[str, Any]]:
        """Return the options of this rank's parameter groups, and the names in checkpoints of their weights."""
        of_copy = {id(weight.copies[0]): self._names[id(weight)] for weight in self._stepped}
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        return [
            {
                "options": {key: _plain(one) for key, one in group.items() if _is_plain(one) and key != "params"},
                "params": [".".join(of_copy[id(one)]) for one in group["params"] if id(one) in of_copy],
            }
            for group in groups
        ]

    def model_facts(self) -> dict[str, Any]:
        """Return the names of all saved weights in the model, by their names in checkpoints, and its `config.json`."""
        names = {
            f"layer.{layer}.{name}": list(found)
            for (layer, name), found in self.names.of.items()
            if not self.names.others.keys() & found
        }
        return {"names": names | {f"{_OTHER}{name}": [name] for name in self.others}, "config": self._workload.config}

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
        if self._rank == 0:
            tensors |= {f"{_OTHER}{name}": _copy(tensor) for name, tensor in self.others.items()}
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
                    raise RunError(f"`{path}` lacks `{shorten(key)}`{self._in_model(key)}", _ANOTHER, code="missing")
                if name not in files:
                    files[name] = opened.enter_context(TensorFile(path / name))
                return files[name]

            wanted = [
                (f"layer.{layer}.{name}", tensor)
                for part in self._parts.values()
                for layer, named in part.by_layer().items()
                for name, tensor in named.items()
            ]

            def read(key: str) -> torch.Tensor:
                return file_of(key).read(key, expected=source.expected(key))

            # Read and check everything before the first copy, so that a checkpoint that does not fit, or is damaged,
            # leaves the state unchanged. Keeping what was read would take the memory of the weights twice.
            for key, tensor in wanted:
                self._check_kind(path, key, file_of(key), tensor)
                read(key)
            states = self._states(facts, read)
            others = {name: read(f"{_OTHER}{name}") for name in self.others if f"{_OTHER}{name}" in facts["tensors"]}
            mine = f"rng.{self._rank}"
            # Under another plan, each rank runs other passes, so the saved generator states have no meaning there.
            generators = [one for one in (mine, f"{mine}.cuda") if one in facts["tensors"]]
            generator_states = {one: read(one) for one in generators if facts["plan"] == self._plan}
            for key, tensor in wanted:
                tensor.detach().copy_(file_of(key).read(key))
            self._put_others(others)
            if self._optimizer is not None:
                self._optimizer.state.update(states)
            if mine in generator_states:
                torch.set_rng_state(generator_states[mine])
                if torch.cuda.is_initialized() and f"{mine}.cuda" in generator_states:
                    torch.cuda.set_rng_state(generator_states[f"{mine}.cuda"])

    def _put_others(self, others: Mapping[str, torch.Tensor]) -> None:
        """Put saved tensors that no layer trains in the place of the workload's, wherever this rank holds them.

        They differ if the run began with other weights.
        """
        self.others |= others
        for part in self._parts.values():
            for held, tensor in part.tensors().items():
                for name in self.names.of.get(held, ()):
                    if name in others:
                        tensor.detach().copy_(others[name])

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
        self, facts: dict[str, Any], read: Callable[[str], torch.Tensor]
    ) -> dict[torch.nn.Parameter, dict[str, Any]]:
        """Return the saved optimizer state of each parameter that this rank updates.

        Tensors are on the device that the optimizer expects.
        """
        if self._optimizer is None:
            return {}
        keys: dict[str, list[str]] = {}
        for key in (*facts["tensors"], *facts["values"]):
            keys.setdefault(key.rpartition(".")[0], []).append(key)
        stays = _keep_step_on_cpu(self._optimizer)
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
                    tensor = read(key)
                    state[short] = tensor if short == "step" and stays[id(copy)] else tensor.to(copy.device)
                if state:
                    found[copy] = state
        return found

    def load_optimizer(self, files: OptimizerFiles) -> None:
        """Load the state of the weights that this rank updates, by the model's names, and convert its types.

        Learning rates and other options stay. Raises RunError, before any change, if the state is that of another
        optimizer, or lacks a weight.
        """
        if self._optimizer is None:
            return
        for group in self._optimizer.param_groups:
            # Flags are left out, because versions of torch add some. Numbers such as `betas` tell optimizers apart.
            numbers = [key for key, one in group.items() if _is_number(one) and key not in _RATES]
            if lacking := [key for key in numbers if key not in files.param_groups[0]]:
                raise RunError(
                    f"`{files.path}` holds the state of another optimizer: it has no `{lacking[0]}`",
                    "use the optimizer that wrote it, or start without its state",
                    code="mismatch",
                )
        stays, there = _keep_step_on_cpu(self._optimizer), set(files.names)
        found: dict[torch.nn.Parameter, dict[str, Any]] = {}
        # Some optimizers have no state, such as SGD without momentum.
        for weight in self._stepped if there else ():
            choices = self.names.of.get(self._names[id(weight)], ())
            name = next((one for one in choices if one in there), None)
            if name is None:
                raise RunError(
                    f"`{files.path}` has no optimizer state of `{shorten((choices or ('a weight',))[0])}`",
                    "name the state of this model, with all of its weights trained",
                    code="missing",
                )
            for copy in weight.copies:
                state = found[copy] = files.state(name)
                for key, value in state.items():
                    # As `Optimizer.load_state_dict` does: all but the step count get the weight's type.
                    if isinstance(value, torch.Tensor) and not (key == "step" and stays[id(copy)]):
                        state[key] = value.to(copy.device, None if key == "step" else copy.dtype)
        self._optimizer.state.update(found)

    def _in_model(self, key: str) -> str:
        """Return words with the name in the model of a tensor; empty if its name in checkpoints shows it."""
        short = key.removeprefix("layer.").removeprefix("opt.")
        for (layer, name), found in self.names.of.items():
            if found and f"{short}.".startswith(f"{layer}.{name}."):
                return "" if f"{layer}.{name}" in found else f"; in the model, it is `{shorten(found[0])}`"
        return ""

    def _check_kind(self, path: Path, key: str, file: TensorFile, tensor: torch.Tensor) -> None:
        """Raise RunError unless a saved tensor has the type and shape of `tensor`.

        Torch's `copy_` would convert types silently.
        """
        if file.dtype(key) != tensor.dtype:
            raise RunError(
                f"`{path}` holds `{shorten(key)}` in {file.dtype(key)}, but this run has it in {tensor.dtype}"
                f"{self._in_model(key)}",
                "resume with the `dtype` of the run that saved it",
                code="mismatch",
            )
        if file.shape(key) != tuple(tensor.shape):
            raise RunError(
                f"`{path}` holds `{shorten(key)}` of shape {file.shape(key)}, but this run has {tuple(tensor.shape)}"
                f"{self._in_model(key)}",
                _ANOTHER,
                code="mismatch",
            )


def merge_param_groups(everyone: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the parameter groups of all ranks. Groups with the same index and equal options become one.

    >>> one, other = {"options": {"lr": 0.1}, "params": ["a.weight"]}, {"options": {"lr": 0.1}, "params": ["b.weight"]}
    >>> merge_param_groups([[one], [], [other], [one]])
    [{'options': {'lr': 0.1}, 'params': ['a.weight', 'b.weight']}]
    """
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for groups in everyone:
        for number, group in enumerate(groups):
            key = number, json.dumps(group["options"], sort_keys=True)
            params = found.setdefault(key, {"options": group["options"], "params": {}})["params"]
            # Replicas of a stage name the same weights.
            params.update(dict.fromkeys(group["params"]))
    return [{**group, "params": list(group["params"])} for _, group in sorted(found.items(), key=lambda one: one[0][0])]


def _is_number(value: object) -> bool:
    """Return whether an option of an optimizer is a number, or several."""
    if isinstance(value, tuple | list):
        return all(_is_number(one) for one in value)
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_plain(value: object) -> bool:
    """Return whether an option of an optimizer can be written as JSON."""
    if isinstance(value, tuple | list):
        return all(_is_plain(one) for one in value)
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return value is None or isinstance(value, bool | int | float | str)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    return value.item() if isinstance(value, torch.Tensor) else value


def _keep_step_on_cpu(optimizer: torch.optim.Optimizer) -> dict[int, bool]:
    """Return whether the `step` count of each parameter, by its `id`, is kept on the CPU.

    Torch's optimizers do so unless they are capturable or fused. On the wrong device, the next step would fail.
    """
    return {
        id(copy): not (group.get("capturable") or group.get("fused"))
        for group in optimizer.param_groups
        for copy in group["params"]
    }


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def load(source: Checkpoint, state: RankState) -> None:
    """Load a checkpoint on all ranks. If one rank fails, all raise RunError with its message."""
    failure = None
    try:
        state.load(source)
    except HpgoError as error:
        failure = error.message, error.hint, error.code
    for rank, failed in enumerate(gather_at("the loading of a checkpoint", failure)):
        if failed is not None:
            raise RunError(f"rank {rank}: {failed[0]}", failed[1], code=failed[2])
