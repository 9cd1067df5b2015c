"""A node measures itself: fits find what times were made of, and estimates take the record."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import warm_ranks
from click.testing import CliRunner
from hypothesis import example, given
from hypothesis import strategies as st

import hpgo
from hpgo.cli.main import group
from hpgo.hardware.rates import RATES
from hpgo.llm.constants import CONSTANTS, KERNELS_ON_H100
from hpgo.llm.device_record import AttentionTime, CollectiveTime, DeviceRecord, ElementwiseTime, GemmTime
from hpgo.llm.estimate import constants_of
from hpgo.llm.kernel_fit import HOP_S, fit_attention, fit_collectives, fit_elementwise, fit_gemms
from hpgo.llm.layer_context import wave_tiles
from hpgo.llm.platform import read_platform
from hpgo.llm.stack import Stack
from hpgo.show.node_report import SKIPPED, document, lines

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parent.parent
H100 = DeviceRecord.read(ROOT / "research/h100-node.yaml")
SHAPES = [(8192, 8192, 8192), (4096, 6144, 4096), (1024, 4096, 4096), (2048, 2048, 1024), (300, 5000, 700)]
ASKED: dict[str, Any] = {"global_batch_size": 32, "seq_length": 8192}
# Each of four ranks measures its device; they are told to be on two nodes.
SCRIPT = """
import json, os
from dataclasses import asdict
from hpgo.runtime.node_measurement import measure_node

record = measure_node(device="cpu", seconds=1, node=f"node {int(os.environ['RANK']) // 2}")
print(json.dumps(asdict(record)))
"""


@given(share=st.floats(0.3, 1.2), overhead_s=st.floats(0, 3e-5), processors=st.integers(1, 200))
def test_gemms_that_follow_the_cost_model_give_its_constants(share: float, overhead_s: float, processors: int) -> None:
    best = 700e12
    gemms = [
        GemmTime(
            "bf16", m, n, k, 2 * wave_tiles(m, n, 1, CONSTANTS, processors) * 128 * 256 * k / best / share + overhead_s
        )
        for m, n, k in SHAPES
    ]
    found = fit_gemms(gemms, best, processors)
    assert found == (pytest.approx(share, rel=1e-6), pytest.approx(overhead_s, rel=1e-3, abs=1e-10))


def test_equal_gemms_tell_no_overhead() -> None:
    one = GemmTime("bf16", 4096, 4096, 4096, 2 * 4096**3 / 500e12)
    assert fit_gemms([one, one], 500e12, 1) == (pytest.approx(1.0), 0.0)


@given(st.lists(st.floats(1e-6, 1.0), min_size=len(SHAPES), max_size=len(SHAPES)))
@example([1e-3] * len(SHAPES))
@example([1e-3, 2e-3, 3e-3, 4e-3, 5e-3])
def test_a_share_is_above_0_however_load_beside_them_disturbs_gemms(seconds: list[float]) -> None:
    gemms = [GemmTime("bf16", *shape, one) for shape, one in zip(SHAPES, seconds, strict=True)]
    share, overhead_s = fit_gemms(gemms, 700e12, 132)
    assert 0 < share < float("inf")
    assert overhead_s >= 0
    if len({*seconds}) == 1:
        assert overhead_s == 0


def test_attention_counts_the_backend_that_pytorch_chooses() -> None:
    usual = [
        AttentionTime("default", 1, 16, 128, length, length**2 / 1e12, length**2 / 4e11) for length in (2048, 8192)
    ]
    other = AttentionTime("flash", 1, 16, 128, 2048, 1e-9, 1.0)
    best, share, factor = fit_attention([*usual, other])
    assert (best, share, factor) == (pytest.approx(4096e12), pytest.approx(1.0), pytest.approx(2.5))


def test_norms_do_not_count_as_memory_bandwidth() -> None:
    times = [ElementwiseTime("copy", 2e9, 1e-3), ElementwiseTime("add", 3e9, 1e-3), ElementwiseTime("norm", 2e9, 1.0)]
    assert fit_elementwise(times) == pytest.approx(2.4e12)


def test_collectives_give_the_rate_of_large_messages_and_the_overhead_of_small_ones() -> None:
    def time(operation: str, size: int, rate: float, overhead_s: float, *, across: bool = False) -> CollectiveTime:
        one = CollectiveTime(operation, across, 8, size, 1.0)
        times = 2 if operation == "all_reduce" else 1
        return replace(one, seconds=one.sent_bytes / rate + times * (overhead_s + 7 * HOP_S))

    rings = ["all_reduce", "all_gather", "reduce_scatter"]
    rows = [time(name, size, 400e9, 2e-5) for name in rings for size in (1, 2**31)]
    rows += [time("all_to_all", size, 300e9, 1e-3) for size in (1, 2**31)]
    rows += [time("all_gather", size, 50e9, 9e-5, across=True) for size in (1, 2**31)]
    assert fit_collectives(rows, across=False) == pytest.approx((400e9, 300e9, 2e-5), rel=0.2)
    found = fit_collectives(rows, across=True)
    assert found is not None
    assert found[0] == pytest.approx(50e9, rel=0.01)
    assert fit_collectives([], across=False) is None


# --- files and estimates


def test_a_record_reads_back_as_it_was_written(tmp_path: Path) -> None:
    for record in (H100, replace(H100, host_bytes_per_s=None, gemms=(), collectives=(), fp8_gemm_flop_per_s=None)):
        record.save(tmp_path / "node.yaml")
        assert DeviceRecord.read(tmp_path / "node.yaml") == record
        assert read_platform(tmp_path / "node.yaml") == record


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: text.replace("hpgo_device: 1", "hpgo_device: 2"), "`hpgo_device` is 2"),
        (lambda text: text.replace("hpgo_device: 1\n", ""), "`hpgo_device` is missing"),
        (lambda text: text.replace("gemm_efficiency: ", "gemm_efficiency: -"), "gemm_efficiency"),
        (lambda text: text.replace("hbm_efficiency: ", "hbm_efficency: "), "hbm_efficency"),
        (lambda text: text.replace("seconds: ", "seconds: x"), "seconds"),
        (lambda text: text + "more: 1\n", "`more` is unknown"),
    ],
)
def test_damaged_records_are_refused_by_file_and_key(tmp_path: Path, change: Callable[[str], str], says: str) -> None:
    path = tmp_path / "node.yaml"
    path.write_text(change(H100.yaml()), encoding="utf-8")
    with pytest.raises(hpgo.errors.ArgumentError) as caught:
        DeviceRecord.read(path)
    assert says in caught.value.message


def test_estimates_take_the_rates_of_a_record_and_scale_constants_by_those_of_an_h100() -> None:
    plain = hpgo.estimate_llm("llama-3-8b", "h100:1", tp=2, **ASKED)
    known = RATES["h100"].reached
    same = replace(
        H100,
        gemm_flop_per_s=known["bf16"] * H100.gemm_peak_flop_per_s,
        attention_flop_per_s=known["attention"] * H100.gemm_peak_flop_per_s,
        hbm_efficiency=CONSTANTS.hbm_efficiency,
        **KERNELS_ON_H100,
    )
    assert hpgo.estimate_llm("llama-3-8b", "h100:1", tp=2, platform=same, **ASKED).step_s == pytest.approx(plain.step_s)
    slow = replace(same, gemm_flop_per_s=same.gemm_flop_per_s / 2, layer_launch_s=2 * same.layer_launch_s)
    found = hpgo.estimate_llm("llama-3-8b", "h100:1", tp=2, platform=slow, **ASKED)
    assert dict(found.time_by_term_s)["linear"] == pytest.approx(2 * dict(plain.time_by_term_s)["linear"], rel=0.01)
    constants = constants_of(hpgo.Cluster.preset("h100:1"), Stack.named("te-hopper"), slow)
    assert constants.attention_time_factor == 1, "the record has the node's own attention"
    assert constants.layer_launch_s == pytest.approx(2 * CONSTANTS.layer_launch_s)
    assert found.high_s / found.step_s == pytest.approx(plain.high_s / plain.step_s)
    assert found.measured_steps == 0


def test_collectives_of_a_record_replace_the_shares_of_links() -> None:
    cluster = hpgo.Cluster.preset("h100:2")
    record = replace(
        H100, intra_bytes_per_s=225e9, inter_bytes_per_s=100e9, all_to_all_bytes_per_s=50e9, collective_overhead_s=0.0
    )
    found = record.constants_on(cluster)
    assert (found.nvlink_efficiency, found.collective_overhead_s) == (0.5, 0.0)
    assert (found.nic_efficiency, found.all_to_all_nic_efficiency) == (100 / 400, 50 / 400)


def test_a_device_without_a_datasheet_is_planned_with_its_record(tmp_path: Path) -> None:
    cluster = hpgo.Cluster.of(nodes=1, devices_per_node=8, intra_gbit_s=400, memory="48 GB")
    cluster = replace(cluster, nodes=tuple(
        replace(one, device=replace(one.device, name="New GPU")) for one in cluster.nodes
    ))  # fmt: skip
    with pytest.raises(hpgo.errors.ClusterError):
        hpgo.estimate_llm("llama-3-8b", cluster, tp=8, **ASKED)
    record = replace(H100, device="new gpu")
    one = hpgo.estimate_llm("llama-3-8b", cluster, tp=8, platform=record, **ASKED)
    found = hpgo.plan_llm("llama-3-8b", cluster, platform=record, top=1, **ASKED)
    assert found.fastest.step_s <= one.step_s
    assert found.plan().cluster == cluster.first(8)
    with pytest.raises(hpgo.errors.ArgumentError, match="was measured on `new gpu`"):
        hpgo.estimate_llm("llama-3-8b", "h100:1", platform=record, **ASKED)


# --- the record of an H100


def test_the_h100s_record_is_what_records_are_scaled_by() -> None:
    for name, value in KERNELS_ON_H100.items():
        assert getattr(H100, name) == pytest.approx(value, rel=5e-3), name


def test_the_h100s_record_agrees_with_the_constants_of_its_row() -> None:
    """Its attention is cuDNN's, where the row has FlashAttention-2's, which the record has as another backend."""
    known = RATES["h100"]
    assert H100.gemm_flop_per_s / known.flop_per_s["bfloat16"] == pytest.approx(known.reached["bf16"], rel=0.03)
    assert H100.rates.reached["fp8"] == pytest.approx(known.reached["fp8"], rel=0.08)
    assert H100.hbm_efficiency == pytest.approx(CONSTANTS.hbm_efficiency, rel=0.03)
    flash = max(one.flop_per_s for one in H100.attention if one.backend == "flash")
    assert flash / known.flop_per_s["bfloat16"] == pytest.approx(known.reached["attention"], rel=0.08)
    assert {one.seq_length for one in H100.attention} == {2048, 8192, 32768}


def test_the_h100s_gemms_agree_with_published_tables(reference: Path) -> None:
    """The tables are of short bursts. Under lasting load clocks fall, and large GEMMs reach 8 to 14 % less."""
    rows = map(json.loads, (reference / "kernels/matmul.jsonl").read_text(encoding="utf-8").splitlines())
    table = {
        (row["m"], row["n"], row["k"]): row["flop_per_s"]
        for row in rows
        if (row["device"], row["precision"]) == ("h100", "bf16") and row["batch"] == 1
    }
    assert H100.gemm_flop_per_s == pytest.approx(max(table.values()), rel=0.03)
    both = [one for one in H100.gemms if one.precision == "bf16" and (one.m, one.n, one.k) in table]
    assert len(both) >= 5
    for one in both:
        ratio = one.flop_per_s / table[one.m, one.n, one.k]
        large = 2 * one.m * one.n * one.k > 5e10
        assert (0.86 < ratio < 0.93) if large else (0.85 < ratio < 1.2), one


def test_the_report_sets_what_was_measured_beside_what_is_used() -> None:
    told = lines(H100)
    assert max(map(len, told)) <= 80
    assert SKIPPED in told
    assert any(line.startswith("GEMM, bf16") and line.endswith("80.3 %") for line in told)
    assert "-" in next(line for line in lines(replace(H100, device="New")) if line.startswith("GEMM, bf16"))
    assert json.loads(json.dumps(document(H100)))["record"]["device"] == H100.device


# --- measuring, on a CPU


@pytest.fixture
def _torch() -> None:
    pytest.importorskip("torch", reason="needs torch: pip install torch")


@pytest.mark.usefixtures("_torch")
def test_a_device_alone_is_measured_and_its_record_is_used(tmp_path: Path, run: Callable[..., Any]) -> None:
    words = ("llm", "calibrate", "--node", "--device", "cpu", "--time-limit", "0.5s")
    done = run(*words, "-o", "node.yaml")
    assert SKIPPED in done.stdout
    record = DeviceRecord.read(tmp_path / "node.yaml")
    assert (record.device, record.nodes, record.gpus_per_node, record.collectives) == ("cpu", 1, 1, ())
    assert record.gemm_flop_per_s >= max(one.flop_per_s for one in record.gemms) * (1 - 1e-4)
    (tmp_path / "cpu.yaml").write_text(
        "hpgo_cluster: 1\nmachines:\n  - {devices: 2, type: cpu, memory: 400 GB}\nintra: 10 GB/s\n", encoding="utf-8"
    )
    estimate = ("llm", "estimate", "llama-3-8b", "-c", "cpu.yaml", "-b", 2, "--seq-length", 512, "--tp", 2)
    step_s = json.loads(run(*estimate, "--platform", "node.yaml", "--json").stdout)["step_s"]
    assert step_s > 1
    assert "not known how fast" in run(*estimate, code=1).stderr


@pytest.mark.usefixtures("_torch")
def test_ranks_of_a_node_measure_their_collectives(run: Callable[..., Any]) -> None:
    done = run("llm", "calibrate", "--node", "--device", "cpu", "--ranks", 2, "--time-limit", "1s", "--json")
    record = json.loads(done.stdout)["record"]
    assert {one["operation"] for one in record["collectives"]} == {
        "all_reduce", "all_gather", "reduce_scatter", "all_to_all",
    }  # fmt: skip
    assert {one["gpus"] for one in record["collectives"]} == {2}
    assert record["intra_bytes_per_s"] > 1e3
    assert record["inter_bytes_per_s"] is None
    assert "nothing was written" in done.stderr


@pytest.mark.usefixtures("_torch")
def test_ranks_of_two_nodes_measure_both_kinds_of_collectives_and_get_one_record(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    ranks = warm_ranks.together(4, tmp_path, "script.py")
    assert [rank.stderr for rank in ranks] == [""] * 4
    told = [json.loads(rank.stdout) for rank in ranks]
    assert all(one == told[0] for one in told)
    assert (told[0]["nodes"], told[0]["gpus_per_node"]) == (2, 2)
    assert {(one["across"], one["gpus"]) for one in told[0]["collectives"]} == {(False, 2), (True, 4)}
    assert told[0]["intra_bytes_per_s"] > 1e3
    assert told[0]["inter_bytes_per_s"] > 1e3


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["steps.yaml", "--node"], 2, "one of STEPS, LOG or JOB/, and --node"),
        ([], 2, "Missing argument 'STEPS'"),
        (["--node", "--ranks", "0"], 2, "--ranks"),
    ],
)
def test_questions_that_make_no_sense_are_usage_errors(words: list[str], code: int, says: str) -> None:
    done = CliRunner().invoke(group, ["llm", "calibrate", *words])
    assert (done.exit_code, says in done.output) == (code, True)


@pytest.mark.usefixtures("_torch")
def test_what_cannot_be_measured_is_an_error_before_any_work(run: Callable[..., Any]) -> None:
    for words, says in (
        (["--time-limit", "600s"], "--time-limit is 600 s, but it must be at most 300 s"),
        (["-o", "absent/node.yaml"], "folder not found: `absent`"),
        (["-o", "node.json"], "ends in .yaml or .yml"),
    ):
        done = run("llm", "calibrate", "--node", "--device", "cpu", *words, code=1)
        assert says in done.stderr
        assert done.stdout == ""
