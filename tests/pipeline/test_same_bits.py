"""Ranks whose processors compute different bits are refused."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _ranks import run_ranks
from _sections import sections
from torch import nn

from pipesgd import Pipelined
from pipesgd.errors import DisagreementError
from pipesgd.optim.clipping import Clipping
from pipesgd.optim.muon import MuonWithAdamW
from pipesgd.pipeline import sameness
from pipesgd.pipeline.sameness import _common_capability, bits_of_updates, check_same_bits
from pipesgd.ranks import Ranks
from pipesgd.replicas import weights_sha256
from pipesgd.sections import Updates

pytestmark = pytest.mark.slow


class NoCopy(torch.optim.SGD):
    def __deepcopy__(self, memo: dict[int, Any]) -> NoCopy:
        raise TypeError("one of a kind")


def _start(ranks: Ranks) -> list[str]:
    """Return the instruction set of this rank, and the refusal."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 30), nn.Linear(30, 7))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    with pytest.raises(DisagreementError) as refused:
        Pipelined(model, optimizer, ranks=ranks)
    return [torch.backends.cpu.get_cpu_capability(), str(refused.value)]


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="needs a processor with AVX2"
)
def test_other_instruction_sets_are_refused_with_the_remedy(tmp_path: Path) -> None:
    """torch chooses instructions once per process, so these ranks are processes of their own."""
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(tmp_path / "store")],
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join(sys.path)}
            | ({"ATEN_CPU_CAPABILITY": "default"} if rank else {}),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    here, there = (json.loads(rank.communicate(timeout=120)[0]) for rank in ranks)
    assert (here[0], there[0]) == (torch.backends.cpu.get_cpu_capability(), "DEFAULT")
    assert here[1] == there[1]
    assert here[1] == (
        f"processors must compute the same bits on all ranks; got x86_64 {here[0]} on rank 0, x86_64 DEFAULT on rank 1:"
        " set ATEN_CPU_CAPABILITY=default on all ranks"
    )


class Noisy(torch.optim.SGD):
    """Stochastic gradient Langevin dynamics with random numbers of torch's own generator."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad += torch.randn_like(parameter)
        super().step()


def _start_with_noise(ranks: Ranks) -> list[str]:
    """Return what is said of noise that differs between the ranks, and of noise that does not."""
    model = nn.Linear(3, 2)
    found = []
    for seed in (ranks.rank, 7):
        torch.manual_seed(seed)
        try:
            Pipelined(model, Noisy(model.parameters(), lr=0.1), ranks=ranks, updates=Updates(prediction="none")).close()
        except DisagreementError as error:
            found.append(str(error))
    return found


def test_an_optimizer_that_draws_random_numbers_is_not_taken_for_another_processor() -> None:
    """It was told that its processors have nothing in common."""
    kind = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    said = (
        f"updates by Noisy must have the same bits on all ranks; got others, although all processors are {kind}: let "
        "it draw the same random numbers on all ranks, if it draws any, or else install the same version of torch"
    )
    assert run_ranks(2, _start_with_noise) == [[said]] * 2


def _of_other_machines(ranks: Ranks) -> str:
    """Return what is said to ranks on different machines."""
    parameters = [nn.Parameter(torch.zeros(2))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(platform, "machine", lambda: ("x86_64", "aarch64")[ranks.rank])
        patch.setattr(sameness, "bits_of_updates", lambda *_: f"bits of rank {ranks.rank}")
        with pytest.raises(DisagreementError) as refused:
            check_same_bits(ranks, torch.optim.SGD(parameters), Clipping())
        return str(refused.value)


def test_machines_without_instructions_in_common_are_told_so() -> None:
    for said in run_ranks(2, _of_other_machines):
        assert said.endswith("they have no ATEN_CPU_CAPABILITY in common")


def _start_with_other_threads(ranks: Ranks) -> dict[str, str]:
    """Return what is refused with one thread on rank 0 and two on rank 1."""
    torch.set_num_threads(1 + ranks.rank)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 2))
    parameters = list(model.parameters())
    kinds: dict[str, tuple[torch.optim.Optimizer, dict[str, Any]]] = {
        "sgd": (torch.optim.SGD(parameters, lr=0.1), {"clip_norm": 1.0}),
        "powersgd": (torch.optim.SGD(parameters, lr=0.1), {"codec": "powersgd"}),
        "muon": (MuonWithAdamW(parameters[:1], parameters[1:], lr=0.1), {}),
        "adafactor": (torch.optim.Adafactor(parameters), {}),
        "own": (NoCopy(parameters, lr=0.1), {}),
    }
    found = {}
    for name, (optimizer, options) in kinds.items():
        try:
            with Pipelined(model, optimizer, ranks=ranks, **sections(prediction="none", **options)):
                found[name] = "accepted"
        except DisagreementError as error:
            found[name] = str(error)
    return found


def test_ranks_that_multiply_the_same_matrices_must_have_the_same_number_of_threads() -> None:
    """Replicas used to drift apart silently."""

    def refused(what: str) -> str:
        threads = f"number of torch's threads with {what} must be the same on all ranks; got 1 on rank 0, 2 on rank 1"
        return f"{threads}: set OMP_NUM_THREADS"

    expected = {
        "sgd": "accepted",
        "powersgd": refused("codec powersgd"),
        "muon": refused("MuonWithAdamW"),
        "adafactor": refused("Adafactor"),
        "own": refused("NoCopy"),
    }
    assert run_ranks(2, _start_with_other_threads) == [expected] * 2


def _several(ps: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    at_zero = torch.tensor(0.0)  # the rate at the start of a warm-up
    return [
        torch.optim.SGD([{"params": ps[:1]}, {"params": ps[1:]}], lr=at_zero, momentum=0.9),
        torch.optim.AdamW(ps, lr=0.0, foreach=True),
        torch.optim.Adagrad(ps, lr=0.0),
        MuonWithAdamW(ps[2:3], [*ps[:2], *ps[3:]], lr=0.1),
        NoCopy(ps, lr=0.1),
    ]


def test_a_trial_leaves_model_and_optimizer_as_they_are_and_can_be_repeated() -> None:
    model = nn.Sequential(nn.Conv2d(3, 50, 3), nn.Linear(40, 40), nn.Linear(40, 40))
    before = weights_sha256(model)
    seen = set()
    for optimizer in _several(list(model.parameters())):
        state = str(optimizer.state_dict())
        bits = bits_of_updates(optimizer, Clipping(norm=1.0))
        assert bits == bits_of_updates(optimizer, Clipping(norm=1.0)) != bits_of_updates(optimizer, Clipping())
        assert str(optimizer.state_dict()) == state
        seen.add(bits)
    assert len(seen) == 5, "each is of its kind"
    assert weights_sha256(model) == before
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("found", "common"),
    [
        ([("x86_64", "AVX512"), ("x86_64", "AVX2")], "avx2"),
        ([("x86_64", "AVX2"), ("x86_64", "DEFAULT")], "default"),
        ([("x86_64", "AVX2"), ("aarch64", "DEFAULT")], None),
        ([("x86_64", "AVX2"), ("x86_64", "AVX2")], None),
        ([("x86_64", "NVIDIA A"), ("x86_64", "NVIDIA B")], None),
    ],
)
def test_the_remedy_is_the_instruction_set_that_all_have(found: list[tuple[str, str]], common: str | None) -> None:
    assert _common_capability(found) == common


if __name__ == "__main__":
    rank, store = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    one = Ranks(rank=rank, world_size=2, store=dist.FileStore(store, 2))
    one.start_process_group("cpu", 60.0)
    print(json.dumps(_start(one)))
    one.leave()
