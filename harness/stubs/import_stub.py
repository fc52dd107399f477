"""Stands in for a package that SGLang imports and that what is tried here never calls. Copied to `NAME/__init__.py`.

Every module below the package can be imported and every name in it looked up; to call one raises RuntimeError, so
nothing can pass for having run. Shape functions that others register for the package's torch operators are dropped: the
operators are not there. Not a package of the harness: it knows its name from where it was copied to.
"""

import importlib.abc
import importlib.machinery
import sys
import types

import torch


class Missing:
    """A name that is looked up on import. To call it is an error."""

    def __init__(self, path, *_class_body):
        self._path = path

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self._path}.{name}")

    def __mro_entries__(self, bases):
        return ()

    def __call__(self, *args, **kwargs):
        raise RuntimeError(f"{self._path} was called, but {__name__} is an import stub here: install the real package")


class Stub(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self.__name__}.{name}")


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes up any module below this package."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname.startswith(f"{__name__}."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return Stub(spec.name)

    def exec_module(self, module):
        return None


def _drop_fakes():
    register = torch.library.register_fake

    def register_fake(op, *args, **kwargs):
        if isinstance(op, str) and op.startswith(f"{__name__}::"):
            return lambda function: function
        return register(op, *args, **kwargs)

    torch.library.register_fake = register_fake


_drop_fakes()
sys.meta_path.append(Finder())
sys.modules[__name__].__class__ = Stub
