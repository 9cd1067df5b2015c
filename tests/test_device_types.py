"""Cluster files that state the rates of a device."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import refused

import hpgo
from hpgo.cli.main import group
from hpgo.errors import ClusterError
from hpgo.hardware.cluster import Cluster, Device, Link, Node
from hpgo.hardware.device_types import type_document
from hpgo.hardware.rates import NAMES, RATES, Rates, rates_of
from hpgo.llm.gpus import Gpus, unmeasured_shares

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "clusters.md"
STATED = """\
hpgo_cluster: 1
types:
  Card:
    processors: 100
    flops: {bf16: 300 TFLOP/s, fp8: 0.6 PFLOP/s, fp32: 2e13}
    memory: 40 GB
    memory_bandwidth: 1.5 TB/s
    host_bandwidth: 32 GB/s
    reached: {bf16: 0.7, fp8: 0.6, attention: 0.4}
nodes:
  - {count: 2, devices: 4, type: Card}
intra: {bandwidth: 64 GB/s, latency: 3.4 us}
inter: {bandwidth: 25 GB/s, latency: 9.6 us}
"""
ASK: dict[str, Any] = {"global_batch_size": 16, "seq_length": 2048}


def read(tmp_path: Path, text: str) -> Cluster:
    path = tmp_path / "own.yaml"
    path.write_text(text, encoding="utf-8")
    return Cluster.read(path)


def step_s(cluster: Cluster, **options: Any) -> float:
    return hpgo.estimate_llm("llama-3-8b", cluster, **ASK, **options).step_s


def examples() -> dict[str, str]:
    """Files of the section on stated rates, by name."""
    section = PAGE.read_text(encoding="utf-8").partition("## State the rates of a device")[2]
    return dict(re.findall(r"```yaml\n# (\S+)\n(.*?)```", section.partition("\n## ")[0], re.DOTALL))


def test_a_file_may_state_every_rate(tmp_path: Path) -> None:
    cluster = read(tmp_path, STATED)
    device = cluster.nodes[0].device
    assert device.memory_bytes == 40e9
    assert device.rates == Rates(
        {"float32": 2e13, "bfloat16": 300e12},
        1.5e12,
        "the cluster file",
        100,
        32e9,
        {"fp8": 600e12},
        {"bf16": 0.7, "fp8": 0.6, "attention": 0.4},
    )
    gpus = Gpus.of(cluster, "fp8")
    assert (gpus.products_flop_per_s, gpus.wide_flop_per_s) == pytest.approx((360e12, 210e12))
    assert (gpus.processors, gpus.host_bytes_per_s, gpus.memory_bytes_per_s) == (100, 32e9, 1.5e12)


def test_a_known_card_lends_what_the_file_leaves_out(tmp_path: Path) -> None:
    base = RATES["h100"]
    text = Cluster.preset("h100:2").yaml()
    named = read(tmp_path, text.replace("nodes:", "types:\n  H100-80GB: {reached: {bf16: 0.68}}\nnodes:"))
    rates = named.nodes[0].device.rates
    assert rates is not None
    assert rates.reached == {**base.reached, "bf16": 0.68}
    assert (rates.flop_per_s, rates.processors, rates.host_bytes_per_s) == (base.flop_per_s, 132, 64e9)
    alike = text.replace("nodes:", "types:\n  H800: {like: NVIDIA H100 80GB HBM3}\nnodes:").replace(
        "H100-80GB,", "H800,"
    )
    assert step_s(read(tmp_path, alike)) == step_s(Cluster.preset("h100:2"))
    b200 = Cluster.preset("b200:2")
    alike = b200.yaml().replace("nodes:", "types:\n  Own: {like: B200}\nnodes:").replace("B200-180GB,", "Own,")
    assert Gpus.of(read(tmp_path, alike), "bf16") == Gpus.of(b200, "bf16")
    steady = read(tmp_path, alike.replace("{like: B200}", "{like: B200, attention_ramp_tokens: 0}"))
    assert Gpus.of(steady, "bf16").attention_share(131072) == 1


def test_the_examples_of_the_page_are_what_they_say() -> None:
    files = examples()
    assert [*files] == ["h800.yaml", "h100-on-pcie.yaml", "cloud.yaml"]


def test_an_h800_is_an_h100_with_a_slower_link(tmp_path: Path) -> None:
    h800, h100 = read(tmp_path, examples()["h800.yaml"]), Cluster.preset("h100:2")
    assert h800.intra.bytes_per_s == 200e9
    assert step_s(h800) >= step_s(h100)
    for tp in (2, 4, 8):
        slow = hpgo.estimate_llm("llama-3-8b", h800, tp=tp, **ASK)
        fast = hpgo.estimate_llm("llama-3-8b", h100, tp=tp, **ASK)
        assert slow.step_s > fast.step_s
        assert dict(slow.time_by_term_s)["linear"] == dict(fast.time_by_term_s)["linear"]


def test_a_stated_card_is_as_the_known_one(tmp_path: Path) -> None:
    stated = read(tmp_path, examples()["h100-on-pcie.yaml"])
    text = examples()["h100-on-pcie.yaml"]
    known = read(tmp_path, text.replace("H100-on-PCIe", "H100-PCIe"))
    rates, own = stated.nodes[0].device.rates, RATES["h100-pcie"]
    assert rates is not None
    assert (rates.flop_per_s, rates.narrow_flop_per_s) == (own.flop_per_s, own.narrow_flop_per_s)
    assert (rates.processors, rates.bytes_per_s) == (own.processors, own.bytes_per_s)
    assert rates.reached == pytest.approx(own.reached, abs=0.01)
    assert step_s(stated) == step_s(known)


def test_a_clouds_variant_is_slower_by_its_power_limit(tmp_path: Path) -> None:
    cloud = read(tmp_path, examples()["cloud.yaml"])
    rates = cloud.nodes[0].device.rates
    assert rates is not None
    assert rates.shares == "scaled"
    shares = {key: share * (5 / 7) ** 0.5 for key, share in RATES["h100"].reached.items()}
    assert rates.reached == pytest.approx(shares, abs=0.01)
    assert step_s(cloud, tp=2) > step_s(Cluster.preset("h100:4"), tp=2)


@pytest.mark.parametrize("text", [STATED, *examples().values()], ids=["stated", *examples()])
def test_stated_rates_survive_saving(text: str, tmp_path: Path) -> None:
    cluster = read(tmp_path, text)
    written = read(tmp_path, cluster.yaml())
    assert written.nodes == cluster.nodes
    assert written.nodes[0].device.rates is not None
    assert Cluster.from_document(json.loads(json.dumps(cluster.document())), file="x.json") == cluster
    plan = hpgo.plan_llm("gpt-2", cluster, global_batch_size=16, seq_length=1024).plan()
    plan.save(tmp_path / "llm-plan.json")
    assert hpgo.LlmPlan.read(tmp_path / "llm-plan.json").cluster == plan.cluster
    types = json.loads((tmp_path / "llm-plan.json").read_text(encoding="utf-8"))["cluster"]["types"]
    assert types
    schema = json.loads((DOCS / "llm-plan.schema.json").read_text(encoding="utf-8"))
    assert schema["properties"]["cluster"]["properties"]["types"] == {"$ref": "#/$defs/device_types"}
    jsonschema.validate(types, {"$ref": "#/$defs/device_types", "$defs": schema["$defs"]})


def test_a_plan_of_layers_keeps_stated_rates(tmp_path: Path) -> None:
    cluster = read(tmp_path, STATED)
    plan = hpgo.plan(hpgo.read_profile("bert-48"), cluster, global_batch_size=16)
    saved = json.loads(plan.to_json())
    jsonschema.validate(saved, json.loads((DOCS / "plan.schema.json").read_text(encoding="utf-8")))
    assert cluster.document()["types"] in _all(saved)


def _all(value: object) -> list[object]:
    """Return a parsed document with all its parts."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [value, *(part for one in inner for part in _all(one))]


RATE, SHARE = st.floats(1e9, 1e18), st.floats(1e-3, 1)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rates=st.builds(
        Rates,
        st.dictionaries(st.sampled_from(["float32", "tf32", "float16"]), RATE).map(lambda held: held | {"bfloat16": 1}),
        RATE,
        st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
        st.integers(1, 10**4),
        RATE | st.just(float("inf")),
        st.fixed_dictionaries({"fp8": RATE, "fp4": RATE}),
        st.dictionaries(st.sampled_from(["bf16", "fp8", "fp4", "attention"]), SHARE),
        st.floats(0, 1e6),
        st.booleans(),
    ),
    name=st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
)  # fmt: skip
def test_any_stated_rates_read_back_as_they_were(rates: Rates, name: str, tmp_path: Path) -> None:
    # A known name would lend rates that these leave out.
    device = Device(f"{name} of my own", 1e9, rates=rates)
    cluster = Cluster("c", (Node(device, 2),), Link(1e9, 1e9), Link(1e9, 1e9))
    assert read(tmp_path, cluster.yaml()) == cluster
    assert Cluster.from_document(cluster.document(), file="x") == cluster


@pytest.mark.parametrize(
    ("old", "faster"),
    [
        ("bf16: 300 TFLOP/s", "bf16: 450 TFLOP/s"),
        ("bf16: 0.7", "bf16: 0.9"),
        ("attention: 0.4", "attention: 0.6"),
        ("memory_bandwidth: 1.5 TB/s", "memory_bandwidth: 3 TB/s"),
        ("bandwidth: 64 GB/s", "bandwidth: 450 GB/s"),
        ("latency: 3.4 us", "latency: 0"),
    ],
)
def test_a_faster_device_never_makes_a_longer_step(old: str, faster: str, tmp_path: Path) -> None:
    assert STATED.count(old) == 1
    slow, fast = read(tmp_path, STATED), read(tmp_path, STATED.replace(old, faster))
    for options in ({"tp": 4}, {"tp": 2, "pp": 2}, {"zero_stage": 3}):
        assert step_s(fast, **options) <= step_s(slow, **options)
    assert step_s(fast, tp=4) < step_s(slow, tp=4)


@given(st.lists(st.floats(0.2, 5), min_size=2, max_size=6).map(sorted))
def test_a_higher_stated_rate_never_makes_a_longer_step(factors: list[float]) -> None:
    def scaled(factor: float) -> Cluster:
        rates = Rates({"bfloat16": 3e14 * factor}, 1.5e12, "", 100, 32e9, {}, {"bf16": 0.7, "attention": 0.4})
        return Cluster("c", (Node(Device("card", 4e10, rates=rates), 8),), Link(6e10, 6e10), Link(6e10, 6e10))

    steps = [step_s(scaled(factor), tp=2) for factor in factors]
    assert steps == sorted(steps, reverse=True)


@pytest.mark.parametrize(
    ("old", "new", "said", "hint"),
    [
        ("    processors: 100\n", "", "`processors` of `Card` is missing", "like: H100-80GB"),
        ("processors: 100", "procesors: 100", "`procesors` is unknown", "did you mean `processors`?"),
        ("processors: 100", "processors: 0", "`processors` must be a whole number from 1", ""),
        ("bf16: 300", "bf61: 300", "flops: `bf61` is unknown", "did you mean `bf16`?"),
        ("300 TFLOP/s", "300 TB/s", "flops: `bf16`: `300 TB/s` is no rate", "312 TFLOP/s"),
        ("300 TFLOP/s", "0", "flops: `bf16` is 0, but it must be above 0", ""),
        ("flops: {bf16: 300 TFLOP/s,", "flops: {", "has neither `bf16` nor `fp16`", "bf16: 312 TFLOP/s"),
        ("reached: {bf16: 0.7", "reached: {bf16: 70", "reached: `bf16`: 70 is no share", "at most 1"),
        ("fp8: 0.6 PFLOP/s, ", "", "`reached` has `fp8`, but `flops` does not", "`fp8`"),
        ("memory_bandwidth", "memory_bandwith", "`memory_bandwith` is unknown", "did you mean `memory_bandwidth`?"),
        ("1.5 TB/s", "-1", "`memory_bandwidth`: the rate is -1", ""),
        ("    processors", "    like: H100\n    scaled: 1\n    processors", "`scaled` must be true or false", ""),
        ("    processors", "    like: H100-PCE\n    processors", "`like` is `H100-PCE`", "H100-PCIe"),
        ("type: Card", "type: Cart, memory: 40 GB", "`types` has `Card`, but no node has this type", "`Cart`"),
        ("    memory: 40 GB\n", "", "nodes entry 1: `memory` is missing", ""),
        ("types:\n  Card:", "typs:\n  Card:", "`typs` is unknown", "did you mean `types`?"),
    ],
)  # fmt: skip
def test_a_wrong_type_is_named_with_the_place_and_the_way_out(
    old: str, new: str, said: str, hint: str, tmp_path: Path
) -> None:
    assert STATED.count(old) == 1
    with pytest.raises(ClusterError) as caught:
        read(tmp_path, STATED.replace(old, new))
    assert "own.yaml" in caught.value.message
    assert said in caught.value.message
    assert hint in caught.value.hint


def test_an_unknown_device_without_rates_is_told_how_to_state_them(tmp_path: Path) -> None:
    text = Cluster.preset("h100:1").yaml().replace("H100-80GB", "H100-PCI")
    with refused(ClusterError, "invalid_cluster", "H100-PCI") as caught:
        step_s(read(tmp_path, text))
    assert "H100-PCIe" in caught.value.hint
    assert "under `types`" in caught.value.hint
    # The hint is true.
    assert step_s(read(tmp_path, text.replace("nodes:", "types: {H100-PCI: {like: H100-80GB}}\nnodes:"))) > 0


def test_devices_of_one_name_have_the_same_rates() -> None:
    nodes = [Node(Device("card", 1e9, rates=RATES[key]), 1) for key in ("h100", "a100")]
    with refused(ClusterError, "mismatch", "card"):
        Cluster("c", tuple(nodes), Link(1, 1), Link(1, 1))


def test_the_origin_of_the_shares_is_kept_and_noted(tmp_path: Path) -> None:
    assert unmeasured_shares(read(tmp_path, STATED)) == ""
    without = read(tmp_path, STATED.replace("    reached: {bf16: 0.7, fp8: 0.6, attention: 0.4}\n", ""))
    assert "no measurement is known" in unmeasured_shares(without)
    like = STATED.replace("  Card:\n", "  Card:\n    like: H100\n")
    # Stated shares were measured. Shares that are inherited for another peak were not.
    assert unmeasured_shares(read(tmp_path, like)) == ""
    inherited = read(tmp_path, re.sub(r" *reached: .*\n", "", like))
    assert "scaled from a similar card" in unmeasured_shares(inherited)
    for name in ("h100:1", "l4:1"):
        shown = CliRunner().invoke(group, ["llm", "estimate", "gpt-2", "-c", name, "-b", "8", "--seq-length", "1024"])
        assert ("no measurement is known" in shown.stderr) == (name == "l4:1")


def test_the_command_lists_devices_with_their_names_and_shares() -> None:
    listed = CliRunner().invoke(group, ["clusters", "devices"]).stdout
    entries = json.loads(CliRunner().invoke(group, ["clusters", "devices", "--json"]).stdout)
    assert [entry["name"] for entry in entries] == [*RATES]
    for entry in entries:
        rates = RATES[entry["name"]]
        assert f"{entry['name']}: {rates.source}"[:60] in listed
        assert entry["names"] == [*NAMES[entry["name"]]]
        assert entry["shares"] == rates.shares
        assert entry["flops"] == type_document(rates)["flops"]
        assert all(rates_of(name) is rates for name in entry["names"])
