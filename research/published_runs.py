"""GPU-hours of published training runs against the predictions of `hpgo llm size`: the table in docs/cost.md.

    python research/published_runs.py docs/cost.md

It takes about a minute. Each prediction is of the fastest configuration on the number of GPUs of the run, with the
default failures and checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from math import ceil
from statistics import quantiles
from typing import TYPE_CHECKING

import pages

import hpgo
from hpgo.base.tables import markdown
from hpgo.base.units import format_count
from hpgo.hardware.cluster import Cluster
from hpgo.llm.goodput import HOUR_S, Failures
from hpgo.llm.search import plan_llm
from hpgo.model.formats.transformers import transformer_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

    from hpgo.llm.parallelism import Precision
    from hpgo.model.transformer import Transformer

_LLAMA_1 = "Touvron et al., arXiv 2302.13971, table 15"
_LLAMA_2 = "Touvron et al., arXiv 2307.09288, table 2"
_LLAMA_3 = "model card of Llama 3"
_LLAMA_31 = "model card of Llama 3.1"
_LLAMA_32 = "model card of Llama 3.2"
_LLAMA_4 = "model card of Llama 4"
_DEEPSEEK_V2 = "DeepSeek-AI, arXiv 2405.04434, section 3.2.3"
_OLMO_3 = "README of OLMo-core; hours: Ai2 to engineered.at, 2025-12-01"
_GPUS, _BATCH = "GPUs", "batch"
ASSUMED = "†"
"""Mark behind a value that no source states."""


@dataclass(frozen=True)
class Run:
    """A published run."""

    name: str
    model: Transformer | str
    kind: str
    gpus: int
    tokens: float
    seq_length: int
    global_batch_size: int
    """Sequences per step, after the batch has reached its final size."""
    gpu_hours: float
    source: str
    assumed: tuple[str, ...] = ()
    """What no source states: the number of `GPUs`, or the `batch`."""
    precision: Precision = "bf16"
    is_rate: bool = False
    """Whether the hours follow from the time of a step or the tokens per second. They then leave out what a run loses
    between its steps."""

    def predicted_gpu_hours(self) -> float:
        """Return the GPU-hours that `hpgo llm size` predicts for the same GPUs, without failures for a rate."""
        estimate = plan_llm(
            self.model, cluster_of(self.kind, self.gpus), global_batch_size=self.global_batch_size, devices=self.gpus,
            seq_length=self.seq_length, precision=self.precision, top=1,
        ).fastest  # fmt: skip
        steps = ceil(self.tokens / (self.global_batch_size * self.seq_length))
        goodput = 1.0 if self.is_rate else Failures().goodput(estimate.gpus)
        return steps * estimate.step_s / goodput / HOUR_S * self.gpus


@cache
def cluster_of(kind: str, gpus: int) -> Cluster:
    """Return the nodes of a run, all of which have eight GPUs."""
    if kind != "h800":
        return Cluster.preset(f"{kind}:{gpus // 8}")
    return Cluster.from_document(
        {
            "hpgo_cluster": 1, "name": "h800",
            "types": {"H800": {"like": "H100-80GB", "source": "H100 datasheet; NVLink 400 GB/s in both directions"}},
            "nodes": [{"count": gpus // 8, "devices": 8, "type": "H800", "memory": "80 GB"}],
            "intra": {"bandwidth": "200 GB/s", "latency": "3.4 us"},
            "inter": {"bandwidth": "50 GB/s", "collective": "400 GB/s", "latency": "9.6 us"},
        },
        file="h800.yaml",
    )  # fmt: skip


def _shape(name: str, **changes: Any) -> Transformer:
    """Return a model without values that change results but no costs, since Megatron-LM has no settings for some."""
    return replace(transformer_of(name), arithmetic=None, **changes)


# Shapes that hpgo has no name for, or that Megatron-LM has no settings for, from the papers in `RUNS` or the
# `config.json` of the model. BLOOM and OLMo 3 differ by norms that cost next to nothing.
_BLOOM = hpgo.Transformer(
    name="bloom", layers=70, hidden=14336, heads=112, kv_heads=112, head_dim=128, ffn=57344, gated=False, vocab=250880,
    tied=True, attention_bias="all", ffn_bias=True, centred_norms=True,
)  # fmt: skip
_OLMO_3_7B = hpgo.Transformer(
    name="olmo-3-7b", layers=32, hidden=4096, heads=32, kv_heads=32, head_dim=128, ffn=11008, vocab=100278,
    head_norms=True, window=4096, window_layers=tuple(layer for layer in range(32) if layer % 4 != 3),
)  # fmt: skip
_OLMO_3_32B = hpgo.Transformer(
    name="olmo-3-32b", layers=64, hidden=5120, heads=40, kv_heads=8, head_dim=128, ffn=27648, vocab=100278,
    head_norms=True, window=4096, window_layers=tuple(layer for layer in range(64) if layer % 4 != 3),
)  # fmt: skip
_BLOOMBERG = hpgo.Transformer(
    name="bloomberggpt", layers=70, hidden=7680, heads=40, kv_heads=40, head_dim=192, ffn=30720, gated=False,
    vocab=131072, tied=True, attention_bias="all", ffn_bias=True, centred_norms=True,
)  # fmt: skip
_DEEPSEEK_67B = hpgo.Transformer(
    name="deepseek-67b", layers=95, hidden=8192, heads=64, kv_heads=8, head_dim=128, ffn=22016, vocab=102400
)
_FALCON_180B = hpgo.Transformer(
    name="falcon-180b", layers=80, hidden=14848, heads=232, kv_heads=8, head_dim=64, ffn=59392, gated=False,
    vocab=65024, centred_norms=True,
)  # fmt: skip
_GLM_130B = hpgo.Transformer(
    name="glm-130b", layers=70, hidden=12288, heads=96, kv_heads=96, head_dim=128, ffn=32768, vocab=150528, tied=True,
    attention_bias="all", ffn_bias=True, centred_norms=True,
)  # fmt: skip
_NEMOTRON_15B = hpgo.Transformer(
    name="nemotron-4-15b", layers=32, hidden=6144, heads=48, kv_heads=8, head_dim=128, ffn=24576, gated=False,
    vocab=256000, centred_norms=True,
)  # fmt: skip
_NEMOTRON_340B = hpgo.Transformer(
    name="nemotron-4-340b", layers=96, hidden=18432, heads=96, kv_heads=8, head_dim=192, ffn=73728, gated=False,
    vocab=256000, centred_norms=True,
)  # fmt: skip
# Without biases, which this one has in attention and in the LM head only.
_PHI_3_MOE = _shape("microsoft/Phi-3.5-MoE-instruct", attention_bias="none", after=None)
_PHI_4_MINI = hpgo.Transformer(
    name="phi-4-mini", layers=32, hidden=3072, heads=24, kv_heads=8, head_dim=128, ffn=8192, vocab=200064, tied=True
)
# Decoders of Llama 4. Chunks of 8,192 tokens, to which attention is limited in most layers, are whole sequences here.
_SCOUT = hpgo.Transformer(
    name="llama-4-scout", layers=48, hidden=5120, heads=40, kv_heads=8, head_dim=128, ffn=0, vocab=202048, experts=16,
    experts_per_token=1, expert_ffn=8192, shared_ffn=8192,
)  # fmt: skip
_MAVERICK = hpgo.Transformer(
    name="llama-4-maverick", layers=48, hidden=5120, heads=40, kv_heads=8, head_dim=128, ffn=16384, vocab=202048,
    experts=128, experts_per_token=1, expert_ffn=8192, shared_ffn=8192, dense_layers=tuple(range(0, 48, 2)),
)  # fmt: skip
_DAY_H = 24
RUNS = (
    Run("LLaMA 7B", "huggyllama/llama-7b", "a100", 2048, 1e12, 2048, 2048, 82_432, _LLAMA_1),
    Run("LLaMA 13B", "huggyllama/llama-13b", "a100", 2048, 1e12, 2048, 2048, 135_168, _LLAMA_1),
    Run("LLaMA 33B", "huggyllama/llama-30b", "a100", 2048, 1.4e12, 2048, 2048, 530_432, _LLAMA_1),
    Run("LLaMA 65B", "huggyllama/llama-65b", "a100", 2048, 1.4e12, 2048, 2048, 1_022_362, _LLAMA_1),
    Run("Llama 2 7B", "llama-2-7b", "a100", 2048, 2e12, 4096, 1024, 184_320, _LLAMA_2, (_GPUS,)),
    Run("Llama 2 13B", "llama-2-13b", "a100", 2048, 2e12, 4096, 1024, 368_640, _LLAMA_2, (_GPUS,)),
    Run("Llama 2 34B", "codellama/CodeLlama-34b-hf", "a100", 2048, 2e12, 4096, 1024, 1_038_336, _LLAMA_2, (_GPUS,)),
    Run("Llama 2 70B", "llama-2-70b", "a100", 2048, 2e12, 4096, 1024, 1_720_320, _LLAMA_2, (_GPUS,)),
    Run("Llama 3 8B", "llama-3-8b", "h100", 2048, 15e12, 8192, 2048, 1.3e6, _LLAMA_3, (_GPUS, _BATCH)),
    Run("Llama 3 70B", "llama-3-70b", "h100", 8192, 15e12, 8192, 2048, 6.4e6, _LLAMA_3, (_GPUS, _BATCH)),
    Run("Llama 3.1 8B", "llama-3-8b", "h100", 2048, 15e12, 8192, 2048, 1.46e6, _LLAMA_31, (_GPUS, _BATCH)),
    Run("Llama 3.1 70B", "llama-3-70b", "h100", 8192, 15e12, 8192, 2048, 7.0e6, _LLAMA_31, (_GPUS, _BATCH)),
    Run("Llama 3.1 405B", "llama-3.1-405b", "h100", 16384, 15e12, 8192, 2048, 30.84e6, _LLAMA_31),
    Run("Llama 3.2 1B", "meta-llama/Llama-3.2-1B", "h100", 512, 9e12, 8192, 512, 370e3, _LLAMA_32, (_GPUS, _BATCH)),
    Run("Llama 3.2 3B", "meta-llama/Llama-3.2-3B", "h100", 512, 9e12, 8192, 512, 460e3, _LLAMA_32, (_GPUS, _BATCH)),
    Run("Llama 4 Scout", _SCOUT, "h100", 8192, 40e12, 8192, 2048, 5.0e6, _LLAMA_4, (_GPUS, _BATCH)),
    Run("Llama 4 Maverick", _MAVERICK, "h100", 8192, 22e12, 8192, 2048, 2.38e6, _LLAMA_4, (_GPUS, _BATCH)),
    # 96 nodes during 60 days.
    Run("GLM-130B", _GLM_130B, "a100-40", 768, 400e9, 2048, 4224, 768 * 60 * _DAY_H, "README of GLM-130B"),
    Run("BLOOM 176B", _BLOOM, "a100", 384, 366e9, 2048, 2048, 1_082_990,
        "Scao et al., arXiv 2211.05100, section 3.4.1"),
    Run("BloombergGPT 50B", _BLOOMBERG, "a100-40", 512, 569e9, 2048, 2048, 512 * 53 * _DAY_H,
        "Wu et al., arXiv 2303.17564, section 4"),
    Run("StarCoderBase 15B", "bigcode/starcoderbase", "a100", 512, 1e12, 8192, 512, 320_256,
        "Li et al., arXiv 2305.06161, section 5"),
    Run("MPT-7B", _shape("mosaicml/mpt-7b"), "a100-40", 440, 1e12, 2048, 1760, 440 * 9.5 * _DAY_H,
        "model card of MPT-7B"),
    Run("Falcon 180B", _FALCON_180B, "a100-40", 4096, 3.5e12, 2048, 2048, 7e6,
        "huggingface.co/blog/falcon-180b", (_GPUS, _BATCH)),
    Run("SmolLM3 3B", "HuggingFaceTB/SmolLM3-3B-Base", "h100", 384, 11.2e12, 4096, 576, 384 * 24 * _DAY_H,
        "huggingface.co/blog/smollm3"),
    Run("OLMo 3 7B", _OLMO_3_7B, "h100", 512, 5.93e12, 8192, 512, 234e3, _OLMO_3),
    Run("OLMo 3 32B", _OLMO_3_32B, "h100", 1024, 5.5e12, 8192, 1024, 1.05e6, _OLMO_3),
    Run("Phi-3 mini 3.8B", "microsoft/Phi-3-mini-4k-instruct", "h100", 512, 4.9e12, 4096, 1024, 512 * 10 * _DAY_H,
        "model card of Phi-3 mini", (_BATCH,)),
    Run("Phi-3 medium 14B", "microsoft/Phi-3-medium-4k-instruct", "h100", 512, 4.8e12, 4096, 1024, 512 * 42 * _DAY_H,
        "model card of Phi-3 medium", (_BATCH,)),
    Run("Phi-3.5 MoE", _PHI_3_MOE, "h100", 512, 4.9e12, 4096, 1024, 512 * 23 * _DAY_H,
        "model card of Phi-3.5 MoE", (_BATCH,)),
    Run("Phi-4 14B", "microsoft/phi-4", "h100", 1920, 9.8e12, 4096, 5760, 1920 * 21 * _DAY_H,
        "model card of Phi-4; batch: arXiv 2412.08905, section 3"),
    Run("Phi-4 mini 3.8B", _PHI_4_MINI, "a100", 512, 5e12, 4096, 1024, 512 * 21 * _DAY_H, "model card of Phi-4 mini",
        (_BATCH,)),
    *(
        Run(f"Pythia {size}", _shape(f"EleutherAI/pythia-{size.lower()}"), "a100-40", gpus, 300e9, 2048, 1024,
            gpu_hours, "Biderman et al., arXiv 2304.01373, table 5", is_rate=True)
        for size, gpus, gpu_hours in (
            ("1B", 64, 4830), ("1.4B", 64, 7120), ("2.8B", 64, 14_240), ("6.9B", 128, 33_500), ("12B", 256, 72_300)
        )
    ),
    # 24,000 tokens/s on each GPU.
    Run("TinyLlama 1.1B", "TinyLlama/TinyLlama_v1.1", "a100-40", 16, 3e12, 2048, 1024, 3e12 / 24_000 / 3600,
        "README of TinyLlama", is_rate=True),
    # The last of three stages: 7.6 T tokens in 11.9 days.
    Run("Nemotron-4 15B", _NEMOTRON_15B, "h100", 2304, 7.6e12, 4096, 1152, 2304 * 11.9 * _DAY_H,
        "Parmar et al., arXiv 2402.16819, table 2", is_rate=True),
    # The last of three stages: 8.0 s for each step.
    Run("Nemotron-4 340B", _NEMOTRON_340B, "h100", 6144, 7.6e12, 4096, 2304, 7.6e12 / (2304 * 4096) * 8.0 / 3600 * 6144,
        "NVIDIA, arXiv 2406.11704, table 2", is_rate=True),
    # Hours for 1 T tokens.
    Run("DeepSeek 67B", _DEEPSEEK_67B, "h800", 2048, 2e12, 4096, 4608, 2 * 300_600, _DEEPSEEK_V2, (_GPUS,),
        is_rate=True),
    Run("DeepSeek-V2 236B", _shape("deepseek-v2"), "h800", 2048, 8.1e12, 4096, 9216, 8.1 * 172_800, _DEEPSEEK_V2,
        (_GPUS,), is_rate=True),
    Run("DeepSeek-V3 671B", "deepseek-v3", "h800", 2048, 14.8e12, 4096, 15360, 2.664e6,
        "DeepSeek-AI, arXiv 2412.19437, table 1", precision="fp8", is_rate=True),
)  # fmt: skip


def ratios(runs: Iterable[Run]) -> list[float]:
    """Return published over predicted GPU-hours of each run."""
    return [run.gpu_hours / run.predicted_gpu_hours() for run in runs]


def summary(found: Sequence[float]) -> tuple[int, float, float, float]:
    """Return the number of ratios, their lower quartile, median and upper quartile."""
    low, middle, high = quantiles(found, n=4, method="inclusive")
    return len(found), low, middle, high


def row(run: Run, ratio: float) -> tuple[str, ...]:
    """Return the cells of a run in the table, for its published over its predicted GPU-hours."""
    gpus, batch = (ASSUMED if what in run.assumed else "" for what in (_GPUS, _BATCH))
    precision = "" if run.precision == "bf16" else f" in {run.precision}"
    return (
        run.name, f"{run.gpus:,}{gpus} {run.kind}{precision}", format_count(run.tokens),
        f"{format_count(float(f'{run.global_batch_size * run.seq_length:.2g}'))}{batch}", _hours(run.gpu_hours),
        _hours(run.gpu_hours / ratio), f"{ratio:.2f}", "steps" if run.is_rate else "run", run.source,
    )  # fmt: skip


def _hours(hours: float) -> str:
    return format_count(float(f"{hours:.3g}"))


def sentence(of: str, found: Sequence[float]) -> str:
    """Return the quartiles of ratios as a sentence of the page."""
    count, low, middle, high = summary(found)
    return f"Of {count} {of}, half are from {low:.2f} to {high:.2f}, and the median is {middle:.2f}."


def table() -> str:
    """Return the table as Markdown, and the quartiles below it."""
    found = list(zip(RUNS, ratios(RUNS), strict=True))
    lines = markdown(
        ["run", "GPUs", "tokens", "batch", "published GPU-hours", "predicted", "published / predicted", "hours of",
         "source"],
        [row(run, ratio) for run, ratio in found],
    )  # fmt: skip
    runs, rates = ([ratio for run, ratio in found if run.is_rate == is_rate] for is_rate in (False, True))
    return "\n".join([*lines, "", sentence("ratios of whole runs", runs), sentence("ratios of steps", rates)])


if __name__ == "__main__":
    pages.tell("published-runs", table, __doc__)
