# SPDX-License-Identifier: Apache-2.0
"""The time of a step: single_device beside PyTorch's eager loop, and data_parallel on one device beside single_device. They take turns in one
process, a few steps each, and ratios are of one round: what else the machine does meets both. PyTorch against itself shows what is left of that.
"""
import math
import time

import torch

from . import models, runs

GOAL = 1.02
STEPS_OF_A_ROUND, MOST_ROUNDS, WARM_UP_STEPS = 5, 40, 8


class Network:
    def __init__(self, make, precision, optimizer, lr, batch, channels_last=False):
        self.make, self.precision, self.optimizer, self.lr, self.batch = make, precision, optimizer, lr, batch
        self.channels_last = channels_last


def network(name, small, free_bytes):
    """In a size that three copies of it fit into the memory that is free."""
    generator = torch.Generator().manual_seed(3)
    if name == "resnet50":
        rows, side, width, classes = (4, 32, 4, 10) if small else (64 if free_bytes > 40e9 else 16, 224, 64, 1000)

        def batch(_):
            inputs = torch.randn(rows, 3, side, side, generator=generator).contiguous(memory_format=torch.channels_last)
            return {"inputs": inputs, "targets": torch.randint(classes, (rows,), generator=generator)}
        return Network(lambda: models.ResNet50(width, classes).to(memory_format=torch.channels_last), "bf16-mixed", "sgd", 1e-3, batch, True)
    rows, length, options = (2, 16, {"vocabulary": 97, "length": 16, "width": 32, "heads": 2, "depth": 2}) if small else \
        (8 if free_bytes > 60e9 else 2, 1024, {})

    def tokens(_):
        drawn = torch.randint(options.get("vocabulary", 50257), (rows, length + 1), generator=generator)
        return {"inputs": drawn[:, :-1].contiguous(), "targets": drawn[:, 1:].contiguous()}
    return Network(lambda: models.Gpt2(**options), "bf16-mixed", "adamw", 1e-4, tokens)


def rounds(contenders, synchronise, ends_at, steps=STEPS_OF_A_ROUND, most=MOST_ROUNDS, clock=time.perf_counter):
    """Seconds per step of each contender, by round; each round begins with another one."""
    order = list(contenders)
    times = {name: [] for name in contenders}
    while len(times[order[0]]) < most and time.monotonic() < ends_at:
        for name in order:
            synchronise()
            began = clock()
            for index in range(steps):
                contenders[name](index)
            synchronise()
            times[name].append((clock() - began) / steps)
        order.append(order.pop(0))
    return times


def median_of(values):
    """The median, with an interval that has it 19 times of 20, by ranks."""
    ordered = sorted(values)
    count = len(ordered)
    spread = 0.98 * math.sqrt(count)
    low, high = max(0, math.floor(count / 2 - spread)), min(count - 1, math.ceil(count / 2 + spread) - 1)
    middle = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
    return {"median": middle, "low": ordered[low], "high": ordered[high]}


def ratio(times, one, other):
    return median_of([a / b for a, b in zip(times[one], times[other])])


PAIRS = (("single_device against PyTorch", "single_device", "PyTorch", GOAL), ("data_parallel on one device against single_device",
         "data_parallel", "single_device", GOAL), ("PyTorch against itself", "PyTorch again", "PyTorch", None))


def lines_of(name, times, is_judged):
    """What is reported of a network's times."""
    milliseconds = {who: {key: round(1e3 * value, 3) for key, value in median_of(values).items()} for who, values in times.items()}
    yield {"name": f"{name}: times", "ok": True, "rounds": len(times["PyTorch"]), "step_ms": milliseconds}
    for text, one, other, goal in PAIRS:
        found = {key: round(value, 4) for key, value in ratio(times, one, other).items()}
        line = {"name": f"{name}: {text}", "ok": True, "ratio": found, "judged": is_judged and goal is not None}
        if goal is not None:
            line["goal"] = goal
            if is_judged and found["median"] > goal:
                line.update(ok=False, text=f"{found['median']:.3f} ({found['low']:.3f} to {found['high']:.3f}); the goal is {goal}")
        yield line


def main(settings, report):
    torch.backends.cudnn.benchmark = True  # of the process: Stratagem's, too
    now = time.monotonic()
    for name, share in (("resnet50", 0.45), ("gpt2-small", 0.9)):
        ends_at = now + share * (settings["ends_at"] - now)
        runs.attempt(f"{name}: the network", report, lambda: take_times(name, ends_at, settings, report))


def take_times(name, ends_at, settings, report):
    accelerator = settings["accelerator"]
    is_cuda = accelerator == "cuda"
    device = "cuda:0" if is_cuda else "cpu"
    made = network(name, not is_cuda, torch.cuda.mem_get_info()[0] if is_cuda else 0)
    given = [runs.on(device, made.batch(number)) for number in range(3)]
    file = models.save(models.made(made.make), f"{settings['folder']}/{name}.pt")
    eager = runs.Eager(models.made(made.make), device, made.precision, made.optimizer, made.lr)
    ours = {strategy: runs.Ours(settings["root"], strategy, accelerator, [0], file, made.precision, made.optimizer, made.lr)
            for strategy in ("single_device", "data_parallel")}
    contenders = {who: (lambda number, run=run: run.step(given[number % len(given)]))
                  for who, run in {"PyTorch": eager, **ours, "PyTorch again": eager}.items()}
    try:
        for contender in contenders.values():
            for number in range(WARM_UP_STEPS if is_cuda else 1):
                contender(number)
        times = rounds(contenders, lambda: runs.synchronise(accelerator), ends_at, *((STEPS_OF_A_ROUND, MOST_ROUNDS) if is_cuda else (2, 3)))
    finally:
        for run in ours.values():
            run.close()
        if is_cuda:
            torch.cuda.empty_cache()
    if len(times["PyTorch"]) < 3:
        return {"ok": False, "text": "no time was left for three rounds"}
    for line in lines_of(name, times, is_cuda):
        report(line)
    return {"ok": True, "rows": len(given[0]["targets"]), "parameters": sum(one.numel() for one in eager.module.parameters())}
