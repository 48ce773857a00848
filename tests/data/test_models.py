"""Models: the architectures' known parameter counts, shapes, and a fixed order of initialisation."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from pipesgd.config import IMAGE_MODELS, TEXT_MODELS
from pipesgd.data.models import build_model
from pipesgd.errors import UserInputError


def parameter_count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_mlp_of_the_paper_has_648010_parameters() -> None:
    model = build_model("mlp", sample_shape=(1, 28, 28), num_classes=10)
    assert parameter_count(model) == 784 * 500 + 500 + 500 * 500 + 500 + 500 * 10 + 10 == 648_010


def test_resnet18_has_the_published_parameter_count_and_shapes() -> None:
    model = build_model("resnet18", sample_shape=(3, 224, 224), num_classes=1000).eval()
    assert parameter_count(model) == 11_689_512
    shapes = []
    for module in model:
        module.register_forward_hook(lambda _, __, output: shapes.append(tuple(output.shape[1:])))
    with torch.no_grad():
        model(torch.zeros(1, 3, 224, 224))
    # The output sizes of table 1 in the paper.
    assert shapes[:3] == [(64, 112, 112), (64, 112, 112), (64, 56, 56)]
    stages = [(64, 56, 56), (128, 28, 28), (256, 14, 14), (512, 7, 7)]
    assert shapes[3:11] == [stage for stage in stages for _ in range(2)]


def test_resnet18_for_small_images_keeps_their_size_before_the_first_block() -> None:
    model = build_model("resnet18", sample_shape=(3, 32, 32), num_classes=100)
    stem = model[:3](torch.zeros(2, 3, 32, 32))
    assert stem.shape == (2, 64, 32, 32)
    by_size = {
        side: parameter_count(build_model("resnet18", sample_shape=(3, side, side), num_classes=10))
        for side in (64, 65)
    }
    assert by_size[65] - by_size[64] == 64 * 3 * (7 * 7 - 3 * 3)


def test_alexnet_has_the_published_parameter_count_and_shapes() -> None:
    model = build_model("alexnet", sample_shape=(3, 224, 224), num_classes=1000).eval()
    assert parameter_count(model) == 61_100_840
    assert [module.p for module in model.modules() if isinstance(module, nn.Dropout)] == [0.5, 0.5]
    shapes = []
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.MaxPool2d | nn.Linear):
            module.register_forward_hook(lambda _, __, output: shapes.append(tuple(output.shape[1:])))
    with torch.no_grad():
        assert model(torch.zeros(1, 3, 224, 224)).shape == (1, 1000)
        convolutions = [(64, 55, 55), (64, 27, 27), (192, 27, 27), (192, 13, 13), (384, 13, 13), (256, 13, 13)]
        assert shapes == [*convolutions, (256, 13, 13), (256, 6, 6), (4096,), (4096,), (1000,)]
        assert model(torch.zeros(1, 3, 64, 64)).shape == (1, 1000), "the smallest images that it takes"


def test_alexnet_for_small_images() -> None:
    sizes = {
        side: parameter_count(build_model("alexnet", sample_shape=(1, side, side), num_classes=10))
        for side in (28, 63, 64)
    }
    assert sizes[28] == 4_042_602
    assert sizes[63] - sizes[28] == 128 * 512 * (15**2 - 7**2)
    assert sizes[64] == 61_100_840 - 2 * 64 * 11**2 - 990 * 4097


def test_only_the_large_alexnet_drops_out_and_by_the_global_generator() -> None:
    for side, same in ((32, True), (64, False)):
        model = build_model("alexnet", sample_shape=(1, side, side), num_classes=10)
        images = torch.randn(2, 1, side, side)
        torch.manual_seed(1)
        first, second = model(images), model(images)
        assert torch.equal(first, second) == same
        torch.manual_seed(1)
        assert torch.equal(model(images), first)


def test_alexnet_has_the_variance_of_he_et_al_but_for_small_logits() -> None:
    torch.manual_seed(0)
    model = build_model("alexnet", sample_shape=(1, 28, 28), num_classes=10)
    *hidden, last = (module for module in model.modules() if isinstance(module, nn.Conv2d | nn.Linear))
    assert len(hidden) == 7
    for module in hidden:
        inputs = module.weight[0].numel()
        assert module.weight.std().item() == pytest.approx((2 / inputs) ** 0.5, rel=0.1)
    assert last.weight.std().item() == pytest.approx(0.01, rel=0.1)


def transformer(**sizes: int) -> nn.Module:
    return build_model("transformer", sample_shape=(16,), num_classes=256, **sizes)


def test_the_transformers_parameters_are_those_of_gpt_2() -> None:
    layers, embedding = 3, 24
    tables = 256 * embedding * 2 + 16 * embedding
    block = 12 * embedding**2 + 13 * embedding  # weights and biases, with those of two normalisations
    model = transformer(layers=layers, heads=4, embedding=embedding)
    assert parameter_count(model) == tables + layers * block + 2 * embedding
    assert parameter_count(transformer()) == 464_384


def test_the_transformer_sees_nothing_of_what_comes_later() -> None:
    torch.manual_seed(0)
    model = transformer().double()
    text = torch.randint(256, (5, 16))
    logits = model(text)
    assert logits.shape == (5, 16, 256)
    for place in (0, 7, 15):
        changed = text.clone()
        changed[:, place] = (changed[:, place] + 1) % 256
        differs = (model(changed) != logits).flatten(2).any(dim=2)
        assert not differs[:, :place].any()
        assert differs[:, place:].all()
    torch.testing.assert_close(model(text[:, :9]), logits[:, :9])


def test_the_transformer_knows_where_a_byte_stands() -> None:
    torch.manual_seed(0)
    logits = transformer()(torch.full((1, 16), 97))
    assert all(not torch.equal(logits[0, 0], logits[0, place]) for place in range(1, 16))


def test_the_transformer_begins_close_to_knowing_nothing() -> None:
    torch.manual_seed(0)
    text = torch.randint(256, (8, 17))
    logits = transformer(layers=6)(text[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, -2), text[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(256), abs=0.05)
    loss.backward()


def test_every_parameter_of_the_transformer_gets_a_gradient() -> None:
    torch.manual_seed(0)
    model = transformer()
    text = torch.randint(256, (8, 17))
    nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, -2), text[:, 1:].flatten()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("name", IMAGE_MODELS)
@pytest.mark.parametrize("sample_shape", [(1, 8, 8), (1, 28, 28), (3, 32, 32), (2, 30, 21)])
def test_every_parameter_gets_a_gradient(name: str, sample_shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    model = build_model(name, sample_shape=sample_shape, num_classes=7)
    logits = model(torch.randn(4, *sample_shape))
    assert logits.shape == (4, 7)
    nn.functional.cross_entropy(logits, torch.arange(4)).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("name", [*IMAGE_MODELS, *TEXT_MODELS])
def test_the_seed_alone_decides_the_weights(name: str) -> None:
    def weights(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        shape = (3, 32, 32) if name in IMAGE_MODELS else (16,)
        model = build_model(name, sample_shape=shape, num_classes=10)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_resnet18_convolutions_have_the_variance_of_he_et_al() -> None:
    torch.manual_seed(0)
    model = build_model("resnet18", sample_shape=(3, 224, 224), num_classes=1000)
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert len(convolutions) == 17 + 3  # and the linear layer makes 18, projections not counted
    for conv in convolutions:
        expected_std = (2 / (conv.out_channels * conv.kernel_size[0] ** 2)) ** 0.5
        assert conv.weight.std().item() == pytest.approx(expected_std, rel=0.05)


@pytest.mark.parametrize(
    ("name", "sample_shape", "hidden_sizes", "message"),
    [
        (
            "restnet18",
            (3, 32, 32),
            (500,),
            r"^model must be one of mlp, .*, module:function; got 'restnet18' \(did you mean resnet18\?\)$",
        ),
        ("vit", (3, 32, 32), (500,), r"^model must be one of .*; got 'vit'$"),
        ("alexnet", (1, 28, 3), (500,), r"^images for alexnet must be at least 4x4 pixels; got 28x3$"),
        (
            "transformer",
            (3, 32, 32),
            (500,),
            r"^model must be one of mlp, convnet, resnet18, alexnet for images; got transformer, which is for text "
            r"\(--dataset python-stdlib or text:PATH\)$",
        ),
        *(
            (
                name,
                (64,),
                (500,),
                f"^model must be transformer for text; got {name}, which is for images "
                r"\(--dataset one of digits, mnist, fashion-mnist, cifar100, images\)$",
            )
            for name in IMAGE_MODELS
        ),
        ("convnet", (1, 28, 3), (500,), r"^images for convnet must be at least 4x4 pixels; got 28x3$"),
        ("mlp", (1, 28, 28), (500, 0), r"^hidden sizes must all be at least 1; got \(500, 0\)$"),
    ],
)
def test_bad_input_is_named(
    name: str, sample_shape: tuple[int, ...], hidden_sizes: tuple[int, ...], message: str
) -> None:
    with pytest.raises(UserInputError, match=message):
        build_model(name, sample_shape=sample_shape, num_classes=10, hidden_sizes=hidden_sizes)
