"""The lines that a glance finds are those that the parser finds, or it says nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from harness import glance, outline
from harness.errors import RottedError
from harness.targets import locate
from tests import python_texts as texts

# what is odd about it: a source, and of which names the lines are seen
SOURCES = {
    "a function": ("x = 1\n\n\ndef f(a):\n    return a\n\n\n# end\ny = f\n", ["f"]),
    "the first and the last": ("def f():\n  pass\ndef g(): pass", ["f", "g"]),
    "methods": ("class C(B):\n    def f(self):\n        pass\n\n    async def g(self): pass\n", ["C", "C.f", "C.g"]),
    "behind a class's long head": ("class C(\n    B,\n):\n    def f(self):\n        pass\n", ["C"]),
    "one in a function": ("def f():\n    def g():\n        pass\n    return g\n", ["f", "f.g"]),
    "a name in two classes": (
        "class A:\n    def f(self): pass\n\n\nclass B:\n    def f(self): return 1\n", ["A", "A.f", "B", "B.f"]),
    "a head of many lines": ("def f(\n    a,\n    b,\n) -> int:\n    return a\n\n\nx = 1\n", ["f"]),
    "decorators": ("class C:\n    x = 1\n\n    @a\n    # why\n\n    @b(1)\n    def f(self): pass\n", ["C", "C.f"]),
    "a decorator of many lines": ("x = 1\n@a(\n    1,\n    2,\n)\ndef f():\n    pass\n", ["f"]),
    "a decorator's lines to the left": ("x = 1\n@a(\n1,\n)\ndef f():\n    pass\n", []),
    "a product that looks like a decorator": ("x = a \\\n@ b\ndef f():\n    pass\n", []),
    "one in brackets": ("x = (\na\n@ b\n)\ndef f():\n    pass\n", []),
    "one in a text": ('"""\ndef f():\n    no\n"""\ndef f():\n    """\ndef g():\n"""\n', ["f"]),
    "one in a comment": ("# '''\ndef f():\n    pass\n# '''\n", ["f"]),
    "quotes in braces": (
        "def f(a):\n    return f\"{a['x']}\" + f'{{\"' + rf'{a!r:>{a}}'\n\n\ndef g(): pass\n", ["f", "g"]),
    "a formatted text at a line's end": ("x = f'{a}'\ndef f(): pass\n", ["f"]),
    "a text to the left": ("def f():\n    x = '''\nclass C:\n'''\n    return x\n", ["f"]),
    "brackets to the left": ("def f():\n    x = (\n1)\n    return x\n", []),
    "a line that goes on to the left": ("def f():\n    x = 1 + \\\n2\n    return x\n", []),
    "a method behind brackets to the left": (
        "class C:\n    def f(self): pass\n    x = (\n1,\n)\n    def f(self): return 1\n", []),
    "a method behind a line that goes on to the left": (
        "class C:\n    def f(self): pass\n    x = 1 + \\\n2\n    def f(self): return 1\n", []),
    "an indent that is broken": ("def f():\n    x = 1\n\\\n    return x\n", []),
    "defined twice": ("if a:\n    def f(): pass\nelse:\n    def f(): return 1\n", []),
    "in a block": ("if a:\n    def f():\n        pass\n", []),
    "in a block of a class": ("class C:\n    if a:\n        def f(self):\n            pass\n", ["C", "C.f"]),
    "in a function of a class": (
        "class C:\n    def g(self):\n        def f():\n            pass\n", ["C", "C.g", "C.g.f"]),
    "getter and setter": ("class C:\n    @p\n    def f(self): pass\n    @f.s\n    def f(self, n): pass\n", ["C"]),
    "a class in a class": ("class C:\n    class D:\n        def f(self): pass\n", ["C", "C.D", "C.D.f"]),
    "tabs": ("class C:\n\tdef f(self):\n\t\tpass\n", []),
    "other line ends": ("def f():\r\n    pass\r\n", []),
    "a name in other letters": ("def \ufb01():\n    pass\ndef fi(): return 1\n", []),
    "a broken head": ("def \\\n  f():\n    pass\n", []),
    "blanks in a head": ("async   def   f():\n    pass\n", ["f"]),
    "a name that goes on": ("def f2():\n    pass\n\n\ndef f():\n    pass\n", ["f", "f2"]),
    "other letters in a text": ("def f():\n    return 'é' # 数\n", ["f"]),
}  # fmt: skip


def seen(text: str, dotted: str) -> object:
    """What is found without parsing the file; None where it must be."""
    crop = outline._glance(text, dotted.split("."))
    assert crop != "absent"
    return crop and outline._find_in(text, dotted, crop)


def undefined(text: str) -> list[str]:
    """Names that are like those that a source has: of another owner, or without the outermost."""
    found = outline.definitions(text)
    others = {f"{owner}.{last.rpartition('.')[2]}" for owner in found for last in found}
    inner = {dotted.partition(".")[2] for dotted in found} - {""}
    return sorted((others | inner) - set(found))


@pytest.mark.parametrize("name", SOURCES)
def test_what_is_seen_is_what_the_parser_finds(name: str) -> None:
    text, names = SOURCES[name]
    found = {dotted: seen(text, dotted) for dotted in outline.definitions(text)}
    assert sorted(dotted for dotted, place in found.items() if place) == names
    assert all(found[dotted] == outline._find_parsed(text, dotted) for dotted in names)
    assert [dotted for dotted in undefined(text) if outline._find(text, dotted)] == []
    assert glance.lines(text, ["nowhere"]) in ("absent", None) and outline.find(text, "nowhere") is None


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None)
@given(drawn=texts.modules())
def test_so_it_is_of_any_text(drawn: tuple[list[str], str]) -> None:
    text = "\n".join(drawn[0]) + "\n"
    for dotted in outline.definitions(text):
        assert seen(text, dotted) in (None, outline._find_parsed(text, dotted))
    assert [dotted for dotted in undefined(text) if outline._find(text, dotted)] == []


BROKEN = [
    "def f(:\n    pass\nx = (\n", "def f():\npass\n", "x = '\ndef f(): pass\n", "x = '''\ndef f(): pass\n",
    "}\ndef f(): pass\n",
]  # fmt: skip
HOSTILE = [
    "'" * 50_001,
    "f'{" * 20_000,
    '"""' + "\\" * 99_999,
    "(" * 100_000,
    "@" * 50_000,
    "def f(): pass\n" * 20_000 + "(",
]


@pytest.mark.parametrize(
    "text", [*BROKEN, *(f"{text}\ndef f(): pass\n" for text in HOSTILE)], ids=lambda text: text[:9]
)
def test_a_source_that_is_broken_there_is_refused(text: str) -> None:
    with pytest.raises(SyntaxError):
        outline.find(text, "f")


def test_a_name_that_a_broken_file_lacks_is_a_broken_file(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/mod.py").write_text("def f(): pass\nx = (\n")
    with pytest.raises(RottedError, match="doesn't parse under this Python"):
        locate("pkg.mod.g", [tmp_path])
