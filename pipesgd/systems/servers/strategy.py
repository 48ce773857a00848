"""Parameter servers: workers push gradients to them and pull weights back, in rounds or each at its own pace."""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor, nn

from pipesgd.checks import check_one_of, check_timeout
from pipesgd.comm.all_reduce import AllReduce
from pipesgd.comm.connections import make_all_reduce
from pipesgd.comm.thread import CLOSE_SECONDS, CommunicationThread
from pipesgd.comm.transport import Pending, communication_group
from pipesgd.errors import CommunicationError, NonFiniteGradientError, UserInputError
from pipesgd.flat_buffer import FlatBuffer, all_finite, check_dense, pack_gradients
from pipesgd.optim import hyperparameters
from pipesgd.optim.step import (
    check_unchanged,
    count_as_stepped,
    drop_gradients,
    trainable_identities,
    trainable_parameters,
)
from pipesgd.pipeline_config import Buffers, PipelineConfig, ServerPlacement
from pipesgd.ranks import Ranks, current
from pipesgd.replicas import combine_buffers, share_rank_0s_values, sum_buffer
from pipesgd.sections import DEFAULT_TIMEOUT, ON_NONFINITE
from pipesgd.strategy import Span, StepReport, Strategy
from pipesgd.systems.servers.ends import FOREVER, Links, Server, WorkerThread
from pipesgd.systems.servers.messages import Reply, Request, RequestMessage
from pipesgd.systems.servers.shard import Shard
from pipesgd.systems.servers.update_rule import OptimizerRule, ShardLayout, UpdateRule

Answers = list[tuple[Reply, Tensor]]
"""Replies of the servers that were asked, each with the state that came with it."""

REPLY_GRACE_SECONDS = 1.0
"""Seconds that a worker waits for a reply beyond a server's wait for gradients: the server knows who is missing."""

FAREWELL_SECONDS = 5.0
"""Seconds that a server in the process of a worker that closes waits for the other workers to close, too."""


class ParameterServers(Strategy):
    """Workers push gradients to servers, which own the weights, and pull the weights back.

    The first w ranks compute. The flat buffer of the weights is split into ``servers`` ranges of elements;
    each server updates its own with a copy of ``optimizer``. Each ``step`` of iteration t is

    1. pack: the gradients move from ``.grad`` into a flat buffer;
    2. push: every server gets its range, the options that schedules change (learning rates, momentum, betas, weight
       decay), and whether the whole gradient is finite;
    3. wait: until every server has answered with the weights of its range;
    4. update: the weights move into the parameters.

    ``staleness_bound`` decides when a server answers. With 0 (``ps-sync``), it answers once the mean of all workers'
    gradients is applied, so that training is synchronous SGD and replicas are bit-identical. With None (``ps-async``),
    it answers at once, after it has applied this gradient alone. With b >= 1 it does the same, but a worker that would
    start an iteration more than b ahead of the slowest waits for it. A gradient that is applied alone has 1/w of the
    learning rate that was set when it was computed, and learning-rate schedules follow the number of all workers'
    updates, divided by w.

    A gradient that is not finite on its worker is left out, with its whole round if the bound is 0, otherwise alone. So
    is the mean of a round whose sum overflows, by those servers in whose ranges it does.
    With more than one server, optimizers must update each element on its own, since ranges split parameters anywhere.

    Collective calls begin with a wait for the workers that have not come yet. It lasts as long as their gradients keep
    arriving, however far they are behind: only a worker that is silent for ``timeout`` seconds ends it, with an error.
    The constructor gives all ranks, servers included, rank 0's parameters and buffers.

    Args:
        model: the module whose parameters ``optimizer`` updates, on the CPU.
        optimizer: any optimizer; after the constructor, only its options that are pushed are read.
        servers: number of servers.
        placement: "colocated": in threads on the first workers' ranks; "dedicated": on the last ranks, which only
            ``serve``.
        staleness_bound: largest lead of the fastest worker over the slowest, in iterations; None for no bound.
        on_nonfinite: "stop" raises ``NonFiniteGradientError``, "skip" leaves the gradient out.
        timeout: seconds that a rank waits for another one.
        ranks: all ranks of the job; by default those of torch's process group, which is started if there is none yet.

    Raises:
        UserInputError: a value out of range, or an optimizer without a parameter to train.

    Examples:
        >>> model = torch.nn.Linear(2, 1)
        >>> servers = ParameterServers(model, torch.optim.SGD(model.parameters(), lr=0.1), staleness_bound=0)
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> servers.step().applied
        (0,)
        >>> servers.close()
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        servers: int = 1,
        placement: ServerPlacement = "colocated",
        staleness_bound: int | None = None,
        on_nonfinite: str = "stop",
        timeout: float = DEFAULT_TIMEOUT,
        ranks: Ranks | None = None,
    ):
        check_one_of("on_nonfinite", on_nonfinite, ON_NONFINITE)
        check_timeout(timeout)
        config = PipelineConfig(  # checks the values
            strategy="ps-async", servers=servers, server_placement=placement, staleness_bound=staleness_bound
        )
        self._parameters = trainable_parameters(optimizer)
        device = self._parameters[0].device
        if device.type != "cpu":
            raise UserInputError(f"parameters must be on the CPU, where the servers are; got {device}")
        ranks = ranks or current(timeout)
        self._workers = ranks.first(config.workers(ranks.world_size))
        workers = self._workers.world_size
        self.iteration = 0
        self.module = model
        self.replicated = staleness_bound == 0
        self._optimizer = optimizer
        self._identities = trainable_identities(optimizer)
        self._skip_nonfinite = on_nonfinite == "skip"
        self._schedule_steps = 0
        self._meetings = 0
        # Waiting in a thread of its own leaves the main one free for signals.
        self._thread = CommunicationThread(device)
        self._group = communication_group(ranks, timeout, backend="gloo")
        over_all = make_all_reduce("native", ranks, timeout=timeout)
        self._over_workers = make_all_reduce("native", self._workers, timeout=timeout)
        share_rank_0s_values(model, self._parameters, ranks.rank, lambda buffer: self._sum(buffer, over_all))
        self._gradient, self._weights = FlatBuffer(self._parameters), FlatBuffer(self._parameters)
        self._weights.fill_from(self._values)

        options = len(hyperparameters.as_numbers(optimizer))
        self._links = Links.over(self._group, timeout, replies=timeout + REPLY_GRACE_SECONDS)
        farewells = Links.over(self._group, CLOSE_SECONDS).requests
        self._servers: list[Server] = []
        self._threads: list[WorkerThread] = []
        for index in range(servers):
            rank, shard = (index if placement == "colocated" else workers + index), None
            layout = ShardLayout(self._gradient, index, servers)
            if rank == ranks.rank:
                rule = self._make_rule(layout)
                shard = Shard(rule, layout, workers=workers, bound=staleness_bound, rank=rank, timeout=timeout)
                for worker in set(range(workers)) - {rank}:
                    links = Links.over(self._group, timeout, requests=FOREVER)
                    self._threads.append(WorkerThread(shard, worker, options, links))
            self._servers.append(Server(rank, layout, self._links, farewells, options, shard))
        for thread in self._threads:
            thread.start()
        if ranks.rank < workers:
            self._workers.before_gather = self._meet
        drop_gradients(optimizer)

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent so far, as a worker and as a server."""
        return self._links.bytes_sent + sum(thread.links.bytes_sent for thread in self._threads)

    def step(self) -> StepReport:
        """Push the gradients in ``.grad`` and pull the weights; see the class.

        Raises:
            CommunicationError: a rank was lost, or silent for longer than the timeout.
            NonFiniteGradientError: a gradient holds a NaN or an infinity.
        """
        assert self._workers.rank < self._workers.world_size, "a rank that is a server alone calls serve"
        check_unchanged(self._optimizer, self._identities, "a parameter server")
        check_dense(self._parameters)
        self._workers.iteration = iteration = self.iteration
        # 1. Pack.
        begin = time.perf_counter()
        pack_gradients(self._parameters, self._gradient)
        options = tuple(hyperparameters.as_numbers(self._optimizer))
        push = RequestMessage(Request.PUSH, finite=all_finite(self._gradient), options=options)
        count_as_stepped(self._optimizer)
        self.iteration += 1
        # 2. and 3. Push and wait.
        packed = time.perf_counter()
        replies = [reply for reply, _ in self._ask(push, values=self._gradient, into=self._weights)]
        applied = all(reply.applied for reply in replies)
        arrived = time.perf_counter()
        # 4. Update.
        if not (applied or self._skip_nonfinite):
            raise NonFiniteGradientError(iteration)
        self._weights.copy_to(self._values)
        spans = (
            Span("pack", iteration, begin, packed),
            Span("communication", iteration, packed, arrived),
            Span("wait", iteration, packed, arrived),
            Span("update", iteration, arrived, time.perf_counter()),
        )
        return StepReport(
            applied=(iteration,) if applied else (),
            skipped=() if applied else (iteration,),
            spans=spans,
            wire_bytes=sum(server.wire_bytes for server in self._servers),
            schedule_steps=self._count_schedule_steps(replies[0]),
        )

    def flush(self) -> StepReport:
        """Wait until all workers are here, and pull, so that all have the same weights. Further steps may follow.

        Collective. After it no worker needs another worker's server any more.
        """
        steps = 0
        with self._at_rest():
            if not self.replicated:
                steps = self._count_schedule_steps(self._pull())
        return StepReport(schedule_steps=steps)

    @contextlib.contextmanager
    def true_weights(self) -> Iterator[None]:
        """Make the model hold the servers' weights, with all gradients pushed so far, while the context is open.

        Weights that are changed meanwhile, alike on all workers, become those of the servers and of every model.

        Collective, unless the bound is 0 and no weight is changed, when the model always holds these weights.
        """
        own = None
        if not self.replicated:
            own = FlatBuffer(self._values)
            own.fill_from(self._values)
            with self._at_rest():
                self._pull()
        changed = False
        try:
            yield
            changed = not all(map(torch.equal, self._values, self._weights.views))
        finally:
            if changed:
                with self._at_rest("changed weights"):
                    if self._workers.rank == 0:
                        self._weights.fill_from(self._values)
                        self._ask(RequestMessage(Request.STORE), values=self._weights)
                with self._at_rest():
                    self._pull()
                self._drop_answer()
            elif own is not None:
                own.copy_to(self._values)

    def combine_buffers(self, how: Buffers) -> None:
        """Set floating-point buffers to their average over workers or to rank 0's values, or leave them. Collective."""
        workers = self._workers
        if how != "own":
            self._meet("combining buffers")
        combine_buffers(self.module, how, workers, lambda buffer: self._sum(buffer, self._over_workers))

    def state_dict(self) -> dict[str, Any]:
        """Return this worker's progress and, on worker 0, each server's whole state as bytes. Collective."""
        saved = None
        with self._at_rest():
            if self._workers.rank == 0:
                saved = [state for _, state in self._ask(RequestMessage(Request.SAVE))]
        return {"iteration": self.iteration, "schedule_steps": self._schedule_steps, "servers": saved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``. Collective."""
        with self._at_rest():
            if self._workers.rank == 0:
                self._ask(RequestMessage(Request.LOAD), states=state["servers"])
        self._ask(RequestMessage(Request.PULL), into=self._weights)  # the model keeps the weights that it has
        self.iteration = state["iteration"]
        self._schedule_steps = state["schedule_steps"]

    def close(self) -> None:
        """Say goodbye to the servers; one in this process continues until all workers have, or for some seconds."""
        self._workers.before_gather = None
        byes: list[Pending] = []
        for server in self._servers:
            with contextlib.suppress(CommunicationError):  # the server is gone
                byes += server.leave()
        self._join(CLOSE_SECONDS if self._thread.failed else FAREWELL_SECONDS)
        for bye in byes:
            with contextlib.suppress(CommunicationError):
                bye.wait()
        self._thread.close()

    def serve(self) -> None:
        """Run a server on a rank of its own, which does nothing else, until all workers have closed their strategies.

        Raises:
            CommunicationError: a worker was lost.
        """
        assert self._workers.rank >= self._workers.world_size, "a rank that computes does not serve alone"
        self._gradient = self._weights = FlatBuffer([])  # only a worker needs room for all parameters
        self._thread.close()
        self._workers.enter("serving", waiting=True)
        for server in self._servers:
            if server.shard is not None:
                server.shard.wait_until_all_have_left()
        self._join(CLOSE_SECONDS)

    def _drop_answer(self) -> None:
        """Drop an answer to be applied later, since it is about weights that this worker no longer has."""
        return

    def _make_rule(self, layout: ShardLayout) -> UpdateRule:
        """Return the rule of a server in this process, whose weights are those that ``layout`` gives it."""
        return OptimizerRule(self._parameters, self._optimizer, layout)

    @property
    def _values(self) -> list[Tensor]:
        """Values of the parameters, in the order of the flat buffers."""
        return [parameter.detach() for parameter in self._parameters]

    def _ask(self, request: RequestMessage, **what: Any) -> Answers:
        """Ask servers and wait for their answers; see ``_begin_to_ask``."""
        return self._answers_of(self._begin_to_ask(request, **what))[0]

    def _begin_to_ask(
        self,
        request: RequestMessage,
        *,
        values: FlatBuffer | None = None,
        into: FlatBuffer | None = None,
        states: Sequence[Tensor | None] | None = None,
        first_alone: bool = False,
    ) -> Future[tuple[Answers, float]]:
        """Begin to ask all servers, or only the first, each with its state; see ``Server.ask``.

        The result will be the answers, and the time when they have arrived.
        """
        asked = list(zip(self._servers, [None] * len(self._servers) if states is None else states, strict=True))

        def ask() -> tuple[Answers, float]:
            # This process's own server goes last: it may wait for workers that need what other servers are sent.
            in_order = sorted(asked[: 1 if first_alone else None], key=lambda one: one[0].shard is not None)
            answers = {server.rank: server.ask(request, values, into, state) for server, state in in_order}
            return [answers[rank]() for rank in sorted(answers)], time.perf_counter()

        return self._thread.submit(ask)

    def _answers_of(self, asked: Future[tuple[Answers, float]]) -> tuple[Answers, float]:
        """Wait for what ``_begin_to_ask`` has begun."""
        try:
            return asked.result()
        except CommunicationError as failure:
            if failure.iteration is None:
                failure.iteration = self._workers.iteration
            raise

    def _pull(self) -> Reply:
        """Copy the servers' weights, into the model too, and return the first server's reply."""
        [(reply, _), *_] = self._ask(RequestMessage(Request.PULL), into=self._weights)
        self._weights.copy_to(self._values)
        return reply

    def _count_schedule_steps(self, reply: Reply) -> int:
        """Return the number of steps that a schedule must take now to follow the updates of all workers."""
        steps = reply.arrivals // self._workers.world_size - self._schedule_steps
        self._schedule_steps += steps
        return steps

    def _meet(self, what: str) -> None:
        """Wait until all workers have come to the collective call ``what``."""
        self._meetings += 1
        request = RequestMessage(Request.MEET, number=self._meetings, place=zlib.crc32(what.encode()))
        while not self._ask(request, first_alone=True)[0][0].applied:
            pass  # the server has waited for a moment

    def _join(self, seconds: float) -> None:
        """Wait for the threads to end, for at most ``seconds`` in total."""
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _sum(self, buffer: FlatBuffer, all_reduce: AllReduce) -> None:
        self._thread.submit(lambda: sum_buffer(buffer, all_reduce)).result()

    @contextlib.contextmanager
    def _at_rest(self, what: str = "rest") -> Iterator[None]:
        """Keep all workers here, with their replies and so without gradients in flight, while the context is open."""
        # The group's name distinguishes these exchanges from those of another strategy of the same job.
        self._workers.all_gather_object(f"workers at {what} (group {self._group.group_name})", None)
        yield
        self._workers.all_gather_object(f"workers continuing (group {self._group.group_name})", None)
