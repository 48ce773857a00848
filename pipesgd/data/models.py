"""Models by name: the paper's MLP, convolutional networks, and a transformer for text.

Building a model draws its weights from torch's global generator in a fixed order: the same ``torch.manual_seed`` gives
the same weights.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pipesgd.checks import one_of
from pipesgd.config import IMAGE_DATASETS, IMAGE_MODELS, MODELS, TEXT_MODELS, TEXTS
from pipesgd.errors import UserInputError
from pipesgd.functions import OWN, Function, call, check_function, function_of, kind


def build_model(
    name: str,
    *,
    sample_shape: tuple[int, ...] | None,
    num_classes: int | None,
    hidden_sizes: tuple[int, ...] = (500, 500),
    layers: int = 2,
    heads: int = 4,
    embedding: int = 128,
    seed: int = 0,
    rank: int = 0,
    world_size: int = 1,
) -> nn.Module:
    """Build a model from images, float32 (B, *sample_shape), to logits, float32 (B, num_classes).

    ``transformer`` maps bytes, int64 (B, T), to logits of the byte after each, float32 (B, T, num_classes).

    Args:
        name: one of ``MODELS``; with ``module:function`` a function that returns a ``torch.nn.Module``, whose
            parameters are among those below.
        sample_shape: channels, height and width in pixels of one image; or the bytes in one sample of text; None if it
            is not known.
        num_classes: number of logits; None if it is not known.
        hidden_sizes: units of each hidden layer of ``mlp`` (none: a linear model); the others have none.
        layers: number of blocks of ``transformer``.
        heads: attention heads in each block.
        embedding: numbers by which ``transformer`` represents a byte, a multiple of ``heads``.
        seed: seed of the training.
        rank: number of this rank; the model must be the same on all ranks.
        world_size: number of ranks.

    Raises:
        UserInputError: the name is unknown, the model is for another kind of data, a hidden size is below 1,
            or the images are too small; or the function cannot be found or called, fails, or returns something else.
    """
    check_function("model", name, kind(name), MODELS)
    function = model_function(name)
    if kind(name) != OWN and sample_shape is not None:
        _check_kind(name, sample_shape)
    offered = {
        "sample_shape": sample_shape,
        "num_classes": num_classes,
        "hidden_sizes": hidden_sizes,
        "layers": layers,
        "heads": heads,
        "embedding": embedding,
        "seed": seed,
        "rank": rank,
        "world_size": world_size,
    }
    model = call("model", name, function, offered)
    if not isinstance(model, nn.Module):
        raise UserInputError(
            f"model must be made by a function that returns a torch.nn.Module; got {type(model).__name__} from {name}"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserInputError(f"model must have a parameter to train; got none from {name}")
    return model


def model_function(name: str) -> Function:
    """Return the function that builds the model ``name``.

    Raises:
        UserInputError: it cannot be imported.
    """
    return function_of("model", name, BUILT_IN)


def _check_kind(name: str, sample_shape: tuple[int, ...]) -> None:
    images, text = ("images", IMAGE_MODELS, IMAGE_DATASETS), ("text", TEXT_MODELS, TEXTS)
    (of_data, models, _), (other, _, datasets) = (text, images) if len(sample_shape) == 1 else (images, text)
    if name not in models:
        raise UserInputError(
            f"model must be {one_of(models)} for {of_data}; "
            f"got {name}, which is for {other} (--dataset {one_of(datasets)})"
        )


def _transformer(sample_shape: tuple[int, ...], num_classes: int, layers: int, heads: int, embedding: int) -> nn.Module:
    from pipesgd.data.transformer import Transformer

    return Transformer(vocabulary=num_classes, context=sample_shape[0], layers=layers, heads=heads, embedding=embedding)


def _mlp(sample_shape: tuple[int, int, int], num_classes: int, hidden_sizes: tuple[int, ...]) -> nn.Module:
    if any(size < 1 for size in hidden_sizes):
        raise UserInputError(f"hidden sizes must all be at least 1; got {hidden_sizes}")
    channels, height, width = sample_shape
    layers: list[nn.Module] = [nn.Flatten()]
    inputs = channels * height * width
    for size in hidden_sizes:
        layers += [nn.Linear(inputs, size), nn.ReLU()]
        inputs = size
    return nn.Sequential(*layers, nn.Linear(inputs, num_classes))


def _convnet(sample_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    channels, height, width = sample_shape
    _check_at_least_4x4("convnet", height, width)
    return nn.Sequential(
        nn.Conv2d(channels, 32, kernel_size=5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, kernel_size=5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * (height // 4) * (width // 4), 256),
        nn.ReLU(),
        nn.Linear(256, num_classes),
    )


def _check_at_least_4x4(name: str, height: int, width: int) -> None:
    if min(height, width) < 4:
        raise UserInputError(f"images for {name} must be at least 4x4 pixels; got {height}x{width}")


def _alexnet(sample_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """Build AlexNet's five convolutions and three linear layers, in one of two sizes.

    Images of at least 64x64 pixels get torchvision's layers, with dropout, which every rank draws from its own global
    generator: 61,100,840 parameters for 1000 classes of RGB images of any such size. Smaller ones get 3x3 convolutions
    with half as many channels, two poolings instead of a stride and three, linear layers of 512, and no dropout:
    4,042,602 parameters for 10 classes of 28x28 grey images. In both, most are in the first linear layer.

    References:
        Krizhevsky, Sutskever, Hinton, "ImageNet Classification with Deep Convolutional Neural Networks", 2012; and
        Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014, for one column.
        Weights are initialised as in He et al., "Delving Deep into Rectifiers", 2015, equation 10, but the last layer's
        have the first paper's standard deviation. (With torch's own choice it learns nothing for 50 iterations.)
    """
    channels, height, width = sample_shape
    _check_at_least_4x4("alexnet", height, width)
    if min(height, width) >= 64:
        hidden, output = _large_alexnet(channels), nn.Linear(4096, num_classes)
    else:
        hidden, output = _small_alexnet(channels, height, width), nn.Linear(512, num_classes)
    for module in hidden:
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    # On Fashion-MNIST, training diverges at a learning rate of 0.02 if logits are as large as other layers' outputs.
    nn.init.normal_(output.weight, std=0.01)
    return nn.Sequential(hidden, output)


def _large_alexnet(channels: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(channels, 64, 11, stride=4, padding=2), nn.ReLU(), nn.MaxPool2d(3, stride=2)),
        *(nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, stride=2)),
        *(nn.Conv2d(192, 384, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(384, 256, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, stride=2)),
        *(nn.AdaptiveAvgPool2d(6), nn.Flatten()),
        *(nn.Dropout(), nn.Linear(256 * 6 * 6, 4096), nn.ReLU()),
        *(nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU()),
    )


def _small_alexnet(channels: int, height: int, width: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(channels, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 96, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(96, 192, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(192, 128, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(128, 128, 3, padding=1), nn.ReLU()),
        nn.Flatten(),
        *(nn.Linear(128 * (height // 4) * (width // 4), 512), nn.ReLU()),
        *(nn.Linear(512, 512), nn.ReLU()),
    )


def _resnet18(sample_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """Build the 18-layer residual network; 11,689,512 parameters for 1000 classes of 224x224 RGB images.

    Images of at most 64 pixels a side get the 3x3 stem of the paper's CIFAR networks, since the 7x7 stem
    and the pooling that follows it would shrink them by four before the first block.

    References:
        He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition", 2015, table 1 and section 4.2; shortcuts
        are option B. Weights are initialised as in He et al., "Delving Deep into Rectifiers", 2015, equation 14.
    """
    channels, height, width = sample_shape
    large = max(height, width) > 64
    model = nn.Sequential(
        _conv_bn(channels, 64, kernel_size=7 if large else 3, stride=2 if large else 1),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2, padding=1) if large else nn.Identity(),
        *(_BasicBlock(64, 64, stride=1), _BasicBlock(64, 64, stride=1)),
        *(_BasicBlock(64, 128, stride=2), _BasicBlock(128, 128, stride=1)),
        *(_BasicBlock(128, 256, stride=2), _BasicBlock(256, 256, stride=1)),
        *(_BasicBlock(256, 512, stride=2), _BasicBlock(512, 512, stride=1)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512, num_classes),
    )
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


BUILT_IN: dict[str, Function] = {
    "mlp": _mlp,
    "convnet": _convnet,
    "resnet18": _resnet18,
    "alexnet": _alexnet,
    "transformer": _transformer,
}
"""Functions that build a model, by name."""


class _BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut: (B, inputs, H, W) to (B, outputs, H/stride, W/stride)."""

    def __init__(self, inputs: int, outputs: int, *, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            _conv_bn(inputs, outputs, kernel_size=3, stride=stride),
            nn.ReLU(),
            _conv_bn(outputs, outputs, kernel_size=3, stride=1),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = _conv_bn(inputs, outputs, kernel_size=1, stride=stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.residual(x) + self.shortcut(x))


def _conv_bn(inputs: int, outputs: int, *, kernel_size: int, stride: int) -> nn.Module:
    """Return a convolution that pads to keep the size, without the bias that the normalisation after it would undo."""
    conv = nn.Conv2d(inputs, outputs, kernel_size, stride, padding=kernel_size // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))
