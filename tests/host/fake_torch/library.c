/* SPDX-License-Identifier: Apache-2.0
 *
 * Stands in for a library of which only the file is looked at. The text is what NCCL has in its own. */
__attribute__((visibility("default"))) const char fake_version[] = "NCCL version %d, and then NCCL version 2.28.9+cuda13.0";
