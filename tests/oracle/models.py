# SPDX-License-Identifier: Apache-2.0
"""The networks of the oracle in Python, and batches for them. tests/models/oracle_models.cpp has the same, with the same names."""
import torch
from torch import nn
from torch.nn import functional

NUM_CLASSES = 4


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear1 = nn.Linear(12, 16)
        self.linear2 = nn.Linear(16, NUM_CLASSES)

    def forward(self, x):
        return self.linear2(torch.tanh(self.linear1(x)))


class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, padding=1)
        self.conv2 = nn.Conv2d(4, 6, 3)
        self.linear = nn.Linear(6 * 4, NUM_CLASSES)

    def forward(self, x):
        pooled = functional.max_pool2d(functional.relu(self.conv1(x.unsqueeze(1))), 2)
        return self.linear(functional.gelu(self.conv2(pooled)).flatten(1))


class BatchNorm(nn.Module):
    def __init__(self):
        super().__init__()
        # No biases: norms take them out again, so their gradients are 0 but for rounding, which no tolerance for float32 would fit.
        self.conv1 = nn.Conv2d(1, 4, 3, bias=False)
        self.norm1 = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 6, 3, bias=False)
        self.norm2 = nn.BatchNorm2d(6)
        self.linear = nn.Linear(6 * 4 * 4, NUM_CLASSES)

    def forward(self, x):
        hidden = functional.gelu(self.norm1(self.conv1(x.unsqueeze(1))))
        return self.linear(functional.gelu(self.norm2(self.conv2(hidden))).flatten(1))


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 10, num_layers=2, batch_first=True)
        self.linear = nn.Linear(10, 2)

    def forward(self, x):
        return self.linear(self.lstm(x)[0][:, -1])


class Transformer(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.linear1 = nn.Linear(8, 8)
        # The layout of the C++ module, so that dropout meets the elements in the same order.
        self.layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, dropout=dropout, activation="gelu", batch_first=False)
        self.linear2 = nn.Linear(8, NUM_CLASSES)

    def forward(self, x):
        return self.linear2(self.layer(self.linear1(x).transpose(0, 1)).mean(0))


class Embedding(nn.Module):
    def __init__(self, sparse=False):
        super().__init__()
        self.embedding = nn.Embedding(30, 8, sparse=sparse)
        self.linear = nn.Linear(8, NUM_CLASSES)

    def forward(self, x):
        return self.linear(torch.tanh(self.embedding(x)).mean(1))


class Case:
    """A network with its options, the same for both sides."""

    def __init__(self, network, module_class, row_shape, dropout=0.0, sparse=False):
        self.options = {"network": network, "dropout": dropout, "sparse": sparse}
        self.name = "-".join([network, *(word for word in ("dropout", "sparse") if self.options[word])])
        self.row_shape = row_shape
        self.loss = "mse_loss" if network == "lstm" else "cross_entropy"
        self.has_dropout = dropout > 0
        self.is_trained_by_shares = self.has_dropout or network == "batch_norm"  # samples interact, or random numbers are drawn
        arguments = {"dropout": {"dropout": dropout}, "sparse": {"sparse": sparse}}
        self._make = lambda: module_class(**(arguments["dropout"] if dropout else arguments["sparse"] if sparse else {}))

    def module(self, seed=1):
        torch.manual_seed(seed)
        return self._make()

    def batch(self, num_rows, dtype, seed):
        generator = torch.Generator().manual_seed(seed)
        if self.options["network"] == "embedding":
            inputs = torch.randint(30, (num_rows, *self.row_shape), generator=generator)
        else:
            inputs = torch.randn(num_rows, *self.row_shape, generator=generator, dtype=torch.float64).to(dtype)
        if self.loss == "mse_loss":
            return {"inputs": inputs, "targets": torch.randn(num_rows, 2, generator=generator, dtype=torch.float64).to(dtype)}
        return {"inputs": inputs, "targets": torch.randint(NUM_CLASSES, (num_rows,), generator=generator)}

    def loss_of(self, module, batch):
        return getattr(functional, self.loss)(module(batch["inputs"]), batch["targets"])


CASES = {case.name: case for case in (
    Case("mlp", Mlp, (12,)), Case("cnn", Cnn, (8, 8)), Case("batch_norm", BatchNorm, (8, 8)), Case("lstm", Lstm, (6, 8)),
    Case("transformer", Transformer, (6, 8)), Case("transformer", Transformer, (6, 8), dropout=0.25),
    Case("embedding", Embedding, (5,)), Case("embedding", Embedding, (5,), sparse=True))}
