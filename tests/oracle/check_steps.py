#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The gradients of single steps, each from the weights that PyTorch's run has there, against PyTorch's own: by a plain loop (over the same
shares, where samples interact or random numbers are drawn), and by DistributedDataParallel with a process per device where shares are equal.

usage: see oracle.py; --all: every model and precision, over 100 steps of each kind of batch
"""
import os
import pathlib
import sys
import tempfile

sys.path.insert(0, os.path.dirname(__file__))
from oracle import *  # noqa: F403 (first: it skips where there is no torch)
from models import CASES  # noqa: E402
import torch.distributed  # noqa: E402

UNEVEN, EVEN = (7, 5, 8, 2), (6, 12)  # rows of a batch


class Precision:
    def __init__(self, dtype, tolerance, autocast_dtype=None, scale=1.0):
        self.dtype, self.tolerance, self.autocast_dtype, self.scale = dtype, tolerance, autocast_dtype, scale


PRECISIONS = {
    "64-true": Precision(torch.float64, 1e-12),
    "32-true": Precision(torch.float32, 1e-5),
    "bf16-mixed": Precision(torch.float32, 1e-2, torch.bfloat16),
    "16-mixed": Precision(torch.float32, 3e-3, torch.float16, 65536.0),
}
STRATEGIES = (("single_device", 1), ("data_parallel", 2), ("data_parallel", 3))


def batches_of(case, dtype, num_steps):
    """Uneven batches, then even ones, `num_steps` of each."""
    sizes = [UNEVEN[i % len(UNEVEN)] for i in range(num_steps)] + [EVEN[i % len(EVEN)] for i in range(num_steps)]
    return [case.batch(size, dtype, seed) for seed, size in enumerate(sizes)]


class Trajectory:
    """A run in PyTorch: batches, and the weights that each step starts from."""

    def __init__(self, case, dtype, num_steps):
        self.batches = batches_of(case, dtype, num_steps)
        module = case.module().to(dtype)
        self.weights = list(train(case, module, self.batches, torch.optim.SGD(module.parameters(), lr=0.1)))

    def write(self, path):
        tensors = {}
        for step, (weights, batch) in enumerate(zip(self.weights, self.batches)):
            tensors.update({f"{step}/model/{name}": tensor for name, tensor in weights.items()})
            tensors.update({f"{step}/batch/{name}": tensor.contiguous() for name, tensor in batch.items()})
        safetensors.torch.save_file(tensors, path)


class Found:
    """What step_gradients wrote."""

    def __init__(self, path):
        self.generators, self.steps = {}, {}
        for name, tensor in load(path).items():
            where, _, rest = name.partition("/")
            if where == "generators":
                self.generators[int(rest)] = tensor
                continue
            step = self.steps.setdefault(int(where), {"gradients": {}, "model": {}})
            kind, _, key = rest.partition("/")
            if kind == "loss":
                step["loss"] = tensor
            else:
                step[kind][key] = tensor


def reference(case, precision, trajectory, num_shares, generators=None):
    """For each step the gradients, the loss and the buffers after it."""
    module = case.module().to(precision.dtype)
    scale = precision.scale
    for weights, batch in zip(trajectory.weights, trajectory.batches):
        while True:
            module.load_state_dict(weights)
            tried = generators and list(generators)
            gradients, loss = gradients_of(case, module, batch, num_shares, precision.autocast_dtype, scale, tried)
            if is_finite(gradients):
                break
            scale /= 2  # as torch.amp.GradScaler, which would take the next batch then
        generators = tried
        yield gradients, loss, buffers_of(module)


def compare(found, expected, first_step=0):
    """The largest deviation over the steps."""
    worst = 0.0
    for step, (gradients, loss, buffers) in enumerate(expected, first_step):
        here = found.steps[step]
        worst = max(worst, deviation(here["gradients"], gradients), deviation({"loss": here["loss"]}, {"loss": torch.tensor(loss, dtype=torch.float64)}),
                    *(deviation({name: here["model"][name]}, {name: buffer}) for name, buffer in buffers.items()))
    return worst


# --- DistributedDataParallel


def ddp_worker(rank, num_processes, folder, jobs):
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/ddp-{num_processes}", rank=rank, world_size=num_processes)
    for case_name, precision_name in jobs:
        case, precision = CASES[case_name], PRECISIONS[precision_name]
        batches, weights = torch.load(pathlib.Path(folder, f"{case_name}-{precision.dtype}.pt"))
        module = case.module().to(precision.dtype)
        ddp = torch.nn.parallel.DistributedDataParallel(module)
        results, scale = [], precision.scale
        for step in range(len(batches) // 2, len(batches)):
            share = split(batches[step], num_processes)[rank]
            while True:
                module.load_state_dict(weights[step])
                ddp.zero_grad()
                with autocast(precision.autocast_dtype):
                    loss = case.loss_of(ddp, share)
                (loss * scale).backward()
                gradients = {name: p.grad.detach().to_dense().double() / scale for name, p in module.named_parameters()}
                if is_finite(gradients):
                    break
                scale /= 2
            mean_loss = loss.detach().double() / num_processes
            torch.distributed.all_reduce(mean_loss)
            results.append((gradients, mean_loss.item(), buffers_of(module)))
        if rank == 0:
            torch.save(results, pathlib.Path(folder, f"ddp-{case_name}-{precision_name}-{num_processes}.pt"))
    torch.distributed.destroy_process_group()


def run_ddp(folder, jobs, device_counts):
    for num_processes in device_counts:
        torch.multiprocessing.spawn(ddp_worker, (num_processes, folder, jobs), nprocs=num_processes)


# --- the check


def why_not(case, precision):
    """What PyTorch says where it can't run the network in this precision on this CPU; None where it can."""
    try:
        gradients_of(case, case.module().to(precision.dtype), case.batch(2, precision.dtype, 0), 1, precision.autocast_dtype)
    except RuntimeError as error:
        return str(error).splitlines()[0]


def check_refused(folder, case, precision_name, trajectory, reason):
    """The strategy hands on what LibTorch says."""
    library, model, options = model_of(case, "cpp", folder)
    batches = pathlib.Path(folder, "in.safetensors")
    trajectory.write(batches)
    config = {"precision": precision_name}
    result = subprocess.run([STEP_GRADIENTS, "data_parallel", json.dumps(config), library, model, json.dumps(options), batches, batches],
                            capture_output=True, text=True)
    assert result.returncode == 1 and reason[:60] in result.stderr, f"PyTorch says {reason!r}; ours: {result.stderr}"
    print(f"{case.name:20} {precision_name:16} can't be run by this LibTorch on this CPU: {reason[:60]}...", flush=True)


def check(folder, case, precision_name, trajectory, strategies, kinds):
    precision = PRECISIONS[precision_name]
    batches = pathlib.Path(folder, "in.safetensors")
    trajectory.write(batches)
    expected, worst, worst_to_ddp, worst_to_whole = {}, 0.0, 0.0, 0.0
    for strategy, num_devices in strategies:
        # What is rounded to bfloat16 differs with the split, so there, too, the reference takes the same shares.
        num_shares = num_devices if case.is_trained_by_shares or precision.autocast_dtype else 1
        for kind in kinds:
            library, model, options = model_of(case, kind, folder)
            out = pathlib.Path(folder, "out.safetensors")
            config = {"devices": num_devices, "threads": num_devices, "precision": precision_name, "seed": 3}
            run(STEP_GRADIENTS, strategy, json.dumps(config), library, model, json.dumps(options), batches, out)
            found = Found(out)
            generators = [found.generators[i] for i in range(num_devices)] if case.has_dropout else None
            if num_shares not in expected:
                expected[num_shares] = list(reference(case, precision, trajectory, num_shares, generators))
            worst = max(worst, compare(found, expected[num_shares]))
            if num_shares > 1 and not case.is_trained_by_shares:
                worst_to_whole = max(worst_to_whole, compare(found, expected[1]))
            if num_devices > 1 and not case.has_dropout:
                by_ddp = torch.load(pathlib.Path(folder, f"ddp-{case.name}-{precision_name}-{num_devices}.pt"))
                worst_to_ddp = max(worst_to_ddp, compare(found, by_ddp, len(trajectory.batches) // 2))
    report(case.name, precision_name, worst, precision.tolerance)
    if worst_to_whole > 0:
        print(f"{case.name:20} {precision_name:16} differs by {worst_to_whole:.1e} from the batch in one piece, as PyTorch's shares do")
    if not case.has_dropout:
        report(case.name, precision_name + ", DDP", worst_to_ddp, precision.tolerance)


def main():
    torch.set_num_threads(1)
    kinds = {"mlp": ["cpp"], "batch_norm": ["torchscript"], "transformer-dropout": ["cpp"]}
    precisions, strategies, num_steps = list(PRECISIONS), STRATEGIES[:2], 8
    if IS_ALL:
        kinds, strategies, num_steps = dict.fromkeys(CASES, ["cpp", "torchscript"]), STRATEGIES, 100
    with tempfile.TemporaryDirectory() as folder:
        trajectories = {}
        for name in kinds:
            for dtype in {PRECISIONS[precision].dtype for precision in precisions}:
                trajectories[name, dtype] = Trajectory(CASES[name], dtype, num_steps)
                torch.save((trajectories[name, dtype].batches, trajectories[name, dtype].weights), pathlib.Path(folder, f"{name}-{dtype}.pt"))
        reasons = {(name, precision): why_not(CASES[name], PRECISIONS[precision]) for name in kinds for precision in precisions}
        run_ddp(folder, [job for job, reason in reasons.items() if reason is None and not CASES[job[0]].has_dropout],
                [num_devices for _, num_devices in strategies if num_devices > 1])
        for (name, precision), reason in reasons.items():
            trajectory = trajectories[name, PRECISIONS[precision].dtype]
            if reason is None:
                check(folder, CASES[name], precision, trajectory, strategies, kinds[name])
            else:
                check_refused(folder, CASES[name], precision, trajectory, reason)
    finish()


if __name__ == "__main__":
    main()
