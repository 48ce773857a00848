"""The file of one rank's pipeline next to another framework's checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from _ranks import run_ranks
from _small_problem import regress, small_problem

from pipesgd import Pipelined
from pipesgd.errors import PipesgdError
from pipesgd.ranks import Ranks
from pipesgd.run.pipeline_file import PipelineFile


def _saves_and_loads(ranks: Ranks, folder: Path) -> dict[str, str]:
    model, batches = small_problem(0, [4, 3], 3, 1)
    file = PipelineFile(folder / "made" / "pipeline", world_size=1)
    found = {}

    def loading(name: str, load: Callable[[], None]) -> None:
        try:
            load()
        except PipesgdError as error:
            found[name] = f"{type(error).__name__}: {error}"

    with Pipelined(model, torch.optim.SGD(model.parameters(), lr=0.1), width=2, ranks=ranks) as pipeline:
        for [batch] in batches:
            regress(model, batch).backward()
            pipeline.step()
        loading("missing", lambda: file.load(pipeline, 3))
        file.save(pipeline)
        with pipeline.true_weights():
            file.load(pipeline, 3)
        [gradient] = pipeline.state_dict()["in_flight"]
        found["in flight"] = str(gradient["iteration"])
        loading("other ranks", lambda: PipelineFile(file.stem, world_size=2).load(pipeline, 3))
        loading("other save", lambda: file.load(pipeline, 2))
        file.path.write_bytes(file.path.read_bytes()[:-1])
        loading("damaged", lambda: file.load(pipeline, 3))
    file.remove()
    file.remove()
    found["left"] = str(list(file.path.parent.iterdir()))
    return found


def test_a_pipeline_continues_from_its_file_and_from_no_other(tmp_path: Path) -> None:
    [found] = run_ranks(1, _saves_and_loads, tmp_path)
    must = "RunError: a checkpoint must have the pipeline of each rank; "
    path = tmp_path / "made" / "pipeline"
    assert found == {
        "missing": f"{must}{path} is not whole (pipeline is missing)",
        "in flight": "2",
        "other ranks": "UserInputError: the number of ranks must be that of the checkpoint, 1, to resume its "
        "pipeline; got 2",
        "other save": f"RunError: a checkpoint and its pipelines must be of one save; {path} is of iteration 3, "
        "the checkpoint of 2",
        "damaged": f"{must}{path} is truncated or corrupt (its SHA-256 differs from the recorded one)",
        "left": "[]",
    }
