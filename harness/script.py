"""A stand-alone script of one case: the sources, the edits and the watch in one file that needs no unfix.

It runs every leg in a process of its own and prints what each did. It needs torch and triton, and on a GPU flashinfer;
the store case needs apache-tvm-ffi and a compiler.
"""

from __future__ import annotations

import json
from pathlib import Path

from harness.prover import Prover, Result
from harness.report import write_text

# what a leg's process imports, besides the kernels themselves
_HARNESS = ("__init__.py", "case.py", "errors.py", "leg.py", "reach.py", "memory/*.py")

_MAIN = """

def run(name, edited, folder):
    tree = pathlib.Path(folder, name)
    for path, text in {**FILES, **edited}.items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_text(text)
    leg = tree / "leg"
    leg.mkdir()
    (leg / "request.json").write_text(json.dumps({**CASE, "device": DEVICE, "targets": []}))
    env = {**os.environ, "PYTHONPATH": str(tree)}
    if DEVICE == "cpu":
        env.update(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    command = [sys.executable, "-m", "harness.leg", str(leg)]
    ended = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
    if not (leg / "report.json").exists():
        return f"died: exit {ended.returncode}\\n" + ended.stderr[-1500:]
    report = json.loads((leg / "report.json").read_text())
    said = [f"{hit['elements']} stray elements {hit['side']} {hit['allocation']['label']}" for hit in report["hits"]]
    if report["raised"]:
        said.append(f"{report['raised']['type']}: {report['raised']['message']}")
    if report["wrong"]:
        said.append(f"wrong: {report['wrong']}")
    return "; ".join(said) or "clean"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, (expected, edited)) in enumerate(LEGS.items()):
            print(f"{name}\\n    expected: {expected}\\n    seen:     {run(str(number), edited, folder)}", flush=True)
"""


def write(path: Path, prover: Prover, result: Result) -> None:
    """Write the script of a case that has run. Raises InfraError where the file can't be written."""
    case = result.case
    legs: dict[str, tuple[str, dict[str, str]]] = {"every fix in": (case.on, {})}
    for leg, want in zip(result.legs[1:], result.expected, strict=True):
        plan = prover.edits(leg.reverted)
        edited = {edit.relpath.as_posix(): edit.new.decode() for edit in plan.values()}
        legs["out: " + ", ".join(leg.reverted)] = (want.outcome, edited)
    request = {
        "entry": case.entry.replace("{target}", prover.target),
        "params": dict(case.params),
        "detector": case.detector,
        "zone_bytes": case.zone_bytes,
    }
    text = [
        f'"""{result.fix} on {case.id}: the case with the fix in and out. Run: python {path.name}"""',
        "\nimport json\nimport os\nimport pathlib\nimport subprocess\nimport sys\nimport tempfile\n",
        f"DEVICE = {result.device!r}",
        f"CASE = json.loads({json.dumps(request)!r})",
        "# what each leg is expected to do, and the files that differ with the fix out",
        "LEGS = {",
        *(f"    {name!r}: ({want!r}, {{{_files(edited)}}})," for name, (want, edited) in legs.items()),
        "}",
        f"FILES = {{{_files(_sources(prover))}}}",
    ]
    write_text(path, "\n".join(text) + "\n" + _MAIN)


def _sources(prover: Prover) -> dict[str, str]:
    kernels, root = prover.source_roots[0], Path(__file__).parents[1]
    project = kernels.parent
    found = [*kernels.rglob("eagle_kv/**/*.py"), *kernels.glob("eagle_kv/csrc/*")]
    files = {file.relative_to(kernels).as_posix(): file.read_text() for file in found if file.is_file()}
    for pattern in _HARNESS:
        files |= {file.relative_to(root).as_posix(): file.read_text() for file in (root / "harness").glob(pattern)}
    for file in [project / "regressions/__init__.py", *(project / "regressions/scenarios").glob("*.py")]:
        files[file.relative_to(project).as_posix()] = file.read_text()
    return files


def _files(texts: dict[str, str]) -> str:
    """A dict display with one source line a line, so that the script can be read and edited."""
    rows = []
    for name, text in sorted(texts.items()):
        lines = "\n".join(f"        {line!r}" for line in text.splitlines(keepends=True)) or "        ''"
        rows.append(f"\n    {name!r}: (\n{lines}\n    ),")
    return "".join(rows) + ("\n" if rows else "")
