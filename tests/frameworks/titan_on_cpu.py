"""torchtitan's own `torchtitan.train` on the CPU, for a job folder: titan_on_cpu.py WORDS…

torchtitan asks CUDA for the device and its memory, FSDP for a sum that divides and experts for an exchange of unequal
tensors, which gloo lacks, and FlexAttention for a kernel.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch._utils
import torch.distributed.fsdp

CPU = SimpleNamespace(**{name: getattr(torch.cpu, name) for name in dir(torch.cpu) if not name.startswith("__")})
CPU.get_device_name = lambda *_: "CPU"
CPU.current_device = lambda *_: 0
CPU.device_count = lambda: 1
CPU.set_device = CPU.reset_peak_memory_stats = CPU.empty_cache = lambda *_: None
CPU.get_device_properties = lambda *_: SimpleNamespace(total_memory=1 << 34)
CPU.memory_stats = lambda *_: {}
CPU.get_rng_state, CPU.set_rng_state = torch.get_rng_state, torch.set_rng_state

# `python -m torchtitan.train` finds the modules of the folder in which it starts.
sys.path.insert(0, str(Path.cwd()))
torch._utils._get_available_device_type = lambda: "cpu"
torch._utils._get_device_module = lambda _: CPU
fully_shard = torch.distributed.fsdp.fully_shard


def by_sums(module: Any, **options: Any) -> Any:
    """`fully_shard`, with gradients that are summed and then divided."""
    sharded = fully_shard(module, **options)
    for one in module if isinstance(module, list) else [module]:
        one.set_force_sum_reduction_for_comms(True)
    return sharded


torch.distributed.fsdp.fully_shard = by_sums


def by_one_tensor(outputs: list[torch.Tensor], inputs: list[torch.Tensor], group: Any = None) -> None:
    """`all_to_all` of tensors with unequal first dimensions, which gloo exchanges as parts of one tensor only."""
    sizes = [[len(one) for one in tensors] for tensors in (outputs, inputs)]
    whole = torch.cat(outputs)
    torch.distributed.all_to_all_single(whole, torch.cat(inputs), *sizes, group=group)
    for output, found in zip(outputs, whole.split(sizes[0]), strict=True):
        output.copy_(found)


torch.distributed.all_to_all = by_one_tensor


def plain_attention() -> None:
    """FlexAttention in plain operations, within torchtitan 0.3's own masks, which are not compiled either."""
    try:
        from torchtitan.models.common import attention
    except ImportError:
        return
    attention._compiled_create_block_mask = attention.create_block_mask
    attention.FlexAttention.compiled_flex_attn = staticmethod(masked_attention)
    try:
        from torchtitan.experiments.transformers_modeling_backend import model
    except ImportError:
        return
    model.flex_attention_forward = scaled_dot_product
    model.HFTransformerModel.get_attention_masks = lambda *_, **__: None


def masked_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, block_mask: Any, scale: float | None, **_: Any
) -> tuple[torch.Tensor, SimpleNamespace]:
    """`flex_attention` of queries, keys and values (batch, heads, tokens, width), with the sums of the scores."""
    batch, heads, tokens, width = query.shape
    key, value = (one.repeat_interleave(heads // one.shape[1], dim=1) for one in (key, value))
    scores = (query @ key.transpose(-1, -2)).float() * (width**-0.5 if scale is None else scale)
    counts = (batch, heads, tokens, tokens)
    at = [torch.arange(count).view([-1 if dim == axis else 1 for dim in range(4)]) for axis, count in enumerate(counts)]
    scores = scores.masked_fill(~block_mask.mask_mod(*at), -torch.inf)
    return scores.softmax(-1).to(value.dtype) @ value, SimpleNamespace(lse=scores.logsumexp(-1))


def scaled_dot_product(
    _: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, __: Any, scaling: float, **___: Any
) -> tuple[torch.Tensor, None]:
    """`flex_attention_forward` of transformers with PyTorch's scaled dot-product attention."""
    grouped = query.shape[1] != key.shape[1]
    attended = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped
    )
    return attended.transpose(1, 2).contiguous(), None


if __name__ == "__main__":
    logging.getLogger().setLevel(logging.INFO)
    plain_attention()
    from torchtitan import train

    train.main(train.Trainer) if "0.2" in train.__file__ else train.main()
