"""Which ways of training a transformer a launcher runs: the rules that the search and the exports go by.

What degrees have to divide, `hpgo.ways.way` says for all launchers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from hpgo.base.records import Record
from hpgo.base.wording import counted, in_a_row, shorten
from hpgo.ways.arithmetic import TABLES, Stated, stated
from hpgo.ways.way import MOST_ZERO, Passes, Precision, Recompute, Way

if TYPE_CHECKING:
    from hpgo.model.transformer import Transformer

BY_HAND = (
    "plan for deepspeed, which runs your own model; or set what `hpgo llm estimate` names in a recipe of that model"
)
"""The hint for a model that the settings of a framework do not describe."""
FEWER_TOKENS = (
    "do without: further_tokens, num_nextn_predict_layers in a config.json, is 0 then; if positions are not learned,"
    " `--framework megatron` has them"
)
"""The hint for further tokens that a framework does not predict."""


class Lack(NamedTuple):
    """The reason why a framework runs no configuration of a model, and the way out."""

    why: str
    """In words that follow the framework's name."""
    hint: str


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
    shape: Literal["any", "llama", "megatron"] = "any"
    """Models that its settings describe: any, since the model is the user's; torchtitan's Llama; or Megatron-LM's GPT.

    `hpgo.ways.arithmetic.TABLES` has the settings for the arithmetic of the latter two.
    """
    ties: bool = True
    """Whether one matrix may both embed and predict; for models that the user brings, always."""
    ties_piped: bool = True
    """The same beside a pipeline, whose ends are on several GPUs then."""
    widens_by_zero: bool = False
    """Whether 16-bit weights have 32-bit sums of gradients only where replicas share something, or there is one."""
    context_needs_flash: bool = False
    """Whether parts of a sequence need a fused attention kernel."""
    further_tokens: bool = False
    """Whether it has layers that predict further tokens."""
    offloads: bool = False
    """Whether layers' values may wait in the host's memory."""
    overlaps_piped: bool = True
    """Whether gradients are summed while backward passes of a pipeline run."""
    sums_each_pass: bool = False
    """Whether they are summed in each pass where there is no pipeline, which is priced with ZeRO stage 3 alone."""

    def stated(self, model: Transformer) -> Stated:
        """Return the settings for the model's arithmetic, and what has none; nothing where the model is the user's."""
        return stated(TABLES.get(self.shape, {}), model)

    def lacking(self, model: Transformer) -> Lack | None:
        """Return why the framework runs no configuration of `model`; None if it runs some.

        The search and the exports both ask this, so that a plan for a framework is one that can be exported for it.
        """
        if why := self._lacking_further(model):
            return Lack(why, FEWER_TOKENS)
        why = self._lacking_shape(model) or self._lacking_arithmetic(model)
        return None if why is None else Lack(why, BY_HAND)

    def _lacking_arithmetic(self, model: Transformer) -> str | None:
        missing = self.stated(model).missing
        return f"has no setting for {in_a_row(missing, 'or')}, which `{shorten(model.name)}` needs" if missing else None

    def _lacking_shape(self, model: Transformer) -> str | None:
        if self.shape == "any":
            return None
        what = None
        if self.shape == "llama" and (model.experts or model.latent is not None):
            what = "experts" if model.experts else "latent attention"
        elif model.norms_per_layer != 2:
            what = f"{model.norms_per_layer} norms a layer"
        elif self.shape == "llama":
            odd = not model.gated or model.centred_norms or model.positions
            biases = model.attention_bias != "none" or model.ffn_bias
            what = "layers other than Llama's" if odd else "biases" if biases else None
            what = what or ("sliding windows" if model.window_layers else None)
            what = what or ("tied embeddings" if model.tied and not self.ties else None)
        elif model.latent is None and (model.attention_bias == "all") != model.ffn_bias:
            what = "biases in attention or in feed-forward networks alone"
        elif model.ffn_bias and model.attention_bias == "qkv":
            what = "biases in feed-forward networks, but not in the output of attention"
        return f"has no settings for {what}, which `{shorten(model.name)}` has" if what else None

    def _lacking_further(self, model: Transformer) -> str | None:
        if not model.further_tokens:
            return None
        if not self.further_tokens:
            layers = counted(model.further_tokens, "layer")
            return f"predicts no further tokens here, and `{model.name}` has {layers} for them"
        if model.positions:
            return f"predicts no further tokens of models that learn positions, and `{model.name}` does both"
        return None

    def broken(self, way: Way, *, micro_batches: int, experts: bool = False, tied: bool = False) -> str | None:
        """Why the launcher does not run `way`, in words that go on after its name; None if it does.

        `experts` and `tied` are the model's: whether layers hold some, and whether one matrix embeds and predicts.

        >>> MEGATRON.broken(Way(data=8, zero=3), micro_batches=1)
        'shares what replicas hold as zero 0 or 1, not 3'
        """
        if why := self.broken_degrees(way, tied=tied):
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

    def broken_degrees(self, way: Way, *, tied: bool = False) -> str | None:
        """As `broken`, of all but what replicas share."""
        if way.pipeline > 1 and tied and not self.ties_piped:
            return f"has no pipeline of models with tied embeddings, and pp is {way.pipeline}"
        if way.tensor > 1 and not self.tensor:
            return f"has no tensor parallelism here, and tp is {way.tensor}"
        if way.context > 1 and not self.context:
            return f"has no context parallelism here, and cp is {way.context}"
        if way.context > 1 and not way.flash and self.context_needs_flash:
            return f"shares sequences only with fused attention, and cp is {way.context}"
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
        widens = self.widens_by_zero and way.precision == "bf16" and not way.narrow_gradients
        zeros = tuple(zero for zero in (self.zeros_piped if way.pipeline > 1 else self.zeros) if zero or not widens)
        if way.pipeline > 1:
            return zeros
        return tuple(zero for zero in zeros if zero == MOST_ZERO or not self.sums_each_pass or micro_batches == 1)

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
    shape="megatron",
    context_needs_flash=True,
)
"""Its FSDP, which shares more, excludes much else, and is not looked for.

Its attention is that of Transformer Engine, whose `UnfusedDotProductAttention` has no context parallelism
(`transformer_engine/pytorch/attention/dot_product_attention/utils.py`, 2.9 to 2.18).
"""
TORCHTITAN = Rules(
    zeros=(2, 3),
    zeros_piped=(2,),
    precisions=("bf16",),
    schedules=("1f1b", "interleaved_zb", "zb_v"),
    dtensor=True,
    overlaps_piped=False,
    sums_each_pass=True,
    shape="llama",
    ties_piped=False,
)
"""Replicas are FSDP's: weights stay gathered from forward to backward, or are gathered in each; beside a pipeline they
stay gathered for the step. It refuses to compile layers whose backward passes are split; DualPipeV, which it also has,
runs the halves of its pairs one after the other, and so has nothing for its memory. Its Llamas and Qwen3s tie
embeddings without a pipeline (`Decoder.Config.update_from_config`, 0.3.0)."""
TORCHTITAN_02 = replace(TORCHTITAN, ties=False)
"""Version 0.2 ties the matrices of Qwen3 alone, which it takes by name."""
DEEPSPEED = Rules(
    zeros=(0, 1, 2, 3),
    zeros_piped=(0, 1),
    precisions=("bf16", "fp16"),
    tensor=False,
    context=False,
    interleaves=False,
    flat_update=True,
    narrow_gradients=True,
    widens_by_zero=True,
    overlaps_piped=False,
)
"""Its engines split what a user's own layers compute by nothing but samples and stages. They refuse 32-bit sums of
gradients of 16-bit weights without ZeRO (`DeepSpeedEngine._do_optimizer_sanity_check`, 0.19.8)."""
