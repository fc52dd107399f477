"""Our two kernels beside SGLang's own and a plain fill or copy: `python benchmarks/kernels.py [--seconds N]`.

    draft kv_indices   1 MB to 537 MB written, for requests of one length ("even") and of many ("uneven"); theirs with
                       its best block count; the plain operation is the faster of fill_ and zero_; "cached" is ours
                       with all requests in one row of the table: what it takes without reading from memory
    store_cache        1 to 65536 rows of 2 KiB, K and V, to random slots; "no assert" is ours without its slot assert;
                       the plain operation is copy_ of the same bytes

Microseconds, each a median, the calls taking turns (benchmarks/timing.py): "alone" by events around one call behind
other work, "in a row" a call in a CUDA graph of many, "call" the host's part. All results are first compared with the
reference, ours replayed from a CUDA graph, too. SGLang is the light environment that `unfix upstream install 0.5.23`
makes: its own files, called as its backends call them, without autograd, which is its fastest path.

"again" is ours a second time: how far it is from ours is noise. `--seconds N` leaves out what would begin later than
that, and says so. Prints the targets and writes results/kernels-cuda.json (--json for another place), anew after each
size. Exit code 1 where a target is missed or was left out, 4 without a GPU or without SGLang.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

import record  # noqa: E402
import torch  # noqa: E402
import triton  # noqa: E402
from eagle_kv import jit, reference, store  # noqa: E402
from eagle_kv.batch import DraftBatch, DraftConfig, make_req_to_token  # noqa: E402
from eagle_kv.kernel import fill_draft_kv_indices  # noqa: E402
from timing import Calls, alone, by_host, captured, in_a_row, rounded  # noqa: E402

from harness import lightenv  # noqa: E402
from harness.errors import MissingPackageError  # noqa: E402

RELEASE = "0.5.23"
BLOCKS = (0, 1, 2, 4, 8, 16, 32, 64, 128)  # SGLang's token blocks; 0 is its launch without them
# requests, draft steps, mean length, context length (None: the longest request's); topk 8
SIZES = {
    "84 MB": (128, 5, 4096, None), "537 MB": (128, 4, 32768, None),
    "long context, 84 MB": (128, 5, 4096, 131072), "17 MB": (1, 4, 131072, None), "1 MB": (4, 4, 2048, None),
}  # fmt: skip
ASKED = ("84 MB", "537 MB")  # sizes that have a target
ROWS = (1, 256, 4096, 65536)
ROUNDS = 200


class Drafts:
    """One batch: its inputs, what the reference lists for it, and where the kernels write."""

    def __init__(self, num_steps: int, seq_lens: Sequence[int], context: int | None = None, topk: int = 8):
        self.topk, self.num_steps, self.num_seqs = topk, num_steps, len(seq_lens)
        config = DraftConfig(topk, num_steps, self.num_seqs, context or max(seq_lens), device="cuda")
        self.table = make_req_to_token(config)
        rows = list(range(self.num_seqs))[::-1]
        self.batch = DraftBatch.of(seq_lens, topk, req_pool_indices=rows, device="cuda")
        self.one_row = torch.zeros_like(self.batch.req_pool_indices)
        lists = reference.kv_indices(rows, self.table, seq_lens, topk=topk, num_steps=num_steps, page_size=1)
        self.lists = [one.to("cuda", torch.int32) for one in lists]
        self.starts = reference.kv_indptr(seq_lens, topk=topk, num_steps=num_steps).to("cuda", torch.int32)
        self.kv_indices = torch.empty((num_steps, len(lists[-1])), dtype=torch.int32, device="cuda")
        self.kv_indptr = torch.empty_like(self.starts)
        self.plain = torch.cat(self.lists)

    def ours(self) -> None:
        self._fill(self.batch.req_pool_indices)

    def cached(self) -> None:
        self._fill(self.one_row)

    def _fill(self, rows: torch.Tensor) -> None:
        inputs = rows, self.table, self.batch.seq_lens
        fill_draft_kv_indices(*inputs, self.kv_indices, self.kv_indptr, topk=self.topk, page_size=1)

    def theirs(self, blocks: int) -> Callable[[], None]:
        from sglang.kernels.ops.speculative.cache_locs import generate_draft_decode_kv_indices as kernel

        grid = (self.num_steps * max(blocks, 1), self.num_seqs, self.topk)
        outputs = self.kv_indices, self.kv_indptr
        tensors = self.batch.req_pool_indices, self.table, self.batch.seq_lens, *outputs, self.batch.positions
        strides = [tensor.stride(0) for tensor in (self.table, *outputs)]
        counts = self.num_seqs, self.num_steps, self.num_seqs * self.topk
        arguments = (*tensors, *strides, *map(triton.next_power_of_2, counts), 1)
        return lambda: kernel[grid](*arguments, NUM_STEPS=self.num_steps if blocks else 0)

    def check(self, name: str, call: Callable[[], object]) -> None:
        self.kv_indices.fill_(-1)
        self.kv_indptr.zero_()  # SGLang leaves the first column as it is
        call()
        same(f"kv_indptr of {name}", self.kv_indptr, self.starts)
        for step, want in enumerate(self.lists):
            same(f"kv_indices[{step}] of {name}", self.kv_indices[step, : len(want)], want)


class Stores:
    """Rows of 2 KiB of K and of V, and the slots that they go to."""

    def __init__(self, rows: int, slots: int = 2 * ROWS[-1]):
        self.k, self.v = (torch.randn(rows, 1024, device="cuda").half() for _ in "kv")
        self.caches = [torch.zeros(slots, 1024, dtype=torch.float16, device="cuda") for _ in "kv"]
        self.indices = 1 + torch.randperm(slots - 1, device="cuda")[:rows]  # to slot 0 SGLang stores nothing
        self.both = torch.cat([self.k, self.v])
        self.copied = torch.empty_like(self.both)
        self.arguments: Any = (self.k, self.v, *self.caches, self.indices)

    def theirs(self) -> Callable[[], None]:
        from sglang.kernels.ops.kvcache import kvcache

        return lambda: kvcache.store_cache(*self.arguments)

    def check(self, name: str, call: Callable[[], object]) -> None:
        for cache, rows in zip(self.caches, (self.k, self.v), strict=True):
            cache.zero_()
            want = cache.clone()
            want[self.indices] = rows
            call()
            same(f"a cache after {name}", cache, want)


def same(what: str, got: torch.Tensor, want: torch.Tensor) -> None:
    if not torch.equal(got, want):
        raise SystemExit(f"benchmarks/kernels.py: {what} is not what the reference says")


def drafts() -> Iterator[tuple[str, Callable[[], Drafts]]]:
    for size, (requests, num_steps, mean, context) in SIZES.items():
        even, uneven = [mean] * requests, [mean * (2 * at + 1) // requests for at in range(requests)]
        yield f"{size} even", partial(Drafts, num_steps, even, context)
        if requests > 1:
            yield f"{size} uneven", partial(Drafts, num_steps, uneven, context)


def measure_draft(name: str, draft: Drafts, sglang: bool) -> dict[str, Any]:
    draft.check("ours", draft.ours)
    draft.check("our graph", captured(draft.ours).replay)
    row: dict[str, Any] = {"size": name, "bytes": 4 * len(draft.plain)}
    calls: Calls = {"ours": draft.ours, "again": draft.ours, "cached": draft.cached}
    calls |= {"zero_": draft.plain.zero_, "fill_": lambda: draft.plain.fill_(7)}
    if sglang:
        tried: Calls = {str(blocks): draft.theirs(blocks) for blocks in BLOCKS}
        for blocks, call in tried.items():
            draft.check(f"theirs with {blocks} blocks", call)
        times = alone(tried, ROUNDS // 4)
        row |= {"theirs by blocks": rounded(times), "blocks": min(times, key=times.__getitem__)}
        calls["theirs"] = tried[row["blocks"]]
    times = alone(calls, ROUNDS)
    row |= {"us": rounded(times), "fill / ours": round(min(times["fill_"], times["zero_"]) / times["ours"], 3)}
    return row | ({"theirs / ours": round(times["theirs"] / times["ours"], 3)} if sglang else {})


def measure_store(rows: int, sglang: bool, no_assert: Any) -> dict[str, Any]:
    stores = Stores(rows)
    calls: Calls = {name: lambda: store.store_cache(*stores.arguments) for name in ("ours", "again")}
    calls["no assert"] = partial(no_assert, *stores.arguments, 0)
    if sglang:
        calls["theirs"] = stores.theirs()
    for name, call in calls.items():
        stores.check(name, call)
    calls["copy_"] = lambda: stores.copied.copy_(stores.both)
    times = {"alone": alone(calls, ROUNDS), "in a row": in_a_row(calls, ROUNDS // 5), "call": by_host(calls, ROUNDS)}
    row: dict[str, Any] = {"rows": rows, "bytes": 4096 * rows, "us": {way: rounded(one) for way, one in times.items()}}
    pairs = {name: {way: round(one[name] / one["ours"], 3) for way, one in times.items()} for name in calls}
    return row | {f"{name} / ours": pair for name, pair in pairs.items()}


def without_assert(device: str = "cuda") -> Any:
    """Our store kernel, built from its source less the slot assert."""
    text, count = re.subn(r"\n *assert\(slot[^\n]*", "", store.SOURCE.read_text())
    assert count == 1, "the store kernel has not one assert of its slot"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, store.SOURCE.name)
        source.write_text(text)
        return jit.load(source, torch.device(device), "benchmarks/kernels.py")["store_cache"]


def targets(draft: dict[str, Any], store: dict[str, Any]) -> list[dict[str, Any]]:
    """What is asked for, the figure (None: left out), and the least that it may be, compared in two decimals."""
    asked: list[tuple[str, float | None, float]] = [
        (f"draft {size} {lengths}: {pair}", draft.get(f"{size} {lengths}", {}).get(pair), least)
        for size in ASKED
        for lengths in ("even", "uneven")
        for pair, least in (("theirs / ours", 1.3), ("fill / ours", 0.75))
    ]
    for rows in ROWS:
        row = store.get(f"{rows} rows", {})
        for pair, least, ways in (
            ("theirs / ours", 1.0, ("alone", "in a row", "call")),
            ("no assert / ours", 0.98, ("alone", "in a row")),
            ("copy_ / ours", 0.85, ("alone",) if rows == ROWS[-1] else ()),
        ):
            asked += [(f"store {rows} rows, {way}: {pair}", row.get(pair, {}).get(way), least) for way in ways]
    return [
        {"what": what, "figure": figure, "at least": least, "met": figure is not None and round(figure, 2) >= least}
        for what, figure, least in asked
    ]


def light_sglang() -> str | None:
    """The release, now importable, or None where it is not installed."""
    try:
        sys.path[:0] = lightenv.path(RELEASE)
    except MissingPackageError as missing:
        print(f"unfix: {missing}", file=sys.stderr)
        return None
    return RELEASE


def main() -> int:
    started = time.monotonic()
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, default=ROOT / "results" / "kernels-cuda.json")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("unfix: benchmarks/kernels.py needs a GPU, and PyTorch sees none", file=sys.stderr)
        return 4
    light, no_assert = light_sglang(), without_assert()
    found: dict[str, dict[str, Any]] = {"draft": {}, "store": {}}
    left_out: list[str] = []

    def measure(kind: str, name: str, how: Callable[[], dict[str, Any]]) -> None:
        since = time.monotonic() - started
        if since > options.seconds:
            left_out.append(name)
        else:
            found[kind][name] = how()
            print(f"benchmark: {since:5.1f} s + {time.monotonic() - started - since:.1f} s: {name}", file=sys.stderr)
        figures: dict[str, Any] = {what: list(rows.values()) for what, rows in found.items()}
        figures |= {"light sglang": light, "left out": left_out, "targets": targets(**found)}
        record.save(options.json, "cuda", figures)

    with torch.no_grad():
        for name, make in drafts():
            measure("draft", name, lambda name=name, make=make: measure_draft(name, make(), bool(light)))  # type: ignore[misc]
        for rows in ROWS:
            measure("store", f"{rows} rows", partial(measure_store, rows, bool(light), no_assert))
    asked = targets(**found)
    for row in asked:
        shown = "not measured" if row["figure"] is None else f"{row['figure']:.3f}"
        print(f"{row['what']:48} {shown:>12}  at least {row['at least']:<5} {'' if row['met'] else 'MISSED'}")
    if left_out:
        print(f"not measured within {options.seconds} s: {', '.join(left_out)}")
    return 4 if not light else int(bool(left_out) or not all(row["met"] for row in asked))


if __name__ == "__main__":
    sys.exit(main())
