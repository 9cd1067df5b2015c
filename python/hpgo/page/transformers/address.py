"""Addresses of the page that plans transformers: a planning problem, and the settings of one configuration.

Fields have the names of the options of `hpgo llm plan` and `hpgo llm estimate`, with underscores.
"""

from __future__ import annotations

import inspect
import shlex
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, get_args

from hpgo.base.messages import did_you_mean, shorten
from hpgo.errors import ArgumentError
from hpgo.llm.estimate import estimate_llm
from hpgo.llm.fewer_gpus import part_of
from hpgo.llm.parallelism import Precision
from hpgo.llm.size import MAX_GPUS
from hpgo.model.transformer_presets import named_transformer, transformer_names

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from hpgo.hardware.cluster import Cluster
    from hpgo.llm.estimate import LlmEstimate
    from hpgo.model.transformer import Transformer

FRAMEWORKS = ("megatron", "megatron-bridge", "torchtitan", "deepspeed")
SHAPE = ("layers", "hidden", "heads", "experts")
"""Fields of a transformer that an address may replace."""
_COUNTS = (
    "tp", "cp", "pp", "vpp", "ep", "etp", "dp_replicate", "micro_batch_size", "micro_batch_group_size", "zero_stage",
    "first_rank_layers", "last_rank_layers", "recompute_num_layers",
)  # fmt: skip
_NAMES = ("pp_schedule", "recompute", "pipeline_layout", "cuda_graph_impl", "moe_token_dispatcher")
_LISTS = ("recompute_modules", "cuda_graph_modules")
_FLAGS = ("overlap_ep_comm", "delay_wgrad_compute", "offload_params")
_SHARES = ("optimizer_offload_fraction",)
CONFIGURATION = (*_COUNTS, *_NAMES, *_LISTS, *_FLAGS, *_SHARES)
"""Arguments of `hpgo.estimate_llm` that a search sets. The framework implies the others."""
_MAX_LENGTH = 4096


@dataclass(frozen=True, slots=True)
class LlmAddress:
    """Values of an address; None for those that it does not set."""

    model: str
    cluster: str
    global_batch_size: int
    seq_length: int
    precision: Precision = "bf16"
    framework: str = "megatron"
    devices: int | None = None
    """Number of GPUs that a search may use, the first of the cluster."""
    gpus: int | None = None
    """Number of GPUs of the configuration."""
    gpus_per_node: int | None = None
    """Number of GPUs that the configuration uses of each node; None for all."""
    shape: dict[str, Any] = field(default_factory=dict)
    """Values of `SHAPE` that replace those of the model."""
    configuration: dict[str, Any] = field(default_factory=dict)
    """Arguments of `hpgo.estimate_llm` from `CONFIGURATION`."""
    tokens: float | None = None
    """Tokens of the whole run, to size clusters."""
    days: float | None = None
    """Longest run in days."""
    max_gpus: int = MAX_GPUS
    """Largest number of GPUs of a cluster that is sized."""
    hour_prices: dict[str, float] = field(default_factory=dict)
    """Price of a GPU-hour of each kind of node that is sized."""
    width_px: int = 1100

    def part(self, cluster: Cluster) -> Cluster:
        """Return the part of `cluster` that the configuration uses. Raises ArgumentError if the cluster has no such."""
        if self.gpus_per_node is None or self.gpus is None:
            return cluster
        nodes, rest = divmod(self.gpus, self.gpus_per_node)
        if rest or nodes > len(cluster.nodes) or self.gpus_per_node > cluster.nodes[nodes - 1].count:
            raise ArgumentError(
                f"{self.gpus} GPUs are not {self.gpus_per_node} of each node of `{shorten(cluster.name)}`",
                "leave out `gpus_per_node`",
            )
        return part_of(cluster, nodes, self.gpus_per_node)

    def changed(self, model: Transformer) -> Transformer:
        """Return `model` with the shape of the address. Raises ArgumentError for shapes that contradict themselves."""
        if not self.shape:
            return model
        if model.blocks or model.tower is not None:
            raise ArgumentError(
                f"the layers of `{shorten(model.name)}` differ, so {', '.join(self.shape)} can't be changed",
                "change its config.json and drop it on the page",
                code="unsupported",
            )
        # The name differs, so that no report on the changed model passes for one on the published model.
        return replace(model, name=f"{model.name}-changed", **self.shape)


def asked_of(items: Iterable[tuple[str, str]]) -> LlmAddress:
    """Return the values of an address. Raises ArgumentError with the field and its allowed values.

    >>> items = {"model": "llama-3-8b", "cluster": "h100:1", "batch": "8", "seq_length": "4096", "tp": "2"}
    >>> asked_of(items.items()).configuration
    {'tp': 2}
    """
    read: dict[str, Any] = {"shape": {}, "configuration": {}}
    for name, text in items:
        if name not in _READERS:
            raise ArgumentError(f"unknown field `{shorten(name)}`", did_you_mean(name, _READERS), code="unknown_name")
        if len(text) > _MAX_LENGTH:
            raise ArgumentError(f"`{name}` has {len(text):,} characters, but at most {_MAX_LENGTH:,} are allowed", "")
        # Forms send empty fields, which mean that nothing is set.
        if text.strip():
            value = _READERS[name](name, text.strip())
            into = "shape" if name in SHAPE else "configuration" if name in CONFIGURATION else None
            (read if into is None else read[into])[_RENAMED.get(name, name)] = value
    for name in ("model", "cluster", "batch", "seq_length"):
        if _RENAMED.get(name, name) not in read:
            raise ArgumentError(f"the address has no {name}", "give a model, a cluster, a batch and a sequence length")
    return LlmAddress(**read)


def items_of(estimate: LlmEstimate, *, gpus_per_node: int | None = None) -> dict[str, str]:
    """Return the fields of an address for the configuration of an estimate, without those at their default.

    `gpus_per_node` is None if the configuration uses whole nodes.

    >>> import hpgo
    >>> items_of(hpgo.estimate_llm("llama-3-8b", "h100:1", global_batch_size=8, seq_length=4096, tp=2, zero_stage=1))
    {'gpus': '8', 'tp': '2', 'zero_stage': '1'}
    """
    config = estimate.parallelism
    found = {"gpus": str(estimate.gpus)}
    found |= {} if gpus_per_node is None else {"gpus_per_node": str(gpus_per_node)}
    for name in CONFIGURATION:
        value = getattr(config, name)
        if value != _defaults()[name] or name == "zero_stage":
            found[name] = ",".join(value) if name in _LISTS else "1" if value is True else f"{value}"
    return found


def command_of(asked: LlmAddress, command: str, *, model: str, cluster: str, words: Iterable[str] = ()) -> str:
    """Return the command line of `hpgo llm`, for a model and a cluster by their names or files."""
    line = ["hpgo", "llm", command, model, "-c", cluster, "-b", str(asked.global_batch_size)]
    line += ["--seq-length", str(asked.seq_length)]
    line += [] if asked.precision == "bf16" else ["--precision", asked.precision]
    return shlex.join([*line, *words])


def size_command_of(asked: LlmAddress, *, model: str) -> str:
    """Return the command line of `hpgo llm size`. Prices are in a file there, which the user writes."""
    line = ["hpgo", "llm", "size", model, "--tokens", f"{asked.tokens:g}", "--seq-length", str(asked.seq_length)]
    line += [] if asked.days is None else ["--days", f"{asked.days:g}"]
    line += [] if asked.max_gpus == MAX_GPUS else ["--gpus", f"1..{asked.max_gpus}"]
    line += [] if asked.precision == "bf16" else ["--precision", asked.precision]
    line += [] if asked.framework == "megatron" else ["--framework", asked.framework]
    line += ["--on", ",".join(asked.hour_prices), "--prices", "prices.yaml"] if asked.hour_prices else []
    return shlex.join(line)


def configuration_words(configuration: Mapping[str, Any]) -> list[str]:
    """Return the options of `hpgo llm estimate` for arguments of `hpgo.estimate_llm`.

    >>> configuration_words({"tp": 2, "recompute_modules": ("mlp",), "offload_params": True})
    ['--tp', '2', '--recompute-modules', 'mlp', '--offload-params']
    """
    words = []
    for name, value in configuration.items():
        if value is False:
            continue
        option = f"--{name.replace('_', '-')}"
        words += [option] if value is True else [option, ",".join(value) if name in _LISTS else f"{value}"]
    return words


def known_model(name: str) -> Transformer:
    """Return a transformer by its name. A name in an address never reads a file of this machine."""
    found = named_transformer(name)
    if found is None:
        raise ArgumentError(
            f"there is no transformer `{shorten(name)}`, and no loaded config.json of this name",
            did_you_mean(name, transformer_names()),
            code="unknown_name",
        )
    return found


@cache
def _defaults() -> dict[str, Any]:
    """Return the defaults of the arguments of `hpgo.estimate_llm`."""
    return {name: one.default for name, one in inspect.signature(estimate_llm).parameters.items()}


def _count(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and int(text) >= (name == "zero_stage" or 1)):
        minimum = 0 if name == "zero_stage" else 1
        raise ArgumentError(f"`{name}` is `{shorten(text)}`", f"give a whole number from {minimum} to 999,999,999")
    return int(text)


def _share(name: str, text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found <= 1:
        raise ArgumentError(f"`{name}` is `{shorten(text)}`", "give a share from 0 to 1")
    return found


def _amount(name: str, text: str) -> float:
    scale = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1:].upper(), 0.0)
    try:
        found = float(text[:-1]) * scale if scale else float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < 1e18:
        raise ArgumentError(f"`{name}` is `{shorten(text)}`", "give a positive number, such as 15T or 300B")
    return found


def _prices(name: str, text: str) -> dict[str, float]:
    found = {}
    for word in text.split(","):
        kind, equals, price = word.partition("=")
        if not equals:
            raise ArgumentError(f"`{name}` has `{shorten(word)}`", "give prices like h100=2.5,b200=5")
        found[kind.strip()] = _amount(name, price.strip())
    return found


def _choice(name: str, text: str, known: Iterable[str]) -> str:
    if text not in known:
        raise ArgumentError(f"`{name}` is `{shorten(text)}`", did_you_mean(text, known))
    return text


def _text(_: str, text: str) -> str:
    return text


_RENAMED = {"batch": "global_batch_size", "width": "width_px"}
_READERS: dict[str, Any] = {
    "model": _text,
    "cluster": _text,
    "batch": _count,
    "seq_length": _count,
    "precision": lambda name, text: _choice(name, text, get_args(Precision)),
    "framework": lambda name, text: _choice(name, text, FRAMEWORKS),
    "devices": _count,
    "gpus": _count,
    "gpus_per_node": _count,
    "tokens": _amount,
    "days": _amount,
    "max_gpus": _count,
    "hour_prices": _prices,
    "width": lambda name, text: min(4000, max(320, _count(name, text))),
    **dict.fromkeys((*SHAPE, *_COUNTS), _count),
    **dict.fromkeys(_NAMES, _text),
    **dict.fromkeys(_LISTS, lambda _, text: tuple(text.split(","))),
    **dict.fromkeys(_FLAGS, lambda name, text: _choice(name, text, ("0", "1")) == "1"),
    **dict.fromkeys(_SHARES, _share),
}
