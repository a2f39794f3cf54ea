#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a call costs from Python, in nanoseconds: the best and the median of several rounds, one JSON object per line.

usage: overhead.py SINGLE_DEVICE.so DATA_PARALLEL.so MODEL.so [ROUNDS]

The model is one of next to no work, such as tests/host/toy_model. `bare` is a call by ctypes of a C function that does nothing.
"""
import array
import json
import statistics
import sys
import time

import stratagem
from stratagem._library import function


def measure(call, rounds):
    """(best, median) of one call; the number of calls in a round makes it last some milliseconds."""
    call()
    started = time.perf_counter_ns()
    call()
    num_calls = max(1, 5_000_000 // max(1, time.perf_counter_ns() - started))
    found = []
    for _ in range(rounds):
        started = time.perf_counter_ns()
        for _ in range(num_calls):
            call()
        found.append((time.perf_counter_ns() - started) / num_calls)
    return {"best_ns": round(min(found)), "median_ns": round(statistics.median(found))}


def tell(what, strategy, call, rounds):
    print(json.dumps({"language": "python", "strategy": strategy, "what": what, **measure(call, rounds)}), flush=True)


def main(single_device, data_parallel, model, rounds=21):
    close = function("stg_session_close")
    tell("bare", None, lambda: close(0), int(rounds))
    for path, num_devices in ((single_device, 1), (data_parallel, 2)):
        plugin = stratagem.Plugin(path)
        name = f"{plugin.strategies[0]}({num_devices})"
        with stratagem.Strategy(plugin, config={"accelerator": "cpu", "devices": num_devices, "optimizer": {"name": "sgd", "lr": 1}}) as strategy:
            strategy.setup(stratagem.Plugin(model).model())
            batch = {key: array.array("f", range(8)) for key in ("inputs", "targets", "weights")}
            step = {"inputs": array.array("f", [0, 0])}
            try:
                import numpy
                arrays = {key: numpy.asarray(value) for key, value in batch.items()}
            except ImportError:
                arrays = batch
            tell("barrier", name, strategy.barrier, int(rounds))
            tell("batch_to_device of 3 tensors", name, lambda: strategy.batch_to_device(arrays), int(rounds))
            tell("empty training_step", name, lambda: strategy.training_step(step), int(rounds))


if __name__ == "__main__":
    main(*sys.argv[1:])
