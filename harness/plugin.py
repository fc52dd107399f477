"""The pytest plugin: turns cases into tests, and verdicts into reports.

    @pytest.mark.fix("27338:topk-factor")     the fix that a test is about
    @pytest.mark.cases(of=build)              build(device) -> cases, one test each
    def test_…(prove, case): prove(case)

``SGLANG_DEBUG_REVERT_PR=27338 pytest regressions`` runs every leg with that fix out, too; the header says so.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import code_base, fixes, report, selection
from harness.case import Case
from harness.device import resolve_device
from harness.errors import InfraError, UnfixError
from harness.prover import Prover, Result

VARIABLE = "SGLANG_DEBUG_REVERT_PR"
_records = pytest.StashKey[list[dict[str, Any]]]()
_environment = pytest.StashKey[dict[str, Any]]()
_catalogue = pytest.StashKey[fixes.Catalogue]()
_session_revert = pytest.StashKey[tuple[str, ...]]()
_code_base = pytest.StashKey[code_base.CodeBase]()
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
        config.stash[_session_revert] = selection.parse(
            os.environ.get(VARIABLE), config.stash[_catalogue], source=VARIABLE
        )
        config.option.unfix_device = resolve_device(config.option.unfix_device)
        config.stash[_code_base] = code_base.resolve(
            config.option.unfix_target, config.rootpath, config.option.unfix_release, config.option.unfix_source
        )
    except UnfixError as error:
        # pytest's own way to end with one line and its usage code instead of a traceback
        raise pytest.UsageError(f"unfix: {error}") from error


def pytest_report_header(config: pytest.Config) -> list[str]:
    lines = [f"unfix: target {config.option.unfix_target} on {config.option.unfix_device}"]
    if reverted := config.stash[_session_revert]:
        lines.append(f"unfix: REVERT ACTIVE in every leg ({VARIABLE}): {', '.join(reverted)}")
    return lines


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("cases")
    if marker is None or "case" not in metafunc.fixturenames:
        return
    build: Callable[[str], list[Case]] = marker.kwargs["of"]
    cases = build(metafunc.config.option.unfix_device)
    metafunc.parametrize("case", cases, ids=[case.id for case in cases])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    catalogue = config.stash[_catalogue]
    for item in items:
        if (marker := item.get_closest_marker("fix")) is None:
            continue
        if len(marker.args) != 1 or marker.args[0] not in catalogue.ids:
            named = ", ".join(map(repr, marker.args)) or "without an id"
            raise pytest.UsageError(f"unfix: {item.nodeid}: no fix {named} is registered under toggles/")
    if not config.option.unfix_select:
        return
    try:
        wanted = set(selection.parse(config.option.unfix_select, catalogue, source="--unfix-select"))
    except UnfixError as error:
        raise pytest.UsageError(f"unfix: {error}") from error
    kept = [item for item in items if (marker := item.get_closest_marker("fix")) and marker.args[0] in wanted]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


@pytest.fixture(scope="session")
def prover(pytestconfig: pytest.Config) -> Iterator[Prover]:
    """One fork server for this worker, on the device of the session."""
    session: tuple[str, ...] = pytestconfig.stash[_session_revert]
    prover = Prover(
        pytestconfig.stash[_catalogue],
        device=pytestconfig.option.unfix_device,
        root=pytestconfig.rootpath,
        target=pytestconfig.stash[_code_base],
        session=session,
    )
    with prover:
        yield prover


@pytest.fixture
def prove(request: pytest.FixtureRequest, prover: Prover) -> Callable[[Case], Result]:
    """Prove the marked fix on a case: passes where it is proved, skips or fails with the reason otherwise."""
    marker = request.node.get_closest_marker("fix")
    assert marker is not None, f"{request.node.nodeid} needs @pytest.mark.fix(…)"

    def check(case: Case) -> Result:
        result = prover.prove(marker.args[0], case)
        request.node.user_properties.append(("unfix", result.as_dict()))
        if result.legs:
            request.node.user_properties.append(("unfix-environment", prover.environment))
        if result.verdict.kind == "skipped":
            pytest.skip(result.verdict.reason or "")
        if result.verdict.kind != "proved":
            pytest.fail(report.explain(result), pytrace=False)
        return result

    return check


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Collect what workers (or this process) recorded: user properties travel with the report under xdist, too."""
    if report.when != "call" or (config := _Controller.config) is None:
        return
    for name, value in report.user_properties:
        if name == "unfix":
            config.stash[_records].append(value)  # type: ignore[arg-type]
        elif name == "unfix-environment" and value:
            config.stash[_environment] = dict(value)  # type: ignore[arg-type, call-overload]


class _Controller:
    """pytest gives pytest_runtest_logreport no config: the process that writes the matrix keeps its own here."""

    config: pytest.Config | None = None


def pytest_sessionstart(session: pytest.Session) -> None:
    _Controller.config = None if hasattr(session.config, "workerinput") else session.config


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    if _Controller.config is not config or not config.option.unfix_json:
        return
    seen: dict[str, Any] = config.stash.get(_environment, {})
    environment = seen or {"target": config.option.unfix_target}
    document = report.matrix(environment, config.stash[_records], _reverted(config))
    try:
        report.write_json(Path(config.option.unfix_json), document)
    except InfraError as error:
        config.stash[_complaint] = str(error)
        session.exitstatus = error.exit_code


def _reverted(config: pytest.Config) -> list[str]:
    reverted: tuple[str, ...] = config.stash[_session_revert]
    return list(reverted)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if records := config.stash[_records]:
        terminalreporter.write_line(report.summary_line(records))
    if complaint := config.stash.get(_complaint, None):
        terminalreporter.write_line(f"unfix: {complaint}", red=True)
