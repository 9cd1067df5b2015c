"""What options take beside numbers: files, of which endings are refused before any work, and names.

Each kind of value completes itself in a shell.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from hpgo.base.messages import shorten
from hpgo.cli.command import option
from hpgo.cli.misplaced_names import check_kind
from hpgo.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class File(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.5
    """A file to read; with `endings`, one to write, which ends in one of them, or in none where that is allowed."""

    name = "file"

    def __init__(self, *endings: str, bare: bool = False) -> None:
        self._endings, self._bare = endings, bare

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The name as it was given; raises ArgumentError for another ending."""
        del param, ctx
        last = str(value).replace("\\", "/").rpartition("/")[2]
        if not self._endings or last.lower().endswith(self._endings) or (self._bare and "." not in last):
            return str(value)
        *others, final = self._endings
        known = f"{', '.join(others)} or {final}" if others else final
        raise ArgumentError(f"can't tell what to write into `{shorten(str(value))}`", f"end it in {known}")

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Whatever lies there."""
        del ctx, param
        return [CompletionItem(incomplete, type="file")]


class Folder(File):
    """A folder."""

    name = "folder"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Whatever lies there."""
        del ctx, param
        return [CompletionItem(incomplete, type="dir")]


class Known(click.ParamType):  # type: ignore[type-arg]
    """One of names that are known, or of files, where a name wins; `many` have commas between them.

    Who reads it says what is wrong with it: a function of Python does so, too. Only a name of another kind is refused
    here, since the hint is a command.
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
        """`kind` is one of `hpgo.cli.misplaced_names`, where names of other kinds are told from those that are unknown.

        `others` are accepted, too, but not completed: the command explains itself what is wrong with them.
        """
        self.name, self._kind, self._others = name, kind, others
        self._names, self._files, self._many = names, files, many

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The text as it was given."""
        del param
        if self._kind is not None and isinstance(value, str):
            check_kind(value, self._kind, ctx, own=lambda: (*self._names(), *self._others()))
        return str(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Names that begin so; files where there is none."""
        del ctx, param
        before, comma, begun = incomplete.rpartition(",") if self._many else ("", "", incomplete)
        found = [CompletionItem(f"{before}{comma}{name}") for name in self._names() if name.startswith(begun)]
        return found or ([CompletionItem(incomplete, type="file")] if self._files else [])


def _models() -> list[str]:
    from hpgo.model.builtin import MODELS

    return list(MODELS)


def _transformers() -> list[str]:
    from hpgo.model.transformer_presets import TRANSFORMERS

    return list(TRANSFORMERS)


def _clusters() -> list[str]:
    from hpgo.machine.presets import PRESETS

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
"""The model of `hpgo plan`, which names the command that plans a transformer."""
TRANSFORMER = Known("transformer", _transformers, kind="transformer", files=True)
CLUSTER = Known("cluster", _clusters, kind="cluster", files=True)
WORKLOAD = Known("workload", _workloads, kind="workload", files=True)
SCHEDULE = Known("schedule", _schedules, kind="schedule", files=True)
PLAN = Known("plan", tuple, kind="plan", files=True)
"""The file of a plan, or what else a command reads in its place."""
SCHEDULES = Known("schedules", _schedules, many=True)
YAML = File(".yaml", ".yml")
PROFILE_OUT = File(".yaml", ".yml", ".json", ".txt")
"""That `hpgo.write_profile` writes."""
STILL_ENDINGS = (".svg", ".png", ".pdf", ".html")
STILL = File(*STILL_ENDINGS)
"""A picture that does not move."""
LLM_PLAN_OUT = File(".json", *STILL_ENDINGS, bare=True)
LLM_ESTIMATE_OUT = File(*STILL_ENDINGS, ".yaml", ".yml", ".json", ".txt")
"""A picture, or the profile that `hpgo.write_profile` writes."""
TIMELINE_OUT = File(".timeline.json", ".npz")
PICTURE = File(".svg", ".png", ".pdf", ".html", ".json", ".txt", ".tex")
"""A picture of a timeline."""
RUN_OUT = File(".svg", ".png", ".pdf", ".html", ".json", ".txt", ".tex", ".npz")
"""A timeline, too: .npz or .timeline.json."""
PICTURES = (".svg", ".png", ".pdf", ".html", ".tex")
"""What a plan's step is drawn as; its .json is the plan itself."""
PLAN_OUT = File(".json", *PICTURES, ".md", bare=True)


def written(kind: File, said: str, *, required: bool = False) -> Any:
    """Declare the option `-o FILE`, which may be given several times; `said` is its line of help."""
    return option("-o", "--output", type=kind, multiple=True, required=required, metavar="FILE", help=said)


AS_JSON: Any = option("--json", is_flag=True, help="Print the result as JSON.")
SEED: Any = option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, metavar="N", help="Seed of the first weights."
)
DTYPE: Any = option(
    "--dtype",
    type=click.Choice(["float32", "float64", "bfloat16"]),
    help="Type of the weights.  [default: the workload's]",
)
AUTOCAST: Any = option(
    "--autocast", type=click.Choice(["bfloat16"]), help="Type to compute in, whatever the weights are."
)
DEVICE: Any = option(
    "--device", type=click.Choice(["cpu", "cuda"]), help="Where to compute.  [default: cuda if each process has a GPU]"
)
PROFILE_OF_PLAN: Any = option(
    "--profile", type=PROFILE, metavar="NAME|FILE", help="Profile of a plan that was saved with --no-embed."
)
CLUSTER_OF_PLAN: Any = option(
    "--cluster", type=CLUSTER, metavar="NAME|FILE", help="Cluster of a plan that was saved with --no-embed."
)


def cluster_option(*, required: bool) -> Any:
    """Declare the option `-c`, which names a cluster."""
    return option("-c", "--cluster", type=CLUSTER, required=required, metavar="NAME|FILE", help="See `hpgo clusters`.")


def steps_option(default: int) -> Any:
    """Declare the option that says how many training steps to run."""
    return option(
        "--steps", type=click.IntRange(1), default=default, show_default=True, metavar="N", help="Training steps."
    )


def optimizer_option(default: str) -> Any:
    """Declare the option that names an optimizer."""
    return option(
        "--optimizer", default=default, show_default=True, metavar="NAME[:OPTIONS]", help="Such as `adamw:lr=1e-4`."
    )


def framework_option(*names: str) -> Any:
    """Declare the option that restricts a search to what one of the frameworks `names` runs."""
    known = f"{', '.join(names[:-1])} or {names[-1]}"
    return option("--framework", metavar="NAME[@VERSION]", help=f"Search only what this framework runs: {known}.")
