"""The JIT builds that a run's cases need, begun as the run starts: nvcc takes seconds, and the first cases need none.

Nobody waits for them, or reads how they end. A leg that needs a library builds it, or waits at its lock while it is
built here, and finds it (`eagle_kv.jit`); so a build that fails here fails there, where it is told.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from harness import overlay
from harness.device import compute_capabilities
from harness.errors import UnfixError
from harness.fixes import Catalogue
from harness.variants import choose_all


class Builds:
    """A plugin of the process that starts a run on eagle_kv. ``ids``: the fixes that it is about."""

    def __init__(self, catalogue: Catalogue, ids: Sequence[str], root: Path, device: str):
        self._catalogue, self._ids, self._kernels, self._device = catalogue, ids, root / "kernels", device
        self.processes: list[subprocess.Popen[bytes]] = []

    def pytest_sessionstart(self) -> None:
        """One process a source, for they are compiled side by side."""
        env = {**os.environ, "PYTHONPATH": str(self._kernels)}
        if self._device == "cuda" and (found := set(compute_capabilities())):
            # asking the GPU would take a context; legs on another one build for themselves
            env.setdefault("TVM_FFI_CUDA_ARCH_LIST", min(found))
        for source in self.sources():
            command = [sys.executable, "-m", "eagle_kv.jit", self._device, str(source)]
            quiet = subprocess.DEVNULL
            self.processes.append(
                subprocess.Popen(command, env=env, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)
            )

    def pytest_sessionfinish(self) -> None:
        """End what still runs: what a killed build leaves is never used."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def sources(self) -> list[Path]:
        """What legs compile: each file that one of the fixes is in, as it is and with the fix out."""
        found: list[Path] = []
        for fix in self._ids:
            files = [each.target for each in self._catalogue.fix(fix).reversals_for("eagle_kv") if "/" in each.target]
            if not files:
                continue
            found += [self._kernels / file for file in files]
            with contextlib.suppress(UnfixError):  # it is the case that tells
                roots = [self._kernels]
                tree = overlay.build(overlay.plan(choose_all(self._catalogue, [fix], "eagle_kv", roots), roots))
                found += [tree / file for file in files if tree]
        return list(dict.fromkeys(found))
