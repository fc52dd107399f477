"""The command that runs a case again: ``unfix repro`` where it builds that very case, else ``unfix run`` of its fix."""

from __future__ import annotations

import importlib
import inspect
import shlex
from collections.abc import Collection, Mapping
from typing import Any

from harness.fixes import Catalogue, Fix


def command(record: Mapping[str, Any], version: str | None, catalogue: Catalogue, takes: Collection[str]) -> str:
    """One line for a shell. ``version``: the target's; ``takes``: the names of the options that ``unfix repro`` has."""
    where = ["--device", record["device"], *_target(record["target"], version)]
    if (options := _options(record, catalogue, takes)) is None:
        return shlex.join(["unfix", "run", record["fix"], *where])
    return shlex.join(["unfix", "repro", record["fix"], *(_typed(*option) for option in options.items()), *where])


def _typed(name: str, value: Any) -> str:
    option = "--" + name.replace("_", "-")
    if value is True:
        return option
    text = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    return f"{option}={text}"  # with "=", since a value may start with a minus


def _target(target: str, version: str | None) -> list[str]:
    if target == "eagle_kv":
        return []
    if not version:
        return ["--target", target]
    release, _, source = version.partition(" environment, ")
    return ["--target", target, "--release", release, *(["--source", source] if source else [])]


def _options(record: Mapping[str, Any], catalogue: Catalogue, takes: Collection[str]) -> dict[str, Any] | None:
    """The options that make the scenario build a case of this very name; None where none do."""
    if record["fix"] not in catalogue.ids or "params" not in record:
        return None
    fix = catalogue.fix(record["fix"])
    given = {**record["params"], "detector": record["detector"]}
    try:
        scenario = importlib.import_module(f"regressions.scenarios.{fix.scenario}")
        options = {
            name: given[name] for name in scenario.OPTIONS if given.get(name) is not None and given[name] is not False
        }
        same = set(options) <= set(takes) and _built(scenario, fix, options) == (record["case"], record["params"])
    except Exception:  # a scenario is asked for what a matrix says, whatever that is
        return None
    return options if same else None


def _built(scenario: Any, fix: Fix, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    more = {"backend": fix.backend} if fix.backend and "backend" in inspect.signature(scenario.case).parameters else {}
    case = scenario.case(fix.id, **{**more, **options})
    return case.id, dict(case.params)
