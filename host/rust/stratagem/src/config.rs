// SPDX-License-Identifier: Apache-2.0
//! What an instance of a strategy is made with. Anything that serde turns into a JSON object will do; [`StrategyConfig`] has the names of
//! the keys.
use crate::error::{Code, Error, Result};
use serde::Serialize;
use serde_json::{Map, Value, json};

pub(crate) fn to_json(config: &impl Serialize) -> Result<String> {
    serde_json::to_string(config)
        .map_err(|error| Error::new(Code::InvalidArgument, format!("the config can't be written as JSON: {error}")).with_source(error))
}

/// The config of an instance. What isn't set is the strategy's own default.
///
/// ```
/// use stratagem::StrategyConfig;
/// let config = StrategyConfig::new().devices(2).seed(7).optimizer("sgd", serde_json::json!({"momentum": 0.9}));
/// assert_eq!(
///     serde_json::to_value(&config).unwrap(),
///     serde_json::json!({"devices": 2, "seed": 7, "optimizer": {"name": "sgd", "momentum": 0.9}}),
/// );
/// ```
#[derive(Debug, Clone, Default, Serialize)]
#[serde(transparent)]
pub struct StrategyConfig(Map<String, Value>);

impl StrategyConfig {
    /// Nothing set.
    pub fn new() -> StrategyConfig {
        StrategyConfig::default()
    }

    /// Any key.
    pub fn set(mut self, key: &str, value: impl Into<Value>) -> StrategyConfig {
        self.0.insert(key.to_owned(), value.into());
        self
    }

    /// How many devices; `set("devices", ...)` takes a list of indices, whose first is the root.
    pub fn devices(self, count: u32) -> StrategyConfig {
        self.set("devices", count)
    }

    /// "32-true", "64-true", "16-mixed", "bf16-mixed".
    pub fn precision(self, name: &str) -> StrategyConfig {
        self.set("precision", name)
    }

    /// What initial weights and generators depend on.
    pub fn seed(self, seed: u64) -> StrategyConfig {
        self.set("seed", seed)
    }

    /// The optimizer, with its settings as a JSON object; none means that the host has its own.
    pub fn optimizer(self, name: &str, settings: Value) -> StrategyConfig {
        let mut optimizer = json!({ "name": name });
        if let (Some(to), Value::Object(from)) = (optimizer.as_object_mut(), settings) {
            to.extend(from);
        }
        self.set("optimizer", optimizer)
    }

    /// Options of this strategy, by its schema.
    pub fn options(self, options: Value) -> StrategyConfig {
        self.set("options", options)
    }
}
