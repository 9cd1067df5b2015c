"""Canonical form of a configuration: settings that change nothing at its degrees have one value.

Two configurations with the same canonical form run the same operations, so their estimates and their exports are equal.
Lists, comparisons and exports use the canonical form.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

from hpgo.llm.parallelism import (
    MAX_ZERO,
    LoraModule,
    OffloadedModule,
    ParallelismConfig,
    RecomputedModule,
    split_layers,
)

if TYPE_CHECKING:
    from hpgo.model.transformer import Transformer

_MODULES, _OFFLOADED, _TARGETS = get_args(RecomputedModule), get_args(OffloadedModule), get_args(LoraModule)


def canonical(config: ParallelismConfig, model: Transformer) -> ParallelismConfig:
    """Return the canonical form of a configuration that divides `model`.

    - Without replicas nothing is sharded or reduced: ZeRO stages 1 and 2 are stage 0, and nothing overlaps.
    - Layers of the end ranks are None where the even split, or the ranks in the middle, have the same number.
    - Recomputation of a stage's number of layers is recomputation of all layers. Recomputation of every n-th layer is
      recomputation of a number of layers if all stages have the same number.
    - Modules to recompute or to offload, and GEMMs with adapters, have one order. If all GEMMs have one, none is
      listed.
    - Without virtual stages there are no groups of micro-batches, and groups of pp are the default.
    - Without expert parallelism there is no exchange to hide.

    >>> from hpgo.llm.parallelism import ParallelismConfig
    >>> from hpgo.model.transformer_presets import TRANSFORMERS
    >>> model = TRANSFORMERS["llama-3-8b"]
    >>> one = ParallelismConfig(pp=4, first_rank_layers=8, zero_stage=1, recompute="full", recompute_num_layers=8)
    >>> canonical(one, model) == canonical(ParallelismConfig(pp=4, recompute="full"), model)
    True
    """
    changes: dict[str, Any] = {}
    # Experts may have replicas even if other weights have none.
    if max(config.dp_cp_size, config.expert_dp_size if model.experts else 1) == 1:
        changes |= {"overlap_dp_comm": False}
        # Stage 3 keeps weights in other formats even on one GPU. Narrow optimizer state and flat gradients also depend
        # on the stage, and gradients move to the CPU after each micro-batch from stage 2 on.
        moves = config.optimizer_offload_fraction > 0 and config.zero_stage > 1
        if config.zero_stage < MAX_ZERO and not (config.flatten_gradients or config.has_narrow_state or moves):
            changes |= {"zero_stage": 0}
    counts = split_layers(model.layers, config.pp, config.vpp, config.ends, laid_out=bool(model.experts))
    # A layout is kept as it was given.
    if counts is not None and config.pipeline_layout is None:
        if config.ends != (None, None):
            changes |= zip(("first_rank_layers", "last_rank_layers"), _ends(config, counts, model), strict=True)
        # Layers for multi-token prediction are recomputed with all layers only, and every n-th counts them, too.
        if config.recompute == "full" and not model.further_tokens:
            changes |= _recomputed(config, counts)
    if len(config.recompute_modules) > 1:
        changes |= {"recompute_modules": tuple(sorted(config.recompute_modules, key=_MODULES.index))}
    if config.vpp == 1 or config.micro_batch_group_size == config.pp:
        changes |= {"micro_batch_group_size": None}
    if config.ep == 1:
        changes |= {"overlap_ep_comm": False, "delay_wgrad_compute": False}
    if config.expert_model_parallel_size == 1:
        changes |= {"moe_token_dispatcher": None}
    if len(config.offload_modules) > 1:
        changes |= {"offload_modules": tuple(sorted(config.offload_modules, key=_OFFLOADED.index))}
    if len(config.cuda_graph_modules) > 1:
        changes |= {"cuda_graph_modules": tuple(sorted(config.cuda_graph_modules))}
    if config.lora_target_modules:
        targets = tuple(name for name in _TARGETS if name in config.lora_target_modules)
        changes |= {"lora_target_modules": () if targets == _TARGETS else targets}
    changes = {name: value for name, value in changes.items() if value != getattr(config, name)}
    return replace(config, **changes) if changes else config


def _ends(config: ParallelismConfig, counts: tuple[int, ...], model: Transformer) -> tuple[int | None, int | None]:
    """Return the layers of the first and of the last rank, None where they need not be set."""
    if counts == split_layers(model.layers, config.pp, config.vpp, (None, None), laid_out=bool(model.experts)):
        return None, None
    ranks = [sum(counts[rank :: config.pp]) for rank in range(config.pp)]
    # With two ranks, the layers of the first determine the layers of the last.
    if config.pp == 2:
        return ranks[0], None
    first, between, last = ranks[0], ranks[1], ranks[-1]
    return None if first == between else first, None if last == between else last


def _recomputed(config: ParallelismConfig, counts: tuple[int, ...]) -> dict[str, int | None]:
    """Return the values of `recompute_num_layers` and `recompute_every`."""
    some, every = config.recompute_num_layers, config.recompute_every
    if every is not None:
        numbers = {count // every for count in counts}
        # A stage without a recomputed layer has no number, and different numbers need the distance.
        if len(numbers) > 1 or 0 in numbers:
            return {}
        some, every = numbers.pop(), None
    whole = some is not None and some >= max(counts)
    return {"recompute_num_layers": None if whole else some, "recompute_every": every}
