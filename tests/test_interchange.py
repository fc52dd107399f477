"""To and from SGLang's own format: each export is applied by rules written here, and by SGLang's own patcher."""

from __future__ import annotations

import ast
import json
import re
import textwrap

import pytest
import yaml

from harness import fixes, interchange, lightenv, overlay, togglefile, upstream, variants, yamlfile
from harness.edits import Edit, Reversal
from harness.errors import ToggleError

TOY = '''\
"""A module."""

LIMIT = 4


def plain(n, rows):
    total = 0
    for row in rows:
        total += row
        if total > LIMIT:
            total = LIMIT

    return total * n


class Pool:
    def size(self, topk,
             context):
        width = topk * context
        if width >= 2**31:
            raise AssertionError("too wide")
        assert width, "empty"
        return width

    def twice(self, n):
        n = n + 1
        n = n * 2
        n = n + 1
        return n

    async def later(self):
        return await self.twice(1)

    @property
    def half(self):
        return 1

    def parent(self):
        return super().__repr__()

    def hidden(self):
        self.__mine = 2
        return self.__mine

    def text(self):
        if self:
            return """
no indent"""
        return 0
'''

GOOD = {
    "a replaced line": ("toy.plain", [Edit("total * n", replacement="total")]),
    "a deleted block": ("toy.plain", [Edit("if total > LIMIT:\n    total = LIMIT", replacement="")]),
    "a block that is emptied": ("toy.plain", [Edit("total = LIMIT", replacement="")]),
    "a line before": ("toy.plain", [Edit("return total * n", prepend="total -= 1")]),
    "a line behind": ("toy.plain", [Edit("total += row", append="total -= 1")]),
    "a part of a signature": ("toy.Pool.size", [Edit("topk, context", replacement="context, topk")]),
    "an assert at a block's end": ("toy.Pool.size", [Edit('raise AssertionError("too wide")', replacement="pass")]),
    "a dedented line after a block": (
        "toy.Pool.size",
        [
            Edit(
                'raise AssertionError("too wide")\nassert width, "empty"', replacement='width = 1\nassert True, "empty"'
            )
        ],
    ),
    "two edits of one function": (
        "toy.Pool.size",
        [Edit("topk * context", replacement="context"), Edit('assert width, "empty"', replacement="")],
    ),
    "a line that is there twice": ("toy.Pool.twice", [Edit("n = n * 2\nn = n + 1", replacement="n = n * 2\nn = n")]),
    "a coroutine": ("toy.Pool.later", [Edit("self.twice(1)", replacement="self.twice(2)")]),
}
BAD = {
    "a constant": ("toy", [Edit("LIMIT = 4", replacement="LIMIT = 5")], "isn't within a function"),
    "a property": ("toy.Pool.half", [Edit("return 1", replacement="return 2")], "Pool.half: decorated"),
    "super": ("toy.Pool.parent", [Edit("super().__repr__()", replacement="super().__str__()")], "uses super()"),
    "a private name": ("toy.Pool.hidden", [Edit("= 2", replacement="= 3")], "private name"),
    "a string without indent": ("toy.Pool.text", [Edit("if self:", replacement="if True:")], "can't be told"),
    "a decorator that is added": ("toy.plain", [Edit("def plain(n, rows):", prepend="@print")], "plain: decorated"),
}


@pytest.fixture
def toy(tmp_path):
    (tmp_path / "toy.py").write_text(TOY)
    return tmp_path


def planned(toy, target, edits):
    return overlay.plan([Reversal("1:x", target, tuple(edits))], [toy])


def by_hand(source, edits):
    """What a patcher that compares stripped lines makes of a function."""
    lines = source.splitlines()
    for edit in edits:
        assert set(edit) == {"match", "replacement"}
        match = [line.strip() for line in edit["match"].strip().splitlines()]
        stripped = [line.strip() for line in lines]
        [at] = [at for at in range(len(lines)) if stripped[at : at + len(match)] == match]
        pad = " " * (len(lines[at]) - len(lines[at].lstrip()))
        new = [pad + line if line.strip() else "" for line in edit["replacement"].strip().splitlines()]
        lines[at : at + len(match)] = new
    return "\n".join(lines)


def function(text, name):
    node = ast.parse(text)
    for part in name.split("."):
        [node] = [each for each in node.body if getattr(each, "name", "") == part]
    return ast.get_source_segment(text, node, padded=True), ast.dump(node)


@pytest.mark.parametrize("name", GOOD)
def test_lines_say_what_an_overlay_has(name, toy):
    target, edits = GOOD[name]
    plan = planned(toy, target, edits)
    [patch] = yaml.safe_load(interchange.export(plan))["patches"]
    assert patch["target"] == target
    got = by_hand(function(TOY, target[4:])[0], patch["edits"])
    [edited] = plan.values()
    assert ast.dump(ast.parse(textwrap.dedent(got)).body[0]) == function(edited.new.decode(), target[4:])[1]


@pytest.mark.parametrize("name", BAD)
def test_what_it_cannot_say_is_refused(name, toy):
    target, edits, part = BAD[name]
    with pytest.raises(interchange.NotSayableError) as caught:
        interchange.export(planned(toy, target, edits))
    assert part in str(caught.value) and "\n" not in str(caught.value) and str(caught.value).startswith("toy.py")


def test_what_is_not_python_is_refused(tmp_path):
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "k.cuh").write_text("void f() { assert(1); }\n")
    plan = overlay.plan([Reversal("1:x", "toy/k.cuh", (Edit("assert(1);", replacement=""),), "toy.f")], [tmp_path])
    with pytest.raises(interchange.NotSayableError, match="toy/k.cuh: SGLang's patcher takes Python functions only"):
        interchange.export(plan)


def test_a_function_of_two_fixes_is_patched_once(toy):
    first, second = Edit("topk * context", replacement="context"), Edit('assert width, "empty"', replacement="")
    plan = overlay.plan(
        [Reversal(name, "toy.Pool.size", (edit,)) for name, edit in (("1:a", first), ("1:b", second))], [toy]
    )
    [patch] = yaml.safe_load(interchange.export(plan))["patches"]
    assert len(patch["edits"]) == 2


@pytest.mark.parametrize("name", GOOD)
def test_there_and_back_is_the_same_overlay(name, toy):
    plan = planned(toy, *GOOD[name])
    back = interchange.parse(interchange.export(plan), "it")
    assert [edited.new for edited in overlay.plan(back, [toy]).values()] == [edited.new for edited in plan.values()]


MODES = {
    "replacement: b": {"replacement": "b"},
    "prepend: b": {"prepend": "b"},
    "append: b": {"append": "b"},
    "": {"replacement": ""},
    'replacement: ""': {"replacement": ""},
    'replacement: "", append: b': {"append": "b"},
    'replacement: "  ", prepend: ""': {"replacement": ""},
}


@pytest.mark.parametrize("written", MODES)
def test_theirs_leaves_modes_blank_or_out(written):
    text = f"patches: [{{target: a.b, edits: [{{match: a{', ' * bool(written)}{written}}}]}}]"
    [patch] = interchange.parse(text, "it")
    assert patch.edits == (Edit("a", **MODES[written]),)


NO_ENTRIES = (
    *("patches: [", "other: 1", "patches: 3", "patches: [{target: a.b}]", "- 1"),
    "patches: [{target: a b, edits: []}]",
    "patches: [{target: a.b, preamble: import x, edits: [{match: a}]}]",
)


@pytest.mark.parametrize("text", NO_ENTRIES)
def test_what_is_no_entry_is_one_line(text):
    with pytest.raises(ToggleError) as caught:
        interchange.parse(text, "it.yaml")
    assert re.match(r"it.yaml(:\d+)?: not YAML", str(caught.value)) and "\n" not in str(caught.value)


def test_any_snippet_survives_yaml():
    texts = ["a", "  a\nb", "a: b # c", "a\n\n    b\n", "- x", "'\"\\", "\ta", "a\n  b  \nc", "%", "a\t= b", ""]
    edits = [Edit("x", replacement=text) for text in texts]
    made = yaml.safe_load(interchange.as_yaml([Reversal("f", "a.b", tuple(edits))], ""))
    got = [edit["replacement"].rstrip("\n") for edit in made[0]["edits"]]
    assert got == [textwrap.dedent(text).rstrip("\n") for text in texts]


def test_an_import_is_a_toggle_file(toy, unfix, checkout):
    entry = toy / "entry.yaml"
    entry.write_text(interchange.export(planned(toy, *GOOD["two edits of one function"])))
    ended = unfix("import", str(entry), "123")
    assert (ended.returncode, ended.stderr) == (0, "")
    written = unfix("import", str(entry), "123", "--out", str(toy))
    assert written.returncode == 0 and (toy / "123.yaml").read_text() == ended.stdout
    file = togglefile.validate(yamlfile.read(toy / "123.yaml"))
    assert file.pr == 123 and list(file.fixes) == ["imported"]
    again = unfix("import", str(entry), "123", "--out", str(toy))
    assert again.returncode == 2 and "is there already" in again.stderr
    (checkout / "toggles" / "123.yaml").write_text(ended.stdout)
    assert fixes.load(checkout / "toggles").fix("123:imported").code_bases == ("sglang",)


BAD_USAGE = {
    "nothing": ((), "name a FILE"),
    "no PR": (("x.yaml",), "names no PR"),
    "no file": (("/nowhere/x.yaml", "1"), "/nowhere/x.yaml:1: can't be read: No such file"),
    "Python": (("x.py",), "--source"),
    "both": (("--release", "0.5.13", "--source", "."), "name one of --release V and --source DIR"),
}


@pytest.mark.parametrize("name", BAD_USAGE)
def test_an_import_of_nothing_is_one_line(name, unfix):
    arguments, part = BAD_USAGE[name]
    ended = unfix("import", *arguments)
    assert ended.returncode == 2 and part in ended.stderr and ended.stderr.count("\n") == 1 and not ended.stdout


def test_an_export_needs_sources_and_a_fix(unfix):
    for arguments, part in ((("27338",), "name one of"), (("0", "--release", "0.5.13"), "selects no fix")):
        ended = unfix("export", *arguments)
        assert ended.returncode == 2 and part in ended.stderr and ended.stderr.count("\n") == 1


def _cached(release):
    return pytest.param(
        release,
        marks=pytest.mark.skipif(release not in upstream.cached(), reason=f"SGLang {release} was never fetched"),
    )


@pytest.mark.parametrize("release", [_cached("0.5.13"), _cached("0.5.16"), _cached("0.5.23")])
def test_every_entry_of_a_release_goes_there_and_back(release, catalogue):
    roots = [upstream.release(release).root]
    said = 0
    for fix in catalogue:
        try:
            plan = overlay.plan(variants.choose_all(catalogue, [fix.id], "sglang", roots), roots)
            back = interchange.parse(interchange.export(plan), fix.id)
        except (interchange.NotSayableError, variants.NotFixedError):
            continue
        for file, edited in overlay.plan(back, roots).items():
            want = ast.dump(ast.parse(plan[file].new))
            assert ast.dump(ast.parse(edited.new)) == want, fix.id
            said += 1
    assert said >= 5


@pytest.mark.parametrize("release", [_cached("0.5.16")])
def test_an_import_says_what_rotted(release, unfix):
    ended = unfix("import", "--release", release, "27338", "25015")
    assert ended.returncode == 3 and "rotted: 27338 in 0.5.16" in ended.stderr and "25015" not in ended.stderr
    assert [each["pr"] for each in yaml.safe_load_all(ended.stdout)] == [25015, 27338]
    ended = unfix("import", "--release", release, "1")
    assert ended.returncode == 2 and "it has 25015, 26329" in ended.stderr


# Run in a release's light environment: apply with SGLang's own patcher, then compare each function's code with what
# the overlay has. Both are compiled by themselves, since a compiler treats names that a module imports in its own way.
PATCHER = """
import __future__, ast, contextlib, json, sys, textwrap, types, warnings
import harness.cuda_untouched
warnings.simplefilter("ignore")
from pathlib import Path

def code_of(file, names):
    text = Path(file).read_text()
    node = ast.parse(text)
    for name in names:
        [node] = [each for each in node.body if getattr(each, "name", "") == name]
    alone = textwrap.dedent(ast.get_source_segment(text, node, padded=True))
    code = compile(alone, file, "exec", flags=__future__.annotations.compiler_flag)
    [code] = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return code

def shape(code):
    consts = tuple(shape(each) if isinstance(each, types.CodeType) else each for each in code.co_consts)
    return code.co_code, code.co_names, code.co_varnames, consts

text, tree = Path(sys.argv[1]).read_text(), Path(sys.argv[2])
from sglang.srt.debug_utils.source_patcher import apply_patches_from_config
with contextlib.redirect_stdout(sys.stderr):
    states = apply_patches_from_config(text)
told = []
for state in states:
    function = state.target_fn
    relative = Path(*function.__module__.split(".")).with_suffix(".py")
    names = function.__qualname__.split(".")
    same = shape(function.__code__) == shape(code_of(str(tree / relative), names))
    told.append([function.__qualname__, same, shape(state.original_code) == shape(function.__code__)])
print(json.dumps(told))
"""
APPLIED = [
    ("0.5.23", "27338", 2),
    ("0.5.23", "25015,26329,26972", 5),
    ("0.5.13", "27338", 2),
    ("0.5.13", "26972,25015", 4),
]


@pytest.mark.parametrize(("release", "sel", "functions"), APPLIED)
def test_sglang_s_own_patcher_takes_it(release, sel, functions, unfix, python, tmp_path, catalogue):
    if not lightenv.is_installed(release):
        pytest.skip(f"SGLang {release} has no light environment here: unfix upstream install {release}")
    source = lightenv.sources(release)
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    (checkout / "sglang").symlink_to(source / "sglang")
    ended = unfix("export", sel, "--source", str(checkout))
    assert ended.returncode == 0, ended.stderr
    (tmp_path / "entry.yaml").write_text(ended.stdout)
    ids = [fix.id for fix in catalogue if fix.pr in sel.split(",")]
    tree = overlay.build(overlay.plan(variants.choose_all(catalogue, ids, "sglang", [source]), [source]))
    path = ":".join(lightenv.path(release))
    ran = python("-c", PATCHER, str(tmp_path / "entry.yaml"), str(tree), PYTHONPATH=path, TRITON_INTERPRET="1")
    assert ran.returncode == 0, ran.stderr[-2000:]
    told = json.loads(ran.stdout.splitlines()[-1])
    assert len(told) == functions
    assert all(same and not unchanged for _, same, unchanged in told), told
