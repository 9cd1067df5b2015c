"""Write the table of defaults of Hugging Face's configuration classes: python/hpgo/model/formats/class_defaults.json.

    python research/class_defaults.py           # write it
    python research/class_defaults.py --check   # exit with 1 if it differs

A `config.json` leaves out keys that have the default of their class, so hpgo needs these defaults, but not the package.
Run this after the version of `transformers` in constraints.txt changes, and read the diff.
"""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

TABLE = Path(__file__).parents[1] / "python/hpgo/model/formats/class_defaults.json"
TYPES = (
    "deepseek_v2", "deepseek_v3", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "llama", "mistral", "mixtral",
    "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
)  # fmt: skip
_ROPE = {"gpt_neox": ("rotary_emb_base", "rotary_pct")}
"""Keys for the base and the rotated share, where they are not `rope_theta` and `partial_rotary_factor`."""


def of_type(model_type: str) -> dict[str, Any]:
    """Return the class, the defaults, the other names of keys, and the keys that may not be null, of a model type."""
    kind = CONFIG_MAPPING[model_type]
    common = {field.name for field in fields(PreTrainedConfig)} | {"rope_parameters", "use_cache"}
    own = [field for field in fields(kind) if field.name not in common and not field.name.endswith("_token_id")]
    names = kind.attribute_map
    defaults = {names.get(field.name, field.name): field.default for field in own}
    built = kind()
    rope = getattr(built, "rope_parameters", None) or {}
    if "full_attention" in rope:
        defaults["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    theta, share = _ROPE.get(model_type, ("rope_theta", "partial_rotary_factor"))
    if rope:
        defaults[theta], defaults[share] = rope["rope_theta"], rope.get("partial_rotary_factor", 1.0)
    return {
        "class": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type],
        "defaults": dict(sorted(defaults.items())),
        "names": names,
        "not_null": sorted(names.get(field.name, field.name) for field in own if not _takes_null(kind, field.name)),
    }


def _takes_null(kind: Any, key: str) -> bool:
    # The annotation alone does not tell: some classes replace None before, and others after it is checked.
    try:
        kind(**{key: None})
    except Exception:  # noqa: BLE001 -- of several packages
        return False
    return True


def table() -> dict[str, Any]:
    """Return the whole table, with the version of transformers that it is from."""
    return {
        "transformers": transformers.__version__,
        "generation": sorted(transformers.GenerationConfig._get_default_generation_params()),
        "types": {kind: of_type(kind) for kind in TYPES},
    }


def main() -> None:
    """Write or check the table."""
    text = json.dumps(table(), indent=1) + "\n"
    if "--check" in sys.argv[1:]:
        sys.exit(TABLE.read_text(encoding="utf-8") != text)
    TABLE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
