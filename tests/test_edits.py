"""What the edit engine takes, what it refuses, and that nothing outside of an edit moves."""

from __future__ import annotations

import ast
import bisect
import heapq
import io
import json.decoder
import textwrap
import tokenize
from pathlib import Path
from textwrap import dedent

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.edits import Change, Edit, apply
from harness.errors import MissingPackageError, RottedError, UsageError
from harness.outline import definitions
from harness.targets import Source, locate
from harness.tokens import Language, lex

MODULE = dedent('''\
    import functools


    class Base:
        def grow(self, n):
            return n + 1


    class Pool(Base):
        limit = 8

        def __init__(self, topk):
            self.topk = topk
            self.__rows = 2

        def grow(self, n):
            n = n * self.topk
            return super().grow(n)

        @functools.lru_cache(maxsize=None)
        def cached(self):
            width = self.topk * 4
            return width

        @staticmethod
        def still(n):
            return n * 2

        @classmethod
        def build(cls, topk):
            topk = max(topk, 1)
            return cls(topk)

        @property
        def rows(self):
            return self.__rows + 0

        @rows.setter
        def rows(self, value):
            self.__rows = value * 1

        async def fetch(self):
            return self.topk

        def guarded(self, n):
            if n > self.limit:
                raise AssertionError("too many")
            return n

        def hidden(self):
            """Only this and a guard."""
            check(self)

        def bare(self, flag):
            if flag:
                check(self)  # before the write


    def outer(a):
        b = a + 1

        def inner(c):
            return b + c

        return inner
''')


def revert(source: str, target: str, *edits: Edit, root: Path, file: str = "mod.py") -> str:
    """Write `source` as a module of a package, and undo `edits` in the target."""
    path = root / "pkg" / file
    path.parent.mkdir(exist_ok=True, parents=True)
    (root / "pkg" / "__init__.py").touch()
    path.write_bytes(source.encode())
    found = locate(target, [root])
    changes = [Change(edit, found.regions, f"1:fix{index}", target) for index, edit in enumerate(edits)]
    return apply(found.source.text, changes, language=found.language, name="mod.py")


# (target, match, replacement, what the module then holds in place of the first of the pair)
TARGETS = [
    ("Pool.grow", "n = n * self.topk", "", "        n = n * self.topk\n", ""),
    ("Pool.cached", "width = self.topk * 4", "width = 4", "width = self.topk * 4", "width = 4"),
    ("Pool.cached", "maxsize=None", "maxsize=1", "maxsize=None", "maxsize=1"),
    ("Pool.still", "n * 2", "n", "n * 2", "n"),
    ("Pool.build", "topk = max(topk, 1)", "", "        topk = max(topk, 1)\n", ""),
    ("Pool.rows", "return self.__rows + 0", "return self.__rows", "self.__rows + 0", "self.__rows"),
    ("Pool.rows", "value * 1", "value", "value * 1", "value"),
    ("Pool.fetch", "return self.topk", "return 1", "return self.topk\n\n    def g", "return 1\n\n    def g"),
    ("Pool", "limit = 8", "limit = 4", "limit = 8", "limit = 4"),
    ("outer", "b = a + 1", "b = a", "b = a + 1", "b = a"),
    ("outer.inner", "return b + c", "return c", "b + c", "c"),
    ("Pool.hidden", "check(self)", "", "        check(self)\n\n    def bare", "\n    def bare"),
    ("Pool.bare", "check(self)", "", "check(self)  # before the write", "pass"),
    ("Pool.guarded", "if n > self.limit:\n  raise AssertionError('too many')", "",
     '        if n > self.limit:\n            raise AssertionError("too many")\n', ""),
]  # fmt: skip


@pytest.mark.parametrize(("target", "match", "replacement", "old", "new"), TARGETS)
def test_targets(tmp_path, target, match, replacement, old, new):
    assert MODULE.count(old) == 1
    result = revert(MODULE, f"pkg.mod.{target}", Edit(match, replacement), root=tmp_path)
    assert result == MODULE.replace(old, new)


def test_super_closures_and_private_names_work_in_the_result(tmp_path):
    edits = [Edit("n = n * self.topk", ""), Edit("self.__rows = 2", "self.__rows = 5"), Edit("b = a + 1", "b = a")]
    names: dict = {}
    exec(revert(MODULE, "pkg.mod", *edits, root=tmp_path), names)
    pool = names["Pool"](3)
    assert (pool.grow(4), pool.rows, names["outer"](1)(2)) == (5, 5, 3)


A = "def f(a):\n    x = g(a)\n    return x\n"
CALL = """\
def f():
    t = zeros(
        (n, max_bs * self.topk * ctx),
        dtype='i',  # four bytes
    )
    return t
"""
NESTED = "def f(a):\n    for i in a:\n        if i:\n            y()\n            z()\n    return a\n"

# (source, edits as (kind, match, text), the expected source)
EDITS = {
    "reformatted: wraps, comma, quotes, comments": (
        CALL, [("replacement", "t = zeros((n, max_bs*self.topk*ctx), dtype=\"i\")", "t = zeros(1)")],
        "def f():\n    t = zeros(1)\n    return t\n"),
    "one physical line of a call": (
        CALL, [("replacement", "(n, max_bs * self.topk * ctx),\n", "(n, max_bs * ctx),\n")],
        CALL.replace(" * self.topk", "")),
    "a snippet's last comma that a reformat took": (
        "t = zeros((n, k * ctx))\n", [("replacement", "(n, k * ctx),\n", "(n, ctx),\n")], "t = zeros((n, ctx))\n"),
    "two lines of a call": (
        CALL, [("replacement", "max_bs * self.topk * ctx),\ndtype=\"i\"\n)", "ctx), dtype='i')")],
        "def f():\n    t = zeros(\n        (n, ctx), dtype='i')\n    return t\n"),
    "backslash": ("x = a + \\\n    b\n", [("replacement", "x = a + b", "x = a")], "x = a\n"),
    "two edits on one line": (
        "x = g(a, b) + h(c)\n", [("replacement", "b", "1"), ("replacement", "h(c)", "0")], "x = g(a, 1) + 0\n"),
    "two fixes in one function, in any order": (
        A, [("replacement", "return x", "return 1"), ("replacement", "x = g(a)", "")], "def f(a):\n    return 1\n"),
    "an edit doesn't see what another wrote": (
        "x = 1\ny = 2\n", [("replacement", "x = 1", "y = 3"), ("replacement", "y = 2", "x = 4")], "y = 3\nx = 4\n"),
    "CRLF": (
        A.replace("\n", "\r\n"), [("replacement", "x = g(a)\n", "if a:\n    x = 1\n")],
        "def f(a):\r\n    if a:\r\n        x = 1\r\n    return x\r\n"),
    "tabs": (
        A.replace("    ", "\t"), [("replacement", "x = g(a)", "if a:\n    x = 1")],
        "def f(a):\n\tif a:\n\t\tx = 1\n\treturn x\n"),
    "two blanks a level": (
        A.replace("    ", "  "), [("prepend", "return x", "if a:\n    x = 1")],
        "def f(a):\n  x = g(a)\n  if a:\n    x = 1\n  return x\n"),
    "prepend": (A, [("prepend", "return x\n", "return a\n")], A.replace("    return x", "    return a\n    return x")),
    "prepend to a statement over lines": (
        CALL, [("prepend", "dtype='i'", "n = 1")], CALL.replace("    t =", "    n = 1\n    t =")),
    "append": (A, [("append", "x = g(a)", "x += 1\nx += 2")], A.replace("g(a)\n", "g(a)\n    x += 1\n    x += 2\n")),
    "append into a block": (A, [("append", "def f(a):", "    a += 1")], A.replace("a):\n", "a):\n    a += 1\n")),
    "append at the end, no newline": ("x = 1", [("append", "x = 1", "y = 2")], "x = 1\ny = 2"),
    "append at the end": ("x = 1\n", [("append", "x = 1", "y = 2")], "x = 1\ny = 2\n"),
    "append at the end, old line ends": ("x = 1\r", [("append", "x = 1", "y = 2")], "x = 1\ry = 2\r"),
    "append what stands farther on": (
        "x = 1\ny = 1\np()\n", [("append", "x = 1", "p()")], "x = 1\np()\ny = 1\np()\n"),
    "prepend what stands behind": ("x = 1\np()\n", [("prepend", "x = 1", "p()")], "p()\nx = 1\np()\n"),
    "append what stands before": ("p()\nx = 1\n", [("append", "x = 1", "p()")], "p()\nx = 1\np()\n"),
    "a replacement that is indented": (
        A, [("replacement", "return x", "        y = x\n        return y")],
        "def f(a):\n    x = g(a)\n    y = x\n    return y\n"),
    "a comment that is indented, in place": (
        A, [("replacement", "x = g(a)", "      # gone\n")], "def f(a):\n    # gone\n    return x\n"),
    "append, then prepend, at one place": (
        "x = 1\ny = 2\n", [("prepend", "y = 2", "p()"), ("append", "x = 1", "q()")], "x = 1\nq()\np()\ny = 2\n"),
    "empty block": ("if a:\n    b()\nc()\n", [("replacement", "b()", "")], "if a:\n    pass\nc()\n"),
    "block emptied by two fixes": (
        "if a:\n    b()  # 1\n    # 2\n    c()\nd()\n", [("replacement", "c()", ""), ("replacement", "b()", "")],
        "if a:\n    pass\n    # 2\nd()\n"),
    "empty block, old line ends": ("if a:\r    b()\r", [("replacement", "b()", "")], "if a:\r    pass\r"),
    "empty block at the end, no newline": ("if a:\n    b()", [("replacement", "b()", "")], "if a:\n    pass"),
    "a block that another fix leaves something in": (
        "for a in b:\n    c()\n    d()\ne()\n", [("replacement", "c()", ""), ("replacement", "d()", "f()")],
        "for a in b:\n    f()\ne()\n"),
    "a block that two of three statements leave": (
        "for a in b:\n    b()\n    c(x)\n    break\ne()\n", [("replacement", "b()", ""), ("replacement", "c(x)", "")],
        "for a in b:\n    break\ne()\n"),
    "an indent and nothing else": (
        "if a:\n    b()\nc()\n", [("replacement", "if a:\n  b()\nc()", "if a:\n  b()\n  c()")],
        "if a:\n    b()\n    c()\n"),
    "one of two says the same in other words": (
        A, [("replacement", "x = g(a)", "x = (g(a))"), ("replacement", "return x", "return 1")],
        "def f(a):\n    x = (g(a))\n    return 1\n"),
    "a line of a call, whatever its neighbours' indents": (
        "t = f(\n    a,\n        b,\n)\n", [("replacement", "a,", "")], "t = f(\n        b,\n)\n"),
    "a part of a line": ("f(1,\n  2)\n", [("replacement", "1,", "")], "f(\n  2)\n"),
    "a block at the end": ("a = 1\nif b:\n    c()\n", [("replacement", "if b:\n  c()", "")], "a = 1\n"),
    "block emptied, a comment in place": (
        "if a:\n    b()\n", [("replacement", "b()", "# gone")], "if a:\n    # gone\n    pass\n"),
    "one-line block": ("if a: b()\nc()\n", [("replacement", "b()", "")], "if a: pass\nc()\n"),
    "statements on one line": ("a = 1; b = 2\n", [("replacement", "a = 1", "")], "pass; b = 2\n"),
    "last line, no newline": ("a = 1\nb = 2", [("replacement", "b = 2", "")], "a = 1\n"),
    "strings and comments don't match": (
        "# x = 1\ny = 'x = 1'\nz = '''\nx = 1\n'''\nx = 1\n", [("replacement", "x = 1", "x = 2")],
        "# x = 1\ny = 'x = 1'\nz = '''\nx = 1\n'''\nx = 2\n"),
    "whole statements win over parts": (
        "self.x = 1\nx = 1\n", [("replacement", "x = 1", "x = 2")], "self.x = 1\nx = 2\n"),
    "a string's lines keep their place": (
        A, [("replacement", "x = g(a)", "if a:\n  x = '''\n one\n'''")],
        "def f(a):\n    if a:\n        x = '''\n one\n'''\n    return x\n"),
    "an elif": ("if a:\n    b()\nelif c:\n    d()\nelse:\n    e()\n", [("replacement", "elif c:\n  d()", "")],
        "if a:\n    b()\nelse:\n    e()\n"),
    "f-string quotes": ("x = f\"{a['b']}\"\n", [("replacement", "f'{a[\"b\"]}'", "1")], "x = 1\n"),
    "an empty string isn't a colon": ("x = ''\ny = 1\n", [("replacement", "y = 1", "")], "x = ''\n"),
    "the only decorator": ("@a\ndef f(): pass\n", [("replacement", "@a", "")], "def f(): pass\n"),
    "one of two decorators": ("@a\n@b\ndef f(): pass\n", [("replacement", "@b", "")], "@a\ndef f(): pass\n"),
    "unicode before the match": ("x = 'é'; y = 1\n", [("replacement", "y = 1", "y = 2")], "x = 'é'; y = 2\n"),
    "form feed": ("\x0cx = 1\n", [("replacement", "x = 1", "x = 2")], "\x0cx = 2\n"),
}  # fmt: skip


@pytest.mark.parametrize("name", EDITS)
def test_edits(name):
    source, edits, expected = EDITS[name]
    assert run(source, edits) == expected


def run(source: str, edits: list[tuple[str, str, str]], language="python") -> str:
    changes = [
        Change(Edit(match, **{kind: text}), ((0, len(source)),), f"1:fix{index}", "pkg.mod")
        for index, (kind, match, text) in enumerate(edits)
    ]
    return apply(source, changes, language=language, name="mod.py")


C = """\
#include <x.cuh>
template <typename T> __global__ void store(T* p, int64_t i, int n) {  // stores
  /* first */
  assert(i >= 0 && i < n);  // the bound
  if (n)
    check(n);
  p[i] = T{1, 2,};
}
"""
C_EDITS = {
    "delete": ([("replacement", "assert(i >= 0\n  && i < n);", "")], "  assert(i >= 0 && i < n);  // the bound\n", ""),
    "part": ([("replacement", "i >= 0 && i < n", "i < n")], "i >= 0 && ", ""),
    "an else keeps its own": (
        [("replacement", "if (n)\n  check(n);", "if (n)\n  check(n);\nelse\n  stop();")],
        "    check(n);",
        "    check(n);\n  else\n    stop();",
    ),
    "a comment in place": (
        [("replacement", "assert(i >= 0 && i < n);", "// gone")],
        "  assert(i >= 0 && i < n);  // the bound\n",
        "  // gone\n",
    ),
    "an if keeps its own body": ([("replacement", "check(n);", "")], "check(n);", ";"),
    "a trailing comma": ([("replacement", "T{1, 2}", "T{0}")], "T{1, 2,}", "T{0}"),
    "directive": ([("replacement", "#  include   <x.cuh>", "#include <y.cuh>")], "<x.cuh>", "<y.cuh>"),
    "append": ([("append", "p[i] = T{1, 2};", "sync();")], "2,};\n", "2,};\n  sync();\n"),
    "prepend": (
        [("prepend", "if (n)", "if (!n) {\n  return;\n}")],
        "  if (n)",
        "  if (!n) {\n    return;\n  }\n  if (n)",
    ),
}


@pytest.mark.parametrize(("source", "expected"), [
    ("if (n)\n  a();\nelse\n  b();\nb(1);\n", "if (n)\n  a();\nelse\n  ;\nb(1);\n"),
    ("do\n  b();\nwhile (n);\n", "do\n  ;\nwhile (n);\n"),
])  # fmt: skip
def test_an_else_and_a_do_keep_a_body_too(source, expected):
    assert run(source, [("replacement", "b();", "")], "c") == expected


def test_a_condition_whose_block_goes_keeps_a_body():
    assert run("if (n) {\n  f();\n}\ng();\n", [("replacement", "{ f(); }", "")], "c") == "if (n) ;\ng();\n"


def test_comments_in_place_of_a_statement_keep_their_shape():
    assert run("if a:\n    b()\n    c()\n", [("replacement", "b()", "    # one\n    # two\n")]) == (
        "if a:\n    # one\n    # two\n    c()\n"
    )


def test_edits_without_a_fix_are_named_by_what_they_match():
    whole, part = (Change(Edit(match, "2"), ((0, 6),)) for match in (" x = 1\n", "1"))
    with pytest.raises(RottedError, match="^'x = 1' and '1' change the same place: <source>, line 1$"):
        apply("x = 1\n", [part, whole])


def test_a_text_without_a_name_has_one_in_errors():
    with pytest.raises(RottedError, match="isn't in <source>$"):
        apply("x = 1\n", [Change(Edit("import os, sys", ""), ((0, 6),))])


@pytest.mark.parametrize("name", C_EDITS)
def test_c_edits(tmp_path, name):
    edits, old, new = C_EDITS[name]
    assert C.count(old) == 1
    made = [Edit(match, **{kind: text}) for kind, match, text in edits]
    assert revert(C, "pkg/csrc/s.cuh", *made, root=tmp_path / "", file="csrc/s.cuh") == C.replace(old, new)


UNEVEN = "#if X\nif (a) {\n#else\nif (b) {\n#endif\n  f();\n}\n"


def test_brackets_that_only_a_preprocessor_makes_even_may_stay_so():
    assert run(UNEVEN, [("replacement", "f();", "g();")], "c") == UNEVEN.replace("f()", "g()")


# (source, edits, what the error says)
REFUSED = {
    "twice, both lines": ("x = 1\ny = 2\nx = 1\n", [("replacement", "x = 1", "")], "2 times in mod.py: lines 1, 3"),
    "nowhere, nearest": (A, [("replacement", "x = g(b)", "")], r"isn't in mod.py; nearest: line 2: `x = g\(a\)`"),
    "nowhere to append to": (A, [("append", "x = g(b)", "y = 1")], "isn't in mod.py; nearest: line 2"),
    "nothing like it": (A, [("replacement", "import os, sys", "")], r"isn't in mod.py$"),
    "a longer name": ("xx = 1\n", [("replacement", "x = 1", "")], "isn't in"),
    "another one's attribute": ("self.x = 1\n", [("replacement", "x = 1", "x = 2")], "isn't in"),
    "a tuple isn't a group": ("x = (a)\n", [("replacement", "x = (a,)", "x = 1")], "isn't in"),
    "already reverted": ("y = 1\n", [("replacement", "x = 2", "y = 1")], "replacement is already there, line 1"),
    "already reverted, twice": (
        "z()\ny = 1\ny = 1\n", [("replacement", "x = 2", "y = 1")], "replacement is already there, line 2"),
    "already reverted, match still there": (
        "z()\na()\nb()\n", [("replacement", "a()", "a()\nb()")], "already there: mod.py, line 2$"),
    "already replaced, over lines": (
        "w = 1\nx = 1\ny = 2\n", [("replacement", "z = 1", "x = 1\ny = 2")], "already there, line 2: reverted, or"),
    "already replaced, and the match ends it": (
        "x = a + b\n", [("replacement", "b", "a + b")], "replacement is already there: mod.py, line 1"),
    "already replaced, and the match begins it": (
        "x = a + b\n", [("replacement", "a", "a + b")], "replacement is already there: mod.py, line 1"),
    "already appended, farther down": (
        "x = 1\n\n# c\n\np()\n", [("append", "x = 1", "p()")], "already there, beside line 1"),
    "already prepended, farther up": (
        "p()\n\n# c\n\nx = 1\n", [("prepend", "x = 1", "p()")], "already there, beside line 5"),
    "appends nothing": ("x = 1\n", [("append", "x = 1", "# c")], ": append has no code in it"),
    "prepends nothing": ("x = 1\n", [("prepend", "x = 1", "# c")], ": prepend has no code in it"),
    "an else farther down": (
        "if b:\n    c()\n\n\nelse:\n    d()\n", [("replacement", "if b:\n  c()", "")], "leave its `else`, line 5"),
    "an except": ("try:\n    a()\nexcept E:\n    b()\n", [("replacement", "try:\n  a()", "")], "leave its `except`"),
    "a finally": ("try:\n    a()\nfinally:\n    b()\n", [("replacement", "try:\n  a()", "")], "leave its `finally`"),
    "already prepended": ("p()\nx = 1\n", [("prepend", "x = 1", "p()")], "already there, beside line 2"),
    "already appended": ("x = 1\np()\n", [("append", "x = 1", "p()")], "already there, beside line 1"),
    "overlap": (A, [("replacement", "x = g(a)", "x = 1"), ("replacement", "g(a)", "2")],
        "'1:fix0' and '1:fix1' change the same place: mod.py, line 2"),
    "same lines": (A, [("replacement", "x = g(a)", ""), ("replacement", "x = g(a)", "x = 1")], "'1:fix0' and '1:fix1'"),
    "changes nothing": (A, [("replacement", "x = g(a)", "x = g( a )  # so")], "changes nothing: mod.py, line 2"),
    "says the same in other words": (
        A, [("replacement", "x = g(a)", "x = (g(a))")], "the edits change nothing in mod.py"),
    "one of two changes nothing": (
        A, [("replacement", "x = g(a)", "x = g(a,)"), ("replacement", "return x", "return 1")], "changes nothing"),
    "doesn't compile": (A, [("replacement", "g(a)", "g(")], "doesn't compile after the edit, line 2: '\\(' was never"),
    "return outside a function": ("x = 1\n", [("replacement", "x = 1", "return 1")], "outside function"),
    "append to a block's head": (A, [("append", "def f(a):", "a += 1")], "must be indented"),
    "half a block": (NESTED, [("replacement", "if i:\n    y()", "")], "line 3 would leave .* block, line 5"),
    "an else that would change sides": (
        "if b:\n    w()\nif a:\n    x()\nelse:\n    y()\n", [("replacement", "if a:\n  x()", "")], "leave its `else`"),
    "a decorator that would change sides": (
        "@a\ndef f():\n    b()\ndef g(): pass\n", [("replacement", "def f():\n  b()", "")], "its decorator, line 1"),
    "C brackets": ("int f() { return (1); }\n", [("replacement", "(1)", "(1")], "unpaired `"),
    "C brackets that are uneven before": (
        UNEVEN, [("replacement", "f();", "g(); {")], "the edit unbalances the brackets of mod.py"),
    "a later edit fails": (
        A, [("replacement", "x = g(a)", "x = 1"), ("replacement", "return y", "")], "1:fix1.*isn't in"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    source, edits, error = REFUSED[name]
    with pytest.raises(RottedError, match=error) as caught:
        run(source, edits, "c" if name.startswith("C ") else "python")
    assert "\n" not in str(caught.value) and caught.value.fix.startswith("1:fix")


def test_a_match_that_is_outside_of_its_target_only():
    source = "q = 1\ndef f():\n    return 2\n" + 4 * "q = 1\n"
    change = Change(Edit("q = 1", ""), ((6, 27),), "1:a", "pkg.mod.f")
    with pytest.raises(RottedError, match=r"isn't in mod.py; outside of the target it is on line 1, 4, 5$"):
        apply(source, [change], name="mod.py")
    with pytest.raises(RottedError, match=r"isn't in mod.py$"):
        apply(source, [change], name="mod.py", explain=False)


@pytest.mark.parametrize(
    ("more", "named"), [({}, "an edit"), ({"target": "pkg.mod"}, "pkg.mod"), ({"fix": "1:a", "target": "pkg"}, "1:a")]
)
def test_a_match_without_code_names_what_there_is_to_name(more, named):
    with pytest.raises(UsageError, match=f"^{named}: match has no code in it$"):
        apply("x = 1\n", [Change(Edit("# c", "y"), ((0, 6),), **more)])


@pytest.mark.parametrize("kind", ["replacement", "prepend", "append"])
def test_reverting_twice_is_refused(kind):
    edit = (kind, "x = g(a)", "x = g(a)\nx = h(x)" if kind == "replacement" else "h(x)")
    once = run(A, [edit])
    assert once != A
    with pytest.raises(RottedError, match="already there"):
        run(once, [edit])


def test_edit_takes_exactly_one_of_three():
    for given_ in ({}, {"replacement": "", "append": "x"}):
        with pytest.raises(UsageError, match="exactly one"):
            Edit("x", **given_)
    with pytest.raises(UsageError, match="no code in it"):
        run(A, [("replacement", "# only a comment\n", "")])


@pytest.mark.parametrize(
    ("target", "error"),
    [
        ("pkg.mod.Pool.grown", r"no Pool.grown; nearest: pkg.mod.Pool.grow, line 16"),
        ("pkg.mod.Pond.grow", r"no Pond.grow; nearest: pkg.mod.(Base|Pool).grow"),
        ("pkg.mode.Pool", r"pkg has no mode; nearest: pkg.mod"),
        ("pkg/csrc/store.cuh", r"nearest: pkg/csrc/stored.cuh"),
    ],
)
def test_renamed_away(tmp_path, target, error):
    (tmp_path / "pkg/csrc").mkdir(parents=True)
    (tmp_path / "pkg/csrc/stored.cuh").write_text(C)
    with pytest.raises(RottedError, match=error):
        revert(MODULE, target, Edit("x", ""), root=tmp_path)


@pytest.mark.parametrize(
    "target", ["pkg/../x.py", "/etc/x.py", "pkg//x.py", "pkg/./x.py", "pkg\\x.py", "a b", "", "pkg/x.txt"]
)
def test_malformed_targets(target):
    with pytest.raises(UsageError, match="must be"):
        locate(target)


def test_a_link_out_of_the_package_is_refused(tmp_path):
    (tmp_path / "elsewhere.py").write_text("x = 1\n")
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/mod.py").symlink_to(tmp_path / "elsewhere.py")
    with pytest.raises(RottedError, match="is a link that leaves"):
        locate("pkg.mod", [tmp_path])


def test_locate_imports_nothing_and_says_what_is_missing(tmp_path):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/__init__.py").write_text("raise SystemExit\ndef f():\n    pass\n")
    found = locate("pkg.f", [tmp_path])
    assert (found.module, found.qualname, found.kind, found.relpath) == (
        "pkg",
        "f",
        "function",
        Path("pkg/__init__.py"),
    )
    with pytest.raises(MissingPackageError, match="no sources of package 'no_such_package'"):
        locate("no_such_package.mod", [tmp_path])
    assert locate("json.decoder.JSONDecoder.decode").source.text.startswith('"""')


def test_qualname_is_pythons_own(tmp_path):
    revert(MODULE, "pkg.mod.outer.inner", Edit("return b + c", ""), root=tmp_path)
    assert locate("pkg.mod.outer.inner", [tmp_path]).qualname == "outer.<locals>.inner"
    assert len(locate("pkg.mod.Pool.rows", [tmp_path]).regions) == 2


@pytest.mark.parametrize(
    "data",
    [b"\xef\xbb\xbfx = 1\r\n", b"# coding: latin-1\nx = '\xe9'\n", b"# -*- coding: cp1252 -*-\nx = '\x80'\n"],
)
def test_bytes_round_trip(data):
    source = Source.decode(data, "python")
    assert not source.text.startswith("\ufeff")
    assert source.encode(source.text) == data


def test_c_bytes_that_are_not_utf8_round_trip():
    data = b"// \xe9\nint x;\n"
    source = Source.decode(data, "c")
    assert source.encode(apply(source.text, [Change(Edit("int x;", "int y;"), ((0, 99),))], language="c")) == (
        b"// \xe9\nint y;\n"
    )


STDLIB = [Path(str(module.__file__)) for module in (heapq, textwrap, json.decoder, bisect)]


@pytest.mark.parametrize("path", STDLIB, ids=lambda path: path.name)
def test_lexer_agrees_with_tokenize(path):
    source = path.read_text("utf-8")
    kinds = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.NEWLINE)
    everything = list(tokenize.generate_tokens(io.StringIO(source).readline))
    if any(tokenize.tok_name[token.type] == "FSTRING_START" for token in everything):
        pytest.skip("this Python takes f-strings apart")
    theirs = [(token.start[0], token.string.strip()) for token in everything if token.type in kinds]
    ours = [(source.count("\n", 0, t.start) + 1, t.text.strip()) for t in lex(source).tokens if t.kind != "string"]
    assert ours == theirs


def without(source: str, gone: ast.stmt) -> str:
    """The dump of a module's tree without one statement: what a deletion must come to."""
    tree = ast.parse(source)
    for owner in ast.walk(tree):
        for name, block in ast.iter_fields(owner):
            for node in block if isinstance(block, list) else ():
                if isinstance(node, ast.stmt) and (node.lineno, node.col_offset) == (gone.lineno, gone.col_offset):
                    is_elif = name == "orelse" and source.split("\n")[node.lineno - 1].lstrip().startswith("elif")
                    block.remove(node)
                    if not block and not is_elif:
                        block.append(ast.Pass())
                    return ast.dump(tree)
    raise AssertionError("no such statement")


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(data=st.data())
def test_a_deleted_statement_is_gone_and_nothing_else_moves(data):
    """Delete or replace any statement of a real module: the tree loses just that one, all other bytes stay."""
    source = data.draw(st.sampled_from(STDLIB)).read_text("utf-8")
    owners = [nodes[0] for nodes, _ in definitions(source).values()]
    inner = [node for owner in owners for node in ast.walk(owner) if isinstance(node, ast.stmt) and node not in owners]
    node = data.draw(st.sampled_from([node for node in inner if not is_docstring(node)]))
    replacement = data.draw(st.sampled_from(["", "unfix_was_here()"]))
    newline = data.draw(st.sampled_from(["\n", "\r\n"]))
    match = ast.get_source_segment(source, node) or ""
    text = source.replace("\n", newline)
    lines = text.split("\n")
    before = "\n".join(lines[: node.lineno - 1])
    after = "\n".join(lines[node.end_lineno :])
    region = (len(before), len(text) - len(after))
    try:
        result = apply(text, [Change(Edit(match, replacement), (region,))])
    except RottedError as error:
        assert "would leave" in str(error) or "appears" in str(error) or match == "pass", error
        return
    assert result.startswith(before) and result.endswith(after)
    assert newline == "\n" or "\n" not in result.replace("\r\n", "")
    if replacement:
        assert replacement in result[len(before) : len(result) - len(after)]
    else:
        assert ast.dump(ast.parse(result)) == without(source, node)


def is_docstring(node: ast.stmt) -> bool:
    """A docstring that goes takes more than a statement along: its owner's `__doc__`. The tree is the same."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


LEXED: dict[str, tuple[Language, str, list[str]]] = {
    "nested f-string quotes": ("python", 'f"{a["b"]}" + c', ["f'{a['b']}", "+", "c"]),
    "escaped braces": ("python", "f'{{{x}}}' 'y'", ["f'{{{x}}}", "'y"]),
    "a format's own quote": ("python", "f\"{x:'>10} it's\" y", ["f'{x:'>10} it's", "y"]),
    "prefixes": ("python", "R'a' rb'b' U'c' Rf'{d}'", ["r'a", "br'b", "'c", "fr'{d}"]),
    "escaped quotes": ("python", r"""'it\'s' "it's" r'\''""", ["'it's", "'it's", r"r'\'"]),
    "triple quotes": ("python", "'''a''' \"\"\"b\nc\"\"\"", ["'a", "'b\nc"]),
    "a brace in an inner text": ("python", 'f"{\'{\'}" + "}"', ["f'{'{'}", "+", "'}"]),
    "a quote in a format": ("python", "f'{a:{b}\"}' c", ["f'{a:{b}'}", "c"]),
    "an f-string in an f-string": ("python", "f'{f'{a['b']}'}' c", ["f'{f'{a['b']}'}", "c"]),
    "an f-string that never closes": ("python", "f'{a' b", ["f'{a", "b"]),
    "an import's last comma": ("python", "from a import (b,)", ["from", "a", "import", "(", "b", ")"]),
    "an open string": ("python", "x = 'abc\ny", ["x", "=", "?abc", "\n", "y"]),
    "unbalanced": ("python", "a,\n)\nb[", ["a", ")", "\n", "b", "["]),
    "one-tuples keep their comma": ("python", "(a,) + f(a,) + x[a,] + [a,]", list("(a,)+f(a)+x[a,]+[a]")),
    "numbers": ("python", "1_0.5e-3j 0xFf .5 1..real", ["1_0.5e-3j", "0xFf", ".5", "1.", ".", "real"]),
    "C": (
        "c",
        "a->b<<=1'000u; // x\n/* y\n*/ R\"(a)b\")\" L'c'",
        ["a", "->", "b", "<<=", "1'000u", ";", 'R"(a)b")"', "L'c'"],
    ),
    "C, an open raw string": ("c", 'R"x(a', ["R", '"', "x", "(", "a"]),
    "C, an open comment in a directive": ("c", "#define A /* b\nc", ["#define A"]),
    "C directives": ("c", "#  define A(x) \\\n  x // y\nA(1)", ["#define A(x) x", "A", "(", "1", ")"]),
}


@pytest.mark.parametrize("name", LEXED)
def test_lexer(name):
    language, source, expected = LEXED[name]
    assert [token.text for token in lex(source, language).tokens if not token.optional] == expected


@given(
    text=st.text(alphabet="abr'\"\\\n\r \t#(){}[],:;.=/*+1f", max_size=40), language=st.sampled_from(["python", "c"])
)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_any_text_is_read_in_order(text, language):
    tokens, comments = lex(text, language)
    spans = sorted((token.start, token.end) for token in [*tokens, *comments])
    assert all(0 <= start < end <= len(text) for start, end in spans)
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))
