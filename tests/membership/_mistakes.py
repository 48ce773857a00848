"""Planted mistakes: members and ranks that differ from the production code in one rule each."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from experiments.membership.trainer import FACTOR, Frame, Mean, Trainer, Weights
from pipesgd.membership.change import Proposal
from pipesgd.membership.generation import NO_BALLOT, Ballot, Record, is_quorum
from pipesgd.membership.messages import Promise
from pipesgd.membership.protocol import Member

# ---- Mistakes of a rank


class ResidualInPlace(Trainer):
    """A rank that replaces its residual when it encodes, not when the result is held."""

    def encode(self, generation: int, unit: int, value: int, own: int | None, partial: int) -> int:
        coded = super().encode(generation, unit, value, own, partial)
        self.residual = self._tentative[generation, unit]
        return coded


class MeanOverAll(Trainer):
    """A rank that divides by the number of members, whoever contributes."""

    def divisor(self, record: Record, unit: int) -> int:
        return len(record.members)


class SumsAfterPromise(Trainer):
    """A rank whose sums continue after its promise."""

    def may_sum(self) -> bool:
        return self.member is not None

    def _complete(self, unit: int, mean: Mean, now: float) -> None:
        if self.is_summing:
            super()._complete(unit, mean, now)
        else:
            self._take(unit, mean)


class NoFencing(Trainer):
    """A rank that takes frames of older generations for those of its own."""

    def _receive_frame(self, frame: Frame, now: float) -> None:
        if self.member is not None and frame.generation < self.member.record.number:
            frame = frame._replace(generation=self.member.record.number)
        super()._receive_frame(frame, now)


class EmptyUnitUpdates(Trainer):
    """A rank that updates by a unit that nobody has a gradient of."""

    def update(self, unit: int, mean: Mean) -> Weights:
        weights, momentum, digest = self.state
        momentum = momentum * 9 // 10 + mean.total * (FACTOR // mean.divisor)
        return Weights(weights - momentum, momentum, hash((digest, unit, mean.total, mean.divisor)))


# ---- Mistakes of a member


class SlicesNotGivenBack(Member):
    """A member that forgets the slices of those who are lost."""

    def _next_record(
        self, stay: Sequence[int], joiners: Sequence[int], base: int, settled: int, begun: int, now: float
    ) -> Record:
        record = super()._next_record(stay, joiners, base, settled, begun, now)
        lost = [one for member in record.lost for one in member.slices]
        *older, last = record.spans
        kept = tuple(one for one in last.given_back if one not in lost)
        return dataclasses.replace(record, spans=(*older, dataclasses.replace(last, given_back=kept)))


class NoQuorum(Member):
    """A member that decides with whoever answers."""

    def _may_decide(self, those: Collection[int]) -> bool:
        return True


class AcceptedIgnored(Member):
    """A member that proposes its own value, whatever others have accepted."""

    def _value_to_take(self, proposal: Proposal) -> Record | None:
        return None


class NoLease(Member):
    """A member that takes every known death for a certain one."""

    def _may_decide(self, those: Collection[int]) -> bool:
        return is_quorum(those, self.record.members, self.peers.dead)


class DeadDoNotCount(Member):
    """A member that leaves the dead out when it counts the members."""

    def _may_decide(self, those: Collection[int]) -> bool:
        members = tuple(one for one in self.record.members if one not in self.peers.dead or one in those)
        return is_quorum(those, members, self.peers.certain)


class LateResults(Member):
    """A member that takes results of an older ballot than the one that it has promised."""

    def _counts(self, ballot: Ballot) -> bool:
        return True


class VoidValuesBelieved(Member):
    """A member that takes accepted values although a later ballot has levelled, and enters with what it holds."""

    def _void_below(self, promises: Sequence[Promise]) -> Ballot:
        return NO_BALLOT

    def _fits(self, record: Record) -> bool:
        return self.newest >= record.base


class BaseLowered(Member):
    """A member whose base falls within a ballot when the holder of the newest result is lost."""

    def _falls(self, proposal: Proposal, base: int) -> bool:
        return False
