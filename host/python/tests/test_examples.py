# SPDX-License-Identifier: Apache-2.0
"""The examples and the bench: what they print, and that they end well."""
import json
import os
import subprocess

from support import *  # noqa: F403


def run(script, *arguments):
    return subprocess.run([sys.executable, HERE.parent / script, *arguments], capture_output=True, text=True, timeout=250, check=False)


class Examples(unittest.TestCase):
    def test_the_config_of_the_examples_is_fitted(self):
        less = ["checkpoint=null", "metrics=null", "data.train.limit=1024", "data.validation.limit=64", "trainer.max_epochs=-1", "trainer.max_steps=101",
                "model.options.channels=1", "data.train.batch_size=4"]
        found = run("examples/fit.py", os.environ["TEST_FASHION"], *less)
        self.assertEqual(found.returncode, 0, found.stderr)
        self.assertRegex(found.stdout, r"^update 100, epoch 0: loss \d+\.\d{3}\n.*max_steps \(101\) is reached: 101 updates are done\n$")

    def test_a_loop_of_ones_own_in_few_lines(self):
        try:
            import torch  # noqa: F401
        except ImportError:
            self.skipTest("no PyTorch")
        found = run("examples/own_loop.py", os.environ["TEST_SOFTMAX"])
        self.assertEqual(found.returncode, 0, found.stderr)
        self.assertRegex(found.stdout, r"^loss 0\.[0-3]\d\d\n\(2, 4\)\n$")

    def test_the_bench_measures_each_call_under_each_strategy(self):
        found = run("bench/overhead.py", SINGLE_DEVICE, os.environ["TEST_DATA_PARALLEL"], TOY, "1")
        self.assertEqual(found.returncode, 0, found.stderr)
        lines = [json.loads(line) for line in found.stdout.splitlines()]
        self.assertEqual([line["strategy"] for line in lines], [None, *["single_device(1)"] * 3, *["data_parallel(2)"] * 3])
        self.assertTrue(all(0 < line["best_ns"] < 1e9 for line in lines), lines)


if __name__ == "__main__":
    unittest.main()
