"""Invariants of a generation of members, checked while they train and at the end of a schedule."""

from __future__ import annotations

import collections
from collections.abc import Collection, Sequence

from experiments.membership.trainer import Mean, Part, Trainer, Weights
from pipesgd.membership.generation import Record, is_quorum


class ViolationError(Exception):
    """An invariant does not hold."""


class Invariants:
    """Checker of what must hold in every schedule, whatever dies, stops or is cut off.

    - Agreement: there is one record of each number.
    - Bits: members of a generation have identical states at its base and after each unit.
    - One side: a generation completes at most one unit above the base of the next one.
    - Order: each rank applies units in order, each once.
    - Sums: all members take part in a unit once; its sum is what they put in, its divisor the number of contributors.
    - Residuals: along the final history, what one sum left out is what the next one starts from.
    - Truth: what a member holds is what it has promised. Only one that a ballot has levelled that came to nothing may
      hold more than the base of a record that names it, and leaves.
    - Samples: each slice is in one applied unit, or due, or waits to be given out.
    """

    def __init__(self, first: Record):
        self.decided = {first.number: first}
        """Record of each generation."""
        self.histories: dict[int, dict[int, tuple[Mean, Weights]]] = collections.defaultdict(dict)
        """Mean and state after it, by rank and unit."""
        self.counts: collections.Counter[str] = collections.Counter()
        self._parts: dict[tuple[int, int], dict[int, Part]] = collections.defaultdict(dict)
        self._states: dict[tuple[int, int], Weights] = {}
        self._at_base: dict[int, Weights] = {}

    # ---- While ranks train

    def see_part(self, who: int, generation: int, unit: int, part: Part) -> None:
        """Check that ``who`` adds once."""
        if self._parts[generation, unit].setdefault(who, part) is not part:
            raise ViolationError(f"{who} added twice to unit {unit} of generation {generation}")

    def see_sum(self, generation: int, unit: int, total: int, divisor: int) -> None:
        """Check that a sum is what all members put in, and that its divisor is the number of gradients."""
        parts = self._parts[generation, unit]
        self.counts["units"] += 1
        self.counts["units without a gradient"] += divisor == 0
        if sum(part.value + part.before - part.after for part in parts.values()) != total:
            raise ViolationError(f"the sum of unit {unit} of generation {generation} is not what was put in")
        if divisor != sum(part.slice is not None for part in parts.values()):
            raise ViolationError(f"the mean of unit {unit} of generation {generation} has divisor {divisor}")
        if set(parts) != set(self.decided[generation].members):
            raise ViolationError(f"unit {unit} of generation {generation} was summed by {sorted(parts)}")

    def see_mean(self, who: int, generation: int, unit: int, mean: Mean, state: Weights) -> None:
        """Check that ``who`` applies units in order, and has the bits of the others."""
        history = self.histories[who]
        if history and unit - 1 not in history:
            raise ViolationError(f"{who} applied unit {unit} after {max(history)}")
        if unit in history:
            raise ViolationError(f"{who} applied unit {unit} twice")
        history[unit] = (mean, state)
        if mean.generation != generation:
            return  # fetched by a newcomer
        if self._states.setdefault((generation, unit), state) != state:
            raise ViolationError(f"members of generation {generation} differ after unit {unit}")
        after = self.decided.get(generation + 1)
        if after is not None and unit > after.base + 1:
            raise ViolationError(
                f"generation {generation} continues to unit {unit} while {after.number} has base {after.base}"
            )

    def see_record(self, record: Record) -> None:
        """Check that there is one record of each number."""
        known = self.decided.setdefault(record.number, record)
        if known is record:
            return
        if known != record:
            raise ViolationError(f"two generations {record.number}: {known.members} and {record.members}")

    def see_entry(self, who: int, record: Record, state: Weights) -> None:
        """Check that members enter a generation with the same state."""
        if self._at_base.setdefault(record.number, state) != state:
            raise ViolationError(f"{who} enters generation {record.number} with another state")

    def see_unfit(self, who: int, record: Record, newest: int, *, was_levelled: bool) -> None:
        """Check that a member is unfit for a generation that names it only since a void ballot has levelled it."""
        self.counts["left with more than the base"] += 1
        if newest < record.base or not was_levelled:
            raise ViolationError(f"{who} holds unit {newest}, but generation {record.number} has base {record.base}")

    def see_snapshot(self, who: int, donor: int, unit: int) -> None:
        """Let the history of ``who`` be that of its donor up to ``unit``."""
        self.histories[who] = {u: one for u, one in self.histories[donor].items() if u <= unit}

    # ---- At the end

    def check_end(self, living: Collection[Trainer]) -> None:
        """Check the history of the newest generation that anybody is in."""
        inside = [one for one in living if one.member is not None]
        if not inside:
            return
        number = max(one.member.record.number for one in inside if one.member is not None)
        inside = [one for one in inside if one.member is not None and one.member.record.number == number]
        longest = max(inside, key=lambda one: one.newest)
        history = self.histories[longest.me]
        for one in inside:
            own = self.histories[one.me]
            if any(history.get(unit) != mean for unit, mean in own.items()):
                raise ViolationError(f"{one.me} and {longest.me} have different histories")
            if sorted(own) != list(range(one.newest + 1)):
                raise ViolationError(f"{one.me} holds units up to {one.newest}, but has applied {len(own)}")
        seen = self._residuals_and_slices(inside, longest.newest, history)
        self._check_slices(seen, self.decided[number], longest.newest, max(one.begun for one in inside))
        self.counts["generations"] = len(self.decided) - 1
        for number, record in self.decided.items():
            before = self.decided.get(number - 1)
            if before is not None and not is_quorum(set(record.members), before.members):
                self.counts["generations by certain deaths"] += 1

    def _residuals_and_slices(
        self, inside: Sequence[Trainer], newest: int, history: dict[int, tuple[Mean, Weights]]
    ) -> collections.Counter[int]:
        """Check the residuals along ``history``; return how often each slice was used."""
        seen: collections.Counter[int] = collections.Counter()
        residuals: dict[int, int] = {}
        for unit in range(newest + 1):
            mean, _ = history[unit]
            for who, part in self._parts[mean.generation, unit].items():
                if part.slice is not None:
                    seen[part.slice] += 1
                if residuals.get(who, 0) != part.before:
                    raise ViolationError(
                        f"residual of {who} before unit {unit} is {part.before}, not {residuals.get(who, 0)}"
                    )
                residuals[who] = part.after
        for one in inside:
            if one.newest == newest and one.residual != residuals.get(one.me, 0):
                raise ViolationError(f"{one.me} has residual {one.residual}, not {residuals.get(one.me, 0)}")
        return seen

    def _check_slices(self, seen: collections.Counter[int], record: Record, newest: int, begun: int) -> None:
        """Check that what was used, what is due and what waits are all slices below the next fresh one, each once."""
        end = max(record.first, newest + 1, begun)
        for iteration in range(newest + 1, end):
            for member in record.contributors(iteration):
                own = record.slice_of(iteration, member)
                assert own is not None
                seen[own] += 1
        waiting, fresh = record.spans[-1].rest(end)
        seen.update(waiting)
        twice = [own for own, times in seen.items() if times > 1]
        never = [own for own in range(fresh) if own not in seen]
        if twice or never or max(seen, default=-1) >= fresh:
            raise ViolationError(f"slices used twice {sorted(twice)[:5]}, never {never[:5]}, of {fresh}")
