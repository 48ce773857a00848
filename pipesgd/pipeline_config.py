"""Options of the exchange of gradients between ranks that belong to the command, and the names of its strategies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from pipesgd.errors import UserInputError
from pipesgd.options import check_values, option
from pipesgd.sections import PIPELINED, check_width

StrategyName = Literal["pipelined", "ddp", "ps-sync", "ps-async", "easgd-async", "local"]
ServerPlacement = Literal["colocated", "dedicated"]
DdpHook = Literal["none", "fp16", "bf16"]
Buffers = Literal["average", "rank-0", "own"]

STRATEGIES: tuple[str, ...] = get_args(StrategyName)
GRADIENT_SERVERS = ("ps-sync", "ps-async")
"""Strategies whose servers update their weights by gradients, each by a part of them."""
SERVER_STRATEGIES = (*GRADIENT_SERVERS, "easgd-async")
SERVER_PLACEMENTS: tuple[str, ...] = get_args(ServerPlacement)
DDP_HOOKS: tuple[str, ...] = get_args(DdpHook)
BUFFERS: tuple[str, ...] = get_args(Buffers)

WITH_SERVERS = {"strategy": SERVER_STRATEGIES}
"""Strategies with which an option has an effect (``read_by``)."""


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """Exchange of gradients between ranks."""

    strategy: StrategyName = option("pipelined", choices=STRATEGIES)
    """Training strategy: pipelined (width 1 is synchronous SGD), ddp (torch's own), ps-sync and ps-async (parameter
    servers), easgd-async (elastic averaging with a centre on parameter servers), or local (no communication: an upper
    bound on the speed of the others)."""
    width: int = option(2, read_by=PIPELINED)
    """Iterations in flight: the all-reduce of one runs while the next ones compute. 1 is synchronous; auto chooses from
    1 to 3 (see --cluster), and --buckets for width 1 unless they are given."""
    buffers: Buffers = option("average", choices=BUFFERS)
    """Buffers (batch norm's statistics) in evaluations and in the trained model: average (their mean over ranks),
    rank-0 (rank 0's), or own (each rank's). Between evaluations, every rank updates its own."""
    ddp_hook: DdpHook = option("none", choices=DDP_HOOKS, read_by={"strategy": ("ddp",)})
    """Communication hook of --strategy ddp, which compresses gradients: none, or torch's fp16 or bf16."""
    servers: int = option(1, at_least=1, read_by=WITH_SERVERS)
    """Number of parameter servers, each with its share of the weights (ps-sync, ps-async, easgd-async)."""
    server_placement: ServerPlacement = option("colocated", choices=SERVER_PLACEMENTS, read_by=WITH_SERVERS)
    """Placement of the parameter servers: colocated (on the ranks of the first workers) or dedicated (on the last
    ranks, which do nothing else)."""
    staleness_bound: int | None = option(None, at_least=0, read_by={"strategy": ("ps-async",)})
    """Largest lead of the fastest worker over the slowest, in iterations (ps-async); no bound by default, 0 is
    ps-sync."""

    def __post_init__(self) -> None:
        check_width(self.width)
        check_values(self)

    def workers(self, world_size: int) -> int:
        """Return the number of ranks that compute gradients, which are the first ones of ``world_size``.

        Raises:
            UserInputError: there are too few ranks for the servers.
        """
        if self.strategy not in SERVER_STRATEGIES:
            return world_size
        dedicated = self.server_placement == "dedicated"
        workers = world_size - self.servers if dedicated else world_size
        if workers < 1 or self.servers > world_size:
            raise UserInputError(
                f"servers must be at most {max(world_size - dedicated, 0)} on {world_size} "
                f"rank{'s' if world_size > 1 else ''} with --server-placement {self.server_placement}; "
                f"got {self.servers}"
            )
        return workers
