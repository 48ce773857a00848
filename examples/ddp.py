"""A training program with torch's DistributedDataParallel, to compare with ddp_pipesgd.py."""

import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS = 4


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    train, test = TensorDataset(images[300:], labels[300:]), (images[:300], labels[:300])
    sampler = DistributedSampler(train, drop_last=True)
    batches = DataLoader(train, batch_size=16, sampler=sampler, drop_last=True)

    layers = torch.nn.Sequential(
        torch.nn.Linear(64, 1000),
        torch.nn.ReLU(),
        torch.nn.Linear(1000, 1000),
        torch.nn.ReLU(),
        torch.nn.Linear(1000, 10),
    )
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(EPOCHS):
        begin = time.perf_counter()
        sampler.set_epoch(epoch)
        for inputs, targets in batches:
            optimizer.zero_grad()
            cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        seconds = time.perf_counter() - begin
        model.eval()
        with torch.no_grad():
            accuracy = (model(test[0]).argmax(1) == test[1]).float().mean().item()
        model.train()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {seconds:.1f} s, accuracy {accuracy:.3f}")
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "digits.pt")
    dist.barrier()  # gloo may abort the program of a rank that ends while another one is still connected


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # once the model has gone: torch may hang if the group goes first
