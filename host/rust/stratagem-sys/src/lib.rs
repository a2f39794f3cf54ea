// SPDX-License-Identifier: Apache-2.0
//! The declarations of the C ABI (`abi/stratagem/*.h`) and of libstratagem (`session.h`), as bindgen reads them from the headers.
//!
//! Nothing is declared by hand: `tests/bindings.rs` generates `bindings.rs` again and wants the committed text. Sizes and offsets are
//! asserted when the crate is compiled. The comments are those of the headers.

#[allow(
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals,
    unsafe_op_in_unsafe_fn,
    clippy::all,
    rustdoc::all
)]
#[rustfmt::skip]
mod bindings;

pub use bindings::*;

/// Whether the function table that `table` points to has the function `slot`: its size reaches so far and the slot is not null. What
/// `STG_HAS` is in C; an `Option` of the function, in Rust. The pointer must be valid.
#[macro_export]
macro_rules! slot {
    ($table:expr, $slot:ident) => {{
        let table = &*$table;
        let end = &raw const table.$slot as usize + ::core::mem::size_of::<usize>() - &raw const *table as usize;
        if table.struct_size >= end as u64 { table.$slot } else { None }
    }};
}
