"""Muon for the hidden weight matrices and AdamW for all other parameters, as one torch optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import AdamW, Muon, Optimizer

from pipesgd.checks import check_above_zero, check_at_least
from pipesgd.errors import UserInputError


def hidden_matrices(model: nn.Module) -> list[Parameter]:
    """Return the 2-D parameters of ``model`` except embeddings' and the last layer's, in the order of the parameters.

    The last layer is the last registered module with its own parameter of two dimensions or more. A weight that an
    embedding or the last layer shares with another module counts as theirs.

    Raises:
        UserInputError: there are none.

    References:
        Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024.
    """
    others: set[int] = set()
    last: list[Parameter] = []
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            others |= {id(parameter) for parameter in own}
        if any(parameter.ndim >= 2 for parameter in own):
            last = own
    others |= {id(parameter) for parameter in last}
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2 and id(parameter) not in others]
    if not matrices:
        raise UserInputError(
            "model must have a weight matrix (2-D, neither an embedding's nor the last layer's) with --optimizer muon; "
            "got none"
        )
    return matrices


class MuonWithAdamW(Optimizer):
    """torch's Muon and AdamW, each on its own parameters, behind one ``param_groups`` and one ``state``.

    A group's ``"algorithm"`` names the one that updates it: ``"muon"`` or ``"adamw"``. No other optimizer is kept
    between steps: each step puts one of torch's around the current groups and state. So whatever works on those alone
    works here as with any optimizer: ``state_dict``, ``load_state_dict``, schedulers, ``copy.deepcopy``, ``pickle``.

    Muon scales its updates to the size of AdamW's, hence one learning rate. Its momentum is torch's default, Nesterov's
    of 0.95. Unlike the other optimizers' updates, its matrix products, in bfloat16, may round differently on another
    processor or with another number of threads, so ranks compare these at the start.

    Args:
        muon_parameters: matrices, at least one.
        adamw_parameters: the other parameters, of any shape.
        lr: learning rate of both.
        weight_decay: weight decay of both, decoupled from the gradient.

    Raises:
        UserInputError: a value is out of range, there is no matrix, or one does not have two dimensions.

    References:
        Liu et al., "Muon is Scalable for LLM Training", 2025, section 2.2, for the scale of the updates.
    """

    of_whole_matrices = True
    """Mark of an optimizer whose update of a value depends on others of its matrix."""

    def __init__(
        self,
        muon_parameters: Iterable[Parameter],
        adamw_parameters: Iterable[Parameter],
        *,
        lr: float,
        weight_decay: float = 0.0,
    ):
        check_above_zero("lr", lr)
        check_at_least("weight_decay", weight_decay, 0)
        matrices = list(muon_parameters)
        if not matrices:
            raise UserInputError("muon_parameters must hold at least one matrix; got none")
        for matrix in matrices:
            if matrix.ndim != 2:
                raise UserInputError(f"muon_parameters must be 2-D; got one of shape {tuple(matrix.shape)}")
        groups = [
            {"params": matrices, "algorithm": "muon", "adjust_lr_fn": "match_rms_adamw"},
            {"params": list(adamw_parameters), "algorithm": "adamw"},
        ]
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})
        self._algorithms()  # gives each group its algorithm's own options, with torch's defaults

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient; return the loss of ``closure``, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for algorithm in self._algorithms():
            algorithm.step()
        return loss

    def _algorithms(self) -> tuple[Optimizer, Optimizer]:
        """Return torch's optimizers around this one's groups and state: the same objects, no copies."""
        muon = Muon([group for group in self.param_groups if group["algorithm"] == "muon"])
        adamw = AdamW([group for group in self.param_groups if group["algorithm"] == "adamw"])
        muon.state = adamw.state = self.state
        return muon, adamw
