"""Jobs of the page that plans transformers, which a worker process runs: estimate, draw, write, search and size."""

from __future__ import annotations

import io
import json
import tempfile
import time
import zipfile
from dataclasses import asdict
from functools import lru_cache
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpgo.base.messages import pluralize
from hpgo.base.units import format_seconds
from hpgo.errors import ArgumentError, HpgoError
from hpgo.hardware.cluster import Cluster
from hpgo.llm.estimate import constants_of, estimate_llm, on_platform, stack_on, stages_of, step_timeline
from hpgo.llm.plan import LlmPlan
from hpgo.llm.search import plan_llm
from hpgo.model.families.reading import VERSION_KEY
from hpgo.model.formats.transformers import VERSION, read_transformer
from hpgo.page.settings import MAX_SIZE
from hpgo.page.transformers.address import asked_of, command_of, configuration_words, known_model, size_command_of
from hpgo.page.transformers.facts import estimate_facts, search_facts, size_facts

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpgo.llm.estimate import LlmEstimate
    from hpgo.model.transformer import Transformer
    from hpgo.page.planned.jobs import File
    from hpgo.page.transformers.address import LlmAddress
    from hpgo.page.transformers.jobs import LlmJob

_TOLD_EVERY_S = 0.1
"""Time between two reports of progress. More reports than a page can paint would only take time from the search."""
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""Time of all files in an archive, the first that the format has, so that equal plans give equal archives."""


def answer(job: LlmJob, tell: Callable[[dict[str, Any]], object]) -> bytes:
    """Run a job and return the response body. Raises HpgoError for invalid requests. Searches report progress."""
    if job.wanted == "look":
        read(job.files[0][1])
        return b""
    asked = asked_of(job.items)
    held = dict(job.files)
    model = asked.changed(_model(held[asked.model]) if asked.model in held else known_model(asked.model))
    if job.wanted == "transformer.json":
        return _json({VERSION_KEY: VERSION} | asdict(model))
    titles = {name: file.title for name, file in held.items()}
    # A changed shape has no name, so commands name the file that the page saves.
    name = "transformer.json" if asked.shape else titles.get(asked.model, asked.model)
    if job.wanted == "size":
        return _json(_sizes(asked, model, tell) | {"command": size_command_of(asked, model=name)})
    cluster = _cluster(held[asked.cluster]) if asked.cluster in held else Cluster.preset(asked.cluster)
    names = {"model": name, "cluster": titles.get(asked.cluster, asked.cluster)}
    if job.wanted == "search":
        return _json(_searched(asked, model, cluster, names, tell))
    whole, cluster = cluster, asked.part(cluster)
    found = _estimated(asked, model, cluster)
    if job.wanted == "estimate.json":
        # No option names a part of each node, so such a configuration has the command of its search.
        command = (
            command_of(asked, "estimate", **names, words=_own(asked, cluster))
            if cluster is whole
            else command_of(asked, "plan", **names, words=_limits(asked))
        )
        each = None if cluster is whole else asked.gpus_per_node
        return _json(estimate_facts(found, cluster, model, gpus_per_node=each) | {"command": command})
    if job.wanted == "timeline.svg":
        return _drawn(asked, found, model, cluster)
    plan = LlmPlan.of(found, model, cluster, framework=asked.framework)  # type: ignore[arg-type]
    if job.wanted == "llm-plan.json":
        return f"{plan.to_json()}\n".encode()
    return _archive(plan, command_of(asked, "plan", **names, words=_limits(asked)))


def read(file: File) -> Transformer | Cluster:
    """Return the content of a file. Raises HpgoError, with the title of the file, if it is of another kind."""
    # Readers use the name of the file, as the name of what is in it.
    with tempfile.TemporaryDirectory(prefix="hpgo-") as folder:
        path = Path(folder) / (Path(file.title).name or "file")
        path.write_bytes(file.body)
        try:
            return read_transformer(path) if file.kind == "config" else Cluster.read(path)
        except HpgoError as error:
            raise error.reworded(error.message.replace(f"{folder}/", "")) from None


@lru_cache(maxsize=4)
def _model(file: File) -> Transformer:
    found = read(file)
    assert not isinstance(found, Cluster)  # noqa: S101 -- checked when it was loaded
    return found


@lru_cache(maxsize=4)
def _cluster(file: File) -> Cluster:
    found = read(file)
    assert isinstance(found, Cluster)  # noqa: S101 -- checked when it was loaded
    return found


def _estimated(asked: LlmAddress, model: Transformer, cluster: Cluster) -> LlmEstimate:
    """Return the estimate of the configuration in an address."""
    return estimate_llm(
        model,
        cluster,
        global_batch_size=asked.global_batch_size,
        seq_length=asked.seq_length,
        precision=asked.precision,
        framework=asked.framework,  # type: ignore[arg-type]
        devices=asked.gpus or asked.devices,
        **asked.configuration,
    )


def _own(asked: LlmAddress, cluster: Cluster) -> list[str]:
    """Return the options of `hpgo llm estimate` for the configuration in an address."""
    gpus = asked.gpus or asked.devices or cluster.devices
    words = ["--framework", asked.framework]
    words += [] if gpus == cluster.devices else ["--devices", str(gpus)]
    return [*words, *configuration_words(asked.configuration)]


def _limits(asked: LlmAddress) -> list[str]:
    """Return the options of `hpgo llm plan` that restrict the search of an address."""
    words = [] if asked.framework == "megatron" else ["--framework", asked.framework]
    return [*words, *([] if asked.devices is None else ["--devices", str(asked.devices)])]


def _searched(
    asked: LlmAddress, model: Transformer, cluster: Cluster, names: dict[str, str],
    tell: Callable[[dict[str, Any]], object],
) -> dict[str, Any]:  # fmt: skip
    told_s, best_s = time.monotonic(), float("inf")

    def progress(bounded: int, step_s: float) -> None:
        nonlocal told_s, best_s
        best_s = min(best_s, step_s)
        if (now_s := time.monotonic()) > told_s + _TOLD_EVERY_S:
            told_s = now_s
            best = f", shortest step so far {format_seconds(best_s)}" if isfinite(best_s) else ""
            tell({"words": f"{pluralize(bounded, 'configuration')} bounded one by one{best}"})

    try:
        found = plan_llm(
            model,
            cluster,
            global_batch_size=asked.global_batch_size,
            seq_length=asked.seq_length,
            precision=asked.precision,
            framework=asked.framework,  # type: ignore[arg-type]
            devices=asked.devices,
            progress=progress,
        )
    except KeyboardInterrupt:
        raise HpgoError("the search was stopped before it ended", "search again, or fix more settings") from None
    return search_facts(found, cluster) | {"command": command_of(asked, "plan", **names, words=_limits(asked))}


def _sizes(asked: LlmAddress, model: Transformer, tell: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    from hpgo.llm.size import KINDS, size_llm

    def progress(share: float, words: str) -> None:
        tell({"share": share, "words": words})

    if asked.tokens is None:
        raise ArgumentError("the address has no tokens", "give the tokens of the whole run, such as 15T")
    return size_facts(
        size_llm(
            model,
            tokens=asked.tokens,
            days=asked.days,
            hour_prices=asked.hour_prices or None,
            on=list(asked.hour_prices) or KINDS,
            gpus=(1, asked.max_gpus),
            seq_length=asked.seq_length,
            precision=asked.precision,
            framework=asked.framework,  # type: ignore[arg-type]
            progress=progress,
        )
    )


def _drawn(asked: LlmAddress, found: LlmEstimate, model: Transformer, cluster: Cluster) -> bytes:
    """Return the picture of one simulated step."""
    from hpgo.draw import render

    config = found.parallelism
    if (actions := 2 * config.num_stages * found.micro_batches) > MAX_SIZE.actions:
        raise ArgumentError(
            f"the step has {actions:,} passes, but the limit of the page is {MAX_SIZE.actions:,}", "", code="too_large"
        )
    part = cluster.first(found.gpus)
    constants = constants_of(part, stack_on(None, part, asked.framework, None), None, model)
    stages = stages_of(
        model, on_platform(part, None), config, global_batch_size=asked.global_batch_size,
        seq_length=asked.seq_length, constants=constants,
    )  # fmt: skip
    return render(step_timeline(stages), ".svg", width_px=asked.width_px, table=False)


def _archive(plan: LlmPlan, command: str) -> bytes:
    """Return the job folder of a plan as a zip archive."""
    from hpgo import jobs

    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in jobs.files(plan, command=command).items():
            archive.writestr(zipfile.ZipInfo(f"job/{name}", _EPOCH), text)
    return stream.getvalue()


def _json(record: dict[str, Any]) -> bytes:
    return json.dumps(record, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
