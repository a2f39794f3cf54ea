# SPDX-License-Identifier: Apache-2.0
#
# Stratagem for Julia: strategies by the ABI (Plugin, Strategy), runs through libstratagem (Session), models written in Julia (Model).

"""
Training strategies behind a stable C ABI.

Values cross as trees: `nothing`, `Bool`, integers, floating numbers, strings, `Bytes`; arrays of numbers as tensors, with dimensions reversed and without a
copy (the batch is Julia's last index); other vectors as lists, tuples as tuples; dicts and named tuples as dicts.

By default all of a strategy runs on the thread that calls it. Errors are [`StratagemError`](@ref)s.
"""
module Stratagem

using Libdl: dlopen, dlpath, dlsym, RTLD_LOCAL, RTLD_NOW

include("generated.jl")
include("calls.jl")
include("errors.jl")
include("lifetime.jl")
include("tensors.jl")
include("dict.jl")
include("trees.jl")
include("json.jl")
include("plugin.jl")
include("strategy.jl")
include("steps.jl")
include("model.jl")
include("session.jl")

export DataSource, Device, Model, Parameter, Plugin, Session, StepOutput, Strategy, StratagemError, TreeDict
export destroy, devices, reduce_gradients, run!, setup, step!, swap!

function __init__()
    check_layout()
    init_errors()
    init_tensors()
    init_trees()
    init_strategies()
    init_models()
    init_sessions()
end

end
