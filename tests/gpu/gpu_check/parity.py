# SPDX-License-Identifier: Apache-2.0
"""Losses and weights of one training on GPUs, by each strategy and list of devices: against the CPU's, and against PyTorch's on the first GPU."""
import copy
import math

import torch

from . import models, runs

NUM_BATCHES, PASSES = 4, 2
NUM_ROWS = 13  # no multiple of 2 or 3
LRS = {"sgd": 0.05, "adamw": 0.01, "sharded adamw": 0.01}
# How far weights, in the 2-norm, and losses may be: from the CPU's and from PyTorch's. After bfloat16 the CPU's kernels round at other places.
TOLERANCES = {"64-true": (1e-9, 1e-9), "32-true": (2e-4, 2e-4), "bf16-mixed": (5e-2, 2e-2)}
NETWORKS = {"mlp": (models.Mlp, (12,)), "cnn": (models.Cnn, (3, 8, 8))}


def cases(num_gpus):
    """(network, strategy, devices, precision, optimizer); an optimizer may be sharded over the GPUs."""
    lists = [[0], [0, 0], [0, 0, 0]]
    if num_gpus > 1:
        lists.append(list(range(num_gpus)))
        lists.append([*range(num_gpus), 0])
    for precision in TOLERANCES:
        for network in NETWORKS:
            yield network, "single_device", [0], precision, "sgd"
            for devices in lists:
                yield network, "data_parallel", devices, precision, "sgd"
        yield "mlp", "single_device", [0], precision, "adamw"
        yield "mlp", "data_parallel", [0, 0, 0], precision, "adamw"
        for devices in lists[3:]:
            yield "mlp", "data_parallel", devices, precision, "adamw"
            yield "mlp", "data_parallel", devices, precision, "sharded adamw"


def batches(network, dtype):
    """Rows whose class is to be seen in their mean."""
    generator = torch.Generator().manual_seed(7)
    shape, made = NETWORKS[network][1], []
    for _ in range(NUM_BATCHES):
        targets = torch.randint(5, (NUM_ROWS,), generator=generator)
        inputs = torch.randn(NUM_ROWS, *shape, generator=generator, dtype=torch.float64) + (targets - 2).view(-1, *(1 for _ in shape))
        made.append({"inputs": inputs.to(dtype), "targets": targets})
    return PASSES * made


def deviation(found, expected):
    """The largest |found - expected| / max(|expected|, 1e-3 x the norm of all), by tensor."""
    if found.keys() != expected.keys():
        return math.inf
    floats = {name: tensor.double() for name, tensor in expected.items() if tensor.is_floating_point()}
    whole = math.sqrt(sum(tensor.norm().item() ** 2 for tensor in floats.values()))
    return largest((found[name].double() - tensor).norm().item() / max(tensor.norm().item(), 1e-3 * whole) for name, tensor in floats.items())


def deviation_of_losses(found, expected):
    return largest(abs(one - other) / max(abs(other), 1e-3) for one, other in zip(found, expected))


def largest(deviations):
    """Infinite, where one is no number."""
    return max((math.inf if math.isnan(one) else one for one in deviations), default=math.inf)


def train(run, batches_of):
    losses = [run.step(batch) for batch in batches_of]  # read when all are under way
    result = [float(loss) for loss in losses], run.weights()
    run.close()
    return result


def main(settings, report):
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False  # of the process: Stratagem's, too
    accelerator = settings["accelerator"]
    device = "cuda:0" if accelerator == "cuda" else "cpu"
    num_gpus = torch.cuda.device_count() if accelerator == "cuda" else 2
    report({"name": "with several devices", "ok": True, "text": f"{num_gpus}" if num_gpus > 1 else "not run: there is one GPU"})
    known = {}

    def once(key, make):
        if key not in known:
            known[key] = make()
        return known[key]

    def compare(network, strategy, devices, precision, optimizer):
        dtype = torch.float64 if precision == "64-true" else torch.float32
        module = models.made(NETWORKS[network][0]).to(dtype)
        file = once((network, dtype), lambda: models.save(module, f"{settings['folder']}/{network}-{precision}.pt"))
        given = batches(network, dtype)

        def ours(strategy, accelerator):
            return train(runs.Ours(settings["root"], strategy, accelerator, devices, file, precision, optimizer, LRS[optimizer]), given)

        def eager():
            return train(runs.Eager(copy.deepcopy(module), device, precision, optimizer, LRS[optimizer]), [runs.on(device, batch) for batch in given])

        on_devices = ours(strategy, accelerator)
        on_cpu = once(("cpu", network, len(devices), precision, optimizer), lambda: ours("data_parallel", "cpu"))
        results = {"from the CPU": (on_cpu, TOLERANCES[precision][0])}
        if network != "cnn" or len(devices) == 1:  # a batch norm sees its replica's rows
            results["from PyTorch"] = (once(("eager", network, precision, optimizer), eager), TOLERANCES[precision][1])
        return judged(on_devices, results)

    for case in cases(num_gpus):
        network, strategy, devices, precision, optimizer = case
        runs.attempt(f"{network}, {strategy} on {devices}, {precision}, {optimizer}", report, lambda: compare(*case))


def judged(found, results):
    first, last = sum(found[0][:NUM_BATCHES]), sum(found[0][-NUM_BATCHES:])
    line = {"ok": True, "first_losses": first, "last_losses": last}
    if not last < 0.97 * first:
        line.update(ok=False, text="the losses have not become smaller")
    for of, (expected, tolerance) in results.items():
        losses, weights = deviation_of_losses(found[0], expected[0]), deviation(found[1], expected[1])
        line[of] = {"losses": losses, "weights": weights, "tolerance": tolerance}
        if not (losses <= tolerance and weights <= tolerance):
            line.update(ok=False, text=f"{of}: losses differ by {losses:.1e}, weights by {weights:.1e}; {tolerance:.0e} is allowed")
    return line
