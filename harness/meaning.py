"""What a source says, without how it looks: does it say anything, and do two of them say the same?"""

from __future__ import annotations

import ast
import warnings

from harness.tokens import Language, Token, lex

_PARTNER = {")": "(", "]": "[", "}": "{"}

Meaning = ast.Module | list[tuple[str, str]]


def parse(source: str, *, compiles: bool = False) -> ast.Module:
    """A Python source's tree. Raises SyntaxError for whatever is none; `compiles`: or can't be compiled."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
            if compiles:
                compile(tree, "<edited>", "exec", dont_inherit=True)
    except SyntaxError:
        raise
    except (ValueError, RecursionError, MemoryError) as error:  # NUL, a lone surrogate; nested too deep
        raise SyntaxError(str(error) if isinstance(error, ValueError) else "nested too deep") from None
    return tree


def read(source: str, language: Language, *, compiles: bool = False) -> Meaning:
    """For `same`. Raises SyntaxError as `parse` does; of a C-like source nothing is asked."""
    return words(source, language) if language == "c" else parse(source, compiles=compiles)


def says(source: str, language: Language, other: Meaning) -> bool:
    """Whether a source says what another one does; one that can't be parsed says nothing."""
    try:
        return same(read(source, language), other)
    except SyntaxError:
        return False


def same(one: Meaning, other: Meaning) -> bool:
    """Whether two texts of one language say the same. Stops at the first difference."""
    if not isinstance(one, ast.Module):
        return one == other
    left: list[tuple[object, object]] = [(one, other)]
    while left:
        mine, theirs = left.pop()
        if type(mine) is not type(theirs):
            return False
        if isinstance(mine, ast.AST):
            left += [(getattr(mine, field, None), getattr(theirs, field, None)) for field in mine._fields]
        elif isinstance(mine, list) and isinstance(theirs, list):
            if len(mine) != len(theirs):
                return False
            left += zip(mine, theirs, strict=True)
        elif mine is not theirs and repr(mine) != repr(theirs):  # 0.0 is not -0.0
            return False
    return True


def words(source: str, language: Language) -> list[tuple[str, str]]:
    """The tokens, but for those that change nothing."""
    return [token.key for token in lex(source, language).tokens if not token.optional]


def unbalanced(source: str) -> str | None:
    """The first bracket of a C-like source that has no partner, with its line."""
    open_at: list[Token] = []
    for token in lex(source, "c").tokens:
        if token.kind == "op" and token.text in ("(", "[", "{"):
            open_at.append(token)
        elif (
            token.kind == "op"
            and token.text in _PARTNER
            and (not open_at or open_at.pop().text != _PARTNER[token.text])
        ):
            return f"`{token.text}` on line {source.count(chr(10), 0, token.start) + 1}"
    return f"`{open_at[-1].text}` on line {source.count(chr(10), 0, open_at[-1].start) + 1}" if open_at else None


def brackets(source: str) -> list[int]:
    """Of each kind, how many more a C-like source opens than it closes."""
    texts = [token.text for token in lex(source, "c").tokens if token.kind == "op"]
    return [texts.count(opening) - texts.count(closing) for closing, opening in _PARTNER.items()]
