// SPDX-License-Identifier: Apache-2.0
//! Errors on their way out: a struct with its own release.
use crate::abi::*;
use std::ptr;

pub type Result<T> = std::result::Result<T, Error>;

pub struct Error {
    pub code: u32,
    pub flags: u32,
    pub message: String,
    /// Owned; another party's.
    pub cause: *mut stg_error,
}

impl Error {
    pub fn new(code: u32, message: impl Into<String>) -> Error {
        Error { code, flags: STG_ERROR_INSTANCE_USABLE, message: message.into(), cause: ptr::null_mut() }
    }
}

pub fn invalid<T>(message: impl Into<String>) -> Result<T> {
    Err(Error::new(STG_INVALID_ARGUMENT, message))
}

pub fn unimplemented<T>(message: impl Into<String>) -> Result<T> {
    Err(Error::new(STG_UNIMPLEMENTED, message))
}

pub fn precondition<T>(message: impl Into<String>) -> Result<T> {
    Err(Error::new(STG_FAILED_PRECONDITION, message))
}

/// What a function of the model's or the host's returned; `what` says which.
///
/// # Safety
/// Null, or an error that is ours now.
pub unsafe fn check(raw: *mut stg_error, what: &str) -> Result<()> {
    match unsafe { raw.as_ref() } {
        None => Ok(()),
        Some(cause) => {
            let mut error = Error::new(cause.code, format!("replica 0 on cpu:0: {what} failed"));
            error.flags |= cause.flags & STG_ERROR_RETRYABLE; // the others are about the instance, which is not the model's
            error.cause = raw;
            Err(error)
        }
    }
}

/// `raw` first: a pointer to it is one to the whole.
#[repr(C)]
struct Made {
    raw: stg_error,
    message: String,
}

unsafe extern "C" fn release(error: *mut stg_error) {
    unsafe {
        if let Some(cause) = (*error).cause.as_ref() {
            if let Some(release) = cause.release {
                release((*error).cause);
            }
        }
        drop(Box::from_raw(error.cast::<Made>()));
    }
}

impl Error {
    pub fn into_raw(self) -> *mut stg_error {
        let message = stg_string { data: self.message.as_ptr().cast(), size_bytes: self.message.len() as u64 };
        let of_model = !self.cause.is_null();
        let raw = stg_error {
            code: self.code,
            flags: self.flags,
            replica: if of_model { 0 } else { -1 },
            rank: -1,
            device: if of_model { crate::strategy::CPU } else { stg_device { kind: STG_DEVICE_NONE, index: -1 } },
            message,
            cause: self.cause,
            release: Some(release),
            owner: ptr::null_mut(),
        };
        Box::into_raw(Box::new(Made { raw, message: self.message })).cast() // the text stays where it is
    }
}
