# SPDX-License-Identifier: Apache-2.0
#
# The tests whose files are named. What they load is named by the environment; CMakeLists.txt sets it.
#   STRATAGEM_TEST_PLUGIN, _STRATEGY   a strategy plugin of several devices, and its strategy
#   STRATAGEM_TEST_PLUGINS             the folder with ours; STRATAGEM_LIBRARY: libstratagem
#   STRATAGEM_TEST_BAD_PLUGINS         the folder with faulty ones

using Stratagem, Test
const S = Stratagem

caught(f) = try
    f()
    nothing
catch exception
    exception
end
"Whether `f` fails with this code, and all these words in its message."
fails(f, code, words...) = (e = caught(f); e isa StratagemError && e.code == code && all(word -> occursin(word, e.message), words))

"Releases what is garbage: finalizers queue, a later call releases."
function collect_garbage(a_call = S.release_pending)
    for _ in 1:4
        GC.gc()
        a_call()
    end
end

a_strategy(num_devices = 2; config = NamedTuple(), options...) =
    Strategy(Plugin(ENV["STRATAGEM_TEST_PLUGIN"]), ENV["STRATAGEM_TEST_STRATEGY"];
             config = (accelerator = "cpu", devices = num_devices, config...), options...)

for name in ARGS
    include("$name.jl")
end
