"""Search of a plan, which decides which configurations are computed to the end and which cannot matter."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from itertools import product

from timing_model.all_reduce import CollectiveTime, chunks_of
from timing_model.checks import check_at_least, check_one_of
from timing_model.choices import TIE, Choice, Space, simplicity
from timing_model.cluster_profile import UNCOMPRESSED
from timing_model.costs import collective_time, costs_of, pipelined_time
from timing_model.iteration import IterationTime
from timing_model.job import NATIVE_CODECS, OUTSIDE, OWN_ALL_REDUCE, Question, support_of
from timing_model.lower_bound import least_collective_time
from timing_model.schedules import SEGMENT_BYTES, segments_of

LARGEST_MEETING = 32
"""Most ranks for which an all-reduce is searched whose messages meet (other than 2^k ranks): it is slow to answer, and
it sends about twice the bytes, so others are faster."""


def _has_codec(codec: str) -> Callable[[Question], bool]:
    return lambda question: question.codec == codec


class Group:
    """Group of choices, of which the simplest of the fastest is chosen."""

    def __init__(self, belongs: Callable[[Question], bool]):
        self._belongs = belongs
        self._fast: list[tuple[tuple[float, ...], Choice]] = []
        """Choices in a tie with the fastest one, each with its simplicity."""
        self._fastest = math.inf

    @property
    def chosen(self) -> Choice | None:
        return min(self._fast, key=lambda one: one[0])[1] if self._fast else None

    def add(self, choice: Choice) -> None:
        if self._belongs(choice.question) and choice.score <= self._fastest * (1 + TIE):
            self._fastest = min(self._fastest, choice.score)
            self._fast.append((simplicity(choice.question), choice))
            self._fast = [one for one in self._fast if one[1].score <= self._fastest * (1 + TIE)]

    def could_choose(self, question: Question, floor: float) -> bool:
        """Return True if a configuration like ``question`` that takes at least ``floor`` could change the choice."""
        if not self._belongs(question) or floor > self._fastest * (1 + TIE):
            return False
        return floor < self._fastest or simplicity(question) < min(key for key, _ in self._fast)


class Search:
    """A search in progress."""

    def __init__(self, base: Question, space: Space, accuracy_cost: Mapping[str, float], extrapolate: bool):
        self._base = dataclasses.replace(base, strategy="pipelined", width=1, codec=UNCOMPRESSED, all_reduce="ring")
        self._space = space
        self._cost = accuracy_cost
        self._extrapolate = extrapolate
        for name, share in accuracy_cost.items():
            check_one_of("accuracy_cost", name, ["width", *space.codecs])
            check_at_least("accuracy_cost", share, 0)
        for codec in space.codecs:
            dataclasses.replace(self._base, codec=codec)  # refuses an unknown codec
        usual = [codec for codec in space.codecs if codec in NATIVE_CODECS] or space.codecs
        self.all = Group(lambda question: True)
        self.synchronous = Group(lambda question: question.width == 1 and question.codec in usual)
        self.uncompressed = Group(lambda question: question.codec == UNCOMPRESSED)
        self._groups = [self.all, self.synchronous, self.uncompressed]
        # These groups make the ranking compare codecs.
        self._groups += [Group(_has_codec(codec)) for codec in space.codecs]
        self.choices: list[Choice] = []
        self.considered = 0

    def whole(self) -> Iterator[Question]:
        """Yield the configurations without width and segments."""
        for strategy in self._space.strategies:
            if strategy != "pipelined":
                for codec in self._space.codecs if strategy == "ddp" else (UNCOMPRESSED,):
                    question = self._working(strategy=strategy, codec=codec, all_reduce=OWN_ALL_REDUCE[strategy])
                    if question is not None:
                        self.considered += 1
                        yield question

    def pairs(self) -> None:
        """Look at pairs of codec and all-reduce as long as one could change what is chosen."""
        if "pipelined" not in self._space.strategies:
            return
        pending = []
        for codec, all_reduce in product(self._space.codecs, self._space.all_reduces):
            pair = self._working(codec=codec, all_reduce=all_reduce)
            if pair is not None and self._segments(pair):
                self.considered += len(self._space.widths) * len(self._segments(pair))
                pending.append(self._with_floors(pair))
        pending.sort(key=lambda floors: min(floor for _, floor in floors))
        while pending:
            chosen = next((number for number, floors in enumerate(pending) if self._could_choose(floors)), None)
            if chosen is None:
                return
            self._look_at([question for question, _ in pending.pop(chosen)])

    def add(self, question: Question, iteration: IterationTime, collective: CollectiveTime) -> None:
        """Keep a configuration and its times."""
        score = iteration.total * self._more_iterations(question)
        choice = Choice(question=question, iteration=iteration, collective=collective, score=score)
        self.choices.append(choice)
        for group in self._groups:
            group.add(choice)

    def _working(self, **options: str | None) -> Question | None:
        """Return the job with these options; None if they do not go together or are too far from what was measured."""
        try:
            question = dataclasses.replace(self._base, **options)  # type: ignore[arg-type]  # each option is a str
        except ValueError:  # such as int8 with torch's own all-reduce, which is no configuration
            return None
        if question.all_reduce == "hierarchical" and question.ranks_per_node == 1:
            return None  # it would be a ring
        if question.meets and question.world_size > LARGEST_MEETING:
            return None
        return question if self._extrapolate or support_of(question).kind != OUTSIDE else None

    def _segments(self, pair: Question) -> tuple[int, ...]:
        if pair.all_reduce == "native":
            return (SEGMENT_BYTES,)
        return tuple(one for one in self._space.segments if one >= pair.least_segment_bytes)

    def _with_floors(self, pair: Question) -> list[tuple[Question, float]]:
        """Return the pair in each width, with a lower bound on its score."""
        floors = []
        for width in self._space.widths:
            question = dataclasses.replace(pair, width=width)
            costs = costs_of(question)
            least = least_collective_time(question, costs)
            total = pipelined_time(question, costs, CollectiveTime(least, least, 0.0)).total
            floors.append((question, total * self._more_iterations(question)))
        return floors

    def _could_choose(self, floors: list[tuple[Question, float]]) -> bool:
        return any(group.could_choose(question, floor) for question, floor in floors for group in self._groups)

    def _look_at(self, questions: list[Question]) -> None:
        """Find the best segment size, and add every width with it."""
        pair = questions[0]
        enough = least_collective_time(pair, costs_of(pair)) * (1 + TIE / 2)
        times: dict[int, tuple[CollectiveTime, int]] = {}
        for segment in sorted(self._segments(pair), key=lambda one: abs(math.log2(one / SEGMENT_BYTES))):
            question = dataclasses.replace(pair, segment_bytes=segment)
            costs = costs_of(question)
            chunk = costs.codec.wire_bytes(pair.compute.numel / chunks_of(str(pair.all_reduce), pair.world_size))
            cut = segments_of(chunk, segment)
            if cut not in times:  # segments larger than a chunk are all the same
                times[cut] = collective_time(question, costs, pair.compute.numel), segment
                if times[cut][0].total <= enough:
                    break
        fastest = min(collective.total for collective, _ in times.values())
        # The first ones are nearest to the default.
        collective, segment = next(one for one in times.values() if one[0].total <= fastest * (1 + TIE / 2))
        for one in questions:
            question = dataclasses.replace(one, segment_bytes=segment)
            self.add(question, pipelined_time(question, costs_of(question), collective), collective)

    def _more_iterations(self, question: Question) -> float:
        late = self._cost.get("width", 0.0) * (question.width - 1)
        return 1 + late + self._cost.get(question.codec, 0.0)
