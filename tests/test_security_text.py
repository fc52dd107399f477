"""What a run captured is text, and nothing else, in every output: a table of hostile strings against each of them."""

from __future__ import annotations

import io
import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from harness import badge, github, history, html_report, memory_map, memory_svg, plain, report, report_cli
from harness.digest import Digest
from harness.extras import Extras
from harness.history import Night

HOSTILE = {
    "script": "<script>alert(1)</script><img src=x onerror=alert(2)>",
    "attribute": "\" onmouseover='alert(1)' x=\"`",
    "end of element": "</pre></code></details></svg></style><h1>x",
    "comment and CDATA": "<!-- --> ]]> <![CDATA[ x",
    "entity": "&lt;script&gt; &amp; &#60;b&#62; &bogus;",
    "template": "{{ 7*7 }} {% raw %} {# x #}",
    "table and fence": "| a | b |\n|---|---|\n```\n~~~\n# h\n- x\n> q",
    "link": "[x](javascript:alert(1)) ![x](http://e/x) http://e/ www.e.com @all #1 <http://e>",
    "command": "x\n::error::1\r\n::set-output name=x::y\r  ::add-mask::z\n##[add-mask]w\n%0A::stop-commands::q",
    "property": "a,b=c::d%2C,line=9:",
    "colours": "\x1b[31mred\x1b[0m \x9b31m \x1b]0;title\x07 \x1b]8;;http://e\x1b\\link\x1b]8;;\x1b\\",
    "screen": "\x1b[2J\x1b[H\x1bc\x08\x08\x08\x7f\r over",
    "NUL": "a\x00b\x0b\x0c\x85",
    "direction": "a\u202eb\u2066c\u2069\u200f\u061cd",
    "not seen": "a\u200bb\ufeffc\u2028d\xade\U000e0041\u206a\ufff9",
    "half a character": "\ud800 \udfff \udcff",
    "markup": "[red]x[/] [/nothing] [link=http://e]l[/link] \\[b] [@click=app.bell]c",
    "long": "x" * 100_000,
}  # fmt: skip
UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9\ud800-\udfff\U000e0000-\U000e007f]"
)
COMMAND = re.compile(r"^[^0-9A-Za-z│]*::|##\[")  # what GitHub's runner takes for one, and more


def record(text: str) -> dict[str, Any]:
    """A case of which all that may be anything is this text."""
    legs: list[dict[str, Any]] = [
        {"outcome": text, "reverted": [text], "seconds": 1.0, "error": text, "trace": text, "facts": {text: text}}
        for _ in range(2)
    ]
    legs[1]["overflow"] = {
        "side": text, "predicted_elements": 2, "observed_elements": 2, "first_offset_bytes": 0, "last_offset_bytes": 4,
        "detector": text, "buffers": [text],
        "hits": [
            {
                "side": "after", "elements": 2, "first_offset_bytes": 0, "last_offset_bytes": 4, "shape": [2, 3],
                "dtype": "int32",
            }
        ],
    }  # fmt: skip
    return {
        "regression": text, "fix": text, "blames": text, "case": text, "backend": text, "target": text, "device": text,
        "tells": True, "verdict": "regressed", "reason": text, "legs": legs, "test": text, "on": text,
        "expected": [text], "detector": text, "zone_bytes": 4, "params": {"text": text},
    }  # fmt: skip


def told(text: str) -> tuple[Digest, Extras]:
    environment = {"target": text, "target_version": text, "device": text, text: text, "commit": text}
    document = {
        "schema_version": 1, "environment": environment, "session_reverted": [text], "incomplete": [text],
        "results": [record(text)],
    }  # fmt: skip
    night = Night(text, (document,))
    before = Night(text, ({**document, "environment": {**environment, text: "other"}, "results": []},))
    digest = Digest(night, history.compare(night, [before]))
    [key] = night.records()
    at = (key.target, key.version, text)
    return digest, Extras({at: f"+{text}"}, {at: text}, {key: text}, {text: (text, 3)})


class Page(HTMLParser):
    """The elements of a page, the names of their attributes, and where they would lead."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.links: set[str] = set()
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}
        self.links |= {value or "" for name, value in attrs if name in ("href", "src")}


def page(text: str) -> str:
    return html_report.render(*told(text))


def drawing(text: str) -> str:
    [memory] = memory_map.maps(record(text))
    return str(memory_svg.draw(memory))


def lines(text: str) -> str:
    return "\n".join(plain.log_line(line) for line in report_cli.lines(told(text)[0]))


def table(text: str, width: int = 100) -> str:
    drawn = io.StringIO()
    Console(file=drawn, width=width, force_terminal=True, color_system=None).print(report.table([record(text)]))
    return drawn.getvalue()


def reasons(text: str) -> str:
    return "\n".join(map(plain.log_line, report.not_proved([record(text)])))


OUTPUTS: dict[str, Callable[[str], str]] = {
    "html": page,
    "svg": drawing,
    "markdown": lambda text: github.summary(*told(text)),
    "annotations": lambda text: "\n".join(github.annotate(*told(text))),
    "badge": lambda text: str(badge.badge(told(text)[0])["message"]),
    "table": table,
    "lines": lines,
    "reasons": reasons,
    "one line": plain.one_line,
    "log line": plain.log_line,
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("output", OUTPUTS)
def test_nothing_unseen_is_put_out(output, name):
    said = OUTPUTS[output](HOSTILE[name])
    said.encode("utf-8")
    assert not UNSEEN.search(said.replace("\r\n", "\n"))
    if output not in ("annotations", "html", "svg", "one line"):  # whose lines a runner reads, and is to read
        assert not [line for line in said.split("\n") if output != "markdown" and COMMAND.search(line)]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_page_has_no_element_and_no_attribute_that_it_has_not_with_a_plain_word(name):
    plain_page, hostile = Page(page("word")), Page(page(HOSTILE[name]))
    once = [
        tag for tag in plain_page.tags if tag not in ("span", "p")
    ]  # a line of a diff; a command, where it is short
    assert [tag for tag in hostile.tags if tag not in ("span", "p")] == once and once.count("script") == 1
    assert hostile.attributes == plain_page.attributes
    assert all(re.fullmatch("#(matrix|c[0-9a-f]{12})", link) for link in hostile.links)


@pytest.mark.parametrize("name", HOSTILE)
def test_markdown_has_no_element_that_it_has_not_with_a_plain_word(name):
    def marks(text: str) -> tuple[int, int, list[str]]:
        said = re.sub(r"(?ms)^(`{3,})sh\n.*?^\1$", "", github.summary(*told(text)))  # a fence, whose end isn't in it
        return said.count("\n#"), said.count("\n|"), re.findall(r"<(?!br>|/?code>)|\]\(|https?:", said)

    headings, rows, more = marks(HOSTILE[name])
    assert (headings, rows) <= marks("word")[:2] and more == []


@pytest.mark.parametrize("name", HOSTILE)
def test_an_annotation_is_one_command_of_ours(name):
    for line in github.annotate(*told(HOSTILE[name])):
        found = re.fullmatch(r"::error (?:file=[^:,]*,line=3,)?title=[^:,]*::(.*)", line)
        assert found and line.isprintable()
        assert not re.search("%(?!25|0A|0D|3A|2C)", line)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_badge_is_one_short_line(name):
    said = json.loads(json.dumps(badge.badge(told(HOSTILE[name])[0])))
    assert said["message"].isprintable() and len(said["message"]) <= 80 and said["color"] == "lightgrey"  # incomplete


@pytest.mark.parametrize("name", ["markup", "property", "template", "table and fence"])
def test_a_table_says_the_text_as_it_stands(name):
    assert plain.one_line(HOSTILE[name]) in table(HOSTILE[name], width=2000)


def test_junit_says_the_text_and_stays_well_formed(tmp_path, python):
    """pytest writes it, from what the plugin hands over."""
    (tmp_path / "test_it.py").write_text(
        "import json, pytest\n"
        f"TEXTS = json.loads({json.dumps(json.dumps(HOSTILE))})\n"
        "@pytest.mark.parametrize('name', TEXTS, ids=list(TEXTS.values()))\n"
        "def test_it(name, record_property, capsys):\n"
        "    record_property('unfix.reason', TEXTS[name])\n"
        "    record_property('unfix.' + name, 'x')\n"
        "    pytest.fail(TEXTS[name].encode('utf-8', 'replace').decode()[:500], pytrace=False)\n"
    )
    out = tmp_path / "junit.xml"
    ended = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml", str(out), "test_it.py", cwd=tmp_path)
    assert ended.returncode == 1, ended.stderr
    tree = ElementTree.parse(out)
    assert len(tree.findall(".//testcase")) == len(HOSTILE) == len(tree.findall(".//failure"))
    values = [found.get("value") for found in tree.findall(".//property[@name='unfix.reason']")]
    assert len(values) == len(HOSTILE) and HOSTILE["script"] in values
    assert "\x1b" not in out.read_text() and "\x00" not in out.read_text()


def test_what_can_be_seen_stays_as_it_is():
    assert plain.visible("a\tb\nc é → 日本 🙂 [x] <b> & %") == "a\tb\nc é → 日本 🙂 [x] <b> & %"
    assert plain.hidden("a\tb\nc é → 日本 🙂") == "" and plain.hidden("a\x1bb") == "\x1b"


def test_a_record_of_this_table_is_one():
    assert {report.record_fault(record(text)) for text in HOSTILE.values()} == {""}
    assert Path(html_report.__file__).with_name("report.html.j2").read_text().count("|safe") == 1  # a constant
