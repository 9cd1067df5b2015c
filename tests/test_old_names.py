"""Public names of the version before work once more, and say what they are called now."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from refusals import refused
from toys import chain

import hpgo

ROOT = Path(__file__).parent.parent
TOY = chain([1.0, 2.0], 8.0, 4.0)
PAIR = hpgo.Cluster.of(nodes=2, devices_per_node=1, intra_gbit_s=1, inter_gbit_s=1)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    texts = {
        "models.yml": "m: {layers: 2, mem_MB: [1, 1], parameters_in: 1, parameters_out: [1, 1]}",
        "types.yml": "t: {bw_Mbps: 8, mem_MB: 64, model_profiles: {m: [{batch_size: 8, dtype: torch.float32,"
        " time_s: [1, 2]}]}}",
        "devices.yml": "t: [a, b]",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    return [tmp_path / name for name in texts]


def warned(old: str, new: str) -> pytest.WarningsRecorder:
    return pytest.warns(DeprecationWarning, match=f"^`{old}` is now `{new}`; the old name goes with the next version$")


def test_files_are_still_given_to_partition(files: list[Path]) -> None:
    plan = hpgo.partition_files(*files, model="m")
    words = (r"partition\(models, device_types, devices, …\)", r"partition_files\(…\)")
    with warned(*words) as caught:
        assert hpgo.partition(*files, model="m") == plan
    assert caught[0].filename == __file__
    with warned(*words):
        named = dict(zip(("models", "device_types", "devices"), files, strict=True))
        assert hpgo.partition(**named, model="m", batch_size=None) == plan
    with warned(*words), refused(hpgo.errors.ArgumentError, "invalid_argument", "PipeEdge"):
        hpgo.partition(*files)


def test_a_profile_is_still_given_as_models() -> None:
    words = (r"partition\(models=…, device_types=…\)", r"partition\(profile, cluster\)")
    with warned(*words) as caught:
        assert hpgo.partition(models=TOY, device_types=PAIR) == hpgo.partition(TOY, PAIR)
    assert caught[0].filename == __file__
    with warned(*words), refused(hpgo.errors.ArgumentError, "invalid_argument", "Cluster"):
        hpgo.partition(TOY, PAIR, "devices.yml")


def test_arguments_of_partition_still_have_their_old_names(files: list[Path]) -> None:
    with warned("time_limit_s=", "deadline_s="):
        assert hpgo.partition(TOY, PAIR, time_limit_s=5.0) == hpgo.partition(TOY, PAIR)
    with warned("throughput=", "samples_per_s="):
        assert hpgo.partition_files(*files, model="m", throughput=1.0) == hpgo.partition_files(*files, model="m")


def test_chain_plans_still_have_a_throughput_and_a_bottleneck() -> None:
    plan = hpgo.partition(TOY, PAIR)
    with warned("ChainPlan.throughput", "ChainPlan.samples_per_s") as caught:
        assert plan.throughput == plan.samples_per_s
    assert caught[0].filename == __file__
    with warned("ChainPlan.bottleneck", "ChainPlan.limit"):
        assert plan.bottleneck == plan.limit == "stage 2 (machine1)"


def test_readers_still_have_their_old_names(tmp_path: Path) -> None:
    with warned("Cluster.parse", "Cluster.read"):
        assert hpgo.Cluster.parse("h100:3") == hpgo.Cluster.read("h100:3")
    with warned("Layout.parse", "Layout.from_text"):
        assert hpgo.PipelineLayout.parse("Et|tL") == hpgo.PipelineLayout.from_text("Et|tL")
    timeline = hpgo.simulate(hpgo.schedule("1f1b", ranks=2, micro_batches=2))
    path = timeline.save(tmp_path / "run.npz")
    with warned("Timeline.load", "Timeline.read"):
        assert hpgo.Timeline.load(path).to_json() == hpgo.Timeline.read(path).to_json()


def test_the_table_in_the_docs_has_every_old_name() -> None:
    rows = (ROOT / "docs/compatibility.md").read_text(encoding="utf-8").splitlines()
    table = {row.split("`")[1]: row.split("`")[3] for row in rows if row.startswith("| `")}
    calls = [
        [ast.unparse(argument).strip("'") for argument in node.args]
        for file in (ROOT / "python").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "renamed"
    ]
    named = {old: new for old, new in calls if "{" not in old}
    assert named.items() <= table.items()
    assert len(table) == len(calls) + 1  # those of `partition` share one call
