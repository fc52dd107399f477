"""Draft kv_indices: a multi-step draft backend sizes its buffer, fills it with the real kernel, and attends over it.

What a row needs and what it gets, in elements (``num_branches = num_seqs * topk``):

    used    sum(seq_lens) * topk + num_branches * num_steps
    wide    rows * topk * max_context_len      rows: max_bs under CUDA graphs, the live batch in eager mode
    narrow  max_bs * max_context_len           what #27338 and #27460 found

A row is contiguous and rows are adjacent, so of all rows only the last one's excess leaves the buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.case import Case, Stray
from harness.errors import UsageError

PATHS = ("eager", "cuda_graph")
ZONE_MARGIN_BYTES = 4096
INT32_LIMIT = 2**31
FAULT = "SIGSEGV in generate_draft_decode_kv_indices|illegal memory access"  # a guard page's answer to a stray write

# fix -> (backend, path, {role: fix id}): which buffer it sizes or guards
SIZE_FIXES = {"27338:topk-factor": "flashinfer", "27460:topk-factor": "flashinfer_mla"}
GUARDS = {
    "flashinfer": "27338:capacity-assert",
    "flashinfer_mla": "27460:capacity-assert",
    "triton": "own:triton-capacity-assert",
    "aiter": "own:aiter-capacity-assert",
}
BACKEND_OF = {**SIZE_FIXES, **{guard: backend for backend, guard in GUARDS.items()}}
OPTIONS = ("backend", "path", "topk", "num_seqs", "num_steps", "max_bs", "max_context_len", "seq_lens", "page_size", "detector")


def case(
    fix: str,
    *,
    backend: str | None = None,
    path: str | None = None,
    topk: int = 2,
    num_seqs: int | None = None,
    num_steps: int = 2,
    max_bs: int | None = None,
    max_context_len: int = 8,
    seq_lens: Sequence[int] | None = None,
    page_size: int = 1,
    detector: str = "red-zone",
) -> Case:
    """The case of one shape. Raises UsageError where the shape makes no batch."""
    backend = backend or BACKEND_OF.get(fix, "flashinfer")
    path = path or ("cuda_graph" if fix in SIZE_FIXES else "eager")
    if seq_lens is None:
        seq_lens = [max(0, max_context_len - num_steps)] * (num_seqs if num_seqs is not None else max_bs or 1)
    num_seqs = len(seq_lens) if num_seqs is None else num_seqs
    max_bs = max(num_seqs, 1) if max_bs is None else max_bs
    _validate(fix, backend, path, topk, num_seqs, num_steps, max_bs, max_context_len, seq_lens, page_size)

    used = sum(seq_lens) * topk + num_seqs * topk * num_steps
    wide = (max_bs if path == "cuda_graph" else num_seqs) * topk * max_context_len
    narrow = max_bs * max_context_len
    item = 8 if backend == "triton" else 4  # bytes of an index
    guard = GUARDS[backend]
    fits = "" if used <= wide else f": {used} needed, even a right row has {wide}"
    common: dict[str, Any] = {
        "id": _name(backend, path, topk, num_steps, page_size, max_bs, max_context_len, seq_lens, detector),
        "entry": f"{__name__}:run",
        "backend": backend,
        "detector": detector,
        "cuda_packages": ("flashinfer",) if backend.startswith("flashinfer") else (),
        "params": {
            "backend": backend, "path": path, "topk": topk, "num_steps": num_steps, "page_size": page_size,
            "max_bs": max_bs, "max_context_len": max_context_len, "seq_lens": list(seq_lens),
        },
    }  # fmt: skip
    on = "clean" if used <= wide else "guarded"
    outside = "overflow" if detector == "red-zone" else "crashed"
    fault = {} if detector == "red-zone" else {"reason": {frozenset({fix, guard}): FAULT, frozenset({fix}): FAULT if fix == guard else "row too small"}}

    if fix in SIZE_FIXES:
        over = max(0, used - narrow)
        return Case(
            **common,
            on=on,
            tells=over > 0 and on == "clean",
            why=(
                f"{used} of {narrow} elements fit without the topk factor, too"
                + (", which is 1 here" if topk == 1 else "")
                if not over
                else f"the guard stands on both sides{fits}"
            ),
            stray=Stray("after", over) if over else None,
            expect={frozenset({fix, guard}): outside if over else "clean"} if over or on == "clean" else {},
            zone_bytes=over * item + ZONE_MARGIN_BYTES,
            **fault,
        )
    if fix in GUARDS.values():
        over = max(0, used - wide)
        return Case(
            **common,
            on=on,
            tells=over > 0,
            why=f"{used} of {wide} elements fit, and a guard must let that through",
            stray=Stray("after", over) if over else None,
            expect={frozenset({fix}): outside} if over else {},
            zone_bytes=over * item + ZONE_MARGIN_BYTES,
            **fault,
        )
    if fix == "own:int32-rows":
        wraps = (num_steps - 1) * wide >= INT32_LIMIT
        last = f"the last row starts at element {(num_steps - 1) * wide} of an int32 offset's {INT32_LIMIT}"
        return Case(**common, on=on, tells=wraps, why=last)
    if fix == "27486:int32-guard":
        refused = wide >= INT32_LIMIT
        # The row offset is 64-bit by own:int32-rows, so what a row this wide still breaks is kv_indptr, once it is used.
        wrong = {frozenset({fix}): "wrong"} if used >= INT32_LIMIT else {}
        return Case(
            **common,
            on="guarded" if refused else on,
            tells=refused,
            why=f"a row of {wide} elements is within int32, and a guard must let that through",
            expect=wrong,
            reason={key: "kv_indptr" for key in wrong},
        )
    raise UsageError(f"{fix} is not about draft kv_indices; this scenario shows {', '.join([*BACKEND_OF, 'own:int32-rows', '27486:int32-guard'])}")


def _validate(
    fix: str, backend: str, path: str, topk: int, num_seqs: int, num_steps: int, max_bs: int, max_context_len: int,
    seq_lens: Sequence[int], page_size: int,
) -> None:  # fmt: skip
    for name, value in {"topk": topk, "num_steps": num_steps, "max_bs": max_bs, "max_context_len": max_context_len, "page_size": page_size}.items():
        if value < 1:
            raise UsageError(f"{name} {value}: must be at least 1")
    if backend not in GUARDS or backend != BACKEND_OF.get(fix, backend):
        raise UsageError(f"backend {backend!r}: {fix} is about {BACKEND_OF.get(fix, ', '.join(GUARDS))}")
    if path not in PATHS or (fix in SIZE_FIXES and path != "cuda_graph"):
        raise UsageError(f"path {path!r}: {'must be cuda_graph, which the fix sizes' if fix in SIZE_FIXES else 'must be eager or cuda_graph'}")
    if num_seqs != len(seq_lens):
        raise UsageError(f"num_seqs {num_seqs}, but {len(seq_lens)} seq_lens: one length a request")
    if num_seqs > max_bs:
        raise UsageError(f"{num_seqs} requests, but max_bs {max_bs}: a batch holds at most max_bs requests")
    for seq_len in seq_lens:
        if not 0 <= seq_len <= max_context_len:
            raise UsageError(f"seq_len {seq_len}: must be 0 to max_context_len ({max_context_len})")


def _name(
    backend: str, path: str, topk: int, num_steps: int, page_size: int, max_bs: int, max_context_len: int,
    seq_lens: Sequence[int], detector: str,
) -> str:  # fmt: skip
    lens = "+".join(map(str, seq_lens)) if len(seq_lens) <= 4 else f"{len(seq_lens)}x{min(seq_lens)}..{max(seq_lens)}"
    name = f"{backend}-{path}-topk{topk}-steps{num_steps}-page{page_size}-bs{max_bs}-ctx{max_context_len}-lens{lens or 'none'}"
    return name if detector == "red-zone" else f"{name}-{detector}"


def run(params: dict[str, Any], device: str) -> dict[str, Any]:
    """A leg: allocate, fill, compare ``kv_indptr`` and ``kv_indices`` with the reference, attend, compare again."""
    from regressions.scenarios import draft_run

    return draft_run.run(params, device)
