"""The stub says of every record what crosses from the native module: its fields, and theirs."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from toys import chain

import hpgo
from hpgo import _core
from hpgo.planning.problem import PlanningProblem
from hpgo.programs.schedule import _Request

if TYPE_CHECKING:
    from collections.abc import Callable

STUB = ast.parse((Path(hpgo.__file__).parent / "_core.pyi").read_text(encoding="utf-8"))
RECORDS = {
    node.name: {field.target.id: ast.unparse(field.annotation) for field in node.body}
    for node in STUB.body
    if isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "TypedDict" for base in node.bases)
}
PROFILE = chain([1.0, 2.0], 8.0, 4.0)
PAIR = hpgo.Cluster.of(nodes=2, devices_per_node=1, intra_gbit_s=1, inter_gbit_s=1)
QUESTION = PlanningProblem.of(PROFILE, PAIR, global_batch_size=4, schedule="1f1b")
ORDERS = hpgo.schedule("1f1b", ranks=2, micro_batches=4)


def crossed(function: str, ask: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the native `function` returns while `ask` runs."""
    returned = []
    native = getattr(_core, function)

    def heard(*given: Any) -> Any:
        returned.append(native(*given))
        return returned[-1]

    with monkeypatch.context() as patch:
        patch.setattr(_core, function, heard)
        ask()
    return returned[0]


def check(annotation: str, value: Any, found: set[str]) -> None:
    """Compares records and what is in them; collects the names of those met."""
    if annotation.startswith("list["):
        inner = annotation.removesuffix(" | None")[5:-1]
        for each in value or []:
            check(inner, each, found)
    elif annotation.startswith("tuple["):
        for part, each in zip(annotation[6:-1].split(", "), value, strict=True):
            check(part, each, found)
    elif annotation.removesuffix(" | None") in RECORDS and value is not None:
        name = annotation.removesuffix(" | None")
        found.add(name)
        assert set(value) == set(RECORDS[name]), name
        for field, inner in RECORDS[name].items():
            if not inner.startswith("list[tuple"):
                check(inner, value[field], found)


def returns(function: str, within: str | None = None) -> str:
    body = STUB.body if within is None else next(n.body for n in STUB.body if getattr(n, "name", "") == within)
    node = next(node for node in body if isinstance(node, ast.FunctionDef) and node.name == function)
    return ast.unparse(node.returns)


def test_every_record_has_the_fields_that_the_stub_says(monkeypatch: pytest.MonkeyPatch) -> None:
    met: set[str] = set()
    request = _Request(2, 4, None, None, None, None, None)
    values = {
        "build_schedule": _core.build_schedule("1f1b", request),
        "read_schedule": _core.read_schedule("mine", ORDERS.to_text()),
        "without_flush": _core.without_flush(hpgo.schedule("pipedream", ranks=2, micro_batches=4), 2),
        "schedule_families": _core.schedule_families(),
        "partition_chain": crossed("partition_chain", lambda: hpgo.partition(PROFILE, PAIR), monkeypatch),
    }
    for function, value in values.items():
        check(returns(function), value, met)
    session = QUESTION.session
    answers = {
        "plan": session.plan(QUESTION, None, None),
        "search": session.search(QUESTION, ["1f1b", "zb"], None, None),
        "classics": session.classics(QUESTION, None),
        "closest": session.closest(QUESTION, None),
        "exhaustive": session.exhaustive(QUESTION),
        "min_memory": session.min_memory(QUESTION, 1e9, 1e15, None),
        "evaluate": session.evaluate(QUESTION, [([0], [0]), ([1], [1])], None, ORDERS),
        "evaluate_each": session.evaluate_each(QUESTION, [([0, 1], [0, 1])], [(2, [False], None)]),
    }
    for method, value in answers.items():
        check(returns(method, "Session"), value, met)
    simulated = crossed("simulate", lambda: hpgo.simulate(ORDERS, transfer_s=0.1), monkeypatch)
    for part in ("actions", "times", "transfers", "syncs", "idle", "measures"):
        check(returns(part, "Simulation"), getattr(simulated, part)(), met)
    assert met == set(RECORDS)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"framework": "megatron"},
        {"tolerance": 0.005},
        {"schedule": "zb"},
        {"schedule": "auto"},
    ],
    ids=str,
)
def test_a_question_crosses_the_border_ten_times_at_most(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each crossing converts what it is given: many of them cost more than the search of a small question."""
    calls: list[str] = []
    native = _core.Session

    class Counted:
        def __init__(self, *given: Any) -> None:
            calls.append("Session")
            self._own = native(*given)

        def __getattr__(self, name: str) -> Any:
            calls.append(name)
            return getattr(self._own, name)

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            calls.append(name)
            return function(*given)

        return call

    for name, value in list(vars(_core).items()):
        if callable(value) and not isinstance(value, type):
            monkeypatch.setattr(_core, name, counted(name, value))
    monkeypatch.setattr(_core, "Session", Counted)
    hpgo.plan("bert-48", "dapple-a", global_batch_size=64, **options)
    assert len(calls) <= 10, calls
