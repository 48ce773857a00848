"""Plays of all faults: a play starts a run, harms it, and waits for the outcome."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from experiments.faults.stage import START_SECONDS, Job, Stage
from pipesgd.errors import RunError
from pipesgd.run.output import CHECKPOINTS

Play = Callable[[Stage], None]
Harm = Callable[[Stage, Job], None]

EVERY = 20
"""Iterations between two checkpoints, and so the most that may be lost besides the current one."""
LONG = f"--hidden-sizes 300 300 --batch-size 32 --iterations 100000 --checkpoint-iterations {EVERY}"
TO_RESUME = f"--hidden-sizes 100 --batch-size 32 --iterations 100 --checkpoint-iterations {EVERY} --keep-checkpoints 20"
CLOCK = Path(__file__).with_name("clock.c")
SERVED = "--hidden-sizes 100 --batch-size 32 --iterations 100000 --server-placement dedicated"
CONTINUES = r"continuing after iteration (\d+)"


# ---- faults of processes ----


def disturb(
    harm: Harm, *, words: str = LONG, ranks: int = 3, torchrun: str = "--standalone", goes_on: bool = False
) -> Play:
    """Harm a run on this machine once it has written its second checkpoint."""

    def play(stage: Stage) -> None:
        job = stage.start(words, ranks=ranks, torchrun=torchrun)
        job.until_under_way()
        _harm(stage, job, harm, goes_on)

    return play


def _harm(stage: Stage, job: Job, harm: Harm, goes_on: bool) -> None:
    stage.fault()
    harm(stage, job)
    if goes_on:
        stage.see_progress(job)
    stage.wait_for_end()


def signal_rank(rank: int, number: signal.Signals) -> Harm:
    """Send a signal to one rank."""
    return lambda stage, job: os.kill(stage.rank(rank), number)


def stop_for(seconds: float, rank: int) -> Harm:
    """Stop a rank for some seconds."""

    def harm(stage: Stage, job: Job) -> None:
        pid = stage.rank(rank)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)

    return harm


def signal_agent(number: signal.Signals, *, group: bool = False, stopped_rank: int | None = None) -> Harm:
    """Send a signal to torchrun, or to its process ``group`` as a terminal does; a rank may be stopped first."""

    def harm(stage: Stage, job: Job) -> None:
        agent = job.processes[0].pid
        if stopped_rank is not None:
            os.kill(stage.rank(stopped_rank), signal.SIGSTOP)
        if number == signal.SIGSTOP:
            stage.spare(agent)
        stage.fault()
        (os.killpg if group else os.kill)(agent, number)

    return harm


def clocks_jump(stage: Stage) -> None:
    """Set the time of day of torchrun and its ranks two hours forward, and then four back."""
    library, offset = stage.folder / "clock.so", stage.folder / "offset"
    if (compiler := shutil.which("cc")) is None:
        raise RunError("a C compiler must be installed; got none named cc")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, CLOCK, "-ldl"], check=True)
    offset.write_text("0")
    job = stage.start(LONG, env={"LD_PRELOAD": str(library), "CLOCK_OFFSET": str(offset)})
    job.until_under_way()
    stage.fault()
    offset.write_text("7200")
    before = job.newest()
    job.until(lambda: job.newest() > before + 2 * EVERY, START_SECONDS)
    offset.write_text("-7200")
    stage.see_progress(job)
    stage.wait_for_end()


def kill_agent_early(stage: Stage) -> None:
    """Kill torchrun while its ranks are still importing."""
    job = stage.start(LONG, ranks=2)
    if not job.until(lambda: {"0", "1"} <= {env.get("RANK") for env in stage.alive().values()}, START_SECONDS):
        raise RunError("the ranks did not start")
    stage.fault()
    os.kill(job.processes[0].pid, signal.SIGKILL)
    stage.wait_for_end(stage.deadline + 5.0)


def resumes_after(harm: Harm, *, torchrun: str) -> Play:
    """Harm a run that torchrun restarts, and see whether it makes progress again."""

    def play(stage: Stage) -> None:
        job = stage.start(LONG, torchrun=torchrun)
        job.until_under_way()
        stage.fault()
        harm(stage, job)
        if job.until(lambda: job.has(CONTINUES), START_SECONDS):
            stage.see_progress(job)
        stage.wait_for_end()

    return play


def broken(fault: str, *, words: str, at: int = 0, rank: int = 1, ranks: int = 3, ends: bool = True) -> Play:
    """Start a run with a fault inside, see ``broken_training``; ``ends`` says whether it is to end by itself."""

    def play(stage: Stage) -> None:
        env = {"FAULT": fault, "AT": str(at), "WHO": str(rank)}
        job = stage.start(words, ranks=ranks, program="-m experiments.faults.broken_training", env=env)
        if fault == "slow":
            stage.fault()
        else:
            stage.fault_said(job, "^fault: ")
        if not ends:
            stage.see_progress(job)
        stage.wait_for_end()

    return play


def served(harm: Harm, words: str, ranks: int) -> Play:
    """Harm a run with parameter servers once it has written its first checkpoint."""

    def play(stage: Stage) -> None:
        job = stage.start(f"{SERVED} --checkpoint-iterations {EVERY} {words}", ranks=ranks)
        job.until_under_way(EVERY)
        _harm(stage, job, harm, goes_on=False)

    return play


def start_only(words: str, *, ranks: int = 2, torchrun: str = "--standalone", within: float = START_SECONDS) -> Play:
    """Start a run that cannot begin."""

    def play(stage: Stage) -> None:
        stage.fault()
        stage.start(words, ranks=ranks, torchrun=torchrun)
        stage.wait_for_end(within)

    return play


# ---- faults of the network ----


def cut_link(node: int, *, seconds: float | None = None, times: int = 1, pause: float = 0.5) -> Play:
    """Cut a node's link, for some seconds or forever, perhaps several times."""

    def harm(stage: Stage, job: Job) -> None:
        assert stage.testbed is not None
        for _ in range(times):
            stage.testbed.cut(node)
            if seconds is None:
                return
            time.sleep(seconds)
            stage.testbed.restore(node)
            time.sleep(pause)

    def play(stage: Stage) -> None:
        assert stage.testbed is not None
        job = stage.start_on_testbed(LONG)
        try:
            job.until_under_way()
            _harm(stage, job, harm, goes_on=seconds is not None)
        finally:
            stage.testbed.restore(node)

    return play


# ---- faults of disks ----


@contextlib.contextmanager
def disk(folder: Path, options: str) -> Iterator[None]:
    """Mount a file system in memory at ``folder``; ``options`` are those of ``mount``."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunError(f"no file system could be mounted: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def full_disk(size: str, words: str, *, goes_on: bool = False, resumed: bool = False) -> Play:
    """Start a run on a disk that becomes full. Once it has said so, it may be resumed, or get more room."""

    def play(stage: Stage) -> None:
        folder = stage.folder / "disk"
        stage.cleanup.enter_context(disk(folder, f"size={size}"))
        job = stage.start(words, output=folder / "run")
        stage.fault_said(job, "No space left on device")
        if resumed:
            job.signal(signal.SIGTERM)
            stage.wait_for_end()
            stage.keep(job.outputs[0])
            stage.fault()
            again = stage.start(f"{words} --resume", output=job.outputs[0])
            again.until(lambda: again.has("No space left on device"), START_SECONDS)
            again.signal(signal.SIGTERM)
        elif goes_on:
            subprocess.run(["mount", "-o", "remount,size=100m", str(folder)], check=True)
            stage.see_progress(job)
        stage.wait_for_end()

    return play


def read_only_disk(stage: Stage) -> None:
    """Start a run whose output is on a read-only disk."""
    stage.cleanup.enter_context(disk(stage.folder / "disk", "size=5m,ro"))
    stage.fault()
    stage.start(LONG, ranks=2, output=stage.folder / "disk" / "run")
    stage.wait_for_end(START_SECONDS)


def file_instead_of_folder(stage: Stage, job: Job) -> None:
    """Put a file where the checkpoints were, and remove it once the run has reported it."""
    folder = job.outputs[0] / CHECKPOINTS
    folder.rename(job.outputs[0] / "away")
    folder.write_text("x", encoding="utf-8")
    job.until(lambda: job.has("checkpoint.*(File exists|Not a directory)"), stage.deadline)
    if job.running:
        folder.unlink()


# ---- faults of the folders that runs resume from ----


def resume(damage: Callable[[Path], None], *, ranks: int = 2, newest_may_go: bool = False) -> Play:
    """Stop a run, damage its folder, and resume it."""

    def play(stage: Stage) -> None:
        output = stage.folder / "run"
        _stopped(stage, stage.start(TO_RESUME, ranks=2, output=output))
        newest = max(iteration_folders(output))
        damage(output)
        stage.keep(output, but=newest if newest_may_go else None)
        stage.fault()
        job = stage.start(f"{TO_RESUME} --resume", ranks=ranks, output=output)
        stage.wait_for_end(START_SECONDS)
        stage.went_on = job.processes[0].returncode == 0

    return play


def _stopped(stage: Stage, job: Job) -> None:
    """Stop a run between its second checkpoint and its end."""
    job.until_under_way()
    job.signal(signal.SIGKILL)
    for pid in stage.alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    stage.wait_for_end()


def resume_machines(damage: Callable[[Path, Path], None], node_ranks: Sequence[int] = (0, 1)) -> Play:
    """Stop a run on two machines with a disk each, damage the disks, and resume the run with these node ranks."""

    def play(stage: Stage) -> None:
        outputs = [stage.folder / "first", stage.folder / "second"]
        _stopped(stage, stage.start_machines(TO_RESUME, outputs, [0, 1], free_port()))
        damage(*outputs)
        for output in outputs:
            stage.keep(output)
        stage.fault()
        job = stage.start_machines(f"{TO_RESUME} --resume", outputs, node_ranks, free_port())
        stage.wait_for_end(START_SECONDS)
        stage.went_on = not any(process.returncode for process in job.processes)

    return play


def iteration_folders(output: Path) -> dict[int, Path]:
    """Return the folders of all checkpoints, by iteration."""
    return {int(path.name.partition("-")[2]): path for path in (output / CHECKPOINTS).glob("iteration-*")}


def empty(first: Path, second: Path) -> None:
    """Bring the second machine back with an empty disk."""
    shutil.rmtree(second)
    second.mkdir()


def newest_file(output: Path, name: str) -> Path:
    """Return a file of the newest checkpoint."""
    folders = iteration_folders(output)
    return folders[max(folders)] / name


def truncate(output: Path) -> None:
    """Cut off the newest checkpoint."""
    path = newest_file(output, "shared.pt")
    path.write_bytes(path.read_bytes()[:1000])


def flip_a_bit(output: Path) -> None:
    """Change one bit of the newest checkpoint."""
    path = newest_file(output, "rank-1.pt")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def unreadable(output: Path) -> None:
    """Make the newest checkpoint a link to itself, which no user can read."""
    path = newest_file(output, "shared.pt")
    path.unlink()
    path.symlink_to("shared.pt")


def without_checksums(output: Path) -> None:
    """Delete all checksums."""
    for path in (output / CHECKPOINTS).rglob("*.sha256"):
        path.unlink()


def nuls_in_metrics(output: Path) -> None:
    """Let the metrics end as a file system leaves them after losing power."""
    path = output / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-20] + bytes(400))


def damaged_metrics(output: Path) -> None:
    """Cut off a line in the middle of the metrics."""
    path = output / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    lines[5] = lines[5][:50]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def empty_description(output: Path) -> None:
    """Empty the file that describes the run."""
    (output / "run.json").write_text("", encoding="utf-8")


def nothing(*outputs: Path) -> None:
    """Do no damage."""


# ---- two runs in one folder ----


def two_at_once(stage: Stage) -> None:
    """Start two runs in one new folder at the same time."""
    words = f"--hidden-sizes 100 --batch-size 32 --iterations 100000 --checkpoint-iterations {EVERY}"
    output = stage.folder / "run"
    stage.fault()
    first, second = (stage.start(f"{words} --seed {seed}", ranks=1, output=output) for seed in (1, 2))
    end = time.monotonic() + START_SECONDS
    while first.running and second.running and time.monotonic() < end:
        time.sleep(0.1)
    stage.see_progress(first if first.running else second)
    stage.wait_for_end()


def into_a_live_run(option: str) -> Play:
    """Start a second run in the folder of one that is under way."""

    def play(stage: Stage) -> None:
        first = stage.start(LONG, ranks=1)
        first.until_under_way()
        stage.fault()
        second = stage.start(f"{LONG} {option}", ranks=1, output=first.outputs[0])
        second.until(lambda: not second.running, START_SECONDS / 5)
        refused = not second.running
        second.signal(signal.SIGTERM)
        stage.see_progress(first, seconds=30.0)
        stage.went_on = stage.went_on and refused
        stage.wait_for_end()

    return play


def free_port() -> int:
    """Return a port on which nobody listens now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
