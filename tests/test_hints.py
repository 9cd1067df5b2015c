"""Hints lead somewhere: names that are suggested exist, and a misspelt key is told from a missing one."""

from __future__ import annotations

import json
import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

import hpgo
from hpgo.base.documents import parse
from hpgo.base.messages import nearest_names, short_names, spans_of
from hpgo.cli.main import group, run
from hpgo.hardware.presets import PRESETS
from hpgo.show import report

ROOT = Path(__file__).parent.parent
CLUSTER = """
hpgo_cluster: 1
name: lab
nodes: [{count: 2, devices: 2, memory: 16 GB, speed: 1.0}]
intra: {bandwidth: 100 GB/s, latency: 1 us}
inter: {bandwidth: 10 GB/s, collective: 9 GB/s}
"""
PROFILE = """
hpgo_profile: 1
name: tiny
batch_sizes: 1
layers:
  - {id: one, forward_s: 1.0, backward_s: 2.0, activation_bytes: 8, parameter_bytes: 4}
  - {id: two, forward_s: 1.0, backward_s: 2.0, activation_bytes: 8, parameter_bytes: 4}
"""
TRANSFORMER = """
hpgo_transformer: 1
layers: 2
hidden: 64
heads: 4
kv_heads: 2
head_dim: 16
ffn: 256
vocab: 1000
"""
STEPS = """
hpgo_steps: 1
steps:
  - {model: llama-3-8b, cluster: "h100:1", seconds: 5.1, global_batch_size: 32, seq_length: 4096, tp: 2}
"""
DOCUMENTS = {
    "cluster": (CLUSTER, hpgo.Cluster.read),
    "profile": (PROFILE, hpgo.read_profile),
    "transformer": (TRANSFORMER, hpgo.Transformer.read),
    "steps": (STEPS, hpgo.fit_platform),
}


def keys_of(held: object) -> list[str]:
    """All keys of a document, wherever they stand."""
    if isinstance(held, dict):
        return [key for name, value in held.items() for key in (name, *keys_of(value))]
    return [key for value in held for key in keys_of(value)] if isinstance(held, list) else []


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_a_misspelt_key_is_named_beside_the_one_that_is_known(kind: str, tmp_path: Path) -> None:
    text, read = DOCUMENTS[kind]
    path = tmp_path / f"{kind}.yaml"
    path.write_text(text)
    read(path)
    for key in dict.fromkeys(key for key in keys_of(yaml.safe_load(text)) if len(key) > 3 and key[:5] != "hpgo_"):
        for wrong in {key[:-1], f"{key[:1]}{key[2]}{key[1]}{key[3:]}", f"{key}x", key.upper()} - {key, "batch_size"}:
            path.write_text(re.sub(rf"\b{key}:", f"{wrong}:", text, count=1))
            with pytest.raises(hpgo.errors.HpgoError) as caught:
                read(path)
            assert f"`{wrong}` is unknown" in caught.value.message, (key, wrong)
            assert f"`{key}`" in caught.value.hint, (key, wrong, caught.value.hint)


def test_a_missing_key_is_called_missing_where_all_others_are_right(tmp_path: Path) -> None:
    path = tmp_path / "lab.yaml"
    path.write_text("\n".join(line for line in CLUSTER.splitlines() if not line.startswith("intra")))
    with refused(hpgo.errors.ClusterError, "missing", name="intra") as caught:
        hpgo.Cluster.read(path)
    assert "inter" not in caught.value.hint


@given(st.sampled_from(sorted(PRESETS)), st.randoms(use_true_random=False))
def test_names_that_differ_in_case_and_separators_are_nearest(name, random) -> None:
    typed = "".join(random.choice([letter.upper(), letter]) for letter in name).replace("-", random.choice("-_ ."))
    assert nearest_names(typed, PRESETS) == [name]


@pytest.mark.parametrize("name", ["H100:8", "h-100:2", "DAPPLE_A:3", "h10:4", "a100x:1"])
def test_a_cluster_that_is_suggested_can_be_read(name: str) -> None:
    with pytest.raises(hpgo.errors.ClusterError) as caught:
        hpgo.Cluster.read(name)
    suggested = caught.value.hint.split("`")[1]
    assert hpgo.Cluster.read(suggested).nodes
    assert suggested.partition(":")[2] == name.partition(":")[2], "the number of nodes is kept"


def test_a_number_of_machines_that_is_none_is_not_suggested() -> None:
    for name in ("H100:0", "H100:x", "H100:9999999999"):
        with pytest.raises(hpgo.errors.ClusterError) as caught:
            hpgo.Cluster.read(name)
        assert caught.value.hint == "did you mean `h100`?"


@given(
    st.recursive(
        st.integers(-9, 9) | st.booleans() | st.text("abc", max_size=3),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("xyz", min_size=1), inner, max_size=3),
        max_leaves=8,
    ).filter(lambda held: isinstance(held, dict))
)
def test_braces_hold_json_or_yaml(held) -> None:
    assert parse(json.dumps(held), "text", hpgo.errors.HpgoError) == held
    assert parse(yaml.safe_dump(held, default_flow_style=True), "text", hpgo.errors.HpgoError) == held


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_a_document_in_braces_is_yaml(kind: str, tmp_path: Path) -> None:
    text, read = DOCUMENTS[kind]
    path = tmp_path / f"{kind}.yaml"
    path.write_text(text)
    expected = read(path)
    path.write_text(yaml.safe_dump(yaml.safe_load(text), default_flow_style=True, width=10**6))
    assert path.read_text().startswith("{")
    assert read(path) == expected


@pytest.mark.parametrize("cut", [2, 20, 60])
def test_damaged_json_is_told_as_json(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "lab.json"
    path.write_text(json.dumps(yaml.safe_load(CLUSTER))[:-cut])
    with refused(hpgo.errors.ClusterError, "invalid_cluster", "1", "JSON"):
        hpgo.Cluster.read(path)


def test_a_file_that_is_not_there_is_told_without_advice_to_name_one_that_is(tmp_path: Path) -> None:
    with pytest.raises(hpgo.errors.ArgumentError) as caught:
        hpgo.Plan.read(tmp_path / "absent.json")
    assert caught.value.message == f"file not found: `{tmp_path / 'absent.json'}`"
    assert "name a file that exists" not in caught.value.hint
    (tmp_path / "absnt.json").write_text("{}")
    with pytest.raises(hpgo.errors.ArgumentError) as caught:
        hpgo.Plan.read(tmp_path / "absent.json")
    assert caught.value.hint == "did you mean `absnt.json`?"


MISPLACED = [
    ("plan qwen2.5-72b -c h100:8 -b 1024", "has no layer profile"),
    ("plan llama-3-8b -c h100:1 -b 32,64", "has no layer profile"),
    ("evaluate llama-3-8b -c h100:1 -b 64 --stages 1@0", "is a transformer"),
    ("models show llama-3-8b", "is a transformer"),
    ("profile llama-3-8b", "is a transformer"),
    ("simulate --plan llama-3-8b", "is a transformer"),
    ("simulate llama-3-8b", "is a transformer"),
    ("draw llama-3-8b -o x.svg", "is a transformer"),
    ("export llama-3-8b --to megatron", "is a transformer"),
    ("llm explain llama-3-8b", "is a transformer"),
    ("llm estimate vgg-19 -c h100:1 -b 8 --seq-length 2048", "is a model with measured layer times"),
    ("plan bert-48 -c vgg-19 -b 64", "is a model with measured layer times"),
    ("simulate --schedule vgg-19", "is a model with measured layer times"),
    ("simulate vgg-19", "is a model with measured layer times"),
    ("draw vgg-19 -o x.svg", "is a model with measured layer times"),
    ("evaluate h100:2 -c h100:1 -b 64 --stages 1@0", "is a cluster"),
    ("plan h100:2 -c h100:1 -b 64", "is a cluster"),
    ("llm estimate h100:2 -c h100:1 -b 64 --seq-length 2048", "is a cluster"),
    ("simulate --schedule dapple-a", "is a cluster"),
    ("plan zb_h1 -c h100:1 -b 64", "is a schedule"),
    ("plan bert-48 -c 1f1b -b 64", "is a schedule"),
    ("simulate zb_h1", "is a schedule"),
]
"""Names in another's place, and what is said of them."""


@pytest.mark.parametrize(("typed", "said"), MISPLACED)
def test_a_name_in_the_place_of_another_kind_leads_to_a_command_that_takes_it(
    typed: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refused = CliRunner().invoke(group, typed.split())
    assert isinstance(refused.exception, hpgo.errors.HpgoError), refused.output
    assert said in refused.exception.message
    typed_next = [shlex.split(part)[1:] for part in refused.exception.hint.split("`") if part.startswith("hpgo ")]
    assert typed_next, refused.exception.hint
    for words in typed_next:
        if words[:1] != ["simulate"] or "--plan" in words:  # one that draws a picture takes a second
            done = CliRunner().invoke(group, words)
            assert done.exit_code == 0, (words, done.exception)


def test_files_are_told_by_what_they_hold(tmp_path: Path) -> None:
    for name, (text, _) in DOCUMENTS.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    said = {"cluster": "a cluster", "transformer": "a transformer", "steps": "a list of measured steps"}
    for name, kind in said.items():
        with refused(hpgo.errors.ProfileError, "wrong_kind_of_file", kind):
            hpgo.read_profile(tmp_path / f"{name}.yaml")
    with refused(hpgo.errors.ClusterError, "wrong_kind_of_file"):
        hpgo.Cluster.read(tmp_path / "profile.yaml")


@pytest.mark.parametrize(
    "typed",
    [
        "partition --profile vgg-19 --cluster h100:1 --max-replicas 0",
        "partition --profile vgg-19 --cluster h100:1 --batch-size 0",
        "partition --profile vgg-19 --cluster h100:1 --max-replicas 2 --yaml",
        "partition --profile vgg-19 --cluster h100:1 --throughput 1e9 --objective hosts",
        "plan bert-48 -c dapple-a -b 64 --pipeline-micro-batch-size 7",
        "plan bert-48 -c dapple-a -b 64 --min-samples-per-replica 100",
        "plan bert-48 -c dapple-a -b 64 --max-stages 0",
        "plan bert-48 -c dapple-a -b 64 --profile-batch-size 3",
        "plan bert-48 -c dapple-a -b 64 --reserve-memory 20GB",
        "plan bert-48 -c dapple-a -b 64 --optimizer-per-weight=-1",
        "estimate llama-3-8b --device h100 --batch-size 1 --efficiency 2",
        "estimate llama-3-8b --device h100 --dim tokens=128 --batch-size 99999999",
        "estimate llama-3-8b --device h100 --dim token=4",
        "llm estimate llama-3-8b -c h100:1 -b 8 --seq-length 2048 --recompute-num-layers 4",
        "llm estimate llama-3-8b -c h100:1 -b 8 --seq-length 2048 --pp 2 --first-rank-layers 40",
        "llm estimate llama-3-8b -c h100 -b 8 --seq-length 64 --pp 2 --vpp 2 --pp-schedule zb_v --first-rank-layers 4",
        "schedules show zb --ranks 4 --micro-batches 8 --group-size 2",
        "schedules show dualpipe --ranks 3 --micro-batches 6",
        "simulate -s 4 -b 6 --schedule interleaved --virtual-stages-per-rank 2 --group-size 5",
        "launch absent.json --on slurm --script x.py",
    ],
)
def test_errors_of_commands_name_options_and_no_arguments_of_functions(
    typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = typed.split()
    result = CliRunner().invoke(group, words)
    assert isinstance(result.exception, hpgo.errors.HpgoError), result.output
    said = f"{result.exception.message}\n{result.exception.hint}"
    command = group.get_command(None, words[0])
    arguments = {name for name in _arguments() if "_" in name}
    assert not arguments & set(re.findall(r"[a-z]+(?:_[a-z]+)+", said)), said
    assert "hpgo." not in said, said
    assert command is not None


def _arguments() -> set[str]:
    """Arguments of the functions that commands call."""
    import inspect

    return {
        name
        for function in (hpgo.plan, hpgo.estimate_llm, hpgo.partition, hpgo.partition_files, hpgo.estimate,
        hpgo.schedule,
                         hpgo.simulate, hpgo.evaluate, hpgo.plan_llm, hpgo.read_profile)
        for name in inspect.signature(function).parameters
    } | {"reserved_bytes", "max_replicas", "samples_per_s", "batch_size", "max_stages"}  # fmt: skip


def test_nothing_says_to_install_extras_of_a_name_that_is_another_project_on_the_index() -> None:
    root = Path(hpgo.__file__).parent
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    others = [*(ROOT / "tests").glob("*.py"), *(ROOT / "examples").glob("*.py"), *(ROOT / "research").glob("*.py")]
    for path in [*sorted(root.rglob("*.py")), *pages, *(path for path in others if path != Path(__file__))]:
        assert not re.search(r"\bhpgo\[|install (hpgo|HPGO)\b", path.read_text(encoding="utf-8")), path


# --- Degrees ----------------------------------------------------------------------------------------------------------


def in_code(hint: str) -> list[dict[str, int]]:
    """Arguments that a hint names: alternatives behind `or`, joined ones behind `and` or in a row."""
    alternatives = re.split(r",? or ", hint)
    found = [{name: int(value) for name, value in re.findall(r"`([\w-]+)=(\d+)`", one)} for one in alternatives]
    return [one for one in found if one]


small = st.sampled_from([1, 2, 3, 4, 5, 6, 8, 12, 16])


@given(
    shape=st.builds(
        lambda layers, heads, kv, ffn, experts: hpgo.Transformer(
            name="made", layers=layers, hidden=64 * heads, heads=heads, kv_heads=heads // kv, head_dim=64, ffn=ffn,
            vocab=1000, **({"experts": experts, "experts_per_token": 1, "expert_ffn": 128} if experts else {}),
        ),
        st.integers(1, 48), st.sampled_from([4, 6, 8, 12, 16]), st.sampled_from([1, 2]),
        st.sampled_from([96, 256, 384]), st.sampled_from([0, 0, 4, 6]),
    ),
    asked=st.fixed_dictionaries(
        {"global_batch_size": st.sampled_from([1, 8, 12, 30, 64]), "seq_length": st.sampled_from([512, 1000, 2048])},
        optional=dict.fromkeys(("tp", "cp", "ep", "pp", "vpp", "micro_batch_size"), small) | {
            "devices": st.integers(1, 16)},
    ),
)  # fmt: skip
def test_degrees_that_a_hint_names_are_accepted_in_the_same_question(shape, asked) -> None:
    try:
        hpgo.estimate_llm(shape, "h100", **asked)
    except hpgo.errors.ArgumentError as error:
        named = in_code(error.hint)
        assert named, error  # noqa: PT017 -- some questions are not refused
        for changes in named:
            hpgo.estimate_llm(shape, "h100", **{**asked, **changes})


def test_a_precision_that_is_refused_leads_to_its_option() -> None:
    asked = "llm estimate llama-3-8b -c h100:1 -b 64 --seq-length 4096 --lora-rank 8 --base-weights-dtype fp8"
    refused = CliRunner().invoke(group, asked.split())
    assert isinstance(refused.exception, hpgo.errors.ArgumentError)
    assert refused.exception.hint == "use --precision fp8"
    assert CliRunner().invoke(group, [*asked.split(), "--precision", "fp8"]).exit_code == 0


@pytest.mark.parametrize(
    ("options", "ways"),
    [
        ("--devices 1", "use more GPUs, recompute with --recompute full, or use --optimizer-offload-fraction 1"),
        ("--devices 2 --recompute full", "raise a degree or --zero-stage, or use --optimizer-offload-fraction 1"),
        ("--devices 1 --recompute full --lora-rank 8", "use more GPUs"),
    ],
)
def test_what_does_not_fit_leads_to_changes_that_can_be_made(options: str, ways: str) -> None:
    asked = "llm estimate llama-3-70b -c h100:1 -b 8 --seq-length 4096"
    done = CliRunner().invoke(group, [*asked.split(), *options.split()])
    assert f"warning: it does not fit: {ways}\n" in done.output


def test_a_job_that_no_folder_can_train_is_refused_before_anything_is_suggested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text('{"model_type": "t5"}')
    asked = "llm plan config.json -c h100:1 -b 64 --seq-length 128 --framework deepspeed -o job/"
    done = CliRunner().invoke(group, asked.split())
    assert isinstance(done.exception, hpgo.errors.ArgumentError)
    assert not done.output


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ("--vpp 7", "use `--vpp 1`"),
        ("--pp-schedule zb_v", "use `--vpp 2` and `--pp 2`"),
        ("--tp 5 --ep 2", "use `--tp 4` and `--ep 1`"),
        ("--pp 4 --vpp 2 --micro-batch-group-size 2", "use `--micro-batch-group-size 4`"),
        ("--cp 9 --pp 12 --micro-batch-size 4", ""),
    ],
)
def test_several_degrees_that_are_refused_lead_to_options_that_are_accepted(options: str, hint: str) -> None:
    asked = ["llm", "estimate", "llama-3-8b", "-c", "h100:16", "-b", "256", "--seq-length", "4096"]
    refused = CliRunner().invoke(group, [*asked, *options.split()])
    assert isinstance(refused.exception, hpgo.errors.ArgumentError)
    said = refused.exception.hint
    assert said.startswith("use `--") or "fix" in said, said
    assert hint in said, said
    for one in re.split(r",? or ", said):
        changed = [word for part in one.split("`")[1::2] for word in part.split()]
        if changed:
            done = CliRunner().invoke(group, [*asked, *options.split(), *changed])
            assert done.exit_code == 0, (changed, done.exception)


def test_names_that_are_fixed_in_vain_together_are_left_open_together() -> None:
    fix = {"tp": 6, "cp": 5, "vpp": 16, "zero_stage": 1}
    asked = {"global_batch_size": 1, "seq_length": 512, "framework": "megatron", "top": 1}
    with pytest.raises(hpgo.errors.ArgumentError) as caught:
        hpgo.plan_llm("gpt-2", "h100:1", fix=fix, **asked)
    assert caught.value.hint == "leave tp, cp and vpp open"
    assert hpgo.plan_llm("gpt-2", "h100:1", fix={"zero_stage": 1}, **asked).best


def test_a_cluster_that_is_too_small_leads_to_a_larger_one_of_its_kind() -> None:
    with pytest.raises(hpgo.errors.ClusterError) as caught:
        hpgo.estimate_llm("gpt-2", "a100:2", global_batch_size=24, seq_length=512, devices=24)
    assert caught.value.hint == "use a larger cluster, such as `a100:3`"
    assert hpgo.estimate_llm("gpt-2", "a100:3", global_batch_size=24, seq_length=512, devices=24).gpus == 24


@given(
    layers=st.integers(2, 12),
    fix=st.dictionaries(
        st.sampled_from(["tp", "cp", "pp", "vpp", "dp", "micro_batch_size", "zero_stage"]),
        st.integers(1, 8),
        max_size=3,
    ),
    framework=st.sampled_from(["megatron", "torchtitan", "deepspeed"]),
)
@settings(max_examples=60)
def test_what_a_search_says_to_fix_instead_leaves_ways(layers, fix, framework) -> None:
    shape = hpgo.Transformer(
        name="made", layers=layers, hidden=256, heads=4, kv_heads=4, head_dim=64, ffn=512, vocab=1000
    )
    asked = {"global_batch_size": 8, "seq_length": 512, "framework": framework, "top": 1}
    try:
        hpgo.plan_llm(shape, "h100:1", fix=fix, **asked)
    except hpgo.errors.ArgumentError as error:
        for changes in in_code(error.hint):
            fixed = {name.replace("-", "_"): value for name, value in changes.items()}
            hpgo.plan_llm(shape, "h100:1", fix={**fix, **fixed}, **asked)


def test_the_layers_of_the_ends_are_named_where_they_help(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "seven.yaml").write_text(TRANSFORMER.replace("layers: 2", "layers: 7"))
    asked = ["llm", "estimate", "seven.yaml", "-c", "h100:1", "-b", "8", "--seq-length", "512", "--pp", "2"]
    refused = CliRunner().invoke(group, asked)
    assert isinstance(refused.exception, hpgo.errors.ArgumentError)
    assert "`--first-rank-layers 4`" in refused.exception.hint
    assert CliRunner().invoke(group, [*asked, "--first-rank-layers", "4"]).exit_code == 0
    # The search finds such ends by itself.
    assert (
        hpgo.plan_llm("seven.yaml", "h100:1", global_batch_size=8, seq_length=512, fix={"pp": 2}).best.parallelism.pp
        == 2
    )


# --- Names that are too long for a table ------------------------------------------------------------------------------

DEEP = [f"transformer.h.{block}.{part}" for block in range(12) for part in ("ln_1", "attn.c_proj", "mlp.c_fc")]


@given(st.lists(st.text("ab.0-_…", max_size=60), max_size=12))
def test_different_names_are_never_shown_as_the_same_text(names: list[str]) -> None:
    short = short_names(names)
    assert set(short) == set(names)
    assert len(set(short.values())) == len(set(names))
    assert all(short[name] == name for name in names if len(name) <= 16) or any(len(name) > 16 for name in names)


@given(st.lists(st.sampled_from(DEEP), min_size=1, max_size=8), st.integers(0, 40))
def test_ends_of_different_rows_are_told_apart(ends: list[str], cut: int) -> None:
    rows = [[name] for name in dict.fromkeys(ends)] + [[DEEP[0], DEEP[-1]]] * (cut > 20)
    assert len(set(spans_of(rows))) == len(rows)


def deep_plan() -> hpgo.Plan:
    """A plan of layers whose names differ behind the sixteenth character only."""
    layers = tuple(hpgo.Layer(name, name, (1.0,), (2.0,), (8.0,), 4.0) for name in DEEP)
    profile = hpgo.Profile("deep", (1,), layers, tuple(pairwise(DEEP)), "made")
    return hpgo.evaluate(
        profile,
        hpgo.Cluster.preset("dapple-c"),
        [(count, [at]) for at, count in enumerate((3, 6, 12, 15))],
        global_batch_size=8,
    )


def test_tables_markdown_and_pictures_show_both_ends_of_each_stage(tmp_path: Path) -> None:
    plan = deep_plan()
    for text in (str(plan), report.markdown(plan)):
        for stage in plan.stages:
            first, last = (name.removeprefix("transformer.") for name in (stage.layers[0], stage.layers[-1]))
            assert f"…{first} … …{last}" in text
        assert "transformer.h." not in text.split("forward")[0]
    rows = hpgo.simulate(plan).row_names
    assert len({row.partition("(")[2] for row in rows}) == len(rows)
    path = tmp_path / "step.svg"
    hpgo.simulate(plan).save(path)
    assert "…h.0.mlp.c_fc" in path.read_text(encoding="utf-8")


# --- Models that are no workload --------------------------------------------------------------------------------------


def test_models_that_cannot_be_cut_are_told_by_what_they_return_or_are() -> None:
    torch = pytest.importorskip("torch", reason="needs torch: pip install torch")
    from hpgo.runtime import Workload

    class Two(torch.nn.Module):
        def __init__(self, give):
            super().__init__()
            self.one, self.two, self.give = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1), give

        def forward(self, given):
            hidden = self.one(given)
            return self.give(hidden, self.two(hidden))

    def refused(model, loss=torch.nn.functional.mse_loss):
        with pytest.raises(hpgo.errors.ArgumentError) as caught:
            Workload(model, torch.zeros(2, 4), torch.zeros(2, 1), loss)
        return caught.value

    error = refused(Two(lambda hidden, out: {"hidden": hidden, "out": {out}}))
    assert "what Two returns has a set among its tensors" in error.message
    assert "in tuples, lists, dicts and dataclasses" in error.hint
    told = Workload(Two(lambda hidden, out: (hidden, out)), torch.zeros(2, 4), torch.zeros(2, 1), lambda o, t: o[1])
    assert told.layers


# --- PipeEdge's files ---

PIPEEDGE: dict[str, object] = {
    "models": {"net": {"layers": 2, "mem_MB": [1.0, 2.0], "parameters_in": 10, "parameters_out": [10, 20]}},
    "types": {
        kind: {
            "bw_Mbps": 1000,
            "mem_MB": 2048,
            "model_profiles": {"net": [{"batch_size": 8, "dtype": "torch.float32", "time_s": [0.1, 0.2]}]},
        }
        for kind in ("fast", "slow")
    },
    "devices": {"fast": ["one"], "slow": ["two"]},
    "links": {
        "latency": "1 ms",
        "links": [{"between": ["one", "two"], "bandwidth": "100 MB/s"}, {"from": "fast", "to": "slow"}],
        "input": {"host": "one"},
        "output": {"bandwidth": "1 MB/s"},
    },
}


def places_of(held: object, above: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Where the keys of a document stand."""
    if isinstance(held, dict):
        return [place for key, value in held.items() for place in ((*above, key), *places_of(value, (*above, key)))]
    if isinstance(held, list):
        return [place for at, value in enumerate(held) for place in places_of(value, (*above, at))]
    return []


def misspelt(held: object, place: tuple[str | int, ...]) -> object:
    """The document with a letter more at the end of the key at `place`."""
    first, *rest = place
    if isinstance(held, list):
        return [misspelt(value, tuple(rest)) if at == first else value for at, value in enumerate(held)]
    assert isinstance(held, dict)
    return {
        (f"{key}x" if key == first and not rest else key): misspelt(value, tuple(rest)) if key == first and rest
        else value for key, value in held.items()
    }  # fmt: skip


def test_files_of_another_kind_are_told_in_the_place_of_those_of_pipeedge(tmp_path: Path) -> None:
    (tmp_path / "lab.yaml").write_text(CLUSTER)
    paths = {name: tmp_path / f"{name}.yml" for name in ("models", "types", "devices")}
    for name, path in paths.items():
        path.write_text(yaml.safe_dump(PIPEEDGE[name]))
    for name in paths:
        given = [tmp_path / "lab.yaml" if other == name else path for other, path in paths.items()]
        with refused(hpgo.errors.HpgoError, "wrong_kind_of_file", "PipeEdge"):
            hpgo.partition_files(*given, model="net", batch_size=8)


@pytest.mark.parametrize(
    ("file", "place"), [(file, place) for file, held in PIPEEDGE.items() for place in places_of(held)]
)
def test_a_misspelt_name_in_a_file_of_pipeedge_is_refused_beside_the_one_that_is_meant(
    file: str, place: tuple[str | int, ...], tmp_path: Path
) -> None:
    paths = {name: tmp_path / f"{name}.yml" for name in PIPEEDGE}

    def planned(changed: dict[str, object]) -> hpgo.ChainPlan:
        for name, held in (PIPEEDGE | changed).items():
            paths[name].write_text(yaml.safe_dump(held))
        return hpgo.partition_files(
            paths["models"], paths["types"], paths["devices"], model="net", batch_size=8, links=paths["links"]
        )

    assert planned({}).stages
    with pytest.raises(hpgo.errors.HpgoError) as caught:
        planned({file: misspelt(PIPEEDGE[file], place)})
    said = f"{caught.value.message} {caught.value.hint}"
    assert f"`{place[-1]}`" in said, said
    assert f"`{place[-1]}x`" in said, said


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("launch plan.json --on slrum --script x.py", "did you mean `slurm`?"),
        ("estimate llama-3-8b --device h2000 --dim tokens=4", "did you mean `h200`?"),
        ("plan bert-48 -c dapple-a -b 64 --optimizer sdg", "did you mean `sgd`?"),
        (
            "llm estimate llama-3-8b -c h100:1 -b 8 --seq-length 64 --precision x",
            "see `hpgo llm estimate --help`",
        ),
        ("llm estimate llama-3-8b -c h100:1 -b 8 --seq 64", "did you mean `--seq-length`?"),
        ("run plan.json --worklod gpt", "did you mean `--workload`?"),
        ("plan bert-48 --deadline 3s", "did you mean `--time-limit`?"),
        ("plan bert-48 --equal-shares", "did you mean `--even-split`?"),
        ("plan llama-3-8b --seq 4096", "did you mean `hpgo llm plan`?"),
        ("run plan.json --emulate", "did you mean `hpgo emulate`?"),
        ("llm plan llama-3-8b --seq 4096", "did you mean `--seq-length`?"),
        *(
            (
                f"{typed} {quiet}",
                "progress is shown on a terminal only, so no option is needed to hide it; `--json` prints",
            )
            for typed, quiet in (
                ("plan bert-48", "-q"),
                ("run plan.json", "--quiet"),
                ("emulate plan.json", "--silent"),
            )
        ),
        ("price bert-48", "did you mean `hpgo evaluate`?"),
        ("explain plan.json", "did you mean `hpgo llm explain`?"),
    ],
)
def test_a_misspelt_choice_leads_to_the_one_that_is_meant(
    typed: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(SystemExit):
        run(group, typed.split(), "hpgo")
    assert f"hint: {hint}" in capsys.readouterr().err
