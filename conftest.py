"""Makes this checkout's pytest the runner of the matrix."""

pytest_plugins = ["harness.plugin"]
