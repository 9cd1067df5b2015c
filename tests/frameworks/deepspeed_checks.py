"""Plans exported for DeepSpeed: the module it is given, its own checks of the configuration, one step."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import deepspeed.comm.comm
from cases import Case, cases, check_places, outcome, refused_by, tally
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from processes import difference, pretended, together
from results import Result, done
from ways import WayCase, files_of, ways
from ways import refused_by as refused_way
from ways import tally as tally_ways

import hpgo

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

logging.disable(logging.WARNING)
communication = importlib.import_module("deepspeed.comm.torch")  # the attribute of this name is torch itself
communication.build_shm_op = lambda: None  # compiles a kernel

SCHEDULES = ("1f1b", "eager_1f1b")
WIDTH = 6


class Layer(torch.nn.Module):
    """One of the profile's, with weights that depend on its name only."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(sum(name.encode()))
        self.linear = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) + x / 2


def mean_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


def reasons(case: Case) -> list[str]:
    shares = case.replicas[0] == 1 or case.shard
    wide = ["32-bit gradients without ZeRO"] if case.bits == (16, 32) and not shares else []
    return refused_by(case, schedules=SCHEDULES, whole_models=False) + wide


@contextlib.contextmanager
def backend() -> Iterator[None]:
    """DeepSpeed's own communication on the group that is there."""
    deepspeed.comm.comm.cdb = communication.TorchBackend(None, None, None)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        deepspeed.comm.comm.cdb = None


def load(files: dict[str, str]) -> SimpleNamespace:
    """The exported module."""
    name, text = next(iter(files.items()))
    space: dict[str, Any] = {"__name__": Path(name).stem}
    exec(compile(text, name, "exec"), space)
    return SimpleNamespace(**space)


def the_same(case: Case) -> bool:
    """Whether the real module of a rank, and DeepSpeed's reading of CONFIG, are what the case means."""
    files = outcome(case.given, "deepspeed", reasons(case))
    if files is None:
        return False
    check_places(case, files)
    exported = load(files)
    names = [layer for layers in case.layers for layer in layers]
    assert names == exported.LAYERS
    world = case.ranks * case.replicas[0]
    rank = len(names) % world
    with pretended(rank, world), backend():
        module = exported.PlannedPipelineModule([Layer(name) for name in names], loss_fn=mean_loss)
        assert (module.num_stages, module.stage_id) == (case.ranks, rank // case.replicas[0])
        mine = names[module._local_start : module._local_stop]
        assert tuple(mine) == case.layers[module.stage_id]
        assert len(module.forward_funcs) == len(mine)
        # Groups of this many layers: all of a stage is one.
        assert bool(module.activation_checkpoint_interval) == case.recompute
        assert not case.recompute or module.activation_checkpoint_interval >= max(map(len, case.layers))
        config = DeepSpeedConfig(exported.CONFIG, mpu=module.mpu())
        assert config.train_batch_size == case.global_batch_size
        assert config.train_micro_batch_size_per_gpu == case.share
        assert config.gradient_accumulation_steps == case.micro_batches
        assert config.zero_optimization_stage == (1 if case.bits == (16, 32) else case.zero_stage)
        check_precision(config, case.bits)
        assert not case.optimizer.startswith("sgd") or config.zero_allow_untested_optimizer
        with contextlib.suppress(ValueError):
            exported.PlannedPipelineModule([Layer(name) for name in names[1:]], loss_fn=mean_loss)
            raise AssertionError("a model with a layer less is taken")
    return True


def check_precision(config: DeepSpeedConfig, bits: tuple[int, int] | None, *, fp16: bool = False) -> None:
    """Asserts that DeepSpeed's engine, by its own reading and its own checks, keeps so many bits a weight and sum."""
    engine = DeepSpeedEngine.__new__(DeepSpeedEngine)
    torch.nn.Module.__init__(engine)
    engine._config, engine.pipeline_parallelism, engine.global_rank = config, True, 1
    # It raises where it has no optimizer for these types.
    engine._do_optimizer_sanity_check(torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))]))
    if bits is not None:
        types = {16: torch.float16 if fp16 else torch.bfloat16, 32: torch.float32}
        assert engine.get_data_types() == tuple(types[each] for each in bits)
    assert config.gradient_clipping == 1


def any_model(chance: random.Random) -> dict[str, Any]:
    """Any shape: the model is the user's."""
    experts = {"experts": 4, "experts_per_token": 1, "expert_ffn": 64} if chance.random() < 0.2 else {}
    return experts | {
        "hidden": 64, "heads": 4, "kv_heads": 4, "head_dim": 16, "ffn": chance.choice([128, 256]), "vocab": 100,
        "gated": chance.random() < 0.5,
    }  # fmt: skip


def the_same_way(case: WayCase) -> bool:
    """Whether DeepSpeed reads CONFIG, and cuts the module of a rank, as the way means it."""
    files = files_of(case, "deepspeed", refused_way("deepspeed", case))
    if files is None:
        return False
    exported = load(files)
    with pretended(0, case.gpus), backend():
        mpu = None
        if case.pp > 1:
            module = exported.PlannedPipelineModule([Layer(name) for name in exported.LAYERS], loss_fn=mean_loss)
            mpu = module.mpu()
            held = [end - begin for begin, end in pairwise(module.parts)]
            counts = [count + (at == 0) + (at == case.pp - 1) for at, count in enumerate(case.counts)]
            assert held == counts
            assert (module.num_stages, module.activation_checkpoint_interval) == (case.pp, case.recompute == "full")
        config = DeepSpeedConfig(exported.CONFIG, mpu=mpu)
        fp16 = case.precision == "fp16"
        check_precision(config, (16, 16) if fp16 else (16, 32), fp16=fp16)
    assert config.train_batch_size == case.global_batch_size
    assert config.train_micro_batch_size_per_gpu == case.micro_batch_size
    assert config.gradient_accumulation_steps == case.micro_batches
    # With 32-bit sums of gradients of 16-bit weights, it asks for ZeRO on a single GPU too.
    assert config.zero_optimization_stage == (case.shared_stage if fp16 else max(1, case.shared_stage))
    check_model(exported, case)
    return True


def check_model(exported: SimpleNamespace, case: WayCase) -> None:
    """Asserts that the model of the case is taken, by the names of Hugging Face, and one with a layer more is not."""
    config = SimpleNamespace(**exported.MODEL)
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (
        case.model.layers, case.model.hidden, case.model.vocab,
    )  # fmt: skip
    exported.check_model(config)
    config.num_hidden_layers += 1
    with contextlib.suppress(ValueError):
        exported.check_model(config)
        raise AssertionError("a model with a layer more is taken")


def some(number: int, maximum: int) -> Iterator[Case]:
    """Cases with a pipeline that DeepSpeed runs on at most so many processes."""
    fitting = (
        case
        for case in cases(2000, SCHEDULES, seed=5)
        if not reasons(case) and case.ranks > 1 and case.ranks * case.replicas[0] <= maximum
    )
    for _ in range(number):
        yield next(fitting)


def built() -> str:
    """Five plans: the layers of each rank's real module."""
    ranks = 0
    for case in some(5, maximum=16):
        exported = load(hpgo.export.files(case.given, "deepspeed"))
        names = [layer for layers in case.layers for layer in layers]
        world = case.ranks * case.replicas[0]
        for rank in range(world):
            with pretended(rank, world), backend():
                module = exported.PlannedPipelineModule([Layer(name) for name in names], loss_fn=mean_loss)
                held = [layer.linear.weight for layer in module.forward_funcs]
                wanted = [Layer(name).linear.weight for name in case.layers[rank // case.replicas[0]]]
                assert all(torch.equal(one, other) for one, other in zip(held, wanted, strict=True))
        ranks += world
    return f"5 plans, {ranks} ranks"


def trained() -> str:
    """Two plans, one that recomputes and one that shares the optimizer's state, against one process."""
    worst = 0.0
    for zero in (0, 1):
        case = next(
            case
            for case in some(150, maximum=6)
            if case.replicas[0] > 1
            and (case.zero_stage, case.recompute) == (zero, not zero)
            and case.bits in {None, (32, 32)}
        )
        found = together(case.ranks * case.replicas[0], _train, case)
        names = [layer for layers in case.layers for layer in layers]
        model = torch.nn.Sequential(*(Layer(name) for name in names))
        inputs, targets = batch(case)
        mean_loss(model(inputs), targets).backward()
        wanted = {
            (name, key): parameter.grad
            for name, layer in zip(names, model, strict=True)
            for key, parameter in layer.named_parameters()
        }
        worst = max(worst, difference({key: grad for rank in found for key, grad in rank.items()}, wanted))
    assert worst <= 1e-5, worst  # in float32: DeepSpeed sums no gradients in float64
    return f"2 trained, off by {worst:.0e}"


def batch(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(9)
    shape = (case.global_batch_size, WIDTH)
    return torch.randn(shape) / 8, torch.randn(shape) / 8


def _train(case: Case) -> dict[tuple[str, str], torch.Tensor]:
    exported = load(hpgo.export.files(case.given, "deepspeed"))
    names = [layer for layers in case.layers for layer in layers]
    with backend():
        module = exported.PlannedPipelineModule([Layer(name) for name in names], loss_fn=mean_loss)
        before = {key: parameter.detach().clone() for key, parameter in module.named_parameters()}
        # A rate of 1, so that weights move by their gradients, which are too small to be clipped.
        engine, *_ = deepspeed.initialize(
            model=module,
            config=exported.CONFIG | {"zero_allow_untested_optimizer": True},
            optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
            dist_init_required=False,
        )
        replica = torch.distributed.get_rank() % case.replicas[0]
        inputs, targets = (
            whole.view(case.micro_batches, case.replicas[0], case.share, WIDTH)[:, replica] for whole in batch(case)
        )
        engine.train_batch(iter(list(zip(inputs, targets, strict=True))))
        # Its parameters are called by their layer's number.
        return {
            (names[int(key.partition(".")[0])], key.partition(".")[2]): before[key] - parameter.detach()
            for key, parameter in module.named_parameters()
        }


if __name__ == "__main__":
    ran = f"deepspeed {deepspeed.__version__}"
    read = tally(cases(200, SCHEDULES), the_same)
    done(Result("deepspeed", ran, read, built(), trained(), tally_ways(ways(200, any_model, simple=0.5), the_same_way)))
