"""What is saved under one plan goes on under any, and whatever breaks a save off leaves the one before."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import effort
import pytest
import warm_ranks

import hpgo

torch = pytest.importorskip("torch", reason="needs torch: pip install torch")

from checkpoint_ranks import adamw  # noqa: E402 -- it needs torch
from refusals import refused  # noqa: E402
from test_runtime import alone, put  # noqa: E402

from hpgo.runtime import Loader, Pipeline, Workload, read_weights  # noqa: E402
from hpgo.runtime.checkpoint import read_checkpoint  # noqa: E402
from hpgo.runtime.tensor_files import TensorFile  # noqa: E402

ROOT = Path(__file__).parent.parent


def ranks(world: int | str, cases: list[dict[str, Any]], folder: Path) -> list[Any]:
    """For each case what the ranks say, all of them the same losses: `(losses, what rank 0 was told)`."""
    (folder / "cases.json").write_text(json.dumps(cases))
    done = warm_ranks.ran("checkpoint_ranks.py", world, folder, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    if isinstance(world, str):
        return []
    first, *others = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]
    for other in others:
        assert [losses for losses, _ in other] == [losses for losses, _ in first]
        assert not any(told for _, told in other)
    return list(first)


def saved(folder: Path) -> list[str]:
    """Names in a folder of checkpoints."""
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("workload", ["dropping", "tied", "adapted"])
def test_a_run_goes_on_under_its_plan_bit_for_bit_and_under_others(workload: str, tmp_path: Path) -> None:
    uneven = put("1f1b", [[0, 1, 2], [3]], share=4, micro_batches=4, workload=workload, shard_optimizer=True)
    three = put("1f1b", [[1, 3], [2], [0]], share=4, micro_batches=4, workload=workload)
    folded = put("zb_v", [[0, 2], [1]], share=4, micro_batches=4, workload=workload)
    twice = put("dualpipe", [[0, 1], [2, 3]], share=2, micro_batches=8, workload=workload, shard_optimizer=True)
    cases = [
        {**uneven, "steps": 6},
        {**uneven, "steps": 2, "save": "saved"},
        {**uneven, "steps": 6, "resume": "saved"},
        {**three, "steps": 3, "resume": "saved", "save": "saved"},
        {**folded, "steps": 4, "resume": "saved", "save": "saved"},
        {**twice, "steps": 5, "resume": "saved", "save": "saved"},
        {**uneven, "steps": 6, "resume": "saved"},
    ]
    (whole, *_), *resumed = ranks(4, cases, tmp_path)
    found = [losses for losses, _ in resumed]
    assert found[0] == whole[:2]
    assert found[1] == whole[2:]
    assert [len(losses) for losses in found[2:]] == [1, 1, 1, 1]
    assert [loss for losses in found[2:] for loss in losses] == pytest.approx(whole[2:], rel=1e-10)
    assert saved(tmp_path / "saved") == ["step-3", "step-4", "step-5"]


def test_a_full_disk_is_told_and_the_run_goes_on(tmp_path: Path) -> None:
    case = put("1f1b", [[0], [1]], share=2, world=2)
    cases = [{**case, "steps": 5}, {**case, "steps": 4, "save": "saved", "full_from": 2}]
    cases.append({**case, "steps": 5, "resume": "saved"})
    (whole, _), (losses, told), (resumed, _) = ranks(2, cases, tmp_path)
    assert losses == whole[:4]
    assert [text.partition(":")[0] for text in told] == [
        f"no checkpoint of step {step} was written, and the run goes on" for step in (3, 4)
    ]
    assert all("rank 1: can't write" in text and "File too large" in text for text in told)
    assert all(text.endswith("the last good one is of step 2") for text in told)
    assert saved(tmp_path / "saved") == ["step-1", "step-2"]
    assert resumed == whole[2:]


def test_a_kill_during_a_save_leaves_the_one_before(tmp_path: Path) -> None:
    ranks("killed", [put("1f1b", [[0]], share=2, world=1)], tmp_path)
    # Where each process began; the last of those that were killed was so behind the renaming.
    assert (tmp_path / "resumed").read_text().split() == ["0", "1", "1", "1", "1", "2"]
    assert saved(tmp_path / "saved") == ["step-1", "step-2", "step-3"]


class Noise(torch.nn.Module):
    """Draws from torch's own generator."""

    def forward(self, given: Any) -> Any:
        return given + torch.rand_like(given)


def noisy() -> Workload:
    torch.manual_seed(1)
    layers = [*[torch.nn.Linear(3, 3) for _ in range(7)], Noise()]
    return Workload(layers, torch.zeros(2, 3), torch.zeros(2, 3), torch.nn.functional.mse_loss)


def train(steps: int, **given: Any) -> Pipeline:
    """One rank for so many steps of three an epoch, by AdamW, saved behind the last; `given` are options of its own."""
    data = [(torch.full((3,), at / 16), torch.zeros(3)) for at in range(15)]
    folder, losses = given.pop("folder", None), given.pop("losses", [])
    resumes, loads_first = given.pop("resume", False), given.pop("loads_first", False)
    with Pipeline(alone(), noisy(), **{"optimizer": adamw, **given}) as pipeline:
        loader = pipeline.loader(data) if loads_first else None
        if resumes:
            assert pipeline.resume(folder)
        loader = loader or pipeline.loader(data)
        while pipeline.steps < steps:
            for batch in loader:
                losses.append(pipeline.step(*batch))
                if pipeline.steps == steps:
                    break
        if folder is not None:
            pipeline.checkpoint(folder, keep=2)
    return pipeline


@pytest.mark.parametrize("loads_first", [True, False])
def test_data_and_random_numbers_go_on_where_they_were(loads_first: bool, tmp_path: Path) -> None:
    whole: list[float] = []
    found: list[float] = []
    torch.manual_seed(5)
    train(11, losses=whole)
    torch.manual_seed(5)
    train(4, losses=found, folder=tmp_path)
    for steps in (6, 11):
        torch.manual_seed(7)
        train(steps, losses=found, folder=tmp_path, resume=True, loads_first=loads_first)
    assert found == whole
    assert saved(tmp_path) == ["step-11", "step-6"]


def test_a_folder_without_checkpoints_begins_a_run(tmp_path: Path) -> None:
    with Pipeline(alone(), noisy()) as pipeline:
        assert not pipeline.resume(tmp_path / "absent")
        pipeline.checkpoint(tmp_path / "new")
        assert pipeline.steps == 0
    assert saved(tmp_path / "new") == []


@pytest.mark.parametrize("harm", ["short", "no index", "half an index", "of tomorrow", "no file"])
def test_a_torn_checkpoint_is_never_picked(harm: str, tmp_path: Path) -> None:
    train(2, folder=tmp_path)
    train(3, folder=tmp_path, resume=True)
    last, index = tmp_path / "step-3", (tmp_path / "step-3/checkpoint.json").read_text()
    tensors = (last / "rank-0.safetensors").read_bytes()
    if harm == "short":
        (last / "rank-0.safetensors").write_bytes(tensors[:-1])
    elif harm == "no file":
        (last / "rank-0.safetensors").unlink()
    elif harm == "no index":
        (last / "checkpoint.json").unlink()
    else:
        half = index[: len(index) // 2]
        (last / "checkpoint.json").write_text(half if harm != "of tomorrow" else index.replace('n": 1', 'n": 9', 1))
    with Pipeline(alone(), noisy(), optimizer=adamw) as pipeline:
        assert pipeline.resume(tmp_path)
        assert pipeline.steps == 2
    shutil.rmtree(tmp_path / "step-2")
    with Pipeline(alone(), noisy(), optimizer=adamw) as pipeline, refused(hpgo.errors.RunError, "damaged_file"):
        pipeline.resume(tmp_path)


def test_what_does_not_fit_is_refused_and_leaves_the_weights(tmp_path: Path) -> None:
    train(2, folder=tmp_path)
    other = hpgo.program(
        hpgo.schedule("1f1b", ranks=1, micro_batches=2), [(noisy().layers, [0])],
        pipeline_micro_batch_size=1, global_batch_size=2,
    )  # fmt: skip
    for change, words in (
        ({"dtype": torch.bfloat16}, r"holds `layer\.0\.weight` in torch\.float32, but this run has it in torch\.bf"),
        ({"seed": 3}, "saved with the seed 0, but this run has 3"),
        ({"optimizer": lambda p: torch.optim.SGD(p, lr=0.1)}, "the optimizer AdamW, but this run has SGD"),
        ({"plan": other}, "saved with the global batch 4, but this run has 2"),
        ({"workload": "runtime_models:chain"}, r"lacks `layer\.0\.linear\.weight`"),
    ):
        with Pipeline(**{"plan": alone(), "workload": noisy(), "optimizer": adamw} | change) as pipeline:
            before = [weight.copies[0].detach().clone() for weight in pipeline.weights]
            with pytest.raises(hpgo.errors.RunError, match=words) as caught:
                pipeline.resume(tmp_path)
            assert caught.value.hint
            assert all(torch.equal(a, b.copies[0]) for a, b in zip(before, pipeline.weights, strict=True))
            assert pipeline.steps == 0
            with refused(hpgo.errors.RunError, "run_failed", "2", "0"):
                pipeline.checkpoint(tmp_path)
            (tmp_path / "file").touch()
            with refused(hpgo.errors.RunError, "run_failed", "File"):
                pipeline.checkpoint(tmp_path / "file")
    with Pipeline(alone(), noisy(), optimizer=adamw) as pipeline:
        loader = pipeline.loader([(torch.zeros(3), torch.zeros(3))] * 4)
        with refused(hpgo.errors.ArgumentError, "invalid_argument", "2", "1"):
            pipeline.resume(tmp_path)
        assert isinstance(loader, Loader)


def test_a_failed_save_is_a_warning_where_nobody_is_told(tmp_path: Path) -> None:
    def strange(parameters: list[Any]) -> Any:
        made = torch.optim.SGD(parameters, lr=0.1)
        made.state[parameters[0]]["thoughts"] = object()
        return made

    with pytest.warns(
        RuntimeWarning, match=r"no checkpoint of step 1 .* the optimizer keeps `thoughts` of type object"
    ):
        train(1, optimizer=strange, folder=tmp_path)
    assert saved(tmp_path) == []


def test_other_tools_read_the_tensors(tmp_path: Path) -> None:
    numbers = pytest.importorskip("safetensors.torch")
    trained = train(2, folder=tmp_path)
    found = numbers.load_file(tmp_path / "step-2/rank-0.safetensors")
    for weight in trained.weights:
        layer, name = weight.name
        assert torch.equal(found[f"layer.{layer}.{name}"], weight.copies[0].detach())


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2**60], "data_offsets": [0, 2**62]},
        {"dtype": "F32", "shape": [2**61], "data_offsets": [0, 2**63]},
        {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]},
        {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0.0, 8.0]},
        {"dtype": "BOOL", "shape": [True], "data_offsets": [0, 1]},
        {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]},
        {"dtype": "F31", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0]},
        None,
    ],
    ids=repr,
)
def test_tensors_that_no_file_holds_are_refused_before_memory_is_taken(entry: Any, tmp_path: Path) -> None:
    header = json.dumps({"a": entry}).encode()
    path = tmp_path / "rank-0.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with refused(hpgo.errors.RunError, "damaged_file"):
        TensorFile(path)


def test_any_flipped_bit_of_a_tensor_is_found_before_a_weight_changes(tmp_path: Path) -> None:
    train(2, folder=tmp_path)
    file = tmp_path / "step-2/rank-0.safetensors"
    whole = file.read_bytes()
    begin = 8 + int.from_bytes(whole[:8], "little")
    chance = random.Random(0)
    with Pipeline(alone(), noisy(), optimizer=adamw) as pipeline:
        before = [weight.copies[0].detach().clone() for weight in pipeline.weights]
        for at in (begin, len(whole) - 1, *(chance.randrange(begin, len(whole)) for _ in range(effort.examples(60)))):
            damaged = bytearray(whole)
            damaged[at] ^= 1 << chance.randrange(8)
            file.write_bytes(damaged)
            with refused(hpgo.errors.RunError, "damaged_file", file):
                pipeline.resume(tmp_path)
            assert not pipeline.optimizer.state
            assert all(torch.equal(a, b.copies[0]) for a, b in zip(before, pipeline.weights, strict=True))
        with refused(hpgo.errors.RunError, "damaged_file", file):
            read_weights(_flipped(tmp_path, file, whole, "layer.0.weight"))
        file.write_bytes(whole)
        assert pipeline.resume(tmp_path)


def _flipped(folder: Path, file: Path, whole: bytes, name: str) -> Path:
    """Flip the lowest bit of a tensor's last byte, and return the folder."""
    length = int.from_bytes(whole[:8], "little")
    end = json.loads(whole[8 : 8 + length])[name]["data_offsets"][1]
    damaged = bytearray(whole)
    damaged[8 + length + end - 1] ^= 1
    file.write_bytes(damaged)
    return folder


def test_any_flipped_bit_of_an_index_is_found(tmp_path: Path) -> None:
    train(2, folder=tmp_path)
    file = tmp_path / "step-2/checkpoint.json"
    whole = file.read_bytes()
    chance = random.Random(0)
    for _ in range(effort.examples(600)):
        at, damaged = chance.randrange(len(whole)), bytearray(whole)
        damaged[at] ^= 1 << chance.randrange(8)
        file.write_bytes(damaged)
        # No flipped bit turns white space of JSON into other white space.
        with refused(hpgo.errors.RunError, "damaged_file", file.parent):
            read_checkpoint(file.parent)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"steps": "2"}, ("steps", "2")),
        ({"steps": 3}, ("steps", "step-2")),
        ({"version": 9}, ("version", "9")),
        ({"files": []}, ("files", "a list")),
        ({"files": {"rank-0.safetensors": 5}}, ("rank-0.safetensors", "5")),
        ({"files": {"rank-1.safetensors": 5}, "tensors": {}}, ("rank-1.safetensors",)),
        ({"tensors": {"layer.0.weight": "rank-7.safetensors"}}, ("tensors.layer.0.weight", "rank-7.safetensors")),
        ({"checksums": {"layer.0.weight": "x"}}, ("checksums",)),
        ({"layers": None}, ("layers",)),
        ({"seed": ...}, ("seed",)),
        ({"seed": 7}, ("checksum",)),
    ],
    ids=repr,
)
def test_a_damaged_index_is_refused_by_file_and_field(
    change: dict[str, Any], words: tuple[str, ...], tmp_path: Path
) -> None:
    train(2, folder=tmp_path)
    file = tmp_path / "step-2/checkpoint.json"
    facts = {key: value for key, value in (json.loads(file.read_text()) | change).items() if value is not ...}
    file.write_text(json.dumps(facts))
    with (
        Pipeline(alone(), noisy(), optimizer=adamw) as pipeline,
        refused(hpgo.errors.RunError, "damaged_file", "step-2", *words),
    ):
        pipeline.resume(tmp_path)


def test_checkpoints_without_checksums_are_read(tmp_path: Path) -> None:
    """Earlier versions wrote none."""
    train(2, folder=tmp_path)
    file = tmp_path / "step-2/checkpoint.json"
    facts = json.loads(file.read_text())
    for key in ("checksum", "checksums", "names", "config"):
        del facts[key]
    file.write_text(json.dumps(facts))
    with Pipeline(alone(), noisy(), optimizer=adamw) as pipeline:
        assert pipeline.resume(tmp_path)
    with refused(hpgo.errors.RunError, "missing", file.parent):
        read_weights(tmp_path)
