"""DeepSpeed: a way of training a transformer as CONFIG for `deepspeed.initialize`, and where a pipeline is cut.

The model is the user's: a list of layers for a pipeline, a module without one.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

from hpgo.base.quoting import in_python
from hpgo.export.for_deepspeed import IMPORTS, MODULE
from hpgo.export.ways import WayJob

if TYPE_CHECKING:
    from hpgo.export.targets import Place, Target
    from hpgo.planning.way_plans import WayPlan

_CLIPPING = "gradients are clipped at norm 1, as DeepSpeed does unless told otherwise: 0 in CONFIG turns that off"


def module(plan: WayPlan, target: Target, place: Place) -> dict[str, str]:
    """CONFIG, and with a pipeline LAYERS, PARTS, REPLICAS and a module that obeys them."""
    job = WayJob.of(plan, target, place)
    way, price, model = job.way, job.plan.price, job.model
    zero: dict[str, Any] = {"stage": way.zero}
    if way.zero >= 1:
        zero["overlap_comm"] = way.overlap
    config: dict[str, Any] = {
        "train_batch_size": price.global_batch_size,
        "train_micro_batch_size_per_gpu": way.micro_batch_size,
        "gradient_accumulation_steps": price.micro_batches,
        "gradient_clipping": 1.0,
        ("fp16" if way.precision == "fp16" else "bf16"): {"enabled": True},
        "zero_optimization": zero,
    }
    shape = (
        f"the model is yours: {model.layers} layers of width {model.hidden}, {model.heads} heads, {model.kv_heads} with"
        f" keys of their own, inner width {model.ffn}, {model.vocab} words; sequences of {price.seq} tokens"
    )
    notes = [_CLIPPING, shape]
    if way.recompute == "full":
        how = "with CHECKPOINT_INTERVAL" if way.pipeline > 1 else "in your model: torch.utils.checkpoint around each"
        notes.append(f"each layer is computed anew in backward passes, {how}")
    doc = "pass CONFIG to `deepspeed.initialize`"
    if way.pipeline > 1:
        doc += ", and a PlannedPipelineModule as its model"
    lines = [f'"""A way of training for DeepSpeed: {doc}."""', "", *(f"# {line}" for line in job.header(*notes)), ""]
    if way.pipeline == 1:
        return {place.main or "planned.py": "\n".join([*lines, f"CONFIG = {in_python(config)}"]) + "\n"}
    layers = ["embedding", *(f"layers.{at}" for at in range(model.layers)), "head"]
    ends = [*accumulate(job.counts)]
    lines += [
        *IMPORTS,
        "",
        "LAYERS = [",
        *(f"    {in_python(layer)}," for layer in layers),
        "]",
        f"PARTS = {in_python([0, *(1 + end for end in ends[:-1]), len(layers)])}",
        f"REPLICAS = {way.data}",
        f"CHECKPOINT_INTERVAL = {int(way.recompute == 'full')}",
        f"CONFIG = {in_python(config)}",
    ]
    return {place.main or "planned.py": "\n".join(lines) + "\n" + MODULE}
