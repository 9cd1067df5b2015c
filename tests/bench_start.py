"""How long people wait for `import hpgo`, and from typing `hpgo plan` to its table."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

COMMANDS = {
    "python alone": ["-c", "pass"],
    "import hpgo": ["-c", "import hpgo"],
    "hpgo plan bert-48": ["-m", "hpgo", "plan", "bert-48", "--cluster", "dapple-a", "--global-batch-size", "64"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_from_process_start_to_end(benchmark: Any, name: str) -> None:
    benchmark(subprocess.run, [sys.executable, *COMMANDS[name]], check=True, stdout=subprocess.DEVNULL)
