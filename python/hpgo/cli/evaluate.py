"""`hpgo evaluate`: the price of a plan that you give."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from hpgo.base.errors import ArgumentError, HpgoError
from hpgo.base.wording import near, shorten
from hpgo.cli.command import Command
from hpgo.cli.plan import saving, show, write
from hpgo.cli.questions import SECTIONS, as_options, of_profile, question, settings
from hpgo.cli.terminal import say
from hpgo.cli.values import PROFILE

if TYPE_CHECKING:
    from hpgo.model.profile import Profile
    from hpgo.planning.plans import Plan

_OPEN = {
    "profile", "given_profile", "cluster", "profile_batch_size", "profile_layer_counts", "profile_boundary",
    "as_json", "as_markdown", "outputs", "no_embed",
}  # fmt: skip
"""Parameters that a saved plan leaves open."""


class _Stages(click.ParamType):  # type: ignore[type-arg]
    """`26@0-7,27@8-15`: layers and devices of each stage; for a number of layers the last one's name may stand."""

    name = "stages"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[tuple[int | str, list[int]]]:
        """Layers and devices of each stage."""
        if isinstance(value, list):
            return value
        stages: list[tuple[int | str, list[int]]] = []
        for word in str(value).split(","):
            layers, at, places = word.strip().rpartition("@")
            devices: list[int] = []
            for place in places.split("+"):
                first, dash, last = place.strip().partition("-")
                if not (at and layers and _is_count(first) and (not dash or _is_count(last))):
                    self.fail(f"`{word[:40]}` is no stage; write layers@devices, like 26@0-7 or 4@0-3+8-11", param, ctx)
                if int(last or first) - int(first) >= 2**20:
                    self.fail(f"`{place[:40]}` are too many devices", param, ctx)
                devices += range(int(first), int(last or first) + 1)
            if not devices:
                self.fail(f"`{word[:40]}` has no devices; ranges ascend, like 0-7", param, ctx)
            stages.append((int(layers) if _is_count(layers) else layers, devices))
        return stages

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Layers of the profile that is named in front."""
        from hpgo.model.formats import read_profile

        before, comma, begun = incomplete.rpartition(",")
        named = [ctx.params.get("profile"), *ctx.args]  # click has parsed no arguments while an option lacks its value
        try:
            profile = read_profile(next(filter(None, named)))
        except (StopIteration, HpgoError):
            return []
        ids = [layer.id for layer in profile.layers]
        return [CompletionItem(f"{before}{comma}{name}@") for name in ids if name.startswith(begun)]


def _counted(profile: Profile, stages: list[tuple[int | str, list[int]]]) -> list[tuple[int, list[int]]]:
    """Stages with a number of layers each; raises ArgumentError for a name that is no layer's, or out of order."""
    ends = {layer.id: number for number, layer in enumerate(profile.layers, start=1)}
    counted, begin = [], 0
    for layers, devices in stages:
        if isinstance(layers, str):
            end = ends.get(layers)
            if end is None:
                raise ArgumentError(
                    f"`{profile.name}` has no layer `{shorten(layers)}`", near(layers, ends), code="unknown_name"
                )
            if end <= begin:
                last = profile.layers[begin - 1].id
                raise ArgumentError(f"a stage ends with `{layers}`, the one before with `{last}`", "which comes later")
            layers = end - begin  # noqa: PLW2901 -- the same, as a number
        counted.append((layers, devices))
        begin += layers
    return counted


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 9


_SECTIONS = {title: names.format("stages given_profile ") for title, names in SECTIONS.items()} | {
    "What is written": "outputs no_embed as_json as_markdown",
}


@click.command(cls=Command, sections=_SECTIONS)
@question(several=False)
@click.option(
    "--stages", type=_Stages(), metavar="LAYERS@DEVICES,…",
    help="For each stage how many layers it has, in the profile's order, or which is its last, and its devices.",
)  # fmt: skip
@click.option(
    "--profile",
    "given_profile",
    type=PROFILE,
    metavar="NAME|FILE",
    help="Of a PLAN.json that was saved with `--no-embed`.",
)
@click.option("--json", "as_json", is_flag=True, help="For machines.")
@click.option("--markdown", "as_markdown", is_flag=True, help="To paste into a document.")
@saving
@click.pass_context
def command(
    ctx: click.Context,
    /,
    *,
    profile: str,
    given_profile: str | None,
    as_json: bool,
    as_markdown: bool,
    outputs: tuple[str, ...],
    no_embed: bool,
    **options: Any,
) -> None:
    """Price a plan of your own, with the model and the report of `hpgo plan`.

    Devices are numbered machine by machine from 0: `0-7` are eight, `0-3+8-11` four on each of two machines of eight.

    In PROFILE's place may stand a PLAN.json that `hpgo plan -o` saved: it is priced anew, with what it was made with,
    and the report says so if the step differs.

    \b
    Examples:
      hpgo evaluate bert-48 --cluster dapple-a -b 64 --stages "26@0-7,27@8-15"
      hpgo evaluate vgg-19 --cluster dapple-c -b 2048 --stages "22@0-14,4@15"
      hpgo evaluate bert-48 -c dapple-a -b 64 --stages "encoder-9@0-7,pooler@8-15"
      hpgo evaluate plan.json
      hpgo evaluate lean.json --profile model.yaml --cluster h100:4
    """
    if as_json and as_markdown:
        raise click.UsageError("choose one of --json and --markdown")
    stored = None
    if _is_plan(profile):
        given = [param for param in ctx.command.params if _is_given(ctx, param) and param.name not in _OPEN]
        if given:
            raise click.UsageError(
                f"`{profile}` is a saved plan, which says itself what it was made for: leave out"
                f" {', '.join(param.opts[0] for param in given)}"
            )
        stored, priced = _anew(profile, given_profile, options)
    else:
        if given_profile is not None:
            raise click.UsageError(f"--profile is for a saved plan, and `{profile}` is none")
        priced = _priced(ctx, profile, options)
    if as_json and stored is not None and stored.step_s != priced.step_s:
        say("note", f"{profile} says {stored.step_s!r} s a step; priced anew, it is {priced.step_s!r} s")
    try:
        write(priced, outputs, embed=not no_embed)
    finally:
        show(
            priced,
            as_json=as_json,
            as_markdown=as_markdown,
            embed=not no_embed,
            stored_step_s=None if stored is None else stored.step_s,
        )


def _is_plan(name: str) -> bool:
    """Whether `name` is that of a file which `hpgo plan` wrote."""
    from hpgo.model.builtin import MODELS

    try:
        if name in MODELS or not Path(name).is_file():  # what a pipe gives, it gives once
            return False
        with Path(name).open("rb") as file:
            return b'"hpgo.plan"' in file.read(200)
    except (OSError, ValueError):  # reading it as a profile gives the reason; ValueError: a NUL in the name
        return False


def _is_given(ctx: click.Context, param: click.Parameter) -> bool:
    return ctx.get_parameter_source(str(param.name)) is ParameterSource.COMMANDLINE


def _anew(plan: str, profile: str | None, options: dict[str, Any]) -> tuple[Plan, Plan]:
    """A saved plan, and the same priced anew."""
    from hpgo.machine.cluster import Cluster
    from hpgo.model.formats import read_profile
    from hpgo.planning.plans import Plan

    stored = Plan.read(plan)
    cluster = options["cluster"]
    with as_options():
        priced = stored.reprice(
            profile=None if profile is None else read_profile(profile, **of_profile(options)),
            cluster=None if cluster is None else Cluster.read(cluster),
        )
    return stored, priced


def _priced(ctx: click.Context, profile: str, options: dict[str, Any]) -> Plan:
    """The plan with the stages that the command line names."""
    from hpgo.machine.cluster import Cluster
    from hpgo.model.formats import read_profile
    from hpgo.planning.planner import evaluate

    with as_options():
        read = read_profile(profile, **of_profile(options))  # first: it may be meant as a saved plan
        for param in ctx.command.params:
            if param.name in {"cluster", "global_batch_size", "stages"} and not _is_given(ctx, param):
                raise click.MissingParameter(ctx=ctx, param=param)
        return evaluate(
            read,
            Cluster.read(options["cluster"]),
            _counted(read, options["stages"]),
            global_batch_size=options["global_batch_size"],
            **settings(options),
        )
