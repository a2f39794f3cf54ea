// SPDX-License-Identifier: Apache-2.0
//! Models of the host's own: a framework with its own autograd behind two traits. An error or a panic in one becomes an error of the call
//! that led there; nothing unwinds through C.
use crate::error::{Error, Result, check};
use crate::table::Table;
use crate::tensor::{Element, Tensor, TensorView};
use crate::types::{DType, Device};
use crate::value::Tree;
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::Arc;
use stratagem_sys as sys;

/// Makes replicas of itself, one per device.
pub trait Model: Send + Sync + 'static {
    /// A replica; used on one thread at a time, not always the same.
    type Replica: Replica;
    /// Makes one, and the memory of its parameters. Replicas of one seed start from equal weights.
    fn replicate(&self, args: &ReplicateArgs) -> Result<(Self::Replica, Parameters)>;
}

/// The model on one device. Its parameters are kept for it, since the strategy writes them in place; each function is lent them.
pub trait Replica: Send + 'static {
    /// What backward needs of a step.
    type Graph: Send + 'static;

    /// Runs one step on this replica's share of a batch. In training the outputs are the loss, a 0-dim tensor, or a dict with one under
    /// "loss"; and with [`StepContext::needs_graph`] a graph is given back.
    fn step(&mut self, memory: Memory<'_>, context: &StepContext, batch: Tree) -> Result<StepOutput<Self::Graph>>;

    /// Backward from the loss times `scale`. Every parameter is reported to the sink once.
    fn backward(&mut self, memory: Memory<'_>, graph: Self::Graph, scale: f64, sink: &mut Sink<'_>) -> Result<()>;

    /// What the loss is over its share, where a step reports no denominator.
    fn loss_kind(&self) -> LossKind {
        LossKind::Mean
    }

    /// Training or evaluation.
    fn set_training(&mut self, training: bool) -> Result<()> {
        let _ = training;
        Ok(())
    }

    /// The strategy has written parameters or buffers: copies of them are out of date.
    fn parameters_changed(&mut self, memory: Memory<'_>) -> Result<()> {
        let _ = memory;
        Ok(())
    }
}

/// What a replica has that a strategy moves, updates and saves. The order of the parameters is that of the gradients.
#[derive(Default)]
#[allow(missing_docs)]
pub struct Parameters {
    pub parameters: Vec<Parameter>,
    /// What is kept in a checkpoint, or moved, beside them.
    pub buffers: Vec<Parameter>,
}

/// A replica's parameters and buffers as they are now, for the length of a call.
pub struct Memory<'a> {
    pub(crate) parameters: &'a [Parameter],
    pub(crate) buffers: &'a mut [Parameter],
}

impl Memory<'_> {
    /// The parameters.
    pub fn parameters(&self) -> &[Parameter] {
        self.parameters
    }

    /// The buffers.
    pub fn buffers(&self) -> &[Parameter] {
        self.buffers
    }

    /// The elements of a buffer, to be written by the model itself.
    pub fn buffer_mut<T: Element>(&mut self, index: usize) -> Result<&mut [T]> {
        let num_buffers = self.buffers.len();
        let buffer = self.buffers.get_mut(index);
        buffer.ok_or_else(|| Error::invalid(format!("buffer {index} of {num_buffers}")))?.tensor.as_mut_slice()
    }
}

/// What a loss is over its share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LossKind {
    /// A mean over the rows.
    Mean,
    /// A sum over the rows.
    Sum,
}

/// How a replica is made.
#[derive(Debug, Clone)]
#[non_exhaustive]
#[allow(missing_docs)]
pub struct ReplicateArgs {
    pub device: Device,
    /// 0 is the root.
    pub replica: i32,
    pub num_replicas: i32,
    /// Of floating parameters and buffers; none: the model's own.
    pub floating_dtype: Option<DType>,
    /// Threads for the replica's own; none: as they are.
    pub num_threads: Option<u32>,
    /// Initial weights depend on it alone.
    pub seed: u64,
}

/// What part of a run a step belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
#[allow(missing_docs)]
pub enum Stage {
    Fit = sys::STG_STAGE_FIT,
    Validate = sys::STG_STAGE_VALIDATE,
    Test = sys::STG_STAGE_TEST,
    Predict = sys::STG_STAGE_PREDICT,
}

impl Stage {
    pub(crate) fn from_abi(stage: u64) -> Result<Stage> {
        [Stage::Fit, Stage::Validate, Stage::Test, Stage::Predict]
            .into_iter()
            .find(|&known| known as u64 == stage)
            .ok_or_else(|| Error::invalid(format!("stage {stage}; known are 0 to 3")))
    }
}

/// What a step is told.
#[derive(Debug, Clone)]
#[non_exhaustive]
#[allow(missing_docs)]
pub struct StepContext {
    pub device: Device,
    pub replica: i32,
    pub num_replicas: i32,
    pub stage: Stage,
    /// A backward will follow.
    pub needs_graph: bool,
    pub batch_index: i64,
    pub dataloader_index: i64,
    /// Updates done.
    pub global_step: i64,
    /// None: autocast is off.
    pub autocast_dtype: Option<DType>,
}

/// What a step gives back.
pub struct StepOutput<G> {
    /// See [`Replica::step`].
    pub outputs: Tree,
    /// How much the share counts; none: its rows. The loss is then a mean over this.
    pub denominator: Option<f64>,
    /// What backward needs.
    pub graph: Option<G>,
}

/// A parameter or buffer: memory that the strategy may write between calls of the replica, and share between replicas.
pub struct Parameter {
    pub(crate) names: Vec<String>,
    pub(crate) tensor: Tensor,
    pub(crate) flags: u64,
}

impl Parameter {
    /// A trained parameter, kept in checkpoints.
    pub fn new(name: impl Into<String>, tensor: Tensor) -> Parameter {
        let flags = sys::STG_PARAMETER_PINNED | sys::STG_PARAMETER_PERSISTENT | sys::STG_PARAMETER_REQUIRES_GRAD;
        Parameter { names: vec![name.into()], tensor, flags: flags.into() }
    }

    /// One more name of the same memory (tied weights).
    pub fn alias(mut self, name: impl Into<String>) -> Parameter {
        self.names.push(name.into());
        self
    }

    /// Without a gradient.
    pub fn frozen(mut self) -> Parameter {
        self.flags &= !u64::from(sys::STG_PARAMETER_REQUIRES_GRAD);
        self
    }

    /// Not in checkpoints.
    pub fn transient(mut self) -> Parameter {
        self.flags &= !u64::from(sys::STG_PARAMETER_PERSISTENT);
        self
    }

    /// What it is now.
    pub fn tensor(&self) -> &TensorView {
        &self.tensor
    }

    /// Its elements now.
    pub fn as_slice<T: Element>(&self) -> Result<&[T]> {
        self.tensor.as_slice()
    }
}

/// Where backward reports gradients. It stays on the thread of its replica: it is neither `Send` nor `Sync`.
pub struct Sink<'a> {
    raw: &'a sys::stg_gradient_sink,
    thread: PhantomData<*mut ()>, // neither Send nor Sync
}

impl<'a> Sink<'a> {
    pub(crate) fn new(raw: &'a sys::stg_gradient_sink) -> Sink<'a> {
        Sink { raw, thread: PhantomData }
    }

    /// Parameter `index` has its gradient, of the parameter's shape and type; none: it got none. An error ends the backward: return it.
    pub fn ready(&mut self, index: usize, gradient: Option<Tensor>) -> Result<()> {
        let Some(ready) = self.raw.ready else { return Err(Error::invalid("the strategy's sink has no `ready`")) };
        let gradient = gradient.map_or(std::ptr::null_mut(), Tensor::into_raw);
        unsafe { check(ready(self.raw.self_, index as u64, gradient, std::ptr::null())) }
            .map_err(|cause| Error::new(cause.code(), format!("the gradient of parameter {index} was refused")).with_source(cause))
    }
}

/// A model to give to a strategy or a session: one of Rust's own, or one that a plugin made. A clone is one more reference.
pub struct ModelHandle(NonNull<sys::stg_model>);

// retain and release are [any], and so is what a strategy does with it.
unsafe impl Send for ModelHandle {}
unsafe impl Sync for ModelHandle {}

impl ModelHandle {
    /// A model of Rust's own.
    pub fn new(model: impl Model) -> ModelHandle {
        let table = Arc::into_raw(Table::new(model)); // its first reference is this handle's
        ModelHandle(NonNull::new(table.cast_mut().cast()).expect("an Arc is never null"))
    }

    /// # Safety
    /// A valid model with one reference, the caller's.
    pub(crate) unsafe fn from_raw(model: *const sys::stg_model) -> Option<ModelHandle> {
        NonNull::new(model.cast_mut()).map(ModelHandle)
    }

    pub(crate) fn raw(&self) -> *const sys::stg_model {
        self.0.as_ptr()
    }
}

impl Clone for ModelHandle {
    fn clone(&self) -> ModelHandle {
        unsafe {
            if let Some(retain) = self.0.as_ref().retain {
                retain(self.0.as_ref().self_);
            }
        }
        ModelHandle(self.0)
    }
}

impl Drop for ModelHandle {
    fn drop(&mut self) {
        unsafe {
            if let Some(release) = self.0.as_ref().release {
                release(self.0.as_ref().self_);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stage_that_is_not_known_is_an_error() {
        for stage in [Stage::Fit, Stage::Validate, Stage::Test, Stage::Predict] {
            assert_eq!(Stage::from_abi(stage as u64).unwrap(), stage);
        }
        assert_eq!(Stage::from_abi(4).unwrap_err().message(), "stage 4; known are 0 to 3");
    }
}
