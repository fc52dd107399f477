"""Where the project's own files (toggles, regressions, kernels) are."""

from __future__ import annotations

import sys
from pathlib import Path

from harness import trust
from harness.errors import UsageError


def project_root() -> Path:
    """The checkout around the working directory, else the one that this package was imported from.

    Puts it on ``sys.path``, where regressions and kernels are imported from. Raises UsageError where neither is one,
    and where its code is not to be run (`harness.trust`).
    """
    here = Path.cwd()
    for folder in [here, *here.parents, Path(__file__).parents[1]]:
        if trust.is_checkout(folder):
            trust.check_checkout(folder)
            for entry in (str(folder / "kernels"), str(folder)):
                if entry not in sys.path:
                    sys.path.insert(0, entry)
            return folder
    raise UsageError(f"no toggles/ and regressions/ in {here} or above: run unfix inside its checkout")
