"""Choice of the samples that each rank sees in an iteration, by (seed, iteration, rank) alone."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from multiprocessing import resource_tracker
from typing import Any, NamedTuple, TypeAlias
from warnings import catch_warnings, filterwarnings

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from pipesgd.data.augmentation import Augmentation, batch_seed, epoch_seed
from pipesgd.data.samples import Batch, BatchedDataset, on_tensors
from pipesgd.errors import DatasetError, UserInputError
from pipesgd.functions import in_one_line
from pipesgd.membership.record import Record, Slices

Asked: TypeAlias = tuple[int, torch.Tensor]
"""An epoch, and the samples of a batch in it, int64 (B,)."""


class Loaded(NamedTuple):
    """A batch, and the time in which a process loaded it, in seconds of ``time.perf_counter``, the machine's clock."""

    batch: Batch | UserInputError
    worker: int | None
    """Number of the worker process; None if the process that uses the batch loaded it."""
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Batches(Iterator[Batch]):
    """Iterator over batches. Worker processes end with it: ``close()`` it, or drop it."""

    last: Loaded
    """Batch that was returned last, and how it was loaded."""

    def __init__(self, items: Generator[Loaded, None, None]):
        self._items = items

    def __next__(self) -> Batch:
        """Return the next batch; raises the ``UserInputError`` of a sample that cannot be read."""
        self.last = next(self._items)
        assert not isinstance(self.last.batch, UserInputError)
        return self.last.batch

    def close(self) -> None:
        self._items.close()


CPU = torch.device("cpu")


class ShardedBatches:
    """The training batches of one rank.

    In every epoch all ranks draw the same permutation of the samples from (seed, epoch); samples that are ``in_order``
    keep their order. Each iteration takes the next ``world_size * batch_size`` of them, and rank r the r-th
    ``batch_size`` of those: the ranks' batches side by side are the one batch of a single process. Samples left over at
    the end of an epoch, fewer than one such batch, are dropped. A rank with samples of its own takes all of its batches
    from these, as a world of one rank would.

    Where other ranks continue a training, ``record`` says which samples are next, and an iteration may end in another
    epoch than it began in. Samples that are left over are those of the ranks that the training began with.
    """

    record: Record
    """Slices of the samples, of one batch each, that ranks have taken so far. Ranks with samples of their own must have
    the shortest epochs of all ranks."""

    def __init__(
        self,
        dataset: BatchedDataset,
        *,
        batch_size: int,
        rank: int,
        world_size: int,
        seed: int,
        loader_workers: int = 0,
        augmentation: Augmentation | None = None,
    ) -> None:
        """Take ``batch_size`` samples per rank and iteration; with 0 ``loader_workers`` this process loads them.

        An ``augmentation`` changes their images, wherever they are loaded.

        Raises ``DatasetError`` if not even one batch of all ranks can be taken from ``dataset``.
        """
        assert batch_size >= 1
        assert 0 <= rank < world_size
        largest = len(dataset) // world_size
        if batch_size > largest:
            raise DatasetError(
                f"--batch-size times --accumulation must be at most {largest}: {world_size} ranks share "
                f"{len(dataset)} samples; got {batch_size}"
            )
        self.record = Record.begun(len(dataset) // (world_size * batch_size) * world_size, world_size)
        self._dataset = dataset
        self._batch_size = batch_size
        self._rank = rank
        self._seed = seed
        self._loader_workers = loader_workers
        self._augmentation = augmentation

    def continue_record(self, state: Mapping[str, Any], iteration: int) -> None:
        """Let the present ranks take the samples that follow ``iteration`` iterations of a record's ``state_dict``."""
        ranks, record = self.record.spans[-1].ranks, self.record.continued(state)
        first = record.spans[0].ranks
        if first != ranks:
            slices = len(self._dataset) // self._batch_size
            record = replace(record, length=slices // first * first or slices)  # data may be fewer than they were
        self.record = record.changed(iteration, ranks)

    def follow(self, span: Slices, rank: int) -> None:
        """Let this rank be number ``rank`` in ``span``, which begins with the next iteration that is asked for."""
        self.record, self._rank = self.record.followed_by(span), rank

    @property
    def iterations_per_epoch(self) -> int:
        """Number of iterations in which the present ranks take as many slices as an epoch has."""
        return -(-self.record.length // self.record.spans[-1].ranks)

    def from_iteration(self, iteration: int, device: torch.device = CPU) -> Batches:
        """Return the batches on ``device`` of global iteration ``iteration`` (from 0) and of all after it, without end.

        Each batch has ``batch_size`` samples. Worker processes take about a second to start, at the first batch. A GPU
        copies a batch while it computes on the one before.
        """
        assert iteration >= 0
        samples = _Samples(self._dataset, self._augmentation)
        return _load(samples, self._batches(iteration), self._loader_workers, device)

    def _batches(self, iteration: int) -> Iterator[Asked]:
        present, samples = -1, len(self._dataset)
        order = torch.arange(samples)
        for i in count(iteration):
            epoch, number = self.record.slice_of(i, self._rank)
            if epoch != present and not self._dataset.in_order:
                order = epoch_order(samples, self._seed, epoch)
            present, start = epoch, number * self._batch_size
            yield epoch, order[start : start + self._batch_size]


def evaluation_batches(
    dataset: BatchedDataset, *, batch_size: int, rank: int, world_size: int, loader_workers: int = 0
) -> Batches:
    """Return this rank's share of ``dataset``, every ``world_size``-th sample: over all ranks, each exactly once.

    A batch has at most ``batch_size`` samples, the last may be short, and a rank without a share gets no
    batch. No more worker processes start than there are batches. Raises, at the batch concerned, the
    ``UserInputError`` of a sample that cannot be read.
    """
    share = torch.arange(len(dataset))[rank::world_size]
    batches = [(0, share[i : i + batch_size]) for i in range(0, len(share), batch_size)]
    return _load(_Samples(dataset), batches, min(loader_workers, len(batches)))


def epoch_order(num_samples: int, seed: int, epoch: int) -> torch.Tensor:
    """Return a permutation of the samples, int64 (num_samples,)."""
    return torch.randperm(num_samples, generator=torch.Generator().manual_seed(epoch_seed(seed, epoch)))


def _load(samples: _Samples, batches: Iterable[Asked], loader_workers: int, device: torch.device = CPU) -> Batches:
    """Return ``samples[batch]`` for each of ``batches``."""
    loader = DataLoader(
        samples,
        batch_size=None,
        sampler=batches,
        num_workers=loader_workers,
        collate_fn=_unchanged,
        pin_memory=device.type == "cuda",  # copies from memory that is not pinned would wait for the GPU
        # Without its own generator the loader would draw from the global one. It seeds Python and numpy in workers.
        generator=torch.Generator().manual_seed(torch.initial_seed()),
        # A forked worker would hold copies of this rank's connections, so that its peers would not
        # notice its death; and it would be forked with the communication thread at work.
        multiprocessing_context="spawn" if loader_workers else None,
        worker_init_fn=_end_before_finalization,
    )
    return Batches(_copied_ahead(_items(loader), device) if device.type == "cuda" else _items(loader))


def _end_before_finalization(worker: int) -> None:
    """Let this worker process end where Python would begin to finalize it, as a forked one does.

    Finalization stops the thread that sends batches wherever it is; in torch's code that aborts the process, and the
    rank would report a worker that was killed.
    """
    atexit.register(_flush_and_exit)  # before functions of the data set, hence called after them


def _flush_and_exit() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _items(loader: DataLoader[Any]) -> Generator[Loaded, None, None]:
    for item in _begin(loader):  # no name here may hold the iterator: the workers end with it, after an error, too
        if isinstance(item.batch, UserInputError):
            raise item.batch
        yield item


def _copied_ahead(items: Iterator[Loaded], device: torch.device) -> Generator[Loaded, None, None]:
    """Yield ``items`` on the GPU ``device``, each with its successor's copy begun on a stream of its own.

    The current stream waits for the copy of the item that is yielded, and the memory stays taken until the work that
    this stream was given has used it.
    """
    copies = torch.cuda.Stream(device)
    ahead: tuple[Loaded, torch.cuda.Event] | None = None

    def ready(item: Loaded, copied: torch.cuda.Event) -> Loaded:
        computing = torch.cuda.current_stream(device)
        computing.wait_event(copied)
        on_tensors(lambda tensor: tensor.record_stream(computing), item.batch)
        return item

    for item in items:
        with torch.cuda.stream(copies):
            batch = on_tensors(lambda tensor: tensor.to(device, non_blocking=True), item.batch)
            copied = copies.record_event()
        if ahead is not None:
            yield ready(*ahead)
        ahead = item._replace(batch=batch), copied
    if ahead is not None:
        yield ready(*ahead)


def _begin(loader: DataLoader[Any]) -> Iterator[Loaded]:
    with in_one_line("loader-workers must be 0 where the data cannot be sent to other processes"), catch_warnings():
        filterwarnings("ignore", "Got pickle error")  # the error itself follows
        if not loader.num_workers:
            return iter(loader)
        with _without_signals_of_a_terminal():
            return iter(loader)


@contextmanager
def _without_signals_of_a_terminal() -> Iterator[None]:
    """Start processes that are never interrupted. This process is, a moment later.

    A terminal sends Ctrl-C to the worker processes, too, and SIGHUP when it hangs up, while the rank needs more batches
    for its last iterations. They inherit from this thread which signals are blocked, so that not even their start is
    interrupted.
    """
    resource_tracker.ensure_running()  # its start would let the signal through again
    former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


class _Samples(Dataset[Loaded]):
    """Samples as they look in an epoch, and when they were loaded.

    Errors are returned: DataLoader would put a worker's traceback into the one line of those that it raises.
    """

    def __init__(self, dataset: BatchedDataset, augmentation: Augmentation | None = None) -> None:
        self._dataset = dataset
        self._augmentation = augmentation
        self._seed = torch.initial_seed()

    def __getitem__(self, asked: Asked) -> Loaded:
        worker, start = get_worker_info(), time.perf_counter()
        epoch, indices = asked
        batch: Batch | UserInputError
        try:
            with self._random_numbers(epoch, indices):
                images, targets = batch = self._dataset[indices]
            if self._augmentation is not None:
                batch = self._augmentation(images, epoch, indices), targets
        except UserInputError as error:
            batch = error
        return Loaded(batch, None if worker is None else worker.id, start, time.perf_counter())

    @contextmanager
    def _random_numbers(self, epoch: int, indices: torch.Tensor) -> Iterator[None]:
        """Let what is drawn from torch's generator depend on the rank's seed and the batch alone.

        It then does not matter which process loads the batch, when, and what was loaded before.
        """
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(batch_seed(self._seed, epoch, int(indices[0])))
            yield


def _unchanged(item: Any) -> Any:
    """Return a batch as the tuple that it is; DataLoader's own conversion makes it a list."""
    return item
