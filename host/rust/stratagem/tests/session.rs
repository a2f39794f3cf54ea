// SPDX-License-Identifier: Apache-2.0
//! Sessions of libstratagem: model, data and events all in Rust.
mod common;
use common::*;
use serde_json::{Value as Json, json};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use stratagem::*;

fn library() -> Library {
    Library::load(build_folder().join("lib/libstratagem.so.1")).expect("`./run build` has built libstratagem")
}

/// The rows of `common::batch(12)`.
struct Rows {
    fails: bool,
}

impl Source for Rows {
    fn num_samples(&self) -> usize {
        12
    }

    fn read(&mut self, rows: &[i64]) -> Result<Tree> {
        if self.fails {
            return Err(Error::new(Code::Unavailable, "no rows today").with_source(DiskGone(3)));
        }
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

fn config(strategy: Json) -> Json {
    json!({
        "strategy": strategy,
        "precision": "64-true",
        "model": {"kind": "host"},
        "optimizer": {"name": "sgd", "lr": 0.1},
        "data": {"train": {"source": "rows", "batch_size": 4, "shuffle": true}},
        "trainer": {"max_epochs": 4, "log_every_n_steps": 1}
    })
}

fn builder(strategy: Json, fault: Fault) -> SessionBuilder {
    library()
        .session()
        .config(&config(strategy), std::env::temp_dir())
        .model(&ModelHandle::new(Linear(fault)))
        .source("rows", Rows { fails: false })
}

fn single() -> Json {
    json!({"name": "single_device"})
}

fn parallel(devices: u32) -> Json {
    json!({"name": "data_parallel", "devices": devices})
}

fn weights(session: &mut Session) -> Vec<f64> {
    let mut strategy = session.strategy().unwrap();
    let state = strategy.export_state().unwrap();
    let model = state.get("model").unwrap();
    [model.tensor("weight").unwrap().to_vec::<f64>().unwrap(), model.tensor("bias").unwrap().to_vec().unwrap()].concat()
}

fn assert_close(is: &[f64], wanted: &[f64]) {
    for (is, wanted) in is.iter().zip(wanted) {
        assert!((is - wanted).abs() <= 1e-12, "{is} is not {wanted}");
    }
}

fn contains(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "\"{part}\" is not in: {text}");
    }
}

fn unswapped() -> Vec<f64> {
    let mut session = builder(single(), Fault::None).open().unwrap();
    assert!(session.step(12).unwrap());
    weights(&mut session)
}

#[derive(Default)]
struct Seen {
    lines: Vec<Json>,
    swaps: Vec<(i64, String, Option<String>)>,
    num_starts: usize,
    num_ends: usize,
}

#[derive(Clone, Default)]
struct Watch(Arc<Mutex<Seen>>);

impl Events for Watch {
    fn metrics(&self, line: &str) {
        self.0.lock().unwrap().lines.push(serde_json::from_str(line).unwrap());
    }

    fn batch_start(&self, _: &Progress) -> Result<()> {
        self.0.lock().unwrap().num_starts += 1;
        Ok(())
    }

    fn batch_end(&self, _: &Progress, outputs: ValueRef<'_>) -> Result<()> {
        assert!(outputs.tensor("loss")?.item()?.is_finite());
        self.0.lock().unwrap().num_ends += 1;
        Ok(())
    }

    fn swap(&self, step: i64, strategy: &str, error: Option<&Error>) {
        self.0.lock().unwrap().swaps.push((step, strategy.to_owned(), error.map(Error::chain)));
    }
}

#[test]
fn a_session_trains_a_rust_model_on_rust_data_and_tells_what_it_does() {
    let watch = Watch::default();
    let mut session = builder(parallel(2), Fault::None).events(watch.clone()).open().unwrap();
    assert!(!session.step(5).unwrap());
    assert_eq!(session.progress().unwrap().step, 5);
    let result = session.run().unwrap();
    assert_eq!((&result["steps"], &result["strategy"]), (&json!(12), &json!("data_parallel")));
    drop(session);
    let seen = watch.0.lock().unwrap();
    assert_eq!((seen.num_starts, seen.num_ends), (12, 12));
    assert!(!seen.lines.is_empty());
}

#[test]
fn strategies_are_swapped_in_mid_run_and_the_weights_are_those_of_one() {
    let watch = Watch::default();
    let mut session = builder(single(), Fault::None).events(watch.clone()).open().unwrap();
    session.step(3).unwrap();
    session.swap(&parallel(2)).unwrap();
    session.step(3).unwrap();
    session.control().request_swap(&parallel(3)).unwrap();
    session.step(3).unwrap();
    let error = session.swap(&json!({"name": "dataparallel"})).unwrap_err();
    contains(&error.chain(), &["dataparallel", "data_parallel"]);
    session.swap(&single()).unwrap();
    assert!(session.step(3).unwrap());
    assert_close(&weights(&mut session), &unswapped());
    let steps: Vec<i64> = watch.0.lock().unwrap().swaps.iter().filter(|swap| swap.2.is_none()).map(|swap| swap.0).collect();
    assert_eq!(steps, [3, 6, 9]);
}

#[test]
fn a_loop_of_the_hosts_own_drives_the_strategy_of_a_session() {
    let mut session = library()
        .session()
        .config(
            &json!({"strategy": parallel(2), "precision": "64-true", "model": {"kind": "host"}, "optimizer": {"name": "sgd", "lr": 0.1}}),
            std::env::temp_dir(),
        )
        .model(&ModelHandle::new(Linear(Fault::None)))
        .own_loop()
        .open()
        .unwrap();
    let mut strategy = session.strategy().unwrap();
    let (outputs, updated) = strategy.train_batch(batch(10), Position::default(), Some(Update::new(0.1))).unwrap();
    assert_eq!(updated.outcome, Outcome::Done);
    drop(strategy);
    assert!(session.strategy().unwrap().status().unwrap().num_updates == 1, "the session's instance is not destroyed by a loan");
    drop(session);
    assert!(outputs.tensor("loss").unwrap().item().unwrap().is_finite(), "outputs outlive the session");
}

struct Faulty(&'static str);

impl Events for Faulty {
    fn batch_end(&self, progress: &Progress, _: ValueRef<'_>) -> Result<()> {
        match self.0 {
            "panic" if progress.step >= 2 => panic!("an event at step {}", progress.step),
            "error" if progress.step >= 2 => Err(Error::new(Code::Unavailable, "enough").with_source(DiskGone(5))),
            _ => Ok(()),
        }
    }
}

#[test]
fn an_event_that_fails_or_panics_ends_the_run_with_it_as_the_cause() {
    let error = builder(single(), Fault::None).events(Faulty("panic")).open().unwrap().run().unwrap_err();
    contains(&error.chain(), &["the host's batch_end panicked", "an event at step"]);
    let error = builder(single(), Fault::None).events(Faulty("error")).open().unwrap().run().unwrap_err();
    contains(&error.chain(), &["enough", "disk 5 is gone"]);
    let mut last: &dyn std::error::Error = &error;
    while let Some(next) = last.source() {
        last = next;
    }
    assert_eq!(last.downcast_ref::<DiskGone>(), Some(&DiskGone(5)));
}

#[test]
fn a_source_or_a_model_that_fails_ends_the_run_with_its_words() {
    let failing = library()
        .session()
        .config(&config(single()), std::env::temp_dir())
        .model(&ModelHandle::new(Linear(Fault::None)))
        .source("rows", Rows { fails: true });
    contains(&failing.open().and_then(|mut session| session.run()).unwrap_err().chain(), &["no rows today", "disk 3 is gone"]);
    let error = builder(parallel(2), Fault::PanicInStep).open().unwrap().run().unwrap_err();
    contains(&error.chain(), &["the model's step panicked", "a step of 2 rows"]);
}

#[test]
fn a_handle_of_a_closed_session_gives_errors_and_does_nothing() {
    let session = builder(single(), Fault::None).open().unwrap();
    let control = session.control();
    session.close();
    assert_eq!(control.progress().unwrap_err().code(), Code::FailedPrecondition);
    assert_eq!(control.request_swap(&single()).unwrap_err().code(), Code::FailedPrecondition);
    assert!(control.poll(Duration::ZERO).is_err());
    control.request_stop();
    control.request_reload();
    control.cancel();
}

#[test]
fn a_config_that_is_garbage_is_refused_with_all_that_is_wrong() {
    let open = |config: Json| library().session().config(&config, std::env::temp_dir()).open().err().unwrap();
    let error = open(json!({"strategy": {"name": "single_device", "divices": 2}, "sede": 1}));
    assert_eq!(error.code(), Code::InvalidArgument);
    contains(&error.chain(), &["/strategy/divices", "/sede"]);
    assert_eq!(open(json!(17)).code(), Code::InvalidArgument);
    let error = library().session().config_path("/nowhere.json").open().err().unwrap();
    contains(&error.chain(), &["/nowhere.json"]);
    assert!(library().session().open().is_err(), "no config at all");
}

#[test]
fn a_library_that_is_not_libstratagem_is_refused_with_the_loaders_own_text() {
    let libm = ["/lib/x86_64-linux-gnu/libm.so.6", "/usr/lib64/libm.so.6"].into_iter().find(|path| std::path::Path::new(path).exists());
    let error = Library::load(libm.unwrap()).err().unwrap();
    contains(&error.chain(), &["libm.so.6", "undefined symbol: stg_"]);
    let error = Library::load("/nowhere/libstratagem.so").err().unwrap();
    contains(&error.chain(), &["/nowhere/libstratagem.so", "cannot open shared object file"]);
    contains(&library().load_plugin(libm.unwrap()).err().unwrap().chain(), &["libm.so.6", "Stratagem"]);
}

#[test]
fn the_events_of_a_run_can_be_polled_and_a_stop_ends_it_well() {
    let mut session = builder(single(), Fault::None).queue_events().open().unwrap();
    session.step(2).unwrap();
    let control = session.control();
    let mut kinds = vec![];
    while let Some(event) = control.poll(Duration::ZERO).unwrap() {
        kinds.push(event["event"].as_str().unwrap().to_owned());
    }
    assert!(kinds.iter().any(|kind| kind == "progress"), "{kinds:?}");
    control.request_stop();
    assert_eq!(session.run().unwrap()["interrupted"], json!(true));
}

#[test]
fn plugins_are_listed_described_and_loaded() {
    let library = library();
    assert!(library.version().starts_with("1."));
    assert!(library.list_plugins(None).unwrap()["plugins"].is_array());
    let file = build_folder().join("lib/stratagem/data_parallel.so");
    assert_eq!(library.inspect_plugin(&file).unwrap()["name"], "data_parallel");
    assert_eq!(library.describe_plugin(&file).unwrap()["strategies"][0]["name"], "data_parallel");
    assert_eq!(library.load_plugin(&file).unwrap().strategy("data_parallel").unwrap().name(), "data_parallel");
    assert!(library.config_schema().unwrap()["properties"].is_object());
    assert!(library.options_schema("data_parallel", false).unwrap().is_object());
}
