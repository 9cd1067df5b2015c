"""Files of plans, programs and chains: which of them a file holds is for the file to say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpgo.base.documents import parse, read_text
from hpgo.base.errors import ArgumentError
from hpgo.planning.chain.plans import ChainPlan
from hpgo.planning.plans import Plan
from hpgo.programs.program import Program

if TYPE_CHECKING:
    import os


def read_any(path: str | os.PathLike[str]) -> Plan | Program | ChainPlan:
    """The plan or the program in the file `path`. Raises ArgumentError that names the file and what is wrong with it.

    >>> import hpgo
    >>> orders = hpgo.schedule("1f1b", ranks=1, micro_batches=2)
    >>> hpgo.program(orders, [(["a"], [0])], micro_batch_size=1, global_batch_size=2).save("one.json")
    >>> type(read_any("one.json")).__name__
    'Program'
    """
    text = read_text(path, ArgumentError)
    document = parse(text, str(path), ArgumentError) if text.lstrip().startswith("{") else None
    kinds: dict[object, type[Program | ChainPlan]] = {"hpgo.program": Program, "hpgo.chain": ChainPlan}
    form = document.get("format") if isinstance(document, dict) else None
    return (kinds.get(form, Plan) if isinstance(form, str) else Plan).from_json(text, source=str(path))
