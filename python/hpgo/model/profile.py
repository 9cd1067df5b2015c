"""A layer profile: the cost of each layer of a model at one or more batch sizes, and the edges between layers.

Times are in seconds, sizes in bytes. The records check themselves, so every existing `Profile` is valid.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import date
from itertools import pairwise
from numbers import Real
from typing import TYPE_CHECKING, Any

from hpgo.base.checks import MAX_GPUS, check_int, check_list, check_text, number
from hpgo.base.messages import as_float, brief, did_you_mean, pluralize, safe_repr, shorten
from hpgo.base.presentation import Presented
from hpgo.base.units import format_bytes, format_seconds
from hpgo.base.validated import Record
from hpgo.errors import ArgumentError, ProfileError

if TYPE_CHECKING:
    import networkx

LARGEST = 1e18
"""Limit for seconds and bytes: far above any layer, and low enough that multiplying two of them can't overflow."""
SPLIT_RATIOS = (0.98, 2.0)
"""Minimum and maximum of `input_gradient_s` + `weight_gradient_s` as a multiple of `backward_s`.

Less than 1 is impossible: both passes do the work of the whole pass. 0.98 allows for rounded numbers, which are raised
to 1. More than 1 is the cost of splitting: 1.03 to 1.7 in layers of 76 ms to 20 us on a CPU. Beyond 2, the passes and
`backward_s` were not measured together. With a limit of 4, such errors are taken for that cost; with 1.5, the cost of
layers of a few microseconds is lost.
"""
_ROUNDED = 1 + 1e-12
"""Factor by which rounding may change the sum of the two passes."""


@dataclass(frozen=True, slots=True)
class TypeTimes(Record):
    """Times of a layer on one device type. The tuples have one entry for each of `Profile.batch_sizes`.

    `Layer` checks the numbers.

    >>> Layer("fc", "Linear", (1,), (2,), (8,), 4, times_by_type=(TypeTimes("T4", (3,), (5,)),)).times_by_type[0].type
    'T4'
    """

    type: str
    """Name of the device type, as nodes of a cluster have it."""
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    input_gradient_s: tuple[float, ...] | None = None
    """Time of the input-gradient pass in seconds, as in `Layer`."""
    weight_gradient_s: tuple[float, ...] | None = None
    """Time of the weight-gradient pass in seconds, as in `Layer`."""


_TIMES = ("forward_s", "backward_s", "input_gradient_s", "weight_gradient_s")


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer. The tuples have one entry for each of `Profile.batch_sizes`, for that whole batch.

    Raises ProfileError for a number that is negative, not finite or above 1e18, and for tuples of unequal length. Also
    raises it if either the split or the whole backward pass takes no time, but the other does, and for more
    `frozen_bytes` than `parameter_bytes`.

    >>> Layer("fc1", "Linear", forward_s=(0.002,), backward_s=(0.004,), activation_bytes=(4e6,), parameter_bytes=-1)
    Traceback (most recent call last):
    hpgo.errors.ProfileError: layer `fc1`: parameter_bytes is -1
    """

    id: str
    """Id, unique in the profile, by which edges refer to the layer."""
    name: str
    """Name for people, which need not be unique."""
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    activation_bytes: tuple[float, ...]
    """Size of the output in bytes, which crosses a cut after this layer."""
    parameter_bytes: float
    saved_bytes: tuple[float, ...] | None = None
    """Bytes saved from the forward to the backward pass. None means the size of the output."""
    stage: int | None = None
    """Stage that the file assigns (PipeDream's `stage_id`). The planner ignores it."""
    input_gradient_s: tuple[float, ...] | None = None
    """Time of the input-gradient pass in seconds, given if and only if `weight_gradient_s` is.

    Schedules that split backward passes use both instead of `backward_s`. None means half of `backward_s` each.
    """
    weight_gradient_s: tuple[float, ...] | None = None
    """Time of the weight-gradient pass in seconds.

    Both passes together may exceed `backward_s`, since splitting has a cost. The planner scales both so that their sum
    is `backward_s` if it is outside `SPLIT_RATIOS`; see `with_consistent_split`.
    """
    spread: float | None = None
    """Interquartile range of the layer's measured times divided by their median. It does not affect costs."""
    frozen_bytes: float = 0.0
    """Bytes of weights within `parameter_bytes` that are not trained.

    They take memory, but they have no gradients, no optimizer state and no all-reduce.
    """
    times_by_type: tuple[TypeTimes, ...] = ()
    """Times on other device types, sorted by the name of the type. The times above are for `Profile.device`."""

    def __post_init__(self) -> None:
        for field in ("id", "name"):
            check_text(f"layer {safe_repr(self.id)}: {field}", getattr(self, field), ProfileError)
        if not self.id:
            raise ProfileError(f"layer `{self.name}` has an empty id", "give each layer a unique id, which edges use")
        if (self.input_gradient_s is None) != (self.weight_gradient_s is None):
            lacking = "input_gradient_s" if self.input_gradient_s is None else "weight_gradient_s"
            raise ProfileError(
                f"layer `{self.id}` has no {lacking}", "give both passes of the split backward pass, or neither"
            )
        optional = ("saved_bytes", "input_gradient_s", "weight_gradient_s")
        given = [field for field in optional if getattr(self, field) is not None]
        for field in ("forward_s", "backward_s", "activation_bytes", *given):
            values = getattr(self, field)
            if not isinstance(values, tuple):
                raise ProfileError(
                    f"layer `{self.id}`: {field} must be a tuple, got {safe_repr(values)}",
                    "give one number for each batch size of the profile",
                )
            if len(values) != len(self.forward_s):
                raise ProfileError(
                    f"layer `{self.id}` has {len(self.forward_s)} forward_s but {len(values)} {field}",
                    "give one number for each batch size of the profile",
                )
            object.__setattr__(self, field, tuple(self._number(field, value) for value in values))
        # If one of the two is 0, no factor can rescale the passes to `backward_s`.
        for split_s, whole_s in zip(self._split_s, self.backward_s, strict=False):
            if (split_s > 0) != (whole_s > 0):
                raise ProfileError(
                    f"layer `{self.id}`: input_gradient_s + weight_gradient_s is {format_seconds(split_s)}, but"
                    f" backward_s is {format_seconds(whole_s)}",
                    "measure all three in the same passes, or leave out input_gradient_s and weight_gradient_s",
                )
        for field in ("parameter_bytes", "frozen_bytes"):
            object.__setattr__(self, field, self._number(field, getattr(self, field)))
        if self.frozen_bytes > self.parameter_bytes:
            raise ProfileError(
                f"layer `{self.id}`: frozen_bytes is {self.frozen_bytes:g}, but parameter_bytes, which includes it, is"
                f" {self.parameter_bytes:g}",
                "count frozen weights in both",
            )
        if self.spread is not None:
            object.__setattr__(self, "spread", self._number("spread", self.spread))
        if self.stage is not None:
            stage = check_int(f"layer `{self.id}`: stage", self.stage, minimum=0, error=ProfileError)
            object.__setattr__(self, "stage", stage)
        # An array has no truth value, so compare with the default.
        if not isinstance(self.times_by_type, tuple) or self.times_by_type:
            self._check_types()

    def _check_types(self) -> None:
        """Check the times of each device type like the layer's own times, and sort the types by name."""
        times = self.times_by_type
        if not isinstance(times, tuple) or not all(isinstance(of_type, TypeTimes) for of_type in times):
            raise ProfileError(
                f"layer `{self.id}`: times_by_type is {safe_repr(times)}", "give a tuple of `hpgo.TypeTimes` records"
            )
        for of_type in times:
            check_text(f"layer `{self.id}`: a device type", of_type.type, ProfileError)
        names = sorted(of_type.type for of_type in times)
        if not all(names) or len(set(names)) < len(names):
            raise ProfileError(
                f"layer `{self.id}` has times for the device types {', '.join(f'`{name}`' for name in names)}",
                "give each type once, under its name in the cluster",
                code="duplicate",
            )
        checked = []
        for of_type in sorted(times, key=lambda one: one.type):
            try:
                layer = self._with(of_type)
            except ProfileError as error:
                raise error.reworded(f"on `{of_type.type}`: {error.message}", error.hint) from None
            checked.append(TypeTimes(of_type.type, *(getattr(layer, key) for key in _TIMES)))
        object.__setattr__(self, "times_by_type", tuple(checked))

    def _with(self, of_type: TypeTimes) -> Layer:
        """Return the layer with these times, and without times on other types."""
        layer = replace(self, times_by_type=(), **{key: getattr(of_type, key) for key in _TIMES})
        if len(layer.forward_s) != len(self.forward_s):
            raise ProfileError(
                f"layer `{self.id}` has {len(layer.forward_s)} forward_s, but there are {len(self.forward_s)} batch"
                " sizes",
                "give one number for each batch size of the profile",
            )
        return layer

    def _on(self, device_type: str) -> Layer:
        """Return the layer with its times on a device type of `times_by_type`, and without times on other types."""
        return self._with(next(of_type for of_type in self.times_by_type if of_type.type == device_type))

    @property
    def trained_bytes(self) -> float:
        """Bytes of weights that are trained: all but `frozen_bytes`.

        >>> Layer("fc", "Linear", (1,), (1,), (8,), parameter_bytes=100, frozen_bytes=96).trained_bytes
        4
        """
        return self.parameter_bytes - self.frozen_bytes

    @property
    def _split_s(self) -> tuple[float, ...]:
        """Seconds of both passes of the split backward pass together; empty if the layer has none."""
        if self.input_gradient_s is None or self.weight_gradient_s is None:
            return ()
        return tuple(map(sum, zip(self.input_gradient_s, self.weight_gradient_s, strict=True)))

    @property
    def split_ratios(self) -> tuple[float, ...]:
        """Ratio of the split backward pass's time to `backward_s`, for each batch size; 1 if it is 0 or not split.

        >>> Layer("fc", "Linear", (1,), (4,), (8,), 4, input_gradient_s=(1,), weight_gradient_s=(2,)).split_ratios
        (0.75,)
        """
        each = zip(self._split_s or self.backward_s, self.backward_s, strict=True)
        return tuple(split_s / whole_s if whole_s else 1.0 for split_s, whole_s in each)

    @property
    def has_wrong_split(self) -> bool:
        """Whether the ratio of split to whole backward pass is outside `SPLIT_RATIOS` at any batch size."""
        minimum, maximum = SPLIT_RATIOS
        return any(not minimum <= ratio <= maximum * _ROUNDED for ratio in self.split_ratios)

    def with_consistent_split(self) -> Layer:
        """Return the layer with `input_gradient_s` and `weight_gradient_s` that are consistent with `backward_s`.

        If their sum is below `backward_s` or above twice `backward_s`, both are multiplied by the factor that makes the
        sum equal to `backward_s`.

        >>> layer = Layer("fc", "Linear", (1,), (4,), (8,), 4, input_gradient_s=(1,), weight_gradient_s=(1,))
        >>> layer.with_consistent_split().input_gradient_s
        (2.0,)
        """
        if self.times_by_type:
            own = replace(self, times_by_type=()).with_consistent_split()
            types = [of_type.type for of_type in self.times_by_type]
            return timed_as(own, ((name, self._on(name).with_consistent_split()) for name in types))
        inputs, weights = self.input_gradient_s, self.weight_gradient_s
        if inputs is None or weights is None or all(map(_is_consistent, self.split_ratios)):
            return self
        pairs = []
        # The second pass is the difference to `backward_s`, so that the sum is exact.
        for one_s, other_s, whole_s, ratio in zip(inputs, weights, self.backward_s, self.split_ratios, strict=True):
            first_s = one_s if _is_consistent(ratio) else one_s / (one_s + other_s) * whole_s
            pairs.append((first_s, other_s if _is_consistent(ratio) else whole_s - first_s))
        return replace(
            self,
            input_gradient_s=tuple(first_s for first_s, _ in pairs),
            weight_gradient_s=tuple(second_s for _, second_s in pairs),
        )

    def _number(self, field: str, value: object) -> float:
        """Return `value` as a checked Python number, so that files and reports handle no other number types."""
        if isinstance(value, bool) or not isinstance(value, Real):
            raise ProfileError(f"layer `{self.id}`: {field} must be a number, got {safe_repr(value)}")
        if not 0 <= as_float(value) <= LARGEST:  # NaN fails every comparison
            raise ProfileError(
                f"layer `{self.id}`: {field} is {safe_repr(value)}",
                "give a finite number from 0 to 1e18; measure it again, or write 0",
            )
        return value if type(value) in {int, float} else float(value)  # type: ignore[return-value]


def timed_as(layer: Layer, others: Iterable[tuple[str, Layer]]) -> Layer:
    """Return the layer with the times of others, each under the name of a device type."""
    times = (TypeTimes(name, *(getattr(other, key) for key in _TIMES)) for name, other in others)
    return replace(layer, times_by_type=tuple(times))


@dataclass(frozen=True, slots=True)
class TiedWeight:
    """A trained weight that several layers share (a tied weight).

    Frozen weights need no sums of gradients, so each layer counts its copy of one.

    Raises ProfileError for fewer than two layers, for a layer named twice, and for a size that is not a number from 0
    to 1e18.

    >>> TiedWeight(("embedding",), 4e6)
    Traceback (most recent call last):
    hpgo.errors.ProfileError: the weight tied over `embedding` needs two different layers
    """

    layers: tuple[str, ...]
    """Ids of the layers that share the weight. Only the first counts it in its `parameter_bytes`."""
    parameter_bytes: float

    def __post_init__(self) -> None:
        if not isinstance(self.layers, tuple) or not all(isinstance(layer, str) for layer in self.layers):
            raise ProfileError(f"layers of a tied weight are {safe_repr(self.layers)}", "give a tuple of layer ids")
        for layer in self.layers:
            check_text("a layer of a tied weight", layer, ProfileError)
        if len(set(self.layers)) < max(2, len(self.layers)):
            named = ", ".join(f"`{shorten(layer)}`" for layer in self.layers[:3]) or "no layer"
            raise ProfileError(
                f"the weight tied over {named} needs two different layers",
                "name two or more, each once",
                code="duplicate",
            )
        size = self.parameter_bytes
        size = number(
            f"the parameter_bytes of the tied weight of `{self.layers[0]}`", size, maximum=LARGEST, error=ProfileError
        )
        object.__setattr__(self, "parameter_bytes", size)


@dataclass(frozen=True, slots=True)
class Profile(Presented):
    """A directed acyclic graph of layers, in the order of the file.

    Raises ProfileError if there is no layer, if batch sizes are missing or not ascending, if a layer has another number
    of measurements, if an id or an edge occurs twice, if an edge names an unknown layer, and for a cycle, which the
    message names.
    """

    name: str
    batch_sizes: tuple[int, ...]
    """Samples in the batch of each measurement, in ascending order."""
    layers: tuple[Layer, ...]
    edges: tuple[tuple[str, str], ...]
    """Pairs of layer ids: the sender, and the receiver of its output."""
    source: str = ""
    """Origin of the numbers."""
    gpus_per_device: int = 1
    """Number of GPUs that shared each layer in the measurement, such as a tensor-parallel group.

    Plans treat such a group as one device.
    """
    tied_weights: tuple[TiedWeight, ...] = ()
    """Weights that several layers share."""
    device: str = ""
    """Name of the GPU or processor of the measurement. This field and those below do not affect costs."""
    machine: str = ""
    """Host name of the measurement."""
    dtype: str = ""
    """Number format of weights, and of computation if it differs: `float32`, or `float32, autocast to bfloat16`."""
    date: str = ""
    """Date of the measurement as `2026-05-03`."""
    versions: tuple[tuple[str, str], ...] = ()
    """Names and versions of the software of the measurement: `(("torch", "2.15.0"),)`."""

    def __post_init__(self) -> None:
        self._check_kinds()
        gpus = check_int(
            f"profile {safe_repr(self.name)}: gpus_per_device",
            self.gpus_per_device,
            maximum=MAX_GPUS,
            error=ProfileError,
        )
        object.__setattr__(self, "gpus_per_device", gpus)
        if not self.layers:
            raise ProfileError(f"profile `{self.name}` has no layers", "add at least one layer")
        object.__setattr__(self, "batch_sizes", _batch_sizes(self.name, self.batch_sizes))
        known: dict[str, None] = {}  # in the profile's order, for messages
        for layer in self.layers:
            if layer.id in known:
                raise ProfileError(
                    f"two layers have the id `{layer.id}`", "rename one of them, and its edges", code="duplicate"
                )
            known[layer.id] = None
            if len(layer.forward_s) != len(self.batch_sizes):
                raise ProfileError(
                    f"layer `{layer.id}` has {len(layer.forward_s)} measurements, "
                    f"but profile `{self.name}` has {len(self.batch_sizes)} batch sizes",
                    "give one number for each batch size",
                )
        seen: set[tuple[str, str]] = set()
        for start, end in self.edges:
            for end_id in (start, end):
                if end_id not in known:
                    raise ProfileError(
                        f"edge `{start}` -> `{end}`: there is no layer `{end_id}`", did_you_mean(end_id, known)
                    )
            if (start, end) in seen:
                raise ProfileError(f"edge `{start}` -> `{end}` is given twice", "keep one of them", code="duplicate")
            seen.add((start, end))
        self._check_tied_weights()
        self._check_types()
        if cycle := _cycle(known, self.edges):
            steps = cycle if len(cycle) <= 12 else [*cycle[:6], "…", *cycle[-5:]]
            raise ProfileError(
                f"layers feed each other in a cycle: {' -> '.join(steps)}",
                "remove the edge that leads back",
            )

    def _check_kinds(self) -> None:
        for field in ("name", "source", "device", "machine", "dtype", "date"):
            check_text(f"a profile's {field}", getattr(self, field), ProfileError)
        self._check_circumstances()
        for field in ("batch_sizes", "layers", "edges", "tied_weights"):
            if not isinstance(getattr(self, field), tuple):
                raise ProfileError(
                    f"profile `{self.name}`: {field} must be a tuple, got {safe_repr(getattr(self, field))}",
                    "make one with `tuple(...)`",
                )
        for layer in self.layers:
            if not isinstance(layer, Layer):
                raise ProfileError(
                    f"profile `{self.name}`: {safe_repr(layer)} is not a layer", "give `hpgo.Layer` records"
                )
        for tie in self.tied_weights:
            if not isinstance(tie, TiedWeight):
                raise ProfileError(
                    f"profile `{self.name}`: {safe_repr(tie)} is not a tied weight", "give `hpgo.TiedWeight` records"
                )
        for edge in self.edges:
            if not (isinstance(edge, tuple) and len(edge) == 2 and all(isinstance(end, str) for end in edge)):
                raise ProfileError(
                    f"profile `{self.name}`: {safe_repr(edge)} is not an edge", "give a tuple of two layer ids"
                )

    def _check_tied_weights(self) -> None:
        # A layer may own several tied weights, and their sum must not exceed its own bytes.
        left_bytes = {layer.id: layer.trained_bytes for layer in self.layers}
        for tie in self.tied_weights:
            for layer_id in tie.layers:
                if layer_id not in left_bytes:
                    raise ProfileError(
                        f"a tied weight names `{layer_id}`, but there is no such layer",
                        did_you_mean(layer_id, left_bytes),
                        code="unknown_name",
                    )
            first = tie.layers[0]
            left_bytes[first] -= tie.parameter_bytes
            if left_bytes[first] < 0:
                raise ProfileError(
                    f"layer `{first}` shares more bytes than it trains, which are its parameter_bytes without its"
                    " frozen_bytes",
                    "add the tied weight to the parameter_bytes of the first layer that shares it",
                )

    def _check_types(self) -> None:
        # Times of a stage on a type are sums over its layers, so all layers need times on the same types.
        first = self.layers[0]
        types = set(self.device_types)
        for layer in self.layers:
            here = {of_type.type for of_type in layer.times_by_type}
            if here != types:
                lacking, having = (layer, first) if types - here else (first, layer)
                lacks = min(types - here or here - types)
                raise ProfileError(
                    f"layer `{lacking.id}` has no times on `{lacks}`, but layer `{having.id}` has",
                    "give `times_by_type` of the same types for all layers",
                    code="mismatch",
                )

    def _check_circumstances(self) -> None:
        if self.date:
            try:
                day = date.fromisoformat(self.date)
            except ValueError:
                day = None
            # `fromisoformat` also accepts forms such as 20260503. Only one form is stored.
            if day is None or day.isoformat() != self.date:
                raise ProfileError(f"profile `{self.name}`: date is {safe_repr(self.date)}", "write it as 2026-05-03")
        if not isinstance(self.versions, tuple) or not all(
            isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(text, str) for text in pair)
            for pair in self.versions
        ):
            raise ProfileError(
                f"profile `{self.name}`: versions is {safe_repr(self.versions)}",
                "give a tuple of pairs of texts: a name and its version",
            )
        for pair in self.versions:
            for text in pair:
                check_text("a version", text, ProfileError)
        if len(dict(self.versions)) < len(self.versions):
            raise ProfileError(
                f"profile `{self.name}` has two versions of one name", "give each once", code="duplicate"
            )

    @classmethod
    def chain(
        cls,
        name: str,
        *,
        batch_size: int,
        forward_s: Iterable[float],
        backward_s: Iterable[float],
        activation_bytes: Iterable[float],
        parameter_bytes: Iterable[float],
        names: Iterable[str] | None = None,
        source: str = "",
    ) -> Profile:
        """Return a profile of layers that feed each other in order. Each column has one entry per layer.

        Ids are `layer0`, `layer1`, …, and so are names unless given.

        Raises ProfileError if the columns differ in length.

        >>> Profile.chain(
        ...     "toy", batch_size=8, forward_s=[0.1, 0.2], backward_s=[0.2, 0.4],
        ...     activation_bytes=[4e6, 4e3], parameter_bytes=[1e8, 2e8],
        ... ).edges
        (('layer0', 'layer1'),)
        """
        check_text("a profile's name", name, ProfileError)
        given: dict[str, Iterable[Any]] = {
            "forward_s": forward_s,
            "backward_s": backward_s,
            "activation_bytes": activation_bytes,
            "parameter_bytes": parameter_bytes,
        }
        if names is not None:
            given["names"] = names
        columns = {column: _column(f"profile `{name}`: {column}", values) for column, values in given.items()}
        ids = [f"layer{index}" for index in range(len(columns["forward_s"]))]
        for column, values in columns.items():
            if len(values) != len(ids):
                raise ProfileError(
                    f"profile `{name}`: {len(ids)} forward_s but {len(values)} {column}",
                    "give one entry for each layer",
                )
        layers = (
            Layer(layer_id, layer_name, (forward,), (backward,), (activation,), parameter)
            for layer_id, layer_name, forward, backward, activation, parameter in zip(
                ids,
                columns.get("names", ids),
                columns["forward_s"],
                columns["backward_s"],
                columns["activation_bytes"],
                columns["parameter_bytes"],
                strict=True,
            )
        )
        return cls(name, (batch_size,), tuple(layers), tuple(pairwise(ids)), source)

    def __repr__(self) -> str:
        sizes = ", ".join(map(str, self.batch_sizes))
        weights = f"{format_bytes(self.parameter_bytes)} of weights"
        return brief(
            "Profile", f"{shorten(self.name)}: {pluralize(len(self.layers), 'layer')}, {weights}, batches of {sizes}"
        )

    @property
    def parameter_bytes(self) -> float:
        """Bytes of all weights. A weight that layers share counts once."""
        return sum(layer.parameter_bytes for layer in self.layers)

    @property
    def device_types(self) -> tuple[str, ...]:
        """Names of the device types that `Layer.times_by_type` lists, in ascending order."""
        return tuple(of_type.type for of_type in self.layers[0].times_by_type)

    def on(self, device_type: str) -> Profile:
        """Return the profile with the times of a type of `device_types` as its own, and without other types.

        Raises ArgumentError for another type.

        >>> toy = Profile.chain(
        ...     "toy", batch_size=1, forward_s=[1], backward_s=[2], activation_bytes=[8], parameter_bytes=[4])
        >>> layer = replace(toy.layers[0], times_by_type=(TypeTimes("T4", (3,), (5,)),))
        >>> replace(toy, layers=(layer,)).on("T4").layers[0].forward_s
        (3,)
        """
        if check_text("device_type", device_type) not in self.device_types:
            raise ArgumentError(
                f"profile `{self.name}` has no times on {safe_repr(device_type)}",
                did_you_mean(device_type, self.device_types) if self.device_types else "measure it with `hpgo profile`",
                code="unknown_name",
            )
        return replace(self, device=device_type, layers=tuple(layer._on(device_type) for layer in self.layers))

    @property
    def spread(self) -> float | None:
        """Average of the layers' `spread`, weighted by their times at the largest batch size. None: no layer has one.

        >>> toy = Profile.chain(
        ...     "toy", batch_size=1, forward_s=[1], backward_s=[2], activation_bytes=[8], parameter_bytes=[4])
        >>> toy.spread, replace(toy, layers=(replace(toy.layers[0], spread=0.03),)).spread
        (None, 0.03)
        """
        measured = [
            (layer.spread, layer.forward_s[-1] + layer.backward_s[-1])
            for layer in self.layers
            if layer.spread is not None
        ]
        whole_s = sum(seconds for _, seconds in measured)
        return sum(spread * (seconds / whole_s) for spread, seconds in measured) if whole_s else None

    @property
    def loading(self) -> tuple[Layer, ...]:
        """Layers that load data and compute nothing: no inputs, no backward time, no weights, and a name in `Input…`.

        Profilers time them like layers, but data loaders work ahead. PipeDream's optimizer and HPGO leave them out,
        too.
        """
        fed = {to for _, to in self.edges}
        return tuple(
            layer
            for layer in self.layers
            if layer.name.lower().startswith("input")
            and layer.id not in fed
            and not layer.parameter_bytes
            and not any(layer.backward_s)
            and not any(any(of_type.backward_s) for of_type in layer.times_by_type)
        )

    def without_loading(self) -> Profile:
        """Return the profile with zero times for all `loading` layers.

        >>> toy = Profile.chain(
        ...     "toy", batch_size=1, forward_s=[5, 1], backward_s=[0, 2], activation_bytes=[8, 8],
        ...     parameter_bytes=[0, 4], names=["Input", "linear"])
        >>> [layer.forward_s for layer in toy.without_loading().layers]
        [(0.0,), (1,)]
        """
        loading = self.loading
        nothing_s = (0.0,) * len(self.batch_sizes)

        def without(layer: Layer) -> Layer:
            types = tuple(replace(of_type, forward_s=nothing_s) for of_type in layer.times_by_type)
            return replace(layer, forward_s=nothing_s, times_by_type=types)

        layers = (without(layer) if layer in loading else layer for layer in self.layers)
        return replace(self, layers=tuple(layers)) if loading else self

    def with_consistent_split(self) -> Profile:
        """Return the profile with `Layer.with_consistent_split` applied to all layers. Plans use only such profiles."""
        layers = tuple(layer.with_consistent_split() for layer in self.layers)
        return self if layers == self.layers else replace(self, layers=layers)

    def without_tied_weights(self) -> Profile:
        """Return the profile without tied weights: each layer counts the weights that it shares as its own.

        >>> toy = Profile.chain(
        ...     "toy", batch_size=1, forward_s=[1, 1], backward_s=[2, 2], activation_bytes=[8, 8],
        ...     parameter_bytes=[40, 0])
        >>> toy = replace(toy, tied_weights=(TiedWeight(("layer0", "layer1"), 40),))
        >>> [layer.parameter_bytes for layer in toy.without_tied_weights().layers]
        [40, 40.0]
        """
        if not self.tied_weights:
            return self
        copied = {layer.id: layer.parameter_bytes for layer in self.layers}
        for tie in self.tied_weights:
            for layer_id in tie.layers[1:]:
                copied[layer_id] += tie.parameter_bytes
        layers = tuple(replace(layer, parameter_bytes=copied[layer.id]) for layer in self.layers)
        return replace(self, layers=layers, tied_weights=())

    def networkx(self) -> networkx.DiGraph[str]:
        """Return the graph for networkx. Nodes are layer ids, with the `Layer` as attribute `layer`.

        >>> toy = Profile.chain(
        ...     "toy", batch_size=1, forward_s=[1], backward_s=[2], activation_bytes=[8], parameter_bytes=[4])
        >>> toy.networkx().nodes["layer0"]["layer"].backward_s
        (2,)
        """
        import networkx

        graph: networkx.DiGraph[str] = networkx.DiGraph(name=self.name)
        graph.add_nodes_from((layer.id, {"layer": layer}) for layer in self.layers)
        graph.add_edges_from(self.edges)
        return graph


def _is_consistent(ratio: float) -> bool:
    """Return whether a split backward pass of `ratio` times the whole pass is possible, up to rounding."""
    return 1 <= ratio * _ROUNDED <= SPLIT_RATIOS[1] * _ROUNDED**2


def _column(what: str, values: Any) -> list[Any]:
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise ProfileError(f"{what} is {safe_repr(values)}", "give a list with one entry for each layer")
    return check_list(what, values, error=ProfileError, hint="give a list with one entry for each layer")


def _batch_sizes(name: str, given: tuple[object, ...]) -> tuple[int, ...]:
    if not given:
        raise ProfileError(f"profile `{name}` has no batch size", "give the number of samples in each measured batch")
    sizes = [
        check_int(f"profile `{name}`: batch size", value, error=ProfileError, hint="count samples") for value in given
    ]
    for smaller, larger in pairwise(sizes):
        if smaller >= larger:
            raise ProfileError(
                f"profile `{name}`: batch size {larger} comes after {smaller}",
                "sort batch sizes in ascending order, each once",
            )
    return tuple(sizes)


def _cycle(ids: Iterable[str], edges: Iterable[tuple[str, str]]) -> list[str]:
    """Return the layers of one cycle, with the first repeated at the end; empty if there is none."""
    after: dict[str, list[str]] = {layer_id: [] for layer_id in ids}
    waiting = dict.fromkeys(after, 0)
    for start, end in edges:
        after[start].append(end)
        waiting[end] += 1
    ready = [layer_id for layer_id, count in waiting.items() if count == 0]
    while ready:
        start = ready.pop()
        del waiting[start]
        for end in after[start]:
            waiting[end] -= 1
            if waiting[end] == 0:
                ready.append(end)
    if not waiting:
        return []
    # Each layer that is left has a predecessor that is left. So a walk against the edges must return to a visited
    # layer.
    before = {end: start for start, end in edges if start in waiting and end in waiting}
    walked: dict[str, None] = {}
    at = min(waiting)
    while at not in walked:
        walked[at] = None
        at = before[at]
    path = list(walked)
    return [*path[path.index(at) :], at][::-1]
