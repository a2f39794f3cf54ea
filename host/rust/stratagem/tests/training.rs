// SPDX-License-Identifier: Apache-2.0
//! A model of Rust's own under the strategies.
mod common;
use common::*;
use stratagem::*;

fn train(name: &str, devices: u32, caller_thread_only: bool, num_steps: i64) -> (Vec<f64>, Vec<f64>) {
    let factory = plugin(name).strategy(name).unwrap();
    let options = CreateOptions { caller_thread_only, host: None };
    let mut strategy = Strategy::create_with(factory, &sgd().devices(devices), options).unwrap();
    strategy.setup(&ModelHandle::new(Linear(Fault::None)), None, Stage::Fit).unwrap();
    let mut losses = vec![];
    for step in 0..num_steps {
        let at = Position { batch_index: step, global_step: step, ..Position::default() };
        let (outputs, updated) = strategy.train_batch(batch(10), at, Some(Update::new(0.1))).unwrap();
        assert_eq!((updated.outcome, updated.total_weight), (Outcome::Done, 10.0));
        assert_eq!(strategy.weights().iter().sum::<f64>(), 10.0);
        losses.push(outputs.tensor("loss").unwrap().item().unwrap()); // the mean over all rows
    }
    assert_eq!(strategy.status().unwrap().num_updates, num_steps as u64);
    (losses, weights(&mut strategy))
}

/// The same by hand.
fn reference(num_steps: usize) -> Vec<f64> {
    let data = batch(10);
    let (x, y) = (data.tensor("x").unwrap().as_slice::<f64>().unwrap(), data.tensor("y").unwrap().as_slice::<f64>().unwrap());
    let mut w = [0.1, -0.2, 0.3, 0.5];
    for _ in 0..num_steps {
        let mut gradient = [0.0; 4];
        for (row, y) in x.chunks(3).zip(y) {
            let residual = row.iter().zip(&w).map(|(x, w)| x * w).sum::<f64>() + w[3] - y;
            row.iter().chain(&[1.0]).zip(&mut gradient).for_each(|(x, g)| *g += 0.2 * residual * x);
        }
        w.iter_mut().zip(gradient).for_each(|(w, g)| *w -= 0.1 * g);
    }
    w.into()
}

#[test]
fn every_strategy_trains_a_rust_model_to_the_weights_computed_by_hand() {
    let wanted = reference(20);
    let (losses, weights) = train("single_device", 1, false, 20);
    assert_close(&weights, &wanted);
    assert!(losses[19] < losses[0] / 1.2, "{losses:?}");
    for devices in [1, 2, 3] {
        for caller_thread_only in [false, true] {
            let (parallel_losses, weights) = train("data_parallel", devices, caller_thread_only, 20);
            assert_close(&weights, &wanted);
            assert_close(&parallel_losses, &losses);
        }
    }
}

#[test]
fn the_three_members_are_one_train_batch() {
    let mut strategy = strategy("data_parallel", &sgd().devices(2)).unwrap();
    strategy.setup(&ModelHandle::new(Linear(Fault::None)), None, Stage::Fit).unwrap();
    for step in 0..5 {
        let lent = batch(10);
        strategy.training_step(&lent, Position { global_step: step, ..Position::default() }).unwrap();
        strategy.backward(true).unwrap();
        assert_eq!(strategy.gradients().unwrap().tensor("weight").unwrap().shape(), [3]);
        strategy.optimizer_step(Update { lr: 0.1, clip: Clip::None }).unwrap();
        assert_eq!(lent.tensor("x").unwrap().shape(), [10, 3], "a lent batch stays the caller's");
    }
    assert_eq!(weights(&mut strategy), train("data_parallel", 2, false, 5).1);
}

#[test]
fn a_state_goes_from_one_strategy_to_another() {
    let mut first = strategy("single_device", &sgd()).unwrap();
    let model = ModelHandle::new(Linear(Fault::None));
    first.setup(&model, None, Stage::Fit).unwrap();
    first.train_batch(batch(10), Position::default(), Some(Update::new(0.1))).unwrap();
    let state = first.copy_state().unwrap();
    let after_one = weights(&mut first);
    drop(first);
    let mut second = strategy("data_parallel", &sgd().devices(2)).unwrap();
    second.setup(&model, Some(state), Stage::Fit).unwrap();
    assert_eq!(weights(&mut second), after_one);
    assert_eq!(second.status().unwrap().num_updates, 1);
}

#[test]
fn a_model_library_is_a_model_as_well() {
    let fashion = plugin("fashion_cnn");
    assert_eq!((fashion.name(), fashion.strategies().len()), ("fashion_cnn", 0));
    let model = fashion.model("fashion_cnn", &serde_json::json!({"channels": 2})).unwrap();
    let mut strategy = strategy("data_parallel", &StrategyConfig::new().devices(2)).unwrap();
    strategy.setup(&model, None, Stage::Predict).unwrap();
    let images = Tensor::from_vec(vec![7u8; 5 * 784], &[5, 28, 28]).unwrap();
    let outputs =
        strategy.evaluation_step(Stage::Predict, Tree::from(Value::dict([("inputs", images.into())])), Position::default()).unwrap();
    let ValueRef::Tensor(logits) = outputs.root() else { panic!("{outputs:?}") };
    assert_eq!(logits.shape(), [5, 10]);
    drop(strategy);
    assert!(logits.to_vec::<f32>().unwrap().iter().all(|x| x.is_finite()), "outputs outlive the strategy");
}

#[test]
fn reduce_gradients_alone_is_the_weighted_mean() {
    let mut strategy = strategy("data_parallel", &StrategyConfig::new().devices(2)).unwrap();
    strategy.setup_modelless().unwrap();
    let set = |index, weight, first: &[f32], second: Option<&[f32]>| GradientSet {
        device: Device::cpu(index),
        weight,
        gradients: [Some(first), second].map(|g| g.map(|g| Tensor::from_vec(g.to_vec(), &[g.len()]).unwrap())).into(),
    };
    let mut sets = [set(0, 1.0, &[1.0, 2.0], None), set(1, 3.0, &[5.0, 6.0], Some(&[8.0]))];
    strategy.reduce_gradients(&mut sets, ReduceOp::Mean).unwrap();
    for set in &sets {
        let read = |index: usize| set.gradients[index].as_ref().unwrap().as_slice::<f32>().unwrap().to_vec();
        assert_eq!((read(0), read(1)), (vec![4.0, 5.0], vec![6.0]), "a slot that was none in one set is a new tensor");
    }
}

#[test]
fn what_comes_in_with_a_structure_goes_out_with_it() {
    let mut strategy = strategy("data_parallel", &StrategyConfig::new().devices(2)).unwrap();
    let object = Opaque::new(vec![1, 2, 3]);
    let tree: Tree = Value::dict([
        ("z", Value::Tuple(vec![true.into(), 7.into(), 0.5.into(), "text".into()])),
        ("a", Value::List(vec![Value::None, Value::Bytes(vec![0, 255]), object.clone().into()])),
        ("t", Tensor::from_vec(vec![1i64, 2], &[2]).unwrap().into()),
    ])
    .into();
    let before = tree.tensor("t").unwrap().as_slice::<i64>().unwrap().as_ptr();
    let back = strategy.broadcast(tree, 0).unwrap();
    assert_eq!(back.tensor("t").unwrap().as_slice::<i64>().unwrap().as_ptr(), before, "nothing was copied");
    let Value::Dict(entries) = back.into_value() else { panic!() };
    assert_eq!(entries.iter().map(|(key, _)| key.as_str()).collect::<Vec<_>>(), ["z", "a", "t"]);
    let [(_, Value::Tuple(z)), (_, Value::List(a)), (_, Value::Tensor(t))] = &entries[..] else { panic!("{entries:?}") };
    assert!(matches!(&z[..], [Value::Bool(true), Value::Int(7), Value::Double(0.5), Value::Text(text)] if text == "text"));
    let [Value::None, Value::Bytes(bytes), Value::Opaque(same)] = &a[..] else { panic!("{a:?}") };
    assert_eq!((&bytes[..], same.downcast_ref::<Vec<i32>>().unwrap()), (&[0, 255][..], &vec![1, 2, 3]));
    assert!(std::ptr::eq(same.downcast_ref::<Vec<i32>>().unwrap(), object.downcast_ref().unwrap()), "the same object");
    assert_eq!(t.as_slice::<i64>().unwrap(), [1, 2]);
}

#[test]
fn a_tensor_goes_to_dlpack_and_back() {
    let tensor = Tensor::from_vec(vec![1.5f64, 2.5], &[2]).unwrap();
    let memory = tensor.as_slice::<f64>().unwrap().as_ptr();
    let back = unsafe { Tensor::from_dlpack(tensor.into_dlpack()) }.unwrap();
    assert_eq!((back.as_slice::<f64>().unwrap().as_ptr(), back.as_slice::<f64>().unwrap()), (memory, &[1.5, 2.5][..]));
}

#[test]
fn the_log_of_a_strategy_reaches_the_host() {
    use std::sync::{Arc, Mutex};
    struct Log(Arc<Mutex<Vec<(Level, String)>>>);
    impl Host for Log {
        fn log(&self, level: Level, message: &str, _: ValueRef<'_>) {
            self.0.lock().unwrap().push((level, message.to_owned()));
            panic!("a log that panics harms nobody");
        }
    }
    let lines = Arc::new(Mutex::new(vec![]));
    let options = CreateOptions { caller_thread_only: false, host: Some(Box::new(Log(lines.clone()))) };
    let config = sgd().devices(2); // of which single_device takes the first, and says so
    drop(Strategy::create_with(plugin("single_device").strategy("single_device").unwrap(), &config, options).unwrap());
    let lines = lines.lock().unwrap();
    assert!(lines.iter().any(|(level, text)| *level == Level::Warning && text.contains('2')), "{lines:?}");
}

/// `strategy-template`, which has no crate of ours in it.
#[test]
fn a_strategy_plugin_written_in_rust_trains_like_the_others() {
    let file = build_folder().join("rust-template/debug/librust_sgd.so");
    let plugin = Plugin::load(&file).expect("cargo has built strategy-template into the build folder's rust-template");
    assert_eq!((plugin.name(), plugin.version()), ("rust_sgd", "1.0.0"));
    let config = StrategyConfig::new().optimizer("sgd", serde_json::json!({"lr": 0.1}));
    let mut strategy = Strategy::create(plugin.strategy("rust_sgd").unwrap(), &config).unwrap();
    strategy.setup(&ModelHandle::new(Linear(Fault::None)), None, Stage::Fit).unwrap();
    for step in 0..20 {
        let at = Position { global_step: step, ..Position::default() };
        strategy.train_batch(batch(10), at, Some(Update::new(0.1))).unwrap();
    }
    assert_close(&weights(&mut strategy), &reference(20));
    let state = strategy.copy_state().unwrap();
    drop(strategy);
    let mut next = common::strategy("data_parallel", &sgd().devices(2)).unwrap();
    next.setup(&ModelHandle::new(Linear(Fault::None)), Some(state), Stage::Fit).unwrap();
    assert_close(&weights(&mut next), &reference(20));
    assert_eq!(next.status().unwrap().num_updates, 20, "a state of one author's goes on in another's");
}
