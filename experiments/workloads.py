"""Workloads of figures and validations, as arguments of ``pipesgd.train``."""

WORKLOADS = {
    "mlp": "--dataset fashion-mnist --model mlp --hidden-sizes 1000 1000 --batch-size 512",
    "convnet": "--dataset fashion-mnist --model convnet --batch-size 64",
    "transformer": "--dataset python-stdlib --model transformer --batch-size 8 "
    "--optimizer adamw --lr 0.008 --schedule one-cycle",
    "alexnet": "--dataset fashion-mnist --model alexnet --batch-size 32",
    "resnet18": "--dataset fashion-mnist --model resnet18 --batch-size 16",
    "digits": "--dataset digits --model mlp --hidden-sizes 64 --batch-size 16",
}
