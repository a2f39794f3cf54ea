# SPDX-License-Identifier: Apache-2.0
#
# Who keeps what alive. What C holds of Julia's is in ROOTS until C lets go of it. What Julia holds of C's is released by a finalizer, which
# may run anywhere, in the middle of any allocation: so it only queues, and the next call into C, on whatever thread makes it, releases
# what is queued.

const ROOTS = Dict{Ptr{Cvoid},Any}()
const ROOTS_LOCK = Threads.SpinLock()

"Keeps an object until `unroot!`; gives the pointer by which C knows it."
function root!(object)
    p = pointer_from_objref(object)
    lock(ROOTS_LOCK)
    ROOTS[p] = object
    unlock(ROOTS_LOCK)
    p
end

function unroot!(p::Ptr)
    lock(ROOTS_LOCK)
    delete!(ROOTS, Ptr{Cvoid}(p))
    unlock(ROOTS_LOCK)
    nothing
end

num_roots() = (lock(ROOTS_LOCK); n = length(ROOTS); unlock(ROOTS_LOCK); n)

# What C counts references to: any mutable object with a `count`.
function counted_retain(self::Ptr{Cvoid})
    object = unsafe_pointer_to_objref(self)
    Threads.atomic_add!(object.count, 1) == 0 && root!(object)
    nothing
end
function counted_release(self::Ptr{Cvoid})
    object = unsafe_pointer_to_objref(self)
    Threads.atomic_sub!(object.count, 1) == 1 && unroot!(self)
    nothing
end

const PENDING = Any[]
const PENDING_LOCK = Threads.SpinLock()

"Runs `release` in a call after `object` has become garbage."
function release_later(release, object)
    function queue(collected)
        if trylock(PENDING_LOCK)
            push!(PENDING, release)
            unlock(PENDING_LOCK)
        else  # this thread or another is at the queue: next time
            finalizer(queue, collected)
        end
        nothing
    end
    finalizer(queue, object)
end

"Releases what is queued. Every call into C begins with it."
release_pending() = isempty(PENDING) ? nothing : release_all()

@noinline function release_all()
    lock(PENDING_LOCK)
    waiting = copy(PENDING)
    empty!(PENDING)
    unlock(PENDING_LOCK)
    foreach(release -> release(), waiting)
end
