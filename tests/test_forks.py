"""Planning works in processes that Python forked after planning, or meanwhile: its default start on Linux."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time

import pytest

import hpgo

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
FORK = multiprocessing.get_context("fork") if hasattr(os, "fork") else multiprocessing


def ask(_: object = None) -> float:
    """A question whose search uses several threads."""
    profile, cluster = hpgo.read_profile("vgg-19"), hpgo.Cluster.preset("dapple-c")
    step_s = hpgo.plan(profile, cluster, global_batch_size=2048).step_s
    given = [(13, range(15)), (13, [15])]
    assert hpgo.evaluate(profile, cluster, given, global_batch_size=2048).step_s >= step_s
    return step_s


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_children_forked_after_a_plan_plan_too() -> None:
    expected = ask()
    with FORK.Pool(2) as pool:
        assert pool.map_async(ask, range(4)).get(timeout=60) == [expected] * 4


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_a_child_forked_while_another_thread_plans_plans_too() -> None:
    expected = ask()
    ended = threading.Event()

    def keep_asking() -> None:
        while not ended.is_set():
            ask()

    planner = threading.Thread(target=keep_asking)
    planner.start()
    try:
        for _ in range(5):
            results = FORK.SimpleQueue()
            child = FORK.Process(target=lambda results=results: results.put(ask()))
            child.start()
            child.join(timeout=60)
            is_alive = child.is_alive()
            child.kill()
            assert not is_alive
            assert results.get() == expected
            time.sleep(0.01)
    finally:
        ended.set()
        planner.join()
