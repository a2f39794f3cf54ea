#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""TorchScript files with steps of their own trained by stratagem: as the same module in a plain PyTorch loop, resumed to the bit, and refused
with a reason. (Networks without steps: check_fit.py.)

usage: see oracle.py
"""
import os
import sys
import tempfile
from typing import Dict

sys.path.insert(0, os.path.dirname(__file__))
from oracle import *  # noqa: F403 (first: it skips where there is no torch)

NUM_ROWS, BATCH_SIZE, LR = 44, 8, 0.1  # the last batch is smaller
STEPS = -(-NUM_ROWS // BATCH_SIZE) * 4


class Plain(torch.nn.Module):
    """Without a step of its own: the options name the loss."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 4, 3)
        self.linear = torch.nn.Linear(4 * 16, 3)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x):
        h = torch.nn.functional.gelu(self.conv(x.unsqueeze(1)) * self.scale).flatten(1)
        # What the graph executor, where it specialises, computes to other bits from the second call on.
        h = torch.sigmoid(h) * torch.tanh(h)
        return self.linear(h / (1 + h * h))


class Stepping(Plain):
    @torch.jit.export
    def training_step(self, batch: Dict[str, torch.Tensor]) -> Dict[str, torch.Tensor]:
        return {"loss": torch.nn.functional.cross_entropy(self.forward(batch["inputs"]), batch["targets"])}

    @torch.jit.export
    def validation_step(self, inputs: torch.Tensor, targets: torch.Tensor) -> Dict[str, torch.Tensor]:
        return {"loss": torch.nn.functional.cross_entropy(self.forward(inputs), targets), "rows": torch.tensor(float(len(inputs)))}


def data(dtype):
    torch.manual_seed(5)
    inputs = torch.randn(NUM_ROWS, 6, 6).to(dtype)
    return inputs, (inputs.mean((1, 2)) * 20).long() % 3


def write_data(folder, dtype):
    inputs, targets = data(dtype)
    safetensors.torch.save_file({"inputs": inputs, "targets": targets}, folder / "data.safetensors")


def train_in_python(module):
    optimizer = torch.optim.SGD(module.parameters(), lr=LR, momentum=0.9)
    inputs, targets = data(torch.float64)
    for step in range(STEPS):
        at = step % -(-NUM_ROWS // BATCH_SIZE) * BATCH_SIZE
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(module(inputs[at:at + BATCH_SIZE]), targets[at:at + BATCH_SIZE]).backward()
        optimizer.step()
    return module.state_dict()


def config_of(folder, strategy, precision, options, run, **trainer):
    files = {"format": "safetensors", "inputs": "data.safetensors", "targets": "data.safetensors", "batch_size": BATCH_SIZE}
    config = {
        "strategy": {"accelerator": "cpu", **strategy}, "precision": precision,
        "model": {"kind": "torchscript", "path": "model.pt", "options": options},
        "optimizer": {"name": "sgd", "lr": LR, "momentum": 0.9}, "data": {"train": files, "validation": files},
        "trainer": trainer, "checkpoint": {"dir": run},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder / "config.json"


def weights(result):
    return pathlib.Path(result["checkpoint"], "weights.safetensors")


STRATEGIES = ({"name": "single_device"}, {"name": "data_parallel", "devices": 3})


def check_against_python(folder):
    torch.manual_seed(3)
    module = Stepping().double()
    torch.jit.script(module).save(folder / "model.pt")
    write_data(folder, torch.float64)
    expected = train_in_python(module)
    worst = 0.0
    for strategy in STRATEGIES:
        result = stratagem("fit", config_of(folder, strategy, "64-true", {}, "run", max_steps=STEPS))
        found = load(weights(result))
        worst = max(worst, deviation(found, expected))
        Stepping().double().load_state_dict(found)
        assert result["validation"].keys() == {"loss", "rows"}, result["validation"]
    report("own steps", "fit, torchscript", worst, 1e-9)


def check_resume(folder):
    torch.jit.script(Stepping()).save(folder / "model.pt")
    write_data(folder, torch.float32)
    for strategy in STRATEGIES:
        unbroken = weights(stratagem("fit", config_of(folder, strategy, "32-true", {}, "whole", max_steps=STEPS))).read_bytes()
        stratagem("fit", config_of(folder, strategy, "32-true", {}, "halves", max_steps=5))
        resumed = stratagem("fit", config_of(folder, strategy, "32-true", {}, "halves", max_steps=STEPS), "--resume", folder / "halves")
        assert weights(resumed).read_bytes() == unbroken, f"{strategy}: a resumed run differs"


def check_refused(folder, options, *parts, content=None):
    if content is not None:
        (folder / "model.pt").write_bytes(content)
    config = config_of(folder, STRATEGIES[0], "32-true", options, "none", max_steps=1)
    result = subprocess.run([STRATAGEM, "fit", config], capture_output=True, text=True)
    assert result.returncode == 2 and all(part in result.stderr for part in parts), f"{result.returncode}: {result.stderr}"


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        check_against_python(folder)
        check_resume(folder)
        finish()
        torch.jit.script(Plain()).save(folder / "model.pt")
        result = stratagem("fit", config_of(folder, STRATEGIES[0], "32-true", {"loss": "cross_entropy"}, "plain", max_steps=1))
        assert result["validation"].keys() == {"loss", "accuracy"}, result["validation"]
        check_refused(folder, {}, "no method training_step", '{"loss": "cross_entropy"}')
        check_refused(folder, {"loss": "cross_entropi"}, "/model/options/loss", 'did you mean "cross_entropy"?')
        torch.jit.freeze(torch.jit.script(Plain().eval())).save(folder / "model.pt")
        check_refused(folder, {"loss": "cross_entropy"}, "no parameters")
        check_refused(folder, {"loss": "cross_entropy"}, "model.pt", "can't be loaded as TorchScript", content=b"nothing of the kind")
        (folder / "model.pt").unlink()
        check_refused(folder, {"loss": "cross_entropy"}, "/model/path", "model.pt")


if __name__ == "__main__":
    main()
