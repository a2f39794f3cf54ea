# SPDX-License-Identifier: Apache-2.0
import math
import sys

import stratagem


def show(progress):
    if progress.stage == "fit" and progress.step % 100 == 0 and not math.isnan(progress.loss):
        print(f"update {progress.step}, epoch {progress.epoch}: loss {progress.loss:.3f}")


with stratagem.Session(sys.argv[1], overrides=sys.argv[2:], progress=show) as session:
    session.step(10)
    session.swap({"name": "single_device", "accelerator": "cpu"})
    result = session.fit()
print(result["ended_by"])
