"""A Python module for comparing: its functions, classes and top level, and their code without comments."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from harness.meaning import parse
from harness.tokens import NEWLINE, lex

Function = ast.FunctionDef | ast.AsyncFunctionDef
_GUARDS = re.compile(r"_*(assert|check|ensure|require|validate|verify|refuse|guard)(_|\b|[A-Z])")


@dataclass(frozen=True)
class Unit:
    """A function with all that is nested in it, or the statements that are a class's or a module's own."""

    name: str  # dotted, "" for the module
    kind: Literal["function", "class", "module"]
    node: Function | ast.ClassDef | ast.Module
    body: list[ast.stmt]  # without a docstring

    @property
    def lines(self) -> list[str]:
        """Its statements, one a line, however they are laid out."""
        return [ast.dump(node) for stmt in self.body for node in ast.walk(stmt) if isinstance(node, ast.stmt)
                and not hasattr(node, "body")]  # fmt: skip


class PySource:
    """A module's text. Raises SyntaxError where it isn't Python."""

    def __init__(self, text: str) -> None:
        self.text_lines = re.split(NEWLINE, text)
        self.tree = parse("\n".join(self.text_lines))
        self.units: dict[str, Unit] = {}
        self._collect("", "module", self.tree)
        self._code, self._inside = _without_comments("\n".join(self.text_lines))

    def _collect(self, name: str, kind: Literal["class", "module"], node: ast.ClassDef | ast.Module) -> None:
        own: list[ast.stmt] = []
        for stmt in node.body:
            below = f"{name}.{stmt.name}" if name and hasattr(stmt, "name") else getattr(stmt, "name", "")
            if isinstance(stmt, Function) and below not in self.units:
                self.units[below] = Unit(below, "function", stmt, _body(stmt))
            elif isinstance(stmt, ast.ClassDef) and below not in self.units:
                self._collect(below, "class", stmt)
            elif not isinstance(stmt, ast.Import | ast.ImportFrom):
                own.append(stmt)
        self.units[name] = Unit(name, kind, node, _body(node, own))

    def crop(self, unit: Unit) -> str:
        """The unit's own lines, so that an edit is tried on them alone."""
        if isinstance(unit.node, ast.Module):
            return "\n".join(self.text_lines)
        lines = self.text_lines[_first(unit.node) - 1 : unit.node.end_lineno]
        head = "class _:\n" if unit.node.col_offset else ""
        return head + "\n".join(lines) + "\n"

    def text(self, stmts: Sequence[ast.stmt]) -> str:
        """The code of statements that follow one another: without comments and blank lines, at the left margin."""
        if not stmts:
            return ""
        return self._range(_first(stmts[0]), stmts[-1].end_lineno or stmts[-1].lineno)

    def header(self, node: ast.AST) -> str:
        """The lines of a block before its first statement, "" for what has none."""
        body = getattr(node, "body", None)
        if not body or not isinstance(node, ast.stmt) or self.is_one_line(node):
            return ""
        first, below = node.lineno, _first(body[0])  # a docstring, too, is a statement
        return self._range(first, next((at for at in range(below - 1, first, -1) if self._code[at - 1].strip()), first))

    def is_one_line(self, stmt: ast.stmt) -> bool:
        """Whether a block stands on its header's last line: `if x: y`."""
        body = getattr(stmt, "body", None)
        if not body:
            return False
        return self.text_lines[body[0].lineno - 1][: body[0].col_offset].strip() not in ("", "@")

    def _range(self, first: int, last: int) -> str:
        """Lines `first` to `last`, 1-based, both included."""
        margin = re.match(r"[ \t]*", self.text_lines[first - 1])
        indent = margin.group() if margin else ""
        lines = []
        for at in range(first - 1, last):
            if self._inside[at]:
                lines.append(self.text_lines[at])
            elif self._code[at].strip():
                lines.append(self._code[at].removeprefix(indent))
        return "\n".join(lines)


def _without_comments(text: str) -> tuple[list[str], list[bool]]:
    """The lines without comments, and for each whether it starts inside a string."""
    tokens, comments = lex(text, "python")
    parts, at = [], 0
    for comment in comments:
        parts.append(text[at : comment.start].rstrip(" \t"))
        at = comment.end
    parts.append(text[at:])
    inside = [False] * (text.count("\n") + 1)
    for token in tokens:
        if token.kind == "string" and "\n" in text[token.start : token.end]:
            first = text.count("\n", 0, token.start)
            for line in range(first + 1, first + 1 + text.count("\n", token.start, token.end)):
                inside[line] = True
    return "".join(parts).split("\n"), inside


def _first(node: ast.AST) -> int:
    """The 1-based line that a statement starts on, with its decorators."""
    lines = [decorator.lineno for decorator in getattr(node, "decorator_list", [])]
    return min([node.lineno, *lines])  # type: ignore[attr-defined]


def _body(node: Function | ast.ClassDef | ast.Module, own: list[ast.stmt] | None = None) -> list[ast.stmt]:
    stmts = node.body if own is None else own
    return [stmt for stmt in stmts if not (stmt is node.body[0] and _is_text(stmt))]


def _is_text(stmt: ast.stmt) -> bool:
    return isinstance(stmt, ast.Expr) and isinstance(stmt.value, ast.Constant) and isinstance(stmt.value.value, str)


def without_docstring(stmt: ast.stmt) -> ast.stmt:
    """A nested function or class without its docstring; anything else as it is."""
    if isinstance(stmt, Function | ast.ClassDef) and len(stmt.body) > 1 and _is_text(stmt.body[0]):
        bare = {name: getattr(stmt, name) for name in stmt._fields}
        return ast.copy_location(type(stmt)(**{**bare, "body": stmt.body[1:]}), stmt)
    return stmt


def stores(node: ast.AST) -> set[str]:
    """The names that a statement assigns, and the attributes, as `.x`."""
    return {_name(part) for part in ast.walk(node) if isinstance(getattr(part, "ctx", None), ast.Store)} - {""}


def exports(node: ast.AST) -> set[str]:
    """What others can see of it: attributes that it assigns, as `.x`, and keywords that it passes."""
    parts = list(ast.walk(node))
    named = {_name(part) for part in parts if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store)}
    return named | {part.arg for part in parts if isinstance(part, ast.keyword) and part.arg}


def loads(node: ast.AST) -> set[str]:
    """The names and keywords that a statement uses, and the attributes, as `.x`."""
    return {name for part in ast.walk(node) for name in own_loads(part)}


def own_loads(node: ast.AST) -> set[str]:
    """The same of one node, without those below it."""
    if isinstance(node, ast.keyword):
        return {node.arg} if node.arg else set()
    return {_name(node)} - {""} if isinstance(getattr(node, "ctx", None), ast.Load) else set()


def _name(node: ast.AST) -> str:
    if isinstance(node, ast.Subscript):  # kernel[grid](…)
        return _name(node.value) if isinstance(node.ctx, ast.Load) else ""
    return node.id if isinstance(node, ast.Name) else f".{node.attr}" if isinstance(node, ast.Attribute) else ""


def called(call: ast.Call) -> str:
    """The last name of what a call calls, "" if it has none."""
    return _name(call.func).lstrip(".")


def calls(node: ast.AST) -> list[str]:
    """The last names of what a statement calls, the outermost call first."""
    return [name for part in ast.walk(node) if isinstance(part, ast.Call) and (name := called(part))]


def is_guard(stmt: ast.stmt, helpers: Collection[str]) -> bool:
    """Whether a statement does nothing but refuse: an assert, an `if` that raises, a call to a helper that does."""
    if isinstance(stmt, ast.If):
        *first, last = stmt.body
        quiet = all(isinstance(part, ast.Assign | ast.AnnAssign) or is_guard(part, helpers) for part in first)
        return quiet and not stmt.orelse and (isinstance(last, ast.Raise) or is_guard(last, helpers))
    if isinstance(stmt, ast.Expr) and isinstance(stmt.value, ast.Call):
        name = called(stmt.value)
        return name in helpers or bool(_GUARDS.match(name))
    return isinstance(stmt, ast.Assert)


def parameters(function: Function) -> dict[str, str]:
    """A function's parameters, by name, each with its kind and default; annotations don't count."""
    args = function.args
    plain = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(plain) - len(args.defaults)) + [*args.defaults]
    named = [("", arg, default) for arg, default in zip(plain, defaults, strict=True)]
    named += [("*", arg, default) for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    named += [(star, arg, None) for star, arg in (("*args", args.vararg), ("**", args.kwarg)) if arg]
    return {arg.arg: kind + (ast.dump(default) if default else "") for kind, arg, default in named}


def chained(stmt: ast.stmt) -> str:
    """The header of the `elif` of an `if`, which is an `if` of its own that starts in the same column; else ""."""
    below = getattr(stmt, "orelse", [])
    found = isinstance(stmt, ast.If) and len(below) == 1 and isinstance(below[0], ast.If)
    return header_of(below[0]) if found and below[0].col_offset == stmt.col_offset else ""


def header_of(node: ast.AST) -> str:
    """What a block's first line says, without the block."""
    parts = [type(node).__name__]
    for name, value in ast.iter_fields(node):
        if name not in ("body", "orelse", "finalbody", "handlers"):
            values = value if isinstance(value, list) else [value]
            parts += [ast.dump(part) if isinstance(part, ast.AST) else repr(part) for part in values]
    return " ".join(parts)


def kind_of(stmt: ast.stmt) -> str:
    """What two versions of one statement have in common: a block's header, what is assigned, what is called."""
    if hasattr(stmt, "body"):
        return header_of(stmt)
    if isinstance(stmt, ast.Assign | ast.AugAssign | ast.AnnAssign):
        targets = stmt.targets if isinstance(stmt, ast.Assign) else [stmt.target]
        return "=" + ",".join(map(ast.dump, targets))
    if isinstance(stmt, ast.Expr) and isinstance(stmt.value, ast.Call):
        return "()" + called(stmt.value)
    return type(stmt).__name__
