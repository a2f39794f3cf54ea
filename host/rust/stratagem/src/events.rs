// SPDX-License-Identifier: Apache-2.0
//! What a run tells its host.
use crate::error::{Error, Result, contain, guard};
use crate::host::Level;
use crate::model::Stage;
use crate::types::{borrow_text, sized};
use crate::value::ValueRef;
use std::ffi::c_void;
use std::sync::Arc;
use stratagem_sys as sys;

/// How far a run is.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
#[allow(missing_docs)]
pub struct Progress {
    /// of what is going on: validation is a part of fit
    pub stage: Stage,
    /// completed
    pub epoch: i64,
    /// none: no limit
    pub max_epochs: Option<i64>,
    /// of the epoch or the evaluation, completed
    pub batch: i64,
    pub num_batches: i64,
    /// updates done
    pub step: i64,
    /// none: no limit
    pub max_steps: Option<i64>,
    /// the last one that was logged; NaN before the first
    pub loss: f64,
}

impl Progress {
    pub(crate) fn from_abi(from: &sys::stg_progress) -> Result<Progress> {
        let limit = |number: i64| (number >= 0).then_some(number);
        Ok(Progress {
            stage: Stage::from_abi(from.stage)?,
            epoch: from.epoch,
            max_epochs: limit(from.max_epochs),
            batch: from.batch,
            num_batches: from.num_batches,
            step: from.step,
            max_steps: limit(from.max_steps),
            loss: from.loss,
        })
    }
}

/// What a run tells. All is called on the thread that is inside a call of the session, but `log`, which may come from any thread. An error, or a
/// panic, in one that returns a result ends the run; it is the cause of the run's error. A panic in `log` goes no further.
#[allow(unused_variables)]
pub trait Events: Send + Sync + 'static {
    /// A message.
    fn log(&self, level: Level, message: &str) {}

    /// After each update, and each batch of an evaluation.
    fn progress(&self, progress: &Progress) -> Result<()> {
        Ok(())
    }

    /// A line of the metrics file: JSON.
    fn metrics(&self, line: &str) -> Result<()> {
        Ok(())
    }

    /// Before a batch.
    fn batch_start(&self, progress: &Progress) -> Result<()> {
        Ok(())
    }

    /// After it, with its outputs.
    fn batch_end(&self, progress: &Progress, outputs: ValueRef<'_>) -> Result<()> {
        Ok(())
    }

    /// A swap to `strategy` (JSON) was tried before update `step` + 1. With an error the old one goes on.
    fn swap(&self, step: i64, strategy: &str, error: Option<&Error>) -> Result<()> {
        Ok(())
    }
}

/// Kept by the session's owner, and by its sources: a session that one of them ends is freed after that, on another thread.
pub(crate) type Shared = Arc<Box<dyn Events>>;

/// `self_` points into the Arc.
pub(crate) fn table(events: &Shared) -> sys::stg_session_events {
    sized!(stg_session_events {
        self_: Arc::as_ptr(events).cast_mut().cast(),
        log: Some(log),
        progress: Some(progress),
        metrics: Some(metrics),
        batch_start: Some(batch_start),
        batch_end: Some(batch_end),
        swap: Some(swap),
    })
}

unsafe fn events<'a>(this: *mut c_void) -> &'a dyn Events {
    unsafe { &**this.cast::<Box<dyn Events>>() }
}

unsafe extern "C" fn log(this: *mut c_void, level: u32, message: sys::stg_string) {
    contain(|| unsafe { events(this).log(Level::from_abi(level), borrow_text(message)) });
}

unsafe extern "C" fn progress(this: *mut c_void, progress: *const sys::stg_progress) -> *mut sys::stg_error {
    guard("the host's progress", || unsafe { events(this).progress(&Progress::from_abi(&*progress)?) })
}

unsafe extern "C" fn metrics(this: *mut c_void, line: sys::stg_string) -> *mut sys::stg_error {
    guard("the host's metrics", || unsafe { events(this).metrics(borrow_text(line)) })
}

unsafe extern "C" fn batch_start(this: *mut c_void, progress: *const sys::stg_progress) -> *mut sys::stg_error {
    guard("the host's batch_start", || unsafe { events(this).batch_start(&Progress::from_abi(&*progress)?) })
}

unsafe extern "C" fn batch_end(
    this: *mut c_void,
    progress: *const sys::stg_progress,
    outputs: *const sys::stg_value,
) -> *mut sys::stg_error {
    guard("the host's batch_end", || unsafe {
        let outputs = outputs.as_ref().map_or(ValueRef::None, |value| ValueRef::read(value));
        events(this).batch_end(&Progress::from_abi(&*progress)?, outputs)
    })
}

unsafe extern "C" fn swap(this: *mut c_void, step: i64, strategy: sys::stg_string, error: *const sys::stg_error) -> *mut sys::stg_error {
    guard("the host's swap", || unsafe { events(this).swap(step, borrow_text(strategy), Error::copy_of(error).as_ref()) })
}
