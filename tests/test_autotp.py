"""DeepSpeed's tensor parallelism (AutoTP): its memory, what is exported, and the loss of the job's own script.

Start checks train such plans with DeepSpeed on several processes. They are in tests/frameworks.
"""

from __future__ import annotations

import ast
import os
import socket
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

import hpgo
from hpgo import export
from hpgo.export.targets import find
from hpgo.jobs import deepspeed_texts
from hpgo.jobs.parts import parts_of
from hpgo.model.transformer_presets import TRANSFORMERS

if TYPE_CHECKING:
    from hpgo import LlmPlan

H100 = hpgo.Cluster.preset("h100:2")
TIED = replace(TRANSFORMERS["llama-3-8b"], tied=True)


def plan(model: Any = "llama-3-8b", **options: Any) -> LlmPlan:
    asked = {"global_batch_size": 64, "seq_length": 1024, "framework": "deepspeed", "zero_stage": 1, **options}
    return hpgo.LlmPlan.of(hpgo.estimate_llm(model, H100, **asked), model, H100)


def weights_bytes(model: Any, **options: Any) -> float:
    return dict(plan(model, **options).estimate.stages[0].memory_bytes)["weights"]


def test_each_rank_holds_the_whole_embedding_unless_it_is_tied() -> None:
    words_bytes = 2 * 128256 * 4096
    for model, times in (("llama-3-8b", 1 - 1 / 4), (TIED, 0)):
        alone = weights_bytes(model, tp=4)
        divided = weights_bytes(model, tp=4, framework="megatron", sequence_parallel=False)
        assert alone - divided == pytest.approx(times * words_bytes)


def test_a_search_takes_tensor_parallelism_where_it_pays() -> None:
    asked: dict[str, Any] = {"global_batch_size": 64, "seq_length": 1024, "framework": "deepspeed", "top": 1000}
    found = hpgo.plan_llm("llama-3-8b", H100, **asked)
    configs = [one.parallelism for one in found.estimates]
    assert any(config.tp > 1 for config in configs)
    for config in configs:
        assert not config.sequence_parallel
        assert config.tp == 1 or (config.pp == 1 and config.dp_replicate == 1)
    other = hpgo.plan_llm("mixtral-8x7b", H100, **asked)
    assert {one.parallelism.tp for one in other.estimates} == {1}


def test_the_configuration_names_the_degree_and_no_batch_of_all_ranks() -> None:
    (text,) = export.files(plan(tp=4), "deepspeed").values()
    config = next(
        ast.literal_eval(line.removeprefix("CONFIG = ")) for line in text.splitlines() if line.startswith("CONFIG")
    )
    assert config["tensor_parallel"] == {"autotp_size": 4, "vocab_parallel_lm_head": True}
    assert config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * 4 == 64
    assert "train_batch_size" not in config


def test_an_estimate_without_the_framework_is_noted_as_too_low() -> None:
    for framework, is_noted in ((None, True), ("deepspeed", False)):
        one = plan(tp=4, framework=framework, sequence_parallel=False)
        (text,) = export.files(one, "deepspeed").values()
        assert ("each GPU holds the whole embedding" in text) == is_noted


def test_ranks_of_a_replica_read_the_same_samples() -> None:
    files = {file.name: file.text for file in parts_of(plan(tp=4), find("deepspeed")).files}
    assert "TP = 4\n" in files["train.py"]
    assert "get_rank() // TP, torch.distributed.get_world_size() // TP" in files["train.py"]
    assert "divmod(ranks, 4)" in files["check_config.py"]
    whole = {file.name: file.text for file in parts_of(plan(), find("deepspeed")).files}
    assert "TP" not in whole["train.py"].replace("HTTP", "")


def _losses(rank: int, port: int, results: Any) -> None:
    """Put the loss of a rank's columns and its gradient into `results`, as the script in the folder computes them."""
    import torch
    from torch import nn

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)

    class Groups:
        get_tensor_model_parallel_group = staticmethod(lambda: torch.distributed.group.WORLD)

    space: dict[str, Any] = {"torch": torch, "nn": nn, "groups": Groups, "CHUNK": 4}
    exec(deepspeed_texts.SHARDED_LOSS, space)
    torch.manual_seed(3)
    logits, labels = torch.randn(2, 5, 11), torch.randint(0, 11, (2, 5))
    begin, end = ((0, 6), (6, 11))[rank]
    own = logits[..., begin:end].clone().requires_grad_()
    loss = space["mean_loss"](own, labels - begin)
    loss.backward()
    whole = logits.clone().requires_grad_()
    wanted = nn.functional.cross_entropy(whole.flatten(0, 1), labels.flatten())
    wanted.backward()
    assert own.grad is not None
    assert whole.grad is not None
    results.put((float(abs(loss - wanted)), float((own.grad - whole.grad[..., begin:end]).abs().max())))
    torch.distributed.destroy_process_group()


def test_the_loss_over_divided_columns_equals_the_loss_over_all() -> None:
    multiprocessing = pytest.importorskip("torch.multiprocessing", reason="the loss needs PyTorch")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    ranks = [context.Process(target=_losses, args=(rank, port, results)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
        assert rank.exitcode == 0
    for _ in ranks:
        assert max(results.get()) < 1e-6
