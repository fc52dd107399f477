"""A hostile toggle file: each is refused with one line that says where, in no time, and nothing in it is run."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import auditfile, fixes, interchange, yamlfile
from harness.errors import ToggleError

MOST = yamlfile.MAX_BYTES
FIX = "pr: 1\ntitle: t\nfixes:\n  x:\n    kind: guard\n    guard: %s\n    summary: s\n    reversals:\n      a: [%s]\n"
EDIT = "{target: %s, edits: [{match: m, replacement: y}]}"


def guard(regex: str) -> str:
    return FIX % (f"'{regex}'", EDIT % "a.b")


def target(text: str) -> str:
    return FIX % ("g", EDIT % text)


def many(one: str, times: int) -> str:
    return "".join(one.format(at) for at in range(times))


# name: (the file, its line and what is wrong)
FILES = {
    "flow depth": ("[" * MOST, "1: (nested deeper|not YAML: exceeded maximum nesting)"),
    "mapping depth": ("{a: " * (MOST // 4), "1: nested deeper than 32"),
    "block depth": (many("- ", MOST // 2), "1: nested deeper than 32"),
    "indents": ("".join(" " * at + "a:\n" for at in range(1400)), "33: nested deeper than 32"),
    "many values": (f"[{'1,' * (MOST // 2 - 2)}]", "1: more than 20000 values"),
    "many lists": (f"[{'[],' * (MOST // 3 - 2)}]", "1: more than 20000 values"),
    "many keys": (many("k{}: 1\n", 90_000), "10000: more than 20000 values"),
    "many errors": ("pr: 1\nfixes:\n" + many("  x{}: {{knd: 1, rev: 1}}\n", 2400), "1: title: field required"),
    "a long text": ("pr: " + "x" * (MOST - 9), "1: a value of more than 65536"),
    "a long number": ("pr: " + "9" * 60_000, "1: '999.*' can't be read"),
    "a long hex number": ("pr: 0x" + "f" * 60_000, "1: '0xf.*' can't be read"),
    "a long number in base 60": ("pr: 1" + ":10" * 20_000, "1: '1:10.*' can't be read"),
    "no date": ("a: 2001-99-99\n", "1: '2001-99-99' can't be read"),
    "all comment": ("#" * MOST, "1: must be a mapping"),
    "all blank": (" " * MOST, "1: must be a mapping"),
    "all tag": ("!" * MOST, "1: the tag '.{60}' isn't allowed"),
    "a bomb": ("a: &a [x, x]\nb: [*a, *a]\n", "1: anchors and aliases"),
    "an alias alone": ("a: 1\nb: *a\n", "2: anchors and aliases"),
    "an alias to itself": ("&a [*a]\n", "1: anchors and aliases"),
    "an object": ("a: !!python/object/apply:os.system [id]\n", "1: the tag 'tag:yaml.org,2002:python/object/apply:os."),
    "a tag of its own": ("%TAG ! tag:x,2000:\n---\na: !b 1\n", "3: the tag 'tag:x,2000:b'"),
    "a merge": ("a: {<<: {b: 1}}\n", "1: the key '<<' isn't a string"),
    "a list as a key": ("? [a]\n: 1\n", "1: the key .* isn't a string"),
    "a second document": ("---\na: 1\n---\nb: 1\n", "3: a second document"),
    "NUL": ("pr: 1\nt: é\x00", "2: not YAML: unacceptable character #x0000"),
    "BOM within": ("pr: 1\nt: a\ufeff1\n", r"2: the character '\\ufeff' can't be seen"),
    "escape": ('pr: 1\ntitle: "\\e[31m"\n', r"2: the character '\\x1b' can't be seen"),
    "direction": ("title: a\u202eb\n", r"1: the character '\\u202e' can't be seen"),
    "direction in a comment": ("pr: 1  # a\u202eb\n", r"1: the character '\\u202e' can't be seen"),
    "direction of a key": ("\u202ea: 1\n", r"1: the character '\\u202e' can't be seen"),
    "half a character": ('title: "\\ud800"\n', "1: not YAML: found invalid Unicode"),
    "nested groups": (guard("(" * 30_000 + ")" * 30_000), "6: .*guard: not a regular expression: maximum recursion"),
    "a repetition": (guard("a{99999999999999999999}"), "6: .*guard: not a regular expression: the repetition number"),
    "a set in a set": (guard("[[a]"), "6: .*guard: not a regular expression: Possible nested set"),
    "dot-dot": (target("a/../b.py"), "9: .*target 'a/../b.py' must be a relative path"),
    "absolute": (target("/etc/x.py"), "9: .*target '/etc/x.py' must be a relative path"),
    "backslash": (target(r"'a\b.py'"), "9: .*must be a relative path"),
    "home": (target("~/x.py"), "9: .*must start with a package's name"),
    "a folder with a dot": (target("antigravity.x/y.py"), "9: .*must start with a package's name"),
    "a line end": (target(r'"a/b\n.py"'), "9: .*must start with a package's name"),
    "a long name": (target("a." + "b" * 60_000), "9: .*must have at most 250 bytes"),
    "the standard library": (target("os.path.join"), "9: .*never in os"),
    "the judge": (target("harness/verdict.py"), "9: .*never in harness"),
    "what starts with Python": (target("sitecustomize.x"), "9: .*never in sitecustomize"),
}


@pytest.fixture(autouse=True)
def _hangs_are_seen() -> Iterator[None]:
    signal.alarm(60)
    yield
    signal.alarm(0)


@pytest.mark.parametrize("name", FILES)
def test_a_hostile_file_is_refused_in_one_line(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text, wanted = FILES[name]
    Path("1.yaml").write_text(text)
    with pytest.raises(ToggleError, match=f"^1.yaml:{wanted}") as caught:
        fixes.load(tmp_path)
    lines = str(caught.value).split("\n")
    assert len(lines) <= 10 and all(line.startswith("1.yaml:") and len(line) < 400 for line in lines)
    assert all(line.isprintable() for line in lines)


def test_a_file_s_name_can_t_forge_a_line(tmp_path):
    (tmp_path / "1\n::error::x\x1b[2J.yaml").write_text("a: b\n")
    with pytest.raises(ToggleError) as caught:
        fixes.load(tmp_path)
    assert {line.split(": ")[0][-5:] for line in str(caught.value).split("\n")} == {"aml:1"}
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize("name", ["a bomb", "an object", "many values", "flow depth", "direction", "a long number"])
def test_other_files_are_read_as_carefully(name, tmp_path):
    """An audit, and an entry in SGLang's format."""
    text, wanted = FILES[name]
    wanted = wanted.partition(": ")[2]
    (tmp_path / "a.yaml").write_text(text)
    for read in (lambda: auditfile.load(tmp_path / "a.yaml"), lambda: interchange.parse(text, "it")):
        with pytest.raises(ToggleError, match=wanted):
            read()


def test_patches_are_found_whatever_their_number(tmp_path):
    """Each of them is worth a line, and none a walk through all lines."""
    one = "  x{}: {{kind: size, summary: s, reversals: {{a: {{patches: [{{target: a.b, edits: [{{match: m}}]}}]}}}}}}\n"
    (tmp_path / "1.yaml").write_text(f"pr: 1\ntitle: t\nfixes:\n{many(one, 900)}")
    with pytest.raises(ToggleError, match=r"1.yaml:4: fixes.x0.reversals.a.0.edits.0: give exactly one"):
        fixes.load(tmp_path)
