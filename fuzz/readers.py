"""Feeds damaged files to the readers of profiles and clusters until something other than an hpgo error comes out.

    python fuzz/readers.py [SECONDS [SEED]]

Starts from the files of profiling_results/ and the presets, cuts, doubles, swaps and garbles pieces of them, and prints
the bytes and the seed of the first input that breaks a reader or keeps it busy for more than a second.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from pathlib import Path

import hpgo
from hpgo.machine.presets import PRESETS
from hpgo.model.formats import native

_ROOT = Path(__file__).parent.parent
_PIECES = [
    *(b"nan", b"-1", b"1e999", b"0x10", b"9" * 400, b" -- ", b"\n", b"\r\n", b"\t", b"\0", b"\xff", b"\xef\xbb\xbf"),
    *(b"{", b"[", b"}", b"]", b"&a ", b"*a", b"!!binary ", b"<<: ", b"? ", b"- ", b": ", b"#", b"'", b'"', b"|", b">"),
    *(b"\\ud800", b"---\n"),
]


def seeds() -> list[bytes]:
    """Good files of every format."""
    small = [hpgo.read_profile(name) for name in ("bert-24", "resnet-50")]
    texts = [path.read_text(encoding="utf-8") for path in sorted((_ROOT / "profiling_results").glob("*.txt"))]
    texts += [write(profile) for profile in small for write in (native.write_json, native.write_yaml)]
    texts += [hpgo.Cluster.preset(name).yaml() for name in PRESETS]
    return [text.encode() for text in texts]


def damaged(good: bytes, chance: random.Random) -> bytes:
    """`good` after a few random injuries."""
    data = bytearray(good)
    for _ in range(chance.randint(1, 6)):
        start = chance.randrange(len(data) + 1)
        end = min(len(data), start + int(chance.expovariate(0.05)))
        match chance.randrange(5):
            case 0:
                del data[start:end]
            case 1:
                data[start:start] = data[start:end]
            case 2:
                data[start:end] = chance.choice(_PIECES)
            case 3:
                data[start:start] = chance.choice(_PIECES) * chance.choice((1, 1, 1, 1000))
            case _:
                data[start:end] = chance.randbytes(end - start)
    return bytes(data)


def main(seconds: float, seed: int) -> None:
    """Fuzzes for `seconds`; exits with 1 and says how to repeat it at the first fault."""
    chance = random.Random(seed)  # noqa: S311 -- repeatable, not secret
    good = seeds()
    runs, deadline = 0, time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "input-pbs-4.txt")
        while time.monotonic() < deadline:
            data = damaged(chance.choice(good), chance)
            path.write_bytes(data)
            for reader in (hpgo.read_profile, hpgo.Cluster.read):
                start = time.monotonic()
                fault = ""
                try:
                    reader(path)
                except hpgo.HpgoError as error:
                    f"{error}\n{error.hint}".encode()  # what is printed must be printable
                except Exception as error:  # noqa: BLE001 -- that is what is looked for
                    fault = repr(error)
                if time.monotonic() - start > 1:
                    fault = fault or "took more than a second"
                if fault:
                    sys.exit(f"{reader.__qualname__}: {fault}\nseed {seed}, run {runs}, input:\n{data!r}")
            runs += 1
    print(f"{runs} damaged files, no fault")  # noqa: T201


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 60, int(sys.argv[2]) if len(sys.argv) > 2 else 0)
