"""Megatron-LM's pipeline layouts: which layers make a stage, and so how many stages there are.

`Et*3|(tt|)*29,m|L`: stages are separated by `|`; E is the embedding, t a transformer layer, m a layer of multi-piece
prediction, L the loss. `x*n` repeats a letter or a bracket; commas mean nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from hpgo.base.checks import check_int, check_text
from hpgo.base.messages import shorten
from hpgo.base.validated import Record
from hpgo.errors import ArgumentError

if TYPE_CHECKING:
    from hpgo.programs.schedule import Schedule

_MOST_LETTERS = 1_000_000
_LETTERS = "EtmL"


@dataclass(frozen=True, slots=True)
class PipelineLayout(Record):
    """Layers of each stage, as letters; stage s is on rank s mod p."""

    stages: tuple[str, ...]

    @classmethod
    def from_text(cls, text: str) -> PipelineLayout:
        """Reads what Megatron's `--pipeline-model-parallel-layout` takes.

        Raises ArgumentError where a letter is unknown, a bracket isn't closed, or the layout is huge.

        >>> PipelineLayout.from_text("Et|(tt|)*2tL").stages
        ('Et', 'tt', 'tt', 'tL')
        """
        short = shorten(check_text("a layout", text))
        pieces = re.findall(r"\*\s*\d+|.", text.replace(",", "").replace(" ", ""))
        open_parts: list[str] = [""]
        last = ""
        for piece in pieces:
            if piece == "(":
                open_parts.append("")
                last = ""
            elif piece == ")":
                if len(open_parts) == 1:
                    raise ArgumentError(f"layout `{short}` closes a bracket that isn't open", "write `(tt|)*3`")
                last = open_parts.pop()
                open_parts[-1] += last
            elif piece.startswith("*") and len(piece) > 1:
                times = int(piece[1:])
                if not last or times == 0:
                    raise ArgumentError(f"layout `{short}` repeats nothing", "write a letter or a bracket before `*`")
                if len(last) * times > _MOST_LETTERS:
                    raise ArgumentError(
                        f"layout `{short}` has more than {_MOST_LETTERS} layers", "repeat less", code="too_large"
                    )
                open_parts[-1] += last * (times - 1)
                last = ""
            elif piece in _LETTERS or piece == "|":
                last = piece
                open_parts[-1] += piece
            else:
                raise ArgumentError(
                    f"layout `{short}` has `{shorten(piece)}`",
                    "use E, t, m and L for layers, `|` between stages, `*n` to repeat",
                )
            if sum(map(len, open_parts)) > _MOST_LETTERS:
                raise ArgumentError(
                    f"layout `{short}` has more than {_MOST_LETTERS} layers", "repeat less", code="too_large"
                )
        if len(open_parts) > 1:
            raise ArgumentError(f"layout `{short}` leaves a bracket open", "write `(tt|)*3`")
        return cls(tuple(open_parts[0].split("|")))

    def __str__(self) -> str:
        """The shortest text without brackets: repeated letters as `t*n`.

        >>> str(PipelineLayout(("Ettt", "tt", "tL")))
        'Et*3|tt|tL'
        """
        return "|".join(
            "".join(
                letter * count if count < 3 else f"{letter}*{count}"
                for letter, run in groupby(stage)
                if (count := len(list(run)))
            )
            for stage in self.stages
        )

    def chunks(self, ranks: int) -> int:
        """Stages a rank; raises ArgumentError if they don't come out even."""
        ranks = check_int("ranks", ranks)
        if len(self.stages) % ranks:
            raise ArgumentError(
                f"{len(self.stages)} stages can't be spread evenly over {ranks} ranks",
                "let the number of stages be a multiple of the ranks",
            )
        return len(self.stages) // ranks

    def schedule(self, *, ranks: int, micro_batches: int, group_size: int | None = None) -> Schedule:
        """What Megatron runs on this layout: 1F1B, interleaved if a rank has several stages.

        `group_size` is its `microbatch_group_size_per_vp_stage`, the number of ranks if left out.
        """
        from hpgo.programs.schedule import schedule

        chunks = self.chunks(ranks)
        micro_batches = check_int("micro_batches", micro_batches)
        if chunks == 1:
            return schedule("1f1b", ranks=ranks, micro_batches=micro_batches)
        group_size = min(ranks, micro_batches) if group_size is None else group_size
        return schedule("interleaved", ranks=ranks, micro_batches=micro_batches, chunks=chunks, group_size=group_size)
