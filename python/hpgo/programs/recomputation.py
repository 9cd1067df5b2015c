"""What a stage keeps of activations where a framework recomputes groups of blocks instead of the whole stage."""

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
    """Blocks that `framework` recomputes at a time where stages have so many; None if a stage is recomputed as a whole.

    >>> from hpgo.programs.frameworks import framework
    >>> [group_of(framework(name), [4, 6]) for name in ("megatron", "torchtitan", "deepspeed")]
    [2, 1, None]
    """
    if framework.recomputes == "block":
        return 1
    if framework.recomputes == "stage" or len(set(counts)) == 1:
        return None
    # Groups must divide the blocks of each stage: Megatron runs past the last one otherwise.
    return math.gcd(*counts)


def activations_bytes(profile: Profile, blocks: Blocks, stage: Stage, group: int, in_flight: int) -> float:
    """Bytes on one device: for each micro-batch in flight the inputs of its groups, and all of one group at a time.

    Layers outside the blocks are not recomputed by frameworks and keep what they save. `group` is the blocks that are
    recomputed at a time, counted from the first of the stage.
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
    # What a block gives to the next is what that one's group keeps as its input; blocks are alike.
    output = layers[mine[0][-1]].activation_bytes
    input_bytes = at_batch(profile.batch_sizes, output, stage.samples_per_replica)
    largest_bytes = max(sum(saved_bytes(layer) for block in members for layer in block) for members in groups)
    return in_flight * (saved_activation_bytes + len(groups) * input_bytes) + largest_bytes
