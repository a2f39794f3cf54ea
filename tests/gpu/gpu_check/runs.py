# SPDX-License-Identifier: Apache-2.0
"""The same training by Stratagem, in this process, and by PyTorch: a step each, without anything read."""
import contextlib
import pathlib
import time
import time

import stratagem
import torch

SGD = ({"name": "sgd", "momentum": 0.9}, lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9, fused=True))
ADAMW = ({"name": "adamw", "weight_decay": 0.01}, lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr, weight_decay=0.01, fused=True))
OPTIMIZERS = {"sgd": SGD, "adamw": ADAMW, "sharded adamw": ADAMW}


class Ours:
    """A strategy with a model from a TorchScript file. `devices`: indices of GPUs; on the CPU as many logical devices."""

    def __init__(self, root, strategy, accelerator, devices, model_file, precision, optimizer, lr):
        folder = pathlib.Path(root, "lib", "stratagem")
        config = {"accelerator": accelerator, "devices": devices if accelerator == "cuda" else len(devices), "precision": precision,
                  "optimizer": OPTIMIZERS[optimizer][0]}
        if optimizer.startswith("sharded"):
            config["options"] = {"optimizer_sharding": True}
        if accelerator == "cpu":
            config["threads"] = max(len(devices), torch.get_num_threads())
        self.strategy = stratagem.Strategy(stratagem.Plugin(folder / f"{strategy}.so"), strategy, config, convert=stratagem.Tensor.torch)
        self.strategy.setup(stratagem.Plugin(folder / "torchscript.so").model("torchscript", {"path": str(model_file)}))
        self.lr = lr

    def step(self, batch):
        """The loss, a tensor that may not have been computed yet."""
        return self.strategy.train_batch(batch, self.lr)[0].outputs

    def weights(self):
        return {name: tensor.cpu() for name, tensor in self.strategy.export_state(copy=True)["model"].items()}

    def close(self):
        self.strategy.close()


class Eager:
    """PyTorch's own loop."""

    def __init__(self, module, device, precision, optimizer, lr):
        self.module = module.to(device).train()
        self.optimizer = OPTIMIZERS[optimizer][1](self.module.parameters(), lr)
        self.autocast = torch.autocast(torch.device(device).type, torch.bfloat16) if precision == "bf16-mixed" else contextlib.nullcontext()

    def step(self, batch):
        with self.autocast:
            loss = self.module.training_step(batch["inputs"], batch["targets"])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def weights(self):
        return {name: tensor.cpu() for name, tensor in self.module.state_dict().items()}

    def close(self):
        pass


def on(device, batch):
    return {key: tensor.to(device) for key, tensor in batch.items()}


def synchronise(accelerator):
    if accelerator == "cuda":
        for index in range(torch.cuda.device_count()):
            torch.cuda.synchronize(index)


def attempt(name, report, make):
    """Reports the line that `make` gives; an exception is a result, too, and the next one gets its turn."""
    began = time.monotonic()
    try:
        line = make()
    except Exception as error:
        line = {"ok": False, "text": f"{type(error).__name__}: {error}"[:1500]}
    report({"name": name, **line, "seconds": round(time.monotonic() - began, 2)})
