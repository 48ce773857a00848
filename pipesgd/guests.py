"""Published systems in ``pipesgd.systems``, by name: each is imported when an option names it, and by nothing else."""

from __future__ import annotations

import importlib
from typing import Any

HOMES = {
    "topk": "exchanges.topk:TopKReducer",
    "rows": "exchanges.rows:RowsReducer",
    "factors": "exchanges.factors:FactorsReducer",
    "fewest bytes": "exchanges.fewest_bytes:fewest_bytes",
    "truncate16": "codecs.truncate16:Truncate16",
    "ternary": "codecs.ternary:Ternary",
    "qsgd": "codecs.qsgd:Qsgd",
    "sign": "codecs.sign:Sign",
    "elastic": "windows.elastic:ElasticAveraging",
    "average state": "windows.average_state:AverageState",
    "parameter servers": "servers.strategy:ParameterServers",
    "elastic servers": "servers.elastic:ElasticServers",
}
"""Module in ``pipesgd.systems`` and class or function of each guest, by name."""


def guest(name: str) -> Any:
    """Return the class or function of ``HOMES`` with this name."""
    module, _, attribute = HOMES[name].partition(":")
    return getattr(importlib.import_module(f"pipesgd.systems.{module}"), attribute)
