"""Comparisons of two estimates term by term, and the neighbors of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, get_args

from hpgo.base.checks import MAX_COUNT, check_int, check_is, choice, number
from hpgo.base.laws import difference
from hpgo.base.messages import did_you_mean, safe_repr, shorten
from hpgo.base.validated import Record, check_fields
from hpgo.errors import ArgumentError
from hpgo.llm.estimate import LlmEstimate
from hpgo.llm.parallelism import (
    MAX_ZERO,
    BaseWeightsDtype,
    CrossEntropyImpl,
    CudaGraphImpl,
    CudaGraphModule,
    LoraModule,
    MainParamsDtype,
    OffloadedModule,
    Optimizer,
    ParallelismConfig,
    PipelineSchedule,
    Precision,
    Recompute,
    RecomputedModule,
    StateDtype,
    TokenDispatcher,
)
from hpgo.llm.step_range import RELATIVE_ERROR

if TYPE_CHECKING:
    from collections.abc import Iterator

NAMES = tuple(field.name for field in fields(ParallelismConfig) if field.name != "dp")
"""Fields that a change may set. `dp` is not among them: it follows from the other degrees."""


@dataclass(frozen=True, slots=True)
class Comparison(Record):
    """Two configurations of one model on the same GPUs with one batch, by time terms and memory columns.

    >>> import hpgo
    >>> one, other = (hpgo.estimate_llm("llama-3-8b", "h100:1", global_batch_size=8, seq_length=4096,
    ... tp=tp) for tp in (2, 8))
    >>> compared = hpgo.compare(one, other)
    >>> compared.longer_s > 0, compared.apart
    (True, True)
    """

    chosen: LlmEstimate
    other: LlmEstimate
    time_by_term_s: tuple[tuple[str, float, float], ...]
    """Key and seconds of each term, of the chosen and of the other configuration. They add up to the step times."""
    memory_bytes: tuple[tuple[str, float, float], ...]
    """Key and bytes of each column, of the fullest GPUs of both configurations."""

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def longer_s(self) -> float:
        """Difference of the step times: negative if the other is shorter, 0 if they differ by rounding only."""
        return difference(self.other.step_s, self.chosen.step_s)

    @property
    def apart(self) -> bool:
        """Whether the step times differ by more than the error of the ratio of two estimates (`RELATIVE_ERROR`)."""
        # Compare with the shorter one, so that the result does not depend on the order of the two.
        low, high = sorted((self.chosen.step_s, self.other.step_s))
        return high > low * (1 + RELATIVE_ERROR)


def compare(chosen: LlmEstimate, other: LlmEstimate) -> Comparison:
    """Return the comparison of two estimates.

    Raises ArgumentError for estimates of different models, GPUs or batches.

    >>> import hpgo
    >>> cluster = hpgo.Cluster.preset("h100:1")
    >>> one, two = (hpgo.estimate_llm("llama-3-8b", cluster, global_batch_size=8, seq_length=8192,
    ... tp=tp) for tp in (2, 4))
    >>> found = compare(one, two)
    >>> abs(sum(there - here for _, here, there in found.time_by_term_s) - found.longer_s) < 1e-9
    True
    """
    for one in (chosen, other):
        check_is("an estimate", one, LlmEstimate, "make one with `hpgo.estimate_llm`")
    for field in ("model", "cluster", "gpus", "seq_length", "global_batch_size"):
        here, there = getattr(chosen, field), getattr(other, field)
        if here != there:
            raise ArgumentError(
                f"{field} is {safe_repr(here)} in one estimate and {safe_repr(there)} in the other",
                f"estimate both with the same {field}",
                code="mismatch",
            )
    return Comparison(
        chosen,
        other,
        _beside(dict(chosen.time_by_term_s), dict(other.time_by_term_s)),
        _beside(*(dict(one.fullest.memory_bytes) for one in (chosen, other))),
    )


def _beside(here: Mapping[str, float], there: Mapping[str, float]) -> tuple[tuple[str, float, float], ...]:
    return tuple((name, here.get(name, 0.0), there.get(name, 0.0)) for name in dict.fromkeys([*here, *there]))


def changed(config: ParallelismConfig, changes: Mapping[str, object]) -> ParallelismConfig:
    """Return `config` with other values, by the names of its fields, and adjust the fields that depend on these.

    Tensor parallelism above 1 keeps sequence parallelism. A single stage is not interleaved, and another number of
    stages runs as 1F1B. Layers of the end ranks and layouts go back to None if the pipeline changes, and the choice of
    layers or modules if recomputation changes.

    Raises ArgumentError for unknown names, and for what `ParallelismConfig` refuses.

    >>> from hpgo.llm.parallelism import ParallelismConfig
    >>> changed(ParallelismConfig(tp=4, sequence_parallel=True, pp=2, vpp=2), {"tp": 1, "pp": 1}).named()
    'micro-batch 1'
    """
    check_is("the changes", changes, Mapping, "give a mapping, like {'tp': 8}")
    for name in changes:
        if name == "dp":
            raise ArgumentError("dp follows from the other degrees and the GPUs", "change those, like `tp=8,pp=2`")
        if name not in NAMES:
            raise ArgumentError(
                f"a configuration has no {safe_repr(name)}", did_you_mean(name if isinstance(name, str) else "", NAMES)
            )
    # Without these adjustments most single changes would be refused: a user who asks for pp=1 does not want to learn
    # that vpp must be 1, too. An explicit value always wins, and `ParallelismConfig` checks the result.
    asked: dict[str, Any] = dict(changes)
    if "tp" in asked and "sequence_parallel" not in asked:
        asked["sequence_parallel"] = asked["tp"] != 1 and (config.sequence_parallel or config.tp == 1)
    if asked.get("pp") == 1 and "vpp" not in asked:
        asked["vpp"] = 1
    if "vpp" in asked and "pp_schedule" not in asked:
        asked["pp_schedule"] = "1f1b"
    if asked.get("pp_schedule", "1f1b") != "1f1b" and "vpp" not in asked and config.vpp == 1:
        asked["vpp"] = 2
    # Layers of the end ranks were chosen for one number of ranks and stages, and rarely divide another.
    if "pp" in asked or "vpp" in asked:
        kept = dict.fromkeys(("first_rank_layers", "last_rank_layers", "pipeline_layout", "micro_batch_group_size"))
        asked = kept | asked
    if asked.get("recompute_modules") and "recompute" not in asked:
        asked["recompute"] = "selective"
    if asked.get("overlap_ep_comm") is False:
        asked = {"delay_wgrad_compute": False} | asked
    if "recompute" in asked:
        asked = {"recompute_num_layers": None, "recompute_every": None, "recompute_modules": ()} | asked
    if asked.get("cuda_graph_impl") in {"none", "full_iteration"}:
        asked = {"cuda_graph_modules": ()} | asked
    if asked.get("lora_rank") == 0:
        asked = {"lora_target_modules": (), "base_weights_dtype": "bf16"} | asked
    if asked.get("optimizer_offload_fraction", 1.0) != 1.0:
        asked = {"offload_params": False} | asked
    return replace(config, **asked)


def read_changes(text: str) -> dict[str, object]:
    """Return the changes that a text like `tp=8,pp=2` asks for.

    Modules have a plus between them, and `none` stands for a number that is left out. Raises ArgumentError for words
    that are no NAME=VALUE, for unknown names, for values that the name never takes, and for a name that is given twice.

    >>> read_changes("tp=8, recompute=full, flash_attention=no")
    {'tp': 8, 'recompute': 'full', 'flash_attention': False}
    >>> read_changes("recompute_modules=mlp+layernorm")
    {'recompute_modules': ('mlp', 'layernorm')}
    """
    found: dict[str, object] = {}
    for word in text.split(","):
        name, equals, value = (part.strip() for part in word.partition("="))
        name = _SHORT.get(name, name).replace("-", "_")
        if not equals or not value:
            raise ArgumentError(f"`{shorten(word)}` is no NAME=VALUE", "write degrees like `tp=8,pp=2`")
        if name not in NAMES:
            raise ArgumentError(f"there is no degree `{shorten(name)}`", did_you_mean(name, NAMES), code="unknown_name")
        if name in found:
            raise ArgumentError(f"`{name}` is given twice", "keep one of them", code="duplicate")
        found[name] = _change(name, value)
    return found


_SHORT = {"mbs": "micro_batch_size", "sp": "sequence_parallel"}
_FLAGS = {"yes": True, "true": True, "no": False, "false": False}
_CHOICES: dict[str, tuple[str, ...]] = {
    "recompute": get_args(Recompute), "precision": get_args(Precision), "pp_schedule": get_args(PipelineSchedule),
    "cuda_graph_impl": get_args(CudaGraphImpl), "exp_avg_dtype": get_args(StateDtype),
    "exp_avg_sq_dtype": get_args(StateDtype), "main_params_dtype": get_args(MainParamsDtype),
    "cross_entropy_fusion_impl": get_args(CrossEntropyImpl),
    "moe_token_dispatcher": get_args(TokenDispatcher), "base_weights_dtype": get_args(BaseWeightsDtype),
    "optimizer": get_args(Optimizer),
}  # fmt: skip
_LISTS = {
    "recompute_modules": get_args(RecomputedModule), "cuda_graph_modules": get_args(CudaGraphModule),
    "offload_modules": get_args(OffloadedModule), "lora_target_modules": get_args(LoraModule),
}  # fmt: skip
"""Fields whose values are joined with `+`."""
_FROM_NONE = ("zero_stage", "cpu_offload_num_layers", "lora_rank")
"""Numbers that may be 0. All others are at least 1."""
_DEFAULTS = {field.name: field.default for field in fields(ParallelismConfig)}


def _change(name: str, text: str) -> object:
    """Return the value of a field. Raise ArgumentError if the field never has such a value."""
    default = _DEFAULTS[name]
    if default is None and text == "none":
        return None
    if name in _CHOICES:
        return choice(name, text, _CHOICES[name])
    if known := _LISTS.get(name):
        return () if text == "none" else tuple(choice("module", one.strip(), known) for one in text.split("+"))
    if name == "pipeline_layout":
        return text
    if isinstance(default, bool) or name == "tp_comm_overlap":
        return _FLAGS[choice(f"value of {name}", text, tuple(_FLAGS))]
    if isinstance(default, float):
        try:
            return number(name, float(text), maximum=1.0)
        except ValueError:
            raise ArgumentError(f"{name} is `{shorten(text)}`", "give a share, from 0 to 1") from None
    # Ten digits are no degree, and int() would accept thousands of digits.
    whole = int(text) if text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS else text
    return check_int(
        name, whole, minimum=0 if name in _FROM_NONE else 1, maximum=MAX_ZERO if name == "zero_stage" else MAX_COUNT
    )


_MAX_DIGITS = 9


def differences(config: ParallelismConfig, other: ParallelismConfig) -> str:
    """Return the degrees in which two configurations differ, with the values of the other.

    >>> from hpgo.llm.parallelism import ParallelismConfig
    >>> differences(ParallelismConfig(tp=4, dp=2, zero_stage=1), ParallelismConfig(tp=2, dp=4, zero_stage=1))
    'tp 2, dp 4'
    """
    words = []
    for field in dict.fromkeys(("tp", "dp", *NAMES)):
        if field == "sequence_parallel":
            continue
        name = "micro-batch" if field == "micro_batch_size" else field
        here, there = getattr(config, field), getattr(other, field)
        if here != there and there is None:
            words += [_NONE[field]] if _is_independent(field, config, other) else []
        elif here != there:
            value = "" if isinstance(there, bool) else f" {'+'.join(there) if isinstance(there, tuple) else there}"
            # Without modules, selective recomputation restores the scores.
            none = "" if there == () else f"{'no ' if there is False else ''}{name}{value}"
            words += [none] if none else []
    if config.sequence_parallel != other.sequence_parallel and (config.tp > 1) == (other.tp > 1):
        words.append("sp" if other.sequence_parallel else "no sp")
    return ", ".join(words)


_NONE = {
    "first_rank_layers": "even first rank",
    "last_rank_layers": "even last rank",
    "pipeline_layout": "no layout",
    "tp_comm_overlap": "TP overlap of the stack",
    "moe_token_dispatcher": "default dispatcher",
    "micro_batch_group_size": "groups of pp micro-batches",
    "recompute_num_layers": "recompute all layers",
    "recompute_every": "recompute every layer",
    "packed_length": "whole sequences",
}
"""Names for fields that are None in the other configuration."""


def _is_independent(field: str, config: ParallelismConfig, other: ParallelismConfig) -> bool:
    """Return whether a change to None is not implied by another pipeline or another kind of recomputation."""
    if field in {"tp_comm_overlap", "packed_length"}:
        return True
    if field in {"recompute_num_layers", "recompute_every"}:
        return other.recompute == "full"
    return (config.pp, config.vpp) == (other.pp, other.vpp)


def neighbours(config: ParallelismConfig) -> Iterator[dict[str, object]]:
    """Yield changes to the neighbors of a configuration: degrees halved and doubled, ZeRO, recomputation, EP overlap.

    Many of them are invalid for a model or a cluster. The caller tries each and drops those that are refused.
    """
    for name in ("tp", "cp", "ep", "pp", "vpp", "micro_batch_size"):
        degree = getattr(config, name)
        if degree % 2 == 0:
            yield {name: degree // 2}
        yield {name: 2 * degree}
    if config.dp_cp_size > 1:
        yield {"zero_stage": 1 - config.zero_stage if config.zero_stage < 2 else config.zero_stage - 1}
    yield {"recompute": "full" if config.recompute == "none" else "none"}
    if config.ep > 1:
        yield {"overlap_ep_comm": not config.overlap_ep_comm}
