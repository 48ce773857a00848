"""All faults, each with the outcome that it must have."""

from __future__ import annotations

import signal
from functools import partial

from experiments.faults import plays
from experiments.faults.outcome import Scenario
from experiments.faults.plays import CONTINUES, EVERY, LONG, broken, cut_link, disturb, full_disk, resume, start_only
from experiments.faults.stage import END_SECONDS, START_SECONDS

SHORT = f"--hidden-sizes 100 --batch-size 32 --iterations 200 --checkpoint-iterations {EVERY}"
RESTART = "--standalone --max-restarts 1"
SECOND_MACHINE = "--nnodes 2 --node-rank 1 --rdzv-conf timeout=5"
UNDER_WAY = EVERY + 1
"""Iterations that a rank may lose if it ends without warning: those since the last checkpoint, and the current one."""
kill, stop = (partial(plays.signal_rank, number=number) for number in (signal.SIGKILL, signal.SIGSTOP))

# Kinds of scenarios, by the outcome that they share.
ended_by_an_error = partial(Scenario, says=r"error: ", lost=UNDER_WAY)
told_to_stop = partial(Scenario, says=r"SIGTERM", lost=0)
ended_by_ctrl_c = partial(Scenario, says=r"stopped by Ctrl-C after iteration \d+", lost=0)
restarted = partial(Scenario, says=CONTINUES, within=START_SECONDS, goes_on=True)
resumed_from_an_older_one = partial(
    Scenario, says=r"warning: .*checkpoint skipped, since", within=START_SECONDS, goes_on=True
)
refused = partial(Scenario, says=r"^(\[\S+\]: ?)?error: ", within=START_SECONDS, exit_code=2)
without_rank_2 = partial(Scenario, says=r"error: rank \d.*\brank 2\b", names=(2,))

PROCESSES = (
    Scenario(
        id="S1",
        fault="SIGKILL of one rank of three",
        play=disturb(kill(1)),
        says=r"(error: rank \d|stopped by SIGTERM).*\brank 1\b",
        names=(1,),
        lost=UNDER_WAY,
    ),
    restarted(
        id="S1b",
        fault="SIGKILL of one rank of three, with --max-restarts 1",
        play=plays.resumes_after(kill(1), torchrun=RESTART),
        names=(1,),
    ),
    Scenario(
        id="S2",
        fault="SIGSTOP of one rank for half of the deadline",
        play=lambda stage: disturb(plays.stop_for(stage.deadline / 2, 1), goes_on=True)(stage),
        goes_on=True,
    ),
    Scenario(
        id="S2b",
        fault="SIGSTOP of one rank for half of the deadline, with --stall-seconds 2",
        play=lambda stage: disturb(
            plays.stop_for(stage.deadline / 2, 1), words=f"{LONG} --stall-seconds 2", goes_on=True
        )(stage),
        says=r"stalled: rank 0 waits .*\brank 1\b",
        goes_on=True,
    ),
    ended_by_an_error(
        id="S3",
        fault="SIGSTOP of one rank for ever",
        play=disturb(stop(1)),
        says=r"error: rank \d.*\brank 1\b",
        names=(1,),
    ),
    restarted(
        id="S27",
        fault="SIGSTOP of one rank for ever, with --max-restarts 1",
        play=plays.resumes_after(stop(1), torchrun=RESTART),
        names=(1,),
    ),
    told_to_stop(id="S26", fault="SIGTERM to one rank of three", play=disturb(plays.signal_rank(1, signal.SIGTERM))),
    told_to_stop(id="S4", fault="SIGTERM to torchrun", play=disturb(plays.signal_agent(signal.SIGTERM))),
    ended_by_ctrl_c(
        id="S5a", fault="Ctrl-C on the terminal", play=disturb(plays.signal_agent(signal.SIGINT, group=True))
    ),
    ended_by_ctrl_c(id="S5b", fault="SIGINT to torchrun alone", play=disturb(plays.signal_agent(signal.SIGINT))),
    ended_by_an_error(
        id="S6a",
        fault="SIGKILL of torchrun, which holds the store",
        play=disturb(plays.signal_agent(signal.SIGKILL)),
    ),
    ended_by_an_error(
        id="S6b",
        fault="SIGKILL of torchrun while one rank is stopped",
        play=disturb(plays.signal_agent(signal.SIGKILL, stopped_rank=1)),
    ),
    Scenario(
        id="S25",
        fault="SIGKILL of torchrun while its ranks start",
        play=plays.kill_agent_early,
        says=r"error: rank \d+: torchrun's agent.* has died",
    ),
    Scenario(
        id="S17",
        fault="all clocks two hours forward, then four back",
        play=plays.clocks_jump,
        goes_on=True,
    ),
    ended_by_an_error(
        id="S23",
        fault="SIGSTOP of torchrun, which holds the store",
        play=disturb(plays.signal_agent(signal.SIGSTOP), ranks=2),
    ),
)

NETWORK = (
    Scenario(
        id="S18a",
        fault="one node's link cut for 3 s",
        play=cut_link(1, seconds=3.0),
        goes_on=True,
        testbed=True,
    ),
    Scenario(
        id="S18b",
        fault="one node's link cut eight times for 0.5 s",
        play=cut_link(1, seconds=0.5, times=8),
        goes_on=True,
        testbed=True,
    ),
    ended_by_an_error(
        id="S18c",
        fault="one node's link cut for ever",
        play=cut_link(1),
        says=r"error: rank [02].*\brank 1\b",
        names=(1,),
        testbed=True,
    ),
    ended_by_an_error(
        id="S18d",
        fault="link of the node with the store cut for ever",
        play=cut_link(0),
        says=r"error: rank [12]: .*store that the ranks share \(.*rank 0's machine\)",
        testbed=True,
    ),
)

DISKS = (
    Scenario(
        id="S7a",
        fault="disk full at a checkpoint, then room again",
        play=full_disk("2600k", LONG, goes_on=True),
        says=r"warning: .*checkpoint.*No space left on device",
        goes_on=True,
        root=True,
    ),
    Scenario(
        id="S7a2",
        fault="--resume on a disk that is still full",
        play=full_disk("2600k", LONG, resumed=True),
        says=r"(warning|error): .*No space left on device",
        within=START_SECONDS,
        root=True,
    ),
    Scenario(
        id="S7b",
        fault="disk full by metrics.jsonl, then room again",
        play=full_disk(
            "300k",
            "--hidden-sizes 30 --batch-size 32 --iterations 100000 --checkpoint-iterations 2000",
            goes_on=True,
        ),
        says=r"warning: .*No space left on device",
        goes_on=True,
        root=True,
    ),
    Scenario(
        id="S7c",
        fault="disk full at the end, when weights are written",
        play=full_disk("400k", "--hidden-sizes 300 300 --batch-size 32 --iterations 60 --checkpoint-seconds 100000"),
        says=r"(warning|error): .*No space left on device",
        root=True,
    ),
    refused(id="S8", fault="--output on a disk that is read-only", play=plays.read_only_disk, root=True),
    Scenario(
        id="S8c",
        fault="a file where the folder of checkpoints was, for a while",
        play=disturb(plays.file_instead_of_folder, goes_on=True),
        says=r"warning: .*checkpoint",
        goes_on=True,
    ),
)

RESUMED = (
    resumed_from_an_older_one(
        id="S9a",
        fault="newest checkpoint cut off, then --resume",
        play=resume(plays.truncate, newest_may_go=True),
    ),
    resumed_from_an_older_one(
        id="S9b",
        fault="one bit of the newest checkpoint flipped, then --resume",
        play=resume(plays.flip_a_bit, newest_may_go=True),
    ),
    resumed_from_an_older_one(
        id="S9d",
        fault="newest checkpoint cannot be read, then --resume",
        play=resume(plays.unreadable, newest_may_go=True),
    ),
    refused(id="S9c", fault="all checksums missing, then --resume", play=resume(plays.without_checksums)),
    refused(
        id="S9e",
        fault="two machines, one of which comes back with an empty disk",
        play=plays.resume_machines(plays.empty),
    ),
    refused(
        id="S9f",
        fault="two machines whose --node-rank are swapped",
        play=plays.resume_machines(plays.nothing, (1, 0)),
    ),
    restarted(id="S9g", fault="metrics.jsonl ends in NULs, then --resume", play=resume(plays.nuls_in_metrics)),
    restarted(
        id="S9h",
        fault="metrics.jsonl damaged in the middle, then --resume",
        play=resume(plays.damaged_metrics),
        says=r"warning: .*metrics",
    ),
    refused(
        id="S9i",
        fault="run.json empty, then --resume",
        play=resume(plays.empty_description),
        says=r"error: .*run\.json",
    ),
    restarted(id="S9j", fault="--resume with three ranks instead of two", play=resume(plays.nothing, ranks=3)),
    refused(id="S10a", fault="two runs start in one new folder at once", play=plays.two_at_once, goes_on=True),
    refused(
        id="S10c",
        fault="--overwrite of a run that is under way",
        play=plays.into_a_live_run("--overwrite"),
        within=END_SECONDS,
        goes_on=True,
    ),
    refused(
        id="S10d",
        fault="--resume of a run that is under way",
        play=plays.into_a_live_run("--resume"),
        within=END_SECONDS,
        goes_on=True,
    ),
)

INSIDE = (
    Scenario(
        id="S14",
        fault="NaN in the batch of one rank",
        play=broken("nan", words=SHORT, at=50),
        says=r"error: .*iteration 50\b.*\brank 1\b",
    ),
    Scenario(
        id="S14b",
        fault="NaN in the batch of one rank, with --on-nonfinite skip",
        play=broken("nan", words=f"{LONG} --on-nonfinite skip", at=50, ends=False),
        says=r"warning: .*iteration 50\b.*\brank 1\b",
        goes_on=True,
    ),
    Scenario(
        id="S15",
        fault="an allocation that fails in one rank",
        play=broken("memory", words=SHORT, at=50),
        says=r"error: rank 1: .*memory",
        traceback=True,
    ),
    Scenario(
        id="S16",
        fault="one rank slower by 0.3 s an iteration",
        play=broken("slow", words="--hidden-sizes 100 --batch-size 32 --iterations 40"),
        says=r"slowest.*rank 1\b|rank 1\b.*slow",
        within=START_SECONDS,
        goes_on=True,
    ),
    Scenario(
        id="S24",
        fault="one rank loads its data for longer than the deadline",
        play=broken("load", words=SHORT, ranks=2),
        goes_on=True,
    ),
)

SERVERS = (
    without_rank_2(
        id="S19",
        fault="SIGKILL of a worker of asynchronous parameter servers",
        play=plays.served(kill(2), "--strategy ps-async", 4),
    ),
    without_rank_2(
        id="S20",
        fault="SIGSTOP of a worker of asynchronous parameter servers",
        play=plays.served(stop(2), "--strategy ps-async", 4),
    ),
    without_rank_2(
        id="S21",
        fault="SIGSTOP of a synchronous parameter server",
        play=plays.served(stop(2), "--strategy ps-sync", 3),
    ),
)

STARTS = (
    refused(
        id="S22a",
        fault="--timeout 1e15",
        play=start_only(f"{SHORT} --timeout 1e15"),
        says=r"error: .*timeout must",
    ),
    refused(
        id="S22b",
        fault="--timeout 0.0001",
        play=start_only(f"{SHORT} --timeout 0.0001"),
        says=r"error: .*timeout must",
    ),
    Scenario(
        id="S11a",
        fault="a machine that looks for the first one at a wrong port; torchrun waits for 5 s, not ten minutes",
        play=start_only(SHORT, ranks=1, torchrun=f"{SECOND_MACHINE} --master-addr 127.0.0.1 --master-port 9"),
        says=r"timed out .*trying to connect to \(127\.0\.0\.1, 9\)",
        within=START_SECONDS,
    ),
    Scenario(
        id="S11b",
        fault="a machine that looks for the first one by a wrong name; torchrun waits for 5 s, not ten minutes",
        play=start_only(SHORT, ranks=1, torchrun=f"{SECOND_MACHINE} --master-addr no.such.host.invalid"),
        says=r"no\.such\.host\.invalid",
        within=START_SECONDS,
    ),
    Scenario(
        id="S11c",
        fault="the first machine alone; torchrun waits for 5 s, not ten minutes",
        play=start_only(SHORT, ranks=1, torchrun="--nnodes 2 --node-rank 0 --rdzv-conf timeout=5"),
        says=r"1/2 clients joined",
        within=START_SECONDS,
    ),
)

SCENARIOS = (*PROCESSES, *NETWORK, *DISKS, *RESUMED, *INSIDE, *SERVERS, *STARTS)
QUICK = ("S1", "S9a", "S22a")
"""A few faults that take seconds."""
