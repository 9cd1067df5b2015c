"""Literal types of names that arguments accept, for type checkers and editors. A test compares them with the code."""

from __future__ import annotations

from typing import Literal

ScheduleName = Literal[
    "sequential", "forward_only", "staggered", "gpipe", "1f1b", "eager_1f1b", "1f1b_overlap", "pipedream",
    "pipedream_2bw", "pipemare", "interleaved", "interleaved_overlap", "looped_bfs", "hanayo", "zb_h1", "zb_h2", "zb",
    "interleaved_zb", "zb_v", "v_half", "v_min", "dualpipe", "dualpipe_v", "chimera",
]  # fmt: skip
"""Schedule families that `hpgo.schedule` builds."""

PlannedSchedule = Literal[
    "1f1b", "eager_1f1b", "gpipe", "zb_h1", "zb_h2", "zb", "1f1b_overlap", "sequential",
    "interleaved", "interleaved_overlap", "looped_bfs", "hanayo", "interleaved_zb", "zb_v", "v_half", "v_min",
    "dualpipe_v", "auto",
]  # fmt: skip
"""Schedules that `hpgo.plan` searches."""

Communication = Literal["link", "latency", "stream", "stream_deferred", "rendezvous"]
"""Models of communication in `hpgo.simulate`."""

# The planner's tables hold the same names. They are repeated here, because a type checker can't read a table.
LlmFramework = Literal[
    "megatron", "megatron@0.16", "megatron-bridge", "megatron-bridge@0.6", "torchtitan", "torchtitan@0.2",
    "torchtitan@0.3", "deepspeed", "deepspeed@0.19",
]  # fmt: skip
"""Frameworks that `hpgo.plan_llm` plans for."""
