"""The int32 audit: what it finds in a kernel, what it may not miss, and what it says of our kernels and SGLang's."""

from __future__ import annotations

import itertools
import json
import os
import re
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from harness import audit, auditfile, fixes, lightenv, mlir, overlay, ttir, variants
from harness.audit import Product
from harness.errors import InfraError, RottedError, ToggleError, UnfixError
from harness.ranges import RULES, Range

RELEASES = ("0.5.13", "0.5.23")

# A kernel's body -> its products that may wrap: "product -> pointer". Arguments: pointers p, q (float32) and idx
# (int32), and n, s, t (int32). Bounds: small is at most 100, big at most 50000.
TOYS: dict[str, tuple[str, set[str]]] = {
    "plain": ("i = tl.program_id(0)\ntl.store(p + i * s, 1.0)", {"i * s -> p"}),
    "widened before": ("i = tl.program_id(0).to(tl.int64)\ntl.store(p + i * s, 1.0)", set()),
    "widened after": ("i = tl.program_id(0)\ntl.store(p + (i * s).to(tl.int64), 1.0)", {"i * s -> p"}),
    "in a sum": ("i = tl.program_id(0)\ntl.store(p + (n + i * s), 1.0)", {"i * s -> p"}),
    "in a sum after": ("i = tl.program_id(0)\ntl.store(p + (n.to(tl.int64) + i * s), 1.0)", {"i * s -> p"}),
    "both pointers": (
        "i = tl.program_id(0)\noff = i * s\ntl.store(p + off, tl.load(q + off))",
        {"i * s -> p, q"},
    ),
    "fits": ("small = tl.load(idx)\nbig = tl.load(idx + 1)\ntl.store(p + small * big, 1.0)", set()),
    "just too large": ("big = tl.load(idx)\ntl.store(p + big * big, 1.0)", {"big * big -> p"}),
    "three factors": (
        "small = tl.load(idx)\nbig = tl.load(idx + 1)\ntl.store(p + small * small * big * 5, 1.0)",
        {"small * small * big * 5 -> p"},
    ),
    "the first two of three wrap": ("i = tl.program_id(0)\ntl.store(p + i * s * n, 1.0)", {"i * s * n -> p"}),
    "only the sum wraps": (
        "small = tl.load(idx)\nbig = tl.load(idx + 1)\ntl.store(p + (big * small * 400 + big * small * 401), 1.0)",
        {"big * small * 400 + big * small * 401 -> p"},
    ),
    "loaded index": ("tl.store(p + tl.load(idx) * s, 1.0)", {"load * s -> p"}),
    "a row of a tile": (
        "rows = tl.program_id(0) * 16 + tl.arange(0, 16)\n"
        "tl.store(p + rows[:, None] * s + tl.arange(0, 16)[None, :], 1.0)",
        {"program_id(0) * 16 -> p"},
    ),
    "a small row of a tile": (
        "small = tl.load(idx)\nrows = small * 16 + tl.arange(0, 16)\n"
        "tl.store(p + rows[:, None] * s + tl.arange(0, 16)[None, :], 1.0)",
        {"rows * s -> p"},
    ),
    "divided": ("i = tl.program_id(0)\ntl.store(p + (i * s) // 4, 1.0)", {"i * s -> p"}),
    "chosen": ("i = tl.program_id(0)\ntl.store(p + tl.where(n > 0, i * s, 0), 1.0)", {"i * s -> p"}),
    "shifted": ("i = tl.program_id(0)\ntl.store(p + (i << 20), 1.0)", {"i << 20 -> p"}),
    "a branch": (
        "i = tl.program_id(0)\noff = 0\nif tl.load(idx) > 0:\n    off = i * s\ntl.store(p + off, 1.0)",
        {"i * s -> p"},
    ),
    "carried through a loop": (
        "i = tl.program_id(0)\noff = i * s\nfor _ in range(n):\n    tl.store(p + off, 1.0)\n    off += 1",
        {"i * s -> p"},
    ),
    "summed up in a loop": (
        "small = tl.load(idx)\noff = small * 8\nfor _ in range(n):\n    tl.store(p + off, 1.0)\n    off += 1",
        {"off + 1 -> p"},
    ),
    "a loop's counter": (
        "for i in range(n):\n    tl.store(p + i * s, 1.0)",
        {"i * s -> p"},
    ),
    "a while loop": (
        "i = tl.program_id(0)\nk = tl.load(idx)\noff = i * s\n"
        "while k > 0:\n    tl.store(p + off, 1.0)\n    k = tl.load(idx + k)",
        {"i * s -> p"},
    ),
    "an early return": (
        "i = tl.program_id(0)\nif tl.load(idx) > 0:\n    return\ntl.store(p + i * s, 1.0)",
        {"i * s -> p"},
    ),
    "a helper": ("i = tl.program_id(0)\ntl.store(p + times(i, s), 1.0)", {"i * s -> p"}),
    "a pointer moved in a loop": (
        "for _ in range(n):\n    tl.store(p, 1.0)\n    p += n * s",
        {"n * s -> p"},
    ),
    "no address": ("i = tl.program_id(0)\ntl.store(p + i, (i * s).to(tl.float32))", set()),
    "only a mask": ("i = tl.program_id(0)\ntl.store(p + i, 1.0, mask=i * s < n)", set()),
}  # fmt: skip
HEAD = "import triton\nimport triton.language as tl\n\n@triton.jit\ndef times(a, b):\n    return a * b\n\n"
BOUNDS = {"small": 100, "big": 50000}
TYPES = {"p": "*fp32", "q": "*fp32", "idx": "*i32", "n": "i32", "s": "i32", "t": "i32"}


def _entry(name: str, body: str) -> dict[str, Any]:
    bounds = {key: {"value": value, "why": "a test"} for key, value in BOUNDS.items() if f"{key} =" in body}
    return {"targets": [f"toys.{name}"], "args": TYPES, "at_most": bounds}


def _write(folder: Path, kernels: dict[str, str], entries: list[dict[str, Any]]) -> auditfile.AuditFile:
    functions = [
        f"@triton.jit\ndef {name}({', '.join(TYPES)}):\n{textwrap.indent(body, '    ')}\n\n"
        for name, body in kernels.items()
    ]
    (folder / "toys.py").write_text(HEAD + "".join(functions))
    (folder / "toys.yaml").write_text(json.dumps({"kernels": entries}, indent=1))
    return auditfile.load(folder / "toys.yaml")


def _name(case: str) -> str:
    return re.sub(r"\W", "_", case)


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Product]]:
    """All toy kernels, compiled in one process."""
    folder = tmp_path_factory.mktemp("toys")
    bodies = {_name(case): body for case, (body, _) in TOYS.items()}
    file = _write(folder, bodies, [_entry(name, body) for name, body in bodies.items()])
    return folder, audit.audit(file, folder, [folder])


@pytest.mark.parametrize("case", TOYS)
def test_a_product_that_may_wrap_is_found_and_no_other(case: str, toys: tuple[Path, list[Product]]) -> None:
    folder, products = toys
    mine = [each for each in products if each.kernel == _name(case) and each.state == "finding"]
    text = (folder / "toys.py").read_text().splitlines()
    assert {f"{each.text} -> {', '.join(each.pointers)}" for each in mine} == TOYS[case][1]
    for each in mine:
        assert text[each.line - 1].strip() == each.source


def _quotient(a: int, b: int) -> int | None:
    """C's: towards zero."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1) if b else None


CONCRETE: dict[str, Callable[[int, int], int | None]] = {
    "arith.muli": lambda a, b: a * b,
    "arith.shli": lambda a, b: a << b if b >= 0 else None,
    "arith.addi": lambda a, b: a + b,
    "arith.subi": lambda a, b: a - b,
    "arith.divsi": _quotient,
    "arith.remsi": lambda a, b: a - (_quotient(a, b) or 0) * b if b else None,
    "arith.minsi": min,
    "arith.maxsi": max,
}


@pytest.mark.parametrize("op", CONCRETE)
def test_a_range_holds_every_result(op: str) -> None:
    assert set(RULES) == {*CONCRETE, "arith.select", "iv"}
    ends = [(low, high) for low, high in itertools.product(range(-3, 4), repeat=2) if low <= high]
    for (a, b), (c, d) in itertools.product(ends, repeat=2):
        found = RULES[op](Range(a, b), Range(c, d))
        results = [CONCRETE[op](x, y) for x in range(a, b + 1) for y in range(c, d + 1)]
        assert all(found.low <= each <= found.high for each in results if each is not None), (op, a, b, c, d, found)


WRAPS = "i = tl.program_id(0)\ntl.store(p + i * s, 1.0)"
ALLOW = {"line": "tl.store(p + i * s, 1.0)", "reason": "s is 1 there"}
BOUND = {"value": 9, "why": "a test"}


def test_an_explanation_is_kept_with_its_reason_and_leaves_other_lines(tmp_path: Path) -> None:
    body = f"{WRAPS}\ntl.store(q + i * n, 1.0)"
    file = _write(tmp_path, {"k": body}, [{"targets": ["toys.k"], "args": TYPES, "allow": [ALLOW]}])
    products = audit.audit(file, tmp_path, [tmp_path])
    assert [(each.state, each.source, each.reason) for each in products] == [
        ("allowed", "tl.store(p + i * s, 1.0)", "s is 1 there"),
        ("finding", "tl.store(q + i * n, 1.0)", ""),
    ]


def test_an_explained_product_hides_no_wrap_that_follows(tmp_path: Path) -> None:
    body = "i = tl.program_id(0)\nrow = i * s\ntl.store(p + row * n, 1.0)"
    entry = {"targets": ["toys.k"], "args": TYPES, "allow": [{"line": "row = i * s", "reason": "a test"}]}
    products = audit.audit(_write(tmp_path, {"k": body}, [entry]), tmp_path, [tmp_path])
    assert [(each.state, each.text) for each in products] == [("allowed", "i * s"), ("finding", "row * n")]


def test_a_build_has_its_own_arguments_and_bounds(tmp_path: Path) -> None:
    body = "i = tl.program_id(0)\ntl.store(p + i * t, 1.0)"
    small = {"args": {"t": 5}, "at_most": {"i": BOUND}}
    other = {"args": {"gone": 5}}
    entry = {"targets": ["toys.k"], "args": TYPES, "builds": {"small": small, "other": other}}
    products = audit.audit(_write(tmp_path, {"k": body}, [entry]), tmp_path, [tmp_path])
    assert [(each.state, each.text, each.largest, each.builds) for each in products] == [
        ("finding", "i * t", None, ("",)),
        ("fits", "i * t", 45, ("small",)),
    ]


# What is wrong with an entry -> the error, and what it says.
BAD: dict[str, tuple[dict[str, Any], type[UnfixError], str]] = {
    "a line that is no more": ({"allow": [{**ALLOW, "line": "old line"}]}, ToggleError, r"yaml:\d+: .*stale: no 32"),
    "a line that fits": ({"args": {**TYPES, "s": 2}, "at_most": {"i": BOUND}, "allow": [ALLOW]}, ToggleError, "stale"),
    "a bound of nothing": ({"at_most": {"rows": BOUND}}, ToggleError, r"yaml:\d+: .*computes no rows"),
    "a bound without a why": ({"at_most": {"i": {"value": 9}}}, ToggleError, "why is missing"),
    "an unknown key": ({"allows": []}, ToggleError, "unknown key allows"),
    "an argument too many": ({"args": {**TYPES, "u": 1}}, RottedError, "it has no u"),
    "an argument too few": ({"args": {"p": "*fp32"}}, RottedError, "args lack its q, args lack its idx"),
    "a kernel that is gone": ({"targets": ["toys.other"]}, RottedError, "no entry of other fits"),
    "a type that is none": ({"args": {**TYPES, "s": "i33x"}}, InfraError, "toys.k does not compile to TTIR"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_entry_is_one_clear_line(case: str, tmp_path: Path) -> None:
    changes, error, message = BAD[case]
    with pytest.raises(error, match=message):
        file = _write(tmp_path, {"k": WRAPS}, [{"targets": ["toys.k"], "args": TYPES, **changes}])
        audit.audit(file, tmp_path, [tmp_path])


def test_an_optional_kernel_may_be_absent_and_not_be_another(tmp_path: Path) -> None:
    gone = {"targets": ["toys.other"], "args": TYPES, "optional": True}
    assert audit.audit(_write(tmp_path, {"k": WRAPS}, [gone]), tmp_path, [tmp_path]) == []
    other = {"targets": ["toys.k"], "args": {**TYPES, "u": 1}, "optional": True}
    with pytest.raises(RottedError, match="it has no u"):
        audit.audit(_write(tmp_path, {"k": WRAPS}, [other]), tmp_path, [tmp_path])


def test_what_can_not_be_followed_is_no_silence(tmp_path: Path) -> None:
    body = "d = tl.make_tensor_descriptor(p, [n, 64], [64, 1], [16, 64])\nd.store([0, 0], d.load([n * s, 0]))"
    file = _write(tmp_path, {"k": body}, [{"targets": ["toys.k"], "args": TYPES}])
    with pytest.raises(InfraError, match=r"toys\.py:\d+: the audit can't follow tt\.make_tensor_descriptor"):
        audit.audit(file, tmp_path, [tmp_path])
    with pytest.raises(InfraError, match="can't read this loop"):
        mlir.read("module {\n  scf.for unsigned %i = %a to %b step %c {\n")


def test_an_interpreted_session_is_compiled_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    (tmp_path / "toys.py").write_text(HEAD)
    [text] = ttir.compile_all([ttir.Build("toys.times", {"a": "i32", "b": "i32"})], [tmp_path])
    assert "tt.func public @times" in text
    assert os.environ["TRITON_INTERPRET"] == "1"


def _of_ours(root: Path, reverted: Sequence[str], catalogue: fixes.Catalogue) -> list[Product]:
    sources = root / "kernels"
    reversals = variants.choose_all(catalogue, reverted, "eagle_kv", [sources])
    built = overlay.build(overlay.plan(reversals, [sources]))
    return audit.audit(auditfile.load(root / "audits" / "eagle_kv.yaml"), sources, [built or sources, sources])


def test_ours_is_clean_and_without_its_fix_it_is_not(root: Path, catalogue: fixes.Catalogue) -> None:
    """The audit's self-test: the bug that it is for, put back."""
    assert [each for each in _of_ours(root, (), catalogue) if each.state != "fits"] == []
    [found] = [each for each in _of_ours(root, ("own:int32-rows",), catalogue) if each.state != "fits"]
    assert (found.state, found.file, found.text) == ("finding", "eagle_kv/kernel.py", "step * row_stride")
    assert (found.source, found.pointers) == ("row = step * row_stride", ("kv_indices", "req_to_token"))
    assert {each.name: each.largest for each in found.factors} == {"step": 63, "row_stride": 2**31 - 1}


ROWS = "kv_indices += kv_indices_stride * iters"
MIDDLE = {"cur_batch * stride_mid_ob", "offs_v = cur_batch * stride_mid_ob + cur_head * stride_mid_oh + offs_d"}
WINDOW = "window_kv_indices += kv_indices_stride * iters"
FOUND = {"0.5.13": {ROWS, *MIDDLE}, "0.5.23": {ROWS, WINDOW}}  # 28788 is in since 0.5.16


@pytest.mark.parametrize("release", RELEASES)
def test_sglang_has_the_bugs_that_are_known_and_loses_one_by_its_fix(
    release: str, root: Path, catalogue: fixes.Catalogue
) -> None:
    if not lightenv.is_installed(release):
        pytest.skip(f"needs `unfix upstream install {release}`")
    file, sources = auditfile.load(root / "audits" / "sglang.yaml"), lightenv.sources(release)
    found = [each for each in audit.audit(file, sources, [sources]) if each.state != "fits"]
    assert {each.source for each in found} == FOUND[release]
    assert all(each.state == "finding" and each.file.startswith("sglang/") for each in found)
    forward = variants.choose_forward(catalogue.fix("own:int32-rows"), "sglang", [sources])
    built = overlay.build(overlay.plan(forward, [sources]))
    assert built is not None
    found = [each for each in audit.audit(file, sources, [built, sources]) if each.state != "fits"]
    assert {each.source for each in found} == FOUND[release] - {ROWS}


def test_the_command(unfix: Any) -> None:
    clean = unfix("audit")
    assert (clean.returncode, clean.stdout) == (0, "eagle_kv: 0 findings, 0 explained, 15 fit\n")
    broken = unfix("audit", "--json", "-", SGLANG_DEBUG_REVERT_PR="own:int32-rows")
    document = json.loads(broken.stdout)
    assert (broken.returncode, document["reverted"]) == (1, ["own:int32-rows"])
    [found] = [each for each in document["results"] if each["state"] == "finding"]
    assert found["factors"] == [{"name": "step", "largest": 63}, {"name": "row_stride", "largest": 2**31 - 1}]
    told = unfix("audit", "--revert", "own:int32-rows")
    assert told.stdout.splitlines()[0] == (
        f"{found['file']}:{found['line']}: finding: generate_draft_decode_kv_indices: step * row_stride is 32-bit"
    )
    assert unfix("audit", "--target", "sglang").returncode == 2
