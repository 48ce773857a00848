"""Compiled loops of the CPU's codecs, kept on disk between runs where a folder can be written."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba.core.caching import CompileResultCacheImpl, FunctionCache, UserWideCacheLocator

from pipesgd.errors import warn
from pipesgd.process import is_first_of_machine, say

COMPILING = (
    "compiling the codec's loops, once per installation and codec: half a minute, or minutes where ranks share cores"
)
IN_MEMORY = (
    "compiling the codec's loops in memory, again in every run, since neither the installation nor the user's cache "
    "folder can be written (let NUMBA_CACHE_DIR name a folder that can)"
)
NOT_KEPT = "the codec's compiled loops could not be kept in {folder}, so the next run compiles them again: {why}"

_said: set[str] = set()


def keep(compiled: Any) -> Any:
    """Let a function that numba compiles when it is first called keep on disk what was compiled, and return it.

    It is what ``cache=True`` does, but that raises where nothing can be kept.
    """
    compiled._cache = Kept(compiled.py_func)
    return compiled


class Kept:
    """numba's cache of one function. What it cannot read or write costs a compilation, which is announced once."""

    def __init__(self, function: Callable[..., Any]):
        self._disk: FunctionCache | None = None
        try:
            self._disk = _Disk(function)  # type: ignore[no-untyped-call]
        except Exception:  # noqa: BLE001 (numba's own words for "no folder can be written", and many more)
            return  # which is announced when something is compiled

    @property
    def cache_path(self) -> str | None:
        """Folder in which the function is kept, for numba's statistics; None if it is kept in memory."""
        return None if self._disk is None else self._disk.cache_path

    def load_overload(self, signature: Any, target: Any) -> Any:
        """Return what was compiled for ``signature``; None if it must be compiled now."""
        found = None
        if self._disk is not None:
            try:
                found = self._disk.load_overload(signature, target)
            except Exception:  # noqa: BLE001 (a damaged file, which pickle answers with any exception)
                with contextlib.suppress(Exception):
                    self._disk.flush()  # so that what is compiled now can be kept
        if found is None and is_first_of_machine():
            _once(say, IN_MEMORY if self._disk is None else COMPILING)
        return found

    def save_overload(self, signature: Any, compiled: Any) -> None:
        """Keep what was compiled for ``signature``, if there is a place for it."""
        if self._disk is None:
            return
        try:
            self._disk.save_overload(signature, compiled)
        except Exception as failure:  # noqa: BLE001 (the disk is full, or the index is damaged)
            if is_first_of_machine():
                _once(warn, NOT_KEPT.format(folder=self.cache_path, why=failure))
            self._disk = None


def _once(tell: Callable[[str], None], line: str) -> None:
    if line not in _said:
        _said.add(line)
        tell(line)


class _Places(CompileResultCacheImpl):
    """numba's search for a folder, without a user's own one where the user has no home: it would be made in ``./~``."""

    def __init__(self, function: Callable[..., Any]):
        own = os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~"))  # noqa: PTH111 (which raises without a home)
        if not Path(own).is_absolute():
            self._locator_classes = [one for one in self._locator_classes if one is not UserWideCacheLocator]
        super().__init__(function)  # type: ignore[no-untyped-call]


class _Disk(FunctionCache):
    _impl_class = _Places
