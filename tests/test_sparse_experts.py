"""Models that route tokens to experts by value are cut, profiled and trained like others."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest

import hpgo

torch = pytest.importorskip("torch", reason="needs torch: pip install torch")

import cut_models  # noqa: E402 -- needs torch
from refusals import refused  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import hpgo.runtime  # noqa: E402
from hpgo.runtime.shape_passes import run_for_shapes  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path


class Experts(nn.Module):
    """Four experts, each of which runs the tokens that chose it."""

    def __init__(self, hidden: int = 8, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(experts))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(given).softmax(-1).topk(2, -1)
        made = torch.zeros_like(given)
        for number, expert in enumerate(self.experts):
            rows, slots = torch.where(chosen == number)
            made.index_add_(0, rows, expert(given[rows]) * weights[rows, slots].unsqueeze(-1))
        return given + made


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 8), nn.Linear(8, 4)
        self.blocks = nn.ModuleList(Experts() for _ in range(2))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        value = self.enter(given)
        for block in self.blocks:
            value = block(value)
        return self.leave(value)  # type: ignore[no-any-return]


def workload(*, is_list: bool) -> tuple[hpgo.runtime.Workload, nn.Module]:
    torch.manual_seed(0)
    model = Model()
    given, targets = torch.randn(6, 8), torch.randint(4, (6,))
    layers: Any = [model.enter, *model.blocks, model.leave] if is_list else model
    return hpgo.runtime.Workload(layers, given, targets, functional.cross_entropy), model


@pytest.mark.parametrize("is_list", [False, True])
def test_every_cut_gives_the_loss_and_gradients_of_the_module(is_list: bool) -> None:
    work, model = workload(is_list=is_list)
    model = model.double()
    loss = functional.cross_entropy(model(work.example_inputs[0].double()), work.example_targets[0])
    loss.backward()
    expected = sorted(float(one.grad.norm()) for one in model.parameters() if one.grad is not None)
    chance = random.Random(1)
    for shares in ([6], [1, 5], [2, 1, 3]):
        parts = work.parts(cut_models.random_stages(work, chance), dtype=torch.float64)
        found_loss, found = cut_models.step(work, parts, shares)
        assert float(found_loss) / 6 == pytest.approx(float(loss.detach()), rel=1e-12)
        norms = sorted(float(one.norm()) / 6 for one in found.values() if one.norm() > 0)
        assert norms == pytest.approx([norm for norm in expected if norm > 0], rel=1e-9)


@pytest.mark.parametrize("is_list", [False, True])
def test_profiles_have_the_experts_weights(is_list: bool) -> None:
    work, model = workload(is_list=is_list)
    profile = hpgo.runtime.profile(work, batch_sizes=[4], seconds=0)
    assert sum(layer.parameter_bytes for layer in profile.layers) == 4 * sum(one.numel() for one in model.parameters())
    assert all(layer.forward_s[0] > 0 for layer in profile.layers)


SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 48,
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "max_position_embeddings": 32, "head_dim": 8,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {"num_experts": 4, "moe_intermediate_size": 16}),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {
            "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 8,
            "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
            "moe_intermediate_size": 16, "num_key_value_heads": 4, "head_dim": 4,
        },
    ),
    "gpt_oss": ("GptOssForCausalLM", {"num_local_experts": 4, "layer_types": ["full_attention"] * 2}),
}  # fmt: skip


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_models_of_transformers_with_experts_are_profiled_without_their_weights(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs transformers: pip install transformers")
    name, sizes = FAMILIES[kind]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(SIZES | sizes | {"model_type": kind, "architectures": [name]}))
    profile = hpgo.runtime.profile(f"{file}:length=6", batch_sizes=[2], seconds=0)
    held = hpgo.runtime.Workload.read(f"{file}:length=6").by("block")
    assert [layer.id for layer in profile.layers] == list(held.layers)
    weights = {id(one): one.numel() for layer in held.layers for one in held.network.nodes[layer].make().parameters()}
    assert sum(layer.parameter_bytes for layer in profile.layers) == 4 * sum(weights.values())


class InPlace(nn.Module):
    """Changes its first argument at the rows that are not 0, and returns it with a view of the second."""

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        first[first[:, 0].nonzero()[:, 0]] += 1.0
        return first, second[:, :2], second * 2


def test_results_on_meta_share_memory_as_real_ones_do() -> None:
    first, second = (torch.empty(3, 4, device="meta") for _ in range(2))
    seen = run_for_shapes(InPlace(), [first, second], lambda module, given: module(*given))
    same, view, fresh = seen.output
    assert (seen.needs_values, seen.mutates) == (True, (0,))
    assert same is first
    assert (view.shape, view.stride()) == ((3, 2), (4, 1))
    assert view.untyped_storage()._cdata == second.untyped_storage()._cdata
    assert fresh.untyped_storage()._cdata not in {one.untyped_storage()._cdata for one in (first, second)}
    assert all(one.is_meta for one in seen.output)


def test_finding_shapes_draws_nothing_from_the_user_s_generator() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    work, _ = workload(is_list=True)
    torch.set_rng_state(before)
    assert any(one.needs_values for one in work.look(None).values())
    assert torch.equal(torch.get_rng_state(), before)


class Stops(nn.Module):
    """Returns early where a sum is above 0, which depends on the micro-batch."""

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return given if given.sum() > 0 else given.tanh()


def test_branches_on_sums_of_a_micro_batch_stay_refused() -> None:
    work = hpgo.runtime.Workload([Stops()], torch.zeros(2, 4), torch.zeros(2, 4), functional.mse_loss)
    with refused(hpgo.errors.ArgumentError, "user_code", "0", "2") as raised:
        work.parts([["0"]])
    assert "branch on no number" in raised.value.hint
