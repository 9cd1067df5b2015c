"""Features of a configuration, and which of them published steps have validated, by device.

An estimate adds up terms. Terms of a feature that a published step used were compared with a measurement. Other terms
are unvalidated. They tend to be optimistic, because costs that were never measured are missing from them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpgo.hardware.rates import key_of

if TYPE_CHECKING:
    from collections.abc import Collection

    from hpgo.llm.parallelism import ParallelismConfig
    from hpgo.model.transformer import Transformer


def features_of(config: ParallelismConfig) -> tuple[str, ...]:
    """Return the features that a configuration uses, without layer splits and the number of recomputed layers.

    >>> from hpgo.llm.parallelism import ParallelismConfig
    >>> features_of(ParallelismConfig(tp=2, sequence_parallel=True, pp=4, dp=2, zero_stage=1))
    ('tp', 'sp', 'pp', 'zero 1', 'bf16')
    """
    piped, stage = config.pp > 1, config.zero_stage
    # With a pipeline, sharded weights stay gathered for the step and gradients stay whole. So ZeRO stage 3 costs the
    # same as stage 2 there, and a step without a pipeline validates neither.
    moments = {config.exp_avg_dtype, config.exp_avg_sq_dtype}
    zero = f"zero {min(stage, 2)} with pp" if piped and stage > 1 else f"zero {stage}"
    held = (
        ("tp", config.tp > 1),
        ("sp", config.sequence_parallel),
        ("TP overlap", config.tp > 1 and config.tp_comm_overlap is True),
        ("cp", config.cp > 1),
        ("ep", config.ep > 1),
        ("etp", config.etp > 1),
        ("EP overlap", config.ep > 1 and config.overlap_ep_comm),
        (f"dispatcher {config.moe_token_dispatcher}", config.ep > 1 and config.moe_token_dispatcher is not None),
        ("zero 3 with ep", config.ep > 1 and config.gathers_weights),
        ("pp", piped),
        ("vpp", config.vpp > 1),
        ("micro-batch groups", config.vpp > 1 and config.micro_batch_group_size not in {None, config.pp}),
        (f"schedule {config.pp_schedule}", config.splits_backward),
        (zero, config.zero_stage > 0),
        ("hybrid sharding", config.dp_replicate > 1),
        (f"recompute {config.recompute}", config.recompute != "none" and not config.recompute_modules),
        ("recompute of modules", bool(config.recompute_modules)),
        ("bf16 moments", config.adam_moments_in_bf16),
        ("other narrow moments", moments != {"fp32"} and not config.adam_moments_in_bf16),
        (f"optimizer weights {config.main_params_dtype}", config.main_params_dtype != "fp32"),
        (config.precision, True),
        ("bf16 gradient reduction", config.grad_reduce_in_bf16),
        ("activation offloading", config.cpu_offload_num_layers > 0),
        ("offloading of modules", bool(config.offload_modules)),
        ("CUDA graphs", config.cuda_graph_impl != "none"),
        ("LoRA", config.lora_rank > 0),
        (f"base weights {config.base_weights_dtype}", config.base_weights_dtype != "bf16"),
        (f"optimizer {config.optimizer}", config.optimizer != "adam"),
        ("optimizer on the CPU", config.optimizer_offload_fraction > 0),
        ("weights on the CPU", config.offload_params),
        ("packed documents", config.packed_length is not None),
    )
    return tuple(name for name, has in held if has)


def features_of_model(model: Transformer) -> tuple[str, ...]:
    """Return the kinds of operators of a model that no published step on any device has validated.

    >>> from hpgo.model.transformer_presets import TRANSFORMERS
    >>> features_of_model(TRANSFORMERS["deepseek-v3"])
    ()
    """
    attention = [one for block in model.blocks for one in block.attention]
    held = (
        ("scans", any(block.scans for block in model.blocks)),
        ("attention sinks", any(one.sinks for one in attention)),
        ("attention in chunks", any(one.chunk for one in attention)),
        ("selected tokens", any(one.selected for one in attention)),
        ("gated attention", any(one.gate for one in attention)),
        (f"{model.tower.name} tower" if model.tower else "", model.tower is not None),
        ("images in sequences", model.tower is not None and model.tower.images > 0),
        ("frozen tower", model.tower is not None and model.tower.frozen),
    )
    return tuple(name for name, has in held if has)


VALIDATED: dict[str, tuple[str, ...]] = {
    "A100": (
        "tp", "sp", "pp", "vpp", "zero 1", "zero 3", "hybrid sharding", "recompute selective", "recompute full", "bf16",
        "fp16", "bf16 gradient reduction",
    ),
    "B200": (
        "tp", "sp", "TP overlap", "cp", "ep", "pp", "vpp", "zero 1", "recompute of modules", "bf16 moments", "bf16",
        "fp8", "bf16 gradient reduction",
    ),
    "B300": (
        "ep", "pp", "vpp", "zero 1", "recompute of modules", "bf16 moments", "bf16", "fp8", "bf16 gradient reduction",
    ),
    "GB200": (
        "tp", "sp", "TP overlap", "ep", "pp", "vpp", "zero 1", "zero 3", "recompute of modules", "bf16 moments", "bf16",
        "fp8", "fp4", "bf16 gradient reduction", "activation offloading",
    ),
    "GB300": (
        "tp", "sp", "TP overlap", "cp", "ep", "pp", "vpp", "zero 1", "zero 3", "bf16", "fp8", "fp4",
        "bf16 gradient reduction", "activation offloading",
    ),
    "H100": (
        "tp", "sp", "TP overlap", "cp", "ep", "pp", "vpp", "zero 1", "zero 2", "zero 3", "zero 2 with pp",
        "recompute full", "recompute of modules", "bf16 moments", "bf16", "fp8", "bf16 gradient reduction",
        "recompute selective_op",
    ),
}  # fmt: skip
"""Features of published steps by device (docs/accuracy.md, *Validated features*)."""
# The H200 is the H100's chip with more and faster memory. Its few published steps use none but the H100's features.
VALIDATED["H200"] = VALIDATED["H100"]
RECIPES: dict[str, tuple[str, ...]] = {
    "GB200": ("cp", "EP overlap", "dispatcher hybridep", "offloading of modules"),
    "GB300": ("EP overlap", "dispatcher hybridep", "bf16 moments"),
    "H100": ("EP overlap", "dispatcher alltoall", "dispatcher deepep", "dispatcher hybridep"),
}
"""Further features of public recipes by device, whose published steps are in the range of their estimates
(docs/launch-settings.md). CUDA graphs are left out: recipes have graphs of single modules, but searches try graphs of
a step."""
RECIPES["H200"] = RECIPES["H100"]
BEYOND: dict[str, frozenset[str]] = {name: frozenset(("LoRA",)) for name in ("B200", "H100", "H200")}
"""Features of published steps of other kinds of training, which no constant was fitted to: MLPerf Training 4.1,
llama2_70b_lora (docs/cost-terms.md, *Adapters*)."""
EVERYWHERE = frozenset(name for table in (VALIDATED, RECIPES, BEYOND) for held in table.values() for name in held)
"""Features that were validated on any device."""


def family(device: str) -> str:
    """Return the chip of a known card, by which published steps are grouped; for other devices their name.

    >>> family("A100-80GB"), family("NVIDIA H100 80GB HBM3"), family("T4")
    ('A100', 'H100', 'T4')
    """
    key = key_of(device)
    return device if key is None else key.partition("-")[0].upper()


def unvalidated_features(config: ParallelismConfig, device: str, besides: Collection[str] = ()) -> tuple[str, ...]:
    """Return the features of a configuration that no published step on such a `device` has validated.

    Features in `besides` count as validated, too. For a device without published steps, a feature is validated if it
    is on any device.

    >>> from hpgo.llm.parallelism import ParallelismConfig
    >>> config = ParallelismConfig(cp=2, pp=2, vpp=2, pp_schedule="zb_v")
    >>> [unvalidated_features(config, *known) for known in (["H100-80GB"], ["A100-80GB"], ["A100-80GB", ["cp"]])]
    [('schedule zb_v',), ('cp', 'schedule zb_v'), ('schedule zb_v',)]
    """
    chip = family(device)
    known = {*VALIDATED.get(chip, EVERYWHERE), *RECIPES.get(chip, ()), *BEYOND.get(chip, ())}
    return tuple(name for name in features_of(config) if name not in known and name not in besides)
