"""A classifier trained by PyTorch Lightning with Pipe-SGD: torchrun --nproc-per-node 2 lightning_digits.py."""

import pytorch_lightning as pl
import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split

from pipesgd.lightning import PipesgdStrategy


class Digits(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        accuracy = (self.net(batch[0]).argmax(1) == batch[1]).float().mean()
        self.log("accuracy", accuracy, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def main() -> None:
    pl.seed_everything(0)
    digits = load_digits()
    samples = TensorDataset(torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target))
    train, test = random_split(samples, [0.8, 0.2])
    trainer = pl.Trainer(
        strategy=PipesgdStrategy(width=2, codec="int8"),
        accelerator="cpu",
        devices=2,
        max_epochs=4,
        gradient_clip_val=1.0,
        enable_progress_bar=False,
    )
    trainer.fit(Digits(), DataLoader(train, batch_size=16, shuffle=True), DataLoader(test, batch_size=64))
    if trainer.is_global_zero:
        print(f"accuracy {trainer.callback_metrics['accuracy']:.3f}")


if __name__ == "__main__":
    main()
