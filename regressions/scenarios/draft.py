"""Draft kv_indices: a multi-step draft backend sizes its buffer, fills it with the real kernel, and attends over it.

What a row needs and what it gets, in elements:

    used    sum(seq_lens) * topk + num_seqs * topk * num_steps
    wide    rows * topk * max_context_len      rows: max_bs under CUDA graphs, the live batch in eager mode
    narrow  max_bs * max_context_len           what #27338 and #27460 found

A row is contiguous and rows are adjacent, so of all rows only the last one's excess leaves the buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from harness.case import Case, Stray
from harness.errors import UsageError

PATHS = ("eager", "cuda_graph")
INT32_LIMIT = 2**31
ZONE_MARGIN_BYTES = 4096
WATCHED_A_STEP = 4  # tensors that a leg makes on a GPU for each step, each between two red zones
PAGE_BYTES = 1 << 21  # CUDA's, the larger one: a guard page may leave as much mapped ahead of a payload
HUGE_BYTES = 1 << 30  # of rows: from here on only what is touched of them is memory (harness/memory/sparse.py)
FOLDED_BYTES = 1 << 25  # what stands behind rows of which every byte is touched
FAULT = "SIGSEGV in generate_draft_decode_kv_indices|illegal memory access"  # a guard page's answer to a stray write

SIZE_FIXES = {"27338:topk-factor": "flashinfer", "27460:topk-factor": "flashinfer_mla"}
CAPACITY = r"EAGLE draft kv_indices row (too small|\(size )"  # what the capacity guards say, SGLang's own words too
INT32 = "reaches the int32 limit|would overflow int32"
GUARDS = {
    "flashinfer": "27338:capacity-assert",
    "flashinfer_mla": "27460:capacity-assert",
    "triton": "own:triton-capacity-assert",
    "aiter": "own:aiter-capacity-assert",
}
# a KV slot in float16: K and V of two heads of 64; a latent vector of 512 + 64, and the reference's two copies of it
SLOT_BYTES = {"flashinfer": 512, "flashinfer_mla": 3 * 1152, "triton": 512, "aiter": 0}
BACKEND_OF = {**SIZE_FIXES, **{guard: backend for backend, guard in GUARDS.items()}}
INT32_GUARD, INT32_ROWS = "27486:int32-guard", "own:int32-rows"

OPTIONS = (
    *("backend", "path", "topk", "num_seqs", "num_steps", "max_bs", "max_context_len", "seq_lens"),
    *("page_size", "detector"),
)
# shapes that show something, for whoever types no options
SMALL: dict[str, Any] = {"topk": 2, "num_steps": 2, "max_context_len": 8}
DEFAULTS: dict[str, dict[str, Any]] = {
    INT32_ROWS: {"topk": 2, "num_steps": 5, "max_bs": 2, "max_context_len": 150_000_000, "seq_lens": [100, 100]},
    INT32_GUARD: {"topk": 8, "num_steps": 2, "max_bs": 4, "max_context_len": 1 << 26, "seq_lens": [5, 3, 9, 1]},
}


@dataclass(frozen=True)
class Shape:
    """One batch and the buffers that it meets. Lengths in tokens, widths in elements."""

    backend: str
    path: str
    topk: int
    num_steps: int
    page_size: int
    max_bs: int
    max_context_len: int
    seq_lens: Sequence[int]

    @property
    def used(self) -> int:
        return self.topk * (sum(self.seq_lens) + len(self.seq_lens) * self.num_steps)

    @property
    def wide(self) -> int:
        return (self.max_bs if self.path == "cuda_graph" else len(self.seq_lens)) * self.topk * self.max_context_len

    @property
    def narrow(self) -> int:
        return self.max_bs * self.max_context_len

    @property
    def element_bytes(self) -> int:
        return 8 if self.backend == "triton" else 4

    @property
    def rows_bytes(self) -> int:
        """kv_indices: a row a step."""
        return self.num_steps * self.wide * self.element_bytes

    @property
    def is_huge(self) -> bool:
        """Rows of gigabytes, which need not all be memory."""
        return self.rows_bytes >= HUGE_BYTES

    @property
    def touched(self) -> list[tuple[int, int]]:
        """Of kv_indices, the (start, stop) bytes that a batch writes and reads: of each row what the last step uses."""
        starts = [step * self.wide for step in range(self.num_steps)]
        return [(start * self.element_bytes, (start + self.used) * self.element_bytes) for start in starts]

    @property
    def is_folded(self) -> bool:
        """Rows used beyond what int32 counts: kv_indptr wraps, and no value is looked at after that."""
        return self.used >= INT32_LIMIT

    def buffer_bytes(self, detector: str) -> int:
        """On a GPU: a row a step, the request table as far as the batch reaches, and a KV cache of its slots."""
        own_pages = -(-(self.page_size - 1 + self.num_steps) // self.page_size) * self.page_size
        slots = self.max_bs * (max(self.seq_lens, default=1) + self.topk * own_pages)
        attended = SLOT_BYTES[self.backend] if self.num_steps > 1 else 0
        rows = self.rows_bytes
        if detector == "guard-page" and self.is_huge:
            pages = sum(-(-(stop - start) // PAGE_BYTES) + 1 for start, stop in self.touched)
            rows = FOLDED_BYTES if self.is_folded else pages * PAGE_BYTES
        return rows + slots * (4 + attended)

    def zone_bytes(self, stray: int) -> int:
        """A red zone that holds all stray elements and shows that nothing came behind them."""
        return stray * self.element_bytes + ZONE_MARGIN_BYTES

    def __str__(self) -> str:
        lens = self.seq_lens
        shown = "+".join(map(str, lens)) if len(lens) <= 4 else f"{len(lens)}x{min(lens)}..{max(lens)}"
        sizes = f"topk{self.topk}-steps{self.num_steps}-page{self.page_size}-bs{self.max_bs}-ctx{self.max_context_len}"
        return f"{self.backend}-{self.path}-{sizes}-lens{shown or 'none'}"


def case(fix: str, *, detector: str | None = None, **options: Any) -> Case:
    """The case of one shape; ``options`` as in OPTIONS. Raises UsageError where the shape makes no batch."""
    build = _builder(fix)
    shape = _shape(fix, options)
    # rows this wide are gigabytes: a guard page's memory is only as large as what is touched
    detector = detector or ("guard-page" if fix in DEFAULTS else "red-zone")
    if detector not in ("red-zone", "guard-page"):
        raise UsageError(f"detector {detector!r}: must be red-zone or guard-page here")
    if shape.wide >= INT32_LIMIT and fix != INT32_GUARD:
        raise UsageError(
            f"a row of {shape.wide} elements is refused by {INT32_GUARD} before {fix} matters; make the shape smaller"
        )
    name = str(shape) if detector == "red-zone" else f"{shape}-{detector}"
    common: dict[str, Any] = {
        "id": name,
        "entry": f"{__name__}_{{target}}:run",
        "params": {**vars(shape), "seq_lens": list(shape.seq_lens)},
        "backend": shape.backend,
        "detector": detector,
        "cuda_packages": _cuda_packages(shape.backend, detector),
        "cannot": _cannot(shape),
    }
    built = build(fix, shape, detector)
    zones = 2 * built.get("zone_bytes", 0) * WATCHED_A_STEP * (shape.num_steps + 1) if detector == "red-zone" else 0
    return Case(**common, **built, device_bytes=shape.buffer_bytes(detector) + zones)


def _cuda_packages(backend: str, detector: str) -> tuple[str, ...]:
    packages = ("flashinfer",) if backend.startswith("flashinfer") else ()
    return (*packages, "cuda.bindings") if detector == "guard-page" else packages


def _cannot(shape: Shape) -> dict[str, str]:
    if shape.num_steps < 2:
        return {"sglang": "SGLang's draft backends read their first child, and num_steps 1 has none"}
    return {} if shape.seq_lens else {"sglang": "SGLang's draft backends take no empty batch: no server sends one"}


def _builder(fix: str) -> Callable[[str, Shape, str], dict[str, Any]]:
    if fix in SIZE_FIXES:
        return _size_case
    if fix in BACKEND_OF:
        return _guard_case
    if fix in (INT32_ROWS, INT32_GUARD):
        return _rows_case if fix == INT32_ROWS else _width_case
    known = ", ".join([*BACKEND_OF, INT32_ROWS, INT32_GUARD])
    raise UsageError(f"{fix} is not about draft kv_indices; this scenario shows {known}")


def _size_case(fix: str, shape: Shape, detector: str) -> dict[str, Any]:
    over = max(0, shape.used - shape.narrow)
    both = frozenset({fix, GUARDS[shape.backend]})
    on = "clean" if shape.used <= shape.wide else "guarded"
    if not over:
        why = f"{shape.used} of {shape.narrow} elements fit without the topk factor, too"
        why += ", which is 1 here" if shape.topk == 1 else ""
        return {"on": on, "tells": False, "why": why, "zone_bytes": ZONE_MARGIN_BYTES}
    why = f"{shape.used} elements are needed, and a row without the topk factor has {shape.narrow}"
    if on == "guarded":
        why = f"{shape.used} elements are needed, even a right row has {shape.wide}: the guard fires either way"
    blind: dict[frozenset[str], str] = {frozenset(): CAPACITY} if on == "guarded" else {}
    return {
        "on": on,
        "tells": on == "clean",
        "why": why,
        "stray": Stray("after", over),
        "expect": {both: _outside(detector)},
        "reason": {**blind, both: FAULT} if detector == "guard-page" else blind,
        "zone_bytes": shape.zone_bytes(over),
    }


def _guard_case(fix: str, shape: Shape, detector: str) -> dict[str, Any]:
    over = max(0, shape.used - shape.wide)
    if not over:
        why = f"{shape.used} of {shape.wide} elements fit, and a guard must let that through"
        return {"tells": False, "why": why, "zone_bytes": ZONE_MARGIN_BYTES}
    out = frozenset({fix})
    return {
        "on": "guarded",
        "why": f"{shape.used} elements are needed, and the row has {shape.wide}",
        "stray": Stray("after", over),
        "expect": {out: _outside(detector)},
        "reason": {out: FAULT} if detector == "guard-page" else {},
        "zone_bytes": shape.zone_bytes(over),
    }


def _rows_case(fix: str, shape: Shape, detector: str) -> dict[str, Any]:
    last = (shape.num_steps - 1) * shape.wide
    if not shape.seq_lens:
        return {"tells": False, "reaches": False, "why": "an empty batch launches no kernel"}
    if shape.used > shape.wide:
        why = f"{shape.used} elements are needed, the row has {shape.wide}: the capacity check refuses it either way"
        return {"on": "guarded", "tells": False, "reaches": False, "why": why, "reason": {frozenset(): CAPACITY}}
    if last < INT32_LIMIT:
        return {"tells": False, "why": f"the last row starts at element {last}, below the int32 limit {INT32_LIMIT}"}
    if detector != "guard-page":
        raise UsageError(f"detector {detector!r}: a wrapped row lands gigabytes before the buffer; use guard-page")
    _check_crashes(shape)
    return {"why": f"the last row starts at element {last}, past the int32 limit {INT32_LIMIT}"}


def _check_crashes(shape: Shape) -> None:
    """Refuse a shape of which no row, its offset wrapped to int32, surely starts in the guard before the buffer.

    A row from 2**32 on wraps once around and lands inside of the buffer. But rows are less than 2**31 apart, so one
    always starts between 2**31 and 2**32, and wraps to before the buffer: too near only where it is close to 2**32.
    """
    starts = [_wrapped(step * shape.wide) for step in range(shape.num_steps)]
    if min(starts) * 4 > -PAGE_BYTES:
        raise UsageError(
            f"rows of {shape.wide} elements wrap to element {min(starts)}, which a guard page cannot tell from the "
            f"buffer: less than {PAGE_BYTES} bytes before it; make the rows shorter"
        )


def _wrapped(offset: int) -> int:
    return (offset + INT32_LIMIT) % (2 * INT32_LIMIT) - INT32_LIMIT


def _width_case(fix: str, shape: Shape, detector: str) -> dict[str, Any]:
    refused = shape.wide >= INT32_LIMIT
    fits = shape.used <= shape.wide
    if not fits:
        return {
            "on": "guarded",
            "tells": False,
            "why": "the batch does not fit its row, and the capacity check refuses it either way",
            "reason": {frozenset(): INT32 if refused else CAPACITY},
        }
    if not refused:
        why = f"a row of {shape.wide} elements is within int32, and a guard must let that through"
        return {"tells": False, "why": why}
    # The row offset is 64-bit by own:int32-rows, so what a row this wide still breaks is kv_indptr, once it is used.
    wraps = {frozenset({fix}): "wrong"} if shape.used >= INT32_LIMIT else {}
    return {
        "on": "guarded",
        "why": f"a row of {shape.wide} elements reaches the int32 limit {INT32_LIMIT}",
        "expect": wraps,
        "reason": {key: "kv_indptr" for key in wraps},
        # SGLang's row stride is a constexpr: without the guard, Triton itself refuses this one, in words of its own
        "elsewhere": {"sglang": ("error", "out of range for type int32")},
    }


def _outside(detector: str) -> str:
    return "overflow" if detector == "red-zone" else "crashed"


def _shape(fix: str, typed: dict[str, Any]) -> Shape:
    if unknown := set(typed) - set(OPTIONS):
        raise UsageError(f"{sorted(unknown)[0]}: no option of a draft case, which takes {', '.join(OPTIONS)}")
    given = {**SMALL, **({} if typed else DEFAULTS.get(fix, {})), **typed}
    backend = given.get("backend") or BACKEND_OF.get(fix, "flashinfer")
    path = given.get("path") or ("cuda_graph" if fix in SIZE_FIXES else "eager")
    num_seqs, context = given.get("num_seqs"), given["max_context_len"]
    seq_lens = given.get("seq_lens")
    if num_seqs is not None and num_seqs < 0:
        raise UsageError(f"num_seqs {num_seqs}: must be at least 0")
    if seq_lens is None:
        full = context if fix in GUARDS.values() else max(0, context - given["num_steps"])
        seq_lens = [full] * (num_seqs if num_seqs is not None else given.get("max_bs") or 1)
    max_bs = given.get("max_bs", max(len(seq_lens), 1))
    shape = Shape(
        backend, path, given["topk"], given["num_steps"], given.get("page_size", 1), max_bs, context, seq_lens
    )
    _validate(fix, shape, len(seq_lens) if num_seqs is None else num_seqs)
    return shape


def _validate(fix: str, shape: Shape, num_seqs: int) -> None:
    for name in ("topk", "num_steps", "page_size", "max_bs", "max_context_len"):
        if (value := getattr(shape, name)) < 1:
            raise UsageError(f"{name} {value}: must be at least 1")
    if shape.backend not in GUARDS or shape.backend != BACKEND_OF.get(fix, shape.backend):
        raise UsageError(f"backend {shape.backend!r}: {fix} is about {BACKEND_OF.get(fix, ', '.join(GUARDS))}")
    if shape.path not in PATHS:
        raise UsageError(f"path {shape.path!r}: must be eager or cuda_graph")
    if fix in SIZE_FIXES and shape.path != "cuda_graph":
        raise UsageError(f"path {shape.path!r}: {fix} sizes the buffer of CUDA graphs, so it must be cuda_graph")
    if num_seqs != len(shape.seq_lens):
        raise UsageError(f"num_seqs {num_seqs}, but {len(shape.seq_lens)} seq_lens: one length a request")
    if num_seqs > shape.max_bs:
        raise UsageError(f"{num_seqs} requests, but max_bs {shape.max_bs}: a batch holds at most max_bs requests")
    for seq_len in shape.seq_lens:
        if not 0 <= seq_len <= shape.max_context_len:
            raise UsageError(f"seq_len {seq_len}: must be 0 to max_context_len ({shape.max_context_len})")
