"""Storing K and V rows: the real store kernel, given good and bad slots.

The cache has ``num_slots + page_size`` rows, all of which may be written: ``size_limit``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.case import Case, Stray
from harness.errors import UsageError

OPTIONS = ("slots", "row_bytes", "num_slots", "page_size", "index_bytes", "strided", "path", "detector")
PATHS = ("store_cache", "pool")  # the default size_limit (cache rows), or the one that KVPool.set_kv_buffer passes
NEAR_BYTES = 1 << 24  # within a zone
FAR_BYTES = 1 << 36  # surely unmapped


def case(
    fix: str,
    *,
    slots: Sequence[int] = (-1,),
    row_bytes: int = 256,
    num_slots: int = 6,
    page_size: int = 2,
    index_bytes: int = 8,
    strided: bool = False,
    path: str = "store_cache",
    detector: str = "red-zone",
) -> Case:
    """The case of one batch of slots. Raises UsageError for what no caller could pass."""
    if path not in PATHS:
        raise UsageError(f"path {path!r}: must be {' or '.join(PATHS)}")
    if num_slots < 1 or page_size < 1 or row_bytes < 1:
        raise UsageError("num_slots, page_size and row_bytes must be at least 1")
    if index_bytes not in (4, 8) or any(
        not -(2 ** (8 * index_bytes - 1)) <= slot < 2 ** (8 * index_bytes - 1) for slot in slots
    ):
        raise UsageError(f"slots {list(slots)} must be integers of index_bytes (4 or 8) bytes each, not {index_bytes}")
    limit = num_slots + page_size
    bad = [slot for slot in slots if not 0 <= slot < limit]
    reach = max([0, *(abs(slot - (0 if slot < 0 else limit - 1)) * row_bytes for slot in bad)])
    crashes = detector == "guard-page" or reach >= FAR_BYTES
    if NEAR_BYTES < reach < FAR_BYTES and detector == "red-zone":
        raise UsageError(
            f"a slot lies {reach} bytes outside: more than a red zone ({NEAR_BYTES}) holds, too near to be surely "
            "unmapped; use --detector guard-page"
        )
    refused = row_bytes % 4 != 0
    kept = {"slots": list(slots), "row_bytes": row_bytes, "num_slots": num_slots, "page_size": page_size}
    kept |= {"index_bytes": index_bytes, "strided": strided, "path": path}
    sides = {"before" if slot < 0 else "after" for slot in bad}
    return Case(
        id=_name(kept, detector),
        entry=f"{__name__}_{{target}}:run",
        params=kept,
        backend=path,
        on="error" if refused else "guarded" if bad else "clean",
        reason={frozenset(): "must be a multiple of 4"} if refused else {},
        reaches=not refused and bool(slots),
        tells=bool(bad) and not refused,
        why=f"a row of {row_bytes} bytes is refused before any slot is looked at"
        if refused
        else "all slots are in bounds, and a guard must let them through",
        stray=Stray("/".join(sorted(sides)), 2 * len(set(bad)) * (row_bytes // 4))
        if bad and not crashes and not refused
        else None,
        expect={frozenset({fix}): "crashed"} if bad and crashes else {},
        detector=detector,
        zone_bytes=reach + row_bytes if not crashes and bad else 1 << 12,
    )


def _name(kept: dict[str, Any], detector: str) -> str:
    slots = "+".join(_power(slot) for slot in kept["slots"]) or "none"
    name = f"{kept['path']}-slots{slots}-row{kept['row_bytes']}B-int{8 * kept['index_bytes']}"
    name += f"-of{kept['num_slots']}+{kept['page_size']}" + ("-strided" if kept["strided"] else "")
    return name if detector == "red-zone" else f"{name}-{detector}"


def _power(slot: int) -> str:
    return f"2^{slot.bit_length() - 1}" if slot > 1 << 20 and slot & (slot - 1) == 0 else str(slot)
