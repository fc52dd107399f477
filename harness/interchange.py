"""SGLang's own format of a revert (`sglang/srt/debug_utils/source_patcher`), to and from ours.

Theirs is a YAML of `patches`, each a function with edits. Its patcher compares whole lines, without their indentation,
edit after edit; compiles the function's new text by itself; and gives the living function that code. So it can't say
what is outside of a function, nor change a decorated one, one that uses `super()` or private names, or what isn't
Python: `export` refuses these. It starts from what an overlay has, not from our snippets, which need not be whole
lines; each function is patched once, since a second patch would start from the file again; and every entry is tried,
by the rules above, before it is handed out.
"""

from __future__ import annotations

import ast
import difflib
import json
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pydantic import TypeAdapter, ValidationError

from harness import meaning, plain, yamlfile
from harness.edits import Edit, Reversal
from harness.errors import ToggleError, UnfixError
from harness.overlay import EditedFile, Plan
from harness.togglefile import ReversalEntry

_PATCHES = TypeAdapter(list[ReversalEntry])
_MODES = ("replacement", "prepend", "append")
_Function = ast.FunctionDef | ast.AsyncFunctionDef


class NotSayableError(UnfixError):
    """SGLang's patcher can't do this."""


@dataclass
class _Hunk:
    """Lines `start` to `stop` of the old text become `new_start` to `new_stop` of the new one."""

    start: int
    stop: int
    new_start: int
    new_stop: int


def export(plan: Plan) -> str:
    """What a plan amounts to, in SGLang's format. Raises NotSayableError, naming the place, where that can't say it."""
    patches = [patch for edited in plan.values() for patch in _patches(edited)]
    return "patches:\n" + as_yaml(patches, "  ")


def as_yaml(patches: Sequence[Reversal], indent: str) -> str:
    """The items of a list of `target` and `edits`, as both formats write them."""
    lines = []
    for patch in patches:
        lines += [f"{indent}- target: {patch.target}", f"{indent}  edits:"]
        for edit in patch.edits:
            lines += _scalar(f"{indent}    - match:", edit.match, f"{indent}        ")
            [(mode, text)] = [(mode, text) for mode in _MODES if (text := getattr(edit, mode)) is not None]
            lines += _scalar(f"{indent}      {mode}:", text, f"{indent}        ")
    return "".join(f"{line}\n" for line in lines)


def parse(text: str, name: str) -> tuple[Reversal, ...]:
    """The patches of one entry in SGLang's format; `name` is what errors call it. Raises ToggleError."""
    data = yamlfile.parse(text, name).value
    try:
        patches = [_without_blanks(patch) for patch in data["patches"]]
        entries = _PATCHES.validate_python(patches)
    except (ValidationError, KeyError, TypeError, AttributeError) as error:
        raise ToggleError(f"{name}: not YAML with patches: {' '.join(str(error).split())[:200]}") from None
    return tuple(
        Reversal("imported", entry.target, tuple(Edit(**edit.model_dump()) for edit in entry.edits))
        for entry in entries
    )


def toggle_file(pr: str, patches: Sequence[Reversal], origin: str) -> str:
    """A toggle file with one fix, `imported`. What SGLang's format doesn't say is left to be filled in."""
    title = f"Imported from {plain.one_line(origin)}; say here what the bug was"
    return (
        "# yaml-language-server: $schema=schema.json\n"
        f"pr: {pr}\n"
        f"title: {title if re.fullmatch('[`.;, a-zA-Z0-9_-]+', title) else json.dumps(title)}\n"
        f"links:\n  - https://github.com/sgl-project/sglang/pull/{pr}\n"
        "fixes:\n"
        "  imported:\n"
        "    kind: arithmetic  # or size, guard, config\n"
        "    summary: Say here what holds with the fix in.\n"
        f"    reversals:\n      sglang:\n{as_yaml(patches, ' ' * 8)}"
    )


def _without_blanks(patch: dict) -> dict:  # type: ignore[type-arg]
    """Theirs leaves modes out that it doesn't use, or blank; a match alone is a deletion."""
    edits = []
    for edit in patch["edits"]:
        modes = {mode: edit[mode] for mode in _MODES if str(edit.get(mode) or "").strip()}
        edits.append({**{key: edit[key] for key in edit if key not in _MODES}, **(modes or {"replacement": ""})})
    return {**patch, "edits": edits}


def _scalar(key: str, text: str, indent: str) -> list[str]:
    """A block of lines where YAML can hold the text as one, else a string in double quotes."""
    body = textwrap.dedent(text).strip("\n")
    if not body.strip() or body[0].isspace() or set(body) & set("\t\r\x0b\x0c"):
        return [f"{key} {json.dumps(body if body.strip() else '')}"]
    return [f"{key} |", *(f"{indent}{line}" if line.strip() else "" for line in body.split("\n"))]


def _patches(edited: EditedFile) -> Iterator[Reversal]:
    """A patch for each function of a file that an overlay changes."""
    where = edited.relpath.as_posix()
    if edited.relpath.suffix != ".py":
        raise NotSayableError(f"{where}: SGLang's patcher takes Python functions only")
    old, new = (data.decode("utf-8").replace("\r\n", "\n") for data in (edited.old, edited.new))
    before, after = _functions(old), _functions(new)
    rest, module = old.splitlines(), ".".join(edited.relpath.with_suffix("").parts).removesuffix(".__init__")
    changed = [name for name, node in before.items() if name in after and _text(old, node) != _text(new, after[name])]
    for name in sorted(changed, key=lambda name: -before[name].lineno):
        first, last = _span(before[name])
        rest[first - 1 : last] = _text(new, after[name])
    if not changed or rest != new.splitlines():
        raise NotSayableError(f"{where}: the change isn't within a function, and SGLang's patcher takes nothing else")
    for name in changed:
        for node in (before[name], after[name]):
            _check(node, f"{where}:{node.lineno}: {name}", in_class="." in name)
        edits = _edits(_text(old, before[name]), _text(new, after[name]))
        if not _same(_applied(_text(old, before[name]), edits), _text(new, after[name])):
            raise NotSayableError(f"{where}:{before[name].lineno}: {name}: SGLang's patcher can't be told this change")
        yield Reversal(", ".join(edited.fixes), f"{module}.{name}", tuple(edits))


def _functions(text: str) -> dict[str, _Function]:
    """The functions and methods of a module that SGLang's patcher finds by name, which no function encloses."""
    found: dict[str, _Function] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, _Function):
                found[prefix + child.name] = child  # the last of a name is the one that is there
            elif isinstance(child, ast.ClassDef):
                visit(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.stmt | ast.excepthandler):
                visit(child, prefix)

    visit(meaning.parse(text), "")
    return found


def _span(node: _Function) -> tuple[int, int]:
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    return first, node.end_lineno or first


def _text(source: str, node: _Function) -> list[str]:
    first, last = _span(node)
    return source.splitlines()[first - 1 : last]


def _check(node: _Function, where: str, in_class: bool) -> None:
    if node.decorator_list:
        raise NotSayableError(f"{where}: decorated, and SGLang's patcher would change the wrapper")
    names = [each.id for each in ast.walk(node) if isinstance(each, ast.Name)]
    members = [each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)]
    if in_class and {"super", "__class__"} & set(names):
        raise NotSayableError(f"{where}: uses super(), which SGLang's patcher can't compile outside of its class")
    if in_class and any(each.startswith("__") and not each.endswith("__") for each in names + members):
        raise NotSayableError(f"{where}: uses a private name, which SGLang's patcher compiles outside of its class")


def _edits(old: list[str], new: list[str]) -> list[Edit]:
    """Edits of whole lines that turn `old` into `new`, each unambiguous once those before it are made."""
    codes = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    hunks = [_Hunk(i, j, k, n) for tag, i, j, k, n in codes if tag != "equal"]
    at = 0
    while at < len(hunks):
        hunk = hunks[at]
        if _stands(hunk, old, new):
            at += 1
            continue
        if hunk.start:  # upwards first: a line that is less indented is there
            hunk.start, hunk.new_start = hunk.start - 1, hunk.new_start - 1
        elif hunk.stop < len(old):
            hunk.stop, hunk.new_stop = hunk.stop + 1, hunk.new_stop + 1
        else:
            break  # the whole function: trying it will say why it can't be done
        if at and hunk.start < hunks[at - 1].stop:
            hunks[at - 1 : at + 1] = [_Hunk(hunks[at - 1].start, hunk.stop, hunks[at - 1].new_start, hunk.new_stop)]
            at -= 1
        elif at + 1 < len(hunks) and hunk.stop > hunks[at + 1].start:
            hunks[at : at + 2] = [_Hunk(hunk.start, hunks[at + 1].stop, hunk.new_start, hunks[at + 1].new_stop)]
    return [
        Edit(_dedented(old[hunk.start : hunk.stop]), replacement=_dedented(new[hunk.new_start : hunk.new_stop]))
        for hunk in hunks
    ]


def _stands(hunk: _Hunk, old: list[str], new: list[str]) -> bool:
    """Whether a hunk says by itself where it belongs and how it is indented."""
    match, replacement = old[hunk.start : hunk.stop], new[hunk.new_start : hunk.new_stop]
    if not match or not match[0].strip() or not match[-1].strip():
        return False
    if replacement:
        if not replacement[0].strip() or not replacement[-1].strip():
            return False
        base = _indent(replacement[0])
        if base != _indent(match[0]) or any(_indent(line) < base for line in replacement if line.strip()):
            return False
    current = new[: hunk.new_start] + old[hunk.start :]
    return len(_places(current, match)) == 1


def _places(lines: Sequence[str], match: Sequence[str]) -> list[int]:
    stripped, wanted = [line.strip() for line in lines], [line.strip() for line in match]
    return [at for at in range(len(stripped) - len(wanted) + 1) if stripped[at : at + len(wanted)] == wanted]


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _dedented(lines: Sequence[str]) -> str:
    cut = _indent(lines[0]) if lines else 0
    return "\n".join(line[min(cut, _indent(line)) :] if line.strip() else "" for line in lines)


def _applied(lines: list[str], edits: Sequence[Edit]) -> list[str]:
    """What SGLang's patcher makes of a function's lines."""
    for edit in edits:
        match = edit.match.splitlines()
        if len(places := _places(lines, match)) != 1:
            return []
        pad = " " * _indent(lines[places[0]])
        made = [pad + line if line.strip() else "" for line in (edit.replacement or "").splitlines()]
        lines = lines[: places[0]] + made + lines[places[0] + len(match) :]
    return lines


def _same(got: list[str], want: list[str]) -> bool:
    try:
        return ast.dump(ast.parse(textwrap.dedent("\n".join(got)))) == ast.dump(
            ast.parse(textwrap.dedent("\n".join(want)))
        )
    except SyntaxError:
        return False
