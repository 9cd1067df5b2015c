"""Replacements of packages whose kernels need a GPU: `fla` for the gated delta net, and `mamba_ssm` for Mamba 2.

Megatron-LM's own modules then build and train on a CPU. `fla`'s rule becomes Megatron-LM's own PyTorch code for it.
The scan of Mamba 2 is the recurrence of arXiv 2405.21060, one token after the other.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

import torch
from torch.nn import functional


def pretend() -> None:
    """Provide the packages in this process, before Megatron-LM is imported."""
    _module("fla.modules.l2norm", l2norm=_l2norm)
    _module("fla.modules.convolution", causal_conv1d=_convolution)
    _module("fla.ops.gated_delta_rule", chunk_gated_delta_rule=_delta_rule)
    _module("mamba_ssm.ops.triton.layernorm_gated", RMSNorm=GroupNorm)
    _module(
        "mamba_ssm.ops.triton.ssd_combined",
        mamba_chunk_scan_combined=_no_kernel,
        mamba_split_conv1d_scan_combined=_scan,
    )


def _module(name: str, **held: Any) -> None:
    words = name.split(".")
    for at in range(1, len(words) + 1):
        path = ".".join(words[:at])
        if path not in sys.modules:
            sys.modules[path] = ModuleType(path)
            sys.modules[path].__path__ = []
            sys.modules[path].__spec__ = importlib.machinery.ModuleSpec(path, None)
    vars(sys.modules[name]).update(held)


def _no_kernel(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("this kernel needs a GPU")


def _l2norm(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


def _convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str, **_: Any
) -> tuple[torch.Tensor, None]:
    assert activation in {"silu", "swish"}
    padded = functional.pad(x.transpose(1, 2), (weight.shape[-1] - 1, 0))
    found = functional.conv1d(padded, weight.unsqueeze(1), bias, groups=weight.shape[0])
    return functional.silu(found).transpose(1, 2), None


def _delta_rule(*tensors: torch.Tensor, **named: Any) -> Any:
    rule = importlib.import_module("megatron.core.ssm.gated_delta_net").torch_chunk_gated_delta_rule
    named.pop("cu_seqlens", None)
    return rule(*tensors, **named)


class ZeroCenteredNorm(torch.nn.Module):
    """RMSNorm that multiplies by 1 + weight, which PyTorch's lacks."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.zeros(width, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normed values."""
        scaled = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return scaled.to(x.dtype) * (1 + self.weight)


class GroupNorm(torch.nn.Module):
    """RMSNorm of groups of channels."""

    def __init__(
        self, width: int, eps: float, group_size: int, norm_before_gate: bool, device: Any, dtype: Any
    ) -> None:
        super().__init__()
        assert not norm_before_gate
        self.eps, self.group_size = eps, group_size
        self.weight = torch.nn.Parameter(torch.ones(width, device=device, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normed values."""
        grouped = x.unflatten(-1, (-1, self.group_size)).float()
        scaled = grouped * torch.rsqrt(grouped.pow(2).mean(-1, keepdim=True) + self.eps)
        return scaled.flatten(-2).to(x.dtype) * self.weight


def _scan(
    projected: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, dt_bias: torch.Tensor, a: torch.Tensor, *,
    D: torch.Tensor, headdim: int, ngroups: int, **__: Any,  # noqa: N803 -- the kernel's name
) -> torch.Tensor:  # fmt: skip
    """Return the gated result of a Mamba 2 scan over `projected`: gate, values, keys, queries and steps."""
    heads = dt_bias.shape[0]
    inner, length = heads * headdim, projected.shape[1]
    state = (projected.shape[-1] - 2 * inner - heads) // (2 * ngroups)
    given = projected.dtype
    projected, weight, bias = projected.float(), weight.float(), bias.float()
    gate, mixed, steps = projected.split([inner, inner + 2 * ngroups * state, heads], dim=-1)
    mixed, _ = _convolution(mixed, weight, bias, "silu")
    values, keys, queries = mixed.split([inner, ngroups * state, ngroups * state], dim=-1)
    values = values.unflatten(-1, (heads, headdim))
    keys, queries = (
        each.unflatten(-1, (ngroups, state)).repeat_interleave(heads // ngroups, dim=2) for each in (keys, queries)
    )
    steps = functional.softplus(steps + dt_bias)
    held = values.new_zeros(values.shape[0], heads, headdim, state)
    results = []
    for at in range(length):
        decay = torch.exp(steps[:, at] * a)[..., None, None]
        held = held * decay + torch.einsum("bh,bhp,bhn->bhpn", steps[:, at], values[:, at], keys[:, at])
        results.append(torch.einsum("bhpn,bhn->bhp", held, queries[:, at]))
    found = (torch.stack(results, dim=1) + values * D.view(heads, 1)).flatten(-2)
    return (found * functional.silu(gate)).to(given)


def take_local_layers() -> None:
    """Let Megatron-LM build its variants of attention and its pattern of layers without Transformer Engine."""
    variants = importlib.import_module("megatron.core.models.gpt.experimental_attention_variant_module_specs")
    layers = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    backends = importlib.import_module("megatron.core.models.backends")

    class Norm:
        # Megatron-LM builds classes, but takes functions as they are.
        def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **more: Any) -> Any:  # type: ignore[misc]
            if config.layernorm_zero_centered_gamma:
                return ZeroCenteredNorm(hidden_size, eps, config.params_dtype)
            return backends.WrappedTorchNorm(config=config, hidden_size=hidden_size, eps=eps, **more)

    class Local(backends.LocalSpecProvider):  # type: ignore[misc, name-defined]
        def layer_norm(self, *_: Any, **__: Any) -> Any:
            return Norm

        def column_parallel_layer_norm_linear(self) -> Any:
            return self.column_parallel_linear()

    def delta_net(config: Any, backend: Any = None) -> Any:
        spec = build(config, backend)
        spec.metainfo["fuse_input_layernorm"] = False
        return spec

    def attention(config: Any, backend: Any = None) -> Any:
        spec = layers.get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization)
        spec.submodules.self_attention.metainfo["fuse_input_layernorm"] = False
        held = spec.submodules.self_attention.submodules
        held.q_layernorm = held.k_layernorm = Norm
        return spec.submodules.self_attention

    build = variants.get_gated_delta_net_module_spec
    variants._get_backend_spec_provider = lambda config: Local()
    variants.get_gated_delta_net_module_spec = delta_net
    variants._get_self_attention_module_spec = attention
    _take_local_pattern(Local(), importlib.import_module("megatron.core.models.gpt.moe_module_specs"))


def _take_local_pattern(local: Any, moe: Any) -> None:
    """Replace the layers of Transformer Engine in the pattern of `pretrain_mamba.py`, which fuse norms and matrices."""
    layers = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    held = importlib.import_module("megatron.core.models.mamba.mamba_layer_specs").mamba_stack_spec.submodules
    norm, column, row = local.layer_norm(rms_norm=True), local.column_parallel_linear(), local.row_parallel_linear()
    held.mamba_layer.submodules.norm = norm
    mixer = held.mamba_layer.submodules.mixer.submodules
    mixer.in_proj, mixer.out_proj = column, row
    held.attention_layer.submodules.input_layernorm = norm
    attention = held.attention_layer.submodules.self_attention.submodules
    attention.linear_qkv, attention.linear_proj = column, row
    attention.core_attention = local.core_attention()
    held.mlp_layer.submodules.pre_mlp_layernorm = norm
    held.mlp_layer.submodules.mlp = layers.get_mlp_module_spec_for_backend(backend=local, num_experts=None)
    held.moe_layer.submodules.pre_mlp_layernorm = norm
    held.moe_layer.submodules.mlp = moe.get_moe_module_spec(use_te=False, num_experts=8, moe_grouped_gemm=False)
    for name in ("megatron.core.ssm.mamba_block", "megatron.core.models.hybrid.hybrid_block"):
        if name in sys.modules and hasattr(sys.modules[name], "TENorm"):
            vars(sys.modules[name])["TENorm"] = norm  # of the last layer's result
