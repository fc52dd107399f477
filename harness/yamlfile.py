"""Reading a YAML file that people write by hand: plain data, each node with its line, and nothing clever in it."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from harness.errors import ToggleError

MAX_BYTES = 1 << 20
MAX_DEPTH = 32
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's is ten times faster


@dataclass
class Node:
    """A file's data, and the 1-based line of every mapping key and list item by its path."""

    path: Path
    value: Any
    lines: dict[tuple[Any, ...], int] = field(default_factory=dict)

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
        return f"{shown(self.path)}:{self.line(*path)}: {where + ': ' if where else ''}{message}"

    def hoist(self, path: tuple[Any, ...], key: str) -> None:
        """Let what is at `path` + `key` be found at `path`, too."""
        below = (*path, key)
        for known, line in list(self.lines.items()):
            if known[: len(below)] == below and known != below:
                self.lines[path + known[len(below) :]] = line


def shown(path: Path) -> str:
    """A path as people write it: below the current directory where it is."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def read(path: Path) -> Node:
    """Read a YAML file. Raises ToggleError for bad YAML and for what a hand-written file has no need of.

    Refused: more than 1 MiB, anchors and aliases, tags, duplicate keys, keys that aren't strings, several documents.
    """
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
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ToggleError(f"{name}:{line}: not UTF-8: byte {data[error.start]:#04x}") from None
    try:
        _check_events(text, name)
        root = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = 1 + (error.problem_mark.line if error.problem_mark is not None else 0)
        raise ToggleError(f"{name}:{line}: not YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ToggleError(f"{name}:1: not YAML: {' '.join(str(error).split())}") from None
    result = Node(path, None, {(): 1})
    if root is not None:
        loader = yaml.SafeLoader("")
        result.value = _data(root, (), result, loader)
    if not isinstance(result.value, dict):
        raise ToggleError(f"{name}:1: must be a mapping with pr, title, fixes")
    return result


def _check_events(text: str, name: str) -> None:
    """Look at the file before any of it is built: nesting and aliases are what a hostile file would use."""
    depth = documents = 0
    for event in yaml.parse(text, Loader=_Loader):
        line = 1 + (event.start_mark.line if event.start_mark is not None else 0)
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise ToggleError(f"{name}:{line}: anchors and aliases aren't allowed: write the value out")
        if (tag := getattr(event, "tag", None)) is not None:
            raise ToggleError(f"{name}:{line}: the tag {tag!a} isn't allowed: write a plain value")
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise ToggleError(f"{name}:{line}: a second document: a toggle file has one")
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
                raise ToggleError(f"{shown(result.path)}:{at}: the key {bad!a} isn't a string: put quotes around it")
            key = key_node.value
            below = (*path, key)
            if key in mapping:
                where = ".".join(str(part) for part in below)
                raise ToggleError(f"{shown(result.path)}:{at}: {where}: already on line {result.lines[below]}")
            result.lines[below] = at
            mapping[key] = _data(value_node, below, result, loader)
        return mapping
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            below = (*path, index)
            result.lines[below] = item.start_mark.line + 1
        return [_data(item, (*path, index), result, loader) for index, item in enumerate(node.value)]
    try:
        return loader.construct_object(node)
    except (ValueError, yaml.YAMLError):
        raise ToggleError(f"{shown(result.path)}:{line}: {str(node.value)[:60]!a} can't be read") from None
