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


class Whole(Stepping):
    """With a method for each stage, each of which gives something else."""

    @torch.jit.export
    def test_step(self, batch: Dict[str, torch.Tensor]) -> Dict[str, torch.Tensor]:
        return {"loss": 3 * torch.nn.functional.cross_entropy(self.forward(batch["inputs"]), batch["targets"]), "tested": batch["inputs"].mean()}

    @torch.jit.export
    def predict_step(self, inputs: torch.Tensor) -> Dict[str, torch.Tensor]:
        return {"chances": torch.softmax(self.forward(inputs), 1), "rows": inputs.flatten(1)[:, :1]}


class Summing(Plain):
    @torch.jit.export
    def training_step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.forward(inputs), targets, reduction="sum")


def data(dtype):
    torch.manual_seed(5)
    inputs = torch.randn(NUM_ROWS, 6, 6).to(dtype)
    return inputs, (inputs.mean((1, 2)) * 20).long() % 3


def write_data(folder, dtype, targets=None):
    inputs, labels = data(dtype)
    targets = labels if targets is None else targets
    safetensors.torch.save_file({"inputs": inputs, "targets": targets}, folder / "data.safetensors")


def train_in_python(module, loss=torch.nn.functional.cross_entropy, targets=None, steps=STEPS):
    optimizer = torch.optim.SGD(module.parameters(), lr=LR, momentum=0.9)
    inputs, labels = data(torch.float64)
    targets = labels if targets is None else targets
    for step in range(steps):
        at = step % -(-NUM_ROWS // BATCH_SIZE) * BATCH_SIZE
        optimizer.zero_grad()
        loss(module(inputs[at:at + BATCH_SIZE]), targets[at:at + BATCH_SIZE]).backward()
        optimizer.step()
    return module.state_dict()


def config_of(folder, strategy, precision, options, run, **trainer):
    files = {"format": "safetensors", "inputs": "data.safetensors", "targets": "data.safetensors", "batch_size": BATCH_SIZE}
    config = {
        "strategy": {"accelerator": "cpu", **strategy}, "precision": precision,
        "model": {"kind": "torchscript", "path": "model.pt", "options": options},
        "optimizer": {"name": "sgd", "lr": LR, "momentum": 0.9},
        "data": {"train": files, "validation": files, "test": files, "predict": {**files, "targets": None}},
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


def evaluated(command, folder, config, *more):
    return stratagem(command, config, "--checkpoint", folder / "run", *more)


def check_stages(folder):
    """test and predict: by the module's methods; without a test_step by its validation_step; without methods by forward and the loss."""
    write_data(folder, torch.float64)
    inputs, targets = data(torch.float64)
    loss = torch.nn.functional.cross_entropy
    worst = 0.0
    for strategy, module, options, of_test, of_predict in (
            (STRATEGIES[1], Whole(), {}, lambda m: {"loss": 3 * loss(m(inputs), targets), "tested": inputs.mean()},
             lambda m: {"chances": torch.softmax(m(inputs), 1), "rows": inputs[:, :1, 0]}),
            (STRATEGIES[0], Stepping(), {},
             lambda m: {"loss": loss(m(inputs), targets), "rows": torch.tensor((5 * 8 * 8 + 4 * 4) / 44, dtype=torch.float64)},
             lambda m: {"predictions": m(inputs)}),
            (STRATEGIES[1], Plain(), {"loss": "cross_entropy"},
             lambda m: {"loss": loss(m(inputs), targets), "accuracy": (m(inputs).argmax(1) == targets).double().mean()},
             lambda m: {"predictions": m(inputs)})):
        module = module.double()
        torch.jit.script(module).save(folder / "model.pt")
        config = config_of(folder, strategy, "64-true", options, "run", max_steps=2)
        stratagem("fit", config)
        module.load_state_dict(load(folder / "run" / "step-00000002" / "weights.safetensors"))
        with torch.no_grad():
            tested = {name: torch.tensor(value, dtype=torch.float64) for name, value in evaluated("test", folder, config)["test"].items()}
            worst = max(worst, deviation(tested, of_test(module)))
            file = folder / "predictions.safetensors"
            evaluated("predict", folder, config, "--output", file)
            worst = max(worst, deviation(load(file), of_predict(module)))
    report("stages", "test and predict", worst, 1e-12)


def check_losses(folder):
    """Each loss of the options: the weights after training and what `stratagem test` says are PyTorch's."""
    inputs, labels = data(torch.float64)
    numbers = torch.randn(NUM_ROWS, 3, dtype=torch.float64)
    worst, worst_figure = 0.0, 0.0
    for name, targets in (("cross_entropy", labels), ("nll_loss", labels), ("mse_loss", numbers), ("l1_loss", numbers),
                          ("binary_cross_entropy_with_logits", (numbers > 0).double())):
        last = [torch.nn.LogSoftmax(1)] if name == "nll_loss" else []
        module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 3), *last).double()
        torch.jit.script(module).save(folder / "model.pt")
        write_data(folder, torch.float64, targets)
        config = config_of(folder, STRATEGIES[1], "64-true", {"loss": name}, "run", max_steps=8)
        loss = getattr(torch.nn.functional, name)
        worst = max(worst, deviation(load(weights(stratagem("fit", config))), train_in_python(module, loss, targets, 8)))
        figures = evaluated("test", folder, config)["test"]
        assert figures.keys() == ({"loss", "accuracy"} if targets is labels else {"loss"}), (name, figures)
        worst_figure = max(worst_figure, abs(figures["loss"] / loss(module(inputs), targets).item() - 1))
    report("losses", "fit, torchscript", worst, 1e-9)
    report("losses", "test, torchscript", worst_figure, 1e-9)


def check_sum(folder):
    module = Summing().double()
    torch.jit.script(module).save(folder / "model.pt")
    write_data(folder, torch.float64)
    start = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    worst = 0.0
    for strategy in STRATEGIES:
        module.load_state_dict(start)
        expected = train_in_python(module, lambda p, t: torch.nn.functional.cross_entropy(p, t, reduction="sum"), None, 4)
        config = config_of(folder, strategy, "64-true", {"loss_is_sum": True, "loss": "cross_entropy"}, "run", max_steps=4)
        worst = max(worst, deviation(load(weights(stratagem("fit", config))), expected))
    report("loss_is_sum", "fit, torchscript", worst, 1e-9)


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
        check_stages(folder)
        check_losses(folder)
        check_sum(folder)
        finish()
        write_data(folder, torch.float32)
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
