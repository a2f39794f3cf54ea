# SPDX-License-Identifier: Apache-2.0
"""The examples of the docstrings are right."""
import doctest
import importlib
import pkgutil

from support import *  # noqa: F403

# What each module shows, at least.
SHOWN = {"errors": 1, "trees": 1, "sources": 1, "tensors": 1}


class Docs(Case):
    def test_docstrings_show_what_is_so(self):
        for module in pkgutil.iter_modules(stratagem.__path__):
            loaded = importlib.import_module(f"stratagem.{module.name}")
            result = doctest.testmod(loaded)
            self.assertEqual(result.failed, 0, module.name)
            self.assertGreaterEqual(result.attempted, SHOWN.get(module.name, 0), module.name)

    def test_everything_that_is_offered_is_documented_and_typed(self):
        for name in stratagem.__all__:
            self.assertTrue(getattr(stratagem, name).__doc__, name)
        for kind in (stratagem.Session, stratagem.Strategy, stratagem.Plugin, stratagem.Tensor, stratagem.Services):
            for name, member in vars(kind).items():
                function = member.fget if isinstance(member, property) else member
                if callable(function) and not name.startswith("_"):
                    self.assertIn("return", function.__annotations__, f"{kind.__name__}.{name}")


if __name__ == "__main__":
    unittest.main()
