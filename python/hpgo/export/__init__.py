"""Plans for launchers: each module writes what one framework accepts, and refuses what it can't run.

hpgo.export.torchtitan(plan)  # text; hpgo.export.save(plan, "torchtitan", "job.toml") writes it
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpgo.base.documents import write_text
from hpgo.base.errors import ArgumentError
from hpgo.base.wording import near
from hpgo.export.deepspeed import deepspeed
from hpgo.export.megatron import megatron
from hpgo.export.torchtitan import torchtitan

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from hpgo.planning.plans import Plan

__all__ = ["LAUNCHERS", "deepspeed", "megatron", "save", "torchtitan"]

LAUNCHERS: dict[str, Callable[[Plan], str]] = {"megatron": megatron, "deepspeed": deepspeed, "torchtitan": torchtitan}
"""What a plan can be written for."""


def save(plan: Plan, launcher: str, path: str | os.PathLike[str]) -> None:
    """Writes `plan` for one of `LAUNCHERS`. Raises ArgumentError, also for a plan that the launcher can't run."""
    if launcher not in LAUNCHERS:
        raise ArgumentError(f"there is no exporter `{launcher}`", near(str(launcher), LAUNCHERS))
    write_text(path, LAUNCHERS[launcher](plan), ArgumentError)
