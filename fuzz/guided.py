"""Runs one reader on inputs that coverage leads to, until it does what no reader may.

    python fuzz/TARGET.py [--native FILE] [FOLDER | INPUT] [-LIBFUZZER_OPTION=VALUE …]

A reader gives a value or raises an `hpgo.errors.HpgoError` that can be printed, within two seconds of processor time
and a gibibyte of memory. libFuzzer (by way of Atheris) looks for inputs that do anything else, and keeps those that
reach new code in FOLDER, beside the target's own seeds; the first that breaks the rule is written to `crash-…`, and
read again by naming it as INPUT. All Python of hpgo is instrumented, and so is what FILE holds: the native module, as
`make fuzz` builds it.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import resource
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

try:
    import atheris
except ModuleNotFoundError:
    sys.exit("error: Atheris is missing, which PyPI has for CPython 3.11 to 3.13 on Linux\nhint: `pip install atheris`")

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

MAX_S = 2.0
MAX_BYTES = 2**30
MAX_LENGTH = 2**15
"""Bytes of an input: more than any seed has, and few enough for hundreds of runs a second."""
_TARGET = Path(sys.argv[0]).stem
_FOLDER = Path(__file__).parent
_USUAL = (
    f"-max_len={MAX_LENGTH}",
    "-len_control=0",  # seeds are long, and none of them must make place for a shorter one
    "-keep_seed=1",
    "-reduce_inputs=0",
    "-timeout=60",
    "-rss_limit_mb=0",
    "-print_final_stats=1",
    f"-artifact_prefix={_FOLDER / 'artifacts'}/{_TARGET}-",
)

# It stays in place, since hpgo loads most of its modules when they are used.
atheris.instrument_imports(include=["hpgo"]).__enter__()

import hpgo  # noqa: E402 -- instrumented


def fuzz(
    seeds: Callable[[], Mapping[str, bytes]],
    mutate: Callable[[bytes, int, int], bytes],
    *readers: Callable[[bytes, Path], object],
) -> None:
    """Runs the readers on the seeds and on what becomes of them, as the command line says; does not return.

    `seeds` gives good inputs by name. `mutate` gets an input, the most bytes that the new one may have, and the seed of
    its choices. Each reader gets an input, and a folder for files that it needs.
    """
    words = argparse.ArgumentParser(usage=(__doc__ or "").split("\n\n")[1].strip())
    words.add_argument("--native", type=Path)
    words.add_argument("path", nargs="?", type=Path, default=_FOLDER / "corpus" / _TARGET)
    given, options = words.parse_known_args()
    folder = given.path.parent / f"{_TARGET}-input"
    for needed in (folder, _FOLDER / "artifacts"):
        needed.mkdir(parents=True, exist_ok=True)

    def run(data: bytes) -> None:
        for read in readers:
            started_s = time.process_time()
            try:
                read(data, folder)
            except hpgo.errors.InternalError:
                raise
            except hpgo.errors.HpgoError as error:
                if not (error.message and error.message.isprintable() and error.hint.isprintable()):
                    raise AssertionError(f"can't be printed: {error.args!r}") from error
            if (took_s := time.process_time() - started_s) > MAX_S:
                raise AssertionError(f"took {took_s:.1f} s of processor time")

    atheris.Setup([sys.argv[0], *_USUAL, *options, str(given.path)], run, custom_mutator=mutate)
    if given.native is not None:
        _load(given.native)
    if not given.path.is_file():
        given.path.mkdir(exist_ok=True)
        for name, good in seeds().items():
            _check_taken(name, [partial(read, good, folder) for read in readers])
            Path(given.path, f"seed-{name}").write_bytes(good)
    warnings.simplefilter("error")  # no reader warns, either
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5])
    limit = pages * resource.getpagesize() + MAX_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))  # a MemoryError in Python, the end of the process in Rust
    atheris.Fuzz()


def toy(layers: int) -> hpgo.Profile:
    """A chain of so many layers that seeds are made of."""
    return hpgo.Profile.chain(
        "toy",
        batch_size=1,
        forward_s=[1 + layer % 2 for layer in range(layers)],
        backward_s=[2 + 2 * (layer % 2) for layer in range(layers)],
        activation_bytes=[8] * layers,
        parameter_bytes=[4] * layers,
    )


def reader(name: str, read: Callable[[Path], object]) -> Callable[[bytes, Path], object]:
    """What reads an input as the file `name`."""

    def put_and_read(data: bytes, folder: Path) -> object:
        path = folder / name
        path.write_bytes(data)
        return read(path)

    return put_and_read


def _check_taken(name: str, attempts: Iterable[Callable[[], object]]) -> None:
    """Raises unless some reader takes the seed; what it loads is loaded here, before it is timed."""
    errors = []
    for attempt in attempts:
        try:
            attempt()
        except Exception as error:  # noqa: BLE001 -- told below
            errors.append(error)
        else:
            return
    raise ExceptionGroup(f"no reader takes the seed {name}", errors)


def _load(native: Path) -> None:
    """Makes `native` the module `hpgo._core`, and its coverage libFuzzer's."""
    # What instrumented code calls is in Atheris' core, which other modules see only if it is loaded so that they do.
    # What mutates comes first, since the core looks for that when it is loaded. Atheris then takes the core's libFuzzer
    # for one of another origin, and asks for a core without one: the same core serves.
    flags = sys.getdlopenflags()
    sys.setdlopenflags(flags | os.RTLD_GLOBAL)
    for name in ("custom_mutator", "core_with_libfuzzer"):
        importlib.import_module(f"atheris.{name}")
    sys.setdlopenflags(flags)
    sys.modules["atheris.core_without_libfuzzer"] = sys.modules["atheris.core_with_libfuzzer"]
    loader = importlib.machinery.ExtensionFileLoader("hpgo._core", str(native.resolve()))
    spec = importlib.util.spec_from_loader("hpgo._core", loader)
    assert spec is not None
    sys.modules["hpgo._core"] = importlib.util.module_from_spec(spec)
    loader.exec_module(sys.modules["hpgo._core"])
