"""A loop of Hugging Face Accelerate with Pipe-SGD: torchrun --nproc-per-node 2 accelerate_loop.py."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import pipesgd.accelerate

EPOCHS = 4


def main() -> None:
    accelerator = Accelerator(cpu=True)
    set_seed(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    train, test = TensorDataset(images[300:], labels[300:]), (images[:300], labels[:300])
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    batches = DataLoader(train, batch_size=16, shuffle=True)

    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    pipeline = pipesgd.accelerate.attach(
        accelerator, model, optimizer, width=2, codec="int8", updates=pipesgd.Updates(clip_norm=1.0)
    )
    for epoch in range(EPOCHS):
        for inputs, targets in batches:
            optimizer.zero_grad()
            accelerator.backward(cross_entropy(model(inputs), targets))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        model.eval()
        with torch.no_grad():
            accuracy = (model(test[0]).argmax(1) == test[1]).float().mean().item()
        model.train()
        accelerator.print(f"epoch {epoch}: accuracy {accuracy:.3f}")
        accelerator.save_state(f"digits/{epoch}")  # a folder of its own: a kill leaves no mixture of two states
    pipeline.close()
    accelerator.end_training()


if __name__ == "__main__":
    main()
