"""Clusters of several kinds of nodes, each kind as a cluster of its own: `h100:4+a100:4`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hpgo.base.files import exists
from hpgo.base.messages import pluralize, shorten
from hpgo.base.validated import Record, check_fields
from hpgo.errors import ClusterError
from hpgo.hardware.cluster import Cluster, cluster_of

if TYPE_CHECKING:
    import os

MAX_KINDS = 4
"""Largest number of kinds of nodes: all orders of the kinds are searched."""


@dataclass(frozen=True, slots=True)
class MixedCluster(Record):
    """Kinds of nodes that train one model together.

    Raises ClusterError for no kind, for more than four, and for different kinds of the same name. Kinds may be equal.
    Between two kinds, messages take the slower of their links between nodes.
    """

    name: str
    parts: tuple[Cluster, ...]
    """The nodes of each kind."""

    def __post_init__(self) -> None:
        check_fields(self, ClusterError)
        if not 0 < len(self.parts) <= MAX_KINDS:
            raise ClusterError(
                f"cluster `{shorten(self.name)}` has {pluralize(len(self.parts), 'kind')} of nodes, but at most"
                f" {MAX_KINDS} are searched together",
                "leave some of them out",
            )
        # Reports and FlagScale tell kinds apart by their names, which have no number of nodes.
        known: dict[str, Cluster] = {}
        for part in self.parts:
            name = part.name.partition(":")[0]
            if known.setdefault(name, part) != part:
                raise ClusterError(
                    f"two kinds of nodes of cluster `{shorten(self.name)}` are named `{shorten(name)}`",
                    "give the type of device of one of them another name",
                    code="duplicate",
                )

    @property
    def devices(self) -> int:
        """Number of devices of all kinds.

        >>> MixedCluster.read("h100:4+a100:2").devices
        48
        """
        return sum(part.devices for part in self.parts)

    @classmethod
    def read(cls, source: str | os.PathLike[str]) -> MixedCluster:
        """Return the cluster of a file, of a name, or of several names or files with `+` between them.

        Nodes of one file with different devices, or different numbers of them, are different kinds. Equal kinds are
        merged. Raises what `Cluster.read` raises.

        >>> [part.name for part in MixedCluster.read("h100:4+a100:2").parts]
        ['h100:4', 'a100:2']
        >>> [len(part.nodes) for part in MixedCluster.read("h100:1+h100:2").parts]
        [3]
        """
        # A file may have a + in its name.
        is_list = isinstance(source, str) and "+" in source and not exists(source)
        names = [name.strip() for name in source.split("+")] if isinstance(source, str) and is_list else [source]
        if is_list and not all(names):
            raise ClusterError(
                f"cluster `{shorten(str(source))}` has no name on one side of a `+`", "write it like `h100:4+a100:4`"
            )
        found: list[Cluster] = []
        for part in (part for name in names for part in kinds_of(cluster_of(name))):
            at = next((at for at, one in enumerate(found) if _is_same_kind(one, part)), None)
            if at is None:
                found.append(part)
            else:
                found[at] = _merged(found[at], part)
        return cls("+".join(map(str, names)) if len(names) > 1 else cluster_of(source).name, tuple(found))


def kinds_of(cluster: Cluster) -> tuple[Cluster, ...]:
    """Return the nodes of each kind of a cluster, in the order of their first nodes, with the links of the cluster.

    A node of fewer devices after equal ones is of their kind if it is the last of the cluster: `Cluster.first` makes
    such clusters, and the cost model covers them.

    >>> [(part.name, part.devices) for part in kinds_of(Cluster.preset("h100:2").first(12))]
    [('12 of h100:2', 12)]
    """
    first = cluster.nodes[0]
    is_cut = all(node.device == first.device for node in cluster.nodes) and (
        all(node.count == first.count for node in cluster.nodes[:-1]) and cluster.nodes[-1].count <= first.count
    )
    if is_cut:
        return (cluster,)
    keys = list(dict.fromkeys((node.device, node.count) for node in cluster.nodes))
    counts = [key[0].name for key in keys]
    found = []
    for device, count in keys:
        nodes = tuple(node for node in cluster.nodes if (node.device, node.count) == (device, count))
        # Nodes of one device differ in their number of devices, which then tells them apart.
        name = f"{device.name} x {count}" if counts.count(device.name) > 1 else device.name
        found.append(replace(cluster, name=f"{name}:{len(nodes)}", nodes=nodes))
    return tuple(found)


def _is_same_kind(one: Cluster, other: Cluster) -> bool:
    kinds = {(node.device, node.count) for cluster in (one, other) for node in cluster.nodes}
    return len(kinds) == 1 and (one.intra, one.inter) == (other.intra, other.inter)


def _merged(one: Cluster, other: Cluster) -> Cluster:
    nodes = (*one.nodes, *other.nodes)
    return replace(one, name=f"{one.name.partition(':')[0]}:{len(nodes)}", nodes=nodes)
