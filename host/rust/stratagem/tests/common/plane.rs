// SPDX-License-Identifier: Apache-2.0
//! A model whose numbers can be worked out in the head: the loss is x · weight over the rows, so that the gradient is the mean row. It tells
//! what it was asked, and `on_step` may do what a step is to do.
use std::sync::{Arc, Mutex};
use stratagem::*;

pub type OnStep = Arc<dyn Fn(&StepContext) -> Result<()> + Send + Sync>;

/// A clone tells the same `told`.
#[derive(Clone)]
pub struct Plane {
    pub loss_kind: LossKind,
    /// By replica.
    pub denominators: Option<[f64; 2]>,
    /// Backward gives "frozen" a gradient, too.
    pub thaws: bool,
    pub on_step: OnStep,
    pub told: Arc<Mutex<Told>>,
}

#[derive(Default)]
pub struct Told {
    pub modes: Vec<bool>,
    pub steps: Vec<StepContext>,
}

impl Plane {
    pub fn new() -> Plane {
        Plane { loss_kind: LossKind::Mean, denominators: None, thaws: false, on_step: Arc::new(|_| Ok(())), told: Arc::default() }
    }

    pub fn handle(&self) -> ModelHandle {
        ModelHandle::new(self.clone())
    }
}

pub struct PlaneGraph {
    sums: [f64; 2],
    divisor: f64,
}

impl Model for Plane {
    type Replica = Plane;

    /// "frozen" has no gradient, and "scratch" is in no checkpoint.
    fn replicate(&self, _: &ReplicateArgs) -> Result<(Plane, Parameters)> {
        let parameter =
            |name: &str, values: &[f64]| Ok::<_, Error>(Parameter::new(name, Tensor::from_vec(values.to_vec(), &[values.len()])?));
        let parameters = vec![parameter("weight", &[1.0, 1.0])?, parameter("frozen", &[7.0])?.frozen()];
        let buffers = vec![parameter("kept", &[8.0])?.frozen(), parameter("scratch", &[9.0])?.frozen().transient()];
        Ok((self.clone(), Parameters { parameters, buffers }))
    }
}

impl Replica for Plane {
    type Graph = PlaneGraph;

    fn loss_kind(&self) -> LossKind {
        self.loss_kind
    }

    fn set_training(&mut self, training: bool) -> Result<()> {
        self.told.lock().unwrap().modes.push(training);
        Ok(())
    }

    fn step(&mut self, memory: Memory<'_>, context: &StepContext, batch: Tree) -> Result<StepOutput<PlaneGraph>> {
        self.told.lock().unwrap().steps.push(context.clone());
        (self.on_step)(context)?;
        let weight = memory.parameters()[0].as_slice::<f64>()?;
        let x = batch.tensor("x")?.to_vec::<f64>()?;
        let num_rows = x.len() / 2;
        let sums = [0, 1].map(|column| x.iter().skip(column).step_by(2).sum::<f64>());
        let denominator = self.denominators.map(|of| of[context.replica as usize]);
        let divisor = denominator.unwrap_or(if self.loss_kind == LossKind::Sum { 1.0 } else { num_rows as f64 });
        let loss = (sums[0] * weight[0] + sums[1] * weight[1]) / divisor;
        let outputs = match context.stage {
            Stage::Predict => Tensor::from_vec(x.chunks(2).map(|row| row[0] * weight[0] + row[1] * weight[1]).collect(), &[num_rows])?,
            _ => Tensor::scalar(loss),
        };
        let graph = context.needs_graph.then_some(PlaneGraph { sums, divisor });
        Ok(StepOutput { outputs: Value::dict([("loss", Value::from(outputs))]).into(), denominator, graph })
    }

    fn backward(&mut self, _: Memory<'_>, graph: PlaneGraph, scale: f64, sink: &mut Sink<'_>) -> Result<()> {
        sink.ready(0, Some(Tensor::from_vec(graph.sums.map(|sum| sum * scale / graph.divisor).to_vec(), &[2])?))?;
        if self.thaws { sink.ready(1, Some(Tensor::from_vec(vec![1.0f64], &[1])?)) } else { Ok(()) }
    }
}

/// Three rows, (3, 4) in the mean. Two devices get (1, 2) with (2, 4), and (6, 6).
pub fn rows() -> Tree {
    Value::dict([("x", Value::from(Tensor::from_vec(vec![1.0f64, 2.0, 2.0, 4.0, 6.0, 6.0], &[3, 2]).unwrap()))]).into()
}
