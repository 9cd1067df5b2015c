"""Which ways of training a transformer a launcher runs: the rules that the search and the exports go by.

What degrees have to divide, `hpgo.ways.way` says for all launchers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hpgo.base.records import Record
from hpgo.base.wording import counted, in_a_row
from hpgo.ways.way import MOST_ZERO, Passes, Precision, Recompute, Way

if TYPE_CHECKING:
    from hpgo.model.transformer import Transformer

FEWER_TOKENS = (
    "do without: further_tokens, num_nextn_predict_layers in a config.json, is 0 then; if positions are not learned,"
    " `--for megatron` has them"
)
"""The way out of what is lacking."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules(Record):
    """What one launcher runs of ways."""

    zeros: tuple[int, ...]
    """What replicas may share where there is no pipeline, as `Way.zero` counts it."""
    zeros_piped: tuple[int, ...]
    """The same beside a pipeline."""
    precisions: tuple[Precision, ...]
    tensor: bool = True
    """Whether GPUs may share a matrix."""
    context: bool = True
    """Whether they may share a sequence."""
    expert: bool = False
    """Whether they may share the experts of a layer."""
    interleaves: bool = True
    """Whether a GPU may have several stages."""
    uneven: bool = False
    """Whether the first and the last rank of a pipeline may have other numbers of layers than those between."""
    schedules: tuple[Passes, ...] = ("1f1b",)
    """In which orders passes of a pipeline may run."""
    recompute: tuple[Recompute, ...] = ("none", "full")
    """What backward passes may compute anew."""
    recompute_layers: bool = False
    """Whether that may be some layers of each stage and not others."""
    narrow_gradients: bool = False
    """Whether gradients may add up in 16 bits."""
    flat_update: bool = False
    """Whether its optimizers copy 16-bit gradients into one flat tensor."""
    dtensor: bool = False
    """Whether it shares matrices and replicas by PyTorch's DTensor and FSDP2."""
    further_tokens: bool = False
    """Whether it has layers that predict further tokens."""
    offloads: bool = False
    """Whether layers' values may wait in the host's memory."""
    overlaps_piped: bool = True
    """Whether gradients are summed while backward passes of a pipeline run."""
    sums_each_pass: bool = False
    """Whether they are summed in each pass where there is no pipeline, which is priced with ZeRO stage 3 alone."""

    def lacking(self, model: Transformer) -> str | None:
        """Why the launcher runs no way of `model`, in words that go on after its name; None if it runs some."""
        if not model.further_tokens:
            return None
        if not self.further_tokens:
            layers = counted(model.further_tokens, "layer")
            return f"predicts no further tokens here, and `{model.name}` has {layers} for them"
        if model.positions:
            return f"predicts no further tokens of models that learn positions, and `{model.name}` does both"
        return None

    def broken(self, way: Way, *, micro_batches: int, experts: bool = False) -> str | None:
        """Why the launcher does not run `way`, in words that go on after its name; None if it does.

        >>> MEGATRON.broken(Way(data=8, zero=3), micro_batches=1)
        'shares what replicas hold as zero 0 or 1, not 3'
        """
        if why := self.broken_degrees(way):
            return why
        if way.zero in self.zeros_of(way, micro_batches=micro_batches, experts=experts):
            return None
        if way.zero in (known := self.zeros_of(way, micro_batches=1, experts=experts)):
            return (
                f"sums gradients in each of {micro_batches} passes where there is no pipeline, which is not priced with"
                f" zero {way.zero}"
            )
        beside = " beside a pipeline" if way.pipeline > 1 and self.zeros != self.zeros_piped else ""
        return f"shares what replicas hold{beside} as zero {in_a_row(known, 'or')}, not {way.zero}"

    def broken_degrees(self, way: Way) -> str | None:
        """As `broken`, of all but what replicas share."""
        if way.tensor > 1 and not self.tensor:
            return f"has no tensor parallelism here, and tp is {way.tensor}"
        if way.context > 1 and not self.context:
            return f"has no context parallelism here, and cp is {way.context}"
        if way.expert > 1 and not self.expert:
            return f"has no expert parallelism here, and ep is {way.expert}"
        if way.chunks > 1 and not self.interleaves:
            return f"has one stage on each GPU, and vpp is {way.chunks}"
        if way.schedule not in self.schedules:
            return f"runs passes as {in_a_row(self.schedules, 'or')}, not as {way.schedule}"
        if way.splits and way.fused:
            return f"compiles no layers whose backward passes are split, as {way.schedule} has them, and the way does"
        if way.splits and way.recompute == "full":
            return (
                f"computes a layer anew for each of its weights where backward passes are split, as {way.schedule} has"
                " them, which is not priced"
            )
        if (way.first_layers, way.last_layers) != (None, None) and not self.uneven:
            return f"has as many layers on each rank, and not {way.named_pipeline()}"
        if way.recompute not in self.recompute:
            return f"computes anew {in_a_row(self.recompute, 'or')}, not {way.recompute}"
        if way.recompute_layers is not None and not self.recompute_layers:
            return f"computes anew all layers or none, not {way.recompute_layers} of each stage"
        if way.narrow_gradients and not self.narrow_gradients:
            return "adds gradients up in 32 bits here, not in 16"
        if way.offload_layers and not self.offloads:
            return f"keeps what passes leave on GPUs here, not that of {way.offload_layers} layers in the host's memory"
        if way.precision not in self.precisions:
            return f"computes in {in_a_row(self.precisions, 'or')} here, not in {way.precision}"
        return None

    def zeros_of(self, way: Way, *, micro_batches: int, experts: bool = False) -> tuple[int, ...]:
        """What replicas of a way may share, of that which is priced: nothing where there is but one of everything.

        `experts` says whether layers hold some, of which there may be several where all else is there once.

        >>> [TORCHTITAN.zeros_of(Way(data=2), micro_batches=count) for count in (1, 4)]
        [(2, 3), (3,)]
        """
        if max(way.shards, way.expert_shards if experts else 1) == 1:
            return (0,)
        if way.pipeline > 1:
            return self.zeros_piped
        return tuple(zero for zero in self.zeros if zero == MOST_ZERO or not self.sums_each_pass or micro_batches == 1)

    def as_run(self, way: Way) -> Way:
        """`way` with gradients summed when the launcher does, and fused operations where it compiles layers.

        >>> TORCHTITAN.as_run(Way(pipeline=2)).overlap, TORCHTITAN.as_run(Way(data=2)).overlap
        (False, True)
        """
        overlap = way.overlap and (self.overlaps_piped or way.pipeline == 1)
        fused = way.fused and not way.splits
        return way if (overlap, fused) == (way.overlap, way.fused) else replace(way, overlap=overlap, fused=fused)


MEGATRON = Rules(
    zeros=(0, 1),
    zeros_piped=(0, 1),
    precisions=("bf16", "fp16", "fp8", "fp4"),
    expert=True,
    uneven=True,
    recompute=("none", "selective", "full"),
    recompute_layers=True,
    narrow_gradients=True,
    further_tokens=True,
    offloads=True,
)
"""Its FSDP, which shares more, excludes much else, and is not looked for."""
TORCHTITAN = Rules(
    zeros=(2, 3),
    zeros_piped=(2,),
    precisions=("bf16",),
    schedules=("1f1b", "interleaved_zb", "zb_v"),
    dtensor=True,
    overlaps_piped=False,
    sums_each_pass=True,
)
"""Replicas are FSDP's: weights stay gathered from forward to backward, or are gathered in each; beside a pipeline they
stay gathered for the step. It refuses to compile layers whose backward passes are split; DualPipeV, which it also has,
runs the halves of its pairs one after the other, and so has nothing for its memory."""
DEEPSPEED = Rules(
    zeros=(0, 1, 2, 3),
    zeros_piped=(0, 1),
    precisions=("bf16", "fp16"),
    tensor=False,
    context=False,
    interleaves=False,
    flat_update=True,
    overlaps_piped=False,
)
"""Its engines split what a user's own layers compute by nothing but samples and stages."""
