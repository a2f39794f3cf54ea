# SPDX-License-Identifier: Apache-2.0
"""What a step makes the host wait for: the CUDA runtime's calls in a trace of some steps, of every thread of the process, by PyTorch's profiler.
And once more with LibTorch told to throw at whatever synchronises (it knows of fewer, and says which operator). The trace of a loop that reads
its loss shows first that waits are seen here."""
import json
import pathlib

import torch

from . import models, runs, timing

STEPS = 4
WINDOW = "steps that are looked at"
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cuStreamSynchronize",
         "cuCtxSynchronize", "cuEventSynchronize")
ALLOCATIONS = ("cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaMallocHost", "cudaFreeHost", "cudaHostRegister", "cuMemCreate", "cuMemMap")
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")


def count(trace):
    """Of a Chrome trace: calls of the driver and the runtime inside the window, by kind."""
    events = trace["traceEvents"]
    windows = [event for event in events if event.get("name") == WINDOW and event.get("cat") == "user_annotation"]
    begin, end = windows[0]["ts"], windows[0]["ts"] + windows[0]["dur"]
    counts = {"waits": {}, "allocations": {}, "launches": 0}
    for event in events:
        if event.get("cat") not in ("cuda_runtime", "cuda_driver") or not begin <= event["ts"] <= end:
            continue
        name = event["name"].split("_v")[0]
        if name in LAUNCHES:
            counts["launches"] += 1
        for kind, names in (("waits", WAITS), ("allocations", ALLOCATIONS)):
            if name in names:
                counts[kind][name] = counts[kind].get(name, 0) + 1
    return counts


def traced(step, accelerator, file):
    activities = [torch.profiler.ProfilerActivity.CPU]
    if accelerator == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    runs.synchronise(accelerator)
    with torch.profiler.profile(activities=activities) as profile:
        with torch.profiler.record_function(WINDOW):
            for _ in range(STEPS):
                step()
        runs.synchronise(accelerator)
    profile.export_chrome_trace(str(file))
    return count(json.loads(file.read_text()))


def without_waiting(step):
    """What LibTorch says when it throws at a synchronisation; None if it doesn't."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(STEPS):
            step()
    except Exception as error:
        return str(error)[:500]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return None


def look(step, accelerator, folder, expects_waits=False):
    for _ in range(6 if accelerator == "cuda" else 1):
        step()
    counts = traced(step, accelerator, folder / "trace.json")
    line = {"ok": True, "steps": STEPS, **counts}
    if accelerator == "cuda":
        text = judged(counts, expects_waits, None if expects_waits else without_waiting(step))
        line.update(ok=not text, **({"text": text} if text else {}))
    return line


def judged(counts, expects_waits, error):
    """What is wrong with them."""
    if counts["launches"] == 0:
        return "the trace shows no launch: PyTorch's profiler doesn't work here (CUPTI), nothing is known"
    if expects_waits:
        seen = sum(counts["waits"].values()) >= STEPS
        return "" if seen else "the loss was read at each step, and the trace doesn't show it: nothing is known"
    found = [f"{number} x {name}" for kind in ("waits", "allocations") for name, number in counts[kind].items()]
    return "; ".join([*([f"in {STEPS} steps: {', '.join(found)}"] if found else []), *([f"LibTorch: {error}"] if error else [])])


def main(settings, report):
    for name in ("gpt2-small", "resnet50"):
        runs.attempt(f"{name}: the network", report, lambda: look_at_network(name, settings, report))


def look_at_network(name, settings, report):
    accelerator, folder = settings["accelerator"], pathlib.Path(settings["folder"])
    device = "cuda:0" if accelerator == "cuda" else "cpu"
    network = timing.network(name, True, 0)  # small: what a step waits for doesn't depend on it
    host = network.batch(0)
    batch = runs.on(device, host)
    if accelerator == "cuda":
        host = {key: tensor.pin_memory() for key, tensor in host.items()}  # where DLPack says so; else they are staged
    eager = runs.Eager(models.made(network.make), device, network.precision, network.optimizer, network.lr)
    runs.attempt(f"{name}: PyTorch, with its loss read at each step", report,
                 lambda: look(lambda: eager.step(batch).item(), accelerator, folder, expects_waits=True))
    file = models.save(models.made(network.make), folder / f"syncs-{name}.pt")

    def look_at(strategy, devices, given):
        ours = runs.Ours(settings["root"], strategy, accelerator, devices, file, network.precision, network.optimizer, network.lr)
        try:
            return look(lambda: ours.step(given), accelerator, folder)
        finally:
            ours.close()

    for strategy, devices in (("single_device", [0]), ("data_parallel", [0]), ("data_parallel", [0, 0])):
        for place, given in (("on the GPU", batch), ("in host memory", host)):
            runs.attempt(f"{name}: {strategy} on {devices}, batches {place}", report, lambda: look_at(strategy, devices, given))
    return {"ok": True}
