"""Rates of one GPU of a cluster, and of rings of GPUs that communicate."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from hpgo.base.messages import shorten
from hpgo.errors import ClusterError
from hpgo.hardware.rates import gpus_per_host, rates_of

if TYPE_CHECKING:
    from hpgo.hardware.cluster import Cluster, Link
    from hpgo.llm.parallelism import Precision

_KEPT = {"bf16": "bfloat16", "fp16": "float16", "fp8": "bfloat16", "fp4": "bfloat16"}
"""Format of activations outside GEMMs, by precision."""
USUAL_REACHED = 0.76
"""Share of the peak rate that large GEMMs reach on devices without a measurement: the mean of measured devices."""
_RATED_TOKENS = 8192
"""Tokens of a sequence at which the rate of fused attention is stated."""
USUAL_ATTENTION = 0.5
"""Share of the peak rate that fused attention reaches on devices without a measurement."""


def unmeasured_shares(cluster: Cluster) -> str:
    """Return a sentence if the shares of the peak that GEMMs reach were not measured on the cluster's device, or "".

    >>> from hpgo.hardware.cluster import Cluster
    >>> unmeasured_shares(Cluster.preset("h100:1")), unmeasured_shares(Cluster.preset("l40s:1"))[:38]
    ('', 'the rates of `L40S-48GB` are from its ')
    """
    device = cluster.nodes[0].device
    shares = (device.measured_rates or device.rates or rates_of(device.name)).shares
    if shares == "measured":
        return ""
    name = f"`{shorten(device.name)}`"
    if shares == "scaled":
        return f"the shares of the peak that {name} reaches are scaled from a similar card, not measured"
    return (
        f"the rates of {name} are from its datasheet, and no measurement is known: GEMMs are assumed to reach"
        f" {100 * USUAL_REACHED:.0f} % of the peak"
    )


@dataclass(frozen=True, slots=True)
class Gpus:
    """Equal GPUs in nodes: rates of one GPU, in one direction, that its best operations reach."""

    products_flop_per_s: float
    """Best rate of large GEMMs in the configuration's precision."""
    wide_flop_per_s: float
    """Best rate of large GEMMs in 16 bits, for operations that never use fewer bits."""
    attention_flop_per_s: float
    """Best rate of fused attention, which computes in 16 bits."""
    peak_flop_per_s: float
    """Peak rate on the data sheet in the configuration's precision, against which MFU is counted."""
    memory_bytes_per_s: float
    """Peak rate of the GPU's memory."""
    memory_bytes: float
    """Memory of one GPU."""
    count: int
    """Number of GPUs in the cluster."""
    gpus_per_node: int
    """Number of GPUs in a node."""
    inside: Link
    """Link between two GPUs of a node."""
    adapter_bytes_per_s: float
    """Rate at which one GPU sends to other nodes: the node's network divided by its GPUs."""
    adapter_latency_s: float
    """Latency of a message between nodes."""
    processors: int = 1
    """Number of streaming multiprocessors, which compute one GEMM tile each."""
    host_bytes_per_s: float = inf
    """Rate between a GPU and CPU memory."""
    gpus_per_host: int = 1
    """GPUs that share the CPUs and the memory of a host."""
    attention_ramp_tokens: float = 0.0
    """Tokens by which fused attention's rate rises (`hpgo.hardware.rates.Rates`)."""
    hides_tp: bool = True
    """Whether GEMMs that overlap the communication of tensor parallelism hide a part of it. On Blackwell, published
    steps with this overlap fit best if they hide none."""

    def attention_share(self, tokens: float) -> float:
        """Return the rate of fused attention over `tokens` of a sequence, relative to the rate over 8,192 tokens.

        >>> from hpgo.hardware.cluster import Cluster
        >>> [round(Gpus.of(Cluster.preset("b200:1"), "bf16").attention_share(tokens), 2) for tokens in (8192, 131072)]
        [1.0, 1.23]
        """
        ramp = self.attention_ramp_tokens
        return tokens / (tokens + ramp) * (_RATED_TOKENS + ramp) / _RATED_TOKENS

    @classmethod
    def of(cls, cluster: Cluster, precision: Precision) -> Gpus:
        """Return the GPUs of `cluster`.

        Raises ClusterError if nodes differ, or if the rates of the device are not known in `precision`.

        >>> from hpgo.hardware.cluster import Cluster
        >>> h100 = Gpus.of(Cluster.preset("h100:4"), "bf16")
        >>> h100.count, h100.gpus_per_node, h100.adapter_bytes_per_s
        (32, 8, 50000000000.0)
        """
        first, *others = cluster.nodes
        # `Cluster.first` may cut the last node short, so that one may have fewer GPUs.
        differ = any(one.device != first.device or one.count > first.count for one in others)
        if differ or any(one.count != first.count for one in others[:-1]):
            raise ClusterError(
                f"the nodes of cluster `{shorten(cluster.name)}` differ, but the cost model needs equal GPUs",
                "use a cluster of equal nodes, of which only the last one may have fewer devices; `hpgo llm plan` also"
                " plans for nodes that differ",
            )
        if cluster.gpus_per_device != 1:
            raise ClusterError(
                f"a device of cluster `{shorten(cluster.name)}` is {cluster.gpus_per_device} GPUs, but it must be one",
                "use a cluster with one device per GPU: the search chooses how many GPUs divide a layer",
            )
        # A device with another speed is named after a reference device, whose memory may differ. So its memory size
        # cannot help to tell variants of one card apart.
        memory_bytes = first.device.memory_bytes if first.device.speed == 1 else None
        device = first.device
        rates = device.measured_rates or device.rates or rates_of(device.name, memory_bytes)
        kept = _KEPT[precision]
        if kept not in rates.flop_per_s:
            known = [name for name in ("bf16", "fp16") if _KEPT[name] in rates.flop_per_s]
            raise ClusterError(
                f"`{shorten(first.device.name)}` does not compute in {precision}",
                f"use precision {' or '.join(known)}",
                code="unsupported",
            )
        wide = rates.flop_per_s[kept] * first.device.speed
        reached = rates.reached.get("bf16", USUAL_REACHED)
        # FP8 and FP4 run only in GEMMs, so the 16-bit rates above still apply to everything else.
        peak, best = wide, wide * reached
        if precision in {"fp8", "fp4"}:
            if precision not in rates.narrow_flop_per_s:
                raise ClusterError(
                    f"`{shorten(first.device.name)}` does not compute GEMMs in {precision}", "use precision bf16"
                )
            peak = rates.narrow_flop_per_s[precision] * first.device.speed
            # Few devices were measured in FP4. For the others, the share that FP8 reaches is the nearest measurement.
            best = peak * rates.reached.get(precision, rates.reached.get("fp8", USUAL_REACHED))
        return cls(
            products_flop_per_s=best,
            wide_flop_per_s=wide * reached,
            attention_flop_per_s=wide * rates.reached.get("attention", USUAL_ATTENTION),
            peak_flop_per_s=peak,
            memory_bytes_per_s=rates.bytes_per_s * first.device.speed,
            memory_bytes=first.device.memory_bytes,
            count=cluster.devices,
            gpus_per_node=first.count,
            inside=cluster.intra,
            adapter_bytes_per_s=cluster.inter.collective_bytes_per_s / first.count,
            adapter_latency_s=cluster.inter.latency_s,
            processors=rates.processors,
            host_bytes_per_s=rates.host_bytes_per_s,
            gpus_per_host=gpus_per_host(first.device.name, first.count),
            attention_ramp_tokens=rates.attention_ramp_tokens,
            # A peak in FP4 marks the generation of Blackwell, also in cluster files with rates of their own.
            hides_tp="fp4" not in rates.narrow_flop_per_s,
        )

    def ring(self, ranks: int, stride: int) -> Ring:
        """Return the ring of `ranks` GPUs whose numbers are `stride` apart."""
        # Ranks fill one node after the other, so a node holds every `stride`-th of its GPUs, and at least one.
        together = max(1, min(ranks, self.gpus_per_node // stride))
        latency_s = self.inside.latency_s * (together - 1)
        # Where GPUs have a link to each peer (xGMI), a few of them reach only the links among them.
        rate = min(self.inside.collective_bytes_per_s, max(1, together - 1) * self.inside.bytes_per_s)
        nodes = -(-ranks // together)
        if nodes > 1:
            # Each GPU has its own NIC. NCCL builds one ring through each NIC, so a node uses all of them at once.
            rate = min(rate, together * self.adapter_bytes_per_s)
            # NCCL sends small messages through trees, so latency grows with the logarithm of the number of nodes. For
            # large messages the rate decides, and a ring is no slower.
            latency_s += self.adapter_latency_s * (nodes - 1).bit_length()
        # A ring sends each message from rank to rank. On each of its nodes all links but one stay inside.
        between = nodes if nodes > 1 else 0
        ring_s = self.inside.latency_s * max(0, ranks - max(1, between)) + self.adapter_latency_s * between
        return Ring(ranks, rate, latency_s, nodes, ring_s)


@dataclass(frozen=True, slots=True)
class Ring:
    """GPUs that run a collective together."""

    ranks: int
    bytes_per_s: float
    """Rate of the slowest link of the ring, before efficiencies."""
    latency_s: float
    """Latency of one pass of a collective that may use trees between nodes."""
    nodes: int
    """Number of nodes that hold GPUs of the ring."""
    ring_latency_s: float = 0.0
    """Latency of one pass from rank to rank, as all-gathers and reduce-scatters take it."""

    @property
    def across(self) -> bool:
        """Whether the ring spans several nodes."""
        return self.nodes > 1
