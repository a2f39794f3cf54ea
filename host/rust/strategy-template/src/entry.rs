// SPDX-License-Identifier: Apache-2.0
//! How a call comes in: sizes of structs, states, one caller at a time, panics.
use crate::abi::*;
use crate::error::*;
use crate::strategy::Strategy;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

// ---- an instance, as all threads see it

pub struct Instance {
    busy: AtomicBool,
    thread: AtomicU64, // the one that is in a call
    aborted: AtomicBool,
    pub state: AtomicU32,
    pub num_micro_batches: AtomicU64,
    pub num_updates: AtomicU64,
    pub has_graph: AtomicBool,
    strategy: UnsafeCell<Strategy>, // whoever set `busy` may use it
}
unsafe impl Sync for Instance {}

static IS_CHILD: AtomicBool = AtomicBool::new(false);

extern "C" fn in_child() {
    IS_CHILD.store(true, Ordering::Relaxed);
}

impl Instance {
    pub fn create(strategy: Strategy) -> *mut stg_strategy {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
            // This library's own copy of Rust's runtime: a panic becomes an error, and must not be printed as well.
            std::panic::set_hook(Box::new(|_| {}));
        });
        let instance = Instance {
            busy: AtomicBool::new(false),
            thread: AtomicU64::new(0),
            aborted: AtomicBool::new(false),
            state: AtomicU32::new(STG_STATE_CREATED),
            num_micro_batches: AtomicU64::new(0),
            num_updates: AtomicU64::new(0),
            has_graph: AtomicBool::new(false),
            strategy: UnsafeCell::new(strategy),
        };
        Box::into_raw(Box::new(instance)).cast()
    }

    /// # Safety
    /// What create gave, not destroyed.
    pub unsafe fn of<'a>(instance: *mut stg_strategy) -> Result<&'a Instance> {
        check_fork()?;
        match unsafe { instance.cast::<Instance>().as_ref() } {
            Some(instance) => Ok(instance),
            None => invalid("the instance is null"),
        }
    }

    /// # Safety
    /// As `of`. From inside a callback of the instance it does nothing.
    pub unsafe fn destroy(instance: *mut stg_strategy) {
        let Ok(it) = (unsafe { Instance::of(instance) }) else { return };
        if !it.busy.swap(true, Ordering::Acquire) {
            let _ = catch_unwind(AssertUnwindSafe(|| drop(unsafe { Box::from_raw(instance.cast::<Instance>()) })));
        }
    }

    pub fn abort(&self) {
        self.aborted.store(true, Ordering::Release);
        if !self.busy.load(Ordering::Acquire) {
            self.state.store(STG_STATE_DRAINING, Ordering::Release);
        }
    }

    /// The call ends here if it was aborted, cancelled, or is too late.
    pub fn check_time(&self, call: &stg_call) -> Result<()> {
        if self.aborted.load(Ordering::Acquire) {
            return self.drain(STG_ABORTED, "the instance was aborted");
        }
        if !call.cancel.is_null() && unsafe { AtomicU32::from_ptr(call.cancel.cast_mut()) }.load(Ordering::Acquire) != 0 {
            return Err(Error::new(STG_CANCELLED, "the call was cancelled by its flag"));
        }
        if call.deadline_ns != 0 && now_ns() > call.deadline_ns {
            return Err(Error::new(STG_DEADLINE_EXCEEDED, "the deadline passed while waiting for the model on cpu:0"));
        }
        Ok(())
    }

    /// As `check_time`, where the model may have taken it past its deadline: then half a step is done.
    pub fn check_time_after_model(&self, call: &stg_call) -> Result<()> {
        match self.check_time(call) {
            Err(error) if error.code == STG_DEADLINE_EXCEEDED => self.drain(error.code, &error.message),
            other => other,
        }
    }

    fn drain(&self, code: u32, message: &str) -> Result<()> {
        self.state.store(STG_STATE_DRAINING, Ordering::Release);
        let mut error = Error::new(code, format!("{message}; only abort and destroy are legal now"));
        error.flags = STG_ERROR_INSTANCE_DRAINING;
        Err(error)
    }
}

fn this_thread() -> u64 {
    unsafe { libc::pthread_self() }
}

fn now_ns() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

pub fn check_fork() -> Result<()> {
    if IS_CHILD.load(Ordering::Relaxed) {
        precondition("this is the child of a fork; a strategy works in the process that loaded it")
    } else {
        Ok(())
    }
}

// ---- calls

/// Nothing unwinds into C.
pub fn guard(body: impl FnOnce() -> Result<()>) -> *mut stg_error {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => ptr::null_mut(),
        Ok(Err(error)) => error.into_raw(),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().cloned().or_else(|| panic.downcast_ref::<&str>().map(|text| text.to_string()));
            std::mem::forget(panic); // its drop might panic, too
            Error::new(STG_INTERNAL, format!("a fault of this plugin: {}", text.unwrap_or_default())).into_raw()
        }
    }
}

/// A call of an [owner] function: refused in other states, and while another one runs.
///
/// # Safety
/// As `Instance::of`; `call` is null or valid.
pub unsafe fn owner(
    instance: *mut stg_strategy,
    name: &str,
    states: u32,
    call: *const stg_call,
    body: impl FnOnce(&Instance, &mut Strategy, &stg_call) -> Result<()>,
) -> Result<()> {
    let instance = unsafe { Instance::of(instance)? };
    let mut time: stg_call = unsafe { std::mem::zeroed() };
    if !call.is_null() {
        time = unsafe { read(call, STG_CALL_MIN_SIZE, "call")? };
        if time.streams.is_null() && time.num_streams != 0 {
            return invalid(format!("call.streams is null, call.num_streams {}", time.num_streams));
        }
        for stream in unsafe { crate::tree::slice(time.streams, time.num_streams) } {
            if stream.kind > STG_STREAM_PER_THREAD_DEFAULT || stream.reserved != 0 {
                return invalid(format!("a stream of the call has kind {} and reserved {}; 0 or 1, and 0", stream.kind, stream.reserved));
            }
        }
    }
    if instance.busy.swap(true, Ordering::Acquire) {
        let is_inside = instance.thread.load(Ordering::Acquire) == this_thread();
        let why = if is_inside { "from inside a callback of its own" } else { "while another thread is in a call" };
        return precondition(format!("{name} of this instance {why}; it takes one caller at a time"));
    }
    instance.thread.store(this_thread(), Ordering::Release);
    struct Leave<'a>(&'a Instance);
    impl Drop for Leave<'_> {
        fn drop(&mut self) {
            if self.0.aborted.load(Ordering::Acquire) {
                self.0.state.store(STG_STATE_DRAINING, Ordering::Release);
            }
            self.0.thread.store(0, Ordering::Release);
            self.0.busy.store(false, Ordering::Release);
        }
    }
    let _leave = Leave(instance);
    let state = instance.state.load(Ordering::Acquire);
    if state & states == 0 {
        return Err(not_legal(name, state));
    }
    instance.check_time(&time)?;
    body(instance, unsafe { &mut *instance.strategy.get() }, &time)
}

fn not_legal(name: &str, state: u32) -> Error {
    let (is, first) = match state {
        STG_STATE_CREATED => ("created", "setup"),
        STG_STATE_FIT => ("set up for fit", "teardown"),
        STG_STATE_EVALUATE => ("set up for evaluation", "teardown"),
        STG_STATE_MODELLESS => ("set up without a model", "teardown"),
        _ => ("draining, after an abort or a deadline", "destroy"),
    };
    let mut error = Error::new(STG_FAILED_PRECONDITION, format!("{name} is not legal now: the instance is {is}; call {first} first"));
    if state == STG_STATE_DRAINING {
        error.flags = STG_ERROR_INSTANCE_DRAINING;
    }
    error
}

// ---- growing structs

fn size_of_struct<T>(from: *const T, min_size: u32, name: &str) -> Result<u64> {
    if from.is_null() {
        return invalid(format!("{name} is null"));
    }
    let size = unsafe { *from.cast::<u64>() };
    if size < min_size.into() || size > STG_MAX_STRUCT_SIZE_BYTES.into() {
        return invalid(format!("{name}.struct_size is {size}; it must be {min_size} to {STG_MAX_STRUCT_SIZE_BYTES}"));
    }
    Ok(size)
}

/// An argument: what both know is read, and what only the caller knows must be zero.
///
/// # Safety
/// Null, or as long as its struct_size says. T may be all zeros.
pub unsafe fn read<T: Copy>(from: *const T, min_size: u32, name: &str) -> Result<T> {
    let size = size_of_struct(from, min_size, name)? as usize;
    let known = size.min(size_of::<T>());
    unsafe {
        if let Some(offset) = (known..size).find(|&offset| *from.cast::<u8>().add(offset) != 0) {
            return unimplemented(format!("{name} has something at byte {offset}, which this plugin doesn't know; set it to zero"));
        }
        let mut made: T = std::mem::zeroed();
        ptr::copy_nonoverlapping(from.cast::<u8>(), (&raw mut made).cast::<u8>(), known);
        Ok(made)
    }
}

/// Whether a result can be written.
pub fn check_out<T>(to: *const T, min_size: u32, name: &str) -> Result<()> {
    size_of_struct(to, min_size, name).map(|_| ())
}

/// A result: as much as both know, and its size says how much.
///
/// # Safety
/// Checked with `check_out`.
pub unsafe fn write<T: Copy>(to: *mut T, mut from: T) {
    unsafe {
        let known = (*to.cast::<u64>()).min(size_of::<T>() as u64);
        *(&raw mut from).cast::<u64>() = known;
        ptr::copy_nonoverlapping((&raw const from).cast::<u8>(), to.cast::<u8>(), known as usize);
    }
}

/// A struct of the other side's own: of what it has more, nothing is read.
///
/// # Safety
/// As `read`.
pub unsafe fn read_table<T: Copy>(from: *const T, min_size: u32, name: &str) -> Result<T> {
    let known = (size_of_struct(from, min_size, name)? as usize).min(size_of::<T>());
    unsafe {
        let mut made: T = std::mem::zeroed();
        ptr::copy_nonoverlapping(from.cast::<u8>(), (&raw mut made).cast::<u8>(), known);
        Ok(made)
    }
}
