"""A way to share a transformer among GPUs: how many of them split what, and what is computed or kept twice."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd
from typing import TYPE_CHECKING, Any, Literal

from hpgo.base.checks import whole
from hpgo.base.divisors import divisors
from hpgo.base.errors import ArgumentError
from hpgo.base.records import check_fields
from hpgo.base.wording import counted, shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from hpgo.model.transformer import Transformer

Recompute = Literal["none", "selective", "full"]
"""What backward passes compute anew."""
Precision = Literal["bf16", "fp16", "fp8", "fp4"]
"""Of products."""
PipelineSchedule = Literal["1f1b", "interleaved_zb", "zb_v"]
"""In which order passes run."""
MOST_ZERO = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelismConfig:
    """Degrees of parallelism and what goes with them. Ranks count tensor first, then context, data, pipeline.

    Those that share experts (`expert`) are among the GPUs of a stage, and change no other degree.

    Raises ArgumentError for degrees below one, and for combinations that nobody runs.

    >>> config = ParallelismConfig(tp=4, pp=8, vpp=5, dp=2, sequence_parallel=True)
    >>> config.world_size, config.model_parallel_size, config.num_stages
    (64, 4, 40)
    """

    tp: int = 1
    """GPUs that share each matrix."""
    sequence_parallel: bool = False
    """Whether these also share what lies between matrices, by tokens (Korthikanti et al., arXiv 2205.05198)."""
    cp: int = 1
    """GPUs that share each sequence."""
    ep: int = 1
    """GPUs that share the experts of each layer, each whole ones: those beside each other in a stage, whatever else
    they share. Between them every token goes to its experts and back."""
    pp: int = 1
    first_rank_layers: int | None = None
    """Layers of the pipeline's first rank, on all of its stages; None is as many as those between have."""
    last_rank_layers: int | None = None
    """Likewise of its last rank."""
    dp: int = 1
    vpp: int = 1
    """Stages on each GPU: interleaving."""
    pp_schedule: PipelineSchedule = "1f1b"
    """In which order a pipeline's passes run: 1F1B, interleaved where a GPU has several stages; or one that splits
    backward passes, so that gradients of weights, which nobody waits for, fill the bubble (Qi et al., arXiv
    2401.10241): interleaved, or with two stages on each GPU in a V, the second ones from the last GPU to the first."""
    micro_batch_size: int = 1
    """Sequences of one micro-batch on one replica."""
    recompute: Recompute = "none"
    """What backward passes compute anew: nothing, attention's scores, or layers."""
    recompute_num_layers: int | None = None
    """How many layers of each stage, where it is layers; None is all."""
    zero_stage: int = 0
    """What data-parallel replicas share: optimizer state from 1 on, gradients from 2 on, weights at 3."""
    precision: Precision = "bf16"
    flash_attention: bool = True
    """Whether attention is one kernel, which keeps no scores (Dao et al., arXiv 2205.14135)."""
    fused_elementwise: bool = True
    """Whether operations on single values are fused: by a compiler, or by kernels made for it."""
    fused_cross_entropy: bool = True
    """Whether the loss is one kernel, which keeps logits and their gradient in 16 bits."""
    fused_adam: bool = True
    """Whether Adam is one kernel, which makes no tensors in between."""
    flatten_gradients: bool = False
    """Whether 16-bit gradients are copied into one flat tensor for the update, as DeepSpeed's optimizers have it."""
    dtensor: bool = False
    """Whether PyTorch's DTensor shares matrices and its FSDP2 what replicas hold, as torchtitan has it: inputs of
    products stay gathered, and are not gathered anew, and a layer's gradient is laid out once more for its sum."""
    overlap_dp_comm: bool = True
    """Whether gradients are summed while backward passes run, and weights gathered while others compute."""
    grad_reduce_in_bf16: bool = False
    """Whether gradients are added up, and summed over replicas, in 16 bits."""
    cpu_offload_num_layers: int = 0
    """How many layers' values wait in the host's memory from the forward pass to the backward pass."""

    def __post_init__(self) -> None:
        check_fields(self)
        for field in ("tp", "cp", "ep", "pp", "dp", "vpp", "micro_batch_size"):
            if getattr(self, field) < 1:
                whole(field, getattr(self, field))
        if self.recompute_num_layers is not None:
            whole("recompute_num_layers", self.recompute_num_layers)
        whole("zero_stage", self.zero_stage, least=0, most=MOST_ZERO)
        whole("cpu_offload_num_layers", self.cpu_offload_num_layers, least=0)
        if self.cpu_offload_num_layers and (self.pp > 1 or self.recompute == "full"):
            raise ArgumentError(
                f"cpu_offload_num_layers is {self.cpu_offload_num_layers}, beside a pipeline or layers computed anew",
                "values wait in the host's memory where there is neither: take one of them back",
            )
        for end in ("first_rank_layers", "last_rank_layers"):
            if getattr(self, end) is not None:
                whole(end, getattr(self, end))
                if self.pp == 1:
                    raise ArgumentError(f"{end} is of a pipeline, whose degree is 1", f"leave {end} out")
        if self.sequence_parallel and self.tp == 1:
            raise ArgumentError(
                "sequence parallelism needs tensor parallelism, whose degree is 1", "leave sequence_parallel out"
            )
        if self.vpp > 1 and self.pp == 1:
            raise DegreeError(
                f"{self.vpp} stages on each GPU need a pipeline, whose degree is 1", "use `vpp=1`", ("pp", "vpp")
            )
        if self.splits_backward:
            self._check_split()
        if self.recompute_num_layers is not None and self.recompute != "full":
            raise ArgumentError(
                f"recompute_num_layers is {self.recompute_num_layers}, but what is computed anew is {self.recompute}",
                "use recompute='full', whose layers it counts",
            )

    def _check_split(self) -> None:
        if self.vpp != 2 and (self.pp_schedule == "zb_v" or self.vpp == 1):
            several = "two stages" if self.pp_schedule == "zb_v" else "several stages"
            raise DegreeError(f"{self.pp_schedule} has {several} on each GPU, not {self.vpp}", "use `vpp=2`", ("vpp",))
        if self.pp_schedule == "zb_v" and (self.first_rank_layers, self.last_rank_layers) != (None, None):
            raise ArgumentError(
                "the first GPU of a V has the last stage, too", "leave first_rank_layers and last_rank_layers out"
            )

    @property
    def splits_backward(self) -> bool:
        """Whether backward passes are split into gradients of inputs and of weights."""
        return self.pp_schedule != "1f1b"

    @property
    def is_v_schedule(self) -> bool:
        """Whether the pipeline's first rank has its last stage, too, and so the embedding and the head."""
        return self.pp_schedule == "zb_v"

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Which of the pipeline's stages a rank has, in their order. Raises ArgumentError if there is no such rank.

        >>> ParallelismConfig(pp=4, vpp=2).stages_of(1), ParallelismConfig(pp=4, vpp=2, pp_schedule="zb_v").stages_of(1)
        ((1, 5), (1, 6))
        """
        rank = whole("the rank", rank, least=0, most=self.pp - 1)
        if self.is_v_schedule:
            return rank, 2 * self.pp - 1 - rank
        return tuple(range(rank, self.num_stages, self.pp))

    @property
    def model_parallel_size(self) -> int:
        """GPUs that share each layer, but for its experts."""
        return self.tp * self.cp

    @property
    def world_size(self) -> int:
        """All of them."""
        return self.model_parallel_size * self.pp * self.dp

    @property
    def num_stages(self) -> int:
        """Of the pipeline, those of interleaving included."""
        return self.pp * self.vpp

    @property
    def dp_cp_size(self) -> int:
        """GPUs that hold the same part of the weights, and sum its gradient: replicas, and parts of a sequence."""
        return self.dp * self.cp

    @property
    def expert_dp_size(self) -> int:
        """GPUs that hold the same experts, and sum their gradients."""
        return self.tp * self.dp_cp_size // self.ep

    @property
    def gathers_weights(self) -> bool:
        """Whether each pass gathers the weights of its layers; under a pipeline they stay whole for the step."""
        return self.zero_stage == MOST_ZERO and self.pp == 1 and self.dp_cp_size > 1

    @property
    def shape(self) -> ParallelismConfig:
        """All that times of a layer, of the head and of the embedding depend on; what they do not is left out.

        >>> ParallelismConfig(tp=2, pp=8, vpp=5, dp=4, zero_stage=1).shape == ParallelismConfig(tp=2)
        True
        """
        gathered = (
            self.zero_stage == MOST_ZERO
        )  # weights are, if there is no pipeline, from so many, and passes hide it
        left: dict[str, Any] = {
            "pp": min(self.pp, 2) if gathered else 1,
            "vpp": 1,
            "pp_schedule": "1f1b",
            "first_rank_layers": None,
            "last_rank_layers": None,
            "dp": self.dp if gathered else 1,
            "recompute": self.recompute if gathered or self.recompute == "selective" else "none",
            "recompute_num_layers": None,
            "zero_stage": MOST_ZERO if gathered else 0,
            "cpu_offload_num_layers": 0,
        }
        # Searches ask for thousands, most of which are shapes.
        return self if all(getattr(self, name) == value for name, value in left.items()) else replace(self, **left)

    def micro_batches(self, global_batch_size: int) -> int:
        """Of a step on each replica.

        >>> ParallelismConfig(dp=4, micro_batch_size=2).micro_batches(64)
        8
        """
        return whole("global_batch_size", global_batch_size) // (self.dp * self.micro_batch_size)

    def named(self) -> str:
        """In the letters that launchers use.

        >>> ParallelismConfig(tp=4, sequence_parallel=True, pp=8, vpp=5, dp=2, zero_stage=1).named()
        'tp 4 with sp, pp 8 x 5, dp 2, zero 1, micro-batch 1'
        """
        said = [f"tp {self.tp}{' with sp' if self.sequence_parallel else ''}"] if self.tp > 1 else []
        said += [f"cp {self.cp}"] if self.cp > 1 else []
        said += [f"ep {self.ep}"] if self.ep > 1 else []
        said += [self.named_pipeline()] if self.pp > 1 else []
        said += [f"dp {self.dp}"] if self.dp > 1 else []
        said += [f"zero {self.zero_stage}"] if self.zero_stage else []
        if self.recompute != "none":
            layers = "" if self.recompute_num_layers is None else f" of {counted(self.recompute_num_layers, 'layer')}"
            said.append(f"recompute {self.recompute}{layers}")
        said += [f"offload {counted(self.cpu_offload_num_layers, 'layer')}"] if self.cpu_offload_num_layers else []
        return ", ".join([*said, f"micro-batch {self.micro_batch_size}"])

    def named_pipeline(self) -> str:
        """The same of the pipeline alone.

        >>> ParallelismConfig(pp=8, vpp=2, last_rank_layers=6).named_pipeline()
        'pp 8 x 2 (6 layers last)'
        >>> ParallelismConfig(pp=8, vpp=2, pp_schedule="zb_v").named_pipeline()
        'pp 8 x 2 zb_v'
        """
        ends = (("first", self.first_rank_layers), ("last", self.last_rank_layers))
        uneven = ", ".join(f"{counted(layers, 'layer')} {where}" for where, layers in ends if layers is not None)
        stages = f" x {self.vpp}" if self.vpp > 1 else ""
        passes = f" {self.pp_schedule}" if self.splits_backward else ""
        return f"pp {self.pp}{stages}{passes}{f' ({uneven})' if uneven else ''}"


def stage_layers(layers: int, stages: int, *, laid_out: bool = False) -> tuple[int, ...] | None:
    """How many layers each stage has; None if they can't be shared evenly.

    All have as many; or, where the embedding and the head count as a layer each, the first and the last have one less,
    which is what Megatron-LM's `--account-for-embedding-in-pipeline-split` and its twin for the loss do. Where they may
    be `laid_out` one by one (`--pipeline-model-parallel-layout`), the last ones may also have what is left of equal
    stages, and one of them the head alone, as recipes for DeepSeek-V3 have it.

    >>> stage_layers(80, 8), stage_layers(126, 4), stage_layers(80, 7)
    ((10, 10, 10, 10, 10, 10, 10, 10), (31, 32, 32, 31), None)
    >>> stage_layers(61, 8, laid_out=True)
    (8, 8, 8, 8, 8, 8, 8, 5)
    """
    if layers % stages == 0:
        return (layers // stages,) * stages
    each, rest = divmod(layers + 2, stages)
    if rest == 0 and stages > 1:
        return (each - 1, *(each,) * (stages - 2), each - 1)
    if not laid_out:
        return None
    each = -(-layers // stages)
    counts = tuple(max(0, min(each, layers - each * at)) for at in range(stages))
    return counts if counts.count(0) <= 1 else None


def cut(
    layers: int, pipeline: int, chunks: int, ends: tuple[int | None, int | None], *, laid_out: bool = False
) -> tuple[int, ...] | None:
    """How many layers each stage has, round by round through the ranks; None if they can't be shared so.

    `ends` are layers of the first and of the last rank, which may differ from those between; a rank's stages have
    equally many: Megatron-LM's `--decoder-first-pipeline-num-layers` and its twin for the last. Without any it is
    `stage_layers`.

    >>> cut(21, 4, 1, (4, 5)), cut(20, 4, 2, (4, 4)), cut(20, 4, 2, (5, None))
    ((4, 6, 6, 5), (2, 3, 3, 2, 2, 3, 3, 2), None)
    """
    if ends == (None, None):
        return stage_layers(layers, pipeline * chunks, laid_out=laid_out)
    given = [count for count in ends if count is not None]
    between = pipeline - len(given)
    each, rest = divmod(layers - sum(given), between) if between else (1, layers - sum(given))
    first, last = (each if count is None else count for count in ends)
    ranks = (first, *(each,) * (pipeline - 2), last)
    if rest or any(count < 1 or count % chunks for count in ranks):
        return None
    return tuple(count // chunks for count in ranks) * chunks


def ends_of(layers: int, pipeline: int, chunks: int) -> Iterator[tuple[int | None, int | None]]:
    """Yield layers of the first and the last rank for `cut`: fewer than on each between, or unequal if none is between.

    >>> [*ends_of(7, 2, 1)][:3], [*ends_of(6, 4, 1)]
    ([(1, None), (2, None), (3, None)], [(1, 1)])
    """
    if pipeline == 2:
        yield from ((first, None) for first in range(chunks, layers, chunks))
    elif pipeline > 2:
        for each in range(chunks, layers // (pipeline - 2) + 1, chunks):
            ends = layers - each * (pipeline - 2)
            for first in range(max(chunks, ends - each), min(each, ends - chunks) + 1):
                if (first, ends - first) != (each, each):
                    yield None if first == each else first, None if ends - first == each else ends - first


class DegreeError(ArgumentError):
    """A degree that doesn't divide what it parts."""

    def __init__(self, message: str, hint: str = "", degrees: tuple[str, ...] = ()) -> None:
        super().__init__(message, hint)
        self.degrees = degrees
        """Arguments of `hpgo.estimate_llm` whose other values may be accepted, those to blame first."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.hint, self.degrees)


def check_degrees(model: Transformer, config: ParallelismConfig, *, seq_length: int) -> None:
    """Raises ArgumentError unless `way` parts `model`: names the degree that doesn't divide, and the nearest that do.

    >>> from hpgo.model.transformer_presets import TRANSFORMERS
    >>> check_degrees(TRANSFORMERS["llama-3-8b"], ParallelismConfig(tp=3), seq_length=8192)
    Traceback (most recent call last):
    hpgo.llm.parallelism.DegreeError: tp 3 does not divide the 32 heads of `llama-3-8b`
    """
    model_said = f"of `{model.name}`"
    for count, what in (
        (model.heads, "heads"),
        (model.kv_heads, "heads with keys and values of their own"),
        (model.ffn, "inner width of feed-forward networks"),
        (model.shared_ffn, "inner width of shared experts"),
    ):
        if count % config.tp:
            common = gcd(model.heads, model.kv_heads, model.ffn, model.shared_ffn)
            fitting = divisors(common)
            said = f"the {count} {what}" if "heads" in what else f"the {what} {count}"
            message = f"tp {config.tp} does not divide {said} {model_said}"
            raise DegreeError(message, nearest(config.tp, fitting), ("tp",))
    if config.ep > 1 and not model.experts:
        raise DegreeError(f"ep {config.ep} shares experts, of which `{model.name}` has none", "take ep 1", ("ep",))
    if model.experts and model.experts % config.ep:
        raise DegreeError(
            f"ep {config.ep} does not divide the {model.experts} experts {model_said}",
            nearest(config.ep, divisors(model.experts)),
            ("ep",),
        )
    if model.experts and config.tp > 1 and not config.sequence_parallel:
        raise ArgumentError(
            f"tp {config.tp} with experts needs sequence parallelism, so that each GPU has tokens of its own",
            "take it, or tp 1",
        )
    parts = 2 * config.cp if config.cp > 1 else 1  # each GPU has one part from the front and one from the end
    if seq_length % parts or (config.sequence_parallel and seq_length // config.cp % config.tp):
        fitting = _contexts(seq_length, config.tp)
        raise DegreeError(
            f"cp {config.cp} does not part sequences of {seq_length} tokens into {parts} for each of {config.tp}",
            nearest(config.cp, fitting) if fitting else "choose a length that is a power of two",
            ("cp", "tp") if config.tp > 1 else ("cp",),
        )
    laid_out, ends = bool(model.experts), (config.first_rank_layers, config.last_rank_layers)
    counts = cut(model.layers, config.pp, config.vpp, ends, laid_out=laid_out)
    if counts is not None and config.recompute_num_layers is not None and config.recompute_num_layers > max(counts):
        raise ArgumentError(
            f"{counted(config.recompute_num_layers, 'layer')} of each stage are to be computed anew, and none has more than"
            f" {max(counts)}",
            "leave recompute_num_layers out: that is all of them",
        )
    if counts is None:
        if ends != (None, None):
            raise ArgumentError(
                f"{config.named_pipeline()} does not part the {model.layers} layers {model_said}",
                "ranks between the ends have equally many layers, and each rank's stages, too",
            )
        fitting = _pipelines(model.layers, config.vpp, laid_out=laid_out)
        degree = f"pp {config.pp}" + (f" with {config.vpp} stages each" if config.vpp > 1 else "")
        raise DegreeError(
            f"{degree} does not divide the {model.layers} layers {model_said}, nor {model.layers + 2} with"
            " the embedding and the head as one each",
            nearest(config.pp, fitting) if fitting else "lower the number of stages on each GPU",
            ("pp", "vpp") if config.vpp > 1 else ("pp",),
        )


@lru_cache(maxsize=256)
def _pipelines(layers: int, chunks: int, *, laid_out: bool) -> list[int]:
    """Degrees of pipeline parallelism that part so many layers."""
    degrees = range(1, layers + 3)
    return [d for d in degrees if stage_layers(layers, d * chunks, laid_out=laid_out) is not None]


@lru_cache(maxsize=256)
def _contexts(seq_length: int, tensor: int) -> list[int]:
    """Degrees of context parallelism that part a sequence."""
    return [
        d for d in range(1, min(seq_length, 1024) + 1) if seq_length % (2 * d) == 0 and seq_length // d % tensor == 0
    ]


def check_batch(config: ParallelismConfig, global_batch_size: int) -> None:
    """Raises ArgumentError unless `way` parts a step's sequences into micro-batches that its schedule takes.

    >>> check_batch(ParallelismConfig(dp=4, micro_batch_size=3), 64)
    Traceback (most recent call last):
    hpgo.llm.parallelism.DegreeError: dp 4 with micro-batches of 3 does not divide a global batch of 64
    """
    each = config.dp * config.micro_batch_size
    if global_batch_size % each:
        sizes = divisors(global_batch_size)
        fitting = [size // config.dp for size in sizes if size % config.dp == 0]
        raise DegreeError(
            f"dp {config.dp} with micro-batches of {config.micro_batch_size} does not divide a global batch of"
            f" {global_batch_size}",
            f"for the micro-batch, {nearest(config.micro_batch_size, fitting)}"
            if fitting
            else f"the degree of data parallelism follows from the others: {nearest(config.dp, sizes)}",
            ("micro_batch_size", "global_batch_size", "devices"),
        )
    micro_batches = config.micro_batches(global_batch_size)
    if config.vpp > 1 and config.pp_schedule != "zb_v" and micro_batches % config.pp:
        raise DegreeError(
            f"{micro_batches} micro-batches are no multiple of pp {config.pp}, as interleaving needs",
            "lower the micro-batch or the degree of data parallelism, or take one stage on each GPU",
            ("micro_batch_size", "vpp", "global_batch_size"),
        )


def data_degree(config: ParallelismConfig, gpus: int) -> int:
    """How many replicas `gpus` make of the others' product; raises ArgumentError with the nearest number of GPUs.

    >>> data_degree(ParallelismConfig(tp=4, pp=8), 64)
    2
    """
    each = config.model_parallel_size * config.pp
    if gpus % each:
        below, beyond = gpus // each * each, (gpus // each + 1) * each
        others = "other degrees"
        if gpus % config.model_parallel_size == 0:
            others = f"another pp: {nearest(config.pp, divisors(gpus // config.model_parallel_size))}"
        used = [name for name, degree in (("pp", config.pp), ("cp", config.cp), ("tp", config.tp)) if degree > 1]
        raise DegreeError(
            f"tp {config.tp} x cp {config.cp} x pp {config.pp} is {each} GPUs, which does not divide {gpus}",
            f"take {' or '.join(str(count) for count in (below, beyond) if count)} GPUs, or {others}",
            (*used, "devices"),
        )
    if (stage := gpus // config.pp) % config.ep:
        raise DegreeError(
            f"ep {config.ep} does not divide the {counted(stage, 'GPU')} of a stage",
            nearest(config.ep, divisors(stage)),
            ("ep",),
        )
    return gpus // each


def nearest(wanted: int, fitting: Iterable[int]) -> str:
    """A hint: the nearest of `fitting` below and above.

    >>> nearest(3, [1, 2, 4, 8]), nearest(9, [1, 2])
    ('the nearest that do are 2 and 4', 'the nearest that does is 2')
    """
    known = sorted(fitting)
    around = [*[d for d in known if d < wanted][-1:], *[d for d in known if d > wanted][:1]]
    if not around:
        return f"there is none but {shown(wanted)}"
    return (
        f"the nearest that do are {around[0]} and {around[1]}"
        if len(around) > 1
        else (f"the nearest that does is {around[0]}")
    )
