"""Published systems, PowerSGD and members that may be lost, by name: each is imported when an option asks for it."""

from __future__ import annotations

import importlib
from typing import Any

HOMES = {
    "truncate16": "systems.codecs.truncate16:Truncate16",
    "ternary": "systems.codecs.ternary:Ternary",
    "qsgd": "systems.codecs.qsgd:Qsgd",
    "sign": "systems.codecs.sign:Sign",
    "topk": "systems.exchanges.topk:TopK",
    "powersgd": "reducers.powersgd:PowerSgd",
    "rows": "systems.exchanges.rows:RowsReducer",
    "factors": "systems.exchanges.factors:FactorsReducer",
    "fewest bytes": "systems.exchanges.fewest_bytes:fewest_bytes",
    "elastic": "systems.windows.elastic:ElasticAveraging",
    "average state": "systems.windows.average_state:AverageState",
    "parameter servers": "systems.servers.strategy:ParameterServers",
    "elastic servers": "systems.servers.elastic:ElasticServers",
    "elastic members": "elastic.ranks:elastic",
    "elastic flight": "elastic.flight:ElasticFlight",
    "elastic run": "elastic.run:ElasticRun",
}
"""Module in ``pipesgd`` and class or function of each guest, by name."""


def guest(name: str) -> Any:
    """Return the class or function of ``HOMES`` with this name."""
    module, _, attribute = HOMES[name].partition(":")
    return getattr(importlib.import_module(f"pipesgd.{module}"), attribute)
