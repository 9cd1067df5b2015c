"""Run public architectures of transformers as pipelines, and fill in the table of docs/workloads.md.

    python research/architectures.py [NAME …] [--write]

Each model is small and has random weights, in 64 bits (32 with experts) and without dropout. It is profiled, cut into 2
and 3 stages with equal numbers of blocks, and trained for two steps by processes that are ranks, in micro-batches of 2.
Losses are compared with plain PyTorch, which runs the same micro-batches one after the other. A model takes about 10 s.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import sys
import tempfile
import traceback
import warnings
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo
import torch.distributed as dist
from pages import fill
from torch import nn

import hpgo
from hpgo.errors import HpgoError
from hpgo.runtime import Pipeline, Workload, profile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FORK = multiprocessing.get_context("fork")
PAGE = Path(__file__).parent.parent / "docs" / "workloads.md"
BATCH, MICRO_BATCH, STEPS, TOKENS, WORDS = 4, 2, 2, 12, 64
RANKS = (2, 3)
LIMIT_S = 1200
"""Time limit in seconds of one model's processes. It only ends runs that hang, also on a busy machine. Not tuned."""
RATE = 0.05
MAX_DIGITS = 12
"""Number of equal digits from which on losses count as equal. Other processors may add in another order."""
TINY = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""Sizes that most language models have in their configuration."""
GROUPED = {**TINY, "num_key_value_heads": 2}


@dataclass(frozen=True)
class Architecture:
    """A class of transformers, and the sizes of its configuration."""

    config: str
    model: str
    sizes: dict[str, Any]
    inputs: Callable[[], dict[str, torch.Tensor]]
    dtype: torch.dtype = torch.float64
    """Number format of weights and inputs."""


def _text(seed: int = 0, length: int = TOKENS) -> torch.Tensor:
    return torch.randint(3, WORDS, (BATCH, length), generator=torch.Generator().manual_seed(seed))


def _tokens() -> dict[str, torch.Tensor]:
    return {"input_ids": _text()}


def _pairs() -> dict[str, torch.Tensor]:
    return {"input_ids": _text(), "decoder_input_ids": _text(1, 7)}


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(BATCH, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _image(size: int = 32) -> Callable[[], dict[str, torch.Tensor]]:
    return lambda: {"pixel_values": _noise(3, size, size)}


def _sound() -> dict[str, torch.Tensor]:
    return {"input_values": _noise(800)}


def _mel() -> dict[str, torch.Tensor]:
    return {"input_features": _noise(8, 40), "decoder_input_ids": _text(1, 7)}


def _text_and_image() -> dict[str, torch.Tensor]:
    return {"input_ids": _text(), "pixel_values": _noise(3, 32, 32)}


def _causal(name: str, sizes: dict[str, Any], *, kind: str = "ForCausalLM") -> Architecture:
    return Architecture(f"{name}Config", f"{name}{kind}", sizes, _tokens)


def _sparse(name: str, sizes: dict[str, Any]) -> Architecture:
    # Torch's grouped matrix multiplication, which transformers uses for experts, has no 64 bits.
    return replace(_causal(name, sizes), dtype=torch.float32)


_EXPERTS = {**GROUPED, "num_experts_per_tok": 2}
_WAVES = {
    **TINY, "conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 4), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "apply_spec_augment": False,
}  # fmt: skip
_SEEING = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
           "image_size": 32, "patch_size": 8}  # fmt: skip
_SPEAKING = {
    "vocab_size": WORDS, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1, "max_position_embeddings": 32,
}  # fmt: skip
_T5 = {"vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4,
       "decoder_start_token_id": 0}  # fmt: skip
_STAGED = {"embed_dim": 16, "depths": [1, 2], "num_heads": [2, 4], "window_size": 4, "image_size": 32, "patch_size": 4}

ARCHITECTURES: dict[str, Architecture] = {
    "Llama": _causal("Llama", GROUPED),
    "Mistral": _causal("Mistral", {**GROUPED, "sliding_window": 6}),
    "Qwen2": _causal("Qwen2", GROUPED),
    "Qwen3": _causal("Qwen3", {**GROUPED, "head_dim": 8}),
    "Gemma": _causal("Gemma", {**GROUPED, "head_dim": 8}),
    "Phi": _causal("Phi", TINY),
    "OLMo": _causal("Olmo", TINY),
    "StableLM": _causal("StableLm", GROUPED),
    "Falcon": _causal("Falcon", {**TINY, "new_decoder_architecture": False, "bos_token_id": 1, "eos_token_id": 2}),
    "GPT-2": Architecture("GPT2Config", "GPT2LMHeadModel",
                          {"vocab_size": WORDS, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32}, _tokens),
    "OPT": _causal("OPT", {**TINY, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "BLOOM": _causal("Bloom", {"vocab_size": WORDS, "hidden_size": 32, "n_layer": 3, "n_head": 4}),
    "Mixtral": _sparse("Mixtral", {**_EXPERTS, "num_local_experts": 4}),
    "Qwen3-MoE": _sparse("Qwen3Moe", {**_EXPERTS, "num_experts": 4, "moe_intermediate_size": 24, "head_dim": 8}),
    "DeepSeek-V3": _sparse("DeepseekV3", {
        **TINY, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 24, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    }),
    "GPT-OSS": _sparse("GptOss", {**_EXPERTS, "num_local_experts": 4, "head_dim": 8, "sliding_window": 6}),
    "Mamba": _causal("Mamba", {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 3, "state_size": 4}),
    "BERT (masked)": _causal("Bert", TINY, kind="ForMaskedLM"),
    "RoBERTa": _causal("Roberta", {**TINY, "max_position_embeddings": 40}, kind="ForMaskedLM"),
    "DistilBERT": _causal("DistilBert", {"vocab_size": WORDS, "dim": 32, "hidden_dim": 48, "n_layers": 3, "n_heads": 4,
                                         "max_position_embeddings": 32}, kind="ForMaskedLM"),
    "ALBERT": _causal("Albert", {**TINY, "embedding_size": 16}, kind="ForMaskedLM"),
    "ELECTRA": _causal("Electra", {**TINY, "embedding_size": 16}, kind="ForMaskedLM"),
    "DeBERTa-v2": _causal("DebertaV2", {**TINY, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
                          kind="ForMaskedLM"),
    "T5": Architecture("T5Config", "T5ForConditionalGeneration", _T5, _pairs),
    "BART": Architecture("BartConfig", "BartForConditionalGeneration", _SPEAKING, _pairs),
    "Whisper": Architecture("WhisperConfig", "WhisperForConditionalGeneration",
                            {**_SPEAKING, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 16},
                            _mel),
    "wav2vec 2.0": Architecture("Wav2Vec2Config", "Wav2Vec2ForCTC", _WAVES, _sound),
    "ViT": Architecture("ViTConfig", "ViTForImageClassification", _SEEING, _image()),
    "Swin": Architecture("SwinConfig", "SwinForImageClassification", _STAGED, _image()),
    "ConvNeXt": Architecture("ConvNextConfig", "ConvNextForImageClassification",
                             {"depths": [1, 1, 2, 1], "hidden_sizes": [8, 16, 24, 32]}, _image(64)),
    "ResNet": Architecture("ResNetConfig", "ResNetForImageClassification",
                           {"embedding_size": 8, "hidden_sizes": [16, 24, 32], "depths": [1, 1, 1]}, _image(64)),
    "EfficientNet": Architecture("EfficientNetConfig", "EfficientNetForImageClassification",
                                 {"width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320}, _image(64)),
    "SegFormer": Architecture("SegformerConfig", "SegformerForSemanticSegmentation",
                              {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 24, 32], "decoder_hidden_size": 16},
                              _image(64)),
    "CLIP": Architecture("CLIPConfig", "CLIPModel", {
        "text_config": {**TINY, "projection_dim": 16}, "vision_config": {**_SEEING, "projection_dim": 16},
        "projection_dim": 16,
    }, _text_and_image),
    "SAM": Architecture("SamVisionConfig", "SamVisionModel", {
        "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 64, "patch_size": 8,
        "output_channels": 16, "mlp_dim": 48, "window_size": 3, "global_attn_indexes": [1],
    }, _image(64)),
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """What happened with one architecture."""

    layers: int
    digits: tuple[int, ...]
    """Digits to which the losses on each of `RANKS` equal the losses of plain PyTorch."""
    reason: str
    """Why it does not run; empty if it does."""

    def text(self, name: str, model: str) -> str:
        """Return the row of the table."""
        if self.reason:
            return f"| {name} | `{model}` | | {self.reason} | |"
        shown = " | ".join("equal" if one == MAX_DIGITS else f"{one} digits" for one in self.digits)
        return f"| {name} | `{model}` | {self.layers} | {shown} |"


HEAD = "| architecture | class of transformers | blocks | 2 ranks | 3 ranks |\n|---|---|---:|---|---|"


def built(one: Architecture) -> nn.Module:
    """Return the model with random weights and without dropout."""
    import transformers

    config = getattr(transformers, one.config)(**one.sizes)
    parts = [config, *(part for part in vars(config).values() if isinstance(part, transformers.PretrainedConfig))]
    for part in parts:
        for name, value in vars(part).items():
            if "drop" in name and isinstance(value, float):
                setattr(part, name, 0.0)
        if hasattr(part, "use_cache"):
            part.use_cache = False
    torch.manual_seed(0)
    return getattr(transformers, one.model)(config).to(one.dtype).train()


def scores(outputs: Any) -> torch.Tensor:
    """Return the first tensor with a row for each sample that gets gradients: scores, or the last layer's result."""
    names = ("logits", "logits_per_image", "last_hidden_state")
    for name in names:
        found = outputs.get(name) if isinstance(outputs, dict) else None
        if found is not None:
            return found
    raise TypeError(f"{type(outputs).__name__} has none of {', '.join(names)}")


def loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    """Return a mean over the samples that depends on all scores."""
    made = scores(outputs)
    # A fixed pattern instead of targets of the same shape, which differs between architectures.
    pattern = torch.linspace(-1, 1, made[0].numel(), dtype=made.dtype).reshape(made.shape[1:])
    return ((made - pattern - targets.reshape(-1, *[1] * (made.dim() - 1))) ** 2).mean()


def plain(model: nn.Module, inputs: dict[str, torch.Tensor], targets: torch.Tensor) -> list[float]:
    """Return the losses of the steps in plain PyTorch."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=RATE), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for at in range(0, BATCH, MICRO_BATCH):
            rows = slice(at, at + MICRO_BATCH)
            part = loss(model(**{name: one[rows] for name, one in inputs.items()}), targets[rows])
            part = part * MICRO_BATCH / BATCH
            part.backward()
            total += float(part.detach())
        optimizer.step()
        losses.append(total)
    return losses


def stages(layers: tuple[str, ...], count: int) -> list[tuple[list[str], list[int]]]:
    """Return stages with equal numbers of layers, one on each rank."""
    ends = [round(at * len(layers) / count) for at in range(count + 1)]
    return [(list(layers[begin:end]), [at]) for at, (begin, end) in enumerate(pairwise(ends))]


def _rank(rank: int, ranks: int, folder: Path, work: Workload, batch: tuple[Any, torch.Tensor]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/{ranks}", rank=rank, world_size=ranks)
    program = hpgo.program(
        hpgo.schedule("1f1b", ranks=ranks, micro_batches=BATCH // MICRO_BATCH),
        stages(work.layers, ranks),
        pipeline_micro_batch_size=MICRO_BATCH,
        global_batch_size=BATCH,
    )
    options: dict[str, Any] = {"optimizer": lambda own: torch.optim.SGD(own, lr=RATE), "tell": lambda _: None}
    with Pipeline(program, work, **options) as pipeline:
        losses = [pipeline.step(*batch) for _ in range(STEPS)]
    if rank == 0:
        (folder / f"losses-{ranks}.json").write_text(json.dumps(losses))


def digits(found: list[float], expected: list[float]) -> int:
    """Return the number of equal digits of the least accurate loss."""
    error = max(abs(one - other) / abs(other) for one, other in zip(found, expected, strict=True))
    return MAX_DIGITS if not error else min(MAX_DIGITS, math.floor(-math.log10(error)))


def run(name: str) -> Row:
    """Run one architecture. Raises HpgoError if it can't be run, and RuntimeError if a rank fails."""
    one = ARCHITECTURES[name]
    inputs, model = one.inputs(), built(one)
    targets = torch.linspace(0, 1, BATCH, dtype=torch.float64)
    work = Workload(model, inputs, targets, loss).by("block")
    if len(work.layers) < max(RANKS):
        work = work.by("module")
    work.look(None)  # once, for all ranks
    # Autograd starts threads, which a fork does not have. So all ranks come before the first backward pass here.
    losses = []
    with tempfile.TemporaryDirectory() as temporary:
        for ranks in RANKS:
            processes = [
                FORK.Process(target=_rank, args=(rank, ranks, Path(temporary), work, (inputs, targets)))
                for rank in range(ranks)
            ]
            for process in processes:
                process.start()
            for process in processes:
                process.join(LIMIT_S)
                if process.exitcode != 0:
                    raise RuntimeError(f"a rank of {ranks} ended with {process.exitcode}")
            losses.append(json.loads((Path(temporary) / f"losses-{ranks}.json").read_text()))
    profile(work, seconds=0, batch_sizes=[MICRO_BATCH])
    expected = plain(model, inputs, targets)
    return Row(len(work.layers), tuple(digits(found, expected) for found in losses), "")


def _alone(name: str, file: Path) -> None:
    """Run one architecture in a process of its own, which a crash ends alone."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        row = run(name)
    except HpgoError as error:
        row = Row(0, (), f"{error.message}: {error.hint}".replace("|", "\\|").replace("\n", " "))
    except Exception:  # noqa: BLE001 -- any failure of a model is a result
        traceback.print_exc()
        row = Row(0, (), f"{sys.exc_info()[1]!r}"[:300].replace("|", "\\|").replace("\n", " "))
    file.write_text(json.dumps([row.layers, row.digits, row.reason]))


def rows(names: list[str]) -> Iterator[tuple[str, Row]]:
    """Yield the row of each architecture, run in a process of its own."""
    with tempfile.TemporaryDirectory() as temporary:
        for at, name in enumerate(names):
            file = Path(temporary) / str(at)
            process = FORK.Process(target=_alone, args=(name, file))
            process.start()
            process.join(LIMIT_S)
            if file.exists():
                layers, found, reason = json.loads(file.read_text())
                yield name, Row(layers, tuple(found), reason)
            else:
                process.kill()
                yield name, Row(0, (), f"the process ended with {process.exitcode}")


def main() -> None:
    """Run the architectures that are named, or all, and print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="architecture; all by default")
    parser.add_argument("--write", action="store_true", help=f"fill in the table of {PAGE.name}")
    given = parser.parse_args()
    import transformers  # noqa: F401 -- before the forks, which share it

    table = [HEAD]
    for name, row in rows(given.names or list(ARCHITECTURES)):
        table.append(row.text(name, ARCHITECTURES[name].model))
        print(table[-1], flush=True)
    if given.write:
        page = fill(PAGE.read_text(encoding="utf-8"), {"architectures": "\n".join(table)})
        PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
