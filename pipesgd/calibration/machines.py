"""The machines that the ranks are on."""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import pipesgd
from pipesgd.ranks import Ranks

PRODUCT_SIZE, PRODUCTS = 512, 9
"""Rows and columns; and how many follow each other, of which the first does not count."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
CORES = Path("/proc/stat")
CORE_TIMES, STOLEN = 8, 7
"""Of its first line: the times that add up, after which guests' come that are in them already; and the stolen one."""
DISTURBED = 0.02
"""A share of stolen time above which measurements are not worth much; on a host that is not busy it is 0 to 0.5 %."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One rank's."""

    host: str
    kernel: str
    """The same for all containers and namespaces of one machine."""
    cores: int
    """That the rank may use."""


def machines_of(ranks: Ranks) -> list[Machine]:
    """Every rank's. Collective."""
    host = socket.gethostname()
    try:
        kernel = BOOT_ID.read_text(encoding="utf-8").strip()
    except OSError:  # not Linux
        kernel = host
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return [Machine(**one) for one in ranks.exchange("machine", asdict(Machine(host=host, kernel=kernel, cores=cores)))]


def ranks_per_core(machines: Sequence[Machine]) -> float:
    """Of the machine that has the most; above 1, ranks share cores."""
    ranks = Counter(one.kernel for one in machines)
    return max(ranks[one.kernel] / one.cores for one in machines)


def product_seconds(ranks: Ranks) -> float:
    """What a fixed product of matrices takes now, in s, all ranks at it at once, their mean: how fast they are.

    The same machine is up to a third slower within a minute, where others use it, too. Collective.
    """
    matrix = torch.full((PRODUCT_SIZE, PRODUCT_SIZE), 1e-3)
    out = torch.empty_like(matrix)
    ranks.exchange("a product", None)
    times = []
    for _ in range(PRODUCTS):
        begin = time.perf_counter()
        torch.mm(matrix, matrix, out=out)
        times.append(time.perf_counter() - begin)
    return float(np.mean(ranks.exchange("time of a product", float(np.mean(times[1:])))))


class StolenTime:
    """What a hypervisor gives to other guests of the time of this machine's cores, from now on, and after each share.

    A virtual machine does not see what it loses: all in it, and all that waits for it, just takes longer.
    """

    def __init__(self) -> None:
        self._begin = _core_times()

    def share(self, ranks: Ranks) -> float:
        """Of all cores' time, on the machine that loses most; 0 where there is no hypervisor, or it does not say.
        Collective.
        """
        begin, self._begin = self._begin, _core_times()
        times = [after - before for before, after in zip(begin, self._begin, strict=True)]
        return float(max(ranks.exchange("stolen time", times[STOLEN] / max(1, sum(times)))))


def _core_times() -> list[int]:
    """Of all cores together since the machine started, in the kernel's ticks: man 5 proc_stat."""
    try:
        return [int(one) for one in CORES.read_text(encoding="utf-8").split()[1 : CORE_TIMES + 1]]
    except OSError:  # not Linux
        return [0] * CORE_TIMES


def provenance(
    machines: Sequence[Machine], created: str, words: Sequence[str], product: float, stolen: float
) -> dict[str, Any]:
    """For people who read the file later, and to tell whether the machines are as fast as they were then.

    ``words`` are those after torchrun's own, ``product`` is the mean of ``product_seconds`` over the calibration, and
    ``stolen`` ``StolenTime``'s share.
    """
    return {
        "created": created,
        "command": " ".join(["torchrun ...", *words]),
        "pipesgd": pipesgd.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "ranks": len(machines),
        "hosts": ", ".join(dict.fromkeys(one.host for one in machines)),
        "cores_per_host": min(one.cores for one in machines),
        "threads_per_rank": torch.get_num_threads(),
        "transport": "gloo",
        "product_seconds": product,
        "stolen_share": round(stolen, 4),
    }
