// SPDX-License-Identifier: Apache-2.0
//
// A generator of random numbers per thread. LibTorch has one default generator per device and process: with two replicas on one CPU,
// dropout would differ from run to run, depending on which thread came first.
//
// How: a spare dispatch key, included in the thread that wants it, with one kernel for every operator that takes an optional
// generator. Where none was given, the kernel puts the thread's. All other operators fall through at no cost, and a thread without
// this scope doesn't notice anything.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace stratagem {

/// While it lives, random operators of the calling thread on the generator's device draw from `generator` unless they are given
/// another one. Scopes nest; the innermost of a device counts. The first one in a process registers the kernels.
class __attribute__((visibility("default"))) ThreadGenerator {
 public:
  explicit ThreadGenerator(at::Generator generator);
  ThreadGenerator(const ThreadGenerator&) = delete;
  ThreadGenerator& operator=(const ThreadGenerator&) = delete;
  ~ThreadGenerator();

  /// The calling thread's generator for a device; null if it has none.
  static const at::Generator* find(at::Device device);

 private:
  at::Generator generator_;
  const ThreadGenerator* outer_;
  c10::impl::IncludeDispatchKeyGuard included_;
};

}  // namespace stratagem
