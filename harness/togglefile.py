"""The shape of a toggle file: one YAML file a PR, its fixes, how each is undone and what its absence must show."""

from __future__ import annotations

import difflib
import re
import sys
import warnings
from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)

from harness.errors import ToggleError, UsageError
from harness.snippets import Pattern
from harness.targets import check_target
from harness.tokens import language_of
from harness.yamlfile import Node

_MOST = 50  # of a file's mistakes are looked at, of which the first ten are told
Outcome = Literal["clean", "guarded", "overflow", "wrong", "crashed", "hung", "error"]
# What runs and judges the code under test: changed there, a fix could be said to be anything.
_NEVER = sys.stdlib_module_names | {"harness", "regressions", "sitecustomize", "usercustomize"}
Kind = Literal["size", "guard", "arithmetic", "config"]
Device = Literal["cpu", "cuda"]


def _regex(text: str) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # what a later Python will read otherwise
            re.compile(text)
    except (re.error, Warning, OverflowError, RecursionError) as error:
        raise ValueError(f"not a regular expression: {error}") from None
    return text


def _target(text: str) -> str:
    try:
        check_target(text)
    except UsageError as error:
        raise ValueError(str(error)) from None
    if (top := re.split("[./]", text, maxsplit=1)[0]) in _NEVER:
        raise ValueError(f"target {text!a} must be in a package under test, and never in {top}")
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


class FormEntry(_Model):
    """One way that a code base's sources read, by name, with the patches that turn them."""

    name: Line
    patches: Annotated[list[ReversalEntry], Field(min_length=1)]


class FormsEntry(_Model):
    """A code base whose sources read differently from release to release. Exactly one form applies to a source tree."""

    variants: list[FormEntry] = Field(
        [],
        description="How sources that have the fix read: each form's patches take the fix out. No version number"
        " decides which form it is, only the text: all of its patches apply. A form that only replaces (no empty"
        " replacement, no prepend, no append) is tried backwards, too: where what it would write is what stands there,"
        " the fix isn't in.",
    )
    unfixed: list[FormEntry] = Field(
        [],
        description="How sources that lack the fix read: each form's patches put it in (`--apply`). Every edit is a"
        " match with a replacement that isn't empty. For a guard, which leaves nothing behind where it is missing, the"
        " match spans the place where the guard belongs: the statement before it and the one after it, adjacent. So"
        " code with the guard in other words is rotted, and never taken for code without it. Only `unfixed`, no"
        " variants: not fixed in any release so far.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> FormsEntry:
        if not self.variants and not self.unfixed:
            raise ValueError("give variants (how the fix reads), unfixed (how its absence reads), or both")
        names = [form.name for form in (*self.variants, *self.unfixed)]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two forms are called {twice[0]!r}: errors name forms, so give each a name of its own")
        for index, form in enumerate(self.unfixed):
            for at, patch in enumerate(form.patches):
                if not all(_writes_code(edit, patch.target) for edit in patch.edits):
                    where = f"unfixed.{index}.patches.{at}.edits"
                    raise ValueError(f"{where}: must be match with a replacement that has code in it")
        return self


def _writes_code(edit: EditEntry, target: str) -> bool:
    language = language_of(target) if "/" in target else None
    return edit.replacement is not None and bool(Pattern.of(edit.replacement, language or "python").tokens)


# Named by what it says in errors; `_place` takes them out of paths.
_TAGS = ("list", "forms")


def _tag(value: Any) -> str:
    return "forms" if isinstance(value, dict | FormsEntry) else "list"


Reversals = Annotated[
    Annotated[list[ReversalEntry], Field(min_length=1), Tag("list")] | Annotated[FormsEntry, Tag("forms")],
    Discriminator(_tag),
]


class LegEntry(_Model):
    """What a run with these fixes out must show, on an input that tells fix on from fix off."""

    out: Annotated[list[FixName], Field(min_length=1)]
    outcome: Outcome | Annotated[dict[Device, Outcome], Field(json_schema_extra={"minProperties": 2})]
    reason: Regex | None = None

    @field_validator("outcome")
    @classmethod
    def _every_device(cls, outcome: Outcome | dict[Device, Outcome]) -> Outcome | dict[Device, Outcome]:
        if isinstance(outcome, dict) and (missing := [name for name in get_args(Device) if name not in outcome]):
            raise ValueError(f"says nothing for {' and '.join(missing)}: give cpu and cuda, or one outcome for both")
        return outcome

    def outcome_on(self, device: str) -> Outcome:
        """The outcome declared for `cpu` or `cuda`."""
        if isinstance(self.outcome, dict):
            return self.outcome[device]  # type: ignore[index]
        return self.outcome


class FixEntry(_Model):
    """One named change that a PR made."""

    kind: Kind
    summary: Line
    scenario: Identifier | None = Field(None, description="regressions/scenarios/<name>.py shows it.")
    backend: Identifier | None = None
    guard: Regex | None = Field(None, description="Guards: what the error says, in the exception's text or on stderr.")
    legs: list[LegEntry] = []
    reversals: Annotated[dict[Identifier, Reversals], Field(min_length=1)]

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
    [(pattern, either)] = reversals.pop("patternProperties").items()
    listed, forms = either["oneOf"]
    upstream = {
        "type": "object",
        "properties": {"patches": listed},
        "required": ["patches"],
        "additionalProperties": False,
    }
    reversals["patternProperties"] = {pattern: {"anyOf": [listed, upstream, forms]}}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **result}


def validate(root: Node) -> ToggleFile:
    """Check a file's data. Raises ToggleError, a line for each thing that is wrong, in the file's order."""
    _hoist_patches(root)
    try:
        file = ToggleFile.model_validate(root.value)
    except ValidationError as error:
        # the first ones of a file that may have thousands: explaining each takes its time
        first = sorted(map(dict, error.errors()), key=lambda item: root.line(*root.known_path(_place(item))))[:_MOST]
        found = sorted({_explain(root, item) for item in first})
        raise ToggleError("\n".join(root.error(path, message) for _, path, message in found[:10])) from None
    if root.path.stem != str(file.pr):
        raise ToggleError(root.error(("pr",), f"{file.pr} is in {root.path.name}: the file must be {file.pr}.yaml"))
    return file


def _hoist_patches(root: Node) -> None:
    """Take upstream's own shape, {patches: [{target, edits}]}, for a list of reversals."""
    fixes = root.value.get("fixes") if isinstance(root.value, dict) else None
    hoisted = set()
    for name, fix in fixes.items() if isinstance(fixes, dict) else ():
        reversals: Any = fix.get("reversals") if isinstance(fix, dict) else None
        for code_base, listed in reversals.items() if isinstance(reversals, dict) else ():
            if isinstance(listed, dict) and list(listed) == ["patches"]:
                reversals[code_base] = listed["patches"]
                hoisted.add(("fixes", name, "reversals", code_base))
    root.hoist(hoisted, "patches")


def _place(item: dict[str, Any]) -> tuple[str | int, ...]:
    return tuple(part for at, part in enumerate(item["loc"]) if at != 4 or part not in _TAGS)


def _explain(root: Node, item: dict[str, Any]) -> tuple[int, tuple[str | int, ...], str]:
    """The line, the path and the message of one of pydantic's errors, in the words of a toggle file."""
    loc = _place(item)
    path = root.known_path(loc)
    kind, message = item["type"], str(item["msg"]).removeprefix("Value error, ")
    name = loc[-1] if loc else ""
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
        if len(names) > 4 and names[4] in ("variants", "unfixed"):
            return ReversalEntry if "patches" in names else FormEntry
        return FormsEntry if isinstance(path[-1], str) else ReversalEntry
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
    "patches": "a list of target and edits",
    "name": "what this form is called in errors",
    "target": "pkg.mod.Class.method, pkg.mod, or pkg/csrc/file.cuh",
    "edits": "a list of match with replacement, prepend or append",
    "match": "the code to find",
}


def _describe(path: Sequence[str | int]) -> str:
    return _WHAT.get(str(path[-1]), "see toggles/schema.json")
