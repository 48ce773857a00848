"""Data-parallel convolutions and split linear layers: "One weird trick" (Krizhevsky, 2014), by a plan of layers.

    torchrun --nproc-per-node 2 weird_trick.py

The ranks are one island. Each has digits of its own in the convolutions, and passes them to the linear layers, which
all ranks compute together, by the scheme in weird_trick.toml. Linear layers are updated after every pass.
"""

from collections import OrderedDict
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import Conv2d, Flatten, Linear, MaxPool2d, ReLU, Sequential
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from pipesgd import Pipelined
from pipesgd.systems.layers.splitting import split_layers

EPOCHS = 3
PLAN = Path(__file__).with_suffix(".toml")


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.images[:, None] / 16, dtype=torch.float32), torch.tensor(digits.target)
    train, test = TensorDataset(images[300:], labels[300:]), (images[:300], labels[:300])
    features = Sequential(Conv2d(1, 16, 3, padding=1), ReLU(), MaxPool2d(2), Flatten())
    classifier = Sequential(Linear(16 * 4 * 4, 128), ReLU(), Linear(128, 128), ReLU(), Linear(128, 10))
    model = Sequential(OrderedDict(features=features, classifier=classifier))

    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("islands", "inside"))
    passes = split_layers(model, mesh["inside"], PLAN)
    below_optimizer = torch.optim.SGD(features.parameters(), lr=0.05, momentum=0.9)
    split_optimizer = torch.optim.SGD(classifier.parameters(), lr=0.05, momentum=0.9)
    sampler = DistributedSampler(train, drop_last=True)
    batches = DataLoader(train, batch_size=16, sampler=sampler, drop_last=True)
    with (
        Pipelined(features, below_optimizer) as below,  # over all ranks
        Pipelined(classifier, split_optimizer, mesh=mesh) as split,  # between islands
    ):
        for epoch in range(EPOCHS):
            sampler.set_epoch(epoch)
            for inputs, targets in batches:
                samples = passes(features(inputs), targets)
                for number, (activations, own) in enumerate(samples, start=1):
                    loss = cross_entropy(classifier(activations), own)
                    (loss / passes.update_period).backward()
                    if number % passes.update_period == 0:
                        split.step()
                below.step()
            model.eval()
            with torch.no_grad():  # all ranks evaluate the same digits together
                accuracy = (model(test[0]).argmax(1) == test[1]).float().mean().item()
            model.train()
            if dist.get_rank() == 0:
                print(f"epoch {epoch}: accuracy {accuracy:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
