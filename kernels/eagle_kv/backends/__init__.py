"""Draft backends by name. Each is imported when it is asked for, so one that cannot load does not take the others."""

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .base import MultiStepDraftBackend


class _Backends(Mapping[str, "type[MultiStepDraftBackend]"]):
    _CLASSES = {
        "flashinfer": "FlashInferMultiStepDraftBackend",
        "flashinfer_mla": "FlashInferMLAMultiStepDraftBackend",
        "triton": "TritonMultiStepDraftBackend",
        "aiter": "AiterMultiStepDraftBackend",
    }

    def __getitem__(self, name: str) -> "type[MultiStepDraftBackend]":
        if name not in self._CLASSES:
            raise KeyError(f"no draft backend is called {name!r}; there are: {', '.join(self._CLASSES)}")
        return getattr(import_module(f"{__name__}.{name}"), self._CLASSES[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._CLASSES)

    def __len__(self) -> int:
        return len(self._CLASSES)

    def __contains__(self, name: object) -> bool:
        return name in self._CLASSES


BACKENDS: Mapping[str, "type[MultiStepDraftBackend]"] = _Backends()
