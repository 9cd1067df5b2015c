"""Command `hpgo models`: list the built-in models and write their files."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import click

from hpgo.base.documents import make_folder
from hpgo.base.units import format_bytes, format_seconds
from hpgo.cli.command import Group, Options, argument, takes
from hpgo.cli.terminal import sources, table, width
from hpgo.cli.values import AS_JSON, PROFILE, Known
from hpgo.model.builtin import MODELS, built_in
from hpgo.model.formats import read_profile, write_profile
from hpgo.model.formats.native import write_yaml
from hpgo.model.hub import hub_date, hub_names, is_variant
from hpgo.model.transformer_presets import TRANSFORMERS, named_transformer, transformer_names


class ListOptions(Options):
    """Options of `hpgo models` without a command."""

    as_json: bool = AS_JSON


@takes(ListOptions, cls=Group, invoke_without_command=True)
def command(options: ListOptions) -> None:
    """List the models that can be planned by name, show one, or write their profiles.

    The step time is that of a forward and backward pass on one device, for the batch size of the profile.

    \b
    Examples:
      hpgo models
      hpgo models --json
      hpgo models show bert-48 > bert.yaml
      hpgo models write profiles
      hpgo models write . bert-48
      hpgo models transformers
    """
    if click.get_current_context().invoked_subcommand is not None:
        return
    profiles = {name: built_in(name) for name in MODELS}
    entries = [
        {
            "name": name,
            "layers": len(profile.layers),
            "batch_size": profile.batch_sizes[0],
            "parameter_bytes": profile.parameter_bytes,
            "step_s": sum(layer.forward_s[0] + layer.backward_s[0] for layer in profile.layers),
            "file": MODELS[name].file,
            "source": profile.source,
        }
        for name, profile in profiles.items()
    ]
    if options.as_json:
        click.echo(json.dumps(entries, indent=2))
        return
    table(
        ["model", "layers", "parameters", "batch", "step time"],
        [
            (
                name,
                len(profile.layers),
                format_bytes(profile.parameter_bytes),
                profile.batch_sizes[0],
                format_seconds(sum(layer.forward_s[0] + layer.backward_s[0] for layer in profile.layers)),
            )
            for name, profile in profiles.items()
        ],
    )
    sources({name: profile.source for name, profile in profiles.items()})


class WriteOptions(Options):
    """Options of `hpgo models write`."""

    folder: Path = argument(type=click.Path(path_type=Path, file_okay=False))
    names: tuple[str, ...] = argument(nargs=-1, type=Known("model", lambda: MODELS), metavar="[MODEL]...")


@takes(WriteOptions, within=command)
def write(options: WriteOptions) -> None:
    """Write profiles into FOLDER as PipeDream text.

    Without MODEL, all profiles are written. Files of the same name are replaced.

    \b
    Examples:
      hpgo models write profiles
      hpgo models write . bert-48 xlnet-36
    """
    # Build all profiles before the first file is written, so that a wrong name writes nothing.
    profiles = {name: built_in(name) for name in options.names or MODELS}
    make_folder(options.folder)
    for name, profile in profiles.items():
        path = options.folder / MODELS[name].file
        write_profile(profile, path)
        click.echo(path)


class ShowOptions(Options):
    """Options of `hpgo models show`."""

    model: str = argument(type=PROFILE)


@takes(ShowOptions, within=command)
def show(options: ShowOptions) -> None:
    """Print MODEL, a name or a file, as an editable YAML profile in seconds and bytes.

    \b
    Examples:
      hpgo models show vgg-16
      hpgo models show bert-48 > bert.yaml
    """
    click.echo(write_yaml(read_profile(options.model)), nl=False)


class TransformersOptions(Options):
    """Options of `hpgo models transformers`."""

    as_json: bool = AS_JSON


@takes(TransformersOptions, within=command)
def transformers(options: TransformersOptions) -> None:
    """List the transformers that `hpgo llm` and `hpgo estimate` accept by name.

    They have sizes but no layer times; `hpgo llm show` prints one. Active parameters count only the experts of one
    token. A tied weight counts once.

    The table has hpgo's own names. The names of the Hugging Face hub follow, in which case and organization don't
    matter: `Qwen/Qwen2.5-72B` is `qwen2.5-72b`, too. Of models with the same shape, such as a base model and its
    chat model, only the first is printed. --json lists all.

    \b
    Examples:
      hpgo models transformers
      hpgo models transformers --json
    """
    if options.as_json:
        entries = [
            {
                "name": name,
                "layers": one.layers,
                "parameters": one.parameters,
                "active_parameters": one.active_parameters,
                "parameters_by_part": one.parameters_by_part(),
            }
            for name in transformer_names()
            if (one := named_transformer(name))
        ]
        click.echo(json.dumps(entries, indent=2))
        return
    table(
        ["transformer", "layers", "hidden", "heads", "parameters", "active"],
        [
            (name, one.layers, one.hidden, one.heads, f"{one.parameters:,}", f"{one.active_parameters:,}")
            for name, one in TRANSFORMERS.items()
        ],
    )
    firsts: dict[str, list[str]] = {}
    for name in hub_names():
        if not is_variant(name):
            organization, _, short = name.partition("/")
            firsts.setdefault(organization, []).append(short)
    variants = sum(map(is_variant, hub_names()))
    texts = [f"{organization}/: {', '.join(names)}" for organization, names in firsts.items()]
    texts.append(f"{variants} more names have the shape of one of these, such as Qwen/Qwen2.5-72B-Instruct")
    click.echo(f"\nnames of the Hugging Face hub, as of {hub_date()}")
    for text in texts:
        click.echo(textwrap.fill(text, width(), subsequent_indent="  ", break_on_hyphens=False))
