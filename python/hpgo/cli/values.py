"""Option values other than numbers: files with checked endings, and names. Also options that several commands share.

Each value type completes itself in a shell.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from hpgo.base.files import exists, is_folder
from hpgo.base.messages import shorten
from hpgo.cli.command import option
from hpgo.cli.misplaced_names import check_kind
from hpgo.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class File(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.5
    """A file to read, or with `endings` a file to write, whose name must end in one of them.

    With `bare`, a name without any ending is allowed, too. With `folders`, a folder is (`is_folder_name`), and a name
    without an ending must exist, such as `/dev/stdout`: a new one could be meant as a file or as a folder.
    """

    name = "file"

    def __init__(self, *endings: str, bare: bool = False, folders: bool = False) -> None:
        self._endings, self._bare, self._folders = endings, bare, folders

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the name unchanged. Raises ArgumentError for an ending that is not allowed."""
        del param, ctx
        last = str(value).replace("\\", "/").rpartition("/")[2]
        if self._folders and is_folder_name(str(value)):
            return str(value)
        if not self._endings or last.lower().endswith(self._endings):
            return str(value)
        if self._bare and "." not in last:
            if not self._folders or exists(str(value)):
                return str(value)
            name = shorten(last)
            raise ArgumentError(
                f"`{shorten(str(value))}` has no ending, so it may be meant as a file or as a folder",
                f"write `{name}/` for a folder that starts the plan, or `{name}.json` for the plan alone",
            )
        *others, final = self._endings
        known = f"{', '.join(others)} or {final}" if others else final
        raise ArgumentError(f"unknown output format: `{shorten(str(value))}`", f"use a name that ends in {known}")

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Complete the names of files."""
        del ctx, param
        return [CompletionItem(incomplete, type="file")]


def is_folder_name(name: str) -> bool:
    """Return whether `name` names a folder: it ends with a slash, or there is a folder of this name.

    >>> is_folder_name("new/"), is_folder_name("plan.json")
    (True, False)
    """
    from pathlib import Path

    return name.endswith(("/", os.sep)) or is_folder(Path(name))


class Folder(File):
    """A folder that exists or will be made."""

    name = "folder"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Complete the names of folders."""
        del ctx, param
        return [CompletionItem(incomplete, type="dir")]


class Known(click.ParamType):  # type: ignore[type-arg]
    """A known name or a file. A known name wins over a file of that name. With `many`, several with commas between.

    The function that reads the value reports unknown names, as it does for callers from Python. Only names of another
    kind are rejected here, because the hint is a command.
    """

    def __init__(
        self,
        name: str,
        names: Callable[[], Iterable[str]],
        *,
        others: Callable[[], Iterable[str]] = tuple,
        kind: str | None = None,
        files: bool = False,
        many: bool = False,
    ):
        """Declare a value type.

        Args:
            name: name of the type in messages of click.
            names: returns the known names.
            others: returns names that are accepted but not completed, because the command explains what is wrong.
            kind: kind of name in `hpgo.cli.misplaced_names`, to reject names of other kinds; None accepts all.
            files: whether files are allowed, and completed if no name matches.
            many: whether the value is a list with commas.
        """
        self.name, self._kind, self._others = name, kind, others
        self._names, self._files, self._many = names, files, many

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the text unchanged. Raises ArgumentError for a name of another kind."""
        del param
        if self._kind is not None and isinstance(value, str):
            check_kind(value, self._kind, ctx, own=lambda: (*self._names(), *self._others()))
        return str(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Complete names, or files if no name matches."""
        del ctx, param
        before, comma, begun = incomplete.rpartition(",") if self._many else ("", "", incomplete)
        found = [CompletionItem(f"{before}{comma}{name}") for name in self._names() if name.startswith(begun)]
        return found or ([CompletionItem(incomplete, type="file")] if self._files else [])


def _models() -> list[str]:
    from hpgo.model.builtin import MODELS

    return list(MODELS)


def _transformers() -> list[str]:
    from hpgo.model.transformer_presets import transformer_names

    return transformer_names()


def _clusters() -> list[str]:
    from hpgo.hardware.presets import PRESETS

    return list(PRESETS)


def _workloads() -> list[str]:
    from hpgo.runtime.models import MODELS

    return list(MODELS)


def _schedules() -> list[str]:
    from hpgo.programs.schedule import schedules

    return [family.name for family in schedules()]


FILE = File()
FOLDER = Folder()
PROFILE = Known("profile", _models, kind="profile", files=True)
MODEL = Known("model", _models, others=_transformers, kind="profile", files=True)
"""Model of `hpgo plan`. Names of transformers pass, because `hpgo plan` names the command that plans them."""
TRANSFORMER = Known("transformer", _transformers, kind="transformer", files=True)
CLUSTER = Known("cluster", _clusters, kind="cluster", files=True)
WORKLOAD = Known("workload", _workloads, kind="workload", files=True)
SCHEDULE = Known("schedule", _schedules, kind="schedule", files=True)
PLAN = Known("plan", tuple, kind="plan", files=True)
"""A plan file, or another file that the command accepts instead."""
SCHEDULES = Known("schedules", _schedules, many=True)
YAML = File(".yaml", ".yml")
PROFILE_OUT = File(".yaml", ".yml", ".json", ".txt")
"""A file that `hpgo.write_profile` writes."""
STILL_ENDINGS = (".svg", ".png", ".pdf", ".html")
STILL = File(*STILL_ENDINGS)
"""A picture that is not a timeline."""
LLM_PLAN_OUT = File(".json", *STILL_ENDINGS, bare=True, folders=True)
"""A plan, a picture, or a folder for a job."""
LLM_ESTIMATE_OUT = File(*STILL_ENDINGS, ".yaml", ".yml", ".json", ".txt")
"""A picture, or a profile that `hpgo.write_profile` writes."""
TIMELINE_OUT = File(".timeline.json", ".npz")
PICTURE = File(".svg", ".png", ".pdf", ".html", ".json", ".txt", ".tex")
"""A picture of a timeline, or its trace as .json."""
RUN_OUT = File(".svg", ".png", ".pdf", ".html", ".json", ".txt", ".tex", ".npz")
"""A picture of a timeline, or the timeline as .npz or .timeline.json."""
PICTURES = (".svg", ".png", ".pdf", ".html", ".tex")
"""Endings of pictures of a plan's step. A .json file is the plan itself."""
PLAN_OUT = File(".json", *PICTURES, ".md", bare=True)
PLAN_OR_JOB_OUT = File(".json", *PICTURES, ".md", bare=True, folders=True)


def written(kind: File, text: str, *, required: bool = False) -> Any:
    """Declare the option `-o FILE`, which may be given several times; `text` is its help."""
    return option("-o", "--output", type=kind, multiple=True, required=required, metavar="FILE", help=text)


ON_LAUNCHER: Any = option(
    "--on",
    type=click.Choice(("slurm", "torchrun", "kubernetes", "ray")),
    default="slurm",
    metavar="NAME",
    help="Job for slurm, torchrun, kubernetes or ray.",
)
AS_JSON: Any = option("--json", is_flag=True, help="Print the result as JSON.")
SEED: Any = option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, metavar="N", help="Seed of the initial weights."
)
DTYPE: Any = option(
    "--dtype",
    type=click.Choice(["float32", "float64", "bfloat16"]),
    help="Data type of the weights.  [default: that of the workload]",
)
AUTOCAST: Any = option(
    "--autocast", type=click.Choice(["bfloat16"]), help="Compute in this data type, by `torch.autocast`."
)
DEVICE: Any = option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    help="Device that computes.  [default: cuda if each process has a GPU]",
)
PROFILE_OF_PLAN: Any = option(
    "--profile", type=PROFILE, metavar="NAME|FILE", help="Profile of a plan that was saved with --no-embed."
)
CLUSTER_OF_PLAN: Any = option(
    "--cluster", type=CLUSTER, metavar="NAME|FILE", help="Cluster of a plan that was saved with --no-embed."
)


_CLUSTER_HELP = "Cluster: a name of `hpgo clusters`, such as h100:4 for 4 nodes, or a YAML file."


def cluster_option(*, required: bool) -> Any:
    """Declare the option `-c` for a cluster."""
    return option("-c", "--cluster", type=CLUSTER, required=required, metavar="NAME|FILE", help=_CLUSTER_HELP)


def steps_option(default: int) -> Any:
    """Declare the option for the number of training steps."""
    return option(
        "--steps",
        type=click.IntRange(1),
        default=default,
        show_default=True,
        metavar="N",
        help="Number of training steps.",
    )


def optimizer_option(default: str) -> Any:
    """Declare the option for an optimizer."""
    return option(
        "--optimizer",
        default=default,
        show_default=True,
        metavar="NAME[:OPTIONS]|MODULE:FUNCTION",
        help="Optimizer and its options, such as `adamw:lr=1e-4`, or your function.",
    )


def framework_option(*names: str) -> Any:
    """Declare the option that restricts a search to what one of the frameworks `names` runs."""
    known = f"{', '.join(names[:-1])} or {names[-1]}"
    return option("--framework", metavar="NAME[@VERSION]", help=f"Search only plans that this runs: {known}.")
