"""What one GPU of a cluster does, and what groups of them send each other."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from hpgo.base.messages import shorten
from hpgo.errors import ClusterError
from hpgo.machine.rates import rates_of

if TYPE_CHECKING:
    from hpgo.llm.parallelism import Precision
    from hpgo.machine.cluster import Cluster, Link

_KEPT = {"bf16": "bfloat16", "fp16": "float16", "fp8": "bfloat16", "fp4": "bfloat16"}
"""What numbers outside of products are kept in."""
USUAL_REACHED = 0.76
"""Share of a peak that large products reach where nobody measured it: the mean of the devices that somebody did."""
USUAL_ATTENTION = 0.5
"""The same of attention as one kernel."""


@dataclass(frozen=True, slots=True)
class Gpus:
    """Equal GPUs in machines: rates of one GPU in one direction, after what its best operations reach."""

    products_flop_per_s: float
    """The best that large products reach, in the precision asked for."""
    wide_flop_per_s: float
    """The same in 16 bits, for what is never computed in fewer."""
    attention_flop_per_s: float
    peak_flop_per_s: float
    """In the precision asked for; what shares of it are counted against."""
    memory_bytes_per_s: float
    memory_bytes: float
    count: int
    """All of them."""
    machine: int
    """Of one machine."""
    inside: Link
    """From a GPU to one of its machine."""
    adapter_bytes_per_s: float
    """Of a GPU's share of its machine's network."""
    adapter_latency_s: float
    processors: int = 1
    """Which compute a tile of a product each."""
    host_bytes_per_s: float = inf
    """To the host's memory."""

    @classmethod
    def of(cls, cluster: Cluster, precision: Precision) -> Gpus:
        """Those of `cluster`. Raises ClusterError if they differ, or if nobody knows how fast they compute.

        >>> from hpgo.machine.cluster import Cluster
        >>> h100 = Gpus.of(Cluster.preset("h100:4"), "bf16")
        >>> h100.count, h100.machine, h100.adapter_bytes_per_s
        (32, 8, 50000000000.0)
        """
        first, *others = cluster.nodes
        differ = any(one.device != first.device or one.count > first.count for one in others)
        if differ or any(one.count != first.count for one in others[:-1]):
            raise ClusterError(
                f"the machines of cluster `{shorten(cluster.name)}` differ",
                "a transformer is planned for equal ones, of which the last may have fewer devices",
            )
        if cluster.gpus_per_device != 1:
            raise ClusterError(
                f"a device of cluster `{shorten(cluster.name)}` is {cluster.gpus_per_device} GPUs",
                "name one with a device for each GPU: how many share a layer is part of the plan",
            )
        # Of another speed, the name is that of a device to compare with, which may have other memory.
        memory_bytes = first.device.memory_bytes if first.device.speed == 1 else None
        rates, kept = rates_of(first.device.name, memory_bytes), _KEPT[precision]
        if kept not in rates.flop_per_s:
            known = [name for name in ("bf16", "fp16") if _KEPT[name] in rates.flop_per_s]
            raise ClusterError(
                f"`{shorten(first.device.name)}` does not compute in {precision}",
                f"it does in {' and '.join(known)}",
                code="unsupported",
            )
        wide = rates.flop_per_s[kept] * first.device.speed
        reached = rates.reached.get("bf16", USUAL_REACHED)
        peak, best = wide, wide * reached
        if precision in {"fp8", "fp4"}:
            if precision not in rates.narrow_flop_per_s:
                raise ClusterError(
                    f"`{shorten(first.device.name)}` has no products in {precision}", "take precision bf16"
                )
            peak = rates.narrow_flop_per_s[precision] * first.device.speed
            best = peak * rates.reached.get(precision, rates.reached.get("fp8", USUAL_REACHED))
        return cls(
            products_flop_per_s=best,
            wide_flop_per_s=wide * reached,
            attention_flop_per_s=wide * rates.reached.get("attention", USUAL_ATTENTION),
            peak_flop_per_s=peak,
            memory_bytes_per_s=rates.bytes_per_s * first.device.speed,
            memory_bytes=first.device.memory_bytes,
            count=cluster.devices,
            machine=first.count,
            inside=cluster.intra,
            adapter_bytes_per_s=cluster.inter.collective_bytes_per_s / first.count,
            adapter_latency_s=cluster.inter.latency_s,
            processors=rates.processors,
            host_bytes_per_s=rates.host_bytes_per_s,
        )

    def ring(self, ranks: int, stride: int) -> Ring:
        """How fast `ranks` GPUs, each `stride` after the one before, pass on their parts."""
        together = max(1, min(ranks, self.machine // stride))
        latency_s = self.inside.latency_s * (together - 1)
        rate = self.inside.collective_bytes_per_s
        machines = -(-ranks // together)
        if machines > 1:
            # Those of one machine each have an adapter, and rings through all of them.
            rate = min(rate, together * self.adapter_bytes_per_s)
            # Small messages go by trees, of which a long ring is no slower for large ones.
            latency_s += self.adapter_latency_s * (machines - 1).bit_length()
        return Ring(ranks, rate, latency_s, machines)


@dataclass(frozen=True, slots=True)
class Ring:
    """GPUs that gather or sum what each of them has a part of."""

    ranks: int
    bytes_per_s: float
    latency_s: float
    machines: int

    @property
    def across(self) -> bool:
        """Whether it leaves a machine."""
        return self.machines > 1
