"""Requests of the page that plans transformers, in the form that is sent to the worker process."""

from __future__ import annotations

from hpgo.page.planned.jobs import PlanJob

FILES = {
    "estimate.json": "",
    "timeline.svg": "",
    "transformer.json": "transformer.json",
    "llm-plan.json": "llm-plan.json",
    "job.zip": "job.zip",
}
"""Parts of a configuration that the page can request, and the name under which a browser saves each; empty if none."""
SEARCHES = ("search", "size")
"""Jobs that report progress: the search for configurations, and the search for clusters."""
KINDS = {"model": "config", "cluster": "cluster"}
"""Kind of file for each field of an address that can name one."""


class LlmJob(PlanJob):
    """One request of the page: one of `FILES`, one of `SEARCHES`, or `look`, which checks the kind of a file."""

    __slots__ = ()
