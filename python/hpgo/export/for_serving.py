"""Export to engines that serve models: the number of blocks of each pipeline stage.

An engine builds the model itself and counts transformer blocks only. It always places the embedding on the first stage
and the LM head on the last. So a plan must cut between blocks: `hpgo partition --framework NAME` makes such plans.
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
    """Return the first block of each process but the first, for `accelerate.prepare_pippy`. `blocks` names the list."""
    return [f"{blocks}.{sum(BLOCKS[:stage])}" for stage in range(1, len(BLOCKS))]


def device_map(model, blocks="model.layers", devices=None):
    """Return a device map for `accelerate.dispatch_model`: modules before the blocks are placed with the first block,
    modules after them with the last. `devices` are the devices of the stages, DEVICES by default."""
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
    """The part of a plan that an engine can use."""

    blocks: tuple[int, ...]
    """Number of blocks of each stage."""
    hosts: tuple[str, ...]
    """Host of each stage, `NAME` or `NAME:SLOT`."""
    gpus: int
    """Number of GPUs that divide the layers of each stage."""
    notes: tuple[str, ...]
    """Comments for the reader of the file."""

    @property
    def visible(self) -> str | None:
        """GPUs in the order of the stages, if all are on one node with several GPUs; otherwise None."""
        # CUDA_VISIBLE_DEVICES acts on one node only. For several nodes, the user starts each stage on its host.
        slots = [_SLOT.fullmatch(host) for host in self.hosts]
        if not all(slots) or len({found[1] for found in slots if found}) > 1:
            return None
        firsts = (int(found[2]) * self.gpus for found in slots if found)
        return ",".join(str(first + gpu) for first in firsts for gpu in range(self.gpus))


def vllm(given: object, target: Target, place: Place) -> dict[str, str]:
    """Return a script that serves with `VLLM_PP_LAYER_PARTITION` and the sizes. The caller passes the model."""
    serving = _serving(given, target)
    sizes = f"--pipeline-parallel-size {len(serving.blocks)} --tensor-parallel-size {serving.gpus}"
    return _script(serving, place, "VLLM_PP_LAYER_PARTITION", f'vllm serve "$@" {sizes}')


def sglang(given: object, target: Target, place: Place) -> dict[str, str]:
    """Return a script that serves with `SGLANG_PP_LAYER_PARTITION` and the sizes. The caller passes `--model-path`."""
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
    """Return a script that serves with `--tensor-split` by layers."""
    serving = _serving(given, target)
    if serving.gpus > 1:
        raise ArgumentError(
            f"a host of the plan is {serving.gpus} GPUs, but llama.cpp runs each stage on one GPU",
            "plan with one host per GPU",
            code="unsupported",
        )
    # llama.cpp counts the output as one more layer, which belongs to the last device.
    *maximum, last = serving.blocks
    split = ",".join(map(str, [*maximum, last + 1]))
    command = f'llama-server "$@" --split-mode layer --gpu-layers {sum(serving.blocks) + 1} --tensor-split {split}'
    return _script(serving, place, "", command)


def accelerate(given: object, target: Target, place: Place) -> dict[str, str]:
    """Return a Python module: BLOCKS of each stage, `split_points` for pipelines and `device_map` for one process."""
    serving = _serving(given, target)
    if serving.gpus > 1:
        raise ArgumentError(
            f"a host of the plan is {serving.gpus} GPUs, but accelerate runs each stage on one GPU",
            "plan with one host per GPU",
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
    """Return the part of a plan that an engine can use. Raise ArgumentError for a plan that it can't run."""
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
            f"the plan is {safe_repr(given)}", f"make one with `hpgo partition --framework {target.name}`"
        )
    tested = [f"tested with {target.tested}"] if target.tested else []
    rows = [
        f"stage {stage} on {in_comment(host)}: {pluralize(count, 'block')}"
        for stage, (host, count) in enumerate(zip(hosts, blocks, strict=True))
    ]
    made = f"made by hpgo {_core.__version__} for {target.label}"
    return _Serving(blocks, tuple(hosts), gpus, (title, made, *tested, *more, *rows))


def _of_chain(plan: ChainPlan, target: Target) -> tuple[int, ...]:
    again = f"plan again with `hpgo partition --framework {target.name}`, for a profile and a cluster"
    if not plan.blocks:
        raise ArgumentError(f"the plan has no numbers of blocks, which {target.title} needs", again, code="unsupported")
    for number, stage in enumerate(plan.stages, 1):
        if len(stage.hosts) > 1:
            raise ArgumentError(
                f"stage {number} runs on {len(stage.hosts)} hosts in turn, which {target.title} can't do",
                "use `--max-replicas 1`, and serve copies of the whole model instead",
                code="unsupported",
            )
    # Different bit widths per boundary show quantization, even if the objective was another.
    if plan.objective == "bits" or len({hop.bits for hop in plan.hops}) > 1:
        raise ArgumentError(
            f"the plan quantizes activations between stages, which {target.title} can't do",
            "plan without `--bits`, for another objective",
            code="unsupported",
        )
    return plan.blocks


def _of_training(plan: Plan, target: Target) -> tuple[tuple[int, ...], list[str], int]:
    assumed = plan.assumed
    for number, stage in enumerate(plan.stages):
        if stage.replicas > 1:
            raise ArgumentError(
                f"stage {number} of this training plan has {stage.replicas} replicas, which {target.title} can't run",
                f"plan for inference with `hpgo partition --framework {target.name}`",
                code="unsupported",
            )
        if stage.free_bytes < 0:
            raise InfeasibleError(
                f"the plan does not fit: stage {number} lacks {-stage.free_bytes / 1e9:.3g} GB",
                f"plan for inference with `hpgo partition --framework {target.name}`",
                code="insufficient_memory",
            )
    layers = [stage.layers for stage in plan.stages]
    row = assumed.blocks
    if row is None and isinstance(assumed.profile, Profile):
        row = Blocks.of(assumed.profile)
    if row is None:
        row = Blocks.among((layer for ids in layers for layer in ids), name=plan.profile)
    counts = row.counts(layers, target.title)
    # Engines divide the list of blocks and start no stage without one.
    if 0 in counts:
        raise ArgumentError(
            f"stage {counts.index(0)} has no block, but {target.title} needs one on each",
            f"plan for inference with `hpgo partition --framework {target.name}`",
            code="unsupported",
        )
    names = [
        f"node{number}:{slot}" if count > 1 else f"node{number}"
        for number, count in enumerate(plan.nodes)
        for slot in range(count)
    ]
    return counts, [names[stage.devices[0]] for stage in plan.stages], assumed.gpus_per_device
