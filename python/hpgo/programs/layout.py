"""Megatron-LM's pipeline layouts: the layers of each stage, written as text.

In `Et*3|(tt|)*29,m|L`, `|` separates stages. E is the embedding, t a transformer layer, m a layer of multi-token
prediction, L the loss. `x*n` repeats a letter or a bracket. Commas have no meaning.
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

_MAX_LAYERS = 1_000_000
_LETTERS = "EtmL"


@dataclass(frozen=True, slots=True)
class PipelineLayout(Record):
    """The layers of each stage as letters. Stage s is on rank s mod p."""

    stages: tuple[str, ...]

    @classmethod
    def from_text(cls, text: str) -> PipelineLayout:
        """Read the value of Megatron-LM's `--pipeline-model-parallel-layout`.

        Raises ArgumentError for an unknown letter, an open bracket, or more than 1,000,000 layers.

        >>> PipelineLayout.from_text("Et|(tt|)*2tL").stages
        ('Et', 'tt', 'tt', 'tL')
        """
        short = shorten(check_text("a layout", text))
        pieces = re.findall(r"\*\s*\d+|.", text.replace(",", "").replace(" ", ""))
        # A stack of the texts in open brackets. The last entry is the innermost one.
        open_parts: list[str] = [""]
        last = ""
        for piece in pieces:
            if piece == "(":
                open_parts.append("")
                last = ""
            elif piece == ")":
                if len(open_parts) == 1:
                    raise ArgumentError(f"layout `{short}` has `)` without `(`", "write `(tt|)*3`, for instance")
                last = open_parts.pop()
                open_parts[-1] += last
            elif piece.startswith("*") and len(piece) > 1:
                times = int(piece[1:])
                if not last or times == 0:
                    raise ArgumentError(
                        f"layout `{short}` has `*` without a letter or bracket before it, or `*0`",
                        "write `t*3`, for instance",
                    )
                # Check before repeating: nested repeats multiply, and a short text can ask for more memory than there
                # is.
                if len(last) * times > _MAX_LAYERS:
                    raise ArgumentError(
                        f"layout `{short}` has more than {_MAX_LAYERS} layers", "repeat fewer layers", code="too_large"
                    )
                # The letter or bracket is in the text once already. Clearing `last` makes `t*2*3` an error.
                open_parts[-1] += last * (times - 1)
                last = ""
            elif piece in _LETTERS or piece == "|":
                last = piece
                open_parts[-1] += piece
            else:
                raise ArgumentError(
                    f"layout `{short}` has `{shorten(piece)}`, which is no layer",
                    "use E, t, m and L for layers, `|` between stages, `*n` to repeat",
                )
            if sum(map(len, open_parts)) > _MAX_LAYERS:
                raise ArgumentError(
                    f"layout `{short}` has more than {_MAX_LAYERS} layers", "repeat fewer layers", code="too_large"
                )
        if len(open_parts) > 1:
            raise ArgumentError(f"layout `{short}` has `(` without `)`", "write `(tt|)*3`, for instance")
        return cls(tuple(open_parts[0].split("|")))

    def __str__(self) -> str:
        """Return the layout as text without brackets, with repeated letters as `t*n`.

        >>> str(PipelineLayout(("Ettt", "tt", "tL")))
        'Et*3|tt|tL'
        """
        return "|".join(
            "".join(
                # Below three letters, `t*n` is no shorter than the letters.
                letter * count if count < 3 else f"{letter}*{count}"
                for letter, run in groupby(stage)
                if (count := len(list(run)))
            )
            for stage in self.stages
        )

    def virtual_stages_per_rank(self, ranks: int) -> int:
        """Return the number of virtual stages per rank. Raise ArgumentError if the stages can't be divided evenly."""
        ranks = check_int("ranks", ranks)
        if len(self.stages) % ranks:
            raise ArgumentError(
                f"{len(self.stages)} stages can't be divided evenly over {ranks} ranks",
                f"write a layout with a multiple of {ranks} stages",
            )
        return len(self.stages) // ranks

    def schedule(self, *, ranks: int, micro_batches: int, group_size: int | None = None) -> Schedule:
        """Return the schedule that Megatron-LM runs on this layout: 1F1B, interleaved if a rank has several stages.

        `group_size` is Megatron-LM's `microbatch_group_size_per_vp_stage`. None means the number of ranks.
        """
        from hpgo.programs.schedule import schedule

        virtual_stages_per_rank = self.virtual_stages_per_rank(ranks)
        micro_batches = check_int("micro_batches", micro_batches)
        if virtual_stages_per_rank == 1:
            return schedule("1f1b", ranks=ranks, micro_batches=micro_batches)
        group_size = min(ranks, micro_batches) if group_size is None else group_size
        return schedule(
            "interleaved",
            ranks=ranks,
            micro_batches=micro_batches,
            virtual_stages_per_rank=virtual_stages_per_rank,
            group_size=group_size,
        )
