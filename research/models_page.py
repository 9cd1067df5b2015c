"""Fill in the tables of docs/models.md: parameters that hpgo counts, beside those that transformers builds.

    python research/models_page.py docs/models.md [--configs FOLDER]

Every family is read with the defaults of its class; `--configs` adds a table of files with the values of public models,
and `FOLDER/parameters.json` with what transformers counts for each.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from class_defaults import of_type
from pages import fill

from hpgo.errors import HpgoError
from hpgo.jobs.deepspeed import check_language_model
from hpgo.llm.frameworks import framework_support
from hpgo.model.families import family, family_names
from hpgo.model.formats.transformers import of_document

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hpgo.model.transformer import Transformer

REASON = re.compile(
    r"^(?:has no settings? for|does not support|runs fused attention(?:, which has no| without)) "
    r"(.*?), (?:which|but) .*"
)
"""Reason of a refusal, with the words around it that repeat in each row."""
RUNS = "| model type | Megatron-LM | Megatron-Bridge | torchtitan | DeepSpeed |\n|---|---|---|---|---|"
HEAD = "| {} | blocks | parameters | active | transformers {} |\n|---|---|---:|---:|---|"


def row(name: str, config: dict[str, Any], theirs: int | str) -> str:
    """Return a row of the table: what hpgo reads, and whether transformers builds the same number of parameters."""
    try:
        model = of_document(config)
    except HpgoError as error:
        why = error.message.removeprefix("text: ")
        return f"| {name} | | refused: {why} | | {theirs if isinstance(theirs, str) else f'{theirs:,}'} |"
    count = model.parameters
    same = theirs if isinstance(theirs, str) else "equal" if theirs == count else f"{theirs:,}"
    return f"| {name} | {blocks(model)} | {count:,} | {model.active_parameters:,} | {same} |"


def blocks(model: Transformer) -> str:
    """Return the number of blocks and what their mixers are."""
    found = []
    for kind, count in model.kinds.items():
        block = model.block(kind)
        mixer = "latent attention" if block.latent is not None else "attention" if block.attention else ""
        if block.scans:
            mixer += (" and " if mixer else "") + "scan"
        network = "experts" if block.experts is not None else "dense" if block.mlp is not None else ""
        words = ", ".join(part for part in (mixer or ("convolution" if block.convs else ""), network) if part)
        found.append((words, count))
    counts: dict[str, int] = {}
    for words, count in found:
        counts[words] = counts.get(words, 0) + count
    return "; ".join(f"{count} {words}" for words, count in counts.items())


def built(kind: str) -> int | str:
    """Return the parameters of a type's model with its defaults, on the meta device; or why none is built."""
    import torch
    import transformers

    try:
        with torch.device("meta"):
            config = transformers.AutoConfig.for_model(kind)
            if family(kind).shape.get("embeds", True):
                model = transformers.AutoModelForCausalLM.from_config(config)
            else:
                model = getattr(transformers, of_type(kind)["class"])(config)
    except Exception as error:  # noqa: BLE001 -- some defaults make no model
        return f"builds none: {type(error).__name__}"
    return sum(one.numel() for one in model.parameters())


def families() -> Iterable[str]:
    """Yield the rows of all families with the defaults of their classes."""
    for kind in family_names():
        yield row(f"`{kind}`", {"model_type": kind}, built(kind))


def frameworks() -> Iterable[str]:
    """Yield the rows of all families with the frameworks that train them, or the first reason why one does not."""
    for kind in family_names():
        try:
            model = of_document({"model_type": kind})
        except HpgoError:
            continue  # in the table of families
        cells = []
        for name in ("megatron", "megatron-bridge", "torchtitan", "deepspeed"):
            lack = framework_support(name)[1].lacking(model)
            cells.append("runs" if lack is None else re.sub(REASON, r"\1", lack.why))
        # Megatron-Bridge lacks what Megatron-LM lacks, and more.
        if cells[1] == cells[0] != "runs":
            cells[1] = "the same"
        if cells[-1] == "runs" and not _is_language_model(model):
            cells[-1] = "with a script of yours"
        yield f"| `{kind}` | {' | '.join(cells)} |"


def _is_language_model(model: Transformer) -> bool:
    try:
        check_language_model(model)
    except HpgoError:
        return False
    return True


def configs(folder: Path) -> Iterable[str]:
    """Yield the rows of the files in a folder."""
    counts = json.loads((folder / "parameters.json").read_text(encoding="utf-8"))
    for file in sorted(folder.glob("*.json")):
        if file.stem in counts:
            yield row(file.stem, json.loads(file.read_text(encoding="utf-8")), counts[file.stem])


def main() -> None:
    """Fill in the page."""
    import transformers

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("--configs", type=Path, help="folder of config files")
    asked = parser.parse_args()
    version = transformers.__version__
    tables = {"families": "\n".join([HEAD.format("model type", version), *families()])}
    tables["runs"] = "\n".join([RUNS, *frameworks()])
    if asked.configs is not None:
        tables["configs"] = "\n".join([HEAD.format("model", version), *configs(asked.configs)])
    asked.page.write_text(fill(asked.page.read_text(encoding="utf-8"), tables), encoding="utf-8")


if __name__ == "__main__":
    main()
