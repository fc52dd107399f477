"""FlashInfer wrappers, kept for as long as something may still run them."""

from collections.abc import Callable
from typing import Any

import torch


class StepWrappers:
    """One wrapper a step: one set for all eager rounds, and one for each batch size of the graphs.

    A captured graph holds its wrappers' addresses, so batch sizes do not share them. A new graph buffer starts over:
    graphs captured on the old one are void.
    """

    def __init__(self, num_wrappers: int, make: Callable[..., Any], graph_buffers: Callable[[int, int], dict]) -> None:
        """`make(**buffers)` makes a wrapper; `graph_buffers(step, num_branches)` names its buffers in a graph."""
        self._steps = range(num_wrappers)
        self._make = make
        self._graph_buffers = graph_buffers
        self._eager: list[Any] = []
        self._in_graph: dict[int, list[Any]] = {}
        self._kv_indices: torch.Tensor | None = None

    def eager(self) -> list[Any]:
        if not self._eager:
            self._eager = [self._make() for _ in self._steps]
        return self._eager

    def in_graph(self, num_branches: int, kv_indices: torch.Tensor | None) -> list[Any]:
        if kv_indices is not self._kv_indices:
            self._kv_indices = kv_indices
            self._in_graph.clear()
        if num_branches not in self._in_graph:
            self._in_graph[num_branches] = [
                self._make(use_cuda_graph=True, **self._graph_buffers(i, num_branches)) for i in self._steps
            ]
        return self._in_graph[num_branches]
