"""unfix: take a merged fix out again, and prove that the bug comes back and that a test catches it.

Data flows one way through the modules of this package:

    fixes -> selection -> edits -> overlay -> sandbox (leg, reach, memory) -> outcome -> verdict
          -> prover -> plugin, cli

``docs/design.md`` has a line for each file.
"""

__version__ = "0.1.0"
