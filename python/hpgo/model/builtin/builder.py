"""Builder of a model from layers, each of which names its inputs.

Published profiles have milliseconds. Sizes follow from the architecture, with four bytes per number.
"""

from __future__ import annotations

from hpgo.model.profile import Layer, Profile

FLOAT_BYTES = 4


class Builder:
    """Layers and edges of one model at one batch size.

    >>> build = Builder(batch_size=8)
    >>> tokens = build.add("tokens", activation_bytes=64)
    >>> build.add("linear", tokens, ms=(0.5, 1.25), parameter_bytes=4096)
    'linear'
    >>> build.profile("tiny", source="made up").edges
    (('tokens', 'linear'),)
    """

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self._layers: list[Layer] = []
        self._edges: list[tuple[str, str]] = []

    def add(
        self,
        layer_id: str,
        *feeds: str,
        name: str = "",
        ms: tuple[float, float] = (0, 0),
        activation_bytes: float = 0,
        parameter_bytes: float = 0,
    ) -> str:
        """Add the layer `layer_id`, fed by the layers `feeds`, and return its id.

        `name` may differ from the id. `ms` are the milliseconds of its forward and backward pass.
        """
        # Parse "2.69e-3" instead of dividing by 1000: 2.69 / 1000 may be a neighbor of the float 0.00269.
        forward_s, backward_s = (float(f"{time}e-3") for time in ms)
        layer = Layer(layer_id, name or layer_id, (forward_s,), (backward_s,), (activation_bytes,), parameter_bytes)
        self._layers.append(layer)
        self._edges += ((feed, layer_id) for feed in feeds)
        return layer_id

    def feed(self, start: str, end: str) -> None:
        """Add an edge between two layers that were added before."""
        self._edges.append((start, end))

    def profile(self, name: str, source: str) -> Profile:
        """Return the profile of all layers added so far."""
        return Profile(name, (self.batch_size,), tuple(self._layers), tuple(self._edges), source)
