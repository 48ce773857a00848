"""Training that continues when ranks are lost, in a loop of your own; ``pipesgd.train --elastic`` has all of it.

Examples:
    A program that ``python -m pipesgd.launch --elastic`` starts, with ``batches`` of its own:

        ranks = pipesgd.elastic.join(least=2)
        with ranks, pipesgd.Pipelined(model, optimizer, ranks=ranks) as pipeline:
            for share in ranks.iterations(1000):
                loss_of(model, batches[share.slice]).backward()
                pipeline.step()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pipesgd.elastic.ranks import ElasticRanks


def join(
    *,
    least: int = 1,
    transport: Literal["tcp", "tls"] = "tcp",
    wait: float | None = None,
    silence: float | None = None,
    device: str = "cpu",
    secret_file: str | None = None,
) -> ElasticRanks:
    """Return the ranks of the job that this process was started in, of which some may be lost. Collective.

    They are the ``ranks`` of one ``Pipelined``, with the ring and a codec that sends every value. Losses are survived
    from the first of ``ElasticRanks.iterations`` on.

    Args:
        least: least number of ranks that train.
        transport: transport of the members' own connections, and of gradients, "tcp" or "tls".
        wait: seconds for which ranks without a majority wait for the others, by default 60.
        silence: seconds without a sign of life after which a rank is lost, by default 3, and at least that: more for a
            line that drops now and then.
        device: device of the parameters.
        secret_file: file with the secret of the job, by default that of the environment.

    Raises:
        UserInputError: the launcher's variables, the secret or an argument cannot be.
        CommunicationError: not every rank could be reached.
    """
    from pipesgd.process import follow_launcher

    follow_launcher()  # before anything that takes long

    import torch

    from pipesgd.checks import check_at_least, check_one_of
    from pipesgd.elastic.ranks import elastic
    from pipesgd.membership.peers import SILENT_SECONDS
    from pipesgd.membership.secret import job_secret
    from pipesgd.pipeline.sameness import check_same_settings
    from pipesgd.ranks import join as join_job

    check_at_least("least", least, 1)
    check_one_of("transport", transport, ("tcp", "tls"))
    if silence is not None:
        check_at_least("silence", silence, SILENT_SECONDS)
    ranks = join_job(job_secret(secret_file))
    check_same_settings(ranks, {"least": least, "transport": transport, "silence": silence}, {})
    return elastic(ranks, torch.device(device), transport=transport, least=least, wait=wait, silence=silence)
