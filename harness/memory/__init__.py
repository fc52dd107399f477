"""Memory detectors: what watches the bytes around the tensors of unmodified code.

``DETECTORS[name](zone_bytes=n)`` is a context manager; open it around the code under test, then ``check()``. Standard
library and torch only: this package is imported inside a leg's throwaway process.
"""

from .guard_page import GuardPage
from .poison import Poison
from .red_zone import RedZone
from .sparse import folds, touches
from .victim import Victim
from .watch import DETECTORS, Allocation, Hit, NoDetector, Watch, unwatched

__all__ = [
    "DETECTORS",
    "Allocation",
    "GuardPage",
    "Hit",
    "NoDetector",
    "Poison",
    "RedZone",
    "Victim",
    "Watch",
    "folds",
    "touches",
    "unwatched",
]
