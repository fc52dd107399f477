"""The workflows: the real bash runs their scripts, with stand-ins for the commands, and each command line that a
stand-in hears is one that the real program takes. So are those of docs/nightly.md."""

from __future__ import annotations

import os
import re
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from harness import history, report
from harness.cli import app

ROOT = Path(__file__).parents[1]
Step = dict[str, Any]


def load(path: str) -> dict[str, Any]:
    """All scalars as they are written: YAML's own types would make True of the key `on`."""
    return yaml.load((ROOT / path).read_text(), yaml.BaseLoader)


FILES = ("nightly", "pull-request", "weekly")
WORKFLOWS = {file: load(f".github/workflows/{file}.yml") for file in FILES}
NIGHTLY = WORKFLOWS["nightly"]["jobs"]
JOBS = {f"{file}:{name}": job for file in FILES for name, job in WORKFLOWS[file]["jobs"].items()}
SETUP = load(".github/actions/setup/action.yml")["runs"]["steps"]
STEPS = [(name, step) for name, job in JOBS.items() for step in job["steps"]] + [("setup", step) for step in SETUP]


def script(steps: list[Step], holds: str) -> str:
    """The one that has these words in its name or its text."""
    [found] = [step["run"] for step in steps if "run" in step and holds in step.get("name", "") + step["run"]]
    return found


def combinations(job: dict[str, Any]) -> Iterator[dict[str, str]]:
    """What `${{ … }}` stands for in a job, for each of those that its matrix makes of it."""
    matrix = dict(job.get("strategy", {}).get("matrix", {}))
    rows = matrix.pop("include", [])
    assert len(matrix) + bool(rows) <= 1, "a product of two lists is more than this test reads"
    rows = rows or [{name: value} for name, values in matrix.items() for value in values] or [{}]
    for row in rows:
        yield {**{f"matrix.{name}": value for name, value in row.items()}, "strategy.job-total": str(len(rows))}


def filled(text: str, known: dict[str, str]) -> str:
    """What is not known is empty, as GitHub has it."""
    return re.sub(r"\$\{\{ *(.*?) *\}\}", lambda found: known.get(found[1], ""), text)


STAND_IN = """#!/bin/bash
printf '%s\\x1f' "${0##*/}" "$@" >> "$CALLS"; echo >> "$CALLS"
[ ! -e "$ANSWERS/${0##*/}" ] || . "$ANSWERS/${0##*/}"
"""


class Bash:
    """Runs scripts in a folder of its own, and hears what they call."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls, self.answers = folder / "checkout", folder / "calls", folder / "answers"
        for made in (self.folder, self.answers, folder / "bin"):
            made.mkdir()
        for name in ("unfix", "make", "gh", "docker"):
            (folder / "bin" / name).write_text(STAND_IN)
            (folder / "bin" / name).chmod(stat.S_IRWXU)
        names = ("GITHUB_ENV", "GITHUB_PATH", "GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY", "HOME", "LOG")
        self.env = {name: str(folder / name) for name in names} | {
            "PATH": f"{folder}/bin:{os.environ['PATH']}", "GITHUB_RUN_ID": "7",
            "CALLS": str(self.calls), "ANSWERS": str(self.answers),
        }  # fmt: skip

    def answer(self, command: str, text: str) -> None:
        """What a stand-in does beside hearing."""
        (self.answers / command).write_text(text)

    def run(self, text: str, **env: str) -> int:
        """The exit code, as a step with `shell: bash` has it."""
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", text]
        return subprocess.run(command, cwd=self.folder, env={**self.env, **env}, check=False).returncode

    def heard(self, command: str) -> list[list[str]]:
        lines = self.calls.read_text().splitlines() if self.calls.exists() else []
        return [words[1:] for line in lines if (words := line.split("\x1f")[:-1])[0] == command]

    def check(self) -> int:
        """How many command lines were heard. Fails where one is none of ours."""
        for words in self.heard("unfix"):
            command: Any = typer.main.get_command(app)
            while hasattr(command, "commands"):
                name, *words = words
                assert name in command.commands, f"unfix has no {name}"
                command = command.commands[name]
            command.make_context(command.name, list(words))  # parses, runs nothing
        for words in self.heard("make"):
            subprocess.run(["make", "-n", *words], cwd=ROOT, check=True, capture_output=True)
        return len(self.heard("unfix") + self.heard("make"))


@pytest.fixture
def bash(tmp_path: Path) -> Bash:
    return Bash(tmp_path)


@pytest.mark.parametrize("name", sorted(set(JOBS) - {"nightly:start"}))
def test_every_command_line_exists(bash, name):
    for known in combinations(JOBS[name]):
        for step in JOBS[name]["steps"]:
            if "run" in step:
                bash.run(step["run"], **{key: filled(value, known) for key, value in step.get("env", {}).items()})
    assert bash.check()


def test_every_command_line_of_the_page_exists(bash):
    page = (ROOT / "docs/nightly.md").read_text()
    assert bash.run("\n".join(line.strip() for line in page.splitlines() if line.startswith("    "))) == 0
    assert bash.check() == 7 and len(bash.heard("docker")) == 2


def test_the_setup(bash):
    text = script(SETUP, "make")
    assert bash.run(text, PART="eagle_kv-2", RUNNER_ENVIRONMENT="self-hosted") == 0
    assert bash.run(text, PART="eagle_kv-2", RUNNER_ENVIRONMENT="self-hosted", VENV="/opt/unfix") == 0
    mine = f"{bash.folder}/.venv"
    assert bash.heard("make") == [[f"VENV={mine}", f"{mine}/ready"], ["VENV=/opt/unfix", "/opt/unfix/ready"]]
    assert bash.check() == 2
    assert Path(bash.env["GITHUB_PATH"]).read_text().split() == [f"{mine}/bin", "/opt/unfix/bin"]
    [told] = set(Path(bash.env["GITHUB_ENV"]).read_text().split())
    assert told == f"LOG={bash.env['HOME']}/.cache/unfix/logs/7/eagle_kv-2.jsonl"
    cache = Path(bash.env["HOME"], ".cache/unfix")
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700  # unfix refuses a cache that others may write to
    assert (cache / "logs/7").is_dir() and (bash.folder / "out").is_dir()


def test_the_shards_are_whole_and_the_night_joins_every_part_once(bash):
    uploaded: dict[str, str] = {}  # artifact -> the shard that its job ran
    for job in (NIGHTLY["eagle_kv"], NIGHTLY["sglang"]):
        [name] = [step["with"]["name"] for step in job["steps"] if "upload" in step.get("uses", "")]
        [step] = [step for step in job["steps"] if "unfix run" in step.get("run", "")]
        for known in combinations(job):
            bash.run(step["run"], **{key: filled(value, known) for key, value in step["env"].items()})
            words = bash.heard("unfix")[-1]
            uploaded[filled(name, known)] = words[words.index("--shard") + 1]
    joined: dict[str, list[str]] = {}
    for artifact, shard in uploaded.items():
        base, _, index = artifact.removeprefix("part-").rpartition("-")
        assert index == shard.partition("/")[0]
        joined.setdefault(base, []).append(shard)
        (bash.folder / "parts" / artifact).mkdir(parents=True)
        (bash.folder / "parts" / artifact / "run.jsonl").touch()
    assert len(joined["eagle_kv"]) == 4
    for shards in joined.values():
        assert shards == [f"{index}/{len(shards)}" for index in range(1, len(shards) + 1)]
    bash.run(script(NIGHTLY["report"]["steps"], "The night"))
    merged = {Path(words[-1]).stem: words[1:-2] for words in bash.heard("unfix") if words[0] == "merge"}
    assert merged == {
        base: [f"parts/part-{base}-{index}/run.jsonl" for index in range(1, len(shards) + 1)]
        for base, shards in joined.items()
    }


def test_a_night_that_lost_parts_has_a_page_and_is_not_green(bash):
    bash.answer("unfix", 'case "$*" in merge*eagle_kv*) echo {} > "${@: -1}";; merge*) exit 2;; report*) exit 4;; esac')
    assert bash.run(script(NIGHTLY["report"]["steps"], "The night")) == 4
    [words] = [words for words in bash.heard("unfix") if words[0] == "report"]
    files = [bash.folder / word for word in words if re.match("nights/.*[.]json$", word)]
    assert [file.stem for file in files] == ["eagle_kv", "sglang-0.5.13", "sglang-0.5.23", "sglang-main"]
    for document, file in zip(history.read_night(files[1:]).documents, files[1:], strict=True):
        assert document["incomplete"] == [f"no part of {file.stem} could be read: its jobs say why"]
        assert report.exit_code([], incomplete=document["incomplete"]) == 4


@pytest.mark.parametrize("code", [0, 1, 3])
def test_the_night_ends_as_its_report_does_and_thirty_are_kept(bash, code):
    for day in range(10, 50):
        (bash.folder / f"nights/1999-01-{day}").mkdir(parents=True)
    bash.answer("unfix", f'case "$1" in merge) exit {3 - code};; report) exit {code};; esac')
    assert bash.run(script(NIGHTLY["report"]["steps"], "The night")) == code
    kept = sorted(path.name for path in (bash.folder / "nights").iterdir())
    assert kept[:-1] == [f"1999-01-{day}" for day in range(21, 50)] and kept[-1].startswith("20")


EARLIER = script(NIGHTLY["start"]["steps"], "earlier nights")


@pytest.mark.parametrize(
    ("runs", "kept", "get", "code", "taken"),
    [
        ("echo 30; echo 29; echo 28", "*/30/*) echo 0;; *) echo 1", "cd earlier && echo {} > night.json", 0, ["29"]),
        ("echo 30; echo 29", "*) echo 0", "exit 1", 0, []),  # none kept any
        ("true", "*) exit 1", "exit 1", 0, []),  # the first night
        # GitHub does not say: a night without history is none
        ("exit 1", "*) echo 1", "exit 1", 1, []),
        ("echo 30", "*) exit 1", "exit 1", 1, []),
        ("echo 30; echo 29", "*) echo 1", "exit 1", 1, ["30"]),
    ],
)
def test_the_earlier_nights(bash, runs, kept, get, code, taken):
    get = f"run\\ download*) mkdir earlier && {get}"
    bash.answer("gh", f'case "$*" in run\\ list*) {runs};; {get};; api*) case "$2" in {kept};; esac;; esac')
    assert bash.run(EARLIER, GH_REPO="me/unfix") == code
    assert [words[2] for words in bash.heard("gh") if words[:2] == ["run", "download"]] == taken
    if code == 0:
        here = sorted(path.name for path in (bash.folder / "nights").iterdir())
        assert here == ["README", "night.json"][: 1 + len(taken)]  # never empty: an artifact can't be


def test_what_is_kept_of_the_nights_is_what_the_next_one_looks_for():
    [step] = [step for step in NIGHTLY["report"]["steps"] if step.get("with", {}).get("name") == "nights"]
    assert "github.event_name == 'schedule'" in step["if"] and "--event schedule" in EARLIER
    assert "needs.start.result == 'success'" in step["if"]  # else the history would begin anew
    assert "--name nights" in EARLIER and "?name=nights" in EARLIER and "--workflow nightly.yml" in EARLIER


def test_the_report_waits_for_all_and_always_runs():
    assert set(NIGHTLY["report"]["needs"]) == set(NIGHTLY) - {"report"}
    assert NIGHTLY["report"]["if"] == "${{ always() }}"


def test_the_releases_are_the_same_everywhere(bash):
    releases = {known["matrix.release"] for known in combinations(NIGHTLY["sglang"])}
    bash.run(script(NIGHTLY["check"]["steps"], "Our reversals in SGLang"))
    bash.run(script(NIGHTLY["report"]["steps"], "upstream install"))
    [checked, fetched] = bash.heard("unfix")
    assert set(fetched[2:]) == releases == set(checked[checked.index("--release") + 1 : checked.index("--source")])


def test_when():
    assert WORKFLOWS["nightly"]["on"] == {"schedule": [{"cron": "0 3 * * *"}], "workflow_dispatch": ""}
    assert set(WORKFLOWS["weekly"]["on"]) == {"schedule", "workflow_dispatch"}
    assert WORKFLOWS["nightly"]["concurrency"] == {"group": "nightly", "cancel-in-progress": "false"}
    assert {job["strategy"]["fail-fast"] for job in JOBS.values() if "strategy" in job} == {"false"}


def test_the_oldest_python_that_is_promised_is_tried():
    tried = WORKFLOWS["pull-request"]["jobs"]["test"]["strategy"]["matrix"]["include"]
    assert [each["python"] for each in tried if each["constraints"] == "constraints-lowest.txt"] == [tried[0]["python"]]
    assert f'requires-python = ">={tried[0]["python"]}"' in (ROOT / "pyproject.toml").read_text()


def test_code_of_strangers_runs_on_no_runner_of_ours():
    assert {job["runs-on"] for job in WORKFLOWS["pull-request"]["jobs"].values()} == {"ubuntu-latest"}
    assert [file for file in FILES if "pull_request" in WORKFLOWS[file]["on"]] == ["pull-request"]
    assert [file for file in FILES if "pull_request_target" in WORKFLOWS[file]["on"]] == []


@pytest.mark.parametrize("file", FILES)
def test_a_workflow_may_read_and_no_more(file):
    assert WORKFLOWS[file]["permissions"] == {"contents": "read"}
    given = [job["permissions"] for job in WORKFLOWS[file]["jobs"].values() if "permissions" in job]
    assert all(set(each.values()) == {"read"} for each in given)
    assert "secrets." not in str(WORKFLOWS[file])


@pytest.mark.parametrize("name", JOBS)
def test_a_job_has_an_end(name):
    assert 0 < int(JOBS[name]["timeout-minutes"]) <= 360


@pytest.mark.parametrize(("where", "step"), STEPS)
def test_a_step(where, step):
    assert "${{" not in step.get("run", ""), "text from outside could become a script: hand it over in env"
    uses = step.get("uses", "./.github/actions/setup")
    assert re.fullmatch(r"actions/[a-z-]+@v[0-9]+", uses) or (ROOT / uses / "action.yml").is_file()
    if "checkout@" in uses:
        assert step["with"]["persist-credentials"] == "false"
    if "upload-artifact@" in uses and where != "nightly:start":
        assert "always()" in step["if"]


@pytest.mark.parametrize("file", ["pull-request", "weekly"])
def test_the_sources_and_what_is_installed_are_audited(file):
    assert [step["run"] for step in WORKFLOWS[file]["jobs"]["audit"]["steps"] if "run" in step] == ["make audit"]
    said = subprocess.run(["make", "-n", "audit"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert "bandit --quiet --configfile pyproject.toml" in said and "pip-audit" in said
