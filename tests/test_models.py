"""Built-in models are the published profiles under names of our own."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import networkx
import pytest
from click.testing import CliRunner
from refusals import refused

import hpgo
from hpgo.cli.main import group
from hpgo.compat import model_from_torch_graph, model_of
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


def bert_parameters(layers: int) -> int:
    """Weights and biases of a BERT of hidden size 1024 with the pooler, as its authors lay it out."""
    hidden, words, positions, segments = 1024, 30_522, 512, 2
    embeddings = (words + positions + segments + 2) * hidden  # the last two are the norm's
    attention = 4 * (hidden * hidden + hidden)
    feed_forward = 2 * 4 * hidden * hidden + 4 * hidden + hidden
    return embeddings + layers * (attention + feed_forward + 4 * hidden) + hidden * hidden + hidden


def vgg_parameters(channels: list[int]) -> int:
    """Weights and biases of a VGG: 3 × 3 convolutions, then three linear layers on 7 × 7 × 512 values."""
    convolutions = sum(9 * start * end + end for start, end in itertools.pairwise([3, *channels]))
    return convolutions + sum(start * end + end for start, end in itertools.pairwise([25_088, 4096, 4096, 1000]))


def resnet_50_parameters() -> int:
    """Weights of ResNet-50: bottlenecks of three convolutions without biases, each with a norm of two vectors."""
    count, width = 3 * 64 * 49 + 2 * 64, 64
    for blocks, inner in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            outer = 4 * inner
            count += width * inner + 9 * inner * inner + inner * outer + 2 * (2 * inner + outer)
            count += 0 if block else width * outer + 2 * outer  # the shortcut changes its width once a group
            width = outer
    return count + 2048 * 1000 + 1000


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("bert-24", bert_parameters(24)),
        ("bert-48", bert_parameters(48)),
        ("resnet-50", resnet_50_parameters()),
        ("vgg-16", vgg_parameters([64] * 2 + [128] * 2 + [256] * 3 + [512] * 6)),
    ],
)
def test_a_model_has_the_weights_of_its_architecture(name, parameters):
    assert built_in(name).parameter_bytes == 4 * parameters


@pytest.mark.parametrize("name", sorted(set(MODELS) - {"gnmt-32"}))
def test_every_cut_of_a_model_has_before_it_all_that_its_layers_read(name):
    profile = built_in(name)
    graph = profile.networkx()
    found = cut_points(profile)
    assert found.exact
    for state in found.states:
        before = {profile.layers[index].id for index in state.layers}
        assert all(before.issuperset(graph.predecessors(node)) for node in before)
        seconds = sum(profile.layers[index].forward_s[0] for index in state.layers)
        assert state.forward_s[0] == pytest.approx(seconds, rel=1e-12)
    assert len(found.states[-1].layers) == len(profile.layers)


@pytest.mark.parametrize("name", sorted(set(MODELS) - {"gnmt-32"}))
def test_the_original_planner_sees_the_same_model_in_its_file_and_under_its_name(name):
    batch_size = built_in(name).batch_sizes[0]
    of_file = model_from_torch_graph(str(RESULTS / MODELS[name].file), batch_size, 64 * batch_size)
    of_name = model_of(built_in(name), 64 * batch_size)
    assert of_file.layers == of_name.layers
    assert 0 < sum(layer.parameter_size for layer in of_file.layers) <= built_in(name).parameter_bytes * (1 + 1e-9)


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
    with refused(hpgo.errors.ArgumentError, "mismatch", "32", "16"):
        hpgo.read_profile("vgg-19", batch_size=16)
    with refused(hpgo.errors.ProfileError, "unknown_name") as caught:
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
    with pytest.raises(hpgo.errors.ProfileError) as caught:
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
