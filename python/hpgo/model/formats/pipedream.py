"""Reader and writer of PipeDream's profile text: a line for each layer, then an indented line for each edge.

    n1 -- Linear -- forward_compute_time=0.5, backward_compute_time=1.2, activation_size=4000, parameter_size=2080
    n2 -- Softmax -- forward_compute_time=0.1, backward_compute_time=0, activation_size=[4000; 8], parameter_size=0
        n1 -- n2

Numbers are milliseconds and bytes of one batch, whose size the text does not contain. A layer with several outputs
lists their sizes, which are summed. A layer may end in ` -- stage_id=2`, the stage that PipeDream's planner assigned.
The format is that of PipeDream's profiler (Narayanan et al., SOSP 2019). DAPPLE's planner uses it, too.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

from hpgo.base.messages import did_you_mean, shorten
from hpgo.errors import ArgumentError, ProfileError
from hpgo.model.profile import LARGEST, Layer, Profile

_COSTS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_ENTRY = re.compile(r"\ufeff?\s*(\{|#|\"?\w+\"?\s*:(\s|$))")  # first line of a mapping in JSON or YAML, or of a comment
_SHAPE = "a layer is `id -- name -- " + ", ".join(f"{key}=…" for key in _COSTS) + "`; an edge is indented: `  id -- id`"


def looks_like(text: str) -> bool:
    """Return whether the first line with text has this format's separator and is not JSON or YAML."""
    first = next((line for line in text.splitlines() if line.strip()), "")
    return " -- " in first and not _ENTRY.match(first)


def parse(text: str, *, name: str, batch_size: int, file: str = "text") -> Profile:
    """Return the profile in `text`, measured at `batch_size` samples.

    Raises ProfileError naming `file` and line.

    >>> line = "n1 -- fc -- forward_compute_time=2, backward_compute_time=4, activation_size=8, parameter_size=1e3"
    >>> parse(line, name="tiny", batch_size=16).layers[0].forward_s
    (0.002,)
    """
    layers: dict[str, Layer] = {}
    edges: dict[tuple[str, str], int] = {}  # number of the first line with each edge
    for number, line in enumerate(text.replace("\r\n", "\n").replace("\r", "\n").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            if line[0].isspace():
                edges.setdefault(_edge(line), number)
            else:
                layer = _layer(line.rstrip())
                if layer.id in layers:
                    raise ProfileError(  # noqa: TRY301 -- the handler below adds the line's number
                        f"a second layer has the id `{layer.id}`", "rename one, and its edges", code="duplicate"
                    )
                layers[layer.id] = layer
        except ProfileError as error:
            raise error.as_kind(ProfileError, f"{file}, line {number}: {error.message}") from None
    for edge, number in edges.items():
        for end in edge:
            if end not in layers:
                raise ProfileError(
                    f"{file}, line {number}: an edge names an unknown layer `{end}`", did_you_mean(end, layers)
                )
    try:
        return Profile(name, (batch_size,), tuple(layers.values()), tuple(edges), source=file)
    except ProfileError as error:
        raise error.as_kind(ProfileError, f"{file}: {error.message}") from None


def write(profile: Profile, batch_size: int | None = None) -> str:
    """Return `profile` as PipeDream text at one of its batch sizes, which may be left out if it has only one.

    The format has no field for batch size, `saved_bytes` and `source`. If any id contains blanks, all become `node1`,
    `node2`, …

    Raises ArgumentError if the profile was not measured at that batch size, or has several GPUs per device, which the
    format can't express.

    >>> toy = Profile.chain(
    ...     "toy", batch_size=1, forward_s=[0.002], backward_s=[0.004], activation_bytes=[8], parameter_bytes=[1e3])
    >>> print(write(toy), end="")
    layer0 -- layer0 -- forward_compute_time=2, backward_compute_time=4, activation_size=8, parameter_size=1000
    """
    if profile.gpus_per_device != 1:
        raise ArgumentError(
            f"a device of profile `{profile.name}` has {profile.gpus_per_device} GPUs,"
            " but PipeDream text allows only one",
            "write it as JSON or YAML",
            code="unsupported",
        )
    if batch_size is None and len(profile.batch_sizes) == 1:
        batch_size = profile.batch_sizes[0]
    if batch_size not in profile.batch_sizes:
        sizes = ", ".join(map(str, profile.batch_sizes))
        raise ArgumentError(
            f"profile `{profile.name}` has batch sizes {sizes}, but PipeDream text holds only one",
            f"choose one of them with `batch_size` (got {batch_size})",
        )
    at = profile.batch_sizes.index(batch_size)
    plain = all(re.fullmatch(r"\S+", layer.id) for layer in profile.layers)
    ids = {layer.id: layer.id if plain else f"node{index}" for index, layer in enumerate(profile.layers, start=1)}
    lines = []
    for layer in profile.layers:
        costs = (
            _text(layer.forward_s[at], shift=3),
            _text(layer.backward_s[at], shift=3),
            _text(layer.activation_bytes[at]),
            _text(layer.parameter_bytes),
        )
        name = " ".join(layer.name.splitlines())  # a layer is one line
        stage = "" if layer.stage is None else f" -- stage_id={layer.stage}"
        written = ", ".join(f"{key}={cost}" for key, cost in zip(_COSTS, costs, strict=True))
        lines.append(f"{ids[layer.id]} -- {name} -- {written}{stage}\n")
    lines += (f"\t{ids[start]} -- {ids[end]}\n" for start, end in profile.edges)
    return "".join(lines)


def _edge(line: str) -> tuple[str, str]:
    ends = line.strip().split(" -- ")
    if len(ends) != 2 or not all(ends):
        raise ProfileError("an indented line must be an edge `id -- id`", _SHAPE)
    return ends[0], ends[1]


def _layer(line: str) -> Layer:
    layer_id, _, rest = line.partition(" -- ")
    # A name may contain ` -- `, so search for the costs from the right.
    name, marker, costs = rest.rpartition(f" -- {_COSTS[0]}=")
    if not marker:
        raise ProfileError(f"no ` -- {_COSTS[0]}=` in the line of `{shorten(layer_id)}`", _SHAPE)
    costs, _, stage = f"{_COSTS[0]}={costs}".partition(" -- ")
    values: dict[str, str] = {}
    for item in costs.split(","):
        key, _, value = item.strip().partition("=")
        if key in values or key not in _COSTS:
            fault = "given twice" if key in values else "unknown"
            raise ProfileError(f"layer `{layer_id}`: `{shorten(key)}` is {fault}", _SHAPE)
        values[key] = value
    for key in _COSTS:
        if key not in values:
            raise ProfileError(f"layer `{layer_id}`: `{key}` is missing", _SHAPE, code="missing")
    sizes = values["activation_size"].strip()
    if sizes.startswith("[") and sizes.endswith("]"):
        sizes = sizes[1:-1]
    return Layer(
        layer_id,
        name,
        forward_s=(_number(layer_id, "forward_compute_time", values["forward_compute_time"], shift=-3),),
        backward_s=(_number(layer_id, "backward_compute_time", values["backward_compute_time"], shift=-3),),
        activation_bytes=(sum(_number(layer_id, "activation_size", size) for size in sizes.split(";")),),
        parameter_bytes=_number(layer_id, "parameter_size", values["parameter_size"]),
        stage=_stage(layer_id, stage),
    )


def _stage(layer_id: str, text: str) -> int | None:
    if not text:
        return None
    key, _, value = text.partition("=")
    if key != "stage_id" or not re.fullmatch(r"[0-9]{1,9}", value):
        raise ProfileError(
            f"layer `{layer_id}`: `{shorten(text)}` comes after its costs, where only `stage_id=K` may be", "remove it"
        )
    return int(value)


def _number(layer_id: str, key: str, text: str, *, shift: int = 0) -> float:
    """Return `text` × 10^`shift`, rounded once: 2.69 ms become the float of the literal `0.00269`."""
    try:
        number = Decimal(text.strip())
    except InvalidOperation:
        raise ProfileError(f"layer `{layer_id}`: {key} is `{shorten(text)}`", "it must be a number") from None
    # The shift itself would overflow far beyond the limit.
    value = float(number.scaleb(shift)) if number.is_finite() and number.adjusted() < 30 else float("inf")
    if not 0 <= value <= LARGEST:
        raise ProfileError(
            f"layer `{layer_id}`: {key} is {shorten(text.strip())}",
            "give a finite number from 0 to 1e18; measure it again, or write 0",
        )
    return value


def _text(value: float, *, shift: int = 0) -> str:
    """Return the shortest decimal that `_number` reads back as `value`."""
    return f"{Decimal(repr(float(value))).scaleb(shift).normalize():f}"
