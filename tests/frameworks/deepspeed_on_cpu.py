"""The training script of a job folder for DeepSpeed, on the CPU: deepspeed_on_cpu.py WORDS…"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"
sys.path.insert(0, str(Path.cwd()))

import deepspeed  # noqa: F401 -- its communication is loaded with it

importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # compiles a kernel

if __name__ == "__main__":
    runpy.run_path("train.py", run_name="__main__")
