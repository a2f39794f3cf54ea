// SPDX-License-Identifier: Apache-2.0
//! The state, in the layout of strategy.h: so that a swap or a resume works between authors.
use crate::abi::*;
use crate::error::*;
use crate::replica::Parameter;
use crate::strategy::Setup;
use crate::tensor;
use crate::tree::{Builder, Tree, entries, find, key};

/// What belongs in a checkpoint.
fn kept(model: &Setup) -> impl Iterator<Item = &Parameter> {
    let persistent = |entry: &&Parameter| entry.flags & u64::from(STG_PARAMETER_PERSISTENT) != 0;
    model.parameters.iter().chain(&model.buffers).filter(persistent)
}

pub fn export(model: &Setup, num_updates: i64, is_copy: bool, has_optimizer: bool) -> Tree {
    Builder::tree(|builder| {
        let tensor = |entry: &Parameter| {
            let keeps = Box::new(model.replica.clone()); // a view keeps the model alive
            Builder::tensor(if is_copy { tensor::copy(&entry.view) } else { tensor::view(&entry.view, keeps) })
        };
        let tensors: Vec<_> = kept(model).map(|entry| (entry.names[0].as_slice(), tensor(entry))).collect();
        let weights = builder.dict(tensors);
        let mut aliases = Vec::new();
        for entry in kept(model) {
            for other in &entry.names[1..] {
                aliases.push((other.as_slice(), builder.text(&entry.name())));
            }
        }
        let aliases = builder.dict(aliases);
        let optimizer = if has_optimizer {
            let name = builder.text("sgd");
            let slots = builder.dict([]);
            builder.dict([(&b"name"[..], name), (b"step", Builder::int(num_updates)), (b"per_parameter", slots)])
        } else {
            Builder::none()
        };
        let generators = builder.list(STG_LIST, vec![]);
        builder.dict([
            (&b"format"[..], Builder::int(STG_STATE_FORMAT.into())),
            (b"model", weights),
            (b"aliases", aliases),
            (b"optimizer", optimizer),
            (b"scaler", Builder::none()),
            (b"generators", generators),
        ])
    })
}

#[derive(Default)]
struct Report {
    missing: Vec<String>,
    unexpected: Vec<String>,
    unknown_keys: Vec<String>,
}

/// Everything is checked before anything is written. Gives the number of updates, and the report.
pub fn import(model: &Setup, state: &Tree, is_strict: bool, is_fit: bool) -> Result<(Option<u64>, Tree)> {
    let format = find(state.root(), "format").filter(|value| value.type_ == STG_INT64).map(|value| unsafe { value.as_.i64_ });
    if format != Some(STG_STATE_FORMAT.into()) {
        return invalid(format!("state.format is {format:?}; this plugin reads {STG_STATE_FORMAT}"));
    }
    let Some(weights) = find(state.root(), "model").filter(|value| value.type_ == STG_DICT) else {
        return invalid("state.model is missing, or no dict");
    };
    let mut report = Report::default();
    let known = ["format", "model", "aliases", "optimizer", "scaler", "generators"];
    let name_of = |entry: &stg_entry| String::from_utf8_lossy(unsafe { key(entry.key) }).into_owned();
    report.unknown_keys = entries(state.root()).iter().map(name_of).filter(|name| !known.contains(&name.as_str())).collect();
    let mut found = Vec::new();
    let mut faults = Vec::new();
    for entry in kept(model) {
        match find(weights, &entry.name()) {
            None => report.missing.push(entry.name()),
            Some(value) if value.type_ != STG_TENSOR => faults.push(format!("{} is no tensor", entry.name())),
            Some(value) => {
                let view = unsafe { &(*value.as_.tensor).view };
                if tensor::same_kind(view, &entry.view) {
                    found.push((entry, view));
                } else {
                    faults.push(format!("{} is {}, here {}", entry.name(), tensor::text(view), tensor::text(&entry.view)));
                }
            }
        }
    }
    let is_known = |name: &String| kept(model).any(|entry| entry.name() == *name);
    report.unexpected = entries(weights).iter().map(name_of).filter(|name| !is_known(name)).collect();
    if is_strict {
        faults.extend(report.missing.iter().map(|name| format!("{name} is missing")));
        faults.extend(report.unexpected.iter().map(|name| format!("{name} is not in the model")));
    }
    if !faults.is_empty() {
        return invalid(format!("the state does not fit the model: {}", faults.join("; ")));
    }
    let num_updates = if is_fit { read_optimizer(state)? } else { None };
    for (entry, view) in found {
        tensor::assign(&entry.view, view);
    }
    model.replica.parameters_changed()?;
    Ok((num_updates, report.tree()))
}

fn read_optimizer(state: &Tree) -> Result<Option<u64>> {
    let Some(optimizer) = find(state.root(), "optimizer").filter(|value| value.type_ == STG_DICT) else { return Ok(None) };
    let step = find(optimizer, "step").filter(|value| value.type_ == STG_INT64).map(|value| unsafe { value.as_.i64_ });
    match step.map(u64::try_from) {
        Some(Ok(step)) => Ok(Some(step)),
        _ => invalid(format!("state.optimizer.step is {step:?}; it must be an int64 of at least 0")),
    }
}

impl Report {
    fn tree(&self) -> Tree {
        Builder::tree(|builder| {
            let mut list = |names: &[String]| {
                let texts = names.iter().map(|name| builder.text(name)).collect();
                builder.list(STG_LIST, texts)
            };
            let (missing, unexpected, unknown) = (list(&self.missing), list(&self.unexpected), list(&self.unknown_keys));
            builder.dict([(&b"missing"[..], missing), (b"unexpected", unexpected), (b"unknown_keys", unknown)])
        })
    }
}
