// SPDX-License-Identifier: Apache-2.0
//! Stratagem for Rust: training strategies that are loaded at run time.
//!
//! Two ways lead in. [`Plugin`] and [`Strategy`] are the C ABI itself, for a program with a loop of its own, and either a model behind the
//! trait [`Model`] or gradients of its own ([`Strategy::reduce_gradients`]). [`Session`] is libstratagem: a config, its data, its loop.
//!
//! ```no_run
//! use stratagem::{Plugin, Position, Stage, Strategy, StrategyConfig, Tensor, Tree, Update, Value};
//! # fn main() -> stratagem::Result<()> {
//! let plugin = Plugin::load("build/lib/stratagem/data_parallel.so")?;
//! let model = Plugin::load("build/lib/stratagem/fashion_cnn.so")?.model("fashion_cnn", &serde_json::json!({}))?;
//! let config = StrategyConfig::new().devices(2).optimizer("sgd", serde_json::json!({}));
//! let mut strategy = Strategy::create(plugin.strategy("data_parallel")?, &config)?;
//! strategy.setup(&model, None, Stage::Fit)?;
//! let batch: Tree = Value::dict([
//!     ("inputs", Value::from(Tensor::from_vec(vec![0u8; 64 * 784], &[64, 28, 28])?)),
//!     ("targets", Value::from(Tensor::from_vec(vec![0i64; 64], &[64])?)),
//! ])
//! .into();
//! let (outputs, _) = strategy.train_batch(batch, Position::default(), Some(Update::new(0.1)))?;
//! println!("loss {}", outputs.tensor("loss")?.item()?);
//! # Ok(())
//! # }
//! ```
//!
//! What C lets go wrong is a type here: a call from two threads, a session used after its end, views of weights that are written again. The
//! rest is an [`Error`]: never a crash, never a panic. A panic in code of yours that is called through C becomes an
//! [`Error`] of the call that led there; where C takes none (a log, a trace, a drop) it goes no further.
mod config;
mod error;
mod events;
mod host;
mod library;
mod model;
mod note;
mod opaque;
mod plugin;
mod session;
mod source;
mod steps;
mod strategy;
mod table;
mod tensor;
mod types;
mod value;

pub use stratagem_sys as sys;

pub use config::StrategyConfig;
pub use error::{Code, Error, Result};
pub use events::{Events, Progress};
pub use host::{Host, Level};
pub use library::Library;
pub use model::{
    LossKind, Memory, Model, ModelHandle, Parameter, Parameters, Replica, ReplicateArgs, Sink, Stage, StepContext, StepOutput,
};
pub use note::{AbiRange, Note};
pub use opaque::Opaque;
pub use plugin::{Plugin, StrategyFactory};
pub use session::{Control, Session, SessionBuilder};
pub use source::Source;
pub use steps::{Clip, Outcome, Position, Update, Updated};
pub use strategy::{Abort, CreateOptions, Decide, GradientSet, ReduceOp, State, Status, Strategy, Views};
pub use tensor::{Element, Tensor, TensorView};
pub use types::{DType, Device};
pub use value::{Batch, Entries, Items, OpaqueRef, Tree, Value, ValueRef};
