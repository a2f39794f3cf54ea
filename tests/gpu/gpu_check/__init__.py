# SPDX-License-Identifier: Apache-2.0
"""What `./gpu-check` of a pack runs, on a machine with GPUs and Python's torch, and no compiler, CMake or network.

main     the parts one after the other, each in a process of its own with a limit of time; their results as one JSON
place    where LibTorch is, and what keeps the pack from running here
programs the test programs of the pack
part     what runs in a part's process: parity, syncs, timing, machine
"""
