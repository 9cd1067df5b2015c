"""What several test files need."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parent.parent
REFERENCE = Path(os.environ.get("HPGO_REFERENCE", ROOT / "../shared/reference"))
LOADS_TORCH = {"profile", "run", "infer", "measure-links", "--node"}
"""Commands, and the option of `hpgo llm calibrate`, that load torch."""
NO_REFERENCE = "compares with recorded outputs of other tools, which HPGO_REFERENCE names and which are not here"

# A shell ignores Ctrl-C in what it runs in the background, and so would every process that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Ranks take a GPU if each gets one. Tests compare them with tensors on the CPU, so hide GPUs before torch is imported.
# Only `make gpu` shows them.
ON_GPU = os.environ.get("HPGO_TEST_GPU") == "1"
if not ON_GPU:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

# Other processes may have the processors: no test fails since it was slow.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")


@pytest.fixture(scope="session")
def reference() -> Path:
    """Folder of published inputs and recorded outputs of other tools, read in place and never copied."""
    if not REFERENCE.is_dir():
        pytest.skip(NO_REFERENCE)
    return REFERENCE


@pytest.fixture(scope="session")
def transformers() -> Any:
    """Hugging Face's transformers, whose models tests compare with."""
    pytest.importorskip("torch", reason="torch is not installed: pip install torch")
    package = pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
    package.logging.set_verbosity_error()
    return package


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `hpgo` in a folder of its own, and checks its exit code.

    Commands that load torch run in processes that have loaded it: this takes three seconds each time.
    """

    def hpgo_(*words: object, code: int = 0) -> subprocess.CompletedProcess[str]:
        if LOADS_TORCH & {str(word) for word in words[:3]} and importlib.util.find_spec("torch"):
            from warm_ranks import hpgo

            done = hpgo(tmp_path, *words, timeout=120)
        else:
            done = subprocess.run(
                [sys.executable, "-m", "hpgo", *map(str, words)], cwd=tmp_path, text=True, capture_output=True,
                timeout=120, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        return done

    return hpgo_


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless chromium; one a file, as its loop of asyncio is no other file's."""
    from browsing import launched

    with launched() as running:
        yield running


@pytest.fixture(scope="module")
def _desk(browser: Any) -> Any:
    from browsing import DESK, watched

    return watched(browser.new_page(**DESK))


@pytest.fixture(scope="module")
def _handheld(browser: Any) -> Any:
    from browsing import PHONE, watched

    return watched(browser.new_page(**PHONE))


@pytest.fixture
def tab(_desk: Any) -> Iterator[Any]:
    """A page at no address; the test fails if a script fails, or anything is fetched that isn't there."""
    from browsing import lent

    yield from lent(_desk)


@pytest.fixture
def phone(_handheld: Any) -> Iterator[Any]:
    """The same, on a telephone."""
    from browsing import lent

    yield from lent(_handheld)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that is marked `gpu(N)` where `make gpu` does not run, or where there are fewer than N GPUs."""
    for mark in item.iter_markers("gpu"):
        needed = mark.args[0] if mark.args else 1
        if os.environ.get("HPGO_TEST_DEVICE") == "cpu":
            continue
        if not ON_GPU:
            pytest.skip("needs GPUs: `make gpu` runs it where there are some")
        import torch

        if torch.cuda.device_count() < needed:
            pytest.skip(f"needs {needed} GPUs, but torch finds {torch.cuda.device_count()}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says last what was skipped and why: a line a reason, with the files that it is about."""
    reasons: dict[str, Counter[str]] = {}
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        files = reasons.setdefault(reason.removeprefix("Skipped: "), Counter())
        files[Path(report.nodeid.partition("::")[0]).name] += 1
    for reason, files in reasons.items():
        where = ", ".join(f"{name} {count}" for name, count in sorted(files.items()))
        terminalreporter.write_line(f"skipped {files.total()}: {reason} ({where})")
