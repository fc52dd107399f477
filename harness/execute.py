"""Run any command with some fixes out, or put in: overlays in front of `PYTHONPATH`, and then `exec`.

The command, its subprocesses and the children that `multiprocessing` spawns inherit the path, and so see the overlays.
SGLang's own mechanism reads `SGLANG_DEBUG_REVERT_PR` as one integer: it would choke on our grammar, or undo a fix
that is out already. So the command never gets that variable: it reads in `UNFIX_REVERT` what is out, if anything is.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from harness import overlay, selection
from harness.edits import Reversal
from harness.errors import InfraError, MissingPackageError, UnfixError, UsageError
from harness.fixes import Catalogue, Fix
from harness.variants import AlreadyFixedError, NotFixedError, choose, choose_forward

_PYTHON = re.compile(r"(python|pypy)[\d.]*(\.exe)?")
_FIND = """
import importlib.util, json, os, sys
if not getattr(sys.flags, "safe_path", False):
    sys.path[:1] = [] if sys.argv[1] == "-" else [sys.argv[1]]
found = {}
for name in sys.argv[2:]:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    places = list(spec.submodule_search_locations or [spec.origin]) if spec else []
    found[name] = os.path.dirname(os.path.abspath(places[0])) if places and places[0] else None
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Prepared:
    """A command that is ready to run. `overlays`: one a code base; `notes`: what is out and what isn't, by line."""

    command: tuple[str, ...]
    environment: dict[str, str]
    overlays: tuple[Path, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Sight:
    """What a command sees: the code bases that its Python imports, and from where."""

    command: tuple[str, ...]
    environment: dict[str, str]  # without a variable that takes fixes out
    python: str  # the Python that the command runs on
    first: str  # what that puts first on its path: "" the working directory, "-" nothing
    places: dict[str, list[Path]]  # for each code base: the directories that its packages are in
    missing: dict[str, str]  # code bases that can't be imported, and why, in one line

    def under(self, trees: Sequence[Path], out: Sequence[str]) -> dict[str, str]:
        """The environment in which the command sees these overlays, and reads in EXEC_VARIABLE what is out.

        Raises UsageError where something on the command's path would come before an overlay.
        """
        environment = dict(self.environment)
        if trees:
            path = [*map(str, trees), environment.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
            _check_first(self.python, self.first, trees, environment)
        if out:
            environment[selection.EXEC_VARIABLE] = ",".join(out)
        return environment


def look(
    command: Sequence[str],
    fixes: Sequence[Fix],
    target: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> Sight:
    """Find the code bases of these fixes (only `target`'s, if given) in the way that the command will.

    Raises UsageError where there is no such command, or where it would pass over PYTHONPATH.
    """
    environment = dict(os.environ if environment is None else environment)
    for variable in selection.VARIABLES:
        environment.pop(variable, None)
    program = shutil.which(command[0], path=environment.get("PATH", os.defpath))
    if program is None:
        raise UsageError(f"no command {command[0]!a} to run")
    if not fixes:
        return Sight(tuple(command), environment, "", "", {}, {})
    code_bases = dict.fromkeys(name for fix in fixes for name in fix.code_bases if target in (None, name))
    if not code_bases:
        raise UsageError(f"{', '.join(fix.id for fix in fixes)}: nothing says how in {target}")
    packages = {name: sorted({_package(form) for fix in fixes for form in _forms(fix, name)}) for name in code_bases}
    python, first = _python(program, command, environment)
    roots = _find(python, first, {top for tops in packages.values() for top in tops}, environment)
    places, missing = {}, {}
    for name, tops in packages.items():
        if unseen := [top for top in tops if not roots[top]]:
            missing[name] = f"{python} can't import {unseen[0]}: no fix of {name} can be out"
        else:
            places[name] = [Path(str(roots[top])) for top in tops]
    if not any(roots.values()):
        raise MissingPackageError("; ".join(missing.values()), package=next(iter(packages)))
    return Sight(tuple(command), environment, python, first, places, missing)


def prepare(
    command: Sequence[str],
    catalogue: Catalogue,
    revert: Sequence[str] = (),
    apply: Sequence[str] = (),
    target: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> Prepared:
    """Build an overlay for every code base that these fixes (full ids) are in and that the command's Python can import.

    A fix that its code base lacks, or has already, is noted and left alone, unless nothing is left to do: then that is
    the UnfixError. Raises RottedError, MissingPackageError where no code base can be imported, and UsageError where
    something on the command's path would come before the overlay.
    """
    if both := set(revert) & set(apply):
        raise UsageError(f"{sorted(both)[0]} can't be both taken out and put in")
    wanted = [catalogue.fix(fix) for fix in (*revert, *apply)]
    sight = look(command, wanted, target, environment)
    if not wanted:
        return Prepared(sight.command, sight.environment, (), ("nothing is out",))
    trees, notes, refused, gone = [], [], [*sight.missing.values()], set()
    for name, places in sight.places.items():
        out, into, unable = _chosen(catalogue, name, revert, apply, places)
        refused += unable
        gone |= set(out)
        if tree := overlay.build(overlay.plan(_flat(out, into), places)):
            trees.append(tree)
            told = [f"out of {name}: {', '.join(out)}"] * bool(out) + [f"put into {name}: {', '.join(into)}"] * bool(
                into
            )
            notes += [f"{text} ({places[0]}, overlay {tree})" for text in told]
    if not trees:
        raise UnfixError("; ".join(refused))
    changed = sight.under(trees, [fix for fix in revert if fix in gone])
    return Prepared(sight.command, changed, tuple(trees), (*notes, *refused))


def run(prepared: Prepared) -> NoReturn:
    """Become the command: its exit code, its signals and its terminal are the caller's."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(prepared.command[0], prepared.command, prepared.environment)
    except OSError as error:
        raise UsageError(f"can't run {prepared.command[0]!a}: {error.strerror}") from None


def _forms(fix: Fix, code_base: str) -> list[Reversal]:
    return [each for form in (*fix.variants_for(code_base), *fix.unfixed_for(code_base)) for each in form.reversals]


def _package(reversal: Reversal) -> str:
    return re.split(r"[./]", reversal.target, maxsplit=1)[0]


def _flat(*groups: dict[str, tuple[Reversal, ...]]) -> list[Reversal]:
    return [reversal for group in groups for reversals in group.values() for reversal in reversals]


def _chosen(
    catalogue: Catalogue, code_base: str, revert: Sequence[str], apply: Sequence[str], roots: Sequence[Path]
) -> tuple[dict[str, tuple[Reversal, ...]], dict[str, tuple[Reversal, ...]], list[str]]:
    """By the fix's id: what takes it out, what puts it in; and why neither can be done."""
    out: dict[str, tuple[Reversal, ...]] = {}
    into: dict[str, tuple[Reversal, ...]] = {}
    refused = []
    for ids, pick, result in ((revert, choose, out), (apply, choose_forward, into)):
        for fix in map(catalogue.fix, ids):
            if code_base not in fix.code_bases:
                refused.append(f"{fix.id}: nothing says how in {code_base}")
                continue
            try:
                result[fix.id] = pick(fix, code_base, roots)
            except (NotFixedError, AlreadyFixedError) as error:
                refused.append(str(error))
    return out, into, refused


def _python(program: str, command: Sequence[str], environment: Mapping[str, str]) -> tuple[str, str]:
    """The Python that the command runs on, and what it puts first on its path ("" for the working directory).

    A command that is neither Python nor a script of Python's is taken to start the `python` on PATH.
    """
    if not _PYTHON.fullmatch(Path(program).name):
        first = str(Path(os.path.realpath(program)).parent)
        if python := _shebang(Path(program), environment):
            return python, first
        path = environment.get("PATH", os.defpath)
        return shutil.which("python", path=path) or shutil.which("python3", path=path) or sys.executable, "-"
    arguments = list(command[1:])
    while arguments and arguments[0].startswith("-") and arguments[0] != "-":
        option = arguments.pop(0)
        letters = re.split(r"[cmWX]", option[1:], maxsplit=1)[0] if not option.startswith("--") else ""
        if {"I", "E"} & set(letters):
            raise UsageError(f"{option}: Python would ignore PYTHONPATH, and with it the overlay: leave it out")
        if re.fullmatch(r"-[A-Za-z]*[cm].*", option):
            return program, "-" if "P" in letters else ""
        if option in ("-W", "-X") and arguments:
            arguments.pop(0)
    if not arguments or arguments[0] == "-":
        return program, ""
    script = Path(os.path.realpath(arguments[0]))
    return program, str(script if script.is_dir() else script.parent)


def _shebang(program: Path, environment: Mapping[str, str]) -> str | None:
    """The Python that a script names in its first line, or, as pip writes it for long paths, in its second."""
    try:
        with open(program, "rb") as stream:
            lines = [os.fsdecode(stream.readline(4096)).strip() for _ in range(2)]
    except OSError:
        return None
    if not lines[0].startswith("#!"):
        return None
    words = lines[0][2:].split()
    if words and Path(words[0]).name == "env":
        words = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
    elif (
        words and Path(words[0]).name == "sh" and (exec_line := re.match(r"'''exec' \"?([^\"]+?)\"? \"\$0\"", lines[1]))
    ):
        words = [exec_line.group(1)]
    if not words or not _PYTHON.fullmatch(Path(words[0]).name):
        return None
    return shutil.which(words[0], path=environment.get("PATH", os.defpath))


def _find(python: str, first: str, packages: set[str], environment: Mapping[str, str]) -> dict[str, str | None]:
    """For each top-level package, the directory on this Python's path that it would be imported from."""
    command = [python, "-c", _FIND, first, *sorted(packages)]
    try:
        ended = subprocess.run(command, env=dict(environment), capture_output=True, text=True, timeout=60, check=True)
        return json.loads(ended.stdout.splitlines()[-1])
    except subprocess.CalledProcessError as error:
        words = (error.stderr.strip().splitlines() or [f"it ended with {error.returncode}"])[-1]
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        words = str(error)
    raise InfraError(f"can't ask {python} where {', '.join(sorted(packages))} is: {words}")


def _check_first(python: str, first: str, trees: Sequence[Path], environment: Mapping[str, str]) -> None:
    tops = {path.name: tree for tree in trees for path in tree.iterdir() if path.is_dir() and not path.is_symlink()}
    for name, found in _find(python, first, set(tops), environment).items():
        if found is None or Path(found).resolve() != tops[name].resolve():
            raise UsageError(f"{found}/{name} comes before the overlay on the command's path: run it from elsewhere")
