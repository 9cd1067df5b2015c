"""The search space: all configurations that a framework runs, restricted by fixed and excluded values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, get_args

from hpgo.base.checks import check_int, check_list, number
from hpgo.base.divisors import divisors
from hpgo.base.messages import did_you_mean, join_words, safe_repr, shorten
from hpgo.errors import ArgumentError
from hpgo.llm.frameworks import frameworks_for
from hpgo.llm.parallelism import (
    MAX_ZERO,
    BaseWeightsDtype,
    CudaGraphImpl,
    CudaGraphModule,
    DegreeError,
    LoraModule,
    MainParamsDtype,
    OffloadedModule,
    Optimizer,
    ParallelismConfig,
    RecomputedModule,
    StateDtype,
    TokenDispatcher,
    check_batch,
    check_degrees,
    ends_of,
    nearest,
)
from hpgo.llm.refused_settings import check_setting

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from hpgo.llm.frameworks import FrameworkSupport
    from hpgo.llm.gpus import Gpus
    from hpgo.llm.parallelism import Precision
    from hpgo.model.transformer import Transformer

Value = int | float | str | bool | tuple[str, ...]
_ALONE: dict[str, Value] = {
    "tp": 1, "cp": 1, "ep": 1, "pp": 1, "vpp": 1, "pp_schedule": "1f1b", "dp": 1, "zero_stage": 0, "recompute": "none",
}  # fmt: skip
"""Arguments of `hpgo.estimate_llm` that may be fixed or excluded, with the value that switches each off."""
_SIZE, _GROUPS = "micro_batch_size", "dp_replicate"
_SETTINGS: dict[str, Value | None] = {
    "tp_comm_overlap": None,
    "recompute_modules": (), "cuda_graph_impl": "none", "cuda_graph_modules": (), "grad_reduce_in_bf16": False,
    "exp_avg_dtype": "fp32", "exp_avg_sq_dtype": "fp32", "main_params_dtype": "fp32",
    "etp": 1, "moe_token_dispatcher": None, "overlap_ep_comm": False, "delay_wgrad_compute": False,
    "micro_batch_group_size": None, "offload_modules": (),
    "lora_rank": 0, "lora_target_modules": (), "base_weights_dtype": "bf16", "optimizer": "adam",
    "optimizer_offload_fraction": 0.0, "offload_params": False, "packed_length": None,
}  # fmt: skip
"""Further arguments of `hpgo.estimate_llm` that may be fixed for all configurations, with their defaults. Of them, the
search varies CUDA graphs, modules to recompute, `overlap_ep_comm`, `etp` and `micro_batch_group_size`."""
NAMES = (*_ALONE, _SIZE, _GROUPS, *_SETTINGS)
_OPTIONAL = {"cp", "ep", "vpp"}
"""Degrees for which `FrameworkSupport` has a field of the same name: whether the degree may be above 1."""
_WORDS = {
    "recompute": ("none", "selective", "full"),
    "pp_schedule": ("1f1b", "interleaved_zb", "zb_v"),
    "cuda_graph_impl": get_args(CudaGraphImpl),
    "exp_avg_dtype": get_args(StateDtype),
    "exp_avg_sq_dtype": get_args(StateDtype),
    "main_params_dtype": get_args(MainParamsDtype),
    "moe_token_dispatcher": get_args(TokenDispatcher),
    "base_weights_dtype": get_args(BaseWeightsDtype),
    "optimizer": get_args(Optimizer),
}
_LISTS = {
    "recompute_modules": get_args(RecomputedModule), "cuda_graph_modules": get_args(CudaGraphModule),
    "offload_modules": get_args(OffloadedModule), "lora_target_modules": get_args(LoraModule),
}  # fmt: skip
_NUMBERS = {"etp": 1, "micro_batch_group_size": 1, "lora_rank": 0, "packed_length": 1}
"""Settings that are whole numbers, with the least of them."""
_FLAGS = {"yes": True, "true": True, "no": False, "false": False}


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """Configurations that a search may return."""

    rules: FrameworkSupport
    title: str
    """Name of the framework in messages."""
    fixed: Mapping[str, Value]
    excluded: Mapping[str, frozenset[Value] | None]
    """Values by name; None excludes every value but the one that switches the feature off."""

    @classmethod
    def of(
        cls, rules: FrameworkSupport, title: str, *, fix: dict[str, Value] | None = None, exclude: Iterable[str] = ()
    ) -> SearchSpace:
        """Return the search space of a framework with the values of `fix` and without the values of `exclude`.

        An entry of `exclude` is a name (`cp`) or a value (`zero_stage=3`). Raises ArgumentError for unknown names and
        values, and for values that are both fixed and excluded.
        """
        if not isinstance(fix, dict | None):
            raise ArgumentError(f"fix is {safe_repr(fix)}", "give a mapping: {'tp': 4}")
        fixed = {_name(name): _value(_name(name), value) for name, value in (fix or {}).items()}
        left: dict[str, frozenset[Value] | None] = {}
        hint = "name what to leave out: ['cp', 'zero_stage=3']"
        for word in check_list("`exclude`", exclude, hint=hint):
            if not isinstance(word, str):
                raise ArgumentError(f"an exclusion is {safe_repr(word)}", hint)
            name, equals, text = word.partition("=")
            name = _name(name)
            if not equals and name == _SIZE:
                raise ArgumentError(
                    f"{_shown(_SIZE)} can't be excluded as a whole: each configuration has one",
                    f"exclude single sizes: `{_shown(_SIZE)}=1`",
                )
            known = left.get(name, frozenset())
            left[name] = known | {_value(name, text)} if equals and known is not None else None
        rules = rules.with_fsdp() if fixed.get("zero_stage") in rules.fsdp_stages else rules
        space = cls(rules, title, fixed, left)
        for name, value in fixed.items():
            if not space._is_left_in(name, value):
                raise ArgumentError(
                    f"{name} is fixed to {value}, but that value is also excluded",
                    f"remove {_shown(name)} from `fix` or from `exclude`",
                    code="conflict",
                )
        return space

    def takes(self, name: str, value: Value) -> bool:
        """Return whether `name`, one of NAMES, may be `value`.

        >>> from hpgo.llm.frameworks import DEEPSPEED, MEGATRON
        >>> space = SearchSpace.of(MEGATRON, "Megatron-LM", fix={"tp": 4}, exclude=["cp"])
        >>> space.takes("tp", 2), space.takes("tp", 4), space.takes("cp", 2), space.takes("cp", 1), space.takes("pp", 8)
        (False, True, False, True, True)
        """
        runs = value == 1 or name not in _OPTIONAL or getattr(self.rules, name)
        return runs and self.fixed.get(name, value) == value and self._is_left_in(name, value)

    def hides_exchange(self, model: Transformer) -> bool:
        """Return whether the search may try to hide the exchange of experts behind other passes."""
        open_here = "overlap_ep_comm" not in self.fixed and self.takes("overlap_ep_comm", True)
        return bool(model.experts) and self.rules.expert_settings and open_here

    def divides_norms(self, tp: int) -> bool:
        """Return whether configurations with this `tp` have sequence parallelism: all, where the framework has it."""
        return tp > 1 and self.rules.sequence_parallel != "never"

    def _is_left_in(self, name: str, value: Value) -> bool:
        if name not in self.excluded:
            return True
        values = self.excluded[name]
        return value == {**_ALONE, _GROUPS: 1, **_SETTINGS}[name] if values is None else value not in values

    @property
    def settings(self) -> dict[str, Any]:
        """Fixed fields of `ParallelismConfig` that the search does not vary."""
        found: dict[str, Any] = {name: value for name, value in self.fixed.items() if name in _SETTINGS}
        return found | ({"recompute": "selective"} if found.get("recompute_modules") else {})

    @property
    def leaves_modules(self) -> bool:
        """Whether the framework may recompute modules of layers, and nothing else is fixed that has to do with it."""
        given = {"recompute", "recompute_modules", "offload_modules", "cuda_graph_impl", "cuda_graph_modules"}
        takes = self.rules.recompute_modules and self.takes("recompute", "selective")
        return takes and not given & self.fixed.keys() and "recompute_modules" not in self.excluded

    @property
    def said(self) -> str:
        """Description of fixed and excluded values, to follow a list of configurations; empty without any.

        >>> from hpgo.llm.frameworks import MEGATRON
        >>> SearchSpace.of(MEGATRON, "Megatron-LM", fix={"tp": 4, "micro-batch-size": 1}, exclude=["cp",
        ... "zero_stage=0"]).said
        ' with tp 4 and micro-batch-size 1, without cp and zero-stage 0'
        """
        fixed = [f"{_shown(name)} {shown(value)}" for name, value in self.fixed.items()]
        left = [
            _shown(name) + ("" if values is None else f" {' and '.join(sorted(map(shown, values)))}")
            for name, values in self.excluded.items()
        ]
        parts = [f"{word} {join_words(names)}" for word, names in (("with", fixed), ("without", left)) if names]
        return " " + ", ".join(parts) if parts else ""

    def without(self, name: str) -> SearchSpace:
        """Return the search space with `name` left open."""
        fixed = {key: value for key, value in self.fixed.items() if key != name}
        left = {key: values for key, values in self.excluded.items() if key != name}
        return SearchSpace(self.rules, self.title, fixed, left)

    @property
    def offloaded(self) -> tuple[SearchSpace, ...]:
        """The search spaces with optimizer state in CPU memory, as far as the framework and this space allow it.

        There is none if the place of the state, or another optimizer, is fixed or excluded.

        >>> from hpgo.llm.frameworks import MEGATRON
        >>> space = SearchSpace.of(MEGATRON, "Megatron-LM")
        >>> [one.fixed["optimizer_offload_fraction"] for one in space.offloaded]
        [0.25, 0.5, 0.75, 1.0]
        """
        stated = {*self.fixed, *self.excluded}
        if stated & {"optimizer", "optimizer_offload_fraction", "offload_params"}:
            return ()
        return tuple(replace(self, fixed={**self.fixed, **one}) for one in self.rules.offload_choices)

    def check(
        self, model: Transformer, gpus: Gpus, *, global_batch_size: int, seq_length: int, precision: Precision
    ) -> None:
        """Raise ArgumentError if the fixed values leave no configuration, with the cause and the nearest value.

        The search would find that out as well, but could not name the cause.
        """
        rules, given = self.rules, self.fixed
        if lack := rules.lacking(model):
            raise ArgumentError(f"{self.title} {lack.why}", lack.hint, code="unsupported")
        degree = {name: self.degree(name) for name in ("tp", "cp", "ep", "pp", "vpp")}
        passes: Any = given.get("pp_schedule", "1f1b")
        if passes != "1f1b" and "vpp" not in given:
            degree["vpp"] = 2
        if self.settings.get("overlap_ep_comm"):
            # The search leaves out single experts groups and single stages per rank, so the check does, too.
            degree["ep"] = self.degree("ep", min(divisors(model.experts)[1:], default=1) if model.experts else 1)
            degree["vpp"] = self.degree("vpp", 2 if degree["pp"] > 1 else 1)
        piped = max(degree["pp"], 2) if degree["vpp"] > 1 else degree["pp"]
        again: Any = given.get("recompute", self.settings.get("recompute", "none"))
        if degree["vpp"] > 1 and given.get("pp") == 1:
            what = f"vpp {degree['vpp']}" if "vpp" in given else f"pp_schedule {passes}"
            raise DegreeError(f"{what} needs a pipeline, but pp is fixed to 1", "leave pp open", ("pp", "vpp"))
        config = ParallelismConfig(
            tp=degree["tp"], sequence_parallel=self.divides_norms(degree["tp"]), cp=degree["cp"], ep=degree["ep"],
            pp=piped, vpp=degree["vpp"], precision=precision,
            recompute=again,
            pp_schedule=passes, micro_batch_size=self.degree(_SIZE),
            **{name: value for name, value in self.settings.items() if name != "recompute"},
        )  # fmt: skip
        config = replace(config, zero_stage=self.degree("zero_stage", rules.open_stage(config)))
        if given.get("recompute") == "selective" and not rules.recompute_modules:
            raise ArgumentError(
                "recompute is selective, but the search uses flash attention, which saves no scores to recompute",
                "use none, which is equivalent here, or full; to save and recompute scores, use"
                " `hpgo llm estimate --no-flash-attention`",
            )
        if why := rules.broken_degrees(rules.as_run(config), model=model):
            stage = self.degree("zero_stage") if "zero_stage" in given else None
            others = frameworks_for(model, config, zero_stage=stage, seq_length=seq_length)
            hint = f"leave that open, or use {others}" if others else "leave that open"
            raise ArgumentError(f"{self.title} {why}", hint, code="unsupported")
        zero = self.degree("zero_stage", 0)
        if (groups := self.degree(_GROUPS)) > 1:
            self._check_groups(groups)
        known = rules.known_stages(degree["pp"])
        if zero not in known:
            beside = " with a pipeline" if degree["pp"] > 1 else ""
            raise DegreeError(
                f"{self.title} does not support zero-stage {zero}{beside}",
                nearest(zero, known),
                ("zero_stage",),
                code="unsupported",
            )
        if degree["tp"] not in divisors(gpus.gpus_per_node):
            raise DegreeError(
                f"tp {degree['tp']} does not divide the {gpus.gpus_per_node} GPUs of a node, and the search keeps"
                " tensor parallelism inside a node",
                nearest(degree["tp"], divisors(gpus.gpus_per_node)),
                ("tp",),
            )
        # If the framework allows fewer layers on the end ranks, the search finds their number. Then a pp that does not
        # divide the layers is no error, and only the other degrees are checked.
        may_differ = rules.uneven_ends and any(True for _ in ends_of(model.layers, piped, degree["vpp"]))
        checked = config if "pp" in given and not may_differ else replace(config, pp=1, vpp=1, pp_schedule="1f1b")
        check_degrees(model, checked, seq_length=seq_length)
        self._check_counts(gpus.count, degree, global_batch_size)

    def _check_counts(self, gpus: int, degree: Mapping[str, int], global_batch_size: int) -> None:
        """Raise ArgumentError if fixed degrees do not divide the GPUs, or dp and the micro-batch size the batch."""
        each = degree["tp"] * degree["cp"] * degree["pp"]
        data = self.degree("dp")
        named = " x ".join(f"{name} {degree[name]}" for name in ("tp", "cp", "pp") if name in self.fixed)
        if gpus % each:
            raise DegreeError(
                f"{named} is {each} GPUs, which does not divide {gpus}",
                f"of GPUs, {nearest(gpus, _around(gpus, each))}; or fix less",
                ("pp", "cp", "tp"),
            )
        if gpus // each % data:
            raise DegreeError(
                f"dp {data} does not divide {gpus // each} GPUs{f', which {named} leaves of {gpus}' if named else ''}",
                nearest(data, divisors(gpus // each)),
                ("dp", "pp", "cp", "tp"),
                code="unsupported",
            )
        check_batch(ParallelismConfig(dp=data, micro_batch_size=self.degree(_SIZE)), global_batch_size)

    def _check_groups(self, groups: int) -> None:
        """Raise ArgumentError unless the framework shards inside this number of groups."""
        stages = [stage for stage in self.rules.hybrid_stages if self.takes("zero_stage", stage)]
        if not stages:
            known = join_words(self.rules.hybrid_stages, "or")
            raise ArgumentError(
                f"{self.title} shards in groups of replicas with ZeRO stage {known}, but dp_replicate is {groups}"
                f" without that stage",
                f"fix `zero_stage={self.rules.hybrid_stages[0]}`, or leave dp_replicate open",
                code="unsupported",
            )

    def degree(self, name: str, free: int = 1) -> int:
        """Return the fixed value of a degree; `free` if it is open."""
        value = self.fixed.get(name, free)
        assert isinstance(value, int), "it was checked by `_value`"  # noqa: S101
        return value


def _around(count: int, each: int) -> list[int]:
    return [at * each for at in (count // each, count // each + 1) if at]


def shown(value: object) -> str:
    """Return a value as `--fix` reads it.

    >>> shown(True), shown(("mlp", "moe")), shown(0.5)
    ('yes', 'mlp+moe', '0.5')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return "+".join(value) or "none" if isinstance(value, tuple) else str(value)


def _shown(name: str) -> str:
    return name.replace("_", "-")


def _name(name: object) -> str:
    """Return the name of a degree that may be fixed, written with dashes or underscores."""
    known = name.strip().replace("-", "_") if isinstance(name, str) else ""
    if known not in NAMES:
        check_setting(known)
        text = shorten(name) if isinstance(name, str) else safe_repr(name)
        raise ArgumentError(
            f"there is no degree `{text}` to fix or exclude",
            did_you_mean(_shown(known or str(text)), [_shown(one) for one in NAMES]),
            code="unknown_name",
        )
    return known


def _value(name: str, value: object) -> Value:
    if words := _WORDS.get(name):
        if not isinstance(value, str) or value not in words:
            raise ArgumentError(f"{name} is {safe_repr(value)}", f"it may be {', '.join(words)}")
        return value
    if known := _LISTS.get(name):
        return _listed(name, value, known)
    if name == "optimizer_offload_fraction":
        return number(name, _read_float(value), maximum=1.0, hint="give a share, from 0 to 1")
    if name in _SETTINGS and name not in _NUMBERS:
        flag = _FLAGS.get(value, value) if isinstance(value, str) else value
        if not isinstance(flag, bool):
            raise ArgumentError(f"{name} is {safe_repr(value)}", "it may be yes or no")
        return flag
    # Ten digits are no degree, and int() refuses thousands of digits with an error that names neither.
    if isinstance(value, str) and value.strip().isdecimal() and len(value) < 10:
        value = int(value)
    if name == "zero_stage":
        return check_int(name, value, minimum=0, maximum=MAX_ZERO)
    return check_int(name, value, minimum=_NUMBERS.get(name, 1))


def _read_float(value: object) -> object:
    """Return the number that a text stands for, or the value as it is."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _listed(name: str, value: object, known: tuple[str, ...]) -> tuple[str, ...]:
    """Return a list of known words, given as such or as a text with `+` between them."""
    words = value.split("+") if isinstance(value, str) else value
    if not isinstance(words, list | tuple) or not words or any(word not in known for word in words):
        raise ArgumentError(f"{name} is {safe_repr(value)}", f"join some of these with `+`: {', '.join(known)}")
    return tuple(words)
