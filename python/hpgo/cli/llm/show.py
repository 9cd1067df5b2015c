"""`hpgo llm show`: the blocks, parameters and operations that a model's config describes."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

import click

from hpgo.base.documents import json_text
from hpgo.base.messages import printable
from hpgo.cli.command import Options, as_options, option, takes
from hpgo.cli.llm.options import COUNT, MODEL
from hpgo.cli.terminal import table
from hpgo.cli.values import AS_JSON

if TYPE_CHECKING:
    from hpgo.model.transformer import Kind, Transformer

_SEQ_LENGTH = 4096
"""Default tokens per sequence to count operations, or the model's longest sequence if that is shorter. Not tuned."""


class ShowOptions(Options):
    """Options on the model, and on the sequences for which operations are counted."""

    model: str = MODEL
    seq_length: int | None = option(
        "--seq-length", type=COUNT, metavar="N", help="Tokens per sequence, to count operations.  [default: 4096]"
    )
    as_json: bool = AS_JSON


@takes(ShowOptions)
def command(options: ShowOptions) -> None:
    """Show what a model's config describes: its blocks, parameters and operations.

    MODEL is a name that `hpgo models transformers` lists, a Hugging Face config.json, or a YAML file with its sizes.

    A token uses only the experts that it is routed to: its active parameters. Operations are the FLOP that a training
    step needs per token, forward and backward, without recomputation. Masked attention scores don't count.

    \b
    Examples:
      hpgo llm show llama-3-8b
      hpgo llm show config.json --seq-length 32768
      hpgo llm show deepseek-v3 --json
    """
    from hpgo.llm.estimate import model_flop
    from hpgo.llm.parallelism import check_positions
    from hpgo.model.formats.transformers import transformer_of

    model = transformer_of(options.model)
    seq_length = options.seq_length or min(_SEQ_LENGTH, model.longest or _SEQ_LENGTH)
    with as_options():
        check_positions(model, seq_length)
    # Attention grows with the square of the length, so operations per token depend on it.
    flop_per_token = model_flop(model, seq_length, 1) / seq_length
    if options.as_json:
        click.echo(json_text(_document(model, seq_length, flop_per_token)))
    else:
        _print(model, seq_length, flop_per_token)


def _blocks(model: Transformer) -> list[tuple[range, Kind]]:
    """Return the runs of equal blocks, in order."""
    kinds = groupby(range(model.layers), key=model.kind)
    runs = [(kind, list(numbers)) for kind, numbers in kinds]
    return [(range(numbers[0], numbers[-1] + 1), kind) for kind, numbers in runs]


def _words(model: Transformer, kind: Kind) -> tuple[str, str]:
    """Return the attention and the feed-forward network of a block in a few words."""
    attention = "latent attention" if model.latent is not None else "attention"
    if kind.window:
        attention += f", window of {kind.window:,}"
    if not kind.experts:
        return attention, f"dense {model.ffn:,}"
    shared = f" + shared {model.shared_ffn:,}" if model.shared_ffn else ""
    return attention, f"{model.experts} experts of {model.expert_ffn:,}, {model.experts_per_token} per token{shared}"


def _print(model: Transformer, seq_length: int, flop_per_token: float) -> None:
    click.echo(
        f"{printable(model.name)}: {model.parameters / 1e9:,.2f} billion parameters,"
        f" {model.active_parameters / 1e9:,.2f} billion active per token"
    )
    click.echo()
    facts = [
        ("blocks", f"{model.layers}"),
        ("hidden size", f"{model.hidden:,}"),
        ("attention heads", f"{model.heads}, {model.kv_heads} of keys and values, {model.head_dim} wide"),
        ("vocabulary", f"{model.vocab:,}{', tied with the LM head' if model.tied else ''}"),
        ("longest sequence", f"{model.longest:,}" if model.longest else "not stated"),
        ("operations", f"{flop_per_token / 1e9:,.1f} GFLOP per token, with {seq_length:,} tokens per sequence"),
    ]
    if model.further_tokens:
        facts.append(("multi-token prediction", f"{model.further_tokens} more, not counted in parameters"))
    for name, value in facts:
        click.echo(f"{name:22}  {value}")
    click.echo()
    rows = [
        (f"{run.start}–{run.stop - 1}" if len(run) > 1 else f"{run.start}", *_words(model, kind),
         f"{model.kind_parameters(kind):,}")
        for run, kind in _blocks(model)
    ]  # fmt: skip
    table(("blocks", "attention", "feed-forward", "parameters each"), rows)
    click.echo()
    parts = [
        (name, f"{count:,}", f"{100 * count / model.parameters:.1f} %")
        for name, count in model.parameters_by_part().items()
        if count
    ]
    table(("part", "parameters", "share"), parts)


def _document(model: Transformer, seq_length: int, flop_per_token: float) -> dict[str, object]:
    return {
        "format": "hpgo.llm_model",
        "version": 1,
        "name": model.name,
        "hidden": model.hidden,
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "vocab": model.vocab,
        "parameters": model.parameters,
        "active_parameters": model.active_parameters,
        "parameters_by_part": model.parameters_by_part(),
        "seq_length": seq_length,
        "model_flop_per_token": flop_per_token,
        "blocks": [
            {
                "blocks": [run.start, run.stop],
                "experts": model.experts if kind.experts else 0,
                "sliding_window": kind.window,
                "parameters": model.kind_parameters(kind),
            }
            for run, kind in _blocks(model)
        ],
    }
