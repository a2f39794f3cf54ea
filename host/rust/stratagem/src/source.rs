// SPDX-License-Identifier: Apache-2.0
//! Data of the host's own, in the place of files: `{"source": "name", "batch_size": 64}` in a config.
use crate::error::{Result, contain, guard};
use crate::events::Shared;
use crate::types::{borrow_slice, sized, to_text};
use crate::value::Tree;
use std::ffi::c_void;
use stratagem_sys as sys;

/// A data set that a session shuffles, splits into batches and resumes. It may be read ahead, on another thread than the session's.
pub trait Source: Send + 'static {
    /// How many samples there are.
    fn num_samples(&self) -> usize;

    /// These samples, in this order: a tree, all of whose tensors have as many rows. An error ends the run.
    fn read(&mut self, rows: &[i64]) -> Result<Tree>;
}

struct Named {
    name: String,
    source: Box<dyn Source>,
    _events: Option<Shared>, // dropped last: sources are released when all else of the session is gone
}

/// Consumed by `stg_session_open`, which calls its release on every return.
pub(crate) fn table(name: String, source: Box<dyn Source>, events: Option<Shared>) -> sys::stg_data_source {
    let num_samples = source.num_samples() as i64;
    let named = Box::new(Named { name, source, _events: events });
    let text = to_text(&named.name);
    sized!(stg_data_source {
        name: text,
        self_: Box::into_raw(named).cast(),
        num_samples: num_samples,
        flags: sys::STG_SOURCE_ANY_THREAD.into(),
        read: Some(read),
        release: Some(release),
    })
}

unsafe extern "C" fn read(this: *mut c_void, rows: *const i64, num_rows: u64, batch: *mut sys::stg_tree) -> *mut sys::stg_error {
    guard("the source's read", || unsafe {
        *batch = (*this.cast::<Named>()).source.read(borrow_slice(rows, num_rows))?.into_raw();
        Ok(())
    })
}

unsafe extern "C" fn release(this: *mut c_void) {
    contain(|| drop(unsafe { Box::from_raw(this.cast::<Named>()) }));
}
