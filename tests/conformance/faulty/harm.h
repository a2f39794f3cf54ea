/* SPDX-License-Identifier: Apache-2.0
 *
 * Where the faults against the process are done.
 */
#ifndef HARM_H
#define HARM_H

void harm_at_setup(void);
void harm_at_create(void);
void harm_at_probe(void);

#endif
