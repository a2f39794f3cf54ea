// SPDX-License-Identifier: Apache-2.0
//
// Reads a safetensors or NPY file and writes what it holds again: rewrite_file IN OUT. check_files.py compares the two.
#include <filesystem>
#include <iostream>

#include "base/error.hpp"
#include "base/npy.hpp"
#include "base/safetensors.hpp"

using namespace stratagem;

namespace {

void rewrite_safetensors(const std::string& in, const std::filesystem::path& out) {
  const SafetensorsFile file{Storage{}.open(in)};
  std::vector<TensorPtr> tensors;
  std::vector<NamedTensor> named;
  for (const auto& entry : file.entries()) {
    tensors.push_back(file.read(entry));
    named.push_back({entry.name, &tensors.back()->view});
  }
  Transaction transaction = Storage{}.begin(out.parent_path().native());
  write_safetensors(transaction, out.filename().native(), named, file.metadata());
  transaction.commit();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::cerr << "usage: rewrite_file IN OUT\n";
    return 2;
  }
  try {
    if (std::filesystem::path{argv[1]}.extension() == ".npy") {
      write_npy(argv[2], read_npy(argv[1])->view);
    } else {
      rewrite_safetensors(argv[1], std::filesystem::absolute(argv[2]));
    }
    return 0;
  } catch (const Error& error) {
    std::cerr << error.message << '\n';
    return 1;
  }
}
