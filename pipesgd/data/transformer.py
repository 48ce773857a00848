"""A small decoder of text in the style of GPT-2."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Transformer(nn.Module):
    """Decoder from symbols, int64 (B, T <= ``context``), to logits of each next one, float32 (B, T, vocabulary).

    It has learned positions, normalisation before every attention and MLP, and no dropout. The embedding and the output
    layer have separate weights: tying them saves a large vocabulary's second table, but for 256 bytes that table is a
    small part of the model.

    References:
        Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, section 2.3, for the blocks and
        the initial weights: normal with standard deviation 0.02, divided by the root of their number where they are
        added up; biases are zero.
    """

    def __init__(self, *, vocabulary: int, context: int, layers: int, heads: int, embedding: int) -> None:
        assert embedding % heads == 0
        super().__init__()
        self.symbols = nn.Embedding(vocabulary, embedding)
        self.positions = nn.Embedding(context, embedding)
        self.blocks = nn.Sequential(*(_Block(embedding, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(embedding)
        self.output = nn.Linear(embedding, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                added_up = name.endswith("to_residual.weight")
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if added_up else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, symbols: torch.Tensor) -> torch.Tensor:
        x = self.symbols(symbols) + self.positions.weight[: symbols.shape[1]]  # (B, T, embedding)
        logits: torch.Tensor = self.output(self.norm(self.blocks(x)))
        return logits


class _Block(nn.Module):
    """Attention to earlier positions and an MLP of each position, both added to x: (B, T, embedding) to the same."""

    def __init__(self, embedding: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(embedding), _CausalAttention(embedding, heads))
        self.norm = nn.LayerNorm(embedding)
        self.widen = nn.Linear(embedding, 4 * embedding)
        self.to_residual = nn.Linear(4 * embedding, embedding)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        residual: torch.Tensor = self.to_residual(F.gelu(self.widen(self.norm(x))))
        return x + residual


class _CausalAttention(nn.Module):
    """Attention of every position to itself and to those before it: (B, T, embedding) to the same."""

    def __init__(self, embedding: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.queries_keys_values = nn.Linear(embedding, 3 * embedding)
        self.to_residual = nn.Linear(embedding, embedding)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries, keys, values = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2)  # (B, heads, T, embedding / heads)
            for part in self.queries_keys_values(x).chunk(3, dim=2)
        )
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        result: torch.Tensor = self.to_residual(mixed.transpose(1, 2).flatten(2))
        return result
