"""Reader and writer of hpgo's own profile format in JSON or YAML.

    hpgo_profile: 1
    name: tiny
    batch_sizes: [8, 16]
    layers:
      - {id: linear, forward_s: [0.5e-3, 0.9e-3], backward_s: [1.1e-3, 2e-3], activation_bytes: [4000, 8000],
         parameter_bytes: 16.4 MB}
      - {id: loss, forward_s: [1e-4, 2e-4], backward_s: [1e-4, 2e-4], activation_bytes: [4, 4], parameter_bytes: 0}

Numbers are seconds and bytes, or text with a unit. With one batch size (also written `batch_size: 8`), numbers need no
brackets. Without `edges`, the layers are a chain. `repeat: 24` stands for 24 equal layers. docs/profiles.md lists all
keys.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

from hpgo.base.documents import Section
from hpgo.base.documents import parse as parse_document
from hpgo.base.messages import safe_repr
from hpgo.base.quoting import in_yaml
from hpgo.base.units import parse_bytes, parse_seconds
from hpgo.errors import ArgumentError, ProfileError
from hpgo.model.profile import Layer, Profile, TiedWeight, TypeTimes

VERSION = 1
VERSION_KEY = "hpgo_profile"
_MAX_LAYERS = 100_000
_TYPE_KEYS = "forward_s backward_s input_gradient_s weight_gradient_s"
_HALVES = ("input_gradient_s", "weight_gradient_s")
_TEXTS = ("device", "machine", "dtype", "date")
_KEYS = " ".join(
    (VERSION_KEY, "name source batch_size batch_sizes layers edges gpus_per_device tied_weights versions", *_TEXTS)
)
_LAYER_KEYS = " ".join(
    (
        "id name repeat forward_s backward_s activation_bytes saved_bytes parameter_bytes frozen_bytes",
        "stage spread times_by_type",
        *_HALVES,
    )
)
UNPRICED = ("name", "source", *_TEXTS, "versions")
"""Keys that describe the origin of the numbers. Costs depend neither on them nor on the `spread` of a layer."""


def parse(text: str, *, name: str, file: str = "text") -> Profile:
    r"""Return the profile in `text`; `name` is its name if it has none.

    Raises ProfileError naming `file` and line, layer or key.

    >>> layer = "{id: fc, forward_s: 1e-3, backward_s: 2e-3, activation_bytes: 8, parameter_bytes: 400}"
    >>> parse(f"hpgo_profile: 1\nbatch_sizes: 4\nlayers: [{layer}]", name="tiny").layers[0].backward_s
    (0.002,)
    """
    return of_document(parse_document(text, file, ProfileError), name=name, file=file)


def of_document(document: object, *, name: str, file: str) -> Profile:
    """Return the profile in a parsed file; `name` is its name if it has none. Raises the errors of `parse`."""
    top = Section(document, file, ProfileError, keys=_KEYS)
    version = top.get(VERSION_KEY)
    if isinstance(version, bool) or version != VERSION:
        top.fail(f"`{VERSION_KEY}` is {safe_repr(version)}", f"this hpgo reads version {VERSION}")
    batch_sizes = _batch_sizes(top)
    layers: list[Layer] = []
    repeated: dict[str, tuple[str, str]] = {}
    for number, entry in enumerate(top.items("layers"), start=1):
        section = Section(entry, f"{file}, layers entry {number}", ProfileError, keys=_LAYER_KEYS)
        several = _layers(section, len(batch_sizes))
        layers += several
        if len(layers) > _MAX_LAYERS:
            section.fail(
                f"the file has more than {_MAX_LAYERS:,} layers", "merge several layers into one", code="too_large"
            )
        if "repeat" in section:
            # Edges name the entry, not its repetitions: keep the ends of its chain.
            repeated[section.text("id")] = several[0].id, several[-1].id
    ids = [layer.id for layer in layers]
    edges = _edges(top, repeated, ids) if "edges" in top else list(pairwise(ids))
    title, source = top.text("name", name), top.text("source", file)
    gpus = top.whole("gpus_per_device", 1, minimum=1)
    # Files and plans of earlier versions list them as `ties`.
    key = "ties" if "ties" in top and "tied_weights" not in top else "tied_weights"
    tied_weights = tuple(
        _tie(Section(entry, f"{file}, {key} entry {number}", ProfileError, keys="layers parameter_bytes"))
        for number, entry in enumerate(top.items(key, []), start=1)
    )
    texts = {key: top.text(key, "") for key in _TEXTS}
    versions: list[tuple[str, str]] = []
    if "versions" in top:
        section = top.within("versions")
        versions = [(of, section.text(of)) for of in section]
    top.done()
    return top.build(
        Profile,
        title,
        batch_sizes,
        tuple(layers),
        tuple(edges),
        source,
        gpus,
        tied_weights,
        **texts,
        versions=tuple(versions),
    )


def document(profile: Profile) -> dict[str, object]:
    """Return `profile` as the content of a JSON file, which `of_document` reads.

    >>> toy = Profile.chain(
    ...     "toy", batch_size=1, forward_s=[0.002], backward_s=[0.004], activation_bytes=[8], parameter_bytes=[1e3])
    >>> document(toy)["layers"][0]["backward_s"]
    0.004
    """
    keys = _head(profile) | {"layers": [_layer_keys(layer) for layer in profile.layers]}
    if profile.tied_weights:
        keys["tied_weights"] = [_tie_keys(tie) for tie in profile.tied_weights]
    return keys if _is_chain(profile) else keys | {"edges": [list(edge) for edge in profile.edges]}


def write_json(profile: Profile) -> str:
    """Return `profile` as JSON, with one line per layer.

    >>> toy = Profile.chain(
    ...     "toy", batch_size=1, forward_s=[0.002], backward_s=[0.004], activation_bytes=[8], parameter_bytes=[1e3])
    >>> parse(write_json(toy), name="") == toy
    True
    """
    head = _head(profile)
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    lines.append(_json_list("layers", [json.dumps(_layer_keys(layer)) for layer in profile.layers]))
    if not _is_chain(profile):
        lines.append(_json_list("edges", [json.dumps(edge) for edge in profile.edges]))
    if profile.tied_weights:
        lines.append(_json_list("tied_weights", [json.dumps(_tie_keys(tie)) for tie in profile.tied_weights]))
    return "{\n" + ",\n".join(lines) + "\n}\n"


def write_yaml(profile: Profile) -> str:
    """Return `profile` as YAML, with one line per layer.

    >>> toy = Profile.chain(
    ...     "toy", batch_size=1, forward_s=[0.002], backward_s=[0.004], activation_bytes=[8], parameter_bytes=[1e3])
    >>> print(write_yaml(toy), end="")
    hpgo_profile: 1
    name: toy
    source: ""
    batch_sizes: 1
    layers:
      - {id: layer0, forward_s: 0.002, backward_s: 0.004, activation_bytes: 8, parameter_bytes: 1000.0}
    """
    lines = [f"{key}: {in_yaml(value)}" for key, value in _head(profile).items()]
    lines.append("layers:")
    for layer in profile.layers:
        keys = (f"{key}: {in_yaml(value)}" for key, value in _layer_keys(layer).items())
        lines.append(f"  - {{{', '.join(keys)}}}")
    if not _is_chain(profile):
        lines.append("edges:" if profile.edges else "edges: []")
        lines += (f"  - {in_yaml(edge)}" for edge in profile.edges)
    if profile.tied_weights:
        lines.append("tied_weights:")
        lines += (f"  - {in_yaml(_tie_keys(tie))}" for tie in profile.tied_weights)
    return "\n".join(lines) + "\n"


def _batch_sizes(top: Section) -> tuple[Any, ...]:
    """Return the batch sizes under `batch_sizes`, or the single one under `batch_size`."""
    if "batch_size" in top:
        if "batch_sizes" in top:
            top.fail("`batch_size` and `batch_sizes` are both given", "leave one of them out", code="duplicate")
        return (top.whole("batch_size", minimum=1),)
    sizes = top.get("batch_sizes")
    return tuple(sizes) if isinstance(sizes, list) else (sizes,)


def _layers(section: Section, sizes: int) -> list[Layer]:
    """Return the layer of an entry, or its repetitions `block0`, `block1` and so on."""
    count = section.whole("repeat", 1, minimum=1)
    if count > _MAX_LAYERS:
        section.fail(f"`repeat` is {count}", f"give a whole number from 1 to {_MAX_LAYERS}")
    layer = _layer(section, sizes)
    if "repeat" not in section:
        return [layer]
    named = layer.name != layer.id
    return [
        replace(layer, id=f"{layer.id}{at}", name=layer.name if named else f"{layer.id}{at}") for at in range(count)
    ]


def _layer(section: Section, sizes: int) -> Layer:
    layer_id = section.text("id")
    section.where += f" (`{layer_id}`)"
    saved = _measured(section, "saved_bytes", sizes) if "saved_bytes" in section else None
    layer = section.build(
        Layer,
        layer_id,
        section.text("name", layer_id),
        _measured(section, "forward_s", sizes),
        _measured(section, "backward_s", sizes),
        _measured(section, "activation_bytes", sizes),
        _size(section),
        saved,
        section.whole("stage") if "stage" in section else None,
        **{key: _measured(section, key, sizes) for key in _HALVES if key in section},
        spread=section.number("spread") if "spread" in section else None,
        frozen_bytes=_size(section, "frozen_bytes") if "frozen_bytes" in section else 0.0,
        times_by_type=_times_by_type(section, sizes),
    )
    section.done()
    return layer


def _times_by_type(section: Section, sizes: int) -> tuple[TypeTimes, ...]:
    if "times_by_type" not in section:
        return ()
    types = section.within("times_by_type")
    times = []
    for name in types:
        of_type = types.within(name)
        halves = {key: _measured(of_type, key, sizes) for key in _HALVES if key in of_type}
        passes = (_measured(of_type, key, sizes) for key in ("forward_s", "backward_s"))
        times.append(TypeTimes(name, *passes, **halves))
        of_type.done()
    return tuple(times)


def _tie(section: Section) -> TiedWeight:
    layers, size = tuple(section.items("layers")), _size(section)
    section.done()
    return section.build(TiedWeight, layers, size)  # type: ignore[arg-type] # it checks that they are texts


def _measured(section: Section, key: str, sizes: int) -> tuple[Any, ...]:
    """Return one value for each batch size, converted from its unit if it has one. `Layer` checks the numbers."""
    values = section.get(key)
    if not isinstance(values, list):
        values = [values]
    if len(values) != sizes:
        section.fail(f"`{key}` has {len(values)} values", f"give one for each batch size: {sizes}")
    return tuple(_in_base_units(section, key, value) if isinstance(value, str) else value for value in values)


def _size(section: Section, key: str = "parameter_bytes") -> float:
    """Return the bytes under `key` from a number or from text with a unit."""
    value = section.get(key)
    if isinstance(value, str):
        return _in_base_units(section, key, value)
    return section.number(key)


def _in_base_units(section: Section, key: str, text: str) -> float:
    try:
        return parse_bytes(text) if key.endswith("_bytes") else parse_seconds(text)
    except ArgumentError as error:
        section.reraise(error, f"`{key}`: {error.message}")


def _edges(top: Section, repeated: dict[str, tuple[str, str]], ids: list[str]) -> list[tuple[str, str]]:
    """Return the edges of a file. A repeated entry stands for the chain of its layers."""
    edges = [
        (one, other)
        for first, last in repeated.values()
        for one, other in pairwise(ids[ids.index(first) : ids.index(last) + 1])
    ]
    for number, edge in enumerate(top.items("edges"), start=1):
        if not isinstance(edge, list) or len(edge) != 2 or not all(isinstance(end, str) for end in edge):
            top.fail(
                f"edges entry {number} must be a pair of layer ids, got {safe_repr(edge)}",
                "write it like [embed, layer1], and quote numbers",
            )
        begin, end = edge
        # An edge from a repeated entry starts at its last layer, and an edge to it ends at its first.
        edges.append((repeated.get(begin, (begin, begin))[1], repeated.get(end, (end, end))[0]))
    return edges


def _head(profile: Profile) -> dict[str, object]:
    head = {
        VERSION_KEY: VERSION,
        "name": profile.name,
        "source": profile.source,
        "batch_sizes": _bare(profile.batch_sizes),
    }
    if profile.gpus_per_device != 1:
        head["gpus_per_device"] = profile.gpus_per_device
    head |= {key: getattr(profile, key) for key in _TEXTS if getattr(profile, key)}
    return head | ({"versions": dict(profile.versions)} if profile.versions else {})


def _layer_keys(layer: Layer) -> dict[str, object]:
    keys: dict[str, object] = {"id": layer.id}
    if layer.name != layer.id:
        keys["name"] = layer.name
    keys |= {
        "forward_s": _bare(layer.forward_s),
        "backward_s": _bare(layer.backward_s),
        "activation_bytes": _bare(layer.activation_bytes),
        "parameter_bytes": layer.parameter_bytes,
    }
    if layer.frozen_bytes:
        keys["frozen_bytes"] = layer.frozen_bytes
    if layer.saved_bytes is not None:
        keys["saved_bytes"] = _bare(layer.saved_bytes)
    if layer.stage is not None:
        keys["stage"] = layer.stage
    keys |= {key: _bare(getattr(layer, key)) for key in _HALVES if getattr(layer, key) is not None}
    if layer.spread is not None:
        keys["spread"] = layer.spread
    if layer.times_by_type:
        keys["times_by_type"] = {of_type.type: _pass_keys(of_type) for of_type in layer.times_by_type}
    return keys


def _pass_keys(times: TypeTimes) -> dict[str, object]:
    given = ((key, getattr(times, key)) for key in _TYPE_KEYS.split())
    return {key: _bare(values) for key, values in given if values is not None}


def _tie_keys(tie: TiedWeight) -> dict[str, object]:
    return {"layers": list(tie.layers), "parameter_bytes": tie.parameter_bytes}


def _bare(values: tuple[float, ...]) -> float | tuple[float, ...]:
    return values[0] if len(values) == 1 else values


def _is_chain(profile: Profile) -> bool:
    return profile.edges == tuple(pairwise(layer.id for layer in profile.layers))


def _json_list(key: str, items: list[str]) -> str:
    joined = ",\n    ".join(items)
    return f'  "{key}": [\n    {joined}\n  ]' if items else f'  "{key}": []'
