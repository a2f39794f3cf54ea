# SPDX-License-Identifier: Apache-2.0
"""pip installs the package from its folder into a new environment, without any network."""
import os
import shutil
import subprocess
import tempfile
import venv

from support import *  # noqa: F403


class Install(unittest.TestCase):
    def test_pip_installs_the_folder(self):
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            shutil.copytree(HERE.parent, folder / "python", ignore=shutil.ignore_patterns("__pycache__"))  # pip may write beside the sources
            venv.create(folder / "venv", with_pip=True)
            python = folder / "venv" / "bin" / "python"
            alone = {**{k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}, "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}

            def call(*command):
                found = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False, cwd=folder, env=alone)
                self.assertEqual(found.returncode, 0, found.stdout + found.stderr)
                return found.stdout.strip()

            for how in ([folder / "python"], ["--editable", folder / "python"]):
                call(python, "-m", "pip", "install", "--force-reinstall", *how)
                self.assertEqual(call(python, "-c", "import stratagem; print(stratagem.version(), stratagem.Plugin.__name__)"), "1.0.0 Plugin")
                where = call(python, "-c", "import stratagem; print(stratagem.__file__)")
                self.assertEqual("site-packages" in where, len(how) == 1, where)
            self.assertIn("Version: 1.0.0", call(python, "-m", "pip", "show", "stratagem"))
            call(python, "-m", "pip", "uninstall", "--yes", "stratagem")


if __name__ == "__main__":
    unittest.main()
