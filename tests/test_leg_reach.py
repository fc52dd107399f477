"""Legs and the reach-proof: an overlay's target is reached when, and only when, the overlay's own code is entered."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness import overlay
from harness.edits import Edit, Reversal
from harness.reach import Target
from harness.sandbox import Request
from harness.targets import locate

MOD = """
import asyncio
import contextlib
import ctypes
import functools
import os

LIMIT = 8


def decorate(function):
    @functools.wraps(function)
    def inner(*args):
        return function(*args)

    return inner


def plain():
    return "fixed"


def other():
    return plain


class Box:
    size = 4

    def method(self):
        return "fixed"

    @staticmethod
    def static():
        return "fixed"

    @classmethod
    def made(cls):
        return "fixed"

    @property
    def prop(self):
        return "got"

    @prop.setter
    def prop(self, value):
        self.value = "fixed"

    @functools.cached_property
    def lazily(self):
        return "fixed"

    def __private(self):
        return "fixed"

    def calls_private(self):
        return self.__private()

    class Inner:
        def method(self):
            return "fixed"


class Twin:
    def method(self):
        return "twin"


def outer():
    def nested():
        return "fixed"

    return nested


@decorate
@functools.lru_cache
def decorated():
    return "fixed"


async def waited():
    return "fixed"


def generated():
    yield "fixed"


@contextlib.contextmanager
def managed():
    yield "fixed"


if os.sep == "/":

    def chosen():
        return "fixed"

else:

    def chosen():
        return None


def dies():
    return ctypes.string_at(0 if "fixed" else 1)
"""
KERNEL = """
import torch
import triton
import triton.language as tl


@triton.jit
def fill(out, count: tl.constexpr):
    at = tl.arange(0, count)
    tl.store(out + at, at + 1)


def launch():
    out = torch.zeros(8, dtype=torch.int32)
    fill[(1,)](out, 8)
    return out.tolist()
"""
LOADER = '''
import ctypes
import hashlib
import pathlib
import json
import os
import shutil
import signal
import subprocess
import sys

SOURCE = pathlib.Path(__file__).parent / "csrc" / "answer.cpp"


def build(where):
    """Compiled beside a copy of its source, and once, as the store kernel's build is."""
    folder = pathlib.Path(where, hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16])
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(SOURCE, folder / SOURCE.name)
    library = folder / "answer.so"
    if not library.exists():
        subprocess.run(["g++", "-shared", "-fPIC", "-o", str(library), str(folder / SOURCE.name)], check=True)
    return str(library)


def call(library):
    return library.answer()
'''
LEGS = '''
import asyncio, ctypes, importlib, importlib.util, sys

def evaluates(params, device):
    """What a test's own expressions make of the package."""
    from reachpkg import mod
    value = eval(params["code"], {"mod": mod, "asyncio": asyncio})
    return {"value": str(value), "file": mod.__file__}

def imports(params, device):
    for name in params["modules"]: importlib.import_module(name)

def original(params, device):
    """The module comes from another place than the overlay."""
    spec = importlib.util.spec_from_file_location("reachpkg.mod", params["file"])
    module = sys.modules["reachpkg.mod"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {"value": eval(params["code"], {"mod": module})}

def launches(params, device):
    from reachpkg import kernel
    return {"value": kernel.launch() if params["launch"] else None}

def enters(params, device):
    from reachpkg import loader
    if params["load"] == "by name":
        open_already = ctypes.CDLL(None)
        open_already.answer = lambda: 0
        ctypes.CDLL(loader.build(params["where"]), handle=open_already._handle)
        return {"value": loader.call(open_already)}
    if params["load"]:
        library = ctypes.CDLL(loader.build(params["where"]))
        return {"value": loader.call(library) if params["call"] else None}
    class Fake:
        def answer(self): return 0
    return {"value": loader.call(Fake())}
'''


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("source")
    for name, text in {
        "reachpkg/__init__.py": "",
        "reachpkg/mod.py": MOD,
        "reachpkg/beside.py": "import reachpkg.mod\n",
        "reachpkg/kernel.py": KERNEL,
        "reachpkg/loader.py": LOADER,
        "reachpkg/csrc/answer.cpp": 'extern "C" int answer() { return 42; }\n',
        "unfix_test_reach_legs.py": LEGS,
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def enter(source, sandbox, tmp_path, monkeypatch):
    """Run a leg on an overlay in which ``edits`` were made: which of their targets were reached, and its ending."""
    monkeypatch.setenv("UNFIX_CACHE", str(tmp_path / "cache"))

    def enter(entry, params, edits, entered_by=None):
        reversals = [Reversal("1:x", target, (edit,), entered_by) for target, edit in edits.items()]
        tree = overlay.build(overlay.plan(reversals, [source]))
        targets = []
        for reversal in reversals:
            place = locate(reversal.target, [source])
            file = str(tree / place.relpath)
            targets.append(Target(reversal.target, file, place.module or None, place.qualname, reversal.entered_by))
        path = [str(tree), str(source)]
        request = Request(f"unfix_test_reach_legs:{entry}", params, path=path, targets=targets)
        ending = sandbox.run(request)
        # a process that legs share proves the same of each
        assert [set(sandbox.run(request, shared=True).reached) for _ in range(2)] == [set(ending.reached)] * 2
        return set(ending.reached), ending

    return enter


BROKEN = Edit('return "fixed"', 'return "broken"')
# target below reachpkg.mod -> an edit, code that enters it, its value, code that comes close
CALLS = {
    "plain": (BROKEN, "mod.plain()", "broken", "mod.other()"),
    "Box.method": (BROKEN, "mod.Box().method()", "broken", "mod.Twin().method(), mod.Box.Inner().method()"),
    "Box.Inner.method": (BROKEN, "mod.Box.Inner().method()", "broken", "mod.Box().method(), mod.Twin().method()"),
    "Box.static": (BROKEN, "mod.Box.static()", "broken", "mod.Box.static"),
    "Box.made": (BROKEN, "mod.Box.made()", "broken", "mod.Box.made"),
    "Box.prop": (Edit('return "got"', 'return "broken"'), "mod.Box().prop", "broken", "mod.Box.prop"),
    "Box.lazily": (BROKEN, "mod.Box().lazily", "broken", "mod.Box()"),
    "Box.__private": (BROKEN, "mod.Box().calls_private()", "broken", "mod.Box().calls_private"),
    "outer.nested": (BROKEN, "mod.outer()()", "broken", "mod.outer()"),
    "decorated": (BROKEN, "mod.decorated()", "broken", "mod.decorate(len)([1])"),
    "waited": (BROKEN, "asyncio.run(mod.waited())", "broken", "mod.waited"),
    "generated": (Edit('yield "fixed"', 'yield "broken"'), "list(mod.generated())[0]", "broken", "mod.generated"),
    "managed": (Edit('yield "fixed"', 'yield "broken"'), "mod.managed().__enter__()", "broken", "mod.managed"),
    "chosen": (BROKEN, "mod.chosen()", "broken", "mod.chosen"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_function_is_reached_when_it_is_entered(name, enter):
    edit, call, value, near = CALLS[name]
    target = f"reachpkg.mod.{name}"
    reached, ending = enter("evaluates", {"code": call}, {target: edit})
    assert ending.report["raised"] is None
    assert ending.report["facts"]["value"] == value
    assert "/overlays/" in ending.report["facts"]["file"]
    assert reached == {target}
    reached, ending = enter("evaluates", {"code": near}, {target: edit})
    assert ending.report["raised"] is None
    assert reached == set()


def test_a_property_is_reached_by_its_setter_too(enter):
    edit = Edit('self.value = "fixed"', 'self.value = "broken"')
    code = "[box := mod.Box(), setattr(box, 'prop', 1), box.value][-1]"
    reached, ending = enter("evaluates", {"code": code}, {"reachpkg.mod.Box.prop": edit})
    assert (reached, ending.report["facts"]["value"]) == ({"reachpkg.mod.Box.prop"}, "broken")


BODIES = {"reachpkg.mod": Edit("LIMIT = 8", "LIMIT = 1"), "reachpkg.mod.Box": Edit("size = 4", "size = 1")}


@pytest.mark.parametrize("target", BODIES)
@pytest.mark.parametrize(("modules", "loads"), [(["reachpkg.beside"], True), (["reachpkg.kernel"], False)])
def test_a_body_is_reached_when_its_module_is_loaded(target, modules, loads, enter):
    reached, ending = enter("imports", {"modules": modules}, {target: BODIES[target]})
    assert ending.report["raised"] is None
    assert reached == ({target} if loads else set())


@pytest.mark.parametrize("target", BODIES)
def test_a_body_is_reached_even_if_the_leg_dies_of_it(target, enter):
    reached, ending = enter("evaluates", {"code": "mod.dies()"}, {target: BODIES[target]})
    assert ending.signal == "SIGSEGV"
    assert reached == {target}


def test_a_function_that_kills_its_process_is_reached(enter):
    edit = Edit('0 if "fixed"', '0 if "broken"')
    reached, ending = enter("evaluates", {"code": "mod.dies()"}, {"reachpkg.mod.dies": edit})
    assert ending.signal == "SIGSEGV" and "in dies" in ending.stderr
    assert reached == {"reachpkg.mod.dies"}


@pytest.mark.parametrize("target", ["reachpkg.mod.plain", "reachpkg.mod"])
def test_a_module_from_elsewhere_is_not_the_overlay_s(target, enter, source):
    edit = BODIES.get(target, BROKEN)
    params = {"code": "mod.plain()", "file": str(source / "reachpkg/mod.py")}
    reached, ending = enter("original", params, {target: edit})
    assert ending.report["facts"]["value"] == "fixed"
    assert reached == set()


def test_each_of_several_targets_counts_for_itself(enter):
    edits = {f"reachpkg.mod.{name}": BROKEN for name in ("plain", "Box.method", "Box.made")}
    reached, _ = enter("evaluates", {"code": "mod.plain(), mod.Box.made()"}, edits)
    assert reached == {"reachpkg.mod.plain", "reachpkg.mod.Box.made"}
    reached, _ = enter("evaluates", {"code": "[mod.plain() for _ in range(3)], mod.Box().method()"}, edits)
    assert reached == {"reachpkg.mod.plain", "reachpkg.mod.Box.method"}


@pytest.mark.parametrize("launch", [True, False])
def test_a_kernel_is_reached_when_it_is_launched(launch, enter):
    target = "reachpkg.kernel.fill"
    reached, ending = enter("launches", {"launch": launch}, {target: Edit("at + 1", "at + 2")})
    assert ending.report["raised"] is None
    assert ending.report["facts"]["value"] == (list(range(2, 10)) if launch else None)
    assert reached == ({target} if launch else set())


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
class TestLibrary:
    """A file that Python does not import: its build must be loaded, and the function that calls it entered."""

    TARGET = "reachpkg/csrc/answer.cpp"

    @pytest.mark.parametrize(
        ("params", "value"),
        [
            ({"load": True, "call": True}, 41),
            ({"load": True, "call": False}, None),
            ({"load": False}, 0),
        ],
    )
    def test_it_takes_both(self, params, value, enter, tmp_path):
        edits = {self.TARGET: Edit("return 42;", "return 41;")}
        params = {**params, "where": str(tmp_path / "build")}
        reached, ending = enter("enters", params, edits, entered_by="reachpkg.loader.call")
        assert ending.report["facts"]["value"] == value
        assert reached == ({self.TARGET} if value == 41 else set())

    def test_what_another_leg_loaded_is_not_it(self, enter, sandbox, tmp_path):
        """In a process that legs share, the library stays mapped."""
        edits = {self.TARGET: Edit("return 42;", "return 41;")}
        params = {"load": True, "call": True, "where": str(tmp_path / "build")}
        assert enter("enters", params, edits, entered_by="reachpkg.loader.call")[0] == {self.TARGET}
        assert enter("enters", {"load": False}, edits, entered_by="reachpkg.loader.call")[0] == set()
        assert enter("enters", params, edits, entered_by="reachpkg.loader.call")[0] == {self.TARGET}
        params["load"] = "by name"
        assert enter("enters", params, edits, entered_by="reachpkg.loader.call")[0] == set()

    def test_it_may_lie_behind_a_link(self, enter, tmp_path):
        (tmp_path / "real").mkdir()
        (tmp_path / "link").symlink_to("real")
        edits = {self.TARGET: Edit("return 42;", "return 41;")}
        params = {"load": True, "call": True, "where": str(tmp_path / "link")}
        assert enter("enters", params, edits, entered_by="reachpkg.loader.call")[0] == {self.TARGET}

    def test_another_build_of_the_source_is_not_it(self, enter, source, tmp_path):
        """The library of the unedited source, mapped and called, says nothing about the edited one."""
        built = tmp_path / "original"
        built.mkdir()
        shutil.copy(source / self.TARGET, built / "answer.cpp")
        command = ["g++", "-shared", "-fPIC", "-o", "answer.so", "answer.cpp"]
        subprocess.run(command, cwd=built, check=True)
        edits = {self.TARGET: Edit("return 42;", "return 41;")}
        code = f"__import__('reachpkg.loader').loader.call(__import__('ctypes').CDLL({str(built / 'answer.so')!r}))"
        reached, ending = enter("evaluates", {"code": code}, edits, entered_by="reachpkg.loader.call")
        assert ending.report["facts"]["value"] == "42"
        assert reached == set()


def test_the_trace_ends_with_the_leg():
    import sys

    from harness.reach import Reach

    before = sys.gettrace()
    try:
        with Reach([Target("a.b", __file__, "a", "test_the_trace_ends_with_the_leg")], lambda name: None):
            assert sys.gettrace() is not None
        assert sys.gettrace() is None
        with Reach([], lambda name: None):
            assert sys.gettrace() is None
    finally:
        sys.settrace(before)


def test_a_handler_that_a_library_left_does_not_end_a_leg_by_another_signal(root, tmp_path):
    """As tvm-ffi leaves one for SIGSEGV, which prints a trace and may abort over a broken heap."""
    (tmp_path / "faults.py").write_text("import ctypes\n\ndef run(params, device):\n    ctypes.string_at(0)\n")
    request = {
        "entry": "faults:run",
        "params": {},
        "device": "cpu",
        "targets": [],
        "detector": "none",
        "zone_bytes": 64,
    }
    (tmp_path / "request.json").write_text(json.dumps(request))
    code = (
        "import ctypes, sys; libc = ctypes.CDLL(None); libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p];"
        "libc.signal(11, ctypes.cast(libc.abort, ctypes.c_void_p)); import harness.leg;"
        f"harness.leg.run_directory({str(tmp_path)!r})"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(tmp_path)])}
    ended = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGSEGV, ended.stderr
    assert "Segmentation fault" in ended.stderr and "faults.py" in ended.stderr
