"""A training loop of your own with Pipe-SGD, which continues where it was stopped.

    torchrun --nproc-per-node 2 own_loop.py

Run it again after it was killed: it continues after the last epoch that all ranks have saved, and ends with the same
weights, bit for bit, as if nothing had happened.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from pipesgd import Pipelined

EPOCHS = 6
CHECKPOINTS = Path("checkpoints")


def main() -> None:
    torch.manual_seed(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    train, test = TensorDataset(images[300:], labels[300:]), (images[:300], labels[:300])
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(256, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=100, gamma=0.7)

    with Pipelined(model, optimizer, width=2, codec="int8") as pipeline:  # joins the ranks that torchrun has started
        sampler = DistributedSampler(train, drop_last=True)
        batches = DataLoader(train, batch_size=16, sampler=sampler, drop_last=True)
        torch.manual_seed(dist.get_rank())  # another dropout on every rank
        parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "pipeline": pipeline}
        done = newest_epoch()
        if done:
            load(done, parts)
        for epoch in range(done, EPOCHS):
            sampler.set_epoch(epoch)
            for inputs, targets in batches:
                cross_entropy(model(inputs), targets).backward()
                pipeline.step()
                schedule.step()
            model.eval()
            with torch.no_grad():
                accuracy = (model(test[0]).argmax(1) == test[1]).float().mean().item()
            model.train()
            save(epoch + 1, parts)
            if dist.get_rank() == 0:
                print(f"epoch {epoch}: accuracy {accuracy:.3f}", flush=True)
    if dist.get_rank() == 0:  # the end of the block has applied the last gradient
        torch.save(model.state_dict(), "digits.pt")
    dist.destroy_process_group()


def checkpoint(epochs: int) -> Path:
    """Return this rank's file: gradients in flight, what codecs left out and random numbers are those of one rank."""
    return CHECKPOINTS / f"rank-{dist.get_rank()}-epoch-{epochs}.pt"


def newest_epoch() -> int:
    """Return the number of epochs after which all ranks have saved; no rank is more than one ahead."""
    own = [epochs for epochs in range(1, EPOCHS + 1) if checkpoint(epochs).exists()]
    newest = torch.tensor(max(own, default=0))
    dist.all_reduce(newest, dist.ReduceOp.MIN)
    return int(newest)


def save(epochs: int, parts: dict[str, Any]) -> None:
    CHECKPOINTS.mkdir(exist_ok=True)
    path = checkpoint(epochs)
    states = {name: part.state_dict() for name, part in parts.items()}
    torch.save(states | {"random": torch.get_rng_state()}, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)  # so that a file is whole, or not there
    checkpoint(epochs - 2).unlink(missing_ok=True)


def load(epochs: int, parts: dict[str, Any]) -> None:
    states = torch.load(checkpoint(epochs))
    for name, part in parts.items():  # the pipeline last: it begins with the weights of the model
        part.load_state_dict(states[name])
    torch.set_rng_state(states["random"])


if __name__ == "__main__":
    main()
