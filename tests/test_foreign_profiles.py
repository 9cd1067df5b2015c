"""Profiles in the formats of other tools: what their numbers mean, on published files and on small ones."""

from __future__ import annotations

import contextlib
import copy
import json
import math
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import refused

import hpgo

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def total_s(profile: hpgo.Profile) -> float:
    return math.fsum(layer.forward_s[0] + layer.backward_s[0] for layer in profile.layers)


def written(folder: Path, document: object, name: str = "tiny.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def changed(document: object, keys: tuple[Any, ...], value: object) -> Any:
    """`document` with `value` at the end of the path of keys; without the key where the value is `...`."""
    new = copy.deepcopy(document)
    *path, last = keys
    inside: Any = new
    for key in path:
        inside = inside[key]
    if value is ...:
        del inside[last]
    else:
        inside[last] = value
    return new


# --- Piper ------------------------------------------------------------------------------------------------------------


def costs(kind: str, seconds: float, weights: float, before: dict[str, float], behind: dict[str, float]) -> Any:
    return {
        "id": kind,
        "timePerSample": seconds,
        "parameterSize": weights,
        "memoryUsageA": 1000.0 if kind == "vanilla" else 10.0,
        "memoryUsageB": 2 * weights,
        "syncTimeFw": before,
        "syncTimeBw": behind,
    }


PIPER: Any = {
    "maxDevices": 4,
    "maxMemoryPerDevice": 8e9,
    "bandwidth": 25e9,
    "mbsInBatch": 64,
    "nodes": [
        {
            "id": 4,
            "name": "first",
            "TMPCs": {
                "1": [
                    costs("activation recomp", 0.5, 400, {}, {"7": 0, "9": 0}),
                    costs("vanilla", 0.4, 400, {}, {"7": 0, "9": 0}),
                ],
                "2": [costs("vanilla", 0.3, 200, {}, {"7": 5, "9": 1})],
            },
        },
        {
            "id": 7,
            "TMPCs": {"1": [costs("vanilla", 0.9, 40, {"4": 0}, {})], "2": [costs("vanilla", 0.6, 20, {"4": 8}, {})]},
        },
        {
            "id": 9,
            "TMPCs": {"1": [costs("vanilla", 0, 0, {"4": 0}, {})], "2": [costs("vanilla", 0, 0, {"4": 0}, {})]},
        },
    ],
    "edges": [
        {"sourceId": 4, "destId": 7, "communicationCost": 32.0},
        {"sourceId": 4, "destId": 9, "communicationCost": 36},
    ],
}


def test_what_recomputation_adds_in_a_file_of_piper_is_the_forward_pass(tmp_path: Path) -> None:
    first, second, third = hpgo.read_profile(written(tmp_path, PIPER), batch_size=2).layers
    assert (first.id, first.name, first.parameter_bytes, first.saved_bytes) == ("4", "first", 400, (1000.0,))
    assert (*first.forward_s, *first.backward_s) == pytest.approx((0.1, 0.3))
    assert first.activation_bytes == (36.0,)  # once to whoever reads it, so the most of its edges
    assert (*second.forward_s, *second.backward_s) == pytest.approx((0.3, 0.6))  # nothing tells them apart
    assert third.forward_s == third.backward_s == (0.0,)


def test_files_of_piper_hold_layers_that_several_gpus_share(tmp_path: Path) -> None:
    shared = hpgo.read_profile(written(tmp_path, PIPER), batch_size=2, gpus_per_device=2)
    assert shared.gpus_per_device == 2
    assert [layer.parameter_bytes for layer in shared.layers] == [200, 20, 0]
    assert shared.layers[0].activation_bytes == (40.0,)  # 32 and 8 that the readers tell each other; 36 and 1
    with refused(hpgo.errors.ProfileError, "invalid_profile", "TMPCs", "3", "GPUs") as caught:
        hpgo.read_profile(written(tmp_path, PIPER), batch_size=2, gpus_per_device=3)
    assert "1, 2" in caught.value.hint


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_piper_s_published_bert_is_read_with_the_sums_that_its_file_has(reference: Path, gpus: int) -> None:
    path = reference / "piper/bert32a100.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    plain = [node["TMPCs"][str(gpus)][0] for node in document["nodes"]]
    recomputed = [node["TMPCs"][str(gpus)][1] for node in document["nodes"]]
    profile = hpgo.read_profile(path, batch_size=1, gpus_per_device=gpus)
    assert (len(profile.layers), len(profile.edges)) == (len(document["nodes"]), len(document["edges"]))
    assert total_s(profile) == pytest.approx(math.fsum(one["timePerSample"] for one in plain))
    # A step that recomputes everything runs the forward pass twice.
    again_s = total_s(profile) + math.fsum(layer.forward_s[0] for layer in profile.layers)
    assert again_s == pytest.approx(math.fsum(one["timePerSample"] for one in recomputed))
    assert profile.parameter_bytes == math.fsum(one["parameterSize"] for one in plain)
    # Gradients take as much as weights, which is what memory holds without any micro-batch.
    assert 2 * profile.parameter_bytes == math.fsum(one["memoryUsageB"] for one in plain)


def test_piper_s_published_bert_is_planned_in_the_time_that_its_layers_take(reference: Path) -> None:
    profile = hpgo.read_profile(reference / "piper/bert32a100.json", batch_size=1)
    cluster = hpgo.Cluster.of(nodes=1, devices_per_node=1, intra_gbit_s=200, inter_gbit_s=200, memory="80 GB")
    plan = hpgo.plan(profile, cluster, global_batch_size=8)
    assert plan.step_s == pytest.approx(8 * total_s(profile), rel=1e-6)


# --- dnn-partitioning -------------------------------------------------------------------------------------------------


def node(node_id: int, latency: float, size: float, *, backward: bool = False, **more: Any) -> Any:
    kept = {"supportedOnFpga": 1, "cpuLatency": 10 * latency, "isBackwardNode": backward}
    return {"id": node_id, "name": f"n{node_id}", "fpgaLatency": latency, "size": size} | kept | more


def edge(start: int, end: int, size: float) -> Any:
    return {"sourceId": start, "destId": end, "cost": size / 2**31, "size": size}


DNN: Any = {
    "maxSizePerFPGA": 1e9,
    "maxFPGAs": 2,
    "maxCPUs": 0,
    "nodes": [
        node(0, 1.5, 104.0, colorClass=5),
        node(1, 2.0, 104.0, colorClass=5, backward=True),
        node(2, 4.0, 60.0, colorClass=6),
        node(3, 8.0, 60.0, colorClass=6, backward=True),
        node(9, 1.0, 0.0, backward=True),
    ],
    "edges": [edge(0, 2, 4.0), edge(1, 3, 4.0), edge(3, 9, 4.0)],
}


def test_passes_of_one_class_are_one_layer_of_dnn_partitioning_and_all_it_holds_but_its_output_is_weights(
    tmp_path: Path,
) -> None:
    profile = hpgo.read_profile(written(tmp_path, DNN, "tiny-pbs-8.json"))
    assert (profile.name, profile.batch_sizes, profile.edges) == ("tiny", (8,), (("0", "2"),))
    first, second = profile.layers
    assert (first.name, *first.forward_s, *first.backward_s) == ("n0", 1.5e-3, 2e-3)
    assert (first.activation_bytes, first.parameter_bytes, first.saved_bytes) == ((4.0,), 100.0, (4.0,))
    # What only runs backward belongs to the layer beside it.
    assert (second.name, *second.forward_s) == ("n2", 4e-3)
    assert second.backward_s == pytest.approx((9e-3,))


def test_weights_that_are_nodes_of_their_own_belong_to_their_class_and_others_hold_what_they_make(
    tmp_path: Path,
) -> None:
    operations = {
        "nodes": [node(0, 0, 40, colorClass=1), node(1, 2, 8, colorClass=1), node(2, 1, 8, colorClass=2)],
        "edges": [edge(0, 1, 40), edge(1, 2, 8)],
    }
    first, second = hpgo.read_profile(written(tmp_path, operations), batch_size=1).layers
    assert (first.parameter_bytes, first.activation_bytes, first.saved_bytes) == (40, (8,), (8,))
    assert (second.parameter_bytes, second.activation_bytes, second.saved_bytes) == (0, (0,), (8,))


def test_classes_that_feed_each_other_are_one_layer(tmp_path: Path) -> None:
    crossed = {
        "nodes": [node(0, 1, 1, colorClass=1), node(1, 2, 1, colorClass=2), node(2, 4, 1, colorClass=1), node(3, 8, 1)],
        "edges": [edge(0, 1, 1), edge(1, 2, 1), edge(2, 3, 1)],
    }
    profile = hpgo.read_profile(written(tmp_path, crossed), batch_size=1)
    assert [layer.forward_s[0] for layer in profile.layers] == [7e-3, 8e-3]
    assert profile.edges == (("0", "3"),)


def test_dnn_partitioning_s_published_resnet_is_the_one_that_pipedream_measured(reference: Path) -> None:
    """Its layers and their times, in another format."""
    theirs = hpgo.read_profile(reference / "dnn-partitioning/resnet50_inference.json", batch_size=1)
    measured = hpgo.read_profile(reference / "pipedream/resnet50.txt", batch_size=1)
    layers = {layer.name: layer for layer in theirs.layers}
    assert set(layers) == {layer.id for layer in measured.layers}
    ends = {layer.id for layer in measured.layers} - {start for start, _ in measured.edges}
    for layer in measured.layers:
        same = layers[layer.id]
        assert same.forward_s == pytest.approx(layer.forward_s)
        if layer.id in ends:  # no edge says how large its output is
            assert same.parameter_bytes == layer.parameter_bytes + layer.activation_bytes[0]
        else:
            assert (same.activation_bytes, same.parameter_bytes) == (layer.activation_bytes, layer.parameter_bytes)
    assert {(f"node{start}", f"node{end}") for start, end in theirs.edges} == set(measured.edges)


def min_load(profile: hpgo.Profile, accelerators: int, passes: int) -> float:
    """The longest that a device works, at best, in milliseconds: dnn-partitioning's objective, from a profile alone.

    Devices hold what lies between two cuts. One of them is a processor that takes ten times as long and sends for free;
    the others take a unit for each 2³¹ bytes that come in or go out, in each pass.
    """
    number = {layer.id: at for at, layer in enumerate(profile.layers)}
    before = [0] * len(number)
    behind = [0] * len(number)
    for start, end in profile.edges:
        before[number[end]] |= 1 << number[start]
        behind[number[start]] |= 1 << number[end]
    cuts = {0}
    waiting = [0]
    while waiting:
        cut = waiting.pop()
        for at, needed in enumerate(before):
            larger = cut | 1 << at
            if larger != cut and needed & ~cut == 0 and larger not in cuts:
                cuts.add(larger)
                waiting.append(larger)
    compute = [1e3 * (layer.forward_s[0] + layer.backward_s[0]) for layer in profile.layers]
    send = [passes * layer.activation_bytes[0] / 2**31 for layer in profile.layers]
    ordered = sorted(cuts, key=int.bit_count)
    best = {(0, used, processor): 0.0 for used in range(accelerators + 1) for processor in (0, 1)}
    for cut in ordered[1:]:
        at_best = dict.fromkeys(
            [(used, processor) for used in range(accelerators + 1) for processor in (0, 1)], math.inf
        )
        for smaller in ordered:
            if smaller & ~cut or smaller == cut:
                continue
            part = cut & ~smaller
            inside = [at for at in range(len(number)) if part >> at & 1]
            work = sum(compute[at] for at in inside)
            fed = 0
            for at in inside:
                fed |= before[at]
            moved = sum(send[at] for at in inside if behind[at] & ~part)
            moved += sum(send[at] for at in range(len(number)) if fed & ~part & 1 << at)
            for used, processor in at_best:
                if used:
                    load = max(best[smaller, used - 1, processor], work + moved)
                    at_best[used, processor] = min(at_best[used, processor], load)
                if processor:
                    load = max(best[smaller, used, 0], 10 * work)
                    at_best[used, processor] = min(at_best[used, processor], load)
        best |= {(cut, *key): load for key, load in at_best.items()}
    return best[ordered[-1], accelerators, 1]


@pytest.mark.parametrize(("name", "passes", "load"), [("inference", 1, 17.7899063), ("training", 2, 41.7458125)])
def test_published_files_of_dnn_partitioning_lead_to_the_loads_that_it_finds(
    reference: Path, name: str, passes: int, load: float
) -> None:
    profile = hpgo.read_profile(reference / f"dnn-partitioning/bert24_{name}.json", batch_size=1)
    assert min_load(profile, 6, passes) == pytest.approx(load, abs=1e-6)


# --- torch.profiler ---------------------------------------------------------------------------------------------------


class Clock:
    """Writes a trace of one thread, an event after the other; times are microseconds."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.now = 1e6

    def event(self, kind: str, name: str, took: float, inside: Callable[[], None] | None = None, **args: Any) -> None:
        """An event that takes so long by itself, and what is inside."""
        entry = {"ph": "X", "cat": kind, "name": name, "pid": 1, "tid": 1, "ts": self.now, "args": args}
        self.events.append(entry)
        self.now += took / 2
        if inside is not None:
            inside()
        self.now += took / 2
        entry["dur"] = self.now - entry["ts"]
        self.now += 1

    def module(self, name: str, inside: Callable[[], None]) -> None:
        self.event("python_function", f"nn.Module: {name}", 1, inside)

    def operation(self, number: int, took: float, kernel: float = 0) -> None:
        """One of the forward pass, which makes the node `number`."""

        def launch() -> None:
            if kernel:
                self.launch(kernel)

        self.event("cpu_op", "aten::linear", took, launch, **{"Sequence number": number})

    def launch(self, took: float) -> None:
        asked = len(self.events)
        self.event("cuda_runtime", "cudaLaunchKernel", 0.5, correlation=asked)
        late = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": self.now + 1e5, "dur": took}
        self.events.append(late | {"args": {"correlation": asked}})

    def gradient(
        self, number: int, took: float, *, output: list[int], weight: list[int] | None = None, kernel: float = 0
    ) -> None:
        """The node `number` runs, and the gradient that it makes of a weight is added up."""

        def node() -> None:
            if kernel:
                self.launch(kernel)

        def shaped() -> None:
            self.event("cpu_op", "AddmmBackward0", 0, node, **{"Input Dims": [output], "Input type": ["c10::Half"]})

        self.event("cpu_op", f"{EVALUATE}AddmmBackward0", took, shaped, **{"Sequence number": number})
        if weight:
            args = {"Input Dims": [weight], "Input type": ["float"]}
            self.event(
                "cpu_op",
                f"{EVALUATE}{GRADIENT}",
                1,
                lambda: self.event("cpu_op", GRADIENT, 1, **args),
            )

    def document(self) -> Any:
        return {"schemaVersion": 1, "traceEvents": [{"ph": "M", "name": "process_name"}, *self.events]}


EVALUATE = "autograd::engine::evaluate_function: "
GRADIENT = "torch::autograd::AccumulateGrad"


def traced(steps: int = 1, *, kernel: float = 0) -> Any:
    """Steps of an embedding, two blocks of two modules, and a head with its loss; numbers of nodes go on."""
    clock = Clock()
    for step in range(steps):
        first = 10 * step

        def block(number: int, took: float, at: int = first) -> Callable[[], None]:
            def run() -> None:
                clock.module(f"Norm_{number}", lambda: clock.operation(at + number, took, kernel))
                clock.module(f"Linear_{number}", lambda: clock.operation(at + number + 1, took, kernel))

            return run

        def model(at: int = first) -> None:
            clock.module("Embedding_0", lambda: clock.operation(at, 10, kernel))
            clock.operation(at + 1, 4, kernel)  # between modules: it belongs to the one before
            clock.module("Block_0", block(2, 20))
            clock.module("Block_1", block(4, 30))
            clock.module("Head_0", lambda: clock.operation(at + 6, 40, kernel))

        clock.event("cpu_op", "aten::rand", 1000)  # reading data is nobody's
        clock.module("Model_0", model)
        clock.operation(first + 7, 6, kernel)  # the loss
        clock.gradient(first + 7, 60, output=[], kernel=kernel)
        clock.gradient(first + 6, 80, output=[4, 10], weight=[10, 8], kernel=kernel)
        clock.gradient(first + 5, 70, output=[4, 8], weight=[8, 8], kernel=kernel)
        clock.gradient(first + 4, 70, output=[4, 99], weight=[8], kernel=kernel)
        clock.gradient(first + 3, 50, output=[4, 8], weight=[8, 8], kernel=kernel)
        clock.gradient(first + 2, 50, output=[4, 99], weight=[8], kernel=kernel)
        clock.gradient(first + 1, 7, output=[4, 8], kernel=kernel)
        clock.gradient(first, 20, output=[4, 8], weight=[100, 8], kernel=kernel)
        clock.event("cpu_op", "aten::add_", 5000)  # the optimizer is nobody's
    return clock.document()


def test_a_trace_of_torch_is_a_chain_of_blocks_and_of_what_stands_beside_them(tmp_path: Path) -> None:
    profile = hpgo.read_profile(written(tmp_path, traced()), batch_size=4)
    assert [layer.id for layer in profile.layers] == ["Embedding_0", "Block_0", "Block_1", "Head_0"]
    assert profile.edges == (("Embedding_0", "Block_0"), ("Block_0", "Block_1"), ("Block_1", "Head_0"))
    forward_us = [1e6 * layer.forward_s[0] for layer in profile.layers]
    assert forward_us == pytest.approx([14, 40, 60, 46])
    # Each gradient that is added up takes 2 more, each node that has a node of its own inside 1 for the clock.
    backward_us = [1e6 * layer.backward_s[0] for layer in profile.layers]
    assert backward_us == pytest.approx([27 + 2 + 3, 100 + 2 + 6, 140 + 2 + 6, 140 + 2 + 3])
    assert [layer.parameter_bytes for layer in profile.layers] == [4 * 800, 4 * 72, 4 * 72, 4 * 80]
    # What a layer's backward pass begins with has the shape of its output.
    assert [layer.activation_bytes[0] for layer in profile.layers] == [64, 64, 64, 2]


def test_times_in_a_trace_of_a_gpu_are_those_of_its_kernels_whenever_they_ran(tmp_path: Path) -> None:
    profile = hpgo.read_profile(written(tmp_path, traced(2, kernel=300)), batch_size=4)
    assert [1e6 * layer.forward_s[0] for layer in profile.layers] == pytest.approx([600, 600, 600, 600])
    assert [1e6 * layer.backward_s[0] for layer in profile.layers] == pytest.approx([600, 600, 600, 600])


def test_a_wrapper_around_the_model_and_what_is_recomputed_leave_the_layers_of_a_trace_as_they_are(
    tmp_path: Path,
) -> None:
    plain = hpgo.read_profile(written(tmp_path, traced(), "same.json"), batch_size=4)
    document = traced()
    (model,) = [event for event in document["traceEvents"] if event["name"] == "nn.Module: Model_0"]
    around = {"name": "nn.Module: DistributedDataParallel_0", "ts": model["ts"] - 0.5, "dur": model["dur"] + 1}
    document["traceEvents"].append(model | around)
    # A pass that runs again makes new nodes, whose numbers no operation of the first one has.
    for event in document["traceEvents"]:
        if EVALUATE in event["name"] and event["args"].get("Sequence number") == 4:
            event["args"]["Sequence number"] = 99
    read = hpgo.read_profile(written(tmp_path, document, "same.json"), batch_size=4)
    assert read.layers == plain.layers


def test_of_several_steps_in_a_trace_the_median_counts(tmp_path: Path) -> None:
    one, three = traced(), traced(3)
    slow = [event for event in three["traceEvents"] if event["name"].startswith(("aten::linear", EVALUATE))]
    for event in slow[len(slow) * 2 // 3 :]:
        event["dur"] *= 0.5
    assert [layer.forward_s for layer in hpgo.read_profile(written(tmp_path, three), batch_size=4).layers] == [
        pytest.approx(layer.forward_s) for layer in hpgo.read_profile(written(tmp_path, one), batch_size=4).layers
    ]


def test_torch_writes_traces_whose_profile_has_the_bytes_of_the_model(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch writes the traces; `make torch` installs it")
    torch.manual_seed(0)

    def block() -> Any:
        return torch.nn.Sequential(
            torch.nn.LayerNorm(32), torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32)
        )

    class Block(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.inside = block()

        def forward(self, given: Any) -> Any:
            return given + self.inside(given)

    model = torch.nn.Sequential(torch.nn.Embedding(50, 32), Block(), Block(), torch.nn.Linear(32, 50))
    tokens = torch.randint(0, 50, (4, 16))
    with torch.profiler.profile(record_shapes=True, with_stack=True) as seen:
        for _ in range(3):
            model(tokens).pow(2).mean().backward()
            seen.step()
    path = tmp_path / "steps-pbs-4.json"
    seen.export_chrome_trace(str(path))
    profile = hpgo.read_profile(path)
    assert [layer.parameter_bytes for layer in profile.layers] == [
        4 * sum(parameter.numel() for parameter in part.parameters()) for part in model
    ]
    assert [layer.activation_bytes[0] for layer in profile.layers[:-1]] == [4 * 4 * 16 * 32] * 3
    assert all(layer.forward_s[0] > 0 and layer.backward_s[0] > 0 for layer in profile.layers)


# --- What is wrong with a file ----------------------------------------------------------------------------------------

TRACE = traced()
WRONG: list[tuple[Any, tuple[Any, ...], Any, str]] = [
    (PIPER, ("nodes", 1, "id"), 4, "nodes entry 2: a second node has the id `4`"),
    (PIPER, ("nodes", 1, "id"), "x", "nodes entry 2: `id` must be a whole number"),
    (PIPER, ("nodes", 1, "TMPCs"), [], "nodes entry 2, TMPCs: must be a mapping"),
    (PIPER, ("nodes", 1, "TMPCs", "1"), ..., "nodes entry 2: there are no `TMPCs` for layers on 1 GPUs"),
    (PIPER, ("nodes", 1, "TMPCs", "1"), [], "has no entry without recomputation"),
    (PIPER, ("nodes", 1, "TMPCs", "1", 0, "timePerSample"), -1, "1, entry 1: `timePerSample` must be a finite number"),
    (PIPER, ("nodes", 1, "TMPCs", "1", 0, "parameterSize"), math.nan, "`parameterSize` must be a finite number"),
    (PIPER, ("nodes", 1, "TMPCs", "1", 0, "memoryUsageA"), ..., "`memoryUsageA` is missing"),
    (PIPER, ("nodes", 1, "TMPCs", "1", 0, "syncTimeFw"), {}, "syncTimeFw: `4` is missing"),
    (PIPER, ("nodes", 1, "TMPCs", "1", 0, "parameterSize"), 1e19, "parameter_bytes is 1e+19"),
    (PIPER, ("edges", 0, "destId"), 3, "edges entry 1: there is no node `3`"),
    (PIPER, ("edges", 0, "communicationCost"), True, "`communicationCost` must be a number"),
    (PIPER, ("edges", 0, "destId"), 4, "`4` is missing"),
    (PIPER, ("edges",), ..., "`edges` is missing"),
    (DNN, ("nodes", 1, "id"), 0, "nodes entry 2: a second node has the id `0`"),
    (DNN, ("nodes", 1, "fpgaLatency"), math.inf, "`fpgaLatency` must be a finite number"),
    (DNN, ("nodes", 1, "supportedOnFpga"), 0, "nodes entry 2: this node can't run on an accelerator"),
    (DNN, ("nodes", 1, "isBackwardNode"), 2, "`isBackwardNode` must be true, false, 0 or 1"),
    (DNN, ("nodes", 1, "isBackwardNode"), [], "`isBackwardNode` must be true, false, 0 or 1"),
    (DNN, ("nodes", 1, "colorClass"), "red", "`colorClass` must be a whole number"),
    (DNN, ("nodes", 1), 7, "nodes entry 2: must be a mapping"),
    (DNN, ("edges", 0, "size"), ..., "edges entry 1: `size` is missing"),
    (DNN, ("edges", 0, "sourceId"), 77, "edges entry 1: there is no node `77`"),
    (DNN, ("edges",), {}, "`edges` must be a list"),
    (TRACE, ("traceEvents",), [], "the trace contains no modules"),
    (TRACE, ("traceEvents",), {}, "`traceEvents` must be a list"),
    (TRACE, ("traceEvents", 1, "ts"), "now", "traceEvents entry 2: `ts` must be a number"),
    (TRACE, ("traceEvents", 1, "dur"), -1, "traceEvents entry 2: `dur` must be a finite number"),
    (TRACE, ("traceEvents", 1, "dur"), 1e300, "traceEvents entry 2: a time is out of range"),
    (TRACE, ("traceEvents", 1, "args"), [], "traceEvents entry 2: `args` must be a mapping"),
    (
        TRACE,
        ("traceEvents",),
        [event for event in TRACE["traceEvents"] if EVALUATE not in event["name"]],
        "no backward pass",
    ),
    (TRACE, ("traceEvents",), [{**event, "args": {}} for event in TRACE["traceEvents"] if "dur" in event], "no shapes"),
]


@pytest.mark.parametrize(("document", "keys", "value", "said"), WRONG)
def test_a_wrong_file_of_another_tool_is_named_with_the_place_and_the_key(
    tmp_path: Path, document: Any, keys: tuple[Any, ...], value: Any, said: str
) -> None:
    path = written(tmp_path, changed(document, keys, value))
    with pytest.raises(hpgo.errors.ProfileError) as caught:
        hpgo.read_profile(path, batch_size=4)
    assert str(caught.value).startswith(str(path))
    assert said in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("document", "tool"),
    [(PIPER, "a file of Piper"), (DNN, "a file of dnn-partitioning"), (TRACE, "a trace of torch.profiler")],
)
def test_files_that_do_not_say_their_batch_size_are_asked_for_it(tmp_path: Path, document: Any, tool: str) -> None:
    with refused(hpgo.errors.ProfileError, "wrong_kind_of_file", tool):
        hpgo.read_profile(written(tmp_path, document))
    assert hpgo.read_profile(written(tmp_path, document, "tiny-pbs-16.json")).batch_sizes == (16,)
    assert hpgo.read_profile(written(tmp_path, document, "tiny-pbs-16.json"), batch_size=8).batch_sizes == (8,)


def test_files_that_hold_one_kind_of_device_are_read_for_no_other(tmp_path: Path) -> None:
    with refused(hpgo.errors.ArgumentError, "invalid_argument", "1", "GPU", "2"):
        hpgo.read_profile(written(tmp_path, DNN), batch_size=1, gpus_per_device=2)
    with refused(hpgo.errors.ArgumentError, "invalid_argument", "1", "GPU", "2"):
        hpgo.read_profile("bert-48", gpus_per_device=2)
    with refused(hpgo.errors.ArgumentError, "invalid_argument", "gpus_per_device", "0", name="`gpus_per_device`"):
        hpgo.read_profile("bert-48", gpus_per_device=0)


# --- Any file ---------------------------------------------------------------------------------------------------------


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of keys to everything inside."""
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, inside in items for found in [(*path, key), *places(inside, (*path, key))]]


ODD = st.sampled_from(
    [
        ...,
        None,
        True,
        0,
        -1,
        1e400,
        math.nan,
        1e-320,
        10**400,
        2**32,
        "",
        "x",
        "-1",
        "é" * 5000,
        [],
        {},
        [[]],
        [{}],
        {"": 0},
    ]
)


def mutated(document: Any) -> st.SearchStrategy[str]:
    changes = st.lists(st.tuples(st.sampled_from(places(document)), ODD), min_size=1, max_size=3)

    def apply(pairs: list[tuple[tuple[Any, ...], Any]]) -> str:
        new = document
        for keys, value in pairs:
            with contextlib.suppress(KeyError, IndexError, TypeError):  # what was there is gone
                new = changed(new, keys, value)
        return json.dumps(new)

    return changes.map(apply)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(text=mutated(PIPER) | mutated(DNN) | mutated(traced(2, kernel=9)))
def test_reading_any_file_of_another_tool_gives_a_profile_or_a_named_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "fuzz.json"
    path.write_text(text, encoding="utf-8")
    told: list[hpgo.errors.HpgoError] = []
    try:
        assert hpgo.read_profile(path, batch_size=4).layers
    except hpgo.errors.HpgoError as error:
        told.append(error)
    for one in told:
        assert str(path) in str(one)
        assert one.message.isprintable()
        assert one.hint.isprintable()
