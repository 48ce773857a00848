"""Machines that the ranks run on."""

from __future__ import annotations

import platform
import socket
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
from pipesgd.run.loading_time import usable_cores

PRODUCT_SIZE, PRODUCTS = 512, 9
"""Rows and columns of the matrices; and number of products in a row, of which the first does not count."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
CORES = Path("/proc/stat")
CORE_TIMES, STOLEN = 8, 7
"""Number of times in its first line that add up (guests' times, after them, are in them); and the stolen one."""
DISTURBED = 0.02
"""Share of stolen time above which measurements are not worth much; on a host that is not busy it is 0 to 0.5 %."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Machine of one rank."""

    host: str
    kernel: str
    """Identifier of the running kernel, the same for all containers and namespaces of one machine."""
    cores: int
    """Number of cores that the rank may use."""


def machines_of(ranks: Ranks) -> list[Machine]:
    """Return every rank's machine. Collective."""
    host = socket.gethostname()
    try:
        kernel = BOOT_ID.read_text(encoding="utf-8").strip()
    except OSError:  # not Linux
        kernel = host
    return [
        Machine(**one)
        for one in ranks.all_gather_object("machine", asdict(Machine(host=host, kernel=kernel, cores=usable_cores())))
    ]


def ranks_per_core(machines: Sequence[Machine]) -> float:
    """Return the ranks per core of the machine that has the most; above 1, ranks share cores."""
    ranks = Counter(one.kernel for one in machines)
    return max(ranks[one.kernel] / one.cores for one in machines)


def product_seconds(ranks: Ranks) -> float:
    """Return the mean seconds of a fixed matrix product that all ranks compute at once: how fast the machines are now.

    The same machine becomes up to a third slower within a minute if others use it, too. Collective.
    """
    matrix = torch.full((PRODUCT_SIZE, PRODUCT_SIZE), 1e-3, dtype=torch.float32)
    out = torch.empty_like(matrix)
    ranks.all_gather_object("a product", None)
    times = []
    for _ in range(PRODUCTS):
        begin = time.perf_counter()
        torch.mm(matrix, matrix, out=out)
        times.append(time.perf_counter() - begin)
    return float(np.mean(ranks.all_gather_object("time of a product", float(np.mean(times[1:])))))


class StolenTime:
    """Share of this machine's core time that a hypervisor gives to other guests, from now on, and after each ``share``.

    A virtual machine does not see what it loses: everything in it, and everything that waits for it, just takes longer.
    """

    def __init__(self) -> None:
        self._begin = _core_times()

    def share(self, ranks: Ranks) -> float:
        """Return the stolen share of all cores' time on the machine that loses most; 0 where there is no hypervisor, or
        it reports nothing. Collective.
        """
        begin, self._begin = self._begin, _core_times()
        times = [after - before for before, after in zip(begin, self._begin, strict=True)]
        return float(max(ranks.all_gather_object("stolen time", times[STOLEN] / max(1, sum(times)))))


def _core_times() -> list[int]:
    """Return the times of all cores together since the machine started, in the kernel's ticks: man 5 proc_stat."""
    try:
        return [int(one) for one in CORES.read_text(encoding="utf-8").split()[1 : CORE_TIMES + 1]]
    except OSError:  # not Linux
        return [0] * CORE_TIMES


def provenance(
    machines: Sequence[Machine], created: str, argv: Sequence[str], product: float, stolen: float, seconds: float
) -> dict[str, Any]:
    """Return a record for people who read the file later, and for checking that the machines are as fast as they were.

    ``argv`` are the arguments after torchrun's own, ``product`` is the mean of ``product_seconds`` over the
    calibration, ``stolen`` is ``StolenTime``'s share, and ``seconds`` is how long the calibration took.
    """
    return {
        "created": created,
        "command": " ".join(["torchrun ...", *argv]),
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
        "calibration_seconds": round(seconds, 2),
    }
