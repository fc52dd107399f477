"""Toggle files: what is read, and that each mistake is told with its file, line and place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.edits import Edit, Reversal
from harness.errors import ToggleError, UsageError
from harness.fixes import Variant, load, schema

GOOD = """\
# yaml-language-server: $schema=schema.json
pr: 27338
title: a title
links: [https://github.com/sgl-project/sglang/pull/27338]
fixes:
  topk-factor:
    kind: size
    summary: one sentence
    scenario: draft
    backend: flashinfer
    legs:
      - out: [topk-factor]
        outcome: guarded
        reason: too small
      - out: [topk-factor, capacity-assert]
        outcome: {cpu: overflow, cuda: crashed}
    reversals:
      eagle_kv:
        - target: eagle_kv.sizing.width
          edits:
            - match: |
                topk * n
              replacement: |
                n
      sglang:
        patches:
          - target: sglang.srt.mod.C.f
            edits:
              - match: a()
                append: b()
  capacity-assert:
    kind: guard
    summary: one sentence
    guard: row too small
    reversals:
      eagle_kv:
        - target: eagle_kv/csrc/k.cuh
          entered_by: eagle_kv.store.store
          edits: [{match: "assert(x);", replacement: ""}]
"""
OWN = """\
pr: own
title: ours
fixes:
  rows:
    kind: arithmetic
    summary: s
    scenario: draft
    legs: [{out: [rows, "27338:topk-factor"], outcome: wrong}]
    reversals: {eagle_kv: [{target: a.b, edits: [{match: x, prepend: y}]}]}
"""


FORMS = """\
pr: 1
title: t
fixes:
  x:
    kind: size
    summary: s
    reversals:
      sglang:
        variants:
          - name: one
            patches: [{target: a.b, edits: [{match: x, replacement: ""}]}]
        unfixed:
          - name: two
            patches:
              - target: a.b
                edits: [{match: y, replacement: z}]
"""


def write(directory: Path, text: str, name: str = "27338.yaml") -> Path:
    (directory / name).write_text(text)
    return directory


def test_load(tmp_path):
    write(write(tmp_path, GOOD), OWN, "own.yaml")
    catalogue = load(tmp_path)
    assert catalogue.ids == ("27338:topk-factor", "27338:capacity-assert", "own:rows")
    fix = catalogue.fix("27338:topk-factor")
    assert (fix.kind, fix.scenario, fix.backend, fix.line) == ("size", "draft", "flashinfer", 6)
    assert fix.legs_out_ids == (("27338:topk-factor",), ("27338:topk-factor", "27338:capacity-assert"))
    assert [leg.outcome_on("cuda") for leg in fix.legs] == ["guarded", "crashed"]
    assert fix.reversals_for("eagle_kv") == (
        Reversal(fix.id, "eagle_kv.sizing.width", (Edit("topk * n\n", replacement="n\n"),)),
    )
    assert fix.reversals_for("sglang") == (Reversal(fix.id, "sglang.srt.mod.C.f", (Edit("a()", append="b()"),)),)
    assert fix.reversals_for("elsewhere") == ()
    assert catalogue.fix("own:rows").legs_out_ids == (("own:rows", "27338:topk-factor"),)
    assert len(catalogue.reversals(catalogue.ids, "eagle_kv")) == 3
    with pytest.raises(UsageError, match="nearest: own:rows"):
        catalogue.fix("own:row")


SIZE_LEGS = GOOD[GOOD.index("    legs:") : GOOD.index("    reversals:")]
SIZE_REVERSALS = GOOD[GOOD.index("    reversals:") : GOOD.index("  capacity-assert:\n")]
FIXES = GOOD[GOOD.index("fixes:\n") :]
TOP, GUARD = "fixes.topk-factor", "fixes.capacity-assert"

# name -> (what to replace in GOOD, with what, the line it is told on, the rest of the error)
BAD = {
    "a field missing": ("    kind: size\n", "", 6, rf"{TOP}.kind: field required \(size, guard"),
    "no reversals": (SIZE_REVERSALS, "", 6, rf"{TOP}.reversals: field required \(a mapping of code bases"),
    "unknown key": ("backend:", "backed:", 10, rf"{TOP}.backed: unknown key, did you mean backend\? \(known: kind, "),
    "unknown key in an edit": (
        "append: b",
        "apend: b",
        30,
        r"fixes.*edits.0.apend: unknown key, did you mean append\?",
    ),
    "unknown key at the top": ("a title", "x\ntags: 1", 4, r"tags: unknown key \(known: pr, title, links, fixes\)"),
    "not a kind": ("kind: size", "kind: sized", 7, rf"{TOP}.kind: value should be 'size'.*, not 'sized'"),
    "not an outcome": ("outcome: guarded", "outcome: guard", 13, r".*legs.0.outcome: must be clean, .*, not 'guard'"),
    "not a device": ("cpu: overflow", "tpu: overflow", 16, rf"{TOP}.legs.1.outcome"),
    "two of three": ("append: b()", "append: b()\n                prepend: c()", 29, r".*edits.0: give exactly one of"),
    "none of three": ("                append: b()\n", "", 29, r".*edits.0: give exactly one of"),
    "a bad regex": ("reason: too small", "reason: '(too'", 14, r".*legs.0.reason: not a regular expression"),
    "an unknown leg": ("[topk-factor]", "[topk]", 12, r".*legs.0.out.0: no fix 27338:topk, did you mean 27338:topk-f"),
    "a fix twice in a leg": ("capacity-assert]", "27338:topk-factor]", 15, r".*legs.1.out: the same fix twice"),
    "a leg without the fix itself": (
        "out: [topk-factor]",
        "out: [capacity-assert]",
        12,
        rf"{TOP}.legs.0.out: must have topk-factor, the fix",
    ),
    "one leg twice": (
        "out: [topk-factor]",
        "out: [capacity-assert, '27338:topk-factor']",
        15,
        rf"{TOP}.legs.1.out: the same fixes as the leg on line 12$",
    ),
    "one device only": ("cpu: overflow, ", "", 16, rf"{TOP}.legs.1.outcome: says nothing for cpu: give cpu and cuda"),
    "no device": ("{cpu: overflow, cuda: crashed}", "{}", 16, rf"{TOP}.legs.1.outcome: says nothing for cpu and cuda"),
    "a guard without its words": ("    guard: row too small\n", "", 31, rf"{GUARD}: kind guard needs guard"),
    "legs without a scenario": ("    scenario: draft\n", "", 6, rf"{TOP}: legs need a scenario"),
    "a scenario without legs": (SIZE_LEGS, "", 6, rf"{TOP}: a fix with a scenario needs legs"),
    "no entered_by": ("          entered_by: eagle_kv.store.store\n", "", 37, r".*eagle_kv.0: .*needs entered_by"),
    "a target outside": ("kv/csrc/k.cuh", "kv/../k.cuh", 37, r".*target: target 'eagle_kv/../k.cuh' must be.*'\.\.'$"),
    "a match of comments": ("match: a()", "match: '# a()'", 27, r".*sglang.0: edits.0.match has no code in it"),
    "a wrong file name": ("pr: 27338", "pr: 27339", 2, r"pr: 27339 is in 27338.yaml: the file must be 27339.yaml"),
    "a bad pr": ("pr: 27338", "pr: ours", 2, r"pr: value should be .*, not 'ours'"),
    "a boolean title": ("title: a title", "title: no", 3, r"title: value should be a valid string, not 'False'"),
    "a bad link": ("[https:", "[http:", 4, r"links.0: 'http://github.com.*must match"),
    "a bad fix name": ("  topk-factor:\n", "  Topk_Factor:\n", 6, r"fixes.Topk_Factor: 'Topk_Factor' must match"),
    "a duplicate key": ("title: a title", "title: x\ntitle: y", 4, r"title: already on line 3"),
    "a duplicate fix": ("  capacity-assert:\n", "  topk-factor:\n", 31, rf"{TOP}: already on line 6"),
    "an anchor": ("a title", "&a x", 3, r"anchors and aliases aren't allowed"),
    "an alias": ("a title", "*a", 3, r"anchors and aliases aren't allowed"),
    "a tag": (
        "a title",
        "!!python/name:os.system x",
        3,
        r"the tag 'tag:yaml.org,2002:python/name:os.system' isn't allowed",
    ),
    "a key that isn't a string": ("a title", "x\non: 1", 4, r"the key 'on' isn't a string: put quotes around it"),
    "an open quote": ("a title", "'x", r"\d+", r"not YAML: "),
    "a tab": ("title: a title", "\ttitle: x", 3, r"not YAML: "),
    "two documents": ("a title", "x\n---", 4, r"a second document"),
    "deep nesting": ("a title", "[" * 100 + "]" * 100, 3, r"nested deeper than 32"),
    "fixes is a list": (FIXES, "fixes: []", 5, r"fixes: value should be a valid dict"),
}


@pytest.mark.parametrize("name", BAD)
def test_mistakes(tmp_path, monkeypatch, name):
    old, new, line, error = BAD[name]
    assert old in GOOD
    toggles = tmp_path / "toggles"
    toggles.mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ToggleError, match=rf"(?m)^toggles/27338.yaml:{line}: {error}") as caught:
        load(write(toggles, GOOD.replace(old, new, 1)))
    assert all(line.startswith("toggles/27338.yaml:") for line in str(caught.value).splitlines())


def test_forms(tmp_path):
    fix = load(write(tmp_path, FORMS, "1.yaml")).fix("1:x")
    deleted = Reversal("1:x", "a.b", (Edit("x", replacement=""),))
    assert fix.variants_for("sglang") == (Variant("one", (deleted,)),) and fix.reversals_for("sglang") == (deleted,)
    assert fix.unfixed_for("sglang") == (Variant("two", (Reversal("1:x", "a.b", (Edit("y", replacement="z"),)),)),)
    assert fix.variants_for("elsewhere") == fix.unfixed_for("elsewhere") == ()


FORM = r"fixes.x.reversals.sglang"
BAD_FORMS = {
    "a name missing": (
        "- name: one\n            patches",
        "- patches",
        10,
        rf"{FORM}.variants.0.name: field required \(what",
    ),
    "no patches": (
        "patches: [{target: a.b,",
        "patch: [{target: a.b,",
        11,
        rf"{FORM}.variants.0.patch: unknown key, did you",
    ),
    "unknown key": ("unfixed:", "unfix:", 12, rf"{FORM}.unfix: unknown key, did you mean unfixed\? \(known: variants"),
    "unknown key in a patch": (
        "target: a.b\n",
        "targets: a.b\n",
        15,
        rf"{FORM}.unfixed.0.patches.0.targets: unknown key",
    ),
    "one name twice": ("name: two", "name: one", 8, rf"{FORM}: two forms are called 'one'"),
    "nothing is put in": (
        "replacement: z",
        "replacement: ''",
        8,
        rf"{FORM}: unfixed.0.patches.0.edits: must be match with",
    ),
    "a comment is put in": ("replacement: z", "replacement: '# z'", 8, rf"{FORM}: unfixed.0.patches.0.edits: must be"),
    "put in beside": ("replacement: z", "append: z", 8, rf"{FORM}: unfixed.0.patches.0.edits: must be match with"),
    "neither": (FORMS[FORMS.index("        variants") :], "        variants: []\n", 8, rf"{FORM}: give variants"),
    "a number": (FORMS[FORMS.index("\n        variants") :], " 3\n", 8, rf"{FORM}: value should be a valid list"),
}


@pytest.mark.parametrize("name", BAD_FORMS)
def test_mistakes_in_forms(tmp_path, monkeypatch, name):
    old, new, line, error = BAD_FORMS[name]
    assert old in FORMS
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ToggleError, match=rf"(?m)^1.yaml:{line}: {error}"):
        load(write(tmp_path, FORMS.replace(old, new, 1), "1.yaml"))


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", ":1: must be a mapping"),
        (b"- 1\n", ":1: must be a mapping"),
        (b"pr: 1\ntitle: \xff\n", ":2: not UTF-8"),
        (b"pr: 1\ntitle: \x00\n", ":2: not YAML"),
        (b"#" * ((1 << 20) + 1), ":1: larger than 1048576 bytes"),
        (
            b"[" * 100_000,
            ":1: (nested deeper|not YAML: exceeded maximum nesting depth)",
        ),  # libyaml has a limit of its own
    ],
    ids=["empty", "list", "not utf-8", "nul", "large", "deep"],
)
def test_hostile_files(tmp_path, data, error):
    (tmp_path / "1.yaml").write_bytes(data)
    with pytest.raises(ToggleError, match=f"1.yaml{error}"):
        load(tmp_path)


def test_a_file_called_yml_is_not_passed_over(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(write(tmp_path, GOOD), "", "27339.yml")
    with pytest.raises(ToggleError, match=r"^27339.yml:1: isn't read: rename it to 27339.yaml$"):
        load(tmp_path)


def test_what_is_no_regular_file_is_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("1.yaml")
    with pytest.raises(ToggleError, match=r"^1.yaml:1: isn't a regular file$"):
        load(tmp_path)
    Path("1.yaml").unlink()
    Path("1.yaml").mkdir()
    with pytest.raises(ToggleError, match=r"^1.yaml:1: (can't be read: Is a directory|isn't a regular file)$"):
        load(tmp_path)
    Path("1.yaml").rmdir()
    Path("1.yaml").symlink_to("gone")
    with pytest.raises(ToggleError, match=r"^1.yaml:1: can't be read: No such file or directory$"):
        load(tmp_path)


def test_a_scenario_must_be_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    toggles, scenarios = tmp_path / "toggles", tmp_path / "regressions/scenarios"
    toggles.mkdir()
    scenarios.mkdir(parents=True)
    write(toggles, GOOD)
    (scenarios / "drafts.py").touch()
    where = r"^toggles/27338.yaml:9: fixes.topk-factor.scenario: no regressions/scenarios/draft.py"
    with pytest.raises(ToggleError, match=rf"{where}, did you mean drafts\?$"):
        load(toggles)
    (scenarios / "drafts.py").rename(scenarios / "draft.py")
    assert len(load(toggles)) == 2


def test_all_mistakes_are_told_in_order(tmp_path):
    bad = GOOD.replace("kind: size", "kind: x").replace("a title", "''").replace("kind: guard", "kind: y")
    with pytest.raises(ToggleError) as caught:
        load(write(tmp_path, bad))
    lines = [line.split(":")[1] for line in str(caught.value).splitlines()]
    assert lines == ["3", "7", "32"]


def test_order_is_by_number_and_own_comes_last(tmp_path):
    other = OWN.replace(', "27338:topk-factor"', "")
    for pr in ("27460", "9999", "own"):
        write(tmp_path, other.replace("pr: own", f"pr: {pr}"), f"{pr}.yaml")
    assert load(tmp_path).prs == ("9999", "27460", "own")


def test_no_directory(tmp_path):
    with pytest.raises(UsageError, match="no toggle directory"):
        load(tmp_path / "none")


def test_the_schema_is_current():
    root = Path(__file__).parent.parent
    printed = subprocess.run(
        [sys.executable, "-m", "harness.fixes", "schema"], cwd=root, capture_output=True, text=True, check=True
    ).stdout
    assert json.loads(printed) == schema()
    current = (root / "toggles/schema.json").read_text()
    assert current == printed, "run: python -m harness.fixes schema > toggles/schema.json"


def test_the_schema_and_the_loader_agree_on_keys(tmp_path):
    definitions = schema()["$defs"]
    assert set(definitions["EditEntry"]["properties"]) == {"match", "replacement", "prepend", "append"}
    for name in ("EditEntry", "ReversalEntry", "FormEntry", "FormsEntry", "LegEntry", "FixEntry"):
        assert definitions[name]["additionalProperties"] is False
