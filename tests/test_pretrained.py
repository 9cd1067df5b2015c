"""Configurations of Hugging Face models make workloads, cut anywhere, with nothing looked up elsewhere."""

from __future__ import annotations

import json
import random
import sys
from typing import TYPE_CHECKING, Any

import pytest

import hpgo

torch = pytest.importorskip("torch", reason="needs torch: pip install 'hpgo[torch]'")

import cut_models  # noqa: E402 -- needs torch

import hpgo.runtime  # noqa: E402
from hpgo.runtime.passes import running  # noqa: E402

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
}  # fmt: skip


@pytest.fixture
def transformers() -> Any:
    return pytest.importorskip("transformers", reason="needs transformers: pip install transformers")


def config(kind: str, folder: Path) -> str:
    (folder / "config.json").write_text(json.dumps({"model_type": kind, **CONFIGS[kind]}))
    return str(folder / "config.json")


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_every_cut_gives_the_whole_models_loss_and_gradients(kind: str, tmp_path: Path, transformers: Any) -> None:
    workload, chance = hpgo.runtime.Workload.read(config(kind, tmp_path)), random.Random(kind)
    assert len(workload.layers) > 40
    for shares in [4], [1, 3]:
        loss, gradients = cut_models.step(
            workload, workload.parts([workload.layers], dtype=torch.float64), shares, cut_graph=False
        )
        parts = workload.parts(cut_models.random_stages(workload, chance), dtype=torch.float64)
        found_loss, found = cut_models.step(workload, parts, shares)
        assert float(found_loss) == pytest.approx(float(loss), rel=1e-12)
        cut_models.check_close(found, gradients)
    assert bool(workload.ties) == (kind == "gpt2")  # its head is its embedding


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
    with pytest.raises(hpgo.ArgumentError, match="need transformers, which can't be imported") as raised:
        hpgo.runtime.Workload.read(config("gpt2", tmp_path))
    assert "pip install transformers" in raised.value.hint


@pytest.mark.parametrize("text", ["{", "[" * 100_000, '{"hidden_size": 3}', None])
def test_what_is_no_configuration_is_told_without_transformers(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(hpgo.HpgoError, match=r"config\.json") as raised:
        hpgo.runtime.Workload.read(str(tmp_path / "config.json"))
    assert "name a config.json" in raised.value.hint


@pytest.mark.skipif(sys.platform == "win32", reason="there is no /dev/zero")
def test_a_configuration_without_an_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to("/dev/zero")
    with pytest.raises(hpgo.HpgoError, match="can't read the model's configuration"):
        hpgo.runtime.Workload.read(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "can't read the model's configuration"),
        ('{"hidden_size": 3}', "has no `model_type`"),
        ('{"model_type": "absent"}', "transformers can't make the model"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_configurations_that_make_no_model_are_refused(
    text: str, message: str, tmp_path: Path, transformers: Any
) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(hpgo.HpgoError, match=message):
        hpgo.runtime.Workload.read(str(tmp_path / "config.json"))
