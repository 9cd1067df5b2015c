"""What several test files need."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
REFERENCE = Path(os.environ.get("HPGO_REFERENCE", ROOT / "../shared/reference"))
NO_REFERENCE = "compares with recorded outputs of other tools, which HPGO_REFERENCE names and which are not here"

# A shell ignores Ctrl-C in what it runs in the background, and so would every process that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def reference() -> Path:
    """Folder of published inputs and recorded outputs of other tools, read in place and never copied."""
    if not REFERENCE.is_dir():
        pytest.skip(NO_REFERENCE)
    return REFERENCE


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
