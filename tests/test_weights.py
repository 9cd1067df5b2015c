"""Weights of a run load into the user's model under its own names, and a run starts from files of them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

import hpgo

torch = pytest.importorskip("torch", reason="needs torch: pip install torch")

import runtime_models  # noqa: E402 -- it needs torch
import weight_models  # noqa: E402
from checkpoint_ranks import adamw  # noqa: E402
from refusals import refused  # noqa: E402
from test_pretrained import CONFIGS, config  # noqa: E402

from hpgo.runtime import (  # noqa: E402
    Pipeline,
    WeightFiles,
    Workload,
    read_optimizer_state,
    read_weights,
    write_dcp,
    write_weights,
)
from hpgo.runtime.passes import running  # noqa: E402
from hpgo.runtime.weight_names import configuration  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def program(workload: Workload) -> hpgo.Program:
    """Two micro-batches of four samples on one device."""
    schedule = hpgo.schedule("1f1b", ranks=1, micro_batches=2)
    return hpgo.program(schedule, [(workload.layers, [0])], pipeline_micro_batch_size=4, global_batch_size=8)


def trained(workload: Workload, folder: Path, **how: Any) -> float:
    """Train for a step, save, and return the loss of a second step, which is not saved."""
    with Pipeline(program(workload), workload, optimizer=adamw, **how) as pipeline:
        batch = pipeline.example()
        pipeline.step(*batch)
        pipeline.checkpoint(folder, keep=1)
        return pipeline.step(*batch)


def continued(workload: Workload, **how: Any) -> float:
    """Return the loss of a first step."""
    with Pipeline(program(workload), workload, optimizer=adamw, **how) as pipeline:
        return pipeline.step(*pipeline.example())


def own(seed: int) -> weight_models.Net:
    torch.manual_seed(seed)
    return weight_models.Net()


@pytest.mark.parametrize("grain", ["op", "module", "block"])
@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_weights_load_strictly_into_the_users_model(grain: str, dtype: Any, tmp_path: Path) -> None:
    model = own(1)
    workload = Workload(model, *weight_models.examples(), weight_models.loss).by(grain)
    loss = trained(workload, tmp_path / "saved", dtype=dtype)
    state = read_weights(tmp_path / "saved")
    other = own(2).to(dtype)
    other.load_state_dict(state, strict=True)
    # A second step of plain PyTorch, in micro-batches as batch norm counts them.
    inputs, targets = weight_models.examples()
    halves = [weight_models.loss(other(inputs[at : at + 4]), targets[at : at + 4]).item() for at in (0, 4)]
    assert sum(halves) / 2 == pytest.approx(loss, rel=1e-12 if dtype is torch.float64 else 1e-5)
    assert state["table.weight"].equal(state["head.weight"])
    for name in ("mask", "unread", "spare.weight"):  # what no layer trains stays
        assert state[name].equal(model.state_dict()[name])
    assert state["blocks.2.1.num_batches_tracked"] == 2
    assert not state["blocks.0.0.weight"].equal(model.blocks[0][0].weight)


def test_unused_weights_without_values_are_left_out(tmp_path: Path) -> None:
    model = own(1)
    model.spare.to("meta")
    trained(Workload(model, *weight_models.examples(), weight_models.loss), tmp_path)
    assert set(model.state_dict()) - set(read_weights(tmp_path)) == {"spare.weight", "spare.bias"}


@pytest.mark.parametrize("name", ["chain", "compiled"])
def test_lists_and_compiled_models_have_their_own_names(name: str, tmp_path: Path) -> None:
    trained(Workload.read(f"weight_models:{name}"), tmp_path)
    if name == "compiled":
        own(2).load_state_dict(read_weights(tmp_path), strict=True)
    else:
        table, head = torch.nn.Embedding(11, 8), torch.nn.Linear(8, 11, bias=False)
        torch.nn.Sequential(table, torch.nn.BatchNorm1d(4), head).load_state_dict(read_weights(tmp_path), strict=True)


def _single(folder: Path, state: dict[str, torch.Tensor]) -> Path:
    write_weights(folder / "a.safetensors", state)
    return folder / "a.safetensors"


def _sharded(folder: Path, state: dict[str, torch.Tensor]) -> Path:
    assert len(write_weights(folder, state, max_shard_bytes=600)) > 3
    return folder


def _dcp(folder: Path, state: dict[str, torch.Tensor]) -> Path:
    write_dcp(folder, state)
    return folder


def _wrapped(folder: Path, state: dict[str, torch.Tensor]) -> Path:
    write_weights(folder / "a.safetensors", {f"module._orig_mod.{name}": one for name, one in state.items()})
    return folder / "a.safetensors"


def _once(folder: Path, state: dict[str, torch.Tensor]) -> Path:
    """As `save_pretrained` writes a tied weight: under one of its names."""
    write_weights(folder / "a.safetensors", {name: one for name, one in state.items() if name != "head.weight"})
    return folder / "a.safetensors"


@pytest.mark.parametrize("form", [_single, _sharded, _dcp, _wrapped, _once])
def test_a_run_starts_from_weights_in_any_form(form: Callable[..., Path], tmp_path: Path) -> None:
    source = Workload(own(1), *weight_models.examples(), weight_models.loss)
    loss = trained(source, tmp_path / "saved")
    path = (
        form(tmp_path / "form", read_weights(tmp_path / "saved")) if (tmp_path / "form").mkdir() is None else tmp_path
    )
    for at in (path, tmp_path / "saved", tmp_path / "saved" / "step-1"):
        other = Workload(own(2), *weight_models.examples(), weight_models.loss)
        assert continued(other, weights=at) == pytest.approx(loss, rel=1e-6)
    # What no layer trains goes on to the checkpoints of the new run, and to the runs that resume from them.
    other = Workload(own(2), *weight_models.examples(), weight_models.loss)
    trained(other, tmp_path / "next", weights=path)
    for name in ("mask", "unread", "spare.bias"):
        assert read_weights(tmp_path / "next")[name].equal(read_weights(tmp_path / "saved")[name])
    with Pipeline(program(other), other, optimizer=adamw) as pipeline:
        assert pipeline.resume(tmp_path / "next")
        pipeline.step(*pipeline.example())
        pipeline.checkpoint(tmp_path / "next", keep=1)
    for name in ("mask", "unread", "spare.bias"):
        assert read_weights(tmp_path / "next")[name].equal(read_weights(tmp_path / "saved")[name])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_state_of_torch_reads_what_is_written_and_the_other_way(tmp_path: Path) -> None:
    from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, load, save

    state = own(1).state_dict()
    write_dcp(tmp_path / "ours", state)
    found = own(2).state_dict()
    load(found, storage_reader=FileSystemReader(tmp_path / "ours"), no_dist=True)
    assert all(found[name].equal(state[name]) for name in state)
    save({"model": state, "step": 3}, storage_writer=FileSystemWriter(tmp_path / "theirs"), no_dist=True)
    read = read_weights(tmp_path / "theirs")
    assert {name.removeprefix("model.") for name in read} == set(state)
    workload = Workload(own(2), *weight_models.examples(), weight_models.loss)
    same = Workload(own(1), *weight_models.examples(), weight_models.loss)
    assert continued(workload, weights=tmp_path / "theirs") == pytest.approx(continued(same), rel=1e-6)


def test_weights_of_another_model_are_refused_by_its_names(tmp_path: Path) -> None:
    state = own(1).state_dict()
    changes: list[tuple[dict[str, Any], str, str]] = [
        ({"blocks.1.0.weight": None}, "missing", "`blocks.1.0.weight`"),
        ({"mask": None}, "missing", "`mask`"),
        ({"blocks.1.0.weight": torch.ones(8, 7)}, "mismatch", r"`blocks.1.0.weight` of shape \(8, 7\)"),
        ({"blocks.3.0.weight": torch.ones(8, 8)}, "mismatch", "`blocks.3.0.weight`"),
    ]
    for change, code, words in changes:
        path = tmp_path / "a.safetensors"
        write_weights(path, {name: one for name, one in (state | change).items() if one is not None})
        workload = Workload(own(2), *weight_models.examples(), weight_models.loss)
        with pytest.raises(hpgo.errors.RunError, match=words) as caught:
            continued(workload, weights=path)
        assert caught.value.code == code


def test_a_checkpoint_names_the_models_weight_that_does_not_fit(tmp_path: Path) -> None:
    workload = Workload(own(1), *weight_models.examples(), weight_models.loss)
    trained(workload, tmp_path)
    with (
        Pipeline(program(workload), workload, optimizer=adamw, dtype=torch.bfloat16) as pipeline,
        pytest.raises(hpgo.errors.RunError, match=r"in the model, it is `table.weight`"),
    ):
        pipeline.resume(tmp_path)


@pytest.mark.parametrize("kind", ["gpt2", "bert", "resnet"])
def test_a_folder_of_hugging_face_holds_what_was_trained(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    workload = Workload.read(config(kind, tmp_path))
    trained(workload, tmp_path / "saved")
    with WeightFiles(tmp_path / "saved") as weights:
        assert weights.config == json.loads((tmp_path / "config.json").read_text())
        write_weights(tmp_path / "mine", weights, config=weights.config)
        state = dict(weights)
    architecture = getattr(transformers, CONFIGS[kind]["architectures"][0])
    model, facts = architecture.from_pretrained(tmp_path / "mine", output_loading_info=True)
    assert not any(facts[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert all(tensor.equal(state[name]) for name, tensor in model.state_dict().items())
    model.load_state_dict(state, strict=True)
    # A run of the folder, and a run that starts from it, have the weights, too.
    (again,) = Workload.read(str(tmp_path / "mine")).parts([workload.layers])
    (before,) = workload.parts([workload.layers])
    with torch.no_grad(), running(step=0, samples=range(4)):
        expected = model.eval()(workload.example_inputs[0]).logits
        assert torch.allclose(again.eval()(*workload.example_inputs, rows=4)[0], expected, atol=1e-5)
        assert not torch.allclose(before.eval()(*workload.example_inputs, rows=4)[0], expected, atol=1e-5)


def test_a_model_of_transformers_brings_a_configuration_that_names_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    model = transformers.GPT2LMHeadModel(transformers.AutoConfig.for_model("gpt2", n_embd=16, n_layer=1, n_head=2))
    write_weights(tmp_path, model.state_dict(), config=configuration(model))
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(other) is type(model)
    assert all(tensor.equal(model.state_dict()[name]) for name, tensor in other.state_dict().items())
    assert configuration(own(1)) is None


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (lambda folder: (folder / "model.safetensors.index.json").write_text("[]"), "damaged_file"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": 3}'), "damaged_file"),
        (lambda folder: next(folder.glob("model-00001*")).write_bytes(b"12"), "damaged_file"),
        (lambda folder: next(folder.glob("model-00001*")).unlink(), "not_writable"),
        (lambda folder: [one.unlink() for one in folder.iterdir()], "not_found"),
    ],
)
def test_damaged_files_are_refused(damage: Callable[[Path], Any], code: str, tmp_path: Path) -> None:
    write_weights(tmp_path, own(1).state_dict(), max_shard_bytes=600)
    damage(tmp_path)
    with refused(hpgo.errors.HpgoError, code):
        read_weights(tmp_path)


def test_the_command_writes_what_a_run_on_several_ranks_saved(tmp_path: Path) -> None:
    """Two stages, of which the first has two replicas, save files that hold parts of one model."""
    import warm_ranks
    from click.testing import CliRunner
    from test_runtime import put

    from hpgo.cli.main import group

    case = put("1f1b", [[0, 1], [2]], world=3, micro_batches=2, share=2, workload="tied", shard_optimizer=True)
    (tmp_path / "cases.json").write_text(json.dumps([{**case, "steps": 2, "save": "saved"}]))
    done = warm_ranks.ran("checkpoint_ranks.py", 3, tmp_path, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    out = tmp_path / "out.safetensors"
    result = CliRunner().invoke(group, ["weights", str(tmp_path / "saved"), "-o", str(out), "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.output)
    state = read_weights(out)
    assert document["files"] == [str(out)]
    assert document["tensors"] == len(state)
    workload = Workload.read(case["workload"])
    (whole,) = workload.parts([workload.layers], dtype=torch.float64)
    assert set(state) == {f"{layer}.{name}" for layer, named in whole.by_layer().items() for name in named}
    with Pipeline(program(workload), workload, weights=out, dtype=torch.float64) as pipeline:
        (part,) = pipeline.parts.values()
        for layer, named in part.by_layer().items():
            assert all(tensor.equal(state[f"{layer}.{name}"]) for name, tensor in named.items())
    # Each replica has saved the state of other weights. Together, they are the state of a run on one rank.
    found = read_optimizer_state(tmp_path / "saved")
    schedule = hpgo.schedule("1f1b", ranks=1, micro_batches=2)
    one_rank = hpgo.program(schedule, [(workload.layers, [0])], pipeline_micro_batch_size=2, global_batch_size=4)
    with Pipeline(one_rank, workload, optimizer=adamw, clip_norm=0.5, dtype=torch.float64) as pipeline:
        for step in range(2):
            pipeline.step(*runtime_models.batch(workload, 4, step))
        pipeline.checkpoint(tmp_path / "alone")
    alone = read_optimizer_state(tmp_path / "alone")
    assert found["state"].keys() == alone["state"].keys() == state.keys() - {"head.weight"}
    torch.testing.assert_close(found["state"], alone["state"], rtol=1e-9, atol=1e-15)
    (group_found,), (group_alone,) = found["param_groups"], alone["param_groups"]
    assert sorted(group_found.pop("params")) == sorted(group_alone.pop("params"))
    assert group_found == group_alone


# --- the state of optimizers ---

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda own: torch.optim.Adam(own, lr=0.01, weight_decay=0.1),
    "adamw": lambda own: torch.optim.AdamW(own, lr=0.01, amsgrad=True),
    "sgd": lambda own: torch.optim.SGD(own, lr=0.1, momentum=0.9),
}


def trainable(kind: str, seed: int) -> torch.nn.Module:
    """Return a model in 64 bits with a tied weight: one to export, or a list of layers, which is faster."""
    model: torch.nn.Module = own(seed)
    if kind == "adamw":
        del model.spare  # nothing trains it, so torch has no state of it
    else:
        model = torch.nn.Sequential(model.table, torch.nn.BatchNorm1d(weight_models.LENGTH), model.head)
    return model.double()


def batches(begin: int, end: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    shape = 8, weight_models.LENGTH
    made = [torch.randint(weight_models.WORDS, shape, generator=generator) for _ in range(2 * end)]
    return list(zip(made[::2], made[1::2], strict=True))[begin:]


def plain_steps(model: Any, optimizer: torch.optim.Optimizer, begin: int, end: int) -> list[float]:
    losses = []
    for inputs, targets in batches(begin, end):
        optimizer.zero_grad()
        found = weight_models.loss(model(inputs), targets)
        found.backward()
        optimizer.step()
        losses.append(found.item())
    return losses


def pipeline_steps(kind: str, begin: int, end: int, save: Path | None = None, **how: Any) -> list[float]:
    """Train in one micro-batch, because batch norm counts micro-batches."""
    model = trainable(kind, 2 if "weights" in how else 1)
    workload = Workload(model, *weight_models.examples(), weight_models.loss)
    schedule = hpgo.schedule("1f1b", ranks=1, micro_batches=1)
    whole = hpgo.program(schedule, [(workload.layers, [0])], pipeline_micro_batch_size=8, global_batch_size=8)
    how.setdefault("optimizer", OPTIMIZERS[kind])
    with Pipeline(whole, workload, dtype=torch.float64, **how) as pipeline:
        losses = [pipeline.step(*batch) for batch in batches(begin, end)]
        if save is not None:
            pipeline.checkpoint(save)
    return losses


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_plain_torch_continues_a_run_exactly_and_a_run_continues_plain_torch(kind: str, tmp_path: Path) -> None:
    from click.testing import CliRunner
    from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, load, save
    from torch.distributed.checkpoint import state_dict as torch_states

    from hpgo.cli.main import group

    model = trainable(kind, 1)
    optimizer = OPTIMIZERS[kind](model.parameters())
    expected = plain_steps(model, optimizer, 0, 3)
    layouts = [torch_states.StateDictOptions(flatten_optimizer_state_dict=flat) for flat in (False, True)]
    for at, layout in enumerate(layouts):
        state = torch_states.get_optimizer_state_dict(model, optimizer, options=layout)
        whole = [{"app": {"model": model.state_dict(), "optim": state}}, {**model.state_dict(), "optimizer": state}][at]
        save(whole, storage_writer=FileSystemWriter(tmp_path / f"theirs-{at}"), no_dist=True)
    expected += plain_steps(model, optimizer, 3, 6)

    assert pipeline_steps(kind, 0, 3, tmp_path / "saved") == pytest.approx(expected[:3], rel=1e-12)
    words = ["weights", str(tmp_path / "saved"), "-o", str(tmp_path / "ours"), "--format", "dcp", "--with-optimizer"]
    assert CliRunner().invoke(group, words).exit_code == 0
    for layout in layouts:
        model = trainable(kind, 3)
        optimizer = OPTIMIZERS[kind](model.parameters())
        state = torch_states.get_optimizer_state_dict(model, optimizer, options=layout)
        whole = {**model.state_dict(), "optimizer": state}
        load(whole, storage_reader=FileSystemReader(tmp_path / "ours"), no_dist=True)
        torch_states.set_optimizer_state_dict(model, optimizer, whole.pop("optimizer"), options=layout)
        model.load_state_dict(whole)
        assert plain_steps(model, optimizer, 3, 6) == pytest.approx(expected[3:], rel=1e-12)

    for source in ("theirs-0", "theirs-1", "ours", "saved")[: None if kind == "adam" else 2]:
        folder = tmp_path / source
        losses = pipeline_steps(kind, 3, 6, weights=folder, optimizer_state=folder)
        assert losses == pytest.approx(expected[3:], rel=1e-12)
    fresh = pipeline_steps(kind, 3, 6, weights=tmp_path / "saved")
    assert fresh[0] == pytest.approx(expected[3], rel=1e-12)
    assert fresh != pytest.approx(expected[3:], rel=1e-4)


def by_name(named: Any) -> torch.optim.Optimizer:
    """Return an optimizer that lets only weights decay."""
    named = list(named)
    return torch.optim.AdamW(
        [
            {"params": [one for name, one in named if not name.endswith("bias")], "weight_decay": 0.1},
            {"params": [one for name, one in named if name.endswith("bias")], "weight_decay": 0.0},
        ],
        lr=0.01,
    )


def test_groups_of_parameters_by_their_names_continue_in_plain_torch(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

    model = trainable("adam", 1)
    expected = plain_steps(model, by_name(model.named_parameters()), 0, 6)

    def make(parameters: list[torch.nn.Parameter], names: list[str]) -> torch.optim.Optimizer:
        return by_name(zip(names, parameters, strict=True))

    losses = pipeline_steps("adam", 0, 3, tmp_path / "saved", optimizer=make)
    assert losses == pytest.approx(expected[:3], rel=1e-12)
    state = read_optimizer_state(tmp_path / "saved")
    assert [(group["weight_decay"], group["params"]) for group in state["param_groups"]] == [
        (0.1, ["0.weight", "1.weight"]),
        (0.0, ["1.bias"]),
    ]
    model = trainable("adam", 2)
    model.load_state_dict(read_weights(tmp_path / "saved"))
    optimizer = by_name(model.named_parameters())
    set_optimizer_state_dict(model, optimizer, state)
    assert plain_steps(model, optimizer, 3, 6) == pytest.approx(expected[3:], rel=1e-12)


def test_sharded_weights_of_torch_continue_a_run_exactly(tmp_path: Path) -> None:
    """FSDP reads the layout that does not depend on numbers of groups, as torchtitan does."""
    import torch.distributed as dist
    from torch.distributed.checkpoint import FileSystemReader, load
    from torch.distributed.checkpoint import state_dict as torch_states
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    losses = pipeline_steps("adam", 0, 6, tmp_path / "saved-6")
    pipeline_steps("adam", 0, 3, tmp_path / "saved")
    weights, state = read_weights(tmp_path / "saved"), read_optimizer_state(tmp_path / "saved")
    write_dcp(tmp_path / "ours", weights, optimizer_state=state)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model: Any = trainable("adam", 3)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        optimizer = OPTIMIZERS["adam"](model.parameters())
        layout = torch_states.StateDictOptions(flatten_optimizer_state_dict=True)
        found, its_state = torch_states.get_state_dict(model, optimizer, options=layout)
        # What torchtitan's scheduler of learning rates adds to each group.
        its_state |= {f"param_groups.{name}.initial_lr": 0.0 for name, _ in model.named_parameters()}
        whole = {**found, "optimizer": its_state}
        load(whole, storage_reader=FileSystemReader(tmp_path / "ours"))
        its_state = whole.pop("optimizer")
        assert its_state["param_groups.0.weight.initial_lr"] == 0.01
        torch_states.set_state_dict(
            model, optimizer, model_state_dict=whole, optim_state_dict=its_state, options=layout
        )
        assert plain_steps(model, optimizer, 3, 6) == pytest.approx(losses[3:], rel=1e-12)
    finally:
        dist.destroy_process_group()


def test_optimizer_state_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    pipeline_steps("sgd", 0, 1, tmp_path / "saved")
    index = tmp_path / "saved/step-1/checkpoint.json"
    saved = {"weights": tmp_path / "saved", "optimizer_state": tmp_path / "saved"}
    with refused(hpgo.errors.RunError, "mismatch", "`betas`"):
        pipeline_steps("adam", 1, 2, **saved)
    state = read_optimizer_state(tmp_path / "saved")
    assert state["state"].keys() == {"0.weight", "1.weight", "1.bias"}
    assert state["param_groups"][0].keys() >= {"lr", "momentum", "params"}
    del state["state"]["1.bias"]
    write_dcp(tmp_path / "less", read_weights(tmp_path / "saved"), optimizer_state=state)
    with refused(hpgo.errors.RunError, "missing", "`1.bias`"):
        pipeline_steps("sgd", 1, 2, optimizer_state=tmp_path / "less")
    write_dcp(tmp_path / "none", read_weights(tmp_path / "saved"))
    for path in ("none", "nothing"):
        with refused(hpgo.errors.FileError, "not_found", path):
            read_optimizer_state(tmp_path / path)
    (tmp_path / "none/.metadata").write_bytes(b"12")
    with refused(hpgo.errors.FileError, "damaged_file"):
        read_weights(tmp_path / "none")
    for wrong in ({"state": {}}, 3):
        with pytest.raises(hpgo.errors.ArgumentError):
            write_dcp(tmp_path / "wrong", {}, optimizer_state=wrong)  # type: ignore[arg-type]
    # An index of an earlier version.
    facts = json.loads(index.read_text())
    del facts["param_groups"], facts["checksum"]
    index.write_text(json.dumps(facts))
    with refused(hpgo.errors.RunError, "missing", "step-1"):
        read_optimizer_state(tmp_path / "saved")
