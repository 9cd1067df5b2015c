"""Small public models whose job folders start with DeepSpeed, on CPUs.

For each model, transformers builds the model of `config.json`, the folder's `train.py` checks that it is the planned
one, and DeepSpeed trains the five steps of the smoke run on processes with gloo. Each process is a fork of this one.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import runpy
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import deepspeed_on_cpu
import transformers
from forks import together
from results import Start, start_each
from small_models import MODELS, SmallModel

from hpgo.export.targets import find
from hpgo.llm.frameworks import framework_support

if TYPE_CHECKING:
    from pathlib import Path

    from hpgo.llm.plan import LlmPlan

RELEASE = version("deepspeed")
RATE = re.compile(r"'lr': [^,]+")
"""The folder's learning rate, with which five steps are not enough for the loss of a small model to fall.

The loss is one of a single micro-batch, so that micro-batches have to be large for it to vary little."""

ROUNDED = 0.02
"""Largest difference between losses of the same steps with and without tensor parallelism, in 16 bits."""

WARM = ("datasets", "deepspeed.runtime.zero.muon.muon_optimizer", "transformers.modeling_layers")
"""Modules that DeepSpeed and transformers import late, with PyTorch's compiler. Each takes seconds, and each fork
of this process would import them again."""


def started(model: SmallModel, at: Path) -> Start:
    """Build and train one model. Raises AssertionError with the end of a log."""
    transformer = model.read(at)
    lacking = framework_support("deepspeed")[1].lacking(transformer)
    if lacking is not None:
        assert not model.deepspeed, f"{model.name} is refused: {lacking.why}"
        return Start(model.name, "deepspeed", RELEASE, refused=lacking.why.partition(",")[0])
    if not model.deepspeed:
        return Start(model.name, "deepspeed", RELEASE, refused="not run")
    plan = model.plan(at, "deepspeed")
    folder = at / model.name
    losses = _losses(model, plan, folder)
    (found,) = together(1, read, model.config, folder)
    compared, parameters = found
    assert parameters == transformer.parameters, (parameters, transformer.parameters)
    assert losses[-1] < losses[0], losses
    config = plan.estimate.parallelism
    if config.tp > 1:
        whole = model.plan(at, "deepspeed", tp=1, devices=plan.estimate.gpus // config.tp)
        wanted = _losses(model, whole, at / f"{model.name}-whole")
        assert all(abs(loss - one) < ROUNDED for loss, one in zip(losses, wanted, strict=True)), (losses, wanted)
    named, gpus = config.named(), plan.estimate.gpus
    return Start(model.name, "deepspeed", RELEASE, named, gpus, compared, parameters, losses)


def _losses(model: SmallModel, plan: LlmPlan, folder: Path) -> list[float]:
    """Write the folder of a plan of a model, start its smoke run, and return the loss of each step."""
    words = model.write(plan, find("deepspeed"), folder)
    script = folder / "train.py"
    text = script.read_text(encoding="utf-8")
    changed, count = RATE.subn("'lr': 0.003", text)
    assert count == 1, count
    script.write_text(changed, encoding="utf-8")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(model.config), encoding="utf-8")
    log = folder / "smoke.log"
    together(plan.estimate.gpus, _train, words, folder, logs={0: log})
    losses = [float(loss) for loss in re.findall(r"step \d+ of 5: loss (\S+),", log.read_text(encoding="utf-8"))]
    assert len(losses) == 5, log.read_text(encoding="utf-8")[-2000:]
    return losses


def read(config: dict[str, Any], folder: Path) -> tuple[int, int]:
    """Return the number of values of the folder's plan that `config.json` has, too, and the parameters of the model."""
    _enter(folder)
    planned = importlib.import_module("planned")
    train = importlib.import_module("train")
    loaded = transformers.AutoConfig.from_pretrained(os.environ["MODEL_CONFIG"])
    planned.check_model(loaded)
    stated = {name: value for name, value in planned.MODEL.items() if getattr(loaded, name, None) is not None}
    wrong = {name: (value, config[name]) for name, value in stated.items() if config.get(name, value) != value}
    assert not wrong, f"found and wanted: {wrong}"
    return len(stated), train.parameters_of_model()


def _train(words: list[str], folder: Path) -> None:
    _enter(folder)
    sys.argv = ["train.py", *words]
    runpy.run_path("train.py", run_name="__main__")


def _enter(folder: Path) -> None:
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    os.environ["MODEL_CONFIG"] = str(folder / "model")


if __name__ == "__main__":
    assert deepspeed_on_cpu.deepspeed is not None
    for name in WARM:
        importlib.import_module(name)
    start_each(MODELS, started)
