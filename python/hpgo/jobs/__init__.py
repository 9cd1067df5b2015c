"""Job folders: everything that starts a plan with its framework on a cluster, beginning with a smoke run.

from hpgo import jobs

jobs.files(plan, on="slurm")  # texts by file name
jobs.save(plan, "job/", on="slurm")  # writes them
"""

from __future__ import annotations

from hpgo.jobs.folder import files, save

__all__ = ["files", "save"]
