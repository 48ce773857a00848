"""Time of the collectives inside an island, by which its members compute together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from timing_model.mesh import Mesh
from timing_model.params import FLOAT_BYTES, LinkParams, PlacedLink, uncompressed
from timing_model.schedules import gather_ring
from timing_model.simulate_messages import Network, at_once, priced, simulate_messages, steps_of


class InsideTime(NamedTuple):
    """Time of the collectives of one forward and one backward pass, in s."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        """Time of the collectives of both passes, in s."""
        return self.forward + self.backward


def inside_time(
    mesh: Mesh, tensors: Sequence[int], link: LinkParams, placed: tuple[PlacedLink, ...] = ()
) -> InsideTime:
    r"""Time of the collectives inside an island of mu ranks, for L layers of the model.

    FSDP2 gathers the n bytes of the weights in each of the two passes, and reduces and scatters as many bytes of
    gradients. Tensor parallelism sums activations in the forward pass of each layer, and their gradients in the
    backward pass: A bytes of them in all for the samples of one rank, and an island has those of all its ranks.

    .. math::

        T_{fsdp2} = L\,(3 (\mu-1)(\alpha + o) + 3 S) + \frac{\mu-1}{\mu} n\,(3 \beta + \gamma), \qquad
        T_{tensor} = L\,(4 (\mu-1)(\alpha + o) + 2 S) + (\mu-1) A\,(2 \beta + \gamma)

    Each collective is a ring: the steps of a gather, or those of a scatter, are one pass around it, and a sum of
    activations has two passes. Nothing overlaps with the computation, though torch may gather a layer while it computes
    another one. One rank takes 0 s.
    Source: Zhao et al., 2023 (FSDP); Shoeybi et al., 2019 (Megatron-LM).

    Args:
        mesh: the islands, and how they split the model.
        tensors: values of each layer, of which only the sum and the number count.
        link: link inside an island.
        placed: links between the ranks, where not all are alike: each message of a pass is simulated on its own one,
            and only gamma and sync of ``link`` count.

    >>> from timing_model.mesh import Islands
    >>> link = LinkParams(alpha=1.0, beta=0.25, gamma=0.0, sync=0.0)
    >>> inside_time(Mesh(world_size=2, islands=Islands(members=2, split="fsdp2")), [2, 2], link)
    InsideTime(forward=4.0, backward=8.0)
    >>> summed = Islands(members=2, split="tensor", activations=16.0)
    >>> inside_time(Mesh(world_size=2, islands=summed), [2, 2], link)
    InsideTime(forward=8.0, backward=8.0)
    """
    members, layers = mesh.islands.members, len(tensors)
    if members == 1:
        return InsideTime(0.0, 0.0)

    def collective(passes: int, nbytes: float, *, adds: bool) -> float:
        """Return the time of ``passes`` around the ring, which ``adds`` up in one of them, in s."""
        sums = (members - 1) / members * nbytes * link.gamma if adds else 0.0
        return passes * _pass_time(mesh, link, placed, nbytes) + sums + link.sync

    if mesh.islands.split == "fsdp2":
        weights = FLOAT_BYTES * sum(tensors) / layers
        gather, scatter = (collective(1, weights, adds=adds) for adds in (False, True))
        return InsideTime(layers * gather, layers * (gather + scatter))
    activations = members * (mesh.islands.activations or 0.0) / (2 * layers)
    summed = layers * collective(2, activations, adds=True)
    return InsideTime(summed, summed)


def _pass_time(mesh: Mesh, link: LinkParams, placed: tuple[PlacedLink, ...], nbytes: float) -> float:
    """Return the time in which chunks of ``nbytes`` bytes in all travel from each member to all others, in s."""
    members = mesh.islands.members
    if placed:
        return _simulated_pass_time(members, mesh.world_size, link, placed, nbytes)
    return (members - 1) * (link.alpha + link.overhead + nbytes / members * link.byte_seconds())


@lru_cache(maxsize=4096)
def _simulated_pass_time(
    members: int, world_size: int, link: LinkParams, placed: tuple[PlacedLink, ...], nbytes: float
) -> float:
    steps = [steps_of(gather_ring(member, members), 1, None) for member in range(members)]
    islands = [range(first, first + members) for first in range(0, world_size, members)]
    free = uncompressed(0.0)
    programs = priced(at_once(steps, islands), nbytes / FLOAT_BYTES / members, free)
    return max(simulate_messages(programs, Network(link=link, placed=placed)))
