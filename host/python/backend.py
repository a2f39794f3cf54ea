# SPDX-License-Identifier: Apache-2.0
"""The build backend of this package (PEP 517 and 660). It has no compiled part and no dependency, so a wheel is its files and two lists of
them; a backend of others would have to be fetched.
"""
import base64
import hashlib
import pathlib
import re
import tarfile
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
PROJECT = (HERE / "pyproject.toml").read_text(encoding="utf-8")
NAME, VERSION, SUMMARY, PYTHON = (re.search(rf'^{key} = "(.*)"$', PROJECT, re.MULTILINE)[1] for key in ("name", "version", "description", "requires-python"))
METADATA = (f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\nSummary: {SUMMARY}\nRequires-Python: {PYTHON}\nLicense: Apache-2.0\n"
            f"Provides-Extra: numpy\nRequires-Dist: numpy>=1.23; extra == 'numpy'\nDescription-Content-Type: text/markdown\n\n")
WHEEL = "Wheel-Version: 1.0\nGenerator: stratagem\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def sources():
    return {f"{NAME}/{path.name}": path.read_bytes() for path in sorted((HERE / NAME).glob("*.py"))} | {f"{NAME}/py.typed": b""}


def write_wheel(folder, files):
    info = f"{NAME}-{VERSION}.dist-info"
    files = {**files, f"{info}/METADATA": (METADATA + (HERE / "README.md").read_text(encoding="utf-8")).encode(), f"{info}/WHEEL": WHEEL.encode()}
    record = [f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}" for name, data in files.items()]
    name = f"{NAME}-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(pathlib.Path(folder, name), "w", zipfile.ZIP_DEFLATED) as wheel:
        for path, data in {**files, f"{info}/RECORD": "\n".join([*record, f"{info}/RECORD,,", ""]).encode()}.items():
            wheel.writestr(zipfile.ZipInfo(path, (2020, 1, 1, 0, 0, 0)), data)
    return name


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    return write_wheel(wheel_directory, sources())


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    return write_wheel(wheel_directory, {f"_{NAME}_editable.pth": f"{HERE}\n".encode()})


def build_sdist(sdist_directory, config_settings=None):
    root = f"{NAME}-{VERSION}"
    with tarfile.open(pathlib.Path(sdist_directory, f"{root}.tar.gz"), "w:gz") as archive:
        for path in ("pyproject.toml", "backend.py", "README.md", *(name for name in sources() if not name.endswith("py.typed"))):
            archive.add(HERE / path, f"{root}/{path}")
    return f"{root}.tar.gz"
