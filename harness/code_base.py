"""A code base under test: where its sources are, where a leg imports it from, what its fork servers import first."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from harness import lightenv
from harness.errors import MissingPackageError, UsageError
from harness.targets import import_root


@dataclass(frozen=True)
class CodeBase:
    name: str  # as the toggle files have it
    version: str | None
    sources: Path  # the directory on the import path that overlays are built from
    path: tuple[str, ...] = ()  # behind an overlay, and behind the project's own roots
    preload: tuple[str, ...] = ()  # imported once a selection, where that takes long; () for a leg to import it


def eagle_kv(root: Path) -> CodeBase:
    """The kernel paths of this project. They import in no time, so one fork server serves all selections."""
    return CodeBase("eagle_kv", None, root / "kernels")


def sglang(release: str, source: str | None = None) -> CodeBase:
    """A release of SGLang in its light environment, or a checkout that this environment serves."""
    found = lightenv.sources(release, source)
    version = release if source is None else f"{release} environment, {source}"
    return CodeBase("sglang", version, found, tuple(lightenv.path(release, source)), _SGLANG_PRELOAD)


def package(name: str, release: str | None, source: str | None) -> CodeBase:
    """Any other package that toggle files name: below a directory, its `python/` or its `src/`, or an installed one."""
    if release:
        raise UsageError(f"--target {name!r}: --release belongs to --target sglang")
    roots = [Path(source, below).absolute() for below in ("python", "src", "")] if source else []
    try:
        found = import_root(name, roots) if name.isidentifier() else None
    except MissingPackageError:
        found = None
    if found is None or (roots and found not in roots):
        where = f"a package in {source}" if source else "an installed package (or one in --source DIR)"
        raise UsageError(f"--target {name!r}: must be eagle_kv or sglang, or {where}")
    return CodeBase(name, source, found, (str(found),) if roots else ())


def resolve(name: str, root: Path, release: str | None, source: str | None) -> CodeBase:
    """The code base that the options name. Raises UsageError, and InfraError where its environment is not installed."""
    if name == "eagle_kv":
        if release or source:
            raise UsageError("--release and --source belong to --target sglang")
        return eagle_kv(root)
    if name != "sglang":
        return package(name, release, source)
    if not release:
        raise UsageError("--target sglang needs --release V, the release whose light environment it runs in")
    return sglang(release, source)


_SGLANG_PRELOAD = ("regressions.scenarios.sglang_preload",)
