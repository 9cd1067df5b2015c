"""Every reader ends soon, with an error of hpgo, whatever a file is: a device, a pipe that never ends, junk.

What a file may hold at most is bounded while it is read, and nested or repeated values are bounded by what they are.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import resource
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner
from refusals import refused
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
    "schedules": ("x.csv", hpgo.Schedule.read),
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


LAUGHS = ["a0: &a0 [lol, lol]", *(f"a{at}: &a{at} [{', '.join([f'*a{at - 1}'] * 9)}]" for at in range(1, 30))]
JUNK = {
    "nothing": b"",
    "one byte": b"{",
    "another byte": b"x",
    "no UTF-8": b'{"format": "\xff\xfe"}' * 10,
    "deep JSON": b'{"a":' * 100_000,
    "deep list": b"[" * 1_000_000,
    "deep YAML": b"".join(b" " * at + b"a:\n" for at in range(1500)),
    "laughs": "\n".join(LAUGHS).encode(),
    "laughs in an old plan": f"{{format: hpgo.plan, version: 2, {', '.join(LAUGHS)}}}".encode(),
    "laughs in a plan": f"{{format: hpgo.plan, version: 3, {', '.join(LAUGHS)}}}".encode(),
    "laughs in keys": (
        b"hpgo_profile: &a [1, 1]\nhpgo_cluster: &b [*a, *a]\nlayers: &c [*b, *b, *b]\nnodes: [*c, *c, *c]\n"
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
        with pytest.raises(hpgo.errors.HpgoError) as raised:
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
        with refused(hpgo.errors.HpgoError, "too_large", limit):
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


# --- Configurations of other simulators, dumps of torch, and packed files ---------------------------------------------


def with_transfers_and_waits(schedule: hpgo.Schedule) -> str:
    """Orders as torch dumps them: with transfers, a wait for each send, and what sharded parameters need."""
    lines = []
    for order in schedule.with_transfers():
        stages = sorted({int(stage) for entry in order for stage in re.findall(r"(\d+)[FB]", entry)})
        entries = [f"{stage}UNSHARD" for stage in stages] + order
        entries += [entry.replace("SEND", "WAIT_SEND") for entry in order if "SEND" in entry]
        for stage in stages:
            entries += [f"{stage}REDUCE_GRAD", f"{stage}WAIT_REDUCE_GRAD", f"{stage}RESHARD"]
        lines.append(",".join(entries))
    return "\n".join(lines)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb_v", "dualpipe_v"])
def test_orders_with_transfers_and_waits_are_those_without(name: str) -> None:
    built = hpgo.schedule(name, ranks=2, micro_batches=4)
    assert hpgo.Schedule.from_text(with_transfers_and_waits(built)) == built


def test_dumps_recorded_from_torch_are_their_compute_entries_with_waits_or_without(reference: Path) -> None:
    for line in (reference / "schedules/torch_comms.jsonl").read_text().splitlines():
        actions = json.loads(line)["actions"]
        plain = [[one for one in rank.split() if re.fullmatch(r"\d+[FBIW]\d+|\(.*", one)] for rank in actions]
        waits = [re.sub(r"(\d+)(SEND_[FB]\d+)", r"\1\2 \1WAIT_\2", rank) for rank in actions]
        waits = [re.sub(r"(\d+)(REDUCE_GRAD)", r"\1\2 \1WAIT_\2", rank) for rank in waits]
        assert hpgo.Schedule.from_text("\n".join(actions)).action_lists == plain
        assert hpgo.Schedule.from_text("\n".join(waits)).action_lists == plain


@pytest.mark.parametrize("entry", ["0WAIT_RECV_F0", "0WAIT_SEND_I0", "0WAIT_SEND_F", "0WAIT_REDUCE_GRAD0", "0WAIT"])
def test_waits_for_what_nobody_starts_are_no_entries(entry: str) -> None:
    with pytest.raises(hpgo.errors.ScheduleError, match=f"`{entry}` is not an action"):
        hpgo.Schedule.from_text(f"0F0,0B0,{entry}")


def simulated(folder: Path, configuration: dict[str, object]) -> float:
    """Seconds that `hpgo simulate` says a configuration takes."""
    path = folder / "one.yaml"
    path.write_text(json.dumps(configuration))
    done = CliRunner().invoke(group, ["simulate", "--config", str(path), "--no-visualization", "--json"])
    assert done.exit_code == 0, done.exception
    return hpgo.Timeline.from_json(done.stdout).makespan_s


def test_configurations_of_another_simulator_count_stages_and_time_each(tmp_path: Path) -> None:
    ours = hpgo.simulate(
        hpgo.schedule("interleaved", ranks=2, micro_batches=4), forward_s=1.5, backward_s=2.5, latency_s=0.25
    )
    asked = {"num_devices": 2, "num_stages": 4, "num_batches": 4, "strategy": "1f1b_interleave", "p2p_latency": 0.25}
    times = {"forward": 1.5, "backward": 2.5}
    assert simulated(tmp_path, asked | {"op_times": times}) == pytest.approx(ours.makespan_s)
    each = {"forward": {"0": 1.5, "1": 1.5, "2": 1.5, "3": 1.5}, "backward": 2.5}
    assert simulated(tmp_path, asked | {"op_times": each}) == pytest.approx(ours.makespan_s)
    one = hpgo.simulate(hpgo.schedule("1f1b", ranks=3, micro_batches=4), forward_s=1, backward_s=2)
    assert simulated(tmp_path, {"num_devices": 3, "num_batches": 4}) == pytest.approx(one.makespan_s)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"strategy": "1f1b_interleav"}, "unknown strategy `1f1b_interleav`"),
        ({"num_stages": 5}, "`num_stages` is 5, but it must be a multiple of the 2 devices"),
        ({"op_times": {"forwards": 1}}, "`forwards` is unknown"),
        ({"op_times": {"forward": {"7": 1}}}, "`7` is unknown"),
        ({"op_times": {"forward": -1}}, "`forward` holds -1"),
        ({"forward_times": [1]}, "`forward_times` is unknown"),
    ],
)
def test_what_such_a_configuration_gets_wrong_is_named(wrong: dict[str, object], said: str, tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    path.write_text(json.dumps({"num_devices": 2, "num_stages": 4, "num_batches": 4} | wrong))
    done = CliRunner().invoke(group, ["simulate", "--config", str(path), "--no-visualization"])
    assert isinstance(done.exception, hpgo.errors.ArgumentError), done.output
    assert said in done.exception.message


def test_recorded_steps_of_that_simulator_are_met_from_its_own_keys(reference: Path, tmp_path: Path) -> None:
    compared = 0
    for line in (reference / "schedules/victarry.jsonl").read_text().splitlines()[::4]:
        row = json.loads(line)
        same = {"1f1b", "1f1b_overlap", "zb1p"} | (
            {"1f1b_interleave"} if row["num_batches"] % row["num_devices"] == 0 else set()
        )
        if row["strategy"] in same:
            keys = ("strategy", "num_devices", "num_stages", "num_batches", "p2p_latency", "op_times")
            assert simulated(tmp_path, {key: row[key] for key in keys}) == pytest.approx(row["makespan"])
            compared += 1
    assert compared > 20


def test_packed_files_are_read_whatever_their_name(tmp_path: Path) -> None:
    timeline = hpgo.simulate(hpgo.schedule("1f1b", ranks=2, micro_batches=2))
    for name in ("run.timeline.json.gz", "run.timeline.json"):
        (tmp_path / name).write_bytes(gzip.compress(timeline.to_json().encode()))
        assert hpgo.Timeline.read(tmp_path / name).makespan_s == timeline.makespan_s
    profile = hpgo.read_profile("vgg-16")
    hpgo.write_profile(profile, tmp_path / "plain.txt")
    packed = tmp_path / "vgg-16-pbs-32.txt.gz"
    packed.write_bytes(gzip.compress((tmp_path / "plain.txt").read_bytes()))
    assert hpgo.read_profile(packed).batch_sizes == (32,), "the name says it in front of its endings"
    assert hpgo.read_profile(packed).name == "vgg-16"


@pytest.mark.parametrize(
    ("change", "said"),
    [(lambda data: data[:-9], "damaged"), (lambda data: data[:30] + b"\0" * 9 + data[39:], "damaged")],
)
def test_damaged_packed_files_are_named(change: Callable[[bytes], bytes], said: str, tmp_path: Path) -> None:
    text = hpgo.simulate(hpgo.schedule("1f1b", ranks=2, micro_batches=2)).to_json()
    (tmp_path / "a.json.gz").write_bytes(change(gzip.compress(text.encode())))
    with pytest.raises(hpgo.errors.ArgumentError, match=rf"a\.json\.gz is a {said} gzip file"):
        hpgo.Timeline.read(tmp_path / "a.json.gz")


def test_a_packed_file_that_holds_too_much_is_refused_before_it_fills_the_memory(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "bomb.json.gz", "wb", compresslevel=9) as file:
        for _ in range(80):
            file.write(b" " * 2**20)
    with refused(hpgo.errors.ProfileError, "too_large", "64", "MiB"):
        hpgo.read_profile(tmp_path / "bomb.json.gz")
