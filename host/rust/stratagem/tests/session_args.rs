// SPDX-License-Identifier: Apache-2.0
//! What a session is opened with, and what is asked of it while it runs, reaches it.
mod common;
use common::plane::{Plane, rows};
use common::runs::*;
use common::*;
use serde_json::{Value as Json, json};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::ThreadId;
use stratagem::*;

const INITIAL: [f64; 4] = [0.1, -0.2, 0.3, 0.5];

#[test]
fn what_is_set_wins_over_the_config() {
    let builder = builder(single(), Fault::None).set("optimizer.lr", 0.5).set("trainer.max_steps", 2).set("optimizer.lr", 0.0);
    let mut session = builder.open().unwrap();
    assert_eq!(session.run().unwrap()["steps"], 2);
    assert_eq!(weights(&mut session.strategy().unwrap()), INITIAL, "with a rate of 0, which was set last");
}

/// The rows of `common::plane`.
struct PlaneRows;
impl Source for PlaneRows {
    fn num_samples(&self) -> usize {
        3
    }
    fn read(&mut self, rows_wanted: &[i64]) -> Result<Tree> {
        assert_eq!(rows_wanted, [0, 1, 2]);
        Ok(rows())
    }
}

#[test]
fn a_session_validates_tests_and_predicts() {
    let folder = Folder::new("stages");
    let output = folder.join("predictions.npz");
    for stage in [Stage::Validate, Stage::Test, Stage::Predict] {
        let (plane, watch) = (Plane::new(), Watch::default());
        let data = json!({"source": "plane", "batch_size": 3});
        let config = json!({
            "strategy": single(), "precision": "64-true", "model": {"kind": "host"},
            "data": {"validation": data, "test": data, "predict": data}
        });
        let builder = library().session().config(&config, &folder.0).model(&plane.handle()).source("plane", PlaneRows);
        let builder = if stage == Stage::Predict { builder.output(&output) } else { builder };
        let mut session = builder.stage(stage).events(watch.clone()).open().unwrap();
        assert_eq!(session.progress().unwrap().stage, stage);
        let result = session.run().unwrap();
        match stage {
            Stage::Predict => assert!(std::fs::read(&output).unwrap().starts_with(b"PK"), "{result}"),
            Stage::Test => assert_eq!(result["test"]["loss"], 7.0, "{result}"),
            _ => assert_eq!(result["validation"]["loss"], 7.0, "{result}"),
        }
        assert_eq!(plane.told.lock().unwrap().steps.iter().map(|step| step.stage).collect::<Vec<_>>(), [stage]);
        assert_eq!(watch.0.lock().unwrap().progress.iter().map(|at| (at.stage, at.batch)).collect::<Vec<_>>(), [(stage, 1)]);
    }
}

#[test]
fn a_run_goes_on_from_a_checkpoint() {
    let folder = Folder::new("resume");
    let saving = builder(single(), Fault::None).set("checkpoint.dir", folder.0.to_str().unwrap()).set("trainer.max_steps", 5);
    assert!(saving.open().unwrap().step(9).unwrap(), "the run is over after 5, and saved");
    let mut resumed = builder(single(), Fault::None).checkpoint(folder.join("last")).open().unwrap();
    assert_eq!(resumed.progress().unwrap().step, 5);
    assert_eq!(resumed.run().unwrap()["steps"], 12);
    let mut whole = builder(single(), Fault::None).open().unwrap();
    whole.run().unwrap();
    assert_close(&weights(&mut resumed.strategy().unwrap()), &weights(&mut whole.strategy().unwrap()));
}

#[test]
fn everything_runs_on_the_callers_thread_where_that_is_asked_for() {
    let here = std::thread::current().id();
    for caller_thread_only in [false, true] {
        let threads: Arc<Mutex<Vec<ThreadId>>> = Arc::default();
        let note = |threads: &Arc<Mutex<Vec<ThreadId>>>| threads.lock().unwrap().push(std::thread::current().id());
        let (mut plane, of_steps, of_reads) = (Plane::new(), threads.clone(), threads.clone());
        plane.on_step = Arc::new(move |_| {
            note(&of_steps);
            Ok(())
        });
        let data = json!({"source": "rows", "batch_size": 4});
        let rows = Rows::new(move |_| {
            note(&of_reads);
            Ok(())
        });
        let config = json!({
            "strategy": parallel(2), "precision": "64-true", "model": {"kind": "host"}, "optimizer": {"name": "sgd", "lr": 0.1},
            "data": {"train": data}
        });
        let builder = library().session().config(&config, "/").model(&plane.handle()).source("rows", rows);
        let builder = if caller_thread_only { builder.caller_thread_only() } else { builder };
        builder.open().unwrap().run().unwrap();
        let threads = threads.lock().unwrap();
        assert_eq!((threads.len(), plane.told.lock().unwrap().steps.len()), (3 + 2 * 3, 2 * 3));
        assert_eq!(threads.iter().all(|&thread| thread == here), caller_thread_only);
    }
}

/// Asks something of its session before the third batch.
struct Ask(Arc<OnceLock<Control>>, fn(Control));
impl Events for Ask {
    fn batch_start(&self, progress: &Progress) -> Result<()> {
        if progress.step == 2 {
            self.1(*self.0.get().unwrap());
        }
        Ok(())
    }
}

fn run_asking(ask: fn(Control)) -> (Result<Json>, i64) {
    let control = Arc::new(OnceLock::new());
    let mut session = builder(single(), Fault::None).events(Ask(control.clone(), ask)).open().unwrap();
    control.set(session.control()).ok().unwrap();
    let result = session.run();
    (result, session.progress().unwrap().step)
}

#[test]
fn a_run_is_cancelled_or_stopped_from_inside_an_event() {
    let (cancelled, step) = run_asking(Control::cancel);
    assert_eq!((cancelled.unwrap_err().code(), step), (Code::Cancelled, 2), "now");
    let (stopped, step) = run_asking(Control::request_stop);
    assert_eq!((&stopped.unwrap()["interrupted"], step), (&json!(true), 3), "after its update");
}

#[test]
fn a_config_file_is_read_again_where_that_is_asked_for() {
    let folder = Folder::new("reload");
    let file = folder.join("config.json");
    let write = |strategy: Json| std::fs::write(&file, config(strategy).to_string()).unwrap();
    write(single());
    let watch = Watch::default();
    let builder = library().session().config_path(&file).model(&ModelHandle::new(Linear(Fault::None)));
    let mut session = builder.source("rows", rows_source()).events(watch.clone()).open().unwrap();
    session.step(1).unwrap();
    write(parallel(2));
    session.step(1).unwrap();
    assert!(watch.0.lock().unwrap().swaps.is_empty(), "nobody has asked yet");
    session.control().request_reload();
    session.step(1).unwrap();
    assert_eq!(session.strategy().unwrap().devices().unwrap(), [Device::cpu(0), Device::cpu(1)]);
    let swaps = &watch.0.lock().unwrap().swaps;
    assert_eq!((swaps.len(), swaps[0].0, &swaps[0].2), (1, 2, &None));
    contains(&swaps[0].1, &["data_parallel"]);
}
