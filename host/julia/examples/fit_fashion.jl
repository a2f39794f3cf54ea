# SPDX-License-Identifier: Apache-2.0
#
# The config host/examples/fashion.json, fitted from Julia through libstratagem: a network of a library's on two logical devices, with what happens
# polled as it goes, and the strategy swapped for another one in between.
#
#     STRATAGEM_LIBRARY=build/lib/libstratagem.so.1 julia --project=host/julia host/julia/examples/fit_fashion.jl [IMAGES]

using Stratagem
using Stratagem: events

function tell(event)
    if event["event"] == "log"
        println("log: ", event["message"])
    elseif event["event"] == "swap"
        println("update ", event["step"], ": from here on with ", event["strategy"]["name"])
    elseif event["event"] == "metrics" && event["line"]["stage"] == "fit"
        println("update ", event["line"]["step"], ": loss ", event["line"]["loss"])
    end
end

function main(num_images = "2560")
    overrides = ["data.train.limit" => parse(Int, num_images), "data.train.batch_size" => 64, "data.validation.limit" => 1000,
                 "model.options.channels" => 8, "optimizer.lr" => 0.005, "scheduler.warmup_steps" => 5, "trainer.max_epochs" => 1,
                 "checkpoint" => nothing, "metrics" => nothing]
    session = Session(joinpath(@__DIR__, "..", "..", "examples", "fashion.json"); overrides = overrides, queue_events = true, caller_thread_only = false)
    step!(session, 20)
    foreach(tell, events(session))
    swap!(session, (name = "single_device", accelerator = "cpu"))
    result = run!(session)
    foreach(tell, events(session))
    close(session)
    println("accuracy on 1000 test images: ", result["validation"]["accuracy"])
end

main(ARGS...)
