"""The grammar of SGLANG_DEBUG_REVERT_PR."""

from __future__ import annotations

import pytest

from harness.errors import UsageError
from harness.fixes import Catalogue, load
from harness.selection import VARIABLES, able, chosen, of_session, parse, refuse_nested

FILE = """\
pr: {pr}
title: a title
fixes:
  {fixes}
"""
FIX = """{name}:
    kind: arithmetic
    summary: one sentence
    reversals: {{eagle_kv: [{{target: a.b, edits: [{{match: x, replacement: y}}]}}]}}
"""


@pytest.fixture(scope="module")
def catalogue(tmp_path_factory) -> Catalogue:
    directory = tmp_path_factory.mktemp("toggles")
    for pr, names in {
        "27460": ["topk-factor"],
        "27338": ["topk-factor", "capacity-assert"],
        "own": ["int32-rows"],
    }.items():
        fixes = "  ".join(FIX.format(name=name) for name in names)
        (directory / f"{pr}.yaml").write_text(FILE.format(pr=pr, fixes=fixes))
    return load(directory)


SIZE, GUARD, MLA, OWN = "27338:topk-factor", "27338:capacity-assert", "27460:topk-factor", "own:int32-rows"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, ()),
        ("", ()),
        ("  ", ()),
        ("0", ()),
        (" 0\n", ()),
        ("27338", (SIZE, GUARD)),
        ("27338:topk-factor", (SIZE,)),
        ("own", (OWN,)),
        ("own:int32-rows", (OWN,)),
        ("all", (SIZE, GUARD, MLA, OWN)),
        (" 27460 ,\t27338:topk-factor ", (MLA, SIZE)),
        ("27338:capacity-assert,27338", (GUARD, SIZE)),
        ("own,all,own", (OWN, SIZE, GUARD, MLA)),
    ],
)
def test_selected(catalogue, text, expected):
    assert parse(text, catalogue) == expected


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("27339", r"unknown fix '27339', did you mean 27338\?"),
        ("27338:topk", r"unknown fix '27338:topk', did you mean 27338:topk-factor\?"),
        ("capacity-assert", r"did you mean 27338:capacity-assert\?"),
        ("27338, nonsense!", r"unknown fix 'nonsense!' \(known: 27338:topk-factor, .*own:int32-rows; or a PR"),
        ("27338,", "nothing between two commas"),
        ("0,27338", "'0' means no fix at all"),
        ("00", "unknown fix '00'"),
        ("1", "unknown fix '1'"),
        ("27338:", "unknown fix '27338:'"),
        ("２７３３８", r"unknown fix '\\uff12"),
        ("\x1b[31mred\n", r"unknown fix '\\x1b\[31mred'"),
        ("ALL", "unknown fix 'ALL'"),
        ("al", r"unknown fix 'al', did you mean all\?"),
        ("pk-f", r"did you mean 27338:topk-factor\?"),
        ("x" * 60, "unknown fix 'x{60}'"),
    ],
)
def test_refused(catalogue, text, error):
    with pytest.raises(UsageError, match=error) as caught:
        parse(text, catalogue)
    message = str(caught.value)
    assert message.startswith("SGLANG_DEBUG_REVERT_PR: ") and message.isprintable() and message.isascii()


def test_a_long_word_is_cut_and_the_source_is_named(catalogue):
    with pytest.raises(UsageError, match=r"^--revert: unknown fix 'x{60}\.\.\.' \(known") as caught:
        parse("x" * 1_000_000, catalogue, source="--revert")
    assert len(str(caught.value)) < 300


def test_an_empty_catalogue(tmp_path):
    with pytest.raises(UsageError, match="known: none"):
        parse("27338", load(tmp_path))
    assert parse("0", load(tmp_path)) == ()


def test_what_a_code_base_cannot_undo_is_named(catalogue):
    assert able([OWN, SIZE], catalogue, "eagle_kv") == ((OWN, SIZE), "")
    assert able([], catalogue, "sglang") == ((), "")
    line = f"left out, since they can't be undone in sglang: {SIZE}, {MLA}"
    assert able([SIZE, MLA], catalogue, "sglang") == ((), line)


def test_what_a_command_selects(catalogue):
    assert chosen(None, catalogue, "eagle_kv") == ((SIZE, GUARD, MLA, OWN), "")
    assert chosen(["27460", "own"], catalogue, "eagle_kv") == ((MLA, OWN), "")
    assert chosen(["own"], catalogue, "sglang") == ((OWN,), "")  # what is named stays, and its cases say why not


@pytest.mark.parametrize(
    ("words", "code_base", "error"),
    [
        (["0"], "eagle_kv", "^SEL '0' selects no fix"),
        (["27339"], "eagle_kv", "^SEL: unknown fix '27339'"),
        (None, "sglang", "^no registered fix can be undone in sglang$"),
    ],
)
def test_a_command_that_selects_nothing_is_refused(catalogue, words, code_base, error):
    with pytest.raises(UsageError, match=error):
        chosen(words, catalogue, code_base)


def test_all_is_what_can_be_undone_and_the_others_are_named(tmp_path):
    for pr, code_base in (("1", "eagle_kv"), ("2", "other")):
        text = FILE.format(pr=pr, fixes=FIX.format(name="a")).replace("eagle_kv", code_base)
        (tmp_path / f"{pr}.yaml").write_text(text)
    both = load(tmp_path)
    left_out = "left out, since they can't be undone in other: 1:a"
    assert chosen([], both, "other") == chosen(["all"], both, "other") == (("2:a",), left_out)


@pytest.mark.parametrize(
    ("environment", "name", "ids"),
    [
        ({}, "SGLANG_DEBUG_REVERT_PR", ()),
        ({"SGLANG_DEBUG_REVERT_PR": "own"}, "SGLANG_DEBUG_REVERT_PR", (OWN,)),
        ({"UNFIX_REVERT": "own"}, "UNFIX_REVERT", (OWN,)),
        ({"SGLANG_DEBUG_REVERT_PR": "", "UNFIX_REVERT": "own"}, "UNFIX_REVERT", (OWN,)),
        ({"SGLANG_DEBUG_REVERT_PR": "27460", "UNFIX_REVERT": "own"}, "SGLANG_DEBUG_REVERT_PR", (MLA,)),
    ],
)
def test_what_is_out_of_a_whole_session(catalogue, environment, name, ids):
    assert of_session(catalogue, environment) == (name, ids)
    assert {*environment, name} <= {*VARIABLES}


def test_a_command_inside_unfix_exec_is_refused(monkeypatch):
    monkeypatch.delenv("UNFIX_REVERT", raising=False)
    refuse_nested()
    monkeypatch.setenv("UNFIX_REVERT", "x" * 61)
    with pytest.raises(UsageError, match="^x{60} is out already"):
        refuse_nested()
