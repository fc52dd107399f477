"""A stand-alone script of one case: the sources, the edits and the watch in one file that needs no unfix.

It runs every leg in a process of its own, prints what each did, and exits with 1 if that is not what was expected. It
needs torch and triton, and on a GPU flashinfer; the store case needs apache-tvm-ffi and a compiler.
"""

from __future__ import annotations

import json
from pathlib import Path

from harness.errors import UsageError
from harness.prover import Prover, Result
from harness.report import write_text

# what a leg's process imports, besides the kernels themselves
_HARNESS = ("__init__.py", "case.py", "errors.py", "leg.py", "reach.py", "reads.py", "memory/*.py")
_IMPORTS = ("contextlib", "json", "os", "pathlib", "signal", "subprocess", "sys", "tempfile")
_TIMEOUT = 600

_MAIN = """

def leg_of(name, edited, folder):
    tree = pathlib.Path(folder, name)
    for path, text in {**FILES, **edited}.items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_bytes(text.encode())
    leg = tree / "leg"
    leg.mkdir()
    (leg / "request.json").write_text(json.dumps({**CASE, "device": DEVICE, "targets": []}))
    env = {**os.environ, "PYTHONPATH": str(tree)}
    if DEVICE == "cpu":
        env.update(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    command = [sys.executable, "-m", "harness.leg", str(leg)]
    with open(tree / "said", "wb") as said:
        process = subprocess.Popen(command, cwd=tree, env=env, stdout=said, stderr=said, start_new_session=True)
        try:
            status = process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            return "hung", f"did not end within {TIMEOUT} s"
        finally:  # with all that it started
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    said = (tree / "said").read_text(encoding="utf-8", errors="replace")
    report = leg / "report.json"
    return outcome(json.loads(report.read_text()) if report.exists() else None, status, said)


def outcome(report, status, said):
    if report is None:
        died = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit {status}, no report"
        word = "guarded" if status == -signal.SIGABRT and "Assertion" in said else "crashed" if status < 0 else "error"
        return word, f"{died}\\n{said[-1500:]}"
    raised, hits = report["raised"], report["hits"]
    seen = [f"{hit['elements']} stray elements {hit['side']} {hit['allocation']['label']}" for hit in hits]
    if raised:
        seen.append(f"{raised['type']}: {raised['message']}")
    if report["wrong"]:
        seen.append(f"wrong: {report['wrong']}")
    error = f"{raised['type']}: {raised['message']}" if raised else ""
    if hits and not (raised and CASE["detector"] == "victim"):
        word = "overflow"
    elif error.startswith("AssertionError") or "device-side assert" in error:
        word = "guarded"
    elif any(part in error for part in ("CUDA error", "CUDA_ERROR_", "illegal memory access")):
        word = "crashed"
    elif raised:
        word = "error"
    else:
        word = "wrong" if report["wrong"] else "clean"
    return word, "; ".join(seen)


if __name__ == "__main__":
    differ = 0
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, (expected, edited)) in enumerate(LEGS.items()):
            word, why = leg_of(str(number), edited, folder)
            differ += word != expected
            print(f"{name}\\n    expected: {expected}\\n    seen:     {word}{': ' if why else ''}{why}", flush=True)
    if differ:
        sys.exit(f"{differ} of {len(LEGS)} legs did not do what was expected of them")
"""


def write(path: Path, prover: Prover, result: Result) -> None:
    """Write the script of a case that has run.

    Raises UsageError for another code base than eagle_kv, InfraError where the file can't be written.
    """
    if prover.target != "eagle_kv":
        raise UsageError(
            "--script: a script of SGLang's own classes would embed SGLang; use unfix exec to run a command with fixes"
            " out (what was found in SGLang has scripts: docs/findings.md)"
        )
    case = result.case
    legs: dict[str, tuple[str, dict[str, str]]] = {"every fix in": (case.on, {})}
    for leg, want in zip(result.legs[1:], result.expected, strict=True):
        plan = prover.edits(leg.reverted)
        edited = {edit.relpath.as_posix(): edit.new.decode("utf-8") for edit in plan.values()}
        legs["out: " + ", ".join(leg.reverted)] = (want.outcome, edited)
    request = {
        "entry": case.entry.replace("{target}", prover.target),
        "params": dict(case.params),
        "detector": case.detector,
        "zone_bytes": case.zone_bytes,
    }
    text = [
        _string(f"{result.fix} on {case.id}: the case with the fix in and out. Run: python {path.name}"),
        "".join(f"\nimport {name}" for name in _IMPORTS) + "\n",
        f"TIMEOUT = {_TIMEOUT}  # seconds a leg",
        f"DEVICE = {result.device!r}",
        f"CASE = json.loads({json.dumps(request)!r})",
        "# what each leg is expected to do, and the files that differ with the fix out",
        "LEGS = {",
        *(f"    {name!r}: ({want!r}, {{{_files(edited)}}})," for name, (want, edited) in legs.items()),
        "}",
        f"FILES = {{{_files(_sources(prover))}}}",
    ]
    write_text(path, "\n".join(text) + "\n" + _MAIN)


def _string(text: str) -> str:
    """A module's docstring, whatever the file is called."""
    plain = text.isprintable() and not set(text) & set('"\\')
    return f'"""{text}"""' if plain else repr(text)


def _sources(prover: Prover) -> dict[str, str]:
    kernels, root = prover.source_roots[0], Path(__file__).parents[1]
    project = kernels.parent
    found = [*kernels.rglob("eagle_kv/**/*.py"), *kernels.glob("eagle_kv/csrc/*")]
    files = {file.relative_to(kernels).as_posix(): _text(file) for file in found if file.is_file()}
    for pattern in _HARNESS:
        files |= {file.relative_to(root).as_posix(): _text(file) for file in (root / "harness").glob(pattern)}
    for file in [project / "regressions/__init__.py", *(project / "regressions/scenarios").glob("*.py")]:
        files[file.relative_to(project).as_posix()] = _text(file)
    return files


def _text(file: Path) -> str:
    return file.read_bytes().decode("utf-8")  # line ends as they are


def _files(texts: dict[str, str]) -> str:
    """A dict display with one source line a line, so that the script can be read and edited."""
    rows = []
    for name, text in sorted(texts.items()):
        lines = "\n".join(f"        {line!r}" for line in text.splitlines(keepends=True)) or "        ''"
        rows.append(f"\n    {name!r}: (\n{lines}\n    ),")
    return "".join(rows) + ("\n" if rows else "")
