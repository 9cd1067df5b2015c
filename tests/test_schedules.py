"""What a user does with schedules: choose, show, read, write, and get wrong."""

from __future__ import annotations

import doctest
import importlib
import json
import pickle
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

import hpgo
from hpgo import _core
from hpgo.cli.schedules import command
from hpgo.programs.schedule import KINDS, asynchronous_max_in_flight

ROOT = Path(__file__).parent.parent
NAMES = [family.name for family in hpgo.schedules()]


def test_all_families_of_the_field_are_there() -> None:
    wanted = """gpipe forward_only 1f1b eager_1f1b 1f1b_overlap interleaved looped_bfs zb_h1 zb_h2 zb interleaved_zb
    zb_v v_half v_min dualpipe dualpipe_v chimera hanayo pipedream pipedream_2bw pipemare staggered sequential"""
    assert set(wanted.split()) <= set(NAMES)


@pytest.mark.parametrize("module", ["hpgo.programs.schedule", "hpgo.programs.layout"])
def test_examples_in_docstrings_run(module: str) -> None:
    failed, tried = doctest.testmod(importlib.import_module(module))
    assert tried > 1
    assert failed == 0


def test_examples_in_the_documentation_run(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs/schedules.md").read_text()
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(block, {"hpgo": hpgo})
    for line, output in re.findall(r"```console\n\$ hpgo schedules (.*?)\n(.*?)```", page, re.DOTALL):
        assert CliRunner().invoke(command, line.split()).output == output


def test_the_documented_table_is_the_table_of_the_program() -> None:
    page = (ROOT / "docs/schedules.md").read_text()
    rows = [f"| `{row.name}` | {row.summary} | {row.limits} | {row.peak} | {row.bubble} |" for row in hpgo.schedules()]
    assert "\n".join(rows) in page


@pytest.mark.parametrize("name", NAMES)
def test_every_family_is_listed_and_shown(name: str) -> None:
    listed = CliRunner().invoke(command, [])
    assert listed.exit_code == 0
    assert re.search(rf"^{name} +\w", listed.output, re.MULTILINE)
    shown = CliRunner().invoke(command, ["show", name, "--json"])
    facts = json.loads(shown.output)
    assert facts["name"] == name
    assert len(facts["action_lists"]) == facts["ranks"] == 4
    text = CliRunner().invoke(command, ["show", name, "--csv"]).output
    assert hpgo.Schedule.from_text(text).action_lists == facts["action_lists"]


def test_the_table_is_there_for_machines() -> None:
    table = json.loads(CliRunner().invoke(command, ["--json"]).output)
    assert [row["name"] for row in table] == NAMES


@given(
    name=st.sampled_from(NAMES),
    ranks=st.integers(0, 9),
    micro_batches=st.integers(0, 40),
    virtual_stages_per_rank=st.none() | st.integers(0, 5),
    group_size=st.none() | st.integers(0, 9),
    activation_limit=st.none() | st.integers(0, 9),
)
@settings(max_examples=200)
def test_any_request_gives_a_valid_schedule_or_an_error_with_a_way_out(
    name: str,
    ranks: int,
    micro_batches: int,
    virtual_stages_per_rank: int | None,
    group_size: int | None,
    activation_limit: int | None,
) -> None:
    try:
        built = hpgo.schedule(
            name,
            ranks=ranks,
            micro_batches=micro_batches,
            virtual_stages_per_rank=virtual_stages_per_rank,
            group_size=group_size,
            activation_limit=activation_limit,
        )
    except hpgo.errors.ArgumentError as error:
        assert error.hint  # noqa: PT017 -- either outcome is right
    else:
        assert hpgo.Schedule.from_text(built.to_text()) == built
        assert hpgo.Schedule.from_text(built.to_text(in_steps=True)) == built
        assert built.ranks == ranks
        assert built.total_micro_batches == micro_batches


def of_one_stage(forward_s: float) -> hpgo.Durations:
    return hpgo.Durations((forward_s,), (1.0,), (1.0,))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ranks": -1, "micro_batches": 4}, ("invalid_argument", "ranks", "-1")),
        ({"ranks": 2.5, "micro_batches": 4}, ("invalid_argument", "ranks", "2.5")),
        ({"ranks": 2, "micro_batches": True}, ("invalid_argument", "micro_batches", "True")),
        ({"ranks": 2, "micro_batches": 10**20}, ("invalid_argument", "micro_batches", "100000000000000000000")),
        ({"ranks": 2, "micro_batches": 10**9}, ("invalid_argument", "6000000000")),
        (
            {"ranks": 2, "micro_batches": 4, "durations": hpgo.Durations((1.0,), (1.0,), (1.0,))},
            ("invalid_argument", "1", "2"),
        ),
        (
            {"ranks": 1, "micro_batches": 4, "durations": hpgo.Durations((float("nan"),), (1.0,), (1.0,))},
            ("invalid_argument", "forward_s", "NaN"),
        ),
        (
            {"ranks": 1, "micro_batches": 4, "durations": of_one_stage(1e308)},
            ("invalid_argument", "forward_s", "1e308"),
        ),
        (
            {"ranks": 1, "micro_batches": 4, "durations": hpgo.Durations("a", (1.0,), (1.0,))},
            ("invalid_argument", "forward_s", "a"),
        ),
        ({"ranks": 1, "micro_batches": 4, "durations": {"forward_s": 1.0}}, ("invalid_argument", "durations")),
        ({"ranks": 1, "micro_batches": 4, "max_in_flight": 5}, ("invalid_argument", "max_in_flight", "5")),
        ({"ranks": 2, "micro_batches": 4, "max_in_flight": "21"}, ("invalid_argument", "max_in_flight", "21")),
        (
            {"ranks": 1, "micro_batches": 4, "durations": hpgo.Durations((-1.0,), (1.0,), (1.0,))},
            ("invalid_argument", "forward_s", "-1"),
        ),
    ],
)
def test_numbers_that_make_no_sense_are_named(arguments: dict[str, object], message: tuple[str, ...]) -> None:
    with refused(hpgo.errors.ArgumentError, *message):
        hpgo.schedule("zb", **arguments)  # type: ignore[arg-type]


@settings(max_examples=200)
@given(data=st.data(), ranks=st.integers(1, 5), micro_batches=st.integers(1, 8))
def test_orders_fitted_to_any_durations_can_be_run(data: st.DataObject, ranks: int, micro_batches: int) -> None:
    family = data.draw(st.sampled_from([family for family in hpgo.schedules() if "durations" in family.options]))
    time_s = st.one_of(st.sampled_from([0.0, 1e-300, 1e-9, 1.0, 1e9, 1e15]), st.floats(0, 10))
    each = st.lists(time_s, min_size=2 * ranks, max_size=2 * ranks)
    stages = 2 * ranks if family.virtual_stages_per_rank == "2" else ranks
    columns = [tuple(data.draw(each)[:stages]) for _ in range(3)]
    durations = hpgo.Durations(*columns, transfer_s=data.draw(time_s))
    built = hpgo.schedule(family.name, ranks=ranks, micro_batches=micro_batches, durations=durations)
    _core.validate_schedule(built)
    assert sum(row[0] == KINDS.index("F") for row in built.actions.tolist()) == stages * micro_batches


@pytest.mark.parametrize("name", ["a\0b.csv", "."])
def test_paths_that_are_none_are_named(name: str) -> None:
    with refused(hpgo.errors.ScheduleError, "not_writable"):
        hpgo.Schedule.read(name)
    with refused(hpgo.errors.ScheduleError, "not_writable"):
        hpgo.schedule("1f1b", ranks=1, micro_batches=1).save(name)


def test_an_unknown_name_suggests_near_ones() -> None:
    with pytest.raises(hpgo.errors.ScheduleError) as raised:
        hpgo.schedule("interleave", ranks=2, micro_batches=2)
    assert "`interleaved`" in raised.value.hint


def test_files_go_out_and_in_again(tmp_path: Path) -> None:
    built = hpgo.schedule("dualpipe", ranks=4, micro_batches=10)
    path = tmp_path / "mine.csv"
    for in_steps in (False, True):
        built.save(path, in_steps=in_steps)
        read = hpgo.Schedule.read(path)
        assert read == built
        assert read.name == "mine"
    assert pickle.loads(pickle.dumps(built)) == built


def test_files_that_are_no_schedules_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    with refused(hpgo.errors.ScheduleError, "not_found"):
        hpgo.Schedule.read(path)
    path.write_bytes(b"\xff\xfe\x00")
    with refused(hpgo.errors.ScheduleError, "damaged_file", "UTF-8", "0"):
        hpgo.Schedule.read(path)
    path.write_text("0F0,0B0\n1F0,,,\n")
    with refused(hpgo.errors.ScheduleError, "invalid_schedule", "1B0", "1"):
        hpgo.Schedule.read(path)


def test_transfers_stand_where_they_are_made_and_where_they_are_needed() -> None:
    # Worked by hand. Rank 1 posts the receive of micro-batch 1 while rank 0 sends it, before its first backward; put
    # off, it posts it when that backward's gradient is on its way.
    built = hpgo.schedule("1f1b", ranks=2, micro_batches=2)
    first = ["0F0", "0SEND_F0", "0F1", "0SEND_F1", "0RECV_B0", "0B0", "0RECV_B1", "0B1"]
    at_once = ["1RECV_F0", "1F0", "1RECV_F1", "1B0", "1SEND_B0", "1F1", "1B1", "1SEND_B1"]
    put_off = ["1RECV_F0", "1F0", "1B0", "1SEND_B0", "1RECV_F1", "1F1", "1B1", "1SEND_B1"]
    assert built.with_transfers() == [first, at_once]
    assert built.with_transfers(deferred_receives=True) == [first, put_off]


CARRIED = re.compile(r"(\d+)(SEND|RECV)_([FB])(\d+)")


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize(
    "name", ["gpipe", "1f1b", "eager_1f1b", "zb_h1", "interleaved", "looped_bfs", "interleaved_zb"]
)
def test_what_crosses_ranks_is_sent_once_after_it_is_made_and_received_once_before_it_is_read(
    name: str, deferred: bool
) -> None:
    built = hpgo.schedule(name, ranks=3, micro_batches=6)
    lists = built.with_transfers(deferred_receives=deferred)
    assert hpgo.Schedule.from_text("\n".join(map(" ".join, lists))).action_lists == built.action_lists
    last = built.stages - 1
    made, read = set(), set()
    for listed in lists:
        place = {token: at for at, token in enumerate(listed)}
        assert len(place) == len(listed)
        for token, at in place.items():
            if (carried := CARRIED.fullmatch(token)) is None:
                continue
            stage, way, kind, micro_batch = carried.groups()
            input_gradient = {f"{stage}{letter}{micro_batch}" for letter in (kind, "I" if kind == "B" else kind)}
            (action,) = input_gradient & place.keys()
            assert at > place[action] if way == "SEND" else at < place[action]
            step = 1 if kind == "F" else -1
            from_stage = int(stage) if way == "SEND" else int(stage) - step
            (made if way == "SEND" else read).add((kind, from_stage, int(micro_batch)))
    assert made == read
    assert made == {
        (kind, stage, i) for kind in "FB" for stage in range(built.stages) for i in range(6)
        if stage != (last if kind == "F" else 0)
    }  # fmt: skip


def test_recorded_lists_with_transfers_are_read(reference: Path) -> None:
    for line in (reference / "schedules/torch_comms.jsonl").read_text().splitlines():
        row = json.loads(line)
        read = hpgo.Schedule.from_text("\n".join(row["actions"]))
        computed = [
            [cell for cell in rank.split() if not re.search("SEND|RECV|SHARD|REDUCE", cell)] for rank in row["actions"]
        ]
        assert read.action_lists == computed


def test_sends_and_receives_stand_where_torch_places_them(reference: Path) -> None:
    names = {"Interleaved1F1B": "interleaved", "LoopedBFS": "looped_bfs", "InterleavedZeroBubble": "interleaved_zb"}
    names |= {"ZBVZeroBubble": "zb_v", "DualPipeV": "dualpipe_v"}
    for line in (reference / "schedules/torch_comms.jsonl").read_text().splitlines():
        row = json.loads(line)
        built = hpgo.schedule(names[row["schedule"]], ranks=row["pp_ranks"], micro_batches=row["microbatches"])
        sharded = re.compile("SHARD|REDUCE")
        recorded = [[cell for cell in rank.split() if not sharded.search(cell)] for rank in row["actions"]]
        assert _core.communication_lists(built, row["defer_pp_recv"]) == recorded


@pytest.mark.parametrize("name", ["zb_v", "v_half", "v_min", "dualpipe_v"])
def test_deferred_receives_on_a_v_are_refused_as_messages_would_be_mistaken(name: str) -> None:
    built = hpgo.schedule(name, ranks=4, micro_batches=8)
    with refused(hpgo.errors.ScheduleError, "invalid_schedule", "1", "0"):
        built.with_transfers(deferred_receives=True)
    assert built.with_transfers()


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb", "interleaved", "looped_bfs", "hanayo"])
def test_deferred_receives_come_in_the_order_of_sending_where_data_flows_one_way(name: str) -> None:
    lists = hpgo.schedule(name, ranks=4, micro_batches=8).with_transfers(deferred_receives=True)
    assert {entry for line in lists for entry in line if "RECV" in entry}


def test_transfers_are_printed_for_other_tools() -> None:
    arguments = ["show", "gpipe", "-r", "2", "-m", "1", "--csv", "--transfers"]
    assert CliRunner().invoke(command, arguments).output == "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n"


def test_windows_of_replicated_asynchronous_stages_keep_all_devices_busy() -> None:
    windows = asynchronous_max_in_flight([3, 1])
    assert windows == [2, 1]
    assert hpgo.schedule("pipedream", ranks=2, micro_batches=9, max_in_flight=windows).peak_in_flight == windows
    with refused(hpgo.errors.ArgumentError, "invalid_argument", "devices"):
        asynchronous_max_in_flight([1, 0])


def test_a_schedule_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    with refused(hpgo.errors.ScheduleError, "not_writable"):
        hpgo.schedule("gpipe", ranks=1, micro_batches=1).save(tmp_path / "nowhere/mine.csv")


def test_arrays_cannot_be_changed_behind_the_schedules_back() -> None:
    built = hpgo.schedule("gpipe", ranks=2, micro_batches=2)
    with pytest.raises(ValueError, match="read-only"):
        built.actions[0, 0] = 3


LAYOUTS = st.lists(st.text("Etm", min_size=1, max_size=6), min_size=1, max_size=8).map(tuple)


@given(LAYOUTS)
def test_layouts_go_out_and_in_again(stages: tuple[str, ...]) -> None:
    layout = hpgo.PipelineLayout(stages)
    assert hpgo.PipelineLayout.from_text(str(layout)) == layout


@given(st.text("EtmL|()*,0123 x", max_size=20))
def test_any_layout_text_is_read_or_refused(text: str) -> None:
    try:
        layout = hpgo.PipelineLayout.from_text(text)
    except hpgo.errors.ArgumentError as error:
        assert error.hint  # noqa: PT017 -- either outcome is right
    else:
        assert hpgo.PipelineLayout.from_text(str(layout)) == layout


def test_a_layout_runs_as_megatron_would() -> None:
    layout = hpgo.PipelineLayout.from_text("Et*2|(tt|)*14t,mL")
    assert len(layout.stages) == 16
    assert layout.schedule(ranks=4, micro_batches=8) == hpgo.schedule(
        "interleaved", ranks=4, micro_batches=8, virtual_stages_per_rank=4, group_size=4
    )
    assert layout.schedule(ranks=16, micro_batches=8) == hpgo.schedule("1f1b", ranks=16, micro_batches=8)
    with refused(hpgo.errors.ArgumentError, "invalid_argument", "16", "5"):
        layout.schedule(ranks=5, micro_batches=8)
