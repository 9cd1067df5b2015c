"""Names of the wrong kind: a transformer instead of a profile, or a cluster instead of a model.

The error names the kind. The hint is a command that accepts it.
"""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from hpgo.base.files import exists
from hpgo.base.messages import nearest_names, shorten
from hpgo.errors import ArgumentError, HpgoError, ProfileError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import click

SEQ_LENGTH = 4096
"""Tokens of a sequence in the commands that hints suggest."""
_CALLED = {
    "profile": "a model with measured layer times",
    "transformer": "a transformer without measured layer times",
    "cluster": "a cluster",
    "schedule": "a schedule",
}
_WANTED = {
    "profile": "a model with measured layer times",
    "transformer": "a transformer",
    "plan": "the file of a plan",
    "workload": "a workload",
}
_THEN = {
    "draw": "draw plan.json -o plan.svg",
    "simulate": "simulate --plan plan.json",
    "run": "emulate plan.json",
    "emulate": "emulate plan.json",
    "export": "export plan.json --to torch -o job/",
    "launch": "launch plan.json --on slurm --script train.py",
    "explain": "evaluate plan.json",
    "calibrate": "calibrate plan.json run.timeline.json",
}
"""Next command for a plan, by the command that was typed; `view` and `serve` need no options."""
_THEN_OF_TRANSFORMERS = {
    "export": "export llm-plan.json --to megatron -o job/",
    "explain": "llm explain llm-plan.json",
}
"""Next command for an LLM plan, by the command that was typed."""


def kind_of(name: str) -> str | None:
    """Return the kind of `name`: a key of `_CALLED`, or None if the name is unknown.

    >>> kind_of("bert-48"), kind_of("llama-3-8b"), kind_of("h100:8"), kind_of("zb_v"), kind_of("x")
    ('profile', 'transformer', 'cluster', 'schedule', None)
    """
    from hpgo.hardware.presets import PRESETS
    from hpgo.model.builtin import MODELS
    from hpgo.model.transformer_presets import is_transformer
    from hpgo.programs.schedule import schedules

    if name in MODELS:
        return "profile"
    if is_transformer(name):
        return "transformer"
    # Names of clusters may have the number of nodes after a colon.
    if name.partition(":")[0] in PRESETS:
        return "cluster"
    return "schedule" if any(family.name == name for family in schedules()) else None


def check_kind(name: str, wanted: str, ctx: click.Context | None, *, own: Callable[[], Iterable[str]] = tuple) -> None:
    """Raise ArgumentError if `name` is a name of another kind than `wanted`, and no file has this name.

    `wanted` is a key of `_CALLED`, `plan` or `workload`. `own` returns the names that are valid here.
    """
    # While a shell completes, incomplete names are normal. A file of this name always wins.
    if (ctx is not None and ctx.resilient_parsing) or exists(name):
        return
    kind = kind_of(name)
    if kind in {None, wanted} or name in own():
        return
    command = "" if ctx is None else str(ctx.info_name)
    wanted_kind = _WANTED.get(wanted) or _CALLED[wanted]
    raise ArgumentError(
        f"`{name}` is {_CALLED[str(kind)]}, not {wanted_kind}",
        _hint(str(kind), wanted, name, command),
        code="wrong_kind_of_file",
    )


def _hint(kind: str, wanted: str, name: str, command: str) -> str:
    if wanted == "cluster":
        return "name a cluster, such as `-c h100:8`; `hpgo clusters` lists them"
    if wanted == "schedule":
        return "name a schedule, such as `--schedule zb_h1`; `hpgo schedules` lists them"
    if kind == "cluster":
        if wanted == "transformer":
            planned = f"hpgo llm plan llama-3-8b -c {name} -b 512 --seq-length {SEQ_LENGTH}"
        else:
            planned = f"hpgo plan bert-48 -c {name} -b 512"
        return f"name a cluster with -c: `{planned}`"
    if kind == "schedule":
        return f"name a schedule with --schedule: `hpgo simulate --schedule {name}`"
    if kind == "profile":
        planned = f"hpgo plan {name} -c dapple-a -b 64"
        if command == "infer":
            return f"plan it: `hpgo partition --profile {name} --cluster dapple-c --json > chain.json`"
        if wanted != "plan":
            return f"plan it: `{planned}`"
        return f"plan it: `{planned} -o plan.json`, then `hpgo {_THEN.get(command, f'{command} plan.json')}`"
    estimated = f"`hpgo estimate {name} --device h100 --dim tokens={SEQ_LENGTH} -o {name}.yaml`"
    planned = f"hpgo llm plan {name} {_large_enough(name)} --seq-length {SEQ_LENGTH}"
    if command == "evaluate":
        return f"plan it: `{planned}`"
    if wanted == "plan":
        if then := _THEN_OF_TRANSFORMERS.get(command):
            return f"plan it: `{planned} -o llm-plan.json`, then `hpgo {then}`"
        return f"draw its best configuration: `{planned} -o {name}.svg`; or estimate its layers: {estimated}"
    return f"estimate its layers: {estimated}"


def _large_enough(name: str) -> str:
    """Return options for a cluster and a batch that are large enough to train a transformer."""
    from hpgo.model.formats.transformers import transformer_of

    # 16 bytes of weights, gradients and optimizer state per parameter must fit in a third of the memory of a node with
    # 8 GPUs of 80 GB, which leaves the rest for activations.
    nodes = 2 ** max(0, math.ceil(math.log2(transformer_of(name).parameters * 16 / (8 * 80e9 / 3))))
    return f"-c h100:{nodes} -b {max(64, 8 * nodes)}"


def meant_as_transformer(name: str, cluster: str, global_batch_size: int) -> HpgoError | None:
    """Return the error for a transformer as the model of `hpgo plan`; None if `name` is not a transformer.

    Its hint is the command that plans the transformer on the same cluster and batch size.
    """
    from hpgo.model.builtin import MODELS
    from hpgo.model.formats.transformers import transformer_of
    from hpgo.model.transformer_presets import transformer_names

    if exists(name) and not (
        Path(name).is_file() or Path(name).is_dir()
    ):  # A pipe was read already and can't be read again.
        return None
    given = f"-c {shlex.quote(cluster)} -b {global_batch_size} --seq-length {SEQ_LENGTH}"
    try:
        transformer_of(name)
    except HpgoError:
        meant = nearest_names(name, [*MODELS, *transformer_names()])
        if not meant or meant[0] in MODELS or exists(name):
            return None
        # A name that is only similar is another model, such as a later one of the family.
        close = nearest_names(name, transformer_names(), minimum=0.8)
        asks = f"did you mean the transformer `{close[0]}`?" if close else "to plan a transformer by its config.json:"
        return ProfileError(
            f"unknown model: `{shorten(name)}` (no built-in model, no such file)",
            f"{asks} `hpgo llm plan {close[0] if close else 'config.json'} {given}`",
            code="unknown_name",
        )
    return ArgumentError(
        f"`{name}` has no layer profile, which `hpgo plan` needs",
        f"to choose tp, pp and dp for it, run `hpgo llm plan {shlex.quote(name)} {given}`",
    )
