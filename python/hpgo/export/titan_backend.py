"""Models that torchtitan 0.3 trains by its backend for models of transformers: their shape, and code that reads it.

Source: `torchtitan/experiments/transformers_modeling_backend` of 0.3.0, which builds the model of a `config.json`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpgo.llm.hugging_face_shape import hugging_face

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpgo.model.transformer import Transformer

_READER = """

def shapes_of(config):
    \"\"\"Yield the shape in the `config.json` that `hf_model` names: a file, a folder, or a model of the hub.\"\"\"
    model = AutoConfig.from_pretrained(config.hf_model)
    yield {name: getattr(model, name) for name in SHAPE}
""".splitlines()
_NAMES = (
    "model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads",
    "num_key_value_heads", "vocab_size", "tie_word_embeddings", "hidden_act", "rms_norm_eps",
)  # fmt: skip
"""Keys of a `config.json` that the exported module compares. Others have several spellings."""
START = [
    "from torchtitan.experiments.transformers_modeling_backend.config_registry import (",
    "    transformers_modeling_backend_full,",
    ")",
    "",
    "def mine():",
    "    config = transformers_modeling_backend_full()",
    "    config.hf_model = ...  # name on the Hugging Face hub, or folder, of the model with this SHAPE",
    "    return planned(config)",
]
"""Lines of the user's module."""


def shape_of(model: Transformer) -> dict[str, object]:
    """Return the values of the model's `config.json` that the exported module compares.

    >>> from hpgo.model.transformer_presets import TRANSFORMERS
    >>> shape_of(TRANSFORMERS["qwen2.5-72b"])["model_type"]
    'qwen2'
    """
    written = hugging_face(model) or {}
    return {name: written[name] for name in _NAMES if name in written}


def texts() -> dict[str, Any]:
    """Return the arguments of `hpgo.export.for_torchtitan.module` with the code that reads the shape."""
    return {"reader": _READER, "imports": ["from transformers import AutoConfig"], "read": "config"}


def parts_of(parts: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the modules of each stage with the module that rotates positions, which each stage needs.

    >>> parts_of([["tok_embeddings", "layers.0"], ["norm", "lm_head"]])
    [['tok_embeddings', 'layers.0', 'rotary_emb'], ['norm', 'lm_head', 'rotary_emb']]
    """
    return [[*part, "rotary_emb"] for part in parts]
