#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Safetensors and NPY files against Python's own readers and writers.

usage: check_files.py REWRITE_FILE

Each file is written by Python, read and written again by REWRITE_FILE, and read by Python: it must hold the same.
"""
import pathlib
import subprocess
import sys
import tempfile

try:
    import numpy
    import safetensors
    import safetensors.torch
    import torch
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)


def rewrite(program, source, target):
    result = subprocess.run([program, source, target], stderr=subprocess.PIPE, text=True)
    assert result.returncode == 0, f"{source}: {result.stderr}"


def check_safetensors(program, folder):
    torch.manual_seed(1)
    dtypes = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
              torch.float32, torch.float64, torch.uint16, torch.uint32, torch.uint64, torch.complex64]
    tensors = {}
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        for shape in [(), (0, 3), (5,), (2, 3, 1)]:
            bits = torch.randint(0, 2, shape) if dtype == torch.bool else torch.randint(0, 100, shape)
            tensors[f"{name}.{len(shape)}"] = bits.to(torch.int64).to(dtype)
    tensors["special"] = torch.tensor([float("inf"), float("-inf"), float("nan"), -0.0, 1e-45])
    source = folder / "python.safetensors"
    safetensors.torch.save_file(tensors, source, metadata={"format": "pt", "note": "weiß"})
    target = folder / "checkpoint" / "ours.safetensors"
    rewrite(program, source, target)
    back = safetensors.torch.load_file(target)
    assert back.keys() == tensors.keys(), back.keys() ^ tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype and back[name].shape == tensor.shape, name
        assert torch.equal(back[name].flatten().view(torch.uint8), tensor.flatten().view(torch.uint8)), name
    with safetensors.safe_open(target, "pt") as opened:
        assert opened.metadata() == {"format": "pt", "note": "weiß"}
    return len(tensors)


def check_npy(program, folder):
    generator = numpy.random.default_rng(1)
    num_checked = 0
    for descr in ["|b1", "|i1", "|u1", "<i2", ">i2", "<u2", "<i4", ">i4", "<u4", "<i8", ">i8", "<u8", "<f2", ">f2", "<f4", ">f4",
                  "<f8", ">f8", "<c8", ">c8", "<c16", ">c16"]:
        for shape in [(), (0, 3), (5,), (2, 3), (2, 3, 4)]:
            for order in "CF":
                array = numpy.asarray(generator.integers(0, 2 if descr == "|b1" else 100, shape)).astype(descr, order=order)
                source, target = folder / "python.npy", folder / "ours.npy"
                numpy.save(source, array)
                rewrite(program, source, target)
                back = numpy.load(target)
                assert back.shape == array.shape and back.dtype == array.dtype.newbyteorder("="), (descr, shape, order)
                assert numpy.array_equal(back, array), (descr, shape, order)
                num_checked += 1
    return num_checked


def main():
    program = sys.argv[1]
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        print(f"{check_safetensors(program, folder)} tensors and {check_npy(program, folder)} arrays come back alike")


if __name__ == "__main__":
    main()
