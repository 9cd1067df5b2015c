"""What a plan's report says, and that it says so truthfully."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hpgo
from hpgo.planning import bottleneck
from hpgo.show import chain_report, llm_report, report, run_report

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def bert() -> hpgo.Plan:
    return hpgo.plan(hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a"), global_batch_size=64)


@st.composite
def plans(draw: st.DrawFn) -> hpgo.Plan:
    layers = draw(st.integers(1, 8))
    column = st.lists(st.floats(1e-4, 1.0), min_size=layers, max_size=layers)
    sizes = st.lists(st.integers(0, 10**9), min_size=layers, max_size=layers)
    profile = hpgo.Profile.chain(
        "toy",
        batch_size=1,
        forward_s=draw(column),
        backward_s=draw(column),
        activation_bytes=draw(sizes),
        parameter_bytes=draw(sizes),
    )
    cluster = hpgo.Cluster.of(
        nodes=draw(st.integers(1, 3)),
        devices_per_node=draw(st.integers(1, 3)),
        intra_gbit_s=draw(st.floats(1, 1000)),
        inter_gbit_s=draw(st.floats(1, 1000)),
        memory="1 TB",
    )
    return hpgo.plan(
        profile,
        cluster,
        global_batch_size=draw(st.sampled_from([1, 2, 6, 12])),
        schedule=draw(st.sampled_from(["1f1b", "eager_1f1b", "gpipe"])),
        recompute=draw(st.booleans()),
    )


@settings(max_examples=40)
@given(plans())
def test_the_parts_of_a_step_add_up_to_it_and_none_is_negative(plan: hpgo.Plan) -> None:
    parts = bottleneck.parts(plan.stages, plan.micro_batches, plan.step_s)
    assert sum(part.seconds for part in parts) == pytest.approx(plan.step_s)
    assert min(part.seconds for part in parts) >= -1e-12


@settings(max_examples=40)
@given(plans())
def test_every_report_fits_eighty_columns_and_has_each_stage_in_a_row_of_each_table(plan: hpgo.Plan) -> None:
    lines = report.table(plan).splitlines()
    assert max(map(len, lines)) <= report.WIDTH
    tables = lines[next(at for at, line in enumerate(lines) if line.startswith("Stages")) : lines.index("Details")]
    if "Alternatives" in tables:
        tables = tables[: tables.index("Alternatives")]
    rows = [found for line in tables if (found := re.match(r" *([0-9]+)(?:–([0-9]+))?  ", line))]
    covered = [stage for row in rows for stage in range(int(row[1]), int(row[2] or row[1]) + 1)]
    assert covered == 3 * [*range(len(plan.stages))]


@settings(max_examples=40)
@given(plans())
def test_json_keeps_the_whole_plan_and_obeys_the_published_schema(plan: hpgo.Plan) -> None:
    text = plan.to_json()
    assert hpgo.Plan.from_json(text) == plan
    jsonschema.validate(json.loads(text), json.loads((ROOT / "docs/plan.schema.json").read_text(encoding="utf-8")))


def test_the_schema_names_every_field_and_no_other(bert: hpgo.Plan) -> None:
    schema = json.loads((ROOT / "docs/plan.schema.json").read_text(encoding="utf-8"))
    document = json.loads(bert.to_json())
    assert set(schema["properties"]) == set(document)
    assert set(schema["$defs"]["stage"]["properties"]) == set(document["stages"][0])
    assert set(schema["$defs"]["memory"]["properties"]) == set(document["stages"][0]["memory"])
    assert set(schema["$defs"]["alternative"]["properties"]) == set(document["alternatives"][0])


def test_a_report_names_every_stage_and_every_fact(bert: hpgo.Plan) -> None:
    text = " ".join(str(bert).split())
    for words in (
        "Step time 837 ms for 64 samples",
        "tokens … encoder-28 32 0–7 8",
        "encoder-29 … pooler 21 8–15 8",
        "4 micro-batches of 16 samples",
        "proven optimal",
        "every cut between layers; every placement",
        "stage 0 computes for 95.8 % of the step",
        "data parallelism 1.11 s, 33 % longer",
        "pipeline parallelism only 1.01 s, 21 % longer",
    ):
        assert words in text


def test_progress_tells_no_step_before_there_is_one() -> None:
    told: list[tuple[float, float]] = []
    hpgo.plan(
        hpgo.read_profile("gnmt-16"),
        hpgo.Cluster.preset("dapple-a"),
        global_batch_size=1024,
        time_limit_s=3,
        progress=lambda best_s, bound_s: told.append((best_s, bound_s)),
    )
    assert all(best_s > 0 and 0 <= bound_s <= best_s * (1 + 1e-9) for best_s, bound_s in told)


def test_a_gap_is_told_as_a_percentage_with_the_bound(bert: hpgo.Plan) -> None:
    assert "at most 25 % above the best" in report.proof(replace(bert, lower_bound_s=bert.step_s / 1.25))
    assert "takes less than 670 ms" in report.proof(replace(bert, lower_bound_s=bert.step_s / 1.25))


def test_a_stopped_search_never_claims_a_proof_by_itself(bert: hpgo.Plan) -> None:
    stopped = replace(bert, lower_bound_s=bert.step_s / 2, stop_reason="time_limit")
    assert "proven" not in report.proof(stopped)
    assert "stopped" in report.proof(stopped)


def test_a_restricted_search_space_is_named(bert: hpgo.Plan) -> None:
    text = report.search_space(replace(bert, cuts="1,000,000 cut points", placements="compact"))
    assert "one order of the layers (1,000,000 cut points)" in text
    assert "node-aligned placements only" in text


def test_the_best_compact_placement_is_not_called_proven_optimal(bert: hpgo.Plan) -> None:
    step_s = bert.step_s
    compact = replace(bert, placements="compact", node_aligned_bound_s=step_s, lower_bound_s=step_s / 1.031)
    proof = report.proof(compact)
    assert proof.startswith(
        "optimal among node-aligned placements for eager 1F1B, at most 3.1 % above the best of all placements: no plan"
    )
    assert "proven" not in proof
    wider = report.proof(replace(compact, node_aligned_bound_s=step_s / 1.012))
    assert wider.startswith(
        "at most 3.1 % above the best of all placements (1.2 % among node-aligned ones) for eager 1F1B: no plan"
    )
    same = report.proof(replace(compact, node_aligned_bound_s=step_s / 1.031))
    assert same.startswith("at most 3.1 % above the best of all placements for eager 1F1B: no plan")
    nothing = report.proof(replace(compact, lower_bound_s=0.0))
    assert nothing == "optimal among node-aligned placements for eager 1F1B; unknown for other placements"
    closed = replace(compact, lower_bound_s=step_s)
    assert report.proof(closed).startswith("proven optimal for eager 1F1B: no plan of the search space")


@pytest.mark.parametrize(
    ("cluster", "stages", "is_compact"),
    [
        ((16, 1), [(26, range(8)), (27, range(8, 16))], True),
        ((2, 8), [(26, range(4)), (27, range(4, 16))], True),  # begins in a machine, and takes another
        ((2, 8), [(26, range(4)), (27, range(8, 12))], True),  # two machines may be partly used
        ((2, 8), [(26, [0, 1, 8, 9]), (27, [2, 10])], False),
        ((3, 8), [(26, [0, 8, 16]), (27, [1, 9, 17])], False),
        ((8, 8), [(26, range(8)), (27, range(8, 24))], True),
        ((8, 8), [(26, range(8, 64)), (20, range(6)), (7, [6, 7])], True),
        ((8, 8), [(26, range(4)), (27, range(4, 16))], False),  # begins inside a machine, of too many
        ((8, 8), [(26, range(61)), (27, [61, 62, 63])], False),
        ((8, 8), [(26, [0, 1]), (20, [8, 9]), (7, [16])], False),  # three machines partly used
    ],
)
def test_a_scattered_plan_that_no_compact_one_beats_is_not_called_one_of_them(
    cluster: tuple[int, int], stages: list[tuple[int, list[int]]], is_compact: bool
) -> None:
    nodes, each = cluster
    machines = hpgo.Cluster.of(nodes=nodes, devices_per_node=each, intra_gbit_s=100, inter_gbit_s=10, memory="80 GB")
    plan = hpgo.evaluate(hpgo.read_profile("bert-48"), machines, stages, global_batch_size=512)
    plan = replace(
        plan,
        placements="compact",
        node_aligned_bound_s=plan.step_s,
        lower_bound_s=plan.step_s / 1.031,
        stop_reason=None,
    )
    above, nothing = report.proof(plan), report.proof(replace(plan, lower_bound_s=0.0))
    if is_compact:
        assert above.startswith(
            "optimal among node-aligned placements for eager 1F1B, at most 3.1 % above the best of all placements: "
        )
        assert nothing == "optimal among node-aligned placements for eager 1F1B; unknown for other placements"
    else:
        assert above.startswith(
            "at most 3.1 % above the best of all placements, and no node-aligned one is better for eager"
        )
        assert nothing == "no node-aligned placement is better for eager 1F1B; unknown for other placements"


def test_a_plan_that_does_not_fit_says_what_is_missing_where() -> None:
    profile, cluster = hpgo.read_profile("bert-48"), hpgo.Cluster.of(nodes=1, devices_per_node=8, intra_gbit_s=100)
    small = replace(cluster, nodes=hpgo.Cluster.of(nodes=1, devices_per_node=8, intra_gbit_s=1, memory="2GB").nodes)
    plan = hpgo.evaluate(profile, small, [(53, range(8))], global_batch_size=64)
    missing_gb = (plan.stages[0].memory.total_bytes - 2e9) / 1e9
    assert f"over by {missing_gb:.3g} GB" in " ".join(str(plan).split())
    assert "does not fit in memory" in str(plan).splitlines()[0]


def test_markdown_has_the_same_numbers_in_tables(bert: hpgo.Plan) -> None:
    text = report.markdown(bert)
    assert "| 0 | tokens … encoder-28 | 32 | 0–7 | 8 | 2 | 3 |" in text
    assert text.count("|---:|") >= 3


@pytest.mark.parametrize(
    ("devices", "text"),
    [([3], "3"), ([0, 1], "0–1"), ([0, 1, 2, 5, 7, 8], "0–2,5,7–8"), (range(16), "0–15")],
)
def test_devices_are_written_as_ranges(devices: list[int], text: str) -> None:
    assert report.device_ranges(devices) == text


@settings(max_examples=200)
@given(st.data())
def test_a_damaged_plan_is_an_error_or_a_plan_that_prints(bert: hpgo.Plan, data: st.DataObject) -> None:
    document = json.loads(bert.to_json())
    junk = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.just([]) | st.just({})
    records = [document, document["stages"][0], document["stages"][0]["memory"], document["alternatives"][0]]
    for _ in range(data.draw(st.integers(1, 2))):
        record = data.draw(st.sampled_from(records))
        record[data.draw(st.sampled_from(sorted(record)))] = data.draw(junk)
    try:
        plan = hpgo.Plan.from_json(json.dumps(document))
    except hpgo.errors.ArgumentError:
        return
    assert str(plan)
    assert report.markdown(plan)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"format": "hpgo.plan", "version": 2}', '{"format": "hpgo.plan", "version": 1}', "\x00"],
)
def test_what_is_no_plan_is_refused_by_name(text: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(hpgo.errors.ArgumentError) as caught:
        hpgo.Plan.read(file)
    assert str(file) in caught.value.message


@pytest.fixture(scope="module")
def long() -> hpgo.Plan:
    """24 stages, of which all but the first and the last have two layers alike."""
    cluster = hpgo.Cluster.preset("dapple-b:24")
    return hpgo.plan(hpgo.read_profile("bert-48"), cluster, global_batch_size=1024, pipeline_micro_batch_size=2)


def test_stages_alike_share_a_row_that_says_from_where_to_where(long: hpgo.Plan) -> None:
    lines = report.table(long).splitlines()
    start = lines.index("Stages (samples: per replica and micro-batch; in flight: micro-batches)") + 1
    assert lines[start : start + 4] == [
        "stage  layers                   count  devices  replicas  samples  in flight",
        "    0  tokens … encoder-2           6        0         1        2         47",
        " 1–22  encoder-3 … encoder-46  2 each     1–22    1 each        2       45–3",
        "   23  encoder-47 … pooler          3       23         1        2          1",
    ]
    said = report.table(long, width=120).splitlines()
    assert any("stages 1–22: 2 layers × 1; a row has the longest times and the largest memory" in line for line in said)
    assert len(lines) < 50


def test_a_folded_row_holds_the_longest_times_and_the_fullest_memory_of_its_stages(long: hpgo.Plan) -> None:
    _, (_, _, times), (_, _, memory), *_ = report.sections(long)
    assert times[0][:2] == ("0–22", f"{1e3 * max(stage.forward_s for stage in long.stages[:23]):.3g} ms")
    held = [group.memory.total_bytes for group in long.groups[1:23]]
    assert min(held) < max(held)
    assert memory[1][::6] == ("1–22", f"{max(held) / 1e6:.3g} MB")


def test_hosts_alike_share_a_row_with_their_longest_times_and_fullest_memory() -> None:
    plan = hpgo.partition("bert-48", "dapple-c:8")
    columns, rows = chain_report.rows(plan)
    assert [row[:4] for row in rows] == [
        (1, "node0", "V100-16GB", "1-10"),
        ("2–7", "node1 … node6", "V100-16GB", "11-46, 6 each"),
        (8, "node7", "V100-16GB", "47-53"),
    ]
    middle = plan.stages[1:7]
    said = dict(zip(columns, rows[1], strict=True))
    assert said["compute"] == f"{1e3 * max(stage.compute_s for stage in middle):.4g} ms"
    assert said["memory"] == f"{max(stage.memory_bytes for stage in middle) / 1e6:.0f} MB"
    assert "alike       stages 2–7 share a row: times are the longest, memory that of the fullest" in (
        chain_report.table(plan).splitlines()
    )


def test_ranks_alike_share_a_row_that_says_how_many_micro_batches_they_hold() -> None:
    order = hpgo.schedule("1f1b", ranks=64, micro_batches=128)
    held = hpgo.StageBytes(activation_bytes=1e9)
    columns, rows = run_report.ranks(hpgo.simulate(order, memory=held))
    assert columns == ["rank", "busy", "idle / total", "in flight", "peak memory"]
    assert [(row[0], row[3], row[4]) for row in rows] == [("0–63", "64–1", "64–1 GB")]
    slow = [2.0 if rank == 3 else 1.0 for rank in range(8)]
    _, uneven = run_report.ranks(hpgo.simulate(hpgo.schedule("1f1b", ranks=8, micro_batches=8), forward_s=slow))
    assert [(row[0], row[3]) for row in uneven] == [("0–2", "8–6"), ("3", "5"), ("4–7", "4–1")]


def test_ranks_of_a_way_that_hold_the_same_share_a_row_with_the_fullest_s_memory() -> None:
    price = hpgo.estimate_llm("llama-3.1-405b", "h100:16", global_batch_size=32, seq_length=8192, tp=8, pp=16)
    lines = llm_report.lines(price)
    start = next(at for at, line in enumerate(lines) if line.startswith("rank"))
    rows = [line.split() for line in lines[start + 1 : [*lines, ""].index("", start)]]
    assert [row[:2] for row in rows] == [["0", "7"], ["1–14", "8"], ["15", "7"]]
    assert rows[1][-1] == f"{max(stage.peak_bytes for stage in price.stages[1:15]) / 1e9:.1f}"
    assert "of the fullest rank in each row" in " ".join(lines)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_prose_is_as_wide_as_it_may_be(bert: hpgo.Plan, width: int) -> None:
    lines = report.table(bert, width=width).splitlines()
    prose = lines[lines.index("Alternatives") :]
    assert width - 15 <= max(map(len, prose)) <= width
