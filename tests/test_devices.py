"""Ranks choose a device that their process group can send from."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install torch")

import torch.distributed as dist  # noqa: E402

from hpgo.errors import RunError  # noqa: E402
from hpgo.runtime.devices import device_of_rank  # noqa: E402


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that torch finds, for what only asks about it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)


def in_group(monkeypatch: pytest.MonkeyPatch, backend: str, ranks: int) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("backend", "ranks", "device"), [("gloo", 2, "cpu"), ("gloo", 1, "cuda:0"), ("nccl", 2, "cuda:0")]
)
def test_a_rank_takes_a_gpu_only_if_its_group_sends_from_gpus(
    backend: str, ranks: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert device_of_rank(None) == torch.device("cuda", 0)
    in_group(monkeypatch, backend, ranks)
    assert device_of_rank(None) == torch.device(device)


@pytest.mark.usefixtures("gpu")
def test_a_gpu_by_name_is_refused_in_a_group_of_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    in_group(monkeypatch, "gloo", 2)
    with pytest.raises(RunError, match="backend is gloo") as caught:
        device_of_rank("cuda")
    assert caught.value.hint
