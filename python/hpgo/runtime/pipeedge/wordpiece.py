"""Tokenization for BERT: the WordPiece tokens of a vocabulary (Wu et al., 2016; Devlin et al., 2019)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpgo.base.extras import library
from hpgo.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

_UNKNOWN, _BEGIN, _END = "[UNK]", "[CLS]", "[SEP]"
_MAX_WORD_CHARS = 100
"""Maximum length of a known word. Longer words are unknown, as in BERT's own tokenizer."""


class WordPieces:
    """A vocabulary of an uncased BERT model.

    >>> pieces = WordPieces(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "boat", "##s", "."])
    >>> pieces.tokens("The boats float.", maximum=9)
    [2, 4, 5, 6, 1, 7, 3]
    """

    def __init__(self, pieces: Sequence[str]) -> None:
        """Create a tokenizer from the lines of `vocab.txt`. The token of a piece is its index.

        Raises ArgumentError for a vocabulary without `[UNK]`, `[CLS]` or `[SEP]`, and if `tokenizers` is not installed.
        """
        tokenizers = library("tokenizers", extra="pipeedge", task="texts")
        numbers = {piece: number for number, piece in enumerate(pieces)}
        for piece in (_UNKNOWN, _BEGIN, _END):
            if piece not in numbers:
                raise ArgumentError(
                    f"the vocabulary has no `{piece}`", "use the `vocab.txt` of the model", code="missing"
                )
        self._begin, self._end = numbers[_BEGIN], numbers[_END]
        self._tokenizer = tokenizers.Tokenizer(
            tokenizers.models.WordPiece(numbers, unk_token=_UNKNOWN, max_input_chars_per_word=_MAX_WORD_CHARS)
        )
        self._tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
        self._tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()

    def tokens(self, text: str, *, maximum: int) -> list[int]:
        """Return `[CLS]`, the tokens of a text and `[SEP]`: at most `maximum` tokens; the end of the text is cut."""
        return [self._begin, *self._tokenizer.encode(text).ids[: maximum - 2], self._end]
