// SPDX-License-Identifier: Apache-2.0
//! Sessions of libstratagem: model, data and events all in Rust.
mod common;
use common::runs::*;
use common::*;
use serde_json::{Value as Json, json};
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::sync::mpsc;
use std::time::Duration;
use stratagem::*;

fn unswapped() -> Vec<f64> {
    let mut session = builder(single(), Fault::None).open().unwrap();
    assert!(session.step(12).unwrap());
    weights(&mut session.strategy().unwrap())
}

#[test]
fn a_session_trains_a_rust_model_on_rust_data_and_tells_what_it_does() {
    let watch = Watch::default();
    let two_for_one = json!({"name": "single_device", "devices": 2}); // of which it takes the first, and says so
    let mut session = builder(two_for_one, Fault::None).events(watch.clone()).open().unwrap();
    assert!(!session.step(5).unwrap());
    assert_eq!(session.progress().unwrap().step, 5);
    let result = session.run().unwrap();
    assert_eq!((&result["steps"], &result["strategy"]), (&json!(12), &json!("single_device")));
    drop(session);
    let seen = watch.0.lock().unwrap();
    assert_eq!((seen.num_starts, seen.num_ends), (12, 12));
    assert_eq!(seen.progress.iter().map(|at| at.step).collect::<Vec<_>>(), (1..=12).collect::<Vec<_>>());
    let last = seen.progress[11];
    assert_eq!((last.stage, last.batch, last.num_batches, last.max_epochs, last.max_steps), (Stage::Fit, 3, 3, Some(4), None));
    let losses = seen.lines.iter().filter(|line| line["stage"] == "fit").map(|line| line["loss"].as_f64().unwrap());
    assert_eq!(losses.last(), Some(last.loss));
    let told = seen.log.iter().find(|(level, _)| *level == Level::Warning).expect("a warning");
    contains(&told.1, &["single_device", "cpu:0"]);
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
    assert_close(&weights(&mut session.strategy().unwrap()), &unswapped());
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

/// Fails in the event of a name, at its second call.
struct Faulty {
    event: &'static str,
    panics: bool,
    num_calls: AtomicU32,
}

impl Faulty {
    fn called(&self, event: &str) -> Result<()> {
        if event != self.event || self.num_calls.fetch_add(1, SeqCst) == 0 {
            return Ok(());
        }
        assert!(!self.panics, "enough of {event}");
        Err(Error::new(Code::Unavailable, format!("enough of {event}")).with_source(DiskGone(5)))
    }
}

impl Events for Faulty {
    fn progress(&self, _: &Progress) -> Result<()> {
        self.called("progress")
    }
    fn metrics(&self, _: &str) -> Result<()> {
        self.called("metrics")
    }
    fn batch_start(&self, _: &Progress) -> Result<()> {
        self.called("batch_start")
    }
    fn batch_end(&self, _: &Progress, _: ValueRef<'_>) -> Result<()> {
        self.called("batch_end")
    }
    fn swap(&self, _: i64, _: &str, _: Option<&Error>) -> Result<()> {
        self.called("swap")
    }
}

#[test]
fn an_event_that_fails_or_panics_ends_the_run_with_it_as_the_cause() {
    // The second line of the metrics tells of the first swap.
    for (event, updates) in [("progress", 2), ("metrics", 1), ("batch_start", 1), ("batch_end", 2), ("swap", 2)] {
        for panics in [false, true] {
            let swaps = json!([{"at_step": 1, "strategy": parallel(2)}, {"at_step": 2, "strategy": single()}]);
            let faulty = Faulty { event, panics, num_calls: AtomicU32::new(0) };
            let mut session = builder(single(), Fault::None).set("swap", swaps).events(faulty).open().unwrap();
            let error = session.run().expect_err(event);
            let words = format!("enough of {event}");
            contains(&error.chain(), &[&format!("the event {event}: "), &words]);
            assert_eq!(error.code(), if panics { Code::Internal } else { Code::Unavailable });
            match panics {
                true => contains(&error.chain(), &[&format!("the host's {event} panicked")]),
                false => assert_eq!(root_cause(&error).downcast_ref(), Some(&DiskGone(5)), "{event}"),
            }
            assert_eq!(session.strategy().unwrap().status().unwrap().num_updates, updates, "{event}: no update came after it");
        }
    }
}

/// Tells when it is dropped.
struct Last<T>(&'static str, mpsc::Sender<&'static str>, T);
impl<T> Drop for Last<T> {
    fn drop(&mut self) {
        let _ = self.1.send(self.0);
    }
}
impl Events for Last<()> {}
impl<S: Source> Source for Last<S> {
    fn num_samples(&self) -> usize {
        self.2.num_samples()
    }
    fn read(&mut self, rows: &[i64]) -> Result<Tree> {
        self.2.read(rows)
    }
}

#[test]
fn a_source_that_is_read_ahead_may_drop_its_session() {
    let ((give, taken), (gone, order)) = (mpsc::channel::<Session>(), mpsc::channel());
    // The first batch is for the first update; the next one is read ahead, and gets the session when that update is done.
    let rows = Rows::new(move |num_reads| {
        if num_reads == 1 {
            drop(taken.recv_timeout(Duration::from_secs(60)).expect("the session"));
        }
        Ok(())
    });
    let mut session = library()
        .session()
        .config(&config(single()), std::env::temp_dir())
        .model(&ModelHandle::new(Linear(Fault::None)))
        .source("rows", Last("source", gone.clone(), rows))
        .events(Last("events", gone, ()))
        .open()
        .unwrap();
    let control = session.control();
    assert!(!session.step(1).unwrap());
    give.send(session).unwrap();
    let next = || order.recv_timeout(Duration::from_secs(60)).expect("what the session held is dropped");
    assert_eq!([next(), next()], ["source", "events"], "events last as long as the session");
    assert_eq!(control.progress().unwrap_err().code(), Code::FailedPrecondition);
}

#[test]
fn a_source_or_a_model_that_fails_ends_the_run_with_its_words() {
    let failing = library()
        .session()
        .config(&config(single()), std::env::temp_dir())
        .model(&ModelHandle::new(Linear(Fault::None)))
        .source("rows", Rows::new(|_| Err(Error::new(Code::Unavailable, "no rows today").with_source(DiskGone(3)))));
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
    assert_eq!(library.doctor(None).unwrap()["checks"][0]["id"], "plugin-folders");
    let missing = library.doctor(Some("/nowhere.json".as_ref())).unwrap_err();
    assert_eq!(missing.code(), stratagem::Code::NotFound);
    let file = build_folder().join("lib/stratagem/data_parallel.so");
    assert_eq!(library.inspect_plugin(&file).unwrap()["name"], "data_parallel");
    assert_eq!(library.describe_plugin(&file).unwrap()["strategies"][0]["name"], "data_parallel");
    assert_eq!(library.load_plugin(&file).unwrap().strategy("data_parallel").unwrap().name(), "data_parallel");
    assert!(library.config_schema().unwrap()["properties"].is_object());
    assert!(library.options_schema("data_parallel", false).unwrap().is_object());
}
