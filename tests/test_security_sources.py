"""What is never written in the sources: a shell, a reader that believes what it reads, text that is run."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

SOURCES = [file for name in ("harness", "kernels", "regressions") for file in sorted((ROOT / name).rglob("*.py"))]
NEVER = re.compile(
    r"(yaml\.(load|safe_load|full_load|unsafe_load|load_all|FullLoader|UnsafeLoader)|os\.(system|popen)"
    r"|subprocess\.(getoutput|getstatusoutput)|(pickle|marshal|shelve|dill)\.loads?|pty\.spawn|eval|exec"
    r"|(shutil\.unpack_archive|tarfile\.open|\w+\.extractall))"
)


def dangers(text: str) -> list[str]:
    """Calls that run text, or believe what they read."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            shell = any(each.arg == "shell" for each in node.keywords)
            found += [f"{node.lineno}: {name}"] if NEVER.fullmatch(name) or shell else []
    return found


def test_no_source_runs_text_or_believes_what_it_reads():
    assert len(SOURCES) > 100
    assert {str(file.relative_to(ROOT)): found for file in SOURCES if (found := dangers(file.read_text()))} == {}


@pytest.mark.parametrize(
    "line", ["yaml.load(x)", "yaml.safe_load(x)", "os.system(x)", "run(x, shell=flag)", "eval(x)", "z.extractall(d)"]
)
def test_such_a_call_would_be_seen(line):
    assert dangers(f"x = {line}") == [f"1: {line.partition('(')[0]}"]
