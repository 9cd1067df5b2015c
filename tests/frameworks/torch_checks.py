"""Plans exported for torch.distributed.pipelining, and the orders of every one-chain schedule."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed.tensor  # before processes are forked
from cases import ONE_CHAIN, Case, cases, check_places, outcome, refused_by, tally
from processes import difference, pretended, together
from results import Result, done
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

import hpgo

WIDTH = 6


class Stage(torch.nn.Module):
    """Of one layer, or of one for each name."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.inner = torch.nn.ModuleDict()
        for name in names:
            torch.manual_seed(sum(name.encode()))
            self.inner[name.replace(".", "-")] = torch.nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.inner.values():
            x = torch.tanh(layer(x)) + x / 2
        return x


def summed_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).sum(dim=1).sum()


def mean_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return summed_loss(output, target) / len(output)


def batch(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(7)
    return torch.randn(samples, WIDTH, dtype=torch.float64), torch.randn(samples, WIDTH, dtype=torch.float64)


def gradients(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name.removeprefix("module."): p.grad for name, p in module.named_parameters() if p.grad is not None}


def one_process(names: list[str], samples: int) -> dict[str, torch.Tensor]:
    """Gradients of the mean loss over the batch."""
    model = Stage(names)
    inputs, targets = batch(samples)
    (summed_loss(model(inputs), targets) / samples).backward()
    return gradients(model)


# Orders


def every_order_gives_the_gradients_of_one_process() -> str:
    """Each one-chain schedule, loaded as the file it is saved as, at four ranks with eight micro-batches."""
    with tempfile.TemporaryDirectory() as folder:
        schedules = {name: hpgo.schedule(name, ranks=4, micro_batches=8) for name in ONE_CHAIN}
        for name, order in schedules.items():
            order.save(Path(folder) / f"{name}.csv")
        found = together(4, _run_orders, folder, {name: order.rank_of_stage for name, order in schedules.items()})
    worst = 0.0
    for name, order in schedules.items():
        together_found = {key: value for rank in found for key, value in rank[name].items()}
        worst = max(worst, difference(together_found, one_process(_names(order.stages), 24)))
    assert worst <= 1e-12, worst
    return f"{len(schedules)} orders, off by {worst:.0e}"


def _names(stages: int) -> list[str]:
    return [f"layers.{stage}" for stage in range(stages)]


def _run_orders(folder: str, placed: dict[str, tuple[int, ...]]) -> dict[str, dict[str, torch.Tensor]]:
    found = {}
    for name, rank_of_stage in placed.items():
        last = len(rank_of_stage) - 1
        mine = [stage for stage, rank in enumerate(rank_of_stage) if rank == torch.distributed.get_rank()]
        modules = {stage: Stage([f"layers.{stage}"]) for stage in mine}
        schedule = _PipelineScheduleRuntime(
            [PipelineStage(module, stage, last + 1, torch.device("cpu")) for stage, module in modules.items()],
            n_microbatches=8,
            loss_fn=lambda output, target: summed_loss(output, target) / 24,
            scale_grads=False,
        )
        schedule._load_csv(f"{folder}/{name}.csv")
        inputs, targets = batch(24)
        schedule.step(*[inputs] * (0 in mine), target=targets if last in mine else None)
        found[name] = {key: grad for module in modules.values() for key, grad in gradients(module).items()}
    return found


# Exports


def reasons(case: Case) -> list[str]:
    splits = any("W" in str(action) for order in case.planned.action_lists for action in order)
    wide = ["32-bit gradients of split passes"] if splits and case.bits == (16, 32) else []
    return refused_by(case, schedules=ONE_CHAIN, whole_models=False) + wide


def write(files: dict[str, str], folder: str) -> Path:
    """The path of the main file, with the others beside it."""
    for name, text in files.items():
        (Path(folder) / name).write_text(text, encoding="utf-8")
    return Path(folder) / next(iter(files))


def load(main: Path) -> SimpleNamespace:
    """An exported module."""
    space: dict[str, Any] = {"__name__": main.stem, "__file__": str(main)}
    exec(compile(main.read_text(encoding="utf-8"), main, "exec"), space)
    return SimpleNamespace(**space)


def the_same(case: Case) -> bool:
    """Whether the exported module says what the case does, or is refused where it must be."""
    files = outcome(case.given, "torch", reasons(case))
    if files is None:
        return False
    check_places(case, files)
    with tempfile.TemporaryDirectory() as folder:
        module = load(write(files, folder))
        assert [list(layers) for layers in case.layers] == module.LAYERS
        assert tuple(module.RANK_OF_STAGE) == case.rank_of_stage
        assert (case.replicas[0], case.share, case.micro_batches) == (
            module.REPLICAS,
            module.SAMPLES_PER_REPLICA,
            module.MICRO_BATCHES,
        )
        assert case.global_batch_size == module.GLOBAL_BATCH_SIZE
        assert [case.recompute] * len(module.LAYERS) == module.RECOMPUTE
        assert bool(case.zero_stage) == module.SHARD_OPTIMIZER
        kept = None if case.bits is None else tuple({16: "bfloat16", 32: "float32"}[each] for each in case.bits)
        assert ((module.WEIGHTS, module.GRADIENTS) if module.WEIGHTS else None) == kept
        assert (module.OPTIMIZER or "") == case.optimizer
        rank = len(case.layers) % (case.ranks * module.REPLICAS)
        with pretended(rank, case.ranks * module.REPLICAS):
            mesh = module.planned_mesh("cpu")
            modules = {stage: Stage([f"layers.{stage}"]) for stage in module.my_stages(mesh)}
            schedule = module.planned_schedule(modules, summed_loss, mesh, torch.device("cpu"))
            assert schedule.pipeline_order == {
                at: [_Action.from_str(action) for action in order] for at, order in enumerate(case.planned.action_lists)
            }
            assert mesh["pipeline"].get_local_rank() == rank // module.REPLICAS
            # The samples that its replica gets of each micro-batch.
            begin = rank % module.REPLICAS * case.share
            assert module.my_rows(mesh) == [
                micro * case.pipeline_micro_batch_size + begin + row
                for micro in range(case.micro_batches)
                for row in range(case.share)
            ]
    return True


def trained() -> str:
    """Five plans that run on at most six processes, against one process."""
    worst, count = 0.0, 0
    for case in cases(400, ONE_CHAIN, seed=2):
        if count == 5:
            break
        if reasons(case) or not 4 <= case.ranks * case.replicas[0] <= 6 or len({*case.layers}) < 2:
            continue
        with tempfile.TemporaryDirectory() as folder:
            main = write(hpgo.export.files(case.given, "torch"), folder)
            found = together(case.ranks * case.replicas[0], _train, main, (summed_loss, mean_loss)[count % 2])
        names = [layer for layers in case.layers for layer in layers]
        assert all(rank[key].equal(found[0][key]) for rank in found for key in rank if key in found[0])
        every = {key: grad for rank in found for key, grad in rank.items()}
        worst = max(worst, difference(every, one_process(names, case.global_batch_size)))
        count += 1
    assert (count, worst <= 1e-12) == (5, True), (count, worst)
    return f"{count} trained, off by {worst:.0e}"


def _train(main: Path, loss: Any) -> dict[str, torch.Tensor]:
    module = load(main)
    # In 64 bits, and by Adam, whatever was priced.
    vars(module)["planned_optimizer"].__globals__.update(WEIGHTS=None, OPTIMIZER=None)
    mesh = module.planned_mesh("cpu")
    modules = {stage: Stage(module.LAYERS[stage]) for stage in module.my_stages(mesh)}
    optimizer = module.planned_optimizer(modules, torch.optim.AdamW, mesh, lr=1e-3)
    schedule = module.planned_schedule(modules, loss, mesh, torch.device("cpu"))
    inputs, targets = batch(module.GLOBAL_BATCH_SIZE)
    rows = module.my_rows(mesh)
    schedule.step(*[inputs[rows]] * module.first(mesh), target=targets[rows] if module.last(mesh) else None)
    module.sum_gradients(modules, mesh)
    found = {key: grad.clone() for one in modules.values() for key, grad in gradients(one).items()}
    optimizer.step()
    return found


if __name__ == "__main__":
    done(
        Result(
            "torch",
            f"torch {torch.__version__.split('+')[0]}",
            read_back=tally(cases(200, ONE_CHAIN), the_same),
            built=every_order_gives_the_gradients_of_one_process(),
            trained=trained(),
        )
    )
