# SPDX-License-Identifier: Apache-2.0
#
# Fashion-MNIST as it lies in Debian's package: gzipped IDX files, read by the program gzip, since Julia's standard library has no such thing.

const FASHION_MNIST = "/usr/share/datasets/fashion-mnist"

# The first `count` images as columns of numbers from 0 to 1, and their labels from 1 to 10.
function fashion_mnist(name, count; folder = FASHION_MNIST)
    unpacked(file) = read(`gzip --decompress --stdout $(joinpath(folder, file))`)
    pixels = unpacked("$name-images-idx3-ubyte.gz")[17:16+784*count]
    labels = unpacked("$name-labels-idx1-ubyte.gz")[9:8+count]
    reshape(pixels, 784, count) ./ 255, Int.(labels) .+ 1
end
