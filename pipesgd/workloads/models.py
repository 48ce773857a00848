"""The models by name: the paper's MLP, a small convolutional network, and ResNet-18.

Building one draws its weights from torch's global generator in a fixed order: the same
``torch.manual_seed`` gives the same weights.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pipesgd.checks import check_one_of
from pipesgd.config import MODELS
from pipesgd.errors import UserInputError


def build_model(
    name: str,
    *,
    sample_shape: tuple[int, int, int],
    num_classes: int,
    hidden_sizes: tuple[int, ...] = (500, 500),
) -> nn.Module:
    """A model from images, float32 (B, *sample_shape), to logits, float32 (B, num_classes).

    Args:
        name: one of ``MODELS``.
        sample_shape: channels, height and width in pixels of one image.
        num_classes: number of logits.
        hidden_sizes: units of each hidden layer of ``mlp`` (none: a linear model); the others have none.

    Raises:
        UserInputError: the name is unknown, a hidden size is below 1, or the images are too small.
    """
    check_one_of("model", name, MODELS)
    if name == "mlp":
        return _mlp(sample_shape, num_classes, hidden_sizes)
    if name == "convnet":
        return _convnet(sample_shape, num_classes)
    return _resnet18(sample_shape, num_classes)


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
    if min(height, width) < 4:
        raise UserInputError(f"images for convnet must be at least 4x4 pixels; got {height}x{width}")
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


def _resnet18(sample_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """The 18-layer residual network; 11,689,512 parameters for 1000 classes of 224x224 RGB images.

    Images of at most 64 pixels a side get the 3x3 stem of the paper's CIFAR networks, since the 7x7 stem
    and the pooling that follows it would shrink them by four before the first block.

    References:
        He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition", 2015, table 1 and section 4.2;
        shortcuts are option B. Initialised as He et al., "Delving Deep into Rectifiers", 2015, equation 14.
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
    """A convolution that pads to keep the size, without the bias that normalisation would undo."""
    conv = nn.Conv2d(inputs, outputs, kernel_size, stride, padding=kernel_size // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))
