"""Diffs, and the fixes drafted from them: small made-up texts, and, where releases are cached, SGLang's own."""

from __future__ import annotations

import ast
import difflib
import re
import textwrap
from pathlib import Path

import pytest

from harness import draft, fixes, overlay, unidiff, upstream, variants
from harness.edits import Change, Edit, Reversal, apply
from harness.errors import InfraError, UsageError

BEFORE, AFTER = "a = 1\nb = 2\nc = 3\n", "a = 1\nb = 20\nc = 3\n"
HUNK = "@@ -1,3 +1,3 @@\n a = 1\n-b = 2\n+b = 20\n c = 3\n"
GIT = "diff --git a/pkg/m.py b/pkg/m.py\nindex 1..2 100644\n--- a/pkg/m.py\n+++ b/pkg/m.py\n" + HUNK
PARSED = {
    # name -> (diff, what is read: old path, new path, hunks, binary)
    "git": (GIT, [("pkg/m.py", "pkg/m.py", 1, False)]),
    "git show": (
        "commit 1\nAuthor: x\n\n    --- not a file\n    @@ not a hunk\n\n" + GIT,
        [("pkg/m.py", "pkg/m.py", 1, False)],
    ),
    "a mail": ("Subject: x\n---\n m.py | 2 +-\n\n" + GIT + "-- \n2.40.1\n\n", [("pkg/m.py", "pkg/m.py", 1, False)]),
    "diff -u": (
        "--- 1.0/pkg/m.py\t2026-01-01\n+++ 1.1/pkg/m.py\t2026-01-02\n" + HUNK,
        [("1.0/pkg/m.py", "1.1/pkg/m.py", 1, False)],
    ),
    "CRLF": (GIT.replace("\n", "\r\n"), [("pkg/m.py", "pkg/m.py", 1, False)]),
    "two files": (
        GIT + GIT.replace("m.py", "n.py"),
        [("pkg/m.py", "pkg/m.py", 1, False), ("pkg/n.py", "pkg/n.py", 1, False)],
    ),
    "renamed": (
        "diff --git a/x.py b/y.py\nsimilarity index 100%\nrename from x.py\nrename to y.py\n",
        [("x.py", "y.py", 0, False)],
    ),
    "new": (
        "diff --git a/n.py b/n.py\nnew file mode 100644\n--- /dev/null\n+++ b/n.py\n@@ -0,0 +1 @@\n+a\n",
        [(None, "n.py", 1, False)],
    ),
    "empty, new": ("diff --git a/n.py b/n.py\nnew file mode 100644\nindex 0..1\n", [(None, "n.py", 0, False)]),
    "deleted": (
        "diff --git a/n.py b/n.py\ndeleted file mode 100644\n--- a/n.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-a\n",
        [("n.py", None, 1, False)],
    ),
    "binary": (
        "diff --git a/l.so b/l.so\nindex 1..2\nBinary files a/l.so and b/l.so differ\n",
        [("l.so", "l.so", 0, True)],
    ),
    "binary, diff -r": (
        "Binary files 1.0/l.so and 1.1/l.so differ\n" + GIT,
        [("1.0/l.so", "1.1/l.so", 0, True), ("pkg/m.py", "pkg/m.py", 1, False)],
    ),
    "odd name": (
        'diff --git "a/\\303\\244 b.py" "b/\\303\\244 b.py"\n--- "a/\\303\\244 b.py"\n+++ "b/\\303\\244 b.py"\n' + HUNK,
        [("ä b.py", "ä b.py", 1, False)],
    ),
    "no last line end": (GIT.rstrip("\n") + "\n\\ No newline at end of file\n", [("pkg/m.py", "pkg/m.py", 1, False)]),
    "blanks stripped": ("--- a/m.py\n+++ b/m.py\n@@ -1,3 +1,3 @@\n a\n\n-b\n+c\n", [("m.py", "m.py", 1, False)]),
}


@pytest.mark.parametrize("name", PARSED)
def test_a_diff_is_read(name):
    text, wanted = PARSED[name]
    assert [(file.old, file.new, len(file.hunks), file.binary) for file in unidiff.parse(text)] == wanted


REFUSED = {
    "no diff": ("hello\n", "f: no unified diff in it"),
    "empty": ("", "f: no unified diff in it"),
    "a merge": ("diff --cc m.py\nindex 1,2..3\n", "f:1: a merge's combined diff"),
    "cut off": (GIT[: GIT.rindex(" c")], "f:9: the hunk of line 5 ends too early: 2 of 3"),
    "no hunk header": (GIT.replace("@@ -1,3 +1,3 @@", "@@ here @@"), "f:5: no hunk header"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_diff_is_refused_in_one_line(name):
    text, said = REFUSED[name]
    with pytest.raises(UsageError) as error:
        unidiff.parse(text, "f")
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("now", "then"),
    [
        (AFTER, BEFORE),
        ("x = 0\n\n\n" + AFTER, "x = 0\n\n\n" + BEFORE),
        (AFTER + "x = 0\n" + AFTER, BEFORE + "x = 0\n" + AFTER),
        (AFTER.replace("\n", "\r\n"), BEFORE.replace("\n", "\r\n")),
    ],
    ids=["in place", "further down", "twice", "CRLF"],
)
def test_a_hunk_is_undone(now, then):
    [file] = unidiff.parse(GIT)
    assert unidiff.undo(now, file.hunks) == then


@pytest.mark.parametrize(
    ("now", "said"),
    [(BEFORE, "these sources lack the fix"), ("a = 1\nb = 30\nc = 3\n", "no such lines around line 1: `b = 20`")],
)
def test_a_hunk_that_is_not_there(now, said):
    [file] = unidiff.parse(GIT)
    with pytest.raises(unidiff.DoesNotApply, match=said) as error:
        unidiff.undo(now, file.hunks)
    assert error.value.hunk.line == 5


def _drafts() -> dict[str, tuple[str, str, list[tuple[str, str, list[str]]]]]:
    """drafts.txt: name -> (the text before, the text after, the fixes: name, kind and edits)."""
    found = {}
    for case in re.split(r"^=== ", Path(__file__).with_name("drafts.txt").read_text(), flags=re.MULTILINE)[1:]:
        name, rest = case.split("\n", 1)
        old, new, wanted = re.split(r"^--- .*\n", rest, flags=re.MULTILINE)
        named = re.findall(r"^(\S+) \((\w+)\)\n((?:    .*\n?)*)", wanted, re.MULTILINE)
        found[name] = old, new, [(fix, kind, sorted(map(str.strip, edits.splitlines()))) for fix, kind, edits in named]
    return found


DRAFTS = _drafts()


def shown(edit: Edit) -> str:
    sign, text = next(
        (s, t) for s, t in (("->", edit.replacement), ("<-", edit.prepend), (">-", edit.append)) if t is not None
    )
    return f"{' '.join(edit.match.split())} {sign} {' '.join(text.split())}".strip()


def drafted(old: str, new: str, only: str | None = None, **more: str) -> draft.Draft:
    return draft.draft([draft.Texts("pkg.m", "python", old, new)], only, **more)


def edits_of(fix: draft.DraftFix) -> list[Edit]:
    return [edit for edits in fix.reversals.values() for edit in edits]


@pytest.mark.parametrize("name", DRAFTS)
def test_what_is_drafted(name):
    old, new, wanted = DRAFTS[name]
    got = [(fix.name, fix.kind, sorted(map(shown, edits_of(fix)))) for fix in drafted(old, new).fixes]
    assert got == wanted


@pytest.mark.parametrize("name", [name for name, (_, _, wanted) in DRAFTS.items() if wanted])
def test_all_drafted_edits_together_give_the_old_functions_back(name):
    old, new, _ = DRAFTS[name]
    got = drafted(old, new)
    changes_ = [Change(edit, ((0, len(new)),)) for fix in got.fixes for edit in edits_of(fix)]
    undone = ast.parse(apply(new, changes_))
    if any("left alone" in line for line in got.left):
        assert ast.dump(undone) != ast.dump(ast.parse(new))
    else:
        assert _bodies(undone) == _bodies(ast.parse(old))


def _bodies(tree: ast.Module) -> list[str]:
    """All functions without their names, and what stands outside of them."""
    stmts = [stmt for stmt in tree.body if not isinstance(stmt, ast.Import | ast.ImportFrom)]
    return [
        ast.dump(ast.Module(stmt.body, [])) if isinstance(stmt, ast.FunctionDef) else ast.dump(stmt) for stmt in stmts
    ]


TWO = "class A:\n    def f(self):\n        return 1\n    def g(self):\n        return 1\n"
NARROWED = [
    ("A.f", ["A.f"]),
    ("*.g", ["A.g"]),
    ("g", ["A.g"]),
    ("pkg.m.A.*", ["A.f", "A.g"]),
    ("*:*-changed", ["A.f", "A.g"]),
    ("*:*-assert", []),
    ("h", []),
]


@pytest.mark.parametrize(("only", "wanted"), NARROWED)
def test_only(only, wanted):
    got = drafted(TWO, TWO.replace("1", "2"), only)
    assert [part.piece.where for fix in got.fixes for part in fix.parts] == wanted


def test_a_new_function_that_is_asked_for_is_undone_in_what_it_refuses():
    new = "def wide(n):\n    assert n < 2**31, 'offset would overflow'\n    return n\n"
    assert [fix.name for fix in drafted("", new, "wide").fixes] == ["int32-assert"]
    assert not drafted("", new).fixes


def test_a_name_makes_all_of_it_one_fix():
    [fix] = drafted(
        DRAFTS["two independent changes"][0], DRAFTS["two independent changes"][1], name="both", summary="Both."
    ).fixes
    assert (fix.name, fix.summary, len(fix.parts), fix.guard) == ("both", "Both.", 2, None)


GUARDS = {
    'assert n, "too small: need more"': "too small: need more",
    'assert n, f"row too small: need {n}, has {m}"': "row too small: need",
    'if n:\n    raise ValueError("n (of f) is bad")': r"n \(of f\) is bad",
    "assert n": "AssertionError",
    'assert_fits(n, "kv_indices row")': "kv_indices row",
}


@pytest.mark.parametrize("code", GUARDS)
def test_what_a_guard_says(code):
    new = "def f(n):\n" + textwrap.indent(code, "    ") + "\n    return n"
    [fix] = drafted("def f(n):\n    return n", new).fixes
    assert fix.guard == GUARDS[code]


CUDA = """#include <cstdint>
struct Params {
  int64_t stride;
  uint32_t rows;
};
__global__ void store(const Params params) {
  const auto slot = slots[row];
  write(slot);
}
"""
GUARDED = (
    CUDA.replace("#include", "#include <cassert>\n#include", 1)
    .replace("  uint32_t rows;\n", "  uint32_t rows;\n  int64_t size_limit;\n")
    .replace("  write", "  // fail here\n  assert(slot >= 0 && slot < params.size_limit);\n  write")
)
C_DRAFTS = [
    (GUARDED, [("slot-assert", ["assert(slot >= 0 && slot < params.size_limit); ->"])]),
    (CUDA.replace("uint32_t rows", "int64_t rows"), [("store-changed", ["int64_t rows; -> uint32_t rows;"])]),
    (
        CUDA.replace("  write(slot);\n", ""),
        [("store-changed", ["const auto slot = slots[row]; -> const auto slot = slots[row]; write(slot);"])],
    ),
    (CUDA.replace("write(slot)", "write(\n      slot)"), []),
]


@pytest.mark.parametrize(("new", "wanted"), C_DRAFTS, ids=["a guard", "a type", "taken away", "layout"])
def test_a_cuda_source(new, wanted):
    got = draft.draft([draft.Texts("pkg/csrc/store.cuh", "c", CUDA, new)])
    assert [(fix.name, [*map(shown, edits_of(fix))]) for fix in got.fixes] == wanted


# Texts before and after, made up but for the lines that the catalogue's own reversals name.
HAND = {
    "27338:capacity-assert": (
        "flashinfer_backend.FlashInferMultiStepDraftBackend.common_template",
        """\
        class FlashInferMultiStepDraftBackend:
            def common_template(self, forward_batch, kv_indices_buffer):
                go(bs)
        """,
        """\
        class FlashInferMultiStepDraftBackend:
            def common_template(self, forward_batch, kv_indices_buffer):
                # a row has to hold it
                required_kv_indices_len = draft_kv_indices_used_len(
                    seq_lens_sum, self.topk, bs, self.speculative_num_steps
                )
                assert_buffer_fits(
                    required_kv_indices_len,
                    kv_indices_buffer.shape[1],
                    "EAGLE draft kv_indices row (size max_bs * topk * max_context_len)",
                    bs=bs,
                    seq_lens_sum=seq_lens_sum,
                )
                go(bs)
        """,
    ),
    "27360:decode-slice": (
        "flashattention_backend.FlashAttentionBackend._apply_cuda_graph_metadata",
        """\
        class FlashAttentionBackend:
            def _apply_cuda_graph_metadata(self):
                cache_loc = view(1)
                if self.page_size > 1:
                    put(cache_loc)
        """,
        """\
        class FlashAttentionBackend:
            def _apply_cuda_graph_metadata(self):
                cache_loc = view(1)
                if self.page_size > 1:
                    cache_loc = cache_loc[:, :decode_length]
                    put(cache_loc)
        """,
    ),
}


@pytest.mark.parametrize("name", HAND)
def test_a_draft_does_what_the_hand_written_reversal_does(tmp_path, catalogue, name):
    function, *texts = HAND[name]
    old, new = map(textwrap.dedent, texts)
    dotted = "sglang.srt.layers.attention." + function.partition(".")[0]
    file = tmp_path.joinpath(*dotted.split(".")).with_suffix(".py")
    file.parent.mkdir(parents=True)
    file.write_text(new)
    [fix] = draft.draft([draft.Texts(dotted, "python", old, new)], f"*.{function}").fixes
    assert _same_text(catalogue.fix(name), fix, tmp_path)


def _same_text(written: fixes.Fix, fix: draft.DraftFix, root: Path) -> bool:
    """Whether the files that a draft edits read as the hand-written reversal's do."""
    hand = overlay.plan(variants.choose(written, "sglang", [root]), [root])
    edits = [
        Reversal("x", target, tuple(edits), "x" if "/" in target else None) for target, edits in fix.reversals.items()
    ]
    mine = overlay.plan(edits, [root])
    return bool(mine) and all(path in hand and file.new == hand[path].new for path, file in mine.items())


ATTENTION, SPECULATIVE = "srt/layers/attention", "srt/speculative"
RELEASED = [
    (
        "27338:capacity-assert",
        f"{ATTENTION}/flashinfer_backend.py",
        "0.5.12.post1",
        "0.5.13",
        "*Multi*.common_template",
    ),
    (
        "27460:capacity-assert",
        f"{ATTENTION}/flashinfer_mla_backend.py",
        "0.5.12.post1",
        "0.5.13",
        "*Multi*.common_template",
    ),
    ("27486:int32-guard", f"{SPECULATIVE}/spec_utils.py", "0.5.12.post1", "0.5.13", "draft_kv_indices_buffer_width"),
    (
        "27486:draft-tokens-assert",
        f"{SPECULATIVE}/multi_layer_eagle_worker_v2.py",
        "0.5.12.post1",
        "0.5.13",
        "*.__init__",
    ),
    ("27486:slot-assert", "jit_kernel/csrc/elementwise/kvcache.cuh", "0.5.12.post1", "0.5.13", "*"),
    (
        "27360:decode-slice",
        f"{ATTENTION}/flashattention_backend.py",
        "0.5.12.post1",
        "0.5.13",
        "*._apply_cuda_graph_metadata",
    ),
    (
        "27360:page-table-assert",
        f"{ATTENTION}/flashattention_backend.py",
        "0.5.12.post1",
        "0.5.13",
        "*._apply_cuda_graph_metadata",
    ),
    ("25015:draft-positions", f"{SPECULATIVE}/eagle_worker_v2.py", "0.5.11", "0.5.12", "*.draft_forward"),
    (
        "25015:capture-positions",
        f"{SPECULATIVE}/eagle_draft_cuda_graph_runner.py",
        "0.5.11",
        "0.5.12",
        "*.capture_one_batch_size",
    ),
    ("26866:bonus-stride", f"{SPECULATIVE}/eagle_worker_v2.py", "0.5.12.post1", "0.5.13", "*.verify"),
]


def _release(version: str) -> Path:
    try:
        there = upstream.cached()
    except InfraError:
        there = []
    if version not in there:
        pytest.skip(f"SGLang {version} isn't in the cache (unfix check --release {version} fetches it)")
    return upstream.release(version).root


@pytest.mark.parametrize(("name", "path", "before", "after", "only"), RELEASED, ids=[row[0] for row in RELEASED])
def test_from_the_diff_of_one_file_between_two_releases(catalogue, name, path, before, after, only):
    old, new = ((_release(version) / "sglang" / path).read_text() for version in (before, after))
    lines = [text.splitlines(keepends=True) for text in (old, new)]
    [file] = unidiff.parse("".join(difflib.unified_diff(*lines, f"{before}/sglang/{path}", f"{after}/sglang/{path}")))
    assert unidiff.undo(new, file.hunks) == old
    python = path.endswith(".py")
    target = f"sglang.{path[:-3].replace('/', '.')}" if python else f"sglang/{path}"
    got = draft.draft([draft.Texts(target, "python" if python else "c", unidiff.undo(new, file.hunks), new)], only)
    root = _release(after)
    assert any(_same_text(catalogue.fix(name), fix, root) for fix in got.fixes), [fix.name for fix in got.fixes]
