"""The Pipeline Execution Engine's four ways train alike, and DAPPLE's plans run and are emulated."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import warm_ranks
from click.testing import CliRunner

import hpgo
from hpgo.reproduce import answers
from hpgo.reproduce.questions import STRATEGIES

torch = pytest.importorskip("torch", reason="needs torch: pip install torch")

import reproduction  # noqa: E402 -- what needs torch, where there is one
import runtime_models  # noqa: E402
import sleeping_stages  # noqa: E402
import variants  # noqa: E402
from emulated_plans import emulated  # noqa: E402
from engine_variants import LAYERS, VARIANTS, WORKERS, program_of_variant, staggered  # noqa: E402

from hpgo.runtime import Workload  # noqa: E402
from hpgo.runtime.passes import running  # noqa: E402

ROOT = Path(__file__).parent.parent
SMALL = "vgg-19:flat,squared,width=2,linear=8,classes=4,image=32,batch=64"
NAMES = [one.name for one in VARIANTS]
MODELS = {
    "vgg-19": "vgg-19:image=32,width=2,linear=8,classes=4",
    "gnmt-16": "gnmt-16:hidden=4,vocabulary=8,source=3,target=3",
    "bert-48": "bert-48:hidden=8,heads=2,vocabulary=8,positions=4,length=4",
    "xlnet-36": "xlnet-36:hidden=8,heads=2,vocabulary=8,length=4",
    "amoebanet-36": "amoebanet-36:width=16,classes=4,image=64",
}
# Batch normalisation over a few small images lets a small AmoebaNet make 10^7 times as much of a change of its inputs.
BOUNDS = {"amoebanet-36": (1e-5, 1e-3)}


def ran(folder: Path, world: int, cases: list[dict[str, Any]]) -> list[list[Any]]:
    """For each case what each rank has left: losses, and gradients and weights by layer, in float64."""
    (folder / "cases.json").write_text(json.dumps(cases))
    done = warm_ranks.ran("runtime_ranks.py", world, folder, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return [
        [torch.load(folder / f"{number}.{rank}.pt", weights_only=True) for rank in range(world)]
        for number in range(len(cases))
    ]


def case(program: hpgo.Program, workload: str, **how: Any) -> dict[str, Any]:
    return {"program": json.loads(program.to_json()), "workload": workload, **how}


def test_the_four_ways_have_the_outputs_and_gradients_of_one_process(tmp_path: Path) -> None:
    workload = Workload.read(SMALL)
    programs = [program_of_variant(name, workload.layers, 64) for name in NAMES]
    assert [(one.micro_batches, one.pipeline_micro_batch_size, len(one.stages)) for one in programs] == [
        (1, 64, 4), (64, 1, 4), (16, 4, 4), (16, 4, 8),
    ]  # fmt: skip
    assert all(one.world_size == WORKERS for one in programs)
    cases = [case(one, SMALL, outputs=True) for one in programs]
    cases += [case(one, SMALL, steps=3, adamw=True) for one in programs]
    found = ran(tmp_path, WORKERS, cases)
    (whole,) = workload.parts([workload.layers], dtype=torch.float64)
    inputs, targets = runtime_models.batch(workload, 64, 0)
    with running(step=0, samples=range(64)):
        (outputs,) = whole(inputs, rows=64)
    loss = workload.loss_of(outputs, targets) / 64
    loss.backward()
    wanted = {(layer, name): tensor for layer, held in whole.by_layer().items() for name, tensor in held.items()}
    largest = max(float(tensor.grad.abs().max()) for tensor in wanted.values())
    for name, ranks in zip(NAMES, found[:4], strict=True):
        assert all(losses == pytest.approx([float(loss.detach())], rel=1e-12) for losses, *_ in ranks), name
        (made,) = (one for _, _, one in ranks if one is not None)
        assert float((made - outputs.detach()).abs().max()) <= 1e-12 * float(outputs.detach().abs().max()), name
        held = {(layer, key): gradient for _, those, _ in ranks for layer, key, gradient, _ in those}
        assert held.keys() == wanted.keys()
        for key, gradient in held.items():
            assert float((gradient - wanted[key].grad).abs().max()) <= 1e-12 * largest, (name, key)
    first = {(layer, key): weight for _, those in found[4] for layer, key, _, weight in those}
    for name, ranks in zip(NAMES[1:], found[5:], strict=True):
        trained = {(layer, key): weight for _, those in ranks for layer, key, _, weight in those}
        assert trained.keys() == wanted.keys()
        for key, weight in trained.items():
            assert bool(((weight - first[key]).abs() <= 1e-9).all()), (name, key)
            assert not torch.equal(weight, wanted[key].detach()), f"{key} was not trained"


def test_waves_are_what_each_step_has() -> None:
    """In step t of the forward half, exactly the stages s with a micro-batch t - s run; backward likewise."""
    for stages, workers, micro_batches in ((4, 4, 6), (8, 4, 6), (6, 2, 3), (2, 4, 5)):
        schedule = staggered(stages, workers, micro_batches)
        assert schedule.ranks == min(workers, stages)
        for rank, line in enumerate(schedule.action_lists):
            mine = range(rank, stages, workers)
            halves = [line[: len(line) // 2], line[len(line) // 2 :]]
            for letter, half in zip("FB", halves, strict=True):
                steps = [
                    sum((at if letter == "F" else stages - 1 - at, int(micro_batch)))
                    for at, micro_batch in (map(int, word.split(letter)) for word in half)
                ]
                assert steps == sorted(steps)
            assert sorted(chain(*halves)) == sorted(
                f"{stage}{letter}{at}" for stage in mine for letter in "FB" for at in range(micro_batches)
            )


@pytest.mark.slow
def test_the_command_runs_all_four_one_process_and_a_plan(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table: variants -->\nold\n<!-- end -->\nafter\n")
    words = ["--workload", SMALL, "--steps", "2", "--search", "--alone", "--time-limit", "100ms", "--dtype", "float64"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "research/variants.py"), *words, "--json", "--write", str(page)],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    runs = json.loads(done.stdout)["runs"]
    assert [one["name"] for one in runs] == [*NAMES, "one process", "searched"]
    for one in runs:
        assert one["losses"] == pytest.approx(runs[0]["losses"], rel=1e-10), one["name"]
        assert one["moved"] == pytest.approx(runs[0]["moved"], rel=1e-9)
        assert one["step_s"] > 0
        assert sum(one["stages"]) == LAYERS
    assert runs[0]["moved"] > 0
    assert runs[-1]["predicted_s"] > 0
    table = page.read_text().splitlines()
    assert (table[0], table[-1]) == ("before", "after")
    assert [line.split(" | ")[0].removeprefix("| ") for line in table[4:-2]] == [*NAMES, "one process", "searched"]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["backwards"], 2, "'backwards' is not one of"),
        (["async", "--workload", "mlp:layers=3,width=4"], 1, "the variants cut VGG-19 into 44 layers"),
        (
            ["async", "--workload", "vgg-19:flat,squared,image=32,width=2,batch=48"],
            1,
            "a batch of 48 can't be 64 equal",
        ),
        (["async", "--workload", "vgg-20"], 1, "vgg-20"),
        (["--optimizer", "sgd:speed=1"], 1, "sgd:speed=1"),
        (["--write", "absent.md"], 1, "absent.md"),
        (["--steps", "0"], 2, "--steps"),
    ],
)
def test_what_cannot_be_asked_is_told(words: list[str], code: int, said: str) -> None:
    result = CliRunner().invoke(variants.command, words)
    assert result.stdout == ""
    if code == 2:
        assert result.exit_code == 2
        assert said in result.stderr
    else:
        assert isinstance(result.exception, hpgo.errors.HpgoError)
        assert said in result.exception.message
        assert result.exception.hint


def test_launchers_are_told_that_it_starts_its_own_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    for command, words in ((variants.command, []), (reproduction.command, ["--emulate"])):
        result = CliRunner().invoke(command, words)
        assert isinstance(result.exception, hpgo.errors.ArgumentError)
        assert "starts its own processes" in str(result.exception)


# --- DAPPLE's plans ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model",
    [pytest.param(one, marks=pytest.mark.slow) if one in {"amoebanet-36", "bert-48"} else one for one in MODELS],
)
def test_dapple_s_five_models_run_their_plans(model: str, tmp_path: Path) -> None:
    """The published kind of plan on sixteen devices, with fewer micro-batches; one process that runs the same.

    In every run, XLNet-36 stands for the other long chains, and tests/test_workloads.py cuts AmoebaNet everywhere.
    """
    (question,) = (one for one in STRATEGIES if one.model == model)
    plan = answers._strategy(question, "A").published_priced
    assert plan is not None
    size = max(stage.replicas for stage in plan.stages)  # a row for each replica

    def case(stages: list[tuple[tuple[str, ...], tuple[int, ...]]]) -> dict[str, Any]:
        schedule = hpgo.schedule("1f1b", ranks=len(stages), micro_batches=2)
        program = hpgo.program(
            schedule, stages, pipeline_micro_batch_size=size, global_batch_size=2 * size, nodes=plan.program().nodes
        )
        return {"program": json.loads(program.to_json()), "workload": MODELS[model], "example": True}

    stages = [(stage.layers, stage.devices) for stage in plan.program().stages]
    whole = [(tuple(chain(*(layers for layers, _ in stages))), (0,))]
    ranks, alone = ran(tmp_path, 16, [case(stages), case(whole)])
    losses, held, *_ = alone[0]
    wanted = {(layer, name): gradient for layer, name, gradient, _ in held}
    largest = max(float(gradient.abs().max()) for gradient in wanted.values() if gradient is not None)
    assert largest > 0
    share, bound = BOUNDS.get(model, (1e-12, 1e-11))
    seen = set()
    for theirs, those, *_ in ranks:
        assert theirs == pytest.approx(losses, rel=share)
        for layer, name, gradient, _ in those:
            seen.add((layer, name))
            if gradient is not None:
                assert float((gradient - wanted[layer, name]).abs().max()) <= bound * largest, (layer, name)
    assert seen == wanted.keys()


def emulate_a_question() -> None:
    """Emulate the plans of one question, and check them. Each of their 16 ranks is a fork of this process."""
    (question,) = (one for one in STRATEGIES if one.model == "gnmt-16")
    row = answers._strategy(question, "A")
    made = emulated([row], pass_s=0.01)
    assert [one.whose for one in made] == [("DAPPLE", "modern"), ("compatible",)]
    for one in made:
        # Nothing can be faster than predicted; how much slower depends on who else uses the machine.
        assert one.emulated_s >= one.plan.step_s * (1 - 1e-6)
    lines = reproduction.emulated_table(made).splitlines()
    assert len(lines) == 4
    assert lines[2].startswith("| gnmt-16 | A | DAPPLE, modern | 8:8 (59:21) | 398.9 ms | ")


def test_every_plan_of_a_question_is_emulated_at_published_size() -> None:
    # Forks of a process that has run other tests would copy all that these have imported.
    spawned = multiprocessing.get_context("spawn").Process(target=emulate_a_question)
    spawned.start()
    spawned.join()
    assert spawned.exitcode == 0


def test_stages_that_sleep_take_the_passes_that_the_page_counts() -> None:
    passes = {(1, 1): 16, (2, 2): 16 + 1, (4, 4): 16 + 3, (8, 4): 32 + 3, (8, 8): 16 + 7}
    assert tuple(passes) == sleeping_stages.CASES
    for (stages, processes), count in passes.items():
        step_s = hpgo.simulate(sleeping_stages.program_of(stages, processes)).makespan_s
        assert step_s == pytest.approx(count * (sleeping_stages.FORWARD_S + sleeping_stages.BACKWARD_S) / stages)
