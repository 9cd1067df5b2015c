"""The reduced plan of a job folder: a few layers on one node, to find errors before many nodes are asked for."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

from hpgo.base.divisors import divisors
from hpgo.base.messages import pluralize
from hpgo.errors import HpgoError
from hpgo.hardware.rates import gpus_per_host
from hpgo.llm.estimate import estimate_on
from hpgo.llm.frameworks import framework_support
from hpgo.llm.plan import LlmPlan
from hpgo.llm.stack import stack_of, stacks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpgo.llm.parallelism import ParallelismConfig
    from hpgo.model.transformer import Transformer

_LAYERS = 2
"""Least number of layers of the reduced model: one for each rank of its pipeline."""
_MICRO_BATCHES = 2
"""Micro-batches for each pipeline rank: with one, no rank would ever hold two."""


def reduced(plan: LlmPlan) -> LlmPlan | None:
    """Return the plan of a few layers on one node; None if the plan has no more, or if no such plan is possible.

    The layers are the first of each kind, two at least. Widths, sequence length, micro-batch size, precision, kernels
    and recomputation are the plan's. The pipeline has at most two ranks without virtual stages. Context and expert
    parallelism become smaller until all ranks fit on the node, and data parallelism takes the GPUs that are left.

    >>> import hpgo
    >>> cluster = hpgo.Cluster.preset("h100:4")
    >>> found = hpgo.plan_llm("llama-3-70b", cluster, global_batch_size=64, seq_length=8192)
    >>> small = reduced(found.plan())
    >>> small.transformer.layers, small.estimate.gpus, small.estimate.parallelism.tp == found.best.parallelism.tp
    (2, 8, True)
    """
    model = _few_layers(plan.transformer)
    if model is None:
        return None
    node = plan.cluster.nodes[0]
    gpus = gpus_per_host(node.device.name, node.count)
    row, support = framework_support(plan.framework)
    cluster = plan.cluster.first(gpus)
    # A stack that the user brought as a file is not in the table. Any stack serves to find whether the job fits.
    stack = stacks().get(plan.estimate.stack) or stack_of(None, cluster, row.name)
    for config in _configs(plan.estimate.parallelism, gpus):
        try:
            batch = config.dp * config.micro_batch_size * config.pp * _MICRO_BATCHES
            estimate = estimate_on(
                model, cluster, config, stack, None, global_batch_size=batch, seq_length=plan.estimate.seq_length
            )
            if not estimate.fits or support.broken(config, micro_batches=estimate.micro_batches, model=model):
                continue
            return LlmPlan.of(estimate, model, cluster, framework=plan.framework)  # type: ignore[arg-type]
        except HpgoError:
            # These degrees do not divide the model or the node, so try the next ones.
            continue
    return None


def why_not_reduced(plan: LlmPlan) -> str:
    """Return a sentence with the reason why `reduced` returns None for a plan.

    >>> import hpgo
    >>> cluster = hpgo.Cluster.preset("gb200:1")
    >>> one = hpgo.estimate_llm("llama-3-70b", cluster, global_batch_size=72, seq_length=8192, tp=8)
    >>> why_not_reduced(hpgo.LlmPlan.of(one, "llama-3-70b", cluster))
    'tensor parallelism needs 8 GPUs, but one host has 4.'
    """
    node, config = plan.cluster.nodes[0], plan.estimate.parallelism
    gpus = gpus_per_host(node.device.name, node.count)
    if gpus % config.tp:
        return f"tensor parallelism needs {config.tp} GPUs, but one host has {gpus}."
    if _few_layers(plan.transformer) is None:
        return f"the model has {pluralize(plan.transformer.layers, 'layer')} already."
    return f"none that {plan.framework} runs fits on one host with {pluralize(gpus, 'GPU')}."


def _few_layers(model: Transformer) -> Transformer | None:
    kinds: dict[object, int] = {}
    for layer in range(model.layers):
        kinds.setdefault(model.kind(layer), layer)
    kept = sorted(kinds.values())
    # The last layers repeat their kind, as in the model, until there is one for each rank of the pipeline.
    while len(kept) < _LAYERS or len(kept) % _LAYERS:
        kept.append(kept[-1])
    if len(kept) >= model.layers:
        return None
    arithmetic = model.arithmetic
    if arithmetic is not None:
        rotate_nothing = tuple(at for at, layer in enumerate(kept) if layer in arithmetic.no_rope_layers)
        arithmetic = replace(arithmetic, no_rope_layers=rotate_nothing)
    return replace(
        model,
        layers=len(kept),
        arithmetic=arithmetic,
        pattern=tuple(model.pattern[layer] for layer in kept) if model.pattern else (),
        dense_layers=tuple(at for at, layer in enumerate(kept) if layer in model.dense_layers),
        window_layers=tuple(at for at, layer in enumerate(kept) if layer in model.window_layers),
    )


def _configs(config: ParallelismConfig, gpus: int) -> Iterator[ParallelismConfig]:
    """Yield configurations for one node, the most similar to `config` first."""
    # A pipeline of two ranks has all of its communication, so longer ones would find no other errors.
    for pp in (2, 1) if config.pp > 1 else (1,):
        for cp in reversed(divisors(config.cp)):
            if gpus % (config.tp * cp * pp):
                continue
            dp = gpus // (config.tp * cp * pp)
            for ep, etp in product(reversed(divisors(config.ep)), reversed(divisors(config.etp))):
                for zero_stage in dict.fromkeys((config.zero_stage, 0)):
                    # Passes beside the exchange of experts need virtual stages, and these are left out here.
                    hides = config.overlap_ep_comm and pp == 1 and ep > 1
                    yield replace(
                        config, pp=pp, vpp=1, pp_schedule="1f1b", cp=cp, ep=ep, etp=etp, dp=dp, dp_replicate=1,
                        overlap_ep_comm=hides, delay_wgrad_compute=hides and config.delay_wgrad_compute,
                        micro_batch_group_size=None,
                        zero_stage=zero_stage, first_rank_layers=None, last_rank_layers=None, pipeline_layout=None,
                        recompute_num_layers=None if config.recompute_num_layers is None else 1, recompute_every=None,
                        cpu_offload_num_layers=min(config.cpu_offload_num_layers, 1),
                    )  # fmt: skip
