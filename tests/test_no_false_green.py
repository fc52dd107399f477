"""Nothing that did not run, and nothing that went wrong, can read as proved: on the way from legs to an exit code.

pytest is real here, and so are the plan, the judging, the log and the reports; only the legs are acted.
Elsewhere: each verdict from made-up legs (test_verdict.py) and from real ones (test_prover.py); tests that never call
``prove``, skipped cases, an empty run (test_plugin.py); a pytest that is killed (test_run_cli.py); a worker that dies
(test_runlog.py); headlines, badges and colours (test_digest.py); GPUs that don't answer (test_device.py).
"""

from __future__ import annotations

import json

import pytest

from harness import report, runlog
from harness.badge import badge
from harness.digest import Digest
from harness.errors import UsageError
from harness.history import Night
from harness.verdict import VERDICTS

FIX = "27486:draft-tokens-assert"  # six cases; two of them can't tell
CONFTEST = '''
import os
import pytest
from harness import plugin
from harness.ending import Ending
from harness.errors import InfraError

ACT = os.environ.get("ACT", "")
SHAPE = {"type": "RuntimeError", "message": "shape"}

class Legs:
    """As declared, but for one case."""

    def run(self, tree, request):
        if request.entry == "harness.leg:environment":
            return self.ending(request, facts={"usable": ACT != "no device", "torch": "2"})
        steps, drafts = request.params["num_steps"], request.params["num_draft_tokens"]
        if drafts == steps + 1:
            return self.ending(request)
        message = f"speculative_num_draft_tokens={drafts} must equal speculative_num_steps + 1 = {steps + 1}"
        guarded, off = {"type": "AssertionError", "message": message}, tree is not None
        if drafts == 8 and ACT == "lost":
            raise InfraError("the fork server was lost")
        if drafts == 8 and ACT == "let through" and not off:
            return self.ending(request)
        if drafts == 8 and ACT == "no difference":
            return self.ending(request, raised=guarded)
        if drafts == 8 and ACT == "crash" and off:
            return self.ending(request, signal="SIGSEGV")
        return self.ending(request, raised=SHAPE if off else guarded)

    def ending(self, request, raised=None, signal=None, facts=None):
        report = {"raised": raised, "wrong": None, "hits": [], "facts": facts or {}}
        reached = () if ACT == "unreached" else tuple(target.name for target in request.targets)
        return Ending(None if signal else report, reached, "", "", None if signal else 0, signal, False, 0.1)

    def settle(self): pass
    def forsake(self): pass
    def close(self): pass

def pytest_configure(config):
    config.stash[plugin.servers] = Legs()
'''


@pytest.fixture
def project(checkout):
    """A checkout with acted legs, and two of the regressions."""
    for file in (checkout / "regressions").glob("test_*.py"):
        if file.name not in ("test_27486.py", "test_27460.py"):
            file.unlink()
    (checkout / "regressions" / "conftest.py").write_text(CONFTEST)
    return checkout


@pytest.fixture
def told(project, python, tmp_path):
    """``told(*options, **environment)``: pytest's status, the digest of its log (None: no log), its words."""

    def run(*options, **environment):
        log = tmp_path / "run.jsonl"
        command = ("-m", "pytest", "regressions", "-q", "-n", "0", "-p", "no:cacheprovider")
        mine = ("--unfix-device", "cpu", "--unfix-select", FIX, "--unfix-log", str(log))
        ended = python(*command, *mine, *options, cwd=project, **environment)
        try:
            digest = Digest(Night("n", (runlog.document(log),)))
        except UsageError:
            digest = None
        return ended.returncode, digest, ended.stdout + ended.stderr

    return run


# what the legs of one case do, an edit of the checkout -> pytest's status, the exit code of a run, the badge's colour
REACHED = {
    "proved": ("", None, 0, 0, "green"),
    "regressed": ("let through", None, 1, 1, "red"),
    "vacuous": ("no difference", None, 1, 1, "red"),
    "unexpected": ("crash", None, 1, 1, "red"),
    "not-reached": ("unreached", None, 1, 1, "red"),
    "infra": ("lost", None, 1, 4, "lightgrey"),
    "rotted": (
        "",
        ("kernels/eagle_kv/multi_layer_eagle.py", "check_num_draft_tokens(num_steps, n", "check_num_draft_tokens(2, n"),
        *(1, 3, "orange"),
    ),
    "skipped": (
        "",
        ("regressions/scenarios/multi_layer.py", 'detector="none"', 'needs_cuda=True, detector="none"'),
        *(4, 4, "lightgrey"),
    ),
}  # fmt: skip


def test_every_verdict_has_a_row():
    assert set(REACHED) == set(VERDICTS)


@pytest.mark.parametrize("verdict", REACHED)
def test_each_verdict_reaches_the_exit_code_and_the_badge(told, project, verdict):
    act, edit, status, code, colour = REACHED[verdict]
    if edit:
        file, old, new = project / edit[0], *edit[1:]
        assert file.read_text().count(old) == 1
        file.write_text(file.read_text().replace(old, new))
    ended, digest, said = told(ACT=act)
    assert ended == status, said
    row = next(row for row in digest.rows if "draft8" in row["case"])
    assert row["verdict"] == verdict
    assert (digest.exit_code, badge(digest)["color"]) == (code, colour)
    assert (digest.state == "well") == (verdict == "proved")


ONE = "draft8"  # of one case's name
NAME = "test_a_mismatched_config_fails_at_start[multi_layer-steps3-draft8-seqs2]"
LEFT_OUT = "deselected by -k, -m, --deselect or another plugin: 1 of 6 cases"
IGNORED = "not collected, by --ignore or a conftest: 1 of 2 test files"
MISSING = "the run was cut short: 1 of 6 cases did not run, or are not in its log"
MISSING5 = MISSING.replace("1 of", "5 of")  # it is the second of them
ALL_MISSING = "the run was cut short: 6 of 6 cases did not run, or are not in its log"
MARK = "def pytest_collection_modifyitems(items):\n    [i.add_marker({}) for i in items if 'draft8' in i.nodeid]\n"
DROP = "def pytest_collection_modifyitems(items):\n    items[:] = [i for i in items if 'draft8' not in i.nodeid]\n"
FIXTURE = """
@pytest.fixture(autouse=True)
def another(request):
    odd = "draft8" in request.node.nodeid
    if odd: {}
    yield
    if odd: {}
"""
# options, environment, what a conftest does more -> pytest's status, the first of what is missing (None: no log at all)
HOSTILE = {
    "-k": (("-k", f"not {ONE}"), {}, "", 0, LEFT_OUT),
    "-k, in a worker": (("-n", "1", "-k", f"not {ONE}"), {}, "", 0, LEFT_OUT),
    "-m": (("-m", "not cases"), {}, "", 5, LEFT_OUT.replace("1 of", "6 of")),
    "--deselect": (("--deselect", f"regressions/test_27486.py::{NAME}"), {}, "", 0, LEFT_OUT),
    "--ignore": (("--ignore", "regressions/test_27460.py"), {}, "", 0, IGNORED),
    "a conftest that ignores a file": ((), {}, "collect_ignore = ['test_27460.py']", 0, IGNORED),
    "a conftest that drops items": ((), {}, DROP, 0, LEFT_OUT),
    "a skip mark": ((), {}, MARK.format("pytest.mark.skip"), 4, MISSING),
    "an xfail mark that does not run": ((), {}, MARK.format("pytest.mark.xfail(run=False)"), 4, MISSING),
    "an xfail mark on what is proved": ((), {}, MARK.format("pytest.mark.xfail"), 1, "pytest ended with 1"),
    "a fixture that fails": ((), {}, FIXTURE.format("raise OSError", "pass"), 1, MISSING),
    "a fixture that fails afterwards": ((), {}, FIXTURE.format("pass", "raise OSError"), 1, "pytest ended with 1"),
    "a fixture that skips": ((), {}, FIXTURE.format("pytest.skip('not today')", "pass"), 4, MISSING),
    "a prove that runs no leg": ((), {}, "@pytest.fixture\ndef prove(): return lambda case: None", 1, ALL_MISSING),
    "pytest.exit": ((), {}, FIXTURE.format("pytest.exit('enough', returncode=0)", "pass"), 4, MISSING5),
    "an exit in the middle": ((), {}, FIXTURE.format("os._exit(0)", "pass"), 0, MISSING5),
    "--setup-only": (("--setup-only",), {}, "", 0, ALL_MISSING),
    "--collect-only": (("--collect-only",), {}, "", 0, ALL_MISSING),
    "--help": ((), {"PYTEST_ADDOPTS": "--help"}, "", 0, None),
    "a plugin that is switched off": (("-p", "no:harness.plugin"), {}, "", 4, None),
    "no plugins, and so no xdist": ((), {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}, "", 4, None),
    "a plugin that isn't there": ((), {"PYTEST_PLUGINS": "no_such_plugin"}, "", 4, None),
    "a conftest that does not import": ((), {}, "raise ImportError('broken')", 4, None),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_what_did_not_run_is_never_green(told, project, name):
    options, environment, more, status, missing = HOSTILE[name]
    conftest = project / "regressions" / "conftest.py"
    conftest.write_text(f"{CONFTEST}\n{more}")
    ended, digest, said = told(*options, **environment)
    assert ended == status, said
    if missing is None:
        assert digest is None
        return
    assert digest.incomplete[0].startswith(missing)
    assert digest.exit_code == 4 and digest.state == "infra" and badge(digest)["color"] == "lightgrey"


def test_an_xfail_mark_hides_no_finding(told, project):
    conftest = project / "regressions" / "conftest.py"
    conftest.write_text(CONFTEST + MARK.format("pytest.mark.xfail"))
    ended, digest, said = told(ACT="no difference")
    assert ended == 1 and digest.exit_code == 1 and digest.state == "finding", said


def test_a_plugin_that_does_not_import_runs_nothing(told, project):
    (project / "harness" / "plugin.py").write_text("raise ImportError('broken')\n")
    ended, digest, said = told()
    assert ended != 0 and digest is None and "broken" in said


def test_a_file_that_does_not_import_is_no_smaller_run(told, project):
    (project / "regressions" / "test_broken.py").write_text("import no_such_module\n")
    ended, digest, said = told()
    assert ended == 2 and "no_such_module" in said
    assert digest is None or digest.exit_code == 4


@pytest.mark.parametrize(
    ("options", "environment", "more", "said"),
    [
        ((), {"PYTEST_ADDOPTS": f"-k 'not {ONE}'"}, "", LEFT_OUT),
        ((), {"PYTEST_ADDOPTS": "--help"}, "", "pytest ended with 0 before it ran a case"),
        ((), {}, FIXTURE.format("pass", "raise OSError"), "pytest ended with 1, for a reason that no verdict holds"),
    ],
)
def test_a_run_says_so_too_and_reads_no_old_log(unfix, project, tmp_path, options, environment, more, said):
    log, mark, matrix = tmp_path / "run.jsonl", tmp_path / "badge.json", tmp_path / "matrix.json"
    command = (
        "run",
        FIX,
        "--device",
        "cpu",
        "-n",
        "0",
        "--jsonl",
        str(log),
        "--badge",
        str(mark),
        "--json",
        str(matrix),
    )
    ended = unfix(*command, cwd=project)
    assert ended.returncode == 0 and json.loads(mark.read_text())["color"] == "green", ended.stderr
    for file in (mark, matrix):
        file.unlink()
    (project / "regressions" / "conftest.py").write_text(f"{CONFTEST}\n{more}")
    ended = unfix(*command, *options, cwd=project, **environment)
    assert ended.returncode == 4 and said in ended.stdout + ended.stderr
    assert not mark.exists() or json.loads(mark.read_text())["color"] == "lightgrey"
    if matrix.exists():
        document = json.loads(matrix.read_text())
        assert said in document["incomplete"] and report.exit_code(document["results"], incomplete=[said]) == 4


def test_a_device_that_was_asked_for_and_is_not_there_is_infra_and_no_skip(unfix, told):
    ended = unfix("run", FIX, "--device", "cuda", CUDA_VISIBLE_DEVICES="")
    assert ended.returncode == 4 and "--device cuda was asked for, but" in ended.stderr and not ended.stdout
    # NVML shows one, and torch can't use it
    ended, digest, said = told(ACT="no device")
    assert ended == 1 and {row["verdict"] for row in digest.rows} == {"infra"}, said
    assert digest.exit_code == 4 and "torch 2 sees no such device" in digest.rows[0]["reason"]
