"""Mutants of a module: its text with one small change each.

cosmic-ray makes most of them; its operators are classes over parso's trees, and what it lacks is added here in the same
form. Of its comparisons and sums those are used that a reader could mistake for the right one, in `_CORE`: nearly all
others end in a TypeError. No mutant is one that changes only what a type checker reads (annotations, `X = Literal[…]`,
`frozen=True`), that doesn't compile, or that another operator made, too. The words of a message are left alone: only a
literal that is one word counts as behaviour.
"""

from __future__ import annotations

import ast
import pickle
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator
from parso.python.tree import Keyword, Name, String

_PAIRS = {
    "ReplaceComparisonOperator": (
        *("Eq_NotEq", "NotEq_Eq", "Is_IsNot", "IsNot_Is", "Lt_LtE", "Lt_GtE", "LtE_Lt", "LtE_Gt"),
        *("Gt_GtE", "Gt_LtE", "GtE_Gt", "GtE_Lt"),
    ),
    "ReplaceBinaryOperator": (
        *("Add_Sub", "Sub_Add", "Mul_Add", "Div_Mul", "FloorDiv_Mul", "Mod_FloorDiv", "Pow_Mul"),
        *("LShift_RShift", "RShift_LShift", "BitOr_BitAnd", "BitAnd_BitOr", "BitXor_BitOr"),
    ),
    "ReplaceUnaryOperator": ("Delete_USub", "Delete_Invert", "Delete_Not"),
}
_CORE = (
    *(f"{name}_{pair}" for name, pairs in _PAIRS.items() for pair in pairs),
    *("AddNot", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "ReplaceAndWithOr", "ReplaceOrWithAnd"),
    *("ReplaceBreakWithContinue", "ReplaceContinueWithBreak", "ExceptionReplacer", "NumberReplacer"),
    *("RemoveDecorator", "ZeroIterationForLoop"),
)
_WORD = re.compile(r"""[rb]*(['"])(?P<word>[^\s'"{}]+)\1""")


@dataclass(frozen=True)
class Mutant:
    """One changed text. A line's text, the operator and the count name it, wherever the line moves to."""

    module: str
    line: int
    text: str  # of the line that the change begins on, without its indent
    operator: str  # and which of several like it on lines of this very text: `NumberReplacer 2`
    becomes: str  # that line, changed
    source: str  # of the whole module

    @property
    def key(self) -> tuple[str, str, str]:
        return self.module, self.text, self.operator


class _Own(Operator):
    """An operator that makes one change at a node that it fits."""

    def fits(self, node: Any) -> bool:
        raise NotImplementedError

    def mutation_positions(self, node: Any) -> Iterable[Any]:
        return [(node.start_pos, node.end_pos)] if self.fits(node) else []

    @classmethod
    def examples(cls) -> Iterable[Any]:
        return ()


class DeleteStatement(_Own):
    """`x.append(1)` -> `pass`: calls, assignments, raise, del; what returns, imports or leaves a loop has its own."""

    TYPES = ("expr_stmt", "atom_expr", "raise_stmt", "del_stmt", "assert_stmt", "yield_expr")

    def fits(self, node: Any) -> bool:
        return node.type in self.TYPES and node.parent.type == "simple_stmt"

    def mutate(self, node: Any, index: int) -> Any:
        return Name("pass", node.start_pos, node.get_first_leaf().prefix)


class ReturnNothing(_Own):
    """`return x` -> `return None`."""

    def fits(self, node: Any) -> bool:
        return node.type == "return_stmt" and node.children[1].get_code().strip() != "None"

    def mutate(self, node: Any, index: int) -> Any:
        node.children[1:] = [Name("None", node.start_pos, " ")]
        return node


class SwapIn(_Own):
    """`in` -> `not in`, and back."""

    def fits(self, node: Any) -> bool:
        return node.type == "comparison" and self._word(node) in ("in", "not in")

    def mutate(self, node: Any, index: int) -> Any:
        node.children[1] = Name({"in": "not in", "not in": "in"}[self._word(node)], node.start_pos, " ")
        return node

    @staticmethod
    def _word(node: Any) -> str:
        return " ".join(node.children[1].get_code().split())


class NegateFilter(_Own):
    """`for x in y if x` -> `for x in y if not (x)`."""

    def fits(self, node: Any) -> bool:
        return node.type == "comp_if"

    def mutate(self, node: Any, index: int) -> Any:
        node.children[1] = Name(f"not ({node.children[1].get_code().strip()})", node.start_pos, " ")
        return node


class ChangeWord(_Own):
    """`"hung"` -> `"XXhung"`: a literal that is one word; a sentence is for a reader."""

    def fits(self, node: Any) -> bool:
        return isinstance(node, String) and _WORD.fullmatch(node.value) is not None

    def mutate(self, node: Any, index: int) -> Any:
        at = node.value.index(node.value[-1]) + 1
        return String(f"{node.value[:at]}XX{node.value[at:]}", node.start_pos, node.prefix)


class DropOperand(_Own):
    """`a and b` -> `a`: the last operand of an `and` or an `or` goes."""

    def fits(self, node: Any) -> bool:
        return node.type in ("and_test", "or_test") and isinstance(node.children[-2], Keyword)

    def mutate(self, node: Any, index: int) -> Any:
        del node.children[-2:]
        return node


_OWN = (DeleteStatement, ReturnNothing, SwapIn, NegateFilter, ChangeWord, DropOperand)


def mutants(module: str, source: str) -> Iterator[Mutant]:
    """All mutants of a module's text, in order of line."""
    found = sorted(_made(source), key=lambda each: each[:2])
    seen = {_meaning(source)}
    lines, counts = source.splitlines(), Counter[tuple[str, str]]()
    for (line, _), name, changed in found:
        text = lines[line - 1].strip()
        counts[text, name] += 1
        meaning = _meaning(changed)
        if meaning is None or meaning in seen:
            continue
        seen.add(meaning)
        becomes = changed.splitlines()[line - 1].strip() if changed else ""
        yield Mutant(module, line, text, f"{name} {counts[text, name]}", becomes, changed)


def _made(source: str) -> Iterator[tuple[tuple[int, int], str, str]]:
    operators = [(name, get_operator(f"core/{name}")()) for name in _CORE]
    operators += [(operator.__name__, operator()) for operator in _OWN]
    tree = get_ast(source)
    packed = pickle.dumps(tree)  # unpacked once a mutant, which takes a tenth of the time that parsing does
    for index, node in enumerate(ast_nodes(tree)):
        for name, operator in operators:
            for at, (start, _) in enumerate(list(operator.mutation_positions(node))):
                copy = pickle.loads(packed)
                yield start, name, _changed(copy, next(islice(ast_nodes(copy), index, None)), operator, at)


def _changed(tree: Any, node: Any, operator: Operator, at: int) -> str:
    """The text of a tree once an operator has made the ``at``-th of its mutations at a node."""
    siblings = node.parent.children
    put = operator.mutate(node, at)
    if put is not node:
        siblings[siblings.index(node)] = put
        siblings[:] = [each for each in siblings if each is not None]
    text: str = tree.get_code()
    return text


def _meaning(source: str) -> str | None:
    """What two texts have in common that do the same: the tree, without types. None: it doesn't compile."""
    try:
        tree = ast.parse(source)
        compile(tree, "<mutant>", "exec")
    except SyntaxError:
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            node.returns = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
        elif isinstance(node, ast.Call):
            node.keywords = [each for each in node.keywords if each.arg != "frozen"]
    tree.body = [ast.Pass() if _is_a_type(each) else each for each in tree.body]
    return ast.dump(tree)


def _is_a_type(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Subscript)
