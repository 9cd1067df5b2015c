"""Logs of Megatron-LM, NeMo, torchtitan and DeepSpeed give the step of their run, and state its configuration."""

from __future__ import annotations

import json
import random
import string

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import hpgo
from hpgo.cli.main import group
from hpgo.llm.run_logs import parse_log

CLUSTER = hpgo.Cluster.preset("h100:1")
FULL = {"global_batch_size": 32, "seq_length": 8192, "micro_batch_size": 1}
SLOW_S = (19.0, 6.5, 4.8)
"""Steps of the warm-up."""


def arguments(**values: object) -> str:
    """The arguments as Megatron-LM prints them."""
    rows = [f"  {name} {'.' * (48 - len(name))} {value}" for name, value in sorted(values.items())]
    ends = "------------------------ arguments ------------------------", "-------------------- end of arguments ----"
    return "\n".join([ends[0], *rows, ends[1], ""])


ARGUMENTS = arguments(
    tensor_model_parallel_size=2, pipeline_model_parallel_size=1, virtual_pipeline_model_parallel_size=None,
    context_parallel_size=1, expert_model_parallel_size=1, micro_batch_size=1, global_batch_size=32, seq_length=8192,
    world_size=8, sequence_parallel=True, use_distributed_optimizer=True, recompute_granularity=None,
    recompute_num_layers=None, bf16=True, fp16=False, fp8=None, log_interval=1, lr=0.0003,
)  # fmt: skip


def megatron(*seconds: float) -> str:
    return ARGUMENTS + "".join(
        f" [2026-03-02 11:08:{at:02}.411213] iteration {at:8d}/     500 | consumed samples: {32 * at:12d} |"
        f" elapsed time per iteration (ms): {1e3 * one:.1f} | throughput per GPU (TFLOP/s/GPU): 412.3 |"
        " learning rate: 3.000000E-06 | global batch size:    32 | lm loss: 1.084113E+01 | loss scale: 1.0 |"
        " grad norm: 12.207 | number of skipped iterations:   0 | number of nan iterations:   0 |\n"
        for at, one in enumerate(seconds, start=1)
    )


def nemo(*seconds: float) -> str:
    return "".join(
        f"Training epoch 0, iteration {at}/99 | lr: 1.961e-06 | global_batch_size: 32 | global_step: {at} |"
        f" reduced_train_loss: 11.03 | train_step_timing in s: {one:.3f} | consumed_samples: {32 * at}\n"
        for at, one in enumerate(seconds)
    )


def nemo_bar(*seconds: float) -> str:
    """A progress bar, which rewrites one line."""
    return "\r".join(
        f"Epoch 0: : {at}%|██        | {at}/100 [00:51<07:50, reduced_train_loss=8.330, global_step={at}.00,"
        f" consumed_samples={32 * at}.0, train_step_timing in s={one:.3f}]"
        for at, one in enumerate(seconds)
    )


def bridge(*seconds: float) -> str:
    return "".join(
        f"Step Time : {one:.2f}s GPU utilization: 430.9MODEL_TFLOP/s/GPU\n" + megatron(one).splitlines()[-1] + "\n"
        for one in seconds
    )


def titan(*seconds: float, colours: bool = True) -> str:
    red, green, blue, end = ("\033[31m", "\033[32m", "\033[34m", "\033[39m") if colours else ("",) * 4
    orange, turquoise = ("\033[38;2;180;60;0m", "\033[38;2;54;234;195m") if colours else ("",) * 2
    head = "[titan] 2026-03-02 11:08:26,100 - root - INFO - "
    return (
        f"{head}Building device mesh with parallelism: pp=1, dp_replicate=1, dp_shard=4, cp=1, tp=2, ep=1, etp=1\n"
        f"{head}{green}Applied selective activation checkpointing to the model{end}\n"
        f"{head}Trainer is initialized with local batch size 1, global batch size 32, gradient accumulation steps 8,"
        " sequence length 8192, total steps 1000 (warmup 200)\n"
    ) + "".join(
        f"{head}{red}step: {at:2}  {green}loss: 12.24093  {orange}grad_norm:  3.7401  "
        f"{turquoise}memory: 42.11GiB(53.2%)  {blue}tps: {round(32 * 8192 / 8 / one):,}"
        f"  tflops: 361.90  mfu: 36.59%{end}\n"
        f"{head}validate step: {at:2}  loss: 12.2  memory: 42.11GiB(53.2%)  tps: 99,999\n"
        for at, one in enumerate(seconds, start=1)
    )


def pipeline(*seconds: float) -> str:
    return "".join(
        f"steps: {at} loss: 10.9212 iter time (s): {one:.3f} samples/sec: {32 / one:.3f}\n"
        for at, one in enumerate(seconds, start=1)
    )


def throughput(*seconds: float) -> str:
    return "".join(
        f"[2026-03-02 11:08:26,110] [INFO] [timer.py:264:stop] epoch=0/micro_step={8 * at}/global_step={at},"
        f" RunningAvgSamplesPerSec=5.123, CurrSamplesPerSec={32 / one}, MemAllocated=21.4GB, MaxMemAllocated=60.91GB\n"
        for at, one in enumerate(seconds, start=1)
    )


def wall_clock(*seconds: float) -> str:
    return "".join(
        "[Rank 0] time (ms) | fwd_microstep: 40.11 | bwd_microstep: 80.02 | bwd_inner_microstep: 79.90 |"
        " bwd_allreduce_microstep: 0.04 | step_microstep: 30.51\n"
        f"[Rank 0] time (ms) | fwd: {300 * one:.2f} | bwd: {650 * one:.2f} | bwd_inner: 640.10 | bwd_allreduce: 0.42 |"
        f" step: {50 * one:.2f}\n"
        for one in seconds
    )


WRITERS = {
    "megatron": megatron, "nemo": nemo, "nemo bar": nemo_bar, "bridge": bridge, "torchtitan": titan,
    "pipeline": pipeline, "throughput": throughput, "wall clock": wall_clock,
}  # fmt: skip


@pytest.mark.parametrize("kind", WRITERS)
def test_every_format_gives_the_median_of_steps_after_the_warm_up(kind: str, tmp_path) -> None:
    steady = (4.4, 4.5, 4.3, 4.4, 9.9, 4.4, 4.4)
    path = tmp_path / "run.log"
    path.write_text("noise\n" + WRITERS[kind](*SLOW_S, *steady), encoding="utf-8")
    step = hpgo.MeasuredStep.from_log(path, "llama-3-8b", CLUSTER, tp=2, **FULL)
    assert step.measured_s == pytest.approx(4.4, rel=1e-3)
    assert "median of 7 lines" in step.source
    assert "after 3 of warm-up" in step.source


def test_megatron_states_its_configuration_and_implies_the_stack(tmp_path) -> None:
    path = tmp_path / "run.log"
    path.write_text(megatron(*SLOW_S, *[4.4] * 9), encoding="utf-8")
    read = hpgo.MeasuredStep.from_log(path, "llama-3-8b", CLUSTER)
    found = read.predicted
    assert (found.parallelism.tp, found.parallelism.dp, found.global_batch_size, found.seq_length) == (2, 4, 32, 8192)
    assert (found.parallelism.sequence_parallel, found.parallelism.zero_stage) == (True, 1)
    assert read.stack == "te-hopper"
    given = hpgo.MeasuredStep.from_log(path, "llama-3-8b", CLUSTER, tp=2, vpp=1, stack="default")
    assert (given.predicted.parallelism, given.stack) == (found.parallelism, "default")


SIZES = {"num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "ffn_hidden_size": 14336}


def of_megatron(path, model: str = "llama-3-8b", **values: object) -> hpgo.MeasuredStep:
    """The step of a log of Megatron-LM with other arguments, read with those whose name ends in `_given`."""
    given = {name.removesuffix("_given"): values.pop(name) for name in list(values) if name.endswith("_given")}
    known = dict(line.strip().split(f" {'.' * 3}", 1) for line in ARGUMENTS.splitlines()[1:-1])
    known = {name: value.lstrip(".").strip() for name, value in known.items()} | values
    text = megatron(*SLOW_S, *[4.4] * 9).replace(ARGUMENTS, arguments(**known))
    path.write_text(text, encoding="utf-8")
    return hpgo.MeasuredStep.from_log(path, model, CLUSTER, **given)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tp_given": 4}, "states tp 2, but tp is given as 4"),
        ({"seq_length_given": 4096}, "states seq_length 8192, but seq_length is given as 4096"),
        ({"global_batch_size_given": 64}, "states global_batch_size 32, but global_batch_size is given as 64"),
        ({"recompute_given": "full"}, "states recompute .none., but recompute is given as .full."),
        ({"overlap_grad_reduce": False, "overlap_dp_comm_given": True},
         "states overlap_dp_comm false, but overlap_dp_comm is given as true"),
        ({"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params", "zero_stage_given": 1},
         "states zero_stage 3, but zero_stage is given as 1"),
        ({"recompute_granularity": "selective", "recompute_modules": "['mlp', 'layernorm']",
          "recompute_modules_given": ["mlp"]}, "states recompute_modules layernorm and mlp, but .* is given as mlp"),
        (SIZES | {"hidden_size": 8192}, "states 8192 for hidden of the model, but `llama-3-8b` has 4096"),
        (SIZES | {"num_layers": 16}, "states 16 for layers of the model, but `llama-3-8b` has 32"),
        ({"num_experts": 8}, "states 8 for experts of the model, but `llama-3-8b` has 0"),
        ({"tp_comm_overlap": False, "stack_given": "te-hopper"}, "states tp_comm_overlap False"),
    ],
)  # fmt: skip
def test_options_and_models_that_contradict_a_log_are_errors(tmp_path, values, message: str) -> None:
    with pytest.raises(hpgo.errors.ArgumentError, match=message) as found:
        of_megatron(tmp_path / "run.log", **values)
    assert found.value.hint


def test_a_run_without_experts_is_none_of_a_model_with_experts(tmp_path) -> None:
    with pytest.raises(hpgo.errors.ArgumentError, match="states 0 for experts of the model, but `mixtral-8x7b` has 8"):
        of_megatron(tmp_path / "run.log", "mixtral-8x7b", num_experts=None)


def test_what_megatron_prints_is_used_where_options_leave_it_open(tmp_path) -> None:
    step = of_megatron(
        tmp_path / "run.log", **SIZES, recompute_granularity="selective", recompute_modules="['mlp']",
        overlap_grad_reduce=False, grad_reduce_in_bf16=True, recompute_modules_given=("mlp",),
    )  # fmt: skip
    config = step.predicted.parallelism
    assert (config.recompute, config.recompute_modules) == ("selective", ("mlp",))
    assert (config.overlap_dp_comm, config.grad_reduce_in_bf16) == (False, True)


def test_megatron_prints_its_optimizer_and_where_it_runs(tmp_path) -> None:
    path = tmp_path / "run.log"
    moved = {"optimizer": "adam", "optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}
    config = of_megatron(path, **moved).predicted.parallelism
    assert (config.optimizer, config.optimizer_offload_fraction) == ("adam", 0.5)
    idle = {"optimizer_cpu_offload": False, "optimizer_offload_fraction": 1.0}
    assert of_megatron(path, **idle).predicted.parallelism.optimizer_offload_fraction == 0
    muon = {"optimizer": "dist_muon", "use_distributed_optimizer": False}
    config = of_megatron(path, **muon).predicted.parallelism
    assert (config.optimizer, config.zero_stage) == ("muon", 1)


def test_megatron_recomputes_core_attention_by_default_once_it_has_modules(tmp_path) -> None:
    path = tmp_path / "run.log"
    config = of_megatron(path, recompute_granularity="selective", recompute_modules=None).predicted.parallelism
    assert config.recompute_modules == ("core_attn",)
    config = of_megatron(path, recompute_granularity="selective").predicted.parallelism
    assert config.recompute_modules == (), "versions without modules skip fused attention"


@pytest.mark.parametrize(
    ("overlap", "tp", "stack"),
    [(True, 2, "te-hopper"), (False, 2, "te-hopper-no-tp-overlap"), (False, 1, "te-hopper"), (None, 2, "te-hopper")],
)
def test_tp_comm_overlap_of_a_log_selects_the_stack(tmp_path, overlap: bool | None, tp: int, stack: str) -> None:
    found = of_megatron(
        tmp_path / "run.log", tensor_model_parallel_size=tp, sequence_parallel=tp > 1, tp_comm_overlap=overlap
    )
    assert found.stack == stack
    if stack != "te-hopper":
        hidden = of_megatron(tmp_path / "run.log", tp_comm_overlap=True).predicted.time_by_term_s
        assert dict(found.predicted.time_by_term_s)["tp_comm"] > 2 * dict(hidden)["tp_comm"]


def test_a_log_of_two_settings_is_refused_and_names_both(tmp_path) -> None:
    first = megatron(*SLOW_S, *[4.4] * 9)
    second = first.replace(f"tensor_model_parallel_size {'.' * 22} 2", f"tensor_model_parallel_size {'.' * 22} 4")
    with pytest.raises(hpgo.errors.ArgumentError) as found:
        parse_log(first + second, "run.log")
    line = (first + second).splitlines().index(f"  tensor_model_parallel_size {'.' * 22} 4") + 1
    assert "run.log has steps of two runs or settings: tensor_model_parallel_size is 2 in line" in found.value.message
    assert found.value.message.endswith(f"but 4 in line {line}")
    assert f"line {line}" in found.value.hint
    # A run that continues from its checkpoint prints the same arguments again, and its time stays.
    assert len(parse_log(first + first, "run.log").numbers) == 24


def test_a_batch_that_grows_is_no_single_setting() -> None:
    text = megatron(*[4.4] * 9).replace("global batch size:    32", "global batch size:    16", 3)
    with pytest.raises(hpgo.errors.ArgumentError, match=r"global_batch_size is 32 in line .*, but 16 in line"):
        parse_log(text, "run.log")


@pytest.mark.parametrize("order", [("nemo", "torchtitan"), ("torchtitan", "pipeline"), ("throughput", "megatron")])
def test_a_log_of_two_frameworks_is_refused_and_names_both(order: tuple[str, str]) -> None:
    texts = [WRITERS[kind](*SLOW_S, *[4.4] * 9) for kind in order]
    with pytest.raises(hpgo.errors.ArgumentError, match="of two runs") as found:
        parse_log("\n".join(texts), "run.log")
    names = [{"pipeline": "deepspeed", "throughput": "deepspeed"}.get(kind, kind) for kind in order]
    assert all(f"of {name}" in found.value.message for name in names)


def test_steps_of_one_run_that_two_frameworks_print_are_read() -> None:
    """Megatron-DeepSpeed prints the lines of both, those of DeepSpeed before Megatron-LM's."""
    pairs = zip(throughput(*[4.4] * 9).splitlines(), megatron(*[4.4] * 9).splitlines()[-9:], strict=True)
    log = parse_log("\n".join(line for pair in pairs for line in pair), "run.log")
    assert (log.framework, len(log.numbers)) == ("megatron", 9)


@pytest.mark.parametrize("kind", ["megatron", "nemo", "torchtitan", "pipeline", "throughput"])
def test_steps_that_are_counted_again_with_another_time_are_a_second_run(kind: str) -> None:
    write = WRITERS[kind]
    with pytest.raises(hpgo.errors.ArgumentError, match="again, and the median of the lines from there on is"):
        parse_log(write(*SLOW_S, *[4.4] * 9) + write(*SLOW_S, *[2.2] * 9), "run.log")
    assert len(parse_log(write(*SLOW_S, *[4.4] * 9) + write(*SLOW_S, *[4.5] * 9), "run.log").numbers) == 24


def test_the_choice_of_torchtitan_that_its_log_leaves_open_may_be_given(tmp_path) -> None:
    path = tmp_path / "run.log"
    path.write_text(titan(*SLOW_S, *[4.4] * 9), encoding="utf-8")
    given = {"zero_stage": 2, "recompute": "full", "recompute_every": 2}
    config = hpgo.MeasuredStep.from_log(path, "llama-3-8b", CLUSTER, **given).predicted.parallelism
    assert {name: getattr(config, name) for name in given} == given
    with pytest.raises(hpgo.errors.ArgumentError, match="states tp 2"):
        hpgo.MeasuredStep.from_log(path, "llama-3-8b", CLUSTER, tp=4)


@pytest.mark.parametrize(("method", "layers"), [("block", 3), ("uniform", None)])
def test_megatrons_number_of_recomputed_layers_counts_with_the_method_block_only(method: str, layers: int) -> None:
    text = arguments(recompute_granularity="full", recompute_method=method, recompute_num_layers=3, fp8="hybrid")
    printed = parse_log(text + nemo(4.4), "run.log").printed
    assert (printed["recompute"], printed.get("recompute_num_layers")) == ("full", layers)
    assert (printed["precision"], "recompute_method" in printed) == ("fp8", False)


@pytest.mark.parametrize("trainer", ["local batch size", "tokens"])
def test_torchtitan_states_its_mesh_and_batch(tmp_path, trainer: str) -> None:
    path, text = tmp_path / "run.log", titan(*SLOW_S, *[4.4] * 9)
    if trainer == "tokens":
        old = (
            "local batch size 1, global batch size 32, gradient accumulation steps 8, sequence length 8192, total steps"
        )
        assert old in text
        text = text.replace(
            old,
            "8192 tokens per DP rank, 262144 tokens per train step, gradient accumulation steps 8, maximum context"
            " length 8192, total steps",
        )
    path.write_text(text, encoding="utf-8")
    read = hpgo.MeasuredStep.from_log(path, "llama-3-8b", CLUSTER, micro_batch_size=1)
    config = read.predicted.parallelism
    assert (config.tp, config.dp, config.zero_stage, config.dtensor, config.recompute) == (
        2, 4, 3, True, "selective_op",
    )  # fmt: skip
    assert (read.predicted.global_batch_size, read.stack) == (32, "torchtitan")


def test_colours_do_not_change_what_is_read() -> None:
    assert parse_log(titan(5.0, 4.0), "a").numbers == parse_log(titan(5.0, 4.0, colours=False), "a").numbers


@pytest.mark.parametrize(("name", "option"), [(name, name) for name in FULL])
def test_what_a_log_does_not_state_must_be_given(tmp_path, run, name: str, option: str) -> None:
    (tmp_path / "run.log").write_text(pipeline(*[4.4] * 5), encoding="utf-8")
    given = [f"--{one.replace('_', '-')}={value}" for one, value in FULL.items() if one != name]
    done = run("llm", "calibrate", "run.log", "--model", "llama-3-8b", "-c", "h100:1", *given, code=1)
    said = f"--{option.replace('_', '-')}"
    assert f"run.log does not state {said}" in done.stderr
    assert f"hint: give {said}" in done.stderr


def test_a_file_without_steps_names_the_three_formats(tmp_path, run) -> None:
    (tmp_path / "run.log").write_text("loss: 3\nstep 4\nelapsed time per iteration (ms): nan |\n", encoding="utf-8")
    done = run("llm", "calibrate", "run.log", "--model", "llama-3-8b", "-c", "h100:1", code=1)
    assert done.stderr.startswith("error: run.log has no line with the time of a step")
    assert all(name in done.stderr for name in ("Megatron-LM", "torchtitan", "DeepSpeed"))


def test_several_logs_and_a_table_that_names_a_log_give_one_platform(tmp_path, run) -> None:
    (tmp_path / "a.log").write_text(megatron(*SLOW_S, *[4.4] * 9), encoding="utf-8")
    for name, tp, seconds in (("b.log", 4, 4.9), ("c.log", 8, 6.4)):
        text = megatron(*SLOW_S, *[seconds] * 9).replace(f"{'.' * 22} 2", f"{'.' * 22} {tp}")
        assert f"tensor_model_parallel_size {'.' * 22} {tp}\n" in text
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "steps.yaml").write_text(
        "hpgo_steps: 1\nsteps:\n  - {model: llama-3-8b, cluster: 'h100:1', log: c.log}\n", encoding="utf-8"
    )
    runs = ["a.log", "b.log", "--model", "llama-3-8b", "-c", "h100:1"]
    done = run("llm", "calibrate", "steps.yaml", *runs, "-o", "p.yaml")
    assert "3 steps are worth it" in " ".join(done.stdout.split())
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "c.log: median of 9 lines of megatron after 3 of warm-up" in " ".join(done.stdout.split())
    assert hpgo.Platform.read(tmp_path / "p.yaml").steps == 3
    told = json.loads(run("llm", "calibrate", *runs, "--json").stdout)
    assert [one["measured_s"] for one in told["steps"]] == [4.4, 4.9]


def test_options_of_runs_are_refused_where_they_are_needed_and_where_they_say_nothing(tmp_path, run) -> None:
    (tmp_path / "run.log").write_text(megatron(*[4.4] * 5), encoding="utf-8")
    row = "{model: llama-3-8b, cluster: 'h100:1', log: run.log}"
    (tmp_path / "steps.yaml").write_text(f"hpgo_steps: 1\nsteps: [{row}]\n", encoding="utf-8")
    assert "--model" in run("llm", "calibrate", "run.log", "-c", "h100:1", code=2).stderr
    assert "--tp describes the run of a log" in run("llm", "calibrate", "steps.yaml", "--tp", 2, code=2).stderr
    both = row.replace("log:", "seconds: 4, log:")
    (tmp_path / "steps.yaml").write_text(f"hpgo_steps: 1\nsteps: [{both}]\n", encoding="utf-8")
    assert "`seconds` and `log` are both given" in run("llm", "calibrate", "steps.yaml", code=1).stderr


def test_a_log_of_another_scale_is_refused(tmp_path) -> None:
    path = tmp_path / "run.log"
    path.write_text(megatron(*[4400.0] * 5), encoding="utf-8")
    with pytest.raises(hpgo.errors.ArgumentError, match="times the estimate"):
        hpgo.MeasuredStep.from_log(path, "llama-3-8b", CLUSTER)


@given(seed=st.integers(0, 10**9), kind=st.sampled_from(sorted(WRITERS)), share=st.floats(0, 0.3))
@settings(max_examples=60)
def test_malformed_lines_never_crash(seed: int, kind: str, share: float) -> None:
    rng = random.Random(seed)
    text = "".join(
        rng.choice(string.printable + "\x1b\0é") if rng.random() < share * rng.random() else letter
        for letter in WRITERS[kind](*SLOW_S, 4.4, 4.5)
    )
    try:
        log = parse_log(text[: rng.randrange(len(text))], "run.log")
    except hpgo.errors.ArgumentError as error:
        assert "no line with the time of a step" in error.message or "of two runs or settings" in error.message  # noqa: PT017
        return
    seconds, how = log.seconds(global_batch_size=32, seq_length=8192, gpus=8)
    assert 0 < seconds < float("inf")
    assert how.startswith("run.log: median of ")


def test_a_platform_does_not_replace_the_steps_that_it_is_fitted_to(tmp_path) -> None:
    steps = tmp_path / "steps.yaml"
    text = "hpgo_steps: 1\nsteps: []\n"
    steps.write_text(text, encoding="utf-8")
    done = CliRunner().invoke(group, ["llm", "calibrate", str(steps), "-o", str(steps)])
    assert done.exit_code == 2
    assert "would replace the measured steps" in done.output
    assert steps.read_text(encoding="utf-8") == text
