"""Job folders for torchtitan, DeepSpeed and PyTorch: their modules parse, and say what the plan says.

The frameworks' own code reads and trains them in tests/frameworks/job_checks.py.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import replace
from functools import cache
from itertools import accumulate
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner
from refusals import refused

import hpgo
from hpgo import export, jobs
from hpgo.cli.main import group
from hpgo.export.targets import find
from hpgo.jobs.folder import check_folder
from hpgo.jobs.parts import FRAMEWORKS, parts_of
from hpgo.llm.hugging_face_shape import hugging_face
from hpgo.model.arithmetic import RopeScaling
from hpgo.model.formats.transformers import of_document
from hpgo.model.transformer_presets import TRANSFORMERS

if TYPE_CHECKING:
    from pathlib import Path

H100 = hpgo.Cluster.preset("h100:1")
LLAMA = TRANSFORMERS["llama-3-8b"]
HOSTILE = 'x"""\nimport os; os._exit(3)\n\'; touch pwned; "$(touch pwned)" `touch pwned`'
TARGETS = ("torchtitan@0.3", "torchtitan@0.2", "deepspeed")


def llm(target: str, model: hpgo.Transformer = LLAMA, **given: Any) -> hpgo.LlmPlan:
    """A plan that the target runs."""
    given = {"devices": 8, "zero_stage": 3, "global_batch_size": 64, "seq_length": 8192, **given}
    one = hpgo.estimate_llm(model, H100, **given)
    return hpgo.LlmPlan.of(one, model, H100, framework=target)  # type: ignore[arg-type]


@cache
def layers(target: str, optimizer: str = "adam-fp32") -> hpgo.Plan:
    """A plan of BERT-48 that the target runs."""
    return hpgo.plan(
        hpgo.read_profile("bert-48"),
        hpgo.Cluster.preset("dapple-a"),
        global_batch_size=64,
        framework=target,  # type: ignore[arg-type]
        memory=hpgo.MemoryModel.preset(optimizer),  # type: ignore[arg-type]
    )


def texts(plan: Any, target: str) -> dict[str, str]:
    return {file.name: file.text for file in parts_of(plan, find(target)).files}  # type: ignore[arg-type]


def check_python(files: dict[str, str]) -> None:
    """Asserts that each module parses, and imports from its neighbors only what they define."""
    modules = {name.removesuffix(".py"): ast.parse(text) for name, text in files.items() if name.endswith(".py")}
    defined = {
        name: {node.name for node in module.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        | {
            target.id
            for node in module.body
            if isinstance(node, ast.Assign)
            for one in node.targets
            for target in ast.walk(one)
            if isinstance(target, ast.Name)
        }
        for name, module in modules.items()
    }
    for module in modules.values():
        for node in ast.walk(module):
            if isinstance(node, ast.ImportFrom) and node.module in modules:
                assert {alias.name for alias in node.names} <= defined[node.module]


def check_names(files: dict[str, str], folder: Path) -> None:
    """Asserts that no module uses a name before it has a value, or imports one in vain."""
    for name, text in files.items():
        if name.endswith(".py"):
            (folder / name).write_text(text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--select", "F", folder],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_framework_has_parts_of_its_own() -> None:
    known = {"megatron", "megatron-bridge", "torchtitan", "deepspeed", "torch"}
    assert {name.partition("@")[0] for name in FRAMEWORKS} == known


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["llama-3-8b", "llama-3-70b"])
def test_modules_of_a_transformers_folder_parse(target: str, name: str, tmp_path: Path) -> None:
    for given in ({}, {"pp": 2, "zero_stage": 2 if "titan" in target else 1, "overlap_dp_comm": False}):
        files = texts(llm(target, replace(TRANSFORMERS[name], layers=4), **given), target)
        check_python(files)
        check_names(files, tmp_path)
        assert {"check_config.py"} < files.keys()


@pytest.mark.parametrize("target", [*TARGETS, "torch"])
def test_modules_of_a_folder_of_layers_parse(target: str, tmp_path: Path) -> None:
    files = texts(layers(target), target)
    check_python(files)
    check_names(files, tmp_path)


def test_torchtitan_starts_from_its_registry_or_builds_the_model() -> None:
    known, new = (
        texts(llm("torchtitan@0.3", model), "torchtitan@0.3")["job_config.py"]
        for model in (LLAMA, replace(LLAMA, layers=30))
    )
    assert "from torchtitan.models.llama3.config_registry import llama3_8b" in known
    assert "The model is 8B of torchtitan's `llama3`." in known
    assert "make_gqa_config" not in known
    assert "The model is new: torchtitan's registry has none of this shape, so `base` builds it." in new
    assert "from planned import SHAPE, planned" in new
    assert f"std={LLAMA.arithmetic.init_std}" in new  # type: ignore[union-attr]
    three = replace(LLAMA, layers=28, hidden=3072, heads=24, ffn=8192, tied=True)
    text = texts(llm("torchtitan@0.3", three), "torchtitan@0.3")["job_config.py"]
    assert 'config.model_spec = model_registry("3B")' in text
    headed = replace(LLAMA, head_norms=True)
    assert "Qwen3Model.Config(" in texts(llm("torchtitan@0.3", headed), "torchtitan@0.3")["job_config.py"]


def test_torchtitan_0_2_registers_the_planned_model() -> None:
    files = texts(llm("torchtitan@0.2"), "torchtitan@0.2")
    assert tomllib.loads(files["job.toml"])["training"]["seq_len"] == 8192
    model = files["job_model.py"]
    # 8/3 of the hidden size times 0.875, rounded up to a multiple of the FFN size, is the FFN size.
    for line in ("multiple_of=14336", "ffn_dim_multiplier=0.875", "rope_theta=500000", "norm_eps=1e-05"):
        assert line in model
    assert int(0.875 * int(2 * 4 * 4096 / 3)) <= 14336
    # torchtitan 0.2 always scales RoPE, and a factor of 1 turns that off.
    assert "RoPEScalingArgs(scaling_factor=1.0)" in model
    assert LLAMA.arithmetic is not None
    longer = RopeScaling(rope_type="llama3", factor=32, low_freq_factor=1.0, original_max_position_embeddings=8192)
    scaled = replace(LLAMA, arithmetic=replace(LLAMA.arithmetic, rope_scaling=longer))
    text = texts(llm("torchtitan@0.2", scaled), "torchtitan@0.2")["job_model.py"]
    assert "RoPEScalingArgs(scaling_factor=32" in text
    wide = replace(LLAMA, head_dim=64)
    assert "Qwen3ModelArgs(" in texts(llm("torchtitan@0.2", wide), "torchtitan@0.2")["job_model.py"]
    with refused(hpgo.errors.ArgumentError, "unsupported"):
        texts(llm("torchtitan@0.2", replace(scaled, head_dim=64)), "torchtitan@0.2")


def test_deepspeed_gets_an_optimizer_and_no_breakdown_of_a_pipeline() -> None:
    def constants(plan: Any) -> dict[str, Any]:
        module = ast.parse(texts(plan, "deepspeed")["train.py"])
        space: dict[str, Any] = {}
        for node in module.body:
            names = [ast.unparse(one) for one in node.targets] if isinstance(node, ast.Assign) else []
            if {"OPTIMIZER", "SETTINGS", "SMOKE"}.intersection(names):
                exec(compile(ast.Module([node], []), "train.py", "exec"), space)
        return space

    alone = constants(llm("deepspeed"))
    piped = constants(llm("deepspeed", pp=2, zero_stage=1, overlap_dp_comm=False))
    assert alone["SETTINGS"]["optimizer"]["type"] == "AdamW"
    assert (alone["SMOKE"]["wall_clock_breakdown"], piped["SMOKE"]["wall_clock_breakdown"]) == (True, False)
    assert "scheduler" not in alone["SMOKE"]
    sgd = constants(layers("deepspeed", "sgd-momentum"))["OPTIMIZER"]
    assert (sgd["type"], sgd["params"]["momentum"]) == ("SGD", 0.9)


@pytest.mark.parametrize("pp", [1, 2])
def test_deepspeed_recomputes_layers_as_planned(pp: int) -> None:
    given: dict[str, Any] = {"pp": pp, "zero_stage": 1, "overlap_dp_comm": False, "global_batch_size": 8}
    for recompute in ("none", "full"):
        files = texts(llm("deepspeed", replace(LLAMA, layers=4), recompute=recompute, **given), "deepspeed")
        checkpointed = "gradient_checkpointing_enable" in files["train.py"]
        assert checkpointed == (recompute == "full" and pp == 1)
        assert pp == 1 or f"CHECKPOINT_INTERVAL = {int(recompute == 'full')}" in files["planned.py"]


def functions(text: str, names: set[str], **given: Any) -> dict[str, Any]:
    """The named constants, functions and classes of a module, without its imports."""
    body = [
        node
        for node in ast.parse(text).body
        if getattr(node, "name", ast.unparse(node.targets[0]) if isinstance(node, ast.Assign) else None) in names
    ]
    exec(compile(ast.Module(body, []), "train.py", "exec"), given)
    return given


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        ({"num_hidden_layers": 48}, {"num_hidden_layers": 2}),
        (
            {"num_hidden_layers": 6, "layer_types": ["near"] * 5 + ["far"]},
            {"num_hidden_layers": 2, "layer_types": ["near", "far"]},
        ),
        (
            {"num_hidden_layers": 61, "first_k_dense_replace": 3},
            {"num_hidden_layers": 2, "first_k_dense_replace": 1},
        ),
    ],
)
@pytest.mark.parametrize("pp", [1, 2])
def test_deepspeeds_reduced_run_keeps_layers_of_the_users_configuration(
    pp: int, config: dict[str, Any], kept: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = llm("deepspeed", replace(LLAMA, layers=4), pp=pp, zero_stage=1, overlap_dp_comm=False)
    text = jobs.files(plan, on="torchrun")["small/train.py"]

    class Known:
        @staticmethod
        def from_pretrained(_: str) -> SimpleNamespace:
            return SimpleNamespace(**config)

    checked: list[Any] = []
    given = {"os": os, "AutoConfig": Known, "MODEL": {"num_hidden_layers": 2}, "check_model": checked.append}
    space = functions(text, {"model_config", "keep_layers"}, **given)
    monkeypatch.setenv("MODEL_CONFIG", "any")
    for run, expected in (("smoke", config), ("small", kept)):
        monkeypatch.setenv("JOB_RUN", run)
        found = space["model_config"]()
        assert checked[-1] is found
        assert {name: getattr(found, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("kind", "what"),
    [("t5", "an encoder before the decoder"), ("whisper", "an encoder before"), ("gemma3", "a tower in front")],
)
def test_deepspeeds_job_refuses_models_that_its_script_can_not_build(kind: str, what: str) -> None:
    # Without `architectures`, a file of Whisper's kind describes the decoder alone.
    whole = {"model_type": kind} | ({"architectures": ["WhisperForConditionalGeneration"]} if kind == "whisper" else {})
    plan = llm("deepspeed", of_document(whole), seq_length=128)
    with refused(hpgo.errors.ArgumentError, "conflict", "trains a language model on text", what) as found:
        jobs.files(plan)
    assert "hpgo export llm-plan.json --to deepspeed" in found.value.hint
    assert export.files(plan, "deepspeed")


@pytest.mark.parametrize("kind", ["lfm2", "bert", "smollm3"])
def test_deepspeeds_plan_accepts_the_configuration_that_it_was_made_of(kind: str) -> None:
    transformers = pytest.importorskip("transformers", reason="its configuration class has the defaults of the type")
    plan = llm("deepspeed", of_document({"model_type": kind}), seq_length=128)
    space: dict[str, Any] = {}
    exec(texts(plan, "deepspeed")["planned.py"], space)
    space["check_model"](transformers.AutoConfig.for_model(kind))
    with pytest.raises(ValueError, match="hidden_size is"):
        space["check_model"](transformers.AutoConfig.for_model(kind, hidden_size=4096))


def test_deepspeeds_step_time_includes_what_the_gpu_still_runs(capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch", reason="the script counts buffers of a PyTorch model")
    clock_s = [0.0]

    class Loss:
        """A loss that the GPU has 3 s after Python asked for it."""

        def __float__(self) -> float:
            clock_s[0] += 3.0
            return 1.5

    engine = SimpleNamespace(module=torch.nn.Identity(), device="cpu")
    given = {
        "os": os,
        "torch": SimpleNamespace(
            manual_seed=int,
            cuda=SimpleNamespace(is_available=bool),
            distributed=SimpleNamespace(get_rank=int, get_world_size=lambda: 1),
        ),
        "time": SimpleNamespace(perf_counter=lambda: clock_s[0]),
        "deepspeed": SimpleNamespace(init_distributed=int, initialize=lambda **_: (engine, None)),
        "words": lambda: SimpleNamespace(steps=2, smoke=True, save=None),
        "config_of": lambda _: {},
        "planned_model": lambda _: engine.module,
        "model_config": lambda: SimpleNamespace(vocab_size=2),
        "counting": lambda *_: iter(()),
        "train_step": lambda *_: Loss(),
    }
    functions(texts(llm("deepspeed"), "deepspeed")["train.py"], {"main"}, **given)["main"]()
    printed = capsys.readouterr().out.splitlines()
    assert [re.findall(r"iter time \(s\): (\S+),", line) for line in printed] == [["3.0000"], ["3.0000"]]


@pytest.mark.parametrize("pp", [1, 2])
def test_deepspeeds_loss_stores_no_logits_in_32_bits(pp: int) -> None:
    torch = pytest.importorskip("torch", reason="the loss is computed with PyTorch")
    plan = llm("deepspeed", replace(LLAMA, layers=4), pp=pp, zero_stage=1, overlap_dp_comm=False)
    text = texts(plan, "deepspeed")["train.py"]
    space = functions(text, {"CHUNK", "MeanLoss", "mean_loss"}, torch=torch, nn=torch.nn)
    torch.manual_seed(1)
    # The last chunk has fewer rows than the others.
    sequences, length, vocab, chunk = 3, 1100, 512, space["CHUNK"]
    logits = (3 * torch.randn(sequences, length, vocab)).bfloat16().requires_grad_()
    labels = torch.randint(vocab, (sequences, length))
    exact = logits.detach().float().requires_grad_()
    expected = torch.nn.functional.cross_entropy(exact.flatten(0, 1), labels.flatten())
    (5 * expected).backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        loss = space["mean_loss"](logits, labels)
        (5 * loss).backward()
    torch.testing.assert_close(loss, expected)
    assert logits.grad.dtype == torch.bfloat16
    torch.testing.assert_close(logits.grad.float(), exact.grad, rtol=2**-8, atol=1e-9)
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    peak = max(accumulate(event.nbytes() for event in events))
    # The logits themselves were there before, so 2 bytes of 4 are left for the gradient.
    assert 2 * logits.numel() <= peak <= 2 * logits.numel() + 3 * 4 * chunk * vocab + 100_000


@pytest.mark.parametrize("name", sorted(TRANSFORMERS))
def test_the_written_configuration_is_read_back_as_the_same_model(name: str, tmp_path: Path) -> None:
    model = TRANSFORMERS[name]
    if (written := hugging_face(model)) is None:
        # Transformers has this model in none of the four plain kinds.
        odd = model.experts or model.latent or model.centred_norms or not model.gated or model.norms_per_layer != 2
        assert odd or (model.arithmetic is not None and model.arithmetic.norm_adds_one)
        return
    (tmp_path / "config.json").write_text(json.dumps(written), encoding="utf-8")
    read = hpgo.Transformer.read(tmp_path / "config.json")
    assert replace(read, name=model.name, longest=model.longest) == model


def test_the_hostfile_names_nodes_and_their_gpus() -> None:
    assert texts(llm("deepspeed"), "deepspeed")["hostfile"].splitlines()[1:] == ["node-0 slots=8"]


@pytest.mark.parametrize(
    ("optimizer", "named"),
    [("adam-fp32", "torch.optim.AdamW"), ("sgd", "torch.optim.SGD"), ("adam-bf16", "NotImplementedError")],
)
def test_pytorch_gets_an_optimizer_of_the_planned_kind(optimizer: str, named: str) -> None:
    module = ast.parse(texts(layers("torch", optimizer), "torch")["train.py"])
    (function,) = (node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == "optimizer")
    assert named in ast.unparse(function)


def test_check_refuses_a_training_script_whose_stages_are_not_written(tmp_path: Path) -> None:
    pytest.importorskip("torch.distributed.pipelining", reason="the script builds stages with PyTorch")
    jobs.save(layers("torch"), tmp_path / "job", on="torchrun")
    environment = {**os.environ, "DATASET_PATH": "x", "SAVE": str(tmp_path), "MASTER_ADDR": "localhost"}
    environment["PATH"] = f"{os.path.dirname(sys.executable)}:{environment['PATH']}"  # noqa: PTH120 -- no link resolved
    done = subprocess.run(
        ["bash", "job/check.sh"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1
    assert "write build(names) in train.py" in done.stderr


@pytest.mark.parametrize("target", TARGETS)
def test_a_hostile_name_stays_data(target: str, tmp_path: Path) -> None:
    cluster = replace(H100, name=HOSTILE)
    model = replace(LLAMA, name=HOSTILE, layers=4)
    one = hpgo.estimate_llm(model, cluster, devices=8, zero_stage=3, global_batch_size=64, seq_length=8192)
    plan = hpgo.LlmPlan.of(one, model, cluster, framework=target)  # type: ignore[arg-type]
    written = jobs.save(plan, tmp_path / "job", on="torchrun")
    check_python({path.name: path.read_text(encoding="utf-8") for path in written if path.parent.name == "job"})
    for path in written:
        if path.suffix == ".sh":
            assert subprocess.run(["bash", "-n", path], capture_output=True, check=False).returncode == 0
            if shutil.which("shellcheck"):
                found = subprocess.run(
                    ["shellcheck", "-x", "-e", "SC2016", path], cwd=path.parent, capture_output=True, check=False
                )
                assert found.returncode == 0, found.stdout.decode()
        elif path.suffix == ".py":
            assert "os._exit(3)\n" not in path.read_text(encoding="utf-8")


def test_a_folder_of_layers_needs_ranks_in_order_and_a_framework(tmp_path: Path) -> None:
    free = hpgo.plan(hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a"), global_batch_size=64)
    with pytest.raises(hpgo.errors.ArgumentError, match="the plan was made for no framework"):
        jobs.files(free)
    with pytest.raises(hpgo.errors.ArgumentError, match="plans of layers are not supported for Megatron-LM"):
        jobs.files(layers("megatron"), to="megatron")
    with pytest.raises(hpgo.errors.ArgumentError, match="plans of transformers are not supported"):
        jobs.files(llm("deepspeed"), to="torch")
    assert "job-plan.json" in {path.name for path in jobs.save(layers("torch"), tmp_path / "job")}
    assert "job.toml" in jobs.files(layers("torchtitan@0.2"))
    start = jobs.files(layers("torch"), on="torchrun")["job.sh"].splitlines()[-1]
    assert start.startswith("exec python3 -m torch.distributed.run --nnodes=2")
    assert start.endswith("--no-python bash rank.sh")


def test_plan_writes_the_job_of_a_framework(tmp_path: Path, run: Any) -> None:
    ask = ["plan", "bert-48", "-c", "dapple-a", "-b", "64"]
    done = run(*ask, "--framework", "torch", "-o", "job/", "-o", "plan.json")
    assert "Next: bash job/smoke.sh\n      hpgo launch job/\n" in done.stdout
    expected = jobs.files(hpgo.Plan.read(tmp_path / "plan.json"))
    assert {path.name for path in (tmp_path / "job").iterdir()} == set(expected)
    for name, text in expected.items():
        written = (tmp_path / "job" / name).read_text(encoding="utf-8")
        # Plans are compared by their values, because both 0 and 0.0 are written.
        assert written == text or json.loads(written) == json.loads(text)
    for words, says in (
        ([], "needs --framework"),
        (["--framework", "megatron"], "hpgo export PLAN.json --to megatron -o FILE"),
        (["--framework", "deepspeed"], "a job for PyTorch"),
        (["--framework", "torch", "--devices", "8,16"], "is for one plan"),
    ):
        refusal = run(*ask, *words, "-o", "job/", code=2 if "needs" in says or "one plan" in says else 1)
        assert says in refusal.stderr
        assert refusal.stdout == ""


def test_torchtitan_0_2_is_refused_where_it_would_compute_in_fp32() -> None:
    given: dict[str, Any] = {"tp": 2, "pp": 4, "zero_stage": 0, "overlap_dp_comm": False}
    plan = llm("torchtitan@0.3", replace(LLAMA, layers=4), **given)
    assert export.files(plan, "torchtitan@0.3")
    with pytest.raises(hpgo.errors.ArgumentError, match="computes in fp32 with tp or pp unless FSDP shards weights"):
        export.files(plan, "torchtitan@0.2")
    found = hpgo.plan_llm(LLAMA, H100, framework="torchtitan@0.2", global_batch_size=64, seq_length=8192)
    assert all(one.parallelism.dp_cp_size > 1 for one in found.estimates)


def test_asynchronous_tensor_parallelism_is_a_setting_where_the_plan_counts_it() -> None:
    given: dict[str, Any] = {"tp": 2, "stack": "torchtitan-async-tp", "zero_stage": 3}
    plan = llm("torchtitan@0.3", **given)
    assert "config.compile.enable_async_tensor_parallel = True" in texts(plan, "torchtitan@0.3")["planned.py"]
    old = tomllib.loads(export.files(plan, "torchtitan@0.2")["job.toml"])
    assert old["parallelism"]["enable_async_tensor_parallel"] is True
    eager = llm("torchtitan@0.3", fused_elementwise=False, **given)
    text = texts(eager, "torchtitan@0.3")["planned.py"]
    assert "enable_async_tensor_parallel" not in text
    assert "asynchronous tensor parallelism needs compiled layers" in text
    plain = llm("torchtitan@0.3", tp=2)
    assert "async" not in texts(plain, "torchtitan@0.3")["planned.py"]


@pytest.mark.parametrize(
    ("target", "file"),
    [("torchtitan@0.3", "job_config.py"), ("torchtitan@0.2", "data.txt"), ("deepspeed", "train.py")],
)
def test_the_readme_names_the_file_of_the_learning_rate(target: str, file: str) -> None:
    found = jobs.files(llm(target))
    assert f"learning rate in `{file}`" in found["README.md"]
    assert re.search(r"\b(lr|LEARNING_RATE)\b", found[file])


@pytest.mark.parametrize("target", TARGETS)
def test_a_folder_is_written_again_for_the_same_framework_only(target: str, tmp_path: Path) -> None:
    plan = llm(target)
    jobs.save(plan, tmp_path / "job")
    jobs.save(plan, tmp_path / "job")
    before = {path: path.read_bytes() for path in (tmp_path / "job").rglob("*.*")}
    for other in {*TARGETS} - {target}:
        with refused(hpgo.errors.ArgumentError, "conflict", "a job for"):
            jobs.save(llm(other), tmp_path / "job")
    with refused(hpgo.errors.ArgumentError, "conflict", "not for Megatron-LM"):
        check_folder(tmp_path / "job", find("megatron"))
    assert {path: path.read_bytes() for path in (tmp_path / "job").rglob("*.*")} == before


@pytest.mark.parametrize(
    ("model", "more", "says"),
    [("t5.json", (), "an encoder before the decoder"), ("llama-3-8b", ("--fix", "lora-rank=8"), "lora_rank is 8")],
)
def test_a_folder_that_can_not_be_written_is_refused_before_the_search(
    model: str, more: tuple[str, ...], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t5.json").write_text('{"model_type": "t5"}', encoding="utf-8")
    monkeypatch.setattr("hpgo.llm.search.plan_llm", lambda *_, **__: pytest.fail("it searched"))
    job = ("-c", "h100:1", "-b", "8", "--seq-length", "512", "--framework", "deepspeed", "-o", "job/")
    done = CliRunner().invoke(group, ["llm", "plan", model, *job, *more])
    assert isinstance(done.exception, hpgo.errors.ArgumentError)
    assert says in done.exception.message
    assert "--to deepspeed" in done.exception.hint
    assert not (tmp_path / "job").exists()
