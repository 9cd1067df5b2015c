"""Building blocks of messages: similar names, counts, and safe short forms of values."""

from __future__ import annotations

import operator
import re
from numbers import Real
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

_SEPARATORS = re.compile(r"[-_. ]")
_MAX_NEAREST = 3  # a hint lists at most this number of equally similar names; of more, it lists only the first


def did_you_mean(wanted: str, known: Iterable[str]) -> str:
    """Return a hint for a misspelled name: the most similar of `known`, or the first 12 if none is similar.

    >>> did_you_mean("vgg19", ["vgg-16", "vgg-19"])
    'did you mean `vgg-19`?'
    >>> did_you_mean("x", ["vgg-16", "vgg-19"])
    'known: vgg-16, vgg-19'
    """
    names = list(known)
    if hint := similar(wanted, names):
        return hint
    return f"known: {', '.join(map(shorten, names[:12]))}{', …' if len(names) > 12 else ''}" if names else ""


def similar(wanted: str, known: Iterable[str], *, minimum: float = 0.6) -> str:
    """Return a hint that names the most similar of `known`, or an empty text; see `nearest_names`.

    >>> similar("vgg19", ["vgg-16", "vgg-19"]), similar("x", ["vgg-16", "vgg-19"])
    ('did you mean `vgg-19`?', '')
    >>> similar("vgg-1", ["vgg-16", "vgg-19"])
    'did you mean `vgg-16` or `vgg-19`?'
    """
    found = nearest_names(wanted, known, minimum=minimum)
    return f"did you mean {join_words([f'`{printable(name)}`' for name in found], 'or')}?" if found else ""


def nearest_names(wanted: str, known: Iterable[str], *, minimum: float = 0.6) -> list[str]:
    """Return the most similar names of `known`.

    Several are returned if they are equally similar, none if the similarity of all is below `minimum` (from 0 to 1).
    Names that differ in case and separators only come first, then names one typing slip away, then names that contain
    `wanted` as whole words. Among equally similar names, those with the longest common prefix win.

    >>> nearest_names("H100", ["v100", "h100"]), nearest_names("1f1v", ["1f1b", "1f1b_overlap"])
    (['h100'], ['1f1b'])
    >>> nearest_names("pirce", ["price", "pipe"]), nearest_names("zero", ["zero_stage", "dp"])
    (['price'], ['zero_stage'])
    """
    from difflib import SequenceMatcher
    from itertools import islice, takewhile

    # The comparison is quadratic in the length of names, and `known` may be huge: limit both.
    short = [name for name in islice(known, 5000) if len(name) <= 100]
    typed = wanted[:100].casefold()
    bare = _SEPARATORS.sub("", typed)
    alike = [name for name in short if bare and _SEPARATORS.sub("", name.casefold()) == bare]
    slips = alike or [name for name in short if _is_one_slip(typed, name.casefold())]
    slips = slips or [name for name in short if _has_words(name.casefold(), typed)]
    if slips:
        minimum = 0.0
    matcher = SequenceMatcher(b=typed)
    shares: dict[str, tuple[float, int]] = {}
    for name in slips or short:
        matcher.set_seq1(name.casefold())
        if matcher.real_quick_ratio() >= minimum and matcher.quick_ratio() >= minimum:
            pairs = zip(typed, name.casefold(), strict=False)
            shares[name] = matcher.ratio(), sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    best = max(shares.values(), default=(0.0, 0))
    found = [name for name, share in shares.items() if share == best and share[0] >= minimum]
    return found if len(found) <= _MAX_NEAREST else found[:1]


def _has_words(name: str, typed: str) -> bool:
    """Return whether `typed` is one or several whole words of `name`, as `zero` is of `zero_stage`."""
    words, wanted = (_SEPARATORS.sub(" ", text).strip() for text in (name, typed))
    return len(wanted) > 2 and f" {wanted} " in f" {words} "


def _is_one_slip(typed: str, name: str) -> bool:
    """Return whether one inserted, deleted, replaced or swapped letter accounts for the whole difference."""
    if min(len(typed), len(name)) < 2 or abs(len(typed) - len(name)) > 1:
        return False
    begin = 0
    while begin < min(len(typed), len(name)) and typed[begin] == name[begin]:
        begin += 1
    one, other = typed[begin:], name[begin:]
    return one[1:] == other[1:] or one[1:] == other or one == other[1:] or one == other[1::-1] + other[2:]


def span_of(names: Sequence[str]) -> tuple[list[str], str]:
    """Return the ends of a list of consecutive names, and a suffix: a range if the names are numbered consecutively.

    >>> span_of(["encoder-1", "encoder-2", "encoder-3"]), span_of(["input", "embedding", "encoder-1"])
    ((['encoder'], ' 1–3'), (['input', 'encoder-1'], ''))
    """
    first, last = (re.fullmatch(r"(.*?)[-_. ]?(\d{1,9})", name, re.DOTALL) for name in (names[0], names[-1]))
    alike = first and last and first[1] == last[1] != "" and int(last[2]) - int(first[2]) == len(names) - 1
    if first and last and alike and len(names) > 1:
        return [first[1]], f" {first[2]}–{last[2]}"
    return [names[0]] if len(names) == 1 else [names[0], names[-1]], ""


def spans_of(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a short text for each row of names, made of its first and last name. Different names get different texts.

    >>> spans_of([["embedding", "encoder-1"], ["encoder-2", "encoder-3"]])
    ['embedding … encoder-1', 'encoder 2–3']
    """
    ends = [span_of(names) for names in rows]
    short = short_names([name for names, _ in ends for name in names])
    return [" … ".join(short[name] for name in names) + counted_on for names, counted_on in ends]


def short_names(names: Iterable[str], *, maximum: int = 16) -> dict[str, str]:
    """Return a unique short text for each name.

    Names with more than `maximum` characters lose their common beginning, and then their middle.

    >>> short_names(["transformer.h.0.attn.c_proj", "transformer.h.11.mlp"])
    {'transformer.h.0.attn.c_proj': '…h.0.attn.c_proj', 'transformer.h.11.mlp': '…h.11.mlp'}
    >>> short_names(["wte", "a.name.of.forty.characters.with.all.parts"])["a.name.of.forty.characters.with.all.parts"]
    'a.name.o…aracters.with.all.parts'
    """
    whole = list(dict.fromkeys(names))
    shared = _shared([name for name in whole if len(name) > maximum])
    limit = 2 * maximum
    # Two names may become equal without their middle. Allow twice the length until all texts differ.
    while True:
        short = {name: _short(name, shared if len(name) > maximum else 0, limit) for name in whole}
        if len(set(short.values())) == len(whole):
            return short
        if limit > max(map(len, whole)):
            return {name: name for name in whole}
        limit *= 2


def _short(name: str, shared: int, limit: int) -> str:
    text = f"…{name[shared:]}" if shared else name
    head = limit // 4
    return text if len(text) <= limit else f"{text[:head]}…{text[head + 1 - limit :]}"


def _shared(names: Sequence[str]) -> int:
    """Return the number of leading characters that all names share and that may be dropped.

    The cut is at a separator, and never directly before a number, which means nothing without its word.
    """
    if len(names) < 2:
        return 0
    first, last = min(names), max(names)
    common = next((at for at, pair in enumerate(zip(first, last, strict=False)) if pair[0] != pair[1]), len(first))
    ends = [found.end() for found in re.finditer(r"[-_./: ]", first[:common])]
    fitting = [end for end in ends if end > 1 and not any(name[end : end + 1].isdigit() for name in names)]
    return max(fitting, default=0)


def pluralize(number: int, thing: str) -> str:
    """Return a number with its noun in the singular or the plural.

    >>> pluralize(1, "sample"), pluralize(64, "sample"), pluralize(2, "micro-batch")
    ('1 sample', '64 samples', '2 micro-batches')
    """
    ending = "" if number == 1 else "es" if thing.endswith("ch") else "s"
    return f"{number} {thing}{ending}"


def join_words(words: Collection[object], joint: str = "and") -> str:
    """Join words with commas, and with `joint` before the last.

    >>> join_words(["tp", "cp", "pp"]), join_words([0, 1], "or"), join_words(["tp"])
    ('tp, cp and pp', '0 or 1', 'tp')
    """
    *before, last = [*map(str, words)] or [""]
    return f"{', '.join(before)} {joint} {last}" if before else last


def above(gap: float) -> str:
    """Return a phrase for a relative optimality gap.

    >>> above(0.0123), above(2.466)
    ('at most 1.2 % above the best', 'at most 3.47 × the best')
    >>> above(float("inf"))  # the bound is 0
    'not known to be near the best'
    """
    if gap == float("inf"):
        return "not known to be near the best"
    return f"at most {100 * gap:.2g} % above the best" if gap < 0.995 else f"at most {1 + gap:.3g} × the best"


def percent(share: float) -> str:
    """Return `share` in percent with two significant digits, or all digits before the point, and never an exponent.

    >>> percent(0.0123), percent(2.466), percent(2e-14), percent(0)
    ('1.2 %', '247 %', 'less than 0.01 %', '0 %')
    """
    if 0 < share < 1e-4:
        return "less than 0.01 %"
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.2g} %"


def times(ratio: float) -> str:
    """Return a ratio in percent below 1, and as a multiple from 1 on.

    >>> times(0.392), times(3.42)
    ('39 %', '3.4 ×')
    """
    return percent(ratio) if ratio < 0.995 else f"{ratio:.1f} ×" if ratio < 9.95 else f"{ratio:,.0f} ×"


def safe_repr(value: object) -> str:
    """Return a short, safe description of any value.

    >>> safe_repr(3.5), safe_repr("a"), safe_repr([1, 2]), safe_repr(None)
    ('3.5', '`a`', 'a list', 'nothing')
    """
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"`{shorten(value)}`"
    if isinstance(value, (int, float)):
        return f"{as_float(value):g}"
    if isinstance(value, Real):
        return f"{as_float(value):g} ({type(value).__name__})"
    return f"a {type(value).__name__}"


def exactly(value: object) -> str:
    """Return the same as `safe_repr`, but with all digits of integers below 2^100.

    >>> safe_repr(12345678), exactly(12345678)
    ('1.23457e+07', '12345678')
    """
    short = isinstance(value, int) and type(value) in {int, bool} and value.bit_length() < 100
    return str(value) if short else safe_repr(value)


def as_float(value: Real | float) -> float:
    """Return `value` as a float, or infinity if it is too large for one."""
    try:
        return float(value)
    except Exception:  # noqa: BLE001 -- too large, or any error of a foreign number type
        return float("inf")


def as_whole(value: object) -> int | None:
    """Return `value` as an int. Integers of numpy are accepted; other types, bools among them, give None.

    >>> as_whole(64), as_whole(64.0), as_whole(True)
    (64, None, None)
    """
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]  # other types raise
    except Exception:  # noqa: BLE001 -- a TypeError, or any error of a foreign number type
        return None


def shorten(text: str, maximum: int = 40) -> str:
    r"""Return `text` in printable characters, cut to at most `maximum`.

    >>> shorten("a\nb"), shorten("x" * 50, maximum=4)
    ('a b', 'xxx…')
    """
    return printable(text if len(text) <= maximum else f"{text[: maximum - 1]}…")


def cut_words(text: str, maximum: int = 160) -> str:
    """Return `text` without the middle of words that have more than `maximum` characters, as long paths have.

    >>> cut_words("no file `/a/very/long/path.yaml` here", maximum=12)
    'no file `/a/…h.yaml` here'
    """
    begin = maximum // 3
    end = maximum - 1 - begin
    return " ".join(
        word if len(word) <= maximum else f"{word[:begin]}…{word[len(word) - end :]}" for word in text.split(" ")
    )


def brief(kind: str, text: str) -> str:
    """Return the `repr` of a record: one line of less than 120 characters.

    >>> brief("Cluster", "mine"), len(brief("Plan", "of a model " * 50))
    ('<Cluster mine>', 119)
    """
    return f"<{kind} {shorten(text, maximum=116 - len(kind))}>"


def printable(text: str) -> str:
    r"""Return `text` with each unprintable character replaced by a blank.

    The result is one line that can't control a terminal or break an XML document, and has no unpaired surrogates.

    >>> printable("red\x1b[31m\nhint: none")
    'red [31m hint: none'
    """
    return text if text.isprintable() else "".join(letter if letter.isprintable() else " " for letter in text)
