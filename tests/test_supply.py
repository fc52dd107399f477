"""What unfix is made of, and what is made of it: the versions that it needs, and its wheel beside other packages."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))
import supply  # noqa: E402

RUNS = supply.load()
PAGE = (ROOT / "docs/dependencies.md").read_text()
PARTS = {"harness": ROOT / "harness", "eagle_kv": ROOT / "kernels/eagle_kv"}
# imported by its own name, installed as a part of another
COMES_WITH = {"markupsafe": "jinja2", "markdown_it": "rich", "pluggy": "pytest"}
NAMES = {"yaml": "pyyaml", "tvm_ffi": "apache-tvm-ffi", "xdist": "pytest-xdist"}
# what is under test, what the extra `gpu` has, and what a run can do without
NOT_HERE = {"sglang", "flashinfer", "cuda", "aiter"}


def bounds() -> dict[str, str]:
    """Of pyproject.toml's own text, which an installed copy may be older than: ``{"torch": "2.10"}``."""
    listed = re.search(r"^dependencies = \[.*?\n(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.S | re.M)
    assert listed
    found = [Requirement(line) for line in re.findall(r'"(.*)"', listed[1])]
    assert all(len(each.specifier) == 1 and str(each.specifier).startswith(">=") for each in found), "bounds from below"
    return {each.name: str(each.specifier)[2:] for each in found}


def sources() -> Iterator[str]:
    """What must be in the wheel, as it is called there."""
    for name, folder in PARTS.items():
        for file in folder.rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts:
                yield f"{name}/{file.relative_to(folder).as_posix()}"


def built(tree: Path, kind: str, into: Path) -> Path:
    """The file that pip would get from the build backend; nothing is fetched. ``kind``: sdist or wheel."""
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(into)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "would be ignored" not in done.stderr, done.stderr
    return into / done.stdout.splitlines()[-1]


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as packed:
        return {name: packed.read(name) for name in packed.namelist()}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkout, as setuptools finds it."""
    copy = tmp_path_factory.mktemp("supply") / "tree"
    for name in ("harness", "kernels", "regressions", "toggles", "tests", "docs", "benchmarks"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("conftest.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "Makefile"):
        shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(tree: Path) -> Path:
    return built(tree, "wheel", tree.parent)


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """A folder of packages: the wheel, and one called `kernels`, like Hugging Face's."""
    site = wheel.parent / "site"
    quiet = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([sys.executable, "-m", "pip", "install", *quiet, "--target", str(site), str(wheel)], check=True)
    (site / "kernels").mkdir()
    (site / "kernels/__init__.py").write_text("def get_kernel(): ...\n")
    return site


def test_the_wheel_has_every_file_of_the_packages_and_nothing_else(wheel):
    found = {name for name in contents(wheel) if not name.startswith("unfix-0.1.0.dist-info/")}
    assert found == set(sources())
    assert {"eagle_kv/csrc/store_kvcache.cuh", "harness/report.html.j2", "harness/stubs/import_stub.py"} < found


def test_the_wheel_says_what_it_needs(wheel):
    text = contents(wheel)["unfix-0.1.0.dist-info/METADATA"].decode()
    needs = [Requirement(line) for line in re.findall("^Requires-Dist: (.*)$", text, re.M)]
    assert {each.name: str(each.specifier)[2:] for each in needs if "extra" not in str(each.marker)} == bounds()
    assert "Requires-Python: >=3.10\n" in text and "License-Expression: Apache-2.0\n" in text
    [script] = re.findall('^unfix = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert f"unfix = {script}\n" in contents(wheel)["unfix-0.1.0.dist-info/entry_points.txt"].decode()
    assert set(contents(wheel)["unfix-0.1.0.dist-info/top_level.txt"].split()) == {b"harness", b"eagle_kv"}


def test_the_source_distribution_has_no_tests_and_makes_the_same_wheel(tree, wheel, tmp_path):
    with tarfile.open(built(tree, "sdist", tmp_path)) as packed:
        packed.extractall(tmp_path)
    [unpacked] = [folder for folder in tmp_path.iterdir() if folder.is_dir()]
    assert not (unpacked / "tests").exists()
    again, first = contents(built(unpacked, "wheel", tmp_path)), contents(wheel)
    assert set(again) == set(first)
    listed = "unfix-0.1.0.dist-info/RECORD"  # one order or another
    assert {name for name in first if first[name] != again[name]} <= {listed}
    assert sorted(first[listed].splitlines()) == sorted(again[listed].splitlines())


IMPORTS = "import kernels, eagle_kv, harness; print(kernels.__file__, eagle_kv.__file__, harness.__file__, sep='\\n')"


@pytest.mark.parametrize("where", ["a checkout", "elsewhere"])
def test_beside_the_kernels_package_each_is_itself(installed, tmp_path, where):
    """In a checkout its folder `kernels/` is in front, which has to stay without an `__init__.py`."""
    path, cwd, ours = [], tmp_path, [installed, installed]
    if where == "a checkout":
        path, cwd, ours = [ROOT, ROOT / "kernels"], ROOT, [ROOT / "kernels", ROOT]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*path, installed]))}
    done = subprocess.run([sys.executable, "-c", IMPORTS], cwd=cwd, env=env, capture_output=True, text=True, check=True)
    names = zip([installed, *ours], ("kernels", "eagle_kv", "harness"), strict=True)
    assert done.stdout.splitlines() == [str(folder / name / "__init__.py") for folder, name in names]


@pytest.mark.network
def test_beside_hugging_faces_own_package(wheel, tmp_path):
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target"]
    subprocess.run([*pip, str(tmp_path), "kernels"], check=True)
    subprocess.run([*pip, str(tmp_path), "--no-deps", str(wheel)], check=True)
    code = IMPORTS + "; kernels.get_kernel"
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd="/", env=env, capture_output=True, text=True, check=True)
    names = ("kernels", "eagle_kv", "harness")
    assert done.stdout.splitlines() == [str(tmp_path / name / "__init__.py") for name in names]


@pytest.mark.parametrize("words", ["list", "run", "check", "exec --revert 27338 -- true"])
def test_outside_of_a_checkout_it_says_what_it_needs_in_one_line(installed, tmp_path, words):
    env = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, str(installed / "bin/unfix"), *words.split()]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    needs = f"unfix: no toggles/ and regressions/ in {tmp_path} or above: run unfix inside its checkout\n"
    assert done.stderr == needs


def test_what_is_imported_is_declared_and_what_is_declared_is_used():
    used: set[str] = set()
    folders = [ROOT / name for name in ("harness", "kernels", "regressions", "tests")]
    for file in [file for folder in folders for file in folder.rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                used |= {each.name.partition(".")[0] for each in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                used.add(node.module.partition(".")[0])
    ours = {"harness", "eagle_kv", "regressions", "tests"} | {file.stem for file in (ROOT / "benchmarks").glob("*.py")}
    used -= set(sys.stdlib_module_names) | NOT_HERE | ours
    assert "torch" in used and "markdown_it" in used
    assert {COMES_WITH.get(name, NAMES.get(name, name)) for name in used} == set(bounds())


def test_the_lowest_versions_are_those_that_the_suite_passed_with():
    pins = [Requirement(line) for line in (ROOT / "constraints-lowest.txt").read_text().splitlines() if line[0] != "#"]
    pinned = {each.name.lower(): Version(str(each.specifier)[2:]) for each in pins}
    assert pinned == {name: Version(low) for name, low in bounds().items()}
    assert pinned == {name: Version(Version(supply.tried(name, RUNS)[0]).base_version) for name in pinned}


def test_the_promised_versions_were_tried():
    promised = {"python": ["3.10", "3.11", "3.12", "3.13"], "pytest": ["8", "9"], "triton": ["3.6", "3.9"]}
    for name, versions in promised.items():
        found = supply.tried(name, RUNS)
        for version in versions:
            assert any(f"{each}.".startswith(f"{version}.") for each in found), (name, version)


def test_no_recorded_run_failed():
    assert RUNS and not [each for each in RUNS if each["failed"] or not each["passed"]]


@pytest.mark.parametrize("name", bounds())
def test_the_page_tells_each_dependency(name):
    [row] = re.findall(rf"^\| {re.escape(name)} \|(.*)\|$", PAGE, re.M)
    why, low, lowest, newest, licence = (cell.strip() for cell in row.split("|"))
    found = supply.tried(name, RUNS)
    assert (low, lowest, newest) == (bounds()[name], found[0], found[-1])
    assert len(why.split()) > 3 and licence


def test_the_page_tells_each_run():
    assert supply.page(RUNS) in PAGE
