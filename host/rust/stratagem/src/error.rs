// SPDX-License-Identifier: Apache-2.0
//! Errors: one Rust type for what comes out of the ABI, what goes into it, and what this crate finds itself.
//!
//! An error that a model or a callback returned goes through C and comes back as the same Rust object: `source()` of what the strategy
//! returns leads to it, and it can be downcast.
use crate::types::{Device, text, to_text};
use std::any::Any;
use std::error::Error as StdError;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use stratagem_sys as sys;

/// A result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $constant:ident,)*) => {
        /// What kind of error it is: the codes of gRPC and Abseil, with their meanings.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        #[repr(u32)]
        pub enum Code { $($(#[$doc])* $name = sys::$constant,)* }

        impl Code {
            /// An unknown number is `Unknown`.
            fn from_abi(code: u32) -> Code {
                match code { $(sys::$constant => Code::$name,)* _ => Code::Unknown }
            }
        }
    };
}
codes! {
    /// The call was cancelled.
    Cancelled = STG_CANCELLED,
    /// No other code fits.
    Unknown = STG_UNKNOWN,
    /// An argument is wrong, whatever the state.
    InvalidArgument = STG_INVALID_ARGUMENT,
    /// The deadline passed.
    DeadlineExceeded = STG_DEADLINE_EXCEEDED,
    /// Something named isn't there.
    NotFound = STG_NOT_FOUND,
    /// Something to be made is there already.
    AlreadyExists = STG_ALREADY_EXISTS,
    /// Not allowed.
    PermissionDenied = STG_PERMISSION_DENIED,
    /// Out of memory, on the host or a device; a full disk.
    ResourceExhausted = STG_RESOURCE_EXHAUSTED,
    /// Not legal in this state, or from this thread.
    FailedPrecondition = STG_FAILED_PRECONDITION,
    /// Ended by abort.
    Aborted = STG_ABORTED,
    /// A value out of range.
    OutOfRange = STG_OUT_OF_RANGE,
    /// The other side doesn't have it.
    Unimplemented = STG_UNIMPLEMENTED,
    /// A fault of the program, a panic among them.
    Internal = STG_INTERNAL,
    /// Not now.
    Unavailable = STG_UNAVAILABLE,
    /// A truncated or damaged file.
    DataLoss = STG_DATA_LOSS,
    /// Not authenticated.
    Unauthenticated = STG_UNAUTHENTICATED,
}

/// An error with its place and its causes.
pub struct Error(Box<Inner>);

struct Inner {
    code: Code,
    flags: u32,
    replica: i32,
    rank: i32,
    device: sys::stg_device,
    message: String,
    cause: Option<Error>,
    /// What this one stands for on its way through C: then `source()` of the one above is the object itself.
    foreign: Option<Box<dyn StdError + Send + Sync>>,
}

const NO_DEVICE: sys::stg_device = sys::stg_device { kind: sys::STG_DEVICE_NONE, index: -1 };

impl Error {
    /// An error to give to the other side, or to return from a model or a callback.
    pub fn new(code: Code, message: impl Into<String>) -> Error {
        let (flags, cause, foreign) = (0, None, None);
        Error(Box::new(Inner { code, flags, replica: -1, rank: -1, device: NO_DEVICE, message: message.into(), cause, foreign }))
    }

    pub(crate) fn invalid(message: impl Into<String>) -> Error {
        Error::new(Code::InvalidArgument, message)
    }

    /// The same with a cause, which may be of any type.
    ///
    /// ```
    /// use std::error::Error as _;
    /// use stratagem::{Code, Error};
    /// let io = std::io::Error::other("the disk is gone");
    /// let error = Error::new(Code::Unavailable, "no batch").with_source(io);
    /// assert!(error.source().unwrap().is::<std::io::Error>());
    /// ```
    pub fn with_source(mut self, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Error {
        self.0.cause = Some(match source.into().downcast::<Error>() {
            Ok(error) => *error,
            Err(foreign) => {
                let mut stand_in = Error::new(Code::Unknown, foreign.to_string());
                stand_in.0.foreign = Some(foreign);
                stand_in
            }
        });
        self
    }

    /// What kind of error it is.
    pub fn code(&self) -> Code {
        self.0.code
    }

    /// What was wrong, where, and what would be right; without the causes, which `source()` has.
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// The replica on which it happened.
    pub fn replica(&self) -> Option<usize> {
        usize::try_from(self.0.replica).ok()
    }

    /// The process on which it happened.
    pub fn rank(&self) -> Option<usize> {
        usize::try_from(self.0.rank).ok()
    }

    /// The device on which it happened.
    pub fn device(&self) -> Option<Device> {
        (self.0.device.kind != sys::STG_DEVICE_NONE).then(|| Device::from_abi(self.0.device))
    }

    /// The same call may succeed later.
    pub fn is_retryable(&self) -> bool {
        self.0.flags & sys::STG_ERROR_RETRYABLE != 0
    }

    /// Only abort and drop are legal now.
    pub fn is_draining(&self) -> bool {
        self.0.flags & sys::STG_ERROR_INSTANCE_DRAINING != 0
    }

    /// The message, and those of all causes.
    pub fn chain(&self) -> String {
        let mut text = self.to_string();
        let mut next = self.source();
        while let Some(cause) = next {
            text += &format!(": {cause}");
            next = cause.source();
        }
        text
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.0.code, self.chain())
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        let cause = self.0.cause.as_ref()?;
        match &cause.0.foreign {
            Some(foreign) => Some(foreign.as_ref()),
            None => Some(cause),
        }
    }
}

// ---- through C

/// An error of ours on its way through C.
#[repr(C)]
struct Made {
    raw: sys::stg_error,
    error: Option<Error>,
}

unsafe extern "C" fn release_made(error: *mut sys::stg_error) {
    unsafe {
        if let Some(release) = (*error).cause.as_ref().and_then(|cause| cause.release) {
            release((*error).cause);
        }
        contain(|| drop(Box::from_raw(error.cast::<Made>())));
    }
}

impl Error {
    /// Owned by the receiver.
    pub(crate) fn into_raw(mut self) -> *mut sys::stg_error {
        let cause = self.0.cause.take().map_or(std::ptr::null_mut(), Error::into_raw);
        let Inner { flags, replica, rank, device, ref message, .. } = *self.0;
        let message = to_text(message); // in the box, which doesn't move
        let (code, release, owner) = (self.0.code as u32, Some(release_made as _), std::ptr::null_mut());
        let raw = sys::stg_error { code, flags, replica, rank, device, message, cause, release, owner };
        Box::into_raw(Box::new(Made { raw, error: Some(self) })).cast()
    }

    /// Takes and releases what the other side gave.
    ///
    /// # Safety
    /// An error that the caller owns.
    #[cold]
    pub(crate) unsafe fn from_raw(raw: *mut sys::stg_error) -> Error {
        unsafe {
            let error = Error::read(raw);
            if let Some(release) = (*raw).release {
                release(raw);
            }
            error
        }
    }

    /// The Rust form; of our own the object itself, which leaves a shell behind.
    unsafe fn read(raw: *mut sys::stg_error) -> Error {
        unsafe {
            let from = &*raw;
            let ours = from.release.is_some_and(|release| std::ptr::fn_addr_eq(release, release_made as unsafe extern "C" fn(_)));
            let taken = if ours { (*raw.cast::<Made>()).error.take() } else { None };
            let mut error = taken.unwrap_or_else(|| {
                let mut error = Error::new(Code::from_abi(from.code), text(from.message));
                (error.0.flags, error.0.replica, error.0.rank, error.0.device) = (from.flags, from.replica, from.rank, from.device);
                error
            });
            if !from.cause.is_null() {
                error.0.cause = Some(Error::read(from.cause));
            }
            error
        }
    }

    /// A copy of what is only lent.
    ///
    /// # Safety
    /// A valid error, or null.
    pub(crate) unsafe fn copy_of(raw: *const sys::stg_error) -> Option<Error> {
        unsafe {
            let from = raw.as_ref()?;
            let mut error = Error::new(Code::from_abi(from.code), text(from.message));
            (error.0.flags, error.0.replica, error.0.rank, error.0.device) = (from.flags, from.replica, from.rank, from.device);
            error.0.cause = Error::copy_of(from.cause);
            Some(error)
        }
    }
}

/// Null is success.
///
/// # Safety
/// What a function of the ABI returned.
#[inline]
pub(crate) unsafe fn check(raw: *mut sys::stg_error) -> Result<()> {
    if raw.is_null() { Ok(()) } else { Err(unsafe { Error::from_raw(raw) }) }
}

/// Runs code of the user's that C called: an error or a panic becomes an error of the ABI, and nothing unwinds. `what` names it.
pub(crate) fn guard(what: &str, body: impl FnOnce() -> Result<()>) -> *mut sys::stg_error {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => std::ptr::null_mut(),
        Ok(Err(error)) => error.into_raw(),
        Err(panic) => Error::new(Code::Internal, format!("{what} panicked: {}", panic_text(panic))).into_raw(),
    }
}

/// The same where C takes no error: a panic goes no further.
pub(crate) fn contain(body: impl FnOnce()) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(body)) {
        panic_text(panic);
    }
}

fn panic_text(panic: Box<dyn Any + Send>) -> String {
    match panic.downcast::<String>() {
        Ok(text) => *text,
        Err(panic) => match panic.downcast::<&'static str>() {
            Ok(text) => (*text).to_owned(),
            Err(panic) => {
                std::mem::forget(panic); // its drop may panic again
                "with a value that is no text".to_owned()
            }
        },
    }
}
