"""What the legs of both code bases compare by: exact indices, stored rows, attention within a tolerance."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from harness import memory
from harness.leg import WrongValues

TOLERANCE = {torch.float16: (2e-3, 2e-2), torch.float32: (1e-5, 1e-4)}  # of attention: absolute, relative


def same(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """Raise WrongValues unless two 1-D integer tensors are equal. ``want`` is on the CPU, int64."""
    got = got.to("cpu", torch.int64)
    if len(got) != len(want):
        raise WrongValues(f"{name}: {len(got)} elements where {len(want)} are needed")
    if len(different := (got != want).nonzero()):
        at = int(different[0])
        raise WrongValues(
            f"{name}[{at}]: {int(got[at])}, reference {int(want[at])}; {len(different)} of {len(want)} differ"
        )


def close(name: str, got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    """Raise WrongValues unless two results of attention in ``dtype`` are equal within its tolerance."""
    absolute, relative = TOLERANCE[dtype]
    if not torch.allclose(got.float(), want.float(), atol=absolute, rtol=relative):
        worst = (got.float() - want.float()).abs().max().item()
        raise WrongValues(f"{name}: off by up to {worst:.3g}, tolerance {absolute:g} + {relative:g} of it")


def random_rows(count: int, elements: int, dtype: torch.dtype, device: str, strided: bool, seed: int) -> torch.Tensor:
    """Random rows; strided: a slice of wider ones, as K and V are slices of a fused QKV projection."""
    generator = torch.Generator().manual_seed(seed)
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    wide = torch.randint(
        low, high, (count, 3 * elements if strided else elements), generator=generator, dtype=dtype
    ).to(device)
    return wide[:, elements : 2 * elements] if strided else wide


@memory.unwatched()
def stored(
    name: str, cache: torch.Tensor, source: torch.Tensor, slots: Sequence[int], skipped: Sequence[int] = ()
) -> None:
    """Each stored slot holds the row meant for it, every other row is still zero; so may a skipped one be.

    Of rows that share a slot, each element is one of theirs: on a GPU they are written side by side.
    """
    for slot, row in enumerate(cache):
        meant = [source[i] for i, to in enumerate(slots) if to == slot]
        if meant and bool((torch.stack(meant) == row).any(0).all()):
            continue
        if row.any() or (meant and slot not in skipped):
            raise WrongValues(f"{name}[{slot}] is none of the {len(meant)} rows that belong there")
