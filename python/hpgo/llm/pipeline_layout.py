"""Layouts of pipelines: the layers of each stage, written like `--pipeline-model-parallel-layout` of Megatron-LM.

`hpgo.programs.layout` reads the text. Here are the rules that a transformer adds.
"""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from hpgo.base.checks import check_list
from hpgo.base.messages import pluralize, safe_repr, shorten
from hpgo.errors import ArgumentError
from hpgo.programs.layout import PipelineLayout

if TYPE_CHECKING:
    from collections.abc import Sequence

_COUNTS = re.compile(r"\d{1,4}(?:\s*,\s*\d{1,4})*")
HINT = "write it like `Et*3|(tt|)*29,m|L`, or as the layers of each stage: `7,8,9,8`"


class StageLayers(NamedTuple):
    """The layers of all stages of a pipeline, in the order of the stages."""

    counts: tuple[int, ...]
    """Number of transformer layers of each stage."""
    further: tuple[int, ...]
    """Number of layers for multi-token prediction of each stage."""


def layout_text(counts: Sequence[int], further: int = 0, further_stage: int | None = None) -> str:
    """Return a layout with the layers of each stage, and layers that predict `further` tokens on one, or on the last.

    >>> layout_text([3, 0, 4]), layout_text([3, 0], further=1), layout_text([3, *[2] * 9, 1, 0], 1, 10)
    ('Et*3||t*4L', 'Et*3|mL', 'Et*3|(t*2|)*9tm|L')
    """
    stages = ["" if count == 0 else "t" if count == 1 else f"t*{count}" for count in counts]
    stages[-1 if further_stage is None else further_stage] += "m" * further
    runs = [(stage, len(list(run))) for stage, run in groupby([f"E{stages[0]}", *stages[1:-1]])]
    parts = [f"({stage}|)*{length}" if length > 2 else f"{stage}|" * length for stage, length in runs]
    return f"{''.join(parts)}{stages[-1]}L" if len(stages) > 1 else f"E{stages[0]}L"


def layout_of(given: str | Sequence[int], further: int) -> str:
    """Return a layout as text, given as such or as the layers of each stage.

    >>> layout_of("7, 8,9,8", 1), layout_of("Et|tL", 0)
    ('Et*7|t*8|t*9|t*8mL', 'Et|tL')
    """
    if isinstance(given, str):
        text = given.strip()
        if not _COUNTS.fullmatch(text):
            return text
        given = [int(count) for count in text.split(",")]
    else:
        # A range of any length is a sequence, too, so the number of entries has a limit.
        given = check_list("`pipeline_layout`", given, hint=HINT)
    if not given or any(isinstance(count, bool) or not isinstance(count, int) or count < 0 for count in given):
        raise ArgumentError(f"pipeline_layout is {safe_repr(given)}, but stages have whole numbers of layers", HINT)
    return layout_text(given, further)


@lru_cache(maxsize=256)
def parse_layout(text: str) -> StageLayers:
    """Return the layers of a layout. Raise ArgumentError unless Megatron-LM accepts it for some model.

    >>> parse_layout("Et*3|(tt|)*2,m|L")
    StageLayers(counts=(3, 2, 2, 0, 0), further=(0, 0, 0, 1, 0))
    """
    if re.search(r"\([^)]*\(", text):
        raise _refused(text, "must have no bracket in a bracket")
    stages = PipelineLayout.from_text(text).stages
    layers = "".join(stages)
    if layers[:1] + layers[-1:] != "EL" or layers.count("E") + layers.count("L") != 2:
        raise _refused(text, "must begin with its only E and end with its only L")
    if "t" in layers.partition("m")[2]:
        raise _refused(text, "must have all t before m")
    found = StageLayers(tuple(one.count("t") for one in stages), tuple(one.count("m") for one in stages))
    if sum(count > 0 for count in found.further) > 1:
        raise _refused(text, "must have all m in one stage")
    return found


def check_layout(text: str, *, pp: int, vpp: int, layers: int | None = None, further: int = 0, model: str = "") -> None:
    """Raise ArgumentError unless a layout has the stages of a pipeline, and the layers of a model if they are given.

    >>> check_layout("Ett|ttL", pp=2, vpp=1, layers=4)
    """
    found = parse_layout(text)
    stages = len(found.counts)
    if stages != pp * vpp:
        fits = f"use vpp={stages // pp}" if stages % pp == 0 else f"use a pp that divides {stages}"
        raise ArgumentError(
            f"pipeline_layout has {pluralize(stages, 'stage')}, but pp {pp} x vpp {vpp} has {pp * vpp}", fits
        )
    # Megatron-LM runs multi-token prediction only in a rank's last virtual stage.
    if any(found.further[: pp * (vpp - 1)]):
        raise _refused(text, f"must have m in one of the last {pp} stages, the last virtual stage of a rank")
    if pp > 1 and found.further[pp * (vpp - 1)]:
        raise _refused(text, "must not have m on the first rank")
    if layers is None:
        return
    for count, wanted, what in (
        (sum(found.counts), layers, "t for its layers"),
        (sum(found.further), further, "m for its multi-token prediction"),
    ):
        if count != wanted:
            raise ArgumentError(
                f"pipeline_layout has {count} {what}, but `{model}` has {wanted}", HINT, code="mismatch"
            )


def _refused(text: str, why: str) -> ArgumentError:
    return ArgumentError(f"pipeline_layout is `{shorten(text)}`, but it {why}", HINT)
