"""What GitHub is told: a summary, rendered as Markdown, and annotations, parsed as the runner does. Nothing gets in."""

from __future__ import annotations

import html
import inspect
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from markdown_it import MarkdownIt  # rich needs it

from harness import cli, github, history, plain, publish
from harness.digest import Digest
from harness.errors import UsageError
from harness.extras import NOTHING, Extras, extras
from harness.history import Night

NIGHTS = Path(__file__).parent / "nights"
CLEAN, DELETED, ROTTED, MISSING = sorted(NIGHTS.glob("*.json"))
TAKES = set(inspect.signature(cli.repro).parameters)
COMMANDS = ("set-output", "error", "warning", "notice", "add-mask", "stop-commands", "debug", "group")


def told(path, before=CLEAN):
    night = history.read_night([path])
    return Digest(night, history.compare(night, [history.read_night([before])]))


class Shown(HTMLParser):
    """What a reader sees of Markdown: tags, text, and the cells of its table."""

    def __init__(self, markdown):
        super().__init__()
        self.tags, self.text, self.cells = [], "", []
        self.feed(MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).render(markdown))
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag == "td":
            self.cells.append("")

    def handle_data(self, data):
        self.text += data
        if self.cells:
            self.cells[-1] += data


def command(line):
    """(name, properties, data) of a line, as the runner takes it; None where it is none. Any spelling that it knows."""

    def back(text, more=""):
        return re.sub("%(0D|0A|25" + more + ")", lambda found: chr(int(found[1], 16)), text)

    if found := re.match(r"\s*::(.+?)::(.*)\Z", line, re.DOTALL):
        name, _, rest = found[1].partition(" ")
        pairs = [each.partition("=")[::2] for each in rest.split(",") if each]
        return name, {key: back(value, "|3A|2C") for key, value in pairs}, back(found[2])
    if found := re.search(r"##\[([^\]]*)\](.*)", line):
        return found[1].partition(" ")[0], {}, found[2]
    return None


FIRST = {
    CLEAN: "All well",
    DELETED: "Fix gone: 27486:slot-assert",
    ROTTED: "Toggle rotted: 27486:slot-assert",
    MISSING: "Incomplete: shard 3 of 4 is missing",
}


@pytest.mark.parametrize("path", FIRST, ids=lambda path: path.stem)
def test_the_first_line_says_whether_to_worry(path):
    first, _, rest = github.summary(told(path)).partition("\n")
    assert html.unescape(first) == f"## {FIRST[path]}" == f"## {told(path).headline}"
    counts = {CLEAN: "48 cases: 48 proved", MISSING: "36 cases: 36 proved"}.get(path, "48 cases: 26 proved, 22 rotted")
    shown = Shown(rest)
    assert counts in shown.text and "eagle_kv on cpu" in shown.text and path.stem in shown.text
    assert shown.tags.count("table") == (path in (DELETED, ROTTED))


def test_what_did_not_run_comes_first():
    text = html.unescape(github.summary(told(MISSING)))
    sentence = text.index("shard 3 of 4 is missing: 12 of 48 cases did not run")
    assert sentence < text.index("36 cases") < text.index("Since last night (1-clean)")
    assert "Gone or not run: 12" in text


def test_a_finding_with_what_it_means_since_when_and_how_to_see_it_again():
    known = extras(told(DELETED).night, TAKES)
    text = github.summary(told(DELETED), known)
    shown = Shown(text)
    assert [cell.strip() for cell in shown.cells[:3]] == ["Fix gone", "27486:slot-assert", "22 (22 newly broken)"]
    assert "8 overflow where guarded is declared" in shown.cells[3]
    assert "Newly broken: 22" in shown.text and "eagle_kv: 22 cases, proved → rotted" in shown.text
    [fenced] = re.findall(r"^```sh\n(.*)\n```$", text, re.MULTILINE)
    key = next(key for key, line in known.commands.items() if line == fenced)
    row = told(DELETED).records[key]
    assert (row["fix"], row["verdict"], row["tells"]) == ("27486:slot-assert", "rotted", True)
    assert f"27486:slot-assert on {key.case}" in shown.text


def test_without_a_checkout_and_without_earlier_nights():
    text = github.summary(Digest(history.read_night([DELETED])))
    assert "There is no earlier night to compare with." in text and "Show it again" not in text


ANNOTATIONS = {CLEAN: [], DELETED: ["Fix gone: 27486:slot-assert"], ROTTED: ["Toggle rotted: 27486:slot-assert"],
               MISSING: ["Incomplete"]}  # fmt: skip


@pytest.mark.parametrize("path", ANNOTATIONS, ids=lambda path: path.stem)
def test_an_annotation_for_each_finding(path, catalogue):
    lines = github.annotate(told(path), extras(told(path).night, TAKES))
    parsed = [command(line) for line in lines]
    assert [(name, properties["title"]) for name, properties, _ in parsed] == [
        ("error", title) for title in ANNOTATIONS[path]
    ]
    for _, properties, data in parsed:
        if path == MISSING:
            assert data == "shard 3 of 4 is missing: 12 of 48 cases did not run" and "file" not in properties
            continue
        assert data.startswith("22 cases, 22 newly broken. ")
        fix = catalogue.fix("27486:slot-assert")
        assert properties["file"] == "toggles/27486.yaml" == f"toggles/{fix.source.name}"
        named = fix.source.read_text().splitlines()[int(properties["line"]) - 1]
        assert named.strip() == "slot-assert:"


def record(verdict="proved", fix="1:a", case="c", seconds=1.0, **more):
    legs = [{"reverted": [], "outcome": "clean", "seconds": seconds}]
    return {
        "regression": "1", "fix": fix, "blames": fix, "case": case, "backend": "b", "target": "t", "device": "cpu",
        "tells": True, "verdict": verdict, "reason": "why", "legs": legs, **more,
    }  # fmt: skip


def night(*rows, incomplete=(), **environment):
    here = {"target": "t", "device": "cpu", **environment}
    return Night("n", ({"environment": here, "incomplete": list(incomplete), "results": list(rows)},))


def test_flaky_and_slower_cases_are_warnings():
    before = [night(record(), record(fix="1:b")), night(record("regressed"), record(fix="1:b"))]
    now = night(record(), record(fix="1:b", seconds=9.0))
    made = Digest(now, history.compare(now, before))
    parsed = [command(line) for line in github.annotate(made, Extras(places={"1:b": ("toggles/1.yaml", 7)}))]
    assert [(name, properties["title"]) for name, properties, _ in parsed] == [
        ("warning", "Flaky: 1:a"), ("warning", "Slower: 1:b"),
    ]  # fmt: skip
    assert parsed[0][2] == "t: 1 case, a finding in 1 of 3 nights (33%)\nc"
    assert (parsed[1][1]["file"], parsed[1][1]["line"]) == ("toggles/1.yaml", "7")
    text = Shown(github.summary(made)).text
    assert "c a finding in 1 of 3 nights (33%)" in text and "c 9.0 s, at most 1.0 s before (9.0 times)" in text


def test_github_shows_ten_of_a_kind_so_the_tenth_counts_the_rest():
    lines = github.annotate(Digest(night(*(record("regressed", f"1:f{at:02}") for at in range(13)))))
    titles = [command(line)[1]["title"] for line in lines]
    assert titles == [*(f"Regressed: 1:f{at:02}" for at in range(9)), "4 more"]
    assert len(github.annotate(Digest(night(*(record("regressed", f"1:f{at}") for at in range(10)))))) == 10


HOSTILE = (
    "::set-output name=x::1\n::error::2\r\n##[add-mask]3 %0A%3A a,b=c </script><img src=x onerror=alert(1)> <!-- "
    "| `x` ``` ~~~ [l](http://e) ![i](j) www.e.com **b** _i_ # h \\* &lt; \x1b[31m\x00\u202e\ud800\x9b"
)  # fmt: skip
TAGS = {"h2", "h3", "p", "ul", "li", "strong", "code", "pre", "table", "thead", "tbody", "tr", "th", "td", "br"}
FIELDS = ("reason", "case", "fix", "target", "verdict", "error", "environment", "incomplete", "night", "command")


def hostile(field):
    row = record("regressed")
    if field == "error":
        row["legs"][0]["error"] = row["reason"] = HOSTILE
    elif field in row:
        row[field] = HOSTILE
        row["blames"] = row["fix"]
    now = night(
        row, incomplete=[HOSTILE] if field == "incomplete" else (),
        **{HOSTILE: HOSTILE} if field == "environment" else {},
    )  # fmt: skip
    made = Digest(
        now, history.compare(now, [Night(HOSTILE if field == "night" else "m", night(record("rotted")).documents)])
    )
    [key] = made.records
    return made, Extras(commands={key: HOSTILE if field == "command" else "unfix run"}, places={HOSTILE: (HOSTILE, 1)})


@pytest.mark.parametrize("field", FIELDS)
def test_what_was_captured_is_text_in_the_summary(field):
    text = github.summary(*hostile(field))
    text.encode("utf-8")
    shown = Shown(text)
    assert set(shown.tags) <= TAGS
    assert len(shown.cells) == 4 and shown.tags.count("h2") == 1 and shown.tags.count("h3") == 2
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\ud800-\udfff]", text)
    assert plain.one_line(HOSTILE)[:199] in shown.text.replace(
        "\n", " "
    )  # cut at 200; a reason and a command are longer


STRUCTURE = (
    "- xyz", "---", "1. xyz", "# xyz", "> xyz", "```", "~~~", "    xyz", "|xyz|abc|", "<!--xyz", "* * *", "</code>",
)  # fmt: skip


@pytest.mark.parametrize("line", STRUCTURE)
def test_a_line_that_would_be_structure_is_text(line):
    now = night(record("regressed"), **{line: 1})
    [key] = now.records()
    made = Digest(now, history.compare(now, [night(record())]))
    shown = Shown(github.summary(made, Extras(commands={key: line})))
    assert shown.text.count(line.strip()) == 2 and f"{line}\n" in shown.text
    assert f"{line.strip()}: None before, 1 now" in shown.text
    assert (shown.tags.count("li"), shown.tags.count("pre")) == (4, 1)


@pytest.mark.parametrize("field", FIELDS)
def test_what_was_captured_is_no_workflow_command(field):
    lines = github.annotate(*hostile(field))
    parsed = [command(line) for line in lines]
    assert lines and all(line.isprintable() for line in lines)  # one line each
    assert {name for name, _, _ in parsed} == {"error"}
    assert {key for _, properties, _ in parsed for key in properties} <= {"file", "line", "title"}
    if field in ("fix", "reason", "incomplete"):
        seen = [part for _, properties, data in parsed for part in (properties["title"], data)]
        assert any(plain.one_line(HOSTILE)[:150] in part.replace("\n", "\\n") for part in seen)


@pytest.mark.parametrize("line", [
    HOSTILE, "::error::x", "  ::add-mask::x", "\u00ad::stop-commands::x", "\t::debug::x", "ok\n::group::x",
    "at 3: ##[add-mask]x", "##[##[error]x",
])  # fmt: skip
def test_no_line_of_a_log_is_a_command(line):
    made = plain.log_line(line)
    assert "\n" not in made and command(made) is None
    assert command(re.sub("^[^0-9A-Za-z:#]+", "", made)) is None  # the runner skips what its culture ignores


def test_a_line_that_is_no_command_stays_as_it_is():
    for line in ("regressed: 1:a, 2 cases", "tests/test_x.py::test_y[a::b] took 3 s", "# a [b] → é"):
        assert plain.log_line(line) == line


def test_the_largest_night_is_a_page_and_well_under_what_github_takes():
    kinds = ("regressed", "rotted", "infra", "vacuous", "proved")
    rows = [
        record(kinds[at % 5], f"{at % 97}:{'|' * 999}{at % 211}", f"{'<' * 9999}{at}", reason="`" * 9999, seconds=at)
        for at in range(4000)
    ]
    before = night(*({**row, "verdict": kinds[at % 4 + 1]} for at, row in enumerate(rows)))
    now = night(*rows, incomplete=["*" * 9999] * 50, **{f"name{at}": "&" * 9999 for at in range(50)})
    made = Digest(now, history.compare(now, [night(*rows), before]))
    text = github.summary(made, Extras(commands=dict.fromkeys(made.records, "`" * 1999)))
    assert text.count("\n") <= 200 and len(text.encode()) < 512 * 1024
    assert len({change.kind for change in made.since.changes}) >= 5
    assert max(map(len, github.annotate(made))) < 4096


def test_the_summary_is_appended_and_the_annotations_are_printed(tmp_path, monkeypatch, capsys):
    file = tmp_path / "summary.md"
    file.write_text("an earlier command of this step\n")
    monkeypatch.setenv(github.VARIABLE, str(file))
    publish.publish(told(DELETED), NOTHING, html=None, badge=tmp_path / "b.json", github=True)
    first, blank, headline, *_ = file.read_text(encoding="utf-8").splitlines()
    assert (first, blank) == ("an earlier command of this step", "") and headline.startswith("## Fix gone")
    assert [command(line)[0] for line in capsys.readouterr().out.splitlines()] == ["error"]
    assert json.loads((tmp_path / "b.json").read_text())["color"] == "red"


def test_what_cannot_be_had_is_said_at_the_start(tmp_path, monkeypatch):
    monkeypatch.delenv(github.VARIABLE, raising=False)
    with pytest.raises(UsageError, match="GITHUB_STEP_SUMMARY names no file"):
        publish.check(html=None, badge=None, github=True)
    with pytest.raises(UsageError, match="GITHUB_STEP_SUMMARY"):
        publish.publish(told(CLEAN), NOTHING, html=tmp_path / "r.html", badge=None, github=True)
    assert not (tmp_path / "r.html").exists()
    with pytest.raises(UsageError, match="--badge .*is a folder"):
        publish.check(html=None, badge=tmp_path, github=False)
    monkeypatch.setenv(github.VARIABLE, str(tmp_path / "none" / "s.md"))
    with pytest.raises(UsageError, match="GITHUB_STEP_SUMMARY names .*s.md, which can't be written: No such file"):
        publish.check(html=None, badge=None, github=True)
    monkeypatch.setenv(github.VARIABLE, str(tmp_path / "s.md"))
    with pytest.raises(UsageError, match="--github and --json -"):
        publish.check(html=None, badge=None, github=True, json_out="-")


def test_the_command(unfix, tmp_path):
    summary, badge = tmp_path / "s.md", tmp_path / "new" / "b.json"
    ended = unfix("report", str(DELETED), "--github", "--badge", str(badge), GITHUB_STEP_SUMMARY=str(summary))
    assert ended.returncode == 3, ended.stderr
    lines = ended.stdout.splitlines()
    assert [command(line)[1]["file"] for line in lines if command(line)] == ["toggles/27486.yaml"]
    assert lines[-1] == "unfix: 48 cases: 26 proved, 22 rotted"
    assert summary.read_text(encoding="utf-8").startswith("## Fix gone") and "```sh\nunfix repro" in summary.read_text()
    assert json.loads(badge.read_text())["message"] == "fix gone: 27486:slot-assert"


def test_a_hostile_matrix_injects_nothing_into_the_log(unfix, tmp_path):
    made, _ = hostile("reason")
    rows = [{**made.rows[0], "fix": HOSTILE, "blames": HOSTILE, "reason": HOSTILE, "verdict": "regressed"}]
    path = tmp_path / "m.json"
    path.write_text(json.dumps({"schema_version": 1, **made.night.documents[0], "results": rows}))
    ended = unfix("report", str(path))
    assert ended.returncode == 1 and "1 case." in ended.stdout
    assert not [line for line in (ended.stdout + ended.stderr).splitlines() if command(line)]
