// SPDX-License-Identifier: Apache-2.0
//! Sessions on `common::batch(12)` as a source called "rows".
use super::*;
use serde_json::{Value as Json, json};
use std::sync::{Arc, Mutex};

pub fn library() -> Library {
    Library::load(build_folder().join("lib/libstratagem.so.1")).expect("`./run build` has built libstratagem")
}

/// `before_read` is called with how many reads there were, and may fail.
pub struct Rows<F = fn(usize) -> Result<()>> {
    num_reads: usize,
    before_read: F,
}

impl<F> Rows<F> {
    pub fn new(before_read: F) -> Rows<F> {
        Rows { num_reads: 0, before_read }
    }
}

impl<F: FnMut(usize) -> Result<()> + Send + 'static> Source for Rows<F> {
    fn num_samples(&self) -> usize {
        12
    }

    fn read(&mut self, rows: &[i64]) -> Result<Tree> {
        (self.before_read)(self.num_reads)?;
        self.num_reads += 1;
        let all = batch(12);
        let (x, y) = (all.tensor("x")?.as_slice::<f64>()?, all.tensor("y")?.as_slice::<f64>()?);
        let some_x: Vec<f64> = rows.iter().flat_map(|&row| x[3 * row as usize..][..3].to_vec()).collect();
        let some_y: Vec<f64> = rows.iter().map(|&row| y[row as usize]).collect();
        Ok(Value::dict([
            ("x", Value::from(Tensor::from_vec(some_x, &[rows.len(), 3])?)),
            ("y", Value::from(Tensor::from_vec(some_y, &[rows.len()])?)),
        ])
        .into())
    }
}

pub fn rows_source() -> Rows {
    Rows::new(|_| Ok(()))
}

/// 12 updates.
pub fn config(strategy: Json) -> Json {
    json!({
        "strategy": strategy,
        "precision": "64-true",
        "model": {"kind": "host"},
        "optimizer": {"name": "sgd", "lr": 0.1},
        "data": {"train": {"source": "rows", "batch_size": 4, "shuffle": true}},
        "trainer": {"max_epochs": 4, "log_every_n_steps": 1}
    })
}

pub fn builder(strategy: Json, fault: Fault) -> SessionBuilder {
    library()
        .session()
        .config(&config(strategy), std::env::temp_dir())
        .model(&ModelHandle::new(Linear(fault)))
        .source("rows", rows_source())
}

pub fn single() -> Json {
    json!({"name": "single_device"})
}

pub fn parallel(devices: u32) -> Json {
    json!({"name": "data_parallel", "devices": devices})
}

/// What a run tells.
#[derive(Default)]
pub struct Seen {
    pub log: Vec<(Level, String)>,
    pub progress: Vec<Progress>,
    pub lines: Vec<Json>,
    pub swaps: Vec<(i64, String, Option<String>)>,
    pub num_starts: usize,
    pub num_ends: usize,
}

#[derive(Clone, Default)]
pub struct Watch(pub Arc<Mutex<Seen>>);

impl Events for Watch {
    fn log(&self, level: Level, message: &str) {
        self.0.lock().unwrap().log.push((level, message.to_owned()));
        panic!("a log that panics harms nobody");
    }

    fn progress(&self, progress: &Progress) -> Result<()> {
        self.0.lock().unwrap().progress.push(*progress);
        Ok(())
    }

    fn metrics(&self, line: &str) -> Result<()> {
        self.0.lock().unwrap().lines.push(serde_json::from_str(line).unwrap());
        Ok(())
    }

    fn batch_start(&self, _: &Progress) -> Result<()> {
        self.0.lock().unwrap().num_starts += 1;
        Ok(())
    }

    fn batch_end(&self, _: &Progress, outputs: ValueRef<'_>) -> Result<()> {
        assert!(outputs.tensor("loss")?.to_vec::<f64>()?.iter().all(|loss| loss.is_finite()));
        self.0.lock().unwrap().num_ends += 1;
        Ok(())
    }

    fn swap(&self, step: i64, strategy: &str, error: Option<&Error>) -> Result<()> {
        self.0.lock().unwrap().swaps.push((step, strategy.to_owned(), error.map(Error::chain)));
        Ok(())
    }
}
