"""Inside a node first, then between nodes: each value crosses a node's card once each way."""

from __future__ import annotations

from pipesgd.comm.ring import all_gather, reduce_scatter, ring
from pipesgd.comm.schedule import Encode, Schedule


def hierarchical(rank: int, world_size: int, ranks_per_node: int) -> Schedule:
    """Three rings, with a chunk for each rank; ranks of a node have adjoining numbers.

    Reduce-scatter around the node leaves each of its ranks with the node's sum of one share. The ranks of all nodes
    that have the same share reduce it around a ring between nodes. All-gather around the node. With N nodes of g ranks,
    a rank sends 2(N-1)/N n/g bytes of n to another node, and a node's card carries what it would for one rank.
    """
    g, nodes = ranks_per_node, world_size // ranks_per_node
    if g == 1 or nodes == 1:
        return ring(rank, world_size)
    node, local = divmod(rank, g)
    on_node = [node * g + other for other in range(g)]
    share = (local + 1) % g  # what this rank holds after the first ring
    on_share = [other * g + local for other in range(nodes)]
    # Of each share, in the order in which this node sends them on to others, so that the first can go at once.
    chunks = [[part * nodes + (node - k) % nodes for k in range(nodes)] for part in range(g)]
    inner_steps, outer_steps = g - 1, nodes - 1
    # And in that in which others leave their sums here.
    finished = [[part * nodes + (node + 1 - k) % nodes for k in range(nodes)] for part in range(g)]
    single = [[share * nodes + other] for other in range(nodes)]
    return Schedule(
        chunks=g * nodes,
        operations=(
            *reduce_scatter(local, on_node, chunks),
            *reduce_scatter(node, on_share, single, inner_steps),
            Encode(finished[share][0]),
            *all_gather(node, on_share, single, inner_steps + outer_steps),
            *all_gather(local, on_node, finished, inner_steps + 2 * outer_steps),
        ),
    )
