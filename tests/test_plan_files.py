"""Plan files: that they carry all that their price assumed, and that it can be computed again from them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from toys import chain

import hpgo
from hpgo.cli.main import group
from hpgo.hardware.cluster import Device, Link, Node
from hpgo.planning.problem import SCHEDULES
from hpgo.planning.schedule_search import ONE_STAGE, VIRTUAL_STAGES

ROOT = Path(__file__).parent.parent
SCHEMA = jsonschema.Draft202012Validator(json.loads((ROOT / "docs/plan.schema.json").read_text(encoding="utf-8")))


def bert(**options: Any) -> hpgo.Plan:
    return hpgo.plan(hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a"), global_batch_size=64, **options)


def again(plan: hpgo.Plan, **options: Any) -> hpgo.Plan:
    return hpgo.Plan.from_json(plan.to_json(**options))


@pytest.fixture(scope="module")
def plan() -> hpgo.Plan:
    return bert()


@pytest.fixture(scope="module")
def auto() -> hpgo.Plan:
    return bert(schedule="auto")


# --- The same price again ---------------------------------------------------------------------------------------------


@st.composite
def profiles(draw: st.DrawFn) -> hpgo.Profile:
    """Chains and branching graphs of a few layers, some of them loading data, at one or two batch sizes."""
    count, sizes = draw(st.integers(1, 7)), draw(st.sampled_from([(1,), (2,), (1, 4), (2, 3)]))

    def measured(minimum: float, maximum: float) -> tuple[float, ...]:
        numbers = st.one_of(st.just(0.0), st.floats(minimum, maximum))
        return tuple(draw(st.lists(numbers, min_size=len(sizes), max_size=len(sizes))))

    layers = tuple(
        hpgo.Layer(
            f"block.{index}",
            "Input" if index == 0 else "linear",
            measured(1e-3, 1.0),
            (0.0,) * len(sizes) if index == 0 else measured(1e-3, 1.0),
            measured(1.0, 1e7),
            0 if index == 0 else draw(st.integers(0, 10**9)),
            saved_bytes=draw(st.one_of(st.none(), st.just(measured(1.0, 1e8)))),
        )
        for index in range(count)
    )
    edges = {(f"block.{index}", f"block.{index + 1}") for index in range(count - 1)}
    for _ in range(draw(st.integers(0, 3))):
        start, end = sorted((draw(st.integers(0, count - 1)), draw(st.integers(0, count - 1))))
        if start < end:
            edges.add((f"block.{start}", f"block.{end}"))
    if count > 2 and draw(st.booleans()):  # two branches
        edges.discard(("block.1", "block.2"))
        edges.add(("block.1", f"block.{count - 1}"))
    return hpgo.Profile("random", sizes, layers, tuple(sorted(edges)), "drawn")


@st.composite
def clusters(draw: st.DrawFn) -> hpgo.Cluster:
    """Machines of one or two device types, that may even have one name."""
    kinds = [
        Device(draw(st.sampled_from(["a", "b"])), draw(st.floats(2e9, 1e12)), draw(st.sampled_from([0.7, 1.0, 1.3])))
        for _ in range(2)
    ]
    nodes = st.builds(Node, st.sampled_from(kinds), st.integers(1, 3), st.sampled_from(["", "node"]))
    links = st.builds(Link, st.floats(1e6, 1e11), st.floats(1e6, 1e11), st.sampled_from([0.0, 1e-3]))
    return hpgo.Cluster("drawn", tuple(draw(st.lists(nodes, min_size=1, max_size=3))), draw(links), draw(links), "here")


@st.composite
def questions(draw: st.DrawFn) -> tuple[hpgo.Profile, hpgo.Cluster, dict[str, Any]]:
    schedule = draw(st.sampled_from([*SCHEDULES, *ONE_STAGE]))
    options = {
        "global_batch_size": draw(st.sampled_from([4, 6, 8, 12])),
        "schedule": schedule,
        "recompute": draw(st.sampled_from([False, True, "auto"])) if schedule in SCHEDULES else False,
        "even_split": draw(st.booleans()),
        "overlap": draw(st.booleans()),
        "min_samples_per_replica": draw(st.sampled_from([None, 1])),
        "include_data_loading": draw(st.booleans()),
        "memory": hpgo.MemoryModel(
            draw(st.floats(0, 2)), draw(st.floats(0, 8)), draw(st.booleans()), draw(st.sampled_from([0.0, 1e8]))
        ),
    }
    return draw(profiles()), draw(clusters()), options


@settings(max_examples=100)
@given(questions())
def test_a_plan_from_a_file_has_its_price_to_the_last_digit_and_so_have_its_alternatives(
    question: tuple[hpgo.Profile, hpgo.Cluster, dict[str, Any]],
) -> None:
    profile, cluster, options = question
    try:
        best = hpgo.plan(profile, cluster, **options)
    except hpgo.errors.InfeasibleError:
        return
    read = again(best)
    assert read == best
    SCHEMA.validate(json.loads(best.to_json()))
    lean = again(best, embed=False)
    for saved in (read, *(row.plan for row in best.alternatives if row.plan)):
        priced = saved.reevaluate()
        searched = {"lower_bound_s": None, "cuts": "all", "placements": "all", "stop_reason": None}
        assert priced == replace(saved, alternatives=(), explored_labels=0, simulated=0, **searched)
    assert lean.reevaluate(profile=profile, cluster=cluster).step_s == best.step_s


def test_every_compared_schedule_has_its_plan_and_that_plan_its_price(auto: hpgo.Plan) -> None:
    planned = [choice for choice in auto.schedules if choice.planned and choice.stages]
    assert len(planned) == len(SCHEDULES) + len(ONE_STAGE) + len(VIRTUAL_STAGES)
    for choice in planned:
        own = again(auto).alternative(choice.name)
        assert own.schedule == choice.name
        assert again(own) == own
        assert own.reevaluate().stages == own.stages
        if choice.step_s is not None:
            assert own.reevaluate().step_s == own.step_s == choice.step_s


def test_orders_that_were_fitted_to_times_are_kept_in_words_and_run_as_they_stand() -> None:
    plan = bert(schedule="zb")
    assert len(plan.actions) == len(plan.stages)
    assert hpgo.Schedule.from_text("\n".join(plan.actions)) == plan.to_schedule()
    slower = json.loads(plan.to_json())
    for layer in slower["assumptions"]["profile"]["layers"]:
        layer["forward_s"] *= 3
    priced = hpgo.Plan.from_json(json.dumps(slower)).reevaluate()
    assert priced.actions == plan.actions
    assert priced.step_s > plan.step_s


@pytest.mark.parametrize("wrong", [["0F0"], ["0F0,0B0"] * 2, ["x"] * 2, ["0F0,0F1,0B0,0B1", "1B0,1F0,1B1,1F1"]])
def test_actions_that_are_not_the_plans_are_refused_when_they_are_run(wrong: list[str]) -> None:
    document = json.loads(bert(schedule="zb_h1", pipeline_micro_batch_size=32).to_json())
    assert len(document["stages"]) == 2
    document["actions"] = wrong
    with pytest.raises(hpgo.errors.HpgoError) as caught:
        hpgo.Plan.from_json(json.dumps(document)).reevaluate()
    assert caught.value.hint


@pytest.mark.parametrize(
    ("key", "factor"), [("forward_s", 2), ("backward_s", 2), ("activation_bytes", 40), ("parameter_bytes", 40)]
)
def test_a_changed_layer_changes_the_price(plan: hpgo.Plan, key: str, factor: int) -> None:
    document = json.loads(plan.to_json())
    for layer in document["assumptions"]["profile"]["layers"]:
        layer[key] *= factor
    assert hpgo.Plan.from_json(json.dumps(document)).reevaluate().step_s > plan.step_s


def test_a_changed_assumption_changes_what_it_is_about(plan: hpgo.Plan) -> None:
    def priced(**changed: Any) -> hpgo.Plan:
        document = json.loads(plan.to_json())
        document["assumptions"] |= changed
        return hpgo.Plan.from_json(json.dumps(document)).reevaluate()

    assert priced(overlap=False).step_s > plan.step_s
    memory = {"gradients_per_weight": 1, "optimizer_per_weight": 6, "shard_optimizer": False, "reserved_bytes": 1e9}
    held, before = priced(memory=memory).stages[0], plan.stages[0]
    assert held.memory.optimizer_bytes == 3 * before.memory.optimizer_bytes
    assert held.capacity_bytes == before.capacity_bytes - 1e9


def test_windows_are_those_of_the_file_and_are_not_chosen_again(plan: hpgo.Plan) -> None:
    assert plan.stages[0].max_in_flight == 3
    document = json.loads(plan.to_json())
    document["stages"][0]["max_in_flight"] = 2
    priced = hpgo.Plan.from_json(json.dumps(document)).reevaluate()
    assert [stage.max_in_flight for stage in priced.stages] == [2, 1]
    assert priced.step_s > plan.step_s
    assert hpgo.Plan.from_json(json.dumps(document)).timeline().makespan_s == pytest.approx(priced.step_s, rel=1e-9)


# --- What crosses cuts ------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(questions())
def test_what_crosses_a_cut_is_what_its_transfer_was_priced_with(
    question: tuple[hpgo.Profile, hpgo.Cluster, dict[str, Any]],
) -> None:
    profile, cluster, options = question
    cut = len(profile.layers) // 2
    if cluster.devices < 2 or not cut:
        return
    stages = [(cut, [0]), (len(profile.layers) - cut, [cluster.devices - 1])]
    size = options["global_batch_size"]
    options |= {"schedule": "gpipe", "recompute": False, "pipeline_micro_batch_size": size}
    priced = hpgo.evaluate(profile, cluster, stages, **options)
    first = {layer.id for layer in profile.layers[:cut]}
    crossing = {start for start, end in profile.edges if start in first and end not in first}
    assert {one.layer for one in priced.boundary_tensors[0]} == crossing
    link = cluster.intra if len(cluster.nodes) == 1 else cluster.inter
    total = sum(one.bytes or 0 for one in priced.boundary_tensors[0])
    assert priced.stages[0].transfer_busy_s == pytest.approx(total / link.bytes_per_s)


def test_what_is_read_further_on_crosses_every_cut_on_its_way() -> None:
    profile = hpgo.Profile.chain(
        "skip", batch_size=2, forward_s=[1] * 4, backward_s=[1] * 4, activation_bytes=[10, 20, 30, 40],
        parameter_bytes=[0] * 4,
    )  # fmt: skip
    profile = replace(profile, edges=(*profile.edges, ("layer0", "layer3")))
    cluster = hpgo.Cluster.of(nodes=1, devices_per_node=4, intra_gbit_s=100)
    plan = hpgo.evaluate(
        profile, cluster, [(1, [index]) for index in range(4)], global_batch_size=8, pipeline_micro_batch_size=4
    )
    assert [[(one.layer, one.bytes) for one in cut] for cut in plan.boundary_tensors] == [
        [("layer0", 20)],
        [("layer0", 20), ("layer1", 40)],
        [("layer0", 20), ("layer2", 60)],
    ]


# --- Files ------------------------------------------------------------------------------------------------------------


def test_a_file_tells_blocks_versions_and_assumptions(plan: hpgo.Plan) -> None:
    document = json.loads(plan.to_json())
    assert document["version"] == 3
    assert document["made_with"] == hpgo.__version__
    assumptions = document["assumptions"]
    assert assumptions["blocks"]["stem"] == "encoder-"
    assert len(assumptions["blocks"]["blocks"]) == 48
    assert assumptions["blocks"]["after"] == ["pooler"]
    assert assumptions["memory"]["optimizer_per_weight"] == 2
    profile, cluster = assumptions["profile"], assumptions["cluster"]
    assert (profile["name"], cluster["name"]) == (plan.profile, plan.cluster)


def test_the_embedded_files_are_files_of_their_own(plan: hpgo.Plan, tmp_path: Path) -> None:
    assumptions = json.loads(plan.to_json())["assumptions"]
    for kind in ("profile", "cluster"):
        (tmp_path / f"{kind}.json").write_text(json.dumps(assumptions[kind]))
    assert hpgo.read_profile(tmp_path / "profile.json") == hpgo.read_profile("bert-48")
    assert hpgo.Cluster.read(tmp_path / "cluster.json") == hpgo.Cluster.preset("dapple-a")


def test_a_plan_for_thousands_of_devices_keeps_a_small_file() -> None:
    profile = chain([1.0] * 8, 1e6, 1e8)
    cluster = hpgo.Cluster.preset("h100:2048")
    stages = [(1, range(2048 * index, 2048 * (index + 1))) for index in range(8)]
    plan = hpgo.evaluate(profile, cluster, stages, global_batch_size=2048 * 64, pipeline_micro_batch_size=2048)
    text = plan.to_json()
    assert len(json.dumps(json.loads(text)["assumptions"]["cluster"])) < 1000
    assert len(text) < 8 * plan.devices + 20_000  # its numbers are five digits and a comma
    assert again(plan).reevaluate().step_s == plan.step_s


def test_a_lean_plan_keeps_digests_and_takes_only_what_matches_them(plan: hpgo.Plan) -> None:
    lean = again(plan, embed=False)
    assert len(lean.to_json()) < len(plan.to_json())
    profile, cluster = hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a")
    renamed = replace(profile, name="mine", source="elsewhere")
    assert lean.reevaluate(profile=renamed, cluster=replace(cluster, name="ours", source="")).step_s == plan.step_s
    with refused(hpgo.errors.ArgumentError, "mismatch"):
        lean.reevaluate(cluster=cluster)
    with refused(hpgo.errors.ArgumentError, "mismatch"):
        lean.reevaluate(profile=profile)
    for other in ({"profile": hpgo.read_profile("bert-24")}, {"cluster": hpgo.Cluster.preset("dapple-b")}):
        with refused(hpgo.errors.ArgumentError, "mismatch", next(iter(other))):
            lean.reevaluate(**{"profile": profile, "cluster": cluster} | other)
        with refused(hpgo.errors.ArgumentError, "mismatch", next(iter(other))):
            plan.reevaluate(**other)


def _version_1(plan: hpgo.Plan) -> dict[str, Any]:
    """The plan as version 1 of the format has it."""
    document = json.loads(plan.to_json())
    for key in ("made_with", "nodes", "boundary_tensors", "actions", "assumptions", "stop_reason"):
        del document[key]
    for row in (*document["alternatives"], *document["schedules"]):
        del row["plan"]
    return document | {"version": 1}


def test_a_file_of_version_1_is_read_and_says_what_it_lacks(auto: hpgo.Plan) -> None:
    old = hpgo.Plan.from_json(json.dumps(_version_1(auto)))
    assert (old.stages, old.step_s, old.schedules[0].step_s) == (auto.stages, auto.step_s, auto.schedules[0].step_s)
    assert (old.assumptions, old.boundary_tensors, old.made_with) == (None, (), None)
    assert str(old) == str(replace(auto, assumptions=None))  # it does not say what the optimizer keeps
    with refused(hpgo.errors.ArgumentError, "missing", "1"):
        old.reevaluate()
    with refused(hpgo.errors.ArgumentError, "invalid_argument", "gpipe") as caught:
        old.alternative("gpipe")
    assert "saved without" in caught.value.hint
    assert again(old) == old
    SCHEMA.validate(json.loads(old.to_json()))


def test_a_file_that_an_older_hpgo_wrote_is_read_and_shown() -> None:
    old = hpgo.Plan.read(ROOT / "tests/golden/plan-version-1.json")
    new = hpgo.plan(hpgo.read_profile("vgg-19"), hpgo.Cluster.preset("dapple-c"), global_batch_size=2048)
    assert (old.stages, old.step_s, old.alternatives[0].step_s) == (new.stages, new.step_s, new.alternatives[0].step_s)
    assert old.timeline().makespan_s == new.timeline().makespan_s
    assert old.for_rank(3).stages[0].rows == new.for_rank(3).stages[0].rows
    for lacking in (old.reevaluate, lambda: old.assumed):
        with refused(hpgo.errors.ArgumentError, "missing", "1"):
            lacking()


def test_a_file_of_version_2_is_read_by_its_older_names() -> None:
    old = hpgo.Plan.read(ROOT / "tests/golden/plan-version-2.json")
    ask = {"global_batch_size": 64, "framework": "megatron", "tolerance": 0.15}
    new = hpgo.plan(hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a"), **ask)
    assert old.memory_preference == new.memory_preference
    # The description of the search space is text of its time. The file keeps it, and all numbers are those of today.
    assert old.restriction is not None
    assert old.restriction.space.endswith("with equal shares")
    assert new.restriction == replace(old.restriction, space=new.restriction.space)
    assert old.stages == new.stages
    assert old.alternatives[0].plan is not None
    assert json.loads(old.to_json())["version"] == 3


def test_alternatives_are_plans_of_their_own(plan: hpgo.Plan) -> None:
    shared = plan.alternative("data parallelism")
    assert [stage.replicas for stage in shared.stages] == [16]
    assert shared.step_s == plan.alternatives[0].step_s
    straight = again(plan).alternative("pipeline parallelism only")
    assert [stage.replicas for stage in straight.stages] == [1] * 16
    assert len(straight.boundary_tensors) == 15
    assert straight.timeline().makespan_s == pytest.approx(straight.step_s, rel=1e-9)


def test_an_unknown_alternative_is_told_which_there_are(plan: hpgo.Plan) -> None:
    with pytest.raises(hpgo.errors.ArgumentError) as caught:
        plan.alternative("straight")
    assert "data parallelism, pipeline parallelism only" in caught.value.hint


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (
            ("stages", 0, "max_in_flight"),
            0,
            "stage 0 of a plan has no layers, devices, samples, or micro-batches in flight",
        ),
        (("stages", 1, "layers", 3), "absent", "stage 1 has layer `absent`, which the profile of the plan lacks"),
        (
            ("assumptions", "blocks"),
            {"stem": "x", "before": [], "blocks": [[]], "after": []},
            "a block of a model has no",
        ),
    ],
)
def test_what_would_only_fail_later_is_refused_when_it_is_read(
    plan: hpgo.Plan, path: tuple[Any, ...], value: object, says: str
) -> None:
    document = json.loads(plan.to_json())
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(hpgo.errors.ArgumentError) as caught:
        hpgo.Plan.from_json(json.dumps(document))
    assert says in caught.value.message


# --- The command line -------------------------------------------------------------------------------------------------


def run(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(group, list(words))
    assert not isinstance(result.exception, hpgo.errors.InternalError)
    if isinstance(result.exception, hpgo.errors.HpgoError):
        return 1, result.stdout, f"{result.exception.message}; {result.exception.hint}"
    return result.exit_code, result.stdout, result.stderr


def test_evaluating_a_saved_plan_gives_its_step_and_says_so_if_it_does_not(plan: hpgo.Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    code, shown, _ = run("evaluate", str(tmp_path / "plan.json"))
    assert code == 0
    assert "Stored step  837 ms in the file, unchanged by the new evaluation" in shown
    document = json.loads(plan.to_json())
    document["assumptions"]["profile"]["layers"][10]["forward_s"] *= 2
    (tmp_path / "edited.json").write_text(json.dumps(document))
    code, shown, _ = run("evaluate", str(tmp_path / "edited.json"))
    assert code == 0
    assert f"{plan.step_s!r} s in the file, but 0.8" in re.sub(r"\s+", " ", shown)
    code, shown, told = run("evaluate", str(tmp_path / "edited.json"), "--json")
    assert hpgo.Plan.from_json(shown).step_s > plan.step_s
    assert f"is {plan.step_s!r} s, but now" in told


def test_a_plan_saved_lean_is_evaluated_with_its_files(tmp_path: Path) -> None:
    lean, dp = str(tmp_path / "lean.json"), str(tmp_path / "dp.json")
    words = ["plan", "bert-48", "-c", "dapple-a", "-b", "64", "--no-embed", "-o", lean]
    assert run(*words, "--save-alternative", f"data parallelism={dp}")[0] == 0
    for file, stages in ((lean, 2), (dp, 1)):
        assert json.loads(Path(file).read_text())["assumptions"]["profile"].keys() == {"sha256"}
        code, shown, _ = run("evaluate", file, "--profile", "bert-48", "--cluster", "dapple-a", "--json")
        assert code == 0
        assert len(hpgo.Plan.from_json(shown).stages) == stages
    code, _, told = run("evaluate", lean)
    assert code == 1
    assert "saved without its profile `bert-48`" in told
    code, _, told = run("evaluate", lean, "--profile", "vgg-19", "--cluster", "dapple-a")
    assert code == 1
    assert "another profile" in told


@pytest.mark.parametrize(
    ("words", "code", "named"),
    [
        (["PLAN", "-b", "64"], 2, "leave out -b"),
        (["PLAN", "--schedule", "gpipe", "--stages", "53@0-7"], 2, "leave out --schedule, --stages"),
        (["missing.json"], 1, "file not found: `missing.json`"),
        (["bert-48"], 2, "--cluster"),
        (["bert-48", "-c", "dapple-a", "-b", "64"], 2, "--stages"),
        (["bert-48", "-c", "dapple-a", "-b", "64", "--stages", "53@0-7", "--profile", "vgg-19"], 2, "saved plan"),
    ],
)
def test_what_a_saved_plan_says_itself_is_not_asked_again(
    words: list[str], code: int, named: str, plan: hpgo.Plan, tmp_path: Path
) -> None:
    plan.save(tmp_path / "plan.json")
    words = [str(tmp_path / "plan.json") if word == "PLAN" else word for word in words]
    found, _, told = run("evaluate", *words)
    assert found == code
    assert named in told


@pytest.mark.parametrize(
    ("alternative", "code", "named"),
    [
        ("data-parallel=x.json", 1, "data parallelism, pipeline parallelism only"),
        ("gpipe=x.json", 1, "data parallelism"),
        ("data parallelism", 2, "NAME=FILE"),
        ("=x.json", 2, "NAME=FILE"),
    ],
)
def test_an_alternative_that_cannot_be_saved_is_named(
    alternative: str, code: int, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found, shown, told = run("plan", "bert-48", "-c", "dapple-a", "-b", "64", "--save-alternative", alternative)
    assert found == code
    assert named in told
    assert ("837 ms for 64 samples" in shown) == (code == 1), "a plan that was found is shown all the same"


def test_alternatives_of_several_plans_are_not_saved(tmp_path: Path) -> None:
    words = [
        "plan",
        "bert-48",
        "-c",
        "dapple-a",
        "-b",
        "64,128",
        "--save-alternative",
        f"data parallelism={tmp_path}/x",
    ]
    code, _, told = run(*words)
    assert code == 2
    assert "one batch size" in told


def test_a_bound_from_before_all_placements_were_bounded_is_read_as_that_of_compact_ones() -> None:
    plan = hpgo.plan(hpgo.read_profile("vgg-19"), hpgo.Cluster.preset("dapple-b"), global_batch_size=256)
    older = json.loads(plan.to_json()) | {"placements": "compact"}
    del older["node_aligned_bound_s"]
    read = hpgo.Plan.from_json(json.dumps(older))
    assert (read.lower_bound_s, read.optimality_gap) == (None, None)
    assert read.node_aligned_bound_s == plan.lower_bound_s
    assert hpgo.Plan.from_json(read.to_json()) == read
