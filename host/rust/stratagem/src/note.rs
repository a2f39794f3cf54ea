// SPDX-License-Identifier: Apache-2.0
//! What a plugin file says of itself, read without running any of it; and the one LibTorch that a process can hold.
use crate::error::{Code, Error, Result};
use object::elf::FileHeader64;
use object::read::elf::{FileHeader, ProgramHeader};
use serde::Deserialize;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use stratagem_sys as sys;

/// The ELF note of a plugin.
#[derive(Debug, Clone, Deserialize)]
pub struct Note {
    /// The plugin's name.
    pub name: String,
    /// Its version.
    pub version: String,
    /// The ABI that it was built for.
    pub abi: AbiRange,
    /// The strategies that it offers.
    #[serde(default)]
    pub strategies: Vec<String>,
    /// The models that it offers.
    #[serde(default)]
    pub models: Vec<String>,
    /// The LibTorch that it was built with, if any.
    #[serde(default)]
    pub libtorch: Option<String>,
}

/// Versions of the ABI.
#[derive(Debug, Clone, Copy, Deserialize, PartialEq, Eq)]
pub struct AbiRange {
    /// The major.
    pub major: u32,
    /// The lowest minor.
    pub min_minor: u32,
    /// The highest minor.
    pub max_minor: u32,
}

fn no_plugin(file: &Path, reason: impl std::fmt::Display) -> Error {
    Error::new(Code::FailedPrecondition, format!("{} is no Stratagem plugin: {reason}", file.display()))
}

impl Note {
    /// Reads the note of a file.
    pub fn read(file: &Path) -> Result<Note> {
        let data = std::fs::read(file)
            .map_err(|error| Error::new(Code::NotFound, format!("{} can't be read: {error}", file.display())).with_source(error))?;
        let json = Note::json(&data).map_err(|reason| no_plugin(file, reason))?;
        serde_json::from_str(&json).map_err(|error| no_plugin(file, format!("its note can't be read: {error}")).with_source(error))
    }

    fn json(data: &[u8]) -> std::result::Result<String, String> {
        let bad = |error: object::Error| error.to_string();
        let elf = FileHeader64::<object::Endianness>::parse(data).map_err(bad)?;
        let endian = elf.endian().map_err(bad)?;
        let segments = elf.program_headers(endian, data).map_err(bad)?;
        let mapped = segments.iter().filter(|segment| segment.p_filesz(endian) != 0);
        let end = mapped.map(|segment| segment.p_offset(endian).saturating_add(segment.p_filesz(endian))).max().unwrap_or(0);
        if end > data.len() as u64 {
            // The loader would map it all the same, and the process die of a bus error.
            return Err(format!("the file is cut off: it has {} bytes, of which its segments need {end}", data.len()));
        }
        for segment in segments {
            let Some(mut notes) = segment.notes(endian, data).map_err(bad)? else { continue };
            while let Some(note) = notes.next().map_err(bad)? {
                if note.name() == b"Stratagem" && note.n_type(endian).0 == sys::STG_NOTE_TYPE {
                    let text = note.desc().split(|&byte| byte == 0).next().unwrap_or_default();
                    return String::from_utf8(text.to_owned()).map_err(|error| error.to_string());
                }
            }
        }
        Err("it has no note of the owner \"Stratagem\"".to_owned())
    }

    /// Whether this host can use it; the reason in words if not.
    pub(crate) fn check(&self, file: &Path) -> Result<()> {
        let AbiRange { major, min_minor, max_minor } = self.abi;
        if major == sys::STG_ABI_MAJOR && min_minor <= sys::STG_ABI_MINOR {
            return check_libtorch(file, self);
        }
        let (of, to) = (sys::STG_ABI_MAJOR, sys::STG_ABI_MINOR);
        let message =
            format!("{} is built for ABI {major}.{min_minor} to {major}.{max_minor}; this host speaks {of}.0 to {of}.{to}", file.display());
        Err(Error::new(Code::FailedPrecondition, message))
    }
}

/// The version of the LibTorch that came first, and who brought it.
static LIBTORCH: Mutex<Option<(String, PathBuf)>> = Mutex::new(None);

pub(crate) fn remember_libtorch(file: &Path, note: &Note) {
    let mut first = LIBTORCH.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if let (None, Some(version)) = (&*first, &note.libtorch) {
        *first = Some((version.clone(), file.to_owned()));
    }
}

/// A process can hold one LibTorch: another plugin would silently be bound to the one that is there.
fn check_libtorch(file: &Path, note: &Note) -> Result<()> {
    let Some(wanted) = &note.libtorch else { return Ok(()) };
    let Some(mapped) = mapped_libtorch() else { return Ok(()) };
    let first = LIBTORCH.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clone();
    let there = match first {
        Some((version, _)) => version,
        None => version_beside(&mapped).unwrap_or_else(|| wanted.clone()),
    };
    if minor(&there) == minor(wanted) {
        return Ok(());
    }
    let message = format!(
        "{} was built with LibTorch {wanted}, but this process already holds LibTorch {there} ({}), and it can hold only one",
        file.display(),
        mapped.display()
    );
    Err(Error::new(Code::FailedPrecondition, message))
}

fn minor(version: &str) -> Vec<&str> {
    version.split(['.', '+']).take(2).collect()
}

fn mapped_libtorch() -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let mut files = maps.lines().filter_map(|line| line.find('/').map(|at| PathBuf::from(&line[at..])));
    files.find(|file| file.file_name().is_some_and(|name| name.to_string_lossy().starts_with("libtorch_cpu.so")))
}

/// As PyPI's wheel says it, in torch/version.py.
fn version_beside(libtorch_cpu: &Path) -> Option<String> {
    let text = std::fs::read_to_string(libtorch_cpu.parent()?.parent()?.join("version.py")).ok()?;
    let line = text.lines().find(|line| line.starts_with("__version__"))?;
    line.split('\'').nth(1).map(str::to_owned)
}
