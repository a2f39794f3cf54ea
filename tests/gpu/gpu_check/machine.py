# SPDX-License-Identifier: Apache-2.0
"""What the numbers were taken on, and that the pack's files find what they need."""
import ctypes
import os
import platform

import stratagem
import torch


def main(settings, report):
    line = {"name": "versions", "ok": True, "python": platform.python_version(), "torch": torch.__version__, "stratagem": stratagem.version(),
            "system": platform.platform(), "cpus": len(os.sched_getaffinity(0))}
    if settings["accelerator"] == "cuda":
        line.update(cuda=torch.version.cuda, cudnn=torch.backends.cudnn.version(), nccl=".".join(map(str, torch.cuda.nccl.version())))
    report(line)
    transport = ctypes.CDLL(os.path.join(settings["root"], "lib", "stratagem", "libstratagem_cuda.so"), mode=os.RTLD_NOW | os.RTLD_LOCAL)
    report({"name": "the transport and all that it needs can be loaded", "ok": bool(transport.stratagem_transport)})
    for index in range(torch.cuda.device_count() if settings["accelerator"] == "cuda" else 0):
        gpu = torch.cuda.get_device_properties(index)
        report({"name": f"cuda:{index}", "ok": True, "gpu": gpu.name, "capability": f"{gpu.major}.{gpu.minor}", "memory_bytes": gpu.total_memory,
                "multiprocessors": gpu.multi_processor_count, "sum": float(torch.ones(1000, device=f"cuda:{index}").sum())})
