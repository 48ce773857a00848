"""Exchange of a run's strategy while it runs: another width, codec, all-reduce or cut, the same weights."""

from __future__ import annotations

from collections.abc import Callable

from pipesgd.flat_buffer import rearranged
from pipesgd.pipeline.pipelined import Pipelined
from pipesgd.run.state import RunState
from pipesgd.strategy import StepReport


def swap_strategy(state: RunState, make: Callable[[Pipelined], Pipelined], *, same_codec: bool) -> StepReport:
    """Replace ``state.strategy`` by the one that ``make`` constructs on the same model and optimizer. Collective.

    Gradients in flight are applied first, so the new pipeline starts empty, from the weights that all ranks agree on.
    The new strategy takes over what the old one has learned: a prediction's state only if the prediction is the same.
    What another codec has left out of its sums is added to the next gradient.

    Args:
        state: the run, whose strategy is closed and replaced.
        make: constructs the new strategy as a successor of the old one, without giving all ranks rank 0's values
            (``init_sync=False``): weights are the same already, and buffers such as batch norm's statistics stay each
            rank's own.
        same_codec: True if both strategies encode gradients with the same options.

    Returns:
        report of the gradients that were in flight.

    Raises:
        CommunicationError: a rank was lost.
    """
    former = state.strategy
    assert isinstance(former, Pipelined)
    report = former.flush()
    kept = former.state_dict()
    pipeline = make(former)
    state.strategy = pipeline
    fresh = pipeline.state_dict()
    kept |= {name: fresh[name] for name in ("codec", "buckets")}
    residuals = kept["reducer"].get("residuals", [])
    if residuals:
        residuals = rearranged(residuals, former.whole_buckets, pipeline.whole_buckets)
    if not same_codec:
        kept["reducer"] = fresh["reducer"]
    elif residuals:
        kept["reducer"]["residuals"] = residuals
    pipeline.load_state_dict(kept)
    pipeline.add_to_next_gradient([] if same_codec else residuals)
    return report
