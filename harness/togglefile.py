"""The shape of a toggle file: one YAML file a PR, its fixes, how each is undone and what its absence must show."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from harness.errors import ToggleError, UsageError
from harness.snippets import Pattern
from harness.targets import check_target
from harness.tokens import language_of
from harness.yamlfile import Node

Outcome = Literal["clean", "guarded", "overflow", "wrong", "crashed", "hung", "error"]
Kind = Literal["size", "guard", "arithmetic", "config"]
Device = Literal["cpu", "cuda"]


def _regex(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from None
    return text


def _target(text: str) -> str:
    try:
        check_target(text)
    except UsageError as error:
        raise ValueError(str(error)) from None
    return text


Regex = Annotated[str, StringConstraints(min_length=1), AfterValidator(_regex)]
Target = Annotated[str, AfterValidator(_target)]
Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]
Identifier = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*$")]
Line = Annotated[str, StringConstraints(pattern=r"^[^\r\n]*\S[^\r\n]*$")]
Link = Annotated[str, StringConstraints(pattern=r"^https://\S+$")]
FixName = Annotated[str, StringConstraints(pattern=r"^((\d+|own):)?[a-z0-9]+(-[a-z0-9]+)*$")]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class EditEntry(_Model):
    """What to find, and exactly one of what replaces it ("" deletes it) or which lines go before or after it."""

    match: str
    replacement: str | None = None
    prepend: str | None = None
    append: str | None = None

    @model_validator(mode="after")
    def _one(self) -> EditEntry:
        if sum(text is not None for text in (self.replacement, self.prepend, self.append)) != 1:
            raise ValueError('give exactly one of replacement ("" deletes), prepend, append')
        return self


class ReversalEntry(_Model):
    """Where one fix is undone: `pkg.mod.Class.method`, `pkg.mod`, or `pkg/csrc/file.cuh`."""

    target: Target
    edits: Annotated[list[EditEntry], Field(min_length=1)]
    entered_by: Target | None = Field(
        None, description="Non-Python targets: the Python function that is entered once the built library is loaded."
    )

    @model_validator(mode="after")
    def _consistent(self) -> ReversalEntry:
        language = language_of(self.target) if "/" in self.target else "python"
        if language == "c" and self.entered_by is None:
            raise ValueError("a file that isn't Python needs entered_by, the Python function that loads its build")
        for index, edit in enumerate(self.edits):
            if not Pattern.of(edit.match, language or "python").tokens:
                raise ValueError(f"edits.{index}.match has no code in it, only blanks or comments")
        return self


class LegEntry(_Model):
    """What a run with these fixes out must show, on an input that tells fix on from fix off."""

    out: Annotated[list[FixName], Field(min_length=1)]
    outcome: Outcome | dict[Device, Outcome]
    reason: Regex | None = None

    def outcome_on(self, device: str) -> Outcome | None:
        """The outcome declared for `cpu` or `cuda`; None where none is."""
        if isinstance(self.outcome, dict):
            return self.outcome.get(device)  # type: ignore[call-overload]
        return self.outcome


class FixEntry(_Model):
    """One named change that a PR made."""

    kind: Kind
    summary: Line
    scenario: Identifier | None = Field(None, description="regressions/scenarios/<name>.py shows it.")
    backend: Identifier | None = None
    guard: Regex | None = Field(None, description="Guards: what the error says, in the exception's text or on stderr.")
    legs: list[LegEntry] = []
    reversals: Annotated[dict[Identifier, Annotated[list[ReversalEntry], Field(min_length=1)]], Field(min_length=1)]

    @model_validator(mode="after")
    def _consistent(self) -> FixEntry:
        if self.kind == "guard" and self.guard is None:
            raise ValueError("kind guard needs guard, a regular expression for what its error says")
        if self.scenario is not None and not self.legs:
            raise ValueError("a fix with a scenario needs legs: what its absence shows there")
        if self.legs and self.scenario is None:
            raise ValueError("legs need a scenario to run")
        return self


class ToggleFile(_Model):
    """A PR and its fixes."""

    pr: Annotated[int, Field(ge=1)] | Literal["own"]
    title: Line
    links: list[Link] = []
    fixes: Annotated[dict[Name, FixEntry], Field(min_length=1)]


def schema() -> dict[str, Any]:
    """The JSON Schema of a toggle file."""
    result = ToggleFile.model_json_schema()
    reversals = result["$defs"]["FixEntry"]["properties"]["reversals"]
    result["properties"]["fixes"]["additionalProperties"] = False
    reversals["additionalProperties"] = False
    [(pattern, listed)] = reversals.pop("patternProperties").items()
    upstream = {
        "type": "object",
        "properties": {"patches": listed},
        "required": ["patches"],
        "additionalProperties": False,
    }
    reversals["patternProperties"] = {pattern: {"anyOf": [listed, upstream]}}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **result}


def validate(root: Node) -> ToggleFile:
    """Check a file's data. Raises ToggleError, a line for each thing that is wrong, in the file's order."""
    _hoist_patches(root)
    try:
        file = ToggleFile.model_validate(root.value)
    except ValidationError as error:
        found = sorted({_explain(root, dict(item)) for item in error.errors()})
        raise ToggleError("\n".join(root.error(path, message) for _, path, message in found[:10])) from None
    if root.path.stem != str(file.pr):
        raise ToggleError(root.error(("pr",), f"{file.pr} is in {root.path.name}: the file must be {file.pr}.yaml"))
    return file


def _hoist_patches(root: Node) -> None:
    """Take upstream's own shape, {patches: [{target, edits}]}, for a list of reversals."""
    fixes = root.value.get("fixes") if isinstance(root.value, dict) else None
    for name, fix in fixes.items() if isinstance(fixes, dict) else ():
        reversals: Any = fix.get("reversals") if isinstance(fix, dict) else None
        for code_base, listed in reversals.items() if isinstance(reversals, dict) else ():
            if isinstance(listed, dict) and list(listed) == ["patches"]:
                reversals[code_base] = listed["patches"]
                root.hoist(("fixes", name, "reversals", code_base), "patches")


def _explain(root: Node, item: dict[str, Any]) -> tuple[int, tuple[str | int, ...], str]:
    """The line, the path and the message of one of pydantic's errors, in the words of a toggle file."""
    path = root.known_path(item["loc"])
    kind, message = item["type"], str(item["msg"]).removeprefix("Value error, ")
    name = item["loc"][-1] if item["loc"] else ""
    if kind == "missing":
        path = (*path, name)
        message = f"field required ({_describe(path)})"
    elif kind == "extra_forbidden":
        known = _known_keys(path[:-1])
        near = difflib.get_close_matches(str(name), known, 1, 0.4)
        message = f"unknown key{f', did you mean {near[0]}?' if near else ''} (known: {', '.join(known)})"
    elif kind == "string_pattern_mismatch":
        message = f"{str(item['input'])[:60]!a} must match {item['ctx']['pattern']}"
    else:
        if str(path[-1:]).find("outcome") > 0 and kind in ("literal_error", "dict_type"):
            message = f"must be {_WHAT['outcome']}, or a mapping of cpu and cuda to those"
        message = message.replace("Input should", "value should")
        if kind != "value_error" and isinstance(item["input"], str | int | float | None):
            message += f", not {str(item['input'])[:60]!a}"
    return root.line(*path), path, message


def _model_at(path: Sequence[str | int]) -> type[_Model]:
    names = [part for part in path if isinstance(part, str)]
    if "edits" in names:
        return EditEntry
    if len(names) > 3 and names[2] == "reversals":
        return ReversalEntry
    if len(names) > 2 and names[2] == "legs":
        return LegEntry
    return FixEntry if len(names) > 1 and names[0] == "fixes" else ToggleFile


def _known_keys(path: Sequence[str | int]) -> list[str]:
    return list(_model_at(path).model_fields)


_WHAT = {
    "pr": "the PR's number, or own",
    "title": "one line",
    "fixes": "a mapping of names to fixes",
    "kind": "size, guard, arithmetic or config",
    "summary": "one sentence",
    "out": "a list of the fixes that are out",
    "outcome": "clean, guarded, overflow, wrong, crashed, hung or error",
    "reversals": "a mapping of code bases, such as eagle_kv, to lists of target and edits",
    "target": "pkg.mod.Class.method, pkg.mod, or pkg/csrc/file.cuh",
    "edits": "a list of match with replacement, prepend or append",
    "match": "the code to find",
}


def _describe(path: Sequence[str | int]) -> str:
    return _WHAT.get(str(path[-1]), "see toggles/schema.json")
