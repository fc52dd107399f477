"""The tables of docs/performance.md, from results/*.json alone: `python benchmarks/performance.py` writes them there.

A figure is what a file says; one whose file is not there is "not measured yet", and nothing else is ever written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from page import filled

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "performance.md"
TOOLS = ("nothing", "ours", "memcheck", "padded", "cached", "debug")


@dataclass(frozen=True)
class Figure:
    name: str
    target: str
    baseline: str  # what it is measured beside
    file: str  # below results/
    read: Callable[[dict[str, Any]], str]
    met: Callable[[dict[str, Any]], bool] | None = None  # None: nothing is asked of it, it explains another


def ratio(path: str, most: float) -> tuple[Callable[[Any], str], Callable[[Any], bool]]:
    """A ratio and its spread at a path, which must be ``most`` at most."""

    def read(document: Any) -> str:
        found = at(document, path)
        return f"{found['median']:.3f} ({found['low']:.3f} to {found['high']:.3f})"

    return read, lambda document: at(document, path)["median"] <= most


def number(path: str, shown: str, fits: Callable[[Any], bool]) -> tuple[Callable[[Any], str], Callable[[Any], bool]]:
    return lambda document: shown.format(at(document, path)), lambda document: fits(at(document, path))


def at(document: Any, path: str) -> Any:
    for name in path.split(" > "):
        document = document[name]
    return document


def figures() -> list[Figure]:
    isolation, detectors = "isolation-cuda.json", "detectors-cuda.json"
    beside = "under `unfix exec` with nothing out, and a plain Python"
    return [
        Figure(
            "a leg in its own CUDA context", "1.25 at most", "a bare fork and context", isolation,
            *number("ratios > leg / bare fork and context", "{}", lambda found: found <= 1.25),
        ),
        Figure(
            "the same", "12 at least", "a fresh Python doing it", isolation,
            *number("ratios > fresh Python / leg", "{}", lambda found: found >= 12),
        ),
        Figure(
            "a leg on SGLang's classes, after the import", "1.5 at most", "a bare fork and context",
            "isolation-sglang-cuda.json",
            *number("ratios > leg / bare fork and context", "{}", lambda found: found <= 1.5),
        ),
        Figure(
            "a red zone around a draft leg, 8 x 8 x 4096", "1.05 at most", "the leg without a detector", detectors,
            *ratio("legs > ratios > red-zone > leg", 1.05),
        ),
        *(figure for backend in ("aiter", "flashinfer") for figure in _wide(backend)),
        Figure(
            "the int32 cases without a GPU, the slowest", "under 1 s", "", "detectors-cpu.json",
            lambda found: _int32(found, "seconds", lambda value: f"{value:.2f} s"),
            lambda found: all(row["sparse"]["seconds"] < 1 for row in found["int32"]),
        ),
        Figure(
            "compiled files that differ with nothing out", "none", "a Python without the harness", "no-cost-cuda.json",
            _differing,
            lambda found: not any(each["differ"] for each in found["same_bytes"].values()),
        ),
        Figure(
            "imports of eagle_kv with nothing out", "1, within noise", beside, "no-cost-cpu.json",
            *within_noise("imports eagle_kv"),
        ),
        Figure(
            "imports of SGLang with nothing out", "1, within noise", beside, "no-cost-cpu.json",
            *within_noise("imports sglang"),
        ),
        *(
            Figure(
                f"an overlay of SGLang, {name}: each", f"under {most} ms", "", "overlay.json",
                *_overlay(name),
            )
            for name, most in (("cold", 50), ("warm", 5))
        ),
        Figure(
            "a sweep, shapes a second", "200 at least", "", "sweep-cuda.json",
            *number("by_shapes > a_second_by_slope", "{}", lambda found: found >= 200),
        ),
        Figure(
            "its rate with 500 more toggle files, without a GPU", "1", "with none", "sweep-cpu.json",
            lambda found: f"{found['by_toggles'][-1]['rate_to_none']}",
            lambda found: found["by_toggles"][-1]["rate_to_none"] > 0.9,
        ),
        *_matrix(), *_kernels(),
    ]  # fmt: skip


def _wide(backend: str) -> list[Figure]:
    """Of a GPU's int32 cases, those of one backend: FlashInfer's has workspaces of its own."""

    def figure(what: str, target: str, most: float, shown: Callable[[float], str]) -> Figure:
        def rows(found: Any) -> dict[str, Any]:
            return {"int32": [row for row in found["int32"] if row["case"].startswith(backend)]}

        return Figure(
            f"{what} of an int32 case on {backend}, the most", target, "rows that are all memory",
            "detectors-cuda.json",
            lambda found: _int32(rows(found), what, shown),
            lambda found: all(row["sparse"][what] < most for row in rows(found)["int32"]),
        )  # fmt: skip

    return [
        figure("bytes", "under 64 MiB", 64 << 20, lambda value: f"{value / (1 << 20):.0f} MiB"),
        figure("seconds", "under 1 s", 1.0, lambda value: f"{value:.2f} s"),
    ]


def _matrix() -> list[Figure]:
    file = "h200-x2.json"
    return [
        Figure(
            "the whole matrix on one GPU", "60 s at most", "", file,
            lambda found: "{wall_seconds} s ({cases} cases, {jobs} workers)".format(**found["runs"][0]),
            lambda found: found["runs"][0]["wall_seconds"] <= 60,
        ),
        Figure("of that, its legs", "", "", file, lambda found: _legs(found["runs"][0])),
        *(
            Figure(
                f"the matrix on two GPUs, the speed-up, {how}", "1.7 at least", "one GPU", name,
                lambda found: ", ".join(map(_faster, _on_several(found))),
                lambda found: min(run["speed_up"] for run in _on_several(found)) >= 1.7,
            )
            for how, name in (("a worker each", "h200-x2-one-worker.json"), ("more workers", file))
        ),
        Figure("of these, their legs", "", "", file, lambda found: "; ".join(map(_legs, _on_several(found)))),
        Figure(
            "legs of the longest case of `27486`, without workers", "", "", "h200-serial.json",
            lambda found: f"{max(sum(leg['seconds'] for leg in row['legs']) for row in found['results']):.1f} s",
        ),
    ]  # fmt: skip


def _legs(run: dict[str, Any]) -> str:
    return f"{run['leg_seconds']} s over {run['jobs']} workers: {run['leg_seconds'] / run['jobs']:.0f} s"


def _on_several(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [run for run in document["runs"] if "," in run["visible"]]


def _faster(run: dict[str, Any]) -> str:
    return f"{run['speed_up']} ({run['wall_seconds']} s, {run['workers_a_gpu']} workers a GPU)"


def _kernels() -> list[Figure]:
    """Of each target the size, and for the store the way, that is worst."""
    pairs = ("theirs / ours", 1.3, "SGLang's kernel"), ("fill / ours", 0.75, "a fill of the same bytes")
    rows = [
        *((f"draft kv_indices, {size}", f"draft {size} ", *pair) for size in ("84 MB", "537 MB") for pair in pairs),
        ("store, 1 to 65536 rows", "store ", "theirs / ours", 1.0, "SGLang's kernel"),
        ("store, 1 to 65536 rows", "store ", "no assert / ours", 0.98, "ours without the assert"),
        ("store, 65536 rows", "store ", "copy_ / ours", 0.85, "a copy of the same bytes"),
    ]  # fmt: skip
    return [
        Figure(f"{name}: {pair}", f"{least} at least", beside, "kernels-cuda.json", *least_of(begins, pair))
        for name, begins, pair, least, beside in rows
    ]


def least_of(begins: str, ends: str) -> tuple[Callable[[Any], str], Callable[[Any], bool]]:
    """The worst of a file's `targets` of these names; none, where one of them was left out."""

    def of(document: Any) -> list[Any]:
        found = [row for row in document["targets"] if row["what"].startswith(begins) and row["what"].endswith(ends)]
        if not found or any(row["figure"] is None for row in found):
            raise KeyError(f"{begins.strip()}: {ends}")
        return found

    def read(document: Any) -> str:
        worst = min(of(document), key=lambda row: row["figure"])
        return f"{worst['figure']:.3f} ({worst['what'].split(':')[0]})"

    return read, lambda document: all(row["met"] for row in of(document))


def within_noise(name: str) -> tuple[Callable[[Any], str], Callable[[Any], bool]]:
    """Beside the ratio of two plain runs, which is what the noise does to one."""

    def read(document: Any) -> str:
        ours, noise = document[name]["under unfix exec / plain"], document[name]["plain / plain"]
        return f"{ours['median']:.3f}; noise {noise['low']:.3f} to {noise['high']:.3f}"

    def met(document: Any) -> bool:
        noise = document[name]["plain / plain"]
        return bool(noise["low"] <= document[name]["under unfix exec / plain"]["median"] <= noise["high"])

    return read, met


def _differing(document: Any) -> str:
    return ", ".join(
        f"{name}: {len(each['differ'])} of {each['files']}" for name, each in document["same_bytes"].items()
    )


def _int32(document: Any, what: str, shown: Callable[[float], str]) -> str:
    rows = document["int32"]
    worst = max(rows, key=lambda row: row["sparse"][what])
    plain = f", {shown(worst['plain'][what])} plain" if what in worst.get("plain", {}) else ""
    return f"{shown(worst['sparse'][what])}{plain} ({worst['plain_bytes'] / 1e9:.0f} GB of rows)"


def _overlay(name: str) -> tuple[Callable[[Any], str], Callable[[Any], bool]]:
    def read(document: Any) -> str:
        found, each = document["summary"][name], len(document["overlays"])
        worst = f"{found['worst']['milliseconds']['all']:.0f} ms ({found['worst']['fix']})"
        return f"median {found['median']:.1f} ms; {found['within']} of {each} within, the worst {worst}"

    return read, lambda document: document["summary"][name]["within"] == len(document["overlays"])


def table() -> str:
    lines = ["| figure | target | beside | measured | | command, machine |", "|---|---|---|---|---|---|"]
    for figure in figures():
        file = ROOT / "results" / figure.file
        measured, met, where = "not measured yet", "", f"`results/{figure.file}` is not there"
        if file.exists():
            document = json.loads(file.read_text())
            try:
                measured = figure.read(document)
                if figure.met:
                    met = "met" if figure.met(document) else "missed"
            except KeyError as missing:
                measured = f"not measured yet: the file has no {missing}"
            where = _where(document, figure.file)
        lines.append(f"| {figure.name} | {figure.target} | {figure.baseline} | {measured} | {met} | {where} |")
    return "\n".join(lines) + "\n"


def _where(document: dict[str, Any], file: str) -> str:
    """The command, the machine and the commit. A matrix's file has no command, and where no commit then sources."""
    environment = document.get("environment") or document["runs"][0]["environment"]
    command = re.sub(r" --json \S+", "", document.get("command", "")).strip()
    commit = environment["commit"] or f"sources {environment['sources']}"
    return ", ".join([f"`{command}`" if command else f"`results/{file}`", environment["device"], commit])


def alternatives() -> str:
    """Which overflow each tool of sanitizer.py caught, and how many times as long as nothing it took."""
    lines = ["| what is wrong | " + " | ".join(TOOLS) + " |", "|---" * (len(TOOLS) + 1) + "|"]
    document = json.loads((ROOT / "results" / "sanitizer-cuda.json").read_text())
    for row in document["rows"]:
        cells = [
            f"{'caught' if row[name]['caught'] else '-'} {row[name]['seconds'] / row['nothing']['seconds']:.1f}x"
            for name in TOOLS
        ]
        lines.append(f"| {row['row']} | " + " | ".join(cells) + " |")
    where = _where(document, "sanitizer-cuda.json")
    return "\n".join(lines) + f"\n\n{where}, compute-sanitizer: {document['tools']['compute-sanitizer']}\n"


def page(text: str) -> str:
    """The page with its tables as the files have them."""
    return filled(text, "benchmarks/performance.py", {"table": table, "alternatives": alternatives})


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
