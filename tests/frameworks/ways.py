"""Random ways of training a transformer, and which of them a framework must refuse, by the rules of docs/llm.md.

The rules are written down a second time: those that the search goes by are not read here.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import hpgo
from hpgo.errors import HpgoError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

GPUS = hpgo.Cluster.preset("h100:4")


@dataclass(frozen=True)
class WayCase:
    """A way as it was asked for, and the plan of it."""

    plan: hpgo.LlmPlan
    model: hpgo.Transformer
    tp: int
    cp: int
    ep: int
    pp: int
    vpp: int
    first_rank_layers: int | None
    last_rank_layers: int | None
    dp: int
    zero_stage: int
    micro_batch_size: int
    global_batch_size: int
    seq_length: int
    recompute: str
    recompute_num_layers: int | None
    sequence_parallel: bool
    precision: str

    @property
    def gpus(self) -> int:
        """All of them."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def micro_batches(self) -> int:
        """Of a step on a replica."""
        return self.global_batch_size // self.dp // self.micro_batch_size

    @property
    def counts(self) -> list[int]:
        """Layers of each stage: as at the ends and evenly between, as many, one less at both ends, or what is left."""
        if (self.first_rank_layers, self.last_rank_layers) != (None, None):
            layers = self.model.layers
            given = [count for count in (self.first_rank_layers, self.last_rank_layers) if count is not None]
            each = (layers - sum(given)) // (self.pp - len(given)) if self.pp > len(given) else 0
            ranks = [each] * self.pp
            ranks[0] = each if self.first_rank_layers is None else self.first_rank_layers
            ranks[-1] = each if self.last_rank_layers is None else self.last_rank_layers
            return [count // self.vpp for count in ranks] * self.vpp
        return self.even_counts

    @property
    def even_counts(self) -> list[int]:
        """Layers of each stage where the ends were not asked to have other numbers."""
        stages, layers = self.pp * self.vpp, self.model.layers
        if layers % stages == 0:
            return [layers // stages] * stages
        if (layers + 2) % stages == 0:
            each = (layers + 2) // stages
            return [each - 1, *[each] * (stages - 2), each - 1]
        each = -(-layers // stages)  # models with experts
        return [max(0, min(each, layers - each * at)) for at in range(stages)]

    @property
    def has_replicas(self) -> bool:
        """Whether a weight is on several GPUs."""
        replicas = self.dp * self.cp
        return replicas > 1 or (self.model.experts > 0 and self.tp * replicas > self.ep)

    @property
    def shared_stage(self) -> int:
        """Stage of ZeRO that is exported. Without replicas, 1 and 2 are the same as 0."""
        return self.zero_stage if self.has_replicas or self.zero_stage == 3 else 0

    @property
    def recomputed_layers(self) -> int | None:
        """Layers of each stage that are recomputed; None for all, also where no stage has more."""
        number = self.recompute_num_layers
        return None if number is not None and max(self.counts) <= number and not self.model.further_tokens else number

    @property
    def is_uneven(self) -> bool:
        """Whether the first or the last rank has other numbers of layers than the even split gives it."""
        return self.counts != self.even_counts


def ways(
    number: int,
    model: Callable[[random.Random], dict[str, Any]],
    *,
    often: tuple[int, ...] = (0, 1, 2, 3),
    simple: float = 0.0,
    adapters: float = 0.0,
) -> Iterator[WayCase]:
    """So many that can be priced, of models that `model` gives fields of; what replicas share is mostly one of those
    that are given `often`, and a share of ways is `simple`: nothing but replicas and even stages, one on each GPU. A
    share trains `adapters` beside frozen weights."""
    chance, of_adapters = random.Random(1), random.Random(2)
    made = 0
    while made < number:
        one = hpgo.Transformer(**{"layers": chance.randint(1, 12), "name": "toy", **model(chance)})
        pp, alone = chance.choice([1, 1, 2, 3, 4]), chance.random() < simple
        tp, cp = (1, 1) if alone else (chance.choice([1, 1, 2, 4]), chance.choice([1, 1, 1, 2]))
        uneven = pp > 1 and not alone and chance.random() < 0.25
        asked: dict[str, Any] = {
            "tp": tp,
            "cp": cp,
            "ep": chance.choice([1, 2, 4]) if one.experts else 1,
            "pp": pp,
            "vpp": chance.choice([1, 2, 3]) if pp > 1 and not alone else 1,
            "first_rank_layers": chance.choice([None, 1, 2, 3, 4]) if uneven else None,
            "last_rank_layers": chance.choice([None, 1, 2, 3, 4]) if uneven else None,
            "zero_stage": chance.choice([0, 1, 2, 3, *often * 4]),
            "micro_batch_size": chance.choice([1, 1, 2, 3]),
            "recompute": chance.choice(["none"] * 4 + ["full"] * 4 + ["selective"]),
            "sequence_parallel": tp > 1 and chance.random() < 0.8,
            "precision": chance.choice(["bf16"] * 6 + ["fp16", "fp8"]),
        }
        asked["recompute_num_layers"] = 1 if asked["recompute"] == "full" and chance.random() < 0.3 else None
        dp = chance.choice([1, 2, 3, 4])
        micro_batches = chance.choice([1, 2, 4]) * (pp if asked["vpp"] > 1 else 1)
        sizes = {
            "global_batch_size": dp * asked["micro_batch_size"] * micro_batches,
            "seq_length": chance.choice([64, 128]),
        }
        trained: dict[str, Any] = {}
        if of_adapters.random() < adapters:
            some = of_adapters.choice(
                [(), ("linear_qkv",), ("linear_qkv", "linear_proj"), ("linear_fc1", "linear_fc2")]
            )
            trained = {"lora_rank": of_adapters.choice([4, 8, 16]), "lora_target_modules": some}
        try:
            price = hpgo.estimate_llm(one, GPUS, devices=tp * cp * pp * dp, **sizes, **asked, **trained)
        except HpgoError:  # degrees that don't divide
            continue
        made += 1
        yield WayCase(hpgo.LlmPlan.of(price, one, GPUS), one, dp=dp, **sizes, **asked)


def refused_by(framework: str, case: WayCase) -> list[str]:
    """Why the framework, `NAME` or `NAME@VERSION`, must refuse the way; none if it must not."""
    reasons = []
    framework, _, version = framework.partition("@")
    piped, replicas = case.pp > 1, case.dp * case.cp
    known = {
        "megatron": {0, 1} if piped else {0, 1, 3},  # 3 is Megatron-FSDP
        "megatron-bridge": {0, 1},
        "torchtitan": {2} if piped or case.micro_batches == 1 else set(),
        "deepspeed": {0, 1} if piped else {0, 1, 2, 3},
    }[framework] | ({3} if framework == "torchtitan" and not piped else set())
    if framework == "deepspeed" and case.precision == "bf16":
        known -= {0}  # gradients add up in 32 bits with ZeRO alone
    unshared = {0, 3} if framework == "megatron" and not piped else {0}  # Megatron-FSDP runs with a single shard
    if case.shared_stage not in (known if case.has_replicas else unshared):
        reasons.append("what replicas share")
    core = framework.startswith("megatron")
    if not core and (case.recompute == "selective" or case.recomputed_layers):
        reasons.append("recomputation")
    wide = {"bf16", "fp16", "fp8"}
    precisions = {"megatron": wide, "megatron-bridge": wide, "torchtitan": {"bf16"}, "deepspeed": {"bf16", "fp16"}}[
        framework
    ]
    if case.precision not in precisions:
        reasons.append("precision")
    if framework == "deepspeed" and max(case.tp, case.cp, case.vpp) > 1:
        reasons.append("degrees")
    if not core and (case.is_uneven or case.ep > 1):
        reasons.append("ends, or experts")
    if framework == "torchtitan" and case.model.tied and (piped or version == "0.2"):
        reasons.append("tied embeddings")
    if version == "0.2" and replicas == 1 and max(case.tp, case.pp) > 1:
        reasons.append("16 bits without FSDP")
    if case.model.further_tokens and (framework != "megatron" or case.model.positions):
        reasons.append("further tokens")
    return reasons


def files_of(case: WayCase, target: str, reasons: list[str]) -> dict[str, str] | None:
    """What is exported; None if it is refused, as it must be with reasons.

    Raises AssertionError if it is refused without any, or not refused with some.
    """
    refused = None
    try:
        files = hpgo.export.files(case.plan, target)
    except hpgo.errors.ArgumentError as error:
        refused = error
    if refused is not None:
        assert reasons, f"{target} refuses what it can run: {refused}"
        assert refused.hint, "and says the way out"
        return None
    assert not reasons, f"{target} exports what it can't run: {reasons}"
    return files


def tally(cases: Iterator[WayCase], check: Callable[[WayCase], bool]) -> str:
    """How many cases `check` found the same, and how many it found refused, in words."""
    found = [check(case) for case in cases]
    assert sum(found) > len(found) / 8, "too few cases are ones that the framework runs"
    return f"{sum(found)} the same, {len(found) - sum(found)} refused"
