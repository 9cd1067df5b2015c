"""Kernels that one device is timed with: GEMMs, attention, elementwise kernels and kernel launches."""

from __future__ import annotations

import time
from contextlib import nullcontext, suppress
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from hpgo.llm.device_record import AttentionTime, ElementwiseTime, GemmTime

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

GEMMS = (
    (8192, 8192, 8192),  # square and large: the best rate on most GPUs
    (16384, 8192, 8192),
    (8192, 10240, 8192),  # Llama 3 70B at tp 1: queries, keys and values; then at tp 8 its four linear layers
    (8192, 1280, 8192),
    (8192, 8192, 1024),
    (8192, 7168, 8192),
    (8192, 8192, 3584),
    (4096, 6144, 4096),  # Llama 3 8B at tp 1: its four linear layers, then the LM head at tp 8
    (4096, 4096, 4096),
    (4096, 28672, 4096),
    (4096, 4096, 14336),
    (8192, 16032, 4096),
    (2048, 4096, 4096),  # short micro-batches and narrow shards, where tiles and launches cost most
    (1024, 4096, 4096),
    (2048, 2048, 4096),
    (1024, 1024, 4096),
    (4096, 1024, 1024),
)
"""`m`, `n` and `k` of GEMMs: `m` tokens, `n` outputs and `k` inputs of a linear layer."""
BURST_GEMMS = ((8192, 8192, 8192), (8192, 10240, 8192), (4096, 4096, 14336))
SMALL_GEMMS = ((256, 256, 256), (256, 512, 256), (128, 384, 128), (128, 128, 256))
LENGTHS, SMALL_LENGTHS = (2048, 8192, 32768), (64, 128, 256)
"""Tokens of a sequence of attention, on GPUs and on CPUs."""
_TOKENS, _SMALL_TOKENS = 32768, 256
"""Tokens of all sequences together, so that each length has the same number."""
_HEADS, _SMALL_HEADS, _HEAD_DIM = 16, 2, 128
_ELEMENTS, _SMALL_ELEMENTS, _NORM_WIDTH = 2**29, 2**22, 4096
"""Values of elementwise kernels. In 16 bits they take 1 GiB on a GPU, many times the last-level cache."""
_BATCHES = 7
"""Batches of calls that a time is the median of."""
_HOST_BATCHES = 41
"""Batches of calls that the CPU is timed with beside a GPU: its clocks take some 10 ms to rise."""
_BURSTS, _BURST_CALLS, _PAUSE_S = 6, 10, 0.3
"""Bursts, GEMMs of a burst, and seconds of rest before each: 14 ms of the largest GEMM on an H100. Not tuned."""
_CACHE_BYTES = 100e6
"""Bytes of inputs that calls rotate over: twice the last-level cache of an H100, so that no input is still there."""
_BACKENDS = {
    "default": None, "flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
}  # fmt: skip
_FP8_CAPABILITY = (8, 9)
"""First compute capability of NVIDIA GPUs with tensor cores for 8 bits."""


class KernelTimer:
    """Times calls on one device, for about `share_s` seconds each."""

    def __init__(self, device: torch.device, share_s: float) -> None:
        self.device, self._share_s = device, share_s
        self.on_gpu = device.type == "cuda"

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def seconds(self, calls: Sequence[Callable[[], object]], *, in_graph: bool = False) -> float:
        """Return the median seconds of a call; calls follow each other in turn.

        With `in_graph`, a GPU replays them from a CUDA graph, so that launches take no time between short kernels.
        """
        for call in calls:
            call()
        self.synchronize()
        run, size = self._graph(calls) if in_graph and self.on_gpu else (lambda: [call() for call in calls], len(calls))
        self._batch_s(run, 1)
        first_s = self._batch_s(run, 1)
        count = max(1, int(self._share_s / _BATCHES / max(first_s, 1e-9)))
        return median(self._batch_s(run, count) / count for _ in range(_BATCHES)) / size

    def burst_seconds(self, call: Callable[[], object]) -> float:
        """Return the least seconds of a call in short bursts with pauses.

        GPUs lower their clocks within some 10 ms of full load. Most published rates of GEMMs were measured before that.
        """
        call()
        self.synchronize()
        found = []
        for _ in range(_BURSTS):
            if self.on_gpu:
                time.sleep(_PAUSE_S)
            found.append(self._batch_s(call, _BURST_CALLS) / _BURST_CALLS)
        return min(found)

    def host_seconds(self, call: Callable[[], object], count: int) -> float:
        """Return the median seconds of a call that the CPU spends on its kernels, if the GPU is never behind."""
        batches = _HOST_BATCHES if self.on_gpu else _BATCHES
        for _ in range(batches):
            call()
        self.synchronize()
        times = []
        for _ in range(batches):
            begin_s = time.perf_counter()
            for _ in range(count):
                call()
            times.append((time.perf_counter() - begin_s) / count)
            self.synchronize()
        return median(times)

    @staticmethod
    def _graph(calls: Sequence[Callable[[], object]]) -> tuple[Callable[[], object], int]:
        """Return a function that replays the calls several times, and the number of calls."""
        repeats = max(1, 24 // len(calls))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(repeats):
                for call in calls:
                    call()
        return graph.replay, repeats * len(calls)

    def _batch_s(self, run: Callable[[], object], count: int) -> float:
        if not self.on_gpu:
            begin_s = time.perf_counter()
            for _ in range(count):
                run()
            return time.perf_counter() - begin_s
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(count):
            run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


def precisions_of(device: torch.device) -> list[str]:
    """Return the formats to time GEMMs in: `bf16`, and `fp8` on GPUs with tensor cores for it."""
    held = ["bf16"]
    has_cuda = device.type == "cuda" and torch.version.hip is None
    if has_cuda and torch.cuda.get_device_capability(device) >= _FP8_CAPABILITY:
        held.append("fp8")
    return held


def warm_up(timer: KernelTimer) -> None:
    """Compute until the GPU's clocks and temperature are as in a long computation."""
    size = 8192 if timer.on_gpu else 256
    one = _random(timer, size, size)
    timer.seconds([lambda: one @ one])


def best_gemm_rate(timer: KernelTimer, precision: str) -> float:
    """Return the operations per second of the fastest of some large GEMMs, in short bursts; 0 without a kernel."""
    shapes = BURST_GEMMS if timer.on_gpu else SMALL_GEMMS
    rates = [0.0]
    for m, n, k in shapes:
        with suppress(RuntimeError):
            rates.append(2.0 * m * n * k / timer.burst_seconds(_gemm(timer, precision, m, n, k)))
    return max(rates)


def time_gemm(timer: KernelTimer, precision: str, shape: tuple[int, int, int]) -> GemmTime:
    """Time a linear layer's forward GEMM, `x @ w.T`, on random data. Raise RuntimeError if PyTorch has no kernel."""
    m, n, k = shape
    each = 2.0 * (m * k + n * k)
    calls = [_gemm(timer, precision, m, n, k) for _ in range(min(8, max(1, round(_CACHE_BYTES / each))))]
    if not timer.on_gpu:
        calls = calls[:1]
    return GemmTime(precision, m, n, k, timer.seconds(calls, in_graph=True))


def _gemm(timer: KernelTimer, precision: str, m: int, n: int, k: int) -> Callable[[], object]:
    x, w = _random(timer, m, k), _random(timer, n, k)
    if precision == "bf16":
        out = torch.empty(m, n, dtype=torch.bfloat16, device=timer.device)
        return lambda: torch.mm(x, w.t(), out=out)
    narrow_x, narrow_w = (one.to(torch.float8_e4m3fn) for one in (x, w))
    scale = torch.ones((), device=timer.device)
    return lambda: torch._scaled_mm(
        narrow_x, narrow_w.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def attention_cases(timer: KernelTimer) -> list[tuple[str, int]]:
    """Return the backends and lengths to time."""
    if not timer.on_gpu:
        return [("default", length) for length in SMALL_LENGTHS]
    return [(backend, length) for backend in _BACKENDS for length in LENGTHS]


def time_attention(timer: KernelTimer, backend: str, length: int) -> AttentionTime:
    """Time causal attention, forward and backward. Raise RuntimeError if the backend has no kernel for it."""
    tokens, heads = (_TOKENS, _HEADS) if timer.on_gpu else (_SMALL_TOKENS, _SMALL_HEADS)
    batch = max(1, tokens // length)
    q, k, v = (_random(timer, batch, heads, length, _HEAD_DIM).requires_grad_() for _ in range(3))
    chosen = _BACKENDS[backend]
    with nullcontext() if chosen is None else sdpa_kernel(chosen):

        def forward() -> torch.Tensor:
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

        out = forward()
        gradient = torch.randn_like(out)
        forward_s = timer.seconds([forward])
        backward_s = timer.seconds([lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)])
    return AttentionTime(backend, batch, heads, _HEAD_DIM, length, forward_s, backward_s)


def time_elementwise(timer: KernelTimer) -> list[ElementwiseTime]:
    """Time a copy, an addition and a norm of values in 16 bits."""
    count = _ELEMENTS if timer.on_gpu else _SMALL_ELEMENTS
    x, y = _random(timer, count), _random(timer, count)
    out = torch.empty_like(x)
    rows, weight = x.view(-1, _NORM_WIDTH), _random(timer, _NORM_WIDTH)
    kernels: dict[str, tuple[int, Callable[[], object]]] = {
        "copy": (2, lambda: out.copy_(x)),
        "add": (3, lambda: torch.add(x, y, out=out)),
        "norm": (2, lambda: functional.layer_norm(rows, (_NORM_WIDTH,), weight)),
    }
    return [
        ElementwiseTime(name, 2.0 * accesses * count, timer.seconds([call]))
        for name, (accesses, call) in kernels.items()
    ]


def time_host_copy(timer: KernelTimer) -> float | None:
    """Return the bytes per second of copies from pinned CPU memory to a GPU; None on a CPU."""
    if not timer.on_gpu:
        return None
    held = torch.empty(2**28, dtype=torch.uint8).pin_memory()
    on_gpu = torch.empty_like(held, device=timer.device)
    return held.nbytes / timer.seconds([lambda: on_gpu.copy_(held, non_blocking=True)])


def time_launches(timer: KernelTimer) -> tuple[float, float, float]:
    """Return the CPU seconds to launch a kernel, a layer's forward pass, and its backward pass.

    Tensors are so small that the GPU waits for the CPU.
    """
    one = torch.zeros(1, device=timer.device)
    kernel_s = timer.host_seconds(lambda: one.add_(1), 500)
    layer = _Layer(width=128, heads=2).to(timer.device, torch.bfloat16)
    x = _random(timer, 1, 16, 128).requires_grad_()
    gradient = torch.ones_like(x)
    forward_s = timer.host_seconds(lambda: layer(x), 20)
    both_s = timer.host_seconds(lambda: layer(x).backward(gradient), 20)
    return kernel_s, forward_s, max(both_s - forward_s, 1e-9)


class _Layer(torch.nn.Module):
    """A transformer layer of plain PyTorch modules: norms, attention with one kernel, and a gated MLP."""

    def __init__(self, *, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(width) for _ in range(2))
        self.qkv = torch.nn.Linear(width, 3 * width, bias=False)
        self.out = torch.nn.Linear(width, width, bias=False)
        self.up = torch.nn.Linear(width, 8 * width, bias=False)
        self.down = torch.nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the layer for a batch of sequences."""
        batch, length, width = x.shape
        split = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = split.unbind(0)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        gate, inner = self.up(self.norms[1](x)).chunk(2, dim=-1)
        return x + self.down(functional.silu(gate) * inner)


def _random(timer: KernelTimer, *shape: int) -> Any:
    """Return random values in 16 bits: GPUs take less power, and are faster, on zeros."""
    return torch.randn(shape, device=timer.device, dtype=torch.bfloat16)
