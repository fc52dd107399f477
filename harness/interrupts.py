"""A process that a Ctrl-C ends without a traceback at any moment, before its work begins and after it, too."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any


def run(load: Callable[[], Callable[[], Any]], code: int, said: str) -> Any:
    """Returns what ``load()()`` does, which heeds a Ctrl-C by itself. Where it can't, this one ends all.

    By ``os._exit``: an exception would be raised in whatever ``load`` imports, which may keep or change it.
    """

    def end(*_: object) -> None:
        os.write(2, said.encode())
        os._exit(code)

    heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # nohup ignores it
    if heeded:
        signal.signal(signal.SIGINT, end)
    main = load()
    try:
        if heeded:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return main()
    except KeyboardInterrupt:
        end()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done: how Python ends is not to be interrupted
