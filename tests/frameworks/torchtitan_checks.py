"""Plans exported for torchtitan, in the environment of either version: each reads, builds and runs its own form."""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.metadata
import logging
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch.distributed.pipelining.schedules import _Action

logging.disable(logging.WARNING)

import torchtitan.distributed.parallel_dims
from cases import ONE_CHAIN, Case, cases, check_places, outcome, refused_by, tally
from processes import apart, difference, together
from results import Result, done
from torchtitan.distributed import ParallelDims
from ways import WayCase, files_of, ways
from ways import refused_by as refused_way
from ways import tally as tally_ways

import hpgo

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

torchtitan.distributed.parallel_dims.device_type = "cpu"

VERSION = importlib.metadata.version("torchtitan")
TARGET = f"torchtitan@{VERSION.rpartition('.')[0]}"
OLD = VERSION.startswith("0.2.")
HEAD = "output" if OLD else "lm_head"
LENGTH, VOCABULARY = 8, 2048
FSDP = ("adam-fp32", "adam-bf16-fp32-gradients")
"""Its optimizers are Adam's, and gradients add up in 32 bits."""

# What differs between the versions


def configuration(case: Case, folder: Path, main: str) -> Any:
    """The job's configuration, by torchtitan's own reader and checks."""
    if OLD:
        from torchtitan.config import ConfigManager

        with contextlib.chdir(folder):
            config = ConfigManager().parse_args([f"--job.config_file={main}"])
    else:
        from torchtitan.models.llama3.config_registry import llama3_debugmodel

        base = llama3_debugmodel()
        base.model_spec.model = _small(case.blocks)
        path = folder / main
        space: dict[str, Any] = {"__name__": path.stem, "__file__": str(path)}
        exec(compile(path.read_text(encoding="utf-8"), path, "exec"), space)
        config = space["planned"](base)
    config.training.seq_len = LENGTH
    return config


def job_of(case: WayCase, folder: Path, main: str) -> Any:
    """The job's configuration of a way, by torchtitan's own reader and checks."""
    if OLD:
        from torchtitan.config import ConfigManager

        with contextlib.chdir(folder):
            return ConfigManager().parse_args([f"--job.config_file={main}"])
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    base = llama3_debugmodel()
    base.model_spec.model = _small(case.model.layers, tied=case.model.tied)
    path = folder / main
    space: dict[str, Any] = {"__name__": path.stem, "__file__": str(path)}
    exec(compile(path.read_text(encoding="utf-8"), path, "exec"), space)
    with contextlib.suppress(ValueError):
        other = llama3_debugmodel()
        other.model_spec.model = _small(case.model.layers + 1, tied=case.model.tied)
        space["planned"](other)
        raise AssertionError("a model with a layer more is taken")
    with contextlib.suppress(ValueError):
        other = llama3_debugmodel()
        other.model_spec.model = _small(case.model.layers, tied=not case.model.tied)
        space["planned"](other)
        raise AssertionError("a model whose embeddings are tied otherwise is taken")
    config = space["planned"](base)
    # It refuses tied embeddings beside a pipeline here.
    config.model_spec.model.update_from_config(config=config)
    return config


def _small(blocks: int, *, tied: bool = False) -> Any:
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import llama3_configs

    model = llama3_configs["debugmodel"](attn_backend="flex")
    model.layers = [copy.deepcopy(model.layers[0]) for _ in range(blocks)]
    model.enable_weight_tying = tied
    for layer in model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # the others are compiled for GPUs
    return model


def dimensions(config: Any, world: int) -> ParallelDims:
    """Degrees, checked against the number of processes."""
    told = config.parallelism
    if not OLD:
        return ParallelDims.from_config(told, world)
    return ParallelDims(
        dp_replicate=told.data_parallel_replicate_degree,
        dp_shard=told.data_parallel_shard_degree,
        cp=told.context_parallel_degree,
        tp=told.tensor_parallel_degree,
        pp=told.pipeline_parallel_degree,
        ep=told.expert_parallel_degree,
        etp=told.expert_tensor_parallel_degree,
        world_size=world,
    )


def recomputes(config: Any) -> bool:
    """Whether each block keeps its input only."""
    policy = config.activation_checkpoint
    if OLD:
        assert policy.mode in {"full", "none"}
        return policy.mode == "full"
    assert policy is None or type(policy).__qualname__ == "FullAC.Config"
    return policy is not None


def model_of(case: Case, config: Any) -> tuple[Any, Any]:
    """A small Llama of so many blocks, with weights that depend on names only, and its settings."""
    if OLD:
        from torchtitan.models.llama3.model.args import TransformerModelArgs
        from torchtitan.models.llama3.model.model import Transformer

        settings = TransformerModelArgs(
            dim=16, n_layers=case.blocks, n_heads=2, vocab_size=VOCABULARY, multiple_of=16, max_seq_len=LENGTH
        )
        model = Transformer(settings)
    else:
        settings = _small(case.blocks)
        settings.update_from_config(config=config)
        model = settings.build()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            torch.manual_seed(sum(name.encode()))
            parameter.copy_(torch.randn_like(parameter) / 16)
        if OLD:
            model.freqs_cis = model._precompute_freqs_cis()
    return model, settings


def parallelised(case: Case, config: Any, world: int) -> tuple[Any, list[Any], ParallelDims]:
    """torchtitan's schedule and the parts of the model on this rank, sharded or replicated as told."""
    dims = dimensions(config, world)
    model, settings = model_of(case, config)
    if OLD:
        from torchtitan.distributed.pipeline_parallel import pipeline_llm
        from torchtitan.models.llama3.infra.parallelize import parallelize_llama

        if not dims.pp_enabled:
            return None, [parallelize_llama(model, dims, config)], dims
        schedule, parts, *_ = pipeline_llm(
            model, dims, config, torch.device("cpu"), settings, parallelize_llama, summed_loss
        )
        return schedule, parts, dims
    from torchtitan.distributed import utils
    from torchtitan.distributed.pipeline_parallel import pipeline_llm
    from torchtitan.models.llama3 import parallelize_llama

    utils.set_spmd_backend(config.parallelism.spmd_backend)
    settings_of = {
        "parallel_dims": dims,
        "training": config.training,
        "parallelism": config.parallelism,
        "compile_config": config.compile,
        "ac_config": config.activation_checkpoint,
        "dump_folder": "",
    }
    if not dims.pp_enabled:
        return None, [parallelize_llama(model, **settings_of)], dims
    schedule, parts, *_ = pipeline_llm(
        model, device=torch.device("cpu"), model_config=settings, parallelize_fn=parallelize_llama,
        loss_fn=lambda output, target: (summed_loss(output, target), {}), **settings_of,
    )  # fmt: skip
    return schedule, parts, dims


def summed_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A sum, as torchtitan's own: trainers divide it by the number of tokens."""
    return torch.nn.functional.cross_entropy(output.flatten(0, 1).float(), target.flatten(0, 1), reduction="sum")


# Reading back


def reasons(case: Case) -> list[str]:
    also = sorted({"waves"} & case.odd)
    if OLD and case.gpus > 1 and case.replicas[0] > 1 and case.ranks == 1 and not case.zero_stage:
        also.append("replicas of a model that tensor parallelism splits")
    if OLD and case.bits == (16, 32) and case.replicas[0] == 1 and case.ranks * case.gpus > 1:
        also.append("16 bits without FSDP")
    return refused_by(case, schedules=ONE_CHAIN, whole_models=True, optimizers=FSDP) + also


@contextlib.contextmanager
def written(case: Case) -> Iterator[tuple[Path, str]]:
    """The files in a folder, from which the process works, and the main one's name."""
    with tempfile.TemporaryDirectory() as folder:
        files = hpgo.export.files(case.given, TARGET)
        for name, text in files.items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        with contextlib.chdir(folder):
            yield Path(folder), next(iter(files))


def the_same(case: Case) -> bool:
    """Whether torchtitan understands the files as the case means them."""
    files = outcome(case.given, TARGET, reasons(case))
    if files is None:
        return False
    check_places(case, files)
    with written(case) as (folder, main):
        config = configuration(case, folder, main)
        training, told = config.training, config.parallelism
        dims = dimensions(config, len(case.grid))
        assert (dims.pp, dims.dp_replicate * dims.dp_shard, dims.tp) == (case.ranks, case.replicas[0], case.gpus)
        shards = bool(case.zero_stage) or (OLD and case.ranks > 1)  # beside a pipeline, 0.2 can't but share the state
        assert (dims.dp_shard > 1) == (shards and case.replicas[0] > 1)
        assert dims.dp_shard == 1 or told.fsdp_reshard_after_forward == "never"
        assert training.global_batch_size == case.global_batch_size
        passes, rest = divmod(training.global_batch_size, training.local_batch_size * case.replicas[0])
        assert rest == 0
        if case.ranks == 1:
            assert (passes, training.local_batch_size) == (case.micro_batches, case.share)
        else:
            assert passes == 1
            assert training.local_batch_size == case.share * case.micro_batches
            assert told.pipeline_parallel_microbatch_size == case.share
            names = [[f"layers.{block}" for block in part] for part in case.parts]
            names[0].insert(0, "tok_embeddings")
            names[-1] += ["norm", HEAD]
            assert told.module_fqns_per_model_part == names
            lines = Path(told.pipeline_parallel_schedule_csv).read_text(encoding="utf-8").splitlines()
            action_lists = [
                [str(action) for cell in line.split(",") if (action := _Action.from_str(cell))] for line in lines
            ]
            assert action_lists == case.planned.action_lists
        assert recomputes(config) == case.recompute
        if case.bits is not None:
            assert training.mixed_precision_param == ("bfloat16" if case.bits[0] == 16 else "float32")
            assert training.mixed_precision_reduce == "float32"
    return True


def debug_model(chance: random.Random) -> dict[str, Any]:
    """The width and the words of its smallest Llama, whose embeddings may be tied."""
    shape = {"hidden": 256, "heads": 16, "kv_heads": 16, "head_dim": 16, "ffn": 768, "vocab": VOCABULARY}
    return shape | {"tied": chance.random() < 0.2}


def the_same_way(case: WayCase) -> bool:
    """Whether torchtitan understands the files as the way means them."""
    reasons = refused_way(TARGET, case)
    if OLD and case.tp > 1 and not case.sequence_parallel:
        reasons.append("tensor parallelism alone")
    files = files_of(case, TARGET, reasons)
    if files is None:
        return False
    with tempfile.TemporaryDirectory() as at, contextlib.chdir(at):
        for name, text in files.items():
            (Path(at) / name).write_text(text, encoding="utf-8")
        config = job_of(case, Path(at), next(iter(files)))
        training, told = config.training, config.parallelism
        dims = dimensions(config, case.gpus)
        assert (dims.pp, dims.dp_replicate, dims.dp_shard, dims.cp, dims.tp) == (case.pp, 1, case.dp, case.cp, case.tp)
        if case.dp * case.cp > 1:
            assert told.fsdp_reshard_after_forward == ("always" if case.zero_stage == 3 else "never")
        assert OLD or told.enable_sequence_parallel == (case.sequence_parallel or case.tp == 1)
        assert (training.global_batch_size, training.seq_len) == (case.global_batch_size, case.seq_length)
        assert case.seq_length % dims.seq_len_divisor == 0
        passes, rest = divmod(training.global_batch_size, training.local_batch_size * case.dp)
        assert (passes, rest) == (1 if case.pp > 1 else case.micro_batches, 0)
        assert config.compile.enable
        assert recomputes(config) == (case.recompute == "full")
        if case.pp > 1:
            assert training.local_batch_size == case.micro_batch_size * case.micro_batches
            assert told.pipeline_parallel_microbatch_size == case.micro_batch_size
            blocks = iter(range(case.model.layers))
            names = [[f"layers.{next(blocks)}" for _ in range(count)] for count in case.counts]
            names[0].insert(0, "tok_embeddings")
            names[-1] += ["norm", HEAD]
            assert told.module_fqns_per_model_part == names
            lines = Path(told.pipeline_parallel_schedule_csv).read_text(encoding="utf-8").splitlines()
            actions = [[_Action.from_str(cell) for cell in line.split(",") if cell] for line in lines]
            _check_orders(case, actions)
    return True


def _check_orders(case: WayCase, actions: list[list[Any]]) -> None:
    """Asserts that each rank runs each micro-batch through each of its stages, forward and backward, once."""
    assert len(actions) == case.pp
    for rank, own in enumerate(actions):
        wanted = [
            f"{stage}{kind}{batch}"
            for kind in ("F", "B")
            for stage in range(rank, case.pp * case.vpp, case.pp)
            for batch in range(case.micro_batches)
        ]
        assert sorted(map(str, own)) == sorted(wanted)


# Building and training


def some(number: int, maximum: int) -> Iterator[Case]:
    """Cases with a pipeline that torchtitan runs on at most so many processes."""
    fitting = (
        case
        for case in cases(400, ONE_CHAIN, seed=4, optimizers=FSDP)
        if not reasons(case) and case.ranks > 1 and len(case.grid) <= maximum
    )
    for _ in range(number):
        yield next(fitting)


def built() -> str:
    """Five plans: the modules of each rank's real model."""
    ranks = 0
    for case in some(5, maximum=9):
        with written(case) as (folder, main):
            for rank in range(len(case.grid)):
                apart(rank, len(case.grid), _build, case, folder, main)
        ranks += len(case.grid)
    return f"5 plans, {ranks} ranks"


def _build(case: Case, folder: Path, main: str) -> None:
    schedule, parts, _ = parallelised(case, configuration(case, folder, main), torch.distributed.get_world_size())
    held = case.held(torch.distributed.get_rank())
    assert [stage.stage_index for stage in schedule._stages] == held
    for stage, part in zip(held, parts, strict=True):
        assert list(part.layers) == [str(block) for block in case.parts[stage]]
        assert (part.tok_embeddings is not None) == (stage == 0)
        assert (getattr(part, HEAD) is not None) == (stage == len(case.counts) - 1)
        assert (part.norm is not None) == (stage == len(case.counts) - 1)


def trained() -> str:
    """A plan, each rank a process, against one process."""
    case = next(
        case for case in some(50, maximum=6) if case.replicas[0] > 1 and case.gpus == 1 and len(case.counts) > 2
    )
    with written(case) as (folder, main):
        found = together(case.ranks * case.replicas[0], _train, case, folder, main)
        (wanted,) = together(1, _train_alone, case, folder, main)
    every = {name: gradient for rank in found for name, gradient in rank.items()}
    off = difference(every, wanted)
    assert off <= 1e-5, off  # its loss and its attention are in float32
    return f"`{case.schedule}` trained, off by {off:.0e}"


def _train_alone(case: Case, folder: Path, main: str) -> dict[str, torch.Tensor]:
    config = configuration(case, folder, main)
    if not OLD:
        from torchtitan.distributed import utils

        utils.set_spmd_backend(config.parallelism.spmd_backend)
    model, _ = model_of(case, config)
    inputs, targets = batch(case)
    (summed_loss(model(inputs), targets) / targets.numel()).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def batch(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(8)
    tokens = torch.randint(0, VOCABULARY, (case.global_batch_size, LENGTH + 1))
    return tokens[:, :-1], tokens[:, 1:]


def _train(case: Case, folder: Path, main: str) -> dict[str, torch.Tensor]:
    config = configuration(case, folder, main)
    config.training.mixed_precision_param = "float32"
    os.chdir(folder)
    schedule, parts, dims = parallelised(case, config, torch.distributed.get_world_size())
    inputs, targets = (
        whole.view(case.replicas[0], -1, LENGTH)[dims.get_mesh("batch").get_local_rank()] for whole in batch(case)
    )
    for part in parts:
        for module in part.modules():
            if hasattr(module, "set_force_sum_reduction_for_comms"):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no sum that divides
    first, last = (any(getattr(stage, which) for stage in schedule._stages) for which in ("is_first", "is_last"))
    schedule.step(*[inputs] * first, target=targets if last else None)
    found = {}
    for part in parts:
        for name, parameter in part.named_parameters():
            gradient = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
            found[name.replace("_checkpoint_wrapped_module.", "")] = gradient / batch(case)[1].numel()
    return found


WARM = ("torchtitan.distributed.pipeline_parallel", "torchtitan.models.llama3.infra.parallelize")
"""Modules of 0.2 that build a rank's model. They bring PyTorch's compiler, and each rank is a fork of this process."""

if __name__ == "__main__":
    for name in WARM if OLD else ():
        importlib.import_module(name)
    read = tally(cases(200, ONE_CHAIN, optimizers=FSDP), the_same)
    same_ways = tally_ways(ways(200, debug_model, often=(2, 3)), the_same_way)
    done(Result(TARGET, f"torchtitan {VERSION}", read, built(), trained(), same_ways))
