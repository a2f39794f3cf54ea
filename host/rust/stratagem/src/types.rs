// SPDX-License-Identifier: Apache-2.0
//! Devices, types of elements, and text over the border.
use std::fmt;
use stratagem_sys as sys;

/// A device. `Device::cpu(1)` is a logical one: a replica of its own on the same CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Device {
    kind: u32,
    index: i32,
}

impl Device {
    /// A CPU, logical ones by their index.
    pub const fn cpu(index: i32) -> Device {
        Device { kind: sys::STG_DEVICE_CPU, index }
    }

    /// A CUDA device.
    pub const fn cuda(index: i32) -> Device {
        Device { kind: sys::STG_DEVICE_CUDA, index }
    }

    /// Its index among those of its kind.
    pub const fn index(self) -> i32 {
        self.index
    }

    /// Whether its memory is the host's.
    pub const fn is_host(self) -> bool {
        matches!(self.kind, sys::STG_DEVICE_CPU | sys::STG_DEVICE_CUDA_HOST)
    }

    #[inline]
    pub(crate) const fn from_abi(device: sys::stg_device) -> Device {
        Device { kind: device.kind, index: device.index }
    }

    #[inline]
    pub(crate) const fn to_abi(self) -> sys::stg_device {
        sys::stg_device { kind: self.kind, index: self.index }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            sys::STG_DEVICE_CPU => write!(f, "cpu:{}", self.index),
            sys::STG_DEVICE_CUDA => write!(f, "cuda:{}", self.index),
            kind => write!(f, "device kind {kind}, {}", self.index),
        }
    }
}

/// The type of a tensor's elements: DLPack's code and the width in bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DType {
    /// One of DLPack's codes.
    pub code: u8,
    /// The width of an element.
    pub bits: u8,
}

#[allow(missing_docs)]
impl DType {
    pub const BOOL: DType = DType::of(sys::STG_DTYPE_BOOL, 8);
    pub const U8: DType = DType::of(sys::STG_DTYPE_UINT, 8);
    pub const U16: DType = DType::of(sys::STG_DTYPE_UINT, 16);
    pub const U32: DType = DType::of(sys::STG_DTYPE_UINT, 32);
    pub const U64: DType = DType::of(sys::STG_DTYPE_UINT, 64);
    pub const I8: DType = DType::of(sys::STG_DTYPE_INT, 8);
    pub const I16: DType = DType::of(sys::STG_DTYPE_INT, 16);
    pub const I32: DType = DType::of(sys::STG_DTYPE_INT, 32);
    pub const I64: DType = DType::of(sys::STG_DTYPE_INT, 64);
    pub const F16: DType = DType::of(sys::STG_DTYPE_FLOAT, 16);
    pub const F32: DType = DType::of(sys::STG_DTYPE_FLOAT, 32);
    pub const F64: DType = DType::of(sys::STG_DTYPE_FLOAT, 64);
    pub const BF16: DType = DType::of(sys::STG_DTYPE_BFLOAT, 16);

    const fn of(code: u32, bits: u8) -> DType {
        DType { code: code as u8, bits }
    }

    /// None for {0, 0, 0}, which means none in the ABI.
    #[inline]
    pub(crate) fn from_abi(dtype: sys::stg_dtype) -> Option<DType> {
        (dtype.bits != 0).then_some(DType { code: dtype.code, bits: dtype.bits })
    }

    #[inline]
    pub(crate) const fn to_abi(self) -> sys::stg_dtype {
        sys::stg_dtype { code: self.code, bits: self.bits, lanes: 1 }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.code as u32 {
            sys::STG_DTYPE_BOOL => return f.write_str("bool"),
            sys::STG_DTYPE_INT => "int",
            sys::STG_DTYPE_UINT => "uint",
            sys::STG_DTYPE_FLOAT => "float",
            sys::STG_DTYPE_BFLOAT => "bfloat",
            sys::STG_DTYPE_COMPLEX => "complex",
            code => return write!(f, "dtype {code} of {} bits", self.bits),
        };
        write!(f, "{kind}{}", self.bits)
    }
}

#[inline]
pub(crate) fn to_text(text: &str) -> sys::stg_string {
    sys::stg_string { data: text.as_ptr().cast(), size_bytes: text.len() as u64 }
}

/// # Safety
/// A string that is valid for 'a. What is no UTF-8 is read as nothing but its valid beginning.
pub(crate) unsafe fn borrow_text<'a>(text: sys::stg_string) -> &'a str {
    let bytes = unsafe { borrow_slice(text.data.cast::<u8>(), text.size_bytes) };
    match std::str::from_utf8(bytes) {
        Ok(text) => text,
        Err(error) => std::str::from_utf8(&bytes[..error.valid_up_to()]).unwrap_or_default(),
    }
}

/// # Safety
/// A valid string.
pub(crate) unsafe fn text(text: sys::stg_string) -> String {
    String::from_utf8_lossy(unsafe { borrow_slice(text.data.cast::<u8>(), text.size_bytes) }).into_owned()
}

/// A null pointer is an empty slice.
///
/// # Safety
/// `count` elements, valid for 'a.
#[inline]
pub(crate) unsafe fn borrow_slice<'a, T>(data: *const T, count: u64) -> &'a [T] {
    if data.is_null() || count == 0 { &[] } else { unsafe { std::slice::from_raw_parts(data, count as usize) } }
}

/// Of a growing struct: zeros, with its size set.
macro_rules! sized {
    ($type:ident { $($field:ident: $value:expr),* $(,)? }) => {{
        let mut made: stratagem_sys::$type = unsafe { ::core::mem::zeroed() };
        made.struct_size = ::core::mem::size_of::<stratagem_sys::$type>() as u64;
        $(made.$field = $value;)*
        made
    }};
}
pub(crate) use sized;
