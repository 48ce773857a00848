"""Trainings and links of the table."""

from __future__ import annotations

from dataclasses import dataclass

NODES = 4
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
    lr: float
    """Learning rate of synchronous training, the peak of its schedule."""
    model: str
    iterations: int
    """Length of the training whose accuracy is compared."""

    def trained(self, share: float = 1.0) -> str:
        """Return the arguments for the model itself, at this share of the learning rate."""
        return f"{self.words} --lr {share * self.lr:g} --model {self.model}"

    def timed(self, computes: str) -> str:
        """Return the arguments for the model on the cores, or on an emulated accelerator."""
        emulated = f"experiments.accelerators:synthetic={computes},model={self.model}"
        return f"{self.words} --lr {TIMED_LR} --model {self.model if computes == CORES else emulated}"


_IMAGES = "--dataset experiments.systems.data:fashion_mnist --schedule one-cycle"
_TEXT = "--dataset experiments.systems.data:python_stdlib --schedule one-cycle"
WORKLOADS = {
    "mlp": Workload(words=f"{_IMAGES} --batch-size 32 --hidden-sizes 1000 1000", lr=0.1, model="mlp", iterations=468),
    "convnet": Workload(words=f"{_IMAGES} --batch-size 16", lr=0.1, model="convnet", iterations=468),
    "alexnet": Workload(words=f"{_IMAGES} --batch-size 16", lr=0.02, model="alexnet", iterations=234),
    "transformer": Workload(
        words=f"{_TEXT} --batch-size 8 --optimizer adamw", lr=0.008, model="transformer", iterations=300
    ),
}
"""The MLP has 1.8 M parameters, the convnet 0.86 M, AlexNet for images of 28 x 28 pixels 4.0 M, the transformer 0.47 M.
Trainings are short, since there are hundreds: a whole epoch of Fashion-MNIST on four ranks for the MLP, half of one for
the convnet, and a quarter for AlexNet."""
QUICK = {
    "digits": Workload(
        words="--dataset digits --batch-size 16 --schedule one-cycle --hidden-sizes 64",
        lr=0.1,
        model="mlp",
        iterations=20,
    )
}
