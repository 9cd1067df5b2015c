"""Files with the state of an optimizer under the names of the model's parameters.

The state is read from a checkpoint of a run, or from a checkpoint of `torch.distributed.checkpoint` (DCP). Its layout
is that of `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from hpgo.base.checks import check_is
from hpgo.base.files import as_path, exists, is_folder
from hpgo.errors import ArgumentError, FileError, RunError
from hpgo.runtime.checkpoint import INDEX, Checkpoint, read_checkpoint, whole_ones
from hpgo.runtime.dcp import METADATA, DcpFolder, write_folder
from hpgo.runtime.tensor_files import TensorFile
from hpgo.runtime.weight_files import OPTIMIZER_ENTRY, checked_weights

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping
    from pathlib import Path
    from types import TracebackType
    from typing import Self

    from torch import Tensor

_STATE, _GROUPS, _PARAMS = "state", "param_groups", "params"
_WITHOUT = "name a checkpoint of a run, or a folder of `torch.distributed.checkpoint` that has an `optimizer`"


class OptimizerFiles:
    """Optimizer state in files. A tensor is read when it is asked for. Close it, or use it as a context manager."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open the state at `path`: a checkpoint of a run, a folder with several, or a folder of DCP.

        Raises FileError or RunError if there is no optimizer state, or if files are damaged.
        """
        self.path = as_path(path, RunError)
        self._opened = ExitStack()
        self._files: dict[Path, TensorFile] = {}
        self._readers: dict[str, dict[str, Callable[[], Any]]] = defaultdict(dict)
        """Functions that read the state of each parameter, by the parameter's name and the key in its state."""
        self.param_groups: list[dict[str, Any]] = []
        """Options of each parameter group, and the names of its parameters under `params`."""
        if not exists(str(self.path)):
            raise FileError(f"file not found: `{self.path}`", _WITHOUT, code="not_found")
        if not is_folder(self.path):
            pass  # a file of weights
        elif (self.path / METADATA).is_file():
            self._take_dcp(DcpFolder(self.path))
        elif (self.path / INDEX).is_file():
            self._take_checkpoint(read_checkpoint(self.path))
        elif found := whole_ones(self.path)[0]:
            self._take_checkpoint(found[-1])
        if not self.param_groups:
            raise FileError(f"`{self.path}` has no optimizer state", _WITHOUT, code="not_found")

    def _take_checkpoint(self, source: Checkpoint) -> None:
        facts = source.facts
        if facts["optimizer"] is None:
            return
        if not isinstance(facts.get(_GROUPS), list) or not isinstance(facts.get("names"), dict):
            raise RunError(
                f"`{source.path}` has no options of the optimizer, because an earlier version of hpgo wrote it",
                "resume the run and save again",
                code="missing",
            )
        # A tied weight has several names. As in torch, its state has the first one.
        names = {key.removeprefix("layer."): found[0] for key, found in facts["names"].items() if found}
        for key in (*facts["tensors"], *facts["values"]):
            held, _, short = key.removeprefix("opt.").rpartition(".")
            if key.startswith("opt.") and held in names:
                self._readers[names[held]][short] = self._reader(source, key)
        for group in facts[_GROUPS]:
            # JSON has no tuples, but torch's optimizers do, such as `betas`.
            options = {key: tuple(one) if isinstance(one, list) else one for key, one in group["options"].items()}
            self.param_groups.append(options | {_PARAMS: [names[one] for one in group[_PARAMS] if one in names]})

    def _reader(self, source: Checkpoint, key: str) -> Callable[[], Any]:
        if key in source.facts["values"]:
            return lambda: source.facts["values"][key]
        path = source.path / source.facts["tensors"][key]

        def read() -> Tensor:
            if path not in self._files:
                self._files[path] = self._opened.enter_context(TensorFile(path))
            return self._files[path].read(key, expected=source.expected(key))

        return read

    def _take_dcp(self, folder: DcpFolder) -> None:
        options: dict[str, dict[str, str]] = defaultdict(dict)
        for entry in (*folder.tensors, *folder.values):
            found = OPTIMIZER_ENTRY.match(entry)
            held, _, short = entry[found.end() :].rpartition(".") if found else ("", "", "")
            if held.startswith(f"{_STATE}."):
                name = held.removeprefix(f"{_STATE}.")
                self._readers[name][short] = lambda entry=entry: folder.read(entry)[0]  # type: ignore[misc]
            elif held.startswith(f"{_GROUPS}."):
                options[held.removeprefix(f"{_GROUPS}.")][short] = entry
        # Each call of torch reads all metadata, so read all options at once.
        wanted = [entry for entries in options.values() for entry in entries.values()]
        values = dict(zip(wanted, folder.read(*wanted) if wanted else (), strict=True))
        groups = {name: {key: values[entry] for key, entry in entries.items()} for name, entries in options.items()}
        # The layout with one list of groups has numbers in the place of names, and names under `params`.
        if numbered := {name: group for name, group in groups.items() if _PARAMS in group}:
            self.param_groups = [numbered[number] for number in sorted(numbered, key=int)]
            return
        for name, group in groups.items():
            same = next((one for one in self.param_groups if one == {**group, _PARAMS: one[_PARAMS]}), None)
            if same is None:
                self.param_groups.append({**group, _PARAMS: [name]})
            else:
                same[_PARAMS].append(name)

    @property
    def names(self) -> list[str]:
        """Names of the parameters that have state."""
        return list(self._readers)

    def state(self, name: str) -> dict[str, Any]:
        """Read the state of one parameter: new tensors on the CPU, numbers and other values, by key."""
        return {key: read() for key, read in self._readers[name].items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._opened.close()


def read_optimizer_state(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the optimizer state of a checkpoint of a run, or of a folder of `torch.distributed.checkpoint`.

    It has the layout of `get_optimizer_state_dict(model, optimizer)` of torch: `state` maps the name of each parameter
    to its state, of tensors on the CPU, and `param_groups` lists options and names. `set_optimizer_state_dict(model,
    optimizer, read_optimizer_state(path))` loads it. A tied weight has its first name, as in torch. Raises FileError or
    RunError if there is no state, or if files are damaged.
    """
    with OptimizerFiles(path) as files:
        return {_STATE: {name: files.state(name) for name in files.names}, _GROUPS: files.param_groups}


def write_dcp(
    folder: str | os.PathLike[str],
    weights: Mapping[str, Tensor],
    *,
    optimizer_state: Mapping[str, Any] | None = None,
) -> list[Path]:
    """Write weights as a checkpoint of `torch.distributed.checkpoint` by one process. Return the paths of the files.

    Weights have their own names as keys. `optimizer_state`, as `read_optimizer_state` returns it, is written under
    `optimizer` in both layouts of torch, which only differ in the keys of the groups' options. So a program reads it
    with `get_optimizer_state_dict` and with its option `flatten_optimizer_state_dict`.

    All tensors are in memory at a time. Raises FileError if the folder can't be written.
    """
    state = dict(checked_weights(weights))
    if optimizer_state is not None:
        state["optimizer"] = _both_layouts(optimizer_state)
    return write_folder(folder, state)


def _both_layouts(state: Mapping[str, Any]) -> dict[str, Any]:
    hint = "give the result of `read_optimizer_state`"
    check_is("optimizer_state", state, dict, hint)
    if missing := [key for key in (_STATE, _GROUPS) if key not in state]:
        raise ArgumentError(f"optimizer_state lacks `{missing[0]}`", hint)
    check_is(f"`{_STATE}` of optimizer_state", state[_STATE], dict, hint)
    check_is(f"`{_GROUPS}` of optimizer_state", state[_GROUPS], list, hint)
    # Schedulers of torch ask for this rate in each group. Without one, it is the rate.
    groups = [{"initial_lr": group["lr"], **group} if "lr" in group else group for group in state[_GROUPS]]
    return {
        _STATE: {name: dict(values) for name, values in state[_STATE].items()},
        _GROUPS: groups,
        **{
            f"{_GROUPS}.{name}.{key}": value
            for group in groups
            for name in group[_PARAMS]
            for key, value in group.items()
            if key != _PARAMS
        },
    }
