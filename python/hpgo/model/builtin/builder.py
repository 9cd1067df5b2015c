"""Writes a model down layer by layer, each naming what feeds it.

Published profiles give milliseconds; sizes follow from the architecture, four bytes a number.
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
        """Adds the layer `layer_id`, fed by the layers `feeds`; returns its id, to feed others.

        `name` may differ from the id; `ms` are milliseconds forward and backward.
        """
        # 2.69 ms are the float that `0.00269` means; a division by 1000 may be its neighbour.
        forward_s, backward_s = (float(f"{time}e-3") for time in ms)
        layer = Layer(layer_id, name or layer_id, (forward_s,), (backward_s,), (activation_bytes,), parameter_bytes)
        self._layers.append(layer)
        self._edges += ((feed, layer_id) for feed in feeds)
        return layer_id

    def feed(self, start: str, end: str) -> None:
        """Adds an edge between two layers that are there."""
        self._edges.append((start, end))

    def profile(self, name: str, source: str) -> Profile:
        """What was added so far."""
        return Profile(name, (self.batch_size,), tuple(self._layers), tuple(self._edges), source)
