#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes a folder of a build that can be carried to a machine with a GPU and checked there: programs, plugins, the tests labelled cuda, the Python
host and gpu-check. Nothing in it knows where it was built; LibTorch's place is given where it runs.

usage: pack.py BUILD FOLDER [--limit-mb MB]

The texts of LibTorch's own assertions name its headers by where they lay in the build. There, and only there, the folder is overwritten.
"""
import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

SOURCE = pathlib.Path(__file__).resolve().parent.parent.parent
LIMIT_MB = 40
PLUGINS = ("single_device", "data_parallel", "torchscript", "fashion_cnn", "libstratagem_cuda")
# Any system with Python's torch has these. Of what else our files need, their packages' copies go along.
OF_THE_SYSTEM = re.compile(r"(ld-linux-x86-64|libc|libm|libdl|librt|libpthread|libgcc_s|libstdc\+\+)\.so")


def fail(text):
    sys.exit(f"pack: {text}")


def ask(*command):
    result = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)
    if result.returncode != 0:
        fail(f"{' '.join(map(str, command))} ended with {result.returncode}: {result.stderr.strip()}")
    return result.stdout


class Build:
    def __init__(self, folder):
        self.folder = folder
        cache = folder / "CMakeCache.txt"
        if not cache.exists():
            fail(f"{folder} is no build folder: it has no CMakeCache.txt")
        self.settings = dict(re.findall(r"^([\w-]+):\w+=(.*)$", cache.read_text(), re.MULTILINE))
        self.torch = self.settings["STRATAGEM_TORCH_VERSION"]
        self.torch_folder = pathlib.Path(self.settings["Torch_DIR"]).parent.parent.parent
        self.cmake = self.settings["CMAKE_COMMAND"]
        if not (folder / "lib" / "stratagem" / "libstratagem_cuda.so").exists():
            fail(f"{folder} was built without CUDA: there is no lib/stratagem/libstratagem_cuda.so in it")

    def foreign_places(self):
        """What no file may name."""
        places = {self.settings["CMAKE_HOME_DIRECTORY"], str(self.folder), str(self.torch_folder), str(self.torch_folder.parent)}
        return sorted({str(pathlib.Path(place).resolve()) for place in places} | places, key=len, reverse=True)

    def cuda_tests(self):
        """Programs with the arguments for each of their tests."""
        ctest = pathlib.Path(self.cmake).with_name("ctest")
        tests = json.loads(ask(ctest, "--test-dir", self.folder, "--show-only=json-v1", "-L", "^cuda$"))["tests"]
        programs = {}
        for test in tests:
            command = test.get("command") or fail(f"{test['name']} isn't built")
            program = pathlib.Path(command[0])
            if program.parent != self.folder / "bin" or command[2:] not in ([], ["-w", "NoTests"]):
                fail(f"the test {test['name']} is labelled cuda, and is no case of a Catch2 program in bin: gpu-check couldn't run it")
            programs.setdefault(program.name, []).append(command[1])
        return [{"name": name, "tests": cases} for name, cases in programs.items()] or fail("no test is labelled cuda")


class Pack:
    def __init__(self, build, folder):
        self.build, self.folder = build, folder
        self.binaries = {}  # where each lies: the file that it was made of

    def make(self):
        self.clear()
        programs = self.build.cuda_tests()
        lib = self.build.folder / "lib"
        for name in ("stratagem", *(program["name"] for program in programs)):
            self.add(self.build.folder / "bin" / name, "bin")
        for name in ("libstratagem.so.1", "libstratagem_torch_runtime.so.1"):
            self.add(lib / name, "lib")
        for name in PLUGINS:
            self.add(lib / "stratagem" / f"{name}.so", "lib/stratagem")
        for file in self.needed():
            self.add(file, "lib")
        ask(self.build.settings.get("CMAKE_STRIP") or "strip", "--strip-unneeded", *self.binaries)
        self.free_of_paths()
        self.add_texts()
        (self.folder / "pack.json").write_text(json.dumps(self.description(programs), indent=1) + "\n")

    def clear(self):
        if self.folder.exists() and any(self.folder.iterdir()) and not (self.folder / "pack.json").exists():
            fail(f"{self.folder} has something in it, and is no pack; name a new folder")
        shutil.rmtree(self.folder, ignore_errors=True)

    def add(self, file, place):
        if not file.exists():
            fail(f"there is no {file}; build it first")
        (self.folder / place).mkdir(parents=True, exist_ok=True)
        copy = self.folder / place / file.name
        shutil.copyfile(file, copy)  # through links
        copy.chmod(0o755)
        self.binaries[copy] = file

    def add_texts(self):
        for name in ("gpu-check", "gpu_check"):
            source = SOURCE / "tests" / "gpu" / name
            if source.is_dir():
                shutil.copytree(source, self.folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, self.folder / name)
        shutil.copytree(SOURCE / "host" / "python" / "stratagem", self.folder / "python" / "stratagem", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(SOURCE / "LICENSE", self.folder / "LICENSE")

    def needed(self):
        """Libraries beside LibTorch's and CUDA's that a machine may not have."""
        found = {}
        for file in self.binaries.values():
            wanted = set(re.findall(r"\(NEEDED\).*\[(.+)\]", ask("readelf", "-d", file)))
            for name, place in re.findall(r"^\s*(\S+) => (/\S+)", ask("ldd", file), re.MULTILINE):
                path = pathlib.Path(place).resolve()
                is_here = self.build.folder in path.parents
                is_of_torch = self.build.torch_folder.resolve().parent in path.parents
                if name in wanted and not OF_THE_SYSTEM.match(name) and not is_here and not is_of_torch:
                    found[name] = pathlib.Path(place)
        return list(found.values())

    def free_of_paths(self):
        script = self.folder / "paths.cmake"
        lines = []
        for file in self.binaries:
            if re.search(r"\((RPATH|RUNPATH)\)", ask("readelf", "-d", file)):
                path = "$ORIGIN/../lib" if file.parent.name == "bin" else "$ORIGIN:$ORIGIN/.." if file.parent.name == "stratagem" else "$ORIGIN"
                lines.append(f'file(RPATH_SET FILE "{file}" NEW_RPATH "{path}")\n')
        script.write_text("".join(lines))
        ask(self.build.cmake, "-P", script)
        script.unlink()
        headers = os.fsencode(str(self.build.torch_folder.parent)) + b"/"
        for file in self.binaries:
            content = file.read_bytes()
            file.write_bytes(content.replace(headers + b"torch/include/", b"." + b"/" * (len(headers) - 1) + b"torch/include/"))

    def description(self, programs):
        versions = {text for file in self.binaries for text in re.findall(r"\bGLIBC_(\d+\.\d+)", ask("readelf", "--version-info", "--wide", file))}
        commit = subprocess.run(["git", "-C", str(SOURCE), "describe", "--always", "--dirty"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                universal_newlines=True).stdout.strip()
        return {"version": self.build.settings["CMAKE_PROJECT_VERSION"], "commit": commit, "torch": self.build.torch,
                "glibc": max(versions, key=lambda text: tuple(map(int, text.split(".")))), "programs": programs}

    # --- what it must hold to

    def check(self, limit_mb):
        """Returns its size."""
        size_bytes = 0
        for file in sorted(self.folder.rglob("*")):
            if file.is_file():
                content = file.read_bytes()
                size_bytes += len(content)
                for place in self.build.foreign_places():
                    at = content.find(os.fsencode(place))
                    if at >= 0:
                        fail(f"{file} names a folder of this machine: {content[at:at + 200].split(bytes(1))[0].decode(errors='replace')}")
        if size_bytes > limit_mb * 1e6:
            largest = sorted(((file.stat().st_size, file.name) for file in self.folder.rglob("*") if file.is_file()), reverse=True)[:5]
            fail(f"{self.folder} has {size_bytes / 1e6:.1f} MB; the limit is {limit_mb:g} MB. The largest: {largest}")
        return size_bytes


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--limit-mb", type=float, default=LIMIT_MB)
    args = parser.parse_args()
    pack = Pack(Build(args.build.absolute()), args.folder.absolute())
    pack.make()
    size_bytes = pack.check(args.limit_mb)
    print(f"pack: {args.folder}, {size_bytes / 1e6:.1f} MB, for torch {pack.build.torch}", file=sys.stderr)


if __name__ == "__main__":
    main()
