"""What holds of every edit of every Python text: random ones, the standard library, and SGLang where it is cached.

`python benchmarks/fuzz.py --seconds 600` tries the same for longer.
"""

from __future__ import annotations

import ast
import io
import random
import re
import tokenize
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from harness import changes, outline
from harness.edits import Change, Edit, apply
from harness.errors import RottedError, UnfixError
from harness.outline import Crop
from harness.pieces import _is_inside
from harness.snippets import Pattern, Text
from harness.targets import Source
from harness.tokens import NEWLINE
from tests import python_texts as texts
from tests.fuzzing import Property

HERE = "unfix_was_here(0)"
ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.filterwarnings("ignore::SyntaxWarning")


@lru_cache(maxsize=1)
def real_files() -> list[Path]:
    """Real sources; SGLang's too, of releases that are in the cache."""
    from harness.cache import cache_dir

    try:
        cached = sorted((cache_dir() / "upstream" / "trees").glob("*/sglang/srt/**/*.py"))
    except UnfixError:
        cached = []
    return texts.standard_library() + sorted((ROOT / "harness").glob("*.py")) + cached


@lru_cache(maxsize=32)
def text_of(file: Path) -> str:
    try:
        text = Source.decode(file.read_bytes(), "python").text
        ast.parse(text)
    except (SyntaxError, ValueError):
        return "x = 1\n"
    return text


@st.composite
def real_texts(draw: st.DrawFn, most: int = 15_000) -> str:
    text = text_of(draw(st.sampled_from(real_files())))
    assume(len(text) <= most)
    return text


@st.composite
def random_texts(draw: st.DrawFn) -> str:
    found, _ = draw(texts.modules())
    return texts.with_ends("\n".join(found) + "\n", draw(texts.line_ends), draw(st.booleans()))


any_texts = st.one_of(random_texts(), random_texts(), real_texts())
chances = st.integers(0, 2**20)


def whole(text: str, *edits: Edit) -> str:
    return apply(text, [Change(edit, ((0, len(text)),)) for edit in edits])


def statements(text: str) -> list[ast.stmt]:
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]


def offsets(text: str, node: ast.stmt) -> tuple[int, int]:
    """Where a statement is, worked out by nothing of the harness."""
    lines = text.replace("\r\n", "\r\0").replace("\r", "\n").split("\n")
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line) + 1)
    shift = [line.startswith("\0") for line in lines]  # the second half of a \r\n

    def at(line: int, column: int) -> int:
        body = lines[line - 1][shift[line - 1] :]
        return starts[line - 1] + shift[line - 1] + len(body.encode()[:column].decode())

    return at(node.lineno, node.col_offset), at(node.end_lineno or 0, node.end_col_offset or 0)


def check_undone(drawn: tuple[str, int]) -> None:
    """A statement replaced is replaced alone; put back, the text is what it was, byte by byte."""
    text, chance = drawn
    nodes = statements(text)
    assume(nodes)
    start, end = offsets(text, nodes[chance % len(nodes)])
    segment = text[start:end]
    try:
        result = whole(text, Edit(segment, HERE))
    except RottedError as error:
        assert "appears" in str(error) or "doesn't compile" in str(error), error
        return
    assert result == text[:start] + HERE + text[end:]
    compile(result, "<result>", "exec", dont_inherit=True)
    line = max(text.rfind(end, 0, start) for end in "\r\n") + 1
    margin = text[line:start] if not text[line:start].strip() else ""
    old, new = Text(text, "python", ""), Text(result, "python", "")
    if ends := set(re.findall(NEWLINE, segment)):
        # What a file is laid out by can't be known from a text in which nothing of it is left, nor which of mixed ends.
        assume(ends == {new.newline} and new.newline in result and old.indent_unit() == new.indent_unit())
    assert whole(result, Edit(HERE, margin + segment)) == text


def check_beside(drawn: tuple[str, int, str]) -> None:
    """Deleted, or with lines beside it: all other lines stay, and the result compiles or the edit is refused."""
    text, chance, kind = drawn
    nodes = [node for node in statements(text) if not isinstance(node, ast.Pass)]
    assume(nodes)
    start, end = offsets(text, nodes[chance % len(nodes)])
    try:
        result = whole(text, Edit(text[start:end], **{kind: "" if kind == "replacement" else HERE}))
    except RottedError:
        return
    compile(result, "<result>", "exec", dont_inherit=True)
    before = max(text.rfind(each, 0, start) for each in "\r\n") + 1
    after = min((at for each in "\r\n" if (at := text.find(each, end)) >= 0), default=len(text))
    if kind == "replacement":
        assert result.startswith(text[:before]) and result.endswith(text[after:].lstrip("\r\n"))
    else:
        assert result.count(HERE) == text.count(HERE) + 1
        at = result.index(HERE)
        line = max(result.rfind(each, 0, at) for each in "\r\n") + 1
        rest = result[:line], result[at + len(HERE) :]
        assert text.startswith(rest[0].rstrip("\r\n")) and text.endswith(rest[1].lstrip("\r\n"))


def strings_and_comments(text: str) -> list[tuple[int, int]]:
    """Where tokenize sees them, as character offsets; for texts with plain line ends."""
    starts = [0]
    for line in text.split("\n"):
        starts.append(starts[-1] + len(line) + 1)
    found, opened = [], []
    for token in tokenize.generate_tokens(io.StringIO(text, newline="").readline):
        name = tokenize.tok_name[token.type]
        start, end = (starts[row - 1] + column for row, column in (token.start, token.end))
        if name.endswith("STRING_START"):  # since Python 3.12 an f-string comes in parts
            opened.append(start)
        elif name.endswith("STRING_END") and opened:
            found.append((opened.pop(), end))
        elif name in ("STRING", "COMMENT"):
            found.append((start, end))
    return found


def check_never_inside(drawn: tuple[str, int, int]) -> None:
    """A match without a string of its own touches no string and no comment's inside."""
    source, chance, length = drawn
    source = source.replace("\r\n", "\n").replace("\r", "\n")
    try:
        spans = strings_and_comments(source)
    except (tokenize.TokenError, IndentationError):
        assume(False)
    text = Text(source, "python", "")
    assert not any(a < t.start < b or a < t.end < b for t in text.tokens for a, b in spans if t.kind != "string")
    names = [at for at, token in enumerate(text.tokens) if token.kind == "name"]
    assume(names)
    first = names[chance % len(names)]
    tokens = text.tokens[first : first + length]
    pattern = Pattern.of(source[tokens[0].start : tokens[-1].end], "python")
    has_string = any(token.kind == "string" for token in tokens)
    for one, last in text.find(pattern, ((0, len(source)),), whole=False):
        start, end = text.tokens[one].start, text.tokens[last].end
        assert not any(a < start < b or a < end < b for a, b in spans)
        assert has_string or not any(start <= a and b <= end for a, b in spans if source[a] != "#")


def check_twice(drawn: tuple[Any, int, int]) -> None:
    """The same statement twice is refused, and both places are named."""
    parts, one, other = drawn
    layouts = [random.Random(each) for each in (one, other)]
    first, second = (texts.written(parts, layout) for layout in layouts)
    above = f"x = 1\n{first}\n"
    with pytest.raises(RottedError, match=f"appears 2 times in <source>: lines 2, {above.count(chr(10)) + 1}"):
        whole(above + f"{second}\n", Edit(texts.written(parts), HERE))


def check_reformatted(drawn: tuple[Any, int, Any]) -> None:
    """A match is found however its lines are wrapped, quoted and commented, and nothing else is."""
    parts, seed, ends = drawn
    other = texts.with_ends(texts.written(parts, random.Random(seed)), ends)
    text = f"def f():\n    {other}\n    # {texts.written(parts).splitlines()[0]}\n    return '''\n{HERE}'''\n"
    assert whole(text, Edit(texts.written(parts), "y = 2")) == text.replace(f"    {other}\n", "    y = 2\n", 1)


def check_bytes(drawn: tuple[str, str, bool]) -> None:
    """A file's bytes are what they were, around an edit too, in its encoding and behind its byte order mark."""
    text, encoding, bom = drawn
    cookie = "" if encoding == "utf-8" else f"# -*- coding: {encoding} -*-\n"
    try:
        body = (cookie + text).encode(encoding)
    except UnicodeEncodeError:
        assume(False)
    data = b"\xef\xbb\xbf" * (bom and not cookie) + body + b"\nunfix_here = 1\n"
    source = Source.decode(data, "python")
    assert source.encode(source.text) == data
    result = source.encode(whole(source.text, Edit("unfix_here = 1", "unfix_here = 2")))
    assert result == data[:-2] + b"2\n"


def check_quick(drawn: str) -> None:
    """Of every function of a file: where it is, and that an edit in its own lines is the edit in the whole file."""
    text = drawn
    found = outline.definitions(text)
    for dotted, (nodes, _) in found.items():
        place = outline.find(text, dotted)
        assert place is not None and place == outline.find(text, dotted)
        asked = outline._find(text, dotted)
        assert asked is not None and (asked[0], asked[1], tuple(asked[2]), Crop(*asked[3])) == (
            place.kind, place.qualname, place.regions, place.crop
        )  # fmt: skip
        for node, region in zip(nodes, place.regions, strict=True):
            assert text[slice(*region)].endswith(text[slice(*offsets(text, node))])
        crop = place.crop
        if crop == Crop(0, len(text)):
            continue
        lexed, cropped = (Text(each, "python", "") for each in (text, crop.text(text)))
        shift = crop.start - len(crop.head)
        mine = [(token.key, token.start) for token in lexed.tokens if crop.start <= token.start < crop.end]
        theirs = [(token.key, token.start + shift) for token in cropped.tokens if token.start >= len(crop.head)]
        assert mine == theirs
        ast.parse(crop.text(text))


@st.composite
def function_edits(draw: st.DrawFn) -> tuple[str, str, int, str]:
    text = draw(real_texts())
    names = sorted(outline.definitions(text))
    assume(names)
    kind = draw(st.sampled_from(["replacement", "prepend", "append"]))
    return text, draw(st.sampled_from(names)), draw(chances), kind


def check_pieces(drawn: tuple[str, str, int, str]) -> None:
    """An edit in a function's own lines comes to what it comes to in the whole file."""
    text, dotted, chance, kind = drawn
    place = outline.find(text, dotted)
    assert place is not None
    inner = [node for node in ast.walk(outline.definitions(text)[dotted][0][0]) if isinstance(node, ast.stmt)]
    edit = Edit(text[slice(*offsets(text, inner[chance % len(inner)]))], **{kind: HERE})
    try:
        expected = apply(text, [Change(edit, place.regions)])
    except RottedError:
        expected = None
    crop = place.crop
    try:
        made = apply(crop.text(text), [Change(edit, crop.regions(place.regions))])
    except RottedError:
        assert expected is None
        return
    if _is_inside(crop.text(text), made, crop.head, kind == "append"):
        assert expected == text[: crop.start] + made[len(crop.head) :] + text[crop.end :]


@st.composite
def versions(draw: st.DrawFn) -> tuple[str, str]:
    """A module before and after a few of its statements changed, went or came."""
    body = draw(st.lists(texts.statements, min_size=2, max_size=6))
    after = list(body)
    for _ in range(draw(st.integers(1, 2))):
        at = draw(st.integers(0, len(after) - 1))
        after[at : at + draw(st.integers(0, 1))] = draw(st.lists(texts.statements, max_size=1))
        assume(after)
    old, new = ("\n".join(["def g():", *texts.lines(each, "    ", None, 1)]) + "\n" for each in (body, after))
    return old, new


def check_drafted(drawn: tuple[str, str]) -> None:
    """The edits between two texts turn the new one into the old one, where nothing was left out."""
    old, new = drawn
    found = changes.compare(old, new)
    if not found.pieces:
        return
    try:
        result = whole(new, *(piece.edit for piece in found.pieces))
    except RottedError as error:
        raise AssertionError(f"drafted edits don't apply: {error}") from None
    imports = any(isinstance(node, ast.Import | ast.ImportFrom) for node in ast.walk(ast.parse(old + new)))
    if not found.left and not imports:
        assert ast.dump(ast.parse(result)) == ast.dump(ast.parse(old))


def together(*inputs: SearchStrategy[Any]) -> SearchStrategy[Any]:
    return st.tuples(*inputs)


PROPERTIES = {
    "a change undone is byte for byte what was": Property(together(any_texts, chances), check_undone, 80),
    "all other lines stay as they are": Property(
        together(any_texts, chances, st.sampled_from(["replacement", "prepend", "append"])), check_beside, 80
    ),
    "nothing is found in a string or a comment": Property(
        together(any_texts, chances, st.integers(1, 9)), check_never_inside, 60
    ),
    "the same twice is refused with both lines": Property(together(texts.simple, chances, chances), check_twice, 80),
    "a reformatted match is found": Property(together(texts.simple, chances, texts.line_ends), check_reformatted, 80),
    "bytes and encodings are kept": Property(
        together(any_texts, st.sampled_from(["utf-8", "latin-1", "cp1252", "utf-8-sig"]), st.booleans()), check_bytes
    ),
    "what is known of a function is so": Property(real_texts(), check_quick, 15),
    "an edit in a function's lines is one in the file": Property(function_edits(), check_pieces, 40),
    "drafted edits undo what changed": Property(versions(), check_drafted, 50),
}


@pytest.mark.parametrize("name", PROPERTIES)
def test_property(name: str) -> None:
    PROPERTIES[name].hold()


# What failed once.
FOUND = {
    "lines in brackets left of their statement": ("a change undone", ("if a:\n    b()\n    f(\na)\n", 2)),
    "blanks in brackets in a file with tabs": (
        "a change undone", ("if b:\n\tc()\nif a:\n\ta = (a +\n\n    b)\n", 1)),
    "a tab in brackets among blanks": ("a change undone", ("if a:\n    if (a and\n\tb):\n        a = a\n", 1)),
    "blank lines with blanks": ("a change undone", ("if b:\n  c()\nif a:\n  b()\n \n  c()\n", 1)),
    "a comma behind what is imported": (
        "the same twice", (("from . import (", texts.WRAP, "a", texts.COMMA, ")"), 0, 0)),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_found(name: str) -> None:
    start, drawn = FOUND[name]
    [known] = [known for each, known in PROPERTIES.items() if each.startswith(start)]
    known.hold_for(drawn)


def test_there_are_real_files() -> None:
    assert len(real_files()) > 200
