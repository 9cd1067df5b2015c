"""Configurations of Hugging Face models make workloads, cut anywhere, with nothing looked up elsewhere."""

from __future__ import annotations

import json
import random
import sys
from typing import TYPE_CHECKING, Any

import pytest

import hpgo

torch = pytest.importorskip("torch", reason="needs torch: pip install torch")

import cut_models  # noqa: E402 -- needs torch
from refusals import refused  # noqa: E402

import hpgo.runtime  # noqa: E402
from hpgo.runtime.passes import running  # noqa: E402
from hpgo.runtime.profiling import measure  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

_SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
_TEXT = {"vocab_size": 50, "max_position_embeddings": 8}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"architectures": ["GPT2LMHeadModel"], "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 50,
             "n_positions": 8},
    "llama": {"architectures": ["LlamaForCausalLM"], "num_key_value_heads": 1, **_SMALL, **_TEXT},
    "bert": {"architectures": ["BertForSequenceClassification"], **_SMALL, **_TEXT},
    "vit": {"architectures": ["ViTForImageClassification"], "image_size": 16, "patch_size": 8, **_SMALL},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 1, **_SMALL, **_TEXT},
    "resnet": {"architectures": ["ResNetForImageClassification"], "image_size": 32, "embedding_size": 8,
               "hidden_sizes": [8, 8, 16, 16], "depths": [1, 2, 3, 2]},
}  # fmt: skip
BLOCKS = {"gpt2": 2, "llama": 2, "bert": 2, "vit": 2, "qwen2": 2, "resnet": 8}


def config(kind: str, folder: Path) -> str:
    (folder / "config.json").write_text(json.dumps({"model_type": kind, **CONFIGS[kind]}))
    return str(folder / "config.json")


def original(transformers: Any, kind: str) -> Any:
    """The model as transformers makes it, with the weights of seed 0, as it is when it does not train."""
    architecture = getattr(transformers, CONFIGS[kind]["architectures"][0])
    config = transformers.AutoConfig.for_model(kind, **CONFIGS[kind])
    torch.manual_seed(0)
    return architecture(config).eval()


def said(parts: list[Any], inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """What parts make of inputs, one after the other, when they do not train."""
    held: dict[str, torch.Tensor] = {f"input:{at}": one for at, one in enumerate(inputs)}
    with torch.no_grad(), running(step=0, samples=range(len(inputs[0]))):
        for part in parts:
            made = part.eval()(*(held[value.name] for value in part.takes), rows=len(inputs[0]))
            held |= dict(zip((value.name for value in part.gives), made, strict=True))
    return made[0]  # type: ignore[no-any-return]


EACH = [pytest.param(kind, marks=pytest.mark.slow) if kind in {"bert", "qwen2"} else kind for kind in CONFIGS]
"""In every run, GPT-2, Llama and ViT have the operations of BERT and Qwen2: both norms, and both kinds of attention."""


@pytest.mark.parametrize("kind", EACH)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_every_cut_gives_the_whole_models_loss_and_gradients(kind: str, tmp_path: Path, transformers: Any) -> None:
    workload, chance = hpgo.runtime.Workload.read(config(kind, tmp_path)), random.Random(kind)
    assert len(workload.layers) > 40
    for shares in ([4], [1, 3])[: 1 if kind == "resnet" else 2]:  # it normalises each share by itself
        loss, gradients = cut_models.step(
            workload, workload.parts([workload.layers], dtype=torch.float64), shares, cut_graph=False
        )
        parts = workload.parts(cut_models.random_stages(workload, chance), dtype=torch.float64)
        found_loss, found = cut_models.step(workload, parts, shares)
        assert float(found_loss) == pytest.approx(float(loss), rel=1e-12)
        cut_models.check_close(found, gradients)
    assert bool(workload.tied_weights) == (kind == "gpt2")  # its head is its embedding


@pytest.mark.parametrize("kind", EACH)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_at_every_grain_layers_hold_the_model_and_cuts_give_its_loss(
    kind: str, tmp_path: Path, transformers: Any
) -> None:
    by_operation, chance = hpgo.runtime.Workload.read(config(kind, tmp_path)), random.Random(kind)
    whole = by_operation.parts([by_operation.layers], dtype=torch.float64)
    loss, gradients = cut_models.step(by_operation, whole, [4], cut_graph=False)
    model = original(transformers, kind)
    with torch.no_grad():
        wanted = model(*by_operation.example_inputs).logits
    counts = []
    for workload in by_operation, by_operation.by("module"), by_operation.by("block"):
        counts.append(len(workload.layers))
        where = {layer: at for at, layer in enumerate(workload.layers)}
        assert all(where[start] < where[end] for start, end in workload.edges)
        sizes = {
            (layer, name): torch.Size(shape).numel()
            for layer, shapes in workload.parameters.items()
            for name, shape in shapes.items()
        }
        twice = sum(sizes[holder] for holders in workload.tied_weights for holder in holders[1:])
        assert sum(sizes.values()) - twice == sum(one.numel() for one in model.parameters())
        for _ in range(3):
            parts = workload.parts(cut_models.random_stages(workload, chance))
            torch.testing.assert_close(said(parts, workload.example_inputs), wanted, rtol=1e-5, atol=1e-6)
        parts = workload.parts(cut_models.random_stages(workload, chance), dtype=torch.float64)
        found_loss, found = cut_models.step(workload, parts, [4])
        assert float(found_loss) == pytest.approx(float(loss), rel=1e-12)
        assert sum(one.numel() for one in found.values()) == sum(one.numel() for one in gradients.values())
        assert by_operation.holding(workload.layers).layers == workload.layers
    assert counts == sorted(counts, reverse=True)
    assert BLOCKS[kind] < counts[-1] <= BLOCKS[kind] + 4  # and what lies beside them


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_model_larger_than_the_memory_is_measured_layer_by_layer(tmp_path: Path, transformers: Any) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 50, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 50, **sizes})
    )
    workload = hpgo.runtime.Workload.read(f"{tmp_path / 'config.json'}:length=5,batch=3", on_meta=True)
    assert [tuple(one.shape) for one in workload.example_inputs] == [(3, 5)]
    held = [tensor for node in workload.network.nodes.values() for tensor in node.make().parameters()]
    assert held
    assert all(tensor.is_meta for tensor in held)
    remarks: list[str] = []
    found = hpgo.runtime.profile(
        f"{tmp_path / 'config.json'}:length=5", seconds=0, memory_bytes=2e7, progress=lambda _, one: remarks.append(one)
    )
    blocks = [layer for layer in found.layers if ".layers." in layer.id]
    assert len(blocks) == 50
    assert {layer.parameter_bytes for layer in blocks} == {4 * (4 * 256**2 + 3 * 256 * 1024 + 2 * 256)}
    assert not any(".layers.30" in remark for remark in remarks)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_weights_of_a_folder_are_used_and_random_ones_follow_from_the_seed(tmp_path: Path, transformers: Any) -> None:
    one, same, other = (hpgo.runtime.Workload.read(config("llama", tmp_path), seed=seed).parts for seed in (0, 0, 1))
    layers = hpgo.runtime.Workload.read(str(tmp_path)).layers
    weights = [next(parts([layers])[0].parameters()) for parts in (one, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    torch.manual_seed(5)
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIGS["llama"])).eval()
    made.save_pretrained(tmp_path)
    workload = hpgo.runtime.Workload.read(str(tmp_path))
    (part,) = workload.parts([workload.layers])
    with torch.no_grad(), running(step=0, samples=range(4)):
        (found,) = part.eval()(*workload.example_inputs, rows=4)
        wanted = made(*workload.example_inputs).logits
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_without_transformers_the_error_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with refused(hpgo.errors.ArgumentError, "missing_package") as raised:
        hpgo.runtime.Workload.read(config("gpt2", tmp_path))
    assert "pip install transformers" in raised.value.hint


@pytest.mark.parametrize("text", ["{", "[" * 100_000, '{"hidden_size": 3}', None])
def test_what_is_no_configuration_is_told_without_transformers(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(hpgo.errors.HpgoError, match=r"config\.json") as raised:
        hpgo.runtime.Workload.read(str(tmp_path / "config.json"))
    assert "name a config.json" in raised.value.hint


@pytest.mark.skipif(sys.platform == "win32", reason="there is no /dev/zero")
def test_a_configuration_without_an_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to("/dev/zero")
    with refused(hpgo.errors.HpgoError, "invalid_file", "64", "MiB"):
        hpgo.runtime.Workload.read(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "can't read the model's configuration"),
        ('{"hidden_size": 3}', "has no `model_type`"),
        ('{"model_type": "absent"}', "transformers can't make the model"),
        (json.dumps({"model_type": "gpt2", **CONFIGS["gpt2"], "n_positions": -1}), "transformers can't make the model"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_configurations_that_make_no_model_are_refused(
    text: str, message: str, tmp_path: Path, transformers: Any
) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(hpgo.errors.HpgoError, match=message):
        hpgo.runtime.Workload.read(str(tmp_path / "config.json"))


def refusal(held: dict[str, Any], folder: Path) -> hpgo.errors.HpgoError:
    (folder / "config.json").write_text(json.dumps(held))
    with pytest.raises(hpgo.errors.ArgumentError) as raised:
        hpgo.runtime.Workload.read(str(folder / "config.json"), on_meta=True)
    return raised.value


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("bert", "BertForMaskedLM"),
        ("bert", "BertModel"),
        ("bert", "BertForTokenClassification"),
        ("bert", "BertForQuestionAnswering"),
        ("bert", "BertForPreTraining"),
        ("llama", "LlamaForTokenClassification"),
        ("vit", "ViTForMaskedImageModeling"),
        ("t5", "T5ForConditionalGeneration"),
        ("t5", "T5ForSequenceClassification"),
        ("whisper", "WhisperForConditionalGeneration"),
        ("whisper", "WhisperForAudioClassification"),
    ],
)
def test_classes_that_cannot_be_built_are_refused_by_name(
    kind: str, name: str, tmp_path: Path, transformers: Any
) -> None:
    error = refusal({"model_type": kind, **CONFIGS.get(kind, {}), "architectures": [name]}, tmp_path)
    assert f"names `{name}`, but only causal language models and classifiers" in error.message
    assert "my.py:model" in error.hint


@pytest.mark.parametrize(
    ("held", "message", "hint"),
    [
        ({}, "is missing, but it must name the one class", '"architectures": ["LlamaForCausalLM"]'),
        ({"architectures": None}, "is missing", '"LlamaForCausalLM"'),
        ({"architectures": []}, "is missing", '["LlamaForSequenceClassification"]'),
        ({"architectures": ["LlamaForCausalLM", "LlamaModel"]}, r"is ['LlamaForCausalLM', 'LlamaModel']", "Llama"),
        ({"architectures": ["LlamaForEverything"]}, "names `LlamaForEverything`, which transformers", "my.py:model"),
        ({"architectures": ["GPT2LMHeadModel"]}, "of model_type gpt2, but the file's `model_type` is llama", "gpt2"),
        ({"architectures": ["AutoModelForCausalLM"]}, "names `AutoModelForCausalLM`, but only", "my.py:model"),
        (
            {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1},
            "is for regression, with 1 label",
            "my.py:model",
        ),
        (
            {"architectures": ["LlamaForSequenceClassification"], "problem_type": "multi_label_classification"},
            "is for multi_label_classification",
            "my.py:model",
        ),
    ],
)
def test_files_that_do_not_say_which_class_they_are_for_are_refused(
    held: dict[str, Any], message: str, hint: str, tmp_path: Path, transformers: Any
) -> None:
    sizes = {**CONFIGS["llama"]}
    sizes.pop("architectures")
    error = refusal({"model_type": "llama", **sizes, **held}, tmp_path)
    assert message in error.message
    assert hint in error.hint


@pytest.mark.parametrize(("kind", "name"), [("bert", "BertLMHeadModel"), ("xlnet", "XLNetLMHeadModel")])
def test_language_models_that_see_what_they_shall_predict_are_refused(
    kind: str, name: str, tmp_path: Path, transformers: Any
) -> None:
    sizes = {**_SMALL, **_TEXT} if kind == "bert" else {"vocab_size": 50, "d_model": 16, "n_layer": 1, "n_head": 2}
    held = {"model_type": kind, "architectures": [name], **sizes}
    assert f"`{name}` of" in refusal(held, tmp_path).message
    assert "is not causal" in refusal(held, tmp_path).message


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("llama", "LlamaForCausalLM"),
        ("llama", "LlamaForSequenceClassification"),
        ("gpt2", "GPT2ForSequenceClassification"),
        ("bert", "BertForSequenceClassification"),
        ("bert", "BertLMHeadModel"),
        ("vit", "ViTForImageClassification"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_class_that_is_built_is_the_one_that_is_named(
    kind: str, name: str, tmp_path: Path, transformers: Any
) -> None:
    decodes = {"is_decoder": True} if name == "BertLMHeadModel" else {}
    held = {"model_type": kind, **CONFIGS[kind], "architectures": [name], **decodes, "pad_token_id": 0}
    (tmp_path / "config.json").write_text(json.dumps(held))
    workload = hpgo.runtime.Workload.read(str(tmp_path / "config.json"), on_meta=True)
    assert workload.built == f"{name} of transformers {transformers.__version__}"
    config = transformers.AutoConfig.for_model(**held)
    wanted = getattr(transformers, name)(config).num_parameters()
    twice = sum(
        torch.Size(workload.parameters[layer][weight]).numel()
        for tie in workload.tied_weights
        for layer, weight in tie[1:]
    )
    sizes = (torch.Size(shape).numel() for shapes in workload.parameters.values() for shape in shapes.values())
    assert sum(sizes) - twice == wanted


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_profile_names_the_class_that_was_built(tmp_path: Path, transformers: Any) -> None:
    measured = measure(config("bert", tmp_path), seconds=0)
    assert (measured.profile.source or "").startswith("BertForSequenceClassification of transformers ")
    assert any("`architectures`" in note and "BertForSequenceClassification" in note for note in measured.notes)
