# SPDX-License-Identifier: Apache-2.0
#
# Logistic regression on Fashion-MNIST, its gradients written in Julia, over two logical devices of the CPU: a strategy plugin reduces the
# gradients, by the ABI alone. The same on one device gives the same weights.
#
#     julia --project=host/julia host/julia/examples/logistic_regression.jl PLUGINS [IMAGES]
#
# PLUGINS: the folder with data_parallel.so.

using Stratagem
include("fashion_mnist.jl")

# Gradients of the mean cross-entropy of softmax(weight * images .+ bias).
function gradients(weight, bias, images, labels)
    scores = weight * images .+ bias
    odds = exp.(scores .- maximum(scores; dims = 1))
    errors = odds ./ sum(odds; dims = 1)
    for (column, label) in enumerate(labels)
        errors[label, column] -= 1
    end
    errors * images' ./ length(labels), vec(sum(errors; dims = 2)) ./ length(labels)
end

function train(strategy, images, labels; batch_size = 200, num_epochs = 3, lr = 0.1)
    num_devices = length(devices(strategy))
    weights = [zeros(10, 784) for _ in 1:num_devices]
    biases = [zeros(10) for _ in 1:num_devices]
    for _ in 1:num_epochs, first_column in 1:batch_size:length(labels)
        columns = first_column:min(first_column + batch_size - 1, length(labels))
        # Uneven shares: the reduction weighs each by what it counts.
        shares = [columns[1+(d-1)*length(columns)÷num_devices:d*length(columns)÷num_devices] for d in 1:num_devices]
        sets = [Any[gradients(weights[d], biases[d], images[:, share], labels[share])...] for (d, share) in enumerate(shares)]
        reduce_gradients(strategy, sets; weights = length.(shares))
        for d in 1:num_devices
            weights[d] .-= lr .* sets[d][1]
            biases[d] .-= lr .* sets[d][2]
        end
    end
    @assert all(==(weights[1]), weights) && all(==(biases[1]), biases)  # replicas stay equal, to the bit
    weights[1], biases[1]
end

function accuracy((weight, bias), images, labels)
    scores = weight * images .+ bias
    count(argmax(scores[:, i]) == label for (i, label) in enumerate(labels)) / length(labels)
end

function train_on(plugin, num_devices, images, labels)
    strategy = Strategy(plugin, "data_parallel"; config = (accelerator = "cpu", devices = num_devices))
    setup(strategy)
    trained = train(strategy, images, labels)
    destroy(strategy)
    trained
end

function main(plugins, num_images = "4000")
    plugin = Plugin(joinpath(plugins, "data_parallel.so"))
    images, labels = fashion_mnist("train", parse(Int, num_images))
    one, two = (train_on(plugin, n, images, labels) for n in (1, 2))
    distance = maximum(abs, one[1] - two[1]) / maximum(abs, one[1])
    println("two devices differ from one by ", distance, " of the largest weight")
    println("accuracy on 2000 test images: ", accuracy(two, fashion_mnist("t10k", 2000)...))
    distance < 1e-12 || error("two devices must give what one gives")
end

main(ARGS...)
