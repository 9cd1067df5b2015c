"""Links, pins and exclusions, which distinguish hosts from others of their type."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hpgo.base.messages import did_you_mean, shorten
from hpgo.errors import ArgumentError, InfeasibleError
from hpgo.model.formats import pipeedge
from hpgo.planning.chain.records import Hop, HostGroup

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hpgo.model.formats.pipeedge import End, Links
    from hpgo.planning.chain.records import ChainProblem


class Rules:
    """Groups of hosts, split as far as links, pins and exclusions need, with allowed layers and links of each."""

    def __init__(
        self, task: ChainProblem, pins: Iterable[str], exclude: Iterable[str], links: tuple[str, Links] | None
    ) -> None:
        file, self.links = links or ("", pipeedge.Links())
        self._link = task.link
        groups = task.groups
        known = task.names
        layers = task.numbers[-1]
        ids = {name: number for number, name in enumerate(task.ids, 1)}
        pinned = [_rule(text, "pin", known, layers, ids) for text in pins]
        excluded = [_rule(text, "exclude", known, layers, ids) for text in exclude]
        self.about_layers = any(numbers is not None for _, numbers in (*pinned, *excluded))
        pipeedge.check_names(self.links, known, file)
        # Hosts that a rule or a link names must be separate from other hosts of their type.
        single = {name for name, _ in (*pinned, *excluded)}
        single |= {name for line in self.links.lines for name in (line.senders, line.receivers)}
        single |= {end.host for end in (self.links.input, self.links.output) if end is not None and end.host}
        gone = {name for name, numbers in excluded if numbers is None}
        self.groups: list[HostGroup] = []
        for group in groups:
            if group.device_type in gone:
                continue
            together = tuple(host for host in group.hosts if host not in single)
            apart = [(host,) for host in group.hosts if host in single and host not in gone]
            self.groups += [replace(group, hosts=hosts) for hosts in (together, *apart) if hosts]
        if not self.groups:
            raise InfeasibleError("all hosts are excluded", "remove one of the exclusions")
        # An empty list means that a group may run all layers, which is shorter than a list of true.
        self.may_run = [self._permissions(group, task.parts, pinned, excluded) for group in self.groups]

    @staticmethod
    def _permissions(
        group: HostGroup,
        parts: list[list[int]],
        pinned: list[tuple[str, frozenset[int] | None]],
        excluded: list[tuple[str, frozenset[int] | None]],
    ) -> list[bool]:
        names = {group.device_type, *group.hosts}
        barred: set[int] = set()
        for name, layers in pinned:
            if name not in names:
                barred |= layers or frozenset()
        for name, layers in excluded:
            if name in names:
                barred |= layers or frozenset()
        if not barred:
            return []
        # An entry may combine several layers of the model. All of them must be allowed.
        return [barred.isdisjoint(part) for part in parts]

    def all_links(self) -> list[list[Hop]]:
        """Return the links from each group to each other group.

        Groups with equal ports, rules and nodes share one lookup, because thousands of hosts have few kinds.
        """
        of_node: dict[str | None, list[int]] = {}
        # For each kind of group, the index of one group and the indices of all.
        kinds: dict[object, tuple[int, list[int]]] = {}
        for index, group in enumerate(self.groups):
            if group.node is not None:
                of_node.setdefault(group.node, []).append(index)
            names = {group.device_type, *group.hosts}
            marks = [(line.senders in names, line.receivers in names) for line in self.links.lines]
            kinds.setdefault((group.port_bytes_per_s, group.node is None, *marks), (index, []))[1].append(index)
        rows: list[list[Hop]] = [[]] * len(self.groups)
        for first, members in kinds.values():
            # Links within a node are set below. Here, hosts count as if all were on different nodes.
            one = replace(self.groups[first], node=None)
            row = [Hop(0.0, 0.0)] * len(self.groups)
            for other, others in kinds.values():
                hop = self.link(one, self.groups[other])
                for index in others:
                    row[index] = hop
            for member in members:
                rows[member] = row.copy()
                # Only hosts of the same node have faster links, so these few are looked up one by one.
                for index in of_node.get(self.groups[member].node, []):
                    rows[member][index] = self.link(self.groups[member], self.groups[index])
        return rows

    def link(self, one: HostGroup, other: HostGroup) -> Hop:
        """Return the link from a host of one group to a host of another group, or to another host of the same group."""
        hop = self._link(one, other)
        # The default latency of the file can raise that of the cluster, but not lower it.
        rate, latency_s = hop.bytes_per_s, max(hop.latency_s, self.links.latency_s)
        senders, receivers = {one.device_type, *one.hosts}, {other.device_type, *other.hosts}
        # Later lines override earlier ones, so that a file can list exceptions after a general rule.
        for line in self.links.lines:
            if line.senders in senders and line.receivers in receivers:
                rate = rate if line.bytes_per_s is None else line.bytes_per_s
                latency_s = latency_s if line.latency_s is None else line.latency_s
        return Hop(rate, latency_s)

    def end(self, end: End | None, *, inward: bool) -> list[Hop]:
        """Return the links of each group for input (`inward`) or output; empty if they take no time."""
        if end is None:
            return []
        hops = []
        for group in self.groups:
            if end.host is None:
                rate = group.port_bytes_per_s if end.bytes_per_s is None else end.bytes_per_s
                hops.append(Hop(rate, end.latency_s))
            elif end.host in group.hosts:
                hops.append(Hop(float("inf"), 0.0))
            else:
                home = next((other for other in self.groups if end.host in other.hosts), None)
                if home is None:
                    raise ArgumentError(
                        f"host `{end.host}` has the input or the output, but is excluded",
                        f"remove the exclusion of `{end.host}`",
                    )
                hops.append(self.link(home, group) if inward else self.link(group, home))
        return hops


def _rule(
    text: str, what: str, known: frozenset[str], layers: int, ids: dict[str, int]
) -> tuple[str, frozenset[int] | None]:
    """Return name and layers of a rule such as `mb-0=1-12,48`; layers are None for a name without layers.

    In a branching model, layers may also be given by their `ids`. Raises ArgumentError for invalid rules.
    """
    example = "write `host=1-12,48`" if what == "pin" else "write `host` or `host=1-12,48`"
    # Names of hosts may contain `=`, so a full match comes first.
    name, equals, numbers = text.partition("=") if text not in known else (text, "", "")
    if name not in known:
        raise ArgumentError(
            f"{what} `{shorten(text)}`: there is no host or type `{shorten(name)}`", did_you_mean(name, sorted(known))
        )
    if not equals:
        if what == "pin":
            raise ArgumentError(f"pin `{shorten(text)}` names no layers", example)
        return name, None
    chosen: set[int] = set()
    for part in numbers.split(","):
        if part in ids:
            chosen.add(ids[part])
            continue
        first, _, last = part.partition("-")
        last = last or first
        if not all(one.isascii() and one.isdigit() and len(one) <= 9 for one in (first, last)):
            raise ArgumentError(f"{what} `{shorten(text)}`: `{shorten(part)}` is not a range of layers", example)
        if not 1 <= int(first) <= int(last) <= layers:
            raise ArgumentError(
                f"{what} `{shorten(text)}`: layers are {shorten(part)}, but the model has layers 1 to {layers}", example
            )
        chosen |= set(range(int(first), int(last) + 1))
    return name, frozenset(chosen)
