# SPDX-License-Identifier: Apache-2.0
"""What the tests share: the plugins that they use, which ctest names in the environment, and a config over them."""
import array
import gc
import os
import pathlib
import sys
import unittest

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path.insert(0, str(HERE.parent))

import stratagem  # noqa: E402
from stratagem import Code, Error, _generated as abi, errors, services, sources, tensors, trees  # noqa: E402,F401

SKIPPED = 77
SEQUENTIAL = os.environ.get("TEST_SEQUENTIAL", "")  # a strategy in plain C, without LibTorch
SINGLE_DEVICE = os.environ.get("TEST_SINGLE_DEVICE", "")
TOY = os.environ.get("TEST_TOY", "")  # a model of one weight w, whose loss is w times the mean of the inputs; without LibTorch


def floats(*values):
    return array.array("f", values)


def config(**changes):
    """Trains the toy for four updates of one sample each, 1 2 3 4, from w = 10: each takes the sample off w."""
    return {"strategy": {"name": "sequential", "path": SEQUENTIAL, "devices": 2},
            "model": {"kind": "library", "path": TOY, "options": {"w": 10.0}}, "optimizer": {"name": "sgd", "lr": 1},
            "data": {"train": {"source": "numbers"}}, "trainer": {"max_steps": 4, "log_every_n_steps": 1}, **changes}


def numbers():
    """The data of `config`."""
    values = floats(1, 2, 3, 4)
    return {"numbers": stratagem.Source(4, lambda rows: {"inputs": floats(*(values[row] for row in rows))})}


def quiet(*_):
    pass


def session(changes=None, **options):
    """Over `config`, with `numbers`."""
    return stratagem.Session(config(**(changes or {})), **{"sources": numbers(), "log": quiet, **options})


def weight(trained):
    """The toy's, of a session or a strategy."""
    return getattr(trained, "strategy", trained).export_state()["model"]["weight"].item()


_unraisable = []
sys.unraisablehook = lambda found: _unraisable.append(f"{found.err_msg or 'ignored'} {found.object!r}: {found.exc_value!r}")


class Case(unittest.TestCase):
    """A test after which nothing is held by the other side that isn't held here, and nothing was raised where nobody could be told."""

    def tearDown(self):
        gc.collect()
        found = _unraisable[:]
        _unraisable.clear()
        self.assertEqual(found, [])
        for name, held in (("tensors", tensors._held), ("trees", trees._moved), ("objects", trees._references), ("errors", errors._given),
                           ("sources", sources._lent)):
            self.assertEqual(dict(held), {}, f"{name} that nobody released")

    def assertError(self, code, *parts):
        """A context in which an Error of this code is raised, with these texts in its message."""
        return _Expected(self, code, parts)


class _Expected:
    def __init__(self, case, code, parts):
        self.case, self.code, self.parts = case, code, parts

    def __enter__(self):
        return self

    def __exit__(self, kind, error, _):
        if not isinstance(error, Error):
            if error is None:
                self.case.fail(f"no Error was raised; wanted {self.code.name}")
            return False
        self.case.assertEqual(error.code, self.code, error)
        for part in self.parts:
            self.case.assertIn(part, str(error))
        self.exception = error.with_traceback(None)
        return True
