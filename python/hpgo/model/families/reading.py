"""Reading of a configuration by the data of its family: formulas become fields of `Transformer` and `Arithmetic`."""

from __future__ import annotations

from dataclasses import MISSING
from typing import TYPE_CHECKING, Any

from hpgo.base.checks import check_int
from hpgo.base.documents import Section, record
from hpgo.base.messages import did_you_mean, join_words, safe_repr, shorten
from hpgo.errors import HpgoError, ProfileError
from hpgo.model.arithmetic import Arithmetic, RopeScaling
from hpgo.model.blocks import Attention, Block, Conv, Experts, Latent, Linear, Mlp, Scan, Vector
from hpgo.model.formulas import FormulaError, formula
from hpgo.model.transformer import MAX_LAYERS, Tower, Transformer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hpgo.model.families import Family

VERSION_KEY = "hpgo_transformer"
FIELDS_HINT = "`python -m pydoc hpgo.Transformer` lists the keys"
MISSING_KEY_HINT = f"take all of the config.json that the model came with, or describe it with `{VERSION_KEY}: 1`"
REFUSED_HINT = f"describe the model with `{VERSION_KEY}: 1`: {FIELDS_HINT}"
_RECORDS: tuple[Any, ...] = (
    Transformer, Arithmetic, RopeScaling, Block, Attention, Scan, Linear, Conv, Vector, Mlp, Experts, Tower,
)  # fmt: skip
OPTIONAL = {
    name for kind in _RECORDS for name, field in kind.__dataclass_fields__.items() if field.default is not MISSING
} | {"q_rank"}
_NULLABLE = {
    name
    for kind in (Transformer, Arithmetic, Latent)
    for name, field in kind.__dataclass_fields__.items()
    if field.default is None
}
_CHECKS: Mapping[str, Callable[[Section, str], Any]] = {
    "bool": Section.flag, "str": Section.text, "float": Section.amount, "list": Section.items,
}  # fmt: skip
_SEVERAL = 2


class _Values:
    """The checked values of keys, and of the names of a family, by which its formulas are evaluated."""

    def __init__(
        self, family: Family, top: Section, row: Mapping[str, Any], more: Mapping[str, Any] | None = None
    ) -> None:
        """Read the keys of `top`, whose missing keys have the defaults of the class in `row`.

        `more` has values of further names, which are not keys of the class.
        """
        self._family, self._top, self._row, self._more = family, top, row, more or {}
        self._from_one = {row["names"].get(key, key) for key in family.from_one}
        self._found: dict[str, Any] = {}

    def __call__(self, name: str) -> Any:
        """Return the value of a key or name; None for a key that is null, or missing and without a default."""
        if name not in self._found:
            key = self._row["names"].get(name, name)
            value = None if self._top.get(key, None) is None else self._checked(key)
            if name in self._more and key not in self._row["defaults"]:
                value = self._more[name]
            elif value is None and name in self._family.defaults:
                value = self.of(self._family.defaults[name])
            self._found[name] = value
        return self._found[name]

    def _pair(self, key: str) -> list[int]:
        """Return the height and the width in a key that has one number for both, or a list."""
        value = self._top.get(key)
        sides: list[Any] = value if isinstance(value, list) else [value] * _SEVERAL
        whole = all(isinstance(side, int) and not isinstance(side, bool) and side > 0 for side in sides)
        if not whole or len(sides) != _SEVERAL:
            self._top.wrong(key, "a whole number from 1, or a list of height and width", value)
        return sides

    def _checked(self, key: str) -> Any:
        if key in self._family.pairs:
            return self._pair(key)
        default = self._row["defaults"].get(key, self._family.extra.get(key))
        kind = self._row["kinds"].get(key) or type(default).__name__
        if kind == "int":
            return self._top.whole(key, minimum=1 if key in self._from_one else min(default or 0, 0))
        return _CHECKS[kind](self._top, key) if kind in _CHECKS else self._top.get(key)

    def of(self, text: Any) -> Any:
        """Return the value of a constant or formula, or of all formulas in a mapping or list."""
        if isinstance(text, dict):
            return {key: self.of(one) for key, one in text.items()}
        if isinstance(text, list):
            return [self.of(one) for one in text]
        if not isinstance(text, str):
            return text
        parsed = formula(text)
        try:
            return parsed.value(self)
        except FormulaError as error:
            if absent := [f"`{name}`" for name in error.names if self(name) is None]:
                self._top.fail(f"{join_words(absent)} {'is' if len(absent) == 1 else 'are'} missing", MISSING_KEY_HINT)
            self._top.reraise(error)

    def field(self, name: str, text: Any) -> Any:
        """Return the value of a field, which must not be None unless the field may be None."""
        if isinstance(text, dict):
            return {inner: self.field(inner, one) for inner, one in text.items()}
        value = self.of(text)
        if value is None and name not in _NULLABLE:
            if key := self.key_of(text):
                self._checked(key)  # refuses a null of most types
            self._top.whole(key, minimum=1 if key in self._from_one else 0)
        return tuple(value) if isinstance(value, list) else value

    def key_of(self, text: Any) -> str:
        """Return the first key of the configuration class in a formula, or an empty text."""
        names = formula(text).names if isinstance(text, str) else ()
        keys = [self._row["names"].get(name, name) for name in names]
        return next((key for key in keys if key in self._row["defaults"]), "")

    def text(self, template: str) -> str:
        """Return a text with the values of the formulas in braces."""
        parts = template.replace("}", "{").split("{")
        return "".join(
            part if at % _SEVERAL == 0 else str(round(value, 6) if isinstance(value := self.of(part), float) else value)
            for at, part in enumerate(parts)
        )


def fields_of(family: Family, top: Section, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `Transformer` of a configuration. Raises ProfileError for values outside their range."""
    values = _Values(family, top, row)
    shape = {name: text for name, text in family.shape.items() if text is not None}
    # The number of layers limits the length of all lists, so it is checked before other formulas are evaluated.
    layers = values.field("layers", shape["layers"])
    top.build(check_int, values.key_of(shape["layers"]) or "the number of layers", layers, maximum=MAX_LAYERS)
    _check_values(family, top, values)
    _check_lists(family, top, layers)
    fields = {name: values.field(name, text) for name, text in shape.items()}
    if (latent := fields.get("latent")) is not None:
        fields["latent"] = top.build(lambda: Latent(**latent))
    for check in family.must_hold:
        if not values.of(check["if_not"]):
            top.fail(values.text(check["error"]), values.text(check["hint"]))
    arithmetic = {name: values.field(name, text) for name, text in family.arithmetic.items() if text is not None}
    if family.rope:
        rope = _rope(top, row, family.rope, fields.get("longest") or 0)
        if rope["rotary_fraction"] != 1 and family.rope.get("whole"):
            top.fail(
                "`partial_rotary_factor` is not 1, but models of this type rotate all dimensions of each head",
                REFUSED_HINT,
            )
        arithmetic = rope | arithmetic
    # What RoPE reports comes first, so that messages keep the order of the file.
    arithmetic["other"] = arithmetic.get("other", ()) + tuple(
        values.text(words) for words, applies in family.other.items() if applies is not None and values.of(applies)
    )
    fields["arithmetic"] = top.build(lambda: Arithmetic(**arithmetic))
    for end in ("before", "after"):
        if spec := getattr(family, end):
            fields[end] = top.build(_block, values, "", {"norms": 0} | spec, fields)
    if family.blocks:
        fields |= _blocks(family, top, values, fields)
    return fields


def _blocks(family: Family, top: Section, values: _Values, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the blocks and the pattern of a family."""
    # Only blocks of the pattern are built: the formulas of others may need keys that this configuration lacks.
    only = next(iter(family.blocks))
    pattern = [only] * fields["layers"] if family.pattern is None else values.of(family.pattern)
    if not pattern:
        return {}  # the fields describe all layers of this configuration
    used = [name for name in family.blocks if name in pattern]
    specs = {name: dict(family.blocks[name] or {}) for name in used}
    for spec in specs.values():
        while (base := spec.pop("of", None)) is not None:
            spec |= {key: part for key, part in family.blocks[base].items() if key not in spec}
    try:
        blocks = tuple(_block(values, name, spec, fields) for name, spec in specs.items())
    except HpgoError as error:
        top.reraise(error, hint=error.hint.replace("`groups`", f"`{_key_of_groups(family, values)}`"))
    return {"blocks": blocks, "pattern": tuple(pattern)}


def _key_of_groups(family: Family, values: _Values) -> str:
    """Return the key that sets the groups of a family's scans; `groups` if none does."""
    scans = (scan for block in family.blocks.values() for scan in (block or {}).get("scans", ()))
    formulas = [scan["groups"] for scan in scans if "groups" in scan]
    # Families that share the formulas of a scan name their own keys in `defaults`.
    keys = [values.key_of(family.defaults.get(text, text)) for text in formulas]
    return next(filter(None, keys), "groups")


_LISTED = {"scans": Scan, "linears": Linear, "convs": Conv, "vectors": Vector}


def _block(values: _Values, name: str, spec: Mapping[str, Any], fields: Mapping[str, Any]) -> Block:
    """Return a block. What it does not state about attention and networks has the values of the flat fields."""
    held = {key: values.of(part) for key, part in spec.items()}
    taken: dict[str, Any] = {"norms": held.pop("norms", fields.get("norms_per_layer", 2))}
    for key, kind in _LISTED.items():
        taken[key] = tuple(kind(**row) for row in held.pop(key, ()))
    if (rows := held.pop("attention", None)) is not None:
        common = _renamed(fields, _ATTENTION)
        taken["attention"] = tuple(Attention(**common | row) for row in (rows if isinstance(rows, list) else [rows]))
    # No experts are no error: a family may have them under a switch, or by their number.
    experts = held.pop("experts", None)
    if experts is not None and (experts := _renamed(fields, _EXPERTS) | experts)["count"]:
        taken["experts"] = Experts(**experts)
        taken["shared_gate"] = held.pop("shared_gate", fields.get("shared_gate", False))
        held.setdefault("mlp", {"width": fields.get("shared_ffn", 0)})
    if (network := held.pop("mlp", None)) is not None:
        network = _renamed(fields, _NETWORK) | network
        taken["mlp"] = Mlp(**network) if network["width"] else None
    return Block(name=name, **taken, **held)


_ATTENTION = {
    "heads": "heads", "kv_heads": "kv_heads", "head_dim": "head_dim", "bias": "attention_bias",
    "head_norms": "head_norms", "latent": "latent",
}  # fmt: skip
_NETWORK = {"width": "ffn", "gated": "gated", "bias": "ffn_bias"}
_EXPERTS = {
    "count": "experts", "per_token": "experts_per_token", "width": "expert_ffn", "gated": "gated", "bias": "ffn_bias",
    "groups": "expert_groups", "groups_per_token": "groups_per_token",
}  # fmt: skip
"""Fields of operators with the field of `Transformer` that has the same meaning."""


def _renamed(fields: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {name: fields[field] for name, field in names.items() if field in fields}


def tower_of(
    tower: Family, top: Section, row: Mapping[str, Any], projector: Mapping[str, Any], more: Mapping[str, Any],
    *, name: str = "vision",
) -> Tower:  # fmt: skip
    """Return the tower `name`, with the `projector` behind it, whose formulas use names of `more`."""
    values = _Values(tower, top, row, more)
    spec = tower.tower
    layers = top.build(check_int, "the layers of the tower", values.of(spec["layers"]), maximum=MAX_LAYERS)
    pattern = spec.get("pattern")
    names = [next(iter(spec["blocks"]))] * layers if pattern is None else values.of(pattern)
    ends = [values.of(part) for part in (spec.get("ends", {}), projector)]
    joined = {"norms": sum(end.get("norms", 0) for end in ends)}
    for key in _LISTED:
        joined[key] = [row for end in ends for row in end.get(key, ())]
    blocks = [top.build(_block, values, name, block, {}) for name, block in spec["blocks"].items() if name in names]
    return top.build(
        lambda: Tower(
            name=name,
            hidden=values.of(spec["hidden"]),
            blocks=tuple(blocks),
            pattern=tuple(names),
            centred_norms=spec.get("centred_norms", False),
            ends=_block(values, "", joined, {}),
            patches=values.of(spec.get("patches", 0)),
            merge=values.of(projector.get("merge", spec.get("merge", 1))),
        )
    )


def shape_of(family: Family, top: Section, row: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `Transformer` that a type with a tower states itself, over names of `more`, too."""
    values = _Values(family, top, row, more)
    return {name: values.field(name, text) for name, text in family.shape.items()}


def names_of(family: Family, top: Section, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the keys that a family's projector and shape use."""
    values = _Values(family, top, row)
    names = {name for one in family.formulas() for name in one.names}
    return {name: values(name) for name in names if name in row["defaults"] or name in family.defaults}


def keys_of_fields(family: Family, row: Mapping[str, Any]) -> dict[str, str]:
    """Return the key that sets each field of `Transformer`, for messages in the words of the file."""
    values = _Values(family, Section({}, "", ProfileError), row)
    found = {name: values.key_of(text) for name, text in family.shape.items()}
    return {name: key for name, key in found.items() if key}


def _check_values(family: Family, top: Section, values: _Values) -> None:
    """Refuse keys with values of which no code trains a model."""
    for name, (wanted, why) in ((name, row) for name, row in family.must_be.items() if row is not None):
        held, value = top.get(name, None), values.of(wanted)
        if held is not None and not (held in value if isinstance(value, list) else held == value):
            first = value[0] if isinstance(value, list) else value
            top.fail(
                f"`{name}` is {safe_repr(held)}, but {why}",
                f"give {first}, or describe the model with `{VERSION_KEY}: 1`",
            )


def _check_lists(family: Family, top: Section, layers: int) -> None:
    """Refuse a list with an item for each layer that has unknown items, or another length."""
    for key, allowed in ((key, allowed) for key, allowed in family.lists.items() if allowed is not None):
        kinds = [str(kind) for kind in top.items(key)] if top.get(key, None) else []
        if strange := set(kinds) - set(allowed):
            top.fail(f"`{key}` has `{shorten(min(strange))}`, which is unknown", did_you_mean(min(strange), allowed))
        if kinds and len(kinds) != layers:
            top.fail(f"`{key}` has {len(kinds)} entries, but there are {layers} layers", "give one for each layer")


_ROPE_KEYS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "proportional": (),
}
"""Rules of RoPE scaling in transformers, with the keys that each needs."""
_ROPE_OTHER = {
    "llama_4_scaling_beta": "queries that are scaled by their position",
    # Models of the type `phimoe` have both.
    "short_mscale": "rotary positions that also scale queries and keys",
    "long_mscale": "",
    "mrope_interleaved": "",
    "max_position_embeddings": "",
}
"""Keys of RoPE without a field in `RopeScaling`, with a description of what changes results."""


def _rope(top: Section, row: Mapping[str, Any], keys: Mapping[str, Any], longest: int) -> dict[str, Any]:
    """Return the fields of rotary positions, from older keys or from `rope_parameters` of transformers 5."""
    older, newer = (top.get(key, None) for key in ("rope_scaling", "rope_parameters"))
    if older and newer and older != newer:
        top.fail("`rope_scaling` and `rope_parameters` are both given, but differ", "keep one of them")
    held = Section(older or newer or row.get("rope") or {}, f"{top.where}, RoPE", ProfileError, source=MISSING_KEY_HINT)
    base, share = top.amount(keys["theta"]), top.amount(keys["fraction"])
    local = top.amount(keys["local"]) if keys.get("local") else None
    by_kind = any(kind in held for kind in ("full_attention", "sliding_attention"))
    if local is not None and newer and not by_kind:
        held.fail(
            "`rope_parameters` has no kinds of layers, but models of this type need them",
            'write them under `"full_attention"`',
        )
    if local is not None and "type" in held and "rope_type" not in held:
        held.fail("`type` is an older name, which transformers ignores in models of this type", "rename it `rope_type`")
    if by_kind:
        if local is None or older:
            held.fail(
                "RoPE by kinds of layers is given, but models of this type don't support it",
                "state it once, without kinds",
            )
        if held.get("sliding_attention", None):
            part = held.within("sliding_attention")
            local = part.amount("rope_theta") if "rope_theta" in part else local
            if _rope_scaling(part, 0) is not None:
                part.fail("RoPE of layers with a window is scaled, but that is not supported", REFUSED_HINT)
        held = held.within("full_attention") if held.get("full_attention", None) else Section({}, "", ProfileError)
    return {
        "rope_theta": held.amount("rope_theta") if "rope_theta" in held else base,
        "rope_local_theta": local,
        "rotary_fraction": held.amount("partial_rotary_factor") if held.get("partial_rotary_factor", None) else share,
        "rope_scaling": _rope_scaling(held, longest),
        "other": tuple(words for key, words in _ROPE_OTHER.items() if words and held.get(key, None)),
    }


def _rope_scaling(held: Section, longest: int) -> RopeScaling | None:
    kind = held.text("rope_type" if "rope_type" in held else "type", "default")
    # The first files of Phi-3 have this name, and transformers still reads it.
    kind = "longrope" if kind == "su" else kind
    # `mrope` only divides the frequencies among time, height and width.
    if kind in {"default", "mrope"}:
        return None
    if kind not in _ROPE_KEYS:
        held.fail(
            f"RoPE scaling of type `{shorten(kind)}` is unknown",
            did_you_mean(kind, ["default", *_ROPE_KEYS]),
            code="unknown_name",
        )
    for key in _ROPE_KEYS[kind]:
        held.get(key)
    values = {key: held.get(key) for key in held if key in RopeScaling.__dataclass_fields__}
    if kind in {"yarn", "longrope", "llama3"} and longest:
        values.setdefault("original_max_position_embeddings", longest)
    for key in ("type", "rope_type", "rope_theta", "partial_rotary_factor", "finetuned", *_ROPE_OTHER):
        held.get(key, None)
    held.done()
    return record(RopeScaling, Section(values | {"rope_type": kind}, held.where, ProfileError), optional=OPTIONAL)
