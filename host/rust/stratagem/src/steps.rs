// SPDX-License-Identifier: Apache-2.0
//! The steps of a strategy: what a training loop calls.
use crate::error::{Error, Result, check};
use crate::model::Stage;
use crate::strategy::{Strategy, Views, absent, call};
use crate::types::{borrow_slice, sized};
use crate::value::{Batch, Tree};
use stratagem_sys as sys;

/// Where in the run a batch stands.
#[derive(Debug, Clone, Copy, Default)]
#[allow(missing_docs)]
pub struct Position {
    pub batch_index: i64,
    pub dataloader_index: i64,
    pub global_step: i64,
}

/// What an update is to use.
#[derive(Debug, Clone, Copy)]
pub struct Update {
    /// The learning rate.
    pub lr: f64,
    /// How gradients are clipped.
    pub clip: Clip,
}

/// Clipping of gradients.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Clip {
    /// None.
    None,
    /// The whole gradient is scaled so that its 2-norm is at most this.
    Norm(f64),
    /// Each element is cut to at most this, in size.
    Value(f64),
}

impl Update {
    /// Without clipping.
    pub fn new(lr: f64) -> Update {
        Update { lr, clip: Clip::None }
    }

    fn to_abi(self) -> sys::stg_update_args {
        let (clip, limit) = match self.clip {
            Clip::None => (sys::STG_CLIP_NONE, 0.0),
            Clip::Norm(limit) => (sys::STG_CLIP_NORM, limit),
            Clip::Value(limit) => (sys::STG_CLIP_VALUE, limit),
        };
        sized!(stg_update_args { lr: self.lr, clip_limit: limit, clip: clip.into() })
    }
}

/// What became of an update.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct Updated {
    /// Whether weights were written.
    pub outcome: Outcome,
    /// Before clipping by norm; NaN without it.
    pub gradient_norm: f64,
    /// The denominators of all replicas and micro-batches.
    pub total_weight: f64,
    /// In force from now on; 1 without loss scaling.
    pub loss_scale: f64,
}

/// Whether an update was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outcome {
    /// More micro-batches follow.
    NotDue,
    /// Made.
    Done,
    /// A gradient overflowed; the loss scale was lowered.
    SkippedOverflow,
    /// All denominators were 0.
    SkippedNoWeight,
}

impl Updated {
    fn from_abi(from: &sys::stg_update_result) -> Updated {
        let outcome = match from.outcome as u32 {
            sys::STG_UPDATE_DONE => Outcome::Done,
            sys::STG_UPDATE_SKIPPED_OVERFLOW => Outcome::SkippedOverflow,
            sys::STG_UPDATE_SKIPPED_NO_WEIGHT => Outcome::SkippedNoWeight,
            _ => Outcome::NotDue,
        };
        let (gradient_norm, total_weight, loss_scale) = (from.gradient_norm, from.total_weight, from.loss_scale);
        Updated { outcome, gradient_norm, total_weight, loss_scale }
    }
}

#[inline]
fn step_args(batch: *mut sys::stg_tree, at: Position) -> sys::stg_step_args {
    sized!(stg_step_args { batch: batch, batch_index: at.batch_index, dataloader_index: at.dataloader_index, global_step: at.global_step })
}

impl Strategy<'_> {
    /// Forward on every replica; the graphs are kept for `backward`. The outputs lie on the root device.
    pub fn training_step(&mut self, batch: impl Batch, at: Position) -> Result<Tree> {
        let mut batch = batch.argument();
        let args = step_args(batch.as_mut_raw(), at);
        let mut result = sized!(stg_step_result {});
        call!(self, training_step, &args, &mut result)?;
        Ok(self.take(result))
    }

    /// Consumes the latest graphs. `is_last`: the update follows this micro-batch.
    pub fn backward(&mut self, is_last: bool) -> Result<()> {
        call!(self, backward, if is_last { sys::STG_BATCH_LAST_MICRO_BATCH.into() } else { 0 })
    }

    /// Reduces, clips, updates, and clears gradients.
    pub fn optimizer_step(&mut self, update: Update) -> Result<Updated> {
        let args = update.to_abi();
        let mut result = sized!(stg_update_result {});
        call!(self, optimizer_step, &args, &mut result)?;
        Ok(Updated::from_abi(&result))
    }

    /// The three in one; the first two without an update. Bitwise equal to them, and faster.
    pub fn train_batch(&mut self, batch: impl Batch, at: Position, update: Option<Update>) -> Result<(Tree, Updated)> {
        let mut batch = batch.argument();
        let update = update.map(Update::to_abi);
        let mut args = step_args(batch.as_mut_raw(), at);
        if let Some(update) = &update {
            (args.update, args.flags) = (update, sys::STG_BATCH_LAST_MICRO_BATCH.into());
        }
        let (mut result, mut updated) = (sized!(stg_step_result {}), sized!(stg_update_result {}));
        call!(self, train_batch, &args, &mut result, &mut updated)?;
        Ok((self.take(result), Updated::from_abi(&updated)))
    }

    /// One step without gradients. Not of [`Stage::Fit`], whose step is `training_step`.
    pub fn evaluation_step(&mut self, stage: Stage, batch: impl Batch, at: Position) -> Result<Tree> {
        let mut batch = batch.argument();
        let args = step_args(batch.as_mut_raw(), at);
        let mut result = sized!(stg_step_result {});
        match stage {
            Stage::Validate => call!(self, validation_step, &args, &mut result)?,
            Stage::Test => call!(self, test_step, &args, &mut result)?,
            Stage::Predict => call!(self, predict_step, &args, &mut result)?,
            Stage::Fit => return Err(Error::invalid("evaluation_step of Stage::Fit; training_step is that")),
        }
        Ok(self.take(result))
    }

    /// The weights of the latest step: per replica that ran, its rows or its denominator.
    pub fn weights(&self) -> &[f64] {
        &self.weights
    }

    #[inline]
    fn take(&mut self, result: sys::stg_step_result) -> Tree {
        self.weights.clear();
        unsafe {
            self.weights.extend_from_slice(borrow_slice(result.weights, result.num_weights));
            Tree::from_raw(result.outputs)
        }
    }

    /// Drops what was gathered since the last update.
    pub fn zero_grad(&mut self) -> Result<()> {
        call!(self, zero_grad)
    }

    /// The reduced gradients, for an optimizer of the host's own: a dict from name to tensor or none.
    pub fn gradients(&mut self) -> Result<Views<'_>> {
        let mut tree = Tree::empty();
        call!(self, gradients, tree.as_mut_raw())?;
        Ok(self.views(tree))
    }

    /// The host has written the root's parameters.
    pub fn parameters_changed(&mut self) -> Result<()> {
        call!(self, parameters_changed)
    }

    /// The whole model to the root, replicas refreshed from it.
    pub fn model_to_device(&mut self) -> Result<()> {
        call!(self, model_to_device)
    }
}
