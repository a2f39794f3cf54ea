#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""TorchScript files with gradients that are out of the ordinary: an embedding's sparse ones under every optimizer, and a penalty on a gradient
(double backward); each against the module in a plain PyTorch loop. And files with parameters that have no memory yet.

usage: see oracle.py
"""
import os
import sys
import tempfile
from typing import Dict

sys.path.insert(0, os.path.dirname(__file__))
from oracle import *  # noqa: F403 (first: it skips where there is no torch)

NUM_ROWS, BATCH_SIZE, STEPS, LR = 22, 8, 9, 0.1


class Words(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(30, 5, sparse=True)
        self.linear = torch.nn.Linear(5, 1)

    @torch.jit.export
    def training_step(self, batch: Dict[str, torch.Tensor]) -> torch.Tensor:
        words = self.embedding(batch["inputs"].long()).tanh().mean(1)
        return torch.nn.functional.mse_loss(self.linear(words).squeeze(1), batch["targets"])


class Penalty(torch.nn.Module):
    """A discriminator's, as in WGAN-GP."""

    def __init__(self):
        super().__init__()
        self.linear1 = torch.nn.Linear(4, 6)
        self.linear2 = torch.nn.Linear(6, 1)

    @torch.jit.export
    def training_step(self, batch: Dict[str, torch.Tensor]) -> torch.Tensor:
        x = batch["inputs"].detach().clone().requires_grad_()
        y = self.linear2(self.linear1(x).tanh()).squeeze(1)
        gradient = torch.autograd.grad([y.sum()], [x], create_graph=True, retain_graph=True)[0]
        assert gradient is not None
        return (y - batch["targets"]).square().mean() + (gradient.square().sum(1).add(1e-6).sqrt() - 1).square().mean()


def write_data(folder):
    torch.manual_seed(5)
    inputs = torch.randint(0, 30, (NUM_ROWS, 4)).double()
    safetensors.torch.save_file({"inputs": inputs, "targets": torch.randn(NUM_ROWS).double()}, folder / "data.safetensors")


def config_of(folder, strategy, optimizer):
    files = {"format": "safetensors", "inputs": "data.safetensors", "targets": "data.safetensors", "batch_size": BATCH_SIZE}
    config = {
        "strategy": {"accelerator": "cpu", **strategy}, "precision": "64-true", "model": {"kind": "torchscript", "path": "model.pt"},
        "optimizer": optimizer, "data": {"train": files}, "trainer": {"max_steps": STEPS, "gradient_clip_val": 0.5},
        "checkpoint": {"dir": "run"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder / "config.json"


STRATEGIES = ({"name": "single_device"}, {"name": "data_parallel", "devices": 3})


def check_against_python(folder, name, module, of, **options):
    module = module.double()
    torch.jit.script(module).save(folder / "model.pt")
    data = safetensors.torch.load_file(folder / "data.safetensors")
    makers = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}
    optimizer = makers[of](module.parameters(), lr=LR, **options)
    for step in range(STEPS):
        at = step % -(-NUM_ROWS // BATCH_SIZE) * BATCH_SIZE
        optimizer.zero_grad()
        module.training_step({key: tensor[at:at + BATCH_SIZE] for key, tensor in data.items()}).backward()
        norm = sum(p.grad.coalesce().values().norm() ** 2 if p.grad.is_sparse else p.grad.norm() ** 2 for p in module.parameters()).sqrt()
        for parameter in module.parameters():
            if norm > 0.5:
                parameter.grad = parameter.grad * (0.5 / norm)
        optimizer.step()
    for strategy in STRATEGIES:
        result = stratagem("fit", config_of(folder, strategy, {"name": of, "lr": LR, **options}))
        found = load(pathlib.Path(result["checkpoint"], "weights.safetensors"))
        report(name, f"{of} {options or ''} {strategy['name']}", deviation(found, module.state_dict()), 1e-9)


def check_refused(folder, optimizer, code, *parts):
    result = subprocess.run([STRATAGEM, "fit", config_of(folder, STRATEGIES[1], optimizer)], capture_output=True, text=True)
    assert result.returncode == code and all(part in result.stderr for part in parts), f"{result.returncode}: {result.stderr}"


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write_data(folder)
        for of, options in (("sgd", {}), ("sgd", {"momentum": 0.9, "nesterov": True}), ("adagrad", {"lr_decay": 0.1})):
            torch.manual_seed(3)
            check_against_python(folder, "sparse embedding", Words(), of, **options)
        for of in ("sgd", "adam"):
            torch.manual_seed(3)
            check_against_python(folder, "gradient penalty", Penalty(), of)
        finish()
        torch.jit.script(Words()).save(folder / "model.pt")
        for optimizer in ({"name": "adamw"}, {"name": "rmsprop"}, {"name": "sgd", "weight_decay": 0.1}):
            check_refused(folder, {"lr": LR, **optimizer}, 1, "embedding.weight has a sparse gradient", optimizer["name"], "sparse=False")
        with torch.device("meta"):
            torch.jit.script(Penalty()).save(folder / "model.pt")
        check_refused(folder, {"name": "sgd", "lr": LR}, 2, "linear1.weight", "no shape yet")


if __name__ == "__main__":
    main()
