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


def with_rope(init_states):
    \"\"\"Return an `init_states` that also sets the frequencies of RoPE.

    The backend of torchtitan 0.3.0 looks for `rope_init_fn`, which RoPE of transformers 5.23 does not keep, so that the
    frequencies would be those that the memory happens to hold.
    \"\"\"

    def init(model, **options):
        init_states(model, **options)
        rope = model.rotary_emb
        kinds = [kind for kind in type(rope).__mro__ if kind.__module__.startswith("transformers.")]
        if kinds:  # stages of a pipeline that were cut without RoPE have none
            fresh = kinds[0](model.model.config)
            for name, held in rope.named_buffers():
                held.copy_(getattr(fresh, name))

    return init
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
    backend = "from torchtitan.experiments.transformers_modeling_backend import HFTransformerModel"
    return {
        "reader": _READER,
        "imports": [backend, "from transformers import AutoConfig"],
        "read": "config",
        "changes": ["    HFTransformerModel.init_states = with_rope(HFTransformerModel.init_states)"],
    }


def parts_of(parts: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the modules of each stage with the module that rotates positions, which each stage needs.

    >>> parts_of([["tok_embeddings", "layers.0"], ["norm", "lm_head"]])
    [['tok_embeddings', 'layers.0', 'rotary_emb'], ['norm', 'lm_head', 'rotary_emb']]
    """
    return [[*part, "rotary_emb"] for part in parts]
