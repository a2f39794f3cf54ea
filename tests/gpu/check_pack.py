#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A pack of this build: small, without a word of where it was built, and moved elsewhere it runs. There the CPU stands in for the GPUs, so that
every part runs and all that it must give is there; without a GPU it says what is missing.

usage: check_pack.py BUILD FOREIGN...     FOREIGN: folders that nothing in the pack may name
"""
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

try:
    import torch  # noqa: F401
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

BUILD, FOREIGN = pathlib.Path(sys.argv[1]), sys.argv[2:]
PACK = pathlib.Path(__file__).resolve().with_name("pack.py")


def run(*command, status=0, **options):
    result = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
    assert result.returncode == status, f"{command}: {result.returncode}, not {status}\n{result.stdout}\n{result.stderr}"
    return result


def check(pack, *arguments, status, variables=None):
    """The one JSON that gpu-check prints."""
    environment = {name: value for name, value in os.environ.items() if not re.match("LD_|STRATAGEM_|PYTHONPATH", name)}
    result = run(sys.executable, pack / "gpu-check", *arguments, status=status, cwd="/", env={**environment, **(variables or {})})
    assert result.stdout.count("\n") == 1, result.stdout
    return json.loads(result.stdout), result.stderr


def check_files(pack):
    files = [file for file in pack.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 40e6
    binaries = [file for file in files if file.read_bytes()[:4] == b"\x7fELF"]
    assert {"stratagem", "cuda_test", "libstratagem.so.1", "libstratagem_cuda.so", "single_device.so", "data_parallel.so", "torchscript.so",
            "fashion_cnn.so"} <= {file.name for file in binaries}
    for file in files:
        content = file.read_bytes()
        for place in FOREIGN:
            assert os.fsencode(place) not in content, f"{file} names {place}"
    for file in binaries:
        text = run("readelf", "-dS", "--wide", file).stdout
        assert ".symtab" not in text, f"{file} isn't stripped"
        for path in re.findall(r"R(?:UN)?PATH\).*\[(.*)\]", text):
            assert all(part.startswith("$ORIGIN") for part in path.split(":")), f"{file} looks for libraries in {path}"


def check_run(pack):
    found, said = check(pack, "--accelerator", "cpu", "--limit", "500", status=0)  # others may be at work here
    assert found["status"] == "passed" and found["failures"] == [], said
    assert found["pack"]["torch"] == torch.__version__.split("+")[0]
    assert list(found["parts"]) == ["machine", "tests", "parity", "syncs", "timing"]
    tests = found["parts"]["tests"]
    listed = [case for program in json.loads((pack / "pack.json").read_text())["programs"] for case in program["tests"]]
    assert tests["counts"] == {"passed": len(listed)} and len(listed) > 15, tests
    names = {name: [result["name"] for result in part["results"]] for name, part in found["parts"].items() if name != "tests"}
    for devices in ("single_device on [0],", "data_parallel on [0],", "data_parallel on [0, 0],", "data_parallel on [0, 0, 0],", "data_parallel on [0, 1],",
                    "data_parallel on [0, 1, 0],"):
        for precision in ("64-true", "32-true", "bf16-mixed"):
            assert any(devices in name and precision in name for name in names["parity"]), (devices, precision)
    for result in found["parts"]["parity"]["results"]:
        assert "with several" in result["name"] or result["from the CPU"]["weights"] <= result["from the CPU"]["tolerance"]
    assert sum("from PyTorch" in result for result in found["parts"]["parity"]["results"]) > 20
    for network in ("resnet50", "gpt2-small"):
        assert any(name.startswith(f"{network}: single_device") for name in names["syncs"])
        for pair in ("single_device against PyTorch", "data_parallel on one device against single_device", "PyTorch against itself"):
            assert f"{network}: {pair}" in names["timing"]
    assert found["parts"]["machine"]["doctor"]["schema_version"] == 1


def check_missing(pack, folder):
    """No GPU; LibTorch of another version; none."""
    found, said = check(pack, status=3, variables={"CUDA_VISIBLE_DEVICES": ""})
    assert found["status"] == "unavailable" and "driver" in found["missing"] and found["missing"] in said, found
    other = folder / "other"
    (other / "lib").mkdir(parents=True)
    (other / "version.py").write_text("__version__ = '1.13.1'\n")
    (other / "lib" / "libtorch_cpu.so").write_text("")
    found, _ = check(pack, "--torch", other, status=3)
    assert "1.13.1" in found["missing"] and found["pack"]["torch"] in found["missing"], found
    found, _ = check(pack, status=3, variables={"STRATAGEM_TORCH": "/nowhere"})
    assert "/nowhere" in found["missing"], found


def check_broken(pack):
    """A program of tests that is cut short, and a plugin that is gone."""
    program = pack / "bin" / "cuda_test"
    program.write_text("#!/bin/sh\necho '<Catch><TestCase name=\"one\">' > $4\necho the last words\nexit 139\n")
    found, said = check(pack, "--accelerator", "cpu", "--part", "tests", status=1)
    cases = found["parts"]["tests"]["programs"]["cuda_test"]
    assert cases[0]["status"] == "crashed" and "the last words" in cases[0]["text"], cases
    assert {case["status"] for case in cases[1:]} == {"not run"}, cases
    assert found["status"] == "failed" and "tests: cuda_test: one: crashed" in found["failures"] and "one: crashed" in said
    (pack / "lib" / "stratagem" / "data_parallel.so").unlink()
    found, _ = check(pack, "--accelerator", "cpu", "--part", "parity", status=1)
    results = found["parts"]["parity"]["results"]
    assert all(result["ok"] == ("single_device on" in result["name"] or "with several" in result["name"]) or "data_parallel.so" in result["text"]
               for result in results), results
    assert any("data_parallel.so" in failure for failure in found["failures"])


def main():
    with tempfile.TemporaryDirectory(prefix="stratagem-pack-") as name:
        folder = pathlib.Path(name)
        refused = run(sys.executable, PACK, BUILD, folder / "first", "--limit-mb", "1", status=1)
        assert "the limit is 1 MB" in refused.stderr, refused.stderr
        run(sys.executable, PACK, BUILD, folder / "first")
        pack = (folder / "first").rename(folder / "moved elsewhere")
        check_files(pack)
        check_missing(pack, folder)
        check_run(pack)
        check_broken(pack)


if __name__ == "__main__":
    main()
