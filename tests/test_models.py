"""Built-in models are the published profiles under names of our own."""

from __future__ import annotations

import json
from pathlib import Path

import networkx
import pytest
from click.testing import CliRunner

import hpgo
from hpgo.cli.main import group
from hpgo.compat import model_from_torch_graph
from hpgo.model.builtin import MODELS, built_in
from hpgo.model.states import State, cut_points

RESULTS = Path(__file__).parent.parent / "profiling_results"
PUBLISHED = {
    name: f"pipedream/{'resnet50.txt' if name == 'resnet-50' else 'vgg16.txt'}"
    if name in {"resnet-50", "vgg-16"}
    else f"hpgo/profiles/{model.file}"
    for name, model in MODELS.items()
}


def published(reference: Path, name: str) -> hpgo.Profile:
    return hpgo.read_profile(reference / PUBLISHED[name], batch_size=built_in(name).batch_sizes[0])


def costs(layer: hpgo.Layer) -> tuple[float, ...]:
    return (*layer.forward_s, *layer.backward_s, *layer.activation_bytes, layer.parameter_bytes)


def without_unread_selectors(profile: hpgo.Profile) -> networkx.DiGraph[str]:
    """The graph without selectors that nobody reads, as PipeDream's planner takes it."""
    graph = profile.networkx()
    unread = [node for node in graph if not graph[node] and graph.nodes[node]["layer"].name.startswith("__getitem__")]
    graph.remove_nodes_from(unread)
    for node, attributes in graph.nodes(data=True):
        attributes["costs"] = costs(attributes["layer"])
        assert node
    return graph


@pytest.mark.parametrize("name", sorted(set(MODELS) - {"resnet-50"}))
def test_a_model_is_the_published_graph_with_the_published_costs(reference, name):
    ours, theirs = without_unread_selectors(built_in(name)), without_unread_selectors(published(reference, name))
    assert len(ours) == len(theirs)
    assert networkx.is_isomorphic(ours, theirs, node_match=lambda one, other: one["costs"] == other["costs"])


def test_resnet_50_is_the_published_chain_of_blocks(reference):
    # Every cut of ours is one of theirs: as much before it, as much across it.
    theirs = {_totals(state) for state in cut_points(published(reference, "resnet-50")).states}
    ours = [_totals(state) for state in cut_points(built_in("resnet-50")).states]
    assert len(ours) == 22
    assert theirs.issuperset(ours)


def _totals(state: State) -> tuple[float, ...]:
    times = (round(1e9 * seconds) for seconds in (*state.forward_s, *state.backward_s))
    return (*times, *state.boundary_bytes, state.parameter_bytes)


@pytest.mark.parametrize("name", sorted(set(MODELS) - {"resnet-50"}))
def test_a_model_is_cut_like_the_published_graph(reference, name):
    ours, theirs = cut_points(built_in(name)), cut_points(published(reference, name))
    assert ours.exact == theirs.exact
    assert sorted(map(_totals, ours.states)) == sorted(map(_totals, theirs.states))


# Known without the reference data: layers, parameter bytes, milliseconds of all layers in both directions.
FIGURES = {
    "amoebanet-18": (26, 1_914_477_860, 717.81),
    "amoebanet-36": (44, 3_731_135_780, 168.05),
    "bert-24": (29, 1_340_567_552, 515.357),
    "bert-48": (53, 2_549_805_056, 343.757),
    "gnmt-16": (80, 1_162_988_352, 248.916),
    "gnmt-32": (160, 1_834_601_280, 452.4594),
    "resnet-50": (21, 102_228_128, 462.381),
    "vgg-16": (41, 553_430_176, 690.507),
    "vgg-19": (26, 548_047_022, 147.61),
    "xlnet-24": (31, 1_379_000_000, 218.11),
    "xlnet-36": (43, 2_003_000_000, 317.71),
}


@pytest.mark.parametrize("name", FIGURES)
def test_a_model_has_its_published_size(name):
    profile = built_in(name)
    total_ms = 1e3 * sum(layer.forward_s[0] + layer.backward_s[0] for layer in profile.layers)
    assert (len(profile.layers), profile.parameter_bytes, total_ms) == pytest.approx(FIGURES[name], rel=1e-12)
    assert profile.source


def test_a_model_is_read_by_name_and_a_misspelt_one_is_suggested():
    assert hpgo.read_profile("vgg-19") == built_in("vgg-19")
    assert hpgo.read_profile("vgg-19", batch_size=32) == built_in("vgg-19")
    with pytest.raises(hpgo.ArgumentError, match="batch size 32, not 16"):
        hpgo.read_profile("vgg-19", batch_size=16)
    with pytest.raises(hpgo.ProfileError, match="no built-in model and no file") as caught:
        hpgo.read_profile("vgg19")
    assert caught.value.hint == "did you mean `vgg-19`?"


def test_the_written_profiles_are_current_and_say_what_they_are(tmp_path):
    written = CliRunner().invoke(group, ["models", "write", str(tmp_path)])
    assert written.exit_code == 0
    files = {model.file for model in MODELS.values()}
    assert {Path(line).name for line in written.output.splitlines()} == files
    about = (RESULTS / "README.md").read_text(encoding="utf-8")
    for file in files:
        assert (RESULTS / file).read_bytes() == (tmp_path / file).read_bytes(), (
            "run `hpgo models write profiling_results`"
        )
        assert f"`{file}`" in about


@pytest.mark.parametrize("name", MODELS)
def test_a_written_profile_reads_back_as_the_model(name):
    model = built_in(name)
    again = hpgo.read_profile(RESULTS / MODELS[name].file, batch_size=model.batch_sizes[0])
    assert (again.batch_sizes, again.layers, again.edges) == (model.batch_sizes, model.layers, model.edges)


def test_a_file_without_batch_size_hints_at_the_model_it_is():
    with pytest.raises(hpgo.ProfileError) as caught:
        hpgo.read_profile(RESULTS / "vgg16.txt")
    assert "`vgg-16` was measured at 128" in caught.value.hint


def test_the_command_lists_models_and_writes_chosen_ones(tmp_path):
    listed = CliRunner().invoke(group, ["models"]).output.splitlines()
    assert [line.split()[0] for line in listed[: listed.index("")]] == ["model", *MODELS]
    assert max(map(len, listed)) <= 80
    entries = json.loads(CliRunner().invoke(group, ["models", "--json"]).output)
    assert {entry["name"]: entry["parameter_bytes"] for entry in entries}["bert-48"] == 2_549_805_056
    CliRunner().invoke(group, ["models", "write", str(tmp_path), "bert-48"])
    assert [path.name for path in tmp_path.iterdir()] == ["bert-48-pbs-2.txt"]
    wrong = CliRunner().invoke(group, ["models", "write", str(tmp_path), "bert48"])
    assert wrong.exception.hint == "did you mean `bert-48`?"


@pytest.mark.parametrize("name", sorted(set(MODELS) - {"gnmt-32", "resnet-50"}))
def test_the_original_planner_sees_the_same_states_in_the_same_order(reference, name):
    batch_size = built_in(name).batch_sizes[0]

    def states(path: Path) -> list[float]:
        layers = model_from_torch_graph(str(path), batch_size, 64 * batch_size).layers
        return [
            value
            for layer in layers
            for value in (layer.compute_time, layer.output_activation_size, layer.parameter_size)
        ]

    ours, theirs = states(RESULTS / MODELS[name].file), states(reference / PUBLISHED[name])
    assert len(ours) == len(theirs)
    assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-9)
