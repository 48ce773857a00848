"""Time of an iteration of torchft's DiLoCo and of local steps, with emulated accelerators and links, interleaved.

    python -m experiments.bench_torchft       4 nodes at 200 Mbit/s: bench_torchft.csv

It needs torchft, which pipesgd does not: ``pip install torchft==0.2.0``. Each rank is a replica group of torchft's, on
its process group over gloo, with a quorum in every window from the lighthouse on node 0. It exchanges float32 every 8
iterations, and waits for that at once or after 4 further iterations, as its Streaming DiLoCo does with one fragment
(``fragment_sync_delay``); all else is as torchft has it by default. pipesgd exchanges int4 at width 2 every 1, 2 or 4
iterations.

Blocks consist of whole windows, so nothing that a window costs is left out, and nothing is added: a
window of torchft's ends when its exchange has been applied, and pipelines are full at both ends of a block.
loops_on_links.py says how the contenders are timed. Accuracy is a matter of experiments.local_steps_accuracy, where
DiLoCo waits at once.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.metadata
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from experiments import accelerators, command
from experiments.limits import Cluster
from experiments.loops import Loop, Piped, Plain, sgd
from experiments.loops_on_links import (
    ALONE,
    DDP,
    Effort,
    Workload,
    measure,
    on_testbed,
    show,
    summarize,
)
from experiments.paired import paired_ratio
from experiments.results import save
from experiments.testbed import Link
from pipesgd.errors import RunError, UserInputError
from pipesgd.membership.address import own_address
from pipesgd.pipeline.local_steps import NESTEROV_LR, NESTEROV_MOMENTUM
from pipesgd.ranks import Ranks
from pipesgd.run.console import say

NAME, VERSION = "bench_torchft", "0.2.0"
CLUSTER = Cluster(nodes=4, link=Link(rate=200e6))
WORKLOAD = Workload(name="mlp 2x1000", model="mlp", hidden_sizes=(1000, 1000), batch_size=32)
ACCELERATOR = "75ms"
"""Time of a forward and backward pass on each node's accelerator, a wait that leaves the cores to the network."""
WINDOW = 8
"""Iterations of a window of torchft's; those of pipesgd divide it."""
DELAYS = {f"torchft DiLoCo, H {WINDOW}": 0, f"torchft DiLoCo, H {WINDOW}, delay 4": 4}
"""Iterations between the beginning of an exchange and the wait for it, by the name of the loop."""
STEPS = {f"pipesgd, int4, H {steps}": steps for steps in (1, 2, 4)}
"""Iterations of a window of pipesgd's, by the name of the loop."""
FULL = Effort(block=2 * WINDOW, rounds=8, untimed=2 * WINDOW)
QUICK = Effort(block=WINDOW, rounds=1, untimed=WINDOW)
MOST_TO_ALONE = 1.05
"""Largest ratio of the time with several iterations of a window to that without communication; one must meet it."""
PATIENCE = timedelta(seconds=60)
"""Time that torchft waits for other ranks."""


class Torchft:
    """The training loop with torchft's DiLoCo, which hooks into the optimizer. All ranks make it together.

    ``flush`` checks that all windows were exchanged: torchft leaves a window out when its all-reduce fails.
    """

    def __init__(self, model: nn.Module, ranks: Ranks, *, delay: int):
        from torchft import Manager, ProcessGroupGloo
        from torchft.coordination import LighthouseServer
        from torchft.local_sgd import DiLoCo

        self.model = model
        self._optimizer = sgd(model)
        self._iterations = 0
        address = own_address().shown.split()[0]
        self._lighthouse: Any = None
        if ranks.rank == 0:
            self._lighthouse = LighthouseServer(bind="0.0.0.0:0", min_replicas=ranks.world_size)
        port = None if self._lighthouse is None else self._lighthouse.address().rpartition(":")[2]
        [lighthouse, *_] = ranks.all_gather_object("lighthouse", f"http://{address}:{port}")
        # A replica group of one rank: its own store is where the others find it.
        self._store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
        self._manager = Manager(
            pg=ProcessGroupGloo(timeout=PATIENCE),
            load_state_dict=model.load_state_dict,
            state_dict=model.state_dict,
            min_replica_size=ranks.world_size,
            use_async_quorum=False,  # which its DiLoCo asks for
            init_sync=False,  # all ranks have the same weights
            timeout=PATIENCE,
            quorum_timeout=PATIENCE,
            connect_timeout=PATIENCE,
            rank=0,
            world_size=1,
            store_addr=address,
            store_port=self._store.port,
            lighthouse_addr=lighthouse,
            replica_id=str(ranks.rank),
            hostname=address,
        )
        outer = torch.optim.SGD(model.parameters(), lr=NESTEROV_LR, momentum=NESTEROV_MOMENTUM, nesterov=True)
        self.diloco = DiLoCo(
            self._manager, [model], self._optimizer, outer, sync_every=WINDOW, fragment_sync_delay=delay
        )
        self.diloco.__enter__()

    def iterate(self, images: Tensor, labels: Tensor) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        cross_entropy(self.model(images), labels).backward()
        self._optimizer.step()
        self._iterations += 1

    def flush(self) -> None:
        """Check that all windows were exchanged."""
        windows, exchanged = self._iterations / WINDOW, self._manager.current_step()
        if exchanged != windows:
            raise RunError(f"torchft must exchange {windows:g} windows; got {exchanged}")

    def close(self) -> None:
        self.diloco.__exit__(None, None, None)
        self._manager.shutdown(wait=False)
        if self._lighthouse is not None:
            self._lighthouse.shutdown()


def check_torchft() -> None:
    """Raise ``UserInputError`` unless torchft is installed, in the version that was read and is compared."""
    try:
        found = importlib.metadata.version("torchft")
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    if found != VERSION:
        wanted = f"torchft must be installed in version {VERSION} (pip install torchft=={VERSION})"
        raise UserInputError(f"{wanted}; got {found}")


def emulate(model: nn.Module, rank: int) -> accelerators.Emulated:
    """Return a copy of ``model`` on its accelerator."""
    made, _ = accelerators.parse(ACCELERATOR, synthetic=True)
    return accelerators.Emulated(copy.deepcopy(model), made, rank=rank)


def make_loops(model: nn.Module, ranks: Ranks) -> dict[str, Loop]:
    """Return every loop, each with a copy of ``model`` on an accelerator. Collective."""
    ours = partial(Piped, ranks=ranks, width=2, codec="int4")
    return {
        ALONE: Plain(emulate(model, ranks.rank)),
        **{name: ours(emulate(model, ranks.rank), local_steps=steps) for name, steps in STEPS.items()},
        **{name: Torchft(emulate(model, ranks.rank), ranks, delay=delay) for name, delay in DELAYS.items()},
        DDP: Plain(DistributedDataParallel(emulate(model, ranks.rank))),
    }


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command: on a testbed, or, started by torchrun, as one of its ranks."""
    options = command.parser(NAME, __doc__)
    arguments = ranks.raise_together("options", lambda: command.parse(options, words))
    ranks.raise_together("torchft", check_torchft)
    effort = QUICK if arguments.quick else FULL
    if ranks.by_torchrun:
        measure(WORKLOAD, make_loops, ranks, effort, arguments.output)
        return
    found = on_testbed(NAME, ["--quick"] * arguments.quick, nodes=CLUSTER.nodes, link=CLUSTER.link)
    title = f"{WORKLOAD.name} on accelerators of {ACCELERATOR}, {CLUSTER.describe()} (all emulated)"
    rows = summarize(found, title, DDP)
    targets = {
        name: dataclasses.asdict(paired_ratio(found[name]["seconds"], found[ALONE]["seconds"]))
        | {"most": MOST_TO_ALONE}
        for name, steps in STEPS.items()
        if steps > 1
    }
    extra = {"accelerator": ACCELERATOR, "block": effort.block, "torchft": VERSION, "targets": targets}
    save(NAME, rows, extra=extra, folder=arguments.output)
    show(rows)
    for name, one in targets.items():
        verdict = "met" if one["low"] <= one["most"] else "MISSED"
        say(console, f"{name}: {one['median']:.3f} times {ALONE}, target at most {one['most']}: {verdict}")


if __name__ == "__main__":
    command.run(main)
