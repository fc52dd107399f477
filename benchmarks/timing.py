"""Times of calls on a GPU that take turns within each round: what they say holds as a ratio on any machine.

The turns are in another order each round: on an H200, every second call behind the same other one took 0.8 us more.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch

FLUSH_BYTES = 1 << 29  # ten times an H200's L2, and longer at work than the host is at the call behind it
IN_A_ROW = 50
ORDER = random.Random(0)
Calls = dict[str, Callable[[], object]]
Times = dict[str, float]  # the same names -> microseconds


def alone(calls: Calls, rounds: int) -> Times:
    """Median by CUDA events around one call, with the L2 full of other data that has yet to be written back."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in shuffled(calls):
            pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush.zero_()
            pair[0].record()
            call()
            pair[1].record()
            events[name].append(pair)
    torch.cuda.synchronize()
    return {name: 1000 * median(start.elapsed_time(end) for start, end in pairs) for name, pairs in events.items()}


def in_a_row(calls: Calls, rounds: int) -> Times:
    """Median of one of IN_A_ROW calls, one right after the other in a CUDA graph."""

    def row(call: Callable[[], object]) -> None:
        for _ in range(IN_A_ROW):
            call()

    graphs = {name: captured(partial(row, call)) for name, call in calls.items()}
    times = alone({name: graph.replay for name, graph in graphs.items()}, rounds)
    return {name: took / IN_A_ROW for name, took in times.items()}


def by_host(calls: Calls, rounds: int) -> Times:
    """Median from a call to its return, outside of a graph; the queue is never full."""
    took: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in shuffled(calls):
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(IN_A_ROW):
                call()
            took[name].append(1e6 * (time.perf_counter() - started) / IN_A_ROW)
    torch.cuda.synchronize()
    return {name: median(times) for name, times in took.items()}


def shuffled(calls: Calls) -> list[tuple[str, Callable[[], object]]]:
    return ORDER.sample(list(calls.items()), len(calls))


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """The call's graph. Raises PyTorch's error where the call waits for the device."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def rounded(times: Times) -> Times:
    return {name: round(took, 2) for name, took in times.items()}
