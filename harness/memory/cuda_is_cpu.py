"""``device="cuda"`` means the CPU: for code under test that says so outright, on a machine without a GPU.

It stands in this package so that a detector's records skip its frames and name the line that allocated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class CudaIsCpu(TorchFunctionMode):
    """Enter it inside a memory detector: the detector, such a mode as well, then sees the device that memory is on.

    Seen are device arguments of torch's Python functions, by name or by position. Not seen: ``tensor.cuda()``.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*map(_moved, args), **{name: _moved(value) for name, value in (kwargs or {}).items()})


def _moved(value: Any) -> Any:
    named = isinstance(value, str) and value.partition(":")[0] == "cuda"
    return "cpu" if named or (isinstance(value, torch.device) and value.type == "cuda") else value
