"""Activation memory of a stage if a framework recomputes groups of blocks instead of the whole stage."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hpgo._core import at_batch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpgo.model.profile import Profile
    from hpgo.programs.blocks import Blocks
    from hpgo.programs.frameworks import Framework
    from hpgo.programs.stages import Stage


def group_of(framework: Framework, counts: Sequence[int]) -> int | None:
    """Return the number of blocks that `framework` recomputes at a time, if stages have `counts` blocks.

    None means whole stages.

    >>> from hpgo.programs.frameworks import framework
    >>> [group_of(framework(name), [4, 6]) for name in ("megatron", "torchtitan", "deepspeed")]
    [2, 1, None]
    """
    if framework.recomputes == "block":
        return 1
    # With equal counts, the group is the whole stage.
    if framework.recomputes == "stage" or len(set(counts)) == 1:
        return None
    # The group size must divide the number of blocks of each stage, or Megatron-LM runs past the last block.
    return math.gcd(*counts)


def activations_bytes(profile: Profile, blocks: Blocks, stage: Stage, group: int, in_flight: int) -> float:
    """Return the activation bytes on one device.

    These are the inputs of all groups for each micro-batch in flight, and all activations of the largest group, which a
    backward pass restores. Frameworks do not recompute layers outside the blocks, so these keep what they save. `group`
    is the number of blocks that are recomputed at a time, counted from the first block of the stage.
    """
    layers = {layer.id: layer for layer in profile.layers}
    here = set(stage.layers)

    def saved_bytes(layer: str) -> float:
        values = layers[layer].saved_bytes or layers[layer].activation_bytes
        return at_batch(profile.batch_sizes, values, stage.samples_per_replica)

    mine = [block for block in blocks.blocks if here.issuperset(block)]
    groups = [mine[at : at + group] for at in range(0, len(mine), group)]
    recomputed = {layer for block in mine for layer in block}
    saved_activation_bytes = sum(saved_bytes(layer) for layer in stage.layers if layer not in recomputed)
    if not groups:
        return in_flight * saved_activation_bytes
    # The output of a block is the input that the next group keeps. All blocks are equal, so any block's output will do.
    output = layers[mine[0][-1]].activation_bytes
    input_bytes = at_batch(profile.batch_sizes, output, stage.samples_per_replica)
    largest_bytes = max(sum(saved_bytes(layer) for block in members for layer in block) for members in groups)
    return in_flight * (saved_activation_bytes + len(groups) * input_bytes) + largest_bytes
