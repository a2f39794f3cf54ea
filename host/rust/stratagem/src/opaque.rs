// SPDX-License-Identifier: Apache-2.0
//! Objects of the host's that pass through a strategy unread: the same object comes back.
use crate::error::contain;
use crate::types::{borrow_text, to_text};
use std::any::Any;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering, fence};
use stratagem_sys as sys;

/// A counted reference to an object. Its clones are the same object.
pub struct Opaque(NonNull<sys::stg_opaque>);

// The references are counted atomically, and what is behind them is Send and Sync (or another party's, whose functions are [any]).
unsafe impl Send for Opaque {}
unsafe impl Sync for Opaque {}

#[repr(C)]
struct Counted {
    raw: sys::stg_opaque,
    count: AtomicUsize,
    object: Box<dyn Any + Send + Sync>,
}

unsafe extern "C" fn retain(opaque: *mut sys::stg_opaque) {
    unsafe { (*opaque.cast::<Counted>()).count.fetch_add(1, Ordering::Relaxed) };
}

unsafe extern "C" fn release(opaque: *mut sys::stg_opaque) {
    unsafe {
        if (*opaque.cast::<Counted>()).count.fetch_sub(1, Ordering::Release) == 1 {
            fence(Ordering::Acquire);
            contain(|| drop(Box::from_raw(opaque.cast::<Counted>())));
        }
    }
}

impl Opaque {
    /// Wraps an object.
    pub fn new<T: Any + Send + Sync>(object: T) -> Opaque {
        let mut raw: sys::stg_opaque = unsafe { std::mem::zeroed() };
        raw.struct_size = size_of::<sys::stg_opaque>() as u64;
        raw.type_name = to_text(std::any::type_name::<T>());
        raw.retain = Some(retain);
        raw.release = Some(release);
        let counted = Box::new(Counted { raw, count: AtomicUsize::new(1), object: Box::new(object) });
        Opaque(NonNull::from(Box::leak(counted)).cast())
    }

    /// The object, if it is one of Rust's and of this type.
    pub fn downcast_ref<T: Any>(&self) -> Option<&T> {
        let ours = release as unsafe extern "C" fn(*mut sys::stg_opaque);
        unsafe {
            let is_ours = self.0.as_ref().release.is_some_and(|function| std::ptr::fn_addr_eq(function, ours));
            if is_ours { self.0.cast::<Counted>().as_ref().object.downcast_ref() } else { None }
        }
    }

    /// What its maker calls its type.
    pub fn type_name(&self) -> &str {
        unsafe { borrow_text(self.0.as_ref().type_name) }
    }

    /// # Safety
    /// A valid pointer and one reference, the caller's.
    pub(crate) unsafe fn from_raw(opaque: *mut sys::stg_opaque) -> Option<Opaque> {
        NonNull::new(opaque).map(Opaque)
    }

    /// # Safety
    /// A valid pointer; the reference is one more.
    pub(crate) unsafe fn share(opaque: *mut sys::stg_opaque) -> Option<Opaque> {
        let opaque = NonNull::new(opaque)?;
        unsafe {
            if let Some(retain) = opaque.as_ref().retain {
                retain(opaque.as_ptr());
            }
        }
        Some(Opaque(opaque))
    }

    pub(crate) fn into_raw(self) -> *mut sys::stg_opaque {
        std::mem::ManuallyDrop::new(self).0.as_ptr()
    }
}

impl Clone for Opaque {
    fn clone(&self) -> Opaque {
        unsafe { Opaque::share(self.0.as_ptr()) }.expect("never null")
    }
}

impl Drop for Opaque {
    fn drop(&mut self) {
        unsafe {
            if let Some(release) = self.0.as_ref().release {
                release(self.0.as_ptr());
            }
        }
    }
}

impl std::fmt::Debug for Opaque {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Opaque({})", self.type_name())
    }
}
