"""Batch normalisation over replicas is that of one device, forward, backward and in its running statistics."""

from __future__ import annotations

from pathlib import Path

import pytest
import warm_ranks

torch = pytest.importorskip("torch", reason="needs torch: pip install torch")

import cut_models  # noqa: E402 -- needs torch
import norm_ranks  # noqa: E402

import hpgo.runtime  # noqa: E402
from hpgo.runtime.passes import running  # noqa: E402

HERE = Path(__file__).parent


def whole(steps: int, *, recompute: bool = False) -> tuple[torch.Tensor, dict[tuple[str, str], torch.Tensor], object]:
    """torch's own batch normalisation over the whole batch."""
    workload = norm_ranks.workload()
    modules = torch.nn.Sequential(*(workload.network.nodes[layer].make() for layer in workload.layers)).double()
    for _ in range(steps):
        outputs = modules(workload.example_inputs[0].double())
        (torch.nn.functional.mse_loss(outputs, workload.example_targets[0].double()) * 5).backward()
    gradients = {(layer, name): p.grad for layer, one in modules.named_children() for name, p in one.named_parameters()}
    return outputs.detach(), gradients, modules.state_dict()


def test_two_uneven_replicas_normalise_as_one_device(tmp_path: Path) -> None:
    ranks = [
        warm_ranks.Started(HERE, ["norm_ranks.py", str(rank), str(tmp_path)], {})
        for rank in range(len(norm_ranks.SHARES))
    ]
    assert [rank.wait() for rank in ranks] == [0, 0]
    outputs, gradients, state = whole(norm_ranks.STEPS)
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(len(ranks))]
    assert float((torch.cat([one[0] for one in found]) - outputs).abs().max()) <= 1e-12
    cut_models.check_close({holder: found[0][1][holder] + found[1][1][holder] for holder in gradients}, gradients)
    for _, _, held in found:  # updated once a step, although each pass ran twice
        for name, wanted in state.items():
            (tensor,) = (one for key, one in held.items() if key.endswith(f"{name}") and key.split(".", 1)[1] == name)
            torch.testing.assert_close(tensor, wanted, rtol=1e-12, atol=1e-12)


def test_alone_a_stage_normalises_as_torch_does_and_uses_its_statistics_in_evaluation() -> None:
    workload = norm_ranks.workload()
    (part,) = workload.parts([workload.layers], dtype=torch.float64)
    plain = hpgo.runtime.Workload.read("mlp:layers=1,width=2")
    assert [part.joins, *(one.joins for one in plain.parts([plain.layers], only=()))] == [True, False]
    outputs, _, state = whole(1)
    with running(step=0, samples=range(5)):
        (found,) = part(*workload.example_inputs, rows=5)
    torch.testing.assert_close(found, outputs, rtol=1e-12, atol=1e-12)
    held = part.layer("2").state_dict()
    assert all(torch.allclose(held[name], state[f"2.{name}"], rtol=1e-12, atol=1e-14) for name in held)
    part.eval()
    before = {name: tensor.clone() for name, tensor in part.state_dict().items()}
    part(workload.example_inputs[0][:1], rows=1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in part.state_dict().items())
