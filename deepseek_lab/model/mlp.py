"""The SwiGLU feed-forward layer (Shazeer, arXiv 2002.05202, equation 6)."""

import torch.nn.functional as F
from torch import Tensor, nn


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x)): a feed-forward layer whose hidden units are switched by a learned gate."""

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))
