# SPDX-License-Identifier: Apache-2.0
"""Installs a build into a prefix, moves the prefix, and builds and runs a user's project with nothing else of ours in reach."""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

FASHION_MNIST = "/usr/share/datasets/fashion-mnist"


def call(*command, **options):
    print("+", *command, flush=True)
    result = subprocess.run([str(c) for c in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    print(result.stdout, flush=True)
    if result.returncode != 0:
        sys.exit(f"{command[0]} ended with {result.returncode}")
    return result.stdout


def require(condition, what):
    if not condition:
        sys.exit(what)


def install(args, folder):
    """Installs, and moves what was installed: nothing in it may know where it was, or where it was built."""
    call(args.cmake, "--install", args.build, "--prefix", folder / "first")
    prefix = folder / "prefix"
    (folder / "first").rename(prefix)
    for file in prefix.rglob("*"):
        if file.suffix in (".cmake", ".pc", ".h", ".hpp"):
            text = file.read_text()
            for place in (args.source, args.build, str(folder / "first")):
                require(place not in text, f"{file} names {place}")
    return prefix


def build(args, folder, prefix):
    """The project's sources, copied out of the tree, so that no header beside them is found."""
    project = folder / "project"
    source = pathlib.Path(args.source)
    shutil.copytree(source / "tests/install/project", project)
    for file in ("host/c/session.c", "host/c/gradients.c", "docs/examples/strategy_plugin/gradient_descent.cpp",
                 "docs/examples/model_library/softmax_regression.cpp"):
        shutil.copy(source / file, project)
    call(args.cmake, "-G", args.generator, f"-DCMAKE_MAKE_PROGRAM={args.make_program}", f"-DCMAKE_C_COMPILER={args.cc}",
         f"-DCMAKE_CXX_COMPILER={args.cxx}", f"-DCMAKE_PREFIX_PATH={prefix}", "-DCMAKE_BUILD_TYPE=Release",
         "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON", "-S", project, "-B", project / "build")
    commands = json.loads((project / "build/compile_commands.json").read_text())
    for command in commands:
        require(args.source + "/" not in command["command"], f"the tree is in reach: {command['command']}")
    call(args.cmake, "--build", project / "build", "-j", "2")
    return project / "build"


def check_pkg_config(args, folder, prefix):
    if not shutil.which("pkg-config"):
        sys.exit("pkg-config is missing; ./run setup installs it")
    folder_of_pc = next(prefix.rglob("stratagem.pc")).parent
    environment = {**os.environ, "PKG_CONFIG_PATH": str(folder_of_pc)}
    flags = call("pkg-config", "--cflags", "--libs", "stratagem", env=environment).split()
    version = call("pkg-config", "--modversion", "stratagem", env=environment).strip()
    require(version.startswith("1."), f"pkg-config says version {version}")
    program = folder / "session"
    call(args.cc, "-std=c99", "-D_POSIX_C_SOURCE=200809L", folder / "project/session.c", "-o", program, *flags,
         f"-Wl,-rpath,{folder_of_pc.parent}")
    return program


def main():
    parser = argparse.ArgumentParser()
    for name in ("cmake", "generator", "make-program", "cc", "cxx", "source", "build"):
        parser.add_argument("--" + name, required=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="stratagem-install-") as name:
        folder = pathlib.Path(name)
        prefix = install(args, folder)
        built = build(args, folder, prefix)
        library = next(prefix.rglob("libstratagem.so.1"))
        require("libstratagem.so.1" in call("readelf", "-d", library), "the SONAME is not libstratagem.so.1")
        plugins = library.parent / "stratagem"
        transports = [file.name for file in pathlib.Path(args.build, "lib/stratagem").glob("libstratagem_*.so")]
        for name in transports:  # a plugin looks for its accelerator's transport beside itself
            require((plugins / name).exists(), f"{name} is built and not installed")
        require("test accuracy" in call(built / "gradients", plugins / "data_parallel.so", FASHION_MNIST, 10000), "no result")

        # A strategy and a model of the user's, and our own strategies with that model, by the installed command line and libstratagem.
        config = {
            "plugin_path": [str(built / "lib/stratagem")],
            "strategy": {"name": "gradient_descent"},
            "model": {"kind": "library", "name": "softmax_regression"},
            "optimizer": {"name": "sgd", "lr": 0.1},
            "data": {"root": FASHION_MNIST, "train": {"format": "idx", "inputs": "train-images-idx3-ubyte.gz",
                                                      "targets": "train-labels-idx1-ubyte.gz", "batch_size": 64, "limit": 4096}},
            "trainer": {"max_epochs": 1, "log_every_n_steps": 20},
        }
        file = folder / "config.json"
        file.write_text(json.dumps(config))
        fitted = json.loads(call(prefix / "bin/stratagem", "fit", file, "--json").splitlines()[-1])
        require(fitted["steps"] == 64 and fitted["train_loss"] < 1.5, f"the user's strategy trained to {fitted}")
        own = call(built / "session", file, "strategy.name=single_device")
        require("64 updates, 64 batches, 1 swap" in own, "the session was not what it should be")
        program = check_pkg_config(args, folder, prefix)
        require("64 updates, 64 batches, 1 swap" in call(program, file, "strategy.name=single_device"), "by pkg-config")


if __name__ == "__main__":
    main()
