"""What several test files need."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
REFERENCE = Path(os.environ.get("HPGO_REFERENCE", ROOT / "../shared/reference"))

# A shell ignores Ctrl-C in what it runs in the background, and so would every process that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def reference() -> Path:
    """Folder of published inputs and recorded outputs of other tools, read in place and never copied."""
    if not REFERENCE.is_dir():
        pytest.skip(f"no reference data at {REFERENCE}; set HPGO_REFERENCE to its folder")
    return REFERENCE
