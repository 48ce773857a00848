"""The file of one rank's pipeline next to another framework's checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from _ranks import run_ranks
from _reference import pipe_sgd
from _small_problem import regress, small_problem

from pipesgd import LocalSteps, Pipelined
from pipesgd.errors import PipesgdError
from pipesgd.ranks import Ranks
from pipesgd.replicas import weights_sha256
from pipesgd.run.pipeline_file import PipelineFile
from pipesgd.sections import Updates, Windows
from pipesgd.strategy import Strategy


def _saves_and_loads(ranks: Ranks, folder: Path) -> dict[str, str]:
    model, batches = small_problem(0, [4, 3], 3, 1)
    file = PipelineFile(folder / "made" / "pipeline-", rank=0, world_size=1)
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
        loading("other save", lambda: file.load(pipeline, 2))
        file.path.write_bytes(file.path.read_bytes()[:-1])
        loading("damaged", lambda: file.load(pipeline, 3))
    file.remove()
    file.remove()
    found["left"] = str(list(file.path.parent.iterdir()))
    return found


@pytest.mark.slow
def test_a_pipeline_continues_from_its_file_and_from_no_other(tmp_path: Path) -> None:
    [found] = run_ranks(1, _saves_and_loads, tmp_path)
    must = "RunError: a checkpoint must have the pipeline of each rank; "
    path = tmp_path / "made" / "pipeline-0"
    assert found == {
        "missing": f"{must}{path} is not whole (pipeline-0 is missing)",
        "in flight": "2",
        "other save": f"RunError: a checkpoint and its pipelines must be of one save; {path} is of iteration 3, "
        "the checkpoint of 2",
        "damaged": f"{must}{path} is truncated or corrupt (its SHA-256 differs from the recorded one)",
        "left": "[]",
    }


def _trains_from(ranks: Ranks, folder: Path, iterations: range) -> tuple[list[float], list[str]]:
    """Train from the file of the first iteration, save the last one, and remove the files but those of that save."""
    model, batches = small_problem(0, [4, 3], 6, 3)
    file = PipelineFile(folder / "pipeline-", ranks.rank, ranks.world_size, f"{iterations.stop:08x}", ".pt")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Pipelined(model, optimizer, width=2, updates=Updates(prediction="none"), ranks=ranks) as pipeline:
        if iterations.start:
            model.load_state_dict(torch.load(folder / "model.pt"))
            replace(file, of_save=f"{iterations.start:08x}").load(pipeline, iterations.start)
        for number in iterations:
            regress(model, batches[number][ranks.rank]).backward()
            pipeline.step()
        file.save(pipeline)
        if ranks.rank == 0:
            torch.save(model.state_dict(), folder / "model.pt")
        ranks.all_gather_object("saved", None)
        file.remove_others()
    left = sorted(path.name for path in folder.iterdir()) if ranks.rank == 0 else []
    return torch.cat([parameter.flatten() for parameter in model.parameters()]).tolist(), left


@pytest.mark.slow
def test_another_number_of_ranks_continues_from_the_files_and_removes_those_that_it_has_taken_over(
    tmp_path: Path,
) -> None:
    for ranks, iterations in [(2, range(2)), (3, range(2, 4)), (1, range(4, 6))]:
        found = run_ranks(ranks, _trains_from, tmp_path, iterations)
    [(weights, left)] = found
    assert left == ["model.pt", "pipeline-0.pt.00000006", "pipeline-0.pt.00000006.sha256"]
    model, batches = small_problem(0, [4, 3], 6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for ranks, iterations in [(2, range(2)), (3, range(2, 4)), (1, range(4, 6))]:
        pipe_sgd(model, optimizer, regress, [batches[number][:ranks] for number in iterations], width=2)
    assert weights == pytest.approx(torch.cat([parameter.flatten() for parameter in model.parameters()]).tolist())


def _resume_with_numpy(ranks: Ranks, file: PipelineFile, local_steps: bool) -> bool:
    """Resume from a file and from a state that the loop saved itself, with learning rates of a schedule in NumPy."""
    hashes = []
    for resumed in ("file", "state", ""):
        model, batches = small_problem(0, [4, 3], 6, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, betas=(np.float64(0.5), np.float64(0.75)))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 * (1 + np.cos(step / 10)))
        pipeline: Strategy = Pipelined(model, optimizer, width=3, ranks=ranks)
        if local_steps:
            pipeline.close()
            pipeline = LocalSteps(
                model, optimizer, Windows(local_steps=2, outer_lr=np.float64(0.5)), width=2, ranks=ranks
            )
        with pipeline:
            for number, [batch] in enumerate(batches):
                if number == 3 and resumed == "file":
                    file.save(pipeline)
                    with pipeline.true_weights():
                        file.load(pipeline, 3)
                elif number == 3 and resumed:
                    torch.save(pipeline.state_dict(), file.path)
                    with pipeline.true_weights():
                        pipeline.load_state_dict(torch.load(file.path, weights_only=True))
                regress(model, batch).backward()
                pipeline.step()
                schedule.step()
        hashes.append(weights_sha256(model))
    return len(set(hashes)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("local_steps", [False, True])
def test_a_schedule_that_computes_with_numpy_leaves_a_state_that_can_be_loaded(
    local_steps: bool, tmp_path: Path
) -> None:
    assert run_ranks(1, _resume_with_numpy, PipelineFile(tmp_path / "pipeline-", 0, 1), local_steps) == [True]
