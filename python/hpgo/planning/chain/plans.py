"""Chain plans: the layers of each host, times of stages and transfers, and the proven bound."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import ceil
from typing import TYPE_CHECKING, Literal

from hpgo.base.checks import check_int, check_is, check_text
from hpgo.base.documents import Section, hinted, parse, read_text, record, write_text
from hpgo.base.messages import brief, pluralize, shorten
from hpgo.base.presentation import Presented
from hpgo.base.quoting import in_yaml
from hpgo.base.units import format_seconds
from hpgo.base.validated import Record, check_fields
from hpgo.errors import ArgumentError
from hpgo.planning.laws import check_chain_file
from hpgo.programs.costs import Costs
from hpgo.programs.host_rotation import along, routes_through
from hpgo.programs.program import program
from hpgo.programs.stages import BoundaryTensor

if TYPE_CHECKING:
    import os

    from hpgo.programs.program import Program

Objective = Literal["throughput", "latency", "hosts", "bits"]
"""Goal of the search."""

_VERSION = 2
_AGAIN = "make it again: `hpgo partition … --json`"
_DERIVED = ("samples_per_s", "optimality_gap", "limit", "throughput", "bottleneck")
_DERIVED_OF_STAGES = ("utilization", "slack_s")


@dataclass(frozen=True, slots=True)
class ChainStage(Record):
    """Consecutive layers on one host, or on several hosts of one type in turns. Times are for one batch.

    >>> import hpgo
    >>> toy = hpgo.Profile.chain("toy", batch_size=1, forward_s=[1, 2], backward_s=[0, 0],
    ...                          activation_bytes=[8, 8], parameter_bytes=[4, 4])
    >>> pair = hpgo.Cluster.of(nodes=2, devices_per_node=1, intra_gbit_s=1, inter_gbit_s=1)
    >>> last = hpgo.partition(toy, pair).stages[-1]
    >>> last.hosts, last.first, last.compute_s
    (('node1',), 2, 2.0)
    """

    hosts: tuple[str, ...]
    device_type: str
    first: int
    """Number of the first layer, from 1."""
    last: int
    """Number of the last layer, inclusive."""
    compute_s: float
    """Time of a batch on one of the hosts, in seconds."""
    interval_s: float
    """Shortest time between batches that the stage sustains: `compute_s` divided by the number of hosts."""
    memory_bytes: float
    """Memory for layers and buffers on each host, in bytes."""
    host_memory_bytes: float
    """Memory of the host in bytes, which must be larger."""
    layers: tuple[str, ...] = ()
    """Ids of the layers in the order in which they run, if the model branches; empty for a chain.

    `first` and `last` count the layers of a branching model in the order of the plan.
    """
    kv_cache_bytes: float = 0.0
    """Bytes of the KV cache within `memory_bytes`."""


@dataclass(frozen=True, slots=True)
class ChainHop(Record):
    """A transfer into the first stage, between two stages, or out of the last stage. Times are for one batch.

    >>> import hpgo
    >>> toy = hpgo.Profile.chain("toy", batch_size=1, forward_s=[1, 2], backward_s=[0, 0],
    ...                          activation_bytes=[8, 8], parameter_bytes=[4, 4])
    >>> pair = hpgo.Cluster.of(nodes=2, devices_per_node=1, intra_gbit_s=1, inter_gbit_s=1)
    >>> hpgo.partition(toy, pair).hops[1].bytes  # from the first stage to the second
    8.0
    """

    bits: int
    """Bits of each value."""
    bytes: float
    seconds: float
    interval_s: float
    """Shortest time between batches that the transfer sustains. A stage on several hosts uses all their ports."""


@dataclass(frozen=True, slots=True)
class ChainPlan(Presented, Record):
    """A partition of a model over hosts, with its times and its proven bound.

    A model without layers has no stages.
    """

    model: str
    batch_size: int
    objective: Objective
    stages: tuple[ChainStage, ...]
    hops: tuple[ChainHop, ...]
    """Transfers: into the first stage, between adjacent stages, and out of the last. One more than stages."""
    interval_s: float
    """Time between batches: the longest of all stages and hops."""
    latency_s: float
    """Time of one batch through the empty pipeline."""
    value: float
    """Value of the objective: interval or latency in seconds, number of hosts, or removed bits."""
    lower_bound: float
    """Lower bound on the value of all plans, regardless of cuts."""
    units: str
    """Size of `MB` and `Mbps` in the files: `pipeedge` (2²⁰) or `si` (10⁶)."""
    unused: tuple[str, ...] = ()
    """Hosts without a stage."""
    loading_s: float = 0.0
    """Time of layers that load one batch, which is not included, because loaders work ahead."""
    remarks: tuple[str, ...] = ()
    """Warnings about the files, such as skipped types and repeated blocks."""
    framework: str = ""
    """Framework that the plan is for, such as `vllm`; empty for none."""
    blocks: tuple[int, ...] = ()
    """Number of blocks of each stage, if the plan is for a framework; otherwise empty."""
    gpus_per_device: int = 1
    """Number of GPUs that a host stands for."""
    kv_context_length: int = 0
    """Tokens of each sequence in the KV cache; 0 without a cache."""
    kv_sequences: int = 0
    """Number of sequences in the KV cache."""
    cuts: str = "all"
    """Cuts that were searched: `all`, or the reason for which only some were."""
    searched_cuts_bound: float | None = None
    """Lower bound on the value of plans with the searched cuts; None if all cuts were searched."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not all(stage.hosts for stage in self.stages) or not self.batch_size or not self.gpus_per_device:
            raise ArgumentError("a stage has no hosts, or the plan has no samples or GPUs", _AGAIN)
        if len(self.hops) > len(self.stages) + 1:
            raise ArgumentError(
                f"`hops` has {len(self.hops)} entries, but a plan of {len(self.stages)} stages has fewer",
                _AGAIN,
                code="too_large",
            )
        if any(stage.kv_cache_bytes for stage in self.stages) and not self.kv_sequences:
            raise ArgumentError("a stage has a KV cache, but the plan has no sequences", _AGAIN)
        if self.blocks and (len(self.blocks) != len(self.stages) or min(self.blocks) < 1):
            raise ArgumentError("`blocks` must have a positive number for each stage", _AGAIN)

    @property
    def samples_per_s(self) -> float:
        """Throughput in samples/s; infinite if the interval is 0."""
        return self.batch_size / self.interval_s if self.interval_s else float("inf")

    @property
    def optimality_gap(self) -> float:
        """Share by which the value exceeds the lower bound; 0 proves the plan optimal."""
        # A relative difference of 1e-8 is rounding, not a gap.
        if self.value <= self.lower_bound * (1 + 1e-8):
            return 0.0
        return self.value / self.lower_bound - 1 if self.lower_bound else float("inf")

    @property
    def limit(self) -> str:
        """Name of the stage or transfer that sets the interval.

        >>> import hpgo
        >>> toy = hpgo.Profile.chain("toy", batch_size=1, forward_s=[1, 2], backward_s=[0, 0],
        ...                          activation_bytes=[8, 8], parameter_bytes=[4, 4])
        >>> pair = hpgo.Cluster.of(nodes=2, devices_per_node=1, intra_gbit_s=1, inter_gbit_s=1)
        >>> hpgo.partition(toy, pair).limit
        'stage 2 (node1)'
        """
        for number, stage in enumerate(self.stages, 1):
            if stage.interval_s == self.interval_s:
                return f"stage {number} ({', '.join(stage.hosts)})"
        for number, hop in enumerate(self.hops):
            if hop.interval_s == self.interval_s:
                return f"the transfer {self._where(number)}"
        return "nothing: the model has no layers"

    def max_sequences(self, stage: ChainStage) -> float:
        """Return the number of sequences whose KV cache fits on a host of the stage; infinite if it has no cache.

        The smallest number of all stages is that of the plan, because a sequence needs a cache in each stage.
        """
        check_is("the stage", stage, ChainStage, "give one of the plan's stages")
        if not stage.kv_cache_bytes:
            return float("inf")
        each_bytes = stage.kv_cache_bytes / self.kv_sequences
        free_bytes = stage.host_memory_bytes - (stage.memory_bytes - stage.kv_cache_bytes)
        # A host's memory must exceed the need, so an exact fit is one sequence too many.
        return max(self.kv_sequences, ceil(free_bytes / each_bytes) - 1)

    def utilization(self, stage: ChainStage) -> float:
        """Return the share of time in which the hosts of the stage compute, from 0 to 1."""
        check_is("the stage", stage, ChainStage, "give one of the plan's stages")
        return stage.interval_s / self.interval_s if self.interval_s else 0.0

    def slack_s(self, part: ChainStage | ChainHop) -> float:
        """Return by how many seconds the interval of a stage or transfer can grow before the plan slows down."""
        check_is("the part", part, ChainStage | ChainHop, "give one of the plan's stages or hops")
        slack_s = self.interval_s - part.interval_s
        return slack_s if slack_s > 1e-9 * self.interval_s else 0.0  # A smaller slack is only rounding.

    def pipeedge(self) -> str:
        """Return the plan in the YAML format of PipeEdge's runtime: `- host: [first, last]`, in the order of stages.

        A branching model, which that runtime does not run, has lines `- host: {layers: [id, …]}`. Raises ArgumentError
        if several hosts share a stage, because the format can't express it.
        """
        for number, stage in enumerate(self.stages, 1):
            if len(stage.hosts) > 1:
                raise ArgumentError(
                    f"stage {number} runs on {len(stage.hosts)} hosts, but PipeEdge's format has one host per stage",
                    "leave `max_replicas` at 1, or use `--json`",
                    code="unsupported",
                )
        lines = [f"- {in_yaml(stage.hosts[0])}: {_range(stage)}\n" for stage in self.stages]
        searched = "" if self.cuts == "all" else f"# cuts searched: {self.cuts}\n"
        return searched + ("".join(lines) or "[]\n")

    def program(self, *, batches: int) -> Program:
        """Return a program with the forward passes of `batches` batches, where device d is the d-th host of the plan.

        Hosts that share a stage take turns batch by batch. Each route of batches through the hosts is a pipeline
        replica of the program. Raises ArgumentError for a model without layers.

        >>> import hpgo
        >>> toy = hpgo.Profile.chain("toy", batch_size=1, forward_s=[1, 2], backward_s=[0, 0],
        ...                          activation_bytes=[8, 8], parameter_bytes=[4, 4])
        >>> pair = hpgo.Cluster.of(nodes=2, devices_per_node=1, intra_gbit_s=1, inter_gbit_s=1)
        >>> hpgo.partition(toy, pair).program(batches=3).for_rank(1).stages[0].layers
        ('2',)
        """
        if not self.stages:
            raise ArgumentError("the model has no layers, so there is nothing to run", "partition a model with layers")
        counts = [len(stage.hosts) for stage in self.stages]
        batches = check_int("batches", batches)
        # Hosts that share a stage take batches in turns, so a batch passes one of several routes.
        routes = routes_through(counts, batches)
        schedule = along(routes, batches)
        layers = [stage.layers or tuple(map(str, range(stage.first, stage.last + 1))) for stage in self.stages]
        hops = self.hops[1:-1]
        # A transfer carries several batches at once: one per port of the side with fewer hosts.
        busy_s = [hop.interval_s * min(pair) for hop, pair in zip(hops, pairwise(counts), strict=False)]
        boundary_tensors = [[BoundaryTensor(ids[-1], hop.bytes)] for ids, hop in zip(layers, hops, strict=False)]
        return program(
            schedule,
            [(ids, [host]) for route in routes for ids, host in zip(layers, route, strict=True)],
            pipeline_micro_batch_size=self.batch_size,
            global_batch_size=self.batch_size * schedule.total_micro_batches,
            nodes=(1,) * sum(counts),
            boundary_tensors=[*boundary_tensors, []] * len(routes),
            costs=Costs(
                forward_s=tuple(stage.compute_s for stage in self.stages),
                transfer_s=tuple(busy_s),
                # The rest of a transfer beyond the busy time of its link is latency.
                latency_s=tuple(max(0.0, hop.seconds - one_s) for hop, one_s in zip(hops, busy_s, strict=False)),
            ),
        )

    def to_json(self) -> str:
        """Return the plan with all derived values as JSON. `ChainPlan.from_json` reads it back."""
        facts = (
            {"format": "hpgo.chain", "version": _VERSION}
            | asdict(self)
            | {
                "samples_per_s": self.samples_per_s,
                "optimality_gap": self.optimality_gap,
                "limit": self.limit,
                # Deprecated keys, which the next version removes.
                "throughput": self.samples_per_s,
                "bottleneck": self.limit,
            }
        )
        facts["stages"] = [
            asdict(stage) | {"utilization": self.utilization(stage), "slack_s": self.slack_s(stage)}
            for stage in self.stages
        ]
        # JSON has no infinity, which an interval or a bound of 0 leads to.
        known = {key: None if value == float("inf") else value for key, value in facts.items()}
        return json.dumps(known, indent=2, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str, *, source: str = "the plan") -> ChainPlan:
        """Read the JSON of `to_json`. Raises ArgumentError with the name `source` for invalid text.

        >>> import hpgo
        >>> pair = hpgo.Cluster.of(nodes=2, devices_per_node=1, intra_gbit_s=1, inter_gbit_s=1, memory="80 GB")
        >>> plan = hpgo.partition(hpgo.read_profile("bert-48"), pair)
        >>> ChainPlan.from_json(plan.to_json()) == plan
        True
        """
        with hinted(_AGAIN):
            check_text("the source of a plan", source)
            document = parse(check_text(source, text), source, ArgumentError)
            top = Section(document, source, ArgumentError)
            if top.get("format", None) != "hpgo.chain" or top.get("version", None) != _VERSION:
                top.fail(f"is not a plan of `hpgo partition` of version {_VERSION}", code="wrong_kind_of_file")
            # Derived values are in the file for other programs. The reader computes them again.
            for key in _DERIVED:
                top.get(key, None)
            rows = top.items("stages")
            stages = [{key: row[key] for key in row if key not in _DERIVED_OF_STAGES} if isinstance(row, dict) else row
                      for row in rows]  # fmt: skip
            kept = Section({"stages": stages}, source, ArgumentError).rows("stages")
            plan = record(cls, top, known={"stages": tuple(record(ChainStage, kept.within(row)) for row in kept)})
            check_chain_file(plan, source)
            return plan

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON. Raises ArgumentError if the file can't be written."""
        write_text(path, self.to_json() + "\n", ArgumentError)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> ChainPlan:
        """Read a file of `save`. Raises ArgumentError with the name of the file if it is missing or invalid."""
        return cls.from_json(read_text(path, ArgumentError), source=str(path))

    def __repr__(self) -> str:
        pace = f"a batch of {self.batch_size} every {format_seconds(self.interval_s)}"
        return brief("ChainPlan", f"{shorten(self.model)}: {pluralize(len(self.stages), 'stage')}, {pace}")

    def _where(self, number: int) -> str:
        if number == 0:
            return "of the input"
        if number == len(self.stages):
            return "of the result"
        return f"from stage {number} to stage {number + 1}"


def _range(stage: ChainStage) -> str:
    if not stage.layers:
        return f"[{stage.first}, {stage.last}]"
    return f"{{layers: [{', '.join(map(in_yaml, stage.layers))}]}}"
