"""Texts as BERT reads them: words in small letters, and where a word is unknown, the longest pieces of it that are not.

As Wu et al. (2016) and Devlin et al. (2019) have it; a vocabulary has a piece on each line, and `##` before those that
go on within a word.
"""

from __future__ import annotations

import unicodedata
from typing import TYPE_CHECKING

from hpgo.base.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_UNKNOWN, _BEGIN, _END = "[UNK]", "[CLS]", "[SEP]"
_LONGEST_WORD = 100
_WIDE = ((0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F), (0x2B740, 0x2B81F),
         (0x2B820, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F))  # fmt: skip
"""Letters that are words of their own."""


class WordPieces:
    """A vocabulary.

    >>> pieces = WordPieces(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "boat", "##s", "."])
    >>> pieces.tokens("The boats float.", most=9)
    [2, 4, 5, 6, 1, 7, 3]
    """

    def __init__(self, pieces: Sequence[str]) -> None:
        """Raises ArgumentError for a vocabulary that lacks the pieces that every text has."""
        self._numbers = {piece: number for number, piece in enumerate(pieces)}
        for piece in (_UNKNOWN, _BEGIN, _END):
            if piece not in self._numbers:
                raise ArgumentError(
                    f"the vocabulary lacks `{piece}`", "give the `vocab.txt` that BERT came with", code="missing"
                )

    def tokens(self, text: str, *, most: int) -> list[int]:
        """Numbers of the pieces of a text, at most so many, with those that stand at its begin and its end."""
        found = [number for word in _words(text) for number in self._pieces(word)]
        return [self._numbers[_BEGIN], *found[: most - 2], self._numbers[_END]]

    def _pieces(self, word: str) -> list[int]:
        found: list[int] = []
        begin = 0
        while begin < len(word):
            for end in range(len(word), begin, -1):
                number = self._numbers.get(("##" if begin else "") + word[begin:end])
                if number is not None:
                    break
            else:
                return [self._numbers[_UNKNOWN]]
            found.append(number)
            begin = end
        return found if len(word) <= _LONGEST_WORD else [self._numbers[_UNKNOWN]]


def _words(text: str) -> Iterator[str]:
    """Words, and marks between them, without accents."""
    plain = []
    for letter in text:
        if letter in {"\0", "\ufffd"} or (unicodedata.category(letter)[0] == "C" and letter not in "\t\n\r"):
            continue
        is_alone = any(first <= ord(letter) <= last for first, last in _WIDE)
        plain.append(f" {letter} " if is_alone else " " if letter.isspace() else letter)
    for word in "".join(plain).split():
        small = unicodedata.normalize("NFD", word.lower())
        kept = [letter for letter in small if unicodedata.category(letter) != "Mn"]
        yield from "".join(f" {letter} " if _is_mark(letter) else letter for letter in kept).split()


def _is_mark(letter: str) -> bool:
    """Punctuation, and all of ASCII that is neither letter nor digit."""
    if letter.isascii():
        return not letter.isalnum() and letter.isprintable() and letter != " "
    return unicodedata.category(letter)[0] == "P"
