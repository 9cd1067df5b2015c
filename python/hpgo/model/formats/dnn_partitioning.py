"""Reader of dnn-partitioning's input files: JSON with a node for each pass of each layer or operation.

    {"nodes": [{"id": 0, "fpgaLatency": 1.5, "size": 404000, "isBackwardNode": 0, "colorClass": 7, …},
               {"id": 1, "fpgaLatency": 3.0, "size": 404000, "isBackwardNode": 1, "colorClass": 7, …}, …],
     "edges": [{"sourceId": 0, "destId": 2, "cost": 0.002, "size": 4000}, …], …}

Numbers are milliseconds and bytes of one batch, whose size the file does not contain. Nodes of one `colorClass` must
stay together, so they become one layer. The format is that of the planner of Tarnawski et al. (NeurIPS 2020).

Values of a file in the profile:

- `fpgaLatency`, milliseconds on an accelerator: `forward_s`, or `backward_s` if `isBackwardNode` is true.
- `size` of an edge, bytes: `activation_bytes`, once for each node with an edge out of its layer.
- `size` of a node, bytes: `parameter_bytes` and `saved_bytes`, see below.
- `colorClass`: nodes of one class form a layer with the id of its first forward node.
- `cpuLatency`, `cost` of an edge: ignored.

Classes in a cycle become one layer. Backward nodes without a forward node of their class join the nearest layer. A
layer's node includes weights and output, so its weights are its size minus the output. The last layer has no edge with
its output, so its whole size counts as weights. If weights are separate nodes, as in graphs of operations, the size of
other nodes is their output. Edges need a `size`, since units of `cost` differ between published files. A node that is
not `supportedOnFpga` is an error.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from dataclasses import dataclass

from hpgo.base.documents import Section
from hpgo.errors import ProfileError
from hpgo.model.profile import Layer, Profile

WHAT = "a file of dnn-partitioning"


def looks_like(document: object) -> bool:
    """Return whether the first node has the accelerator's latency under this format's key."""
    nodes = document.get("nodes") if isinstance(document, dict) else None
    return isinstance(nodes, list) and bool(nodes) and isinstance(nodes[0], dict) and "fpgaLatency" in nodes[0]


@dataclass(slots=True)
class _Node:
    id: str
    name: str
    seconds: float
    size: float
    backward: bool
    group: str
    """Key of the nodes that must stay together."""
    sent: float = 0.0
    fed: bool = False


def parse(document: object, *, name: str, batch_size: int, file: str = "text") -> Profile:
    """Return the profile in a parsed file.

    Raises ProfileError naming `file` and the node, edge or key.

    >>> node = {"id": 0, "supportedOnFpga": 1, "fpgaLatency": 2, "size": 8, "isBackwardNode": 0}
    >>> parse({"nodes": [node], "edges": []}, name="tiny", batch_size=4).layers[0].forward_s
    (0.002,)
    """
    top = Section(document, file, ProfileError)
    nodes: dict[str, _Node] = {}
    for at, entry in enumerate(top.items("nodes"), start=1):
        section = Section(entry, f"{file}, nodes entry {at}", ProfileError)
        node = _node(section)
        if node.id in nodes:
            section.fail(f"a second node has the id `{node.id}`", "rename one of them, and its edges", code="duplicate")
        nodes[node.id] = node
    pairs = _edges(top, nodes)
    group_of = _groups(nodes, pairs)
    groups: dict[str, list[_Node]] = defaultdict(list)
    for node in nodes.values():
        groups[group_of[node.id]].append(node)
    first = {key: next((node for node in group if not node.backward), group[0]).id for key, group in groups.items()}
    # Edges of gradients may point in either direction, so only edges of forward nodes define the graph.
    pairs = [pair for pair in pairs if group_of[pair[0]] != group_of[pair[1]] and not nodes[pair[0]].backward]
    leaving = {start for start, _ in pairs}
    # Files have one of two kinds of nodes: operations, with a separate node per weight, or layers that hold weights and
    # output.
    apart = any(_is_weight(node) for node in nodes.values())
    layers = tuple(_layer(top, nodes[first[key]], group, leaving, apart=apart) for key, group in groups.items())
    edges = dict.fromkeys((first[group_of[start]], first[group_of[end]]) for start, end in pairs)
    return top.build(Profile, name, (batch_size,), layers, tuple(edges), file)


def _node(section: Section) -> _Node:
    node_id = str(section.whole("id"))
    if not _flag(section, "supportedOnFpga"):
        section.fail(
            "this node can't run on an accelerator",
            "leave it out: layers of a profile run on every device",
            code="user_code",
        )
    seconds = section.amount("fpgaLatency") / 1e3
    size = section.amount("size") if "size" in section else 0.0
    # Nodes without a class form a group by themselves.
    group = f"class {section.whole('colorClass')}" if "colorClass" in section else f"node {node_id}"
    return _Node(node_id, section.text("name", node_id), seconds, size, _flag(section, "isBackwardNode"), group)


def _flag(section: Section, key: str) -> bool:
    value = section.get(key)
    if not isinstance(value, int) or value not in {0, 1}:
        section.wrong(key, "true, false, 0 or 1", value)
    return bool(value)


def _edges(top: Section, nodes: dict[str, _Node]) -> list[tuple[str, str]]:
    pairs = []
    for at, entry in enumerate(top.items("edges"), start=1):
        edge = Section(entry, f"{top.where}, edges entry {at}", ProfileError)
        start, end = str(edge.whole("sourceId")), str(edge.whole("destId"))
        for node_id in (start, end):
            if node_id not in nodes:
                edge.fail(f"there is no node `{node_id}`", "edges name nodes by their `id`")
        if "size" not in edge:
            edge.fail("`size` is missing", "add the bytes that cross the edge; `cost` is a time on one machine's bus")
        nodes[start].sent = max(nodes[start].sent, edge.amount("size"))
        nodes[end].fed = True
        pairs.append((start, end))
    return pairs


def _groups(nodes: dict[str, _Node], pairs: list[tuple[str, str]]) -> dict[str, str]:
    """Return the group of each node: its class, merged with all classes that are on a cycle with it.

    No cut can separate classes that feed each other, so they become one layer. Only edges from forward nodes count:
    edges of gradients have the direction of the forward pass in some files, and the opposite one in others.
    """
    import networkx

    joined = _joined(nodes, pairs)
    graph: networkx.DiGraph[str] = networkx.DiGraph()
    graph.add_nodes_from(joined.values())
    graph.add_edges_from((joined[start], joined[end]) for start, end in pairs if not nodes[start].backward)
    together = {
        group: str(number)
        for number, members in enumerate(networkx.strongly_connected_components(graph))
        for group in members
    }
    return {node_id: together[group] for node_id, group in joined.items()}


def _joined(nodes: dict[str, _Node], pairs: list[tuple[str, str]]) -> dict[str, str]:
    """Return the class of each node. A class of backward nodes only joins the nearest class with forward nodes.

    Distance counts edges in either direction.
    """
    near: dict[str, list[str]] = {node_id: [] for node_id in nodes}
    for start, end in pairs:
        near[start].append(end)
        near[end].append(start)
    members: dict[str, list[str]] = defaultdict(list)
    for node in nodes.values():
        members[node.group].append(node.id)
    into = {node.group: node.group for node in nodes.values() if not node.backward}
    waiting = deque(into)
    while waiting:
        group = waiting.popleft()
        for node_id in members[group]:
            for other in near[node_id]:
                if nodes[other].group not in into:
                    into[nodes[other].group] = into[group]
                    waiting.append(nodes[other].group)
    return {node.id: into.get(node.group, node.group) for node in nodes.values()}


def _layer(top: Section, first: _Node, group: list[_Node], leaving: set[str], *, apart: bool) -> Layer:
    forward = [node for node in group if not node.backward]
    held = sum(node.size for node in forward)
    weights = sum(_weights(node, apart=apart) for node in forward)
    return top.build(
        Layer,
        first.id,
        first.name,
        (math.fsum(node.seconds for node in forward),),
        (math.fsum(node.seconds for node in group if node.backward),),
        (sum(node.sent for node in forward if node.id in leaving),),
        weights,
        (held - weights,),
    )


def _weights(node: _Node, *, apart: bool) -> float:
    """Return the part of a node's memory that is allocated before the batch arrives, in bytes."""
    if apart:
        return node.size if _is_weight(node) else 0.0
    return max(0.0, node.size - node.sent)


def _is_weight(node: _Node) -> bool:
    """Return whether a node may be a weight: it has no input, takes no time and uses memory."""
    return not node.backward and not node.fed and not node.seconds and node.size > 0
