// SPDX-License-Identifier: Apache-2.0
//! What a strategy, and a model, are asked and told reaches them, and what they say comes back. Numbers are those of `common::plane`.
mod common;
use common::plane::{Plane, rows};
use common::*;
use std::sync::{Arc, Mutex};
use stratagem::*;

fn set_up(plane: &Plane, devices: u32) -> Strategy<'static> {
    let mut strategy = strategy("data_parallel", &sgd().devices(devices)).unwrap();
    strategy.setup(&plane.handle(), None, Stage::Fit).unwrap();
    strategy
}

fn train(strategy: &mut Strategy, update: Update) -> Updated {
    strategy.train_batch(rows(), Position::default(), Some(update)).unwrap().1
}

fn weight(strategy: &mut Strategy) -> Vec<f64> {
    strategy.copy_state().unwrap().get("model").unwrap().tensor("weight").unwrap().to_vec().unwrap()
}

fn numbers(values: &[f64]) -> Value {
    Tensor::from_vec(values.to_vec(), &[values.len()]).unwrap().into()
}

#[test]
fn a_mean_a_sum_and_a_denominator_are_weighed_as_what_they_are() {
    for (loss_kind, denominators, gradient, total_weight) in [
        (LossKind::Mean, None, [3.0, 4.0], 3.0),
        (LossKind::Sum, None, [9.0, 12.0], 3.0),
        (LossKind::Mean, Some([1.0, 3.0]), [2.25, 3.0], 4.0),
    ] {
        let mut strategy = set_up(&Plane { loss_kind, denominators, ..Plane::new() }, 2);
        let updated = train(&mut strategy, Update::new(0.5));
        assert_eq!((updated.outcome, updated.total_weight), (Outcome::Done, total_weight), "{loss_kind:?} {denominators:?}");
        assert_close(&weight(&mut strategy), &gradient.map(|g| 1.0 - 0.5 * g));
    }
}

#[test]
fn gradients_are_clipped_as_the_update_says() {
    for (clip, clipped, norm) in [
        (Clip::None, [3.0, 4.0], None),
        (Clip::Norm(1.0), [0.6, 0.8], Some(5.0)),
        (Clip::Norm(10.0), [3.0, 4.0], Some(5.0)),
        (Clip::Value(3.5), [3.0, 3.5], None),
    ] {
        let mut strategy = set_up(&Plane::new(), 2);
        let updated = train(&mut strategy, Update { lr: 1.0, clip });
        let moved: Vec<f64> = weight(&mut strategy).iter().map(|w| 1.0 - w).collect();
        let close = moved.iter().zip(clipped).all(|(is, wanted)| (is - wanted).abs() < 1e-5); // a norm has a small number added
        assert!(close, "{clip:?}: {moved:?} is not {clipped:?}");
        match norm {
            Some(norm) => assert_close(&[updated.gradient_norm], &[norm]),
            None => assert!(updated.gradient_norm.is_nan(), "{clip:?}"),
        }
    }
}

#[test]
fn a_frozen_parameter_has_no_gradient_and_a_transient_buffer_is_in_no_state() {
    let config = sgd().optimizer("sgd", serde_json::json!({"momentum": 0.9}));
    let mut strategy = strategy("single_device", &config).unwrap();
    strategy.setup(&Plane::new().handle(), None, Stage::Fit).unwrap();
    train(&mut strategy, Update::new(0.5));
    let state = strategy.copy_state().unwrap();
    let keys = |value: ValueRef<'_>| match value {
        ValueRef::Dict(entries) => entries.iter().map(|(key, _)| key.to_owned()).collect::<Vec<_>>(),
        other => panic!("{other:?} is no dict"),
    };
    assert_eq!(keys(state.get("model").unwrap()), ["weight", "frozen", "kept"]);
    assert_eq!(keys(state.get("optimizer").unwrap().get("per_parameter").unwrap()), ["weight"]);
    assert_close(&weight(&mut strategy), &[-0.5, -1.0]);

    let mut thawing = set_up(&Plane { thaws: true, ..Plane::new() }, 2);
    let refused = thawing.train_batch(rows(), Position::default(), None).unwrap_err();
    contains(&refused.chain(), &["the gradient of parameter 1 was refused", "frozen"]);
}

#[test]
fn a_model_is_told_the_mode_and_the_place_of_each_step() {
    let plane = Plane::new();
    let mut strategy = strategy("single_device", &sgd()).unwrap();
    strategy.setup(&plane.handle(), None, Stage::Fit).unwrap();
    let at = Position { batch_index: 3, dataloader_index: 1, global_step: 7 };
    strategy.train_batch(rows(), at, None).unwrap();
    for stage in [Stage::Validate, Stage::Test, Stage::Predict] {
        strategy.evaluation_step(stage, rows(), at).unwrap();
    }
    strategy.training_step(rows(), at).unwrap();
    let told = plane.told.lock().unwrap();
    let stages: Vec<_> = told.steps.iter().map(|step| (step.stage, step.needs_graph)).collect();
    let (fit, others) = ((Stage::Fit, true), [Stage::Validate, Stage::Test, Stage::Predict].map(|stage| (stage, false)));
    assert_eq!(stages, [fit, others[0], others[1], others[2], fit]);
    for step in &told.steps {
        assert_eq!((step.batch_index, step.dataloader_index, step.global_step), (3, 1, 7));
        assert_eq!((step.replica, step.num_replicas, step.device, step.autocast_dtype), (0, 1, Device::cpu(0), None));
    }
    assert_eq!(told.modes, [true, false, true]);
}

#[test]
fn numbers_of_devices_and_ranks_become_one() {
    let mut strategy = strategy("data_parallel", &sgd().devices(2)).unwrap();
    let tree = || Tree::from(Value::dict([("x", numbers(&[1.0, 2.0, 6.0])), ("n", 3.into())]));
    for (op, wanted) in [(ReduceOp::Mean, 3.0), (ReduceOp::Sum, 9.0), (ReduceOp::Min, 1.0), (ReduceOp::Max, 6.0)] {
        let reduced = strategy.reduce(tree(), op).unwrap();
        assert_eq!(reduced.tensor("x").unwrap().item().unwrap(), wanted, "{op:?}");
        assert!(matches!(reduced.get("n"), Ok(ValueRef::Int(3))));
    }
    for decision in [true, false] {
        for mode in [Decide::All, Decide::Any] {
            assert_eq!(strategy.reduce_boolean_decision(decision, mode).unwrap(), decision, "of one process");
        }
    }
    let lent = tree();
    for given in [strategy.all_gather(tree()).unwrap(), strategy.to_host(tree()).unwrap(), strategy.all_gather(&lent).unwrap()] {
        assert_eq!(given.tensor("x").unwrap().to_vec::<f64>().unwrap(), [1.0, 2.0, 6.0], "of one process, on a CPU: as it was");
        assert!(matches!(given.get("n"), Ok(ValueRef::Int(3))));
    }
    assert_eq!(lent.tensor("x").unwrap().shape(), [3]);
}

/// A state with "weight" of (5, 6), without "frozen", and with one that no model has.
fn other_state(strategy: &mut Strategy) -> Tree {
    let Value::Dict(mut state) = strategy.copy_state().unwrap().into_value() else { panic!("no dict") };
    let (_, model) = state.iter_mut().find(|(key, _)| key == "model").unwrap();
    let Value::Dict(model) = model else { panic!("no dict") };
    model.retain(|(name, _)| name == "kept");
    model.extend([("weight".to_owned(), numbers(&[5.0, 6.0])), ("stranger".to_owned(), numbers(&[0.0]))]);
    Value::Dict(state).into()
}

#[test]
fn a_state_is_imported_strictly_or_with_a_report_of_what_did_not_fit() {
    let mut strategy = set_up(&Plane::new(), 2);
    let state = other_state(&mut strategy);
    let refused = strategy.import_state(&state, true).unwrap_err();
    contains(&refused.chain(), &["frozen", "stranger"]);
    assert_eq!(weight(&mut strategy), [1.0, 1.0], "what is refused changes nothing");
    let report = strategy.import_state(state, false).unwrap();
    for (key, name) in [("missing", "frozen"), ("unexpected", "stranger")] {
        let ValueRef::List(names) = report.get(key).unwrap() else { panic!("{report:?}") };
        assert_eq!(names.iter().map(|name| name.text().unwrap().to_owned()).collect::<Vec<_>>(), [name], "{key}");
    }
    assert_eq!(weight(&mut strategy), [5.0, 6.0]);
}

#[test]
fn a_checkpoint_is_saved_and_loaded_with_the_hosts_text() {
    let folder = Folder::new("calls");
    let path = folder.join("checkpoint").to_str().unwrap().to_owned();
    let mut strategy = set_up(&Plane::new(), 2);
    train(&mut strategy, Update::new(0.5));
    strategy.save(&path, "{\"mine\":1}").unwrap();
    train(&mut strategy, Update::new(0.5));
    assert_close(&weight(&mut strategy), &[-2.0, -3.0]);
    assert_eq!(strategy.load(&path, true).unwrap(), "{\"mine\":1}");
    assert_close(&weight(&mut strategy), &[-0.5, -1.0]);
    assert_eq!(strategy.status().unwrap().num_updates, 1);
    contains(&strategy.load("/nowhere", false).unwrap_err().chain(), &["/nowhere"]);
}

/// What is traced, and how deep it is in each replica.
#[derive(Clone, Default)]
struct Trace(Arc<Mutex<Vec<(String, i32, bool)>>>);

impl Host for Trace {
    fn trace(&self, phase: &str, replica: i32, begins: bool) {
        self.0.lock().unwrap().push((phase.to_owned(), replica, begins));
        panic!("a trace that panics harms nobody");
    }
}

#[test]
fn the_phases_of_a_step_are_traced_from_begin_to_end_on_every_replica() {
    let trace = Trace::default();
    let options = CreateOptions { host: Some(Box::new(trace.clone())), ..CreateOptions::default() };
    let factory = plugin("data_parallel").strategy("data_parallel").unwrap();
    let mut strategy = Strategy::create_with(factory, &sgd().devices(2), options).unwrap();
    strategy.setup(&Plane::new().handle(), None, Stage::Fit).unwrap();
    trace.0.lock().unwrap().clear();
    train(&mut strategy, Update::new(0.5));
    drop(strategy);
    let traced = trace.0.lock().unwrap();
    for replica in [0, 1] {
        let of_replica: Vec<_> = traced.iter().filter(|(_, on, _)| *on == replica).collect();
        let phases: Vec<_> = of_replica.chunks(2).map(|pair| (&pair[0].0, pair[0].2, &pair[1].0, pair[1].2)).collect();
        assert!(phases.iter().all(|(begun, begins, ended, still)| begun == ended && *begins && !still), "{of_replica:?}");
        assert!(phases.iter().any(|(phase, ..)| phase.contains("backward")), "{of_replica:?}");
    }
}
