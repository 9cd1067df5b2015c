"""How long the plan's page takes: `pytest tests/bench_page.py --benchmark-only`.

In headless chromium, beside a fresh `hpgo serve`. A first view has layers, stages, cluster, memory and words; the
picture of the step follows. An edit is a key on a cut, until the frame with the new price is painted. Each gives stages
that no answer was asked for before, as the server keeps answers, and begins when what stands below has followed, too.
"""

from __future__ import annotations

from http.client import HTTPConnection
from itertools import count
from typing import TYPE_CHECKING

import pytest
from soak import Served

import hpgo

if TYPE_CHECKING:
    from collections.abc import Iterator

_EDIT = """async (number) => {
  const before = window.hpgoPlan.facts;
  const moved = new KeyboardEvent("keydown", { key: "ArrowLeft", bubbles: true, cancelable: true });
  const cuts = [...document.querySelectorAll(".cut")];
  const from = number % cuts.length;
  // the next behind a stage that has a layer to give
  const ahead = [...cuts.slice(from), ...cuts.slice(0, from)];
  ahead.find((cut) => cut.getAttribute("aria-valuenow") > 1).dispatchEvent(moved);
  while (window.hpgoPlan.facts === before) await new Promise(requestAnimationFrame);
  const { port1, port2 } = new MessageChannel(); // whose message comes behind the frame
  await new Promise((painted) => { port1.onmessage = painted; port2.postMessage(null); });
}"""
_SETTLED = "() => new Promise((done) => requestAnimationFrame(() => setTimeout(() => requestAnimationFrame(done))))"


def two_stages() -> hpgo.Plan:
    """On two machines of eight."""
    return hpgo.plan(hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a"), global_batch_size=64)


def sixteen_stages() -> hpgo.Plan:
    """On 64 machines of eight, four for each stage: 16 stages, 64 micro-batches."""
    rows = [(3 + (at < 5), range(32 * at, 32 * at + 32)) for at in range(16)]
    cluster = hpgo.Cluster.preset("h100:64")
    return hpgo.evaluate(
        hpgo.read_profile("bert-48"), cluster, rows, global_batch_size=4096, pipeline_micro_batch_size=64
    )


def forty_eight_stages() -> hpgo.Plan:
    """On 48 of 64 devices, one for each stage: 128 micro-batches."""
    rows = [(1 + (at < 5), [at]) for at in range(48)]
    cluster = hpgo.Cluster.preset("h100:8")
    return hpgo.evaluate(
        hpgo.read_profile("bert-48"), cluster, rows, global_batch_size=512, pipeline_micro_batch_size=4
    )


class Question:
    """A server, and plans that it has not seen."""

    def __init__(self, plan: hpgo.Plan) -> None:
        self._server = Served()
        self._file, self._files = plan.to_json().encode(), count(1)

    def address(self) -> str:
        """Of the plan, as a file that differs from all before by blanks at its end."""
        connection = HTTPConnection(self._server.host)
        connection.request("POST", "/plans?name=plan.json", self._file + b" " * next(self._files))
        name = connection.getresponse().read().decode()
        connection.close()
        return f"http://{self._server.host}/plan?plan={name}"

    def stop(self) -> None:
        self._server.stop()


@pytest.fixture(scope="module", params=[two_stages, sixteen_stages, forty_eight_stages])
def question(request) -> Iterator[Question]:
    asked = Question(request.param())
    yield asked
    asked.stop()


@pytest.mark.parametrize("seen", [".layer", "#step svg"])
def test_first_view(benchmark, question: Question, tab, seen: str) -> None:
    def viewed(address: str) -> None:
        tab.goto(address)
        tab.locator(seen).first.wait_for()

    benchmark.pedantic(viewed, setup=lambda: ((question.address(),), {}), rounds=20)


def test_edit(benchmark, question: Question, tab) -> None:
    tab.goto(question.address())
    tab.locator("#step svg").wait_for()
    numbers = count()

    def settled() -> tuple[tuple[int], dict[str, object]]:
        tab.evaluate(_SETTLED)
        return (next(numbers),), {}

    benchmark.pedantic(lambda number: tab.evaluate(_EDIT, number), setup=settled, rounds=15)
