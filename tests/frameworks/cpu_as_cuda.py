"""A CPU that answers as a CUDA device, so that Megatron-LM's own `pretrain_gpt.py` trains unchanged over gloo.

`pretend()` replaces what Megatron-LM asks of `torch.cuda`: tensors stay on the CPU, streams and events do nothing, the
random state is the CPU's, and memory is 0.
"""

from __future__ import annotations

import collections
import contextlib
import typing
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo
import torch.distributed
import typing_extensions
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


class _Nothing:
    """A stream or an event. Each method does nothing."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: 0.0 if name == "elapsed_time" else self

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class _OnCpu(TorchFunctionMode):
    """Puts tensors on the CPU that are asked for on a CUDA device, by name."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = _CPU
        if function is torch.Tensor.to:
            args = tuple(_CPU if isinstance(one, str | torch.device) and "cuda" in str(one) else one for one in args)
        return function(*args, **kwargs)


def pretend() -> None:
    """Replace `torch.cuda` in this process, before Megatron-LM is imported. There is no way back."""
    # Megatron-LM 0.18 and later are written for Python 3.12, of which they need nothing else.
    typing.override = getattr(typing, "override", typing_extensions.override)  # type: ignore[attr-defined]
    # torch.compile asks the device for its stream.
    torch._dynamo.config.disable = True
    _devices()
    _tensors()
    _random_states()
    _process_groups()
    _OnCpu().__enter__()


def widen_attention(attention: Any) -> None:
    """Let Megatron-LM's own attention class accept other widths of keys and values, as latent attention has.

    Only Transformer Engine's class takes them. Its own computes them correctly, except for the width of its output.
    """
    build = attention.__init__

    def init(self: Any, *a: Any, k_channels: Any = None, v_channels: Any = None, **k: Any) -> None:
        build(self, *a, **k)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    attention.__init__ = init


def _devices() -> None:
    cuda: Any = torch.cuda
    for name in ("synchronize", "set_device", "empty_cache", "set_stream", "reset_peak_memory_stats", "check_error"):
        setattr(cuda, name, lambda *_, **__: None)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, lambda *_, **__: 0)
    cuda.memory_stats = lambda *_: collections.defaultdict(int)
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 8
    cuda.current_device = lambda: _CPU
    cuda.get_device_name = lambda *_: "CPU"
    cuda.get_device_capability = lambda *_: (9, 0)
    cuda.get_device_properties = lambda *_: SimpleNamespace(major=9, minor=0, total_memory=1, multi_processor_count=1)
    cuda.is_current_stream_capturing = lambda: False
    cuda.Stream = cuda.Event = _Nothing
    cuda.current_stream = cuda.default_stream = _Nothing
    cuda.stream = cuda.device = lambda *_: contextlib.nullcontext()
    cuda.nvtx = _Nothing()
    torch.accelerator.is_available = lambda: False  # so that data loaders pin no memory


def _tensors() -> None:
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *_, **__: self
    torch.nn.Module.cuda = lambda self, *_, **__: self  # type: ignore[method-assign, assignment]
    type_of = tensor.type
    # Optimizers accept parameters by the name of their type. The mode below calls a replaced method twice.
    tensor.type = lambda self, *a, **k: (
        type_of(self, *a, **k) if a or k else "torch.cuda." + type_of(self).rpartition(".")[2]
    )
    for name in ("Float", "Half", "BFloat16", "Long", "Int", "Byte"):
        setattr(torch.cuda, f"{name}Tensor", getattr(torch, f"{name}Tensor"))


def _random_states() -> None:
    cuda: Any = torch.cuda
    for module in (cuda, cuda.random):
        module.get_rng_state = lambda *_, **__: torch.get_rng_state()
        module.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
        module.manual_seed = module.manual_seed_all = torch.default_generator.manual_seed
    cuda.default_generators = collections.defaultdict(lambda: torch.default_generator)
    cuda._lazy_call = lambda call, **_: call()


def _process_groups() -> None:
    start: Any = torch.distributed.init_process_group

    def init_process_group(*a: Any, **k: Any) -> None:
        k.pop("device_id", None)  # gloo binds a group to no device
        start(*a, **k)

    torch.distributed.init_process_group = init_process_group
    send: Any = torch.distributed.isend

    def isend(tensor: Any, *a: Any, **k: Any) -> Any:
        # Megatron-LM frees outputs of stages at once. CUDA waits for the transfer, gloo would send freed memory.
        return send(tensor.clone(), *a, **k)

    torch.distributed.isend = torch.distributed.distributed_c10d.isend = isend
    exchange: Any = torch.distributed.all_to_all_single

    def all_to_all_single(output: Any, given: Any, *a: Any, **k: Any) -> Any:
        # Megatron-LM turns sizes into lists when it copies them from a GPU.
        for name in ("output_split_sizes", "input_split_sizes"):
            k[name] = None if k.get(name) is None else [int(size) for size in k[name]]
        return exchange(output, given, *a, **k)

    torch.distributed.all_to_all_single = all_to_all_single
