// SPDX-License-Identifier: Apache-2.0
//! The strategy itself: one replica, the mean gradient of a window of micro-batches, and an update against it. This is the file to change.
//!
//! The gradient of a window is the sum of w g over the sum of w, where g is a micro-batch's mean gradient and w its rows, or the denominator
//! that the model's step reports. A loss that is a sum counts as it is.
use crate::abi::*;
use crate::entry::Instance;
use crate::error::*;
use crate::replica::{Graph, Parameter, Replica};
use crate::tensor;
use crate::tree::{Tree, batch_rows};
use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::Value;
use serde_json::value::RawValue;
use std::sync::Arc;
use std::sync::atomic::Ordering;

pub const CPU: stg_device = stg_device { kind: STG_DEVICE_CPU, index: 0 };

/// What create was told.
pub struct Config {
    seed: u64,
    has_optimizer: bool,
}

impl Config {
    /// Strict: an option that is silently ignored is worse than one that is refused.
    pub fn read(json: &str) -> Result<Config> {
        let mut config = Config { seed: 0, has_optimizer: false };
        for (key, text) in Keys::read("config", if json.is_empty() { "{}" } else { json })?.0 {
            let value: Value = serde_json::from_str(text.get()).map_err(|error| bad_json("config", error))?;
            let good = match key.as_str() {
                _ if value.is_null() => true,
                "accelerator" => matches!(value.as_str(), Some("cpu" | "auto")),
                "devices" => value == Value::from(1) || value == Value::from(vec![0]) || value.as_str() == Some("auto"),
                "precision" => matches!(value.as_str(), Some("32-true")),
                "deterministic" => value.is_boolean(),                          // it is so without it
                "threads" => value.as_u64().is_some_and(|threads| threads > 0), // the model's, whose default they are
                "options" => value.as_object().is_some_and(|options| options.is_empty()),
                "seed" => value.as_u64().inspect(|&seed| config.seed = seed).is_some(),
                "optimizer" => {
                    config.has_optimizer = true;
                    is_sgd(Keys::read("config at /optimizer", text.get())?)
                }
                _ => return invalid(format!("config at /{key}: unknown key; known are accelerator, devices, precision, optimizer, seed")),
            };
            if !good {
                return invalid(format!(
                    "config at /{key}: {value}; this strategy has accelerator cpu, devices 1 or [0], precision 32-true, optimizer \
                     {{\"name\": \"sgd\", \"lr\": ...}} without settings, a seed of at least 0, and no options"
                ));
            }
        }
        Ok(config)
    }
}

fn bad_json(what: &str, error: serde_json::Error) -> Error {
    Error::new(STG_INVALID_ARGUMENT, format!("{what}: {error}"))
}

fn is_sgd(keys: Keys) -> bool {
    let is_zero = |text: &str| matches!(text, "0" | "0.0" | "false" | "null");
    keys.0.iter().any(|(key, text)| key == "name" && text.get() == "\"sgd\"")
        && keys.0.iter().all(|(key, text)| match key.as_str() {
            "name" => true,
            "lr" => text.get().parse::<f64>().is_ok(),
            _ => is_zero(text.get()),
        })
}

/// A JSON object. A key that stands twice is an error, which a map would hide.
struct Keys(Vec<(String, Box<RawValue>)>);

impl Keys {
    fn read(what: &str, json: &str) -> Result<Keys> {
        let keys: Keys = serde_json::from_str(json).map_err(|error| bad_json(what, error))?;
        let mut seen = std::collections::HashSet::new();
        match keys.0.iter().find(|(key, _)| !seen.insert(key)) {
            Some((key, _)) => invalid(format!("{what}: the key {key} stands twice")),
            None => Ok(keys),
        }
    }
}

impl<'de> Deserialize<'de> for Keys {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Keys, D::Error> {
        struct Collect;
        impl<'de> Visitor<'de> for Collect {
            type Value = Keys;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("one JSON object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Keys, A::Error> {
                let mut keys = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    keys.push(entry);
                }
                Ok(Keys(keys))
            }
        }
        deserializer.deserialize_map(Collect)
    }
}

pub struct Strategy {
    config: Config,
    pub is_caller_thread_only: bool,
    model: Option<Setup>,
    pub weights: [f64; 1], // of the latest step
}

/// What is there from setup to teardown.
pub struct Setup {
    pub replica: Arc<Replica>,
    pub description: stg_model_description,
    pub parameters: Vec<Parameter>,
    pub buffers: Vec<Parameter>,
    is_sum: bool,                // the model's loss is
    is_plain_sum: bool,          // no denominator was reported, which would make it a mean
    graph: Option<(Graph, f64)>, // with the weight of its batch
    sums: Vec<Option<Vec<f64>>>, // by parameter: weight times gradient, since the last update
    total_weight: f64,
    is_mode_train: Option<bool>,
}

impl Drop for Setup {
    fn drop(&mut self) {
        self.replica.drop_graph(self.graph.take().map(|(graph, _)| graph));
    }
}

/// What a step was asked.
pub struct Step {
    pub stage: u32,
    pub flags: u64,
    pub batch_index: i64,
    pub dataloader_index: i64,
    pub global_step: i64,
}

impl Strategy {
    pub fn new(config: Config, is_caller_thread_only: bool) -> Strategy {
        Strategy { config, is_caller_thread_only, model: None, weights: [0.0] }
    }

    /// # Safety
    /// A model as setup was given it.
    pub unsafe fn setup(&mut self, model: *const stg_model) -> Result<()> {
        let replica = Arc::new(unsafe { Replica::new(model, self.config.seed)? });
        let (parameters, buffers, description) = replica.describe()?;
        for parameter in parameters.iter().filter(|parameter| parameter.is_trained()) {
            let is_written = parameter.flags & u64::from(STG_PARAMETER_PINNED) != 0;
            if !is_written || !tensor::is_real(&parameter.view) {
                let text = tensor::text(&parameter.view);
                return precondition(format!("parameter {} ({text}) is no float that may be written in place", parameter.name()));
            }
        }
        let (sums, is_sum) = (vec![None; parameters.len()], description.loss_kind == u64::from(STG_LOSS_SUM));
        let (graph, total_weight, is_mode_train) = (None, 0.0, None);
        self.model = Some(Setup {
            replica,
            description,
            parameters,
            buffers,
            is_sum,
            is_plain_sum: is_sum,
            graph,
            sums,
            total_weight,
            is_mode_train,
        });
        Ok(())
    }

    pub fn teardown(&mut self) {
        self.model = None;
    }

    /// Legal calls only come here after setup.
    pub fn model(&mut self) -> Result<&mut Setup> {
        self.model.as_mut().ok_or_else(|| Error::new(STG_FAILED_PRECONDITION, "there is no model; call setup with one"))
    }

    pub fn clear(&mut self, instance: &Instance) {
        if let Some(model) = &mut self.model {
            model.replica.drop_graph(model.graph.take().map(|(graph, _)| graph));
            model.sums.fill(None);
            model.total_weight = 0.0;
        }
        instance.has_graph.store(false, Ordering::Release);
        instance.num_micro_batches.store(0, Ordering::Release);
    }

    /// Of any stage.
    pub fn step(&mut self, instance: &Instance, call: &stg_call, step: &Step, batch: Tree) -> Result<Tree> {
        let is_fit = step.stage == STG_STAGE_FIT;
        let mut rows = None;
        batch_rows(batch.root(), "batch", &mut rows)?;
        let rows = rows.map_or(1.0, |(_, rows)| rows as f64);
        if is_fit && rows == 0.0 {
            return invalid("the batch has no rows; there is nothing to train on");
        }
        let model = self.model()?;
        if model.is_mode_train != Some(is_fit) {
            model.replica.set_mode(is_fit)?;
            model.is_mode_train = Some(is_fit);
        }
        let mut context: stg_step_context = unsafe { std::mem::zeroed() };
        context.struct_size = size_of::<stg_step_context>() as u64;
        (context.device, context.num_replicas, context.stage) = (CPU, 1, step.stage);
        let anomaly = if step.flags & u64::from(STG_BATCH_DETECT_ANOMALY) != 0 { STG_STEP_DETECT_ANOMALY } else { 0 };
        context.flags = if is_fit { STG_STEP_GRADIENT | anomaly } else { STG_STEP_INFERENCE };
        (context.batch_index, context.dataloader_index, context.global_step) = (step.batch_index, step.dataloader_index, step.global_step);
        if is_fit {
            model.replica.drop_graph(model.graph.take().map(|(graph, _)| graph));
            instance.has_graph.store(false, Ordering::Release);
        }
        let made = model.replica.step(&context, batch.owned())?; // a graph reads it until backward
        let weight = made.denominator.unwrap_or(if model.is_sum { 1.0 } else { rows });
        if is_fit {
            model.is_plain_sum = model.is_sum && made.denominator.is_none();
        }
        match made.graph {
            Some(graph) if is_fit => model.graph = Some((graph, weight)),
            other => model.replica.drop_graph(other),
        }
        if is_fit && model.graph.is_none() {
            return invalid("the model's step gave no graph, though it was asked for one");
        }
        instance.has_graph.store(model.graph.is_some(), Ordering::Release);
        self.weights = [made.denominator.unwrap_or(rows)];
        instance.check_time_after_model(call)?;
        Ok(made.outputs)
    }

    pub fn backward(&mut self, instance: &Instance, call: &stg_call) -> Result<()> {
        let model = self.model()?;
        let Some((graph, weight)) = model.graph.take() else {
            return precondition("backward without a training_step before it");
        };
        instance.has_graph.store(false, Ordering::Release);
        if weight == 0.0 {
            model.replica.drop_graph(Some(graph));
        } else {
            let gradients = model.replica.backward(graph, 1.0, &model.parameters)?;
            for (sum, gradient) in model.sums.iter_mut().zip(gradients) {
                let Some(gradient) = gradient else { continue };
                let sum = sum.get_or_insert_with(|| vec![0.0; gradient.len()]);
                sum.iter_mut().zip(gradient).for_each(|(sum, g)| *sum += weight * g);
            }
        }
        model.total_weight += weight;
        instance.num_micro_batches.fetch_add(1, Ordering::AcqRel);
        instance.check_time_after_model(call)
    }

    pub fn check_update(&self, update: &stg_update_args) -> Result<()> {
        if !self.config.has_optimizer {
            return precondition("an update without an \"optimizer\" in the config");
        }
        if update.clip > STG_CLIP_VALUE.into() {
            return invalid(format!("update.clip is {}; known are 0 to 2", update.clip));
        }
        if update.clip != u64::from(STG_CLIP_NONE) {
            return unimplemented("this strategy doesn't clip gradients; set trainer.gradient_clip_val to 0");
        }
        if update.lr.is_finite() && update.lr >= 0.0 { Ok(()) } else { invalid(format!("update.lr is {}", update.lr)) }
    }

    pub fn update(&mut self, instance: &Instance, update: &stg_update_args) -> Result<stg_update_result> {
        self.check_update(update)?;
        if instance.num_micro_batches.load(Ordering::Acquire) == 0 {
            return precondition("optimizer_step without a backward since the last update");
        }
        let model = self.model()?;
        let mut result = no_update(model.total_weight);
        if model.total_weight > 0.0 {
            let divisor = if model.is_plain_sum { 1.0 } else { model.total_weight };
            for (parameter, sum) in model.parameters.iter().zip(&model.sums) {
                if let Some(sum) = sum {
                    tensor::update(&parameter.view, |at, weight| weight - update.lr * sum[at] / divisor);
                }
            }
            result.outcome = STG_UPDATE_DONE.into();
            instance.num_updates.fetch_add(1, Ordering::AcqRel);
        } else {
            result.outcome = STG_UPDATE_SKIPPED_NO_WEIGHT.into();
        }
        self.clear(instance);
        self.model()?.replica.parameters_changed()?;
        Ok(result)
    }

    pub fn total_weight(&self) -> f64 {
        self.model.as_ref().map_or(0.0, |model| model.total_weight)
    }
}

pub fn no_update(total_weight: f64) -> stg_update_result {
    let (outcome, gradient_norm, loss_scale) = (STG_UPDATE_NONE.into(), f64::NAN, 1.0);
    stg_update_result { struct_size: size_of::<stg_update_result>() as u64, outcome, gradient_norm, total_weight, loss_scale }
}
