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
DETECTORS = ("red-zone", "guard-page")
NEAR_BYTES = 1 << 24  # within a zone
PAGE_BYTES = 1 << 21  # CUDA's, the larger one: a guard page may leave as much mapped ahead of a payload
GUARD_BYTES = 1 << 34  # what a guard page reserves on each side
FAR_BYTES = 1 << 36  # surely unmapped
JOINT = "V behind K in one allocation"  # the layout of a pool whose K writes into V where it strays a little
WRAP_BYTES = 1 << 62  # from here on, adding an address may wrap in 64 bits
# a CPU names the kernel's C function as it dies, a GPU the kind of error
FAULT = "in __tvm_ffi_store_cache|store_kernel|illegal memory access"


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
    if detector not in DETECTORS:
        raise UsageError(f"detector {detector!r}: must be {' or '.join(DETECTORS)} here")
    if num_slots < 1 or page_size < 1 or row_bytes < 1:
        raise UsageError("num_slots, page_size and row_bytes must be at least 1")
    if row_bytes % 2:
        raise UsageError(f"row_bytes {row_bytes}: must be even, rows are made of elements of 2 or 4 bytes")
    if index_bytes not in (4, 8) or any(
        not -(2 ** (8 * index_bytes - 1)) <= slot < 2 ** (8 * index_bytes - 1) for slot in slots
    ):
        raise UsageError(f"slots {list(slots)} must be integers of index_bytes (4 or 8) bytes each, not {index_bytes}")
    limit = num_slots + page_size
    refused = row_bytes % 4 != 0
    bad = [slot for slot in slots if not 0 <= slot < limit]
    reach = max([0, *(abs(slot - (0 if slot < 0 else limit - 1)) * row_bytes for slot in bad)])
    if not refused:
        _check_seen(bad, row_bytes, reach, detector)
    crashes = bool(bad) and not refused and (detector == "guard-page" or reach >= FAR_BYTES)
    out = frozenset({fix})
    kept = {"slots": list(slots), "row_bytes": row_bytes, "num_slots": num_slots, "page_size": page_size}
    kept |= {"index_bytes": index_bytes, "strided": strided, "path": path}
    # K's row and V's, each counted from the start of K: what is left of them outside where one lies behind the other
    joint = [row for slot in bad for row in (slot, limit + slot) if not 0 <= row < 2 * limit]
    counted = bool(bad) and not crashes and not refused
    return Case(
        id=_name(kept, detector),
        entry=f"{__name__}_{{target}}:run",
        params=kept,
        backend=path,
        on="error" if refused else "guarded" if bad else "clean",
        reason={frozenset(): "must be a multiple of 4"} if refused else {out: FAULT} if crashes else {},
        reaches=not refused and bool(slots),
        tells=bool(bad) and not refused,
        why=_why(row_bytes, bad, limit),
        stray=_stray(bad, bad, row_bytes) if counted else None,
        stray_in={JOINT: _stray(joint, [], row_bytes)} if counted else {},
        expect={out: "crashed"} if crashes else {},
        detector=detector,
        zone_bytes=reach + row_bytes if counted else 1 << 12,
        cannot=_cannot(row_bytes, slots),
        cuda_packages=("cuda.bindings",) if detector == "guard-page" else (),
    )


def _check_seen(bad: Sequence[int], row_bytes: int, reach: int, detector: str) -> None:
    """Refuse slots of which nobody could say beforehand what a write there does."""
    for slot in bad:
        if abs(slot * row_bytes) >= WRAP_BYTES:
            raise UsageError(
                f"slot {slot}: {slot * row_bytes} bytes from the cache's start may wrap in 64 bits and land anywhere; "
                f"slot * row_bytes must be above -2**62 and below 2**62, so slots of {row_bytes} bytes reach "
                f"{(WRAP_BYTES - 1) // row_bytes}"
            )
    if detector == "red-zone" and NEAR_BYTES < reach < FAR_BYTES:
        way = "use --detector guard-page" if reach < GUARD_BYTES else f"take one from {FAR_BYTES} bytes on"
        raise UsageError(
            f"a slot lies {reach} bytes outside: more than a red zone ({NEAR_BYTES}) holds, too near to be surely "
            f"unmapped; {way}"
        )
    if detector == "guard-page" and reach + row_bytes > GUARD_BYTES and reach < FAR_BYTES:
        raise UsageError(
            f"a slot lies {reach} bytes outside: past a guard page's {GUARD_BYTES}, too near to be surely unmapped; "
            f"take one from {FAR_BYTES} bytes on"
        )
    if detector == "guard-page" and bad and all(-PAGE_BYTES < slot * row_bytes < 0 for slot in bad):
        raise UsageError(
            f"slot {min(bad)} lies {reach} bytes before the cache: a guard page cannot see the bytes right before a "
            f"payload (less than {PAGE_BYTES}); use --detector red-zone"
        )


def _stray(k_rows: Sequence[int], v_rows: Sequence[int], row_bytes: int) -> Stray:
    """A row that is written twice is stray once."""
    sides = {"before" if row < 0 else "after" for row in (*k_rows, *v_rows)}
    return Stray("/".join(sorted(sides)), (len(set(k_rows)) + len(set(v_rows))) * (row_bytes // 4))


def _why(row_bytes: int, bad: Sequence[int], limit: int) -> str:
    if row_bytes % 4:
        return f"a row of {row_bytes} bytes is refused before any slot is looked at"
    if bad:
        return f"slot {bad[0]} is outside of 0 to {limit - 1}"
    return "all slots are in bounds, and a guard must let them through"


def _cannot(row_bytes: int, slots: Sequence[int]) -> dict[str, str]:
    reasons = {"sglang on cpu": "SGLang's store kernel is CUDA only"}
    if row_bytes % 4:
        reasons["sglang"] = f"SGLang stores rows of {row_bytes} bytes, no multiple of 4, without this kernel"
    elif not slots:
        reasons["sglang"] = "SGLang's store kernel is not made for zero rows"
    return reasons


def _name(kept: dict[str, Any], detector: str) -> str:
    slots = "+".join(_power(slot) for slot in kept["slots"]) or "none"
    name = f"{kept['path']}-slots{slots}-row{kept['row_bytes']}B-int{8 * kept['index_bytes']}"
    name += f"-of{kept['num_slots']}+{kept['page_size']}" + ("-strided" if kept["strided"] else "")
    return name if detector == "red-zone" else f"{name}-{detector}"


def _power(slot: int) -> str:
    return f"2^{slot.bit_length() - 1}" if slot > 1 << 20 and slot & (slot - 1) == 0 else str(slot)
