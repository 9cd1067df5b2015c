"""`hpgo serve` under people and pages who ask too much: it refuses, ends what nobody waits for, and answers on."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from soak import Served

import hpgo
from hpgo.page.cache import Store
from hpgo.page.origins import foreign
from hpgo.page.pool import Limits, Pool, UnavailableError
from hpgo.page.worker import PageRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")

LARGE = "num_stages=100&num_batches=1000"  # 200,000 actions
LIMIT = "num_stages=1000&num_batches=1000"
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """`hpgo serve` as its user starts it, but in Python's development mode, which complains about nothing."""
    server = Served(python=("-X", "dev"))
    yield server
    assert server.stop() == 130
    # asyncio then also reports what keeps it for a tenth of a second, such as imports.
    assert [line for line in server.said if not line.startswith("Executing <")] == ["\n", "interrupted\n"]


@pytest.fixture(scope="module")
def plan() -> dict[str, object]:
    cluster = hpgo.Cluster.preset("dapple-c")
    document = json.loads(hpgo.plan(hpgo.read_profile("vgg-19"), cluster, global_batch_size=1024).to_json())
    assert isinstance(document, dict)
    return document


def within(seconds: float, comes_true: Callable[[], bool]) -> bool:
    """Whether it does."""
    until_s = time.monotonic() + seconds
    while not comes_true():
        if time.monotonic() > until_s:
            return False
        time.sleep(0.05)
    return True


def post(served: Served, body: bytes, headers: dict[str, str] | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection(served.host, timeout=PATIENCE_S)
    try:
        connection.request("POST", "/plans?name=mine.json", body, headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def got(served: Served, path: str, headers: dict[str, str]) -> int:
    connection = http.client.HTTPConnection(served.host, timeout=PATIENCE_S)
    try:
        connection.request("GET", path, headers=headers)
        return connection.getresponse().status
    finally:
        connection.close()


# --- what is too much is refused


@pytest.mark.parametrize("path", ["/", "/picture.svg", "/export.html"])
@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("num_stages=1000000&num_batches=1", "1,000,000 ranks"),
        ("num_stages=10001&num_batches=1", "10,001 ranks"),
        ("num_stages=1001&num_batches=1000", "2,002,000 actions"),
        ("iterations=1000000", "64,000,000 actions"),
        ("virtual_stages_per_rank=1000000", "64,000,000 actions"),
        ("schedule=1f1b&schedule=gpipe&num_stages=5001&num_batches=1", "10,002 ranks"),
    ],
)
def test_too_many_actions_or_ranks_are_refused_before_any_work(
    served: Served, path: str, query: str, said: str
) -> None:
    status, body = served.ask(f"{path}?{query}")
    assert status == 400
    assert said in body.decode()
    assert "the limit of the page is" in body.decode()


def test_an_export_beyond_its_limit_is_refused(served: Served) -> None:
    status, body = served.ask("/export.json?num_stages=50&num_batches=1000")
    assert status == 400
    assert re.search(r"error: this json has \d+(\.\d+)? MB, but the limit is 67\.11 MB\nhint: ", body.decode())


def test_work_that_takes_too_long_or_too_much_memory_is_refused_and_the_rest_goes_on() -> None:
    for options, said in (
        # Too short for the page at the limit, and long enough for the plain one.
        (("--time-limit", "0.1s"), "the request takes longer than the limit of 100 ms"),
        (("--memory", "210MB", "--time-limit", "60s"), "the request takes more memory than the limit of 210 MB"),
    ):
        strict = Served(*options)
        try:
            status, body = strict.ask(f"/picture.html?{LIMIT}")
            assert (status, said in body.decode()) == (400, True), body
            status, body = strict.ask(f"/?{LIMIT}")
            assert (status, said in body.decode()) == (400, True), body
            assert b'value="1000"' in body  # the form, to ask for less
            assert within(PATIENCE_S, lambda strict=strict: strict.ask("/")[0] == 200)
        finally:
            assert strict.stop() == 130


@pytest.mark.parametrize(
    ("change", "status", "said"),
    [
        (
            {"global_batch_size": 512 * 10**6, "step_s": 1e9, "alternatives": []},
            400,
            "4,000,000 actions, but the limit of the page is 2,000,000",
        ),
        ({"global_batch_size": 10**400}, 400, "`mine.json`"),
        ({"notes": ["n" * 17 * 2**20]}, 413, "larger than 16 MiB"),
        ({"stages": []}, 400, "`mine.json`"),
    ],
)
def test_plans_pass_the_same_limits(
    served: Served, plan: dict[str, object], change: dict[str, object], status: int, said: str
) -> None:
    answered, text = post(served, json.dumps(plan | change).encode())
    assert (answered, said in text) == (status, True), text
    assert served.ask("/")[0] == 200


@pytest.mark.parametrize("body", [b"[" * 10**6, b'{"a":' * 10**5, b"\xff\xfe", b"", b"9" * 10**6])
def test_what_is_no_plan_is_refused(served: Served, body: bytes) -> None:
    assert post(served, body)[0] == 400
    assert served.ask("/")[0] == 200


def test_no_more_than_four_files_are_on_their_way_in(served: Served, plan: dict[str, object]) -> None:
    slow = [http.client.HTTPConnection(served.host, timeout=PATIENCE_S) for _ in range(4)]
    body = json.dumps(plan).encode()
    for connection in slow:
        connection.putrequest("POST", "/plans?name=slow.json")
        connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body[:100])
    assert within(PATIENCE_S, lambda: post(served, body)[0] == 503)
    for connection in slow:
        connection.send(body[100:])
        assert connection.getresponse().status == 201
        connection.close()
    assert post(served, body)[0] == 201


def test_a_step_of_a_plan_within_limits_is_not_repeated_beyond_them(served: Served, plan: dict[str, object]) -> None:
    status, name = post(served, json.dumps(plan).encode())
    assert status == 201
    assert served.ask(f"/?plan={name}")[0] == 200
    status, body = served.ask(f"/?plan={name}&iterations=1000000")
    assert (status, b"8,000,000 actions" in body) == (400, True)


# --- nobody keeps others waiting


@pytest.mark.slow
def test_small_requests_are_answered_while_large_ones_wait() -> None:
    """In every run, the tests below hold what a full queue says, and that others are served beside large requests."""
    busy = Served()
    try:
        with ThreadPoolExecutor(45) as clients:
            large = [
                clients.submit(busy.ask, f"/picture.svg?{LARGE}&p2p_time={number / 8}", 120) for number in range(45)
            ]
            assert within(PATIENCE_S, busy.works_on_large_requests)
            small = [busy.ask(f"/?num_batches={number}")[0] for number in range(1, 21)]
            answered_before = sum(one.done() and one.result()[0] == 200 for one in large)
            statuses = [one.result()[0] for one in as_completed(large)]
        assert small == [200] * 20
        # Those beyond the queue are told at once to come again.
        assert set(statuses) == {200, 503}
        assert statuses.count(503) == 45 - 2 - 32
        assert answered_before < 17
    finally:
        assert busy.stop() == 130


def test_a_full_queue_says_when_to_come_again() -> None:
    busy = Served("--workers", "1")
    try:
        waiting = [http.client.HTTPConnection(busy.host, timeout=PATIENCE_S) for _ in range(33)]
        for connection in waiting:
            connection.request("GET", f"/picture.svg?{LIMIT}")
        refused = http.client.HTTPConnection(busy.host, timeout=PATIENCE_S)
        assert within(PATIENCE_S, busy.works_on_large_requests)
        time.sleep(0.5)
        refused.request("GET", f"/?{LIMIT}")
        answer = refused.getresponse()
        assert (answer.status, answer.getheader("Retry-After")) == (503, "2")
        assert b"32 requests are waiting" in answer.read()
        for connection in (*waiting, refused):
            connection.close()
        # Those who left no longer wait.
        assert busy.ask(f"/picture.txt?{LARGE}")[0] == 200
    finally:
        assert busy.stop() == 130


def test_a_request_waits_for_a_worker_no_longer_than_it_may_work(monkeypatch: pytest.MonkeyPatch) -> None:
    async def endless(*_: object) -> None:
        await asyncio.Event().wait()

    async def asked() -> None:
        pool = Pool(1, 2, Limits(2**30, 0.05))
        monkeypatch.setattr(pool, "_work", endless)
        first = asyncio.create_task(pool.run(PageRequest("page")))
        await asyncio.sleep(0)
        with pytest.raises(UnavailableError, match="the request has waited for 50 ms, the time limit, behind others"):
            await pool.run(PageRequest("page"))
        assert not first.done()
        first.cancel()
        await pool.close()
        with pytest.raises(UnavailableError, match="hpgo is stopping"):
            await first

    asyncio.run(asked())


def test_work_for_a_client_that_left_ends(served: Served) -> None:
    served.abandon(f"/export.json?{LIMIT}", after_s=0.8)
    time.sleep(2)
    assert within(3, lambda: not served.works_on_large_requests())
    before_s = served.cpu_s()
    time.sleep(3)
    # Who works gets more, however many others do; this export takes half a minute.
    assert served.cpu_s() - before_s < 0.15


def test_a_process_that_breaks_takes_nothing_else_with_it(served: Served) -> None:
    with ThreadPoolExecutor(1) as client:
        broken = client.submit(served.ask, f"/?{LIMIT}&p2p_time=0.25")
        assert within(PATIENCE_S, served.works_on_large_requests)
        for child in served.children():
            os.kill(child, signal.SIGKILL)
        status, body = broken.result()
    assert (status, b"ended with code -9" in body) == (500, True)
    assert within(PATIENCE_S, lambda: served.ask("/?num_batches=3")[0] == 200)


# --- what is kept


def test_answers_are_not_kept_beyond_their_budget(served: Served) -> None:
    for warm in range(3):
        served.ask(f"/picture.html?{LARGE}&transfer_time={warm / 64}")
    before = served.memory_bytes()
    for number in range(12):
        status, _ = served.ask(f"/picture.html?{LARGE}&p2p_time={number / 64}")
        assert status == 200
    assert within(PATIENCE_S, lambda: served.memory_bytes() - before < 200e6)


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 60), st.booleans())))
def test_a_store_keeps_the_last_used_within_its_budget(steps: list[tuple[str, int, bool]]) -> None:
    store = Store[str, int](100)
    used: list[str] = []  # the last used at the end
    sizes: dict[str, int] = {}
    for key, size, is_put in steps:
        if is_put:
            store.put(key, size, size)
            sizes[key] = size
        elif store.get(key) is None:
            continue
        used = [*(one for one in used if one != key), key]
        while sum(sizes[one] for one in used) > 100:
            used.pop(0)
        assert [one for one, _ in store.items()] == used
        assert store.held_bytes == sum(sizes[one] for one in used) <= 100


def test_loaded_plans_make_place_for_others(served: Served, plan: dict[str, object]) -> None:
    names = []
    for number in range(70):
        status, name = post(served, json.dumps(plan | {"profile": f"model {number}"}).encode())
        assert status == 201, name
        names.append(name)
    status, body = served.ask("/")
    assert status == 200
    assert body.count(b"mine.json</option>") == 64
    assert served.ask(f"/?plan={names[-1]}")[0] == 200
    status, body = served.ask(f"/?plan={names[0]}")
    assert (status, b"holds no plan" in body) == (400, True)


def test_a_plan_of_the_command_line_stays(plan: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "given.json").write_text(json.dumps(plan))
    server = Served(str(tmp_path / "given.json"))
    try:
        for number in range(70):
            assert post(server, json.dumps(plan | {"profile": f"model {number}"}).encode())[0] == 201
        _, body = server.ask("/")
        found = re.search(r'<option value="(\w+)">given\.json</option>', body.decode())
        assert found
        assert server.ask(f"/?plan={found[1]}")[0] == 200
    finally:
        assert server.stop() == 130


# --- who is answered


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 201),
        ({"Origin": "http://{host}", "Sec-Fetch-Site": "same-origin"}, 201),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "http://{host}.evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": ""}, 403),
        ({"Origin": "http://["}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}, 403),
        ({"Host": "evil.example"}, 400),
        ({"Host": "evil.example", "Origin": "http://evil.example"}, 400),
    ],
)
def test_plans_are_taken_from_the_page_alone(
    served: Served, plan: dict[str, object], headers: dict[str, str], status: int
) -> None:
    filled = {name: value.format(host=served.host) for name, value in headers.items()}
    assert post(served, json.dumps(plan).encode(), filled)[0] == status


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}, 200),
        ({"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}, 200),
        # A link in somebody's mail.
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}, 200),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}, 403),
        ({"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors", "Origin": "http://127.0.0.1:1"}, 403),
        ({"Host": "evil.example"}, 400),
    ],
)
@pytest.mark.parametrize("path", ["/", "/picture.svg", "/export.txt"])
def test_other_sites_may_lead_here_but_not_ask(served: Served, path: str, headers: dict[str, str], status: int) -> None:
    assert got(served, path, headers) == status


@given(st.text(), st.text(min_size=1))
def test_any_origin_but_our_own_is_foreign(origin: str, host: str) -> None:
    own = {f"http://{host}".lower(), f"https://{host}".lower()}
    assert foreign("GET", {"host": host, "origin": origin}) == (origin.lower() not in own)
    assert not any(foreign("GET", {"host": host, "origin": one}) for one in own)


# --- how it ends


@pytest.mark.parametrize(("by", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_one_signal_ends_it_with_all_its_processes_whatever_they_do(by: signal.Signals, code: int) -> None:
    server = Served()
    idle = http.client.HTTPConnection(server.host, timeout=PATIENCE_S)
    idle.request("GET", "/")
    idle.getresponse().read()
    answers: list[int] = []
    clients = [
        threading.Thread(target=lambda: answers.append(server.ask(f"/export.json?{LIMIT}")[0])) for _ in range(5)
    ]
    for client in clients:
        client.start()
    assert within(PATIENCE_S, lambda: len(server.children()) == 3 and server.works_on_large_requests())
    children = server.children()
    began_s = time.monotonic()
    assert server.stop(by) == code
    assert time.monotonic() - began_s < 10  # two at most, but where others work too
    assert [child for child in children if Path(f"/proc/{child}").exists()] == []
    for client in clients:
        client.join()
    assert answers == [503] * 5
    idle.close()
    assert "Traceback" not in "".join(server.said)


def test_nobody_works_on_when_the_server_was_killed() -> None:
    server = Served("--time-limit", "1s")
    server.ask("/")
    server.abandon(f"/export.json?{LIMIT}", after_s=0.5)
    children = server.children()
    assert children
    assert server.stop(signal.SIGKILL) == -signal.SIGKILL
    assert within(PATIENCE_S, lambda: not any(Path(f"/proc/{child}").exists() for child in children))


# --- all of it


@pytest.mark.slow
def test_it_stands_a_thousand_requests() -> None:
    run = subprocess.run(
        [sys.executable, Path(__file__).parent / "soak.py", "1000"],
        capture_output=True,
        text=True,
        timeout=500,
        check=True,
    )
    seen = json.loads(run.stdout)
    statuses = seen["statuses"]
    assert sum(statuses.values()) == 1000
    assert set(statuses) == {"small 200", "large 200", "abandoned"}
    assert seen["ended_s"]["max"] < 5  # two, where nobody else works
    assert seen["memory_mb"]["last"] - seen["memory_mb"]["first"] <= 200
    assert (seen["exit_code"], seen["children_left"]) == (130, [])


@pytest.mark.slow
def test_connections_that_ask_for_nothing_make_room_for_those_of_others() -> None:
    server = Served()
    host, _, port = server.host.partition(":")
    idle = [socket.create_connection((host, int(port)), timeout=60) for _ in range(700)]
    until_s, status = time.monotonic() + 60, 0
    while status != 200 and time.monotonic() < until_s:
        with suppress(OSError):  # as long as there is no room
            status = server.ask("/")[0]
        time.sleep(0.5)
    assert status == 200
    for one in idle:
        with suppress(ConnectionResetError):
            assert one.recv(1) == b""
        one.close()
    assert server.said == []
    assert server.stop() == 130


def test_a_process_that_has_lost_its_server_ends_without_a_word() -> None:
    script = "from hpgo.page.worker import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", script, str(2**32), "10", "0"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as worker:  # fmt: skip
        assert worker.stdout is not None
        worker.stdout.close()
        _, said = worker.communicate(timeout=120)
    assert (worker.returncode, said) == (0, b"")
