"""Every error that unfix shows on purpose: one clear line, and the exit code that a command ends with."""

from __future__ import annotations


class UnfixError(Exception):
    """Base of all errors that are told to the user as one line, without a traceback."""

    exit_code = 1


class UsageError(UnfixError):
    """A command line, an environment variable or a call that can't be carried out as asked."""

    exit_code = 2


class ToggleError(UnfixError):
    """A bad toggle file. Each line of the message starts with `path:line: `, the first error first."""

    exit_code = 2


class RottedError(UnfixError):
    """A reversal that no longer applies to the sources it names.

    `fix` is the fix's id ("" as long as nobody knows it), `target` the dotted path or file path that it names.
    """

    exit_code = 3

    def __init__(self, message: str, *, fix: str = "", target: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix
        self.target = target

    def __str__(self) -> str:
        where = " in ".join(part for part in (self.fix, self.target) if part)
        return f"{where}: {self.message}" if where else self.message


class InfraError(UnfixError):
    """Nothing to do with the fix: a full disk, a missing compiler, a lost worker."""

    exit_code = 4


class MissingPackageError(InfraError):
    """The code base under test isn't installed here. `package` is its top-level name."""

    def __init__(self, message: str, *, package: str) -> None:
        super().__init__(message)
        self.package = package
