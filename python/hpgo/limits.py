"""What keeps a step from being shorter: its busiest stage or link, the fill and drain around it, and the last sync."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpgo.plans import Plan


def describe(plan: Plan) -> str:
    """One sentence with the largest parts of the step.

    >>> import hpgo
    >>> plan = hpgo.plan(hpgo.read_profile("vgg-19"), hpgo.Cluster.preset("dapple-a"), global_batch_size=1024)
    >>> print(plan.limit.split(",")[0])
    all devices compute for 99.3% of the step
    """
    count = plan.micro_batches
    work_s, stage = max(((s.forward_s + s.backward_s) * count, -index) for index, s in enumerate(plan.stages))
    links = [(s.transfer_busy_s * count, -index) for index, s in enumerate(plan.stages[:-1])]
    link_s, link = max(links, default=(0.0, 0))
    tail_s, tail = max((s.sync_tail_s, -index) for index, s in enumerate(plan.stages))
    if link_s > work_s:
        parts = [f"the transfers between stages {-link} and {1 - link} take {link_s / plan.step_s:.1%} of the step"]
    elif len(plan.stages) == 1:
        parts = [f"all devices compute for {work_s / plan.step_s:.1%} of the step"]
    else:
        parts = [f"stage {-stage} computes for {work_s / plan.step_s:.1%} of the step"]
    if tail_s >= 0.005 * plan.step_s:
        parts.append(f"gradients of stage {-tail} synchronise for {tail_s / plan.step_s:.1%} after its last backward")
    rest_s = plan.step_s - max(work_s, link_s) - tail_s
    if rest_s >= 0.005 * plan.step_s:
        parts.append(f"filling and draining the pipeline takes {rest_s / plan.step_s:.1%}")
    return ", ".join(parts)
