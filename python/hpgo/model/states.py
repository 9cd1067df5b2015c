"""Where a model may be cut, what lies before each cut, and what crosses it.

A cut puts some layers before it and the rest behind it, and no edge leads back: the layers before it are a *down-set*
of the graph, as in PipeDream's antichain states. A stage is the difference of two nested states.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpgo import _core
from hpgo.base.checks import check_int
from hpgo.base.messages import safe_repr
from hpgo.errors import ArgumentError
from hpgo.model.profile import Profile

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable


@dataclass(frozen=True, slots=True)
class State:
    """The layers before one cut. The tuples have one entry for each of the profile's batch sizes."""

    layers: tuple[int, ...]
    """Indices into `Profile.layers`, in topological order."""
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    parameter_bytes: float
    saved_bytes: tuple[float, ...]
    boundary_bytes: tuple[float, ...]
    """Outputs that layers behind the cut read; 0 where nothing is behind it."""


@dataclass(frozen=True, slots=True)
class States:
    """The cut points of a profile: from no layer to all of them, each after its subsets."""

    states: tuple[State, ...]
    one_order: str | None
    """Why these are the prefixes of one order of the layers; None if they are all cut points."""

    @property
    def exact(self) -> bool:
        """Whether every useful cut is among the states."""
        return self.one_order is None


def given_cuts(profile: Profile, cuts: Iterable[Collection[str]]) -> States:
    """The cut points with these layers before them, each a superset of the last, and both ends: before and behind all.

    >>> from hpgo.model.profile import Profile
    >>> toy = Profile.chain("toy", batch_size=1, forward_s=[0.1, 0.2, 0.3], backward_s=[0.2, 0.4, 0.6],
    ...                     activation_bytes=[4e6, 4e3, 4], parameter_bytes=[1e8, 2e8, 3e8])
    >>> [(state.layers, state.boundary_bytes) for state in given_cuts(toy, [["layer0", "layer1"]]).states]
    [((), (0.0,)), ((0, 1), (4000.0,)), ((0, 1, 2), (0.0,))]
    """
    index_of = {layer.id: index for index, layer in enumerate(profile.layers)}
    sizes = range(len(profile.batch_sizes))
    states = []
    for cut in [(), *cuts, tuple(index_of)]:
        layers = tuple(index_of[layer] for layer in cut)
        inside, held = set(cut), [profile.layers[index] for index in layers]
        senders = {start for start, end in profile.edges if start in inside and end not in inside}
        sent = [layer for layer in held if layer.id in senders]
        states.append(
            State(
                layers,
                tuple(math.fsum(layer.forward_s[at] for layer in held) for at in sizes),
                tuple(math.fsum(layer.backward_s[at] for layer in held) for at in sizes),
                math.fsum(layer.parameter_bytes for layer in held),
                tuple(
                    math.fsum(
                        (layer.activation_bytes if layer.saved_bytes is None else layer.saved_bytes)[at]
                        for layer in held
                    )
                    for at in sizes
                ),
                tuple(math.fsum(layer.activation_bytes[at] for layer in sent) for at in sizes),
            )
        )
    return States(tuple(states), None)


def cut_points(profile: Profile, *, bound: int = 10_000) -> States:
    """All cut points of `profile`, or those of one good order of its layers if they are more than `bound`.

    Layers without time and parameters follow a neighbour where no cut becomes dearer by that. A search for plans heeds
    what they save, too, and takes some cuts only of long chains: docs/states.md.

    Raises ArgumentError if `bound` is below two.

    >>> from hpgo.model.profile import Profile
    >>> toy = Profile.chain("toy", batch_size=1, forward_s=[0.1, 0.2], backward_s=[0.2, 0.4],
    ...                     activation_bytes=[4e6, 4e3], parameter_bytes=[1e8, 2e8])
    >>> [(state.layers, state.boundary_bytes) for state in cut_points(toy).states]
    [((), (0.0,)), ((0,), (4000000.0,)), ((0, 1), (0.0,))]
    """
    if not isinstance(profile, Profile):
        raise ArgumentError(f"profile is {safe_repr(profile)}", "make one, with `hpgo.read_profile` say")
    most = check_int("bound", bound, least=2, hint="there are at least two cuts: before and behind everything")
    one_order, rows = _core.states(profile, most)
    states = []
    for layers, totals in rows:
        forward_s, backward_s, parameter_bytes, saved_bytes, boundary_bytes = zip(*totals, strict=True)
        states.append(State(tuple(layers), forward_s, backward_s, parameter_bytes[0], saved_bytes, boundary_bytes))
    return States(tuple(states), one_order)
