# SPDX-License-Identifier: Apache-2.0
"""Networks that PyTorch trains itself and, from a TorchScript file of the same weights, Stratagem."""
import warnings

import torch
from torch import nn
from torch.nn import functional

warnings.simplefilter("ignore", FutureWarning)  # PyTorch develops TorchScript no further, and says so at each call


class Classifier(nn.Module):
    """`training_step` is the loss: of logits (rows, classes) against targets (rows)."""

    @torch.jit.export
    def training_step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.forward(inputs), targets.flatten())


class Mlp(Classifier):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 40), nn.GELU(), nn.Linear(40, 40), nn.GELU(), nn.Linear(40, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Cnn(Classifier):
    """With batch norms, and without biases before them, whose gradients are nothing but rounding."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.GELU(), nn.Conv2d(8, 8, 3, bias=False),
                                    nn.BatchNorm2d(8), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Bottleneck(nn.Module):
    def __init__(self, channels, width, stride):
        super().__init__()
        out = 4 * width
        self.body = nn.Sequential(nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
                                  nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
                                  nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out))
        projects = stride != 1 or channels != out
        self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)) if projects else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.body(x) + self.shortcut(x), inplace=True)


class ResNet50(Classifier):
    """He et al. 2015, with the stride in the 3x3 convolution. `width` is 64 there."""

    def __init__(self, width=64, classes=1000):
        super().__init__()
        layers = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
        channels = width
        for stage, blocks in enumerate((3, 4, 6, 3)):
            for block in range(blocks):
                layers.append(Bottleneck(channels, width << stage, 2 if stage > 0 and block == 0 else 1))
                channels = 4 * (width << stage)
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Gpt2(Classifier):
    """The shape of GPT-2 small, without dropout; the head shares the embedding's weight."""

    def __init__(self, vocabulary=50257, length=1024, width=768, heads=12, depth=12):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.places.weight, std=0.02)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.tokens(x) + self.places.weight[:x.shape[1]]
        return functional.linear(self.norm(self.blocks(h)), self.tokens.weight).flatten(0, 1)


def made(make, seed=1):
    torch.manual_seed(seed)
    return make()


def save(module, path):
    torch.jit.script(module).save(str(path))
    return path
