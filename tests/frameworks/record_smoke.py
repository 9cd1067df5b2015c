"""Record the log of a smoke run of Megatron-LM's own `pretrain_gpt.py`, for tests that read logs: record_smoke.py LOG

Run like `megatron_start_checks.py`, with the sources of a release first on the path. A plan of a small model for 64
GPUs makes a job folder, whose reduced model trains on eight processes. The log has what the ranks print, without lines
that name files or settings of no interest. `tests/test_job_path.py` makes the same plan.
"""

from __future__ import annotations

import shlex
import sys
import tempfile
from pathlib import Path

from megatron_start_checks import CPU, NOT_ON_CPU, prepare, run_script, without

from forks import together  # isort: skip -- Megatron-LM is imported before

import hpgo
from hpgo.jobs.folder import files

CONFIG = Path(__file__).parents[1] / "golden" / "megatron-smoke.json"
PROBLEM = {"global_batch_size": 64, "seq_length": 128}
FIXED = {"tp": 2, "pp": 2, "vpp": 1, "micro_batch_size": 1, "zero_stage": 1, "recompute": "none"}
"""The configuration, so that the log stays one of the plan when constants of the cost model change."""
RANKS = 8
_DROPPED = ("/tmp", "datetime", "startup", "INFO:", "WARNING:", "warn", "module.", "Params for", "time to initialize")


def main(log: Path) -> None:
    """Train the reduced model, and write what the ranks print."""
    with tempfile.TemporaryDirectory() as at:
        config = Path(at) / "config.json"
        config.write_bytes(CONFIG.read_bytes())
        cluster = hpgo.Cluster.preset("h100:8")
        found = hpgo.plan_llm(str(config), cluster, framework="megatron", fix=FIXED, **PROBLEM)
        texts = files(found.plan())
        words = [
            word
            for name in ("arguments.txt", "smoke.txt")
            for word in shlex.split(texts[f"small/{name}"], comments=True)
        ]
        first, last = Path(at) / "first.log", Path(at) / "last.log"
        prepare()
        together(RANKS, run_script, without([*words, *CPU], NOT_ON_CPU), logs={0: first, -1: last})
        lines = [line for part in (first, last) for line in part.read_text(encoding="utf-8").splitlines()]
    kept = [line.rstrip() for line in lines if not any(word in line for word in _DROPPED)]
    log.write_text("\n".join(kept) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
