"""Families of transformers: one file of data for each Hugging Face model type.

A file `TYPE.yaml` states how the keys of a `config.json` become the fields of `hpgo.Transformer`. Values are constants
or formulas (`hpgo.model.formulas`) over these keys. `CONTRIBUTING.md` explains the parts of a file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from hpgo.base.documents import Section, parse
from hpgo.errors import ProfileError
from hpgo.model.formulas import Formula, formula

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_PARTS = (
    "shape", "arithmetic", "defaults", "extra", "must_be", "rope", "other", "lists", "blocks", "before", "after",
    "tower", "projector",
)  # fmt: skip
"""Parts of a file that are mappings. A family has the rows of its base, too, unless it has its own under the key."""
_LISTS = ("from_one", "pairs", "ignored", "must_hold", "classes")
"""Parts of a file that are lists. A family has the items of its base, too."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """The data of one model type, with all that it inherits.

    >>> family("mistral").shape["kv_heads"]
    'num_key_value_heads or num_attention_heads'
    """

    name: str
    configuration: str
    """Model type whose configuration class has the defaults of missing keys."""
    shape: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Transformer`."""
    arithmetic: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Arithmetic`."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of keys that are missing or null, and of names that other formulas use."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Keys that the configuration class lacks, with their defaults."""
    must_be: Mapping[str, Any] = field(default_factory=dict)
    """Value that a key must have, or a list of them, and the reason."""
    must_hold: tuple[Mapping[str, str], ...] = ()
    """Conditions with the error, and its hint, if they do not hold."""
    rope: Mapping[str, Any] = field(default_factory=dict)
    """Keys of rotary positions; empty if the type has none."""
    other: Mapping[str, Any] = field(default_factory=dict)
    """Descriptions of arithmetic that no field of `Arithmetic` states, with the condition under which it applies."""
    blocks: Mapping[str, Any] = field(default_factory=dict)
    """Operators of each kind of block, in a model whose layers `shape` can't describe."""
    pattern: Any = None
    """Formula of the name of each layer's block. None: all layers have the only block."""
    before: Mapping[str, Any] = field(default_factory=dict)
    """Operators beside the embedding."""
    after: Mapping[str, Any] = field(default_factory=dict)
    """Operators beside the LM head."""
    tower: Mapping[str, Any] = field(default_factory=dict)
    """Encoder of images or sounds: its width, its blocks and what surrounds them."""
    text: str = ""
    """Model type of the language model in `text_config`, of a type that combines it with a tower."""
    vision: str = ""
    """Model type of the tower in `vision_config`."""
    audio: str = ""
    """Model type of the tower in `audio_config`, of a type that has one instead of a tower of images."""
    flat: bool = False
    """Whether older files have the keys of the language model beside `vision_config`, without `text_config`."""
    projector: Mapping[str, Any] = field(default_factory=dict)
    """Operators between the tower and the language model, over keys of the tower and of the whole type."""
    lists: Mapping[str, Any] = field(default_factory=dict)
    """Keys with an item for each layer, and their allowed items."""
    classes: tuple[str, ...] = ()
    """Endings of further model classes with the same parameters as the causal language model."""
    from_one: tuple[str, ...] = ()
    """Keys that must be at least 1."""
    pairs: tuple[str, ...] = ()
    """Keys with a number for both sides of an image, or a list of height and width. Formulas get the list."""
    ignored: tuple[str, ...] = ()
    """Keys that change nothing in training."""

    def formulas(self) -> list[Formula]:
        """Return all formulas of the family, with the rows of `defaults` that another formula needs."""
        parts = [self.shape, self.arithmetic, self.blocks, self.pattern, self.before, self.after, self.other]
        parts += [self.tower, self.projector]
        checks = [[row[0] for row in self.must_be.values() if row], [row["if_not"] for row in self.must_hold]]
        found = {text: formula(text) for part in (*parts, *checks) for text in _texts(part)}
        names = [name for one in found.values() for name in one.names]
        # Names of formulas that nothing needs would count as keys that the type knows.
        for name in names:  # which grows in the loop
            for text in _texts(self.defaults.get(name)):
                if text not in found:
                    found[text] = formula(text)
                    names += found[text].names
        return list(found.values())

    @property
    def tower_key(self) -> str:
        """Key of the tower's configuration."""
        return "audio_config" if self.audio else "vision_config"

    @property
    def keys(self) -> set[str]:
        """All keys that the family reads."""
        names = {name for one in self.formulas() for name in one.names}
        rope = {"rope_scaling", "rope_parameters"} if self.rope else set()
        named = {name for name in self.rope.values() if isinstance(name, str)}
        inner = {"text_config", self.tower_key} if self.text else set()
        return names | inner | rope | named | {*self.lists, *self.extra, *self.must_be, *self.ignored}


def _texts(part: Any) -> Iterable[str]:
    """Return all formulas in a part of a family's file."""
    if isinstance(part, str):
        return [part]
    rows = part if isinstance(part, list) else []
    if isinstance(part, dict):
        rows = [row for key, row in part.items() if key != "of"]  # `of` names a block
    return [text for row in rows for text in _texts(row)]


@cache
def family_names() -> tuple[str, ...]:
    """Return the model types that have a family, sorted.

    >>> "llama" in family_names()
    True
    """
    named = (file.name.removesuffix(".yaml") for file in files(__name__).iterdir() if file.name.endswith(".yaml"))
    return tuple(sorted(name for name in named if not name.startswith("_")))


@cache
def tower_names() -> tuple[str, ...]:
    """Return the model types of towers that have a file, sorted.

    >>> "pixtral" in tower_names()
    True
    """
    named = (file.name.removesuffix(".yaml") for file in files(__name__).joinpath("towers").iterdir())
    return tuple(sorted(name for name in named if not name.startswith("_")))


@cache
def family(name: str, folder: str = "") -> Family:
    """Return the family of a model type, or of a tower in the folder `towers`. Raises ProfileError for a wrong file.

    >>> family("kimi_k2").configuration
    'deepseek_v3'
    """
    rows = _rows(name, folder)
    held: dict[str, Any] = {key: rows.get(key) or {} for key in _PARTS}
    held |= {key: tuple(rows.get(key) or ()) for key in _LISTS}
    held |= {key: rows[key] for key in ("pattern", "text", "vision", "audio", "flat") if key in rows}
    return Family(name=name, configuration=rows.get("configuration", name), **held)


def _rows(name: str, folder: str) -> dict[str, Any]:
    """Return the parts of a family's file and of its base."""
    file = f"{name}.yaml"
    text = files(__name__).joinpath(folder, file).read_text(encoding="utf-8")
    keys = (*_PARTS, *_LISTS, "base", "configuration", "pattern", "text", "vision", "audio", "flat")
    top = Section(parse(text, file, ProfileError), file, ProfileError, keys=" ".join(keys))
    own: dict[str, Any] = {key: top.get(key) for key in list(top)}
    top.check_spelling()
    if not (base := own.pop("base", None)):
        return own
    rows = _rows(base, folder)
    # A family that names no configuration class has its own, even if its base has another's.
    rows.pop("configuration", None)
    for key, value in own.items():
        if key in _PARTS and rows.get(key) and value:
            rows[key] = {**rows[key], **value}
        elif key in _LISTS:
            rows[key] = [*rows.get(key, ()), *value]
        else:
            rows[key] = value
    return rows
