# SPDX-License-Identifier: Apache-2.0
"""What the checks share: PyTorch as the reference, how far a result is from it, and running what is checked.

Each check is called as: check_*.py STRATAGEM STEP_GRADIENTS MODEL_LIBRARY TORCHSCRIPT_PLUGIN [--all]
"""
import contextlib
import json
import pathlib
import subprocess
import sys
import warnings

try:
    import numpy  # noqa: F401
    import safetensors.torch
    import torch
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

warnings.simplefilter("ignore", FutureWarning)  # PyTorch develops TorchScript no further, and says so at each call
STRATAGEM, STEP_GRADIENTS, MODEL_LIBRARY, TORCHSCRIPT_PLUGIN = sys.argv[1:5]
IS_ALL = "--all" in sys.argv


def deviation(found, expected):
    """The largest |found - expected| / max(|expected|, 1e-3 x the norm of all), per tensor, in the 2-norm."""
    assert found.keys() == expected.keys(), f"only one side has {sorted(found.keys() ^ expected.keys())}"
    norms = {name: tensor.double().norm().item() for name, tensor in expected.items()}
    whole = sum(norm ** 2 for norm in norms.values()) ** 0.5
    worst = 0.0
    for name, tensor in expected.items():
        assert found[name].shape == tensor.shape, f"{name}: {found[name].shape}, not {tensor.shape}"
        difference = (found[name].double() - tensor.double()).norm().item()
        assert difference == difference, f"{name} has a NaN"
        if difference > 0:
            worst = max(worst, difference / max(norms[name], 1e-3 * whole))
    return worst


def split(batch, num_shares):
    """Balanced: sizes differ by at most one, the larger ones come first, and none is empty."""
    num_rows = len(batch["inputs"])
    parts = {key: torch.tensor_split(tensor, min(num_shares, num_rows)) for key, tensor in batch.items()}
    return [dict(zip(parts, tensors)) for tensors in zip(*parts.values())]


def buffers_of(module):
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def is_finite(gradients):
    return all(gradient.isfinite().all() for gradient in gradients.values())


def autocast(dtype):
    return contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)


def gradients_of(case, module, batch, num_shares=1, autocast_dtype=None, scale=1.0, generators=None):
    """The mean gradient over the batch's rows, and the first share's loss: shares one after the other, of whose buffers the first one's
    are kept. `generators`: the states of the shares' generators, which move on."""
    shares = split(batch, num_shares)
    start = buffers_of(module)
    total, kept, losses = {}, None, []
    for index, share in enumerate(shares):
        for name, buffer in module.named_buffers():
            buffer.copy_(start[name])
        module.zero_grad()
        if generators is not None:
            torch.set_rng_state(generators[index])
        with autocast(autocast_dtype):
            loss = case.loss_of(module, share)
        (loss * scale).backward()
        if generators is not None:
            generators[index] = torch.get_rng_state()
        if index == 0:
            kept = buffers_of(module)
        weight = len(share["inputs"]) / len(batch["inputs"])
        losses.append(weight * loss.item())
        for name, parameter in module.named_parameters():
            if parameter.grad is None:
                continue
            gradient = parameter.grad.detach().to_dense().double() / scale
            total[name] = total.get(name, 0) + weight * gradient
    for name, buffer in module.named_buffers():
        buffer.copy_(kept[name])
    return total, sum(losses)


def train(case, module, batches, optimizer, num_shares=1):
    """Trains `module` in place, and tells for each step what it started from."""
    for batch in batches:
        yield {name: tensor.clone() for name, tensor in module.state_dict().items()}
        total, _ = gradients_of(case, module, batch, num_shares)
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                gradient = total[name].to(parameter.dtype)
                parameter.grad = gradient.to_sparse(1) if parameter.grad.is_sparse else gradient
        optimizer.step()


# --- running what is checked


def model_of(case, kind, folder):
    """Library, name and options of a case's model: "cpp", or "torchscript" from a file in `folder`."""
    if kind == "cpp":
        return MODEL_LIBRARY, "oracle_models", case.options
    path = pathlib.Path(folder, f"{case.name}.pt")
    if not path.exists():
        torch.jit.script(case.module()).save(path)
    return TORCHSCRIPT_PLUGIN, "torchscript", {"path": str(path), "loss": case.loss}


def run(*command):
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert result.returncode == 0, f"{' '.join(map(str, command))}\n{result.stderr}"
    return result.stdout


def stratagem(*words):
    """What `stratagem WORDS... --json` says in its last line."""
    return json.loads(run(STRATAGEM, *words, "--json").splitlines()[-1])


def load(path):
    return safetensors.torch.load_file(path)


failures = []


def report(name, what, worst, limit):
    print(f"{name:20} {what:16} largest deviation {worst:.1e} of {limit:.0e} allowed", flush=True)
    if not worst <= limit:
        failures.append(f"{name}, {what}: {worst:.3e} is over {limit:.0e}")


def finish():
    """After all reports, so that one that fails hides no other."""
    assert not failures, "\n".join(failures)
