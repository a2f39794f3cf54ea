/* SPDX-License-Identifier: Apache-2.0
 *
 * What one of the bad plugins needs.
 */
__attribute__((visibility("default"))) int dependency(void);
int dependency(void) { return 0; }
