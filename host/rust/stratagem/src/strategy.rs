// SPDX-License-Identifier: Apache-2.0
//! An instance of a strategy: its life, its data members, its state. Its steps are in `steps.rs`.
use crate::config::to_json;
use crate::error::{Code, Error, Result, check};
use crate::host::{Host, HostTable};
use crate::model::{ModelHandle, Stage};
use crate::plugin::StrategyFactory;
use crate::tensor::Tensor;
use crate::types::{Device, borrow_slice, sized, to_text};
use crate::value::{Batch, Tree};
use serde::Serialize;
use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use stratagem_sys as sys;

/// A function of the table on this instance; an error where there is none. The call struct is the first argument after the instance.
macro_rules! call {
    ($strategy:expr, $slot:ident $(, $argument:expr)*) => {{
        let strategy: &Strategy<'_> = $strategy;
        match unsafe { sys::slot!(strategy.api, $slot) } {
            Some(function) => strategy.with_call(|call| unsafe { check(function(strategy.instance, call $(, $argument)*)) }),
            None => Err(absent(stringify!($slot))),
        }
    }};
}
pub(crate) use call;

pub(crate) fn absent(function: &str) -> Error {
    Error::new(Code::Unimplemented, format!("this strategy has no {function}"))
}

/// How an instance is made, beside its config.
#[derive(Default)]
pub struct CreateOptions {
    /// Replicas run one after the other on the calling thread, and everything of the host's is called only there.
    pub caller_thread_only: bool,
    /// Where the strategy logs to.
    pub host: Option<Box<dyn Host>>,
}

/// An instance: one that was created, or for a while that of a [`crate::Session`]. Dropping the former ends it, and joins its threads.
///
/// It can be given to another thread, but not be used by two: what takes one caller at a time takes `&mut self`.
/// ```
/// fn one_thread(strategy: &mut stratagem::Strategy) {
///     std::thread::scope(|scope| {
///         scope.spawn(|| strategy.barrier("a"));
///     });
/// }
/// ```
/// ```compile_fail,E0499
/// fn two_threads(strategy: &mut stratagem::Strategy) {
///     std::thread::scope(|scope| {
///         scope.spawn(|| strategy.barrier("a"));
///         scope.spawn(|| strategy.barrier("a")); // error: borrowed twice
///     });
/// }
/// ```
/// Views of its weights end before the next call that may write them:
/// ```
/// fn fresh(strategy: &mut stratagem::Strategy) -> stratagem::Result<()> {
///     strategy.zero_grad()?;
///     let state = strategy.export_state()?;
///     println!("{state:?}");
///     Ok(())
/// }
/// ```
/// ```compile_fail,E0499
/// fn stale(strategy: &mut stratagem::Strategy) -> stratagem::Result<()> {
///     let state = strategy.export_state()?;
///     strategy.zero_grad()?; // error: `state` still borrows the instance
///     println!("{state:?}");
///     Ok(())
/// }
/// ```
pub struct Strategy<'a> {
    pub(crate) api: *const sys::stg_strategy_api,
    pub(crate) instance: *mut sys::stg_strategy,
    pub(crate) weights: Vec<f64>,
    timeout: Option<Duration>,
    cancel: Option<Arc<AtomicU32>>,
    abort: Abort,
    session: Option<PhantomData<&'a mut ()>>, // whose it is, and which destroys it
}

// [owner]: one caller at a time, on whatever thread. Through a `&Strategy` only [any] functions are called.
unsafe impl Send for Strategy<'_> {}
unsafe impl Sync for Strategy<'_> {}

/// Ends the call in progress of an instance, from any thread; does nothing once the instance is gone.
#[derive(Clone)]
pub struct Abort(Arc<Mutex<Option<Target>>>);

struct Target(*const sys::stg_strategy_api, *mut sys::stg_strategy);
unsafe impl Send for Target {}

impl Abort {
    /// The call in progress returns [`Code::Aborted`] as soon as it can; then the instance can only be dropped.
    pub fn abort(&self) {
        let target = self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(Target(api, instance)) = &*target {
            if let Some(abort) = unsafe { sys::slot!(*api, abort) } {
                unsafe { abort(*instance) };
            }
        }
    }
}

/// What an instance is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
#[allow(missing_docs)]
pub struct Status {
    pub state: State,
    /// backward calls since the last update
    pub num_micro_batches: u64,
    pub num_updates: u64,
}

/// The states of an instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum State {
    Created,
    Fit,
    Evaluate,
    Modelless,
    Draining,
}

/// A tree over memory of the instance, which stays borrowed meanwhile.
pub struct Views<'a> {
    tree: Tree,
    instance: PhantomData<&'a mut ()>,
}

impl Deref for Views<'_> {
    type Target = Tree;
    fn deref(&self) -> &Tree {
        &self.tree
    }
}

impl std::fmt::Debug for Views<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.tree.fmt(f)
    }
}

/// How numbers become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
#[allow(missing_docs)]
pub enum ReduceOp {
    Mean = sys::STG_REDUCE_MEAN,
    Sum = sys::STG_REDUCE_SUM,
    Min = sys::STG_REDUCE_MIN,
    Max = sys::STG_REDUCE_MAX,
}

/// How the decisions of ranks become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
#[allow(missing_docs)]
pub enum Decide {
    All = sys::STG_DECIDE_ALL,
    Any = sys::STG_DECIDE_ANY,
}

/// One device's gradients, for [`Strategy::reduce_gradients`].
pub struct GradientSet {
    /// The device that they belong to, a logical CPU by its own index.
    pub device: Device,
    /// What they count in a mean.
    pub weight: f64,
    /// Reduced in place; one that is none here and not in every set becomes a new tensor.
    pub gradients: Vec<Option<Tensor>>,
}

impl Strategy<'static> {
    /// Makes an instance from a config: anything that serde turns into a JSON object, such as [`crate::StrategyConfig`].
    pub fn create(factory: StrategyFactory, config: &impl Serialize) -> Result<Strategy<'static>> {
        Strategy::create_with(factory, config, CreateOptions::default())
    }

    /// The same, with services of the host's.
    pub fn create_with(factory: StrategyFactory, config: &impl Serialize, options: CreateOptions) -> Result<Strategy<'static>> {
        let config = to_json(config)?;
        let host = options.host.map(HostTable::new); // the instance retains it
        let args = sized!(stg_create_args {
            config_json: to_text(&config),
            host: host.as_ref().map_or(std::ptr::null(), |host| host.raw()),
            flags: if options.caller_thread_only { sys::STG_CREATE_CALLER_THREAD_ONLY.into() } else { 0 },
        });
        let api = factory.api();
        let create = unsafe { sys::slot!(api, create) }.ok_or_else(|| absent("create"))?;
        let mut instance = std::ptr::null_mut();
        unsafe { check(create(&args, &mut instance))? };
        Ok(unsafe { Strategy::over(api, instance, None) })
    }
}

impl<'a> Strategy<'a> {
    /// # Safety
    /// An instance, which lives for 'a.
    pub(crate) unsafe fn over(
        api: *const sys::stg_strategy_api,
        instance: *mut sys::stg_strategy,
        session: Option<PhantomData<&'a mut ()>>,
    ) -> Strategy<'a> {
        let abort = Abort(Arc::new(Mutex::new(Some(Target(api, instance)))));
        Strategy { api, instance, weights: Vec::new(), timeout: None, cancel: None, abort, session }
    }

    /// From here on, a call that takes longer ends with [`Code::DeadlineExceeded`].
    pub fn set_timeout(&mut self, timeout: Option<Duration>) {
        self.timeout = timeout;
    }

    /// From here on, a call ends with [`Code::Cancelled`] as soon as possible when the number is not 0.
    pub fn set_cancel(&mut self, cancel: Option<Arc<AtomicU32>>) {
        self.cancel = cancel;
    }

    /// A handle for other threads, to end a call that hangs.
    pub fn abort_handle(&self) -> Abort {
        self.abort.clone()
    }

    /// The table and the instance, for what this crate doesn't wrap. They stay this instance's.
    pub fn as_raw(&self) -> (*const sys::stg_strategy_api, *mut sys::stg_strategy) {
        (self.api, self.instance)
    }

    #[inline]
    pub(crate) fn with_call<T>(&self, body: impl FnOnce(*const sys::stg_call) -> T) -> T {
        if self.timeout.is_none() && self.cancel.is_none() {
            return body(std::ptr::null());
        }
        let mut call = sized!(stg_call {});
        if let Some(timeout) = self.timeout {
            let mut now: libc::timespec = unsafe { std::mem::zeroed() };
            unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) };
            let now = Duration::new(now.tv_sec as u64, now.tv_nsec as u32);
            call.deadline_ns = u64::try_from(now.saturating_add(timeout).as_nanos()).unwrap_or(0);
        }
        if let Some(cancel) = &self.cancel {
            call.cancel = cancel.as_ptr();
        }
        body(&call)
    }

    /// What it is doing.
    pub fn status(&self) -> Result<Status> {
        let mut out = sized!(stg_status {});
        let status = unsafe { sys::slot!(self.api, status) }.ok_or_else(|| absent("status"))?;
        unsafe { check(status(self.instance, &mut out))? };
        let state = match out.state {
            sys::STG_STATE_CREATED => State::Created,
            sys::STG_STATE_FIT => State::Fit,
            sys::STG_STATE_EVALUATE => State::Evaluate,
            sys::STG_STATE_MODELLESS => State::Modelless,
            _ => State::Draining,
        };
        Ok(Status { state, num_micro_batches: out.num_micro_batches, num_updates: out.num_updates })
    }

    /// The devices; the first is the root.
    pub fn devices(&self) -> Result<Vec<Device>> {
        let (mut devices, mut count) = (std::ptr::null(), 0);
        let function = unsafe { sys::slot!(self.api, devices) }.ok_or_else(|| absent("devices"))?;
        unsafe {
            check(function(self.instance, &mut devices, &mut count))?;
            Ok(borrow_slice(devices, count).iter().map(|&device| Device::from_abi(device)).collect())
        }
    }

    /// Puts a model on the devices, beginning from a state if there is one.
    pub fn setup(&mut self, model: &ModelHandle, state: Option<Tree>, stage: Stage) -> Result<()> {
        self.set_up(model.raw(), state, stage)
    }

    /// Without a model: for [`Strategy::reduce_gradients`].
    pub fn setup_modelless(&mut self) -> Result<()> {
        self.set_up(std::ptr::null(), None, Stage::Fit)
    }

    fn set_up(&mut self, model: *const sys::stg_model, mut state: Option<Tree>, stage: Stage) -> Result<()> {
        let state = state.as_mut().map_or(std::ptr::null_mut(), Tree::as_mut_raw);
        let args = sized!(stg_setup_args { model: model, state: state, stage: stage as u64 });
        call!(self, setup, &args)
    }

    /// Lets model and optimizer go; `setup` may follow.
    pub fn teardown(&mut self) -> Result<()> {
        call!(self, teardown)
    }

    /// A batch as the strategy needs it, or on the device that is named.
    pub fn batch_to_device(&mut self, batch: impl Batch, device: Option<Device>, dataloader_index: i64) -> Result<Tree> {
        let mut batch = batch.argument();
        let none = sys::stg_device { kind: sys::STG_DEVICE_NONE, index: -1 };
        let args = sized!(stg_transfer_args {
            batch: batch.as_mut_raw(),
            device: device.map_or(none, Device::to_abi),
            dataloader_index: dataloader_index,
        });
        let mut out = Tree::empty();
        call!(self, batch_to_device, &args, out.as_mut_raw())?;
        Ok(out)
    }

    /// Every tensor in host memory, finished: how to read a loss.
    pub fn to_host(&mut self, object: impl Batch) -> Result<Tree> {
        let (mut object, mut out) = (object.argument(), Tree::empty());
        call!(self, to_host, object.as_mut_raw(), out.as_mut_raw())?;
        Ok(out)
    }

    /// The object of rank `source`, on every rank.
    pub fn broadcast(&mut self, object: impl Batch, source: i32) -> Result<Tree> {
        let (mut object, mut out) = (object.argument(), Tree::empty());
        call!(self, broadcast, object.as_mut_raw(), source, out.as_mut_raw())?;
        Ok(out)
    }

    /// Every rank's tree.
    pub fn all_gather(&mut self, object: impl Batch) -> Result<Tree> {
        let (mut object, mut out) = (object.argument(), Tree::empty());
        call!(self, all_gather, object.as_mut_raw(), out.as_mut_raw())?;
        Ok(out)
    }

    /// Every tensor becomes one number over all its elements.
    pub fn reduce(&mut self, object: impl Batch, op: ReduceOp) -> Result<Tree> {
        let (mut object, mut out) = (object.argument(), Tree::empty());
        call!(self, reduce, object.as_mut_raw(), op as u32, out.as_mut_raw())?;
        Ok(out)
    }

    /// One decision of all ranks.
    pub fn reduce_boolean_decision(&mut self, decision: bool, mode: Decide) -> Result<bool> {
        let mut out = 0;
        call!(self, reduce_boolean_decision, decision.into(), mode as u32, &mut out)?;
        Ok(out != 0)
    }

    /// Returns when every device's work is done and every rank has entered the barrier of this name.
    #[inline]
    pub fn barrier(&mut self, name: &str) -> Result<()> {
        call!(self, barrier, to_text(name))
    }

    /// Reduces one set of gradients per device, in place: all that a host with its own model and optimizer needs.
    pub fn reduce_gradients(&mut self, sets: &mut [GradientSet], op: ReduceOp) -> Result<()> {
        let mut raw: Vec<sys::stg_gradient_set> = sets
            .iter_mut()
            .map(|set| {
                sized!(stg_gradient_set {
                    device: set.device.to_abi(),
                    weight: set.weight,
                    gradients: set.gradients.as_mut_ptr().cast(), // an Option<Tensor> is a pointer that may be null
                    num_gradients: set.gradients.len() as u64,
                })
            })
            .collect();
        let pointers: Vec<*mut sys::stg_gradient_set> = raw.iter_mut().map(std::ptr::from_mut).collect();
        let args = sized!(stg_reduce_gradients_args { sets: pointers.as_ptr(), num_sets: pointers.len() as u64, op: op as u64 });
        call!(self, reduce_gradients, &args)
    }

    /// The state, as views of the weights. [`Strategy::copy_state`] for one to keep.
    pub fn export_state(&mut self) -> Result<Views<'_>> {
        let mut tree = Tree::empty();
        call!(self, export_state, 0, tree.as_mut_raw())?;
        Ok(self.views(tree))
    }

    /// The state, copied.
    pub fn copy_state(&mut self) -> Result<Tree> {
        let mut tree = Tree::empty();
        call!(self, export_state, sys::STG_EXPORT_COPY.into(), tree.as_mut_raw())?;
        Ok(tree)
    }

    /// Takes a state. The report: a dict of lists of names (missing, unexpected, unknown_keys).
    pub fn import_state(&mut self, state: impl Batch, strict: bool) -> Result<Tree> {
        let (mut state, mut report) = (state.argument(), Tree::empty());
        let flags = if strict { sys::STG_IMPORT_STRICT.into() } else { 0 };
        call!(self, import_state, state.as_mut_raw(), flags, report.as_mut_raw())?;
        Ok(report)
    }

    /// Writes a checkpoint folder, with a text of the host's own beside the state.
    pub fn save(&mut self, folder: &str, host_json: &str) -> Result<()> {
        let args = sized!(stg_checkpoint_args { path: to_text(folder), host_json: to_text(host_json) });
        call!(self, save, &args)
    }

    /// Reads one; gives that text back.
    pub fn load(&mut self, folder: &str, strict: bool) -> Result<String> {
        let flags = if strict { sys::STG_IMPORT_STRICT.into() } else { 0 };
        let args = sized!(stg_checkpoint_args { path: to_text(folder), flags: flags });
        let mut text = Tree::empty();
        call!(self, load, &args, text.as_mut_raw(), std::ptr::null_mut())?;
        Ok(text.root().text()?.to_owned())
    }
}

impl Strategy<'_> {
    #[inline]
    pub(crate) fn views(&mut self, tree: Tree) -> Views<'_> {
        Views { tree, instance: PhantomData }
    }
}

impl Drop for Strategy<'_> {
    fn drop(&mut self) {
        *self.abort.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = None;
        if self.session.is_some() {
            return;
        }
        unsafe {
            if let Some(destroy) = sys::slot!(self.api, destroy) {
                destroy(self.instance);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::value::ValueRef;

    /// What only several ranks would show.
    #[test]
    fn the_mode_of_a_decision_and_the_rank_of_a_broadcast_reach_the_strategy() {
        unsafe extern "C" fn decide(
            _: *mut sys::stg_strategy,
            _: *const sys::stg_call,
            decision: u32,
            mode: u32,
            out: *mut u32,
        ) -> *mut sys::stg_error {
            unsafe { *out = (decision == 1 && mode == sys::STG_DECIDE_ANY).into() };
            std::ptr::null_mut()
        }
        unsafe extern "C" fn broadcast(
            _: *mut sys::stg_strategy,
            _: *const sys::stg_call,
            _: *mut sys::stg_tree,
            source: i32,
            out: *mut sys::stg_tree,
        ) -> *mut sys::stg_error {
            unsafe { *out = Tree::from(source).into_raw() };
            std::ptr::null_mut()
        }
        let api = sized!(stg_strategy_api { reduce_boolean_decision: Some(decide), broadcast: Some(broadcast) });
        let mut strategy = unsafe { Strategy::over(&api, std::ptr::null_mut(), None) };
        assert!(strategy.reduce_boolean_decision(true, Decide::Any).unwrap());
        assert!(!strategy.reduce_boolean_decision(true, Decide::All).unwrap());
        assert!(!strategy.reduce_boolean_decision(false, Decide::Any).unwrap());
        assert!(matches!(strategy.broadcast(Tree::from(true), 3).unwrap().root(), ValueRef::Int(3)));
        assert_eq!(strategy.barrier("none").unwrap_err().message(), "this strategy has no barrier");
    }
}
