"""Cut points: a user asks where a model may be cut."""

from __future__ import annotations

import networkx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused
from toys import chain

import hpgo
from hpgo.model.states import cut_points


def reference_profile(reference, name):
    folder = "hpgo/profiles" if "-pbs-" in name else "pipedream"
    return hpgo.read_profile(reference / folder / f"{name}.txt", batch_size=None if "-pbs-" in name else 32)


def test_two_branches_may_be_cut_in_any_combination():
    layer = {"forward_s": (1.0,), "backward_s": (2.0,), "activation_bytes": (8.0,), "parameter_bytes": 1.0}
    layers = tuple(hpgo.Layer(name, name, **layer) for name in "abcd")
    diamond = hpgo.Profile("diamond", (1,), layers, (("a", "b"), ("a", "c"), ("b", "d"), ("c", "d")))
    found = cut_points(diamond)
    assert found.exact
    assert [state.layers for state in found.states] == [(), (0,), (0, 1), (0, 2), (0, 1, 2), (0, 1, 2, 3)]
    assert [state.boundary_bytes for state in found.states] == [(0,), (8,), (16,), (16,), (16,), (0,)]
    assert [state.saved_bytes[0] for state in found.states] == [0, 8, 16, 16, 24, 32]


def test_sums_are_kept_for_each_batch_size():
    layer = hpgo.Layer("a", "a", (1.0, 1.5), (2.0, 3.0), (8.0, 16.0), 4.0, saved_bytes=(10.0, 20.0))
    state = cut_points(hpgo.Profile("one", (1, 2), (layer,), ())).states[-1]
    assert state.forward_s == (1.0, 1.5)
    assert state.saved_bytes == (10.0, 20.0)
    assert state.parameter_bytes == 4.0


def test_a_bound_that_no_graph_can_keep_is_refused():
    with refused(hpgo.errors.ArgumentError, "invalid_argument", "1", name="bound"):
        cut_points(chain([1.0]), bound=1)


@st.composite
def branching_profiles(draw):
    """Up to nine layers that all cost something, any of them reading any earlier ones."""
    count = draw(st.integers(1, 9))
    sizes = draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    pairs = [(start, end) for start in range(count) for end in range(start + 1, count)]
    edges = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    layers = tuple(
        hpgo.Layer(str(index), "", (2.0**index,), (0.0,), (float(size),), 1.0) for index, size in enumerate(sizes)
    )
    return hpgo.Profile("any", (1,), layers, tuple((str(start), str(end)) for start, end in edges))


@given(branching_profiles())
def test_cuts_are_the_antichains_of_the_graph_and_carry_what_is_read_behind_them(profile):
    graph = networkx.DiGraph(profile.edges)
    graph.add_nodes_from(layer.id for layer in profile.layers)
    before = {
        frozenset(int(node) for top in antichain for node in (top, *networkx.ancestors(graph, top)))
        for antichain in networkx.antichains(graph)
    }
    found = cut_points(profile)
    assert found.exact
    assert {frozenset(state.layers) for state in found.states} == before
    assert len(found.states) == len(before)
    for state in found.states:
        read = {start for start, end in profile.edges if int(start) in state.layers and int(end) not in state.layers}
        assert state.boundary_bytes == (sum(profile.layers[int(start)].activation_bytes[0] for start in read),)
        assert state.forward_s == (sum(2.0**index for index in state.layers),)


def parallel_chains(chains, length):
    """Chains side by side between a first and a last layer: 2 + (length + 1) ** chains cuts."""
    ids = [f"{chain}.{place}" for chain in range(chains) for place in range(length)]
    layers = tuple(hpgo.Layer(name, "", (1.0,), (1.0,), (8.0,), 4.0) for name in ("first", *ids, "last"))
    edges = [
        edge
        for chain in range(chains)
        for edge in (
            ("first", f"{chain}.0"),
            *((f"{chain}.{place - 1}", f"{chain}.{place}") for place in range(1, length)),
            (f"{chain}.{length - 1}", "last"),
        )
    ]
    return hpgo.Profile("wide", (1,), layers, tuple(edges))


@pytest.mark.parametrize(("chains", "length"), [(1, 30), (3, 5), (9, 1), (6, 3)])
def test_parallel_chains_are_cut_at_any_place_of_each(chains, length):
    found = cut_points(parallel_chains(chains, length))
    assert found.exact
    assert len(found.states) == 2 + (length + 1) ** chains


def test_a_model_too_wide_for_all_its_cuts_falls_back_to_one_order_and_says_so():
    profile = parallel_chains(chains=7, length=3)  # 2 + 4 ** 7 cuts
    assert_one_order(profile, cut_points(profile))
    assert cut_points(profile, bound=2 + 4**7).exact


def assert_one_order(profile, found):
    """Each cut adds layers to the one before it, after all that they read, until none is left."""
    assert "more than 10000 cut points" in found.one_order
    position = {layer.id: index for index, layer in enumerate(profile.layers)}
    before = set()
    for state in found.states:
        now = set(state.layers)
        assert before <= now
        assert all(position[start] in now for start, end in profile.edges if position[end] in now)
        before = now
    assert len(before) == len(profile.layers)


@pytest.mark.parametrize(
    "name",
    ["gnmt-16-pbs-64", "gnmt-32-pbs-64", "densenet121", "resnet50", "xlnet-36-pbs-1", "amoeba-6-pbs-8-complicated"],
)
def test_all_cuts_of_branching_models_are_found(reference, name):
    profile = reference_profile(reference, name)
    found = cut_points(profile)
    assert found.exact
    assert found.states[-1].boundary_bytes == (0,)
    assert sorted(found.states[-1].layers) == list(range(len(profile.layers)))


@pytest.mark.parametrize("name", ["inception_v3", "nasnetamobile"])
def test_the_widest_models_fall_back_to_one_order_and_say_so(reference, name):
    profile = reference_profile(reference, name)
    assert_one_order(profile, cut_points(profile))
