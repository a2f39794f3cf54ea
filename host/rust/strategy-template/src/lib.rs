// SPDX-License-Identifier: Apache-2.0
//! A strategy plugin in Rust, from the headers alone: one replica on the CPU, plain gradient descent over any model.
//!
//! `abi.rs` is what bindgen makes of `abi/stratagem/abi.h`; nothing else of Stratagem's is needed to build this. What a plugin has to have:
//!   one exported symbol   the probe, below; rustc hides all others of a cdylib
//!   an ELF note           what a host reads before it runs any of this
//!   -z nodelete           build.rs
//!   no unwinding          every function of the table goes through `entry::guard`
//!
//!   lib.rs       the note, the probe, the tables
//!   entry.rs     how a call comes in: sizes of structs, states, one caller at a time, panics
//!   error.rs     errors on their way out
//!   tree.rs      value trees: checked, copied, taken
//!   tensor.rs    their tensors
//!   replica.rs   the model, called
//!   strategy.rs  the strategy itself
//!   state.rs     its state, for checkpoints and swaps
//!   table.rs     the functions of the table
#[allow(dead_code, non_camel_case_types, non_upper_case_globals, unsafe_op_in_unsafe_fn, clippy::all)]
#[rustfmt::skip]
mod abi;
mod entry;
mod error;
mod replica;
mod state;
mod strategy;
mod table;
mod tensor;
mod tree;

use abi::*;
use std::ptr;

const NAME: &str = env!("CARGO_PKG_NAME");
const VERSION: &str = env!("CARGO_PKG_VERSION");

// ---- the note

/// With three or fewer NULs behind the text: a literal of the note's whole size.
macro_rules! note_text {
    () => {
        concat!(
            r#"{"name": ""#,
            env!("CARGO_PKG_NAME"),
            r#"", "version": ""#,
            env!("CARGO_PKG_VERSION"),
            r#"", "abi": {"major": 1, "min_minor": 0, "max_minor": 0}, "strategies": [""#,
            env!("CARGO_PKG_NAME"),
            r#""], "models": []}"#
        )
    };
}

const NOTE_SIZE_BYTES: usize = (note_text!().len() + 4) / 4 * 4; // at least one NUL

#[repr(C)]
struct Note {
    owner_size_bytes: u32,
    description_size_bytes: u32,
    type_: u32,
    owner: [u8; 12],
    description: [u8; NOTE_SIZE_BYTES],
}

const fn padded<const SIZE: usize>(text: &[u8]) -> [u8; SIZE] {
    let mut bytes = [0; SIZE];
    let mut at = 0;
    while at < text.len() {
        bytes[at] = text[at];
        at += 1;
    }
    bytes
}

// A section of this name becomes a note segment of the file.
#[used]
#[unsafe(link_section = ".note.stratagem")]
static NOTE: Note = Note {
    owner_size_bytes: 10,
    description_size_bytes: NOTE_SIZE_BYTES as u32,
    type_: STG_NOTE_TYPE,
    owner: padded(b"Stratagem"),
    description: padded(note_text!().as_bytes()),
};

// ---- the tables, which live as long as the process

/// Tables are never written.
#[repr(transparent)]
struct Table<T>(T);
unsafe impl<T> Sync for Table<T> {}

const fn text(text: &'static str) -> stg_string {
    stg_string { data: text.as_ptr().cast(), size_bytes: text.len() as u64 }
}

static FACTORY: Table<stg_strategy_factory> = Table(stg_strategy_factory {
    struct_size: size_of::<stg_strategy_factory>() as u64,
    name: text(NAME),
    summary: text("One replica on the CPU, plain gradient descent."),
    options_schema: text(r#"{"type": "object", "additionalProperties": false}"#),
    device_kinds: &STG_DEVICE_CPU,
    num_device_kinds: 1,
    capabilities: STG_CAPABILITY_CALLER_THREAD_ONLY as u64, // it has no threads of its own at all
    api: &table::API,
});

static FACTORIES: Table<[*const stg_strategy_factory; 1]> = Table([&FACTORY.0]);

static PLUGIN: Table<stg_plugin> = Table(stg_plugin {
    struct_size: size_of::<stg_plugin>() as u64,
    name: text(NAME),
    version: text(VERSION),
    strategies: FACTORIES.0.as_ptr(),
    num_strategies: 1,
    models: ptr::null(),
    num_models: 0,
    get_extension: Some(get_extension),
});

unsafe extern "C" fn get_extension(_: stg_string) -> *const std::ffi::c_void {
    ptr::null()
}

// ---- the probe

/// Allocates nothing and can't panic.
///
/// # Safety
/// As the header has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stg_plugin_probe(request: *const stg_probe_request, reply: *mut stg_probe_reply) -> u32 {
    let (Some(request), Some(reply)) = (unsafe { request.as_ref() }, unsafe { reply.as_mut() }) else {
        return STG_PROBE_BAD_ARGUMENT;
    };
    if request.min_minor > request.max_minor || request.reserved != 0 {
        return STG_PROBE_BAD_ARGUMENT;
    }
    (reply.abi_major, reply.min_minor, reply.max_minor) = (STG_ABI_MAJOR, 0, STG_ABI_MINOR);
    if request.abi_major == STG_ABI_MAJOR && request.min_minor <= STG_ABI_MINOR {
        reply.minor = request.max_minor.min(STG_ABI_MINOR);
        reply.plugin = (&raw const PLUGIN.0).cast();
        reply.text_size_bytes = 0;
        return STG_PROBE_ACCEPTED;
    }
    (reply.minor, reply.plugin) = (0, ptr::null());
    let mut words = Words { reply, size_bytes: 0 };
    let (major, min, max) = (request.abi_major, request.min_minor, request.max_minor);
    let host = unsafe { tree::bytes(request.host_name.data.cast(), request.host_name.size_bytes) };
    let host = std::str::from_utf8(host).unwrap_or("");
    let _ = std::fmt::Write::write_fmt(
        &mut words,
        format_args!(
            "built for ABI {STG_ABI_MAJOR}.0 to {STG_ABI_MAJOR}.{STG_ABI_MINOR}; the host {host} speaks {major}.{min} to {major}.{max}"
        ),
    );
    words.end();
    STG_PROBE_REFUSED
}

/// Text into the host's buffer, cut to fit, its whole size counted.
struct Words<'a> {
    reply: &'a mut stg_probe_reply,
    size_bytes: u64,
}

impl std::fmt::Write for Words<'_> {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        for &byte in text.as_bytes() {
            if !self.reply.text.is_null() && self.size_bytes + 1 < self.reply.text_capacity_bytes {
                unsafe { *self.reply.text.add(self.size_bytes as usize) = byte.cast_signed() };
            }
            self.size_bytes += 1;
        }
        Ok(())
    }
}

impl Words<'_> {
    fn end(self) {
        let capacity_bytes = self.reply.text_capacity_bytes;
        if !self.reply.text.is_null() && capacity_bytes > 0 {
            unsafe { *self.reply.text.add(self.size_bytes.min(capacity_bytes - 1) as usize) = 0 };
        }
        self.reply.text_size_bytes = self.size_bytes + 1;
    }
}
