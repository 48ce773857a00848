"""Exchange of a run's strategy while it runs: another width, codec or all-reduce, the same weights."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pipesgd.run.state import RunState
from pipesgd.strategy import Strategy


def swap_strategy(state: RunState, make: Callable[[], Strategy], *, same_codec: bool) -> bool:
    """Replace ``state.strategy`` by the one that ``make`` constructs on the same model and optimizer. Collective.

    Gradients in flight are applied first, so the new pipeline starts empty, from the weights that all ranks agree on.
    The new strategy takes over what the old one has learned: a codec's state only if the codec is the same, and a
    prediction's only if the prediction is. Buffers such as batch norm's statistics stay each rank's own: the
    constructor of a strategy would give every rank those of rank 0.

    Args:
        state: the run, whose strategy is closed and replaced.
        make: constructs the new strategy.
        same_codec: True if both strategies encode gradients with the same options.

    Returns:
        True if residuals of error feedback were dropped.

    Raises:
        CommunicationError: a rank was lost.
    """
    state.strategy.flush()
    kept = state.strategy.state_dict()
    state.strategy.close()
    buffers = [buffer.clone() for buffer in state.model.buffers()]
    state.strategy = make()
    with torch.no_grad():
        for buffer, own in zip(state.model.buffers(), buffers, strict=True):
            buffer.copy_(own)
    fresh = state.strategy.state_dict()
    if not same_codec:
        kept["exchange"], dropped = fresh["exchange"], bool(kept["exchange"].get("residuals"))
    if kept["prediction"].keys() != fresh["prediction"].keys():
        kept["prediction"] = fresh["prediction"]
    state.strategy.load_state_dict(kept)
    return not same_codec and dropped
