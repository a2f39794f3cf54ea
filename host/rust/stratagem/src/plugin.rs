// SPDX-License-Identifier: Apache-2.0
//! Loading a plugin: note, `dlopen`, probe, tables. What is loaded stays: its handle is leaked on purpose, and its tables live as long as
//! the process.
use crate::config::to_json;
use crate::error::{Code, Error, Result, check};
use crate::model::ModelHandle;
use crate::note::{Note, remember_libtorch};
use crate::types::{borrow_slice, borrow_text, to_text};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use serde::Serialize;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use stratagem_sys as sys;

/// A plugin that is loaded.
#[derive(Clone, Copy)]
pub struct Plugin {
    table: &'static sys::stg_plugin,
}

// Tables are constant.
unsafe impl Send for Plugin {}
unsafe impl Sync for Plugin {}

struct Loaded(HashMap<PathBuf, Plugin>);
static LOADED: Mutex<Option<Loaded>> = Mutex::new(None);

impl Plugin {
    /// Loads a plugin; the same file is loaded once.
    ///
    /// What the file says of itself is checked before any of it runs. A plugin is a part of the process from then on: load those that you
    /// trust.
    pub fn load(file: impl AsRef<Path>) -> Result<Plugin> {
        let file = file.as_ref();
        let file = file
            .canonicalize()
            .map_err(|error| Error::new(Code::NotFound, format!("there is no file {}", file.display())).with_source(error))?;
        let mut loaded = LOADED.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let loaded = &mut loaded.get_or_insert_with(|| Loaded(HashMap::new())).0;
        if let Some(plugin) = loaded.get(&file) {
            return Ok(*plugin);
        }
        let note = Note::read(&file)?;
        note.check(&file)?;
        let plugin = unsafe { open(&file)? };
        remember_libtorch(&file, &note);
        if plugin.name() != note.name {
            return Err(failed(&file, format!("its table's name is {}, its note's {}", plugin.name(), note.name)));
        }
        loaded.insert(file, plugin);
        Ok(plugin)
    }

    /// # Safety
    /// A table that lives as long as the process.
    pub(crate) unsafe fn from_raw(table: *const sys::stg_plugin) -> Option<Plugin> {
        Some(Plugin { table: unsafe { table.as_ref()? } })
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        unsafe { borrow_text(self.table.name) }
    }

    /// Its version.
    pub fn version(self) -> &'static str {
        unsafe { borrow_text(self.table.version) }
    }

    /// The strategies that it offers.
    pub fn strategies(self) -> Vec<StrategyFactory> {
        let factories = unsafe { borrow_slice(self.table.strategies, self.table.num_strategies) };
        factories.iter().filter_map(|&factory| unsafe { factory.as_ref() }.map(StrategyFactory)).collect()
    }

    /// A strategy by its name.
    pub fn strategy(self, name: &str) -> Result<StrategyFactory> {
        let all = self.strategies();
        all.iter().find(|factory| factory.name() == name).copied().ok_or_else(|| {
            let names: Vec<&str> = all.iter().map(|factory| factory.name()).collect();
            let message = format!("{} offers no strategy \"{name}\"; it offers {}", self.name(), names.join(", "));
            Error::new(Code::NotFound, message)
        })
    }

    /// A model by its name, made with options: anything that serde turns into a JSON object.
    pub fn model(self, name: &str, options: &impl Serialize) -> Result<ModelHandle> {
        let options = to_json(options)?;
        let factories = unsafe { borrow_slice(self.table.models, self.table.num_models) };
        for factory in factories.iter().filter_map(|&factory| unsafe { factory.as_ref() }) {
            if unsafe { borrow_text(factory.name) } != name {
                continue;
            }
            let Some(create) = factory.create else { break };
            let mut model = std::ptr::null();
            unsafe { check(create(to_text(&options), std::ptr::null(), &mut model))? };
            return unsafe { ModelHandle::from_raw(model) }
                .ok_or_else(|| Error::new(Code::Internal, format!("the model {name} was made, but is null")));
        }
        Err(Error::new(Code::NotFound, format!("{} offers no model \"{name}\"", self.name())))
    }
}

/// A strategy that a plugin offers.
#[derive(Clone, Copy)]
pub struct StrategyFactory(&'static sys::stg_strategy_factory);

unsafe impl Send for StrategyFactory {}
unsafe impl Sync for StrategyFactory {}

impl StrategyFactory {
    /// Its name in a config.
    pub fn name(self) -> &'static str {
        unsafe { borrow_text(self.0.name) }
    }

    /// What it does, in one line.
    pub fn summary(self) -> &'static str {
        unsafe { borrow_text(self.0.summary) }
    }

    /// The JSON Schema of its "options".
    pub fn options_schema(self) -> &'static str {
        unsafe { borrow_text(self.0.options_schema) }
    }

    pub(crate) fn api(self) -> *const sys::stg_strategy_api {
        self.0.api
    }
}

fn failed(file: &Path, what: impl std::fmt::Display) -> Error {
    Error::new(Code::FailedPrecondition, format!("{}: {what}", file.display()))
}

/// # Safety
/// A file whose note says that it is a plugin: code of it runs.
unsafe fn open(file: &Path) -> Result<Plugin> {
    unsafe {
        let library = Library::open(Some(file), RTLD_NOW | RTLD_LOCAL)
            .map_err(|error| failed(file, format!("can't be loaded: {error}")).with_source(error))?;
        let probe: sys::stg_plugin_probe_fn = library
            .get::<sys::stg_plugin_probe_fn>(sys::STG_PLUGIN_PROBE_SYMBOL.to_bytes_with_nul())
            .map(|symbol| *symbol)
            .map_err(|error| failed(file, format!("has a plugin's note, but no probe: {error}")).with_source(error))?;
        std::mem::forget(library);
        let probe = probe.ok_or_else(|| failed(file, "its probe is null"))?;
        ask(file, probe)
    }
}

type Probe = unsafe extern "C" fn(*const sys::stg_probe_request, *mut sys::stg_probe_reply) -> u32;

unsafe fn ask(file: &Path, probe: Probe) -> Result<Plugin> {
    unsafe {
        let request = sys::stg_probe_request {
            abi_major: sys::STG_ABI_MAJOR,
            min_minor: 0,
            max_minor: sys::STG_ABI_MINOR,
            reserved: 0,
            host_name: to_text(concat!("stratagem for Rust ", env!("CARGO_PKG_VERSION"))),
        };
        let mut text = [0u8; 4096];
        let mut reply: sys::stg_probe_reply = std::mem::zeroed();
        (reply.text, reply.text_capacity_bytes) = (text.as_mut_ptr().cast(), text.len() as u64);
        match probe(&request, &mut reply) {
            sys::STG_PROBE_ACCEPTED => {}
            sys::STG_PROBE_REFUSED => {
                let words = text.split(|&byte| byte == 0).next().unwrap_or_default();
                return Err(failed(file, format!("refuses this host: {}", String::from_utf8_lossy(words))));
            }
            answer => return Err(failed(file, format!("its probe answered {answer} to a correct request"))),
        }
        let table = reply.plugin.cast::<sys::stg_plugin>().as_ref();
        let table = table.ok_or_else(|| failed(file, "its probe accepted, but gave no table"))?;
        check_sizes(file, table)?;
        Ok(Plugin { table })
    }
}

unsafe fn check_sizes(file: &Path, table: &sys::stg_plugin) -> Result<()> {
    let check = |what: &str, size: u64, min: u32| {
        if (min as u64..=sys::STG_MAX_STRUCT_SIZE_BYTES as u64).contains(&size) {
            return Ok(());
        }
        Err(failed(file, format!("the struct_size of its {what} is {size}; at least {min} is needed")))
    };
    check("table", table.struct_size, sys::STG_PLUGIN_MIN_SIZE)?;
    for &factory in unsafe { borrow_slice(table.strategies, table.num_strategies) } {
        let factory = unsafe { factory.as_ref() }.ok_or_else(|| failed(file, "a factory of its table is null"))?;
        check("strategy factory", factory.struct_size, sys::STG_STRATEGY_FACTORY_MIN_SIZE)?;
        let api = unsafe { factory.api.as_ref() }.ok_or_else(|| failed(file, "the table of a strategy is null"))?;
        check("strategy table", api.struct_size, sys::STG_STRATEGY_API_MIN_SIZE)?;
    }
    Ok(())
}
