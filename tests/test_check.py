"""`unfix check` and `unfix status`: small stand-ins for releases, read with the shipped toggle files."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from harness import check, fixes, overlay, upstream, upstream_cli, variants

FIXED = """\
raise RuntimeError("imported")


class FlashInferMultiStepDraftBackend:
    def common_template(self, forward_batch, kv_indices_buffer, call_fn):
        seq_lens_sum = forward_batch.seq_lens_sum

        required_kv_indices_len = draft_kv_indices_used_len(
            seq_lens_sum, self.topk, bs, self.speculative_num_steps
        )
        assert_buffer_fits(
            required_kv_indices_len,
            kv_indices_buffer.shape[1],
            "EAGLE draft kv_indices row (size max_bs * topk * max_context_len)",
            bs=bs,
            seq_lens_sum=seq_lens_sum,
        )
        self.generate_draft_decode_kv_indices[
            (self.speculative_num_steps, num_seqs, self.topk)
        ](forward_batch.req_pool_indices)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int):
        kv_indices_width = draft_kv_indices_buffer_width(
            max_bs, self.topk, self.max_context_len
        )
"""
REGISTRY = '''\
"""Parsed, never run."""
raise RuntimeError("imported")
_A = """
patches:
  - target: sglang.srt.layers.attention.flashinfer_backend.FlashInferMultiStepDraftBackend.init_cuda_graph_state
    edits:
      - match: |
          (self.speculative_num_steps, max_bs * self.topk * self.max_context_len),
        replacement: |
          (self.speculative_num_steps, max_bs * self.max_context_len),
"""
_B = """
patches:
  - target: sglang.srt.layers.attention.flashinfer_backend.FlashInferMultiStepDraftBackend.common_template
    edits:
      - match: seq_lens_sum = forward_batch.seq_lens_sum
        append: bs = 1
"""
_TABLE: Dict[int, str] = {1: _A, 2: _B, 3: _MISSING, 4: "patches: [{target: x}]", 5: "patches: {"}
'''
HELPER = "draft_kv_indices_buffer_width(\n            max_bs, self.topk, self.max_context_len\n        )"


def unfixed() -> str:
    start, end = FIXED.index("        required_kv"), FIXED.index("        self.generate")
    text = FIXED[:start] + FIXED[end:]
    inline = "self.rows = torch.zeros(\n (self.speculative_num_steps, max_bs * self.max_context_len),\n )"
    return text.replace("kv_indices_width = " + HELPER, inline)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNFIX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", list(sys.path))


def make(folder: Path, text: str = FIXED, registry: str | None = None) -> Path:
    """A checkout of a very small SGLang."""
    files = {"srt/layers/attention/flashinfer_backend.py": text, "__init__.py": 'raise RuntimeError("imported")\n'}
    if registry is not None:
        files["srt/debug_utils/pr_fix_toggle.py"] = registry
    for name, content in files.items():
        file = folder / "python/sglang" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
        if name != "__init__.py":
            (file.parent / "__init__.py").touch()
    return folder


def unfix(*arguments: str) -> Result:
    app = typer.Typer()
    upstream_cli.register(app)
    return CliRunner().invoke(app, list(arguments))


def states(result: Result) -> dict[str, str]:
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return {row["fix"]: row["state"] for row in json.loads(result.stdout)["results"]}


BOTH = ("27338:topk-factor", "27338:capacity-assert")
READS = {
    # name -> (old, new, state of the size, state of the guard, what is said)
    "as published": ("", "", "applied", "applied", ""),
    "over three lines": (HELPER, HELPER.replace(", ", ",\n  "), "applied", "applied", ""),
    "the reverted text": ("max_bs, self.topk,", "max_bs, 1,", "not fixed here", "applied", ""),
    "renamed": ("def init_cuda_graph_state", "def init_cuda_graph_states", "rotted", "applied",
                "nearest: sglang.srt.layers.attention.flashinfer_backend.FlashInferMultiStepDraftBackend."
                "init_cuda_graph_states, line 22"),
    "another helper": (HELPER, "width(max_bs, self.topk, ctx)", "rotted", "applied", "nearest: line 23: `kv_indices"),
    "another guard": ("assert_buffer_fits(", "must_fit(", "applied", "rotted", "nearest: line 8: `required_kv_indices"),
}  # fmt: skip


@pytest.mark.parametrize("name", READS)
def test_check_a_checkout(tmp_path, name):
    old, new, size, guard, said = READS[name]
    make(tmp_path, FIXED.replace(old, new) if old else FIXED)
    result = unfix("check", "27338", "--source", str(tmp_path), "--json", "-")
    assert states(result) == dict(zip(BOTH, (size, guard), strict=True))
    assert result.exit_code == (3 if "rotted" in (size, guard) else 0)
    shown = unfix("check", "27338", "--source", str(tmp_path))
    assert said in shown.stdout and shown.exit_code == result.exit_code
    assert ("rotted: 27338:" in shown.stdout) == bool(said)
    assert "sglang" not in sys.modules


def test_code_from_before_the_fix(tmp_path):
    make(tmp_path, unfixed())
    result = unfix("check", "27338", "--source", str(tmp_path), "--json", "-")
    assert set(states(result).values()) == {"not fixed here"} and result.exit_code == 0
    # and forward: what is put in there reads as fixed
    forward = [each for fix in fixes.load("toggles") if fix.pr == "27338"
               for each in variants.choose_forward(fix, "sglang", [tmp_path / "python"])]  # fmt: skip
    [edited] = overlay.plan(forward, [tmp_path / "python"]).values()
    make(tmp_path, edited.new.decode())
    assert set(states(unfix("check", "27338", "--source", str(tmp_path), "--json", "-")).values()) == {"applied"}


def test_the_registry_in_the_tree(tmp_path):
    make(tmp_path, registry=REGISTRY)
    found = {each.fix: each for each in check.check_registry([upstream.checkout(tmp_path)])}
    assert {name: each.word for name, each in found.items()} == {
        "1": "rotted", "2": "applied", "3": "rotted", "4": "rotted", "5": "rotted"
    }  # fmt: skip
    assert "isn't in sglang/srt/layers/attention/flashinfer_backend.py; nearest: line 24" in found["1"].state.message
    assert found["2"].state.lines == (("sglang/srt/layers/attention/flashinfer_backend.py", 7),)
    assert found["3"].state.message.endswith("line 19: not a YAML string")
    for name in "45":
        assert "line 19: not YAML with patches" in found[name].state.message
    result = unfix("check", "--source", str(tmp_path))
    assert "in-tree 2" in result.stdout and result.exit_code == 3
    assert "in-tree" not in unfix("check", "27338", "--source", str(tmp_path)).stdout


def test_an_old_entry_where_the_fix_is_missing_is_not_rotted(tmp_path):
    make(tmp_path, unfixed(), REGISTRY)
    [first, *_] = check.check_registry([upstream.checkout(tmp_path)])
    assert first.word == "not fixed here"


@pytest.mark.parametrize(("text", "said"), [("x = 1\n", "no dict of PR numbers"), ("def f(:\n", "can't be read")])
def test_a_registry_that_is_not_one_any_more(tmp_path, text, said):
    make(tmp_path, registry=text)
    [found] = check.check_registry([upstream.checkout(tmp_path)])
    assert found.word == "rotted" and said in found.state.message
    assert check.registry(tmp_path) == []


@pytest.fixture
def releases(tmp_path, monkeypatch):
    """Releases that pip needn't fetch: 1.0 lacks the fix, 1.1 and 1.2 have it, 1.3 can't be read."""
    texts = {"1.0": unfixed(), "1.1": FIXED, "1.2": FIXED, "1.3": "class Other: pass\n"}
    trees = {version: upstream.Source(version, make(tmp_path / version, text) / "python")
             for version, text in texts.items()}  # fmt: skip
    monkeypatch.setattr(upstream, "release", trees.__getitem__)
    monkeypatch.setattr(upstream, "cached", lambda: list(trees))
    monkeypatch.setattr(upstream, "installed", lambda: None)


def test_status(tmp_path, releases):
    words = {"1.0": "not fixed", "1.1": "fixed", "1.2": "fixed", "1.3": "unknown"}
    result = unfix("status", "27338", "--json", str(tmp_path / "out.json"))
    assert result.exit_code == 0
    rows = json.loads((tmp_path / "out.json").read_text())["results"]
    assert {(row["fix"], row["release"]): row["state"] for row in rows} == {
        (fix, release): word for fix in BOTH for release, word in words.items()
    }
    lines = [line for line in result.stdout.splitlines() if "27338:" in line]
    assert len(lines) == 2 and all(line.count("not fixed") == line.count("UNKNOWN") == 1 for line in lines)
    assert "1.1 to" in result.stdout and "1.2 (2)" in result.stdout  # the same twice is one column


def test_releases_among_the_arguments(releases):
    result = unfix("check", "27338:topk-factor", "--release", "1.0", "1.1", "--json", "-")
    rows = json.loads(result.stdout)["results"]
    assert [(row["fix"], row["release"]) for row in rows] == [(BOTH[0], "1.0"), (BOTH[0], "1.1")]
    assert json.loads(unfix("check", "--release", "1.0,1.2", "--json", "-").stdout)["releases"] == ["1.0", "1.2"]


def test_without_a_release_the_checkouts_own_code_is_checked(releases, root):
    result = unfix("check", "--json", "-")
    rows = json.loads(result.stdout.partition("\nunfix:")[0])["results"]
    assert {row["target"] for row in rows} == {"eagle_kv"}
    assert {row["state"] for row in rows} == {"applied"} and {row["fix"] for row in rows} == {
        fix.id for fix in fixes.load(root / "toggles") if "eagle_kv" in fix.code_bases
    }


def test_status_without_anything_to_look_at(releases, monkeypatch):
    monkeypatch.setattr(upstream, "cached", list)
    assert "name one, such as --release" in str(unfix("status").exception)


@pytest.mark.network
def test_published_releases(monkeypatch):
    monkeypatch.undo()
    older = ["0.5.9", "0.5.10", "0.5.11", "0.5.12", "0.5.12.post1"]
    newer = ["0.5.13", "0.5.13.post1", "0.5.14", "0.5.15.post1", "0.5.16"]
    newer += ["0.5.18", "0.5.20", "0.5.21", "0.5.22", "0.5.23"]
    sources = [upstream.release(version) for version in (*older, *newer)]
    registered = fixes.load("toggles")
    for found in check.check(registered, "sglang", sources):
        has_it = found.release in newer and not found.fix.startswith("own:")
        assert found.word == ("applied" if has_it else "not fixed here"), textwrap.shorten(str(found), 300)
    in_tree = check.check_registry(sources)
    assert len(in_tree) == 6 * len(newer)
    expected = {(pr, version) for pr in ("27338", "27460") for version in newer} | {("26972", "0.5.16")}
    assert {(found.fix, found.release) for found in check.rotted(in_tree)} == expected
    for source in sources:  # the excerpts that were judged and the whole files say the same
        overlay.plan([each for fix in registered for each in variants.state(fix, "sglang", [source.root]).reversals],
                     [source.root])  # fmt: skip
