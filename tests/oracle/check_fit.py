#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs of `stratagem fit` in float64 against a plain PyTorch loop: same data, order and first weights, so the same weights at the end. And the
checkpoint's weights loaded in PyTorch: the outputs are those of `stratagem predict`.

usage: see oracle.py; --all: every model, over 100 steps
"""
import os
import sys
import tempfile

sys.path.insert(0, os.path.dirname(__file__))
from oracle import *  # noqa: F403 (first: it skips where there is no torch)
from models import CASES  # noqa: E402

NUM_ROWS, BATCH_SIZE = 44, 7  # the last batch has 2 rows: fewer than 3 devices
OPTIMIZERS = {
    "sgd": ({"name": "sgd", "lr": 0.05, "momentum": 0.9}, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)),
    # Keys of attention have a bias whose gradient is 0 but for rounding; with the usual eps Adam makes 3e-10 of that.
    "adam": ({"name": "adam", "lr": 0.01, "eps": 1e-6}, lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-6)),
    "adamw": ({"name": "adamw", "lr": 0.01, "eps": 1e-6, "weight_decay": 0.1, "amsgrad": True},
              lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-6, weight_decay=0.1, amsgrad=True)),
    "rmsprop": ({"name": "rmsprop", "lr": 0.001, "eps": 1e-6, "alpha": 0.9},
                lambda p: torch.optim.RMSprop(p, lr=0.001, eps=1e-6, alpha=0.9)),
    "centered": ({"name": "rmsprop", "lr": 0.001, "eps": 1e-3, "momentum": 0.7, "centered": True, "weight_decay": 0.1},
                 lambda p: torch.optim.RMSprop(p, lr=0.001, eps=1e-3, momentum=0.7, centered=True, weight_decay=0.1)),
    "adagrad": ({"name": "adagrad", "lr": 0.05}, lambda p: torch.optim.Adagrad(p, lr=0.05)),  # the other one that takes sparse gradients
}
OPTIMIZERS_OF = {"batch_norm": ("sgd", "adamw"), "transformer": ("adam", "rmsprop"), "cnn": ("sgd", "centered"),
                 "embedding-sparse": ("sgd", "adagrad")}  # of others: sgd and adam
STRATEGIES = ({"name": "single_device"}, {"name": "data_parallel", "devices": 2}, {"name": "data_parallel", "devices": 3})


def data(case):
    return case.batch(NUM_ROWS, torch.float64, seed=5)


def write_config(folder, case, kind, strategy, optimizer, max_steps):
    library, _, options = model_of(case, kind, folder)
    files = {"format": "safetensors", "inputs": "data.safetensors", "targets": "data.safetensors", "batch_size": BATCH_SIZE}
    model = {"kind": "torchscript", "path": options["path"], "options": {"loss": case.loss}} if kind == "torchscript" else {
        "kind": "library", "path": library, "options": options}
    config = {
        "strategy": {"accelerator": "cpu", **strategy}, "precision": "64-true", "seed": 7, "model": model, "optimizer": optimizer,
        "data": {"train": files, "predict": {key: value for key, value in files.items() if key != "targets"}},
        "trainer": {"max_steps": max_steps}, "checkpoint": {"dir": "run"},
    }
    safetensors.torch.save_file(data(case), pathlib.Path(folder, "data.safetensors"))
    path = pathlib.Path(folder, "config.json")
    path.write_text(json.dumps(config))
    return path


def fit(*arguments):
    return load(pathlib.Path(stratagem("fit", write_config(*arguments))["checkpoint"], "weights.safetensors"))


def first_weights(folder, case, kind):
    """What a run of this config starts from: what it has after a step that changes nothing. (Buffers move in it: they start as PyTorch's.)"""
    module = case.module().double()
    found = fit(folder, case, kind, STRATEGIES[0], {"name": "sgd", "lr": 1e-300}, 1)
    return {**module.state_dict(), **{name: found[name] for name, _ in module.named_parameters()}}


def weights_in_python(case, start, optimizer, num_shares, num_steps):
    module = case.module().double()
    module.load_state_dict(start)
    whole = data(case)
    epoch = [{key: tensor[at:at + BATCH_SIZE] for key, tensor in whole.items()} for at in range(0, NUM_ROWS, BATCH_SIZE)]
    for _ in train(case, module, [epoch[step % len(epoch)] for step in range(num_steps)], optimizer(module.parameters()), num_shares):
        pass
    return module.state_dict()


def check_outputs(folder, case, weights):
    """The run that was just made, and its weights."""
    predictions = pathlib.Path(folder, "predictions.safetensors")
    stratagem("predict", pathlib.Path(folder, "config.json"), "--checkpoint", pathlib.Path(folder, "run"), "--output", predictions)
    module = case.module().double().eval()
    module.load_state_dict(weights, strict=True)
    with torch.no_grad():
        return deviation(load(predictions), {"predictions": module(data(case)["inputs"])})


def check(folder, case, kind, num_steps, strategies):
    start = first_weights(folder, case, kind)
    worst, worst_output = 0.0, 0.0
    optimizers = [OPTIMIZERS[name] for name in OPTIMIZERS_OF.get(case.name, ("sgd", "adam"))]
    for (config, optimizer), predicting in zip(optimizers, (strategies[0], strategies[-1])):
        expected = {}
        for strategy in strategies:
            num_shares = strategy.get("devices", 1) if case.is_trained_by_shares else 1
            if num_shares not in expected:
                expected[num_shares] = weights_in_python(case, start, optimizer, num_shares, num_steps)
            found = fit(folder, case, kind, strategy, config, num_steps)
            worst = max(worst, deviation(found, expected[num_shares]))
            if strategy is predicting:
                worst_output = max(worst_output, check_outputs(folder, case, found))
    report(case.name, f"fit, {kind}", worst, 1e-9)
    report(case.name, f"predict, {kind}", worst_output, 1e-12)


def main():
    torch.set_num_threads(1)
    names, kinds, strategies, num_steps = ["batch_norm", "transformer"], ("torchscript", "cpp"), STRATEGIES[::2], 20
    if IS_ALL:
        names, strategies, num_steps = [name for name, case in CASES.items() if not case.has_dropout], STRATEGIES, 100
    for i, name in enumerate(names):
        for kind in kinds if IS_ALL else kinds[i % 2:][:1]:
            with tempfile.TemporaryDirectory() as folder:
                check(folder, CASES[name], kind, num_steps, strategies)
    finish()


if __name__ == "__main__":
    main()
