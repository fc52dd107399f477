"""Does every reversal still apply? Looks at sources only: no GPU, and nothing of the code base is imported.

SGLang's own registry (`sglang/srt/debug_utils/pr_fix_toggle.py`, from 0.5.13) is linted with the same engine: the file
is parsed, never run. An entry of it that rotted counts as rotted here, too, since nobody else would say so.
"""

from __future__ import annotations

import ast
import multiprocessing
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from harness import yamlfile
from harness.edits import Edit, Reversal
from harness.errors import MissingPackageError, ToggleError
from harness.fixes import Fix, Variant
from harness.togglefile import ReversalEntry
from harness.upstream import Source
from harness.variants import State, judge, state

REGISTRY = Path("sglang/srt/debug_utils/pr_fix_toggle.py")
WORDS = {"fixed": "applied", "not fixed": "not fixed here", "rotted": "rotted"}
_FEW = 4  # source trees: below, starting processes costs more than it saves
_PATCHES = TypeAdapter(list[ReversalEntry])


@dataclass(frozen=True)
class Finding:
    """What one source tree says about one fix, or, with `in_tree`, about one entry of SGLang's own registry."""

    fix: str
    code_base: str
    release: str
    state: State
    in_tree: bool = False

    @property
    def word(self) -> str:
        return WORDS[self.state.kind]

    def as_dict(self) -> dict[str, Any]:
        return {
            "fix": self.fix,
            "in_tree": self.in_tree,
            "target": self.code_base,
            "release": self.release,
            "state": self.word,
            "variant": self.state.variant or None,
            "places": [{"file": file, "line": line} for file, line in self.state.lines],
            "reason": self.state.message or None,
        }


def check(
    fixes: Iterable[Fix], code_base: str, sources: Sequence[Source], *, with_registry: bool = False
) -> list[Finding]:
    """Every fix in every source tree, tree by tree; those that say nothing of the code base are left out.

    `with_registry`: the entries of SGLang's own registry, too. Several trees are read by several processes.
    """
    chosen = tuple(fix for fix in fixes if code_base in fix.code_bases)
    read = partial(_check_one, chosen, code_base, with_registry)
    workers = min(len(os.sched_getaffinity(0)), len(sources))
    if workers < 2 or len(sources) < _FEW:
        return [finding for source in sources for finding in read(source)]
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
        return [finding for findings in pool.map(read, sources) for finding in findings]


def _check_one(fixes: Sequence[Fix], code_base: str, with_registry: bool, source: Source) -> list[Finding]:
    found = [_finding(fix, code_base, source) for fix in fixes]
    return found + (check_registry([source]) if with_registry else [])


def _finding(fix: Fix, code_base: str, source: Source) -> Finding:
    try:
        here = state(fix, code_base, [source.root])
    except MissingPackageError as error:
        here = State("rotted", message=str(error))
    return Finding(fix.id, code_base, source.name, here)


def check_registry(sources: Iterable[Source]) -> list[Finding]:
    """Every entry of SGLang's own registry, in the trees that have one."""
    return [
        Finding(name, "sglang", source.name, _lint(entry, source.root), in_tree=True)
        for source in sources
        for name, entry in registry(source.root)
    ]


def _lint(entry: Variant | str, root: Path) -> State:
    return State("rotted", message=entry) if isinstance(entry, str) else judge([entry], [], [root])


def registry(root: Path) -> list[tuple[str, Variant | str]]:
    """The entries of the registry in a tree, by their PR's number: what each does, or why it can't be read.

    [] for a tree without a registry. It is a dict of numbers to YAML strings, or to names of such strings; a file in
    which there is none is one entry, `registry`, that can't be read.
    """
    try:
        module = ast.parse((root / REGISTRY).read_bytes())
    except FileNotFoundError:
        return []
    except (OSError, SyntaxError, ValueError) as error:
        return [("registry", f"{REGISTRY} can't be read: {error}")]
    strings: dict[str, str] = {}
    tables: list[ast.Dict] = []
    for node in module.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
                strings.update({target.id: node.value.value for target in targets if isinstance(target, ast.Name)})
            elif isinstance(node.value, ast.Dict) and node.value.keys and all(map(_is_number, node.value.keys)):
                tables.append(node.value)
    if not tables:
        return [("registry", f"{REGISTRY} holds no dict of PR numbers any more")]
    return [
        (str(key.value), _entry(str(key.value), value, strings))
        for table in tables
        for key, value in zip(table.keys, table.values, strict=True)
        if isinstance(key, ast.Constant)
    ]


def _is_number(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int


def _entry(name: str, node: ast.expr, strings: dict[str, str]) -> Variant | str:
    text = strings.get(node.id) if isinstance(node, ast.Name) else getattr(node, "value", None)
    if not isinstance(text, str):
        return f"{REGISTRY}, line {node.lineno}: not a YAML string"
    where = f"{REGISTRY}, line {node.lineno}"
    try:
        data = yamlfile.parse(text, where).value
        patches = _PATCHES.validate_python(data["patches"])
    except ToggleError as error:
        return f"{where}: not YAML with patches: {str(error)[:200]}"
    except (ValidationError, KeyError, TypeError) as error:
        return f"{where}: not YAML with patches: {' '.join(str(error).split())[:200]}"
    return Variant("", tuple(Reversal(name, entry.target, tuple(map(_edit, entry.edits))) for entry in patches))


def _edit(entry: Any) -> Edit:
    return Edit(entry.match, entry.replacement, entry.prepend, entry.append)


def rotted(findings: Sequence[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.state.kind == "rotted"]
