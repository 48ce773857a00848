"""Trainings and links of the table."""

from __future__ import annotations

from dataclasses import dataclass

NODES, QUICK_NODES = 4, 2
ACCELERATOR, QUICK_ACCELERATOR, CORES = "75ms", "5ms", "cores"
"""Computers: an emulated accelerator on each node, by the time of its forward and backward pass, or the cores of
this machine for all nodes."""
PLACES = (("200mbit", ACCELERATOR), ("1gbit", ACCELERATOR), ("200mbit", CORES))
QUICK_PLACES = (("200mbit", QUICK_ACCELERATOR),)
"""Rates of the links, and what computes there. Cores that compute for all nodes and pass the packets of faster links,
too, would be measured instead of these."""


TIMED_LR = "0.0001"
"""Learning rate of timed iterations, which follow no schedule: one at which no way to train diverges."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model and its training. On an accelerator, which computes nothing, the trained model is timed as well."""

    words: str
    """Arguments of ``pipesgd.train`` but ``--model``, ``--lr`` and the length."""
    lr: str
    """Learning rate of the training, the peak of its schedule."""
    model: str
    iterations: int
    """Length of the training whose accuracy is compared."""

    @property
    def trained(self) -> str:
        """Arguments for the model itself."""
        return f"{self.words} --lr {self.lr} --model {self.model}"

    def timed(self, computes: str) -> str:
        """Return the arguments for the model on the cores, or on an emulated accelerator."""
        emulated = f"experiments.accelerators:synthetic={computes},model={self.model}"
        return f"{self.words} --lr {TIMED_LR} --model {self.model if computes == CORES else emulated}"


_IMAGES = "--dataset fashion-mnist --batch-size 32 --schedule one-cycle"
WORKLOADS = {
    "mlp": Workload(words=f"{_IMAGES} --hidden-sizes 1000 1000", lr="0.1", model="mlp", iterations=468),
    "convnet": Workload(words=_IMAGES, lr="0.1", model="convnet", iterations=468),
    "alexnet": Workload(words=_IMAGES, lr="0.02", model="alexnet", iterations=468),
    "transformer": Workload(
        words="--dataset python-stdlib --batch-size 8 --schedule one-cycle --optimizer adamw",
        lr="0.008",
        model="transformer",
        iterations=600,
    ),
}
"""The MLP has 1.8 M parameters, the convnet 0.86 M, AlexNet for images of 28 x 28 pixels 4.0 M; an epoch of
Fashion-MNIST on four ranks has 468 iterations."""
QUICK = {
    "digits": Workload(
        words="--dataset digits --batch-size 16 --schedule one-cycle --hidden-sizes 64",
        lr="0.1",
        model="mlp",
        iterations=20,
    )
}
