"""Edits made in a function's own lines are the edits made in the whole file, and what they cost is remembered."""

from __future__ import annotations

import ast
import json
import warnings
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from harness import pieces as module
from harness import remembered
from harness.edits import Change, Edit, Reversal, apply
from harness.errors import RottedError
from harness.outline import definitions
from harness.pieces import join, pieces
from harness.targets import Location, locate

STDLIB = [Path(file.__file__) for file in (ast, json.decoder, warnings)]

PKG = '''
class Pool:
    size = 1

    def rows(self, n):
        if n:
            return n
        return 0

    @property
    def text(self):
        """
at the left
        """
        return self.size


class Other:
    def rows(self):
        return 1
x = 1
'''

# target, edits, and whether a function's lines are enough: an edit's match, then "-> " replacement, "^ " or "v " lines
CASES = [
    ("Pool.rows", ["return n -> return n + 1"], True),
    ("Pool.rows", ["if n:\n    return n -> "], True),
    ("Pool.rows", ["return n -> return n + 1", "return 0 -> return 1"], True),
    ("Pool.rows", ["if n: ^ n += 1"], True),
    ("Pool.rows", ["return 0 v pass"], False),  # what stands behind it is not in sight
    ("Pool.rows", ["def rows(self, n): ^ count = 0"], False),  # nor what stands before
    ("Pool.rows", ["def rows(self, n): -> def rows(self, n, m):"], False),
    ("Pool.text", ["return self.size -> return 2"], False),  # its lines alone do not fit into a class
    ("Pool", ["size = 1 -> size = 2"], True),
    ("Pool", ["return n -> return n + 1", "size = 1 -> "], True),
    ("Other", ["return 1 -> return 2"], True),
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UNFIX_CACHE", str(tmp_path / "cache"))
    module._apply.cache_clear()
    return tmp_path / "cache" / "answers"


def edit(written: str) -> Edit:
    for sign, name in (("-> ", "replacement"), ("^ ", "prepend"), ("v ", "append")):
        if sign in written:
            match, _, text = written.partition(sign)
            return Edit(match.strip(), **{name: text})
    raise AssertionError(written)


def in_whole(located: list[tuple[Reversal, Location]]) -> str:
    place = located[0][1]
    changes = [Change(each, at.regions, r.fix, r.target) for r, at in located for each in r.edits]
    return apply(place.source.text, changes, name=place.relpath.as_posix())


def located(root: Path, text: str, *reversals: tuple[str, list[Edit]]) -> list[tuple[Reversal, Location]]:
    (root / "pkg").mkdir(exist_ok=True)
    (root / "pkg" / "__init__.py").touch()
    (root / "pkg" / "mod.py").write_text(text)
    made = [Reversal(f"1:{at}", f"pkg.mod.{name}", tuple(edits)) for at, (name, edits) in enumerate(reversals)]
    return [(reversal, locate(reversal.target, [root])) for reversal in made]


@pytest.mark.parametrize(("target", "edits", "enough"), CASES)
def test_a_function_s_lines_are_enough(target: str, edits: list[str], enough: bool, tmp_path: Path) -> None:
    found = located(tmp_path, PKG, (target, [edit(each) for each in edits]))
    made = pieces(found)
    assert join(PKG, made) == in_whole(found)
    assert all(len(piece.old) < len(PKG) for piece in made) == enough


def test_pieces_of_one_file_are_joined_in_its_order(tmp_path: Path) -> None:
    wanted = [("Other.rows", [edit("return 1 -> return 2")]), ("Pool.rows", [edit("return 0 -> return 3")])]
    found = located(tmp_path, PKG, *wanted)
    assert [piece.new.count("return") for piece in pieces(found)] == [2, 1]
    assert join(PKG, pieces(found)) == in_whole(found)


def test_a_method_and_its_class_are_changed_together(tmp_path: Path) -> None:
    wanted = [("Pool", [edit("size = 1 -> size = 2")]), ("Pool.rows", [edit("return 0 -> return 3")])]
    found = located(tmp_path, PKG, *wanted)
    assert len(pieces(found)) == 1 and join(PKG, pieces(found)) == in_whole(found)


def test_what_is_wrong_is_told_with_the_whole_file_in_view(tmp_path: Path) -> None:
    found = located(tmp_path, PKG, ("Pool.rows", [edit("return self.size -> return 1")]))
    with pytest.raises(RottedError, match="outside of the target it is on line 15"):
        pieces(found)
    with pytest.raises(RottedError, match=r"isn't in pkg/mod.py$"):
        pieces(found, explain=False)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None)
@given(data=st.data())
def test_any_edit_in_a_real_module_is_the_same_either_way(data: st.DataObject, tmp_path: Path) -> None:
    text = data.draw(st.sampled_from(STDLIB)).read_text("utf-8")
    name = data.draw(st.sampled_from(sorted(definitions(text))))
    nodes = definitions(text)[name][0]
    inner = [node for node in ast.walk(nodes[0]) if isinstance(node, ast.stmt)]
    match = ast.get_source_segment(text, data.draw(st.sampled_from(inner))) or ""
    kind = data.draw(st.sampled_from(["replacement", "prepend", "append"]))
    new = data.draw(
        st.sampled_from(["", "unfix_was_here()", "if unfix:\n  was(here)"] if kind == "replacement" else ["here()"])
    )
    assume(match.strip())
    found = located(tmp_path, text, (name, [Edit(match, **{kind: new})]))
    try:
        expected = in_whole(found)
    except RottedError as error:
        with pytest.raises(RottedError) as caught:
            pieces(found)
        assert str(caught.value) == str(error)
        with pytest.raises(RottedError):
            pieces(found, explain=False)
    else:
        assert join(text, pieces(found)) == expected
        assert join(text, pieces(found, explain=False)) == expected


LONG = PKG + "# " + "x" * remembered.SMALL


def test_an_answer_is_kept_and_found(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def work() -> tuple[int, int]:
        asked.append(1)
        return 1, 2

    answers = [remembered.remembered("question", LONG, about, work) for about in ("a", "a", "b")]
    assert answers == [[1, 2]] * 3 and len(asked) == 2
    remembered.remembered("question", LONG + " ", "a", work)
    remembered.remembered("another", LONG, "a", work)
    assert len(asked) == 4 and len(list(cache.iterdir())) == 4
    monkeypatch.setattr(remembered, "_version", lambda: "of another engine")
    remembered.remembered("question", LONG, "a", work)
    assert len(asked) == 5
    remembered.remembered("question", "short", "a", work)
    assert len(asked) == 6 and len(list(cache.iterdir())) == 5


def test_a_damaged_answer_is_worked_out_again(cache: Path) -> None:
    assert remembered.remembered("question", LONG, "", lambda: 1) == 1
    [kept] = cache.iterdir()
    kept.write_text('{"half": ')
    assert remembered.remembered("question", LONG, "", lambda: 2) == 2
    assert json.loads(kept.read_text()) == 2


@pytest.mark.parametrize("cache_is", ["a file", "others'"])
def test_without_a_cache_nothing_is_remembered(cache_is: str, cache: Path) -> None:
    if cache_is == "a file":
        cache.parent.touch()
    else:
        cache.parent.mkdir()
        cache.parent.chmod(0o777)
    assert [remembered.remembered("question", LONG, "", lambda each=each: each) for each in (1, 2)] == [1, 2]


def test_every_module_that_answers_is_in_the_version() -> None:
    """Whatever an answer is worked out by must make another answer when it changes."""
    folder = Path(remembered.__file__).parent
    for name in remembered._ANSWER:
        tree = ast.parse((folder / f"{name}.py").read_text())
        imports = {
            node.module.partition(".")[2]
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("harness.")
        }
        imports |= {
            alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module == "harness"
            for alias in node.names
        }
        assert imports <= {*remembered._ANSWER, "errors", "remembered", "targets"}, name
