"""Chain plans: who takes which layers of a row of uneven hosts, what that costs, and how good it is."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from hpgo.base.checks import check_int, check_is, check_text
from hpgo.base.documents import Section, hinted, parse, read_text, record, write_text
from hpgo.base.messages import brief, pluralize, shorten
from hpgo.base.presentation import present
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
"""What a plan is the best at."""

_VERSION = 2
_AGAIN = "make it again: `hpgo partition … --json`"
_DERIVED = ("samples_per_s", "gap", "limit", "throughput", "bottleneck")
_DERIVED_OF_STAGES = ("utilization", "slack_s")


@dataclass(frozen=True, slots=True)
class ChainStage(Record):
    """Consecutive layers on one host, or on several of one type that take turns. Times are for one batch.

    >>> import hpgo
    >>> toy = hpgo.Profile.chain("toy", batch_size=1, forward_s=[1, 2], backward_s=[0, 0],
    ...                          activation_bytes=[8, 8], parameter_bytes=[4, 4])
    >>> pair = hpgo.Cluster.of(nodes=2, devices_per_node=1, intra_gbit_s=1, inter_gbit_s=1)
    >>> last = hpgo.partition(toy, pair).stages[-1]
    >>> last.hosts, last.first, last.compute_s
    (('machine1',), 2, 2.0)
    """

    hosts: tuple[str, ...]
    device_type: str
    first: int
    """Number of the first layer, from 1."""
    last: int
    """Number of the last layer, inclusive."""
    compute_s: float
    """On one of the hosts."""
    interval_s: float
    """Time between batches that the stage keeps up: compute over hosts."""
    memory_bytes: float
    """Layers and buffers, on each host."""
    host_memory_bytes: float
    """What the host has; it must be more."""
    layers: tuple[str, ...] = ()
    """Ids of the layers, in the order in which they run, if the model branches. Empty for a chain.

    `first` and `last` count the layers of a branching model in the order of the plan.
    """


@dataclass(frozen=True, slots=True)
class ChainHop(Record):
    """What moves into the first stage, between two stages, or out of the last. Times are for one batch.

    >>> import hpgo
    >>> toy = hpgo.Profile.chain("toy", batch_size=1, forward_s=[1, 2], backward_s=[0, 0],
    ...                          activation_bytes=[8, 8], parameter_bytes=[4, 4])
    >>> pair = hpgo.Cluster.of(nodes=2, devices_per_node=1, intra_gbit_s=1, inter_gbit_s=1)
    >>> hpgo.partition(toy, pair).hops[1].bytes  # from the first stage to the second
    8.0
    """

    bits: int
    """Of each value."""
    bytes: float
    seconds: float
    interval_s: float
    """Time between batches that the hop keeps up: stages of several hosts have as many ports."""


@dataclass(frozen=True, slots=True)
class ChainPlan(Record):
    """Who takes which layers, what that costs, and how good it is.

    A model of no layers has no stages.
    """

    model: str
    batch_size: int
    objective: Objective
    stages: tuple[ChainStage, ...]
    hops: tuple[ChainHop, ...]
    """One more than stages: into the first, between neighbours, out of the last."""
    interval_s: float
    """Time between batches: the longest of all stages and hops."""
    latency_s: float
    """Time of one batch through the empty pipeline."""
    value: float
    """What the objective counts: interval or latency in seconds, hosts, bits lost."""
    lower_bound: float
    """No plan has a smaller value, wherever the model is cut."""
    units: str
    """What the files' `MB` and `Mbps` were taken for: `pipeedge` (2²⁰) or `si` (10⁶)."""
    unused: tuple[str, ...] = ()
    """Hosts without a stage."""
    loading_s: float = 0.0
    """Time of layers that load data, for one batch, which is left out: loaders work ahead."""
    remarks: tuple[str, ...] = ()
    """What a reader of the files should know: skipped types, repeated blocks."""
    framework: str = ""
    """What it was planned for: `vllm`; empty if anybody may run it."""
    blocks: tuple[int, ...] = ()
    """Blocks of each stage, if it was planned for a framework that counts them."""
    gpus_per_device: int = 1
    """GPUs that a host stands for."""
    cuts: str = "all"
    """Which cuts were searched: all, or why only some."""
    searched_cuts_bound: float | None = None
    """No plan with the cuts that were searched has a smaller value, if they are not all."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not all(stage.hosts for stage in self.stages) or not self.batch_size or not self.gpus_per_device:
            raise ArgumentError("a stage has no hosts, or there are no samples or GPUs", _AGAIN)
        if len(self.hops) > len(self.stages) + 1:
            raise ArgumentError(
                f"{len(self.hops)} hops are too many for {len(self.stages)} stages", _AGAIN, code="too_large"
            )
        if self.blocks and (len(self.blocks) != len(self.stages) or min(self.blocks) < 1):
            raise ArgumentError("`blocks` must be a number from 1 for each stage", _AGAIN)

    @property
    def samples_per_s(self) -> float:
        """Throughput."""
        return self.batch_size / self.interval_s if self.interval_s else float("inf")

    @property
    def gap(self) -> float:
        """At most this share is the value above the best possible; 0 is proven optimal."""
        if self.value <= self.lower_bound * (1 + 1e-8):
            return 0.0
        return self.value / self.lower_bound - 1 if self.lower_bound else float("inf")

    @property
    def limit(self) -> str:
        """The stage or hop that sets the interval, in words.

        >>> import hpgo
        >>> toy = hpgo.Profile.chain("toy", batch_size=1, forward_s=[1, 2], backward_s=[0, 0],
        ...                          activation_bytes=[8, 8], parameter_bytes=[4, 4])
        >>> pair = hpgo.Cluster.of(nodes=2, devices_per_node=1, intra_gbit_s=1, inter_gbit_s=1)
        >>> hpgo.partition(toy, pair).limit
        'stage 2 (machine1)'
        """
        for number, stage in enumerate(self.stages, 1):
            if stage.interval_s == self.interval_s:
                return f"stage {number} ({', '.join(stage.hosts)})"
        for number, hop in enumerate(self.hops):
            if hop.interval_s == self.interval_s:
                return f"the transfer {self._where(number)}"
        return "nothing: the model has no layers"

    def utilization(self, stage: ChainStage) -> float:
        """Share of the time that the stage's hosts compute, from 0 to 1."""
        check_is("the stage", stage, ChainStage, "give one of the plan's stages")
        return stage.interval_s / self.interval_s if self.interval_s else 0.0

    def slack_s(self, part: ChainStage | ChainHop) -> float:
        """How much longer the stage or hop could take between batches before the plan slows down."""
        check_is("the part", part, ChainStage | ChainHop, "give one of the plan's stages or hops")
        slack_s = self.interval_s - part.interval_s
        return slack_s if slack_s > 1e-9 * self.interval_s else 0.0  # below that it is rounding

    def pipeedge(self) -> str:
        """The schedule as PipeEdge's runtime reads it: `- host: [first, last]`, in stage order.

        Of a branching model, which that runtime doesn't run, `- host: {layers: [id, …]}`.
        Raises ArgumentError if hosts share a stage, which PipeEdge has no words for.
        """
        for number, stage in enumerate(self.stages, 1):
            if len(stage.hosts) > 1:
                raise ArgumentError(
                    f"stage {number} runs on {len(stage.hosts)} hosts, which PipeEdge's schedule can't say",
                    "leave `max_replicas` at 1, or take `--json`",
                    code="unsupported",
                )
        lines = [f"- {in_yaml(stage.hosts[0])}: {_range(stage)}\n" for stage in self.stages]
        searched = "" if self.cuts == "all" else f"# cuts searched: {self.cuts}\n"
        return searched + ("".join(lines) or "[]\n")

    def program(self, *, batches: int) -> Program:
        """Forward passes of so many batches through the stages, one after the other; device d is the d-th host used.

        Hosts that share a stage take turns batch by batch: each way that batches take is a chain of the program.
        Raises ArgumentError for a model of no layers.

        >>> import hpgo
        >>> toy = hpgo.Profile.chain("toy", batch_size=1, forward_s=[1, 2], backward_s=[0, 0],
        ...                          activation_bytes=[8, 8], parameter_bytes=[4, 4])
        >>> pair = hpgo.Cluster.of(nodes=2, devices_per_node=1, intra_gbit_s=1, inter_gbit_s=1)
        >>> hpgo.partition(toy, pair).program(batches=3).for_rank(1).stages[0].layers
        ('2',)
        """
        if not self.stages:
            raise ArgumentError("the model has no layers, so nothing runs", "partition a model with layers")
        counts = [len(stage.hosts) for stage in self.stages]
        batches = check_int("batches", batches)
        routes = routes_through(counts, batches)
        orders = along(routes, batches)
        layers = [stage.layers or tuple(map(str, range(stage.first, stage.last + 1))) for stage in self.stages]
        hops = self.hops[1:-1]
        # A hop keeps up as many batches at once as there are ports on its narrower side.
        busy_s = [hop.interval_s * min(pair) for hop, pair in zip(hops, pairwise(counts), strict=False)]
        boundary_tensors = [[BoundaryTensor(ids[-1], hop.bytes)] for ids, hop in zip(layers, hops, strict=False)]
        return program(
            orders,
            [(ids, [host]) for route in routes for ids, host in zip(layers, route, strict=True)],
            micro_batch_size=self.batch_size,
            global_batch_size=self.batch_size * orders.total_micro_batches,
            nodes=(1,) * sum(counts),
            boundary_tensors=[*boundary_tensors, []] * len(routes),
            costs=Costs(
                forward_s=tuple(stage.compute_s for stage in self.stages),
                transfer_s=tuple(busy_s),
                latency_s=tuple(max(0.0, hop.seconds - one_s) for hop, one_s in zip(hops, busy_s, strict=False)),
            ),
        )

    def to_json(self) -> str:
        """Everything, for machines; `ChainPlan.from_json` reads it back."""
        facts = (
            {"format": "hpgo.chain", "version": _VERSION}
            | asdict(self)
            | {
                "samples_per_s": self.samples_per_s,
                "gap": self.gap,
                "limit": self.limit,
                "throughput": self.samples_per_s,  # as it was called, and the next; they go with the next version
                "bottleneck": self.limit,
            }
        )
        facts["stages"] = [
            asdict(stage) | {"utilization": self.utilization(stage), "slack_s": self.slack_s(stage)}
            for stage in self.stages
        ]
        # JSON has no infinity: an interval of 0 or a bound of 0 makes one.
        known = {key: None if value == float("inf") else value for key, value in facts.items()}
        return json.dumps(known, indent=2, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str, *, source: str = "the plan") -> ChainPlan:
        """Reads what `to_json` wrote. Raises ArgumentError that names `source` and what is wrong with it.

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
        """Writes the plan as JSON. Raises ArgumentError if the file can't be written."""
        write_text(path, self.to_json() + "\n", ArgumentError)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> ChainPlan:
        """Reads a plan that `save` wrote. Raises ArgumentError naming the file."""
        return cls.from_json(read_text(path, ArgumentError), source=str(path))

    def to_frame(self) -> Any:
        """A row a stage, as a frame of polars or pandas, with what it sends on.

        Of the library that is imported already, or else of the one that is installed; HpgoError if neither is.
        """
        return present("frame", self)

    def _repr_html_(self) -> str:
        html: str = present("html", self)
        return html

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
