/* SPDX-License-Identifier: Apache-2.0
 *
 * Stands for LibTorch's libc10.so where only its name matters.
 */
int c10_function(void);
__attribute__((visibility("default"))) int c10_function(void) { return 0; }
