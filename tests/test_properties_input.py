"""Whatever is read, nothing but a one-line error of unfix's own comes of it: sources, diffs, YAML, selections.

`python benchmarks/fuzz.py --seconds 600` tries the same for longer.
"""

from __future__ import annotations

import difflib
import random
import re
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import strategies as st

from harness import auditfile, clike, fixes, selection, targets, unidiff
from harness.draft import Texts, draft
from harness.edits import Change, Edit, apply
from harness.errors import MissingPackageError, RottedError, ToggleError, UsageError
from harness.fixes import Catalogue
from harness.targets import Source
from harness.tokens import lex
from harness.unidiff import DoesNotApply
from tests import python_texts as texts
from tests.fuzzing import Property

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.filterwarnings("ignore::SyntaxWarning")

# What means something to one of the readers, beside any character at all.
PIECES = [
    *("'", '"', "'''", '"""', "f'{", "{{", "}", "(", ")", "[", "]", "\\", "\\\n", "\n", "\r", "\r\n", "\t", "\f", "#"),
    *(
        "//",
        "/*",
        "*/",
        'R"x(',
        ')x"',
        "#define ",
        "a",
        "if a:",
        "def f():",
        "    ",
        ",",
        ";",
        ":",
        "@",
        "\0",
        "\ufeff",
    ),
    *("\ud800", "𝒳", "é", "1", "0x", "=", "return", "class C:", "lambda:", "x = 1", "'''\\", "\x85", "\u2028", "%"),
    *("--- a/m.py", "+++ b/m.py", "@@ ", "@@ -1,3 +1,2 @@", "diff --git a/m.py b/m.py", "rename to ", "&a ", "*a"),
    *("- ", "? ", "!!python/name:os", "---", "fixes:", "pr: 1", "<<: ", "own:", "27338", "all", "0", "pkg.", "pkg/"),
]
any_text = st.one_of(
    st.lists(st.one_of(st.sampled_from(PIECES), st.characters()), max_size=40).map("".join),
    st.lists(st.sampled_from(PIECES), max_size=60).map("".join),
)
languages = st.sampled_from(["python", "c"])


def check_lexed(drawn: tuple[str, Any]) -> None:
    """Tokens and comments are in order, and none overlaps another."""
    text, language = drawn
    tokens, comments = lex(text, language)
    spans = sorted((token.start, token.end) for token in [*tokens, *comments])
    assert all(0 <= start < end <= len(text) for start, end in spans)
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))


def check_edited(drawn: tuple[str, str, str, str, Any]) -> None:
    text, match, new, kind, language = drawn
    try:
        result = apply(text, [Change(Edit(match, **{kind: new}), ((0, len(text)),))], language=language)
    except (RottedError, UsageError) as error:
        assert "\n" not in str(error) and "\r" not in str(error)
    else:
        assert result != text


@st.composite
def edits(draw: st.DrawFn) -> tuple[str, str, str, str, Any]:
    """Any text with some of itself, or anything, as what to find."""
    text = draw(any_text)
    if text and draw(st.booleans()):
        first = draw(st.integers(0, len(text) - 1))
        match = text[first : first + draw(st.integers(1, 20))]
    else:
        match = draw(any_text)
    return text, match, draw(any_text), draw(st.sampled_from(["replacement", "prepend", "append"])), draw(languages)


def check_decoded(drawn: tuple[bytes, Any]) -> None:
    data, language = drawn
    try:
        source = Source.decode(data, language)
    except (ValueError, SyntaxError, LookupError):
        return
    assert source.encode(source.text) == data


def check_target(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "pkg").mkdir()
        try:
            place = targets.locate(text, [folder])
        except (UsageError, RottedError, MissingPackageError) as error:
            assert "\n" not in str(error)
        else:
            assert place.file.is_file()


def check_diff(text: str) -> None:
    try:
        found = unidiff.parse(text)
    except UsageError as error:
        assert "\n" not in str(error)
        return
    for file in found:
        try:
            unidiff.undo(text, file.hunks)
        except DoesNotApply as error:
            assert "\n" not in str(error)


@st.composite
def line_pairs(draw: st.DrawFn) -> tuple[list[str], list[str]]:
    line = st.sampled_from(["a", "b", "", "}", "  c", "-d", "+e", "@@ f", "--- g", "\\ h", "é"])
    return draw(st.lists(line, max_size=12)), draw(st.lists(line, max_size=12))


def check_undone(drawn: tuple[tuple[list[str], list[str]], int, str]) -> None:
    """A diff taken out of the new text gives the old one, for any context and line ends, and any text that it is in."""
    (old, new), context, ends = drawn
    if old == new:
        return
    said = list(difflib.unified_diff(old, new, "a/m.py", "b/m.py", lineterm="", n=context))
    [file] = unidiff.parse(ends.join(["a mail", "---", "", *said, "-- ", "2.40"]))
    assert (file.old, file.new) == ("m.py", "m.py")
    text = ends.join([*new, ""])  # the empty text behind the last line end is no line of the diff's
    assert unidiff.undo(text, file.hunks) == (ends if new else "\n").join([*old, ""])


def check_c_draft(drawn: tuple[str, str]) -> None:
    old, new = drawn
    for piece in clike.compare(old, new).pieces:
        apply("\n".join(re.split(r"\r\n|\r|\n", new)), [Change(piece.edit, ((0, len(new)),))], language="c")


def check_draft(drawn: tuple[str, str, Any]) -> None:
    old, new, language = drawn
    try:
        draft([Texts("pkg.mod" if language == "python" else "pkg/m.cu", language, old, new)])
    except SyntaxError as error:
        assert error.filename == "pkg.mod"


@lru_cache(maxsize=1)
def catalogue() -> Catalogue:
    return fixes.load(ROOT / "toggles")


def check_selected(text: str) -> None:
    try:
        ids = selection.parse(text, catalogue())
    except UsageError as error:
        assert "\n" not in str(error) and str(error).isascii() and selection.VARIABLE in str(error)
    else:
        assert set(ids) <= set(catalogue().ids) and len(set(ids)) == len(ids)


def refused(read: Callable[[Path], Any], name: str, data: bytes) -> None:
    """A file is read, or refused with lines that each say where in it."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / name
        file.write_bytes(data)
        try:
            read(file)
        except ToggleError as error:
            assert str(error)
            assert all(re.match(rf".*{re.escape(name)}:\d+: \S", line) for line in str(error).split("\n")), error


def check_toggle(data: bytes) -> None:
    refused(lambda file: fixes.load(file.parent), "27338.yaml", data)


def check_audit(data: bytes) -> None:
    refused(auditfile.load, "eagle_kv.yaml", data)


VALUES: list[Any] = [None, "", 0, -1, 1.5, True, [], {}, "a b", "x\ny", "27338", ["out"], {"a": 1}, "(", "..", "é" * 99,
                     [[[]]], {"cpu": "clean"}, "pkg/../x.py", "\ud7ff\x07"]  # fmt: skip


@st.composite
def mutated(draw: st.DrawFn, folder: str) -> bytes:
    """A real file with a few of its values, keys or bytes changed."""
    files = sorted((ROOT / folder).glob("*.yaml"))
    data = draw(st.sampled_from(files)).read_bytes()
    chance = random.Random(draw(st.integers(0, 2**32)))
    if draw(st.booleans()):
        for _ in range(draw(st.integers(1, 4))):
            at = chance.randrange(len(data))
            data = data[:at] + chance.choice([b"", b":", b"\t", b"\xff", b"\n", b"&a ", b"'", b"- "]) + data[at + 1 :]
        return data
    tree = yaml.safe_load(data)
    for _ in range(draw(st.integers(1, 3))):
        _mutate(tree, chance)
    return yaml.safe_dump(tree, allow_unicode=True, sort_keys=False).encode("utf-8", "surrogatepass")


def _mutate(tree: Any, chance: random.Random) -> None:
    at = tree
    while isinstance(at, dict | list) and at:
        key = chance.choice(list(at) if isinstance(at, dict) else range(len(at)))
        if chance.random() < 0.25 or not isinstance(at[key], dict | list) or not at[key]:
            change = chance.randrange(4)
            if change == 0:
                del at[key]
            elif change == 1 and isinstance(at, dict):
                at[chance.choice(["", "match", 1, "patches", "variants", "out", "A b", None])] = at.pop(key)
            else:
                at[key] = chance.choice(VALUES)
            return
        at = at[key]


yaml_texts = any_text.map(lambda text: text.encode("utf-8", "surrogatepass"))
KEYS = ["pr", "title", "fixes", "kind", "summary", "reversals", "legs", "kernels", "args", "edits"]
yaml_data = st.recursive(
    st.sampled_from(VALUES),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner),
    max_leaves=12,
).map(lambda data: yaml.safe_dump(data).encode())


def files_like(folder: str) -> st.SearchStrategy[bytes]:
    return st.one_of(mutated(folder), mutated(folder), yaml_data, yaml_texts, st.binary(max_size=80))


random_sources = texts.modules().map(lambda found: "\n".join(found[0]) + "\n")
PROPERTIES = {
    "any text has tokens": Property(st.tuples(any_text, languages), check_lexed, 250),
    "any edit of any text": Property(edits(), check_edited, 200),
    "any bytes are decoded and written back": Property(st.tuples(st.binary(max_size=60), languages), check_decoded, 99),
    "any target": Property(any_text, check_target, 100),
    "any text as a diff": Property(any_text, check_diff, 150),
    "a diff is taken out": Property(
        st.tuples(line_pairs(), st.integers(0, 3), st.sampled_from(texts.ENDS)), check_undone, 100
    ),
    "any two C++ texts": Property(st.tuples(any_text, any_text), check_c_draft, 80),
    "any two texts are drafted": Property(
        st.one_of(st.tuples(any_text, any_text, languages), st.tuples(random_sources, random_sources, languages)),
        check_draft,
        60,
    ),
    "any selection": Property(any_text, check_selected, 150),
    "any toggle file": Property(files_like("toggles"), check_toggle, 80),
    "any audit file": Property(files_like("audits"), check_audit, 50),
}  # fmt: skip


@pytest.mark.parametrize("name", PROPERTIES)
def test_property(name: str) -> None:
    PROPERTIES[name].hold()


DEEP = "x = " + "-" * 100_000 + "1\n"
SUM = "x = " + "a + " * 2000 + "1\n"
# What failed once, or took minutes.
FOUND: dict[str, tuple[str, Any]] = {
    "an f-string's quotes": ("any text has tokens", ("f'{" + "'" * 50_000, "python")),
    "open C++ raw strings": ("any text has tokens", ('R"(' * 15_000, "c")),
    "open comments in directives": ("any text has tokens", ("#/*\n" * 15_000, "c")),
    "nested too deep": ("any edit of any text", (DEEP + "y = 1\n", "y = 1", "y = 2", "replacement", "python")),
    "drafted from what is nested too deep": ("any two texts are drafted", (DEEP, "y = 2\n", "python")),
    "drafted from a long sum": ("any two texts are drafted", ("x = 1\n", SUM, "python")),
    "no code any more": ("any two C++ texts", ("'", "")),
    "a byte order mark alone": ("any two C++ texts", ("", "\ufeff")),
    "a guard without an end": ("any two texts are drafted", ("a\n", "a\nassert (a) ?\n", "c")),
    "gone lines without context": ("a diff is taken out", ((list("abcde"), list("ace")), 0, "\n")),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_found(name: str) -> None:
    known, drawn = FOUND[name]
    PROPERTIES[known].hold_for(drawn)
