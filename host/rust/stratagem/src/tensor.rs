// SPDX-License-Identifier: Apache-2.0
//! Tensors: DLPack 1.x, owned or lent, their memory read as slices without a copy.
use crate::error::{Code, Error, Result};
use crate::types::{DType, Device, borrow_slice};
use std::ffi::c_void;
use std::ops::Deref;
use std::ptr::NonNull;
use stratagem_sys as sys;

/// A Rust type that a tensor's elements can be read as.
pub trait Element: Copy + Send + Sync + 'static + sealed::Sealed {
    /// What such elements are called.
    const DTYPE: DType;
}
mod sealed {
    pub trait Sealed {}
}
macro_rules! elements {
    ($($type:ty: $dtype:ident),*) => { $(
        impl sealed::Sealed for $type {}
        impl Element for $type { const DTYPE: DType = DType::$dtype; }
    )* };
}
elements!(u8: U8, u16: U16, u32: U32, u64: U64, i8: I8, i16: I16, i32: I32, i64: I64, f32: F32, f64: F64);

/// A tensor that somebody else owns, lent for as long as the reference lives.
#[repr(transparent)]
pub struct TensorView(sys::stg_tensor);

/// A tensor that is ours: its deleter runs when it is dropped.
///
/// ```
/// use stratagem::Tensor;
/// let tensor = Tensor::from_vec(vec![1f32, 2.0, 3.0, 4.0, 5.0, 6.0], &[2, 3])?;
/// assert_eq!(tensor.as_slice::<f32>()?[4], 5.0); // the memory itself
/// let wrong = tensor.as_slice::<i64>().unwrap_err();
/// assert_eq!(wrong.message(), "the tensor is float32 (2, 3), not int64");
/// # Ok::<(), stratagem::Error>(())
/// ```
#[repr(transparent)] // with its niche: an Option of it is what C takes for a pointer that may be null
pub struct Tensor(NonNull<sys::stg_tensor>);

// DLPack lets any thread call a deleter, and what is lent here is only read.
unsafe impl Send for Tensor {}
unsafe impl Sync for Tensor {}
unsafe impl Send for TensorView {}
unsafe impl Sync for TensorView {}

/// What a tensor made here keeps: the struct first, so that a pointer to it is one to the whole.
#[repr(C)]
struct Managed<O> {
    tensor: sys::stg_tensor,
    shape: Box<[i64]>,
    strides: Box<[i64]>,
    owner: O,
}

unsafe extern "C" fn delete<O>(tensor: *mut sys::stg_tensor) {
    crate::error::contain(|| drop(unsafe { Box::from_raw(tensor.cast::<Managed<O>>()) }));
}

fn row_major(shape: &[i64]) -> Box<[i64]> {
    let mut strides = vec![1; shape.len()];
    for dim in (1..shape.len()).rev() {
        strides[dim - 1] = strides[dim] * shape[dim].max(1);
    }
    strides.into()
}

fn shape_text(shape: &[i64]) -> String {
    let sizes: Vec<String> = shape.iter().map(i64::to_string).collect();
    format!("({})", sizes.join(", "))
}

impl Tensor {
    /// Takes the elements, row by row, without a copy.
    pub fn from_vec<T: Element>(mut elements: Vec<T>, shape: &[usize]) -> Result<Tensor> {
        let numel = shape.iter().try_fold(1usize, |product, &size| product.checked_mul(size));
        if numel != Some(elements.len()) {
            let shape: Vec<i64> = shape.iter().map(|&size| size as i64).collect();
            return Err(Error::invalid(format!("{} elements don't make a tensor of {}", elements.len(), shape_text(&shape))));
        }
        let shape: Box<[i64]> = shape.iter().map(|&size| size as i64).collect();
        let data = elements.as_mut_ptr().cast::<c_void>();
        let strides = row_major(&shape);
        Ok(Tensor::manage(data, T::DTYPE, shape, strides, elements))
    }

    /// A 0-dim tensor.
    pub fn scalar<T: Element>(element: T) -> Tensor {
        let mut owner = Box::new(element);
        let data = (&raw mut *owner).cast();
        Tensor::manage(data, T::DTYPE, Box::default(), Box::default(), owner)
    }

    fn manage<O>(data: *mut c_void, dtype: DType, shape: Box<[i64]>, strides: Box<[i64]>, owner: O) -> Tensor {
        let mut tensor: sys::stg_tensor = unsafe { std::mem::zeroed() };
        (tensor.dlpack_major, tensor.dlpack_minor) = (sys::STG_DLPACK_MAJOR, sys::STG_DLPACK_MINOR);
        tensor.deleter = Some(delete::<O>);
        tensor.view.data = data;
        tensor.view.device = Device::cpu(0).to_abi();
        tensor.view.num_dims = shape.len() as i32;
        tensor.view.dtype = dtype.to_abi();
        let managed = Box::leak(Box::new(Managed { tensor, shape, strides, owner }));
        managed.tensor.view.shape = managed.shape.as_mut_ptr();
        managed.tensor.view.strides = managed.strides.as_mut_ptr();
        Tensor(NonNull::from(managed).cast())
    }

    /// A handle with a shape of its own over memory that is another's.
    ///
    /// # Safety
    /// The memory outlives the tensor.
    pub(crate) unsafe fn over(other: &sys::stg_tensor) -> Tensor {
        let view = &other.view;
        let shape: Box<[i64]> = unsafe { borrow_slice(view.shape, view.num_dims as u64) }.into();
        let strides =
            if view.strides.is_null() { row_major(&shape) } else { unsafe { borrow_slice(view.strides, view.num_dims as u64) }.into() };
        let dtype = DType { code: view.dtype.code, bits: view.dtype.bits };
        let data = unsafe { view.data.cast::<u8>().add(view.byte_offset as usize).cast() };
        Tensor::manage(data, dtype, shape, strides, ())
    }

    /// Takes a `DLManagedTensorVersioned *` of another library, which must not be used by it any more. Refused, and given back to its
    /// deleter, where its major isn't 1 or its shape is none.
    ///
    /// # Safety
    /// A pointer to a valid one, owned by the caller, whose memory and deleter may be used on any thread.
    pub unsafe fn from_dlpack(tensor: *mut c_void) -> Result<Tensor> {
        let Some(pointer) = NonNull::new(tensor.cast::<sys::stg_tensor>()) else {
            return Err(Error::invalid("the DLPack tensor is null"));
        };
        let tensor = Tensor(pointer);
        let raw = unsafe { pointer.as_ref() };
        if raw.dlpack_major != sys::STG_DLPACK_MAJOR {
            return Err(Error::invalid(format!("DLPack {}.{}; this is for 1.x", raw.dlpack_major, raw.dlpack_minor)));
        }
        let dims = raw.view.num_dims;
        if dims < 0 || (dims > 0 && (raw.view.shape.is_null() || tensor.shape().iter().any(|&size| size < 0))) {
            return Err(Error::invalid(format!("a DLPack tensor with {dims} dimensions has no valid shape")));
        }
        Ok(tensor)
    }

    /// Gives it away as a `DLManagedTensorVersioned *`, whose deleter the receiver calls.
    pub fn into_dlpack(self) -> *mut c_void {
        self.into_raw().cast()
    }

    /// # Safety
    /// A valid tensor that the caller owns.
    pub(crate) unsafe fn from_raw(tensor: *mut sys::stg_tensor) -> Option<Tensor> {
        NonNull::new(tensor).map(Tensor)
    }

    pub(crate) fn into_raw(self) -> *mut sys::stg_tensor {
        std::mem::ManuallyDrop::new(self).0.as_ptr()
    }

    pub(crate) fn as_raw(&self) -> *mut sys::stg_tensor {
        self.0.as_ptr()
    }

    /// The elements, to be written. Refused where [`TensorView::as_slice`] is, and for one that is read-only.
    pub fn as_mut_slice<T: Element>(&mut self) -> Result<&mut [T]> {
        if self.is_read_only() {
            return Err(Error::new(Code::PermissionDenied, format!("the tensor {} is read-only", shape_text(self.shape()))));
        }
        let slice = self.as_slice::<T>()?;
        Ok(unsafe { std::slice::from_raw_parts_mut(slice.as_ptr().cast_mut(), slice.len()) })
    }
}

impl Drop for Tensor {
    fn drop(&mut self) {
        unsafe {
            if let Some(deleter) = self.0.as_ref().deleter {
                deleter(self.0.as_ptr());
            }
        }
    }
}

impl Deref for Tensor {
    type Target = TensorView;
    fn deref(&self) -> &TensorView {
        unsafe { self.0.cast::<TensorView>().as_ref() }
    }
}

impl TensorView {
    /// # Safety
    /// Valid for 'a.
    pub(crate) unsafe fn borrow<'a>(tensor: *const sys::stg_tensor) -> &'a TensorView {
        unsafe { &*tensor.cast() }
    }

    /// Its sizes; of a 0-dim tensor none.
    pub fn shape(&self) -> &[i64] {
        unsafe { borrow_slice(self.0.view.shape, self.0.view.num_dims.max(0) as u64) }
    }

    /// How many elements it has.
    pub fn numel(&self) -> usize {
        self.shape().iter().product::<i64>() as usize
    }

    /// The type of its elements.
    pub fn dtype(&self) -> DType {
        DType { code: self.0.view.dtype.code, bits: self.0.view.dtype.bits }
    }

    /// Where its memory is. On every logical CPU device that is `cpu:0`.
    pub fn device(&self) -> Device {
        Device::from_abi(self.0.view.device)
    }

    /// Whether it must not be written.
    pub fn is_read_only(&self) -> bool {
        self.0.flags & sys::STG_TENSOR_READ_ONLY as u64 != 0
    }

    fn strides(&self) -> Box<[i64]> {
        let view = &self.0.view;
        if view.strides.is_null() {
            return row_major(self.shape());
        }
        unsafe { borrow_slice(view.strides, view.num_dims.max(0) as u64) }.into()
    }

    fn is_contiguous(&self) -> bool {
        if self.0.view.strides.is_null() {
            return true;
        }
        let strides = unsafe { borrow_slice(self.0.view.strides, self.0.view.num_dims.max(0) as u64) };
        let mut expected = 1;
        let sizes = self.shape().iter().zip(strides).rev();
        self.numel() == 0
            || sizes.into_iter().all(|(&size, &stride)| {
                let fits = size == 1 || stride == expected;
                expected *= size;
                fits
            })
    }

    /// Its first element, if it can be read as T here.
    fn first<T: Element>(&self) -> Result<*const T> {
        let view = &self.0.view;
        if self.dtype() != T::DTYPE || view.dtype.lanes != 1 {
            return Err(Error::invalid(format!("the tensor is {} {}, not {}", self.dtype(), shape_text(self.shape()), T::DTYPE)));
        }
        if !self.device().is_host() {
            return Err(Error::new(
                Code::FailedPrecondition,
                format!("the tensor is on {}; Strategy::to_host brings it here", self.device()),
            ));
        }
        let first = unsafe { view.data.cast::<u8>().add(view.byte_offset as usize) }.cast::<T>();
        if self.numel() > 0 && (first.is_null() || !first.is_aligned()) {
            return Err(Error::invalid(format!("the memory of the tensor, {first:?}, is not aligned for {}", T::DTYPE)));
        }
        Ok(first)
    }

    /// The elements in their memory, row by row. Refused, with the reason: another type of elements, memory of a device, rows that
    /// don't lie side by side ([`TensorView::to_vec`] reads those, too).
    pub fn as_slice<T: Element>(&self) -> Result<&[T]> {
        let first = self.first::<T>()?;
        if !self.is_contiguous() {
            return Err(Error::invalid(format!(
                "the tensor {} has the strides {}, so its rows are no slice; to_vec copies them",
                shape_text(self.shape()),
                shape_text(&self.strides())
            )));
        }
        Ok(unsafe { borrow_slice(first, self.numel() as u64) })
    }

    /// A copy of the elements, row by row, whatever the strides.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        if self.is_contiguous() {
            return self.as_slice().map(<[T]>::to_vec);
        }
        let first = self.first::<T>()?;
        let (shape, strides) = (self.shape(), self.strides());
        let mut elements = Vec::with_capacity(self.numel());
        for index in 0..self.numel() as i64 {
            let (mut rest, mut offset) = (index, 0);
            for dim in (0..shape.len()).rev() {
                offset += rest % shape[dim] * strides[dim];
                rest /= shape[dim];
            }
            elements.push(unsafe { *first.offset(offset as isize) });
        }
        Ok(elements)
    }

    /// The one element of a tensor that has one, as a double: a loss, a metric.
    pub fn item(&self) -> Result<f64> {
        if self.numel() != 1 {
            return Err(Error::invalid(format!("the tensor {} has {} elements, not one", shape_text(self.shape()), self.numel())));
        }
        match self.dtype() {
            DType::F32 => Ok(self.to_vec::<f32>()?[0].into()),
            DType::F64 => Ok(self.to_vec::<f64>()?[0]),
            DType::I64 => Ok(self.to_vec::<i64>()?[0] as f64),
            DType::I32 => Ok(self.to_vec::<i32>()?[0].into()),
            DType::U8 => Ok(self.to_vec::<u8>()?[0].into()),
            dtype => Err(Error::new(Code::Unimplemented, format!("item() of {dtype}; to_vec reads more types"))),
        }
    }
}

impl std::fmt::Debug for TensorView {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tensor({} {} on {})", self.dtype(), shape_text(self.shape()), self.device())
    }
}

impl std::fmt::Debug for Tensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        (**self).fmt(f)
    }
}
