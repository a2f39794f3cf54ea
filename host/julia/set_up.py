#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Gets Julia 1.5.3 from Debian 11 into a folder, without touching the system, and prints the path of its program.

usage: set_up.py FOLDER

Debian 12 and 13 have no Julia. apt-get downloads Debian 11's, and what it needs, from the system's own Debian mirror into lists and
a cache of our own, its signature checked as ever; dpkg unpacks it. Nothing is installed. What every system has (the C and C++
libraries, zlib) is the system's, so that the libraries that Julia loads find what they were built with.

Exit status: 0, or 77 if Julia can't be had here: no apt-get, or a mirror that no longer has Debian 11.
"""
import os
import pathlib
import shutil
import subprocess
import sys

KEYRING = pathlib.Path("/usr/share/keyrings/debian-archive-keyring.gpg")
THE_SYSTEMS_OWN = {"libc6", "libc-bin", "libcrypt1", "libgcc-s1", "libstdc++6", "gcc-10-base", "dpkg", "tar", "perl-base", "debconf", "zlib1g"}
LAUNCHER = """#!/bin/sh
# Debian 11's libraries are for this process only, and come after nothing: the system has none of these names.
root=$(dirname "$(readlink -f "$0")")/root
LD_LIBRARY_PATH={folders} exec "$root/usr/bin/julia" "$@"
"""


def unavailable(why):
    print(f"no Julia: {why}", file=sys.stderr)
    raise SystemExit(77)


def mirror():
    """Where the system's own Debian packages come from."""
    listed = subprocess.run(["apt-get", "indextargets", "--format", "$(ORIGIN) $(LABEL) $(REPO_URI)", "Created-By: Packages"],
                            stdout=subprocess.PIPE, universal_newlines=True).stdout.splitlines()
    uris = [line.split()[2] for line in listed if line.startswith("Debian Debian ")]
    return uris[0] if uris else unavailable("apt-get knows no mirror of Debian; after apt-get update it may")


def download(scratch):
    """The .deb files of julia and all that it needs, as if nothing were installed."""
    for folder in ("lists/partial", "cache/archives/partial"):
        (scratch / folder).mkdir(parents=True)
    (scratch / "status").touch()
    signed = f" [signed-by={KEYRING}]" if KEYRING.exists() else ""
    (scratch / "sources.list").write_text(f"deb{signed} {mirror()} bullseye main\n")
    options = {"Dir::Etc::sourcelist": scratch / "sources.list", "Dir::Etc::sourceparts": "-", "Dir::State": scratch,
               "Dir::State::lists": scratch / "lists", "Dir::State::status": scratch / "status", "Dir::Cache": scratch / "cache",
               "APT::Install-Recommends": "false", "Acquire::Languages": "none", "APT::Sandbox::User": "",
               "Acquire::http::Timeout": 20, "Acquire::Retries": 1, "APT::Update::Error-Mode": "any",
               "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled": "false"}
    words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    for command in (["update"], ["--yes", "--download-only", "install", "julia"]):
        done = subprocess.run(["apt-get", *words, "--quiet", "--quiet", *command], stdout=subprocess.DEVNULL)
        if done.returncode != 0:
            unavailable(f"apt-get {command[-1]} failed with status {done.returncode}; Debian 11 may be gone from the mirror")
    return sorted((scratch / "cache" / "archives").glob("*.deb"))


def unpack(packages, root):
    root.mkdir()
    for package in packages:
        if package.name.split("_")[0] not in THE_SYSTEMS_OWN:
            subprocess.run(["dpkg", "-x", package, root], check=True)


def launcher(root, program):
    """Julia's program, with its own libraries in sight."""
    private = next(root.glob("usr/lib/*/julia"))
    folders = [private, private.parent, root / "lib" / private.parent.name]
    program.write_text(LAUNCHER.format(folders=":".join(f"$root/{folder.relative_to(root)}" for folder in folders)))
    program.chmod(0o755)
    subprocess.run([program, "--startup-file=no", "-e", "using Libdl"], check=True)


def main():
    folder = pathlib.Path(sys.argv[1]).absolute()
    program = folder / "julia"
    if not program.exists():  # the last that comes: then all is there
        if not shutil.which("apt-get") or not shutil.which("dpkg"):
            unavailable("no apt-get here")
        print(f"unpacking Julia into {folder} (360 MB, once)", file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        unpack(download(folder / "download"), folder / "root")
        launcher(folder / "root", folder / "julia.new")
        shutil.rmtree(folder / "download")
        os.rename(folder / "julia.new", program)
    print(program)


if __name__ == "__main__":
    main()
