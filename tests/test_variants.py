"""Which form a source tree reads like: one variant, one unfixed form, or rotted, from the text alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import fixes, overlay, variants
from harness.edits import Edit, Reversal
from harness.errors import MissingPackageError, RottedError, UsageError
from harness.fixes import Variant

FORMS = """\
pr: 1
title: t
fixes:
  size:
    kind: size
    summary: s
    reversals:
      box:
        variants:
          - name: inline
            patches: [{target: box.row.Row.make, edits: [{match: "n * topk * ctx", replacement: "n * ctx"}]}]
          - name: helper
            patches:
              - target: box.row.Row.make
                edits: [{match: "width(n, topk, ctx)", replacement: "width(n, 1, ctx)"}]
          - name: moved
            patches: [{target: box.rows.make, edits: [{match: "n * topk * ctx", replacement: "n * ctx"}]}]
  guard:
    kind: guard
    guard: too small
    summary: s
    reversals:
      box:
        variants:
          - name: asserted
            patches:
              - target: box.row.Row.fill
                edits: [{match: "assert need <= row, 'too small'", replacement: ""}]
        unfixed:
          - name: bare
            patches:
              - target: box.row.Row.fill
                edits:
                  - match: |
                      need = n * topk
                      launch(
                    replacement: |
                      need = n * topk
                      assert need <= row, 'too small'
                      launch(
  ours:
    kind: arithmetic
    summary: s
    reversals:
      box:
        unfixed:
          - name: narrow
            patches:
              - target: box.row.Row.fill
                edits: [{match: "at = step * row", replacement: "at = wide(step) * row"}]
"""
ROW = """\
import functools


class Other:
    def make(self, n, topk, ctx):
        return n * topk * ctx * 7


class Row:
    @functools.cache
    def make(self, n, topk, ctx):
        return n * topk * ctx

    def fill(self, n, topk, row, step):
        need = n * topk
        assert need <= row, "too small"
        launch(n, at)
        at = step * row
        return at
"""
FIXED = "n * topk * ctx\n\n"


@pytest.fixture(scope="module")
def catalogue(tmp_path_factory: pytest.TempPathFactory) -> fixes.Catalogue:
    folder = tmp_path_factory.mktemp("toggles")
    (folder / "1.yaml").write_text(FORMS)
    return fixes.load(folder)


def tree(folder: Path, text: str = ROW, module: str = "row") -> Path:
    package = folder / "box"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").touch()
    (package / f"{module}.py").write_text(text)
    return folder


def changed(old: str, new: str, text: str = ROW) -> str:
    assert old in text
    return text.replace(old, new)


GUARD = '        assert need <= row, "too small"\n'
TREES = {
    # name -> (fix, source, state, form)
    "as published": ("size", ROW, "fixed", "inline"),
    "another variant": ("size", changed(FIXED, "width(n, topk, ctx)\n\n"), "fixed", "helper"),
    "over three lines": ("size", changed(FIXED, "width(\n  n,\n  topk,\n  ctx,\n )\n\n"), "fixed", "helper"),
    "the reverted text stands there": ("size", changed(FIXED, "n * ctx\n\n"), "not fixed", "inline"),
    "the other reverted text": ("size", changed(FIXED, "width(n, 1, ctx)\n\n"), "not fixed", "helper"),
    "another wording": ("size", changed(FIXED, "topk * n * ctx\n\n"), "rotted", ""),
    "two variants": ("size", changed(FIXED, "n * topk * ctx + width(n, topk, ctx)\n\n"), "rotted", ""),
    "renamed": ("size", changed("def make(", "def build("), "rotted", ""),
    "a guard": ("guard", ROW, "fixed", "asserted"),
    "no guard": ("guard", changed(GUARD, "        # none\n\n"), "not fixed", "bare"),
    "a guard in other words": ("guard", changed(GUARD, "        check(need, row)\n"), "rotted", ""),
    "two guards": ("guard", changed(GUARD, GUARD + GUARD), "rotted", ""),
    "only unfixed": ("ours", ROW, "not fixed", "narrow"),
    "only unfixed, put in": ("ours", changed("step * row", "wide(step) * row"), "fixed", "narrow"),
    "only unfixed, gone": ("ours", changed("        at = step * row\n", ""), "rotted", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", TREES)
def test_states(tmp_path, catalogue, name):
    fix, text, kind, form = TREES[name]
    here = variants.state(catalogue.fix(f"1:{fix}"), "box", [tree(tmp_path, text)])
    assert (here.kind, here.variant) == (kind, form), here.message
    assert bool(here.reversals) == bool(here.lines) == (kind != "rotted") == (not here.message)
    if here.reversals:  # what says how to turn it does turn it, and then it reads the other way
        [edited] = overlay.plan(here.reversals, [tmp_path]).values()
        old, new = text.splitlines(), edited.new.decode().splitlines()
        assert here.lines == (("box/row.py", next(at for at, line in enumerate(old, 1) if line != new[at - 1])),)
        turned = variants.state(catalogue.fix(f"1:{fix}"), "box", [tree(tmp_path, edited.new.decode())])
        assert {kind, turned.kind} == {"fixed", "not fixed"}


def test_a_moved_module(tmp_path, catalogue):
    root = tree(tmp_path, "def make(n, topk, ctx):\n    return n * topk * ctx\n", "rows")
    here = variants.state(catalogue.fix("1:size"), "box", [root])
    assert (here.kind, here.variant, here.lines) == ("fixed", "moved", (("box/rows.py", 2),))


def test_two_places_that_apply_are_said(tmp_path, catalogue):
    tree(tmp_path)
    root = tree(tmp_path, "def make(n, topk, ctx):\n    return n * topk * ctx\n", "rows")
    message = variants.state(catalogue.fix("1:size"), "box", [root]).message
    assert "reads as fixed (inline applies) and fixed (moved applies)" in message


def test_rotted_names_each_forms_nearest_miss(tmp_path, catalogue):
    root = tree(tmp_path, changed(FIXED, "topk * n * ctx\n\n"))
    with pytest.raises(RottedError) as caught:
        variants.choose(catalogue.fix("1:size"), "box", [root])
    text = str(caught.value)
    assert text.startswith("1:size in box: inline: box.row.Row.make: match `n * topk * ctx` isn't in box/row.py")
    assert "nearest: line 12: " in text and "; helper: box.row.Row.make" in text and "; moved: box.rows.make" in text
    assert "\n" not in text and caught.value.exit_code == 3
    root = tree(tmp_path, changed("def make(", "def makes("))
    with pytest.raises(RottedError, match=r"has no Row.make; nearest: box.row.Row.makes, line 11"):
        variants.choose(catalogue.fix("1:size"), "box", [root])


def test_choose_either_way(tmp_path, catalogue):
    guard, ours, root = catalogue.fix("1:guard"), catalogue.fix("1:ours"), tree(tmp_path)
    assert variants.choose(guard, "box", [root]) == guard.variants_for("box")[0].reversals
    with pytest.raises(variants.AlreadyFixedError, match=r"1:guard is in this box .*'asserted'.*: nothing to put in"):
        variants.choose_forward(guard, "box", [root])
    assert variants.choose_forward(ours, "box", [root]) == ours.unfixed_for("box")[0].reversals
    with pytest.raises(variants.NotFixedError, match=r"1:ours isn't in this box .*nor in any release known"):
        variants.choose(ours, "box", [root])
    both = variants.choose_all(catalogue, ["1:size", "1:guard"], "box", [root])
    assert [reversal.fix for reversal in both] == ["1:size", "1:guard"]
    assert variants.choose_all(catalogue, catalogue.ids, "elsewhere", [root]) == ()
    with pytest.raises(UsageError, match=r"1:size has several variants in box \(inline, helper, moved\)"):
        catalogue.fix("1:size").reversals_for("box")


def test_a_package_that_is_not_there(tmp_path, catalogue):
    with pytest.raises(MissingPackageError):
        variants.state(catalogue.fix("1:size"), "box", [tmp_path])


SHAPES = """\
def deco(f): return f

class A:
    @property
    def p(self):
        return 1 + 1
    @p.setter
    def p(self, v):
        self.v = 2 + 2
    @deco
    async def m(self):
        async def inner():
            return super().x + 3
        return await inner()
    class B:
        def m(self): return 4 + 4

if True:
    def g():
        return 5 + 5
async def h():
    yield 6 + 6
"""


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize(
    ("target", "match", "line"),
    [("A.p", "1 + 1", 6), ("A.p", "2 + 2", 9), ("A.m", "super().x + 3", 13), ("A.m.inner", "super().x", 13),
     ("A.B.m", "4 + 4", 16), ("A.B", "4 + 4", 16), ("A", "1 + 1", 6), ("g", "5 + 5", 20), ("h", "6 + 6", 22),
     ("", "f", 1)],
)  # fmt: skip
def test_the_excerpt_says_what_the_whole_file_says(tmp_path, target, match, line, padding, newline):
    root = tree(tmp_path)
    (root / "box/row.py").write_bytes(("\n" * padding + SHAPES).replace("\n", newline).encode())
    # `f` is there twice: refused either way
    for edit in (Edit(match, replacement="99"), Edit("not there", replacement="99")):
        reversal = Reversal("1:x", f"box.row.{target}".rstrip("."), (edit,))
        found = variants.judge([Variant("v", (reversal,))], [], [root])
        try:
            overlay.plan([reversal], [root])
        except RottedError:
            assert found.kind == "rotted"
        else:
            assert (found.kind, found.lines) == ("fixed", (("box/row.py", line + padding),))


def test_every_registered_fix_says_how_sglang_reads(root):
    for fix in fixes.load(root / "toggles"):
        assert "sglang" in fix.code_bases, fix.id
        assert bool(fix.variants_for("sglang")) == (fix.pr != "own"), fix.id
        names = [form.name for form in (*fix.variants_for("sglang"), *fix.unfixed_for("sglang"))]
        assert all(names) and len(set(names)) == len(names)
