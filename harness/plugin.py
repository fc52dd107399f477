"""The pytest plugin: turns cases into tests, and verdicts into reports.

    @pytest.mark.fix("27338:topk-factor")     the fix that a test is about
    @pytest.mark.cases(of=build)              build(device) -> cases, one test each
    def test_…(prove, case): prove(case)

``SGLANG_DEBUG_REVERT_PR=27338 pytest regressions`` runs every leg with that fix out, too; the header says so. Under
``unfix exec`` and ``unfix bisect`` a test is a plain one, with one leg: it passes where that does, with their
fixes out, what it must with them in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness import code_base, early, fixes, history, selection, shards, workers
from harness import report as reports
from harness.case import Case
from harness.device import resolve_device
from harness.errors import UnfixError, UsageError
from harness.left_out import left_out
from harness.prover import Prover, Result
from harness.recorder import Recorder, facts
from harness.sandbox import Servers
from harness.verdict import Verdict

servers = pytest.StashKey[Servers]()  # for another plugin that has legs run in a way of its own
_record = pytest.StashKey[dict[str, Any]]()  # of a test's case
_environment = pytest.StashKey[dict[str, Any]]()
_recorder = pytest.StashKey[Recorder]()
_shard = pytest.StashKey["shards.Shard | None"]()
_durations = pytest.StashKey[Mapping[str, float]]()
_done = pytest.StashKey[frozenset[str]]()
_catalogue = pytest.StashKey[fixes.Catalogue]()
_session_revert = pytest.StashKey[Sequence[str]]()
_variable = pytest.StashKey[str]()
_code_base = pytest.StashKey[code_base.CodeBase]()
_selected = pytest.StashKey[Sequence[str]]()
_still_in = pytest.StashKey[str]()


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
    group.addoption("--unfix-log", default="", metavar="FILE", help="write a JSON line a case, as it ends")
    group.addoption("--unfix-resume", action="store_true", help="go on from what --unfix-log's file has")
    group.addoption("--unfix-shard", default="", metavar="I/N", help="only the I-th of N parts")
    group.addoption(
        "--unfix-durations", default="", metavar="FILE|DIR", help="earlier matrices: parts of about the same length"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "fix(id): the fix that this regression is about")
    config.addinivalue_line("markers", "cases(of=build): build(device) -> the cases of this regression, one test each")
    workers.settle(config)
    option, stash = config.option, config.stash
    try:
        stash[_catalogue] = fixes.load(config.rootpath / "toggles")
        stash[_variable], session = selection.of_session(stash[_catalogue])
        stash[_selected] = selection.parse(option.unfix_select, stash[_catalogue], source="--unfix-select")
        option.unfix_device = resolve_device(option.unfix_device)
        stash[_code_base] = code_base.resolve(
            option.unfix_target, config.rootpath, option.unfix_release, option.unfix_source
        )
        stash[_session_revert], stash[_still_in] = _able(config, session)
        stash[_shard] = shards.parse(option.unfix_shard)
        stash[_durations] = _recorded(config) if stash[_shard] and option.unfix_durations else {}
        stash[_done] = workers.done(config) if workers.is_worker(config) else _record_here(config)
    except UnfixError as error:
        # pytest's own way to end with one line and its usage code instead of a traceback
        raise pytest.UsageError(f"unfix: {error}") from error


def _recorded(config: pytest.Config) -> Mapping[str, float]:
    """How long the tests took in earlier nights, on this code base and device."""
    nights = history.read_baseline(Path(config.option.unfix_durations))
    return shards.durations(history.records(nights, code_base_of(config).name, config.option.unfix_device))


def _record_here(config: pytest.Config) -> frozenset[str]:
    """Register what only the process has that a run was started in. Returns the tests that its log has already."""
    stash, target = config.stash, code_base_of(config)
    run = facts(
        config.rootpath, target, config.option.unfix_device, stash[_selected], stash[_session_revert], stash[_shard]
    )
    recorder = stash[_recorder] = Recorder(config.option, run)
    config.pluginmanager.register(recorder)
    config.pluginmanager.register(
        workers.Workers(config.option.unfix_device, sorted(recorder.done), slow=bool(target.preload))
    )
    if config.option.unfix_device == "cuda" and target.name == "eagle_kv":
        ids = stash[_selected] or _able(config, stash[_catalogue].ids)[0]
        config.pluginmanager.register(early.Builds(stash[_catalogue], ids, config.rootpath, "cuda"))
    return recorder.done


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


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Around all others that take tests out or sort them."""
    found = list(items)
    yield
    # where none is selected, all but those that the target can't undo
    wanted = config.stash[_selected] or _able(config, config.stash[_catalogue].ids)[0]
    _keep(config, items, wanted, left_out(config, found, items, wanted))


def _keep(config: pytest.Config, items: list[pytest.Item], wanted: Sequence[str], missing: str) -> None:
    """Keep what this process is to run: of the selected fixes, of this shard, and not yet in the log."""
    selected = config.stash[_selected]
    fix_of = {item.nodeid: marker.args[0] for item in items if (marker := item.get_closest_marker("fix"))}
    kept = [item.nodeid for item in items if (fix_of[item.nodeid] in wanted if item.nodeid in fix_of else not selected)]
    facts = None
    if shard := config.stash[_shard]:
        unit = workers.together if code_base_of(config).preload else str
        parts = shards.cut(kept, shard.of, config.stash[_durations], unit)
        kept, facts = parts[shard.index - 1], shards.facts(shard, parts)
    left = {nodeid for nodeid in kept if nodeid not in config.stash[_done]}
    if len(left) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in left])
        items[:] = [item for item in items if item.nodeid in left]
    if workers.is_worker(config) and not code_base_of(config).preload:
        items[:] = workers.spread(items)
    cases = len(left & set(fix_of))
    if workers.is_worker(config):
        told = {"cases": cases, "shard": facts, "left_out": missing}
        config.workeroutput["unfix"] = told  # type: ignore[attr-defined]
    else:
        config.stash[_recorder].collected(cases, facts, missing)


@pytest.fixture(scope="session")
def prover(pytestconfig: pytest.Config) -> Iterator[Prover]:
    """One fork server for this worker, on the device of the session."""
    session: Sequence[str] = pytestconfig.stash[_session_revert]
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
        if _record in request.node.stash:
            pytest.fail("unfix: prove was called twice: make each case a test of its own", pytrace=False)
        result = prover.prove(marker.args[0], case)
        if _is_plain(request.config) and result.verdict.kind == "vacuous":
            result = _passed(result)
        request.node.stash[_record] = result.as_dict()
        request.node.stash[_environment] = prover.environment if result.legs else {}
        request.node.user_properties += _properties(result)
        if result.verdict.kind == "skipped":
            pytest.skip(result.verdict.reason or "")
        if result.verdict.kind != "proved":
            pytest.fail(reports.explain(result), pytrace=False)
        return result

    return check


def _properties(result: Result) -> list[tuple[str, str]]:
    """What JUnit XML says of a case."""
    said = {
        "fix": result.fix, "blames": result.verdict.fix, "verdict": result.verdict.kind,
        "tells": str(result.case.tells).lower(), "backend": result.case.backend, "target": result.target,
        "device": result.device, "outcomes": " > ".join(leg.outcome for leg in result.legs),
        "reason": result.verdict.reason or "",
    }  # fmt: skip
    return [(f"unfix.{name}", value) for name, value in said.items() if value]


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
    """Give the report its case's record; a test of a fix that passes without one has proved nothing."""
    made: Any = yield
    if made.when != "call" or (marker := item.get_closest_marker("fix")) is None:
        return made
    if record := item.stash.get(_record, None):
        made.unfix, made.unfix_environment = record, item.stash[_environment]
    elif made.passed:
        made.outcome = "failed"
        made.longrepr = f"unfix: this test is about {marker.args[0]} and never called prove: it proves nothing"
    return made
