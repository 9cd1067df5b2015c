"""Command `hpgo evaluate`: estimate the step time of a given plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from hpgo.base.messages import did_you_mean, shorten
from hpgo.cli.command import argument, option, takes
from hpgo.cli.plan import SavingOptions, show, write
from hpgo.cli.plan_options import SECTIONS, ProblemOptions, as_options, schedule_option
from hpgo.cli.terminal import say
from hpgo.cli.values import PROFILE, PROFILE_OF_PLAN, cluster_option
from hpgo.errors import ArgumentError, HpgoError

if TYPE_CHECKING:
    from hpgo.model.profile import Profile
    from hpgo.planning.plans import Plan

_OPEN = {
    "profile", "given_profile", "cluster", "profile_batch_size", "profile_layer_counts", "profile_boundary",
    "as_json", "as_markdown", "outputs", "no_embed",
}  # fmt: skip
"""Parameters that are allowed with a saved plan, because the file does not set them."""


class _Stages(click.ParamType):  # type: ignore[type-arg]
    """Layers and devices of each stage, such as `26@0-7,27@8-15`.

    A stage has a number of layers or the name of its last layer.
    """

    name = "stages"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[tuple[int | str, list[int]]]:
        """Return the layers and the devices of each stage."""
        if isinstance(value, list):
            return value
        stages: list[tuple[int | str, list[int]]] = []
        for word in str(value).split(","):
            # Layer names may contain `@`, so the last one separates the devices.
            layers, at, places = word.strip().rpartition("@")
            devices: list[int] = []
            for place in places.split("+"):
                first, dash, last = place.strip().partition("-")
                if not (at and layers and _is_count(first) and (not dash or _is_count(last))):
                    self.fail(f"`{word[:40]}` is not a stage; write layers@devices: 26@0-7 or 4@0-3+8-11", param, ctx)
                # Check the size before the range is built: it could fill the memory.
                if int(last or first) - int(first) >= 2**20:
                    self.fail(f"`{place[:40]}` has more than 1,048,576 devices", param, ctx)
                devices += range(int(first), int(last or first) + 1)
            if not devices:
                self.fail(f"`{word[:40]}` has no devices; write a range from low to high: 0-7", param, ctx)
            stages.append((int(layers) if _is_count(layers) else layers, devices))
        return stages

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Complete names of layers of the profile on the command line."""
        from hpgo.model.formats import read_profile

        before, comma, begun = incomplete.rpartition(",")
        # While an option has no value yet, click has not parsed the arguments: they are still in `ctx.args`.
        named = [ctx.params.get("profile"), *ctx.args]
        try:
            profile = read_profile(next(filter(None, named)))
        except (StopIteration, HpgoError):
            return []
        ids = [layer.id for layer in profile.layers]
        return [CompletionItem(f"{before}{comma}{name}@") for name in ids if name.startswith(begun)]


def _counted(profile: Profile, stages: list[tuple[int | str, list[int]]]) -> list[tuple[int, list[int]]]:
    """Return the stages with their numbers of layers.

    Raises ArgumentError for names of layers that are unknown or not in the order of the profile.
    """
    ends = {layer.id: number for number, layer in enumerate(profile.layers, start=1)}
    counted, begin = [], 0
    for layers, devices in stages:
        if isinstance(layers, str):
            end = ends.get(layers)
            if end is None:
                raise ArgumentError(
                    f"`{profile.name}` has no layer `{shorten(layers)}`",
                    did_you_mean(layers, ends),
                    code="unknown_name",
                )
            if end <= begin:
                last = profile.layers[begin - 1].id
                raise ArgumentError(
                    f"a stage ends with layer `{layers}`, but the stage before it ends later, with `{last}`",
                    "write the stages in the order of the profile's layers",
                )
            layers = end - begin  # noqa: PLW2901 -- the name is not needed after this
        counted.append((layers, devices))
        begin += layers
    return counted


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 9


_SECTIONS = {title: names.format("stages given_profile ") for title, names in SECTIONS.items()} | {
    "Output": "outputs no_embed as_json as_markdown",
}


class EvaluateOptions(ProblemOptions, SavingOptions):
    """Options of `hpgo evaluate`."""

    profile: str = argument(type=PROFILE)
    cluster: str | None = cluster_option(required=False)
    global_batch_size: int | None = option(
        "-b", "--global-batch-size", type=int, metavar="N", help="Samples per training step, over all devices."
    )
    schedule: str | None = schedule_option("eager_1f1b")
    stages: list[tuple[int | str, list[int]]] | None = option(
        "--stages",
        type=_Stages(),
        metavar="LAYERS@DEVICES,…",
        help="Each stage as its number of layers (or the name of its last layer) and its devices.",
    )
    given_profile: str | None = PROFILE_OF_PLAN


@takes(EvaluateOptions, sections=_SECTIONS)
def command(options: EvaluateOptions) -> None:
    """Estimate the step time of a plan that you give, with the cost model and report of `hpgo plan`.

    Devices are numbered node by node from 0: `0-7` are eight devices, `0-3+8-11` are four on each of two
    8-device nodes.

    Instead of PROFILE you can give a PLAN.json of `hpgo plan -o`. The command then evaluates it again with the profile
    and cluster in the file, and reports if the step time differs.

    \b
    Examples:
      hpgo evaluate bert-48 --cluster dapple-a -b 64 --stages "26@0-7,27@8-15"
      hpgo evaluate vgg-19 --cluster dapple-c -b 2048 --stages "22@0-14,4@15"
      hpgo evaluate bert-48 -c dapple-a -b 64 --stages "encoder-9@0-7,pooler@8-15"
      hpgo evaluate plan.json
      hpgo evaluate lean.json --profile model.yaml --cluster h100:4
    """
    ctx = click.get_current_context()
    options.check_one_format()
    stored = None
    if _is_plan(options.profile):
        # The file of a plan contains its problem. A second value would contradict it silently.
        given = [param for param in ctx.command.params if _is_given(ctx, param) and param.name not in _OPEN]
        if given:
            raise click.UsageError(
                f"`{options.profile}` is a saved plan, which contains its problem: leave out"
                f" {', '.join(param.opts[0] for param in given)}"
            )
        stored, evaluated = _reevaluated(options)
    else:
        if options.given_profile is not None:
            raise click.UsageError(f"--profile is only for a saved plan, but `{options.profile}` is a profile")
        evaluated = _evaluated(ctx, options)
    # JSON has no line for the stored step, so the difference goes to stderr.
    if options.as_json and stored is not None and stored.step_s != evaluated.step_s:
        say("note", f"the step time in {options.profile} is {stored.step_s!r} s, but now {evaluated.step_s!r} s")
    try:
        write(evaluated, options.outputs, embed=not options.no_embed)
    finally:
        show(
            evaluated,
            as_json=options.as_json,
            as_markdown=options.as_markdown,
            embed=not options.no_embed,
            saved=(*options.outputs, *(() if stored is None else (options.profile,))),
            stored_step_s=None if stored is None else stored.step_s,
        )


def _is_plan(name: str) -> bool:
    """Return whether `name` is a plan file."""
    from hpgo.model.builtin import MODELS

    try:
        # A pipe can be read only once, so its first bytes must not be consumed here.
        if name in MODELS or not Path(name).is_file():
            return False
        with Path(name).open("rb") as file:
            return b'"hpgo.plan"' in file.read(200)
    except (OSError, ValueError):  # ValueError: a NUL in the name. Reading the file as a profile reports either.
        return False


def _is_given(ctx: click.Context, param: click.Parameter) -> bool:
    return ctx.get_parameter_source(str(param.name)) is ParameterSource.COMMANDLINE


def _reevaluated(options: EvaluateOptions) -> tuple[Plan, Plan]:
    """Return a saved plan, and the plan evaluated again."""
    from hpgo.hardware.cluster import Cluster
    from hpgo.model.formats import read_profile
    from hpgo.planning.plans import Plan

    # The stored plan is kept, because the report compares both step times.
    stored = Plan.read(options.profile)
    profile, cluster = options.given_profile, options.cluster
    with as_options():
        evaluated = stored.reevaluate(
            profile=None if profile is None else read_profile(profile, **options.of_file()),
            cluster=None if cluster is None else Cluster.read(cluster),
        )
    return stored, evaluated


def _evaluated(ctx: click.Context, options: EvaluateOptions) -> Plan:
    """Return the plan with the stages of the command line."""
    from hpgo.hardware.cluster import Cluster
    from hpgo.model.formats import read_profile
    from hpgo.planning.planner import evaluate

    with as_options():
        # Read the profile first: if it is neither profile nor plan, that is the error to report, not a missing option.
        read = read_profile(options.profile, **options.of_file())
        if options.cluster is None:
            raise missing(ctx, "cluster")
        if options.global_batch_size is None:
            raise missing(ctx, "global_batch_size")
        if options.stages is None:
            raise missing(ctx, "stages")
        schedule: dict[str, Any] = {} if options.schedule is None else {"schedule": options.schedule}
        return evaluate(
            read,
            Cluster.read(options.cluster),
            _counted(read, options.stages),
            global_batch_size=options.global_batch_size,
            **schedule,
            **options.of_problem(),
        )


def missing(ctx: click.Context, name: str) -> click.MissingParameter:
    """Return the error for a parameter that this request needs."""
    (param,) = (param for param in ctx.command.params if param.name == name)
    return click.MissingParameter(ctx=ctx, param=param)
