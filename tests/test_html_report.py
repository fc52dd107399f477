"""The HTML report, parsed and not compared as text: its first lines, pictures, commands, and what is escaped."""

from __future__ import annotations

import base64
import hashlib
import inspect
import json
import re
import shlex
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from harness import cli, diagnosis, history, html_report, memory_map, memory_svg
from harness.digest import Digest
from harness.extras import Extras, extras
from harness.history import History, Night
from harness.memory_map import MemoryMap, Stray

NIGHTS = Path(__file__).parent / "nights"
CLEAN, DELETED, ROTTED, MISSING = sorted(NIGHTS.glob("*.json"))
VOID = {"meta", "link", "br", "hr", "img", "input"}
TAKES = set(inspect.signature(cli.repro).parameters)


class Page(HTMLParser):
    """All elements in order: tag, attributes, the tags around it, and its own text with that of what is in it."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.open = [], []
        self.feed(text)
        self.close()
        assert self.open == [], f"left open: {[each['tag'] for each in self.open]}"

    def handle_starttag(self, tag, attributes):
        element = {"tag": tag, "text": "", "inside": [each["tag"] for each in self.open], **dict(attributes)}
        self.elements.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag, attributes):
        self.elements.append(
            {"tag": tag, "text": "", "inside": [each["tag"] for each in self.open], **dict(attributes)}
        )

    def handle_endtag(self, tag):
        assert self.open and self.open[-1]["tag"] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data):
        for element in self.open:
            element["text"] += data

    def all(self, tag, kind=None):
        found = [each for each in self.elements if each["tag"] == tag]
        return [each for each in found if kind is None or kind in each.get("class", "").split()]

    def one(self, tag, kind=None):
        [found] = self.all(tag, kind)
        return found

    def within(self, element, tag, kind=None):
        """The elements of a tag inside of another one."""
        start = self.elements.index(element)
        inside = []
        for each in self.elements[start + 1 :]:
            if len(each["inside"]) <= len(element["inside"]):
                break
            inside.append(each)
        return [each for each in inside if each["tag"] == tag and (not kind or kind in each.get("class", "").split())]


def page(path, before=None):
    night = history.read_night([path])
    since = history.compare(night, [history.read_night([before])]) if before else History()
    text = html_report.render(Digest(night, since))
    return Page(text), text


def rows(path):
    return json.loads(path.read_text())["results"]


FIRST = {
    CLEAN: ("well", "All well", ""),
    DELETED: ("finding", "Fix gone: 27486:slot-assert", "with every fix in the bug is back"),
    ROTTED: ("rotted", "Toggle rotted: 27486:slot-assert", "The fix still works. Its toggle file is stale"),
    MISSING: ("infra", "Incomplete: shard 3 of 4 is missing", ""),
}


@pytest.mark.parametrize("path", FIRST, ids=lambda path: path.stem)
def test_the_top_of_the_page_tells_the_nights_apart(path):
    state, said, why = FIRST[path]
    shown, _ = page(path, CLEAN)
    assert (shown.one("header")["class"], shown.one("h1")["text"]) == (state, said)
    assert shown.one("title")["text"].startswith(said)
    found = shown.all("div", "diagnosis")
    assert len(found) == (1 if why else 0)
    assert all(why in each["text"] and "22 cases" in each["text"] for each in found)
    badges = [each["text"] for each in shown.within(shown.one("header"), "span", "badge")]
    assert badges == {CLEAN: ["48 proved"], MISSING: ["36 proved"]}.get(path, ["26 proved", "22 rotted"])


def test_what_did_not_run_is_said_above_the_counts():
    shown, text = page(MISSING, CLEAN)
    assert shown.one("p", "incomplete")["text"] == "shard 3 of 4 is missing: 12 of 48 cases did not run"
    assert text.index('<p class="incomplete">') < text.index('<ul class="counts"')
    assert "Gone or not run: 12" in shown.one("ul", "changes")["text"]
    assert not page(CLEAN)[0].all("p", "incomplete")


def test_what_changed_comes_before_the_matrix_and_a_finding_before_what_is_proved():
    shown, text = page(DELETED, CLEAN)
    assert text.index("<h1>") < text.index('class="diagnosis') < text.index('id="changes"') < text.index('id="matrix"')
    changes = shown.all("ul", "changes")[0]["text"]
    assert "Newly broken: 22" in changes and "27486:slot-assert on eagle_kv: 22 cases, proved → rotted" in changes
    groups = shown.all("details", "group")
    assert ["27486:slot-assert" in each["text"] for each in groups] == [True, True, False]
    assert ["open" in each for each in groups] == [True, True, False]
    verdicts = [shown.within(each, "span", "badge")[0]["text"] for each in shown.all("details", "case")]
    assert verdicts == ["rotted"] * 22 + ["proved"] * 26


def test_every_case_and_leg_of_the_matrix_is_on_the_page():
    shown, _ = page(CLEAN)
    cases = shown.all("details", "case")
    legs = [len(shown.within(shown.within(each, "ol", "legs")[0], "li")) for each in cases]
    by_name = {row["case"]: len(row["legs"]) for row in rows(CLEAN)}
    names = [shown.within(each, "span", "mono")[0]["text"] for each in cases]
    assert dict(zip(names, legs, strict=True)) == by_name and len(cases) == len(rows(CLEAN))


def test_a_page_needs_nothing_but_itself():
    shown, text = page(DELETED, CLEAN)
    assert not re.search(r"""(src|href)=["'](?!#)|url\(|@import|<link|<img|<iframe""", text)
    assert not [each for each in shown.elements if any(name.startswith("on") or name == "style" for name in each)]
    ids = [each["id"] for each in shown.elements if "id" in each]
    assert len(ids) == len(set(ids))
    assert {each["href"][1:] for each in shown.all("a")} <= set(ids) and len(shown.all("a")) > 1
    script = shown.one("script")["text"]
    [policy] = [each["content"] for each in shown.all("meta") if "http-equiv" in each]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy.startswith("default-src 'none'") and f"script-src 'sha256-{digest}'" in policy


HOSTILE = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>\"'&amp;{{ 7*7 }}\x1b[31m\x00\u202e\ud800\r\x9b"


@pytest.mark.parametrize(
    "where", ["case", "backend", "reason", "fix", "error", "trace", "environment", "note", "command"]
)
def test_what_was_captured_is_escaped_wherever_it_comes_from(where):
    [row, *_] = [dict(row) for row in rows(DELETED) if row["verdict"] == "rotted"]
    row["legs"] = [{**row["legs"][0], "error": "e", "trace": "t"}] if row["legs"] else [
        {"reverted": [], "outcome": "clean", "seconds": 1.0, "error": "e", "trace": "t"}
    ]  # fmt: skip
    environment = {"target": "eagle_kv", "torch": HOSTILE if where == "environment" else "2"}
    if where in ("error", "trace"):
        row["legs"][0][where] = HOSTILE
    elif where in row:
        row[where] = HOSTILE
    night = Night("n", ({"schema_version": 1, "environment": environment, "results": [row]},))
    [key] = night.records()
    more = Extras(
        notes={("eagle_kv", "", row["fix"]): HOSTILE} if where == "note" else {},
        commands={key: HOSTILE} if where == "command" else {},
    )
    text = html_report.render(Digest(night, history.compare(night, [Night("m", night.documents)])), more)
    text.encode("utf-8")
    shown = Page(text)
    assert len(shown.all("script")) == 1 and not shown.all("img")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\ud800-\udfff]", text)
    assert r'<script>alert(1)</script><img src=x onerror=alert(2)>"' in shown.one("body")["text"]
    assert r"{{ 7*7 }}\x1b[31m\x00\u202e\ud800\r\x9b" in shown.one("body")["text"]


def test_a_visible_text_stays_as_it_is():
    assert html_report.visible("a\tb\nc é → 日本 🙂") == "a\tb\nc é → 日本 🙂"
    assert html_report.visible(7) == 7


def test_what_a_row_needs_beyond_its_width_is_what_was_seen_outside():
    """The picture's own arithmetic, from the inputs, against what the detector counted."""
    seen = 0
    for row in rows(CLEAN):
        for each in memory_map.maps(row):
            if each.needed and each.stray:
                assert each.needed[-1] - each.width == each.stray.elements
                assert each.width_in == row["legs"][0]["facts"]["row"] >= each.needed[-1]
                seen += 1
            elif each.needed:
                assert each.needed[-1] <= each.width
    assert seen == 16  # as many as overflow


def rectangles(svg, kind):
    """(start, width) in percent of the drawing, top to bottom."""
    shown = Page(str(svg))
    return [(float(each["x"][:-1]), float(each["width"][:-1])) for each in shown.all("rect", kind)]


def test_a_picture_is_to_scale():
    # 2 rows of 16 int32 between zones of 512 bytes; 40 elements are needed of the last row: 24 stray, 96 bytes
    memory = MemoryMap("x", ("1:a",), 2, 16, "int32", 64, (30, 40), (), 512, Stray("after", 24, 0, 92))
    svg = memory_svg.draw(memory)
    total = 128 + 2 * 512
    share = [pytest.approx(value, abs=1e-3) for value in (100 * (512 + 128) / total, 100 * 96 / total)]
    assert rectangles(svg, "stray") == [tuple(share)]
    assert rectangles(svg, "ghost") == [(0, 100)] * 2  # 64 elements are the widest
    assert rectangles(svg, "over") == [(25, pytest.approx(100 * 14 / 64)), (25, pytest.approx(100 * 24 / 64))]
    first, second, whole = rectangles(svg, "have")
    assert first == second == (0, 25) and whole == (pytest.approx(44.4444), pytest.approx(11.1111))
    assert [round(width, 3) for _, width in rectangles(svg, "zone")] == [44.444, 44.444]
    said = memory.lines()
    assert "2 rows of 16 int32 elements: 32 elements, 128 bytes" in said
    assert "24 stray elements after its end, counted from there: element +0 (+0 bytes) to +23 (+92 bytes)" in said


def test_stray_bytes_too_few_to_see_are_drawn_again_close_up():
    small = MemoryMap("x", (), 4, 100_000, "int64", None, (), (2,), 4096, Stray("before", 2, -16, -8))
    svg = memory_svg.draw(small)
    whole, close = rectangles(svg, "stray")
    assert whole[1] < 0.01 and close[1] > 10
    assert sum("close up" in each["text"] for each in Page(str(svg)).all("text")) == 1
    assert "element -2 (-16 bytes) to -1 (-8 bytes)" in " ".join(small.lines())
    gaps = MemoryMap("x", (), 1, 8, "int8", None, (), (), 512, Stray("after", 2, 0, 7))
    assert "6 of them untouched" in " ".join(gaps.lines())


def test_many_rows_are_not_all_drawn():
    memory = MemoryMap("x", (), 40, 8, "int32", None, tuple(range(40)), (), 512)
    shown = Page(str(memory_svg.draw(memory)))
    texts = [each["text"] for each in shown.all("text")]
    assert len(texts) == 8 and "… 34 more" in texts and "row 39: 39 of 8, 31 past the end" in texts


def test_a_case_without_numbers_says_so():
    [row] = [dict(row) for row in rows(CLEAN) if "draft_loop-topk1" in row["case"]]
    assert memory_map.maps(row) == []
    old = {name: value for name, value in row.items() if name not in ("params", "on", "expected", "zone_bytes")}
    for each, said in ((row, "No leg reported a buffer"), (old, "before matrices kept buffers' shapes")):
        night = Night("n", ({"schema_version": 1, "environment": {"target": "eagle_kv"}, "results": [each]},))
        assert said in Page(html_report.render(Digest(night))).one("main")["text"]


def test_a_command_builds_the_very_case():
    night = history.read_night([CLEAN])
    made = extras(night, TAKES)
    repros = 0
    for key, row in night.records().items():
        program, command, fix, *options = shlex.split(made.commands[key])
        assert (program, fix, options[-2:]) == ("unfix", row["fix"], ["--device", "cpu"])
        if command == "run":
            assert row["detector"] == "victim"  # no option of `repro` makes one of these
            continue
        typed = dict(option.partition("=")[::2] for option in options[:-2])
        given = {name[2:].replace("-", "_"): _value(name, value) for name, value in typed.items()}
        case = cli._build_case(cli.catalogue().fix(fix), given)
        assert (case.id, case.params) == (row["case"], row["params"])
        repros += 1
    assert repros == 44


def _value(name, text):
    """As the command line hands it on."""
    if name in ("--seq-lens", "--slots"):
        return text
    return True if name == "--strided" else int(text) if text.isdigit() else text


def test_a_command_says_which_sglang():
    [row] = [dict(row) for row in rows(CLEAN) if row["case"] == "store_cache-slots8-row12B-int32-of6+2"]
    row["target"] = "sglang"
    for version, said in (
        ("0.5.13", "--target sglang --release 0.5.13"),
        ("0.5.23 environment, /a b", "--target sglang --release 0.5.23 --source '/a b'"),
    ):
        document = {
            "schema_version": 1,
            "environment": {"target": "sglang", "target_version": version},
            "results": [row],
        }
        made = extras(Night("n", (document,)), TAKES)
        assert [text.partition("--device cpu ")[2] for text in made.commands.values()] == [said]


def test_the_diff_of_a_case_is_what_a_leg_takes_out():
    night = history.read_night([CLEAN])
    made = extras(night, TAKES)
    assert set(made.diffs) == {
        ("eagle_kv", "", fix) for fix in ("27338:topk-factor", "27338:capacity-assert", "27486:slot-assert")
    }
    shown = Page(html_report.render(Digest(night), made))
    for case in shown.all("details", "case"):
        removed = [each["text"] for each in shown.within(case, "span", "del")]
        assert removed and all(text.startswith("-") for text in removed)
    assert "-  assert(slot >= 0 && slot < params.size_limit);" in removed


def finding(verdict, *, on="guarded", outcome=None, fix="1:a", blames=None, tells=True, out="overflow"):
    legs = [{"reverted": [], "outcome": outcome, "seconds": 1.0}] if outcome else []
    return {
        "fix": fix, "blames": blames or fix, "verdict": verdict, "tells": tells, "on": on, "expected": [out],
        "legs": legs, "reason": "why",
    }  # fmt: skip


# records -> (kind, fix) of each diagnosis
DIAGNOSES = {
    "proved": ([finding("proved")], []),
    "the bug is back": ([finding("rotted", outcome="overflow")], [("gone", "1:a")]),
    "one of two shows it": (
        [finding("rotted", outcome="overflow"), finding("rotted", outcome="guarded")], [("gone", "1:a")],
    ),
    "as it must be": ([finding("rotted", outcome="guarded")], [("stale", "1:a")]),
    "neither": ([finding("rotted", outcome="crashed")], [("rotted", "1:a")]),
    "no leg ran": ([finding("rotted")], [("rotted", "1:a")]),
    "an input that can't tell says nothing": (
        [finding("rotted", on="clean", outcome="clean", tells=False)], [("rotted", "1:a")],
    ),
    "a neighbour's case says nothing": (
        [finding("rotted", on="clean", outcome="clean", fix="1:b", blames="1:a")], [("rotted", "1:a")],
    ),
    "regressed": ([finding("regressed", outcome="clean")], [("regressed", "1:a")]),
    "the worst first": (
        [finding("infra"), finding("vacuous", fix="1:b"), finding("regressed", fix="1:c"), finding("proved")],
        [("regressed", "1:c"), ("vacuous", "1:b"), ("infra", "1:a")],
    ),
    "only skipped": ([finding("skipped")], [("unproved", "1:a")]),
    "only on inputs that can't tell": ([finding("proved", tells=False)], [("unproved", "1:a")]),
    "a verdict that nobody knows": ([finding("splendid")], [("splendid", "1:a")]),
}  # fmt: skip


@pytest.mark.parametrize("name", DIAGNOSES)
def test_a_diagnosis(name):
    records, expected = DIAGNOSES[name]
    assert [(found.kind, found.fix) for found in diagnosis.diagnose(records)] == expected


COMMANDS = {
    "clean": (["report", str(CLEAN)], 0, ["48 cases: 48 proved"], []),
    "a fix deleted": (
        ["report", str(DELETED), "--baseline", str(CLEAN)], 3,
        ["Fix gone: 27486:slot-assert, 22 cases.", "since 1-clean: 22 newly broken"], [],
    ),
    "the third night of a folder": (
        ["report", str(ROTTED), "--baseline", "three"], 3,
        ["Toggle rotted: 27486:slot-assert", "22 still broken"], [],
    ),
    "a shard is missing": (
        ["report", str(MISSING), "--baseline", str(CLEAN)], 4,
        [
            "incomplete: shard 3 of 4 is missing: 12 of 48 cases did not run\n", "since 1-clean: 12 gone or not run",
            "36 cases: 36 proved; incomplete",
        ], [],
    ),
    "a page that is a folder": (["report", str(CLEAN), "--html", "three"], 2, [], ["is a folder, must be a file"]),
    "no page": (["report", str(CLEAN), "--html", ""], 2, [], ["--html .: is a folder, must be a file"]),
    "GitHub, elsewhere": (["report", str(CLEAN), "--github"], 2, [], ["--github: GITHUB_STEP_SUMMARY names no file"]),
    "no such file": (["report", "none.json"], 2, [], ["none.json could not be read"]),
    "the same twice": (["report", str(CLEAN), str(CLEAN)], 2, [], ["is in it twice"]),
    "no such baseline": (["report", str(CLEAN), "--baseline", "none"], 2, [], ["--baseline none: no such file"]),
}  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command(unfix, tmp_path, name):
    arguments, code, out, err = COMMANDS[name]
    for path in (CLEAN, DELETED, ROTTED):
        shutil.copy(path, tmp_path)
    arguments = [str(tmp_path) if each == "three" else each for each in arguments]
    ended = unfix(*arguments, GITHUB_STEP_SUMMARY="")  # whatever runs this test
    assert ended.returncode == code, ended.stderr
    assert all(part in ended.stdout for part in out) and all(part in ended.stderr for part in err)
    assert "Traceback" not in ended.stderr


def test_the_command_writes_a_page_and_a_summary(unfix, tmp_path):
    made, summary = tmp_path / "new" / "r.html", tmp_path / "s.json"
    ended = unfix("report", str(DELETED), "--baseline", str(CLEAN), "--html", str(made), "--json", str(summary))
    assert ended.returncode == 3 and f"wrote {made}" in ended.stderr
    shown = Page(made.read_text(encoding="utf-8"))
    assert shown.one("h1")["text"] == "Fix gone: 27486:slot-assert" and shown.all("span", "del")
    said = json.loads(summary.read_text())
    assert said["verdicts"] == {"proved": 26, "rotted": 22}
    assert [(found["kind"], found["fix"]) for found in said["findings"]] == [("gone", "27486:slot-assert")]
    assert (said["history"]["last_night"], said["history"]["counts"]["broken"]) == ("1-clean", 22)
