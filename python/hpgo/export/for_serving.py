"""Engines that serve models: how many blocks each stage of their pipeline gets.

An engine builds the model itself and counts nothing but transformer blocks: what embeds lies on its first stage and
what predicts on its last, whatever is asked for. So plans are needed that cut there: `hpgo partition --framework NAME`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpgo import _core
from hpgo.base.messages import pluralize, safe_repr
from hpgo.base.quoting import in_comment, in_python, in_shell
from hpgo.base.units import format_seconds
from hpgo.errors import ArgumentError, InfeasibleError
from hpgo.model.profile import Profile
from hpgo.planning.chain.plans import ChainPlan
from hpgo.planning.plans import Plan
from hpgo.programs.blocks import Blocks

if TYPE_CHECKING:
    from hpgo.export.targets import Place, Target

_SLOT = re.compile(r"(.*):([0-9]+)", re.DOTALL)

_MODULE = '''

def split_points(blocks="model.layers"):
    """For `accelerate.prepare_pippy`: the first block of each process but the first. `blocks` is the model's list."""
    return [f"{blocks}.{sum(BLOCKS[:stage])}" for stage in range(1, len(BLOCKS))]


def device_map(model, blocks="model.layers", devices=None):
    """For `accelerate.dispatch_model`: what stands before the blocks goes with the first, what stands behind with the
    last. `devices` are those of the stages, DEVICES unless given."""
    devices = DEVICES if devices is None else list(devices)
    if len(devices) != len(BLOCKS):
        raise ValueError(f"the plan has {len(BLOCKS)} stages, but {len(devices)} devices are given")
    counted = len(model.get_submodule(blocks))
    if counted != sum(BLOCKS):
        raise ValueError(f"the plan is for {sum(BLOCKS)} blocks, but `{blocks}` has {counted}")
    places, passed = {}, False

    def place(module, prefix):
        nonlocal passed
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, _ in own:
            places[prefix + name] = devices[-1 if passed else 0]
        for name, child in module.named_children():
            path = prefix + name
            if path == blocks:
                stages = [stage for stage, count in enumerate(BLOCKS) for _ in range(count)]
                places.update({f"{blocks}.{block}": devices[stage] for block, stage in enumerate(stages)})
                passed = True
            elif blocks.startswith(path + "."):
                place(child, path + ".")
            else:
                places[path] = devices[-1 if passed else 0]

    place(model, "")
    return places
'''


@dataclass(frozen=True, slots=True)
class _Serving:
    """What an engine is told of a plan."""

    blocks: tuple[int, ...]
    """Of each stage."""
    hosts: tuple[str, ...]
    """For each stage, where it runs."""
    gpus: int
    """GPUs of each stage, which share its layers."""
    notes: tuple[str, ...]

    @property
    def visible(self) -> str | None:
        """The GPUs in the order of the stages, if all are of one machine that has several."""
        slots = [_SLOT.fullmatch(host) for host in self.hosts]
        if not all(slots) or len({found[1] for found in slots if found}) > 1:
            return None
        firsts = (int(found[2]) * self.gpus for found in slots if found)
        return ",".join(str(first + gpu) for first in firsts for gpu in range(self.gpus))


def vllm(given: object, target: Target, place: Place) -> dict[str, str]:
    """A script that sets `VLLM_PP_LAYER_PARTITION` and the sizes, and serves the model that it is given."""
    serving = _serving(given, target)
    sizes = f"--pipeline-parallel-size {len(serving.blocks)} --tensor-parallel-size {serving.gpus}"
    return _script(serving, place, "VLLM_PP_LAYER_PARTITION", f'vllm serve "$@" {sizes}')


def sglang(given: object, target: Target, place: Place) -> dict[str, str]:
    """A script that sets `SGLANG_PP_LAYER_PARTITION` and the sizes, and serves: `--model-path` is for its caller."""
    serving = _serving(given, target)
    sizes = f"--pp-size {len(serving.blocks)} --tp-size {serving.gpus}"
    return _script(serving, place, "SGLANG_PP_LAYER_PARTITION", f'python3 -m sglang.launch_server "$@" {sizes}')


def tensorrt_llm(given: object, target: Target, place: Place) -> dict[str, str]:
    """Return a script that serves, and a file for its `--config` with the blocks of each stage: `pp_partition`."""
    serving = _serving(given, target)
    sizes = f"--pp_size {len(serving.blocks)} --tp_size {serving.gpus}"
    config = place.name("llm-api.yaml")
    texts = _script(serving, place, "", f'trtllm-serve "$@" {sizes} --config "$(dirname "$0")"/{in_shell(config)}')
    lines = [*(f"# {line}" for line in serving.notes), f"pp_partition: {list(serving.blocks)}"]
    return texts | {config: "\n".join(lines) + "\n"}


def llama_cpp(given: object, target: Target, place: Place) -> dict[str, str]:
    """A script that serves with `--tensor-split` by layers. The output counts as one more layer, on the last device."""
    serving = _serving(given, target)
    if serving.gpus > 1:
        raise ArgumentError(
            f"a host of the plan is {serving.gpus} GPUs, which llama.cpp can't join",
            "plan with a host for each GPU",
            code="unsupported",
        )
    *most, last = serving.blocks
    split = ",".join(map(str, [*most, last + 1]))
    command = f'llama-server "$@" --split-mode layer --gpu-layers {sum(serving.blocks) + 1} --tensor-split {split}'
    return _script(serving, place, "", command)


def accelerate(given: object, target: Target, place: Place) -> dict[str, str]:
    """A Python module: BLOCKS of each stage, `split_points` for pipelines and `device_map` for one process."""
    serving = _serving(given, target)
    if serving.gpus > 1:
        raise ArgumentError(
            f"a host of the plan is {serving.gpus} GPUs, which accelerate can't join",
            "plan with a host for each GPU",
            code="unsupported",
        )
    visible = serving.visible
    devices = list(range(len(serving.blocks))) if visible is None else [int(slot) for slot in visible.split(",")]
    lines = [
        *(f"# {line}" for line in serving.notes),
        f"BLOCKS = {in_python(list(serving.blocks))}",
        f"DEVICES = {in_python(devices)}",
    ]
    return {place.main or "planned.py": "\n".join(lines) + "\n" + _MODULE}


def _script(serving: _Serving, place: Place, variable: str, command: str) -> dict[str, str]:
    lines = ["#!/usr/bin/env bash", *(f"# {line}" for line in serving.notes)]
    if serving.visible is not None:
        lines.append(f"export CUDA_VISIBLE_DEVICES={serving.visible}")
    if variable:
        lines.append(f"export {variable}={','.join(map(str, serving.blocks))}")
    return {place.main or "serve.sh": "\n".join([*lines, f"exec {command}"]) + "\n"}


def _serving(given: object, target: Target) -> _Serving:
    """Checks a plan for an engine; raises ArgumentError for one that it can't serve by."""
    if isinstance(given, ChainPlan):
        blocks, hosts, gpus = (
            _of_chain(given, target),
            [stage.hosts[0] for stage in given.stages],
            given.gpus_per_device,
        )
        speed = f"a batch of {given.batch_size} every {format_seconds(given.interval_s)} at best"
        title, more = f"{in_comment(given.model)}: {speed}", []
    elif isinstance(given, Plan):
        blocks, hosts, gpus = _of_training(given, target)
        title = f"{in_comment(given.profile)} on {in_comment(given.cluster)}"
        better = f"`hpgo partition --framework {target.name}` plans for that"
        more = [f"a training plan: its stages balance forward and backward passes, not serving; {better}"]
    else:
        raise ArgumentError(
            f"the plan is {safe_repr(given)}", f"make one, with `hpgo partition --framework {target.name}`"
        )
    tried = [f"tried with {target.tested}"] if target.tested else []
    rows = [
        f"stage {stage} on {in_comment(host)}: {pluralize(count, 'block')}"
        for stage, (host, count) in enumerate(zip(hosts, blocks, strict=True))
    ]
    made = f"made by hpgo {_core.__version__} for {target.label}"
    return _Serving(blocks, tuple(hosts), gpus, (title, made, *tried, *more, *rows))


def _of_chain(plan: ChainPlan, target: Target) -> tuple[int, ...]:
    again = f"plan again with `hpgo partition --framework {target.name}`, for a profile and a cluster"
    if not plan.blocks:
        raise ArgumentError(
            f"the plan does not count blocks, which is all that {target.title} is told", again, code="unsupported"
        )
    for number, stage in enumerate(plan.stages, 1):
        if len(stage.hosts) > 1:
            raise ArgumentError(
                f"stage {number} runs on {len(stage.hosts)} hosts that take turns, which {target.title} can't do",
                "leave `--max-replicas` at 1, and serve copies of the whole model instead",
                code="unsupported",
            )
    if plan.objective == "bits" or len({hop.bits for hop in plan.hops}) > 1:
        raise ArgumentError(
            f"the plan narrows values between stages, which {target.title} can't do",
            "drop `--bits`, and plan for another objective",
            code="unsupported",
        )
    return plan.blocks


def _of_training(plan: Plan, target: Target) -> tuple[tuple[int, ...], list[str], int]:
    assumed = plan.assumed
    for number, stage in enumerate(plan.stages):
        if stage.replicas > 1:
            raise ArgumentError(
                f"stage {number} of this training plan has {stage.replicas} replicas, which {target.title} can't run",
                f"plan inference, with `hpgo partition --framework {target.name}`",
                code="unsupported",
            )
        if stage.headroom_bytes < 0:
            raise InfeasibleError(
                f"the plan does not fit: stage {number} lacks {-stage.headroom_bytes / 1e9:.3g} GB",
                f"plan inference, with `hpgo partition --framework {target.name}`",
                code="insufficient_memory",
            )
    layers = [stage.layers for stage in plan.stages]
    row = assumed.blocks
    if row is None and isinstance(assumed.profile, Profile):
        row = Blocks.of(assumed.profile)
    if row is None:
        row = Blocks.among((layer for ids in layers for layer in ids), name=plan.profile)
    counts = row.counts(layers, target.title)
    if 0 in counts:
        raise ArgumentError(
            f"stage {counts.index(0)} has no block, but {target.title} needs one on each",
            f"plan inference, with `hpgo partition --framework {target.name}`",
            code="unsupported",
        )
    names = [
        f"machine{number}:{slot}" if count > 1 else f"machine{number}"
        for number, count in enumerate(plan.nodes)
        for slot in range(count)
    ]
    return counts, [names[stage.devices[0]] for stage in plan.stages], assumed.gpus_per_device
