"""`hpgo simulate` as a process would be run: what it prints, writes, and answers to mistakes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

import hpgo
from hpgo.cli.main import group, run
from hpgo.timing.timeline import Timeline

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Command = Callable[..., tuple[int, str, str]]

SIX_STAGES = {
    "num_stages": 6,
    "num_batches": 12,
    "forward_times": [0.8, 1.0, 1.2, 1.0, 0.9, 1.1],
    "backward_times": [1.6, 2.0, 2.4, 2.0, 1.8, 2.2],
    "output_file": "six.png",
}
FIVE_STAGES = """\
num_stages: 5
num_batches: 8
forward_times: [0.9, 1.1, 1.0, 0.8, 1.2]
backward_times:
  - 1.8
  - 2.2
  - 2.0
  - 1.6
  - 2.4
output_file: five.png
"""


@pytest.fixture
def simulate(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs the command in an empty folder; gives exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def call(*args: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stopped:
            run(group, ["simulate", *map(str, args)], prog_name="hpgo")
        printed = capsys.readouterr()
        return int(stopped.value.code or 0), printed.out, printed.err

    return call


def test_no_arguments_print_help(simulate: Command) -> None:
    code, out, _ = simulate()
    assert code == 0
    assert "--forward-times" in out
    assert "  hpgo simulate -s 4 -b 8\n" in out


def test_both_sample_configurations_run_and_write_their_pictures(simulate: Command, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "six.json").write_text(json.dumps(SIX_STAGES))
    (tmp_path / "five.yaml").write_text(FIVE_STAGES)
    for config, picture, step in (("six.json", "six.png", "55.8 s"), ("five.yaml", "five.png", "40.2 s")):
        code, out, err = simulate("--config", config)
        assert code == 0
        assert step in out
        assert err == f"wrote {picture}\n"
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")


def test_the_command_line_wins_over_the_file(simulate: Command, tmp_path: Path) -> None:
    (tmp_path / "five.yaml").write_text(FIVE_STAGES)
    code, out, _ = simulate("-c", "five.yaml", "-b", 16, "-f", 1, "-bw", "2", "--json", "--no-visualization")
    document = json.loads(out)
    assert code == 0
    assert (document["micro_batches"], document["makespan_s"]) == (16, (16 + 4) * 3)
    assert not (tmp_path / "five.png").exists()


def test_lists_are_written_with_blanks_or_commas(simulate: Command) -> None:
    spaced = simulate("-s", 3, "-f", 1, 2, 1.5, "-bw", 2, 4, 3, "--p2p-time", 0.1, "--json")
    commas = simulate("-s", 3, "-f", "1,2,1.5", "-bw", "2,4,3", "--p2p-time", 0.1, "--json")
    assert spaced == commas
    assert spaced[0] == 0


def test_fewer_micro_batches_than_stages_are_legal(simulate: Command) -> None:
    code, out, _ = simulate("-s", 6, "-b", 2, "--json")
    assert code == 0
    assert json.loads(out)["makespan_s"] == (2 + 5) * 3


def test_the_table_says_what_each_number_means(simulate: Command) -> None:
    code, out, _ = simulate("-s", 4, "-b", 8, "--no-visualization")
    assert code == 0
    assert "idle / total         27.3 %  of all ranks' time" in out
    assert "idle / busy          37.5 %  also called bubble rate" in out


def test_chunks_share_the_times_of_their_rank(simulate: Command) -> None:
    for schedule, step_s in (("1f1b", 33.0), ("interleaved", 28.5), ("zb_v", 25.5)):
        code, out, _ = simulate("-s", 4, "-b", 8, "--schedule", schedule, "--json")
        assert code == 0
        assert json.loads(out)["makespan_s"] == pytest.approx(step_s)


def test_schedules_are_compared_in_a_table_and_one_picture(simulate: Command, tmp_path: Path) -> None:
    code, out, err = simulate(
        "-s", 4, "-b", 8, "--compare", "gpipe, 1f1b,zb_h1", "--activation-bytes", "1GB", "-o", "x.svg"
    )
    assert code == 0
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[-4:]] == ["schedule", "gpipe", "1f1b", "zb_h1"]
    assert lines[-3].endswith("8 GB")
    assert max(map(len, lines)) <= 80
    assert err == "wrote x.svg\n"
    assert (tmp_path / "x.svg").read_text().count("zb_h1") >= 1
    code, out, _ = simulate("-s", 4, "-b", 8, "--compare", "gpipe,1f1b", "--json")
    assert [document["schedule"] for document in json.loads(out)] == ["gpipe", "1f1b"]


def test_a_sweep_grows_the_micro_batches(simulate: Command, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    options = ("-s", 4, "-b", 16, "--compare", "1f1b,dualpipe", "--sweep", "micro-batches")
    code, out, err = simulate(*options, "-o", "sweep.svg")
    assert code == 0
    assert err == "wrote sweep.svg\n"
    assert "peak" not in out
    assert "micro-batches" in (tmp_path / "sweep.svg").read_text()
    rows = json.loads(simulate(*options, "--json")[1])
    counts = {name: [row["micro_batches"] for row in rows if row["schedule"] == name] for name in ("1f1b", "dualpipe")}
    assert counts == {"1f1b": [1, 2, 3, 4, 6, 8, 12, 16], "dualpipe": [8, 12, 16]}
    assert [row["makespan_s"] for row in rows[:8]] == [(count + 3) * 3 for count in counts["1f1b"]]


def test_a_plan_is_simulated_with_its_own_numbers(simulate: Command, tmp_path: Path) -> None:
    plan = hpgo.plan(hpgo.read_profile("vgg-19"), hpgo.Cluster.preset("dapple-c"), global_batch_size=2048)
    plan.save(tmp_path / "plan.json")
    code, out, _ = simulate("--plan", "plan.json", "--json")
    assert code == 0
    assert json.loads(out)["makespan_s"] == pytest.approx(plan.step_s)
    code, out, _ = simulate("--plan", "plan.json", "--compare", "gpipe,1f1b", "--no-visualization")
    assert code == 0
    code, _, err = simulate("--plan", "plan.json", "-f", 1)
    assert code == 1
    assert "--forward-times" in err


def test_a_plan_takes_the_times_that_no_profile_tells(simulate: Command, tmp_path: Path) -> None:
    profile, cluster = hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a")
    plan = hpgo.plan(profile, cluster, global_batch_size=64, schedule="1f1b_overlap")
    plan.save(tmp_path / "plan.json")
    count = len(plan.stages)
    for times in ([0.1], [0.1] * count):
        code, out, _ = simulate("--plan", "plan.json", "--overlapped-times", *times, "--json")
        assert code == 0
        assert json.loads(out)["makespan_s"] == hpgo.simulate(plan, overlapped_s=0.1).makespan_s < plan.step_s
    code, _, err = simulate("--plan", "plan.json", "--overlapped-times", *[0.1] * (count + 1))
    assert code == 1
    assert f"`--overlapped-times` has {count + 1} numbers, but the plan has {count} stages" in err


def test_data_files_are_written_and_read_back(simulate: Command, tmp_path: Path) -> None:
    for name in ("run.npz", "run.timeline.json"):
        assert simulate("-s", 2, "-b", 2, "-o", name)[0] == 0
        assert Timeline.read(tmp_path / name).makespan_s == 9


def test_without_a_picture_data_is_written_all_the_same(simulate: Command, tmp_path: Path) -> None:
    assert simulate("-s", 2, "-b", 2, "--no-visualization", "-o", "run.npz", "-o", "run.svg")[0] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["run.npz"]


def test_orders_from_a_file_are_simulated(simulate: Command, tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1,\n")
    code, out, _ = simulate("--schedule", "mine.csv", "--json")
    assert code == 0
    assert json.loads(out)["makespan_s"] == 9


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["-f", "0"], 1, "`--forward-times` holds 0"),
        (["-bw", "-1"], 1, "`--backward-times` holds -1"),
        (["-f", "nan"], 1, "`--forward-times` holds nan"),
        (["-f", "1e300"], 1, "forward time of stage 0 is 1e300"),
        (["-f", "1,x"], 1, "`x`, which is no number"),
        (["-s", "4", "-f", "1", "2", "3"], 1, "`--forward-times` has 3 numbers, but `1f1b` has 4 ranks"),
        (["--p2p-time", "-1"], 1, "`--p2p-time` holds -1"),
        (["-s", "0"], 1, "`--num-stages` is 0\nhint: give a whole number from 1 on"),
        (["-b", "0"], 1, "`--num-batches` is 0\nhint: give a whole number from 1 on"),
        (["-s", "four"], 2, "'four' is not a valid integer"),
        (["-s", "1000", "-b", "1000000"], 1, "2000000000 actions"),
        (["--schedule", "1f2b"], 1, "there is no schedule `1f2b`\nhint: did you mean `1f1b`"),
        (["--schedule", "dualpipe", "-s", "3"], 1, "p even"),
        (["--schedule", "absent.csv"], 1, "absent.csv"),
        (["--comm", "lnk", "-s", "2"], 1, "did you mean `link`"),
        (["--compare", "1f1b,", "-s", "2"], 1, "has an empty schedule name"),
        (["--activation-bytes", "much"], 1, "`--activation-bytes`: `much` is no size"),
        (["--memory-cap", "1GB,2GB"], 1, "`--memory-cap` has 2 numbers, but `1f1b` has 4 ranks"),
        (["--schedule", ""], 1, "`--schedule` has an empty schedule name"),
        (["--virtual-stages-per-rank", "3"], 1, "`1f1b` has no option `--virtual-stages-per-rank`"),
        (["--compare", "1f1b,gpipe", "--group-size", "4"], 1, "none of 1f1b, gpipe has an option `--group-size`"),
        (["-s", "2", "--compare", "1f1b,gpipe", "-o", "x.timeline.json"], 1, "`x.timeline.json` would hold the data"),
        (["-s", "2", "-o", "run.xyz"], 1, "unknown output format: `run.xyz`"),
        (["-s", "2", "-o", "absent/run.svg"], 1, "absent/run.svg"),
        (["-s", "2", "-o", "absent/run.npz"], 1, "absent/run.npz"),
        (["--plan", "absent.json"], 1, "absent.json"),
        (["--sweep", "stages"], 2, "'stages' is not"),
        (["--unknown"], 2, "No such option"),
    ],
)
def test_mistakes_are_named_without_a_traceback(simulate: Command, args: list[str], code: int, message: str) -> None:
    got, _, err = simulate(*args)
    assert got == code
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-s", "3"], "`--num-stages` is 3, but the action lists in mine.csv are for 2"),
        (["-b", "4"], "`--num-batches` is 4, but the action lists in mine.csv are for 1"),
        (["--virtual-stages-per-rank", "2"], "`mine.csv` has no option `--virtual-stages-per-rank`"),
        (["-f", "1,2,3"], "`--forward-times` has 3 numbers, but `mine` has 2 ranks\nhint: give 1 or 2"),
    ],
)
def test_orders_from_a_file_have_their_sizes(simulate: Command, tmp_path: Path, args: list[str], message: str) -> None:
    (tmp_path / "mine.csv").write_text("0F0,0B0\n1F0,1B0\n")
    assert simulate("--schedule", "mine.csv", "-s", 2, "-b", 1, "--no-visualization")[0] == 0
    code, _, err = simulate("--schedule", "mine.csv", *args)
    assert code == 1
    assert message in err


def test_a_file_that_exists_is_read_whatever_its_name_ends_in(simulate: Command, tmp_path: Path) -> None:
    (tmp_path / "list.yaml").write_text("a: [1, 2]\n")
    code, _, err = simulate("--schedule", "list.yaml", "--no-visualization")
    assert code == 1
    assert "error: list.yaml: line 1: `a:` is not an action\nhint: write stage, kind and micro-batch" in err
    (tmp_path / "orders").write_text("0F0,0B0\n")
    assert simulate("--compare", "orders,orders", "--no-visualization")[0] == 0
    (tmp_path / "1f1b").write_text("0F0,0B0\n")
    assert simulate("--schedule", "1f1b", "-s", 4, "--no-visualization")[1].startswith("1f1b: 4 ranks")
    assert "there is no schedule `absent.yaml`" in simulate("--schedule", "absent.yaml", "--no-visualization")[2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "must be a mapping of keys, got a list"),
        ("just text", "must be a mapping of keys"),
        ("", "is empty"),
        ("num_stages: 2\nnum_stages: 3", "line 2: the key `num_stages` is given twice"),
        ("num_stages: [", "line"),
        ("num_stages: 2.5", "`num_stages` is 2.5\nhint: give a whole number from 1 on"),
        ("foward_times: [1]", "`foward_times` is unknown\nhint: did you mean `forward_times`?"),
        ("num_stages: 3\nforward_times: [1, 2]", "`forward_times` has 2 numbers, but `1f1b` has 3 ranks"),
        ("forward_times: [1, .nan]", "`forward_times` holds nan"),
        ("forward_times: []", "`forward_times` is an empty list"),
        ("forward_times: [one]", "`forward_times` holds `one`, which is no number"),
        ("schedule: 7", "`schedule` must be text"),
        ("weight_bytes: {a: 1}", "config.yaml: `weight_bytes`: a size can't be a dict"),
        ("num_stages: 4\np2p_time: [1, 2]", "`p2p_time` has 2 numbers, but `1f1b` has 3 edges between stages"),
    ],
)
def test_mistakes_in_a_configuration_name_file_and_key(
    simulate: Command, tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "config.yaml").write_text(text)
    code, _, err = simulate("--config", "config.yaml", "--no-visualization")
    assert code == 1
    assert "config.yaml" in err or "has 2 numbers" in err
    assert message in err
