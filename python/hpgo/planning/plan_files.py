"""Read files of plans, programs, chain plans and LLM plans. The format key in the file decides which."""

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
    """Return the plan or program in the file `path`. Raises ArgumentError with the name of the file.

    >>> import pathlib, tempfile
    >>> import hpgo
    >>> program = hpgo.program(
    ...     hpgo.schedule("1f1b", ranks=1, micro_batches=2), [(["a"], [0])], pipeline_micro_batch_size=1,
    ...     global_batch_size=2,
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
    """Return the plan or program in the file `path`, which may also be an LLM plan."""
    text, form = _text_and_form(path)
    if form != LLM_PLAN_FORMAT:
        return read_any(path)
    from hpgo.llm.plan import LlmPlan  # It imports the cost model of LLMs, which other files don't need.

    return LlmPlan.from_json(text, source=str(path))


def _text_and_form(path: str | os.PathLike[str]) -> tuple[str, str | None]:
    """Return the text of a file, and the value of its key `format`, if it has one."""
    text = read_text(path, ArgumentError)
    # Other text is parsed later by the reader of plans, which reports that the file is not a plan.
    document = parse(text, str(path), ArgumentError) if text.lstrip().startswith("{") else None
    form = document.get("format") if isinstance(document, dict) else None
    return text, form if isinstance(form, str) else None
