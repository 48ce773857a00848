"""Sum of linear layers' gradients by their factors, which all ranks gather and multiply, and the check of factors.

The gradient of a linear layer's weight is the product of its output gradients and its inputs, one row of each for every
sample (or position in a text). With few rows these are fewer values than the weight has (Xing et al., "Strategies and
Principles of Distributed Machine Learning on Big Data", Engineering 2016; Zhang et al., "Poseidon", USENIX ATC 2017).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pipesgd.comm.all_reduce import Finish, no_op
from pipesgd.errors import UserInputError
from pipesgd.flat_buffer import FlatBuffer
from pipesgd.optim.loss_scale import LossScale
from pipesgd.systems.exchanges.factor_hooks import FactorHooks, Factors, is_linear
from pipesgd.systems.exchanges.gathering import GatheringReducer, weights_of

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
"""Dtypes of weights whose factors can travel. In float16, sums over ranks overflow earlier than means."""
NOT_THE_PRODUCT, NOT_FINITE = -1, -2
"""Numbers of rows that stand for a gradient that is not the product of its factors, or holds a NaN or an infinity."""
DEVIATIONS = 10.0
"""Standard deviations that a projection of rounding errors may be away from 0: normal numbers exceed them once in 6e22.
"""
DIRECTION_SEED = 0x9E3779B97F4A7C15
"""Seed of the random direction, which must have nothing to do with the numbers of a model or its data."""
PROJECTED = 1 << 18
"""Number of values that are projected at once: their copies in float64 stay in the cache."""


class FactorsReducer(GatheringReducer):
    """Sums gradients of linear layers' weights by gathering their factors and multiplying those of all ranks.

    A ``sum`` over p ranks is

    1. check: each rank compares its gradients with their factors (``checked_rows``);
    2. count: the numbers of rows, int32 (p, matrices), go around the ring. If a gradient is not the product of its
       factors on some rank, all ranks refuse it. If it is not finite, its sum is NaN on all ranks;
    3. gather: the inputs and then the gradients of each matrix go around the ring in the weight's dtype. A rank's
       message has room for as many rows of a matrix as the rank with the most has, R;
    4. multiply: the products of all ranks' factors are added to zeros in rank order.

    For each matrix a rank sends p-1 times 4 bytes, and R times as many values as it has rows and columns. All ranks
    multiply the same factors, their own included, so they must have processors that multiply alike
    (``pipesgd.pipeline.sameness``).
    """

    eligible = (
        "a torch.nn.Linear is trained that shares its weight with no layer of another kind, in float32, float64 or "
        "bfloat16"
    )
    parts: Sequence[Factors] = ()

    @staticmethod
    def weights(model: nn.Module) -> list[Tensor]:
        """Return the weights of the model's linear layers, except those that a layer of another kind has, too.

        Classes derived from ``torch.nn.Linear`` may compute something else, and are no linear layers here.
        """
        return [weight for weight in weights_of(model, is_linear) if weight.dtype in DTYPES]

    @staticmethod
    def hooks(model: nn.Module, weights: Sequence[Tensor], loss_scale: LossScale | None) -> FactorHooks | None:
        """Return hooks that keep the factors of these ``weights``, if there are any."""
        return FactorHooks(model, weights, loss_scale) if weights else None

    @staticmethod
    def pieces(gradient: Tensor, kept: Factors) -> int:
        """Return the number of rows of the factors of a gradient."""
        return len(kept)

    @staticmethod
    def part_bytes(count: int, matrix: Tensor) -> int:
        """Return the bytes of one rank's part of a matrix if the rank with the most has ``count`` rows of factors.

        >>> FactorsReducer.part_bytes(2, torch.zeros(100, 7))
        860
        """
        return 4 + count * sum(matrix.shape) * matrix.element_size()

    def sum(self, buffer: FlatBuffer, iteration: int, finish: Finish = no_op) -> None:
        """Replace the matrices in ``buffer``, the gradients of which ``parts`` are the factors, by their sums.

        Raises:
            UserInputError: a gradient is not the product of its factors; on all ranks.
        """
        self.bytes_sent = 0
        matrices, (factors, self.parts) = buffer.views, (self.parts, ())
        # 1. and 2.
        own = [checked_rows(matrix, of_matrix) for matrix, of_matrix in zip(matrices, factors, strict=True)]
        counts = self._gather(torch.tensor(own, dtype=torch.int32, device=matrices[0].device)).tolist()
        of_ranks = list(zip(*counts, strict=True))
        for of_matrix, found in zip(factors, of_ranks, strict=True):
            if NOT_THE_PRODUCT in found:
                raise _refusal(of_matrix.name, iteration)
        most = [0 if NOT_FINITE in found else max(found) for found in of_ranks]
        for matrix, found in zip(matrices, of_ranks, strict=True):
            matrix.fill_(math.nan if NOT_FINITE in found else 0.0)
        for dtype in dict.fromkeys(matrix.dtype for matrix in matrices):
            # 3.
            which = [number for number, matrix in enumerate(matrices) if matrix.dtype == dtype and most[number]]
            if not which:
                continue
            sizes = [most[number] * sum(matrices[number].shape) for number in which]
            message = torch.zeros(sum(sizes), dtype=dtype, device=matrices[0].device)
            for number, part in zip(which, message.split(sizes), strict=True):
                inputs, gradients = _views(part, most[number], matrices[number])
                for place, calls in ((inputs, factors[number].inputs), (gradients, factors[number].gradients)):
                    start = 0
                    for call in calls:
                        place[start : start + len(call)] = call
                        start += len(call)
            gathered = self._gather(message)
            # 4.
            for rank, of_rank in enumerate(gathered):
                for number, part in zip(which, of_rank.split(sizes), strict=True):
                    inputs, gradients = _views(part, most[number], matrices[number])
                    count = counts[rank][number]
                    matrices[number].addmm_(gradients[:count].t(), inputs[:count])
        for flat in buffer.flats:
            finish(flat)


def checked_rows(gradient: Tensor, factors: Factors, scale: float = 1.0) -> int:
    r"""Return the number of rows of the factors of ``gradient``, after a check that it is their product.

    A gradient G (rows, columns) may have parts that its factors, output gradients g and inputs x of K rows, do not
    have: another use of the weight, or a penalty. So both are projected on a random direction v of standard normal
    numbers (Freivalds, IFIP 1977), which takes one pass over G, and compared:

    .. math:: |(G v)_i - \sum_k g_{ki} (x_k \cdot v)| \le (d\, \gamma + \epsilon \|v\|) \sum_k |g_{ki}| \|x_k\|

    Let E be the error of G by rounding. Whatever the order of its sum, $|E_{ij}| \le \gamma \sum_k |g_{ki}| |x_{kj}|$
    with $\gamma = \gamma_K(u_{32}) + \gamma_{2c+6}(u)$ and $\gamma_n(u) = n u / (1 - n u)$ (Higham, "Accuracy and
    Stability of Numerical Algorithms", 2002, section 3.1). Products are added up in float32 at least, with unit
    roundoff $u_{32}$. After that each of c calls is rounded to a dtype of unit roundoff u and added to the others, and
    there are divisions by a loss scale. By the triangle inequality the norm of row i of E is at most gamma times
    $\sum_k |g_{ki}| \|x_k\|$. E does not depend on v, so $(E v)_i$ is normal with this norm as its standard deviation,
    and exceeds d = ``DEVIATIONS`` of them about never. The projections are computed in float64, whose own errors,
    worst case, are the term with epsilon. What is rounded to 0 is added to the bound.

    Args:
        gradient: the gradient, multiplied by ``scale``.
        factors: its factors.
        scale: loss scale of the gradient.

    Returns:
        The number of rows, or ``NOT_THE_PRODUCT``, or ``NOT_FINITE`` if there is a NaN or an infinity.
    """
    columns, rows, calls = gradient.shape[1], len(factors), len(factors.inputs)
    direction = _direction(columns).to(gradient.device)
    parts = gradient.split(max(1, PROJECTED // max(1, columns)))
    found = torch.cat([part.double().mv(direction) for part in parts]) / scale
    expected, sizes = torch.zeros_like(found), torch.zeros_like(found)
    for inputs, gradients in zip(factors.inputs, factors.gradients, strict=True):
        x, g = inputs.double(), gradients.double()
        expected += g.t().mv(x.mv(direction))
        sizes += g.abs().t().mv(torch.linalg.vector_norm(x, dim=1))
    if not bool((found + expected).isfinite().all()):
        return NOT_FINITE
    roundings = 2 * calls + 6
    relative = _gamma(rows, min(factors.unit, torch.finfo(torch.float32).eps / 2))
    relative += _gamma(roundings, factors.unit) * (1 + relative)
    own = _gamma(4 * (columns + rows), torch.finfo(torch.float64).eps / 2) * float(torch.linalg.vector_norm(direction))
    smallest = (rows * torch.finfo(torch.float32).tiny + roundings * factors.smallest) * math.sqrt(columns)
    bound = torch.where(sizes > 0, (DEVIATIONS * relative + own) * sizes, 0.0) + DEVIATIONS * smallest
    return rows if bool(((found - expected).abs() <= bound).all()) else NOT_THE_PRODUCT


@functools.cache
def _direction(columns: int) -> Tensor:
    """Return standard normal numbers, float64 (``columns``,), the same at every call."""
    numbers = torch.Generator().manual_seed(DIRECTION_SEED)
    return torch.randn(columns, dtype=torch.float64, generator=numbers)


def _gamma(roundings: int, unit: float) -> float:
    """Return the bound of the relative error of this many roundings of unit roundoff ``unit``."""
    return roundings * unit / (1 - roundings * unit) if roundings * unit < 1 else math.inf


def _views(part: Tensor, most: int, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of the inputs (``most``, columns) and of the gradients (``most``, rows) in a part of a message."""
    rows, columns = matrix.shape
    inputs, gradients = part.split([most * columns, most * rows])
    return inputs.view(most, columns), gradients.view(most, rows)


def _refusal(name: str, iteration: int) -> UserInputError:
    return UserInputError.on_all_ranks(
        "reduce factors must be for linear layers whose weight is used nowhere else, such as in a penalty or another "
        f"function, and whose .grad nobody changes; got {name}, whose gradient in iteration {iteration} is not that of "
        "its layer's calls (use --reduce matrix)"
    )
