"""Reading a YAML file that people write by hand: plain data, each node with its line, and nothing clever in it."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from harness import plain
from harness.errors import ToggleError

MAX_BYTES = 1 << 20
MAX_DEPTH = 32
MAX_NODES = 20_000  # the largest file of ours has 1,176
MAX_TEXT = 1 << 16  # characters of one value
_MAX_NUMBER = 100  # characters of one that is no text: Python takes its time over long numbers
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's is ten times faster


@dataclass
class Node:
    """A file's data, and the 1-based line of every mapping key and list item by its path."""

    path: Path
    value: Any
    lines: dict[tuple[Any, ...], int] = field(default_factory=dict)
    name: str = ""  # what errors call the file

    def line(self, *path: Any) -> int:
        """The line of the node at this path, or of the nearest one above it that the file has."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)

    def known_path(self, path: Sequence[Any]) -> tuple[Any, ...]:
        """As much of a path as the file has, from the top."""
        known: tuple[Any, ...] = ()
        for part in path:
            if (*known, part) in self.lines:
                known = (*known, part)
        return known

    def error(self, path: Sequence[Any], message: str) -> str:
        """One line: file, line, dotted path, message."""
        where = ".".join(str(part) for part in path)
        return f"{self.name or shown(self.path)}:{self.line(*path)}: {where + ': ' if where else ''}{message}"

    def hoist(self, paths: Collection[tuple[Any, ...]], key: str) -> None:
        """Let what is at each path + `key` be found at the path, too."""
        lengths = {len(path) for path in paths}
        for known, line in list(self.lines.items()):
            for length in lengths:
                if len(known) > length + 1 and known[length] == key and known[:length] in paths:
                    self.lines[known[:length] + known[length + 1 :]] = line


def shown(path: Path) -> str:
    """A path as people write it: below the current directory where it is, on one line whatever it is called."""
    relative = os.path.relpath(path)
    return plain.one_line(str(path) if relative.startswith("..") else relative)


def read(path: Path) -> Node:
    """Read a YAML file, a mapping. Raises ToggleError as `text_of` and `parse` do."""
    name = shown(path)
    result = parse(text_of(path), name, path)
    if not isinstance(result.value, dict):
        raise ToggleError(f"{name}:1: must be a mapping with pr, title, fixes")
    return result


def text_of(path: Path) -> str:
    """A file's text. Raises ToggleError for one that can't be read, isn't UTF-8 or is larger than 1 MiB."""
    name = shown(path)
    try:
        # a pipe that nobody writes to would hold an open without O_NONBLOCK for ever
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                raise ToggleError(f"{name}:1: isn't a regular file")
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise ToggleError(f"{name}:1: can't be read: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        raise ToggleError(f"{name}:1: larger than {MAX_BYTES} bytes")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ToggleError(f"{name}:{line}: not UTF-8: byte {data[error.start]:#04x}") from None


def parse(text: str, name: str, path: Path = Path()) -> Node:
    """Plain data from YAML; `name` is what errors call it. Raises ToggleError, `name:line: …`.

    Refused is bad YAML, and what nobody writes by hand: more than 1 MiB, 32 levels, 20,000 values or 65,536 characters
    in one; anchors and aliases, tags, duplicate keys, keys that aren't strings, several documents; characters that no
    reader sees, such as control characters and those that change the direction of text.
    """
    if len(text) > MAX_BYTES:
        raise ToggleError(f"{name}:1: larger than {MAX_BYTES} bytes")
    try:
        _check_events(text, name)
        root = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = 1 + (error.problem_mark.line if error.problem_mark is not None else 0)
        raise ToggleError(f"{name}:{line}: not YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        at = getattr(error, "position", 0)  # libyaml's, in bytes
        line = 1 + text.encode().count(b"\n", 0, at if isinstance(at, int) else 0)
        raise ToggleError(f"{name}:{line}: not YAML: {str(error).partition(chr(10))[0]}") from None
    for number, written in enumerate(text.removeprefix("\ufeff").split("\n"), 1):
        if hidden := plain.hidden(written.removesuffix("\r")):  # in a comment, too: a reviewer reads another file
            raise ToggleError(f"{name}:{number}: the character {hidden!a} can't be seen: write what can")
    result = Node(path, None, {(): 1}, name)
    if root is not None:
        loader = yaml.SafeLoader("")
        result.value = _data(root, (), result, loader)
    return result


def _check_events(text: str, name: str) -> None:
    """Look at the file before any of it is built: nesting and aliases are what a hostile file would use."""
    depth = documents = nodes = 0
    for event in yaml.parse(text, Loader=_Loader):
        line = 1 + (event.start_mark.line if event.start_mark is not None else 0)
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise ToggleError(f"{name}:{line}: anchors and aliases aren't allowed: write the value out")
        if (tag := getattr(event, "tag", None)) is not None:
            raise ToggleError(f"{name}:{line}: the tag {tag[:60]!a} isn't allowed: write a plain value")
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise ToggleError(f"{name}:{line}: a second document: a toggle file has one")
        nodes += isinstance(event, yaml.NodeEvent)
        if nodes > MAX_NODES:
            raise ToggleError(f"{name}:{line}: more than {MAX_NODES} values")
        if isinstance(event, yaml.ScalarEvent):
            if len(event.value) > MAX_TEXT:
                raise ToggleError(f"{name}:{line}: a value of more than {MAX_TEXT} characters")
            if hidden := plain.hidden(event.value):
                raise ToggleError(f"{name}:{line}: the character {hidden!a} can't be seen: write what can")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise ToggleError(f"{name}:{line}: nested deeper than {MAX_DEPTH} levels")


def _data(node: yaml.Node, path: tuple[Any, ...], result: Node, loader: yaml.SafeLoader) -> Any:
    line = node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            at = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != "tag:yaml.org,2002:str":
                bad = str(getattr(key_node, "value", ""))[:60]
                raise ToggleError(f"{result.name}:{at}: the key {bad!a} isn't a string: put quotes around it")
            key = key_node.value
            below = (*path, key)
            if key in mapping:
                where = ".".join(str(part) for part in below)
                raise ToggleError(f"{result.name}:{at}: {where}: already on line {result.lines[below]}")
            result.lines[below] = at
            mapping[key] = _data(value_node, below, result, loader)
        return mapping
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            below = (*path, index)
            result.lines[below] = item.start_mark.line + 1
        return [_data(item, (*path, index), result, loader) for index, item in enumerate(node.value)]
    try:
        if node.tag != "tag:yaml.org,2002:str" and len(node.value) > _MAX_NUMBER:
            raise ValueError(node.value)
        return loader.construct_object(node)
    except (ValueError, OverflowError, yaml.YAMLError):
        raise ToggleError(f"{result.name}:{line}: {str(node.value)[:60]!a} can't be read") from None
