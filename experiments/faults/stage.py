"""Stage of a fault: the jobs that it hits, every line that they print, and what is left of them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

from experiments.faults.observation import Observation
from experiments.results import REPOSITORY
from experiments.testbed import Testbed
from pipesgd.errors import RunError
from pipesgd.run.output import CHECKPOINTS, METRICS_FILE

START_SECONDS = 150.0
"""Seconds within which a job must be under way; starting takes some seconds, on a busy machine many."""
END_SECONDS = 60.0
"""Seconds that a job has to end: torchrun waits for 30 s before it kills a rank that does not react."""
POLL_SECONDS = 0.02
MARK = "PIPESGD_FAULTS_STAGE"
"""Environment variable that all processes of a stage inherit."""
ITERATION = re.compile(r"\bin iteration (\d+)")
FOLDER = re.compile(r"iteration-(\d+)")


class Job:
    """The torchruns of one job, one for each machine, and the job's output folders, one for each disk."""

    def __init__(self, processes: list[subprocess.Popen[str]], outputs: list[Path], clock: Callable[[], float]):
        self.processes = processes
        self.outputs = outputs
        self.lines: list[tuple[float, str]] = []
        self._clock = clock
        self._readers = [threading.Thread(target=self._read, args=[one], daemon=True) for one in processes]
        for reader in self._readers:
            reader.start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.lines.append((self._clock(), line.rstrip()))

    def kill(self) -> None:
        """Kill the job's torchruns, and read the rest of their output."""
        for process, reader in zip(self.processes, self._readers, strict=True):
            process.kill()
            process.wait()
            reader.join(5.0)
            if process.stdout is not None and not reader.is_alive():
                process.stdout.close()

    @property
    def running(self) -> bool:
        """True while any of the job's torchruns is running."""
        return any(process.poll() is None for process in self.processes)

    def has(self, pattern: str) -> bool:
        """Return True if a line that matches ``pattern`` was printed."""
        return any(re.search(pattern, text) for _, text in list(self.lines))

    def newest(self) -> int:
        """Return the newest checkpoint that has all files of a machine in all output folders; 0 if there is none."""
        return min(max(checkpoints(output), default=0) for output in self.outputs)

    def done(self) -> int:
        """Return how many iterations were done, as far as the metrics and the printed lines say."""
        named = [int(found[1]) for _, text in list(self.lines) for found in ITERATION.finditer(text)]
        return max([*named, *(logged_iterations(output) for output in self.outputs)], default=0)

    def until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait until ``condition()``; return False if it is not true in time, or when the job has ended."""
        end = time.monotonic() + seconds
        while not condition():
            if not self.running or time.monotonic() > end:
                return condition()
            time.sleep(POLL_SECONDS)
        return True

    def until_under_way(self, iterations: int = 40) -> None:
        """Wait until there is a checkpoint of this many iterations. Raises ``RunError`` if none comes."""
        if not self.until(lambda: self.newest() >= iterations, START_SECONDS):
            raise RunError(f"the run did not get under way; it said: {' | '.join(self.last_lines())}")

    def last_lines(self) -> list[str]:
        """Return the last few lines that were printed."""
        return [text for _, text in self.lines[-5:]]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to every torchrun that is running."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)


def checkpoints(output: Path) -> list[int]:
    """Return the iterations of the published checkpoints in an output folder, whose parts have their names."""
    with contextlib.suppress(OSError):
        folders = [path for path in (output / CHECKPOINTS).iterdir() if FOLDER.fullmatch(path.name)]
        return [int(path.name.partition("-")[2]) for path in folders if len(list(path.glob("*.pt.sha256"))) >= 2]
    return []


def logged_iterations(output: Path) -> int:
    """Return how many iterations the metrics of a run report."""
    last = 0
    with contextlib.suppress(OSError):
        for line in (output / METRICS_FILE).read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                last = max(last, int(json.loads(line)["iteration"]) + 1)
    return last


class Stage:
    """A folder, the jobs that were started in it, and the moment of the fault.

    Args:
        folder: an empty folder.
        deadline: ``--timeout`` of every job, in seconds.
        testbed: testbed on which jobs run; loopback without one.
    """

    def __init__(self, folder: Path, deadline: float, testbed: Testbed | None = None):
        self.folder = folder
        self.deadline = deadline
        self.testbed = testbed
        self.jobs: list[Job] = []
        self.went_on = False
        self.cleanup = contextlib.ExitStack()
        """Contexts to leave when everything has been observed."""
        self._mark = uuid.uuid4().hex
        self._begin = time.monotonic()
        self._fault: float | None = None
        self._spared: set[int] = set()
        self._kept: dict[Path, dict[str, str]] = {}

    def clock(self) -> float:
        """Return the seconds since the stage was made."""
        return time.monotonic() - self._begin

    # ---- jobs ----

    def start(
        self,
        words: str,
        *,
        ranks: int = 3,
        torchrun: str = "--standalone",
        program: str = "-m pipesgd.train",
        output: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Job:
        """Start a job on one machine."""
        output = output or self.folder / "run"
        return self._job([self._popen(words, ranks, torchrun, program, output, env or {})], [output])

    def start_machines(self, words: str, outputs: list[Path], node_ranks: Sequence[int], port: int) -> Job:
        """Start a job on as many machines as there are outputs, one rank each, all on this host's loopback."""
        processes = [
            self._popen(
                words,
                1,
                f"--nnodes {len(outputs)} --node-rank {node_rank} --master-addr 127.0.0.1 --master-port {port}",
                "-m pipesgd.train",
                output,
                {},
            )
            for output, node_rank in zip(outputs, node_ranks, strict=True)
        ]
        return self._job(processes, outputs)

    def start_on_testbed(self, words: str) -> Job:
        """Start a job with a rank on every node of the testbed, whose nodes share one disk."""
        assert self.testbed is not None
        output = self.folder / "run"
        job = self.testbed.torchrun(
            ["-m", "pipesgd.train", *words.split(), "--timeout", f"{self.deadline:g}", "--output", str(output)],
            env=self.environment({}),
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        return self._job(list(job.processes), [output])

    def _popen(
        self, words: str, ranks: int, torchrun: str, program: str, output: Path, env: Mapping[str, str]
    ) -> subprocess.Popen[str]:
        timeout = [] if "--timeout" in words else ["--timeout", f"{self.deadline:g}"]
        start = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", *torchrun.split()]
        return subprocess.Popen(
            [*start, *program.split(), *words.split(), *timeout, "--output", str(output)],
            cwd=REPOSITORY,
            env=self.environment(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of a process of this stage: that of this process, the stage's mark, and ``env``."""
        paths = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
        own = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": paths, MARK: self._mark}
        return {**os.environ, **own, **env}

    def _job(self, processes: list[subprocess.Popen[str]], outputs: list[Path]) -> Job:
        job = Job(processes, outputs, self.clock)
        self.jobs.append(job)
        return job

    # ---- processes ----

    def alive(self) -> dict[int, dict[str, str]]:
        """Return every process of the stage that has not ended and is not spared, with its environment."""
        found = {}
        mark = f"{MARK}={self._mark}".encode()
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                pid = int(entry.name)
                variables = (entry / "environ").read_bytes().split(b"\0")
                if mark in variables and pid not in self._spared and _state(entry) != "Z":
                    pairs = (one.decode(errors="replace").partition("=") for one in variables)
                    found[pid] = {name: value for name, _, value in pairs}
        return found

    def rank(self, rank: int) -> int:
        """Return the process of a rank, which has started all others that have its number."""
        pids = {pid for pid, env in self.alive().items() if env.get("RANK") == str(rank)}
        first = [pid for pid in pids if _parent(pid) not in pids]  # numbers of processes begin again, and tell nothing
        if len(first) != 1:
            raise RunError(f"rank {rank} must be one process; got {len(first)}")
        return first[0]

    def spare(self, pid: int) -> None:
        """Do not count this process among those that must end, since it is stopped on purpose."""
        self._spared.add(pid)

    # ---- the fault, and after ----

    def fault(self) -> None:
        """Note that the fault happens now."""
        self._fault = self.clock()

    def fault_said(self, job: Job, pattern: str) -> None:
        """Note that the fault happened when a matching line was printed. Raises ``RunError`` if none comes."""
        if not job.until(lambda: job.has(pattern), START_SECONDS):
            raise RunError(f"the fault was not done; the run said: {' | '.join(job.last_lines())}")
        self._fault = next(at for at, text in job.lines if re.search(pattern, text))

    def keep(self, output: Path, *, but: int | None = None) -> None:
        """Require that all checkpoints below ``output`` keep their content from now on, but for iteration ``but``."""
        files = (output / CHECKPOINTS).rglob("*.pt")
        self._kept[output] = {
            f"{path.parent.name}/{path.name}": _digest(path) for path in files if path.parent.name != f"iteration-{but}"
        }

    def wait_for_end(self, seconds: float = END_SECONDS) -> None:
        """Wait until no process of the stage is left."""
        end = time.monotonic() + seconds
        while (self.alive() or any(job.running for job in self._unspared())) and time.monotonic() < end:
            time.sleep(5 * POLL_SECONDS)
        # A run that has trained to its end after the fault has continued, too.
        self.went_on |= bool(self.jobs) and all(one.poll() == 0 for one in self.jobs[-1].processes)

    def _unspared(self) -> Iterator[Job]:
        return (job for job in self.jobs if not self._spared.intersection(one.pid for one in job.processes))

    def see_progress(self, job: Job, seconds: float = START_SECONDS) -> None:
        """Note whether a newer checkpoint than the current one appears; then stop the job."""
        before = job.newest()
        self.went_on = job.until(lambda: job.newest() > before, seconds)
        job.signal(signal.SIGTERM)

    def observe(self, problem: str = "") -> Observation:
        """Kill the processes left; return the outcome of the fault, or the ``problem`` that prevented it."""
        left = self.alive()
        ended = self.clock()
        self.kill()
        fault, first = self._fault or 0.0, self.jobs[0]
        lines = sorted(line for job in self.jobs for line in job.lines)
        return Observation(
            lines=[[round(at - fault, 2), text] for at, text in lines],
            ended=None if left else round(ended - fault, 1),
            went_on=self.went_on,
            orphans=len(left),
            iterations_lost=max(0, first.done() - first.newest()) if first.newest() else None,
            files_lost=self.lost_files(),
            deadline=self.deadline,
            problem=problem,
        )

    def lost_files(self) -> list[str]:
        """Return the files that must stay, but whose content is nowhere below their folder."""
        return [name for output, kept in self._kept.items() for name in _missing(output, kept)]

    def kill(self) -> None:
        """Kill the processes that are left."""
        self._spared.clear()
        for pid in self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for job in self.jobs:
            job.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        """Kill the processes that are left, and undo the changes to the machine."""
        self.kill()
        self.cleanup.close()


def _state(entry: Path) -> str:
    return (entry / "stat").read_text().rpartition(")")[2].split()[0]


def _parent(pid: int) -> int | None:
    """Return the process that has started another one, which may have ended meanwhile."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return None


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _missing(output: Path, kept: dict[str, str]) -> list[str]:
    there = {_digest(path) for path in output.rglob("*.pt") if path.is_file()}
    return [name for name, digest in kept.items() if digest not in there]
