"""Measured links: a cluster that plans are made for, the same on every rank, and an end for all where one is lost."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
import warm_ranks

import hpgo
from hpgo.show.links_figure import svg

pytest.importorskip("torch", reason="needs torch: pip install torch")

from typing import TYPE_CHECKING

from hpgo.runtime.links import fitted

if TYPE_CHECKING:
    import subprocess

# Each of four ranks says what it measured; they are told to be on two machines.
SCRIPT = """
import json, os
import hpgo.runtime

rank = int(os.environ["RANK"])
found = hpgo.runtime.measure_links(name="mine", seconds=1, node=f"node {rank // 2}")
cluster = found.cluster
told = [rank, [one.count for one in cluster.nodes], sorted(found.fits), len(found.pairs), cluster.yaml()]
print(json.dumps(told))
"""
# One of them ends while others measure.
ENDS = """
import os, signal, threading
import hpgo.runtime

if os.environ["RANK"] == "1":
    threading.Timer(2.0, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
try:
    hpgo.runtime.measure_links(seconds=300)
except hpgo.errors.HpgoError as error:
    print(f"error: {error}", flush=True)
    raise SystemExit(1)
"""


def measured(folder: Path, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Runs `hpgo measure-links` in `folder`, and checks the exit code."""
    done = warm_ranks.hpgo(folder, "measure-links", *words)
    assert done.returncode == code, done.stderr
    return done


def test_lines_through_times_that_lie_on_one_are_found_and_noise_is_told() -> None:
    chance = random.Random(5)
    for _ in range(200):
        latency_s, rate = 10 ** chance.uniform(-6, -3), 10 ** chance.uniform(7, 11)
        sizes = [8 * 8**step for step in range(8)]
        exact = fitted([(size, latency_s + size / rate) for size in sizes])
        assert exact.latency_s == pytest.approx(latency_s, rel=1e-3)
        assert exact.residual < 1e-9
        noisy = fitted([(size, (latency_s + size / rate) * chance.uniform(0.9, 1.1)) for size in sizes])
        assert noisy.latency_s == pytest.approx(latency_s, rel=0.2)
        assert noisy.residual < 0.1


def test_small_messages_that_were_held_up_hardly_move_the_line() -> None:
    chance = random.Random(6)
    for _ in range(200):
        latency_s, rate = 10 ** chance.uniform(-5.3, -4), 10 ** chance.uniform(8.5, 10.5)
        times = [(8 * 8**step, latency_s + 8 * 8**step / rate) for step in range(8)]
        held = chance.sample(range(5), 2)
        fit = fitted([(size, time_s * (chance.uniform(3, 1000) if at in held else 1)) for at, (size, time_s) in
                      enumerate(times)])  # fmt: skip
        for size, time_s in times:
            assert fit.latency_s + size / fit.bytes_per_s == pytest.approx(time_s, rel=0.25)


def test_alone_it_starts_ranks_and_writes_a_cluster_that_plans_are_made_for(tmp_path: Path) -> None:
    done = measured(tmp_path, "--ranks", "3", "--time-limit", "1s", "--name", "here", "-o",
               "here.yaml", "--picture", "rates.svg")  # fmt: skip
    assert "within a node" in done.stdout
    cluster = hpgo.Cluster.read(tmp_path / "here.yaml")
    assert (cluster.name, [node.count for node in cluster.nodes]) == ("here", [3])
    assert 1e-7 < cluster.intra.latency_s < 1
    assert 1e5 < cluster.intra.collective_bytes_per_s < 1e12
    assert cluster.intra.bytes_per_s > 1e6
    assert hpgo.plan(hpgo.read_profile("vgg-19"), cluster, global_batch_size=64).fits
    drawn = (tmp_path / "rates.svg").read_text()
    assert drawn.count("rank 2 to rank") == 2
    told = json.loads(measured(tmp_path, "--time-limit", "1s", "--json").stdout)
    assert len(told["pairs"]) == 1
    assert len(told["links"]["intra"]["messages"]) == 8
    assert hpgo.Cluster.from_document(told["cluster"], file="told").devices == 2


def test_ranks_of_two_machines_measure_both_kinds_and_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    ranks = warm_ranks.together(4, tmp_path, "script.py")
    assert [rank.stderr for rank in ranks] == [""] * 4
    told = [json.loads(rank.stdout) for rank in ranks]
    assert [one[0] for one in told] == [0, 1, 2, 3]
    assert all(one[1:4] == [[2, 2], ["inter", "intra"], 6] for one in told)
    assert len({one[4] for one in told}) == 1


def test_a_rank_that_is_lost_ends_all(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text(ENDS)
    begin_s = time.monotonic()
    ranks = warm_ranks.together(3, tmp_path, "ends.py")
    assert [rank.returncode for rank in ranks] == [1, -signal.SIGKILL, 1]
    for survivor in (ranks[0], ranks[2]):
        assert survivor.stdout.startswith("error: measuring links on "), survivor
    assert time.monotonic() - begin_s < 60


def test_a_rank_that_is_killed_is_named_once_and_ends_all(tmp_path: Path) -> None:
    words = ("measure-links", "--ranks", "3", "--time-limit", "100s", "-o", "never.yaml")
    command = warm_ranks.start("hpgo", tmp_path, *words)
    ranks: list[str] = []
    while len(ranks) < 3:
        time.sleep(0.05)
        ranks = Path(f"/proc/{command.pid}/task/{command.pid}/children").read_text().split()
    os.kill(int(ranks[1]), signal.SIGKILL)
    _, said = command.communicate(timeout=60)
    assert command.returncode == 1
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, said
    assert "error: rank 1 on " in errors[0]
    assert "ended by SIGKILL" in errors[0]
    assert not (tmp_path / "never.yaml").exists()
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)


def test_the_picture_has_a_square_for_each_way_and_a_border_between_machines() -> None:
    pairs = {(0, 1): 4e9, (0, 2): 1e9, (1, 2): 1e9}
    drawn = svg("lab", pairs, [0, 0, 1])
    assert drawn == svg("lab", pairs, [0, 0, 1])
    assert drawn.count("<title>rank") == 6
    assert "1 GB/s to 4 GB/s" in drawn


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["-o", "here.json"], 1, "use a name that ends in .yaml or .yml"),
        (["--picture", "nowhere/rates.svg"], 1, "folder not found: `nowhere`"),
        (["--ranks", "1"], 2, "--ranks"),
        (["--device", "cuda"], 1, "GPU"),
    ],
)
def test_what_cannot_be_measured_is_told_once(words: list[str], code: int, said: str, tmp_path: Path) -> None:
    done = measured(tmp_path, *words, code=code)
    assert said in done.stderr
    assert "Traceback" not in done.stderr
