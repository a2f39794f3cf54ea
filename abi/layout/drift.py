# SPDX-License-Identifier: Apache-2.0
"""Today's headers against every kept release of their major, and the one deliberate way to change what is kept.

Before the freeze a kept release is a candidate: `accept` replaces it, if docs/versioning.md has a line that names the new layout and
says what changed. Once frozen, it stays as it is, and what is new is a new minor.
"""
import json
import shutil

from releases import compare, digest_of, has_line, line_for, promises, text_of

PAGE = "docs/versioning.md"


def kept_file(root, version):
    return root / "abi/layout" / f"{version}.json"


def kept_headers(root, version):
    """{name as included: path}."""
    return {f"stratagem/{p.name}": p for p in (root / "abi/layout" / version / "stratagem").glob("*.h")}


def versions_up_to(version):
    major, minor = map(int, version.split("."))
    return [f"{major}.{m}" for m in range(minor + 1)]


def read_kept(root, version, read):
    """(the release, None), or (None, what is wrong with it)."""
    file = kept_file(root, version)
    if not file.exists() or not kept_headers(root, version):
        missing = file if not file.exists() else root / "abi/layout" / version
        return None, f"{missing.relative_to(root)} is missing: a release is kept for good. Get it back from git; a new minor: ./run abi-accept"
    release = json.loads(file.read_text(encoding="utf-8"))
    said = promises(read(kept_headers(root, version)))
    if {**said, "frozen": release.get("frozen")} != release:
        wrong = [*compare(release, said)[0], *compare(said, release)[0], "they differ"][0]
        return None, f"abi/layout/{version}.json and the headers beside it differ: {wrong}. Neither is edited: ./run abi-accept"
    if not has_line((root / PAGE).read_text(encoding="utf-8"), release):
        return None, f"{PAGE} has no line that begins with {line_for(release)!r}, so nobody said what changed"
    return release, None


def check(root, today, read):
    """([what is wrong], [what is new since the newest kept release])."""
    wrong, news = [], []
    for version in versions_up_to(today["abi"]):
        kept, problem = read_kept(root, version, read)
        if problem:
            wrong.append(problem)
            continue
        breaks, news = compare(kept, today)
        wrong += [f"{b}" for b in breaks]
        if kept["abi"] == today["abi"] and kept["frozen"] and news:
            wrong += [f"{version} is frozen, and this is not in it; raise STG_ABI_MINOR: {new}" for new in news]
    return wrong, news


def accept(root, today, headers, read, freeze):
    """Keeps today's headers as the release that they say they are. Gives what forbids it, or an empty list."""
    version = today["abi"]
    wrong = []
    for earlier in versions_up_to(version)[:-1]:
        kept, problem = read_kept(root, earlier, read)
        wrong += [problem] if problem else compare(kept, today)[0]
    file = kept_file(root, version)
    before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
    release = {"abi": version, "frozen": freeze or bool(before and before["frozen"]), **{k: v for k, v in today.items() if k != "abi"}}
    if before and before["frozen"] and digest_of(before) != digest_of(release):
        wrong.append(f"{version} is frozen: programs were built with it. Raise STG_ABI_MINOR in common.h, and append")
    if not has_line((root / PAGE).read_text(encoding="utf-8"), release):
        breaks, news = compare(before, today) if before else ([], [f"{version}: new"])
        wrong += [f"{PAGE} does not say what changed. Add a line, under \"What was accepted\", and call again:",
                  line_for(release) + "<what changed, why, and what it does to plugins and hosts that are built>",
                  "The changes:", *(f"  {change}" for change in [*breaks, *news] or ["  none"])]
    if wrong:
        return wrong
    folder = root / "abi/layout" / version / "stratagem"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, path in headers.items():
        shutil.copyfile(path, folder / name.split("/")[1])
    file.write_text(text_of(release), encoding="utf-8")
    return []
