// SPDX-License-Identifier: Apache-2.0
//! A network in candle, with candle's own autograd, trained on Fashion-MNIST in three ways: by a plain loop, by the strategy data_parallel
//! through the trait `Model`, and by a loop of its own that has the strategy reduce its gradients and nothing else. All three must end
//! with the same weights.
//!
//!     fashion FOLDER_OF_PLUGINS [NUM_IMAGES]
mod data;
mod model;
mod net;

use data::Images;
use net::Net;
use std::error::Error;
use std::path::Path;
use std::time::Instant;
use stratagem::{
    Device, GradientSet, ModelHandle, Plugin, Position, ReduceOp, Stage, Strategy, StrategyConfig, StrategyFactory, Tensor, Update,
};

type Result<T, E = Box<dyn Error>> = std::result::Result<T, E>;

const BATCH_SIZE: usize = 64;
const LR: f64 = 0.1;
const SEED: u64 = 1;
const NUM_DEVICES: usize = 2;

/// How far weights may lie apart, in the largest element: the order of sums is another one, in float32.
const TOLERANCE: f32 = 1e-5;

struct Outcome {
    net: Net,
    last_loss: f64,
    seconds: f64,
}

/// Without a strategy: what the others are compared with.
fn train_alone(images: &Images) -> Result<Outcome> {
    let begin = Instant::now();
    let mut net = Net::new(SEED)?;
    let mut last_loss = f64::NAN;
    for batch in images.batches(BATCH_SIZE) {
        let loss = net.loss(&net.logits(&batch.pixels)?, &batch.labels)?;
        let gradients = net.gradients(&loss, 1.0)?;
        net.descend(&gradients, LR)?;
        last_loss = loss.to_scalar::<f32>()?.into();
    }
    Ok(Outcome { net, last_loss, seconds: begin.elapsed().as_secs_f64() })
}

/// The strategy splits each batch, runs a replica of the model on each share, reduces and updates.
fn train_by_model(images: &Images, factory: StrategyFactory) -> Result<Outcome> {
    let begin = Instant::now();
    let config = StrategyConfig::new().devices(NUM_DEVICES as u32).seed(SEED).optimizer("sgd", serde_json::json!({}));
    let mut strategy = Strategy::create(factory, &config)?;
    strategy.setup(&ModelHandle::new(model::CandleModel), None, Stage::Fit)?;
    let mut last_loss = f64::NAN;
    for (step, batch) in images.batches(BATCH_SIZE).enumerate() {
        let at = Position { batch_index: step as i64, global_step: step as i64, ..Position::default() };
        let (outputs, _) = strategy.train_batch(batch.to_tree()?, at, Some(Update::new(LR)))?;
        last_loss = outputs.tensor("loss")?.item()?;
    }
    let mut net = Net::new(SEED)?;
    let state = strategy.export_state()?;
    for (index, name) in net::NAMES.iter().enumerate() {
        net.set(index, state.get("model")?.tensor(name)?.as_slice()?)?;
    }
    Ok(Outcome { net, last_loss, seconds: begin.elapsed().as_secs_f64() })
}

/// Two copies of the network, a loop of their own; the strategy has no model, and makes one gradient of two.
fn train_by_gradients(images: &Images, factory: StrategyFactory) -> Result<Outcome> {
    let begin = Instant::now();
    let mut strategy = Strategy::create(factory, &StrategyConfig::new().devices(NUM_DEVICES as u32))?;
    strategy.setup_modelless()?;
    let mut nets = (0..NUM_DEVICES).map(|_| Net::new(SEED)).collect::<Result<Vec<_>>>()?;
    let mut last_loss = f64::NAN;
    for batch in images.batches(BATCH_SIZE) {
        let shares = batch.split(NUM_DEVICES)?;
        let work = |(net, share): (&Net, &data::Batch)| -> Result<_, candle_core::Error> {
            let loss = net.loss(&net.logits(&share.pixels)?, &share.labels)?;
            Ok((net.gradients(&loss, 1.0)?, loss.to_scalar::<f32>()?))
        };
        let made = std::thread::scope(|scope| {
            let threads: Vec<_> = nets.iter().zip(&shares).map(|pair| scope.spawn(move || work(pair))).collect();
            threads.into_iter().map(|thread| thread.join().expect("no panic")).collect::<Result<Vec<_>, _>>()
        })?;
        let mut sets = Vec::new();
        for (index, (gradients, _)) in made.iter().enumerate() {
            let tensors = gradients
                .iter()
                .map(|gradient| -> Result<_> { Ok(Some(Tensor::from_vec(gradient.flatten_all()?.to_vec1::<f32>()?, gradient.dims())?)) });
            let weight = shares[index].num_rows() as f64;
            sets.push(GradientSet { device: Device::cpu(index as i32), weight, gradients: tensors.collect::<Result<_>>()? });
        }
        strategy.reduce_gradients(&mut sets, ReduceOp::Mean)?;
        for (net, set) in nets.iter_mut().zip(&sets) {
            net.descend_by(&set.gradients, LR)?;
        }
        last_loss = made.iter().map(|(_, loss)| f64::from(*loss)).sum::<f64>() / made.len() as f64;
    }
    let net = nets.swap_remove(0);
    Ok(Outcome { net, last_loss, seconds: begin.elapsed().as_secs_f64() })
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let folder = Path::new(arguments.first().ok_or("usage: fashion FOLDER_OF_PLUGINS [NUM_IMAGES]")?);
    let num_images = arguments.get(1).map_or(Ok(60_000), |text| text.parse())?;
    let train = Images::read("train", num_images)?;
    let test = Images::read("t10k", 10_000)?;
    let factory = Plugin::load(folder.join("data_parallel.so"))?.strategy("data_parallel")?;

    let alone = train_alone(&train)?;
    let runs = [
        ("data_parallel, by the trait Model", train_by_model(&train, factory)?),
        ("reduce_gradients alone", train_by_gradients(&train, factory)?),
    ];
    println!("{:36} {:>9} {:>9} {:>9} {:>12}", "", "last loss", "accuracy", "seconds", "from alone");
    let mut is_near = true;
    let accuracy = |net: &Net| net.accuracy(&test);
    let (loss, percent) = (alone.last_loss, 100.0 * accuracy(&alone.net)?);
    println!("{:36} {loss:9.6} {percent:7.2} % {:9.1} {:>12}", "candle alone", alone.seconds, "");
    for (name, run) in &runs {
        let distance = run.net.distance(&alone.net)?;
        let (loss, percent) = (run.last_loss, 100.0 * accuracy(&run.net)?);
        println!("{name:36} {loss:9.6} {percent:7.2} % {:9.1} {distance:12.1e}", run.seconds);
        is_near &= distance <= TOLERANCE;
    }
    if is_near { Ok(()) } else { Err(format!("weights differ by more than {TOLERANCE:e}").into()) }
}
