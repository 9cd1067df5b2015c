"""Files of plans, programs, chains and ways: which of them a file holds is for the file to say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpgo.base.documents import parse, read_text
from hpgo.errors import ArgumentError
from hpgo.planning.chain.plans import ChainPlan
from hpgo.planning.files import LLM_PLAN_FORMAT
from hpgo.planning.plans import Plan
from hpgo.programs.program import Program

if TYPE_CHECKING:
    import os

    from hpgo.llm.plan import LlmPlan


def read_any(path: str | os.PathLike[str]) -> Plan | Program | ChainPlan:
    """The plan or the program in the file `path`. Raises ArgumentError that names the file and what is wrong with it.

    >>> import pathlib, tempfile
    >>> import hpgo
    >>> program = hpgo.program(
    ...     hpgo.schedule("1f1b", ranks=1, micro_batches=2), [(["a"], [0])], micro_batch_size=1, global_batch_size=2
    ... )
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     program.save(pathlib.Path(folder) / "one.json")
    ...     read_any(pathlib.Path(folder) / "one.json") == program
    True
    """
    text, form = _text_and_form(path)
    kinds: dict[object, type[Program | ChainPlan]] = {"hpgo.program": Program, "hpgo.chain": ChainPlan}
    return kinds.get(form, Plan).from_json(text, source=str(path))


def read_with_llm_plans(path: str | os.PathLike[str]) -> Plan | Program | ChainPlan | LlmPlan:
    """As `read_any`, for those who also take ways of training a transformer."""
    text, form = _text_and_form(path)
    if form != LLM_PLAN_FORMAT:
        return read_any(path)
    from hpgo.llm.plan import LlmPlan  # which others do without

    return LlmPlan.from_json(text, source=str(path))


def _text_and_form(path: str | os.PathLike[str]) -> tuple[str, str | None]:
    """What the file holds, and its `format` where it has one."""
    text = read_text(path, ArgumentError)
    document = parse(text, str(path), ArgumentError) if text.lstrip().startswith("{") else None
    form = document.get("format") if isinstance(document, dict) else None
    return text, form if isinstance(form, str) else None
