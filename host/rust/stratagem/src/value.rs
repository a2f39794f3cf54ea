// SPDX-License-Identifier: Apache-2.0
//! Value trees: batches, outputs, states. A [`Value`] is built and taken apart in Rust, a [`Tree`] crosses the border, a [`ValueRef`] reads
//! one where it lies.
use crate::error::{Code, Error, Result, contain};
use crate::opaque::Opaque;
use crate::tensor::{Tensor, TensorView};
use crate::types::{borrow_slice, borrow_text};
use stratagem_sys as sys;

/// A value of Rust's own.
///
/// ```
/// use stratagem::{Tensor, Tree, Value};
/// let batch: Tree = Value::dict([
///     ("inputs", Value::from(Tensor::from_vec(vec![0u8; 8], &[2, 4])?)),
///     ("targets", Value::from(Tensor::from_vec(vec![3i64, 7], &[2])?)),
///     ("fold", Value::from(5)),
/// ])
/// .into();
/// assert_eq!(batch.tensor("targets")?.as_slice::<i64>()?, [3, 7]);
/// let missing = batch.tensor("labels").unwrap_err();
/// assert_eq!(missing.message(), "there is no \"labels\"; there are inputs, targets, fold");
/// # Ok::<(), stratagem::Error>(())
/// ```
#[derive(Debug)]
#[allow(missing_docs)]
pub enum Value {
    None,
    Bool(bool),
    Int(i64),
    Double(f64),
    Text(String),
    Bytes(Vec<u8>),
    Tensor(Tensor),
    List(Vec<Value>),
    Tuple(Vec<Value>),
    Dict(Vec<(String, Value)>),
    Opaque(Opaque),
}

/// A value of a tree, where it lies.
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub enum ValueRef<'a> {
    None,
    Bool(bool),
    Int(i64),
    Double(f64),
    Text(&'a str),
    Bytes(&'a [u8]),
    Tensor(&'a TensorView),
    List(Items<'a>),
    Tuple(Items<'a>),
    Dict(Entries<'a>),
    Opaque(OpaqueRef<'a>),
}

impl Value {
    /// A dict, whose keys keep their order.
    pub fn dict<K: Into<String>>(entries: impl IntoIterator<Item = (K, Value)>) -> Value {
        Value::Dict(entries.into_iter().map(|(key, value)| (key.into(), value)).collect())
    }
}

macro_rules! conversions {
    ($($from:ty => $name:ident),*) => { $(
        impl From<$from> for Value {
            fn from(value: $from) -> Value { Value::$name(value.into()) }
        }
    )* };
}
conversions!(bool => Bool, i64 => Int, i32 => Int, f64 => Double, String => Text, &str => Text, Tensor => Tensor, Opaque => Opaque);

// ---- reading

/// The values of a list or a tuple.
#[derive(Clone, Copy)]
pub struct Items<'a>(&'a [sys::stg_value]);

/// The entries of a dict.
#[derive(Clone, Copy)]
pub struct Entries<'a>(&'a [sys::stg_entry]);

/// An object that passes through.
#[derive(Clone, Copy)]
pub struct OpaqueRef<'a>(&'a *mut sys::stg_opaque);

impl<'a> Items<'a> {
    /// How many there are.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(self) -> usize {
        self.0.len()
    }

    /// The value in a place.
    pub fn get(self, index: usize) -> Option<ValueRef<'a>> {
        self.0.get(index).map(|value| unsafe { ValueRef::read(value) })
    }

    /// All of them.
    pub fn iter(self) -> impl ExactSizeIterator<Item = ValueRef<'a>> {
        self.0.iter().map(|value| unsafe { ValueRef::read(value) })
    }
}

impl<'a> Entries<'a> {
    /// How many there are.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(self) -> usize {
        self.0.len()
    }

    /// The value of a key.
    pub fn get(self, key: &str) -> Option<ValueRef<'a>> {
        let entry = self.0.iter().find(|entry| unsafe { borrow_text(entry.key) } == key)?;
        Some(unsafe { ValueRef::read(&entry.value) })
    }

    /// All of them, in their order.
    pub fn iter(self) -> impl ExactSizeIterator<Item = (&'a str, ValueRef<'a>)> {
        self.0.iter().map(|entry| unsafe { (borrow_text(entry.key), ValueRef::read(&entry.value)) })
    }
}

impl OpaqueRef<'_> {
    /// One more reference to the object.
    pub fn share(self) -> Opaque {
        unsafe { Opaque::share(*self.0) }.expect("an opaque value is never null")
    }
}

impl std::fmt::Debug for Items<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

impl std::fmt::Debug for Entries<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

impl std::fmt::Debug for OpaqueRef<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.share().fmt(f)
    }
}

impl<'a> ValueRef<'a> {
    /// # Safety
    /// A valid value; what it points to is valid for 'a, too.
    pub(crate) unsafe fn read(value: &'a sys::stg_value) -> ValueRef<'a> {
        let (of, count) = (&value.as_, value.count as u64);
        unsafe {
            match value.type_ {
                sys::STG_BOOL => ValueRef::Bool(of.i64_ != 0),
                sys::STG_INT64 => ValueRef::Int(of.i64_),
                sys::STG_DOUBLE => ValueRef::Double(of.f64_),
                sys::STG_STRING => ValueRef::Text(borrow_text(sys::stg_string { data: of.utf8, size_bytes: count })),
                sys::STG_BYTES => ValueRef::Bytes(borrow_slice(of.bytes, count)),
                sys::STG_TENSOR => ValueRef::Tensor(TensorView::borrow(of.tensor)),
                sys::STG_LIST => ValueRef::List(Items(borrow_slice(of.items, count))),
                sys::STG_TUPLE => ValueRef::Tuple(Items(borrow_slice(of.items, count))),
                sys::STG_DICT => ValueRef::Dict(Entries(borrow_slice(of.entries, count))),
                sys::STG_OPAQUE => ValueRef::Opaque(OpaqueRef(&of.opaque)),
                _ => ValueRef::None,
            }
        }
    }

    fn kind(self) -> &'static str {
        match self {
            ValueRef::None => "none",
            ValueRef::Bool(_) => "a bool",
            ValueRef::Int(_) => "an int64",
            ValueRef::Double(_) => "a double",
            ValueRef::Text(_) => "a string",
            ValueRef::Bytes(_) => "bytes",
            ValueRef::Tensor(_) => "a tensor",
            ValueRef::List(_) => "a list",
            ValueRef::Tuple(_) => "a tuple",
            ValueRef::Dict(_) => "a dict",
            ValueRef::Opaque(_) => "an opaque object",
        }
    }

    /// The value of a key; an error that names the keys there are.
    pub fn get(self, key: &str) -> Result<ValueRef<'a>> {
        let ValueRef::Dict(entries) = self else {
            return Err(Error::invalid(format!("\"{key}\" is asked of {}, which is no dict", self.kind())));
        };
        entries.get(key).ok_or_else(|| {
            let keys: Vec<&str> = entries.iter().map(|(key, _)| key).collect();
            Error::new(Code::NotFound, format!("there is no \"{key}\"; there are {}", keys.join(", ")))
        })
    }

    /// The tensor under a key.
    pub fn tensor(self, key: &str) -> Result<&'a TensorView> {
        match self.get(key)? {
            ValueRef::Tensor(tensor) => Ok(tensor),
            other => Err(Error::invalid(format!("\"{key}\" is {}, not a tensor", other.kind()))),
        }
    }

    /// The text, of a string.
    pub fn text(self) -> Result<&'a str> {
        match self {
            ValueRef::Text(text) => Ok(text),
            other => Err(Error::invalid(format!("{} where a string is expected", other.kind()))),
        }
    }
}

// ---- trees

/// A tree that is ours: what is left in it is released when it is dropped.
///
/// A `&Tree` is lent to a call, a `Tree` moved into it (see [`Batch`]).
#[repr(transparent)]
pub struct Tree(sys::stg_tree);

// Its tensors and objects are, and its memory is released by [any].
unsafe impl Send for Tree {}
unsafe impl Sync for Tree {}

/// The memory of a tree that was built here.
#[derive(Default)]
struct Arena {
    items: Vec<Box<[sys::stg_value]>>,
    entries: Vec<Box<[sys::stg_entry]>>,
    texts: Vec<Box<[u8]>>,
}

unsafe extern "C" fn release_tree(tree: *mut sys::stg_tree) {
    unsafe {
        let taken = std::mem::replace(&mut *tree, std::mem::zeroed());
        contain(|| {
            release_leaves(&taken.root);
            drop(Box::from_raw(taken.owner.cast::<Arena>()));
        });
    }
}

unsafe fn release_leaves(value: &sys::stg_value) {
    unsafe {
        match value.type_ {
            sys::STG_TENSOR => drop(Tensor::from_raw(value.as_.tensor)),
            sys::STG_OPAQUE => drop(Opaque::from_raw(value.as_.opaque)),
            sys::STG_LIST | sys::STG_TUPLE => {
                borrow_slice(value.as_.items, value.count as u64).iter().for_each(|item| release_leaves(item));
            }
            sys::STG_DICT => {
                borrow_slice(value.as_.entries, value.count as u64).iter().for_each(|entry| release_leaves(&entry.value));
            }
            _ => {}
        }
    }
}

impl Arena {
    fn text(&mut self, bytes: Vec<u8>) -> *const u8 {
        self.texts.push(bytes.into_boxed_slice());
        self.texts[self.texts.len() - 1].as_ptr()
    }

    fn items(&mut self, type_: u32, values: Vec<Value>) -> sys::stg_value {
        let mut items: Box<[_]> = values.into_iter().map(|value| self.value(value)).collect();
        let as_ = sys::stg_value__bindgen_ty_1 { items: items.as_mut_ptr() };
        self.items.push(items);
        sys::stg_value { type_, count: self.items[self.items.len() - 1].len() as u32, as_ }
    }

    fn dict(&mut self, entries: Vec<(String, Value)>) -> sys::stg_value {
        let mut made: Box<[_]> = entries
            .into_iter()
            .map(|(key, value)| {
                let size_bytes = key.len() as u64;
                let key = sys::stg_string { data: self.text(key.into_bytes()).cast(), size_bytes };
                sys::stg_entry { key, value: self.value(value) }
            })
            .collect();
        let (count, as_) = (made.len() as u32, sys::stg_value__bindgen_ty_1 { entries: made.as_mut_ptr() });
        self.entries.push(made);
        sys::stg_value { type_: sys::STG_DICT, count, as_ }
    }

    fn value(&mut self, value: Value) -> sys::stg_value {
        use sys::stg_value__bindgen_ty_1 as As;
        let (type_, count, as_) = match value {
            Value::None => (sys::STG_NONE, 0, As { i64_: 0 }),
            Value::Bool(value) => (sys::STG_BOOL, 0, As { i64_: value.into() }),
            Value::Int(value) => (sys::STG_INT64, 0, As { i64_: value }),
            Value::Double(value) => (sys::STG_DOUBLE, 0, As { f64_: value }),
            Value::Text(text) => (sys::STG_STRING, text.len(), As { utf8: self.text(text.into_bytes()).cast() }),
            Value::Bytes(bytes) => (sys::STG_BYTES, bytes.len(), As { bytes: self.text(bytes) }),
            Value::Tensor(tensor) => (sys::STG_TENSOR, 0, As { tensor: tensor.into_raw() }),
            Value::Opaque(opaque) => (sys::STG_OPAQUE, 0, As { opaque: opaque.into_raw() }),
            Value::List(values) => return self.items(sys::STG_LIST, values),
            Value::Tuple(values) => return self.items(sys::STG_TUPLE, values),
            Value::Dict(entries) => return self.dict(entries),
        };
        sys::stg_value { type_, count: u32::try_from(count).expect("text and bytes have less than 4 GiB"), as_ }
    }
}

impl<V: Into<Value>> From<V> for Tree {
    fn from(value: V) -> Tree {
        let mut arena = Box::<Arena>::default();
        let root = arena.value(value.into());
        Tree(sys::stg_tree { root, release: Some(release_tree), owner: Box::into_raw(arena).cast() })
    }
}

impl Tree {
    /// Takes a tree of the ABI.
    ///
    /// # Safety
    /// A valid tree that the caller owns; the struct that it was in is not used any more.
    #[inline]
    pub unsafe fn from_raw(tree: sys::stg_tree) -> Tree {
        Tree(tree)
    }

    /// Empty: for a function to fill in, or taken.
    #[inline]
    pub(crate) fn empty() -> Tree {
        Tree(unsafe { std::mem::zeroed() })
    }

    #[inline]
    pub(crate) fn as_mut_raw(&mut self) -> *mut sys::stg_tree {
        &mut self.0
    }

    /// Gives it away: the receiver calls its release.
    #[inline]
    pub fn into_raw(self) -> sys::stg_tree {
        std::mem::ManuallyDrop::new(self).0
    }

    /// The whole, where it lies.
    #[inline]
    pub fn root(&self) -> ValueRef<'_> {
        unsafe { ValueRef::read(&self.0.root) }
    }

    /// The value of a key.
    pub fn get(&self, key: &str) -> Result<ValueRef<'_>> {
        self.root().get(key)
    }

    /// The tensor under a key.
    pub fn tensor(&self, key: &str) -> Result<&TensorView> {
        self.root().tensor(key)
    }

    /// Takes it apart. Tensors and objects are taken out, not copied.
    pub fn into_value(mut self) -> Value {
        unsafe { take(&mut self.0.root) }
    }
}

/// The value, whose tensors and objects are none in the tree from then on.
unsafe fn take(value: &mut sys::stg_value) -> Value {
    unsafe {
        let count = value.count as usize;
        match value.type_ {
            sys::STG_TENSOR => {
                value.type_ = sys::STG_NONE;
                Tensor::from_raw(value.as_.tensor).map_or(Value::None, Value::Tensor)
            }
            sys::STG_OPAQUE => {
                value.type_ = sys::STG_NONE;
                Opaque::from_raw(value.as_.opaque).map_or(Value::None, Value::Opaque)
            }
            sys::STG_LIST => Value::List((0..count).map(|at| take(&mut *value.as_.items.add(at))).collect()),
            sys::STG_TUPLE => Value::Tuple((0..count).map(|at| take(&mut *value.as_.items.add(at))).collect()),
            sys::STG_DICT => Value::Dict(
                (0..count)
                    .map(|at| {
                        let entry = &mut *value.as_.entries.add(at);
                        (borrow_text(entry.key).to_owned(), take(&mut entry.value))
                    })
                    .collect(),
            ),
            _ => match ValueRef::read(value) {
                ValueRef::Bool(value) => Value::Bool(value),
                ValueRef::Int(value) => Value::Int(value),
                ValueRef::Double(value) => Value::Double(value),
                ValueRef::Text(text) => Value::Text(text.to_owned()),
                ValueRef::Bytes(bytes) => Value::Bytes(bytes.to_owned()),
                _ => Value::None,
            },
        }
    }
}

impl Drop for Tree {
    #[inline]
    fn drop(&mut self) {
        unsafe {
            if let Some(release) = self.0.release {
                release(&mut self.0);
            }
        }
    }
}

impl std::fmt::Debug for Tree {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.root().fmt(f)
    }
}

/// What a call takes a batch, an object or a state as: a [`Tree`] is moved in, and gone on every return; a `&Tree` is lent, and copied
/// where the strategy keeps it longer than the call.
pub trait Batch: sealed::Batch {}
impl Batch for Tree {}
impl Batch for &Tree {}

pub(crate) mod sealed {
    use super::{Tree, sys};

    pub trait Batch {
        /// As the struct that the call takes a pointer to, and what owns it meanwhile.
        fn argument(self) -> Argument;
    }

    /// Emptied by a call that took it; what such a call refused to read is released here.
    pub struct Argument(sys::stg_tree);

    impl Argument {
        #[inline]
        pub fn as_mut_raw(&mut self) -> *mut sys::stg_tree {
            &mut self.0
        }
    }

    impl Drop for Argument {
        #[inline]
        fn drop(&mut self) {
            if self.0.release.is_some() {
                drop(Tree(std::mem::replace(&mut self.0, unsafe { std::mem::zeroed() })));
            }
        }
    }

    impl Batch for Tree {
        #[inline]
        fn argument(self) -> Argument {
            Argument(self.into_raw())
        }
    }

    impl Batch for &Tree {
        #[inline]
        fn argument(self) -> Argument {
            Argument(sys::stg_tree { root: self.0.root, release: None, owner: std::ptr::null_mut() })
        }
    }
}
