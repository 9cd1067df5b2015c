"""Reader of Piper's input files: JSON with a node for each layer, and its costs for each tensor-parallel degree.

    {"nodes": [{"id": 0, "name": "block", "TMPCs": {"1": [
         {"id": "vanilla", "timePerSample": 0.03, "parameterSize": 4e8, "memoryUsageA": 6e8, "memoryUsageB": 8e8,
          "syncTimeFw": {}, "syncTimeBw": {"1": 0}},
         {"id": "activation recomp", "timePerSample": 0.04, …}]}}, …],
     "edges": [{"sourceId": 0, "destId": 1, "communicationCost": 3e7}, …], …}

Numbers are seconds and bytes of one micro-batch, whose size the file does not contain. A time is that of forward and
backward pass together. Recomputation adds one forward pass to it. The format is that of Piper's planner (Tarnawski et
al., NeurIPS 2021), whose `algo.cpp` defines the numbers.

Values of a file in the profile:

- `timePerSample`, seconds of both passes of one micro-batch: `forward_s` and `backward_s`, see below.
- `parameterSize`, bytes of weights on one GPU: `parameter_bytes`.
- `memoryUsageA`, bytes saved for one micro-batch: `saved_bytes`.
- `communicationCost` of an edge, bytes: `activation_bytes`, the maximum over the edges that leave a node.
- `syncTimeFw`, `syncTimeBw`, bytes, despite their names: the larger of both is added to its edge.
- `memoryUsageB`, bytes that are always allocated: ignored, since `--optimizer` determines this memory.

The entry `activation recomp` includes a second forward pass, so its extra time is `forward_s`. Without a plausible
extra time, `forward_s` is 1/3 of the time. hpgo uses the entries without recomputation, and the layers of one GPU
unless `gpus_per_device` selects another degree.

The published `gnmt.json` and `resnet.json` contain PipeDream's milliseconds instead: divide them by 1000 first. In the
published `bert32a100.json`, the sizes of masks and hidden states are swapped on the edges between blocks.
"""

from __future__ import annotations

from hpgo.base.documents import Section
from hpgo.errors import ProfileError
from hpgo.model.profile import Layer, Profile

WHAT = "a file of Piper"
_RECOMPUTED = "activation recomp"
_FORWARD = 1 / 3  # fraction of both passes, if the file does not separate them


def looks_like(document: object) -> bool:
    """Return whether the first node has costs by tensor-parallel degree."""
    nodes = document.get("nodes") if isinstance(document, dict) else None
    return isinstance(nodes, list) and bool(nodes) and isinstance(nodes[0], dict) and "TMPCs" in nodes[0]


def parse(document: object, *, name: str, batch_size: int, gpus_per_device: int = 1, file: str = "text") -> Profile:
    """Return the profile in a parsed file, of layers on `gpus_per_device` GPUs each and without recomputation.

    Raises ProfileError naming `file` and the node, edge or key.

    >>> costs = {"parameterSize": 400, "memoryUsageA": 8, "memoryUsageB": 800, "syncTimeFw": {}, "syncTimeBw": {}}
    >>> both = [costs | {"id": "vanilla", "timePerSample": 3}, costs | {"id": "activation recomp", "timePerSample": 4}]
    >>> layer = parse({"nodes": [{"id": 0, "TMPCs": {"1": both}}], "edges": []}, name="tiny", batch_size=4).layers[0]
    >>> layer.forward_s, layer.backward_s
    ((1.0,), (2.0,))
    """
    top = Section(document, file, ProfileError)
    nodes: dict[str, Section] = {}
    for at, entry in enumerate(top.items("nodes"), start=1):
        node = Section(entry, f"{file}, nodes entry {at}", ProfileError)
        node_id = str(node.whole("id"))
        if node_id in nodes:
            node.fail(f"a second node has the id `{node_id}`", "edges name nodes by their `id`")
        nodes[node_id] = node
    variants = {node_id: _variants(node, gpus_per_device) for node_id, node in nodes.items()}
    edges, sent = _edges(top, variants)
    layers = tuple(_layer(node_id, node, *variants[node_id], sent[node_id]) for node_id, node in nodes.items())
    return top.build(Profile, name, (batch_size,), layers, tuple(edges), file, gpus_per_device)


def _variants(node: Section, gpus: int) -> tuple[Section, Section | None]:
    """Return a node's costs without recomputation, and its costs with recomputation, if there are any."""
    degrees = node.within("TMPCs")
    if str(gpus) not in degrees:
        known = ", ".join(list(degrees)[:12]) or "none"
        node.fail(
            f"there are no `TMPCs` for layers on {gpus} GPUs",
            f"set `gpus_per_device` to a degree of this node: {known}",
        )
    plain, recomputed = None, None
    for at, entry in enumerate(degrees.items(str(gpus)), start=1):
        costs = Section(entry, f"{degrees.where}, {gpus}, entry {at}", ProfileError)
        if costs.text("id") == _RECOMPUTED:
            recomputed = recomputed or costs
        else:
            plain = plain or costs
    if plain is None:
        degrees.fail(f"`{gpus}` has no entry without recomputation", "add the entry with the id `vanilla`")
    return plain, recomputed


def _edges(
    top: Section, variants: dict[str, tuple[Section, Section | None]]
) -> tuple[list[tuple[str, str]], dict[str, float]]:
    """Return the edges, and the bytes that each node sends: the maximum over its edges.

    Piper adds the traffic between a layer's GPUs to each edge, separately for its two ends. The end with more bytes
    determines the time.
    """
    edges, sent = [], dict.fromkeys(variants, 0.0)
    for at, entry in enumerate(top.items("edges"), start=1):
        edge = Section(entry, f"{top.where}, edges entry {at}", ProfileError)
        start, end = str(edge.whole("sourceId")), str(edge.whole("destId"))
        crossing = edge.amount("communicationCost")
        for node_id in (start, end):
            if node_id not in variants:
                edge.fail(f"there is no node `{node_id}`", "edges name nodes by their `id`")
        beside = (
            variants[start][0].within("syncTimeBw").amount(end),
            variants[end][0].within("syncTimeFw").amount(start),
        )
        edges.append((start, end))
        sent[start] = max(sent[start], crossing + max(beside))
    return edges, sent


def _layer(node_id: str, node: Section, plain: Section, recomputed: Section | None, sent: float) -> Layer:
    both = plain.amount("timePerSample")
    again = recomputed.amount("timePerSample") - both if recomputed is not None else 0.0
    # The extra time of recomputation is one forward pass, which is shorter than both passes. Else assume 1/3.
    forward = again if 0 < again < both else both * _FORWARD
    return node.build(
        Layer,
        node_id,
        node.text("name", node_id),
        (forward,),
        (both - forward,),
        (sent,),
        plain.amount("parameterSize"),
        (plain.amount("memoryUsageA"),),
    )
