"""Clusters without noise, and the plans chosen for them."""

from __future__ import annotations

import dataclasses
from typing import Any

from pipesgd.cli import parse
from pipesgd.planning.choose import decide
from pipesgd.planning.planned import Planned
from tests.timing_model._profiles import MLP, PROFILE
from timing_model.cluster_profile import Profile
from timing_model.measured import ComputeProfile, Estimate, LinkProfile
from timing_model.params import LinkParams

AUTOS = "--width auto --codec auto --all-reduce auto"
NO_HANDOVER = {"handover": Estimate.exact(0.0), "late_handover": Estimate.exact(0.0)}
SMALL = dataclasses.replace(MLP, batch_size=16, tensors=(64 * 20, 20, 20 * 10, 10), samples=1497, **NO_HANDOVER)
SLOW = LinkParams(alpha=5e-5, beta=8e-8, gamma=1e-10, sync=1e-4)
INSTANT = LinkParams(alpha=0.0, beta=0.0, gamma=0.0, sync=0.0)


def cluster(link: LinkParams = SLOW, compute: ComputeProfile = MLP, **changes: Any) -> Profile:
    """Return the profile of a cluster with this link and without noise."""
    exact = LinkProfile.exact(link)
    none = Estimate.exact(0.0)
    steady = dataclasses.replace(compute, cv=0.0, persistence=none, comm_cv=none, slow_ranks=(), **NO_HANDOVER)
    return dataclasses.replace(PROFILE, link=exact, links={"native": exact}, compute=(steady,), **changes)


def choose(profile: Profile, words: str = AUTOS, **changes: Any) -> Planned:
    config = parse(["--batch-size", "512", *words.split()])
    options = {"world_size": 4, "iterations": 100, "source": "a test", "own": False} | changes
    return decide(profile, profile.compute[0], config, **options)


def prediction(low: float = 0.9, middle: float = 1.0, high: float = 1.2) -> Planned:
    planned = choose(cluster())
    return dataclasses.replace(planned, iteration_seconds=middle, low=low, high=high)
