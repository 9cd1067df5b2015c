"""Estimates from ONNX files: what layers do, told by hand and from shapes alone, and files that can't be told."""

from __future__ import annotations

import json
import math
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hpgo
from hpgo.cli.main import group
from hpgo.hardware.presets import PRESETS
from hpgo.hardware.rates import RATES, WIDTHS

if TYPE_CHECKING:
    from collections.abc import Sequence

onnx = pytest.importorskip("onnx", reason="needs onnx: pip install onnx")
from onnx import TensorProto, helper  # noqa: E402 -- where it is installed
from refusals import refused  # noqa: E402

LIGHT = Path(onnx.__file__).parent / "backend/test/data/light"
A100 = RATES["a100"]


def model(
    nodes: Sequence[Any],
    weights: dict[str, Sequence[int]],
    *,
    inputs: dict[str, Sequence[int | str | None]] | None = None,
    kind: int = TensorProto.FLOAT,
    ints: dict[str, Sequence[int]] | None = None,
) -> Any:
    """A network from `x` to `y`, with weights of these shapes and no values, as those that lie in other files have."""
    held = [TensorProto(name=name, data_type=kind, dims=dims) for name, dims in weights.items()]
    held += [helper.make_tensor(name, TensorProto.INT64, [len(one)], list(one)) for name, one in (ints or {}).items()]
    graph = helper.make_graph(
        list(nodes),
        "g",
        [helper.make_tensor_value_info(name, kind, dims) for name, dims in (inputs or {"x": ["batch", 64]}).items()],
        [helper.make_tensor_value_info("y", kind, None)],
        held,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])


def written(folder: Path, made: Any, name: str = "tiny.onnx") -> Path:
    path = folder / name
    path.write_bytes(made.SerializeToString())
    return path


def node(kind: str, inputs: str, outputs: str, **attributes: Any) -> Any:
    return helper.make_node(kind, inputs.split(), outputs.split(), **attributes)


MLP = model(
    [node("MatMul", "x up", "a"), node("Relu", "a", "b"), node("Gemm", "b down bias", "y")],
    {"up": [64, 256], "down": [256, 16], "bias": [16]},
)


def seconds(flop: float, moved: float, dtype: str = "float32", efficiency: float = 1.0) -> float:
    return max(flop / A100.flop_per_s[dtype], moved / A100.bytes_per_s) / efficiency


def totals(profile: hpgo.Profile) -> list[float]:
    return [
        math.fsum(getattr(layer, key)[at] for layer in profile.layers)
        for at in range(len(profile.batch_sizes))
        for key in ("forward_s", "backward_s")
    ]


# --- Work and time ----------------------------------------------------------------------------------------------------


def test_an_operation_takes_as_long_as_its_arithmetic_or_as_its_bytes(tmp_path: Path) -> None:
    n = 10**6
    up, down = hpgo.estimate(written(tmp_path, MLP), device="a100", batch_sizes=n, efficiency=1).layers
    # Of the first product the input has no gradient: one product backward, where the second has two.
    first = seconds(2 * n * 64 * 256, 4 * (n * 64 + 64 * 256 + n * 256))
    relu = seconds(0, 4 * 2 * n * 256)
    assert up.forward_s == pytest.approx((first + relu,))
    first_back = seconds(2 * n * 64 * 256, 4 * (n * 256 + n * 64 + 64 * 256))
    assert up.backward_s == pytest.approx((first_back + seconds(0, 4 * 3 * n * 256),))
    second = seconds(2 * n * 256 * 16, 4 * (n * 256 + 256 * 16 + 16 + n * 16))
    assert down.forward_s == pytest.approx((second,))
    moved = 4 * (2 * n * 16 + 2 * n * 256 + 2 * 256 * 16 + 16)
    assert down.backward_s == pytest.approx((seconds(2 * 2 * n * 256 * 16, moved),))
    # The product keeps its input, ReLU its result, which is the input of the next product.
    assert [layer.saved_bytes for layer in (up, down)] == [(4 * n * (64 + 256),), (4 * n * 256,)]
    assert [layer.activation_bytes for layer in (up, down)] == [(4 * n * 256,), (0,)]
    assert [layer.parameter_bytes for layer in (up, down)] == [4 * 64 * 256, 4 * (256 * 16 + 16)]


@pytest.mark.parametrize(
    ("nodes", "weights", "x", "flop", "products"),
    [
        ([node("Conv", "x w", "y", group=2)], {"w": [6, 2, 3, 3]}, [8, 4, 9, 9], 2 * 8 * 6 * 7 * 7 * 2 * 9, 1),
        ([node("ConvTranspose", "x w", "y")], {"w": [4, 5, 3, 3]}, [8, 4, 9, 9], 2 * 8 * 4 * 81 * 5 * 9, 1),
        ([node("Einsum", "x w", "y", equation="bij,jk->bik")], {"w": [7, 5]}, [8, 6, 7], 2 * 8 * 6 * 7 * 5, 1),
        (
            [node("LSTM", "x w r", "y", hidden_size=16)],
            {"w": [1, 64, 8], "r": [1, 64, 16]},
            [5, 3, 8],
            2 * 5 * 3 * 64 * (8 + 16),
            None,
        ),
    ],
    ids=["Conv", "ConvTranspose", "Einsum", "LSTM"],
)
def test_products_cost_two_operations_for_each_term_of_each_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: Any, weights: Any, x: Any, flop: int, products: int | None
) -> None:
    fast = replace(A100, bytes_per_s=1e30, source="memory that costs nothing", reached={})
    monkeypatch.setitem(RATES, "a100", fast)
    path = written(tmp_path, model(nodes, weights, inputs={"x": x}))
    (layer,) = hpgo.estimate(path, device="a100", efficiency=1).layers
    assert layer.forward_s[0] * A100.flop_per_s["float32"] == pytest.approx(flop)
    # Data have no gradient; what a recurrent layer hands on to itself has.
    backward = flop if products == 1 else 2 * 5 * 3 * 64 * (8 + 2 * 16)
    assert layer.backward_s[0] * A100.flop_per_s["float32"] == pytest.approx(backward)


@given(
    dtype=st.sampled_from(list(A100.flop_per_s)),
    efficiency=st.floats(0.01, 1),
    sizes=st.sets(st.integers(1, 10**5), min_size=1, max_size=3),
)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_efficiency_divides_times_a_type_scales_bytes_and_neither_changes_layers(
    tmp_path: Path, dtype: str, efficiency: float, sizes: set[int]
) -> None:
    path = written(tmp_path, MLP)
    whole = hpgo.estimate(path, device="a100", dtype=dtype, batch_sizes=sorted(sizes), efficiency=1)
    part = hpgo.estimate(path, device="a100", dtype=dtype, batch_sizes=sorted(sizes), efficiency=efficiency)
    assert totals(part) == pytest.approx([one / efficiency for one in totals(whole)])
    full = hpgo.estimate(path, device="a100", batch_sizes=sorted(sizes))
    assert whole.parameter_bytes * 4 == full.parameter_bytes * WIDTHS[dtype]
    assert [layer.id for layer in whole.layers] == [layer.id for layer in full.layers]
    for layer, other in zip(whole.layers, full.layers, strict=True):
        assert layer.activation_bytes == tuple(sent * WIDTHS[dtype] / 4 for sent in other.activation_bytes)
        assert all(earlier <= later for earlier, later in zip(layer.forward_s, layer.forward_s[1:], strict=False))


# --- Layers -----------------------------------------------------------------------------------------------------------

PUBLISHED = {
    "resnet50": 25_610_152,
    "vgg19": 143_667_240,
    "squeezenet": 1_235_496,
    "bvlc_alexnet": 60_965_224,
}
"""Parameters, with what normalisations count; of ResNet-50 25,557,032 are trained and 53,120 are running statistics."""


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("by", ["block", "op"])
def test_published_networks_have_their_parameters_and_no_layer_reads_what_a_later_one_sends(name: str, by: str) -> None:
    profile = hpgo.estimate(LIGHT / f"light_{name}.onnx", device="v100", by=by)
    assert profile.parameter_bytes == pytest.approx(4 * PUBLISHED[name], rel=1e-3)
    place = {layer.id: at for at, layer in enumerate(profile.layers)}
    assert all(place[start] < place[end] for start, end in profile.edges)
    if by == "block":
        assert [(place[start], place[end]) for start, end in profile.edges] == [
            (at, at + 1) for at in range(len(profile.layers) - 1)
        ]


def test_the_whole_takes_as_long_however_it_is_cut_into_layers() -> None:
    path = LIGHT / "light_resnet50.onnx"
    blocks, operations = (hpgo.estimate(path, device="v100", by=by) for by in ("block", "op"))
    assert (len(blocks.layers), len(operations.layers)) == (18, 54)  # stem, 16 residual blocks, head; 53 + 1 products
    assert totals(blocks) == pytest.approx(totals(operations))
    # 3.8 to 4.1 thousand million products, two operations each, at half of 15.7 TFLOP/s, are the least.
    assert totals(blocks)[0] > 2 * 3.8e9 / (0.5 * 15.7e12)


def test_a_weight_that_two_layers_read_counts_once_and_one_that_is_transposed_is_itself(tmp_path: Path) -> None:
    tied = model(
        [
            node("Gather", "table x", "a"),
            node("MatMul", "a w", "b"),
            node("Transpose", "table", "t", perm=[1, 0]),
            node("MatMul", "b t", "y"),
        ],
        {"table": [100, 8], "w": [8, 8]},
    )
    tied.graph.input[0].CopyFrom(helper.make_tensor_value_info("x", TensorProto.INT64, ["batch", 4]))
    tied.graph.initializer[1].data_type = tied.graph.initializer[0].data_type
    profile = hpgo.estimate(written(tmp_path, tied), device="a100", batch_sizes=2)
    assert [layer.id for layer in profile.layers] == ["table", "w", "table#2"]
    assert [layer.parameter_bytes for layer in profile.layers] == [3200, 256, 0]
    assert profile.tied_weights == (hpgo.TiedWeight(("table", "table#2"), 3200),)


def test_masks_that_no_weight_goes_into_belong_to_the_layer_that_reads_them_first(tmp_path: Path) -> None:
    masked = model(
        [
            node("Mul", "mask mask", "m"),
            node("MatMul", "x u", "a"),
            node("MatMul", "a v", "b"),
            node("Mul", "b m", "c"),
            node("MatMul", "c w", "d"),
            node("Mul", "d m", "y"),
        ],
        {"u": [64, 64], "v": [64, 64], "w": [64, 64]},
        inputs={"x": ["batch", 64], "mask": ["batch", 64]},
    )
    path = written(tmp_path, masked)
    for by in ("block", "op"):
        profile = hpgo.estimate(path, device="a100", by=by, batch_sizes=10**6)
        assert profile.edges == (("u", "v"), ("v", "w"))
        assert all(layer.activation_bytes[0] == 4 * 64 * 10**6 for layer in profile.layers[:-1])
        assert profile.layers[1].forward_s > profile.layers[2].forward_s > profile.layers[0].forward_s


def test_torch_exports_networks_that_are_estimated_at_every_batch_size(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch exports the networks; `make torch` installs it")
    layers = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8 * 36, 10)
    ).eval()
    path = tmp_path / "net.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this exporter is the older one, which needs no other package
        axes = {"x": {0: "batch"}}
        torch.onnx.export(
            layers, (torch.zeros(2, 3, 8, 8),), str(path), input_names=["x"], dynamic_axes=axes, dynamo=False
        )
    profile = hpgo.estimate(path, device="h100", batch_sizes=[1, 2, 32])
    assert [layer.id for layer in profile.layers] == ["0", "3"]
    assert profile.parameter_bytes == 4 * sum(one.numel() for one in layers.parameters())
    assert profile.layers[0].activation_bytes == tuple(4 * n * 8 * 36 for n in (1, 2, 32))


# --- Marked as estimates ----------------------------------------------------------------------------------------------


def test_estimates_say_so_in_their_files_and_in_every_report(tmp_path: Path) -> None:
    path, out = written(tmp_path, MLP), tmp_path / "tiny.yaml"
    words = ["estimate", str(path), "--device", "h100", "--dtype", "bfloat16", "--batch-size", "8,2", "-o", str(out)]
    done = CliRunner().invoke(group, words)
    assert done.exit_code == 0, done.output
    assert "estimated for h100 in bfloat16 at 50 % of its peaks, not measured" in done.stderr
    assert hpgo.read_profile(out) == hpgo.estimate(path, device="h100", dtype="bfloat16", batch_sizes=(2, 8))
    plan = hpgo.plan(hpgo.read_profile(out), hpgo.Cluster.preset("h100"), global_batch_size=64)
    assert any("are estimated for h100" in one and "not measured" in one for one in plan.notes)
    shown = CliRunner().invoke(group, ["estimate", str(path), "--device", "h100", "--json"])
    assert json.loads(shown.stdout)["source"].startswith("estimated for h100 in float32")


def test_a_model_without_times_is_sent_to_where_they_are_estimated(tmp_path: Path) -> None:
    with refused(hpgo.errors.ProfileError, "wrong_kind_of_file") as caught:
        hpgo.read_profile(written(tmp_path, MLP))
    assert "hpgo estimate" in caught.value.hint


def test_every_device_with_a_cluster_has_its_rates() -> None:
    dapple = {"dapple-a": "v100", "dapple-b": "v100", "dapple-c": "v100"}
    assert {dapple.get(name, name) for name in PRESETS} == set(RATES)
    for rates in RATES.values():
        assert set(rates.flop_per_s) <= set(WIDTHS)


# --- What can't be told -----------------------------------------------------------------------------------------------

BRANCH = helper.make_graph([node("Identity", "x", "z")], "b", [], [helper.make_tensor_value_info("z", 1, None)])
REFUSED: list[tuple[str, Any, str, str]] = [
    (
        "control flow",
        model([node("If", "x", "y", then_branch=BRANCH, else_branch=BRANCH)], {"w": [4, 4]}),
        "operation `If` is `If`: what runs in it depends on values",
        "hpgo profile",
    ),
    (
        "a foreign operation",
        model([node("MatMul", "x w", "a"), node("Magic", "a", "y", domain="com.example")], {"w": [64, 4]}),
        "node 2 (`Magic`): `com.example.Magic` is not an operation of ONNX",
        "hpgo profile",
    ),
    (
        "a shape that depends on values",
        model([node("MatMul", "x w", "a"), node("NonZero", "a", "b"), node("Cast", "b", "y", to=1)], {"w": [64, 4]}),
        "the shape of `b`, which `NonZero` (NonZero) makes, is not known before it runs",
        "onnxsim",
    ),
    (
        "an open size",
        model([node("MatMul", "x w", "y")], {"w": [64, 4]}, inputs={"x": ["batch", "length", 64]}),
        "size 2, called `length`, of the input `x` is open",
        "--dim NAME=N",
    ),
    ("no weights", model([node("Relu", "x", "y")], {}), "has no weights", "export"),
    ("no matrix", model([node("Mul", "x w", "y")], {"w": [64]}), "no operation uses a matrix of weights", "export"),
    ("shapes that don't fit", model([node("MatMul", "x w", "y")], {"w": [63, 4]}), "shapes don't fit", "export"),
    (
        "the wrong order",
        model([node("MatMul", "a w", "y"), node("Relu", "x", "a")], {"w": [64, 4]}),
        "no node before it writes `a`",
        "export",
    ),
    (
        "text",
        model([node("MatMul", "x w", "y")], {"w": [64, 4]}, kind=TensorProto.STRING),
        "shapes don't fit",
        "export",
    ),
    (
        "an equation that onnx reads for ever",
        model([node("Einsum", "x w", "y", equation="ab,bc-")], {"w": [64, 4]}),
        "node 1 (`Einsum`): its equation has a `-` outside of `->`",
        "export",
    ),
    (
        "doubles",
        model([node("MatMul", "x w", "y")], {"w": [64, 4]}, kind=TensorProto.DOUBLE),
        "the peak of a100 for float64 is unknown",
        "float32, tf32, float16, bfloat16",
    ),
]


@pytest.mark.parametrize(("what", "made", "said", "hint"), REFUSED, ids=[what for what, *_ in REFUSED])
def test_what_can_not_be_told_from_shapes_is_refused_with_the_way_out(
    tmp_path: Path, what: str, made: Any, said: str, hint: str
) -> None:
    with pytest.raises(hpgo.errors.HpgoError) as caught:
        hpgo.estimate(written(tmp_path, made), device="a100")
    assert said in caught.value.message, what
    assert hint in caught.value.hint


def test_open_sizes_are_told_by_name(tmp_path: Path) -> None:
    path = written(tmp_path, model([node("MatMul", "x w", "y")], {"w": [64, 4]}, inputs={"x": ["b", "length", 64]}))
    told = hpgo.estimate(path, device="a100", dims={"length": 512}, batch_sizes=3)
    assert told.layers[0].saved_bytes == (4 * 3 * 512 * 64,)
    with refused(hpgo.errors.ArgumentError, "unknown_name", "lenght") as caught:
        hpgo.estimate(path, device="a100", dims={"lenght": 512})
    assert "`length`" in caught.value.hint
    words = ["estimate", str(path), "--device", "a100", "--dim", "length=512", "--batch-size", "3", "--json"]
    assert json.loads(CliRunner().invoke(group, words).stdout)["layers"][0]["saved_bytes"] == 4 * 3 * 512 * 64
    assert CliRunner().invoke(group, [*words, "--dim", "length"]).exit_code == 2


def test_a_batch_size_that_a_file_fixes_everywhere_is_not_replaced() -> None:
    path = LIGHT / "light_resnet50.onnx"
    assert hpgo.estimate(path, device="a100").batch_sizes == (1,)
    with refused(hpgo.errors.ProfileError, "invalid_profile", "1", "32"):
        hpgo.estimate(path, device="a100", batch_sizes=[1, 32])


def test_files_that_are_none_or_a_part_of_one_or_too_large_are_told(tmp_path: Path) -> None:
    whole = MLP.SerializeToString()
    for text in (b"", b"hpgo_profile: 1\n", whole[:40], b"\0" * 100):
        path = tmp_path / "part.onnx"
        path.write_bytes(text)
        with pytest.raises(hpgo.errors.ProfileError) as caught:
            hpgo.estimate(path, device="a100")
        assert str(path) in str(caught.value)
    with (tmp_path / "large.onnx").open("wb") as file:
        file.truncate(2**31 + 1)
    with refused(hpgo.errors.ProfileError, "too_large", "2048", "MiB"):
        hpgo.estimate(tmp_path / "large.onnx", device="a100")
    with refused(hpgo.errors.ProfileError, "not_found"):
        hpgo.estimate(tmp_path / "absent.onnx", device="a100")


def test_without_the_package_the_way_to_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with refused(hpgo.errors.ArgumentError, "missing_package", "onnx") as caught:
        hpgo.estimate(written(tmp_path, MLP), device="a100")
    assert "pip install onnx" in caught.value.hint


@given(at=st.integers(0, 400), value=st.binary(min_size=0, max_size=4))
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_file_gives_a_profile_or_an_error_that_can_be_printed(tmp_path: Path, at: int, value: bytes) -> None:
    data = MLP.SerializeToString()
    path = tmp_path / "damaged.onnx"
    path.write_bytes(data[:at] + value + data[at + 1 :])
    told = []
    try:
        assert hpgo.estimate(path, device="a100").layers
    except hpgo.errors.HpgoError as error:
        told.append(error)
    for one in told:
        assert one.message.isprintable()
        assert one.hint.isprintable()
