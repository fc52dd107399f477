"""What a drafted fix is called and what it says of itself, from the code that it changes."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence

from harness.changes import Piece
from harness.pysource import calls, loads, stores
from harness.snippets import shorten

_ALLOCATES = {"zeros", "empty", "full", "ones", "new_zeros", "new_empty", "new_full", "resize_", "bytearray", "malloc"}
_PREFIX = re.compile(r"^_*(assert|check|ensure|require|validate|verify|refuse|guard)_+")
_MEASURES = {"numel", "size", "shape", "dim", "item", "max", "min", "sum"}
_LONGEST = 40  # characters of a name, and of what a guard says


def name_of(pieces: Sequence[Piece], target: str, factor: str) -> str:
    """`topk-factor`, `buffer-fits-assert`, `positions-add-moved`, `cache-loc-added`, …"""
    guards = [piece.guard for piece in pieces if piece.guard]
    if guards and len(pieces) == len(guards):
        return _kebab(_guarded(guards[0])) + "-assert"
    if factor:
        return f"{_kebab(factor)}-factor"
    olds, news = ({ast.dump(stmt) for stmt in stmts} for stmts in _sides(pieces))
    main = next((piece for piece in pieces if piece.old), pieces[0])
    if moved := olds & news:
        stmt = next(stmt for piece in pieces for stmt in piece.new if ast.dump(stmt) in moved)
        return _kebab(_subject(stmt)) + "-moved"
    stmts = main.new or main.old
    subject = _subject(stmts[0]) if stmts else main.where or re.sub(r".*[/.](?=\w+\.\w+$)|\.\w+$", "", target)
    what = "removed" if olds and not news else "changed"
    if (news and not olds) or all(piece.edit.replacement == "" for piece in pieces):
        what = "added"
    return _kebab(subject or target.rpartition(".")[2]) + f"-{what}"


def kind_of(pieces: Sequence[Piece]) -> str:
    """`size` for what changes an allocation, else `arithmetic`."""
    called = {name for stmts in _sides(pieces) for stmt in stmts for name in calls(stmt)}
    return "size" if called & _ALLOCATES else "arithmetic"


def factor(pieces: Sequence[Piece]) -> str:
    """The one name by which new code has more than old code, where what it computes is a product; else ""."""
    olds, news = _sides(pieces)
    if not olds or not news:
        return ""
    then, now = (set().union(*map(loads, stmts)) for stmts in (olds, news))
    helpers = {dotted for stmt in news for name in calls(stmt) for dotted in (name, f".{name}")}
    more = now - then - helpers - set().union(*map(stores, news))
    product = any(isinstance(node, ast.Mult) for stmt in olds for node in ast.walk(stmt))
    return more.pop().lstrip(".") if product and len(more) == 1 else ""


def summary_of(pieces: Sequence[Piece], target: str, factor: str) -> str:
    where = ".".join(target.split(".")[-2:]) if "/" not in target else pieces[0].where or target.rpartition("/")[2]
    if len(pieces) == 1 and pieces[0].guard:
        return f"{where} refuses what fails {_short(pieces[0].guard)}."
    olds, news = ({ast.dump(stmt): stmt for stmt in stmts} for stmts in _sides(pieces))
    if moved := [stmt for key, stmt in news.items() if key in olds]:
        return f"{where} has {_short(ast.unparse(moved[0]))} elsewhere than it had."
    main = next((piece for piece in pieces if piece.edit.replacement), pieces[0])
    new, old = _short(main.edit.match), main.edit.replacement
    if old is None:
        return f"{where} no longer has {_short(main.edit.prepend or main.edit.append or '')} beside {new}."
    said = f"{where} has {new}" + (f"; it had {_short(old)}." if old else ", which wasn't there.")
    return f"The {factor} factor: {said}" if factor else said


def guard_of(code: str, helpers: Mapping[str, str]) -> str:
    """A regular expression for what a guard's error says: the longest text in it, or in the helper that it calls."""
    if code.rstrip().endswith(";"):  # C++: the compiler's own words
        inside = code[code.index("(") + 1 : code.rindex(")")]
        return "Assertion .*" + _escaped(" ".join(inside.split())[: 2 * _LONGEST])
    stmt = ast.parse(code).body[0]
    helper = helpers.get(next(iter(calls(stmt)), "")) if isinstance(stmt, ast.Expr) else None
    said = _longest(stmt) or (_longest(ast.parse(helper).body[0]) if helper else "")
    return _escaped(said) if said else "AssertionError"


def _longest(stmt: ast.stmt) -> str:
    if isinstance(stmt, ast.If):
        return _longest(stmt.body[-1])
    shown = (stmt.msg or ast.Constant("")) if isinstance(stmt, ast.Assert) else stmt
    texts = [node.value for node in ast.walk(shown) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    line = max((line.strip() for text in texts for line in text.splitlines()), key=len, default="")
    return (
        line if len(line) <= _LONGEST else line[: line.rfind(" ", 0, _LONGEST) if " " in line[:_LONGEST] else _LONGEST]
    )


def _escaped(text: str) -> str:
    return re.sub(r"([\\.^$*+?{}\[\]|()])", r"\\\1", text)


def _guarded(code: str) -> str:
    """What a guard is about: `index` of `assert index < n`, `buffer_fits` of `assert_buffer_fits(…)`."""
    if code.rstrip().endswith(";"):
        names = re.findall(r"[A-Za-z_]\w*", code[code.index("(") :])
        return names[0] if names else "value"
    stmt = ast.parse(code).body[0]
    while isinstance(stmt, ast.If) and not isinstance(stmt.body[-1], ast.Raise):
        stmt = stmt.body[-1]
    if isinstance(stmt, ast.Expr):
        return _PREFIX.sub("", calls(stmt)[0])
    test = stmt.test if isinstance(stmt, ast.Assert | ast.If) else stmt
    if re.search(r"2 ?\*\* ?3[12]|2147483647|1 ?<< ?31|int32", ast.unparse(test)):
        return "int32"
    return _first_name(test)


def _first_name(node: ast.AST) -> str:
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and part.attr not in _MEASURES:
            return part.attr
        if isinstance(part, ast.Name) and part.id not in ("self", "len", "int", "all", "any", "isinstance"):
            return part.id
    return "value"


def _subject(stmt: ast.stmt) -> str:
    if names := sorted(stores(stmt)):
        return names[-1].lstrip(".")
    if isinstance(stmt, ast.Expr) and isinstance(stmt.value, ast.Call):
        func = stmt.value.func
        owner = func.value if isinstance(func, ast.Attribute) else None
        prefix = owner.attr if isinstance(owner, ast.Attribute) else owner.id if isinstance(owner, ast.Name) else ""
        return "_".join(part for part in (prefix, calls(stmt)[0] if calls(stmt) else "") if part not in ("", "self"))
    return _first_name(stmt)


def _kebab(name: str) -> str:
    words = [word for word in re.split(r"[^a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name).lower()) if word]
    while len(words) > 1 and len("-".join(words)) > _LONGEST:
        words.pop(0)
    return "-".join(words) or "code"


def _short(code: str) -> str:
    return shorten(code, 70).replace("`", "'")


def _sides(pieces: Sequence[Piece]) -> tuple[list[ast.stmt], list[ast.stmt]]:
    """The statements that stood there, and those that stand there."""
    return [stmt for piece in pieces for stmt in piece.old], [stmt for piece in pieces for stmt in piece.new]
