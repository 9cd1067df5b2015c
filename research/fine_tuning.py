"""Published memory of fine-tuning against estimates: the table in docs/fit.md.

python research/fine_tuning.py docs/fit.md
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pages

import hpgo
from hpgo.base.tables import markdown

_GIB = 2**30
_TORCHTUNE = "torchtune"
_LONGLORA = "LongLoRA, table 12"
SOURCES = {
    _TORCHTUNE: "README of torchtune at commit 0031bfb, batch 2, sequences of 2,048 tokens, compiled",
    _LONGLORA: "Chen et al., arXiv 2309.12307: DeepSpeed ZeRO 2, FlashAttention 2, batch 1",
}


@dataclass(frozen=True)
class Published:
    """A published peak of memory, and the arguments of its estimate."""

    source: str
    what: str
    cluster: str
    gpus: int
    peak_bytes: float
    model: str
    micro_batch_size: int
    seq_length: int
    is_allocated: bool
    """Whether the peak is what PyTorch allocated, without the CUDA context."""
    settings: dict[str, Any] = field(default_factory=dict)

    def estimated_bytes(self) -> float:
        """Return the estimate of the same quantity."""
        stage = hpgo.estimate_llm(
            self.model, self.cluster, devices=self.gpus, seq_length=self.seq_length,
            global_batch_size=self.gpus * self.micro_batch_size, micro_batch_size=self.micro_batch_size,
            **self.settings,
        ).fullest  # fmt: skip
        return stage.peak_bytes - (dict(stage.memory_bytes)["framework_overhead"] if self.is_allocated else 0)


_TUNE: dict[str, Any] = {
    "source": _TORCHTUNE, "micro_batch_size": 2, "seq_length": 2048, "is_allocated": True,
}  # fmt: skip
# Adapters of torchtune's recipes (`recipes/configs/llama3_1`): all trained values in 16 bits (`dtype: bf16`), and the
# loss that PyTorch compiles.
_LORA: dict[str, Any] = {
    "lora_rank": 16, "main_params_dtype": "none", "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16",
    "cross_entropy_fusion_impl": "compiled",
}  # fmt: skip
_LORA_8B = _LORA | {"lora_rank": 8}
_ATTENTION = {"lora_target_modules": ["linear_qkv", "linear_proj"]}
_AGAIN, _NARROW, _SHARDED = {"recompute": "full"}, {"base_weights_dtype": "nf4"}, {"zero_stage": 3}
PUBLISHED = (
    Published(what="Llama 3.1 8B, LoRA, recompute", cluster="rtx4090:1", gpus=1, peak_bytes=16.2 * _GIB,
              model="llama-3-8b", settings=_LORA_8B | _AGAIN, **_TUNE),
    Published(what="Llama 3.1 8B, LoRA", cluster="l40s:1", gpus=1, peak_bytes=30.3 * _GIB,
              model="llama-3-8b", settings=_LORA_8B, **_TUNE),
    Published(what="Llama 3.1 8B, QLoRA, recompute", cluster="rtx4090:1", gpus=1, peak_bytes=7.4 * _GIB,
              model="llama-3-8b", settings=_LORA_8B | _AGAIN | _NARROW, **_TUNE),
    Published(what="Llama 3.1 70B, LoRA, recompute", cluster="a100:1", gpus=8, peak_bytes=27.6 * _GIB,
              model="llama-3-70b", settings=_LORA | _AGAIN | _SHARDED, **_TUNE),
    Published(what="Llama 3.1 405B, QLoRA, recompute", cluster="a100:1", gpus=8, peak_bytes=44.8e9,
              model="llama-3.1-405b", settings=_LORA | _AGAIN | _NARROW | _SHARDED, **_TUNE),
    Published(what="Llama 2 7B, LoRA, recompute, 8,192 tokens", cluster="a100:1", gpus=8, peak_bytes=25.7e9,
              model="llama-2-7b", source=_LONGLORA, micro_batch_size=1, seq_length=8192, is_allocated=False,
              settings={"lora_rank": 8, "zero_stage": 2, "fused_cross_entropy": False} | _AGAIN | _ATTENTION),
)  # fmt: skip
"""Published peaks whose settings have arguments. torchtune's full fine-tuning is left out: its optimizer runs
inside the backward pass, which frees each gradient at once."""


def table() -> str:
    """Return the table as Markdown."""
    rows = []
    for one in PUBLISHED:
        found = one.estimated_bytes()
        published, estimated = (f"{size / 1e9:.1f} GB" for size in (one.peak_bytes, found))
        error = f"{100 * (found / one.peak_bytes - 1):+.0f} %"
        rows.append((one.what, one.source, f"{one.gpus}", published, estimated, error))
    return "\n".join(markdown(["fine-tuning", "source", "GPUs", "published", "estimated", "error"], rows))


if __name__ == "__main__":
    pages.tell("fine-tuning", table, __doc__)
