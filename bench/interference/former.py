"""The dual-branch transformer of CloudFormer (arXiv:2509.03394), as far as its paper says.

Time branch: a token per second; system branch: a token per metric. Each has a class token and four
blocks (4 heads of 16, feed-forward 256); both class tokens together give the performance.
"""

import math

import numpy as np
import torch
from torch import Tensor, nn

_WIDTH, _HEADS, _INNER, _BLOCKS = 64, 4, 256, 4


def _blocks() -> nn.Module:
    layer = nn.TransformerEncoderLayer(_WIDTH, _HEADS, _INNER, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, _BLOCKS, enable_nested_tensor=False)


class Former(nn.Module):
    """Performance in (0, 1) of windows [n, seconds, metrics]; ``branches`` for an ablation."""

    def __init__(self, metrics: int, seconds: int, branches: str = "both") -> None:
        super().__init__()
        self.branches = branches
        self.enter_time, self.enter_metric = nn.Linear(metrics, _WIDTH), nn.Linear(1, _WIDTH)
        self.names = nn.Parameter(torch.randn(metrics, _WIDTH) * 0.1)
        self.class_time = nn.Parameter(torch.zeros(1, 1, _WIDTH))
        self.class_metric = nn.Parameter(torch.zeros(1, 1, _WIDTH))
        at, half = torch.arange(seconds + 1)[:, None], torch.arange(0, _WIDTH, 2)
        angle = at * torch.exp(-math.log(10_000.0) * half / _WIDTH)
        self.register_buffer("places", torch.stack([angle.sin(), angle.cos()], 2).flatten(1))
        self.time, self.system = _blocks(), _blocks()
        width = _WIDTH * (2 if branches == "both" else 1)
        self.head = nn.Sequential(
            nn.Linear(width, _WIDTH),
            nn.SiLU(),
            nn.LayerNorm(_WIDTH),
            nn.Dropout(0.4),
            nn.Linear(_WIDTH, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = []
        if self.branches != "system":
            tokens = torch.relu(self.enter_time(x))
            tokens = torch.cat([self.class_time.expand(len(x), 1, -1), tokens], 1) + self.places
            parts.append(self.time(tokens)[:, 0])
        if self.branches != "time":
            # A metric's token says which it is: without that, tokens of equal value are equal.
            tokens = self.enter_metric(x.mean(1).unsqueeze(2)) + self.names
            tokens = torch.cat([self.class_metric.expand(len(x), 1, -1), tokens], 1)
            parts.append(self.system(tokens)[:, 0])
        return torch.sigmoid(self.head(torch.cat(parts, 1)).squeeze(1))


def fit(
    x: np.ndarray, y: np.ndarray, *, epochs: int, seed: int = 0, branches: str = "both"
) -> Former:
    """Log-cosh loss, Adam with linear warm-up and cosine decay."""
    torch.manual_seed(seed)
    model = Former(x.shape[2], x.shape[1], branches)
    inputs, wanted = torch.from_numpy(x).float(), torch.from_numpy(y).float()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    batch = 64
    steps = epochs * -(-len(x) // batch)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: (
            min(1.0, (step + 1) / (0.1 * steps)) * 0.5 * (1 + math.cos(math.pi * step / steps))
        ),
    )
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(batch):
            gap = model(inputs[rows]) - wanted[rows]
            loss = (gap + nn.functional.softplus(-2 * gap) - math.log(2)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return model.eval()


@torch.no_grad()
def predict(model: Former, x: np.ndarray) -> np.ndarray:
    return model(torch.from_numpy(x).float()).numpy().astype(np.float64)
