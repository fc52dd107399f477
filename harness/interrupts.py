"""A process that a Ctrl-C ends without a traceback at any moment, before its work begins and after it, too.

And one that it starts: what Python does between fork and exec is not to be interrupted, see `held`.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

_ASKED_TO_END = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(load: Callable[[], Callable[[], Any]], code: int, said: str) -> Any:
    """Returns what ``load()()`` does, which heeds a Ctrl-C by itself. Where it can't, this one ends all.

    One that waits since this process was started, as `let_through` has it, comes now. It ends all by ``os._exit``: an
    exception would be raised in whatever ``load`` imports, which may keep or change it.
    """

    def end(*_: object) -> None:
        os.write(2, said.encode())
        os._exit(code)

    heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # nohup ignores it
    if heeded:
        signal.signal(signal.SIGINT, end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    main = load()
    try:
        if heeded:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return main()
    except KeyboardInterrupt:
        end()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done: how Python ends is not to be interrupted


@contextlib.contextmanager
def held() -> Iterator[None]:
    """What asks this thread to end waits, while it starts a process whose ``preexec_fn`` calls `let_through`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ASKED_TO_END)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def let_through(*, but_ctrl_c: bool = False, to_run: bool = False) -> None:
    """Between fork and exec: what waited, and what comes, ends this process; what was ignored still is.

    ``but_ctrl_c``: that is ignored. ``to_run``: it waits until the process calls `run`.
    """
    for number in _ASKED_TO_END:
        ignored = signal.getsignal(number) is signal.SIG_IGN or (but_ctrl_c and number == signal.SIGINT)
        signal.signal(number, signal.SIG_IGN if ignored else signal.SIG_DFL)
    now = set(_ASKED_TO_END) - ({signal.SIGINT} if to_run else set())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, now)
