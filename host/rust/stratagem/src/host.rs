// SPDX-License-Identifier: Apache-2.0
//! What a host offers to a strategy: its log, progress and trace.
use crate::error::contain;
use crate::types::{borrow_text, sized};
use crate::value::ValueRef;
use std::ffi::c_void;
use std::sync::Arc;
use stratagem_sys as sys;

/// How grave a message is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum Level {
    Debug,
    Info,
    Warning,
    Error,
}

impl Level {
    pub(crate) fn from_abi(level: u32) -> Level {
        match level {
            sys::STG_LOG_DEBUG => Level::Debug,
            sys::STG_LOG_INFO => Level::Info,
            sys::STG_LOG_WARNING => Level::Warning,
            _ => Level::Error,
        }
    }
}

/// Services of a host. All functions may be called from any thread, several at once (with `caller_thread_only`: on the thread that is inside
/// a call). A panic goes no further than the function.
pub trait Host: Send + Sync + 'static {
    /// One message, and its fields, a dict or none.
    fn log(&self, level: Level, message: &str, fields: ValueRef<'_>) {
        let _ = (level, message, fields);
    }

    /// `done` of `total` units (0: unknown) of a long piece of work.
    fn progress(&self, what: &str, done: u64, total: u64) {
        let _ = (what, done, total);
    }

    /// A phase begins (true) or ends (false) on a replica.
    fn trace(&self, phase: &str, replica: i32, begins: bool) {
        let _ = (phase, replica, begins);
    }
}

/// The table, which lives as long as somebody holds a reference: C's references are the Arc's.
pub(crate) struct HostTable {
    raw: sys::stg_host,
    host: Box<dyn Host>,
}

// The pointer in `raw` is to itself.
unsafe impl Send for HostTable {}
unsafe impl Sync for HostTable {}

impl HostTable {
    pub(crate) fn new(host: Box<dyn Host>) -> Arc<HostTable> {
        let raw = sized!(stg_host {
            retain: Some(retain),
            release: Some(release),
            log: Some(log),
            progress: Some(progress),
            trace_begin: Some(trace_begin),
            trace_end: Some(trace_end),
        });
        let mut table = Arc::new(HostTable { raw, host });
        let pointer = Arc::as_ptr(&table).cast_mut().cast();
        Arc::get_mut(&mut table).expect("nobody else has it yet").raw.self_ = pointer;
        table
    }

    pub(crate) fn raw(&self) -> *const sys::stg_host {
        &self.raw
    }
}

unsafe extern "C" fn retain(this: *mut c_void) {
    unsafe { Arc::increment_strong_count(this.cast::<HostTable>()) };
}

unsafe extern "C" fn release(this: *mut c_void) {
    contain(|| unsafe { Arc::decrement_strong_count(this.cast::<HostTable>()) });
}

unsafe fn host<'a>(this: *mut c_void) -> &'a dyn Host {
    unsafe { &*(*this.cast::<HostTable>()).host }
}

unsafe extern "C" fn log(this: *mut c_void, level: u32, message: sys::stg_string, fields: *const sys::stg_tree) {
    contain(|| unsafe {
        let fields = fields.as_ref().map_or(ValueRef::None, |tree| ValueRef::read(&tree.root));
        host(this).log(Level::from_abi(level), borrow_text(message), fields);
    });
}

unsafe extern "C" fn progress(this: *mut c_void, what: sys::stg_string, done: u64, total: u64) {
    contain(|| unsafe { host(this).progress(borrow_text(what), done, total) });
}

unsafe extern "C" fn trace_begin(this: *mut c_void, phase: sys::stg_string, replica: i32) {
    contain(|| unsafe { host(this).trace(borrow_text(phase), replica, true) });
}

unsafe extern "C" fn trace_end(this: *mut c_void, phase: sys::stg_string, replica: i32) {
    contain(|| unsafe { host(this).trace(borrow_text(phase), replica, false) });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::to_text;
    use std::sync::Mutex;

    struct Told(Arc<Mutex<Vec<String>>>);

    impl Told {
        fn tell(&self, what: String) {
            self.0.lock().unwrap().push(what);
            panic!("a host that panics harms nobody");
        }
    }

    impl Host for Told {
        fn log(&self, level: Level, message: &str, fields: ValueRef<'_>) {
            self.tell(format!("{level:?} {message} {fields:?}"));
        }
        fn progress(&self, what: &str, done: u64, total: u64) {
            self.tell(format!("{what} {done} of {total}"));
        }
        fn trace(&self, phase: &str, replica: i32, begins: bool) {
            self.tell(format!("{phase} {replica} {begins}"));
        }
    }

    /// Not every strategy has something to tell, so they are called here as one would.
    #[test]
    fn what_a_strategy_tells_reaches_the_host_whose_panics_go_no_further() {
        let told = Arc::new(Mutex::new(vec![]));
        let table = HostTable::new(Box::new(Told(told.clone())));
        let raw = table.raw;
        unsafe {
            raw.retain.unwrap()(raw.self_);
            drop(table);
            raw.log.unwrap()(raw.self_, sys::STG_LOG_INFO, to_text("hello"), std::ptr::null());
            raw.progress.unwrap()(raw.self_, to_text("reading"), 3, 7);
            raw.trace_begin.unwrap()(raw.self_, to_text("step"), 1);
            raw.trace_end.unwrap()(raw.self_, to_text("step"), 1);
            assert_eq!(Arc::strong_count(&told), 2, "the strategy's reference holds it");
            raw.release.unwrap()(raw.self_);
        }
        assert_eq!(*told.lock().unwrap(), ["Info hello None", "reading 3 of 7", "step 1 true", "step 1 false"]);
        assert_eq!(Arc::strong_count(&told), 1);
    }
}
