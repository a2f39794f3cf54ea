// SPDX-License-Identifier: Apache-2.0
//! What the tests share: where the plugins are, and a linear model with gradients written out.
#![allow(dead_code)]
pub mod plane;
pub mod runs;

use std::path::PathBuf;
use stratagem::*;

pub fn build_folder() -> PathBuf {
    let default = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../build");
    std::env::var_os("STRATAGEM_BUILD").map_or_else(|| PathBuf::from(default), PathBuf::from)
}

pub fn plugin(name: &str) -> Plugin {
    Plugin::load(build_folder().join(format!("lib/stratagem/{name}.so"))).expect("`./run build` has built the plugins")
}

pub fn strategy(name: &str, config: &StrategyConfig) -> Result<Strategy<'static>> {
    Strategy::create(plugin(name).strategy(name)?, config)
}

/// The weights and the bias of the linear model.
pub fn weights(strategy: &mut Strategy) -> Vec<f64> {
    let state = strategy.export_state().unwrap();
    let model = state.get("model").unwrap();
    [model.tensor("weight").unwrap().to_vec::<f64>().unwrap(), model.tensor("bias").unwrap().to_vec().unwrap()].concat()
}

pub fn assert_close(is: &[f64], wanted: &[f64]) {
    assert_eq!(is.len(), wanted.len());
    for (is, wanted) in is.iter().zip(wanted) {
        assert!((is - wanted).abs() <= 1e-12 * wanted.abs().max(1.0), "{is} is not {wanted}");
    }
}

pub fn contains(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "\"{part}\" is not in: {text}");
    }
}

/// The innermost cause.
pub fn root_cause(error: &Error) -> &(dyn std::error::Error + 'static) {
    let mut last: &(dyn std::error::Error + 'static) = error;
    while let Some(next) = last.source() {
        last = next;
    }
    last
}

/// A folder of the test's own, which goes with it.
pub struct Folder(pub PathBuf);

impl Folder {
    pub fn new(name: &str) -> Folder {
        let folder = std::env::temp_dir().join(format!("stratagem-rust-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        Folder(folder)
    }

    pub fn join(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// What the model is to do wrong, and in which stage's step.
#[derive(Clone, Copy, PartialEq)]
pub enum Fault {
    None,
    PanicInStep,
    ErrorInStep,
    PanicInBackward,
    WrongGradient,
    PanicInReplicate,
    PanicInDrop,
}

/// y = w x + b over `x` (n, 3) and `y` (n); the loss is the mean of squares.
pub struct Linear(pub Fault);

pub struct LinearReplica(Fault);

/// The error that a model returns is the host's own type.
#[derive(Debug, PartialEq)]
pub struct DiskGone(pub u32);
impl std::fmt::Display for DiskGone {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "disk {} is gone", self.0)
    }
}
impl std::error::Error for DiskGone {}

pub struct Graph {
    x: Vec<f64>,
    residuals: Vec<f64>,
}

impl Model for Linear {
    type Replica = LinearReplica;
    fn replicate(&self, _: &ReplicateArgs) -> Result<(LinearReplica, Parameters)> {
        assert!(self.0 != Fault::PanicInReplicate, "no replica today");
        let weight = Parameter::new("weight", Tensor::from_vec(vec![0.1f64, -0.2, 0.3], &[3])?);
        let bias = Parameter::new("bias", Tensor::from_vec(vec![0.5f64], &[1])?);
        Ok((LinearReplica(self.0), Parameters { parameters: vec![weight, bias], buffers: vec![] }))
    }
}

impl Drop for LinearReplica {
    fn drop(&mut self) {
        assert!(self.0 != Fault::PanicInDrop || std::thread::panicking(), "a replica that is not to be dropped");
    }
}

impl Replica for LinearReplica {
    type Graph = Graph;

    fn step(&mut self, memory: Memory<'_>, _: &StepContext, batch: Tree) -> Result<StepOutput<Graph>> {
        match self.0 {
            Fault::PanicInStep => panic!("a step of {} rows", batch.tensor("x")?.shape()[0]),
            Fault::ErrorInStep => return Err(Error::new(Code::Unavailable, "no data").with_source(DiskGone(7))),
            _ => {}
        }
        let weight = memory.parameters()[0].as_slice::<f64>()?;
        let bias = memory.parameters()[1].as_slice::<f64>()?[0];
        let (x, y) = (batch.tensor("x")?.to_vec::<f64>()?, batch.tensor("y")?.to_vec::<f64>()?);
        let predict = |row: &[f64]| row.iter().zip(weight).map(|(x, w)| x * w).sum::<f64>() + bias;
        let residuals: Vec<f64> = x.chunks(3).zip(&y).map(|(row, y)| predict(row) - y).collect();
        let loss = residuals.iter().map(|r| r * r).sum::<f64>() / residuals.len() as f64;
        let outputs = Value::dict([("loss", Value::from(Tensor::scalar(loss)))]).into();
        Ok(StepOutput { outputs, denominator: None, graph: Some(Graph { x, residuals }) })
    }

    fn backward(&mut self, _: Memory<'_>, graph: Graph, scale: f64, sink: &mut Sink<'_>) -> Result<()> {
        assert!(self.0 != Fault::PanicInBackward, "backward is broken");
        let factor = 2.0 * scale / graph.residuals.len() as f64;
        let mut gradient = vec![0.0; 3];
        for (row, r) in graph.x.chunks(3).zip(&graph.residuals) {
            gradient.iter_mut().zip(row).for_each(|(g, x)| *g += factor * r * x);
        }
        if self.0 == Fault::WrongGradient {
            return sink.ready(0, Some(Tensor::from_vec(vec![1f32; 3], &[3])?));
        }
        sink.ready(0, Some(Tensor::from_vec(gradient, &[3])?))?;
        sink.ready(1, Some(Tensor::from_vec(vec![factor * graph.residuals.iter().sum::<f64>()], &[1])?))
    }
}

pub fn batch(rows: usize) -> Tree {
    let x: Vec<f64> = (0..3 * rows).map(|i| (i as f64 * 0.37).sin()).collect();
    let y: Vec<f64> = (0..rows).map(|i| (i as f64 * 0.71).cos()).collect();
    Value::dict([("x", Value::from(Tensor::from_vec(x, &[rows, 3]).unwrap())), ("y", Value::from(Tensor::from_vec(y, &[rows]).unwrap()))])
        .into()
}

pub fn sgd() -> StrategyConfig {
    StrategyConfig::new().precision("64-true").optimizer("sgd", serde_json::json!({}))
}
