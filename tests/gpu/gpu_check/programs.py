# SPDX-License-Identifier: Apache-2.0
"""The test programs of the pack (Catch2), each run once for all its test cases: a start costs seconds with a GPU. A case that comes to no end, or
ends the process, is told as such, and a further process runs those after it.
"""
import os
import re
import signal
import subprocess
import time
import xml.etree.ElementTree as ElementTree

STALLED_S = 60  # so long without a case that ends
MAX_TEXT = 1500


def stop(process):
    """Ends a process and what it started; a driver may keep it from ending, and that is not waited for."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
    except (ProcessLookupError, subprocess.TimeoutExpired):
        pass


def read_cases(text):
    """The cases of Catch2's XML, as far as it goes: (those that have ended, the name of one that was begun)."""
    parser = ElementTree.XMLPullParser(["start", "end"])
    cases, begun = [], None
    try:
        parser.feed(text)
        for event, element in parser.read_events():
            if element.tag != "TestCase":
                continue
            begun = element.get("name") if event == "start" else None
            if event == "end":
                cases.append(_case(element))
    except ElementTree.ParseError:
        pass  # cut off in the midst of a line
    return cases, begun


def _case(element):
    result = element.find("OverallResult")
    passed = result is not None and result.get("success") == "true"
    case = {"name": element.get("name"), "status": "passed" if passed else "failed"}
    if result is not None and result.get("durationInSeconds"):
        case["seconds"] = round(float(result.get("durationInSeconds")), 3)
    if not passed:
        case["text"] = "\n".join(_failures(element))[:MAX_TEXT]
    return case


def _failures(element):
    for part in element.iter():
        place = f"{part.get('filename')}:{part.get('line')}: "
        if part.tag == "Expression" and part.get("success") == "false":
            yield place + " ".join((part.findtext("Original", "").strip(), "is", part.findtext("Expanded", "").strip()))
        if part.tag in ("Exception", "FatalErrorCondition", "Failure", "Info"):
            yield (place if part.get("line") else "") + (part.text or "").strip()


def name_of(argument):
    """A test's name of what ctest gives to the program."""
    return re.sub(r"\\(.)", r"\1", argument)


def run_program(program, arguments, variables, folder, ends_at, stalled_s=STALLED_S):
    """What became of the cases with these arguments: a list of {name, status, seconds, text}; status is passed, failed, crashed, timeout, skipped
    or not run."""
    done, left = [], list(arguments)
    while left:
        cases, ended = _run(program, left, variables, folder, ends_at, stalled_s)
        done += cases
        known = {case["name"] for case in cases}
        before, left = left, [argument for argument in left if name_of(argument) not in known]
        if ended or len(left) == len(before):
            break
    status, text = ("skipped", ended) if ended and ended.startswith("skipped") else ("not run", ended or "its program came to none of those that were left")
    return done + [{"name": name_of(argument), "status": status, "text": text} for argument in left]


def _run(program, arguments, variables, folder, ends_at, stalled_s):
    """One process. The cases that it came to, and, where nothing after them can be run, why."""
    xml, log = folder / f"{program.name}.xml", folder / f"{program.name}.log"
    xml.write_text("")
    if ends_at - time.monotonic() < 5:
        return [], "there was no time left"
    with open(log, "wb") as output:
        process = subprocess.Popen([str(program), "-r", "xml", "-o", str(xml), ",".join(arguments)], env=variables, cwd=folder, stdout=output,
                                   stderr=subprocess.STDOUT, start_new_session=True)
        outcome = _watch(process, xml, ends_at, stalled_s)
    cases, begun = read_cases(xml.read_text(errors="replace"))
    said = log.read_text(errors="replace")[-MAX_TEXT:].strip()
    skipped = re.search(r"skipped, for want of a GPU.*", said)
    if skipped and process.returncode == 77:
        return cases, skipped[0]
    if begun is not None:
        status = "timeout" if outcome else "crashed"
        text = outcome or f"the process ended with status {process.returncode}"
        cases.append({"name": begun, "status": status, "text": f"{text}\n{said}".strip()})
    elif not cases:
        return [], f"{program.name} ended with status {process.returncode}: {said}"
    elif process.returncode != 0 and all(case["status"] == "passed" for case in cases):
        cases.append({"name": "the end of the process", "status": "crashed", "text": f"status {process.returncode}\n{said}".strip()})
    return cases, None


def _watch(process, xml, ends_at, stalled_s):
    """Waits for the process. Why it was stopped, where it was."""
    size, since = -1, time.monotonic()
    while process.poll() is None:
        now = time.monotonic()
        if xml.stat().st_size != size:
            size, since = xml.stat().st_size, now
        if now > ends_at or now - since > stalled_s:
            stop(process)
            return "the time for the tests is over" if now > ends_at else f"nothing came of it for {stalled_s:.0f} s"
        time.sleep(0.05)
    return None
