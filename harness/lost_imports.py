"""The imports that an old text needs and the new one has no more, as edits that bring them back."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable

from harness.changes import Piece
from harness.edits import Change, Edit, apply
from harness.errors import RottedError
from harness.pysource import PySource, stores


def lost(pieces: Iterable[Piece], old_text: str, new_text: str) -> tuple[list[Piece], list[str]]:
    """For the pieces of one module: the edits, and the names that no import of the old text brings back."""
    stmts = [stmt for piece in pieces for stmt in piece.old]
    nodes = [node for stmt in stmts for node in ast.walk(stmt)]
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    own = {node.arg for node in nodes if isinstance(node, ast.arg)}.union(*map(stores, stmts))
    missing = used - own - set(dir(builtins))
    if not missing or not (missing := missing - _bound(new_text)):
        return [], []
    old, new = PySource(old_text).tree, PySource(new_text)
    edits = {name: _put_in(new, _import_of(old, name)) for name in sorted(missing)}
    back = [Piece("", edit, line=1) for edit in edits.values() if edit]
    return back, [name for name, edit in edits.items() if edit is None]


def _put_in(module: PySource, line: str) -> Edit | None:
    """An edit that adds an import behind the last of the module's own that is found once."""
    whole = "\n".join(module.text_lines)
    for stmt in reversed(module.tree.body) if line else ():
        if isinstance(stmt, ast.Import | ast.ImportFrom):
            edit = Edit(module.text([stmt]), append=line)
            try:
                apply(whole, [Change(edit, ((0, len(whole)),))])
            except RottedError:
                continue
            return edit
    return None


def _bound(source: str) -> set[str]:
    """Every name that is bound anywhere in a module."""
    found: set[str] = set()
    for node in ast.walk(PySource(source).tree):
        found |= {getattr(node, "name", None) or "", getattr(node, "arg", None) or ""}  # def, class, except, argument
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {_binds(alias) for alias in node.names}
    return found


def _binds(alias: ast.alias) -> str:
    return alias.asname or alias.name.partition(".")[0]


def _import_of(tree: ast.Module, name: str) -> str:
    for stmt in ast.walk(tree):
        if isinstance(stmt, ast.Import | ast.ImportFrom):
            for alias in stmt.names:
                if _binds(alias) == name:
                    if isinstance(stmt, ast.Import):
                        return ast.unparse(ast.Import([alias]))
                    return ast.unparse(ast.ImportFrom(stmt.module, [alias], stmt.level))
    return ""
