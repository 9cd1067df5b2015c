"""Clusters from numbers, names and files."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import refused

import hpgo
from hpgo.cli.main import group
from hpgo.hardware.cluster import Cluster, Device, Link, Node
from hpgo.hardware.presets import PRESETS
from hpgo.hardware.rates import NAMES, RATES, key_of, rates_of

if TYPE_CHECKING:
    from pathlib import Path

LAB = """\
hpgo_cluster: 1
name: lab
source: measured in May
nodes:
  - {count: 2, devices: 8, type: V100, memory: 16 GiB}
  - {devices: 4, type: T4, memory: 15 GB, speed: 0.5, name: old}
intra: 150 GB/s
inter: {bandwidth: 25 Gbit/s, collective: 2.9e9, latency: 10 us}
"""


def read(tmp_path: Path, text: str) -> Cluster:
    path = tmp_path / "lab.yaml"
    path.write_text(text)
    return Cluster.read(path)


def test_a_file_may_mix_machines_and_units(tmp_path):
    v100, t4 = Device("V100", 16 * 2**30), Device("T4", 15e9, speed=0.5)
    assert read(tmp_path, LAB) == Cluster(
        name="lab",
        nodes=(Node(v100, 8), Node(v100, 8), Node(t4, 4, "old")),
        intra=Link(150e9, 150e9),
        inter=Link(3.125e9, 2.9e9, 10e-6),
        source="measured in May",
    )


def test_one_machine_needs_no_link_between_machines_and_a_name_defaults_to_the_file(tmp_path):
    cluster = read(tmp_path, "hpgo_cluster: 1\nmachines: [{devices: 4, memory: 16 GB}]\nintra: 8 GB/s\n")
    assert (cluster.name, cluster.devices, cluster.inter) == ("lab", 4, cluster.intra)


@pytest.mark.parametrize(
    ("old", "new", "said", "hint"),
    [
        ("hpgo_cluster: 1", "hpgo_cluster: 2", "`hpgo_cluster` is 2", "version 1"),
        ("hpgo_cluster: 1\n", "", "`hpgo_cluster` is missing", ""),
        ("25 Gbit/s", "0", "inter: a link's bytes_per_s is 0", "above 0"),
        ("25 Gbit/s", "fast", "inter: `bandwidth`: `fast` is no rate", "25 Gbit/s"),
        ("10 us", "-1", "inter: `latency`: the time is -1, but it must be finite", ""),
        ("16 GiB", "0 GB", "nodes entry 1: device `V100`: memory_bytes is 0", ""),
        ("16 GiB", "[16]", "nodes entry 1: `memory`: a size can't be a list", ""),
        ("speed: 0.5", "speed: .nan", "nodes entry 2: device `T4`: speed is nan", ""),
        ("speed: 0.5", "sped: 0.5", "nodes entry 2: `sped` is unknown", "did you mean `speed`?"),
        (
            "devices: 8",
            "devices: 0",
            "nodes entry 1: the number of devices of a node is 0",
            "give a whole number from 1 to 1048576",
        ),
        (
            "devices: 8",
            "devices: 9e9",
            "nodes entry 1: `devices` must be a whole number from 0, got `9000000000.0`",
            "",
        ),
        ("count: 2", "count: 999999999", "nodes entry 1: 999999999 × 8 devices are too many", ""),
        ("type: T4", "type: V100", "type `V100` has another memory or speed above", ""),
        ("name: lab", "nme: lab", "`nme` is unknown", "did you mean `name`?"),
        ("name: lab", "name: [lab]", "`name` must be text, got a list", ""),
        ("name: lab", "name: lab\nname: lab2", "line 3: the key `name` is given twice", ""),
        ("inter:", "intra2:", "`intra2` is unknown", "did you mean `inter`?"),
        ("name: lab", "name: [lab", "not valid YAML", ""),
        ("name: lab", "name: &a [*a]", "the alias `*a` has no complete anchor", ""),
        ("name: lab", "name: !!python/name:os.system x", "the tag", ""),
        ("name: lab", "name: " + "[" * 10_000, "nested too deep", ""),
    ],
)
def test_a_wrong_file_is_named_with_the_place_and_the_way_out(tmp_path, old, new, said, hint):
    with pytest.raises(hpgo.errors.ClusterError) as caught:
        read(tmp_path, LAB.replace(old, new, 1))
    assert "lab.yaml" in str(caught.value)
    assert said in str(caught.value)
    assert hint in caught.value.hint


@pytest.mark.parametrize("text", ["", "[]", "3", "hpgo_cluster: 1\nnodes: []\nintra: 1\n", "---\na: 1\n---\nb: 1\n"])
def test_files_without_a_cluster_are_refused(tmp_path, text):
    with pytest.raises(hpgo.errors.ClusterError, match=r"lab\.yaml"):
        read(tmp_path, text)


def test_a_missing_file_and_a_misspelt_preset_suggest_the_near_name(tmp_path):
    (tmp_path / "lab.yaml").write_text(LAB)
    with pytest.raises(hpgo.errors.ClusterError) as caught:
        Cluster.read(tmp_path / "lap.yaml")
    assert caught.value.hint == "did you mean `lab.yaml`?"
    with pytest.raises(hpgo.errors.ClusterError) as caught:
        Cluster.read("daple-a")
    assert caught.value.hint == "did you mean `dapple-a`?"
    # The nearest name is that of a card with twice the NVLink.
    with pytest.raises(hpgo.errors.ClusterError) as caught:
        Cluster.read("H800:4")
    assert "`hpgo clusters show h100:4`" in caught.value.hint
    assert "200 GB/s" in caught.value.hint
    assert Cluster.read(tmp_path / "lab.yaml").name == "lab"
    assert Cluster.read("h100:3").devices == 24


@pytest.mark.parametrize("name", ["h100:", "h100:0", "h100:-1", "h100:many", "h100:999999999", "h100:1:2"])
def test_a_preset_takes_a_sensible_number_of_machines(name):
    with pytest.raises(hpgo.errors.ClusterError):
        Cluster.preset(name)


def test_presets_have_the_devices_and_rates_of_their_sources():
    a, b, c = (Cluster.preset(f"dapple-{letter}") for letter in "abc")
    assert [node.count for node in a.nodes] == [8, 8]
    assert [node.count for node in b.nodes] == [1] * 16
    assert (a.inter.bytes_per_s, b.inter.bytes_per_s, c.inter.bytes_per_s) == (3.125e9, 3.125e9, 1.25e9)
    for name in PRESETS:
        cluster = Cluster.preset(name)
        assert cluster.source
        assert cluster.inter.bytes_per_s <= cluster.intra.bytes_per_s


@pytest.mark.parametrize("seps", [[], [8, 8], [16, 8], [0, 8], [-8], [8.0, 16], [True, 8], "8,16", None, [2**21]])
def test_seps_must_ascend(seps):
    with pytest.raises(hpgo.errors.ClusterError) as caught:
        Cluster.from_seps(seps)
    assert caught.value.hint


@pytest.mark.parametrize(
    "wrong",
    [
        {"nodes": 0},
        {"devices_per_node": 0},
        {"nodes": 10**12},
        {"nodes": 2.0},
        {"intra_gbit_s": 0},
        {"inter_gbit_s": float("nan")},
        {"inter_gbit_s": None},
        {"memory": "16 GX"},
        {"memory": 0},
        {"latency": -1},
    ],
)
def test_numbers_out_of_range_are_named(wrong):
    good = {"nodes": 2, "devices_per_node": 8, "intra_gbit_s": 1200, "inter_gbit_s": 25}
    with pytest.raises(hpgo.errors.ClusterError):
        Cluster.of(**(good | wrong))


def links() -> st.SearchStrategy[Link]:
    rate = st.floats(1, 1e15)
    return st.builds(Link, rate, rate, st.floats(0, 1e6))


def clusters() -> st.SearchStrategy[Cluster]:
    words = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
    memory, speed = st.floats(1, 1e15), st.floats(1e-3, 1e3)
    # Types of one name must agree: number them.
    types = st.lists(st.tuples(words, memory, speed), min_size=1, max_size=3).map(
        lambda items: [Device(f"{name}{index}", *rest) for index, (name, *rest) in enumerate(items)]
    )
    nodes = types.flatmap(
        lambda known: st.lists(
            st.builds(Node, st.sampled_from(known), st.integers(1, 16), words), min_size=1, max_size=5
        ).map(tuple)
    )
    return st.builds(Cluster, words, nodes, links(), links(), words)


FILES = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@FILES
@given(cluster=clusters() | st.sampled_from(list(PRESETS)).map(Cluster.preset))
def test_a_written_cluster_reads_back_as_it_was(tmp_path, cluster):
    path = tmp_path / "c.yaml"
    path.write_text(cluster.yaml(), encoding="utf-8")
    assert Cluster.read(path) == cluster


@settings(FILES, max_examples=500)
@given(
    data=st.binary(max_size=200)
    | st.text(max_size=200).map(str.encode)
    | st.tuples(
        st.integers(0, len(LAB)), st.integers(0, 12), st.text("[]{}&*!|>:-#\"'\t\n 019.eE~?,x", max_size=6)
    ).map(lambda cut: (LAB[: cut[0]] + cut[2] + LAB[cut[0] + cut[1] :]).encode())
)
def test_reading_any_file_gives_a_cluster_or_a_named_error(tmp_path, data):
    path = tmp_path / "c.yaml"
    path.write_bytes(data)
    try:
        assert Cluster.read(path).devices >= 1
    except hpgo.errors.ClusterError as error:
        assert "c.yaml" in str(error)  # noqa: PT017 -- most inputs fail, some do not


def test_the_command_lists_presets_and_shows_one_as_a_file_to_edit(tmp_path):
    listed = CliRunner().invoke(group, ["clusters"]).output.splitlines()
    table, sources = listed[: listed.index("")], listed[listed.index("") + 1 :]
    assert [line.split()[0] for line in table] == ["cluster", *PRESETS]
    assert [line.split(":")[0] for line in sources] == [*PRESETS]
    entries = json.loads(CliRunner().invoke(group, ["clusters", "--json"]).output)
    assert entries[0]["inter"] == {"bytes_per_s": 3.125e9, "collective_bytes_per_s": 3.125e9, "latency_s": 9.6e-6}
    shown = CliRunner().invoke(group, ["clusters", "show", "h100:4"])
    assert read(tmp_path, shown.output) == Cluster.preset("h100:4")


def test_adapters_of_another_rate_are_as_many() -> None:
    usual, slow = Cluster.preset("h100:4"), Cluster.preset("h100:4", adapter_gbit_s=100)
    assert slow.inter.bytes_per_s == 12.5e9
    assert slow.inter.collective_bytes_per_s == usual.inter.collective_bytes_per_s / 4
    assert (slow.intra, slow.nodes) == (usual.intra, usual.nodes)
    with refused(hpgo.errors.ClusterError, "invalid_cluster", name="adapter_gbit_s"):
        Cluster.preset("h100", adapter_gbit_s=0)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_s_device_has_its_rates(name: str) -> None:
    rates = rates_of(PRESETS[name].device)
    assert rates is RATES["v100" if name.startswith("dapple") else name]
    assert set(rates.reached) <= {"bf16", "attention", *rates.narrow_flop_per_s}
    assert all(0 < share < 1 for share in rates.reached.values())
    assert all(rate > rates.flop_per_s["bfloat16"] for rate in rates.narrow_flop_per_s.values())


@pytest.mark.parametrize(
    ("name", "key"),
    [
        # As nvidia-smi and torch.cuda.get_device_name print them.
        ("Tesla V100-SXM2-16GB", "v100"), ("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200"), ("NVIDIA B200", "b200"), ("NVIDIA GB200", "gb200"),
        ("NVIDIA H100 PCIe", "h100-pcie"), ("NVIDIA H100 NVL", "h100-nvl"), ("NVIDIA H20", "h20"),
        ("NVIDIA L40S", "l40s"), ("NVIDIA L4", "l4"), ("NVIDIA A10G", "a10g"), ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 5090", "rtx5090"), ("AMD Instinct MI300X", "mi300x"), ("AMD Instinct MI325X", "mi325x"),
        ("AMD Instinct MI355X", "mi355x"), ("AMD Instinct MI300X OAM", "mi300x"), ("NVIDIA GB300", "gb300"),
        # As people and Kubernetes write them.
        ("h100", "h100"), ("H100 SXM", "h100"), ("H100_SXM5_80GB", "h100"), ("NVIDIA-H100-80GB-HBM3", "h100"),
        ("a100-80gb", "a100"), ("rtx 4090", "rtx4090"), ("AMD_Instinct_MI300X_OAM", "mi300x"),
    ],
)  # fmt: skip
def test_a_card_is_known_by_each_of_its_listed_names(name: str, key: str) -> None:
    assert rates_of(name) is RATES[key]


OTHER_CARDS = [
    "H100-PCI", "H100-64GB", "A100-PCIE-40GB", "A100-64GB", "NVIDIA A100 80GB PCIe", "NVIDIA H200 NVL", "V100S",
    "Tesla V100-PCIE-16GB", "A1000", "H1000", "GH200", "H100-", "RTX-A100", "B200-NVL", "NVIDIA H20-3e", "H800", "L40",
    "NVIDIA A10", "NVIDIA RTX 4000", "NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 4090 Laptop GPU", "MI300A",
    "AMD Instinct MI300X HF", "AMD Instinct MI350X", "MI250X",
]  # fmt: skip


@pytest.mark.parametrize("name", OTHER_CARDS)
def test_a_name_that_only_resembles_a_known_card_is_refused(name: str) -> None:
    with pytest.raises(hpgo.errors.ClusterError) as caught:
        rates_of(name)
    assert name in caught.value.message
    if name.startswith("H100-P"):
        assert "H100-PCIe-80GB" in caught.value.hint


@given(st.sampled_from(sorted(NAMES)), st.text("-PCIeNVL0123456789GB ", min_size=1, max_size=8))
def test_no_longer_name_stands_for_the_card_that_it_begins_with(key: str, more: str) -> None:
    listed = {name.casefold() for names in NAMES.values() for name in names}
    for name in NAMES[key]:
        longer = name + more
        if re.sub(r"[- ]+", "-", longer.strip()).casefold() not in listed:
            assert key_of(longer) is None, longer


def test_the_command_lists_all_names_of_devices() -> None:
    rows = json.loads(CliRunner().invoke(group, ["clusters", "devices", "--json"]).stdout)
    assert {row["name"]: tuple(row["names"]) for row in rows} == {key: tuple(names) for key, names in NAMES.items()}


def test_an_h100_on_pcie_has_its_own_rates(tmp_path) -> None:
    text = hpgo.Cluster.preset("h100:1").yaml()
    file = tmp_path / "pcie.yaml"
    ask = {"global_batch_size": 8, "seq_length": 4096}
    sxm = hpgo.estimate_llm("llama-3-8b", "h100:1", **ask)
    file.write_text(text.replace("H100-80GB", "H100-PCIe"))
    pcie = hpgo.estimate_llm("llama-3-8b", str(file), **ask)
    assert pcie.peak_flop_per_s == 756.5e12
    # The other links are those of the SXM card, so that only the card differs.
    assert 1.3 * sxm.step_s < pcie.step_s < 2 * sxm.step_s
    file.write_text(text.replace("H100-80GB", "NVIDIA H100 80GB HBM3"))
    assert hpgo.estimate_llm("llama-3-8b", str(file), **ask).step_s == sxm.step_s


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_estimates_a_transformer(name: str) -> None:
    precision = "fp16" if name.startswith(("v100", "dapple")) else "bf16"
    found = hpgo.estimate_llm("llama-3-8b", name, global_batch_size=144, seq_length=2048, precision=precision)
    assert 0 < found.step_s < 1e4
    assert 0 < found.utilization < 1


def test_a_preset_says_whether_its_shares_were_measured() -> None:
    shares = {key: rates.shares for key, rates in RATES.items()}
    assert {key for key, origin in shares.items() if origin == "measured"} == {
        "a100", "a100-40", "h100", "h200", "b200", "b300", "gb200", "mi300x", "mi355x",
    }  # fmt: skip
    assert {key for key, origin in shares.items() if origin == "datasheet"} == {
        "v100", "h20", "l40s", "l4", "a10g", "rtx4090", "rtx5090",
    }  # fmt: skip


def test_measured_shares_of_amd_devices_are_those_of_the_published_tables(reference: Path) -> None:
    rows = map(json.loads, (reference / "kernels/matmul.jsonl").read_text(encoding="utf-8").splitlines())
    best: dict[tuple[str, str], float] = {}
    for row in rows:
        key = row["device"], row["precision"]
        best[key] = max(best.get(key, 0.0), row["flop_per_s"])
    x300, x355 = RATES["mi300x"], RATES["mi355x"]
    assert x300.reached["fp8"] * x300.narrow_flop_per_s["fp8"] == pytest.approx(best["mi300x", "fp8"], rel=1e-3)
    assert x355.reached["fp8"] * x355.narrow_flop_per_s["fp8"] == pytest.approx(best["mi355x", "fp8"], rel=1e-3)
    assert x355.reached["bf16"] * x355.flop_per_s["bfloat16"] == pytest.approx(best["mi355x", "bf16"], rel=1e-3)
    # Larger GEMMs than those of the table reach more.
    assert x300.reached["bf16"] * x300.flop_per_s["bfloat16"] > best["mi300x", "bf16"]


def test_a_device_that_nothing_is_known_of_is_told_which_are() -> None:
    with refused(hpgo.errors.ClusterError, "invalid_cluster", "t4") as caught:
        rates_of("t4")
    assert "gb200" in caught.value.hint


@pytest.mark.parametrize(
    ("device", "memory", "meant"),
    [
        ("A100", "40 GB", ["A100-40GB", "A100-80GB"]),
        ("a100", "39.4 GiB", ["A100-40GB", "A100-80GB"]),
        ("A100-SXM4-40GB", "80 GB", ["A100-80GB"]),
        ("H100", "94 GB", ["H100-96GB"]),
    ],
)
def test_a_device_whose_memory_is_another_cards_is_refused_with_types_that_are_accepted(
    device, memory, meant, tmp_path
):
    path = tmp_path / "lab.yaml"

    def price(kind: str) -> float:
        path.write_text(f"hpgo_cluster: 1\nnodes: [{{devices: 8, type: {kind}, memory: {memory}}}]\nintra: 300 GB/s\n")
        return hpgo.estimate_llm("gpt-2", path, global_batch_size=8, seq_length=512).step_s

    with refused(hpgo.errors.ClusterError, "invalid_cluster", device) as caught:
        price(device)
    assert caught.value.hint.split("`")[3::2] == meant
    assert all(price(kind) for kind in meant)


@pytest.mark.parametrize(
    ("device", "memory_bytes"), [("H20", 141e9), ("H100-PCIe", 94e9), ("RTX 4090", 48e9), ("MI300X", 256e9)]
)
def test_a_device_with_more_memory_than_its_card_is_another_card(device: str, memory_bytes: float) -> None:
    with refused(hpgo.errors.ClusterError, "invalid_cluster", device) as caught:
        rates_of(device, memory_bytes)
    assert "under `types`" in caught.value.hint


def test_less_memory_than_a_card_has_is_accepted_where_the_name_says_which_card():
    assert rates_of("A100-80GB", 40e9) is RATES["a100"]
    assert rates_of("A100", 70e9) is RATES["a100"]
    assert rates_of("H100", 40e9) is RATES["h100"]
    for preset in PRESETS.values():
        assert rates_of(preset.device, preset.memory_bytes)
