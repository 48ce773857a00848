"""Islands and nodes of a job: its ranks in islands, which each hold the model once, on nodes of adjoining ranks."""

from __future__ import annotations

from dataclasses import dataclass

from timing_model.arguments import number_of, option, whole
from timing_model.checks import check_above_0, check_at_least, check_count, check_one_of
from timing_model.units import format_bytes, parse_bytes

SPLITS = ("fsdp2", "tensor")
"""Ways of splitting a model over the members of an island: torch's FSDP2, and tensor parallelism."""


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """Nodes of adjoining ranks.

    Raises ``ValueError`` in one line that names the field, if the fields do not go together.
    """

    ranks_per_node: int = option(1, whole(), "G")
    """Ranks that share a node, for hierarchical and islands; no effect on ring and native without islands."""
    nics: int = option(1, whole(), "R")
    """NICs of a node, which its ranks share, for hierarchical and islands."""

    def __post_init__(self) -> None:
        check_count("ranks_per_node", self.ranks_per_node)
        check_count("nics", self.nics)
        if self.nics > self.ranks_per_node:
            raise ValueError(f"nics must be at most as many as ranks_per_node, {self.ranks_per_node}; got {self.nics}")


@dataclass(frozen=True, kw_only=True)
class Islands:
    """Islands of adjoining ranks, which hold the model together.

    Each rank brings the samples of one batch to an update, whatever the islands. With "fsdp2" it computes on these.
    With "tensor" the members of an island compute together on the samples of all of them.

    Raises ``ValueError`` in one line that names the field, if the fields do not go together.
    """

    members: int = option(1, whole(), "M")
    """Ranks of an island, with --split; 1 if each rank holds the whole model."""
    split: str | None = option(None, choices=SPLITS)
    """Way in which members of an island hold a model; no islands without it."""
    split_share: float = option(1.0, number_of(0), "SHARE")
    """Share of the model that --split tensor splits, of its values and of its computation; the rest is whole on every
    member."""
    activations: float | None = option(None, parse_bytes, "8MiB")
    """Bytes that --split tensor sums over an island in an iteration, for the samples of one rank: activations, and
    their gradients."""
    memory: float | None = option(None, parse_bytes, "16GiB")
    """Memory of a rank, for weights, gradients and what optimizer and pipeline hold; no activations. No limit without
    it."""
    optimizer_state: float = option(2.0, number_of(0), "S")
    """Values that the optimizer keeps for a weight: 0 with SGD, 1 with momentum, 2 with Adam and AdamW."""

    def __post_init__(self) -> None:
        check_count("members", self.members)
        if self.memory is not None:
            check_above_0("memory", self.memory)
        check_at_least("optimizer_state", self.optimizer_state, 0)
        if self.split is not None:
            check_one_of("split", self.split, SPLITS)
        elif self.members > 1:
            raise ValueError(f"members must come with a split, {' or '.join(SPLITS)}; got {self.members} without")
        if self.split == "tensor":
            self._check_tensor()
            return
        without = f"with split {self.split}" if self.split else "without split tensor"
        if self.split_share != 1:
            raise ValueError(f"split_share must be left out {without}; got {self.split_share:g}")
        if self.activations is not None:
            raise ValueError(f"activations must be left out {without}; got {format_bytes(self.activations)}")

    def _check_tensor(self) -> None:
        if not 0 < self.split_share <= 1:
            raise ValueError(f"split_share must be above 0 and at most 1; got {self.split_share:g}")
        if self.activations is None:
            raise ValueError(
                "activations must be given with split tensor: the bytes that are summed inside an island for the "
                "samples of one rank in an iteration; got none"
            )
        check_at_least("activations", self.activations, 0)


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Islands of ranks on nodes of ranks, and what a member of an island has of the model.

    Raises ``ValueError`` in one line that names the field, if an island does not fit.
    """

    world_size: int
    islands: Islands = Islands()
    nodes: Nodes = Nodes()

    def __post_init__(self) -> None:
        members = self.islands.members
        if self.world_size % members:
            raise ValueError(f"members must divide {self.world_size} ranks; got {members}")
        if not self._fits_nodes(members):
            g = self.nodes.ranks_per_node
            raise ValueError(f"members must divide ranks_per_node, {g}, or be a multiple of it; got {members}")

    def _fits_nodes(self, members: int) -> bool:
        g = self.nodes.ranks_per_node
        return g % members == 0 or members % g == 0

    @property
    def choices(self) -> tuple[int, ...]:
        """Numbers of members that islands of these ranks can have: 1 only if the model is not split."""
        most = self.world_size if self.islands.split else 1
        return tuple(one for one in range(1, most + 1) if self.world_size % one == 0 and self._fits_nodes(one))

    @property
    def number(self) -> int:
        """Number of islands, N: the ranks of each all-reduce between them."""
        return self.world_size // self.islands.members

    @property
    def is_one_island(self) -> bool:
        """True if all ranks are one island, so that nothing is exchanged between islands."""
        return 1 < self.islands.members == self.world_size

    @property
    def within_node(self) -> bool:
        """True if members use the link inside a node."""
        return 1 < self.islands.members <= self.nodes.ranks_per_node

    @property
    def sharing(self) -> float:
        """Number of ranks of a node that send to other nodes at once through each NIC, at least 1.

        Each member has a ring of its own, with as many ranks of a node as there are islands on it, of which one sends
        to another node.

        >>> islands, nodes = (Islands(members=m, split="fsdp2") for m in (1, 2, 4, 8)), Nodes(ranks_per_node=4)
        >>> [Mesh(world_size=8, islands=one, nodes=nodes).sharing for one in islands]
        [1.0, 2.0, 4.0, 4.0]
        """
        return max(1.0, min(self.islands.members, self.nodes.ranks_per_node) / self.nodes.nics)

    @property
    def held(self) -> float:
        """Share of the model's values that a rank holds, updates and exchanges.

        >>> half = Islands(members=4, split="tensor", split_share=0.5, activations=0.0)
        >>> Mesh(world_size=8, islands=half).held
        0.625
        """
        return self._split / self.islands.members + (1 - self._split)

    @property
    def samples(self) -> int:
        """Number of ranks on whose samples a rank computes."""
        return self.islands.members if self.islands.split == "tensor" else 1

    @property
    def computed(self) -> float:
        """Computation of a rank, as a multiple of that of the whole model on the samples of one rank.

        What is not split, every member computes for the samples of all.

        >>> half = Islands(members=4, split="tensor", split_share=0.5, activations=0.0)
        >>> Mesh(world_size=8, islands=half).computed
        2.5
        """
        return self._split + self.samples * (1 - self._split)

    def buffers(self, numel: float) -> list[float]:
        """Return the number of values in each buffer that a rank exchanges of ``numel`` values of the model.

        What is split and what is not have a buffer each.

        >>> half = Islands(members=4, split="tensor", split_share=0.5, activations=0.0)
        >>> Mesh(world_size=8, islands=half).buffers(80)
        [10.0, 40.0]
        """
        parts = (self._split / self.islands.members * numel, (1 - self._split) * numel)
        return [part for part in parts if part > 0]

    @property
    def _split(self) -> float:
        return self.islands.split_share if self.islands.members > 1 else 0.0
