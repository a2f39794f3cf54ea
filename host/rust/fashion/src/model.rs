// SPDX-License-Identifier: Apache-2.0
//! The network as a strategy sees it: the trait `Model`. The strategy updates the weights in memory of its own choice; candle's variables
//! are copies, made anew when they have changed.
use crate::net::{self, Net};
use candle_core::{Device, Tensor};
use stratagem::{
    Code, Error, Memory, Model, Parameter, Parameters, Replica, ReplicateArgs, Result, Sink, StepContext, StepOutput, Tree, Value,
};

pub struct CandleModel;

pub struct CandleReplica {
    net: Net,
}

fn candle(error: candle_core::Error) -> Error {
    Error::new(Code::Internal, "candle failed").with_source(error)
}

fn other(error: Box<dyn std::error::Error>) -> Error {
    Error::new(Code::Internal, error.to_string())
}

impl Model for CandleModel {
    type Replica = CandleReplica;

    fn replicate(&self, args: &ReplicateArgs) -> Result<(CandleReplica, Parameters)> {
        let parameter = |index: usize| {
            let tensor = stratagem::Tensor::from_vec(net::initial(index, args.seed), net::SHAPES[index])?;
            Ok(Parameter::new(net::NAMES[index], tensor))
        };
        let parameters = (0..net::NAMES.len()).map(parameter).collect::<Result<_>>()?;
        Ok((CandleReplica { net: Net::new(args.seed).map_err(other)? }, Parameters { parameters, buffers: vec![] }))
    }
}

impl Replica for CandleReplica {
    type Graph = Tensor; // the loss, which knows how it was made

    fn step(&mut self, _: Memory<'_>, context: &StepContext, batch: Tree) -> Result<StepOutput<Tensor>> {
        let (inputs, targets) = (batch.tensor("inputs")?, batch.tensor("targets")?);
        let rows = targets.numel();
        let pixels = Tensor::from_slice(inputs.as_slice::<u8>()?, (rows, inputs.numel() / rows), &Device::Cpu).map_err(candle)?;
        let labels = Tensor::from_slice(targets.as_slice::<u32>()?, rows, &Device::Cpu).map_err(candle)?;
        let loss = self.net.logits(&pixels).and_then(|logits| self.net.loss(&logits, &labels)).map_err(candle)?;
        let number = stratagem::Tensor::scalar(loss.to_scalar::<f32>().map_err(candle)?);
        let outputs = Value::dict([("loss", Value::from(number))]).into();
        Ok(StepOutput { outputs, denominator: None, graph: context.needs_graph.then_some(loss) })
    }

    fn backward(&mut self, _: Memory<'_>, loss: Tensor, scale: f64, sink: &mut Sink<'_>) -> Result<()> {
        for (index, gradient) in self.net.gradients(&loss, scale).map_err(candle)?.iter().enumerate() {
            let elements = gradient.flatten_all().and_then(|flat| flat.to_vec1::<f32>()).map_err(candle)?;
            sink.ready(index, Some(stratagem::Tensor::from_vec(elements, net::SHAPES[index])?))?;
        }
        Ok(())
    }

    fn parameters_changed(&mut self, memory: Memory<'_>) -> Result<()> {
        for (index, parameter) in memory.parameters().iter().enumerate() {
            self.net.set(index, parameter.as_slice()?).map_err(other)?;
        }
        Ok(())
    }
}
