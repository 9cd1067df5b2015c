"""`hpgo llm show`: the blocks, parameters and operations that a model's config describes."""

from __future__ import annotations

from dataclasses import asdict
from itertools import groupby
from string import ascii_uppercase
from typing import TYPE_CHECKING

import click

from hpgo.base.documents import json_text
from hpgo.base.messages import printable
from hpgo.cli.command import Options, as_options, option, takes
from hpgo.cli.llm.options import COUNT, MODEL
from hpgo.cli.terminal import table
from hpgo.cli.values import AS_JSON

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpgo.model.blocks import Block
    from hpgo.model.transformer import Kind, Tower, Transformer

_SEQ_LENGTH = 4096
"""Default tokens per sequence to count operations, or the model's longest sequence if that is shorter. Not tuned."""

_WEIGHT_BYTES = 2
_LONGEST_START = 8
"""Number of blocks before a repetition that `pattern_text` tries. Models start with at most a few of another kind."""


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

    MODEL is a name that `hpgo models transformers` lists, such as llama-3-8b or, from the Hugging Face hub,
    Qwen/Qwen2.5-72B. Or it is a config.json of transformers, or a YAML file with sizes.

    A token uses only the experts that it is routed to: its active parameters. Operations are the FLOP that a training
    step needs per token, forward and backward, without recomputation. Masked attention scores don't count.

    \b
    Examples:
      hpgo llm show llama-3-8b
      hpgo llm show Qwen/Qwen2.5-72B
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


def _letters(model: Transformer) -> dict[Kind, str]:
    """Return a letter for each kind of block, in order of appearance; further kinds have numbers."""
    return {kind: ascii_uppercase[at] if at < len(ascii_uppercase) else str(at) for at, kind in enumerate(model.kinds)}


def pattern_text(names: Sequence[str]) -> str:
    """Return a sequence of names as runs and repetitions, the shortest of a few ways to say it.

    >>> pattern_text("AAAB" * 12), pattern_text("A" * 3 + "B" * 58), pattern_text("AB" * 20 + "A")
    ('12 × (3 A, B)', '3 A, 58 B', '20 × (A, B), A')
    """
    found = [_runs(names)]
    for start in range(min(len(names), _LONGEST_START)):
        rest = names[start:]
        for period in range(2, len(rest) // 2 + 1):
            if all(rest[at] == rest[at - period] for at in range(period, len(rest))):
                times, over = divmod(len(rest), period)
                parts = (_runs(names[:start]), f"{times} × ({_runs(rest[:period])})", _runs(rest[len(rest) - over :]))
                found.append(", ".join(part for part in parts if part))
                break
    return min(found, key=len)


def _runs(names: Sequence[str]) -> str:
    counted = ((name, sum(1 for _ in run)) for name, run in groupby(names))
    return ", ".join(name if count == 1 else f"{count} {name}" for name, count in counted)


def _mixer(block: Block) -> str:
    """Return the attention and the scans of a block in a few words."""
    words = []
    for one in block.attention:
        limits = ((one.window, "window of {:,}"), (one.chunk, "chunks of {:,}"), (one.selected, "{:,} selected"))
        parts = [text.format(tokens) for tokens, text in limits if tokens]
        parts += [
            word for is_so, word in ((one.sinks, "sinks"), (one.gate, "gate"), (not one.causal, "both ways")) if is_so
        ]
        words.append(", ".join(["latent attention" if one.latent is not None else "attention", *parts]))
    words += [f"{one.rule.replace('_', ' ')} scan, {one.heads:,} heads" for one in block.scans]
    return " + ".join(words) or ("convolution" if block.convs else "–")


def _network(block: Block) -> str:
    """Return the feed-forward network of a block in a few words."""
    if (sparse := block.experts) is None:
        return f"dense {block.ffn:,}" if block.ffn else "–"
    shared = f" + shared {block.ffn:,}" if block.ffn else ""
    return f"{sparse.count} experts of {sparse.width:,}, {sparse.per_token} per token{shared}"


def _number(parameters: int) -> str:
    """Return a number of parameters in billions, or in millions below one billion."""
    return f"{parameters / 1e9:,.2f} billion" if parameters >= 1e9 else f"{parameters / 1e6:,.1f} million"


def _print(model: Transformer, seq_length: int, flop_per_token: float) -> None:
    click.echo(
        f"{printable(model.name)}: {_number(model.parameters)} parameters,"
        f" {_number(model.active_parameters)} active per token"
    )
    click.echo()
    letters = _letters(model)
    pattern = pattern_text([letters[model.kind(layer)] for layer in range(model.layers)])
    held = next((one for kind in letters for one in model.block(kind).attention), None)
    facts = [
        ("blocks", f"{model.layers}: {pattern}"),
        ("hidden size", f"{model.hidden:,}"),
        (
            "attention heads",
            f"{held.heads}, {held.kv_heads} of keys and values, {held.head_dim} wide" if held else "none",
        ),
        (
            "vocabulary" if model.embeds else "labels",
            f"{model.vocab:,}{', tied with the LM head' if model.tied else ''}",
        ),
        ("longest sequence", f"{model.longest:,}" if model.longest else "not stated"),
        ("weights", f"{_WEIGHT_BYTES * model.parameters / 1e9:,.2f} GB in 16 bits"),
        ("operations", f"{flop_per_token / 1e9:,.1f} GFLOP per token, with {seq_length:,} tokens per sequence"),
    ]
    if model.further_tokens:
        facts.append(("multi-token prediction", f"{model.further_tokens} more, not counted in parameters"))
    if (tower := model.tower) is not None:
        facts.append((f"{tower.name} tower", f"{len(tower.pattern)} blocks, {tower.hidden:,} wide"))
        if tower.patches:
            sizes = f"{tower.patches:,} patches, {-(-tower.patches // tower.merge):,} tokens"
            facts.append(
                (
                    f"each {'clip' if tower.name == 'audio' else 'image'}",
                    f"{sizes}, {3 * tower.flop_per_image / 1e9:,.1f} GFLOP with a trained tower",
                )
            )
    for name, value in facts:
        click.echo(f"{name:22}  {value}")
    click.echo()
    rows = [
        (letter, f"{model.kinds[kind]}", _mixer(model.block(kind)), _network(model.block(kind)),
         f"{model.kind_parameters(kind):,}")
        for kind, letter in letters.items()
    ]  # fmt: skip
    table(("block", "number", "attention", "feed-forward", "parameters each"), rows)
    click.echo()
    parts = [
        (name, f"{count:,}", f"{100 * count / model.parameters:.1f} %")
        for name, count in model.parameters_by_part().items()
        if count
    ]
    table(("part", "parameters", "share"), parts)


def _tower(tower: Tower) -> dict[str, object]:
    """Return the tower's facts. Operations of an image are all of a step, a third of which a frozen tower needs."""
    return {
        "name": tower.name,
        "hidden": tower.hidden,
        "blocks": len(tower.pattern),
        "parameters": tower.parameters,
        "patches_per_image": tower.patches or None,
        "tokens_per_image": -(-tower.patches // tower.merge) or None,
        "model_flop_per_image": 3 * tower.flop_per_image if tower.patches else None,
    }


def _document(model: Transformer, seq_length: int, flop_per_token: float) -> dict[str, object]:
    letters = _letters(model)
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
        "weights_bytes": _WEIGHT_BYTES * model.parameters,
        "seq_length": seq_length,
        "model_flop_per_token": flop_per_token,
        "tower": None if model.tower is None else _tower(model.tower),
        "blocks": {
            letter: {
                "number": model.kinds[kind],
                "parameters": model.kind_parameters(kind),
                "experts": 0 if (sparse := model.block(kind).experts) is None else sparse.count,
                "sliding_window": kind.window,
                "operators": asdict(model.block(kind)),
            }
            for kind, letter in letters.items()
        },
        "pattern": [letters[model.kind(layer)] for layer in range(model.layers)],
    }
