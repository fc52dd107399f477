"""What each test took and which lines of a module it ran, and what follows for a change of one of these lines."""

from __future__ import annotations

import ast
import math

Ran = dict[str, tuple[float, list[int]]]  # a test ("": none) -> its seconds, and the module's lines that it ran


def nearest(line: int, ran: Ran) -> dict[str, float]:
    """The tests in the order in which they may tell that a line is wrong, each with the seconds that it may take.

    Those that ran the line come first, then those that ran a line near it (of a statement on several lines only the
    first may count as run, and what a module runs as it is imported counts for no test); of these the quickest.
    """

    def rank(test: str) -> tuple[float, float]:
        seconds, lines = ran[test]
        return min((abs(line - each) for each in lines), default=math.inf), seconds

    return {test: 20 + 5 * ran[test][0] for test in sorted(filter(None, ran), key=rank)}


def never_run(source: str, ran: Ran) -> set[int]:
    """The lines in functions that run in no test and on no import: nothing can tell that one of them is wrong."""
    running = {line for _, lines in ran.values() for line in lines}
    found: set[int] = set()
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for node in (each for statement in function.body for each in ast.walk(statement)):
                if isinstance(node, (ast.stmt, ast.ExceptHandler)):  # of a statement with a body, what is ahead of it
                    body: list[ast.stmt] = getattr(node, "body", [])
                    lines = set(range(node.lineno, body[0].lineno if body else (node.end_lineno or node.lineno) + 1))
                    found |= lines if not lines & running else set()
    return found
