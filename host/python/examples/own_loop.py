# SPDX-License-Identifier: Apache-2.0
import sys

import stratagem
import torch

config = {
    "strategy": {"name": "data_parallel", "accelerator": "cpu", "devices": 2},
    "model": {"kind": "library", "path": sys.argv[1], "options": {"pixels": 4, "classes": 2}},
    "optimizer": {"name": "sgd", "lr": 0.5},
}
inputs = torch.randint(0, 256, (64, 4), dtype=torch.uint8)
targets = (inputs[:, 0] > 127).long()

with stratagem.Session(config, own_loop=True, convert=stratagem.Tensor.torch) as session:
    strategy = session.strategy
    for step in range(200):
        result = strategy.training_step({"inputs": inputs, "targets": targets}, global_step=step)
        strategy.backward()
        strategy.optimizer_step(lr=0.5, clip_norm=1.0)
    print(f"loss {result.outputs:.3f}")
    weight = strategy.export_state()["model"]["linear.weight"]  # a torch.Tensor over the strategy's own memory
    print(tuple(weight.shape))
