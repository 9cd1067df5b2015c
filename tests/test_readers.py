"""Every reader ends soon, with an error of hpgo, whatever a file is: a device, a pipe that never ends, junk.

What a file may hold at most is bounded while it is read, and nested or repeated values are bounded by what they are.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner
from toys import chain

import hpgo
from hpgo.cli.main import group

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

MODELS = "m: {layers: 2, mem_MB: [1, 1], parameters_in: 4, parameters_out: [4, 4]}"
TYPES = "t: {bw_Mbps: 9, mem_MB: 99, model_profiles: {m: [{batch_size: 1, dtype: torch.float32, time_s: [1, 2]}]}}"
PROFILE = chain([1.0, 2.0, 1.0], 8.0, 4.0)
CLUSTER = hpgo.Cluster.of(nodes=2, devices_per_node=1, intra_gbit_s=10, inter_gbit_s=10)


def hosts(changed: str, path: Path) -> Any:
    """Asks PipeEdge's files, one of which is `path`."""
    given = {"models": MODELS, "device_types": TYPES, "devices": "t: [a, b]", "links": "lines: []"}
    files = {}
    for name, text in given.items():
        files[name] = path.with_name(f"{name}.yml")
        files[name].write_text(text, encoding="utf-8")
    return hpgo.partition_files(**files | {changed: path}, model="m", batch_size=1)


def command(*words: str) -> None:
    done = CliRunner().invoke(group, words, catch_exceptions=True)
    if done.exception is not None:
        raise done.exception


READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "profile as YAML": ("x.yaml", hpgo.read_profile),
    "profile as JSON": ("x.json", hpgo.read_profile),
    "profile of PipeDream": ("x-pbs-1.txt", hpgo.read_profile),
    "cluster": ("x.yaml", hpgo.Cluster.read),
    "plan": ("x.json", hpgo.Plan.read),
    "chain plan": ("x.json", hpgo.ChainPlan.read),
    "program": ("x.json", hpgo.Program.read),
    "orders": ("x.csv", hpgo.Schedule.read),
    "timeline as JSON": ("x.timeline.json", hpgo.Timeline.read),
    "timeline as arrays": ("x.npz", hpgo.Timeline.read),
    "models": ("x.yml", lambda path: hosts("models", path)),
    "device types": ("x.yml", lambda path: hosts("device_types", path)),
    "devices": ("x.yml", lambda path: hosts("devices", path)),
    "links": ("x.yml", lambda path: hosts("links", path)),
    "setup": ("x.yaml", lambda path: command("simulate", "--config", str(path))),
    "what to draw": ("x.json", lambda path: command("draw", str(path), "-o", str(path.with_name("out.svg")))),
    "what to export": ("x.json", lambda path: command("export", str(path), "--to", "torch")),
    "what to launch": ("x.json", lambda path: command("launch", str(path), "--on", "local", "--script", "a.py")),
    "what to evaluate": ("x.json", lambda path: command("evaluate", str(path))),
    "what to serve": ("x.json", lambda path: command("serve", str(path), "--port", "0", "--no-open")),
    "what to check": ("x.md", lambda path: command("reproduce", "--check", str(path))),
}


@contextlib.contextmanager
def fed(path: Path, piece: bytes) -> Iterator[None]:
    """A pipe at `path` to which `piece` is written again and again, until nobody reads."""
    os.mkfifo(path)
    ended = threading.Event()

    def feed() -> None:
        while not ended.is_set():
            with contextlib.suppress(BrokenPipeError), path.open("wb", buffering=0) as file:
                while not ended.is_set():
                    file.write(piece)

    writer = threading.Thread(target=feed, daemon=True)
    writer.start()
    try:
        yield
    finally:
        ended.set()
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # wakes a writer that waits for one
        os.set_blocking(reader, True)
        while writer.is_alive():
            os.read(reader, 2**16)
        os.close(reader)


@contextlib.contextmanager
def made(path: Path, kind: str) -> Iterator[None]:
    """What stands at `path`."""
    if kind == "/dev/zero":
        path.symlink_to(kind)
    elif kind == "a folder":
        path.mkdir()
    elif kind == "endless text":
        with fed(path, b"a: [0F0, 1]\n" * 6000):
            yield
        return
    else:
        path.write_bytes(JUNK[kind])
    yield


JUNK = {
    "nothing": b"",
    "one byte": b"{",
    "another byte": b"x",
    "no UTF-8": b'{"format": "\xff\xfe"}' * 10,
    "deep JSON": b'{"a":' * 100_000,
    "deep list": b"[" * 1_000_000,
    "deep YAML": b"".join(b" " * at + b"a:\n" for at in range(1500)),
    "laughs": "\n".join(
        ["a0: &a0 [lol, lol]", *(f"a{at}: &a{at} [{', '.join([f'*a{at - 1}'] * 9)}]" for at in range(1, 30))]
    ).encode(),
    "laughs in keys": (
        b"hpgo_profile: &a [1, 1]\nhpgo_cluster: &b [*a, *a]\nlayers: &c [*b, *b, *b]\nmachines: [*c, *c, *c]\n"
        b"batch_sizes: *c\nforward_times: *c\nm: *c\nt: *c\nlines: *c\n"
    ),
    "an alias of itself": b"a: &a [*a]",
    "a long number": b'{"hpgo_profile": 1' + b"0" * 1_000_000 + b"}",
    "many zeros": b'{"format": "hpgo-timeline-1", "ranks": 999999999999}',
}
KINDS = ["/dev/zero", "a folder", "endless text", *JUNK]


@pytest.mark.skipif(sys.platform != "linux", reason="its devices and limits")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reader", READERS)
def test_every_reader_ends_soon_with_an_error_of_hpgo(tmp_path: Path, reader: str, kind: str) -> None:
    name, read = READERS[reader]
    path = tmp_path / name
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with made(path, kind):
        started_s = time.process_time()
        with pytest.raises(hpgo.HpgoError) as raised:
            read(path)
        took_s = time.process_time() - started_s
    assert raised.value.message
    assert "\n" not in raised.value.message
    assert took_s < 4.0  # of processor time, the writer's included
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 2**20  # less than a GiB more


def test_what_is_too_large_is_told_with_the_limit(tmp_path: Path) -> None:
    for name, read, limit in (
        ("a.yaml", hpgo.read_profile, "64 MiB"),
        ("a.json", hpgo.Plan.read, "64 MiB"),
        ("a.csv", hpgo.Schedule.read, "512 MiB"),
        ("a.timeline.json", hpgo.Timeline.read, "512 MiB"),
    ):
        (tmp_path / name).symlink_to("/dev/zero")
        with pytest.raises(hpgo.HpgoError, match=f"has more than {limit}"):
            read(tmp_path / name)


def test_plans_and_timelines_are_read_from_pipes_once(tmp_path: Path) -> None:
    plan = hpgo.plan(PROFILE, CLUSTER, global_batch_size=4)
    for name, text in (("plan", plan.to_json()), ("run", plan.timeline().to_json())):
        os.mkfifo(tmp_path / name)
        writer = threading.Thread(target=(tmp_path / name).write_text, args=(text,))
        writer.start()
        command("draw", str(tmp_path / name), "-o", str(tmp_path / "out.svg"))
        writer.join(10)
        assert (tmp_path / "out.svg").read_text().startswith("<svg")
        (tmp_path / "out.svg").unlink()
