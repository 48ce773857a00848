"""Fuzzed messages of other ranks: values in the store, and messages between parameter servers and workers."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipesgd.comm.own_all_reduce import ranks_per_node
from pipesgd.errors import PipesgdError
from pipesgd.flat_buffer import FlatBuffer
from pipesgd.optim.hyperparameters import as_numbers
from pipesgd.ranks import Ranks, check_same_options
from pipesgd.systems.servers.messages import Reply, Request, RequestMessage, unpack_state
from pipesgd.systems.servers.shard import Shard
from pipesgd.systems.servers.update_rule import OptimizerRule, ShardLayout
from tests.fuzzing._cases import Target, absurd_number
from tests.fuzzing._mutations import NASTY_JSON, damaged

OPTIONS = {"lr": 0.1, "width": 2, "output": "run"}
ATTEMPTS = ("exchange", "agree", "options", "ranks on each node")


def make_store_value(chance: random.Random, folder: Path) -> tuple[str, bytes]:
    """Draw an operation of both ranks, and rank 1's part of it."""
    attempt = chance.choice(ATTEMPTS)
    honest = {"agree": "null", "options": json.dumps(OPTIONS), "ranks on each node": "[1, 0]"}.get(attempt, "[1, 2.5]")
    if chance.random() < 0.5:
        return attempt, chance.choice(NASTY_JSON).encode()
    return attempt, damaged(chance, honest.encode())


def try_store_value(case: tuple[str, bytes], folder: Path) -> str | None:
    """Read the value as rank 0 does."""
    attempt, value = case
    names = {"options": "configuration"}
    store = dist.HashStore()
    ranks = Ranks(rank=0, world_size=2, store=store)
    ranks.timeout = 5.0
    store.set(f"exchange of 2/1/{names.get(attempt, attempt)}/1", value)  # type: ignore[arg-type]  # torch takes bytes, too
    if attempt == "exchange":
        ranks.all_gather_object(attempt, [1, 2.5])
    elif attempt == "agree":
        ranks.raise_together(attempt, lambda: None)
    elif attempt == "options":
        check_same_options(ranks, dict(OPTIONS), free=frozenset())
    else:
        ranks_per_node(ranks)
    return None


# ---- Parameter servers


def _shard() -> tuple[Shard, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    parameters = list(model.parameters())
    layout = ShardLayout(FlatBuffer(parameters), 0, 1)
    rule = OptimizerRule(parameters, optimizer, layout)
    return Shard(rule, layout, workers=2, bound=None, rank=0, timeout=5.0), optimizer


NUMBERS = (
    *(0.0, -1.0, 0.5, 1.0, 2.0, 7.0, 1e15, 1e30, -1e300, 2.0**53, 5e-324),
    *(float("nan"), float("inf"), float("-inf")),
)


def make_message(chance: random.Random, folder: Path) -> tuple[str, Any]:
    """Draw a request, a reply, or a server's state."""
    kind = chance.choices(["request", "reply", "state"], [4, 2, 4])[0]
    shard, optimizer = _shard()
    if kind == "state":
        return kind, _state(chance, shard)
    if kind == "request":
        options = len(as_numbers(optimizer))
        numbers = RequestMessage(chance.choice(list(Request)), number=chance.choice([0, 1, 64])).pack(options).tolist()
    else:
        numbers = Reply(7, True, lost=chance.choice([None, 0, 1]), state_bytes=chance.choice([0, 64])).pack().tolist()
    for _ in range(chance.choice([0, 1, 1, 2, 8])):
        numbers[chance.randrange(len(numbers))] = chance.choice(NUMBERS)
    return kind, numbers


def _state(chance: random.Random, shard: Shard) -> bytes:
    if chance.random() < 0.5:
        return damaged(chance, shard.save().numpy().tobytes())
    foreign = unpack_state(shard.save(), shard.weights, 2)
    wrong: tuple[Any, ...] = (
        *(None, [], {}, 1, "x", [-1, 2], [1.5, 2], [True, False], [10**30, 0], [torch.zeros(3)]),
        *({"state": {}, "param_groups": []}, {"state": 1, "param_groups": [1]}, [torch.zeros(8, dtype=torch.int8)]),
    )
    foreign[chance.choice(list(foreign))] = chance.choice(wrong)
    file = io.BytesIO()
    torch.save(chance.choice([foreign, foreign, foreign, chance.choice(wrong)]), file)
    return file.getvalue()


def try_message(case: tuple[str, Any], folder: Path) -> str | None:
    """Read the message as a server or a worker does; a server must be able to save again a state that it has loaded."""
    kind, content = case
    if kind == "reply":
        reply = Reply.unpack(content, ranks=2, most_state_bytes=1000)
        found = absurd_number([reply.arrivals, reply.lost or 0, reply.state_bytes], 2.0**53)
        return None if found is None else f"{found} was accepted"
    shard, _ = _shard()
    if kind == "request":
        most = shard.most_state_bytes
        asked = RequestMessage.unpack(content, worker=1, most_state_bytes=most)
        if asked.kind == Request.LOAD and asked.number > most:
            return f"a state of {asked.number} bytes was accepted"
        found = absurd_number([asked.number, asked.place, *asked.options], 2.0**53)
        return None if found is None else f"{found} was accepted"
    shard.load(_tensor(content))
    again = shard.save()
    return None if 0 < again.nbytes <= shard.most_state_bytes else f"a state of {again.nbytes} bytes"


def _tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


TARGETS = (
    Target("store values", 400, make_store_value, try_store_value, (PipesgdError,)),
    Target("parameter-server messages", 800, make_message, try_message, (PipesgdError, ValueError)),
)
