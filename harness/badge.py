"""The badge: a night in a few words, as the JSON that a shields.io endpoint badge is drawn from.

Schema: https://shields.io/badges/endpoint-badge. Green only where the exit code is 0.
"""

from __future__ import annotations

from typing import Any

from harness import plain, report
from harness.digest import Digest, lower

COLOURS = {"well": "green", "finding": "red", "rotted": "orange", "infra": "lightgrey"}
_MOST = 80  # characters; a badge is one short line


def badge(of: Digest) -> dict[str, Any]:
    said = of.headline
    if of.state == "well":
        proved = sum(bool(fix["proved"]) for fix in report.fixes_proved(of.rows).values())
        said = f"{proved} fix{'' if proved == 1 else 'es'} proved"
    elif of.state == "finding" and of.found[1:] and not of.part:
        said = f"{len(of.found)} findings"
    message = plain.one_line(lower(said), _MOST)
    return {"schemaVersion": 1, "label": "unfix", "message": message, "color": COLOURS[of.state]}
