"""Exchange of a run's strategy while it runs: another width, codec or all-reduce, the same weights."""

from __future__ import annotations

from collections.abc import Callable

from pipesgd.pipeline.pipelined import Pipelined
from pipesgd.run.state import RunState


def swap_strategy(state: RunState, make: Callable[[], Pipelined], *, same_codec: bool) -> None:
    """Replace ``state.strategy`` by the one that ``make`` constructs on the same model and optimizer. Collective.

    Gradients in flight are applied first, so the new pipeline starts empty, from the weights that all ranks agree on.
    The new strategy takes over what the old one has learned: a prediction's state only if the prediction is the same.
    What another codec has left out of its sums is added to the next gradient.

    Args:
        state: the run, whose strategy is closed and replaced.
        make: constructs the new strategy, without giving all ranks rank 0's values (``init_sync=False``): weights are
            the same already, and buffers such as batch norm's statistics stay each rank's own.
        same_codec: True if both strategies encode gradients with the same options.

    Raises:
        CommunicationError: a rank was lost.
    """
    state.strategy.flush()
    kept = state.strategy.state_dict()
    state.strategy.close()
    pipeline = make()
    state.strategy = pipeline
    fresh = pipeline.state_dict()
    left_out = [] if same_codec else kept["exchange"].get("residuals", [])
    if not same_codec:
        kept["exchange"] = fresh["exchange"]
    if kept["prediction"].keys() != fresh["prediction"].keys():
        kept["prediction"] = fresh["prediction"]
    pipeline.load_state_dict(kept)
    pipeline.add_to_next_gradient(left_out)
