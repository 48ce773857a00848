"""Fits of the timing model to measurements, and the profile for ``cluster.toml``."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipesgd.calibration.codec_speeds import OPERATIONS, CodecSpeed
from pipesgd.calibration.computation import Computation
from pipesgd.calibration.links import Probes
from pipesgd.calibration.options import RING
from pipesgd.calibration.robust_fit import LEAST_SPREAD, Fit, Floats, Prior, fit, spread
from pipesgd.calibration.sweep import Cell
from pipesgd.calibration.training import LATE
from pipesgd.errors import UserInputError
from timing_model.all_reduce import CollectiveTime, all_reduce_time, gather_time
from timing_model.cluster_profile import Profile
from timing_model.iteration import collective_within
from timing_model.measured import (
    PARAMETER_SERVER,
    Calibrated,
    CodecProfile,
    CodecRates,
    ComputeProfile,
    Corrections,
    Estimate,
    LinkProfile,
    LowRankProfile,
)
from timing_model.parameter_server import parameter_server_time
from timing_model.params import FLOAT_BYTES, LinkParams, Noise
from timing_model.presets import OVERHEAD

FITTED = ("alpha", "beta", "sync")
"""Names of the parameters of an all-reduce that are fitted."""
ALPHA, BETA, SYNC = range(len(FITTED))
"""Their indices in a fit."""
SERVER_PARAMETERS = ("beta", "sync", "shared")
"""Names of a parameter server's parameters; the last is beta times ``sharing``."""
RATE_OFF = 1.0
"""Relative uncertainty of a byte's time given that between two ranks."""
MEDIAN_ERROR = 1.25
"""Standard error of a median over that of a mean."""
REPEATS = 0.15
"""Largest relative spread with which the times of a cell are worth predicting."""
FEW_CELLS = 8
"""Most cells of which none is held out."""
SMALLEST_START, SMALLEST_BETA = 1e-6, 1e-13
"""Seconds, and seconds per byte, at which a fit starts where a probe found nothing."""


@dataclass(frozen=True, kw_only=True)
class CollectiveFit:
    """Parameters of one algorithm on this cluster, and the cells that they were fitted to."""

    all_reduce: str
    """Name of the algorithm, or ``PARAMETER_SERVER``."""
    cells: list[Cell]
    fit: Fit
    sums: Estimate
    """Time of a sum, measured alone, in s per byte."""
    names: Sequence[str] = FITTED
    """Names of the parameters."""

    @property
    def smallest_bytes(self) -> int:
        """Smallest size from which on all sizes repeat; below it, a time consists of the machine's noise."""
        noisy = [cell.nbytes for cell in self.cells if spread(cell.seconds) > REPEATS]
        sizes = sorted({cell.nbytes for cell in self.cells})
        return min((size for size in sizes if size > max(noisy, default=0)), default=sizes[-1])

    @property
    def errors(self) -> Floats:
        """Magnitudes of the relative errors of held-out cells from ``smallest_bytes`` on."""
        return np.abs(self.held_out[self._repeat])

    @functools.cached_property
    def corrections(self) -> Corrections:
        """Ratios of measured to predicted times of the cells from ``smallest_bytes`` on, as far as they exceed noise.

        Each is shrunk towards 1 by d^2 / (d^2 + s^2), where d is its distance from 1 and s the median's standard error.
        """
        cells = [self.cells[index] for index in self._repeat]
        off = np.array([cell.median for cell in cells]) / self.fit.fitted[self._repeat] - 1
        noise = np.array([MEDIAN_ERROR * spread(cell.seconds) / math.sqrt(len(cell.seconds)) for cell in cells])
        factors = 1 + off**3 / np.maximum(off**2 + noise**2, np.finfo(float).tiny)
        return Corrections(
            world_sizes=tuple(cell.world_size for cell in cells),
            nbytes=tuple(cell.nbytes for cell in cells),
            factors=tuple(map(float, factors)),
            errors=tuple(map(float, np.hypot(LEAST_SPREAD, self.errors))),
        )

    @functools.cached_property
    def held_out(self) -> Floats:
        """predicted / measured - 1 of every cell (n,). The prediction is a fit to the cells of other folds and, from
        ``smallest_bytes`` on, is corrected by the errors of the other cells with this many ranks."""
        off = self.fit.held_out
        found = off.copy()
        for index in self._repeat:
            cell = self.cells[index]
            others = [one for one in self._repeat if self.cells[one].world_size == cell.world_size and one != index]
            if others:
                sizes = [math.log(self.cells[one].nbytes) for one in others]
                found[index] = (1 + off[index]) * np.interp(math.log(cell.nbytes), sizes, 1 / (1 + off[others])) - 1
        return found

    @functools.cached_property
    def _repeat(self) -> list[int]:
        """Indices of the cells from ``smallest_bytes`` on."""
        smallest = self.smallest_bytes
        return [number for number, cell in enumerate(self.cells) if cell.nbytes >= smallest]

    @property
    def residual(self) -> float:
        """90th percentile of ``errors``."""
        return float(np.quantile(self.errors, 0.9))

    @property
    def link(self) -> LinkParams:
        return _link_params(self.fit.parameters, self.sums)

    def predicted(self, cell: Cell) -> CollectiveTime:
        """Return the time that the formula predicts for a cell."""
        return _time(self.all_reduce, self.link, cell)

    def seconds(self, numel: int, world_size: int, codec: CodecProfile | None = None) -> float:
        """Return the corrected time of an all-reduce of any gradient, in s; by default uncompressed."""
        nbytes = FLOAT_BYTES * numel if codec is None else codec.bits / 8 * numel
        corrected = self.corrections.at(world_size, nbytes)
        link = self.link if corrected is None else self.link.times(corrected[0])
        if codec is not None and codec.gathered:
            return gather_time(link, numel, world_size, codec=codec.cost("")).total
        cost = None if codec is None else codec.cost("")
        return all_reduce_time(self.all_reduce, link, numel, world_size, codec=cost).total


def fit_collective(all_reduce: str, cells: Sequence[Cell], probes: Probes, sums: Estimate) -> CollectiveFit:
    """Fit ``timing_model.all_reduce_time`` to the measured cells of one algorithm.

    In most cells the wire hides sums, whose cost is therefore the one measured alone. In the smallest ones latency
    hides the wire, so the rate that the probes found counts, too.

    Args:
        all_reduce: name of the algorithm, the same as in the timing model.
        cells: measured cells of all sizes and numbers of ranks.
        probes: probes between the ranks.
        sums: s per byte of a sum that is measured alone.
    """
    own = sorted((cell for cell in cells if cell.all_reduce == all_reduce), key=lambda c: (c.world_size, c.nbytes))
    alpha = max(probes.middle("latency"), SMALLEST_START)
    beta = 1 / probes.middle("rate")

    def predict(parameters: Floats) -> Floats:
        link = _link_params(parameters, sums)
        return np.array([_time(all_reduce, link, cell).total for cell in own])

    found = fit(
        predict,
        np.array([alpha, beta, alpha]),
        [cell.seconds for cell in own],
        folds=_folds(own),
        priors=(Prior(BETA, beta, RATE_OFF),),
    )
    return CollectiveFit(all_reduce=all_reduce, cells=own, fit=found, sums=sums)


def fit_servers(cells: Sequence[Cell], ring: CollectiveFit) -> CollectiveFit:
    """Fit ``timing_model.parameter_server_time`` to the measured rounds: ``SERVER_PARAMETERS``.

    Latency and sums are the ring's: a fit to few sizes and numbers of ranks could not tell them from these.
    """
    own = sorted(
        (cell for cell in cells if cell.all_reduce == PARAMETER_SERVER), key=lambda c: (c.world_size, c.nbytes)
    )
    known = ring.link

    def predict(parameters: Floats) -> Floats:
        beta, sync, shared = map(float, parameters)
        link = dataclasses.replace(known, beta=beta, sync=sync)
        sharing = min(1.0, shared / beta) if beta > 0 else 0.0
        return np.array([parameter_server_time(link, c.nbytes, c.world_size, sharing=sharing).total for c in own])

    beta = max(known.beta, SMALLEST_BETA)
    found = fit(
        predict,
        np.array([beta, max(known.sync, SMALLEST_START), beta / 2]),
        [cell.seconds for cell in own],
        folds=_folds(own),
        priors=(Prior(0, beta, RATE_OFF), Prior(2, beta / 2, RATE_OFF)),
    )
    return CollectiveFit(all_reduce=PARAMETER_SERVER, cells=own, fit=found, sums=ring.sums, names=SERVER_PARAMETERS)


def sharing_of(servers: CollectiveFit) -> Estimate:
    """Return ``sharing``, from 0 to 1, by the fitted ``SERVER_PARAMETERS``."""
    beta, _, shared = servers.fit.estimates()
    return Estimate(*(min(1.0, one / beta.value) if beta.value > 0 else 0.0 for one in dataclasses.astuple(shared)))


@dataclass(frozen=True)
class LateIteration:
    """``computation.LateIteration`` as the timing model defines it: the model adds the ranks' waiting for each other,
    which must not count as a part's own time, too."""

    world_size: int
    noise: Noise

    def all_reduce(self, total: float, computation: float) -> float:
        return collective_within(total, computation, LATE, world_size=self.world_size, noise=self.noise)


def make_profile(
    *,
    fits: Mapping[str, CollectiveFit],
    codecs: Mapping[str, CodecSpeed],
    compute: ComputeProfile,
    ranks_per_core: float,
    provenance: dict[str, Any],
) -> Profile:
    """Return the file's content; ``fits`` holds all-reduces and servers by name."""
    ring, servers = fits[RING], fits.get(PARAMETER_SERVER)
    links = {name: _link_profile(one) for name, one in fits.items() if one is not servers}
    link = links.pop(RING)
    if servers is not None:
        beta, sync, _ = servers.fit.estimates()
        links[PARAMETER_SERVER] = dataclasses.replace(link, beta=beta, sync=sync, corrections=servers.corrections)
    return Profile(
        provenance=provenance,
        calibrated=Calibrated(
            world_sizes=tuple(sorted({cell.world_size for cell in ring.cells})),
            smallest_bytes=ring.smallest_bytes,
            largest_bytes=max(cell.nbytes for cell in ring.cells),
            residuals={name: one.residual for name, one in fits.items()},
            ranks_per_core=ranks_per_core,
        ),
        link=link,
        links=links,
        sharing=None if servers is None else sharing_of(servers),
        codecs={name: codec_profile(speed) for name, speed in codecs.items()},
        compute=(compute,),
    )


def compute_profile(
    computation: Computation,
    *,
    model: str,
    batch_size: int,
    accumulation: int,
    tensors: Sequence[int],
    released: Sequence[float],
    samples: int,
    low_rank: LowRankProfile | None,
) -> ComputeProfile:
    """Return the compute profile of the model that was measured."""
    return ComputeProfile(
        model=model,
        batch_size=batch_size,
        accumulation=accumulation,
        tensors=tuple(tensors),
        released=tuple(released),
        samples=samples,
        compute_slowdown=computation.compute_slowdown,
        codec_compute_slowdown=computation.codec_compute_slowdown,
        processor_share=computation.processor_share,
        late_handover=computation.late_handovers[RING],
        late_handovers={name: one for name, one in computation.late_handovers.items() if name != RING},
        cv=computation.cv,
        persistence=computation.persistence,
        comm_cv=computation.comm_cv,
        slow_ranks=tuple(computation.slow_ranks.values()),
        forward=computation.parts["forward"],
        backward=computation.parts["backward"],
        update=computation.parts["update"],
        late_update=computation.parts["late_update"],
        local_update=computation.parts["local_update"],
        loading=computation.parts["loading"],
        low_rank=low_rank,
        handover=computation.parts["handover"],
    )


def save(profile: Profile, path: Path) -> None:
    """Write the file, whole or not at all.

    Raises:
        UserInputError: it cannot be written.
    """
    try:
        profile.save(path)
    except ValueError as failure:
        raise UserInputError(f"out must be a file to write; got {failure}") from None


def _time(all_reduce: str, link: LinkParams, cell: Cell) -> CollectiveTime:
    return all_reduce_time(all_reduce, link, cell.nbytes / 4, cell.world_size)


def _link_params(parameters: Floats, sums: Estimate) -> LinkParams:
    alpha, beta, sync = map(float, parameters)
    return LinkParams(alpha=alpha, beta=beta, gamma=sums.value, sync=sync, overhead=OVERHEAD)


def _link_profile(found: CollectiveFit) -> LinkProfile:
    alpha, beta, sync = found.fit.estimates()
    return LinkProfile(alpha=alpha, beta=beta, gamma=found.sums, sync=sync, corrections=found.corrections)


def codec_profile(speed: CodecSpeed) -> CodecProfile:
    """Return the profile of a codec that was measured."""
    return CodecProfile(
        bits=speed.bits,
        call=speed.call,
        rates=CodecRates(**{operation: speed.memory[operation] for operation in OPERATIONS}),
        gathered=speed.gathered,
    )


def _folds(cells: Sequence[Cell]) -> NDArray[np.int64]:
    """Return the fold of every cell: two, of every second size of every number of ranks, alternating as on a
    chessboard; or one of few cells, half of which would not determine the parameters."""
    if len(cells) <= FEW_CELLS:
        return np.zeros(len(cells), dtype=np.int64)
    world_sizes = sorted({cell.world_size for cell in cells})
    sizes = sorted({cell.nbytes for cell in cells})
    return np.array([(world_sizes.index(cell.world_size) + sizes.index(cell.nbytes)) % 2 for cell in cells])
