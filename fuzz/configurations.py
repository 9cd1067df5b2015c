"""Configurations of Hugging Face models, as workloads. They need torch and transformers."""

from __future__ import annotations

import json
from numbers import Real
from typing import TYPE_CHECKING, Any

from guided import fuzz, reader
from mutations import documents

import hpgo
from hpgo.base.documents import parse, read_text
from hpgo.runtime.pretrained import Pretrained, pretrained

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_MAX = 64
"""Of a number: models of more layers are models, too, and take longer to make than an input may."""
_SMALL = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8}
_WORDS = {"vocab_size": 16, "max_position_embeddings": 8}
_CONFIGURATIONS: dict[str, Any] = {
    "gpt2": {"architectures": ["GPT2LMHeadModel"], "n_embd": 8, "n_head": 2, "n_layer": 1, "n_positions": 8,
             "vocab_size": 16, "bos_token_id": 1, "eos_token_id": 1},
    "llama": {"architectures": ["LlamaForCausalLM"], "num_key_value_heads": 2, **_SMALL, **_WORDS},
    "bert": {"architectures": ["BertForSequenceClassification"], "type_vocab_size": 2, **_SMALL, **_WORDS},
    "vit": {"architectures": ["ViTForImageClassification"], "image_size": 8, "patch_size": 4, **_SMALL},
}  # fmt: skip


def seeds() -> dict[str, bytes]:
    """A small model of each kind."""
    return {
        name: json.dumps({"model_type": name, **keys, "torch_dtype": "float32"}).encode()
        for name, keys in _CONFIGURATIONS.items()
    }


def read(path: Path) -> Pretrained:
    """The model, its weights without memory."""
    if any(
        abs(one) > _MAX
        for one in _numbers(parse(read_text(path, hpgo.errors.FileError), str(path), hpgo.errors.FileError))
    ):
        raise hpgo.errors.ArgumentError("a number is too large for this target", "give a smaller one")
    return pretrained(path, on_meta=True)


def _numbers(document: Any) -> Iterator[Any]:
    waiting = [document]
    while waiting:
        inside = waiting.pop()
        if isinstance(inside, Real):
            yield inside
        elif isinstance(inside, dict | list):
            waiting += inside.values() if isinstance(inside, dict) else inside


if __name__ == "__main__":
    fuzz(seeds, documents, reader("config.json", read))
