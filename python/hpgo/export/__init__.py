"""Export of plans to frameworks: each writer makes the files of one framework, and refuses plans that it can't run.

hpgo.export.files(plan, "torchtitan@0.3")  # texts by file name
hpgo.export.save(plan, "torchtitan@0.3", "job/")  # writes them
"""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any

from hpgo.base.checks import check_text
from hpgo.base.documents import make_folder, write_text
from hpgo.base.files import as_path
from hpgo.errors import ArgumentError
from hpgo.export.targets import NAMES, TARGETS, Place, Target, find

if TYPE_CHECKING:
    from pathlib import Path

    from hpgo.export.targets import TargetName
    from hpgo.planning.plans import Plan
    from hpgo.programs.program import Program

__all__ = ["NAMES", "TARGETS", "Place", "Target", "deepspeed", "files", "find", "megatron", "save", "torchtitan"]


def files(plan: object, target: TargetName, *, path: str | os.PathLike[str] = "") -> dict[str, str]:
    """Return the files that `target` needs to run `plan`: texts by file name, the main file first.

    `target` is `NAME` or `NAME@VERSION`. `path` is the path of the main file. If it ends with a slash, the files keep
    their default names in that folder. Otherwise the other files are named after the main file: `job.toml` and
    `job.order.csv`.

    Raises ArgumentError for a target or version that is unknown, and for a plan that the target can't run;
    InfeasibleError for a plan that does not fit in the devices' memory.

    >>> import hpgo
    >>> plan = hpgo.plan(hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a"), global_batch_size=64)
    >>> list(files(plan, "torchtitan@0.3")), list(files(plan, "torchtitan@0.3", path="jobs/bert.py"))
    (['planned.py', 'order.csv'], ['bert.py', 'bert.order.csv'])
    """
    as_path(path, ArgumentError)
    folder, _, main = check_text("the path", os.fspath(path)).rpartition("/")
    return find(target).write(plan, Place(folder, main))


def save(plan: object, target: TargetName, path: str | os.PathLike[str]) -> list[Path]:
    """Write the files of a plan for `target` and return their paths.

    If `path` is a folder, or ends with a slash, the files are written into it under their default names. Otherwise the
    main file is `path`, and the others are written beside it.

    Raises the errors of `files`, and ArgumentError if a file can't be written.
    """
    where = as_path(path, ArgumentError)
    into = _is_folder(path, where)
    # Make all texts before the first file is written, so that a refused plan leaves no files.
    written = files(plan, target, path=f"{where}/" if into else where)
    folder = where if into else where.parent
    if into:
        make_folder(folder)
    paths = [folder / name for name in written]
    for to, text in zip(paths, written.values(), strict=True):
        write_text(to, text, ArgumentError)
    return paths


def _is_folder(path: object, where: Path) -> bool:
    try:
        return str(path).endswith(("/", os.sep)) or where.is_dir()
    except OSError:
        # The name is too long, say. Opening the file will fail, too, with a message that gives the reason.
        return False


def megatron(plan: Plan | Program) -> str:
    """Return the arguments of Megatron-LM, one per line and quoted for a shell, after comments.

    Raises the errors of `files`.

    >>> import hpgo
    >>> plan = hpgo.plan(hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a"), global_batch_size=64)
    >>> print(megatron(plan).splitlines()[-1])
    --pipeline-model-parallel-layout 'Et*28|t*20L'
    """
    return _main(plan, "megatron")


def torchtitan(plan: Plan | Program, version: str = "") -> str:
    """Return the main file for torchtitan: sections of a job's TOML for 0.2, or a Python module for 0.3 (the default).

    Raises the errors of `files`.

    >>> import hpgo
    >>> plan = hpgo.plan(hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a"), global_batch_size=64)
    >>> [line for line in torchtitan(plan).splitlines() if "pipeline_parallel_degree" in line]
    ['    parallelism.pipeline_parallel_degree = 2']
    """
    check_text("the version", version)
    return _main(plan, f"torchtitan@{version}" if version else "torchtitan")


def deepspeed(plan: Plan | Program) -> str:
    """Return a Python module for DeepSpeed: PARTS, REPLICAS, CONFIG for `deepspeed.initialize`, and a pipeline module.

    Raises the errors of `files`.

    >>> import hpgo
    >>> plan = hpgo.plan(hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a"), global_batch_size=64)
    >>> [line for line in deepspeed(plan).splitlines() if line.startswith("PARTS")]
    ['PARTS = [0, 32, 53]']
    """
    return _main(plan, "deepspeed")


def __getattr__(name: str) -> Any:
    if name == "FRAMEWORKS":
        warnings.warn("use `hpgo.export.TARGETS` instead of `FRAMEWORKS`", DeprecationWarning, stacklevel=2)
        return {"megatron": megatron, "deepspeed": deepspeed, "torchtitan": torchtitan}
    raise AttributeError(f"module 'hpgo.export' has no attribute {name!r}")


def _main(plan: object, target: Any) -> str:
    return next(iter(files(plan, target).values()))
