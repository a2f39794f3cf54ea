// SPDX-License-Identifier: Apache-2.0
//! What this crate costs over the C ABI: the same calls through the table, as C makes them, and through `Strategy`, by turns in one process.
//!
//!     cargo run --release --example overhead -- FOLDER_OF_PLUGINS
use std::path::Path;
use std::time::Instant;
use stratagem::*;

/// A model whose step does nothing.
struct Empty;
struct EmptyReplica;

impl Model for Empty {
    type Replica = EmptyReplica;
    fn replicate(&self, _: &ReplicateArgs) -> Result<(EmptyReplica, Parameters)> {
        let parameters = vec![Parameter::new("weight", Tensor::from_vec(vec![0f32], &[1])?)];
        Ok((EmptyReplica, Parameters { parameters, buffers: vec![] }))
    }
}

impl Replica for EmptyReplica {
    type Graph = ();
    fn step(&mut self, _: Memory<'_>, _: &StepContext, _: Tree) -> Result<StepOutput<()>> {
        Ok(StepOutput { outputs: Value::from(Tensor::scalar(0f32)).into(), denominator: None, graph: Some(()) })
    }
    fn backward(&mut self, _: Memory<'_>, _: (), _: f64, sink: &mut Sink<'_>) -> Result<()> {
        sink.ready(0, None)
    }
}

fn batch() -> Result<Tree> {
    let tensor = || Ok(Value::from(Tensor::from_vec(vec![1f32; 8], &[8])?));
    Ok(Value::dict([("inputs", tensor()?), ("targets", tensor()?), ("weights", tensor()?)]).into())
}

/// The fastest of many short rounds each, by turns, in ns per call: what else the machine does only adds.
fn compare(what: &str, num_calls: u32, mut raw: impl FnMut(u32), mut safe: impl FnMut(u32)) {
    let mut fastest = [f64::INFINITY; 2];
    for _ in 0..300 {
        let mut measure = |index: usize, call: &mut dyn FnMut(u32)| {
            let begin = Instant::now();
            call(num_calls);
            fastest[index] = fastest[index].min(begin.elapsed().as_nanos() as f64 / f64::from(num_calls));
        };
        measure(0, &mut raw);
        measure(1, &mut safe);
    }
    println!("{what:44} {:10.1} {:10.1} {:+10.1}", fastest[0], fastest[1], fastest[1] - fastest[0]);
}

unsafe fn succeeds(error: *mut sys::stg_error) {
    assert!(error.is_null());
}

fn measure(folder: &Path, name: &str, devices: u32) -> Result<()> {
    let factory = Plugin::load(folder.join(format!("{name}.so")))?.strategy(name)?;
    let mut strategy = Strategy::create(factory, &StrategyConfig::new().devices(devices).optimizer("sgd", serde_json::json!({})))?;
    strategy.setup(&ModelHandle::new(Empty), None, Stage::Fit)?;
    let (api, instance) = strategy.as_raw();
    let (api, null) = (unsafe { &*api }, std::ptr::null());

    let barrier = api.barrier.expect("a barrier");
    let text = sys::stg_string { data: c"step".as_ptr(), size_bytes: 4 };
    compare(
        &format!("{name} on {devices}: barrier"),
        1000,
        |count| (0..count).for_each(|_| unsafe { succeeds(barrier(instance, null, text)) }),
        |count| (0..count).for_each(|_| strategy.barrier("step").expect("a barrier")),
    );

    let batch_to_device = api.batch_to_device.expect("a batch_to_device");
    let mut moved = batch()?.into_raw();
    let mut tree = Some(batch()?);
    compare(
        &format!("{name} on {devices}: batch_to_device, moved"),
        300,
        |count| unsafe {
            for _ in 0..count {
                let device = sys::stg_device { kind: sys::STG_DEVICE_NONE, index: -1 };
                let struct_size = size_of::<sys::stg_transfer_args>() as u64;
                let args = sys::stg_transfer_args { struct_size, batch: &mut moved, device, dataloader_index: 0 };
                let mut out = std::mem::zeroed();
                succeeds(batch_to_device(instance, null, &args, &mut out));
                moved = out;
            }
        },
        |count| {
            let mut batch = tree.take().expect("a batch");
            for _ in 0..count {
                batch = strategy.batch_to_device(batch, None, 0).expect("the batch");
            }
            tree = Some(batch);
        },
    );
    drop(unsafe { Tree::from_raw(moved) });

    let training_step = api.training_step.expect("a training_step");
    let lent = batch()?;
    let lent_raw = batch()?.into_raw();
    compare(
        &format!("{name} on {devices}: training_step of nothing"),
        50,
        |count| unsafe {
            for _ in 0..count {
                let mut borrowed = sys::stg_tree { root: lent_raw.root, release: None, owner: std::ptr::null_mut() };
                let mut args: sys::stg_step_args = std::mem::zeroed();
                (args.struct_size, args.batch) = (size_of::<sys::stg_step_args>() as u64, &mut borrowed);
                let mut result: sys::stg_step_result = std::mem::zeroed();
                result.struct_size = size_of::<sys::stg_step_result>() as u64;
                succeeds(training_step(instance, null, &args, &mut result));
                (result.outputs.release.expect("owned"))(&mut result.outputs);
            }
        },
        |count| (0..count).for_each(|_| drop(strategy.training_step(&lent, Position::default()).expect("a step"))),
    );
    drop(unsafe { Tree::from_raw(lent_raw) });
    Ok(())
}

fn main() -> Result<()> {
    let folder = std::env::args().nth(1).unwrap_or_else(|| "../../build/lib/stratagem".to_owned());
    println!("{:44} {:>10} {:>10} {:>10}", "ns per call", "C ABI", "Rust", "");
    measure(Path::new(&folder), "single_device", 1)?;
    measure(Path::new(&folder), "data_parallel", 2)
}
