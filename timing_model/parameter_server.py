"""Traffic of a synchronous round of parameter servers, as ``pipesgd/systems/servers/`` runs them."""

from __future__ import annotations

from dataclasses import dataclass

from timing_model.all_reduce import CollectiveTime
from timing_model.arguments import option, whole
from timing_model.checks import check_at_least, check_count, check_one_of
from timing_model.params import LinkParams

PLACEMENTS = ("colocated", "dedicated")


@dataclass(frozen=True, kw_only=True)
class Servers:
    """Servers of ps-sync.

    Raises ``ValueError`` in one line that names the field, if the fields have no such values.
    """

    number: int = option(1, whole(), "S", name="servers")
    """Number of servers of ps-sync."""
    placement: str = option(PLACEMENTS[0], name="server_placement", choices=PLACEMENTS)
    """Placement of the servers, with workers or on ranks of their own."""

    def __post_init__(self) -> None:
        check_count("servers", self.number)
        check_one_of("server_placement", self.placement, PLACEMENTS)

    def check(self, world_size: int) -> None:
        """Raise ``ValueError`` unless the servers fit on the ranks, and leave one to work."""
        most = world_size if self.placement == "colocated" else world_size - 1
        if self.number > most:
            raise ValueError(
                f"servers must be at most {most} with {world_size} ranks and placement {self.placement}; "
                f"got {self.number}"
            )


def parameter_server_time(
    link: LinkParams,
    nbytes: float,
    world_size: int,
    *,
    servers: Servers = Servers(),
    sharing: float = 1.0,
) -> CollectiveTime:
    r"""Time from the gradients of a round to the weights, in s, for a job of p ranks and s servers.

    A server colocated with one of the first workers has w = p - 1 workers on other ranks; dedicated servers, on ranks
    of their own, have w = p - s. Gradients come in, are added when all are there, and weights go out. A worker sends n'
    bytes: n, or (s-1)/s n if every worker has a colocated server. The time is

    .. math::

        T_{shared} = 2 (\alpha + o) + 2 \max\left(n',\; w \frac{n}{s}\right) \beta + w \frac{n}{s} \gamma + S

    if all workers share a server's NIC evenly, so that all begin and end together. If they are served in turn, those
    that have their weights compute and send while others still wait, and the steady state takes only

    .. math:: T_{turn} = 2 (\alpha + o) + \left(n' + w \frac{n}{s}\right) \beta + w \frac{n}{s} \gamma + S

    That is (p + 1) n beta instead of 2 p n beta for one server and p workers. The truth is in between: ``sharing`` is 1
    for the first formula and 0 for the second. On this project's testbed, with one server colocated with worker 0, it
    was measured as 0.48 at 100 Mbit/s, 0.47 at 200 Mbit/s and 0.28 at 1 Gbit/s (``experiments/LOG.md``, "parameter
    servers"). timing.md has 2 max(1, p/s) n beta, with p workers and dedicated servers.

    Codecs do not apply. The time of the servers' optimizer is part of the computation. Raises ``ValueError`` if a value
    is out of range, or no rank is left to work.

    >>> link = LinkParams(alpha=0.0, beta=1.0, gamma=0.0, sync=0.0)
    >>> [parameter_server_time(link, 100.0, 4, sharing=sharing).total for sharing in (1.0, 0.0)]
    [600.0, 400.0]
    """
    check_count("world_size", world_size)
    check_at_least("nbytes", nbytes, 0)
    check_at_least("sharing", sharing, 0)
    if sharing > 1:
        raise ValueError(f"sharing must be at most 1; got {sharing}")
    servers.check(world_size)
    colocated, number = servers.placement == "colocated", servers.number
    workers = world_size - 1 if colocated else world_size - number
    if workers == 0:
        return CollectiveTime(0.0, 0.0, 0.0)
    share = nbytes / number
    from_worker = nbytes - share if colocated and number == world_size else nbytes
    shared = 2 * max(from_worker, workers * share) * link.byte_seconds()
    in_turn = (from_worker + workers * share) * link.byte_seconds()
    wire = 2 * (link.alpha + link.overhead) + in_turn + sharing * (shared - in_turn) + link.sync
    sums = workers * share * link.gamma
    return CollectiveTime(wire + sums, wire, sums)
