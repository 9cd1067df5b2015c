"""Profiles of workloads, measured on this machine, as input of `hpgo plan`."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
import threading
import time
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch

from hpgo._core import __version__
from hpgo.base.checks import check_int, check_is, check_list, number
from hpgo.base.documents import parse, read_text, write_text
from hpgo.base.files import as_path, refused
from hpgo.base.memory_check import free_bytes
from hpgo.base.messages import percent, pluralize, safe_repr
from hpgo.base.units import format_bytes, format_seconds
from hpgo.errors import ArgumentError, FileError, RunError
from hpgo.model.profile import Layer, Profile, TiedWeight
from hpgo.planning.notes import noise as varying
from hpgo.runtime.cuts import parameter_of
from hpgo.runtime.devices import check_types, device_named
from hpgo.runtime.grouping import Grain
from hpgo.runtime.heap import keep_freed
from hpgo.runtime.layer_times import LayerProfiler
from hpgo.runtime.losses import note
from hpgo.runtime.pass_times import Figures, WholeModelTiming
from hpgo.runtime.user_functions import made_by
from hpgo.runtime.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

_SHARE = 0.5
"""Fraction of the free memory that layers under measurement may fill."""
_APART = 0.1
"""Relative difference between the sum of the layers and the whole model from which on a note reports it."""
_MANIFOLD = 10.0
"""Ratio of the layers' time to the model's from which on it is reported as a factor, not as a percentage."""
_NOISE = 0.1
"""Fraction of processor time used by other processes from which on a note reports it."""
_LONG_S = 60.0
"""Time in seconds for which companion processes run one batch size."""
_STAT = Path("/proc/stat")
_COMPANION = "import sys; from hpgo.runtime.profiling import keep_busy; keep_busy(sys.argv[1])"


@dataclass(frozen=True, slots=True)
class Measurement:
    """A profile, and information on how far to trust it."""

    profile: Profile
    spreads: dict[str, float]
    """Spread of each layer, at the batch size where it is largest: width of the middle half of all passes, relative to
    the typical time."""
    wholes: dict[int, WholeModelTiming]
    """Timing of the whole model, for each batch size at which it ran at once."""
    notes: tuple[str, ...]
    """Remarks for the reader, a sentence each."""


def profile(workload: Workload | str, **options: Any) -> Profile:
    """Measure the layers of `workload` on this machine. `measure` has the same options.

    >>> mlp = profile("mlp:layers=2,width=8", batch_sizes=[2, 4], seconds=0)
    >>> mlp.batch_sizes, [layer.id for layer in mlp.layers], mlp.layers[0].parameter_bytes
    ((2, 4), ['linear-1', 'linear-2'], 288)
    """
    return measure(workload, **options).profile


def measure(
    workload: Workload | str,
    *,
    batch_sizes: Collection[int] = (1,),
    by: Grain = "block",
    dtype: torch.dtype | None = None,
    autocast: torch.dtype | None = None,
    inference: bool = False,
    device: str | torch.device | None = None,
    ranks: int = 1,
    seconds: float = 30.0,
    memory_bytes: float | None = None,
    keep: str | os.PathLike[str] | None = None,
    data: Any = None,
    progress: Callable[[float, str], None] | None = None,
) -> Measurement:
    """Measure the layers of `workload` on this machine, one after the other, forward and backward.

    Args:
        workload: the model to measure, or its name as `Workload.read` takes it. The weights of a named workload take
            memory only while their layer is measured, if it is a configuration's model, a built-in model or a network.
        batch_sizes: numbers of samples in a batch. Layers are measured at each.
        by: unit of a layer in exported models: `block`, `module`, or `op`; in built-in BERT and vision transformers
            also `quarter`, of a block.
        dtype: type of weights, gradients and messages. None is the workload's own.
        autocast: type in which layers compute, regardless of the type of weights. None is no autocast.
        inference: whether layers run forward only, without the loss and in evaluation mode. Backward times and saved
            bytes are 0 then.
        device: `cpu` or `cuda`. None is `cuda` if there is a GPU.
        ranks: number of processes that will share this machine. As many measure at once, each with its share of the
            cores.
        seconds: time for each batch size. Measuring ends before if times are sure to 2 %, and never before each layer
            has run three times.
        memory_bytes: memory that layers may fill at once. None is half of what is free.
        keep: a file for results. The same call continues from it, and removes it at its end.
        data: a data set as `Pipeline.loader` takes it, or the name of a function that returns one. Its first batches,
            8 at most, are measured in turn, so that times are means over data. None is the example of the workload.
        progress: function that is called with the fraction done and a remark.

    Raises ArgumentError for invalid options, RunError if a layer can't run, and FileError if `keep` can't be read or
    written.
    """
    sizes = tuple(sorted({check_int("the batch size", one) for one in check_list("batch_sizes", batch_sizes)}))
    if not sizes:
        raise ArgumentError(
            "batch_sizes is empty, but needs at least one size",
            "give one, such as batch_sizes=[8]",
            code="unknown_name",
        )
    ranks = check_int("ranks", ranks, maximum=2**10)
    seconds = number("seconds", seconds)
    check_is("by", by, str, f"give one of {', '.join(get_args(Grain))}")
    check_types(dtype, autocast)
    if progress is not None and not callable(progress):
        raise ArgumentError(f"progress is {safe_repr(progress)}", "give a function of a fraction and a remark")
    check_is("workload", workload, str | Workload, "give a Workload, or a name such as `gpt:layers=2`")
    check_is("inference", inference, bool, "give True or False")
    if ranks > 1 and not isinstance(workload, str):
        raise ArgumentError(
            "a workload without a name can't be measured by several processes",
            "give `module:function` as the workload",
            code="missing",
        )
    where = device_named(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    # Each rank of a run gets its share of the cores, so times must be measured with the same number of threads.
    threads = max(1, (os.cpu_count() or 1) // ranks)
    if memory_bytes is None:
        memory_bytes = _SHARE * (torch.cuda.mem_get_info(where)[0] if where.type == "cuda" else free_bytes() / ranks)
    else:
        memory_bytes = number("memory_bytes", memory_bytes, above=0)
    setting = {
        "workload": workload if isinstance(workload, str) else workload.name, "by": by, "dtype": _name(dtype),
        "autocast": _name(autocast), "inference": inference, "device": where.type, "ranks": ranks, "threads": threads,
        "hpgo": __version__, "torch": torch.__version__, "memory_bytes": memory_bytes, "batch_sizes": sizes,
        "data": data if isinstance(data, str | None) else type(data).__name__,
    }  # fmt: skip
    kept = _Kept(None if keep is None else as_path(keep, FileError), setting)
    before = torch.get_num_threads()
    if where.type == "cpu":
        # Runs do this, too. Without it, times would include page faults that runs don't have.
        keep_freed()
    torch.set_num_threads(threads)
    try:
        with _companions(ranks - 1, setting) as pids:
            read = (Workload.read(workload, on_meta=True) if isinstance(workload, str) else workload).by(by)
            if isinstance(data, str):
                with torch.random.fork_rng(devices=[]):
                    data = made_by(data, "data", seed=0, wanted="a data set: pairs of inputs and targets")
            others = _Others(pids)
            benches = [
                _bench(
                    read,
                    rows,
                    dtype=dtype,
                    autocast=autocast,
                    inference=inference,
                    device=where,
                    memory_bytes=memory_bytes,
                    seconds=seconds,
                    found=kept.of(rows),
                    tell=_teller(progress, sizes, at, len(read.network.nodes)),
                    measured=kept.write,
                    data=data,
                )
                for at, rows in enumerate(sizes)
            ]
            noise = others.share()
    finally:
        torch.set_num_threads(before)
    kept.remove()
    measured_profile = _profile(read, sizes, benches, dtype, _circumstances(read, setting, where))
    return Measurement(
        measured_profile,
        {layer.id: layer.spread or 0.0 for layer in measured_profile.layers},
        {rows: bench.whole for rows, bench in zip(sizes, benches, strict=True) if bench.whole is not None},
        (
            *varying(measured_profile),
            *_frozen(measured_profile),
            *_notes(read, sizes, benches, noise, inference=inference),
        ),
    )


def _bench(
    workload: Workload, rows: int, *, autocast: torch.dtype | None, device: torch.device, **options: Any
) -> LayerProfiler:
    """Measure one batch size. Return its profiler."""
    if autocast is not None:
        options["autocast"] = partial(torch.autocast, device.type, autocast)
    bench = LayerProfiler(workload, rows, device=device, **options)
    bench.run()
    return bench


def _teller(
    progress: Callable[[float, str], None] | None, sizes: Sequence[int], at: int, layers: int
) -> Callable[[int, str], None]:
    """Return the function that reports progress at one of the batch sizes."""

    def tell(done: int, remark: str) -> None:
        if progress is not None:
            progress((at + done / layers) / len(sizes), f"batch of {sizes[at]}: {remark}")

    return tell


def _profile(
    workload: Workload,
    sizes: tuple[int, ...],
    benches: list[LayerProfiler],
    dtype: torch.dtype | None,
    circumstances: dict[str, Any],
) -> Profile:
    tied_weights, copied = _tied_weights(workload, dtype)
    activations, saved = [one.activation_bytes() for one in benches], [one.saved_bytes() for one in benches]
    layers = []
    for layer in workload.layers:
        figures = [bench.figures[layer] for bench in benches]
        layers.append(
            Layer(
                id=layer,
                name=layer,
                forward_s=tuple(one.forward_s for one in figures),
                backward_s=tuple(one.backward_s for one in figures),
                activation_bytes=tuple(one[layer] for one in activations),
                parameter_bytes=figures[0].parameter_bytes - copied.get(layer, 0),
                saved_bytes=tuple(one[layer] for one in saved),
                input_gradient_s=_known(one.input_gradient_s for one in figures),
                weight_gradient_s=_known(one.weight_gradient_s for one in figures),
                spread=max(one.spread for one in figures),
                frozen_bytes=figures[0].frozen_bytes,
            )
        )
    return Profile(
        workload.name or "model", sizes, tuple(layers), workload.edges, tied_weights=tied_weights, **circumstances
    )


def _tied_weights(workload: Workload, dtype: torch.dtype | None) -> tuple[tuple[TiedWeight, ...], dict[str, int]]:
    """Return the trained weights that layers share, and the bytes of each layer that another layer counts already."""
    place = {layer: at for at, layer in enumerate(workload.layers)}
    shared: dict[tuple[str, ...], int] = {}
    copied: dict[str, int] = {}
    for holders in workload.tied_weights:
        first, *others = sorted((one for one in holders if one[0] in place), key=lambda one: place[one[0]])
        weight = parameter_of(workload.network.make_on_meta(first[0]), first)
        if not weight.requires_grad:
            continue  # without gradients there is nothing to sum, and each stage holds a copy
        size = weight.numel() * (dtype or weight.dtype).itemsize
        for layer, name in others:
            if name in dict(workload.network.make_on_meta(layer).named_parameters()):  # each tensor of a layer once
                copied[layer] = copied.get(layer, 0) + size
        layers = tuple(dict.fromkeys(layer for layer, _ in (first, *others)))
        if len(layers) > 1:
            shared[layers] = shared.get(layers, 0) + size
    return tuple(TiedWeight(layers, size) for layers, size in shared.items()), copied


def _known(values: Iterable[float | None]) -> tuple[float, ...] | None:
    """Return the values as a tuple; None unless all of them are known."""
    # Inference has no backward passes, so these times are None at every batch size.
    held = tuple(values)
    known = tuple(value for value in held if value is not None)
    return known if len(known) == len(held) else None


def _circumstances(workload: Workload, setting: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the fields of a profile that describe where and how it was measured."""
    network = workload.network
    tensors = (one for layer in network.nodes for one in network.make_on_meta(layer).parameters())
    held = [setting["dtype"]] if setting["dtype"] else sorted({_name(one.dtype) or "" for one in tensors})
    autocast = [f"autocast to {setting['autocast']}"] if setting["autocast"] else []
    return {
        "source": f"{workload.built}{', ' if workload.built else ''}{_source(setting, device)}",
        "device": _device(device),
        "machine": platform.node(),
        "dtype": ", ".join([*held, *autocast]),
        "date": time.strftime("%Y-%m-%d"),
        "versions": (("hpgo", __version__), ("torch", str(torch.__version__))),
    }


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()


def _source(setting: dict[str, Any], device: torch.device) -> str:
    share = "" if device.type == "cuda" else f", {pluralize(setting['threads'], 'thread')} for each rank"
    ranks = f", {setting['ranks']} at once" if setting["ranks"] > 1 else ""
    autocast = setting["autocast"] and f"autocast to {setting['autocast']}"
    kinds = ", ".join(filter(None, [setting["dtype"], autocast, setting["inference"] and "inference"]))
    return (
        f"measured on {_device(device)}{share}{ranks}{f', {kinds}' if kinds else ''}; "
        f"hpgo {__version__}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"
    )


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "an unknown processor"


def _frozen(profile: Profile) -> Iterator[str]:
    frozen_bytes = sum(layer.frozen_bytes for layer in profile.layers)
    if frozen_bytes:
        yield (
            f"{format_bytes(frozen_bytes)} of {format_bytes(profile.parameter_bytes)} of weights are frozen: plans give"
            " them no gradients and no optimizer state"
        )


def _notes(
    workload: Workload, sizes: tuple[int, ...], benches: list[LayerProfiler], noise: float, *, inference: bool
) -> Iterator[str]:
    if workload.built:
        yield f"the model is {workload.built}, as `architectures` names it"
    if benches[0].reduction is not None and (remark := note(benches[0].reduction)):
        yield remark
    for rows, bench in zip(sizes, benches, strict=True):
        if bench.lacked is not None:
            yield f"there was no memory to measure layers together, and they ran one by one: {bench.lacked}"
        if bench.whole is not None:
            yield from _apart(rows, bench.whole, sum(bench.saved_bytes().values()))
    if noise > _NOISE:
        yield (
            f"other processes used {100 * noise:.0f} % of this machine's processors meanwhile, so times are too long"
        )
    for holders in workload.tied_weights:
        yield (
            f"{' and '.join(f'`{name}` of `{layer}`' for layer, name in holders)} are one weight:"
            f" different stages keep a copy each{'' if inference else ', and reduce its gradients'}"
        )


def _apart(rows: int, timing: WholeModelTiming, saved_bytes: int) -> Iterator[str]:
    """Yield notes on differences between the layers one by one and the whole model.

    `saved_bytes` is the sum of the layers' saved bytes.
    """
    more_s = timing.sum_s - timing.whole_s
    # A scale of 1 here means that the passes disagree, so the profile keeps the layers' own times.
    if abs(more_s) > _APART * timing.whole_s and timing.scale == 1:
        yield (
            f"for a batch of {rows}, passes are too few or differ too much to compare the layers one by one"
            f" ({format_seconds(timing.sum_s)}) with the model as a whole ({format_seconds(timing.whole_s)}): measure"
            " for longer, or while nothing else runs"
        )
    elif abs(more_s) > _APART * timing.whole_s:
        layer, within_s, alone_s = timing.furthest
        share = (timing.forwards_s - timing.forward_s) / more_s
        where = (
            f"mostly forward, most of all `{layer}` ({format_seconds(alone_s)}, in it {format_seconds(within_s)})"
            if share > 1 / 2 or timing.peak_bytes is None  # inference has no other passes
            else "mostly in backward passes"
        )
        ratio = timing.sum_s / timing.whole_s
        amount = (
            f"{percent(abs(ratio - 1))} {'more' if more_s > 0 else 'less'} one by one than"
            if ratio < _MANIFOLD
            else f"{ratio:.0f} × as long one by one as"
        )
        yield (
            f"for a batch of {rows}, the layers take {amount} the model as a whole: {where}; times in the profile are"
            " scaled to the model's"
        )
    if timing.saved_activation_bytes is not None:
        min_bytes, max_bytes = timing.saved_activation_bytes
        if saved_bytes < (1 - _APART) * min_bytes or saved_bytes > (1 + _APART) * max_bytes:
            yield (
                f"for a batch of {rows}, the model as a whole holds {format_bytes(min_bytes)} after its forward "
                f"pass, and its layers one by one {format_bytes(saved_bytes)}"
            )


class _Kept:
    """Finished measurements in a file, from which the same measurement can continue."""

    def __init__(self, path: Path | None, setting: dict[str, Any]) -> None:
        self._path = path
        # Memory may differ between the calls without changing the times. The round trip makes tuples lists, as in the
        # file.
        self._setting = json.loads(json.dumps({key: one for key, one in setting.items() if key != "memory_bytes"}))
        self._found: dict[int, dict[str, Figures]] = {}
        if path is None:
            return
        try:
            if not path.is_file():
                return
        except OSError as failure:
            raise refused("read", path, failure, FileError, "name another file") from None
        held = parse(read_text(path, FileError), str(path), FileError)
        # A measurement with other settings has other times, so start again and overwrite the file.
        if not isinstance(held, dict) or held.get("setting") != self._setting:
            return
        try:
            self._found = {
                int(rows): {alike: Figures(*one) for alike, one in found.items()}
                for rows, found in held["batches"].items()
            }
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise FileError(
                f"{path} holds no measurements: {error}", "remove the file, and measure again", code="damaged_file"
            ) from error

    def of(self, rows: int) -> dict[str, Figures]:
        """Return the figures at one batch size, by equivalence key of layers. The caller adds to them."""
        return self._found.setdefault(rows, {})

    def write(self) -> None:
        """Write all figures to the file."""
        if self._path is not None:
            batches = {rows: {alike: astuple(one) for alike, one in of.items()} for rows, of in self._found.items()}
            write_text(self._path, json.dumps({"setting": self._setting, "batches": batches}), FileError)

    def remove(self) -> None:
        """Remove the file after the measurement is complete."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


class _Others:
    """Load of this machine's processors by other processes, as far as the system reports it (Linux)."""

    def __init__(self, pids: Collection[int]) -> None:
        self._pids = pids
        self._begin = self._read()

    def share(self) -> float:
        """Return the fraction of all processor time that other processes used since this object was created."""
        begin, end = self._begin, self._read()
        whole_s = end[0] - begin[0]
        return max(0.0, (end[1] - begin[1]) - (end[2] - begin[2])) / whole_s if whole_s > 0 else 0.0

    def _read(self) -> tuple[float, float, float]:
        """Return the total time of all processors, the used part of it, and the part that this measurement used."""
        try:
            fields = [int(one) for one in _STAT.read_text(encoding="ascii").splitlines()[0].split()[1:9]]
            # `/proc/stat` counts clock ticks, Python seconds.
            ours = time.process_time() * os.sysconf("SC_CLK_TCK")
            for pid in self._pids:
                stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
                # Fields 14 and 15 of the file are user and system time. `rpartition` skips the first two, because a
                # process name may contain spaces.
                ours += int(stat[11]) + int(stat[12])
        except (OSError, ValueError, IndexError):
            return 0.0, 0.0, 0.0
        return float(sum(fields)), float(sum(fields) - fields[3] - fields[4]), ours


@contextlib.contextmanager
def _companions(count: int, setting: dict[str, Any]) -> Iterator[list[int]]:
    """Start processes that measure the same layers meanwhile, so that cores and memory are as busy as in a run.

    Yields their process ids. Raises RunError if one of them ends at its start.
    """
    running: list[subprocess.Popen[bytes]] = []
    words = [sys.executable, "-c", _COMPANION, json.dumps(setting)]
    pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
    try:
        # A new session, because Ctrl-C at the terminal is for this process, which then ends the companions.
        running.extend(
            subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=nowhere, start_new_session=True)  # noqa: S603
            for _ in range(count)
        )
        # Wait until each companion computes. Before that, the machine is less busy than in a run.
        if not all(one.stdout.readline() for one in running if one.stdout is not None):
            raise RunError(
                "a process that measures beside this one has ended",
                "free memory, or measure with fewer `ranks`",
                code="wrong_state",
            )
        yield [one.pid for one in running]
    finally:
        for one in running:
            one.kill()
        for one in running:
            one.communicate()


def keep_busy(text: str) -> None:
    """Repeat the measurement that the JSON `text` describes until stdin is closed.

    An empty line on stdout reports that it has begun.
    """
    setting = json.loads(text)
    # Stdin closes when the parent ends for any reason, even by SIGKILL.
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(setting["threads"])
    workload = Workload.read(setting["workload"], on_meta=True).by(setting["by"])
    dtype, autocast = (one and getattr(torch, one) for one in (setting["dtype"], setting["autocast"]))
    device = torch.device(setting["device"])
    if device.type == "cpu":
        keep_freed()
    has_reported = False

    def report_start(_done: int, _remark: str) -> None:
        nonlocal has_reported
        if not has_reported:
            sys.stdout.write("\n")
            sys.stdout.flush()
        has_reported = True

    while True:
        for rows in setting["batch_sizes"]:
            _bench(
                workload,
                rows,
                dtype=dtype,
                autocast=autocast,
                inference=setting["inference"],
                device=device,
                memory_bytes=setting["memory_bytes"],
                seconds=_LONG_S,
                found={},
                tell=report_start,
                measured=lambda: None,
            )


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)


def _name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")
