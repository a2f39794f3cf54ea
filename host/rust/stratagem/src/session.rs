// SPDX-License-Identifier: Apache-2.0
//! Sessions of libstratagem: a config with its data, its loop, and strategies that are exchanged while it runs.
use crate::config::to_json;
use crate::error::{Error, Result, check};
use crate::events::{self, Events, Progress};
use crate::library::{Library, json, path_text, read_json};
use crate::model::{ModelHandle, Stage};
use crate::source::{self, Source};
use crate::strategy::Strategy;
use crate::types::{sized, to_text};
use crate::value::{Tree, ValueRef};
use serde::Serialize;
use serde_json::Value;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use stratagem_sys as sys;

/// What a session is opened with.
pub struct SessionBuilder {
    library: Library,
    config_path: String,
    config_text: Result<String>,
    config_folder: String,
    overrides: Vec<String>,
    stage: Stage,
    checkpoint: String,
    output: String,
    flags: u32,
    model: Option<ModelHandle>,
    events: Option<Box<dyn Events>>,
    sources: Vec<(String, Box<dyn Source>)>,
}

/// One run. Dropping it closes it.
///
/// It takes one caller at a time, any thread's:
/// ```
/// fn one_thread(session: &mut stratagem::Session) {
///     std::thread::scope(|scope| {
///         scope.spawn(|| session.step(1));
///     });
/// }
/// ```
/// ```compile_fail,E0499
/// fn two_threads(session: &mut stratagem::Session) {
///     std::thread::scope(|scope| {
///         scope.spawn(|| session.step(1));
///         scope.spawn(|| session.step(1)); // error: borrowed twice
///     });
/// }
/// ```
/// After its end there is nothing left to call:
/// ```
/// fn used_before_close(mut session: stratagem::Session) -> stratagem::Result<()> {
///     session.step(1)?;
///     session.close();
///     Ok(())
/// }
/// ```
/// ```compile_fail,E0382
/// fn used_after_close(mut session: stratagem::Session) -> stratagem::Result<()> {
///     session.close();
///     session.step(1)?; // error: moved
///     Ok(())
/// }
/// ```
/// A strategy that it lends ends before the next call that may swap it:
/// ```
/// fn lent_again(session: &mut stratagem::Session) -> stratagem::Result<()> {
///     session.step(1)?;
///     let mut strategy = session.strategy()?;
///     strategy.barrier("late")
/// }
/// ```
/// ```compile_fail,E0499
/// fn swapped(session: &mut stratagem::Session) -> stratagem::Result<()> {
///     let mut strategy = session.strategy()?;
///     session.step(1)?; // error: `strategy` still borrows the session
///     strategy.barrier("late")
/// }
/// ```
pub struct Session {
    control: Control,
    _events: Option<events::Shared>, // which the library calls until the session is freed
}

/// What may be asked of a session at any time, from any thread. Once the session is closed, what returns a result returns an error, and the
/// rest does nothing.
#[derive(Clone, Copy)]
pub struct Control {
    library: Library,
    handle: sys::stg_session,
}

impl SessionBuilder {
    pub(crate) fn new(library: Library) -> SessionBuilder {
        let empty = String::new;
        SessionBuilder {
            library,
            config_path: empty(),
            config_text: Ok(empty()),
            config_folder: empty(),
            overrides: vec![],
            stage: Stage::Fit,
            checkpoint: empty(),
            output: empty(),
            flags: 0,
            model: None,
            events: None,
            sources: vec![],
        }
    }

    /// The config's file.
    pub fn config_path(mut self, path: impl AsRef<Path>) -> SessionBuilder {
        self.config_path = path_text(path.as_ref()).to_owned();
        self
    }

    /// The config itself: anything that serde turns into a JSON object. Its paths are relative to `folder`.
    pub fn config(mut self, config: &impl Serialize, folder: impl AsRef<Path>) -> SessionBuilder {
        self.config_text = to_json(config);
        let folder = std::path::absolute(folder.as_ref()).unwrap_or_else(|_| PathBuf::from(folder.as_ref()));
        self.config_folder = path_text(&folder).to_owned();
        self
    }

    /// `set("optimizer.lr", 0.1)` wins over the config.
    pub fn set(mut self, key: &str, value: impl Into<Value>) -> SessionBuilder {
        self.overrides.push(format!("{key}={}", value.into()));
        self
    }

    /// What [`Session::run`] does; to begin with it trains.
    pub fn stage(mut self, stage: Stage) -> SessionBuilder {
        self.stage = stage;
        self
    }

    /// A checkpoint, or the folder of a run.
    pub fn checkpoint(mut self, path: impl AsRef<Path>) -> SessionBuilder {
        self.checkpoint = path_text(path.as_ref()).to_owned();
        self
    }

    /// The file that predictions go to.
    pub fn output(mut self, path: impl AsRef<Path>) -> SessionBuilder {
        self.output = path_text(path.as_ref()).to_owned();
        self
    }

    /// The host brings batches and drives [`Session::strategy`]; no data is needed, nor read.
    pub fn own_loop(mut self) -> SessionBuilder {
        self.flags |= sys::STG_SESSION_OWN_LOOP;
        self
    }

    /// Events are kept for [`Control::poll`], too.
    pub fn queue_events(mut self) -> SessionBuilder {
        self.flags |= sys::STG_SESSION_QUEUE_EVENTS;
        self
    }

    /// Everything runs on the thread that is inside a call.
    pub fn caller_thread_only(mut self) -> SessionBuilder {
        self.flags |= sys::STG_SESSION_CALLER_THREAD_ONLY;
        self
    }

    /// What `{"kind": "host"}` means in the config's model.
    pub fn model(mut self, model: &ModelHandle) -> SessionBuilder {
        self.model = Some(model.clone());
        self
    }

    /// Who is told.
    pub fn events(mut self, events: impl Events) -> SessionBuilder {
        self.events = Some(Box::new(events));
        self
    }

    /// What `{"source": name}` means in the config's data.
    pub fn source(mut self, name: &str, source: impl Source) -> SessionBuilder {
        self.sources.push((name.to_owned(), Box::new(source)));
        self
    }

    /// Checks the config, loads plugins and data, sets up strategy and model.
    pub fn open(self) -> Result<Session> {
        let config_text = self.config_text?;
        let events = self.events.map(Arc::new);
        let event_table = events.as_ref().map(events::table);
        let overrides: Vec<sys::stg_string> = self.overrides.iter().map(|text| to_text(text)).collect();
        let sources: Vec<sys::stg_data_source> =
            self.sources.into_iter().map(|(name, source)| source::table(name, source, events.clone())).collect();
        let pointers: Vec<*const sys::stg_data_source> = sources.iter().map(std::ptr::from_ref).collect();
        let args = sized!(stg_session_args {
            config_path: to_text(&self.config_path),
            config_text: to_text(&config_text),
            config_folder: to_text(&self.config_folder),
            overrides: overrides.as_ptr(),
            num_overrides: overrides.len() as u64,
            stage: self.stage as u64,
            checkpoint: to_text(&self.checkpoint),
            events: event_table.as_ref().map_or(std::ptr::null(), std::ptr::from_ref),
            output: to_text(&self.output),
            flags: self.flags.into(),
            model: self.model.as_ref().map_or(std::ptr::null(), ModelHandle::raw),
            sources: pointers.as_ptr(),
            num_sources: pointers.len() as u64,
        });
        let mut handle = 0;
        unsafe { check(self.library.functions.stg_session_open(&args, &mut handle))? };
        Ok(Session { control: Control { library: self.library, handle }, _events: events })
    }
}

impl Session {
    fn functions(&self) -> &'static sys::Libstratagem {
        self.control.library.functions
    }

    /// Trains so many updates more, with what falls between them. True: the run is over, and [`Session::run`] gives its result.
    pub fn step(&mut self, num_updates: u64) -> Result<bool> {
        let mut is_over = 0;
        unsafe { check(self.functions().stg_session_step(self.control.handle, num_updates, &mut is_over))? };
        Ok(is_over != 0)
    }

    /// Trains to the end, validates, tests or predicts. The result: one JSON object.
    pub fn run(&mut self) -> Result<Value> {
        json(|out| unsafe { self.functions().stg_session_run(self.control.handle, out) })
    }

    /// The strategy that is set up now, for steps, predictions or state of the host's own.
    pub fn strategy(&mut self) -> Result<Strategy<'_>> {
        let (mut api, mut instance) = (std::ptr::null(), std::ptr::null_mut());
        unsafe {
            check(self.functions().stg_session_strategy(self.control.handle, &mut api, &mut instance))?;
            Ok(Strategy::over(api, instance, Some(PhantomData)))
        }
    }

    /// Exchanges the strategy now. `strategy` is what the config's "strategy" is. On an error the old one goes on.
    pub fn swap(&mut self, strategy: &impl Serialize) -> Result<()> {
        let text = to_json(strategy)?;
        unsafe { check(self.functions().stg_session_swap(self.control.handle, to_text(&text))) }
    }

    /// For other threads, events and signal handlers.
    pub fn control(&self) -> Control {
        self.control
    }

    /// How far the run is.
    pub fn progress(&self) -> Result<Progress> {
        self.control.progress()
    }

    /// Ends it.
    pub fn close(self) {}
}

impl Drop for Session {
    fn drop(&mut self) {
        unsafe { self.functions().stg_session_close(self.control.handle) };
    }
}

impl Control {
    /// How far the run is.
    pub fn progress(self) -> Result<Progress> {
        let mut out = sized!(stg_progress {});
        unsafe { check(self.library.functions.stg_session_progress(self.handle, &mut out))? };
        Progress::from_abi(&out)
    }

    /// Exchanges the strategy before the next update. How it went is told by [`Events::swap`].
    pub fn request_swap(self, strategy: &impl Serialize) -> Result<()> {
        let text = to_json(strategy)?;
        unsafe { check(self.library.functions.stg_session_request_swap(self.handle, to_text(&text))) }
    }

    /// Reads the config file again before the next update, and swaps to the strategy in it. Safe in a signal handler.
    pub fn request_reload(self) {
        unsafe { self.library.functions.stg_session_request_reload(self.handle) };
    }

    /// The run finishes its update, writes a checkpoint, and ends. Safe in a signal handler.
    pub fn request_stop(self) {
        unsafe { self.library.functions.stg_session_request_stop(self.handle) };
    }

    /// The run ends now, with [`crate::Code::Cancelled`]. Safe in a signal handler.
    pub fn cancel(self) {
        unsafe { self.library.functions.stg_session_cancel(self.handle) };
    }

    /// The next event of a session with [`SessionBuilder::queue_events`], waited for so long; none if there was none.
    pub fn poll(self, timeout: Duration) -> Result<Option<Value>> {
        let mut out = Tree::empty();
        let timeout_ns = u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX);
        unsafe { check(self.library.functions.stg_session_poll(self.handle, timeout_ns, out.as_mut_raw()))? };
        match out.root() {
            ValueRef::None => Ok(None),
            ValueRef::Text(text) => read_json(text).map(Some),
            other => Err(Error::invalid(format!("an event is {other:?}"))),
        }
    }
}
