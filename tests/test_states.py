"""Cut points: a user asks where a model may be cut."""

from __future__ import annotations

import pytest

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
    toy = hpgo.Profile.chain(
        "toy", batch_size=1, forward_s=[1], backward_s=[1], activation_bytes=[1], parameter_bytes=[1]
    )
    with pytest.raises(hpgo.ArgumentError, match="bound is 1"):
        cut_points(toy, bound=1)


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
    found = cut_points(profile)
    assert "more than 10000 cut points" in found.one_order
    position = {layer.id: index for index, layer in enumerate(profile.layers)}
    before = set()
    for state in found.states:
        now = set(state.layers)
        assert before <= now
        assert all(position[start] in now for start, end in profile.edges if position[end] in now)
        before = now
    assert len(before) == len(profile.layers)
