// SPDX-License-Identifier: Apache-2.0
//! libstratagem, loaded at run time and never unloaded.
use crate::error::{Code, Error, Result, check};
use crate::plugin::Plugin;
use crate::session::SessionBuilder;
use crate::types::{borrow_text, to_text};
use crate::value::Tree;
use libloading::os::unix::{RTLD_LOCAL, RTLD_NOW};
use serde_json::Value;
use std::ffi::OsString;
use std::path::Path;
use stratagem_sys as sys;

/// libstratagem's functions. A copy is the same library.
#[derive(Clone, Copy)]
pub struct Library {
    pub(crate) functions: &'static sys::Libstratagem,
}

impl Library {
    /// The library that the environment's `STRATAGEM_LIBRARY` names, or `libstratagem.so.1` where the loader finds it.
    pub fn open() -> Result<Library> {
        Library::load(std::env::var_os("STRATAGEM_LIBRARY").unwrap_or_else(|| OsString::from("libstratagem.so.1")))
    }

    /// The library of a file. The handle is leaked on purpose: plugins, sessions and errors of it may live as long as the process.
    pub fn load(file: impl AsRef<Path>) -> Result<Library> {
        let file = file.as_ref();
        let failed = |error: libloading::Error| {
            let message = format!("{} is no libstratagem of this version: {error}", file.display());
            Error::new(Code::FailedPrecondition, message).with_source(error)
        };
        unsafe {
            let library = libloading::os::unix::Library::open(Some(file), RTLD_NOW | RTLD_LOCAL).map_err(failed)?;
            let functions = sys::Libstratagem::from_library(library).map_err(failed)?;
            Ok(Library { functions: Box::leak(Box::new(functions)) })
        }
    }

    /// Its version.
    pub fn version(self) -> &'static str {
        unsafe { borrow_text(self.functions.stg_version()) }
    }

    /// A session, to be described and opened.
    pub fn session(self) -> SessionBuilder {
        SessionBuilder::new(self)
    }

    /// What there is in the search folders, without loading it.
    pub fn list_plugins(self, config: Option<&Path>) -> Result<Value> {
        let path = config.map_or("", path_text);
        json(|out| unsafe { self.functions.stg_list_plugins(to_text(path), out) })
    }

    /// What a run needs on this machine, what is wrong, and what to do: docs/doctor.md. With a config: its needs, too.
    pub fn doctor(self, config: Option<&Path>) -> Result<Value> {
        let path = config.map_or("", path_text);
        json(|out| unsafe { self.functions.stg_doctor(to_text(path), out) })
    }

    /// The note of a plugin file, without loading it.
    pub fn inspect_plugin(self, file: impl AsRef<Path>) -> Result<Value> {
        json(|out| unsafe { self.functions.stg_inspect_plugin(to_text(path_text(file.as_ref())), out) })
    }

    /// Loads a plugin file and tells what it offers.
    pub fn describe_plugin(self, file: impl AsRef<Path>) -> Result<Value> {
        json(|out| unsafe { self.functions.stg_describe_plugin(to_text(path_text(file.as_ref())), out) })
    }

    /// Loads a plugin file with all of libstratagem's checks, those of [`Plugin::load`] and those of who may write to it among them.
    pub fn load_plugin(self, file: impl AsRef<Path>) -> Result<Plugin> {
        let mut table = std::ptr::null();
        unsafe {
            check(self.functions.stg_load_plugin(to_text(path_text(file.as_ref())), &mut table))?;
            Plugin::from_raw(table).ok_or_else(|| Error::new(Code::Internal, "the plugin was loaded, but its table is null"))
        }
    }

    /// The JSON Schema of configs.
    pub fn config_schema(self) -> Result<Value> {
        json(|out| unsafe { self.functions.stg_config_schema(out) })
    }

    /// The JSON Schema of the options of a strategy, or of a model.
    pub fn options_schema(self, name: &str, is_model: bool) -> Result<Value> {
        json(|out| unsafe { self.functions.stg_options_schema(to_text(name), is_model.into(), out) })
    }
}

/// A path that is no UTF-8 is none: then there is no such file, and the error says so.
pub(crate) fn path_text(path: &Path) -> &str {
    path.to_str().unwrap_or("(a path that is no UTF-8)")
}

/// A result that is a JSON text.
pub(crate) fn json(call: impl FnOnce(*mut sys::stg_tree) -> *mut sys::stg_error) -> Result<Value> {
    let mut out = Tree::empty();
    unsafe { check(call(out.as_mut_raw()))? };
    read_json(out.root().text()?)
}

pub(crate) fn read_json(text: &str) -> Result<Value> {
    serde_json::from_str(text)
        .map_err(|error| Error::new(Code::Internal, format!("libstratagem's answer is no JSON: {error}")).with_source(error))
}
