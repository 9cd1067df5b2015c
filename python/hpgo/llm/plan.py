"""Plan files of transformers: a configuration with its estimate, the transformer, the cluster and the framework."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hpgo import _core
from hpgo.base.checks import check_is, check_text
from hpgo.base.documents import (
    Section,
    as_kind,
    hinted,
    json_text,
    kind_of_document,
    parse,
    read_text,
    record,
    write_text,
)
from hpgo.base.messages import pluralize, safe_repr, shorten
from hpgo.base.validated import Record, check_fields
from hpgo.errors import ArgumentError
from hpgo.hardware.cluster import Cluster
from hpgo.llm.estimate import LlmEstimate, StageEstimate
from hpgo.llm.frameworks import framework_support
from hpgo.model.families.reading import VERSION_KEY as SHAPE_KEY
from hpgo.model.formats.transformers import VERSION as SHAPE_VERSION
from hpgo.model.formats.transformers import of_document, transformer_of
from hpgo.model.transformer import Transformer
from hpgo.planning.files import LLM_PLAN_FORMAT

if TYPE_CHECKING:
    import os

    from hpgo.programs.frameworks import Framework
    from hpgo.programs.names import LlmFramework

_VERSION = 1
_AGAIN = "make it again: `hpgo llm plan MODEL … -o FILE`"


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmPlan(Record):
    """A parallelism configuration of a transformer for a cluster and a framework, with its estimate.

    `hpgo.export` writes the files that the framework needs. Raises ArgumentError if the fields contradict each other.

    >>> import hpgo
    >>> found = hpgo.plan_llm("llama-3-8b", hpgo.Cluster.preset("h100:1"), global_batch_size=8, seq_length=8192)
    >>> plan = found.plan()
    >>> plan.estimate == found.best, LlmPlan.from_json(plan.to_json()) == plan
    (True, True)
    """

    estimate: LlmEstimate
    transformer: Transformer
    cluster: Cluster
    """The GPUs that the configuration uses, and no others."""
    framework: str = "megatron"
    """Framework and version that run the configuration: `megatron@0.16`."""
    made_with: str = _core.__version__
    """Version of hpgo that wrote the plan."""

    def __post_init__(self) -> None:
        check_fields(self)
        estimate, config = self.estimate, self.estimate.parallelism
        # Store the version even if only a name was given, so that the plan means the same with a later hpgo.
        row, _ = framework_support(self.framework)
        object.__setattr__(self, "framework", f"{row.name}@{row.version}" if row.version else row.name)
        if not config.world_size == estimate.gpus == self.cluster.devices:
            raise ArgumentError(
                f"the degrees need {pluralize(config.world_size, 'GPU')} and the estimate is for {estimate.gpus}, but"
                f" the cluster has {pluralize(self.cluster.devices, 'GPU')}",
                _AGAIN,
                code="mismatch",
            )
        if estimate.model != self.transformer.name or estimate.cluster != self.cluster.name:
            raise ArgumentError(
                f"the estimate is for `{shorten(estimate.model)}` on `{shorten(estimate.cluster)}`, but the plan is for"
                f" `{shorten(self.transformer.name)}` on `{shorten(self.cluster.name)}`",
                _AGAIN,
                code="mismatch",
            )
        # A stage without layers, such as one with the LM head alone, has an empty range that may start anywhere.
        parts = sorted(part for rank in estimate.stages for part in rank.layers if part[0] != part[1])
        alike = len(estimate.stages) == config.pp and {len(rank.layers) for rank in estimate.stages} == {config.vpp}
        ends = [0, *(end for _, end in parts)]
        if not alike or [*(begin for begin, _ in parts), self.transformer.layers] != ends or ends != sorted(ends):
            raise ArgumentError(
                f"the stages of {config.pp} ranks must hold each of {pluralize(self.transformer.layers, 'layer')}"
                " exactly once, but do not",
                _AGAIN,
            )

    @property
    def row(self) -> Framework:
        """The row of the framework in the table of frameworks."""
        return framework_support(self.framework)[0]

    @property
    def layer_counts(self) -> tuple[int, ...]:
        """Number of layers of each stage, in the order of the layers.

        >>> import hpgo
        >>> cluster, ask = hpgo.Cluster.preset("h100:1"), {"global_batch_size": 8, "seq_length": 8192}
        >>> one = hpgo.estimate_llm("llama-3-8b", cluster, pp=4, vpp=2, tp=2, **ask)
        >>> LlmPlan.of(one, "llama-3-8b", cluster).layer_counts
        (4, 4, 4, 4, 4, 4, 4, 4)
        """
        ranges = sorted(part for rank in self.estimate.stages for part in rank.layers)
        return tuple(end - begin for begin, end in ranges)

    @classmethod
    def of(
        cls,
        estimate: LlmEstimate,
        transformer: Transformer | str | os.PathLike[str],
        cluster: Cluster,
        *,
        framework: LlmFramework = "megatron",
    ) -> LlmPlan:
        """Return the plan of an estimate. Raise ArgumentError if the estimate is of another transformer or cluster."""
        check_is("estimate", estimate, LlmEstimate, "make one with `hpgo.estimate_llm`")
        check_is("cluster", cluster, Cluster, "make one with `hpgo.Cluster.read`")
        part = cluster.first(estimate.gpus) if estimate.gpus <= cluster.devices else cluster
        return cls(estimate=estimate, transformer=transformer_of(transformer), cluster=part, framework=framework)

    def to_json(self) -> str:
        """Return the plan as JSON, described in `docs/llm-plan.schema.json`; `LlmPlan.from_json` reads it."""
        return json_text(
            {
                "format": LLM_PLAN_FORMAT,
                "version": _VERSION,
                "made_with": self.made_with,
                "framework": self.framework,
                "estimate": facts(self.estimate),
                "transformer": {SHAPE_KEY: SHAPE_VERSION} | asdict(self.transformer),
                "cluster": self.cluster.document(),
            }
        )

    @classmethod
    def from_json(cls, text: str, *, source: str = "the plan") -> LlmPlan:
        """Return the plan that `to_json` wrote. Raise ArgumentError that names `source` and the fault."""
        with hinted(_AGAIN), as_kind(ArgumentError):
            check_text("the source of a plan", source)
            document = parse(check_text(source, text), source, ArgumentError)
            top = Section(document, source, ArgumentError)
            if top.get("format", None) != LLM_PLAN_FORMAT:
                kind = kind_of_document(document)
                hint = f"to evaluate it, run `hpgo evaluate {shorten(source)}`" if kind == "a plan" else ""
                top.fail("is not a plan of a transformer" + (f", but {kind}" if kind else ""), hint)
            # True == 1 in Python, but `true` is no version.
            version = top.get("version")
            if isinstance(version, bool) or version != _VERSION:
                top.fail(f"is of version {safe_repr(version)}, not {_VERSION}")
            known = {
                "estimate": _read_estimate(top.within("estimate")),
                "transformer": of_document(top.get("transformer"), file=f"{source}, transformer"),
                "cluster": Cluster.from_document(top.get("cluster"), file=f"{source}, cluster"),
            }
            return record(cls, top, known=known)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON. Raise ArgumentError if the file can't be written."""
        write_text(path, self.to_json() + "\n", ArgumentError)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> LlmPlan:
        """Read a plan that `save` wrote. Raise ArgumentError naming the file."""
        return cls.from_json(read_text(path, ArgumentError), source=str(path))


def facts(estimate: LlmEstimate) -> dict[str, Any]:
    """Return all fields of an estimate for JSON, with terms and columns as mappings."""
    # In the record they are tuples of pairs, so that estimates are immutable and keep their order.
    held = asdict(estimate)
    held["time_by_term_s"] = dict(estimate.time_by_term_s)
    for kept, stage in zip(held["stages"], estimate.stages, strict=True):
        kept["memory_bytes"] = dict(stage.memory_bytes)
    return held


def _read_estimate(section: Section) -> LlmEstimate:
    rows = section.rows("stages")
    stages = [
        record(StageEstimate, part, known={"memory_bytes": _amounts(part, "memory_bytes")})
        for part in (rows.within(row) for row in rows)
    ]
    return record(
        LlmEstimate, section, known={"time_by_term_s": _amounts(section, "time_by_term_s"), "stages": tuple(stages)}
    )


def _amounts(section: Section, key: str) -> tuple[tuple[str, float], ...]:
    named = section.within(key)
    return tuple((name, named.amount(name)) for name in named)
