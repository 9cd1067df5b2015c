"""Cut points of a model: the layers before each cut, and the data that crosses it.

No edge leads from a layer after a cut to a layer before it. So the layers before a cut are a *down-set* of the graph,
as in PipeDream's antichain states. A stage is the difference of two nested states.
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
    """Size of the outputs that layers after the cut read; 0 at the end of the model."""


@dataclass(frozen=True, slots=True)
class States:
    """The cut points of a profile, from no layer to all layers. Each state comes after its subsets."""

    states: tuple[State, ...]
    one_order: str | None
    """Reason why the states are the prefixes of a single layer order. None: the states are all cut points."""

    @property
    def exact(self) -> bool:
        """Whether the states include every useful cut."""
        return self.one_order is None


def given_cuts(profile: Profile, cuts: Iterable[Collection[str]]) -> States:
    """Return the states for given cuts: the ids of the layers before each cut, each a superset of the previous one.

    The states of no layer and of all layers are added at the ends.

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
        # A layer with several readers after the cut sends its output once.
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
    """Return all cut points of `profile`, or the prefixes of one good layer order if there are more than `bound`.

    Layers without time and parameters are merged with a neighbor where that increases the cost of no cut. The planner
    also considers the activations that they save, and takes only some cuts of long chains: see docs/states.md.

    Raises ArgumentError if `bound` is below 2.

    >>> from hpgo.model.profile import Profile
    >>> toy = Profile.chain("toy", batch_size=1, forward_s=[0.1, 0.2], backward_s=[0.2, 0.4],
    ...                     activation_bytes=[4e6, 4e3], parameter_bytes=[1e8, 2e8])
    >>> [(state.layers, state.boundary_bytes) for state in cut_points(toy).states]
    [((), (0.0,)), ((0,), (4000000.0,)), ((0, 1), (0.0,))]
    """
    if not isinstance(profile, Profile):
        raise ArgumentError(f"profile is {safe_repr(profile)}", "create one, for example with `hpgo.read_profile`")
    maximum = check_int("bound", bound, minimum=2, hint="every model has two cuts: before and after all layers")
    one_order, rows = _core.states(profile, maximum)
    states = []
    for layers, totals in rows:
        forward_s, backward_s, parameter_bytes, saved_bytes, boundary_bytes = zip(*totals, strict=True)
        states.append(State(tuple(layers), forward_s, backward_s, parameter_bytes[0], saved_bytes, boundary_bytes))
    return States(tuple(states), one_order)
