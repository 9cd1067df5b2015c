"""Device records: the rates of one node, measured by `hpgo llm calibrate --node`, in place of a datasheet's.

A record holds what was timed (`gemms`, `attention`, `elementwise`, `collectives`) and the rates and constants that
`hpgo.llm.kernel_fit` derived from these times. An estimate uses only the derived values.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from math import inf
from typing import TYPE_CHECKING

from hpgo.base.checks import check_int, check_text, number
from hpgo.base.documents import Section, hinted, parse, read_text, record, write_text
from hpgo.base.files import as_path
from hpgo.base.messages import printable, safe_repr
from hpgo.base.quoting import in_yaml
from hpgo.base.validated import Record, check_fields
from hpgo.errors import ArgumentError
from hpgo.hardware.rates import Rates
from hpgo.llm.constants import CONSTANTS, KERNELS_ON_H100, Constants

if TYPE_CHECKING:
    import os

    from hpgo.hardware.cluster import Cluster

KEY = "hpgo_device"
"""First key of a file with a device record."""
_VERSION = 1
_FROM_NONE = ("gemm_overhead_s", "collective_overhead_s")
"""Fields that may be 0: the fit finds no overhead."""


@dataclass(frozen=True, slots=True)
class GemmTime(Record):
    """Seconds of a GEMM with `m` × `n` results of `k` terms."""

    precision: str
    m: int
    n: int
    k: int
    seconds: float

    @property
    def flop_per_s(self) -> float:
        """Rate that the GEMM reaches."""
        return 2.0 * self.m * self.n * self.k / self.seconds


@dataclass(frozen=True, slots=True)
class AttentionTime(Record):
    """Seconds of causal attention as one kernel, forward and backward."""

    backend: str
    """`default` is the one that PyTorch chooses."""
    batch: int
    heads: int
    head_dim: int
    seq_length: int
    forward_s: float
    backward_s: float

    @property
    def flop(self) -> float:
        """Operations of the forward pass, without masked scores."""
        return 2.0 * self.batch * self.heads * self.head_dim * self.seq_length**2

    @property
    def flop_per_s(self) -> float:
        """Rate of the forward pass."""
        return self.flop / self.forward_s


@dataclass(frozen=True, slots=True)
class ElementwiseTime(Record):
    """Seconds of an elementwise kernel that reads and writes `moved_bytes` in total."""

    kernel: str
    moved_bytes: float
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        """Memory bandwidth that the kernel reaches."""
        return self.moved_bytes / self.seconds


@dataclass(frozen=True, slots=True)
class CollectiveTime(Record):
    """Seconds of a collective over `gpus` ranks, of which each holds or receives `whole_bytes`."""

    operation: str
    """`all_reduce`, `all_gather`, `reduce_scatter` or `all_to_all`."""
    across: bool
    """Whether the ranks are on several nodes."""
    gpus: int
    whole_bytes: int
    seconds: float

    @property
    def sent_bytes(self) -> float:
        """Bytes that each rank sends in a ring (Patarasuk and Yuan, 2009)."""
        share = (self.gpus - 1) / self.gpus * self.whole_bytes
        return 2 * share if self.operation == "all_reduce" else share

    @property
    def bytes_per_s(self) -> float:
        """Rate of one rank's port: NCCL's bus bandwidth."""
        return self.sent_bytes / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRecord(Record):
    """Rates of one GPU, and of the collectives among the GPUs of its node, as measured.

    `save` and `DeviceRecord.read` keep it in a file. Estimates and searches take it as `platform`.

    >>> record = DeviceRecord(
    ...     device="L40S", source="by hand", nodes=1, gpus_per_node=8, memory_bytes=48e9, processors=142,
    ...     peak_source="datasheet", gemm_peak_flop_per_s=362e12, gemm_flop_per_s=300e12, attention_flop_per_s=190e12,
    ...     hbm_peak_bytes_per_s=864e9, gemm_efficiency=0.9, gemm_overhead_s=0, attention_efficiency=0.9,
    ...     attention_backward_factor=2.9, hbm_efficiency=0.9, kernel_launch_s=7e-6, layer_launch_s=3e-4,
    ...     backward_launch_factor=4,
    ... )
    >>> round(record.rates.reached["bf16"], 2)
    0.83
    """

    device: str
    """Name of the device, as PyTorch reports it."""
    source: str
    """Date, software versions and driver of the measurement."""
    nodes: int
    gpus_per_node: int
    memory_bytes: float
    processors: int
    """Streaming multiprocessors; 1 for a CPU."""
    peak_source: str
    """Source of the peak rates. For an unknown device, they are the best measured rates."""
    gemm_peak_flop_per_s: float
    """Peak rate of GEMMs in 16 bits."""
    gemm_flop_per_s: float
    """Best measured rate of GEMMs in 16 bits, in short bursts as in published tables."""
    fp8_gemm_peak_flop_per_s: float | None = None
    fp8_gemm_flop_per_s: float | None = None
    attention_flop_per_s: float
    """Best measured rate of the forward pass of attention."""
    hbm_peak_bytes_per_s: float
    host_bytes_per_s: float | None = None
    """Rate of copies from CPU memory; None on a CPU."""
    gemm_efficiency: float
    """Share of the best measured rate that GEMMs of a transformer's shapes reach under lasting load, tile by tile."""
    gemm_overhead_s: float
    """Additional seconds of each GEMM in the same fit. Estimates do not use them: launches are not part of them."""
    attention_efficiency: float
    """Share of the best rate of attention that the measured lengths reach on average."""
    attention_backward_factor: float
    """Seconds of the backward pass per second of the forward pass."""
    hbm_efficiency: float
    """Share of the peak memory bandwidth that copies and additions reach."""
    kernel_launch_s: float
    """Seconds in which the CPU launches one kernel."""
    layer_launch_s: float
    """Seconds in which the CPU launches the forward pass of a plain PyTorch layer."""
    backward_launch_factor: float
    intra_bytes_per_s: float | None = None
    """Rate of a GPU's port in collectives inside a node; None for one GPU."""
    inter_bytes_per_s: float | None = None
    """Rate of a GPU's port in collectives over all GPUs of several nodes; None for one node."""
    all_to_all_bytes_per_s: float | None = None
    """Like `inter_bytes_per_s`, but of the all-to-all alone."""
    collective_overhead_s: float | None = None
    """Seconds of a collective of a few bytes, without the hops of its ring."""
    gemms: tuple[GemmTime, ...] = ()
    attention: tuple[AttentionTime, ...] = ()
    elementwise: tuple[ElementwiseTime, ...] = ()
    collectives: tuple[CollectiveTime, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        check_text("the device of a record", self.device)
        for name in ("nodes", "gpus_per_node", "processors"):
            check_int(f"{name} of a device record", getattr(self, name))
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float | int):
                minimum = None if field.name in _FROM_NONE else 0
                number(f"{field.name} of a device record", value, above=minimum)

    @property
    def rates(self) -> Rates:
        """The measured rates in the form of a datasheet's."""
        peak, fp8 = self.gemm_peak_flop_per_s, self.fp8_gemm_peak_flop_per_s
        reached = {"bf16": self.gemm_flop_per_s / peak, "attention": self.attention_flop_per_s / peak}
        if fp8 is not None and self.fp8_gemm_flop_per_s is not None:
            reached["fp8"] = self.fp8_gemm_flop_per_s / fp8
        return Rates(
            {"float16": peak, "bfloat16": peak},
            self.hbm_peak_bytes_per_s,
            self.source,
            self.processors,
            inf if self.host_bytes_per_s is None else self.host_bytes_per_s,
            {} if fp8 is None else {"fp8": fp8},
            reached,
        )

    def on(self, cluster: Cluster) -> Cluster:
        """Return `cluster` with devices that have the measured rates."""
        rates = self.rates
        nodes = tuple(replace(one, device=replace(one.device, measured_rates=rates)) for one in cluster.nodes)
        return replace(cluster, nodes=nodes)

    def constants_on(self, cluster: Cluster) -> Constants:
        """Return the constants of the cost model for `cluster`.

        Constants that were fitted to published steps contain losses that no single kernel shows. So the record scales
        them by its own value over the value that the same program measured on an H100 (`KERNELS_ON_H100`). Bandwidths
        and the overhead of collectives mean the same in both, so the record replaces them.
        """
        scaled = {
            name: getattr(CONSTANTS, name) * getattr(self, name) / reference
            for name, reference in KERNELS_ON_H100.items()
        }
        scaled["hbm_efficiency"] = self.hbm_efficiency
        if self.intra_bytes_per_s is not None:
            scaled["nvlink_efficiency"] = self.intra_bytes_per_s / cluster.intra.collective_bytes_per_s
        for name, rate in (
            ("nic_efficiency", self.inter_bytes_per_s),
            ("all_to_all_nic_efficiency", self.all_to_all_bytes_per_s),
        ):
            if rate is not None:
                scaled[name] = rate / min(cluster.inter.collective_bytes_per_s, cluster.intra.collective_bytes_per_s)
        if self.collective_overhead_s is not None:
            scaled["collective_overhead_s"] = self.collective_overhead_s
        return replace(CONSTANTS, **scaled)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> DeviceRecord:
        """Return the record in a file that `save` wrote. Raise ArgumentError naming file and key."""
        with hinted("`hpgo llm calibrate --node -o node.yaml` writes such a file"):
            found = as_path(path, ArgumentError)
            file = printable(str(found))
            top = Section(parse(read_text(found, ArgumentError), file, ArgumentError), file, ArgumentError)
            version = top.get(KEY, None)
            if version is None:
                top.fail(f"`{KEY}` is missing, so it is no device record", code="wrong_kind_of_file")
            if version != _VERSION:
                top.fail(f"`{KEY}` is {safe_repr(version)}, but this hpgo reads version {_VERSION}")
            return record(cls, top, optional={field.name for field in fields(cls) if field.default in {None, ()}})

    def yaml(self) -> str:
        """Return the text of the record's file: a line for each field, and one for each time. None is left out."""
        lines = [f"{KEY}: {_VERSION}"]
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, tuple):
                rows = [f"  - {in_yaml(_row(one))}" for one in value]
                lines += [f"{field.name}:", *rows] if rows else []
            elif value is not None:
                lines.append(f"{field.name}: {in_yaml(value)}")
        return "\n".join([*lines, ""])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the record to a file. Raise ArgumentError if the file can't be written."""
        write_text(path, self.yaml(), ArgumentError)


def _row(one: object) -> dict[str, object]:
    """Return the fields of a time by name."""
    assert is_dataclass(one)  # noqa: S101 -- all rows are
    return {field.name: getattr(one, field.name) for field in fields(one)}
