"""A day of training between homes, by the timing model alone: members, uplinks, and the local steps that hide them.

    python -m experiments.home_uplinks        home_uplinks.csv

Nothing is measured here. Every member has one accelerator, an uplink, which limits what it sends, and a latency of 20
ms; the downlink is taken to be faster. All train one model at width 2 with int4, and exchange by the ring or by
halving-doubling, whichever is faster, after the fewest local steps that hide it (at most 500). The computation of every
member varies by a fifth from iteration to iteration. No member is always slower than the others, or leaves: a slow one
would be waited for by all. "members' worth" is how many members that never exchange anything compute as many samples.
It says nothing of accuracy, which long windows and many members cost.

The iteration is that of the formulas; the simulator draws every iteration of every member instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rich.console import Console

from experiments import command
from experiments.results import Row, save
from pipesgd.ranks import Ranks
from timing_model.alternatives import hiding_steps
from timing_model.choices import Space
from timing_model.cluster_profile import Profile
from timing_model.fragments import MOST_LOCAL_STEPS
from timing_model.job import Job
from timing_model.measured import LinkProfile
from timing_model.options import NOTHING, computation_of
from timing_model.plan import plan
from timing_model.predict import predict
from timing_model.presets import MODELS, ethernet
from timing_model.simulate_job import simulate_job
from timing_model.units import format_seconds, parse_bandwidth

WORKLOADS = {"resnet50": (0.3, 32), "gpt2": (1.0, 8)}
"""Seconds of a forward and backward pass, and samples in it, by the name of the model."""
UPLINKS = ("10mbit", "50mbit")
LATENCY = 20e-3
MEMBERS = (4, 128, 1024, 16384)
CV = 0.2
DAY = 86_400.0
WINDOWS, QUICK_WINDOWS = 100, 5
"""Windows that are simulated."""


def question(model: str, uplink: str, members: int) -> Job:
    """Return the job of this many members, without local steps."""
    seconds, batch_size = WORKLOADS[model]
    times = computation_of(model, MODELS[model], seconds, batch_size=batch_size)
    link = LinkProfile.exact(ethernet(parse_bandwidth("uplink", uplink), LATENCY))
    cluster = Profile(calibrated=NOTHING, link=link)
    return Job(cluster=cluster, compute=dataclasses.replace(times, cv=CV), world_size=members)


def answer(job: Job, windows: int) -> Row:
    """Return the row of a job: the local steps that hide its network, and what a day comes to."""
    space = Space(codecs=("int4",), all_reduces=("ring", "halving-doubling"), strategies=("pipelined",), widths=(2,))
    best = plan(job, space).best
    found = hiding_steps(best)
    steps = found or MOST_LOCAL_STEPS
    local = best.job.changed(local_steps=steps, iterations=steps * windows)
    predicted, without = predict(local), best.iteration.total
    samples = job.compute.batch_size * job.world_size * DAY
    return {
        "model": job.compute.model,
        "parameters": job.compute.numel,
        "members": job.world_size,
        "all_reduce": local.all_reduce,
        "all_reduce_s": predicted.collective.total,
        "local_steps": steps,
        "hides": found is not None,
        "iteration_without_s": without,
        "iteration_s": predicted.iteration.total,
        "simulated_s": simulate_job(local).period,
        "windows_a_day": DAY / (steps * predicted.iteration.total),
        "samples_a_day": samples / predicted.iteration.total,
        "members_worth": predicted.efficiency * job.world_size,
    }


def compute(windows: int) -> list[Row]:
    """Return a row for every model, uplink and number of members."""
    return [
        {"uplink": uplink} | answer(question(model, uplink, members), windows)
        for model in WORKLOADS
        for uplink in UPLINKS
        for members in MEMBERS
    ]


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    arguments = command.parse(command.parser("home_uplinks", __doc__), words)
    rows = compute(QUICK_WINDOWS if arguments.quick else WINDOWS)
    save("home_uplinks", rows, folder=arguments.output)
    command.show(
        f"A day at width 2 with int4, {1e3 * LATENCY:.0f} ms latency, computation varying by {CV:.0%}",
        [
            {
                "model": row["model"],
                "uplink": row["uplink"],
                "members": f"{row['members']:,}",
                "all-reduce": f"{row['all_reduce']}, {format_seconds(row['all_reduce_s'])}",
                "local steps": f"{row['local_steps']}" if row["hides"] else f"{row['local_steps']}, not hidden",
                "iteration": f"{format_seconds(row['iteration_s'])} ({format_seconds(row['simulated_s'])} simulated)",
                "without local steps": format_seconds(row["iteration_without_s"]),
                "windows a day": f"{row['windows_a_day']:,.0f}",
                "samples a day": f"{row['samples_a_day']:.3g}",
                "members' worth": f"{row['members_worth']:,.0f}",
            }
            for row in rows
        ],
    )


if __name__ == "__main__":
    command.run(main)
