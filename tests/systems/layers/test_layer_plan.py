"""Plans of layers to split: what a file may say, and the line that names layer and rule where it does not fit."""

from __future__ import annotations

import re
from collections import OrderedDict
from pathlib import Path

import pytest
from conftest import REPOSITORY
from torch import nn

from pipesgd import UserInputError
from pipesgd.systems.layers.plan import LayerPlan, SplitLayer, number_of_passes, read_plan, rows_of_passes


def network() -> nn.Module:
    """Return layers of every kind; the last two have the same weights."""
    tied = nn.Linear(4, 8, bias=False)
    blocks = [nn.Sequential(OrderedDict(up=nn.Linear(4, 6), down=nn.Linear(6, 4))) for _ in range(2)]
    layers: list[tuple[str, nn.Module]] = [
        ("conv", nn.Conv2d(3, 64, 3)),
        ("towers", nn.Conv2d(64, 64, 3, groups=4)),
        ("odd", nn.Linear(6, 5)),
        ("blocks", nn.Sequential(*blocks)),
        ("norm", nn.LayerNorm(4)),
        ("cost", nn.CrossEntropyLoss()),
        ("embedding", nn.Embedding(8, 4)),
        ("head", tied),
    ]
    model = nn.Sequential(OrderedDict(layers))
    model.get_submodule("embedding").weight = tied.weight
    return model


def read(folder: Path, text: str, members: int = 2) -> LayerPlan:
    path = folder / "layers.toml"
    path.write_text(text, encoding="utf-8")
    return read_plan(path, network(), members)


def test_a_plan_names_layers_styles_forms_and_the_order_of_devices(tmp_path: Path) -> None:
    text = """
        devices = [1, 0]
        layers.blocks."*".down = {style = "rowwise"}
        layers."blocks.*.up" = {style = "colwise", input = "sequence"}
        [layers.conv]
        style = "split-filters"
        output = "split"
        [layers.towers]
        style = "split-filters"
        input = "split"
    """
    assert read(tmp_path, text) == LayerPlan(
        (1, 0),
        (
            SplitLayer("conv", "split-filters", "whole", "split"),
            SplitLayer("towers", "split-filters", "split", "whole"),
            SplitLayer("blocks.0.up", "colwise", "sequence", "split"),
            SplitLayer("blocks.0.down", "rowwise", "split", "whole"),
            SplitLayer("blocks.1.up", "colwise", "sequence", "split"),
            SplitLayer("blocks.1.down", "rowwise", "split", "whole"),
        ),
    )


CONV = 'layers.conv.style = "split-filters"\n'

REFUSED = {
    "key": (
        'layer.conv.style = "colwise"',
        "every key in {} must be one of layers, devices, scheme, update_period; got 'layer' (did you mean layers?)",
    ),
    "nothing": ("devices = [0, 1]", 'plan must name layers, each as [layers."NAME"]; got none in {}'),
    "no table": ("layers = 3", 'plan must name layers, each as [layers."NAME"]; got none in {}'),
    "module": (
        'layers.conf.style = "split-filters"',
        "layer conf must be a module of the model; got no module of this name (did you mean conv?)",
    ),
    "pattern": (
        'layers."*.up".style = "colwise"',
        "layer *.up must be a module of the model; got no module of this name",
    ),
    "any name": (
        'layers."*".style = "colwise"',
        "layer conv must be Linear or Embedding for style colwise; got Conv2d (its style may be split-filters)",
    ),
    "no name": ('layers.conv = "split-filters"', 'plan must name layers, each as [layers."NAME"]; got conv in {}'),
    "between": (
        'layers.towers = {style = "split-filters", output = "split"}\nlayers."blocks.0.down".style = "rowwise"',
        "layer odd must be in the plan, or follow a layer whose output is whole, since it has weights; got output "
        "split of layer towers",
    ),
    "again": (CONV + 'layers."con*".style = "split-filters"', "layer conv must be named once; got it again by con*"),
    "field": (
        CONV + 'layers.conv.ouput = "split"',
        "every key of layer conv must be one of style, input, output; got 'ouput' (did you mean output?)",
    ),
    "no style": (
        'layers.conv.output = "split"',
        "layer conv must have a style, one of colwise, rowwise, sequence, split-filters; got none",
    ),
    "style": (
        'layers.conv.style = "split-filter"',
        "style of layer conv must be one of colwise, rowwise, sequence, split-filters; got 'split-filter' (did you "
        "mean split-filters?)",
    ),
    "kind": (
        'layers.conv.style = "colwise"',
        "layer conv must be Linear or Embedding for style colwise; got Conv2d (its style may be split-filters)",
    ),
    "container": (
        'layers.blocks.style = "split-filters"',
        "layer blocks must be one of Conv1d, Conv2d, Conv3d for style split-filters; got Sequential",
    ),
    "cost": (
        'layers.cost.style = "rowwise"',
        "layer cost must not be split, since it is a cost layer (CrossEntropyLoss); got style rowwise (without one, "
        "every member computes the cost)",
    ),
    "input": (
        'layers.norm = {style = "sequence", input = "whole"}',
        "input of layer norm in style sequence must be sequence; got 'whole'",
    ),
    "output": (
        'layers."blocks.0.up" = {style = "colwise", output = "splitt"}',
        "output of layer blocks.0.up in style colwise must be split or whole; got 'splitt' (did you mean split?)",
    ),
    "last": (
        CONV + 'layers."blocks.0.up".style = "colwise"',
        "output of layer blocks.0.up must be whole where no layer of the plan follows, since a cost needs whole "
        "outputs; got split",
    ),
    "odd": (
        'layers.odd = {style = "colwise", output = "whole"}',
        "out_features of layer odd must be a multiple of the 2 members of an island; got 5",
    ),
    "tied": (
        'layers.head = {style = "colwise", output = "whole"}',
        "layer head must have weights of its own; got weight, which layer embedding has, too",
    ),
    "twice": (
        "devices = [1, 1]\n" + CONV,
        "devices must name each of the 2 members of an island once, by a number from 0 to 1; got [1, 1], with 1 twice",
    ),
    "missing": (
        "devices = [0]\n" + CONV,
        "devices must name each of the 2 members of an island once, by a number from 0 to 1; got [0]",
    ),
    "no numbers": (
        'devices = "10"\n' + CONV,
        "devices must name each of the 2 members of an island once, by a number from 0 to 1; got 10",
    ),
    "scheme": (
        "scheme = 'portion'\n" + CONV,
        "scheme must be one of gather, turns, portions; got 'portion' (did you mean portions?)",
    ),
    "period": (
        "scheme = 'turns'\nupdate_period = 3\n" + CONV,
        "update_period must divide the 2 backward passes of an iteration with scheme turns; got 3",
    ),
    "period of none": (
        "scheme = 'turns'\nupdate_period = 0\n" + CONV,
        "update_period must divide the 2 backward passes of an iteration with scheme turns; got 0",
    ),
    "period of one pass": (
        "scheme = 'gather'\nupdate_period = 2\n" + CONV,
        "update_period must divide the 1 backward pass of an iteration with scheme gather; got 2",
    ),
    "no period": (
        "scheme = 'turns'\nupdate_period = true\n" + CONV,
        "update_period must divide the 2 backward passes of an iteration with scheme turns; got True",
    ),
    "no scheme": ("update_period = 1\n" + CONV, "update_period must be left out without a scheme; got 1"),
    "scheme of nothing": (
        "scheme = 'turns'\nlayers = {}",
        "scheme must be left out where no layer is split; got turns",
    ),
    "not TOML": ("layers = ", "plan must be a TOML file; got {}: Invalid value (at end of document)"),
}


@pytest.mark.parametrize(("text", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_a_plan_that_does_not_fit_is_refused_in_one_line(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserInputError) as caught:
        read(tmp_path, text)
    assert str(caught.value) == message.replace("{}", str(tmp_path / "layers.toml"))


def test_a_plan_names_the_scheme_of_passing_samples_and_the_update_period(tmp_path: Path) -> None:
    layers = (SplitLayer("conv", "split-filters", "whole", "whole"),)
    for scheme, period in (("gather", 1), ("turns", 4), ("portions", 4)):
        text = f"scheme = '{scheme}'\n" + CONV
        assert read(tmp_path, text, members=4) == LayerPlan((0, 1, 2, 3), layers, scheme, period)
    text = "scheme = 'turns'\nupdate_period = 2\n" + CONV
    assert read(tmp_path, text, members=4) == LayerPlan((0, 1, 2, 3), layers, "turns", 2)


def test_a_plan_may_split_nothing_if_it_says_so(tmp_path: Path) -> None:
    assert read(tmp_path, "layers = {}") == LayerPlan((0, 1), ())


@pytest.mark.parametrize("scheme", ["gather", "turns", "portions"])
@pytest.mark.parametrize("members", range(1, 6))
def test_every_sample_of_every_member_is_in_one_pass(scheme: str, members: int) -> None:
    samples = 6 * members
    passes = rows_of_passes(scheme, members, samples)
    assert len(passes) == number_of_passes(scheme, members)
    for member in range(members):
        assert [row for rows in passes for row in range(samples)[rows[member]]] == list(range(samples))
    sizes = {sum(len(range(samples)[of_member]) for of_member in rows) for rows in passes}
    assert sizes == {samples * members // len(passes)}, "all passes are of the same size"


def test_a_number_of_members_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match=r"^out_channels of layer conv must be a multiple of the 3 members of an"):
        read(tmp_path, CONV, members=3)
    with pytest.raises(UserInputError, match=r"^groups of layer towers must be 1, or a multiple of the 8 members"):
        read(tmp_path, 'layers.towers.style = "split-filters"', members=8)


def test_a_plan_that_is_not_there_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "nowhere.toml"
    with pytest.raises(UserInputError) as caught:
        read_plan(path, network(), 2)
    assert str(caught.value) == f"plan must be a readable file; got {path}: No such file or directory"


def test_the_example_in_the_documentation_is_a_plan(tmp_path: Path) -> None:
    page = (REPOSITORY / "docs" / "islands.md").read_text(encoding="utf-8")
    example, *_ = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    path = tmp_path / "layers.toml"
    path.write_text(example, encoding="utf-8")
    alexnet = nn.Module()
    alexnet.features = nn.Sequential(nn.Conv2d(3, 64, 11), nn.ReLU(), nn.MaxPool2d(3), nn.Conv2d(64, 192, 5))
    alexnet.classifier = nn.Sequential(nn.Dropout(), nn.Linear(192, 96), nn.ReLU(), nn.Dropout(), nn.Linear(96, 96))
    assert [layer.name for layer in read_plan(path, alexnet, 2).layers] == [
        *("features.0", "features.3"),
        *("classifier.1", "classifier.4"),
    ]
