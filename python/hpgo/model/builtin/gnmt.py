"""GNMT with 16 or 32 LSTM layers: an encoder, and a decoder whose layers all read the attention.

Each LSTM passes its sequence on through a selector. From the third layer of each half on, a residual sum adds the input
of the previous layer. Unused outputs are left out. A layer's name is its kind; PipeDream's planner visits layers in the
order of their names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpgo.model.builtin.builder import FLOAT_BYTES, Builder

if TYPE_CHECKING:
    from hpgo.model.profile import Profile

_SOURCE = "AlibabaPAI/DAPPLE (Fan et al., PPoPP 2021)"
_BATCH = 64
_HIDDEN = 1024
_VOCABULARY = 36_560
_STATE_BYTES = _BATCH * _HIDDEN * FLOAT_BYTES
"""Size in bytes of a hidden state, or of one position of a sequence."""
_LSTM_PARAMETERS = 8 * _HIDDEN**2 + 8 * _HIDDEN
_WIDE_LSTM_PARAMETERS = 12 * _HIDDEN**2 + 8 * _HIDDEN
"""Parameters of an LSTM whose input is twice as wide: both directions, or attention and the previous layer."""

_Times = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class _Half:
    """Forward and backward times in ms of the encoder's or the decoder's layers."""

    length: int
    """Number of positions in the sequence."""
    embedding: tuple[float, float]
    first: tuple[float, float]
    """Time of the bidirectional LSTM in the encoder, or of the attention in the decoder."""
    dropouts: _Times
    lstms: _Times


def _columns(forward: str, backward: str) -> _Times:
    """Return pairs of forward and backward times in ms from two rows of microseconds."""
    rows = zip(forward.split(), backward.split(), strict=True)
    return tuple((float(f"{ahead}e-3"), float(f"{back}e-3")) for ahead, back in rows)


def gnmt_16() -> Profile:
    """Return GNMT with eight layers in encoder and decoder each."""
    encoder = _Half(
        length=35,
        embedding=(0.074, 11.748),
        first=(7.572, 0.015),
        dropouts=_columns("94 69 65 64 65 64 64", "221 135 135 135 135 135 135"),
        lstms=_columns("4649 3445 3454 3441 3439 3442 3446", "8641 6489 6525 6513 6513 6523 7050"),
    )
    decoder = _Half(
        length=36,
        embedding=(0.069, 0.402),
        first=(6.948, 10.979),
        dropouts=_columns("62 68 64 69 69 63 69", "201 201 201 201 201 201 184"),
        lstms=_columns("4625 4611 4611 4611 4612 4628 4625", "8480 8486 8471 8499 8470 8485 30973"),
    )
    return _gnmt("gnmt-16", encoder, decoder, classifier=(17.078, 2.904))


def gnmt_32() -> Profile:
    """Return GNMT with sixteen layers in encoder and decoder each."""
    encoder = _Half(
        length=38,
        embedding=(0.087, 11.587),
        first=(7.665, 0.019),
        dropouts=_columns(
            "99 69 65 65 64 64 64 64 64 78 64 76 76 65 76.4",
            "212 126 126 126 126 126 125 126 126 126 125 125 126 125 125",
        ),
        lstms=_columns(
            "4788 3534 3530 3540 3531 3539 3549 3554 3565 3571 3575 3590 3591 3597 3601",
            "8891 6707 6708 6729 6734 6736 6745 6759 6770 6783 6767 6790 6782 6809 7300",
        ),
    )
    decoder = _Half(
        length=32,
        embedding=(0.074, 0.398),
        first=(7.625, 10.896),
        dropouts=_columns(
            "61 68 75 63 63 75 63 75 75 63 75 64 63 75 63",
            "187 188 188 188 188 188 189 188 188 188 188 188 188 187 172",
        ),
        lstms=_columns(
            "4819 4815 4823 4849 4829 4829 4820 4826 4839 4829 4846 4831 4855 4870 4830",
            "8779 8777 8789 8785 8776 8785 8797 8770 8778 8794 8773 8775 8764 8791 31889",
        ),
    )
    return _gnmt("gnmt-32", encoder, decoder, classifier=(18.322, 2.941))


def _gnmt(name: str, encoder: _Half, decoder: _Half, *, classifier: tuple[float, float]) -> Profile:
    build = Builder(_BATCH)
    source = build.add("Input-source")
    lengths = build.add("Input-lengths")
    encoded = _encoder(build, encoder, source, lengths)
    decoded = _decoder(build, decoder, encoded, encoder.length, lengths)
    build.add(
        "classifier",
        decoded,
        ms=classifier,
        activation_bytes=_BATCH * decoder.length * _VOCABULARY * FLOAT_BYTES,
        parameter_bytes=(_HIDDEN + 1) * _VOCABULARY * FLOAT_BYTES,
    )
    return build.profile(name, _SOURCE)


def _embed(build: Builder, layer: str, feed: str, half: _Half) -> str:
    return build.add(
        layer,
        feed,
        name="embedding",
        ms=half.embedding,
        activation_bytes=half.length * _STATE_BYTES,
        parameter_bytes=_VOCABULARY * _HIDDEN * FLOAT_BYTES,
    )


def _lstm(build: Builder, layer: str, *feeds: str, ms: tuple[float, float], length: int, wide: bool) -> str:
    """Add an LSTM and the selector of its output sequence; return the selector's id."""
    lstm = build.add(
        layer,
        *feeds,
        name=f"lstm {2 * _HIDDEN if wide else _HIDDEN}",
        ms=ms,
        activation_bytes=(length + 2) * _STATE_BYTES,  # the sequence, the last hidden and the last cell state
        parameter_bytes=(_WIDE_LSTM_PARAMETERS if wide else _LSTM_PARAMETERS) * FLOAT_BYTES,
    )
    return build.add(f"{layer}-sequence", lstm, name="select 0", activation_bytes=length * _STATE_BYTES)


def _add(build: Builder, layer: str, sequence: str, skipped: str, sequence_bytes: int) -> str:
    """Add the residual sum after an LSTM, and return its id."""
    return build.add(f"{layer}-sum", sequence, skipped, name="add", activation_bytes=sequence_bytes)


def _encoder(build: Builder, half: _Half, source: str, lengths: str) -> str:
    sequence_bytes = half.length * _STATE_BYTES
    last = build.add(
        "encoder-1",
        _embed(build, "source-embedding", source, half),
        lengths,
        name="encoder lstm",
        ms=half.first,
        activation_bytes=2 * sequence_bytes,
        parameter_bytes=2 * _LSTM_PARAMETERS * FLOAT_BYTES,
    )
    for number, (dropout_ms, lstm_ms) in enumerate(zip(half.dropouts, half.lstms, strict=True), start=2):
        wide = number == 2  # reads both directions
        layer = f"encoder-{number}"
        dropped = build.add(
            f"{layer}-dropout",
            last,
            name="dropout",
            ms=dropout_ms,
            activation_bytes=(2 if wide else 1) * sequence_bytes,
        )
        sequence = _lstm(build, layer, dropped, ms=lstm_ms, length=half.length, wide=wide)
        last = sequence if wide else _add(build, layer, sequence, last, sequence_bytes)
    return last


def _decoder(build: Builder, half: _Half, encoded: str, encoded_length: int, lengths: str) -> str:
    sequence_bytes = half.length * _STATE_BYTES
    scores_bytes = _BATCH * half.length * encoded_length * FLOAT_BYTES
    embedding = _embed(build, "target-embedding", build.add("Input-target"), half)
    state = build.add("state")  # initial state of every decoder layer
    first = build.add(
        "decoder-1",
        embedding,
        build.add("decoder-1-state", state, name="select 0"),
        encoded,
        lengths,
        name="recurrent attention",
        ms=half.first,
        activation_bytes=2 * sequence_bytes + 2 * _STATE_BYTES + scores_bytes,
        # These are the parameters of the LSTM and of the attention: two square matrices and a vector.
        parameter_bytes=(_LSTM_PARAMETERS + 2 * _HIDDEN**2 + _HIDDEN) * FLOAT_BYTES,
    )
    last = build.add("decoder-1-sequence", first, name="select 0", activation_bytes=sequence_bytes)
    attention = build.add("attention", first, name="select 2", activation_bytes=_STATE_BYTES)
    for number, (dropout_ms, lstm_ms) in enumerate(zip(half.dropouts, half.lstms, strict=True), start=2):
        layer = f"decoder-{number}"
        dropped = build.add(f"{layer}-dropout", last, name="dropout", ms=dropout_ms, activation_bytes=sequence_bytes)
        joined = build.add(f"{layer}-concat", dropped, attention, name="concat", activation_bytes=sequence_bytes)
        hidden = build.add(f"{layer}-state", state, name=f"select {number - 1}")
        sequence = _lstm(build, layer, joined, hidden, ms=lstm_ms, length=half.length, wide=True)
        last = sequence if number == 2 else _add(build, layer, sequence, last, sequence_bytes)
    return last
