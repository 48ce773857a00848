"""Buckets of gradients that leave while the backward pass still runs: their parameters, and the hooks that watch it.

Wait-free backpropagation (Zhang et al., "Poseidon", USENIX ATC 2017). All ranks sum the same buckets in the same order,
that in which the backward pass is expected to complete them: a bucket that is complete waits for those before it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

from torch import Tensor, nn

from pipesgd.errors import UserInputError
from pipesgd.sections import cut_of
from timing_model.buckets import WHOLE


def bucket_indices(
    model: nn.Module, parameters: Sequence[Tensor], buckets: str, apart: Sequence[Collection[int]] = ()
) -> list[list[int]]:
    """Return the indices of the parameters of each bucket, the bucket that is complete first in front.

    Parameters whose gradients are gathered are buckets of their own, the last ones, in addition to the others.
    Embeddings are the last of all, since they are most often the first layers, whose gradients are complete last. Of
    the others, the backward pass is expected to reach parameters in the reverse of the model's order, and those that
    are not the model's at the end.

    Args:
        model: the model.
        parameters: the parameters that are trained.
        buckets: number of buckets, or the largest size of one.
        apart: ids of the parameters of each bucket of gathered gradients; one without a trained parameter is left out.

    Raises:
        UserInputError: there are fewer of the other parameters than buckets.
    """
    places = {id(parameter): place for place, parameter in enumerate(model.parameters())}
    gathered = [[index for index, parameter in enumerate(parameters) if id(parameter) in ids] for ids in apart]
    gathered = [bucket for bucket in gathered if bucket]
    others = sorted(set(range(len(parameters))).difference(*gathered))
    order = sorted(others, key=lambda index: -places.get(id(parameters[index]), -1))
    cut = cut_of(buckets)
    try:
        parts = [] if gathered and not order and cut == WHOLE else cut([parameters[index].nbytes for index in order])
    except ValueError as failure:
        raise UserInputError(str(failure)) from None
    return [sorted(order[part.start : part.stop]) for part in parts] + gathered


class BackwardHooks:
    """Hooks of parameters that let buckets leave, in order, as soon as the backward pass has completed their gradients.

    The last bucket, and others that are not complete after the backward pass, leave in the ``step`` that follows it:
    for one bucket there are no hooks.

    Args:
        buckets: parameters of each bucket.
        leave: lets the next bucket leave; it may decline, and returns False then.
        left: returns the number of buckets that have left since the last step.
    """

    def __init__(self, buckets: Sequence[Sequence[Tensor]], leave: Callable[[], bool], left: Callable[[], int]):
        self._buckets = buckets[:-1]
        self._leave = leave
        self._left = left
        self._holds = 0
        self._incomplete: list[set[int]] = []
        """Parameters of each bucket, by their ids, whose gradients the backward pass has not completed."""
        self.begin_iteration()
        self._handles = [
            parameter.register_post_accumulate_grad_hook(partial(self._complete, number))
            for number, bucket in enumerate(self._buckets)
            for parameter in bucket
        ]

    def begin_iteration(self) -> None:
        """Expect the backward pass of another iteration."""
        self._incomplete = [{id(parameter) for parameter in bucket} for bucket in self._buckets]

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Let no bucket leave while the context is open: gradients add up."""
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1

    def check_taken(self) -> None:
        """Refuse gradients of parameters whose bucket has left.

        Raises:
            UserInputError: there are such gradients.
        """
        for bucket in self._buckets[: self._left()]:
            if any(parameter.grad is not None for parameter in bucket):
                raise _late()

    def remove(self) -> None:
        """Remove the hooks, and forget whom they called."""
        for handle in self._handles:
            handle.remove()
        self._leave = lambda: False

    def _complete(self, number: int, parameter: Tensor) -> None:
        if number < self._left():
            raise _late()
        if self._holds:
            return
        if id(parameter) not in self._incomplete[number]:  # another backward pass adds to a bucket that has not left
            self.begin_iteration()
        self._incomplete[number].discard(id(parameter))
        while (left := self._left()) < len(self._buckets) and not self._incomplete[left] and self._leave():
            pass


def _late() -> UserInputError:
    return UserInputError(
        "gradients must be complete after one backward pass outside of accumulating(), up to step(), with buckets; "
        "got another gradient of a parameter whose bucket has left"
    )
