"""State that a run needs to continue bit for bit, collected from its parts and restored to them."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pipesgd.data.augmentation import batch_seed
from pipesgd.errors import CheckpointError, PipesgdError
from pipesgd.optim.build import scale_rates
from pipesgd.pipeline.on_pipeline import OnPipeline
from pipesgd.strategy import Strategy


def _in_flight(strategy: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the gradients in flight in a strategy's state, whose means are the same on all ranks."""
    found: list[dict[str, Any]] = strategy.get("pipeline", strategy).get("in_flight", [])
    return found


@dataclass(kw_only=True)
class RunState:
    """The parts of a run that change while it runs. The position in the data follows from the iteration."""

    model: nn.Module
    optimizer: Optimizer
    schedule: LRScheduler
    strategy: Strategy
    losses: collections.deque[float]
    """Losses of this rank's last batches, up to an epoch of them."""
    rate_ranks: int = 1
    """Number of ranks that the learning rate is for: an elastic run that has lost some of them keeps it."""
    seconds: float = field(default=0.0, init=False)
    """Wall-clock seconds of the run up to the checkpoint that it was resumed from."""
    nonfinite: int = field(default=0, init=False)
    """Number of updates that were left out while this rank's own gradient was not finite."""

    def snapshot(self, seconds: float) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return (state equal on all ranks, state of this rank), after ``seconds`` of wall clock in total."""
        with self.strategy.true_weights() if self.strategy.replicated else contextlib.nullcontext():
            replica = {
                # Take the storage, since a parameter may have another one afterwards.
                "parameters": {name: parameter.data for name, parameter in self.model.named_parameters()},
                "optimizer": self.optimizer.state_dict() | ({"state": {}} if self.strategy.owns_optimizer else {}),
                "schedule": self.schedule.state_dict(),
            }
        strategy = self.strategy.state_dict()
        means = [gradient.pop("flats") for gradient in _in_flight(strategy)]
        shared = (replica if self.strategy.replicated else {}) | {"means": means, "rate_ranks": self.rate_ranks}
        own = {
            **({} if self.strategy.replicated else replica),
            "buffers": dict(self.model.named_buffers()),
            "strategy": strategy,
            "losses": list(self.losses),
            "seconds": seconds,
            "nonfinite": self.nonfinite,
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        }
        return shared, own

    def scale_rates_to(self, world_size: int) -> None:
        """Let the learning rate be for this many ranks."""
        scale_rates(self.optimizer, self.schedule, world_size / self.rate_ranks)
        self.rate_ranks = world_size

    def of_new_rank(self, iteration: int) -> dict[str, Any]:
        """Return what a rank that is new after ``iteration`` has of its own in place of a former rank's."""
        seed = batch_seed(torch.initial_seed(), iteration, 0)
        rng = torch.Generator().manual_seed(seed).get_state()
        return {"losses": [], "nonfinite": 0, "rng": rng, "cuda_rng": None}

    def what_is_wrong_with(self, shared: dict[str, Any], own: dict[str, Any]) -> str | None:
        """Return why (``shared``, ``own``) is not a ``snapshot`` of these parts; None if it is one."""
        replica = shared if self.strategy.replicated else own
        for part, kind, there in [
            *((name, dict, replica.get(name)) for name in ("parameters", "optimizer", "schedule")),
            *((name, dict, own.get(name)) for name in ("buffers", "strategy")),
            *(("losses", list, own.get("losses")), ("seconds", float, own.get("seconds"))),
            ("rng", torch.Tensor, own.get("rng")),
            ("means", list, shared.get("means")),
            ("rate_ranks", int, shared.get("rate_ranks")),
        ]:
            if not isinstance(there, kind):
                return f"its {part} must be a {kind.__name__}; got {type(there).__name__}"
        tensors = (
            ("parameters", dict(self.model.named_parameters()), replica["parameters"]),
            ("buffers", dict(self.model.named_buffers()), own["buffers"]),
        )
        for part, expected, found in tensors:
            if found.keys() != expected.keys():
                return f"its {part} are others than the model's"
            for name, tensor in expected.items():
                if not isinstance(found[name], torch.Tensor) or found[name].shape != tensor.shape:
                    return f"{name} must be of shape {tuple(tensor.shape)}"
        groups = replica["optimizer"].get("param_groups")
        if not isinstance(groups, list) or len(groups) != len(self.optimizer.param_groups):
            return "its optimizer has other groups of parameters"
        return None if all(isinstance(loss, float) for loss in own["losses"]) else "its losses must be numbers"

    def restore(
        self, shared: dict[str, Any], own: dict[str, Any], others: Sequence[dict[str, Any]] | None = None
    ) -> None:
        """Restore a ``snapshot``.

        With ``others``, it is of another number of ranks: these are the states of former ranks that this rank takes
        over besides ``own``; see ``OnPipeline.load_members``.

        Raises:
            CheckpointError: it is not a snapshot of these parts, although ``what_is_wrong_with`` found nothing.
        """
        try:
            self._restore(shared, own, others)
        except PipesgdError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as failure:
            reason = f"{type(failure).__name__}: {failure}"
            raise CheckpointError(
                f"a checkpoint must be of this run; got one that cannot be restored ({reason}). Nothing was deleted: "
                "move it away, or begin again with --overwrite"
            ) from failure

    def _restore(self, shared: dict[str, Any], own: dict[str, Any], others: Sequence[dict[str, Any]] | None) -> None:
        replica = shared if self.strategy.replicated else own
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(replica["parameters"][name])
            for name, buffer in self.model.named_buffers():
                buffer.copy_(own["buffers"][name])
        self.optimizer.load_state_dict(replica["optimizer"])
        self.schedule.load_state_dict(replica["schedule"])
        members = [own, *(others or ())]
        for member in members:
            for gradient, flats in zip(_in_flight(member["strategy"]), shared["means"], strict=True):
                gradient["flats"] = flats
        if others is None:
            self.strategy.load_state_dict(own["strategy"])
        else:
            cast(OnPipeline, self.strategy).load_members([member["strategy"] for member in members])
        self.rate_ranks = shared["rate_ranks"]
        self.losses.extend(own["losses"])
        self.seconds = own["seconds"]
        self.nonfinite = sum(member["nonfinite"] for member in members)
        torch.set_rng_state(own["rng"])
        if own["cuda_rng"] is not None:
            torch.cuda.set_rng_state(own["cuda_rng"])
