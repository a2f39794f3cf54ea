// SPDX-License-Identifier: Apache-2.0
//! Tensors: checked, copied, made, and read as numbers.
use crate::abi::*;
use crate::tree::slice;
use std::ptr;

/// Ours, released by its deleter.
pub struct Tensor(*mut stg_tensor);

impl Drop for Tensor {
    fn drop(&mut self) {
        unsafe {
            if let Some(deleter) = self.0.as_ref().and_then(|tensor| tensor.deleter) {
                deleter(self.0);
            }
        }
    }
}

impl Tensor {
    /// # Safety
    /// A valid tensor that is ours now.
    pub unsafe fn take(tensor: *mut stg_tensor) -> Tensor {
        Tensor(tensor)
    }

    pub fn into_raw(self) -> *mut stg_tensor {
        std::mem::ManuallyDrop::new(self).0
    }

    pub fn view(&self) -> &stg_tensor_view {
        unsafe { &(*self.0).view }
    }
}

#[repr(C)]
struct Made {
    raw: stg_tensor,
    shape: Vec<i64>,
    strides: Vec<i64>,
    memory: Vec<u64>, // aligned for any element
    keeps: Option<Box<dyn Send>>,
}

unsafe extern "C" fn delete(tensor: *mut stg_tensor) {
    drop(unsafe { Box::from_raw(tensor.cast::<Made>()) });
}

fn make(like: &stg_tensor_view, shape: Vec<i64>, strides: Vec<i64>, memory: Vec<u64>, keeps: Option<Box<dyn Send>>) -> Tensor {
    let mut raw: stg_tensor = unsafe { std::mem::zeroed() };
    (raw.dlpack_major, raw.dlpack_minor) = (STG_DLPACK_MAJOR, STG_DLPACK_MINOR);
    raw.deleter = Some(delete);
    raw.view = *like;
    let made = Box::leak(Box::new(Made { raw, shape, strides, memory, keeps }));
    (made.raw.view.shape, made.raw.view.strides) = (made.shape.as_mut_ptr(), made.strides.as_mut_ptr());
    if made.keeps.is_none() {
        (made.raw.view.data, made.raw.view.byte_offset) = (made.memory.as_mut_ptr().cast(), 0);
    }
    Tensor(&raw mut made.raw)
}

/// A row-major copy.
pub fn copy(from: &stg_tensor_view) -> Tensor {
    let size_bytes = element_size_bytes(from);
    let count = numel(from);
    let mut memory = vec![0u64; (count * size_bytes).div_ceil(8)];
    let to = memory.as_mut_ptr().cast::<u8>();
    let mut at = 0;
    for_each_element(from, |element| {
        unsafe { ptr::copy_nonoverlapping(element, to.add(at * size_bytes), size_bytes) };
        at += 1;
    });
    let shape = shape(from).to_vec();
    let strides = row_major(&shape);
    make(from, shape, strides, memory, None)
}

/// A handle over the same memory, which `keeps` keeps alive.
pub fn view(of: &stg_tensor_view, keeps: Box<dyn Send>) -> Tensor {
    make(of, shape(of).to_vec(), strides(of), Vec::new(), Some(keeps))
}

/// What is wrong with it.
pub fn fault(tensor: *const stg_tensor) -> Option<&'static str> {
    let Some(tensor) = (unsafe { tensor.as_ref() }) else { return Some("a null tensor") };
    let view = &tensor.view;
    let of = |fault: bool, text| fault.then_some(text);
    of(tensor.dlpack_major != STG_DLPACK_MAJOR, "a tensor of another major of DLPack")
        .or_else(|| of(view.num_dims < 0, "a tensor with a negative number of dimensions"))
        .or_else(|| of(view.num_dims > 0 && view.shape.is_null(), "a tensor without a shape"))
        .or_else(|| of(shape(view).iter().any(|&size| size < 0), "a tensor with a negative size"))
        .or_else(|| of(view.dtype.lanes != 1, "a tensor whose elements have lanes"))
        .or_else(|| of(!is_known(view.dtype), "a tensor of an unknown dtype"))
        .or_else(|| of(view.device.kind != STG_DEVICE_CPU, "a tensor that is not on the CPU"))
        .or_else(|| of(view.byte_offset >= 1 << 62, "a tensor whose byte_offset overflows"))
        .or_else(|| of(extent_bytes(view).is_none(), "a tensor whose sizes or strides are negative or overflow"))
        .or_else(|| of(numel(view) > 0 && view.data.is_null(), "a tensor with elements but no memory"))
        .or_else(|| of(!is_aligned(view), "a tensor whose memory is not aligned for its elements"))
}

fn is_known(dtype: stg_dtype) -> bool {
    let codes = [STG_DTYPE_INT, STG_DTYPE_UINT, STG_DTYPE_FLOAT, STG_DTYPE_BFLOAT, STG_DTYPE_COMPLEX, STG_DTYPE_BOOL];
    codes.contains(&dtype.code.into()) && matches!(dtype.bits, 8 | 16 | 32 | 64 | 128)
}

fn is_aligned(view: &stg_tensor_view) -> bool {
    let alignment = element_size_bytes(view).min(8);
    numel(view) == 0 || (view.data as usize).wrapping_add(view.byte_offset as usize) % alignment == 0
}

/// How far its elements reach; none if that is no number.
fn extent_bytes(view: &stg_tensor_view) -> Option<i64> {
    shape(view).iter().try_fold(1i64, |product, &size| product.checked_mul(size.max(1)))?.checked_mul(16)?;
    let mut last = 0i64;
    for (&size, &stride) in shape(view).iter().zip(&strides(view)) {
        if size > 1 {
            last = last.checked_add((size - 1).checked_mul(stride).filter(|_| stride >= 0)?)?;
        }
    }
    last.checked_add(1)?.checked_mul(element_size_bytes(view) as i64)
}

pub fn shape(view: &stg_tensor_view) -> &[i64] {
    unsafe { slice(view.shape, view.num_dims.max(0) as u64) }
}

fn strides(view: &stg_tensor_view) -> Vec<i64> {
    if view.strides.is_null() { row_major(shape(view)) } else { unsafe { slice(view.strides, view.num_dims.max(0) as u64) }.to_vec() }
}

fn row_major(shape: &[i64]) -> Vec<i64> {
    let mut strides = vec![1i64; shape.len()];
    for dim in (1..shape.len()).rev() {
        strides[dim - 1] = strides[dim].saturating_mul(shape[dim].max(1));
    }
    strides
}

pub fn numel(view: &stg_tensor_view) -> usize {
    shape(view).iter().product::<i64>() as usize
}

fn element_size_bytes(view: &stg_tensor_view) -> usize {
    view.dtype.bits as usize / 8
}

pub fn same_kind(a: &stg_tensor_view, b: &stg_tensor_view) -> bool {
    (a.dtype.code, a.dtype.bits, shape(a)) == (b.dtype.code, b.dtype.bits, shape(b))
}

pub fn text(view: &stg_tensor_view) -> String {
    format!("dtype {}/{} {:?}", view.dtype.code, view.dtype.bits, shape(view))
}

/// Row by row, whatever the strides.
fn for_each_element(view: &stg_tensor_view, mut visit: impl FnMut(*const u8)) {
    let (shape, strides) = (shape(view), strides(view));
    let first = unsafe { view.data.cast::<u8>().add(view.byte_offset as usize) };
    for index in 0..numel(view) as i64 {
        let (mut rest, mut offset) = (index, 0);
        for dim in (0..shape.len()).rev() {
            offset += rest % shape[dim] * strides[dim];
            rest /= shape[dim];
        }
        visit(unsafe { first.offset(offset as isize * element_size_bytes(view) as isize) });
    }
}

/// float32 or float64.
pub fn is_real(view: &stg_tensor_view) -> bool {
    u32::from(view.dtype.code) == STG_DTYPE_FLOAT && matches!(view.dtype.bits, 32 | 64)
}

/// Elements of one that `is_real`, as doubles.
pub fn read(view: &stg_tensor_view) -> Vec<f64> {
    let mut elements = Vec::with_capacity(numel(view));
    let is_double = view.dtype.bits == 64;
    for_each_element(view, |element| {
        elements.push(if is_double { unsafe { *element.cast::<f64>() } } else { f64::from(unsafe { *element.cast::<f32>() }) });
    });
    elements
}

/// Each element of one that `is_real` becomes what `update` makes of its place and itself.
pub fn update(view: &stg_tensor_view, mut update: impl FnMut(usize, f64) -> f64) {
    let mut at = 0;
    let is_double = view.dtype.bits == 64;
    for_each_element(view, |element| {
        unsafe {
            if is_double {
                let element = element.cast_mut().cast::<f64>();
                *element = update(at, *element);
            } else {
                let element = element.cast_mut().cast::<f32>();
                *element = update(at, f64::from(*element)) as f32;
            }
        }
        at += 1;
    });
}

/// The elements of `from`, of the same kind, into `to`.
pub fn assign(to: &stg_tensor_view, from: &stg_tensor_view) {
    let size_bytes = element_size_bytes(from);
    let mut elements = Vec::with_capacity(numel(from));
    for_each_element(from, |element| elements.push(element));
    let mut at = 0;
    for_each_element(to, |element| {
        unsafe { ptr::copy(elements[at], element.cast_mut(), size_bytes) };
        at += 1;
    });
}
