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
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from hpgo.model.families import family, family_names, tower_names

TABLE = Path(__file__).parents[1] / "python/hpgo/model/formats/class_defaults.json"
TYPES = tuple(
    sorted(
        {family(name).configuration for name in family_names()}
        | {family(name, "towers").configuration for name in tower_names()}
    )
)
"""Model types whose defaults the families in python/hpgo/model/families need."""
_ROPE = {"gpt_neox": ("rotary_emb_base", "rotary_pct")}
"""Keys for the base and the rotated share, where they are not `rope_theta` and `partial_rotary_factor`."""


def of_type(model_type: str) -> dict[str, Any]:
    """Return the class, the defaults, the other names of keys, and the keys that may not be null, of a model type."""
    kind = CONFIG_MAPPING[model_type]
    common = {field.name for field in fields(PreTrainedConfig)} | {"rope_parameters", "use_cache"}
    own = [field for field in fields(kind) if field.name not in common and not field.name.endswith("_token_id")]
    names = kind.attribute_map
    defaults = {names.get(field.name, field.name): field.default for field in own}
    stated = {names.get(field.name, field.name): field.name for field in own}
    # Most defaults tell the type of their key.
    kinds = {names.get(field.name, field.name): _kind_of(field.type) for field in own}
    kinds = {key: one for key, one in kinds.items() if one != type(defaults[key]).__name__}
    built = kind()
    rope = getattr(built, "rope_parameters", None) or {}
    if "full_attention" in rope:
        defaults["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    rope = rope.get("main", rope)  # one of two kinds of layers
    theta, share = _ROPE.get(model_type, ("rope_theta", "partial_rotary_factor"))
    if rope:
        defaults[theta], defaults[share] = rope["rope_theta"], rope.get("partial_rotary_factor", 1.0)
    scaled = {key: value for key, value in rope.items() if key not in {"rope_theta", "partial_rotary_factor"}}
    row = {
        "class": _class(model_type, combined=bool(_parts(kind))),
        "defaults": dict(sorted(defaults.items())),
        "names": names,
        **({"parts": parts} if (parts := _parts(kind)) else {}),
        **({"rope": scaled} if scaled.get("rope_type", "default") != "default" else {}),
        "kinds": dict(sorted(kinds.items())),
        "nullable": sorted(
            key for key, name in stated.items() if defaults[key] is not None and _takes_null(kind, name)
        ),
    }
    # As it is read again: tuples become lists.
    return dict(json.loads(json.dumps(row)))


_CLASSES = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES | MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES


def _class(model_type: str, *, combined: bool) -> str:
    """Return the class that predicts text, else the one that labels images, or an empty text.

    `combined` types have a tower.
    """
    causal = str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type, ""))
    other = str(_CLASSES.get(model_type, ""))
    images = MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES.get(model_type, "")
    images = images if isinstance(images, str) else images[0]
    return other or causal if combined else causal or other or images


def _parts(kind: Any) -> dict[str, Any]:
    """Return the configurations that a class gives its parts, where a file has none."""
    found = {}
    for key, spec in kind.sub_configs_defaults.items():
        if key in {"text_config", "vision_config", "audio_config"}:
            found[key] = None if spec.optional else dict(spec.init_kwargs or {})
    return found


_ATOMS = {"int", "float", "bool", "str", "list", "dict"}


def _kind_of(annotation: Any) -> str:
    """Return the type that the values of a field have: an atom, or `any` if it takes several."""
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    atoms = {part.split("[")[0].strip() for part in text.split("|")} - {"None"}
    if atoms <= {"int", "float"} and "float" in atoms:
        return "float"
    return atoms.pop() if len(atoms) == 1 and atoms <= _ATOMS else "any"


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


def _text(rows: dict[str, Any]) -> str:
    """Return the table as JSON with one line for each type, which keeps it small and its changes readable."""
    types = ",\n".join(
        f" {json.dumps(kind)}: {json.dumps(row, separators=(',', ':'))}" for kind, row in rows["types"].items()
    )
    head = {key: value for key, value in rows.items() if key != "types"}
    return f'{json.dumps(head)[:-1]}, "types": {{\n{types}\n}}}}\n'


def main() -> None:
    """Write or check the table."""
    text = _text(table())
    if "--check" in sys.argv[1:]:
        sys.exit(TABLE.read_text(encoding="utf-8") != text)
    TABLE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
