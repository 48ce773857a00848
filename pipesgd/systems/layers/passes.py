"""Passes through split layers of an island whose members have samples of their own: three schemes of exchanging these.

The layers below the split ones are data-parallel: each member computes them on its own samples. The split layers are
computed by all members together, on the same samples, which they have from each other.

References:
    Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014, section 4.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipesgd.errors import DisagreementError, RunError, UserInputError, named
from pipesgd.shards import local
from pipesgd.systems.layers.plan import PORTIONS, LayerPlan, number_of_passes, rows_of_passes

_LEFT: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
"""Messages of iterations that were left before their end, by group. They are kept, since gloo delivers nothing more to
a rank after a message whose tensor is gone."""


class Passes:
    """Passes of an iteration's samples through the split layers, as a plan says; ``split_layers`` returns them.

    By the plan's ``scheme``, a pass has all samples of all members ("gather": there is one pass), those of one member
    after the other ("turns"), or a portion of each member's ("portions"). Each iteration is a loop:

    1. the messages of the next pass leave, while the loop computes this one;
    2. the loop gets the samples of this pass: their activations, whole on every member, and their targets. It does the
       backward pass of a loss of them, and updates the split layers after every ``update_period`` passes;
    3. gradients of the activations return to the members that have computed these;
    4. after the last pass, the backward pass of the layers below runs, for this rank's own samples.

    Without a scheme, members have the same samples, or nothing is split: the one pass has the samples given to it.

    Args:
        mesh: a DeviceMesh of one dimension, that of the members of an island.
        plan: the plan of the layers.

    Examples:
        A loop in which the split layers have a pipeline of their own, between islands, and the layers below one over
        all ranks::

            passes = split_layers(model, mesh["inside"], "layers.toml")
            with (
                Pipelined(model.features, optimizer) as below,
                Pipelined(model.classifier, other_optimizer, mesh=mesh) as split,
            ):
                for inputs, targets in loader:
                    samples = passes(model.features(inputs), targets)
                    for number, (activations, labels) in enumerate(samples, start=1):
                        loss = loss_of(model.classifier(activations), labels)
                        (loss / passes.update_period).backward()
                        if number % passes.update_period == 0:
                            split.step()
                    below.step()
    """

    def __init__(self, mesh: Any, plan: LayerPlan):
        self._mesh = mesh
        self._group = mesh.get_group()
        self._members: int = mesh.size()
        self._own = dist.get_rank(self._group)
        self.scheme = plan.scheme
        """The plan's scheme; None without one."""
        self.update_period = plan.update_period
        """Passes from one update of the split layers to the next: the number of losses whose mean an update is of."""
        self.count = number_of_passes(plan.scheme, self._members)
        """Passes in an iteration."""
        self.sent_bytes = 0
        """Bytes that this rank has sent to the other members for passes so far, in activations, their gradients, and
        other tensors of the samples. What the split layers themselves exchange is not counted."""
        self._under_way = False

    def __call__(self, activations: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield the activations of each pass, (samples, ...), and what ``others`` have of the same samples.

        The activations are a DTensor, replicated over the members: layers without weights take it as a tensor, and the
        first layer with weights must be one of the plan. All members take the same passes together, to the end.

        The backward pass that follows the last one is that of the mean of all updates' losses, for this rank's share:
        the mean over ranks of what it leaves in ``.grad`` is the gradient.

        Args:
            activations: what the layers below give for this rank's own samples, (B, ...), with the same B on all
                members; with scheme "portions" a multiple of their number.
            others: tensors (B, ...) of the same samples, such as targets; they get no gradient.

        Raises:
            DisagreementError: members have given tensors of different shapes.
            RunError: a member has left an iteration on the same mesh, of these or other passes, before its end.
            UserInputError: a tensor of another number of samples, a number that cannot be divided into portions, or a
                pass without a backward pass.
        """
        if self.scheme is None:
            yield activations, *others
            return
        given = [tensor.detach().contiguous() for tensor in (activations, *others)]
        self._check(given)
        self._under_way = True
        rows = rows_of_passes(self.scheme, self._members, len(activations))
        arriving = self._bring(given, rows[0])
        returning: list[tuple[list[Tensor], list[Any]]] = []
        try:
            for number, of_members in enumerate(rows):
                (whole, *rest), messages = arriving
                _wait(messages)
                if number + 1 < len(rows):
                    arriving = self._bring(given, rows[number + 1])
                entering = self._replicated(whole).requires_grad_(activations.requires_grad)
                yield entering, *rest
                if activations.requires_grad:
                    if entering.grad is None:
                        raise UserInputError(
                            "each pass must be followed by backward() of a loss of its activations; got none after "
                            f"pass {number + 1} of {self.count}"
                        )
                    returning.append(self._give_back(entering.grad, of_members))
            if activations.requires_grad:
                gradient = torch.zeros_like(given[0])
                for of_members, (shares, messages) in zip(rows, returning, strict=True):
                    _wait(messages)
                    for share in shares:  # in the order of the members, so that the sum is always the same
                        gradient[of_members[self._own]] += share
                # A loss is of the samples of all members, and of one update; ranks take the mean over members.
                activations.backward(gradient.mul_(self._members * self.update_period / self.count))
        except BaseException:  # GeneratorExit, too, with which Python closes passes that a loop has left
            _LEFT.setdefault(self._group, []).append((arriving, returning))
            raise
        self._under_way = False

    def _check(self, given: Sequence[Tensor]) -> None:
        """Refuse, on all members alike, an iteration after one that any has left, and tensors that cannot be passed."""
        is_left = self._under_way or self._group in _LEFT
        sizes_of_own = (size for tensor in given for size in (len(tensor), tensor.numel()))
        own = torch.tensor([int(is_left), *sizes_of_own], device=given[0].device)
        of_members = [torch.empty_like(own) for _ in range(self._members)]
        dist.all_gather(of_members, own, group=self._group)
        found = [one.tolist() for one in of_members]
        if left_on := [dist.get_global_rank(self._group, member) for member, (left, *_) in enumerate(found) if left]:
            raise RunError(
                f"passes must be taken to the end; got another iteration after one that was left on {named(left_on)}"
            )
        sizes = [one[1:] for one in found]
        for member, one in enumerate(sizes):
            if one != sizes[0]:
                ranks = [dist.get_global_rank(self._group, number) for number in (member, 0)]
                raise DisagreementError(
                    "tensors of a pass must have the same shapes on all members of an island; got "
                    f"{_described(one)} on rank {ranks[0]}, {_described(sizes[0])} on rank {ranks[1]}"
                )
        samples, *others = sizes[0][::2]
        for rows in others:
            if rows != samples:
                raise UserInputError(f"tensors of a pass must have a row for each of its {samples} samples; got {rows}")
        if self.scheme == PORTIONS and samples % self._members:
            raise UserInputError(
                f"samples must be a multiple of the {self._members} members of an island with scheme {PORTIONS}; got "
                f"{samples}"
            )

    def _bring(self, given: Sequence[Tensor], rows: Sequence[slice]) -> tuple[list[Tensor], list[Any]]:
        """Begin to exchange these rows of each member's tensors; return those of all members, and the messages."""
        wholes, messages = [], []
        places = _places(rows)
        for tensor in given:
            whole = tensor.new_empty(places[-1].stop, *tensor.shape[1:])
            own = tensor[rows[self._own]]
            whole[places[self._own]] = own
            messages += self._exchange([own] * self._members, [whole[place] for place in places])
            wholes.append(whole)
        return wholes, messages

    def _give_back(self, gradient: Any, rows: Sequence[slice]) -> tuple[list[Tensor], list[Any]]:
        """Begin to return gradients of a pass's activations to the members that have these ``rows`` of it.

        Returns the summands of the gradient of this rank's own rows, in the order of the members, and the messages.
        """
        from torch.distributed.tensor import Replicate

        places = _places(rows)
        [placement] = gradient.placements
        if not placement.is_partial():  # every member has computed all of it
            whole = local(gradient.redistribute(placements=[Replicate()]))
            return [whole[places[self._own]]], []
        part = local(gradient).contiguous()
        own = part[places[self._own]]
        shares = [own if member == self._own else torch.empty_like(own) for member in range(self._members)]
        return shares, self._exchange([part[place] for place in places], shares)

    def _exchange(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> list[Any]:
        """Begin to send each other member its tensor in ``outgoing``, and to receive into that of ``incoming``.

        Empty ones are neither sent nor received. Returns the messages, which are to be waited for.
        """
        messages = []
        for member in range(self._members):
            if member == self._own:
                continue
            for operation, tensor in ((dist.isend, outgoing[member]), (dist.irecv, incoming[member])):
                if tensor.numel():
                    messages.append(dist.P2POp(operation, tensor, group=self._group, group_peer=member))
            self.sent_bytes += outgoing[member].nbytes
        return dist.batch_isend_irecv(messages) if messages else []

    def _replicated(self, whole: Tensor) -> Tensor:
        """Return ``whole`` as a DTensor, whose gradient says by itself if it is a sum to be taken over the members."""
        from torch.distributed.tensor import DTensor, Replicate

        replicated: Tensor = DTensor.from_local(whole, self._mesh, [Replicate()], run_check=False)
        return replicated


def _places(rows: Sequence[slice]) -> list[slice]:
    """Return where each member's rows are in a pass: one member's after the other's."""
    ends = itertools.accumulate((one.stop - one.start for one in rows), initial=0)
    return [slice(begin, end) for begin, end in itertools.pairwise(ends)]


def _wait(messages: Sequence[Any]) -> None:
    for message in messages:
        message.wait()


def _described(sizes: Sequence[int]) -> str:
    """Return a description of tensors, given the rows and the values of each, one after the other."""
    pairs = zip(sizes[::2], sizes[1::2], strict=True)
    return " and ".join(f"{rows} samples of {values // max(rows, 1)}" for rows, values in pairs)
