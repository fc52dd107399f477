"""The pytest plugin: turns cases into tests, and verdicts into reports.

    @pytest.mark.fix("27338:topk-factor")     the fix that a test is about
    @pytest.mark.cases(of=build)              build(device) -> cases, one test each
    def test_…(prove, case): prove(case)

``SGLANG_DEBUG_REVERT_PR=27338 pytest regressions`` runs every leg with that fix out, too; the header says so. Under
``unfix exec`` and ``unfix bisect`` a test is a plain one, with one leg: it passes where that does, with their
fixes out, what it must with them in.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness import code_base, fixes, selection
from harness import report as reports
from harness.case import Case
from harness.device import resolve_device
from harness.errors import InfraError, UnfixError, UsageError
from harness.prover import Prover, Result
from harness.sandbox import Servers
from harness.verdict import Verdict

servers = pytest.StashKey[Servers]()  # for another plugin that has legs run in a way of its own
_records = pytest.StashKey[list[dict[str, Any]]]()
_environment = pytest.StashKey[dict[str, Any]]()
_catalogue = pytest.StashKey[fixes.Catalogue]()
_session_revert = pytest.StashKey[tuple[str, ...]]()
_variable = pytest.StashKey[str]()
_code_base = pytest.StashKey[code_base.CodeBase]()
_selected = pytest.StashKey[tuple[str, ...]]()
_still_in = pytest.StashKey[str]()
_complaint = pytest.StashKey[str]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("unfix")
    group.addoption(
        "--unfix-device", default="auto", choices=("auto", "cpu", "cuda"), help="where legs run (default: auto)"
    )
    group.addoption("--unfix-target", default="eagle_kv", help="the code base under test: eagle_kv or sglang")
    group.addoption(
        "--unfix-release", default=None, metavar="V", help="the release of SGLang, for --unfix-target sglang"
    )
    group.addoption("--unfix-source", default=None, metavar="DIR", help="a checkout of SGLang, run in that environment")
    group.addoption(
        "--unfix-select", default="", metavar="SEL", help="only tests of these fixes: 27338, 27338:topk-factor, …"
    )
    group.addoption("--unfix-json", default="", metavar="FILE", help="write the matrix as JSON")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "fix(id): the fix that this regression is about")
    config.addinivalue_line("markers", "cases(of=build): build(device) -> the cases of this regression, one test each")
    config.stash[_records] = []
    try:
        config.stash[_catalogue] = fixes.load(config.rootpath / "toggles")
        config.stash[_variable], session = selection.of_session(config.stash[_catalogue])
        config.stash[_selected] = selection.parse(
            config.option.unfix_select, config.stash[_catalogue], source="--unfix-select"
        )
        config.option.unfix_device = resolve_device(config.option.unfix_device)
        config.stash[_code_base] = code_base.resolve(
            config.option.unfix_target, config.rootpath, config.option.unfix_release, config.option.unfix_source
        )
        config.stash[_session_revert], config.stash[_still_in] = _able(config, session)
    except UnfixError as error:
        # pytest's own way to end with one line and its usage code instead of a traceback
        raise pytest.UsageError(f"unfix: {error}") from error


def pytest_report_header(config: pytest.Config) -> list[str]:
    lines = [f"unfix: target {config.option.unfix_target} on {config.option.unfix_device}"]
    if reverted := config.stash[_session_revert]:
        lines.append(f"unfix: REVERT ACTIVE in every leg ({config.stash[_variable]}): {', '.join(reverted)}")
    if still_in := config.stash[_still_in]:
        lines.append(f"unfix: {config.stash[_variable]}: {still_in}")
    if not config.stash[_selected] and (unable := _able(config, config.stash[_catalogue].ids)[1]):
        lines.append(f"unfix: {unable}")
    return lines


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    try:
        _parametrize(metafunc)
    except UnfixError as error:
        # a collection error with one line: under xdist a UsageError here would be pytest's own internal error
        raise pytest.Collector.CollectError(f"unfix: {metafunc.definition.nodeid}: {error}") from None


def _parametrize(metafunc: pytest.Metafunc) -> None:
    test, catalogue = metafunc.definition, metafunc.config.stash[_catalogue]
    fix, cases = test.get_closest_marker("fix"), test.get_closest_marker("cases")
    if fix and (len(fix.args) != 1 or fix.args[0] not in catalogue.ids):
        named = ", ".join(map(repr, fix.args)) or "without an id"
        raise UsageError(f"no fix {named} is registered under toggles/")
    if fix and not {"prove", "prover"} & set(metafunc.fixturenames):
        raise UsageError("a test of a fix needs the fixture prove, and must call it")
    if cases is None:
        return
    if set(cases.kwargs) != {"of"} or cases.args or "case" not in metafunc.fixturenames:
        raise UsageError("write @pytest.mark.cases(of=build) on a test that takes case")
    build: Callable[[str], list[Case]] = cases.kwargs["of"]
    built = build(metafunc.config.option.unfix_device)
    ids = [case.id for case in built]
    if not built or len(set(ids)) < len(ids):
        doubled = sorted({name for name in ids if ids.count(name) > 1})
        raise UsageError(f"two cases are called {doubled[0]}" if doubled else "there is no case in its table")
    metafunc.parametrize("case", built, ids=ids)


def code_base_of(config: pytest.Config) -> code_base.CodeBase:
    found: code_base.CodeBase = config.stash[_code_base]
    return found


def _able(config: pytest.Config, ids: Sequence[str]) -> tuple[tuple[str, ...], str]:
    return selection.able(ids, config.stash[_catalogue], code_base_of(config).name)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of the selected fixes; where none is selected, all but those that the target can't undo."""
    selected = config.stash[_selected]
    wanted = selected or _able(config, config.stash[_catalogue].ids)[0]
    marked = [(item, item.get_closest_marker("fix")) for item in items]
    kept = [item for item, marker in marked if (marker.args[0] in wanted if marker else not selected)]
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A fork server has imported the code base of one selection: cases that need the same ones stay on one worker."""
    if not code_base_of(config).preload:
        return None
    from xdist.scheduler import LoadScopeScheduling

    # on a GPU there are many cases, and cores for the servers of two workers
    shares = 2 if config.option.unfix_device == "cuda" else 1

    class ByTest(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return f"{nodeid.partition('[')[0]}/{zlib.crc32(nodeid.encode()) % shares}"

    return ByTest(config, log)


@pytest.fixture(scope="session")
def prover(pytestconfig: pytest.Config) -> Iterator[Prover]:
    """One fork server for this worker, on the device of the session."""
    session: tuple[str, ...] = pytestconfig.stash[_session_revert]
    catalogue = pytestconfig.stash[_catalogue]
    prover = Prover(
        _without_legs(catalogue) if _is_plain(pytestconfig) else catalogue,
        device=pytestconfig.option.unfix_device,
        root=pytestconfig.rootpath,
        target=pytestconfig.stash[_code_base],
        session=session,
        servers=pytestconfig.stash.get(servers, None),
    )
    with prover:
        yield prover


@pytest.fixture
def prove(request: pytest.FixtureRequest, prover: Prover) -> Callable[[Case], Result]:
    """Prove the marked fix on a case: passes where it is proved, skips or fails with the reason otherwise."""
    marker = request.node.get_closest_marker("fix")
    assert marker is not None, f"{request.node.nodeid} needs @pytest.mark.fix(…)"

    def check(case: Case) -> Result:
        if any(name == "unfix" for name, _ in request.node.user_properties):
            pytest.fail("unfix: prove was called twice: make each case a test of its own", pytrace=False)
        result = prover.prove(marker.args[0], case)
        if _is_plain(request.config) and result.verdict.kind == "vacuous":
            result = _passed(result)
        request.node.user_properties.append(("unfix", result.as_dict()))
        if result.legs:
            request.node.user_properties.append(("unfix-environment", prover.environment))
        if result.verdict.kind == "skipped":
            pytest.skip(result.verdict.reason or "")
        if result.verdict.kind != "proved":
            pytest.fail(reports.explain(result), pytrace=False)
        return result

    return check


def _is_plain(config: pytest.Config) -> bool:
    return bool(config.stash[_session_revert]) and config.stash[_variable] == selection.EXEC_VARIABLE


def _without_legs(catalogue: fixes.Catalogue) -> fixes.Catalogue:
    """Legs that take out more fixes say nothing about those that `unfix exec` took out."""
    bare = (replace(fix, entry=fix.entry.model_copy(update={"legs": []})) for fix in catalogue)
    return fixes.Catalogue(tuple(bare))


def _passed(result: Result) -> Result:
    """A plain test, without a leg to compare with, passes; it is counted with those that can't tell."""
    reason = f"does what it must with {', '.join(result.legs[0].reverted)} out; nothing else was asked"
    return replace(result, case=replace(result.case, tells=False), verdict=Verdict("proved", reason, result.fix))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """A test of a fix that passes without a verdict has proved nothing."""
    made: Any = yield
    marker = item.get_closest_marker("fix")
    silent = marker and made.when == "call" and not any(name == "unfix" for name, _ in item.user_properties)
    if marker and silent and made.passed:
        made.outcome = "failed"
        made.longrepr = f"unfix: this test is about {marker.args[0]} and never called prove: it proves nothing"
    return made


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Collect what workers (or this process) recorded: user properties travel with the report under xdist, too."""
    if (config := _Controller.config) is None:
        return
    if report.when == "???" and report.failed:  # xdist's report of a worker that died
        config.stash[_records].append(_lost(report.nodeid, config))
    if report.when != "call":
        return
    for name, value in report.user_properties:
        if name == "unfix":
            config.stash[_records].append(value)  # type: ignore[arg-type]
            _Controller.fixes[report.nodeid.partition("[")[0]] = value["fix"]  # type: ignore[index]
        elif name == "unfix-environment" and value:
            config.stash[_environment] = dict(value)  # type: ignore[arg-type, call-overload]


def _lost(nodeid: str, config: pytest.Config) -> dict[str, Any]:
    """The record of a case whose worker died: lost is not proved, and must not be missing either."""
    test, _, case = nodeid.partition("[")
    fix = _Controller.fixes.get(test, "unknown")
    reason = f"the worker that ran {nodeid} was lost"
    return {
        "regression": fix.partition(":")[0], "fix": fix, "blames": fix, "case": case.rstrip("]"), "backend": "",
        "target": config.option.unfix_target, "device": config.option.unfix_device, "tells": False,
        "verdict": "infra", "reason": reason, "legs": [],
    }  # fmt: skip


class _Controller:
    """pytest gives pytest_runtest_logreport no config: the process that writes the matrix keeps its own here."""

    config: pytest.Config | None = None
    fixes: dict[str, str] = {}  # of tests seen so far: a lost worker's report names its test only


def pytest_sessionstart(session: pytest.Session) -> None:
    _Controller.config = None if hasattr(session.config, "workerinput") else session.config


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    if _Controller.config is not config:
        return
    records: list[dict[str, Any]] = config.stash[_records]
    if session.exitstatus == pytest.ExitCode.OK and records and all(row["verdict"] == "skipped" for row in records):
        config.stash[_complaint] = "every case was skipped: nothing is proved"
        session.exitstatus = InfraError.exit_code
    if not config.option.unfix_json:
        return
    seen: dict[str, Any] = config.stash.get(_environment, {})
    environment = seen or {"target": config.option.unfix_target}
    document = reports.matrix(environment, config.stash[_records], _reverted(config))
    try:
        reports.write_json(Path(config.option.unfix_json), document)
    except InfraError as error:
        config.stash[_complaint] = str(error)
        session.exitstatus = error.exit_code


def _reverted(config: pytest.Config) -> list[str]:
    reverted: tuple[str, ...] = config.stash[_session_revert]
    return list(reverted)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if records := config.stash[_records]:
        terminalreporter.write_line(reports.summary_line(records))
    if complaint := config.stash.get(_complaint, None):
        terminalreporter.write_line(f"unfix: {complaint}", red=True)
