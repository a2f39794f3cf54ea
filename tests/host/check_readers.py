#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""NPZ and safetensors files that Python wrote are trained on as Python means them: a model that writes down its samples gets them. And
Python reads predictions.

usage: check_readers.py STRATAGEM TOY_PLUGIN
"""
import io
import json
import pathlib
import subprocess
import sys
import tempfile

try:
    import numpy
    import safetensors.numpy
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

X, Y = numpy.arange(6, dtype="float32").reshape(2, 3), numpy.array([0, 1])


def fit(folder, file_format, inputs):
    """The samples that a model was trained on, and what stratagem said."""
    trace = folder / "trace"
    trace.unlink(missing_ok=True)
    config = {
        "strategy": {"name": "single_device", "accelerator": "cpu"}, "optimizer": {"name": "sgd", "lr": 1},
        "model": {"kind": "library", "path": sys.argv[2], "options": {"trace": str(trace)}},
        "data": {"train": {"format": file_format, "inputs": inputs}},
    }
    (folder / "config.json").write_text(json.dumps(config))
    result = subprocess.run([sys.argv[1], "fit", folder / "config.json", "--json"], capture_output=True, text=True)
    lines = trace.read_text().splitlines() if trace.exists() else []
    return [[float(value) for value in line.split()] for line in lines], result.returncode, result.stderr


def check(folder, file_format, inputs, expected):
    samples, code, errors = fit(folder, file_format, inputs)
    assert code == 0, errors
    assert samples == expected, f"{inputs}: {samples}, not {expected}"


def check_refused(folder, file_format, inputs, part):
    _, code, errors = fit(folder, file_format, inputs)
    assert code == 2 and part in errors, f"{inputs}: {code}, {errors}"


class Pipe(io.RawIOBase):
    """A file that can't seek: the archive's local headers hold no sizes then."""

    def __init__(self, path):
        self.file = open(path, "wb")

    def writable(self):
        return True

    def write(self, data):
        return self.file.write(data)

    def close(self):
        self.file.close()


def check_npz(folder):
    for save in (numpy.savez, numpy.savez_compressed):
        for to_pipe in (False, True):
            path = folder / "data.npz"
            if to_pipe:
                pipe = Pipe(path)
                save(pipe, x=X, y=Y)
                pipe.close()
            else:
                save(path, x=X, y=Y)
            check(folder, "npz", {"path": "data.npz", "name": "x"}, X.tolist())
            check(folder, "npz", {"path": "data.npz", "name": "y"}, [[0.0], [1.0]])
    check_refused(folder, "npz", "data.npz", "which array of")
    check_refused(folder, "npz", {"path": "data.npz", "name": "xs"}, 'did you mean "x"? Available: x, y')
    whole = (folder / "data.npz").read_bytes()
    (folder / "cut.npz").write_bytes(whole[:-30])
    check_refused(folder, "npz", {"path": "cut.npz", "name": "x"}, "cut.npz")
    numpy.savez(folder / "data.npz", x=X, y=Y)
    stored = (folder / "data.npz").read_bytes()
    at = stored.index(X.tobytes())
    (folder / "changed.npz").write_bytes(stored[:at] + b"\x01" + stored[at + 1:])
    check_refused(folder, "npz", {"path": "changed.npz", "name": "x"}, "check sum is wrong")
    (folder / "text.npz").write_text("no archive")
    check_refused(folder, "npz", "text.npz", "is no NPZ file")
    numpy.savez(folder / "one.npz", X)
    check(folder, "npz", "one.npz", X.tolist())
    numpy.savez(folder / "named.npz", other=Y, inputs=X)
    check(folder, "npz", "named.npz", X.tolist())
    numpy.savez(folder / "objects.npz", x=numpy.array([{}, None]))
    check_refused(folder, "npz", "objects.npz", "objects.npz: x.npy")


def check_safetensors(folder):
    safetensors.numpy.save_file({"x": X, "inputs": X + 1}, folder / "data.safetensors")
    check(folder, "safetensors", {"path": "data.safetensors", "name": "x"}, X.tolist())
    check(folder, "safetensors", "data.safetensors", (X + 1).tolist())
    check_refused(folder, "safetensors", {"path": "data.safetensors", "name": "y"}, 'no array "y"')
    (folder / "text.safetensors").write_text("nothing of the kind")
    check_refused(folder, "safetensors", "text.safetensors", "text.safetensors")


def check_predictions(folder):
    """What `predict` writes is what Python reads."""
    numpy.save(folder / "x.npy", X)
    files = {"format": "npy", "inputs": "x.npy", "batch_size": 2}
    config = {
        "strategy": {"name": "single_device", "accelerator": "cpu"}, "optimizer": {"name": "sgd", "lr": 1},
        "model": {"kind": "library", "path": sys.argv[2]}, "data": {"train": files, "predict": files}, "checkpoint": {"dir": "run"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    subprocess.run([sys.argv[1], "fit", folder / "config.json"], check=True, stdout=subprocess.DEVNULL)
    for name, load in (("p.npz", numpy.load), ("p.safetensors", safetensors.numpy.load_file)):
        subprocess.run([sys.argv[1], "predict", folder / "config.json", "--checkpoint", folder / "run", "--output", folder / name],
                       check=True, stdout=subprocess.DEVNULL)
        arrays = dict(load(folder / name))
        assert arrays.keys() == {"x", "boxes.0"}, arrays.keys()
        for key, array in arrays.items():
            assert array.dtype == X.dtype and numpy.array_equal(array, X), f"{name}, {key}: {array}"


def main():
    with tempfile.TemporaryDirectory() as name:
        check_npz(pathlib.Path(name))
        check_safetensors(pathlib.Path(name))
        check_predictions(pathlib.Path(name))


if __name__ == "__main__":
    main()
