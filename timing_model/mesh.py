"""Mesh of a job: its ranks in islands, which each hold the model once, and the shares that the members have of it."""

from __future__ import annotations

from dataclasses import dataclass

from timing_model.checks import check_at_least, check_count, check_one_of
from timing_model.units import format_bytes

SPLITS = ("fsdp2", "tensor")
"""Ways of splitting a model over the members of an island: torch's FSDP2, and tensor parallelism."""


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Islands of adjoining ranks, on nodes of adjoining ranks.

    Each rank brings the samples of one batch to an update, whatever the mesh. With "fsdp2" it computes on these. With
    "tensor" the members of an island compute together on the samples of all of them.

    Raises ``ValueError`` in one line that names the field, if the fields do not go together.
    """

    world_size: int
    members: int = 1
    """Ranks of an island, m; 1 if each rank holds the whole model."""
    ranks_per_node: int = 1
    nics: int = 1
    """NICs of a node, which its ranks share."""
    split: str | None = None
    """Way in which members hold the model together, one of ``SPLITS``; None if nobody does."""
    split_share: float = 1.0
    """Share of the model's values that is split, and of its computation; the rest is whole on every member."""
    activations: float | None = None
    """Bytes of activations, and of their gradients, that tensor parallelism sums inside an island in an iteration, for
    the samples of one rank; None with FSDP2."""

    def __post_init__(self) -> None:
        check_count("members", self.members)
        if self.world_size % self.members:
            raise ValueError(f"members must divide {self.world_size} ranks; got {self.members}")
        if not self._fits_nodes(self.members):
            raise ValueError(
                f"members must divide ranks_per_node, {self.ranks_per_node}, or be a multiple of it; got {self.members}"
            )
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

    def _fits_nodes(self, members: int) -> bool:
        return self.ranks_per_node % members == 0 or members % self.ranks_per_node == 0

    @property
    def choices(self) -> tuple[int, ...]:
        """Numbers of members that islands of these ranks can have: 1 only if the model is not split."""
        most = self.world_size if self.split else 1
        return tuple(one for one in range(1, most + 1) if self.world_size % one == 0 and self._fits_nodes(one))

    @property
    def islands(self) -> int:
        """Number of islands, N: the ranks of each all-reduce between them."""
        return self.world_size // self.members

    @property
    def is_one_island(self) -> bool:
        """True if all ranks are one island, so that nothing is exchanged between islands."""
        return 1 < self.members == self.world_size

    @property
    def within_node(self) -> bool:
        """True if members use the link inside a node."""
        return 1 < self.members <= self.ranks_per_node

    @property
    def sharing(self) -> float:
        """Number of ranks of a node that send to other nodes at once through each NIC, at least 1.

        Each member has a ring of its own, with as many ranks of a node as there are islands on it, of which one sends
        to another node.

        >>> [Mesh(world_size=8, members=m, ranks_per_node=4, split="fsdp2").sharing for m in (1, 2, 4, 8)]
        [1.0, 2.0, 4.0, 4.0]
        """
        return max(1.0, min(self.members, self.ranks_per_node) / self.nics)

    @property
    def held(self) -> float:
        """Share of the model's values that a rank holds, updates and exchanges.

        >>> Mesh(world_size=8, members=4, split="tensor", split_share=0.5, activations=0.0).held
        0.625
        """
        return self._split / self.members + (1 - self._split)

    @property
    def samples(self) -> int:
        """Number of ranks on whose samples a rank computes."""
        return self.members if self.split == "tensor" else 1

    @property
    def computed(self) -> float:
        """Computation of a rank, as a multiple of that of the whole model on the samples of one rank.

        What is not split, every member computes for the samples of all.

        >>> Mesh(world_size=8, members=4, split="tensor", split_share=0.5, activations=0.0).computed
        2.5
        """
        return self._split + self.samples * (1 - self._split)

    def buffers(self, numel: float) -> list[float]:
        """Return the number of values in each buffer that a rank exchanges of ``numel`` values of the model.

        What is split and what is not have a buffer each.

        >>> Mesh(world_size=8, members=4, split="tensor", split_share=0.5, activations=0.0).buffers(80)
        [10.0, 40.0]
        """
        parts = (self._split / self.members * numel, (1 - self._split) * numel)
        return [part for part in parts if part > 0]

    @property
    def _split(self) -> float:
        return self.split_share if self.members > 1 else 0.0
