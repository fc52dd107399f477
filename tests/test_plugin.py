"""The pytest plugin, on the project's own regressions: few cases, real legs."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

SHAPES = "cuda_graph_row and steps2-page1-bs1-ctx8-lens3"  # with topk 2, which tells, and with topk 1, which cannot
DEVICE = ("--unfix-device", "cpu")


@pytest.fixture
def regressions(python, tmp_path):
    """``regressions(*arguments, **environment)``: pytest over the regressions, and the matrix that it wrote."""

    def run(*arguments, **options):
        matrix = tmp_path / "new" / "matrix.json"
        matrix.unlink(missing_ok=True)
        command = ("-m", "pytest", "regressions", "-p", "no:cacheprovider", *DEVICE, "--unfix-json", str(matrix))
        ended = python(*command, *arguments, **options)
        return ended, json.loads(matrix.read_text()) if matrix.exists() else None

    return run


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_session_s_revert_fails_what_depends_on_it_and_nothing_else(regressions, workers):
    ended, matrix = regressions("-n", workers, "-k", SHAPES, SGLANG_DEBUG_REVERT_PR="27460")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    active = "REVERT ACTIVE in every leg (SGLANG_DEBUG_REVERT_PR): 27460:topk-factor, 27460:capacity-assert"
    assert active in ended.stdout
    assert [row["fix"] for row in matrix["results"]] == ["27338:topk-factor"] * 2 + ["27460:topk-factor"] * 2
    for row in matrix["results"]:
        dependent = row["fix"] == "27460:topk-factor" and row["tells"]
        assert row["verdict"] == ("regressed" if dependent else "proved")
    for row in matrix["results"]:
        assert row["legs"][0]["reverted"] == ["27460:topk-factor", "27460:capacity-assert"]
        if row["verdict"] != "proved":
            assert "with 27460:topk-factor and 27460:capacity-assert out" in row["reason"]
            assert row["reason"] in ended.stdout
    assert matrix["session_reverted"] == ["27460:topk-factor", "27460:capacity-assert"]
    assert matrix["environment"]["target"] == "eagle_kv" and matrix["environment"]["torch"]
    assert matrix["fixes"]["27460:topk-factor"] == {"proved": 0, "cannot_tell": 1, "skipped": 0, "findings": 1}
    assert "1 failed, 3 passed" in ended.stdout


def test_without_a_revert_the_header_is_quiet_and_an_input_that_cannot_tell_passes(regressions):
    ended, matrix = regressions("-k", "27338 and cuda_graph_row and topk1-steps2", SGLANG_DEBUG_REVERT_PR="0")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "unfix: target eagle_kv on cpu" in ended.stdout and "REVERT" not in ended.stdout
    [row] = matrix["results"]
    assert (row["verdict"], row["tells"]) == ("proved", False)
    assert matrix["session_reverted"] == []


@pytest.mark.parametrize("value", ["nonsense", "27339", "27338:topk", "0,27338", "27338,,27460"])
def test_a_selection_that_means_nothing_is_one_line(regressions, value):
    ended, matrix = regressions("-k", "nothing", SGLANG_DEBUG_REVERT_PR=value)
    assert ended.returncode == 4 and matrix is None
    lines = [line for line in ended.stderr.splitlines() if line.strip()]
    assert len(lines) == 1 and lines[0].startswith("ERROR: unfix: SGLANG_DEBUG_REVERT_PR: "), ended.stderr
    assert "Traceback" not in ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (("--unfix-select", "nonsense"), "--unfix-select: unknown fix 'nonsense'"),
        (("--unfix-device", "cuda"), "--device cuda was asked for"),
    ],
)
def test_an_option_that_cannot_be_met_is_one_line(regressions, options, part):
    if options[1] == "cuda":
        from harness.device import compute_capabilities

        if compute_capabilities():
            pytest.skip("there is a GPU here")
    ended, matrix = regressions(*options)
    assert ended.returncode == 4
    assert part in ended.stdout + ended.stderr and "Traceback" not in ended.stdout + ended.stderr


def test_the_selection_keeps_the_tests_of_its_fixes(regressions):
    ended, _ = regressions("--collect-only", "-q", "--unfix-select", "27486:draft-tokens-assert")
    names = [line for line in ended.stdout.splitlines() if "::" in line]
    assert ended.returncode == 0 and len(names) == 6
    assert all("test_a_mismatched_config_fails_at_start" in name for name in names)


ELSEWHERE = "26329:prompt-tail"  # has no reversal in eagle_kv


def test_fixes_that_the_target_cannot_undo_are_left_out(regressions):
    ended, _ = regressions("--collect-only", "-q", "regressions/test_26329.py", "regressions/test_26340.py")
    names = [line for line in ended.stdout.splitlines() if "::" in line]
    assert ended.returncode == 0 and names and not [name for name in names if "26329" in name]
    ended, matrix = regressions("-k", "draft_tokens_survive and topk1 or test_26329")
    assert ended.returncode == 0 and "can't be undone in eagle_kv: " in ended.stdout and ELSEWHERE in ended.stdout
    assert [row["fix"] for row in matrix["results"]] == ["27338:topk-factor"] and "skipped" not in ended.stdout


def test_a_fix_that_is_named_is_skipped_with_its_reason(regressions):
    ended, matrix = regressions("--unfix-select", ELSEWHERE, "-k", "chunk0to3-prompts6")
    assert ended.returncode == 4 and "1 skipped" in ended.stdout and "left out" not in ended.stdout
    [row] = matrix["results"]
    assert row["verdict"] == "skipped" and row["reason"].startswith(f"{ELSEWHERE} can't be undone in eagle_kv")


def test_a_session_s_revert_that_the_target_cannot_make_is_said(regressions):
    only = ("-k", "draft_tokens_survive and topk1")
    ended, matrix = regressions(*only, SGLANG_DEBUG_REVERT_PR="26329")
    assert ended.returncode == 0 and "REVERT ACTIVE" not in ended.stdout and matrix["session_reverted"] == []
    assert f"SGLANG_DEBUG_REVERT_PR: left out, since they can't be undone in eagle_kv: {ELSEWHERE}" in ended.stdout
    ended, matrix = regressions(*only, SGLANG_DEBUG_REVERT_PR="all")
    assert "27338:topk-factor" in matrix["session_reverted"] and ELSEWHERE not in matrix["session_reverted"]
    assert [row["verdict"] for row in matrix["results"]] == ["proved"]  # topk 1: the same with everything out


TESTS = {
    "unknown fix": ('@pytest.mark.fix("27338:nope")\ndef test_x(prove): pass', 2, "no fix '27338:nope' is registered"),
    "no fix": ("def test_x(prove): pass", 1, "needs @pytest.mark.fix"),
    "no argument": ("@pytest.mark.fix()\ndef test_x(prove): pass", 2, "fix"),
    "never proves": ('@pytest.mark.fix("27338:topk-factor")\ndef test_x(prove): pass', 1, "never called prove"),
    "no prove": ('@pytest.mark.fix("27338:topk-factor")\ndef test_x(): pass', 2, "needs the fixture prove"),
    "no cases": (
        '@pytest.mark.fix("27338:topk-factor")\n@pytest.mark.cases(of=lambda d: [])\ndef test_x(prove, case): pass',
        *(2, "there is no case in its table"),
    ),
    "table without a column": (
        '@pytest.mark.fix("27338:topk-factor")\n@pytest.mark.cases(of=lambda d: [])\ndef test_x(prove): pass',
        *(2, "takes case"),
    ),
}


@pytest.mark.parametrize("name", TESTS)
def test_a_test_that_names_no_known_fix_is_refused(name, python, tmp_path, root):
    text, code, part = TESTS[name]
    test = tmp_path / "test_own_one.py"
    test.write_text(f"import pytest\n\n\n{text}\n")
    options = ("-p", "no:cacheprovider", "-c", str(root / "pyproject.toml"), "--rootdir", str(root), *DEVICE)
    ended = python("-m", "pytest", "-p", "harness.plugin", *options, str(test))
    said = ended.stdout + ended.stderr
    assert ended.returncode == code, said
    assert part in said and "INTERNALERROR" not in said


def test_a_skipped_case_is_no_pass(regressions):
    ended, matrix = regressions("-k", "bs32-ctx131072")
    assert ended.returncode == 4 and "1 skipped" in ended.stdout and "nothing is proved" in ended.stdout
    [row] = matrix["results"]
    assert row["verdict"] == "skipped" and matrix["fixes"]["27486:int32-guard"]["proved"] == 0
    from harness.report import exit_code

    assert exit_code(matrix["results"]) == 4


def test_a_run_of_nothing_writes_an_empty_matrix(regressions):
    ended, matrix = regressions("-k", "no_such_test")
    assert ended.returncode == 5 and matrix["results"] == []


def test_a_matrix_that_cannot_be_written_is_said(python, tmp_path):
    (tmp_path / "file").write_text("")
    where = tmp_path / "file" / "m.json"
    command = ("-m", "pytest", "regressions", "-p", "no:cacheprovider", *DEVICE, "-k", "nothing")
    ended = python(*command, "--unfix-json", str(where))
    said = ended.stdout + ended.stderr
    assert ended.returncode not in (0, 5), said
    assert "could not be written" in said and "Traceback" not in said


def test_junit_says_the_verdict_as_properties(regressions, tmp_path):
    xml = tmp_path / "junit.xml"
    regressions("-n", "2", "-k", SHAPES, "--junitxml", str(xml), SGLANG_DEBUG_REVERT_PR="27460")
    cases = {case.get("name"): case for case in ElementTree.parse(xml).iter("testcase")}
    [name] = [name for name in cases if "topk2" in name and "27460" in cases[name].get("classname")]
    said = {each.get("name"): each.get("value") for each in cases[name].iter("property")}
    reason = said.pop("unfix.reason")
    assert said == {
        "unfix.fix": "27460:topk-factor", "unfix.blames": "27460:topk-factor", "unfix.verdict": "regressed",
        "unfix.tells": "true", "unfix.backend": "flashinfer_mla", "unfix.target": "eagle_kv", "unfix.device": "cpu",
        "unfix.outcomes": "overflow > overflow > overflow",
    }  # fmt: skip
    assert reason.startswith("with 27460:topk-factor and 27460:capacity-assert out: must be clean, is overflow")
    assert cases[name].find("failure") is not None and reason in cases[name].find("failure").text


def test_without_workers_cases_run_in_the_order_of_their_files(regressions):
    ended, _ = regressions("--collect-only", "-q", "--unfix-select", "27338:topk-factor,own:int32-rows")
    names = [line.partition("::")[0] for line in ended.stdout.splitlines() if "::" in line]
    assert len(set(names)) > 1 and sorted(names) == names
