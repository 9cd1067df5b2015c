"""`hpgo plan --seq`: the quickest ways of training a transformer, instead of a plan for a profile."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import click
from click.core import ParameterSource

from hpgo.base.documents import json_text
from hpgo.base.errors import ArgumentError
from hpgo.base.wording import shorten
from hpgo.cli.questions import as_options
from hpgo.cli.terminal import width
from hpgo.cli.values import FILE, STILL
from hpgo.llm.parallelism import Precision

if TYPE_CHECKING:
    from collections.abc import Callable

_Command = TypeVar("_Command", bound="Callable[..., Any]")

_ALONE = ("precision", "top", "fix", "exclude", "tokens_per_batch", "platform", "picture", "front")
"""Parameters that are about transformers."""
_OPEN = {
    *_ALONE, "profile", "cluster", "global_batch_size", "devices", "seq", "as_json", "reserve", "launcher", "outputs",
}  # fmt: skip
"""Parameters that a transformer leaves open."""


class _Words(click.ParamType):  # type: ignore[type-arg]
    """`tp=4,pp=8`: words with commas between them."""

    name = "words"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        """The words in the order given."""
        del param, ctx
        return value if isinstance(value, tuple) else tuple(word.strip() for word in str(value).split(","))


def of_transformers(command: _Command) -> _Command:
    """Adds the options of `_ALONE`, and `--seq`, which asks for them."""
    options = (
        click.option(
            "--seq", type=click.IntRange(min=1), metavar="N",
            help="PROFILE is a transformer; tokens of a sequence. What follows is about transformers alone.",
        ),
        click.option(
            "--tokens-per-batch", type=click.IntRange(min=1), metavar="N",
            help="Tokens of a step, instead of sequences.",
        ),
        click.option(
            "--precision", type=click.Choice(get_args(Precision)), default="bf16",
            help="Of its products.  [bf16]",
        ),
        click.option(
            "--fix", type=_Words(), multiple=True, metavar="NAME=VALUE[,…]",
            help="Only ways with `tp=4`, or cp, ep, pp, vpp, pp_schedule, dp, zero_stage, micro-batch-size"
            " or recompute. Repeatable.",
        ),
        click.option(
            "--exclude", type=_Words(), multiple=True, metavar="NAME[=VALUE][,…]",
            help="Only ways without `cp`, say, or without `zero_stage=0`. Repeatable.",
        ),
        click.option(
            "--platform", type=FILE, metavar="FILE", help="What steps measured there say: `hpgo calibrate --steps`.",
        ),
        click.option(
            "--picture", type=STILL, metavar="FILE", help="The quickest way on its cluster: .svg, .png, .pdf or .html.",
        ),
        click.option(
            "--front", type=STILL, metavar="FILE", help="Draw time against memory likewise: ways that need less of it.",
        ),
        click.option(
            "--top", type=click.IntRange(1, 1000), default=10, metavar="N", help="How many ways to list.  [10]"
        ),
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def check_no_transformer(ctx: click.Context) -> None:
    """Raises click.UsageError if an option is given that is about transformers alone."""
    if beside := [name for name in _ALONE if _is_given(ctx, name)]:
        raise click.UsageError(f"--{beside[0].replace('_', '-')} is for transformers, whose --seq is to be given")


def missing(ctx: click.Context, name: str) -> click.MissingParameter:
    """The error for a parameter that nothing else replaces."""
    (param,) = (param for param in ctx.command.params if param.name == name)
    return click.MissingParameter(ctx=ctx, param=param)


def show_ways(ctx: click.Context) -> None:
    """Lists the quickest ways of training a transformer; the best one in full, and into a file if one is named."""
    from hpgo.llm.platform import Platform
    from hpgo.llm.search import plan_llm
    from hpgo.machine.cluster import Cluster
    from hpgo.show.llm_report import document, lines, listed

    given = [param for param in ctx.command.params if _is_given(ctx, str(param.name)) and param.name not in _OPEN]
    if given:
        raise click.UsageError(f"with --seq, leave out {given[0].opts[0]}: it is about profiles")
    asked = ctx.params
    sizes, devices = _batches(ctx), asked["devices"] or (None,)
    if len(sizes) * len(devices) > 1:
        raise click.UsageError("with --seq, give one batch size and one number of devices")
    if drawn := [output for output in asked["outputs"] if Path(output).suffix not in {"", ".json"}]:
        raise click.UsageError(f"with --seq, -o writes .json, not `{shorten(drawn[0])}`; --picture draws")
    model, where = asked["profile"], Cluster.read(asked["cluster"])
    question: dict[str, Any] = {
        "global_batch_size": sizes[0],
        "seq_length": asked["seq"],
        "precision": asked["precision"],
        "devices": devices[0],
        "framework": asked["launcher"] or "megatron",
        "fix": _fixed([word for words in asked["fix"] for word in words]),
        "exclude": [word for words in asked["exclude"] for word in words],
        "headroom_bytes": asked["reserve"],
        "platform": None if asked["platform"] is None else Platform.read(asked["platform"]),
    }
    with as_options():
        found = plan_llm(model, where, top=asked["top"], **question)
    try:
        for output in asked["outputs"]:
            found.plan().save(output)
        if asked["picture"] is not None:
            from hpgo.show.llm_figure import draw_llm_plan

            draw_llm_plan(found.best, where, asked["picture"])
        if asked["front"] is not None:
            from hpgo.llm.pareto_front import llm_pareto_front
            from hpgo.show.pareto_figure import draw_pareto_front

            draw_pareto_front(llm_pareto_front(model, where, **question), asked["front"])
    finally:  # what was found is shown, even if it can't be saved
        if asked["as_json"]:
            kept = {"configurations": found.configurations, "simulated": found.simulated, "framework": found.framework}
            kept |= {"alike": len(found.alike), "best": found.estimates.index(found.best) + 1}
            click.echo(json_text(kept | {"estimates": [document(one) for one in found.estimates]}))
        else:
            click.echo("\n".join([*lines(found.best, width()), "", *listed(found, width())]))


def _batches(ctx: click.Context) -> tuple[int, ...]:
    """Sequences of a step, as `-b` or `--tokens-per-batch` says."""
    sizes: tuple[int, ...] | None = ctx.params["global_batch_size"]
    tokens: int | None = ctx.params["tokens_per_batch"]
    if tokens is None:
        if sizes is None:
            raise missing(ctx, "global_batch_size")
        return sizes
    if sizes is not None:
        raise click.UsageError("give one of --global-batch-size and --tokens-per-batch")
    seq: int = ctx.params["seq"]
    whole, rest = divmod(tokens, seq)
    if rest:
        around = " and ".join(str(count * seq) for count in (whole, whole + 1) if count)
        raise ArgumentError(
            f"{tokens} tokens are no whole number of sequences of {seq}", f"the nearest that are: {around}"
        )
    return (whole,)


def _fixed(words: list[str]) -> dict[str, int | str]:
    """`tp=4` as a name and a value."""
    fixed: dict[str, int | str] = {}
    for word in words:
        name, equals, value = (part.strip() for part in word.partition("="))
        if not (name and equals and value):
            raise click.UsageError(f"--fix takes NAME=VALUE, like tp=4, not `{shorten(word)}`")
        if name in fixed:
            raise click.UsageError(f"--fix names {shorten(name)} twice")
        fixed[name] = value
    return fixed


def _is_given(ctx: click.Context, name: str) -> bool:
    return ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
