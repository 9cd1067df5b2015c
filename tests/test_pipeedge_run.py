"""`pipeedge-run`: PipeEdge's options, real ranks, answers that are one process's, and ends that are told."""

from __future__ import annotations

import csv
import random
import re
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import warm_ranks
from click.testing import CliRunner
from ports import free_port

import hpgo

torch = pytest.importorskip("torch", reason="needs torch: pip install torch")

from refusals import refused  # noqa: E402

from hpgo.cli.pipeedge_run import command  # noqa: E402 -- what needs torch, where there is one
from hpgo.runtime.pipeedge.models import MODELS  # noqa: E402
from hpgo.runtime.pipeedge.monitor import Energy, Monitor  # noqa: E402
from hpgo.runtime.pipeedge.schedule import ScheduleOptions, decide  # noqa: E402
from hpgo.runtime.stream_events import Moment  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

TINY = "facebook/deit-tiny-distilled-patch16-224"
HOST = socket.gethostname()


@dataclass
class Ranks:
    """Processes of `pipeedge-run`, one a rank, as its scripts start them."""

    folder: Path
    started: list[warm_ranks.Started] = field(default_factory=list)

    def start(self, world: int, *words: str, of_others: tuple[str, ...] | None = None, **variables: str) -> None:
        """All ranks; those after the first with other words, if these are given."""
        port = free_port()
        for rank in range(world):
            given = words if rank == 0 or of_others is None else of_others
            words_of_rank = (rank, world, "--port", port, *given)
            self.started.append(warm_ranks.start("pipeedge_run", self.folder, *words_of_rank, **variables))

    def finish(self) -> list[tuple[int, str, str]]:
        """Exit code, stdout and stderr of each."""
        found = [(one, *one.communicate(timeout=240)) for one in self.started]
        self.started.clear()
        return [(one.returncode, out, err) for one, out, err in found]


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    made = Ranks(tmp_path)
    yield made
    for one in made.started:
        one.kill()
        one.wait()


# As PipeEdge's runtime writes them.
HEADER = (
    "Heartbeat,Tag,Start Time (ns),End Time (ns),Global Time (ns),Window Time (ns),Instant Time (ns),"
    "Global Heart Rate (/s),Window Heart Rate (/s),Instant Heart Rate (/s),Work,Global Work,Window Work,Instant Work,"
    "Global Performance (/s),Window Performance (/s),Instant Performance (/s),Start Energy (uJ),End Energy (uJ),"
    "Global Energy (uJ),Window Energy (uJ),Instant Energy (uJ),Global Power (W),Window Power (W),Instant Power (W),"
    "Accuracy,Global Accuracy,Window Accuracy,Instant Accuracy,Global Accuracy Rate (/s),Window Accuracy Rate (/s),"
    "Instant Accuracy Rate (/s)"
)


def table(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as held:
        return list(csv.DictReader(held))


def test_answers_are_one_processs_wherever_layers_and_data_are(ranks: Ranks) -> None:
    size = ("-m", TINY, "-b", "7", "-u", "2")
    ranks.start(1, *size, "--outputs", "alone.npy")
    ((code, _, err),) = ranks.finish()
    assert code == 0, err
    assert "note: the weights are random" in err
    assert "7 samples of random data" in err
    alone = np.load(ranks.folder / "alone.npy")
    assert alone.shape == (7, 1000)
    for world, words in (
        (2, ("-pt", "1,21,22,48")),
        (3, ("-pt", "1,2,3,48", "-r", "2,0", "-D", "1", "-s", "lo0")),
    ):
        ranks.start(world, *size, *words, "--outputs", "many.npy", WINDOW_SIZE="3")
        ended = ranks.finish()
        assert [code for code, _, _ in ended] == [0] * world, ended
        data_rank = 1 if "-D" in words else 0
        assert [bool(out) for _, out, _ in ended] == [rank == data_rank for rank in range(world)]
        assert ended[data_rank][1].startswith("Latency is ")
        assert ", throughput is " in ended[data_rank][1]
        assert np.array_equal(np.load(ranks.folder / "many.npy"), alone)
    renamed = "the loopback interface is `lo` on this system, not `lo0`"
    assert all(renamed in err for _, _, err in ended) or sys.platform != "linux"
    assert "stage 0 is rank 2 with layers 1 to 2" in ended[0][2]
    assert "rank 1 holds the data" in ended[0][2]
    shard = table(ranks.folder / "rank-2/shard.csv")
    assert ",".join(shard[0]) == HEADER
    assert [row["Work"] for row in shard] == ["2", "2", "2", "1"]
    assert {row["Accuracy"] for row in shard} == {"2"}  # layers
    assert (shard[3]["Window Work"], shard[3]["Global Work"]) == ("5", "7")
    sent = table(ranks.folder / "rank-2/send.csv")
    # From the second quarter of the first block: a vector for each of 198 tokens.
    assert float(sent[-1]["Global Work"]) == pytest.approx((7 * 198 * 192 * 32 + 4 * 64 * 8) / 1e6, rel=0.15)
    assert {row["Work"] for row in table(ranks.folder / "rank-2/quant_encode.csv")} == {"0"}  # in all bits
    kept = {file.stem for file in (ranks.folder / "rank-1").iterdir() if table(file)}
    assert kept == {"send", "quant_encode", "output"}
    assert (ranks.folder / "shard.csv").exists()  # of the rank that was alone


TIMES = f"{{batch_size: 2, dtype: torch.float32, time_s: {[0.01] * 48}}}"
FILES = {
    "models.yml": f"{TINY}: {{layers: 48, mem_MB: {[1] * 48}, parameters_in: 150528, parameters_out: {[38016] * 48}}}",
    "types.yml": f"board: {{bw_Mbps: 1000, mem_MB: 1000, model_profiles: {{'{TINY}': [{TIMES}]}}}}",
    "devices.yml": "board: [left, right]",
}


def test_without_layers_the_three_files_decide_and_few_bits_are_sent(ranks: Ranks) -> None:
    for name, text in FILES.items():
        (ranks.folder / name).write_text(text)
    words = ("-m", TINY, "-b", "4", "-u", "2", "-sm", "models.yml", "-sdt", "types.yml", "-sd", "devices.yml")
    ranks.start(2, *words, "-H", "right,left", "--hold-rate", "8.2", of_others=("-m", TINY))
    ended = ranks.finish()
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert "stage 0 is rank 1 with layers 1 to 24" in ended[0][2]
    assert "stage 1 is rank 0 with layers 25 to 48" in ended[0][2]


def test_schedules_are_those_of_the_options_or_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(**how: Any) -> ScheduleOptions:
        given: dict[str, Any] = {
            "world": 2, "model": TINY, "layers": 48, "micro_batch_size": 2, "partition": (1, 24, 25, 48),
            "quantize": None, "rank_order": None, "hosts": None, "files": None, "data_rank": 0,
            "hold_samples_per_s": None,
        }  # fmt: skip
        return ScheduleOptions(**given | how)

    assert decide(asked(world=1, partition=None)).stages == ((1, 48),)
    assert decide(asked(quantize=(8, 0))).bits == decide(asked(quantize=(8,))).bits == (8,)
    found = decide(asked(world=3, rank_order=(2, 1), data_rank=0))
    assert (found.ranks, found.data_rank) == ((2, 1), 0)
    assert type(found).from_json(found.to_json()) == found
    for how, words in (
        ({"partition": (1, 24, 26, 48)}, "stage 1 has the layers 26 to 48, but must begin with layer 25"),
        ({"partition": (1, 24, 25)}, "has 3 numbers"),
        ({"partition": (1, 24, 25, 47)}, "ends with layer 47"),
        ({"world": 1}, "has 2 stages for 1 rank"),
        ({"partition": None}, "the assignment of 48 layers to 2 ranks is not given"),
        ({"partition": None, "quantize": (8,)}, "`-q` is given, but `-pt` is not"),
        ({"partition": None, "rank_order": (1, 0)}, "`-r` is given, but `-pt` is not"),
        ({"rank_order": (1,)}, "`-r` names 1 rank for 2 stages"),
        ({"rank_order": (0, 0)}, "a rank has two stages"),
        ({"rank_order": (0, 2)}, "there is no rank 2 among 2"),
        ({"data_rank": 1}, "the data rank is 1, but this rank has stage 1"),
        ({"data_rank": 5}, "there is no rank 5"),
        ({"quantize": (7, 0)}, "can't be sent in 7 bits"),
        ({"quantize": (8, 8, 8)}, "bits are given for 3 cuts"),
    ):
        with pytest.raises(hpgo.errors.ArgumentError, match=words) as caught:
            decide(asked(**how))
        assert caught.value.hint
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).write_text(text)
    files = {"partition": None, "files": ("models.yml", "types.yml", "devices.yml")}
    assert decide(asked(**files, hosts=("right", "left"), data_rank=None)).ranks == (1, 0)
    assert decide(asked(**files, hosts=("right", "left"), data_rank=None)).data_rank == 1
    assert decide(asked(world=3, rank_order=(2, 1), data_rank=None)).data_rank == 0
    for how, words in (
        ({}, "but its rank is unknown"),
        ({"hosts": ("left",)}, "`-H` names 1 host, but there are 2 ranks"),
        ({"hosts": ("left", "other")}, "`right`, which `-H` doesn't name"),
        ({"layers": 96, "hosts": ("left", "right")}, "has 48 layers"),
    ):
        with pytest.raises(hpgo.errors.ArgumentError, match=words) as caught:
            decide(asked(**files | how))
        assert caught.value.hint
    Path("types.yml").write_text(FILES["types.yml"].replace("bw_Mbps: 1000", "bw_Mbps: 2"))
    held = decide(asked(**files, hosts=("left", "right"), hold_samples_per_s=8.0))
    assert 0 < held.bits[0] < 32, "2 samples of 38016 numbers take 1.16 s in 32 bit, and there are 250 ms"


def until_three_stream(ranks: Ranks, *options: str) -> None:
    """Start three ranks, the last of them with the last stage, and wait until micro-batches have left it."""
    ranks.start(3, "-m", TINY, "-b", "100000", "-u", "1", "-pt", "1,24,25,48", "-r", "1,2", *options, WINDOW_SIZE="1")
    until_s = time.monotonic() + 120
    file = ranks.folder / "rank-2/shard.csv"
    while not (file.exists() and len(file.read_text().splitlines()) > 5):
        time.sleep(0.05)
        assert time.monotonic() < until_s
        assert all(one.poll() is None for one in ranks.started)


@pytest.mark.parametrize("lost", [*(pytest.param(rank, marks=pytest.mark.slow) for rank in (0, 1)), 2])
def test_a_lost_rank_is_named_and_all_others_end_within_ten_seconds(lost: int, ranks: Ranks) -> None:
    until_three_stream(ranks)
    ranks.started[lost].send_signal(signal.SIGKILL)
    begin_s = time.monotonic()
    ended = ranks.finish()
    assert time.monotonic() - begin_s < 10
    assert [code for code, _, _ in ended] == [-9 if rank == lost else 1 for rank in range(3)]
    errors = [line for _, _, err in ended for line in err.splitlines() if line.startswith("error: ")]
    assert errors
    who = {0: f"rank 0, idle, on {HOST}", 1: f"rank 1 of stage 0 on {HOST}", 2: f"rank 2 of stage 1 on {HOST}"}[lost]
    assert all(line.startswith(f"error: {who}") for line in errors), errors


def test_a_silent_rank_is_named_after_the_time_of_the_option(ranks: Ranks) -> None:
    until_three_stream(ranks, "--heartbeat-timeout", "4s")
    ranks.started[2].send_signal(signal.SIGSTOP)
    for one in ranks.started[:2]:
        one.wait(120)
    ranks.started[2].send_signal(signal.SIGCONT)
    said = "".join(err for _, _, err in ranks.finish())
    assert re.search(rf"error: rank 2 of stage 1 on {re.escape(HOST)}, .*: no sign of life for 4 s\n", said)
    assert "allow more time with `--heartbeat-timeout`" in said


def test_what_rank_0_can_not_decide_ends_all(ranks: Ranks) -> None:
    ranks.start(2, "-m", TINY, "-pt", "1,24,26,48")
    ended = ranks.finish()
    assert [code for code, _, _ in ended] == [1, 1]
    errors = [line for _, _, err in ended for line in err.splitlines() if line.startswith("error: ")]
    assert errors == ["error: `-pt 1,24,26,48`: stage 1 has the layers 26 to 48, but must begin with layer 25"]


def test_ranks_of_two_models_are_told(ranks: Ranks) -> None:
    other = ("-m", "facebook/deit-small-distilled-patch16-224")
    ranks.start(2, "-m", TINY, "-pt", "1,24,25,48", of_others=other)
    ended = ranks.finish()
    assert [code for code, _, _ in ended] == [1, 1]
    errors = [line for _, _, err in ended for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "the model of rank 1 is `facebook/deit-small" in errors[0]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["2", "2"], 2, "RANK is 2, but it must be less than WORLD, which is 2"),
        (["0", "1", "-pt", "1;48"], 2, "is not a list of integers with commas"),
        (["0", "1", "-sm", "models.yml"], 2, "must be given together"),
        (["0", "1", "-m", "resnet"], 1, "there is no model `resnet`"),
        (["0", "1", "-M", "absent.npz"], 1, "file of weights not found: `absent.npz`"),
        (["0", "1", "-s", "eth99"], 1, "unknown network interface: `eth99`"),
        (["0", "1", "-c", "mpi"], 2, "mpi"),
    ],
)
def test_options_that_make_no_sense_are_told(words: list[str], code: int, said: str) -> None:
    result = CliRunner().invoke(command, words)
    found = str(getattr(result.exception, "message", "")) + result.output
    assert said in found
    assert result.exit_code == code


def test_the_help_names_every_option_of_pipeedge() -> None:
    lines = CliRunner().invoke(command, ["-h"]).output.splitlines()
    text = "\n".join(lines)
    for option in (
        "-d", "-s", "--addr", "--port", "-c", "-w", "-m", "-M", "-b", "-u", "--dataset-name", "--dataset-root",
        "--dataset-split", "--dataset-indices-file", "--dataset-shuffle", "-pt", "-q", "-r", "-D", "-H", "-sm", "-sdt",
        "-sd",
    ):  # fmt: skip
        assert f" {option}," in text or f" {option} " in text, option
    assert max(map(len, lines)) <= 80
    assert "\\b" not in text


def test_models_have_as_many_layers_as_they_say_and_pipeedges_sizes() -> None:
    millions = {
        "google/vit-base-patch16-224": 86.6, "google/vit-large-patch16-224": 304.3,
        "google/vit-huge-patch14-224-in21k": 658.7, "bert-base-uncased": 109.5, "bert-large-uncased": 335.1,
        "textattack/bert-base-uncased-CoLA": 109.5, "facebook/deit-base-distilled-patch16-224": 86.6,
        "facebook/deit-small-distilled-patch16-224": 22.1, "facebook/deit-tiny-distilled-patch16-224": 5.7,
    }  # fmt: skip
    assert set(millions) == set(MODELS)
    for name, model in MODELS.items():
        workload = model.workload(16)
        assert len(workload.layers) == model.layers
        shapes = [shape for held in workload.parameters.values() for shape in held.values()]
        assert sum(int(np.prod(shape)) for shape in shapes) / 1e6 == pytest.approx(millions[name], abs=0.06)


def test_energy_counts_what_counters_say_also_when_they_begin_anew(tmp_path: Path) -> None:
    zone = tmp_path / "intel-rapl:0"
    zone.mkdir()
    (tmp_path / "intel-rapl:0:0").mkdir()  # within the other one
    (zone / "max_energy_range_uj").write_text("10000000\n")
    (zone / "energy_uj").write_text("9000000\n")
    energy = Energy(tmp_path)
    (zone / "energy_uj").write_text("9500000\n")
    assert energy.microjoules() == 500_000
    (zone / "energy_uj").write_text("250000\n")
    assert energy.microjoules() == 1_250_000
    (zone / "energy_uj").unlink()
    assert energy.microjoules() is None


def test_tables_sum_over_the_run_and_over_windows_and_divide_by_times(tmp_path: Path) -> None:
    zone = tmp_path / "powercap/intel-rapl:0"
    zone.mkdir(parents=True)
    (zone / "energy_uj").write_text("0")
    monitor = Monitor(tmp_path / "made", 3, 12, energy=Energy(zone.parent))
    begin_ns = time.perf_counter_ns()
    chance = random.Random(1)
    kinds = ("receive", "unpack", "pass", "pack", "send", "output")
    at_ns, used_uj, ends_ns = begin_ns, 0, begin_ns
    expected: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    for number in range(8):
        for kind in kinds:
            start_ns = ends_ns if kind == "output" else at_ns
            taken_ns, before_uj = chance.randrange(1, 10**9), used_uj
            at_ns, used_uj = at_ns + taken_ns, used_uj + chance.randrange(10**6)
            (zone / "energy_uj").write_text(str(used_uj))
            samples, size, bits = chance.randrange(1, 9), chance.randrange(10**6), chance.choice([0, 8])
            monitor(Moment(kind, number, start_ns, at_ns, samples, size, bits))
            work: float = samples
            fourth = {"pass": 12, "output": number % 3}.get(kind, 0)
            if kind in {"send", "receive"}:
                work = 8 * size / 1e6
            elif kind in {"pack", "unpack"}:
                work, fourth = samples if bits else 0, bits
            if kind == "output":
                monitor.right(number % 3)
                before_uj, ends_ns = expected[kind][-1]["end_uj"] if expected[kind] else 0, at_ns
            row = {"Time (ns)": at_ns - start_ns, "Work": work, "Energy (uJ)": used_uj - before_uj, "Accuracy": fourth}
            expected[kind].append({**row, "Heart": 1, "start_ns": start_ns, "end_ns": at_ns, "end_uj": used_uj})
    monitor.close()
    rates = {"Heart": "Heart Rate (/s)", "Work": "Performance (/s)", "Accuracy": "Accuracy Rate (/s)"}
    for kind, key in zip(kinds, ("recv", "quant_decode", "shard", "quant_encode", "send", "output"), strict=True):
        rows = table(tmp_path / f"made/{key}.csv")
        assert ",".join(rows[0]) == HEADER
        for number, row in enumerate(rows):
            assert (row["Heartbeat"], row["Tag"]) == (str(number), str(number))
            assert int(row["Start Time (ns)"]) == expected[kind][number]["start_ns"]
            assert int(row["End Time (ns)"]) == expected[kind][number]["end_ns"]
            assert int(row["End Energy (uJ)"]) == expected[kind][number]["end_uj"]
            for span, begin in (("Global", 0), ("Window", max(0, number - 2)), ("Instant", number)):
                some = expected[kind][begin : number + 1]
                sums = {name: sum(one[name] for one in some) for name in some[0]}
                for name in ("Time (ns)", "Work", "Energy (uJ)", "Accuracy"):
                    assert float(row[f"{span} {name}"]) == pytest.approx(sums[name], rel=1e-12), (key, span, name)
                for name, rate in rates.items():
                    per_s = sums[name] / sums["Time (ns)"] * 1e9
                    assert float(row[f"{span} {rate}"]) == pytest.approx(per_s, rel=1e-9)
                watts = sums["Energy (uJ)"] / sums["Time (ns)"] * 1e3
                assert float(row[f"{span} Power (W)"]) == pytest.approx(watts, rel=1e-9)
        assert len(rows) == 8
    with refused(hpgo.errors.FileError, "not_writable"):
        Monitor(tmp_path / "made", 3, 12, mode="x")
    for _ in range(2):  # two ranks of a host
        Monitor(tmp_path / "new/folder", 3, 12).close()
