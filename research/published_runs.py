"""GPU-hours of published training runs against the predictions of `hpgo llm size`: the table in docs/cost.md.

    python research/published_runs.py docs/cost.md

It takes about 10 s. Each prediction is of the fastest configuration on the number of GPUs of the run, with the default
failures and checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import quantiles
from typing import TYPE_CHECKING

import pages

import hpgo
from hpgo.base.tables import markdown
from hpgo.base.units import format_count
from hpgo.llm.size import size_llm

if TYPE_CHECKING:
    from hpgo.model.transformer import Transformer

_LLAMA_1 = "Touvron et al., arXiv 2302.13971"
_LLAMA_2 = "model card of Llama 2"
_LLAMA_3 = "model card of Llama 3"
_LLAMA_31 = "model card of Llama 3.1"


@dataclass(frozen=True)
class Run:
    """A published run."""

    name: str
    model: Transformer | str
    kind: str
    gpus: int
    tokens: float
    seq_length: int
    batch_tokens: int
    gpu_hours: float
    source: str

    def predicted_gpu_hours(self) -> float:
        """Return the GPU-hours that `hpgo llm size` predicts for the same GPUs."""
        found = size_llm(
            self.model, tokens=self.tokens, on=[self.kind], gpus=(self.gpus, self.gpus), seq_length=self.seq_length,
            global_batch_size=self.batch_tokens // self.seq_length, is_exact_batch=True,
        )  # fmt: skip
        (point,) = found.points
        return point.gpu_hours


_LLAMA_65B = hpgo.Transformer(
    name="llama-65b", layers=80, hidden=8192, heads=64, kv_heads=64, head_dim=128, ffn=22016, vocab=32000
)
_4M, _16M = 2**22, 2**24
RUNS = (
    Run("LLaMA 13B", "llama-2-13b", "a100", 2048, 1e12, 2048, _4M, 135_168, f"{_LLAMA_1}, table 15"),
    # 380 tokens/s on each of 2,048 GPUs.
    Run("LLaMA 65B", _LLAMA_65B, "a100", 2048, 1.4e12, 2048, _4M, 1.4e12 / 380 / 3600, f"{_LLAMA_1}, section 2.4"),
    Run("Llama 2 7B", "llama-2-7b", "a100", 2048, 2e12, 4096, _4M, 184_320, _LLAMA_2),
    Run("Llama 2 13B", "llama-2-13b", "a100", 2048, 2e12, 4096, _4M, 368_640, _LLAMA_2),
    Run("Llama 2 70B", "llama-2-70b", "a100", 2048, 2e12, 4096, _4M, 1_720_320, _LLAMA_2),
    Run("Llama 3 8B", "llama-3-8b", "h100", 2048, 15e12, 8192, _16M, 1.3e6, _LLAMA_3),
    Run("Llama 3 70B", "llama-3-70b", "h100", 8192, 15e12, 8192, _16M, 6.4e6, _LLAMA_3),
    Run("Llama 3.1 8B", "llama-3-8b", "h100", 2048, 15e12, 8192, _16M, 1.46e6, _LLAMA_31),
    Run("Llama 3.1 70B", "llama-3-70b", "h100", 8192, 15e12, 8192, _16M, 7.0e6, _LLAMA_31),
    Run("Llama 3.1 405B", "llama-3.1-405b", "h100", 16384, 15e12, 8192, _16M, 30.84e6, _LLAMA_31),
)


def ratios() -> list[float]:
    """Return published over predicted GPU-hours of each run."""
    return [run.gpu_hours / run.predicted_gpu_hours() for run in RUNS]


def summary(found: list[float]) -> tuple[int, float, float, float]:
    """Return the number of ratios, their lower quartile, median and upper quartile."""
    low, middle, high = quantiles(found, n=4, method="inclusive")
    return len(found), low, middle, high


def table() -> str:
    """Return the table as Markdown."""
    rows = [
        (run.name, f"{run.gpus:,} {run.kind}", format_count(run.tokens), format_count(float(f"{run.gpu_hours:.3g}")),
         format_count(float(f"{run.gpu_hours / ratio:.3g}")), f"{ratio:.2f}", run.source)
        for run, ratio in zip(RUNS, ratios(), strict=True)
    ]  # fmt: skip
    names = ["run", "GPUs", "tokens", "published GPU-hours", "predicted", "published / predicted", "source"]
    return "\n".join(markdown(names, rows))


if __name__ == "__main__":
    pages.tell("published-runs", table, __doc__)
